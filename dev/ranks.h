// Forked processes as the ranks of a job, for tests. Tests can read back what they print on stdout and stderr.
#pragma once
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "dev/program.h"
#include "layers/comm/job.h"

using Clock = std::chrono::steady_clock;
inline double seconds_since(Clock::time_point t) {
    return std::chrono::duration<double>(Clock::now() - t).count();
}
inline void sleep_for(double s) {
    usleep(static_cast<useconds_t>(s * 1e6));
}

// A port that is free now. With `keep` the socket that listens there stays open and is returned in it.
inline int free_port(int* keep = nullptr) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    sockaddr_in a = {};
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof a;
    if (bind(fd, reinterpret_cast<sockaddr*>(&a), sizeof a) || listen(fd, 64) ||
        getsockname(fd, reinterpret_cast<sockaddr*>(&a), &length))
        throw Error("no free port");
    if (keep)
        *keep = fd;
    else
        close(fd);
    return ntohs(a.sin_port);
}

// Processes that run `body` and exit with its result. If it throws, the message goes to stderr and the exit code is 1.
// Failed checks make it 99.
struct Processes {
    std::vector<pid_t> pids;
    FILE* output = std::tmpfile();

    ~Processes() {
        for (pid_t pid : pids) kill(pid, SIGKILL), waitpid(pid, nullptr, 0);
        std::fclose(output);
    }
    void start(const std::function<int()>& body) {
        std::fflush(stdout);
        const pid_t pid = fork();
        if (pid == 0) {
            dup2(fileno(output), 1), dup2(fileno(output), 2);
            int code = 1;
            test::failed_checks() = 0;
            try {
                code = body();
            } catch (const std::exception& e) {
                std::fprintf(stderr, "error: %s\n", e.what());
            }
            std::fflush(stdout);
            _exit(test::failed_checks() ? 99 : code);
        }
        pids.push_back(pid);
    }
    // Exit codes in the order of starting. Signal n counts as 128 + n, and a process that runs past `limit` seconds as
    // 255.
    std::vector<int> wait(double limit = 20) {
        const auto begin = Clock::now();
        std::vector<int> codes;
        for (pid_t pid : pids) {
            int status = 0;
            while (waitpid(pid, &status, WNOHANG) == 0 && seconds_since(begin) < limit) sleep_for(0.01);
            if (seconds_since(begin) >= limit) kill(pid, SIGKILL), waitpid(pid, nullptr, 0), status = 255 << 8;
            codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
        }
        pids.clear();
        return codes;
    }
    std::string text() {
        std::string all(1 << 16, '\0');
        all.resize(static_cast<size_t>(std::max<ssize_t>(0, pread(fileno(output), all.data(), all.size(), 0))));
        return all;
    }
};

constexpr Patience kQuick = {10, 2};

// The ranks of a job, forked, each running `body`.
struct ForkedRanks : Processes {
    int port = 0, fd = -1;
    ForkedRanks(int size, const std::function<int(Job&)>& body, const Patience& patience = kQuick) {
        port = free_port(&fd);
        for (int rank = 0; rank < size; rank++)
            start([&, rank] {
                if (rank > 0) close(fd);
                Job job({rank, size, -1, "127.0.0.1", port, "a job", rank == 0 ? fd : -1}, patience);
                return job.guard([&] { return body(job); });
            });
        close(fd);
    }
};
#define CHECK_ENDED_WELL(ranks)                                                                              \
    do {                                                                                                     \
        for (int code : (ranks).wait())                                                                      \
            if (code != 0) test::report(__FILE__, __LINE__, format("%d: %s", code, (ranks).text().c_str())); \
    } while (0)
