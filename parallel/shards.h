// Who owns which part of the parameters when the optimizer is sharded (ZeRO-1, Rajbhandari et al.
// 2020).
//
// Rank r's share is part r of n of every tensor, or of each layer's part of a tensor whose
// gradients are summed layer by layer. The gradients and the optimizer's state of a share are
// stored back to back, in the order of the parameters.
#pragma once
#include <algorithm>
#include <vector>

#include "common/tensor_spec.h"

// Every rank's share of a tensor with C channels must be whole 16-byte vectors.
inline bool can_shard(int C, int ranks) {
    return C % (4 * ranks) == 0;
}

// With --overlap the gradients of matmul weights are summed as soon as backward has finished a
// layer.
inline bool summed_by_layer(const TensorSpec& tensor, bool overlap) {
    return overlap && tensor.is_matrix() && tensor.layers > 0;
}

// A rank's share of these tensors, a range for each. With one rank that is everything.
template <class Tensors>
std::vector<ParamRange> share_of(const Tensors& tensors, int rank, int ranks, bool overlap) {
    std::vector<ParamRange> share;
    size_t tensor_begin = 0;  // among all parameters
    size_t state_begin = 0;   // among the elements of this share
    for (const TensorSpec& t : tensors) {
        const bool layer_by_layer = ranks > 1 && summed_by_layer(t, overlap);
        const size_t pieces = layer_by_layer ? t.layers : 1;
        const size_t stride = t.elements() / pieces;
        const size_t size = stride / ranks;
        const size_t begin = tensor_begin + rank % ranks * size;
        share.push_back({.begin = begin,
                         .size = size,
                         .decay = t.decays(),
                         .pieces = pieces,
                         .stride = stride,
                         .skipped = begin - state_begin});
        tensor_begin += t.elements();
        state_begin += pieces * size;
    }
    return share;
}

// A part of a share without a gap.
struct SharePart {
    size_t parameter;  // its first element among all parameters
    size_t state;      // the same among the share's gradients, m, v and master
    size_t count;      // elements
};

// Calls f(part) for what a share has of the parameters from `begin` to `end`.
template <class F>
void for_each_part(const std::vector<ParamRange>& share, size_t begin, size_t end, F f) {
    for (const ParamRange& range : share) {
        for (size_t p = 0; p < range.pieces; p++) {
            const size_t first = std::max(begin, range.piece(p));
            const size_t last = std::min(end, range.piece(p) + range.size);
            if (first < last)
                f(SharePart{.parameter = first,
                            .state = range.state(p) + (first - range.piece(p)),
                            .count = last - first});
        }
    }
}
