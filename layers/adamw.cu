// AdamW (Loshchilov & Hutter 2019, Algorithm 2), after clipping by the global norm.
//
//   g ← g·min(1, max_norm/norm)
//   m ← β₁m + (1 − β₁)g
//   v ← β₂v + (1 − β₂)g²
//   m̂ = m/(1 − β₁ᵗ)
//   v̂ = v/(1 − β₂ᵗ)
//   p ← p − lr·(m̂/(√v̂ + eps) + wd·p)
//
// Parameters are kept as fp32 masters. If X is bf16 the model computes with a copy that is rounded
// stochastically (cuda/stochastic_rounding.cuh).
//
// One launch updates all ranges and their pieces. A thread updates four consecutive elements, 16
// bytes of every fp32 stream. The kernel is bound by memory, with 28 (fp32) or 30 (bf16) bytes an
// element.
//
// Writes: params.  Updates in place: master, m, v.
// Limits: 32 ranges. params are aligned to 4·sizeof(X) bytes, the fp32 arrays to 16. A range may
// begin anywhere, but `skipped` is a multiple of 4, and so are the size and stride of several
// pieces.
#include <cmath>

#include "cuda/stochastic_rounding.cuh"
#include "cuda/vector.cuh"
#include "layers/layers.h"

namespace {

constexpr int kThreads = 256;
constexpr int kMaxRanges = 32;
constexpr int kV = StochasticRounding::kGroup;  // elements of a thread: 4

// Everything the kernel needs besides pointers, passed by value.
struct Plan {
    struct Range {
        size_t begin, size, stride, skipped;
        unsigned first_block, blocks;  // blocks of a piece
        float decay;
    } ranges[kMaxRanges];
    int num_ranges;
    float lr, beta1, beta2, eps, max_norm;
    float correction1, correction2;  // 1/(1−βᵗ)
    StochasticRounding rounding;
};

__device__ inline float update(float p, float& m, float& v, float g, float decay,
                               const Plan& plan) {
    m = plan.beta1 * m + (1.f - plan.beta1) * g;
    v = plan.beta2 * v + (1.f - plan.beta2) * g * g;
    const float m_hat = m * plan.correction1;
    const float v_hat = v * plan.correction2;
    return p - plan.lr * (m_hat * reciprocal_approx(sqrt_approx(v_hat) + plan.eps) + decay * p);
}

// Updates V elements from parameter i on, whose state is at s. V is 4, or 1 in a group that the
// range shares with its neighbours.
template <int V, class X>
__device__ inline void update_elements(size_t i, size_t s, X* params, float* master, float* m,
                                       float* v, const float* grads, float clip, float decay,
                                       const Plan& plan) {
    const size_t at = std::is_same_v<X, float> ? i : s;  // of the master
    auto p4 = load<V>(master + at);
    auto m4 = load<V>(m + s);
    auto v4 = load<V>(v + s);
    const auto g4 = load<V>(grads + s);
    for (int k = 0; k < V; k++)
        p4.x[k] = update(p4[k], m4.x[k], v4.x[k], clip * g4[k], decay, plan);
    store(master + at, p4);
    store(m + s, m4);
    store(v + s, v4);
    if constexpr (std::is_same_v<X, bf16>)
        store(params + i, plan.rounding.round(p4, i));
}

template <class X>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(X* params, float* master, float* m, float* v, const float* __restrict__ grads,
                 const float* __restrict__ norm_ptr, const __grid_constant__ Plan plan) {
    const float norm = *norm_ptr;
    if (!isfinite(norm))
        return;
    const float clip = plan.max_norm > 0.f ? fminf(1.f, plan.max_norm / norm) : 1.f;

    int r = plan.num_ranges - 1;
    while (blockIdx.x < plan.ranges[r].first_block)
        r--;
    const Plan::Range& range = plan.ranges[r];
    unsigned block = blockIdx.x - range.first_block;
    unsigned piece = 0;
    // one GPU never divides
    if (block >= range.blocks)
        piece = block / range.blocks, block %= range.blocks;
    const size_t begin = range.begin + piece * range.stride;
    const size_t end = begin + range.size;
    const size_t skipped = range.skipped + piece * (range.stride - range.size);
    const float decay = range.decay;

    // Groups of kV are aligned in the arena, not in the range. What is skipped is counted in
    // groups, because nvcc 13.0 no longer sees with s = i − skipped that 16 bytes can be stored at
    // once.
    const size_t group = begin / kV + static_cast<size_t>(block) * kThreads + threadIdx.x;
    const size_t i = group * kV;
    const size_t s = (group - skipped / kV) * kV;
    if (i >= begin && i + kV <= end) {
        update_elements<kV>(i, s, params, master, m, v, grads, clip, decay, plan);
    } else {
        for (size_t k = 0; k < kV; k++)
            if (i + k >= begin && i + k < end)
                update_elements<1>(i + k, s + k, params, master, m, v, grads, clip, decay, plan);
    }
}

}  // namespace

