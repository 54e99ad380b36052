// What chunks (chunks.h) and rings (ring.h) are made of: calls of some queries with some keys,
// whose fp32 results are merged or added up, and rounded once.
//
// merge: A query has seen some keys, with result o and lse, and a piece shows it more, with o_piece
// and lse_piece.
//   o   ← o − σ(lse_piece − lse)(o − o_piece)
//   lse ← log(exp lse + exp lse_piece)
//
// A merged lse has a rest: its rounding error. Both together have twice the digits. At lse = 9
// rounding to fp32 changes lse by up to 5e-7. Without the rest, the merge's weight and, in
// backward, every P of the row would have a relative error as large as that, several times fp32's
// own, and every merge would add another.
#pragma once
#include "attention/attention.h"

// -------------------------------------------------------------------------------------------------
// Merging and adding

// The result of some queries with some of their keys: with those of one call (a piece), or with all
// that they have seen so far (the sum).
template <class A>
struct Partial {
    HeadsView<A> o;
    RowStatsView<A> lse;
    RowStatsView<A> rest;

    Partial from(size_t t) const {  // without the first t queries
        return {.o = o.from(t), .lse = lse.from(t), .rest = rest.from(t)};
    }
};

// The merge of one row. It computes the weight of the lighter side, so that the heavier side's
// result keeps its digits.
template <class A>
struct Merge {
    bool piece_is_heavier;
    A weight;  // of the lighter side
    A lse;
    A rest;

    __host__ __device__ Merge(const Partial<A>& sum, const Partial<A>& piece, size_t head, int t) {
        const auto exact_lse = [=](const Partial<A>& p) {
            const double lse = p.lse.at(head, t);
            return lse + p.rest.at(head, t);
        };
        const double lse_sum = exact_lse(sum);
        const double lse_piece = exact_lse(piece);
        // exp(lse) of the lighter side, divided by that of the heavier
        const A ratio = std::exp(-static_cast<A>(std::fabs(lse_sum - lse_piece)));
        const double lse_merged = (lse_piece > lse_sum ? lse_piece : lse_sum) + std::log1p(ratio);

        piece_is_heavier = lse_piece > lse_sum;
        weight = ratio / (1 + ratio);
        lse = static_cast<A>(lse_merged);
        rest = static_cast<A>(lse_merged - lse);
    }
    __host__ __device__ A merged(A o_sum, A o_piece) const {
        return piece_is_heavier ? o_piece - weight * (o_piece - o_sum)
                                : o_sum - weight * (o_sum - o_piece);
    }
    __host__ __device__ void store_lse(const Partial<A>& sum, size_t head, int t) const {
        sum.lse.at(head, t) = lse;
        sum.rest.at(head, t) = rest;
    }
};

// These work on (B, Tq, NH, HS) of views, whose rows are 16-byte aligned, or 8-byte in bf16. HS
// divides 128 on a GPU.

// Merges `piece` into `sum`, but writes the merged o to dst, which may be sum.o.
template <class Y>
void merge(const Cuda&, const AttentionShape&, HeadsView<Y> dst, const Partial<float>& sum,
           const Partial<float>& piece);

// dst ← a + b + c, without those that are null, rounded to Y. dst may be one of them. With a alone
// this copies or rounds it.
template <class Y, class Z>
void add(const Cuda&, const AttentionShape&, HeadsView<Y> dst, HeadsView<Z> a, HeadsView<Z> b = {},
         HeadsView<Z> c = {});

// -------------------------------------------------------------------------------------------------
// Calls

// The queries of Tq tokens from q0 on, with the keys of Tk tokens from k0 on. If causal, the last
// query sees all of these keys (AttentionShape).
struct PieceCall {
    int q0;
    int Tq;
    int k0;
    int Tk;
    bool causal;
};

// What Chunks and Ring share: the calls of T tokens, and memory for the results.
template <class Dev, class X>
class Pieces {
  public:
    using A = Acc<X>;

