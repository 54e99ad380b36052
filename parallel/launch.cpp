// With --gpus one parent starts, signals and awaits the ranks of a job on this machine. It gives
// the job a random name, and from that the ranks derive the port where they meet. Each rank has its
// own process group, so Ctrl-C reaches only the parent, which passes it on once. If the parent is
// killed the ranks die with it.
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

#include "parallel/rendezvous.h"

// A variable of the environment, or "".
static std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value ? value : "";
}
// Slurm's "4(x2),3" counts as 4.
static int number_of(const char* name, int low, int high) {
    const std::string text = variable(name);
    int value = low - 1;
    const char* end = std::from_chars(text.data(), text.data() + text.size(), value).ptr;
    if (std::strchr("(,", *end) && value >= low && value <= high)
        return value;
    throw UsageError(format("environment: %s is \"%s\", not a number from %d to %d", name,
                            text.c_str(), low, high));
}

namespace {

// The variables of the environment with which a launcher says what a rank is.
struct Launcher {
    const char* rank;
    const char* size;
    const char* local_rank;
    const char* local_size;
    // What all ranks of a job have in common and no other job has: a name, and what tells apart the
    // jobs of that name, or "".
    const char* job;
    const char* part_of_job;
    // The rank's variable is also set where a single process runs, without the size's.
    bool rank_without_size = false;
};

constexpr Launcher kTorchrun = {.rank = "RANK",
                                .size = "WORLD_SIZE",
                                .local_rank = "LOCAL_RANK",
                                .local_size = "LOCAL_WORLD_SIZE",
                                .job = "TORCHELASTIC_RUN_ID",
                                .part_of_job = "TORCHELASTIC_RESTART_COUNT"};
constexpr Launcher kOpenMpi = {.rank = "OMPI_COMM_WORLD_RANK",
                               .size = "OMPI_COMM_WORLD_SIZE",
                               .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK",
                               .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE",
                               .job = "PMIX_NAMESPACE",
                               .part_of_job = "OMPI_MCA_ess_base_jobid"};
// MPICH, Intel's MPI, and Slurm with --mpi=pmi2.
constexpr Launcher kPmi = {.rank = "PMI_RANK",
                           .size = "PMI_SIZE",
                           .local_rank = "MPI_LOCALRANKID",
                           .local_size = "MPI_LOCALNRANKS",
                           .job = "PMI_JOBID",
                           .part_of_job = ""};
constexpr Launcher kSlurm = {.rank = "SLURM_PROCID",
                             .size = "SLURM_STEP_NUM_TASKS",
                             .local_rank = "SLURM_LOCALID",
                             .local_size = "SLURM_STEP_TASKS_PER_NODE",
                             .job = "SLURM_JOB_ID",
                             .part_of_job = "SLURM_STEP_ID",
                             .rank_without_size = true};  // in a batch script

// The launcher that started this process, or null.
const Launcher* find_launcher() {
    for (const Launcher* launcher : {&kTorchrun, &kOpenMpi, &kPmi, &kSlurm}) {
        const bool has_rank = variable(launcher->rank) != "" && !launcher->rank_without_size;
        if (has_rank || variable(launcher->size) != "")
            return launcher;
    }
    return nullptr;
}

}  // namespace

Place place_from_environment() {
    const Launcher* const launcher = find_launcher();
    if (!launcher)
        return {};
    Place place;
    place.size = number_of(launcher->size, 1, 65536);
    place.rank = number_of(launcher->rank, 0, place.size - 1);
    if (place.size == 1)
        return {};

    // Slurm's srun may have started the ranks of another launcher.
    for (const char* name : {kSlurm.local_rank, launcher->local_rank})
        if (variable(name) != "")
            place.local_rank = number_of(name, 0, place.size - 1);
    if (variable(launcher->local_size) != "")
        place.local_size = number_of(launcher->local_size, 1, place.size);
    for (const char* name : {"GPT2_JOB", launcher->job, launcher->part_of_job})
        if (variable(name) != "")
            place.job += (place.job.empty() ? "" : ".") + variable(name);

    place.address = variable("MASTER_ADDR");
    if (place.address != "") {
        const int taken = variable("TORCHELASTIC_RUN_ID") != "";  // torchrun itself has this port
        place.port = number_of("MASTER_PORT", 1, 65535 - taken) + taken;
    } else if (place.local_size < place.size || variable("MASTER_PORT") != "") {
        throw UsageError(
            "set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, "
            "or use --gpus N");
    } else {
        if (place.job.empty())
            place.job = std::to_string(getppid());  // MPICH gives none
        place.address = "127.0.0.1";
        place.port = 20000 + static_cast<int>(std::hash<std::string>()(place.job) % 9000);
    }
    return place;
}

