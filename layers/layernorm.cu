// Layer norm over the last dimension (Ba, Kiros & Hinton 2016).
//
//   mean = Σ x / C
//   rstd = 1/√(Σ (x − mean)² / C + eps)
//   norm = (x − mean)·rstd
//   out  = weight∘norm + bias
//
//   dnorm     = weight∘dout
//   dinp     += rstd·(dnorm − mean(dnorm) − norm·mean(dnorm∘norm))
//   dweight  += Σ_rows dout∘norm
//   dbias    += Σ_rows dout
//   dinp_sum += Σ_rows dinp
//
// Forward is memory-bound: it reads x and writes out. One warp owns a row and keeps it, so that the
// variance needs no second read. Rows of GPT-2's sizes are kept in registers, others in shared
// memory, where each lane reads back only what it wrote itself, so that no barrier is needed.
//
// Backward is memory-bound, too: it reads dout, inp and dinp, and writes dinp. For the sums over
// rows, a thread should stay on its columns; for the sums over a row, all columns are needed at
// once. So a warp (rows kernel) or a block (general kernel, 8 columns per thread) spans a whole row
// and loops over rows, with the column sums in registers until the end. Then each block writes one
// row of partial sums per output, and add_partials adds those in a fixed order, so that every run
// gives the same bits.
//
// The warp of the rows kernel needs no barrier. But with three sums for each of its columns, there
// are registers for only 8 to 16 warps per SM, too few to hide memory latency. So while a warp
// works on one row, the TMA unit of sm_90 copies its next one to shared memory.
//
// The input of a layer norm is the residual stream, to which a projection's output was just added.
// So dinp is also the gradient of that output, and its sum over rows is the gradient of the
// projection's bias. Computing it here costs no extra pass over memory.
//
// Writes: out, mean, rstd.  Adds into: dinp, dweight, dbias, dinp_sum.
// Limits: C ≤ 8192, any N. If rows are not a multiple of 16 bytes, or not aligned to 16, elements
// are loaded one at a time.
#include <algorithm>

#include "cuda/partials.cuh"
#include "cuda/ptx_sm90.cuh"
#include "cuda/vector.cuh"
#include "layers/layers.h"