    // The size of lse: (B, NH, T) and, if rests are kept, (B, NH, T) of them.
    size_t lse_elements() const { return kHasRest ? 2 * rows() : rows(); }
    size_t bytes() const { return next_ - begin_; }

  protected:
    static constexpr bool kHasRest = !std::is_same_v<X, bf16>;  // bf16's kernels write none

    struct Inputs {
        const X* qkv;
        const X* dout = nullptr;
        const X* out = nullptr;
        const A* lse = nullptr;
        const X* kv = nullptr;  // another rank's keys and values (B, T, 2, heads, HS), not qkv's
    };

    Pieces(const Dev& dev, const AttentionShape& s, Attention kind)
        : dev_(dev), s_(s), kind_(kind) {
        place(nullptr);
    }

    // ---- memory

    // Places the tensors one after another in memory of bytes(). With null it only finds bytes().
    void place(void* memory) {
        begin_ = reinterpret_cast<uintptr_t>(memory);
        next_ = begin_;
        take(sum_out_dq_, s_.queries().elements());
        take(piece_out_dq_, s_.queries().elements());
        take(sum_dkv_, kv_elements());
        take(piece_dkv_, kv_elements());
        take(piece_rest_, 2 * rows());
        sum_rest_ = piece_rest_ + rows();
        take(piece_lse_, rows());

        // What is enough for all tokens without a mask is enough for some, and with one.
        AttentionShape unmasked = s_;
        unmasked.causal = false;
        const size_t scratch = attention_scratch_bytes<X>(dev_, kind_, unmasked);
        take(scratch_, std::max<size_t>(16, scratch));
    }
    // Points p at the next n elements, aligned to 256 bytes.
    template <class Y>
    void take(Y*& p, size_t n) {
        p = reinterpret_cast<Y*>(next_);
        next_ += (n * sizeof(Y) + 255) / 256 * 256;
    }

    // ---- shapes and views

    int T() const { return s_.Tk; }
    size_t rows() const { return s_.rows(); }
    size_t kv_elements() const {  // of keys and values, or their gradients
        return 2 * s_.keys().elements();
    }
    AttentionShape shape_of(const PieceCall& p) const {
        AttentionShape piece = s_;
        piece.Tq = p.Tq;
        piece.Tk = p.Tk;
        piece.causal = p.causal;
        return piece;
    }
    AttentionShape q_shape(int n) const {  // of n queries, or their out or dq
        AttentionShape some = s_;
        some.Tq = n;
        some.Tk = n;
        return some;
    }
    template <class Y>
    HeadsView<Y> view(Y* x) const {  // (B, T, NH, HS)
        return contiguous(x, s_.queries());
    }
    template <class Y>
    PackedHeads<Y> parts(Y* qkv) const {
        return packed(qkv, T(), s_);
    }
    template <class Y>
    RowStatsView<Y> stats(Y* x) const {  // (B, NH, T)
        return {.ptr = x, .head_stride = size_t(T())};
    }
    template <class Y>
    Y* rest_of(Y* lse) const {  // see lse_elements()
        return lse + rows();
    }

    // Keys and values of n tokens side by side, or their gradients, as one tensor of 2·NH heads. In
    // a packed tensor it begins at the keys, because a token's values follow them.
    AttentionShape kv_shape(int n) const {
        AttentionShape both = q_shape(n);
        both.NH = 2 * s_.keys().heads;
        return both;
    }
    // In sum_dkv_, piece_dkv_ and what a ring sends: (T, B, K and V, heads, HS).
    HeadsView<A> dkv_view(A* dkv) const {
        const size_t sequence = 2 * s_.keys().C();
        return {.ptr = dkv, .batch_stride = sequence, .token_stride = s_.B * sequence};
    }
    // Of another rank: (B, T, K and V, heads, HS).
    template <class Y>
    HeadsView<Y> kv_view(Y* kv) const {
        const size_t token = 2 * s_.keys().C();
        return {.ptr = kv, .batch_stride = T() * token, .token_stride = token};
    }
    struct KeysAndValues {
        HeadsView<const X> k;
        HeadsView<const X> v;
    };
    KeysAndValues keys_and_values(const Inputs& in) const {
        if (in.kv)
            return {.k = kv_view(in.kv), .v = kv_view(in.kv + s_.keys().C())};
        const PackedHeads<const X> own = parts(in.qkv);
        return {.k = own.k, .v = own.v};
    }

