// Matmul with a GELU behind it or before it, bf16: wgmma + TMA + mbarrier, warp-specialised, clusters of two (sm_90a).
//
//   forward    pre = A·B + bias,        out = gelu(pre)      A = inp (N,K),   B = weightᵀ (K,OC)
//   backward   dpre = (A·B)∘gelu'(pre), out = gelu(pre)      A = dout (N,K),  B = weight (K,OC)
//              dpre_sum += Σ_rows dpre
//
// GPT-2's K is short (768) and these products are wide (3072), so what is done with a tile after its product is a good
// part of the work. A pass of its own reads and writes (N, 3072) twice more. With GELU in the epilogue cuBLASLt runs at
// 70 % of its rate without. With GELU's derivative there it has only slow algorithms.
//
// The idea is that two kinds of warps share the work on a tile. The MMA warps multiply, round the tile to bf16, leave
// it in shared memory and go on with the next tile at once. The epilogue warps take it from there, a row at a time, 16
// bytes a lane, while the tensor cores work.
//
//   8 MMA warps       tile i: K in chunks of 64 │ to D │ tile i + 1: …            │ to D │ …
//   3 epilogue warps  tile i − 1                       │ tile i: gelu, to memory         │ tile i + 1 …
//   (backward: 7)
//   1 producer        TMA, three chunks ahead
//
// A block's tile is 128 × 256. Each of two warpgroups has 64 rows, which is 128 accumulators a thread. Forward's third
// warpgroup leaves a thread 168 registers, of which m64n256k16 wants 154. Backward has twice the work and traffic in
// its epilogue, and a fourth warpgroup for it. setmaxnreg divides the registers, but ptxas still allows no instruction
// more than the 128 of an equal share. So 256 columns are two products of m64n128k16, at a cost that forward would not
// get back.
//
// Two blocks are a cluster. Their tiles lie one below the other and share B. Each block loads half of B and sends it to
// both. The clusters take all columns of a pair of tiles' rows before the next rows. So A is read from memory once, and
// B stays in L2.
//
//   operand   where                             layout
//   A         shared memory, 3 stages           rows of 64 of K = 128 bytes, in TMA's 128-byte swizzle
//   B         shared memory, the same stages    forward: as A, a row is one of OC; backward: panels of 64 of OC, a row
//                                               is one of K, transposed by wgmma
//   sums      registers                         accumulator of m64n256k16, backward two of m64n128k16
//   D         shared memory, 128 rows           rows of 512 bytes, 16-byte piece c of row r at c ^ (r % 8)
//
//   barrier      who arrives                         who waits
//   full[3]      the producer; bytes: A, halves of B the MMA warps
//   empty[3]     the MMA warps of both blocks        the producer: its half of B goes to both
//   d_full[2]    4 MMA warps: their 64 rows of D     the epilogue warps
//   d_empty[8]   two epilogue warps, 8 rows each     the MMA warp of these rows, a tile later
//
// Backward's epilogue loads 8 rows of pre into registers ahead of its next turn. Column sums stay with their threads
// for a tile. Each warp's sums are a row of partials, which add_partials adds in order. The result is deterministic for
// a given number of clusters, because that number decides which warp takes which turn.
//
// What bounds it was measured on one H200, with N = 65536, 768 to 3072 and three epilogue warps in both passes. Times
// are sustained ms, backward with GELU again / forward. cuBLASLt and a kernel take 0.84 to 0.87 / 0.66.
//   the products alone                            0.44 / 0.43
//   with D written                                0.45 / 0.47
//   with the arithmetic too                       0.56 / 0.52
//   all of it                                     0.76 / 0.60
// Tensor cores are busy 97 % of the products' time and 52 % / 70 % of the whole. Clocks are at 1.6 to 1.7 GHz of 1.98
// in both, so the power cap has its share. Tried, where the kernel's time in the same job follows "for":
//   no cluster                                    0.81 / 0.62 for 0.80 / 0.61, though B comes twice from L2
//   TMA prefetch of the next tile's A into L2     0.80 / 0.62 for 0.80 / 0.61
//   streaming stores                              0.76 / 0.60 for 0.76 / 0.60
//   the epilogue in the MMA warps, two rows       0.75 / 0.64 for 0.78 / 0.61. ptxas lets wgmma wait for loads of pre
//     between chunks of the next tile               that are under way, and puts arithmetic between two of them
//   that, pre prefetched into L2 a tile ahead     0.81 for 0.75, because pre crosses the memory bus twice
//   128 columns of B resident, A streaming        0.91 / 0.79, too few bytes on the way
//   7 epilogue warps                              0.71 / 0.61 for 0.74 / 0.60, so backward has them now
//   that, clusters of four                        0.74 / 0.64 for 0.72 / 0.61, though less comes from L2
//   the last stage given back before the wait     0.72 / 0.61 for 0.72 / 0.61 (cool 0.600 / 0.500 for 0.612 / 0.500):
//     for operands, not behind the next products    predicted 0.66 / 0.58, from three stages on the way, not two
//   the products alone for qkv and projections    cold 0.35 for cuBLASLt's 0.32 (768 to 2304), 0.13 for 0.11 (768)
//
// Writes: pre, out, dpre, every element.  Adds into: dpre_sum.
// Limits: K a multiple of 64, OC of 256, pointers aligned to 16 bytes, compute capability 9.0, any N.
// Run: ./dev/bench_layers --layer gelu
#include <algorithm>
#include <map>

