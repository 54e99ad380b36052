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
// One launch updates all ranges and their pieces. A thread updates four consecutive elements, which
// are 16 bytes of every fp32 array. The kernel is memory-bound, with 28 (fp32) or 30 (bf16) bytes
// per element.
//
// Writes: params.  Updates in place: master, m, v.
// Limits: at most 32 ranges. params must be aligned to 4·sizeof(X) bytes, the fp32 arrays to 16. A
// range may begin anywhere, but its `skipped` must be a multiple of 4, and if it has several
// pieces, so must their size and stride.
#include <cmath>

#include "cuda/stochastic_rounding.cuh"
#include "cuda/vector.cuh"
#include "layers/layers.h"

namespace {

constexpr int kThreads = 256;
constexpr int kMaxRanges = 32;
constexpr int kGroup = StochasticRounding::kGroup;  // elements per thread: 4

// Everything that the kernel needs besides pointers, passed by value.
struct Plan {
    struct Range {  // begin, size, stride and skipped are as in ParamRange (common/types.h)
        size_t begin;
        size_t size;
        size_t stride;
        size_t skipped;
        unsigned first_block;
        unsigned blocks_per_piece;
        float decay;
    };

    Range ranges[kMaxRanges];
    int num_ranges;
    float lr;
    float beta1;
    float beta2;
    float eps;
    float max_norm;
    float inverse_bias_correction1;  // 1/(1 − β₁ᵗ)
    float inverse_bias_correction2;  // 1/(1 − β₂ᵗ)
    StochasticRounding rounding;
};

// One element's update. Updates m and v, and returns the new p.
__device__ inline float update(float p, float& m, float& v, float g, float decay,
                               const Plan& plan) {
    m = plan.beta1 * m + (1.f - plan.beta1) * g;
    v = plan.beta2 * v + (1.f - plan.beta2) * g * g;
    const float m_hat = m * plan.inverse_bias_correction1;
    const float v_hat = v * plan.inverse_bias_correction2;
    return p - plan.lr * (m_hat * reciprocal_approx(sqrt_approx(v_hat) + plan.eps) + decay * p);
}

// Updates the V elements from parameter i on, whose gradients, m and v start at s. V is kGroup, or
// 1 in a group that the range shares with its neighbours.
template <int V, class X>
__device__ inline void update_elements(size_t i, size_t s, X* params, float* master, float* m,
                                       float* v, const float* grads, float clip, float decay,
                                       const Plan& plan) {
    // If X is float, master is params, and so are its indices.
    const size_t master_index = std::is_same_v<X, float> ? i : s;
    auto new_p = load<V>(master + master_index);
    auto new_m = load<V>(m + s);
    auto new_v = load<V>(v + s);
    const auto g = load<V>(grads + s);

    for (int k = 0; k < V; k++)
        new_p.x[k] = update(new_p[k], new_m.x[k], new_v.x[k], clip * g[k], decay, plan);

    store(master + master_index, new_p);
    store(m + s, new_m);
    store(v + s, new_v);
    if constexpr (std::is_same_v<X, bf16>)
        store(params + i, plan.rounding.round(new_p, i));
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
    // A range of one piece, as on a single GPU, is spared the division.
    if (block >= range.blocks_per_piece) {
        piece = block / range.blocks_per_piece;
        block %= range.blocks_per_piece;
    }
    const size_t begin = range.begin + piece * range.stride;
    const size_t end = begin + range.size;
    const size_t skipped = range.skipped + piece * (range.stride - range.size);
    const float decay = range.decay;

    // The thread's group starts at parameter i, aligned in the arena, not relative to the range,
    // and at element s of gradients and optimizer state. s is computed in groups, because from
    // i − skipped nvcc 13.0 no longer recognises that 16 bytes can be stored at once.
    const size_t group = begin / kGroup + static_cast<size_t>(block) * kThreads + threadIdx.x;
    const size_t i = group * kGroup;
    const size_t s = (group - skipped / kGroup) * kGroup;
    if (i >= begin && i + kGroup <= end) {
        update_elements<kGroup>(i, s, params, master, m, v, grads, clip, decay, plan);
    } else {
        for (size_t k = 0; k < kGroup; k++)
            if (i + k >= begin && i + k < end)
                update_elements<1>(i + k, s + k, params, master, m, v, grads, clip, decay, plan);
    }
}

}  // namespace

