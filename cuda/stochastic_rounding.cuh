// Stochastic rounding of fp32 to bf16, for an optimizer that keeps fp32 masters of bf16 parameters.
//
// A number is rounded up with a probability equal to the fraction that truncation would drop, so
// its expectation is the master. The random bits are a hash of (seed, step, index of the element),
// so they need no state, and they are the same on every run and on whichever rank updates the
// element.
#pragma once
#include "common/random.h"
#include "cuda/vector.cuh"

// bf16 is the upper half of fp32, so adding 16 random bits to the lower half carries with exactly
// the right probability.
__device__ inline bf16 round_stochastically(float x, unsigned random16) {
    if (!isfinite(x))
        return __float2bfloat16_rn(x);
    return __ushort_as_bfloat16(static_cast<unsigned short>((__float_as_uint(x) + random16) >> 16));
}

// The rounding of one step. A kernel takes it by value.
class StochasticRounding {
  public:
    static constexpr int kGroup = 4;  // consecutive elements that share a hash, 16 bits each

    StochasticRounding() = default;
    StochasticRounding(uint64_t seed, int step)
        : key_(mix64(seed + kGolden * static_cast<uint64_t>(step))) {}

    // Rounds elements i to i + V − 1, all of one group: V is kGroup or 1.
    template <int V>
    __device__ Vec<bf16, V> round(const Vec<float, V>& x, size_t i) const {
        static_assert(V == kGroup || V == 1);
        const uint64_t random = mix64(key_ + (i / kGroup) * kGolden);
        Vec<bf16, V> rounded;
        for (int k = 0; k < V; k++) {
            const unsigned bits = static_cast<unsigned>(random >> (16 * ((i + k) % kGroup)));
            rounded.x[k] = round_stochastically(x[k], bits & 0xffffu);
        }
        return rounded;
    }

  private:
    uint64_t key_ = 0;
};
