// Flash attention forward, bf16, wgmma + TMA + mbarrier, warp-specialised (sm_90a).
//
//   first tile of keys      every later one
//   S  = scale·Q Kᵀ         S  = scale·Q Kᵀ
//   m  = rowmax S
//   P  = exp(S − m)         P  = exp(S − m)
//   l  = rowsum P           l += rowsum P
//   O  = P V                O += P V
// and after the last tile:
//   out = O / l
//   lse = m + log l
//
// New against flash_wgmma: roles, and no running maximum. One thread, the producer, has the TMA
// unit copy tiles into stages in shared memory. The consumers are warpgroups of 64 queries each,
// which multiply straight out of the stages. mbarriers say when a tile has landed and when it may
// be overwritten.
//
// Any m gives the same out and lse as long as nothing overflows. The maximum of the first tile (the
// diagonal one) is nearly always good enough for the whole row. P and l may grow to 2^60 before
// their sums tell a warp that it needs a new m. It then computes S again, by itself, and goes the
// textbook's way for that tile. So 64 maxima, 4 shuffles and the rescaling of O are gone from the
// loop.
//
// A warpgroup's step j, while the tensor cores also serve the other warpgroups:
//
//   wait KFull(j)  │ S = Q K_jᵀ    │ O += P V_{j+1}, 16 keys at a time  │ O done: release,
//                  │ tensor cores  │ between them P = exp(S − m), l     │ P to bf16
//
//   operand  where                                      layout
//   Q        shared memory, 2 slots a warpgroup         A of S: rows of 128 bytes, swizzled by TMA
//   K        shared memory, Stages tiles of 128 keys    B of S, as it lies
//   P        registers: S's accumulator packed to bf16  A of O
//   V        shared memory, Stages tiles                B of O, transposed by wgmma
//   S, O     registers                                  accumulators, fp32
//
//   barrier         who arrives              who waits
//   QFull[2][W]     TMA                      the warpgroup: its queries and its WorkTile are there
//   QEmpty[2][W]    the warpgroup's threads  the producer: WorkTile has been read, the last product
//                                            with Q is done
//   KFull, VFull    TMA                      all consumers
//   KEmpty, VEmpty  every consumer warp      the producer
//
// A block stays on its SM and fetches tiles of queries until none are left. While consumers finish
// one, the producer loads the next.
//
// Writes: out (bf16 or fp32), lse (every element).  Backward: flash_bf16_sm90_backward.cu.
// Limits: HS in {64, 128}, any T ≥ 1, scale > 0, compute capability 9.0 alone.
// Run: ./dev/bench_attention --kernel flash_bf16_sm90
#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>

#include "attention/flash_bf16_sm90.h"
#include "attention/launch.h"
#include "cuda/pipeline_sm90.cuh"
#include "cuda/tensor_map.h"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
// kernels have empty bodies there, and what only they use is "never referenced"
#pragma nv_diag_suppress 177
#endif

