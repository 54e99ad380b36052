// Faults: whatever operation on a file of a run fails, is cut short or is the last one before the end, the run that is
// resumed has the same bytes as one that nothing disturbed. Also the three gates of deterministic training: a run
// repeats itself, keeps to the baseline, and restarts and replays. Includes the program itself, which runs in processes.
//
// Run: ./dev/test_faults [part of a test's name]
#include <dlfcn.h>
#include <sys/file.h>
#include <sys/mman.h>

#include <atomic>
#include <map>
#include <mutex>

#define main train_main
#include "../train_gpt2.cu"
#undef main
#include "dev/small_model.h"

extern const char built_from[] = "unknown dirty";

// ---------------------------------------------------------------------------------------------------------------------
// The program calls these instead of the C library's. Any thread may. Operations on files of `folder` are counted.

namespace {

enum Fault { kNone, kDieBefore, kDieAfter, kDieInside, kPowerCut, kShort, kNoSpace, kInputOutput, kFaults };
const char* const kFaultNames[] = {"none",  "dies before", "dies after",    "dies inside",
                                   "power", "short",       "no space left", "input/output error"};

std::string folder;  // "" in the test itself
int fault_at = -1;
Fault fault = kNone;
struct Counted {
    std::atomic<int> operations;
    char names[1000][12];
}* const counted =
    static_cast<Counted*>(mmap(nullptr, sizeof(Counted), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));

// What a power cut takes back: the content of files that were not synced, and renames in directories that were not.
std::mutex guard;
std::map<ino_t, int> unsynced;               // by inode, a descriptor
std::map<std::string, std::string> renamed;  // to, from
ino_t inode_of(int fd) {
    struct stat info;
    return fstat(fd, &info) ? 0 : info.st_ino;
}

template <class Function>
Function* real(const char* name, Function*) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}
#define REAL(name) real(#name, &::name)

[[noreturn]] void die() {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

// Does an operation on a file. `act` does it, or half of it.
template <class Result, class Act>
Result operation(const char* name, const std::string& path, Result failed, Act act, bool halves = false) {
    if (folder.empty() || path.compare(0, folder.size(), folder)) return act(false);
    const int n = counted->operations++;
    std::snprintf(counted->names[std::min(n, 999)], sizeof counted->names[0], "%s", name);
    const Fault now = n == fault_at ? fault : kNone;
    if (now == kDieBefore) die();
    if (now == kPowerCut) {
        const std::lock_guard<std::mutex> lock(guard);
        for (const auto& [inode, fd] : unsynced)
            if (REAL(ftruncate)(fd, 0)) _exit(99);
        for (const auto& [to, from] : renamed) REAL(rename)(to.c_str(), from.c_str());
        die();
    }
    if (now == kNoSpace || now == kInputOutput) return errno = now == kNoSpace ? ENOSPC : EIO, failed;
    const Result result = act(halves && (now == kDieInside || now == kShort));
    if (now == kDieAfter || (now == kDieInside && halves)) die();
    return result;
}
std::string path_of(int fd) {
    char path[PATH_MAX] = "";
    return readlink(format("/proc/self/fd/%d", fd).c_str(), path, sizeof path - 1) < 0 ? "" : path;
}

}  // namespace

extern "C" {
int open(const char* path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    const mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return operation("open", path, -1, [&](bool) { return REAL(open)(path, flags, mode); });
}
FILE* fopen(const char* path, const char* mode) {
    return operation<FILE*>("fopen", path, nullptr, [&](bool) { return REAL(fopen)(path, mode); });
}
ssize_t write(int fd, const void* data, size_t bytes) {
    const std::string path = folder.empty() ? "" : path_of(fd);
    return operation<ssize_t>(
        "write", path, -1,
        [&](bool half) {
            const std::lock_guard<std::mutex> lock(guard);
            if (contains(path, ".bin") && !unsynced.count(inode_of(fd))) unsynced[inode_of(fd)] = dup(fd);
            return REAL(write)(fd, data, half ? bytes / 2 : bytes);
        },
        true);
}
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) {
    return operation<ssize_t>(
        "pwrite", path_of(fd), -1, [&](bool half) { return REAL(pwrite)(fd, data, half ? bytes / 2 : bytes, at); },
        true);
}
size_t fwrite(const void* data, size_t size, size_t n, FILE* file) {
    return operation<size_t>(
        "fwrite", path_of(fileno(file)), 0, [&](bool half) { return REAL(fwrite)(data, size, half ? n / 2 : n, file); },
        true);
}
int fsync(int fd) {
    const std::string path = path_of(fd);
    return operation("fsync", path, -1, [&](bool) {
        const std::lock_guard<std::mutex> lock(guard);
        unsynced.erase(inode_of(fd));
        if (path == folder) renamed.clear();
        return REAL(fsync)(fd);
    });
}
int rename(const char* from, const char* to) noexcept {
    return operation("rename", to, -1, [&](bool) {
        const std::lock_guard<std::mutex> lock(guard);
        if (!exists(to)) renamed[to] = from;  // else there is the old file or the new one
        return REAL(rename)(from, to);
    });
}
int unlink(const char* path) noexcept {
    return operation("unlink", path, -1, [&](bool) { return REAL(unlink)(path); });
}
int close(int fd) {
    return operation("close", folder.empty() ? "" : path_of(fd), -1, [&](bool) { return REAL(close)(fd); });
}
int ftruncate(int fd, off_t length) noexcept {
    return operation("ftruncate", path_of(fd), -1, [&](bool) { return REAL(ftruncate)(fd, length); });
}
int flock(int fd, int how) noexcept {
    return operation("flock", path_of(fd), -1, [&](bool) { return REAL(flock)(fd, how); });
}
}

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Runs in processes

