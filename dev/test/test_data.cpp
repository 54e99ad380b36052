// Tests of data/ and of what run/ reads and writes: log, checkpoints, tokenizer, loader, questions.
// Each file is damaged in every way, and the one line of the error is read.
#include <sys/resource.h>

#include <array>
#include <climits>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <set>

#include "common/threads.h"
#include "data/file.h"
#include "data/loader.h"
#include "data/text.h"
#include "data/tokenizer.h"
#include "dev/test/program.h"
#include "run/checkpoint_files.h"
#include "run/log.h"

namespace fs = std::filesystem;
using Strings = std::vector<std::string>;
using Tokens = std::vector<int>;

// -------------------------------------------------------------------------------------------------
// Helpers

namespace {

// A new folder.
std::string folder() {
    static int made = 0;
    const std::string path = format("%s/%d", dir().c_str(), made++);
    fs::create_directory(path);
    return path;
}

Tokens counting(size_t n, int first = 0) {
    Tokens tokens(n);
    std::iota(tokens.begin(), tokens.end(), first);
    return tokens;
}

// Bytes without a pattern.
std::string noise(size_t bytes) {
    std::string data(bytes, '\0');
    for (size_t i = 0; i < bytes; i++)
        data[i] = static_cast<char>(i * 2654435761u >> 13);
    return data;
}

// A good file, which is written when this is made, and its reader. Whatever is changed in the file,
// the reader must name the file and say what is wrong.
struct GoodFile {
    std::function<void(const std::string& path)> write;
    std::function<void(const std::string& path)> read;
    size_t version_at = 4;      // offset of the version
    bool has_checksum = false;  // of all its bytes
    std::string path = folder() + "/file.bin";
    std::string bytes = write_good();

    std::string write_good() const {
        write(path);
        return read_file(path);
    }

    // Reading these bytes instead must fail with an error that has this part.
    void check(const std::string& changed, const std::string& part,
               int line = __builtin_LINE()) const {
        write_file(path, changed);
        const std::string error = test::error_of([&] { read(path); });
        test::check_error(__FILE__, line, error, path + ": ");
        test::check_error(__FILE__, line, error, part);
    }

    // The same with this value at an offset. Its type says how many bytes it replaces.
    template <class Value>
    void poke(size_t offset, Value value, const std::string& part,
              int line = __builtin_LINE()) const {
        std::string changed = bytes;
        std::memcpy(&changed[offset], &value, sizeof value);
        check(changed, part, line);
    }
};

}  // namespace

// -------------------------------------------------------------------------------------------------
// Log

TEST(log_json) {
    const Row row = Row("train")
                        .add("step", 3)
                        .add("tiny", 1e-300)
                        .add("third", 1.0 / 3)
                        .add("sum", 0.1 + 0.2)
                        .add("nan", std::nan(""))
                        .add("inf", -INFINITY)
                        .add("big", 9007199254740993LL)
                        .add("yes", true)
                        .add("name", "d12");
    CHECK(row.text() ==
          "{\"kind\": \"train\", \"step\": 3, \"tiny\": 1e-300, \"third\": 0.3333333333333333, "
          "\"sum\": 0.30000000000000004, \"nan\": null, \"inf\": null, \"big\": 9007199254740993, "
          "\"yes\": true, \"name\": \"d12\"}");

    const std::pair<std::string, std::string> cases[] = {
        {"a\"b\\c\n\t\r", "a\\\"b\\\\c\\n\\t\\u000d"},
        {std::string("\0\x1f\x7f", 3), "\\u0000\\u001f\\u007f"},
        {"é€😀\xE2\x82\"z\xFF", "é€😀\\ufffd\\ufffd\\\"z\\ufffd"}};
    for (const auto& [value, json] : cases)
        CHECK(Row("k").add("s", value).text() == "{\"kind\": \"k\", \"s\": \"" + json + "\"}");
}

TEST(minutes_and_seconds_are_whole) {
    const std::pair<double, const char*> cases[] = {
        {0, "0:00"}, {59.96, "0:59"}, {60, "1:00"}, {119.5, "1:59"}, {3600 * 25 + 7.9, "1500:07"}};
    for (const auto& [seconds, text] : cases)
        CHECK(minutes(seconds) == text);
}

// What a byte-level model may sample must not change a terminal's state, nor end a C string.
TEST(text_for_a_terminal) {
    const std::string bad = "\xEF\xBF\xBD";
    CHECK(for_terminal("One day,\n\tshe “ran” 😀") == "One day,\n\tshe “ran” 😀");
    CHECK(for_terminal(std::string("a\0\x1b[2J\r\x7f", 8)) == "a" + bad + bad + "[2J" + bad + bad);
    CHECK(for_terminal("\xC2\x9B\x32J\xC2\xA0") == bad + "2J\xC2\xA0");  // U+009B is ESC [ too
}

// A text that comes byte by byte is shown as soon as a character is whole.
TEST(text_for_a_terminal_in_pieces) {
    for (const std::string text :
         {"“ran” é😀", "\xF0\x9F\xE2\x82z\x80\xC2", "\x80\xED\xA0\x80\xE2\x82\xFF"}) {
        std::string rest;
        std::string shown;
        for (const char byte : text) {
            rest += byte;
            shown += take_for_terminal(rest);
            CHECK(for_terminal(text).compare(0, shown.size(), shown) == 0);
            CHECK(rest.size() <= 3);
        }
        CHECK(shown + for_terminal(rest) == for_terminal(text));
    }
}

// dev/test_faults tests what a crash or a full disk does to a log.
TEST(log_truncate) {
    const std::string path = folder() + "/log.jsonl";
    const Row start = Row("start").add("note", "a string with \"step\": 99 in it");
    const Row first = Row("train").add("step", 1);
    const Row second = Row("train").add("step", 2);
    const auto lines = [](const std::vector<std::string>& rows) {
        std::string text;
        for (const std::string& row : rows)
            text += row + "\n";
        return text;
    };
    const std::string kept = lines({start.text(), first.text()});
    Log log(path);
    for (const Row& row : {start, first, second, Row("val").add("step", 2)})
        log.write(row);
    Log::truncate_after(path, 1);
    CHECK(read_file(path) == kept);
    log.write(second);  // into the same file, which only became shorter
    CHECK(read_file(path) == kept + lines({second.text()}));

    // A row "run" has no step and goes with the row before it. Here the first one, of a run that
    // resumed from step 1, stays. The second one, of a run that resumed from step 2, is dropped.
    const std::string resumed = Row("run").add("gpus", 1).text();
    write_file(path, kept + lines({resumed, second.text(), resumed, "{\"step\": 3}"}));
    Log::truncate_after(path, 1);
    CHECK(read_file(path) == kept + lines({resumed}));

    // A row without its line end is whole.
    write_file(path, kept.substr(0, kept.size() - 1));
    Log::truncate_after(path, 1);
    CHECK(read_file(path) == kept);
}

// The program writes no such rows, but users may.
TEST(log_rows_that_are_json_are_kept) {
    const std::string path = folder() + "/log.jsonl";
    const std::string first = Row("train").add("step", 1).text();
    for (const std::string row :
         {"{}", " {\"a\" : [1, -0.5e+3, 0, 1E-9 , {\"b\": []}] , \"c\":null}\r",
          "{\"kind\": \"é\\u00e9\\n\\\\\", \"x\": true, \"y\": false}"}) {
        write_file(path, row + "\n" + first + "\n");
        Log::truncate_after(path, 1);
        CHECK(read_file(path) == row + "\n" + first + "\n");
    }
}

