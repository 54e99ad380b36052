// bf16 matmuls for Hopper that have the activation f (cuda/activation.cuh) or the exponentials of a
// softmax in their epilogue (matmul_block.cuh). The former require matmul_sm90_supports(), the
// latter Cuda::sm90a. Matrices and scratch must be aligned to 16 bytes, bias to 4. N must fit into
// an int.
#pragma once
#include "cuda/cuda.h"

// The sizes of a product (N,K)·(K,columns). Forward is the layer before f: K inputs, columns
// outputs. Backward is the gradient of the inputs of the layer after f, continued through f: K
// outputs, columns inputs. In GPT-2's MLP both have K = C and columns = 4C.
struct Sm90Product {
    size_t N = 0;
    int K = 0;
    int columns = 0;
};
bool matmul_sm90_supports(const Cuda& dev, const Sm90Product& product);

// Writes pre (N,columns) = inp (N,K)·weight (columns,K)ᵀ + bias, out = f(pre).
struct Sm90ForwardOperands {
    bf16* out = nullptr;
    bf16* pre = nullptr;
    const bf16* inp = nullptr;
    const bf16* weight = nullptr;
    const bf16* bias = nullptr;
};
void matmul_sm90_activation_forward(const Cuda& dev, const Sm90Product& product,
                                    const Sm90ForwardOperands& o);

// Writes dpre (N,columns) = (dout (N,K)·weight (K,columns))∘f'(pre) and adds its column sums to
// dpre_sum. Also writes out = f(pre), unless out is null. Needs matmul_sm90_scratch_bytes() of
// scratch.
struct Sm90BackwardOperands {
    bf16* dpre = nullptr;
    float* dpre_sum = nullptr;
    bf16* out = nullptr;
    void* scratch = nullptr;
    const bf16* dout = nullptr;
    const bf16* weight = nullptr;
    const bf16* pre = nullptr;
};
void matmul_sm90_activation_backward(const Cuda& dev, const Sm90Product& product,
                                     const Sm90BackwardOperands& o);
size_t matmul_sm90_scratch_bytes(const Sm90Product& product);

// With x = inp (N,K)·weight (columns,K)ᵀ, writes
//
//   out[n][c]  = exp(x[n][c] − shift of row n), or 0 if c = targets[n] or c ≥ V
//   sums[t][n] = Σ_c out[n][c] before it is rounded, over the kSm90Columns columns c of tile t
//
// out (N,columns) may be null, and then only sums (⌈columns/kSm90Columns⌉,N) is written. shifts (N)
// holds the rows' shifts times log2 e. Limits: N ≥ 1; K must be a multiple of 64, and columns of 8.
constexpr int kSm90Columns = 256;  // of a block's tile
struct Sm90ExponentialOperands {
    bf16* out = nullptr;
    float* sums = nullptr;
    const bf16* inp = nullptr;
    const bf16* weight = nullptr;
    const float* shifts = nullptr;
    const int* targets = nullptr;
    int V = 0;
};
void matmul_sm90_exponentials(const Cuda& dev, const Sm90Product& product,
                              const Sm90ExponentialOperands& o);
