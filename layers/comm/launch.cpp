// With --gpus one parent starts, signals and awaits the ranks of a job on this machine. It gives the job a random name.
// It opens the port where the ranks meet and hands the listening socket to rank 0, so that no other program can take
// the port in between. Each rank has its own process group, so Ctrl-C reaches only the parent, which passes it on
// once. If the parent is killed the ranks die with it.
#include "layers/comm/launch.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "layers/comm/meet.h"

// A variable of the environment. One that is empty counts as not set.
static std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value ? value : "";
}
static bool is_set(const char* name) {
    return !variable(name).empty();
}
static int number_of(const char* name, int low, int high) {
    const std::string text = variable(name);
    int value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error == std::errc() && *end == '\0' && value >= low && value <= high) return value;
    throw UsageError(
        format("environment variable %s: \"%s\" is not a number from %d to %d", name, text.c_str(), low, high));
}

// Rank and size, and where the launcher says so, those among the ranks of this machine.
static Place rank_from_environment() {
    constexpr const char* slurm = "SLURM_PROCID";
    constexpr const char* launchers[][4] = {
        {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},  // torchrun, and --gpus
        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
        {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},  // MPICH's and Intel's
        {slurm, "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""}};
    Place place;
    for (const auto& [rank, size, local_rank, local_size] : launchers) {
        if (!is_set(size) && (!is_set(rank) || rank == slurm)) continue;  // a batch script has a SLURM_PROCID too
        if (!is_set(rank) || !is_set(size))
            throw UsageError(format("environment variable %s is set, but not %s: set both, or none for a single rank",
                                    is_set(rank) ? rank : size, is_set(rank) ? size : rank));
        place.size = number_of(size, 1, 65536);
        place.rank = number_of(rank, 0, place.size - 1);
        if (is_set(local_size)) place.local_size = number_of(local_size, 1, place.size);
        if (is_set(local_rank))
            place.local_rank = number_of(local_rank, 0, (is_set(local_size) ? place.local_size : place.size) - 1);
        break;
    }
    return place;
}

Place place_from_environment() {
    Place place = rank_from_environment();
    if (place.size == 1) return {};
    for (const char* name : {"GPT2_JOB", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "PMIX_NAMESPACE",
                             "SLURM_JOB_ID", "SLURM_STEP_ID"})
        if (is_set(name)) place.job += (place.job.empty() ? "" : ".") + variable(name);
    const bool from_gpus = is_set("GPT2_LISTEN_FD");
    if (from_gpus && place.rank == 0) place.listen_fd = number_of("GPT2_LISTEN_FD", 0, INT_MAX);
    if (is_set("MASTER_ADDR") && is_set("MASTER_PORT")) {
        const int taken = !from_gpus && is_set("TORCHELASTIC_RUN_ID");  // torchrun itself has this port
        place.address = variable("MASTER_ADDR");
        place.port = number_of("MASTER_PORT", 1, 65535 - taken) + taken;
    } else if (!is_set("MASTER_ADDR") && !is_set("MASTER_PORT") && place.local_size == place.size) {
        // mpirun on one machine. All ranks derive the same port from what they have in common and other jobs do not.
        std::string common = std::to_string(getppid());
        for (const char* name : {"PMI_JOBID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"})
            if (is_set(name)) common = variable(name);
        place.address = "127.0.0.1";
        place.port = 20000 + static_cast<int>(std::hash<std::string>()(common) % 9000);
        if (place.job.empty()) place.job = common;
    } else {
        throw UsageError(
            format("rank %d of %d does not know where rank 0 is: set MASTER_ADDR to rank 0's host and "
                   "MASTER_PORT to a free port there; on one machine use --gpus N without a launcher",
                   place.rank, place.size));
    }
    return place;
}

int launch_ranks(int count, char** argv) {
    const int fd = listen_at("127.0.0.1", 0);
    std::random_device random;
    const auto set = [](const char* name, const std::string& value) { setenv(name, value.c_str(), 1); };
    set("WORLD_SIZE", std::to_string(count));
    set("LOCAL_WORLD_SIZE", std::to_string(count));
    set("MASTER_ADDR", "127.0.0.1");
    set("MASTER_PORT", std::to_string(port_of(fd)));
    set("GPT2_JOB", format("%08x%08x", random(), random()));
    set("GPT2_LISTEN_FD", std::to_string(fd));

    // Signals wait until sigwait takes them, so there are no handlers and no races.
    sigset_t taken, before;
    sigemptyset(&taken);
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGALRM}) sigaddset(&taken, signal);
    sigprocmask(SIG_BLOCK, &taken, &before);
    std::signal(SIGCHLD, SIG_DFL);  // if we inherited SIG_IGN, children would vanish without a status

    const pid_t parent = getpid();
    std::vector<pid_t> running;  // by rank, or 0
    const auto signal_all = [&](int signal) {
        for (pid_t pid : running)
            if (pid) kill(pid, signal);
    };
    for (int rank = 0; rank < count; rank++) {
        const pid_t pid = fork();
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent) _exit(1);
            setpgid(0, 0);
            set("RANK", std::to_string(rank));
            set("LOCAL_RANK", std::to_string(rank));
            if (rank == 0) fcntl(fd, F_SETFD, 0);  // outlives exec
            sigprocmask(SIG_SETMASK, &before, nullptr);
            execv("/proc/self/exe", argv);
            std::fprintf(stderr, "train_gpt2cu: rank %d: cannot start: %s\n", rank, std::strerror(errno));
            _exit(1);
        }
        if (pid < 0) {
            signal_all(SIGKILL);
            throw Error(format("--gpus: cannot start rank %d: %s", rank, std::strerror(errno)));
        }
        running.push_back(pid);
    }
    close(fd);

    int code = 0, left = count, passed_on = 0;
    bool ended = false;  // by us
    while (left > 0) {
        int signal = 0;
        sigwait(&taken, &signal);
        if (signal == SIGALRM) ended = true;
        if (signal != SIGCHLD) signal_all(ended ? SIGKILL : signal);
        if (signal != SIGCHLD) passed_on = signal;
        for (int rank = 0; rank < count; rank++) {
            int status = 0;
            const pid_t pid = running[rank];
            if (pid == 0 || waitpid(pid, &status, WNOHANG) != pid) continue;
            running[rank] = 0;
            left--;
            const bool killed = WIFSIGNALED(status);
            const int result = killed ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
            if (result == 0 || ended) continue;
            const std::string how =
                killed ? format("was killed by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)))
                       : format("ended with exit code %d", result);
            if ((code == 0 || killed) && result != 128 + passed_on)
                std::fprintf(stderr, "train_gpt2cu: rank %d (pid %d) %s\n", rank, static_cast<int>(pid), how.c_str());
            if (code == 0) alarm(5);  // until then the others may end by themselves
            // The connections of a killed process close before it is dead, so others may notice and exit first.
            if (code == 0 || (killed && code < 128)) code = result;
        }
    }
    return code;
}