#include "layers/gpu/gelu.cuh"
#include "layers/gpu/partials.cuh"
#include "layers/gpu/ptx_sm90.cuh"
#include "layers/gpu/tensor_map.h"
#include "layers/gpu/vector.cuh"
#include "layers/sm90/matmul_sm90.h"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // kernels have empty bodies there, and what only they use is "never referenced"
#endif

namespace {

constexpr int kCluster = 2;                              // blocks
constexpr int kRows = 128, kColumns = 256, kChunk = 64;  // a block's tile, and the step along K
constexpr int kStages = 3;                               // as many as fit
constexpr int kMmaWarps = 8, kGroupWarps = 4, kGroups = kMmaWarps / kGroupWarps;  // kGroups warpgroups multiply

// A block's other warps, and what follows from their number.
template <bool Backward>
struct Shape {
    static constexpr int kEpilogueWarps = Backward ? 7 : 3;
    static constexpr int kThreads = (kMmaWarps + kEpilogueWarps + 1) * kWarp;
    static constexpr int kParts = Backward ? 2 : 1;          // of the columns, an instruction each
    static constexpr int kTurn = 8, kTurns = kRows / kTurn;  // rows that an epilogue warp takes at a time
    static constexpr int kAtOnce = Backward ? 2 : 4;         // rows whose arithmetic is interleaved
    // d_full has one phase per tile, and an epilogue warp must not miss one.
    static_assert(kEpilogueWarps <= kTurns / kGroups);
};
constexpr int kMmaRegisters = 160, kOtherRegisters = 96;  // backward
// Shared memory holds the stages of A and B, D and the barriers, 208 KB.
constexpr int kABytes = kRows * kChunk * 2, kBBytes = kColumns * kChunk * 2, kStageBytes = kABytes + kBBytes;
constexpr int kDRowBytes = kColumns * 2, kOffsetD = kStages * kStageBytes;
constexpr int kOffsetBarriers = kOffsetD + kRows * kDRowBytes;
constexpr int kSmem = kOffsetBarriers + (2 * kStages + kGroups + kMmaWarps) * 8;
static_assert(kSmem <= 227 * 1024);

struct Problem {
    int N, OC, chunks;
    int columns, items;  // tiles beside each other, and pairs of tiles, which a cluster takes one at a time
    const bf16* bias;    // forward
    const bf16* pre_in;  // backward
    bf16 *pre, *out, *dpre;
    float* partials;  // (tiles below each other, kEpilogueWarps, OC)
};

// One predicated instruction, because a branch would keep the rows around it from being interleaved.
__device__ __forceinline__ void store_if(bool wanted, bf16* to, const Vec<bf16, 8>& v) {
    uint4 w;
    memcpy(&w, &v, sizeof w);
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %0, 0;\n"
        "@p st.global.v4.b32 [%1], {%2, %3, %4, %5};\n"
        "}\n" ::"r"(int{wanted}),
        "l"(to), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w));
}

