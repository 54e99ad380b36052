// Reductions over a whole array: its sum, its norm, how many elements are not finite, and a
// checksum.
//
//   reduce_sum    out[0] = scale·Σ x
//   global_norm   out[0] = √Σ x²
//
// These two add in a fixed order and in two stages: each block sums its share of x, then one warp
// adds the blocks' sums in double. The grid depends only on the GPU, so the same input gives the
// same bits on every run. The kernels are memory-bound and read x once.
//
// Writes: out[0].  Limits: any n and alignment.
#include "common/random.h"
#include "cuda/vector.cuh"
#include "layers/layers.h"

namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSM = 8;  // 8·256 threads fill a multiprocessor

int reduce_blocks(const Cuda& dev) {
    return dev.num_sms * kBlocksPerSM;
}

// Stage 1.
template <int V, bool Square>
__global__ void __launch_bounds__(kThreads)
    partial_sums_kernel(float* partials, const float* __restrict__ x, size_t n) {
    const size_t stride = static_cast<size_t>(gridDim.x) * kThreads * V;
    float sum = 0.f;
#pragma unroll 4
    for (size_t i = (static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x) * V; i < n;
         i += stride) {
        const auto v = load<V>(x + i);
        for (int k = 0; k < V; k++)
            sum += Square ? v[k] * v[k] : v[k];
    }

    sum = block_sum(sum);
    if (threadIdx.x == 0)
        partials[blockIdx.x] = sum;
}

// Stage 2, by a single warp, which needs no barrier. Lane i adds partial sums i, i + 32, …
__global__ void __launch_bounds__(kWarp)
    final_sum_kernel(float* out, const float* partials, int count, float scale, bool root) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < count; i += kWarp)
        sum += partials[i];
    sum = warp_sum(sum);
    if (threadIdx.x == 0)
        *out = static_cast<float>(root ? sqrt(sum) : scale * sum);
}

template <class X>
__global__ void __launch_bounds__(kThreads)
    count_nonfinite_kernel(unsigned long long* count, const X* __restrict__ x, size_t n) {
    unsigned long long found = 0;
    for (size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x; i < n;
         i += size_t{gridDim.x} * kThreads)
        found += !isfinite(to_float(x[i]));
    if (found)
        atomicAdd(count, found);  // of integers: any order gives the same count
}

__global__ void __launch_bounds__(kThreads)
    checksum_kernel(unsigned long long* sum, const uint32_t* __restrict__ words, size_t n) {
    unsigned long long part = 0;
    for (size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x; i < n;
         i += size_t{gridDim.x} * kThreads)
        if (words[i])
            part += mix64((i + 1) * kGolden + words[i]);

    part = warp_sum(part);
    if (threadIdx.x % kWarp == 0)
        atomicAdd(sum, part);
}

}  // namespace

// -------------------------------------------------------------------------------------------------

template <bool Square>
static void reduce(const Cuda& dev, float* out, void* scratch, const float* x, float scale,
                   size_t n) {
    float* partials = static_cast<float*>(scratch);
    const int blocks = reduce_blocks(dev);
    const auto kernel = vectorises<float>(n, x) ? partial_sums_kernel<kVec<float>, Square>
                                                : partial_sums_kernel<1, Square>;

    kernel<<<blocks, kThreads, 0, dev.stream>>>(partials, x, n);
    LAUNCH_CHECK("partial_sums_kernel");
    final_sum_kernel<<<1, kWarp, 0, dev.stream>>>(out, partials, blocks, scale, Square);
    LAUNCH_CHECK("final_sum_kernel");
}

size_t reduce_scratch_bytes(const Cuda& dev) {
    return reduce_blocks(dev) * sizeof(float);
}

void reduce_sum(const Cuda& dev, float* out, void* scratch, const float* x, float scale, size_t n) {
    reduce<false>(dev, out, scratch, x, scale, n);
}

void global_norm(const Cuda& dev, float* out, void* scratch, const float* x, size_t n) {
    reduce<true>(dev, out, scratch, x, 1.f, n);
}

// Launches a kernel whose blocks add to a total in `scratch`, and returns the total.
template <class Kernel, class T>
static unsigned long long total_of(Kernel kernel, const Cuda& dev, void* scratch, const T* x,
                                   size_t n) {
    auto* device_total = static_cast<unsigned long long*>(scratch);
    dev.zero(device_total, sizeof *device_total);
    kernel<<<reduce_blocks(dev), kThreads, 0, dev.stream>>>(device_total, x, n);
    LAUNCH_CHECK("count_nonfinite_kernel or checksum_kernel");

    unsigned long long total = 0;
    dev.download(&total, device_total, sizeof total);
    return total;
}

template <class X>
size_t count_nonfinite(const Cuda& dev, void* scratch, const X* x, size_t n) {
    return total_of(count_nonfinite_kernel<X>, dev, scratch, x, n);
}

uint64_t checksum(const Cuda& dev, void* scratch, const void* x, size_t bytes) {
    return total_of(checksum_kernel, dev, scratch, static_cast<const uint32_t*>(x), bytes / 4);
}

template size_t count_nonfinite(const Cuda&, void*, const float*, size_t);
template size_t count_nonfinite(const Cuda&, void*, const bf16*, size_t);
