// Which rank updates which part of the parameters if the optimizer is sharded (ZeRO-1, Rajbhandari
// et al. 2020).
//
// Of n ranks, rank r's share is the r-th of n equal parts of every tensor or, where gradients are
// summed layer by layer, of every layer of the tensor. If the optimizer is not sharded, n is 1 and
// every rank's share is everything. The gradients and the optimizer state of a share are stored
// without gaps, in the order of the parameters.
#pragma once
#include <algorithm>
#include <vector>

#include "common/tensor_spec.h"

// Whether every rank's share of a tensor with C channels is a whole number of AdamW's groups of
// elements, which are 16-byte vectors of fp32 (layers/adamw.cu).
inline bool can_shard(int C, int ranks) {
    constexpr int kGroup = 4;
    return C % (kGroup * ranks) == 0;
}

// With --overlap the gradients of a matmul's weights are summed over the ranks as soon as backward
// has finished a layer.
inline bool summed_by_layer(const TensorSpec& tensor, bool overlap) {
    return overlap && tensor.is_matrix() && tensor.layers > 0;
}

// A rank's share of these tensors, one range per tensor.
template <class Tensors>
std::vector<ParamRange> share_of(const Tensors& tensors, int rank, int shards, bool overlap) {
    std::vector<ParamRange> share;
    size_t tensor_begin = 0;  // among all parameters
    size_t state_begin = 0;   // among the elements of this share
    for (const TensorSpec& t : tensors) {
        const bool layer_by_layer = shards > 1 && summed_by_layer(t, overlap);
        const size_t pieces = layer_by_layer ? t.layers : 1;
        const size_t stride = t.elements() / pieces;
        const size_t size = stride / shards;
        const size_t shard = shards > 1 ? rank : 0;
        const size_t begin = tensor_begin + shard * size;
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

// A contiguous part of a share.
struct SharePart {
    size_t begin;        // among all parameters
    size_t state_begin;  // in the share's gradients, m, v and master weights
    size_t size;
};

// Calls f(part) for everything that a share has of the parameters from `begin` to `end`.
template <class F>
void for_each_part(const std::vector<ParamRange>& share, size_t begin, size_t end, F f) {
    for (const ParamRange& range : share) {
        for (size_t p = 0; p < range.pieces; p++) {
            const size_t piece_begin = range.piece_begin(p);
            const size_t part_begin = std::max(begin, piece_begin);
            const size_t part_end = std::min(end, piece_begin + range.size);
            if (part_begin >= part_end)
                continue;
            f(SharePart{.begin = part_begin,
                        .state_begin = range.state_begin(p) + (part_begin - piece_begin),
                        .size = part_end - part_begin});
        }
    }
}