// What `code` writes to stderr.
template <class F>
static std::string stderr_of(F code) {
    const std::string path = folder() + "/said";
    const int screen = dup(STDERR_FILENO);
    CHECK(std::freopen(path.c_str(), "w", stderr) != nullptr);
    code();
    std::fflush(stderr);
    dup2(screen, STDERR_FILENO);
    close(screen);
    return read_file(path);
}

// A crash leaves half a row, a power cut zeros, and a disk anything.
TEST(log_rows_that_are_no_json_are_dropped) {
    const std::string path = folder() + "/log.jsonl";
    const std::string first = Row("train").add("step", 1).text();
    const Strings bad = {"",
                         "{\"kind\": \"tr",
                         "{\"kind\": \"tr{\"kind\": \"train\", \"step\": 1}",
                         std::string(9, '\0'),
                         "1",
                         "[{}]",
                         "{\"a\": 01}",
                         "{\"a\": nan}",
                         "{\"a\": 1.}",
                         "{\"a\": 1,}",
                         "{\"a\" 1}",
                         "{a: 1}",
                         "{\"a\": \"\\x\"}",
                         "{\"a\": \"\\u12\"}",
                         "{\"a\": \"\t\"}",
                         "{\"a\": \"\xFF\"}",
                         "{\"a\": 1}}",
                         "{\"a\": [1}",
                         "{\"a\": " + std::string(100000, '[')};
    const std::string warnings = stderr_of([&] {
        for (const std::string& row : bad) {
            write_file(path, first + "\n" + row + "\n" + row + "\n" + first + "\n" + row);
            Log::truncate_after(path, 1);
            if (read_file(path) != first + "\n" + first + "\n")
                test::report(__FILE__, __LINE__, "kept, or kept too little: " + row.substr(0, 40));
        }
    });
    CHECK(contains(warnings, path));
    CHECK(contains(warnings, " 3 rows"));
}

// -------------------------------------------------------------------------------------------------
// Threads

// A container's quota counts like fewer cores, and so do the quotas of the groups that it is in.
TEST(cpu_quotas) {
    const std::string groups = folder();
    const auto quota = [&](const char* group) { return cpu_quota(groups, group); };
    fs::create_directories(groups + "/slice/job");
    CHECK(quota("/") == 0);
    CHECK(quota("/slice/job") == 0);

    write_file(groups + "/slice/cpu.max", "max 100000\n");
    CHECK(quota("/slice/job") == 0);

    write_file(groups + "/slice/job/cpu.max", "250000 100000\n");
    CHECK(quota("/slice/job") == 3);
    CHECK(quota("/slice") == 0);
    CHECK(quota("/") == 0);

    write_file(groups + "/slice/cpu.max", "10000 50000\n");
    CHECK(quota("/slice/job") == 1);
    CHECK(quota("/slice/other") == 1);

    write_file(groups + "/cpu.max", "200000 100000\n");
    CHECK(quota("/") == 2);
}

TEST(the_number_of_threads_that_is_printed) {
    const std::string text = folder() + "/text";
    write_file(text, std::string(1000, 'x'));
    const std::string train =
        "./train_gpt2cu --device cpu -e tiny -x 0 -v 0 -s 0 -b 1 -t 16 -i " + text;
    for (const std::string one : {"OMP_NUM_THREADS=1 ", "OMP_THREAD_LIMIT=1 ", "taskset -c 0 "})
        CHECK_RUN(shell("unset OMP_NUM_THREADS OMP_THREAD_LIMIT; env " + one + train), 0,
                  "CPU, 1 thread,");
}

// -------------------------------------------------------------------------------------------------
// Files written whole or not at all, and their checksum

// The values are pinned, because files on disk depend on them.
TEST(checksum) {
    const std::string data = noise(1000);
    uint64_t all = 0;  // of all lengths up to 100, at odd addresses too
    for (size_t n = 0; n <= 100; n++)
        all = checksum64(&data[n], n, all);
    CHECK(all == 0xdd0847526e6d1e41u);
    CHECK(checksum64(data.data(), 1000, 5) == 0xe645477def5dce9du);
    Checksum64 in_pieces(1000, 5);
    for (size_t at = 0; at < 1000; at += 96)
        in_pieces.add(&data[at], std::min<size_t>(96, 1000 - at));
    CHECK(in_pieces.value() == 0xe645477def5dce9du);
}

// dev/test_faults has what a crash or a full disk leaves at every point.
TEST(atomic_file) {
    const std::string here = folder();
    const std::string path = here + "/out.bin";
    // from a process with the same number
    write_file(temporary_path(path), std::string(4 << 20, 'x'));
    const std::string large = noise(3 << 20);  // is written in pieces
    write_whole_file(path,
                     {{"small", 5}, {large.data(), large.size()}, {"", 0}, {"0123456789", 10}});
    CHECK(read_file(path) == "small" + large + "0123456789");
    CHECK(shell("ls " + here).out == "out.bin\n");

    fs::create_directory(here + "/taken");
    CHECK_ERROR(write_whole_file(here + "/taken", {}),
                here + "/taken: cannot open: Is a directory");
}

TEST(others_may_read_what_the_umask_allows) {
    const std::string path = folder() + "/out.bin";
    const mode_t mask = umask(022);
    write_whole_file(path, {{"new", 3}});
    umask(mask);
    CHECK(read_file(path) == "new");
    CHECK(static_cast<int>(fs::status(path).permissions()) == 0644);
}

// -------------------------------------------------------------------------------------------------
// Model, state, tokenizer and questions

static const ModelHeader kTiny = {
    .dtype = DType::f32, .config = {.max_T = 16, .V = 50, .Vp = 128, .L = 2, .NH = 2, .C = 8}};

TEST(model_round_trip) {
    const std::string path = folder() + "/model.bin";
    ModelHeader bf16 = kTiny;
    ModelHeader longer = kTiny;
    bf16.dtype = DType::bf16;
    longer.config.max_T = 262144;
    for (const ModelHeader& h : {kTiny, bf16, longer}) {
        const std::string parameters = noise(h.bytes());
        std::string back(parameters.size(), 'x');
        write_model(path, h, parameters.data());

        const int version = h.dtype == DType::f32 ? 3 : 5;
        CHECK(read_file(path) ==
              header_of({20240326, version, h.config.max_T, 50, 2, 2, 8, 128}) + parameters);
        const ModelHeader got = read_model_header(path);
        CHECK(!std::memcmp(&got, &h, sizeof h));
        InputFile(path).read(kHeaderBytes, back.data(), got.bytes());
        CHECK(back == parameters);
    }
}

static GoodFile good_model() {
    return {
        .write =
            [](const std::string& path) { write_model(path, kTiny, noise(kTiny.bytes()).data()); },
        .read =
            [](const std::string& path) {
                const ModelHeader header = read_model_header(path);
                std::string parameters(header.bytes(), 0);
                InputFile(path).read(kHeaderBytes, parameters.data(), header.bytes());
            }};
}

