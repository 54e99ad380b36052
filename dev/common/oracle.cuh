// Attention in fp64 on the GPU. It judges long sequences, because layers/cpu takes minutes where
// this takes milliseconds. It takes whole sequences, with T = Tq = Tk.
//
// It computes the plain formula for one (b, h) at a time. cuBLAS multiplies a block of query rows
// with all keys, and a softmax kernel runs between the products. It keeps only 2·1024·T doubles of
// T×T, which is 1 GiB at T = 65536.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "attention/attention.h"
#include "cuda/cublas.h"
#include "cuda/vector.cuh"
#include "dev/common/bench.h"
#include "dev/common/bounds.h"

// Bytes of device memory that start as NaN.
inline DeviceMemory poisoned(const Cuda& dev, size_t bytes) {
    DeviceMemory memory = device_memory(dev, std::max<size_t>(bytes, 16));
    CUDA_CHECK(cudaMemsetAsync(memory.get(), 0xFF, bytes, dev.stream));
    return memory;
}

constexpr int kThreads = 256;
inline unsigned blocks_of(size_t threads) {
    return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

// -------------------------------------------------------------------------------------------------
// The oracle

// Every thread gets the result. NaN wins a maximum.
struct Sum {
    static __device__ double of(double a, double b) { return a + b; }
};
struct Max {
    static __device__ double of(double a, double b) { return a > b || isnan(a) ? a : b; }
};
template <class Op>
__device__ double block_reduce(double x) {
    __shared__ double smem[kThreads];
    __syncthreads();  // wait until an earlier call's reads are done
    smem[threadIdx.x] = x;
    for (int half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            smem[threadIdx.x] = Op::of(smem[threadIdx.x], smem[threadIdx.x + half]);
    }
    __syncthreads();
    return smem[0];
}

// Each block owns one row of p (rows, keys), which belongs to query q0 + row. S becomes P, with
// zeros for keys that the query does not see.
static __global__ void softmax64_kernel(double* p, double* lse, int q0, int keys, bool causal) {
    double* s = p + size_t(blockIdx.x) * keys;
    const int query = q0 + blockIdx.x;
    const int seen = causal ? query + 1 : keys;
    double m = -INFINITY;
    double l = 0;
    for (int j = threadIdx.x; j < seen; j += kThreads)
        m = Max::of(m, s[j]);
    m = block_reduce<Max>(m);
    for (int j = threadIdx.x; j < seen; j += kThreads)
        l += exp(s[j] - m);
    l = block_reduce<Sum>(l);
    for (int j = threadIdx.x; j < keys; j += kThreads)
        s[j] = j < seen ? exp(s[j] - m) / l : 0;
    if (threadIdx.x == 0)
        lse[query] = m + log(l);
}

// dP becomes dS = P∘(dP − D), D = rowsum(P∘dP).
static __global__ void softmax64_backward_kernel(double* dp, const double* p, int keys) {
    const size_t row = size_t(blockIdx.x) * keys;
    double D = 0;
    for (int j = threadIdx.x; j < keys; j += kThreads)
        D += p[row + j] * dp[row + j];
    D = block_reduce<Sum>(D);
    for (int j = threadIdx.x; j < keys; j += kThreads)
        dp[row + j] = p[row + j] * (dp[row + j] - D);
}

// Row-major c (m × n) = alpha·a b + beta·c. a is (m × k), or (k × m) and transposed, and b
// likewise. cuBLAS is column-major, so we ask it for cᵀ = bᵀ aᵀ.
inline void multiply(const Cuda& dev, double* c, double alpha, const double* a, bool transpose_a,
                     const double* b, bool transpose_b, int m, int n, int k, double beta) {
    CUBLAS_CHECK(cublasDgemm(dev.blas, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                             transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &alpha, b,
                             transpose_b ? k : n, a, transpose_a ? m : k, &beta, c, n));
}

// One head in fp64: q, k, v, dout, out, dq, dk, dv (T, HS), lse (T).
class Oracle {
  public:
    double *q, *k, *v, *dout, *results[kTensors];

    static constexpr int kBlock = 1024;  // query rows that are in work at a time
    Oracle(const Cuda& dev, int T, int HS, int block = kBlock)
        : dev_(dev), T_(T), HS_(HS), block_(std::min(block, T)) {
        const size_t n = size_t(T) * HS;
        memory_ = poisoned(dev, bytes(T, HS, block));
        double* next = static_cast<double*>(memory_.get());
        const auto take = [&](size_t size) { return std::exchange(next, next + size); };
        for (double** x : {&q, &k, &v, &dout})
            *x = take(n);
        for (int i = 0; i < kTensors; i++)
            results[i] = take(i == Lse ? T : n);
        p_ = take(size_t(block_) * T);
        dp_ = take(size_t(block_) * T);
    }
    static size_t bytes(int T, int HS, int block = kBlock) {
        return (8 * size_t(T) * HS + T + 2 * size_t(std::min(block, T)) * T) * sizeof(double);
    }

    // Reads q, k, v, dout; writes results.
    void run(bool causal, double scale) {
        for (int i : {Dk, Dv})
            dev_.zero(results[i], size_t(T_) * HS_ * sizeof(double));
        for (int q0 = 0; q0 < T_; q0 += block_) {
            const int rows = std::min(block_, T_ - q0);
            const int keys = causal ? q0 + rows : T_;
            const size_t at = size_t(q0) * HS_;
            multiply(dev_, p_, scale, q + at, false, k, true, rows, keys, HS_, 0);
            softmax64_kernel<<<rows, kThreads, 0, dev_.stream>>>(p_, results[Lse], q0, keys,
                                                                 causal);
            LAUNCH_CHECK("softmax64_kernel");
            multiply(dev_, results[Out] + at, 1, p_, false, v, false, rows, HS_, keys, 0);
            multiply(dev_, results[Dv], 1, p_, true, dout + at, false, keys, HS_, rows, 1);
            multiply(dev_, dp_, 1, dout + at, false, v, true, rows, keys, HS_, 0);
            softmax64_backward_kernel<<<rows, kThreads, 0, dev_.stream>>>(dp_, p_, keys);
            LAUNCH_CHECK("softmax64_backward_kernel");
            multiply(dev_, results[Dq] + at, scale, dp_, false, k, false, rows, HS_, keys, 0);
            multiply(dev_, results[Dk], scale, dp_, true, q + at, false, keys, HS_, rows, 1);
        }
    }

  private:
    const Cuda& dev_;
    int T_, HS_, block_;
    DeviceMemory memory_;
    double *p_, *dp_;
};

// Copies `from`, whose rows of n lie `stride` elements apart, to `to` (T, n) in fp64.
template <class X>
__global__ void gather_kernel(double* to, const X* from, size_t stride, int T, int n) {
    const size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < size_t(T) * n)
        to[i] = to_float(from[i / n * stride + i % n]);
}

