// The logarithm with which lse is more exact than fp32. What rounding lse to fp32 loses, an fp32
// kernel keeps in lse_rest.
#pragma once
#include <cmath>

// log x for any x > 0, as exact as fp32's logarithm is near 1.
__device__ inline double precise_log(float x) {
    int exponent;
    const float mantissa = frexpf(x, &exponent);
    return exponent * M_LN2 + logf(mantissa);
}
