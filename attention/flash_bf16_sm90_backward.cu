// Flash attention backward, bf16, Hopper: wgmma + TMA + mbarrier, warp-specialised (sm_90a).
//
//   D  = rowsum(dO∘O)
//   P  = exp(S − lse)
//   dP = dO Vᵀ
//   dS = P∘(dP − D)
//   dQ = scale·dS K
//   dK = scale·dSᵀ Q
//   dV = Pᵀ dO
//
// New against flash_bf16: five products, not seven. An item of work is a key tile of one head. Its
// K and V stay while the query tiles that see it pass by. dK and dV stay in registers. The dQ of
// each query tile is added to a sum in global memory. A warpgroup takes 64 of the 128 keys:
//
//   product      A (64 × k)                     B (k × N)                 result
//   Sᵀ  = K Qᵀ   K, shared memory               Q, shared memory          registers
//   dPᵀ = V dOᵀ  V, shared memory               dO, shared memory         registers
//   dV += Pᵀ dO  Pᵀ, registers: Sᵀ's layout     dO, transposed (k: rows)  registers, to the end
//   dK += dSᵀ Q  dSᵀ, registers: dPᵀ's layout   Q, transposed             registers, to the end
//   dQ  = dS K   dS, shared memory, transposed  K, transposed             registers, then the sum
//
// Keys are rows of S and dP, so P and dS are A operands where they arise. Only dQ sums over all
// keys of the tile, so the two warpgroups exchange dS for it. They compute dQ one tile late, so
// neither waits for the other's dS. Sᵀ they start one tile early. In an item's last tile that is
// the Sᵀ of the next item's first tile.
//
// A block stays on its SM and takes items until there are none, in the order of
// sm90_backward_scheduler.cuh, by which dQ's sum is deterministic. In the block's first warpgroup
// four threads have a job each:
//   loader   takes tickets, and loads the next item's K and V and the next tile's Q, dO, lse and D
//   senders  one for each consumer, which waits for the turn, sends dQ out of shared memory and
//            passes the turn on
//   storer   writes dK and dV out of shared memory
// The other two warpgroups are the consumers. Who waits for whom at an mbarrier, [2] by stage or
// consumer:
//   KFull[2]      all others  ← loader: K is there, and which item it is
//   KEmpty[2]     loader      ← storer: dK has left; senders: they know the item
//   VFull         consumers   ← loader: V is there
//   VEmpty        loader      ← consumers: the item's last dP is done
//   QFull[2]      consumers   ← loader: Q, dO, lse and D are there
//   QEmpty[2]     loader      ← consumers: dK is done
//   DsFull[2]     consumers   ← consumers: dS is there
//   DsEmpty[2]    consumers   ← consumers: dQ is done
//   DqFull[2]     sender      ← consumer: dQ is in shared memory
//   DqEmpty[2]    consumer    ← sender: dQ has been read
//   KvDone        storer      ← consumers: dK and dV are in their places
//   KvStored      consumers   ← storer: dK and dV have left, so the next item may write dS
//
// Writes: dq, dk, dv (every element, in bf16 or fp32).
// Scratch: log2(e)·lse, D, dQ's sum in fp32, turns and the ticket. The kernels write all of it
// before they read it.
// Limits: HS in {64, 128}, any T ≥ 1, scale > 0.   Run: ./dev/bench_attention --kernel
// flash_bf16_sm90
#include <climits>
#include <cmath>

#include "attention/flash_bf16_sm90.h"
#include "attention/sm90_backward_scheduler.cuh"
#include "cuda/ptx_sm90.cuh"
#include "cuda/tensor_map.h"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
// kernels have empty bodies there, and what only they use is "never referenced"
#pragma nv_diag_suppress 177
#endif

