// Matmul with more work on each tile, bf16: wgmma + TMA + mbarrier, warp-specialised, clusters of
// two (sm_90a).
//
//   forward       pre  = A·B + bias                        A = inp (N,K),   B = weightᵀ (K,OC)
//                 out  = f(pre)
//   backward      dpre = (A·B)∘f'(pre)                     A = dout (N,K),  B = weight (K,OC)
//                 out  = f(pre)
//                 dpre_sum += Σ_rows dpre
//   exponentials  out  = exp(A·B − shift of the row)       A, B as forward
//                 and each row's sum of a tile's columns   0 and not in the sum: the row's target,
//                                                          and padding
//
// f is the MLP's activation, GELU (cuda/activation.cuh).
//
// GPT-2's K is short (768) and these products are wide (3072, 50304), so what follows a tile's
// product is much of the work. A GELU kernel of its own reads and writes (N, 3072) twice more. In
// its epilogue cuBLASLt has GELU at 70 % of its rate, and GELU's derivative only in slow
// algorithms. A softmax of its own reads and writes (N, 50304).
//
// Here two kinds of warps share the work on a tile. The MMA warps multiply, leave the tile in
// shared memory as bf16 and begin the next one. The epilogue warps finish it, a row at a time, 16
// bytes a lane, while the tensor cores work.
//
//   8 MMA warps              tile i: K in chunks of 64 │ to D │ tile i + 1: … │ to D │ …
//   3 epilogue warps, or 7   tile i − 1                       │ tile i: f, to memory │ tile i + 1 …
//   1 producer               TMA, three chunks ahead
//
// A block's tile is 128 × 256. Each of two warpgroups has 64 rows, which is 128 accumulators a
// thread. Three warpgroups leave a thread 168 registers, and m64n256k16 wants 154. Backward's
// epilogue has twice the work. If K is short, that takes longer than the products, and a fourth
// warpgroup helps. Then ptxas allows an instruction 128 registers, an equal share, whatever
// setmaxnreg gives. So two m64n128k16 multiply, which read A twice and take longer.
//
// Two blocks are a cluster. Their tiles lie one below the other and share B. Each block loads half
// of B and sends it to both. A cluster takes all columns before its next rows, so A is read from
// memory once, and B stays in L2. For the exponentials B is larger than L2. There a cluster takes
// kBand pairs of tiles before its next columns. Their rows of A stay in L2, and B is read from
// memory once a band.
//
//   operand  where                         layout
//   A        shared memory, 3 stages       rows of 64 of K = 128 bytes, in TMA's 128-byte swizzle
//   B        shared memory, these stages   forward: as A, a row is one of OC
//                                          backward: panels of 64 of OC, a row is one of K,
//                                          transposed by wgmma
//   sums     registers                     accumulator of m64n256k16, or two of m64n128k16
//   D        shared memory, 128 rows       rows of 512 bytes, 16-byte piece c of row r at
//                                          c ^ (r % 8). Exponents of 2 are there in fp16, which is
//                                          exacter than bf16 and has range enough
//
//   barrier     who arrives                           who waits
//   full[3]     the producer; bytes: A, halves of B   the MMA warps
//   empty[3]    the MMA warps of both blocks          the producer: its half of B goes to both
//   d_full[2]   4 MMA warps: their 64 rows of D       the epilogue warps
//   d_empty[8]  two epilogue warps, 8 rows each       the MMA warp of these rows, a tile later
//
// A backward thread keeps its column sums for a tile. Each warp then writes its own as a row of
// partials, and add_partials adds the rows in order. The result is deterministic for a given number
// of clusters, because that number decides which warp takes which turn. What bounds the kernel and
// what was tried stand in attention/EXPERIMENTS.md.
//
// Writes: pre, out, dpre, sums, every element.  Adds into: dpre_sum.
// Limits: K is a multiple of 64, and OC of 256, or of 8 for exponentials. Pointers are aligned to
// 16 bytes. Any N.
// Run: ./dev/bench_train --breakdown
#pragma once
#include <cuda_fp16.h>

#include "cuda/activation.cuh"
#include "cuda/pipeline_sm90.cuh"
#include "cuda/vector.cuh"
#include "layers/sm90/matmul_sm90.h"

