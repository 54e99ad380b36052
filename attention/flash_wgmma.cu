// Flash attention forward and backward, bf16, wgmma and TMA (sm_90a): the plainest kernels in
// Hopper's instructions.
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
// Backward:
//   D  = rowsum(dO∘O)
//   P  = exp(S − lse)
//   dP = dO Vᵀ
//   dS = P∘(dP − D)
//   dQ = scale·dS K
//   dK = scale·dSᵀ Q
//   dV = Pᵀ dO
//
// New against flash_mma: a warpgroup of four warps multiplies 64 rows in one instruction. It reads
// K and V straight out of shared memory, so ldmatrix is gone. One thread asks the TMA unit for a
// whole tile, and none computes addresses. Both units work asynchronously, so each has something to
// wait for:
//
//   TMA    an mbarrier, which counts the bytes that have landed. Its n-th use ends phase n.
//   wgmma  wgmma_wait. Until then the registers of S, P and O belong to the tensor cores.
//
// A block of forward is one warpgroup and owns Br = 64 queries of one (b, head). It has room for
// one tile of K and one of V. The next K is copied during the softmax and P V, and the next V
// during the next S and its softmax. flash_bf16_sm90 divides this work among warpgroups with roles,
// so that the tensor cores need not wait for the exponentials.
//
//   operand  where                                      layout
//   Q        shared memory                              A of S, rows of 128 bytes in TMA's swizzle
//   K        shared memory                              B of S, not transposed
//   P        registers, S's accumulator packed to bf16  A of O
//   V        shared memory                              B of O, transposed by wgmma
//
// Backward is flash_bf16's two kernels in these instructions, and each writes what it owns:
// dq_kernel keeps 64 queries, streams keys and makes D; dkdv_kernel keeps 64 keys, streams queries
// and computes Sᵀ and dPᵀ, with keys as rows. So in both, P and dS are packed where they are and
// become the A operands of the products that follow, and there is neither an atomic nor a dQ in
// fp32 memory. The price is 7 products instead of 5. Within a block products wait for exponentials
// and the other way round; three blocks on an SM (two at HS 128) fill each other's gaps.
// flash_bf16_sm90's backward has what this one lacks: roles, and a deterministic sum of dQ, with
// which 5 products are enough.
//
// Writes: forward out and lse, backward dq, dk and dv (every element, in bf16 or fp32).
// Scratch: LseD (B, NH, Tq rounded up to whole tiles), which dq_kernel writes for dkdv_kernel.
// Limits: HS in {64, 128}, any Tq and Tk, scale > 0, compute capability 9.0 alone.
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
// Tiles. In shared memory a tile is one or two panels of 64 columns, one after the other. A
// panel's rows have 128 bytes, in TMA's 128-byte swizzle.

constexpr int kThreads = 128;  // one warpgroup
constexpr int Br = 64;
constexpr int Bc = 128;
constexpr int kRowBytes = 128;  // of a panel

// Bytes of a panel of `Rows` rows. The descriptor of a tile that wgmma transposes needs them, to
// find the second panel.
template <int Rows>
constexpr int kPanelBytes = Rows * kRowBytes;

// 40 KB at HS 64, 80 KB at HS 128.
template <int HS>
struct ForwardSharedMemory {
    bf16 q[Br * HS];
    bf16 k[Bc * HS];
    bf16 v[Bc * HS];
    // Barriers: the tile is there. A phase ends when its one copy has landed.
    uint64_t q_full;
    uint64_t k_full;
    uint64_t v_full;
};
constexpr int kArrivals = 1;  // in a phase: the thread that starts the copy

// All tiles of backward are 64 × HS.
constexpr int kTile = 64;
template <int HS>
using BackwardTile = bf16[kTile * HS];

