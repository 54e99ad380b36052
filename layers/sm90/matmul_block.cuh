// bf16 matmul with a fused epilogue (GELU, GELU's derivative or a softmax's exponentials): wgmma +
// TMA + mbarrier, warp-specialised, clusters of two (sm_90a).
//
//   forward       pre  = A·B + bias                        A = inp (N,K),   B = weightᵀ (K,columns)
//                 out  = f(pre)
//   backward      dpre = (A·B)∘f'(pre)                     A = dout (N,K),  B = weight (K,columns)
//                 out  = f(pre)
//                 dpre_sum += Σ_rows dpre
//   exponentials  out  = exp(A·B − shift of the row)       A, B as forward
//                 and each row's sum of a tile's columns   0 and not in the sum: the row's target,
//                                                          and padding
//
// f is the MLP's activation, GELU (cuda/activation.cuh).
//
// GPT-2's K is short (768) and these products are wide (3072, 50304), so much of the work is what
// follows the product of a tile. A separate kernel would read the product back: (N, 3072) for GELU,
// (N, 50304) for the softmax. GELU's derivative and the softmax would also write it a second time.
// cuBLASLt's products are much slower with GELU in their epilogue, and it has GELU's derivative
// only in slow algorithms.
//
// Here two kinds of warps share the work on a tile. The MMA warps multiply, store the tile to
// shared memory as bf16, and start on the next one. The epilogue warps finish the stored tile, a
// row at a time, 16 bytes per lane, while the tensor cores work.
//
//   8 MMA warps              tile i: K in chunks of 64 │ to D │ tile i + 1: … │ to D │ …
//   3 epilogue warps, or 7   tile i − 1                       │ tile i: f, to memory │ tile i + 1 …
//   1 producer               TMA, as far ahead as there are free stages
//
// A block's tile is 128 × 256. Two warpgroups multiply 64 rows each, so that a thread has 128
// accumulators. With three warpgroups in a block, a thread can have 168 registers, enough for
// m64n256k16, for which ptxas wants 154. Backward's epilogue does twice the work of forward's. If K
// is short, it takes longer than the products, and a fourth warpgroup helps. But then an equal
// share is 128 registers, and ptxas rejects the instruction, although setmaxnreg gives the MMA
// warps more. So they run two m64n128k16 instead, which read A twice and take longer.
//
// Two blocks form a cluster. Their tiles are one below the other and share B: each block loads half
// of B and sends it to both. The clusters take turns at these pairs of tiles, band after band. In a
// band they go from left to right, and in each of its columns from top to bottom. If B stays in L2,
// a band is one pair high, and A is read from memory once. If B is too large for that, a band is
// several pairs high: its rows of A stay in L2, and B is read from memory about once per band.
//
//   operand  where                         layout
//   A        shared memory, 3 stages       rows of 64 of K = 128 bytes, in TMA's 128-byte swizzle
//   B        shared memory, these stages   forward: as A, a row is a column of D
//                                          backward: panels of 64 columns, a row is one of K,
//                                          transposed by wgmma
//   A·B      registers                     accumulator of m64n256k16, or two of m64n128k16
//   D        shared memory, 128 rows       rows of 512 bytes, 16-byte piece c of row r at
//                                          c ^ (r % 8). For the exponentials D holds exponents of
//                                          2, in fp16, which is more precise than bf16 and has
//                                          enough range
//
//   barrier     who arrives                           who waits
//   full[3]     the producer; bytes: A, halves of B   the MMA warps
//   empty[3]    the MMA warps of both blocks          the producer: its half of B goes to both
//   d_full[2]   4 MMA warps: their 64 rows of D       the epilogue warps
//   d_empty[8]  two epilogue warps, 8 rows each       the MMA warp of these rows, a tile later
//
// An epilogue warp handles slices of 8 rows, one after another. In backward, a thread keeps the
// sums of its columns for the length of a tile. Then each warp writes its own as a row of partials,
// and add_partials adds the rows in order. The result is deterministic for a given number of
// clusters, because that number decides which warp gets which slice. attention/EXPERIMENTS.md says
// what bounds the kernel and what was tried.
//
// Writes: pre, out, dpre, sums, every element.  Adds into: dpre_sum.
// Limits: K must be a multiple of 64, and the columns of 256, or of 8 for exponentials. For
// alignment and N see matmul_sm90.h.
// Run: ./dev/bench_train --breakdown
#pragma once
#include <cuda_fp16.h>

