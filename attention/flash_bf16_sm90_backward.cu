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
// New against flash_bf16: five products, not seven. A block works on a tile of 128 keys of one
// head. Its K and V stay in shared memory and its dK and dV in registers, while the query tiles
// that see these keys pass by. Each query tile's dQ is added to a sum in global memory. A warpgroup
// takes 64 of the 128 keys:
//
//   product      A, 64 rows                     B, shared memory  result
//   Sᵀ  = K Qᵀ   K, shared memory               Q                 registers
//   dPᵀ = V dOᵀ  V, shared memory               dO                registers
//   dV += Pᵀ dO  Pᵀ, registers: Sᵀ's layout     dO, transposed    registers, to the end
//   dK += dSᵀ Q  dSᵀ, registers: dPᵀ's layout   Q, transposed     registers, to the end
//   dQ  = dS K   dS, shared memory, transposed  K, transposed     registers, then the sum
//
// Keys are rows of Sᵀ and dPᵀ, so Pᵀ and dSᵀ are A operands where they arise. Only dQ sums over all
// keys of the tile, so the two warpgroups exchange dS for it, and each computes half of dQ. They do
// so one query tile late, so that neither waits for the other's dS, and start Sᵀ one query tile
// early. In a work tile's last query tile that is the Sᵀ of the next work tile's first.
//
// A block stays on its SM and fetches work tiles until there are none, in the order of
// sm90_backward_scheduler.cuh, which also makes the sum of dQ deterministic. Two warpgroups are the
// consumers. Of the first warpgroup four threads have a job each:
//   loader   takes tickets, and loads the next work tile's K and V and the next query tile's Q, dO,
//            lse and D
//   senders  one for each consumer, which waits until dQ's semaphore says that it is next, sends dQ
//            out of shared memory and raises the semaphore
//   storer   writes dK and dV out of shared memory
// struct SharedMemory has the mbarriers by which they wait for each other.
//
// Writes: dq, dk, dv (every element, in bf16 or fp32).
// Scratch: log2(e)·lse, D, dQ's sum in fp32, dQ's semaphores and the ticket. The kernels write all
// of it before they read it.
// Limits: HS in {64, 128}, any Tq and Tk, scale > 0, compute capability 9.0 alone.
// Run: ./dev/bench_attention --kernel flash_bf16_sm90
#include <climits>
#include <cmath>

#include "attention/flash_bf16_sm90.h"
#include "attention/sm90_backward_scheduler.cuh"
#include "cuda/pipeline_sm90.cuh"
#include "cuda/tensor_map.h"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
// kernels have empty bodies there, and what only they use is "never referenced"
#pragma nv_diag_suppress 177
#endif

namespace {

// -------------------------------------------------------------------------------------------------
// Tiles, and what a launch covers

constexpr int kConsumers = 2;  // warpgroups, 64 keys each
constexpr int kConsumerThreads = 128 * kConsumers;
constexpr int kThreads = 128 + kConsumerThreads;
constexpr int kConsumerRegisters = 240;  // a thread
constexpr int kOtherRegisters = 24;
constexpr int kRowBytes = 128;  // of a panel, see SharedMemory

// A semaphore has a line of L2 to itself: many blocks ask at once, and a line answers one at a
// time.
constexpr size_t kSemaphoreInts = 32;

template <int HS>
struct BackwardTiles {
    // queries; at HS 128 dK and dV take twice the registers
    static constexpr int Br = HS == 64 ? 128 : 64;
    static constexpr int Bc = 128;  // keys, 64 a consumer
    // Elements of a consumer's half of a query tile's dQ, 64 × 64. At HS 64 it is half of the
    // queries, at HS 128 half of the columns.
    static constexpr int kDqHalf = 64 * 64;

    // What is known of a tile's queries.
    struct RowStats {
        float lse_log2[Br];  // log2(e)·lse, +inf past Tq
        float D[Br];
    };
};

template <int HS, class Y>
struct BackwardArgs {
    using Tiles = BackwardTiles<HS>;
    using TileScheduler = BackwardTileScheduler<Tiles::Br, Tiles::Bc>;

    CUtensorMap q_map;
    CUtensorMap k_map;
    CUtensorMap v_map;
    CUtensorMap dout_map;
    CUtensorMap dq_map;
    CUtensorMap dk_map;
    CUtensorMap dv_map;
    HeadsView<Y> dk_rows;  // for consumers that write dK and dV themselves, see kDkvFits
    HeadsView<Y> dv_rows;
    TileScheduler scheduler;
    float scale;
    float scale_log2;  // scale·log2(e): the exponentials are powers of 2
    float* row_stats;  // (heads, q_tiles, 2, Br): a RowStats for each query tile
    // (sum_heads, q_tiles, 2 consumers, 8 fragments, 128 threads, 4 elements): unscaled dQ
    float* dq_sum;
    // (heads, q_tiles, 2 consumers, kSemaphoreInts): how many key tiles have added to dQ
    int* dq_semaphores;
    int* ticket;  // of the next work tile

