// Flash attention, forward only, bf16, wgmma and TMA (sm_90a). It is the plainest kernel in
// Hopper's instructions.
//
// For one tile of Br query rows against one tile of Bc keys at a time:
//   S  = scale·Q Kᵀ                (Br × Bc, registers)
//   m' = max(m, rowmax S)
//   P  = exp(S − m')
//   l  = e^{m−m'} l + rowsum P
//   O  = e^{m−m'} O + P V
// and after the last tile:
//   out = O / l
//   lse = m + log l
//
// New against flash_mma: a warpgroup of four warps multiplies 64 rows in one instruction. It reads
// K and V straight out of shared memory, so ldmatrix is gone. One thread asks the TMA unit for a
// whole tile, and none computes addresses. Both units work asynchronously, so each has something to
// wait for:
//
//   TMA    an mbarrier, which counts the bytes that have landed. Its n-th use ends phase n.
//   wgmma  wgmma_wait. Until then the registers of S, P and O belong to the tensor cores.
//
// A block is one warpgroup and owns Br = 64 queries of one (b, head). It has room for one tile of K
// and one of V. The next K is copied during the softmax and P V, and the next V during the next S
// and its softmax. flash_bf16_sm90 divides this work among warpgroups with roles, so that the
// tensor cores need not wait for the exponentials.
//
//   operand  where                                      layout
//   Q        shared memory                              A of S, rows of 128 bytes in TMA's swizzle
//   K        shared memory                              B of S, not transposed
//   P        registers, S's accumulator packed to bf16  A of O
//   V        shared memory                              B of O, transposed by wgmma
//
// Writes: out, lse (every element).  Scratch: none.
// Limits: HS in {64, 128}, any Tq and Tk, scale > 0, no backward, compute capability 9.0 alone.
// Run: ./dev/bench_attention --kernel flash_wgmma
#include "attention/fragments.cuh"
#include "attention/launch.h"
#include "cuda/pipeline_sm90.cuh"
#include "cuda/tensor_map.h"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
// kernels have empty bodies there, and what only they use is "never referenced"
#pragma nv_diag_suppress 177
#endif

