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
// past them. In backward one kernel makes all of dQ, dK and dV, with 5 products for 7. A block
// keeps Bc keys, and Q and dO stream past them.
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
// Limits: HS in {64, 128}, 1 ≤ T ≤ 2^20, B·NH·T ≤ 2^36.   Run: ./dev/bench_attention --kernel
// flash_fp32
#include <climits>

#include "attention/launch.h"
#include "attention/log.cuh"
#include "cuda/ptx_sm80.cuh"  // exp2_approx, kLog2e

namespace {

// -------------------------------------------------------------------------------------------------
// Tiles

constexpr int kWarps = 4, kThreads = 32 * kWarps;  // a warp for each scheduler of an SM
constexpr int kLaneRows = 4, kLaneCols = 8;        // a warp's lanes as a grid
// terms of a dot product that are summed in one go, as in D_kernel
constexpr int kTerms = 16;

// Br query rows and Bc keys. Two blocks share an SM where shared memory allows, so that one
// computes while the other loads or waits at a barrier.
template <int HS_, int Br_, int Bc_>
struct Tiles {
    static constexpr int HS = HS_, Br = Br_, Bc = Bc_;
    // Row lengths in shared memory. With +4 floats, lanes that read 16 bytes of 8 neighbouring rows
    // hit 8 different bank groups. With +8, a warp that writes 8 neighbouring floats in each of 4
    // rows hits 32 different banks.
    static constexpr int kRow = HS + 4, kPRow = Bc + 8;
    // Q, K or V, P
    static constexpr int forward_floats() { return (Br + Bc) * kRow + Br * kPRow; }
    // Q, dO, K, V, P or dS
    static constexpr int backward_floats() { return 2 * (Br + Bc) * kRow + Br * kPRow; }
};

//                                              a thread's S, O            shared memory
// 8×8, 8×8: 128 accumulators 87 KB, two blocks an SM on sm_90
using Forward64 = Tiles<64, 128, 64>;
using Forward128 = Tiles<128, 64, 64>;  // 4×8, 4×16                   84 KB
// 4×8, 4×8 52 KB, as Turing gives a block 64 KB
using ForwardSmall64 = Tiles<64, 64, 64>;
using ForwardSmall128 = Tiles<128, 32, 64>;  // 2×8, 2×16                   59 KB
//                                              a thread's S, dP, dK, dV
using Backward64 = Tiles<64, 64, 64>;  // all 4×8: 128 accumulators   86 KB
// 2×8, 2×8, 4×16, 4×16 108 KB, for sm_80, sm_90, sm_100
using Backward128 = Tiles<128, 32, 64>;
using BackwardSmall64 = Tiles<64, 32, 64>;    // 2×8, 2×8, 4×8, 4×8          60 KB
using BackwardSmall128 = Tiles<128, 16, 32>;  // 1×4, 1×4, 2×16, 2×16        52 KB

// The lane grid. Bits 0 and 4 of the lane are the row, and bits 1 to 3 the column. Lanes that share
// an address then differ in bit 0 (same column) or bit 1 (same row). That lets the hardware serve a
// 16-byte load of the warp in 2 passes, not 4.
__device__ int lane_row() {
    return (threadIdx.x & 1) | (threadIdx.x >> 3 & 2);
}
__device__ int lane_col() {
    return threadIdx.x >> 1 & 7;
}

// Over the 8 lanes that share a row.
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
// Tiles move to shared memory through registers, so that the loads can run beside something else.

template <int Rows, int HS>
constexpr int kStage = Rows * HS / 4 / kThreads;  // pieces of a thread

// A row is HS/4 threads wide. Each thread takes one 16-byte piece of every kRowsAtOnce-th row.
template <int HS>
constexpr int kRowsAtOnce = kThreads / (HS / 4);

// Rows beyond `valid` read as zero.
template <int Rows, int HS>
__device__ void fetch(float4 (&stage)[(kStage<Rows, HS>)], const float* rows, size_t token,
                      int valid) {
    const int row = threadIdx.x / (HS / 4);
    rows += row * token + threadIdx.x % (HS / 4) * 4;
    for (int i = 0; i < Rows / kRowsAtOnce<HS>; i++) {
        stage[i] =
            row + i * kRowsAtOnce<HS> < valid ? *reinterpret_cast<const float4*>(rows) : float4{};
        rows += kRowsAtOnce<HS> * token;
    }
}

template <int Rows, int HS>
__device__ void store(float* smem, const float4 (&stage)[kStage<Rows, HS>], float factor = 1.f) {
    smem += threadIdx.x / (HS / 4) * (HS + 4) + threadIdx.x % (HS / 4) * 4;
    for (int i = 0; i < Rows / kRowsAtOnce<HS>; i++) {
        const float4 v = stage[i];
        *reinterpret_cast<float4*>(smem + i * kRowsAtOnce<HS> * (HS + 4)) =
            float4{v.x * factor, v.y * factor, v.z * factor, v.w * factor};
    }
}

// -------------------------------------------------------------------------------------------------
// Products. a and b point to the thread's first row and column. Its rows are row, row + 4, …, or M
// neighbours in matmul_tn. Its columns are col, col + 8, … in matmul_nt, and in the others 4·col …
// 4·col + 3, then the same + 32, ….

template <int N>
__device__ void load(float (&to)[N], const float* from, int stride = 4) {
    if constexpr (N == 2) {
        const float2 v = *reinterpret_cast<const float2*>(from);
        to[0] = v.x;
        to[1] = v.y;
    } else {
        for (int n = 0; n < N / 4; n++) {
            const float4 v = *reinterpret_cast<const float4*>(from + n * stride);
            to[4 * n] = v.x;
            to[4 * n + 1] = v.y;
            to[4 * n + 2] = v.z;
            to[4 * n + 3] = v.w;
        }
    }
}

// acc += A Bᵀ over K columns.
template <int K, int M, int N>
__device__ void matmul_nt(float (&acc)[M][N], const float* a, int a_row, const float* b,
                          int b_row) {
#pragma unroll 4
    for (int k = 0; k < K; k += 4) {
        float b_regs[N][4];
        for (int j = 0; j < N; j++)
            load(b_regs[j], b + j * kLaneCols * b_row + k);
        for (int i = 0; i < M; i++) {
            float a_regs[4];
            load(a_regs, a + i * kLaneRows * a_row + k);
            for (int e = 0; e < 4; e++)
                for (int j = 0; j < N; j++)
                    acc[i][j] += a_regs[e] * b_regs[j][e];
        }
    }
}

// acc += A B over K columns of A, rows of B.
// [quote]
template <int K, int M, int N>
__device__ void matmul_nn(float (&acc)[M][N], const float* a, int a_row, const float* b,
                          int b_row) {
#pragma unroll 1  // more would spill on sm_80
    for (int k = 0; k < K; k += 4) {
        float a_regs[M][4];
        for (int i = 0; i < M; i++)
            load(a_regs[i], a + i * kLaneRows * a_row + k);
        for (int e = 0; e < 4; e++) {
            float b_regs[N];
            load(b_regs, b + (k + e) * b_row, 4 * kLaneCols);
            for (int i = 0; i < M; i++)
                for (int j = 0; j < N; j++)
                    acc[i][j] += a_regs[i][e] * b_regs[j];
        }
    }
}
// [end]

// acc += Aᵀ B over K rows.
template <int K, int M, int N>
__device__ void matmul_tn(float (&acc)[M][N], const float* a, int a_row, const float* b,
                          int b_row) {
#pragma unroll 8
    for (int k = 0; k < K; k++) {
        float a_regs[M];
        float b_regs[N];
        load(a_regs, a + k * a_row);
        load(b_regs, b + k * b_row, 4 * kLaneCols);
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++)
                acc[i][j] += a_regs[i] * b_regs[j];
    }
}