    // The sum of a consumer's half of query tile i's dQ, and its semaphore. first_sum and
    // first_semaphore are what the scheduler's functions of these names return.
    __device__ float* sum(int first_sum, int i) const {
        return dq_sum + (first_sum + kConsumers * i) * size_t{Tiles::kDqHalf};
    }
    __device__ int* dq_semaphore(int first_semaphore, int i) const {
        return dq_semaphores + (first_semaphore + kConsumers * i) * kSemaphoreInts;
    }
};

// -------------------------------------------------------------------------------------------------
// Before the main kernel: lse and D of each query; the semaphores and the ticket become 0

// One block for each query tile of a head. HS/8 lanes share a row, and each has 8 columns.
template <int HS, class Y>
__global__ void __launch_bounds__(1024)
    prepare_kernel(HeadsView<const bf16> dout, HeadsView<const bf16> out,
                   RowStatsView<const float> lse,
                   const __grid_constant__ BackwardArgs<HS, Y> args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    grid_allow_dependents();
    constexpr int Br = BackwardTiles<HS>::Br;
    constexpr int kRowLanes = HS / 8;
    static_assert(Br * kRowLanes == 1024);

    // Neighbouring blocks have the same tokens and neighbouring heads, so that what runs together
    // reads whole tokens.
    const int NH = args.scheduler.NH;
    const int Tq = args.scheduler.Tq;
    const int q_tiles = args.scheduler.q_tiles;
    const int h = blockIdx.x % NH;
    const int q_tile = blockIdx.x / NH % q_tiles;
    const int b = blockIdx.x / NH / q_tiles;
    const int bh = b * NH + h;

    if (threadIdx.x == 0 && blockIdx.x == 0)
        *args.ticket = 0;
    if (threadIdx.x < kConsumers)
        *args.dq_semaphore(args.scheduler.first_semaphore(bh, threadIdx.x), q_tile) = 0;

    const int row = threadIdx.x / kRowLanes;
    const int row_lane = threadIdx.x % kRowLanes;
    const int t = q_tile * Br + row;
    const size_t token = min(t, Tq - 1);  // one that exists
    const size_t column = h * HS + row_lane * 8;
    const bf16* const dout_8 =
        dout.ptr + b * dout.batch_stride + token * dout.token_stride + column;
    const bf16* const out_8 = out.ptr + b * out.batch_stride + token * out.token_stride + column;
    float D = dot8(*reinterpret_cast<const uint4*>(dout_8), *reinterpret_cast<const uint4*>(out_8));
    for (int distance = 1; distance < kRowLanes; distance *= 2)
        D += __shfl_xor_sync(~0u, D, distance);
    if (row_lane > 0)
        return;

    // As in RowStats.
    const size_t tile = static_cast<size_t>(bh) * q_tiles + q_tile;
    float* const to_lse = args.row_stats + tile * 2 * Br + row;
    float* const to_D = to_lse + Br;
    *to_lse = t < Tq ? lse.ptr[bh * lse.head_stride + t] * kLog2e : INFINITY;
    *to_D = t < Tq ? D : 0.f;
#endif
}

// -------------------------------------------------------------------------------------------------
// A block's shared memory: 210 KB at HS 64, 225 KB at HS 128, and the barriers

// Tiles of bf16 and fp32 are panels whose rows have 128 bytes, one after the other, in TMA's
// 128-byte swizzle, for which each tile is aligned to 1024 bytes.
template <int HS, class Y>
struct SharedMemory {
    using Tiles = BackwardTiles<HS>;
    static constexpr int Br = Tiles::Br;
    static constexpr int Bc = Tiles::Bc;

    struct alignas(1024) KeyTile {
        bf16 x[Bc * HS];
    };
    struct alignas(1024) QueryTile {
        bf16 x[Br * HS];
    };
    struct alignas(1024) ScoreTile {  // a row is a key
        bf16 x[Bc * Br];
    };
    struct alignas(1024) DqHalf {
        float x[Tiles::kDqHalf];
    };

    // K has two stages, because the next work tile's first S comes before the last dQ of this one.
    // V needs one, because the next work tile's first dP comes after the last dP of this one.
    PipelineBuffer<KeyTile, 2> k;
    PipelineBuffer<KeyTile, 1> v;
    PipelineBuffer<QueryTile, 2> q;
    PipelineBuffer<QueryTile, 2> dout;
    PipelineBuffer<ScoreTile, 2> ds;
    DqHalf dq[kConsumers];  // a part of the sum in fp32, or dQ itself as Y
    PipelineBuffer<typename Tiles::RowStats, 2> row_stats;

    // Consumers need not arrive at k_empty, as the storer does so after their dkv_full. Nor need dP
    // and dV wait for dO, as S has waited for q_full.
    //
    // clang-format off
    //                             who waits  ← who arrives: when
    FullBarriers<2>  k_full;    // all others ← loader: K is there, and work_tile
    EmptyBarriers<2> k_empty;   // loader     ← storer: dK has left; senders: they know work_tile
    FullBarriers<1>  v_full;    // consumers  ← loader: V is there
    EmptyBarriers<1> v_empty;   // loader     ← consumers: the work tile's last dP is done
    FullBarriers<2>  q_full;    // consumers  ← loader: Q, dO and row_stats are there
    EmptyBarriers<2> q_empty;   // loader     ← consumers: dK is done
    FullBarriers<2>  ds_full;   // consumers  ← consumers: dS is there, of both
    EmptyBarriers<2> ds_empty;  // consumers  ← consumers: dQ is done
    FullBarriers<1>  dq_full[kConsumers];   // its sender   ← a consumer: dQ is there
    EmptyBarriers<1> dq_empty[kConsumers];  // the consumer ← its sender: dQ has been read
    FullBarriers<1>  dkv_full;  // storer     ← consumers: dK and dV are in their places
    EmptyBarriers<1> dkv_empty; // consumers  ← storer: they have left, so dS may be written again
    // clang-format on

    PipelineBuffer<BackwardWorkTile, 2> work_tile;  // the one whose keys are in k

    // At the end of a work tile nobody reads its K and dS any more, and dK and dV leave from there:
    //   dV           from stage 0 of dS, at HS 128 from both stages
    //   dK in bf16   from K: the next work tile's K is in the other stage
    //   dK in fp32   from stage 1 of dS, at HS 64. At HS 128 fp32 does not fit, and consumers write
    //                both from registers.
    static constexpr bool kDkvFits = HS == 64 || std::is_same_v<Y, bf16>;

    __device__ __forceinline__ void* dv() { return &ds.tiles[0]; }
    __device__ __forceinline__ void* dk(int w) {
        if constexpr (std::is_same_v<Y, bf16>)
            return &k[w];
        else
            return &ds.tiles[1];
    }

