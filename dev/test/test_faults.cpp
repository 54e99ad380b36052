// Faults. An operation on a file of a run fails, is cut short or is the last one, whichever it is.
// The run that is then resumed has the same bytes as one that nothing disturbed. Also two gates of
// deterministic training: a run repeats itself, and it restarts and replays. (The third, the
// baseline, is in dev/test_recipe.) Includes the program itself.
#include <dlfcn.h>
#include <sys/file.h>
#include <sys/mman.h>

#include <atomic>
#include <map>
#include <mutex>

#define main train_main
#include "train_gpt2.cu"
#undef main
#include "dev/test/processes.h"
#include "dev/test/program.h"
#include "dev/test/small_model.h"
#include "dev/test/train_threads.h"

extern const char built_from[] = "unknown dirty";

namespace {

// What follows an operation is what goes before the next. kInterrupted: by a signal, once.
enum Fault { kNone, kDiesBefore, kDiesInside, kPowerCut, kShort, kNoSpace, kInterrupted, kFaults };

// Operations on files of `folder` are counted, in any thread. It is "" in the test itself.
std::string folder;
int fault_at = -1;
Fault fault = kNone;
bool no_threads = false;  // as where a user's or a container's limit is reached
struct Counted {
    std::atomic<int> operations;
    const char* names[1000];
}* const counted = static_cast<Counted*>(
    mmap(nullptr, sizeof(Counted), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));

#define REAL(name) reinterpret_cast<decltype(&::name)>(dlsym(RTLD_NEXT, #name))

// What a power cut takes back: what was written to a file and not synced, and a new name in a
// directory that was not.
struct Unsynced {
    int fd;
    off_t synced_bytes;
};
std::mutex guard;
std::map<ino_t, Unsynced> unsynced;          // by inode
std::map<std::string, std::string> renamed;  // to, from
std::string path_of(int fd) {
    char path[PATH_MAX] = "";
    if (!folder.empty() &&
        readlink(format("/proc/self/fd/%d", fd).c_str(), path, sizeof path - 1) < 0)
        return "";
    return path;
}
ino_t inode_of(int fd) {
    struct stat info;
    return REAL(fstat)(fd, &info) ? 0 : info.st_ino;
}
int written(int fd) {
    const std::lock_guard<std::mutex> lock(guard);
    const std::string path = path_of(fd);
    const bool is_kept = contains(path, ".bin") || contains(path, "log.jsonl");
    if (is_kept && !unsynced.count(inode_of(fd))) {
        struct stat info;
        if (REAL(fstat)(fd, &info))
            _exit(99);
        unsynced[inode_of(fd)] = {dup(fd), info.st_size};
    }
    return fd;
}
int synced(int fd) {
    const std::lock_guard<std::mutex> lock(guard);
    unsynced.erase(inode_of(fd));
    if (path_of(fd) == folder)
        renamed.clear();
    return 0;
}
const char* named(const char* from, const char* to) {
    const std::lock_guard<std::mutex> lock(guard);
    // else there is the old file or the new one
    if (!folder.empty() && !exists(to))
        renamed[to] = from;
    return to;
}
// Keeps the lock, so that no other thread saves anything before the process is dead.
void cut_power() {
    guard.lock();
    for (const auto& [inode, file] : unsynced)
        if (REAL(ftruncate)(file.fd, file.synced_bytes))
            _exit(99);
    for (const auto& [to, from] : renamed)
        REAL(rename)(to.c_str(), from.c_str());
}
void die() {
    kill(getpid(), SIGKILL);
    pause();
}

// `act` does an operation, or half of a write.
template <class Result, class Act>
Result operation(const char* name, const std::string& path, Act act) {
    if (folder.empty() || path.compare(0, folder.size(), folder))
        return act(false);
    const int n = counted->operations++;
    counted->names[std::min(n, 999)] = name;
    const Fault now = n == fault_at ? fault : kNone;
    if (now == kPowerCut)
        cut_power();
    if (now == kPowerCut || now == kDiesBefore)
        die();
    if (now == kNoSpace && contains(name, "write"))
        act(true);  // the disk takes a part and is full
    if (now == kNoSpace || now == kInterrupted) {
        errno = now == kNoSpace ? ENOSPC : EINTR;
        return -1;
    }
    const Result result = act(now == kDiesInside || now == kShort);
    if (now == kDiesInside)
        die();
    return result;
}

}  // namespace

