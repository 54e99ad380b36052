// Checks of a call, and what else the launchers of the kernels share. `kernel` is the name that an Error begins with.
#pragma once
#include "attention/attention.h"

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

inline void check_shape(const char* kernel, const AttentionShape& s) {
    if (s.B < 1 || s.NH < 1 || s.Tq < 1 || s.Tk < 1)
        throw Error(format("%s: B %d, NH %d, Tq %d, Tk %d: each must be at least 1", kernel, s.B, s.NH, s.Tq, s.Tk));
    if (s.causal && s.Tq > s.Tk)
        throw Error(format("%s: a causal mask needs Tq ≤ Tk, found Tq %d and Tk %d", kernel, s.Tq, s.Tk));
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
template <class X>
using NamedViews = std::initializer_list<std::pair<const char*, Heads<X>>>;
template <class X, class Y>
void check_views(const char* kernel, const AttentionForward<X, Y>& c) {
    for (const auto& [name, x] : NamedViews<const X>{{"q", c.q}, {"k", c.k}, {"v", c.v}})
        check_aligned(kernel, name, x);
    check_aligned(kernel, "out", c.out);
}
template <class X, class Y>
void check_views(const char* kernel, const AttentionBackward<X, Y>& c) {
    for (const auto& [name, x] :
         NamedViews<const X>{{"q", c.q}, {"k", c.k}, {"v", c.v}, {"dout", c.dout}, {"out", c.out}})
        check_aligned(kernel, name, x);
    for (const auto& [name, x] : NamedViews<Y>{{"dq", c.dq}, {"dk", c.dk}, {"dv", c.dv}})
        check_aligned(kernel, name, x);
    check_aligned(kernel, "scratch", c.scratch);
}
// A flash kernel's launchers begin with this.
template <class Call>
void check_flash(const char* kernel, const Call& c) {
    if (c.s.HS != 64 && c.s.HS != 128)
        throw Error(format("%s: head size %d, expected 64 or 128: use --attention naive", kernel, c.s.HS));
    check_shape(kernel, c.s);
    check_views(kernel, c);
}
// The backward of a kernel without forward_fp32 also with this.
template <class X>
void check_whole(const char* kernel, const AttentionBackward<X>& c) {
    if (c.s.Tq != c.s.Tk || c.lse_rest.ptr)
        throw Error(format("%s: backward takes whole sequences only (Tq %d, Tk %d): use --attention flash", kernel,
                           c.s.Tq, c.s.Tk));
}

// What a kernel needs that leaves nothing in att, or uses no scratch.
inline size_t no_bytes(const AttentionShape&) {
    return 0;
}
