// Matmuls of ours for Hopper, with what follows them in the same kernel: see matmul_sm90.cu. Both need
// matmul_sm90_takes() for their shape and pointers; layers.h says what they compute.
#pragma once
#include <initializer_list>

#include "layers/cuda.h"

// K inner dimension, OC columns of the result; pointers: all that the call reads and writes.
bool matmul_sm90_takes(const Cuda& dev, int K, int OC, std::initializer_list<const void*> pointers);

// Writes pre (N,OC) = inp (N,K)·weight (OC,K)ᵀ + bias, out = gelu(pre).
void matmul_sm90_gelu_forward(const Cuda& dev, bf16* out, bf16* pre, const bf16* inp, const bf16* weight,
                              const bf16* bias, size_t N, int K, int OC);

// Writes dpre (N,OC) = (dout (N,K)·weight (K,OC))∘gelu'(pre), adds its sum over rows into dpre_sum, and writes
// out = gelu(pre) (null: not wanted).
void matmul_sm90_gelu_backward(const Cuda& dev, bf16* dpre, float* dpre_sum, bf16* out, void* scratch, const bf16* dout,
                               const bf16* weight, const bf16* pre, size_t N, int K, int OC);
size_t matmul_sm90_scratch_bytes(size_t N, int OC);