// The program calls these instead of the C library's.
#define COUNTED(Result, name, parameters, path, ...)                                           \
    Result name parameters {                                                                   \
        return operation<Result>(                                                              \
            #name, path, [&]([[maybe_unused]] bool half) { return REAL(name)(__VA_ARGS__); }); \
    }
extern "C" {
int fsync(int fd) {  // of which nothing is left but its mark, because real ones take a minute
    return operation<int>("fsync", path_of(fd), [&](bool) { return synced(fd); });
}
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                   void* argument) {
    return no_threads ? EAGAIN : REAL(pthread_create)(thread, attributes, start, argument);
}
COUNTED(int, open, (const char* path, int flags, ...), path, path, flags, 0666)
COUNTED(ssize_t, write, (int fd, const void* p, size_t n), path_of(fd), written(fd), p,
        half ? n / 2 : n)
COUNTED(ssize_t, pwrite, (int fd, const void* p, size_t n, off_t at), path_of(fd), written(fd), p,
        half ? n / 2 : n, at)
COUNTED(int, rename, (const char* from, const char* to) noexcept, to, from, named(from, to))
COUNTED(int, unlink, (const char* path) noexcept, path, path)
COUNTED(int, close, (int fd), path_of(fd), fd)
COUNTED(int, fstat, (int fd, struct stat* info) noexcept, path_of(fd), fd, info)
COUNTED(int, ftruncate, (int fd, off_t length) noexcept, path_of(fd), fd, length)
COUNTED(int, flock, (int fd, int how) noexcept, path_of(fd), fd, how)
}

