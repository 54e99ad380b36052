// Flash attention, bf16, mma.sync (sm_80+), as plain as it can be on tensor cores.
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
// Backward, given lse and D = rowsum(dO∘O):
//   P  = exp(S − lse)
//   dS = P∘(dO Vᵀ − D)
//   dQ = scale·dS K                dq_kernel: a block owns queries, and keys pass by
//   dK = scale·dSᵀ Q               dkdv_kernel: a block owns keys, and queries pass by
//   dV = Pᵀ dO                     dkdv_kernel, too
//
// New against flash_fp32: a warp multiplies 16×16 by 16×8 in one instruction. Its operands are
// fragments, spread over the lanes of the warp (fragments.cuh, mma_m16n8k16_bf16). The accumulator
// of S has the layout that the A operand of P V wants. So P is converted from fp32 to bf16 in
// place, without going through shared memory or another lane, and so is dS for dS K. dkdv_kernel
// computes Sᵀ and dPᵀ, with keys as rows, because then the same holds for Pᵀ and dSᵀ.
//
// A block of 4 warps owns 64 rows of one (b, head), 16 a warp, whose fragments stay in registers.
// The other tensors pass through shared memory, from which ldmatrix loads fragments, transposed if
// need be.
//
// Of a 16×8 tile of S, lane l holds the elements
//   (g,   c)  (g,   c+1)           with g = l / 4
//   (g+8, c)  (g+8, c+1)           and  c = 2 (l % 4)
// so four neighbouring lanes share the rows g and g + 8, and row sums and maxima need two shuffles.
//
// Loads and products wait for each other. In flash_bf16 they overlap, and each fragment from shared
// memory feeds two instructions, because its warps own 32 rows.
//
// Writes: forward out and lse, backward dq, dk and dv (every element).  Scratch: D.
// Limits: HS in {64, 128}, scale > 0, any Tq and Tk, in backward Tq = Tk.
// Run: ./dev/bench_attention --kernel flash_mma
#include "attention/fragments.cuh"
#include "attention/launch.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
// kernels have empty bodies there, and what only they use is "never referenced"
#pragma nv_diag_suppress 177
#endif

