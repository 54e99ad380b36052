// Tests of data/: options, log, checkpoints, tokenizer, loader. They provoke every error and read its one line.
//
//   ./dev/test_data            all        ./dev/test_data loader     those with "loader" in their name
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <atomic>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "data/file.h"
#include "data/loader.h"
#include "data/tokenizer.h"
#include "dev/program.h"
#include "run/checkpoint.h"
#include "run/choices.h"
#include "run/log.h"
#include "run/options.h"

namespace fs = std::filesystem;
using Parts = std::vector<std::string>;

// ---------------------------------------------------------------------------------------------------------------------
// Helpers

// A fresh directory for one test, removed with all that is in it.
struct TempDir {
    std::string path;
    TempDir() {
        const char* base = std::getenv("TMPDIR");
        path = std::string(base && *base ? base : "/tmp") + "/test_data.XXXXXX";
        if (!mkdtemp(path.data())) throw file_error(path, "create", errno);
    }
    ~TempDir() {
        std::error_code ignored;
        fs::remove_all(path, ignored);
    }
    std::string operator/(const std::string& name) const { return path + "/" + name; }
    std::set<std::string> names() const {
        std::set<std::string> all;
        for (const auto& entry : fs::directory_iterator(path)) all.insert(entry.path().filename());
        return all;
    }
};

// Lowers this process's limit on file sizes or open files for a scope. Past the limit on sizes write(2) fails with
// EFBIG, as it does with ENOSPC on a full disk, after a part of the data was taken.
struct Limit {
    Limit(__rlimit_resource what, rlim_t value) : what(what) {
        std::signal(SIGXFSZ, SIG_IGN);
        getrlimit(what, &before);
        const rlimit lower = {value, before.rlim_max};
        setrlimit(what, &lower);
    }
    ~Limit() { setrlimit(what, &before); }
    __rlimit_resource what;
    rlimit before;
};

// The program calls these instead of the C library's. They note the order of calls. Like write(2), which takes 2 GiB at
// most, this write takes no more bytes at once than most_at_once.
static Parts calls;
static size_t most_at_once = SIZE_MAX;
extern "C" int fsync(int fd) {
    calls.push_back("fsync " + fs::read_symlink(format("/proc/self/fd/%d", fd)).filename().string());
    return static_cast<int>(syscall(SYS_fsync, fd));
}
extern "C" int rename(const char* from, const char* to) noexcept {
    calls.push_back("rename");
    return renameat(AT_FDCWD, from, AT_FDCWD, to);
}
extern "C" ssize_t write(int fd, const void* data, size_t bytes) {
    return syscall(SYS_write, fd, data, std::min(bytes, most_at_once));
}

// An error is one line that has all of `parts`.
static void check_error(int line, const std::string& message, const Parts& parts) {
    for (const std::string& part : parts)
        if (!contains(message, part))
            test::report(__FILE__, line,
                         format("expected an error with \"%s\", got \"%s\"", part.c_str(), message.c_str()));
    if (contains(message, "\n")) test::report(__FILE__, line, "more than one line: " + message);
}
#define CHECK_ERROR_PARTS(code, ...) check_error(__LINE__, test::error_of([&] { code; }), Parts{__VA_ARGS__})

// A whole file and its reader. Once the file is broken, the reader names it in an error of one line.
struct Broken {
    std::string path;
    std::function<void()> read;
    std::string good = read_file(path);

    void check(const std::string& bytes, const Parts& parts) const {
        write_file(path, bytes);
        Parts all = parts;
        all.push_back(path + ": ");
        check_error(__LINE__, test::error_of(read), all);
    }
    template <class T>
    void poke(size_t offset, T value, const Parts& parts) const {
        std::string bytes = good;
        std::memcpy(&bytes[offset], &value, sizeof value);
        check(bytes, parts);
    }
    void restore() const {
        write_file(path, good);
        CHECK(test::error_of(read).empty());
    }
};

static void write_pieces(const std::string& path, size_t piece, size_t bytes) {
    AtomicFile file(path);
    const std::string data(piece, 'x');
    for (size_t done = 0; done < bytes; done += piece) file.write(data.data(), piece);
    file.commit();
}

// Bytes without a pattern.
static std::string noise(size_t bytes) {
    std::string data(bytes, '\0');
    for (size_t i = 0; i < bytes; i++) data[i] = static_cast<char>(i * 2654435761u >> 13);
    return data;
}

// ---------------------------------------------------------------------------------------------------------------------
// Options

namespace {
struct Settings {
    int batch = 4, any = 7;
    float lr = 6e-4f, decay = 0.0f;
    std::string data = "", device = "cuda";
    bool shuffle = true, overfit = false;
    int keep = 0;
    std::vector<Option> table() {
        return {{"--batch", "-b", Option::Int, &batch, "sequences a batch", "1..1024", "Data"},
                {"--data", "-i", Option::String, &data, "training data: file or pattern", "", "Data"},
                {"--shuffle", "", Option::Flag, &shuffle, "shuffle windows", "", "Data"},
                {"--overfit", "-a", Option::Flag, &overfit, "train on one batch", "", "Data"},
                {"--learning-rate", "-l", Option::Float, &lr, "peak learning rate", "0..1", "Optimizer"},
                {"--weight-decay", "-c", Option::Float, &decay, "weight decay", "0..", "Optimizer"},
                {"--device", "", Option::Choice, &device, "where to run", "cuda|cpu", "Run"},
                {"--keep", "-nk", Option::Int, &keep, "checkpoints to keep", "0..", "Run"},
                {"--any", "-n", Option::Int, &any, "any integer", "", "Run"}};
    }
    bool parse(std::vector<const char*> arguments) {
        arguments.insert(arguments.begin(), "program");
        std::vector<Option> options = table();
        return parse_options(static_cast<int>(arguments.size()), arguments.data(), options);
    }
};
}  // namespace

TEST(options_values) {
    Settings s;
    CHECK(!s.parse({}));
    CHECK(s.batch == 4 && s.lr == 6e-4f && s.shuffle && !s.overfit && s.device == "cuda");
    CHECK(!s.parse({"--batch", "8", "--learning-rate=1e-3", "-i", "a b=c.bin", "--device=cpu", "-nk", "3", "-n",
                    "-2147483648", "--shuffle", "0", "-a"}));
    CHECK(s.batch == 8 && s.lr == 1e-3f && s.data == "a b=c.bin" && s.device == "cpu" && s.keep == 3);
    CHECK(s.any == INT_MIN && !s.shuffle && s.overfit);
    s.parse({"--shuffle=1", "--overfit", "0", "--data="});
    CHECK(s.shuffle && !s.overfit && s.data.empty());
    s.parse({"-b", "5", "--batch=6", "-b", "7"});  // the last wins
    CHECK(s.batch == 7);
    s.parse({"-a", "-b", "9"});  // a flag does not swallow the next option
    CHECK(s.overfit && s.batch == 9);
    s.parse({"--data=runs/lr=1e-3.bin"});  // the first = ends the name
    CHECK(s.data == "runs/lr=1e-3.bin");
    s.parse({"-i", "-"});
    CHECK(s.data == "-");
    s.parse({"--data=--batch"});  // how to give a value that looks like an option
    CHECK(s.data == "--batch");
    s.parse({"-b", "1024", "-l", "0", "-c", "1e30", "-n", "2147483647"});  // bounds are inclusive
    CHECK(s.batch == 1024 && s.lr == 0.0f && s.decay == 1e30f && s.any == INT_MAX);
}