    __device__ void init_barriers() {
        constexpr int kLoader = 1;  // threads
        constexpr int kSender = 1;
        constexpr int kStorer = 1;

        k_full.init(kLoader);
        k_empty.init(kStorer + kConsumers * kSender);
        v_full.init(kLoader);
        v_empty.init(kConsumerThreads);
        q_full.init(kLoader);
        q_empty.init(kConsumerThreads);
        ds_full.init(kConsumerThreads);
        ds_empty.init(kConsumerThreads);
        for (int wg = 0; wg < kConsumers; wg++) {
            dq_full[wg].init(kConsumerThreads / kConsumers);
            dq_empty[wg].init(kSender);
        }
        dkv_full.init(kConsumerThreads);
        dkv_empty.init(kStorer);
        fence_mbarrier_init();
    }

    // Waits for a work tile's K, and says which work tile it is.
    __device__ __forceinline__ BackwardWorkTile wait_for_work_tile(int w) const {
        k_full.wait(w);
        const volatile BackwardWorkTile& tile = work_tile[w];
        return {.k_tile = tile.k_tile, .bh = tile.bh};
    }
};

// -------------------------------------------------------------------------------------------------
// The roles of the first warpgroup. In all roles w counts the block's work tiles and n its query
// tiles, over all of them. So w is the use of K, V, dK and dV, and n that of Q, dO, dS and dQ.

// Takes tickets, and has the TMA unit copy what each work tile needs.
//   work tile w: take a ticket · load K(w) · Q, dO(n) of its first query tile · V(w) · Q, dO(n + 1)
//   · Q, dO(n + 2) · …
template <int HS, class Y>
struct Loader {
    using Tiles = BackwardTiles<HS>;

    const BackwardArgs<HS, Y>& args;
    SharedMemory<HS, Y>& shared;
    int w = 0;
    int n = 0;
    int bh;  // the work tile's head
    int b;
    int h;

    __device__ __forceinline__ void run() {
        for (;; w++) {
            // Taken only when all loads of the block's previous work tile have started. If blocks
            // took tickets earlier, one block could end up with several of the longest.
            const BackwardWorkTile tile = args.scheduler.work_tile(atomicAdd(args.ticket, 1));
            shared.k_empty.wait(w);
            volatile BackwardWorkTile& to = shared.work_tile[w];
            to.k_tile = tile.k_tile;
            to.bh = tile.bh;
            if (tile.k_tile < 0) {
                shared.k_full.arrive(w);
                return;
            }

            bh = tile.bh;
            b = bh / args.scheduler.NH;
            h = bh % args.scheduler.NH;
            const int k0 = tile.k_tile * Tiles::Bc;
            const QueryWalk walk = args.scheduler.query_walk(tile);

            shared.k_full.arrive_expect(w, sizeof shared.k[w]);
            load<Tiles::Bc>(shared.k.address(w), args.k_map, k0, shared.k_full.address(w));
            load_queries(walk.i);
            shared.v_empty.wait(w);
            shared.v_full.arrive_expect(w, sizeof shared.v[w]);
            load<Tiles::Bc>(shared.v.address(w), args.v_map, k0, shared.v_full.address(w));
            for (int t = 1; t < walk.left; t++)
                load_queries(walk.i + t * walk.step);
        }
    }

    __device__ __forceinline__ void load_queries(int i) {
        const uint32_t full = shared.q_full.address(n);
        shared.q_empty.wait(n);
        shared.q_full.arrive_expect(
            n, sizeof shared.q[n] + sizeof shared.dout[n] + sizeof shared.row_stats[n]);
        load<Tiles::Br>(shared.q.address(n), args.q_map, i * Tiles::Br, full);
        load<Tiles::Br>(shared.dout.address(n), args.dout_map, i * Tiles::Br, full);
        // Computed late, because this thread has few registers.
        const size_t q_tile = static_cast<size_t>(bh) * args.scheduler.q_tiles + i;
        bulk_load(shared.row_stats.address(n), args.row_stats + q_tile * 2 * Tiles::Br,
                  sizeof shared.row_stats[n], full);
        n++;
    }

    // Copies `Rows` tokens from t0 on, panel by panel.
    template <int Rows>
    __device__ __forceinline__ void load(uint32_t to, const CUtensorMap& map, int t0,
                                         uint32_t barrier) const {
        for (int d = 0; d < HS; d += 64)
            tma_load_4d(to + d / 64 * Rows * kRowBytes, &map, barrier, d, h, t0, b);
    }
};

// Sends a consumer's half of each dQ, once the parts of earlier key tiles have been added.
//   query tile n: wait for the semaphore · wait for dQ(n) · send it · raise the semaphore
// Other blocks wait while this thread computes or waits. So it computes before the loop over query
// tiles what it can, and looks at the next semaphore while dQ is on its way.
template <int HS, class Y>
struct Sender {
    using Tiles = BackwardTiles<HS>;

    const BackwardArgs<HS, Y>& args;
    SharedMemory<HS, Y>& shared;
    const int wg;  // the consumer
    int w = 0;
    int n = 0;

    __device__ __forceinline__ void run() {
        for (;; w++) {
            const BackwardWorkTile tile = shared.wait_for_work_tile(w);
            if (tile.k_tile < 0)
                return;
            shared.k_empty.arrive(w);

            QueryWalk walk = args.scheduler.query_walk(tile);
            const int first_sum = args.scheduler.first_sum(tile.bh, wg);
            const int first_semaphore = args.scheduler.first_semaphore(tile.bh, wg);
            int added = 0;  // parts, by the semaphore when it was last seen
            for (; walk.left > 0; ++walk, n++) {
                const DqPart part = args.scheduler.dq_part(tile, walk.forwards(), walk.i);
                wait_for_semaphore(part, tile.bh, first_semaphore, walk.i, added);

                shared.dq_full[wg].wait(n);
                send(part, tile.bh, first_sum, walk.i);
                bulk_wait_read<0>();
                shared.dq_empty[wg].arrive(n);

                added = 0;
                if (walk.left > 1)
                    added = load_relaxed_gpu(args.dq_semaphore(first_semaphore, walk.next()));
                bulk_wait<0>();  // the part is in the sum, not only out of shared memory
                fence_gpu();     // makes the load of `added` an acquire, and the store a release
                store_relaxed_gpu(args.dq_semaphore(first_semaphore, walk.i), part.number + 1);
            }
        }
    }

