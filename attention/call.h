// What a call of attention is, on CUDA (attention.h) and on the CPU (layers/cpu/reference.h).
//
//   S = scale·Q Kᵀ,  masked;   P = softmax S;   out = P V;   lse = log Σ exp S
//   dV = Pᵀ dO;   dS = P∘(dO Vᵀ − D),  D = rowsum(dO∘out);   dQ = scale·dS K;   dK = scale·dSᵀ Q
//
// Shapes: B batch, Tq queries, Tk keys, NH heads, HS head size. Tensors are views (Heads), so q, k and v may lie in the
// packed output of one matmul. X is the type of the inputs, and Y that of the results: X, or Acc<X>, which is fp32.
//
// Pieces of a sequence. Let out and lse of a query be those over all its keys. Then backward over some of these keys
// writes exactly their share of dq, dk and dv, because P = exp(S − lse) and D are the whole row's. attention/ring makes
// chunks and rings of such calls.
#pragma once
#include <initializer_list>

#include "common/types.h"

// If causal, query i sees key j where j ≤ i + Tk − Tq, and Tq ≤ Tk. So the last query sees all keys, and each sees one.
//
// The shape of a part is a copy of the whole's with other lengths. Built again from its fields, it would
// lose the next field that is added here.
struct AttentionShape {
    int B;
    int Tq;
    int Tk;
    int NH;
    int HS;
    bool causal = true;
    float scale = 0.f;  // 0: 1/√HS
    float resolved_scale() const { return scale != 0.f ? scale : 1.f / sqrtf(static_cast<float>(HS)); }
    // The same for exponentials that are powers of 2.
    float scale_log2() const { return static_cast<float>(resolved_scale() * M_LOG2E); }
    int shift() const { return causal ? Tk - Tq : Tk; }  // query i sees keys j ≤ i + shift()
    size_t rows() const { return size_t(B) * NH * Tq; }  // of queries, each with its lse
};

// A number for each row: (B, NH, T) inside a larger tensor. That of row (b, t, h) is ptr[(b·NH + h)·head + t].
template <class A>
struct Stats {
    A* ptr = nullptr;
    size_t head = 0;  // from one head to the next
};

// Writes every element of out and lse, and what rounding took from lse to lse_rest, unless that is
// null. Only the fp32 kernels that work on pieces of a sequence know it. The others refuse an
// lse_rest.
template <class X, class Y = X>
struct AttentionForward {
    AttentionShape s;
    Heads<const X> q = {}, k = {}, v = {};  // (B, Tq, NH, HS), (B, Tk, NH, HS) twice
    Heads<Y> out = {};                      // as q
    Stats<Acc<X>> lse = {}, lse_rest = {};
    X* att = nullptr;  // only naive has it, of saved_bytes(), for backward
};

// Writes every element of dq, dk and dv. Clears what it accumulates into in scratch.
//
// lse_rest is what rounding took from lse, or null, and as in forward not all kernels take one.
// Null promises a call with all of its rows' keys. Then an fp32 kernel may find the rest itself,
// because a row's P must add up to 1.
template <class X, class Y = X>
struct AttentionBackward {
    AttentionShape s;
    Heads<const X> q = {}, k = {}, v = {}, dout = {}, out = {};  // dout and out as q
    Stats<const Acc<X>> lse = {}, lse_rest = {};
    Heads<Y> dq = {}, dk = {}, dv = {};  // as q, k and v
    void* scratch = nullptr;             // of scratch_bytes()
    const X* att = nullptr;              // as forward left it
};

// q, k or v (which = 0, 1, 2) of a packed (B, T, 3, NH, HS) tensor, and a contiguous (B, T, NH, HS) one.
template <class X>
Heads<X> packed(X* qkv, int T, int NH, int HS, int which) {
    const size_t C = size_t(NH) * HS;
    return {qkv + which * C, T * 3 * C, 3 * C};
}
template <class X>
Heads<X> contiguous(X* x, int T, int NH, int HS) {
    const size_t C = size_t(NH) * HS;
    return {x, T * C, C};
}

// A layer's calls: the last Tq tokens of qkv (B, Tk, 3, NH, HS), and the gradients of whole sequences.
template <class X>
AttentionForward<X> layer_forward(X* out, Acc<X>* lse, const X* qkv, const AttentionShape& s) {
    AttentionForward<X> c{s};
    c.q = packed(qkv, s.Tk, s.NH, s.HS, 0).from(s.Tk - s.Tq);
    c.k = packed(qkv, s.Tk, s.NH, s.HS, 1);
    c.v = packed(qkv, s.Tk, s.NH, s.HS, 2);
    c.out = contiguous(out, s.Tq, s.NH, s.HS);
    c.lse = {lse, size_t(s.Tq)};
    return c;
}
template <class X>
AttentionBackward<X> layer_backward(X* dqkv, const X* dout, const X* out, const Acc<X>* lse, const X* qkv,
                                    const AttentionShape& s) {
    AttentionBackward<X> c{s};
    c.q = packed(qkv, s.Tk, s.NH, s.HS, 0);
    c.k = packed(qkv, s.Tk, s.NH, s.HS, 1);
    c.v = packed(qkv, s.Tk, s.NH, s.HS, 2);
    c.dout = contiguous(dout, s.Tq, s.NH, s.HS);
    c.out = contiguous(out, s.Tq, s.NH, s.HS);
    c.lse = {lse, size_t(s.Tq)};
    c.dq = packed(dqkv, s.Tk, s.NH, s.HS, 0);
    c.dk = packed(dqkv, s.Tk, s.NH, s.HS, 1);
    c.dv = packed(dqkv, s.Tk, s.NH, s.HS, 2);
    return c;
}

