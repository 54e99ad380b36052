// Flash attention, fp32, on CUDA cores (every GPU from sm_75), with register tiles.
//
// Forward, for one tile of Br query rows against one tile of Bc keys at a time:
//   S  = scale·Q Kᵀ                (Br × Bc, registers)
//   m' = max(m, rowmax S)
//   P  = exp(S − m')
//   l  = e^{m−m'} l + rowsum P
//   O  = e^{m−m'} O + P V
// and after the last tile:
//   out = O / l
//   lse = m + log l
//
// Backward, given lse and D = rowsum(dO∘O), for one tile of Bc keys against one tile of Br queries
// at a time:
//   P   = exp(S − lse)             (lse with the bits that fp32 has no room for)
//   dS  = P∘(dO Vᵀ − D)
//   dQ += scale·dS K
//   dK += scale·dSᵀ Q
//   dV += Pᵀ dO
//
// New against flash_simple: a thread owns a piece of a tile and not a row, so every load feeds many
// FFMAs. In forward a block of 4 warps keeps Br query rows of one (b, head), and K and V stream
// past them. In backward one kernel computes all of dQ, dK and dV, with 5 products instead of 7. A
// block keeps Bc keys, and Q and dO stream past them.
//
// The FFMA rate bounds it, then shared memory. An M × N sub-tile of a thread costs M + N loads of
// 16 bytes for 4·M·N FFMAs, so sub-tiles are as large as 255 registers allow. P and dS change
// owners through shared memory.
//
// dQ has many writers. Key tiles add into a query tile in ascending order, each after its
// predecessor has raised the query tile's counter. So there are no atomics on floats, and every run
// gives the same bits.
//
// Writes: forward out, lse and lse_rest, backward dq, dk and dv (every element).  Scratch: D,
// lse_rest and the counters.
// Limits: HS in {64, 128}, 1 ≤ T ≤ 2^20, B·NH·T ≤ 2^36.
// Run: ./dev/bench_attention --kernel flash_fp32
#include <climits>

#include "attention/launch.h"
#include "attention/log.cuh"
#include "cuda/ptx_sm80.cuh"  // exp2_approx, kLog2e

namespace {

constexpr char kName[] = "flash_fp32";

// -------------------------------------------------------------------------------------------------
// Tiles. A warp owns a quarter of a tile's rows. Its lanes are a grid of 4 × 8, and a lane owns
// every fourth of these rows and every eighth column of S.

constexpr int kWarps = 4;  // one for each scheduler of an SM
constexpr int kThreads = 32 * kWarps;
constexpr int kLaneRows = 4;
constexpr int kLaneCols = 8;
constexpr int kTerms = 16;  // terms of dP and D that are summed in one go

// Of O, dQ, dK and dV, a lane instead owns pieces of four neighbouring columns, so that it accesses
// 16 bytes at once. The lane in column `col` of the grid has the piece at 4·col, and then every
// eighth.
constexpr int kPieceStride = 4 * kLaneCols;  // columns from one of a lane's pieces to its next

// Br query rows and Bc keys. Two blocks share an SM where shared memory allows, so that one
// computes while the other loads or waits at a barrier.
template <int HS_, int Br_, int Bc_>
struct Tiles {
    static constexpr int HS = HS_;
    static constexpr int Br = Br_;
    static constexpr int Bc = Bc_;
    // Floats from a row to the next in shared memory. With +4 floats, lanes that read 16 bytes of 8
    // neighbouring rows hit 8 different bank groups. With +8, a warp that writes 8 neighbouring
    // floats in each of 4 rows hits 32 different banks.
    static constexpr int kRowStride = HS + 4;   // of Q, K, V and dO
    static constexpr int kPRowStride = Bc + 8;  // of P and dS
    // Accumulators of a thread: ThreadRows × ThreadCols of S, ThreadRows × ThreadOut of O and dQ.
    static constexpr int ThreadRows = Br / kWarps / kLaneRows;
    static constexpr int ThreadCols = Bc / kLaneCols;
    static constexpr int ThreadOut = HS / kLaneCols;
};

template <class Tile>
struct ForwardSharedMemory {
    float q[Tile::Br][Tile::kRowStride];   // scaled
    float kv[Tile::Bc][Tile::kRowStride];  // K and V in turn
    float p[Tile::Br][Tile::kPRowStride];
};
template <class Tile>
struct BackwardSharedMemory {
    float k[Tile::Bc][Tile::kRowStride];
    float v[Tile::Bc][Tile::kRowStride];
    float q[Tile::Br][Tile::kRowStride];  // scaled
    float dout[Tile::Br][Tile::kRowStride];
    float p[Tile::Br][Tile::kPRowStride];  // P and dS in turn
};

//   forward              a thread's S, O                shared memory
//   Forward64            8×8, 8×8: 128 accumulators     87 KB, two blocks an SM on sm_90
//   Forward128           4×8, 4×16                      84 KB
//   ForwardSmall64       4×8, 4×8                       52 KB, as Turing gives a block 64 KB
//   ForwardSmall128      2×8, 2×16                      59 KB
//
//   backward             a thread's S, dP, dK, dV
//   Backward64           all 4×8: 128 accumulators      86 KB
//   Backward128          2×8, 2×8, 4×16, 4×16           108 KB, for sm_80, sm_90, sm_100
//   BackwardSmall64      2×8, 2×8, 4×8, 4×8             60 KB
//   BackwardSmall128     1×4, 1×4, 2×16, 2×16           52 KB
using Forward64 = Tiles<64, 128, 64>;
using Forward128 = Tiles<128, 64, 64>;
using ForwardSmall64 = Tiles<64, 64, 64>;
using ForwardSmall128 = Tiles<128, 32, 64>;
using Backward64 = Tiles<64, 64, 64>;
using Backward128 = Tiles<128, 32, 64>;
using BackwardSmall64 = Tiles<64, 32, 64>;
using BackwardSmall128 = Tiles<128, 16, 32>;
constexpr int kSmallestBr = BackwardSmall128::Br;
constexpr int kSmallestBc = BackwardSmall128::Bc;

// The lane grid: lane = 16·r1 + 2·column + r0, and row = 2·r1 + r0. Two lanes that differ in bit 0
// alone share a column, and two that differ in bit 1 alone a row, so they load from one address.
// The hardware then serves a 16-byte load of the warp in 2 passes, not 4.
__device__ int lane_row() {
    const int lane = threadIdx.x % 32;
    return (lane / 16) * 2 + lane % 2;
}
__device__ int lane_col() {
    const int lane = threadIdx.x % 32;
    return (lane / 2) % 8;
}

// Over the 8 lanes that share a row, whose numbers differ in bits 1 to 3.
__device__ float row_max(float x) {
    for (int bit = 2; bit <= 8; bit *= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, bit));
    return x;
}
__device__ float row_sum(float x) {
    for (int bit = 2; bit <= 8; bit *= 2)
        x += __shfl_xor_sync(~0u, x, bit);
    return x;
}