// -------------------------------------------------------------------------------------------------
// Forward

struct ForwardArgs {
    HeadsView<const float> q, k, v;
    HeadsView<float> out;
    RowStatsView<float> lse, lse_rest;  // lse_rest may be null. lse_rest_kernel reads lse
    int Tq, Tk, NH;
    int shift;  // query i sees the keys j ≤ i + shift
    float scale;
};

// Writes O / l and lse. A thread has rows row, row + 4, ….
template <class Tile, int M, int N>
__device__ void store_out(const ForwardArgs& args, int b, int h, int row, int col,
                          const float (&o_regs)[M][N], const float (&m)[M], float (&l)[M]) {
#pragma unroll  // before the compiler orders the loads, not after
    for (int i = 0; i < M; i++) {
        l[i] = row_sum(l[i]);
        const int t = row + i * kLaneRows;
        if (t >= args.Tq)
            continue;
        float* out = args.out.row(b, t, h, Tile::HS) + 4 * col;
        const float inv_l = 1.f / l[i];
        for (int n = 0; n < N / 4; n++) {
            const float* o = &o_regs[i][4 * n];
            *reinterpret_cast<float4*>(out + n * 4 * kLaneCols) =
                float4{o[0] * inv_l, o[1] * inv_l, o[2] * inv_l, o[3] * inv_l};
        }
        if (col > 0)
            continue;
        const double exact = m[i] + precise_log(l[i]);
        const float lse = static_cast<float>(exact);
        args.lse.ptr[blockIdx.x * args.lse.head_stride + t] = lse;
        if (args.lse_rest.ptr)
            args.lse_rest.ptr[blockIdx.x * args.lse_rest.head_stride + t] =
                static_cast<float>(exact - lse);
    }
}

