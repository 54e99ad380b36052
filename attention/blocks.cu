// Moving and adding the blocks of ring attention. Bound by memory, 16 bytes of the wider type a thread.
//
// Writes: copy_rows dst.  Adds into: add_to y.  Limits: copy_rows: n and strides are multiples of 4, pointers aligned
// to four elements.
#include <algorithm>

#include "attention/blocks.h"
#include "layers/vector.cuh"

constexpr int kThreads = 256;
constexpr int kV = 4;

static unsigned blocks_for(const Cuda& dev, size_t threads) {
    return static_cast<unsigned>(std::min<size_t>((threads + kThreads - 1) / kThreads, size_t(dev.num_sms) * 32));
}

template <class Y, class X>
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(Y* dst, size_t dst_stride, const X* __restrict__ src, size_t src_stride, size_t n, size_t rows) {
    const size_t groups = n / kV;  // of a row
    for (size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x; i < rows * groups; i += size_t(gridDim.x) * kThreads) {
        const size_t row = i / groups, column = i % groups * kV;
        const auto x = load<kV>(src + row * src_stride + column);
        Vec<float, kV> values;
        for (int k = 0; k < kV; k++) values.x[k] = x[k];
        store(dst + row * dst_stride + column, values);
    }
}

__global__ void __launch_bounds__(kThreads) add_to_kernel(float* y, const float* __restrict__ x, size_t n) {
    for (size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x; i < n / kV; i += size_t(gridDim.x) * kThreads) {
        auto sum = load<kV>(y + i * kV);
        const auto more = load<kV>(x + i * kV);
        for (int k = 0; k < kV; k++) sum.x[k] += more[k];
        store(y + i * kV, sum);
    }
}

// ---------------------------------------------------------------------------------------------------------------------

template <class Y, class X>
void copy_rows(const Cuda& dev, Y* dst, size_t dst_stride, const X* src, size_t src_stride, size_t n, size_t rows) {
    if ((n | dst_stride | src_stride) % kV)
        throw Error(format("copy_rows: %zu elements, strides %zu and %zu: expected multiples of %d", n, dst_stride,
                           src_stride, kV));
    if (n * rows == 0) return;
    copy_rows_kernel<<<blocks_for(dev, n / kV * rows), kThreads, 0, dev.stream>>>(dst, dst_stride, src, src_stride, n,
                                                                                  rows);
    LAUNCH_CHECK("copy_rows_kernel");
}

void add_to(const Cuda& dev, float* y, const float* x, size_t n) {
    if (n % kV) throw Error(format("add_to: %zu elements, expected a multiple of %d", n, kV));
    if (n == 0) return;
    add_to_kernel<<<blocks_for(dev, n / kV), kThreads, 0, dev.stream>>>(y, x, n);
    LAUNCH_CHECK("add_to_kernel");
}

template void copy_rows(const Cuda&, float*, size_t, const float*, size_t, size_t, size_t);
template void copy_rows(const Cuda&, bf16*, size_t, const bf16*, size_t, size_t, size_t);
template void copy_rows(const Cuda&, bf16*, size_t, const float*, size_t, size_t, size_t);