// -------------------------------------------------------------------------------------------------
// Loads. Tiles reach shared memory by way of registers, so that the loads can overlap other work.

// A row is HS/4 threads wide. Each thread copies one 16-byte piece of every kRowsAtOnce-th row.
template <int HS>
constexpr int kRowsAtOnce = kThreads / (HS / 4);

template <int Rows, int HS>
using StagingRegisters = float4[Rows / kRowsAtOnce<HS>];

// Loads `Rows` rows, of which `count` exist. The others are zeros.
template <int Rows, int HS>
__device__ void load_tile(StagingRegisters<Rows, HS>& regs, const float* rows, size_t row_stride,
                          int count) {
    const int row = threadIdx.x / (HS / 4);
    rows += row * row_stride + (threadIdx.x % (HS / 4)) * 4;
    for (int i = 0; i < Rows / kRowsAtOnce<HS>; i++) {
        const bool exists = row + i * kRowsAtOnce<HS> < count;
        regs[i] = exists ? *reinterpret_cast<const float4*>(rows) : float4{};
        rows += kRowsAtOnce<HS> * row_stride;
    }
}

// Writes them to shared memory, times factor.
template <int Rows, int HS>
__device__ void stage_tile(float (&tile)[Rows][HS + 4], const StagingRegisters<Rows, HS>& regs,
                           float factor = 1.f) {
    float* to = &tile[threadIdx.x / (HS / 4)][(threadIdx.x % (HS / 4)) * 4];
    for (int i = 0; i < Rows / kRowsAtOnce<HS>; i++) {
        const float4 x = regs[i];
        *reinterpret_cast<float4*>(to + i * kRowsAtOnce<HS> * (HS + 4)) =
            float4{x.x * factor, x.y * factor, x.z * factor, x.w * factor};
    }
}

// N floats to registers, in pieces of 4 that are `stride` apart.
template <int N>
__device__ void load(float (&to)[N], const float* from, int stride = 4) {
    if constexpr (N == 2) {
        const float2 x = *reinterpret_cast<const float2*>(from);
        to[0] = x.x;
        to[1] = x.y;
    } else {
        for (int n = 0; n < N / 4; n++) {
            const float4 x = *reinterpret_cast<const float4*>(from + n * stride);
            to[4 * n] = x.x;
            to[4 * n + 1] = x.y;
            to[4 * n + 2] = x.z;
            to[4 * n + 3] = x.w;
        }
    }
}

// Row t of a head, from the thread's first piece on. (HeadsView::row() would have the compiler
// store one float at a time.)
template <int HS>
__device__ float* row_from(const HeadsView<float>& x, const WorkTile& w, int t, int col) {
    return x.ptr + w.b * x.batch_stride + t * x.token_stride + w.h * HS + 4 * col;
}
// Four floats to global memory, times factor.
__device__ void store4(float* to, const float* x, float factor = 1.f) {
    *reinterpret_cast<float4*>(to) =
        float4{x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor};
}
// Adds them to what is there. __ldcg bypasses L1, which does not see other SMs' writes, and
// __fadd_rn keeps the compiler from making an FMA of it: what is added is rounded as in store4.
__device__ void add4(float* to, const float* x, float factor) {
    float4 sum = __ldcg(reinterpret_cast<const float4*>(to));
    sum.x = __fadd_rn(x[0] * factor, sum.x);
    sum.y = __fadd_rn(x[1] * factor, sum.y);
    sum.z = __fadd_rn(x[2] * factor, sum.z);
    sum.w = __fadd_rn(x[3] * factor, sum.w);
    *reinterpret_cast<float4*>(to) = sum;
}

