// The second stage of every column sum: blocks have left fp32 partial rows in scratch, and they are added in a fixed
// order.
#pragma once
#include "layers/cuda.h"
#include "layers/vector.cuh"

// out[c] += Σ_p partials[p·stride + c] for c < n, and the same for out2 from column n on (blockIdx.y = 1).
// A block owns 32 columns: warp w adds rows w, w + 32, …, then the warps' sums are added in order. 32 warps, each with
// several loads in flight, because there are few columns.
__global__ static void __launch_bounds__(1024)
    add_partials_kernel(float* out, float* out2, const float* __restrict__ partials, int count, size_t stride, int n) {
    __shared__ float sum_smem[kWarp][kWarp];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int c = blockIdx.x * kWarp + lane;
    if (blockIdx.y == 1) {
        out = out2;
        partials += n;
    }
    float sum = 0.f;
    if (c < n) {
#pragma unroll 8
        for (int p = warp; p < count; p += kWarp) sum += partials[p * stride + c];
    }
    sum_smem[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= n) return;
    for (int w = 1; w < kWarp; w++) sum += sum_smem[w][lane];
    out[c] += sum;
}

// partials: (count, n), or (count, 2, n) if there is an out2.
static inline void add_partials(const Cuda& dev, float* out, float* out2, const float* partials, int count, int n) {
    const int outputs = out2 ? 2 : 1;
    add_partials_kernel<<<dim3(ceil_div(n, kWarp), outputs), 1024, 0, dev.stream>>>(
        out, out2, partials, count, static_cast<size_t>(outputs) * n, n);
    LAUNCH_CHECK("add_partials_kernel");
}