TEST(model_errors) {
    const GoodFile file = good_model();
    const int magic_at = 0;
    const int max_T_at = 8;  // the first of the six sizes
    const int layers_at = 16;
    const int heads_at = 20;
    const int padded_vocabulary_at = 28;
    const int bf16_version = 5;

    file.poke(magic_at, 20240520, "offset 0: expected 20240326, found 20240520");
    file.poke(file.version_at, bf16_version,
              "too long: expected 6848 bytes (bf16, L=2 NH=2 C=8 V=50), found 12672");
    int offset = max_T_at;
    for (const char* field :
         {"maxT", "vocabulary", "layers", "heads", "channels", "padded vocabulary"}) {
        for (const int bad : {0, -1, INT_MIN, INT_MAX})
            file.poke(offset, bad, format("%s at offset %d: expected ", field, offset));
        offset += 4;
    }
    file.poke(heads_at, 3, "channels at offset 24: expected a multiple of 3 heads, found 8");
    file.poke(padded_vocabulary_at, 49,
              "padded vocabulary at offset 28: expected 50..16777216, found 49");
    file.poke(layers_at, 3,
              "truncated: expected 16160 bytes (fp32, L=3 NH=2 C=8 V=50), found 12672");
}

static const std::string kOptimizer = noise(240);
static const Counters kCounters = {1234, 77, {3, 14, 15}};
static const Identity kRun = {{{"model", "d12"}, {"B", "4"}, {"data", "00ff"}, {"note", ""}},
                              {{"-l", "0.1"}}};

// Reads the optimizer in two pieces, as a resumed run may. `optimizer` has the size that the run
// expects.
static std::unique_ptr<StateFile> read_state(const std::string& path, const Identity& run,
                                             std::string& optimizer) {
    auto file = std::make_unique<StateFile>(path, run, optimizer.size());
    StateFile& state = *file;
    const size_t middle = 64;
    for (const auto& [begin, end] : {std::pair{size_t(0), middle}, {middle, optimizer.size()}}) {
        state.file.read(state.begin + begin, &optimizer[begin], end - begin);
        state.add(&optimizer[begin], end - begin);
    }
    state.check();
    return file;
}

static GoodFile good_state() {
    return {.write =
                [](const std::string& path) {
                    write_state(path, kRun, kCounters, {kOptimizer.data(), kOptimizer.size()});
                },
            .read =
                [](const std::string& path) {
                    std::string optimizer(kOptimizer.size(), 'x');
                    const auto read = read_state(path, kRun, optimizer);
                    if (optimizer != kOptimizer ||
                        std::memcmp(&read->counters, &kCounters, sizeof kCounters))
                        throw Error("read something else");
                },
            .version_at = 29,
            .has_checksum = true};
}

TEST(state_errors) {
    const GoodFile file = good_state();
    CHECK(file.bytes.find("gpt2 training state, version 2\nidentity model: d12\nidentity B: 4\n") ==
          0);
    const std::array<int32_t, 2> of_a_model = {20240326, 3};  // magic and version
    file.poke(0, of_a_model, "wrong magic at offset 0: expected ");
    const std::string version_1_magic = "gpt2stat";  // after which its version is an int
    file.check(version_1_magic + bytes_of<int32_t>({1}) + file.bytes.substr(12),
               "wrong version at offset 8: expected 2, found 1");
    file.poke(file.version_at, '3', "wrong version at offset 29: expected 2, found 3");

    const size_t last_byte = file.bytes.size() - 1;
    const size_t digit_of_window = file.bytes.find("window: 14") + std::strlen("window: ");
    file.poke(last_byte, 'x', "damaged: expected ");
    file.poke(digit_of_window, '2', "damaged: expected ");
}

// Nothing is read of a state that does not fit the run.
TEST(states_of_other_runs) {
    const std::string path = good_state().path;
    const Fields& fields = kRun.fields;
    const struct {
        Fields fields;
        std::string error;
    } cases[] = {{{fields[0], fields[1], fields[2], fields[3], {"T", "64"}},
                  "T is \"nothing\" in the checkpoint, but \"64\" in this run"},
                 {{fields[1], fields[2], fields[3]},
                  "model is \"d12\" in the checkpoint, but \"nothing\" in this run"},
                 {{fields[0], {"B", "8"}, fields[2], fields[3]},
                  "B is \"4\" in the checkpoint, but \"8\" in this run"}};
    for (const auto& c : cases) {
        std::string optimizer(kOptimizer.size(), '?');
        CHECK_ERROR(read_state(path, {c.fields}, optimizer), c.error);
        CHECK(optimizer == std::string(kOptimizer.size(), '?'));
    }
    std::string shorter(kOptimizer.size() - 4, '?');
    CHECK_ERROR(read_state(path, kRun, shorter), "expected 236 bytes, found 240");
    CHECK(shorter == std::string(shorter.size(), '?'));
}

TEST(states_that_are_older_than_a_field) {
    const std::string path = good_state().path;
    Identity newer = kRun;
    newer.implied = {{"optimizer", "adamw"}};
    newer.fields.push_back({"optimizer", "muon"});
    std::string optimizer(kOptimizer.size(), '?');
    CHECK_ERROR(read_state(path, newer, optimizer),
                "optimizer is \"adamw\" in the checkpoint, but \"muon\" in this run");
    newer.fields.back().value = "adamw";
    read_state(path, newer, optimizer);
    CHECK(optimizer == kOptimizer);
}

TEST(states_of_another_recipe) {
    const std::string path = good_state().path;
    const Identity faster = {kRun.fields, {{"-l", "0.2"}, {"-u", "5"}}};
    std::string optimizer(kOptimizer.size(), '?');
    CHECK(read_state(path, faster, optimizer)->recipe_changes ==
          "-l from 0.1 to 0.2, -u from nothing to 5");
}

// An output directory that cannot be read is not an empty one.
TEST(a_directory_that_cannot_be_listed) {
    const std::string loop = folder() + "/loop";
    fs::create_symlink(loop, loop);
    CHECK_ERROR(newest_model(loop), loop + ": cannot list the directory");
    CHECK_ERROR(checkpoint_to_resume(loop), loop + ": cannot list the directory");
    CHECK(checkpoint_to_resume(folder() + "/none") == -1);
}

TEST(tokenizer_bytes) {
    // GPT-2's encoder.json has the printable bytes in order, then the other bytes in order.
    std::string text;
    for (const auto& [first, last] : {std::pair<int, int>{'!', '~'},
                                      {0xA1, 0xAC},
                                      {0xAE, 0xFF},
                                      {0, ' '},
                                      {0x7F, 0xA0},
                                      {0xAD, 0xAD}})
        for (int byte = first; byte <= last; byte++)
            text += static_cast<char>(byte);
    CHECK(encode_bytes(text) == counting(256));

    const Tokenizer tokenizer;
    std::string back;
    for (const int token : counting(256))
        back += tokenizer.decode(token);
    CHECK(back == text);
    for (const int none : {-1, 256, 1234})
        CHECK(tokenizer.decode(none) == format("<%d>", none));
    CHECK(tokenizer.decode(50256) == "<|endoftext|>");
}

static GoodFile good_tokenizer() {
    return {.write =
                [](const std::string& path) {
                    write_file(path, tokenizer_file(2, {"a", "bc", "def"}));
                },
            .read =
                [](const std::string& path) {
                    const Tokenizer tokenizer(path);
                    for (int i = -1; i < 300; i++)
                        tokenizer.decode(i);
                }};
}

TEST(tokenizer_files) {
    const std::string path = folder() + "/tokenizer.bin";
    Strings pieces = {"a", std::string("\0\xFF", 2), " the", std::string(255, 'x'), "€"};
    pieces.resize(300, "piece");
    for (const int version : {1, 2}) {
        write_file(path, tokenizer_file(version, pieces));
        const Tokenizer tokenizer(path);
        for (size_t i = 0; i < pieces.size(); i++)
            CHECK(tokenizer.decode(i) == pieces[i]);
        for (const int none : {300, 50256, -1})
            CHECK(tokenizer.decode(none) == format("<%d>", none));
    }
}

