// Ring attention (Liu et al. 2023): one sequence over N ranks, each with T/N of its tokens. Keys and values travel
// around the ring; at every stop a rank runs its queries against them by the block form and merges the result in fp32,
// so that no rank ever holds more than two ranks' keys.
//
//   step s = 0..N−1:  rank r has the keys of rank (r − s) mod N, sends them to r + 1, receives the next from r − 1
//   forward:   (o, L) ← merge((o, L), block(q, k, v))
//   backward:  dq += …;  dk and dv travel a step behind their keys, and each rank adds to them: home after N − 1 hops
//
// What travels does so behind the blocks that a rank works on meanwhile. Partial results are fp32 wherever they are, on
// the way too, and are rounded once: so the error does not grow with N.
//
// Zigzag: with a causal mask, contiguous parts would leave the first rank idle while the last works. So the sequence is
// cut into 2N chunks and rank r holds chunks r and 2N−1−r: an early one, which sees little, and a late one, which sees
// much. At every step but the first each rank then has exactly two whole pairs of chunks to work on:
//   keys from an earlier rank s < r: both its chunks of queries see the early chunk s and neither the late one 2N−1−s
//   keys from a later rank   s > r: its late chunk sees both chunks, its early one neither
// so that no mask is needed; and at the first step, with its own keys, the mask of an ordinary sequence of two chunks.
//
// Written over the seam: the backend's block form (attention/blocks.h, dev/reference.h) is declared before this header.
// A rank's tensors are those of its 2·Tc tokens in the order (early chunk, late chunk): qkv (B, 2Tc, 3, NH, HS), out
// and dout (B, 2Tc, NH, HS), dqkv as qkv. lse (2, B, NH, Tc), by chunk.
//
// Writes: forward out and lse, backward dqkv (every element).   Run: ./dev/test_ring
#pragma once
#include <algorithm>

#include "layers/types.h"

// Which rank has what of the sequence.
struct Zigzag {
    int ranks;
    int chunk(int rank, int half) const { return half == 0 ? rank : 2 * ranks - 1 - rank; }
    int owner(int chunk) const { return std::min(chunk, 2 * ranks - 1 - chunk); }
    int source(int rank, int step) const { return (rank - step + ranks) % ranks; }  // of the keys at a step
    // Do queries of one chunk see keys of another: all, some (it is the same chunk), or none?
    static bool sees(int query_chunk, int key_chunk) { return key_chunk <= query_chunk; }
};

// A rank's part in the ring: keys and values of two ranks, fp32 state of its own tokens, fp32 gradients of three ranks'
// keys and values. Comm: the ranks of one sequence, as in layers/comm.h.
template <class Dev, class X, class Comm = typename Dev::Comm>
class Ring {
  public:
    using A = Acc<X>;
    // start() gives it memory of bytes() and the others.
    Ring(const Dev& dev, int rank, int ranks, int B, int Tc, int NH, int HS, float scale = 0)
        : dev_(dev), zigzag_{ranks}, rank_(rank), B_(B), Tc_(Tc), NH_(NH), HS_(HS), scale_(scale) {
        bytes_ = place(nullptr);
    }
    size_t bytes() const { return bytes_; }
    void start(void* memory, Comm* comm) {
        place(memory);
        comm_ = comm;
        if (zigzag_.ranks > 1) comm_->share(memory, bytes_);
    }

