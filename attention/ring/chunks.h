// Blockwise attention on one device (Liu & Abbeel 2023). The queries and keys of a sequence come in
// chunks of any size, forward and backward. Ring attention (ring.h) does the same with the chunks
// on different GPUs.
//
//   forward    (o, lse) ← merge((o, lse), piece)    for each piece
//              out = X(o)
//   backward   dq, dk, dv ← 0
//              dq, dk, dv += piece(out, lse)        for each piece, with the out and lse of the
//                                                   whole row
//
// Writes: forward out and lse, backward dqkv (every element).   Run: ./dev/test_ring
#pragma once
#include "attention/ring/pieces.h"

template <class Dev, class X>
class Chunks : public Pieces<Dev, X> {
    using Base = Pieces<Dev, X>;
    using Base::dkv_view, Base::kv_elements, Base::kv_shape, Base::parts, Base::q_shape, Base::view;
    using Base::piece_dkv_, Base::sum_dkv_, Base::piece_out_dq_, Base::sum_out_dq_;
    using Base::T, Base::dev_, Base::s_;

  public:
    using Base::place, typename Base::A;

    // The shape has Tq = Tk. The last chunks are as long as what is left. Before the first
    // pass, call place() with memory of bytes().
    Chunks(const Dev& dev, const AttentionShape& shape, int q_chunk, int k_chunk,
           Attention kind = Attention::flash)
        : Base(dev, shape, kind), q_chunk_(q_chunk), k_chunk_(k_chunk) {}

    void forward(X* out, A* lse, const X* qkv) {
        const Partial<A> sum = Base::start_sum(lse);
        for_each_piece([&](const PieceCall& p) {
            // Every query sees key 0, so its first piece is of the first chunk of keys.
            const bool first = p.k0 == 0;
            Base::forward(p, {.qkv = qkv}, sum, first, sum.o);
        });
        add(dev_, q_shape(T()), view(out), sum.o);  // the one rounding
    }

    void backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv) {
        dev_.zero(sum_out_dq_, s_.queries().elements() * sizeof(A));
        dev_.zero(sum_dkv_, kv_elements() * sizeof(A));
        for_each_piece([&](const PieceCall& p) {
            Base::backward(p, {.qkv = qkv, .dout = dout, .out = out, .lse = lse}, piece_out_dq_,
                           piece_dkv_);
            add_to(q_shape(p.Tq), view(sum_out_dq_).from(p.q0), view(piece_out_dq_).from(p.q0));
            add_to(kv_shape(p.Tk), dkv_view(sum_dkv_).from(p.k0), dkv_view(piece_dkv_).from(p.k0));
        });
        add(dev_, q_shape(T()), parts(dqkv).q, view(sum_out_dq_));
        add(dev_, kv_shape(T()), parts(dqkv).k, dkv_view(sum_dkv_));
    }

  private:
    void add_to(const AttentionShape& s, HeadsView<A> sum, HeadsView<A> x) {
        add(dev_, s, sum, sum, x);
    }

    template <class F>
    void for_each_piece(F f) const {
        for (int k0 = 0; k0 < T(); k0 += k_chunk_)
            for (int q0 = 0; q0 < T(); q0 += q_chunk_)
                for_each_piece_of(q0, std::min(q0 + q_chunk_, T()), k0,
                                  std::min(k0 + k_chunk_, T()), f);
    }

    // The calls of a chunk of queries with a chunk of keys. Under a causal mask queries before k0
    // see no key of the chunk, those from k0 to k_end − 1 see some (the masked piece; the last of
    // them sees all), and later ones see all (the whole piece).
    template <class F>
    void for_each_piece_of(int q0, int q_end, int k0, int k_end, F f) const {
        const int masked_q0 = std::max(q0, k0);
        const int masked_end = std::min(q_end, k_end);  // of its queries, and so of its keys
        if (s_.causal && masked_q0 < masked_end)
            f({.q0 = masked_q0,
               .Tq = masked_end - masked_q0,
               .k0 = k0,
               .Tk = masked_end - k0,
               .causal = true});

        const int whole_q0 = s_.causal ? std::max(q0, k_end) : q0;
        if (whole_q0 < q_end)
            f({.q0 = whole_q0,
               .Tq = q_end - whole_q0,
               .k0 = k0,
               .Tk = k_end - k0,
               .causal = false});
    }

    const int q_chunk_;
    const int k_chunk_;
};
