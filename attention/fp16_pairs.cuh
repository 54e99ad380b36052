// What flash_fp16x3 computes with: fp32 operands as pairs of fp16.
//
//   x · 2^e = hi + lo                            an operand: 22 bits in two halves
//   hi = fp16(x · 2^e)
//   lo = fp16(x · 2^e − hi)
//   a·b ≈ a_lo·b_hi + a_hi·b_lo + a_hi·b_hi      a product: three MMAs, small terms first
//
// Why fp16? It has as many significand bits as TF32, 11, and its MMAs run at twice the rate. A pair
// takes 4 bytes, not 8, and ldmatrix transposes it. bf16 would take three parts and six products.
// The weakness of fp16 is range. An exact power of two cures it, the 2^e that brings a tile's
// largest magnitude to [2^14, 2^15). Elements down to 2^-17 of the largest keep all 22 bits, and
// none is off by more than 2^-39 of it.
//
// Tensor cores truncate when they add. A sum of one sign loses up to a unit in the last place at
// each step, so over all keys it would drift with T. So each tile's product starts at 0 and takes
// its small terms first. An ordinary FMA then adds it to O, dQ, dK or dV.
#pragma once
#include <cuda_fp16.h>

#include "attention/mma_tiles.cuh"
#include "cuda/ptx_sm80.cuh"

// -------------------------------------------------------------------------------------------------
// Splitting

// The exponent e that brings a largest magnitude, given by its bits, to [2^14, 2^15). It is clamped
// so that 2^e, 2^−e and 2^(−e−14) are normal numbers.
__device__ __forceinline__ int exponent_for(uint32_t largest) {
    const int exponent = static_cast<int>(largest >> 23) - 127;  // 127: float's bias
    return max(-113, min(112, 14 - exponent));
}
__device__ __forceinline__ float power_of_two(int e) {
    return __int_as_float((127 + e) << 23);
}
// 2^e for that e, or NaN if an element is NaN or infinite. The NaN then spreads over the tile.
__device__ __forceinline__ float factor_for(uint32_t largest) {
    constexpr uint32_t kInfinityBits = 0x7f800000;
    constexpr uint32_t kNanBits = 0x7fffffff;
    return largest < kInfinityBits ? power_of_two(exponent_for(largest)) : __int_as_float(kNanBits);
}

// 2^−e, which undoes that factor. It is the operand's unit: x = (hi + lo)·unit.
__device__ __forceinline__ float unit_for(uint32_t largest) {
    return power_of_two(-exponent_for(largest));
}

// Two floats as two pairs of halves, x = hi + lo to 22 bits.
__device__ __forceinline__ void split(uint32_t& hi, uint32_t& lo, float x0, float x1) {
    hi = pack_f16(x0, x1);
    const float2 rounded = __half22float2(*reinterpret_cast<const __half2*>(&hi));
    lo = pack_f16(x0 - rounded.x, x1 - rounded.y);
}

// The bits of the largest magnitude in the warp, where x is this thread's. A NaN's bits are larger
// than any number's.
__device__ __forceinline__ uint32_t warp_largest(float x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, __float_as_uint(x));
#else
    return 0;
#endif
}
// The same of the warp's accumulator.
template <int M, int N>
__device__ __forceinline__ uint32_t warp_largest(const float (&c)[M][N][4]) {
    float m = 0.f;
    for (int i = 0; i < M; i++)
        for (int n = 0; n < N; n++)
            for (int e = 0; e < 4; e++)
                m = max_nan(m, fabsf(c[i][n][e]));
    return warp_largest(m);
}

// threadIdx.x, opaque to the compiler. What follows from it is computed for each tile, not kept in
// registers, which the products need.
__device__ __forceinline__ unsigned opaque_thread_idx() {
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(thread));
    return thread;
}

// x, likewise.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// A split tile in shared memory. Its lo parts follow Lo bytes after its hi parts.
template <int Lo>
struct PairTile {
    uint32_t hi;
    __device__ __forceinline__ uint32_t lo() const { return hi + Lo; }
    __device__ __forceinline__ PairTile at(int bytes) const { return {hi + bytes}; }
};

// A tile consists of pieces of 4 floats, HS/4 a row. Thread t has kPieces of them: t, t + Threads,
// …. Split, a piece is 8 bytes of hi and 8 of lo, half of one of the 16-byte pieces that `swizzled`
// permutes.
template <int HS, int Rows, int Threads>
constexpr int kPieces = Rows * HS / 4 / Threads;