    // Waits until the parts before this one have been added. `added` is what this part's semaphore
    // has shown already.
    //
    // The first part has none before it. But heads bh and bh + sum_heads have one place for their
    // sums, and the latter has it first, because its tickets are earlier. So if there is such a
    // head, the first part inherits the place, and waits until all of that head's parts have been
    // added. These are as many as this head's, because their number depends on i alone. `added`
    // does not shorten that wait: none of this head's parts has been added yet, so it is 0.
    __device__ __forceinline__ void wait_for_semaphore(DqPart part, int bh, int first_semaphore,
                                                       int i, int added) const {
        const auto& scheduler = args.scheduler;
        const bool inherits = part.is_first() && bh + scheduler.sum_heads < scheduler.heads;
        const int wanted = inherits ? part.last + 1 : part.number;
        // In query tiles: a head's semaphores follow those of the head before it.
        const int to_other_head = inherits ? scheduler.sum_heads * scheduler.q_tiles : 0;
        const int* const semaphore = args.dq_semaphore(first_semaphore, i + to_other_head);
        while (added < wanted)
            added = load_acquire_gpu(semaphore);
    }

    __device__ __forceinline__ void send(DqPart part, int bh, int first_sum, int i) const {
        constexpr uint32_t kBytes = sizeof shared.dq[0];
        const uint32_t dq_smem = smem_address(&shared.dq[wg]);
        if (part.is_last()) {  // dQ itself
            const int b = bh / args.scheduler.NH;
            const int h = bh % args.scheduler.NH;
            const int d0 = HS == 128 ? 64 * wg : 0;
            const int t0 = i * Tiles::Br + (HS == 64 ? 64 * wg : 0);
            constexpr int kPanelColumns = kRowBytes / sizeof(Y);
            for (int d = 0; d < 64; d += kPanelColumns) {
                const int panel = d / kPanelColumns * 64 * kRowBytes;  // bytes
                tma_store_4d(&args.dq_map, dq_smem + panel, d0 + d, h, t0, b);
            }
        } else if (part.is_first()) {
            bulk_store(args.sum(first_sum, i), dq_smem, kBytes);
        } else {
            bulk_add(args.sum(first_sum, i), dq_smem, kBytes);
        }
        bulk_commit();
    }
};

// Writes dK and dV out of shared memory. If they do not fit there, it only tells the others that
// consumers are done.
template <int HS, class Y>
__device__ __forceinline__ void storer(const BackwardArgs<HS, Y>& args,
                                       SharedMemory<HS, Y>& shared) {
    using Tiles = BackwardTiles<HS>;
    for (int w = 0;; w++) {
        const BackwardWorkTile tile = shared.wait_for_work_tile(w);
        if (tile.k_tile < 0)
            return;

        const int b = tile.bh / args.scheduler.NH;
        const int h = tile.bh % args.scheduler.NH;
        const int k0 = tile.k_tile * Tiles::Bc;
        shared.dkv_full.wait(w);
        if constexpr (SharedMemory<HS, Y>::kDkvFits) {
            const uint32_t dk = smem_address(shared.dk(w));
            const uint32_t dv = smem_address(shared.dv());
            constexpr int kPanelColumns = kRowBytes / sizeof(Y);
            for (int d = 0; d < HS; d += kPanelColumns) {
                const int panel = d / kPanelColumns * Tiles::Bc * kRowBytes;  // bytes
                tma_store_4d(&args.dk_map, dk + panel, d, h, k0, b);
                tma_store_4d(&args.dv_map, dv + panel, d, h, k0, b);
            }
        }
        bulk_commit();
        bulk_wait_read<0>();
        shared.k_empty.arrive(w);
        shared.dkv_empty.arrive(w);
    }
}

// -------------------------------------------------------------------------------------------------
// What a consumer is made of

// stmatrix stores a 16×16 block of bf16, which is two neighbouring 16-byte pieces of 16 rows. Lane
// l gives the address of row l % 16 in piece l / 16 of the two. In TMA's swizzle piece i of a
// panel's row r is at place i ^ (r % 8) of that row.

// What a lane gives for pieces 0 and 1 of the tile's rows [row, row + 16); row is a multiple of 16.
__device__ __forceinline__ uint32_t first_block(uint32_t tile, int row, int lane) {
    const int piece = lane / 16;
    const int place = piece ^ (lane % 8);
    return tile + (row + lane % 16) * kRowBytes + (place << 4);
}
// The same for pieces i and i + 1, where i is even and counts on from panel to panel, eight in
// each. As i is even, i + piece = i ^ piece, so the place is that in `first` ^ i. Rows are aligned
// to their length, so the place alone is bits 4 to 6 of the address.
__device__ __forceinline__ uint32_t block_at(uint32_t first, int i, int panel_bytes) {
    const uint32_t i_in_panel = i % 8;
    const int panel = i / 8;
    return (first ^ (i_in_panel << 4)) + panel * panel_bytes;
}

// Puts factor·c into shared memory as Y: rows [row, row + 16) of a tile whose panels have
// `panel_rows` rows. In bf16 a panel is 8 fragments, and a fragment's row is one 16-byte piece. In
// fp32 a panel is 4 fragments, and a fragment's row is two pieces, each of two lanes' pairs.
template <class Y, int N>
__device__ __forceinline__ void store_tile_swizzled(const float (&c)[N][4], float factor,
                                                    void* tile, int row, int panel_rows) {
    const int panel_bytes = panel_rows * kRowBytes;
    if constexpr (std::is_same_v<Y, bf16>) {
        const uint32_t first = first_block(smem_address(tile), row, lane_id());
        for (int n = 0; n < N; n += 2) {
            // The 16×16 block by quadrants: left r = 0, left r = 1, right r = 0, right r = 1.
            uint32_t packed[4];
            for (int right = 0; right < 2; right++)
                for (int r = 0; r < 2; r++)
                    packed[2 * right + r] =
                        pack_bf16(factor * c[n + right][2 * r], factor * c[n + right][2 * r + 1]);
            stmatrix_x4(block_at(first, n, panel_bytes), packed);
        }
    } else {
        const int lane_row = row + lane_id() / 4;
        const int pair = lane_id() % 2;  // of a piece's two
        unsigned char* const to =
            static_cast<unsigned char*>(tile) + lane_row * kRowBytes + pair * 8;
        for (int n = 0; n < N; n++)
            for (int r = 0; r < 2; r++) {
                const int panel = n / 4;
                const int piece = n % 4 * 2 + lane_id() % 4 / 2;  // of the panel's row
                const int place = piece ^ (lane_id() / 4);        // row % 8 is lane / 4
                const int rows_further = panel * panel_rows + 8 * r;
                *reinterpret_cast<float2*>(to + rows_further * kRowBytes + place * 16) =
                    make_float2(factor * c[n][2 * r], factor * c[n][2 * r + 1]);
            }
    }
}

// Writes factor·c, 16 rows, to the head's tokens from t0 on, but none at or past `end`.
template <int N>
__device__ __forceinline__ void store_rows(const float (&c)[N][4], float factor, float* head,
                                           size_t token_stride, int t0, int end) {
    const int lane = lane_id();
    for (int r = 0; r < 2; r++) {
        const int t = t0 + 8 * r + lane / 4;
        if (t >= end)
            continue;
        float2* to = reinterpret_cast<float2*>(head + t * token_stride) + lane % 4;
        for (int n = 0; n < N; n++)
            to[4 * n] = make_float2(factor * c[n][2 * r], factor * c[n][2 * r + 1]);
    }
}

// Starts s = A Bᵀ over the head size, for Sᵀ and dPᵀ. A is rows of a key tile, B is a query tile,
// and both are given by their descriptors.
template <int HS>
__device__ __forceinline__ void start_abt(float (&s)[BackwardTiles<HS>::Br / 8][4], uint64_t a_rows,
                                          uint64_t b_tile) {
    wgmma_fence();
    wgmma_ss_set(s, a_rows, b_tile);
    for (int kk = 1; kk < HS / 16; kk++)
        wgmma_ss(s, wgmma_column_step<BackwardTiles<HS>::Bc>(a_rows, kk),
                 wgmma_column_step<BackwardTiles<HS>::Br>(b_tile, kk), true);
    wgmma_commit();
}
// Starts c += A B over the queries, for dV and dK. B is a tile of dO or Q, given by its address.
template <int HS>
__device__ __forceinline__ void start_add_ab(float (&c)[HS / 8][4],
                                             uint32_t (&a_regs)[BackwardTiles<HS>::Br / 16][4],
                                             uint32_t b_address) {
    const uint64_t b_transposed = wgmma_descriptor(b_address, BackwardTiles<HS>::Br * kRowBytes);
    wgmma_fence_operand(a_regs);
    wgmma_fence_operand(c);
    wgmma_fence();
    for (int kk = 0; kk < BackwardTiles<HS>::Br / 16; kk++)
        wgmma_rs<true>(c, a_regs[kk], wgmma_row_step(b_transposed, kk), true);
    wgmma_commit();
}

// The named barriers of both consumers. Barrier 0 is __syncthreads; 1 is not used.
enum NamedBarrier {
    kLastRead = 2,
    kTurn = 3,  // and 4: kTurn + wg is consumer wg's turn
};

// Consumers alternate, so that one's exponentials run while the tensor cores work for the other.
// A consumer's barrier opens when all its threads wait and all of the other's have passed on.
// Consumer 1 passes on once more than consumer 0 waits: when the block ends, it is 0's turn.
//
// Turns are for speed alone. They protect no data, so without them the results would be the same.
// Nor can they stand in for ds_empty: consumer 0 has its turn n as soon as consumer 1 has passed on
// in tile n − 1. Only after that does consumer 1 start dQ(n − 2), whose dS consumer 0 overwrites
// with dS(n).
struct Turns {
    int wg;