namespace {

constexpr char kName[] = "flash_mma";

// -------------------------------------------------------------------------------------------------
// Tiles and fragments

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16 * kWarps;  // of a block: forward's and dq_kernel's Br, dkdv_kernel's Bc
constexpr int kPassing = 32;  // rows of a passing tile in backward: accumulators leave no more room

// With 8 elements more, the rows of 16 bytes that ldmatrix reads at once, from 8 neighbouring rows,
// are in different banks.
template <int HS, int Rows>
using SmemTile = bf16[Rows][HS + 8];

template <int HS>
using Fragments = uint32_t[HS / 16][4];  // 16 rows of Q, K, V, dO or O as A operands
template <int N>
using Accumulator = float[N / 8][4];  // 16 rows of N columns

// -------------------------------------------------------------------------------------------------
// Loads

// Copies rows [row0, row0 + Rows) of a head. Rows from `end` on become zeros, because P = 0 times
// NaN is NaN.
template <int HS, int Rows>
__device__ void load_tile(SmemTile<HS, Rows>& tile, const bf16* head, size_t row_stride, int row0,
                          int end) {
    constexpr int kPieces = HS / 8;  // of 16 bytes in a row, one a thread
    constexpr int kRowsAtOnce = kThreads / kPieces;
    const int d = (threadIdx.x % kPieces) * 8;
    int row = threadIdx.x / kPieces;
    const bf16* src = head + (row0 + row) * row_stride + d;
    for (; row < Rows; row += kRowsAtOnce) {
        uint4 x{0, 0, 0, 0};
        if (row0 + row < end)
            x = *reinterpret_cast<const uint4*>(src);
        *reinterpret_cast<uint4*>(&tile[row][d]) = x;
        src += kRowsAtOnce * row_stride;
    }
}

// Loads a warp's rows straight from global memory. This lane's are `row` and row + 8. Rows from
// `end` on become zeros.
template <int HS>
__device__ void load_rows(Fragments<HS>& regs, const bf16* head, size_t row_stride, int row,
                          int end) {
    for (int kk = 0; kk < HS / 16; kk++)
        for (int i = 0; i < 4; i++) {
            // Register i of an A fragment holds two neighbours of one row.
            const int r = row + (i % 2) * 8;
            const int d = 16 * kk + (i / 2) * 8 + (threadIdx.x % 4) * 2;
            regs[kk][i] =
                r < end ? *reinterpret_cast<const uint32_t*>(head + r * row_stride + d) : 0;
        }
}

// Stores a warp's rows, times factor. This lane's are `row` and row + 8, but none from `end` on.
template <int HS>
__device__ void store_rows(const Accumulator<HS>& x, bf16* head, size_t row_stride, int row,
                           int end, float factor) {
    for (int r = 0; r < 2; r++) {
        if (row + 8 * r >= end)
            continue;
        bf16* to = head + (row + 8 * r) * row_stride + (threadIdx.x % 4) * 2;
        for (int n = 0; n < HS / 8; n++)
            *reinterpret_cast<uint32_t*>(to + 8 * n) =
                pack_bf16(x[n][2 * r] * factor, x[n][2 * r + 1] * factor);
    }
}

// -------------------------------------------------------------------------------------------------
// Products

// c += a · bᵀ over HS columns: S = Q Kᵀ, and likewise dP, Sᵀ and dPᵀ. The rows of b are the columns
// of a B operand. The four matrices of an ldmatrix are 16 rows of b by 16 columns, in quadrants:
// rows n … n+7 in the columns d … d+7 and d+8 … d+15, then rows n+8 … n+15.
template <int HS, int N>
__device__ void multiply_abt(Accumulator<N>& c, const Fragments<HS>& a_regs,
                             const SmemTile<HS, N>& b_smem) {
    const int lane = threadIdx.x % 32;
    for (int kk = 0; kk < HS / 16; kk++)
        for (int n = 0; n < N; n += 16) {
            // the row of a quadrant, 8 columns, whose address this lane gives
            const int row = n + (lane / 16) * 8 + lane % 8;
            const int d = 16 * kk + ((lane / 8) % 2) * 8;
            uint32_t b_regs[4];
            ldmatrix_x4(b_regs, smem_address(&b_smem[row][d]));
            mma_m16n8k16_bf16(c[n / 8], a_regs[kk], b_regs[0], b_regs[1]);
            mma_m16n8k16_bf16(c[n / 8 + 1], a_regs[kk], b_regs[2], b_regs[3]);
        }
}

// c += a · b over N rows of b: O += P V, and likewise dQ, dK and dV. A k-step kk is one MMA deep,
// 16 terms of each sum. Its A operand, 16×16, is two fragments of the accumulator a, 16×8 each. The
// rows of b are the rows of a B operand, so ldmatrix transposes. Its four matrices are 16 rows of
// b, from j = 16·kk on, by 16 columns, in quadrants: rows j … j+7 and j+8 … j+15 in the columns
// n … n+7, then the same rows in the columns n+8 … n+15.
template <int HS, int N>
__device__ void add_ab(Accumulator<HS>& c, const Accumulator<N>& a, const SmemTile<HS, N>& b_smem) {
    const int lane = threadIdx.x % 32;
    // [quote]
    for (int kk = 0; kk < N / 16; kk++) {
        const float (&left)[4] = a[2 * kk];
        const float (&right)[4] = a[2 * kk + 1];
        const uint32_t a_regs[4] = {pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]),
                                    pack_bf16(right[0], right[1]), pack_bf16(right[2], right[3])};
        for (int n = 0; n < HS; n += 16) {
            const int row = 16 * kk + lane % 16;
            const int d = n + (lane / 16) * 8;
            uint32_t b_regs[4];
            ldmatrix_x4_trans(b_regs, smem_address(&b_smem[row][d]));
            mma_m16n8k16_bf16(c[n / 8], a_regs, b_regs[0], b_regs[1]);
            mma_m16n8k16_bf16(c[n / 8 + 1], a_regs, b_regs[2], b_regs[3]);
        }
    }
    // [end]
}