namespace {

// -------------------------------------------------------------------------------------------------
// Tiles. Registers decide how many warpgroups share a tile of keys: S, O and P take 64 + 32 + 32 a
// thread at HS 64, and three warpgroups may have 160; at HS 128 they take 64 + 64 + 32, and there
// are two. The producer hands its own back.

template <int HS>
struct ForwardTiles {
    static constexpr int Warpgroups = HS == 64 ? 3 : 2;  // consumers, 64 queries each
    static constexpr int Br = 64 * Warpgroups, Bc = 128;
    static constexpr int Threads = 128 * (1 + Warpgroups);
    static constexpr int Stages = HS == 64 ? 4 : 2;  // as many as fit
    static constexpr int ProducerRegisters = HS == 64 ? 32 : 40;
    static constexpr int ConsumerRegisters = HS == 64 ? 160 : 232;
    static constexpr int QBytes = 64 * HS * 2, KvBytes = Bc * HS * 2;
    // Offsets in shared memory: Q twice, out, the stages, barriers, WorkTile twice. 200 KB, 224 KB.
    static constexpr int Out = 2 * Warpgroups * QBytes, K = Out + Warpgroups * QBytes,
                         V = K + Stages * KvBytes;
    static constexpr int MostOfABarrier = 2 * Warpgroups;  // of six kinds
    static constexpr int Barriers = V + Stages * KvBytes,
                         NextWork = Barriers + 6 * MostOfABarrier * 8;
    static constexpr int Smem = NextWork + 2 * 16;
    static_assert(Smem <= 227 * 1024 && Stages <= MostOfABarrier);
};

// -------------------------------------------------------------------------------------------------
// What a launch covers

struct Problem {
    int NH, Tq, Tk, heads;    // heads = B·NH
    int shift;                // query i sees keys j ≤ i + shift
    int tiles, group, items;  // items = tiles·heads
    int counter;              // which of next_item
    float scale_log2;         // scale·log2(e): the exponentials are powers of 2
    RowStatsView<float> lse;
    HeadsView<float> out;  // if the results are fp32. In bf16 a tensor map says where they go
};

// Tiles are handed out as blocks come for them, which balances what no fixed assignment does: their
// lengths differ, and so do SMs. Each launch needs a counter, which its last block sets back to 0;
// launches that run at once have different ones.
constexpr int kCounters = 1024;
__device__ int next_item[kCounters];
std::atomic<unsigned> launches;

// One tile of queries of one head.
struct WorkTile {
    int b;  // −1: there is no more
    int h;
    int q0;
    int k_tiles;  // of the last query
};
// Heads go in groups whose keys and values stay in L2; within a group the longest tiles come first,
// so that the last to finish are short. Tiles are counted from the last query: if 64·Warpgroups
// does not divide Tq, it is the first, short tile that has warpgroups without queries (q0 < 0), not
// the longest.
template <int Br, int Bc>
__device__ __forceinline__ WorkTile work_item(const Problem& p, int item) {
    const int first = item / (p.group * p.tiles) * p.group;
    const int size = min(p.group, p.heads - first);
    const int i = item - first * p.tiles;
    const int tile = i / size;
    const int bh = first + i % size;
    const int q0 = (p.Tq + 63) / 64 * 64 - (tile + 1) * Br;
    const int k_end = min(p.Tk, min(q0 + Br, p.Tq) + p.shift);
    return {.b = bh / p.NH, .h = bh % p.NH, .q0 = q0, .k_tiles = (k_end + Bc - 1) / Bc};
}

// -------------------------------------------------------------------------------------------------
// The kernel

enum Barrier { QFull, QEmpty, KFull, VFull, KEmpty, VEmpty };

// What lies where in a block's shared memory. `slot` counts Q and WorkTile, w the consumers.
template <int HS>
struct Shared {
    using Tiles = ForwardTiles<HS>;
    static constexpr int W = Tiles::Warpgroups;
    static constexpr int kMost = Tiles::MostOfABarrier;
    uint32_t base, barriers;
    WorkTile* work;  // [2], beside the slots of Q
    __device__ __forceinline__ explicit Shared(unsigned char* smem)
        : base(smem_address(smem)),
          barriers(base + Tiles::Barriers),
          work(reinterpret_cast<WorkTile*>(smem + Tiles::NextWork)) {}
    __device__ __forceinline__ void init() const {
        init(QFull, 1);
        init(QEmpty, 128);  // the warpgroup's threads
        init(KFull, 1);
        init(VFull, 1);
        init(KEmpty, 4 * W);  // every consumer warp
        init(VEmpty, 4 * W);
        fence_mbarrier_init();
    }
    __device__ __forceinline__ void init(Barrier barrier, int arrivals) const {
        for (int i = 0; i < kMost; i++)
            mbarrier_init(at(barrier, i), arrivals);
    }
    __device__ __forceinline__ uint32_t at(Barrier barrier, int i) const {  // of a stage
        return barriers + (barrier * kMost + i) * 8;
    }
    __device__ __forceinline__ uint32_t at(Barrier barrier, int slot, int w) const {
        return at(barrier, slot * W + w);
    }
    __device__ __forceinline__ uint32_t q(int slot, int w) const {
        return base + (slot * W + w) * Tiles::QBytes;
    }
    __device__ __forceinline__ uint32_t k(int stage) const {
        return base + Tiles::K + stage * Tiles::KvBytes;
    }
    __device__ __forceinline__ uint32_t v(int stage) const {
        return base + Tiles::V + stage * Tiles::KvBytes;
    }
    __device__ __forceinline__ uint32_t out(int w) const {
        return base + Tiles::Out + w * Tiles::QBytes;
    }
};

// One thread. Fetches tiles of queries until none are left, and has the TMA unit copy what each
// needs.
template <int HS>
__device__ __forceinline__ void producer(const Shared<HS>& shared, const CUtensorMap& q_map,
                                         const CUtensorMap& k_map, const CUtensorMap& v_map,
                                         const Problem& p) {
    using Tiles = ForwardTiles<HS>;
    constexpr int Br = Tiles::Br;
    constexpr int Bc = Tiles::Bc;
    constexpr int W = Tiles::Warpgroups;
    PipelineState<Tiles::Stages> at;
    WorkTile w;
    // `rows` tokens from row0 on: HS/64 boxes of 64 columns, which follow each other in shared
    // memory.
    auto load = [&](uint32_t to, const CUtensorMap& map, uint32_t barrier, int rows, int row0) {
        mbarrier_arrive_expect(barrier, rows * HS * 2);  // publishes shared.work too
        for (int d = 0; d < HS; d += 64)
            tma_load_4d(to + d * rows * 2, &map, barrier, d, w.h, row0, w.b);
    };
    for (int i = 0, item = blockIdx.x;; i++) {
        for (int wg = 0; wg < W; wg++)
            mbarrier_wait(shared.at(QEmpty, i % 2, wg), (i / 2 & 1) ^ 1);
        if (item >= p.items) {
            shared.work[i % 2].b = -1;
            for (int wg = 0; wg < W; wg++)
                mbarrier_arrive(shared.at(QFull, i % 2, wg));
            break;
        }
        w = work_item<Br, Bc>(p, item);
        // The tile after this one. Waiting for the answer after the loads instead was not faster.
        const int taken = atomicAdd(&next_item[p.counter], 1);
        // every block has asked for the last time
        if (taken == p.items - 1)
            next_item[p.counter] = 0;
        item = gridDim.x + taken;
        shared.work[i % 2] = w;
        for (int wg = 0; wg < W; wg++)
            load(shared.q(i % 2, wg), q_map, shared.at(QFull, i % 2, wg), 64,
                 max(0, w.q0 + 64 * wg));
        for (int j = w.k_tiles - 1; j >= 0; j--, ++at) {
            mbarrier_wait(shared.at(KEmpty, at.index), at.phase ^ 1);
            load(shared.k(at.index), k_map, shared.at(KFull, at.index), Bc, j * Bc);
            mbarrier_wait(shared.at(VEmpty, at.index), at.phase ^ 1);
            load(shared.v(at.index), v_map, shared.at(VFull, at.index), Bc, j * Bc);
        }
    }
}

// A consumer: the registers of a warpgroup, and what it does with them. A thread holds the
// accumulators' elements of rows lane/4 and lane/4 + 8 of its warp's 16.
template <int HS>
struct Consumer {
    using Tiles = ForwardTiles<HS>;
    static constexpr int Bc = Tiles::Bc, Stages = Tiles::Stages;