template <class Tile>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(ForwardArgs args) {
    constexpr int HS = Tile::HS;
    constexpr int Br = Tile::Br;
    constexpr int Bc = Tile::Bc;
    constexpr int kRow = Tile::kRow;
    constexpr int kPRow = Tile::kPRow;
    constexpr int M = Br / kWarps / kLaneRows;
    constexpr int N = Bc / kLaneCols;
    constexpr int kOut = HS / kLaneCols;
    extern __shared__ float4 smem[];
    float* q_smem = reinterpret_cast<float*>(smem);  // (Br, HS), scaled
    float* kv_smem = q_smem + Br * kRow;             // (Bc, HS), K and V in turn
    float* p_smem = kv_smem + Bc * kRow;             // (Br, Bc)

    // Longest rows first, so that short ones fill the gaps at the end.
    const int b = blockIdx.x / args.NH;
    const int h = blockIdx.x % args.NH;
    const int q0 = (gridDim.y - 1 - blockIdx.y) * Br;
    const float* q = args.q.ptr + b * args.q.batch_stride + q0 * args.q.token_stride + h * HS;
    const float* k = args.k.ptr + b * args.k.batch_stride + h * HS;
    const float* v = args.v.ptr + b * args.v.batch_stride + h * HS;
    // this thread's first
    const int row = threadIdx.x / 32 * (Br / kWarps) + lane_row();
    const int col = lane_col();

    const int q_end = min(q0 + Br, args.Tq);
    const int kv_end = min(args.Tk, q_end + args.shift);           // keys that the last row sees
    const int kv_seen_by_all = min(args.Tk, q0 + args.shift + 1);  // keys that the first row sees

    float4 q_stage[kStage<Br, HS>];
    float4 kv_stage[kStage<Bc, HS>];
    fetch<Br, HS>(q_stage, q, args.q.token_stride, q_end - q0);
    store<Br, HS>(q_smem, q_stage, args.scale);
    fetch<Bc, HS>(kv_stage, k, args.k.token_stride, kv_end);
    store<Bc, HS>(kv_smem, kv_stage);

    float o_regs[M][kOut] = {};
    float m[M];
    float l[M] = {};  // l is of this thread's columns only
    for (int i = 0; i < M; i++)
        m[i] = -INFINITY;

    for (int kv0 = 0; kv0 < kv_end; kv0 += Bc) {
        __syncthreads();  // K is there
        float s_regs[M][N] = {};
        matmul_nt<HS>(s_regs, q_smem + row * kRow, kRow, kv_smem + col * kRow, kRow);
        // V comes while the softmax runs
        fetch<Bc, HS>(kv_stage, v + kv0 * args.v.token_stride, args.v.token_stride, kv_end - kv0);

        if (kv0 + Bc > kv_seen_by_all) {  // the diagonal, and the last keys
            for (int i = 0; i < M; i++)
                for (int j = 0; j < N; j++) {
                    const int key = kv0 + col + j * kLaneCols;
                    if (key >= args.Tk || key > q0 + row + i * kLaneRows + args.shift)
                        s_regs[i][j] = -INFINITY;
                }
        }

        // Online softmax. Everything so far was relative to the old m.
        for (int i = 0; i < M; i++) {
            float m_new = s_regs[i][0];
            for (int j = 1; j < N; j++)
                m_new = fmaxf(m_new, s_regs[i][j]);
            m_new = fmaxf(m[i], row_max(m_new));
            const float correction = exp2_approx((m[i] - m_new) * kLog2e);
            m[i] = m_new;
            float l_tile = 0.f;
            for (int j = 0; j < N; j++) {
                const float p = exp2_approx((s_regs[i][j] - m_new) * kLog2e);
                l_tile += p;
                p_smem[(row + i * kLaneRows) * kPRow + col + j * kLaneCols] = p;
            }
            l[i] = l[i] * correction + l_tile;
            for (int j = 0; j < kOut; j++)
                o_regs[i][j] *= correction;
        }

        __syncthreads();  // everyone is done with K
        store<Bc, HS>(kv_smem, kv_stage);
        __syncthreads();  // V is there, and P, whose rows stay within a warp
        const int kv_next = kv0 + Bc;
        if (kv_next < kv_end)
            fetch<Bc, HS>(kv_stage, k + kv_next * args.k.token_stride, args.k.token_stride,
                          kv_end - kv_next);
        // Each tile has a sum of its own, so the error of O does not grow with T. It would show in
        // dQ, where D = rowsum(dO∘O) has to cancel rowsum(P∘dP).
        float pv_regs[M][kOut] = {};
        matmul_nn<Bc>(pv_regs, p_smem + row * kPRow, kPRow, kv_smem + 4 * col, kRow);
        for (int i = 0; i < M; i++)
            for (int j = 0; j < kOut; j++)
                o_regs[i][j] += pv_regs[i][j];
        __syncthreads();  // everyone is done with V
        if (kv_next < kv_end)
            store<Bc, HS>(kv_smem, kv_stage);
    }

    store_out<Tile>(args, b, h, q0 + row, col, o_regs, m, l);
}