// -------------------------------------------------------------------------------------------------
// Products. c is what the thread owns of the product, M rows and N columns. a and b point to where
// the thread begins in A and B, whose rows are a_stride and b_stride floats apart.
//
//                  the thread's M rows      its N columns
//   multiply_abt   every kLaneRows-th       every kLaneCols-th
//   add_ab         every kLaneRows-th       pieces of four, kPieceStride apart
//   add_atb        neighbours               pieces of four, kPieceStride apart

// c += A Bᵀ over K columns of both.
template <int K, int M, int N>
__device__ void multiply_abt(float (&c)[M][N], const float* a, int a_stride, const float* b,
                             int b_stride) {
#pragma unroll 4
    for (int k = 0; k < K; k += 4) {
        float b_regs[N][4];
        for (int j = 0; j < N; j++)
            load(b_regs[j], b + j * kLaneCols * b_stride + k);
        for (int i = 0; i < M; i++) {
            float a_regs[4];
            load(a_regs, a + i * kLaneRows * a_stride + k);
            for (int e = 0; e < 4; e++)
                for (int j = 0; j < N; j++)
                    c[i][j] += a_regs[e] * b_regs[j][e];
        }
    }
}

// c += A B over K columns of A, rows of B.
// [quote]
template <int K, int M, int N>
__device__ void add_ab(float (&c)[M][N], const float* a, int a_stride, const float* b,
                       int b_stride) {
#pragma unroll 1  // more would spill on sm_80
    for (int k = 0; k < K; k += 4) {
        float a_regs[M][4];
        for (int i = 0; i < M; i++)
            load(a_regs[i], a + i * kLaneRows * a_stride + k);
        for (int e = 0; e < 4; e++) {
            float b_regs[N];
            load(b_regs, b + (k + e) * b_stride, kPieceStride);
            for (int i = 0; i < M; i++)
                for (int j = 0; j < N; j++)
                    c[i][j] += a_regs[i][e] * b_regs[j];
        }
    }
}
// [end]

// c += Aᵀ B over K rows of both.
template <int K, int M, int N>
__device__ void add_atb(float (&c)[M][N], const float* a, int a_stride, const float* b,
                        int b_stride) {
#pragma unroll 8
    for (int k = 0; k < K; k++) {
        float a_regs[M];
        float b_regs[N];
        load(a_regs, a + k * a_stride);
        load(b_regs, b + k * b_stride, kPieceStride);
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++)
                c[i][j] += a_regs[i] * b_regs[j];
    }
}

// -------------------------------------------------------------------------------------------------
// Softmax, of one of this thread's rows

// Raises m to the largest S so far. Returns e^{m−m'}.
template <int N>
__device__ float raise_max(float& m, const float (&s)[N]) {
    float m_new = s[0];
    for (int j = 1; j < N; j++)
        m_new = fmaxf(m_new, s[j]);
    m_new = fmaxf(m, row_max(m_new));
    const float rescale = exp2_approx((m - m_new) * kLog2e);
    m = m_new;
    return rescale;
}

// Writes P to shared memory. Returns its sum over this thread's columns.
template <int N>
__device__ float exponentials(float* p_smem, const float (&s)[N], float m) {
    float l_tile = 0.f;
    for (int j = 0; j < N; j++) {
        const float p = exp2_approx((s[j] - m) * kLog2e);
        l_tile += p;
        p_smem[j * kLaneCols] = p;
    }
    return l_tile;
}

// -------------------------------------------------------------------------------------------------
// Forward

struct ForwardArgs {
    HeadsView<const float> q;
    HeadsView<const float> k;
    HeadsView<const float> v;
    HeadsView<float> out;
    RowStatsView<float> lse;       // lse_rest_kernel reads it
    RowStatsView<float> lse_rest;  // may be null
    int Tq;
    int Tk;
    int NH;
    int shift;  // query i sees keys j ≤ i + shift
    float scale;
};

// Tiles of queries, the longest first: a head in x, its tiles in y.
__device__ WorkTile query_tile(int NH) {
    return {.tile = static_cast<int>(gridDim.y - 1 - blockIdx.y),
            .bh = static_cast<int>(blockIdx.x),
            .b = static_cast<int>(blockIdx.x / NH),
            .h = static_cast<int>(blockIdx.x % NH)};
}

// Writes O / l and lse. The thread has rows lane_q, lane_q + 4, …, and l of its own columns.
template <int HS, int M, int N>
__device__ void store_rows(const ForwardArgs& args, const WorkTile& w, int lane_q, int col,
                           const float (&o)[M][N], const float (&m)[M], const float (&l)[M]) {
#pragma unroll  // or else the compiler unrolls later, when it has already ordered the loads
    for (int i = 0; i < M; i++) {
        const float sum = row_sum(l[i]);
        const int t = lane_q + i * kLaneRows;
        if (t >= args.Tq)
            continue;
        float* out = args.out.row(w.b, t, w.h, HS) + 4 * col;
        const float inv_l = 1.f / sum;
        for (int n = 0; n < N / 4; n++)
            store4(out + n * kPieceStride, &o[i][4 * n], inv_l);
        if (col > 0)
            continue;
        const double exact = m[i] + precise_log(sum);
        const float lse = static_cast<float>(exact);
        w.stats(args.lse)[t] = lse;
        if (args.lse_rest.ptr)
            w.stats(args.lse_rest)[t] = static_cast<float>(exact - lse);
    }
}