// Waits for one of these signals. Returns 0 if none has come by the deadline, which can be
// infinite.
static int next_signal(const sigset_t& taken, double deadline) {
    for (;;) {
        const double left = std::max(deadline - now(), 0.0);
        timespec wait = {};
        if (std::isfinite(left)) {
            wait.tv_sec = static_cast<time_t>(left);
            wait.tv_nsec = static_cast<long>(1e9 * std::fmod(left, 1));
        }

        const int signal = sigtimedwait(&taken, nullptr, std::isfinite(left) ? &wait : nullptr);
        if (signal > 0)
            return signal;
        if (errno == EAGAIN)
            return 0;
    }
}

int launch_ranks(int count, char** argv) {
    std::random_device random;
    setenv("GPT2_JOB", format("%08x%08x", random(), random()).c_str(), 1);
    for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"})
        setenv(name, std::to_string(count).c_str(), 1);
    for (const char* name : {"MASTER_ADDR", "MASTER_PORT"})
        unsetenv(name);
    // Signals wait until next_signal takes them, so there are no handlers and no races.
    sigset_t taken;
    sigset_t before;
    sigemptyset(&taken);
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD})
        sigaddset(&taken, signal);
    sigprocmask(SIG_BLOCK, &taken, &before);
    std::signal(SIGCHLD,
                SIG_DFL);  // if we inherited SIG_IGN, children would vanish without a status

    std::map<pid_t, int> running;  // ranks
    for (int rank = 0; rank < count; rank++) {
        const pid_t parent = getpid();
        const pid_t pid = fork();
        if (pid < 0)
            throw Error(format("--gpus: cannot start rank %d: %s", rank, std::strerror(errno)));
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent)
                _exit(1);  // it died before
            setpgid(0, 0);
            std::signal(SIGTTOU, SIG_IGN);  // may write to a terminal with stty tostop all the same
            for (const char* name : {"RANK", "LOCAL_RANK"})
                setenv(name, std::to_string(rank).c_str(), 1);
            sigprocmask(SIG_SETMASK, &before, nullptr);
            execv("/proc/self/exe", argv);
            _exit(127);  // as a shell does
        }
        running[pid] = rank;
    }

    int code = 0;
    int status = 0;
    bool time_is_up = false;
    double deadline = INFINITY;  // until then the others may end by themselves, once one has failed
    while (!running.empty()) {
        const int signal = next_signal(taken, deadline);
        if (signal == 0) {
            time_is_up = true;
            deadline = INFINITY;
        }
        for (const auto& [pid, rank] : running)
            if (signal != SIGCHLD)
                kill(pid, time_is_up ? SIGKILL : signal);
        for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
            const auto ended = running.extract(pid);
            const int killer = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
            const int result = killer ? 128 + killer : WEXITSTATUS(status);
            // The connections of a killed process close before it is dead, so others may notice and
            // exit first.
            if (ended.empty() || result == 0 || time_is_up || (code && (!killer || code >= 128)))
                continue;
            const std::string how =
                killer ? format("was killed by signal %d (%s)", killer, strsignal(killer))
                       : format("ended with exit code %d", result);
            print_error(
                format("train_gpt2cu: rank %d (pid %d) %s", ended.mapped(), pid, how.c_str()));
            if (code == 0)
                deadline = now() + 5;
            code = result;
        }
    }
    return code;
}