namespace {

constexpr int kSteps = 5;  // with a checkpoint of steps 2, 4 and 5, of which one is kept
std::string options(const std::string& out) {
    static const std::string shard = write_shard(dir() + "/shard.bin", make_tokens(22 * 16 + 1, 1));
    return format(
        "--device cpu -e %s -i %s -b 2 -t 16 -d 64 -x %d -n 2 -nk 1 -v 0 -s 0 -u 2 -l 3e-3 --seed "
        "5 -o %s ",
        model_file(kEndOften).c_str(), shard.c_str(), kSteps, out.c_str());
}
// Runs the program in a process, with a fault in operation `at` on a file below `out`. Several
// ranks are its threads.
Result train(const std::string& options, int ranks = 1, const std::string& out = "", int at = -1,
             Fault kind = kNone) {
    Processes process;
    counted->operations = 0;
    process.start([&] {
        std::vector<std::string> words = {"train_gpt2cu"};
        std::istringstream rest(
            given_once(options + (ranks > 1 ? format(" --gpus %d", ranks) : "")));
        for (std::string word; rest >> word;)
            words.push_back(word);
        std::vector<char*> argv;
        for (std::string& word : words)
            argv.push_back(word.data());
        folder = out;
        fault_at = at;
        fault = kind;
        const int argc = static_cast<int>(argv.size());
        return ranks > 1 ? train_on_threads(argc, argv.data()) : train_main(argc, argv.data());
    });
    const std::vector<int> codes = process.wait();
    return {codes[0], process.text()};
}

// What a run leaves: its last model and state, and of each line of its log the step and how many
// rows are in it.
std::string content(const std::string& out) {
    std::string all =
        read_file(model_path(out, kSteps)) + "|" + read_file(state_path(out, kSteps)) + "|";
    for (const std::string& row : rows(out, "train"))
        all +=
            format("%g in %zd rows ", value(row, "step"), std::count(row.begin(), row.end(), '{'));
    return all;
}
std::string undisturbed(const std::string& command = "", int ranks = 1) {
    const std::string out = dir() + "/undisturbed";
    std::filesystem::remove_all(out);
    CHECK_RUN(train(options(out) + command, ranks), 0, "checkpoint");
    return out;
}

// Tries each fault, or one of `every`, in each operation of a run that begins in a copy of a
// folder.
void check_faults(const std::string& begin, const std::string& command, int ranks = 1,
                  int every = 1) {
    const std::string out = dir() + "/faulty";
    const std::string wanted = content(undisturbed(command, ranks));
    const auto again = [&](int at, Fault kind) {
        std::filesystem::remove_all(out);
        std::filesystem::copy(begin, out);
        return train(options(out) + command, ranks, out, at, kind);
    };
    CHECK_RUN(again(-1, kNone), 0, "checkpoint");
    CHECK(content(out) == wanted);
    const int operations = counted->operations;
    const std::vector<std::string> names(counted->names, counted->names + operations);
    int possible = 0;
    int tried = 0;
    int survived = 0;
    int refused = 0;
    for (int at = 0; at < operations; at++)
        for (int kind = kDiesBefore; kind < kFaults; kind++) {
            if ((kind == kDiesInside || kind == kShort) && !contains(names[at], "write"))
                continue;
            if (possible++ % every)
                continue;
            tried++;
            const Result first = again(at, Fault(kind));
            const bool said = first.code == 1 &&
                              contains(first.out, ranks > 1 ? "train_threads: " : "train_gpt2cu: ");
            // A run that ended by itself leaves no state without its model: what is tried next may
            // need the space.
            bool left_over = false;
            for (int step = newest_model(out) + 1; said && step <= kSteps; step++)
                left_over |= exists(state_path(out, step)) && !exists(state_path(begin, step));
            const Result second =
                first.code ? train(options(out) + command + " -y 1", ranks) : first;
            // A checkpoint that was announced is never lost.
            const double announced = number_after(first.out, "checkpoint " + out + "/model_");
            const double resumed = number_after(second.out, "resumed at step ");
            // Nor is a model left without its state, which nothing would ever remove.
            bool orphan = false;
            for (int step = 0; step <= kSteps; step++)
                orphan |= exists(model_path(out, step)) && !exists(state_path(out, step));
            const bool same = !left_over && !orphan && content(out) == wanted &&
                              (kind != kInterrupted || first.code == 0) &&
                              (!first.code || std::isnan(announced) || resumed >= announced);
            if (same && second.code == 0 &&
                (said || first.code == 0 || first.code == 128 + SIGKILL))
                said ? refused++ : survived++;
            else
                test::report(__FILE__, __LINE__,
                             format("fault %d in operation %d (%s): exit %d, then %d: %s%s", kind,
                                    at, names[at].c_str(), first.code, second.code,
                                    first.out.c_str(), second.out.c_str()));
        }
    std::printf("  %d operations, %d faults tried: %d survived, %d refused and resumed, %d lost\n",
                operations, tried, survived, refused, tried - survived - refused);
    CHECK(possible > 150);
}

}  // namespace

TEST(faults_in_a_new_run) {
    std::filesystem::create_directory(dir() + "/empty");
    check_faults(dir() + "/empty", "");
}

// It follows a run that died while it wrote a checkpoint and a row of its log, in which a row is
// damaged.
TEST(faults_in_a_resumed_run) {
    const std::string left = dir() + "/left";
    CHECK_RUN(train(options(left) + "-nk 0"), 0, "checkpoint");
    std::filesystem::rename(model_path(left, 5), model_path(left, 5) + ".tmp.7");
    std::string log = read_file(left + "/log.jsonl");
    log.insert(log.find('\n') + 1, "damaged\n");
    write_file(left + "/log.jsonl", log + "{\"kind\": \"tr");
    check_faults(left, "-y 1");
}

// A row of the log that cannot be written ends the run, but costs no step: there is a checkpoint,
// and the row is written at the end.
TEST(a_failing_log_costs_no_step) {
    const auto log_of = [](const std::string& out) { return out + "/log.jsonl"; };
    const std::string counting = dir() + "/counting";
    CHECK_RUN(train(options(counting), 1, log_of(counting)), 0, "checkpoint");
    std::vector<int> writes;  // the settings, then a row for each step
    for (int i = 0; i < counted->operations; i++)
        if (std::string(counted->names[i]) == "write")
            writes.push_back(i);
    CHECK(writes.size() == kSteps + 1);
    for (const int step : {1, 2}) {  // before a checkpoint syncs the log, at whatever moment
        const std::string out = dir() + format("/failing_log_%d", step);
        CHECK_RUN(train(options(out), 1, log_of(out), writes.at(step), kNoSpace), 1, "log.jsonl");
        CHECK(newest_model(out) == step);
        CHECK(rows(out, "train").size() == size_t(step));
    }
}