// 48 KB at HS 64, 96 KB at HS 128.
template <int HS>
struct DqSharedMemory {
    BackwardTile<HS> q;
    BackwardTile<HS> dout;
    PipelineBuffer<BackwardTile<HS>, 2> k;
    PipelineBuffer<BackwardTile<HS>, 2> v;
    uint64_t rows_full;       // Q and dO are there
    FullBarriers<2> kv_full;  // a stage of K and V is there
};

// 49 KB at HS 64, 97 KB at HS 128.
template <int HS>
struct DkdvSharedMemory {
    BackwardTile<HS> k;
    BackwardTile<HS> v;
    PipelineBuffer<BackwardTile<HS>, 2> q;
    PipelineBuffer<BackwardTile<HS>, 2> dout;
    PipelineBuffer<LseDPair[kTile / 2], 2> lse_D;
    uint64_t rows_full;      // K and V are there
    FullBarriers<2> q_full;  // a stage of Q, dO, lse and D is there
};

// -------------------------------------------------------------------------------------------------
// Loads

// One thread starts copying `Rows` tokens of head (b, h) from row0 on. Tokens that do not exist
// become zeros. TMA copies boxes of one panel, whose bytes count on the barrier.
template <int Rows, int HS>
__device__ void copy_tile(uint32_t tile, const CUtensorMap& map, uint32_t barrier, int row0,
                          const WorkTile& w) {
    for (int d = 0; d < HS; d += 64)
        tma_load_4d(tile + d / 64 * kPanelBytes<Rows>, &map, barrier, d, w.h, row0, w.b);
}

// The same if the barrier's phase waits for this tile alone. It ends when all bytes have landed.
template <int Rows, int HS>
__device__ void load_tile(uint32_t tile, const CUtensorMap& map, uint32_t barrier, int row0,
                          const WorkTile& w) {
    mbarrier_arrive_expect(barrier, Rows * HS * sizeof(bf16));
    copy_tile<Rows, HS>(tile, map, barrier, row0, w);
}

__device__ __forceinline__ void store_pair(bf16* to, float x, float y) {
    *reinterpret_cast<uint32_t*>(to) = pack_bf16(x, y);
}
__device__ __forceinline__ void store_pair(float* to, float x, float y) {
    *reinterpret_cast<float2*>(to) = make_float2(x, y);
}

// Writes the warp's 16 rows, of which this lane has `row` and row + 8, but none at or past `end`.
template <int HS, class Y>
__device__ __forceinline__ void store_rows(const float (&x)[HS / 8][4], Y* head, size_t row_stride,
                                           int row, int end) {
    for (int r = 0; r < 2; r++) {
        if (row + 8 * r >= end)
            continue;
        Y* to = head + (row + 8 * r) * row_stride + (threadIdx.x % 4) * 2;
        for (int n = 0; n < HS / 8; n++)
            store_pair(to + 8 * n, x[n][2 * r], x[n][2 * r + 1]);
    }
}

// -------------------------------------------------------------------------------------------------
// Products. A k-step is one wgmma deep, 16 terms of each sum.

// Packs two neighbouring columns of fragment n, row r of this lane's two, into an A operand whose
// columns are those of the accumulator: k-step kk has fragments 2·kk (left) and 2·kk + 1 (right).
template <int K>
__device__ __forceinline__ void pack_a(uint32_t (&a_regs)[K][4], int n, int r, float x, float y) {
    const int right = n % 2;
    a_regs[n / 2][right * 2 + r] = pack_bf16(x, y);
}

// Starts s = a · bᵀ. The tiles have 64 and 8·N rows, which are s's rows and columns.
// [quote]
template <int HS, int N>
__device__ __forceinline__ void start_abt(float (&s)[N][4], uint64_t a_tile, uint64_t b_tile) {
    wgmma_fence();
    wgmma_ss_set(s, a_tile, b_tile);
    for (int kk = 1; kk < HS / 16; kk++)
        wgmma_ss(s, wgmma_column_step<64>(a_tile, kk), wgmma_column_step<8 * N>(b_tile, kk), true);
    wgmma_commit();
}
// [end]