// ---------------------------------------------------------------------------------------------------------------------
// What is refused. No call reaches a kernel before check_call() has seen it: AttentionKernel
// (attention.h) and the CPU's attention (layers/cpu) see to that. It is a little arithmetic on the
// host.

// What an implementation needs that leaves nothing in att, or uses no scratch.
inline size_t no_bytes(const AttentionShape&) {
    return 0;
}

// Which calls an implementation supports.
struct AttentionLimits {
    const char* name;  // every Error begins with it
    size_t alignment;  // of the rows of a head, in bytes
    bool flash;        // head sizes 64 and 128 alone
    bool pieces;       // backward takes some of the queries or keys, not only whole sequences
    bool has_rest;     // forward writes lse_rest, and backward reads it
    size_t (*saved_bytes)(const AttentionShape&) = no_bytes;    // of att
    size_t (*scratch_bytes)(const AttentionShape&) = no_bytes;  // of scratch
};

// Memory that a call names: rows of so many bytes, in two dimensions.
struct CallMemory {
    const char* name;
    bool written;
    const void* ptr;
    size_t alignment;  // in bytes, as row and stride
    size_t row;
    size_t count[2];  // of rows
    size_t stride[2];
};
template <class X>
CallMemory memory_of(const char* name, const Heads<X>& x, const AttentionShape& s, int T,
                     size_t alignment) {
    const bool written = !std::is_const_v<X>;
    const size_t row = size_t(s.NH) * s.HS * sizeof(X);
    const size_t batch = x.batch * sizeof(X);
    const size_t token = x.token * sizeof(X);
    return {name, written, x.ptr, alignment, row, {size_t(s.B), size_t(T)}, {batch, token}};
}
template <class A>
CallMemory memory_of(const char* name, const Stats<A>& x, const AttentionShape& s) {
    const bool written = !std::is_const_v<A>;
    const size_t row = s.Tq * sizeof(A);
    const size_t heads = size_t(s.B) * s.NH;
    return {name, written, x.ptr, sizeof(A), row, {1, heads}, {0, x.head * sizeof(A)}};
}
template <class V>
CallMemory memory_of(const char* name, V* x, size_t bytes) {
    return {name, !std::is_const_v<V>, x, 16, bytes, {1, 1}, {0, 0}};
}
inline CallMemory if_given(CallMemory m) {
    if (!m.ptr)
        m.row = 0;
    return m;
}

// The two halves of check_call(), in attention.cu. Rows of no bytes are not part of the call.
void check_shape(const AttentionLimits& limits, const AttentionShape& s, size_t element,
                 bool backward, bool rest);
void check_memory(const AttentionLimits& limits, std::initializer_list<CallMemory> memory);

// Throws Error unless the call is as this file says and the implementation takes it. An output may
// share no byte with an input or another output. Their rows may take turns, though, as those of dq,
// dk and dv do in one packed tensor.
template <class X, class Y>
void check_call(const AttentionLimits& limits, const AttentionForward<X, Y>& c) {
    const AttentionShape& s = c.s;
    check_shape(limits, s, sizeof(X), false, c.lse_rest.ptr != nullptr);
    check_memory(limits,
                 {memory_of("q", c.q, s, s.Tq, limits.alignment),
                  memory_of("k", c.k, s, s.Tk, limits.alignment),
                  memory_of("v", c.v, s, s.Tk, limits.alignment),
                  memory_of("out", c.out, s, s.Tq, limits.alignment), memory_of("lse", c.lse, s),
                  if_given(memory_of("lse_rest", c.lse_rest, s)),
                  memory_of("att", c.att, limits.saved_bytes(s))});
}
template <class X, class Y>
void check_call(const AttentionLimits& limits, const AttentionBackward<X, Y>& c) {
    const AttentionShape& s = c.s;
    check_shape(limits, s, sizeof(X), true, c.lse_rest.ptr != nullptr);
    check_memory(limits,
                 {memory_of("q", c.q, s, s.Tq, limits.alignment),
                  memory_of("k", c.k, s, s.Tk, limits.alignment),
                  memory_of("v", c.v, s, s.Tk, limits.alignment),
                  memory_of("dout", c.dout, s, s.Tq, limits.alignment),
                  memory_of("out", c.out, s, s.Tq, limits.alignment), memory_of("lse", c.lse, s),
                  if_given(memory_of("lse_rest", c.lse_rest, s)),
                  memory_of("att", c.att, limits.saved_bytes(s)),
                  memory_of("dq", c.dq, s, s.Tq, limits.alignment),
                  memory_of("dk", c.dk, s, s.Tk, limits.alignment),
                  memory_of("dv", c.dv, s, s.Tk, limits.alignment),
                  memory_of("scratch", c.scratch, limits.scratch_bytes(s))});
}