TEST(tokenizer_errors) {
    const GoodFile file = good_tokenizer();
    const size_t tokens_at = 8;
    const size_t end_of_text_at = 12;
    for (const int tokens : {0, 10, -1})
        file.poke(tokens_at, tokens, "number of tokens at offset 8: expected 1..9 (");
    file.poke(tokens_at, 4, "truncated in token 3 of 4 at offset 1033: expected 1 bytes, found 0");
    file.poke(end_of_text_at, 3, "id of <|endoftext|> at offset 12: expected less than 3, found 3");
}

// A token of a shard has 16 bits.
TEST(tokenizers_have_at_most_65536_tokens) {
    const std::string path = folder() + "/tokenizer.bin";
    Strings many(65536, "piece");
    write_file(path, tokenizer_file(2, many));
    CHECK(Tokenizer(path).decode(65535) == "piece");
    many.push_back("one too many");
    write_file(path, tokenizer_file(2, many));
    CHECK_ERROR(Tokenizer(path).decode(0), path + ": number of tokens at offset 8");
}

static std::string pairs_file(const Strings& merges) {
    return write_tokenizer(folder() + "/pairs.bin", merges);
}

// A text's tokens, each after a bar.
static std::string pieces_of(const Tokenizer& tokenizer, const std::string& text) {
    std::string pieces;
    for (const int token : tokenizer.encode(text, 50257, ""))
        pieces += "|" + tokenizer.decode(token);
    return pieces;
}
static void check_pieces(const Tokenizer& tokenizer, const std::string& text,
                         const std::string& expected) {
    const std::string pieces = pieces_of(tokenizer, text);
    if (pieces != expected)
        test::report(__FILE__, __LINE__, text + ": expected " + expected + ", found " + pieces);
}

// The last one has no bytes. A file may have such a token, but no text does.
static const Strings kMerges = {"bc",   "ab", "cd", "abcd", "aa",   "n'", "'t",  "'tt", "re",
                                "'re",  " a", "a1", "1a",   "11",   "!!", "a!",  "  ",  " \n",
                                "\n\n", "é",  "<|", "|>",   "aare", "ef", "efg", ""};

// dev/test/test_prepare.py compares with tiktoken.
TEST(tokenizer_encodes_pairs) {
    const Tokenizer tokenizer(pairs_file(kMerges));
    const std::pair<const char*, const char*> cases[] = {
        {"abc", "|a|bc"},       // the merge that was learnt first, not the first in the text
        {"abcd", "|abcd"},      // a word that is a token is that token, even if no merges make it
        {"aaaaa", "|aa|aa|a"},  // the leftmost of equals
        {"aareb", "|aare|b"},   // the right part comes last
        {"efgg", "|efg|g"},     // the left part grows
        {"n'tt 'treb'RE're", "|n|'t|t| |'|t|re|b|'|R|E|'re"},
        {"a a  a\n a \n\n a  ", "|a| a| | a|\n| a| \n|\n| a|  "},
        {"a11a!!a a!", "|a|11|a|!!|a| a|!"},
        {"éa\u0301a", "|é|a|\xCC|\x81|a"},
        {"<|a|>", "|<||a||>"},
        {"a\na\tb", "|a|\n|a|\t|b"},  // white space that is one character is a word
    };
    for (const auto& [text, pieces] : cases) {
        check_pieces(tokenizer, text, pieces);
        for (const int vocab : {kByteVocab, 50256})
            CHECK(tokenizer.encode(text, vocab, "") == encode_bytes(text));
    }
}

TEST(tokenizer_encodes_long_words) {
    const Tokenizer tokenizer(pairs_file(kMerges));
    for (const char c : {'a', '\n'})  // in square time this would take minutes
        CHECK(tokenizer.encode(std::string(400000, c), 50257, "").size() == 200000);
}

// A lone continuation, overlong, cut, a surrogate, past U+10FFFF, never a lead byte.
TEST(tokenizer_refuses_what_is_not_utf8) {
    const Tokenizer tokenizer(pairs_file(kMerges));
    for (const std::string bad :
         {"\x80", "\xC1\xBF", "\xC3!", "\xE0\x9F\xBF", "\xE2\x82", "\xED\xA0\x80",
          "\xF0\x8F\xBF\xBF", "\xF0\x9F\x99", "\xF4\x90\x80\x80", "\xF8\x88\x80\x80\x80", "\xFF"})
        CHECK_ERROR(tokenizer.encode("é " + bad, 50257, "book.txt"),
                    format("book.txt: invalid UTF-8 at offset 3: found byte 0x%02x",
                           static_cast<unsigned char>(bad[0])));
}

TEST(tokenizers_that_do_not_fit_are_named) {
    const std::string path = folder() + "/tokenizer.bin";
    write_file(path, tokenizer_file(2, {"a", "bc", ""}));
    CHECK_ERROR(Tokenizer(path).encode("a b", 50257, ""), path + ": has no token for byte 0x20");
    write_file(path, tokenizer_file(2, Strings(50258, "a")));
    CHECK_ERROR(Tokenizer(path).encode("a", 50257, ""),
                path + ": has 50258 tokens, but the model's vocabulary has 50257");
}

// GPT-2's pattern cuts these seven endings off from whatever follows them, and cuts off no others.
// Here each is a token, and so are the pieces that wrong cuts would make, so that a text that is
// cut elsewhere has other tokens.
TEST(tokenizer_cuts_contractions) {
    const Strings endings = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    Strings merges;
    for (const std::string ending :
         {"s", "t", "re", "ve", "m", "ll", "d", "S", "T", "RE", "VE", "M", "LL", "D", "x"}) {
        merges.push_back(ending);
        merges.push_back(ending + "ab");
        merges.push_back("'" + ending);
        merges.push_back(" '" + ending);
    }
    const Tokenizer tokenizer(pairs_file(merges));
    const auto check = [&](const std::string& text, const std::string& expected) {
        check_pieces(tokenizer, text, expected);
    };

    for (const std::string& ending : endings) {
        std::string upper = ending;
        for (char& c : upper)
            c = static_cast<char>(std::toupper(c));
        const std::string letters = ending.substr(1);

        check("x" + ending, "|x|" + ending);                  // at the end
        check(ending, "|" + ending);                          // alone
        check(ending + "ab", "|" + ending + "|a|b");          // before letters
        check(ending + ending, "|" + ending + "|" + ending);  // before another
        check(ending + " x", "|" + ending + "| |x");
        check("x" + upper + "ab", "|x|'|" + upper.substr(1) + "ab");  // upper case is none
        check(" " + ending + "ab", "| |'|" + letters + "ab");    // a space takes the apostrophe
        check("''" + letters + "ab", "|'|'|" + letters + "ab");  // and so does a second apostrophe
    }
    check("'xab", "|'|xab");
}

static const std::vector<Question> kQuestions = {{7, 1, {5, 6, 7}, {{1}, {2, 3}, {4, 4, 4}, {9}}},
                                                 {8, 0, {256}, {{0}, {250, 3}}}};
static GoodFile good_questions() {
    return {.write = [](const std::string& path) { write_questions(path, kQuestions); },
            .read = [](const std::string& path) { read_questions(path, 257, 64); }};
}

