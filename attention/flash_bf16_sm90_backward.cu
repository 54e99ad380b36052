// Flash attention backward, bf16, Hopper: wgmma + TMA + mbarrier, warp-specialised (sm_90a).
//
//   D = rowsum(dO∘O);  P = exp(S − lse);  dP = dO Vᵀ;  dS = P∘(dP − D)
//   dV = Pᵀ dO;  dK = scale·dSᵀ Q;  dQ = scale·dS K
//
// New against flash_bf16: five products, not seven. An item of work is a key tile of one head. Its K and V stay, the
// query tiles that see it pass by, from the last back; dK and dV stay in registers, and the dQ of each query tile is
// added to a sum in global memory. A warpgroup takes 64 of the 128 keys:
//
//   product              A (64 × k)                      B (k × N)                     result
//   Sᵀ  = K Qᵀ           K, shared memory                Q, shared memory              registers
//   dPᵀ = V dOᵀ          V, shared memory                dO, shared memory             registers
//   dV += Pᵀ dO          Pᵀ, registers: Sᵀ's layout      dO, transposed (k: its rows)  registers, to the end
//   dK += dSᵀ Q          dSᵀ, registers: dPᵀ's layout    Q, transposed                 registers, to the end
//   dQ  = dS K           dS, shared memory, transposed   K, transposed                 registers, then the sum
//
// Keys are rows of S and dP, so that P and dS are A operands where they arise. Only for dQ, which sums over all keys of
// the tile, do the two warpgroups exchange dS, through shared memory. The next tile's S runs while dQ leaves, dP runs
// beside the exponentials, and dV while dS is computed.
//
// dQ in a fixed order. Key tile 0 writes a query tile's sum; 1, 2, … add to it; the last that its queries see fetches
// it, adds it to its own in registers, rounds and writes dQ. `turn` tells, for each query tile, whose turn it is. Items
// are handed out by ticket, a head's key tiles in ascending order: an item waits only for items with lower tickets,
// which blocks that run have taken, so no order in which blocks start can deadlock. All walk their queries from the
// last back, and passing on a turn takes most of a tile's time: items of a head that start together queue. So heads go
// in chunks, and while a chunk has key tile j, the chunk before it has j + 1, and so on (Order). Only who takes which
// ticket varies from run to run. The sum lies in the order of the registers, 16 bytes a thread, and only for the heads
// in work: a new head takes the place of one that is done (block form: each head has its own).
//
// There is one block an SM, and it takes items until there are none. Of its first warpgroup work four threads:
//   loader     takes tickets and starts all loads: the next item's K and V, the next tile's Q, dO and {lse, D}
//   usher      polls `turn` ahead of the moment when dQ is ready
//   announcer  when dQ has left its registers, passes `turn` on; writes dQ itself when it is whole
//   storer     writes dK and dV out of K's and V's place in shared memory
// The other two are the consumers. Who waits for whom (mbarriers; [2]: one for each stage):
//   kv_full[2]   consumers, usher, announcer, storer   ← loader: K, V and the item's number are there
//   kv_empty[2]  loader      ← storer: dK and dV have left; usher, announcer: the number has been read
//   q_full[2]    consumers   ← loader: Q, dO and statistics are there
//   q_empty[2]   loader      ← consumers: dK is done; announcer: dQ has left dO's place
//   turn[2]      consumers   ← usher: dQ may be added
//   added[2]     announcer; usher, 2 tiles later   ← consumers: dQ has left the registers
//   kv_done[2]   storer      ← consumers: dK and dV are in K's and V's place
// and two named barriers of the consumers: dS is complete (1), nobody reads K and V any more (2).
//
// prepare_kernel computes {log2(e)·lse, D} and clears turns, ticket, and dK and dV of items in two parts (see Work); the
// main kernel starts beside its last blocks. The block form is the same kernel with other ends: dK and dV go to the
// caller's fp32, and dQ to the caller's sum, which is in the order of the registers too, from block to block, until
// write_dq_kernel rounds it. The query tiles are those of the sum: the first of a block may begin with queries that are not
// the block's, rows of zeros.
//
// Writes: dqkv (every element).  Block form: adds into dq_sum, and adds into or writes dk, dv; write_dq dq (every element).
// Scratch: {log2(e)·lse, D}, turns, ticket, and in the whole form the sum of dQ, fp32. All of it is written before it is
// read.
// Limits: HS in {64, 128}; any T ≥ 1; scale > 0.   Run: ./dev/bench_attention --kernel flash_bf16_sm90
#include <algorithm>
#include <climits>
#include <cmath>

#include "attention/flash_bf16_sm90.h"
#include "attention/launch.h"
#include "layers/gpu/ptx_sm90.cuh"
#include "layers/gpu/tensor_map.h"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // kernels have empty bodies there, and what only they use is "never referenced"
#endif

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Tiles, and where they lie in shared memory: panels of 64 columns, rows of 128 bytes in TMA's 128-byte swizzle.

constexpr int kConsumers = 256, kThreads = 128 + kConsumers;

template <int HS>
struct Tiles {
    static constexpr int Br = HS == 64 ? 128 : 64;  // queries; at HS 128 dK and dV take twice the registers
    static constexpr int Bc = 128;                  // keys, 64 a warpgroup
    static constexpr int KvBytes = Bc * HS * 2, QBytes = Br * HS * 2, DsBytes = Bc * Br * 2, StatsBytes = Br * 8;
    // K, V, Q, dO, dS and statistics have two stages.
    static constexpr int K = 0, V = K + 2 * KvBytes, Q = V + 2 * KvBytes, Do = Q + 2 * QBytes, Ds = Do + 2 * QBytes;
    static constexpr int Stats = Ds + 2 * DsBytes, Control = Stats + 2 * StatsBytes;
    static constexpr int Smem = Control + 128;  // mbarriers, tickets
    static_assert(Smem <= 227 * 1024);
};

