// Sums over the rows of a matrix, in a fixed order and in two stages: each block of a first kernel
// writes a row of fp32 partial sums to scratch, and add_partials() adds those rows.
#pragma once
#include <algorithm>

#include "cuda/cuda.h"
#include "cuda/vector.cuh"

constexpr int kColumnThreads = 256;
constexpr int kColumnWarps = kColumnThreads / kWarp;

// Stage 1: the body of a kernel. A block sums 32·V columns, from 32·V·blockIdx.x on, and each lane
// owns V of them. Rows are dealt out in groups of kColumnWarps, one row for each warp. The block
// takes groups blockIdx.y, blockIdx.y + gridDim.y, …. add_row(row, c, sum) adds columns c to
// c + V − 1 of a row to sum. In the end warp 0 adds the warps' sums in order and writes them to row
// blockIdx.y of partials (gridDim.y, C).
template <int V, int Unroll, class AddRow>
__device__ static void column_sums(float* __restrict__ partials, size_t N, int C, AddRow add_row) {
    __shared__ float sum_smem[kColumnWarps][V][kWarp];
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int c = (blockIdx.x * kWarp + lane) * V;

    float sum[V] = {};
    if (c < C) {
        const size_t first_row = blockIdx.y * size_t{kColumnWarps} + warp;
#pragma unroll Unroll
        for (size_t row = first_row; row < N; row += gridDim.y * size_t{kColumnWarps})
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

constexpr int kSumThreads = kWarp * kWarp;  // of a kernel that calls sum_over_rows()

// Returns Σ_r term(r) over rows r < count, for each lane's column; only warp 0 gets the result.
// Warp w adds rows w, w + 32, …, then warp 0 adds the warps' sums in order. As there are few
// columns, and so few blocks, a block has 32 warps, each with several loads in flight.
template <class Term>
__device__ static float sum_over_rows(int count, Term term) {
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

struct Outputs {
    static constexpr int kMost = 3;
    float* out[kMost];  // null if not wanted
};

// Stage 2: outputs.out[y][c] += Σ_r partials[r·stride + y·columns + c] for r < rows, c < columns
// and y = blockIdx.y. A block owns 32 columns.
__global__ static void __launch_bounds__(kSumThreads)
    add_partials_kernel(Outputs outputs, const float* __restrict__ partials, int rows,
                        size_t stride, int columns) {
    const int c = blockIdx.x * kWarp + threadIdx.x % kWarp;
    float* out = outputs.out[blockIdx.y];
    if (!out)
        return;

    partials += blockIdx.y * columns;
    const float sum =
        sum_over_rows(c < columns ? rows : 0, [=](int r) { return partials[r * stride + c]; });
    if (threadIdx.x < kWarp && c < columns)
        out[c] += sum;
}

// The partial sums in scratch: `rows` rows, each with `columns` sums for every output.
struct Partials {
    const float* sums;
    int rows;
    int columns;
};

// Adds the rows of partial sums into the outputs. Null outputs are skipped.
template <size_t K>
static void add_partials(const Cuda& dev, float* const (&outputs)[K], const Partials& partials) {
    static_assert(K <= Outputs::kMost);
    Outputs out = {};
    std::copy_n(outputs, K, out.out);

    const int columns = partials.columns;
    const dim3 grid(ceil_div(columns, kWarp), K);
    add_partials_kernel<<<grid, kSumThreads, 0, dev.stream>>>(out, partials.sums, partials.rows,
                                                              K * columns, columns);
    LAUNCH_CHECK("add_partials_kernel");
}

// The most slices into which column_sums() cuts the rows, which is its gridDim.y: as many as it
// takes to fill the GPU when V is widest. That does not depend on N or X, so neither does the size
// of the scratch.
static inline int max_column_sum_slices(const Cuda& dev, int columns) {
    constexpr int kBlocksPerSM = 8;
    const size_t column_blocks = ceil_div(columns, kWarp * kVec<bf16>);
    return static_cast<int>(std::max<size_t>(1, dev.num_sms * kBlocksPerSM / column_blocks));
}

// How many slices there are for N rows: none of them is empty.
static inline int column_sum_slices(const Cuda& dev, int columns, size_t N) {
    const size_t row_groups = (N + kColumnWarps - 1) / kColumnWarps;
    return static_cast<int>(std::min<size_t>(max_column_sum_slices(dev, columns), row_groups));
}

static inline size_t column_sum_bytes(const Cuda& dev, int columns) {
    return static_cast<size_t>(max_column_sum_slices(dev, columns)) * columns * sizeof(float);
}