    void forward(X* out, A* lse, const X* qkv);
    void backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv);

  private:
    const Dev& dev_;
    const Zigzag zigzag_;
    const int rank_, B_, Tc_, NH_, HS_;
    const float scale_;
    size_t bytes_;
    Comm* comm_ = nullptr;
    X* kv_[2];       // (B, 2Tc, 2, NH, HS): at work, and on its way in
    A* dkv_[2];      // (2: K and V, B, 2Tc, NH, HS) of the ranks so far: at work, and on its way in
    A* own_;         // (2: K and V, B, Tc or 2Tc, NH, HS): this rank's addition to it
    A* home_;        // (2: K and V, B, 2Tc, NH, HS): of its own keys by its own queries
    A* o_;           // (2 chunks, B, Tc, NH, HS): running output, then dq
    A* D_;           // (2 chunks, B, NH, Tc)
    double* lse_;    // as D_: the running one
    char* scratch_;  // of the kernels

    size_t place(void* memory) {
        size_t used = 0;
        const auto take = [&](auto*& p, size_t n) {
            p = reinterpret_cast<std::decay_t<decltype(p)>>(reinterpret_cast<uintptr_t>(memory) + used);
            used += (n * sizeof(*p) + 255) / 256 * 256;
        };
        const bool travels = zigzag_.ranks > 1;
        for (X*& p : kv_) take(p, travels ? 2 * elements() : 0);
        for (A*& p : dkv_) take(p, travels ? 2 * elements() : 0);
        take(own_, travels ? 2 * elements() : 0);
        take(home_, 2 * elements());
        take(o_, elements());
        take(D_, elements() / HS_);
        take(lse_, elements() / HS_);
        take(scratch_, std::max<size_t>(16, attention_block_scratch_bytes<X>(dev_, {B_, Tc_, 2 * Tc_, NH_, HS_})));
        return used;
    }

    size_t C() const { return size_t(NH_) * HS_; }
    size_t rows() const { return size_t(B_) * Tc_; }                      // of a chunk
    size_t elements() const { return 2 * rows() * C(); }                  // of both chunks' (B, Tc, NH, HS)
    size_t chunk(int half) const { return half * rows() * C(); }          // in o_
    size_t stats(int half) const { return half * rows() * NH_; }          // in lse and D_
    Heads<const X> heads(const X* x, int half, int part, int parts) const {  // x (B, 2Tc, parts, NH, HS)
        const size_t token = parts * C();
        return {x + half * Tc_ * token + part * C(), 2 * Tc_ * token, token};
    }
    Heads<const X> keys(const X* qkv, int step, int part) const {  // part 0 K, 1 V
        return step == 0 ? heads(qkv, 0, part + 1, 3) : heads(kv_[0], 0, part, 2);
    }

    // One call of the block form: queries of one chunk against the first one or two chunks of the step's keys.
    struct Block {
        int half, chunks;
        BlockShape shape;
    };
    Block block(int half, int chunks, bool causal) const {
        return {half, chunks, {B_, Tc_, chunks * Tc_, NH_, HS_, half * Tc_, 0, causal, scale_}};
    }
    int chunks_seen(int step) const { return step == 0 || zigzag_.source(rank_, step) > rank_ ? 2 : 1; }
    // Its own keys are neighbours in order, so that there the mask is that of a sequence of 2Tc tokens.
    template <class Work>
    void for_each_block(int step, Work work) {
        if (step == 0 || chunks_seen(step) == 1) work(block(0, chunks_seen(step), step == 0));
        work(block(1, chunks_seen(step), step == 0));
    }
    void backward_block(const Block& b, int step, A* dkv, size_t dkv_half, const X* dout, const A* lse, const X* qkv) {
        attention_backward_block<X>(dev_, o_ + chunk(b.half), dkv, dkv + dkv_half, scratch_,
                                    heads(qkv, b.half, 0, 3), keys(qkv, step, 0), keys(qkv, step, 1),
                                    heads(dout, b.half, 0, 1), lse + stats(b.half), D_ + stats(b.half), b.shape);
    }

    // buffers[0] goes to the next rank while buffers[1] comes from the one before. When it has come, it is buffers[0].
    template <class T>
    void pass_on(T* const (&buffers)[2]) {
        const int next = (rank_ + 1) % zigzag_.ranks, before = (rank_ + zigzag_.ranks - 1) % zigzag_.ranks;
        comm_->send_recv(next, buffers[0], before, buffers[1], 2 * elements());
    }
    // Starts what travels during a step.
    void depart(bool kv, bool dkv) {
        if (!kv && !dkv) return;
        comm_->fork();
        comm_->group([&] {
            if (kv) pass_on(kv_);
            if (dkv) pass_on(dkv_);
        });
        comm_->head_start();
    }
    void arrive(bool kv, bool dkv) {
        if (!kv && !dkv) return;
        comm_->join();
        if (kv) std::swap(kv_[0], kv_[1]);
        if (dkv) std::swap(dkv_[0], dkv_[1]);
    }
    void pack_own_keys(const X* qkv) {
        if (zigzag_.ranks > 1) copy_rows(dev_, kv_[0], 2 * C(), qkv + C(), 3 * C(), 2 * C(), 2 * rows());
    }
};