// Copies one head of a packed qkv (B, T, 3, NH, HS) and dout (B, T, NH, HS) into the oracle.
template <class X>
void gather(const Cuda& dev, Oracle& oracle, const X* qkv, const X* dout, const AttentionShape& s,
            int b, int h) {
    const size_t C = size_t(s.NH) * s.HS;
    const size_t token = size_t(b) * s.Tq;
    double* const parts[] = {oracle.q, oracle.k, oracle.v};
    const unsigned blocks = blocks_of(size_t(s.Tq) * s.HS);
    for (int part = 0; part < 3; part++)
        gather_kernel<<<blocks, kThreads, 0, dev.stream>>>(
            parts[part], qkv + (token * 3 + part) * C + h * s.HS, 3 * C, s.Tq, s.HS);
    gather_kernel<<<blocks, kThreads, 0, dev.stream>>>(oracle.dout, dout + token * C + h * s.HS, C,
                                                       s.Tq, s.HS);
    LAUNCH_CHECK("gather_kernel");
}

// Calls use(oracle, b, h) with fp64's results of each head.
template <class X, class Use>
void for_each_head(const Cuda& dev, const X* qkv, const X* dout, const AttentionShape& s, Use use) {
    Oracle oracle(dev, s.Tq, s.HS);
    for (int b = 0; b < s.B; b++)
        for (int h = 0; h < s.NH; h++) {
            gather(dev, oracle, qkv, dout, s, b, h);
            oracle.run(s.causal, s.resolved_scale());
            use(oracle, b, h);
        }
}

