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
// diagonal one) is nearly always good enough for the whole row. It is never too large, because it
// is one of the row's own S, whose P is 1. Only if what a lane adds to l for a tile exceeds 2^60,
// or a row has met no key before, does its warp need a new m. It then computes S of that tile
// again, by itself, and takes a step of the textbook's online softmax. So 64 maxima, 4 shuffles and
// the rescaling of O are gone from the loop.
//
// A warpgroup's step, for tile j of keys; it walks from the last tile to the first. While its own
// exponentials run, the tensor cores also serve the other warpgroups:
//
//   start S = Q K_jᵀ │ wait for S │ start O += P V_{j+1}, 16 keys at a time, │ wait for O: release
//                    │            │ and P_j = exp(S − m), l += between them  │ both tiles, pack P_j
//
//   operand  where                                      layout
//   Q        shared memory, 2 slots a warpgroup         A of S: rows of 128 bytes, swizzled by TMA
//   K        shared memory, Stages tiles of 128 keys    B of S, not transposed
//   P        registers: S's accumulator packed to bf16  A of O
//   V        shared memory, Stages tiles                B of O, transposed by wgmma
//   S, O     registers                                  accumulators, fp32
//
// A block stays on its SM and fetches work tiles, which are tiles of queries of a head, until none
// are left. While consumers finish one, the producer loads the next. struct SharedMemory has the
// mbarriers by which they wait for each other.
//
// Writes: out (bf16 or fp32), lse (every element).  Backward: flash_bf16_sm90_backward.cu.
// Limits: HS in {64, 128}, any Tq and Tk, scale > 0, compute capability 9.0 alone.
// Run: ./dev/bench_attention --kernel flash_bf16_sm90
#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>

#include "attention/flash_bf16_sm90.h"
#include "attention/fragments.cuh"
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
// are two. The producer's warpgroup gives them the registers that it does not need.

template <int HS>
struct ForwardTiles {
    static constexpr int Warpgroups = HS == 64 ? 3 : 2;  // consumers, 64 queries each
    static constexpr int Br = 64 * Warpgroups;
    static constexpr int Bc = 128;
    static constexpr int Stages = HS == 64 ? 4 : 2;  // of K and V, as many as fit
    static constexpr int Threads = 128 * (1 + Warpgroups);
    static constexpr int ProducerRegisters = HS == 64 ? 32 : 40;
    static constexpr int ConsumerRegisters = HS == 64 ? 160 : 232;
};

// -------------------------------------------------------------------------------------------------
// What a launch covers, and the tile scheduler

struct ForwardArgs {
    int NH;
    int Tq;
    int Tk;
    int heads;         // B·NH
    int shift;         // query i sees keys j ≤ i + shift
    int tiles;         // of queries, of one head
    int group;         // heads that are worked on together
    int work_tiles;    // tiles·heads
    int counter;       // the launch's, in next_ticket
    float scale_log2;  // scale·log2(e): the exponentials are powers of 2
    RowStatsView<float> lse;
    HeadsView<float> out;  // if the results are fp32. In bf16 a tensor map says where they go
};

// A tile of queries of one head.
struct ForwardWorkTile {
    int b;  // −1: there are no more
    int h;
    int q0;
    int k_tiles;  // that its last query sees
};

// Blocks take work tiles by ticket when they are ready for them, which balances what no fixed
// assignment does: the tiles' lengths differ, and so do SMs. Tickets 0 to gridDim.x − 1 are the
// blocks' first. Each launch has a counter for the others, because launches may run at once. With
// each work tile a block takes one more ticket, so the counter ends at work_tiles. Whoever takes
// the last ticket sets it back to 0 for the launch kCounters later, which must not start before.
constexpr int kCounters = 1024;
__device__ int next_ticket[kCounters];
std::atomic<unsigned> launches;

