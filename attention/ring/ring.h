// Ring attention (Liu et al. 2023) splits one sequence over N ranks, each with T/N of its tokens. Keys and values
// travel around the ring. At every stop a rank runs its queries against them by the partial form and merges the result
// in fp32. So besides its own no rank ever holds more than two ranks' keys.
//
//   step s = 0..N−1:  rank r has the keys of rank (r − s) mod N, sends them to r + 1, receives the next from r − 1
//   forward:   (o, L) ← merge((o, L), block(q, k, v))
//   backward:  dq += …;  dk and dv travel a step behind their keys, each rank adds to them, and after N − 1 hops
//              they are home. Those of a late chunk (see below) travel only from the first rank that sees it
//
// A rank computes on the keys it has while the next ones travel. Partial results are fp32 everywhere, on the way too,
// and are rounded once, so the error does not grow with N.
//
// Zigzag: with a causal mask, contiguous parts would leave the first rank idle while the last works. So the sequence is
// cut into 2N chunks and rank r holds chunks r and 2N−1−r. The early one sees little, and the late one sees much. At
// every step but the first each rank then has exactly two whole pairs of chunks to work on:
//   keys from an earlier rank s < r   both its chunks of queries see the early chunk s and neither sees the late 2N−1−s
//   keys from a later rank   s > r    its late chunk sees both chunks and its early one neither
// So these steps need no mask. The first step, with its own keys, has the mask of an ordinary sequence of two chunks.
//
// Include the backend's partial form (attention/ring/blocks.h or layers/cpu/reference.h) before this header. The tensors
// are those of split.h, with lse (B, NH, 2Tc).
//
// Writes: forward out and lse, backward dqkv (every element).   Run: ./dev/test_ring
#pragma once
#include "attention/ring/split.h"

// A rank's part in the ring. It holds keys and values of two ranks, the fp32 state of its own tokens, and four fp32
// buffers for gradients of keys and values.
template <class Dev, class X, class Comm = typename Dev::Comm>
class Ring : public Split<Dev, X, Comm> {
    using Base = Split<Dev, X, Comm>;
    using Base::comm_, Base::dev_, Base::rank_, Base::take, Base::zigzag_;

