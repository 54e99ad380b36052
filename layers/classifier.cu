// Classifier: softmax cross-entropy over the vocabulary, fused with its gradient.
//
//   m     = max x
//   l     = Σ e^{x−m}
//   loss  = m + log l − x[target]
//   dx[v] = dloss·(e^{x[v]−m}/l − [v = target])
//
// classifier_kernel does this to logits that are in memory, one block per row. Pass 1 reads the row
// once and computes m and l together, online as in flash attention: when a thread meets a larger x,
// it rescales its sum. Pass 2 reads the row again, mostly from the caches, because 50304 logits are
// only 100 or 200 KB, and overwrites it with the gradient. So it is bound by one read and one write
// of the logits.
//
// For bf16 on sm_90, cross_entropy makes no pass over logits at all: the epilogue of their matmul
// (layers/sm90) writes exponentials instead. For that, the number to subtract must be known before
// the product. This shift is the target's own logit, which is a product of just two rows:
//
//   e[v]  = e^{x[v]−shift}
//   s     = Σ_{v≠target} e[v]
//   e_t   = e^{x[target]−shift}, which is 1
//   loss  = log(e_t + s) + shift − x[target]
//   scale = dloss/(e_t + s)
//   dx    = scale·e, with e[target] = −s
//
// e[target] is set to −s, so that nothing cancels where s is small. dx itself is never written.
// Only two products use it, dxᵀ·inp = eᵀ·(scale·inp) and dx·weight = scale·(e·weight), so
// rows_kernel scales the rows of inp, and scale_kernel the rows of the second product. e fits into
// bf16, whose range is that of fp32. But where s reaches 2⁴⁰ (a loss above 27.7 nats) or is NaN,
// rows_kernel recomputes the row with its largest logit as the shift, so that e_t is less than 1.
//
// Writes: losses, and logits if dloss != 0, with zeros in the padding [V, Vp).
// Limits: 1 ≤ V ≤ Vp.
#include <cfloat>

#include "cuda/vector.cuh"
#include "layers/layers.h"
#include "layers/sm90/matmul_sm90.h"

namespace {

constexpr float kLn2 = 0.6931471805599453f;
constexpr int kThreads = 1024;  // 50304 logits are up to 7 (bf16) or 13 (fp32) vectors per thread

// The running m and l of the columns that a thread has seen. m and the exponents are in units of
// log 2, so that an exponential is one fma and one ex2. It does no harm that m is rounded, because
// every exponent and the loss use the same m. It starts finite, because −∞ − −∞ would be NaN.
struct Softmax {
    float m = -FLT_MAX;
    float l = 0.f;

