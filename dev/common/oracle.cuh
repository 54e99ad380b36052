// Attention in fp64 on the GPU: the reference for long sequences, where layers/cpu takes minutes
// and this takes milliseconds. It works on whole sequences, with T = Tq = Tk.
//
// The oracle computes the plain formula for one (b, h) at a time. cuBLAS multiplies a block of
// query rows with the keys that any of them sees, and a softmax kernel runs between the products.
// Of the T×T matrices S and dP only 1024 rows each are in memory at a time, which is 1 GiB at
// T = 65536.
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

constexpr int kThreads = 256;  // of a block
inline unsigned blocks_of(size_t threads) {
    return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

// -------------------------------------------------------------------------------------------------
// The oracle

struct Sum {
    static __device__ double of(double a, double b) { return a + b; }
};
// NaN counts as larger than any number.
struct Max {
    static __device__ double of(double a, double b) { return (a > b || isnan(a)) ? a : b; }
};

// Reduces the x of a block's threads. Every thread gets the result.
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
    for (int j = threadIdx.x; j < seen; j += kThreads)
        m = Max::of(m, s[j]);
    m = block_reduce<Max>(m);

    double l = 0;
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

// A factor of a product, row-major.
struct Operand {
    const double* data;
    bool transposed = false;  // it is stored as its transpose
};
struct ProductSizes {
    int rows;     // of c
    int columns;  // of c
    int inner;    // what the product sums over
};
struct ProductScales {
    double product = 1;
    double c = 0;  // 1 adds the product to c
};

// Row-major c = scales.product·a b + scales.c·c. cuBLAS is column-major, so it is asked for
// cᵀ = bᵀ aᵀ.
inline void multiply(const Cuda& dev, double* c, const Operand& a, const Operand& b,
                     const ProductSizes& sizes, const ProductScales& scales = {}) {
    const auto operation = [](const Operand& x) {
        return x.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    };
    const auto [rows, columns, inner] = sizes;
    const int a_stride = a.transposed ? rows : inner;
    const int b_stride = b.transposed ? inner : columns;
    CUBLAS_CHECK(cublasDgemm(dev.blas, operation(b), operation(a), columns, rows, inner,
                             &scales.product, b.data, b_stride, a.data, a_stride, &scales.c, c,
                             columns));
}

// One head in fp64: q, k, v, dout, out, dq, dk, dv (T, HS), lse (T).
class Oracle {
  public:
    double* q;
    double* k;
    double* v;
    double* dout;
    double* results[kTensors];

    static constexpr int kBlock = 1024;  // query rows whose S and dP are in memory at a time

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
        const size_t tensors = 8 * size_t(T) * HS + T;               // eight like q, and lse
        const size_t matrices = 2 * size_t(std::min(block, T)) * T;  // P and dP
        return (tensors + matrices) * sizeof(double);
    }

    // Reads q, k, v and dout, and writes results.
    void run(bool causal, double scale) {
        for (int i : {Dk, Dv})
            dev_.zero(results[i], size_t(T_) * HS_ * sizeof(double));
        for (int q0 = 0; q0 < T_; q0 += block_)
            run_block(q0, causal, scale);
    }

  private:
    const Cuda& dev_;
    int T_;
    int HS_;
    int block_;
    DeviceMemory memory_;
    double* p_;
    double* dp_;

    // The query rows from q0 on. Writes their rows of out, lse and dq, and adds to dk and dv.
    void run_block(int q0, bool causal, double scale) {
        const int rows = std::min(block_, T_ - q0);
        const int keys = causal ? q0 + rows : T_;
        const size_t first = size_t(q0) * HS_;
        const Operand q_rows{q + first};
        const Operand dout_rows{dout + first};
        const auto transposed = [](const double* x) { return Operand{x, true}; };
        const ProductSizes rows_by_keys{.rows = rows, .columns = keys, .inner = HS_};
        const ProductSizes rows_by_hs{.rows = rows, .columns = HS_, .inner = keys};
        const ProductSizes keys_by_hs{.rows = keys, .columns = HS_, .inner = rows};

        // S = scale·q kᵀ, P = softmax S, out = P v
        multiply(dev_, p_, q_rows, transposed(k), rows_by_keys, {.product = scale});
        softmax64_kernel<<<rows, kThreads, 0, dev_.stream>>>(p_, results[Lse], q0, keys, causal);
        LAUNCH_CHECK("softmax64_kernel");
        multiply(dev_, results[Out] + first, {p_}, {v}, rows_by_hs);

        // dv += Pᵀ dout; dP = dout vᵀ, which becomes dS
        multiply(dev_, results[Dv], transposed(p_), dout_rows, keys_by_hs, {.c = 1});
        multiply(dev_, dp_, dout_rows, transposed(v), rows_by_keys);
        softmax64_backward_kernel<<<rows, kThreads, 0, dev_.stream>>>(dp_, p_, keys);
        LAUNCH_CHECK("softmax64_backward_kernel");

        // dq = scale·dS k, dk += scale·dSᵀ q
        multiply(dev_, results[Dq] + first, {dp_}, {k}, rows_by_hs, {.product = scale});
        multiply(dev_, results[Dk], transposed(dp_), q_rows, keys_by_hs,
                 {.product = scale, .c = 1});
    }
};