TEST(options_errors) {
    Settings s;
    const auto check = [&](const std::vector<const char*>& arguments, const Parts& parts) {
        std::string message;
        try {
            s.parse(arguments);
        } catch (const UsageError& e) {
            message = e.what();
        }  // exit code 2
        check_error(__LINE__, message, parts);
    };
    check({"--bacth", "8"}, {"--bacth", "did you mean --batch?", "--help"});
    check({"-batch", "8"}, {"-batch", "did you mean --batch?"});
    check({"--learn", "8"}, {"--learn", "did you mean --learning-rate?"});
    check({"--weight_decay=1"}, {"--weight_decay", "did you mean --weight-decay?"});
    check({"--quite-another"}, {"unknown option --quite-another; see"});
    check({"-z"}, {"unknown option -z"});
    check({"--"}, {"unknown option --;"});
    check({"data.bin"}, {"unexpected argument \"data.bin\""});
    check({""}, {"unexpected argument \"\""});
    check({"-a", "2"}, {"unexpected argument \"2\""});
    check({"--overfit=yes"}, {"--overfit (-a): \"yes\" is not 0 or 1"});
    check({"-b"}, {"--batch (-b) needs a value"});
    check({"-i", "--batch=3"}, {"--data (-i) needs a value, found option --batch=3"});
    check({"-i", "-nk", "3"}, {"--data (-i) needs a value, found option -nk"});
    for (const char* bad : {"", "x", "3x", " 3", "3.5", "1e3", "0x10", "+3", "-"})
        check({"-b", bad}, {format("--batch (-b): \"%s\" is not an integer", bad)});
    for (const char* bad : {"0", "-1", "1025", "2147483648", "99999999999999999999"})
        check({"-b", bad}, {format("--batch (-b): \"%s\" is out of range 1..1024", bad)});
    check({"-n", "-2147483649"}, {"out of range of 32 bits"});
    for (const char* bad : {"", "nan", "-nan", "inf", "1e99", "0.1f", " 0.1", "0,1", "lr"})
        check({"-l", bad}, {format("--learning-rate (-l): \"%s\" is not a finite number", bad)});
    check({"-l", "1.0001"}, {"\"1.0001\" is out of range 0..1"});
    check({"-l", "1.00000001"}, {"is out of range 0..1"});  // although its float is 1
    check({"-c=-1e-30"}, {"\"-1e-30\" is out of range 0.."});
    check({"--device", "gpu"}, {"--device: \"gpu\" is not one of cuda|cpu", "did you mean cpu?"});
    check({"--device", ""}, {"is not one of cuda|cpu"});
}

TEST(options_help) {
    Settings s;
    CHECK(s.parse({"-b", "8", "--nonsense", "--help"}) && s.parse({"-h"}));
    CHECK(s.batch == 4);  // defaults are printed, not what came before --help
    s.data = "x.bin";
    const std::string help = options_help("train", "Trains.", s.table());
    for (const char* line : {"usage: train [options]\n\nTrains.\n\nData\n",
                             "  -b,  --batch N          sequences a batch (1..1024; default 4)\n",
                             "  -i,  --data TEXT        training data: file or pattern (default x.bin)\n",
                             "       --shuffle          shuffle windows (default on)\n",
                             "  -a,  --overfit          train on one batch\n\nOptimizer\n",
                             "  -l,  --learning-rate X  peak learning rate (0..1; default 0.0006)\n",
                             "       --device NAME      where to run (cuda|cpu; default cuda)\n",
                             "  -nk, --keep N           checkpoints to keep (0..; default 0)\n"})
        if (!contains(help, line)) test::report(__FILE__, __LINE__, format("no line %sin\n%s", line, help.c_str()));
    std::vector<Option> table = s.table();
    std::string words;
    for (int i = 0; i < 60; i++) words += i ? " word" : "word";
    table[0].help = words.c_str();
    size_t found = 0, longest = 0;
    std::istringstream wrapped(options_help("train", "", table));
    for (std::string line; std::getline(wrapped, line);) {
        longest = std::max(longest, line.size());
        for (size_t at = 0; (at = line.find("word", at)) != std::string::npos; at++) found++;
    }
    CHECK(longest <= 120 && found == 60);
    const std::string first = "--batch          4\n--data           x.bin\n--shuffle        on\n--overfit        off\n";
    CHECK(options_settings(s.table()).find(first) == 0);
}

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
    const auto check = [](const std::string& value, const std::string& json) {
        CHECK(Row("k").add("s", value).text() == "{\"kind\": \"k\", \"s\": \"" + json + "\"}");
    };
    check("a\"b\\c\n\t\r", "a\\\"b\\\\c\\n\\t\\u000d");
    check(std::string("\0\x1f\x7f", 3), "\\u0000\\u001f\\u007f");
    check("é€😀", "é€😀");
    // These are not UTF-8: a lone continuation, cut sequences, overlong, surrogate, past U+10FFFF, never a lead byte.
    for (const std::string bytes : {"\x80", "\xE2\x82", "\xC3", "\xC0\xAF", "\xE0\x80\x80", "\xED\xA0\x80",
                                    "\xF4\x90\x80\x80", "\xF0\x8F\xBF\xBF", "\xFF", "\xF5\x80\x80\x80"}) {
        std::string json;
        for (size_t i = 0; i < bytes.size(); i++) json += "\\ufffd";
        check(bytes, json);
        check(bytes + "\"z", json + "\\\"z");
    }
}

// What a byte-level model may sample must not change a terminal's state, nor end a C string.
TEST(text_for_a_terminal) {
    const std::string bad = "\xEF\xBF\xBD";
    CHECK(for_terminal("One day,\n\tshe “ran” 😀") == "One day,\n\tshe “ran” 😀");
    CHECK(for_terminal(std::string("a\0b", 3)) == "a" + bad + "b");
    CHECK(for_terminal("\x1b[2J\x07\x0e\r\x7f") == bad + "[2J" + bad + bad + bad + bad);
    CHECK(for_terminal("\xC2\x9B\x32J\xC2\xA0") == bad + "2J\xC2\xA0");  // U+009B is ESC [ too
    CHECK(for_terminal("\x80z\xE2\x82") == bad + "z" + bad + bad);
}

TEST(log_append_truncate) {
    const TempDir dir;
    const std::string path = dir / "log.jsonl";
    const Row start = Row("start").add("note", "a string with \"step\": 99 in it");
    const auto row = [](const char* kind, int step) { return Row(kind).add("step", step); };
    std::string rows[6] = {start.text() + "\n"};  // the start and the first i steps
    for (int i = 1; i <= 5; i++) rows[i] = rows[i - 1] + row("train", i).text() + "\n";
    {
        Log log(path);
        log.write(start);
        for (int i = 1; i <= 5; i++) {
            log.write(row("train", i));
            CHECK(read_file(path) == rows[i]);  // each row is there as soon as it is written
        }
    }
    Log(path).write(row("val", 5));
    CHECK(read_file(path) == rows[5] + row("val", 5).text() + "\n");
    for (int i = 0; i < 2; i++) {
        Log::truncate_after(path, 3);
        CHECK(read_file(path) == rows[3]);
    }

    // A row cut off by a crash goes away, both when the log is cut and when it is appended to.
    write_file(path, rows[3] + "{\"kind\": \"tr");
    Log::truncate_after(path, 100);
    CHECK(read_file(path) == rows[3]);
    write_file(path, rows[3] + "{\"kind\": \"tr");
    Log(path).write(row("train", 4));
    CHECK(read_file(path) == rows[4]);

    Log::truncate_after(path, -1);
    CHECK(read_file(path) == rows[0]);
    Log::truncate_after(dir / "none.jsonl", 1);  // no log yet
    CHECK(dir.names() == std::set<std::string>{"log.jsonl"});
    Log(path, false).write(row("new", 0));
    CHECK(read_file(path) == row("new", 0).text() + "\n");
    Log().write(row("nowhere", 1));
}

