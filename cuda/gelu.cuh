// GELU and its derivative for one value, for the kernels that have it in registers. The maths is in gelu.cu.
#pragma once
#include "cuda/ptx_sm80.cuh"  // exp2_approx, kLog2e, reciprocal_approx

// 2u = x·(a + b x²)
constexpr float kGeluA = 1.5957691216057308f;  // 2·√(2/π)
constexpr float kGeluB = kGeluA * 0.044715f;

// σ(2u) = 1/(1 + 2^(−2u·log2 e)), so that gelu(x) = x·σ.
__device__ inline float gelu_sigmoid(float x) {
    return reciprocal_approx(1.f + exp2_approx(x * fmaf(x * x, -kGeluB * kLog2e, -kGeluA * kLog2e)));
}
// gelu'(x), given σ(2u) and gelu(x): σ + x·σ·(1 − σ)·2u'.
__device__ inline float gelu_derivative(float x, float sigmoid, float gelu) {
    return fmaf(fmaf(-gelu, sigmoid, gelu), fmaf(x * x, 3.f * kGeluB, kGeluA), sigmoid);
}
