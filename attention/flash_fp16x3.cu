// Flash attention forward and backward with fp32's accuracy on tensor cores: mma.sync on split fp16 (sm_80+).
//
//   x · 2^e = hi + lo,  hi = fp16(x · 2^e),  lo = fp16(x · 2^e − hi)      an operand: 22 bits in two halves
//   a·b ≈ a_lo·b_hi + a_hi·b_lo + a_hi·b_hi                              a product: three MMAs, small terms first
//
//   forward    S = scale·Q Kᵀ            (Br × Bc, fp32 registers)
//              m' = max(m, rowmax S);  P = exp(S − m');  l = e^{m−m'} l + rowsum P;  O = e^{m−m'} O + P V
//              out = O / l;  lse = m + log l
//   backward   D = rowsum(dO∘O);  P = exp(S − lse);  dP = dO Vᵀ;  dS = P∘(dP − D)
//              dQ = scale·dS K;  dK = scale·dSᵀ Q;  dV = Pᵀ dO
//
// Why fp16? It has TF32's 11 significand bits, so a pair keeps as much as a pair of TF32 numbers. But its MMAs run at
// twice the rate, a pair takes 4 bytes instead of 8, and ldmatrix transposes it. bf16 would take three parts and six
// products. fp16's weakness is its range. Powers of two cure that, and they are exact: 2^e brings the largest magnitude
// of a tile to [2^14, 2^15). Elements down to 2^-17 of the largest keep all 22 bits, and none is off by more than 2^-39
// of it.
//
// The scales are undone at no cost. The factor that turns S into an exponent of 2 includes those of Q and K. The factor
// with which a tile's product is added to the sum includes those of V (and P), dO, Q and K.
//
// Tiles are summed twice because tensor cores truncate when they add. A sum of one sign loses up to a unit for each
// step, always towards zero, so a sum over all keys would drift with T. A tile's product therefore starts at 0, takes
// all its small terms before the first large one, and an ordinary FMA adds it to O, dQ, dK or dV.
//
// New against flash_bf16: tiles arrive as floats (cp.async, one tile ahead) and the block splits them in shared memory.
// That takes one barrier after the largest magnitude is known and one after the tile is written. The rest is
// flash_bf16's structure. A warp owns 32 rows (16 at HS 128). Backward is two kernels that each write what they own,
// without atomics. Non-causal is a mask that hides nothing.
//
// Backward scales a tile of dS by its own largest magnitude. D comes from the same MMAs as dP, as the diagonal of
// dO Oᵀ, so that dP − D is 0 where one key has all the weight. In the whole form two sums of a row show errors that all
// its keys share. Its dS should add up to 0, and their sum is D's error. Its P should add up to 1, and what is missing is
// lse's error. dq_kernel corrects D and lse, which dkdv_kernel reads, and dQ. It walks rows of few keys twice. The block
// form has no such check, because it sees only part of a row.
//
// Writes: forward writes out and lse, backward dqkv (every element). The block form merges into o_acc and lse, adds
// into dq_sum, and adds into or writes dk and dv.
// Scratch: float2 {log2(e)·lse, D·factor} and float factor (B, NH, q_rows), which dq_kernel writes for dkdv_kernel.
// Limits: HS in {64, 128}, any T ≥ 1, scale > 0. A NaN or infinity spreads over the tile it is in.
// Run: ./dev/bench_attention --kernel flash_fp16x3
#include <cuda_fp16.h>

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>

#include "attention/attention.h"
#include "attention/merge.cuh"
#include "attention/mma_tiles.cuh"
#include "attention/partial.h"
#include "layers/gpu/ptx_sm80.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#pragma nv_diag_suppress 177  // kernels have empty bodies there, and what only they use is "never referenced"
#endif

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Tiles. A warp owns MTiles MMA tiles of 16 rows and takes Sub rows of the streamed operand at a time. Two blocks of
// 128 threads share an SM, which allows 255 registers a thread and, on sm_90, 113 KB of shared memory a block. sm_86,
// sm_89 and sm_120 have only 99 KB in all. An element takes 4 bytes as a float and 4 as a pair of halves.

template <int HS>
struct ForwardTiles {
    static constexpr int Warps = 4, MTiles = HS == 64 ? 2 : 1, Threads = 32 * Warps, MinBlocks = 2;
    static constexpr int Br = Warps * MTiles * 16;
    static constexpr int Bc = HS == 64 ? 64 : 32;
    static constexpr int Sub = 32;
    // 80 KB: K and V as pairs (at first Q's hi part lies there), K and V as floats, Q's lo part
    static constexpr int QLo = 16 * Bc * HS, Smem = QLo + 2 * Br * HS;
};

template <int HS>
struct DqTiles {
    static constexpr int Warps = 4, MTiles = HS == 64 ? 2 : 1, Threads = 32 * Warps, MinBlocks = 2;
    static constexpr int Br = Warps * MTiles * 16;
    static constexpr int Bc = HS == 64 ? 32 : 16;
    static constexpr int Smem = 8 * Br * HS + 16 * Bc * HS;  // 96 KB: Q and dO, then K and V as pairs and as floats
};

template <int HS>
struct DkdvTiles {
    static constexpr int Warps = 4, MTiles = HS == 64 ? 2 : 1, Threads = 32 * Warps, MinBlocks = 2;
    static constexpr int Bc = Warps * MTiles * 16;
    static constexpr int Br = HS == 64 ? 32 : 16;
    // Just over 96 KB: K and V, then Q and dO as pairs and as floats, then 2 stages of row statistics
    static constexpr int Smem = 8 * Bc * HS + 16 * Br * HS + 2 * Br * 12;
};

// ---------------------------------------------------------------------------------------------------------------------
// Splitting

// The exponent e that brings a largest magnitude, given by its bits, to [2^14, 2^15). It is clamped so that 2^e, 2^−e
// and 2^(−e−14) are normal numbers.
__device__ __forceinline__ int exponent_for(uint32_t largest) {
    return max(-113, min(112, 141 - static_cast<int>(largest >> 23)));
}
__device__ __forceinline__ float power_of_two(int e) {
    return __int_as_float((127 + e) << 23);
}
// 2^e for that e, or NaN if an element is NaN or infinite. The NaN then spreads over the tile.
__device__ __forceinline__ float factor_for(uint32_t largest) {
    return largest < 0x7f800000u ? power_of_two(exponent_for(largest)) : __int_as_float(0x7fffffff);
}

// Two floats as two pairs of halves, x = hi + lo to 22 bits.
__device__ __forceinline__ void split(uint32_t& hi, uint32_t& lo, float x0, float x1) {
    hi = pack_f16(x0, x1);
    const float2 rounded = __half22float2(*reinterpret_cast<const __half2*>(&hi));
    lo = pack_f16(x0 - rounded.x, x1 - rounded.y);
}

// The bits of the largest magnitude in the warp. A NaN's bits are larger than any number's.
__device__ __forceinline__ uint32_t warp_largest(float x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, __float_as_uint(x));
#else
    return 0;
#endif
}

// Reads threadIdx.x again, so that addresses that follow from it are computed anew for each tile. Otherwise the
// compiler would keep them in registers, which the products need.
__device__ __forceinline__ unsigned thread_again() {
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(thread));
    return thread;
}