    const Problem& p;
    const Shared<HS>& shared;
    const int wg, warp, lane;
    PipelineState<Stages> at;  // the tile of keys whose S comes next, or is at hand
    int first_q;               // the warpgroup's first query
    uint32_t q;                // where its queries lie
    float s[Bc / 8][4];        // S, then P
    float o[HS / 8][4];
    uint32_t p_regs[Bc / 16][4];  // P as A operand
    float l[2], m[2];             // l: this lane's columns only, summed at the end
    // the last tile's e^{old m − m}, where it raised m, and its parts of l
    float alpha[2], l_tile[1][4];

    __device__ __forceinline__ Consumer(const Problem& p, const Shared<HS>& shared, int wg)
        : p(p), shared(shared), wg(wg), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {}

    // After a wgmma_wait, which speaks for the warp, not the warpgroup.
    __device__ __forceinline__ void release(uint32_t barrier) const {
        if (lane == 0)
            mbarrier_arrive(barrier);
    }

    // Starts S = Q Kᵀ for the tile's first keys, as many as s has columns.
    template <int N>
    __device__ __forceinline__ void multiply_qk(float (&s)[N][4]) {
        const uint64_t q_descriptor = wgmma_descriptor(q);
        const uint64_t k_descriptor = wgmma_descriptor(shared.k(at.index));
        wgmma_fence();
        for (int kk = 0; kk < HS / 16; kk++)
            wgmma_ss(s, wgmma_advance(q_descriptor, kk / 4 * 64 * 128 + kk % 4 * 32),
                     wgmma_advance(k_descriptor, kk / 4 * Bc * 128 + kk % 4 * 32), kk > 0);
        wgmma_commit();
    }
    // The same by mma.sync, for one warp's rows alone: wgmma needs all four.
    __device__ __forceinline__ void multiply_qk_alone() {
        for (auto& s_n : s)
            for (float& x : s_n)
                x = 0.f;
        auto swizzled = [](int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); };
#pragma unroll 1
        for (int kk = 0; kk < HS / 16; kk++) {
            const uint32_t q_tile = q + kk / 4 * 64 * 128;
            const uint32_t k_tile = shared.k(at.index) + kk / 4 * Bc * 128;
            uint32_t a[4];
            uint32_t b[4];
            ldmatrix_x4(a, q_tile + swizzled(16 * warp + lane % 16, kk % 4 * 2 + lane / 16));
            for (int n = 0; n < Bc / 8; n += 2) {
                ldmatrix_x4(b, k_tile + swizzled(8 * n + lane % 8 + lane / 16 * 8,
                                                 kk % 4 * 2 + lane / 8 % 2));
                mma_m16n8k16_bf16(s[n], a, b[0], b[1]);
                mma_m16n8k16_bf16(s[n + 1], a, b[2], b[3]);
            }
        }
    }
    // Starts O += P V for the tile's first Keys, and between products of 16 keys does what `beside`
    // does.
    template <int Keys, class Beside>
    __device__ __forceinline__ void multiply_pv(int stage, Beside beside) {
        const uint64_t v_descriptor = wgmma_descriptor(shared.v(stage), Bc * 128);
        wgmma_fence_operand(p_regs);
        wgmma_fence_operand(o);
        for (int kk = 0; kk < Keys / 16; kk++) {
            wgmma_fence();
            wgmma_rs<true>(o, p_regs[kk], wgmma_advance(v_descriptor, kk * 16 * 128), true);
            beside(kk);
        }
        wgmma_fence();
        wgmma_commit();
    }

