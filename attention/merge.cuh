// The merge of the partial form. A row has seen keys, with result o and lse. A block shows it more, with o_b and lse_b.
//
//   o ← o − σ(lse_b − lse)(o − o_b);   lse ← log(exp lse + exp lse_b)
//
// The running lse is fp64. At lse = 9 rounding to fp32 changes it by up to 5e-7. The merge weight and all of the row's
// P in backward get that as a relative error. It is several times fp32's own, and every merge would add it anew.
#pragma once
#include <cmath>

// log x for any x > 0, as exact as fp32's logarithm is near 1.
__device__ inline double log_of(float x) {
    int exponent;
    const float mantissa = frexpf(x, &exponent);
    return exponent * M_LN2 + logf(mantissa);
}

struct Merge {
    float weight;  // σ(lse_b − lse)
    double lse;    // merged
};
// lse may be −∞, but lse_b must not.
__device__ inline Merge merge(double lse, double lse_b) {
    const float apart = static_cast<float>(lse - lse_b);
    return {1.f / (1.f + expf(apart)), fmax(lse, lse_b) + log1pf(expf(-fabsf(apart)))};
}