// The dot product of two bf16 each.
__device__ float dot2(uint32_t a, uint32_t b) {
    const auto& x = reinterpret_cast<const __nv_bfloat162&>(a);
    const auto& y = reinterpret_cast<const __nv_bfloat162&>(b);
    return __low2float(x) * __low2float(y) + __high2float(x) * __high2float(y);
}

// -------------------------------------------------------------------------------------------------
// Softmax, of row r = 0 or 1 of this lane's two

// S becomes P, and l grows by this lane's part of its row sum.
template <int N>
__device__ void exponentials(float& l, float (&s)[N][4], int r, float m, float scale_log2) {
    for (int n = 0; n < N; n++)
        for (int e = 2 * r; e < 2 * r + 2; e++) {
            s[n][e] = exp2_approx(s[n][e] * scale_log2 - m * scale_log2);
            l += s[n][e];
        }
}

// -------------------------------------------------------------------------------------------------
// Forward

using ForwardArgs = CallArgs<AttentionForward<bf16>>;

template <int HS>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
#if __CUDA_ARCH__ >= 800
    constexpr int Br = kRows;
    constexpr int Bc = 64;
    __shared__ __align__(16) SmemTile<HS, Bc> k_smem;
    __shared__ __align__(16) SmemTile<HS, Bc> v_smem;

    const WorkTile w = work_tile(args.heads, args.s.NH, TileOrder::last_to_first);
    const int lane = threadIdx.x % 32;
    const int q0 = w.tile * Br;
    const int warp_q0 = q0 + threadIdx.x / 32 * 16;
    const int lane_q = fragment_row(warp_q0, 0, lane);  // this lane's queries: lane_q, lane_q + 8
    const int Tq = args.s.Tq;
    const int Tk = args.s.Tk;
    Fragments<HS> q_regs;
    load_rows<HS>(q_regs, w.head<HS>(args.q), args.q.token_stride, lane_q, Tq);

    // Of this lane's two rows. l is the sum of its own columns until the end.
    Accumulator<HS> o = {};
    float m[2] = {-INFINITY, -INFINITY};
    float l[2] = {};
    for (int k0 = 0; k0 < min(Tk, q0 + Br + args.shift); k0 += Bc) {
        __syncthreads();  // everyone is done with the last tile
        load_tile<HS, Bc>(k_smem, w.head<HS>(args.k), args.k.token_stride, k0, Tk);
        load_tile<HS, Bc>(v_smem, w.head<HS>(args.v), args.v.token_stride, k0, Tk);
        __syncthreads();  // the tile is there

        Accumulator<Bc> s = {};
        multiply_abt<HS, Bc>(s, q_regs, k_smem);

        const bool last_keys = k0 + Bc > Tk;
        const bool diagonal = k0 + Bc - 1 > q0 + args.shift;
        if (last_keys || diagonal) {
            for (int n = 0; n < Bc / 8; n++)
                for (int e = 0; e < 4; e++) {
                    const int key = fragment_col(k0 + 8 * n, e, lane);
                    if (key >= Tk || key > lane_q + (e / 2) * 8 + args.shift)
                        s[n][e] = -INFINITY;
                }
        }

        // Online softmax. Everything so far was relative to the old m.
        for (int r = 0; r < 2; r++) {
            const float rescale = raise_max(m[r], s, r, args.scale_log2);
            l[r] *= rescale;
            scale_row(o, r, rescale);
            exponentials(l[r], s, r, m[r], args.scale_log2);
        }
        add_ab<HS, Bc>(o, s, v_smem);
    }

    for (int r = 0; r < 2; r++) {
        l[r] = quad_sum(l[r]);
        for (int n = 0; n < HS / 8; n++)
            for (int e = 2 * r; e < 2 * r + 2; e++)
                o[n][e] /= l[r];
        const int row = lane_q + 8 * r;
        if (lane % 4 == 0 && row < Tq)
            w.stats(args.lse)[row] = m[r] * args.scale + logf(l[r]);
    }
    store_rows<HS>(o, w.head<HS>(args.out), args.out.token_stride, lane_q, Tq, 1.f);
#endif
}

// -------------------------------------------------------------------------------------------------
// Backward

struct BackwardArgs : CallArgs<AttentionBackward<bf16>> {
    RowStatsView<float> D = {};  // in scratch
};

