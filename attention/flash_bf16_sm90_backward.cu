// Flash attention backward, bf16, Hopper: wgmma + TMA + mbarrier, warp-specialised (sm_90a).
//
//   D = rowsum(dO∘O);  P = exp(S − lse);  dP = dO Vᵀ;  dS = P∘(dP − D)
//   dV = Pᵀ dO;  dK = scale·dSᵀ Q;  dQ = scale·dS K
#include <cuda.h>

#include <algorithm>
#include <climits>
#include <cmath>

#include "attention/flash_bf16_sm90.h"
#include "attention/ptx_sm90.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // kernels have empty bodies there, and what only they use is "never referenced"
#endif

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Tiles

constexpr int kConsumers = 256, kThreads = 128 + kConsumers;  // warpgroup 0 copies, 1 and 2 compute

template <int HS>
struct Tiles {
    static constexpr int Br = HS == 64 ? 128 : 64;  // queries; at HS 128 dK and dV take twice the registers
    static constexpr int Bc = 128;                  // keys, 64 a warpgroup
    static constexpr int KvBytes = Bc * HS * 2, QBytes = Br * HS * 2, DsBytes = Bc * Br * 2, StatsBytes = Br * 12;
    // Everything has two stages.
    static constexpr int K = 0, V = K + 2 * KvBytes, Q = V + 2 * KvBytes, Do = Q + 2 * QBytes, Ds = Do + 2 * QBytes;
    static constexpr int Stats = Ds + 2 * DsBytes, Control = Stats + 2 * StatsBytes, Smem = Control + 128;
    static_assert(Smem <= 227 * 1024);
};

struct Args {
    CUtensorMap q, k, v, dout;
    CUtensorMap dq, dk, dv;    // whole form: written
    int NH, heads, Tq, Tk;
    int shift;                 // q_offset − k_offset: causal query i sees keys j ≤ i + shift
    int q_tiles, k_tiles, group;
    float scale, scale_log2;
    float* stats;              // (heads, q_tiles) of StatsBytes: log2(e)·lse of each query, or +inf where it sees no key;
                               // then {−D, −D', −D, −D'} of each pair: what dP starts from
    int* turn;                 // (heads, q_tiles): how many key tiles have added to the query tile's dQ
    int* ticket;
    float* dq_sum;             // whole form: dQ in the order of the registers
    float *dq_acc, *dk_acc, *dv_acc;  // block form: added into; null otherwise
};

// ---------------------------------------------------------------------------------------------------------------------
// Before: {lse, D} of each query, and counters to zero.

struct PrepareArgs {
    Heads<const bf16> dout, out;
    const float *lse, *D;  // D: block form only
    float* stats;
    int *turn, *ticket;
    int NH, Tq, q_tiles, first_ticket;
};

__device__ __forceinline__ float dot8(const uint4& x, const uint4& y) {
    const __nv_bfloat162 *a = reinterpret_cast<const __nv_bfloat162*>(&x),
                         *b = reinterpret_cast<const __nv_bfloat162*>(&y);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 u = __bfloat1622float2(a[i]), v = __bfloat1622float2(b[i]);
        sum += u.x * v.x + u.y * v.y;
    }
    return sum;
}

