// The ranks of a job, connected by NCCL. In data parallel training rank r of n trains on
// micro-batches r, r + n, … of every step, and gradients are summed over the ranks. If the
// optimizer is sharded (parallel/shards.h), a rank gets only its share of the summed gradients. It
// keeps optimizer state and updates parameters for that share alone, and then all ranks gather the
// parameters. run/collectives.h has these calls for a model.
//
// In context parallel training groups of `context` neighbouring ranks share their sequences. Each
// rank has two chunks of every sequence (attention/ring/ring.h), and a group reads the batches that
// a single rank would read otherwise.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <type_traits>
#include <vector>

#include "parallel/comm.h"
#include "parallel/process_group.h"
#include "parallel/watchdog.h"

// What a model needs to know about the other ranks. By default it is alone.
template <class Dev>
struct Ranks {
    using Comm = typename Dev::Comm;
    std::shared_ptr<Comm> comm;          // of all ranks
    std::shared_ptr<Comm> context_comm;  // of those that share this rank's sequences
    Watchdog* watchdog = nullptr;
    int rank = 0;
    int size = 1;
    int local_size = 1;    // ranks of this machine
    bool sharded = false;  // the optimizer
    bool overlap = false;  // sum a layer's gradients while backward goes on
    int context = 1;       // ranks that share a sequence

    int groups() const { return size / context; }        // each with sequences of its own
    int group() const { return rank / context; }         // this rank's
    int context_rank() const { return rank % context; }  // within it

    // Every rank's value, by rank. All ranks make these calls together.
    template <class T>
    std::vector<T> gather(const T& mine) const {
        static_assert(std::is_trivially_copyable_v<T>);
        std::vector<T> all(size, mine);
        if (size > 1)
            comm->host_all_gather(all.data(), sizeof(T));
        return all;
    }

    // x ← the sum over the ranks, in their order.
    void add_up(std::vector<double>& x) const {
        if (size == 1 || x.empty())
            return;
        std::vector<double> all(size * x.size());
        std::copy(x.begin(), x.end(), all.begin() + rank * x.size());
        comm->host_all_gather(all.data(), x.size() * sizeof(double));
        for (size_t i = 0; i < x.size(); i++) {
            x[i] = 0;
            for (int r = 0; r < size; r++)
                x[i] += all[r * x.size() + i];
        }
    }

    // This rank gives up when it makes no progress for that long. 0: it may take any time.
    void allow(double seconds) const {
        if (watchdog)
            watchdog->allow(seconds);
    }
};

// Makes communication calls that wait for the device's work so far, and that its further work waits
// for.
template <class Comm, class F>
void in_order(Comm& comm, F calls) {
    comm.fork();
    calls();
    comm.join();
}

// Connects the ranks of a process group by NCCL. The watchdog ends this rank if NCCL finds an
// error.
template <class Dev>
Ranks<Dev> connect(const Dev& dev, const ProcessGroup& group, int context) {
    using Comm = typename Dev::Comm;
    Ranks<Dev> ranks;
    ranks.rank = group.rank;
    ranks.size = group.size;
    ranks.local_size = group.local_size;
    ranks.context = context;
    ranks.watchdog = group.watchdog.get();
    if (!ranks.watchdog)
        return ranks;

    const auto forget = [dog = ranks.watchdog](Comm* comm) {
        dog->ask(nullptr);
        delete comm;
    };
    ranks.comm =
        std::shared_ptr<Comm>(new Comm(dev, group.rank, group.size, group.nccl_id), forget);
    if (context > 1)
        ranks.context_comm = std::make_shared<Comm>(*ranks.comm, ranks.group() * context, context);
    ranks.watchdog->ask([comm = ranks.comm.get()] { return comm->error(); });
    return ranks;
}

// Runs the body of a rank. If it throws in one of several, the process ends with its message.
// Nothing is unwound, because destructors would wait for other ranks.
template <class Dev, class F>
int as_rank(const Ranks<Dev>& ranks, F body) {
    try {
        return body();
    } catch (const std::exception& e) {
        if (!ranks.watchdog)
            throw;
        print_error(format("train_gpt2cu: rank %d: %s", ranks.rank, e.what()));
        std::fflush(stdout);
        _exit(exit_code_of(e));
    }
}
