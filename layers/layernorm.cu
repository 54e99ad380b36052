// Layer norm over the last dimension (Ba, Kiros & Hinton 2016).
//
//   mean = Σ x / C
//   rstd = 1/√(Σ (x − mean)² / C + eps)
//   n    = (x − mean)·rstd
//   out  = weight∘n + bias
//
//   g         = weight∘dout
//   dinp     += rstd·(g − mean(g) − n·mean(g∘n))
//   dweight  += Σ_rows dout∘n
//   dbias    += Σ_rows dout
//   dinp_sum += Σ_rows dinp
//
// Forward is bound by memory. It reads x and writes out. One warp owns a row and keeps it, so the
// variance needs no second trip to memory. Rows of GPT-2's sizes stay in registers, others in
// shared memory. There each lane reads back only what it wrote, so nobody waits at a barrier.
//
// Backward is bound by memory, too. It reads dout, inp and dinp, and writes dinp. The sums over
// rows want a thread that stays on its columns, and the sums over a row want all columns at once.
// So a warp (rows kernel) or a block (general kernel, 8 columns a thread) spans a whole row and
// walks over rows. The column sums stay in registers until the end. Each block then writes one
// partial row per sum, and add_partials adds these in a fixed order, for the same bits on every
// run.
//
// The warp of the rows kernel needs no barrier. But three sums of all of its columns leave
// registers for only 8 to 16 warps an SM, too few to hide the way to memory. So while a warp works
// on one row, the TMA unit of sm_90 fetches its next one into shared memory.
//
// What a layer norm reads is the residual stream, to which a projection's output was just added. So
// dinp is also the gradient of that output, and its sum over rows is the projection's bias
// gradient. It costs no extra trip to memory.
//
// Limits: C ≤ 8192, any N. Rows that are no multiple of 16 bytes, or not aligned to them, take one
// element a load.
#include <algorithm>

#include "cuda/partials.cuh"
#include "cuda/ptx_sm90.cuh"
#include "cuda/vector.cuh"
#include "layers/layers.h"