// One block for each query tile of a head. HS/8 lanes share a row.
template <int HS>
__global__ __launch_bounds__(256) void prepare_kernel(const __grid_constant__ PrepareArgs args) {
    constexpr int Br = Tiles<HS>::Br, Lanes = HS / 8, Rows = 256 / Lanes, Passes = Br / Rows;
    const int bh = blockIdx.x / args.q_tiles, tile = blockIdx.x % args.q_tiles, b = bh / args.NH, h = bh % args.NH;
    const int first = tile * Br + threadIdx.x / Lanes, lane = threadIdx.x % Lanes;
    if (threadIdx.x == 0) args.turn[blockIdx.x] = 0;
    if (threadIdx.x == 0 && blockIdx.x == 0) *args.ticket = args.first_ticket;
    float D[Passes] = {};
    if (!args.D) {
        const bf16* dout = args.dout.ptr + b * args.dout.batch + h * HS + lane * 8;
        const bf16* out = args.out.ptr + b * args.out.batch + h * HS + lane * 8;
        uint4 x[Passes], y[Passes];
#pragma unroll
        for (int i = 0; i < Passes; i++) {
            const size_t t = min(first + i * Rows, args.Tq - 1);
            x[i] = *reinterpret_cast<const uint4*>(dout + t * args.dout.token);
            y[i] = *reinterpret_cast<const uint4*>(out + t * args.out.token);
        }
#pragma unroll
        for (int i = 0; i < Passes; i++) {
            D[i] = dot8(x[i], y[i]);
#pragma unroll
            for (int lanes = 1; lanes < Lanes; lanes *= 2) D[i] += __shfl_xor_sync(~0u, D[i], lanes);
        }
    }
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < Passes; i++) {
            const int t = first + i * Rows;
            float lse_log2 = INFINITY, minus_D = 0.f;
            if (t < args.Tq) {
                const size_t at = static_cast<size_t>(bh) * args.Tq + t;
                const float lse = args.lse[at];
                if (lse != -INFINITY) lse_log2 = lse * static_cast<float>(M_LOG2E);
                minus_D = -(args.D ? args.D[at] : D[i]);
            }
            float* stats = args.stats + static_cast<size_t>(blockIdx.x) * (Tiles<HS>::StatsBytes / 4);
            const int q = t - tile * Br;
            stats[q] = lse_log2;
            stats[Br + q / 2 * 4 + q % 2] = stats[Br + q / 2 * 4 + q % 2 + 2] = minus_D;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Work: one key tile of one head, with all query tiles that see it, from the last back.

struct Work {
    int k_tile, bh;
    int first, last;  // query tiles; last < first if no query sees these keys
};
template <int HS, bool Causal>
__device__ __forceinline__ Work work_of(const Args& args, int ticket) {
    constexpr int Br = Tiles<HS>::Br, Bc = Tiles<HS>::Bc;
    const int start = ticket / (args.group * args.k_tiles) * args.group, size = min(args.group, args.heads - start);
    const int i = ticket - start * args.k_tiles, k_tile = i / size, bh = start + i % size;
    Work w = {k_tile, bh, 0, args.q_tiles - 1};
    if (Causal) {
        const int first_query = max(0, k_tile * Bc - args.shift);
        w.first = first_query / Br;
        if (first_query >= args.Tq) w.last = w.first - 1;
    }
    return w;
}
// The last key tile that query tile i sees.
template <int HS, bool Causal>
__device__ __forceinline__ int last_k_tile(const Args& args, int i) {
    constexpr int Br = Tiles<HS>::Br, Bc = Tiles<HS>::Bc;
    if (!Causal) return args.k_tiles - 1;
    return min(args.k_tiles - 1, (min((i + 1) * Br, args.Tq) - 1 + args.shift) / Bc);
}

// ---------------------------------------------------------------------------------------------------------------------

// The address that this lane gives stmatrix for the 16×16 block at (row, 0) of a tile in shared memory as TMA wants it:
// panels of 64 columns, 16-byte chunk c of row r at c ^ (r % 8). An xor with 32·k goes to column 16·k.
__device__ __forceinline__ uint32_t block16(uint32_t tile, int row) {
    const int lane = threadIdx.x % 32;
    return tile + (row + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
}

// Rounds factor·c, 16 rows from `row` of a tile whose panels have `rows`, into shared memory.
template <int N>
__device__ __forceinline__ void store_tile(const float (&c)[N][4], float factor, uint32_t tile, int row, int rows) {
    const uint32_t block = block16(tile, row);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = pack_bf16(factor * c[n + i / 2][i % 2 * 2], factor * c[n + i / 2][i % 2 * 2 + 1]);
        stmatrix_x4((block ^ n % 8 << 4) + n / 8 * rows * 128, a);
    }
}

template <int HS, bool Causal, bool Block>
__global__ __launch_bounds__(kThreads, 1) void backward_kernel(const __grid_constant__ Args args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using T = Tiles<HS>;
    constexpr int Br = T::Br, Bc = T::Bc;
    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t base = smem_address(smem);
    const uint32_t kv_full = base + T::Control, kv_empty = kv_full + 16, q_full = kv_full + 32, q_empty = kv_full + 48;
    const uint32_t turn = kv_full + 64, added = kv_full + 80, kv_done = kv_full + 96;
    volatile int* ticket_smem = reinterpret_cast<volatile int*>(smem + T::Control + 104);  // [2]
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; s++) {
            mbarrier_init(kv_full + 8 * s, 1);
            mbarrier_init(kv_empty + 8 * s, 3);
            mbarrier_init(q_full + 8 * s, 1);
            mbarrier_init(q_empty + 8 * s, kConsumers / 32 + 1);
            mbarrier_init(turn + 8 * s, 1);
            mbarrier_init(added + 8 * s, kConsumers / 32);
        }
        mbarrier_init(kv_done, kConsumers / 32);
        fence_mbarrier_init();
    }
    __syncthreads();

    if (warp < 4) {
        setmaxnreg_dec<24>();
        if (warp == 0 && lane == 0) {  // the loader
            tma_prefetch_map(&args.q);
            tma_prefetch_map(&args.k);
            tma_prefetch_map(&args.v);
            tma_prefetch_map(&args.dout);
            const int total = args.heads * args.k_tiles;
            int ticket = blockIdx.x;
            for (int item = 0, n = 0;; item++) {
                const int s = item & 1;
                mbarrier_wait(kv_empty + 8 * s, (item >> 1 & 1) ^ 1);
                ticket_smem[s] = ticket < total ? ticket : -1;
                if (ticket >= total) {
                    mbarrier_arrive(kv_full + 8 * s);
                    break;
                }
                const Work w = work_of<HS, Causal>(args, ticket);
                const int b = w.bh / args.NH, h = w.bh % args.NH;
                mbarrier_arrive_expect(kv_full + 8 * s, 2 * T::KvBytes);
                for (int panel = 0; panel < HS / 64; panel++) {
                    const uint32_t at = s * T::KvBytes + panel * Bc * 128;
                    tma_load_4d(base + T::K + at, &args.k, kv_full + 8 * s, panel * 64, h, w.k_tile * Bc, b);
                    tma_load_4d(base + T::V + at, &args.v, kv_full + 8 * s, panel * 64, h, w.k_tile * Bc, b);
                }
                for (int i = w.last; i >= w.first; i--, n++) {
                    const int s = n & 1;
                    const uint32_t bar = q_full + 8 * s;
                    mbarrier_wait(q_empty + 8 * s, (n >> 1 & 1) ^ 1);
                    mbarrier_arrive_expect(bar, 2 * T::QBytes + T::StatsBytes);
                    for (int panel = 0; panel < HS / 64; panel++) {
                        const uint32_t at = s * T::QBytes + panel * Br * 128;
                        tma_load_4d(base + T::Q + at, &args.q, bar, panel * 64, h, i * Br, b);
                        tma_load_4d(base + T::Do + at, &args.dout, bar, panel * 64, h, i * Br, b);
                    }
                    bulk_load(base + T::Stats + s * T::StatsBytes,
                              args.stats + (static_cast<size_t>(w.bh) * args.q_tiles + i) * (T::StatsBytes / 4),
                              T::StatsBytes, bar);
                }
                ticket = atomicAdd(args.ticket, 1);
            }
        } else if (warp == 1 && lane == 0) {  // the usher
            for (int item = 0, n = 0;; item++) {
                const int s = item & 1;
                mbarrier_wait(kv_full + 8 * s, item >> 1 & 1);
                const int ticket = ticket_smem[s];
                if (ticket < 0) break;
                mbarrier_arrive(kv_empty + 8 * s);
                const Work w = work_of<HS, Causal>(args, ticket);
                const int* turns = args.turn + static_cast<size_t>(w.bh) * args.q_tiles;
                for (int i = w.last; i >= w.first; i--, n++) {
                    mbarrier_wait(added + 8 * (n & 1), (n >> 1 & 1) ^ 1);
                    if (w.k_tile > 0)
                        while (load_acquire_gpu(turns + i) < w.k_tile) {}
                    mbarrier_arrive(turn + 8 * (n & 1));
                }
            }
        } else if (warp == 3 && lane == 0) {  // the announcer
            for (int item = 0, n = 0;; item++) {
                const int s = item & 1;
                mbarrier_wait(kv_full + 8 * s, item >> 1 & 1);
                const int ticket = ticket_smem[s];
                if (ticket < 0) break;
                mbarrier_arrive(kv_empty + 8 * s);
                const Work w = work_of<HS, Causal>(args, ticket);
                const int b = w.bh / args.NH, h = w.bh % args.NH;
                int* turns = args.turn + static_cast<size_t>(w.bh) * args.q_tiles;
                for (int i = w.last; i >= w.first; i--, n++) {
                    mbarrier_wait(added + 8 * (n & 1), n >> 1 & 1);
                    const bool final = w.k_tile == last_k_tile<HS, Causal>(args, i);
                    if (final && !Block) {
                        for (int panel = 0; panel < HS / 64; panel++)
                            tma_store_4d(&args.dq, base + T::Do + (n & 1) * T::QBytes + panel * Br * 128, panel * 64,
                                         h, i * Br, b);
                        bulk_commit();
                        bulk_wait_read<0>();
                    }
                    mbarrier_arrive(q_empty + 8 * (n & 1));
                    if (!final) store_release_gpu(turns + i, w.k_tile + 1);
                }
            }
        } else if (warp == 2 && lane == 0) {  // the storer
            for (int item = 0;; item++) {
                const int s = item & 1;
                mbarrier_wait(kv_full + 8 * s, item >> 1 & 1);
                const int ticket = ticket_smem[s];
                if (ticket < 0) break;
                const Work w = work_of<HS, Causal>(args, ticket);
                const int b = w.bh / args.NH, h = w.bh % args.NH;
                mbarrier_wait(kv_done, item & 1);
                if (!Block) {
                    for (int panel = 0; panel < HS / 64; panel++) {
                        const uint32_t at = s * T::KvBytes + panel * Bc * 128;
                        tma_store_4d(&args.dk, base + T::K + at, panel * 64, h, w.k_tile * Bc, b);
                        tma_store_4d(&args.dv, base + T::V + at, panel * 64, h, w.k_tile * Bc, b);
                    }
                    bulk_commit();
                    bulk_wait_read<0>();
                }
                mbarrier_arrive(kv_empty + 8 * s);
            }
        }
    } else {
        setmaxnreg_inc<240>();
        const int wg = warp / 4 - 1;
        const int row = 64 * wg + 16 * (warp % 4);  // the warp's first key in the tile
        const uint32_t ds_block = block16(base + T::Ds, row);

        for (int item = 0, n = 0;; item++) {
            const int kv = item & 1;
            mbarrier_wait(kv_full + 8 * kv, item >> 1 & 1);
            const int ticket = __shfl_sync(~0u, ticket_smem[kv], 0);
            if (ticket < 0) break;
            const Work w = work_of<HS, Causal>(args, ticket);
            const uint32_t k_smem = base + T::K + kv * T::KvBytes, v_smem = base + T::V + kv * T::KvBytes;
            // A operands of S and dP: 64 rows of K and V; B operand of dQ: all of K, k along the rows
            const uint64_t k_rows = wgmma_descriptor(k_smem + wg * 64 * 128);
            const uint64_t v_rows = wgmma_descriptor(v_smem + wg * 64 * 128);
            const uint64_t k_cols = wgmma_descriptor(k_smem + (HS == 128 ? wg * Bc * 128 : 0));

            float dk[HS / 8][4] = {}, dv[HS / 8][4] = {};
            float s[Br / 8][4];

            auto start_s = [&](int n) {
                mbarrier_wait(q_full + 8 * (n & 1), n >> 1 & 1);
                const uint64_t q_rows = wgmma_descriptor(base + T::Q + (n & 1) * T::QBytes);
                wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < HS / 16; kk++)
                    wgmma_ss(s, wgmma_advance(k_rows, kk / 4 * Bc * 128 + kk % 4 * 32),
                             wgmma_advance(q_rows, kk / 4 * Br * 128 + kk % 4 * 32), kk > 0);
            };
            if (w.last >= w.first) {
            start_s(n);
            wgmma_commit();
            int i = w.last;
#pragma unroll 1
            do {
                const int stage = n & 1;
                const uint32_t q_smem = base + T::Q + stage * T::QBytes, do_smem = base + T::Do + stage * T::QBytes;
                const unsigned char* stats = smem + T::Stats + stage * T::StatsBytes;
                const float2* lse_log2 = reinterpret_cast<const float2*>(stats) + lane % 4;
                const float4* minus_D = reinterpret_cast<const float4*>(stats + Br * 4) + lane % 4;

                // dPᵀ = V dOᵀ
                float dp[Br / 8][4];
#pragma unroll
                for (int c = 0; c < Br / 8; c++) {
                    const float4 x = minus_D[4 * c];
                    dp[c][0] = x.x, dp[c][1] = x.y, dp[c][2] = x.z, dp[c][3] = x.w;
                }
                wgmma_hold(dp);
                wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < HS / 16; kk++)
                    wgmma_ss(dp, wgmma_advance(v_rows, kk / 4 * Bc * 128 + kk % 4 * 32),
                             wgmma_advance(wgmma_descriptor(do_smem), kk / 4 * Br * 128 + kk % 4 * 32), true);
                wgmma_commit();

                wgmma_wait<1>();  // Sᵀ
                wgmma_hold(s);
                const int k0 = w.k_tile * Bc, q0 = i * Br;
                if ((Causal && q0 + args.shift < k0 + Bc - 1) || k0 + Bc > args.Tk) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const int key = k0 + row + 8 * r + lane / 4;
                        int hidden = Causal ? key - args.shift - q0 : 0;  // queries before it do not see the key
                        if (key >= args.Tk) hidden = Br;
                        hidden -= lane % 4 * 2;
#pragma unroll
                        for (int c = 0; c < Br / 8; c++)
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                if (8 * c + e < hidden) s[c][2 * r + e] = -INFINITY;
                    }
                }
                uint32_t a[Br / 16][4];  // Pᵀ, then dSᵀ, as A operands