    // Eight columns of s → P = exp(S − m).
    __device__ __forceinline__ void exponentials(float (&s_n)[4], const float (&m_log2)[2]) {
        for (int e = 0; e < 4; e++) {
            s_n[e] = exp2_approx(fmaf(s_n[e], p.scale_log2, -m_log2[e / 2]));
            l_tile[0][e] += s_n[e];  // four chains: an addition's latency is four clocks
        }
    }
    // The textbook's way: mask, raise m to the maximum, P.
    template <bool Masked, int N>
    __device__ __forceinline__ void softmax(float (&s)[N][4], int j) {
        for (int r = 0; r < 2 && Masked; r++) {
            const int query = first_q + 16 * warp + 8 * r + lane / 4;
            const int end = min(p.Tk, query + p.shift + 1) - j * Bc - lane % 4 * 2;
            for (int n = 0; n < N; n++)
                for (int e = 0; e < 2; e++)
                    if (8 * n + e >= end)
                        s[n][2 * r + e] = -INFINITY;
        }
        for (int r = 0; r < 2; r++) {
            float x0 = m[r];
            float x1 = s[0][2 * r + 1];
            for (int n = 0; n < N; n++) {
                x0 = fmaxf(x0, s[n][2 * r]);
                x1 = fmaxf(x1, s[n][2 * r + 1]);
            }
            float x = fmaxf(x0, x1);
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            alpha[r] = x == -INFINITY ? 1.f : exp2_approx((m[r] - x) * p.scale_log2);
            m[r] = x;
        }
        const float m_log2[2] = {m[0] == -INFINITY ? 0.f : m[0] * p.scale_log2,
                                 m[1] == -INFINITY ? 0.f : m[1] * p.scale_log2};
        for (float& x : l_tile[0])
            x = 0.f;
        for (auto& s_n : s)
            exponentials(s_n, m_log2);
        wgmma_fence_operand(s);
        wgmma_fence_operand(l_tile);
    }
    __device__ __forceinline__ void rescale() {
        for (int r = 0; r < 2; r++) {
            l[r] *= alpha[r];
            for (int n = 0; n < HS / 8; n++) {
                o[n][2 * r] *= alpha[r];
                o[n][2 * r + 1] *= alpha[r];
            }
        }
    }
    template <int N>
    __device__ __forceinline__ void pack(const float (&s)[N][4]) {
        for (int n = 0; n < Bc / 8; n++)
            for (int r = 0; r < 2; r++)
                p_regs[n / 2][n % 2 * 2 + r] = n < N ? pack_bf16(s[n][2 * r], s[n][2 * r + 1]) : 0;
    }