TEST(questions) {
    const GoodFile file = good_questions();
    const size_t longest = 40;  // bytes of an example
    CHECK(file.bytes.compare(0, 1024, header_of({20240522, 1, 2, longest})) == 0);
    const std::vector<Question> read = read_questions(file.path, 257, 64);
    CHECK(read.size() == 2);
    for (size_t i = 0; i < read.size(); i++) {
        const auto parts = [](const Question& q) {
            return std::tie(q.index, q.label, q.context, q.endings);
        };
        CHECK(parts(read[i]) == parts(kQuestions[i]));
    }
}

TEST(questions_that_do_not_fit_the_model) {
    const std::string path = good_questions().path;
    CHECK_ERROR(read_questions(path, 256, 64),
                path + ": token at offset 1076: expected 0..255, found 256");
    CHECK_ERROR(read_questions(path, 257, 4),
                "length of the example at offset 1024: expected at most T = 4 tokens");
    CHECK(read_questions(path, 257, 5).size() == 2);  // the last token is only predicted
}

TEST(questions_errors) {
    const GoodFile file = good_questions();
    const size_t start_at = 1024;
    const size_t label_at = 1030;
    const size_t endings_at = 1032;
    const uint16_t past_the_last = 4;  // of four endings
    file.poke(label_at, past_the_last, "number of endings at offset 1032: expected 5..64, found 4");
    file.poke(start_at, uint16_t(65471),
              "start of an example at offset 1024: expected 65535..65535, found 65471");
    file.poke(endings_at, uint16_t(68),
              "number of endings at offset 1032: expected 2..64, found 68");
    for (const char* more : {"x", "xx"})
        file.check(file.bytes + more, format("too long: expected %zu bytes", file.bytes.size()));
    write_questions(file.path, {});
    CHECK_ERROR(file.read(file.path), file.path + ": has no examples");

    // Without a token there is nothing to predict, and nothing to predict it from.
    write_questions(file.path, {{1, 0, {}, {{1}, {2}}}});
    CHECK_ERROR(file.read(file.path), "length of a context at offset 1034");
    write_questions(file.path, {{1, 0, {5}, {{1}, {}}}});
    CHECK_ERROR(file.read(file.path), "length of an ending at offset 1042");
}

// -------------------------------------------------------------------------------------------------
// Loader

namespace {

struct TestLoader : Loader {
    size_t B;
    size_t T;

    TestLoader(const Source& source, const LoaderOptions& options, const Tokenizer& tokenizer = {})
        : Loader(source, options, tokenizer), B(options.B), T(options.T) {}

    // The next B windows of T + 1 tokens. The targets are the inputs shifted by one.
    std::vector<Tokens> batch() {
        Tokens inputs(B * T, -7);
        Tokens targets(B * T, -7);
        next(inputs.data(), targets.data());
        std::vector<Tokens> windows;
        for (size_t at = 0; at < B * T; at += T) {
            const int* const in = &inputs[at];
            const int* const out = &targets[at];
            CHECK(std::equal(in + 1, in + T, out));
            windows.emplace_back(in, in + T);
            windows.back().push_back(out[T - 1]);
        }
        return windows;
    }
};

bool operator==(const LoaderState& a, const LoaderState& b) {
    return a.epoch == b.epoch && a.window == b.window && a.batches == b.batches;
}

// Shards of 41, 8, 23, 4 and 60 tokens, all different. With T = 4 they have
// 10 + 1 + 5 + 0 + 14 = 30 windows.
const std::vector<Tokens> kShards = {counting(41), counting(8, 1000), counting(23, 2000),
                                     counting(4, 3000), counting(60, 4000)};

std::string write_shards(const std::vector<Tokens>& shards) {
    const std::string path = folder();
    for (size_t i = 0; i < shards.size(); i++)
        write_shard(path + format("/train_%04zu.bin", i), shards[i]);
    return path + "/train_*.bin";
}

// Data that a loader reads, and the tokens that must be in it.
struct Data {
    std::string pattern;
    std::string description;  // how it begins
    std::vector<Tokens> shards;
    int vocab = 50257;
    Tokenizer tokenizer = {};
};

// Text files begin with the end of a text.
Tokens with_end_before(Tokens tokens) {
    tokens.insert(tokens.begin(), 50256);
    return tokens;
}

std::vector<Data> all_data() {
    std::string bytes("naïve €5 – 😀\n\r\t\x7F\xFF\xC3");
    for (int i = 1; i < 256; i++)
        bytes += static_cast<char>(i);
    const std::string text = folder() + "/text";
    write_file(text, bytes);
    const Tokens in_bytes = with_end_before(encode_bytes(bytes));

    const std::string book = folder() + "/book.txt";
    write_file(book, "It rained. It rained on.\n\nIt");
    const Tokenizer pairs(pairs_file({"It", " r", "ai", " rai", "ne"}));
    const Tokens in_pairs = with_end_before(pairs.encode(read_file(book), 50257, ""));

    const Tokens documents = {50256, 1, 2, 255, 50256, 3, 4, 50256, 9};
    return {{write_shards(kShards),
             "5 shards, 136 tokens; left out: 8 at the shards' ends, 4 in shards shorter than 5: ",
             kShards},
            {write_shards({documents}), "1 shard, 9 tokens", {documents}},
            {write_shards({documents}), "1 shard, 9 tokens", {documents}, kByteVocab},
            {text, "text file, 282 tokens", {in_bytes}, kByteVocab},
            {text, "text file, 282 tokens", {in_bytes}, 50304},
            {book, format("text file, %zu BPE tokens", in_pairs.size()), {in_pairs}, 50257, pairs}};
}

// The windows of T + 1 tokens that an epoch has, in the data's order.
std::vector<Tokens> windows_of(const Data& data, size_t T) {
    std::vector<Tokens> windows;
    for (Tokens shard : data.shards) {
        if (data.vocab == kByteVocab)
            std::replace(shard.begin(), shard.end(), 50256, 256);
        for (size_t at = 0; at + T < shard.size(); at += T)
            windows.emplace_back(&shard[at], &shard[at] + T + 1);
    }
    return windows;
}

// Three epochs of data, which may end inside batches.
struct ThreeEpochs {
    Data data;
    bool shuffle;
    static constexpr int T = 4;
    std::vector<Tokens> windows = windows_of(data, T);
    size_t n = windows.size();  // in an epoch
    size_t B = std::min<size_t>(n, 4);
    size_t batches = (3 * n + B - 1) / B;
    LoaderOptions options = {
        .B = static_cast<int>(B), .T = T, .vocab = data.vocab, .shuffle = shuffle, .seed = 3};

    LoaderState state_before(size_t batch) const {
        return {.epoch = B * batch / n, .window = B * batch % n, .batches = batch};
    }

