// The matmuls of matmul_sm90.h: the kernel whose warps matmul_block.cuh describes, and its launch.
#include <algorithm>
#include <map>

#include "cuda/partials.cuh"
#include "cuda/tensor_map.h"
#include "layers/sm90/matmul_block.cuh"

namespace {

constexpr int kLongK = 1024;  // from here on a backward product outlasts its epilogue by few warps

template <Mode mode, int kEpilogueWarps>
__global__ void __launch_bounds__(Block<mode, kEpilogueWarps>::kThreads, 1)
    matmul_sm90_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                       const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char smem[];
    const Block<mode, kEpilogueWarps> block{a_map, b_map, p, smem};
    if (threadIdx.x == 0) block.init_barriers();
    cluster_sync();
    // The shuffle tells the compiler that a warp's threads agree, because wgmma may not stand where they could part.
    const int warp = __shfl_sync(~0u, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;
    if (warp < kMmaWarps) {
        if constexpr (kEpilogueWarps == kMany) setmaxnreg_inc<kMmaRegisters>();
        block.mma_warp(warp, lane);
    } else {
        if constexpr (kEpilogueWarps == kMany) setmaxnreg_dec<kOtherRegisters>();
        if (warp == kMmaWarps + kEpilogueWarps) {
            if (lane == 0) block.producer();
        } else {
            block.epilogue_warp(warp - kMmaWarps, lane);
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

template <Mode mode, int kEpilogueWarps = kFew>
void launch(const Cuda& dev, Problem p, size_t N, const bf16* a, const bf16* b, int K) {
    using Block = ::Block<mode, kEpilogueWarps>;
    const CUtensorMap a_map = matrix_map("A", a, N, K, kRows);
    const CUtensorMap b_map =
        Block::Backward ? matrix_map("B", b, K, p.OC, kChunk) : matrix_map("B", b, p.OC, K, kColumns / kCluster);
    p.N = static_cast<int>(N);
    p.chunks = K / kChunk;
    p.columns = static_cast<int>(ceil_div(p.OC, kColumns));
    p.pairs = static_cast<int>(ceil_div(N, kRows * kCluster));
    p.items = p.pairs * p.columns;
    const auto kernel = matmul_sm90_kernel<mode, kEpilogueWarps>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem));
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = kCluster, config.blockDim = Block::kThreads, config.dynamicSmemBytes = kSmem;
    config.stream = dev.stream, config.attrs = &cluster, config.numAttrs = 1;
    // A cluster needs SMs that lie together, of which there may be fewer than half of all. Asking takes microseconds,
    // so the answer is kept.
    static std::map<int, int> most;  // of each device
    int& clusters = most[dev.device];
    if (clusters == 0) CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
    config.gridDim = kCluster * std::clamp(clusters, 1, p.items);
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, a_map, b_map, static_cast<const Problem&>(p)));
}

int partial_rows(size_t N, int epilogue_warps) {
    return static_cast<int>(ceil_div(N, kCluster * kRows)) * kCluster * epilogue_warps;
}

}  // namespace

bool matmul_sm90_takes(const Cuda& dev, int K, int OC) {
    return dev.sm90a && K % kChunk == 0 && OC % kColumns == 0;
}

void matmul_sm90_gelu_forward(const Cuda& dev, bf16* out, bf16* pre, const bf16* inp, const bf16* weight,
                              const bf16* bias, size_t N, int K, int OC) {
    if (N == 0) return;
    Problem p{};
    p.OC = OC, p.bias = bias, p.pre = pre, p.out = out;
    launch<Mode::forward>(dev, p, N, inp, weight, K);
}

size_t matmul_sm90_scratch_bytes(size_t N, int OC) {
    return static_cast<size_t>(partial_rows(N, kMany)) * OC * sizeof(float);
}

void matmul_sm90_gelu_backward(const Cuda& dev, bf16* dpre, float* dpre_sum, bf16* out, void* scratch, const bf16* dout,
                               const bf16* weight, const bf16* pre, size_t N, int K, int OC) {
    if (N == 0) return;
    Problem p{};
    p.OC = OC, p.pre_in = pre, p.dpre = dpre, p.out = out, p.partials = static_cast<float*>(scratch);
    const auto run = [&](auto epilogue_warps) {
        const auto kind = out ? launch<Mode::backward_again, epilogue_warps> : launch<Mode::backward, epilogue_warps>;
        kind(dev, p, N, dout, weight, K);
        add_partials(dev, {dpre_sum}, p.partials, partial_rows(N, epilogue_warps), OC);
    };
    K < kLongK ? run(std::integral_constant<int, kMany>()) : run(std::integral_constant<int, kFew>());
}

void matmul_sm90_exponentials(const Cuda& dev, bf16* out, float* sums, const bf16* inp, const bf16* weight,
                              const float* shifts, const int* targets, size_t N, int K, int V, int OC) {
    Problem p{};
    p.OC = OC, p.V = V, p.shifts = shifts, p.targets = targets, p.out = out, p.partials = sums;
    launch<Mode::exponentials>(dev, p, N, inp, weight, K);
}
