// Attention over a split sequence by an exchange of heads (DeepSpeed-Ulysses, Jacobs et al. 2023). Ranks trade some
// tokens of all heads for all tokens of some heads, run the ordinary kernel on the whole sequence, and trade back. A
// head's result does not depend on the heads beside it, so every bit is that of one GPU.
//
//   qkv (B, 2Tc, 3, NH, HS)   of a rank's own tokens
//    │ to rank g: its heads, rows of HS·heads elements
//   qkv (B, T, 3, heads, HS)  of all tokens                forward and backward, as on one GPU
//    │ to rank r: its chunks of tokens
//   out (B, 2Tc, NH, HS)
//
// A rank works on its NH/N heads in cohorts. While one computes, the next one's tensors come and the results of the one
// before go home, so only the first journey and the last are waited for. A rank with few heads has a single cohort, and
// waits for all:
//
//   compute    ·              cohort 0       cohort 1          cohort 2
//   travel     0 comes        1 comes        0 home, 2 comes   1 home          2 home
//
// Rows travel by copy engines out of the tensor that holds them, which needs no packing (layers/comm/peer_copy.h).
// Between machines NCCL sends what the GPU has packed. Backward trades qkv, out and dout anew, because keeping them
// would take the memory of all layers.
//
// Include the backend's attention (attention/attention.h or layers/cpu/reference.h) before this header. lse is (cohorts,
// B, heads, T) of this rank's heads.
//
// Limits: N divides NH, and the kernel takes the whole sequence (flash_fp32: 2^20 tokens).   Run: ./dev/test_ring
#pragma once
#include <memory>

#include "attention/ring/ring.h"

template <class Dev, class X, class Comm = typename Dev::Comm>
class HeadExchange : public Split<Dev, X, Comm> {
    using Base = Split<Dev, X, Comm>;
    using Base::comm_, Base::dev_, Base::rank_, Base::take, Base::zigzag_;