namespace {

constexpr char kName[] = "flash_wgmma";

// -------------------------------------------------------------------------------------------------
// Tiles. In shared memory a tile is one or two panels of 64 columns, one behind the other. A
// panel's rows have 128 bytes, in TMA's 128-byte swizzle.

constexpr int kThreads = 128;  // one warpgroup
constexpr int Br = 64;
constexpr int Bc = 128;
constexpr int kRowBytes = 128;  // of a panel

// 40 KB and 80 KB.
template <int HS>
struct SharedMemory {
    bf16 q[Br * HS];
    bf16 k[Bc * HS];
    bf16 v[Bc * HS];
    // Barriers: the tile is there. A phase ends when its one copy has landed.
    uint64_t q_full;
    uint64_t k_full;
    uint64_t v_full;
};
constexpr int kArrivals = 1;  // in a phase: the thread that starts the copy

// -------------------------------------------------------------------------------------------------
// Loads

// One thread starts copying `Rows` tokens of head (b, h) from row0 on. Tokens that do not exist
// become zeros. TMA copies boxes of one panel. The barrier's phase ends when all bytes have landed.
template <int Rows, int HS>
__device__ void load_tile(uint32_t tile, const CUtensorMap& map, uint32_t barrier, int row0,
                          const WorkTile& w) {
    mbarrier_arrive_expect(barrier, Rows * HS * sizeof(bf16));
    for (int d = 0; d < HS; d += 64)
        tma_load_4d(tile + d / 64 * Rows * kRowBytes, &map, barrier, d, w.h, row0, w.b);
}

// Writes the warp's 16 rows, of which this lane has `row` and row + 8, but none at or past `end`.
template <int HS>
__device__ __forceinline__ void store_rows(const float (&x)[HS / 8][4], bf16* head,
                                           size_t row_stride, int row, int end) {
    for (int r = 0; r < 2; r++) {
        if (row + 8 * r >= end)
            continue;
        bf16* to = head + (row + 8 * r) * row_stride + threadIdx.x % 4 * 2;
        for (int n = 0; n < HS / 8; n++)
            *reinterpret_cast<uint32_t*>(to + 8 * n) = pack_bf16(x[n][2 * r], x[n][2 * r + 1]);
    }
}

// -------------------------------------------------------------------------------------------------
// Products. A k-step is one wgmma deep, 16 terms of each sum.

// K-step kk along the rows of a tile: columns [16·kk, 16·kk + 16).
template <int Rows>
__device__ uint64_t column_step(uint64_t tile, int kk) {
    const int panel = kk / 4;
    const int bytes = kk % 4 * 32;  // into its rows
    return wgmma_advance(tile, panel * Rows * kRowBytes + bytes);
}
// K-step kk along the columns of a tile: rows [16·kk, 16·kk + 16).
__device__ uint64_t row_step(uint64_t tile, int kk) {
    return wgmma_advance(tile, kk * 16 * kRowBytes);
}

// s = q · kᵀ. Returns when the warp's rows are done.
// [quote]
template <int HS>
__device__ __forceinline__ void multiply_abt(float (&s)[Bc / 8][4], uint64_t q_tile,
                                             uint64_t k_tile) {
    wgmma_fence_operand(s);
    wgmma_fence();
    for (int kk = 0; kk < HS / 16; kk++)
        wgmma_ss(s, column_step<Br>(q_tile, kk), column_step<Bc>(k_tile, kk), kk > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(s);
}
// [end]

// o += p · v, likewise.
template <int HS>
__device__ __forceinline__ void add_ab(float (&o)[HS / 8][4], uint32_t (&p_regs)[Bc / 16][4],
                                       uint64_t v_tile) {
    wgmma_fence_operand(p_regs);
    wgmma_fence_operand(o);
    wgmma_fence();
    for (int kk = 0; kk < Bc / 16; kk++)
        wgmma_rs<true>(o, p_regs[kk], row_step(v_tile, kk), true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(o);
}

// -------------------------------------------------------------------------------------------------
// Softmax, of row r = 0 or 1 of this lane's two

// Raises m to the largest S so far. Returns e^{m−m'}.
template <int N>
__device__ __forceinline__ float raise_max(float& m, const float (&s)[N][4], int r,
                                           float scale_log2) {
    float m_new = m;
    for (int n = 0; n < N; n++)
        m_new = fmaxf(m_new, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    m_new = quad_max(m_new);
    const float rescale = exp2_approx((m - m_new) * scale_log2);
    m = m_new;
    return rescale;
}

// S becomes P, also as A operands. l grows by this lane's part of its row sum.
template <int N>
__device__ __forceinline__ void exponentials(float& l, float (&s)[N][4],
                                             uint32_t (&p_regs)[N / 2][4], int r, float m,
                                             float scale_log2) {
    for (int n = 0; n < N; n++) {
        for (int e = 2 * r; e < 2 * r + 2; e++) {
            s[n][e] = exp2_approx(s[n][e] * scale_log2 - m * scale_log2);
            l += s[n][e];
        }
        p_regs[n / 2][n % 2 * 2 + r] = pack_bf16(s[n][2 * r], s[n][2 * r + 1]);
    }
}

// -------------------------------------------------------------------------------------------------
// Forward

using ForwardArgs = CallArgs<AttentionForward<bf16>>;

template <int HS>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map,
                   const __grid_constant__ ForwardArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char dynamic_smem[];
    const auto& smem = *reinterpret_cast<const SharedMemory<HS>*>(dynamic_smem);
    const uint32_t q_smem = smem_address(smem.q);
    const uint32_t k_smem = smem_address(smem.k);
    const uint32_t v_smem = smem_address(smem.v);
    const uint32_t q_full = smem_address(&smem.q_full);
    const uint32_t k_full = smem_address(&smem.k_full);
    const uint32_t v_full = smem_address(&smem.v_full);

    const WorkTile w = work_tile(args.heads, args.s.NH, TileOrder::last_to_first);
    const int lane = threadIdx.x % 32;
    const int q0 = w.tile * Br;
    const int warp_q0 = q0 + threadIdx.x / 32 * 16;
    const int lane_q = fragment_row(warp_q0, 0, lane);  // this lane's queries: lane_q, lane_q + 8
    const bool leader = threadIdx.x == 0;
    const int Tq = args.s.Tq;
    const int Tk = args.s.Tk;

    if (leader) {
        for (uint32_t barrier : {q_full, k_full, v_full})
            mbarrier_init(barrier, kArrivals);
        fence_mbarrier_init();
        load_tile<Br, HS>(q_smem, q_map, q_full, q0, w);
        load_tile<Bc, HS>(k_smem, k_map, k_full, 0, w);
        load_tile<Bc, HS>(v_smem, v_map, v_full, 0, w);
    }
    __syncthreads();  // the barriers are there for all
    const uint64_t q_tile = wgmma_descriptor(q_smem);
    const uint64_t k_tile = wgmma_descriptor(k_smem);
    const uint64_t v_tile = wgmma_descriptor(v_smem, Bc * kRowBytes);
    mbarrier_wait(q_full, 0);

    // Of this lane's two rows. l is the sum of its own columns until the end.
    float o[HS / 8][4] = {};
    float m[2] = {-INFINITY, -INFINITY};
    float l[2] = {};
    float s[Bc / 8][4];
    uint32_t p_regs[Bc / 16][4];
    PipelineState<1> tile;  // of K and V
    const int k_tiles = ceil_div<Bc>(min(Tk, q0 + Br + args.shift));
    for (int j = 0; j < k_tiles; j++) {
        const int k0 = j * Bc;
        mbarrier_wait(k_full, tile.phase);
        multiply_abt<HS>(s, q_tile, k_tile);
        __syncthreads();  // all warps are done with K, because wgmma_wait covers only this one
        if (leader && j + 1 < k_tiles)
            load_tile<Bc, HS>(k_smem, k_map, k_full, k0 + Bc, w);

        const bool last_keys = k0 + Bc > Tk;
        const bool diagonal = k0 + Bc - 1 > q0 + args.shift;
        if (last_keys || diagonal) {
            for (int n = 0; n < Bc / 8; n++)
                for (int e = 0; e < 4; e++) {
                    const int key = fragment_col(k0 + 8 * n, e, lane);
                    if (key >= Tk || key > lane_q + e / 2 * 8 + args.shift)
                        s[n][e] = -INFINITY;
                }
        }

        // Online softmax. Everything so far was relative to the old m.
        for (int r = 0; r < 2; r++) {
            const float rescale = raise_max(m[r], s, r, args.scale_log2);
            l[r] *= rescale;
            scale_row(o, r, rescale);
            exponentials(l[r], s, p_regs, r, m[r], args.scale_log2);
        }

        mbarrier_wait(v_full, tile.phase);
        add_ab<HS>(o, p_regs, v_tile);
        __syncthreads();  // all warps are done with V
        if (leader && j + 1 < k_tiles)
            load_tile<Bc, HS>(v_smem, v_map, v_full, k0 + Bc, w);
        ++tile;
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
    store_rows<HS>(o, w.head<HS>(args.out), args.out.token_stride, lane_q, Tq);
#endif
}

// -------------------------------------------------------------------------------------------------
// Launchers

template <int HS>
void launch(const Cuda& dev, const ForwardArgs& args) {
    const AttentionShape& s = args.s;
    const CUtensorMap q_map = tensor_map("q", args.q, s.queries(), Br);
    const CUtensorMap k_map = tensor_map("k", args.k, s.keys(), Bc);
    const CUtensorMap v_map = tensor_map("v", args.v, s.keys(), Bc);
    const unsigned blocks = count_blocks(kName, ceil_div(s.Tq, Br), args.heads);
    constexpr int kSmem = sizeof(SharedMemory<HS>);
    CUDA_CHECK(cudaFuncSetAttribute(forward_kernel<HS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    kSmem));
    forward_kernel<HS><<<blocks, kThreads, kSmem, dev.stream>>>(q_map, k_map, v_map, args);
    LAUNCH_CHECK(kName);
}

void forward(const Cuda& dev, const AttentionForward<bf16>& c) {
    const ForwardArgs args{c};
    with_head_size(c.s.HS, [&](auto HS) { launch<HS>(dev, args); });
}

}  // namespace

const AttentionKernel<bf16> flash_wgmma = {
    .name = kName,
    .min_sm = 90,
    .flash = true,
    .unchecked = {.forward = forward},
};
