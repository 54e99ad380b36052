// The checks of attention in chunks and over rings, for both backends. A tensor's error against
// fp64 may be little larger than that of an unchunked call in the same precision, and it may not
// grow with the number of ranks. Ranks are processes, or threads that share one device.
#pragma once
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "attention/ring/chunks.h"
#include "attention/ring/ring.h"
#include "dev/common/bounds.h"
#include "dev/common/test.h"
#include "dev/common/thread_comm.h"

// -------------------------------------------------------------------------------------------------
// Attention, whole, in chunks or over a ring

// The shape of whole sequences, and changes to it.
inline AttentionShape whole(int B, int T, int NH, int HS, bool causal = true) {
    return {.B = B, .Tq = T, .Tk = T, .NH = NH, .HS = HS, .causal = causal};
}
inline AttentionShape unmasked(AttentionShape s) {
    s.causal = false;
    return s;
}
inline AttentionShape scaled(float scale, AttentionShape s) {
    s.scale = scale;
    return s;
}

// N(0, sigma²), rounded to fp32 and then to X.
template <class X>
std::vector<double> normal(size_t n, uint64_t seed, double sigma = 1) {
    std::mt19937_64 rng(seed);
    std::normal_distribution<double> distribution(0, sigma);
    std::vector<double> x(n);
    for (double& value : x)
        value = static_cast<float>(static_cast<X>(static_cast<float>(distribution(rng))));
    return x;
}

// A tensor of Y on the device, which starts as `values` or as NaN.
template <class Dev, class Y>
struct Tensor {
    const Dev& dev;
    std::vector<Y> host;
    Y* ptr;

    Tensor(const Dev& dev, size_t n)
        : Tensor(dev, std::vector<double>(n, std::numeric_limits<double>::quiet_NaN())) {}
    Tensor(const Dev& dev, const std::vector<double>& values) : dev(dev) {
        for (double v : values)
            host.push_back(static_cast<Y>(v));
        ptr = static_cast<Y*>(dev.alloc(host.size() * sizeof(Y)));
        dev.upload(ptr, host.data(), host.size() * sizeof(Y));
        dev.sync();
    }
    ~Tensor() { dev.free(ptr); }
    Tensor(const Tensor&) = delete;

    std::vector<double> values() {
        dev.download(host.data(), ptr, host.size() * sizeof(Y));
        std::vector<double> values;
        for (Y v : host)
            values.push_back(static_cast<Acc<Y>>(v));
        return values;
    }
};

// What some way of computing attention wrote: out, dq, dk, dv (B, T, NH, HS) and lse (B, NH, T).
using Written = std::array<std::vector<double>, kTensors>;

// Runs forward and backward of `way` on the device. A second run, in the memory of the first, must
// give the same bits.
template <class X, class Dev, class Way>
Written written_by(Way&& way, const Dev& dev, const AttentionShape& s,
                   const std::vector<double>& qkv, const std::vector<double>& dout) {
    const size_t rows = dout.size() / s.HS;
    const size_t C = size_t(s.NH) * s.HS;
    Tensor<Dev, X> in(dev, qkv);
    Tensor<Dev, X> dout_in(dev, dout);
    Tensor<Dev, X> out(dev, dout.size());
    Tensor<Dev, X> dqkv(dev, qkv.size());
    Tensor<Dev, Acc<X>> lse(dev, 2 * rows);  // the second half: lse's rest (ring/pieces.h)

    const auto run = [&] {
        way.forward(out.ptr, lse.ptr, in.ptr);
        way.backward(dqkv.ptr, dout_in.ptr, out.ptr, lse.ptr, in.ptr);
        Written written{out.values(), lse.values()};
        written[Lse].resize(rows);
        const std::vector<double> gradients = dqkv.values();
        for (size_t i = 0; i < gradients.size(); i++)  // (B, T, 3, C)
            written[Dq + (i / C) % 3].push_back(gradients[i]);
        return written;
    };
    const Written first = run();
    Written second = run();
    if (second != first)
        test::report(__FILE__, __LINE__, "two runs differ, or there is NaN");
    return second;
}