    __device__ __forceinline__ void wait_for_mine() const {
        named_barrier_sync(kTurn + wg, kConsumerThreads);
    }
    __device__ __forceinline__ void pass_on() const {
        named_barrier_arrive(kTurn + 1 - wg, kConsumerThreads);
    }
};

// -------------------------------------------------------------------------------------------------
// A consumer: the registers of a warpgroup, and what it does with them. The rows of accumulators
// are keys, but those of dQ are queries. Of its warp's 16 rows a thread has lane/4 and lane/4 + 8,
// here r = 0 and 1. Fragment f of Sᵀ or dPᵀ has columns 8f … 8f + 7, which are queries, and a lane
// has two of them (fragments.cuh, where f is n). In the consumer n counts query tiles.

template <int HS, class Y>
struct Consumer {
    using Tiles = BackwardTiles<HS>;
    static constexpr int Br = Tiles::Br;
    static constexpr int Bc = Tiles::Bc;

    const BackwardArgs<HS, Y>& args;
    SharedMemory<HS, Y>& shared;
    const int warp;
    const int wg;        // 0 or 1
    const int warp_row;  // the warp's first key in the work tile
    const Turns turns;

    int w = 0;
    BackwardWorkTile tile;  // the w-th, whose dK, dV and dQ are computed
    int n = 0;
    QueryWalk walk;  // over its query tiles; the n-th is walk.i
    int s_w = 0;
    BackwardWorkTile s_work_tile;  // the s_w-th, whose S comes next: `tile` or the one after it

    float s[Br / 8][4];            // Sᵀ before it is scaled, then Pᵀ
    float dp[Br / 8][4];           // dPᵀ
    uint32_t p_regs[Br / 16][4];   // Pᵀ as A operand
    uint32_t ds_regs[Br / 16][4];  // dSᵀ as A operand
    float dv[HS / 8][4];
    float dk[HS / 8][4];  // not scaled before it is stored, like dq
    float dq[8][4];       // this consumer's half of dQ