// What a block's warps share: where things lie in shared memory, the barriers, and which tiles are the block's.
template <bool Backward>
struct Block {
    const Problem& p;
    unsigned char* smem;
    uint32_t base;
    int rank, first, clusters;  // in the cluster; the cluster's first item; how many there are

    __device__ explicit Block(const Problem& p, unsigned char* smem)
        : p(p),
          smem(smem),
          base(smem_address(smem)),
          rank(blockIdx.x % kCluster),
          first(blockIdx.x / kCluster),
          clusters(gridDim.x / kCluster) {}
    __device__ uint32_t a_smem(int stage) const { return base + stage * kStageBytes; }
    __device__ uint32_t b_smem(int stage) const { return base + stage * kStageBytes + kABytes; }
    __device__ uint32_t barrier(int i) const { return base + kOffsetBarriers + i * 8; }
    __device__ uint32_t full(int stage) const { return barrier(stage); }
    __device__ uint32_t empty(int stage) const { return barrier(kStages + stage); }
    __device__ uint32_t d_full(int group) const { return barrier(2 * kStages + group); }
    __device__ uint32_t d_empty(int mma_warp) const { return barrier(2 * kStages + kGroups + mma_warp); }
    __device__ int row_of(int item) const { return (item / p.columns * kCluster + rank) * kRows; }
    __device__ int column_of(int item) const { return item % p.columns * kColumns; }

    __device__ void init_barriers() const {
        for (int i = 0; i < kStages; i++) {
            mbarrier_init(full(i), 1);
            mbarrier_init(empty(i), kCluster * kMmaWarps);
        }
        for (int i = 0; i < kGroups; i++) mbarrier_init(d_full(i), kGroupWarps);
        for (int i = 0; i < kMmaWarps; i++) mbarrier_init(d_empty(i), kRows / kMmaWarps / Shape<Backward>::kTurn);
        fence_mbarrier_init();
    }
};

template <bool Backward>
__device__ __forceinline__ void producer(const Block<Backward>& block, const CUtensorMap& a_map,
                                         const CUtensorMap& b_map) {
    Cursor<kStages> at;
    for (int item = block.first; item < block.p.items; item += block.clusters) {
        const int row = block.row_of(item), column = block.column_of(item);
        for (int k = 0; k < block.p.chunks; k++, at.advance()) {
            const uint32_t barrier = block.full(at.stage), b = block.b_smem(at.stage);
            mbarrier_wait(block.empty(at.stage), at.phase ^ 1);
            mbarrier_arrive_expect(barrier, kStageBytes);
            tma_load_4d(block.a_smem(at.stage), &a_map, barrier, 0, k, row, 0);
            constexpr uint16_t both = (1 << kCluster) - 1;
            constexpr int half = kColumns / kCluster;
            const int mine = block.rank * half;  // the first column of this block's half of B
            if constexpr (Backward) {
                for (int c = 0; c < half; c += 64)
                    tma_load_4d_multicast(b + (mine + c) * kChunk * 2, &b_map, barrier, 0, (column + mine + c) / 64,
                                          k * kChunk, 0, both);
            } else {
                tma_load_4d_multicast(b + mine * kChunk * 2, &b_map, barrier, 0, k, column + mine, 0, both);
            }
        }
    }
}