__device__ __forceinline__ int take_ticket(const ForwardArgs& args) {
    const int taken = atomicAdd(&next_ticket[args.counter], 1);
    const bool is_last = taken == args.work_tiles - 1;
    if (is_last)
        next_ticket[args.counter] = 0;
    return gridDim.x + taken;
}

// Heads run in groups whose keys and values stay in L2. Within a group the longest tiles come
// first, so that the last to finish are short. Tiles are counted from the end, which is Tq rounded
// up to 64. If Br does not divide the end, the tile of the first queries, which see the fewest
// keys, begins before query 0, and so do some of its warpgroups. As all begin at multiples of 64,
// these have no queries.
template <int Br, int Bc>
__device__ __forceinline__ ForwardWorkTile work_tile(const ForwardArgs& args, int ticket) {
    const int first_head = ticket / (args.group * args.tiles) * args.group;  // of its group
    const int heads_of_group = min(args.group, args.heads - first_head);  // the last may have fewer
    const int i = ticket - first_head * args.tiles;  // the ticket's number within its group
    const int nth = i / heads_of_group;              // of the head's tiles, from the end
    const int bh = first_head + i % heads_of_group;
    const int end = ceil_div<64>(args.Tq) * 64;
    const int q0 = end - (nth + 1) * Br;
    const int q_end = min(q0 + Br, args.Tq);
    const int k_end = min(args.Tk, q_end + args.shift);
    return {.b = bh / args.NH, .h = bh % args.NH, .q0 = q0, .k_tiles = ceil_div<Bc>(k_end)};
}

// -------------------------------------------------------------------------------------------------
// A block's shared memory: 200 KB at HS 64, 224 KB at HS 128, and the barriers

// Tiles are panels of 64 columns, one after the other, in TMA's 128-byte swizzle, for which each is
// aligned to 1024 bytes.
constexpr int kRowBytes = 128;  // of a panel

template <int HS>
struct SharedMemory {
    using Tiles = ForwardTiles<HS>;
    static constexpr int W = Tiles::Warpgroups;
    static constexpr int Stages = Tiles::Stages;

    struct alignas(1024) QTile {  // a warpgroup's
        bf16 x[64 * HS];
    };
    struct alignas(1024) KvTile {
        bf16 x[Tiles::Bc * HS];
    };

    PipelineBuffer<QTile[W], 2> q;
    QTile out[W];
    PipelineBuffer<KvTile, Stages> k;
    PipelineBuffer<KvTile, Stages> v;

    // clang-format off
    //                                who waits ← who arrives: when
    FullBarriers<2>       q_full[W];  // a warpgroup ← TMA: its Q is there, and work_tile
    EmptyBarriers<2>      q_empty[W]; // producer ← the warpgroup: the last product with Q is done
    FullBarriers<Stages>  k_full;     // consumers ← TMA: K is there
    FullBarriers<Stages>  v_full;     // consumers ← TMA: V is there
    EmptyBarriers<Stages> k_empty;    // producer ← a lane of every consumer warp: S is done
    EmptyBarriers<Stages> v_empty;    // producer ← a lane of every consumer warp: O is done
    // clang-format on

    PipelineBuffer<ForwardWorkTile, 2> work_tile;  // the one whose queries are in q

    __device__ __forceinline__ void init_barriers() {
        constexpr int kProducer = 1;  // threads
        constexpr int kWarpgroup = 128;
        constexpr int kConsumerWarps = 4 * W;

        for (int wg = 0; wg < W; wg++) {
            q_full[wg].init(kProducer);
            q_empty[wg].init(kWarpgroup);
        }
        k_full.init(kProducer);
        v_full.init(kProducer);
        k_empty.init(kConsumerWarps);
        v_empty.init(kConsumerWarps);
        fence_mbarrier_init();
    }

    __device__ __forceinline__ uint32_t q_address(PipelineState<2> i, int wg) const {
        return q.address(i) + wg * uint32_t{sizeof(QTile)};
    }
};