namespace {

constexpr int kMaxChannels = 8192;

// Forward and the rows kernel begin with the last row. The product before wrote the last ones last,
// so they are in L2.
__device__ size_t row_of_turn(size_t turn, size_t N) {
    return N - 1 - turn;
}

// per block, fewer when their rows would not fit in shared memory
constexpr int kForwardWarps = 8;
constexpr size_t kForwardSmem = 48 << 10;  // what a block gets without asking

// With kC = 0 rows of any C wait in shared memory, as stored. Else C = kC, and a lane keeps its
// part in registers.
template <class X, int V, int kC>
__global__ void __launch_bounds__(kForwardWarps* kWarp)
    layernorm_forward_kernel(X* out, float* mean_out, float* rstd_out, const X* __restrict__ inp,
                             const X* __restrict__ weight, const X* __restrict__ bias, size_t N,
                             int any_C) {
    // The vectors that a lane loads at once, or the sum would wait for each of them.
    constexpr int kBatch = kC ? ceil_div(kC, kWarp * V) : 4;
    const int C = kC ? kC : any_C;
    extern __shared__ uint4 rows_smem[];  // (warps, C) of X
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const size_t turn = static_cast<size_t>(blockIdx.x) * (blockDim.x / kWarp) + warp;
    if (turn >= N)
        return;
    const size_t row = row_of_turn(turn, N);
    X* x_smem = reinterpret_cast<X*>(rows_smem) + static_cast<size_t>(warp) * C;
    inp += row * C;
    out += row * C;

    Vec<X, V> batch[kBatch];
    float sum = 0.f;
    for (int first = lane * V; first < C; first += kBatch * kWarp * V) {
        for (int k = 0; k < kBatch; k++) {
            const int c = first + k * kWarp * V;
            if (c < C)
                batch[k] = load<V>(inp + c);
        }
        for (int k = 0; k < kBatch; k++) {
            const int c = first + k * kWarp * V;
            if (c >= C)
                continue;
            for (int i = 0; i < V; i++)
                sum += batch[k][i];
            if (kC == 0)
                store(x_smem + c, batch[k]);
        }
    }
    const float mean = warp_sum(sum) / C;
    // Calls f(c, x) for each of the lane's vectors.
    const auto each = [&](auto f) {
        if constexpr (kC > 0) {
#pragma unroll
            for (int k = 0; k < kBatch; k++)
                if (const int c = (k * kWarp + lane) * V; c < C)
                    f(c, batch[k]);
        } else {
            for (int c = lane * V; c < C; c += kWarp * V)
                f(c, load<V>(x_smem + c));
        }
    };
    float squares = 0.f;
    each([&](int, const Vec<X, V>& x) {
        for (int i = 0; i < V; i++)
            squares += (x[i] - mean) * (x[i] - mean);
    });
    const float rstd = rsqrtf(warp_sum(squares) / C + kLayernormEps);
    each([&](int c, const Vec<X, V>& x) {
        const auto w = load<V>(weight + c);
        const auto beta = load<V>(bias + c);
        Vec<float, V> y;
        for (int i = 0; i < V; i++)
            y.x[i] = (x[i] - mean) * rstd * w[i] + beta[i];
        store(out + c, y);
    });
    if (lane == 0) {
        mean_out[row] = mean;
        rstd_out[row] = rstd;
    }
}

constexpr int kBackwardColumns = 8;         // of a thread
constexpr int kBackwardThreadsPerSM = 896;  // what 72 registers a thread allow
// of a block for rows up to 1024. Longer ones make do with 64 registers
constexpr int kFewThreads = 128;

// What backward sums over all rows. partials (gridDim, kSums, C) gets each block's sums in this
// order, which is also that of add_partials' outputs.
enum ColumnSum {
    kDweight,  // of dout∘n
    kDbias,    // of dout
    kDinpSum,  // of dinp
    kSums
};

// What backward sums over a row.
struct alignas(8) RowSums {
    float g;
    float gn;  // of g∘n
};

template <class X, int V, int MaxThreads>
__global__ void __launch_bounds__(MaxThreads, MaxThreads == kFewThreads
                                                  ? kBackwardThreadsPerSM / MaxThreads
                                                  : 1)
    layernorm_backward_kernel(X* dinp, float* partials, const X* __restrict__ dout,
                              const X* __restrict__ inp, const X* __restrict__ weight,
                              const float* __restrict__ mean, const float* __restrict__ rstd,
                              size_t N, int C) {
    // vectors a thread owns, columns (k·blockDim + thread)·V …
    constexpr int K = kBackwardColumns / V;
    // With two buffers one barrier a row is enough, because a warp that is a row ahead writes the
    // other one.
    __shared__ RowSums sums_smem[2][kWarp];
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int warps = blockDim.x / kWarp;
    const float inverse_C = 1.f / C;

    int column[K];
    Vec<X, V> w[K];
    Vec<float, V> dweight[K] = {};
    Vec<float, V> dbias[K] = {};
    Vec<float, V> dsum[K] = {};
    for (int k = 0; k < K; k++) {
        column[k] = (k * blockDim.x + threadIdx.x) * V;
        if (column[k] < C)
            w[k] = load<V>(weight + column[k]);
    }

    int buffer = 0;
    for (size_t row = blockIdx.x; row < N; row += gridDim.x) {
        const float m = mean[row];
        const float s = rstd[row];
        Vec<X, V> dy[K];
        Vec<X, V> x[K];
        Vec<X, V> old[K];
        for (int k = 0; k < K; k++) {
            if (column[k] >= C)
                continue;
            dy[k] = load<V>(dout + row * C + column[k]);
            x[k] = load<V>(inp + row * C + column[k]);
            old[k] = load<V>(dinp + row * C + column[k]);
        }

        float sum_g = 0.f;
        float sum_gn = 0.f;
        for (int k = 0; k < K; k++) {
            if (column[k] >= C)
                continue;
            for (int i = 0; i < V; i++) {
                const float n = (x[k][i] - m) * s;
                const float g = __fmul_rn(w[k][i], dy[k][i]);
                sum_g += g;
                sum_gn += g * n;
                dweight[k].x[i] += dy[k][i] * n;
                dbias[k].x[i] += dy[k][i];
            }
        }
        sum_g = warp_sum(sum_g);
        sum_gn = warp_sum(sum_gn);
        if (lane == 0)
            sums_smem[buffer][warp] = {.g = sum_g, .gn = sum_gn};
        __syncthreads();
        float mean_g = 0.f;
        float mean_gn = 0.f;
        for (int i = 0; i < warps; i++) {
            mean_g += sums_smem[buffer][i].g;
            mean_gn += sums_smem[buffer][i].gn;
        }
        mean_g *= inverse_C;
        mean_gn *= inverse_C;
        buffer ^= 1;

        // Computing n and g once more is cheaper than the registers to keep them. In short rows g
        // and mean(g) cancel, and rstd, up to 316, multiplies what is left. So g must be the same
        // rounded number here as in the sum, not part of an fma.
        for (int k = 0; k < K; k++) {
            if (column[k] >= C)
                continue;
            Vec<float, V> dx;
            for (int i = 0; i < V; i++) {
                const float n = (x[k][i] - m) * s;
                const float g = __fmul_rn(w[k][i], dy[k][i]);
                dx.x[i] = old[k][i] + s * (g - mean_g - n * mean_gn);
            }
            const Vec<X, V> stored = round_to<X>(dx);
            store(dinp + row * C + column[k], stored);
            for (int i = 0; i < V; i++)
                dsum[k].x[i] += stored[i];
        }
    }

    float* partial = partials + static_cast<size_t>(blockIdx.x) * kSums * C;
    for (int k = 0; k < K; k++) {
        if (column[k] >= C)
            continue;
        store(partial + kDweight * C + column[k], dweight[k]);
        store(partial + kDbias * C + column[k], dbias[k]);
        store(partial + kDinpSum * C + column[k], dsum[k]);
    }
}

// For sm_90, and rows of C bf16. A warp owns a row, K vectors a lane. partials is as above.
// A thread has 128, 168 or 255 registers, of which 24·K are sums.
template <int C>
constexpr int kRowWarps = C > 1024 ? 8 : (C > 768 ? 12 : 16);
constexpr int kRowStages = 2;
enum RowOfStage { kDout, kInp, kDinp, kRows };  // of C bf16 each

template <int C>
__global__ void __launch_bounds__(kRowWarps<C>* kWarp, 1)
    layernorm_backward_rows_kernel(bf16* dinp, float* partials, const bf16* dout, const bf16* inp,
                                   const bf16* weight, const float* __restrict__ mean,
                                   const float* __restrict__ rstd, size_t N) {
#if __CUDA_ARCH__ >= 900
    constexpr int V = 8;
    constexpr int K = ceil_div(C, kWarp * V);
    constexpr int W = kRowWarps<C>;
    // [W][kRowStages][kRows][C] of bf16, and in the end [W][kSums][C] of float
    extern __shared__ uint4 ring_smem[];
    // no registers for it, dout and inp, so each is read twice
    __shared__ alignas(16) bf16 weight_smem[C];
    __shared__ uint64_t full_smem[W][kRowStages];
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const size_t stride = size_t{gridDim.x} * W;
    bf16* const ring =
        reinterpret_cast<bf16*>(ring_smem) + static_cast<size_t>(warp) * kRowStages * kRows * C;
    const auto fetch = [&](size_t turn, int stage) {
        if (lane > 0 || turn >= N)
            return;
        const size_t row = row_of_turn(turn, N);
        const uint32_t full = smem_address(&full_smem[warp][stage]);
        const uint32_t to = smem_address(ring + stage * kRows * C);
        constexpr int kBytes = C * sizeof(bf16);
        mbarrier_arrive_expect(full, kRows * kBytes);
        bulk_load(to + kDout * kBytes, dout + row * C, kBytes, full);
        bulk_load(to + kInp * kBytes, inp + row * C, kBytes, full);
        bulk_load(to + kDinp * kBytes, dinp + row * C, kBytes, full);
    };

    size_t turn = static_cast<size_t>(blockIdx.x) * W + warp;
    if (lane == 0) {
        for (int stage = 0; stage < kRowStages; stage++)
            mbarrier_init(smem_address(&full_smem[warp][stage]), 1);
        fence_mbarrier_init();
    }
    for (int c = threadIdx.x; c < C; c += W * kWarp)
        weight_smem[c] = weight[c];
    __syncthreads();
    for (int stage = 0; stage < kRowStages; stage++)
        fetch(turn + stage * stride, stage);

    float dweight[K][V] = {};
    float dbias[K][V] = {};
    float dsum[K][V] = {};
    float m = 0.f;
    float s = 0.f;
    if (turn < N) {
        m = mean[row_of_turn(turn, N)];
        s = rstd[row_of_turn(turn, N)];
    }
    for (int stage = 0, phase = 0; turn < N; turn += stride) {
        const size_t row = row_of_turn(turn, N);
        float next_m = 0.f;
        float next_s = 0.f;
        if (turn + stride < N) {
            next_m = mean[row - stride];
            next_s = rstd[row - stride];
        }
        const bf16* const stage_smem = ring + stage * kRows * C + lane * V;
        mbarrier_wait(smem_address(&full_smem[warp][stage]), phase);

        float sum_g = 0.f;
        float sum_gn = 0.f;
        for (int k = 0; k < K; k++) {
            const int c = (k * kWarp + lane) * V;
            if (c >= C)
                continue;
            const auto dy = load<V>(stage_smem + kDout * C + k * kWarp * V);
            const auto w = load<V>(weight_smem + c);
            const auto x = load<V>(stage_smem + kInp * C + k * kWarp * V);
            for (int i = 0; i < V; i++) {
                const float n = (x[i] - m) * s;
                const float g = __fmul_rn(w[i], dy[i]);
                sum_g += g;
                sum_gn += g * n;
                dweight[k][i] += dy[i] * n;
                dbias[k][i] += dy[i];
            }
        }
        const float mean_g = warp_sum(sum_g) * (1.f / C);
        const float s_mean_gn = s * warp_sum(sum_gn) * (1.f / C);
        // stops the compiler from keeping what is read above, because there are no registers for it
        __syncwarp();
        for (int k = 0; k < K; k++) {
            const int c = (k * kWarp + lane) * V;
            if (c >= C)
                continue;
            const auto dy = load<V>(stage_smem + kDout * C + k * kWarp * V);
            const auto w = load<V>(weight_smem + c);
            const auto x = load<V>(stage_smem + kInp * C + k * kWarp * V);
            const auto old = load<V>(stage_smem + kDinp * C + k * kWarp * V);
            Vec<float, V> dx;
            for (int i = 0; i < V; i++) {
                const float g = __fmul_rn(w[i], dy[i]);
                dx.x[i] = old[i] + s * (g - mean_g - (x[i] - m) * s_mean_gn);
            }
            const Vec<bf16, V> stored = round_to<bf16>(dx);
            store(dinp + row * C + c, stored);
            for (int i = 0; i < V; i++)
                dsum[k][i] += stored[i];
        }
        __syncwarp();  // all lanes have read the stage
        fetch(turn + kRowStages * stride, stage);
        m = next_m;
        s = next_s;
        if (++stage == kRowStages) {
            stage = 0;
            phase ^= 1;
        }
    }

    // Adds the warps' sums in order.
    __syncthreads();
    float* const sums_smem = reinterpret_cast<float*>(ring_smem);
    float* const mine = sums_smem + static_cast<size_t>(warp) * kSums * C + lane * V;
    for (int k = 0; k < K; k++)
        for (int i = 0; i < V && (k * kWarp + lane) * V < C; i++) {
            mine[kDweight * C + k * kWarp * V + i] = dweight[k][i];
            mine[kDbias * C + k * kWarp * V + i] = dbias[k][i];
            mine[kDinpSum * C + k * kWarp * V + i] = dsum[k][i];
        }
    __syncthreads();
    for (int c = threadIdx.x; c < kSums * C; c += W * kWarp) {
        float sum = 0.f;
        for (int v = 0; v < W; v++)
            sum += sums_smem[static_cast<size_t>(v) * kSums * C + c];
        partials[static_cast<size_t>(blockIdx.x) * kSums * C + c] = sum;
    }
#endif
}

}  // namespace

