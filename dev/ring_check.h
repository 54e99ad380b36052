// The checks of ring and chunked attention that both backends share. A tensor's error against fp64 may be little more
// than the unchunked call's in the same precision. It may not grow with the number of ranks.
#pragma once
#include <algorithm>
#include <array>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attention/ring/blocks.h"
#include "dev/bounds.h"
#include "layers/cpu/reference.h"
// These use both backends' partial forms, so they come after them.
#include "attention/ring/chunks.h"
#include "attention/ring/heads.h"
#include "dev/local_comm.h"
#include "dev/test.h"

// N(0, sigma²), rounded to X.
template <class X>
std::vector<double> normal(size_t n, uint64_t seed, double sigma = 1) {
    std::mt19937_64 rng(seed);
    std::normal_distribution<double> distribution(0, sigma);
    std::vector<double> x(n);
    for (double& value : x) value = static_cast<float>(static_cast<X>(static_cast<float>(distribution(rng))));
    return x;
}

// max|got − want| ≤ tolerance·max|want|. NaN fails.
inline void check_close(const std::string& what, const std::vector<double>& got, const std::vector<double>& want,
                        double tolerance) {
    double worst = 0, scale = 0;
    for (size_t i = 0; i < want.size(); i++) {
        const double error = std::fabs(got[i] - want[i]);
        worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(worst, error);
        scale = std::max(scale, std::fabs(want[i]));
    }
    if (got.size() != want.size() || !(worst <= tolerance * scale))
        test::report(__FILE__, __LINE__, format("%s: off by %.3g of %.3g", what.c_str(), worst, scale));
}

// What some way of computing attention wrote: out (B, T, NH, HS), lse (B, NH, T), dqkv (B, T, 3, NH, HS).
struct Written {
    std::vector<double> out, lse, dqkv;
    bool operator==(const Written& other) const {  // a NaN equals nothing
        return out == other.out && lse == other.lse && dqkv == other.dqkv;
    }
};

// The errors of a tensor's elements against fp64. A NaN counts as infinite.
struct ErrorOf {
    double error = 0, error2 = 0, largest = 0, value2 = 0;
    size_t n = 0;
    void add(double got, double want) {
        const double e = std::isnan(got) ? std::numeric_limits<double>::infinity() : std::fabs(got - want);
        error += e, error2 += e * e, largest = std::max(largest, e), value2 += want * want, n++;
    }
    double mean() const { return error / n; }
};
using TensorErrors = std::array<ErrorOf, kTensors>;
inline void add_errors(TensorErrors& errors, const Written& got, const Written& want, int C) {
    if (got.out.size() != want.out.size() || got.lse.size() != want.lse.size() || got.dqkv.size() != want.dqkv.size())
        throw Error("results of different sizes");
    for (size_t i = 0; i < want.out.size(); i++) errors[Out].add(got.out[i], want.out[i]);
    for (size_t i = 0; i < want.lse.size(); i++) errors[Lse].add(got.lse[i], want.lse[i]);
    for (size_t i = 0; i < want.dqkv.size(); i++) errors[Dq + i / C % 3].add(got.dqkv[i], want.dqkv[i]);
}

// Each tensor's L2 error is at most 1.1 times the unchunked call's. In fp64 that call is itself the reference. There
// one of the gradients may cancel to nothing, so their bound is relative to all three. `more` is a relative error on
// top.
template <class X>
void check_errors(const std::string& what, const TensorErrors& got, const TensorErrors& unchunked,
                  const std::array<double, kTensors>& more = {}) {
    for (int t = 0; t < kTensors; t++) {
        const double of_gradients = got[Dq].value2 + got[Dk].value2 + got[Dv].value2;
        const double bound = std::is_same_v<X, double>
                                 ? 1e-13 * std::sqrt(t < Dq ? got[t].value2 : of_gradients)
                                 : 1.1 * std::sqrt(unchunked[t].error2) + more[t] * std::sqrt(got[t].value2);
        if (!(std::sqrt(got[t].error2) <= bound))
            test::report(__FILE__, __LINE__,
                         format("%s: L2 error of %s %.3g, at most %.3g expected", what.c_str(), kNames[t],
                                std::sqrt(got[t].error2), bound));
    }
}