#include "cuda/activation.cuh"
#include "cuda/pipeline_sm90.cuh"
#include "cuda/vector.cuh"
#include "layers/sm90/matmul_sm90.h"

// For other architectures the kernel is empty, and what only it uses is "never referenced".
#pragma nv_diag_suppress 177

namespace {

constexpr int kCluster = 2;  // blocks

// In shared memory a matrix is cut into panels of kPanel columns, whose rows are 128 bytes.
constexpr int kPanel = 64;
constexpr int kPanelRowBytes = kPanel * sizeof(bf16);

// A block's tile, and how far a stage reaches along K.
constexpr int kTileRows = 128;
constexpr int kTileColumns = kSm90Columns;
constexpr int kChunk = kPanel;
constexpr int kStages = 3;  // as many as fit in shared memory

constexpr int kMmaWarps = 8;
constexpr int kGroupWarps = 4;  // warps in a warpgroup
constexpr int kGroups = kMmaWarps / kGroupWarps;
constexpr int kGroupRows = kTileRows / kGroups;
constexpr int kMmaWarpRows = kTileRows / kMmaWarps;

// A block can have this many epilogue warps, so that it has three or four warpgroups.
constexpr int kFew = 3;
constexpr int kMany = 7;
// Registers of an MMA thread and of the others, if there are four warpgroups.
constexpr int kMmaRegisters = 160;
constexpr int kOtherRegisters = 96;
// Rows that an epilogue warp finishes at a time.
constexpr int kSliceRows = 8;
constexpr int kSlices = kTileRows / kSliceRows;

// A block's shared memory, 208 KB.
struct SharedMemory {
    struct Stage {
        bf16 a[kTileRows * kChunk];
        bf16 b[kTileColumns * kChunk];
    };
    Stage stages[kStages];
    bf16 d[kTileRows * kTileColumns];

    // mbarriers
    uint64_t full[kStages];
    uint64_t empty[kStages];
    uint64_t d_full[kGroups];
    uint64_t d_empty[kMmaWarps];
};
static_assert(sizeof(SharedMemory) <= 227 * 1024);
static_assert(sizeof(SharedMemory::Stage) % 1024 == 0 && sizeof(SharedMemory::Stage::a) % 1024 == 0,
              "atoms of the 128-byte swizzle must be aligned to 1024 bytes");
constexpr int kStageBytes = sizeof(SharedMemory::Stage);
constexpr int kABytes = sizeof(SharedMemory::Stage::a);
constexpr int kBBytes = sizeof(SharedMemory::Stage::b);
constexpr int kBPanelBytes = kChunk * kPanelRowBytes;  // backward
constexpr int kDRowBytes = kTileColumns * static_cast<int>(sizeof(bf16));
constexpr int kOffsetD = offsetof(SharedMemory, d);

enum class Mode { forward, backward, backward_recompute, exponentials };

struct Problem {
    int N;
    int columns;
    int chunks;          // how many chunks K has
    int tiles_across;    // how many tiles are side by side
    int pairs_down;      // how many pairs of tiles are one below the other
    int band;            // the height of a band, in pairs of tiles
    int work_items;      // all pairs of tiles; a cluster computes one at a time
    const bf16* bias;    // forward
    const bf16* pre_in;  // backward
    bf16* pre;
    bf16* out;
    bf16* dpre;
    // Backward: sums of columns (tiles down, kEpilogueWarps, columns). Exponentials: sums of rows
    // (tiles_across, N).
    float* partials;
    // Only for exponentials:
    int V;                // padding starts at this column
    const float* shifts;  // (N), times log2 e
    const int* targets;   // (N)
};

// What the warps of a block share, and the code of each kind of warp. backward_recompute is
// backward that also writes out.
template <Mode mode, int kEpilogueWarps>
struct Block {
    static constexpr bool kBackward = mode == Mode::backward || mode == Mode::backward_recompute;
    static constexpr bool kExponentials = mode == Mode::exponentials;
    static constexpr int kThreads = (kMmaWarps + kEpilogueWarps + 1) * kWarp;
    // The columns of a tile are one wgmma's or two's. Each of these parts is kPartTiles tiles of 8
    // columns, as wgmma keeps them in registers (cuda/ptx_sm90.cuh).
    static constexpr int kParts = kEpilogueWarps == kMany ? 2 : 1;
    static constexpr int kPartTiles = kTileColumns / 8 / kParts;
    static constexpr int kRowsAtOnce = kBackward ? 2 : 4;  // rows whose arithmetic is interleaved
    // d_full[group] has one phase per tile. A warp that skipped phase n and then waited for n + 1
    // could return at once, because n − 1 has the same parity. So an epilogue warp must have slices
    // of both groups' rows in every tile.
    static_assert(kEpilogueWarps <= kSlices / kGroups);