// The index of element i of a (T, n) tensor whose rows are `stride` elements apart.
__device__ inline size_t strided(size_t i, int n, size_t stride) {
    return (i / n) * stride + i % n;
}

// Copies `from` (T, n), whose rows are `stride` elements apart, to a contiguous `to` in fp64.
template <class X>
__global__ void gather_kernel(double* to, const X* from, size_t stride, int T, int n) {
    const size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < size_t(T) * n)
        to[i] = to_float(from[strided(i, n, stride)]);
}

// Copies one head of a packed qkv (B, T, 3, NH, HS) and dout (B, T, NH, HS) into the oracle.
template <class X>
void gather(const Cuda& dev, Oracle& oracle, const X* qkv, const X* dout, const AttentionShape& s,
            int b, int h) {
    const size_t C = size_t(s.NH) * s.HS;
    const size_t token = size_t(b) * s.Tq;
    double* const parts[] = {oracle.q, oracle.k, oracle.v};
    const unsigned blocks = blocks_of(size_t(s.Tq) * s.HS);
    for (int part = 0; part < 3; part++) {
        const X* const head = qkv + (token * 3 + part) * C + h * s.HS;
        gather_kernel<<<blocks, kThreads, 0, dev.stream>>>(parts[part], head, 3 * C, s.Tq, s.HS);
        LAUNCH_CHECK("gather_kernel");
    }
    const X* const head = dout + token * C + h * s.HS;
    gather_kernel<<<blocks, kThreads, 0, dev.stream>>>(oracle.dout, head, C, s.Tq, s.HS);
    LAUNCH_CHECK("gather_kernel");
}

// Calls use(oracle, b, h) for each head, when the oracle has its results.
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
// Errors against the oracle

// The sums of an ErrorStats, in the device's memory, and the reference's largest element.
struct ErrorSums {
    double largest;
    double sum;
    double sum_squares;
    double largest_reference;
    double reference_squares;
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
    double largest = 0;
    double sum = 0;
    double sum_squares = 0;
    double largest_reference = 0;
    double reference_squares = 0;
    const size_t first = size_t(blockIdx.x) * kThreads + threadIdx.x;
    const size_t step = size_t(gridDim.x) * kThreads;
    for (size_t i = first; i < size_t(T) * n; i += step) {
        const double reference = want[i];
        const double error = fabs(to_float(got[strided(i, n, stride)]) - reference);
        largest = Max::of(largest, error);
        sum += error;
        sum_squares += error * error;
        largest_reference = Max::of(largest_reference, fabs(reference));
        reference_squares += reference * reference;
    }

    largest = block_reduce<Max>(largest);
    sum = block_reduce<Sum>(sum);
    sum_squares = block_reduce<Sum>(sum_squares);
    largest_reference = block_reduce<Max>(largest_reference);
    reference_squares = block_reduce<Sum>(reference_squares);
    if (threadIdx.x > 0)
        return;

    atomic_max(&sums->largest, largest);
    atomicAdd(&sums->sum, sum);
    atomicAdd(&sums->sum_squares, sum_squares);
    atomic_max(&sums->largest_reference, largest_reference);
    atomicAdd(&sums->reference_squares, reference_squares);
}

// The errors of what a kernel wrote, over as many heads as are added.
class Errors {
  public:
    Errors(const Cuda& dev, const AttentionShape& s)
        : dev_(dev), s_(s), device_(device_memory(dev, kTensors * sizeof(ErrorSums))) {
        dev.zero(device_.get(), kTensors * sizeof(ErrorSums));
    }

    // Adds head h of sequence b, whose results the oracle has. out is (B, T, NH, HS), lse
    // (B, NH, T), and dqkv (B, T, 3, NH, HS) or null if there was no backward.
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

    // The figures below are those of the last fetch().
    void fetch() { dev_.download(sums_.data(), device_.get(), sizeof sums_); }

    double largest_value(int tensor) const { return sums_[tensor].largest_reference; }
    double max(int tensor) const { return sums_[tensor].largest; }
    double mean(int tensor) const {
        const int width = tensor == Lse ? 1 : s_.HS;  // elements of a row
        return sums_[tensor].sum / (double(heads_) * s_.Tq * width);
    }
    double relative_l2(int tensor) const {
        return std::sqrt(sums_[tensor].sum_squares / sums_[tensor].reference_squares);
    }
    double snr_db(int tensor) const { return -20 * std::log10(relative_l2(tensor)); }

  private:
    const Cuda& dev_;
    AttentionShape s_;
    DeviceMemory device_;
    std::array<ErrorSums, kTensors> sums_;
    int heads_ = 0;
};
