// The activation function f (cuda/activation.cuh) in kernels of its own, for matmuls that cannot
// apply it in their epilogue.
//
//   forward    out = f(inp)
//   backward   dinp = dout∘f'(inp),   dinp_sum += Σ_rows dinp,   and out = f(inp) if it is wanted
//
// The kernels are memory-bound, with 2 streams forward and 3 or 4 backward. Backward also computes
// what would otherwise take another pass over dinp or inp: the sum of dinp over rows and, for a
// caller that did not keep it, f(inp).
//
// Writes: out and dinp, every element.  Adds into: dinp_sum.
// Limits: any size and alignment.
#include "cuda/activation.cuh"
#include "cuda/partials.cuh"
#include "cuda/vector.cuh"
#include "layers/layers.h"

namespace {

constexpr int kThreads = 256;

template <class X, int V>
__global__ void __launch_bounds__(kThreads)
    activation_forward_kernel(X* out, const X* inp, size_t n) {
    const size_t i = (static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
    if (i >= n)
        return;

    const auto x = load<V>(inp + i);
    Vec<float, V> y;
    for (int k = 0; k < V; k++)
        y.x[k] = Activation(x[k]).value();
    store(out + i, y);
}

template <class X, int V, bool Recompute>
__global__ void __launch_bounds__(kColumnThreads)
    activation_backward_kernel(X* dinp, float* __restrict__ partials, X* __restrict__ out,
                               const X* __restrict__ inp, const X* dout, size_t N, int C) {
    column_sums<V, 2>(partials, N, C, [=](size_t row, int c, float (&sum)[V]) {
        const size_t at = row * C + c;
        const auto x = load<V>(inp + at);
        const auto dy = load<V>(dout + at);

        Vec<float, V> y;
        Vec<float, V> dx;
        for (int k = 0; k < V; k++) {
            const Activation f(x[k]);
            y.x[k] = f.value();
            dx.x[k] = dy[k] * f.derivative();
        }

        const Vec<X, V> stored = round_to<X>(dx);
        store(dinp + at, stored);
        if constexpr (Recompute)
            store(out + at, y);
        for (int k = 0; k < V; k++)
            sum[k] += stored[k];
    });
}

}  // namespace

// -------------------------------------------------------------------------------------------------

template <class X>
void activation_forward(const Cuda& dev, X* out, const X* inp, size_t n) {
    if (n == 0)
        return;

    const bool vector = vectorises<X>(n, out, inp);
    const int V = vector ? kVec<X> : 1;
    const auto kernel =
        vector ? activation_forward_kernel<X, kVec<X>> : activation_forward_kernel<X, 1>;
    kernel<<<ceil_div(n, kThreads * V), kThreads, 0, dev.stream>>>(out, inp, n);
    LAUNCH_CHECK("activation_forward_kernel");
}

template <class X>
void activation_backward(const Cuda& dev, X* dinp, float* dinp_sum, X* out, void* scratch,
                         const X* inp, const X* dout, size_t N, int C) {
    if (N == 0)
        return;

    const bool vector = vectorises<X>(C, dinp, inp, dout, out);
    const int V = vector ? kVec<X> : 1;
    auto kernel =
        out ? activation_backward_kernel<X, 1, true> : activation_backward_kernel<X, 1, false>;
    if (vector)
        kernel = out ? activation_backward_kernel<X, kVec<X>, true>
                     : activation_backward_kernel<X, kVec<X>, false>;

    const int slices = column_sum_slices(dev, C, N);
    const dim3 grid(ceil_div(C, kWarp * V), slices);
    float* partials = static_cast<float*>(scratch);
    kernel<<<grid, kColumnThreads, 0, dev.stream>>>(dinp, partials, out, inp, dout, N, C);
    LAUNCH_CHECK("activation_backward_kernel");
    add_partials(dev, {dinp_sum}, {.sums = partials, .rows = slices, .columns = C});
}

size_t activation_scratch_bytes(const Cuda& dev, int C) {
    return column_sum_bytes(dev, C);
}

template void activation_forward(const Cuda&, float*, const float*, size_t);
template void activation_forward(const Cuda&, bf16*, const bf16*, size_t);
template void activation_backward(const Cuda&, float*, float*, float*, void*, const float*,
                                  const float*, size_t, int);
template void activation_backward(const Cuda&, bf16*, float*, bf16*, void*, const bf16*,
                                  const bf16*, size_t, int);