// -------------------------------------------------------------------------------------------------
// The producer: one thread. Fetches work tiles until none are left, and has the TMA unit copy what
// each needs. Here and in the consumers, i counts the block's work tiles, so it is the use of Q.
//   work tile i: wait for room · work_tile(i), Q(i) of each warpgroup · K, V of the last tile of
//   keys · K, V of the one before it · … · K, V of tile 0

template <int HS>
struct Producer {
    using Tiles = ForwardTiles<HS>;
    static constexpr int Bc = Tiles::Bc;
    static constexpr int W = Tiles::Warpgroups;

    SharedMemory<HS>& shared;
    const CUtensorMap& q_map;
    const CUtensorMap& k_map;
    const CUtensorMap& v_map;
    const ForwardArgs& args;
    PipelineState<Tiles::Stages> kv = {};
    ForwardWorkTile tile;

    __device__ __forceinline__ void run() {
        int ticket = blockIdx.x;
        for (int i = 0;; i++) {
            for (int wg = 0; wg < W; wg++)
                shared.q_empty[wg].wait(i);
            if (ticket >= args.work_tiles) {
                shared.work_tile[i].b = -1;
                for (int wg = 0; wg < W; wg++)
                    shared.q_full[wg].arrive(i);
                return;
            }

            tile = work_tile<Tiles::Br, Bc>(args, ticket);
            // For the work tile after this one. Here the thread waits for the counter's answer
            // before it loads; to wait after the loads was not faster.
            ticket = take_ticket(args);
            shared.work_tile[i] = tile;
            for (int wg = 0; wg < W; wg++) {
                // A warpgroup without queries gets some too, and ignores them.
                const int first_q = max(0, tile.q0 + 64 * wg);
                load<64>(shared.q_address(i, wg), q_map, first_q, shared.q_full[wg].address(i));
            }
            for (int j = tile.k_tiles - 1; j >= 0; j--) {
                shared.k_empty.wait(kv);
                load<Bc>(shared.k.address(kv), k_map, j * Bc, shared.k_full.address(kv));
                shared.v_empty.wait(kv);
                load<Bc>(shared.v.address(kv), v_map, j * Bc, shared.v_full.address(kv));
                ++kv;
            }
        }
    }

    // Copies `Rows` tokens from row0 on, panel by panel.
    template <int Rows>
    __device__ __forceinline__ void load(uint32_t to, const CUtensorMap& map, int row0,
                                         uint32_t full) const {
        mbarrier_arrive_expect(full, Rows * HS * sizeof(bf16));  // publishes shared.work_tile too
        for (int d = 0; d < HS; d += 64)
            tma_load_4d(to + d / 64 * Rows * kRowBytes, &map, full, d, tile.h, row0, tile.b);
    }
};

// -------------------------------------------------------------------------------------------------
// A consumer: the registers of a warpgroup, and what it does with them. Of its warp's 16 rows of an
// accumulator a thread has lane/4 and lane/4 + 8, here r = 0 and 1 (fragments.cuh).

template <int HS>
struct Consumer {
    using Tiles = ForwardTiles<HS>;
    static constexpr int Bc = Tiles::Bc;

    const ForwardArgs& args;
    SharedMemory<HS>& shared;
    const int wg;
    const int warp;

    PipelineState<Tiles::Stages> kv;  // the tile of keys whose S comes next, or is at hand
    int first_q;                      // the warpgroup's first query
    uint32_t q;                       // the address of its tile of Q
    float s[Bc / 8][4];               // S before it is scaled, then P
    float o[HS / 8][4];
    uint32_t p_regs[Bc / 16][4];  // P as A operand
    float l[2];                   // this lane's columns only, summed at the end
    float m[2];                   // of S before it is scaled
    float alpha[2];               // e^{scale·(old m − m)}, from softmax
    float l_tile[1][4];  // the tile's part of l: two sums a row, shaped for wgmma_fence_operand

    __device__ __forceinline__ Consumer(const ForwardArgs& args, SharedMemory<HS>& shared, int wg)
        : args(args), shared(shared), wg(wg), warp(threadIdx.x / 32 % 4) {}