namespace {

using WorkTile = BackwardWorkTile;

// -------------------------------------------------------------------------------------------------
// Tiles, and what a launch covers

constexpr int kConsumers = 256, kThreads = 128 + kConsumers;
// a line of L2 each: many blocks ask at once, and a line answers one at a time
constexpr size_t kSemaphoreInts = 32;

// What lies where in shared memory: panels of 64 columns, rows of 128 bytes in TMA's 128-byte
// swizzle.
template <int HS>
struct Tiles {
    // queries; at HS 128 dK and dV take twice the registers
    static constexpr int Br = HS == 64 ? 128 : 64;
    static constexpr int Bc = 128;  // keys, 64 a warpgroup
    static constexpr int KvBytes = Bc * HS * 2, QBytes = Br * HS * 2, DsBytes = Bc * Br * 2,
                         DqBytes = Br * HS * 4, LseDBytes = Br * 8;
    // K, Q, dO, dS, lse and D have two stages, V and dQ one. dV leaves from dS's place, dK from
    // K's, or in fp32 from dS's.
    static constexpr int K = 0, V = K + 2 * KvBytes, Q = V + KvBytes, Do = Q + 2 * QBytes,
                         Ds = Do + 2 * QBytes, Dq = Ds + 2 * DsBytes, LseD = Dq + DqBytes,
                         Control = LseD + 2 * LseDBytes;
    static constexpr int Items = Control + 24 * 8;  // after the mbarriers
    static constexpr int Smem = Items + 2 * sizeof(WorkTile);
    static_assert(Smem <= 227 * 1024);
};

template <int HS, class Y>
struct Args {
    using TileScheduler = BackwardTileScheduler<Tiles<HS>::Br, Tiles<HS>::Bc>;
    // dK and dV leave from shared memory
    static constexpr bool kFits = HS == 64 || std::is_same_v<Y, bf16>;
    CUtensorMap q, k, v, dout, dq, dk, dv;
    HeadsView<Y> dk_rows, dv_rows;
    TileScheduler scheduler;
    float scale, scale_log2;  // scale_log2 = scale·log2(e): the exponentials are powers of 2
    float* lse_D;             // (heads, q_tiles, 2, Br): log2(e)·lse (+inf for rows past Tq) and D
    // (sum_heads, q_tiles, 2 warpgroups, 8 tiles of 8 columns, 128 threads, 4): unscaled dQ
    float* dq_sum;
    // (heads, q_tiles, 2 warpgroups, kSemaphoreInts): how many key tiles have added to dQ
    int* dq_semaphores;
    int* ticket;  // the next item
    // Of query tile i, for a warpgroup. `first` is the head's scheduler.sum_index or
    // semaphore_index.
    __device__ float* sum(int first, int i) const {
        return dq_sum + (first + 2 * i) * size_t{Tiles<HS>::DqBytes / 8};
    }
    __device__ int* dq_semaphore(int first, int i) const {
        return dq_semaphores + (first + 2 * i) * kSemaphoreInts;
    }
};

// -------------------------------------------------------------------------------------------------
// Before the main kernel: lse and D of each query, and counters to zero

// One block for each query tile of a head. HS/8 lanes share a row.
template <int HS, class Y>
__global__ __launch_bounds__(1024) void prepare_kernel(HeadsView<const bf16> dout,
                                                       HeadsView<const bf16> out,
                                                       RowStatsView<const float> lse,
                                                       const __grid_constant__ Args<HS, Y> args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    grid_allow_dependents();
    constexpr int Br = Tiles<HS>::Br;
    constexpr int Lanes = HS / 8;
    static_assert(Br * Lanes == 1024);
    // Blocks that run together read whole tokens: the heads of one come one after the other.
    const int q_tiles = args.scheduler.q_tiles;
    const int h = blockIdx.x % args.scheduler.NH;
    const int tile = blockIdx.x / args.scheduler.NH % q_tiles;
    const int b = blockIdx.x / args.scheduler.NH / q_tiles;
    const int bh = b * args.scheduler.NH + h;
    if (threadIdx.x == 0 && blockIdx.x == 0)
        *args.ticket = 0;
    if (threadIdx.x < 2)
        *args.dq_semaphore(args.scheduler.semaphore_index(bh, threadIdx.x), tile) = 0;
    const int row = threadIdx.x / Lanes;
    const int lane = threadIdx.x % Lanes;
    const int t = tile * Br + row;
    const size_t read = min(t, args.scheduler.Tq - 1);
    const size_t column = h * HS + lane * 8;
    float D = dot8(*reinterpret_cast<const uint4*>(dout.ptr + b * dout.batch_stride +
                                                   read * dout.token_stride + column),
                   *reinterpret_cast<const uint4*>(out.ptr + b * out.batch_stride +
                                                   read * out.token_stride + column));
    for (int lanes = 1; lanes < Lanes; lanes *= 2)
        D += __shfl_xor_sync(~0u, D, lanes);
    if (lane > 0)
        return;
    float* const to_lse = args.lse_D + (static_cast<size_t>(bh) * q_tiles + tile) * 2 * Br + row;
    float* const to_D = to_lse + Br;
    *to_lse = t < args.scheduler.Tq ? lse.ptr[bh * lse.head_stride + t] * kLog2e : INFINITY;
    *to_D = t < args.scheduler.Tq ? D : 0.f;
#endif
}

// -------------------------------------------------------------------------------------------------
// Who waits for whom: the mbarriers by name, as addresses. Stage n % 2 is in its (n / 2)-th round;
// a full barrier is waited for with the round's parity, an empty one with the opposite, so that the
// first round passes at once.

enum Barrier {
    KFull,
    KEmpty,
    VFull,
    VEmpty,
    QFull,
    QEmpty,
    DsFull,
    DsEmpty,
    DqFull,
    DqEmpty,
    KvDone,
    KvStored
};
// And the named barriers of both consumers: nobody reads K and dS any more, and consumer wg may
// begin (kAlternate + wg).
enum NamedBarrier { kLastRead = 2, kAlternate };

// How many threads arrive in a phase of each.
struct Arrivals {
    int of[KvStored + 1];
};
__host__ __device__ constexpr Arrivals arrivals() {
    Arrivals a{};
    a.of[KFull] = 1;   // the loader
    a.of[KEmpty] = 3;  // the storer and both senders
    a.of[VFull] = 1;
    a.of[VEmpty] = kConsumers;
    a.of[QFull] = 1;
    a.of[QEmpty] = kConsumers;
    a.of[DsFull] = kConsumers;
    a.of[DsEmpty] = kConsumers;
    a.of[DqFull] = kConsumers / 2;  // one consumer
    a.of[DqEmpty] = 1;              // its sender
    a.of[KvDone] = kConsumers;
    a.of[KvStored] = 1;  // the storer
    return a;
}

template <int HS>
struct Control {
    unsigned char* smem;
    uint32_t base;  // the same as an address of shared memory