struct Args {
    CUtensorMap q, k, v, dout, dq, dk, dv;  // dq, dk, dv: whole form, written
    float *dk_acc, *dv_acc;                 // block form: added into, or written; null otherwise
    int NH, heads, Tq, Tk;                  // heads = B·NH; Tq with the `before` that are not the block's
    int before, q_rows, k_rows;             // rows of lse and D, and of dk_acc and dv_acc: see BlockShape
    bool write_dkv;
    int shift;  // query i sees keys j ≤ i + shift: q_offset − k_offset − before, or Tk − before if not causal
    int q_tiles, k_tiles;
    int group, chunk, ring;   // of heads: see Order; ring: those that have a place in dq_sum, in the block form all
    int halved, cut;          // how many items are cut in two, and at which query tile: see Work
    float scale, scale_log2;  // scale_log2 = scale·log2(e): the exponentials are powers of 2
    float2* stats;            // (heads, q_tiles·Br) {log2(e)·lse, or +inf for a row that sees no key; D}
    float* dq_sum;            // (ring, sum_tiles, 2 warpgroups, 8 tiles of 8 columns, 128 threads, 4): unscaled dQ
    int sum_tiles;            // query tiles of a head in dq_sum, which points to the first of the block's
    int* turn;                // (heads, q_tiles): how many key tiles have added to dQ, so the one whose turn it is
    int* ticket;              // the next item
};

// ---------------------------------------------------------------------------------------------------------------------
// Work: one key tile of one head, with all query tiles that see it, from the last back. A number says which: it is
// k_tile·heads + bh, an item.
//
// Without a mask all items take the same time, and in the last round some SMs would stand still. So the items of that round
// (`halved` of them) are cut in two at query tile `cut`: their earlier queries are handed out after all items, several to an
// SM. Either half adds to dk and dv, which are 0 before: the sum of two has no order, as one of three would have; so only
// blocks that write dk and dv do this. And all are cut at the same tile and have the last tickets: so earlier queries wait
// for whole items and for earlier queries, later ones for whole items and later ones, all of them of lower tickets. The
// number of the half with the later queries is items + the item's, of the other 2·items + the item's.

// The order of items: group after group of heads. Within one, in step n, the heads of chunk c (c·chunk, c·chunk + 1, …)
// have their key tile n − c: so heads are at different points, and key tiles of one do not start together.
struct Order {
    // Of the last ticket asked for: its group's first head, its step, the first ticket of the step.
    int start = 0, step = 0, first = 0;
    bool again = false;  // the ticket is beyond the items: for the earlier queries of one

    // Tickets must be asked for in ascending order.
    __device__ int item_of(const Args& args, int ticket) {
        const int of_group = ticket / (args.group * args.k_tiles) * args.group;
        if (of_group != start) start = of_group, step = 0, first = start * args.k_tiles;
        const int size = min(args.group, args.heads - start);
        for (;; step++) {
            const int begin = max(0, step - args.k_tiles + 1) * args.chunk, end = min(size, (step + 1) * args.chunk);
            const int i = begin + ticket - first;
            if (i < end) return (step - i / args.chunk) * args.heads + start + i;
            first += end - begin;
        }
    }
    // The number of the work that a ticket is for; −1: there is no more.
    __device__ int number_of(const Args& args, int ticket) {
        const int items = args.heads * args.k_tiles;
        if (ticket >= items + args.halved) return -1;
        if (ticket < items) return item_of(args, ticket) + (ticket < items - args.halved ? 0 : items);
        if (!again) *this = Order{}, again = true;
        return item_of(args, ticket - args.halved) + 2 * items;
    }
};

struct Work {
    int k_tile, bh;
    int first, last;  // query tiles; last < first if no query sees these keys
    bool half;
};
template <int HS>
__device__ __forceinline__ Work work_of(const Args& args, int number) {
    constexpr int Br = Tiles<HS>::Br, Bc = Tiles<HS>::Bc;
    const int items = args.heads * args.k_tiles;
    const bool half = number >= items, earlier = number >= 2 * items;
    const int item = number - (half ? items : 0) - (earlier ? items : 0);
    Work w = {item / args.heads, item % args.heads, 0, earlier ? args.cut - 1 : args.q_tiles - 1, half};
    const int first_query = max(0, w.k_tile * Bc - args.shift);
    w.first = half && !earlier ? args.cut : first_query / Br;
    if (first_query >= args.Tq) w.last = w.first - 1;
    return w;
}
// The last key tile that query tile i sees.
template <int HS>
__device__ __forceinline__ int last_k_tile(const Args& args, int i) {
    constexpr int Br = Tiles<HS>::Br, Bc = Tiles<HS>::Bc;
    return min(args.k_tiles - 1, (min((i + 1) * Br, args.Tq) - 1 + args.shift) / Bc);
}

// ---------------------------------------------------------------------------------------------------------------------
// Before the main kernel: {lse, D} of each query; counters, and the dk and dv that two items add to, to zero

struct PrepareArgs {
    Heads<const bf16> dout, out;
    const float *lse, *D;  // D: block form only
    int first_ticket;
};

__device__ __forceinline__ float dot8(const uint4& x, const uint4& y) {
    const __nv_bfloat162 *a = reinterpret_cast<const __nv_bfloat162*>(&x),
                         *b = reinterpret_cast<const __nv_bfloat162*>(&y);
    float sum = 0.f;
    for (int i = 0; i < 4; i++) {
        const float2 u = __bfloat1622float2(a[i]), v = __bfloat1622float2(b[i]);
        sum += u.x * v.x + u.y * v.y;
    }
    return sum;
}

