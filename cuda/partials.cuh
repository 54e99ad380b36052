// Sums over the rows of a matrix, in a fixed order. First each block leaves fp32 partial rows in
// scratch, then add_partials adds them.
#pragma once
#include <algorithm>

#include "cuda/cuda.h"
#include "cuda/vector.cuh"

constexpr int kColumnThreads = 256, kColumnWarps = kColumnThreads / kWarp;

// A block owns 32·V columns (blockIdx.x) of every gridDim.y-th group of kColumnWarps rows. Each
// thread stays on its V columns, and add_row(row, c, sum) adds what the row has from column c on.
// Then warp 0 adds the warps' sums in order. partials is (gridDim.y, C).
template <int V, int Unroll, class AddRow>
__device__ static void column_sums(float* __restrict__ partials, size_t N, int C, AddRow add_row) {
    __shared__ float sum_smem[kColumnWarps][V][kWarp];
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int c = (blockIdx.x * kWarp + lane) * V;
    float sum[V] = {};
    if (c < C) {
#pragma unroll Unroll
        for (size_t row = blockIdx.y * size_t{kColumnWarps} + warp; row < N;
             row += gridDim.y * size_t{kColumnWarps})
            add_row(row, c, sum);
    }
    for (int k = 0; k < V; k++)
        sum_smem[warp][k][lane] = sum[k];
    __syncthreads();
    if (warp > 0 || c >= C)
        return;
    for (int k = 0; k < V; k++) {
        for (int w = 1; w < kColumnWarps; w++)
            sum[k] += sum_smem[w][k][lane];
        partials[size_t{blockIdx.y} * C + c + k] = sum[k];
    }
}

struct Outputs {
    static constexpr int kMost = 3;
    float* out[kMost];  // null if not wanted
};

// Returns Σ_r term(r) for r < count and each lane's column, in warp 0 alone. A block has 32 warps,
// each with several loads in flight, because there are few columns. Warp w adds rows w, w + 32, …,
// then warp 0 adds the warps' sums in order.
template <class Term>
__device__ static float sum_of_warps(int count, Term term) {
    __shared__ float sum_smem[kWarp][kWarp];
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    float sum = 0.f;
#pragma unroll 8
    for (int r = warp; r < count; r += kWarp)
        sum += term(r);
    sum_smem[warp][lane] = sum;
    __syncthreads();
    if (warp == 0)
        for (int w = 1; w < kWarp; w++)
            sum += sum_smem[w][lane];
    return sum;
}

// outputs.out[y][c] += Σ_p partials[p·stride + y·n + c] for c < n, y = blockIdx.y. A block owns 32
// columns.
__global__ static void __launch_bounds__(1024)
    add_partials_kernel(Outputs outputs, const float* __restrict__ partials, int count,
                        size_t stride, int n) {
    const int c = blockIdx.x * kWarp + threadIdx.x % kWarp;
    float* out = outputs.out[blockIdx.y];
    if (!out)
        return;
    partials += blockIdx.y * n;
    const float sum =
        sum_of_warps(c < n ? count : 0, [=](int p) { return partials[p * stride + c]; });
    if (threadIdx.x < kWarp && c < n)
        out[c] += sum;
}

// What blocks left in scratch: `count` rows, each with `columns` sums for every output.
struct Partials {
    const float* rows;
    int count;
    int columns;
};
// Null outputs are skipped.
template <size_t K>
static void add_partials(const Cuda& dev, float* const (&outputs)[K], const Partials& partials) {
    static_assert(K <= Outputs::kMost);
    Outputs out = {};
    std::copy_n(outputs, K, out.out);
    const int columns = partials.columns;
    const dim3 grid(ceil_div(columns, kWarp), K);
    add_partials_kernel<<<grid, 1024, 0, dev.stream>>>(out, partials.rows, partials.count,
                                                       K * columns, columns);
    LAUNCH_CHECK("add_partials_kernel");
}

// Returns into how many slices the N rows of column_sums are cut, its gridDim.y. The blocks fill
// the GPU when V is the widest. The upper bound does not depend on N or X, so neither does the
// scratch.
static inline int column_sum_slices(const Cuda& dev, int columns, size_t N = ~size_t{0}) {
    constexpr int kBlocksPerSM = 8;
    const size_t most =
        std::max<size_t>(1, dev.num_sms * kBlocksPerSM / ceil_div(columns, kWarp * kVec<bf16>));
    return static_cast<int>(std::min(most, N / kColumnWarps + (N % kColumnWarps > 0)));
}
static inline size_t column_sum_bytes(const Cuda& dev, int columns) {
    return static_cast<size_t>(column_sum_slices(dev, columns)) * columns * sizeof(float);
}