constexpr int kSteps = 5;  // with a checkpoint of steps 2, 4 and 5, of which one is kept

std::string options(const std::string& out) {
    static const std::string shard = write_shard(dir() + "/shard.bin", make_tokens(22 * 16 + 1, 1));
    return format("--device cpu -e %s -i %s -b 2 -t 16 -d 64 -x %d -n 2 -nk 1 -v 0 -s 0 -u 2 -l 3e-3 --seed 5 -o %s",
                  model_file(kEndOften).c_str(), shard.c_str(), kSteps, out.c_str());
}
// Runs the program in a process, with a fault in operation `at` on a file below its -o.
Result train(const std::string& options, const std::string& out = "", int at = -1, Fault kind = kNone) {
    const std::string printed = dir() + "/printed";
    std::fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
        alarm(20);
        std::vector<std::string> words = {"train_gpt2cu"};
        std::istringstream rest(options);
        for (std::string word; rest >> word;) words.push_back(word);
        std::vector<char*> argv;
        for (std::string& word : words) argv.push_back(word.data());
        argv.push_back(nullptr);
        const int to = ::open(printed.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(to, 1), dup2(to, 2);
        counted->operations = 0;
        folder = out, fault_at = at, fault = kind;
        const int code = train_main(static_cast<int>(words.size()), argv.data());
        folder.clear();
        std::fflush(stdout);
        _exit(code);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(printed)};
}

// What a run is: its last model and state, and which step each of its log's rows is of.
std::string content(const std::string& out) {
    std::string all;
    for (const std::string& path : {model_path(out, kSteps), state_path(out, kSteps)}) all += read_file(path) + "|";
    for (const double step : values(out, "train", "step")) all += format("%g ", step);
    return all;
}
const std::string& undisturbed() {
    static const std::string out = dir() + "/undisturbed";
    if (!exists(out)) CHECK_RUN(train(options(out)), 0, "checkpoint");
    return out;
}

// Tries each fault in each operation of a run, which begins in a copy of `begin` if that is given.
void check_faults(const std::string& command, const std::string& begin = "") {
    const std::string out = dir() + "/faulty", wanted = content(undisturbed());
    const auto again = [&](int at, Fault kind) {
        std::filesystem::remove_all(out);
        if (!begin.empty()) std::filesystem::copy(begin, out);
        return train(options(out) + command, out, at, kind);
    };
    CHECK_RUN(again(-1, kNone), 0, "checkpoint");
    CHECK(content(out) == wanted);
    const int operations = counted->operations;
    const std::vector<char> names(counted->names[0], counted->names[operations]);
    int tried = 0, survived = 0, refused = 0;
    for (int at = 0; at < operations; at++)
        for (int kind = kDieBefore; kind < kFaults; kind++) {
            const std::string name = &names[at * sizeof counted->names[0]];
            if ((kind == kDieInside || kind == kShort) && !contains(name, "write")) continue;
            tried++;
            const Result first = again(at, Fault(kind));
            const bool died = first.code == 128 + SIGKILL,
                       said = first.code == 1 && contains(first.out, "train_gpt2cu: ");
            Result second = first;
            if (first.code) second = train(options(out) + " -y 1");
            // A checkpoint that was announced is never lost.
            const double announced = number_after(first.out, "checkpoint " + out + "/state_"),
                         resumed = number_after(second.out, "resumed at step ");
            const bool same = content(out) == wanted && (!first.code || std::isnan(announced) || resumed >= announced);
            if (second.code == 0 && same && (first.code == 0 || died || said)) {
                said ? refused++ : survived++;
                continue;
            }
            test::report(
                __FILE__, __LINE__,
                format("%s in operation %d (%s): exit %d, then %d, %s: %s%s", kFaultNames[kind], at, name.c_str(),
                       first.code, second.code, same ? "the same" : "lost", first.out.c_str(), second.out.c_str()));
        }
    std::printf("  %d operations, %d faults tried: %d survived, %d said and resumed, %d lost\n", operations, tried,
                survived, refused, tried - survived - refused);
    CHECK(tried > 100);
}

}  // namespace

