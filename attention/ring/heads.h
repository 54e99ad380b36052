// Attention by an exchange of heads (Jacobs et al. 2023, "DeepSpeed Ulysses"), for a number of ranks that divides the
// number of heads. Heads know nothing of each other, so the ranks trade tokens for heads and back:
//
//   T/N tokens of all heads → all tokens of NH/N heads → T/N tokens of all heads
//   forward:   qkv goes out, out comes back
//   backward:  qkv, out and dout go out, dqkv comes back. lse stays where its heads are
//
// In between the attention kernel gets whole sequences in their true order, so the results are one GPU's bit for bit.
// A rank's chunks are a ring's. Each is rows of NH/N·HS elements, with gaps at the rank of the tokens, and without gaps
// at the rank of the heads. Copy engines write them there, and fetch them on the way back. Between machines each rank
// packs, sends, receives and unpacks. A rank may do its heads in cohorts, of which one travels while another is at work.
//
// Include the backend's attention before this header.
//
// Writes: forward out and lse, backward dqkv (every element).   Run: ./dev/test_ring exchanged
#pragma once
#include <memory>
#include <vector>

#include "attention/ring/ring.h"

template <class Dev, class X, class Comm = typename Dev::Comm>
class HeadExchange : public ContextParallel<Dev, X, Comm> {
    using Base = ContextParallel<Dev, X, Comm>;
    using Base::dev_, Base::zigzag_, Base::rank_, Base::B_, Base::Tc_, Base::NH_, Base::HS_, Base::attention_,
        Base::comm_, Base::C, Base::elements;

  public:
    using typename Base::A;
    HeadExchange(const Dev& dev, int rank, int ranks, int B, int Tc, int NH, int HS,
                 Attention attention = Attention::flash, int cohorts = 1)
        : Base(dev, rank, ranks, B, Tc, NH, HS, attention), cohorts_(cohorts), heads_(NH / ranks / cohorts) {
        if (NH % (ranks * cohorts))
            throw Error(format("%d heads cannot be divided among %d ranks with %d cohorts each", NH, ranks, cohorts));
        this->bytes_ = place(nullptr);
    }
    const char* name() const override { return "exchange of heads"; }

