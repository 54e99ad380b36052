// Ring attention (Liu et al. 2023) splits one sequence over N ranks, each with T/N of its tokens.
// Keys and values travel around the ring. At every stop a rank runs its queries with them and
// merges the results in fp32.
//
//   step s = 0..N−1:  rank r has the keys of rank (r − s) mod N, sends them to r + 1, receives the
//                     next from r − 1
//   forward:          (o, lse) ← merge((o, lse), piece)
//   backward:         dq += …;  dk and dv travel a step behind their keys, each rank adds to them,
//                     and after N − 1 hops they are home. Those of a late chunk travel only from
//                     the first rank that sees it
//
// A rank computes on the keys it has while the next ones travel. README.md shows why only the first
// step needs a mask, and why the error does not grow with N. A rank's tensors hold its 2·Tc tokens,
// the early chunk's first.
//
// Writes: forward out and lse, backward dqkv (every element).   Run: ./dev/test_ring
#pragma once
#include "attention/ring/pieces.h"

// Which rank has what of a sequence. It is cut into 2N chunks, and rank r holds chunks r and
// 2N−1−r, an early one that sees little and a late one that sees much.
struct Zigzag {
    int ranks;
    int chunk(int rank, int late) const { return late ? 2 * ranks - 1 - rank : rank; }
    // of the keys at a step
    int source(int rank, int step) const { return (rank - step + ranks) % ranks; }
    // How many chunks of another rank's keys the queries of `rank` see at a step, only the early
    // one or both. The ranks that see both come last on the way of these keys' gradients.
    int seen(int rank, int step) const { return source(rank, step) < rank ? 1 : 2; }
};

// One of a ring's ranks.
struct RingRank {
    int rank;
    int ranks;
};

template <class Dev, class X, class Comm = typename Dev::Comm>
class Ring : Pieces<Dev, X> {
    using Base = Pieces<Dev, X>;
    using Base::of_keys, Base::of_others, Base::parts;
    using Base::q_, Base::q_sum_, Base::s_, Base::take, Base::tokens, Base::view,
        typename Base::Inputs;
    using Base::T, Base::dev_, Base::dkv_, Base::dkv_sum_, Base::keys, Base::kv_elements;

  public:
    using Base::lse_elements, Base::bytes, typename Base::A;
    // `shape` is that of the rank's own tokens: causal, and Tq = Tk is even.
    Ring(const Dev& dev, const RingRank& rank, const AttentionShape& shape,
         Attention kind = Attention::flash)
        : Base(dev, shape, kind), zigzag_{rank.ranks}, rank_(rank.rank), Tc_(shape.Tk / 2) {
        place(nullptr);
    }
    void start(void* memory, Comm* comm) {  // memory of bytes()
        place(memory);
        comm_ = comm;
    }

    void forward(X* out, A* lse, const X* qkv) {
        const Piece<A> sum = Base::begin(lse);
        for (int step = 0; step < ranks(); step++)
            beside_travel(step, /*dkv=*/false, qkv, [&] {
                const Inputs in{.qkv = qkv, .kv = step == 0 ? nullptr : kv_.here};
                const PieceCall p = step == 0 ? own_keys(0, T()) : others_keys(step);
                if (step + 1 < ranks())
                    return Base::forward(p, in, sum, step == 0, sum.o);
                // the last merge rounds what it merges
                Base::forward(p, in, sum, step == 0, view(out));
                const int others = step == 0 ? T() : p.q0;
                if (others > 0)
                    add(dev_, tokens(others), view(out), sum.o);
            });
    }

