// The errors of every attention kernel against fp64, beside those of naive in the same precision on the same inputs.
//
//   oracle    the formula in fp64 on the GPU, one (b, h) at a time: cuBLAS products of blocks of query rows, so that
//             T = 65536 needs 1 GiB. Held to dev/reference's plain loops, to 1e-12, before anything else runs.
//   yardstick naive in the same precision; in fp32 without TF32. naive_tf32 is shown beside it, and bound to nothing.
//   inputs    N(0,1); q five times as large; mean +0.5. bf16 kernels: rounded first, so that the oracle sees the same.
//   figures   of out, lse, dq, dk, dv: largest and mean absolute error, relative L2 error, signal-to-noise ratio
//             20·log10(‖ref‖/‖error‖) in dB, and the multiples of naive's largest and L2 error, which dev/bounds.h
//             bounds.
//   masks     the block form with keys that all or half of the queries do not see: nothing may become NaN.
//
// Outputs and scratch start as NaN. Exit code 1 if an error passes its bound; NaN passes none.
//
// Run: ./dev/accuracy --help
#include <array>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "data/options.h"
#include "dev/bench.h"
#include "dev/bounds.h"
#include "dev/reference.h"
#include "layers/vector.cuh"

struct Options {
    std::string kernel = "all", shapes, dtype = "all", hs = "64", inputs = "all", out;
    int heads = 2;
    bool no_causal = false, quick = false, json = false, help = false;
};

static const char* const kQuickShapes = "2x64,2x255,2x1024";
static const char* const kShapes = "2x64,2x255,2x1024,1x4096,1x16384";

static Options parse(int argc, char** argv) {
    Options o;
    std::vector<Option> table = {
        {"--kernel", "", Option::String, &o.kernel, "flash_fp32, flash_bf16, … or all; naive always runs", ""},
        {"--shapes", "", Option::String, &o.shapes, "BxT,BxT,… (default: T from 64 to 16384, and 2x256 not causal)",
         ""},
        {"--heads", "", Option::Int, &o.heads, "number of heads NH", "1..1024"},
        {"--hs", "", Option::Choice, &o.hs, "head size HS", "64|128"},
        {"--dtype", "", Option::Choice, &o.dtype, "precision", "fp32|bf16|all"},
        {"--inputs", "", Option::Choice, &o.inputs, "which inputs", "normal|large_q|shifted|all"},
        {"--no-causal", "", Option::Flag, &o.no_causal, "every query sees every key", ""},
        {"--quick", "", Option::Flag, &o.quick, "T up to 1024", ""},
        {"--json", "", Option::Flag, &o.json, "append rows to dev/results/<gpu>/accuracy.jsonl", ""},
        {"--out", "", Option::String, &o.out, "append rows to this file", ""},
    };
    if (parse_options(argc, argv, table)) {
        std::fputs(options_help("accuracy", "The attention kernels' errors against fp64.", table).c_str(), stdout);
        o.help = true;
        return o;
    }
    if (!o.shapes.empty()) parse_shapes(o.shapes);
    check_kernel_name(o.kernel);
    return o;
}

// Bytes of device memory that start as NaN.
static DeviceMemory poisoned(const Cuda& dev, size_t bytes) {
    DeviceMemory memory = device_memory(dev, std::max<size_t>(bytes, 16));
    CUDA_CHECK(cudaMemsetAsync(memory.get(), 0xFF, bytes, dev.stream));
    return memory;
}

constexpr int kThreads = 256;
static unsigned blocks_of(size_t threads) {
    return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

// ---------------------------------------------------------------------------------------------------------------------
// The oracle

// Every thread gets the result; NaN wins a maximum.
struct Sum {
    static __device__ double of(double a, double b) { return a + b; }
};
struct Max {
    static __device__ double of(double a, double b) { return a > b || isnan(a) ? a : b; }
};
template <class Op>
__device__ double block_reduce(double x) {
    __shared__ double smem[kThreads];
    __syncthreads();  // an earlier call's reads are done
    smem[threadIdx.x] = x;
    for (int half = kThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) smem[threadIdx.x] = Op::of(smem[threadIdx.x], smem[threadIdx.x + half]);
    }
    __syncthreads();
    return smem[0];
}

