// Views of a layer's tensors, and checks, that the launchers of the flash kernels share. `kernel` is the name that an
// Error begins with.
#pragma once
#include "attention/attention.h"

// q, k or v (which = 0, 1, 2) of a packed (B, T, 3, NH, HS) tensor.
template <class X>
Heads<X> packed(X* qkv, const AttentionShape& s, int which) {
    const size_t C = static_cast<size_t>(s.NH) * s.HS;
    return {qkv + which * C, s.T * 3 * C, 3 * C};
}
template <class X>
Heads<X> contiguous(X* x, int T, int NH, int HS) {
    const size_t C = static_cast<size_t>(NH) * HS;
    return {x, T * C, C};
}
// The whole form as a block.
inline PartialShape whole(const AttentionShape& s) {
    PartialShape p{s.B, s.T, s.T, s.NH, s.HS, 0, 0, s.causal, s.scale};
    p.first_head = s.first_head, p.all_heads = s.all_heads;
    return p;
}
// How many tiles of b cover a ≥ 1.
inline int ceil_div(int a, int b) {
    return (a - 1) / b + 1;
}

// f(std::integral_constant<int, HS>), so that the head size is known to the compiler.
template <class F>
void with_head_size(int HS, F f) {
    if (HS == 64)
        f(std::integral_constant<int, 64>{});
    else
        f(std::integral_constant<int, 128>{});
}

inline void check_shape(const char* kernel, const PartialShape& s) {
    if (s.HS != 64 && s.HS != 128)
        throw Error(format("%s: head size %d, expected 64 or 128: use --attention naive", kernel, s.HS));
    if (s.B < 1 || s.NH < 1 || s.Tq < 1 || s.Tk < 1)
        throw Error(format("%s: B %d, NH %d, Tq %d, Tk %d: each must be at least 1", kernel, s.B, s.NH, s.Tq, s.Tk));
    if (s.q_begin < 0 || s.q_begin > s.rows_of_q() - s.Tq || s.rows_of_k() < s.Tk)
        throw Error(format("%s: Tq %d from %d on, of %d rows; Tk %d, of %d: a block must lie inside its tensors",
                           kernel, s.Tq, s.q_begin, s.rows_of_q(), s.Tk, s.rows_of_k()));
    if (!(s.resolved_scale() > 0.f)) throw Error(format("%s: scale %g, expected > 0", kernel, s.resolved_scale()));
}
// Throws Error unless all rows of a tensor begin at multiples of 16 bytes.
template <class X>
void check_aligned(const char* kernel, const char* name, const Heads<X>& x) {
    constexpr size_t kElements = 16 / sizeof(X);
    if (reinterpret_cast<uintptr_t>(x.ptr) % 16 || x.batch % kElements || x.token % kElements)
        throw Error(format("%s: rows of %s are not 16-byte aligned (address %p, strides %zu and %zu elements)", kernel,
                           name, static_cast<const void*>(x.ptr), x.batch, x.token));
}
inline void check_aligned(const char* kernel, const char* name, const void* ptr) {
    check_aligned(kernel, name, Heads<const char>{static_cast<const char*>(ptr), 0, 0});
}

// What a kernel needs that leaves nothing in att, or uses no scratch.
inline size_t no_bytes(const AttentionShape&) {
    return 0;
}
