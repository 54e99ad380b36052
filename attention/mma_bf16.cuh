// What a warp of flash_bf16 does with tiles of bf16 in shared memory: copies, products by mma.sync,
// and the way back. Its accumulators have 16·M rows (mma_tiles.cuh). A k-step is one MMA deep, 16
// terms of each sum.
#pragma once
#include "attention/mma_tiles.cuh"

// -------------------------------------------------------------------------------------------------
// Loads

// Starts copying rows [row0, row0 + Rows) of a head. Rows at or past `end` become zeros.
template <int HS, int Rows, int Threads>
__device__ __forceinline__ void load_tile(uint32_t tile, const bf16* head, size_t row_stride,
                                          int row0, int end) {
    constexpr int Pieces = HS / 8;  // of 16 bytes in a row
    constexpr int RowsAtOnce = Threads / Pieces;
    const int row = threadIdx.x / Pieces;
    const int piece = threadIdx.x % Pieces;
    const bf16* src = head + (row0 + row) * row_stride + piece * 8;
    for (int i = 0; i < Rows; i += RowsAtOnce) {
        cp_async_16(tile + swizzled<HS>(row + i, piece), src, row0 + row + i < end);
        src += RowsAtOnce * row_stride;
    }
}

// A warp's 16·M rows of Q or dO as A operands, one a k-step. They are kept in registers, or else
// each is loaded again whenever it is wanted. `rows` is the address of the rows in shared memory.
template <int HS, int M, bool InRegisters>
struct RowOperand {
    using Operand = uint32_t[M][4];
    Operand regs[InRegisters ? HS / 16 : 1];

    __device__ __forceinline__ void load(uint32_t rows, int kk) {
        load_a<HS>(regs[InRegisters ? kk : 0], rows, kk * 16);
    }
    __device__ __forceinline__ const Operand& kept_or_loaded(uint32_t rows, int kk) {
        if constexpr (!InRegisters)
            load(rows, kk);
        return regs[InRegisters ? kk : 0];
    }
};

// -------------------------------------------------------------------------------------------------
// Products

// One k-step: c (16·M × 8·N) += a · Bᵀ, where B is columns [col, col + 16) of the tile's first 8·N
// rows. These rows are c's columns.
template <int HS, int M, int N>
__device__ __forceinline__ void multiply_abt(float (&c)[M][N][4], const uint32_t (&a)[M][4],
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

// a = the A operand for k-step kk, columns [16·kk, 16·kk + 16) of an accumulator rounded to bf16.
template <int M, int N>
__device__ __forceinline__ void pack_a(uint32_t (&a)[M][4], const float (&c)[M][N][4], int kk) {
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) {
            const float (&x)[4] = c[m][2 * kk + half];
            a[m][2 * half] = pack_bf16(x[0], x[1]);
            a[m][2 * half + 1] = pack_bf16(x[2], x[3]);
        }
}

// One k-step: c (16·M × HS) += a · B, where B is the tile's rows [row, row + 16). The tile's
// columns are c's columns.
template <int HS, int M>
__device__ __forceinline__ void add_ab(float (&c)[M][HS / 8][4], const uint32_t (&a)[M][4],
                                       uint32_t tile, int row) {
#pragma unroll  // or else the compiler unrolls later, when it has already ordered the loads
    for (int n = 0; n < HS / 8; n += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, block16<HS>(tile, row, 8 * n));
        for (int m = 0; m < M; m++) {
            mma_m16n8k16_bf16(c[m][n], a[m], b[0], b[1]);
            mma_m16n8k16_bf16(c[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

// All k-steps: c (16·M × HS) += p · B, where p, an accumulator, is rounded to bf16. B is the tile's
// first 8·N rows.
template <int HS, int M, int N>
__device__ __forceinline__ void add_ab(float (&c)[M][HS / 8][4], const float (&p)[M][N][4],
                                       uint32_t tile) {
    for (int kk = 0; kk < N / 2; kk++) {
        uint32_t a[M][4];
        pack_a(a, p, kk);
        add_ab<HS>(c, a, tile, 16 * kk);
    }
}

// -------------------------------------------------------------------------------------------------
// Results

// Rounds c and writes it to rows [row, row + 16·M) of a tile whose row 0 is at `to`, but none at or
// past `end`. They pass through the warp's own rows of `tile` in shared memory, so that each lane
// writes 16 bytes, and the lanes together write whole rows.
template <int HS, int M>
__device__ __forceinline__ void store_rows(const float (&c)[M][HS / 8][4], unsigned char* tile,
                                           int row, bf16* to, size_t row_stride, int end) {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // the warp has read what these rows held
    for (int m = 0; m < M; m++)
        for (int n = 0; n < HS / 8; n++)
            for (int r = 0; r < 2; r++) {
                const uint32_t packed = pack_bf16(c[m][n][2 * r], c[m][n][2 * r + 1]);
                const int t = fragment_row(row + 16 * m, 2 * r, lane);
                unsigned char* const at = tile + swizzled<HS>(t, n) + (lane % 4) * 4;
                *reinterpret_cast<uint32_t*>(at) = packed;
            }
    __syncwarp();

    constexpr int Pieces = HS / 8;  // of 16 bytes in a row
    const int piece = lane % Pieces;
    for (int i = 0; i < 16 * M; i += 32 / Pieces) {
        const int t = row + i + lane / Pieces;
        if (t < end)
            *reinterpret_cast<uint4*>(to + t * row_stride + piece * 8) =
                *reinterpret_cast<const uint4*>(tile + swizzled<HS>(t, piece));
    }
}
// Results in fp32 are written straight from registers.
template <int HS, int M>
__device__ __forceinline__ void store_rows(const float (&c)[M][HS / 8][4], unsigned char*, int row,
                                           float* to, size_t row_stride, int end) {
    store_rows<HS>(c, row, to, row_stride, end);
}
