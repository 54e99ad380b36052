// What flash_bf16, flash_fp16x3 and dev/study_accumulation share: tiles of 16-bit elements in
// shared memory, and launches that cover each tile of each head.
#pragma once
#include <algorithm>
#include <type_traits>

#include "attention/fragments.cuh"
#include "attention/launch.h"

// -------------------------------------------------------------------------------------------------
// Tiles in shared memory are rows of HS elements. The 16-byte pieces of a row are permuted: piece c
// of row r is stored at c ^ (r % 8). Eight rows of one column are then in eight different bank
// groups, so that ldmatrix reads them without conflict.

// Byte offset of a piece in a tile.
template <int HS>
__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
    const int row_start = row * HS * 2;
    const int place = piece ^ (row & 7);  // in the row
    return row_start + (place << 4);
}

// The address that this lane gives ldmatrix for the 16×16 block of a tile at (row, col). Lanes
// 8i … 8i+7 give the rows of quadrant i, in the order upper left, lower left, upper right, lower
// right. This is the order of an A operand, and of a B operand that is loaded transposed.
//
// row and col are multiples of 16 and known to the compiler, so that one register, `first`, serves
// all blocks of the tile:
//   row   16 rows further down r % 8 is the same, and so is the swizzle. The offset is added.
//   col   The block begins at piece c = col / 8, an even number. So this lane's piece, 0 or 1 in
//         the block at (0, 0), is c + piece = c ^ piece, and its place is
//         (c ^ piece) ^ (r % 8) = c ^ (piece ^ (r % 8)). In bytes that is `first` ^ 16·c. It flips
//         only bits of the offset within a row. In the tile's address these are 0, because tiles
//         start at multiples of a row's length.
template <int HS>
__device__ __forceinline__ uint32_t block16(uint32_t tile, int row, int col) {
    const int lane = threadIdx.x % 32;
    const uint32_t first = tile + swizzled<HS>(lane % 16, lane / 16);  // of the block at (0, 0)
    return (first ^ (col * 2)) + row * HS * 2;
}
// The same in the order upper left, upper right, lower left, lower right, for a B operand whose
// columns are the tile's rows. The two registers of a B operand must be neighbours, or the compiler
// adds two moves to every MMA.
template <int HS>
__device__ __forceinline__ uint32_t block16_b(uint32_t tile, int row, int col) {
    const int lane = threadIdx.x % 32;
    const uint32_t first = tile + swizzled<HS>(lane % 8 + (lane / 16) * 8, (lane / 8) % 2);
    return (first ^ (col * 2)) + row * HS * 2;
}

// a = the A operand made of the tile's first 16·M rows and columns [col, col + 16).
template <int HS, int M>
__device__ __forceinline__ void load_a(uint32_t (&a)[M][4], uint32_t tile, int col) {
    for (int m = 0; m < M; m++)
        ldmatrix_x4(a[m], block16<HS>(tile, 16 * m, col));
}

// -------------------------------------------------------------------------------------------------
// Accumulators of 16·M rows: M accumulators as in fragments.cuh, one below the other.

template <int M, int N>
__device__ __forceinline__ void scale(float (&c)[M][N][4], float factor) {
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++)
            for (int e = 0; e < 4; e++)
                c[m][n][e] *= factor;
}
// Row r = 0 or 1 of this lane's two among the m-th 16, times factor.
template <int M, int N>
__device__ __forceinline__ void scale_row(float (&c)[M][N][4], int m, int r, float factor) {
    scale_row(c[m], r, factor);
}

// Writes c to rows [row, row + 16·M) of a tile whose row 0 is at `to`, but none at or past `end`.
template <int HS, int M>
__device__ __forceinline__ void store_rows(const float (&c)[M][HS / 8][4], int row, float* to,
                                           size_t row_stride, int end) {
    const int lane = threadIdx.x % 32;
    for (int m = 0; m < M; m++)
        for (int r = 0; r < 2; r++) {
            const int t = fragment_row(row + 16 * m, 2 * r, lane);
            if (t >= end)
                continue;
            float2* pairs = reinterpret_cast<float2*>(to + t * row_stride) + lane % 4;
            for (int n = 0; n < HS / 8; n++)
                pairs[4 * n] = make_float2(c[m][n][2 * r], c[m][n][2 * r + 1]);
        }
}

// -------------------------------------------------------------------------------------------------
// Arguments

// What the arguments of both directions begin with.
template <class X>
struct Problem {
    HeadsView<const X> q;
    HeadsView<const X> k;
    HeadsView<const X> v;
    int NH;
    int Tq;
    int Tk;
    int heads;  // B·NH
    int shift;  // query i sees keys j ≤ i + shift
    int tiles;  // of a head, one a block
    int group;  // heads that are worked on together
    float scale;
    float scale_log2;  // scale·log2(e), for exponentials that are powers of 2
};

// All but `tiles` and `group`, which launch() adds.
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

template <class X, class Y>
struct ForwardArgs {
    Problem<X> p;
    HeadsView<Y> out;
    RowStatsView<float> lse;
    RowStatsView<float> lse_rest = {};
};

// -------------------------------------------------------------------------------------------------
// What a block works on

// Blocks are numbered in groups of heads, so that those running at once share streamed tiles in L2.
// Within a group all heads have one tile, then all have the next.
template <class X>
__device__ __forceinline__ WorkTile work_tile(const Problem<X>& p, TileOrder order) {
    const unsigned block = blockIdx.x;
    const int blocks_of_group = p.group * p.tiles;
    const int first_head = block / blocks_of_group * p.group;       // of this block's group
    const int heads_of_group = min(p.group, p.heads - first_head);  // the last may have fewer
    const int i = block - first_head * p.tiles;  // the block's number within its group
    const int nth = i / heads_of_group;          // of the head's tiles, in `order`
    const int bh = first_head + i % heads_of_group;
    return {.tile = order == TileOrder::last_to_first ? p.tiles - 1 - nth : nth,
            .bh = bh,
            .b = bh / p.NH,
            .h = bh % p.NH};
}
// How many tiles of Bc keys a tile of Br queries sees.
template <int Br, int Bc, class X>
__device__ __forceinline__ int visible_tiles(const Problem<X>& p, int tile) {
    // the last query sees the keys before this one
    const int k_end = min(p.Tk, min((tile + 1) * Br, p.Tq) + p.shift);
    return ceil_div<Bc>(k_end);
}

// -------------------------------------------------------------------------------------------------
// Launches

// Each head has `tiles` blocks. `streamed_rows` rows of two tensors, K and V or Q and dO, pass by
// each block.
struct Launch {
    const char* name;
    int HS;
    int tiles;
    int streamed_rows;
    int threads;
    int smem;  // bytes
};
template <class Args>
void launch(const Cuda& dev, const Launch& l, void (*kernel)(Args), Args args) {
    // The streamed rows of a group of heads should stay well inside L2 (40 MB on an A100, 50 MB on
    // an H100).
    constexpr size_t kGroupBytes = 32 << 20;
    const size_t head_bytes = 2 * sizeof(*args.p.q.ptr) * l.streamed_rows * l.HS;
    args.p.tiles = l.tiles;
    args.p.group = static_cast<int>(std::clamp<size_t>(kGroupBytes / head_bytes, 1, args.p.heads));

    const unsigned blocks = count_blocks(l.name, l.tiles, args.p.heads);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, l.smem));
    kernel<<<blocks, l.threads, l.smem, dev.stream>>>(args);
    LAUNCH_CHECK(l.name);
}
