// What a step works with beside parameters and activations: the optimizer's state, and buffers that
// every layer reuses.
#pragma once
#include <algorithm>
#include <type_traits>

#include "run/tensors.h"

// A gate of a few elements, 0 or NaN, follows the gradients. update() writes 0·loss there and
// includes it in the norm. So one number stops the update if a gradient or a loss is not finite.
// There are four to keep the norm's 16-byte loads.
constexpr size_t kGate = 4;

// What the sizes of the other tensors follow from. N = B·T rows.
struct Sizes {
    int L;
    size_t N, C, Vp, lse, att, chunk, stats, scratch, batch, parameters, share, ranks;
    bool training, cache;
    int recompute;
    // The layers for which a tensor is kept that backward computes again from this level of
    // --recompute on.
    int kept(int level) const { return training && recompute < level ? L : TensorSpec::kShared; }
    int cached() const { return training || cache ? L : TensorSpec::kShared; }
};

// This rank's share. The arrays lie back to back for any number of shards, because a checkpoint is
// put together from their pieces. In bf16 fp32 master weights stand beside the parameters.
template <class X>
struct Optimizer {
    using A = Acc<X>;
    A *m, *v, *master;
    static TensorList list(const Sizes& s) {
        TensorList t;
        t.once("m", &Optimizer::m, s.parameters);
        t.once("v", &Optimizer::v, s.parameters);
        t.once("master", &Optimizer::master, std::is_same_v<X, A> ? 0 : s.parameters);
        return t;
    }
};

template <class X>
struct Buffers {
    using A = Acc<X>;
    X *logits, *dresidual;
    A *losses, *stats, *share;
    void* scratch;
    int *stop_flags, *batch;
    static TensorList list(const Sizes& s) {
        const size_t gradient = s.training ? s.N * s.C : 0;
        const size_t wide = s.recompute >= 1 ? 4 * gradient : 0;
        TensorList t;
        // (chunk, Vp): the classifier works on a chunk of rows at a time. Backward needs no logits,
        // and from --recompute 1 on it has the gradient of fch, then of qkv here, (N, 4C).
        t.once("logits", &Buffers::logits, std::max(s.chunk * s.Vp, wide));
        t.once("losses", &Buffers::losses, s.N);    // (N)
        t.once("stats", &Buffers::stats, s.stats);  // run/statistics.h
        // this rank's summed gradients and a gate, or nothing
        t.once("share", &Buffers::share, s.share);
        // (N, C) gradient of the residual stream
        t.once("dresidual", &Buffers::dresidual, gradient);
        // for whichever layer runs: D, partial sums, …
        t.once("scratch", &Buffers::scratch, (s.scratch + 3) / 4);
        // (ranks) who ends after this step, and why (run/stop.h)
        t.once("stop_flags", &Buffers::stop_flags, s.ranks);
        // tokens, targets and encoder plans of a whole step
        t.once("batch", &Buffers::batch, s.batch);
        return t;
    }
};