    // Reads all batches. Checks the loader's state before each, and that it can start over.
    std::vector<std::vector<Tokens>> read_and_check() const {
        TestLoader loader(data.pattern, options, data.tokenizer);
        CHECK(loader.windows() == n);
        CHECK(loader.description().find(data.description) == 0);
        std::vector<std::vector<Tokens>> all;
        for (size_t i = 0; i < batches; i++) {
            CHECK(loader.state() == state_before(i));
            all.push_back(loader.batch());
        }
        loader.reset();
        CHECK(loader.batch() == all[0]);
        return all;
    }
};

// Each epoch has every window once, in order if the data is not shuffled.
void check_epochs(const ThreeEpochs& e) {
    std::vector<Tokens> read;
    for (const std::vector<Tokens>& batch : e.read_and_check())
        read.insert(read.end(), batch.begin(), batch.end());
    std::vector<Tokens> expected = e.windows;
    if (e.shuffle)
        std::sort(expected.begin(), expected.end());
    for (size_t epoch = 0; epoch < 3; epoch++) {
        std::vector<Tokens> windows(&read[epoch * e.n], &read[epoch * e.n] + e.n);
        if (e.shuffle)
            std::sort(windows.begin(), windows.end());
        CHECK(windows == expected);
    }
}

// From any point, a new loader and one that was somewhere else continue with the same batches. So
// does one that skips batches, as a rank does those of other ranks.
void check_continues(const ThreeEpochs& e) {
    const std::vector<std::vector<Tokens>> all = e.read_and_check();
    TestLoader other(e.data.pattern, e.options, e.data.tokenizer);
    for (size_t from = 0; from < e.batches; from++) {
        TestLoader resumed(e.data.pattern, e.options, e.data.tokenizer);
        resumed.restore(e.state_before(from));
        for (size_t i = from; i < e.batches; i++) {
            CHECK(resumed.batch() == all[i]);
            other.restore(e.state_before(from));
            other.skip(i - from);
            CHECK(other.state().batches == i);
            CHECK(other.batch() == all[i]);
        }
    }
}

}  // namespace

TEST(loader_reads_each_window_in_each_epoch) {
    for (const Data& data : all_data())
        for (const bool shuffle : {false, true})
            check_epochs({data, shuffle});
}

TEST(loader_continues_from_any_point) {
    for (const Data& data : all_data())
        for (const bool shuffle : {false, true})
            check_continues({data, shuffle});
}

TEST(loader_refuses_a_window_past_the_end) {
    TestLoader loader(write_shards(kShards), {.B = 4, .T = 4});
    CHECK_ERROR(loader.restore({.window = 30}), "sequence 30");
}

// A checkpoint has a position in this order, so the order must never change. When it was chosen,
// the orders of seeds, epochs and shards differed as random ones do, and all windows came first
// about equally often.
TEST(loader_shuffle) {
    uint64_t orders = 0;
    for (const std::vector<Tokens>& shards :
         {kShards, {counting(101), counting(101, 1000)}, {counting(4001)}})
        for (int seed = 0; seed < 9; seed++) {
            TestLoader loader(write_shards(shards),
                              {.B = 10, .T = 4, .shuffle = true, .seed = uint64_t(seed)});
            for (int i = 0; i < 300; i++)
                for (const Tokens& window : loader.batch())
                    orders = checksum64(&window[0], sizeof(int), orders);
        }
    CHECK(orders == 0xfbee78cd2c2c5c8du);
}

static GoodFile good_shard() {
    return {.write = [](const std::string& path) { write_shard(path, counting(17)); },
            .read =
                [](const std::string& path) {
                    TestLoader loader(path, {.B = 2, .T = 4});
                    for (int i = 0; i < 20; i++)
                        loader.batch();
                }};
}

TEST(shard_errors) {
    const GoodFile file = good_shard();
    const size_t magic_at = 0;
    const size_t tokens_at = 8;
    file.poke(magic_at, 20240326, "offset 0: expected 20240520, found 20240326; this is a model");
    file.poke(tokens_at, -1, "number of tokens at offset 8: expected 0..2147483647, found -1");
    file.poke(
        tokens_at, INT_MAX,
        "truncated: the header says 2147483647 tokens, expected 4294968318 bytes, found 1058");
    file.poke(tokens_at, 16,
              "too long: the header says 16 tokens, expected 1056 bytes, found 1058");
    file.check(file.bytes.substr(0, 1023),
               "truncated: expected a header of 1024 bytes, found a file of 1023");
}

// One window is enough for a loader, whatever B is. (Training wants B of them: run/batches.h.) The
// <|endoftext|> before a text counts as one of its tokens. A path that looks like a pattern, but
// exists, is that file.
TEST(data_that_is_just_enough) {
    const std::string here = folder();
    write_file(here + "/b.txt", "this is text, long enough for a batch or two");
    write_file(here + "/exact.md", "abcdefgh");  // 9 tokens
    for (const auto& [name, tokens] :
         {std::pair<const char*, size_t>{"/8", 8}, {"/9", 9}, {"/x[1].bin", 17}})
        write_shard(here + name, counting(tokens));
    for (const char* name : {"/b.txt", "/exact.md", "/8", "/9", "/x[1].bin"})
        TestLoader(here + name, {.B = 2, .T = 4});

    // an empty shard has no window
    const std::string pattern = write_shards({{}, counting(9), {}});
    CHECK(TestLoader(pattern, {.B = 1, .T = 4}).windows() == 2);
}

TEST(data_that_cannot_be_used_is_named) {
    const std::string here = folder();
    const std::string text = here + "/b.txt";
    write_file(text, "this is text, long enough for a batch or two");
    write_shard(here + "/4", counting(4));
    const std::string small = write_shards(std::vector<Tokens>(10, counting(4)));
    const std::pair<std::string, std::string> unusable[] = {
        {here + "/missing_*.bin", ": there is no such file"},
        {"", ": there is no such file"},
        {here, ": is a directory"},
        {here + "/4", ": too little data: 4 tokens in 1 file"},
        {small, ": too little data: 40 tokens in 10 files"}};  // no shard has a whole window
    for (const auto& [pattern, why] : unusable)
        CHECK_ERROR(TestLoader(pattern, {.B = 2, .T = 4}), pattern + why);

    write_shard(here + "/file.bin", counting(17));
    CHECK_ERROR(TestLoader(here + "/[bf]*", {.B = 2, .T = 4}), text + ": wrong magic at offset 0");
    CHECK_ERROR(TestLoader(text, {.B = 2, .T = 4, .vocab = 50256}),
                text + ": text needs a model with a vocabulary of 257 (bytes) or at least 50257");
}

// The second batch has a token past the vocabulary.
TEST(tokens_past_the_vocabulary_are_named) {
    const struct {
        int vocab;
        int limit;
        uint16_t token;
    } cases[] = {{kByteVocab, 256, 256}, {50304, 50304, 65535}, {50256, 50256, 50256}};
    const std::string path = folder() + "/shard.bin";
    for (const auto& c : cases) {
        std::vector<uint16_t> tokens(13);
        tokens[10] = c.token;
        write_file(path, header_of({20240520, 1, 13}) + bytes_of(tokens));
        TestLoader loader(path, {.B = 2, .T = 3, .vocab = c.vocab});
        loader.batch();
        CHECK_ERROR(
            loader.batch(),
            path +
                format(": token at offset 1044: expected 0..%d (the model's vocabulary), found %d",
                       c.limit - 1, c.token));
    }
}

TEST(data_that_becomes_shorter_is_named) {
    const std::string path = write_shard(folder() + "/shard.bin", counting(17));
    TestLoader loader(path, {.B = 2, .T = 4});
    fs::resize_file(path, 1030);
    CHECK_ERROR(loader.batch(), path + ": truncated: expected 10 bytes at offset 1024, found 6");
}

