// Tests of data/ and of what run/ reads and writes: log, checkpoints, tokenizer, loader, questions. They provoke every
// error and read its one line.
//
//   ./dev/test_data            all        ./dev/test_data loader     those with "loader" in their name
#include <sys/resource.h>
#include <sys/syscall.h>

#include <climits>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "data/file.h"
#include "data/loader.h"
#include "data/text.h"
#include "data/tokenizer.h"
#include "dev/program.h"
#include "run/checkpoint.h"
#include "run/log.h"

namespace fs = std::filesystem;
using Strings = std::vector<std::string>;
using Names = std::set<std::string>;

// ---------------------------------------------------------------------------------------------------------------------
// Helpers

// The program calls this instead of the C library's. Like pwrite(2), which takes 2 GiB at most, it takes no more bytes at
// once than most_at_once.
static size_t most_at_once = SIZE_MAX;
extern "C" ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) {
    return syscall(SYS_pwrite64, fd, data, std::min(bytes, most_at_once), at);
}

namespace {

// A new folder, and what is in it.
std::string folder() {
    static int made = 0;
    const std::string path = format("%s/%d", dir().c_str(), made++);
    fs::create_directory(path);
    return path;
}
Names names_in(const std::string& folder) {
    Names names;
    for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
    return names;
}

// Lowers this process's limit on file sizes or open files for a scope. Past the limit on sizes write(2) fails with
// EFBIG, as it does with ENOSPC on a full disk, after a part of the data was taken.
struct Limit {
    Limit(__rlimit_resource what, rlim_t value) : what(what) {
        signal(SIGXFSZ, SIG_IGN);
        getrlimit(what, &before);
        const rlimit lower = {value, before.rlim_max};
        setrlimit(what, &lower);
    }
    ~Limit() { setrlimit(what, &before); }
    __rlimit_resource what;
    rlimit before;
};

// Bytes without a pattern.
std::string noise(size_t bytes) {
    std::string data(bytes, '\0');
    for (size_t i = 0; i < bytes; i++) data[i] = static_cast<char>(i * 2654435761u >> 13);
    return data;
}
// llm.c's files begin with 256 int32.
std::string header(std::vector<int32_t> numbers) {
    numbers.resize(256);
    return bytes_of(numbers);
}

// A good file and its reader. Whatever is changed in it, the reader names the file and says `what`.
struct GoodFile {
    std::function<void(const std::string&path)> write, read;
    std::string path = folder() + "/file.bin", bytes = (write(path), read_file(path));

