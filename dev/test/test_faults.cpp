// Faults: one operation on a run's files fails, is cut short, or is the last thing that the process
// does, for every operation in turn. A run that is resumed after it must write the same bytes as
// one that nothing disturbed.
//
// Two of the three gates of deterministic training are here, too, which whoever changes training
// passes first: a run repeats itself, and it restarts and replays. The third,
// gate_baseline_training_follows_the_recipe, is in dev/test_recipe. This file includes the program
// itself.
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

extern const char built_from[] = "unknown dirty";  // the program's --version needs it

namespace {

// -------------------------------------------------------------------------------------------------
// Faults in the C library's operations on files

enum Fault {
    kNone,
    kDiesBefore,   // the process is killed before the operation
    kDiesInside,   // the process is killed when half of a write is done
    kPowerCut,     // the process is killed before the operation, and what is not synced is lost
    kShort,        // a write does half and returns how much that is
    kNoSpace,      // the operation fails with ENOSPC, a write after half of it
    kInterrupted,  // the operation does nothing and fails with EINTR
    kFaults
};

// Operations on files whose paths begin with `watched` are counted, in any thread. The one with
// this number has the fault.
struct Plan {
    std::string watched;         // a folder or a file. "" counts nothing
    std::string operation = "";  // only operations of this name are counted. "" counts all
    int fault_at = -1;
    Fault fault = kNone;
    double seconds = 0;  // that each counted operation takes longer
};
Plan plan;  // of this process. The test itself watches nothing

bool no_threads = false;  // as where a user's or a container's limit is reached

// Shared with the child processes, in which the operations happen.
struct Counted {
    std::atomic<int> operations;
    const char* names[1000];
};
Counted* const counted = static_cast<Counted*>(
    mmap(nullptr, sizeof(Counted), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));

#define REAL(name) reinterpret_cast<decltype(&::name)>(dlsym(RTLD_NEXT, #name))

// What a power cut takes back: what was written to a file that was not synced since, and a new name
// in a folder that was not synced since.
struct Unsynced {
    int fd;
    off_t synced_bytes;
};
std::mutex guard;
std::map<ino_t, Unsynced> unsynced;          // by inode
std::map<std::string, std::string> renamed;  // from the new name to the old

std::string path_of(int fd) {
    if (plan.watched.empty())
        return "";
    char path[PATH_MAX] = "";
    if (readlink(format("/proc/self/fd/%d", fd).c_str(), path, sizeof path - 1) < 0)
        return "";
    return path;
}

struct stat info_of(int fd) {
    struct stat info = {};
    if (REAL(fstat)(fd, &info))
        info.st_ino = 0;
    return info;
}

// Called before a write.
void mark_unsynced(int fd) {
    const std::lock_guard<std::mutex> lock(guard);
    const std::string path = path_of(fd);
    if (!contains(path, ".bin") && !contains(path, "log.jsonl"))
        return;

    const struct stat info = info_of(fd);
    if (info.st_ino == 0)
        _exit(99);
    if (!unsynced.count(info.st_ino))
        unsynced[info.st_ino] = {dup(fd), info.st_size};
}

void mark_synced(int fd) {
    const std::lock_guard<std::mutex> lock(guard);
    unsynced.erase(info_of(fd).st_ino);
    if (path_of(fd) == plan.watched)
        renamed.clear();
}

// Called before a file is renamed. A file that is replaced has its old content or its new one after
// a power cut, and both are tried by killing the process before and after.
void mark_renamed(const char* from, const char* to) {
    const std::lock_guard<std::mutex> lock(guard);
    if (!plan.watched.empty() && !exists(to))
        renamed[to] = from;
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

// Does an operation, unless its fault is due. `act_half` does half of a write; other operations
// have none.
template <class Value>
Value operation(const char* name, const std::string& path, const std::function<Value()>& act,
                std::function<Value()> act_half = nullptr) {
    const std::string& watched = plan.watched;
    const bool is_watched = !watched.empty() && path.compare(0, watched.size(), watched) == 0;
    if (!is_watched || (!plan.operation.empty() && plan.operation != name))
        return act();

    // Several threads write, so a fault that is meant for a write may now and then meet another
    // operation, which is done as a whole.
    const bool is_write = act_half != nullptr;
    if (!is_write)
        act_half = act;

    const int n = counted->operations++;
    counted->names[std::min(n, 999)] = name;
    sleep_for(plan.seconds);

    const Fault due = n == plan.fault_at ? plan.fault : kNone;
    if (due == kDiesBefore)
        die();
    if (due == kDiesInside) {
        act_half();
        die();
    }
    if (due == kPowerCut) {
        cut_power();
        die();
    }
    if (due == kShort)
        return act_half();
    if (due == kNoSpace) {
        if (is_write)
            act_half();  // the disk takes a part and is full
        errno = ENOSPC;
        return -1;
    }
    if (due == kInterrupted) {
        errno = EINTR;
        return -1;
    }
    return act();
}

}  // namespace

// The program calls these instead of the C library's.
extern "C" {

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                   void* argument) {
    return no_threads ? EAGAIN : REAL(pthread_create)(thread, attributes, start, argument);
}

int open(const char* path, int flags, ...) {
    return operation<int>("open", path, [&] { return REAL(open)(path, flags, 0666); });
}

ssize_t write(int fd, const void* data, size_t bytes) {
    const auto write_part = [=](size_t part) {
        mark_unsynced(fd);
        return REAL(write)(fd, data, part);
    };
    return operation<ssize_t>(
        "write", path_of(fd), [=] { return write_part(bytes); },
        [=] { return write_part(bytes / 2); });
}

ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) {
    const auto write_part = [=](size_t part) {
        mark_unsynced(fd);
        return REAL(pwrite)(fd, data, part, at);
    };
    return operation<ssize_t>(
        "pwrite", path_of(fd), [=] { return write_part(bytes); },
        [=] { return write_part(bytes / 2); });
}

