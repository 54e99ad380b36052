// Ring attention (Liu et al. 2023): one sequence over N ranks, each with T/N of its tokens. Keys and values travel
// around the ring; at every stop a rank runs its queries against them by the block form and merges the result in fp32,
// so that no rank ever holds more than two ranks' keys.
//
//   step s = 0..N−1:  rank r has the keys of rank (r − s) mod N, sends them to r + 1, receives the next from r − 1
//   forward:   (o, L) ← merge((o, L), block(q, k, v))
//   backward:  dq += …;  dk and dv travel a step behind their keys, each rank adds to them, and come home after N steps
//
// What travels does so behind the blocks that a rank works on meanwhile.
//
// Zigzag: with a causal mask, contiguous parts would leave the first rank idle while the last works. So the sequence is
// cut into 2N chunks and rank r holds chunks r and 2N−1−r: an early one, which sees little, and a late one, which sees
// much. At every step but the first each rank then has exactly two whole pairs of chunks to work on:
//   keys from an earlier rank s < r: both its chunks of queries see the early chunk s and neither the late one 2N−1−s
//   keys from a later rank   s > r: its late chunk sees both chunks, its early one neither
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

// A rank's part in the ring, and its memory: keys and values of two ranks, and fp32 state of its own tokens.
template <class Dev, class X>
class Ring {
  public:
    using A = Acc<X>;
    Ring(const Dev& dev, typename Dev::Comm& comm, int B, int Tc, int NH, int HS, float scale = 0)
        : dev_(dev), comm_(comm), zigzag_{comm.size}, B_(B), Tc_(Tc), NH_(NH), HS_(HS), scale_(scale) {
        for (X*& p : kv_) p = alloc<X>(2 * elements());
        for (A*& p : dkv_) p = alloc<A>(2 * elements());
        own_ = alloc<A>(2 * elements());
        o_ = alloc<A>(elements());
        D_ = alloc<A>(elements() / HS);
        scratch_ = dev_.alloc(std::max<size_t>(16, attention_block_scratch_bytes<X>(dev, {B, Tc, Tc, NH, HS})));
    }
    ~Ring() {
        for (X* p : kv_) dev_.free(p);
        for (A* p : dkv_) dev_.free(p);
        for (A* p : {own_, o_, D_}) dev_.free(p);
        dev_.free(scratch_);
    }
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    void forward(X* out, A* lse, const X* qkv);
    void backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv);

  private:
    const Dev& dev_;
    typename Dev::Comm& comm_;
    const Zigzag zigzag_;
    const int B_, Tc_, NH_, HS_;
    const float scale_;
    X* kv_[2] = {};            // (B, 2Tc, 2, NH, HS): at work, and on its way in
    A* dkv_[2] = {};           // (2 chunks, 2: K and V, B, Tc, NH, HS): of the ranks so far, and on its way in
    A* own_ = nullptr;         // the same, of this rank
    A* o_ = nullptr;           // (2 chunks, B, Tc, NH, HS): running output, then dq
    A* D_ = nullptr;           // (2 chunks, B, NH, Tc)
    void* scratch_ = nullptr;  // of the kernels

    size_t C() const { return size_t(NH_) * HS_; }
    size_t rows() const { return size_t(B_) * Tc_; }                                  // of a chunk
    size_t elements() const { return 2 * rows() * C(); }                              // of both chunks' (B, Tc, NH, HS)
    size_t chunk(int half) const { return half * rows() * C(); }                      // in o_
    size_t stats(int half) const { return half * rows() * NH_; }                      // in lse and D_
    size_t gradient(int half, int v) const { return (2 * half + v) * rows() * C(); }  // in dkv_

    template <class T>
    T* alloc(size_t n) {
        return static_cast<T*>(dev_.alloc(n * sizeof(T)));
    }
    // A chunk of a tensor (B, 2Tc, parts, NH, HS), of which it is part number `part`.
    Heads<const X> heads(const X* x, int half, int part, int parts) const {
        const size_t token = parts * C();
        return {x + half * Tc_ * token + part * C(), 2 * Tc_ * token, token};
    }
    BlockShape shape(int q_half, int key_rank, int k_half) const {
        return {B_,
                Tc_,
                Tc_,
                NH_,
                HS_,
                static_cast<long long>(zigzag_.chunk(comm_.rank, q_half)) * Tc_,
                static_cast<long long>(zigzag_.chunk(key_rank, k_half)) * Tc_,
                true,
                scale_};
    }
    // Calls work(q_half, k_half, shape) for every pair of chunks that a step has.
    template <class Work>
    void for_each_pair(int step, Work work) {
        const int source = zigzag_.source(comm_.rank, step);
        for (int q = 0; q < 2; q++)
            for (int k = 0; k < 2; k++)
                if (Zigzag::sees(zigzag_.chunk(comm_.rank, q), zigzag_.chunk(source, k)))
                    work(q, k, shape(q, source, k));
    }
    // buffers[0] goes to the next rank while buffers[1] comes from the one before, behind the work that is enqueued
    // between comm_.fork() and join(). Then what has come is buffers[0].
    template <class T>
    void pass_on(T* const (&buffers)[2]) {
        const int next = (comm_.rank + 1) % comm_.size, before = (comm_.rank + comm_.size - 1) % comm_.size;
        comm_.send_recv(next, buffers[0], before, buffers[1], 2 * elements());
    }
    void start_with_own_keys(const X* qkv) {  // K and V out of the packed qkv
        copy_rows(dev_, kv_[0], 2 * C(), qkv + C(), 3 * C(), 2 * C(), 2 * rows());
    }
};

