// What a step works with besides parameters, gradients and activations: the optimizer's state, and
// buffers that every layer reuses.
#pragma once
#include <algorithm>
#include <type_traits>

#include "run/tensors.h"

// The gradients are followed by a few elements, the gate. GPT2::update() writes 0·losses to the
// first of them (0, or NaN if a loss is not finite) and includes the gate in the norm. So the norm
// alone says whether gradients and losses are finite. One element would do; four keep the norm's
// loads at 16 bytes.
constexpr size_t kGateElements = 4;

// What backward recomputes, and forward need not keep: the levels of --recompute. Each includes
// those below it.
enum Recompute {
    kRecomputeNothing = 0,
    kRecomputeActivation = 1,  // act, the activation function's output
    kRecomputeNorms = 2,       // ln1 and ln2, the layer norms' outputs
};

// The sizes from which those of all tensors follow.
struct Sizes {
    bool training;
    bool cache;     // keeps keys and values
    int recompute;  // a level of Recompute

    int L;         // layers
    size_t N;      // rows of a micro-batch: B·T
    size_t C;      // channels
    size_t Vp;     // vocabulary, padded
    size_t lse;    // elements of lse in a layer
    size_t att;    // elements that the attention kernel saves for its backward in a layer
    size_t chunk;  // rows of logits that exist at once

    size_t ranks;
    size_t stats;           // elements of the statistics
    size_t scratch;         // bytes, for the layer that needs most
    size_t batch;           // ints in the micro-batches of a step
    size_t own_parameters;  // in this rank's share, or all if the optimizer is not sharded
    size_t own_gradients;   // the same and a gate, or 0 if gradients are summed in place

    // TensorSpec::layers of an activation that backward reads: in training every layer keeps its
    // own, otherwise all layers share one.
    int layers() const { return training ? L : TensorSpec::kShared; }
    // The same for an activation that backward recomputes at this level and above.
    int layers_unless_recomputed(Recompute level) const {
        return recompute < level ? layers() : TensorSpec::kShared;
    }
    // The same for qkv, which also generation keeps in every layer, as its KV cache.
    int layers_of_qkv() const { return training || cache ? L : TensorSpec::kShared; }
};

// AdamW's state of this rank's share: both moments, and in bf16 the fp32 master weights. If it is
// sharded, the arrays have no gaps between them, because a checkpoint is put together from them.
template <class X>
struct Optimizer {
    using A = Acc<X>;
    A *m, *v, *master;

    static TensorList list(const Sizes& s) {
        TensorList t;
        t.once("m", &Optimizer::m, s.own_parameters);
        t.once("v", &Optimizer::v, s.own_parameters);
        t.once("master", &Optimizer::master, std::is_same_v<X, A> ? 0 : s.own_parameters);
        return t;
    }
};

template <class X>
struct Buffers {
    using A = Acc<X>;
    X *logits, *dresidual;
    A *token_losses, *stats, *own_gradients;
    void* scratch;
    int *stop_flags, *batch;

    static TensorList list(const Sizes& s) {
        const size_t dresidual = s.training ? s.N * s.C : 0;
        const size_t wide_gradient = s.recompute >= kRecomputeActivation ? 4 * dresidual : 0;

        TensorList t;
        // (chunk, Vp) the classifier works on one chunk of rows at a time. In backward, if
        // act is recomputed, also (N, 4C) the gradient of fch, then of qkv.
        t.once("logits", &Buffers::logits, std::max(s.chunk * s.Vp, wide_gradient));
        // (N) the loss of every token
        t.once("token_losses", &Buffers::token_losses, s.N);
        // DeviceStatistics (run/statistics.h)
        t.once("stats", &Buffers::stats, s.stats);
        // the summed gradients of this rank's share, and a gate; nothing if they are summed in
        // place
        t.once("own_gradients", &Buffers::own_gradients, s.own_gradients);
        // (N, C) gradient of the residual stream
        t.once("dresidual", &Buffers::dresidual, dresidual);
        // for whichever layer runs: D of attention, partial sums, …
        t.once("scratch", &Buffers::scratch, (s.scratch + 3) / 4);
        // (ranks) which ranks want to stop after this step, and why (run/stop.h)
        t.once("stop_flags", &Buffers::stop_flags, s.ranks);
        // tokens, targets and encoder plans of all micro-batches of a step
        t.once("batch", &Buffers::batch, s.batch);
        return t;
    }
};