template <int HS>
__global__ void __launch_bounds__(kThreads) dq_kernel(const __grid_constant__ BackwardArgs args) {
#if __CUDA_ARCH__ >= 800
    constexpr int Br = kRows;
    constexpr int Bc = kPassing;
    __shared__ __align__(16) SmemTile<HS, Bc> k_smem;
    __shared__ __align__(16) SmemTile<HS, Bc> v_smem;

    const WorkTile w = work_tile(args.heads, args.s.NH, TileOrder::last_to_first);
    const int lane = threadIdx.x % 32;
    const int q0 = w.tile * Br;
    const int warp_q0 = q0 + threadIdx.x / 32 * 16;
    const int lane_q = fragment_row(warp_q0, 0, lane);  // this lane's queries: lane_q, lane_q + 8
    const int T = args.s.Tq;                            // and Tk
    Fragments<HS> q_regs;
    Fragments<HS> do_regs;
    Fragments<HS> o_regs;
    load_rows<HS>(q_regs, w.head<HS>(args.q), args.q.token_stride, lane_q, T);
    load_rows<HS>(do_regs, w.head<HS>(args.dout), args.dout.token_stride, lane_q, T);
    load_rows<HS>(o_regs, w.head<HS>(args.out), args.out.token_stride, lane_q, T);

    float D[2] = {};
    float lse_log2[2];
    for (int kk = 0; kk < HS / 16; kk++)
        for (int i = 0; i < 4; i++)
            D[i % 2] += dot2(do_regs[kk][i], o_regs[kk][i]);
    for (int r = 0; r < 2; r++) {
        const int row = lane_q + 8 * r;
        D[r] = quad_sum(D[r]);
        if (lane % 4 == 0 && row < T)
            w.stats(args.D)[row] = D[r];
        lse_log2[r] = row < T ? w.stats(args.lse)[row] * kLog2e : INFINITY;
    }

    Accumulator<HS> dq = {};
    for (int k0 = 0; k0 < min(T, q0 + Br + args.shift); k0 += Bc) {
        __syncthreads();  // everyone is done with the last tile
        load_tile<HS, Bc>(k_smem, w.head<HS>(args.k), args.k.token_stride, k0, T);
        load_tile<HS, Bc>(v_smem, w.head<HS>(args.v), args.v.token_stride, k0, T);
        __syncthreads();  // the tile is there

        Accumulator<Bc> s = {};
        Accumulator<Bc> dp = {};
        multiply_abt<HS, Bc>(s, q_regs, k_smem);
        multiply_abt<HS, Bc>(dp, do_regs, v_smem);
        for (int n = 0; n < Bc / 8; n++)
            for (int e = 0; e < 4; e++) {
                const int r = e / 2;
                const int key = fragment_col(k0 + 8 * n, e, lane);
                const bool visible = key < T && key <= lane_q + 8 * r + args.shift;
                const float p = exp2_approx(s[n][e] * args.scale_log2 - lse_log2[r]);
                s[n][e] = visible ? p * (dp[n][e] - D[r]) : 0.f;  // S becomes dS
            }
        add_ab<HS, Bc>(dq, s, k_smem);
    }
    store_rows<HS>(dq, w.head<HS>(args.dq), args.dq.token_stride, lane_q, T, args.scale);
#endif
}