// The largest magnitude in this thread's pieces.
template <int N>
__device__ __forceinline__ float thread_largest(const float4 (&x)[N]) {
    float m = 0.f;
    for (int i = 0; i < N; i++) {
        m = max_nan(m, max_nan(fabsf(x[i].x), fabsf(x[i].y)));
        m = max_nan(m, max_nan(fabsf(x[i].z), fabsf(x[i].w)));
    }
    return m;
}

// Writes a thread's pieces of a tile, times factor, as pairs of halves.
template <int HS, int Threads, int Lo, int N>
__device__ __forceinline__ void store_split(unsigned char* tile, const float4 (&x)[N], float factor,
                                            unsigned thread) {
    constexpr int RowsAtOnce = Threads / (HS / 4);
    const unsigned row = thread / (HS / 4);
    const unsigned piece = thread % (HS / 4);
#pragma unroll  // or else the compiler unrolls later, and orders the instructions differently
    for (int i = 0; i < N; i++) {
        uint2 h;
        uint2 l;
        split(h.x, l.x, x[i].x * factor, x[i].y * factor);
        split(h.y, l.y, x[i].z * factor, x[i].w * factor);
        unsigned char* at = tile + swizzled<HS>(row + i * RowsAtOnce, piece / 2) + piece % 2 * 8;
        *reinterpret_cast<uint2*>(at) = h;
        *reinterpret_cast<uint2*>(at + Lo) = l;
    }
}

// Each warp splits its own rows of an operand that the block keeps, rows [row0, row0 + Rows) of one
// head, and writes them to `tile` as pairs. Rows at or past `end` become zeros. Returns the unit
// that undoes their scale.
template <int HS, int Rows, int Lo>
__device__ __forceinline__ float keep_rows(unsigned char* tile, const float* head,
                                           size_t row_stride, int row0, int end) {
    constexpr int RowsAtOnce = 32 / (HS / 4);
    const unsigned lane = threadIdx.x % 32;
    const int row = row0 + static_cast<int>(lane / (HS / 4));
    const float* src = head + row * row_stride + lane % (HS / 4) * 4;
    float4 rows[kPieces<HS, Rows, 32>];
    for (int i = 0; i < kPieces<HS, Rows, 32>; i++) {
        rows[i] = row + i * RowsAtOnce < end ? *reinterpret_cast<const float4*>(src)
                                             : float4{0.f, 0.f, 0.f, 0.f};
        src += RowsAtOnce * row_stride;
    }
    const uint32_t rows_largest = warp_largest(thread_largest(rows));
    store_split<HS, 32, Lo>(tile, rows, factor_for(rows_largest), lane);
    return unit_for(rows_largest);
}

// -------------------------------------------------------------------------------------------------
// Products

// c (16·M × 16, columns 8·n … of an accumulator) += a · b.
template <int M, int N>
__device__ __forceinline__ void mma(float (&c)[M][N][4], int n, const uint32_t (&a)[M][4],
                                    const uint32_t (&b)[4]) {
    for (int m = 0; m < M; m++) {
        mma_m16n8k16_f16(c[m][n], a[m], b[0], b[1]);
        mma_m16n8k16_f16(c[m][n + 1], a[m], b[2], b[3]);
    }
}

// Columns 8·n … 8·n + 15 of c += x.
template <int M, int N>
__device__ __forceinline__ void add_columns(float (&c)[M][N][4], int n, const float (&x)[M][2][4]) {
    for (int m = 0; m < M; m++)
        for (int i = 0; i < 2; i++)
            for (int e = 0; e < 4; e++)
                c[m][n + i][e] += x[m][i][e];
}

