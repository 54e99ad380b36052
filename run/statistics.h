// The statistics of a step: what the device writes and the host reads once a step.
#pragma once
#include <cmath>
#include <vector>

#include "common/types.h"

struct Statistics {
    double loss;  // the mean of all micro-batches of all ranks
    double norm;  // of the gradient, before clipping
    bool finite() const { return std::isfinite(loss) && std::isfinite(norm); }
};

// Where they are in device memory. Rank r's losses are written by rank r and gathered. The
// gradient's norm follows, and then, of a sharded optimizer, the norm of each rank's share, from
// which every rank computes that of the whole.
template <class A>
struct DeviceStatistics {
    A* base;
    size_t ranks;
    size_t micro_steps;  // of a rank

    size_t num_losses() const { return ranks * micro_steps; }
    size_t elements() const { return num_losses() + 1 + ranks; }

    A* losses() const { return base; }  // (ranks, micro_steps)
    A* losses_of(int rank) const { return base + rank * micro_steps; }
    A* norm() const { return base + num_losses(); }
    A* norms_of_shares() const { return norm() + 1; }  // (ranks)

    // What the device had when it was told to mark() the moment. Losses are added up in the order
    // of the data, whichever rank had it, so that the sum does not depend on the number of ranks.
    template <class Dev>
    Statistics download(const Dev& dev) const {
        std::vector<A> host(num_losses() + 1);
        dev.download_marked(host.data(), base, host.size() * sizeof(A));
        double loss = 0;
        for (size_t i = 0; i < micro_steps; i++)
            for (size_t r = 0; r < ranks; r++)
                loss += host[r * micro_steps + i];
        return {loss / num_losses(), host.back()};
    }
};