template <class Tile>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
    constexpr int HS = Tile::HS;
    constexpr int Br = Tile::Br;
    constexpr int Bc = Tile::Bc;
    constexpr int kRowStride = Tile::kRowStride;
    constexpr int kPRowStride = Tile::kPRowStride;
    constexpr int ThreadRows = Tile::ThreadRows;
    constexpr int ThreadCols = Tile::ThreadCols;
    constexpr int ThreadOut = Tile::ThreadOut;
    extern __shared__ float4 dynamic_smem[];
    auto& smem = *reinterpret_cast<ForwardSharedMemory<Tile>*>(dynamic_smem);

    const WorkTile w = query_tile(args.NH);
    const int q0 = w.tile * Br;
    const float* q = args.q.row(w.b, q0, w.h, HS);
    const float* k = args.k.row(w.b, 0, w.h, HS);
    const float* v = args.v.row(w.b, 0, w.h, HS);
    // this thread's first row and column in the tile
    const int row = threadIdx.x / 32 * (Br / kWarps) + lane_row();
    const int col = lane_col();

    const int q_end = min(q0 + Br, args.Tq);
    const int k_end = min(args.Tk, q_end + args.shift);        // keys that the last row sees
    const int k_unmasked = min(args.Tk, q0 + args.shift + 1);  // keys that all rows see

    StagingRegisters<Br, HS> q_stage;
    StagingRegisters<Bc, HS> kv_stage;
    load_tile<Br, HS>(q_stage, q, args.q.token_stride, q_end - q0);
    stage_tile<Br, HS>(smem.q, q_stage, args.scale);
    load_tile<Bc, HS>(kv_stage, k, args.k.token_stride, k_end);
    stage_tile<Bc, HS>(smem.kv, kv_stage);

    float o[ThreadRows][ThreadOut] = {};
    float m[ThreadRows];
    float l[ThreadRows] = {};  // of this thread's columns until the end
    for (float& x : m)
        x = -INFINITY;

    for (int k0 = 0; k0 < k_end; k0 += Bc) {
        __syncthreads();  // K is there
        float s[ThreadRows][ThreadCols] = {};
        multiply_abt<HS>(s, smem.q[row], kRowStride, smem.kv[col], kRowStride);
        // V is loaded while the softmax runs
        load_tile<Bc, HS>(kv_stage, v + k0 * args.v.token_stride, args.v.token_stride, k_end - k0);

        if (k0 + Bc > k_unmasked) {  // the diagonal, and the last keys
            for (int i = 0; i < ThreadRows; i++)
                for (int j = 0; j < ThreadCols; j++) {
                    const int key = k0 + col + j * kLaneCols;
                    if (key >= args.Tk || key > q0 + row + i * kLaneRows + args.shift)
                        s[i][j] = -INFINITY;
                }
        }

        // Online softmax. Everything so far was relative to the old m.
        for (int i = 0; i < ThreadRows; i++) {
            const float rescale = raise_max(m[i], s[i]);
            const float l_tile = exponentials(&smem.p[row + i * kLaneRows][col], s[i], m[i]);
            l[i] = l[i] * rescale + l_tile;
            for (int j = 0; j < ThreadOut; j++)
                o[i][j] *= rescale;
        }

        __syncthreads();  // everyone is done with K
        stage_tile<Bc, HS>(smem.kv, kv_stage);
        __syncthreads();  // V is there, and P, whose rows stay within a warp
        const int k_next = k0 + Bc;
        if (k_next < k_end)
            load_tile<Bc, HS>(kv_stage, k + k_next * args.k.token_stride, args.k.token_stride,
                              k_end - k_next);
        // Each tile has a sum of its own, so the error of O does not grow with T. It would show in
        // dQ, where D = rowsum(dO∘O) has to cancel rowsum(P∘dP).
        float pv[ThreadRows][ThreadOut] = {};
        add_ab<Bc>(pv, smem.p[row], kPRowStride, &smem.kv[0][4 * col], kRowStride);
        for (int i = 0; i < ThreadRows; i++)
            for (int j = 0; j < ThreadOut; j++)
                o[i][j] += pv[i][j];
        __syncthreads();  // everyone is done with V
        if (k_next < k_end)
            stage_tile<Bc, HS>(smem.kv, kv_stage);
    }

    store_rows<HS>(args, w, q0 + row, col, o, m, l);
}

// -------------------------------------------------------------------------------------------------
// Backward: D, lse_rest if nobody gives it, then dQ, dK and dV