    using Accumulators = float[kParts][kPartTiles][4];

    const CUtensorMap& a_map;
    const CUtensorMap& b_map;
    const Problem& p;
    unsigned char* smem;  // SharedMemory
    uint32_t base = smem_address(smem);
    int rank = blockIdx.x % kCluster;        // the block's in its cluster
    int first_item = blockIdx.x / kCluster;  // the cluster's
    int clusters = gridDim.x / kCluster;

    // Addresses in shared memory.
    __device__ uint32_t a_smem(int stage) const { return base + stage * kStageBytes; }
    __device__ uint32_t b_smem(int stage) const { return base + stage * kStageBytes + kABytes; }
    __device__ uint32_t barrier(size_t offset, int i) const {
        return base + static_cast<int>(offset) + i * static_cast<int>(sizeof(uint64_t));
    }
    __device__ uint32_t full(int stage) const {
        return barrier(offsetof(SharedMemory, full), stage);
    }
    __device__ uint32_t empty(int stage) const {
        return barrier(offsetof(SharedMemory, empty), stage);
    }
    __device__ uint32_t d_full(int group) const {
        return barrier(offsetof(SharedMemory, d_full), group);
    }
    __device__ uint32_t d_empty(int mma_warp) const {
        return barrier(offsetof(SharedMemory, d_empty), mma_warp);
    }

    // Where a work item's tiles are, counted in pairs of tiles down and in tiles across.
    struct TileIndex {
        int pair;
        int across;
    };
    __device__ TileIndex tile_index(int item) const {
        const int first_pair = item / (p.band * p.tiles_across) * p.band;  // of the item's band
        const int height = min(p.band, p.pairs_down - first_pair);  // the last band may be lower
        const int i = item - first_pair * p.tiles_across;           // the item's number in its band
        return {.pair = first_pair + i % height, .across = i / height};
    }

    // The first row and column of this block's tile.
    __device__ int row_of(int item) const {
        return (tile_index(item).pair * kCluster + rank) * kTileRows;
    }
    __device__ int column_of(int item) const { return tile_index(item).across * kTileColumns; }

    __device__ void init_barriers() const {
        constexpr int kProducer = 1;
        constexpr int kSlicesOfWarp = kMmaWarpRows / kSliceRows;
        for (int i = 0; i < kStages; i++) {
            mbarrier_init(full(i), kProducer);
            mbarrier_init(empty(i), kCluster * kMmaWarps);
        }
        for (int i = 0; i < kGroups; i++)
            mbarrier_init(d_full(i), kGroupWarps);
        for (int i = 0; i < kMmaWarps; i++)
            mbarrier_init(d_empty(i), kSlicesOfWarp);
        fence_mbarrier_init();
    }