TEST(log_on_a_full_disk) {
    const TempDir dir;
    // If a disk fills up in the middle of a row, the rows before it stay and the part of it goes. Later rows are whole.
    const std::string path = dir / "log.jsonl", long_text(300, 'x');
    Log log(path);
    log.write(Row("train").add("step", 1));
    const std::string before = read_file(path);
    {
        const Limit full(RLIMIT_FSIZE, 200);
        CHECK_ERROR_PARTS(log.write(Row("train").add("text", long_text)), path, "File too large");
    }
    CHECK(read_file(path) == before);
    log.write(Row("train").add("step", 2));
    CHECK(read_file(path) == before + Row("train").add("step", 2).text() + "\n");
}

// ---------------------------------------------------------------------------------------------------------------------
// Atomic files and the checksum

TEST(checksum) {
    std::vector<unsigned char> data(1000);
    for (size_t i = 0; i < data.size(); i++) data[i] = static_cast<unsigned char>(i * 7 + i / 256 + 1);
    // The values are pinned, because files on disk depend on them.
    CHECK(checksum64(nullptr, 0) == 0x597414bc0d424406u);
    CHECK(checksum64(data.data(), 8) == 0xd90c9dc0f7b807cfu);
    CHECK(checksum64(data.data(), 1000, 5) == 0x69282bffc8c8222eu);
    // Other lengths, seeds and single bits give other values, also for runs of zeros. (No two flipped bits give the
    // same value, so no two cancel each other either.)
    std::set<uint64_t> seen;
    const std::vector<char> zeros(100);
    for (size_t n = 0; n <= 100; n++) seen.insert(checksum64(data.data(), n));
    for (size_t n = 1; n <= 100; n++) seen.insert(checksum64(zeros.data(), n));
    for (uint64_t seed = 1; seed <= 100; seed++) seen.insert(checksum64(data.data(), 100, seed));
    for (size_t bit = 0; bit < 8 * 99; bit++) {
        std::vector<unsigned char> flipped = data;
        flipped[bit / 8] ^= 1 << bit % 8;
        seen.insert(checksum64(flipped.data(), 99));
    }
    CHECK(seen.size() == 101 + 100 + 100 + 8 * 99);
    // Memory that is not aligned gives the same.
    std::vector<unsigned char> shifted = data;
    shifted.insert(shifted.begin(), 0);
    CHECK(checksum64(shifted.data() + 1, 1000) == checksum64(data.data(), 1000));
}

TEST(atomic_file) {
    const TempDir dir;
    const std::string path = dir / "out.bin", big = noise(3 << 20);
    std::string want = "small" + big;
    {
        AtomicFile file(path);
        file.write("small", 5);
        CHECK(!fs::exists(path));
        file.write(big.data(), big.size());
        file.write("", 0);
        for (int i = 0; i < 300000; i++) {
            file.write("0123456789", 10);
            want += "0123456789";
        }
        CHECK(!fs::exists(path));
        file.commit();
    }
    for (int i = 0; i < 2; i++) {
        CHECK(read_file(path) == want && dir.names() == std::set<std::string>{"out.bin"});
        AtomicFile(path).write("half", 4);  // not committed, so only the old file stays
    }
    // The file is replaced, and is never missing. A thread that looks all the time sees the old one or the new one.
    std::atomic<bool> done{false};
    std::atomic<int> missing{0};
    std::thread looking([&] {
        while (!done) missing += access(path.c_str(), F_OK) != 0;
    });
    for (int i = 0; i < 60; i++) {
        AtomicFile replacement(path);
        replacement.write("new", 3);
        replacement.commit();
    }
    done = true;
    looking.join();
    CHECK(missing == 0);
    CHECK(read_file(path) == "new");
}

// The file is on disk under its temporary name before it gets the final one, and then the directory is. So a crash
// leaves a whole file.
TEST(atomic_file_is_on_disk_before_it_has_its_name) {
    const TempDir dir;
    const std::string path = dir / "out.bin", temporary = format("out.bin.tmp.%d", static_cast<int>(getpid()));
    const std::string directory = fs::path(dir.path).filename();
    write_file(dir / temporary, std::string(5000, 'x'));  // from a process with the same number, as in a container
    const mode_t mask = umask(022);
    for (const size_t size : {100, 3 << 20}) {
        const std::string content = noise(size);
        calls.clear();
        most_at_once = 70001;
        AtomicFile file(path);
        file.write(content.data(), size);
        file.commit();
        most_at_once = SIZE_MAX;
        CHECK(read_file(path) == content);
        CHECK((calls == Parts{"fsync " + temporary, "rename", "fsync " + directory}));
    }
    umask(mask);
    CHECK(static_cast<int>(fs::status(path).permissions()) == 0644);  // others may read it
}

TEST(atomic_file_on_a_full_disk) {
    const TempDir dir;
    // If space runs out half-way, the old file stays and no temporary does.
    const std::string path = dir / "out.bin";
    write_file(path, "old");
    for (const size_t piece : {1000, 2 << 20}) {
        const Limit full(RLIMIT_FSIZE, 1 << 20);
        CHECK_ERROR_PARTS(write_pieces(path, piece, 3 << 20), path, "File too large");
        CHECK(read_file(path) == "old");
        CHECK(dir.names() == std::set<std::string>{"out.bin"});
    }
    // The name is taken by a directory while the file is written.
    AtomicFile file(dir / "late");
    fs::create_directory(dir / "late");
    CHECK_ERROR_PARTS(file.commit(), "late", "Is a directory");
}

// ---------------------------------------------------------------------------------------------------------------------
// Model files

static const ModelHeader kTiny = {DType::f32, 16, 50, 2, 2, 8, 128};

// A file of llm.c's begins with 256 int32.
static std::string with_header(const std::vector<int32_t>& header, const std::string& data) {
    std::string bytes(1024, '\0');
    std::memcpy(bytes.data(), header.data(), header.size() * sizeof(int32_t));
    return bytes + data;
}

TEST(model_round_trip) {
    const TempDir dir;
    // The sixteen tensors of GPT-2 124M are added up one by one, in llm.c's order.
    const size_t V = 50304, T = 1024, L = 12, C = 768;
    const size_t tensors[16] = {V * C, T * C, L * C,         L * C,     L * 3 * C * C, L * 3 * C, L * C * C, L * C,
                                L * C, L * C, L * 4 * C * C, L * 4 * C, L * C * 4 * C, L * C,     C,         C};
    size_t sum = 0;
    for (const size_t n : tensors) sum += n;
    CHECK((ModelHeader{DType::f32, 1024, 50257, 12, 12, 768, 50304}.num_parameters() == sum && sum == 124475904));
    CHECK((ModelHeader{DType::bf16, 1024, 50257, 48, 25, 1600, 50304}.num_parameters() == 1557686400));

    for (const DType dtype : {DType::f32, DType::bf16}) {
        const std::string path = dir / "model.bin";
        ModelHeader header = kTiny;
        header.dtype = dtype;
        const std::string parameters = noise(header.num_parameters() * size_of(dtype));
        std::string back(parameters.size(), 'x');
        write_model(path, header, parameters.data());
        const ModelHeader got = read_model_header(path);
        CHECK(got.dtype == dtype && got.max_T == 16 && got.V == 50 && got.L == 2 && got.NH == 2);
        CHECK(got.C == 8 && got.Vp == 128);
        read_model_parameters(path, got, back.data());
        CHECK(back == parameters);
        CHECK(read_file(path) ==
              with_header({20240326, dtype == DType::f32 ? 3 : 5, 16, 50, 2, 2, 8, 128}, parameters));
        if (dtype == DType::bf16)
            CHECK_ERROR_PARTS(read_model_parameters(path, kTiny, back.data()), path, "fp32", "bf16");
        ModelHeader longer = header;  // it was replaced after its header had been read
        longer.max_T = 17;
        CHECK_ERROR_PARTS(read_model_parameters(path, longer, back.data()), path,
                          format("expected %zu parameters", header.num_parameters() + 8), "the file changed");
    }
    ModelHeader longest = kTiny;
    longest.max_T = 262144;  // the context of scripts/run_long_context_gpus.sh
    write_model(dir / "long.bin", longest, std::vector<float>(longest.num_parameters()).data());
    CHECK(read_model_header(dir / "long.bin").max_T == 262144);
}