// Multiplies, and leaves each tile in shared memory, rounded.
template <bool Backward>
__device__ __forceinline__ void mma_warp(const Block<Backward>& block, int warp, int lane) {
    constexpr int kParts = Shape<Backward>::kParts, kPart = kColumns / 8 / kParts;
    auto release = [&](int stage) {  // lanes 0 and 1 each tell one block's producer
        if (lane < kCluster) mbarrier_arrive_cluster(block.empty(stage), lane);
    };
    Cursor<kStages> at;
    uint32_t d_phase = 1;
    for (int item = block.first; item < block.p.items; item += block.clusters, d_phase ^= 1) {
        float d[kParts][kPart][4];
        int previous = 0;
        for (int k = 0; k < block.p.chunks; k++) {
            mbarrier_wait(block.full(at.stage), at.phase);
            const uint64_t a = wgmma_descriptor(block.a_smem(at.stage) + warp / kGroupWarps * 64 * kChunk * 2),
                           b = wgmma_descriptor(block.b_smem(at.stage), Backward ? 64 * kChunk * 2 : 16);
            wgmma_fence();
            for (int kk = 0; kk < kChunk / 16; kk++)
                for (int h = 0; h < kParts; h++)
                    wgmma_ss<false, Backward>(d[h], wgmma_advance(a, kk * 32),
                                              wgmma_advance(b, h * kBBytes / kParts + kk * (Backward ? 16 * 128 : 32)),
                                              k > 0 || kk > 0);
            wgmma_commit();
            if (k > 0) {
                wgmma_wait<1>();
                release(previous);
            }
            previous = at.stage;
            at.advance();
        }
        wgmma_wait<0>();
        for (int h = 0; h < kParts; h++) wgmma_hold(d[h]);
        release(previous);

        const bf16* bias = block.p.bias + block.column_of(item) + lane % 4 * 2;
        const uint32_t d_row = block.base + kOffsetD + (warp * 16 + lane % 16) * kDRowBytes;
        mbarrier_wait(block.d_empty(warp), d_phase);
        for (int n = 0; n < kColumns / 8; n += 2) {
            uint32_t packed[4];
            for (int i = 0; i < 4; i++) {
                float left = d[n / kPart][n % kPart + i / 2][i % 2 * 2],
                      right = d[n / kPart][n % kPart + i / 2][i % 2 * 2 + 1];
                if constexpr (!Backward) {
                    const auto b = load<2>(bias + 8 * (n + i / 2));
                    left += b[0], right += b[1];
                }
                packed[i] = pack_bf16(left, right);
            }
            stmatrix_x4(d_row + (((n + lane / 16) ^ lane % 8) << 4), packed);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(block.d_full(warp / kGroupWarps));
    }
}

// Eight elements of a row: d of the product to the results at `at`, which exist if `inside`. Backward has x of pre and
// adds to the column sums.
template <bool Backward, bool Again>
__device__ __forceinline__ void finish(const Problem& p, const Vec<bf16, 8>& d, const Vec<bf16, 8>& x,
                                       Vec<float, 8>& sum, bool inside, size_t at) {
    const Vec<float, 8> d_float = to_float(d);
    Vec<bf16, 8> stored = d;  // forward: pre
    Vec<float, 8> y;
    if constexpr (Backward) {
        const Vec<float, 8> v = to_float(x);
        Vec<float, 8> dx;
        for (int k = 0; k < 8; k++) {
            const float s = gelu_sigmoid(v[k]);
            y.x[k] = v[k] * s;
            dx.x[k] = d_float[k] * gelu_derivative(v[k], s, y.x[k]);
        }
        stored = round_to<bf16>(dx);
        const Vec<float, 8> summand = to_float(stored);  // 0 beyond N, where A is 0
        for (int k = 0; k < 8; k++) sum.x[k] += summand[k];
    } else {
        for (int k = 0; k < 8; k++) y.x[k] = d_float[k] * gelu_sigmoid(d_float[k]);
    }
    store_if(inside, (Backward ? p.dpre : p.pre) + at, stored);
    if (Again) store_if(inside, p.out + at, round_to<bf16>(y));
}

template <bool Backward, bool Again>
__device__ __forceinline__ void epilogue_warp(const Block<Backward>& block, int epilogue_warp, int lane) {
    using S = Shape<Backward>;
    const Problem& p = block.p;
    Vec<bf16, 8> x[S::kTurn];  // rows of pre, those of the next turn as soon as this turn does not need them any more
    auto fetch = [&](int item, int row) {
        return load<8>(p.pre_in + static_cast<size_t>(min(row, p.N - 1)) * p.OC + block.column_of(item) + lane * 8);
    };
    // A tile has 16 turns, which go round 3 (7) warps and on to the next tile. So each warp has 5 or 6 (2 or 3) of a
    // tile.
    int turn = epilogue_warp;
    if constexpr (Backward) {
#pragma unroll  // here and below: or x would be in local memory
        for (int i = 0; i < S::kTurn; i++) x[i] = fetch(block.first, block.row_of(block.first) + turn * S::kTurn + i);
    }
    uint32_t d_phase = 0;
    for (int item = block.first; item < p.items; item += block.clusters, d_phase ^= 1, turn -= S::kTurns) {
        const int column = block.column_of(item) + lane * 8;
        Vec<float, 8> sum = {};
#pragma unroll 1
        for (; turn < S::kTurns; turn += S::kEpilogueWarps) {
            const int mma_warp = turn * S::kTurn / (kRows / kMmaWarps), row = block.row_of(item) + turn * S::kTurn;
            const int next_turn = turn + S::kEpilogueWarps;
            const int next_item = next_turn < S::kTurns ? item : min(item + block.clusters, p.items - 1);
            const int next_row = block.row_of(next_item) + next_turn % S::kTurns * S::kTurn;
            const unsigned char* d_smem = block.smem + kOffsetD + turn * S::kTurn * kDRowBytes;
            const size_t at = static_cast<size_t>(row) * p.OC + column;
            mbarrier_wait(block.d_full(mma_warp / kGroupWarps), d_phase);
#pragma unroll
            for (int g = 0; g < S::kTurn; g += S::kAtOnce) {
                // The branch also keeps the compiler from using all of x at the start, when its loads have just been
                // issued.
                if (row + g < p.N) {
#pragma unroll
                    for (int i = g; i < g + S::kAtOnce; i++)
                        finish<Backward, Again>(
                            p,
                            load<8>(reinterpret_cast<const bf16*>(d_smem + i * kDRowBytes +
                                                                  ((lane ^ (turn * S::kTurn % 8 + i)) << 4))),
                            x[i], sum, row + i < p.N, at + static_cast<size_t>(i) * p.OC);
                }
                if constexpr (Backward) {
                    for (int i = g; i < g + S::kAtOnce; i++) x[i] = fetch(next_item, next_row + i);
                }
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(block.d_empty(mma_warp));
        }
        if constexpr (Backward) {
            const size_t row = static_cast<size_t>(block.row_of(item) / kRows) * S::kEpilogueWarps + epilogue_warp;
            store(p.partials + row * p.OC + column, sum);
        }
    }
}

// Again means that backward writes out too, as forward always does.
template <bool Backward, bool Again>
__global__ void __launch_bounds__(Shape<Backward>::kThreads, 1)
    matmul_gelu_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                       const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char smem[];
    const Block<Backward> block(p, smem);
    if (threadIdx.x == 0) block.init_barriers();
    cluster_sync();
    // The shuffle tells the compiler that a warp's threads agree, because wgmma may not stand where they could part.
    const int warp = __shfl_sync(~0u, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;
    if (warp < kMmaWarps) {
        if constexpr (Backward) setmaxnreg_inc<kMmaRegisters>();
        mma_warp(block, warp, lane);
    } else {
        if constexpr (Backward) setmaxnreg_dec<kOtherRegisters>();
        if (warp == kMmaWarps + Shape<Backward>::kEpilogueWarps) {
            if (lane == 0) producer(block, a_map, b_map);
        } else {
            epilogue_warp<Backward, Again>(block, warp - kMmaWarps, lane);
        }
    }
    cluster_sync();  // the other block's arrivals may still be on the way here
#endif
}

// ---------------------------------------------------------------------------------------------------------------------

// Describes x (rows, columns) for boxes of 64 columns by `box_rows` rows, with coordinates (0, column / 64, row, 0).
CUtensorMap matrix_map(const char* name, const bf16* x, size_t rows, int columns, int box_rows) {
    return tensor_map(name, Heads<const bf16>{x, rows * columns, size_t(columns)}, 1, static_cast<int>(rows),
                      columns / 64, 64, box_rows);
}

template <bool Backward, bool Again>
void launch(const Cuda& dev, Problem p, size_t N, const bf16* a, const bf16* b, int K) {
    p.N = static_cast<int>(N);
    p.chunks = K / kChunk;
    p.columns = p.OC / kColumns;
    p.items = static_cast<int>(ceil_div(N, kRows * kCluster)) * p.columns;
    const CUtensorMap a_map = matrix_map("A", a, N, K, kRows),
                      b_map = Backward ? matrix_map("B", b, K, p.OC, kChunk)
                                       : matrix_map("B", b, p.OC, K, kColumns / kCluster);
    const auto kernel = matmul_gelu_kernel<Backward, Again>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = kCluster, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = kCluster, config.blockDim = Shape<Backward>::kThreads, config.dynamicSmemBytes = kSmem;
    config.stream = dev.stream, config.attrs = &cluster, config.numAttrs = 1;
    // A cluster needs SMs that lie together, of which there may be fewer than half of all. Asking takes microseconds,
    // so the answer is kept.
    static std::map<int, int> most;  // of each device
    int& clusters = most[dev.device];
    if (clusters == 0) CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
    config.gridDim = kCluster * std::clamp(clusters, 1, p.items);
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, a_map, b_map, static_cast<const Problem&>(p)));
}