// Only marks the file as synced: real ones would take a minute.
int fsync(int fd) {
    return operation<int>("fsync", path_of(fd), [=] {
        mark_synced(fd);
        return 0;
    });
}

int rename(const char* from, const char* to) noexcept {
    return operation<int>("rename", to, [=] {
        mark_renamed(from, to);
        return REAL(rename)(from, to);
    });
}

int unlink(const char* path) noexcept {
    return operation<int>("unlink", path, [=] { return REAL(unlink)(path); });
}

int close(int fd) {
    return operation<int>("close", path_of(fd), [=] { return REAL(close)(fd); });
}

int fstat(int fd, struct stat* info) noexcept {
    return operation<int>("fstat", path_of(fd), [=] { return REAL(fstat)(fd, info); });
}

int ftruncate(int fd, off_t length) noexcept {
    return operation<int>("ftruncate", path_of(fd), [=] { return REAL(ftruncate)(fd, length); });
}

int flock(int fd, int how) noexcept {
    return operation<int>("flock", path_of(fd), [=] { return REAL(flock)(fd, how); });
}

}  // extern "C"

namespace {

// -------------------------------------------------------------------------------------------------
// Runs

constexpr int kSteps = 5;  // with a checkpoint at steps 2, 4 and 5, of which one is kept

std::string options(const std::string& out) {
    static const std::string shard = write_shard(dir() + "/shard.bin", make_tokens(22 * T + 1, 1));
    return format(
        "--device cpu -e %s -i %s -b 2 -t 16 -d 64 -x %d -n 2 -nk 1 -v 0 -s 0 -u 2 -l 3e-3 --seed "
        "5 -o %s ",
        model_file(kEndOften).c_str(), shard.c_str(), kSteps, out.c_str());
}

// Runs the program in a child process, which has this plan. Several ranks are its threads.
Result train(const std::string& options, int ranks = 1, const Plan& child_plan = {}) {
    const std::string several = ranks > 1 ? format(" --gpus %d", ranks) : "";
    std::istringstream rest(given_once(options + several));
    std::vector<std::string> words = {"train_gpt2cu"};
    for (std::string word; rest >> word;)
        words.push_back(word);
    std::vector<char*> argv;
    for (std::string& word : words)
        argv.push_back(word.data());
    const int argc = static_cast<int>(argv.size());

    Processes process;
    counted->operations = 0;
    process.start([&] {
        plan = child_plan;
        return ranks > 1 ? train_on_threads(argc, argv.data()) : train_main(argc, argv.data());
    });
    const std::vector<int> codes = process.wait();
    return {codes[0], process.text()};
}

// What a run leaves: its last model and state, and of each line of its log the step, the gradient's
// norm, and how many rows are in it. Two are, if a row was written after half of another.
std::string content(const std::string& out) {
    std::string all =
        read_file(model_path(out, kSteps)) + "|" + read_file(state_path(out, kSteps)) + "|";
    for (const std::string& row : rows(out, "train"))
        all += format("%g: norm %.17g in %zd rows ", value(row, "step"), value(row, "grad_norm"),
                      std::count(row.begin(), row.end(), '{'));
    return all;
}

// What a run leaves that nothing disturbs.
std::string undisturbed(const std::string& command = "", int ranks = 1) {
    const std::string out = dir() + "/undisturbed";
    std::filesystem::remove_all(out);
    CHECK_RUN(train(options(out) + command, ranks), 0, "checkpoint");
    return content(out);
}

// A run that begins in a copy of a folder and has a fault, and the run that resumes after it.
struct FaultyRun {
    std::string begin;  // the folder
    std::string command = "";
    int ranks = 1;
    std::string wanted = undisturbed(command, ranks);
    std::string out = dir() + "/faulty";