// -------------------------------------------------------------------------------------------------

static void check_channels(int C) {
    if (C < 1 || C > kMaxChannels)
        throw Error(format("layernorm: C = %d, expected 1..%d", C, kMaxChannels));
}

// Calls f with C as a constant, if C is that of a GPT-2. Returns whether it is.
template <class F>
static bool at_size_of_gpt2(int C, F f) {
    const auto is = [&](auto size) { return C == size && (f(size), true); };
    return is(std::integral_constant<int, 768>()) || is(std::integral_constant<int, 1024>()) ||
           is(std::integral_constant<int, 1280>()) || is(std::integral_constant<int, 1600>());
}

template <class X>
void layernorm_forward(const Cuda& dev, X* out, float* mean, float* rstd, const X* inp,
                       const X* weight, const X* bias, size_t N, int C) {
    check_channels(C);
    if (N == 0)
        return;
    const size_t row_bytes = C * sizeof(X);
    const int warps = static_cast<int>(std::min<size_t>(kForwardWarps, kForwardSmem / row_bytes));
    auto kernel = layernorm_forward_kernel<X, 1, 0>;
    size_t smem = warps * row_bytes;
    if (vectorises<X>(C, out, inp, weight, bias)) {
        kernel = layernorm_forward_kernel<X, kVec<X>, 0>;
        at_size_of_gpt2(
            C, [&](auto size) { kernel = layernorm_forward_kernel<X, kVec<X>, size>, smem = 0; });
    }
    kernel<<<ceil_div(N, warps), warps * kWarp, smem, dev.stream>>>(out, mean, rstd, inp, weight,
                                                                    bias, N, C);
    LAUNCH_CHECK("layernorm_forward_kernel");
}

