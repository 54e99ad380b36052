// Forked processes as the ranks of a job, for tests. Tests can read back what they print on stdout and stderr.
#pragma once
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "dev/program.h"
#include "layers/comm/job.h"

inline int free_port() {
    const int fd = listen_at("127.0.0.1", 0), port = port_of(fd);
    close(fd);
    return port;
}
inline Place local_place(int rank, int size, int port, const std::string& job = "", int listen_fd = -1) {
    return {rank, size, -1, "127.0.0.1", port, job, listen_fd};
}

struct Processes {
    std::vector<pid_t> pids;
    std::vector<int> ended;  // with these codes, once they are waited for
    FILE* output = std::tmpfile();

    ~Processes() {
        for (pid_t pid : pids) kill(pid, SIGKILL), waitpid(pid, nullptr, 0);
        std::fclose(output);
    }
    // A process that runs `body` and exits with its result. If it throws, the message goes to stderr and the exit code
    // is 1. Failed checks make it 99.
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
    void start_rank(
        const Place& place, const Patience& patience = {},
        const std::function<void(Job&)>& body = [](Job& job) { job.leave(); }) {
        start([&] {
            Job job(place, patience);
            job.guard([&] { body(job); });
            return 0;
        });
    }
    // Exit codes in the order of starting. Signal n counts as 128 + n, and a process that runs past `limit` seconds as
    // 255.
    std::vector<int> wait(double limit = 100) {
        const double begin = test::now();
        for (pid_t pid : pids) {
            int status = 0;
            while (waitpid(pid, &status, WNOHANG) == 0 && test::now() - begin < limit) sleep_for(0.001);
            if (test::now() - begin >= limit) kill(pid, SIGKILL), waitpid(pid, nullptr, 0), status = 255 << 8;
            ended.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
        }
        pids.clear();
        return ended;
    }
    std::string text() {
        std::string all(1 << 16, '\0');
        all.resize(static_cast<size_t>(std::max<ssize_t>(0, pread(fileno(output), all.data(), all.size(), 0))));
        return all;
    }
    // Checks how they end, by default all well, and that what they print has all these parts.
    void check(std::vector<int> codes = {}, const std::vector<std::string>& parts = {}, int line = __builtin_LINE()) {
        if (!pids.empty()) wait();
        codes.resize(ended.size());
        const std::string printed = text();
        std::string wrong;
        if (ended != codes)
            for (int code : ended) wrong += format(" %d", code);
        for (const std::string& part : parts)
            if (!contains(printed, part)) wrong += " without \"" + part + "\"";
        if (!wrong.empty()) test::report("ranks", line, format("ended with%s: %s", wrong.c_str(), printed.c_str()));
    }
};

// The ranks of a job, each running `body`. Only rank 0 gets the socket that listens.
struct ForkedRanks : Processes {
    int port;
    ForkedRanks(int size, const std::function<void(Job&)>& body, const Patience& patience = {}) {
        const int fd = listen_at("127.0.0.1", 0);
        port = port_of(fd);
        for (int rank = 0; rank < size; rank++) {
            start_rank(local_place(rank, size, port, "a job", rank == 0 ? fd : -1), patience, body);
            if (rank == 0) close(fd);
        }
    }
};
inline void run_ranks(int size, const std::function<void(Job&)>& body, int line = __builtin_LINE()) {
    ForkedRanks(size, body).check({}, {}, line);
}