    Result train_from_begin(int at, Fault kind) const {
        std::filesystem::remove_all(out);
        std::filesystem::copy(begin, out);
        return train(options(out) + command, ranks,
                     {.watched = out, .fault_at = at, .fault = kind});
    }

    Result resume() const { return train(options(out) + command + " -y 1", ranks); }

    // Tries a fault and reports what is wrong after it. Returns whether the first run ended with an
    // error of its own.
    bool check(int at, Fault kind, const std::string& operation) const {
        const Result first = train_from_begin(at, kind);
        const bool says_why = first.code == 1 &&
                              contains(first.out, ranks > 1 ? "train_threads: " : "train_gpt2cu: ");
        const bool was_killed = first.code == 128 + SIGKILL;

        std::string wrong;
        if (first.code != 0 && !says_why && !was_killed)
            wrong += "no reason; ";
        if (first.code != 0 && kind == kInterrupted)
            wrong += "the operation was not tried again; ";
        // such a state would take space that the next try to save may need
        if (says_why && has_new_state_without_model())
            wrong += "a state without a model is left; ";

        const Result second = first.code == 0 ? first : resume();
        if (second.code != 0)
            wrong += "cannot resume; ";
        if (first.code != 0 && loses_checkpoint(first, second))
            wrong += "a checkpoint that was announced is lost; ";
        if (has_model_without_state())
            wrong += "a model is left without its state, which nothing would ever remove; ";
        if (content(out) != wanted)
            wrong += "other content; ";

        if (!wrong.empty())
            test::report(__FILE__, __LINE__,
                         format("fault %d in operation %d (%s): %sexit %d, then %d: %s%s", kind, at,
                                operation.c_str(), wrong.c_str(), first.code, second.code,
                                first.out.c_str(), second.out.c_str()));
        return says_why;
    }

    bool loses_checkpoint(const Result& first, const Result& second) const {
        const double announced = number_after(first.out, "checkpoint " + out + "/model_");
        const double resumed = number_after(second.out, "resumed at step ");
        return !std::isnan(announced) && !(resumed >= announced);
    }

    bool has_new_state_without_model() const {
        for (int step = newest_model(out) + 1; step <= kSteps; step++)
            if (exists(state_path(out, step)) && !exists(state_path(begin, step)))
                return true;
        return false;
    }

