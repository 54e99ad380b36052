// --gpus: one parent process starts the ranks of a job on this machine, passes signals on to them
// and waits for them. It gives the job a random name, from which the ranks derive the port of their
// rendezvous. Each rank is in a process group of its own, so that Ctrl-C reaches only the parent,
// which passes it on once. If the parent is killed, the ranks die with it.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "parallel/rendezvous.h"

namespace {

// -------------------------------------------------------------------------------------------------
// The environment

// The value of an environment variable, or "" if it is not set.
std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value ? value : "";
}

bool is_set(const char* name) {
    return variable(name) != "";
}

// The number in an environment variable. Slurm's "4(x2),3" counts as 4.
int number(const char* name, int low, int high) {
    const std::string text = variable(name);
    int value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool ends_here = *end == '\0' || *end == '(' || *end == ',';
    if (error == std::errc() && ends_here && value >= low && value <= high)
        return value;
    throw UsageError(
        format("the environment variable %s is \"%s\", but it must be a number from %d to %d", name,
               text.c_str(), low, high));
}

// The environment variables by which a launcher tells a process which rank it is.
struct Launcher {
    const char* rank;
    const char* size;
    const char* local_rank;
    const char* local_size;
    // Together these name the job: a name that all of its ranks share and, if several jobs can have
    // the same name, a number that tells those apart (otherwise "").
    const char* job;
    const char* job_number;
    // Whether the launcher also sets `rank`, but not `size`, for a process that is the only one.
    bool rank_without_size = false;
};

constexpr Launcher kTorchrun = {.rank = "RANK",
                                .size = "WORLD_SIZE",
                                .local_rank = "LOCAL_RANK",
                                .local_size = "LOCAL_WORLD_SIZE",
                                .job = "TORCHELASTIC_RUN_ID",
                                .job_number = "TORCHELASTIC_RESTART_COUNT"};
constexpr Launcher kOpenMpi = {.rank = "OMPI_COMM_WORLD_RANK",
                               .size = "OMPI_COMM_WORLD_SIZE",
                               .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK",
                               .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE",
                               .job = "PMIX_NAMESPACE",
                               .job_number = "OMPI_MCA_ess_base_jobid"};
// MPICH, Intel's MPI, and Slurm with --mpi=pmi2.
constexpr Launcher kPmi = {.rank = "PMI_RANK",
                           .size = "PMI_SIZE",
                           .local_rank = "MPI_LOCALRANKID",
                           .local_size = "MPI_LOCALNRANKS",
                           .job = "PMI_JOBID",
                           .job_number = ""};
constexpr Launcher kSlurm = {.rank = "SLURM_PROCID",
                             .size = "SLURM_STEP_NUM_TASKS",
                             .local_rank = "SLURM_LOCALID",
                             .local_size = "SLURM_STEP_TASKS_PER_NODE",
                             .job = "SLURM_JOB_ID",
                             .job_number = "SLURM_STEP_ID",
                             .rank_without_size = true};  // in a batch script

// The launcher that started this process, or null.
const Launcher* find_launcher() {
    for (const Launcher* launcher : {&kTorchrun, &kOpenMpi, &kPmi, &kSlurm}) {
        const bool has_rank = is_set(launcher->rank) && !launcher->rank_without_size;
        if (has_rank || is_set(launcher->size))
            return launcher;
    }
    return nullptr;
}

std::string job_name(const Launcher& launcher) {
    std::string job;
    for (const char* name : {"GPT2_JOB", launcher.job, launcher.job_number}) {
        if (!is_set(name))
            continue;
        if (!job.empty())
            job += '.';
        job += variable(name);
    }
    return job;
}

// The port of a job whose ranks are all on this machine. It depends on the job's name alone, and is
// below 32768, where Linux starts to use ports for outgoing connections.
int local_port(const std::string& job) {
    constexpr int kFirst = 20000;
    constexpr int kCount = 9000;
    return kFirst + static_cast<int>(std::hash<std::string>()(job) % kCount);
}

}  // namespace

RankInfo rank_from_environment() {
    const Launcher* const launcher = find_launcher();
    if (!launcher)
        return {};

    RankInfo self;
    self.size = number(launcher->size, 1, 65536);
    self.rank = number(launcher->rank, 0, self.size - 1);
    if (self.size == 1)
        return {};

    // Slurm's variable serves a launcher that sets none, such as PMI under srun. The launcher's own
    // comes last, so it takes precedence.
    for (const char* name : {kSlurm.local_rank, launcher->local_rank}) {
        if (is_set(name))
            self.local_rank = number(name, 0, self.size - 1);
    }
    if (is_set(launcher->local_size))
        self.local_size = number(launcher->local_size, 1, self.size);
    self.job = job_name(*launcher);

    if (is_set("MASTER_ADDR")) {
        // torchrun itself listens on MASTER_PORT, so its ranks use the next port.
        const int offset = is_set("TORCHELASTIC_RUN_ID") ? 1 : 0;
        self.address = variable("MASTER_ADDR");
        self.port = number("MASTER_PORT", 1, 65535 - offset) + offset;
        return self;
    }

    // With MASTER_PORT alone, MASTER_ADDR has been forgotten: a job on one machine needs neither.
    const bool on_one_machine = self.local_size == self.size;
    if (!on_one_machine || is_set("MASTER_PORT"))
        throw UsageError(
            "the ranks cannot find each other; set MASTER_ADDR to rank 0's host and MASTER_PORT to "
            "a free port there, or use --gpus N on a single machine");
    if (self.job.empty())
        self.job = std::to_string(getppid());  // MPICH sets none
    self.address = "127.0.0.1";
    self.port = local_port(self.job);
    return self;
}

