// A linear layer for a single row, which is all that the next token of a text needs.
//
//   y = gelu?(weight·n + bias), n the layer norm of x;   without a norm y += weight·x + bias
//
// x and n are fp32 also where weights are bf16. If they were rounded, their errors would be as large as in a whole
// text, but others. So the logits of some tokens would be farther off than without the cache.
//
// Memory bounds it, because each weight is read for a single product. A block owns kRows of weight's rows, and a thread
// 16 bytes of each. It asks for these before the norm, which they do not wait for. Trees of fixed order add the
// threads' sums. Such short chains err less than a matmul's.
//
// Writes: y (OC), or adds into it.  Limits: C elements of X are a multiple of 16 bytes.  Run: ./dev/test_layers row
#include "layers/gpu/gelu.cuh"
#include "layers/gpu/vector.cuh"
#include "layers/layers.h"

namespace {

constexpr int kRows = 4, kMaxThreads = 512;

template <class X, class Y>
__global__ void __launch_bounds__(kMaxThreads)
    row_kernel(Y* y, const float* __restrict__ x, const X* __restrict__ norm_weight, const X* __restrict__ norm_bias,
               const X* __restrict__ weight, const X* __restrict__ bias, int C, int OC, bool gelu) {
    constexpr int V = kVec<X>;
    __shared__ float sums_smem[kRows][kWarp];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const int begin = threadIdx.x * V, stride = blockDim.x * V, row = blockIdx.x * kRows, o = row + warp;
    const bool last = warp < kRows && o < OC;  // this warp finishes row o
    const float b = last && bias ? to_float(bias[o]) : 0.f, old = last && !norm_weight ? to_float(y[o]) : 0.f;

    Vec<X, V> w[kRows], scale, shift;
    const auto fetch = [&](int c) {
        if (c >= C) return;
        for (int r = 0; r < kRows; r++) w[r] = load<V>(weight + size_t(min(row + r, OC - 1)) * C + c);
        if (norm_weight) scale = load<V>(norm_weight + c), shift = load<V>(norm_bias + c);
    };
    fetch(begin);

    float mean = 0.f, rstd = 1.f, sums[kRows] = {};
    if (norm_weight) {
        float sum = 0.f, squares = 0.f;
        for (int c = begin; c < C; c += stride)
            for (int i = 0; i < V; i++) sum += load<V>(x + c)[i];
        mean = block_sum(sum) / C;
        for (int c = begin; c < C; c += stride) {
            const auto v = load<V>(x + c);
            for (int i = 0; i < V; i++) squares += (v[i] - mean) * (v[i] - mean);
        }
        rstd = rsqrtf(block_sum(squares) / C + kLayernormEps);
    }
    for (int c = begin; c < C; fetch(c += stride)) {
        Vec<float, V> n = load<V>(x + c);
        for (int i = 0; i < V && norm_weight; i++) n.x[i] = (n[i] - mean) * rstd * scale[i] + shift[i];
        for (int r = 0; r < kRows; r++)
            for (int i = 0; i < V; i++) sums[r] += w[r][i] * n[i];
    }

    for (int r = 0; r < kRows; r++) {
        const float sum = warp_sum(sums[r]);
        if (lane == 0) sums_smem[r][warp] = sum;
    }
    __syncthreads();
    if (!last) return;
    float out = warp_sum(lane < warps ? sums_smem[warp][lane] : 0.f) + b;
    if (gelu) out /= 1.f + expf(-out * (kGeluA + kGeluB * out * out));
    if (lane == 0) store(y + o, Vec<float, 1>{{out + old}});
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------

template <class X, class Y>
void row_forward(const Cuda& dev, Y* y, const float* x, const X* norm_weight, const X* norm_bias, const X* weight,
                 const X* bias, int C, int OC, bool gelu) {
    if (C < 1 || !vectorises<X>(C, x, norm_weight, norm_bias, weight))
        throw Error(format("row: C = %d, expected a multiple of %d, in memory aligned to 16 bytes", C, kVec<X>));
    const int threads = std::clamp<int>(ceil_div(C, kVec<X> * kWarp), kRows, kMaxThreads / kWarp) * kWarp;
    row_kernel<<<ceil_div(OC, kRows), threads, 0, dev.stream>>>(y, x, norm_weight, norm_bias, weight, bias, C, OC,
                                                                gelu);
    LAUNCH_CHECK("row_kernel");
}

#define INSTANTIATE(X, Y) \
    template void row_forward(const Cuda&, Y*, const float*, const X*, const X*, const X*, const X*, int, int, bool);
INSTANTIATE(float, float)
INSTANTIATE(bf16, bf16)
INSTANTIATE(bf16, float)