    // ---------------------------------------------------------------------------------------------
    // The producer, one thread

    // Loads this block's rows of A, and its half of the columns of B for both blocks.
    __device__ __forceinline__ void producer() const {
        constexpr uint16_t kBothBlocks = (1 << kCluster) - 1;
        constexpr int kHalf = kTileColumns / kCluster;
        const int first = rank * kHalf;  // the first of the tile's columns that this block loads

        // A box's coordinates are (0, panel, row, 0) of its matrix (matrix_map in matmul_sm90.cu).
        // Chunk k is panel k of A. It is also panel k of B, except in backward, where it is the
        // kChunk rows of B from k·kChunk on.
        static_assert(kChunk == kPanel);
        PipelineState<kStages> state;
        // Chunk: wait until the MMA warps of both blocks have released the stage · load A and B
        for (int item = first_item; item < p.work_items; item += clusters) {
            const int row = row_of(item);
            const int column = column_of(item);
            for (int k = 0; k < p.chunks; k++, ++state) {
                const uint32_t barrier = full(state.index);
                const uint32_t b = b_smem(state.index);
                mbarrier_wait(empty(state.index), state.phase ^ 1);

                mbarrier_arrive_expect(barrier, kStageBytes);
                tma_load_4d(a_smem(state.index), &a_map, barrier, 0, k, row, 0);
                if constexpr (kBackward) {
                    for (int c = 0; c < kHalf; c += kPanel)
                        tma_load_4d_multicast(b + (first + c) / kPanel * kBPanelBytes, &b_map,
                                              barrier, 0, (column + first + c) / kPanel, k * kChunk,
                                              0, kBothBlocks);
                } else {
                    tma_load_4d_multicast(b + first * kPanelRowBytes, &b_map, barrier, 0, k,
                                          column + first, 0, kBothBlocks);
                }
            }
        }
    }

    // ---------------------------------------------------------------------------------------------
    // The MMA warps

    // Multiplies, and stores each tile to shared memory, rounded.
    __device__ __forceinline__ void mma_warp(int warp, int lane) const {
        const auto release = [&](int stage) {  // lanes 0 and 1 each tell one block's producer
            if (lane < kCluster)
                mbarrier_arrive_cluster(empty(stage), lane);
        };

        PipelineState<kStages> state;
        uint32_t d_empty_phase = 1;  // at first D is empty (cuda/pipeline_sm90.cuh)
        // Tile: for each chunk (wait for it · start its products · release the one before)
        //       · release the last chunk · wait until D is empty · store D · tell the epilogue
        for (int item = first_item; item < p.work_items; item += clusters) {
            Accumulators acc;
            float shift[2];
            int previous = 0;
            for (int k = 0; k < p.chunks; k++, ++state) {
                mbarrier_wait(full(state.index), state.phase);
                start_products(acc, warp, state.index, k);
                if (k > 0) {
                    wgmma_wait<1>();
                    release(previous);
                }
                previous = state.index;
            }

            // The shifts of the two rows of this lane's accumulators, lane / 4 and lane / 4 + 8 of
            // the warp's. They are loaded while the last chunk's products are still under way.
            if constexpr (kExponentials)
                for (int i = 0; i < 2; i++)
                    shift[i] = p.shifts[min(row_of(item) + warp * kMmaWarpRows + i * 8 + lane / 4,
                                            p.N - 1)];
            wgmma_wait<0>();
            for (int part = 0; part < kParts; part++)
                wgmma_fence_operand(acc[part]);
            release(previous);

            const bf16* bias = p.bias + column_of(item) + (lane % 4) * 2;
            const uint32_t d_row = base + kOffsetD + (warp * kMmaWarpRows + lane % 16) * kDRowBytes;
            mbarrier_wait(d_empty(warp), d_empty_phase);
            store_d(d_row, acc, bias, shift, lane);
            __syncwarp();
            if (lane == 0)
                mbarrier_arrive(d_full(warp / kGroupWarps));
            d_empty_phase ^= 1;
        }
    }