TEST(model_errors) {
    const TempDir dir;
    const std::string path = dir / "model.bin";
    const std::vector<float> parameters(kTiny.num_parameters(), 0.5f);
    write_model(path, kTiny, parameters.data());
    const Broken file = {path, [&] { read_model_header(path); }};
    const size_t size = file.good.size();
    const std::string expected = format("expected %zu", size);
    for (const size_t length : {0, 3, 1023})
        file.check(file.good.substr(0, length), {"truncated", "1024", format("%zu", length)});
    for (const size_t length : {size_t{1024}, size - 1})
        file.check(file.good.substr(0, length), {"truncated", expected, format("found %zu", length)});
    file.check(file.good + "x", {"too long", expected, format("found %zu", size + 1)});
    file.poke(0, 123, {"wrong magic at offset 0", "expected 20240326", "found 123"});
    file.poke(0, 20240520, {"found 20240520", "this is a token shard"});
    file.poke(4, 2, {"wrong version at offset 4", "3 (fp32) or 5 (bf16)", "found 2"});
    file.poke(4, 5, {"too long"});  // fp32 data under a bf16 header
    for (int offset = 8; offset <= 28; offset += 4)
        for (const int bad : {0, -1, INT_MIN, INT_MAX})
            file.poke(offset, bad, {"damaged header", format("offset %d", offset), format("found %d", bad)});
    file.poke(20, 3, {"offset 24", "multiple of 3 heads", "found 8"});
    file.poke(28, 49, {"padded vocabulary at offset 28", "expected 50..", "found 49"});
    file.poke(16, 3, {"truncated", "3 layers"});
    file.restore();

    ModelHeader fp64 = kTiny;
    fp64.dtype = DType::f64;
    CHECK_ERROR_PARTS(write_model(path, fp64, parameters.data()), "fp32 or bf16", "fp64");
}

// ---------------------------------------------------------------------------------------------------------------------
// State files

// The content of each section, by its name.
using State = std::map<std::string, std::string>;
static State state_of(size_t n) {
    return {{"step", "1234"}, {"m", noise(4 * n)}, {"v", noise(4 * n + 4).substr(4)}, {"empty", ""}, {"text", "odd"}};
}
static std::vector<Section> sections(State& state) {
    std::vector<Section> all;
    for (auto& [name, bytes] : state) all.push_back({name, bytes.data(), bytes.size()});
    return all;
}
// What a read that succeeds fills in.
static State blank(State state) {
    for (auto& [name, bytes] : state) bytes.assign(bytes.size(), '?');
    return state;
}
static const Identity kRun = {{{"model", "d12"}, {"B", "4"}, {"data", "00ff"}, {"note", ""}}};

TEST(state_round_trip) {
    const TempDir dir;
    const std::string path = dir / "state.bin";
    State written = state_of(100000), back = blank(written), again = back;
    write_state(path, kRun, sections(written));
    read_state(path, kRun, sections(back));
    CHECK(back == written);
    CHECK(dir.names() == std::set<std::string>{"state.bin"});
    Identity reordered = kRun;
    std::reverse(reordered.fields.begin(), reordered.fields.end());
    std::vector<Section> reversed = sections(again);
    std::reverse(reversed.begin(), reversed.end());
    read_state(path, reordered, reversed);  // sections are found by name, in any order
    CHECK(again == written);
    write_state(path, {}, {});
    read_state(path, {}, {});
}

TEST(state_flipped_bits) {  // every one of a small file, some of a large one
    const TempDir dir;
    const std::string path = dir / "state.bin";
    std::mt19937_64 random(1);
    for (const size_t n : {30, 20000}) {
        State written = state_of(n), back = blank(written);
        write_state(path, kRun, sections(written));
        const std::string good = read_file(path);
        const int fd = open(path.c_str(), O_WRONLY);
        for (size_t i = 0; i < (n == 30 ? 8 * good.size() : 500); i++) {
            const size_t bit = n == 30 ? i : random() % (8 * good.size());
            const char flipped = static_cast<char>(good[bit / 8] ^ 1 << bit % 8);
            CHECK(pwrite(fd, &flipped, 1, static_cast<off_t>(bit / 8)) == 1);
            const std::string error = test::error_of([&] { read_state(path, kRun, sections(back)); });
            // If a length in the header now lies past the end, the error has no offset, but it has expected and found.
            if (!contains(error, path) || !(contains(error, "offset") || contains(error, "truncated: expected")))
                test::report(__FILE__, __LINE__, format("bit %zu: got \"%s\"", bit, error.c_str()));
            CHECK(pwrite(fd, &good[bit / 8], 1, static_cast<off_t>(bit / 8)) == 1);
        }
        close(fd);
        read_state(path, kRun, sections(back));
        CHECK(back == written);
    }
}

TEST(state_errors) {
    const TempDir dir;
    const std::string path = dir / "state.bin";
    State written = state_of(30), back = blank(written);
    // An error leaves the state as it was, because nothing is read before all of it fits.
    const auto read = [&](const Identity& run, State state, Parts parts) {
        const State before = state;
        parts.push_back(path);
        check_error(__LINE__, test::error_of([&] { read_state(path, run, sections(state)); }), parts);
        CHECK(state == before);
    };
    write_model(path, kTiny, std::vector<float>(kTiny.num_parameters()).data());
    read(kRun, {}, {"wrong magic", "this is a model file"});
    write_state(path, kRun, sections(written));

    const std::pair<Identity, Parts> others[] = {
        {{{{"model", "d12"}, {"B", "8"}, {"data", "00ff"}, {"note", ""}}},
         {"another run", "B: the checkpoint has \"4\"", "this run has \"8\""}},
        {{{{"model", "d12"}, {"B", "4"}, {"data", "00ff"}, {"note", ""}, {"T", "64"}}},
         {"T: the checkpoint has no such field", "this run has \"64\""}},
        {{{{"B", "4"}, {"data", "00ff"}, {"note", ""}}}, {"model: the checkpoint has \"d12\"", "this run has none"}}};
    for (const auto& [run, parts] : others) read(run, back, parts);

    State more = back, fewer = back, shorter = back;
    more["more"] = "1234";
    fewer.erase("m");
    shorter["v"].resize(116);
    read(kRun, more, {"section \"more\" is missing"});
    read(kRun, fewer, {"section \"m\" at offset", "not of this run"});
    read(kRun, shorter, {"section \"v\" at offset", "expected 116 bytes", "found 120"});

    const Broken file = {path, [&] { read_state(path, kRun, sections(back)); }};
    const size_t size = file.good.size();
    file.poke(0, 'G', {"wrong magic at offset 0", "expected \"gpt2stat\"", "found bytes 4770743273746174"});
    file.poke(8, 2, {"wrong version at offset 8", "expected 1", "found 2"});
    file.poke(20, '\1', {"damaged table", "expected", "found"});
    file.poke(size - 4, 'x', {"damaged section \"v\"", "120 bytes at offset", "expected checksum", "found"});
    for (size_t length = size; length-- > 0;)
        file.check(file.good.substr(0, length), {"truncated", "expected", format("found %zu", length)});
    file.check(file.good + "x", {"too long", format("expected %zu", size)});
    file.restore();
    CHECK(back == written);
}