#pragma unroll
                for (int c = 0; c < Br / 8; c++) {
                    const float2 lse = lse_log2[4 * c];  // of this lane's two columns
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        s[c][e] = exp2_approx(s[c][e] * args.scale_log2 - (e % 2 ? lse.y : lse.x));
                    a[c / 2][c % 2 * 2] = pack_bf16(s[c][0], s[c][1]);
                    a[c / 2][c % 2 * 2 + 1] = pack_bf16(s[c][2], s[c][3]);
                }
                wgmma_wait<0>();  // dPᵀ
                wgmma_hold(dp);

                // dV += Pᵀ dO
                wgmma_hold(dv);
                wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < Br / 16; kk++)
                    wgmma_rs<true>(dv, a[kk], wgmma_advance(wgmma_descriptor(do_smem, Br * 128), kk * 16 * 128), true);
                wgmma_commit();

                uint32_t ds[Br / 16][4];
#pragma unroll
                for (int c = 0; c < Br / 8; c++) {
                    float x[4];
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        x[e] = s[c][e] * dp[c][e];
                    }
                    ds[c / 2][c % 2 * 2] = pack_bf16(x[0], x[1]);
                    ds[c / 2][c % 2 * 2 + 1] = pack_bf16(x[2], x[3]);
                }
#pragma unroll
                for (int kk = 0; kk < Br / 16; kk++)
                    stmatrix_x4((ds_block ^ kk % 4 << 5) + stage * T::DsBytes + kk / 4 * Bc * 128, ds[kk]);
                wgmma_wait<0>();  // dV
                wgmma_hold(dv);
                fence_proxy_async();
                named_barrier_sync(1, kConsumers);