  public:
    using A = Acc<X>;
    Ring(const Dev& dev, int rank, int ranks, int B, int Tc, int NH, int HS, float scale = 0,
         Attention attention = Attention::flash)
        : Base(dev, rank, ranks), Tc_(Tc), shape_{B, 2 * Tc, 2 * Tc, NH, HS, 0, 0, true, scale} {
        shape_.attention = attention;
    }
    void forward(X* out, A* lse, const X* qkv) override;
    void backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv) override;

  private:
    enum class Pass { forward, backward };
    const int Tc_;
    PartialShape shape_;  // its own tokens against themselves
    X* kv_[2];            // (B, 2Tc, 2, NH, HS), [0] at work and [1] on its way in
    A* dkv_[2];           // (K and V, B, 2Tc, NH, HS), the sum of the ranks so far, [0] at work and [1] on its way in
    A* own_;              // the same shape, this rank's addition to it
    A* home_;             // the same shape, from its own keys and queries
    A* o_;           // (B, 2Tc, NH, HS) running output, and in backward dq_sum of all queries (attention/attention.h)
    A* D_;           // (B, NH, 2Tc)
    double* lse_;    // as D_, the running one
    char* scratch_;  // the kernels'

    void buffers() override {
        const size_t of_travel = zigzag_.ranks > 1 ? 2 * elements() : 0;
        for (X*& p : kv_) take(p, of_travel);
        for (A*& p : dkv_) take(p, of_travel);
        take(own_, of_travel);
        take(home_, 2 * elements());
        take(o_, std::max(elements(), dq_sum_bytes() / sizeof(A)));
        take(D_, elements() / shape_.HS);
        take(lse_, elements() / shape_.HS);
        take(scratch_, std::max<size_t>(16, attention_partial_scratch_bytes<X>(dev_, own_keys(0, 2 * Tc_))));
    }

    size_t dq_sum_bytes() const { return attention_dq_sum_bytes<X>(dev_, own_keys(0, 2 * Tc_)); }
    size_t C() const { return size_t(shape_.NH) * shape_.HS; }
    size_t tokens() const { return size_t(shape_.B) * 2 * Tc_; }
    size_t elements() const { return tokens() * C(); }

    // Queries [q0, q0 + Tq) of this rank against the first q0 + Tq of its own keys. The chunks are neighbours in order,
    // so the mask is an ordinary one of a sequence of 2Tc tokens. Against another rank's keys there is none.
    PartialShape own_keys(int q0, int Tq) const { return block(q0, Tq, q0 + Tq, true); }
    PartialShape others_keys(int step) const {
        const int seen = zigzag_.seen(rank_, step), Tq = seen == 2 ? Tc_ : 2 * Tc_;
        return block(2 * Tc_ - Tq, Tq, seen * Tc_, false);
    }
    PartialShape block(int q0, int Tq, int Tk, bool causal) const {
        PartialShape s = shape_;
        s.Tq = Tq, s.Tk = Tk, s.causal = causal;
        s.q_begin = q0, s.q_offset = q0, s.q_rows = s.k_rows = 2 * Tc_;
        return s;
    }
    // Part of x (B, 2Tc, parts, NH, HS) from token t0 on.
    Heads<const X> heads(const X* x, int t0, int part, int parts) const {
        const size_t token = parts * C();
        return {x + t0 * token + part * C(), 2 * Tc_ * token, token};
    }
    Heads<const X> keys(const X* qkv, int step, int part) const {  // part 0 K, 1 V
        return step == 0 ? heads(qkv, 0, part + 1, 3) : heads(kv_[0], 0, part, 2);
    }
    void forward_partial(const PartialShape& s, int step, const X* qkv) {
        const int q0 = s.q_begin;
        attention_forward_partial<X>(dev_, o_ + q0 * C(), lse_ + q0, heads(qkv, q0, 0, 3), keys(qkv, step, 0),
                                     keys(qkv, step, 1), s);
    }
    void backward_partial(const PartialShape& s, int step, A* dkv, const X* dout, const A* lse, const X* qkv) {
        const int q0 = s.q_begin;
        attention_backward_partial<X>(dev_, o_, dkv, dkv + elements(), scratch_, heads(qkv, q0, 0, 3),
                                      keys(qkv, step, 0), keys(qkv, step, 1), heads(dout, q0, 0, 1), lse + q0, D_ + q0,
                                      s);
    }

    int next() const { return (rank_ + 1) % zigzag_.ranks; }
    int before() const { return zigzag_.source(rank_, 1); }
    // Elements of one sequence of dk (and of dv) that hold a sum once `rank` has added its part for the keys of `step`.
    size_t summed(int rank, int step) const { return zigzag_.seen(rank, step) * Tc_ * C(); }
    // Buffer [0] goes to the next rank while [1] comes from the one before. Once it has come, arrive() makes it [0].
    void pass_on_kv(int step, const X* qkv) {
        if (step == 0)  // its own
            comm_->send_recv_rows(next(), kv_[0], qkv + C(), 3 * C(), 2 * C(), tokens(), before(), kv_[1]);
        else
            comm_->send_recv(next(), kv_[0], 2 * elements(), before(), kv_[1], 2 * elements());
    }
    void pass_on_dkv(int step) {  // of the keys of the step before
        const size_t sequence = 2 * Tc_ * C();
        for (size_t at = 0; at < 2 * elements(); at += sequence)
            comm_->send_recv(next(), dkv_[0] + at, summed(rank_, step - 1), before(), dkv_[1] + at,
                             summed(before(), step - 1));
    }
    // Keys and values travel during every step but the last. In backward the gradients of the keys of the step before
    // travel too, from the third step on and once more after the last.
    bool kv_travels(int step) const { return step + 1 < zigzag_.ranks; }
    bool dkv_travels(int step, Pass pass) const { return pass == Pass::backward && step > 1; }
    void depart(int step, Pass pass, const X* qkv) {
        const bool kv = kv_travels(step), dkv = dkv_travels(step, pass);
        if (!kv && !dkv) return;
        comm_->fork();
        comm_->group([&] {
            if (kv) pass_on_kv(step, qkv);
            if (dkv) pass_on_dkv(step);
        });
        comm_->head_start();
    }
    void arrive(int step, Pass pass) {
        const bool kv = kv_travels(step), dkv = dkv_travels(step, pass);
        if (!kv && !dkv) return;
        comm_->join();
        if (kv) std::swap(kv_[0], kv_[1]);
        if (dkv) std::swap(dkv_[0], dkv_[1]);
    }
};