// Runs after dq_kernel, which writes D.
template <int HS>
__global__ void __launch_bounds__(kThreads) dkdv_kernel(const __grid_constant__ BackwardArgs args) {
#if __CUDA_ARCH__ >= 800
    constexpr int Br = kPassing;
    constexpr int Bc = kRows;
    __shared__ __align__(16) SmemTile<HS, Br> q_smem;
    __shared__ __align__(16) SmemTile<HS, Br> do_smem;
    __shared__ float lse_log2_smem[Br];
    __shared__ float D_smem[Br];

    const WorkTile w = work_tile(args.heads, args.s.NH, TileOrder::first_to_last);
    const int lane = threadIdx.x % 32;
    const int k0 = w.tile * Bc;
    const int warp_k0 = k0 + threadIdx.x / 32 * 16;
    const int lane_k = fragment_row(warp_k0, 0, lane);  // this lane's keys: lane_k, lane_k + 8
    const int T = args.s.Tq;                            // and Tk
    Fragments<HS> k_regs;
    Fragments<HS> v_regs;
    // Heads have offsets of type int, because size_t makes this kernel spill at HS 128.
    load_rows<HS>(k_regs, w.head<HS, int>(args.k), args.k.token_stride, lane_k, T);
    load_rows<HS>(v_regs, w.head<HS, int>(args.v), args.v.token_stride, lane_k, T);

    Accumulator<HS> dk = {};
    Accumulator<HS> dv = {};
    for (int q0 = max(0, k0 - args.shift); q0 < T; q0 += Br) {
        __syncthreads();  // everyone is done with the last tile
        load_tile<HS, Br>(q_smem, w.head<HS, int>(args.q), args.q.token_stride, q0, T);
        load_tile<HS, Br>(do_smem, w.head<HS, int>(args.dout), args.dout.token_stride, q0, T);
        if (threadIdx.x < Br) {
            // rows that do not exist get an lse of +inf, so that their P is 0
            const int row = q0 + threadIdx.x;
            lse_log2_smem[threadIdx.x] = row < T ? w.stats(args.lse)[row] * kLog2e : INFINITY;
            D_smem[threadIdx.x] = row < T ? w.stats(args.D)[row] : 0.f;
        }
        __syncthreads();  // the tile is there

        // S and dP are transposed: their rows are keys.
        Accumulator<Br> s = {};
        Accumulator<Br> dp = {};
        multiply_abt<HS, Br>(s, k_regs, q_smem);
        for (int n = 0; n < Br / 8; n++)
            for (int e = 0; e < 4; e++) {
                const int i = fragment_col(8 * n, e, lane);  // of the tile's queries
                const bool visible = lane_k + (e / 2) * 8 <= q0 + i + args.shift;
                // S becomes P
                s[n][e] = visible ? exp2_approx(s[n][e] * args.scale_log2 - lse_log2_smem[i]) : 0.f;
            }
        add_ab<HS, Br>(dv, s, do_smem);

        multiply_abt<HS, Br>(dp, v_regs, do_smem);
        for (int n = 0; n < Br / 8; n++)
            for (int e = 0; e < 4; e++)
                s[n][e] *= dp[n][e] - D_smem[fragment_col(8 * n, e, lane)];  // P becomes dS
        add_ab<HS, Br>(dk, s, q_smem);
    }
    store_rows<HS>(dk, w.head<HS, int>(args.dk), args.dk.token_stride, lane_k, T, args.scale);
    store_rows<HS>(dv, w.head<HS, int>(args.dv), args.dv.token_stride, lane_k, T, 1.f);
#endif
}

// -------------------------------------------------------------------------------------------------
// Launchers

// Starts a block for each tile of each head. Tiles of keys are as many as tiles of queries, because
// backward has Tq = Tk.
template <class Args>
void launch(const Cuda& dev, void (*kernel)(Args), const Args& args) {
    const int tiles = ceil_div(args.s.Tq, kRows);
    kernel<<<count_blocks(kName, tiles, args.heads), kThreads, 0, dev.stream>>>(args);
    LAUNCH_CHECK(kName);
}

void forward(const Cuda& dev, const AttentionForward<bf16>& c) {
    const ForwardArgs args{c};
    launch(dev, c.s.HS == 64 ? forward_kernel<64> : forward_kernel<128>, args);
}

void backward(const Cuda& dev, const AttentionBackward<bf16>& c) {
    BackwardArgs args{c};
    args.D = {static_cast<float*>(c.scratch), static_cast<size_t>(c.s.Tq)};
    launch(dev, c.s.HS == 64 ? dq_kernel<64> : dq_kernel<128>, args);
    launch(dev, c.s.HS == 64 ? dkdv_kernel<64> : dkdv_kernel<128>, args);
}

size_t scratch_bytes(const AttentionShape& s) {
    return s.rows() * sizeof(float);
}

}  // namespace

const AttentionKernel<bf16> flash_mma = {
    .name = kName,
    .min_sm = 80,
    .flash = true,
    .scratch_bytes = scratch_bytes,
    .unchecked = {.forward = forward, .backward = backward},
};