    // The shuffle tells the compiler that `warp` is uniform.
    __device__ __forceinline__ Consumer(const BackwardArgs<HS, Y>& args,
                                        SharedMemory<HS, Y>& shared)
        : args(args),
          shared(shared),
          warp(__shfl_sync(~0u, threadIdx.x / 32, 0)),
          wg(warp / 4 - 1),
          warp_row(64 * wg + 16 * (warp % 4)),
          turns{wg} {}

    __device__ __forceinline__ void run() {
        wait_for_s_work_tile();
        start_s(n);
        wgmma_wait<0>(s);
        if (wg == 1)
            turns.pass_on();  // consumer 0 begins; otherwise each would wait for the other
        // Each moves s_work_tile on to the next, because it starts that one's first S.
        for (; s_work_tile.k_tile >= 0; w++)
            process_work_tile();
    }

    // Query tile n, whose S(n) is there when it begins:
    //   start dP(n) · signal dQ(n−2) · my turn: P(n) · start dV += Pᵀ dO · the other's turn ·
    //   dS(n) · start dK += dSᵀ Q · start dQ(n−1) · start S(n+1) · store dQ(n−1)
    // At HS 128, with half as many exponentials, the other's turn comes after dK instead. In the
    // last query tile S(n+1) is the next work tile's first.
    __device__ __forceinline__ void process_work_tile() {
        tile = s_work_tile;
        walk = args.scheduler.query_walk(tile);
        clear(dk);
        clear(dv);
        shared.v_full.wait(w);

        const int first = n;  // the work tile's first query tile
#pragma unroll 1
        do {
            start_dp(n);
            if (n - 1 > first)
                signal_dq(n - 2);  // stored in the iteration before, so its stores are done by now

            turns.wait_for_mine();
            mask(walk.i);
            exponentials(n);  // P(n)
            start_add_ab<HS>(dv, p_regs, shared.dout.address(n));
            if (HS == 64)
                turns.pass_on();

            shared.ds_empty.wait(n);
            if (n == first)
                shared.dkv_empty.wait(w);  // the previous work tile's dV has left dS
            wgmma_wait<1>(dp);
            if (walk.left == 1)
                shared.v_empty.arrive(w);
            softmax_gradient(n);  // dS(n), while dV runs
            store_ds(shared.ds.address(n));
            wgmma_wait<0>(dv);
            // For the compiler. start_dq overwrites dq, but runs only if n > first. Without a value
            // from before the products, dq would make the compiler serialize all of them (ptxas
            // says so, C7515). And start_dq's asm also reads dq, so old values would hold registers
            // from one query tile to the next.
            clear(dq);
            wgmma_fence_operand(dq);

            // [quote]
            start_add_ab<HS>(dk, ds_regs, shared.q.address(n));
            fence_proxy_async();  // for dS; it need not wait, as the stores are done by now
            shared.ds_full.arrive(n);
            if (HS == 128)
                turns.pass_on();
            if (n > first)
                start_dq(n - 1);  // dS(n) of the other consumer may still be on its way
            wgmma_fence();        // without it, ptxas inserts one and says so (C7519)
            wgmma_commit();       // dQ(n − 1), or an empty group
            if (walk.left == 1)
                next_s_work_tile();
            start_s(n + 1);

            wgmma_wait<1>(dk, dq);  // S(n+1) runs on
            // [end]
            shared.q_empty.arrive(n);
            if (n > first) {
                shared.ds_empty.arrive(n - 1);
                store_dq(n - 1, walk.previous());
            }
            // If S were in flight at the loop's end, the compiler would serialize all products
            // (ptxas says so, C7514).
            wgmma_wait<0>(s);
            n++;
            ++walk;
        } while (walk.left > 0);

        // n − 1 was the last query tile. Its dQ is still due, and dK and dV are to be stored.
        start_dq(n - 1);
        wgmma_commit();
        if (n - 1 > first)
            signal_dq(n - 2);
        wgmma_wait<0>(dk, dv, dq);
        shared.ds_empty.arrive(n - 1);
        store_dk_dv();
        shared.dkv_full.arrive(w);
        store_dq(n - 1, walk.previous());
        signal_dq(n - 1);
    }

    __device__ __forceinline__ void next_s_work_tile() {
        s_w++;
        wait_for_s_work_tile();
    }
    __device__ __forceinline__ void wait_for_s_work_tile() {
        s_work_tile = shared.wait_for_work_tile(s_w);
        s_work_tile = {.k_tile = __shfl_sync(~0u, s_work_tile.k_tile, 0),  // uniform
                       .bh = __shfl_sync(~0u, s_work_tile.bh, 0)};
    }

    // Each function below is told its query tile, because that may be the next or the previous one:
    // n counts as everywhere here, and i is the query tile's number in its head, as in QueryWalk.

    // Starts Sᵀ of query tile n. After the last work tile it multiplies whatever is there, and
    // nobody reads the result. If the product depended on a condition, the compiler would clear s
    // where that does not hold, or serialize all products (ptxas says so, C7512).
    __device__ __forceinline__ void start_s(int n) {
        if (s_work_tile.k_tile >= 0)
            shared.q_full.wait(n);
        start_abt<HS>(s, wgmma_descriptor(shared.k.address(s_w) + 64 * wg * kRowBytes),
                      wgmma_descriptor(shared.q.address(n)));
    }
    __device__ __forceinline__ void start_dp(int n) {
        start_abt<HS>(dp, wgmma_descriptor(shared.v.address(w) + 64 * wg * kRowBytes),
                      wgmma_descriptor(shared.dout.address(n)));
    }
    // Starts this consumer's half of query tile n's dQ, and leaves the commit to the caller.
    __device__ __forceinline__ void start_dq(int n) {
        shared.ds_full.wait(n);
        // At HS 64 a half is half of the queries, which is a panel of dS. At HS 128 it is half of
        // the columns, which is a panel of K.
        const uint32_t ds_half = shared.ds.address(n) + (HS == 64 ? wg : 0) * Bc * kRowBytes;
        const uint32_t k_half = shared.k.address(w) + (HS == 128 ? wg : 0) * Bc * kRowBytes;
        const uint64_t ds_transposed = wgmma_descriptor(ds_half);
        const uint64_t k_transposed = wgmma_descriptor(k_half);
        wgmma_fence();
        for (int kk = 0; kk < Bc / 16; kk++)
            wgmma_ss<true, true>(dq, wgmma_row_step(ds_transposed, kk),
                                 wgmma_row_step(k_transposed, kk), kk > 0);
    }