template <class Dev, class X, class Comm>
void Ring<Dev, X, Comm>::forward(X* out, A* lse, const X* qkv) {
    for (int step = 0; step < zigzag_.ranks; step++) {
        depart(step, Pass::forward, qkv);
        if (step == 0) attention_clear_state(dev_, static_cast<A*>(nullptr), lse_, own_keys(0, 2 * Tc_));
        forward_partial(step == 0 ? own_keys(0, 2 * Tc_) : others_keys(step), step, qkv);
        arrive(step, Pass::forward);
    }
    copy_rows(dev_, out, elements(), o_, elements(), elements(), 1);  // the one rounding
    copy_rows(dev_, lse, elements() / shape_.HS, lse_, elements() / shape_.HS, elements() / shape_.HS, 1);
}

// The gradients of a rank's keys start at the next rank, at step 1, and are home after ranks − 1 hops. The last hop is
// hidden behind the queries and keys of the rank's own early chunk, so these come last.
template <class Dev, class X, class Comm>
void Ring<Dev, X, Comm>::backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv) {
    const int ranks = zigzag_.ranks;
    depart(0, Pass::backward, qkv);
    dev_.zero(o_, dq_sum_bytes());
    attention_D(dev_, D_, dout, out, shape_.B, 2 * Tc_, shape_.NH, shape_.HS);
    PartialShape late = own_keys(Tc_, Tc_);
    late.write_dkv = true;
    backward_partial(late, 0, home_, dout, lse, qkv);
    arrive(0, Pass::backward);

    for (int step = 1; step < ranks; step++) {
        const bool first = step == 1;  // this rank starts the sum
        depart(step, Pass::backward, qkv);
        PartialShape s = others_keys(step);
        s.write_dkv = true;
        backward_partial(s, step, first ? dkv_[0] : own_, dout, lse, qkv);
        arrive(step, Pass::backward);
        if (first) continue;
        const size_t sequence = 2 * Tc_ * C(), own = s.Tk * C(), come = summed(before(), step - 1);
        add_rows(dev_, dkv_[0], sequence, own_, sequence, come, 2 * shape_.B);
        if (own > come) copy_rows(dev_, dkv_[0] + come, sequence, own_ + come, sequence, own - come, 2 * shape_.B);
    }

    depart(ranks, Pass::backward, qkv);
    backward_partial(own_keys(0, Tc_), 0, home_, dout, lse, qkv);
    // The last gradients come meanwhile.
    attention_write_dq(dev_, Heads<X>{dqkv, 2 * Tc_ * 3 * C(), 3 * C()}, o_, own_keys(0, 2 * Tc_));
    arrive(ranks, Pass::backward);
    const size_t come = ranks > 1 ? summed(before(), ranks - 1) / C() : 0;  // tokens of a sequence
    for (int b = 0; b < shape_.B; b++)
        for (int v = 0; v < 2; v++) {
            const size_t token = b * 2 * Tc_, at = v * elements() + token * C();
            X* to = dqkv + (3 * token + 1 + v) * C();
            if (come > 0) sum_rows(dev_, to, 3 * C(), home_ + at, dkv_[0] + at, C(), C(), come);
            if (come < 2 * size_t(Tc_))
                copy_rows(dev_, to + come * 3 * C(), 3 * C(), home_ + at + come * C(), C(), C(), 2 * Tc_ - come);
        }
}