// c (16·M × 8·N) += A · Bᵀ over HS: the small terms, then the large ones, in 1 or 2 chains. A's
// rows are the first of a_tile, and c's columns are the first rows of b_tile. S takes 2 chains,
// because a long chain drifts and S's absolute error is P's relative error.
template <int HS, int Chains, int M, int N, int ALo, int BLo>
__device__ __forceinline__ void multiply_abt(float (&c)[M][N][4], PairTile<ALo> a_tile,
                                             PairTile<BLo> b_tile) {
    uint32_t hi[M][4];
    uint32_t lo[M][4];
    uint32_t b[4];
    a_tile.hi = opaque(a_tile.hi);
    b_tile.hi = opaque(b_tile.hi);
#pragma unroll 2  // not all, because the compiler would fetch so far ahead that it spills
    for (int d = 0; d < HS; d += 16) {
        load_a<HS>(hi, a_tile.hi, d);
        load_a<HS>(lo, a_tile.lo(), d);
        for (int n = 0; n < N; n += 2) {
            ldmatrix_x4(b, block16_b<HS>(b_tile.hi, 8 * n, d));
            mma(c, n, lo, b);
            ldmatrix_x4(b, block16_b<HS>(b_tile.lo(), 8 * n, d));
            mma(c, n, hi, b);
        }
    }
#pragma unroll 2  // not all, because the compiler would fetch so far ahead that it spills
    for (int d = 0; d < HS / Chains; d += 16) {
        load_a<HS>(hi, a_tile.hi, d);
        for (int n = 0; n < N; n += 2) {
            ldmatrix_x4(b, block16_b<HS>(b_tile.hi, 8 * n, d));
            mma(c, n, hi, b);
        }
    }
    if constexpr (Chains == 2)
        for (int n = 0; n < N; n += 2) {
            float chain[M][2][4] = {};
            for (int d = HS / 2; d < HS; d += 16) {
                load_a<HS>(hi, a_tile.hi, d);
                ldmatrix_x4(b, block16_b<HS>(b_tile.hi, 8 * n, d));
                mma(chain, 0, hi, b);
            }
            add_columns(c, n, chain);
        }
}

// sum (16·M × HS) += unit · A · B over K: for a slice of columns at a time the small terms, then
// the large ones. B is K rows of `tile`.
template <int HS, int K, int M, int Lo>
__device__ __forceinline__ void add_ab(float (&sum)[M][HS / 8][4],
                                       const uint32_t (&hi)[K / 16][M][4],
                                       const uint32_t (&lo)[K / 16][M][4], PairTile<Lo> tile,
                                       float unit) {
    constexpr int Slice = 4 / M;  // times 8 columns: M · Slice = 4 independent accumulators
    tile.hi = opaque(tile.hi);
    for (int n0 = 0; n0 < HS / 8; n0 += Slice) {
        float c[M][Slice][4] = {};
        uint32_t b_hi[K / 16][Slice / 2][4];
        uint32_t b[4];
        // [quote]
        for (int kk = 0; kk < K / 16; kk++)
            for (int n = 0; n < Slice; n += 2) {
                ldmatrix_x4_trans(b_hi[kk][n / 2], block16<HS>(tile.hi, 16 * kk, 8 * (n0 + n)));
                mma(c, n, lo[kk], b_hi[kk][n / 2]);
                ldmatrix_x4_trans(b, block16<HS>(tile.lo(), 16 * kk, 8 * (n0 + n)));
                mma(c, n, hi[kk], b);
            }
        for (int kk = 0; kk < K / 16; kk++)
            for (int n = 0; n < Slice; n += 2)
                mma(c, n, hi[kk], b_hi[kk][n / 2]);
        // [end]
        for (int m = 0; m < M; m++)
            for (int n = 0; n < Slice; n++)
                for (int e = 0; e < 4; e++)
                    sum[m][n0 + n][e] = fmaf(c[m][n][e], unit, sum[m][n0 + n][e]);
    }
}

// Two floats from two pairs of halves.
__device__ __forceinline__ float2 join(uint32_t hi, uint32_t lo) {
    const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&hi));
    const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&lo));
    return make_float2(a.x + b.x, a.y + b.y);
}

// hi, lo = A operands made of an accumulator times factor.
template <int M, int N>
__device__ __forceinline__ void pack_a(uint32_t (&hi)[N / 2][M][4], uint32_t (&lo)[N / 2][M][4],
                                       const float (&c)[M][N][4], float factor) {
    for (int kk = 0; kk < N / 2; kk++)
        for (int m = 0; m < M; m++)
            for (int i = 0; i < 4; i++) {
                const float* x = &c[m][2 * kk + i / 2][i % 2 * 2];
                split(hi[kk][m][i], lo[kk][m][i], x[0] * factor, x[1] * factor);
            }
}

// -------------------------------------------------------------------------------------------------
// Streamed tiles

// The streamed tiles of two tensors x and y (K and V, or Q and dO). They are copied as floats while
// the block works on those before them, then split.
template <int HS, int Rows, int Threads>
struct Stream {
    // In bytes.
    static constexpr int Lo = Rows * HS * static_cast<int>(sizeof(half));  // a tile's hi parts
    static constexpr int TileBytes = 2 * Lo;  // a tile as pairs, and also as floats
    static constexpr int Bytes = 4 * TileBytes;