namespace {

constexpr int kMaxChannels = 8192;

// Forward and the rows kernel take rows in turns, the last row first: the matmul before has just
// written the last rows, so they are still in L2.
__device__ size_t row_of_turn(size_t turn, size_t N) {
    return N - 1 - turn;
}

// Warps per block; fewer if their rows would not fit in shared memory.
constexpr int kForwardWarps = 8;
constexpr size_t kForwardSmem = 48 << 10;  // bytes that a block can have without opting in to more

// If kC > 0, it is C, and each lane keeps its part of the row in registers. If kC = 0, C is any_C,
// and rows are kept in shared memory as X.
template <class X, int V, int kC>
__global__ void __launch_bounds__(kForwardWarps* kWarp)
    layernorm_forward_kernel(X* out, float* mean_out, float* rstd_out, const X* __restrict__ inp,
                             const X* __restrict__ weight, const X* __restrict__ bias, size_t N,
                             int any_C) {
    // How many vectors a lane loads before it adds them, so that it waits for memory only once. If
    // kC > 0, that is its whole part of the row, which then stays in `batch`.
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
            for (int k = 0; k < kBatch; k++) {
                const int c = (k * kWarp + lane) * V;
                if (c < C)
                    f(c, batch[k]);
            }
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

constexpr int kBackwardColumns = 8;         // per thread
constexpr int kBackwardThreadsPerSM = 896;  // as many as fit with 72 registers each
// Threads per block for rows up to 1024. Longer rows need larger blocks, with 64 registers a
// thread.
constexpr int kFewThreads = 128;

// What backward sums over all rows. Each block writes its sums to partials (gridDim, kSums, C) in
// this order, which is also the order of the outputs of add_partials.
enum ColumnSum {
    kDweight,  // of dout∘norm
    kDbias,    // of dout
    kDinpSum,  // of dinp
    kSums
};

// What backward sums over a row.
struct alignas(8) RowSums {
    float dnorm;
    float dnorm_norm;  // dnorm∘norm
};

template <class X, int V, int MaxThreads>
__global__ void __launch_bounds__(MaxThreads, MaxThreads == kFewThreads
                                                  ? kBackwardThreadsPerSM / MaxThreads
                                                  : 1)
    layernorm_backward_kernel(X* dinp, float* partials, const X* __restrict__ dout,
                              const X* __restrict__ inp, const X* __restrict__ weight,
                              const float* __restrict__ mean, const float* __restrict__ rstd,
                              size_t N, int C) {
    // A thread owns K vectors. Vector k starts at column (k·blockDim + thread)·V.
    constexpr int K = kBackwardColumns / V;
    // With two buffers one barrier per row is enough, because a warp that is a row ahead writes to
    // the other buffer.
    __shared__ RowSums sums_smem[2][kWarp];
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int warps = blockDim.x / kWarp;
    const float inverse_C = 1.f / C;

    int column[K];
    Vec<X, V> w[K];
    Vec<float, V> dweight[K] = {};
    Vec<float, V> dbias[K] = {};
    Vec<float, V> dinp_sum[K] = {};
    for (int k = 0; k < K; k++) {
        column[k] = (k * blockDim.x + threadIdx.x) * V;
        if (column[k] < C)
            w[k] = load<V>(weight + column[k]);
    }

    int buffer = 0;
    for (size_t row = blockIdx.x; row < N; row += gridDim.x) {
        const float row_mean = mean[row];
        const float row_rstd = rstd[row];

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

        float dnorm_sum = 0.f;
        float dnorm_norm_sum = 0.f;
        for (int k = 0; k < K; k++) {
            if (column[k] >= C)
                continue;
            for (int i = 0; i < V; i++) {
                const float norm = (x[k][i] - row_mean) * row_rstd;
                const float dnorm = __fmul_rn(w[k][i], dy[k][i]);
                dnorm_sum += dnorm;
                dnorm_norm_sum += dnorm * norm;
                dweight[k].x[i] += dy[k][i] * norm;
                dbias[k].x[i] += dy[k][i];
            }
        }

        dnorm_sum = warp_sum(dnorm_sum);
        dnorm_norm_sum = warp_sum(dnorm_norm_sum);
        if (lane == 0)
            sums_smem[buffer][warp] = {.dnorm = dnorm_sum, .dnorm_norm = dnorm_norm_sum};
        __syncthreads();

        float dnorm_mean = 0.f;
        float dnorm_norm_mean = 0.f;
        for (int i = 0; i < warps; i++) {
            dnorm_mean += sums_smem[buffer][i].dnorm;
            dnorm_norm_mean += sums_smem[buffer][i].dnorm_norm;
        }
        dnorm_mean *= inverse_C;
        dnorm_norm_mean *= inverse_C;
        buffer ^= 1;

        // Recomputing norm and dnorm is cheaper than keeping them in registers. In short rows dnorm
        // and mean(dnorm) cancel, and rstd, which can be 316, multiplies what is left. So dnorm
        // must be the same rounded number here as in the sum, not part of an fma: hence __fmul_rn.
        for (int k = 0; k < K; k++) {
            if (column[k] >= C)
                continue;
            Vec<float, V> dx;
            for (int i = 0; i < V; i++) {
                const float norm = (x[k][i] - row_mean) * row_rstd;
                const float dnorm = __fmul_rn(w[k][i], dy[k][i]);
                dx.x[i] = old[k][i] + row_rstd * (dnorm - dnorm_mean - norm * dnorm_norm_mean);
            }
            const Vec<X, V> stored = round_to<X>(dx);
            store(dinp + row * C + column[k], stored);
            for (int i = 0; i < V; i++)
                dinp_sum[k].x[i] += stored[i];
        }
    }

    float* partial = partials + static_cast<size_t>(blockIdx.x) * kSums * C;
    for (int k = 0; k < K; k++) {
        if (column[k] >= C)
            continue;
        store(partial + kDweight * C + column[k], dweight[k]);
        store(partial + kDbias * C + column[k], dbias[k]);
        store(partial + kDinpSum * C + column[k], dinp_sum[k]);
    }
}

// -------------------------------------------------------------------------------------------------
// The rows kernel, for sm_90 and rows of C bf16

// Warps per block, the only block on its SM. A thread keeps three sums for each of its columns, so
// the wider the rows, the more registers it needs.
template <int C>
constexpr int kRowWarps = (C <= 768)    ? 16  // 128 registers a thread, of which 72 are sums
                          : (C <= 1024) ? 12  // 168, of which 96
                                        : 8;  // 255, of which 120 (C = 1280) or 168 (1600)
constexpr int kRowStages = 2;
// What a stage holds: one row of each, of C bf16.
enum RowOfStage { kDout, kInp, kDinp, kRowsOfStage };

// A warp owns a row, each lane K vectors of it. Warp w of block b handles turns b·kWarps + w +
// i·stride. partials is as for layernorm_backward_kernel.
template <int C>
__global__ void __launch_bounds__(kRowWarps<C>* kWarp, 1)
    layernorm_backward_rows_kernel(bf16* dinp, float* partials, const bf16* dout, const bf16* inp,
                                   const bf16* weight, const float* __restrict__ mean,
                                   const float* __restrict__ rstd, size_t N) {
#if __CUDA_ARCH__ >= 900
    constexpr int V = 8;
    constexpr int K = ceil_div(C, kWarp * V);
    constexpr int kNextVector = kWarp * V;  // elements from one of a lane's vectors to its next
    constexpr int kWarps = kRowWarps<C>;
    // [kWarps][kRowStages][kRowsOfStage][C] of bf16, and in the end [kWarps][kSums][C] of float
    extern __shared__ uint4 ring_smem[];
    // There are no registers to keep weight, dout and inp, so each is read twice.
    __shared__ alignas(16) bf16 weight_smem[C];
    __shared__ uint64_t full_smem[kWarps][kRowStages];
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const size_t stride = size_t{gridDim.x} * kWarps;
    bf16* const ring = reinterpret_cast<bf16*>(ring_smem) +
                       static_cast<size_t>(warp) * kRowStages * kRowsOfStage * C;

    const auto fetch = [&](size_t turn, int stage) {
        if (lane > 0 || turn >= N)
            return;

        const size_t row = row_of_turn(turn, N);
        const uint32_t full = smem_address(&full_smem[warp][stage]);
        const uint32_t dst = smem_address(ring + stage * kRowsOfStage * C);
        constexpr int kBytes = C * sizeof(bf16);
        mbarrier_arrive_expect(full, kRowsOfStage * kBytes);
        bulk_load(dst + kDout * kBytes, dout + row * C, kBytes, full);
        bulk_load(dst + kInp * kBytes, inp + row * C, kBytes, full);
        bulk_load(dst + kDinp * kBytes, dinp + row * C, kBytes, full);
    };

    size_t turn = static_cast<size_t>(blockIdx.x) * kWarps + warp;
    if (lane == 0) {
        for (int stage = 0; stage < kRowStages; stage++)
            mbarrier_init(smem_address(&full_smem[warp][stage]), 1);
        fence_mbarrier_init();
    }
    for (int c = threadIdx.x; c < C; c += kWarps * kWarp)
        weight_smem[c] = weight[c];
    __syncthreads();

    for (int stage = 0; stage < kRowStages; stage++)
        fetch(turn + stage * stride, stage);

    float dweight[K][V] = {};
    float dbias[K][V] = {};
    float dinp_sum[K][V] = {};
    float row_mean = 0.f;
    float row_rstd = 0.f;
    if (turn < N) {
        row_mean = mean[row_of_turn(turn, N)];
        row_rstd = rstd[row_of_turn(turn, N)];
    }

    // Turn i: load mean and rstd of turn i + 1 · wait for the row · sums over the row, dweight and
    // dbias · dinp and dinp_sum · fetch turn i + 2.
    uint32_t phase = 0;
    int stage = 0;
    for (; turn < N; turn += stride) {
        const size_t row = row_of_turn(turn, N);
        float next_mean = 0.f;
        float next_rstd = 0.f;
        if (turn + stride < N) {  // row − stride is the row of that turn, as rows run backwards
            next_mean = mean[row - stride];
            next_rstd = rstd[row - stride];
        }

        const bf16* const lane_rows = ring + stage * kRowsOfStage * C + lane * V;
        mbarrier_wait(smem_address(&full_smem[warp][stage]), phase);

        float dnorm_sum = 0.f;
        float dnorm_norm_sum = 0.f;
        for (int k = 0; k < K; k++) {
            const int c = (k * kWarp + lane) * V;
            if (c >= C)
                continue;
            const auto dy = load<V>(lane_rows + kDout * C + k * kNextVector);
            const auto w = load<V>(weight_smem + c);
            const auto x = load<V>(lane_rows + kInp * C + k * kNextVector);
            for (int i = 0; i < V; i++) {
                const float norm = (x[i] - row_mean) * row_rstd;
                const float dnorm = __fmul_rn(w[i], dy[i]);
                dnorm_sum += dnorm;
                dnorm_norm_sum += dnorm * norm;
                dweight[k][i] += dy[i] * norm;
                dbias[k][i] += dy[i];
            }
        }
        const float dnorm_mean = warp_sum(dnorm_sum) * (1.f / C);
        const float rstd_dnorm_norm_mean = row_rstd * warp_sum(dnorm_norm_sum) * (1.f / C);

        // Keeps the compiler from holding what was read above in registers, of which there are none
        // left.
        __syncwarp();
        for (int k = 0; k < K; k++) {
            const int c = (k * kWarp + lane) * V;
            if (c >= C)
                continue;
            const auto dy = load<V>(lane_rows + kDout * C + k * kNextVector);
            const auto w = load<V>(weight_smem + c);
            const auto x = load<V>(lane_rows + kInp * C + k * kNextVector);
            const auto old = load<V>(lane_rows + kDinp * C + k * kNextVector);
            Vec<float, V> dx;
            for (int i = 0; i < V; i++) {
                const float dnorm = __fmul_rn(w[i], dy[i]);
                dx.x[i] = old[i] + row_rstd * (dnorm - dnorm_mean -
                                               (x[i] - row_mean) * rstd_dnorm_norm_mean);
            }
            const Vec<bf16, V> stored = round_to<bf16>(dx);
            store(dinp + row * C + c, stored);
            for (int i = 0; i < V; i++)
                dinp_sum[k][i] += stored[i];
        }

        __syncwarp();  // all lanes have read the stage
        fetch(turn + kRowStages * stride, stage);
        row_mean = next_mean;
        row_rstd = next_rstd;
        stage++;
        if (stage == kRowStages) {
            stage = 0;
            phase ^= 1;
        }
    }

    // Adds the warps' sums in order.
    __syncthreads();
    float* const sums_smem = reinterpret_cast<float*>(ring_smem);
    float* const lane_sums = sums_smem + static_cast<size_t>(warp) * kSums * C + lane * V;
    for (int k = 0; k < K; k++) {
        const int c = (k * kWarp + lane) * V;
        if (c >= C)
            continue;
        for (int i = 0; i < V; i++) {
            lane_sums[kDweight * C + k * kNextVector + i] = dweight[k][i];
            lane_sums[kDbias * C + k * kNextVector + i] = dbias[k][i];
            lane_sums[kDinpSum * C + k * kNextVector + i] = dinp_sum[k][i];
        }
    }
    __syncthreads();

    for (int c = threadIdx.x; c < kSums * C; c += kWarps * kWarp) {
        float sum = 0.f;
        for (int i = 0; i < kWarps; i++)
            sum += sums_smem[static_cast<size_t>(i) * kSums * C + c];
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

// If C is that of one of GPT-2's sizes, calls f with C as a compile-time constant and returns true.
template <class F>
static bool with_gpt2_channels(int C, F f) {
    const auto call_if_equal = [&](auto size) {
        if (C != size)
            return false;
        f(size);
        return true;
    };
    return call_if_equal(std::integral_constant<int, 768>()) ||
           call_if_equal(std::integral_constant<int, 1024>()) ||
           call_if_equal(std::integral_constant<int, 1280>()) ||
           call_if_equal(std::integral_constant<int, 1600>());
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
        with_gpt2_channels(C, [&](auto size) {
            kernel = layernorm_forward_kernel<X, kVec<X>, size>;
            smem = 0;  // rows are kept in registers
        });
    }

    kernel<<<ceil_div(N, warps), warps * kWarp, smem, dev.stream>>>(out, mean, rstd, inp, weight,
                                                                    bias, N, C);
    LAUNCH_CHECK("layernorm_forward_kernel");
}

static int backward_threads(int C) {
    return ceil_div(C, kBackwardColumns * kWarp) * kWarp;
}

// As many blocks as the GPU can run at once with 72 registers a thread (long rows have 64), but at
// least one per SM. The number does not depend on N, so neither does the size of the scratch.
static int backward_blocks(const Cuda& dev, int C) {
    return dev.num_sms * std::max(1, kBackwardThreadsPerSM / backward_threads(C));
}

size_t layernorm_scratch_bytes(const Cuda& dev, int C) {
    check_channels(C);
    return static_cast<size_t>(backward_blocks(dev, C)) * kSums * C * sizeof(float);
}

namespace {
// The operands of a backward call.
template <class X>
struct LayernormBackward {
    X* dinp;
    float* partials;
    const X* dout;
    const X* inp;
    const X* weight;
    const float* mean;
    const float* rstd;
    size_t N;
    int C;
};
}  // namespace

// This and launch_backward() return how many rows of partial sums they leave in partials.
template <int C>
static int launch_backward_rows(const Cuda& dev, const LayernormBackward<bf16>& o) {
    constexpr int kWarps = kRowWarps<C>;
    constexpr int kSmem = kWarps * kRowStages * kRowsOfStage * C * sizeof(bf16);
    const auto kernel = layernorm_backward_rows_kernel<C>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));

    const int blocks = static_cast<int>(std::min<size_t>(dev.num_sms, (o.N - 1) / kWarps + 1));
    kernel<<<blocks, kWarps * kWarp, kSmem, dev.stream>>>(o.dinp, o.partials, o.dout, o.inp,
                                                          o.weight, o.mean, o.rstd, o.N);
    LAUNCH_CHECK("layernorm_backward_rows_kernel");
    return blocks;
}

template <class X>
static int launch_backward(const Cuda& dev, const LayernormBackward<X>& o) {
    constexpr int V = kVec<X>;
    constexpr int kMostThreads = kMaxChannels / kBackwardColumns;
    const int threads = backward_threads(o.C);
    const bool few = threads <= kFewThreads;
    auto kernel = few ? layernorm_backward_kernel<X, 1, kFewThreads>
                      : layernorm_backward_kernel<X, 1, kMostThreads>;
    if (vectorises<X>(o.C, o.dinp, o.dout, o.inp, o.weight, o.partials))
        kernel = few ? layernorm_backward_kernel<X, V, kFewThreads>
                     : layernorm_backward_kernel<X, V, kMostThreads>;

    const int blocks = static_cast<int>(std::min<size_t>(backward_blocks(dev, o.C), o.N));
    kernel<<<blocks, threads, 0, dev.stream>>>(o.dinp, o.partials, o.dout, o.inp, o.weight, o.mean,
                                               o.rstd, o.N, o.C);
    LAUNCH_CHECK("layernorm_backward_kernel");
    return blocks;
}

template <class X>
void layernorm_backward(const Cuda& dev, X* dinp, float* dweight, float* dbias, float* dinp_sum,
                        void* scratch, const X* dout, const X* inp, const X* weight,
                        const float* mean, const float* rstd, size_t N, int C) {
    check_channels(C);
    if (N == 0)
        return;

    const LayernormBackward<X> o = {.dinp = dinp,
                                    .partials = static_cast<float*>(scratch),
                                    .dout = dout,
                                    .inp = inp,
                                    .weight = weight,
                                    .mean = mean,
                                    .rstd = rstd,
                                    .N = N,
                                    .C = C};
    int rows = 0;  // of partials
    bool launched = false;
    if constexpr (std::is_same_v<X, bf16>) {
        // The rows kernel needs only sm_90, but sm90a is what tells us how it was compiled.
        if (dev.sm90a && vectorises<X>(C, dinp, dout, inp, weight))
            launched = with_gpt2_channels(
                C, [&](auto size) { rows = launch_backward_rows<size>(dev, o); });
    }
    if (!launched)
        rows = launch_backward(dev, o);

    add_partials(dev, {dweight, dbias, dinp_sum}, {.sums = o.partials, .rows = rows, .columns = C});
}

#define INSTANTIATE(X)                                                                             \
    template void layernorm_forward(const Cuda&, X*, float*, float*, const X*, const X*, const X*, \
                                    size_t, int);                                                  \
    template void layernorm_backward(const Cuda&, X*, float*, float*, float*, void*, const X*,     \
                                     const X*, const X*, const float*, const float*, size_t, int);
INSTANTIATE(float)
INSTANTIATE(bf16)
