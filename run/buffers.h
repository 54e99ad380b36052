// What a step works with beside parameters and activations: the optimizer's state, and buffers that every layer reuses.
#pragma once
#include <algorithm>
#include <type_traits>

#include "run/tensors.h"

// A gate of a few elements, 0 or NaN, follows the gradients. update() writes 0·loss there and includes it in the norm.
// So one number stops the update if a gradient or a loss is not finite. There are four to keep the norm's 16-byte
// loads.
constexpr size_t kGate = 4;

// What the sizes of the other tensors follow from. N = B·T rows.
struct Sizes {
    int L;
    size_t N, C, Vp, lse, att, chunk, stats, scratch, batch, parameters, share;
    bool training, cache;
    int recompute;
    // The layers for which a tensor is kept that backward computes again from this level of --recompute on.
    int kept(int level) const { return training && recompute < level ? L : TensorSpec::kShared; }
    int cached() const { return training || cache ? L : TensorSpec::kShared; }
};

// This rank's share. The arrays lie back to back for any number of shards, because a checkpoint is put together from
// their pieces. In bf16 fp32 master weights stand beside the parameters.
template <class X>
struct Optimizer : Tensors {
    Optimizer(const Tensors& place, const Sizes& s) : Tensors(place), n(s.parameters) {}
    using A = Acc<X>;
    const size_t n;
    A* m = once<A>("m", n);
    A* v = once<A>("v", n);
    A* master = once<A>("master", std::is_same_v<X, A> ? 0 : n);
};

// Buffers that every layer reuses.
template <class X>
struct Buffers : Tensors {
    Buffers(const Tensors& place, const Sizes& s) : Tensors(place), s(s), gradient(s.training ? s.N * s.C : 0) {}
    using A = Acc<X>;
    const Sizes& s;
    const size_t gradient, logits_size = std::max(s.chunk * s.Vp, s.recompute >= 1 ? 4 * gradient : 0);
    X* logits = once<X>("logits", logits_size);     // (chunk, Vp): the classifier works on a chunk of rows at a time
    X* wide = s.recompute >= 1 ? logits : nullptr;  // (N, 4C) gradient of fch, then of qkv. Backward needs no logits
    A* losses = once<A>("losses", s.N);             // (N)
    A* stats = once<A>("stats", s.stats);  // micro-batches' losses, rank after rank; the norm; each share's norm
    A* share = once<A>("share", s.share);  // if the optimizer is sharded: this rank's summed gradients, and a gate
    X* dresidual = once<X>("dresidual", gradient);               // (N, C) gradient of the residual stream
    void* scratch = once<void>("scratch", (s.scratch + 3) / 4);  // for whichever layer runs: D, partial sums, …
    int* batch = once<int>("batch", s.batch);                    // tokens, targets and encoder plans of a whole step
};