// D = rowsum(dO∘O). HS/16 neighbouring lanes own a row, kTerms each, and add their sums from left
// to right. dP = dO Vᵀ is summed in the same order. So dP − D is exactly 0 where one key has all
// the weight, because O is its V. Rows are numbered as in dO and O, (B, Tq, NH), and not as in D.
template <int HS>
__global__ void D_kernel(float* D, HeadsView<const float> dout, HeadsView<const float> out, int Tq,
                         int NH, size_t rows) {
    constexpr int kLanes = HS / kTerms;
    const size_t thread = blockIdx.x * static_cast<size_t>(kThreads) + threadIdx.x;
    const size_t row = thread / kLanes;
    const size_t h = row % NH;
    const size_t t = (row / NH) % Tq;
    const size_t b = row / NH / Tq;

    float sum = 0.f;
    if (row < rows) {
        const int column = (thread % kLanes) * kTerms;
        float x[kTerms];
        float y[kTerms];
        load(x, dout.row(b, t, h, HS) + column);
        load(y, out.row(b, t, h, HS) + column);
        for (int i = 0; i < kTerms; i++)
            sum = fmaf(x[i], y[i], sum);
    }
    float total = 0.f;
    for (int lane = 0; lane < kLanes; lane++)
        total += __shfl_sync(~0u, sum, lane, kLanes);
    if (row < rows && thread % kLanes == 0)
        D[(b * NH + h) * Tq + t] = total;
}

// Finds what lse lost when it was rounded to fp32, in units of log 2, for a backward to which
// nobody gave lse_rest. At |lse| = 128 it is up to 2^-17, a relative error that all P of a row
// share, 30 times naive's error. A row's P must add up to 1, so log Σ P is what is missing.
//
// Tiles without a large lse do no products and write zeros. In ordinary training no tile has one.
// In calls with fewer queries than keys every tile does the products, because the errors of few
// rows may all point one way.
constexpr float kLargeLse = 16;

template <class Tile>
__global__ void __launch_bounds__(kThreads, 2)
    lse_rest_kernel(const __grid_constant__ ForwardArgs args) {
    constexpr int HS = Tile::HS;
    constexpr int Br = Tile::Br;
    constexpr int Bc = Tile::Bc;
    constexpr int kRowStride = Tile::kRowStride;
    constexpr int ThreadRows = Tile::ThreadRows;
    constexpr int ThreadCols = Tile::ThreadCols;
    extern __shared__ float4 dynamic_smem[];
    auto& smem = *reinterpret_cast<ForwardSharedMemory<Tile>*>(dynamic_smem);

    const WorkTile w = query_tile(args.NH);
    const int q0 = w.tile * Br;
    // this thread's first row and column in the tile
    const int row = threadIdx.x / 32 * (Br / kWarps) + lane_row();
    const int col = lane_col();

    float lse[ThreadRows];
    float sum[ThreadRows] = {};
    bool needed = args.Tq < args.Tk;
    for (int i = 0; i < ThreadRows; i++) {
        const int t = q0 + row + i * kLaneRows;
        lse[i] = t < args.Tq ? w.stats(args.lse)[t] : 0.f;
        needed |= fabsf(lse[i]) > kLargeLse;
    }
    needed = __syncthreads_or(needed);  // by any thread of the block

    if (needed) {
        const int q_end = min(q0 + Br, args.Tq);
        const int k_end = min(args.Tk, q_end + args.shift);
        StagingRegisters<Br, HS> q_stage;
        load_tile<Br, HS>(q_stage, args.q.row(w.b, q0, w.h, HS), args.q.token_stride, q_end - q0);
        stage_tile<Br, HS>(smem.q, q_stage, args.scale);
        for (int k0 = 0; k0 < k_end; k0 += Bc) {
            StagingRegisters<Bc, HS> k_stage;
            load_tile<Bc, HS>(k_stage, args.k.row(w.b, k0, w.h, HS), args.k.token_stride,
                              k_end - k0);
            __syncthreads();  // everyone is done with the last tile
            stage_tile<Bc, HS>(smem.kv, k_stage);
            __syncthreads();  // the tile is there

            float s[ThreadRows][ThreadCols] = {};
            multiply_abt<HS>(s, smem.q[row], kRowStride, smem.kv[col], kRowStride);
            for (int i = 0; i < ThreadRows; i++)
                for (int j = 0; j < ThreadCols; j++) {
                    const int key = k0 + col + j * kLaneCols;
                    const bool visible =
                        key < args.Tk && key <= q0 + row + i * kLaneRows + args.shift;
                    sum[i] += visible ? exp2_approx((s[i][j] - lse[i]) * kLog2e) : 0.f;
                }
        }
    }

    for (int i = 0; i < ThreadRows; i++) {
        const int t = q0 + row + i * kLaneRows;
        const float total = row_sum(sum[i]);
        if (col == 0 && t < args.Tq)
            w.stats(args.lse_rest)[t] = needed ? log2f(total) : 0.f;
    }
}

struct BackwardArgs {
    HeadsView<const float> q;
    HeadsView<const float> k;
    HeadsView<const float> v;
    HeadsView<const float> dout;
    HeadsView<float> dq;
    HeadsView<float> dk;
    HeadsView<float> dv;
    RowStatsView<const float> lse;
    RowStatsView<const float> lse_rest;
    float rest_to_log2;    // lse_rest times this is in units of log 2
    const float* D;        // (B, NH, Tq)
    int* ticket;           // the next block's number
    int* key_tiles_added;  // (B·NH, query tiles), how many key tiles are in dq
    int Tq;
    int Tk;
    int NH;
    int heads;
    int shift;  // query i sees keys j ≤ i + shift
    float scale;
};