// The unchunked call.
template <class X, class Dev>
struct Unchunked {
    const Dev& dev;
    const AttentionShape s;
    const Attention kind = Attention::flash;
    Tensor<Dev, float> scratch{dev, attention_scratch_bytes<X>(dev, kind, s) / sizeof(float) + 1};

    void forward(X* out, Acc<X>* lse, const X* qkv) const {
        const AttentionForward<X> c = layer_forward(out, lse, qkv, s);
        if constexpr (std::is_same_v<Dev, Cpu>)
            attention_forward(dev, c);
        else
            attention_kernel<X>(dev, kind, s.HS).forward(dev, c);
    }
    void backward(X* dqkv, const X* dout, const X* out, const Acc<X>* lse, const X* qkv) const {
        AttentionBackward<X> c = layer_backward(dqkv, dout, out, lse, qkv, s);
        c.scratch = scratch.ptr;
        if constexpr (std::is_same_v<Dev, Cpu>)
            attention_backward(dev, c);
        else
            attention_kernel<X>(dev, kind, s.HS).backward(dev, c);
    }
};

constexpr int kAllCores = 0;  // as a number of threads

struct WholeOptions {
    double q_sigma = 1;  // the standard deviation of q
    uint64_t seed = 1;
    int threads = 1;  // for the reference
    Attention kind = Attention::flash;
};

// Whole sequences: inputs that X can hold, and what unchunked calls in fp64 and in X write.
template <class X, class Dev>
struct Whole {
    const Dev& dev;
    const AttentionShape s;
    const Attention kind;
    std::vector<double> qkv;
    std::vector<double> dout;
    Written fp64;
    Written unchunked;

    Whole(const Dev& dev, const AttentionShape& s, const WholeOptions& o = {})
        : dev(dev), s(s), kind(o.kind) {
        const size_t C = size_t(s.NH) * s.HS;
        const size_t n = s.B * s.Tk * C;
        const uint64_t first_seed = 3 * o.seed;  // of three tensors
        qkv = normal<X>(3 * n, first_seed);
        dout = normal<X>(n, first_seed + 1);
        const std::vector<double> q = normal<X>(3 * n, first_seed + 2, o.q_sigma);
        for (size_t i = 0; i < 3 * n; i++) {  // (B, T, 3, C)
            const size_t part = (i / C) % 3;
            if (part == 0)
                qkv[i] = q[i];
        }

        const Cpu cpu(o.threads);
        fp64 = written_by<double>(Unchunked<double, Cpu>{cpu, s}, cpu, s, qkv, dout);
        unchunked = written_by<X>(Unchunked<X, Dev>{dev, s, kind}, dev, s, qkv, dout);
    }
};

// A rank's share of a sequence, which is two chunks of it.
struct Part {
    const AttentionShape s;  // of the sequence
    const int ranks;
    const int rank;

    // The share of x (outer, T, …).
    std::vector<double> of(const std::vector<double>& x, int outer) const {
        const int chunks = 2 * ranks;
        const size_t elements = x.size() / outer / chunks;  // of a chunk
        std::vector<double> part;
        for (int i = 0; i < outer; i++)
            for (int late : {0, 1}) {
                const int chunk = i * chunks + Zigzag{ranks}.chunk(rank, late);
                const auto begin = x.begin() + chunk * elements;
                part.insert(part.end(), begin, begin + elements);
            }
        return part;
    }
    Written of(const Written& whole) const {
        Written part;
        for (int t = 0; t < kTensors; t++)
            part[t] = of(whole[t], t == Lse ? s.B * s.NH : s.B);
        return part;
    }
};

// -------------------------------------------------------------------------------------------------
// Errors and their bounds

