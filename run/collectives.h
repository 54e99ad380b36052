// What the ranks of a job do together in every step: sum gradients, and gather losses and updated
// parameters.
//
// Gradients are summed all at once after backward, or with --overlap each layer's matmul weights as
// soon as backward has finished that layer. Between machines a sum takes so long that it pays to
// overlap it with backward. On one machine overlapping costs more than it saves, because NCCL's
// blocks take SMs and power away from backward. On 4 H200s with 124M at B = 64 a step takes 105.5
// ms without any sums, 108.0 with all of them after backward, and 109.4 with each layer's
// overlapped.
#pragma once
#include <vector>

#include "layers/layers.h"
#include "parallel/ranks.h"
#include "parallel/shards.h"
#include "run/buffers.h"
#include "run/range.h"
#include "run/tensors.h"

constexpr int kNoLayer = -1;

// Starts to sum a layer's gradients over the ranks or, with kNoLayer, those of all tensors that are
// not summed layer by layer. gather_losses() ends what this starts.
template <class Model>
void sum_gradients(Model& m, int layer = kNoLayer) {
    const bool one_layer = layer != kNoLayer;
    if (one_layer && !m.ranks.overlap)
        return;

    Range range("sum gradients");
    auto& comm = *m.ranks.comm;
    const std::vector<ParamRange> own = m.share(m.ranks.rank);  // own[i] is that of tensor i
    // Where a sum begins. If a tensor is summed layer by layer, the pieces of its ParamRange are
    // its layers. If it is summed as a whole, it is a single piece that begins with layer 0.
    const int first_layer = one_layer ? layer : 0;
    const int piece = first_layer;

    comm.fork();
    comm.group([&] {
        for (size_t i = 0; i < m.params.tensors.size(); i++) {
            const TensorSpec& t = m.params.tensors[i];
            const bool by_layer = summed_by_layer(t, m.ranks.overlap);
            if (by_layer != one_layer)
                continue;
            auto* const g = static_cast<typename Model::A*>(m.grads.at(i, first_layer));
            if (m.ranks.sharded)
                comm.reduce_scatter(m.workspace().own_gradients + own[i].state_begin(piece), g,
                                    own[i].size);
            else
                comm.all_reduce(g, one_layer ? t.layer_elements() : t.elements());
        }
    });
}

// Gives every rank all losses of the step, after the sums that sum_gradients() started. What the
// device is given from here on waits for both.
template <class Model>
void gather_losses(Model& m) {
    m.ranks.comm->all_gather(m.statistics().losses(), m.micro_steps);
    m.ranks.comm->join();
}

// The summed gradients of this rank's share, followed by a gate of zeros.
template <class Model>
typename Model::A* gradients_to_update(Model& m) {
    if (!m.ranks.sharded)
        return m.all_gradients();  // whose gate clear_gradients() has cleared
    auto* const g = m.workspace().own_gradients;
    m.dev.zero(g + m.sizes.own_parameters, kGateElements * sizeof(*g));
    return g;
}

// The norm of the gradient, of which g[0, n) is this rank's share or, if the optimizer is not
// sharded, everything.
template <class Model>
const typename Model::A* norm_of_gradients(Model& m, const typename Model::A* g, size_t n) {
    const auto statistics = m.statistics();
    auto* const norm = statistics.norm();
    void* const scratch = m.workspace().scratch;
    if (!m.ranks.sharded) {
        global_norm(m.dev, norm, scratch, g, n);
        return norm;
    }

    // The norm of the norms of all shares.
    auto* const norms = statistics.norms_of_shares();
    global_norm(m.dev, norms + m.ranks.rank, scratch, g, n);
    in_order(*m.ranks.comm, [&] { m.ranks.comm->all_gather(norms, 1); });
    global_norm(m.dev, norm, scratch, norms, m.ranks.size);
    return norm;
}

// Gives every rank the parameters that the others have updated.
template <class Model>
void gather_parameters(Model& m) {
    auto& comm = *m.ranks.comm;
    const auto gather = [&] {
        // The ranks' pieces have one size and follow each other in the order of the ranks, so
        // what is gathered starts at rank 0's.
        for (const ParamRange& range : m.share(0))
            for (size_t p = 0; p < range.pieces; p++)
                comm.all_gather(m.all_parameters() + range.piece_begin(p), range.size);
    };
    in_order(comm, [&] { comm.group(gather); });
}

// Copies rank 0's parameters, or its whole optimizer state, to all ranks.
template <class Model>
void broadcast(Model& m, const Arena& arena) {
    if (m.ranks.size > 1)
        in_order(*m.ranks.comm, [&] { m.ranks.comm->broadcast(arena.base, arena.bytes); });
}