    // Starts the products of chunk k: acc = A·B for a tile's first chunk, acc += A·B for the
    // others.
    __device__ __forceinline__ void start_products(Accumulators& acc, int warp, int stage,
                                                   int k) const {
        const int group_row = warp / kGroupWarps * kGroupRows;
        const uint64_t a = wgmma_descriptor(a_smem(stage) + group_row * kPanelRowBytes);
        const uint64_t b = kBackward ? wgmma_descriptor(b_smem(stage), kBPanelBytes)
                                     : wgmma_descriptor(b_smem(stage));

        wgmma_fence();
        for (int kk = 0; kk < kChunk / 16; kk++) {
            const bool accumulate = k > 0 || kk > 0;
            const uint64_t a_step = wgmma_column_step<kTileRows>(a, kk);
            for (int part = 0; part < kParts; part++) {
                const uint64_t b_part = wgmma_advance(b, part * (kBBytes / kParts));
                const uint64_t b_step = kBackward ? wgmma_row_step(b_part, kk)
                                                  : wgmma_column_step<kTileColumns>(b_part, kk);
                wgmma_ss<false, kBackward>(acc[part], a_step, b_step, accumulate);
            }
        }
        wgmma_commit();
    }

    // Rounds the accumulators and stores them to D. Forward adds the bias, exponentials subtract
    // the shift. For stmatrix_x4, lane l gives the address of row l % 16 of the warp's rows in tile
    // n + l / 16. d_row is where that row begins in D.
    __device__ __forceinline__ void store_d(uint32_t d_row, const Accumulators& acc,
                                            const bf16* bias, const float (&shift)[2],
                                            int lane) const {
        for (int n = 0; n < kTileColumns / 8; n += 2) {
            // Two 16 × 8 tiles of accumulators, as four 8 × 8 halves.
            uint32_t packed[4];
            for (int i = 0; i < 4; i++) {
                const int tile = n + i / 2;
                const int half = i % 2;  // 0: the tile's upper 8 rows, 1: the lower
                const float* pair = &acc[tile / kPartTiles][tile % kPartTiles][2 * half];
                float left = pair[0];
                float right = pair[1];
                if constexpr (mode == Mode::forward) {
                    const auto b = load<2>(bias + 8 * tile);
                    left += b[0];
                    right += b[1];
                }
                packed[i] = kExponentials ? pack_f16(fmaf(left, kLog2e, -shift[half]),
                                                     fmaf(right, kLog2e, -shift[half]))
                                          : pack_bf16(left, right);
            }
            const int piece = (n + lane / 16) ^ (lane % 8);  // lane % 8 is the row modulo 8
            stmatrix_x4(d_row + (piece << 4), packed);
        }
    }

    // ---------------------------------------------------------------------------------------------
    // The epilogue warps

    // Finishes eight elements d of a row, and writes the results if the row is `inside` of N.
    // Backward needs their pre as well, and adds to the sums of columns.
    __device__ __forceinline__ void finish_activation(const Vec<bf16, 8>& d,
                                                      const Vec<bf16, 8>& pre, Vec<float, 8>& sum,
                                                      bool inside, size_t at) const {
        Vec<float, 8> y;
        Vec<float, 8> dx;
        for (int k = 0; k < 8; k++) {
            const Activation f(kBackward ? pre[k] : d[k]);
            y.x[k] = f.value();
            dx.x[k] = d[k] * f.derivative();
        }

        const Vec<bf16, 8> stored = kBackward ? round_to<bf16>(dx) : d;
        for (int k = 0; k < 8; k++)
            sum.x[k] += stored[k];  // 0 beyond N, where A is 0
        store_16_if(inside, (kBackward ? p.dpre : p.pre) + at, stored);
        if (mode != Mode::backward)
            store_16_if(inside, p.out + at, round_to<bf16>(y));
    }

