// Blockwise attention on one device (Liu & Abbeel 2023): queries and keys of a sequence in chunks of any size, forward
// and backward, over the kernels' block form. What one chunk after the other needs is what ring attention needs with the
// chunks on different GPUs (attention/ring.h); here it is at its plainest.
//
//   forward    for each chunk of queries:  (o, L) ← (0, −∞);  for each chunk of keys: (o, L) ← merge((o, L), block)
//              out = X(o), lse = L
//   backward   D = rowsum(dO∘O), of whole rows;  dq ← 0
//              for each chunk of keys:  dk, dv ← 0;  for each chunk of queries: dq, dk, dv += block(lse, D)
//
// The rule that makes chunks add up: P = exp(S − lse) and dS = P∘(dP − D) are those of the whole row only with the whole
// row's lse and D. Given the lse of its own keys alone, a block computes the gradients of another function. And every sum
// is cleared where it begins, by whoever owns it, never by the kernel that adds to it.
//
// Written over the seam: the backend's block form (attention/blocks.h, dev/reference.h) is declared before this header.
// qkv (B, T, 3, NH, HS), out and dout (B, T, NH, HS), lse (B, NH, T), dqkv as qkv.
//
// Writes: forward out and lse, backward dqkv (every element).   Run: ./dev/study_ring
#pragma once
#include <algorithm>

#include "layers/types.h"

template <class Dev, class X>
class Chunks {
  public:
    using A = Acc<X>;
    // Of `shape` B, Tq = Tk = T, NH, HS, causal and scale count. Chunks of q_chunk and k_chunk tokens, the last ones what
    // is left. place() gives it memory of bytes().
    Chunks(const Dev& dev, const BlockShape& shape, int q_chunk, int k_chunk)
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
        const BlockShape largest = block(0, q_chunk_, 0, k_chunk_);
        take(o_, s_.B * size_t(s_.Tq) * C());
        for (A** p : {&dk_, &dv_}) take(*p, s_.B * size_t(k_chunk_) * C());
        for (A** p : {&lse_, &D_}) take(*p, size_t(s_.B) * s_.NH * s_.Tq);
        take(running_lse_, size_t(s_.B) * s_.NH * q_chunk_);
        take(scratch_, std::max<size_t>(16, attention_block_scratch_bytes<X>(dev_, largest)));
        return used;
    }

    void forward(X* out, A* lse, const X* qkv);
    void backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv);

  private:
    const Dev& dev_;
    const BlockShape s_;
    const int q_chunk_, k_chunk_;
    size_t bytes_;
    A* o_;                 // chunk after chunk (B, Tq, NH, HS): the running output of one; then dq of all
    A *dk_, *dv_;          // (B, Tk, NH, HS) of one chunk
    A *lse_, *D_;          // chunk after chunk (B, NH, Tq)
    double* running_lse_;  // (B, NH, Tq) of one chunk
    char* scratch_;        // of the kernels

    size_t C() const { return size_t(s_.NH) * s_.HS; }
    size_t o_at(int q0) const { return size_t(q0) * s_.B * C(); }
    size_t stats_at(int q0) const { return size_t(q0) * s_.B * s_.NH; }
    BlockShape block(int q0, int Tq, int k0, int Tk) const {
        return {s_.B, Tq, Tk, s_.NH, s_.HS, q0, k0, s_.causal, s_.scale};
    }
    // Part 0, 1, 2 of several of x (B, T, parts, NH, HS), from token t0 on.
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
                attention_forward_block<X>(dev_, o_, running_lse_, heads(qkv, q0, 0, 3), heads(qkv, k0, 1, 3),
                                           heads(qkv, k0, 2, 3), block(q0, Tq, k0, Tk));
        });
        copy_rows(dev_, out + q0 * C(), s_.Tq * C(), o_, Tq * C(), Tq * C(), s_.B);  // the one rounding
        copy_rows(dev_, lse + q0, s_.Tq, running_lse_, Tq, Tq, size_t(s_.B) * s_.NH);
    });
}

template <class Dev, class X>
void Chunks<Dev, X>::backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv) {
    for_each_chunk(s_.Tq, q_chunk_, [&](int q0, int Tq) {
        copy_rows(dev_, lse_ + stats_at(q0), Tq, lse + q0, s_.Tq, Tq, size_t(s_.B) * s_.NH);
        for (int b = 0; b < s_.B; b++) {
            const size_t row = (size_t(b) * s_.Tq + q0) * C();
            attention_D(dev_, D_ + stats_at(q0) + size_t(b) * s_.NH * Tq, dout + row, out + row, 1, Tq, s_.NH, s_.HS);
        }
    });
    dev_.zero(o_, s_.B * size_t(s_.Tq) * C() * sizeof(A));
    for_each_chunk(s_.Tk, k_chunk_, [&](int k0, int Tk) {
        for (A* p : {dk_, dv_}) dev_.zero(p, s_.B * size_t(Tk) * C() * sizeof(A));
        for_each_chunk(s_.Tq, q_chunk_, [&](int q0, int Tq) {
            if (sees(q0, Tq, k0))
                attention_backward_block<X>(dev_, o_ + o_at(q0), dk_, dv_, scratch_, heads(qkv, q0, 0, 3),
                                            heads(qkv, k0, 1, 3), heads(qkv, k0, 2, 3), heads(dout, q0, 0, 1),
                                            lse_ + stats_at(q0), D_ + stats_at(q0), block(q0, Tq, k0, Tk));
        });
        for (int b = 0; b < s_.B; b++) {
            X* to = dqkv + (size_t(b) * s_.Tk + k0) * 3 * C();
            copy_rows(dev_, to + C(), 3 * C(), dk_ + size_t(b) * Tk * C(), C(), C(), Tk);
            copy_rows(dev_, to + 2 * C(), 3 * C(), dv_ + size_t(b) * Tk * C(), C(), C(), Tk);
        }
    });
    for_each_chunk(s_.Tq, q_chunk_, [&](int q0, int Tq) {
        for (int b = 0; b < s_.B; b++)
            copy_rows(dev_, dqkv + (size_t(b) * s_.Tq + q0) * 3 * C(), 3 * C(), o_ + o_at(q0) + size_t(b) * Tq * C(),
                      C(), C(), Tq);
    });
}
