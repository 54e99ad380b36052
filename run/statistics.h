// The statistics of a step, which the device writes and the host reads.
#pragma once
#include <cmath>
#include <vector>

#include "common/types.h"

struct Statistics {
    double loss;  // mean over all micro-batches of all ranks
    double norm;  // of the gradient, before clipping

    bool finite() const { return std::isfinite(loss) && std::isfinite(norm); }
};

// The statistics in device memory, one array after another:
//
//   losses            (ranks, micro_steps): rank r writes row r, then the rows are gathered
//   norm              (1): of the gradient
//   norms_of_shares   (ranks): of each rank's share of the gradient, if the optimizer is sharded.
//                     From these every rank computes the norm of the whole.
template <class A>
struct DeviceStatistics {
    A* base;
    size_t ranks;
    size_t micro_steps;  // of a rank

    size_t num_losses() const { return ranks * micro_steps; }
    size_t elements() const { return num_losses() + 1 + ranks; }

    A* losses() const { return base; }
    A* losses_of(int rank) const { return base + rank * micro_steps; }
    A* norm() const { return base + num_losses(); }
    A* norms_of_shares() const { return norm() + 1; }

    // Waits only for what the device had been given when dev.mark() was called. Losses are added in
    // the order of the data, for each micro-batch those of all ranks, so that the sum does not
    // depend on the number of ranks.
    template <class Dev>
    Statistics download(const Dev& dev) const {
        std::vector<A> host(num_losses() + 1);  // the losses, then the norm
        dev.download_marked(host.data(), base, host.size() * sizeof(A));
        double loss = 0;
        for (size_t i = 0; i < micro_steps; i++)
            for (size_t r = 0; r < ranks; r++)
                loss += host[r * micro_steps + i];
        return {.loss = loss / num_losses(), .norm = host.back()};
    }
};