    // The first tile of keys, or its first half.
    template <int N>
    __device__ __forceinline__ void first(float (&s)[N][4], int j) {
        multiply_qk(s);
        wgmma_wait<0>(s);
        release(shared.at(KEmpty, at.index));
        softmax<true>(s, j);
        pack(s);
    }
    // S of tile j beside O += P V of the tile before it, of which P covers Keys.
    template <bool Masked, int Keys = Bc>
    __device__ __forceinline__ void step(int j) {
        const int previous = at.index;
        ++at;
        mbarrier_wait(shared.at(KFull, at.index), at.phase);
        multiply_qk(s);
        bool out_of_range = false;
        if constexpr (Masked) {
            multiply_pv<Keys>(previous, [](int) {});
            wgmma_wait<1>(s);
            softmax<true>(s, j);
        } else {
            wgmma_wait<0>(s);
            for (float& x : l_tile[0])
                x = 0.f;
            // [quote]
            const float m_log2[2] = {m[0] * p.scale_log2, m[1] * p.scale_log2};
            multiply_pv<Keys>(previous, [&](int kk) {
                constexpr int N = 2 * Bc / Keys;  // of 8 columns
                for (int n = kk * N; n < (kk + 1) * N; n++)
                    exponentials(s[n], m_log2);
            });
            wgmma_fence_operand(s);
            wgmma_fence_operand(l_tile);
            // A row outgrew m, or m is still −∞, for then every exponent is +∞; true for NaN.
            out_of_range = __any_sync(
                ~0u, !(l_tile[0][0] + l_tile[0][1] + l_tile[0][2] + l_tile[0][3] <= 0x1p60f));
            // [end]
        }
        // For the next step's P V. Here, because a loop keeps the compiler from moving the
        // exponentials past the wait below: they are to run beside O += P V.
        mbarrier_wait(shared.at(VFull, at.index), at.phase);
        wgmma_wait<0>(o);
        if (out_of_range) {
            multiply_qk_alone();
            softmax<false>(s, j);
        }
        if (out_of_range || Masked)
            rescale();
        release(shared.at(KEmpty, at.index));
        release(shared.at(VEmpty, previous));
        pack(s);
        for (int r = 0; r < 2; r++)
            l[r] += l_tile[0][2 * r] + l_tile[0][2 * r + 1];
    }

    // All of a tile of queries but its end: O, m and l.
    __device__ __forceinline__ void attend(const WorkTile& w, int slot) {
        first_q = w.q0 + 64 * wg;
        q = shared.q(slot, wg);
        // 0: no queries here
        const int k_end = first_q < 0 ? 0 : min(p.Tk, min(first_q + 64, p.Tq) + p.shift);
        // The tiles that some query here sees, and those that all see whole.
        const int my_tiles = (k_end + Bc - 1) / Bc;
        const int unmasked = max(0, min(p.Tk, first_q + p.shift + 1) / Bc);
        for (int r = 0; r < 2; r++) {
            m[r] = -INFINITY;
            l[r] = 0.f;
        }
        for (int n = 0; n < HS / 8; n++)
            for (int e = 0; e < 4; e++)
                o[n][e] = 0.f;

        int j = w.k_tiles - 1;
        for (; j >= my_tiles; j--, ++at) {  // beyond this warpgroup's queries
            mbarrier_wait(shared.at(KFull, at.index), at.phase);
            release(shared.at(KEmpty, at.index));
            mbarrier_wait(shared.at(VFull, at.index), at.phase);
            release(shared.at(VEmpty, at.index));
        }
        if (my_tiles == 0) {
            mbarrier_arrive(shared.at(QEmpty, slot, wg));
            return;
        }
        mbarrier_wait(shared.at(KFull, at.index), at.phase);
        // The diagonal leaves every other warpgroup only half a tile: half the products, half the
        // exponentials.
        float half[8][4];
        const bool is_half = k_end - j * Bc <= 64;
        if (is_half)
            first(half, j);
        else
            first(s, j);
        mbarrier_wait(shared.at(VFull, at.index), at.phase);
        for (int r = 0; r < 2; r++)
            l[r] = l_tile[0][2 * r] + l_tile[0][2 * r + 1];
        j--;
        if (is_half && j >= 0 && j < unmasked)
            step<false, 64>(j--);
        for (; j >= unmasked; j--)
            step<true>(j);
        for (; j >= 0; j--)
            step<false>(j);
        mbarrier_arrive(shared.at(QEmpty, slot, wg));
        multiply_pv<Bc>(at.index, [](int) {});
        wgmma_wait<0>(o);
        release(shared.at(VEmpty, at.index));
        ++at;
    }