// Starts c += a · b. a's columns are the tile's rows, so wgmma transposes the tile.
template <int N, int K>
__device__ __forceinline__ void start_add_ab(float (&c)[N][4], uint32_t (&a_regs)[K][4],
                                             uint64_t b_tile) {
    wgmma_fence_operand(a_regs);
    wgmma_fence_operand(c);
    wgmma_fence();
    for (int kk = 0; kk < K; kk++)
        wgmma_rs<true>(c, a_regs[kk], wgmma_row_step(b_tile, kk), true);
    wgmma_commit();
}

// -------------------------------------------------------------------------------------------------
// Softmax, of row r = 0 or 1 of this lane's two

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
        pack_a(p_regs, n, r, s[n][2 * r], s[n][2 * r + 1]);
    }
}

// -------------------------------------------------------------------------------------------------
// Forward

template <class Y>
using ForwardArgs = CallArgs<AttentionForward<bf16, Y>>;

template <int HS, class Y>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map,
                   const __grid_constant__ ForwardArgs<Y> args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char dynamic_smem[];
    const auto& smem = *reinterpret_cast<const ForwardSharedMemory<HS>*>(dynamic_smem);
    const uint32_t q_smem = smem_address(smem.q);
    const uint32_t k_smem = smem_address(smem.k);
    const uint32_t v_smem = smem_address(smem.v);
    const uint32_t q_full = smem_address(&smem.q_full);
    const uint32_t k_full = smem_address(&smem.k_full);
    const uint32_t v_full = smem_address(&smem.v_full);

    const WorkTile w = work_tile(args.heads, args.s.NH, TileOrder::last_to_first);
    const int lane = threadIdx.x % 32;
    const int q0 = w.tile * Br;
    const int warp_q0 = q0 + (threadIdx.x / 32) * 16;
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
    const uint64_t v_tile = wgmma_descriptor(v_smem, kPanelBytes<Bc>);
    mbarrier_wait(q_full, 0);

    // Of this lane's two rows. l is the sum of its own columns until the end.
    float o[HS / 8][4] = {};
    float m[2] = {-INFINITY, -INFINITY};
    float l[2] = {};
    float s[Bc / 8][4];
    uint32_t p_regs[Bc / 16][4];
    PipelineState<1> kv;  // the phase of k_full and v_full
    const int k_tiles = ceil_div<Bc>(min(Tk, q0 + Br + args.shift));
    for (int j = 0; j < k_tiles; j++) {
        const int k0 = j * Bc;
        mbarrier_wait(k_full, kv.phase);
        start_abt<HS>(s, q_tile, k_tile);
        wgmma_wait<0>(s);
        __syncthreads();  // all warps are done with K, because wgmma_wait covers only this one
        if (leader && j + 1 < k_tiles)
            load_tile<Bc, HS>(k_smem, k_map, k_full, k0 + Bc, w);

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
            exponentials(l[r], s, p_regs, r, m[r], args.scale_log2);
        }

        mbarrier_wait(v_full, kv.phase);
        start_add_ab(o, p_regs, v_tile);
        wgmma_wait<0>(o);
        __syncthreads();  // all warps are done with V
        if (leader && j + 1 < k_tiles)
            load_tile<Bc, HS>(v_smem, v_map, v_full, k0 + Bc, w);
        ++kv;
    }

    for (int r = 0; r < 2; r++) {
        l[r] = quad_sum(l[r]);
        scale_row(o, r, 1.f / l[r]);
        const int row = lane_q + 8 * r;
        if (lane % 4 == 0 && row < Tq)
            w.stats(args.lse)[row] = m[r] * args.scale + logf(l[r]);
    }
    store_rows<HS>(o, w.head<HS>(args.out), args.out.token_stride, lane_q, Tq);
#endif
}

