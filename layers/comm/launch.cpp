// --gpus N: one parent starts, signals and awaits the ranks of a job on this machine.
//
// The parent gives the job a random name. It opens the port where the ranks meet and hands the listening socket to rank
// 0, so that no other program can take the port in between. The ranks have their own process group, so Ctrl-C reaches
// only the parent, which passes it on once. If the parent is killed the ranks die with it.
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "layers/comm/job.h"

constexpr int kGraceSeconds = 5;  // for the others, once a rank has failed

namespace {

struct Child {
    pid_t pid;
    bool running = true;
};

// A socket that listens on a free port of the loopback interface and outlives exec.
int open_port(int* port) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    sockaddr_in a = {};
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof a;
    if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&a), sizeof a) || listen(fd, 1024) ||
        getsockname(fd, reinterpret_cast<sockaddr*>(&a), &length))
        throw Error("--gpus: cannot open a port on 127.0.0.1: " + std::string(std::strerror(errno)));
    *port = ntohs(a.sin_port);
    return fd;
}

[[noreturn]] void become_rank(int rank, int count, int port, int fd, uint64_t job, pid_t parent, pid_t group,
                              const sigset_t& signals, char** argv) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    setpgid(0, group);
    const std::string text = format("%016llx", static_cast<unsigned long long>(job));
    setenv("RANK", std::to_string(rank).c_str(), 1);
    setenv("WORLD_SIZE", std::to_string(count).c_str(), 1);
    setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
    setenv("GPT2_JOB", text.c_str(), 1);
    if (rank == 0)
        setenv("GPT2_LISTEN_FD", std::to_string(fd).c_str(), 1);
    else
        close(fd);
    sigprocmask(SIG_SETMASK, &signals, nullptr);
    execv("/proc/self/exe", argv);
    std::fprintf(stderr, "train_gpt2cu: rank %d: cannot start: %s\n", rank, std::strerror(errno));
    _exit(1);
}

}  // namespace

int launch_ranks(int count, char** argv) {
    int port = 0;
    const int fd = open_port(&port);
    uint64_t job = 0;
    while (getrandom(&job, sizeof job, 0) != sizeof job) {}

    // Signals wait until sigtimedwait takes them, so there are no handlers and no races.
    sigset_t taken, before;
    sigemptyset(&taken);
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&taken, signal);
    sigprocmask(SIG_BLOCK, &taken, &before);
    std::signal(SIGCHLD, SIG_DFL);  // if we inherited SIG_IGN, children would vanish without a status

    const pid_t parent = getpid();
    std::vector<Child> children;
    const auto signal_all = [&](int signal) {
        for (const Child& c : children)
            if (c.running) kill(c.pid, signal);
    };
    for (int rank = 0; rank < count; rank++) {
        const pid_t group = children.empty() ? 0 : children[0].pid;
        const pid_t pid = fork();
        if (pid == 0) become_rank(rank, count, port, fd, job, parent, group, before, argv);
        if (pid < 0) {
            signal_all(SIGKILL);
            throw Error(format("--gpus: cannot start rank %d: %s", rank, std::strerror(errno)));
        }
        setpgid(pid, group ? group : pid);  // parent and child both do this, because either may come first
        children.push_back({pid});
    }
    close(fd);

    using Clock = std::chrono::steady_clock;
    int code = 0, left = count;
    bool ended = false;  // by us
    auto deadline = Clock::time_point::max();
    while (left > 0) {
        const timespec second = {1, 0};
        const int signal = sigtimedwait(&taken, nullptr, &second);
        if (signal > 0 && signal != SIGCHLD) signal_all(signal);
        for (int rank = 0; rank < count; rank++) {
            Child& c = children[rank];
            int status = 0;
            if (!c.running || waitpid(c.pid, &status, WNOHANG) != c.pid) continue;
            c.running = false, left--;
            const bool killed = WIFSIGNALED(status);
            const int result = killed ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
            if (result == 0 || ended) continue;
            // The connections of a killed process close before it is dead, so others may notice and exit first.
            if (code == 0 || (killed && code < 128)) code = result;
            if (killed)
                std::fprintf(stderr, "train_gpt2cu: rank %d (pid %d) was killed by signal %d (%s)\n", rank,
                             static_cast<int>(c.pid), WTERMSIG(status), strsignal(WTERMSIG(status)));
            deadline = std::min(deadline, Clock::now() + std::chrono::seconds(kGraceSeconds));
        }
        if (Clock::now() > deadline) signal_all(SIGKILL), ended = true;
    }
    return code;
}