using TensorErrors = std::array<ErrorStats, kTensors>;

// Errors of chunks, or of all ranks' parts, and the unchunked call's at the same places. All ranks
// count together, because a single rank has so few elements that some of them decide its error.
template <class X, class Dev>
struct PieceErrors {
    TensorErrors pieces{};
    TensorErrors unchunked{};

    void add(const Written& got, const Written& by_unchunked, const Written& fp64) {
        for (int t = 0; t < kTensors; t++)
            for (size_t i = 0; i < fp64[t].size(); i++) {
                pieces[t].add(got[t].at(i), fp64[t][i]);
                unchunked[t].add(by_unchunked[t].at(i), fp64[t][i]);
            }
    }

    // The L2 error that a tensor may have.
    double bound(int t) const {
        if (std::is_same_v<X, double>) {
            // The unchunked call is itself the reference. One of the gradients may cancel to
            // nothing, so their bound is relative to all three.
            const double gradients = pieces[Dq].reference_squares + pieces[Dk].reference_squares +
                                     pieces[Dv].reference_squares;
            return 1e-13 * std::sqrt(is_gradient(t) ? gradients : pieces[t].reference_squares);
        }
        // Relative to the tensor's norm. A rounding to fp32 changes an element by at most 2⁻²⁴ of
        // it, but in L2 by about 2⁻²⁵.
        double more = 0;
        // The CPU needs no more: it has no bf16, and its unchunked backward corrects nothing.
        if (!std::is_same_v<Dev, Cpu>) {
            // In bf16 the pieces' lse have no rest, so a merge adds one more rounding of lse. In
            // fp32 they have one (ring/pieces.h), and get the same room.
            if (t == Lse)
                more = 0x1p-25;
            // In fp32 the unchunked backward adds up each row of P and corrects it by what is
            // missing from 1 (flash_fp32 only where lse is large). That makes up for errors of S,
            // too. The backward of a piece cannot, because it has only some of the keys. An error
            // of S is a relative error of P, and S is about as large as lse.
            const ErrorStats& lse = pieces[Lse];
            if (is_gradient(t) && std::is_same_v<X, float>)
                more = 0x1p-25 * std::sqrt(lse.reference_squares / lse.elements);
        }
        return 1.1 * unchunked[t].l2() + more * pieces[t].reference_l2();
    }

    void check(const std::string& what) const {
        for (int t = 0; t < kTensors; t++)
            if (!(pieces[t].l2() <= bound(t)))
                test::report(
                    __FILE__, __LINE__,
                    format("%s, %s: L2 error of %s %.3g, at most %.3g expected", what.c_str(),
                           name_of(dtype_of<X>()), kNames[t], pieces[t].l2(), bound(t)));
    }
};

// The error must not only be small but also be flat over the ranks.
constexpr double kFlatMean = 1.02;  // how many times one rank's it may be
constexpr double kFlatLargest = 1.1;
inline void check_flat(const TensorErrors& errors, const TensorErrors& one_rank,
                       const std::string& what) {
    for (int t = 0; t < kTensors; t++) {
        const double mean = errors[t].mean() / one_rank[t].mean();
        const double largest = errors[t].largest / one_rank[t].largest;
        if (!(mean <= kFlatMean && largest <= kFlatLargest))
            test::report(__FILE__, __LINE__,
                         format("%s: mean error of %s %.3f times one rank's (at most %g), largest "
                                "error %.3f times (at most %g)",
                                what.c_str(), kNames[t], mean, kFlatMean, largest, kFlatLargest));
    }
}

