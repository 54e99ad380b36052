// Tests of data/ and of what run/ reads and writes: log, checkpoints, tokenizer, loader, questions.
// They provoke every error and read its one line.
//
//   ./dev/test_data            all
//   ./dev/test_data loader     those with "loader" in their name
#include <sys/resource.h>

#include <climits>
#include <cmath>
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

// A good file, its reader, and where its version stands. Whatever is changed in it, the reader
// names the file and says `what`.
struct GoodFile {
    std::function<void(const std::string&path)> write, read;
    size_t version_at = 4;
    std::string path = folder() + "/file.bin", bytes = (write(path), read_file(path));

    void check(const std::string& changed, const std::string& what) const {
        write_file(path, changed);
        CHECK_ERROR(read(path), path + ": " + what);
    }
    template <class Value>
    void poke(size_t offset, Value value, const std::string& what) const {
        std::string changed = bytes;
        std::memcpy(&changed[offset], &value, sizeof value);
        check(changed, what);
    }
};

}  // namespace

// -------------------------------------------------------------------------------------------------
// Log

TEST(log_json) {
    Row row("train");
    row.add("step", 3)
        .add("tiny", 1e-300)
        .add("third", 1.0 / 3)
        .add("sum", 0.1 + 0.2)
        .add("nan", std::nan(""));
    row.add("inf", -INFINITY).add("big", 9007199254740993LL).add("yes", true).add("name", "d12");
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
    for (const auto& [seconds, text] : cases) {
        CHECK(minutes(seconds) == text);
    }
}

// What a byte-level model may sample must not change a terminal's state, nor end a C string.
TEST(text_for_a_terminal) {
    const std::string bad = "\xEF\xBF\xBD";
    CHECK(for_terminal("One day,\n\tshe “ran” 😀") == "One day,\n\tshe “ran” 😀");
    CHECK(for_terminal(std::string("a\0\x1b[2J\r\x7f", 8)) == "a" + bad + bad + "[2J" + bad + bad);
    CHECK(for_terminal("\xC2\x9B\x32J\xC2\xA0") == bad + "2J\xC2\xA0");  // U+009B is ESC [ too
    for (const std::string text :
         {"“ran” é😀", "\xF0\x9F\xE2\x82z\x80\xC2", "\x80\xED\xA0\x80\xE2\x82\xFF"}) {
        std::string rest;
        std::string shown;  // byte by byte
        for (const char byte : text) {
            shown += take_for_terminal(rest += byte);
            CHECK(for_terminal(text).compare(0, shown.size(), shown) == 0 && rest.size() <= 3);
        }
        CHECK(shown + for_terminal(rest) == for_terminal(text));
    }
}

// dev/test_faults has what a crash or a full disk does to a log.
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

    // What went on from a later step is dropped as a whole, but not what went on from this one.
    const std::string resumed = Row("run").add("gpus", 1).text();
    write_file(path, kept + lines({resumed, second.text(), resumed, "{\"step\": 3}"}));
    Log::truncate_after(path, 1);
    CHECK(read_file(path) == kept + lines({resumed}));

    // A row without its line end is whole.
    write_file(path, kept.substr(0, kept.size() - 1));
    Log::truncate_after(path, 1);
    CHECK(read_file(path) == kept);
}

// A crash leaves half a row, a power cut zeros, and a disk anything. A good row may have what this
// program never writes.
TEST(log_rows_that_are_no_json_are_dropped) {
    const std::string path = folder() + "/log.jsonl";
    const std::string first = Row("train").add("step", 1).text();
    const Strings good = {"{}", " {\"a\" : [1, -0.5e+3, 0, 1E-9 , {\"b\": []}] , \"c\":null}\r",
                          "{\"kind\": \"é\\u00e9\\n\\\\\", \"x\": true, \"y\": false}"};
    for (const std::string& row : good) {
        write_file(path, row + "\n" + first + "\n");
        Log::truncate_after(path, 1);
        CHECK(read_file(path) == row + "\n" + first + "\n");
    }
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
    const std::string said = folder() + "/said";
    const int screen = dup(STDERR_FILENO);
    CHECK(std::freopen(said.c_str(), "w", stderr) != nullptr);
    for (const std::string& row : bad) {
        write_file(path, first + "\n" + row + "\n" + row + "\n" + first + "\n" + row);
        Log::truncate_after(path, 1);
        if (read_file(path) != first + "\n" + first + "\n")
            test::report(__FILE__, __LINE__, "kept, or kept too little: " + row.substr(0, 40));
    }
    std::fflush(stderr);
    dup2(screen, STDERR_FILENO);
    close(screen);
    const std::string warnings = read_file(said);
    CHECK(contains(warnings, path) && contains(warnings, " 3 rows that were not JSON\n"));
}

// -------------------------------------------------------------------------------------------------
// Threads

