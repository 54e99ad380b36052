// Blockwise attention on one device (Liu & Abbeel 2023). The queries and keys of a sequence come in chunks of any size,
// forward and backward, through the kernels' partial form. Ring attention (attention/ring/ring.h) does the same with
// the chunks on different GPUs. This file shows it at its plainest.
//
//   forward    for each chunk of queries:  (o, L) ← (0, −∞);  for each chunk of keys: (o, L) ← merge((o, L), block)
//              out = X(o), lse = L
//   backward   D = rowsum(dO∘O) of whole rows;  dq ← 0
//              for each chunk of keys:  dk, dv ← 0;  for each chunk of queries: dq, dk, dv += block(lse, D)
//              until it is whole, dq is a sum in the kernel's own order (dq_sum, attention/attention.h)
//
// Chunks add up only with the lse and D of the whole row, because only then are P = exp(S − lse) and dS = P∘(dP − D)
// the whole row's. With the lse of its own keys alone, a block would compute the gradients of another function. The
// owner of a sum clears it where it begins. The kernel that adds to it never does.
//
// Include the backend's partial form (attention/ring/blocks.h or layers/cpu/reference.h) before this header.
// Tensors are qkv (B, T, 3, NH, HS), out and dout (B, T, NH, HS), lse (B, NH, T), dqkv as qkv.
//
// Writes: forward out and lse, backward dqkv (every element).   Run: ./dev/study_ring
#pragma once
#include <algorithm>

#include "layers/gpu/types.h"

template <class Dev, class X>
class Chunks {
  public:
    using A = Acc<X>;
    // Only B, Tq = Tk = T, NH, HS, causal and scale of `shape` are used. Chunks have q_chunk and k_chunk tokens, and
    // the last ones hold what is left. place() gives it memory of bytes().
    Chunks(const Dev& dev, const PartialShape& shape, int q_chunk, int k_chunk)
        : dev_(dev), s_(shape), q_chunk_(std::min(q_chunk, s_.Tq)), k_chunk_(std::min(k_chunk, s_.Tk)) {
        bytes_ = place(nullptr);
    }
    size_t bytes() const { return bytes_; }
    size_t place(void* memory) {
        size_t used = 0;
        const auto take = [&](auto*& p, size_t n) {
            p = reinterpret_cast<std::decay_t<decltype(p)>>(reinterpret_cast<uintptr_t>(memory) + used);
            used += (n * sizeof(*p) + 255) / 256 * 256;
        };
        take(o_, s_.B * size_t(q_chunk_) * C());
        take(running_lse_, size_t(s_.B) * s_.NH * q_chunk_);
        take(dq_sum_, dq_sum_bytes() / sizeof(A));
        for (A** p : {&dk_, &dv_}) take(*p, s_.B * size_t(k_chunk_) * C());
        take(D_, size_t(s_.B) * s_.NH * s_.Tq);
        take(scratch_, std::max<size_t>(16, attention_partial_scratch_bytes<X>(dev_, of_all(0, s_.Tq, 0, k_chunk_))));
        return used;
    }

    void forward(X* out, A* lse, const X* qkv);
    void backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv);

  private:
    const Dev& dev_;
    const PartialShape s_;
    const int q_chunk_, k_chunk_;
    size_t bytes_;
    A* o_;                 // (B, Tq, NH, HS) of one chunk, the running output
    double* running_lse_;  // (B, NH, Tq) of one chunk
    A* dq_sum_;            // of all queries
    A *dk_, *dv_;          // (B, Tk, NH, HS) of one chunk
    A* D_;                 // (B, NH, T)
    char* scratch_;        // of the kernels

    size_t dq_sum_bytes() const { return attention_dq_sum_bytes<X>(dev_, s_); }
    size_t C() const { return size_t(s_.NH) * s_.HS; }
    // The queries' tensors hold one chunk with block(), and all queries with of_all().
    PartialShape block(int q0, int Tq, int k0, int Tk) const {
        return {s_.B, Tq, Tk, s_.NH, s_.HS, q0, k0, s_.causal, s_.scale};
    }
    PartialShape of_all(int q0, int Tq, int k0, int Tk) const {
        PartialShape s = block(q0, Tq, k0, Tk);
        s.q_rows = s_.Tq, s.q_begin = q0;
        return s;
    }
    // Part 0, 1 or 2 of x (B, T, parts, NH, HS), from token t0 on.
    Heads<const X> heads(const X* x, int t0, int part, int parts) const {
        return {x + size_t(t0) * parts * C() + part * C(), size_t(s_.Tq) * parts * C(), parts * C()};
    }
    template <class F>
    static void for_each_chunk(int T, int chunk, F f) {
        for (int t0 = 0; t0 < T; t0 += chunk) f(t0, std::min(chunk, T - t0));
    }
    bool sees(int q0, int Tq, int k0) const { return !s_.causal || k0 < q0 + Tq; }
};

template <class Dev, class X>
void Chunks<Dev, X>::forward(X* out, A* lse, const X* qkv) {
    for_each_chunk(s_.Tq, q_chunk_, [&](int q0, int Tq) {
        attention_clear_state(dev_, o_, running_lse_, block(q0, Tq, 0, 0));
        for_each_chunk(s_.Tk, k_chunk_, [&](int k0, int Tk) {
            if (sees(q0, Tq, k0))
                attention_forward_partial<X>(dev_, o_, running_lse_, heads(qkv, q0, 0, 3), heads(qkv, k0, 1, 3),
                                             heads(qkv, k0, 2, 3), block(q0, Tq, k0, Tk));
        });
        copy_rows(dev_, out + q0 * C(), s_.Tq * C(), o_, Tq * C(), Tq * C(), s_.B);  // the one rounding
        copy_rows(dev_, lse + q0, s_.Tq, running_lse_, Tq, Tq, size_t(s_.B) * s_.NH);
    });
}

template <class Dev, class X>
void Chunks<Dev, X>::backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv) {
    attention_D(dev_, D_, dout, out, s_.B, s_.Tq, s_.NH, s_.HS);
    dev_.zero(dq_sum_, dq_sum_bytes());
    for_each_chunk(s_.Tk, k_chunk_, [&](int k0, int Tk) {
        for (A* p : {dk_, dv_}) dev_.zero(p, s_.B * size_t(Tk) * C() * sizeof(A));
        for_each_chunk(s_.Tq, q_chunk_, [&](int q0, int Tq) {
            if (sees(q0, Tq, k0))
                attention_backward_partial<X>(dev_, dq_sum_, dk_, dv_, scratch_, heads(qkv, q0, 0, 3),
                                              heads(qkv, k0, 1, 3), heads(qkv, k0, 2, 3), heads(dout, q0, 0, 1),
                                              lse + q0, D_ + q0, of_all(q0, Tq, k0, Tk));
        });
        for (int b = 0; b < s_.B; b++) {
            X* to = dqkv + (size_t(b) * s_.Tk + k0) * 3 * C();
            copy_rows(dev_, to + C(), 3 * C(), dk_ + size_t(b) * Tk * C(), C(), C(), Tk);
            copy_rows(dev_, to + 2 * C(), 3 * C(), dv_ + size_t(b) * Tk * C(), C(), C(), Tk);
        }
    });
    attention_write_dq(dev_, Heads<X>{dqkv, s_.Tq * 3 * C(), 3 * C()}, dq_sum_, s_);
}
