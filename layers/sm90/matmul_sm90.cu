// The matmuls of matmul_sm90.h: their kernel, whose warps are described in matmul_block.cuh, and
// its launch.
#include <algorithm>
#include <map>
#include <utility>

#include "cuda/partials.cuh"
#include "cuda/tensor_map.h"
#include "layers/sm90/matmul_block.cuh"

namespace {

// If K is at least this, kFew warps finish a backward tile about as fast as the MMA warps multiply
// it, and a step gains nothing from kMany.
constexpr int kLongK = 1024;

// Products with at least this many tiles side by side need bands. GPT-2 1558M has 25, and B is then
// 20 MB. That is less than L2, but pre and out pass through L2, too. At 16 tiles, GPT-2 350M, bands
// gain nothing.
constexpr int kWide = 24;

// The height of their bands, in pairs of tiles. 66 clusters then compute a square of about 8 × 8
// pairs and tiles, 2048 rows and columns, which is the shape that needs the least of A and B.
constexpr int kWideBand = 8;

// The same for logits, whose B is larger than L2: higher bands read it less often.
constexpr int kLogitsBand = 16;

template <Mode mode, int kEpilogueWarps>
__global__ void __launch_bounds__(Block<mode, kEpilogueWarps>::kThreads, 1)
    matmul_sm90_kernel(const __grid_constant__ CUtensorMap a_map,
                       const __grid_constant__ CUtensorMap b_map,
                       const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char smem[];
    const Block<mode, kEpilogueWarps> block{a_map, b_map, p, smem};
    if (threadIdx.x == 0)
        block.init_barriers();
    cluster_sync();

    // wgmma must not be where a warp's threads could diverge. The shuffle tells the compiler that
    // they all have the same `warp`.
    const int warp = __shfl_sync(~0u, threadIdx.x / kWarp, 0);
    const int lane = threadIdx.x % kWarp;
    if (warp < kMmaWarps) {
        if constexpr (kEpilogueWarps == kMany)
            setmaxnreg_inc<kMmaRegisters>();
        block.mma_warp(warp, lane);
    } else {
        if constexpr (kEpilogueWarps == kMany)
            setmaxnreg_dec<kOtherRegisters>();
        if (warp == kMmaWarps + kEpilogueWarps) {
            if (lane == 0)
                block.producer();
        } else {
            block.epilogue_warp(warp - kMmaWarps, lane);
        }
    }
    cluster_sync();  // until then the other block may still arrive at our barriers
#endif
}

// -------------------------------------------------------------------------------------------------

struct Matrix {
    const bf16* x;
    size_t rows;
    int columns;
};

// Describes m for boxes of kPanel columns by `box_rows` rows: as one sequence, whose tokens are the
// rows of m and whose heads are its panels. The coordinates of a box are (0, panel, row, 0).
CUtensorMap matrix_map(const char* name, const Matrix& m, int box_rows) {
    const HeadsView<const bf16> panels = {.ptr = m.x,
                                          .batch_stride = m.rows * m.columns,
                                          .token_stride = static_cast<size_t>(m.columns)};
    const HeadsShape shape = {
        .B = 1, .T = static_cast<int>(m.rows), .heads = m.columns / kPanel, .HS = kPanel};
    return tensor_map(name, panels, shape, box_rows);
}

// The factors of a product as they are in memory: A (N,K), and B (columns,K), or (K,columns) for
// backward.
struct Factors {
    const bf16* a;
    const bf16* b;
};

// How many clusters the GPU can run at once. The SMs of a cluster must be close to each other, so
// there may be fewer than half as many clusters as SMs. Asking takes microseconds, so the answers
// are kept.
template <class Kernel>
int max_clusters(const Cuda& dev, Kernel* kernel, const cudaLaunchConfig_t& config) {
    static std::map<std::pair<Kernel*, int>, int> answers;  // of each kernel and device
    int& clusters = answers[{kernel, dev.device}];
    if (clusters == 0)
        CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
    return clusters;
}

template <Mode mode, int kEpilogueWarps = kFew>
void launch(const Cuda& dev, const Sm90Product& product, const Factors& factors, Problem p) {
    using Block = ::Block<mode, kEpilogueWarps>;
    const size_t N = product.N;
    const int K = product.K;
    const int columns = product.columns;

    const Matrix a = {.x = factors.a, .rows = N, .columns = K};
    const CUtensorMap a_map = matrix_map("A", a, kTileRows);
    const Matrix b = Block::kBackward
                         ? Matrix{.x = factors.b, .rows = size_t(K), .columns = columns}
                         : Matrix{.x = factors.b, .rows = size_t(columns), .columns = K};
    // A box of B has all of a stage's rows in backward, and the block's half of them otherwise.
    const int b_box_rows = Block::kBackward ? kChunk : kTileColumns / kCluster;
    const CUtensorMap b_map = matrix_map("B", b, b_box_rows);

    p.N = static_cast<int>(N);
    p.columns = columns;
    p.chunks = K / kChunk;
    p.tiles_across = static_cast<int>(ceil_div(columns, kTileColumns));
    p.pairs_down = static_cast<int>(ceil_div(N, kTileRows * kCluster));
    if (Block::kExponentials)
        p.band = kLogitsBand;
    else
        p.band = p.tiles_across < kWide ? 1 : kWideBand;
    p.work_items = p.pairs_down * p.tiles_across;

    const auto kernel = matmul_sm90_kernel<mode, kEpilogueWarps>;
    constexpr int kSmem = sizeof(SharedMemory);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));

    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = kCluster;  // for max_clusters(), which needs only a valid one
    config.blockDim = Block::kThreads;
    config.dynamicSmemBytes = kSmem;
    config.stream = dev.stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    const int clusters = std::clamp(max_clusters(dev, kernel, config), 1, p.work_items);
    config.gridDim = kCluster * clusters;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, a_map, b_map, p));
}