// Does the same for values that follow from x.
__device__ __forceinline__ uint32_t again(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// In shared memory the tile of lo parts follows the tile of hi parts.

// A tile consists of pieces of 4 floats, HS/4 a row. Thread t has kPieces of them, t, t + Threads, …
template <int HS, int Rows, int Threads>
constexpr int kPieces = Rows* HS / 4 / Threads;

// Starts copying rows [row0, row0 + Rows) of one head as they are. Rows at or past `end` become zeros. No barrier is
// needed, because each thread will read only what it copied itself.
template <int HS, int Rows, int Threads>
__device__ __forceinline__ void copy_tile(uint32_t stage, const float* head, size_t token, int row0, int end) {
    constexpr int RowsAtOnce = Threads / (HS / 4);
    const unsigned thread = thread_again();
    const int row = row0 + static_cast<int>(thread / (HS / 4));
    const float* src = head + row * token + thread % (HS / 4) * 4;
    for (int i = 0; i < kPieces<HS, Rows, Threads>; i++, src += RowsAtOnce * token)
        cp_async_16(stage + (thread + i * Threads) * 16, src, row + i * RowsAtOnce < end);
}

template <int N>
__device__ __forceinline__ float largest(const float4 (&x)[N]) {
    float m = 0.f;
    for (int i = 0; i < N; i++) {
        m = max_nan(m, max_nan(fabsf(x[i].x), fabsf(x[i].y)));
        m = max_nan(m, max_nan(fabsf(x[i].z), fabsf(x[i].w)));
    }
    return m;
}

// Writes a thread's pieces of a tile, times factor, as pairs of halves.
template <int HS, int Threads, int N>
__device__ __forceinline__ void store_split(unsigned char* tile, int lo, const float4 (&x)[N], float factor,
                                            unsigned thread) {
    const unsigned row = thread / (HS / 4), col = thread % (HS / 4);
#pragma unroll
    for (int i = 0; i < N; i++) {
        uint2 h, l;
        split(h.x, l.x, x[i].x * factor, x[i].y * factor);
        split(h.y, l.y, x[i].z * factor, x[i].w * factor);
        unsigned char* at = tile + swizzled<HS>(row + i * (Threads / (HS / 4)), col / 2) + col % 2 * 8;
        *reinterpret_cast<uint2*>(at) = h;
        *reinterpret_cast<uint2*>(at + lo) = l;
    }
}

// Each warp fetches and splits its own rows of an operand that the block keeps. fetch_rows reads rows
// [row0, row0 + Rows) of one head. Rows at or past `end` become zeros. keep_rows writes them to `tile` as pairs and
// returns the bits of their largest magnitude.
template <int HS, int Rows>
__device__ __forceinline__ void fetch_rows(float4 (&x)[kPieces<HS, Rows, 32>], const float* head, size_t token,
                                           int row0, int end) {
    const unsigned lane = threadIdx.x % 32;
    const int row = row0 + static_cast<int>(lane / (HS / 4));
    const float* src = head + row * token + lane % (HS / 4) * 4;
    for (int i = 0; i < kPieces<HS, Rows, 32>; i++, src += 32 / (HS / 4) * token)
        x[i] = row + i * (32 / (HS / 4)) < end ? *reinterpret_cast<const float4*>(src) : float4{0.f, 0.f, 0.f, 0.f};
}
template <int HS, int Rows>
__device__ __forceinline__ uint32_t keep_rows(unsigned char* tile, int lo, const float4 (&x)[kPieces<HS, Rows, 32>]) {
    const uint32_t m = warp_largest(largest(x));
    store_split<HS, 32>(tile, lo, x, factor_for(m), threadIdx.x % 32);
    return m;
}

// ---------------------------------------------------------------------------------------------------------------------
// Products

// a = the A operand made of the tile's first 16·M rows and k-step [col, col + 16).
template <int HS, int M>
__device__ __forceinline__ void load_a(uint32_t (&a)[M][4], uint32_t tile, int col) {
    for (int m = 0; m < M; m++) ldmatrix_x4(a[m], block16<HS>(tile, 16 * m, col));
}

// c (16·M × 16, columns 8·n … of an accumulator) += a · b.
template <int M, int N>
__device__ __forceinline__ void mma(float (&c)[M][N][4], int n, const uint32_t (&a)[M][4], const uint32_t (&b)[4]) {
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
            for (int e = 0; e < 4; e++) c[m][n + i][e] += x[m][i][e];
}

// c (16·M × 8·N) += A · Bᵀ over HS. A's rows are the first of tile a, and c's columns are the first rows of tile b. All
// small terms come before the first large one. S adds its large terms in two chains, because tensor cores truncate when
// they add. A long chain of one sign drifts, and S's absolute error is P's relative error.
template <int HS, int Chains, int M, int N>
__device__ __forceinline__ void product_abt(float (&c)[M][N][4], uint32_t a_tile, int a_lo, uint32_t b_tile, int b_lo) {
    uint32_t hi[M][4], lo[M][4], b[4];
    a_tile = again(a_tile), b_tile = again(b_tile);
#pragma unroll 2  // not all, because the compiler would fetch so far ahead that it spills
    for (int kk = 0; kk < HS; kk += 16) {
        load_a<HS>(hi, a_tile, kk);
        load_a<HS>(lo, a_tile + a_lo, kk);
        for (int n = 0; n < N; n += 2) {
            ldmatrix_x4(b, block16_b<HS>(b_tile, 8 * n, kk));
            mma(c, n, lo, b);
            ldmatrix_x4(b, block16_b<HS>(b_tile + b_lo, 8 * n, kk));
            mma(c, n, hi, b);
        }
    }
#pragma unroll 2  // not all, because the compiler would fetch so far ahead that it spills
    for (int kk = 0; kk < HS / Chains; kk += 16) {
        load_a<HS>(hi, a_tile, kk);
        for (int n = 0; n < N; n += 2) {
            ldmatrix_x4(b, block16_b<HS>(b_tile, 8 * n, kk));
            mma(c, n, hi, b);
        }
    }
    if constexpr (Chains == 2)
        for (int n = 0; n < N; n += 2) {
            float chain[M][2][4] = {};
            for (int kk = HS / 2; kk < HS; kk += 16) {
                load_a<HS>(hi, a_tile, kk);
                ldmatrix_x4(b, block16_b<HS>(b_tile, 8 * n, kk));
                mma(chain, 0, hi, b);
            }
            add_columns(c, n, chain);
        }
}

// sum (16·M × HS) += unit · A · B over K. The K rows and HS columns of B are those of `tile`. The tensor cores add up a
// slice of columns over K only. Ordinary additions, which round to nearest, make the long sum.
template <int HS, int K, int M>
__device__ __forceinline__ void add_product_ab(float (&sum)[M][HS / 8][4], const uint32_t (&hi)[K / 16][M][4],
                                               const uint32_t (&lo)[K / 16][M][4], uint32_t tile, int b_lo,
                                               float unit) {
    constexpr int Slice = 4 / M;  // 4 independent accumulators
    tile = again(tile);
    for (int n0 = 0; n0 < HS / 8; n0 += Slice) {
        float c[M][Slice][4] = {};
        uint32_t b_hi[K / 16][Slice / 2][4], b[4];
        for (int kk = 0; kk < K / 16; kk++)
            for (int n = 0; n < Slice; n += 2) {
                ldmatrix_x4_trans(b_hi[kk][n / 2], block16<HS>(tile, 16 * kk, 8 * (n0 + n)));
                mma(c, n, lo[kk], b_hi[kk][n / 2]);
                ldmatrix_x4_trans(b, block16<HS>(tile + b_lo, 16 * kk, 8 * (n0 + n)));
                mma(c, n, hi[kk], b);
            }
        for (int kk = 0; kk < K / 16; kk++)
            for (int n = 0; n < Slice; n += 2) mma(c, n, hi[kk], b_hi[kk][n / 2]);
        for (int m = 0; m < M; m++)
            for (int n = 0; n < Slice; n++)
                for (int e = 0; e < 4; e++) sum[m][n0 + n][e] = fmaf(c[m][n][e], unit, sum[m][n0 + n][e]);
    }
}

// Two floats from two pairs of halves.
__device__ __forceinline__ float2 join(uint32_t hi, uint32_t lo) {
    const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&hi)),
                 b = __half22float2(*reinterpret_cast<const __half2*>(&lo));
    return make_float2(a.x + b.x, a.y + b.y);
}

