// Ends this rank when it hangs, whatever its main thread and its GPU wait for. A collective whose
// other ranks are gone never ends, so this also ends the ranks that a dead one leaves behind.
#pragma once
#include <unistd.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

#include "common/error.h"

inline std::atomic<int> g_step{0};  // at work, for the message
inline std::atomic<uint64_t> g_progress{0};

// Tells the watchdog that work goes on: after every layer, evaluated batch, sampled token and piece
// of a checkpoint.
inline void note_progress() {
    g_progress++;
}

class Watchdog {
  public:
    // The watching thread asks `title` who and where this rank is, such as "rank 3 at step 12".
    explicit Watchdog(std::function<std::string()> title) : title_(std::move(title)) {
        try {
            thread_ = std::thread([this] { watch(); });
        } catch (const std::system_error& e) {
            print_error("train_gpt2cu: " + title_() + ": no thread for the watchdog (" + e.what() +
                        "): nothing will end this rank if it hangs; raise ulimit -u");
        }
    }
    ~Watchdog() {
        allow(-1);
        if (thread_.joinable())
            thread_.join();
    }
    // From now on so many seconds without progress are a hang. 0: no progress is awaited.
    void allow(double seconds) {
        const std::lock_guard<std::mutex> lock(mutex_);
        allowed_ = seconds;
        note_progress();
    }
    // The watching thread asks for an error too, "" if there is none. Once ask(nullptr) returns,
    // nobody asks any more.
    void ask(std::function<std::string()> error) {
        const std::lock_guard<std::mutex> lock(mutex_);
        error_ = std::move(error);
    }

  private:
    std::function<std::string()> title_, error_;
    double allowed_ = 0;  // or -1 when the thread is to end
    std::mutex mutex_;
    std::thread thread_;  // none if the system has no more threads
    void watch() {
        uint64_t seen = 0;
        for (double idle = 0;; idle += 0.1) {
            usleep(100000);
            const std::lock_guard<std::mutex> lock(mutex_);
            if (allowed_ < 0)
                return;
            if (g_progress != seen)
                idle = 0;
            seen = g_progress;
            std::string wrong = error_ ? error_() : "";
            if (allowed_ > 0 && idle > allowed_)
                wrong = format("no progress for %.0f s", allowed_);
            if (wrong.empty())
                continue;
            print_error("train_gpt2cu: " + title_() + ": " + wrong + "; the job ends");
            _exit(1);
        }
    }
};