// How many rows of partial sums a backward call writes.
int partial_rows(size_t N, int epilogue_warps) {
    return static_cast<int>(ceil_div(N, kCluster * kTileRows)) * kCluster * epilogue_warps;
}

}  // namespace

bool matmul_sm90_supports(const Cuda& dev, const Sm90Product& product) {
    return dev.sm90a && product.K % kChunk == 0 && product.columns % kTileColumns == 0;
}

void matmul_sm90_activation_forward(const Cuda& dev, const Sm90Product& product,
                                    const Sm90ForwardOperands& o) {
    if (product.N == 0)
        return;

    Problem p{};
    p.bias = o.bias;
    p.pre = o.pre;
    p.out = o.out;
    launch<Mode::forward>(dev, product, {.a = o.inp, .b = o.weight}, p);
}

size_t matmul_sm90_scratch_bytes(const Sm90Product& product) {
    return static_cast<size_t>(partial_rows(product.N, kMany)) * product.columns * sizeof(float);
}

void matmul_sm90_activation_backward(const Cuda& dev, const Sm90Product& product,
                                     const Sm90BackwardOperands& o) {
    if (product.N == 0)
        return;

    Problem p{};
    p.pre_in = o.pre;
    p.dpre = o.dpre;
    p.out = o.out;
    p.partials = static_cast<float*>(o.scratch);

    const auto run = [&](auto epilogue_warps) {
        const auto kind = o.out ? launch<Mode::backward_recompute, epilogue_warps>
                                : launch<Mode::backward, epilogue_warps>;
        kind(dev, product, {.a = o.dout, .b = o.weight}, p);
        add_partials(dev, {o.dpre_sum},
                     {.sums = p.partials,
                      .rows = partial_rows(product.N, epilogue_warps),
                      .columns = product.columns});
    };
    if (product.K < kLongK)
        run(std::integral_constant<int, kMany>());
    else
        run(std::integral_constant<int, kFew>());
}

void matmul_sm90_exponentials(const Cuda& dev, const Sm90Product& product,
                              const Sm90ExponentialOperands& o) {
    Problem p{};
    p.V = o.V;
    p.shifts = o.shifts;
    p.targets = o.targets;
    p.out = o.out;
    p.partials = o.sums;
    launch<Mode::exponentials>(dev, product, {.a = o.inp, .b = o.weight}, p);
}