// hi, lo = A operands made of an accumulator times factor.
template <int M, int N>
__device__ __forceinline__ void to_a(uint32_t (&hi)[N / 2][M][4], uint32_t (&lo)[N / 2][M][4],
                                     const float (&c)[M][N][4], float factor) {
    for (int kk = 0; kk < N / 2; kk++)
        for (int m = 0; m < M; m++)
            for (int i = 0; i < 4; i++) {
                const float* x = &c[m][2 * kk + i / 2][i % 2 * 2];
                split(hi[kk][m][i], lo[kk][m][i], x[0] * factor, x[1] * factor);
            }
}

// The streamed tiles of two tensors x and y (K and V, or Q and dO). A tile is copied as floats while the block works on
// the one before it, then split.
template <int HS, int Rows, int Threads>
struct Stream {
    static constexpr int Lo = Rows * HS * 2, Pair = 2 * Lo, Pieces = kPieces<HS, Rows, Threads>;
    unsigned char* smem;  // x pair, y pair, x floats, y floats

    __device__ __forceinline__ uint32_t x_tile() const { return smem_address(smem); }
    __device__ __forceinline__ uint32_t y_tile() const { return smem_address(smem) + Pair; }
    __device__ __forceinline__ void copy(const float* x, size_t x_token, const float* y, size_t y_token, int row0,
                                         int end) const {
        copy_tile<HS, Rows, Threads>(smem_address(smem) + 2 * Pair, x, x_token, row0, end);
        copy_tile<HS, Rows, Threads>(smem_address(smem) + 3 * Pair, y, y_token, row0, end);
    }
    // Splits what has arrived, calls next() when the floats may be overwritten, and sets the exponents that scale the
    // tiles. It waits until all warps have left the last tile, and when it returns all of them find this one. seen()
    // gets this thread's part of x. Rows of y are multiplied by factor(row), which is close to 1.
    template <class Next, class Seen, class Factor>
    __device__ __forceinline__ void split_tiles(int& x_exponent, int& y_exponent, Next next, Seen seen,
                                                Factor factor) const {
        constexpr int Warps = Threads / 32;
        static_assert(Warps == 4, "four maxima are read at once");
        __shared__ __align__(16) uint32_t maxima[2][Warps];
        const unsigned thread = thread_again();
        cp_async_wait<0>();
        const float4 *x_floats = reinterpret_cast<const float4*>(smem + 2 * Pair) + thread,
                     *y_floats = reinterpret_cast<const float4*>(smem + 3 * Pair) + thread;
        float4 x[Pieces], y[Pieces];
        for (int i = 0; i < Pieces; i++) x[i] = x_floats[i * Threads], y[i] = y_floats[i * Threads];
        seen(x);
        const uint32_t x_max = warp_largest(largest(x)), y_max = warp_largest(largest(y));
        if (thread % 32 == 0) {
            maxima[0][thread / 32] = x_max;
            maxima[1][thread / 32] = y_max;
        }
        __syncthreads();  // the maxima are there, and all have left the last tile
        const uint4 a = *reinterpret_cast<const uint4*>(maxima[0]), b = *reinterpret_cast<const uint4*>(maxima[1]);
        const uint32_t x_all = max(max(a.x, a.y), max(a.z, a.w)), y_all = max(max(b.x, b.y), max(b.z, b.w));
        store_split<HS, Threads>(smem, Lo, x, factor_for(x_all), thread);
        for (int i = 0; i < Pieces; i++) {
            y[i] = y_floats[i * Threads];  // read again for lack of registers
            const float f = factor(thread / (HS / 4) + i * (Threads / (HS / 4)));
            y[i].x *= f, y[i].y *= f, y[i].z *= f, y[i].w *= f;
        }
        store_split<HS, Threads>(smem + Pair, Lo, y, factor_for(y_all), thread);
        next();
        x_exponent = exponent_for(x_all), y_exponent = exponent_for(y_all);
        __syncthreads();  // this tile is there for all
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Forward

constexpr float kPScale = 0x1p14f;  // the tensor cores get P times this, and P ≤ 2
constexpr float kLog2e = static_cast<float>(M_LOG2E);
constexpr float kLn2 = static_cast<float>(M_LN2), kLn2Rest = static_cast<float>(M_LN2 - kLn2);

struct ForwardArgs {
    Problem<float> p;
    Heads<float> out;  // whole form: written
    float* lse;
    float* o_acc;  // block form: merged into (null in the whole form)
    double* lse_acc;
};

template <int HS>
__global__ __launch_bounds__(ForwardTiles<HS>::Threads, ForwardTiles<HS>::MinBlocks) void forward_kernel(
    const __grid_constant__ ForwardArgs args) {
#if __CUDA_ARCH__ >= 800
    using Tiles = ForwardTiles<HS>;
    constexpr int Br = Tiles::Br, Bc = Tiles::Bc, Sub = Tiles::Sub, M = Tiles::MTiles, Threads = Tiles::Threads;
    using KV = Stream<HS, Bc, Threads>;
    const Problem<float>& p = args.p;
    extern __shared__ __align__(256) unsigned char smem[];
    const KV kv{smem};

    __shared__ Work w;  // the loop leaves no register for it
    if (threadIdx.x == 0) w = work_of_block(p, true);
    __syncthreads();
    const int warp_row = threadIdx.x / 32 * 16 * M, lane = threadIdx.x % 32;
    auto first_query = [&] { return w.tile * Br + warp_row; };            // the warp's
    const int k_end = min(p.Tk, min((w.tile + 1) * Br, p.Tq) + p.shift);  // the last query sees keys before this
    const int k_tiles = (k_end + Bc - 1) / Bc;                            // ≤ 0 if no query of this tile sees a key

    auto copy_kv = [&](int j) {
        kv.copy(head_of(p.k, w, HS), p.k.token, head_of(p.v, w, HS), p.v.token, j * Bc, p.Tk);
        cp_async_commit();
    };
    if (k_tiles > 0) copy_kv(k_tiles - 1);

    // Q's hi part goes to registers, and the first tile of keys takes its place in shared memory.
    uint32_t q_hi[HS / 16][M][4];
    __shared__ float q_unit[Tiles::Warps];  // the loop leaves no register for it
    {
        unsigned char* rows = smem + warp_row * HS * 2;
        float4 x[kPieces<HS, 16 * M, 32>];
        fetch_rows<HS, 16 * M>(x, head_of(p.q, w, HS), p.q.token, first_query(), p.Tq);
        q_unit[threadIdx.x / 32] = power_of_two(-exponent_for(keep_rows<HS, 16 * M>(rows, Tiles::QLo, x)));
        __syncwarp();
        for (int kk = 0; kk < HS / 16; kk++) load_a<HS>(q_hi[kk], smem_address(rows), kk * 16);
    }
    const uint32_t q_lo_tile = smem_address(smem) + Tiles::QLo + warp_row * HS * 2;
    float o[M][HS / 8][4] = {};
    float m[M][2], l[M][2] = {};  // of rows lane/4 and lane/4 + 8. l has only this lane's columns until the end
    struct alignas(8 * M) Excess {
        float of[M][2];
    };
    __shared__ Excess l_excess[Threads];  // what rounding added to l. The loop leaves no registers for it
    l_excess[threadIdx.x] = Excess{};
    for (int i = 0; i < M; i++) m[i][0] = m[i][1] = -INFINITY;

    // Handles keys [k0, k0 + Sub), whose tiles these are. s · s_unit is S·log2(e), and the product · o_unit is P V.
    // The warp's query i sees key k0 + j if i − j ≥ ahead.
    auto step = [&](int k0, int ahead, uint32_t k_tile, uint32_t v_tile, float s_unit, float o_unit, auto masked) {
        constexpr bool Masked = decltype(masked)::value;
        float s[M][Sub / 8][4] = {};
        uint32_t b_hi[HS / 16][Sub / 16][4];
#pragma unroll
        for (int kk = 0; kk < HS / 16; kk++) {
            uint32_t q_lo[M][4], b[4];
            load_a<HS>(q_lo, again(q_lo_tile), 16 * kk);
            for (int n = 0; n < Sub / 8; n += 2) {
                ldmatrix_x4(b_hi[kk][n / 2], block16_b<HS>(k_tile, 8 * n, 16 * kk));
                mma(s, n, q_lo, b_hi[kk][n / 2]);
            }
            for (int n = 0; n < Sub / 8; n += 2) {
                ldmatrix_x4(b, block16_b<HS>(k_tile + KV::Lo, 8 * n, 16 * kk));
                mma(s, n, q_hi[kk], b);
            }
        }
        // The large terms go in two chains as in product_abt, so that backward's S has the same bits.
        for (int kk = 0; kk < HS / 32; kk++)
            for (int n = 0; n < Sub / 8; n += 2) mma(s, n, q_hi[kk], b_hi[kk][n / 2]);
        for (int n = 0; n < Sub / 8; n += 2) {
            float chain[M][2][4] = {};
            for (int kk = HS / 32; kk < HS / 16; kk++) mma(chain, 0, q_hi[kk], b_hi[kk][n / 2]);
            add_columns(s, n, chain);
        }
        if constexpr (Masked) {
            const int lane = thread_again() % 32;
            for (int i = 0; i < M; i++)
                for (int e = 0; e < 4; e++) {
                    const int row = 16 * i + e / 2 * 8 + lane / 4;
                    const int visible = min(p.Tk - k0, row + 1 - ahead) - lane % 4 * 2;
                    for (int n = 0; n < Sub / 8; n++)
                        if (8 * n + e % 2 >= visible) s[i][n][e] = -INFINITY;
                }
        }

        // m keeps the exponentials in range and need not be the maximum. O and l are rescaled only when some row of the
        // warp outgrew it by more than a factor of 2. After the first tiles that hardly ever happens.
        float m_new[M][2];
        bool outgrown = false;
        for (int i = 0; i < M; i++)
            for (int r = 0; r < 2; r++) {
                float x = s[i][0][2 * r];
                for (int n = 0; n < Sub / 8; n++) x = fmaxf(x, fmaxf(s[i][n][2 * r], s[i][n][2 * r + 1]));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
                m_new[i][r] = fmaxf(m[i][r], x * s_unit);
                outgrown |= m_new[i][r] - m[i][r] > 1.f;  // −inf − −inf is NaN, which compares false
            }
        Excess excess = l_excess[thread_again()];
        if (__any_sync(~0u, outgrown)) {
            for (int i = 0; i < M; i++)
                for (int r = 0; r < 2; r++) {
                    const float x = m_new[i][r];
                    const float alpha = x == -INFINITY ? 1.f : exp2_approx(m[i][r] - x);
                    m[i][r] = x;
                    l[i][r] *= alpha, excess.of[i][r] *= alpha;
                    for (int n = 0; n < HS / 8; n++) o[i][n][2 * r] *= alpha, o[i][n][2 * r + 1] *= alpha;
                }
        }
        for (int i = 0; i < M; i++)
            for (int r = 0; r < 2; r++) {
                const float base = m[i][r] == -INFINITY ? 0.f : m[i][r];
                float sum = 0.f;
                for (int n = 0; n < Sub / 8; n++)
                    for (int e = 2 * r; e < 2 * r + 2; e++) {
                        s[i][n][e] = exp2_approx(fmaf(s[i][n][e], s_unit, -base));
                        sum += s[i][n][e];
                    }
                // If one key has most of the weight, every other tile's sum is small beside l. What an addition loses
                // to rounding is kept for the next (Kahan), because all of a row's P, and D, have l's error.
                const float addend = sum - excess.of[i][r], l_new = l[i][r] + addend;
                excess.of[i][r] = (l_new - l[i][r]) - addend;
                l[i][r] = l_new;
            }
        l_excess[thread_again()] = excess;
        uint32_t p_hi[Sub / 16][M][4], p_lo[Sub / 16][M][4];
        to_a(p_hi, p_lo, s, kPScale);
        add_product_ab<HS, Sub>(o, p_hi, p_lo, v_tile, KV::Lo, o_unit);
    };

    for (int j = k_tiles - 1; j >= 0; j--) {
        int k_exponent, v_exponent;
        kv.split_tiles(
            k_exponent, v_exponent,
            [&] {
                if (j > 0) copy_kv(j - 1);
            },
            [](const auto&) {}, [](int) { return 1.f; });
        // Not 0, whatever underflows, because the mask's −∞ times it must stay −∞.
        const float s_unit = fmaxf(FLT_MIN, p.scale_log2 * q_unit[thread_again() / 32] * power_of_two(-k_exponent));
        const float o_unit = power_of_two(-v_exponent - 14);
#pragma unroll 1
        for (int sub = Bc - Sub; sub >= 0; sub -= Sub) {
            const int k0 = j * Bc + sub;
            const int ahead = k0 - p.shift - first_query();
            if (k0 >= p.Tk || ahead > 16 * M - 1) continue;
            const uint32_t k_tile = kv.x_tile() + sub * HS * 2, v_tile = kv.y_tile() + sub * HS * 2;
            if (k0 + Sub > p.Tk || ahead > 1 - Sub)
                step(k0, ahead, k_tile, v_tile, s_unit, o_unit, std::true_type{});
            else
                step(k0, ahead, k_tile, v_tile, s_unit, o_unit, std::false_type{});
        }
    }

    float lse[M][2];
    for (int i = 0; i < M; i++)
        for (int r = 0; r < 2; r++) {
            float sum = l[i][r];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const bool unseen = sum == 0.f;  // the row saw no key, as any other sum is at least 1/2, or NaN
            const float inverse = unseen ? 0.f : 1.f / sum;
            lse[i][r] = unseen ? -INFINITY : fmaf(m[i][r], kLn2, fmaf(m[i][r], kLn2Rest, logf(sum)));
            l[i][r] = sum;
            for (int n = 0; n < HS / 8; n++) o[i][n][2 * r] *= inverse, o[i][n][2 * r + 1] *= inverse;
        }
    const size_t lse_row = static_cast<size_t>(w.bh) * p.q_rows;
    const int q0 = w.tile * Br, first_row = first_query() + lane / 4;
    if (args.o_acc) {
        const size_t token = static_cast<size_t>(p.NH) * HS;
#pragma unroll
        for (int i = 0; i < M; i++)
            for (int r = 0; r < 2; r++) {
                const int row = first_row + 16 * i + 8 * r;
                if (row >= p.Tq || lse[i][r] == -INFINITY) continue;
                const double old = args.lse_acc[lse_row + row], own = m[i][r] * M_LN2 + log_of(l[i][r]);
                const bool heavier = own > old;  // true if ours is. The lighter part's weight is σ(−|own − old|)
                const Merge merged = merge(heavier ? own : old, heavier ? old : own);
                const float weight = merged.weight;
                float2* acc = reinterpret_cast<float2*>(
                                  args.o_acc + (static_cast<size_t>(w.b) * p.q_rows + row) * token + w.h * HS) +
                              lane % 4;
                auto blend = [&](float theirs, float ours) {
                    const float x = heavier ? ours : theirs, y = heavier ? theirs : ours;
                    return old == -INFINITY ? ours : x - weight * (x - y);
                };
                for (int n = 0; n < HS / 8; n++) {
                    const float2 x = acc[4 * n];
                    acc[4 * n] = make_float2(blend(x.x, o[i][n][2 * r]), blend(x.y, o[i][n][2 * r + 1]));
                }
                __syncwarp(0xfu << lane / 4 * 4);  // the row's four lanes have read its lse
                if (lane % 4 == 0) args.lse_acc[lse_row + row] = merged.lse;
            }
    } else {
        for (int i = 0; i < M; i++)
            for (int r = 0; r < 2; r++)
                if (lane % 4 == 0 && first_row + 16 * i + 8 * r < p.Tq)
                    args.lse[lse_row + first_row + 16 * i + 8 * r] = lse[i][r];
        add_tile<HS>(o, warp_row, head_of(args.out, w, HS) + q0 * args.out.token, args.out.token, p.Tq - q0, false);
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

struct BackwardArgs {
    Problem<float> p;
    Heads<const float> dout, out;  // out in the whole form only
    const float *lse, *D;          // D in the block form only
    float2* stats;   // (B, NH, q_rows) {log2(e)·lse, D·factor}, with +inf as lse of a row that sees no key
    float* factors;  // (B, NH, q_rows) P's factor, for what log2(e)·lse has no bits for
    Heads<float> dq, dk, dv;
    bool add_dq, add_dkv;  // whether to add into dq, and into dk and dv, rather than write them
};

// The bits of the largest magnitude in the warp's tile of dS.
template <int M, int N>
__device__ __forceinline__ uint32_t largest_of(const float (&c)[M][N][4]) {
    float m = 0.f;
    for (int i = 0; i < M; i++)
        for (int n = 0; n < N; n++)
            for (int e = 0; e < 4; e++) m = max_nan(m, fabsf(c[i][n][e]));
    return warp_largest(m);
}

template <int HS>
__global__ __launch_bounds__(DqTiles<HS>::Threads,
                             DqTiles<HS>::MinBlocks) void dq_kernel(const __grid_constant__ BackwardArgs args) {
#if __CUDA_ARCH__ >= 800
    using Tiles = DqTiles<HS>;
    constexpr int Br = Tiles::Br, Bc = Tiles::Bc, M = Tiles::MTiles, Threads = Tiles::Threads, Rows = 16 * M;
    constexpr int QLo = Br * HS * 2;
    using KV = Stream<HS, Bc, Threads>;
    const Problem<float>& p = args.p;
    extern __shared__ __align__(256) unsigned char smem[];
    const KV kv{smem + 4 * QLo};

    __shared__ Work w;  // the loops leave no register for it
    if (threadIdx.x == 0) w = work_of_block(p, true);
    __syncthreads();
    const int warp_row = threadIdx.x / 32 * Rows, lane = threadIdx.x % 32;
    auto first_q = [&] { return w.tile * Br + static_cast<int>(thread_again() / 32 * Rows); };  // the warp's
    const int k_end = min(p.Tk, min((w.tile + 1) * Br, p.Tq) + p.shift);
    const int k_tiles = (k_end + Bc - 1) / Bc;

    auto copy_kv = [&](int j) {
        kv.copy(head_of(p.k, w, HS), p.k.token, head_of(p.v, w, HS), p.v.token, j * Bc, p.Tk);
        cp_async_commit();
    };
    if (k_tiles > 0) copy_kv(0);

    // Loads Q, dO, lse and D of the warp's rows.
    unsigned char* q_rows = smem + warp_row * HS * 2;
    const uint32_t q_tile = smem_address(q_rows), do_tile = q_tile + 2 * QLo;
    const int src_lane = lane / 4 * 4 + lane / 8;  // has, in its columns, the diagonal of row lane/4
    float q_unit, do_unit, lse_log2[M][2], D[M][2];
    {
        float4 x[kPieces<HS, Rows, 32>];
        fetch_rows<HS, Rows>(x, head_of(args.dout, w, HS), args.dout.token, first_q(), p.Tq);
        do_unit = power_of_two(-exponent_for(keep_rows<HS, Rows>(q_rows + 2 * QLo, QLo, x)));
        float d[M][2 * M][4] = {}, d_unit = 0.f;
        if (!args.D) {
            fetch_rows<HS, Rows>(x, head_of(args.out, w, HS), args.out.token, first_q(), p.Tq);
            d_unit = do_unit * power_of_two(-exponent_for(keep_rows<HS, Rows>(q_rows, QLo, x)));
            __syncwarp();
            product_abt<HS, 1>(d, do_tile, QLo, q_tile, QLo);
            __syncwarp();  // Q takes O's place
        }
        fetch_rows<HS, Rows>(x, head_of(p.q, w, HS), p.q.token, first_q(), p.Tq);
        q_unit = power_of_two(-exponent_for(keep_rows<HS, Rows>(q_rows, QLo, x)));
        __syncwarp();
        for (int i = 0; i < M; i++)
            for (int r = 0; r < 2; r++) {
                const int t = first_q() + 16 * i + 8 * r + lane / 4;
                const size_t at = static_cast<size_t>(w.bh) * p.q_rows + t;
                const float* diagonal = d[i][2 * i + r] + 2 * r;
                const float lse = t < p.Tq ? args.lse[at] : -INFINITY;
                const float own_D = d_unit * __shfl_sync(~0u, lane / 4 % 2 ? diagonal[1] : diagonal[0], src_lane);
                // An infinite lse makes P 0 in a row that sees no key or is past Tq. Past Tq S is 0, so with a finite
                // lse P = e^−lse could be infinite and spoil the scale that the warp's rows share.
                lse_log2[i][r] = lse == -INFINITY ? INFINITY : lse * kLog2e;
                D[i][r] = !args.D ? own_D : t < p.Tq ? args.D[at] : 0.f;
            }
    }
    float dS_sum[M][2] = {};    // over this lane's columns
    uint32_t P_sum[M][2] = {};  // likewise, in units of 2^-30, because floats would lose what is small beside 1
    __shared__ float4
        k_sums[Threads];  // each thread's part of the sum of all keys. The loop leaves no registers for it
    k_sums[threadIdx.x] = float4{0.f, 0.f, 0.f, 0.f};
    float dq[M][HS / 8][4] = {};

    auto step = [&](int k0, float s_unit, float dp_unit, float k_unit, auto masked) {
        constexpr bool Masked = decltype(masked)::value;
        float s[M][Bc / 8][4] = {}, dp[M][Bc / 8][4] = {}, P_tile[M][2] = {}, dS_tile[M][2] = {};
        product_abt<HS, 2>(s, q_tile, QLo, kv.x_tile(), KV::Lo);
        product_abt<HS, 1>(dp, do_tile, QLo, kv.y_tile(), KV::Lo);
        const int first_row = first_q();
        for (int i = 0; i < M; i++)
            for (int e = 0; e < 4; e++) {
                const int row = first_row + 16 * i + e / 2 * 8 + lane / 4;
                const int visible = min(p.Tk, row + p.shift + 1) - k0 - lane % 4 * 2;
                for (int n = 0; n < Bc / 8; n++) {
                    float P = exp2_approx(fmaf(s[i][n][e], s_unit, -lse_log2[i][e / 2]));
                    if (Masked && 8 * n + e % 2 >= visible) P = 0.f;
                    s[i][n][e] = P * fmaf(dp[i][n][e], dp_unit, -D[i][e / 2]);
                    P_tile[i][e / 2] += P, dS_tile[i][e / 2] += s[i][n][e];
                }
            }
        for (int i = 0; i < M; i++)
            for (int r = 0; r < 2; r++) {
                P_sum[i][r] += __float2uint_rn(P_tile[i][r] * 0x1p30f);
                dS_sum[i][r] += dS_tile[i][r];
            }
        const uint32_t dS_largest = largest_of(s);
        uint32_t hi[Bc / 16][M][4], lo[Bc / 16][M][4];
        to_a(hi, lo, s, factor_for(dS_largest));
        add_product_ab<HS, Bc>(dq, hi, lo, kv.x_tile(), KV::Lo, power_of_two(-exponent_for(dS_largest)) * k_unit);
    };

    // Finds what a row's dS and P add up to beyond 0 and 1, and starts both sums again. D takes dS. P_excess is a
    // relative error of P, and the caller gives lse_log2 log2(e) times as much.
    auto settle = [&](int i, int r, float& dS, float& P_excess) {
        dS = dS_sum[i][r];
        uint32_t P = P_sum[i][r];
        for (int lanes = 1; lanes <= 2; lanes *= 2) {
            dS += __shfl_xor_sync(~0u, dS, lanes);
            P += __shfl_xor_sync(~0u, P, lanes);
        }
        dS_sum[i][r] = 0.f, P_sum[i][r] = 0;
        P_excess = static_cast<float>(static_cast<int>(P - (1u << 30))) * 0x1p-30f;
        D[i][r] += dS;
    };

    // Rows of few keys are walked twice, the first time for D and lse alone. The mean key corrects longer rows, but the
    // weights of few keys are too unlike for that.
    const bool whole_row = !args.D;
    auto few_keys = [&] { return whole_row && k_tiles <= Br / Bc; };
    auto tile_of = [&](int n) { return n < 0 ? n + k_tiles : n; };
    for (int n = few_keys() ? -k_tiles : 0; n < k_tiles; n++) {
        int k_exponent, v_exponent;
        kv.split_tiles(
            k_exponent, v_exponent,
            [&] {
                if (n + 1 < k_tiles) copy_kv(tile_of(n + 1));
            },
            [&](const auto& k) {
                float4 sum = k_sums[thread_again()];
                for (const float4& x : k) sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
                k_sums[thread_again()] = sum;
            },
            [](int) { return 1.f; });
        if (n == 0 && few_keys())
            for (int i = 0; i < M; i++)
                for (int r = 0; r < 2; r++) {
                    float dS, P_excess;
                    settle(i, r, dS, P_excess);
                    lse_log2[i][r] = fmaf(P_excess, kLog2e, lse_log2[i][r]);
                    for (int c = 0; c < HS / 8; c++) dq[i][c][2 * r] = dq[i][c][2 * r + 1] = 0.f;
                }
        const int k0 = tile_of(n) * Bc;
        if (k0 > first_q() + Rows - 1 + p.shift) continue;
        const float k_unit = power_of_two(-k_exponent), s_unit = p.scale_log2 * q_unit * k_unit;
        const float dp_unit = do_unit * power_of_two(-v_exponent);
        if (k0 + Bc > p.Tk || k0 + Bc - 1 > first_q() + p.shift)
            step(k0, s_unit, dp_unit, k_unit, std::true_type{});
        else
            step(k0, s_unit, dp_unit, k_unit, std::false_type{});
    }

    // D's error times the weighted mean key Σ P K is in dq. This takes out the error times the plain mean key instead,
    // because Σ P K would cost one more product.
    float2 k_mean[HS / 8];
    if (whole_row) {
        const float keys = static_cast<float>(max(1, min(k_tiles * Bc, p.Tk) * (few_keys() ? 2 : 1)));
        for (int n = 0; n < HS / 8; n++) {
            const float2* column = reinterpret_cast<const float2*>(k_sums) + 4 * n + lane % 4;
            k_mean[n] = {0.f, 0.f};
            for (int i = 0; i < Threads / (HS / 4); i++)
                k_mean[n].x += column[i * HS / 2].x, k_mean[n].y += column[i * HS / 2].y;
            k_mean[n].x /= keys, k_mean[n].y /= keys;
        }
    }
    for (int i = 0; i < M; i++)
        for (int r = 0; r < 2; r++) {
            const unsigned thread = thread_again();
            const int t = w.tile * Br + thread / 32 * Rows + 16 * i + 8 * r + thread % 32 / 4;
            const size_t at = static_cast<size_t>(w.bh) * p.q_rows + min(t, p.Tq - 1);
            float change;  // of log2(e)·lse
            if (whole_row) {
                float dS, P_excess;
                settle(i, r, dS, P_excess);
                change = P_excess * kLog2e;
                for (int n = 0; n < HS / 8; n++)
                    dq[i][n][2 * r] -= dS * k_mean[n].x, dq[i][n][2 * r + 1] -= dS * k_mean[n].y;
            } else {
                // what rounding took from lse_log2
                change = lse_log2[i][r] == INFINITY ? 0.f : fmaf(args.lse[at], kLog2e, -lse_log2[i][r]);
            }
            const float factor = p.scale * (1.f - kLn2 * change);
            for (int n = 0; n < HS / 8; n++) dq[i][n][2 * r] *= factor, dq[i][n][2 * r + 1] *= factor;
            if (thread % 4 == 0 && t < p.Tq) {
                const float lse = lse_log2[i][r] + change;
                const float rest = lse == INFINITY ? 0.f : (lse_log2[i][r] - lse) + change, f = 1.f - kLn2 * rest;
                args.stats[at] = make_float2(lse, D[i][r] * f);
                args.factors[at] = f;
            }
        }
    add_tile<HS>(dq, warp_row, head_of(args.dq, w, HS) + w.tile * Br * args.dq.token, args.dq.token, p.Tq - w.tile * Br,
                 args.add_dq);
#endif
}

template <int HS>
__global__ __launch_bounds__(DkdvTiles<HS>::Threads,
                             DkdvTiles<HS>::MinBlocks) void dkdv_kernel(const __grid_constant__ BackwardArgs args) {
#if __CUDA_ARCH__ >= 800
    using Tiles = DkdvTiles<HS>;
    constexpr int Br = Tiles::Br, Bc = Tiles::Bc, M = Tiles::MTiles, Threads = Tiles::Threads, Rows = 16 * M;
    constexpr int KLo = Bc * HS * 2;
    using QdO = Stream<HS, Br, Threads>;
    const Problem<float>& p = args.p;
    extern __shared__ __align__(256) unsigned char smem[];
    const QdO q_do{smem + 4 * KLo};
    unsigned char* stats_smem = smem + 4 * KLo + 4 * QdO::Pair;  // two stages of stats, then of factors

    __shared__ Work w;  // the loops leave no register for it
    if (threadIdx.x == 0) w = work_of_block(p, false);
    __syncthreads();
    const int warp_row = threadIdx.x / 32 * Rows, lane = threadIdx.x % 32;
    auto first_key = [&] { return w.tile * Bc + warp_row; };    // the warp's
    const int first_tile = max(0, w.tile * Bc - p.shift) / Br;  // the first query that sees key k0 is k0 − shift
    const int q_tiles = (p.Tq + Br - 1) / Br;

    // Queries past Tq add nothing, because their Q, dO and D arrive as zeros. Keys past Tk are masked, because their dS
    // could spoil the scale that the warp's keys share.
    auto copy_q = [&](int j) {
        const int row = j * Br + threadIdx.x;
        q_do.copy(head_of(p.q, w, HS), p.q.token, head_of(args.dout, w, HS), args.dout.token, j * Br, p.Tq);
        if (threadIdx.x < Br) {
            const size_t at = static_cast<size_t>(w.bh) * p.q_rows + row;
            const uint32_t stage = smem_address(stats_smem), i = (j & 1) * Br + threadIdx.x;
            cp_async_8(stage + i * 8, args.stats + at, row < p.Tq);
            cp_async_4(stage + 16 * Br + i * 4, args.factors + at, row < p.Tq);
        }
        cp_async_commit();
    };
    if (first_tile < q_tiles) copy_q(first_tile);

    unsigned char* k_rows = smem + warp_row * HS * 2;
    __shared__ float2 units[Tiles::Warps];  // of K and V. The loop leaves no register for them
    {
        float4 x[kPieces<HS, Rows, 32>];
        fetch_rows<HS, Rows>(x, head_of(p.k, w, HS), p.k.token, first_key(), p.Tk);
        const float k_unit = power_of_two(-exponent_for(keep_rows<HS, Rows>(k_rows, KLo, x)));
        fetch_rows<HS, Rows>(x, head_of(p.v, w, HS), p.v.token, first_key(), p.Tk);
        const float v_unit = power_of_two(-exponent_for(keep_rows<HS, Rows>(k_rows + 2 * KLo, KLo, x)));
        units[threadIdx.x / 32] = {k_unit, v_unit};
        __syncwarp();
    }
    const uint32_t k_tile = smem_address(k_rows), v_tile = k_tile + 2 * KLo;
    float dk[M][HS / 8][4] = {}, dv[M][HS / 8][4] = {};

    // Tile j's query i sees the warp's key k if i − k ≥ ahead and k < keys.
    auto step = [&](int j, int ahead, int keys, int q_exponent, int do_exponent, auto masked) {
        constexpr bool Masked = decltype(masked)::value;
        const float q_unit = power_of_two(-q_exponent);
        const float4* stats = reinterpret_cast<const float4*>(stats_smem) + (j & 1) * Br / 2;  // two rows each
        float s[M][Br / 8][4] = {}, dp[M][Br / 8][4] = {};  // transposed: rows are keys
        uint32_t hi[Br / 16][M][4], lo[Br / 16][M][4];
        product_abt<HS, 2>(s, k_tile, KLo, q_do.x_tile(), QdO::Lo);
        const float s_unit = fmaxf(FLT_MIN, p.scale_log2 * q_unit * units[thread_again() / 32].x);
        if constexpr (Masked) {
            for (int i = 0; i < M; i++)
                for (int e = 0; e < 4; e++) {
                    const int key = 16 * i + e / 2 * 8 + lane / 4;
                    const int unseen = key < keys ? ahead + key - lane % 4 * 2 : Br;  // queries
                    for (int n = 0; n < Br / 8; n++)
                        if (8 * n + e % 2 < unseen) s[i][n][e] = -INFINITY;
                }
        }
        for (int n = 0; n < Br / 8; n++) {
            const float4 c = stats[4 * n + lane % 4];  // {lse, D} of this lane's columns e = 0 and 1
            for (int i = 0; i < M; i++)
                for (int e = 0; e < 4; e++) s[i][n][e] = exp2_approx(fmaf(s[i][n][e], s_unit, -(e % 2 ? c.z : c.x)));
        }
        to_a(hi, lo, s, kPScale);
        add_product_ab<HS, Br>(dv, hi, lo, q_do.y_tile(), QdO::Lo, power_of_two(-do_exponent - 14));
        product_abt<HS, 1>(dp, v_tile, KLo, q_do.y_tile(), QdO::Lo);
        const float dp_unit = units[thread_again() / 32].y * power_of_two(-do_exponent);
        for (int n = 0; n < Br / 8; n++) {
            const float4 c = stats[4 * n + lane % 4];
            for (int i = 0; i < M; i++)
                for (int r = 0; r < 2; r++) {  // P is joined from its halves, because its registers were needed
                    const float2 P = join(hi[n / 2][i][n % 2 * 2 + r], lo[n / 2][i][n % 2 * 2 + r]);
                    dp[i][n][2 * r] = P.x * fmaf(dp[i][n][2 * r], dp_unit, -c.y);
                    dp[i][n][2 * r + 1] = P.y * fmaf(dp[i][n][2 * r + 1], dp_unit, -c.w);
                }
        }
        const uint32_t dS_largest = largest_of(dp);
        to_a(hi, lo, dp, factor_for(dS_largest));
        add_product_ab<HS, Br>(dk, hi, lo, q_do.x_tile(), QdO::Lo,
                               power_of_two(-exponent_for(dS_largest) - 14) * q_unit);
    };

    for (int j = first_tile; j < q_tiles; j++) {
        int q_exponent, do_exponent;
        q_do.split_tiles(
            q_exponent, do_exponent,
            [&] {
                if (j + 1 < q_tiles) copy_q(j + 1);
            },
            [](const auto&) {},
            [&](int row) { return reinterpret_cast<const float*>(stats_smem + 16 * Br)[(j & 1) * Br + row]; });
        const int first_k = first_key(), keys = p.Tk - first_k, ahead = first_k - p.shift - j * Br;
        if (ahead > Br - 1) continue;
        if (keys < Rows || ahead > 1 - Rows)
            step(j, ahead, keys, q_exponent, do_exponent, std::true_type{});
        else
            step(j, ahead, keys, q_exponent, do_exponent, std::false_type{});
    }

    for (int i = 0; i < M; i++)
        for (int n = 0; n < HS / 8; n++)
            for (int e = 0; e < 4; e++) dk[i][n][e] *= p.scale;
    const int k0 = w.tile * Bc;
    add_tile<HS>(dk, warp_row, head_of(args.dk, w, HS) + k0 * args.dk.token, args.dk.token, p.Tk - k0, args.add_dkv);
    add_tile<HS>(dv, warp_row, head_of(args.dv, w, HS) + k0 * args.dv.token, args.dv.token, p.Tk - k0, args.add_dkv);
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

constexpr char kName[] = "flash_fp16x3";

Problem<float> problem(const Heads<const float>& q, const Heads<const float>& k, const Heads<const float>& v,
                       const BlockShape& s) {
    if (std::max(s.Tq, s.Tk) > INT_MAX / 4)
        throw Error(format("flash_fp16x3: Tq %d, Tk %d: at most %d fit a launch", s.Tq, s.Tk, INT_MAX / 4));
    return problem(kName, q, k, v, s);
}

template <int HS>
void launch_forward(const ForwardArgs& args, const Cuda& dev) {
    using Tiles = ForwardTiles<HS>;
    launch(kName, forward_kernel<HS>, args, ceil_div(args.p.Tq, Tiles::Br), args.p.Tk, HS, Tiles::Threads, Tiles::Smem,
           dev);
}
template <int HS>
void launch_backward(const BackwardArgs& args, const Cuda& dev) {
    launch(kName, dq_kernel<HS>, args, ceil_div(args.p.Tq, DqTiles<HS>::Br), args.p.Tk, HS, DqTiles<HS>::Threads,
           DqTiles<HS>::Smem, dev);
    launch(kName, dkdv_kernel<HS>, args, ceil_div(args.p.Tk, DkdvTiles<HS>::Bc), args.p.Tq, HS, DkdvTiles<HS>::Threads,
           DkdvTiles<HS>::Smem, dev);
}
void launch_backward(BackwardArgs args, int HS, const Cuda& dev) {
    check_aligned(kName, "dout", args.dout);
    check_aligned(kName, "dq", args.dq);
    check_aligned(kName, "dk", args.dk);
    check_aligned(kName, "dv", args.dv);
    check_aligned(kName, "scratch", args.stats);
    args.factors = reinterpret_cast<float*>(args.stats + static_cast<size_t>(args.p.heads) * args.p.q_rows);
    with_head_size(HS, [&](auto HS) { launch_backward<HS>(args, dev); });
}

void forward(const Cuda& dev, float* out, float* lse, float*, void*, const float* qkv, const AttentionShape& s) {
    ForwardArgs args{};
    args.p = problem(packed(qkv, s, 0), packed(qkv, s, 1), packed(qkv, s, 2), whole(s));
    args.out = contiguous(out, s.T, s.NH, s.HS);
    args.lse = lse;
    check_aligned(kName, "out", args.out);
    with_head_size(s.HS, [&](auto HS) { launch_forward<HS>(args, dev); });
}

void forward_block(const Cuda& dev, float* o_acc, double* lse, Heads<const float> q, Heads<const float> k,
                   Heads<const float> v, const BlockShape& s) {
    ForwardArgs args{};
    args.p = problem(q, k, v, s);
    args.o_acc = o_acc;
    args.lse_acc = lse;
    check_aligned(kName, "o_acc", o_acc);
    with_head_size(s.HS, [&](auto HS) { launch_forward<HS>(args, dev); });
}

void backward(const Cuda& dev, float* dqkv, void* scratch, const float* dout, const float* out, const float* lse,
              const float*, const float* qkv, const AttentionShape& s) {
    BackwardArgs args{};
    args.p = problem(packed(qkv, s, 0), packed(qkv, s, 1), packed(qkv, s, 2), whole(s));
    args.dout = contiguous(dout, s.T, s.NH, s.HS), args.out = contiguous(out, s.T, s.NH, s.HS);
    args.lse = lse;
    args.stats = static_cast<float2*>(scratch);
    args.dq = packed(dqkv, s, 0), args.dk = packed(dqkv, s, 1), args.dv = packed(dqkv, s, 2);
    check_aligned(kName, "out", args.out);
    launch_backward(args, s.HS, dev);
}

void backward_block(const Cuda& dev, float* dq_sum, float* dk, float* dv, void* scratch, Heads<const float> q,
                    Heads<const float> k, Heads<const float> v, Heads<const float> dout, const float* lse,
                    const float* D, const BlockShape& s) {
    BackwardArgs args{};
    args.p = problem(q, k, v, s);
    args.dout = dout;
    args.lse = lse, args.D = D;
    args.stats = static_cast<float2*>(scratch);
    args.dq = contiguous(dq_sum + static_cast<size_t>(s.q_begin) * s.NH * s.HS, s.rows_of_q(), s.NH, s.HS);
    args.dk = contiguous(dk, s.rows_of_k(), s.NH, s.HS);
    args.dv = contiguous(dv, s.rows_of_k(), s.NH, s.HS);
    args.add_dq = true, args.add_dkv = !s.write_dkv;
    launch_backward(args, s.HS, dev);
}

size_t block_scratch_bytes(const BlockShape& s) {
    return static_cast<size_t>(s.B) * s.NH * s.rows_of_q() * (sizeof(float2) + sizeof(float));
}
size_t scratch_bytes(const AttentionShape& s) {
    return block_scratch_bytes(whole(s));
}

const PartialForm<float> kPartial = {forward_block, backward_block, block_scratch_bytes, dq_rows_bytes, write_dq_rows};

}  // namespace

const AttentionKernel<float> flash_fp16x3 = {"flash_fp16x3", 80,      true,     no_bytes,
                                             scratch_bytes,  forward, backward, &kPartial};
