// Tests of data/: options, log, checkpoints, tokenizer, loader. They provoke every error and read its one line.
//
//   ./dev/test_data            all        ./dev/test_data loader     those with "loader" in their name
#include <dirent.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <atomic>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "data/file.h"
#include "data/loader.h"
#include "data/tokenizer.h"
#include "dev/test.h"
#include "run/checkpoint.h"
#include "run/choices.h"
#include "run/log.h"
#include "run/options.h"

namespace fs = std::filesystem;

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

static void write_file(const std::string& path, const std::string& bytes) {
    std::ofstream out(path, std::ios::binary);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!out.flush()) throw Error("test cannot write " + path);
}
static std::string read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
}

// Lowers this process's limit on file sizes or open files for a scope. Past the limit on sizes write(2) fails with
// EFBIG, as it does with ENOSPC on a full disk, after a part of the data was taken.
struct Limit {
    Limit(int what, rlim_t value) : what(what) {
        std::signal(SIGXFSZ, SIG_IGN);
        getrlimit(static_cast<__rlimit_resource_t>(what), &before);
        rlimit lower = before;
        lower.rlim_cur = value;
        setrlimit(static_cast<__rlimit_resource_t>(what), &lower);
    }
    ~Limit() { setrlimit(static_cast<__rlimit_resource_t>(what), &before); }
    int what;
    rlimit before;
};

