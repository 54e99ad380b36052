// What a warp of flash_bf16 does with tiles of bf16 in shared memory: copies, products by mma.sync,
// and the way back.
//
// c, an accumulator of 16·M rows and 8·N columns, lies in registers as M × N fragments of m16n8k16.
// Of each this lane holds elements e = 0 … 3, at row lane/4 + e/2·8 and column lane%4·2 + e%2 (see
// mma_m16n8k16_bf16).
#pragma once
#include "attention/mma_tiles.cuh"

// Starts copying rows [row0, row0 + Rows) of one head. Rows at or past `end` become zeros.
template <int HS, int Rows, int Threads>
__device__ __forceinline__ void load_tile(uint32_t tile, const bf16* head, size_t token, int row0,
                                          int end) {
    constexpr int Pieces = HS / 8;
    constexpr int RowsAtOnce = Threads / Pieces;
    const int row = threadIdx.x / Pieces;
    const int piece = threadIdx.x % Pieces;
    const bf16* src = head + (row0 + row) * token + piece * 8;
    for (int i = 0; i < Rows; i += RowsAtOnce, src += RowsAtOnce * token)
        cp_async_16(tile + swizzled<HS>(row + i, piece), src, row0 + row + i < end);
}

// A warp's 16·M rows of Q or dO as A operands. They stay in registers, or else every k-step loads
// its own again.
template <int HS, int M, bool InRegisters>
struct RowOperand {
    uint32_t regs[InRegisters ? HS / 16 : 1][M][4];
    __device__ __forceinline__ void load(uint32_t rows, int kk) {
        load_a<HS>(regs[InRegisters ? kk : 0], rows, kk * 16);
    }
    __device__ __forceinline__ const uint32_t (&at(uint32_t rows, int kk)) [M][4] {
        if constexpr (!InRegisters)
            load(rows, kk);
        return regs[InRegisters ? kk : 0];
    }
};

// c (16·M × 8·N) += a · Bᵀ over one k-step, [col, col + 16) of the tile's columns. c's columns are
// its first 8·N rows.
template <int HS, int M, int N>
__device__ __forceinline__ void mma_abt(float (&c)[M][N][4], const uint32_t (&a)[M][4],
                                        uint32_t tile, int col) {
    for (int n = 0; n < N; n += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, block16_b<HS>(tile, 8 * n, col));
        for (int m = 0; m < M; m++) {
            mma_m16n8k16_bf16(c[m][n], a[m], b[0], b[1]);
            mma_m16n8k16_bf16(c[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

// c (16·M × HS) += a · B over one k-step, the tile's rows [row, row + 16). c's columns are the
// tile's columns.
template <int HS, int M>
__device__ __forceinline__ void mma_ab(float (&c)[M][HS / 8][4], const uint32_t (&a)[M][4],
                                       uint32_t tile, int row) {
#pragma unroll  // before the compiler orders the loads, not after
    for (int n = 0; n < HS / 8; n += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, block16<HS>(tile, row, 8 * n));
        for (int m = 0; m < M; m++) {
            mma_m16n8k16_bf16(c[m][n], a[m], b[0], b[1]);
            mma_m16n8k16_bf16(c[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

// Makes a, the A operand for k-step `kk`, of columns [16·kk, 16·kk + 16) of an accumulator, rounded
// to bf16.
template <int M, int N>
__device__ __forceinline__ void to_a(uint32_t (&a)[M][4], const float (&c)[M][N][4], int kk) {
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) {
            a[m][2 * half] = pack_bf16(c[m][2 * kk + half][0], c[m][2 * kk + half][1]);
            a[m][2 * half + 1] = pack_bf16(c[m][2 * kk + half][2], c[m][2 * kk + half][3]);
        }
}

// c (16·M × HS) += s · B, where s, an accumulator, is rounded to bf16. B is the tile's first 8·N
// rows.
template <int HS, int M, int N>
__device__ __forceinline__ void add_product(float (&c)[M][HS / 8][4], const float (&s)[M][N][4],
                                            uint32_t tile) {
    for (int kk = 0; kk < N / 2; kk++) {
        uint32_t a[M][4];
        to_a(a, s, kk);
        mma_ab<HS>(c, a, tile, 16 * kk);
    }
}

// c holds rows [row, row + 16·M) of a tile whose row 0 is dst. Rounds them and writes those before
// `end`. They pass through the warp's own rows of `tile` in shared memory. So each lane writes 16
// bytes, and the lanes together write whole rows.
template <int HS, int M>
__device__ __forceinline__ void store_tile(const float (&c)[M][HS / 8][4], unsigned char* tile,
                                           int row, bf16* dst, size_t token, int end) {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // the warp has read what these rows held
    for (int m = 0; m < M; m++)
        for (int n = 0; n < HS / 8; n++)
            for (int r = 0; r < 2; r++)
                *reinterpret_cast<uint32_t*>(
                    tile + swizzled<HS>(row + 16 * m + 8 * r + lane / 4, n) + lane % 4 * 4) =
                    pack_bf16(c[m][n][2 * r], c[m][n][2 * r + 1]);
    __syncwarp();
    constexpr int Pieces = HS / 8;
    for (int i = 0; i < 16 * M; i += 32 / Pieces) {
        const int r = row + i + lane / Pieces;
        const int piece = lane % Pieces;
        if (r < end)
            *reinterpret_cast<uint4*>(dst + r * token + piece * 8) =
                *reinterpret_cast<const uint4*>(tile + swizzled<HS>(r, piece));
    }
}
// The same for results in fp32, which leave from registers.
template <int HS, int M>
__device__ __forceinline__ void store_tile(const float (&c)[M][HS / 8][4], unsigned char*, int row,
                                           float* dst, size_t token, int end) {
    store_rows<HS>(c, row, dst, token, end);
}
