// How a run ends before its last step: because of a signal, or of an error that does not spoil the
// step at work, such as one of the data, the log or a checkpoint. Either ends all ranks after the
// same step and with a checkpoint. So every rank sends all others a stop flag in every step, behind
// the device's work.
#pragma once
#include <algorithm>
#include <exception>
#include <vector>

#include "parallel/ranks.h"
#include "run/process.h"

template <class Model>
class Stop {
  public:
    explicit Stop(Model& model) : model_(model) {
        if (model.ranks.size > 1)
            flag_ = static_cast<int*>(model.dev.alloc_host(sizeof(int)));
    }
    ~Stop() { model_.dev.free_host(flag_); }
    Stop(const Stop&) = delete;
    Stop& operator=(const Stop&) = delete;

    // Runs the body. Its error ends the run after this step, if it is the first.
    template <class F>
    void defer_error(F body) {
        try {
            body();
        } catch (const std::exception&) {
            if (!error_)
                error_ = std::current_exception();
        }
    }

    // Tells all ranks what this one got so far, behind what the device does now.
    void send() {
        if (model_.ranks.size == 1)
            return;
        *flag_ = int(g_signal) | (error_ ? kFailed : 0);
        int* const flags = model_.workspace().stop_flags;
        model_.dev.upload(flags + model_.ranks.rank, flag_, sizeof(int));
        in_order(*model_.ranks.comm, [&] { model_.ranks.comm->all_gather(flags, 1); });
    }

    // Learns what all ranks have sent.
    void receive() {
        if (model_.ranks.size == 1)
            return;
        std::vector<int> flags(model_.ranks.size);
        model_.dev.download_marked(flags.data(), model_.workspace().stop_flags,
                                   flags.size() * sizeof(int));
        for (const int flag : flags) {
            signal_ = std::max(signal_, flag % kFailed);
            failed_ |= flag >= kFailed;
        }
    }

    // The signal that any rank got, or 0.
    int signal() const { return model_.ranks.size == 1 ? int(g_signal) : signal_; }
    // Whether any rank has an error.
    bool failed() const { return model_.ranks.size == 1 ? error_ != nullptr : failed_; }
    // Throws the error of this rank, if it has one.
    void rethrow() const {
        if (error_)
            std::rethrow_exception(error_);
    }

  private:
    static constexpr int kFailed = 256;  // in a flag, beside the number of a signal
    Model& model_;
    int* flag_ = nullptr;  // this rank's, pinned
    std::exception_ptr error_;
    int signal_ = 0;       // of all ranks
    bool failed_ = false;  // of all ranks
};
