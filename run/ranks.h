// Several ranks.
//
// In data parallel training rank r of n trains on micro-batches r, r + n, … of every step, and gradients are summed
// over the ranks. If the optimizer is sharded (ZeRO-1, Rajbhandari et al. 2020), a rank gets only its share of the
// summed gradients. It keeps optimizer state and updates parameters for that share alone, and then all ranks gather the
// parameters.
//
// Gradients are summed all at once after backward, or with --overlap each layer's matmul weights as soon as backward
// has finished that layer. Between machines there is much time to hide. On one machine hiding it costs more than it
// saves. On 4 H200s with 124M at B = 64 a step without any sums takes 105.5 ms. With all of them at its end it takes
// 108.0, and with each layer's sums beside the next layer's backward 109.4 (ZeRO-1: 106.6, 107.0, 108.0). Sums that
// began with attention's or GELU's backward gave 108.8 and 109.8, and at most 8 blocks for NCCL gave 111. There are two
// likely reasons. NCCL's blocks hold multiprocessors that a matmul of one persistent block per multiprocessor counts
// on. And where the power cap decides the clock, the power they draw is missing elsewhere.
//
// Rank r's share is part r of n of every tensor, or of each layer's part of a tensor that is summed by layer. The
// gradients and the state of a share lie back to back.
#pragma once
#include <vector>

#include "layers/layers.h"
#include "run/tensors.h"

inline bool by_layer(const TensorSpec& t, bool overlap) {
    return overlap && t.matmul && t.layers > 0;
}
inline std::vector<ParamRange> share_of(const Arena& params, int rank, int ranks, bool overlap) {
    std::vector<ParamRange> share;
    size_t at = 0, state = 0;
    for (const TensorSpec& t : params.tensors) {
        const size_t pieces = by_layer(t, overlap) ? t.layers : 1, stride = t.elements() / pieces;
        const size_t size = stride / ranks, begin = at + rank * size;
        if (ranks == 1)  // everything, one piece per tensor
            share.push_back({at, t.elements(), t.decay});
        else
            share.push_back({begin, size, t.decay, pieces, stride, begin - state});
        at += t.elements(), state += pieces * size;
    }
    return share;
}

// Calls f(place in the whole state, place in the share's state, elements) for every piece of a share. The optimizer has
// `arrays` arrays (m, v and perhaps master) of n elements each in the whole.
template <class F>
void for_each_piece(const std::vector<ParamRange>& share, size_t n, int ranks, size_t arrays, F f) {
    for (size_t array = 0; array < arrays; array++)
        for (const ParamRange& r : share)
            for (size_t p = 0; p < r.pieces; p++) f(array * n + r.piece(p), array * (n / ranks) + r.state(p), r.size);
}

// In context parallel training groups of `context` neighbouring ranks share their sequences. Each rank has two chunks
// of every sequence (attention/ring/ring.h). Layers that work on single rows do not notice, and for attention keys and
// values go around a ring. A group reads the batches that a single rank would read otherwise.
// Gradients are summed over all ranks as before.
//
// What a model needs to know about the other ranks. By default it is alone.
template <class Dev>
struct Ranks {
    typename Dev::Comm *comm = nullptr, *sharers = nullptr;  // of all ranks, and of those that share sequences
    int rank = 0, size = 1;
    bool sharded = false, overlap = false;
    int context = 1;                                     // ranks that share a sequence
    int groups() const { return size / context; }        // each with sequences of its own
    int group() const { return rank / context; }         // this rank's
    int context_rank() const { return rank % context; }  // within it
};

// Every rank's share of a tensor with C channels must be whole 16-byte vectors.
inline bool can_shard(int C, int ranks) {
    return C % (4 * ranks) == 0;
}