// A container's quota counts like fewer cores, as do the quotas of the groups around it.
TEST(cpu_quotas) {
    const std::string groups = folder();
    fs::create_directories(groups + "/slice/job");
    CHECK(cpu_quota(groups, "/") == 0 && cpu_quota(groups, "/slice/job") == 0);
    write_file(groups + "/slice/cpu.max", "max 100000\n");
    CHECK(cpu_quota(groups, "/slice/job") == 0);
    write_file(groups + "/slice/job/cpu.max", "250000 100000\n");
    CHECK(cpu_quota(groups, "/slice/job") == 3 && cpu_quota(groups, "/slice") == 0 &&
          cpu_quota(groups, "/") == 0);
    write_file(groups + "/slice/cpu.max", "10000 50000\n");
    CHECK(cpu_quota(groups, "/slice/job") == 1 && cpu_quota(groups, "/slice/other") == 1);
    write_file(groups + "/cpu.max", "200000 100000\n");
    CHECK(cpu_quota(groups, "/") == 2);
}

// The line that names the threads tells the truth.
TEST(threads_of_the_cpu) {
    const std::string train = "./train_gpt2cu --device cpu -e tiny -x 0 -v 0 -s 0 -b 1 -t 16 -i ";
    const std::string text = folder() + "/text";
    write_file(text, std::string(1000, 'x'));
    for (const char* one : {"OMP_NUM_THREADS=1 ", "OMP_THREAD_LIMIT=1 ", "taskset -c 0 "})
        CHECK(contains(
            shell("unset OMP_NUM_THREADS OMP_THREAD_LIMIT; env " + std::string(one) + train + text)
                .out,
            "CPU, 1 thread,"));
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
    CHECK(read_file(path) == "small" + large + "0123456789" &&
          shell("ls " + here).out == "out.bin\n");
    const mode_t mask = umask(022);
    write_whole_file(path, {{"new", 3}});
    umask(mask);
    // others may read it
    CHECK(read_file(path) == "new" && static_cast<int>(fs::status(path).permissions()) == 0644);
    fs::create_directory(here + "/taken");
    CHECK_ERROR(write_whole_file(here + "/taken", {}),
                here + "/taken: cannot open: Is a directory");
}

// -------------------------------------------------------------------------------------------------
// Model, state, tokenizer and questions

static const ModelHeader kTiny = {DType::f32, {16, 50, 128, 2, 2, 8}};
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
    return {[](const std::string& path) { write_model(path, kTiny, noise(kTiny.bytes()).data()); },
            [](const std::string& path) {
                const ModelHeader header = read_model_header(path);
                std::string parameters(header.bytes(), 0);
                InputFile(path).read(kHeaderBytes, parameters.data(), header.bytes());
            }};
}

TEST(model_errors) {
    const GoodFile file = good_model();
    file.poke(0, 20240520,
              "wrong magic at offset 0: expected 20240326, found 20240520; give a model");
    // fp32 data
    file.poke(4, 5, "too long: expected 6848 bytes (bf16, L=2 NH=2 C=8 V=50), found 12672");
    int offset = 8;
    for (const char* field :
         {"maxT", "vocabulary", "layers", "heads", "channels", "padded vocabulary"}) {
        for (const int bad : {0, -1, INT_MIN, INT_MAX})
            file.poke(offset, bad,
                      format("damaged header: %s at offset %d: expected ", field, offset));
        offset += 4;
    }
    file.poke(20, 3,
              "damaged header: channels at offset 24: expected a multiple of 3 heads, found 8");
    file.poke(28, 49,
              "damaged header: padded vocabulary at offset 28: expected 50..16777216, found 49");
    file.poke(16, 3, "truncated: expected 16160 bytes (fp32, L=3 NH=2 C=8 V=50), found 12672");
}

static const std::string kOptimizer = noise(240);
static const Counters kCounters = {1234, 77, {3, 14, 15}};
static const Identity kRun = {{{"model", "d12"}, {"B", "4"}, {"data", "00ff"}, {"note", ""}},
                              {{"-l", "0.1"}}};

// Reads the optimizer in two pieces, as a resumed run may.
static std::unique_ptr<StateFile> read_state(const std::string& path, const Identity& run,
                                             std::string& optimizer) {
    auto file = std::make_unique<StateFile>(path, run, optimizer.size());
    StateFile& state = *file;
    for (const size_t at : {size_t(0), size_t(64)}) {
        const size_t bytes = at ? optimizer.size() - at : 64;
        state.file.read(state.begin + at, &optimizer[at], bytes);
        state.add(&optimizer[at], bytes);
    }
    state.check();
    return file;
}

static GoodFile good_state() {
    return {[](const std::string& path) {
                write_state(path, kRun, kCounters, {kOptimizer.data(), kOptimizer.size()});
            },
            [](const std::string& path) {
                std::string optimizer(kOptimizer.size(), 'x');
                const auto read = read_state(path, kRun, optimizer);
                if (optimizer != kOptimizer ||
                    std::memcmp(&read->counters, &kCounters, sizeof kCounters))
                    throw Error("read something else");
            },
            29};
}