    // After a wgmma_wait, which speaks for the warp, not the warpgroup.
    __device__ __forceinline__ void release(uint32_t barrier) const {
        if (threadIdx.x % 32 == 0)
            mbarrier_arrive(barrier);
    }

    // Starts S = Q Kᵀ for the tile's first keys, as many as s has columns. Here and below, the
    // parameter s is the member or, in a first step with half a tile, attend()'s `half`. With
    // wgmma_ss_set for the first k-step the kernel would spill at HS 64.
    template <int N>
    __device__ __forceinline__ void start_s(float (&s)[N][4]) {
        const uint64_t q_tile = wgmma_descriptor(q);
        const uint64_t k_tile = wgmma_descriptor(shared.k.address(kv));
        wgmma_fence();
        for (int kk = 0; kk < HS / 16; kk++)
            wgmma_ss(s, wgmma_column_step<64>(q_tile, kk), wgmma_column_step<Bc>(k_tile, kk),
                     kk > 0);
        wgmma_commit();
    }
    // The same by mma.sync, for one warp's rows alone: wgmma needs all four.
    __device__ __forceinline__ void multiply_qk_alone() {
        // Read here, or addresses for this rare case would be kept in the loop, and spill.
        const int lane = lane_id();
        for (auto& s_n : s)
            for (float& x : s_n)
                x = 0.f;

        // Where a row's 16-byte piece is in a panel, in bytes.
        auto swizzled = [](int row, int piece) {
            return row * kRowBytes + ((piece ^ (row & 7)) << 4);
        };
#pragma unroll 1
        for (int kk = 0; kk < HS / 16; kk++) {
            const uint32_t q_panel = q + kk / 4 * 64 * kRowBytes;
            const uint32_t k_panel = shared.k.address(kv) + kk / 4 * Bc * kRowBytes;
            const int piece = kk % 4 * 2;  // the first of the k-step's two
            uint32_t a[4];
            uint32_t b[4];
            // Lanes give the rows of a's and b's quadrants as in block16 and block16_b
            // (mma_tiles.cuh).
            ldmatrix_x4(a, q_panel + swizzled(16 * warp + lane % 16, piece + lane / 16));
            for (int n = 0; n < Bc / 8; n += 2) {
                const int row = 8 * n + lane % 8 + lane / 16 * 8;
                ldmatrix_x4(b, k_panel + swizzled(row, piece + lane / 8 % 2));
                mma_m16n8k16_bf16(s[n], a, b[0], b[1]);
                mma_m16n8k16_bf16(s[n + 1], a, b[2], b[3]);
            }
        }
    }
    // Starts O += P V for the tile's first Keys, and after each k-step of 16 keys runs
    // `interleaved`. The caller has waited for V.
    template <int Keys, class Interleaved>
    __device__ __forceinline__ void start_o(PipelineState<Tiles::Stages> kv,
                                            Interleaved interleaved) {
        const uint64_t v_tile = wgmma_descriptor(shared.v.address(kv), Bc * kRowBytes);
        wgmma_fence_operand(p_regs);
        wgmma_fence_operand(o);
        for (int kk = 0; kk < Keys / 16; kk++) {
            wgmma_fence();
            wgmma_rs<true>(o, p_regs[kk], wgmma_row_step(v_tile, kk), true);
            interleaved(kk);
        }
        wgmma_fence();  // without it, ptxas inserts one and says so (C7519)
        wgmma_commit();
    }