// -------------------------------------------------------------------------------------------------
// Backward

template <class Y>
struct BackwardArgs : CallArgs<AttentionBackward<bf16, Y>> {
    LseD* lse_D = static_cast<LseD*>(this->scratch);  // (B, NH, padded_Tq)
    int padded_Tq = ceil_div(this->s.Tq, kTile) * kTile;

    // A head's, by query.
    __device__ __forceinline__ LseD* lse_D_of(const WorkTile& w) const {
        return lse_D + static_cast<size_t>(w.bh) * padded_Tq;
    }
};

// lse and D of row `row`, which this lane's quad shares. Past the last query lse is +inf, so that P
// is 0 there.
template <int HS, class Y>
__device__ __forceinline__ LseD lse_and_D(const BackwardArgs<Y>& args, const WorkTile& w, int row) {
    LseD x = {.lse_log2 = INFINITY, .D = 0.f};
    if (row < args.s.Tq) {
        const bf16* dout = w.head<HS>(args.dout) + row * args.dout.token_stride;
        const bf16* out = w.head<HS>(args.out) + row * args.out.token_stride;
        for (int d = (threadIdx.x % 4) * 8; d < HS; d += 4 * 8)
            x.D += dot8(*reinterpret_cast<const uint4*>(dout + d),
                        *reinterpret_cast<const uint4*>(out + d));
        x.lse_log2 = w.stats(args.lse)[row] * kLog2e;
    }
    x.D = quad_sum(x.D);
    return x;
}