// A block owns a row of p (rows, keys): the query q0 + row. S becomes P, zeros where the query does not see.
__global__ void softmax64_kernel(double* p, double* lse, int q0, int keys, bool causal) {
    double* s = p + size_t(blockIdx.x) * keys;
    const int query = q0 + blockIdx.x, seen = causal ? query + 1 : keys;
    double m = -INFINITY, l = 0;
    for (int j = threadIdx.x; j < seen; j += kThreads) m = Max::of(m, s[j]);
    m = block_reduce<Max>(m);
    for (int j = threadIdx.x; j < seen; j += kThreads) l += exp(s[j] - m);
    l = block_reduce<Sum>(l);
    for (int j = threadIdx.x; j < keys; j += kThreads) s[j] = j < seen ? exp(s[j] - m) / l : 0;
    if (threadIdx.x == 0) lse[query] = m + log(l);
}

// dP becomes dS = P∘(dP − D), D = rowsum(P∘dP).
__global__ void softmax64_backward_kernel(double* dp, const double* p, int keys) {
    const size_t row = size_t(blockIdx.x) * keys;
    double D = 0;
    for (int j = threadIdx.x; j < keys; j += kThreads) D += p[row + j] * dp[row + j];
    D = block_reduce<Sum>(D);
    for (int j = threadIdx.x; j < keys; j += kThreads) dp[row + j] = p[row + j] * (dp[row + j] - D);
}

// Row-major c (m × n) = alpha·a b + beta·c, where a is (m × k), or (k × m) and transposed; b likewise. cuBLAS counts by
// columns: it is asked for cᵀ = bᵀ aᵀ.
static void multiply(const Cuda& dev, double* c, double alpha, const double* a, bool transpose_a, const double* b,
                     bool transpose_b, int m, int n, int k, double beta) {
    CUBLAS_CHECK(cublasDgemm(dev.blas, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                             n, m, k, &alpha, b, transpose_b ? k : n, a, transpose_a ? m : k, &beta, c, n));
}

// One head in fp64: q, k, v, dout, out, dq, dk, dv (T, HS), lse (T).
class Oracle {
  public:
    double *q, *k, *v, *dout, *results[kTensors];

    // block: query rows that are in work at a time.
    Oracle(const Cuda& dev, int T, int HS, int block = 1024) : dev_(dev), T_(T), HS_(HS), block_(std::min(block, T)) {
        const size_t n = size_t(T) * HS, square = size_t(block_) * T;
        memory_ = poisoned(dev, (8 * n + T + 2 * square) * sizeof(double));
        double* next = static_cast<double*>(memory_.get());
        const auto take = [&](size_t size) { return std::exchange(next, next + size); };
        for (double** x : {&q, &k, &v, &dout}) *x = take(n);
        for (int i = 0; i < kTensors; i++) results[i] = take(i == Lse ? T : n);
        p_ = take(square);
        dp_ = take(square);
    }

