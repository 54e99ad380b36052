// What a call of attention is, on CUDA (attention.h) and on the CPU (layers/cpu/reference.h).
//
//   S   = scale·Q Kᵀ, masked
//   P   = softmax S
//   out = P V
//   lse = log Σ exp S
//
//   D  = rowsum(dO∘out)
//   dS = P∘(dO Vᵀ − D)
//   dQ = scale·dS K
//   dK = scale·dSᵀ Q
//   dV = Pᵀ dO
//
// Shapes: B batch, Tq queries, Tk keys, NH heads, HS head size. Tensors are views (HeadsView), so
// that q, k and v may be parts of the packed output of one matmul. X is the type of the inputs and
// Y that of the results, which is X or Acc<X>, fp32.
//
// Pieces of a sequence. If a query's out and lse are those over all of its keys, then backward over
// only some of the keys writes exactly their share of dq, dk and dv, because P = exp(S − lse) and D
// are those of the whole row. attention/ring builds ring attention from such calls.
#pragma once
#include <initializer_list>

#include "common/error.h"
#include "common/types.h"

// -------------------------------------------------------------------------------------------------
// The call

// The shape of a call. For a part of a sequence, copy the shape of the whole and change the
// lengths; a shape built field by field would miss a field that is added here later.
struct AttentionShape {
    int B;
    int Tq;
    int Tk;
    int NH;
    int HS;
    // If causal, query i sees the keys j ≤ i + Tk − Tq, and Tq ≤ Tk. So the last query sees all
    // keys, and each query sees at least one.
    bool causal = true;
    float scale = 0.f;  // 0: 1/√HS

    float resolved_scale() const {
        return scale != 0.f ? scale : 1.f / sqrtf(static_cast<float>(HS));
    }
    // The same times log2(e), for exponentials that are powers of 2.
    float scale_log2() const { return static_cast<float>(resolved_scale() * M_LOG2E); }

    // Query i sees the keys j ≤ i + shift(). Without a mask that is beyond the last key.
    int shift() const { return causal ? Tk - Tq : Tk; }

    // Rows of S and P, one for each query of each head. A row has one lse.
    size_t rows() const { return size_t(B) * NH * Tq; }

    // The two shapes that a call's tensors have.
    HeadsShape queries() const {  // of q, out, dout and dq
        return {.B = B, .T = Tq, .heads = NH, .HS = HS};
    }
    HeadsShape keys() const {  // of k, v, dk and dv
        return {.B = B, .T = Tk, .heads = NH, .HS = HS};
    }
};

// A number for each row: (B, NH, T) inside a larger tensor. The number of row (b, h, t) is
//   ptr[(b·NH + h)·head_stride + t].
template <class A>
struct RowStatsView {
    A* ptr = nullptr;
    size_t head_stride = 0;  // elements from a head to the next

    // `head` is b·NH + h.
    __host__ __device__ A& at(size_t head, size_t t) const { return ptr[head * head_stride + t]; }

    RowStatsView from(size_t t) const {  // without the first t tokens
        RowStatsView later = *this;
        later.ptr += t;
        return later;
    }
};

// Writes every element of out and lse. lse_rest, unless it is null, receives the rounding error of
// lse, the part that did not fit into fp32. Only the fp32 kernels that work on pieces of a sequence
// support that; the others refuse an lse_rest.
template <class X, class Y = X>
struct AttentionForward {
    AttentionShape s;
    HeadsView<const X> q = {};  // (B, Tq, NH, HS)
    HeadsView<const X> k = {};  // (B, Tk, NH, HS)
    HeadsView<const X> v = {};
    HeadsView<Y> out = {};  // as q
    RowStatsView<Acc<X>> lse = {};
    RowStatsView<Acc<X>> lse_rest = {};
    X* att = nullptr;  // P, saved for backward: saved_bytes(). Only naive uses it
};

// Writes every element of dq, dk and dv, and clears the part of scratch that it accumulates into.
//
// A kernel that supports lse_rest needs it, as forward wrote it, if the call covers only some of
// the keys of its rows. With null it may work the rounding error of lse out by itself, from all
// keys: a row's P must add up to 1. The other kernels refuse an lse_rest here, too.
template <class X, class Y = X>
struct AttentionBackward {
    AttentionShape s;
    HeadsView<const X> q = {};
    HeadsView<const X> k = {};
    HeadsView<const X> v = {};
    HeadsView<const X> dout = {};  // as q
    HeadsView<const X> out = {};
    RowStatsView<const Acc<X>> lse = {};
    RowStatsView<const Acc<X>> lse_rest = {};
    HeadsView<Y> dq = {};  // as q
    HeadsView<Y> dk = {};  // as k
    HeadsView<Y> dv = {};
    void* scratch = nullptr;  // scratch_bytes()
    const X* att = nullptr;   // as forward left it
};

// -------------------------------------------------------------------------------------------------
// Calls of a layer