template <int HS, class Y>
__global__ void __launch_bounds__(kThreads, HS == 64 ? 3 : 2)
    dq_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
              const __grid_constant__ CUtensorMap v_map,
              const __grid_constant__ CUtensorMap dout_map,
              const __grid_constant__ BackwardArgs<Y> args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char dynamic_smem[];
    auto& smem = *reinterpret_cast<DqSharedMemory<HS>*>(dynamic_smem);
    const uint32_t rows_full = smem_address(&smem.rows_full);
    constexpr int kTileBytes = kTile * HS * sizeof(bf16);

    const WorkTile w = work_tile(args.heads, args.s.NH, TileOrder::last_to_first);
    const int lane = threadIdx.x % 32;
    const int q0 = w.tile * kTile;
    const int lane_q = fragment_row(q0 + (threadIdx.x / 32) * 16, 0, lane);  // and lane_q + 8
    const bool leader = threadIdx.x == 0;
    const int Tk = args.s.Tk;
    const int k_tiles = ceil_div<kTile>(min(Tk, q0 + kTile + args.shift));

    const auto load_kv = [&](int j) {
        smem.kv_full.arrive_expect(j, 2 * kTileBytes);
        copy_tile<kTile, HS>(smem.k.address(j), k_map, smem.kv_full.address(j), j * kTile, w);
        copy_tile<kTile, HS>(smem.v.address(j), v_map, smem.kv_full.address(j), j * kTile, w);
    };
    if (leader) {
        mbarrier_init(rows_full, kArrivals);
        smem.kv_full.init(kArrivals);
        fence_mbarrier_init();
        mbarrier_arrive_expect(rows_full, 2 * kTileBytes);
        copy_tile<kTile, HS>(smem_address(smem.q), q_map, rows_full, q0, w);
        copy_tile<kTile, HS>(smem_address(smem.dout), dout_map, rows_full, q0, w);
        load_kv(0);
        if (k_tiles > 1)
            load_kv(1);
    }
    __syncthreads();  // the barriers are there for all

    float lse_log2[2];
    float D[2];
    for (int r = 0; r < 2; r++) {  // while the copies are on their way
        const int row = lane_q + 8 * r;
        const LseD x = lse_and_D<HS>(args, w, row);
        lse_log2[r] = x.lse_log2;
        D[r] = x.D;
        if (lane % 4 == 0)
            args.lse_D_of(w)[row] = x;
    }

    const uint64_t q_tile = wgmma_descriptor(smem_address(smem.q));
    const uint64_t dout_tile = wgmma_descriptor(smem_address(smem.dout));
    float s[kTile / 8][4];
    float dp[kTile / 8][4];
    uint32_t ds_regs[kTile / 16][4];
    float dq[HS / 8][4] = {};
    mbarrier_wait(rows_full, 0);
    // Tile j of keys:
    //   start S; start dP; P, while dP is computed; dS; dQ += dS K; load tile j + 2
    for (int j = 0; j < k_tiles; j++) {
        const int k0 = j * kTile;
        const uint64_t k_tile = wgmma_descriptor(smem.k.address(j));
        const uint64_t v_tile = wgmma_descriptor(smem.v.address(j));
        const uint64_t k_transposed = wgmma_descriptor(smem.k.address(j), kPanelBytes<kTile>);
        smem.kv_full.wait(j);
        start_abt<HS>(s, q_tile, k_tile);
        start_abt<HS>(dp, dout_tile, v_tile);

        wgmma_wait<1>(s);
        for (int n = 0; n < kTile / 8; n++)
            for (int e = 0; e < 4; e++)  // S becomes P
                s[n][e] = exp2_approx(s[n][e] * args.scale_log2 - lse_log2[e / 2]);
        const bool last_keys = k0 + kTile > Tk;
        const bool diagonal = k0 + kTile - 1 > q0 + args.shift;
        if (last_keys || diagonal) {
            for (int n = 0; n < kTile / 8; n++)
                for (int e = 0; e < 4; e++) {
                    const int key = fragment_col(k0 + 8 * n, e, lane);
                    if (key >= Tk || key > lane_q + (e / 2) * 8 + args.shift)
                        s[n][e] = 0.f;
                }
        }

        wgmma_wait<0>(dp);
        for (int n = 0; n < kTile / 8; n++)
            for (int r = 0; r < 2; r++)
                pack_a(ds_regs, n, r, s[n][2 * r] * (dp[n][2 * r] - D[r]),
                       s[n][2 * r + 1] * (dp[n][2 * r + 1] - D[r]));
        start_add_ab(dq, ds_regs, k_transposed);
        wgmma_wait<0>(dq);
        __syncthreads();  // all warps are done with this stage
        if (leader && j + 2 < k_tiles)
            load_kv(j + 2);
    }

    for (int r = 0; r < 2; r++)
        scale_row(dq, r, args.scale);
    store_rows<HS>(dq, w.head<HS>(args.dq), args.dq.token_stride, lane_q, args.s.Tq);
#endif
}