#pragma unroll
                for (int c = 0; c < Br / 8; c++)
#pragma unroll
                    for (int e = 0; e < 4; e++) s[c][e] = 0.f;
                wgmma_hold(s);
                // dQ = dS K
                float dq[8][4];
                const uint64_t ds_cols =
                    wgmma_descriptor(base + T::Ds + stage * T::DsBytes + (HS == 64 ? wg * Bc * 128 : 0));
                wgmma_fence();
                wgmma_ss_set<true, true>(dq, ds_cols, k_cols);
#pragma unroll
                for (int kk = 1; kk < Bc / 16; kk++)
                    wgmma_ss<true, true>(dq, wgmma_advance(ds_cols, kk * 16 * 128), wgmma_advance(k_cols, kk * 16 * 128),
                                         kk > 0);
                wgmma_commit();
                // dK += dSᵀ Q
                wgmma_hold(dk);
                wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < Br / 16; kk++)
                    wgmma_rs<true>(dk, ds[kk], wgmma_advance(wgmma_descriptor(q_smem, Br * 128), kk * 16 * 128), true);
                wgmma_commit();

                if (i > w.first) start_s(n + 1);
                wgmma_commit();
                wgmma_wait<2>();  // dQ
                wgmma_hold(dq);
                mbarrier_wait(turn + 8 * stage, n >> 1 & 1);
                const int q_row = q0 + (HS == 64 ? 64 * wg : 0) + 16 * (warp % 4) + lane / 4;
                const int col = (HS == 128 ? 64 * wg : 0) + lane % 4 * 2;
                if constexpr (Block) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const int t = q_row + 8 * r;
                        float* to = args.dq_acc + ((static_cast<size_t>(w.bh / args.NH) * args.Tq + t) * args.NH + w.bh % args.NH) * HS + col;
                        if (t < args.Tq)