    // Reads q, k, v, dout; writes results.
    void run(bool causal, double scale) {
        for (int i : {Dk, Dv}) dev_.zero(results[i], size_t(T_) * HS_ * sizeof(double));
        for (int q0 = 0; q0 < T_; q0 += block_) {
            const int rows = std::min(block_, T_ - q0), keys = causal ? q0 + rows : T_;
            const size_t at = size_t(q0) * HS_;
            multiply(dev_, p_, scale, q + at, false, k, true, rows, keys, HS_, 0);
            softmax64_kernel<<<rows, kThreads, 0, dev_.stream>>>(p_, results[Lse], q0, keys, causal);
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

// to (T, n) fp64 = from, whose rows of n lie `stride` elements apart.
template <class X>
__global__ void gather_kernel(double* to, const X* from, size_t stride, int T, int n) {
    const size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < size_t(T) * n) to[i] = to_float(from[i / n * stride + i % n]);
}

// One head of a packed qkv (B, T, 3, NH, HS) and dout (B, T, NH, HS) into the oracle.
template <class X>
void gather(const Cuda& dev, Oracle& oracle, const X* qkv, const X* dout, const AttentionShape& s, int b, int h) {
    const size_t C = size_t(s.NH) * s.HS, token = size_t(b) * s.T;
    double* const parts[] = {oracle.q, oracle.k, oracle.v};
    const unsigned blocks = blocks_of(size_t(s.T) * s.HS);
    for (int part = 0; part < 3; part++)
        gather_kernel<<<blocks, kThreads, 0, dev.stream>>>(parts[part], qkv + (token * 3 + part) * C + h * s.HS, 3 * C,
                                                           s.T, s.HS);
    gather_kernel<<<blocks, kThreads, 0, dev.stream>>>(oracle.dout, dout + token * C + h * s.HS, C, s.T, s.HS);
    LAUNCH_CHECK("gather_kernel");
}

// The oracle's own test: the same as dev/reference in double, with a last block that is not whole.
static void check_oracle(const Cuda& dev, int HS) {
    const AttentionShape s{1, 255, 1, HS};
    const int T = s.T;
    const size_t n = size_t(T) * HS;
    const DeviceMemory memory = device_memory(dev, 4 * n * sizeof(float));
    float* qkv = static_cast<float*>(memory.get());
    fill_normal(dev, qkv, 4 * n, 1);
    std::vector<float> inputs(4 * n);
    dev.download(inputs.data(), qkv, 4 * n * sizeof(float));
    const std::vector<double> host_qkv(inputs.begin(), inputs.begin() + 3 * n),
        host_dout(inputs.begin() + 3 * n, inputs.end());
    for (bool causal : {true, false}) {
        std::vector<double> want[kTensors], dqkv(3 * n);
        want[Out].resize(n);
        want[Lse].resize(T);
        const Cpu cpu;
        const double scale = 1 / std::sqrt(static_cast<double>(HS));
        attention_forward<double>(cpu, want[Out].data(), want[Lse].data(), host_qkv.data(), 1, T, 1, HS, causal, scale);
        attention_backward<double>(cpu, dqkv.data(), host_dout.data(), want[Out].data(), want[Lse].data(),
                                   host_qkv.data(), 1, T, 1, HS, causal, scale);
        for (size_t i = 0; i < 3 * n; i++) want[Dq + i / HS % 3].push_back(dqkv[i]);

        Oracle oracle(dev, T, HS, 100);
        gather(dev, oracle, qkv, qkv + 3 * n, s, 0, 0);
        oracle.run(causal, scale);
        for (int i = 0; i < kTensors; i++) {
            std::vector<double> got(want[i].size());
            dev.download(got.data(), oracle.results[i], got.size() * sizeof(double));
            for (size_t j = 0; j < got.size(); j++)
                if (!(std::fabs(got[j] - want[i][j]) <= 1e-12 * std::max(1., std::fabs(want[i][j]))))
                    throw Error(format("the oracle is wrong: T %d, HS %d, %s, %s[%zu] = %.17g, dev/reference has %.17g",
                                       T, HS, causal ? "causal" : "not causal", kNames[i], j, got[j], want[i][j]));
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Errors

// Of one tensor, over all heads.
struct Sums {
    double largest_error, error, error2, largest, value2;  // max|e|, Σ|e|, Σe², max|ref|, Σref²
};

// A non-negative double's bits order as it does, and those of NaN are above infinity's.
__device__ void atomic_max(double* to, double x) {
    atomicMax(reinterpret_cast<unsigned long long*>(to),
              static_cast<unsigned long long>(__double_as_longlong(fabs(x))));
}

// Adds to sums over (T, n) elements; NaN stays NaN.
template <class X>
__global__ void error_kernel(Sums* sums, const X* got, size_t stride, const double* want, int T, int n) {
    double largest_error = 0, error = 0, error2 = 0, largest = 0, value2 = 0;
    for (size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x; i < size_t(T) * n; i += size_t(gridDim.x) * kThreads) {
        const double value = want[i], e = fabs(to_float(got[i / n * stride + i % n]) - value);
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
    if (threadIdx.x > 0) return;
    atomic_max(&sums->largest_error, largest_error);
    atomicAdd(&sums->error, error);
    atomicAdd(&sums->error2, error2);
    atomic_max(&sums->largest, largest);
    atomicAdd(&sums->value2, value2);
}

// What a kernel wrote, and its errors.
template <class X>
struct Result {
    std::string name;
    const AttentionKernel<X>* kernel;
    DeviceMemory out_memory, lse_memory, dqkv_memory, sums_memory;
    X *out, *dqkv;
    float* lse;
    Sums* device_sums;
    std::array<Sums, kTensors> sums;
    double elements[kTensors];

    Result(const Cuda& dev, const std::string& name, const AttentionKernel<X>& kernel, const X* qkv, const X* dout,
           const AttentionShape& s)
        : name(name), kernel(&kernel) {
        const size_t rows = size_t(s.B) * s.T * s.NH, n = rows * s.HS;
        for (int i = 0; i < kTensors; i++) elements[i] = static_cast<double>(i == Lse ? rows : n);
        out_memory = poisoned(dev, n * sizeof(X));
        lse_memory = poisoned(dev, rows * sizeof(float));
        dqkv_memory = poisoned(dev, 3 * n * sizeof(X));
        sums_memory = device_memory(dev, kTensors * sizeof(Sums));
        out = static_cast<X*>(out_memory.get());
        lse = static_cast<float*>(lse_memory.get());
        dqkv = static_cast<X*>(dqkv_memory.get());
        device_sums = static_cast<Sums*>(sums_memory.get());
        dev.zero(device_sums, kTensors * sizeof(Sums));
        const DeviceMemory att = poisoned(dev, kernel.saved_bytes(s));
        for (int pass = 0; pass < 2; pass++) {
            const DeviceMemory scratch = poisoned(dev, kernel.scratch_bytes(s));
            if (pass == 0)
                kernel.forward(dev, out, lse, static_cast<X*>(att.get()), scratch.get(), qkv, s);
            else
                kernel.backward(dev, dqkv, scratch.get(), dout, out, lse, static_cast<X*>(att.get()), qkv, s);
            dev.sync();
        }
    }

    // Adds one head's errors.
    void compare(const Cuda& dev, const Oracle& oracle, const AttentionShape& s, int b, int h) {
        const size_t C = size_t(s.NH) * s.HS, token = size_t(b) * s.T;
        const unsigned blocks = std::min(blocks_of(size_t(s.T) * s.HS), 4u * dev.num_sms);
        error_kernel<<<blocks, kThreads, 0, dev.stream>>>(device_sums + Out, out + token * C + h * s.HS, C,
                                                          oracle.results[Out], s.T, s.HS);
        error_kernel<<<blocks, kThreads, 0, dev.stream>>>(device_sums + Lse, lse + (size_t(b) * s.NH + h) * s.T, 1,
                                                          oracle.results[Lse], s.T, 1);
        for (int part = 0; part < 3; part++)
            error_kernel<<<blocks, kThreads, 0, dev.stream>>>(device_sums + Dq + part,
                                                              dqkv + (token * 3 + part) * C + h * s.HS, 3 * C,
                                                              oracle.results[Dq + part], s.T, s.HS);
        LAUNCH_CHECK("error_kernel");
    }
    void fetch(const Cuda& dev) { dev.download(sums.data(), device_sums, kTensors * sizeof(Sums)); }

    double max_error(int i) const { return sums[i].largest_error; }
    double mean_error(int i) const { return sums[i].error / elements[i]; }
    double l2_error(int i) const { return std::sqrt(sums[i].error2 / sums[i].value2); }
    double snr_db(int i) const { return -20 * std::log10(l2_error(i)); }
};

// ---------------------------------------------------------------------------------------------------------------------
// One shape and input

struct Input {
    const char *name, *text;
    float q_factor, shift;
};
static const Input kInputs[] = {
    {"normal", "N(0,1)", 1.f, 0.f}, {"large_q", "q x5", 5.f, 0.f}, {"shifted", "mean +0.5", 1.f, 0.5f}};

// x (…, parts, C): (x + shift), and part 0 of several times factor.
template <class X>
__global__ void shape_inputs_kernel(X* x, size_t n, int C, int parts, float factor, float shift) {
    const size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n) x[i] = static_cast<X>((to_float(x[i]) + shift) * (parts > 1 && i / C % parts == 0 ? factor : 1.f));
}

// The largest ratios of a kernel, over all shapes and inputs.
struct Worst {
    std::array<double, kTensors> max{}, l2{};
};
static void raise(double& worst, double x) {
    if (!(x <= worst)) worst = x;
}

struct Study {
    Cuda& dev;
    const Options& options;
    Log& log;
    int beyond = 0;  // figures beyond their bounds
    std::map<std::string, Worst> worst = {};
};

template <class X>
void report(Study& study, const Result<X>& r, const Result<X>& naive, const AttentionShape& s, const Input& input,
            int i) {
    const bool bound = r.kernel->flash, bf16_lse = i == Lse && std::is_same_v<X, bf16>;
    const ErrorBound k = error_bound(*r.kernel, i);
    const double ratio_max = r.max_error(i) / naive.max_error(i), ratio_l2 = r.l2_error(i) / naive.l2_error(i);
    const double largest = r.sums[i].largest;
    const double most = bf16_lse ? bf16_lse_bound(largest) : k.max * naive.max_error(i) + one_rounding<X>(i, largest);
    const bool ok = bf16_lse ? r.max_error(i) <= most
                             : r.max_error(i) <= most && (s.T <= 2 || r.l2_error(i) <= k.l2 * naive.l2_error(i));
    if (bound && !ok) study.beyond++;
    if (bound) {
        Worst& worst = study.worst[format("%-14s %s", r.name.c_str(), name_of(dtype_of<X>()))];
        raise(worst.max[i], ratio_max);
        raise(worst.l2[i], ratio_l2);
    }
    std::printf("  %-4s %-14s %9.2e %9.2e %9.2e %7.1f | %6.2f %6.2f %s\n", kNames[i], r.name.c_str(), r.max_error(i),
                r.mean_error(i), r.l2_error(i), r.snr_db(i), ratio_max, ratio_l2,
                !bound     ? ""
                : !ok      ? "BEYOND its bound"
                : bf16_lse ? "absolute"
                           : format("%g %g", k.max, k.l2).c_str());
    Row row = result_row(study.dev, "accuracy");
    row.add("kernel", r.name).add("dtype", name_of(dtype_of<X>())).add("B", s.B).add("T", s.T).add("NH", s.NH);
    row.add("HS", s.HS).add("causal", s.causal).add("input", input.name).add("tensor", kNames[i]);
    row.add("max_error", r.max_error(i)).add("mean_error", r.mean_error(i)).add("relative_l2", r.l2_error(i));
    row.add("snr_db", r.snr_db(i)).add("ratio_max", ratio_max).add("ratio_l2", ratio_l2);
    row.add("within_bounds", !bound || ok);
    study.log.write(row);
}

template <class X>
void compare_kernels(Study& study, const AttentionShape& s, const Input& input,
                     const std::vector<const AttentionKernel<X>*>& kernels) {
    Cuda& dev = study.dev;
    const size_t n = size_t(s.B) * s.T * s.NH * s.HS;
    const AttentionKernel<X>& naive = *kernels[0];
    std::printf("%s B%d T%d NH%d HS%d %s, %s\n", name_of(dtype_of<X>()), s.B, s.T, s.NH, s.HS,
                s.causal ? "causal" : "not causal", input.text);
    const size_t bytes = naive.saved_bytes(s) + naive.scratch_bytes(s) + 40 * n * sizeof(X);
    if (bytes + (size_t{1} << 30) > dev.free_bytes()) {
        std::printf("  skipped: naive needs %.1f GiB, free are %.1f\n", bytes / 0x1p30, dev.free_bytes() / 0x1p30);
        return;
    }
    const DeviceMemory memory = device_memory(dev, 4 * n * sizeof(X));
    X *qkv = static_cast<X*>(memory.get()), *dout = qkv + 3 * n;
    fill_normal(dev, qkv, 4 * n, s.T);
    const int C = s.NH * s.HS;
    shape_inputs_kernel<<<blocks_of(3 * n), kThreads, 0, dev.stream>>>(qkv, 3 * n, C, 3, input.q_factor, input.shift);
    shape_inputs_kernel<<<blocks_of(n), kThreads, 0, dev.stream>>>(dout, n, C, 1, 1.f, input.shift);
    LAUNCH_CHECK("shape_inputs_kernel");

    std::list<Result<X>> results;
    for (const AttentionKernel<X>* kernel : kernels) {
        results.emplace_back(dev, kernel->name, *kernel, qkv, dout, s);
        if (kernel == &naive && std::is_same_v<X, float>) {
            dev.tf32 = true;
            results.emplace_back(dev, "naive_tf32", *kernel, qkv, dout, s);
            dev.tf32 = false;
        }
    }
    Oracle oracle(dev, s.T, s.HS);
    for (int b = 0; b < s.B; b++)
        for (int h = 0; h < s.NH; h++) {
            gather(dev, oracle, qkv, dout, s, b, h);
            oracle.run(s.causal, s.resolved_scale());
            for (Result<X>& r : results) r.compare(dev, oracle, s, b, h);
        }
    for (Result<X>& r : results) r.fetch(dev);
    for (int i = 0; i < kTensors; i++)
        for (const Result<X>& r : results) report(study, r, results.front(), s, input, i);
    std::fflush(stdout);
}

// ---------------------------------------------------------------------------------------------------------------------
// Masked rows

// Queries [0, T) against keys from k_offset on: the first k_offset rows see nothing and must stay as they were, the
// others must be finite. Twice, as the second call merges empty with empty.
template <class X>
void check_masked(Study& study, const AttentionKernel<X>& kernel, int HS, int T, int k_offset) {
    const Cuda& dev = study.dev;
    const BlockShape s{1, T, T, 2, HS, 0, k_offset};
    const size_t C = size_t(s.NH) * HS, n = T * C, rows = size_t(s.NH) * T;
    const DeviceMemory inputs = device_memory(dev, 4 * n * sizeof(X)), state = device_memory(dev, n * sizeof(float));
    const DeviceMemory lse = device_memory(dev, rows * sizeof(float)), D = device_memory(dev, rows * sizeof(float));
    const DeviceMemory gradients = device_memory(dev, 3 * n * sizeof(float));
    const DeviceMemory scratch = poisoned(dev, kernel.block_scratch_bytes(s));
    X* qkv = static_cast<X*>(inputs.get());
    float *o = static_cast<float*>(state.get()), *lse_ptr = static_cast<float*>(lse.get());
    float* dqkv = static_cast<float*>(gradients.get());
    fill_normal(dev, qkv, 4 * n, 1);
    fill_normal(dev, static_cast<float*>(D.get()), rows, 2);
    dev.zero(dqkv, 3 * n * sizeof(float));
    attention_clear_state(dev, o, lse_ptr, s);
    const auto part = [&](int i) { return Heads<const X>{qkv + i * C, 3 * n, 3 * C}; };
    for (int twice = 0; twice < 2; twice++) kernel.forward_block(dev, o, lse_ptr, part(0), part(1), part(2), s);
    kernel.backward_block(dev, dqkv, dqkv + n, dqkv + 2 * n, scratch.get(), part(0), part(1), part(2),
                          {qkv + 3 * n, n, C}, lse_ptr, static_cast<const float*>(D.get()), s);

    std::vector<float> host_o(n), host_lse(rows), host_dqkv(3 * n);
    dev.download(host_o.data(), o, n * sizeof(float));
    dev.download(host_lse.data(), lse_ptr, rows * sizeof(float));
    dev.download(host_dqkv.data(), dqkv, 3 * n * sizeof(float));
    size_t wrong = 0;
    for (size_t i = 0; i < rows; i++)
        wrong += !(static_cast<int>(i % T) < k_offset ? host_lse[i] == -INFINITY : std::isfinite(host_lse[i]));
    for (size_t i = 0; i < n; i++) {
        const bool empty = static_cast<int>(i / C) < k_offset;
        for (float x : {host_o[i], host_dqkv[i]}) wrong += !(empty ? x == 0.f : std::isfinite(x));
    }
    for (size_t i = n; i < 3 * n; i++) wrong += !std::isfinite(host_dqkv[i]);
    std::printf("%-14s %s %3d queries, %3d of them before every key: %s\n", kernel.name, name_of(dtype_of<X>()), T,
                std::min(T, k_offset), wrong ? format("%zu elements WRONG", wrong).c_str() : "ok");
    study.beyond += wrong > 0;
}

// ---------------------------------------------------------------------------------------------------------------------

template <class X>
void study_all(Study& study) {
    const Options& o = study.options;
    if (o.dtype != "all" && o.dtype != name_of(dtype_of<X>())) return;
    const AttentionKernels<X> all = attention_kernels<X>();
    std::vector<const AttentionKernel<X>*> kernels;  // naive, which the table has first, then what was asked for
    for (const AttentionKernel<X>* k = all.begin; k != all.begin + all.count; k++)
        if (k->runs_on(study.dev.sm) && (!k->flash || o.kernel == "all" || o.kernel == k->name)) kernels.push_back(k);
    if (kernels.empty() || (kernels.size() == 1 && o.kernel != "all" && o.kernel != "naive")) return;

    const int HS = std::atoi(o.hs.c_str());
    const std::string shapes = !o.shapes.empty() ? o.shapes : o.quick ? kQuickShapes : kShapes;
    for (const auto& [B, T] : parse_shapes(shapes))
        for (const Input& input : kInputs)
            if (o.inputs == "all" || o.inputs == input.name)
                compare_kernels<X>(study, {B, T, o.heads, HS, !o.no_causal}, input, kernels);
    if (o.shapes.empty()) compare_kernels<X>(study, {2, 256, 2, HS, false}, kInputs[0], kernels);
    for (const AttentionKernel<X>* k : kernels)
        if (k->forward_block)
            for (int k_offset : {255, 1000, 128, 1}) check_masked(study, *k, HS, 255, k_offset);
}

static int run(const Options& options) {
    std::string why;
    if (Cuda::count(&why) == 0) throw Error("accuracy needs a GPU: " + why);
    Cuda dev;
    dev.tf32 = false;
    check_oracle(dev, std::atoi(options.hs.c_str()));
    Log log = results_log(dev, "accuracy", options.out, options.json);
    std::printf("%s: errors against fp64, and multiples of naive's\n", dev.name.c_str());
    std::printf("  %-4s %-14s %9s %9s %9s %7s | %6s %6s bounds\n", "", "kernel", "max", "mean", "rel. L2", "SNR dB",
                "x max", "x L2");
    Study study{dev, options, log};
    study_all<float>(study);
    study_all<bf16>(study);
    std::printf("\nLargest multiples of naive's error, max / L2\n%-19s", "");
    for (const char* name : kNames) std::printf("  %-11s", name);
    for (const auto& [kernel, worst] : study.worst) {
        std::printf("\n%s", kernel.c_str());
        for (int i = 0; i < kTensors; i++) std::printf("  %4.2f / %4.2f", worst.max[i], worst.l2[i]);
    }
    std::printf("\n");
    if (study.beyond) std::fprintf(stderr, "accuracy: %d figures beyond their bounds\n", study.beyond);
    return study.beyond ? 1 : 0;
}

int main(int argc, char** argv) {
    return run_program("accuracy", [&] {
        const Options options = parse(argc, argv);
        return options.help ? 0 : run(options);
    });
}