// A contiguous tensor (B, T, heads, HS).
template <class X>
HeadsView<X> contiguous(X* x, const HeadsShape& s) {
    return {.ptr = x, .batch_stride = s.T * s.C(), .token_stride = s.C()};
}

// q, k and v of one packed tensor. A token has the heads of q, then those of k, then those of v.
template <class X>
struct PackedHeads {
    HeadsView<X> q;
    HeadsView<X> k;
    HeadsView<X> v;
};

// The tensor has T tokens, of which a call may use only some. Of `s` only NH and HS matter.
template <class X>
PackedHeads<X> packed(X* qkv, int T, const AttentionShape& s) {
    const size_t q_width = s.queries().C();
    const size_t k_width = s.keys().C();
    const size_t token = q_width + 2 * k_width;
    const size_t batch = T * token;
    X* const k = qkv + q_width;
    X* const v = k + k_width;
    return {.q = {.ptr = qkv, .batch_stride = batch, .token_stride = token},
            .k = {.ptr = k, .batch_stride = batch, .token_stride = token},
            .v = {.ptr = v, .batch_stride = batch, .token_stride = token}};
}

// Forward of the last Tq tokens of qkv (B, Tk, 3, NH, HS).
template <class X>
AttentionForward<X> layer_forward(X* out, Acc<X>* lse, const X* qkv, const AttentionShape& s) {
    const PackedHeads<const X> in = packed(qkv, s.Tk, s);
    AttentionForward<X> c{s};
    c.q = in.q.from(s.Tk - s.Tq);
    c.k = in.k;
    c.v = in.v;
    c.out = contiguous(out, s.queries());
    c.lse = {lse, size_t(s.Tq)};
    return c;
}

// Backward of whole sequences.
template <class X>
AttentionBackward<X> layer_backward(X* dqkv, const X* dout, const X* out, const Acc<X>* lse,
                                    const X* qkv, const AttentionShape& s) {
    const PackedHeads<const X> in = packed(qkv, s.Tk, s);
    const PackedHeads<X> gradients = packed(dqkv, s.Tk, s);
    AttentionBackward<X> c{s};
    c.q = in.q;
    c.k = in.k;
    c.v = in.v;
    c.dout = contiguous(dout, s.queries());
    c.out = contiguous(out, s.queries());
    c.lse = {lse, size_t(s.Tq)};
    c.dq = gradients.q;
    c.dk = gradients.k;
    c.dv = gradients.v;
    return c;
}

// -------------------------------------------------------------------------------------------------
// Checks. AttentionKernel (attention.h) and the CPU's attention (layers/cpu) pass every call to
// check_call() before a kernel gets it. That costs only a little arithmetic on the host.

// The size of a buffer that an implementation does not use.
inline size_t no_bytes(const AttentionShape&) {
    return 0;
}

// What only some implementations support. check_shape() throws if a call needs what is false here.
struct AttentionSupport {
    bool any_head_size = false;  // head sizes other than 64 and 128
    bool pieces = false;         // backward of some of a sequence's queries or keys
    bool lse_rest = false;       // forward writes it, and backward reads it
};

// Which calls an implementation supports.
struct AttentionLimits {
    const char* name;  // every Error begins with it
    size_t alignment;  // of a head's rows in q, k, v, …, in bytes
    AttentionSupport supports = {};
    size_t (*saved_bytes)(const AttentionShape&) = no_bytes;    // of att
    size_t (*scratch_bytes)(const AttentionShape&) = no_bytes;  // of scratch
};

// What a model uses besides forward.
struct AttentionUse {
    bool training;          // needs backward
    bool context_parallel;  // needs pieces
};

// What a call is besides its shape.
struct CallTraits {
    size_t element_bytes;  // of q
    bool backward;
    bool lse_rest;  // it is given
};

inline void check_shape(const AttentionLimits& limits, const AttentionShape& s,
                        const CallTraits& call) {
    const char* name = limits.name;
    if (s.B < 1 || s.NH < 1 || s.Tq < 1 || s.Tk < 1)
        throw Error(format("%s: B %d, NH %d, Tq %d and Tk %d must all be at least 1", name, s.B,
                           s.NH, s.Tq, s.Tk));
    if (s.causal && s.Tq > s.Tk)
        throw Error(
            format("%s: a causal mask needs Tq ≤ Tk, but Tq is %d and Tk is %d", name, s.Tq, s.Tk));
    if (!(s.resolved_scale() > 0.f))
        throw Error(
            format("%s: the scale is %g, but it must be positive", name, s.resolved_scale()));

    if (!limits.supports.any_head_size && s.HS != 64 && s.HS != 128)
        throw Error(
            format("%s: the head size is %d, but it must be 64 or 128; use --attention naive", name,
                   s.HS));
    if (s.HS < 1 || (s.HS * call.element_bytes) % limits.alignment != 0)
        throw Error(format("%s: the head size is %d, but it must be a multiple of %zu", name, s.HS,
                           limits.alignment / call.element_bytes));

    if (call.backward && !limits.supports.pieces && s.Tq != s.Tk)
        throw Error(format(
            "%s: backward needs whole sequences, but Tq is %d and Tk is %d; use --attention flash",
            name, s.Tq, s.Tk));
    if (call.lse_rest && !limits.supports.lse_rest)
        throw Error(format(
            "%s: lse_rest is given, but only fp32 kernels that can process a part of a sequence "
            "use it; pass null, or use --attention flash in fp32",
            name));
}

