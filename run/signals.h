// What a signal that asks to stop does.
#pragma once
#include <csignal>
#include <ctime>

// SIGINT and SIGTERM finish the step, write a checkpoint and leave, or end the text that is written. A second one ends the program at once if it comes
// more than a second later. Within a second it counts as the same signal, because many programs that pass signals on
// send them to a process and to its group.
inline volatile std::sig_atomic_t g_signal = 0;
inline timespec g_signal_time;
inline void on_signal(int signal) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!g_signal) {
        g_signal_time = now, g_signal = signal;
    } else if (now.tv_sec - g_signal_time.tv_sec + (now.tv_nsec - g_signal_time.tv_nsec) * 1e-9 > 1) {
        std::signal(signal, SIG_DFL);
        raise(signal);
    }
}