// elsewhere the kernel is empty, and what only it uses counts as "never referenced"
#pragma nv_diag_suppress 177

namespace {

constexpr int kCluster = 2;  // blocks
// a block's tile, and the step along K
constexpr int kRows = 128, kColumns = kSm90Columns, kChunk = 64;
constexpr int kStages = 3;  // as many as fit
// kGroups warpgroups multiply
constexpr int kMmaWarps = 8, kGroupWarps = 4, kGroups = kMmaWarps / kGroupWarps;
constexpr int kBand = 16;  // pairs of tiles, 4096 rows, exponentials
// rows that an epilogue warp takes at a time
constexpr int kTurn = 8, kTurns = kRows / kTurn;
constexpr int kMmaRegisters = 160, kOtherRegisters = 96;  // of four warpgroups
// epilogue warps, of three or four warpgroups
constexpr int kFew = 3, kMany = 7;
// Shared memory holds the stages of A and B, D and the barriers, 208 KB.
constexpr int kABytes = kRows * kChunk * 2, kBBytes = kColumns * kChunk * 2,
              kStageBytes = kABytes + kBBytes;
constexpr int kDRowBytes = kColumns * 2, kOffsetD = kStages * kStageBytes;
constexpr int kOffsetBarriers = kOffsetD + kRows * kDRowBytes;
constexpr int kSmem = kOffsetBarriers + (2 * kStages + kGroups + kMmaWarps) * 8;
static_assert(kSmem <= 227 * 1024);

enum class Mode { forward, backward, backward_recompute, exponentials };

struct Problem {
    int N, OC, chunks;
    // tiles beside each other, and pairs of tiles, which a cluster takes one at a time
    int columns, items;
    const bf16* bias;    // forward
    const bf16* pre_in;  // backward
    bf16 *pre, *out, *dpre;
    // backward's column sums (tiles below each other, kEpilogueWarps, OC), or row sums (columns, N)
    float* partials;
    // Exponentials, which are written if out is not null
    int pairs;            // of tiles below each other
    int V;                // padding begins at this column
    const float* shifts;  // (N), times log2 e
    const int* targets;   // (N)
};

// What a block's warps share, and what each kind of them does. backward_recompute also writes out.
template <Mode mode, int kEpilogueWarps>
struct Block {
    static constexpr bool Backward = mode == Mode::backward || mode == Mode::backward_recompute;
    static constexpr bool Exponentials = mode == Mode::exponentials;
    static constexpr int kThreads = (kMmaWarps + kEpilogueWarps + 1) * kWarp;
    static constexpr int kParts = kEpilogueWarps == kMany ? 2 : 1;  // instructions for the columns
    static constexpr int kPart = kColumns / 8 / kParts;
    static constexpr int kAtOnce = Backward ? 2 : 4;  // rows whose arithmetic is interleaved
    // d_full has one phase per tile, and an epilogue warp must not miss one.
    static_assert(kEpilogueWarps <= kTurns / kGroups);

    const CUtensorMap &a_map, &b_map;
    const Problem& p;
    unsigned char* smem;
    uint32_t base = smem_address(smem);
    int rank = blockIdx.x % kCluster;   // in the cluster
    int first = blockIdx.x / kCluster;  // the cluster's first item
    int clusters = gridDim.x / kCluster;

    __device__ uint32_t a_smem(int stage) const { return base + stage * kStageBytes; }
    __device__ uint32_t b_smem(int stage) const { return base + stage * kStageBytes + kABytes; }
    __device__ uint32_t barrier(int i) const { return base + kOffsetBarriers + i * 8; }
    __device__ uint32_t full(int stage) const { return barrier(stage); }
    __device__ uint32_t empty(int stage) const { return barrier(kStages + stage); }
    __device__ uint32_t d_full(int group) const { return barrier(2 * kStages + group); }
    __device__ uint32_t d_empty(int mma_warp) const {
        return barrier(2 * kStages + kGroups + mma_warp);
    }
    struct TileIndex {
        int pair;    // of tiles below each other
        int column;  // of tiles
    };
    __device__ TileIndex tile_index(int item) const {
        if constexpr (!Exponentials)
            return {.pair = item / p.columns, .column = item % p.columns};
        const int band = item / (kBand * p.columns);
        const int pairs = min(kBand, p.pairs - band * kBand);
        const int i = item - band * kBand * p.columns;
        return {.pair = band * kBand + i % pairs, .column = i / pairs};
    }
    __device__ int row_of(int item) const {
        return (tile_index(item).pair * kCluster + rank) * kRows;
    }
    __device__ int column_of(int item) const { return tile_index(item).column * kColumns; }