// A rank's chunks of a tensor (outer, T, n).
inline std::vector<double> part_of(const std::vector<double>& x, const Zigzag& zigzag, int rank, size_t outer) {
    const size_t chunks = 2 * zigzag.ranks, elements = x.size() / outer / chunks;
    std::vector<double> part;
    for (size_t i = 0; i < outer; i++)
        for (int half = 0; half < 2; half++) {
            const auto begin = x.begin() + (i * chunks + zigzag.chunk(rank, half)) * elements;
            part.insert(part.end(), begin, begin + elements);
        }
    return part;
}
inline Written part_of(const Written& w, const Zigzag& zigzag, int rank, const AttentionShape& s) {
    const size_t rows = size_t(s.B) * s.NH;
    return {part_of(w.out, zigzag, rank, s.B), part_of(w.lse, zigzag, rank, rows), part_of(w.dqkv, zigzag, rank, s.B)};
}

template <class X>
std::string ring_name(const AttentionShape& s, int ranks) {
    return format("%s, T %d, HS %d, %d ranks", name_of(dtype_of<X>()), s.T, s.HS, ranks);
}

// Attention over a whole sequence and its gradients in fp64, from inputs that X can hold. With kBitsOnly for `threads`
// there are only the inputs.
constexpr int kBitsOnly = -1;
template <class X>
struct Whole {
    AttentionShape s;
    std::vector<double> qkv, dout;
    Written want;
    explicit Whole(const AttentionShape& s, double q_sigma = 1, uint64_t seed = 1, int threads = 1) : s(s) {
        const size_t n = size_t(s.B) * s.T * C();
        qkv = normal<X>(3 * n, 3 * seed), dout = normal<X>(n, 3 * seed + 1);
        const std::vector<double> q = normal<X>(3 * n, 3 * seed + 2, q_sigma);
        for (size_t i = 0; i < 3 * n; i++)
            if (i / C() % 3 == 0) qkv[i] = q[i];
        if (threads == kBitsOnly) return;
        want = {std::vector<double>(n), std::vector<double>(n / s.HS), std::vector<double>(3 * n)};
        const Cpu cpu(threads);
        attention_forward<double>(cpu, want.out.data(), want.lse.data(), qkv.data(), s.B, s.T, s.NH, s.HS, s.causal,
                                  s.resolved_scale());
        attention_backward<double>(cpu, want.dqkv.data(), dout.data(), want.out.data(), want.lse.data(), qkv.data(),
                                   s.B, s.T, s.NH, s.HS, s.causal, s.resolved_scale());
    }
    int C() const { return s.NH * s.HS; }
};

// A tensor of Y on the device. It begins as `values`, or all NaN.
template <class Dev, class Y>
struct Tensor {
    const Dev& dev;
    std::vector<Y> host;
    Y* ptr;
    Tensor(const Dev& dev, size_t n) : Tensor(dev, std::vector<double>(n, std::numeric_limits<double>::quiet_NaN())) {}
    Tensor(const Dev& dev, const std::vector<double>& values) : dev(dev) {
        for (double v : values) host.push_back(static_cast<Y>(v));
        ptr = static_cast<Y*>(dev.alloc(host.size() * sizeof(Y)));
        dev.upload(ptr, host.data(), host.size() * sizeof(Y));
        dev.sync();
    }
    ~Tensor() { dev.free(ptr); }
    Tensor(const Tensor&) = delete;
    std::vector<double> values() {
        dev.download(host.data(), ptr, host.size() * sizeof(Y));
        std::vector<double> values;
        for (Y v : host) values.push_back(static_cast<Acc<Y>>(v));
        return values;
    }
};

// The unchunked call, as a layer makes it.
template <class X>
void attention(const Cpu& dev, X* out, Acc<X>* lse, X* dqkv, const X* qkv, const X* dout, const AttentionShape& s) {
    attention_forward<X>(dev, out, lse, qkv, s.B, s.T, s.NH, s.HS, s.causal, s.resolved_scale());
    attention_backward<X>(dev, dqkv, dout, out, lse, qkv, s.B, s.T, s.NH, s.HS, s.causal, s.resolved_scale());
}
template <class X>
void attention(const Cuda& dev, X* out, float* lse, X* dqkv, const X* qkv, const X* dout, const AttentionShape& s) {
    const AttentionKernel<X>& kernel = attention_kernel<X>(dev, Attention::flash, s.HS);
    void* const scratch = dev.alloc(std::max<size_t>(16, kernel.scratch_bytes(s)));
    kernel.forward(dev, out, lse, nullptr, scratch, qkv, s);
    kernel.backward(dev, dqkv, scratch, dout, out, lse, nullptr, qkv, s);
    dev.sync();
    dev.free(scratch);
}

