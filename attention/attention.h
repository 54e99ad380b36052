// The attention contract.
//
//   S = scale·Q Kᵀ,  masked where the query's position < the key's;  P = softmax S;  out = P V;  lse = log Σ exp S
//
// Shapes: B batch, T tokens, NH heads, HS head size (64 or 128), C = NH·HS; row-major device memory.
//   qkv   (B, T, 3, NH, HS)  X     the packed output of the QKV matmul, read through strides
//   out   (B, T, NH, HS)     X
//   lse   (B, NH, T)         fp32  L = m + log l, kept per layer for backward
//   D     (B, NH, T)         fp32  rowsum(dout∘out), lives in scratch
// X is float or bf16; all accumulation is fp32. Any T ≥ 1. Results are bit-identical from run to run.
//
// Each kernel comes in two forms. The whole form is what a layer calls. The block form runs queries of one block against
// keys and values of another, each with its global offset, and carries its state in fp32: what chunked and ring
// attention are made of (its types, Heads and BlockShape, are in layers/types.h). Flash kernels allocate nothing of size
// T². Unsupported shapes throw Error from the launcher.
#pragma once
#include "layers/cuda.h"
#include "layers/types.h"

struct AttentionShape {
    int B, T, NH, HS;
    bool causal = true;
    float scale = 0.f;  // 0: 1/√HS
    float resolved_scale() const { return scale != 0.f ? scale : 1.f / sqrtf(static_cast<float>(HS)); }
};

// One row of the ladder. Table-driven so that tests and benchmarks run every kernel there is.
template <class X>
struct AttentionKernel {
    const char* name;  // its file's name: "naive", "flash_fp32", …
    int min_sm;        // compute capability ×10: runs there and on later ones, but wgmma (90) is of 9.0 alone
    bool runs_on(const Cuda& dev) const { return min_sm == 90 ? dev.sm90a : dev.sm >= min_sm; }
    bool flash;  // no T×T buffer

    // Bytes that forward leaves in `att` for backward, per layer (0 for flash), and scratch for either pass.
    size_t (*saved_bytes)(const AttentionShape&);
    size_t (*scratch_bytes)(const AttentionShape&);

    // Writes out, lse and (naive) att.
    void (*forward)(const Cuda&, X* out, float* lse, X* att, void* scratch, const X* qkv, const AttentionShape&);
    // Writes dqkv, every element. Clears whatever of scratch it accumulates into.
    void (*backward)(const Cuda&, X* dqkv, void* scratch, const X* dout, const X* out, const float* lse, const X* att,
                     const X* qkv, const AttentionShape&);

    // Block form; null where a kernel has none (naive).
    // Reads and updates the running state o_acc (B,Tq,NH,HS) fp32 and lse (B,NH,Tq) fp64 (why: merge.cuh) by the stable
    // merge
    //   o ← o − σ(lse_b − lse)(o − o_b);  lse ← logaddexp(lse, lse_b)
    // where a row that has seen no key yet has lse = −inf. Its o is not read: it is written with the row's first keys.
    void (*forward_block)(const Cuda&, float* o_acc, double* lse, Heads<const X> q, Heads<const X> k, Heads<const X> v,
                          const BlockShape&);
    // Adds into the caller's dk, dv (B,Tk,NH,HS), fp32 and contiguous but for k_rows, or writes them (write_dkv), and adds
    // into dq_sum. lse (B,NH,Tq) is the global one, D (B,NH,Tq) from attention_D. scratch: block_scratch_bytes(shape); that
    // of all queries is enough for any part of them.
    //
    // dq_sum holds what will be dq (B,q_rows,NH,HS), in fp32, in an order and of a scale of the kernel's own: dq_sum_bytes,
    // of which B, q_rows, NH and HS decide; zeros to begin with. After the last block write_dq, whose shape has the blocks'
    // scale, writes dq, rounded, every element.
    void (*backward_block)(const Cuda&, float* dq_sum, float* dk, float* dv, void* scratch, Heads<const X> q,
                           Heads<const X> k, Heads<const X> v, Heads<const X> dout, const float* lse, const float* D,
                           const BlockShape&);
    size_t (*block_scratch_bytes)(const BlockShape&);
    size_t (*dq_sum_bytes)(const BlockShape&);
    void (*write_dq)(const Cuda&, Heads<X> dq, const float* dq_sum, const BlockShape&);
};

// All kernels for X, slowest first, and the one that the trainer uses for `kind` on this GPU (throws if there is none).
template <class X>
struct AttentionKernels {
    const AttentionKernel<X>* begin;
    int count;
};
template <class X>
AttentionKernels<X> attention_kernels();
template <class X>
const AttentionKernel<X>& attention_kernel(const Cuda& dev, Attention kind, int HS);

// Defined in the kernels' files.
extern const AttentionKernel<float> naive_fp32, flash_fp32, flash_fp16x3;
extern const AttentionKernel<bf16> naive_bf16, flash_bf16, flash_bf16_sm90;

// Helpers of the block form (attention.cu).
// lse = −inf, o = 0; o_acc is null where every row will see a key.
void attention_clear_state(const Cuda& dev, float* o_acc, double* lse, const BlockShape&);
template <class X>  // writes D (B,NH,T) = rowsum(dout∘out); dout, out (B,T,NH,HS) contiguous
void attention_D(const Cuda& dev, float* D, const X* dout, const X* out, int B, int T, int NH, int HS);
template <class X>  // writes dst = X(src), n elements: the one rounding, at the end
void attention_round(const Cuda& dev, X* dst, const float* src, size_t n);
// dq_sum_bytes and write_dq of kernels whose dq_sum is rows, (B,q_rows,NH,HS) (blocks.cu).
size_t dq_rows_bytes(const BlockShape&);
template <class X>
void write_dq_rows(const Cuda& dev, Heads<X> dq, const float* dq_sum, const BlockShape&);
