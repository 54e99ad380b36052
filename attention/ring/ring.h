// Ring attention (Liu et al. 2023) splits one sequence over N ranks, each with T/N of its tokens.
// Keys and values travel around the ring. At every stop a rank runs its queries with them and
// merges the results in fp32.
//
//   step s = 0..N−1:  rank r has the keys of rank (r − s) mod N, sends them to r + 1, and receives
//                     the next from r − 1
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

    // The early (late = 0) or the late (1) of a rank's two chunks.
    int chunk(int rank, int late) const { return late ? 2 * ranks - 1 - rank : rank; }

    // The rank whose keys `rank` has at a step.
    int source(int rank, int step) const { return (rank - step + ranks) % ranks; }

    // How many chunks of another rank's keys the queries of `rank` see at a step: 1, the early one
    // alone, or 2. The gradients of these keys first visit all ranks that see one chunk, then those
    // that see both.
    int visible(int rank, int step) const { return source(rank, step) < rank ? 1 : 2; }
};

// One of a ring's ranks.
struct RingRank {
    int rank;
    int ranks;
};

template <class Dev, class X, class Comm = typename Dev::Comm>
class Ring : Pieces<Dev, X> {
    using Base = Pieces<Dev, X>;
    using Base::dkv_view, Base::kv_elements, Base::kv_shape, Base::kv_view;
    using Base::parts, Base::q_shape, Base::take, Base::view, typename Base::Inputs;
    using Base::piece_dkv_, Base::sum_dkv_, Base::piece_out_dq_, Base::sum_out_dq_;
    using Base::T, Base::dev_, Base::s_;

  public:
    using Base::lse_elements, Base::bytes, typename Base::A;

    // `shape` is that of the rank's own tokens: causal, and Tq = Tk is even.
    Ring(const Dev& dev, const RingRank& rank, const AttentionShape& shape,
         Attention kind = Attention::flash)
        : Base(dev, shape, kind), zigzag_{rank.ranks}, rank_(rank.rank), Tc_(shape.Tk / 2) {
        place(nullptr);  // again, because Base's constructor leaves out what travels
    }
    void start(void* memory, Comm* comm) {  // memory of bytes()
        place(memory);
        comm_ = comm;
    }

    void forward(X* out, A* lse, const X* qkv) {
        const Partial<A> sum = Base::start_sum(lse);
        load_own_kv(qkv);
        for (int step = 0; step < ranks(); step++) {
            const bool first = step == 0;
            const bool last = step + 1 == ranks();
            const PieceCall p = first ? own_keys(0, T()) : others_keys(step);
            overlap({.step = step, .kv = !last}, [&] {
                const Inputs in{.qkv = qkv, .kv = first ? nullptr : kv_.here};
                if (!last)
                    Base::forward(p, in, sum, first, sum.o);
                else
                    Base::forward(p, in, sum, first, view(out));  // the merge rounds what it merges
            });
        }

        // The merge of the last step has rounded its queries, so what is left are those before
        // them. A ring of one rank merges nothing.
        const int not_rounded = ranks() > 1 ? others_keys(ranks() - 1).q0 : T();
        if (not_rounded > 0)
            add(dev_, q_shape(not_rounded), view(out), sum.o);
    }