template <int HS, class Y>
__global__ void __launch_bounds__(kThreads, HS == 64 ? 3 : 2)
    dkdv_kernel(const __grid_constant__ CUtensorMap q_map,
                const __grid_constant__ CUtensorMap k_map,
                const __grid_constant__ CUtensorMap v_map,
                const __grid_constant__ CUtensorMap dout_map,
                const __grid_constant__ BackwardArgs<Y> args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char dynamic_smem[];
    auto& smem = *reinterpret_cast<DkdvSharedMemory<HS>*>(dynamic_smem);
    const uint32_t rows_full = smem_address(&smem.rows_full);
    constexpr int kTileBytes = kTile * HS * sizeof(bf16);

    const WorkTile w = work_tile(args.heads, args.s.NH, TileOrder::first_to_last);
    const int lane = threadIdx.x % 32;
    const int k0 = w.tile * kTile;
    const int lane_k = fragment_row(k0 + (threadIdx.x / 32) * 16, 0, lane);  // and lane_k + 8
    const bool leader = threadIdx.x == 0;
    const int Tk = args.s.Tk;
    // The first query that sees key k0 is k0 − shift. Tiles are counted from the one that has it.
    const int first_q0 = (max(0, k0 - args.shift) / kTile) * kTile;
    const int q_tiles = ceil_div<kTile>(args.s.Tq - first_q0);

    const auto load_q = [&](int i) {
        const int q0 = first_q0 + i * kTile;
        const uint32_t full = smem.q_full.address(i);
        constexpr int kLseDBytes = kTile * sizeof(LseD);
        smem.q_full.arrive_expect(i, 2 * kTileBytes + kLseDBytes);
        copy_tile<kTile, HS>(smem.q.address(i), q_map, full, q0, w);
        copy_tile<kTile, HS>(smem.dout.address(i), dout_map, full, q0, w);
        bulk_load(smem.lse_D.address(i), args.lse_D_of(w) + q0, kLseDBytes, full);
    };
    if (leader) {
        mbarrier_init(rows_full, kArrivals);
        smem.q_full.init(kArrivals);
        fence_mbarrier_init();
        mbarrier_arrive_expect(rows_full, 2 * kTileBytes);
        copy_tile<kTile, HS>(smem_address(smem.k), k_map, rows_full, k0, w);
        copy_tile<kTile, HS>(smem_address(smem.v), v_map, rows_full, k0, w);
        if (q_tiles > 0)
            load_q(0);
        if (q_tiles > 1)
            load_q(1);
    }
    __syncthreads();  // the barriers are there for all

    const uint64_t k_tile = wgmma_descriptor(smem_address(smem.k));
    const uint64_t v_tile = wgmma_descriptor(smem_address(smem.v));
    // S, P, dP and dS are transposed: their rows are keys.
    float s[kTile / 8][4];
    float dp[kTile / 8][4];
    uint32_t p_regs[kTile / 16][4];
    uint32_t ds_regs[kTile / 16][4];
    float dk[HS / 8][4] = {};
    float dv[HS / 8][4] = {};
    mbarrier_wait(rows_full, 0);
    // Tile i of queries:
    //   start Sᵀ; start dPᵀ; Pᵀ, while dPᵀ is computed; start dV += Pᵀ dO; dSᵀ; dK += dSᵀ Q;
    //   load tile i + 2
    for (int i = 0; i < q_tiles; i++) {
        const int q0 = first_q0 + i * kTile;
        const uint64_t q_tile = wgmma_descriptor(smem.q.address(i));
        const uint64_t dout_tile = wgmma_descriptor(smem.dout.address(i));
        const uint64_t q_transposed = wgmma_descriptor(smem.q.address(i), kPanelBytes<kTile>);
        const uint64_t dout_transposed = wgmma_descriptor(smem.dout.address(i), kPanelBytes<kTile>);
        const LseDPair* lse_D = smem.lse_D[i] + lane % 4;  // of fragment n: lse_D[4 * n]
        smem.q_full.wait(i);
        start_abt<HS>(s, k_tile, q_tile);
        start_abt<HS>(dp, v_tile, dout_tile);

        wgmma_wait<1>(s);
        for (int n = 0; n < kTile / 8; n++) {
            const LseDPair queries = lse_D[4 * n];
            for (int e = 0; e < 4; e++)  // S becomes P
                s[n][e] = exp2_approx(s[n][e] * args.scale_log2 - queries.columns[e % 2].lse_log2);
        }
        // Keys past Tk need no mask: each has a row of its own, which is not stored.
        const bool diagonal = k0 + kTile - 1 > q0 + args.shift;
        if (diagonal) {
            for (int n = 0; n < kTile / 8; n++)
                for (int e = 0; e < 4; e++) {
                    const int query = fragment_col(q0 + 8 * n, e, lane);
                    if (lane_k + (e / 2) * 8 > query + args.shift)
                        s[n][e] = 0.f;
                }
        }
        for (int n = 0; n < kTile / 8; n++)
            for (int r = 0; r < 2; r++)
                pack_a(p_regs, n, r, s[n][2 * r], s[n][2 * r + 1]);
        start_add_ab(dv, p_regs, dout_transposed);

        wgmma_wait<1>(dp);  // dV is still being added to
        for (int n = 0; n < kTile / 8; n++) {
            const LseDPair queries = lse_D[4 * n];
            for (int r = 0; r < 2; r++)
                pack_a(ds_regs, n, r, s[n][2 * r] * (dp[n][2 * r] - queries.columns[0].D),
                       s[n][2 * r + 1] * (dp[n][2 * r + 1] - queries.columns[1].D));
        }
        start_add_ab(dk, ds_regs, q_transposed);
        wgmma_wait<0>(dv, dk);
        __syncthreads();  // all warps are done with this stage
        if (leader && i + 2 < q_tiles)
            load_q(i + 2);
    }

    for (int r = 0; r < 2; r++)
        scale_row(dk, r, args.scale);
    store_rows<HS>(dk, w.head<HS>(args.dk), args.dk.token_stride, lane_k, Tk);
    store_rows<HS>(dv, w.head<HS>(args.dv), args.dv.token_stride, lane_k, Tk);
#endif
}