    __device__ float loss(float x_target) const {
        return kLn2 * (log2f(l) - fmaf(x_target, kLog2e, -m));
    }
};

// In classifier_kernel and its functions V is the number of elements of a vector, the vocabulary's
// size is `vocab`, and Vp is `padded`.

// Pass 1 over this thread's columns of a row.
template <int V, class X>
__device__ __forceinline__ Softmax softmax_of_columns(const X* x, int vocab) {
    Softmax s;
    const int whole = vocab / V * V;  // columns in whole vectors
    for (int c = threadIdx.x * V; c < whole; c += kThreads * V) {
        const auto v = load<V>(x + c);
        float largest = v[0];
        for (int i = 1; i < V; i++)
            largest = fmaxf(largest, v[i]);
        largest *= kLog2e;

        if (largest > s.m) {
            s.l *= exp2_approx(s.m - largest);
            s.m = largest;
        }
        for (int i = 0; i < V; i++)
            s.l += exp2_approx(fmaf(v[i], kLog2e, -s.m));
    }
    if (whole + threadIdx.x < vocab) {  // at most V − 1 columns are left
        const float last = to_float(x[whole + threadIdx.x]);
        const float largest = fmaxf(s.m, last * kLog2e);
        s.l = s.l * exp2_approx(s.m - largest) + exp2_approx(fmaf(last, kLog2e, -largest));
        s.m = largest;
    }
    return s;
}

// dx of columns c … c + V − 1. scale is dloss/l.
template <int V, class X>
__device__ __forceinline__ Vec<float, V> gradient(const Vec<X, V>& x, int c, float m, float scale,
                                                  float dloss, int target, int vocab) {
    Vec<float, V> dx;
    if (c + V <= vocab && (target < c || target >= c + V)) {
        for (int i = 0; i < V; i++)
            dx.x[i] = exp2_approx(fmaf(x[i], kLog2e, -m)) * scale;
    } else {
        for (int i = 0; i < V; i++) {
            const float p = exp2_approx(fmaf(x[i], kLog2e, -m)) * scale;
            dx.x[i] = c + i >= vocab ? 0.f : (c + i == target ? p - dloss : p);
        }
    }
    return dx;
}

// -------------------------------------------------------------------------------------------------

template <class X, int V>
__global__ void __launch_bounds__(kThreads)
    classifier_kernel(X* logits, float* __restrict__ losses, const int* __restrict__ targets,
                      float dloss, int vocab, int padded) {
    const size_t row = blockIdx.x;
    X* x = logits + row * padded;
    const int target = targets[row];
    const bool valid = target >= 0 && target < vocab;
    const float x_target = valid ? to_float(x[target]) : NAN;  // before pass 2 overwrites it

    const Softmax part = softmax_of_columns<V>(x, vocab);
    const float m = block_max(part.m);
    const Softmax s = {.m = m, .l = block_sum(part.l * exp2_approx(part.m - m))};
    if (threadIdx.x == 0)
        losses[row] = s.loss(x_target);
    if (dloss == 0.f)
        return;

    // Pass 2 starts at the end, because what was read last is most likely still in the caches.
    // Streaming stores keep the gradient from evicting what other blocks have yet to read again.
    const float scale = valid ? dloss / s.l : NAN;
    const int vectors = padded / V;
    const int last_round = (vectors - 1) / kThreads * kThreads;  // its first vector
    for (int j = last_round + threadIdx.x; j >= 0; j -= kThreads) {
        if (j >= vectors)
            continue;
        const int c = j * V;
        store_streaming(x + c, gradient<V>(load<V>(x + c), c, s.m, scale, dloss, target, vocab));
    }
}

// -------------------------------------------------------------------------------------------------

constexpr int kRowsWarps = 8;              // warps per block, one row each
constexpr float kLargestSum = 1ull << 40;  // of s, with the target's logit as the shift

// The language model's head, which is the matmul that makes the logits, and its targets.
struct LmHead {
    const bf16* inp;
    const bf16* weight;
    const int* targets;
    int N;
    int C;
    int V;
    int Vp;

    __device__ bool valid(int row) const { return targets[row] >= 0 && targets[row] < V; }