// Runs compute(out, lse, dqkv, qkv, dout) twice on the device. The second run reuses the memory of the first.
template <class X, class Dev, class Compute>
Written written_by(const Dev& dev, const std::vector<double>& qkv, const std::vector<double>& dout, int HS,
                   Compute compute) {
    Tensor<Dev, X> in(dev, qkv), d(dev, dout), out(dev, dout.size()), dqkv(dev, qkv.size());
    Tensor<Dev, Acc<X>> lse(dev, dout.size() / HS);
    Written first;
    for (int again = 0; again < 2; again++) {
        compute(out.ptr, lse.ptr, dqkv.ptr, in.ptr, d.ptr);
        Written now{out.values(), lse.values(), dqkv.values()};
        if (again && !(now == first)) test::report(__FILE__, __LINE__, "two runs differ, or there is NaN");
        first = std::move(now);
    }
    return first;
}
template <class X, class Dev>
Written unchunked(const Dev& dev, const Whole<X>& whole) {
    return written_by<X>(dev, whole.qkv, whole.dout, whole.s.HS,
                         [&](auto... tensors) { attention<X>(dev, tensors..., whole.s); });
}

// What Chunks or a Ring writes.
template <class X, class Dev, class Parts>
Written written_by_parts(const Dev& dev, Parts& parts, const std::vector<double>& qkv, const std::vector<double>& dout,
                         int HS) {
    return written_by<X>(dev, qkv, dout, HS, [&](X* out, Acc<X>* lse, X* dqkv, const X* qkv, const X* dout) {
        parts.forward(out, lse, qkv);
        parts.backward(dqkv, dout, out, lse, qkv);
    });
}

// One rank's part of the sequence, by a form of split attention.
template <class X, class Dev, class Comm>
Written split_part(const Dev& dev, Comm& comm, const Whole<X>& whole, Split<Dev, X, Comm>& split) {
    const Zigzag zigzag{comm.size};
    Tensor<Dev, float> memory(dev, split.bytes() / sizeof(float));
    split.start(memory.ptr, &comm);
    const Written part = written_by_parts<X>(dev, split, part_of(whole.qkv, zigzag, comm.rank, whole.s.B),
                                             part_of(whole.dout, zigzag, comm.rank, whole.s.B), whole.s.HS);
    split.stop();
    return part;
}
template <class X, class Dev, class Comm>
Written ring_part(const Dev& dev, Comm& comm, const Whole<X>& whole) {
    const AttentionShape& s = whole.s;
    Ring<Dev, X, Comm> ring(dev, comm.rank, comm.size, s.B, s.T / (2 * comm.size), s.NH, s.HS, s.scale);
    return split_part(dev, comm, whole, ring);
}

// The exchange of heads gives every bit of the unchunked call, `one`. Every rank makes this call.
template <class X, class Dev, class Comm>
void check_exchange(const Dev& dev, Comm& comm, const Whole<X>& whole, const Written& one) {
    const AttentionShape& s = whole.s;
    HeadExchange<Dev, X, Comm> exchange(dev, comm.rank, comm.size, s.B, s.T / (2 * comm.size), s.NH, s.HS);
    Ring<Dev, X, Comm> ring(dev, comm.rank, comm.size, s.B, s.T / (2 * comm.size), s.NH, s.HS);
    const Written got = split_part(dev, comm, whole, exchange);
    Written want = part_of(one, {comm.size}, comm.rank, s);
    want.lse.clear();  // (cohorts, B, heads, T) of this rank's heads
    const int own = s.NH / comm.size, heads = exchange.heads();
    for (int first = comm.rank * own; first < (comm.rank + 1) * own; first += heads)
        for (int b = 0; b < s.B; b++) {
            const auto begin = one.lse.begin() + (size_t(b) * s.NH + first) * s.T;
            want.lse.insert(want.lse.end(), begin, begin + size_t(heads) * s.T);
        }
    const std::string what = ring_name<X>(s, comm.size);
    if (!(got == want)) test::report(__FILE__, __LINE__, what + ": the exchange of heads gives other bits");
    if (comm.size > 1 && exchange.bytes() > ring.bytes())
        test::report(__FILE__, __LINE__, what + ": more memory than the ring's");
}
template <class X, class Dev>
void check_local_exchange(const Dev& dev, const AttentionShape& s, int ranks) {
    const Whole<X> whole(s, 1, 1, kBitsOnly);
    const Written one = unchunked(dev, whole);
    on_local_ranks(dev, ranks, [&](auto& comm) { check_exchange(dev, comm, whole, one); });
}

// Errors of all ranks' parts, and the unchunked call's at the same places. All ranks count together, because few
// elements decide the error of one.
struct RingErrors {
    TensorErrors ring{}, unchunked{};