// Every writer and every reader names a path that it cannot use and says why.
TEST(unusable_paths) {
    using PathUser = std::function<void(const std::string&)>;
    const TempDir dir;
    write_file(dir / "file", "x");
    const std::vector<float> parameters(kTiny.num_parameters());
    State state = state_of(30);
    for (const PathUser& write :
         std::vector<PathUser>{[&](const std::string& path) { write_pieces(path, 10, 10); },
                               [&](const std::string& path) {
                                   write_pieces(path, 5 << 20, 5 << 20);
                               },  // more than is kept back for later
                               [&](const std::string& path) { Log(path).write(Row("train")); },
                               [&](const std::string& path) { write_model(path, kTiny, parameters.data()); },
                               [&](const std::string& path) { write_state(path, kRun, sections(state)); },
                               [&](const std::string& path) { write_choices(path, {}); }}) {
        CHECK_ERROR_PARTS(write(dir / "file/x"), dir / "file/x", "Not a directory", "stands where");
        CHECK_ERROR_PARTS(write(dir / "none/x"), dir / "none/x", "No such file or directory", "check the path");
        CHECK_ERROR_PARTS(write(dir.path), dir.path, "Is a directory", "give the path of a file");
        CHECK_ERROR_PARTS(write(dir / std::string(300, 'x')), "File name too long");
        if (access("/dev/full", W_OK)) continue;
        CHECK_ERROR_PARTS(write("/dev/full"), "/dev/full", "cannot write: No space left on device", "free some space");
        CHECK(fs::is_character_file("/dev/full"));  // not replaced by a file
    }
    for (const PathUser& read : std::vector<PathUser>{[](const std::string& path) { read_model_header(path); },
                                                      [](const std::string& path) { read_state(path, {}, {}); },
                                                      [](const std::string& path) { Tokenizer{path}; },
                                                      [](const std::string& path) { read_choices(path, 257, 64); }}) {
        CHECK_ERROR_PARTS(read(dir / "none"), dir / "none", "No such file or directory");
        CHECK_ERROR_PARTS(read(dir.path), dir.path, "Is a directory");
        CHECK_ERROR_PARTS(read("/dev/null"), "/dev/null", "not a regular file");
    }
}