    // o becomes out, and lse that of the thread's two rows.
    __device__ __forceinline__ void normalise(float (&lse)[2]) {
        for (int r = 0; r < 2; r++) {
            float sum = l[r];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const float inverse = __fdividef(1.f, sum);
            lse[r] = (m[r] * p.scale_log2 + __log2f(sum)) * static_cast<float>(M_LN2);
            for (int n = 0; n < HS / 8; n++) {
                o[n][2 * r] *= inverse;
                o[n][2 * r + 1] *= inverse;
            }
        }
    }

    // Writes lse, and out by way of shared memory if it is bf16. A tile of fp32 would not fit there
    // at HS 128.
    template <class Y>
    __device__ __forceinline__ void store(const WorkTile& w, const float (&lse)[2],
                                          const CUtensorMap& out_map) const {
        float* lse_rows = p.lse.ptr + (static_cast<size_t>(w.b) * p.NH + w.h) * p.lse.head_stride;
        const int row = first_q + 16 * warp + lane / 4;
        for (int r = 0; r < 2; r++)
            if (lane % 4 == 0 && first_q >= 0 && row + 8 * r < p.Tq)
                lse_rows[row + 8 * r] = lse[r];
        const bool leader = threadIdx.x % 128 == 0;
        if (leader)
            bulk_wait_read<0>();
        // the last store has left shared memory. Without it fp32 would spill
        named_barrier_sync(1 + wg, 128);
        if constexpr (std::is_same_v<Y, float>) {
            for (int r = 0; r < 2; r++) {
                if (first_q < 0 || row + 8 * r >= p.Tq)
                    continue;
                float2* to =
                    reinterpret_cast<float2*>(p.out.row(w.b, row + 8 * r, w.h, HS)) + lane % 4;
                for (int n = 0; n < HS / 8; n++)
                    to[4 * n] = make_float2(o[n][2 * r], o[n][2 * r + 1]);
            }
            return;
        }
        const uint32_t out = shared.out(wg) + (16 * warp + lane % 16) * 128;
        for (int n = 0; n < HS / 8; n += 2) {
            uint32_t packed[4];
            for (int k = 0; k < 4; k++)
                packed[k] = pack_bf16(o[n + k / 2][k % 2 * 2], o[n + k / 2][k % 2 * 2 + 1]);
            stmatrix_x4(out + n / 8 * 64 * 128 + (((n % 8 + lane / 16) ^ (lane & 7)) << 4), packed);
        }
        fence_proxy_async();
        named_barrier_sync(1 + wg, 128);
        if (leader && first_q >= 0) {
            for (int d = 0; d < HS; d += 64)
                tma_store_4d(&out_map, shared.out(wg) + d * 64 * 2, d, w.h, first_q, w.b);
            bulk_commit();
        }
    }
};

