// Forked processes as the ranks of a job, for tests. Tests can read back what they print on stdout and stderr.
#pragma once
#include <signal.h>
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

inline int free_port() {
    const int fd = listen_at("127.0.0.1", 0), port = port_of(fd);
    close(fd);
    return port;
}
inline Place local_place(int rank, int size, int port, const std::string& job = "") {
    return {rank, size, -1, "127.0.0.1", port, job, -1};
}

constexpr Patience kQuick = {10, 2};

inline int leave(Job& job) {
    job.leave();
    return 0;
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
    void start_rank(const Place& place, const Patience& patience = kQuick,
                    const std::function<int(Job&)>& body = leave) {
        start([=] {
            Job job(place, patience);
            return job.guard([&] { return body(job); });
        });
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

// Checks how processes end, and that what they print has all these parts.
inline void check_ended(Processes& ranks, const std::vector<int>& codes, const std::vector<std::string>& parts = {},
                        int line = __builtin_LINE()) {
    std::string got;
    const std::vector<int> ended = ranks.wait();
    for (int code : ended) got += format(" %d", code);
    const std::string text = ranks.text();
    if (ended != codes) test::report("ranks", line, format("ended with%s: %s", got.c_str(), text.c_str()));
    for (const std::string& part : parts)
        if (!contains(text, part))
            test::report("ranks", line, format("expected \"%s\", got: %s", part.c_str(), text.c_str()));
}
inline void check_ended_well(Processes& ranks, int line = __builtin_LINE()) {
    check_ended(ranks, std::vector<int>(ranks.pids.size(), 0), {}, line);
}

// The ranks of a job, forked, each running `body`.
struct ForkedRanks : Processes {
    int port = 0;
    ForkedRanks(int size, const std::function<int(Job&)>& body, const Patience& patience = kQuick) {
        const int fd = listen_at("127.0.0.1", 0);
        port = port_of(fd);
        for (int rank = 0; rank < size; rank++)
            start([&, rank] {
                if (rank > 0) close(fd);
                Job job({rank, size, -1, "127.0.0.1", port, "a job", rank == 0 ? fd : -1}, patience);
                return job.guard([&] { return body(job); });
            });
        close(fd);
    }
};