    static constexpr int Pieces = kPieces<HS, Rows, Threads>;

    // The bits of the tiles' largest magnitudes.
    struct Largest {
        uint32_t x;
        uint32_t y;
    };

    unsigned char* smem;  // four tiles: x as pairs, y as pairs, x as floats, y as floats

    __device__ __forceinline__ PairTile<Lo> x_tile() const { return {smem_address(smem)}; }
    __device__ __forceinline__ PairTile<Lo> y_tile() const {
        return {smem_address(smem) + TileBytes};
    }

    // Starts copying rows [row0, row0 + Rows) of one head. Rows at or past `end` become zeros. This
    // needs no barrier, because each thread will read only what it copied itself.
    __device__ __forceinline__ void copy(const HeadsView<const float>& x,
                                         const HeadsView<const float>& y, const WorkTile& w,
                                         int row0, int end) const {
        const float* x_head = w.head<HS>(x);
        const float* y_head = w.head<HS>(y);
        copy_tile(smem_address(smem) + 2 * TileBytes, x_head, x.token_stride, row0, end);
        copy_tile(smem_address(smem) + 3 * TileBytes, y_head, y.token_stride, row0, end);
    }
    static __device__ __forceinline__ void copy_tile(uint32_t floats, const float* head,
                                                     size_t row_stride, int row0, int end) {
        constexpr int RowsAtOnce = Threads / (HS / 4);
        const unsigned thread = opaque_thread_idx();
        const int row = row0 + static_cast<int>(thread / (HS / 4));
        const float* src = head + row * row_stride + thread % (HS / 4) * 4;
        for (int i = 0; i < Pieces; i++) {
            cp_async_16(floats + (thread + i * Threads) * 16, src, row + i * RowsAtOnce < end);
            src += RowsAtOnce * row_stride;
        }
    }

    // Splits what has arrived, once all warps have left the last tile. When it returns, the next
    // floats may be copied, and after a barrier all warps find this tile. seen(x) is called with
    // this thread's pieces of x. Rows of y are multiplied by factor(row). y's largest magnitude is
    // found before that, because the factors are too close to 1 to matter to it.
    template <class Seen, class Factor>
    __device__ __forceinline__ Largest split_tiles(Seen seen, Factor factor) const {
        constexpr int Warps = Threads / 32;
        constexpr int RowsAtOnce = Threads / (HS / 4);
        static_assert(Warps == 4, "four maxima are read at once");
        __shared__ struct {
            alignas(16) uint32_t x[Warps];
            alignas(16) uint32_t y[Warps];
        } maxima;  // the bits of each warp's
        const unsigned thread = opaque_thread_idx();
        cp_async_wait<0>();
        const float4* x_floats = reinterpret_cast<const float4*>(smem + 2 * TileBytes) + thread;
        const float4* y_floats = reinterpret_cast<const float4*>(smem + 3 * TileBytes) + thread;
        float4 x[Pieces];
        float4 y[Pieces];
        for (int i = 0; i < Pieces; i++) {
            x[i] = x_floats[i * Threads];
            y[i] = y_floats[i * Threads];
        }
        seen(x);

        const uint32_t x_max = warp_largest(thread_largest(x));
        const uint32_t y_max = warp_largest(thread_largest(y));
        if (thread % 32 == 0) {
            maxima.x[thread / 32] = x_max;
            maxima.y[thread / 32] = y_max;
        }
        __syncthreads();  // the maxima are there, and all have left the last tile

        const uint4 a = *reinterpret_cast<const uint4*>(maxima.x);
        const uint4 b = *reinterpret_cast<const uint4*>(maxima.y);
        const uint32_t x_all = max(max(a.x, a.y), max(a.z, a.w));
        const uint32_t y_all = max(max(b.x, b.y), max(b.z, b.w));
        store_split<HS, Threads, Lo>(smem, x, factor_for(x_all), thread);
        for (int i = 0; i < Pieces; i++) {
            y[i] = y_floats[i * Threads];  // read again for lack of registers
            const float f = factor(thread / (HS / 4) + i * RowsAtOnce);
            y[i].x *= f;
            y[i].y *= f;
            y[i].z *= f;
            y[i].w *= f;
        }
        store_split<HS, Threads, Lo>(smem + TileBytes, y, factor_for(y_all), thread);
        return {.x = x_all, .y = y_all};
    }
    __device__ __forceinline__ Largest split_tiles() const {
        return split_tiles([](const auto&) {}, [](int) { return 1.f; });
    }
};