    // Finishes eight exponents z of a row: writes 2^z if the row is `inside` of N, and returns the
    // sum. Elements whose bit of `wanted` is 0 become 0; if kAll, all are wanted.
    template <bool kAll>
    __device__ __forceinline__ float finish_exponentials(const Vec<__half, 8>& z, uint32_t wanted,
                                                         bool inside, size_t at) const {
        Vec<float, 8> e;
        float sum = 0.f;
        for (int k = 0; k < 8; k++) {
            const bool keep = kAll || ((wanted >> k) & 1) != 0;
            e.x[k] = keep ? exp2_approx(z[k]) : 0.f;
            sum += e.x[k];
        }
        store_16_if(inside, p.out + at, round_to<bf16>(e));
        return sum;
    }

    // Sums each of kSliceRows numbers over the warp, in a fixed order. Lane i gets the sum of
    // number i / 4. In each of the first three steps a lane keeps half of its numbers and passes
    // the others to the lane that keeps those.
    __device__ __forceinline__ float sums_over_warp(float (&x)[kSliceRows], int lane) const {
        for (int n = kSliceRows / 2, bit = kWarp / 2; n > 0; n /= 2, bit /= 2) {
            const bool upper = (lane & bit) != 0;
            for (int i = 0; i < n; i++) {
                const float kept = upper ? x[i + n] : x[i];
                const float passed = upper ? x[i] : x[i + n];
                x[i] = kept + __shfl_xor_sync(kFullMask, passed, bit);
            }
        }
        for (int bit = kWarp / kSliceRows / 2; bit > 0; bit /= 2)
            x[0] += __shfl_xor_sync(kFullMask, x[0], bit);
        return x[0];
    }

    // This lane's eight columns of a tile's row of pre. For rows from N on, those of row N − 1.
    __device__ __forceinline__ Vec<bf16, 8> load_pre(int row, int first_column, int lane) const {
        return load<8>(p.pre_in + static_cast<size_t>(min(row, p.N - 1)) * p.columns +
                       first_column + lane * 8);
    }

    // begin ≤ x < begin + size, in one comparison: a negative difference wraps to a large number.
    __device__ static bool is_in_range(int x, int begin, unsigned size) {
        return static_cast<unsigned>(x - begin) < size;
    }

    // Exponentials: writes the sums of a slice's rows over this tile's columns.
    __device__ __forceinline__ void write_row_sums(float (&row_sums)[kSliceRows], int lane, int row,
                                                   int first_column) const {
        constexpr int kLanesPerRow = kWarp / kSliceRows;
        const float row_sum = sums_over_warp(row_sums, lane);
        const int sum_row = row + lane / kLanesPerRow;
        if (lane % kLanesPerRow == 0 && sum_row < p.N)
            p.partials[static_cast<size_t>(first_column / kTileColumns) * p.N + sum_row] = row_sum;
    }