// Tiles of keys. A block waits for its predecessor in its head, so blocks number themselves in the
// order in which they start. Key tile j of all heads comes before j + 1, so the longest come first.
__device__ WorkTile key_tile(const BackwardArgs& args) {
    __shared__ int ticket_smem;
    if (threadIdx.x == 0)
        ticket_smem = atomicAdd(args.ticket, 1);
    __syncthreads();
    const int bh = ticket_smem % args.heads;
    const int tile = ticket_smem / args.heads;
    return {.tile = tile, .bh = bh, .b = bh / args.NH, .h = bh % args.NH};
}

template <class Tile>
__global__ void __launch_bounds__(kThreads, 2)
    backward_kernel(const __grid_constant__ BackwardArgs args) {
    constexpr int HS = Tile::HS;
    constexpr int Br = Tile::Br;
    constexpr int Bc = Tile::Bc;
    constexpr int kRowStride = Tile::kRowStride;
    constexpr int kPRowStride = Tile::kPRowStride;
    constexpr int ThreadRows = Tile::ThreadRows;
    constexpr int ThreadKeys = Bc / kWarps / kLaneRows;  // a thread's rows of dK and dV
    constexpr int ThreadCols = Tile::ThreadCols;
    constexpr int ThreadOut = Tile::ThreadOut;
    extern __shared__ float4 dynamic_smem[];
    auto& smem = *reinterpret_cast<BackwardSharedMemory<Tile>*>(dynamic_smem);

    const WorkTile w = key_tile(args);
    const int k0 = w.tile * Bc;
    const int keys = min(Bc, args.Tk - k0);  // of the tile that exist
    const int warp = threadIdx.x / 32;
    const int col = lane_col();
    // this thread's first row of the tile of queries, and of that of keys, in dK and dV
    const int row = warp * (Br / kWarps) + lane_row();
    const int key_row = warp * (Bc / kWarps) + ThreadKeys * lane_row();

    const int query_tiles = ceil_div<Br>(args.Tq);
    // the first that sees a key of this tile
    const int first_query_tile = max(0, k0 - args.shift) / Br;

    {
        StagingRegisters<Bc, HS> k_stage;
        StagingRegisters<Bc, HS> v_stage;
        load_tile<Bc, HS>(k_stage, args.k.row(w.b, k0, w.h, HS), args.k.token_stride, keys);
        load_tile<Bc, HS>(v_stage, args.v.row(w.b, k0, w.h, HS), args.v.token_stride, keys);
        stage_tile<Bc, HS>(smem.k, k_stage);
        stage_tile<Bc, HS>(smem.v, v_stage);
    }
    const auto load_queries = [&](int tile) {
        const int q0 = tile * Br;
        StagingRegisters<Br, HS> q_stage;
        StagingRegisters<Br, HS> do_stage;
        load_tile<Br, HS>(q_stage, args.q.row(w.b, q0, w.h, HS), args.q.token_stride, args.Tq - q0);
        load_tile<Br, HS>(do_stage, args.dout.row(w.b, q0, w.h, HS), args.dout.token_stride,
                          args.Tq - q0);
        stage_tile<Br, HS>(smem.q, q_stage, args.scale);
        stage_tile<Br, HS>(smem.dout, do_stage);
    };
    load_queries(query_tiles - 1);
    __syncthreads();

    // From the last query tile back, because all key tiles see that one: they wait for one another
    // once, at the start, and then follow at a distance.
    //   P; dP and dS; dV; dK and dQ; wait for this key tile's turn; add dQ; load the next Q and dO;
    //   pass the turn on
    float dk[ThreadKeys][ThreadOut] = {};
    float dv[ThreadKeys][ThreadOut] = {};
    for (int tile = query_tiles - 1; tile >= first_query_tile; tile--) {
        const int q0 = tile * Br;
        float lse[ThreadRows];
        float rest[ThreadRows];  // of lse, in units of log 2
        float D[ThreadRows];
        for (int i = 0; i < ThreadRows; i++) {
            const int t = q0 + row + i * kLaneRows;
            // a row past Tq has P = 0
            lse[i] = t < args.Tq ? w.stats(args.lse)[t] : INFINITY;
            rest[i] = t < args.Tq ? w.stats(args.lse_rest)[t] * args.rest_to_log2 : 0.f;
            D[i] = t < args.Tq ? args.D[static_cast<size_t>(w.bh) * args.Tq + t] : 0.f;
        }

        // P, at this thread's elements
        float* p_own = &smem.p[row][col];
        {
            float s[ThreadRows][ThreadCols] = {};
            multiply_abt<HS>(s, smem.q[row], kRowStride, smem.k[col], kRowStride);
            // the diagonal, and the last keys
            const bool masked = k0 + Bc > min(args.Tk, q0 + args.shift + 1);
            for (int i = 0; i < ThreadRows; i++)
                for (int j = 0; j < ThreadCols; j++) {
                    const int key = col + j * kLaneCols;  // of the tile
                    float p = exp2_approx(fmaf(s[i][j] - lse[i], kLog2e, -rest[i]));
                    if (masked && (key >= keys || k0 + key > q0 + row + i * kLaneRows + args.shift))
                        p = 0.f;
                    p_own[i * kLaneRows * kPRowStride + j * kLaneCols] = p;
                }
        }

        // dP is summed kTerms terms at a time, which halves its rounding error. If P is close to 1,
        // dP − D cancels and dS is that error. D_kernel adds in the same order, so at P = 1 they
        // cancel exactly.
        float ds[ThreadRows][ThreadCols] = {};
#pragma unroll 1
        for (int d = 0; d < HS; d += kTerms) {
            float sum[ThreadRows][ThreadCols] = {};
            multiply_abt<kTerms>(sum, &smem.dout[row][d], kRowStride, &smem.v[col][d], kRowStride);
            for (int i = 0; i < ThreadRows; i++)
                for (int j = 0; j < ThreadCols; j++)
                    ds[i][j] += sum[i][j];
        }
        for (int i = 0; i < ThreadRows; i++)
            for (int j = 0; j < ThreadCols; j++)
                ds[i][j] = p_own[i * kLaneRows * kPRowStride + j * kLaneCols] * (ds[i][j] - D[i]);

        // dV, dK and this tile's dQ
        __syncthreads();  // P is there
        add_atb<Br>(dv, &smem.p[0][key_row], kPRowStride, &smem.dout[0][4 * col], kRowStride);
        __syncthreads();  // everyone is done with P
        for (int i = 0; i < ThreadRows; i++)
            for (int j = 0; j < ThreadCols; j++)
                p_own[i * kLaneRows * kPRowStride + j * kLaneCols] = ds[i][j];
        __syncthreads();  // dS is there
        add_atb<Br>(dk, &smem.p[0][key_row], kPRowStride, &smem.q[0][4 * col], kRowStride);
        float dq[ThreadRows][ThreadOut] = {};
        add_ab<Bc>(dq, smem.p[row], kPRowStride, &smem.k[0][4 * col], kRowStride);

        // Add into dq when the key tiles before this one have.
        volatile int* added = args.key_tiles_added + static_cast<size_t>(w.bh) * query_tiles + tile;
        if (threadIdx.x == 0) {
            while (*added != w.tile)
                __nanosleep(50);
            // what the predecessor wrote before it raised the counter is visible now
            __threadfence();
        }
        // the predecessor's dq is visible to all, and everyone is done with Q and dS
        __syncthreads();
        for (int i = 0; i < ThreadRows; i++) {
            const int t = q0 + row + i * kLaneRows;
            if (t >= args.Tq)
                continue;
            float* to = row_from<HS>(args.dq, w, t, col);
            for (int n = 0; n < ThreadOut / 4; n++) {
                if (w.tile == 0)
                    store4(to + n * kPieceStride, &dq[i][4 * n], args.scale);
                else
                    add4(to + n * kPieceStride, &dq[i][4 * n], args.scale);
            }
        }
        if (tile > first_query_tile)
            load_queries(tile - 1);
        __syncthreads();  // dq is written, and the next Q and dO are there
        if (threadIdx.x == 0) {
            // one fence serves the block, because the barrier put the block's writes before it
            __threadfence();
            *added = w.tile + 1;
        }
    }

    for (int i = 0; i < ThreadKeys; i++) {
        if (key_row + i >= keys)
            continue;
        const int t = k0 + key_row + i;
        float* to_dk = row_from<HS>(args.dk, w, t, col);
        float* to_dv = row_from<HS>(args.dv, w, t, col);
        for (int n = 0; n < ThreadOut / 4; n++) {
            store4(to_dk + n * kPieceStride, &dk[i][4 * n]);
            store4(to_dv + n * kPieceStride, &dv[i][4 * n]);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Launchers

// Fills what ForwardArgs and BackwardArgs have in common. Throws Error if the call is more than one
// launch covers.
template <class Args, class Call>
Args common_args(const Call& c) {
    const AttentionShape& s = c.s;
    if (s.Tq > (1 << 20) || s.Tk > (1 << 20) ||
        static_cast<long long>(s.B) * s.NH * (s.Tk / kSmallestBc + 1) > INT_MAX)
        throw Error(format(
            "%s: B %d, Tq %d, Tk %d, NH %d is more than one launch covers (T ≤ 2^20, B·NH·T ≤ "
            "2^36); use a smaller batch or shorter sequences",
            kName, s.B, s.Tq, s.Tk, s.NH));
    Args args{};
    args.q = c.q;
    args.k = c.k;
    args.v = c.v;
    args.Tq = s.Tq;
    args.Tk = s.Tk;
    args.NH = s.NH;
    args.shift = s.shift();
    args.scale = s.resolved_scale();
    return args;
}

// Launches the kernel, or returns false if a block may not have this much shared memory, and
// ticket_smem besides.
template <class SharedMemory, class Args>
bool launch(const Cuda& dev, void (*kernel)(Args), const Args& args, dim3 blocks) {
    const int smem = sizeof(SharedMemory);
    if (smem + static_cast<int>(sizeof(int)) > dev.block_smem)
        return false;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    kernel<<<blocks, kThreads, smem, dev.stream>>>(args);
    LAUNCH_CHECK(kName);
    return true;
}

// Calls try_launch(Large{}), and try_launch(Small{}) if the large tiles do not fit.
template <class Large, class Small, class TryLaunch>
void launch_largest(const Cuda& dev, TryLaunch try_launch) {
    bool launched = try_launch(Large{});
    if (!launched)
        launched = try_launch(Small{});
    if (!launched)
        throw Error(format(
            "%s needs 64 KB of shared memory per block, which %s does not have; use --attention "
            "naive",
            kName, dev.name.c_str()));
}

template <class TryLaunch>
void launch_forward(const Cuda& dev, int HS, TryLaunch try_launch) {
    if (HS == 64)
        launch_largest<Forward64, ForwardSmall64>(dev, try_launch);
    else
        launch_largest<Forward128, ForwardSmall128>(dev, try_launch);
}
template <class TryLaunch>
void launch_backward(const Cuda& dev, int HS, TryLaunch try_launch) {
    if (HS == 64)
        launch_largest<Backward64, BackwardSmall64>(dev, try_launch);
    else
        launch_largest<Backward128, BackwardSmall128>(dev, try_launch);
}

// A block for each tile of queries.
template <class Tile>
dim3 query_blocks(const AttentionShape& s) {
    return dim3(s.B * s.NH, ceil_div(s.Tq, Tile::Br));
}

void forward(const Cuda& dev, const AttentionForward<float>& c) {
    auto args = common_args<ForwardArgs>(c);
    args.out = c.out;
    args.lse = c.lse;
    args.lse_rest = c.lse_rest;
    launch_forward(dev, c.s.HS, [&]<class Tile>(Tile) {
        return launch<ForwardSharedMemory<Tile>>(dev, forward_kernel<Tile>, args,
                                                 query_blocks<Tile>(c.s));
    });
}

// Scratch holds D and lse_rest, then the counters: the ticket, and one for each query tile of each
// head, of the smallest tiles, because these are the most.
size_t counter_bytes(const AttentionShape& s) {
    return (1 + static_cast<size_t>(s.B) * s.NH * ceil_div(s.Tq, kSmallestBr)) * sizeof(int);
}
size_t scratch_bytes(const AttentionShape& s) {
    return counter_bytes(s) + 2 * s.rows() * sizeof(float);
}

void find_D(const Cuda& dev, const AttentionBackward<float>& c, float* D) {
    const AttentionShape& s = c.s;
    const size_t blocks = (s.rows() * s.HS / kTerms + kThreads - 1) / kThreads;
    if (blocks > INT_MAX)
        throw Error(format("%s: %zu rows are more than one launch covers; use a smaller batch",
                           kName, s.rows()));
    const auto kernel = s.HS == 64 ? D_kernel<64> : D_kernel<128>;
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, dev.stream>>>(D, c.dout, c.out, s.Tq, s.NH,
                                                                       s.rows());
    LAUNCH_CHECK("flash_fp32 D_kernel");
}

void find_lse_rest(const Cuda& dev, const AttentionBackward<float>& c,
                   const RowStatsView<float>& lse_rest) {
    auto args = common_args<ForwardArgs>(c);
    args.lse = {const_cast<float*>(c.lse.ptr), c.lse.head_stride};
    args.lse_rest = lse_rest;
    launch_forward(dev, c.s.HS, [&]<class Tile>(Tile) {
        return launch<ForwardSharedMemory<Tile>>(dev, lse_rest_kernel<Tile>, args,
                                                 query_blocks<Tile>(c.s));
    });
}

void backward(const Cuda& dev, const AttentionBackward<float>& c) {
    const AttentionShape& s = c.s;
    float* D = static_cast<float*>(c.scratch);
    const RowStatsView<float> rest{D + s.rows(), static_cast<size_t>(s.Tq)};

    auto args = common_args<BackwardArgs>(c);
    args.heads = s.B * s.NH;
    args.dout = c.dout;
    args.lse = c.lse;
    args.D = D;
    args.dq = c.dq;
    args.dk = c.dk;
    args.dv = c.dv;
    args.ticket = reinterpret_cast<int*>(rest.ptr + s.rows());
    args.key_tiles_added = args.ticket + 1;
    dev.zero(args.ticket, counter_bytes(s));

    find_D(dev, c, D);
    if (c.lse_rest.ptr) {
        args.lse_rest = c.lse_rest;
        args.rest_to_log2 = kLog2e;
    } else {
        find_lse_rest(dev, c, rest);
        args.lse_rest = {rest.ptr, rest.head_stride};
        args.rest_to_log2 = 1.f;
    }
    launch_backward(dev, s.HS, [&]<class Tile>(Tile) {
        return launch<BackwardSharedMemory<Tile>>(dev, backward_kernel<Tile>, args,
                                                  args.heads * ceil_div(s.Tk, Tile::Bc));
    });
}

}  // namespace

const AttentionKernel<float> flash_fp32 = {
    .name = kName,
    .min_sm = 75,
    .flash = true,
    .supports = {.pieces = true, .lse_rest = true},
    .scratch_bytes = scratch_bytes,
    .unchecked = {.forward = forward,
                  .backward = backward,
                  .forward_fp32 = forward,
                  .backward_fp32 = backward},
};
