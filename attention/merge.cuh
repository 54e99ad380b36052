// The merge of the block form: a row has seen keys, with result o and lse, and a block shows it more, with o_b and lse_b.
//
//   o ← o − σ(lse_b − lse)(o − o_b);   lse ← log(exp lse + exp lse_b)
//
// The running lse is fp64. At lse = 9 a rounding to fp32 is 5e-7, and that is the relative error of the weight and of all
// of the row's P in backward: it would come anew with every merge and be several times fp32's own.
#pragma once
#include <cmath>

// log x, as exact as fp32's logarithm of a number near 1.
__device__ inline double log_of(float x) {
    int exponent;
    const float mantissa = frexpf(x, &exponent);
    return exponent * M_LN2 + logf(mantissa);
}

struct Merge {
    float weight;  // σ(lse_b − lse)
    double lse;    // merged
};
// lse may be −∞, lse_b not.
__device__ inline Merge merge(double lse, double lse_b) {
    const float apart = static_cast<float>(lse - lse_b);
    return {1.f / (1.f + expf(apart)), fmax(lse, lse_b) + log1pf(expf(-fabsf(apart)))};
}
