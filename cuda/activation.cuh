// The activation function f of the MLP and its derivative, for kernels that have x in registers. It
// is GELU in its tanh form (Hendrycks & Gimpel 2016), as GPT-2 was trained with:
//
//   f(x)  = x/2 · (1 + tanh u),   u = √(2/π)·(x + 0.044715 x³)
//         = x·σ(2u)               since (1 + tanh u)/2 = σ(2u) = 1/(1 + e^{−2u})
//   f'(x) = σ(2u) + x·σ(2u)·(1 − σ(2u))·2u',   u' = √(2/π)·(1 + 3·0.044715 x²)
//
// The sigmoid form needs one exponential and one reciprocal, and it does not cancel for negative x,
// so the fast hardware versions of both (relative error about 1e-6) are accurate enough.
//
// To train with another activation, change this file, the formula in layers/cpu/reference.cpp (the
// oracle of the tests, which is why it has its own) and the name in scripts/hf.py. Nothing else
// needs to change for a run. For comparisons with PyTorch, change its name in
// dev/common/torch_gpt2.py, too.
#pragma once
#include "cuda/ptx_sm80.cuh"  // exp2_approx, kLog2e, reciprocal_approx

constexpr const char* kActivationName = "gelu";  // in the tables of benchmarks

// cuBLASLt has only one activation that also stores its argument, which backward needs: this form
// of GELU. If this is true, bf16 matmuls use it as their epilogue; if it is false, a kernel of our
// own follows the matmul. test_layers fails if it is true and f is something else.
constexpr bool kActivationIsCublasGelu = true;

// f and f' at x. They have most of their work in common, which the constructor does once.
class Activation {
  public:
    __device__ explicit Activation(float x)
        : x_(x), sigmoid_(sigmoid_of_2u(x)), value_(x * sigmoid_) {}

    __device__ float value() const { return value_; }  // f(x)

    __device__ float derivative() const {  // f'(x)
        const float x_s_1_minus_s = fmaf(-value_, sigmoid_, value_);
        const float two_du = fmaf(x_ * x_, 3.f * kB, kA);  // 2u'
        return fmaf(x_s_1_minus_s, two_du, sigmoid_);
    }

  private:
    // 2u = x·(a + b x²)
    static constexpr float kA = 1.5957691216057308f;  // 2·√(2/π)
    static constexpr float kB = kA * 0.044715f;

    __device__ static float sigmoid_of_2u(float x) {  // 1/(1 + 2^(−2u·log2 e))
        return reciprocal_approx(1.f + exp2_approx(x * fmaf(x * x, -kB * kLog2e, -kA * kLog2e)));
    }

    float x_;
    float sigmoid_;  // σ(2u)
    float value_;
};
