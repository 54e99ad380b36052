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
    using Base::of_keys, Base::parts, Base::q_;
    using Base::q_sum_, Base::s_, Base::tokens, Base::view;
    using Base::T, Base::dev_, Base::dkv_, Base::dkv_sum_, Base::keys, Base::kv_elements;

  public:
    using Base::place, typename Base::A;
    // Of a shape with Tq = Tk. The last chunks hold what is left. place() gives it memory.
    Chunks(const Dev& dev, const AttentionShape& shape, int q_chunk, int k_chunk,
           Attention kind = Attention::flash)
        : Base(dev, shape, kind), q_chunk_(q_chunk), k_chunk_(k_chunk) {}

    void forward(X* out, A* lse, const X* qkv) {
        const Piece<A> sum = Base::begin(lse);
        // Every query sees key 0, so its first piece is of the first chunk of keys.
        for_each_piece(
            [&](const PieceCall& p) { Base::forward(p, {.qkv = qkv}, sum, p.k0 == 0, sum.o); });
        add(dev_, tokens(T()), view(out), sum.o);  // the one rounding
    }
    void backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv) {
        dev_.zero(q_sum_, s_.queries().elements() * sizeof(A));
        dev_.zero(dkv_sum_, kv_elements() * sizeof(A));
        for_each_piece([&](const PieceCall& p) {
            Base::backward(p, {.qkv = qkv, .dout = dout, .out = out, .lse = lse}, q_, dkv_);
            const auto add_to = [&](const AttentionShape& s, HeadsView<A> sum, HeadsView<A> x) {
                add(dev_, s, sum, sum, x);
            };
            add_to(tokens(p.Tq), view(q_sum_).from(p.q0), view(q_).from(p.q0));
            add_to(keys(p.Tk), of_keys(dkv_sum_).from(p.k0), of_keys(dkv_).from(p.k0));
        });
        add(dev_, tokens(T()), parts(dqkv).q, view(q_sum_));
        add(dev_, keys(T()), parts(dqkv).k, of_keys(dkv_sum_));
    }

  private:
    const int q_chunk_, k_chunk_;
    template <class F>
    void for_each_piece(F f) const {
        for (int k0 = 0; k0 < T(); k0 += k_chunk_)
            for (int q0 = 0; q0 < T(); q0 += q_chunk_) {
                const int k_end = std::min(k0 + k_chunk_, T());
                const int q_end = std::min(q0 + q_chunk_, T());
                // Queries of the `whole` part see all keys of the chunk, those of the masked part
                // some.
                const int masked = std::max(q0, k0);
                const int masked_end = s_.causal ? std::min(q_end, k_end) : masked;
                const int whole = s_.causal ? std::max(q0, k_end) : q0;
                if (masked < masked_end)
                    f({.q0 = masked,
                       .Tq = masked_end - masked,
                       .k0 = k0,
                       .Tk = masked_end - k0,
                       .causal = true});
                if (whole < q_end)
                    f({.q0 = whole,
                       .Tq = q_end - whole,
                       .k0 = k0,
                       .Tk = k_end - k0,
                       .causal = false});
            }
    }
};
