// What the ranks of a job do together with a model's gradients, losses and parameters in every
// step.
//
// Gradients are summed all at once after backward, or with --overlap each layer's matmul weights as
// soon as backward has finished that layer. Between machines there is much time to hide. On one
// machine hiding it costs more than it saves, because NCCL's blocks and the power they draw are
// missing in backward. On 4 H200s with 124M at B = 64 a step takes 105.5 ms without any sums, 108.0
// with all at its end, and 109.4 with each layer's beside backward.
#pragma once
#include <algorithm>
#include <vector>

#include "layers/layers.h"
#include "parallel/ranks.h"
#include "parallel/shards.h"
#include "run/buffers.h"
#include "run/range.h"
#include "run/tensors.h"

constexpr int kNoLayer = -1;

// Starts summing a layer's gradients over the ranks, or with kNoLayer those of all tensors that do
// not go by layer.
template <class Model>
void sum_gradients(Model& m, int layer = kNoLayer) {
    if (layer != kNoLayer && !m.ranks.overlap)
        return;
    Range range("sum gradients");
    auto& comm = *m.ranks.comm;
    const std::vector<ParamRange> own = m.share(m.ranks.rank);
    const int l = std::max(layer, 0);
    comm.fork();
    comm.group([&] {
        for (size_t i = 0; i < m.params.tensors.size(); i++) {
            const TensorSpec& t = m.params.tensors[i];
            if (summed_by_layer(t, m.ranks.overlap) != (layer != kNoLayer))
                continue;
            auto* const g = static_cast<typename Model::A*>(m.grads.at(i, l));
            if (m.ranks.sharded)
                comm.reduce_scatter(m.workspace().share + own[i].state(l), g, own[i].size);
            else
                comm.all_reduce(g, layer == kNoLayer ? t.elements() : t.size());
        }
    });
}

// Every rank gets all losses of the step. Afterwards the sums of gradients are complete too.
template <class Model>
void gather_losses(Model& m) {
    m.ranks.comm->all_gather(m.statistics().losses(), m.micro_steps);
    m.ranks.comm->join();
}

// The summed gradients that this rank updates with, and after them a gate of zeros.
template <class Model>
typename Model::A* gradients_to_update(Model& m) {
    if (!m.ranks.sharded)
        return m.gradients().wte;  // clear_gradients() made the zeros
    auto* const g = m.workspace().share;
    m.dev.zero(g + m.sizes.parameters, kGate * sizeof(*g));
    return g;
}

// The norm over all ranks of n gradients of each. Of a sharded optimizer's it is the norm of the
// shares' norms.
template <class Model>
const typename Model::A* norm_of_gradients(Model& m, const typename Model::A* g, size_t n) {
    const auto statistics = m.statistics();
    auto* const norm = statistics.norm();
    void* const scratch = m.workspace().scratch;
    if (!m.ranks.sharded) {
        global_norm(m.dev, norm, scratch, g, n);
        return norm;
    }
    auto* const norms = statistics.norms_of_shares();
    global_norm(m.dev, norms + m.ranks.rank, scratch, g, n);
    in_order(*m.ranks.comm, [&] { m.ranks.comm->all_gather(norms, 1); });
    global_norm(m.dev, norm, scratch, norms, m.ranks.size);
    return norm;
}

// Gathers the ranks' updated shares of the parameters on all ranks.
template <class Model>
void gather_parameters(Model& m) {
    auto& comm = *m.ranks.comm;
    const auto gather = [&] {
        for (const ParamRange& range : m.share(0))  // rank 0's pieces are where each tensor's begin
            for (size_t p = 0; p < range.pieces; p++)
                comm.all_gather(m.weights().wte + range.piece(p), range.size);
    };
    in_order(comm, [&] { comm.group(gather); });
}

// Rank 0's parameters, or its whole optimizer's state, are copied to all ranks.
template <class Model>
void broadcast(Model& m, const Arena& arena) {
    if (m.ranks.size > 1)
        in_order(*m.ranks.comm, [&] { m.ranks.comm->broadcast(arena.base, arena.bytes); });
}
