// The process around a run: its stdout and stderr, the signals that stop it, and its exit code.
#pragma once
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <initializer_list>

#include "common/error.h"

// Writes to a stream's descriptor. If another program has made the same pipe or terminal
// non-blocking, write() fails with EAGAIN while it is full, and stdio would drop the text. So wait
// until there is room.
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
    return static_cast<ssize_t>(done);  // if that is less than `bytes`, stdio reports an error
}

// Installs a handler, except for signals that are ignored, as by nohup or in a script's background
// jobs.
inline void handle(std::initializer_list<int> signals, void (*handler)(int)) {
    for (const int signal : signals) {
        const auto before = std::signal(signal, SIG_IGN);
        if (before != SIG_IGN)
            std::signal(signal, handler);
    }
}

// Ends the program as the signal does by default. In a container this may be process 1, to which
// the kernel does not deliver signals without a handler.
inline void end_by(int signal) {
    if (getpid() == 1)
        _exit(128 + signal);
    std::signal(signal, SIG_DFL);
    raise(signal);
}

inline void prepare_process() {
    // If stdin, stdout or stderr is closed, the next file would get its number, and what is printed
    // would be written to that file.
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
        if (fcntl(fd, F_GETFD) < 0)
            open("/dev/null", O_RDWR);

    // If the reader of stdout exits, as tee does at Ctrl-C, the run continues. check_stdout()
    // reports it.
    std::signal(SIGPIPE, SIG_IGN);
    // Then a write beyond the limit on file sizes fails with EFBIG, which gives a message.
    std::signal(SIGXFSZ, SIG_IGN);
    if (getpid() == 1)
        handle({SIGINT, SIGTERM, SIGHUP, SIGQUIT}, end_by);

    static int out = STDOUT_FILENO;
    static int err = STDERR_FILENO;
    // Functions to read, write, seek and close.
    const cookie_io_functions_t functions = {nullptr, write_all, nullptr, nullptr};
    stdout = fopencookie(&out, "w", functions);
    stderr = fopencookie(&err, "w", functions);
    std::setvbuf(stdout, nullptr, _IOLBF, 0);  // line by line, also to files and pipes
    std::setvbuf(stderr, nullptr, _IONBF, 0);
}

// The first SIGINT, SIGTERM or SIGHUP only sets g_signal: the run finishes its step, writes a
// checkpoint and exits. Another one within a second is ignored, because many programs signal both a
// process and its group. A later one ends the program at once.
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

// Returns the exit code: `code`, but not 0 if something could not be written to stdout.
inline int check_stdout(int code) {
    if (std::fflush(stdout) == 0 && !std::ferror(stdout))
        return code;
    std::fputs(
        "train_gpt2cu: stdout: not everything could be written; free some space or redirect it\n",
        stderr);
    return code != 0 ? code : 1;
}
