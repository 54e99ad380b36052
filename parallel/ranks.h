// The ranks of a job, connected by NCCL.
//
// In data parallel training rank r of n trains on micro-batches r, r + n, … of every step, and
// gradients are summed over the ranks. If the optimizer is sharded (parallel/shards.h), a rank gets
// only its share of the summed gradients, and keeps optimizer state and updates parameters for that
// share alone; then all ranks gather the parameters. run/collectives.h makes these calls for a
// model.
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

// What a model needs to know about the other ranks. The default is a single rank.
template <class Dev>
struct Ranks {
    using Comm = typename Dev::Comm;
    std::shared_ptr<Comm> comm;          // all ranks
    std::shared_ptr<Comm> context_comm;  // the ranks that share this rank's sequences
    Watchdog* watchdog = nullptr;        // null if no other process runs
    int rank = 0;
    int size = 1;
    int local_size = 1;    // ranks on this machine
    bool sharded = false;  // the optimizer
    bool overlap = false;  // sum a layer's gradients during backward
    int context = 1;       // ranks per sequence

    int groups() const { return size / context; }        // each has sequences of its own
    int group() const { return rank / context; }         // this rank's
    int context_rank() const { return rank % context; }  // within its group

    // Every rank's value, by rank. All ranks must make this call, and the next two, together.
    template <class T>
    std::vector<T> all_gather(const T& mine) const {
        static_assert(std::is_trivially_copyable_v<T>);
        std::vector<T> all(size, mine);
        if (size > 1)
            comm->host_all_gather(all.data(), sizeof(T));
        return all;
    }

    // Rank 0's value.
    template <class T>
    T broadcast(const T& mine) const {
        return all_gather(mine)[0];
    }

    // x ← the sum over the ranks, added in their order.
    void sum_over_ranks(std::vector<double>& x) const {
        if (size == 1 || x.empty())
            return;

        const size_t n = x.size();
        std::vector<double> all(size * n);
        std::copy(x.begin(), x.end(), all.begin() + rank * n);
        comm->host_all_gather(all.data(), n * sizeof(double));

        for (size_t i = 0; i < n; i++) {
            x[i] = 0;
            for (int r = 0; r < size; r++) {
                x[i] += all[r * n + i];
            }
        }
    }

    // From now on this rank ends if it makes no progress for this long; 0 lets it take any time.
    void set_timeout(double seconds) const {
        if (watchdog)
            watchdog->set_timeout(seconds);
    }
};

// Makes communication calls in the order of the compute stream: after the work that is queued there
// already, and before what will be queued later.
template <class Comm, class F>
void in_order(Comm& comm, F calls) {
    comm.fork();
    calls();
    comm.join();
}

// Connects the ranks of a process group by NCCL. From then on the watchdog also ends this rank if
// NCCL reports an error.
template <class Dev>
Ranks<Dev> connect(const Dev& dev, const ProcessGroup& group, int context) {
    using Comm = typename Dev::Comm;
    Ranks<Dev> ranks;
    ranks.rank = group.rank;
    ranks.size = group.size;
    ranks.local_size = group.local_size;
    ranks.context = context;
    ranks.watchdog = group.watchdog.get();
    const bool runs_alone = !ranks.watchdog;  // as a single rank, or with --memory
    if (runs_alone)
        return ranks;

    // The watchdog must not ask a communicator that is gone.
    const auto release = [watchdog = ranks.watchdog](Comm* comm) {
        watchdog->set_error_source(nullptr);
        delete comm;
    };
    ranks.comm =
        std::shared_ptr<Comm>(new Comm(dev, group.rank, group.size, group.nccl_id), release);
    if (context > 1)
        ranks.context_comm = std::make_shared<Comm>(*ranks.comm, ranks.group() * context, context);
    ranks.watchdog->set_error_source([comm = ranks.comm.get()] { return comm->error(); });
    return ranks;
}

// Runs the body of a rank. If it throws in a job of several ranks, the process prints the message
// and exits here: destructors outside of the body, such as the model's, free device memory. That
// waits for the GPU, where a collective may wait for other ranks forever.
template <class Dev, class F>
int run_rank(const Ranks<Dev>& ranks, F body) {
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
