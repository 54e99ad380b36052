// Moves and adds the blocks of chunked and ring attention. Bound by memory, so a thread takes four elements at once,
// which is 16 bytes of fp32, if rows and pointers allow it.
//
// Writes: copy_rows and sum_rows dst, write_dq_rows dq.  Adds into: add_rows dst.  Limits: none.
#include <algorithm>

#include "attention/ring/blocks.h"
#include "layers/gpu/vector.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kWide = 4;

struct Copy {
    static constexpr bool has_b = false;
    __device__ static float of(float a, float) { return a; }
};
struct Add {
    static constexpr bool has_b = true;
    __device__ static float of(float a, float b) { return a + b; }
};

// dst ← Op(a, b). b may be dst.
template <class Op, int V, class Y, class X>
__global__ void __launch_bounds__(kThreads) rows_kernel(Y* dst, size_t dst_stride, const X* a, size_t a_stride,
                                                        const float* b, size_t b_stride, size_t n, size_t rows) {
    const size_t groups = n / V;  // of a row
    for (size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x; i < rows * groups; i += size_t(gridDim.x) * kThreads) {
        const size_t row = i / groups, column = i % groups * V;
        const auto x = load<V>(a + row * a_stride + column);
        Vec<float, V> y = {};
        if (Op::has_b) y = load<V>(b + row * b_stride + column);
        for (int k = 0; k < V; k++) y.x[k] = Op::of(x[k], y.x[k]);
        store(dst + row * dst_stride + column, y);
    }
}

// ---------------------------------------------------------------------------------------------------------------------

template <class Op, class Y, class X>
void on_rows(const Cuda& dev, Y* dst, size_t dst_stride, const X* a, size_t a_stride, const float* b, size_t b_stride,
             size_t n, size_t rows) {
    if (n * rows == 0) return;
    const auto aligned = [](const auto* p) { return reinterpret_cast<uintptr_t>(p) % (kWide * sizeof(*p)) == 0; };
    const bool wide = (n | dst_stride | a_stride | b_stride) % kWide == 0 && aligned(dst) && aligned(a) && aligned(b);
    const size_t threads = rows * n / (wide ? kWide : 1);
    const size_t blocks = std::min<size_t>(ceil_div(threads, kThreads), size_t(dev.num_sms) * 32);
    const auto kernel = wide ? rows_kernel<Op, kWide, Y, X> : rows_kernel<Op, 1, Y, X>;
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, dev.stream>>>(dst, dst_stride, a, a_stride, b, b_stride, n,
                                                                       rows);
    LAUNCH_CHECK("rows_kernel");
}

}  // namespace

template <class Y, class X>
void copy_rows(const Cuda& dev, Y* dst, size_t dst_stride, const X* src, size_t src_stride, size_t n, size_t rows) {
    on_rows<Copy>(dev, dst, dst_stride, src, src_stride, nullptr, 0, n, rows);
}

void add_rows(const Cuda& dev, float* dst, size_t dst_stride, const float* src, size_t src_stride, size_t n,
              size_t rows) {
    on_rows<Add>(dev, dst, dst_stride, src, src_stride, dst, dst_stride, n, rows);
}

template <class Y>
void sum_rows(const Cuda& dev, Y* dst, size_t dst_stride, const float* a, const float* b, size_t src_stride, size_t n,
              size_t rows) {
    on_rows<Add>(dev, dst, dst_stride, a, src_stride, b, src_stride, n, rows);
}

size_t dq_rows_bytes(const PartialShape& s) {
    return size_t(s.B) * s.rows_of_q() * s.NH * s.HS * sizeof(float);
}

template <class X>
void write_dq_rows(const Cuda& dev, Heads<X> dq, const float* dq_sum, const PartialShape& s) {
    const size_t C = size_t(s.NH) * s.HS, rows = s.rows_of_q();
    for (int b = 0; b < s.B; b++) copy_rows(dev, dq.ptr + b * dq.batch, dq.token, dq_sum + b * rows * C, C, C, rows);
}

template void write_dq_rows(const Cuda&, Heads<float>, const float*, const PartialShape&);
template void write_dq_rows(const Cuda&, Heads<bf16>, const float*, const PartialShape&);
template void copy_rows(const Cuda&, float*, size_t, const double*, size_t, size_t, size_t);
template void copy_rows(const Cuda&, float*, size_t, const float*, size_t, size_t, size_t);
template void copy_rows(const Cuda&, bf16*, size_t, const bf16*, size_t, size_t, size_t);
template void copy_rows(const Cuda&, bf16*, size_t, const float*, size_t, size_t, size_t);
template void sum_rows(const Cuda&, float*, size_t, const float*, const float*, size_t, size_t, size_t);
template void sum_rows(const Cuda&, bf16*, size_t, const float*, const float*, size_t, size_t, size_t);
