// Our own matmuls for Hopper, with GELU or softmax in the same kernel (see matmul_block.cuh). Those with GELU need
// matmul_sm90_takes() to be true, the other cc 9.0 (Cuda::sm90a), and all of them pointers aligned to 16 bytes.
#pragma once
#include "cuda/cuda.h"

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

// For each row of x = inp (N,K)·weight (OC,K)ᵀ writes exp(x − shift) to out (N,OC), unless out is null, and its sums over
// each kSm90Columns columns to sums (⌈OC/kSm90Columns⌉,N). shifts (N) are times log2 e. The row's target and columns from
// V on get 0 and are not in the sums. N ≥ 1, K a multiple of 64, OC of 8.
constexpr int kSm90Columns = 256;  // of a block's tile
void matmul_sm90_exponentials(const Cuda& dev, bf16* out, float* sums, const bf16* inp, const bf16* weight,
                              const float* shifts, const int* targets, size_t N, int K, int V, int OC);
