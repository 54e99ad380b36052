// GELU in its tanh form (Hendrycks & Gimpel 2016), as GPT-2 was trained with.
//
//   gelu(x)  = x/2 · (1 + tanh u),   u = √(2/π)·(x + 0.044715 x³)
//            = x·σ(2u)               since (1 + tanh u)/2 = σ(2u) = 1/(1 + e^{−2u})
//   gelu'(x) = σ(2u) + x·σ(2u)·(1 − σ(2u))·2u',   u' = √(2/π)·(1 + 3·0.044715 x²)
//
// The sigmoid form needs one exponential and one reciprocal, and does not cancel for negative x, so the fast hardware
// versions of both (relative error about 1e-6) are accurate enough. Bound by memory: 2 (forward) or 3 (backward)
// streams.
//
// Writes: out or dinp, every element.  Limits: any n and alignment.
#include "layers/layers.h"
#include "layers/vector.cuh"

constexpr int kThreads = 256;

// 2u = x·(a + b x²)
constexpr float kA = 1.5957691216057308f;  // 2·√(2/π)
constexpr float kB = kA * 0.044715f;

__device__ inline float gelu_sigmoid(float x) {
    return __fdividef(1.f, 1.f + __expf(-x * (kA + kB * x * x)));
}

template <class X, int V>
__global__ void __launch_bounds__(kThreads) gelu_forward_kernel(X* out, const X* inp, size_t n) {
    const size_t i = (static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
    if (i >= n) return;
    const auto x = load<V>(inp + i);
    Vec<float, V> y;
    for (int k = 0; k < V; k++) y.x[k] = x[k] * gelu_sigmoid(x[k]);
    store(out + i, y);
}

template <class X, int V>
__global__ void __launch_bounds__(kThreads) gelu_backward_kernel(X* dinp, const X* inp, const X* dout, size_t n) {
    const size_t i = (static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
    if (i >= n) return;
    const auto x = load<V>(inp + i);
    const auto dy = load<V>(dout + i);
    Vec<float, V> dx;
    for (int k = 0; k < V; k++) {
        const float s = gelu_sigmoid(x[k]);
        const float slope = s + x[k] * s * (1.f - s) * (kA + 3.f * kB * x[k] * x[k]);
        dx.x[k] = dy[k] * slope;
    }
    store(dinp + i, dx);
}

// ---------------------------------------------------------------------------------------------------------------------

template <class X>
void gelu_forward(const Cuda& dev, X* out, const X* inp, size_t n) {
    if (n == 0) return;
    if (vectorises<X>(n, out, inp))
        gelu_forward_kernel<X, kVec<X>><<<ceil_div(n, kThreads * kVec<X>), kThreads, 0, dev.stream>>>(out, inp, n);
    else
        gelu_forward_kernel<X, 1><<<ceil_div(n, kThreads), kThreads, 0, dev.stream>>>(out, inp, n);
    LAUNCH_CHECK("gelu_forward_kernel");
}

template <class X>
void gelu_backward(const Cuda& dev, X* dinp, const X* inp, const X* dout, size_t n) {
    if (n == 0) return;
    if (vectorises<X>(n, dinp, inp, dout))
        gelu_backward_kernel<X, kVec<X>>
            <<<ceil_div(n, kThreads * kVec<X>), kThreads, 0, dev.stream>>>(dinp, inp, dout, n);
    else
        gelu_backward_kernel<X, 1><<<ceil_div(n, kThreads), kThreads, 0, dev.stream>>>(dinp, inp, dout, n);
    LAUNCH_CHECK("gelu_backward_kernel");
}

template void gelu_forward(const Cuda&, float*, const float*, size_t);
template void gelu_forward(const Cuda&, bf16*, const bf16*, size_t);
template void gelu_backward(const Cuda&, float*, const float*, const float*, size_t);
template void gelu_backward(const Cuda&, bf16*, const bf16*, const bf16*, size_t);