// -------------------------------------------------------------------------------------------------

static void check_range(const ParamRange& p) {
    const bool several = p.pieces > 1;
    if (p.skipped % kGroup != 0 ||
        (several && (p.size % kGroup != 0 || p.stride % kGroup != 0 || p.stride < p.size)))
        throw Error(format(
            "adamw_update: a range skips %zu elements and has pieces of %zu, %zu apart; what it skips "
            "must be a multiple of %d, and so must the others if there are several pieces, which "
            "must not overlap",
            p.skipped, p.size, p.stride, kGroup));
}

// 1/(1 − βᵗ), in double, because 1 − βᵗ cancels for small t.
static float inverse_bias_correction(float beta, int step) {
    return static_cast<float>(1.0 / (1.0 - std::pow(beta, static_cast<double>(step))));
}

template <class X>
void adamw_update(const Cuda& dev, X* params, float* master, float* m, float* v, const float* grads,
                  const float* norm, const ParamRange* ranges, int num_ranges, const AdamW& hyper) {
    if constexpr (std::is_same_v<X, float>)
        master = params;

    if (num_ranges < 0 || num_ranges > kMaxRanges)
        throw Error(format("adamw_update: %d parameter ranges, expected at most %d", num_ranges,
                           kMaxRanges));
    // With rows of 0 elements, vectorises() checks only the pointers.
    if (!vectorises<float>(0, master, m, v, grads) ||
        reinterpret_cast<uintptr_t>(params) % (kGroup * sizeof(X)) != 0)
        throw Error(
            format("adamw_update: fp32 arrays must be aligned to 16 bytes, and params to %zu",
                   kGroup * sizeof(X)));
    if (hyper.step < 1)
        throw Error(format("adamw_update: the step is %d, but steps count from 1", hyper.step));

    Plan plan = {};
    unsigned blocks = 0;
    for (int r = 0; r < num_ranges; r++) {
        const ParamRange& p = ranges[r];
        if (p.size == 0 || p.pieces == 0)
            continue;

        check_range(p);
        const size_t first_group = p.begin / kGroup;
        const size_t end_group = (p.begin + p.size + kGroup - 1) / kGroup;
        const unsigned blocks_per_piece = ceil_div(end_group - first_group, kThreads);
        const size_t stride = p.pieces > 1 ? p.stride : p.size;
        plan.ranges[plan.num_ranges] = {.begin = p.begin,
                                        .size = p.size,
                                        .stride = stride,
                                        .skipped = p.skipped,
                                        .first_block = blocks,
                                        .blocks_per_piece = blocks_per_piece,
                                        .decay = p.decay ? hyper.weight_decay : 0.f};
        plan.num_ranges++;
        blocks += blocks_per_piece * static_cast<unsigned>(p.pieces);
    }
    if (blocks == 0)
        return;

    plan.lr = hyper.lr;
    plan.beta1 = hyper.beta1;
    plan.beta2 = hyper.beta2;
    plan.eps = hyper.eps;
    plan.max_norm = hyper.max_norm;
    plan.inverse_bias_correction1 = inverse_bias_correction(hyper.beta1, hyper.step);
    plan.inverse_bias_correction2 = inverse_bias_correction(hyper.beta2, hyper.step);
    plan.rounding = StochasticRounding(hyper.seed, hyper.step);
    adamw_kernel<<<blocks, kThreads, 0, dev.stream>>>(params, master, m, v, grads, norm, plan);
    LAUNCH_CHECK("adamw_kernel");
}

template void adamw_update(const Cuda&, float*, float*, float*, float*, const float*, const float*,
                           const ParamRange*, int, const AdamW&);
template void adamw_update(const Cuda&, bf16*, float*, float*, float*, const float*, const float*,
                           const ParamRange*, int, const AdamW&);