// The memory of one of a call's tensors: sequences of rows, each row contiguous. What a row is
// depends on the tensor: all heads of one token in a HeadsView, all tokens of one head in a
// RowStatsView, and the whole of a buffer.
struct CallMemory {
    struct Dimension {
        size_t count = 1;
        size_t stride = 0;  // in bytes
    };
    const char* name;
    bool written;
    const void* ptr;
    size_t alignment;  // in bytes
    size_t row_bytes;  // 0: not part of the call
    Dimension sequences = {};
    Dimension rows = {};  // of a sequence
};

template <class X>
CallMemory memory_of(const char* name, const HeadsView<X>& x, const HeadsShape& s,
                     size_t alignment) {
    return {.name = name,
            .written = !std::is_const_v<X>,
            .ptr = x.ptr,
            .alignment = alignment,
            .row_bytes = s.C() * sizeof(X),
            .sequences = {.count = size_t(s.B), .stride = x.batch_stride * sizeof(X)},
            .rows = {.count = size_t(s.T), .stride = x.token_stride * sizeof(X)}};
}

template <class A>
CallMemory memory_of(const char* name, const RowStatsView<A>& x, const HeadsShape& s) {
    return {.name = name,
            .written = !std::is_const_v<A>,
            .ptr = x.ptr,
            .alignment = sizeof(A),
            .row_bytes = s.T * sizeof(A),  // a head's row has a number for each token
            .rows = {.count = size_t(s.B) * s.heads, .stride = x.head_stride * sizeof(A)}};
}

template <class V>
CallMemory memory_of(const char* name, V* x, size_t bytes) {
    return {.name = name,
            .written = !std::is_const_v<V>,
            .ptr = x,
            .alignment = 16,
            .row_bytes = bytes};
}

inline CallMemory if_given(CallMemory m) {
    if (!m.ptr)
        m.row_bytes = 0;
    return m;
}

// In attention.cu.
void check_memory(const AttentionLimits& limits, std::initializer_list<CallMemory> memory);

// Throws Error unless the call is as this file says and the implementation supports it. An output
// may share no byte with an input or another output, but their rows may be interleaved, as those of
// dq, dk and dv are in one packed tensor.
template <class X, class Y>
void check_call(const AttentionLimits& limits, const AttentionForward<X, Y>& c) {
    const AttentionShape& s = c.s;
    check_shape(
        limits, s,
        {.element_bytes = sizeof(X), .backward = false, .lse_rest = c.lse_rest.ptr != nullptr});

    const HeadsShape queries = s.queries();
    const HeadsShape keys = s.keys();
    const size_t alignment = limits.alignment;
    check_memory(limits, {
                             memory_of("q", c.q, queries, alignment),
                             memory_of("k", c.k, keys, alignment),
                             memory_of("v", c.v, keys, alignment),
                             memory_of("out", c.out, queries, alignment),
                             memory_of("lse", c.lse, queries),
                             if_given(memory_of("lse_rest", c.lse_rest, queries)),
                             memory_of("att", c.att, limits.saved_bytes(s)),
                         });
}

template <class X, class Y>
void check_call(const AttentionLimits& limits, const AttentionBackward<X, Y>& c) {
    const AttentionShape& s = c.s;
    check_shape(
        limits, s,
        {.element_bytes = sizeof(X), .backward = true, .lse_rest = c.lse_rest.ptr != nullptr});

    const HeadsShape queries = s.queries();
    const HeadsShape keys = s.keys();
    const size_t alignment = limits.alignment;
    check_memory(limits, {
                             memory_of("q", c.q, queries, alignment),
                             memory_of("k", c.k, keys, alignment),
                             memory_of("v", c.v, keys, alignment),
                             memory_of("dout", c.dout, queries, alignment),
                             memory_of("out", c.out, queries, alignment),
                             memory_of("lse", c.lse, queries),
                             if_given(memory_of("lse_rest", c.lse_rest, queries)),
                             memory_of("att", c.att, limits.saved_bytes(s)),
                             memory_of("dq", c.dq, queries, alignment),
                             memory_of("dk", c.dk, keys, alignment),
                             memory_of("dv", c.dv, keys, alignment),
                             memory_of("scratch", c.scratch, limits.scratch_bytes(s)),
                         });
}