    // The gradients of a rank's keys start at the next rank, at step 1, and are home after N − 1
    // hops. A hop of gradients takes twice as long as one of keys in bf16. So of the calls with the
    // rank's own keys, that of the early queries runs beside the first hop, which has only keys,
    // and that of the late queries, three times the work, beside the last, which has only
    // gradients.
    void backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv) {
        const Inputs own{.qkv = qkv, .dout = dout, .out = out, .lse = lse};
        load_own_kv(qkv);

        // On rank 0 the early queries see no other rank's keys, so this call writes their whole dq.
        // On the others step 1 is the first to write the sum, for all queries, and what this call
        // finds waits in piece_out_dq_ until then.
        const bool early_sees_others = rank_ > 0;
        A* const early_dq = early_sees_others ? piece_out_dq_ : sum_out_dq_;
        overlap({.step = 0, .kv = ranks() > 1},
                [&] { Base::backward(own_keys(0, Tc_), own, early_dq, sum_dkv_); });

        for (int step = 1; step < ranks(); step++) {
            const bool writes_sums = step == 1;  // later steps add to them
            overlap({.step = step, .kv = step + 1 < ranks(), .dkv = !writes_sums}, [&] {
                const PieceCall p = others_keys(step);
                Inputs in = own;
                in.kv = kv_.here;
                A* const dq = writes_sums ? sum_out_dq_ : piece_out_dq_;
                A* const dkv = writes_sums ? dkv_travelling_.here : piece_dkv_;
                Base::backward(p, in, dq, dkv);

                if (!writes_sums)
                    add_to_sum_dq(p.q0, p.Tq);
                else if (early_sees_others)
                    add_to_sum_dq(0, Tc_);  // what step 0 found
            });
            if (writes_sums)
                continue;

            // What has arrived is added to this rank's, which has at least as many chunks, and the
            // sum is sent on at the next step.
            const int n = dkv_tokens(previous(), step - 1);
            add(dev_, kv_shape(n), dkv_view(piece_dkv_), dkv_view(piece_dkv_),
                dkv_view(dkv_travelling_.here));
            std::swap(piece_dkv_, dkv_travelling_.here);
        }

        overlap({.step = ranks(), .dkv = ranks() > 1}, [&] {
            Base::backward(own_keys(Tc_, Tc_), own, piece_out_dq_, piece_dkv_);
            store_dq(parts(dqkv).q);
        });
        store_dkv(parts(dqkv).k);
    }

  private:
    // Two buffers of what travels. What is here is sent to the next rank.
    template <class Y>
    struct Travelling {
        Y* here = nullptr;
        Y* incoming = nullptr;
        void arrive() { std::swap(here, incoming); }
    };
    // What travels during a step: the keys and values of this step, and the gradients of the step
    // before.
    struct Hop {
        int step;
        bool kv = false;
        bool dkv = false;
    };

    void place(void* memory) {
        Base::place(memory);
        const size_t elements = ranks() > 1 ? kv_elements() : 0;
        take(kv_.here, elements);
        take(kv_.incoming, elements);
        take(dkv_travelling_.here, elements);
        take(dkv_travelling_.incoming, elements);
    }

    int ranks() const { return zigzag_.ranks; }
    int previous() const { return zigzag_.source(rank_, 1); }  // the rank before this one

    // A call with the rank's own keys. Its chunks are in order, so the mask is the ordinary one of
    // a sequence of 2·Tc tokens.
    PieceCall own_keys(int q0, int Tq) const {
        return {.q0 = q0, .Tq = Tq, .k0 = 0, .Tk = q0 + Tq, .causal = true};
    }
    // The call of a later step, with another rank's keys. No mask cuts them.
    PieceCall others_keys(int step) const {
        const int visible = zigzag_.visible(rank_, step);
        const int Tq = visible == 2 ? Tc_ : T();
        return {.q0 = T() - Tq, .Tq = Tq, .k0 = 0, .Tk = visible * Tc_, .causal = false};
    }
    // How many tokens of the keys that `rank` has at a step have dk and dv when it sends these on,
    // at the next step: those of the chunks that it sees. No rank before it has seen more.
    int dkv_tokens(int rank, int step) const { return zigzag_.visible(rank, step) * Tc_; }

    // Copies the rank's own keys and values to where they travel from.
    void load_own_kv(const X* qkv) {
        if (ranks() > 1)
            add(dev_, kv_shape(T()), kv_view(kv_.here), parts(qkv).k);
    }

    // Calls work() while the hop travels. Afterwards what the previous rank has sent is here.
    template <class Work>
    void overlap(const Hop& hop, Work work) {
        if (!hop.kv && !hop.dkv)
            return work();

        comm_->fork();
        send_and_receive(hop);
        comm_->head_start();
        work();
        comm_->join();

        if (hop.kv)
            kv_.arrive();
        if (hop.dkv)
            dkv_travelling_.arrive();
    }
    void send_and_receive(const Hop& hop) {
        const int next = (rank_ + 1) % ranks();
        const size_t token = kv_elements() / T();  // of all sequences
        comm_->group([&] {
            if (hop.kv) {
                const size_t n = T() * token;
                comm_->send_recv(next, kv_.here, n, previous(), kv_.incoming, n);
            }
            if (hop.dkv) {
                const size_t out = dkv_tokens(rank_, hop.step - 1) * token;
                const size_t in = dkv_tokens(previous(), hop.step - 1) * token;
                comm_->send_recv(next, dkv_travelling_.here, out, previous(),
                                 dkv_travelling_.incoming, in);
            }
        });
    }

    // Adds the dq of these queries that is in piece_out_dq_.
    void add_to_sum_dq(int q0, int Tq) {
        const HeadsView<A> sum = view(sum_out_dq_).from(q0);
        add(dev_, q_shape(Tq), sum, sum, view(piece_out_dq_).from(q0));
    }
    // piece_out_dq_ has the late queries' dq from this rank's own keys, which the last call has
    // written.
    void store_dq(HeadsView<X> dq) {
        add(dev_, q_shape(Tc_), dq, view(sum_out_dq_));
        const HeadsView<A> others = ranks() > 1 ? view(sum_out_dq_).from(Tc_) : HeadsView<A>{};
        add(dev_, q_shape(Tc_), dq.from(Tc_), view(piece_out_dq_).from(Tc_), others);
    }
    // The sum of what the late queries, the early queries and the other ranks found.
    void store_dkv(HeadsView<X> dkv) {
        const int arrived = ranks() > 1 ? dkv_tokens(previous(), ranks() - 1) : 0;
        const HeadsView<A> late_queries = dkv_view(piece_dkv_);
        const HeadsView<A> early_queries = dkv_view(sum_dkv_);
        const HeadsView<A> others = dkv_view(dkv_travelling_.here);
        const HeadsView<A> none{};
        add(dev_, kv_shape(Tc_), dkv, late_queries, early_queries, arrived > 0 ? others : none);
        add(dev_, kv_shape(Tc_), dkv.from(Tc_), late_queries.from(Tc_),
            arrived > Tc_ ? others.from(Tc_) : none);
    }

    const Zigzag zigzag_;
    const int rank_;
    const int Tc_;  // tokens of a chunk
    Comm* comm_ = nullptr;
    Travelling<X> kv_;  // (B, T, K and V, heads, HS)
    // (T, B, K and V, heads, HS). What the ranks so far found for the keys of one step, added up.
    // It is sent during the next step.
    Travelling<A> dkv_travelling_;
};
