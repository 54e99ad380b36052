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
#include "layers/gpu/types.h"

// If causal, query i sees key j where j ≤ i + Tk − Tq, and Tq ≤ Tk. So the last query sees all keys, and each sees one.
struct AttentionShape {
    int B, Tq, Tk, NH, HS;
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

// Writes every element of out and lse. An fp32 kernel also writes what rounding took from lse, unless lse_rest is null.
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
// lse_rest is what rounding took from lse, or null. Null promises a call with all of its rows' keys. Then an fp32 kernel
// may find the rest itself, because a row's P must add up to 1.
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