    bool has_model_without_state() const {
        for (int step = 0; step <= kSteps; step++)
            if (exists(model_path(out, step)) && !exists(state_path(out, step)))
                return true;
        return false;
    }
};

// Tries each fault, or one of `every`, in each operation of a run.
void check_faults(const FaultyRun& run, int every = 1) {
    CHECK_RUN(run.train_from_begin(-1, kNone), 0, "checkpoint");
    CHECK(content(run.out) == run.wanted);
    const std::vector<std::string> operations(counted->names, counted->names + counted->operations);
    int possible = 0;
    int tried = 0;
    int said_why = 0;
    for (size_t at = 0; at < operations.size(); at++)
        for (int kind = kDiesBefore; kind < kFaults; kind++) {
            const bool is_write = contains(operations[at], "write");
            if ((kind == kDiesInside || kind == kShort) && !is_write)
                continue;
            possible++;
            if ((possible - 1) % every != 0)
                continue;
            tried++;
            said_why += run.check(static_cast<int>(at), Fault(kind), operations[at]) ? 1 : 0;
        }
    std::printf("  %zu operations, %d faults tried, %d of them ended with an error\n",
                operations.size(), tried, said_why);
    CHECK(possible > 150);
}

std::string empty_folder() {
    const std::string path = dir() + "/empty";
    std::filesystem::create_directory(path);
    return path;
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Each fault in each operation

TEST(faults_in_a_new_run) {
    check_faults({.begin = empty_folder()});
}

// It follows a run that died while it wrote a checkpoint and a row of its log, in which a row is
// damaged.
TEST(faults_in_a_resumed_run) {
    const std::string begin = dir() + "/killed";
    CHECK_RUN(train(options(begin) + "-nk 0"), 0, "checkpoint");
    std::filesystem::rename(model_path(begin, 5), model_path(begin, 5) + ".tmp.7");
    std::string log = read_file(begin + "/log.jsonl");
    log.insert(log.find('\n') + 1, "damaged\n");
    write_file(begin + "/log.jsonl", log + "{\"kind\": \"tr");
    check_faults({.begin = begin, .command = "-y 1"});
}

TEST(faults_with_two_ranks) {
    for (const char* optimizer : {"--zero 0", "--zero 1"})
        check_faults({.begin = empty_folder(), .command = optimizer, .ranks = 2}, 11);
}

// A row of the log that cannot be written ends the run, but costs no step: there is a checkpoint,
// and the row is written at the end. The first write is that of the settings.
TEST(a_failing_log_costs_no_step) {
    for (const int step : {1, 2, 3}) {
        const std::string out = dir() + format("/failing_log_%d", step);
        const Plan full_disk = {.watched = out + "/log.jsonl",
                                .operation = "write",
                                .fault_at = step,
                                .fault = kNoSpace};
        CHECK_RUN(train(options(out), 1, full_disk), 1, out + "/log.jsonl: ");
        CHECK(newest_model(out) == step);
        CHECK(rows(out, "train").size() == size_t(step));
    }
}

// A log that cannot be synced ends the run, but keeps no checkpoint from being written. An
// undisturbed run has three, each with a sync before it.
TEST(a_log_that_cannot_be_synced_ends_the_run) {
    for (const int checkpoint : {1, 2, 3}) {
        const std::string out = dir() + format("/unsynced_log_%d", checkpoint);
        const Plan full_disk = {.watched = out + "/log.jsonl",
                                .operation = "fsync",
                                .fault_at = checkpoint - 1,
                                .fault = kNoSpace};
        const Result r = train(options(out), 1, full_disk);
        CHECK_RUN(r, 1, out + "/log.jsonl: cannot sync");
        CHECK(count_of(r.out, "\ncheckpoint ") == counted->operations);  // one for each sync
        CHECK(newest_model(out) >= std::min(2 * checkpoint, kSteps));
        CHECK(rows(out, "train").size() == size_t(newest_model(out)));
    }
}

// All ranks wait longer than --timeout for the disk of rank 0.
TEST(a_slow_disk_is_no_hang) {
    const std::string out = dir() + "/slow_disk";
    const Plan slow_disk = {.watched = out + "/state_", .operation = "fsync", .seconds = 5};
    has_watchdog = true;
    CHECK_RUN(train(options(out) + "--timeout 3 -n 0 ", 2, slow_disk), 0, "checkpoint");
    has_watchdog = false;
    CHECK(counted->operations == 1);
    CHECK(content(out) == undisturbed("", 2));
}

// -------------------------------------------------------------------------------------------------
// Ranks that differ

namespace {

// Trains with two ranks, of which rank 1 has other options.
void check_differs(const std::string& command, const std::string& says, void (*change)(Options&)) {
    const std::string out = dir() + "/differs";
    std::filesystem::remove_all(out);
    change_options_of_rank_1 = change;
    CHECK_RUN(train(options(out) + command, 2), 1, says);
    change_options_of_rank_1 = [](Options&) {};
}

}  // namespace

// What the ranks' arguments do not show is compared before the first step.
TEST(a_rank_with_other_files_is_named) {
    const std::string other = write_shard(dir() + "/other.bin", make_tokens(22 * T + 1, 2));
    check_differs("", ": the parameters of rank 1",
                  [](Options& o) { o.init = model_file(kNoEnd); });
    check_differs("", ": the data of rank 1",
                  [](Options& o) { o.train_data = dir() + "/other.bin"; });
    check_differs("-j " + other, ": the validation data of rank 1",
                  [](Options& o) { o.val_data = dir() + "/shard.bin"; });
}

// A rate that ruins the parameters of one rank shows in the second step: in the losses of that rank
// or, if ranks share sequences, of all. Either way all ranks must stop in this step, because one
// that went on would wait for the others.
TEST(a_rank_whose_loss_is_not_finite_ends_all) {
    const auto ruin = [](Options& o) {
        o.lr = 3e38f;
        o.weight_decay = 1e3f;
    };
    check_differs("--zero 0 -u 0", "step 2: loss ", ruin);
    check_differs("--zero 0 -u 0 --context-parallel 2", "step 2: loss ", ruin);
}

// -------------------------------------------------------------------------------------------------
// Without threads

TEST(a_run_without_more_threads_writes_the_same) {
    const std::string out = dir() + "/no_threads";
    no_threads = true;
    CHECK_RUN(train(options(out)), 0, "checkpoint");
    no_threads = false;
    CHECK(content(out) == undisturbed());
}

// Large files are read and written in parts, each by a thread.
TEST(large_files_without_more_threads) {
    const std::string path = dir() + "/large";
    const std::string bytes(10 << 20, 'x');
    no_threads = true;
    CHECK(test::error_of([&] { write_whole_file(path, {{bytes.data(), bytes.size()}}); }) == "");
    CHECK(test::error_of([&] { CHECK(InputFile(path).read_all() == bytes); }) == "");
    no_threads = false;
}

// OpenMP would end the program if it could not start a thread.
TEST(openmp_without_more_threads) {
    const std::string out = dir() + "/no_openmp_threads";
    Processes process;
    process.start([&] {
        unsetenv("OMP_THREAD_LIMIT");
        const std::string command = "exec \"$0\" --without-threads " + given_once(options(out));
        const std::string self = std::filesystem::read_symlink("/proc/self/exe");
        execl("/bin/sh", "sh", "-c", command.c_str(), self.c_str(), nullptr);
        return 1;
    });
    process.check({0}, {"CPU, 1 thread,", "checkpoint"});
    CHECK(content(out) == undisturbed());
}

// -------------------------------------------------------------------------------------------------
// Gates of deterministic training

TEST(gate_repeat) {
    CHECK(undisturbed() == undisturbed());
}

TEST(gate_restart) {
    const std::string out = dir() + "/restarted";
    const std::string command = options(out) + "-nk 0 ";
    const int between_models = 35;  // an operation after the model of step 2 and before that of 4
    const Plan death = {.watched = out, .fault_at = between_models, .fault = kDiesBefore};
    CHECK_RUN(train(command, 1, death), 128 + SIGKILL);
    CHECK(newest_model(out) == 2);
    CHECK_RUN(train(command + "-y 1"), 0, "resumed at step 2\n");
    CHECK(content(out) == undisturbed());
}

int main(int argc, char** argv) {
    if (argc > 1 && std::string(argv[1]) == "--without-threads") {
        no_threads = true;
        return train_main(argc - 1, argv + 1);
    }
    // A model as small as this is faster with one thread. OpenMP has read its variables by now, so
    // this program starts once more.
    if (!std::getenv("OMP_THREAD_LIMIT")) {
        setenv("OMP_THREAD_LIMIT", "1", 1);
        execv("/proc/self/exe", argv);
    }
    return test::main(argc, argv);
}