    void forward(X* out, A* lse, const X* qkv) override {
        run({{true, qkv, qkv_, dqkv_, 3}, {false, out, out_, qkv_, 1}}, [&](int c) {
            attention_forward(dev_, attention_, of(out_, c, 1), lse + c * rows_of_lse(), static_cast<X*>(nullptr),
                              scratch_, of(qkv_, c, 3), B_, T(), heads_, HS_);
        });
    }
    void backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv) override {
        X* const more = dqkv_ + 3 * elements();
        run({{true, qkv, qkv_, dqkv_, 3},
             {true, out, out_, more, 1},
             {true, dout, dout_, more + elements(), 1},
             {false, dqkv, dqkv_, qkv_, 3}},
            [&](int c) {
                attention_backward(dev_, attention_, of(dqkv_, c, 3), scratch_, of(dout_, c, 1), of(out_, c, 1),
                                   lse + c * rows_of_lse(), static_cast<const X*>(nullptr), of(qkv_, c, 3), B_, T(),
                                   heads_, HS_, first_head(rank_, c), NH_);
            });
    }

  private:
    const int cohorts_, heads_;  // heads of a cohort
    X *qkv_, *out_, *dout_;      // all tokens of this rank's heads: (cohorts, B, T, 3 or 1, heads, HS)
    X* dqkv_;                    // as qkv_; and before that, with 2/3 more, what is packed
    char* scratch_;              // the kernels'

    size_t place(void* memory) override {
        typename Base::Taker take{memory};
        take(qkv_, 3 * elements()), take(out_, elements()), take(dout_, elements()), take(dqkv_, 5 * elements());
        take(scratch_, std::max<size_t>(16, attention_scratch_bytes<X>(dev_, attention_, B_, T(), heads_, HS_)));
        return take.used;
    }
    int T() const { return zigzag_.ranks * 2 * Tc_; }
    int first_head(int rank, int cohort) const { return (rank * cohorts_ + cohort) * heads_; }
    size_t rows_of_lse() const { return elements() / HS_ / cohorts_; }
    X* of(X* x, int cohort, int parts) const { return x + cohort * parts * (elements() / cohorts_); }

    // A tensor that comes to the ranks of its heads, or leaves them. A token has `parts`·NH·HS elements.
    struct Tensor {
        bool comes;
        const X* tokens;  // written if it leaves
        X *heads, *staging;
        int parts;
    };
    // One chunk of one sequence, of a cohort's heads.
    struct Piece {
        const Tensor& t;
        int cohort, b, half;
    };
    size_t row() const { return size_t(heads_) * HS_; }
    size_t rows(const Piece& p) const { return size_t(Tc_) * p.t.parts; }
    // Where it is among this rank's tokens, in rows C() apart, if `peer` has the heads.
    X* of_tokens(const Piece& p, int peer) const {
        return const_cast<X*>(p.t.tokens) + (2 * p.b + p.half) * rows(p) * C() + first_head(peer, p.cohort) * HS_;
    }
    // Where it is among this rank's heads, if `owner` has the tokens.
    X* of_heads(const Piece& p, int owner) const {
        const size_t chunk = size_t(p.b) * 2 * zigzag_.ranks + zigzag_.chunk(owner, p.half);
        return of(p.t.heads, p.cohort, p.t.parts) + chunk * rows(p) * row();
    }
    // Where it is packed, on its way from or to `peer`.
    X* packed(const Piece& p, int peer) const {
        const size_t chunk = (size_t(peer) * B_ + p.b) * 2 + p.half;
        return of(p.t.staging, p.cohort, p.t.parts) + chunk * rows(p) * row();
    }
    // Closes the gaps between rows if they come, and opens them again if they leave.
    template <class CopyRows>
    void move(const Piece& p, X* gaps, X* no_gaps, CopyRows copy) const {
        p.t.comes ? copy(no_gaps, row(), gaps, C(), row(), rows(p)) : copy(gaps, C(), no_gaps, row(), row(), rows(p));
    }

    // At each step the next cohort comes, one is at work, and the one before leaves.
    template <class Compute>
    void run(const std::vector<Tensor>& tensors, Compute compute) {
        const int ranks = zigzag_.ranks;
        const auto by_device = [&](auto... rows) { copy_rows(dev_, rows...); };
        const auto by_engine = [&](auto... rows) { comm_->copy_rows(rows...); };
        for (int step = -1; step <= cohorts_; step++) {
            const auto each_piece = [&](auto f) {
                for (const Tensor& t : tensors)
                    if (const int c = t.comes ? step + 1 : step - 1; c >= 0 && c < cohorts_)
                        for (int b = 0; b < B_; b++)
                            for (int half : {0, 1}) f(Piece{t, c, b, half});
            };
            const auto pack = [&](bool comes) {
                each_piece([&](const Piece& p) {
                    for (int peer = 0; peer < ranks; peer++)
                        if (p.t.comes == comes && peer != rank_)
                            move(p, of_tokens(p, peer), packed(p, peer), by_device);
                });
            };
            const auto send = [&] {
                for (int hop = 1; hop < ranks; hop++)
                    each_piece([&](const Piece& p) {
                        const int to = (rank_ + hop) % ranks, from = zigzag_.source(rank_, hop);
                        const size_t n = rows(p) * row();
                        comm_->send_recv(to, p.t.comes ? packed(p, to) : of_heads(p, to), n, from,
                                         p.t.comes ? of_heads(p, from) : packed(p, from), n);
                    });
            };
            const auto visit = [&](int peer) {
                each_piece([&](const Piece& p) {
                    move(p, of_tokens(p, peer), comm_->at(peer, of_heads(p, rank_)), by_engine);
                });
            };
            const bool travels = ranks > 1 && (step + 1 < cohorts_ || step > 0), packs = travels && !comm_->reaches();
            if (packs) pack(true);
            if (travels) comm_->fork();
            if (packs)
                comm_->group(send), comm_->head_start();
            else if (travels)
                comm_->visit(visit);
            each_piece([&](const Piece& p) { move(p, of_tokens(p, rank_), of_heads(p, rank_), by_device); });
            if (step >= 0 && step < cohorts_) compute(step);
            if (travels) comm_->join();
            if (packs) pack(false);
        }
    }
};

// The form that --context-parallel takes.
template <class Dev, class X>
std::unique_ptr<ContextParallel<Dev, X>> context_parallel(const Dev& dev, int rank, int ranks, int B, int Tc, int NH,
                                                          int HS, Attention attention) {
    if (NH % ranks == 0) return std::make_unique<HeadExchange<Dev, X>>(dev, rank, ranks, B, Tc, NH, HS, attention);
    return std::make_unique<Ring<Dev, X>>(dev, rank, ranks, B, Tc, NH, HS, 0.f, attention);
}