    // Sets S to −∞ where the query does not see the key. That includes keys past Tk, which TMA
    // reads as zeros: their exp(−lse) may overflow, and ∞·0 would make dQ NaN.
    __device__ __forceinline__ void mask(int i) {
        const int k0 = tile.k_tile * Bc;
        const int q0 = i * Br;
        const int shift = args.scheduler.shift;
        const int Tk = args.scheduler.Tk;
        const bool all_see_all = q0 + shift >= k0 + Bc - 1 && k0 + Bc <= Tk;
        if (all_see_all)
            return;

        const int lane = lane_id();  // a register less in the loop
        for (int r = 0; r < 2; r++) {
            const int key = k0 + warp_row + 8 * r + lane / 4;
            // How many columns come before those that see the key, counted from this lane's first.
            const int hidden = (key < Tk ? key - shift - q0 : Br) - lane % 4 * 2;
            for (int f = 0; f < Br / 8; f++)
                for (int e = 0; e < 2; e++)
                    if (8 * f + e < hidden)
                        s[f][2 * r + e] = -INFINITY;
        }
    }

    // A statistic (lse or D) of the queries of this lane's two columns of fragment f.
    static __device__ __forceinline__ float2 of_columns(const float (&stat)[Br], int f) {
        return reinterpret_cast<const float2*>(stat)[4 * f + threadIdx.x % 4];
    }

    // Packs fragment f of an accumulator into an A operand with the same columns: k-step kk has
    // fragments 2·kk (left) and 2·kk + 1 (right).
    static __device__ __forceinline__ void pack_a(uint32_t (&a_regs)[Br / 16][4], int f,
                                                  const float (&x)[4]) {
        const int kk = f / 2;
        const int right = f % 2;
        a_regs[kk][right * 2] = pack_bf16(x[0], x[1]);
        a_regs[kk][right * 2 + 1] = pack_bf16(x[2], x[3]);
    }

    // Sᵀ becomes Pᵀ, in s and as A operand in p_regs.
    __device__ __forceinline__ void exponentials(int n) {
        const auto& stats = shared.row_stats[n];
        for (int f = 0; f < Br / 8; f++) {
            const float2 lse_log2 = of_columns(stats.lse_log2, f);
            for (int e = 0; e < 4; e++)
                s[f][e] =
                    exp2_approx(s[f][e] * args.scale_log2 - (e % 2 == 0 ? lse_log2.x : lse_log2.y));
            pack_a(p_regs, f, s[f]);
        }
    }

    // dS = P∘(dP − D), transposed, as A operand in ds_regs.
    __device__ __forceinline__ void softmax_gradient(int n) {
        const auto& stats = shared.row_stats[n];
        for (int f = 0; f < Br / 8; f++) {
            const float2 D = of_columns(stats.D, f);
            float x[4];
            for (int e = 0; e < 4; e++)
                x[e] = s[f][e] * (dp[f][e] - (e % 2 == 0 ? D.x : D.y));
            pack_a(ds_regs, f, x);
        }
    }

    __device__ __forceinline__ void store_ds(uint32_t ds_tile) const {
        const uint32_t first = first_block(ds_tile, warp_row, threadIdx.x % 32);
        for (int kk = 0; kk < Br / 16; kk++)
            stmatrix_x4(block_at(first, 2 * kk, Bc * kRowBytes), ds_regs[kk]);
    }

    // Puts dQ(n), which is this work tile's part of query tile i's dQ, into shared memory for the
    // sender. To the last part the sum of the others is added before, which makes it dQ itself.
    __device__ __forceinline__ void store_dq(int n, int i) {
        const DqPart part = args.scheduler.dq_part(tile, walk.forwards(), i);
        if (part.is_last() && !part.is_first())
            add_other_parts(part, i);
        shared.dq_empty[wg].wait(n);
        if (part.is_last()) {
            store_tile_swizzled<Y>(dq, args.scale, &shared.dq[wg], 16 * (warp % 4), 64);
        } else {
            float4* const to = reinterpret_cast<float4*>(&shared.dq[wg]) + threadIdx.x % 128;
            for (int f = 0; f < 8; f++)
                to[f * 128] = make_float4(dq[f][0], dq[f][1], dq[f][2], dq[f][3]);
        }
    }
    __device__ __forceinline__ void add_other_parts(DqPart part, int i) {
        const int first_semaphore = args.scheduler.first_semaphore(tile.bh, wg);
        while (load_acquire_gpu(args.dq_semaphore(first_semaphore, i)) < part.last) {
        }
        const float* const others = args.sum(args.scheduler.first_sum(tile.bh, wg), i);
        const float4* const sum = reinterpret_cast<const float4*>(others) + threadIdx.x % 128;
        for (int f = 0; f < 8; f++) {
            const float4 x = __ldcg(sum + f * 128);
            dq[f][0] += x.x;
            dq[f][1] += x.y;
            dq[f][2] += x.z;
            dq[f][3] += x.w;
        }
    }
    // Tells the sender. Called later than store_dq, because the fence waits until the stores are
    // done.
    __device__ __forceinline__ void signal_dq(int n) const {
        fence_proxy_async();
        shared.dq_full[wg].arrive(n);
    }

