// Classifier: softmax cross-entropy over the vocabulary, fused with its gradient.
//
//   m = max x,   l = Σ e^{x−m},   loss = m + log l − x[target],   dx[v] = dloss·(e^{x[v]−m}/l − [v = target])
//
// Pass 1 reads a row once and computes m and l together, online as in flash attention. When a thread meets a larger x
// it rescales its sum. Pass 2 reads the row again and overwrites it with the gradient. Both kernels are bound by
// memory, one read and one write of the logits.
//
// classifier_kernel has one block per row. Pass 2 mostly finds the row in the caches, because 50304 logits are 100 or
// 200 KB.
//
// classifier_rows_kernel is for bf16 on sm_90. It has one block per SM, with two rows in shared memory. While its
// threads work on one row, the other leaves and the next arrives. A separate thread, the mover, starts each of these as
// one bulk copy. So a row crosses memory once each way, beside the arithmetic of the other row.
//
// Writes: losses, and logits if dloss != 0, with zeros in the padding [V, Vp).  Limits: any 1 ≤ V ≤ Vp.
#include <algorithm>
#include <cfloat>

#include "layers/gpu/ptx_sm90.cuh"
#include "layers/gpu/vector.cuh"
#include "layers/layers.h"

namespace {

constexpr float kLn2 = 0.6931471805599453f;

// m and l of the columns that one of `threads` threads sees. m and the exponents are in units of log 2, so that an
// exponential is one fma and one ex2. m is rounded, and the error cancels, because every exponent and the loss use the
// same rounded number. m starts finite, because −∞ − −∞ would be NaN.
struct Softmax {
    float m = -FLT_MAX, l = 0.f;
    __device__ float loss(float x_target) const { return kLn2 * (log2f(l) - fmaf(x_target, kLog2e, -m)); }
};
template <int V, class X>
__device__ __forceinline__ Softmax softmax_of_columns(const X* x, int vocab, int threads) {
    Softmax s;
    const int whole = vocab / V * V;
    for (int c = threadIdx.x * V; c < whole; c += threads * V) {
        const auto v = load<V>(x + c);
        float largest = v[0];
        for (int i = 1; i < V; i++) largest = fmaxf(largest, v[i]);
        largest *= kLog2e;
        if (largest > s.m) {
            s.l *= exp2_approx(s.m - largest);
            s.m = largest;
        }
        for (int i = 0; i < V; i++) s.l += exp2_approx(fmaf(v[i], kLog2e, -s.m));
    }
    if (whole + threadIdx.x < vocab) {  // the last V − 1 columns at most
        const float last = to_float(x[whole + threadIdx.x]);
        const float largest = fmaxf(s.m, last * kLog2e);
        s.l = s.l * exp2_approx(s.m - largest) + exp2_approx(fmaf(last, kLog2e, -largest));
        s.m = largest;
    }
    return s;
}

// dx of columns c … c + V − 1. scale is dloss/l.
template <int V, class X>
__device__ __forceinline__ Vec<float, V> gradient(const Vec<X, V>& x, int c, float m, float scale, float dloss,
                                                  int target, int vocab) {
    Vec<float, V> dx;
    if (c + V <= vocab && (target < c || target >= c + V)) {
        for (int i = 0; i < V; i++) dx.x[i] = exp2_approx(fmaf(x[i], kLog2e, -m)) * scale;
    } else {
        for (int i = 0; i < V; i++) {
            const float p = exp2_approx(fmaf(x[i], kLog2e, -m)) * scale;
            dx.x[i] = c + i >= vocab ? 0.f : c + i == target ? p - dloss : p;
        }
    }
    return dx;
}

// ---------------------------------------------------------------------------------------------------------------------

constexpr int kThreads = 1024;  // a row of 50304 is up to 7 (bf16) or 13 (fp32) vectors a thread

template <class X, int V>
__global__ void __launch_bounds__(kThreads)
    classifier_kernel(X* logits, float* __restrict__ losses, const int* __restrict__ targets, float dloss, int vocab,
                      int padded) {
    const size_t row = blockIdx.x;
    X* x = logits + row * padded;
    const int target = targets[row];
    const bool valid = target >= 0 && target < vocab;
    const float x_target = valid ? to_float(x[target]) : NAN;  // before anyone overwrites it

    Softmax s = softmax_of_columns<V>(x, vocab, kThreads);
    const float m = block_max(s.m);
    s = {m, block_sum(s.l * exp2_approx(s.m - m))};
    if (threadIdx.x == 0) losses[row] = s.loss(x_target);
    if (dloss == 0.f) return;

    // Pass 2 starts at the end, because what was read last is the likeliest to be in the caches still. Streaming stores
    // keep the gradient from pushing out what other blocks have yet to read again.
    const float scale = valid ? dloss / s.l : NAN;
    const int vectors = padded / V;
    for (int j = (vectors - 1) / kThreads * kThreads + threadIdx.x; j >= 0; j -= kThreads) {
        if (j >= vectors) continue;
        const int c = j * V;
        store_streaming(x + c, gradient<V>(load<V>(x + c), c, s.m, scale, dloss, target, vocab));
    }
}

// ---------------------------------------------------------------------------------------------------------------------

constexpr int kRowThreads = 512;
constexpr size_t kRowsSmem = 220 << 10;  // of 227 KB

__global__ void __launch_bounds__(kRowThreads + kWarp, 1)
    classifier_rows_kernel(bf16* logits, float* __restrict__ losses, const int* __restrict__ targets, float dloss,
                           size_t N, int vocab, int padded) {
#if __CUDA_ARCH__ >= 900
    constexpr int V = kVec<bf16>, kRowWarps = kRowThreads / kWarp;
    extern __shared__ uint4 rows_smem[];  // [2][padded] of bf16
    __shared__ uint64_t full_smem[2];     // the threads wait for the mover, until the row is there
    __shared__ uint64_t done_smem[2];     // the mover waits for the threads, until the row is its gradient
    __shared__ Softmax warps_smem[2][kRowWarps];
    const uint32_t bytes = padded * sizeof(bf16), rows = smem_address(rows_smem);
    const uint32_t full = smem_address(full_smem), done = smem_address(done_smem);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) mbarrier_init(full + 8 * i, 1), mbarrier_init(done + 8 * i, kRowThreads);
        fence_mbarrier_init();
    }
    __syncthreads();

    if (threadIdx.x >= kRowThreads) {
        if (threadIdx.x > kRowThreads) return;
        const size_t two_rows = 2 * size_t{gridDim.x};
        for (size_t row = blockIdx.x, n = 0; n < 2 || row - two_rows < N; row += gridDim.x, n++) {
            const uint32_t i = n % 2;
            if (n >= 2) {
                mbarrier_wait(done + 8 * i, n / 2 - 1 & 1);
                if (dloss != 0.f) {
                    bulk_store(logits + (row - two_rows) * padded, rows + i * bytes, bytes);
                    bulk_commit();
                    bulk_wait_read<0>();
                }
            }
            if (row >= N) continue;
            mbarrier_arrive_expect(full + 8 * i, bytes);
            bulk_load(rows + i * bytes, logits + row * padded, bytes, full + 8 * i);
        }
        return;
    }

    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    int next_target = blockIdx.x < N ? targets[blockIdx.x] : 0;
    for (size_t row = blockIdx.x, n = 0; row < N; row += gridDim.x, n++) {
        const int i = n % 2, target = next_target;
        if (row + gridDim.x < N) next_target = targets[row + gridDim.x];
        bf16* x = reinterpret_cast<bf16*>(rows_smem) + i * padded;
        mbarrier_wait(full + 8 * i, n / 2 & 1);
        const bool valid = target >= 0 && target < vocab;
        const float x_target = valid ? to_float(x[target]) : NAN;

        Softmax s = softmax_of_columns<V>(x, vocab, kRowThreads);
        const float warp_m = warp_max(s.m), warp_l = warp_sum(s.l * exp2_approx(s.m - warp_m));
        if (lane == 0) warps_smem[i][warp] = {warp_m, warp_l};
        named_barrier_sync(1, kRowThreads);
        const Softmax other = lane < kRowWarps ? warps_smem[i][lane] : Softmax{};
        s.m = warp_max(other.m);
        s.l = warp_sum(other.l * exp2_approx(other.m - s.m));
        if (threadIdx.x == 0) losses[row] = s.loss(x_target);

        if (dloss != 0.f) {
            const float scale = valid ? dloss / s.l : NAN;
            for (int c = threadIdx.x * V; c < padded; c += kRowThreads * V)
                store(x + c, gradient<V>(load<V>(x + c), c, s.m, scale, dloss, target, vocab));
            fence_proxy_async();
        }
        mbarrier_arrive(done + 8 * i);
    }