    // Eight columns of s → P = exp(S − m).
    __device__ __forceinline__ void exponentials(float (&s_n)[4], const float (&m_log2)[2]) {
        for (int e = 0; e < 4; e++) {
            s_n[e] = exp2_approx(fmaf(s_n[e], args.scale_log2, -m_log2[e / 2]));
            l_tile[0][e] += s_n[e];  // four chains: an addition's latency is four clocks
        }
    }
    template <int N>
    __device__ __forceinline__ void mask(float (&s)[N][4], int j) const {
        const int lane = threadIdx.x % 32;
        for (int r = 0; r < 2; r++) {
            const int query = fragment_row(first_q + 16 * warp, 2 * r, lane);
            // How many columns it sees, counted from this lane's first.
            const int visible = visible_keys(query, args.Tk, args.shift) - j * Bc - lane % 4 * 2;
            for (int n = 0; n < N; n++)
                for (int e = 0; e < 2; e++)
                    if (8 * n + e >= visible)
                        s[n][2 * r + e] = -INFINITY;
        }
    }
    // A step of the textbook's online softmax: raises m to the maximum, then computes P.
    template <int N>
    __device__ __forceinline__ void softmax(float (&s)[N][4]) {
        for (int r = 0; r < 2; r++) {
            float x0 = m[r];
            float x1 = s[0][2 * r + 1];
            for (int n = 0; n < N; n++) {
                x0 = fmaxf(x0, s[n][2 * r]);
                x1 = fmaxf(x1, s[n][2 * r + 1]);
            }
            const float m_new = quad_max(fmaxf(x0, x1));
            alpha[r] = m_new == -INFINITY ? 1.f : exp2_approx((m[r] - m_new) * args.scale_log2);
            m[r] = m_new;
        }
        const float m_log2[2] = {m[0] == -INFINITY ? 0.f : m[0] * args.scale_log2,
                                 m[1] == -INFINITY ? 0.f : m[1] * args.scale_log2};
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
            scale_row(o, r, alpha[r]);
        }
    }
    // P as A operand. A half tile leaves the other half 0.
    template <int N>
    __device__ __forceinline__ void pack(const float (&s)[N][4]) {
        for (int n = 0; n < Bc / 8; n++)
            for (int r = 0; r < 2; r++)
                p_regs[n / 2][n % 2 * 2 + r] = n < N ? pack_bf16(s[n][2 * r], s[n][2 * r + 1]) : 0;
    }

    // The first tile of keys, or its first half.
    template <int N>
    __device__ __forceinline__ void first_step(float (&s)[N][4], int j) {
        start_s(s);
        wgmma_wait<0>(s);
        release(shared.k_empty.address(kv));
        mask(s, j);
        softmax(s);
        pack(s);
    }

    // Computes S and P of tile j, and adds P V of the tile before it, j + 1, to O. Of that tile it
    // multiplies the first PreviousKeys, 64 if it was a half tile.
    //   start S(j) · wait for it · start O += P V(j+1), with P(j) between its products · wait for
    //   it · release K(j) and V(j+1) · pack P(j)
    template <int PreviousKeys = Bc>
    __device__ __forceinline__ void step() {
        const PipelineState<Tiles::Stages> previous = kv;
        ++kv;
        shared.k_full.wait(kv);
        start_s(s);
        wgmma_wait<0>(s);

        for (float& x : l_tile[0])
            x = 0.f;
        // [quote]
        const float m_log2[2] = {m[0] * args.scale_log2, m[1] * args.scale_log2};
        start_o<PreviousKeys>(previous, [&](int kk) {
            constexpr int kProducts = PreviousKeys / 16;
            constexpr int N = Bc / 8 / kProducts;  // fragments of S for each
            for (int n = kk * N; n < (kk + 1) * N; n++)
                exponentials(s[n], m_log2);
        });
        wgmma_fence_operand(s);
        wgmma_fence_operand(l_tile);
        // A row outgrew m, or its m is still −∞, so that all its P are +∞. A NaN counts too.
        const float sum = l_tile[0][0] + l_tile[0][1] + l_tile[0][2] + l_tile[0][3];
        const bool out_of_range = __any_sync(~0u, !(sum <= 0x1p60f));
        // [end]

        wait_for_o();
        if (out_of_range) {
            multiply_qk_alone();
            softmax(s);
            rescale();
        }
        finish_step(previous);
    }

    // The same for a tile that some query does not see whole, though it is not the first. There is
    // one at most, and only where shift is not a multiple of 64. All of O += P V is started before
    // the softmax, which is the textbook's. If the first tile was half a tile, this multiplies all
    // 128 keys of it too, because pack() has set the rest of P to 0.
    __device__ __forceinline__ void masked_step(int j) {
        const PipelineState<Tiles::Stages> previous = kv;
        ++kv;
        shared.k_full.wait(kv);
        start_s(s);
        start_o<Bc>(previous, [](int) {});
        wgmma_wait<1>(s);
        mask(s, j);
        softmax(s);
        wait_for_o();
        rescale();
        finish_step(previous);
    }

    // Before it waits for O it waits for V(j), which only the next start_o needs, and which nobody
    // else waits for. The loop in mbarrier_wait is why: the compiler does not move the
    // exponentials, which are to run while the tensor cores multiply, past it and so past the wait
    // for O.
    __device__ __forceinline__ void wait_for_o() {
        shared.v_full.wait(kv);
        wgmma_wait<0>(o);
    }

    __device__ __forceinline__ void finish_step(PipelineState<Tiles::Stages> previous) {
        release(shared.k_empty.address(kv));
        release(shared.v_empty.address(previous));
        pack(s);
        for (int r = 0; r < 2; r++)
            l[r] += l_tile[0][2 * r] + l_tile[0][2 * r + 1];
    }

    // All of work tile i but normalise() and store(): O, m and l.
    //   skip tiles of keys that no query here sees · the first step · masked steps · the other
    //   steps · the last O += P V
    __device__ __forceinline__ void attend(const ForwardWorkTile& tile, int i) {
        first_q = tile.q0 + 64 * wg;
        q = shared.q_address(i, wg);

        const int last_q = min(first_q + 64, args.Tq) - 1;
        const bool has_queries = first_q >= 0;
        // The last query here sees keys [0, k_end), which are in the first my_tiles tiles. All
        // queries here see the first unmasked_tiles whole.
        const int k_end = has_queries ? visible_keys(last_q, args.Tk, args.shift) : 0;
        const int my_tiles = ceil_div<Bc>(k_end);
        const int unmasked_tiles = max(0, visible_keys(first_q, args.Tk, args.shift) / Bc);

        for (int r = 0; r < 2; r++) {
            m[r] = -INFINITY;
            l[r] = 0.f;
        }
        for (int n = 0; n < HS / 8; n++)
            for (int e = 0; e < 4; e++)
                o[n][e] = 0.f;

        int j = tile.k_tiles - 1;
        for (; j >= my_tiles; j--)
            skip_tile();
        if (my_tiles == 0) {
            shared.q_empty[wg].arrive(i);
            return;
        }

        shared.k_full.wait(kv);
        // The diagonal leaves every other warpgroup only half a tile: half the products, half the
        // exponentials.
        float half[8][4];
        const bool is_half = k_end - j * Bc <= 64;
        if (is_half)
            first_step(half, j);
        else
            first_step(s, j);

        shared.v_full.wait(kv);
        for (int r = 0; r < 2; r++)
            l[r] = l_tile[0][2 * r] + l_tile[0][2 * r + 1];
        j--;

        if (is_half && j >= 0 && j < unmasked_tiles) {
            step</*PreviousKeys=*/64>();
            j--;
        }
        for (; j >= unmasked_tiles; j--)
            masked_step(j);
        for (; j >= 0; j--)
            step();

        shared.q_empty[wg].arrive(i);
        start_o<Bc>(kv, [](int) {});
        wgmma_wait<0>(o);
        release(shared.v_empty.address(kv));
        ++kv;
    }
    // Waits for what it does not read. Otherwise it could run ahead by a round, and arrive twice in
    // one phase of an empty barrier.
    __device__ __forceinline__ void skip_tile() {
        shared.k_full.wait(kv);
        release(shared.k_empty.address(kv));
        shared.v_full.wait(kv);
        release(shared.v_empty.address(kv));
        ++kv;
    }

    // o becomes out, and lse that of the thread's two rows.
    __device__ __forceinline__ void normalise(float (&lse)[2]) {
        for (int r = 0; r < 2; r++) {
            const float sum = quad_sum(l[r]);
            const float inverse = __fdividef(1.f, sum);
            lse[r] = (m[r] * args.scale_log2 + __log2f(sum)) * static_cast<float>(M_LN2);
            scale_row(o, r, inverse);
        }
    }

    // Writes lse, and out by way of shared memory if it is bf16. A tile of fp32 would not fit there
    // at HS 128.
    template <class Y>
    __device__ __forceinline__ void store(const ForwardWorkTile& tile, const float (&lse)[2],
                                          const CUtensorMap& out_map) const {
        const int lane = threadIdx.x % 32;
        const size_t bh = static_cast<size_t>(tile.b) * args.NH + tile.h;
        float* lse_rows = args.lse.ptr + bh * args.lse.head_stride;
        const int row = first_q + 16 * warp + lane / 4;
        for (int r = 0; r < 2; r++)
            if (lane % 4 == 0 && first_q >= 0 && row + 8 * r < args.Tq)
                lse_rows[row + 8 * r] = lse[r];

        const int barrier = 1 + wg;  // the warpgroup's own
        const bool leader = threadIdx.x % 128 == 0;
        if (leader)
            bulk_wait_read<0>();
        // The last out has left shared memory. fp32 does not need the barrier, but spills without.
        named_barrier_sync(barrier, 128);
        if constexpr (std::is_same_v<Y, float>) {
            store_fp32(tile, row);
            return;
        }
        store_out_swizzled();
        fence_proxy_async();
        named_barrier_sync(barrier, 128);
        if (leader && first_q >= 0) {
            const uint32_t out = smem_address(&shared.out[wg]);
            for (int d = 0; d < HS; d += 64)
                tma_store_4d(&out_map, out + d / 64 * 64 * kRowBytes, d, tile.h, first_q, tile.b);
            bulk_commit();
        }
    }
    __device__ __forceinline__ void store_fp32(const ForwardWorkTile& tile, int row) const {
        const int lane = threadIdx.x % 32;
        for (int r = 0; r < 2; r++) {
            const int t = row + 8 * r;
            if (first_q < 0 || t >= args.Tq)
                continue;
            float2* to = reinterpret_cast<float2*>(args.out.row(tile.b, t, tile.h, HS)) + lane % 4;
            for (int n = 0; n < HS / 8; n++)
                to[4 * n] = make_float2(o[n][2 * r], o[n][2 * r + 1]);
        }
    }
    __device__ __forceinline__ void store_out_swizzled() const {
        const int lane = threadIdx.x % 32;
        const int row = 16 * warp + lane % 16;
        const uint32_t row_address = smem_address(&shared.out[wg]) + row * kRowBytes;
        for (int n = 0; n < HS / 8; n += 2) {
            // The 16×16 block by quadrants: left r = 0, left r = 1, right r = 0, right r = 1.
            uint32_t packed[4];
            for (int right = 0; right < 2; right++)
                for (int r = 0; r < 2; r++)
                    packed[2 * right + r] = pack_bf16(o[n + right][2 * r], o[n + right][2 * r + 1]);
            const int panel = n / 8;
            const int piece = (n % 8 + lane / 16) ^ (lane % 8);  // of 16 bytes
            stmatrix_x4(row_address + panel * 64 * kRowBytes + (piece << 4), packed);
        }
    }
};