    __device__ void init() const {
        constexpr Arrivals kArrivals = arrivals();
        for (int i = 0; i < 24; i++)
            mbarrier_init(at(Barrier(i / 2), i), kArrivals.of[i / 2]);
        fence_mbarrier_init();
    }
    __device__ uint32_t at(Barrier barrier, int n = 0) const {  // n: stage or consumer
        return base + Tiles<HS>::Control + 8 * (2 * barrier + (n & 1));
    }

    // Two stages, in the keeping of KFull and KEmpty.
    __device__ volatile WorkTile& item_at(int item) const {
        return reinterpret_cast<volatile WorkTile*>(smem + Tiles<HS>::Items)[item & 1];
    }
    // Waits for the item's K and says which it is.
    __device__ WorkTile wait_item(int item) const {
        mbarrier_wait(at(KFull, item), item >> 1 & 1);
        const volatile WorkTile& there = item_at(item);
        return {.k_tile = there.k_tile, .bh = there.bh};
    }
};

template <int HS, class Y>
__device__ __forceinline__ void loader(const Args<HS, Y>& args, const Control<HS>& control) {
    using T = Tiles<HS>;
    for (int item = 0, n = 0;; item++) {
        // Late, so that the longest do not pile up on one block.
        const WorkTile next = args.scheduler.work_tile(atomicAdd(args.ticket, 1));
        mbarrier_wait(control.at(KEmpty, item), item >> 1 & 1 ^ 1);
        volatile WorkTile& at = control.item_at(item);
        at.k_tile = next.k_tile, at.bh = next.bh;
        if (next.k_tile < 0) {
            mbarrier_arrive(control.at(KFull, item));
            return;
        }
        const QueryWalk w = args.scheduler.query_walk(next);
        const int b = next.bh / args.scheduler.NH;
        const int h = next.bh % args.scheduler.NH;
        auto load = [&](int to, const CUtensorMap& map, uint32_t barrier, int rows, int t) {
            for (int d = 0; d < HS; d += 64)
                tma_load_4d(control.base + to + d * rows * 2, &map, barrier, d, h, t, b);
        };
        auto load_q = [&](int i) {
            const uint32_t q_full = control.at(QFull, n);
            const uint32_t stage = n & 1;
            mbarrier_wait(control.at(QEmpty, n), n >> 1 & 1 ^ 1);
            mbarrier_arrive_expect(q_full, 2 * T::QBytes + T::LseDBytes);
            load(T::Q + stage * T::QBytes, args.q, q_full, T::Br, i * T::Br);
            load(T::Do + stage * T::QBytes, args.dout, q_full, T::Br, i * T::Br);
            bulk_load(control.base + T::LseD + stage * T::LseDBytes,
                      args.lse_D +
                          (static_cast<size_t>(next.bh) * args.scheduler.q_tiles + i) * 2 * T::Br,
                      T::LseDBytes, q_full);
            n++;
        };
        mbarrier_arrive_expect(control.at(KFull, item), T::KvBytes);
        load(T::K + (item & 1) * T::KvBytes, args.k, control.at(KFull, item), T::Bc,
             next.k_tile * T::Bc);
        load_q(w.i);
        mbarrier_wait(control.at(VEmpty), item & 1 ^ 1);
        mbarrier_arrive_expect(control.at(VFull), T::KvBytes);
        load(T::V, args.v, control.at(VFull), T::Bc, next.k_tile * T::Bc);
        for (int t = 1; t < w.left; t++)
            load_q(w.i + t * w.step);
    }
}

// Sends what consumer wg has of each dQ: 64 × 64.
template <int HS, class Y>
__device__ __forceinline__ void sender(const Args<HS, Y>& args, const Control<HS>& control,
                                       int wg) {
    using T = Tiles<HS>;
    const uint32_t dq_smem = control.base + T::Dq + wg * T::DqBytes / 2;
    for (int item = 0, n = 0;; item++) {
        const WorkTile next = control.wait_item(item);
        if (next.k_tile < 0)
            return;
        mbarrier_arrive(control.at(KEmpty, item));
        QueryWalk w = args.scheduler.query_walk(next);
        // Other blocks wait while this thread computes or waits. So it computes before the loop
        // what it can, and asks for the next turn while dQ is on its way.
        const int sums = args.scheduler.sum_index(next.bh, wg);
        const int semaphores = args.scheduler.semaphore_index(next.bh, wg);
        for (int i = w.i, seen = 0; w.left > 0; w.left--, i += w.step, n++) {
            const int last = args.scheduler.last_k_tile(i);
            const int turn = w.step > 0 ? last - next.k_tile : next.k_tile;
            // A sum begins where another head's was: that has been read when its last key tile has
            // had its turn.
            const bool inherits =
                turn == 0 && next.bh + args.scheduler.sum_heads < args.scheduler.heads;
            const int wanted = inherits ? last + 1 : turn;
            const int* at = args.dq_semaphore(
                semaphores, i + (inherits ? args.scheduler.sum_heads * args.scheduler.q_tiles : 0));
            while (seen < wanted)
                seen = load_acquire_gpu(at);
            mbarrier_wait(control.at(DqFull, wg), n & 1);
            if (turn == last) {  // dQ itself
                const int b = next.bh / args.scheduler.NH;
                const int h = next.bh % args.scheduler.NH;
                const int d0 = HS == 128 ? 64 * wg : 0;
                const int t = i * T::Br + (HS == 64 ? 64 * wg : 0);
                for (int d = 0; d < 64; d += 128 / sizeof(Y))
                    tma_store_4d(&args.dq, dq_smem + d * 64 * sizeof(Y), d0 + d, h, t, b);
            } else if (turn == 0) {
                bulk_store(args.sum(sums, i), dq_smem, T::DqBytes / 2);
            } else {
                bulk_add(args.sum(sums, i), dq_smem, T::DqBytes / 2);
            }
            bulk_commit();
            bulk_wait_read<0>();
            mbarrier_arrive(control.at(DqEmpty, wg));
            seen = w.left > 1 ? load_relaxed_gpu(args.dq_semaphore(semaphores, i + w.step)) : 0;
            bulk_wait<0>();
            fence_gpu();  // acquires what was seen, too
            store_relaxed_gpu(args.dq_semaphore(semaphores, i), turn + 1);
        }
    }
}

template <int HS, class Y>
__device__ __forceinline__ void storer(const Args<HS, Y>& args, const Control<HS>& control) {
    using T = Tiles<HS>;
    for (int item = 0;; item++) {
        const WorkTile next = control.wait_item(item);
        if (next.k_tile < 0)
            return;
        const int b = next.bh / args.scheduler.NH;
        const int h = next.bh % args.scheduler.NH;
        const int t = next.k_tile * T::Bc;
        mbarrier_wait(control.at(KvDone), item & 1);
        if constexpr (Args<HS, Y>::kFits) {
            const int dk =
                std::is_same_v<Y, float> ? T::Ds + T::DsBytes : T::K + (item & 1) * T::KvBytes;
            for (int d = 0; d < HS; d += 128 / sizeof(Y)) {
                tma_store_4d(&args.dk, control.base + dk + d * T::Bc * sizeof(Y), d, h, t, b);
                tma_store_4d(&args.dv, control.base + T::Ds + d * T::Bc * sizeof(Y), d, h, t, b);
            }
        }
        bulk_commit();
        bulk_wait_read<0>();
        mbarrier_arrive(control.at(KEmpty, item));
        mbarrier_arrive(control.at(KvStored));
    }
}

// -------------------------------------------------------------------------------------------------
// The main kernel

// The address that a lane gives stmatrix for the 16×16 block at (row, 0) of a tile. Row r has its
// 16-byte piece c at c ^ (r % 8), so an xor with 32·k goes to column 16·k of the panel.
__device__ __forceinline__ uint32_t block16(uint32_t tile, int row, int lane) {
    return tile + (row + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
}

// Puts factor·c into shared memory as Y: 16 rows from `row` of a tile whose panels have `rows`.
template <class Y, int HS, int N>
__device__ __forceinline__ void store_tile_swizzled(const float (&c)[N][4], float factor,
                                                    const Control<HS>& control, int tile, int row,
                                                    int rows) {
    const uint32_t block = block16(control.base + tile, row, lane_id());
    unsigned char* const mine =
        control.smem + tile + (row + lane_id() / 4) * 128 + lane_id() % 2 * 8;
    for (int n = 0; n < N; n += 2) {
        if constexpr (std::is_same_v<Y, bf16>) {
            uint32_t a[4];
            for (int i = 0; i < 4; i++)
                a[i] = pack_bf16(factor * c[n + i / 2][i % 2 * 2],
                                 factor * c[n + i / 2][i % 2 * 2 + 1]);
            stmatrix_x4((block ^ n % 8 << 4) + n / 8 * rows * 128, a);
        } else {
            for (int i = 0; i < 4; i++) {  // a piece of 16 bytes is two lanes'
                const int piece = 2 * ((n + i / 2) % 4) + lane_id() % 4 / 2 ^ lane_id() / 4;
                const int r = i % 2;
                *reinterpret_cast<float2*>(mine + (n / 4 * rows + 8 * r) * 128 + piece * 16) =
                    make_float2(factor * c[n + i / 2][2 * r], factor * c[n + i / 2][2 * r + 1]);
            }
        }
    }
}

// Starts d = A Bᵀ over the head size, for Sᵀ and dPᵀ. a and b describe rows of keys and of queries.
template <int HS>
__device__ __forceinline__ void multiply(float (&d)[Tiles<HS>::Br / 8][4], uint64_t a, uint64_t b) {
    wgmma_fence();
    wgmma_ss_set(d, a, b);
    for (int kk = 1; kk < HS / 16; kk++)
        wgmma_ss(d, wgmma_advance(a, kk / 4 * Tiles<HS>::Bc * 128 + kk % 4 * 32),
                 wgmma_advance(b, kk / 4 * Tiles<HS>::Br * 128 + kk % 4 * 32), true);
}
// Starts d += A B over the queries, for dV and dK. B is a tile of dO or Q in shared memory.
template <int HS>
__device__ __forceinline__ void add_product(float (&d)[HS / 8][4],
                                            const uint32_t (&a)[Tiles<HS>::Br / 16][4],
                                            uint32_t b) {
    const uint64_t transposed = wgmma_descriptor(b, Tiles<HS>::Br * 128);
    wgmma_fence_operand(d);
    wgmma_fence();
    for (int kk = 0; kk < Tiles<HS>::Br / 16; kk++)
        wgmma_rs<true>(d, a[kk], wgmma_advance(transposed, kk * 16 * 128), true);
    wgmma_commit();
}

// Sets what the tile's queries may not see, in the rows of this warp, to −∞.
template <int HS, class Y>
__device__ __forceinline__ void mask(float (&s)[Tiles<HS>::Br / 8][4], const Args<HS, Y>& args,
                                     const WorkTile& tile, const QueryWalk& w, int row) {
    constexpr int Br = Tiles<HS>::Br;
    constexpr int Bc = Tiles<HS>::Bc;
    const int k0 = tile.k_tile * Bc;
    const int q0 = w.i * Br;
    const int shift = args.scheduler.shift;
    if (q0 + shift >= k0 + Bc - 1 && k0 + Bc <= args.scheduler.Tk)
        return;
    const int lane = lane_id();  // a register less in the loop
    for (int r = 0; r < 2; r++) {
        const int key = k0 + row + 8 * r + lane / 4;
        // so many do not see the key
        const int hidden = (key < args.scheduler.Tk ? key - shift - q0 : Br) - lane % 4 * 2;
        for (int c = 0; c < Br / 8; c++)
            for (int e = 0; e < 2; e++)
                if (8 * c + e < hidden)
                    s[c][2 * r + e] = -INFINITY;
    }
}

// Writes factor·c, 16 rows, to the tokens from t0 on, but none at or past `end`.
template <int N>
__device__ __forceinline__ void store_rows(const float (&c)[N][4], float factor, float* head,
                                           size_t token, int t0, int end) {
    const int lane = lane_id();
    for (int r = 0; r < 2; r++) {
        const int t = t0 + 8 * r + lane / 4;
        float2* to = reinterpret_cast<float2*>(head + t * token) + lane % 4;
        for (int n = 0; n < N && t < end; n++)
            to[4 * n] = make_float2(factor * c[n][2 * r], factor * c[n][2 * r + 1]);
    }
}

// Puts dQ of query tile i, the block's n-th, where its sender looks. The last key tile to add
// fetches the others' sum.
template <int HS, class Y>
__device__ __forceinline__ void store_dq(float (&dq)[8][4], const Args<HS, Y>& args,
                                         const Control<HS>& control, const WorkTile& tile,
                                         const QueryWalk& w, int n, int i, int warp) {
    using T = Tiles<HS>;
    const int wg = warp / 4 - 1;
    const int last = args.scheduler.last_k_tile(i);
    const bool ends = tile.k_tile == (w.step > 0 ? 0 : last);
    if (ends && last > 0) {
        while (load_acquire_gpu(args.dq_semaphore(args.scheduler.semaphore_index(tile.bh, wg), i)) <
               last) {
        }
        const float* const others = args.sum(args.scheduler.sum_index(tile.bh, wg), i);
        const float4* const sum = reinterpret_cast<const float4*>(others) + threadIdx.x % 128;
        for (int c = 0; c < 8; c++) {
            const float4 x = __ldcg(sum + c * 128);
            dq[c][0] += x.x;
            dq[c][1] += x.y;
            dq[c][2] += x.z;
            dq[c][3] += x.w;
        }
    }
    mbarrier_wait(control.at(DqEmpty, wg), n & 1 ^ 1);
    if (!ends) {
        float4* to =
            reinterpret_cast<float4*>(control.smem + T::Dq) + wg * 1024 + threadIdx.x % 128;
        for (int c = 0; c < 8; c++)
            to[c * 128] = make_float4(dq[c][0], dq[c][1], dq[c][2], dq[c][3]);
    } else {
        store_tile_swizzled<Y>(dq, args.scale, control, T::Dq + wg * T::DqBytes / 2,
                               16 * (warp % 4), 64);
    }
}

template <int HS, class Y>
__device__ __forceinline__ void consumer(const Args<HS, Y>& args, const Control<HS>& control) {
    using T = Tiles<HS>;
    constexpr int Br = T::Br;
    constexpr int Bc = T::Bc;
    const uint32_t base = control.base;
    const int lane = threadIdx.x % 32;
    // so they are known to be uniform
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int wg = warp / 4 - 1;
    // the warp's first key in the tile
    const int row = 64 * wg + 16 * (warp % 4);

    float s[Br / 8][4];  // Sᵀ, then Pᵀ
    WorkTile next;       // the item of s
    auto wait_item = [&](int item) {
        next = control.wait_item(item);
        next = {.k_tile = __shfl_sync(~0u, next.k_tile, 0),  // uniform
                .bh = __shfl_sync(~0u, next.bh, 0)};
    };
    // Starts Sᵀ of query tile n. After the last item it multiplies what lies there, and nobody
    // reads the result. Under a condition the compiler would clear s where it does not hold, or
    // serialize all products (C7512).
    auto start_s = [&](int item, int n) {
        if (next.k_tile >= 0)
            mbarrier_wait(control.at(QFull, n), n >> 1 & 1);
        multiply<HS>(s, wgmma_descriptor(base + T::K + (item & 1) * T::KvBytes + 64 * wg * 128),
                     wgmma_descriptor(base + T::Q + (n & 1) * T::QBytes));
        wgmma_commit();
    };

    wait_item(0);
    start_s(0, 0);
    wgmma_wait<0>(s);
    if (wg == 1)
        named_barrier_arrive(kAlternate, kConsumers);      // consumer 0 begins
    for (int item = 0, n = 0; next.k_tile >= 0; item++) {  // n: query tiles so far
        const WorkTile tile = next;
        QueryWalk w = args.scheduler.query_walk(next);
        const uint32_t k_smem = base + T::K + (item & 1) * T::KvBytes;
        const uint64_t v_rows = wgmma_descriptor(base + T::V + 64 * wg * 128);
        // dQ is shared out by queries at HS 64, by columns at HS 128: 64 × 64 a warpgroup.
        const uint64_t k_transposed = wgmma_descriptor(k_smem + (HS == 128 ? wg : 0) * Bc * 128);
        float dk[HS / 8][4] = {};
        float dv[HS / 8][4] = {};
        float dq[8][4];
        auto start_dq = [&](int n) {
            mbarrier_wait(control.at(DsFull, n), n >> 1 & 1);
            const uint64_t ds_transposed = wgmma_descriptor(base + T::Ds + (n & 1) * T::DsBytes +
                                                            (HS == 64 ? wg * Bc * 128 : 0));
            wgmma_fence();
            for (int kk = 0; kk < Bc / 16; kk++)
                wgmma_ss<true, true>(dq, wgmma_advance(ds_transposed, kk * 16 * 128),
                                     wgmma_advance(k_transposed, kk * 16 * 128), kk > 0);
        };
        // later than store_dq, because the fence waits until the stores are done
        auto signal_dq = [&] {
            fence_proxy_async();
            mbarrier_arrive(control.at(DqFull, wg));
        };

        mbarrier_wait(control.at(VFull), item & 1);
        const int first = n;
#pragma unroll 1
        do {
            const uint32_t q_smem = base + T::Q + (n & 1) * T::QBytes;
            const uint32_t do_smem = base + T::Do + (n & 1) * T::QBytes;
            // Of this lane's columns 8c and 8c + 1: [4c].
            const unsigned char* const lse_D = control.smem + T::LseD + (n & 1) * T::LseDBytes;
            const float2* const lse_log2 = reinterpret_cast<const float2*>(lse_D) + lane % 4;
            const float2* const D_of_columns = lse_log2 + Br / 2;

            float dp[Br / 8][4];
            multiply<HS>(dp, v_rows, wgmma_descriptor(do_smem));
            wgmma_commit();
            if (n - 1 > first)
                signal_dq();  // of tile n − 2

            // Consumers alternate, so that one's exponentials run beside the other's products. At
            // HS 64 the other begins once dV's products have started, at HS 128, with half as many
            // exponentials, once dK's have.
            named_barrier_sync(kAlternate + wg, kConsumers);
            mask<HS>(s, args, tile, w, row);
            uint32_t p[Br / 16][4];  // Pᵀ as A operand
            for (int c = 0; c < Br / 8; c++) {
                const float2 L = lse_log2[4 * c];
                for (int e = 0; e < 4; e++)
                    s[c][e] = exp2_approx(s[c][e] * args.scale_log2 - (e % 2 ? L.y : L.x));
                p[c / 2][c % 2 * 2] = pack_bf16(s[c][0], s[c][1]);
                p[c / 2][c % 2 * 2 + 1] = pack_bf16(s[c][2], s[c][3]);
            }
            add_product<HS>(dv, p, do_smem);
            if (HS == 64)
                named_barrier_arrive(kAlternate + 1 - wg, kConsumers);

            mbarrier_wait(control.at(DsEmpty, n), n >> 1 & 1 ^ 1);
            // the previous item's dV has left
            if (n == first)
                mbarrier_wait(control.at(KvStored), item & 1 ^ 1);
            wgmma_wait<1>(dp);
            if (w.left == 1)
                mbarrier_arrive(control.at(VEmpty));
            uint32_t ds[Br / 16][4];  // dSᵀ as A operand, while dV runs
            for (int c = 0; c < Br / 8; c++) {
                const float2 D = D_of_columns[4 * c];
                float x[4];
                for (int e = 0; e < 4; e++)
                    x[e] = s[c][e] * (dp[c][e] - (e % 2 ? D.y : D.x));
                ds[c / 2][c % 2 * 2] = pack_bf16(x[0], x[1]);
                ds[c / 2][c % 2 * 2 + 1] = pack_bf16(x[2], x[3]);
            }
            for (int kk = 0; kk < Br / 16; kk++)
                stmatrix_x4((block16(base + T::Ds, row, lane) ^ kk % 4 << 5) +
                                (n & 1) * T::DsBytes + kk / 4 * Bc * 128,
                            ds[kk]);
            wgmma_wait<0>(dv);
            // else its old values hold registers all tile long
            for (auto& x : dq)
                x[0] = x[1] = x[2] = x[3] = 0.f;
            wgmma_fence_operand(dq);
            // [quote]
            add_product<HS>(dk, ds, q_smem);
            fence_proxy_async();  // of dS, whose stores are done by now
            mbarrier_arrive(control.at(DsFull, n));
            if (HS == 128)
                named_barrier_arrive(kAlternate + 1 - wg, kConsumers);
            // the other warpgroup's dS of this tile may still be on its way
            if (n > first)
                start_dq(n - 1);
            wgmma_fence();
            wgmma_commit();
            if (w.left == 1)
                wait_item(item + 1);
            start_s(w.left == 1 ? item + 1 : item, n + 1);

            wgmma_wait<1>(dk, dq);  // the next Sᵀ runs on
            // [end]
            mbarrier_arrive(control.at(QEmpty, n));
            if (n > first) {
                mbarrier_arrive(control.at(DsEmpty, n - 1));
                store_dq<HS>(dq, args, control, tile, w, n - 1, w.i - w.step, warp);
            }
            // in flight at the loop's end, the compiler would serialize all products (C7514)
            wgmma_wait<0>(s);
            n++;
            w.i += w.step;
        } while (--w.left > 0);
        w.i -= w.step;
        start_dq(n - 1);
        wgmma_commit();
        if (n - 1 > first)
            signal_dq();
        wgmma_wait<0>(dk, dv, dq);
        mbarrier_arrive(control.at(DsEmpty, n - 1));

        if constexpr (Args<HS, Y>::kFits) {
            named_barrier_sync(kLastRead, kConsumers);
            constexpr bool kWide = std::is_same_v<Y, float>;
            store_tile_swizzled<Y>(dk, args.scale, control,
                                   kWide ? T::Ds + T::DsBytes : T::K + (item & 1) * T::KvBytes, row,
                                   Bc);
            store_tile_swizzled<Y>(dv, 1.f, control, T::Ds, row, Bc);
            fence_proxy_async();
        } else {
            const int b = tile.bh / args.scheduler.NH;
            const int h = tile.bh % args.scheduler.NH;
            const int k0 = tile.k_tile * Bc + row;
            const int Tk = args.scheduler.Tk;
            store_rows(dk, args.scale, args.dk_rows.row(b, 0, h, HS), args.dk_rows.token_stride, k0,
                       Tk);
            store_rows(dv, 1.f, args.dv_rows.row(b, 0, h, HS), args.dv_rows.token_stride, k0, Tk);
        }
        mbarrier_arrive(control.at(KvDone));
        store_dq<HS>(dq, args, control, tile, w, n - 1, w.i, warp);
        signal_dq();
    }
}

template <int HS, class Y>
__global__ __launch_bounds__(kThreads,
                             1) void backward_kernel(const __grid_constant__ Args<HS, Y> args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char smem[];
    const Control<HS> control{smem, smem_address(smem)};
    if (threadIdx.x == 0)
        control.init();
    __syncthreads();
    if (threadIdx.x >= 128) {
        setmaxnreg_inc<240>();
        consumer<HS>(args, control);
    } else {
        setmaxnreg_dec<24>();
        // lse and D, turns, the ticket and zeros are prepare_kernel's. The consumers are behind
        // this by KFull.
        grid_wait_dependency();
        // a warp each, because lanes wait for one another
        if (threadIdx.x == 0)
            loader<HS>(args, control);
        if (threadIdx.x == 32)
            sender<HS>(args, control, 0);
        if (threadIdx.x == 64)
            sender<HS>(args, control, 1);
        if (threadIdx.x == 96)
            storer<HS>(args, control);
    }
#endif
}

// -------------------------------------------------------------------------------------------------
// Launchers

constexpr char kName[] = "flash_bf16_sm90";

// Where each part of scratch begins.
template <int HS>
struct Scratch {
    size_t dq_sum, semaphores, ticket, bytes;
    explicit Scratch(const AttentionShape& s) {
        const typename Args<HS, bf16>::TileScheduler scheduler(s);
        const size_t tiles = static_cast<size_t>(scheduler.heads) * scheduler.q_tiles;
        dq_sum = tiles * Tiles<HS>::LseDBytes;
        semaphores = dq_sum + scheduler.sums * Tiles<HS>::DqBytes;
        ticket = semaphores +
                 scheduler.semaphore_index(scheduler.heads, 0) * kSemaphoreInts * sizeof(int);
        bytes = ticket + sizeof(int);
    }
};

template <int HS, class Y>
void launch(const Cuda& dev, const AttentionBackward<bf16, Y>& c) {
    constexpr int Br = Tiles<HS>::Br;
    constexpr int Bc = Tiles<HS>::Bc;
    const AttentionShape& s = c.s;
    const typename Args<HS, Y>::TileScheduler scheduler(s);
    const Scratch<HS> scratch(s);
    const size_t heads = scheduler.heads;
    const size_t tiles = heads * std::max(scheduler.q_tiles, scheduler.k_tiles);
    if (tiles > INT_MAX / 4)
        throw Error(
            format("%s: %zu tiles, more than %d: use a smaller batch", kName, tiles, INT_MAX / 4));
    char* at = static_cast<char*>(c.scratch);
    Args<HS, Y> args{.q = tensor_map("q", c.q, s.queries(), Br),
                     .k = tensor_map("k", c.k, s.keys(), Bc),
                     .v = tensor_map("v", c.v, s.keys(), Bc),
                     .dout = tensor_map("dout", c.dout, s.queries(), Br),
                     .dq = tensor_map("dq", c.dq, s.queries(), 64),
                     .dk = tensor_map("dk", c.dk, s.keys(), Bc),
                     .dv = tensor_map("dv", c.dv, s.keys(), Bc),
                     .dk_rows = c.dk,
                     .dv_rows = c.dv,
                     .scheduler = scheduler,
                     .scale = s.resolved_scale(),
                     .scale_log2 = s.scale_log2(),
                     .lse_D = reinterpret_cast<float*>(at),
                     .dq_sum = reinterpret_cast<float*>(at + scratch.dq_sum),
                     .dq_semaphores = reinterpret_cast<int*>(at + scratch.semaphores),
                     .ticket = reinterpret_cast<int*>(at + scratch.ticket)};
    prepare_kernel<HS, Y>
        <<<static_cast<unsigned>(heads * scheduler.q_tiles), 1024, 0, dev.stream>>>(c.dout, c.out,
                                                                                    c.lse, args);
    LAUNCH_CHECK("flash_bf16_sm90 prepare_kernel");
    const auto kernel = backward_kernel<HS, Y>;
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiles<HS>::Smem));
    cudaLaunchAttribute overlap{};  // starts beside prepare_kernel's last blocks
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim =
        static_cast<unsigned>(std::min<size_t>(heads * scheduler.k_tiles, dev.num_sms));
    config.blockDim = kThreads;
    config.dynamicSmemBytes = Tiles<HS>::Smem;
    config.stream = dev.stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

}  // namespace

template <class Y>
void sm90_backward(const Cuda& dev, const AttentionBackward<bf16, Y>& c) {
    with_head_size(c.s.HS, [&](auto HS) { launch<HS>(dev, c); });
}
template void sm90_backward(const Cuda&, const AttentionBackward<bf16, bf16>&);
template void sm90_backward(const Cuda&, const AttentionBackward<bf16, float>&);

size_t sm90_bytes(const AttentionShape& s) {
    return s.HS == 64 ? Scratch<64>(s).bytes : Scratch<128>(s).bytes;
}