// -------------------------------------------------------------------------------------------------
// Backward

// D = rowsum(dO∘O). HS/16 neighbouring lanes own a row, kTerms each, and add their sums from left
// to right. dP = dO Vᵀ is summed in the same order. So dP − D is exactly 0 where one key has all
// the weight, because O is its V.
template <int HS>
__global__ void D_kernel(float* D, HeadsView<const float> dout, HeadsView<const float> out, int Tq,
                         int NH, size_t rows) {
    constexpr int kLanes = HS / kTerms;
    const size_t thread = blockIdx.x * static_cast<size_t>(kThreads) + threadIdx.x;
    const size_t row = thread / kLanes;
    const size_t h = row % NH;
    const size_t t = row / NH % Tq;
    const size_t b = row / NH / Tq;
    float sum = 0.f;
    if (row < rows) {
        const int column = thread % kLanes * kTerms;
        const float* x = dout.row(b, t, h, HS) + column;
        const float* y = out.row(b, t, h, HS) + column;
        float x_regs[kTerms];
        float y_regs[kTerms];
        load(x_regs, x);
        load(y_regs, y);
        for (int i = 0; i < kTerms; i++)
            sum = fmaf(x_regs[i], y_regs[i], sum);
    }
    float total = 0.f;
    for (int lane = 0; lane < kLanes; lane++)
        total += __shfl_sync(~0u, sum, lane, kLanes);
    if (row < rows && thread % kLanes == 0)
        D[(b * NH + h) * Tq + t] = total;
}

// Runs before a backward to which nobody gave lse_rest. It finds what lse lost when it was rounded
// to fp32, in units of log 2. At |lse| = 128 that is up to 2^-17 of all P of a row, 30 times
// naive's error. A row's P must add up to 1, so log Σ P is what is missing. Tiles without a large
// lse only write zeros, and in ordinary training no tile has one. Calls with few queries are the
// exception, because there the errors of few rows may all point one way.
constexpr float kLargeLse = 16;

