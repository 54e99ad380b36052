// The checks of chunks and rings that both backends share. A tensor's error against fp64 may be
// little more than the unchunked call's in the same precision. It may not grow with the number of
// ranks. Ranks are processes, or threads that share one device.
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

// N(0, sigma²), rounded to X.
template <class X>
std::vector<double> normal(size_t n, uint64_t seed, double sigma = 1) {
    std::mt19937_64 rng(seed);
    std::normal_distribution<double> distribution(0, sigma);
    std::vector<double> x(n);
    for (double& value : x)
        value = static_cast<float>(static_cast<X>(static_cast<float>(distribution(rng))));
    return x;
}

// A tensor of Y on the device. It begins as `values`, or all NaN.
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

// Runs forward and backward of `way` twice on the device. The second run reuses the memory of the
// first.
template <class X, class Dev, class Way>
Written written_by(Way&& way, const Dev& dev, const AttentionShape& s,
                   const std::vector<double>& qkv, const std::vector<double>& dout) {
    const size_t rows = dout.size() / s.HS;
    const size_t C = size_t(s.NH) * s.HS;
    Tensor<Dev, X> in(dev, qkv);
    Tensor<Dev, X> d(dev, dout);
    Tensor<Dev, X> out(dev, dout.size());
    Tensor<Dev, X> dqkv(dev, qkv.size());
    Tensor<Dev, Acc<X>> lse(dev, 2 * rows);  // and the rest
    Written first;
    for (int again = 0; again < 2; again++) {
        way.forward(out.ptr, lse.ptr, in.ptr);
        way.backward(dqkv.ptr, d.ptr, out.ptr, lse.ptr, in.ptr);
        Written now{out.values(), lse.values()};
        now[Lse].resize(rows);
        const std::vector<double> gradients = dqkv.values();
        for (size_t i = 0; i < gradients.size(); i++)
            now[Dq + i / C % 3].push_back(gradients[i]);
        if (again && now != first)
            test::report(__FILE__, __LINE__, "two runs differ, or there is NaN");
        first = std::move(now);
    }
    return first;
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

// A sequence's inputs, which X can hold, and what comes out in fp64 and in X.
template <class X, class Dev>
struct Whole {
    const Dev& dev;
    AttentionShape s;
    const Attention kind;
    std::vector<double> qkv, dout;
    Written want, one;
    Whole(const Dev& dev, const AttentionShape& s, double q_sigma = 1, uint64_t seed = 1,
          int threads = 1, Attention kind = Attention::flash)
        : dev(dev), s(s), kind(kind) {
        const size_t C = size_t(s.NH) * s.HS;
        const size_t n = s.B * s.Tk * C;
        qkv = normal<X>(3 * n, 3 * seed);
        dout = normal<X>(n, 3 * seed + 1);
        const std::vector<double> q = normal<X>(3 * n, 3 * seed + 2, q_sigma);
        for (size_t i = 0; i < 3 * n; i++)
            if (i / C % 3 == 0)
                qkv[i] = q[i];
        const Cpu cpu(threads);
        want = written_by<double>(Unchunked<double, Cpu>{cpu, s}, cpu, s, qkv, dout);
        one = written_by<X>(Unchunked<X, Dev>{dev, s, kind}, dev, s, qkv, dout);
    }
};

// A rank's chunks of a sequence.
struct Part {
    const AttentionShape s;  // of the sequence
    const int ranks, rank;
    std::vector<double> of(const std::vector<double>& x, int outer) const {  // of (outer, T, …)
        const size_t elements = x.size() / outer / (2 * ranks);              // of a chunk
        std::vector<double> part;
        for (int i = 0; i < outer; i++)
            for (int late : {0, 1}) {
                const auto begin =
                    x.begin() + (2 * i * ranks + Zigzag{ranks}.chunk(rank, late)) * elements;
                part.insert(part.end(), begin, begin + elements);
            }
        return part;
    }
    Written of(const Written& w) const {
        Written part;
        for (int t = 0; t < kTensors; t++)
            part[t] = of(w[t], t == Lse ? s.B * s.NH : s.B);
        return part;
    }
};

// -------------------------------------------------------------------------------------------------
// Errors and their bounds

// The errors of a tensor's elements against fp64. A NaN counts as infinite.
struct ErrorOf {
    double error = 0, error2 = 0, largest = 0, value2 = 0;
    size_t n = 0;
    void add(double got, double want) {
        const double e =
            std::isnan(got) ? std::numeric_limits<double>::infinity() : std::fabs(got - want);
        error += e;
        error2 += e * e;
        largest = std::max(largest, e);
        value2 += want * want;
        n++;
    }
    double mean() const { return error / n; }
};
using TensorErrors = std::array<ErrorOf, kTensors>;

// Errors of chunks, or of all ranks' parts, and the unchunked call's at the same places. All ranks
// count together, because few elements decide the error of one.
template <class X, class Dev>
struct PieceErrors {
    TensorErrors pieces{}, unchunked{};

    void add(const Written& got, const Written& one, const Written& want) {
        for (int t = 0; t < kTensors; t++)
            for (size_t i = 0; i < want[t].size(); i++) {
                pieces[t].add(got[t].at(i), want[t][i]);
                unchunked[t].add(one[t].at(i), want[t][i]);
            }
    }
    // Each tensor's L2 error is at most 1.1 times the unchunked call's. In fp64 that call is itself
    // the reference. There one of the gradients may cancel to nothing, so their bound is relative
    // to all three. On a GPU a merge ends in one more rounding of lse. In fp32 the unchunked
    // backward knows that a row's P add up to 1, and so makes up for errors of S there. A piece
    // does not. Such an error is relative to P, and S is about as large as lse.
    void check(const std::string& what) const {
        const double of_gradients = pieces[Dq].value2 + pieces[Dk].value2 + pieces[Dv].value2;
        for (int t = 0; t < kTensors; t++) {
            double more = 0;
            if (!std::is_same_v<Dev, Cpu> && t == Lse)
                more = 0x1p-25;
            if (!std::is_same_v<Dev, Cpu> && t > Lse && std::is_same_v<X, float>)
                more = 0x1p-25 * std::sqrt(pieces[Lse].value2 / pieces[Lse].n);
            double bound =
                1.1 * std::sqrt(unchunked[t].error2) + more * std::sqrt(pieces[t].value2);
            if (std::is_same_v<X, double>)
                bound = 1e-13 * std::sqrt(t < Dq ? pieces[t].value2 : of_gradients);
            if (!(std::sqrt(pieces[t].error2) <= bound))
                test::report(
                    __FILE__, __LINE__,
                    format("%s, %s: L2 error of %s %.3g, at most %.3g expected", what.c_str(),
                           name_of(dtype_of<X>()), kNames[t], std::sqrt(pieces[t].error2), bound));
        }
    }
};
// The error must be flat over the ranks, not only small.
inline void check_flat(const TensorErrors& errors, const TensorErrors& one_rank,
                       const std::string& what) {
    for (int t = 0; t < kTensors; t++) {
        const double mean = errors[t].mean() / one_rank[t].mean();
        const double largest = errors[t].largest / one_rank[t].largest;
        if (!(mean <= 1.02 && largest <= 1.1))
            test::report(__FILE__, __LINE__,
                         format("%s: error of %s %.3f times one rank's (at most 1.02), largest "
                                "%.3f times (1.1)",
                                what.c_str(), kNames[t], mean, largest));
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
    errors.add(written_by<X>(chunks, whole.dev, s, whole.qkv, whole.dout), whole.one, whole.want);
    errors.check(
        format("T %d, HS %d in chunks of %d queries and %d keys", s.Tk, s.HS, q_chunk, k_chunk));
}

// One rank's part of the sequence.
template <class X, class Dev, class Comm>
Written written_by_ring(Comm& comm, const Whole<X, Dev>& whole) {
    const AttentionShape& s = whole.s;
    const Part part{s, comm.size, comm.rank};
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

// A ring whose ranks are threads. Returns what each has written.
template <class X, class Dev>
std::vector<Written> add_local_ring(PieceErrors<X, Dev>& errors, const Whole<X, Dev>& whole,
                                    int ranks) {
    std::vector<Written> got(ranks);
    on_threads(
        ranks, [&](int rank, auto& comm) { got[rank] = written_by_ring(comm, whole); }, whole.dev);
    for (int rank = 0; rank < ranks; rank++) {
        const Part part{whole.s, ranks, rank};
        errors.add(got[rank], part.of(whole.one), part.of(whole.want));
    }
    return got;
}
// Every rank of a job makes this call. Its part has the bits that a thread in its place computes.
template <class X, class Dev, class Comm>
void check_ring(const Dev& dev, Comm& comm, const AttentionShape& s, double q_sigma = 1) {
    const Whole<X, Dev> whole(dev, s, q_sigma);
    PieceErrors<X, Dev> errors;
    const std::vector<Written> threads = add_local_ring(errors, whole, comm.size);
    errors.check(ring_name(s, comm.size));
    if (written_by_ring(comm, whole) != threads[comm.rank])
        test::report(__FILE__, __LINE__,
                     ring_name(s, comm.size) + ": other bits than a ring of threads");
}
// With one input the errors must be small, with several also flat.
template <class X, class Dev>
void check_local_rings(const Dev& dev, const AttentionShape& s, double q_sigma, int threads,
                       int seeds = 1) {
    std::map<int, PieceErrors<X, Dev>> of;  // so many ranks
    for (int seed = 1; seed <= seeds; seed++) {
        const Whole<X, Dev> whole(dev, s, q_sigma, seed, threads);
        for (int ranks : {1, 2, 3, 4, 8})
            if (s.Tk % (2 * ranks) == 0)
                add_local_ring(of[ranks], whole, ranks);
    }
    for (const auto& [ranks, errors] : of) {
        errors.check(ring_name(s, ranks));
        if (seeds > 1)
            check_flat(errors.pieces, of[1].pieces, ring_name(s, ranks));
    }
}