    __device__ __forceinline__ void epilogue_warp(int warp, int lane) const {
        // Slices are dealt out to the 3 (or 7) warps in turn, across tiles. So a warp has 5 or 6 (2
        // or 3) of the 16 slices of each tile.
        int slice = warp;
        // Backward: this lane's part of the slice's rows. As soon as a row has been used, the same
        // row of the next slice is loaded.
        Vec<bf16, 8> pre[kSliceRows];
        if constexpr (kBackward) {
#pragma unroll  // here and below, or pre would be in local memory
            for (int i = 0; i < kSliceRows; i++)
                pre[i] = load_pre(row_of(first_item) + slice * kSliceRows + i,
                                  column_of(first_item), lane);
        }

        uint32_t d_full_phase = 0;
        // Slice: wait for its rows of D · finish them, loading pre for the next slice
        //        · tell the MMA warp · exponentials: sums of the rows
        for (int item = first_item; item < p.work_items; item += clusters) {
            const int first_row = row_of(item);
            const int first_column = column_of(item);
            const int column = first_column + lane * 8;
            // Bit k: is the lane's column k in the vocabulary, not padding?
            const uint32_t in_vocabulary = (1u << min(max(p.V - column, 0), 8)) - 1;

            const int next_item = min(item + clusters, p.work_items - 1);
            const int next_item_row = row_of(next_item);
            const int next_item_column = column_of(next_item);

            // The last tile of the exponentials may extend past the columns.
            const bool write = p.out && column < p.columns;
            Vec<float, 8> sum = {};  // backward: of this warp's rows of the tile
#pragma unroll 1
            for (; slice < kSlices; slice += kEpilogueWarps) {
                const int writer = slice * kSliceRows / kMmaWarpRows;  // the MMA warp of these rows
                const int row = first_row + slice * kSliceRows;
                const int next_slice = slice + kEpilogueWarps;
                const bool same_tile = next_slice < kSlices;
                const int next_row =
                    (same_tile ? first_row : next_item_row) + (next_slice % kSlices) * kSliceRows;
                const int next_column = same_tile ? first_column : next_item_column;

                const unsigned char* d_smem = smem + kOffsetD + slice * kSliceRows * kDRowBytes;
                const size_t at = static_cast<size_t>(row) * p.columns + column;
                // Lane l has the target of the slice's row l % kSliceRows.
                const int lane_target =
                    kExponentials ? p.targets[min(row + lane % kSliceRows, p.N - 1)] : 0;
                float row_sums[kSliceRows] = {};

                mbarrier_wait(d_full(writer / kGroupWarps), d_full_phase);

                // Most slices have neither a target nor padding, so that no element needs to be
                // tested.
                const bool target_in_tile = is_in_range(lane_target, first_column, kTileColumns);
                const bool all_wanted = kExponentials && first_column + kTileColumns <= p.V &&
                                        __all_sync(kFullMask, !target_in_tile);
#pragma unroll
                for (int g = 0; g < kSliceRows; g += kRowsAtOnce) {
                    // The branch also keeps the compiler from using all of pre at once, when its
                    // loads have only just started.
                    if (row + g < p.N) {
                        const auto finish_rows = [&](auto all) {
#pragma unroll
                            for (int i = g; i < g + kRowsAtOnce; i++) {
                                // Piece `lane` of row i, swizzled: its row of D is i modulo 8.
                                const void* piece = d_smem + i * kDRowBytes + ((lane ^ i) << 4);
                                const size_t row_at = at + static_cast<size_t>(i) * p.columns;
                                if constexpr (kExponentials) {
                                    const auto z = load<8>(static_cast<const __half*>(piece));
                                    const int target = __shfl_sync(kFullMask, lane_target, i);
                                    // Which of this lane's columns is the row's target. If none
                                    // is, it wraps to 8 or more.
                                    const uint32_t k = target - column;
                                    const uint32_t target_bit = k < 8 ? 1u << k : 0u;
                                    const uint32_t wanted = in_vocabulary & ~target_bit;
                                    row_sums[i] = finish_exponentials<all>(
                                        z, wanted, write && row + i < p.N, row_at);
                                } else {
                                    const auto d = load<8>(static_cast<const bf16*>(piece));
                                    finish_activation(d, pre[i], sum, row + i < p.N, row_at);
                                }
                            }
                        };
                        if (all_wanted)
                            finish_rows(std::true_type());
                        else
                            finish_rows(std::false_type());
                    }
                    if constexpr (kBackward) {
                        for (int i = g; i < g + kRowsAtOnce; i++)
                            pre[i] = load_pre(next_row + i, next_column, lane);
                    }
                }

                __syncwarp();
                if (lane == 0)
                    mbarrier_arrive(d_empty(writer));
                if constexpr (kExponentials)
                    write_row_sums(row_sums, lane, row, first_column);
            }
            if constexpr (kBackward) {
                const size_t row =
                    static_cast<size_t>(first_row / kTileRows) * kEpilogueWarps + warp;
                store(p.partials + row * p.columns + column, sum);
            }
            d_full_phase ^= 1;
            slice -= kSlices;  // this warp's first slice of the next tile
        }
    }
};

}  // namespace