#pragma unroll
                            for (int c = 0; c < 8; c++)
                                red_add_v2(to + 8 * c, dq[c][2 * r] * args.scale, dq[c][2 * r + 1] * args.scale);
                    }
                } else {
                    float4* sum = reinterpret_cast<float4*>(args.dq_sum) +
                                  (static_cast<size_t>(w.bh) * args.q_tiles + i) * (Br * HS / 4) + wg * 1024 +
                                  threadIdx.x % 128;
                    if (w.k_tile == last_k_tile<HS, Causal>(args, i)) {
                        if (w.k_tile > 0)
#pragma unroll
                            for (int c = 0; c < 8; c++) {
                                const float4 x = __ldcg(sum + c * 128);
                                dq[c][0] += x.x, dq[c][1] += x.y, dq[c][2] += x.z, dq[c][3] += x.w;
                            }
                        // over dO, which nobody needs since the barrier
                        store_tile<8>(dq, args.scale, do_smem + (HS == 128 ? wg * Br * 128 : 0),
                                      (HS == 64 ? 64 * wg : 0) + 16 * (warp % 4), Br);
                        fence_proxy_async();
                    } else if (w.k_tile == 0) {
#pragma unroll
                        for (int c = 0; c < 8; c++)
                            __stcg(sum + c * 128, make_float4(dq[c][0], dq[c][1], dq[c][2], dq[c][3]));
                    } else {
#pragma unroll
                        for (int c = 0; c < 8; c++)
                            red_add_v4(reinterpret_cast<float*>(sum + c * 128), dq[c][0], dq[c][1], dq[c][2], dq[c][3]);
                    }
                }
                __syncwarp();
                if (lane == 0) mbarrier_arrive(added + 8 * stage);
                wgmma_wait<1>();  // dK
                wgmma_hold(dk);
                if (lane == 0) mbarrier_arrive(q_empty + 8 * stage);
                n++, i--;
            } while (i >= w.first);
            }
            wgmma_wait<0>();
            wgmma_hold(dk);
            wgmma_hold(dv);
            if constexpr (Block) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int key = w.k_tile * Bc + row + 8 * r + lane / 4;
                    if (key >= args.Tk) continue;
                    const size_t at = ((static_cast<size_t>(w.bh / args.NH) * args.Tk + key) * args.NH + w.bh % args.NH) * HS + lane % 4 * 2;
                    float2 *to_k = reinterpret_cast<float2*>(args.dk_acc + at),
                           *to_v = reinterpret_cast<float2*>(args.dv_acc + at);