    // ---- calls

    // The sum of each query, yet to be written by its first piece. A kernel that writes no rest
    // leaves both rests as they are, so this sets them to zero.
    Partial<A> start_sum(A* lse) {
        if (!kHasRest)
            dev_.zero(piece_rest_, 2 * rows() * sizeof(A));  // and sum_rest_, which follows it
        A* const rest = kHasRest ? rest_of(lse) : sum_rest_;
        return {.o = view(sum_out_dq_), .lse = stats(lse), .rest = stats(rest)};
    }

    // A query's first piece writes the sum. The others are merged into it, and their merged o is
    // written to dst.
    template <class Y>
    void forward(const PieceCall& p, const Inputs& in, const Partial<A>& sum, bool first,
                 HeadsView<Y> dst) {
        const Partial<A> piece{
            .o = view(piece_out_dq_), .lse = stats(piece_lse_), .rest = stats(piece_rest_)};
        const Partial<A> to = (first ? sum : piece).from(p.q0);
        const KeysAndValues kv = keys_and_values(in);
        AttentionForward<X, A> c{shape_of(p)};
        c.q = parts(in.qkv).q.from(p.q0);
        c.k = kv.k.from(p.k0);
        c.v = kv.v.from(p.k0);
        c.out = to.o;
        c.lse = to.lse;
        if (kHasRest)
            c.lse_rest = to.rest;
        attention_forward(dev_, kind_, c);
        if (!first)
            merge(dev_, q_shape(p.Tq), dst.from(p.q0), sum.from(p.q0), piece.from(p.q0));
    }

    // Writes the piece's part of dq and dkv.
    void backward(const PieceCall& p, const Inputs& in, A* dq, A* dkv) {
        const KeysAndValues kv = keys_and_values(in);
        AttentionBackward<X, A> c{shape_of(p)};
        c.q = parts(in.qkv).q.from(p.q0);
        c.k = kv.k.from(p.k0);
        c.v = kv.v.from(p.k0);
        c.dout = view(in.dout).from(p.q0);
        c.out = view(in.out).from(p.q0);
        c.lse = stats(in.lse).from(p.q0);
        if (kHasRest)
            c.lse_rest = stats(rest_of(in.lse)).from(p.q0);
        c.dq = view(dq).from(p.q0);
        c.dk = dkv_view(dkv).from(p.k0);
        c.dv = dkv_view(dkv + s_.keys().C()).from(p.k0);
        c.scratch = scratch_;
        attention_backward(dev_, kind_, c);
    }

    const Dev& dev_;
    const AttentionShape s_;
    const Attention kind_;
    // dk and dv are (T, B, K and V, heads, HS), so that what the first tokens have is one stretch
    // of memory. In fp32 the rest of the merged lse is in the caller's lse, not in sum_rest_.
    A* sum_out_dq_;    // (B, T, NH, HS): out in forward, merged, and dq in backward, added up
    A* piece_out_dq_;  // that of a piece
    A* sum_dkv_;       // dk and dv, added up
    A* piece_dkv_;     // those of a piece
    A* piece_rest_;    // (B, NH, T), of a piece's lse
    A* sum_rest_;      // of the merged lse; follows piece_rest_
    A* piece_lse_;     // (B, NH, T)
    char* scratch_;    // the kernel's

  private:
    uintptr_t begin_ = 0;
    uintptr_t next_ = 0;
};
