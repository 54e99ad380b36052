// Our own matmuls for Hopper, with GELU in the same kernel (see matmul_sm90.cu). layers.h says what they compute. Both
// need matmul_sm90_takes() to be true, and pointers aligned to 16 bytes.
#pragma once
#include "layers/gpu/cuda.h"

// K is the inner dimension, OC the columns of the result.
bool matmul_sm90_takes(const Cuda& dev, int K, int OC);

// Writes pre (N,OC) = inp (N,K)·weight (OC,K)ᵀ + bias, out = gelu(pre).
void matmul_sm90_gelu_forward(const Cuda& dev, bf16* out, bf16* pre, const bf16* inp, const bf16* weight,
                              const bf16* bias, size_t N, int K, int OC);

// Writes dpre (N,OC) = (dout (N,K)·weight (K,OC))∘gelu'(pre) and adds its sum over rows into dpre_sum. Also writes out
// = gelu(pre), unless out is null. Needs matmul_sm90_scratch_bytes() of scratch.
void matmul_sm90_gelu_backward(const Cuda& dev, bf16* dpre, float* dpre_sum, bf16* out, void* scratch, const bf16* dout,
                               const bf16* weight, const bf16* pre, size_t N, int K, int OC);
size_t matmul_sm90_scratch_bytes(size_t N, int OC);