template <int HS, class Y>
__global__ void __launch_bounds__(ForwardTiles<HS>::Threads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map,
                   const __grid_constant__ CUtensorMap out_map,
                   const __grid_constant__ ForwardArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Tiles = ForwardTiles<HS>;
    extern __shared__ __align__(1024) unsigned char smem[];
    auto& shared = *reinterpret_cast<SharedMemory<HS>*>(smem);
    if (threadIdx.x == 0)
        shared.init_barriers();
    __syncthreads();

    // The shuffle tells the compiler that a warp's threads agree: wgmma must not be in a branch
    // where they could diverge.
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        setmaxnreg_dec<Tiles::ProducerRegisters>();
        if (threadIdx.x == 0)
            Producer<HS>{shared, q_map, k_map, v_map, args}.run();
    } else {
        setmaxnreg_inc<Tiles::ConsumerRegisters>();
        Consumer<HS> consumer(args, shared, warpgroup - 1);
        for (int i = 0;; i++) {
            shared.q_full[warpgroup - 1].wait(i);
            ForwardWorkTile tile = shared.work_tile[i];
            tile.b = __shfl_sync(~0u, tile.b, 0);
            tile.q0 = __shfl_sync(~0u, tile.q0, 0);
            tile.k_tiles = __shfl_sync(~0u, tile.k_tiles, 0);
            if (tile.b < 0)
                break;
            consumer.attend(tile, i);
            float lse[2];
            consumer.normalise(lse);
            consumer.template store<Y>(tile, lse, out_map);
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

    // K and V of a group of heads stay in L2 (50 MB). A group is as many heads as that allows, and
    // groups are as alike as can be, for the sake of the last one: SMs run out of work only at the
    // end of the launch, where the last group's short tiles have to fill the gaps that its long
    // ones leave. In a small last group they would be too few.
    constexpr size_t kGroupBytes = 32 << 20;
    static_assert(sizeof(SharedMemory<HS>) <= 227 * 1024);

    ForwardArgs args{};
    args.NH = s.NH;
    args.Tq = s.Tq;
    args.Tk = s.Tk;
    args.heads = s.B * s.NH;
    args.shift = s.shift();
    args.scale_log2 = s.scale_log2();
    args.tiles = ceil_div(s.Tq, Tiles::Br);
    const size_t head_bytes = 2 * static_cast<size_t>(s.Tk) * HS * sizeof(bf16);  // of K and V
    const size_t most_heads = std::clamp<size_t>(kGroupBytes / head_bytes, 1, args.heads);
    const int groups = ceil_div(args.heads, static_cast<int>(most_heads));
    args.group = ceil_div(args.heads, groups);
    args.lse = c.lse;
    const size_t work_tiles = static_cast<size_t>(args.tiles) * args.heads;
    // Tickets go up to work_tiles + the number of blocks.
    if (work_tiles > INT_MAX / 2)
        throw Error(format("%s: %zu work tiles are more than %d; use a smaller batch", kName,
                           work_tiles, INT_MAX / 2));
    args.work_tiles = static_cast<int>(work_tiles);
    args.counter = launches++ % kCounters;

    const CUtensorMap q_map = tensor_map("q", c.q, s.queries(), 64);
    const CUtensorMap k_map = tensor_map("k", c.k, s.keys(), Tiles::Bc);
    const CUtensorMap v_map = tensor_map("v", c.v, s.keys(), Tiles::Bc);
    CUtensorMap out_map = q_map;  // a valid one, for fp32, which does not use it
    if constexpr (std::is_same_v<Y, float>)
        args.out = c.out;
    else
        out_map = tensor_map("out", c.out, s.queries(), 64);
    constexpr int kSmem = sizeof(SharedMemory<HS>);
    const auto kernel = forward_kernel<HS, Y>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));
    kernel<<<std::min(args.work_tiles, dev.num_sms), Tiles::Threads, kSmem, dev.stream>>>(
        q_map, k_map, v_map, out_map, args);
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
    .scratch_bytes = sm90_scratch_bytes,
    .unchecked = {.forward = forward<bf16>,
                  .backward = sm90_backward<bf16>,
                  .forward_fp32 = forward<float>,
                  .backward_fp32 = sm90_backward<float>},
};
