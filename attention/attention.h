// The attention contract.
//
//   S = scale·Q Kᵀ,  masked where the query's position < the key's;  P = softmax S;  out = P V;  lse = log Σ exp S
//
// Shapes: B batch, T tokens, NH heads, HS head size (64 or 128), C = NH·HS, all in row-major device memory.
//   qkv   (B, T, 3, NH, HS)  X     the packed output of the QKV matmul, read through strides
//   out   (B, T, NH, HS)     X
//   lse   (B, NH, T)         fp32  L = m + log l, kept per layer for backward
//   D     (B, NH, T)         fp32  rowsum(dout∘out), lives in scratch
// X is float or bf16. All accumulation is fp32. Any T ≥ 1. Results are bit-identical from run to run.
//
// Chunks and rings call kernels for parts of a sequence: attention/partial.h. Flash kernels allocate nothing of size T².
// A launcher throws Error for unsupported shapes.
#pragma once
#include "layers/gpu/cuda.h"
#include "layers/gpu/types.h"

// The layer: softmax(scale·QKᵀ)V, causal, scale = 1/√HS. attention.cu chooses the kernel.

// Writes out (B,T,C) and lse (B,NH,T). Only naive uses att, attention_saved_bytes() that it fills for backward. Needs
// attention_scratch_bytes() of scratch, as backward does.
template <class X>
void attention_forward(const Cuda& dev, Attention kind, X* out, float* lse, X* att, void* scratch, const X* qkv, int B,
                       int T, int NH, int HS);

// Writes dqkv (B,T,3,NH,HS). Reads out, lse and att as forward left them. Deterministic. A call may have some of
// a model's heads, from first_head of all_heads on. A flash kernel writes the bits of a call with all of them.
template <class X>
void attention_backward(const Cuda& dev, Attention kind, X* dqkv, void* scratch, const X* dout, const X* out,
                        const float* lse, const X* att, const X* qkv, int B, int T, int NH, int HS, int first_head = 0,
                        int all_heads = 0);
template <class X>
size_t attention_scratch_bytes(const Cuda& dev, Attention kind, int B, int T, int NH, int HS);
// Writes out (C) in fp32, the last row's attention over all rows of qkv (T,3,NH,HS). Serves every `kind`, and all head
// sizes that naive has (last_row.cu).
template <class X>
void attention_last_row(const Cuda& dev, float* out, const X* qkv, int T, int NH, int HS);
template <class X>
size_t attention_saved_bytes(const Cuda& dev, Attention kind, int B, int T, int NH, int HS);

// ---------------------------------------------------------------------------------------------------------------------
// The kernels behind it

struct AttentionShape {
    int B, T, NH, HS;
    bool causal = true;
    float scale = 0.f;                  // 0: 1/√HS
    int first_head = 0, all_heads = 0;  // of a model, if the call has some of its heads
    float resolved_scale() const { return scale != 0.f ? scale : 1.f / sqrtf(static_cast<float>(HS)); }
};

template <class X>
struct PartialForm;

// One row of the ladder. Table-driven so that tests and benchmarks run every kernel there is.
template <class X>
struct AttentionKernel {
    const char* name;  // its file's name: "naive", "flash_fp32", …
    int min_sm;        // compute capability ×10. Runs there and on later ones, but 90 means wgmma, which only 9.0 has
    bool runs_on(const Cuda& dev) const { return min_sm == 90 ? dev.sm90a : dev.sm >= min_sm; }
    bool flash;  // no T×T buffer

    // Bytes that forward leaves in `att` for backward, per layer (0 for flash), and scratch bytes for either pass.
    size_t (*saved_bytes)(const AttentionShape&);
    size_t (*scratch_bytes)(const AttentionShape&);

    // Writes out, lse and (naive) att.
    void (*forward)(const Cuda&, X* out, float* lse, X* att, void* scratch, const X* qkv, const AttentionShape&);
    // Writes every element of dqkv. Clears what it accumulates into in scratch. Null in a kernel that has only forward.
    // Such a kernel can generate and evaluate, and the trainer refuses to train with it.
    void (*backward)(const Cuda&, X* dqkv, void* scratch, const X* dout, const X* out, const float* lse, const X* att,
                     const X* qkv, const AttentionShape&) = nullptr;
    const PartialForm<X>* partial = nullptr;  // naive, and the rungs that teach one idea, have none
};

// All kernels for X, slowest first.
template <class X>
struct AttentionKernels {
    const AttentionKernel<X>* begin;
    int count;
};
template <class X>
AttentionKernels<X> attention_kernels();
// The one that `kind` names, where flash is the fastest that this GPU can run. Throws Error if X, the GPU or HS does
// not fit.
template <class X>
const AttentionKernel<X>& attention_kernel(const Cuda& dev, Attention kind, int HS);
// Throws Error too if the kernel lacks what a model needs. Training needs backward, --context-parallel the partial form.
template <class X>
void check_attention(const Cuda& dev, Attention kind, int HS, bool training, bool context_parallel);
// What --attention accepts: "flash|naive|…", all names of both tables.
const char* attention_names();

// Defined in the kernels' files.
extern const AttentionKernel<float> naive_fp32, flash_simple, flash_fp32, flash_fp16x3;
extern const AttentionKernel<bf16> naive_bf16, flash_mma, flash_bf16, flash_wgmma, flash_bf16_sm90;