// -------------------------------------------------------------------------------------------------

template <class X>
void adamw_update(const Cuda& dev, X* params, float* master, float* m, float* v, const float* grads,
                  const float* norm, const ParamRange* ranges, int num_ranges, const AdamW& hyper) {
    if constexpr (std::is_same_v<X, float>)
        master = params;
    if (num_ranges < 0 || num_ranges > kMaxRanges)
        throw Error(format("adamw_update: %d parameter ranges, expected at most %d", num_ranges,
                           kMaxRanges));
    if (!vectorises<float>(0, master, m, v, grads) ||
        reinterpret_cast<uintptr_t>(params) % (kV * sizeof(X)) != 0)
        throw Error(
            format("adamw_update: pointers must be aligned: fp32 arrays to 16 bytes, params to %zu",
                   kV * sizeof(X)));
    if (hyper.step < 1)
        throw Error(format("adamw_update: step %d, expected one >= 1", hyper.step));

    Plan plan = {};
    unsigned blocks = 0;
    for (int r = 0; r < num_ranges; r++) {
        const ParamRange& p = ranges[r];
        if (p.size == 0 || p.pieces == 0)
            continue;
        if (p.skipped % kV != 0 ||
            (p.pieces > 1 && (p.size % kV != 0 || p.stride % kV != 0 || p.stride < p.size)))
            throw Error(
                format("adamw_update: pieces of %zu elements, %zu apart, %zu skipped: expected "
                       "multiples of %d",
                       p.size, p.stride, p.skipped, kV));
        const size_t groups = (p.begin + p.size + kV - 1) / kV - p.begin / kV;
        const unsigned blocks_of_piece = ceil_div(groups, kThreads);
        const size_t stride = p.pieces > 1 ? p.stride : p.size;
        plan.ranges[plan.num_ranges] = {.begin = p.begin,
                                        .size = p.size,
                                        .stride = stride,
                                        .skipped = p.skipped,
                                        .first_block = blocks,
                                        .blocks = blocks_of_piece,
                                        .decay = p.decay ? hyper.weight_decay : 0.f};
        plan.num_ranges++;
        blocks += blocks_of_piece * static_cast<unsigned>(p.pieces);
    }
    if (blocks == 0)
        return;
    plan.lr = hyper.lr;
    plan.beta1 = hyper.beta1;
    plan.beta2 = hyper.beta2;
    plan.eps = hyper.eps;
    plan.max_norm = hyper.max_norm;
    plan.correction1 =
        static_cast<float>(1.0 / (1.0 - std::pow(hyper.beta1, static_cast<double>(hyper.step))));
    plan.correction2 =
        static_cast<float>(1.0 / (1.0 - std::pow(hyper.beta2, static_cast<double>(hyper.step))));
    plan.rounding = StochasticRounding(hyper.seed, hyper.step);
    adamw_kernel<<<blocks, kThreads, 0, dev.stream>>>(params, master, m, v, grads, norm, plan);
    LAUNCH_CHECK("adamw_kernel");
}

template void adamw_update(const Cuda&, float*, float*, float*, float*, const float*, const float*,
                           const ParamRange*, int, const AdamW&);
template void adamw_update(const Cuda&, bf16*, float*, float*, float*, const float*, const float*,
                           const ParamRange*, int, const AdamW&);