    template <class X>
    void add(const Whole<X>& whole, const Written& part, const Written& one, const Zigzag& zigzag, int rank) {
        const Written want = part_of(whole.want, zigzag, rank, whole.s);
        add_errors(ring, part, want, whole.C());
        add_errors(unchunked, part_of(one, zigzag, rank, whole.s), want, whole.C());
    }
    template <class X, class Dev>
    void add_threads(const Dev& dev, const Whole<X>& whole, const Written& one, int ranks) {
        std::vector<Written> parts(ranks);
        on_local_ranks(dev, ranks, [&](auto& comm) { parts[comm.rank] = ring_part(dev, comm, whole); });
        for (int r = 0; r < ranks; r++) add(whole, parts[r], one, Zigzag{ranks}, r);
    }
    template <class X, class Dev>
    void check(const AttentionShape& s, int ranks) const {
        std::array<double, kTensors> more{};
        if (std::is_same_v<Dev, Cuda>) more[Lse] = 0x1p-25;  // a merge ends in one more rounding
        // Backward's partial calls get lse in fp32, and its rounding is a relative error of P. It counts in fp32 on a
        // GPU, because the unchunked call makes up for it.
        if (std::is_same_v<Dev, Cuda> && std::is_same_v<X, float>)
            more[Dq] = more[Dk] = more[Dv] = 0x1p-25 * std::sqrt(ring[Lse].value2 / ring[Lse].n);
        check_errors<X>(ring_name<X>(s, ranks), ring, unchunked, more);
    }
};

// Every rank of a job makes this call, with its own part.
template <class X, class Dev, class Comm>
void check_ring(const Dev& dev, Comm& comm, Job& job, const AttentionShape& s, double q_sigma = 1) {
    const Whole<X> whole(s, q_sigma);
    RingErrors errors;
    errors.add(whole, ring_part(dev, comm, whole), unchunked(dev, whole), Zigzag{comm.size}, comm.rank);
    for (TensorErrors* of : {&errors.ring, &errors.unchunked})
        for (ErrorOf& e : *of) {
            std::vector<double> sums = {e.error2, e.value2, double(e.n)};
            CpuComm(job).all_reduce(sums.data(), sums.size());
            e.error2 = sums[0], e.value2 = sums[1], e.n = static_cast<size_t>(sums[2]);
        }
    errors.check<X, Dev>(s, comm.size);
}

// The same with threads as ranks.
template <class X, class Dev>
void check_local_rings(const Dev& dev, const AttentionShape& s, double q_sigma, int threads) {
    const Whole<X> whole(s, q_sigma, 1, threads);
    const Written one = unchunked(dev, whole);
    for (int ranks : {1, 2, 3, 8}) {
        RingErrors errors;
        errors.add_threads(dev, whole, one, ranks);
        errors.check<X, Dev>(s, ranks);
    }
}

// Rings of 1, 2, 4 and 8 ranks. The error must be flat over N, not only small.
template <class X, class Dev>
void check_flat(const Dev& dev, const AttentionShape& s, int threads) {
    constexpr int kSeeds = 5;
    RingErrors of[4];  // 2^i ranks
    for (int seed = 1; seed <= kSeeds; seed++) {
        const Whole<X> whole(s, 1, seed, threads);
        const Written one = unchunked(dev, whole);
        for (int i = 0; i < 4; i++) of[i].add_threads(dev, whole, one, 1 << i);
    }
    for (int i = 0; i < 4; i++) {
        const std::string what = ring_name<X>(s, 1 << i);
        check_errors<X>(what, of[i].ring, of[i].unchunked);
        for (int t = 0; t < kTensors; t++) {
            const ErrorOf &e = of[i].ring[t], &first = of[0].ring[t];
            const double mean = e.mean() / first.mean(), largest = e.largest / first.largest;
            if (!(mean <= 1.02 && largest <= 1.1))
                test::report(__FILE__, __LINE__,
                             format("%s: error of %s %.3f times one rank's (at most 1.02), largest %.3f times (1.1)",
                                    what.c_str(), kNames[t], mean, largest));
        }
    }
}

// The same check for attention in chunks.
template <class X, class Dev>
void check_chunks(const Dev& dev, const AttentionShape& s, int q_chunk, int k_chunk) {
    const Whole<X> whole(s);
    Chunks<Dev, X> chunks(dev, {s.B, s.T, s.T, s.NH, s.HS, 0, 0, s.causal, s.scale}, q_chunk, k_chunk);
    Tensor<Dev, float> memory(dev, chunks.bytes() / sizeof(float));
    chunks.place(memory.ptr);
    TensorErrors errors, yardstick;
    add_errors(errors, written_by_parts<X>(dev, chunks, whole.qkv, whole.dout, s.HS), whole.want, whole.C());
    add_errors(yardstick, unchunked(dev, whole), whole.want, whole.C());
    check_errors<X>(format("T %d in chunks of %d queries and %d keys", s.T, q_chunk, k_chunk), errors, yardstick);
}