// -------------------------------------------------------------------------------------------------
// Launchers

template <class... Parameters>
void launch(const Cuda& dev, int tiles, int heads, int smem, void (*kernel)(Parameters...),
            const Parameters&... parameters) {
    const unsigned blocks = count_blocks(kName, tiles, heads);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    kernel<<<blocks, kThreads, smem, dev.stream>>>(parameters...);
    LAUNCH_CHECK(kName);
}

template <class Y>
void forward(const Cuda& dev, const AttentionForward<bf16, Y>& c) {
    const ForwardArgs<Y> args{c};
    const CUtensorMap q_map = tensor_map("q", c.q, c.s.queries(), Br);
    const CUtensorMap k_map = tensor_map("k", c.k, c.s.keys(), Bc);
    const CUtensorMap v_map = tensor_map("v", c.v, c.s.keys(), Bc);
    with_head_size(c.s.HS, [&](auto HS) {
        launch(dev, ceil_div(c.s.Tq, Br), args.heads, sizeof(ForwardSharedMemory<HS>),
               forward_kernel<HS, Y>, q_map, k_map, v_map, args);
    });
}

template <class Y>
void backward(const Cuda& dev, const AttentionBackward<bf16, Y>& c) {
    const BackwardArgs<Y> args{c};
    const CUtensorMap q_map = tensor_map("q", c.q, c.s.queries(), kTile);
    const CUtensorMap k_map = tensor_map("k", c.k, c.s.keys(), kTile);
    const CUtensorMap v_map = tensor_map("v", c.v, c.s.keys(), kTile);
    const CUtensorMap dout_map = tensor_map("dout", c.dout, c.s.queries(), kTile);
    with_head_size(c.s.HS, [&](auto HS) {
        launch(dev, ceil_div(c.s.Tq, kTile), args.heads, sizeof(DqSharedMemory<HS>),
               dq_kernel<HS, Y>, q_map, k_map, v_map, dout_map, args);
        launch(dev, ceil_div(c.s.Tk, kTile), args.heads, sizeof(DkdvSharedMemory<HS>),
               dkdv_kernel<HS, Y>, q_map, k_map, v_map, dout_map, args);
    });
}

size_t scratch_bytes(const AttentionShape& s) {
    return static_cast<size_t>(s.B) * s.NH * ceil_div(s.Tq, kTile) * kTile * sizeof(LseD);
}

}  // namespace

const AttentionKernel<bf16> flash_wgmma = {
    .name = kName,
    .min_sm = 90,
    .flash = true,
    .supports = {.pieces = true},
    .scratch_bytes = scratch_bytes,
    .unchecked = {.forward = forward<bf16>,
                  .backward = backward<bf16>,
                  .forward_fp32 = forward<float>,
                  .backward_fp32 = backward<float>},
};