// The program calls these instead of the C library's. They note the order of calls. Like write(2), which takes 2 GiB at
// most, this write takes no more bytes at once than most_at_once.
static std::vector<std::string> calls;
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
static void check_error(int line, const std::string& message, const std::vector<std::string>& parts) {
    for (const std::string& part : parts)
        if (message.find(part) == std::string::npos)
            test::report(__FILE__, line,
                         format("expected an error with \"%s\", got \"%s\"", part.c_str(), message.c_str()));
    if (message.find('\n') != std::string::npos) test::report(__FILE__, line, "more than one line: " + message);
}
#define CHECK_ERROR_PARTS(code, ...) \
    check_error(__LINE__, test::error_of([&] { code; }), std::vector<std::string>{__VA_ARGS__})

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
    CHECK(s.batch == 8 && s.lr == 1e-3f && s.data == "a b=c.bin" && s.device == "cpu" && s.keep == 3 &&
          s.any == INT_MIN);
    CHECK(!s.shuffle && s.overfit);
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
    CHECK_ERROR_PARTS(s.parse({"--bacth", "8"}), "--bacth", "did you mean --batch?", "--help");
    CHECK_ERROR_PARTS(s.parse({"-batch", "8"}), "-batch", "did you mean --batch?");
    CHECK_ERROR_PARTS(s.parse({"--learn", "8"}), "--learn", "did you mean --learning-rate?");
    CHECK_ERROR_PARTS(s.parse({"--weight_decay=1"}), "--weight_decay", "did you mean --weight-decay?");
    CHECK_ERROR(s.parse({"--quite-another"}), "unknown option --quite-another; see");
    CHECK_ERROR(s.parse({"-z"}), "unknown option -z");
    CHECK_ERROR(s.parse({"--"}), "unknown option --;");
    CHECK_ERROR_PARTS(s.parse({"data.bin"}), "unexpected argument \"data.bin\"");
    CHECK_ERROR(s.parse({""}), "unexpected argument \"\"");
    CHECK_ERROR(s.parse({"-a", "2"}), "unexpected argument \"2\"");
    CHECK_ERROR(s.parse({"--overfit=yes"}), "--overfit (-a): \"yes\" is not 0 or 1");
    CHECK_ERROR(s.parse({"-b"}), "--batch (-b) needs a value");
    CHECK_ERROR(s.parse({"-i", "--batch=3"}), "--data (-i) needs a value, found option --batch=3");
    CHECK_ERROR(s.parse({"-i", "-nk", "3"}), "--data (-i) needs a value, found option -nk");
    for (const char* bad : {"", "x", "3x", " 3", "3.5", "1e3", "0x10", "+3", "-"})
        CHECK_ERROR_PARTS(s.parse({"-b", bad}), format("--batch (-b): \"%s\" is not an integer", bad));
    for (const char* bad : {"0", "-1", "1025", "2147483648", "99999999999999999999"})
        CHECK_ERROR_PARTS(s.parse({"-b", bad}), format("--batch (-b): \"%s\" is out of range 1..1024", bad));
    CHECK_ERROR(s.parse({"-n", "-2147483649"}), "out of range of 32 bits");
    for (const char* bad : {"", "nan", "-nan", "inf", "1e99", "0.1f", " 0.1", "0,1", "lr"})
        CHECK_ERROR_PARTS(s.parse({"-l", bad}), format("--learning-rate (-l): \"%s\" is not a finite number", bad));
    CHECK_ERROR(s.parse({"-l", "1.0001"}), "\"1.0001\" is out of range 0..1");
    CHECK_ERROR(s.parse({"-l", "1.00000001"}), "is out of range 0..1");  // although its float is 1
    CHECK_ERROR(s.parse({"-c=-1e-30"}), "\"-1e-30\" is out of range 0..");
    CHECK_ERROR_PARTS(s.parse({"--device", "gpu"}), "--device: \"gpu\" is not one of cuda|cpu", "did you mean cpu?");
    CHECK_ERROR(s.parse({"--device", ""}), "is not one of cuda|cpu");
    bool usage = false;  // exit code 2
    try {
        s.parse({"--nothing"});
    } catch (const UsageError&) {
        usage = true;
    }
    CHECK(usage);
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
        if (help.find(line) == std::string::npos)
            test::report(__FILE__, __LINE__, format("no line %sin\n%s", line, help.c_str()));
    std::vector<Option> table = s.table();
    std::string words;
    for (int i = 0; i < 60; i++) words += i ? " word" : "word";
    table[0].help = words.c_str();
    size_t found = 0, longest = 0;
    const std::string wrapped = options_help("train", "", table);
    for (size_t at = 0, end; (end = wrapped.find('\n', at)) != std::string::npos; at = end + 1)
        longest = std::max(longest, end - at);
    for (size_t at = 0; (at = wrapped.find("word", at)) != std::string::npos; at++) found++;
    CHECK(longest <= 120 && found == 60);
    const std::string settings = options_settings(s.table());
    CHECK(settings.find("--batch          4\n--data           x.bin\n--shuffle        on\n--overfit        off\n") ==
          0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Log

TEST(log_json) {
    const std::string text = Row("train")
                                 .add("step", 3)
                                 .add("loss", 2.5)
                                 .add("tiny", 1e-300)
                                 .add("third", 1.0 / 3)
                                 .add("sum", 0.1 + 0.2)
                                 .add("nan", std::nan(""))
                                 .add("inf", -INFINITY)
                                 .add("big", 9007199254740993LL)
                                 .add("yes", true)
                                 .add("name", "d12")
                                 .text();
    CHECK(text ==
          "{\"kind\": \"train\", \"step\": 3, \"loss\": 2.5, \"tiny\": 1e-300, \"third\": 0.3333333333333333, "
          "\"sum\": 0.30000000000000004, \"nan\": null, \"inf\": null, \"big\": 9007199254740993, \"yes\": true, "
          "\"name\": \"d12\"}");
    const auto value = [](const std::string& s) {
        const std::string row = Row("k").add("s", s).text();
        const std::string head = "{\"kind\": \"k\", \"s\": \"";
        return row.substr(head.size(), row.size() - head.size() - 2);
    };
    CHECK(value("a\"b\\c\n\t\r") == "a\\\"b\\\\c\\n\\t\\u000d");
    CHECK(value(std::string("\0\x1f\x7f", 3)) == "\\u0000\\u001f\\u007f");
    CHECK(value("é€😀") == "é€😀");
    // These are not UTF-8: a lone continuation, cut sequences, overlong, surrogate, past U+10FFFF, never a lead byte.
    CHECK(value("\x80z") == "\\ufffdz");
    CHECK(value("\xE2\x82") == "\\ufffd\\ufffd");
    CHECK(value("\xC3\"") == "\\ufffd\\\"");
    CHECK(value("\xC0\xAF") == "\\ufffd\\ufffd");
    CHECK(value("\xE0\x80\x80") == "\\ufffd\\ufffd\\ufffd");
    CHECK(value("\xED\xA0\x80") == "\\ufffd\\ufffd\\ufffd");
    CHECK(value("\xF4\x90\x80\x80") == "\\ufffd\\ufffd\\ufffd\\ufffd");
    CHECK(value("\xF0\x8F\xBF\xBF") == "\\ufffd\\ufffd\\ufffd\\ufffd");
    CHECK(value("\xFF") == "\\ufffd");
    CHECK(value("\xF5\x80\x80\x80") == "\\ufffd\\ufffd\\ufffd\\ufffd");
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
    const auto row = [](const char* kind, int step) { return Row(kind).add("step", step); };
    std::string want;
    {
        Log log(path);
        log.write(Row("start").add("note", "a string with \"step\": 99 in it"));
        for (int i = 1; i <= 5; i++) log.write(row("train", i));
        want = read_file(path);  // each row is there as soon as it is written
        CHECK(std::count(want.begin(), want.end(), '\n') == 6);
    }
    Log(path).write(row("val", 5));
    CHECK(read_file(path) == want + row("val", 5).text() + "\n");

    Log::truncate_after(path, 3);
    want = Row("start").add("note", "a string with \"step\": 99 in it").text() + "\n";
    for (int i = 1; i <= 3; i++) want += row("train", i).text() + "\n";
    CHECK(read_file(path) == want);
    Log::truncate_after(path, 3);
    CHECK(read_file(path) == want);

    // A row cut off by a crash goes away, both when the log is cut and when it is appended to.
    write_file(path, want + "{\"kind\": \"tr");
    Log::truncate_after(path, 100);
    CHECK(read_file(path) == want);
    write_file(path, want + "{\"kind\": \"tr");
    Log(path).write(row("train", 4));
    CHECK(read_file(path) == want + row("train", 4).text() + "\n");

    Log::truncate_after(path, -1);
    CHECK(read_file(path) == Row("start").add("note", "a string with \"step\": 99 in it").text() + "\n");
    Log::truncate_after(dir / "none.jsonl", 1);  // no log yet
    CHECK(dir.names() == std::set<std::string>{"log.jsonl"});
    Log(path, false).write(row("new", 0));
    CHECK(read_file(path) == row("new", 0).text() + "\n");
    Log().write(row("nowhere", 1));
}

TEST(log_errors) {
    const TempDir dir;
    write_file(dir / "file", "x");
    CHECK_ERROR_PARTS(Log(dir / "file/log.jsonl"), dir / "file/log.jsonl", "Not a directory");
    CHECK_ERROR_PARTS(Log(dir / "none/log.jsonl"), "No such file or directory", "check the path");
    CHECK_ERROR_PARTS(Log(dir.path), "Is a directory");
    if (access("/dev/full", W_OK) == 0)
        CHECK_ERROR_PARTS(Log("/dev/full").write(Row("train")), "/dev/full", "No space left on device",
                          "free some space");
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
    size_t count = 0;
    for (size_t n = 0; n <= 100; n++, count++) seen.insert(checksum64(data.data(), n));
    const std::vector<char> zeros(100);
    for (size_t n = 1; n <= 100; n++, count++) seen.insert(checksum64(zeros.data(), n));
    for (uint64_t seed = 1; seed <= 100; seed++, count++) seen.insert(checksum64(data.data(), 100, seed));
    for (size_t bit = 0; bit < 8 * 99; bit++, count++) {
        data[bit / 8] = static_cast<unsigned char>(data[bit / 8] ^ 1u << bit % 8);
        seen.insert(checksum64(data.data(), 99));
        data[bit / 8] = static_cast<unsigned char>(data[bit / 8] ^ 1u << bit % 8);
    }
    CHECK(seen.size() == count);
    // Memory that is not aligned gives the same.
    std::vector<unsigned char> shifted(1001);
    std::copy(data.begin(), data.end(), shifted.begin() + 1);
    CHECK(checksum64(shifted.data() + 1, 1000) == checksum64(data.data(), 1000));
}

TEST(atomic_file) {
    const TempDir dir;
    const std::string path = dir / "out.bin";
    std::string big(3 << 20, '\0');
    for (size_t i = 0; i < big.size(); i++) big[i] = static_cast<char>(i * 2654435761u >> 13);
    {
        AtomicFile file(path);
        file.write("small", 5);
        CHECK(!fs::exists(path));
        file.write(big.data(), big.size());
        file.write("", 0);
        for (int i = 0; i < 300000; i++) file.write("0123456789", 10);
        CHECK(!fs::exists(path));
        file.commit();
    }
    std::string want = "small" + big;
    for (int i = 0; i < 300000; i++) want += "0123456789";
    CHECK(read_file(path) == want);
    CHECK(dir.names() == std::set<std::string>{"out.bin"});
    { AtomicFile(path).write("half", 4); }  // not committed, so only the old file stays
    CHECK(read_file(path) == want);
    CHECK(dir.names() == std::set<std::string>{"out.bin"});
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
    write_file(dir / temporary, std::string(5000, 'x'));  // from a process with the same number, as in a container
    const mode_t mask = umask(022);
    calls.clear();
    std::string content(3 << 20, '\0');
    for (size_t i = 0; i < content.size(); i++) content[i] = static_cast<char>(i * 2654435761u >> 13);
    for (const size_t size : {size_t{100}, content.size()}) {
        most_at_once = 70001;
        AtomicFile file(path);
        file.write(content.data(), size);
        file.commit();
        most_at_once = SIZE_MAX;
        CHECK(read_file(path) == content.substr(0, size));
    }
    umask(mask);
    const std::string directory = fs::path(dir.path).filename();
    const std::vector<std::string> once = {"fsync " + temporary, "rename", "fsync " + directory};
    CHECK(calls.size() == 6 && std::equal(once.begin(), once.end(), calls.begin()) &&
          std::equal(once.begin(), once.end(), calls.begin() + 3));
    CHECK(static_cast<int>(fs::status(path).permissions()) == 0644);  // others may read it
}

TEST(atomic_file_errors) {
    const TempDir dir;
    write_file(dir / "file", "x");
    CHECK_ERROR_PARTS(AtomicFile(dir / "file/out.bin"), dir / "file/out.bin", "Not a directory", "stands where");
    CHECK_ERROR_PARTS(AtomicFile(dir / "none/out.bin"), "No such file or directory");
    CHECK_ERROR_PARTS(AtomicFile{dir.path}, "Is a directory", "give the path of a file");
    CHECK_ERROR_PARTS(AtomicFile(dir / std::string(300, 'x')), "File name too long");
    if (access("/dev/full", W_OK) == 0) {
        const auto fill = [](size_t bytes) {
            AtomicFile file("/dev/full");
            const std::string data(bytes, 'x');
            file.write(data.data(), data.size());
            file.commit();
        };
        CHECK_ERROR_PARTS(fill(10), "/dev/full", "cannot write: No space left on device", "free some space");
        CHECK_ERROR_PARTS(fill(5 << 20), "/dev/full", "No space left on device");
        struct stat info;
        CHECK(stat("/dev/full", &info) == 0 && S_ISCHR(info.st_mode));  // not replaced by a file
    }
    // If space runs out half-way, the old file stays and no temporary does.
    const std::string path = dir / "out.bin";
    write_file(path, "old");
    for (const size_t piece : {size_t{1000}, size_t{2} << 20}) {
        const Limit full(RLIMIT_FSIZE, 1 << 20);
        const std::string data(piece, 'x');
        const auto write = [&] {
            AtomicFile file(path);
            for (size_t done = 0; done < 3 << 20; done += piece) file.write(data.data(), piece);
            file.commit();
        };
        CHECK_ERROR_PARTS(write(), path, "File too large");
        CHECK(read_file(path) == "old");
        CHECK((dir.names() == std::set<std::string>{"file", "out.bin"}));
    }
    // The name is taken by a directory while the file is written.
    AtomicFile file(dir / "late");
    fs::create_directory(dir / "late");
    CHECK_ERROR_PARTS(file.commit(), "late", "Is a directory");
}

// ---------------------------------------------------------------------------------------------------------------------
// Model files

static const ModelHeader kTiny = {DType::f32, 16, 50, 2, 2, 8, 128};

template <class T>
static void poke(std::string& bytes, size_t offset, T value) {
    std::memcpy(&bytes[offset], &value, sizeof value);
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
        std::string parameters(header.num_parameters() * size_of(dtype), '\0'), back(parameters.size(), 'x');
        for (size_t i = 0; i < parameters.size(); i++) parameters[i] = static_cast<char>(i * 31 + i / 256);
        write_model(path, header, parameters.data());
        const ModelHeader got = read_model_header(path);
        CHECK(got.dtype == dtype && got.max_T == 16 && got.V == 50 && got.L == 2 && got.NH == 2 && got.C == 8 &&
              got.Vp == 128);
        read_model_parameters(path, got, back.data());
        CHECK(back == parameters);
        const std::string file = read_file(path);
        int32_t h[256];
        std::memcpy(h, file.data(), sizeof h);
        CHECK(h[0] == 20240326 && h[1] == (dtype == DType::f32 ? 3 : 5) && h[2] == 16 && h[3] == 50 && h[4] == 2 &&
              h[5] == 2);
        CHECK(h[6] == 8 && h[7] == 128 && h[8] == 0 && h[255] == 0 && file.size() == 1024 + parameters.size());
        CHECK(file.substr(1024) == parameters);
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
    const std::string good = read_file(path);
    const auto error = [&](const std::string& bytes) {
        write_file(path, bytes);
        return test::error_of([&] { read_model_header(path); });
    };
    CHECK(error(good).empty());
    CHECK_ERROR_PARTS(read_model_header(dir / "none.bin"), dir / "none.bin", "No such file or directory");
    CHECK_ERROR_PARTS(read_model_header(dir.path), "Is a directory");
    CHECK_ERROR_PARTS(read_model_header("/dev/null"), "not a regular file");

    const size_t size = good.size();
    for (const size_t length : {size_t{0}, size_t{3}, size_t{1023}})
        check_error(__LINE__, error(good.substr(0, length)), {path, "truncated", "1024", format("%zu", length)});
    for (const size_t length : {size_t{1024}, size - 1})
        check_error(__LINE__, error(good.substr(0, length)),
                    {path, "truncated", format("expected %zu", size), format("found %zu", length)});
    check_error(__LINE__, error(good + "x"),
                {path, "too long", format("expected %zu", size), format("found %zu", size + 1)});

    const auto with = [&](int index, int32_t value) {
        std::string bytes = good;
        poke(bytes, 4 * static_cast<size_t>(index), value);
        return error(bytes);
    };
    check_error(__LINE__, with(0, 123), {path, "wrong magic at offset 0", "expected 20240326", "found 123"});
    check_error(__LINE__, with(0, 20240520), {path, "found 20240520", "this is a token shard"});
    check_error(__LINE__, with(1, 2), {path, "wrong version at offset 4", "3 (fp32) or 5 (bf16)", "found 2"});
    check_error(__LINE__, with(1, 5), {path, "too long"});  // fp32 data under a bf16 header
    for (int i = 2; i <= 7; i++)
        for (const int32_t bad : {0, -1, INT_MIN, INT_MAX})
            check_error(__LINE__, with(i, bad),
                        {path, "damaged header", format("offset %d", 4 * i), format("found %d", bad)});
    check_error(__LINE__, with(5, 3), {"offset 24", "multiple of 3 heads", "found 8"});
    check_error(__LINE__, with(7, 49), {"padded vocabulary at offset 28", "expected 50..", "found 49"});
    check_error(__LINE__, with(4, 3), {"truncated", "3 layers"});

    write_file(dir / "file", "x");
    CHECK_ERROR_PARTS(write_model(dir / "file/model.bin", kTiny, parameters.data()), "Not a directory");
    ModelHeader fp64 = kTiny;
    fp64.dtype = DType::f64;
    CHECK_ERROR_PARTS(write_model(path, fp64, parameters.data()), "fp32 or bf16", "fp64");
}

// ---------------------------------------------------------------------------------------------------------------------
// State files

namespace {
struct State {
    int step = 1234;
    std::vector<float> m, v;
    std::string text = "odd";
    explicit State(size_t n, float first = 1) : m(n), v(n) {
        for (size_t i = 0; i < n; i++) m[i] = first + static_cast<float>(i), v[i] = -m[i];
    }
    std::vector<Section> sections() {
        return {{"step", &step, sizeof step},
                {"m", m.data(), m.size() * sizeof(float)},
                {"v", v.data(), v.size() * sizeof(float)},
                {"empty", nullptr, 0},
                {"text", text.data(), text.size()}};
    }
    bool operator==(const State& o) const { return step == o.step && m == o.m && v == o.v && text == o.text; }
};
const Identity kRun = {{{"model", "d12"}, {"B", "4"}, {"data", "00ff"}, {"note", ""}}};
}  // namespace

TEST(state_round_trip) {
    const TempDir dir;
    const std::string path = dir / "state.bin";
    State written(100000), back(100000, 7);
    back.step = 0, back.text = "xxx";
    write_state(path, kRun, written.sections());
    read_state(path, kRun, back.sections());
    CHECK(back == written);
    CHECK(dir.names() == std::set<std::string>{"state.bin"});
    Identity reordered = kRun;
    std::reverse(reordered.fields.begin(), reordered.fields.end());
    std::vector<Section> sections = back.sections();
    std::reverse(sections.begin(), sections.end());
    back.m.assign(back.m.size(), 0);
    read_state(path, reordered, sections);  // sections are found by name, in any order
    CHECK(back == written);
    write_state(path, {}, {});
    read_state(path, {}, {});
}

TEST(state_every_flipped_bit) {
    const TempDir dir;
    const std::string path = dir / "state.bin";
    State written(30), back(30);
    write_state(path, kRun, written.sections());
    const std::string good = read_file(path);
    const int fd = open(path.c_str(), O_WRONLY);
    size_t missed = 0;
    for (size_t bit = 0; bit < 8 * good.size(); bit++) {
        const char flipped = static_cast<char>(good[bit / 8] ^ 1 << bit % 8);
        CHECK(pwrite(fd, &flipped, 1, static_cast<off_t>(bit / 8)) == 1);
        const std::string error = test::error_of([&] { read_state(path, kRun, back.sections()); });
        if (error.find(path) == std::string::npos || error.find("offset") == std::string::npos) {
            // If a length in the header now lies past the end, the error has no offset, but it has expected and found.
            if (error.find("truncated: expected") == std::string::npos && missed++ < 3)
                test::report(__FILE__, __LINE__, format("bit %zu: got \"%s\"", bit, error.c_str()));
        }
        CHECK(pwrite(fd, &good[bit / 8], 1, static_cast<off_t>(bit / 8)) == 1);
    }
    close(fd);
    CHECK(missed == 0);
    read_state(path, kRun, back.sections());
    CHECK(back == written);
}

TEST(state_random_flips_large) {
    const TempDir dir;
    const std::string path = dir / "state.bin";
    State written(20000), back(20000);
    write_state(path, kRun, written.sections());
    const size_t size = fs::file_size(path);
    std::mt19937_64 random(1);
    const int fd = open(path.c_str(), O_RDWR);
    for (int i = 0; i < 500; i++) {
        const off_t at = static_cast<off_t>(random() % size);
        char byte, flipped;
        CHECK(pread(fd, &byte, 1, at) == 1);
        flipped = static_cast<char>(byte ^ 1 << random() % 8);
        CHECK(pwrite(fd, &flipped, 1, at) == 1);
        CHECK_ERROR(read_state(path, kRun, back.sections()), path.c_str());
        CHECK(pwrite(fd, &byte, 1, at) == 1);
    }
    close(fd);
}

TEST(state_truncated_anywhere) {
    const TempDir dir;
    const std::string path = dir / "state.bin";
    State written(30), back(30);
    write_state(path, kRun, written.sections());
    const std::string good = read_file(path);
    for (size_t length = good.size(); length-- > 0;) {
        fs::resize_file(path, length);
        CHECK_ERROR_PARTS(read_state(path, kRun, back.sections()), path, "truncated", "expected",
                          format("found %zu", length));
    }
    write_file(path, good + "x");
    CHECK_ERROR_PARTS(read_state(path, kRun, back.sections()), path, "too long", format("expected %zu", good.size()));
}

TEST(state_errors) {
    const TempDir dir;
    const std::string path = dir / "state.bin";
    State written(30), back(30);
    const auto read = [&](const Identity& id, const std::vector<Section>& s) {
        return test::error_of([&] { read_state(path, id, s); });
    };
    check_error(__LINE__, read(kRun, back.sections()), {path, "No such file or directory"});
    write_state(path, kRun, written.sections());
    const std::string good = read_file(path);

    std::string bytes = good;
    bytes[0] = 'G';
    write_file(path, bytes);
    check_error(__LINE__, read(kRun, {}),
                {path, "wrong magic at offset 0", "expected \"gpt2stat\"", "found bytes 4770743273746174"});
    write_model(path, kTiny, std::vector<float>(kTiny.num_parameters()).data());
    check_error(__LINE__, read(kRun, {}), {path, "wrong magic", "this is a model file"});
    bytes = good;
    poke(bytes, 8, 2);
    write_file(path, bytes);
    check_error(__LINE__, read(kRun, back.sections()), {path, "wrong version at offset 8", "expected 1", "found 2"});
    bytes = good;
    bytes[20] ^= 1;
    write_file(path, bytes);
    check_error(__LINE__, read(kRun, back.sections()), {path, "damaged table", "expected", "found"});
    bytes = good;
    bytes[good.size() - 3 - 4] ^= 1;  // the last float of v
    write_file(path, bytes);
    check_error(__LINE__, read(kRun, back.sections()),
                {path, "damaged section \"v\"", "120 bytes at offset", "expected checksum", "found"});

    write_file(path, good);
    Identity other = kRun;
    other.fields[1].second = "8";
    check_error(__LINE__, read(other, back.sections()),
                {path, "another run", "B: the checkpoint has \"4\"", "this run has \"8\""});
    other = kRun;
    other.fields.push_back({"T", "64"});
    check_error(__LINE__, read(other, back.sections()),
                {path, "T: the checkpoint has no such field", "this run has \"64\""});
    other = kRun;
    other.fields.erase(other.fields.begin());
    check_error(__LINE__, read(other, back.sections()),
                {path, "model: the checkpoint has \"d12\"", "this run has none"});

    State untouched(30, 5), before(30, 5);
    std::vector<Section> sections = untouched.sections();
    sections.push_back({"more", &untouched.step, 4});
    check_error(__LINE__, read(kRun, sections), {path, "section \"more\" is missing"});
    sections = untouched.sections();
    sections.erase(sections.begin() + 1);
    check_error(__LINE__, read(kRun, sections), {path, "section \"m\" at offset", "not of this run"});
    sections = untouched.sections();
    sections[2].bytes -= 4;
    check_error(__LINE__, read(kRun, sections), {path, "section \"v\" at offset", "expected 116 bytes", "found 120"});
    CHECK(untouched == before);  // nothing is read before all of it fits

    write_file(dir / "file", "x");
    CHECK_ERROR_PARTS(write_state(dir / "file/state.bin", kRun, written.sections()), "Not a directory");
    if (access("/dev/full", W_OK) == 0)
        CHECK_ERROR_PARTS(write_state("/dev/full", kRun, written.sections()), "No space left on device");
}

TEST(checkpoint_directory) {
    const TempDir dir;
    CHECK(model_path("out", 1000) == "out/model_00001000.bin" && state_path("out", 7) == "out/state_00000007.bin");
    CHECK(newest_checkpoint(dir / "none") == -1 && newest_checkpoint(dir.path) == -1);
    const auto touch = [&](const std::string& path) { write_file(path, "x"); };
    const std::set<std::string> others = {
        "log.jsonl",           "state_.bin",          "state_7.bin",        "state_00000999.bin.bak",
        "model_00000001.bin2", "xstate_00000999.bin", "state_00000999.txt", "state_-0000001.bin",
        "main_log.tmp.12"};
    for (const std::string& name : others) touch(dir / name);
    CHECK(newest_checkpoint(dir.path) == -1);
    for (const int step : {0, 100, 200, 300, 123456789})
        touch(model_path(dir.path, step)), touch(state_path(dir.path, step));
    CHECK(newest_checkpoint(dir.path) == 123456789);
    fs::remove(state_path(dir.path, 123456789));  // now a model without its state
    touch(state_path(dir.path, 400) + ".tmp.77");
    touch(model_path(dir.path, 400) + ".tmp.77");
    CHECK(newest_checkpoint(dir.path) == 300);

    prune_checkpoints(dir.path, 2);
    std::set<std::string> want = others;
    for (const char* name : {"model_123456789.bin", "model_00000200.bin", "state_00000200.bin", "model_00000300.bin",
                             "state_00000300.bin"})
        want.insert(name);
    CHECK(dir.names() == want);
    prune_checkpoints(dir.path, 2);
    CHECK(dir.names() == want);
    fs::remove(model_path(dir.path, 200));  // a prune that was interrupted
    prune_checkpoints(dir.path, 1);
    want.erase("model_00000200.bin"), want.erase("state_00000200.bin");
    CHECK(dir.names() == want);
    // A model that cannot be removed (here a directory) is an error. Its state is gone, so the step does not count.
    touch(state_path(dir.path, 100));
    fs::create_directory(model_path(dir.path, 100));
    CHECK_ERROR_PARTS(prune_checkpoints(dir.path, 1), "model_00000100.bin: cannot remove");
    CHECK(!fs::exists(state_path(dir.path, 100)) && newest_checkpoint(dir.path) == 300);
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
    for (const auto& [byte, token] : known) CHECK(byte_to_token(static_cast<unsigned char>(byte)) == token);
    // GPT-2 states the rule so: first the printable bytes in order, then each other byte as it comes.
    std::vector<int> order;
    for (int b = '!'; b <= '~'; b++) order.push_back(b);
    for (int b = 0xA1; b <= 0xAC; b++) order.push_back(b);
    for (int b = 0xAE; b <= 0xFF; b++) order.push_back(b);
    for (int b = 0; b < 256; b++)
        if (std::find(order.begin(), order.end(), b) == order.end()) order.push_back(b);
    for (int token = 0; token < 256; token++) {
        CHECK(token_to_byte(token) == order[static_cast<size_t>(token)]);
        CHECK(byte_to_token(static_cast<unsigned char>(order[static_cast<size_t>(token)])) == token);
    }
    CHECK(token_to_byte(-1) == -1 && token_to_byte(256) == -1 && token_to_byte(50256) == -1 &&
          token_to_byte(INT_MIN) == -1);

    const char bytes[] = "naïve €5\0\n😀\xFF";
    const std::string text(bytes, sizeof bytes - 1);
    std::string back;
    const Tokenizer tokenizer;
    for (const int token : encode_bytes(text)) back += tokenizer.decode(token);
    CHECK(back == text && encode_bytes(text).size() == text.size());
    CHECK(tokenizer.decode(256) == "<256>" && tokenizer.decode(50256) == "<|endoftext|>");
    CHECK(tokenizer.decode(1234) == "<1234>" && tokenizer.decode(-1) == "<-1>");
}

static std::string tokenizer_file(int version, const std::vector<std::string>& pieces) {
    std::string bytes(1024, '\0');
    poke(bytes, 0, 20240328);
    poke(bytes, 4, version);
    poke(bytes, 8, static_cast<int>(pieces.size()));
    if (version == 2) poke(bytes, 12, static_cast<int>(pieces.size()) - 1);
    for (const std::string& piece : pieces) bytes += static_cast<char>(piece.size()), bytes += piece;
    return bytes;
}

TEST(tokenizer_file_versions) {
    const TempDir dir;
    const std::string path = dir / "tokenizer.bin";
    std::vector<std::string> pieces = {"a", std::string("\0\xFF", 2), " the", std::string(255, 'x'), "€"};
    for (int i = 0; i < 300; i++) pieces.push_back(format("piece%d", i));
    pieces.push_back("<|endoftext|>");
    for (const int version : {1, 2}) {
        write_file(path, tokenizer_file(version, pieces));
        const Tokenizer tokenizer(path);
        for (size_t i = 0; i < pieces.size(); i++) CHECK(tokenizer.decode(static_cast<int>(i)) == pieces[i]);
        CHECK(tokenizer.decode(306) == "<306>" && tokenizer.decode(50256) == "<50256>" &&
              tokenizer.decode(-1) == "<-1>");
    }
}

TEST(tokenizer_errors) {
    const TempDir dir;
    const std::string path = dir / "tokenizer.bin";
    const std::string good = tokenizer_file(2, {"a", "bc", "def"});
    const auto error = [&](const std::string& bytes) {
        write_file(path, bytes);
        return test::error_of([&] { Tokenizer t(path); });
    };
    CHECK(error(good).empty());
    CHECK_ERROR_PARTS(Tokenizer(dir / "none"), dir / "none", "No such file or directory");
    for (size_t length = good.size(); length-- > 0;) {
        fs::resize_file(path, length);
        CHECK_ERROR_PARTS(Tokenizer{path}, path, "expected", "found");
    }
    check_error(__LINE__, error(good.substr(0, 1000)), {path, "truncated", "expected 1024", "found 1000"});
    check_error(__LINE__, error(good.substr(0, good.size() - 1)),
                {path, "truncated in token 2 of 3 at offset 1029", "expected 4", "found 3"});
    check_error(__LINE__, error(good + "z"), {path, "too long", "expected 1033", "found 1034"});
    const auto with = [&](size_t offset, int value) {
        std::string bytes = good;
        poke(bytes, offset, value);
        return error(bytes);
    };
    check_error(__LINE__, with(0, 20240520), {path, "wrong magic at offset 0", "expected 20240328", "found 20240520"});
    check_error(__LINE__, with(4, 3), {path, "wrong version at offset 4", "expected 1 or 2", "found 3"});
    check_error(__LINE__, with(8, 0), {path, "offset 8", "found 0"});
    check_error(__LINE__, with(8, -1), {path, "offset 8", "found 4294967295"});
    check_error(__LINE__, with(8, 4), {path, "truncated in token 3 of 4"});
    check_error(__LINE__, with(12, 3), {path, "offset 12", "found 3"});
}

// ---------------------------------------------------------------------------------------------------------------------
// Loader

static std::string shard_bytes(const std::vector<uint16_t>& tokens) {
    std::string bytes(1024 + 2 * tokens.size(), '\0');
    poke(bytes, 0, 20240520);
    poke(bytes, 4, 1);
    poke(bytes, 8, static_cast<int>(tokens.size()));
    if (!tokens.empty()) std::memcpy(&bytes[1024], tokens.data(), 2 * tokens.size());
    return bytes;
}
static std::vector<uint16_t> counting(size_t n, int first) {
    std::vector<uint16_t> tokens(n);
    for (size_t i = 0; i < n; i++) tokens[i] = static_cast<uint16_t>(first + static_cast<int>(i));
    return tokens;
}

namespace {
struct Batch {
    std::vector<int> inputs, targets;
    Batch(int B, int T) : inputs(static_cast<size_t>(B * T), -7), targets(inputs) {}
    bool operator==(const Batch& o) const { return inputs == o.inputs && targets == o.targets; }
};
Batch next(Loader& loader, int B, int T) {
    Batch batch(B, T);
    loader.next(batch.inputs.data(), batch.targets.data());
    return batch;
}
// Shards of 41, 8, 23, 4 and 60 tokens, all different. With T = 4 they have 10 + 1 + 5 + 0 + 14 = 30 windows.
struct Shards : TempDir {
    const std::vector<size_t> sizes = {41, 8, 23, 4, 60};
    const std::string pattern = *this / "train_*.bin";
    std::vector<int> starts;  // the first token of every window, in order
    Shards() {
        for (size_t i = 0; i < sizes.size(); i++) {
            const int first = 1000 * static_cast<int>(i);
            write_file(*this / format("train_%03zu.bin", i), shard_bytes(counting(sizes[i], first)));
            for (int w = 0; (w + 1) * 4 + 1 <= static_cast<int>(sizes[i]); w++) starts.push_back(first + 4 * w);
        }
    }
};
}  // namespace

TEST(loader_in_order) {
    const Shards shards;
    CHECK(shards.starts.size() == 30);
    Loader loader(shards.pattern, 4, 4, 50257, false, 1);
    CHECK(loader.num_tokens() == 136 && loader.batches_per_epoch() == 7);
    CHECK(loader.description() == "5 shards, 136 tokens");
    // Three epochs of 30 windows are 22.5 batches of 4, because a batch may continue past the end of an epoch.
    for (size_t i = 0; i < 22; i++) {
        CHECK(loader.state().batches == i && loader.state().epoch * 30 + loader.state().window == 4 * i);
        const Batch batch = next(loader, 4, 4);
        for (size_t b = 0; b < 4; b++)
            for (size_t t = 0; t < 4; t++) {
                const int first = shards.starts[(4 * i + b) % 30];
                CHECK(batch.inputs[b * 4 + t] == first + static_cast<int>(t));
                CHECK(batch.targets[b * 4 + t] == first + static_cast<int>(t) + 1);
            }
    }
    loader.reset();
    CHECK(loader.state().epoch == 0 && loader.state().window == 0 && loader.state().batches == 0);
    CHECK(next(loader, 4, 4).inputs[0] == 0);
}

TEST(loader_shuffle) {
    const Shards shards;
    for (const int B : {1, 4, 30}) {
        Loader loader(shards.pattern, B, 4, 50257, true, 42);
        std::vector<int> stream;
        const size_t epochs = 4;
        while (stream.size() < epochs * 30) {
            const Batch batch = next(loader, B, 4);
            for (int b = 0; b < B; b++) {
                const int* row = &batch.inputs[static_cast<size_t>(4 * b)];
                for (int t = 1; t < 4; t++)
                    CHECK(row[t] == row[0] + t && batch.targets[static_cast<size_t>(4 * b + t - 1)] == row[t]);
                stream.push_back(row[0]);
            }
        }
        std::set<std::vector<int>> orders;
        for (size_t e = 0; e < epochs; e++) {
            std::vector<int> epoch(stream.begin() + static_cast<long>(30 * e),
                                   stream.begin() + static_cast<long>(30 * e + 30));
            orders.insert(epoch);
            std::sort(epoch.begin(), epoch.end());
            CHECK(epoch == shards.starts);  // each window exactly once
        }
        orders.insert(shards.starts);
        CHECK(orders.size() == epochs + 1);  // another order every time
    }
    // Every seed and epoch has its own order of the first windows, and its first shard is any that has a window.
    std::set<std::vector<int>> orders;
    std::set<int> first_shards;
    for (uint64_t seed = 0; seed < 8; seed++)
        for (uint64_t epoch = 0; epoch < 8; epoch++) {
            Loader loader(shards.pattern, 30, 4, 50257, true, seed);
            loader.restore({epoch, 0, 0});
            const std::vector<int> inputs = next(loader, 30, 4).inputs;
            orders.insert(inputs);
            first_shards.insert(inputs[0] / 1000);
            for (size_t i = 4; i < inputs.size(); i += 4)  // a shard is read to its end before the next one
                if (inputs[i] / 1000 != inputs[i - 4] / 1000)
                    for (size_t k = i + 4; k < inputs.size(); k += 4) CHECK(inputs[k] / 1000 != inputs[i - 4] / 1000);
            Loader same(shards.pattern, 30, 4, 50257, true, seed);
            same.restore({epoch, 0, 0});
            CHECK(next(same, 30, 4).inputs == inputs);
        }
    CHECK(orders.size() == 64);
    CHECK((first_shards == std::set<int>{0, 1, 2, 4}));
    // The order is pinned, because checkpoints hold a position in it.
    Loader pinned(shards.pattern, 10, 4, 50257, true, 3);
    std::vector<int> starts;
    const Batch batch = next(pinned, 10, 4);
    for (size_t i = 0; i < batch.inputs.size(); i += 4) starts.push_back(batch.inputs[i]);
    CHECK((starts == std::vector<int>{12, 20, 28, 24, 16, 4, 36, 32, 8, 0}));
}

// Shards of the same size have different orders.
TEST(loader_shuffles_each_shard_its_own_way) {
    const TempDir dir;
    for (int i = 0; i < 2; i++) write_file(dir / format("%d.bin", i), shard_bytes(counting(101, 1000 * i)));
    Loader loader(dir / "*.bin", 200, 1, 50257, true, 4);
    const std::vector<int> inputs = next(loader, 200, 1).inputs;
    int equal = 0;
    for (size_t i = 0; i < 100; i++) equal += inputs[i] % 1000 == inputs[100 + i] % 1000;
    CHECK(equal < 10);  // one on average
}

// With few windows every permutation comes about equally often, so what an epoch begins with does not repeat.
TEST(loader_shuffle_uniform) {
    const TempDir dir;
    write_file(dir / "three.bin", shard_bytes(counting(7, 0)));
    Loader loader(dir / "three.bin", 3, 2, 50257, true, 9);
    std::map<std::vector<int>, int> counts;
    const int epochs = 6000;
    for (int e = 0; e < epochs; e++) counts[next(loader, 3, 2).inputs]++;
    CHECK(counts.size() == 6);
    for (const auto& [order, n] : counts) CHECK_NEAR(n, epochs / 6.0, 150);  // five standard deviations
    // With many windows each comes first in some epoch about as often as any other (10 counts each on average).
    write_file(dir / "many.bin", shard_bytes(counting(1001, 0)));
    Loader many(dir / "many.bin", 1, 1, 50257, true, 9);
    std::vector<int> first(1000);
    for (uint64_t e = 0; e < 10000; e++) {
        many.restore({e, 0, 0});
        first[static_cast<size_t>(next(many, 1, 1).inputs[0])]++;
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
            Loader loader(pattern, 4, 4, 50257, shuffle, 3);
            std::vector<Batch> stream;
            std::vector<LoaderState> states;
            for (int i = 0; i < 25; i++) {
                states.push_back(loader.state());
                stream.push_back(next(loader, 4, 4));
            }
            for (size_t i = 0; i < states.size(); i++) {
                Loader resumed(pattern, 4, 4, 50257, shuffle, 3);
                resumed.restore(states[i]);
                for (size_t k = i; k < stream.size(); k++) CHECK(next(resumed, 4, 4) == stream[k]);
                loader.restore(states[i]);  // also in a loader that is somewhere else
                CHECK(next(loader, 4, 4) == stream[i] && loader.state().batches == i + 1);
            }
            CHECK_ERROR_PARTS(loader.restore({0, 30, 0}), "window 30", "resume with the data");
        }
}

// Each rank reads its share of the batches and skips the others'. Together they see the one stream.
TEST(loader_skip) {
    const Shards shards;
    for (const uint64_t ranks : {1, 2, 3}) {
        Loader whole(shards.pattern, 4, 4, 50257, true, 3);
        std::vector<std::unique_ptr<Loader>> loaders;
        for (uint64_t r = 0; r < ranks; r++)
            loaders.push_back(std::make_unique<Loader>(shards.pattern, 4, 4, 50257, true, 3));
        for (int step = 0; step < 12; step++) {  // into the next epochs
            for (uint64_t r = 0; r < ranks; r++) {
                loaders[r]->skip(r);
                CHECK(next(*loaders[r], 4, 4) == next(whole, 4, 4));
                loaders[r]->skip(ranks - 1 - r);
            }
            for (const auto& l : loaders) {
                const LoaderState a = l->state(), b = whole.state();
                CHECK(a.epoch == b.epoch && a.window == b.window && a.batches == b.batches);
            }
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
        const int B = 1, T = 5, windows = static_cast<int>(text.size()) / T;
        Loader loader(dir / "text", B, T, vocab, false, 0);
        CHECK(loader.num_tokens() == text.size() + 1 && loader.batches_per_epoch() == static_cast<uint64_t>(windows));
        CHECK(loader.description() == format("text file, %zu tokens", text.size() + 1));
        std::string back;
        for (int i = 0; i < windows; i++) {
            const Batch batch = next(loader, B, T);
            if (i == 0) CHECK(batch.inputs[0] == (vocab == kByteVocab ? 256 : 50256));
            for (int t = 0; t + 1 < T; t++)
                CHECK(batch.inputs[static_cast<size_t>(t + 1)] == batch.targets[static_cast<size_t>(t)]);
            for (const int token : batch.targets) back += static_cast<char>(token_to_byte(token));
        }
        CHECK(back == text.substr(0, static_cast<size_t>(windows * T)));
        CHECK(next(loader, B, T).inputs[0] == (vocab == kByteVocab ? 256 : 50256));  // epoch 1
    }
    write_file(dir / "exact.md", "abcd");  // exactly B·T + 1 tokens with <|endoftext|>
    Loader exact(dir / "exact.md", 2, 2, kByteVocab, false, 0);
    const Batch batch = next(exact, 2, 2);
    CHECK((batch.inputs == std::vector<int>{256, 64, 65, 66} && batch.targets == std::vector<int>{64, 65, 66, 67}));
    CHECK_ERROR_PARTS(Loader(dir / "exact.md", 1, 5, kByteVocab, false, 0), dir / "exact.md", "too little data",
                      "6 tokens", "found 5");
    CHECK_ERROR_PARTS(Loader(dir / "exact.md", 2, 2, 300, false, 0), dir / "exact.md", "257", "50257", "found 300");
    write_file(dir / "empty.txt", "");
    CHECK_ERROR_PARTS(Loader(dir / "empty.txt", 1, 1, kByteVocab, false, 0), "too little data", "found 1 tokens");
    write_file(dir / "short.txt", "ab");  // shorter than a magic
    CHECK(Loader(dir / "short.txt", 1, 2, kByteVocab, false, 0).num_tokens() == 3);
}

TEST(loader_vocabulary) {
    const TempDir dir;
    const std::string path = dir / "a.bin";
    write_file(path, shard_bytes({50256, 1, 2, 255, 50256, 3, 4}));
    Loader bytes(path, 2, 3, kByteVocab, false, 0), gpt2(path, 2, 3, 50257, false, 0);
    CHECK((next(bytes, 2, 3).inputs == std::vector<int>{256, 1, 2, 255, 256, 3}));
    CHECK((next(gpt2, 2, 3).targets == std::vector<int>{1, 2, 255, 50256, 3, 4}));
    std::vector<uint16_t> tokens = counting(13, 0);
    tokens[10] = 257;
    write_file(path, shard_bytes(tokens));
    Loader loader(path, 2, 3, kByteVocab, false, 0);
    next(loader, 2, 3);
    CHECK_ERROR_PARTS(next(loader, 2, 3), path, "offset 1044", "less than", "257", "found 257");
    tokens[10] = 65535;
    write_file(path, shard_bytes(tokens));
    Loader large(path, 4, 3, 50304, false, 0);
    CHECK_ERROR_PARTS(next(large, 4, 3), path, "offset 1044", "50304", "found 65535");
}

TEST(loader_errors) {
    const TempDir dir;
    const std::string path = dir / "a.bin";
    const std::string good = shard_bytes(counting(17, 0));
    const auto load = [](const std::string& pattern) {
        return test::error_of([&] { Loader(pattern, 2, 4, 50257, true, 0); });
    };
    const auto error = [&](const std::string& bytes) {
        write_file(path, bytes);
        return load(path);
    };
    const auto with = [&](size_t offset, int value) {
        std::string bytes = good;
        poke(bytes, offset, value);
        return error(bytes);
    };
    CHECK(error(good).empty());
    check_error(__LINE__, load(dir / "none.bin"), {dir / "none.bin", "no such file"});
    check_error(__LINE__, load(dir / "none_*.bin"), {dir / "none_*.bin", "no file matches"});
    check_error(__LINE__, load(dir / "none/*.bin"), {dir / "none/*.bin", "a directory of this pattern"});
    check_error(__LINE__, load(""), {"no such file"});
    check_error(__LINE__, load(dir.path), {dir.path, "is a directory"});
    check_error(__LINE__, load(dir / "a.bin/x"), {"no such file"});
    check_error(__LINE__, load("/dev/null"), {"not a regular file"});
    check_error(__LINE__, with(0, 123), {path, "wrong magic at offset 0", "expected 20240520", "found 123"});
    check_error(__LINE__, with(0, 20240326), {path, "expected 20240520", "found 20240326", "model checkpoint"});
    check_error(__LINE__, with(4, 2), {path, "wrong version at offset 4", "expected 1", "found 2"});
    check_error(__LINE__, with(8, -1), {path, "offset 8", "found -1"});
    check_error(__LINE__, with(8, 18), {path, "truncated", "18 tokens", "expected 1060 bytes", "found 1058"});
    check_error(__LINE__, with(8, INT_MAX), {path, "truncated", "2147483647 tokens", "expected 4294968318 bytes"});
    check_error(__LINE__, with(8, 16), {path, "too long", "16 tokens", "expected 1056 bytes", "found 1058"});
    for (const size_t length : {size_t{4}, size_t{12}, size_t{1023}})
        check_error(__LINE__, error(good.substr(0, length)), {path, "truncated", "1024", format("%zu", length)});
    check_error(__LINE__, error(""), {path, "wrong magic"});
    check_error(__LINE__, error("abc"), {path, "wrong magic"});
    check_error(__LINE__, error(good.substr(0, 1057)), {path, "truncated", "found 1057"});

    check_error(__LINE__, error(shard_bytes(counting(8, 0))),
                {path, "too little data", "9 tokens", "2 windows of 4", "found 8 tokens"});
    CHECK(error(shard_bytes(counting(9, 0))).empty());
    check_error(__LINE__, error(shard_bytes({})), {path, "too little data", "found 0 tokens"});
    // There are enough tokens, but no shard has a whole window.
    for (int i = 0; i < 10; i++) write_file(dir / format("small_%d.bin", i), shard_bytes(counting(4, 0)));
    check_error(__LINE__, load(dir / "small_*.bin"), {"too little data", "found 40 tokens in 10 files, 0 windows"});

    write_file(dir / "b.txt", "this is text, long enough for a batch or two");
    CHECK(load(dir / "b.txt").empty());
    check_error(__LINE__, load(dir / "[ab].*"), {dir / "b.txt", "wrong magic", "given alone"});
    CHECK_ERROR_PARTS(Loader(dir / "b.txt", 0, 4, 50257, true, 0), "B=0");
    CHECK_ERROR_PARTS(Loader(dir / "b.txt", 4, -1, 50257, true, 0), "T=-1");

    if (geteuid() != 0) {  // if one cannot be read, training must not go on with the others' shards alone
        for (const char* sub : {"sub1", "sub2"}) {
            fs::create_directory(dir / sub);
            write_file(dir / sub + "/a.bin", good);
        }
        fs::permissions(dir / "sub2", fs::perms::none);
        check_error(__LINE__, load(dir / "sub*/*.bin"), {"a directory of this pattern", "cannot be read"});
        fs::permissions(dir / "sub2", fs::perms::owner_all);
    }

    // A name with brackets that exists is that file, not a pattern.
    write_file(dir / "x[1].bin", good);
    CHECK(load(dir / "x[1].bin").empty());

    // The data changes while a loader runs.
    write_file(path, good);
    Loader loader(path, 2, 4, 50257, false, 0);
    fs::resize_file(path, 1030);
    CHECK_ERROR_PARTS(next(loader, 2, 4), path, "truncated", "expected 10 bytes at offset 1024", "found 6");
    fs::remove(path);
    Loader(dir / "x[1].bin", 2, 4, 50257, false, 0);
}

TEST(loader_many_shards) {
    const TempDir dir;
    const int count = 2000;
    for (int i = 0; i < count; i++) write_file(dir / format("s_%04d.bin", i), shard_bytes(counting(5, 10 * i)));
    const Limit few(RLIMIT_NOFILE, 40);  // open files
    Loader loader(dir / "s_*.bin", 8, 2, 50257, true, 5);
    CHECK(loader.description() == "2000 shards, 10000 tokens" && loader.batches_per_epoch() == 500);
    std::set<int> starts;
    for (int i = 0; i < 500; i++) {
        const Batch batch = next(loader, 8, 2);
        for (size_t b = 0; b < 8; b++) starts.insert(batch.inputs[2 * b]);
    }
    CHECK(starts.size() == 4000 && loader.state().epoch == 1 && loader.state().window == 0);
}

TEST(loader_larger_than_2_gib) {
    const TempDir dir;
    const std::string path = dir / "large.bin";
    const uint64_t tokens = 2147000001;  // 4.3 GB, nearly all of it a hole
    std::string header = shard_bytes({});
    poke(header, 8, static_cast<int>(tokens));
    write_file(path, header);
    if (truncate(path.c_str(), static_cast<off_t>(1024 + 2 * tokens)))
        SKIP("no sparse files here: %s", std::strerror(errno));
    const int T = 1000;
    const std::vector<uint16_t> end = counting(static_cast<size_t>(2 * T + 1), 100);
    const int fd = open(path.c_str(), O_WRONLY);
    CHECK(pwrite(fd, end.data(), 2 * end.size(), static_cast<off_t>(1024 + 2 * (tokens - end.size()))) ==
          static_cast<ssize_t>(2 * end.size()));
    Loader loader(path, 2, T, 50257, false, 0);
    CHECK(loader.num_tokens() == tokens && loader.batches_per_epoch() == 1073500 &&
          loader.description() == "1 shard, 2.1 G tokens");
    loader.restore({3, 2146998, 0});
    Batch batch = next(loader, 2, T);
    for (int i = 0; i < 2 * T; i++) {
        CHECK(batch.inputs[static_cast<size_t>(i)] == 100 + i);
        CHECK(batch.targets[static_cast<size_t>(i)] == 101 + i);
    }
    CHECK(loader.state().epoch == 4 && loader.state().window == 0);
    // The offset in an error is 64 bits wide too.
    const uint16_t bad = 65000;
    CHECK(pwrite(fd, &bad, 2, static_cast<off_t>(1024 + 2 * (tokens - 1))) == 2);
    close(fd);
    loader.restore({3, 2146998, 0});
    CHECK_ERROR_PARTS(next(loader, 2, T), path, "offset 4294001024", "found 65000");
    CHECK(loader.identity() == Loader(path, 1, 1, 65536, true, 1).identity());
}

TEST(loader_text_larger_than_4_gib) {
    const TempDir dir;
    const std::string path = dir / "large.txt", end = "the end of a very long text";
    write_file(path, "once");
    const uint64_t size = 5000000000;
    if (truncate(path.c_str(), static_cast<off_t>(size - end.size())))
        SKIP("no sparse files here: %s", strerror(errno));
    std::ofstream(path, std::ios::app) << end;
    Loader loader(path, 1, 20, kByteVocab, false, 0);
    CHECK(loader.num_tokens() == size + 1 && loader.batches_per_epoch() == size / 20);
    loader.restore({0, size / 20 - 1, 0});
    std::string back;
    for (const int token : next(loader, 1, 20).targets) back += static_cast<char>(token_to_byte(token));
    CHECK(back == end.substr(end.size() - 20));
    CHECK(next(loader, 1, 20).targets[0] == byte_to_token('o') && loader.state().epoch == 1);
}

TEST(loader_identity) {
    const Shards shards;
    const auto identity = [](const std::string& pattern) { return Loader(pattern, 1, 4, 50257, false, 0).identity(); };
    const uint64_t before = identity(shards.pattern);
    CHECK(identity(shards.pattern) == before);
    CHECK(Loader(shards.pattern, 2, 3, 65536, true, 8).identity() == before);  // of the data, however it is read
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
    write_file(moved / "z.bin", shard_bytes({}));
    CHECK(identity(moved / "*.bin") != before);
    // A large file is sampled. Its size, its first and its last bytes count, and a hundredth of it spread over the
    // rest.
    std::string text(5 << 20, 'x');
    seen.clear();
    for (const char* change : {"none", "longer", "last", "first", "early", "late"}) {
        if (!std::strcmp(change, "longer")) text += 'x';
        if (!std::strcmp(change, "last")) text.back() = 'y';
        if (!std::strcmp(change, "first")) text.front() = 'y';
        if (!std::strcmp(change, "early")) text.replace(text.size() / 5, text.size() / 100, text.size() / 100, 'y');
        if (!std::strcmp(change, "late")) text.replace(text.size() / 3 * 2, text.size() / 100, text.size() / 100, 'y');
        write_file(moved / "text", text);
        seen.insert(identity(moved / "text"));
    }
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
    CHECK_ERROR(read_choices(path + ".none", 257, 64), "choices.bin.none");

    const std::string whole = read_file(path);
    const int32_t header[4] = {20240522, 1, 2, 40};  // the last is the bytes of the longest example, 20 numbers
    CHECK(std::memcmp(whole.data(), header, sizeof header) == 0);
    std::string unanswered = whole;
    unanswered[1030] = 4;  // the label says the fifth of four endings
    write_file(path, unanswered);
    CHECK_ERROR(read_choices(path, 257, 64), "number of endings at offset");
    write_choices(path, {});
    CHECK_ERROR(read_choices(path, 257, 64), "no examples");
    for (size_t size = 0; size < whole.size(); size++) {  // truncated anywhere
        write_file(path, whole.substr(0, size));
        CHECK_ERROR(read_choices(path, 257, 64), "choices.bin: ");
    }
    write_file(path, whole + "xx");
    CHECK_ERROR(read_choices(path, 257, 64), "end of the file");
    for (size_t at : {0, 4, 1024, 1026, 1030, 1032}) {  // magic, version, start, size, label, number of endings
        std::string damaged = whole;
        damaged[at] ^= 0x40;
        write_file(path, damaged);
        CHECK_ERROR(read_choices(path, 257, 64), "choices.bin: ");
    }
}

TEST_MAIN
