// Forked processes, for tests. What they print to stdout and stderr can be read back.
#pragma once
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "dev/common/test.h"
#include "parallel/rendezvous.h"

inline void sleep_for(double seconds) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

inline int count_of(const std::string& text, const std::string& part) {
    int n = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
        n++;
    return n;
}

// A port of this machine at which nobody listens, below those that the system gives to connections.
inline int free_port() {
    static int port = 10000 + getpid() % 10000;
    const auto is_taken = [](int port) {
        return test::error_of([=] { close(listen_at("127.0.0.1", port)); }) != "";
    };
    do
        port++;
    while (is_taken(port));
    return port;
}

// Processes that are forked from this one, in the order in which they were started.
struct Processes {
    std::vector<pid_t> pids;  // of those that have not been waited for
    FILE* output = std::tmpfile();

    ~Processes() {
        for (pid_t pid : pids) {
            kill(pid, SIGKILL);
            waitpid(pid, nullptr, 0);
        }
        std::fclose(output);
    }

    // The process exits with the body's result, with 1 (after a UsageError 2) and a message if the
    // body throws, or with 99 after failed checks. After two minutes it is killed.
    void start(const std::function<int()>& body) {
        std::fflush(stdout);
        const pid_t pid = fork();
        if (pid < 0)
            throw Error(format("fork(): %s", std::strerror(errno)));
        if (pid > 0) {
            pids.push_back(pid);
            return;
        }
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        signal(SIGALRM, SIG_DFL);  // the test's own handler is for its own limit
        alarm(120);
        dup2(fileno(output), STDOUT_FILENO);
        dup2(fileno(output), STDERR_FILENO);

        test::failed_checks() = 0;
        const int code = run_program("rank", body);
        std::fflush(stdout);
        _exit(test::failed_checks() ? 99 : code);
    }

    // What they have printed so far, up to 64 KiB.
    std::string text() const {
        std::string all(1 << 16, '\0');
        const ssize_t bytes = pread(fileno(output), all.data(), all.size(), 0);
        all.resize(std::max<ssize_t>(0, bytes));
        return all;
    }

    // Waits until they have printed this so many times, for at most 20 seconds.
    void wait_for(const std::string& part, int times) const {
        for (int i = 0; i < 2000 && count_of(text(), part) < times; i++)
            sleep_for(0.01);
    }

    // Waits for all to end. Returns their exit codes, where signal n counts as 128 + n.
    std::vector<int> wait() {
        std::vector<int> codes;
        for (pid_t pid : pids) {
            int status = 0;
            waitpid(pid, &status, 0);
            codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
        }
        pids.clear();
        return codes;
    }

    // Checks how they end, and that what they print has these parts.
    void check(const std::vector<int>& codes, const std::vector<std::string>& parts = {},
               int line = __builtin_LINE()) {
        std::string wrong;
        const std::vector<int> ended = wait();
        if (ended != codes)
            for (int code : ended)
                wrong += format(" ended with %d", code);
        for (const std::string& part : parts)
            if (!contains(text(), part))
                wrong += " without \"" + part + "\"";
        if (!wrong.empty())
            test::report("processes", line, wrong + ": " + text());
    }
};