    // One logit in units of log 2, computed by a warp. All lanes get it.
    __device__ __forceinline__ float logit(int row, int v) const {
        float sum = 0.f;
        for (int c = (threadIdx.x % kWarp) * 8; c < C; c += kWarp * 8) {
            const auto x = load<8>(inp + size_t(row) * C + c);
            const auto y = load<8>(weight + size_t(v) * C + c);
            for (int i = 0; i < 8; i++)
                sum = fmaf(x[i], y[i], sum);
        }
        return kLog2e * warp_sum(sum);
    }
};

// Writes shifts[n], the logit of row n's target in units of log 2.
__global__ void __launch_bounds__(kRowsWarps* kWarp) shifts_kernel(float* shifts, LmHead h) {
    const int row = blockIdx.x * kRowsWarps + threadIdx.x / kWarp;
    if (row >= h.N)
        return;

    const float x = h.valid(row) ? h.logit(row, h.targets[row]) : NAN;
    if (threadIdx.x % kWarp == 0)
        shifts[row] = x;
}

struct RecomputedRow {
    float shift;  // the row's largest logit, in units of log 2
    float sum;    // s
};

// Recomputes a row with its largest logit as the shift, and writes it to e if dloss != 0. All warps
// of the block do this together, each some of the logits.
__device__ __forceinline__ RecomputedRow recompute_row(bf16* e, const LmHead& h, int row,
                                                       float dloss) {
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    float largest = -INFINITY;
    float sum = 0.f;
    for (int v = warp; v < h.V; v += kRowsWarps)
        largest = fmaxf(largest, h.logit(row, v));
    largest = block_max(largest);

    for (int v = warp; v < h.V; v += kRowsWarps) {
        const float x = exp2_approx(h.logit(row, v) - largest);
        if (lane > 0 || v == h.targets[row])
            continue;
        sum += x;
        if (dloss != 0.f)
            e[size_t(row) * h.Vp + v] = __float2bfloat16_rn(x);
    }
    return {.shift = largest, .sum = block_sum(sum)};
}

// Finishes the rows of e. sums (tiles, N) are their sums over tiles of kSm90Columns columns. Writes
// losses and, if dloss != 0, e[target], scales and scaled = scale·inp.
__global__ void __launch_bounds__(kRowsWarps* kWarp, 4)
    rows_kernel(bf16* e, bf16* scaled, float* scales, float* losses, const float* __restrict__ sums,
                const float* __restrict__ shifts, LmHead h, float dloss) {
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int first = blockIdx.x * kRowsWarps;
    const int row = first + warp;

    float sum = 0.f;       // s
    float e_target = 1.f;  // e_t
    float above = 0.f;     // shift − x[target], in units of log 2
    if (row < h.N) {
        for (int t = lane; t * kSm90Columns < h.Vp; t += kWarp)
            sum += sums[size_t(t) * h.N + row];
        sum = isfinite(shifts[row]) ? warp_sum(sum) : NAN;
    }

    // Which warps' rows need another shift.
    __shared__ bool recompute_smem[kRowsWarps];
    if (lane == 0)
        recompute_smem[warp] =
            row < h.N && isfinite(shifts[row]) && !(sum < kLargestSum);  // too large, or NaN
    __syncthreads();
    for (int w = 0; w < kRowsWarps; w++) {
        if (!recompute_smem[w])
            continue;
        const RecomputedRow again = recompute_row(e, h, first + w, dloss);
        if (warp == w) {
            sum = again.sum;
            above = again.shift - shifts[row];
            e_target = exp2_approx(-above);
        }
    }

    if (row >= h.N)
        return;
    if (lane == 0)
        losses[row] = log1pf(sum + (e_target - 1.f)) + kLn2 * above;
    if (dloss == 0.f)
        return;

    // e[target] = −s is rounded to bf16. The scale makes up for that, so that dx[target] is exact.
    const float rounded = to_float(__float2bfloat16_rn(sum));
    const float correction = rounded != 0.f ? sum / rounded : 1.f;
    const float scale = dloss / (sum + e_target) * correction;
    if (lane == 0) {
        scales[row] = scale;
        if (h.valid(row))
            e[size_t(row) * h.Vp + h.targets[row]] = __float2bfloat16_rn(-sum);
    }

    for (int c = lane * 8; c < h.C; c += kWarp * 8) {
        const size_t at = size_t(row) * h.C + c;
        const auto x = load<8>(h.inp + at);
        Vec<float, 8> y;
        for (int i = 0; i < 8; i++)
            y.x[i] = scale * x[i];
        store(scaled + at, y);
    }
}

constexpr int kScaleThreads = 256;
constexpr int kScaleVec = 8;  // elements per thread

// out = scale of the row · x
__global__ void __launch_bounds__(kScaleThreads)
    scale_kernel(bf16* out, const float* __restrict__ x, const float* __restrict__ scales, size_t n,
                 int C) {
    const size_t i = (blockIdx.x * size_t{kScaleThreads} + threadIdx.x) * kScaleVec;
    if (i >= n)
        return;

    auto y = load<kScaleVec>(x + i);
    const float scale = scales[i / C];
    for (float& value : y.x)
        value *= scale;
    store(out + i, y);
}

// Can the logits' matmul write exponentials in its epilogue?
template <class X>
bool fused(const Cuda& dev, int C, int Vp) {
    return std::is_same_v<X, bf16> && dev.sm90a && C % 64 == 0 && Vp % kVec<bf16> == 0;
}

// The scratch of the fused form. cross_entropy leaves `scaled` and `scales` there for
// cross_entropy_backward, and backward alone uses `product`.
struct Scratch {
    float* product;  // (N,C)      dinp before it is scaled
    bf16* scaled;    // (N,C)      scale·inp
    float* scales;   // (N)
    float* shifts;   // (N)        in units of log 2
    float* sums;     // (tiles,N)  partial sums of e

    Scratch(void* memory, size_t N, int C)
        : product(static_cast<float*>(memory)),
          scaled(reinterpret_cast<bf16*>(product + N * C)),
          scales(reinterpret_cast<float*>(scaled + N * C)),
          shifts(scales + N),
          sums(shifts + N) {}

    static size_t bytes(size_t N, int C, int Vp) {
        const size_t tiles = ceil_div(Vp, kSm90Columns);
        return N * C * (sizeof(float) + sizeof(bf16)) + N * (2 + tiles) * sizeof(float);
    }
};

}  // namespace

