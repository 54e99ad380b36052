// What flash_bf16, flash_fp16x3 and dev/study_accumulation share: tiles of 16-bit elements in
// shared memory, and launches that cover each tile of each head.
#pragma once
#include <algorithm>
#include <climits>
#include <type_traits>

#include "attention/launch.h"
#include "cuda/ptx_sm80.cuh"

// Tiles in shared memory are rows of HS elements whose 16-byte pieces are permuted, with piece c of
// row r at c ^ (r % 8). Eight rows of one column then lie in eight different bank groups, so
// ldmatrix reads them without conflict.

template <int HS>
__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
    return row * HS * 2 + ((piece ^ (row & 7)) << 4);
}

// The address that this lane gives ldmatrix for the 16×16 block at (row, col), multiples of 16
// known to the compiler. Lanes 8i … 8i+7 name the rows of its quadrant i, in the order upper left,
// lower left, upper right, lower right. An A operand wants this order, and so does a B operand that
// is loaded transposed. The swizzle makes col an xor. It may follow the addition, as a tile starts
// at a multiple of its row, so one register serves all rows and columns.
template <int HS>
__device__ __forceinline__ uint32_t block16(uint32_t tile, int row, int col) {
    const int lane = threadIdx.x % 32;
    return ((tile + swizzled<HS>(lane % 16, lane / 16)) ^ (col * 2)) + row * HS * 2;
}
// The same in the order upper left, upper right, lower left, lower right, for a B operand whose
// columns are the tile's rows. The two registers of a B operand must be neighbours, or the compiler
// adds two moves to every MMA.
template <int HS>
__device__ __forceinline__ uint32_t block16_b(uint32_t tile, int row, int col) {
    const int lane = threadIdx.x % 32;
    return ((tile + swizzled<HS>(lane % 8 + lane / 16 * 8, lane / 8 % 2)) ^ (col * 2)) +
           row * HS * 2;
}

// a = the A operand made of the tile's first 16·M rows and k-step [col, col + 16).
template <int HS, int M>
__device__ __forceinline__ void load_a(uint32_t (&a)[M][4], uint32_t tile, int col) {
    for (int m = 0; m < M; m++)
        ldmatrix_x4(a[m], block16<HS>(tile, 16 * m, col));
}

// An accumulator times factor, and rows [16·m + 8·r + lane/4] of it.
template <int M, int N>
__device__ __forceinline__ void scale(float (&c)[M][N][4], float factor) {
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++)
            for (int e = 0; e < 4; e++)
                c[m][n][e] *= factor;
}
template <int M, int N>
__device__ __forceinline__ void scale_row(float (&c)[M][N][4], int m, int r, float factor) {
    for (int n = 0; n < N; n++) {
        c[m][n][2 * r] *= factor;
        c[m][n][2 * r + 1] *= factor;
    }
}

// Over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
template <class X>
__device__ __forceinline__ X quad_sum(X x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Writes c to fp32 rows [row, row + 16·M) of a tile whose row 0 is at dst, but none at or past
// `end`.
template <int HS, int M>
__device__ __forceinline__ void store_rows(const float (&c)[M][HS / 8][4], int row, float* dst,
                                           size_t token, int end) {
    const int lane = threadIdx.x % 32;
    for (int m = 0; m < M; m++)
        for (int r = 0; r < 2; r++) {
            const int t = row + 16 * m + 8 * r + lane / 4;
            if (t >= end)
                continue;
            float2* p = reinterpret_cast<float2*>(dst + t * token) + lane % 4;
            for (int n = 0; n < HS / 8; n++)
                p[4 * n] = make_float2(c[m][n][2 * r], c[m][n][2 * r + 1]);
        }
}

// -------------------------------------------------------------------------------------------------
// What a launch covers. Blocks are numbered in groups of heads, so that those running at once share
// keys in L2. The longest of a group come first, so that the last to finish are short.

template <class X>
struct Problem {
    HeadsView<const X> q, k, v;
    int NH, Tq, Tk, heads;  // heads = B·NH
    int shift;              // query i sees keys j ≤ i + shift
    int tiles, group;
    // scale_log2 = scale·log2(e), because the exponentials are powers of 2
    float scale, scale_log2;
};

template <class X, class Y>
struct ForwardArgs {
    Problem<X> p;
    HeadsView<Y> out;
    RowStatsView<float> lse;
    RowStatsView<float> lse_rest = {};
};

// What backward knows of a query.
struct alignas(8) LseD {
    float lse_log2;  // log2(e)·lse
    float D;
};
// Of the two columns that a lane has side by side in an accumulator.
struct alignas(16) LseDPair {
    LseD of[2];
};

struct WorkTile {
    int tile;
    int bh;
    int b;
    int h;
};
// A block takes the tile of a head that has its own number.
template <class X>
__device__ __forceinline__ WorkTile work_of(const Problem<X>& p, bool descending) {
    const int first = blockIdx.x / (p.group * p.tiles) * p.group;
    const int size = min(p.group, p.heads - first);
    const int i = blockIdx.x - first * p.tiles;
    const int tile = i / size;
    const int bh = first + i % size;
    return {
        .tile = descending ? p.tiles - 1 - tile : tile, .bh = bh, .b = bh / p.NH, .h = bh % p.NH};
}
// How many tiles of Bc keys the tile'th Br queries see.
template <int Br, int Bc, class X>
__device__ __forceinline__ int visible_tiles(const Problem<X>& p, int tile) {
    // the last query sees keys before this
    const int k_end = min(p.Tk, min((tile + 1) * Br, p.Tq) + p.shift);
    return (k_end + Bc - 1) / Bc;
}
template <class X>
__device__ __forceinline__ X* head_of(const HeadsView<X>& x, const WorkTile& w, int HS) {
    return x.ptr + w.b * x.batch_stride + static_cast<size_t>(w.h) * HS;
}

// Of a call of either direction. launch() adds the tiles.
template <template <class, class> class Call, class X, class Y>
Problem<X> problem(const Call<X, Y>& c) {
    Problem<X> p{};
    p.q = c.q;
    p.k = c.k;
    p.v = c.v;
    p.NH = c.s.NH;
    p.Tq = c.s.Tq;
    p.Tk = c.s.Tk;
    p.heads = c.s.B * c.s.NH;
    p.shift = c.s.shift();
    p.scale = c.s.resolved_scale();
    p.scale_log2 = c.s.scale_log2();
    return p;
}

// A head has `tiles` blocks. Past each stream `streamed` rows of two tensors, K and V or Q and dO.
struct Launch {
    const char* name;
    int HS;
    int tiles;
    int streamed;
    int threads;
    int smem;  // bytes
};
// A group of heads should stay well inside L2 (40 MB on an A100, 50 MB on an H100).
template <class Args>
void launch(const Cuda& dev, const Launch& l, void (*kernel)(Args), Args args) {
    constexpr size_t kGroupBytes = 32 << 20;
    const size_t head_bytes = 2 * sizeof(*args.p.q.ptr) * l.streamed * l.HS;
    args.p.tiles = l.tiles;
    args.p.group = static_cast<int>(std::clamp<size_t>(kGroupBytes / head_bytes, 1, args.p.heads));
    const size_t blocks = static_cast<size_t>(l.tiles) * args.p.heads;
    if (blocks > INT_MAX)
        throw Error(format("%s: %zu blocks, more than a grid holds (%d): use a smaller batch",
                           l.name, blocks, INT_MAX));
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, l.smem));
    kernel<<<static_cast<unsigned>(blocks), l.threads, l.smem, dev.stream>>>(args);
    LAUNCH_CHECK(l.name);
}