TEST(state_errors) {
    const GoodFile file = good_state();
    const std::string path = file.path;
    CHECK(file.bytes.find("gpt2 training state, version 2\nidentity model: d12\nidentity B: 4\n") ==
          0);
    file.poke(0, std::pair{20240326, 3}, "wrong magic at offset 0: expected ");
    file.poke(0, std::pair{uint64_t(0x7461747332747067), 1},
              "wrong version at offset 8: expected 2, found 1");
    file.poke(29, '3', "wrong version at offset 29: expected 2, found 3");
    file.poke(file.bytes.size() - 1, 'x', "damaged: expected ");
    file.poke(file.bytes.find("window: 14") + 8, '2', "damaged: expected ");
    write_file(path, file.bytes);

    const auto refused = [&](const Identity& run, size_t bytes, const std::string& what) {
        std::string optimizer(bytes, '?');
        CHECK_ERROR(read_state(path, run, optimizer), what);
        // nothing is read that does not fit
        CHECK(bytes == 240 || optimizer == std::string(bytes, '?'));
    };
    const Fields& fields = kRun.fields;
    refused({{fields[0], fields[1], fields[2], fields[3], {"T", "64"}}}, 240,
            "T: the checkpoint has \"nothing\", this run has \"64\"");
    refused({{fields[1], fields[2], fields[3]}}, 240,
            "model: the checkpoint has \"d12\", this run has \"nothing\"");
    refused({{fields[0], {"B", "8"}, fields[2], fields[3]}}, 240,
            "B: the checkpoint has \"4\", this run has \"8\"");
    refused(kRun, 236, "expected 236 bytes, found 240");

    // A field that is newer than the state.
    Identity newer = kRun;
    newer.implied = {{"optimizer", "adamw"}};
    newer.fields.push_back({"optimizer", "muon"});
    refused(newer, 240, "optimizer: the checkpoint has \"adamw\", this run has \"muon\"");
    newer.fields.back().value = "adamw";
    std::string read(240, '?');
    read_state(path, newer, read);
    CHECK(read == kOptimizer);

    std::string optimizer(240, '?');
    const Identity faster = {fields, {{"-l", "0.2"}, {"-u", "5"}}};
    const std::string changes = read_state(path, faster, optimizer)->recipe_changes;
    CHECK(changes == "-l from 0.1 to 0.2, -u from nothing to 5");
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
    // GPT-2's encoder.json has the printable bytes in order, then each other byte as it comes.
    std::string text;
    for (const auto& [first, last] : {std::pair<int, int>{'!', '~'},
                                      {0xA1, 0xAC},
                                      {0xAE, 0xFF},
                                      {0, ' '},
                                      {0x7F, 0xA0},
                                      {0xAD, 0xAD}})
        for (int byte = first; byte <= last; byte++)
            text += static_cast<char>(byte);
    std::string back;
    CHECK(encode_bytes(text) == counting(256));
    const Tokenizer tokenizer;
    for (const int token : counting(256))
        back += tokenizer.decode(token);
    CHECK(back == text);
    for (const int none : {-1, 256, 1234})
        CHECK(tokenizer.decode(none) == format("<%d>", none));
    CHECK(tokenizer.decode(50256) == "<|endoftext|>");
}

static std::string tokenizer_file(int version, const Strings& pieces) {
    const int count = static_cast<int>(pieces.size());
    std::string bytes = header_of({20240328, version, count, version == 2 ? count - 1 : 0});
    for (const std::string& piece : pieces)
        bytes += static_cast<char>(piece.size()) + piece;
    return bytes;
}