#pragma unroll
                    for (int c = 0; c < HS / 8; c++) {
                        const float2 x = to_k[4 * c], y = to_v[4 * c];
                        to_k[4 * c] = make_float2(x.x + dk[c][2 * r] * args.scale, x.y + dk[c][2 * r + 1] * args.scale);
                        to_v[4 * c] = make_float2(y.x + dv[c][2 * r], y.y + dv[c][2 * r + 1]);
                    }
                }
            } else {
                named_barrier_sync(2, kConsumers);  // nobody reads K and V any more
                store_tile(dk, args.scale, k_smem, row, Bc);
                store_tile(dv, 1.f, v_smem, row, Bc);
                fence_proxy_async();
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(kv_done);
        }
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

// The driver's cuTensorMapEncodeTiled, found at run time so that nothing links libcuda.
decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
    static const auto encoder = [] {
        void* f = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
#else
        CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &found));
#endif
        if (found != cudaDriverEntryPointSuccess)
            throw Error("flash_bf16_sm90: the driver has no cuTensorMapEncodeTiled; use one for CUDA 12.0 or later");
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
    }();
    return encoder;
}

// Boxes of `rows` tokens × 64 elements of one head. T and B are dimensions of their own, so that what lies past the
// last token is zero, not the next sequence.
template <class X>
CUtensorMap tensor_map(const char* name, const Heads<X>& x, int B, int T, int NH, int HS, int rows) {
    CUtensorMap map;
    const cuuint64_t size[4] = {cuuint64_t(HS), cuuint64_t(NH), cuuint64_t(T), cuuint64_t(B)};
    const cuuint64_t stride[3] = {cuuint64_t(HS) * 2, x.token * 2, x.batch * 2};
    const cuuint32_t box[4] = {64, 1, cuuint32_t(rows), 1}, step[4] = {1, 1, 1, 1};
    const CUresult status = tensor_map_encoder()(
        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<bf16*>(static_cast<const bf16*>(x.ptr)), size, stride, box, step,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS)
        throw Error(format("flash_bf16_sm90: no tensor map for %s (B %d, T %d, NH %d, HS %d, strides %zu and %zu "
                           "elements): CUresult %d",
                           name, B, T, NH, HS, x.batch, x.token, static_cast<int>(status)));
    return map;
}