template <class Dev, class X>
void Ring<Dev, X>::forward(X* out, A* lse, const X* qkv) {
    start_with_own_keys(qkv);
    for (int half = 0; half < 2; half++)
        attention_clear_state(dev_, o_ + chunk(half), lse + stats(half), shape(half, comm_.rank, half));
    for (int step = 0; step < comm_.size; step++) {
        const bool more = step + 1 < comm_.size;
        comm_.fork();
        if (more) pass_on(kv_);
        for_each_pair(step, [&](int q, int k, const BlockShape& s) {
            attention_forward_block<X>(dev_, o_ + chunk(q), lse + stats(q), heads(qkv, q, 0, 3), heads(kv_[0], k, 0, 2),
                                       heads(kv_[0], k, 1, 2), s);
        });
        comm_.join();
        if (more) std::swap(kv_[0], kv_[1]);
    }
    // The one rounding: chunk by chunk into the rows of out.
    for (int half = 0; half < 2; half++)
        copy_rows(dev_, out + half * Tc_ * C(), 2 * Tc_ * C(), o_ + chunk(half), Tc_ * C(), Tc_ * C(), B_);
}

template <class Dev, class X>
void Ring<Dev, X>::backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv) {
    start_with_own_keys(qkv);
    dev_.zero(o_, elements() * sizeof(A));
    for (int half = 0; half < 2; half++)
        for (int b = 0; b < B_; b++) {
            const size_t row = (size_t(b) * 2 + half) * Tc_ * C();
            attention_D(dev_, D_ + stats(half) + size_t(b) * NH_ * Tc_, dout + row, out + row, 1, Tc_, NH_, HS_);
        }
    // Meanwhile come the gradients that other ranks have for these keys.
    for (int step = 0; step < comm_.size; step++) {
        const bool more = step + 1 < comm_.size;
        comm_.fork();
        if (more) pass_on(kv_);
        if (step > 0) pass_on(dkv_);
        dev_.zero(own_, 2 * elements() * sizeof(A));
        for_each_pair(step, [&](int q, int k, const BlockShape& s) {
            attention_backward_block<X>(dev_, o_ + chunk(q), own_ + gradient(k, 0), own_ + gradient(k, 1), scratch_,
                                        heads(qkv, q, 0, 3), heads(kv_[0], k, 0, 2), heads(kv_[0], k, 1, 2),
                                        heads(dout, q, 0, 1), lse + stats(q), D_ + stats(q), s);
        });
        comm_.join();
        if (more) std::swap(kv_[0], kv_[1]);
        if (step > 0) std::swap(dkv_[0], dkv_[1]);
        if (step > 0)
            add_to(dev_, dkv_[0], own_, 2 * elements());
        else
            std::swap(dkv_[0], own_);
    }
    comm_.fork();
    pass_on(dkv_);  // home
    comm_.join();
    std::swap(dkv_[0], dkv_[1]);
    for (int half = 0; half < 2; half++)
        for (int b = 0; b < B_; b++) {
            X* to = dqkv + (size_t(b) * 2 + half) * Tc_ * 3 * C();
            const A* from[3] = {o_ + chunk(half), dkv_[0] + gradient(half, 0), dkv_[0] + gradient(half, 1)};
            for (int part = 0; part < 3; part++)
                copy_rows(dev_, to + part * C(), 3 * C(), from[part] + b * Tc_ * C(), C(), C(), Tc_);
        }
}