// Tokens in memory are the same data as a shard of them.
TEST(loader_reads_from_memory) {
    std::vector<uint16_t> tokens(41);
    for (size_t i = 0; i < tokens.size(); i++)
        tokens[i] = i % 10 ? i : kEndOfText;
    const std::string path = folder() + "/shard.bin";
    write_file(path, header_of({20240520, 1, 41}) + bytes_of(tokens));
    for (const int vocab : {kByteVocab, 50304}) {
        const LoaderOptions options = {.B = 3, .T = 4, .vocab = vocab, .shuffle = true, .seed = 7};
        TestLoader memory({"my tokens", tokens}, options);
        TestLoader shard(path, options);
        CHECK(memory.windows() == 10);
        CHECK(memory.description() == "my tokens, 41 tokens");
        for (int i = 0; i < 7; i++)
            CHECK(memory.batch() == shard.batch());
        CHECK(memory.state() == shard.state());
    }
    const uint64_t before = TestLoader({"my tokens", tokens}, {.T = 4}).identity();
    CHECK(TestLoader({"elsewhere", tokens}, {.B = 2, .T = 3}).identity() == before);
    CHECK_ERROR(TestLoader({"my tokens", tokens}, {.T = 4, .vocab = 256}),
                "my tokens: text needs a model with a vocabulary of 257");
    CHECK_ERROR(TestLoader({"my tokens", tokens}, {.T = 41}), "my tokens: too little data: 41");
    tokens[40]++;
    CHECK(TestLoader({"my tokens", tokens}, {.T = 4}).identity() != before);
}

// There are more shards than files that the process may have open.
TEST(loader_many_shards) {
    const std::string pattern = write_shards(std::vector<Tokens>(100, counting(5)));
    rlimit before;
    getrlimit(RLIMIT_NOFILE, &before);
    const rlimit few = {40, before.rlim_max};
    setrlimit(RLIMIT_NOFILE, &few);
    TestLoader loader(pattern, {.B = 8, .T = 2, .shuffle = true});
    for (int i = 0; i < 25; i++)
        loader.batch();
    CHECK(loader.description() == "100 shards, 500 tokens");
    CHECK((loader.state() == LoaderState{.epoch = 1, .window = 0, .batches = 25}));
    setrlimit(RLIMIT_NOFILE, &before);
}

TEST(loader_larger_than_2_gib) {
    const std::string path = folder() + "/large.bin";
    const int tokens = 2147000001;  // 4.3 GB, a hole before the last two windows
    const int T = 1000;
    std::vector<uint16_t> end(2 * T + 1);
    std::iota(end.begin(), end.end(), 100);
    write_file(path, header_of({20240520, 1, tokens}));
    if (truncate(path.c_str(), 1024 + 2 * (off_t(tokens) - 2 * T - 1)))
        SKIP("no sparse files here: %s", std::strerror(errno));
    std::ofstream(path, std::ios::app | std::ios::binary) << bytes_of(end);

    TestLoader loader(path, {.B = 2, .T = T});
    CHECK(loader.windows() == 2147000);
    CHECK(loader.description() == "1 shard, 2.1 G tokens");
    loader.restore({.epoch = 3, .window = 2146998});
    CHECK((loader.batch() == std::vector<Tokens>{counting(T + 1, 100), counting(T + 1, 100 + T)}));
    CHECK((loader.state() == LoaderState{.epoch = 4, .window = 0, .batches = 1}));
}

// -------------------------------------------------------------------------------------------------
// Text

static const std::string kEnd = "<|endoftext|>";
static const std::string kBom = "\xEF\xBB\xBF";  // a byte order mark in UTF-8

// The expected documents are written by hand after the rule of data/text.h.
TEST(documents_of_a_text) {
    const std::pair<std::string, Strings> cases[] = {
        {"one text\r\n", {"one text\r\n"}},
        {kBom + "a" + kBom, {"a" + kBom}},
        {"a\r\nb\r\n" + kEnd + "\r\nc\r\n", {"a\r\nb", "c\r\n"}},
        {"a\n\n" + kEnd + "\n\nb", {"a\n", "\nb"}},
        {kEnd + "\n" + kEnd + "a" + kEnd + kEnd + "b\r" + kEnd + "\rc\n" + kEnd + "\n",
         {"a", "b\r", "\rc"}},
        {" \n\t" + kEnd + "\xE2\x80\x83\x1C\x1F" + kEnd + "x", {"x"}},
        {"<|endoftext" + kEnd + "|>", {"<|endoftext", "|>"}},
        {"", {}}};
    for (const auto& [text, expected] : cases)
        CHECK(documents(text) == expected);
}

TEST(loader_reads_documents) {
    const std::string path = folder() + "/docs.txt";
    write_file(path, "ab\n" + kEnd + "\ncd");
    CHECK((TestLoader(path, {.T = 5, .vocab = kByteVocab}).batch() ==
           std::vector<Tokens>{{256, 64, 65, 256, 66, 67}}));

    // an offset counts from the beginning of the file
    write_file(path, "a" + kEnd + "b\xFF");
    CHECK_ERROR(TestLoader(path, {}, Tokenizer(pairs_file({"ab"}))),
                path + ": invalid UTF-8 at offset 15");
}

TEST(prompts_may_have_ends_of_texts) {
    const Tokenizer bytes;
    const Tokenizer pairs(pairs_file({"ab"}));
    CHECK((bytes.encode_prompt("a\n" + kEnd + "b" + kEnd, 50257, "") ==
           Tokens{64, 198, 50256, 65, 50256}));
    CHECK((bytes.encode_prompt(kEnd + "a", kByteVocab, "") == Tokens{256, 64}));
    CHECK((pairs.encode_prompt("ab" + kEnd, 50257, "") == Tokens{256, 50256}));
}

TEST(files_that_are_not_text_are_named) {
    const std::string path = folder() + "/docs.txt";
    for (const auto& [bytes, what] :
         {std::pair<std::string, const char*>{"\x93NUMPY and more", "NumPy"},
          {std::string("\x08\0\0\0\0\0\0\0{}", 10), "safetensors"},
          {"\x1F\x8B\x08", "gzip"},
          {"BZh91AY&SY", "bzip2"},
          {std::string("\xFD\x37zXZ\0\0", 7), "xz"},
          {"\x28\xB5\x2F\xFD\x04", "zstd"},
          {"PK\x03\x04\x14", "zip"},
          {"PAR1\x15", "Parquet"},
          {"%PDF-1.7\n", "PDF"},
          {std::string("\xFF\xFEh\0", 4), "UTF-16"},
          {std::string("\xFE\xFF\0h", 4), "UTF-16"},
          {std::string("\xFF\xFE\0\0h\0\0\0", 8), "UTF-32"},
          {std::string("\0\0\xFE\xFF\0\0\0h", 8), "UTF-32"},
          {std::string("h\0i\0", 4), "zero byte at offset 1"}}) {
        write_file(path, bytes);
        CHECK_ERROR(TestLoader(path, {}), what);
    }
}

// -------------------------------------------------------------------------------------------------
// Names of files

// A shell gives back what was quoted for it.
TEST(names_in_commands) {
    for (const std::string name : {"run1", "", "-x;&|", "it's $HOME `x` \"q\" \\ *\n"})
        CHECK(shell("printf %s " + shell_quoted(name)).out == name);
}

// A pattern that was made of a path matches this path and no other.
TEST(escaped_patterns) {
    const std::string here = folder();
    const Strings names = {"a*", "b?", "c[de]", "f\\g", "h]"};
    for (const std::string& name : names)
        write_shard(here + "/" + name + "1", counting(9));
    for (const std::string other : {"ax1", "bx1", "cd1", "fg1", "f\\\\g1"})
        write_shard(here + "/" + other, counting(8));
    for (const std::string& name : names)
        CHECK(TestLoader(glob_escaped(here + "/" + name) + "*", {.T = 4}).description() ==
              "1 shard, 9 tokens");
}

// -------------------------------------------------------------------------------------------------
// What identifies data