static GoodFile good_tokenizer() {
    return {[](const std::string& path) {
                write_file(path, tokenizer_file(2, {"a", "bc", "def"}));
            },
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
    const GoodFile file = good_tokenizer();
    for (const int count : {0, 10, -1})
        file.poke(8, count, "number of tokens at offset 8: expected 1..9 (");
    file.poke(8, 4, "truncated in token 3 of 4 at offset 1033: expected 1 bytes, found 0");
    file.poke(12, 3, "id of <|endoftext|> at offset 12: expected less than 3, found 3");

    // A token of a shard has 16 bits.
    Strings many(65536, "piece");
    write_file(path, tokenizer_file(2, many));
    CHECK(Tokenizer(path).decode(65535) == "piece");
    many.push_back("one too many");
    write_file(path, tokenizer_file(2, many));
    CHECK_ERROR(Tokenizer(path).decode(0), path + ": number of tokens at offset 8");
}

// All single bytes and then these tokens, as GPT-2 numbers them. A token's id is the rank of the
// merge that makes it.
static std::string write_pairs(const Strings& merges) {
    Strings pieces(256);
    for (int byte = 0; byte < 256; byte++) {
        const std::string one(1, static_cast<char>(byte));
        pieces[encode_bytes(one)[0]] = one;
    }
    pieces.insert(pieces.end(), merges.begin(), merges.end());
    pieces.push_back("<|endoftext|>");
    const std::string path = folder() + "/pairs.bin";
    write_file(path, tokenizer_file(2, pieces));
    return path;
}

// dev/test/test_prepare.py compares with tiktoken.
TEST(tokenizer_encodes_pairs) {
    const std::string path = write_pairs(
        {"bc", "ab", "cd", "abcd", "aa",  "n'",   "'t", "'tt", "re", "'re",  " a", "a1",  "1a",
         "11", "!!", "a!", "  ",   " \n", "\n\n", "é",  "<|",  "|>", "aare", "ef", "efg", ""});
    const Tokenizer tokenizer(path);
    const Strings cases[] = {
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
    for (const Strings& c : cases) {
        std::string tokens;
        for (const int token : tokenizer.encode(c[0], 50257, ""))
            tokens += "|" + tokenizer.decode(token);
        if (tokens != c[1])
            test::report(__FILE__, __LINE__, c[1] + " expected, found " + tokens);
        for (const int vocab : {kByteVocab, 50256})
            CHECK(tokenizer.encode(c[0], vocab, "") == encode_bytes(c[0]));
    }
    for (const char c : {'a', '\n'})  // in square time this would take minutes
        CHECK(tokenizer.encode(std::string(400000, c), 50257, "").size() == 200000);
    // These are not UTF-8: a lone continuation, overlong, cut, surrogate, past U+10FFFF, never a
    // lead byte.
    for (const char* bad :
         {"\x80", "\xC1\xBF", "\xC3!", "\xE0\x9F\xBF", "\xE2\x82", "\xED\xA0\x80",
          "\xF0\x8F\xBF\xBF", "\xF0\x9F\x99", "\xF4\x90\x80\x80", "\xF8\x88\x80\x80\x80", "\xFF"})
        CHECK_ERROR(
            tokenizer.encode("é " + std::string(bad), 50257, "book.txt"),
            format("book.txt: invalid UTF-8 at offset 3: found byte 0x%02x; convert it to UTF-8",
                   *bad & 0xFF));
    write_file(path, tokenizer_file(2, {"a", "bc", ""}));
    CHECK_ERROR(Tokenizer(path).encode("a b", 50257, ""),
                path + ": no token for byte 0x20; give GPT-2's");
    write_file(path, tokenizer_file(2, Strings(50258, "a")));
    CHECK_ERROR(Tokenizer(path).encode("a", 50257, ""),
                path + ": 50258 tokens, but the model's vocabulary is 50257; give");
}

// GPT-2's pattern takes these seven endings from what follows them, whatever that is, and no
// others. All are tokens here, as are whole words with them, so that a word that is cut elsewhere
// has other tokens.
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
    const Tokenizer tokenizer(write_pairs(merges));
    const auto check = [&](const std::string& text, const std::string& expected) {
        std::string tokens;
        for (const int token : tokenizer.encode(text, 50257, "")) {
            tokens += "|" + tokenizer.decode(token);
        }
        if (tokens != expected) {
            test::report(__FILE__, __LINE__, text + ": expected " + expected + ", found " + tokens);
        }
    };

    for (const std::string& ending : endings) {
        std::string upper = ending;
        for (char& c : upper) {
            c = static_cast<char>(std::toupper(c));
        }
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

static const std::vector<Choice> kChoices = {{7, 1, {5, 6, 7}, {{1}, {2, 3}, {4, 4, 4}, {9}}},
                                             {8, 0, {256}, {{0}, {250, 3}}}};
static GoodFile good_choices() {
    return {[](const std::string& path) { write_choices(path, kChoices); },
            [](const std::string& path) { read_choices(path, 257, 64); }};
}

TEST(choices) {
    const GoodFile file = good_choices();
    const std::string path = file.path;
    const std::vector<Choice> read = read_choices(path, 257, 64);
    CHECK(read.size() == 2 &&
          // the longest has 40 bytes
          file.bytes.compare(0, 1024, header_of({20240522, 1, 2, 40})) == 0);
    for (size_t i = 0; i < read.size(); i++) {
        const auto parts = [](const Choice& c) {
            return std::tie(c.index, c.label, c.context, c.endings);
        };
        CHECK(parts(read[i]) == parts(kChoices[i]));
    }
    CHECK_ERROR(read_choices(path, 256, 64),
                path + ": token at offset 1076: expected 0..255, found 256");
    CHECK_ERROR(read_choices(path, 257, 4),
                "length of an example at offset 1060: expected at most T = 4 tokens");
    CHECK(read_choices(path, 257, 5).size() == 2);  // the last token is only predicted
    // its label is the fifth
    file.poke(1030, '\4', "number of endings at offset 1032: expected 5..64, found 4");
    file.poke(1024, '\xBF',
              "start of an example at offset 1024: expected 65535..65535, found 65471");
    file.poke(1032, '\x44', "number of endings at offset 1032: expected 2..64, found 68");
    for (const char* more : {"x", "xx"})
        file.check(file.bytes + more, format("too long: expected %zu bytes", file.bytes.size()));
    write_choices(path, {});
    CHECK_ERROR(file.read(path), path + ": no examples");

    // Without a token there is nothing to predict, and nothing to predict it from.
    write_choices(path, {{1, 0, {}, {{1}, {2}}}});
    CHECK_ERROR(file.read(path), "length of a context at offset 1034");
    write_choices(path, {{1, 0, {5}, {{1}, {}}}});
    CHECK_ERROR(file.read(path), "length of an ending at offset 1042");
}

// -------------------------------------------------------------------------------------------------
// Loader

namespace {

struct TestLoader : Loader {
    size_t B, T;
    TestLoader(const Source& source, int B, int T, int vocab = 50257, bool shuffle = false,
               uint64_t seed = 0, const Tokenizer& tokenizer = {})
        : Loader(source, {.B = B, .T = T, .vocab = vocab, .shuffle = shuffle, .seed = seed},
                 tokenizer),
          B(B),
          T(T) {}
    // The next B windows of T + 1 tokens. The targets are the inputs shifted by one.
    std::vector<Tokens> batch() {
        Tokens inputs(B * T, -7);
        Tokens targets(B * T, -7);
        next(inputs.data(), targets.data());
        std::vector<Tokens> windows;
        for (auto in = inputs.begin(), out = targets.begin(); in != inputs.end();
             in += T, out += T) {
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

}  // namespace

// Whatever the data, an epoch has each window once, with shuffle in an order of its own. Three
// epochs may end inside batches. Reading, restoring and skipping (as ranks do the batches of
// others) come to the same at every point.
TEST(loader_reads_each_window_from_any_point) {
    const std::string text = folder() + "/text";
    const std::string book = folder() + "/book.txt";
    std::string bytes("naïve €5 – 😀\n\r\t\x7F\xFF\xC3");
    for (int i = 1; i < 256; i++)
        bytes += static_cast<char>(i);
    write_file(text, bytes);
    write_file(book, "It rained. It rained on.\n\nIt");
    const Tokenizer none;
    const Tokenizer pairs(write_pairs({"It", " r", "ai", " rai", "ne"}));
    Tokens in_bytes = encode_bytes(bytes);
    Tokens in_pairs = pairs.encode(read_file(book), 50257, "");
    in_bytes.insert(in_bytes.begin(), 50256);
    in_pairs.insert(in_pairs.begin(), 50256);
    const Tokens documents = {50256, 1, 2, 255, 50256, 3, 4, 50256, 9};
    const struct {
        std::string pattern, description;
        int vocab;
        std::vector<Tokens> shards;
    } cases[] = {
        {write_shards(kShards),
         "5 shards, 136 tokens; left out: 8 at the shards' ends, 4 in shards shorter than 5: ",
         50257, kShards},
        {write_shards({documents}), "1 shard, 9 tokens", 50257, {documents}},
        {write_shards({documents}), "1 shard, 9 tokens", kByteVocab, {documents}},
        {text, "text file, 282 tokens", kByteVocab, {in_bytes}},
        {text, "text file, 282 tokens", 50304, {in_bytes}},
        {book, format("text file, %zu BPE tokens", in_pairs.size()), 50257, {in_pairs}}};
    for (const auto& c : cases)
        for (const bool shuffle : {false, true}) {
            std::vector<Tokens> windows;
            for (Tokens shard : c.shards) {
                if (c.vocab == kByteVocab)
                    std::replace(shard.begin(), shard.end(), 50256, 256);
                for (size_t at = 0; at + 4 < shard.size(); at += 4)
                    windows.emplace_back(&shard[at], &shard[at] + 5);
            }
            const size_t n = windows.size();
            const size_t B = std::min<size_t>(n, 4);
            const size_t batches = (3 * n + B - 1) / B;
            const Tokenizer& tokenizer = c.pattern == book ? pairs : none;
            TestLoader loader(c.pattern, B, 4, c.vocab, shuffle, 3, tokenizer);
            CHECK(loader.windows() == n);
            CHECK(loader.description().compare(0, c.description.size(), c.description) == 0);
            std::vector<std::vector<Tokens>> stream;
            std::vector<Tokens> read;
            for (size_t i = 0; i < batches; i++) {
                CHECK((loader.state() == LoaderState{B * i / n, B * i % n, i}));
                stream.push_back(loader.batch());
                read.insert(read.end(), stream.back().begin(), stream.back().end());
            }
            if (shuffle)
                std::sort(windows.begin(), windows.end());
            for (size_t epoch = 0; epoch < 3; epoch++) {
                std::vector<Tokens> order(&read[epoch * n], &read[epoch * n] + n);
                if (shuffle)
                    std::sort(order.begin(), order.end());
                CHECK(order == windows);
            }
            for (size_t i = 0; i < batches; i++) {
                const LoaderState from = {B * i / n, B * i % n, i};
                TestLoader resumed(c.pattern, B, 4, c.vocab, shuffle, 3, tokenizer);
                resumed.restore(from);
                for (size_t k = i; k < batches; k++) {
                    CHECK(resumed.batch() == stream[k]);
                    loader.restore(from);  // also in a loader that is somewhere else
                    loader.skip(k - i);
                    CHECK(loader.state().batches == k && loader.batch() == stream[k]);
                }
            }
            loader.reset();
            CHECK(loader.batch() == stream[0]);
            CHECK_ERROR(
                loader.restore({0, n, 0}),
                format("an epoch has %zu windows, but the checkpoint is at window %zu", n, n));
        }
}

// Checkpoints hold a position in the order, so that it can never change. When it was chosen, the
// orders of seeds, epochs and shards differed as random ones do, and all windows came first about
// equally often.
TEST(loader_shuffle) {
    uint64_t orders = 0;
    for (const std::vector<Tokens>& shards :
         {kShards, {counting(101), counting(101, 1000)}, {counting(4001)}})
        for (int seed = 0; seed < 9; seed++) {
            TestLoader loader(write_shards(shards), 10, 4, 50257, true, seed);
            for (int i = 0; i < 300; i++)
                for (const Tokens& window : loader.batch())
                    orders = checksum64(&window[0], sizeof(int), orders);
        }
    CHECK(orders == 0xfbee78cd2c2c5c8du);
}

static GoodFile good_shard() {
    return {[](const std::string& path) { write_shard(path, counting(17)); },
            [](const std::string& path) {
                TestLoader loader(path, 2, 4);
                for (int i = 0; i < 20; i++)
                    loader.batch();
            }};
}

TEST(loader_errors) {
    const GoodFile file = good_shard();
    const std::string path = file.path;
    const std::string here = fs::path(path).parent_path();
    file.poke(
        0, 20240326,
        "wrong magic at offset 0: expected 20240520, found 20240326; this is a model checkpoint");
    file.poke(8, -1,
              "damaged header: number of tokens at offset 8: expected 0..2147483647, found -1");
    file.poke(
        8, INT_MAX,
        "truncated: the header says 2147483647 tokens, expected 4294968318 bytes, found 1058");
    file.check(file.bytes.substr(0, 1023),
               "truncated: expected a header of 1024 bytes, found a file of 1023");
    file.poke(8, 16, "too long: the header says 16 tokens, expected 1056 bytes, found 1058");

    const std::string text = here + "/b.txt";
    const std::string exact = here + "/exact.md";
    const std::string name = here + "/x[1].bin";
    const std::string small = write_shards(std::vector<Tokens>(10, counting(4)));
    for (const std::string& shard : {path, name})
        write_file(shard, file.bytes);
    write_file(text, "this is text, long enough for a batch or two");
    write_file(exact, "abcdefgh");  // 9 tokens with <|endoftext|>
    for (const size_t n : {0, 4, 8, 9})
        write_shard(here + format("/%zu", n), counting(n));
    for (const std::string& enough : {path, text, exact, here + "/9", here + "/8", name})
        TestLoader(enough, 2, 4);
    const std::pair<std::string, std::string> unusable[] = {
        {here + "/missing_*.bin", ": no such file, and no file matches it"},
        {"", ": no such file"},
        {here, ": is a directory"},
        {here + "/4", ": too little data: 4 tokens in 1 file, but a sequence needs 5 of one file"},
        {small, ": too little data: 40 tokens in 10 files"}};  // no shard has a whole window
    for (const auto& [pattern, why] : unusable)
        CHECK_ERROR(TestLoader(pattern, 2, 4), pattern + why);
    CHECK_ERROR(TestLoader(here + "/[bf]*", 2, 4),
                text + ": wrong magic at offset 0: expected 20240520, found ");
    CHECK_ERROR(TestLoader(text, 2, 4, 50256),
                text + ": text needs a vocabulary of 257 (bytes) or at least 50257");

    for (const auto& [vocab, limit, token] :
         {std::tuple{kByteVocab, 256, 256}, {50304, 50304, 65535}, {50256, 50256, 50256}}) {
        std::vector<uint16_t> tokens(13);
        tokens[10] = token;
        write_file(path, header_of({20240520, 1, 13}) + bytes_of(tokens));
        TestLoader loader(path, 2, 3, vocab);
        loader.batch();
        CHECK_ERROR(
            loader.batch(),
            path +
                format(": token at offset 1044: expected less than the vocabulary of %d, found %d",
                       limit, token));
    }
    // An empty shard has no window.
    CHECK(TestLoader(write_shards({{}, counting(9), {}}), 1, 4).windows() == 2);

    TestLoader loader(path, 2, 4);
    fs::resize_file(path, 1030);  // the data changes while a loader runs
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
        TestLoader memory({"my tokens", tokens}, 3, 4, vocab, true, 7);
        TestLoader shard(path, 3, 4, vocab, true, 7);
        CHECK(memory.windows() == 10 && memory.description() == "my tokens, 41 tokens");
        for (int i = 0; i < 7; i++)
            CHECK(memory.batch() == shard.batch());
        CHECK(memory.state() == shard.state());
    }
    const uint64_t before = TestLoader({"my tokens", tokens}, 1, 4).identity();
    CHECK(TestLoader({"elsewhere", tokens}, 2, 3).identity() == before);
    CHECK_ERROR(TestLoader({"my tokens", tokens}, 1, 4, 256),
                "my tokens: text needs a vocabulary of 257");
    CHECK_ERROR(TestLoader({"my tokens", tokens}, 1, 41), "my tokens: too little data: 41 tokens");
    tokens[40]++;
    CHECK(TestLoader({"my tokens", tokens}, 1, 4).identity() != before);
}

TEST(loader_many_shards) {
    const std::string pattern = write_shards(std::vector<Tokens>(100, counting(5)));
    rlimit before;
    getrlimit(RLIMIT_NOFILE, &before);
    const rlimit few = {40, before.rlim_max};  // open files
    setrlimit(RLIMIT_NOFILE, &few);
    TestLoader loader(pattern, 8, 2, 50257, true);
    for (int i = 0; i < 25; i++)
        loader.batch();
    CHECK(loader.description() == "100 shards, 500 tokens" &&
          (loader.state() == LoaderState{1, 0, 25}));
    setrlimit(RLIMIT_NOFILE, &before);
}

TEST(loader_larger_than_2_gib) {
    const std::string path = folder() + "/large.bin";
    const int tokens = 2147000001;
    const int T = 1000;  // 4.3 GB, nearly all of it a hole
    std::vector<uint16_t> end(2 * T + 1);
    std::iota(end.begin(), end.end(), 100);
    write_file(path, header_of({20240520, 1, tokens}));
    if (truncate(path.c_str(), 1024 + 2 * (off_t(tokens) - 2 * T - 1)))
        SKIP("no sparse files here: %s", std::strerror(errno));
    std::ofstream(path, std::ios::app | std::ios::binary) << bytes_of(end);
    TestLoader loader(path, 2, T);
    CHECK(loader.windows() == 2147000 && loader.description() == "1 shard, 2.1 G tokens");
    loader.restore({3, 2146998, 0});
    CHECK((loader.batch() == std::vector<Tokens>{counting(T + 1, 100), counting(T + 1, 100 + T)}));
    CHECK((loader.state() == LoaderState{4, 0, 1}));
}

// The expected documents are written by hand after the rule of data/text.h.
TEST(documents_of_a_text) {
    const std::string end = "<|endoftext|>";
    const std::pair<std::string, Strings> cases[] = {
        {"one text\r\n", {"one text\r\n"}},
        {"\xEF\xBB\xBF"
         "a\xEF\xBB\xBF",
         {"a\xEF\xBB\xBF"}},
        {"a\r\nb\r\n" + end + "\r\nc\r\n", {"a\r\nb", "c\r\n"}},
        {"a\n\n" + end + "\n\nb", {"a\n", "\nb"}},
        {end + "\n" + end + "a" + end + end + "b\r" + end + "\rc\n" + end + "\n",
         {"a", "b\r", "\rc"}},
        {" \n\t" + end + "\xE2\x80\x83\x1C\x1F" + end + "x", {"x"}},
        {"<|endoftext" + end + "|>", {"<|endoftext", "|>"}},
        {"", {}}};
    for (const auto& [text, expected] : cases)
        CHECK(documents(text) == expected);
    const std::string path = folder() + "/docs.txt";
    write_file(path, "ab\n" + end + "\ncd");
    CHECK((TestLoader(path, 1, 5, kByteVocab).batch() ==
           std::vector<Tokens>{{256, 64, 65, 256, 66, 67}}));
    CHECK((Tokenizer().encode_prompt("a\n" + end + "b" + end, 50257, "") ==
           Tokens{64, 198, 50256, 65, 50256}));
    CHECK((Tokenizer().encode_prompt(end + "a", kByteVocab, "") == Tokens{256, 64}));
    const Tokenizer pairs(write_pairs({"ab"}));
    CHECK((pairs.encode_prompt("ab" + end, 50257, "") == Tokens{256, 50256}));
    write_file(path, "a" + end + "b\xFF");
    CHECK_ERROR(TestLoader(path, 1, 1, 50257, false, 0, pairs),
                path + ": invalid UTF-8 at offset 15");
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
        CHECK_ERROR(TestLoader(path, 1, 1), what);
    }
}

// A shell gives back what was quoted for it.
TEST(names_in_commands) {
    for (const std::string name : {"run1", "", "-x;&|", "it's $HOME `x` \"q\" \\ *\n"})
        CHECK(shell("printf %s " + shell_quoted(name)).out == name);

    // A pattern that was made of a path means this path and no other.
    const std::string here = folder();
    for (const std::string name : {"a*", "b?", "c[de]", "f\\g", "h]"}) {
        write_shard(here + "/" + name + "1", counting(9));
    }
    for (const std::string name : {"ax1", "bx1", "cd1", "fg1", "f\\\\g1"}) {
        write_shard(here + "/" + name, counting(8));
    }
    for (const std::string name : {"a*", "b?", "c[de]", "f\\g", "h]"}) {
        CHECK(TestLoader(glob_escaped(here + "/" + name) + "*", 1, 4).description() ==
              "1 shard, 9 tokens");
    }
}

// dev/test_resume has what a run says of other data.
TEST(loader_identity) {
    const auto identity = [](const std::string& pattern) {
        return TestLoader(pattern, 1, 4).identity();
    };
    const std::string moved = folder();
    const std::string all = moved + "/*.bin";
    const std::string pattern = write_shards(kShards);
    fs::copy(fs::path(pattern).parent_path(), moved);
    // of the data, however it is read
    const uint64_t before = TestLoader(pattern, 2, 3, 65536, true, 8).identity();
    CHECK(identity(all) == before);
    write_shard(moved + "/z.bin", {});
    CHECK(identity(all) != before);
    write_file(moved + "/text", "ab ab");  // other tokens are other data
    CHECK(TestLoader(moved + "/text", 1, 1, 50257, false, 0, Tokenizer(write_pairs({"ab"})))
              .identity() != TestLoader(moved + "/text", 1, 1).identity());
    // A large file is sampled. Its size, its first and its last bytes count, and a hundredth of it
    // spread over the rest.
    const size_t n = 3 << 20;  // tokens
    std::set<uint64_t> sampled;
    for (const auto& [at, tokens] : {std::pair<size_t, size_t>{0, 0},
                                     {n, 1},
                                     {n - 1, 1},
                                     {0, 1},
                                     {n / 7, n / 100},
                                     {n / 9 * 5, n / 100}}) {
        Tokens shard(std::max(n, at + tokens), 'x');
        std::fill_n(shard.begin() + at, tokens, 'y');
        sampled.insert(identity(write_shard(moved + "/large", shard)));
    }
    CHECK(sampled.size() == 6);
}

// Each shard's beginning, middle and end counts, however many shards there are. What changes has
// the same size.
TEST(loader_identity_of_many_shards) {
    const size_t n = 3 * 4096;  // tokens, in seven blocks of 4 KiB
    for (const int count : {80, 90, 130, 300}) {
        const std::string pattern = write_shards(std::vector<Tokens>(count, Tokens(n, 'x')));
        const auto identity = [&] { return TestLoader(pattern, 1, 64).identity(); };
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
        if (seen.size() != expected) {
            test::report(__FILE__, __LINE__,
                         format("%d shards: %zu of %zu changes are seen", count, seen.size() - 1,
                                expected - 1));
        }
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

    // In a shard <|endoftext|> is 50256. What follows the bytes is a token of GPT-2's.
    for (const auto& [token, vocabulary] :
         {std::pair{255, kByteVocab}, {256, 50257}, {50255, 50257}, {50256, kByteVocab}}) {
        write_file(path, header_of({20240520, 1, 2}) +
                             bytes_of(std::vector<uint16_t>{7, static_cast<uint16_t>(token)}));
        CHECK(vocabulary_of(path, false) == vocabulary);
    }
}

// -------------------------------------------------------------------------------------------------
// What no reader takes for its file

// Whatever a pointer of Git LFS is called, it is no data and no text.
TEST(git_lfs_pointers_are_named) {
    const std::string pointer =
        "version https://git-lfs.github.com/spec/v1\n"
        "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
        "size 523130000\n";
    for (const GoodFile& file :
         {good_model(), good_state(), good_tokenizer(), good_choices(), good_shard()}) {
        for (const char* suffix : {"", ".txt", ".lfs"}) {
            const std::string path = file.path + suffix;
            write_file(path, pointer);
            CHECK_ERROR(file.read(path), path + ": a Git LFS pointer");
        }
    }
    const std::string path = folder() + "/long.txt";
    write_file(path, pointer);
    CHECK_ERROR(vocabulary_of(path, false), path + ": a Git LFS pointer");
    // Git LFS makes none that is so long. It is a text that quotes one.
    write_file(path, pointer + std::string(1024, 'x'));
    TestLoader(path, 1, 4);
}

// `make sanitize` sees what else a reader does with them.
TEST(other_paths_and_damaged_files) {
    for (const GoodFile& file :
         {good_model(), good_state(), good_tokenizer(), good_choices(), good_shard()}) {
        const std::string none = file.path + ".none";
        const std::string here = fs::path(file.path).parent_path();
        CHECK_ERROR(file.read(none), none + ": ");
        CHECK_ERROR(file.read(here), here + ": ");
        CHECK_ERROR(file.read("/dev/null"), "/dev/null: not a regular file");
        file.poke(0, 77, "wrong magic at offset 0: expected ");
        file.poke(file.version_at, file.bytes[file.version_at] + 1,
                  format("wrong version at offset %zu: expected ", file.version_at));
        file.check(file.bytes + "xx", "");
        write_file(file.path, file.bytes);
        file.read(file.path);
        // Of a state no flipped bit goes unnoticed.
        std::fstream in_place(file.path, std::ios::in | std::ios::out | std::ios::binary);
        for (size_t bit = 0; bit < 8 * std::min<size_t>(file.bytes.size(), 1100); bit++) {
            const char good = file.bytes[bit / 8];
            in_place.seekp(bit / 8).put(static_cast<char>(good ^ 1 << bit % 8)).flush();
            const std::string error = test::error_of([&] { file.read(file.path); });
            CHECK(error.empty() ? file.version_at == 4
                                : contains(error, file.path) && contains(error, "expected") &&
                                      !contains(error, "\n"));
            in_place.seekp(bit / 8).put(good).flush();
        }
        for (size_t length = file.bytes.size(); length-- > 0;) {
            fs::resize_file(file.path, length);
            CHECK_ERROR(file.read(file.path), file.path + ": ");
            CHECK_ERROR(file.read(file.path), "expected");
        }
    }
}

TEST_MAIN