void check_aligned(const char* name, const void* ptr, size_t batch, size_t token) {
    if (reinterpret_cast<uintptr_t>(ptr) % 16 || batch % 8 || token % 8)
        throw Error(format("flash_bf16_sm90: rows of %s are not 16-byte aligned (address %p, strides %zu and %zu elements)",
                           name, ptr, batch, token));
}
template <class X>
void check_aligned(const char* name, const Heads<X>& x) {
    check_aligned(name, x.ptr, x.batch, x.token);
}

// The three heads of a packed (B, T, 3, NH, HS) tensor: which = 0 q, 1 k, 2 v.
template <class X>
Heads<X> packed(X* qkv, const AttentionShape& s, int which) {
    const size_t C = static_cast<size_t>(s.NH) * s.HS;
    return {qkv + which * C, s.T * 3 * C, 3 * C};
}
template <class X>
Heads<X> contiguous(X* x, const AttentionShape& s) {
    const size_t C = static_cast<size_t>(s.NH) * s.HS;
    return {x, s.T * C, C};
}
BlockShape whole(const AttentionShape& s) {
    return {s.B, s.T, s.T, s.NH, s.HS, 0, 0, s.causal, s.scale};
}
int ceil_div(int a, int b) {
    return (a - 1) / b + 1;
}

// Scratch: stats, dQ sums (whole form), turns, ticket.
struct Layout {
    int Br, q_tiles, k_tiles;
    size_t dq_sum, turn, ticket, bytes;
    Layout(const BlockShape& s, bool is_whole) {
        Br = s.HS == 64 ? Tiles<64>::Br : Tiles<128>::Br;
        q_tiles = ceil_div(s.Tq, Br), k_tiles = ceil_div(s.Tk, Tiles<64>::Bc);
        const size_t tiles = static_cast<size_t>(s.B) * s.NH * q_tiles;
        dq_sum = tiles * (s.HS == 64 ? Tiles<64>::StatsBytes : Tiles<128>::StatsBytes);
        turn = dq_sum + (is_whole ? tiles * Br * s.HS * sizeof(float) : 0);
        ticket = turn + tiles * sizeof(int);
        bytes = ticket + sizeof(int);
    }
};

template <int HS>
void launch(PrepareArgs& prepare, Args& args, bool causal, const Cuda& dev) {
    const size_t prepare_blocks = static_cast<size_t>(args.heads) * args.q_tiles;
    const size_t items = static_cast<size_t>(args.heads) * args.k_tiles;
    if (std::max(prepare_blocks, items) > INT_MAX / 2)
        throw Error(format("flash_bf16_sm90: %zu tiles, more than a grid holds (%d): use a smaller batch",
                           std::max(prepare_blocks, items), INT_MAX / 2));
    const int blocks = static_cast<int>(std::min<size_t>(items, dev.num_sms));
    prepare.first_ticket = blocks;
    prepare_kernel<HS><<<static_cast<unsigned>(prepare_blocks), 256, 0, dev.stream>>>(prepare);
    LAUNCH_CHECK("flash_bf16_sm90 prepare_kernel");
    const auto kernel = args.dq_acc ? (causal ? backward_kernel<HS, true, true> : backward_kernel<HS, false, true>)
                                    : (causal ? backward_kernel<HS, true, false> : backward_kernel<HS, false, false>);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiles<HS>::Smem));
    kernel<<<blocks, kThreads, Tiles<HS>::Smem, dev.stream>>>(args);
    LAUNCH_CHECK("flash_bf16_sm90 backward_kernel");
}

