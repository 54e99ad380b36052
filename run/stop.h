// How a run stops before its last step: because of a signal, or because of an error that does not
// spoil the current step (of the data, the log or a checkpoint, say). In either case all ranks stop
// after the same step, and with a checkpoint. That is why every rank sends a stop flag to all
// others in every step, behind the device's work.
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
        if (several_ranks())
            flag_ = static_cast<int*>(model.dev.alloc_host(sizeof(int)));
    }
    ~Stop() { model_.dev.free_host(flag_); }
    Stop(const Stop&) = delete;
    Stop& operator=(const Stop&) = delete;

    // Calls body(). If it throws, the run stops after this step or, with several ranks, after the
    // step whose send_flag() comes next. Only the first error is kept.
    template <class F>
    void defer_error(F body) {
        try {
            body();
        } catch (const std::exception&) {
            if (!error_)
                error_ = std::current_exception();
        }
    }

    // Sends this rank's flag to all others, once the device has done what it was given. Call it
    // before dev.mark(), because receive_flags() waits for no more than that.
    void send_flag() {
        if (!several_ranks())
            return;
        *flag_ = int(g_signal) | (error_ ? kFailed : 0);
        int* const flags = model_.workspace().stop_flags;
        model_.dev.upload(flags + model_.ranks.rank, flag_, sizeof(int));
        in_order(*model_.ranks.comm, [&] { model_.ranks.comm->all_gather(flags, 1); });
    }

    // Reads the flags that all ranks have sent.
    void receive_flags() {
        if (!several_ranks())
            return;
        std::vector<int> flags(model_.ranks.size);
        model_.dev.download_marked(flags.data(), model_.workspace().stop_flags,
                                   flags.size() * sizeof(int));
        for (const int flag : flags) {
            signal_of_any_rank_ = std::max(signal_of_any_rank_, flag & ~kFailed);
            any_rank_failed_ |= (flag & kFailed) != 0;
        }
    }

    // A signal that some rank got, or 0.
    int signal() const { return several_ranks() ? signal_of_any_rank_ : int(g_signal); }
    // Whether some rank has an error.
    bool failed() const { return several_ranks() ? any_rank_failed_ : error_ != nullptr; }
    // Throws this rank's error, if it has one.
    void rethrow() const {
        if (error_)
            std::rethrow_exception(error_);
    }

  private:
    // A flag is the number of a signal, or 0, and this bit if the rank has an error.
    static constexpr int kFailed = 256;

    bool several_ranks() const { return model_.ranks.size > 1; }

    Model& model_;
    int* flag_ = nullptr;  // this rank's, in pinned memory
    std::exception_ptr error_;
    int signal_of_any_rank_ = 0;
    bool any_rank_failed_ = false;
};