    __device__ __forceinline__ void store_dk_dv() {
        if constexpr (SharedMemory<HS, Y>::kDkvFits) {
            named_barrier_sync(kLastRead, kConsumerThreads);  // nobody reads K and dS any more
            store_tile_swizzled<Y>(dk, args.scale, shared.dk(w), warp_row, Bc);
            store_tile_swizzled<Y>(dv, 1.f, shared.dv(), warp_row, Bc);
            fence_proxy_async();
        } else {
            const int b = tile.bh / args.scheduler.NH;
            const int h = tile.bh % args.scheduler.NH;
            const int first_key = tile.k_tile * Bc + warp_row;  // the warp's
            const int Tk = args.scheduler.Tk;
            store_rows(dk, args.scale, args.dk_rows.row(b, 0, h, HS), args.dk_rows.token_stride,
                       first_key, Tk);
            store_rows(dv, 1.f, args.dv_rows.row(b, 0, h, HS), args.dv_rows.token_stride, first_key,
                       Tk);
        }
    }

    template <int N>
    static __device__ __forceinline__ void clear(float (&c)[N][4]) {
        for (auto& x : c)
            x[0] = x[1] = x[2] = x[3] = 0.f;
    }
};

template <int HS, class Y>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArgs<HS, Y> args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char smem[];
    auto& shared = *reinterpret_cast<SharedMemory<HS, Y>*>(smem);
    if (threadIdx.x == 0)
        shared.init_barriers();
    __syncthreads();

    if (threadIdx.x >= 128) {
        setmaxnreg_inc<kConsumerRegisters>();
        Consumer<HS, Y>(args, shared).run();
        return;
    }

    setmaxnreg_dec<kOtherRegisters>();
    // Waits until prepare_kernel has written lse, D, the semaphores and the ticket. Consumers need
    // no such wait: they use them only after k_full, which the loader arrives at later.
    grid_wait_dependency();
    // Each role is in a warp of its own, because lanes of a warp wait for one another.
    if (threadIdx.x == 0)
        Loader<HS, Y>{args, shared}.run();
    if (threadIdx.x == 32)
        Sender<HS, Y>{args, shared, 0}.run();
    if (threadIdx.x == 64)
        Sender<HS, Y>{args, shared, 1}.run();
    if (threadIdx.x == 96)
        storer<HS>(args, shared);
#endif
}

// -------------------------------------------------------------------------------------------------
// Launchers

constexpr char kName[] = "flash_bf16_sm90";

// Where the parts of scratch begin, in bytes. The first, row_stats, begins at 0.
template <int HS>
struct Scratch {
    size_t dq_sum;
    size_t semaphores;
    size_t ticket;
    size_t bytes;  // in all

    explicit Scratch(const AttentionShape& s) {
        using Tiles = BackwardTiles<HS>;
        const typename BackwardArgs<HS, bf16>::TileScheduler scheduler(s);
        const size_t q_tiles = static_cast<size_t>(scheduler.heads) * scheduler.q_tiles;

        dq_sum = q_tiles * sizeof(typename Tiles::RowStats);
        semaphores = dq_sum + scheduler.sums * kConsumers * Tiles::kDqHalf * sizeof(float);
        ticket = semaphores + q_tiles * kConsumers * kSemaphoreInts * sizeof(int);
        bytes = ticket + sizeof(int);
    }
};

template <int HS, class Y>
void launch(const Cuda& dev, const AttentionBackward<bf16, Y>& c) {
    constexpr int Br = BackwardTiles<HS>::Br;
    constexpr int Bc = BackwardTiles<HS>::Bc;
    const AttentionShape& s = c.s;
    const typename BackwardArgs<HS, Y>::TileScheduler scheduler(s);
    const Scratch<HS> scratch(s);
    static_assert(sizeof(SharedMemory<HS, Y>) <= 227 * 1024);

    const size_t heads = scheduler.heads;
    const size_t tiles = heads * std::max(scheduler.q_tiles, scheduler.k_tiles);
    // Indices of semaphores are ints below 2·tiles, and tickets go up to heads·k_tiles + the number
    // of blocks.
    if (tiles > INT_MAX / 4)
        throw Error(format("%s: %zu tiles are more than %d; use a smaller batch", kName, tiles,
                           INT_MAX / 4));

    char* at = static_cast<char*>(c.scratch);
    BackwardArgs<HS, Y> args{.q_map = tensor_map("q", c.q, s.queries(), Br),
                             .k_map = tensor_map("k", c.k, s.keys(), Bc),
                             .v_map = tensor_map("v", c.v, s.keys(), Bc),
                             .dout_map = tensor_map("dout", c.dout, s.queries(), Br),
                             .dq_map = tensor_map("dq", c.dq, s.queries(), 64),  // a half's
                             .dk_map = tensor_map("dk", c.dk, s.keys(), Bc),
                             .dv_map = tensor_map("dv", c.dv, s.keys(), Bc),
                             .dk_rows = c.dk,
                             .dv_rows = c.dv,
                             .scheduler = scheduler,
                             .scale = s.resolved_scale(),
                             .scale_log2 = s.scale_log2(),
                             .row_stats = reinterpret_cast<float*>(at),
                             .dq_sum = reinterpret_cast<float*>(at + scratch.dq_sum),
                             .dq_semaphores = reinterpret_cast<int*>(at + scratch.semaphores),
                             .ticket = reinterpret_cast<int*>(at + scratch.ticket)};

    prepare_kernel<HS, Y>
        <<<static_cast<unsigned>(heads * scheduler.q_tiles), 1024, 0, dev.stream>>>(c.dout, c.out,
                                                                                    c.lse, args);
    LAUNCH_CHECK("flash_bf16_sm90 prepare_kernel");

    const auto kernel = backward_kernel<HS, Y>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    sizeof(SharedMemory<HS, Y>)));
    // The kernel may start while prepare_kernel's last blocks run.
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim =
        static_cast<unsigned>(std::min<size_t>(heads * scheduler.k_tiles, dev.num_sms));
    config.blockDim = kThreads;
    config.dynamicSmemBytes = sizeof(SharedMemory<HS, Y>);
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

size_t sm90_scratch_bytes(const AttentionShape& s) {
    return s.HS == 64 ? Scratch<64>(s).bytes : Scratch<128>(s).bytes;
}
