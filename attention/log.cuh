// The logarithm by which lse is computed more precisely than fp32 can hold it. The rounding error
// of lse is what the fp32 kernels write to lse_rest.
#pragma once
#include <cmath>

// log x for any x > 0, with the absolute error that fp32's logarithm has near 1.
__device__ inline double precise_log(float x) {
    int exponent;
    const float mantissa = frexpf(x, &exponent);
    return exponent * M_LN2 + logf(mantissa);
}