// One block for each query tile of a head. HS/8 lanes share a row.
template <int HS>
__global__ __launch_bounds__(256) void prepare_kernel(const __grid_constant__ PrepareArgs in,
                                                      const __grid_constant__ Args args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    grid_allow_dependents();
    constexpr int Br = Tiles<HS>::Br, Lanes = HS / 8, Rows = 256 / Lanes, Passes = Br / Rows;
    // Blocks that run together read whole tokens: the heads of one come one after the other.
    const int h = blockIdx.x % args.NH, tile = blockIdx.x / args.NH % args.q_tiles,
              b = blockIdx.x / args.NH / args.q_tiles;
    const int bh = b * args.NH + h;
    const int first = tile * Br + threadIdx.x / Lanes, lane = threadIdx.x % Lanes;
    if (threadIdx.x == 0) args.turn[blockIdx.x] = 0;
    if (threadIdx.x == 0 && blockIdx.x == 0) *args.ticket = in.first_ticket;
    for (int n = blockIdx.x; n < args.halved; n += gridDim.x) {
        Order order;
        const int item = order.item_of(args, args.heads * args.k_tiles - args.halved + n);
        const int head = item % args.heads, k0 = item / args.heads * Tiles<HS>::Bc;
        for (int i = threadIdx.x; i < min(Tiles<HS>::Bc, args.Tk - k0) * HS / 4; i += 256) {
            const size_t row = static_cast<size_t>(head / args.NH) * args.k_rows + k0 + i / (HS / 4);
            const size_t at = (row * args.NH + head % args.NH) * HS + i % (HS / 4) * 4;
            for (float* sum : {args.dk_acc, args.dv_acc}) *reinterpret_cast<float4*>(sum + at) = {};
        }
    }
    float D[Passes] = {};
    if (!in.D) {
        const bf16* dout = in.dout.ptr + b * in.dout.batch + h * HS + lane * 8;
        const bf16* out = in.out.ptr + b * in.out.batch + h * HS + lane * 8;
        uint4 x[Passes], y[Passes];
        for (int i = 0; i < Passes; i++) {
            const size_t t = min(first + i * Rows, args.Tq - 1);  // whole form: from 0 on
            x[i] = *reinterpret_cast<const uint4*>(dout + t * in.dout.token);
            y[i] = *reinterpret_cast<const uint4*>(out + t * in.out.token);
        }
        for (int i = 0; i < Passes; i++) {
            D[i] = dot8(x[i], y[i]);
            for (int lanes = 1; lanes < Lanes; lanes *= 2) D[i] += __shfl_xor_sync(~0u, D[i], lanes);
        }
    }
    if (lane == 0) {
        for (int i = 0; i < Passes; i++) {
            const int t = first + i * Rows;
            float2 stats = {INFINITY, 0.f};
            if (t >= args.before && t < args.Tq) {
                const size_t at = static_cast<size_t>(bh) * args.q_rows + t - args.before;
                const float lse = in.lse[at];
                if (lse != -INFINITY) stats.x = lse * static_cast<float>(M_LOG2E);
                stats.y = in.D ? in.D[at] : D[i];
            }
            args.stats[static_cast<size_t>(bh) * args.q_tiles * Br + t] = stats;
        }
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Who waits for whom: the mbarriers by name, as addresses. Stage n % 2 is in its (n / 2)-th round; a full barrier is
// waited for with the round's parity, an empty one with the opposite, so that the first round passes at once.

template <int HS>
struct Control {
    uint32_t base;  // of shared memory
    __device__ uint32_t kv_full(int n) const { return at(0, n); }
    __device__ uint32_t kv_empty(int n) const { return at(2, n); }
    __device__ uint32_t q_full(int n) const { return at(4, n); }
    __device__ uint32_t q_empty(int n) const { return at(6, n); }
    __device__ uint32_t turn(int n) const { return at(8, n); }
    __device__ uint32_t added(int n) const { return at(10, n); }
    __device__ uint32_t kv_done(int n) const { return at(12, n); }
    static constexpr int Numbers = Tiles<HS>::Control + 14 * 8;  // int[2], in the keeping of kv_full and kv_empty

    __device__ uint32_t at(int index, int n) const { return base + Tiles<HS>::Control + 8 * (index + (n & 1)); }

    __device__ void init() const {
        for (int s = 0; s < 2; s++) {
            mbarrier_init(kv_full(s), 1);
            mbarrier_init(kv_empty(s), 3);
            mbarrier_init(q_full(s), 1);
            mbarrier_init(q_empty(s), kConsumers + 1);
            mbarrier_init(turn(s), 1);
            mbarrier_init(added(s), kConsumers);
            mbarrier_init(kv_done(s), kConsumers);
        }
        fence_mbarrier_init();
    }
    // Waits for the item's K and V and gives its number; −1: there are no more.
    __device__ int wait_item(const unsigned char* smem, int item) const {
        mbarrier_wait(kv_full(item), item >> 1 & 1);
        return reinterpret_cast<const volatile int*>(smem + Numbers)[item & 1];
    }
};

// Rows of 64 elements of each panel of a tile.
template <int HS>
__device__ __forceinline__ void load_tile(uint32_t tile, const CUtensorMap* map, uint32_t barrier, int rows, int h,
                                          int t, int b) {
    for (int panel = 0; panel < HS / 64; panel++)
        tma_load_4d(tile + panel * rows * 128, map, barrier, panel * 64, h, t, b);
}
template <int HS>
__device__ __forceinline__ void store_tile(const CUtensorMap* map, uint32_t tile, int rows, int h, int t, int b) {
    for (int panel = 0; panel < HS / 64; panel++) tma_store_4d(map, tile + panel * rows * 128, panel * 64, h, t, b);
}

template <int HS, bool Block>
__device__ __forceinline__ void loader(const Args& args, unsigned char* smem) {
    const Control<HS> control{smem_address(smem)};
    using T = Tiles<HS>;
    tma_prefetch_map(&args.q);
    tma_prefetch_map(&args.k);
    tma_prefetch_map(&args.v);
    tma_prefetch_map(&args.dout);
    // Blocks of the block form may start late, where communication has taken their multiprocessors: then nobody shall wait
    // for a key tile that is theirs.
    int ticket = Block ? atomicAdd(args.ticket, 1) : blockIdx.x;
    Order order;
    for (int item = 0, n = 0;; item++) {
        const uint32_t kv_full = control.kv_full(item);
        mbarrier_wait(control.kv_empty(item), item >> 1 & 1 ^ 1);
        const int number = order.number_of(args, ticket);
        reinterpret_cast<volatile int*>(smem + control.Numbers)[item & 1] = number;
        if (number < 0) {
            mbarrier_arrive(kv_full);
            return;
        }
        const Work w = work_of<HS>(args, number);
        const int b = w.bh / args.NH, h = w.bh % args.NH;
        const uint32_t kv_stage = control.base + (item & 1) * T::KvBytes;
        mbarrier_arrive_expect(kv_full, 2 * T::KvBytes);
        load_tile<HS>(kv_stage + T::K, &args.k, kv_full, T::Bc, h, w.k_tile * T::Bc, b);
        load_tile<HS>(kv_stage + T::V, &args.v, kv_full, T::Bc, h, w.k_tile * T::Bc, b);
        for (int i = w.last; i >= w.first; i--, n++) {
            const uint32_t q_full = control.q_full(n), q_stage = control.base + (n & 1) * T::QBytes;
            mbarrier_wait(control.q_empty(n), n >> 1 & 1 ^ 1);
            mbarrier_arrive_expect(q_full, 2 * T::QBytes + T::StatsBytes);
            const int t = i * T::Br - (Block ? args.before : 0);  // before row 0 are zeros, as behind the last
            load_tile<HS>(q_stage + T::Q, &args.q, q_full, T::Br, h, t, b);
            load_tile<HS>(q_stage + T::Do, &args.dout, q_full, T::Br, h, t, b);
            bulk_load(control.base + T::Stats + (n & 1) * T::StatsBytes,
                      args.stats + (static_cast<size_t>(w.bh) * args.q_tiles + i) * T::Br, T::StatsBytes, q_full);
        }
        ticket = atomicAdd(args.ticket, 1);  // late, so that the longest do not pile up on one block
    }
}

template <int HS>
__device__ __forceinline__ void usher(const Args& args, const unsigned char* smem) {
    const Control<HS> control{smem_address(smem)};
    for (int item = 0, n = 0;; item++) {
        const int number = control.wait_item(smem, item);
        if (number < 0) return;
        mbarrier_arrive(control.kv_empty(item));
        const Work w = work_of<HS>(args, number);
        // Key tile 0 starts a sum where another head's was: that has been read when its last key tile has had its turn.
        const bool inherits = w.k_tile == 0 && w.bh >= args.ring;
        const int* turns = args.turn + static_cast<size_t>(inherits ? w.bh - args.ring : w.bh) * args.q_tiles;
        for (int i = w.last; i >= w.first; i--, n++) {
            mbarrier_wait(control.added(n), n >> 1 & 1 ^ 1);  // tile n − 2 is over: no barrier may run a round ahead
            const int turn = inherits ? last_k_tile<HS>(args, i) + 1 : w.k_tile;
            if (turn > 0)
                while (load_acquire_gpu(turns + i) < turn) {}
            mbarrier_arrive(control.turn(n));
        }
    }
}

template <int HS, bool Block>
__device__ __forceinline__ void announcer(const Args& args, const unsigned char* smem) {
    const Control<HS> control{smem_address(smem)};
    using T = Tiles<HS>;
    for (int item = 0, n = 0;; item++) {
        const int number = control.wait_item(smem, item);
        if (number < 0) return;
        mbarrier_arrive(control.kv_empty(item));
        const Work w = work_of<HS>(args, number);
        int* turns = args.turn + static_cast<size_t>(w.bh) * args.q_tiles;
        for (int i = w.last; i >= w.first; i--, n++) {
            mbarrier_wait(control.added(n), n >> 1 & 1);
            const bool final = w.k_tile == last_k_tile<HS>(args, i);
            if (!Block && final) {  // the consumers have put the rounded dQ into dO's place
                store_tile<HS>(&args.dq, control.base + T::Do + (n & 1) * T::QBytes, T::Br, w.bh % args.NH, i * T::Br,
                               w.bh / args.NH);
                bulk_commit();
                bulk_wait_read<0>();
            }
            mbarrier_arrive(control.q_empty(n));
            store_release_gpu(turns + i, w.k_tile + 1);
        }
    }
}

template <int HS, bool Block>
__device__ __forceinline__ void storer(const Args& args, const unsigned char* smem) {
    const Control<HS> control{smem_address(smem)};
    using T = Tiles<HS>;
    for (int item = 0;; item++) {
        const int number = control.wait_item(smem, item);
        if (number < 0) return;
        const Work w = work_of<HS>(args, number);
        const int b = w.bh / args.NH, h = w.bh % args.NH;
        mbarrier_wait(control.kv_done(item), item >> 1 & 1);
        if (!Block) {
            const uint32_t kv_stage = control.base + (item & 1) * T::KvBytes;
            store_tile<HS>(&args.dk, kv_stage + T::K, T::Bc, h, w.k_tile * T::Bc, b);
            store_tile<HS>(&args.dv, kv_stage + T::V, T::Bc, h, w.k_tile * T::Bc, b);
            bulk_commit();
            bulk_wait_read<0>();
        }
        mbarrier_arrive(control.kv_empty(item));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The main kernel

// The address that this lane gives stmatrix for the 16×16 block at (row, 0) of a tile: 16-byte chunk c of row r lies at
// c ^ (r % 8). An xor with 32·k goes to column 16·k of the panel.
__device__ __forceinline__ uint32_t block16(uint32_t tile, int row) {
    const int lane = threadIdx.x % 32;
    return tile + (row + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
}

// Rounds factor·c, 16 rows from `row` of a tile whose panels have `rows`, into shared memory.
template <int N>
__device__ __forceinline__ void round_tile(const float (&c)[N][4], float factor, uint32_t tile, int row, int rows) {
    const uint32_t block = block16(tile, row);
    for (int n = 0; n < N; n += 2) {
        uint32_t a[4];
        for (int i = 0; i < 4; i++)
            a[i] = pack_bf16(factor * c[n + i / 2][i % 2 * 2], factor * c[n + i / 2][i % 2 * 2 + 1]);
        stmatrix_x4((block ^ n % 8 << 4) + n / 8 * rows * 128, a);
    }
}

// Element (row lane/4, column 2·(lane % 4)) of a warp's 16×8 tiles in dk_acc and dv_acc.
__device__ __forceinline__ size_t fragment_at(const Args& args, int bh, int t, int HS) {
    return ((static_cast<size_t>(bh / args.NH) * args.k_rows + t) * args.NH + bh % args.NH) * HS + threadIdx.x % 4 * 2;
}

template <int HS, bool Block>
__global__ __launch_bounds__(kThreads, 1) void backward_kernel(const __grid_constant__ Args args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using T = Tiles<HS>;
    constexpr int Br = T::Br, Bc = T::Bc;
    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t base = smem_address(smem);
    const Control<HS> control{base};
    const int lane = threadIdx.x % 32;

    if (threadIdx.x == 0) control.init();
    __syncthreads();

    if (threadIdx.x < 128) {
        setmaxnreg_dec<24>();
        // Statistics, turns, the ticket and zeros are prepare_kernel's. The consumers are behind this by kv_full.
        grid_wait_dependency();
        if (threadIdx.x == 0) loader<HS, Block>(args, smem);  // a warp each: lanes of one would wait for one another
        if (threadIdx.x == 32) usher<HS>(args, smem);
        if (threadIdx.x == 64) announcer<HS, Block>(args, smem);
        if (threadIdx.x == 96) storer<HS, Block>(args, smem);
    } else {
        setmaxnreg_inc<240>();
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wg = warp / 4 - 1;  // known to be uniform
        const int row = 64 * wg + 16 * (warp % 4);                                  // the warp's first key in the tile
        const uint32_t ds_block = block16(base + T::Ds, row);
        // dQ is shared out by queries at HS 64, by columns at HS 128: 64 × 64 a warpgroup.
        const int dq_row = HS == 64 ? row : row - 64 * wg, dq_panel = HS == 128 ? wg : 0;

        for (int item = 0, n = 0;; item++) {
            const int number = __shfl_sync(~0u, control.wait_item(smem, item), 0);
            if (number < 0) break;
            const Work w = work_of<HS>(args, number);
            const uint32_t k_smem = base + T::K + (item & 1) * T::KvBytes,
                           v_smem = base + T::V + (item & 1) * T::KvBytes;
            const uint64_t k_rows = wgmma_descriptor(k_smem + 64 * wg * 128);
            const uint64_t v_rows = wgmma_descriptor(v_smem + 64 * wg * 128);
            const uint64_t k_transposed = wgmma_descriptor(k_smem + dq_panel * Bc * 128);
            const int slot = w.bh % args.ring;

            float dk[HS / 8][4] = {}, dv[HS / 8][4] = {};
            float s[Br / 8][4];  // Sᵀ, then Pᵀ
            auto start_s = [&](int n) {
                mbarrier_wait(control.q_full(n), n >> 1 & 1);
                const uint64_t q_rows = wgmma_descriptor(base + T::Q + (n & 1) * T::QBytes);
                wgmma_fence();
                for (int kk = 0; kk < HS / 16; kk++)
                    wgmma_ss(s, wgmma_advance(k_rows, kk / 4 * Bc * 128 + kk % 4 * 32),
                             wgmma_advance(q_rows, kk / 4 * Br * 128 + kk % 4 * 32), kk > 0);
            };

            int i = w.last;
            if (i >= w.first) {
                start_s(n);
                wgmma_commit();
#pragma unroll 1
                do {
                    const uint32_t q_smem = base + T::Q + (n & 1) * T::QBytes,
                                   do_smem = base + T::Do + (n & 1) * T::QBytes;
                    // {lse, D} of this lane's columns 8c and 8c + 1 is stats[4c].
                    const float4* stats =
                        reinterpret_cast<const float4*>(smem + T::Stats + (n & 1) * T::StatsBytes) + lane % 4;

                    float dp[Br / 8][4];
                    const uint64_t do_rows = wgmma_descriptor(do_smem);
                    wgmma_fence();
                    wgmma_ss_set(dp, v_rows, do_rows);
                    for (int kk = 1; kk < HS / 16; kk++)
                        wgmma_ss(dp, wgmma_advance(v_rows, kk / 4 * Bc * 128 + kk % 4 * 32),
                                 wgmma_advance(do_rows, kk / 4 * Br * 128 + kk % 4 * 32), true);
                    wgmma_commit();

                    wgmma_wait<1>();  // Sᵀ; dPᵀ runs on
                    wgmma_hold(s);
                    const int k0 = w.k_tile * Bc, q0 = i * Br;
                    if (q0 + args.shift < k0 + Bc - 1 || k0 + Bc > args.Tk) {
                        const int lane = lane_id();  // a register less in the loop
                        for (int r = 0; r < 2; r++) {
                            const int key = k0 + row + 8 * r + lane / 4;
                            int hidden = key - args.shift - q0;  // queries before it do not see the key
                            if (key >= args.Tk) hidden = Br;
                            hidden -= lane % 4 * 2;
                            for (int c = 0; c < Br / 8; c++)
                                for (int e = 0; e < 2; e++)
                                    if (8 * c + e < hidden) s[c][2 * r + e] = -INFINITY;
                        }
                    }
                    uint32_t p[Br / 16][4];  // Pᵀ as A operand
                    for (int c = 0; c < Br / 8; c++) {
                        const float4 st = stats[4 * c];
                        for (int e = 0; e < 4; e++)
                            s[c][e] = exp2_approx(s[c][e] * args.scale_log2 - (e % 2 ? st.z : st.x));
                        p[c / 2][c % 2 * 2] = pack_bf16(s[c][0], s[c][1]);
                        p[c / 2][c % 2 * 2 + 1] = pack_bf16(s[c][2], s[c][3]);
                    }
                    wgmma_wait<0>();  // dPᵀ
                    wgmma_hold(dp);

                    const uint64_t do_transposed = wgmma_descriptor(do_smem, Br * 128);
                    wgmma_hold(dv);
                    wgmma_fence();
                    for (int kk = 0; kk < Br / 16; kk++)
                        wgmma_rs<true>(dv, p[kk], wgmma_advance(do_transposed, kk * 16 * 128), true);
                    wgmma_commit();

                    uint32_t ds[Br / 16][4];  // dSᵀ as A operand, while dV runs
                    for (int c = 0; c < Br / 8; c++) {
                        const float4 st = stats[4 * c];
                        float x[4];
                        for (int e = 0; e < 4; e++) x[e] = s[c][e] * (dp[c][e] - (e % 2 ? st.w : st.y));
                        ds[c / 2][c % 2 * 2] = pack_bf16(x[0], x[1]);
                        ds[c / 2][c % 2 * 2 + 1] = pack_bf16(x[2], x[3]);
                    }
                    // Into stage n % 2: both warpgroups have passed tile n − 1's barrier, so tile n − 2's dQ is done.
                    for (int kk = 0; kk < Br / 16; kk++)
                        stmatrix_x4((ds_block ^ kk % 4 << 5) + (n & 1) * T::DsBytes + kk / 4 * Bc * 128, ds[kk]);
                    wgmma_wait<0>();  // dV; p's registers are needed
                    wgmma_hold(dv);
                    fence_proxy_async();
                    named_barrier_sync(1, kConsumers);  // all of dS is there, and nobody reads dO any more

                    // s is dead until it is started again. The compiler knows only if it is written: it emits nothing.
                    for (int c = 0; c < Br / 8; c++)
                        for (int e = 0; e < 4; e++) s[c][e] = 0.f;
                    wgmma_hold(s);

                    float dq[8][4];
                    const uint64_t ds_transposed =
                        wgmma_descriptor(base + T::Ds + (n & 1) * T::DsBytes + (HS == 64 ? wg * Bc * 128 : 0));
                    wgmma_fence();
                    wgmma_ss_set<true, true>(dq, ds_transposed, k_transposed);
                    for (int kk = 1; kk < Bc / 16; kk++)
                        wgmma_ss<true, true>(dq, wgmma_advance(ds_transposed, kk * 16 * 128),
                                             wgmma_advance(k_transposed, kk * 16 * 128), true);
                    wgmma_commit();

                    const uint64_t q_transposed = wgmma_descriptor(q_smem, Br * 128);
                    wgmma_hold(dk);
                    wgmma_fence();
                    for (int kk = 0; kk < Br / 16; kk++)
                        wgmma_rs<true>(dk, ds[kk], wgmma_advance(q_transposed, kk * 16 * 128), true);
                    wgmma_commit();

                    if (i > w.first) start_s(n + 1);
                    wgmma_fence();  // where the branches meet, or the compiler adds one and says so (C7519)
                    wgmma_commit();

                    wgmma_wait<2>();  // dQ
                    wgmma_hold(dq);
                    const bool final = !Block && w.k_tile == last_k_tile<HS>(args, i);
                    mbarrier_wait(control.turn(n), n >> 1 & 1);
                    float4* sum = reinterpret_cast<float4*>(args.dq_sum) +
                                  (static_cast<size_t>(slot) * args.sum_tiles + i) * (Br * HS / 4) + wg * 1024 +
                                  threadIdx.x % 128;
                    if (final) {
                        if (w.k_tile > 0)
                            for (int c = 0; c < 8; c++) {
                                const float4 x = __ldcg(sum + c * 128);
                                dq[c][0] += x.x, dq[c][1] += x.y, dq[c][2] += x.z, dq[c][3] += x.w;
                            }
                        round_tile(dq, args.scale, do_smem + dq_panel * Br * 128, dq_row, Br);
                        fence_proxy_async();
                    } else if (!Block && w.k_tile == 0) {
                        for (int c = 0; c < 8; c++)
                            __stcg(sum + c * 128, make_float4(dq[c][0], dq[c][1], dq[c][2], dq[c][3]));
                    } else {
                        for (int c = 0; c < 8; c++)
                            red_add_v4(reinterpret_cast<float*>(sum + c * 128), dq[c][0], dq[c][1], dq[c][2], dq[c][3]);
                    }
                    mbarrier_arrive(control.added(n));

                    wgmma_wait<1>();  // dK; the next Sᵀ runs on
                    wgmma_hold(dk);
                    mbarrier_arrive(control.q_empty(n));
                    n++, i--;
                } while (i >= w.first);
            }
            wgmma_wait<0>();
            wgmma_hold(dk);
            wgmma_hold(dv);

            if (Block && args.write_dkv && !w.half) {
                for (int r = 0; r < 2; r++) {
                    const int key = w.k_tile * Bc + row + 8 * r + lane / 4;
                    if (key >= args.Tk) continue;
                    const size_t at = fragment_at(args, w.bh, key, HS);
                    float2 *to_k = reinterpret_cast<float2*>(args.dk_acc + at),
                           *to_v = reinterpret_cast<float2*>(args.dv_acc + at);
                    for (int c = 0; c < HS / 8; c++) {
                        to_k[4 * c] = make_float2(dk[c][2 * r] * args.scale, dk[c][2 * r + 1] * args.scale);
                        to_v[4 * c] = make_float2(dv[c][2 * r], dv[c][2 * r + 1]);
                    }
                }
            } else if (Block) {  // red: it waits for no answer; and but for another half nobody adds to these elements
                for (int r = 0; r < 2; r++) {
                    const int key = w.k_tile * Bc + row + 8 * r + lane / 4;
                    if (key >= args.Tk) continue;
                    const size_t at = fragment_at(args, w.bh, key, HS);
                    for (int c = 0; c < HS / 8; c++) {
                        red_add_v2(args.dk_acc + at + 8 * c, dk[c][2 * r] * args.scale, dk[c][2 * r + 1] * args.scale);
                        red_add_v2(args.dv_acc + at + 8 * c, dv[c][2 * r], dv[c][2 * r + 1]);
                    }
                }
            } else {
                named_barrier_sync(2, kConsumers);  // nobody reads K and V any more
                round_tile(dk, args.scale, k_smem, row, Bc);
                round_tile(dv, 1.f, v_smem, row, Bc);
                fence_proxy_async();
            }
            mbarrier_arrive(control.kv_done(item));
        }
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// After the last block: scale·(the sum of dQ), rounded, into rows. A block has a warpgroup's part of a query tile; a thread
// what four neighbours had of two rows and 8 columns: 16 bytes of each row.

struct WriteArgs {
    Heads<bf16> dq;
    const float* dq_sum;
    int NH, heads, T, tiles;
    float scale;
};

template <int HS>
__global__ __launch_bounds__(256) void write_dq_kernel(const WriteArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int Br = Tiles<HS>::Br;
    // Blocks of all heads of a row run together: their rows are neighbours.
    const int wg = blockIdx.x % 2, bh = blockIdx.x / 2 % args.heads, i = blockIdx.x / 2 / args.heads;
    const int c = threadIdx.x % 8, quad = threadIdx.x / 8;
    const float4* sum = reinterpret_cast<const float4*>(args.dq_sum) +
                        (static_cast<size_t>(bh) * args.tiles + i) * (Br * HS / 4) + wg * 1024 + c * 128 + quad * 4;
    uint32_t rows[2][4];
    for (int j = 0; j < 4; j++) {
        const float4 x = sum[j];
        rows[0][j] = pack_bf16(args.scale * x.x, args.scale * x.y);
        rows[1][j] = pack_bf16(args.scale * x.z, args.scale * x.w);
    }
    const int first = i * Br + (HS == 64 ? 64 * wg : 0) + quad / 8 * 16 + quad % 8;
    bf16* dq = args.dq.ptr + bh / args.NH * args.dq.batch + bh % args.NH * HS + (HS == 128 ? 64 * wg : 0) + 8 * c;
    for (int r = 0; r < 2; r++) {
        const size_t t = first + 8 * r;
        if (t < args.T)
            *reinterpret_cast<uint4*>(dq + t * args.dq.token) =
                make_uint4(rows[r][0], rows[r][1], rows[r][2], rows[r][3]);
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

constexpr char kName[] = "flash_bf16_sm90";

template <class F>  // f(std::integral_constant<int, HS>)
void with_head_size(int HS, F f) {
    if (HS == 64)
        f(std::integral_constant<int, 64>{});
    else
        f(std::integral_constant<int, 128>{});
}
int rows_of_tile(int HS) {
    return HS == 64 ? Tiles<64>::Br : Tiles<128>::Br;
}

// Scratch: statistics, dQ's sum (whole form), turns, ticket.
struct Layout {
    int Br, before, q_tiles, k_tiles, group, chunk, ring;
    size_t dq_sum, turn, ticket, bytes;
    Layout(const BlockShape& s, bool block) {
        Br = rows_of_tile(s.HS), before = block ? s.q_begin % Br : 0;
        q_tiles = ceil_div(before + s.Tq, Br), k_tiles = ceil_div(s.Tk, Tiles<64>::Bc);
        const int heads = s.B * s.NH;
        // As many heads in work at a time as fit into L2 with what streams by, but so many that key tiles of one need
        // not queue. Long ones do not fit: there, blocks that walk a head one after the other must stay so close that
        // they find in L2 what the first has fetched, which many chunks would undo, and many heads.
        constexpr size_t kBytesInL2 = 40 << 20, kHeads = 48;     // more heads than that only while they fit
        constexpr size_t kMostBytes = 96 << 20, kFewHeads = 12;  // fewer where they stream more than that
        constexpr size_t kShort = 1 << 20;
        const size_t streamed = static_cast<size_t>(s.Tq) * s.HS * (2 + 2 + 4);  // Q, dO, dQ of a head
        const int in_work = static_cast<int>(
            std::min(std::max(kHeads, kBytesInL2 / streamed), std::max(kFewHeads, kMostBytes / streamed)));
        const bool one_group = heads > in_work && streamed <= kShort;  // the heads in work are those of k_tiles chunks
        group = one_group ? heads : std::min(heads, in_work);
        chunk = one_group ? ceil_div(in_work, k_tiles) : s.HS == 64 && k_tiles >= 16 ? ceil_div(group, 4) : group;
        const long long places = one_group ? (k_tiles + 1LL) * chunk : 2LL * group;
        ring = block ? heads : static_cast<int>(std::min<long long>(heads, places));
        const size_t tiles = static_cast<size_t>(heads) * q_tiles;
        dq_sum = tiles * Br * sizeof(float2);
        turn = dq_sum + (block ? 0 : static_cast<size_t>(ring) * q_tiles * Br * s.HS * sizeof(float));
        ticket = turn + tiles * sizeof(int);
        bytes = ticket + sizeof(int);
    }
};

template <int HS, bool Block>
void launch(PrepareArgs& prepare, Args& args, const Cuda& dev) {
    const size_t prepare_blocks = static_cast<size_t>(args.heads) * args.q_tiles;
    const size_t items = static_cast<size_t>(args.heads) * args.k_tiles;
    if (std::max(prepare_blocks, items) > INT_MAX / 4)
        throw Error(format("flash_bf16_sm90: %zu tiles, more than %d: use a smaller batch",
                           std::max(prepare_blocks, items), INT_MAX / 4));
    const int blocks = static_cast<int>(std::min<size_t>(items, dev.num_sms));
    const bool alike = args.write_dkv && args.shift + args.before >= args.Tk - 1;  // no mask
    args.halved = alike ? static_cast<int>(items % blocks) : 0;
    // An SM that none of them is left for takes the earlier halves of this many: all shall end together.
    const int each = args.halved ? ceil_div(args.halved, blocks - args.halved) : 0;
    args.cut = args.q_tiles / (each + 1);
    constexpr int kWorthIt = 4;  // query tiles: K and V must be fetched, and dK and dV added, once more
    if (args.cut < kWorthIt) args.halved = 0;
    prepare.first_ticket = Block ? 0 : blocks;
    prepare_kernel<HS><<<static_cast<unsigned>(prepare_blocks), 256, 0, dev.stream>>>(prepare, args);
    LAUNCH_CHECK("flash_bf16_sm90 prepare_kernel");
    const auto kernel = backward_kernel<HS, Block>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiles<HS>::Smem));
    cudaLaunchAttribute overlap{};  // starts beside prepare_kernel's last blocks
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks, config.blockDim = kThreads, config.dynamicSmemBytes = Tiles<HS>::Smem;
    config.stream = dev.stream, config.attrs = &overlap, config.numAttrs = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

struct Inputs {
    Heads<const bf16> q, k, v, dout, out;
    const float *lse, *D;
};
template <bool Block>
void launch(const Inputs& in, Args& args, void* scratch, const BlockShape& s, const Cuda& dev) {
    const Layout layout(s, Block);
    char* at = static_cast<char*>(scratch);
    args.NH = s.NH, args.heads = s.B * s.NH, args.before = layout.before, args.Tq = layout.before + s.Tq,
    args.Tk = s.Tk;
    args.q_rows = s.rows_of_q(), args.k_rows = s.rows_of_k(), args.write_dkv = s.write_dkv;
    args.shift = s.shift();
    args.shift -= layout.before;
    args.q_tiles = layout.q_tiles, args.k_tiles = layout.k_tiles;
    args.group = layout.group, args.chunk = layout.chunk, args.ring = layout.ring;
    args.scale = s.resolved_scale();
    args.scale_log2 = s.scale_log2();
    args.stats = reinterpret_cast<float2*>(at);
    args.sum_tiles = Block ? ceil_div(s.rows_of_q(), layout.Br) : layout.q_tiles;
    if (Block)
        args.dq_sum += static_cast<size_t>(s.q_begin / layout.Br) * layout.Br * s.HS;
    else
        args.dq_sum = reinterpret_cast<float*>(at + layout.dq_sum);
    args.turn = reinterpret_cast<int*>(at + layout.turn);
    args.ticket = reinterpret_cast<int*>(at + layout.ticket);
    args.q = tensor_map("q", in.q, s.B, s.Tq, s.NH, s.HS, layout.Br);
    args.k = tensor_map("k", in.k, s.B, s.Tk, s.NH, s.HS, Tiles<64>::Bc);
    args.v = tensor_map("v", in.v, s.B, s.Tk, s.NH, s.HS, Tiles<64>::Bc);
    args.dout = tensor_map("dout", in.dout, s.B, s.Tq, s.NH, s.HS, layout.Br);
    PrepareArgs prepare{in.dout, in.out, in.lse, in.D, 0};
    with_head_size(s.HS, [&](auto HS) { launch<HS, Block>(prepare, args, dev); });
}

void check_problem(const Inputs& in, const BlockShape& s, const void* scratch) {
    check_shape(kName, s);
    check_aligned(kName, "q", in.q);
    check_aligned(kName, "k", in.k);
    check_aligned(kName, "v", in.v);
    check_aligned(kName, "dout", in.dout);
    check_aligned(kName, "scratch", scratch);
}

}  // namespace

void flash_bf16_sm90_backward(const Cuda& dev, bf16* dqkv, void* scratch, const bf16* dout, const bf16* out,
                              const float* lse, const bf16*, const bf16* qkv, const AttentionShape& s) {
    const Inputs in{packed(qkv, s, 0),
                    packed(qkv, s, 1),
                    packed(qkv, s, 2),
                    contiguous(dout, s.T, s.NH, s.HS),
                    contiguous(out, s.T, s.NH, s.HS),
                    lse,
                    nullptr};
    check_problem(in, whole(s), scratch);
    Args args{};
    const Heads<bf16> dq = packed(dqkv, s, 0), dk = packed(dqkv, s, 1), dv = packed(dqkv, s, 2);
    check_aligned(kName, "out", in.out);
    check_aligned(kName, "dqkv", dq);
    args.dq = tensor_map("dq", dq, s.B, s.T, s.NH, s.HS, rows_of_tile(s.HS));
    args.dk = tensor_map("dk", dk, s.B, s.T, s.NH, s.HS, Tiles<64>::Bc);
    args.dv = tensor_map("dv", dv, s.B, s.T, s.NH, s.HS, Tiles<64>::Bc);
    launch<false>(in, args, scratch, whole(s), dev);
}

void flash_bf16_sm90_backward_block(const Cuda& dev, float* dq_sum, float* dk, float* dv, void* scratch,
                                    Heads<const bf16> q, Heads<const bf16> k, Heads<const bf16> v,
                                    Heads<const bf16> dout, const float* lse, const float* D, const BlockShape& s) {
    const Inputs in{q, k, v, dout, {}, lse, D};
    check_problem(in, s, scratch);
    Args args{};
    args.dq_sum = dq_sum, args.dk_acc = dk, args.dv_acc = dv;
    check_aligned(kName, "dq_sum", dq_sum);
    check_aligned(kName, "dk", dk);
    check_aligned(kName, "dv", dv);
    launch<true>(in, args, scratch, s, dev);
}

size_t flash_bf16_sm90_dq_sum_bytes(const BlockShape& s) {
    const int Br = rows_of_tile(s.HS);
    return static_cast<size_t>(s.B) * s.NH * ceil_div(s.rows_of_q(), Br) * Br * s.HS * sizeof(float);
}
void flash_bf16_sm90_write_dq(const Cuda& dev, Heads<bf16> dq, const float* dq_sum, const BlockShape& s) {
    check_shape(kName, s);
    check_aligned(kName, "dq", dq);
    check_aligned(kName, "dq_sum", dq_sum);
    const int heads = s.B * s.NH, T = s.rows_of_q(), tiles = ceil_div(T, rows_of_tile(s.HS));
    const size_t blocks = 2 * static_cast<size_t>(heads) * tiles;
    if (blocks > INT_MAX)
        throw Error(
            format("flash_bf16_sm90: %zu blocks, more than a grid holds (%d): use a smaller batch", blocks, INT_MAX));
    const WriteArgs args{dq, dq_sum, s.NH, heads, T, tiles, s.resolved_scale()};
    with_head_size(s.HS,
                   [&](auto HS) { write_dq_kernel<HS><<<static_cast<unsigned>(blocks), 256, 0, dev.stream>>>(args); });
    LAUNCH_CHECK("flash_bf16_sm90 write_dq_kernel");
}

size_t flash_bf16_sm90_block_scratch_bytes(const BlockShape& s) {
    return Layout(s, true).bytes;
}
size_t flash_bf16_sm90_scratch_bytes(const AttentionShape& s) {
    return Layout(whole(s), false).bytes;
}