// -------------------------------------------------------------------------------------------------
// --gpus

namespace {

constexpr double kSecondsToExit = 5;  // for the other ranks, once one has failed

using Processes = std::map<pid_t, int>;  // running ranks, by process

// Waits for one of these signals. Returns 0 if none has arrived by the deadline, which can be
// infinite.
int next_signal(const sigset_t& signals, double deadline) {
    for (;;) {
        const double left = std::max(deadline - now(), 0.0);
        timespec timeout = {};
        if (std::isfinite(left)) {
            timeout.tv_sec = static_cast<time_t>(left);
            timeout.tv_nsec = static_cast<long>(1e9 * std::fmod(left, 1));
        }

        const int signal =
            sigtimedwait(&signals, nullptr, std::isfinite(left) ? &timeout : nullptr);
        if (signal > 0)
            return signal;
        if (errno == EAGAIN)
            return 0;
    }
}

void set_environment(const char* name, const std::string& value) {
    setenv(name, value.c_str(), 1);
}

// What all ranks inherit.
void set_job_environment(int count) {
    std::random_device random;
    set_environment("GPT2_JOB", format("%08x%08x", random(), random()));
    set_environment("WORLD_SIZE", std::to_string(count));
    set_environment("LOCAL_WORLD_SIZE", std::to_string(count));
    unsetenv("MASTER_ADDR");
    unsetenv("MASTER_PORT");
}

// The rest of a child process: it becomes this rank.
[[noreturn]] void become_rank(int rank, pid_t parent, const sigset_t& signal_mask, char** argv) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);  // the parent died before the call of prctl

    setpgid(0, 0);
    // A background process group may write to a terminal even with "stty tostop".
    std::signal(SIGTTOU, SIG_IGN);
    set_environment("RANK", std::to_string(rank));
    set_environment("LOCAL_RANK", std::to_string(rank));
    sigprocmask(SIG_SETMASK, &signal_mask, nullptr);
    execv("/proc/self/exe", argv);
    _exit(127);  // as a shell does
}

Processes start_ranks(int count, const sigset_t& signal_mask, char** argv) {
    Processes running;
    const pid_t parent = getpid();
    for (int rank = 0; rank < count; rank++) {
        const pid_t pid = fork();
        if (pid < 0)
            throw Error(
                format("--gpus: cannot start rank %d: %s; check the limit on processes (ulimit -u)",
                       rank, std::strerror(errno)));
        if (pid == 0)
            become_rank(rank, parent, signal_mask, argv);
        running[pid] = rank;
    }
    return running;
}

// A process that has ended.
struct Ended {
    pid_t pid;
    int signal;  // that killed it, or 0
    int code;    // its exit code or, as in a shell, 128 + signal
};

// The processes that have ended since the last call.
std::vector<Ended> reap() {
    std::vector<Ended> all;
    for (;;) {
        int status = 0;
        const pid_t pid = waitpid(-1, &status, WNOHANG);
        if (pid <= 0)
            return all;
        const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
        const int code = signal ? 128 + signal : WEXITSTATUS(status);
        all.push_back({.pid = pid, .signal = signal, .code = code});
    }
}

// Whether this rank's end replaces the job's exit code so far, which is 0 if no rank has failed.
// The first failure counts, except that a kill outranks an exit code: the connections of a killed
// process are closed before the process is gone, so other ranks may notice and exit first.
bool decides_exit_code(const Ended& process, int code_so_far) {
    if (process.code == 0)
        return false;
    return code_so_far == 0 || (process.signal && code_so_far < 128);
}

void print_failure(int rank, const Ended& process) {
    const std::string how = process.signal ? format("was killed by signal %d (%s)", process.signal,
                                                    strsignal(process.signal))
                                           : format("exited with code %d", process.code);
    print_error(format("train_gpt2cu: rank %d (pid %d) %s", rank, process.pid, how.c_str()));
}

// Passes signals on until all ranks have ended, and returns the job's exit code.
int wait_for_ranks(Processes running, const sigset_t& signals) {
    int code = 0;
    bool time_is_up = false;  // for the ranks that are left after a failure
    double deadline = INFINITY;

    while (!running.empty()) {
        const int signal = next_signal(signals, deadline);
        if (signal == 0) {  // the deadline has passed
            time_is_up = true;
            deadline = INFINITY;
        }
        // The ranks get every signal but SIGCHLD, which is for us. When their time is up, and at
        // any signal after that, they are killed.
        if (signal != SIGCHLD) {
            const int sent = time_is_up ? SIGKILL : signal;
            for (const auto& [pid, rank] : running)
                kill(pid, sent);
        }

        for (const Ended& process : reap()) {
            const auto entry = running.extract(process.pid);
            // Once time is up, ranks die of our SIGKILL, which decides nothing.
            if (entry.empty() || time_is_up || !decides_exit_code(process, code))
                continue;
            print_failure(entry.mapped(), process);
            if (code == 0)
                deadline = now() + kSecondsToExit;
            code = process.code;
        }
    }
    return code;
}

}  // namespace

int launch_ranks(int count, char** argv) {
    set_job_environment(count);

    // These signals stay pending until next_signal() takes them, so there are no handlers and no
    // races.
    sigset_t signals;
    sigset_t previous_mask;
    sigemptyset(&signals);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD})
        sigaddset(&signals, signal);
    sigprocmask(SIG_BLOCK, &signals, &previous_mask);
    // If we had inherited SIG_IGN, children would vanish without a status.
    std::signal(SIGCHLD, SIG_DFL);

    const Processes running = start_ranks(count, previous_mask, argv);
    return wait_for_ranks(running, signals);
}
