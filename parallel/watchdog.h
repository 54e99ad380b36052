// Ends this rank if it hangs, whatever its main thread and its GPU are waiting for. A collective
// whose other ranks are gone never returns, so the watchdog also ends the ranks that survive a dead
// one.
#pragma once
#include <unistd.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

#include "common/error.h"

inline std::atomic<int> g_step{0};  // the step in progress, for the watchdog's message
inline std::atomic<uint64_t> g_progress{0};

// Tells the watchdog that this rank is alive. Called after every layer, evaluated batch, sampled
// token and part of a checkpoint.
inline void note_progress() {
    g_progress++;
}

class Watchdog {
  public:
    // `title` is the start of the message: which rank this is and what it is doing ("rank 3 at step
    // 12"). The watchdog's own thread calls it.
    explicit Watchdog(std::function<std::string()> title) : title_(std::move(title)) {
        try {
            thread_ = std::thread([this] { watch(); });
        } catch (const std::system_error& e) {
            print_error("train_gpt2cu: " + title_() + ": cannot start the watchdog thread (" +
                        e.what() + "), so nothing will end this rank if it hangs; raise ulimit -u");
        }
    }

    ~Watchdog() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        if (thread_.joinable())
            thread_.join();
    }

    // From now on the rank ends if it makes no progress for this long; 0 lets it take any time.
    void set_timeout(double seconds) {
        const std::lock_guard<std::mutex> lock(mutex_);
        timeout_ = seconds;
        note_progress();
    }

    // The watchdog's thread also ends the rank if `error` returns something other than "". Once
    // set_error_source(nullptr) has returned, the previous function is not called any more.
    void set_error_source(std::function<std::string()> error) {
        const std::lock_guard<std::mutex> lock(mutex_);
        error_ = std::move(error);
    }

  private:
    const std::function<std::string()> title_;
    std::thread thread_;  // none if the system has no more threads

    std::mutex mutex_;  // guards the rest
    std::function<std::string()> error_;
    double timeout_ = 0;
    bool stop_ = false;

    void watch() {
        constexpr double kInterval = 0.1;
        uint64_t seen = 0;
        double idle = 0;

        for (;;) {
            usleep(static_cast<useconds_t>(1e6 * kInterval));
            const std::lock_guard<std::mutex> lock(mutex_);
            if (stop_)
                return;

            idle += kInterval;
            if (g_progress != seen) {
                seen = g_progress;
                idle = 0;
            }

            std::string failure = error_ ? error_() : "";
            if (timeout_ > 0 && idle > timeout_)
                failure = format("no progress for %.0f s (--timeout)", timeout_);
            if (failure.empty())
                continue;

            print_error("train_gpt2cu: " + title_() + ": " + failure + "; ending the job");
            _exit(1);
        }
    }
};