TEST(checkpoint_directory) {
    const TempDir dir;
    CHECK(model_path("out", 1000) == "out/model_00001000.bin" && state_path("out", 7) == "out/state_00000007.bin");
    CHECK(newest_checkpoint(dir / "none") == -1 && newest_checkpoint(dir.path) == -1);
    std::set<std::string> want = {
        "log.jsonl",           "state_.bin",          "state_7.bin",        "state_00000999.bin.bak",
        "model_00000001.bin2", "xstate_00000999.bin", "state_00000999.txt", "state_-0000001.bin",
        "main_log.tmp.12"};  // files of others, which stay
    for (const std::string& name : want) write_file(dir / name, "x");
    CHECK(newest_checkpoint(dir.path) == -1);
    for (const int step : {0, 100, 200, 300, 123456789})
        for (const auto& path : {model_path(dir.path, step), state_path(dir.path, step)}) write_file(path, "x");
    CHECK(newest_checkpoint(dir.path) == 123456789);
    fs::remove(state_path(dir.path, 123456789));  // now a model without its state
    write_file(state_path(dir.path, 400) + ".tmp.77", "x");
    write_file(model_path(dir.path, 400) + ".tmp.77", "x");
    CHECK(newest_checkpoint(dir.path) == 300);

    want.insert({"model_123456789.bin", "model_00000200.bin", "state_00000200.bin", "model_00000300.bin",
                 "state_00000300.bin"});
    for (int i = 0; i < 2; i++) {
        prune_checkpoints(dir.path, 2);
        CHECK(dir.names() == want);
    }
    fs::remove(model_path(dir.path, 200));  // a prune that was interrupted
    prune_checkpoints(dir.path, 1);
    want.erase("model_00000200.bin"), want.erase("state_00000200.bin");
    CHECK(dir.names() == want);
    // A model that cannot be removed (here a directory) is an error. Its state is gone, so the step does not count.
    write_file(state_path(dir.path, 100), "x");
    fs::create_directory(model_path(dir.path, 100));
    CHECK_ERROR_PARTS(prune_checkpoints(dir.path, 1), "model_00000100.bin: cannot remove");
    CHECK(!exists(state_path(dir.path, 100)) && newest_checkpoint(dir.path) == 300);
    prune_checkpoints(dir.path, 0);
    CHECK(newest_checkpoint(dir.path) == -1);
    prune_checkpoints(dir / "none", 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// Tokenizer

TEST(tokenizer_bytes) {
    // GPT-2's encoder.json: '!' is the first printable byte, ' ' (Ġ) is 220, '\n' (Ċ) is 198.
    const std::pair<int, int> known[] = {{'!', 0},    {'"', 1},    {'A', 32},   {'a', 64},   {'~', 93},
                                         {0xA1, 94},  {0xAC, 105}, {0xAE, 106}, {0xFF, 187}, {0, 188},
                                         {'\n', 198}, {' ', 220},  {0x7F, 221}, {0xA0, 254}, {0xAD, 255}};
    for (const auto& [byte, token] : known) CHECK(byte_to_token(byte) == token);
    // GPT-2 states the rule so: first the printable bytes in order, then each other byte as it comes.
    const auto printable = [](int b) {
        return (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
    };
    int token = 0;
    for (const bool first : {true, false})
        for (int b = 0; b < 256; b++)
            if (printable(b) == first) {
                CHECK(token_to_byte(token) == b && byte_to_token(b) == token);
                token++;
            }
    for (const int none : {-1, 256, 50256, INT_MIN}) CHECK(token_to_byte(none) == -1);

    const char bytes[] = "naïve €5\0\n😀\xFF";
    const std::string text(bytes, sizeof bytes - 1);
    std::string back;
    const Tokenizer tokenizer;
    for (const int token : encode_bytes(text)) back += tokenizer.decode(token);
    CHECK(back == text && encode_bytes(text).size() == text.size());
    CHECK(tokenizer.decode(256) == "<256>" && tokenizer.decode(50256) == "<|endoftext|>");
    CHECK(tokenizer.decode(1234) == "<1234>" && tokenizer.decode(-1) == "<-1>");
}

static std::string tokenizer_file(int version, const Parts& pieces) {
    const int count = static_cast<int>(pieces.size());
    std::string data;
    for (const std::string& piece : pieces) data += static_cast<char>(piece.size()), data += piece;
    return with_header({20240328, version, count, version == 2 ? count - 1 : 0}, data);
}

TEST(tokenizer_file_versions) {
    const TempDir dir;
    const std::string path = dir / "tokenizer.bin";
    Parts pieces = {"a", std::string("\0\xFF", 2), " the", std::string(255, 'x'), "€"};
    for (int i = 0; i < 300; i++) pieces.push_back(format("piece%d", i));
    pieces.push_back("<|endoftext|>");
    for (const int version : {1, 2}) {
        write_file(path, tokenizer_file(version, pieces));
        const Tokenizer tokenizer(path);
        for (size_t i = 0; i < pieces.size(); i++) CHECK(tokenizer.decode(i) == pieces[i]);
        for (const int none : {306, 50256, -1}) CHECK(tokenizer.decode(none) == format("<%d>", none));
    }
}

TEST(tokenizer_errors) {
    const TempDir dir;
    const std::string path = dir / "tokenizer.bin";
    write_file(path, tokenizer_file(2, {"a", "bc", "def"}));
    const Broken file = {path, [&] { Tokenizer{path}; }};
    for (size_t n = file.good.size(); n-- > 0;) file.check(file.good.substr(0, n), {"expected", "found"});
    file.check(file.good.substr(0, 1000), {"truncated", "expected 1024", "found 1000"});
    file.check(file.good.substr(0, 1032), {"truncated in token 2 of 3 at offset 1029", "expected 4", "found 3"});
    file.check(file.good + "z", {"too long", "expected 1033", "found 1034"});
    file.poke(0, 20240520, {"wrong magic at offset 0", "expected 20240328", "found 20240520"});
    file.poke(4, 3, {"wrong version at offset 4", "expected 1 or 2", "found 3"});
    file.poke(8, 0, {"offset 8", "found 0"});
    file.poke(8, -1, {"offset 8", "found 4294967295"});
    file.poke(8, 4, {"truncated in token 3 of 4"});
    file.poke(12, 3, {"offset 12", "found 3"});
    file.restore();
}

// ---------------------------------------------------------------------------------------------------------------------
// Loader

static void write_tokens(const std::string& path, const std::vector<uint16_t>& tokens) {
    const std::string data(reinterpret_cast<const char*>(tokens.data()), 2 * tokens.size());
    write_file(path, with_header({20240520, 1, static_cast<int>(tokens.size())}, data));
}
static std::vector<uint16_t> counting(size_t n, int first = 0) {
    std::vector<uint16_t> tokens(n);
    for (size_t i = 0; i < n; i++) tokens[i] = first + i;
    return tokens;
}

namespace {
struct Batch {
    std::vector<int> inputs, targets;
    bool operator==(const Batch& o) const { return inputs == o.inputs && targets == o.targets; }
};
struct TestLoader : Loader {
    size_t B, T;
    TestLoader(const std::string& pattern, int B, int T, int vocab = 50257, bool shuffle = false, uint64_t seed = 0)
        : Loader(pattern, B, T, vocab, shuffle, seed), B(B), T(T) {}
    Batch batch() {
        Batch batch = {std::vector<int>(B * T, -7), std::vector<int>(B * T, -7)};
        next(batch.inputs.data(), batch.targets.data());
        return batch;
    }
    // The first tokens of the next windows of counting shards.
    std::vector<int> starts() {
        const Batch got = batch();
        std::vector<int> first;
        for (size_t i = 0; i < B * T; i++) {
            if (i % T == 0) first.push_back(got.inputs[i]);
            CHECK(got.inputs[i] == first.back() + static_cast<int>(i % T) && got.targets[i] == got.inputs[i] + 1);
        }
        return first;
    }
    // The next windows of a text.
    std::string text() {
        std::string bytes;
        for (const int token : batch().targets) bytes += static_cast<char>(token_to_byte(token));
        return bytes;
    }
};
bool operator==(const LoaderState& a, const LoaderState& b) {
    return a.epoch == b.epoch && a.window == b.window && a.batches == b.batches;
}
// Shards of 41, 8, 23, 4 and 60 tokens, all different. With T = 4 they have 10 + 1 + 5 + 0 + 14 = 30 windows.
struct Shards : TempDir {
    const std::string pattern = *this / "train_*.bin";
    std::vector<int> starts;  // the first token of every window, in order
    Shards() {
        int shard = 0;
        for (const int size : {41, 8, 23, 4, 60}) {
            write_tokens(*this / format("train_%03d.bin", shard), counting(size, 1000 * shard));
            for (int at = 0; at + 5 <= size; at += 4) starts.push_back(1000 * shard + at);
            shard++;
        }
    }
};
}  // namespace

TEST(loader_in_order) {
    const Shards shards;
    CHECK(shards.starts.size() == 30);
    TestLoader loader(shards.pattern, 4, 4);
    CHECK(loader.num_tokens() == 136 && loader.batches_per_epoch() == 7);
    CHECK(loader.description() == "5 shards, 136 tokens");
    // Three epochs of 30 windows are 22.5 batches of 4, because a batch may continue past the end of an epoch.
    for (size_t i = 0; i < 22; i++) {
        CHECK(loader.state().batches == i && loader.state().epoch * 30 + loader.state().window == 4 * i);
        const std::vector<int> starts = loader.starts();
        for (size_t b = 0; b < 4; b++) CHECK(starts[b] == shards.starts[(4 * i + b) % 30]);
    }
    loader.reset();
    CHECK(loader.state() == LoaderState{} && loader.starts()[0] == 0);
}

TEST(loader_shuffle) {
    const Shards shards;
    for (const int B : {1, 4, 30}) {
        TestLoader loader(shards.pattern, B, 4, 50257, true, 42);
        std::vector<int> stream;
        while (stream.size() < 4 * 30)
            for (const int start : loader.starts()) stream.push_back(start);
        std::set<std::vector<int>> orders = {shards.starts};
        for (auto at = stream.begin(); at != stream.end(); at += 30) {
            std::vector<int> epoch(at, at + 30);
            orders.insert(epoch);
            std::sort(epoch.begin(), epoch.end());
            CHECK(epoch == shards.starts);  // each window exactly once
        }
        CHECK(orders.size() == 5);  // another order every time
    }
    // Every seed and epoch has its own order of the windows, and its first shard is any that has a window.
    std::set<std::vector<int>> orders;
    std::set<int> first_shards;
    for (uint64_t seed = 0; seed < 8; seed++)
        for (uint64_t epoch = 0; epoch < 8; epoch++) {
            TestLoader loader(shards.pattern, 30, 4, 50257, true, seed), same(shards.pattern, 30, 4, 50257, true, seed);
            loader.restore({epoch, 0, 0});
            same.restore({epoch, 0, 0});
            const std::vector<int> starts = loader.starts();
            CHECK(same.starts() == starts);
            orders.insert(starts);
            first_shards.insert(starts[0] / 1000);
            int changes = 0;
            for (size_t i = 1; i < 30; i++) changes += starts[i] / 1000 != starts[i - 1] / 1000;
            CHECK(changes == 3);  // each of the four shards is read to its end before the next one
        }
    CHECK(orders.size() == 64);
    CHECK((first_shards == std::set<int>{0, 1, 2, 4}));
    // The order is pinned, because checkpoints hold a position in it.
    TestLoader pinned(shards.pattern, 10, 4, 50257, true, 3);
    CHECK((pinned.starts() == std::vector<int>{12, 20, 28, 24, 16, 4, 36, 32, 8, 0}));
}

// Shards of the same size have different orders.
TEST(loader_shuffles_each_shard_its_own_way) {
    const TempDir dir;
    for (int i = 0; i < 2; i++) write_tokens(dir / format("%d.bin", i), counting(101, 1000 * i));
    const std::vector<int> starts = TestLoader(dir / "*.bin", 200, 1, 50257, true, 4).starts();
    int equal = 0;
    for (size_t i = 0; i < 100; i++) equal += starts[i] % 1000 == starts[100 + i] % 1000;
    CHECK(equal < 10);  // one on average
}

// With few windows every permutation comes about equally often, so what an epoch begins with does not repeat.
TEST(loader_shuffle_uniform) {
    const TempDir dir;
    write_tokens(dir / "three.bin", counting(7));
    TestLoader three(dir / "three.bin", 3, 2, 50257, true, 9);
    std::map<std::vector<int>, int> counts;
    const int epochs = 6000;
    for (int e = 0; e < epochs; e++) counts[three.starts()]++;
    CHECK(counts.size() == 6);
    for (const auto& [order, n] : counts) CHECK_NEAR(n, epochs / 6.0, 150);  // five standard deviations
    // With many windows each comes first in some epoch about as often as any other (10 counts each on average).
    write_tokens(dir / "many.bin", counting(1001));
    TestLoader many(dir / "many.bin", 1, 1, 50257, true, 9);
    std::vector<int> first(1000);
    for (uint64_t e = 0; e < 10000; e++) {
        many.restore({e, 0, 0});
        first[many.starts()[0]]++;
    }
    double chi2 = 0;
    for (const int n : first) chi2 += (n - 10.0) * (n - 10.0) / 10.0;
    CHECK_NEAR(chi2, 999, 5 * std::sqrt(2 * 999.0));
}

TEST(loader_restore_at_every_point) {
    const Shards shards;
    write_file(shards / "text.txt", "The quick brown fox jumps over the lazy dog, again and again and again.");
    for (const std::string& pattern : {shards.pattern, shards / "text.txt"})
        for (const bool shuffle : {false, true}) {
            TestLoader loader(pattern, 4, 4, 50257, shuffle, 3);
            std::vector<Batch> stream;
            std::vector<LoaderState> states;
            for (int i = 0; i < 25; i++) {
                states.push_back(loader.state());
                stream.push_back(loader.batch());
            }
            for (size_t i = 0; i < states.size(); i++) {
                TestLoader resumed(pattern, 4, 4, 50257, shuffle, 3);
                resumed.restore(states[i]);
                for (size_t k = i; k < stream.size(); k++) CHECK(resumed.batch() == stream[k]);
                loader.restore(states[i]);  // also in a loader that is somewhere else
                CHECK(loader.batch() == stream[i] && loader.state().batches == i + 1);
            }
            CHECK_ERROR_PARTS(loader.restore({0, 30, 0}), "window 30", "resume with the data");
        }
}

// Each rank reads its share of the batches and skips the others'. Together they see the one stream.
TEST(loader_skip) {
    const Shards shards;
    for (const size_t ranks : {1, 2, 3}) {
        TestLoader whole(shards.pattern, 4, 4, 50257, true, 3);
        std::deque<TestLoader> loaders;
        for (size_t r = 0; r < ranks; r++) loaders.emplace_back(shards.pattern, 4, 4, 50257, true, 3);
        for (int step = 0; step < 12; step++) {  // into the next epochs
            for (size_t r = 0; r < ranks; r++) {
                loaders[r].skip(r);
                CHECK(loaders[r].batch() == whole.batch());
                loaders[r].skip(ranks - 1 - r);
            }
            for (const TestLoader& l : loaders) CHECK(l.state() == whole.state());
        }
    }
}

TEST(loader_text) {
    const TempDir dir;
    const char bytes[] = "naïve €5 – 😀\0\n\r\t\x7F\xFF\xC3";
    std::string text(bytes, sizeof bytes - 1);
    for (int i = 0; i < 256; i++) text += static_cast<char>(i);
    text += "0123456789";
    write_file(dir / "text", text);
    for (const int vocab : {kByteVocab, 50257, 50304}) {
        const size_t T = 5, windows = text.size() / T;
        const int end_of_text = vocab == kByteVocab ? 256 : 50256;
        TestLoader loader(dir / "text", 1, T, vocab), by_text(dir / "text", 1, T, vocab);
        CHECK(loader.num_tokens() == text.size() + 1 && loader.batches_per_epoch() == windows);
        CHECK(loader.description() == format("text file, %zu tokens", text.size() + 1));
        int before = end_of_text;
        std::string back;
        for (size_t i = 0; i < windows; i++) {
            const Batch batch = loader.batch();
            CHECK(batch.inputs[0] == before);
            for (size_t t = 0; t + 1 < T; t++) CHECK(batch.inputs[t + 1] == batch.targets[t]);
            before = batch.targets[T - 1];
            back += by_text.text();
        }
        CHECK(back == text.substr(0, windows * T));
        CHECK(loader.batch().inputs[0] == end_of_text);  // epoch 1
    }
    write_file(dir / "exact.md", "abcd");  // exactly B·T + 1 tokens with <|endoftext|>
    const Batch batch = TestLoader(dir / "exact.md", 2, 2, kByteVocab).batch();
    CHECK((batch == Batch{{256, 64, 65, 66}, {64, 65, 66, 67}}));
    CHECK_ERROR_PARTS(TestLoader(dir / "exact.md", 1, 5, kByteVocab), dir / "exact.md", "too little data", "6 tokens",
                      "found 5");
    CHECK_ERROR_PARTS(TestLoader(dir / "exact.md", 2, 2, 300), dir / "exact.md", "257", "50257", "found 300");
    write_file(dir / "empty.txt", "");
    CHECK_ERROR_PARTS(TestLoader(dir / "empty.txt", 1, 1, kByteVocab), "too little data", "found 1 tokens");
    write_file(dir / "short.txt", "ab");  // shorter than a magic
    CHECK(TestLoader(dir / "short.txt", 1, 2, kByteVocab).num_tokens() == 3);
}

TEST(loader_vocabulary) {
    const TempDir dir;
    const std::string path = dir / "a.bin";
    write_tokens(path, {50256, 1, 2, 255, 50256, 3, 4});
    CHECK((TestLoader(path, 2, 3, kByteVocab).batch().inputs == std::vector<int>{256, 1, 2, 255, 256, 3}));
    CHECK((TestLoader(path, 2, 3, 50257).batch().targets == std::vector<int>{1, 2, 255, 50256, 3, 4}));
    std::vector<uint16_t> tokens = counting(13);
    tokens[10] = 257;
    write_tokens(path, tokens);
    TestLoader loader(path, 2, 3, kByteVocab);
    loader.batch();
    CHECK_ERROR_PARTS(loader.batch(), path, "offset 1044", "less than", "257", "found 257");
    tokens[10] = 65535;
    write_tokens(path, tokens);
    CHECK_ERROR_PARTS(TestLoader(path, 4, 3, 50304).batch(), path, "offset 1044", "50304", "found 65535");
}

TEST(loader_errors) {
    const TempDir dir;
    const std::string path = dir / "a.bin";
    const auto load = [](const std::string& pattern, const Parts& parts) {
        CHECK_ERROR_PARTS(TestLoader(pattern, 2, 4), pattern);
        check_error(__LINE__, test::error_of([&] { TestLoader(pattern, 2, 4); }), parts);
    };
    write_tokens(path, counting(17));
    const Broken file = {path, [&] { TestLoader(path, 2, 4); }};
    load(dir / "none.bin", {"no such file"});
    load(dir / "none_*.bin", {"no file matches"});
    load(dir / "none/*.bin", {"a directory of this pattern"});
    load("", {"no such file"});
    load(dir.path, {"is a directory"});
    load(dir / "a.bin/x", {"no such file"});
    load("/dev/null", {"not a regular file"});
    file.poke(0, 123, {"wrong magic at offset 0", "expected 20240520", "found 123"});
    file.poke(0, 20240326, {"expected 20240520", "found 20240326", "model checkpoint"});
    file.poke(4, 2, {"wrong version at offset 4", "expected 1", "found 2"});
    file.poke(8, -1, {"offset 8", "found -1"});
    file.poke(8, 18, {"truncated", "18 tokens", "expected 1060 bytes", "found 1058"});
    file.poke(8, INT_MAX, {"truncated", "2147483647 tokens", "expected 4294968318 bytes"});
    file.poke(8, 16, {"too long", "16 tokens", "expected 1056 bytes", "found 1058"});
    for (const size_t length : {4, 12, 1023})
        file.check(file.good.substr(0, length), {"truncated", "1024", format("%zu", length)});
    file.check(file.good.substr(0, 1057), {"truncated", "found 1057"});
    file.check("", {"wrong magic"});
    file.check("abc", {"wrong magic"});

    write_tokens(path, counting(8));
    load(path, {"too little data", "9 tokens", "2 windows of 4", "found 8 tokens"});
    write_tokens(path, {});
    load(path, {"too little data", "found 0 tokens"});
    write_tokens(path, counting(9));
    TestLoader(path, 2, 4);  // just enough
    // There are enough tokens, but no shard has a whole window.
    for (int i = 0; i < 10; i++) write_tokens(dir / format("small_%d.bin", i), counting(4));
    load(dir / "small_*.bin", {"too little data", "found 40 tokens in 10 files, 0 windows"});

    write_file(dir / "b.txt", "this is text, long enough for a batch or two");
    TestLoader(dir / "b.txt", 2, 4);
    CHECK_ERROR_PARTS(TestLoader(dir / "[ab].*", 2, 4), dir / "b.txt", "wrong magic", "given alone");
    CHECK_ERROR_PARTS(TestLoader(dir / "b.txt", 0, 4), "B=0");
    CHECK_ERROR_PARTS(TestLoader(dir / "b.txt", 4, -1), "T=-1");

    if (geteuid() != 0) {  // if one cannot be read, training must not go on with the others' shards alone
        for (const char* sub : {"sub1", "sub2"}) {
            fs::create_directory(dir / sub);
            write_file(dir / sub + "/a.bin", file.good);
        }
        fs::permissions(dir / "sub2", fs::perms::none);
        load(dir / "sub*/*.bin", {"a directory of this pattern", "cannot be read"});
        fs::permissions(dir / "sub2", fs::perms::owner_all);
    }

    // A name with brackets that exists is that file, not a pattern.
    write_file(dir / "x[1].bin", file.good);
    TestLoader(dir / "x[1].bin", 2, 4);

    // The data changes while a loader runs.
    file.restore();
    TestLoader loader(path, 2, 4);
    fs::resize_file(path, 1030);
    CHECK_ERROR_PARTS(loader.batch(), path, "truncated", "expected 10 bytes at offset 1024", "found 6");
}

TEST(loader_many_shards) {
    const TempDir dir;
    for (int i = 0; i < 2000; i++) write_tokens(dir / format("s_%04d.bin", i), counting(5, 10 * i));
    const Limit few(RLIMIT_NOFILE, 40);  // open files
    TestLoader loader(dir / "s_*.bin", 8, 2, 50257, true, 5);
    CHECK(loader.description() == "2000 shards, 10000 tokens" && loader.batches_per_epoch() == 500);
    std::set<int> seen;
    for (int i = 0; i < 500; i++)
        for (const int start : loader.starts()) seen.insert(start);
    CHECK(seen.size() == 4000 && loader.state().epoch == 1 && loader.state().window == 0);
}

// Makes a file larger, nearly all of it a hole, and writes `end` where it ends.
static void make_sparse(const std::string& path, uint64_t size, const std::string& end) {
    if (truncate(path.c_str(), static_cast<off_t>(size - end.size())))
        SKIP("no sparse files here: %s", std::strerror(errno));
    std::ofstream(path, std::ios::app | std::ios::binary) << end;
}

TEST(loader_larger_than_2_gib) {
    const TempDir dir;
    const std::string path = dir / "large.bin";
    const uint64_t tokens = 2147000001;  // 4.3 GB
    const int T = 1000;
    const std::vector<uint16_t> end = counting(2 * T + 1, 100);
    write_file(path, with_header({20240520, 1, static_cast<int>(tokens)}, ""));
    make_sparse(path, 1024 + 2 * tokens, std::string(reinterpret_cast<const char*>(end.data()), 2 * end.size()));
    TestLoader loader(path, 2, T);
    CHECK(loader.num_tokens() == tokens && loader.batches_per_epoch() == 1073500);
    CHECK(loader.description() == "1 shard, 2.1 G tokens");
    loader.restore({3, 2146998, 0});
    CHECK((loader.starts() == std::vector<int>{100, 100 + T}));
    CHECK(loader.state().epoch == 4 && loader.state().window == 0);
    // The offset in an error is 64 bits wide too.
    make_sparse(path, 1024 + 2 * tokens, "\xE8\xFD");
    loader.restore({3, 2146998, 0});
    CHECK_ERROR_PARTS(loader.batch(), path, "offset 4294001024", "found 65000");
    CHECK(loader.identity() == TestLoader(path, 1, 1, 65536, true, 1).identity());
}

TEST(loader_text_larger_than_4_gib) {
    const TempDir dir;
    const std::string path = dir / "large.txt", end = "the end of a very long text";
    const uint64_t size = 5000000000;
    write_file(path, "once");
    make_sparse(path, size, end);
    TestLoader loader(path, 1, 20, kByteVocab);
    CHECK(loader.num_tokens() == size + 1 && loader.batches_per_epoch() == size / 20);
    loader.restore({0, size / 20 - 1, 0});
    CHECK(loader.text() == end.substr(end.size() - 20));
    CHECK(loader.text()[0] == 'o' && loader.state().epoch == 1);
    const uint64_t before = loader.identity();
    make_sparse(path, size, "another end");
    CHECK(loader.identity() != before);
}

TEST(loader_identity) {
    const Shards shards;
    const auto identity = [](const std::string& pattern) { return TestLoader(pattern, 1, 4).identity(); };
    const uint64_t before = identity(shards.pattern);
    CHECK(identity(shards.pattern) == before);
    CHECK(TestLoader(shards.pattern, 2, 3, 65536, true, 8).identity() == before);  // of the data, however it is read
    const TempDir moved;
    for (const std::string& name : shards.names()) fs::copy(shards / name, moved / name);
    CHECK(identity(moved / "*.bin") == before);
    CHECK(identity(moved / "train_000.bin") != before);
    std::set<uint64_t> seen = {before};
    const std::string path = moved / "train_004.bin";
    const std::string good = read_file(path);
    for (const size_t at : {size_t{1024}, size_t{1080}, good.size() - 1}) {
        std::string bytes = good;
        bytes[at] ^= 1;
        write_file(path, bytes);
        seen.insert(identity(moved / "*.bin"));
    }
    CHECK(seen.size() == 4);
    write_file(path, good);
    write_tokens(moved / "z.bin", {});
    CHECK(identity(moved / "*.bin") != before);
    // A large file is sampled. Its size, its first and its last bytes count, and a hundredth of it spread over the
    // rest.
    const size_t n = 5 << 20;
    std::string text(n, 'x');
    const auto identity_with = [&](size_t at, size_t bytes) {
        std::fill_n(text.begin() + at, bytes, 'y');
        write_file(moved / "text", text);
        return identity(moved / "text");
    };
    seen = {identity_with(0, 0)};
    text += 'x';
    seen.insert(identity_with(0, 0));
    seen.insert(identity_with(n, 1));
    seen.insert(identity_with(0, 1));
    seen.insert(identity_with(n / 5, n / 100));
    seen.insert(identity_with(n / 3 * 2, n / 100));
    CHECK(seen.size() == 6);
}

// ---------------------------------------------------------------------------------------------------------------------
// Multiple choice

TEST(choices) {
    const TempDir dir;
    const std::string path = dir / "choices.bin";
    const std::vector<Choice> written = {{7, 1, {5, 6, 7}, {{1}, {2, 3}, {4, 4, 4}, {9}}},
                                         {8, 0, {256}, {{0}, {250, 3}}}};
    write_choices(path, written);
    const std::vector<Choice> read = read_choices(path, 257, 64);
    CHECK(read.size() == 2);
    for (size_t i = 0; i < read.size(); i++)
        CHECK(read[i].index == written[i].index && read[i].label == written[i].label &&
              read[i].context == written[i].context && read[i].endings == written[i].endings);
    CHECK_ERROR(read_choices(path, 256, 64), "token at offset");
    CHECK_ERROR(read_choices(path, 257, 4), "length of an example");
    CHECK(read_choices(path, 257, 5).size() == 2);  // the last token is only predicted

    const Broken file = {path, [&] { read_choices(path, 257, 64); }};
    const int32_t header[4] = {20240522, 1, 2, 40};  // the last is the bytes of the longest example, 20 numbers
    CHECK(std::memcmp(file.good.data(), header, sizeof header) == 0);
    for (size_t length = 0; length < file.good.size(); length++) file.check(file.good.substr(0, length), {});
    file.check(file.good + "xx", {"end of the file"});
    file.poke(1030, '\4', {"number of endings at offset"});  // the label says the fifth of four endings
    for (size_t at : {0, 4, 1024, 1026, 1030, 1032})         // magic, version, start, size, label, number of endings
        file.poke(at, static_cast<char>(file.good[at] ^ 0x40), {});
    write_choices(path, {});
    CHECK_ERROR(file.read(), "no examples");
}

TEST_MAIN