// Attention in chunks is as good as the unchunked call.
template <class X, class Dev>
void check_chunks(const Whole<X, Dev>& whole, int q_chunk, int k_chunk) {
    const AttentionShape& s = whole.s;
    Chunks<Dev, X> chunks(whole.dev, s, q_chunk, k_chunk, whole.kind);
    Tensor<Dev, float> memory(whole.dev, chunks.bytes() / sizeof(float));
    chunks.place(memory.ptr);
    PieceErrors<X, Dev> errors;
    const Written got = written_by<X>(chunks, whole.dev, s, whole.qkv, whole.dout);
    errors.add(got, whole.unchunked, whole.fp64);
    errors.check(
        format("T %d, HS %d in chunks of %d queries and %d keys", s.Tk, s.HS, q_chunk, k_chunk));
}

// What one rank of a ring writes.
template <class X, class Dev, class Comm>
Written written_by_ring(Comm& comm, const Whole<X, Dev>& whole) {
    const AttentionShape& s = whole.s;
    const Part part{.s = s, .ranks = comm.size, .rank = comm.rank};
    AttentionShape own = s;
    own.Tq = s.Tq / comm.size;
    own.Tk = s.Tk / comm.size;
    Ring<Dev, X, Comm> ring(whole.dev, {.rank = comm.rank, .ranks = comm.size}, own);
    Tensor<Dev, float> memory(whole.dev, ring.bytes() / sizeof(float));
    ring.start(memory.ptr, &comm);
    return written_by<X>(ring, whole.dev, s, part.of(whole.qkv, s.B), part.of(whole.dout, s.B));
}
inline std::string ring_name(const AttentionShape& s, int ranks) {
    return format("T %d, HS %d, %d ranks", s.Tk, s.HS, ranks);
}

// Runs a ring whose ranks are threads, and adds its errors to `errors`. Returns what each rank
// wrote.
template <class X, class Dev>
std::vector<Written> add_local_ring(PieceErrors<X, Dev>& errors, const Whole<X, Dev>& whole,
                                    int ranks) {
    std::vector<Written> got(ranks);
    on_threads(
        ranks, [&](int rank, auto& comm) { got[rank] = written_by_ring(comm, whole); }, whole.dev);
    for (int rank = 0; rank < ranks; rank++) {
        const Part part{.s = whole.s, .ranks = ranks, .rank = rank};
        errors.add(got[rank], part.of(whole.unchunked), part.of(whole.fp64));
    }
    return got;
}

// Every rank of a job makes this call. A rank must write the bits that a thread of the same number
// writes in a ring of threads.
template <class X, class Dev, class Comm>
void check_ring(const Dev& dev, Comm& comm, const AttentionShape& s, const WholeOptions& o = {}) {
    const Whole<X, Dev> whole(dev, s, o);
    PieceErrors<X, Dev> errors;
    const std::vector<Written> by_threads = add_local_ring(errors, whole, comm.size);
    errors.check(ring_name(s, comm.size));
    if (written_by_ring(comm, whole) != by_threads[comm.rank])
        test::report(__FILE__, __LINE__,
                     ring_name(s, comm.size) + ": other bits than a ring of threads");
}

// Rings of 1 to 8 ranks, which are threads. The errors of each must be small. With several seeds,
// so that a single input does not decide, they must also be flat over the ranks.
template <class X, class Dev>
void check_local_rings(const Dev& dev, const AttentionShape& s, const WholeOptions& o,
                       int seeds = 1) {
    std::map<int, PieceErrors<X, Dev>> errors_by_ranks;
    for (int seed = 1; seed <= seeds; seed++) {
        WholeOptions options = o;
        options.seed = seed;
        const Whole<X, Dev> whole(dev, s, options);
        for (int ranks : {1, 2, 3, 4, 8})
            if (s.Tk % (2 * ranks) == 0)
                add_local_ring(errors_by_ranks[ranks], whole, ranks);
    }
    for (const auto& [ranks, errors] : errors_by_ranks) {
        errors.check(ring_name(s, ranks));
        if (seeds > 1)
            check_flat(errors.pieces, errors_by_ranks[1].pieces, ring_name(s, ranks));
    }
}