    __device__ void init_barriers() const {
        for (int i = 0; i < kStages; i++) {
            mbarrier_init(full(i), 1);
            mbarrier_init(empty(i), kCluster * kMmaWarps);
        }
        for (int i = 0; i < kGroups; i++)
            mbarrier_init(d_full(i), kGroupWarps);
        for (int i = 0; i < kMmaWarps; i++)
            mbarrier_init(d_empty(i), kRows / kMmaWarps / kTurn);
        fence_mbarrier_init();
    }

    __device__ __forceinline__ void producer() const {
        constexpr uint16_t kBoth = (1 << kCluster) - 1;
        constexpr int kHalf = kColumns / kCluster;
        const int mine = rank * kHalf;  // the first column of this block's half of B
        PipelineState<kStages> at;
        for (int item = first; item < p.items; item += clusters) {
            const int row = row_of(item);
            const int column = column_of(item);
            for (int k = 0; k < p.chunks; k++, ++at) {
                const uint32_t barrier = full(at.index);
                const uint32_t b = b_smem(at.index);
                mbarrier_wait(empty(at.index), at.phase ^ 1);
                mbarrier_arrive_expect(barrier, kStageBytes);
                tma_load_4d(a_smem(at.index), &a_map, barrier, 0, k, row, 0);
                if constexpr (Backward) {
                    for (int c = 0; c < kHalf; c += 64)
                        tma_load_4d_multicast(b + (mine + c) * kChunk * 2, &b_map, barrier, 0,
                                              (column + mine + c) / 64, k * kChunk, 0, kBoth);
                } else {
                    tma_load_4d_multicast(b + mine * kChunk * 2, &b_map, barrier, 0, k,
                                          column + mine, 0, kBoth);
                }
            }
        }
    }

    // Multiplies, and leaves each tile in shared memory, rounded.
    __device__ __forceinline__ void mma_warp(int warp, int lane) const {
        auto release = [&](int stage) {  // lanes 0 and 1 each tell one block's producer
            if (lane < kCluster)
                mbarrier_arrive_cluster(empty(stage), lane);
        };
        PipelineState<kStages> at;
        uint32_t d_phase = 1;
        for (int item = first; item < p.items; item += clusters, d_phase ^= 1) {
            float d[kParts][kPart][4];
            float shift[2];
            int previous = 0;
            for (int k = 0; k < p.chunks; k++, ++at) {
                mbarrier_wait(full(at.index), at.phase);
                const uint64_t a =
                    wgmma_descriptor(a_smem(at.index) + warp / kGroupWarps * 64 * kChunk * 2);
                const uint64_t b =
                    wgmma_descriptor(b_smem(at.index), Backward ? 64 * kChunk * 2 : 16);
                wgmma_fence();
                for (int kk = 0; kk < kChunk / 16; kk++)
                    for (int h = 0; h < kParts; h++)
                        wgmma_ss<false, Backward>(
                            d[h], wgmma_advance(a, kk * 32),
                            wgmma_advance(b,
                                          h * kBBytes / kParts + kk * (Backward ? 16 * 128 : 32)),
                            k > 0 || kk > 0);
                wgmma_commit();
                if (k > 0) {
                    wgmma_wait<1>();
                    release(previous);
                }
                previous = at.index;
            }
            if constexpr (Exponentials)  // the last chunk's products are still on the way
                for (int i = 0; i < 2; i++)
                    shift[i] = p.shifts[min(row_of(item) + warp * 16 + i * 8 + lane / 4, p.N - 1)];
            wgmma_wait<0>();
            for (int h = 0; h < kParts; h++)
                wgmma_hold(d[h]);
            release(previous);

            const bf16* bias = p.bias + column_of(item) + lane % 4 * 2;
            const uint32_t d_row = base + kOffsetD + (warp * 16 + lane % 16) * kDRowBytes;
            mbarrier_wait(d_empty(warp), d_phase);
            for (int n = 0; n < kColumns / 8; n += 2) {
                uint32_t packed[4];
                for (int i = 0; i < 4; i++) {
                    const float* pair = d[n / kPart][n % kPart + i / 2] + i % 2 * 2;
                    float left = pair[0];
                    float right = pair[1];
                    if constexpr (mode == Mode::forward) {
                        const auto b = load<2>(bias + 8 * (n + i / 2));
                        left += b[0];
                        right += b[1];
                    }
                    packed[i] = Exponentials ? pack_f16(fmaf(left, kLog2e, -shift[i % 2]),
                                                        fmaf(right, kLog2e, -shift[i % 2]))
                                             : pack_bf16(left, right);
                }
                stmatrix_x4(d_row + (((n + lane / 16) ^ lane % 8) << 4), packed);
            }
            __syncwarp();
            if (lane == 0)
                mbarrier_arrive(d_full(warp / kGroupWarps));
        }
    }