// -------------------------------------------------------------------------------------------------

template <class X>
void classifier(const Cuda& dev, X* logits, float* losses, const int* targets, float dloss,
                size_t N, int V, int Vp) {
    if (V < 1 || V > Vp)
        throw Error(format("classifier: V = %d, expected 1..Vp = %d", V, Vp));
    if (N == 0)
        return;

    const auto kernel =
        vectorises<X>(Vp, logits) ? classifier_kernel<X, kVec<X>> : classifier_kernel<X, 1>;
    const unsigned blocks = static_cast<unsigned>(N);
    kernel<<<blocks, kThreads, 0, dev.stream>>>(logits, losses, targets, dloss, V, Vp);
    LAUNCH_CHECK("classifier_kernel");
}

template <class X>
void cross_entropy(const Cuda& dev, X* dlogits, float* losses, void* scratch, const X* inp,
                   const X* weight, const int* targets, float dloss, size_t N, int C, int V,
                   int Vp) {
    if constexpr (std::is_same_v<X, bf16>) {
        if (N > 0 && fused<X>(dev, C, Vp)) {
            const Scratch s(scratch, N, C);
            const LmHead head = {.inp = inp,
                                 .weight = weight,
                                 .targets = targets,
                                 .N = static_cast<int>(N),
                                 .C = C,
                                 .V = V,
                                 .Vp = Vp};
            const unsigned blocks = ceil_div(N, kRowsWarps);
            const unsigned threads = kRowsWarps * kWarp;

            shifts_kernel<<<blocks, threads, 0, dev.stream>>>(s.shifts, head);
            LAUNCH_CHECK("shifts_kernel");

            matmul_sm90_exponentials(dev, {.N = N, .K = C, .columns = Vp},
                                     {.out = dloss != 0.f ? dlogits : nullptr,
                                      .sums = s.sums,
                                      .inp = inp,
                                      .weight = weight,
                                      .shifts = s.shifts,
                                      .targets = targets,
                                      .V = V});

            rows_kernel<<<blocks, threads, 0, dev.stream>>>(dlogits, s.scaled, s.scales, losses,
                                                            s.sums, s.shifts, head, dloss);
            LAUNCH_CHECK("rows_kernel");
            return;
        }
    }
    matmul_forward<X>(dev, dlogits, inp, weight, nullptr, N, C, Vp);
    classifier(dev, dlogits, losses, targets, dloss, N, V, Vp);
}

template <class X>
void cross_entropy_backward(const Cuda& dev, X* dinp, float* dweight, void* scratch,
                            const X* dlogits, const X* inp, const X* weight, size_t N, int C,
                            int Vp, bool accumulate) {
    if constexpr (std::is_same_v<X, bf16>) {
        if (N > 0 && fused<X>(dev, C, Vp)) {
            const Scratch s(scratch, N, C);
            matmul_backward<X, float>(dev, dinp ? s.product : nullptr, dweight, dlogits, s.scaled,
                                      weight, N, C, Vp, accumulate);
            if (!dinp)
                return;
            const unsigned blocks = ceil_div(N * C, kScaleThreads * kScaleVec);
            scale_kernel<<<blocks, kScaleThreads, 0, dev.stream>>>(dinp, s.product, s.scales, N * C,
                                                                   C);
            LAUNCH_CHECK("scale_kernel");
            return;
        }
    }
    matmul_backward<X>(dev, dinp, dweight, dlogits, inp, weight, N, C, Vp, accumulate);
}

template <class X>
size_t cross_entropy_scratch_bytes(const Cuda& dev, size_t N, int C, int Vp) {
    return fused<X>(dev, C, Vp) ? Scratch::bytes(N, C, Vp) : 0;
}

#define INSTANTIATE(X)                                                                          \
    template void classifier(const Cuda&, X*, float*, const int*, float, size_t, int, int);     \
    template void cross_entropy(const Cuda&, X*, float*, void*, const X*, const X*, const int*, \
                                float, size_t, int, int, int);                                  \
    template void cross_entropy_backward(const Cuda&, X*, float*, void*, const X*, const X*,    \
                                         const X*, size_t, int, int, bool);                     \
    template size_t cross_entropy_scratch_bytes<X>(const Cuda&, size_t, int, int);
INSTANTIATE(float)
INSTANTIATE(bf16)
