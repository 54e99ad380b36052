// Flash attention backward, bf16, Hopper: wgmma + TMA + mbarrier, warp-specialised (sm_90a).
//
//   D = rowsum(dO∘O);  P = exp(S − lse);  dP = dO Vᵀ;  dS = P∘(dP − D)
//   dV = Pᵀ dO;  dK = scale·dSᵀ Q;  dQ = scale·dS K
//
// New against flash_bf16: five products, not seven. An item of work is a key tile of one head. Its K and V stay while
// the query tiles that see it pass by. dK and dV stay in registers. The dQ of each query tile is added to a sum in
// global memory. A warpgroup takes 64 of the 128 keys:
//
//   product              A (64 × k)                      B (k × N)                     result
//   Sᵀ  = K Qᵀ           K, shared memory                Q, shared memory              registers
//   dPᵀ = V dOᵀ          V, shared memory                dO, shared memory             registers
//   dV += Pᵀ dO          Pᵀ, registers: Sᵀ's layout      dO, transposed (k: its rows)  registers, to the end
//   dK += dSᵀ Q          dSᵀ, registers: dPᵀ's layout    Q, transposed                 registers, to the end
//   dQ  = dS K           dS, shared memory, transposed   K, transposed                 registers, then the sum
//
// Keys are rows of S and dP, so P and dS are A operands where they arise. Only dQ sums over all keys of the tile, so
// the two warpgroups exchange dS for it. They compute dQ one tile late, so neither waits for the other's dS.
//
// A block stays on its SM and takes items until there are none, in the order of sm90_backward_work.cuh, by which dQ's
// sum is deterministic. In the block's first warpgroup four threads have a job each:
//   loader   takes tickets, and loads the next item's K and V and the next tile's Q, dO, lse and D
//   senders  one for each consumer, which waits for the turn, sends dQ out of shared memory and passes the turn on
//   storer   writes dK out of K's place in shared memory and dV out of dS's
// The other two warpgroups are the consumers. Who waits for whom at an mbarrier, [2] by stage or consumer:
//   k_full[2]     all others  ← loader: K is there, and which item it is
//   k_empty[2]    loader      ← storer: dK has left; senders: they know the item
//   v_full        consumers   ← loader: V is there
//   v_empty       loader      ← consumers: the item's last dP is done
//   q_full[2]     consumers   ← loader: Q, dO, lse and D are there
//   q_empty[2]    loader      ← consumers: dK is done
//   ds_full[2]    consumers   ← consumers: dS is there
//   ds_empty[2]   consumers   ← consumers: dQ is done
//   dq_full[2]    sender      ← consumer: dQ is in shared memory
//   dq_empty[2]   consumer    ← sender: dQ has been read
//   kv_done       storer      ← consumers: dK and dV are in their places
//   kv_stored     consumers   ← storer: dV has left, so the next item may write dS
//
// The partial form is the same kernel. It adds dK and dV to the caller's fp32 and leaves dQ in the caller's sum, until
// write_dq_kernel rounds it. Its query tiles are those of the sum, so the first may begin with queries that are not the
// block's: rows of zeros.
//
// Writes: dqkv (every element).  Partial form: adds into dq_sum, and adds into or writes dk, dv. write_dq writes dq.
// Scratch: log2(e)·lse, D, turns, the ticket, and in the whole form dQ's sum in fp32. The kernels write all of it before
// they read it.
// Limits: HS in {64, 128}; any T ≥ 1; scale > 0.   Run: ./dev/bench_attention --kernel flash_bf16_sm90
#include <climits>
#include <cmath>

#include "attention/flash_bf16_sm90.h"
#include "attention/sm90_backward_work.cuh"
#include "layers/gpu/ptx_sm90.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // kernels have empty bodies there, and what only they use is "never referenced"
#endif

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Before the main kernel: lse and D of each query, and counters to zero

struct Inputs {
    Heads<const bf16> q, k, v, dout, out;
    const float *lse, *D;  // D is null in the whole form, and out in the partial form
};