    // The gradients of a rank's keys start at the next rank, at step 1, and are home after N − 1
    // hops. A hop of gradients takes twice as long as one of keys in bf16. So the first hop, of
    // keys, is beside the early chunk's queries with the rank's own keys, and the last, of
    // gradients, beside the late chunk's, which are three times the work.
    void backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv) {
        const Inputs own{.qkv = qkv, .dout = dout, .out = out, .lse = lse};
        const bool others = rank_ > 0;  // the early chunk sees others' keys, and first at step 1
        beside_travel(0, /*dkv=*/false, qkv, [&] {
            Base::backward(own_keys(0, Tc_), own, others ? q_ : q_sum_, dkv_sum_);
        });
        for (int step = 1; step < ranks(); step++) {
            const bool first = step == 1;
            beside_travel(step, /*dkv=*/!first, qkv, [&] {
                const PieceCall p = others_keys(step);
                const Inputs in{.qkv = qkv, .dout = dout, .out = out, .lse = lse, .kv = kv_.here};
                Base::backward(p, in, first ? q_sum_ : q_, first ? travelling_.here : dkv_);
                int queries = T() - p.q0;
                if (first)
                    queries = others ? Tc_ : 0;  // step 0's, because this step wrote q_sum_
                const HeadsView<A> sum = view(q_sum_).from(p.q0);
                if (queries > 0)
                    add(dev_, tokens(queries), sum, sum, view(q_).from(p.q0));
            });
            if (first)
                continue;
            // What has come is added to this rank's, which has at least as many chunks.
            const int n = summed(before(), step - 1);
            add(dev_, keys(n), of_keys(dkv_), of_keys(dkv_), of_keys(travelling_.here));
            std::swap(dkv_, travelling_.here);
        }
        const auto late = [&](HeadsView<A> x, bool there = true) {
            return there ? x.from(Tc_) : HeadsView<A>{};
        };
        beside_travel(ranks(), /*dkv=*/ranks() > 1, qkv, [&] {
            Base::backward(own_keys(Tc_, Tc_), own, q_, dkv_);
            add(dev_, tokens(Tc_), parts(dqkv).q, view(q_sum_));
            const HeadsView<X> late_dq = parts(dqkv).q.from(Tc_);
            add(dev_, tokens(Tc_), late_dq, late(view(q_)), late(view(q_sum_), ranks() > 1));
        });
        const int come = ranks() > 1 ? summed(before(), ranks() - 1) : 0;
        const HeadsView<X> dkv = parts(dqkv).k;
        const HeadsView<A> own_sum = of_keys(dkv_);
        const HeadsView<A> theirs = of_keys(travelling_.here);
        add(dev_, keys(Tc_), dkv, own_sum, of_keys(dkv_sum_), come > 0 ? theirs : HeadsView<A>{});
        add(dev_, keys(Tc_), dkv.from(Tc_), late(own_sum), late(theirs, come > Tc_));
    }

  private:
    const Zigzag zigzag_;
    const int rank_, Tc_;
    Comm* comm_ = nullptr;
    // Two buffers of what travels. What is here goes on to the next rank.
    template <class Y>
    struct Travelling {
        Y* here = nullptr;
        Y* incoming = nullptr;
        void arrive() { std::swap(here, incoming); }
    };
    Travelling<X> kv_;          // (B, T, K and V, heads, HS)
    Travelling<A> travelling_;  // as dkv_, the sum of the ranks so far, of the keys in kv_.here
    void place(void* memory) {
        Base::place(memory);
        const size_t elements = ranks() > 1 ? kv_elements() : 0;
        take(kv_.here, elements);
        take(kv_.incoming, elements);
        take(travelling_.here, elements);
        take(travelling_.incoming, elements);
    }
    int ranks() const { return zigzag_.ranks; }
    // The chunks are neighbours in order, so the mask is an ordinary one of a sequence of 2Tc
    // tokens.
    PieceCall own_keys(int q0, int Tq) const {
        return {.q0 = q0, .Tq = Tq, .k0 = 0, .Tk = q0 + Tq, .causal = true};
    }
    PieceCall others_keys(int step) const {
        const int seen = zigzag_.seen(rank_, step);
        const int Tq = seen == 2 ? Tc_ : T();
        return {.q0 = T() - Tq, .Tq = Tq, .k0 = 0, .Tk = seen * Tc_, .causal = false};
    }
    int before() const { return zigzag_.source(rank_, 1); }
    // Tokens whose dk and dv hold a sum once `rank` has added its part for the keys of `step`.
    int summed(int rank, int step) const { return zigzag_.seen(rank, step) * Tc_; }
    // Calls work(), during which keys and values travel, except in the last step. In backward the
    // gradients of the keys of the step before travel too, from the third step on and once more
    // after the last. Then what came from the rank before is here.
    template <class Work>
    void beside_travel(int step, bool dkv, const X* qkv, Work work) {
        const bool kv = step + 1 < ranks();
        if (!kv && !dkv)
            return work();
        const int next = (rank_ + 1) % ranks();
        const size_t token = kv_elements() / T();  // of all sequences
        if (step == 0)
            add(dev_, keys(T()), of_others(kv_.here), parts(qkv).k);
        comm_->fork();
        comm_->group([&] {
            if (kv)
                comm_->send_recv(next, kv_.here, T() * token, before(), kv_.incoming, T() * token);
            if (dkv) {
                const size_t out = summed(rank_, step - 1) * token;
                const size_t in = summed(before(), step - 1) * token;
                comm_->send_recv(next, travelling_.here, out, before(), travelling_.incoming, in);
            }
        });
        comm_->head_start();
        work();
        comm_->join();
        if (kv)
            kv_.arrive();
        if (dkv)
            travelling_.arrive();
    }
};
