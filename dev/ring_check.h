// The check of ring attention that both backends share: every rank's results against attention that was never split, in
// fp64. Include the backend's block form before it.
#pragma once
#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attention/chunks.h"
#include "attention/ring.h"
#include "dev/reference.h"
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

// max|got − want| ≤ tolerance·max|want|; NaN fails.
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

// A whole sequence's attention and its gradients, with inputs that X can hold.
template <class X>
struct Whole {
    int B, T, NH, HS;
    std::vector<double> qkv, dout, out, lse, dqkv;
    Whole(int B, int T, int NH, int HS, double q_sigma) : B(B), T(T), NH(NH), HS(HS) {
        const size_t n = size_t(B) * T * NH * HS;
        qkv = normal<X>(3 * n, 1), dout = normal<X>(n, 2), out.resize(n), lse.resize(n / HS), dqkv.resize(3 * n);
        const std::vector<double> q = normal<X>(3 * n, 3, q_sigma);
        for (size_t i = 0; i < 3 * n; i++)
            if (i / (NH * HS) % 3 == 0) qkv[i] = q[i];
        const Cpu cpu(1);
        const double scale = BlockShape{B, T, T, NH, HS}.resolved_scale();
        attention_forward<double>(cpu, out.data(), lse.data(), qkv.data(), B, T, NH, HS, true, scale);
        attention_backward<double>(cpu, dqkv.data(), dout.data(), out.data(), lse.data(), qkv.data(), B, T, NH, HS,
                                   true, scale);
    }
    // A rank's rows of x (B, T, C) in the order of its chunks.
    std::vector<double> part(const std::vector<double>& x, const Zigzag& zigzag, int rank, int C) const {
        std::vector<double> part;
        const int Tc = T / (2 * zigzag.ranks);
        for (int b = 0; b < B; b++)
            for (int half = 0; half < 2; half++) {
                const auto from = x.begin() + (size_t(b) * T + size_t(zigzag.chunk(rank, half)) * Tc) * C;
                part.insert(part.end(), from, from + size_t(Tc) * C);
            }
        return part;
    }
    std::vector<double> part_of_lse(const Zigzag& zigzag, int rank) const {  // (B, NH, 2Tc)
        std::vector<double> part;
        const int Tc = T / (2 * zigzag.ranks);
        for (int row = 0; row < B * NH; row++)
            for (int half = 0; half < 2; half++) {
                const auto from = lse.begin() + size_t(row) * T + zigzag.chunk(rank, half) * Tc;
                part.insert(part.end(), from, from + Tc);
            }
        return part;
    }
};

// A tensor on the device, of Y's; all NaN to begin with, or `values`.
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
        for (Y v : host) {
            if constexpr (std::is_same_v<Y, double>)
                values.push_back(v);
            else
                values.push_back(static_cast<float>(v));
        }
        return values;
    }
};

template <class X, class Dev, class Comm>
void check_ring(const Dev& dev, Comm& comm, int B, int Tc, int NH, int HS, double q_sigma, double tolerance) {
    const Zigzag zigzag{comm.size};
    const Whole<X> whole(B, 2 * comm.size * Tc, NH, HS, q_sigma);
    const int C = NH * HS, rank = comm.rank;
    Tensor<Dev, X> qkv(dev, whole.part(whole.qkv, zigzag, rank, 3 * C)),
        dout(dev, whole.part(whole.dout, zigzag, rank, C));
    Tensor<Dev, X> out(dev, dout.host.size()), dqkv(dev, qkv.host.size());
    Tensor<Dev, Acc<X>> lse(dev, dout.host.size() / HS);
    Ring<Dev, X, Comm> ring(dev, rank, comm.size, B, Tc, NH, HS);
    Tensor<Dev, float> memory(dev, ring.bytes() / sizeof(float));
    ring.start(memory.ptr, &comm);
    for (int again = 0; again < 2; again++) {  // with the memory of the first time
        ring.forward(out.ptr, lse.ptr, qkv.ptr);
        ring.backward(dqkv.ptr, dout.ptr, out.ptr, lse.ptr, qkv.ptr);
        const std::string what = format("rank %d of %d, Tc %d: ", rank, comm.size, Tc);
        check_close(what + "out", out.values(), whole.part(whole.out, zigzag, rank, C), tolerance);
        check_close(what + "lse", lse.values(), whole.part_of_lse(zigzag, rank), tolerance);
        check_close(what + "dqkv", dqkv.values(), whole.part(whole.dqkv, zigzag, rank, 3 * C), tolerance);
    }
    comm.share(nullptr, 0);
}

// Attention in chunks, against the same.
template <class X, class Dev>
void check_chunks(const Dev& dev, int B, int T, int NH, int HS, int q_chunk, int k_chunk, double tolerance) {
    const Whole<X> whole(B, T, NH, HS, 1);
    Tensor<Dev, X> qkv(dev, whole.qkv), dout(dev, whole.dout), out(dev, whole.out.size()), dqkv(dev, whole.qkv.size());
    Tensor<Dev, Acc<X>> lse(dev, whole.lse.size());
    Chunks<Dev, X> chunks(dev, {B, T, T, NH, HS}, q_chunk, k_chunk);
    Tensor<Dev, float> memory(dev, chunks.bytes() / sizeof(float));
    chunks.place(memory.ptr);
    for (int again = 0; again < 2; again++) {  // with the memory of the first time
        chunks.forward(out.ptr, lse.ptr, qkv.ptr);
        chunks.backward(dqkv.ptr, dout.ptr, out.ptr, lse.ptr, qkv.ptr);
        const std::string what = format("T %d in chunks of %d queries and %d keys: ", T, q_chunk, k_chunk);
        check_close(what + "out", out.values(), whole.out, tolerance);
        check_close(what + "lse", lse.values(), whole.lse, tolerance);
        check_close(what + "dqkv", dqkv.values(), whole.dqkv, tolerance);
    }
}