// dev/test_resume tests what a run says of other data.
TEST(loader_identity) {
    const auto identity = [](const std::string& pattern) {
        return TestLoader(pattern, {.T = 4}).identity();
    };
    const std::string moved = folder();
    const std::string all = moved + "/*.bin";
    const std::string pattern = write_shards(kShards);
    fs::copy(fs::path(pattern).parent_path(), moved);
    const LoaderOptions options = {.B = 2, .T = 3, .vocab = 65536, .shuffle = true, .seed = 8};
    const uint64_t before = TestLoader(pattern, options).identity();
    CHECK(identity(all) == before);  // however it is read
    write_shard(moved + "/z.bin", {});
    CHECK(identity(all) != before);
}

// Other tokens are other data.
TEST(loader_identity_of_a_text) {
    const std::string text = folder() + "/text";
    write_file(text, "ab ab");
    const Tokenizer pairs(pairs_file({"ab"}));
    CHECK(TestLoader(text, {}, pairs).identity() != TestLoader(text, {}).identity());
}

// A large file is sampled. Its size and its first and last bytes count, and so does a change of a
// hundredth of it, wherever that is.
TEST(loader_identity_of_a_large_file) {
    const std::string path = folder() + "/large";
    const size_t n = 3 << 20;  // tokens
    const size_t hundredth = n / 100;
    const struct {
        size_t at;
        size_t tokens;
    } changes[] = {{0, 0},              // none
                   {n, 1},              // one token longer
                   {n - 1, 1},          // the last token
                   {0, 1},              // the first
                   {n / 7, hundredth},  // between them
                   {n / 9 * 5, hundredth}};
    std::set<uint64_t> seen;
    for (const auto& change : changes) {
        Tokens shard(std::max(n, change.at + change.tokens), 'x');
        std::fill_n(shard.begin() + change.at, change.tokens, 'y');
        write_shard(path, shard);
        seen.insert(TestLoader(path, {.T = 4}).identity());
    }
    CHECK(seen.size() == std::size(changes));
}

// Each shard's beginning, middle, end and size count, however many shards there are.
TEST(loader_identity_of_many_shards) {
    const size_t n = 3 * 4096;  // tokens, in seven blocks of 4 KiB
    for (const int count : {80, 90, 130, 300}) {
        const std::string pattern = write_shards(std::vector<Tokens>(count, Tokens(n, 'x')));
        const auto identity = [&] { return TestLoader(pattern, {.T = 64}).identity(); };
        std::set<uint64_t> seen = {identity()};
        size_t expected = 1;
        for (const int shard : {0, count / 2, count - 1}) {
            const std::string path =
                fs::path(pattern).parent_path().string() + format("/train_%04d.bin", shard);
            for (const size_t at : {size_t(0), n / 2, n - 1}) {
                Tokens changed(n, 'x');
                changed[at] = 'y';
                write_shard(path, changed);
                seen.insert(identity());
                expected++;
            }
            write_shard(path, Tokens(n - 1, 'x'));
            seen.insert(identity());
            expected++;
            write_shard(path, Tokens(n, 'x'));
        }
        if (seen.size() != expected)
            test::report(__FILE__, __LINE__,
                         format("%d shards: %zu of %zu changes are seen", count, seen.size() - 1,
                                expected - 1));
    }
}

// A large shard is read to its end, in parts.
TEST(vocabulary_of_a_large_shard) {
    Tokens tokens(2'500'000, 'x');
    const std::string path = write_shard(folder() + "/large.bin", tokens);
    CHECK(vocabulary_of(path, false) == kByteVocab);
    for (const size_t at : {size_t(0), size_t(1) << 20, tokens.size() - 1}) {
        tokens[at] = 300;
        write_shard(path, tokens);
        CHECK(vocabulary_of(path, false) == 50257);
        tokens[at] = 'x';
    }
}

// In a shard <|endoftext|> is 50256. A token after the bytes is one of GPT-2's.
TEST(vocabulary_of_a_shard) {
    const std::string path = folder() + "/shard.bin";
    for (const auto& [token, vocabulary] :
         {std::pair{255, kByteVocab}, {256, 50257}, {50255, 50257}, {50256, kByteVocab}}) {
        write_file(path, header_of({20240520, 1, 2}) +
                             bytes_of(std::vector<uint16_t>{7, static_cast<uint16_t>(token)}));
        CHECK(vocabulary_of(path, false) == vocabulary);
    }
}

// -------------------------------------------------------------------------------------------------
// What every reader must refuse

static std::vector<GoodFile> all_files() {
    return {good_model(), good_state(), good_tokenizer(), good_questions(), good_shard()};
}

// Whatever a pointer of Git LFS is called, it is no data and no text.
TEST(git_lfs_pointers_are_named) {
    const std::string pointer =
        "version https://git-lfs.github.com/spec/v1\n"
        "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
        "size 523130000\n";
    for (const GoodFile& file : all_files())
        for (const char* suffix : {"", ".txt", ".lfs"}) {
            const std::string path = file.path + suffix;
            write_file(path, pointer);
            CHECK_ERROR(file.read(path), path + ": is a Git LFS pointer");
        }
    const std::string path = folder() + "/long.txt";
    write_file(path, pointer);
    CHECK_ERROR(vocabulary_of(path, false), path + ": is a Git LFS pointer");

    // Git LFS makes none that is so long: this is a text that quotes one
    write_file(path, pointer + std::string(1024, 'x'));
    TestLoader(path, {.T = 4});
}

TEST(other_paths) {
    for (const GoodFile& file : all_files()) {
        const std::string none = file.path + ".none";
        const std::string here = fs::path(file.path).parent_path();
        CHECK_ERROR(file.read(none), none + ": ");
        CHECK_ERROR(file.read(here), here + ": ");
        CHECK_ERROR(file.read("/dev/null"), "/dev/null: is a pipe or a device");
    }
}

// `make sanitize` sees what else a reader does with files like these.
TEST(other_versions_and_lengths) {
    for (const GoodFile& file : all_files()) {
        file.read(file.path);
        file.poke(0, 77, "wrong magic at offset 0: expected ");
        // an int, so in a state, whose version is a digit, three more bytes change
        const int next_version = file.bytes[file.version_at] + 1;
        file.poke(file.version_at, next_version,
                  format("wrong version at offset %zu: expected ", file.version_at));
        file.check(file.bytes + "xx", "");

        write_file(file.path, file.bytes);
        for (size_t length = file.bytes.size(); length-- > 0;) {
            fs::resize_file(file.path, length);
            const std::string error = test::error_of([&] { file.read(file.path); });
            test::check_error(__FILE__, __LINE__, error, file.path + ": ");
            test::check_error(__FILE__, __LINE__, error, "expected");
        }
    }
}

TEST(flipped_bits) {
    for (const GoodFile& file : all_files()) {
        std::fstream in_place(file.path, std::ios::in | std::ios::out | std::ios::binary);
        for (size_t bit = 0; bit < 8 * std::min<size_t>(file.bytes.size(), 1100); bit++) {
            const char good = file.bytes[bit / 8];
            const int flipped = good ^ (1 << (bit % 8));
            in_place.seekp(bit / 8).put(static_cast<char>(flipped)).flush();
            const std::string error = test::error_of([&] { file.read(file.path); });
            in_place.seekp(bit / 8).put(good).flush();

            if (error.empty()) {
                CHECK(!file.has_checksum);
                continue;
            }
            CHECK(contains(error, file.path));
            CHECK(contains(error, "expected"));
            CHECK(!contains(error, "\n"));
        }
    }
}

TEST_MAIN