struct Inputs {
    Heads<const bf16> q, k, v, dout, out;
    const float *lse, *D;
};
void launch(const Inputs& in, Args& args, void* scratch, const BlockShape& s, const Cuda& dev) {
    const Layout layout(s, !args.dq_acc);
    char* at = static_cast<char*>(scratch);
    args.NH = s.NH, args.heads = s.B * s.NH, args.Tq = s.Tq, args.Tk = s.Tk;
    // Beyond these bounds every query sees all keys, or none.
    args.shift = static_cast<int>(std::clamp<long long>(s.q_offset - s.k_offset, -s.Tq, s.Tk));
    args.q_tiles = layout.q_tiles, args.k_tiles = layout.k_tiles;
    constexpr size_t kGroupBytes = 32 << 20;
    constexpr int kMinGroup = 48;
    args.group = static_cast<int>(
        std::min<size_t>(args.heads, std::max<size_t>(kMinGroup, kGroupBytes / (12 * static_cast<size_t>(s.Tq) * s.HS))));
    args.scale = s.resolved_scale();
    args.scale_log2 = static_cast<float>(s.resolved_scale() * M_LOG2E);
    args.stats = reinterpret_cast<float*>(at);
    args.dq_sum = reinterpret_cast<float*>(at + layout.dq_sum);
    args.turn = reinterpret_cast<int*>(at + layout.turn);
    args.ticket = reinterpret_cast<int*>(at + layout.ticket);
    args.q = tensor_map("q", in.q, s.B, s.Tq, s.NH, s.HS, layout.Br);
    args.k = tensor_map("k", in.k, s.B, s.Tk, s.NH, s.HS, Tiles<64>::Bc);
    args.v = tensor_map("v", in.v, s.B, s.Tk, s.NH, s.HS, Tiles<64>::Bc);
    args.dout = tensor_map("dout", in.dout, s.B, s.Tq, s.NH, s.HS, layout.Br);
    PrepareArgs prepare{in.dout, in.out, in.lse, in.D, args.stats, args.turn, args.ticket, s.NH, s.Tq, layout.q_tiles, 0};
    if (s.HS == 64)
        launch<64>(prepare, args, s.causal, dev);
    else
        launch<128>(prepare, args, s.causal, dev);
}

void check_problem(const Inputs& in, const BlockShape& s, const void* scratch) {
    if (s.HS != 64 && s.HS != 128)
        throw Error(format("flash_bf16_sm90: head size %d, expected 64 or 128: use --attention naive", s.HS));
    if (s.B < 1 || s.NH < 1 || s.Tq < 1 || s.Tk < 1)
        throw Error(
            format("flash_bf16_sm90: B %d, NH %d, Tq %d, Tk %d: each must be at least 1", s.B, s.NH, s.Tq, s.Tk));
    if (!(s.resolved_scale() > 0.f)) throw Error(format("flash_bf16_sm90: scale %g, expected > 0", s.resolved_scale()));
    check_aligned("q", in.q);
    check_aligned("k", in.k);
    check_aligned("v", in.v);
    check_aligned("dout", in.dout);
    check_aligned("scratch", scratch, 0, 0);
}

}  // namespace

void flash_bf16_sm90_backward(const Cuda& dev, bf16* dqkv, void* scratch, const bf16* dout, const bf16* out,
                              const float* lse, const bf16*, const bf16* qkv, const AttentionShape& s) {
    const Inputs in{packed(qkv, s, 0), packed(qkv, s, 1),  packed(qkv, s, 2), contiguous(dout, s),
                    contiguous(out, s), lse, nullptr};
    check_problem(in, whole(s), scratch);
    Args args{};
    const Heads<bf16> dq = packed(dqkv, s, 0), dk = packed(dqkv, s, 1), dv = packed(dqkv, s, 2);
    check_aligned("out", in.out);
    check_aligned("dqkv", dq);
    args.dq = tensor_map("dq", dq, s.B, s.T, s.NH, s.HS, s.HS == 64 ? Tiles<64>::Br : Tiles<128>::Br);
    args.dk = tensor_map("dk", dk, s.B, s.T, s.NH, s.HS, Tiles<64>::Bc);
    args.dv = tensor_map("dv", dv, s.B, s.T, s.NH, s.HS, Tiles<64>::Bc);
    launch(in, args, scratch, whole(s), dev);
}

void flash_bf16_sm90_backward_block(const Cuda& dev, float* dq, float* dk, float* dv, void* scratch,
                                    Heads<const bf16> q, Heads<const bf16> k, Heads<const bf16> v,
                                    Heads<const bf16> dout, const float* lse, const float* D, const BlockShape& s) {
    const Inputs in{q, k, v, dout, {}, lse, D};
    check_problem(in, s, scratch);
    Args args{};
    args.dq_acc = dq, args.dk_acc = dk, args.dv_acc = dv;
    check_aligned("dq", dq, 0, 0);
    check_aligned("dk", dk, 0, 0);
    check_aligned("dv", dv, 0, 0);
    launch(in, args, scratch, s, dev);
}

size_t flash_bf16_sm90_block_scratch_bytes(const BlockShape& s) {
    return Layout(s, false).bytes;
}
size_t flash_bf16_sm90_scratch_bytes(const AttentionShape& s) {
    return Layout(whole(s), true).bytes;
}