// As many blocks as are resident together. The number does not depend on N, so neither does the
// scratch.
static int backward_threads(int C) {
    return ceil_div(C, kBackwardColumns * kWarp) * kWarp;
}
static int backward_blocks(const Cuda& dev, int C) {
    return dev.num_sms * std::max(1, kBackwardThreadsPerSM / backward_threads(C));
}

size_t layernorm_scratch_bytes(const Cuda& dev, int C) {
    check_channels(C);
    return static_cast<size_t>(backward_blocks(dev, C)) * kSums * C * sizeof(float);
}

template <class X>
void layernorm_backward(const Cuda& dev, X* dinp, float* dweight, float* dbias, float* dinp_sum,
                        void* scratch, const X* dout, const X* inp, const X* weight,
                        const float* mean, const float* rstd, size_t N, int C) {
    check_channels(C);
    if (N == 0)
        return;
    float* partials = static_cast<float*>(scratch);
    if constexpr (std::is_same_v<X, bf16>) {
        const auto launch = [&](auto size) {
            constexpr int warps = kRowWarps<size>;
            constexpr int smem = warps * kRowStages * kRows * size * sizeof(bf16);
            const auto kernel = layernorm_backward_rows_kernel<size>;
            CUDA_CHECK(
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
            const int blocks = static_cast<int>(std::min<size_t>(dev.num_sms, (N - 1) / warps + 1));
            kernel<<<blocks, warps * kWarp, smem, dev.stream>>>(dinp, partials, dout, inp, weight,
                                                                mean, rstd, N);
            LAUNCH_CHECK("layernorm_backward_rows_kernel");
            add_partials(dev, {dweight, dbias, dinp_sum},
                         {.rows = partials, .count = blocks, .columns = C});
        };
        if (dev.sm90a && vectorises<X>(C, dinp, dout, inp, weight) && at_size_of_gpt2(C, launch))
            return;
    }
    const bool few = backward_threads(C) <= kFewThreads;
    constexpr int V = kVec<X>;
    constexpr int kMany = kMaxChannels / kBackwardColumns;
    auto kernel =
        few ? layernorm_backward_kernel<X, 1, kFewThreads> : layernorm_backward_kernel<X, 1, kMany>;
    if (vectorises<X>(C, dinp, dout, inp, weight, partials))
        kernel = few ? layernorm_backward_kernel<X, V, kFewThreads>
                     : layernorm_backward_kernel<X, V, kMany>;
    const int blocks = static_cast<int>(std::min<size_t>(backward_blocks(dev, C), N));
    kernel<<<blocks, backward_threads(C), 0, dev.stream>>>(dinp, partials, dout, inp, weight, mean,
                                                           rstd, N, C);
    LAUNCH_CHECK("layernorm_backward_kernel");
    add_partials(dev, {dweight, dbias, dinp_sum},
                 {.rows = partials, .count = blocks, .columns = C});
}

#define INSTANTIATE(X)                                                                             \
    template void layernorm_forward(const Cuda&, X*, float*, float*, const X*, const X*, const X*, \
                                    size_t, int);                                                  \
    template void layernorm_backward(const Cuda&, X*, float*, float*, float*, void*, const X*,     \
                                     const X*, const X*, const float*, const float*, size_t, int);
INSTANTIATE(float)
INSTANTIATE(bf16)
