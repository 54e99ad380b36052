// Attention by an exchange of heads (Jacobs et al. 2023, "DeepSpeed Ulysses"). N ranks share a sequence, and N divides
// the number of heads. Heads know nothing of each other, so the ranks trade tokens for heads:
//
//   before   T/N tokens of all heads      as everywhere else in the model
//   between  all tokens of NH/N heads     the ordinary call of the attention kernel
//   after    T/N tokens of all heads
//
//   forward:   qkv goes out, out comes back
//   backward:  qkv, out and dout go out, dqkv comes back. lse stays where its heads are
//
// The kernel gets whole heads in the true order of tokens. So the results are one GPU's bit for bit, and no mask, merge
// or fp32 sum is cut. A rank's chunks are a ring's (context.h), so each pair of ranks trades two pieces of a sequence.
// A piece is rows of NH/N·HS elements with gaps at the rank of the tokens, and without gaps at the rank of the heads.
//
// Between the GPUs of one machine copy engines move the rows straight to their places. They write them into the other
// ranks' memory, and fetch them from it on the way back. Elsewhere each rank packs, sends, receives and unpacks.
//
// Cohorts: a rank may do its heads in several cohorts. One travels while another is at work. That makes rows shorter.
//
// Include the backend's attention before this header.
//
// Writes: forward out and lse, backward dqkv (every element).   Run: ./dev/test_ring heads
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
        run({coming(qkv, qkv_, dqkv_, 3), leaving(out, out_, qkv_, 1)}, [&](int c) {
            attention_forward(dev_, attention_, part(out_, c), lse + c * lse_of_cohort(), static_cast<X*>(nullptr),
                              scratch_, part(qkv_, c, 3), B_, T(), heads_, HS_);
        });
    }
    void backward(X* dqkv, const X* dout, const X* out, const A* lse, const X* qkv) override {
        run({coming(qkv, qkv_, dqkv_, 3), coming(out, out_, dqkv_ + 3 * elements(), 1),
             coming(dout, dout_, dqkv_ + 4 * elements(), 1), leaving(dqkv, dqkv_, qkv_, 3)},
            [&](int c) {
                attention_backward(dev_, attention_, part(dqkv_, c, 3), scratch_, part(dout_, c), part(out_, c),
                                   lse + c * lse_of_cohort(), static_cast<const X*>(nullptr), part(qkv_, c, 3), B_, T(),
                                   heads_, HS_, first_head(rank_, c), NH_);
            });
    }

  private:
    const int cohorts_, heads_;  // heads of a cohort
    X *qkv_, *out_, *dout_;      // all tokens of this rank's heads: (cohorts, B, T, 3 or 1, heads, HS)
    X* dqkv_;                    // as qkv_. Before it is written it holds what is packed, and is 5/3 as long for that
    char* scratch_;              // the kernels'

    size_t place(void* memory) override {
        typename Base::Taker take{memory};
        take(qkv_, 3 * elements());
        take(out_, elements());
        take(dout_, elements());
        take(dqkv_, 5 * elements());
        take(scratch_, std::max<size_t>(16, attention_scratch_bytes<X>(dev_, attention_, B_, T(), heads_, HS_)));
        return take.used;
    }

    int T() const { return zigzag_.ranks * 2 * Tc_; }
    int first_head(int rank, int cohort) const { return (rank * cohorts_ + cohort) * heads_; }
    size_t lse_of_cohort() const { return elements() / HS_ / cohorts_; }
    X* part(X* x, int cohort, int parts = 1) const { return x + cohort * parts * (elements() / cohorts_); }

    // A tensor on its way, with `parts`·NH·HS elements a token.
    struct Tensor {
        bool comes;  // to the ranks of its heads, or else leaves them
        X *tokens, *heads, *staging;
        int parts;
    };
    static Tensor coming(const X* tokens, X* heads, X* staging, int parts) {
        return {true, const_cast<X*>(tokens), heads, staging, parts};
    }
    static Tensor leaving(X* tokens, X* heads, X* staging, int parts) { return {false, tokens, heads, staging, parts}; }
    // One chunk of one sequence, of a cohort's heads.
    struct Piece {
        const Tensor& t;
        int cohort, b, half;
    };
    size_t row() const { return size_t(heads_) * HS_; }
    size_t rows(const Piece& p) const { return size_t(Tc_) * p.t.parts; }
    // Where its rows are among this rank's tokens, if `peer` has the heads: C() apart.
    X* of_tokens(const Piece& p, int peer) const {
        return p.t.tokens + (2 * p.b + p.half) * rows(p) * C() + size_t(first_head(peer, p.cohort)) * HS_;
    }
    // Where they are among all tokens of this rank's heads, if `owner` has the tokens.
    X* of_heads(const Piece& p, int owner) const {
        return part(p.t.heads, p.cohort, p.t.parts) +
               (size_t(p.b) * 2 * zigzag_.ranks + zigzag_.chunk(owner, p.half)) * rows(p) * row();
    }
    // Where they are packed, on their way from or to `peer`.
    X* packed(const Piece& p, int peer) const {
        return part(p.t.staging, p.cohort, p.t.parts) + ((size_t(peer) * B_ + p.b) * 2 + p.half) * rows(p) * row();
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
        for (int step = -1; step <= cohorts_; step++) {
            const auto each_piece = [&](auto f) {
                for (const Tensor& t : tensors)
                    if (const int c = t.comes ? step + 1 : step - 1; c >= 0 && c < cohorts_)
                        for (int b = 0; b < B_; b++)
                            for (int half : {0, 1}) f(Piece{t, c, b, half});
            };
            const auto pack = [&](bool coming) {
                each_piece([&](const Piece& p) {
                    for (int peer = 0; peer < ranks; peer++)
                        if (p.t.comes == coming && peer != rank_)
                            move(p, of_tokens(p, peer), packed(p, peer), by_device);
                });
            };
            const bool travels = ranks > 1 && (step + 1 < cohorts_ || step > 0), packs = travels && !comm_->reaches();
            if (packs) pack(true);
            if (travels) comm_->fork();
            if (packs) {
                comm_->group([&] { send(each_piece); });
                comm_->head_start();
            } else if (travels) {
                comm_->visit([&](int peer) {
                    each_piece([&](const Piece& p) {
                        move(p, of_tokens(p, peer), comm_->at(peer, of_heads(p, rank_)),
                             [&](auto... rows) { comm_->copy_rows(rows...); });
                    });
                });
            }
            each_piece([&](const Piece& p) { move(p, of_tokens(p, rank_), of_heads(p, rank_), by_device); });
            if (step >= 0 && step < cohorts_) compute(step);
            if (travels) comm_->join();
            if (packs) pack(false);
        }
    }
    template <class EachPiece>
    void send(EachPiece each_piece) {
        for (int hop = 1; hop < zigzag_.ranks; hop++) {
            const int to = (rank_ + hop) % zigzag_.ranks, from = zigzag_.source(rank_, hop);
            each_piece([&](const Piece& p) {
                const size_t n = rows(p) * row();
                comm_->send_recv(to, p.t.comes ? packed(p, to) : of_heads(p, to), n, from,
                                 p.t.comes ? of_heads(p, from) : packed(p, from), n);
            });
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
