// The attention contract. call.h defines a call, and this header lists the kernels.
//
// X is float or bf16. All accumulation is fp32. Any T ≥ 1. Results are bit-identical from run to
// run. Flash kernels allocate nothing of size T². A call that a kernel does not support throws
// Error.
#pragma once
#include "attention/call.h"
#include "cuda/cuda.h"

// The layer: softmax(scale·QKᵀ)V, causal, scale = 1/√HS. attention.cu chooses the kernel.

// Writes out (B,Tq,NH,HS) and lse (B,NH,Tq) of the last Tq tokens of qkv (B,Tk,3,NH,HS). Only naive
// uses att, of attention_saved_bytes(): it leaves P there for backward.
template <class X>
void attention_forward(const Cuda& dev, Attention kind, X* out, float* lse, X* att, const X* qkv,
                       int B, int Tq, int Tk, int NH, int HS);

// Writes dqkv (B,T,3,NH,HS). Reads out, lse and att as forward left them. scratch has
// attention_scratch_bytes().
template <class X>
void attention_backward(const Cuda& dev, Attention kind, X* dqkv, void* scratch, const X* dout,
                        const X* out, const float* lse, const X* att, const X* qkv, int B, int T,
                        int NH, int HS);

template <class X>
size_t attention_scratch_bytes(const Cuda& dev, Attention kind, const AttentionShape& shape);
template <class X>
size_t attention_saved_bytes(const Cuda& dev, Attention kind, const AttentionShape& shape);

// Calls whose results are fp32, for sequences in pieces (attention/ring).
template <class X>
void attention_forward(const Cuda& dev, Attention kind, const AttentionForward<X, float>& call);
template <class X>
void attention_backward(const Cuda& dev, Attention kind, const AttentionBackward<X, float>& call);

// -------------------------------------------------------------------------------------------------
// The kernels

// A rung of the ladder. Tests and benchmarks run every kernel in the table. A kernel's file leaves
// out the fields that the kernel does not need.
template <class X>
struct AttentionKernel {
    const char* name;  // its file's name: "naive", "flash_fp32", …
    int min_sm;        // compute capability ×10; runs on later ones too, unless it needs wgmma
    bool flash;        // no T×T buffer
    AttentionSupport supports = {};

    // Bytes that forward saves in `att` for backward, per layer, and bytes of backward's scratch. A
    // size that is enough without a mask is also enough with one, and for fewer queries or keys.
    size_t (*saved_bytes)(const AttentionShape&) = no_bytes;
    size_t (*scratch_bytes)(const AttentionShape&) = no_bytes;

    // The launchers. They trust their call, so only the functions below call them.
    struct {
        void (*forward)(const Cuda&, const AttentionForward<X>&);
        // Null in a kernel that has only forward. Such a kernel can generate and evaluate, and the
        // trainer refuses to train with it.
        void (*backward)(const Cuda&, const AttentionBackward<X>&) = nullptr;

        // The same with results in fp32, for sequences in pieces. A kernel has both if it supports
        // pieces, and else neither.
        void (*forward_fp32)(const Cuda&, const AttentionForward<X, float>&) = nullptr;
        void (*backward_fp32)(const Cuda&, const AttentionBackward<X, float>&) = nullptr;
    } unchecked;

    bool needs_wgmma() const { return min_sm == 90; }  // which only 9.0 has
    bool runs_on(const Cuda& dev) const { return needs_wgmma() ? dev.sm90a : dev.sm >= min_sm; }
    bool has_backward() const { return unchecked.backward != nullptr; }
    AttentionLimits limits() const {
        return {.name = name,
                .alignment = 16,
                .supports = supports,
                .saved_bytes = saved_bytes,
                .scratch_bytes = scratch_bytes};
    }

    // These throw Error unless the kernel supports the call (check_call).
    void forward(const Cuda& dev, const AttentionForward<X>& c) const {
        run(unchecked.forward, "forward", dev, c);
    }
    void backward(const Cuda& dev, const AttentionBackward<X>& c) const {
        run(unchecked.backward, "backward", dev, c);
    }
    void forward_fp32(const Cuda& dev, const AttentionForward<X, float>& c) const {
        run(unchecked.forward_fp32, "forward with fp32 results", dev, c);
    }
    void backward_fp32(const Cuda& dev, const AttentionBackward<X, float>& c) const {
        run(unchecked.backward_fp32, "backward with fp32 results", dev, c);
    }
    template <class Call>
    void run(void (*launcher)(const Cuda&, const Call&), const char* pass, const Cuda& dev,
             const Call& c) const {
        if (!launcher)
            throw Error(format("attention: %s has no %s; use --attention flash", name, pass));
        check_call(limits(), c);
        launcher(dev, c);
    }
};

// All kernels for X, in the order of the ladder.
template <class X>
struct AttentionKernels {
    const AttentionKernel<X>* begin;
    int count;
};
template <class X>
AttentionKernels<X> attention_kernels();

// The kernel that `kind` names, where "flash" is the fastest that this GPU can run. Throws Error if
// the kernel does not support X, the GPU or HS.
template <class X>
const AttentionKernel<X>& attention_kernel(const Cuda& dev, Attention kind, int HS);

// Throws Error where attention_kernel() does, and also if the kernel does not support this use.
template <class X>
void check_attention(const Cuda& dev, Attention kind, int HS, const AttentionUse& use);

// What --attention accepts: "flash|naive|…", all names of both tables.
const char* attention_names();

// Defined in the kernels' files.
extern const AttentionKernel<float> naive_fp32;
extern const AttentionKernel<float> flash_simple;
extern const AttentionKernel<float> flash_fp32;
extern const AttentionKernel<float> flash_fp16x3;
extern const AttentionKernel<bf16> naive_bf16;
extern const AttentionKernel<bf16> flash_mma;
extern const AttentionKernel<bf16> flash_bf16;
extern const AttentionKernel<bf16> flash_wgmma;
extern const AttentionKernel<bf16> flash_bf16_sm90;