// One block for each query tile of a head. HS/8 lanes share a row.
template <int HS>
__global__ __launch_bounds__(1024) void prepare_kernel(const __grid_constant__ Inputs in,
                                                       const __grid_constant__ Args args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    grid_allow_dependents();
    constexpr int Br = Tiles<HS>::Br, Lanes = HS / 8;
    static_assert(Br * Lanes == 1024);
    // Blocks that run together read whole tokens: the heads of one come one after the other.
    const int h = blockIdx.x % args.NH, tile = blockIdx.x / args.NH % args.q_tiles,
              b = blockIdx.x / args.NH / args.q_tiles, bh = b * args.NH + h;
    if (threadIdx.x == 0 && blockIdx.x == 0) *args.ticket = 0;
    if (threadIdx.x < 2) args.turn[blockIdx.x * 2 + threadIdx.x] = 0;
    const int row = threadIdx.x / Lanes, lane = threadIdx.x % Lanes, t = tile * Br + row - args.before;
    float lse = INFINITY, D = 0.f;
    if (!in.D) {
        const size_t read = min(t, args.Tq - 1), column = h * HS + lane * 8;  // whole form: t ≥ 0
        const bf16 *dout = in.dout.ptr + b * in.dout.batch + read * in.dout.token + column,
                   *out = in.out.ptr + b * in.out.batch + read * in.out.token + column;
        D = dot8(*reinterpret_cast<const uint4*>(dout), *reinterpret_cast<const uint4*>(out));
        for (int lanes = 1; lanes < Lanes; lanes *= 2) D += __shfl_xor_sync(~0u, D, lanes);
    }
    if (lane > 0) return;
    const size_t at = static_cast<size_t>(bh) * args.q_rows + t;
    const bool exists = t >= 0 && t < args.Tq - args.before;
    if (exists && in.lse[at] != -INFINITY) lse = in.lse[at] * kLog2e;
    if (in.D || !exists) D = exists ? in.D[at] : 0.f;
    float* lse_D = args.lse_D + (static_cast<size_t>(bh) * args.q_tiles + tile) * 2 * Br + row;
    lse_D[0] = lse, lse_D[Br] = D;
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Who waits for whom: the mbarriers by name, as addresses. Stage n % 2 is in its (n / 2)-th round; a full barrier is
// waited for with the round's parity, an empty one with the opposite, so that the first round passes at once.

template <int HS>
struct Control {
    static constexpr int Items = Tiles<HS>::Control + 24 * 8;  // int2[2], in the keeping of k_full and k_empty
    unsigned char* smem;
    uint32_t base;  // the same as an address of shared memory

    __device__ uint32_t at(int index, int n) const { return base + Tiles<HS>::Control + 8 * (2 * index + (n & 1)); }
    __device__ uint32_t k_full(int n) const { return at(0, n); }
    __device__ uint32_t k_empty(int n) const { return at(1, n); }
    __device__ uint32_t v_full() const { return at(2, 0); }
    __device__ uint32_t v_empty() const { return at(3, 0); }
    __device__ uint32_t q_full(int n) const { return at(4, n); }
    __device__ uint32_t q_empty(int n) const { return at(5, n); }
    __device__ uint32_t ds_full(int n) const { return at(6, n); }
    __device__ uint32_t ds_empty(int n) const { return at(7, n); }
    __device__ uint32_t dq_full(int wg) const { return at(8, wg); }
    __device__ uint32_t dq_empty(int wg) const { return at(9, wg); }
    __device__ uint32_t kv_done() const { return at(10, 0); }
    __device__ uint32_t kv_stored() const { return at(11, 0); }

    __device__ void init() const {
        constexpr int kAll = kConsumers, kArrivals[12] = {1, 3, 1, kAll, 1, kAll, kAll, kAll, kAll / 2, 1, kAll, 1};
        for (int i = 0; i < 24; i++) mbarrier_init(at(i / 2, i), kArrivals[i / 2]);
        fence_mbarrier_init();
    }
    // Waits for the item's K and says which it is.
    __device__ int2 wait_item(int item) const {
        mbarrier_wait(k_full(item), item >> 1 & 1);
        const volatile int* at = reinterpret_cast<const volatile int*>(smem + Items) + 2 * (item & 1);
        return {at[0], at[1]};
    }
};

template <int HS, bool Partial>
__device__ __forceinline__ void loader(const Args& args, const Control<HS>& control) {
    using T = Tiles<HS>;
    for (int item = 0, n = 0;; item++) {
        // Late, so that the longest do not pile up on one block.
        const int2 next = item_of(args, atomicAdd(args.ticket, 1));
        mbarrier_wait(control.k_empty(item), item >> 1 & 1 ^ 1);
        volatile int* at = reinterpret_cast<volatile int*>(control.smem + control.Items) + 2 * (item & 1);
        at[0] = next.x, at[1] = next.y;
        if (next.x < 0) {
            mbarrier_arrive(control.k_full(item));
            return;
        }
        const Work w = work_of<HS>(args, next.x, next.y);
        const int b = w.bh / args.NH, h = w.bh % args.NH;
        auto load = [&](int to, const CUtensorMap& map, uint32_t barrier, int rows, int t) {
            for (int d = 0; d < HS; d += 64) tma_load_4d(control.base + to + d * rows * 2, &map, barrier, d, h, t, b);
        };
        auto load_q = [&](int i) {
            const uint32_t q_full = control.q_full(n), stage = n & 1;
            mbarrier_wait(control.q_empty(n), n >> 1 & 1 ^ 1);
            mbarrier_arrive_expect(q_full, 2 * T::QBytes + T::LseDBytes);
            const int t = i * T::Br - (Partial ? args.before : 0);  // before row 0 are zeros, as behind the last
            load(T::Q + stage * T::QBytes, args.q, q_full, T::Br, t);
            load(T::Do + stage * T::QBytes, args.dout, q_full, T::Br, t);
            bulk_load(control.base + T::LseD + stage * T::LseDBytes,
                      args.lse_D + (static_cast<size_t>(w.bh) * args.q_tiles + i) * 2 * T::Br, T::LseDBytes, q_full);
            n++;
        };
        mbarrier_arrive_expect(control.k_full(item), T::KvBytes);
        load(T::K + (item & 1) * T::KvBytes, args.k, control.k_full(item), T::Bc, w.k_tile * T::Bc);
        load_q(w.i);
        mbarrier_wait(control.v_empty(), item & 1 ^ 1);
        mbarrier_arrive_expect(control.v_full(), T::KvBytes);
        load(T::V, args.v, control.v_full(), T::Bc, w.k_tile * T::Bc);
        for (int t = 1; t < w.left; t++) load_q(w.i + t * w.step);
    }
}

// Sends what consumer wg has of each dQ: 64 × 64.
template <int HS, bool Partial>
__device__ __forceinline__ void sender(const Args& args, const Control<HS>& control, int wg) {
    using T = Tiles<HS>;
    const uint32_t dq_smem = control.base + T::Dq + wg * T::DqBytes / 2;
    for (int item = 0, n = 0;; item++) {
        const int2 next = control.wait_item(item);
        if (next.x < 0) return;
        mbarrier_arrive(control.k_empty(item));
        Work w = work_of<HS>(args, next.x, next.y);
        const int b = w.bh / args.NH, h = w.bh % args.NH;
        for (int i = w.i; w.left > 0; w.left--, i += w.step, n++) {
            const int last = last_k_tile<HS>(args, i), turn = w.step > 0 ? last - w.k_tile : w.k_tile;
            const bool begins = !Partial && turn == 0, ends = !Partial && turn == last;
            // A sum begins where another head's was: that has been read when its last key tile has had its turn.
            const bool inherits = begins && w.bh + args.sum_heads < args.heads;
            const int wanted = inherits ? last + 1 : turn;
            if (wanted > 0)
                while (load_acquire_gpu(turn_of(args, w.bh + (inherits ? args.sum_heads : 0), i, wg)) < wanted) {}
            mbarrier_wait(control.dq_full(wg), n & 1);
            float* sum = sum_of<HS>(args, w.bh, i, wg);
            if (ends)
                tma_store_4d(&args.dq, dq_smem, HS == 128 ? 64 * wg : 0, h, i * T::Br + (HS == 64 ? 64 * wg : 0), b);
            else if (begins)
                bulk_store(sum, dq_smem, T::DqBytes / 2);
            else
                bulk_add(sum, dq_smem, T::DqBytes / 2);
            bulk_commit();
            bulk_wait_read<0>();
            mbarrier_arrive(control.dq_empty(wg));
            bulk_wait<0>();
            store_release_gpu(turn_of(args, w.bh, i, wg), turn + 1);
        }
    }
}

template <int HS, bool Partial>
__device__ __forceinline__ void storer(const Args& args, const Control<HS>& control) {
    using T = Tiles<HS>;
    for (int item = 0;; item++) {
        const int2 next = control.wait_item(item);
        if (next.x < 0) return;
        const int b = next.y / args.NH, h = next.y % args.NH, t = next.x * T::Bc;
        mbarrier_wait(control.kv_done(), item & 1);
        for (int d = 0; d < (Partial ? 0 : HS); d += 64) {
            tma_store_4d(&args.dk, control.base + T::K + (item & 1) * T::KvBytes + d * T::Bc * 2, d, h, t, b);
            tma_store_4d(&args.dv, control.base + T::Ds + d * T::Bc * 2, d, h, t, b);
        }
        bulk_commit();
        bulk_wait_read<0>();
        mbarrier_arrive(control.k_empty(item));
        mbarrier_arrive(control.kv_stored());
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The main kernel

// The address that this lane gives stmatrix for the 16×16 block at (row, 0) of a tile: 16-byte piece c of row r lies at
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

// The compiler takes a register for dead only once it is written.
template <int N>
__device__ __forceinline__ void clear(float (&c)[N][4]) {
    for (auto& x : c)
        for (float& y : x) y = 0.f;
    wgmma_hold(c);
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
__device__ __forceinline__ void add_product(float (&d)[HS / 8][4], const uint32_t (&a)[Tiles<HS>::Br / 16][4],
                                            uint32_t b) {
    const uint64_t transposed = wgmma_descriptor(b, Tiles<HS>::Br * 128);
    wgmma_hold(d);
    wgmma_fence();
    for (int kk = 0; kk < Tiles<HS>::Br / 16; kk++)
        wgmma_rs<true>(d, a[kk], wgmma_advance(transposed, kk * 16 * 128), true);
    wgmma_commit();
}

// Sets what the tile's queries may not see, in the rows of this warp, to −∞.
template <int HS>
__device__ __forceinline__ void mask(float (&s)[Tiles<HS>::Br / 8][4], const Args& args, const Work& w, int row) {
    constexpr int Br = Tiles<HS>::Br, Bc = Tiles<HS>::Bc;
    const int k0 = w.k_tile * Bc, q0 = w.i * Br;
    if (q0 + args.shift >= k0 + Bc - 1 && k0 + Bc <= args.Tk) return;
    const int lane = lane_id();  // a register less in the loop
    for (int r = 0; r < 2; r++) {
        const int key = k0 + row + 8 * r + lane / 4;
        const int hidden =
            (key < args.Tk ? key - args.shift - q0 : Br) - lane % 4 * 2;  // queries before it do not see it
        for (int c = 0; c < Br / 8; c++)
            for (int e = 0; e < 2; e++)
                if (8 * c + e < hidden) s[c][2 * r + e] = -INFINITY;
    }
}

// Gives dQ of query tile i, the n-th of this block, to the sender. The last key tile to add fetches the others' sum and
// rounds what it becomes.
template <int HS, bool Partial>
__device__ __forceinline__ void send_dq(float (&dq)[8][4], const Args& args, const Control<HS>& control, const Work& w,
                                        int n, int i, int warp) {
    using T = Tiles<HS>;
    const int wg = warp / 4 - 1, last = last_k_tile<HS>(args, i);
    const bool ends = !Partial && w.k_tile == (w.step > 0 ? 0 : last);
    if (ends && last > 0) {
        while (load_acquire_gpu(turn_of(args, w.bh, i, wg)) < last) {}
        const float4* sum = reinterpret_cast<const float4*>(sum_of<HS>(args, w.bh, i, wg)) + threadIdx.x % 128;
        for (int c = 0; c < 8; c++) {
            const float4 x = __ldcg(sum + c * 128);
            dq[c][0] += x.x, dq[c][1] += x.y, dq[c][2] += x.z, dq[c][3] += x.w;
        }
    }
    mbarrier_wait(control.dq_empty(wg), n & 1 ^ 1);
    if (ends) {
        round_tile(dq, args.scale, control.base + T::Dq + wg * T::DqBytes / 2, 16 * (warp % 4), 64);
    } else {
        float4* to = reinterpret_cast<float4*>(control.smem + T::Dq) + wg * 1024 + threadIdx.x % 128;
        for (int c = 0; c < 8; c++) to[c * 128] = make_float4(dq[c][0], dq[c][1], dq[c][2], dq[c][3]);
    }
    fence_proxy_async();
    mbarrier_arrive(control.dq_full(wg));
}

// Partial form: adds 16 rows of dK and dV to the caller's, or writes them.
template <int HS>
__device__ __forceinline__ void put_dkv(const float (&dk)[HS / 8][4], const float (&dv)[HS / 8][4], const Args& args,
                                        const Work& w, int row) {
    const int lane = threadIdx.x % 32;
    auto put = [&](float* to, float x, float y) {
        if (args.write_dkv)
            *reinterpret_cast<float2*>(to) = make_float2(x, y);
        else
            red_add_v2(to, x, y);  // waits for no answer; nobody else adds to these elements
    };
    const size_t row0 = static_cast<size_t>(w.bh / args.NH) * args.k_rows;
    for (int r = 0; r < 2; r++) {
        // Element (row lane/4, column 2·(lane % 4)) of a warp's 16×8 tiles.
        const int key = w.k_tile * Tiles<HS>::Bc + row + 8 * r + lane / 4;
        const size_t at = ((row0 + key) * args.NH + w.bh % args.NH) * HS + lane % 4 * 2;
        for (int c = 0; c < HS / 8 && key < args.Tk; c++) {
            put(args.dk_acc + at + 8 * c, dk[c][2 * r] * args.scale, dk[c][2 * r + 1] * args.scale);
            put(args.dv_acc + at + 8 * c, dv[c][2 * r], dv[c][2 * r + 1]);
        }
    }
}

template <int HS, bool Partial>
__device__ __forceinline__ void consumer(const Args& args, const Control<HS>& control) {
    using T = Tiles<HS>;
    constexpr int Br = T::Br, Bc = T::Bc;
    const uint32_t base = control.base;
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wg = warp / 4 - 1;  // so they are known to be uniform
    const int row = 64 * wg + 16 * (warp % 4);                                  // the warp's first key in the tile
    const uint32_t ds_block = block16(base + T::Ds, row);

    for (int item = 0, n = 0;; item++) {  // n: query tiles so far
        const int2 next = control.wait_item(item);
        Work w = work_of<HS>(args, __shfl_sync(~0u, next.x, 0), __shfl_sync(~0u, next.y, 0));  // uniform
        if (w.k_tile < 0) break;
        const uint32_t k_smem = base + T::K + (item & 1) * T::KvBytes;
        const uint64_t k_rows = wgmma_descriptor(k_smem + 64 * wg * 128);
        const uint64_t v_rows = wgmma_descriptor(base + T::V + 64 * wg * 128);
        // dQ is shared out by queries at HS 64, by columns at HS 128: 64 × 64 a warpgroup.
        const uint64_t k_transposed = wgmma_descriptor(k_smem + (HS == 128 ? wg : 0) * Bc * 128);
        float dk[HS / 8][4] = {}, dv[HS / 8][4] = {}, dq[8][4] = {};
        float s[Br / 8][4];  // Sᵀ, then Pᵀ
        auto start_s = [&](int n) {
            mbarrier_wait(control.q_full(n), n >> 1 & 1);
            multiply<HS>(s, k_rows, wgmma_descriptor(base + T::Q + (n & 1) * T::QBytes));
        };
        auto start_dq = [&](int n) {
            mbarrier_wait(control.ds_full(n), n >> 1 & 1);
            const uint64_t ds_transposed =
                wgmma_descriptor(base + T::Ds + (n & 1) * T::DsBytes + (HS == 64 ? wg * Bc * 128 : 0));
            wgmma_fence();
            for (int kk = 0; kk < Bc / 16; kk++)
                wgmma_ss<true, true>(dq, wgmma_advance(ds_transposed, kk * 16 * 128),
                                     wgmma_advance(k_transposed, kk * 16 * 128), kk > 0);
        };

        start_s(n);
        wgmma_commit();
        mbarrier_wait(control.v_full(), item & 1);
        const int first = n;
#pragma unroll 1
        do {
            const uint32_t q_smem = base + T::Q + (n & 1) * T::QBytes, do_smem = base + T::Do + (n & 1) * T::QBytes;
            // lse and D of this lane's columns 8c and 8c + 1: [4c] and [Br/2 + 4c].
            const float2* lse_D =
                reinterpret_cast<const float2*>(control.smem + T::LseD + (n & 1) * T::LseDBytes) + lane % 4;

            float dp[Br / 8][4];
            multiply<HS>(dp, v_rows, wgmma_descriptor(do_smem));
            wgmma_commit();

            wgmma_wait<1>(s);  // dPᵀ runs on
            mask<HS>(s, args, w, row);
            uint32_t p[Br / 16][4];  // Pᵀ as A operand
            for (int c = 0; c < Br / 8; c++) {
                const float2 L = lse_D[4 * c];
                for (int e = 0; e < 4; e++) s[c][e] = exp2_approx(s[c][e] * args.scale_log2 - (e % 2 ? L.y : L.x));
                p[c / 2][c % 2 * 2] = pack_bf16(s[c][0], s[c][1]);
                p[c / 2][c % 2 * 2 + 1] = pack_bf16(s[c][2], s[c][3]);
            }
            add_product<HS>(dv, p, do_smem);

            mbarrier_wait(control.ds_empty(n), n >> 1 & 1 ^ 1);
            if (n == first) mbarrier_wait(control.kv_stored(), item & 1 ^ 1);  // the last item's dV has left
            wgmma_wait<1>(dp);
            if (w.left == 1) mbarrier_arrive(control.v_empty());
            uint32_t ds[Br / 16][4];  // dSᵀ as A operand, while dV runs
            for (int c = 0; c < Br / 8; c++) {
                const float2 D = lse_D[Br / 2 + 4 * c];
                float x[4];
                for (int e = 0; e < 4; e++) x[e] = s[c][e] * (dp[c][e] - (e % 2 ? D.y : D.x));
                ds[c / 2][c % 2 * 2] = pack_bf16(x[0], x[1]);
                ds[c / 2][c % 2 * 2 + 1] = pack_bf16(x[2], x[3]);
            }
            for (int kk = 0; kk < Br / 16; kk++)
                stmatrix_x4((ds_block ^ kk % 4 << 5) + (n & 1) * T::DsBytes + kk / 4 * Bc * 128, ds[kk]);
            fence_proxy_async();
            mbarrier_arrive(control.ds_full(n));
            // [quote]
            wgmma_wait<0>(dv);
            clear(s);
            clear(dq);
            add_product<HS>(dk, ds, q_smem);
            if (n > first) start_dq(n - 1);  // the other warpgroup's dS of this tile may still be on its way
            wgmma_fence();
            wgmma_commit();
            if (w.left > 1) start_s(n + 1);
            wgmma_fence();  // where the branches meet, or the compiler adds one and says so (C7519)
            wgmma_commit();

            wgmma_wait<1>(dk, dq);  // the next Sᵀ runs on
            // [end]
            mbarrier_arrive(control.q_empty(n));
            if (n > first) {
                mbarrier_arrive(control.ds_empty(n - 1));
                send_dq<HS, Partial>(dq, args, control, w, n - 1, w.i - w.step, warp);
            }
            n++, w.i += w.step;
        } while (--w.left > 0);
        w.i -= w.step;
        start_dq(n - 1);
        wgmma_commit();
        wgmma_wait<0>(dk, dv, dq);
        mbarrier_arrive(control.ds_empty(n - 1));

        if (Partial) {
            put_dkv<HS>(dk, dv, args, w, row);
        } else {
            named_barrier_sync(2, kConsumers);  // nobody reads K and dS any more
            round_tile(dk, args.scale, k_smem, row, Bc);
            round_tile(dv, 1.f, base + T::Ds, row, Bc);
            fence_proxy_async();
        }
        mbarrier_arrive(control.kv_done());
        send_dq<HS, Partial>(dq, args, control, w, n - 1, w.i, warp);
    }
}

template <int HS, bool Partial>
__global__ __launch_bounds__(kThreads, 1) void backward_kernel(const __grid_constant__ Args args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char smem[];
    const Control<HS> control{smem, smem_address(smem)};
    if (threadIdx.x == 0) control.init();
    __syncthreads();
    if (threadIdx.x >= 128) {
        setmaxnreg_inc<240>();
        consumer<HS, Partial>(args, control);
    } else {
        setmaxnreg_dec<24>();
        // lse and D, turns, the ticket and zeros are prepare_kernel's. The consumers are behind this by k_full.
        grid_wait_dependency();
        if (threadIdx.x == 0) loader<HS, Partial>(args, control);  // a warp each, because lanes wait for one another
        if (threadIdx.x == 32) sender<HS, Partial>(args, control, 0);
        if (threadIdx.x == 64) sender<HS, Partial>(args, control, 1);
        if (threadIdx.x == 96) storer<HS, Partial>(args, control);
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// After the last block: scale·(the sum of dQ), rounded, into rows. A block has a consumer's part of a query tile. A
// thread has what four neighbours had of two rows and 8 columns, 16 bytes of each row.

template <int HS>
__global__ __launch_bounds__(256) void write_dq_kernel(Heads<bf16> dq, const float* dq_sum, int NH, int heads, int T,
                                                       float scale) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int Br = Tiles<HS>::Br;
    // Blocks of all heads of a row run together: their rows are neighbours.
    const int wg = blockIdx.x % 2, bh = blockIdx.x / 2 % heads, i = blockIdx.x / 2 / heads;
    const int c = threadIdx.x % 8, quad = threadIdx.x / 8;
    const float4* sum = reinterpret_cast<const float4*>(dq_sum) +
                        (static_cast<size_t>(bh) * (gridDim.x / 2 / heads) + i) * (Br * HS / 4) + wg * 1024 + c * 128 +
                        quad * 4;
    uint32_t rows[2][4];
    for (int j = 0; j < 4; j++) {
        const float4 x = sum[j];
        rows[0][j] = pack_bf16(scale * x.x, scale * x.y);
        rows[1][j] = pack_bf16(scale * x.z, scale * x.w);
    }
    const int first = i * Br + (HS == 64 ? 64 * wg : 0) + quad / 8 * 16 + quad % 8;
    bf16* to = dq.ptr + bh / NH * dq.batch + bh % NH * HS + (HS == 128 ? 64 * wg : 0) + 8 * c;
    for (int r = 0; r < 2; r++) {
        const size_t t = first + 8 * r;
        if (t < T)
            *reinterpret_cast<uint4*>(to + t * dq.token) = make_uint4(rows[r][0], rows[r][1], rows[r][2], rows[r][3]);
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

constexpr char kName[] = "flash_bf16_sm90";

template <int HS, bool Partial>
void launch(const Inputs& in, Args& args, void* scratch, const PartialShape& s, const Cuda& dev) {
    constexpr int Br = Tiles<HS>::Br, Bc = Tiles<HS>::Bc;
    const Layout layout(s, Partial);
    const size_t heads = static_cast<size_t>(s.B) * s.NH, tiles = heads * std::max(layout.q_tiles, layout.k_tiles);
    if (tiles > INT_MAX / 4)
        throw Error(format("%s: %zu tiles, more than %d: use a smaller batch", kName, tiles, INT_MAX / 4));
    char* at = static_cast<char*>(scratch);
    // Of a batch with all heads the first layout.group would walk back.
    const int all_heads = s.all_heads ? s.all_heads : s.NH;
    args.back = layout.group / all_heads * s.NH + std::clamp(layout.group % all_heads - s.first_head, 0, s.NH);
    args.first_head = s.first_head, args.period = backward_period(all_heads);
    args.NH = s.NH, args.heads = s.B * s.NH, args.Tq = layout.before + s.Tq, args.Tk = s.Tk;
    args.before = layout.before, args.q_rows = s.rows_of_q(), args.k_rows = s.rows_of_k();
    args.write_dkv = s.write_dkv, args.shift = s.shift() - layout.before;
    args.q_tiles = layout.q_tiles, args.k_tiles = layout.k_tiles;
    args.group = layout.group, args.sum_heads = layout.sum_heads, args.masked = layout.masked;
    args.scale = s.resolved_scale(), args.scale_log2 = s.scale_log2();
    args.lse_D = reinterpret_cast<float*>(at);
    args.sum_tiles = Partial ? ceil_div(s.rows_of_q(), Br) : layout.q_tiles;
    args.dq_sum = Partial ? args.dq_sum + static_cast<size_t>(s.q_begin / Br) * Br * HS
                          : reinterpret_cast<float*>(at + layout.dq_sum);
    args.turn = reinterpret_cast<int*>(at + layout.turn), args.ticket = reinterpret_cast<int*>(at + layout.ticket);
    args.q = tensor_map("q", in.q, s.B, s.Tq, s.NH, HS, Br), args.k = tensor_map("k", in.k, s.B, s.Tk, s.NH, HS, Bc);
    args.v = tensor_map("v", in.v, s.B, s.Tk, s.NH, HS, Bc);
    args.dout = tensor_map("dout", in.dout, s.B, s.Tq, s.NH, HS, Br);

    prepare_kernel<HS><<<static_cast<unsigned>(heads * layout.q_tiles), 1024, 0, dev.stream>>>(in, args);
    LAUNCH_CHECK("flash_bf16_sm90 prepare_kernel");
    const auto kernel = backward_kernel<HS, Partial>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiles<HS>::Smem));
    cudaLaunchAttribute overlap{};  // starts beside prepare_kernel's last blocks
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(std::min<size_t>(heads * layout.k_tiles, dev.num_sms));
    config.blockDim = kThreads, config.dynamicSmemBytes = Tiles<HS>::Smem;
    config.stream = dev.stream, config.attrs = &overlap, config.numAttrs = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
}

void check_problem(const Inputs& in, const PartialShape& s, const void* scratch) {
    check_shape(kName, s);
    for (const auto& [name, x] : {std::pair("q", in.q), {"k", in.k}, {"v", in.v}, {"dout", in.dout}})
        check_aligned(kName, name, x);
    check_aligned(kName, "scratch", scratch);
}

}  // namespace

void flash_bf16_sm90_backward(const Cuda& dev, bf16* dqkv, void* scratch, const bf16* dout, const bf16* out,
                              const float* lse, const bf16*, const bf16* qkv, const AttentionShape& s) {
    const Heads<const bf16> douts = contiguous(dout, s.T, s.NH, s.HS), outs = contiguous(out, s.T, s.NH, s.HS);
    const Inputs in{packed(qkv, s, 0), packed(qkv, s, 1), packed(qkv, s, 2), douts, outs, lse, nullptr};
    check_problem(in, whole(s), scratch);
    check_aligned(kName, "out", in.out);
    check_aligned(kName, "dqkv", packed(dqkv, s, 0));
    Args args{};
    args.dq = tensor_map("dq", packed(dqkv, s, 0), s.B, s.T, s.NH, s.HS, 64);
    args.dk = tensor_map("dk", packed(dqkv, s, 1), s.B, s.T, s.NH, s.HS, Tiles<64>::Bc);
    args.dv = tensor_map("dv", packed(dqkv, s, 2), s.B, s.T, s.NH, s.HS, Tiles<64>::Bc);
    with_head_size(s.HS, [&](auto HS) { launch<HS, false>(in, args, scratch, whole(s), dev); });
}

void flash_bf16_sm90_backward_partial(const Cuda& dev, float* dq_sum, float* dk, float* dv, void* scratch,
                                      Heads<const bf16> q, Heads<const bf16> k, Heads<const bf16> v,
                                      Heads<const bf16> dout, const float* lse, const float* D, const PartialShape& s) {
    const Inputs in{q, k, v, dout, {}, lse, D};
    check_problem(in, s, scratch);
    check_aligned(kName, "dq_sum", dq_sum);
    check_aligned(kName, "dk", dk);
    check_aligned(kName, "dv", dv);
    Args args{};
    args.dq_sum = dq_sum, args.dk_acc = dk, args.dv_acc = dv;
    with_head_size(s.HS, [&](auto HS) { launch<HS, true>(in, args, scratch, s, dev); });
}

size_t flash_bf16_sm90_dq_sum_bytes(const PartialShape& s) {
    const int Br = Layout::rows_of_tile(s.HS);
    return static_cast<size_t>(s.B) * s.NH * ceil_div(s.rows_of_q(), Br) * Br * s.HS * sizeof(float);
}
void flash_bf16_sm90_write_dq(const Cuda& dev, Heads<bf16> dq, const float* dq_sum, const PartialShape& s) {
    check_shape(kName, s);
    check_aligned(kName, "dq", dq);
    check_aligned(kName, "dq_sum", dq_sum);
    const int heads = s.B * s.NH, T = s.rows_of_q();
    const size_t blocks = 2 * static_cast<size_t>(heads) * ceil_div(T, Layout::rows_of_tile(s.HS));
    if (blocks > INT_MAX)
        throw Error(format("%s: %zu blocks, more than a grid holds (%d): use a smaller batch", kName, blocks, INT_MAX));
    with_head_size(s.HS, [&](auto HS) {
        write_dq_kernel<HS>
            <<<static_cast<unsigned>(blocks), 256, 0, dev.stream>>>(dq, dq_sum, s.NH, heads, T, s.resolved_scale());
    });
    LAUNCH_CHECK("flash_bf16_sm90 write_dq_kernel");
}

size_t flash_bf16_sm90_partial_scratch_bytes(const PartialShape& s) {
    return Layout(s, true).bytes;
}
size_t flash_bf16_sm90_scratch_bytes(const AttentionShape& s) {
    return Layout(whole(s), false).bytes;
}
