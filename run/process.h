// The process around a run: its descriptors, the signals that end it, and its exit code.
#pragma once
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <initializer_list>

#include "common/error.h"

// Another program may have made a pipe or terminal non-blocking that is also our stdout or stderr.
// While it is full it refuses what we write, and stdio would drop that. So wait until it takes
// more.
inline ssize_t write_all(void* fd_of_stream, const char* text, size_t bytes) {
    const int fd = *static_cast<const int*>(fd_of_stream);
    size_t done = 0;
    while (done < bytes) {
        const ssize_t n = write(fd, text + done, bytes - done);
        if (n > 0) {
            done += static_cast<size_t>(n);
        } else if (n < 0 && errno == EAGAIN) {
            pollfd writable = {fd, POLLOUT, 0};
            poll(&writable, 1, -1);
        } else if (n == 0 || errno != EINTR) {
            break;
        }
    }
    return static_cast<ssize_t>(done);  // fewer bytes are an error of the stream
}

// Calls `handler` at these signals. nohup and the & of a script have some ignored, which stay so.
inline void handle(std::initializer_list<int> signals, void (*handler)(int)) {
    for (const int signal : signals)
        if (std::signal(signal, SIG_IGN) != SIG_IGN)
            std::signal(signal, handler);
}

// Ends the program as the signal does by default. In a container we may be process 1, for which the
// kernel drops signals that have no handler.
inline void end_by(int signal) {
    if (getpid() == 1)
        _exit(128 + signal);
    std::signal(signal, SIG_DFL);
    raise(signal);
}

inline void prepare_process() {
    // A file must not get the number of a stream that is closed, because what is printed would go
    // into it.
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            open("/dev/null", O_RDWR);
    // a reader that ends, such as tee at Ctrl-C, ends no run; check_stdout() says it
    std::signal(SIGPIPE, SIG_IGN);
    // a write past the limit on file sizes fails with EFBIG, which has a message
    std::signal(SIGXFSZ, SIG_IGN);
    if (getpid() == 1)
        handle({SIGINT, SIGTERM, SIGHUP, SIGQUIT}, end_by);

    static int out = STDOUT_FILENO;
    static int err = STDERR_FILENO;
    stdout = fopencookie(&out, "w", {nullptr, write_all, nullptr, nullptr});
    stderr = fopencookie(&err, "w", {nullptr, write_all, nullptr, nullptr});
    std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a line at a time, into files and pipes too
    std::setvbuf(stderr, nullptr, _IONBF, 0);
}

// SIGINT, SIGTERM and SIGHUP finish the step, write a checkpoint and leave. A second one ends the
// program at once. Within a second it is the same one, which many programs send to a process and to
// its group.
inline volatile std::sig_atomic_t g_signal = 0;
inline double g_signal_time;
inline void on_signal(int signal) {
    if (!g_signal) {
        g_signal_time = now();
        g_signal = signal;
    } else if (now() - g_signal_time > 1) {
        end_by(signal);
    }
}
inline void catch_signals() {
    handle({SIGINT, SIGTERM, SIGHUP}, on_signal);
}

// The exit code of a program that is not heard is 1.
inline int check_stdout(int code) {
    if (std::fflush(stdout) == 0 && !std::ferror(stdout))
        return code;
    std::fputs(
        "train_gpt2cu: stdout: a line could not be written; free some space or send it elsewhere\n",
        stderr);
    return code ? code : 1;
}