TEST(faults_with_two_ranks) {
    std::filesystem::create_directory(dir() + "/none");
    for (const char* optimizer : {"--zero 0", "--zero 1"})
        check_faults(dir() + "/none", optimizer, 2, 11);
}

// Differences beside the arguments are found before the first step. A rate that ruins the
// parameters of one rank shows in the second step. If ranks share sequences, what is broken reaches
// the others at once, and none may stop before them.
TEST(a_rank_that_differs_is_named) {
    const std::string other = dir() + "/other.bin";
    const std::string out = dir() + "/differs";
    write_shard(other, make_tokens(22 * 16 + 1, 2));
    const auto check = [&](const std::string& command, const std::string& says,
                           void (*change)(Options&)) {
        std::filesystem::remove_all(out);
        change_options_of_rank_1 = change;
        CHECK_RUN(train(options(out) + command, 2), 1, says);
        change_options_of_rank_1 = [](Options&) {};
    };
    check("", "parameters: rank 1 has", [](Options& o) { o.init = model_file(kNoEnd); });
    check("", ": data: rank 1 has", [](Options& o) { o.train_data = dir() + "/other.bin"; });
    check("-j " + other, ": validation data: rank 1 has",
          [](Options& o) { o.val_data = dir() + "/shard.bin"; });
    const auto ruin = [](Options& o) {
        o.lr = 3e38f;
        o.weight_decay = 1e3f;
    };
    check("--zero 0 -u 0", "step 2: loss ", ruin);
    check("--zero 0 -u 0 --context-parallel 2", "step 2: loss ", ruin);
}

TEST(a_run_without_more_threads_keeps_the_same) {
    const std::string out = dir() + "/no_threads";
    const std::string large = dir() + "/large";
    const std::string bytes(10 << 20, 'x');
    no_threads = true;
    CHECK_RUN(train(options(out)), 0, "checkpoint");
    CHECK(test::error_of([&] { write_whole_file(large, {{bytes.data(), bytes.size()}}); }) == "");
    CHECK(test::error_of([&] { CHECK(InputFile(large).read_all() == bytes); }) == "");
    no_threads = false;
    CHECK(content(out) == content(undisturbed()));

    // OpenMP, which would end the program, does with fewer.
    Processes process;
    process.start([&] {
        unsetenv("OMP_THREAD_LIMIT");
        const std::string command =
            "exec \"$0\" --without-threads " + given_once(options(out + "_2"));
        const std::string self = std::filesystem::read_symlink("/proc/self/exe");
        execl("/bin/sh", "sh", "-c", command.c_str(), self.c_str(), nullptr);
        return 1;
    });
    process.check({0}, {"CPU, 1 thread,", "checkpoint"});
    CHECK(content(out + "_2") == content(undisturbed()));
}

TEST(gate_repeat) {
    const std::string out = dir() + "/again";
    CHECK_RUN(train(options(out)), 0, "checkpoint");
    CHECK(content(out) == content(undisturbed()));
    CHECK(values(out, "train", "grad_norm") == values(undisturbed(), "train", "grad_norm"));
}

TEST(gate_restart) {
    const std::string out = dir() + "/restarted";
    const std::string command = options(out) + "-nk 0 ";
    CHECK_RUN(train(command, 1, out, 35, kDiesBefore), 128 + SIGKILL);
    CHECK_RUN(train(command + "-y 1"), 0, "resumed at step ");
    CHECK(content(out) == content(undisturbed()));
}

int main(int argc, char** argv) {
    if (argc > 1 && std::string(argv[1]) == "--without-threads") {
        no_threads = true;
        return train_main(argc - 1, argv + 1);
    }
    // OpenMP has read its variables by now, so this program starts once more.
    if (!std::getenv("OMP_THREAD_LIMIT")) {
        setenv("OMP_THREAD_LIMIT", "1", 1);
        execv("/proc/self/exe", argv);
    }
    return test::main(argc, argv);
}