#endif
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------

template <class X>
void classifier(const Cuda& dev, X* logits, float* losses, const int* targets, float dloss, size_t N, int V, int Vp) {
    if (V < 1 || V > Vp) throw Error(format("classifier: V = %d, expected 1..Vp = %d", V, Vp));
    if (N == 0) return;
    const bool vector = vectorises<X>(Vp, logits);
    if constexpr (std::is_same_v<X, bf16>) {
        const size_t smem = 2 * size_t(Vp) * sizeof(bf16);
        if (dev.sm90a && vector && smem <= kRowsSmem) {
            CUDA_CHECK(cudaFuncSetAttribute(classifier_rows_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(kRowsSmem)));
            const int blocks = static_cast<int>(std::min<size_t>(dev.num_sms, N));
            classifier_rows_kernel<<<blocks, kRowThreads + kWarp, smem, dev.stream>>>(logits, losses, targets, dloss, N,
                                                                                      V, Vp);
            LAUNCH_CHECK("classifier_rows_kernel");
            return;
        }
    }
    const auto kernel = vector ? classifier_kernel<X, kVec<X>> : classifier_kernel<X, 1>;
    kernel<<<ceil_div(N, 1), kThreads, 0, dev.stream>>>(logits, losses, targets, dloss, V, Vp);
    LAUNCH_CHECK("classifier_kernel");
}

template void classifier(const Cuda&, float*, float*, const int*, float, size_t, int, int);
template void classifier(const Cuda&, bf16*, float*, const int*, float, size_t, int, int);