    // Writes the results of eight elements of a row, if the row is `inside` of N. Backward also has
    // their x of pre, and adds to the column sums.
    __device__ __forceinline__ void finish(const Vec<bf16, 8>& d, const Vec<bf16, 8>& x,
                                           Vec<float, 8>& sum, bool inside, size_t at) const {
        Vec<float, 8> y;
        Vec<float, 8> dx;
        for (int k = 0; k < 8; k++) {
            const Activation f(Backward ? x[k] : d[k]);
            y.x[k] = f.value();
            dx.x[k] = d[k] * f.derivative();
        }
        const Vec<bf16, 8> stored = Backward ? round_to<bf16>(dx) : d;
        for (int k = 0; k < 8; k++)
            sum.x[k] += stored[k];  // 0 beyond N, where A is 0
        store_16_if(inside, (Backward ? p.dpre : p.pre) + at, stored);
        if (mode != Mode::backward)
            store_16_if(inside, p.out + at, round_to<bf16>(y));
    }

    // Writes 2^z of eight elements of a row if `inside`. Unless All are wanted it writes 0 where
    // `wanted` lacks a bit. Returns their sum.
    template <bool All>
    __device__ __forceinline__ float raise(const Vec<__half, 8>& z, uint32_t wanted, bool inside,
                                           size_t at) const {
        Vec<float, 8> e;
        float sum = 0.f;
        for (int k = 0; k < 8; k++) {
            e.x[k] = All || wanted >> k & 1 ? exp2_approx(z[k]) : 0.f;
            sum += e.x[k];
        }
        store_16_if(inside, p.out + at, round_to<bf16>(e));
        return sum;
    }

    // Sums of kTurn numbers over a warp, in a fixed order. Lane i gets the one of number i / 4.
    __device__ __forceinline__ float sums_over_warp(float (&x)[kTurn], int lane) const {
        // half of the numbers to the other half
        for (int n = kTurn / 2, bit = kWarp / 2; n > 0; n /= 2, bit /= 2)
            for (int i = 0; i < n; i++) {
                const float mine = lane & bit ? x[i + n] : x[i];
                const float other = lane & bit ? x[i] : x[i + n];
                x[i] = mine + __shfl_xor_sync(kFullMask, other, bit);
            }
        for (int bit = kWarp / kTurn / 2; bit > 0; bit /= 2)
            x[0] += __shfl_xor_sync(kFullMask, x[0], bit);
        return x[0];
    }