  public:
    using A = Acc<X>;
    HeadExchange(const Dev& dev, int rank, int ranks, int B, int Tc, int NH, int HS,
                 Attention attention = Attention::flash)
        : Base(dev, rank, ranks), B_(B), Tc_(Tc), T_(2 * ranks * Tc), NH_(NH), HS_(HS), attention_(attention) {
        const int own = NH / ranks, period = backward_period(NH), periods = own / period;
        if (own % period == 0 && periods > 1)
            for (cohorts_ = 2; periods % cohorts_ > 0;) cohorts_++;  // few, because a short kernel is a slower one
        heads_ = own / cohorts_;
    }
    void forward(X* out, A* lse, const X* qkv) override;
    void backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv) override;
    int heads() const { return heads_; }  // of a cohort

  private:
    const int B_, Tc_, T_, NH_, HS_;
    const Attention attention_;
    int cohorts_ = 1, heads_;  // of a rank, of a cohort
    // A cohort's tensors for all tokens. One is at work, and the other's arguments come while its results go.
    struct Cohort {
        X *qkv, *dqkv;  // (B, T, 3, heads, HS)
        X *out, *dout;  // (B, T, heads, HS)
    } cohort_[2];
    X* home_;            // (N, B, 2Tc, 3, heads, HS), results of each rank's heads for this rank's tokens
    X *packed_, *free_;  // what NCCL sends of (B, T, 5, heads, HS), and what is free of it
    char* scratch_;      // the kernels'

    void buffers() override {
        const size_t n = tokens() * row();
        for (int i = 0; i < std::min(2, cohorts_); i++) {
            for (X** p : {&cohort_[i].qkv, &cohort_[i].dqkv}) take(*p, 3 * n);
            for (X** p : {&cohort_[i].out, &cohort_[i].dout}) take(*p, n);
        }
        take(home_, cohorts_ > 1 ? 3 * n : 0);
        if (cohorts_ == 1) home_ = cohort_[0].qkv;  // read before results come
        take(packed_, 5 * n - 5 * n / zigzag_.ranks);
        take(scratch_, std::max<size_t>(16, attention_scratch_bytes<X>(dev_, attention_, B_, T_, heads_, HS_)));
    }
    size_t C() const { return size_t(NH_) * HS_; }
    size_t tokens() const { return size_t(B_) * T_; }
    size_t row() const { return size_t(heads_) * HS_; }  // a token's elements in a cohort
    int first_head(int rank, int c) const { return rank * (NH_ / zigzag_.ranks) + c * heads_; }
    size_t lse_of(int c) const { return size_t(c) * B_ * heads_ * T_; }
    // Where chunk `half` of a rank begins in a cohort's tensor (B, T, parts, heads, HS).
    size_t place(int b, int rank, int half, int parts) const {
        return (size_t(b) * T_ + size_t(zigzag_.chunk(rank, half)) * Tc_) * parts * row();
    }
    // Calls f(to, from, b, half) for each message to another rank and from one, in the same order on all ranks.
    template <class F>
    void each_message(F f) const {
        for (int step = 0; step < zigzag_.ranks; step++)
            for (int b = 0; b < B_; b++)
                for (int half = 0; half < 2; half++)
                    f((rank_ + step) % zigzag_.ranks, zigzag_.source(rank_, step), b, half);
    }

    // x (B, 2Tc, parts, NH, HS) of these tokens → y (B, T, parts, heads, HS) of this rank's heads in cohort c.
    void trade(X* y, const X* x, int parts, int c) {
        const size_t rows = size_t(Tc_) * parts;
        each_message([&](int to, int from, int b, int half) {
            const X* send = x + (size_t(b) * 2 + half) * rows * C() + size_t(first_head(to, c)) * HS_;
            X *recv = y + place(b, from, half, parts), *there = y + place(b, rank_, half, parts);
            if (to == rank_) return copy_rows(dev_, recv, row(), send, C(), row(), rows);
            comm_->send_recv_rows(to, free_, send, C(), row(), rows, from, recv, there);
            free_ += rows * row();
        });
    }
    // The other way: y (B, T, parts, heads, HS) → home_, and this rank's own heads into x at once.
    void trade_back(X* x, const X* y, int parts, int c) {
        const size_t rows = size_t(Tc_) * parts, n = rows * row();
        each_message([&](int to, int from, int b, int half) {
            const X* send = y + place(b, to, half, parts);
            const auto at = [&](int rank) { return home_ + ((size_t(rank) * B_ + b) * 2 + half) * n; };
            if (to == rank_)
                copy_rows(dev_, x + (size_t(b) * 2 + half) * rows * C() + size_t(first_head(to, c)) * HS_, C(), send,
                          row(), row(), rows);
            else
                comm_->send_recv(to, send, n, from, at(from), n, at(rank_));
        });
    }
    // home_ → x (B, 2Tc, parts, NH, HS), the other ranks' heads.
    void unpack(X* x, int parts, int c) {
        const size_t rows = size_t(B_) * 2 * Tc_ * parts;
        for (int r = 0; r < zigzag_.ranks; r++)
            if (r != rank_)
                copy_rows(dev_, x + size_t(first_head(r, c)) * HS_, C(), home_ + r * rows * row(), row(), row(), rows);
    }

    // come(cohort, c) brings what work(cohort, c) reads, and what it writes goes home into x (…, parts, NH, HS).
    template <class Come, class Work>
    void pipeline(X* x, int parts, X* Cohort::*result, Come come, Work work) {
        for (int c = -1; c <= cohorts_ + 1; c++) {  // the cohort at work
            if (c >= 2) unpack(x, parts, c - 2);
            const bool comes = c + 1 < cohorts_, goes = 0 < c && c <= cohorts_;
            free_ = packed_;
            if (comes || goes) {
                comm_->fork();
                comm_->group([&] {
                    if (goes) trade_back(x, cohort_[(c - 1) % 2].*result, parts, c - 1);
                    if (comes) come(cohort_[(c + 1) % 2], c + 1);
                });
                comm_->head_start();
            }
            if (0 <= c && c < cohorts_) work(cohort_[c % 2], c);
            if (comes || goes) comm_->join();
        }
    }
};

template <class Dev, class X, class Comm>
void HeadExchange<Dev, X, Comm>::forward(X* out, A* lse, const X* qkv) {
    pipeline(
        out, 1, &Cohort::out, [&](Cohort& its, int c) { trade(its.qkv, qkv, 3, c); },
        [&](Cohort& its, int c) {
            attention_forward<X>(dev_, attention_, its.out, lse + lse_of(c), nullptr, scratch_, its.qkv, B_, T_, heads_,
                                 HS_);
        });
}

template <class Dev, class X, class Comm>
void HeadExchange<Dev, X, Comm>::backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv) {
    pipeline(
        dqkv, 3, &Cohort::dqkv,
        [&](Cohort& its, int c) {
            trade(its.qkv, qkv, 3, c);
            trade(its.out, out, 1, c);
            trade(its.dout, dout, 1, c);
        },
        [&](Cohort& its, int c) {
            attention_backward<X>(dev_, attention_, its.dqkv, scratch_, its.dout, its.out, lse + lse_of(c), nullptr,
                                  its.qkv, B_, T_, heads_, HS_, first_head(rank_, c), NH_);
        });
}

// The exchange of heads where the number of ranks divides NH, else the ring.
template <class Dev, class X>
std::unique_ptr<Split<Dev, X>> split_attention(const Dev& dev, int rank, int ranks, int B, int Tc, int NH, int HS,
                                               Attention attention) {
    if (NH % ranks == 0) return std::make_unique<HeadExchange<Dev, X>>(dev, rank, ranks, B, Tc, NH, HS, attention);
    return std::make_unique<Ring<Dev, X>>(dev, rank, ranks, B, Tc, NH, HS, 0.f, attention);
}