template <class Dev, class X, class Comm>
void Ring<Dev, X, Comm>::forward(X* out, A* lse, const X* qkv) {
    pack_own_keys(qkv);
    for (int step = 0; step < zigzag_.ranks; step++) {
        const bool more = step + 1 < zigzag_.ranks;
        depart(more, false);
        if (step == 0)
            for (int half = 0; half < 2; half++)
                attention_clear_state(dev_, o_ + chunk(half), lse_ + stats(half), {B_, Tc_, Tc_, NH_, HS_});
        for_each_block(step, [&](const Block& b) {
            attention_forward_block<X>(dev_, o_ + chunk(b.half), lse_ + stats(b.half), heads(qkv, b.half, 0, 3),
                                       keys(qkv, step, 0), keys(qkv, step, 1), b.shape);
        });
        arrive(more, false);
    }
    // The one rounding: chunk by chunk into the rows of out.
    for (int half = 0; half < 2; half++)
        copy_rows(dev_, out + half * Tc_ * C(), 2 * Tc_ * C(), o_ + chunk(half), Tc_ * C(), Tc_ * C(), B_);
    copy_rows(dev_, lse, 2 * stats(1), lse_, 2 * stats(1), 2 * stats(1), 1);
}

// The gradients of a rank's keys start their way at the next rank, at step 1, and are home after ranks − 1 hops, the
// last of them behind the queries and keys of its own early chunk, which therefore come last.
template <class Dev, class X, class Comm>
void Ring<Dev, X, Comm>::backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv) {
    const int ranks = zigzag_.ranks;
    pack_own_keys(qkv);
    depart(ranks > 1, false);
    dev_.zero(o_, elements() * sizeof(A));
    dev_.zero(home_, 2 * elements() * sizeof(A));
    for (int half = 0; half < 2; half++)
        for (int b = 0; b < B_; b++) {
            const size_t row = (size_t(b) * 2 + half) * Tc_ * C();
            attention_D(dev_, D_ + stats(half) + size_t(b) * NH_ * Tc_, dout + row, out + row, 1, Tc_, NH_, HS_);
        }
    backward_block(block(1, 2, true), 0, home_, elements(), dout, lse, qkv);
    arrive(ranks > 1, false);

    for (int step = 1; step < ranks; step++) {
        const bool more = step + 1 < ranks, first = step == 1;
        depart(more, !first);
        // The first rank on the way starts the sum; one sequence's early chunk lies as the kernels want it.
        const size_t seen = chunks_seen(step) * rows() * C();  // elements of dk, and of dv
        const bool directly = first && (B_ == 1 || chunks_seen(step) == 2);
        if (first) dev_.zero(dkv_[0], 2 * elements() * sizeof(A));
        if (!directly) dev_.zero(own_, 2 * seen * sizeof(A));
        for_each_block(step, [&](const Block& b) {
            backward_block(b, step, directly ? dkv_[0] : own_, directly ? elements() : seen, dout, lse, qkv);
        });
        arrive(more, !first);
        if (!directly)
            for (int v = 0; v < 2; v++)
                add_rows(dev_, dkv_[0] + v * elements(), 2 * Tc_ * C(), own_ + v * seen, seen / B_, seen / B_, B_);
    }

    depart(false, ranks > 1);
    backward_block(block(0, 2, true), 0, home_, elements(), dout, lse, qkv);
    arrive(false, ranks > 1);
    for (int half = 0; half < 2; half++)
        for (int b = 0; b < B_; b++)
            copy_rows(dev_, dqkv + (size_t(b) * 2 + half) * Tc_ * 3 * C(), 3 * C(),
                      o_ + chunk(half) + size_t(b) * Tc_ * C(), C(), C(), Tc_);
    for (int v = 0; v < 2; v++) {
        X* to = dqkv + (1 + v) * C();
        const A* own = home_ + v * elements();
        if (ranks > 1)
            sum_rows(dev_, to, 3 * C(), own, dkv_[0] + v * elements(), C(), C(), 2 * rows());
        else
            copy_rows(dev_, to, 3 * C(), own, C(), C(), 2 * rows());
    }
}