    __device__ __forceinline__ void epilogue_warp(int warp, int lane) const {
        auto pre_piece = [&](int row, int column) {
            return load<8>(p.pre_in + static_cast<size_t>(min(row, p.N - 1)) * p.OC + column +
                           lane * 8);
        };
        // of pre. Those of the next turn are on the way as soon as this turn has used its own
        Vec<bf16, 8> x[kTurn];
        // The 16 turns of a tile go round 3 (7) warps and on to the next tile. So a warp has 5 or 6
        // (2 or 3) of each.
        int turn = warp;
        if constexpr (Backward) {
#pragma unroll  // here and below, or x would be in local memory
            for (int i = 0; i < kTurn; i++)
                x[i] = pre_piece(row_of(first) + turn * kTurn + i, column_of(first));
        }
        uint32_t d_phase = 0;
        for (int item = first; item < p.items; item += clusters, d_phase ^= 1, turn -= kTurns) {
            const int first_row = row_of(item);
            const int first_column = column_of(item);
            const int column = first_column + lane * 8;
            const uint32_t in_vocabulary = (1u << min(max(p.V - column, 0), 8)) - 1;
            const int later = min(item + clusters, p.items - 1);
            const int later_row = row_of(later);
            const int later_column = column_of(later);
            // exponentials, whose last tile may reach past OC
            const bool write = p.out && column < p.OC;
            Vec<float, 8> sum = {};
#pragma unroll 1
            for (; turn < kTurns; turn += kEpilogueWarps) {
                const int writer = turn * kTurn / (kRows / kMmaWarps);
                const int row = first_row + turn * kTurn;
                const int next_turn = turn + kEpilogueWarps;
                const int next_row =
                    (next_turn < kTurns ? first_row : later_row) + next_turn % kTurns * kTurn;
                const int next_column = next_turn < kTurns ? first_column : later_column;
                const unsigned char* d_smem = smem + kOffsetD + turn * kTurn * kDRowBytes;
                const size_t at = static_cast<size_t>(row) * p.OC + column;
                const int target = Exponentials ? p.targets[min(row + lane % kTurn, p.N - 1)] : 0;
                float row_sums[kTurn] = {};
                mbarrier_wait(d_full(writer / kGroupWarps), d_phase);
                // In 21 turns of 22 there is neither a target nor padding, and no element needs to
                // be tested.
                const bool all_wanted =
                    Exponentials && first_column + kColumns <= p.V &&
                    __all_sync(kFullMask, unsigned(target - first_column) >= kColumns);
#pragma unroll
                for (int g = 0; g < kTurn; g += kAtOnce) {
                    // The branch also keeps the compiler from using all of x at once, when its
                    // loads have just begun.
                    if (row + g < p.N) {
                        const auto rows = [&](auto all) {
#pragma unroll
                            for (int i = g; i < g + kAtOnce; i++) {
                                const void* piece = d_smem + i * kDRowBytes + ((lane ^ i) << 4);
                                const size_t to = at + static_cast<size_t>(i) * p.OC;
                                if constexpr (Exponentials) {
                                    const uint32_t k = __shfl_sync(kFullMask, target, i) - column;
                                    row_sums[i] =
                                        raise<all>(load<8>(static_cast<const __half*>(piece)),
                                                   in_vocabulary & ~(k < 8 ? 1u << k : 0u),
                                                   write && row + i < p.N, to);
                                } else {
                                    finish(load<8>(static_cast<const bf16*>(piece)), x[i], sum,
                                           row + i < p.N, to);
                                }
                            }
                        };
                        if (all_wanted)
                            rows(std::true_type());
                        else
                            rows(std::false_type());
                    }
                    if constexpr (Backward) {
                        for (int i = g; i < g + kAtOnce; i++)
                            x[i] = pre_piece(next_row + i, next_column);
                    }
                }
                __syncwarp();
                if (lane == 0)
                    mbarrier_arrive(d_empty(writer));
                if constexpr (Exponentials) {
                    const float row_sum = sums_over_warp(row_sums, lane);
                    const int its_row = row + lane / (kWarp / kTurn);
                    if (lane % (kWarp / kTurn) == 0 && its_row < p.N)
                        p.partials[static_cast<size_t>(first_column / kColumns) * p.N + its_row] =
                            row_sum;
                }
            }
            if constexpr (Backward) {
                const size_t row = static_cast<size_t>(first_row / kRows) * kEpilogueWarps + warp;
                store(p.partials + row * p.OC + column, sum);
            }
        }
    }
};

}  // namespace