TEST(faults_in_a_new_run) {
    check_faults("");
}

// It begins after a run that died while it wrote a checkpoint and a row of its log.
TEST(faults_in_a_resumed_run) {
    const std::string left = dir() + "/left";
    CHECK_RUN(train(options(left) + " -nk 0"), 0, "checkpoint");
    std::filesystem::remove(state_path(left, 5));
    write_file(model_path(left, 5), "cut off");
    write_file(state_path(left, 5) + ".tmp.7", "cut off");
    write_file(left + "/log.jsonl", read_file(undisturbed() + "/log.jsonl") + "{\"kind\": \"tr");
    check_faults(" -y 1", left);
}

// ---------------------------------------------------------------------------------------------------------------------
// The gates of deterministic training

TEST(gate_repeat) {
    const std::string out = dir() + "/again";
    CHECK_RUN(train(options(out)), 0, "checkpoint");
    CHECK(content(out) == content(undisturbed()));
    for (const char* key : {"loss_nats", "grad_norm", "lr"})
        CHECK(values(out, "train", key) == values(undisturbed(), "train", key));
}

// The same training in fp64. dev/test_recipe has every option against it, and dev/test_gpt2 the GPU's kernels.
template <class X>
static std::vector<double> losses() {
    Options o;
    o.train_data = text_file(), o.B = 2, o.T = T, o.tokens_per_step = 2 * T, o.max_steps = 50, o.lr = 1e-2f,
    o.warmup = 5;
    const Cpu cpu(1);
    GPT2<Cpu, X> model(cpu, {kPositions, V, Vp, L, NH, C}, Attention::flash, o.B, o.T, 1, true);
    model.allocate();
    init_random(model, 3);
    Job alone;
    Run<GPT2<Cpu, X>> run(o, model, {o.train_data, ""}, alone);
    std::vector<double> losses;
    CHECK(quiet_error_of([&] {
              for (; run.step < o.max_steps; losses.push_back(model.stats()[0])) run.train_step();
          }) == "");
    return losses;
}
TEST(gate_baseline) {
    const std::vector<double> got = losses<float>(), wanted = losses<double>();
    for (size_t i = 0; i < wanted.size(); i++) CHECK_NEAR(got[i], wanted[i], 1e-4);
    CHECK(wanted.back() < wanted.front() - 1);
}

TEST(gate_restart_and_replay) {
    const std::string out = dir() + "/replayed", command = options(out) + " -nk 0 --verify-every 3";
    CHECK_RUN(train(command, out, 35, kDieBefore), 128 + SIGKILL, "steps 1 to 2 were computed again and have the same");
    CHECK_RUN(train(command + " -y 1"), 0, "resumed at step ", "to 5 were computed again and have the same bits");
    CHECK(content(out) == content(undisturbed()));
    CHECK_RUN(train(options(out) + " --verify 2"), 0, "steps 3 to 4 were computed again and have the same bits");
    CHECK_RUN(train(options(out) + " --verify 5"), 1, "--verify 5: no checkpoint follows that step in " + out);
    CHECK_RUN(train(options(out) + " --verify 3"), 1, "state_00000003.bin: cannot open");
    CHECK_RUN(train(options(out) + " --verify 2 -l 1e-3"), 1, "the run had other options: -l from 0.003 to 0.001;");
    CHECK(content(out) == content(undisturbed()));
    // Two ranks round other sums than one. The log of the first run says where that began.
    const std::string two = dir() + "/two", differ = "steps 3 to 4 computed twice differ, first in ";
    CHECK_RUN(run(options(two) + " -nk 0 --verify-every 4 --gpus 2"), 0, "steps 1 to 2 were computed again");
    CHECK_RUN(run(options(two) + " --verify 2 --gpus 2"), 0, "steps 3 to 4 were computed again");
    CHECK_RUN(run(options(two) + " --verify 2"), 3,
              differ + "step 3 (gradients: ", "on GPU: unknown; after them in wte (");
    CHECK_RUN(run(options(out) + " --verify 2 --gpus 2"), 3, "rank ", differ + "step 3 (gradients: ");
}

int main(int argc, char** argv) {
    setenv("OMP_THREAD_LIMIT", "1", 1);
    wait_passively(argv);  // starts this program once more, because OpenMP has read its variables by now
    return test::main(argc, argv);
}