// -------------------------------------------------------------------------------------------------
// Errors against it

// The sums over one tensor.
struct ErrorSums {
    double largest_error, error, error2, largest, value2;  // max|e|, Σ|e|, Σe², max|ref|, Σref²
};

// The bits of non-negative doubles have the same order as their values, and NaN's bits are above
// infinity's.
__device__ inline void atomic_max(double* to, double x) {
    atomicMax(reinterpret_cast<unsigned long long*>(to),
              static_cast<unsigned long long>(__double_as_longlong(fabs(x))));
}

// Adds (T, n) elements to the sums. NaN stays NaN.
template <class X>
__global__ void error_kernel(ErrorSums* sums, const X* got, size_t stride, const double* want,
                             int T, int n) {
    double largest_error = 0;
    double error = 0;
    double error2 = 0;
    double largest = 0;
    double value2 = 0;
    for (size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x; i < size_t(T) * n;
         i += size_t(gridDim.x) * kThreads) {
        const double value = want[i];
        const double e = fabs(to_float(got[i / n * stride + i % n]) - value);
        largest_error = Max::of(largest_error, e);
        error += e;
        error2 += e * e;
        largest = Max::of(largest, fabs(value));
        value2 += value * value;
    }
    largest_error = block_reduce<Max>(largest_error);
    error = block_reduce<Sum>(error);
    error2 = block_reduce<Sum>(error2);
    largest = block_reduce<Max>(largest);
    value2 = block_reduce<Sum>(value2);
    if (threadIdx.x > 0)
        return;
    atomic_max(&sums->largest_error, largest_error);
    atomicAdd(&sums->error, error);
    atomicAdd(&sums->error2, error2);
    atomic_max(&sums->largest, largest);
    atomicAdd(&sums->value2, value2);
}

// The errors of what a kernel wrote, over as many heads as are added.
class Errors {
  public:
    Errors(const Cuda& dev, const AttentionShape& s)
        : dev_(dev), s_(s), device_(device_memory(dev, kTensors * sizeof(ErrorSums))) {
        dev.zero(device_.get(), kTensors * sizeof(ErrorSums));
    }

    // Adds head h of sequence b, for which the oracle has run. out (B, T, NH, HS), lse (B, NH, T),
    // dqkv (B, T, 3, NH, HS), or null if there was no backward.
    template <class X>
    void add(const Oracle& oracle, const X* out, const float* lse, const X* dqkv, int b, int h) {
        const size_t C = size_t(s_.NH) * s_.HS;
        const size_t token = size_t(b) * s_.Tq;
        const auto compare = [&](int tensor, const auto* got, size_t stride, int n) {
            const unsigned blocks = std::min(blocks_of(size_t(s_.Tq) * n), 4u * dev_.num_sms);
            error_kernel<<<blocks, kThreads, 0, dev_.stream>>>(
                static_cast<ErrorSums*>(device_.get()) + tensor, got, stride,
                oracle.results[tensor], s_.Tq, n);
            LAUNCH_CHECK("error_kernel");
        };
        compare(Out, out + token * C + h * s_.HS, C, s_.HS);
        compare(Lse, lse + (size_t(b) * s_.NH + h) * s_.Tq, 1, 1);
        for (int part = 0; dqkv && part < 3; part++)
            compare(Dq + part, dqkv + (token * 3 + part) * C + h * s_.HS, 3 * C, s_.HS);
        heads_++;
    }
    void fetch() { dev_.download(sums_.data(), device_.get(), sizeof sums_); }

    double largest_value(int tensor) const { return sums_[tensor].largest; }
    double max(int tensor) const { return sums_[tensor].largest_error; }
    double mean(int tensor) const {
        return sums_[tensor].error / (double(heads_) * s_.Tq * (tensor == Lse ? 1 : s_.HS));
    }
    // relative
    double l2(int tensor) const { return std::sqrt(sums_[tensor].error2 / sums_[tensor].value2); }
    double snr_db(int tensor) const { return -20 * std::log10(l2(tensor)); }

  private:
    const Cuda& dev_;
    AttentionShape s_;
    DeviceMemory device_;
    std::array<ErrorSums, kTensors> sums_;
    int heads_ = 0;
};