    void check(const std::string& changed, const std::string& what) const {
        write_file(path, changed);
        CHECK_ERROR(read(path), path + ": " + what);
    }
    void cut(size_t length, const std::string& what) const { check(bytes.substr(0, length), what); }
    template <class Value>
    void poke(size_t offset, Value value, const std::string& what) const {
        std::string changed = bytes;
        std::memcpy(&changed[offset], &value, sizeof value);
        check(changed, what);
    }
};

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Log

TEST(log_json) {
    Row row("train");
    row.add("step", 3).add("loss", 2.5).add("tiny", 1e-300).add("third", 1.0 / 3).add("sum", 0.1 + 0.2);
    row.add("nan", std::nan("")).add("inf", -INFINITY).add("big", 9007199254740993LL);
    row.add("yes", true).add("name", "d12");
    CHECK(row.text() ==
          "{\"kind\": \"train\", \"step\": 3, \"loss\": 2.5, \"tiny\": 1e-300, \"third\": 0.3333333333333333, "
          "\"sum\": 0.30000000000000004, \"nan\": null, \"inf\": null, \"big\": 9007199254740993, \"yes\": true, "
          "\"name\": \"d12\"}");
    std::vector<std::pair<std::string, std::string>> cases = {{"a\"b\\c\n\t\r", "a\\\"b\\\\c\\n\\t\\u000d"},
                                                              {std::string("\0\x1f\x7f", 3), "\\u0000\\u001f\\u007f"},
                                                              {"é€😀", "é€😀"}};
    // These are not UTF-8: a lone continuation, cut sequences, overlong, surrogate, past U+10FFFF, never a lead byte.
    for (const std::string bytes : {"\x80", "\xE2\x82", "\xC3", "\xC0\xAF", "\xE0\x80\x80", "\xED\xA0\x80",
                                    "\xF4\x90\x80\x80", "\xF0\x8F\xBF\xBF", "\xFF", "\xF5\x80\x80\x80"}) {
        std::string json;
        for (size_t i = 0; i < bytes.size(); i++) json += "\\ufffd";
        cases.push_back({bytes, json});
        cases.push_back({bytes + "\"z", json + "\\\"z"});
    }
    for (const auto& [value, json] : cases)
        CHECK(Row("k").add("s", value).text() == "{\"kind\": \"k\", \"s\": \"" + json + "\"}");
}

// What a byte-level model may sample must not change a terminal's state, nor end a C string.
TEST(text_for_a_terminal) {
    const std::string bad = "\xEF\xBF\xBD";
    CHECK(for_terminal("One day,\n\tshe “ran” 😀") == "One day,\n\tshe “ran” 😀");
    CHECK(for_terminal(std::string("a\0b", 3)) == "a" + bad + "b");
    CHECK(for_terminal("\x1b[2J\x07\x0e\r\x7f") == bad + "[2J" + bad + bad + bad + bad);
    CHECK(for_terminal("\xC2\x9B\x32J\xC2\xA0") == bad + "2J\xC2\xA0");  // U+009B is ESC [ too
    CHECK(for_terminal("\x80z\xE2\x82") == bad + "z" + bad + bad);
    for (const std::string text : {"“ran” é😀", "\xF0\x9F\xE2\x82z\x80\xC2", "\x80\xED\xA0\x80\xE2\x82\xFF"}) {
        std::string rest, shown;  // byte by byte
        for (const char byte : text) {
            shown += take_for_terminal(rest += byte);
            CHECK(for_terminal(text).compare(0, shown.size(), shown) == 0 && rest.size() <= 3);
        }
        CHECK(shown + for_terminal(rest) == for_terminal(text));
    }
}

TEST(log_append_truncate) {
    const std::string here = folder(), path = here + "/log.jsonl";
    const auto train = [](int step) { return Row("train").add("step", step); };
    const Row start = Row("start").add("note", "a string with \"step\": 99 in it");
    Strings logs = {start.text() + "\n"};  // the start and the first i steps
    for (int i = 1; i <= 5; i++) logs.push_back(logs.back() + train(i).text() + "\n");
    Log(path).write(start);
    Log log(path);
    for (int i = 1; i <= 5; i++) {
        if (i ==
            4) {  // a disk that is full in the middle of a row: the rows before it stay, and it comes with the next
            const Limit full(RLIMIT_FSIZE, 300);
            const Row row = Row("train").add("text", std::string(300, 'x'));
            CHECK_ERROR(log.write(row), path + ": cannot write: File too large");
            CHECK(read_file(path) == logs[3]);
            for (const int j : {4, 5}) logs[j].insert(logs[3].size(), row.text() + "\n");
        }
        log.write(train(i));
        CHECK(read_file(path) == logs[i]);  // each row is there as soon as it is written
    }
    // A row cut off by a crash goes away.
    for (const int j : {4, 5}) logs[j] = logs[j - 1] + train(j).text() + "\n";
    for (const std::string& whole : {logs[5], logs[3], logs[3] + "{\"kind\": \"tr"}) {
        write_file(path, whole);
        Log::truncate_after(path, 3);
        CHECK(read_file(path) == logs[3]);
    }
    Log(path).write(train(4));
    CHECK(read_file(path) == logs[4]);
    Log::truncate_after(path, -1);
    CHECK(read_file(path) == logs[0]);
    Log::truncate_after(here + "/none.jsonl", 1);  // no log yet
    CHECK(names_in(here) == Names{"log.jsonl"});
    Log(path, false).write(train(0));
    CHECK(read_file(path) == train(0).text() + "\n");
    Log().write(train(1));
}

// ---------------------------------------------------------------------------------------------------------------------
// Files written whole or not at all, and their checksum

TEST(checksum) {
    std::vector<unsigned char> data(1000);
    for (size_t i = 0; i < data.size(); i++) data[i] = static_cast<unsigned char>(i * 7 + i / 256 + 1);
    // The values are pinned, because files on disk depend on them.
    CHECK(checksum64(data.data(), 1000, 5) == 0x69282bffc8c8222eu);
    std::vector<unsigned char> shifted = data;  // out of alignment
    shifted.insert(shifted.begin(), 0);
    CHECK(checksum64(shifted.data() + 1, 1000, 5) == 0x69282bffc8c8222eu);
    uint64_t all = 0;  // of all lengths up to 100
    for (size_t n = 0; n <= 100; n++) all = checksum64(data.data(), n, all);
    CHECK(all == 0x35712271456642d5u);
}

static void write_atomically(const std::string& path, const Strings& pieces) {
    std::vector<Block> blocks;
    for (const std::string& piece : pieces) blocks.push_back({piece.data(), piece.size()});
    write_whole_file(path, blocks);
}

// dev/test_faults has what a crash leaves at every point, and dev/test_resume what a full disk does.
TEST(atomic_file) {
    const std::string here = folder(), path = here + "/out.bin", temporary = format("out.bin.tmp.%d", getpid());
    write_file(here + "/" + temporary, std::string(5000, 'x'));  // from a process with the same number
    Strings pieces = {"small", noise(3 << 20), ""};              // the second is written in pieces
    pieces.resize(300000, "0123456789");
    std::string want;
    for (const std::string& piece : pieces) want += piece;

    most_at_once = 70001;
    write_atomically(path, pieces);
    most_at_once = SIZE_MAX;
    for (int i = 0; i < 2; i++) {
        CHECK(read_file(path) == want && names_in(here) == Names{"out.bin"});
        const auto stop = [] { throw Error("before it has its name, so only the old file stays"); };
        CHECK_ERROR(write_whole_file(path, {{"half", 4}}, stop), "before it");
    }
    const mode_t mask = umask(022);
    write_atomically(path, {"new"});
    umask(mask);
    CHECK(read_file(path) == "new");
    CHECK(static_cast<int>(fs::status(path).permissions()) == 0644);  // others may read it
    // The name is taken by a directory while the file is written.
    CHECK_ERROR(write_whole_file(here + "/late", {}, [&] { fs::create_directory(here + "/late"); }),
                here + "/late: cannot rename the finished file to: Is a directory");
}

// ---------------------------------------------------------------------------------------------------------------------
// Model, state, tokenizer and questions

static const ModelHeader kTiny = {DType::f32, {16, 50, 128, 2, 2, 8}};
static void write_tiny(const std::string& path) {
    write_model(path, kTiny, noise(kTiny.bytes()).data());
}

TEST(model_round_trip) {
    const std::string path = folder() + "/model.bin";
    CHECK((Config{1024, 50257, 50304, 12, 12, 768}.num_parameters() == 124475904));    // 124M
    CHECK((Config{1024, 50257, 50304, 48, 25, 1600}.num_parameters() == 1557686400));  // 1.5B
    ModelHeader bf16 = kTiny, longer = kTiny;
    bf16.dtype = DType::bf16, longer.config.max_T = 262144;  // the context of scripts/run_long_context_gpus.sh
    for (const ModelHeader& h : {kTiny, bf16, longer}) {
        const std::string parameters = noise(h.bytes());
        std::string back(parameters.size(), 'x');
        write_model(path, h, parameters.data());
        const int version = h.dtype == DType::f32 ? 3 : 5;
        CHECK(read_file(path) == header({20240326, version, h.config.max_T, 50, 2, 2, 8, 128}) + parameters);
        const ModelHeader got = read_model_header(path);
        CHECK(!std::memcmp(&got, &h, sizeof h));
        read_model_parameters(path, got, back.data());
        CHECK(back == parameters);
    }
}

static GoodFile good_model() {
    return {write_tiny, [](const std::string& path) {
                const ModelHeader header = read_model_header(path);
                std::string parameters(header.bytes(), 0);
                read_model_parameters(path, header, parameters.data());
            }};
}

TEST(model_errors) {
    const GoodFile file = good_model();
    file.cut(1023, "truncated: expected 1024 bytes at offset 0, found 1023");
    file.cut(1024, "truncated: expected 12672 bytes (fp32, L=2 NH=2 C=8 V=50), found 1024");
    file.check(file.bytes + "x", "too long: expected 12672 bytes (fp32, L=2 NH=2 C=8 V=50), found 12673");
    file.poke(0, 123, "wrong magic at offset 0: expected 20240326, found 123; give a model");
    file.poke(0, 20240520, "wrong magic at offset 0: expected 20240326, found 20240520; give a model");
    file.poke(4, 2, "wrong version at offset 4: expected 3 (fp32) or 5 (bf16), found 2");
    file.poke(4, 5, "too long");  // fp32 data under a bf16 header
    int offset = 8;
    for (const char* field : {"maxT", "vocabulary", "layers", "heads", "channels", "padded vocabulary"}) {
        for (const int bad : {0, -1, INT_MIN, INT_MAX})
            file.poke(offset, bad, format("damaged header: %s at offset %d: expected ", field, offset));
        offset += 4;
    }
    file.poke(20, 3, "damaged header: channels at offset 24: expected a multiple of 3 heads, found 8");
    file.poke(28, 49, "damaged header: padded vocabulary at offset 28: expected 50..16777216, found 49");
    file.poke(16, 3, "truncated: expected 16160 bytes (fp32, L=3 NH=2 C=8 V=50), found 12672");
}

namespace {

// The content of each section, by its name.
using State = std::map<std::string, std::string>;
const State kState = {{"step", "1234"}, {"m", noise(120)}, {"v", noise(124).substr(4)}, {"empty", ""}, {"text", "odd"}};
// What a read that succeeds fills in.
State blank() {
    State state = kState;
    for (auto& [name, bytes] : state) bytes.assign(bytes.size(), '?');
    return state;
}
std::vector<Section> sections(State& state) {
    std::vector<Section> all;
    for (auto& [name, bytes] : state) all.push_back({name, bytes.data(), bytes.size()});
    return all;
}
const Identity kRun = {{{"model", "d12"}, {"B", "4"}, {"data", "00ff"}, {"note", ""}}};

GoodFile good_state() {
    return {[state = kState](const std::string& path) mutable { write_state(path, kRun, sections(state)); },
            [state = kState](const std::string& path) mutable { read_state(path, kRun, sections(state)); }};
}

}  // namespace

TEST(state_round_trip_and_flipped_bits) {
    const GoodFile file = good_state();
    std::fstream in_place(file.path, std::ios::in | std::ios::out | std::ios::binary);
    for (size_t bit = 0; bit < 8 * file.bytes.size(); bit++) {
        const char good = file.bytes[bit / 8];
        in_place.seekp(bit / 8).put(static_cast<char>(good ^ 1 << bit % 8)).flush();
        const std::string error = test::error_of([&] { file.read(file.path); });
        // If a length in the header now lies past the end, the error has no offset, but it has expected and found.
        CHECK(contains(error, file.path) && (contains(error, "offset") || contains(error, "truncated: expected")));
        in_place.seekp(bit / 8).put(good).flush();
    }
    State back = blank();
    read_state(file.path, kRun, sections(back));
    CHECK(back == kState);
    write_state(file.path, {}, {});
    read_state(file.path, {}, {});
}

TEST(state_errors) {
    const GoodFile file = good_state();
    const std::string path = file.path;
    State more = blank(), fewer = more, shorter = more;
    file.cut(15, "truncated: expected at least 16 bytes, found 15");
    file.cut(447, "truncated: expected 448 bytes, found 447");
    file.check(file.bytes + "x", "too long: expected 448 bytes, found 449");
    const std::string magic = "wrong magic at offset 0: expected gpt2stat, found ";
    file.poke(0, 'G', magic);
    file.poke(0, std::pair{20240326, 3}, magic);
    file.poke(8, 2, "wrong version at offset 8: expected 1, found 2");
    file.poke(20, '\1', "damaged table: checksum at offset 193: expected e9e4136ea91075e5, found 43265eb38e6dc1cf");
    file.poke(444, 'x', "damaged section \"v\" (120 bytes at offset 328): expected ");
    write_file(path, file.bytes);

    more["more"] = "1234";
    fewer.erase("m");
    shorter["v"].resize(116);
    Identity other_B = kRun, with_T = kRun, without_model = kRun;
    other_B.fields[1].second = "8";
    with_T.fields.push_back({"T", "64"});
    without_model.fields.erase(without_model.fields.begin());
    const std::string other_run = "checkpoint of another run: ";
    const struct {
        Identity run;
        State state;
        std::string what;
    } cases[] = {{other_B, blank(), other_run + "B: the checkpoint has \"4\", this run has \"8\""},
                 {with_T, blank(), "fields: expected 5, found 4"},
                 {without_model, blank(), "fields: expected 3, found 4"},
                 {kRun, more, "sections: expected 6, found 5"},
                 {kRun, fewer, "sections: expected 4, found 5"},
                 {kRun, shorter, "section \"v\" at offset 328: expected 116 bytes, found 120"}};
    for (const auto& [run, state, what] : cases) {
        State read = state;
        CHECK_ERROR(read_state(path, run, sections(read)), path + ": " + what);
        CHECK(read == state);  // nothing is read before all of it fits
    }
}

TEST(tokenizer_bytes) {
    // GPT-2's encoder.json has the printable bytes in order, then each other byte as it comes.
    const struct {
        int first, last, token;  // of the first byte
    } ranges[] = {{'!', '~', 0}, {0xA1, 0xAC, 94},  {0xAE, 0xFF, 106},
                  {0, ' ', 188}, {0x7F, 0xA0, 221}, {0xAD, 0xAD, 255}};
    int bytes = 0;
    for (const auto& r : ranges)
        for (int byte = r.first; byte <= r.last; byte++, bytes++) {
            const int token = r.token + byte - r.first;
            CHECK(byte_to_token(byte) == token && token_to_byte(token) == byte);
        }
    CHECK(bytes == 256);
    for (const int none : {-1, 256, 50256, INT_MIN}) CHECK(token_to_byte(none) == -1);

    const std::string text("naïve €5\0\n😀\xFF", 19);
    std::string back;
    const Tokenizer tokenizer;
    for (const int token : encode_bytes(text)) back += tokenizer.decode(token);
    CHECK(back == text && encode_bytes(text).size() == text.size());
    CHECK(tokenizer.decode(256) == "<256>" && tokenizer.decode(50256) == "<|endoftext|>");
    CHECK(tokenizer.decode(1234) == "<1234>" && tokenizer.decode(-1) == "<-1>");
}

static std::string tokenizer_file(int version, const Strings& pieces) {
    const int count = static_cast<int>(pieces.size());
    std::string bytes = header({20240328, version, count, version == 2 ? count - 1 : 0});
    for (const std::string& piece : pieces) bytes += static_cast<char>(piece.size()) + piece;
    return bytes;
}

static GoodFile good_tokenizer() {
    return {[](const std::string& path) {
                write_file(path, tokenizer_file(2, {"a", "bc", "def"}));
            },
            [](const std::string& path) {
                const Tokenizer tokenizer(path);
                for (int i = -1; i < 300; i++) tokenizer.decode(i);
            }};
}

TEST(tokenizer_files) {
    const std::string path = folder() + "/tokenizer.bin";
    Strings pieces = {"a", std::string("\0\xFF", 2), " the", std::string(255, 'x'), "€"};
    for (int i = 0; i < 300; i++) pieces.push_back(format("piece%d", i));
    pieces.push_back("<|endoftext|>");
    for (const int version : {1, 2}) {
        write_file(path, tokenizer_file(version, pieces));
        const Tokenizer tokenizer(path);
        for (size_t i = 0; i < pieces.size(); i++) CHECK(tokenizer.decode(i) == pieces[i]);
        for (const int none : {306, 50256, -1}) CHECK(tokenizer.decode(none) == format("<%d>", none));
    }
    const GoodFile file = good_tokenizer();
    file.cut(1000, "truncated: expected 1024 bytes at offset 0, found 1000");
    file.cut(1032, "truncated in token 2 of 3 at offset 1029: expected 4 bytes, found 3");
    file.check(file.bytes + "z", "too long: expected 1033 bytes for 3 tokens, found 1034");
    file.poke(0, 20240520, "wrong magic at offset 0: expected 20240328, found 20240520");
    file.poke(4, 3, "wrong version at offset 4: expected 1 or 2, found 3");
    file.poke(8, 0, "number of tokens at offset 8: expected 1..9 (what 9 bytes can hold), found 0");
    file.poke(8, -1, "number of tokens at offset 8: expected 1..9 (what 9 bytes can hold), found 4294967295");
    file.poke(8, 4, "truncated in token 3 of 4 at offset 1033: expected 1 bytes, found 0");
    file.poke(12, 3, "id of <|endoftext|> at offset 12: expected less than 3, found 3");
}

// All single bytes and then these tokens, as GPT-2 numbers them. A token's id is the rank of the merge that makes it.
static std::string write_pairs(const Strings& merges) {
    Strings pieces(256);
    for (int byte = 0; byte < 256; byte++) pieces[byte_to_token(byte)] = std::string(1, static_cast<char>(byte));
    pieces.insert(pieces.end(), merges.begin(), merges.end());
    pieces.push_back("<|endoftext|>");
    const std::string path = folder() + "/pairs.bin";
    write_file(path, tokenizer_file(2, pieces));
    return path;
}

// dev/test_prepare.py compares with tiktoken.
TEST(tokenizer_encodes_pairs) {
    const std::string path =
        write_pairs({"bc", "ab", "cd", "abcd", "aa", "n'",  "'t",   "'tt", "re", "'re", " a",   "a1",
                     "1a", "11", "!!", "a!",   "  ", " \n", "\n\n", "é",   "<|", "|>",  "aare", ""});
    const Tokenizer tokenizer(path);
    const Strings cases[] = {
        {"abc", "|a|bc"},       // the merge that was learnt first, not the first in the text
        {"abcd", "|abcd"},      // a word that is a token is that token, even if no merges make it
        {"aaaaa", "|aa|aa|a"},  // the leftmost of equals
        {"aareb", "|aare|b"},   // the right part comes last
        {"n'tt 'treb'RE're", "|n|'t|t| |'|t|re|b|'|R|E|'re"},
        {"a a  a\n a \n\n a  ", "|a| a| | a|\n| a| \n|\n| a|  "},
        {"a11a!!a a!", "|a|11|a|!!|a| a|!"},
        {"éa\u0301a", "|é|a|\xCC|\x81|a"},
        {"<|a|>", "|<||a||>"},
    };
    for (const Strings& c : cases) {
        std::string tokens;
        for (const int token : tokenizer.encode(c[0], 50257, "")) tokens += "|" + tokenizer.decode(token);
        if (tokens != c[1]) test::report(__FILE__, __LINE__, c[1] + " expected, found " + tokens);
        for (const int vocab : {kByteVocab, 50256}) CHECK(tokenizer.encode(c[0], vocab, "") == encode_bytes(c[0]));
    }
    for (const char c : {'a', '\n'})  // in square time this would take hours
        CHECK(tokenizer.encode(std::string(4000000, c), 50257, "").size() == 2000000);
    for (const char* bad : {"\x80", "\xC1\xBF", "\xC3!", "\xE0\x9F\xBF", "\xE2\x82", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF",
                            "\xF0\x9F\x99", "\xF4\x90\x80\x80", "\xF8\x88\x80\x80\x80", "\xFF"})
        CHECK_ERROR(tokenizer.encode("é " + std::string(bad), 50257, "book.txt"),
                    format("book.txt: invalid UTF-8 at offset 3: found byte 0x%02x; convert it to UTF-8", *bad & 0xFF));
    write_file(path, tokenizer_file(2, {"a", "bc", ""}));
    CHECK_ERROR(Tokenizer(path).encode("a b", 50257, ""), path + ": no token for byte 0x20; give GPT-2's");
    write_file(path, tokenizer_file(2, Strings(50258, "a")));
    CHECK_ERROR(Tokenizer(path).encode("a", 50257, ""),
                path + ": 50258 tokens, but the model's vocabulary is 50257; give");
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
    CHECK(read.size() == 2);
    for (size_t i = 0; i < read.size(); i++)
        CHECK(read[i].index == kChoices[i].index && read[i].label == kChoices[i].label &&
              read[i].context == kChoices[i].context && read[i].endings == kChoices[i].endings);
    CHECK_ERROR(read_choices(path, 256, 64), path + ": token at offset 1076: expected 0..255, found 256");
    CHECK_ERROR(read_choices(path, 257, 4),
                path + ": length of an example at offset 1060: expected at most T = 4 tokens");
    CHECK(read_choices(path, 257, 5).size() == 2);  // the last token is only predicted

    const int32_t longest = 40;  // bytes of the longest example, 20 numbers
    CHECK(file.bytes.compare(0, 1024, header({20240522, 1, 2, longest})) == 0);
    file.check(file.bytes + "xx", "end of the file at offset ");
    file.poke(1030, '\4', "number of endings at offset 1032: expected 5..64, found 4");  // its label is the fifth
    file.poke(0, 0, "wrong magic at offset 0: expected 20240522, found 0");
    file.poke(4, 65, "wrong version at offset 4: expected 1, found 65");
    file.poke(1024, '\xBF', "start of an example at offset 1024: expected 65535..65535, found 65471");
    file.poke(1032, '\x44', "number of endings at offset 1032: expected 2..64, found 68");
    write_choices(path, {});
    CHECK_ERROR(file.read(path), path + ": no examples");
}

// The two ways to write name a path that they cannot use and say why. All formats but the log are atomic files.
TEST(paths_that_cannot_be_written) {
    const std::string here = folder();
    write_file(here + "/file", "x");
    const std::function<void(const std::string& path)> writers[] = {
        [](const std::string& path) { write_atomically(path, {"x"}); },
        [](const std::string& path) { Log(path).write(Row("train")); }};
    const std::pair<std::string, const char*> unusable[] = {
        {here + "/file/x", "Not a directory; a file stands where"},
        {here + "/none/x", "No such file or directory; check the path"},
        {here, "Is a directory; give the path of a file"},
        {here + "/" + std::string(300, 'x'), "File name too long"}};
    for (const auto& write : writers)
        for (const auto& [path, why] : unusable) {
            CHECK_ERROR(write(path), path + ": cannot ");
            CHECK_ERROR(write(path), why);
        }
    CHECK_ERROR(write_atomically("/dev/null", {"x"}), "/dev/null: not a regular file");
    CHECK(fs::is_character_file("/dev/null"));  // not replaced by a file
}

// dev/test_resume has which checkpoints a run keeps, and what it removes at its start.
TEST(checkpoint_directory) {
    const std::string here = folder();
    CHECK(newest_checkpoint(here + "/none") == -1 && newest_checkpoint(here) == -1);
    Names left = {"log.jsonl",           "state_.bin",          "state_7.bin",        "state_00000999.bin.bak",
                  "model_00000001.bin2", "xstate_00000999.bin", "state_00000999.txt", "state_-0000001.bin",
                  "main_log.tmp.12"};  // files of others, which stay
    for (const std::string& name : left) write_file(here + "/" + name, "x");
    CHECK(newest_checkpoint(here) == -1);
    for (const int step : {0, 100, 200, 123456789})
        for (const auto& path : {model_path, state_path}) write_file(path(here, step), "x");
    CHECK(newest_checkpoint(here) == 123456789);
    fs::remove(model_path(here, 100));  // a prune that was interrupted
    write_file(model_path(here, 50), "x");
    CHECK(newest_checkpoint(here, "model") == 123456789);
    prune_checkpoints(here, 2, 0);
    left.insert({"model_00000200.bin", "state_00000200.bin", "model_123456789.bin", "state_123456789.bin"});
    CHECK(names_in(here) == left);
    fs::remove(here + "/log.jsonl"), fs::create_directory(here + "/log.jsonl");
    CHECK_ERROR(newest_checkpoint(here), here + "/log.jsonl: cannot open: Is a directory");
    prune_checkpoints(here + "/none", 1, 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Loader

namespace {

using Tokens = std::vector<int>;
Tokens counting(size_t n, int first = 0) {
    Tokens tokens(n);
    std::iota(tokens.begin(), tokens.end(), first);
    return tokens;
}
struct TestLoader : Loader {
    size_t B, T;
    TestLoader(const std::string& pattern, int B, int T, int vocab = 50257, bool shuffle = false, uint64_t seed = 0,
               const Tokenizer& tokenizer = {})
        : Loader(pattern, B, T, vocab, shuffle, seed, tokenizer), B(B), T(T) {}
    // The next B windows of T + 1 tokens. The targets are the inputs shifted by one.
    std::vector<Tokens> batch() {
        Tokens inputs(B * T, -7), targets(B * T, -7);
        next(inputs.data(), targets.data());
        std::vector<Tokens> windows;
        for (auto in = inputs.begin(), out = targets.begin(); in != inputs.end(); in += T, out += T) {
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

// Shards of 41, 8, 23, 4 and 60 tokens, all different. With T = 4 they have 10 + 1 + 5 + 0 + 14 = 30 windows.
const std::vector<Tokens> kShards = {counting(41), counting(8, 1000), counting(23, 2000), counting(4, 3000),
                                     counting(60, 4000)};
std::string write_shards(const std::vector<Tokens>& shards) {
    const std::string path = folder();
    for (size_t i = 0; i < shards.size(); i++) write_shard(path + format("/train_%04zu.bin", i), shards[i]);
    return path + "/train_*.bin";
}

}  // namespace

// Whatever the data, an epoch has each window once, with shuffle in an order of its own. Three epochs may end inside
// batches. Reading, restoring and skipping (as ranks do the batches of others) come to the same at every point.
TEST(loader_reads_each_window_from_any_point) {
    const std::string text = folder() + "/text";
    std::string bytes("naïve €5 – 😀\n\r\t\x7F\xFF\xC3");
    for (int i = 1; i < 256; i++) bytes += static_cast<char>(i);
    write_file(text, bytes);
    const Tokens encoded = encode_bytes(bytes);
    const auto after = [&](int end_of_text) {
        Tokens document = {end_of_text};
        document.insert(document.end(), encoded.begin(), encoded.end());
        return std::vector<Tokens>{document};
    };
    const std::string book = folder() + "/book.txt";
    write_file(book, "It rained. It rained on.\n\nIt");
    const Tokenizer none, pairs(write_pairs({"It", " r", "ai", " rai", "ne"}));
    Tokens in_pairs = pairs.encode(read_file(book), 50257, "");
    in_pairs.insert(in_pairs.begin(), 50256);
    const std::vector<Tokens> documents = {{50256, 1, 2, 255, 50256, 3, 4, 50256, 9}};
    const struct {
        std::string pattern, description;
        int vocab;
        std::vector<Tokens> shards;
        bool paired = false;
    } cases[] = {
        {write_shards(kShards),
         "5 shards, 136 tokens; left out: 8 at the shards' ends, 4 in shards shorter than 5: ", 50257, kShards},
        {write_shards(documents), "1 shard, 9 tokens", 50257, documents},
        {write_shards(documents), "1 shard, 9 tokens", kByteVocab, {{256, 1, 2, 255, 256, 3, 4, 256, 9}}},
        {text, "text file, 282 tokens", kByteVocab, after(256)},
        {text, "text file, 282 tokens", 50257, after(50256)},
        {text, "text file, 282 tokens", 50304, after(50256)},
        {book, format("text file, %zu BPE tokens", in_pairs.size()), 50257, {in_pairs}, true}};
    for (const auto& c : cases)
        for (const bool shuffle : {false, true}) {
            std::vector<Tokens> windows;
            for (const Tokens& shard : c.shards) {
                for (size_t at = 0; at + 4 < shard.size(); at += 4) windows.emplace_back(&shard[at], &shard[at] + 5);
            }
            const size_t n = windows.size(), B = std::min<size_t>(n, 4), batches = (3 * n + B - 1) / B;
            TestLoader loader(c.pattern, B, 4, c.vocab, shuffle, 3, c.paired ? pairs : none);
            CHECK(loader.windows() == n);
            CHECK(loader.description().compare(0, c.description.size(), c.description) == 0);
            std::vector<std::vector<Tokens>> stream;
            std::vector<Tokens> read;
            for (size_t i = 0; i < batches; i++) {
                CHECK((loader.state() == LoaderState{B * i / n, B * i % n, i}));
                stream.push_back(loader.batch());
                read.insert(read.end(), stream.back().begin(), stream.back().end());
            }
            if (shuffle) std::sort(windows.begin(), windows.end());
            for (size_t epoch = 0; epoch < 3; epoch++) {
                std::vector<Tokens> order(&read[epoch * n], &read[epoch * n] + n);
                if (shuffle) std::sort(order.begin(), order.end());
                CHECK(order == windows);
            }
            for (size_t i = 0; i < batches; i++) {
                const LoaderState from = {B * i / n, B * i % n, i};
                TestLoader resumed(c.pattern, B, 4, c.vocab, shuffle, 3, c.paired ? pairs : none);
                resumed.restore(from);
                for (size_t k = i; k < batches; k++) {
                    CHECK(resumed.batch() == stream[k]);
                    loader.restore(from);  // also in a loader that is somewhere else
                    loader.skip(k - i);
                    CHECK(loader.state().batches == k && loader.batch() == stream[k]);
                }
            }
            loader.reset();
            CHECK(loader.state() == LoaderState{} && loader.batch() == stream[0]);
            CHECK_ERROR(loader.restore({0, n, 0}),
                        format("cannot go on at window %zu: an epoch has %zu; resume with", n, n));
        }
    CHECK(TestLoader(book, 1, 4, 50257, true, 3, pairs).identity() !=
          TestLoader(book, 1, 4, 50257, true, 3).identity());
}

// Checkpoints hold a position in the order, so that it can never change. When it was chosen, the orders of seeds, epochs
// and shards differed as random ones do, and all windows came first about equally often.
TEST(loader_shuffle) {
    Tokens first;
    for (const Tokens& window : TestLoader(write_shards(kShards), 10, 4, 50257, true, 3).batch())
        first.push_back(window[0]);
    CHECK((first == Tokens{12, 20, 28, 24, 16, 4, 36, 32, 8, 0}));
    uint64_t orders = 0;
    for (const std::vector<Tokens>& shards : {kShards, {counting(101), counting(101, 1000)}, {counting(4001)}})
        for (int seed = 0; seed < 9; seed++) {
            TestLoader loader(write_shards(shards), 10, 4, 50257, true, seed);
            for (int i = 0; i < 300; i++)
                for (const Tokens& window : loader.batch()) orders = checksum64(&window[0], sizeof(int), orders);
        }
    CHECK(orders == 0xfbee78cd2c2c5c8du);
}

static GoodFile good_shard() {
    return {[](const std::string& path) { write_shard(path, counting(17)); },
            [](const std::string& path) {
                TestLoader loader(path, 2, 4);
                for (int i = 0; i < 20; i++) loader.batch();
            }};
}

TEST(loader_errors) {
    const GoodFile file = good_shard();
    const std::string path = file.path, here = fs::path(path).parent_path();
    file.poke(0, 123, "wrong magic at offset 0: expected 20240520, found 123; give llm.c token shards");
    file.poke(0, 20240326, "wrong magic at offset 0: expected 20240520, found 20240326; this is a model checkpoint");
    file.poke(4, 2, "wrong version at offset 4: expected 1, found 2");
    file.poke(8, -1, "damaged header: number of tokens at offset 8: expected 0..2147483647, found -1");
    file.poke(8, 18, "truncated: the header says 18 tokens, expected 1060 bytes, found 1058");
    file.poke(8, INT_MAX, "truncated: the header says 2147483647 tokens, expected 4294968318 bytes, found 1058");
    file.poke(8, 16, "too long: the header says 16 tokens, expected 1056 bytes, found 1058");
    file.cut(1057, "truncated: the header says 17 tokens, expected 1058 bytes, found 1057");
    for (const size_t length : {4, 12, 1023})
        file.cut(length, format("truncated: expected a header of 1024 bytes, found a file of %zu", length));
    for (const char* bytes : {"", "abc"}) file.check(bytes, "wrong magic");  // shorter than a magic

    const std::string text = here + "/b.txt", exact = here + "/exact.md",
                      small = write_shards(std::vector<Tokens>(10, counting(4)));
    write_file(path, file.bytes);
    write_file(text, "this is text, long enough for a batch or two");
    write_file(exact, "abcdefgh");  // 9 tokens with <|endoftext|>
    write_file(here + "/seven", "abcdefg");
    write_file(here + "/empty", "");
    write_shard(here + "/none", {});
    write_shard(here + "/eight", counting(8));
    write_shard(here + "/nine", counting(9));
    for (const std::string& enough : {path, text, exact, here + "/nine", here + "/eight"}) TestLoader(enough, 2, 4);
    write_shard(here + "/four", counting(4));
    const std::string little = ": too little data: ";
    const std::pair<std::string, std::string> unusable[] = {
        {here + "/missing.bin", ": no such file"},
        {here + "/missing_*.bin", ": no such file, and no file matches it"},
        {here + "/missing/*.bin", ": a directory of this pattern is missing or cannot be read"},
        {"", ": no such file"},
        {here, ": is a directory"},
        {path + "/x", ": no such file"},
        {"/dev/null", ": not a regular file"},
        {here + "/four", little + "4 tokens in 1 file, none with the 5 of a sequence"},
        {here + "/none", little + "0 tokens in 1 file"},
        {here + "/empty", little + "0 tokens in 1 file"},
        {small, little + "40 tokens in 10 files"}};  // no shard has a whole window
    for (const auto& [pattern, why] : unusable) CHECK_ERROR(TestLoader(pattern, 2, 4), pattern + why);
    CHECK_ERROR(TestLoader(here + "/[bf]*", 2, 4), text + ": wrong magic at offset 0: expected 20240520, found ");
    CHECK_ERROR(TestLoader(here + "/[bf]*", 2, 4),
                "a pattern takes token shards only, a text file has to be given alone");
    CHECK_ERROR(TestLoader(text, 2, 4, 50256),
                text + ": text needs a vocabulary of 257 (bytes) or at least 50257 (GPT-2), found 50256");
    CHECK_ERROR(TestLoader(text, 0, 4), text + ": cannot make batches of B=0, T=4");
    CHECK_ERROR(TestLoader(text, 4, -1), text + ": cannot make batches of B=4, T=-1");

    if (geteuid() != 0) {  // if one cannot be read, training must not go on with the others' shards alone
        for (const std::string sub : {"/sub1", "/sub2"}) {
            fs::create_directory(here + sub);
            write_file(here + sub + "/a.bin", file.bytes);
        }
        fs::permissions(here + "/sub2", fs::perms::none);
        CHECK_ERROR(TestLoader(here + "/sub*/*.bin", 2, 4),
                    ": a directory of this pattern is missing or cannot be read");
        fs::permissions(here + "/sub2", fs::perms::owner_all);
    }

    write_file(here + "/x[1].bin", file.bytes);
    TestLoader(here + "/x[1].bin", 2, 4);  // this file exists, so its name is no pattern

    for (const auto& [vocab, limit, token] : {std::tuple{kByteVocab, 256, 256}, {50304, 50304, 65535}}) {
        Tokens tokens = counting(13);
        tokens[10] = token;
        write_file(path, header({20240520, 1, 13}) + bytes_of(std::vector<uint16_t>(tokens.begin(), tokens.end())));
        TestLoader loader(path, 2, 3, vocab);
        loader.batch();
        CHECK_ERROR(
            loader.batch(),
            path + format(": token at offset 1044: expected less than the vocabulary of %d, found %d", limit, token));
    }
    TestLoader loader(path, 2, 4);
    fs::resize_file(path, 1030);  // the data changes while a loader runs
    CHECK_ERROR(loader.batch(), path + ": truncated: expected 10 bytes at offset 1024, found 6");
}

TEST(loader_many_shards) {
    std::vector<Tokens> shards;
    for (int i = 0; i < 2000; i++) shards.push_back(counting(5, 10 * i));
    const std::string pattern = write_shards(shards);
    const Limit few(RLIMIT_NOFILE, 40);  // open files
    TestLoader loader(pattern, 8, 2, 50257, true, 5);
    CHECK(loader.description() == "2000 shards, 10000 tokens" && loader.windows() == 4000);
    std::set<Tokens> seen;
    for (int i = 0; i < 500; i++)
        for (const Tokens& window : loader.batch()) seen.insert(window);
    CHECK(seen.size() == 4000 && (loader.state() == LoaderState{1, 0, 500}));
}

// Makes a file larger, nearly all of it a hole, and writes `end` where it ends.
static void make_sparse(const std::string& path, uint64_t size, const std::string& end) {
    if (truncate(path.c_str(), static_cast<off_t>(size - end.size())))
        SKIP("no sparse files here: %s", std::strerror(errno));
    std::ofstream(path, std::ios::app | std::ios::binary) << end;
}

TEST(loader_larger_than_2_gib) {
    const std::string path = folder() + "/large.bin";
    const uint64_t tokens = 2147000001;  // 4.3 GB
    const int T = 1000;
    std::vector<uint16_t> end(2 * T + 1);
    std::iota(end.begin(), end.end(), 100);
    write_file(path, header({20240520, 1, static_cast<int>(tokens)}));
    make_sparse(path, 1024 + 2 * tokens, bytes_of(end));
    TestLoader loader(path, 2, T);
    CHECK(loader.windows() == 2147000);
    CHECK(loader.description() == "1 shard, 2.1 G tokens");
    loader.restore({3, 2146998, 0});
    CHECK((loader.batch() == std::vector<Tokens>{counting(T + 1, 100), counting(T + 1, 100 + T)}));
    CHECK((loader.state() == LoaderState{4, 0, 1}));
    // The offset in an error is 64 bits wide too.
    make_sparse(path, 1024 + 2 * tokens, "\xE8\xFD");
    loader.restore({3, 2146998, 0});
    CHECK_ERROR(loader.batch(),
                path + ": token at offset 4294001024: expected less than the vocabulary of 50257, found 65000");
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
        {end + "\n" + end + "a" + end + end + "b\r" + end + "\rc\n" + end + "\n", {"a", "b\r", "\rc"}},
        {" \n\t" + end + "\xE2\x80\x83\x1F" + end + "x", {"x"}},
        {"<|endoftext" + end + "|>", {"<|endoftext", "|>"}},
        {"", {}}};
    for (const auto& [text, expected] : cases) CHECK(documents(text) == expected);
    const std::string path = folder() + "/docs.txt";
    write_file(path, "ab\n" + end + "\ncd");
    CHECK((TestLoader(path, 1, 5, kByteVocab).batch() == std::vector<Tokens>{{256, 64, 65, 256, 66, 67}}));
    CHECK((Tokenizer().encode_prompt("a\n" + end + "b" + end, 50257, "") == Tokens{64, 198, 50256, 65, 50256}));
    const Tokenizer pairs(write_pairs({"ab"}));
    CHECK((TestLoader(path, 1, 4, 50257, false, 0, pairs).batch()[0][0] == 50256));
    CHECK((pairs.encode_prompt("ab" + end, 50257, "") == Tokens{256, 50256}));
    write_file(path, "a" + end + "b\xFF");
    CHECK_ERROR(TestLoader(path, 1, 1, 50257, false, 0, pairs), path + ": invalid UTF-8 at offset 15");
    for (const auto& [bytes, what] : {std::pair<std::string, const char*>{"\x93NUMPY and more", "NumPy"},
                                      {std::string("\x08\0\0\0\0\0\0\0{}", 10), "safetensors"},
                                      {"\x1F\x8B\x08", "gzip"},
                                      {"PAR1", "Parquet"},
                                      {"PK\3\4", "zip"},
                                      {std::string("\xFF\xFEh\0i\0", 6), "UTF-16"},
                                      {std::string("h\0i\0", 4), "zero byte at offset 1"}}) {
        write_file(path, bytes);
        CHECK_ERROR(TestLoader(path, 1, 1), what);
    }
}

// A shell and glob() give back what was quoted for them.
TEST(names_in_commands) {
    for (const std::string name : {"run1", "my run", "it's", "$HOME `x` \"q\" \\ *", "", "a\nb", "-x;&|"})
        CHECK(shell("printf %s " + shell_quoted(name)).out == name);
    const std::string here = folder();
    write_shard(here + "/a[1]*.bin", counting(9));
    TestLoader(glob_escaped(here + "/a[1]*") + ".bi?", 1, 4);
}

// dev/test_resume has what a run says of other data.
TEST(loader_identity) {
    const auto identity = [](const std::string& pattern) { return TestLoader(pattern, 1, 4).identity(); };
    const std::string moved = folder(), all = moved + "/*.bin", pattern = write_shards(kShards);
    fs::copy(fs::path(pattern).parent_path(), moved);
    const uint64_t before = TestLoader(pattern, 2, 3, 65536, true, 8).identity();  // of the data, however it is read
    CHECK(identity(all) == before);
    write_shard(moved + "/z.bin", {});
    CHECK(identity(all) != before);
    // A large file is sampled. Its size, its first and its last bytes count, and a hundredth of it spread over the
    // rest.
    const size_t n = 5 << 20;
    const std::pair<size_t, size_t> changes[] = {{0, 0}, {n, 1},           {n - 1, 1},
                                                 {0, 1}, {n / 5, n / 100}, {n / 3 * 2, n / 100}};
    std::set<uint64_t> sampled;
    for (const auto& [at, bytes] : changes) {
        std::string text(std::max(n, at + bytes), 'x');
        std::fill_n(text.begin() + at, bytes, 'y');
        write_file(moved + "/text", text);
        sampled.insert(identity(moved + "/text"));
    }
    CHECK(sampled.size() == std::size(changes));
}

// ---------------------------------------------------------------------------------------------------------------------
// What no reader takes for its file

TEST(other_paths_and_cut_files) {
    for (const GoodFile& file : {good_model(), good_state(), good_tokenizer(), good_choices()}) {
        const std::string none = file.path + ".none", here = fs::path(file.path).parent_path();
        CHECK_ERROR(file.read(none), none + ": cannot open: No such file or directory");
        CHECK_ERROR(file.read(here), here + ": cannot open: Is a directory");
        CHECK_ERROR(file.read("/dev/null"), "/dev/null: not a regular file");
        file.read(file.path);
        for (size_t length = file.bytes.size(); length-- > 0;) {
            fs::resize_file(file.path, length);
            CHECK_ERROR(file.read(file.path), file.path + ": ");
            CHECK_ERROR(file.read(file.path), "expected");
        }
    }
}

// A reader refuses a damaged file in one line or reads it. `make sanitize` sees what else it does.
static std::string damaged(std::string bytes, std::mt19937& random) {
    const int numbers[] = {0, 1, -1, 255, 65535, 1 << 20, INT_MAX, INT_MIN};
    for (int n = 1 + random() % 3; n > 0 && !bytes.empty(); n--) {
        const size_t near = random() % 2 ? 40 : 1100;  // mostly where headers and tables are
        const size_t at = random() % (random() % 3 ? std::min(near, bytes.size()) : bytes.size()),
                     length = random() % 16;
        const int kind = random() % 4;
        if (kind == 0) bytes[at] ^= 1 << random() % 8;
        if (kind == 1) bytes.replace(at, 4, reinterpret_cast<const char*>(&numbers[random() % 8]), 4);
        if (kind == 2) bytes.replace(at, random() % 16, bytes.substr(random() % bytes.size(), length));
        if (kind == 3) bytes.resize(std::max<size_t>(at, 1));
    }
    // Half of the tables of states have the checksum that fits the damage, so that the reader goes on.
    uint32_t table = 0;
    if (bytes.size() % 2 && bytes.size() >= 24) std::memcpy(&table, &bytes[12], 4);
    if (table && table <= bytes.size() - 24) {
        const uint64_t sum = checksum64(bytes.data(), 16 + table);
        bytes.replace(16 + table, 8, reinterpret_cast<const char*>(&sum), 8);
    }
    return bytes;
}

TEST(random_damage) {
    std::mt19937 random(1);
    for (const GoodFile& file : {good_model(), good_state(), good_tokenizer(), good_choices(), good_shard()})
        for (int i = 0, refused = 0; i < 600; i++) {
            write_file(file.path, damaged(file.bytes, random));
            const std::string error = test::error_of([&] { file.read(file.path); });
            refused += !error.empty();
            CHECK(error.empty() || (contains(error, file.path + ": ") && !contains(error, "\n")));
            CHECK(i < 599 || refused > 200);
        }
}

TEST_MAIN