template <class Tile>
__global__ void __launch_bounds__(kThreads, 2) lse_rest_kernel(ForwardArgs args) {
    constexpr int HS = Tile::HS;
    constexpr int Br = Tile::Br;
    constexpr int Bc = Tile::Bc;
    constexpr int kRow = Tile::kRow;
    constexpr int M = Br / kWarps / kLaneRows;
    constexpr int N = Bc / kLaneCols;
    extern __shared__ float4 smem[];
    float* q_smem = reinterpret_cast<float*>(smem);  // (Br, HS), scaled
    float* k_smem = q_smem + Br * kRow;              // (Bc, HS)

    const int b = blockIdx.x / args.NH;
    const int h = blockIdx.x % args.NH;
    const int q0 = (gridDim.y - 1 - blockIdx.y) * Br;
    // this thread's first
    const int row = threadIdx.x / 32 * (Br / kWarps) + lane_row();
    const int col = lane_col();
    float lse[M];
    float sum[M] = {};
    bool large = args.Tq < args.Tk;
    for (int i = 0; i < M; i++) {
        const int t = q0 + row + i * kLaneRows;
        lse[i] = t < args.Tq ? args.lse.ptr[blockIdx.x * args.lse.head_stride + t] : 0.f;
        large |= fabsf(lse[i]) > kLargeLse;
    }
    large = __syncthreads_or(large);
    if (large) {
        const int q_end = min(q0 + Br, args.Tq);
        const int kv_end = min(args.Tk, q_end + args.shift);
        float4 q_stage[kStage<Br, HS>];
        fetch<Br, HS>(q_stage,
                      args.q.ptr + b * args.q.batch_stride + q0 * args.q.token_stride + h * HS,
                      args.q.token_stride, q_end - q0);
        store<Br, HS>(q_smem, q_stage, args.scale);
        for (int kv0 = 0; kv0 < kv_end; kv0 += Bc) {
            float4 k_stage[kStage<Bc, HS>];
            fetch<Bc, HS>(k_stage,
                          args.k.ptr + b * args.k.batch_stride + kv0 * args.k.token_stride + h * HS,
                          args.k.token_stride, kv_end - kv0);
            __syncthreads();  // everyone is done with the last tile
            store<Bc, HS>(k_smem, k_stage);
            __syncthreads();
            float s_regs[M][N] = {};
            matmul_nt<HS>(s_regs, q_smem + row * kRow, kRow, k_smem + col * kRow, kRow);
            for (int i = 0; i < M; i++)
                for (int j = 0; j < N; j++) {
                    const int key = kv0 + col + j * kLaneCols;
                    const bool seen = key < args.Tk && key <= q0 + row + i * kLaneRows + args.shift;
                    sum[i] += seen ? exp2_approx((s_regs[i][j] - lse[i]) * kLog2e) : 0.f;
                }
        }
    }
    for (int i = 0; i < M; i++) {
        const int t = q0 + row + i * kLaneRows;
        const float total = row_sum(sum[i]);
        if (col == 0 && t < args.Tq)
            args.lse_rest.ptr[blockIdx.x * args.lse_rest.head_stride + t] =
                large ? log2f(total) : 0.f;
    }
}

struct BackwardArgs {
    HeadsView<const float> q, k, v, dout;
    HeadsView<float> dq, dk, dv;
    RowStatsView<const float> lse, lse_rest;
    float rest_log2;       // lse_rest times this is in units of log 2
    const float* D;        // (B,NH,Tq)
    int* ticket;           // the next block's number
    int* key_tiles_added;  // (B·NH, query tiles), how many key tiles are in dq
    int Tq, Tk, NH, heads;
    int shift;  // query i sees the keys j ≤ i + shift
    float scale;
};

// Writes x·factor, or adds it to what is there.
__device__ void put4(float* to, const float* x, bool add = false, float factor = 1.f) {
    float4 sum{x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor};
    if (add) {
        // bypasses L1, which does not see other SMs' writes
        const float4 old = __ldcg(reinterpret_cast<float4*>(to));
        sum.x += old.x;
        sum.y += old.y;
        sum.z += old.z;
        sum.w += old.w;
    }
    *reinterpret_cast<float4*>(to) = sum;
}