template <int HS, class Y>
__global__ __launch_bounds__(ForwardTiles<HS>::Threads,
                             1) void forward_kernel(const __grid_constant__ CUtensorMap q_map,
                                                    const __grid_constant__ CUtensorMap k_map,
                                                    const __grid_constant__ CUtensorMap v_map,
                                                    const __grid_constant__ CUtensorMap out_map,
                                                    const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Tiles = ForwardTiles<HS>;
    extern __shared__ __align__(1024) unsigned char smem[];
    const Shared<HS> shared{smem};
    if (threadIdx.x == 0)
        shared.init();
    __syncthreads();

    // The shuffle tells the compiler that a warp's threads agree: wgmma may not stand where they
    // could part.
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup == 0) {  // the producer
        setmaxnreg_dec<Tiles::ProducerRegisters>();
        if (threadIdx.x == 0)
            producer(shared, q_map, k_map, v_map, p);
    } else {
        setmaxnreg_inc<Tiles::ConsumerRegisters>();
        Consumer<HS> consumer(p, shared, warpgroup - 1);
        for (int i = 0;; i++) {
            mbarrier_wait(shared.at(QFull, i % 2, warpgroup - 1), i / 2 & 1);
            WorkTile w = shared.work[i % 2];
            w.b = __shfl_sync(~0u, w.b, 0);
            w.q0 = __shfl_sync(~0u, w.q0, 0);
            w.k_tiles = __shfl_sync(~0u, w.k_tiles, 0);
            if (w.b < 0)
                break;
            consumer.attend(w, i % 2);
            float lse[2];
            consumer.normalise(lse);
            consumer.template store<Y>(w, lse, out_map);
        }
        if (threadIdx.x % 128 == 0)
            bulk_wait_read<0>();  // shared memory must outlive the reads
    }
#endif
}

// -------------------------------------------------------------------------------------------------
// Launchers

constexpr char kName[] = "flash_bf16_sm90";

template <int HS, class Y>
void launch(const Cuda& dev, const AttentionForward<bf16, Y>& c) {
    using Tiles = ForwardTiles<HS>;
    const AttentionShape& s = c.s;
    // K and V of a group of heads stay in L2 (50 MB). Not less: each group ends with its short
    // tiles, in which SMs wait. And groups as alike as can be: a small last one begins its long
    // tiles when the others have ended theirs.
    constexpr size_t kGroupBytes = 32 << 20;
    Problem p{};
    p.NH = s.NH;
    p.Tq = s.Tq;
    p.Tk = s.Tk;
    p.heads = s.B * s.NH;
    p.shift = s.shift();
    p.scale_log2 = s.scale_log2();
    p.tiles = ceil_div(s.Tq, Tiles::Br);
    const size_t most =
        std::clamp<size_t>(kGroupBytes / (4 * static_cast<size_t>(s.Tk) * HS), 1, p.heads);
    p.group = ceil_div(p.heads, ceil_div(p.heads, static_cast<int>(most)));
    p.lse = c.lse;
    const size_t items = static_cast<size_t>(p.tiles) * p.heads;
    if (items > INT_MAX / 2)
        throw Error(
            format("%s: %zu tiles, more than %d: use a smaller batch", kName, items, INT_MAX / 2));
    p.items = static_cast<int>(items);
    p.counter = launches++ % kCounters;

    const CUtensorMap q_map = tensor_map("q", c.q, s.queries(), 64);
    const CUtensorMap k_map = tensor_map("k", c.k, s.keys(), Tiles::Bc);
    const CUtensorMap v_map = tensor_map("v", c.v, s.keys(), Tiles::Bc);
    CUtensorMap out_map = q_map;
    if constexpr (std::is_same_v<Y, float>)
        p.out = c.out;
    else
        out_map = tensor_map("out", c.out, s.queries(), 64);
    const auto kernel = forward_kernel<HS, Y>;
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiles::Smem));
    kernel<<<std::min(p.items, dev.num_sms), Tiles::Threads, Tiles::Smem, dev.stream>>>(
        q_map, k_map, v_map, out_map, p);
    LAUNCH_CHECK(kName);
}

template <class Y>
void forward(const Cuda& dev, const AttentionForward<bf16, Y>& c) {
    with_head_size(c.s.HS, [&](auto HS) { launch<HS>(dev, c); });
}

}  // namespace

const AttentionKernel<bf16> flash_bf16_sm90 = {
    .name = kName,
    .min_sm = 90,
    .flash = true,
    .supports = {.pieces = true},
    .scratch_bytes = sm90_bytes,
    .unchecked = {.forward = forward<bf16>,
                  .backward = sm90_backward<bf16>,
                  .forward_fp32 = forward<float>,
                  .backward_fp32 = sm90_backward<float>},
};
