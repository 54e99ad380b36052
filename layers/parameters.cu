// Initial values of a model's parameters: random numbers, or numbers of another type from a file.
//
//   init_normal:  x[i]   = mean + σ·z(seed, first + i),  z ~ N(0, 1)
//   convert:      out[i] = To(in[i])
//
// z is computed from its index alone (common/random.h), so that every rank can fill just its own
// part. It is computed in double, so that on every machine the logarithm and the cosine round to
// the same float, up to one unit in the last place. A model of 1.6 billion parameters is filled in
// a fraction of a second.
//
// Writes: x and out, every element.  Limits: any n and alignment.
#include "common/random.h"
#include "cuda/vector.cuh"
#include "layers/layers.h"

namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSM = 8;

template <class X>
__global__ void __launch_bounds__(kThreads)
    init_normal_kernel(X* x, size_t n, double mean, double sigma, uint64_t seed, size_t first) {
    const size_t stride = size_t{gridDim.x} * kThreads;
    for (size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += stride) {
        const double value = sigma == 0.0 ? mean : mean + sigma * normal(seed, first + i);
        x[i] = static_cast<X>(static_cast<float>(value));
    }
}

template <class To, class From>
__global__ void __launch_bounds__(kThreads) convert_kernel(To* out, const From* in, size_t n) {
    const size_t stride = size_t{gridDim.x} * kThreads;
    for (size_t i = size_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += stride) {
        out[i] = static_cast<To>(to_float(in[i]));
    }
}

}  // namespace

template <class X>
void init_normal(const Cuda& dev, X* x, size_t n, double mean, double sigma, uint64_t seed,
                 size_t first) {
    const int blocks = kBlocksPerSM * dev.num_sms;
    init_normal_kernel<<<blocks, kThreads, 0, dev.stream>>>(x, n, mean, sigma, seed, first);
    LAUNCH_CHECK("init_normal_kernel");
}

template <class To, class From>
void convert(const Cuda& dev, To* out, const From* in, size_t n) {
    convert_kernel<<<kBlocksPerSM * dev.num_sms, kThreads, 0, dev.stream>>>(out, in, n);
    LAUNCH_CHECK("convert_kernel");
}

template void init_normal(const Cuda&, float*, size_t, double, double, uint64_t, size_t);
template void init_normal(const Cuda&, bf16*, size_t, double, double, uint64_t, size_t);
template void convert(const Cuda&, float*, const float*, size_t);
template void convert(const Cuda&, float*, const bf16*, size_t);
template void convert(const Cuda&, bf16*, const float*, size_t);
template void convert(const Cuda&, bf16*, const bf16*, size_t);