template <class Tile>
__global__ void __launch_bounds__(kThreads, 2) backward_kernel(BackwardArgs args) {
    constexpr int HS = Tile::HS;
    constexpr int Br = Tile::Br;
    constexpr int Bc = Tile::Bc;
    constexpr int kRow = Tile::kRow;
    constexpr int kPRow = Tile::kPRow;
    constexpr int M = Br / kWarps / kLaneRows;
    constexpr int N = Bc / kLaneCols;  // S, dP: rows are queries
    constexpr int Mk = Bc / kWarps / kLaneRows;
    constexpr int kOut = HS / kLaneCols;  // dK, dV: rows are keys
    extern __shared__ float4 smem[];
    float* k_smem = reinterpret_cast<float*>(smem);  // (Bc, HS)
    float* v_smem = k_smem + Bc * kRow;              // (Bc, HS)
    float* q_smem = v_smem + Bc * kRow;              // (Br, HS), scaled
    float* do_smem = q_smem + Br * kRow;             // (Br, HS)
    float* p_smem = do_smem + Br * kRow;             // (Br, Bc), P and dS in turn
    __shared__ int ticket_smem;

    // A block waits for its predecessor in its head, so blocks number themselves in the order in
    // which they start. Key tile j of all heads comes before j + 1, so the longest come first.
    if (threadIdx.x == 0)
        ticket_smem = atomicAdd(args.ticket, 1);
    __syncthreads();
    const int bh = ticket_smem % args.heads;
    const int key_tile = ticket_smem / args.heads;
    const int kv0 = key_tile * Bc;
    const int b = bh / args.NH;
    const int h = bh % args.NH;
    const int warp = threadIdx.x / 32;
    const int col = lane_col();
    const int row = warp * (Br / kWarps) + lane_row();       // this thread's first query
    const int key = warp * (Bc / kWarps) + Mk * lane_row();  // and key, in dK and dV

    const int query_tiles = (args.Tq + Br - 1) / Br;
    // the first that sees a key of this tile
    const int first_query_tile = max(0, kv0 - args.shift) / Br;

    const int keys = min(Bc, args.Tk - kv0);
    {
        float4 k_stage[kStage<Bc, HS>];
        float4 v_stage[kStage<Bc, HS>];
        fetch<Bc, HS>(k_stage,
                      args.k.ptr + b * args.k.batch_stride + kv0 * args.k.token_stride + h * HS,
                      args.k.token_stride, keys);
        fetch<Bc, HS>(v_stage,
                      args.v.ptr + b * args.v.batch_stride + kv0 * args.v.token_stride + h * HS,
                      args.v.token_stride, keys);
        store<Bc, HS>(k_smem, k_stage);
        store<Bc, HS>(v_smem, v_stage);
    }
    const auto load_queries = [&](int tile) {
        const int q0 = tile * Br;
        float4 q_stage[kStage<Br, HS>];
        float4 do_stage[kStage<Br, HS>];
        fetch<Br, HS>(q_stage,
                      args.q.ptr + b * args.q.batch_stride + q0 * args.q.token_stride + h * HS,
                      args.q.token_stride, args.Tq - q0);
        fetch<Br, HS>(
            do_stage,
            args.dout.ptr + b * args.dout.batch_stride + q0 * args.dout.token_stride + h * HS,
            args.dout.token_stride, args.Tq - q0);
        store<Br, HS>(q_smem, q_stage, args.scale);
        store<Br, HS>(do_smem, do_stage);
    };
    load_queries(query_tiles - 1);
    __syncthreads();

    // Goes from the last query tile back, so that all key tiles meet it first. They wait for one
    // another once, at the start, and follow at a distance.
    float dk_regs[Mk][kOut] = {};
    float dv_regs[Mk][kOut] = {};
    for (int tile = query_tiles - 1; tile >= first_query_tile; tile--) {
        const int q0 = tile * Br;
        float lse[M];
        float rest[M];
        float D[M];
        for (int i = 0; i < M; i++) {
            const int t = q0 + row + i * kLaneRows;
            // a row past Tq has P = 0
            lse[i] = t < args.Tq ? args.lse.ptr[bh * args.lse.head_stride + t] : INFINITY;
            rest[i] = t < args.Tq
                          ? args.lse_rest.ptr[bh * args.lse_rest.head_stride + t] * args.rest_log2
                          : 0.f;
            D[i] = t < args.Tq ? args.D[static_cast<size_t>(bh) * args.Tq + t] : 0.f;
        }

        float* p_own = p_smem + row * kPRow + col;  // this thread's elements of P, then of dS
        {
            float s_regs[M][N] = {};
            matmul_nt<HS>(s_regs, q_smem + row * kRow, kRow, k_smem + col * kRow, kRow);
            // the diagonal, and the last keys
            const bool masked = kv0 + Bc > min(args.Tk, q0 + args.shift + 1);
            for (int i = 0; i < M; i++)
                for (int j = 0; j < N; j++) {
                    const int c = col + j * kLaneCols;
                    float p = exp2_approx(fmaf(s_regs[i][j] - lse[i], kLog2e, -rest[i]));
                    if (masked && (c >= keys || kv0 + c > q0 + row + i * kLaneRows + args.shift))
                        p = 0.f;
                    p_own[i * kLaneRows * kPRow + j * kLaneCols] = p;
                }
        }
        // dP is summed kTerms terms at a time, which halves its rounding error. If P is close to 1,
        // dP − D cancels and dS is that error. D_kernel adds in the same order, so at P = 1 they
        // cancel exactly.
        float ds_regs[M][N] = {};
#pragma unroll 1
        for (int k = 0; k < HS; k += kTerms) {
            float sum[M][N] = {};
            matmul_nt<kTerms>(sum, do_smem + row * kRow + k, kRow, v_smem + col * kRow + k, kRow);
            for (int i = 0; i < M; i++)
                for (int j = 0; j < N; j++)
                    ds_regs[i][j] += sum[i][j];
        }
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++)
                ds_regs[i][j] =
                    p_own[i * kLaneRows * kPRow + j * kLaneCols] * (ds_regs[i][j] - D[i]);
        __syncthreads();  // P is there
        matmul_tn<Br>(dv_regs, p_smem + key, kPRow, do_smem + 4 * col, kRow);
        __syncthreads();  // everyone is done with P
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++)
                p_own[i * kLaneRows * kPRow + j * kLaneCols] = ds_regs[i][j];
        __syncthreads();  // dS is there
        matmul_tn<Br>(dk_regs, p_smem + key, kPRow, q_smem + 4 * col, kRow);
        float dq_regs[M][kOut] = {};
        matmul_nn<Bc>(dq_regs, p_smem + row * kPRow, kPRow, k_smem + 4 * col, kRow);

        // Add into dq when the key tiles before this one have.
        volatile int* added = args.key_tiles_added + static_cast<size_t>(bh) * query_tiles + tile;
        if (threadIdx.x == 0) {
            while (*added != key_tile)
                __nanosleep(50);
            // what the predecessor wrote before it raised the counter is visible now
            __threadfence();
        }
        // the predecessor's dq is visible to all, and everyone is done with Q and dS
        __syncthreads();
        for (int i = 0; i < M; i++) {
            const int t = q0 + row + i * kLaneRows;
            if (t >= args.Tq)
                continue;
            float* dq = args.dq.ptr + b * args.dq.batch_stride + t * args.dq.token_stride + h * HS +
                        4 * col;
            for (int n = 0; n < kOut / 4; n++)
                put4(dq + n * 4 * kLaneCols, &dq_regs[i][4 * n], key_tile > 0, args.scale);
        }
        if (tile > first_query_tile)
            load_queries(tile - 1);
        __syncthreads();  // dq is written, and the next Q and dO are there
        if (threadIdx.x == 0) {
            // one serves the block, because the barrier orders all its writes before it
            __threadfence();
            *added = key_tile + 1;
        }
    }

    for (int i = 0; i < Mk; i++) {
        if (key + i >= keys)
            continue;
        const size_t t = kv0 + key + i;
        float* dk =
            args.dk.ptr + b * args.dk.batch_stride + t * args.dk.token_stride + h * HS + 4 * col;
        float* dv =
            args.dv.ptr + b * args.dv.batch_stride + t * args.dv.token_stride + h * HS + 4 * col;
        for (int n = 0; n < kOut / 4; n++) {
            put4(dk + n * 4 * kLaneCols, &dk_regs[i][4 * n]);
            put4(dv + n * 4 * kLaneCols, &dv_regs[i][4 * n]);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Launchers

constexpr char kName[] = "flash_fp32";

// Fills what the kernels' arguments have in common.
template <class Args, class Call>
Args common_args(const Call& c) {
    const AttentionShape& s = c.s;
    if (s.Tq > (1 << 20) || s.Tk > (1 << 20) ||
        static_cast<long long>(s.B) * s.NH * (s.Tk / 32 + 1) > INT_MAX)
        throw Error(
            format("%s: B %d, Tq %d, Tk %d, NH %d is more than one launch covers (T ≤ 2^20, "
                   "B·NH·T ≤ 2^36); "
                   "split the batch or the sequence",
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

// Launches the kernel if a block may have so many floats of shared memory, besides an int.
template <class Args>
bool launch(const Cuda& dev, void (*kernel)(Args), const Args& args, dim3 blocks, int floats) {
    const int smem = floats * static_cast<int>(sizeof(float));
    if (smem + static_cast<int>(sizeof(int)) > dev.block_smem)
        return false;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    kernel<<<blocks, kThreads, smem, dev.stream>>>(args);
    LAUNCH_CHECK(kName);
    return true;
}
void throw_no_tile(const Cuda& dev) {
    throw Error(format(
        "%s: %s gives a block less than the 64 KB of shared memory that the smallest tiles need; "
        "use naive attention",
        kName, dev.name.c_str()));
}

// Launches forward_kernel, or lse_rest_kernel, with the largest tiles that fit.
template <class Tile>
bool launch_forward(const Cuda& dev, const ForwardArgs& args, int B, bool rest) {
    const auto kernel = rest ? lse_rest_kernel<Tile> : forward_kernel<Tile>;
    return launch(dev, kernel, args, dim3(B * args.NH, ceil_div(args.Tq, Tile::Br)),
                  Tile::forward_floats());
}
void launch_forward(const Cuda& dev, const ForwardArgs& args, const AttentionShape& s, bool rest) {
    const bool launched = s.HS == 64 ? launch_forward<Forward64>(dev, args, s.B, rest) ||
                                           launch_forward<ForwardSmall64>(dev, args, s.B, rest)
                                     : launch_forward<Forward128>(dev, args, s.B, rest) ||
                                           launch_forward<ForwardSmall128>(dev, args, s.B, rest);
    if (!launched)
        throw_no_tile(dev);
}
void forward(const Cuda& dev, const AttentionForward<float>& c) {
    auto args = common_args<ForwardArgs>(c);
    args.out = c.out;
    args.lse = c.lse;
    args.lse_rest = c.lse_rest;
    launch_forward(dev, args, c.s, false);
}

template <class Tile>
bool launch_backward(const Cuda& dev, const BackwardArgs& args) {
    return launch(dev, backward_kernel<Tile>, args, args.heads * ceil_div(args.Tk, Tile::Bc),
                  Tile::backward_floats());
}
// Scratch holds D and lse_rest, then the counters. These are the ticket, and one for each query
// tile of at least 16 rows of each head.
size_t counter_bytes(const AttentionShape& s) {
    return (1 + static_cast<size_t>(s.B) * s.NH * ceil_div(s.Tq, 16)) * sizeof(int);
}
size_t scratch_bytes(const AttentionShape& s) {
    return counter_bytes(s) + 2 * s.rows() * sizeof(float);
}
void backward(const Cuda& dev, const AttentionBackward<float>& c) {
    const AttentionShape& s = c.s;
    float* D = static_cast<float*>(c.scratch);
    float* rest = D + s.rows();
    auto args = common_args<BackwardArgs>(c);
    args.heads = s.B * s.NH;
    args.dout = c.dout;
    args.lse = c.lse;
    args.D = D;
    args.dq = c.dq;
    args.dk = c.dk;
    args.dv = c.dv;
    args.ticket = reinterpret_cast<int*>(rest + s.rows());
    args.key_tiles_added = args.ticket + 1;
    dev.zero(args.ticket, counter_bytes(s));

    const size_t blocks = (s.rows() * s.HS / kTerms + kThreads - 1) / kThreads;
    if (blocks > INT_MAX)
        throw Error(format("%s: %zu rows are too many: use a smaller batch", kName, s.rows()));
    const auto D_of_rows = s.HS == 64 ? D_kernel<64> : D_kernel<128>;
    D_of_rows<<<static_cast<unsigned>(blocks), kThreads, 0, dev.stream>>>(D, c.dout, c.out, s.Tq,
                                                                          s.NH, s.rows());
    LAUNCH_CHECK("flash_fp32 D_kernel");
    if (c.lse_rest.ptr) {
        args.lse_rest = c.lse_rest;
        args.rest_log2 = kLog2e;
    } else {
        auto find_rest = common_args<ForwardArgs>(c);
        find_rest.lse = {const_cast<float*>(c.lse.ptr), c.lse.head_stride};
        find_rest.lse_rest = {rest, static_cast<size_t>(s.Tq)};
        launch_forward(dev, find_rest, s, true);
        args.lse_rest = {rest, static_cast<size_t>(s.Tq)}, args.rest_log2 = 1.f;
    }
    if (!(s.HS == 64 ? launch_backward<Backward64>(dev, args) ||
                           launch_backward<BackwardSmall64>(dev, args)
                     : launch_backward<Backward128>(dev, args) ||
                           launch_backward<BackwardSmall128>(dev, args)))
        throw_no_tile(dev);
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