int partial_rows(size_t N) {
    return static_cast<int>(ceil_div(N, kCluster * kRows)) * kCluster * Shape<true>::kEpilogueWarps;
}

}  // namespace

bool matmul_sm90_takes(const Cuda& dev, int K, int OC, std::initializer_list<const void*> pointers) {
    return dev.sm90a && K % kChunk == 0 && OC % kColumns == 0 &&
           std::all_of(pointers.begin(), pointers.end(),
                       [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
}

void matmul_sm90_gelu_forward(const Cuda& dev, bf16* out, bf16* pre, const bf16* inp, const bf16* weight,
                              const bf16* bias, size_t N, int K, int OC) {
    if (N == 0) return;
    Problem p{};
    p.OC = OC, p.bias = bias, p.pre = pre, p.out = out;
    launch<false, true>(dev, p, N, inp, weight, K);
}

size_t matmul_sm90_scratch_bytes(size_t N, int OC) {
    return static_cast<size_t>(partial_rows(N)) * OC * sizeof(float);
}

void matmul_sm90_gelu_backward(const Cuda& dev, bf16* dpre, float* dpre_sum, bf16* out, void* scratch, const bf16* dout,
                               const bf16* weight, const bf16* pre, size_t N, int K, int OC) {
    if (N == 0) return;
    Problem p{};
    p.OC = OC, p.pre_in = pre, p.dpre = dpre, p.out = out, p.partials = static_cast<float*>(scratch);
    out ? launch<true, true>(dev, p, N, dout, weight, K) : launch<true, false>(dev, p, N, dout, weight, K);
    add_partials(dev, {dpre_sum}, p.partials, partial_rows(N), OC);
}
