// Classifier: softmax cross-entropy over the vocabulary, fused with its gradient.
//
//   m = max x,   l = Σ e^{x−m},   loss = m + log l − x[target],   dx[v] = dloss·(e^{x[v]−m}/l − [v = target])
//
// A block owns a row of logits. Pass 1 computes m and l together, online as in flash attention: when a thread meets a
// larger x it rescales its sum, so the row is read once. Pass 2 reads it again, from the caches (the rows in flight are
// about 100 KB each, a few hundred of them at most), and overwrites it with the gradient. Bound by memory: one read and
// one write of the logits.
//
// Writes: losses; logits if dloss != 0, zeros in the padding [V, Vp).  A target outside [0, V) makes the loss and the
// row's gradient NaN, so that it is noticed.  Limits: any 1 ≤ V ≤ Vp.
#include <cfloat>

#include "layers/layers.h"
#include "layers/vector.cuh"

constexpr int kThreads = 1024;  // a row of 50304 is 6 (bf16) to 12 (fp32) vectors a thread

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

template <class X, int V>
__global__ void __launch_bounds__(kThreads)
    classifier_kernel(X* logits, float* __restrict__ losses, const int* __restrict__ targets, float dloss, int vocab,
                      int padded) {
    const size_t row = blockIdx.x;
    X* x = logits + row * padded;
    const int target = targets[row];
    const bool valid = target >= 0 && target < vocab;
    const float x_target = valid ? to_float(x[target]) : NAN;  // before anyone overwrites it

    // m and the exponents are in units of log 2, so that an exponential is one fma and one ex2. m is rounded, but the
    // same number in every exponent and in the loss, so that this cancels. It starts finite, as −∞ − −∞ would be NaN.
    float m = -FLT_MAX, l = 0.f;
    const int whole = vocab / V * V;
    for (int c = threadIdx.x * V; c < whole; c += kThreads * V) {
        const auto v = load<V>(x + c);
        float largest = v[0];
        for (int i = 1; i < V; i++) largest = fmaxf(largest, v[i]);
        largest *= kLog2e;
        if (largest > m) {
            l *= exp2_approx(m - largest);
            m = largest;
        }
        for (int i = 0; i < V; i++) l += exp2_approx(fmaf(v[i], kLog2e, -m));
    }
    if (whole + threadIdx.x < vocab) {  // the last V − 1 columns at most
        const float last = to_float(x[whole + threadIdx.x]);
        const float largest = fmaxf(m, last * kLog2e);
        l = l * exp2_approx(m - largest) + exp2_approx(fmaf(last, kLog2e, -largest));
        m = largest;
    }
    const float row_m = block_max(m);
    l = block_sum(l * exp2_approx(m - row_m));
    if (threadIdx.x == 0) losses[row] = kLn2 * (log2f(l) - fmaf(x_target, kLog2e, -row_m));
    if (dloss == 0.f) return;

    // From the end, as what was read last is the likeliest to be in the caches still; and with streaming stores, so
    // that the gradient does not push out what other blocks have yet to read again.
    const float scale = valid ? dloss / l : NAN;
    const int vectors = padded / V;
    for (int j = (vectors - 1) / kThreads * kThreads + threadIdx.x; j >= 0; j -= kThreads) {
        if (j >= vectors) continue;
        const int c = j * V;
        const auto v = load<V>(x + c);
        Vec<float, V> dx;
        if (c + V <= vocab && (target < c || target >= c + V)) {
            for (int i = 0; i < V; i++) dx.x[i] = exp2_approx(fmaf(v[i], kLog2e, -row_m)) * scale;
        } else {
            for (int i = 0; i < V; i++) {
                const float p = exp2_approx(fmaf(v[i], kLog2e, -row_m)) * scale;
                dx.x[i] = c + i >= vocab ? 0.f : c + i == target ? p - dloss : p;
            }
        }
        store_streaming(x + c, dx);
    }
}

// ---------------------------------------------------------------------------------------------------------------------

template <class X>
void classifier(const Cuda& dev, X* logits, float* losses, const int* targets, float dloss, size_t N, int V, int Vp) {
    if (V < 1 || V > Vp) throw Error(format("classifier: V = %d, expected 1..Vp = %d", V, Vp));
    if (N == 0) return;
    const auto kernel = vectorises<X>(Vp, logits) ? classifier_kernel<X, kVec<X>> : classifier_kernel<X, 1>;
    kernel<<<ceil_div(N, 1), kThreads, 0, dev.stream>>>(logits, losses, targets, dloss, V, Vp);
    LAUNCH_CHECK("classifier_kernel");
}

template void classifier(const Cuda&, float*, float*, const int*, float, size_t, int, int);
template void classifier(const Cuda&, bf16*, float*, const int*, float, size_t, int, int);
