// Merges and adds the results of pieces. Bound by memory, so a thread works on four elements at
// once, 16 bytes of fp32. A block owns one token with all of its heads.
//
// Writes: merge dst, lse and rest, add dst.  Limits: HS divides 128.
#include <algorithm>

#include "attention/ring/pieces.h"
#include "cuda/vector.cuh"

namespace {

constexpr unsigned kMaxThreads = 256;
constexpr int kWide = 4;  // elements of a thread

// A token's first element.
template <class X>
__device__ X* token_of(const HeadsView<X>& x, int b, int t) {
    return x.ptr + b * x.batch_stride + t * x.token_stride;
}

// A head's threads are in one warp. The first of them stores the merged lse, once all have read
// lse.
template <class Y>
__global__ void merge_kernel(AttentionShape s, HeadsView<Y> dst, Partial<float> sum,
                             Partial<float> piece) {
    const int b = blockIdx.x / s.Tq;
    const int t = blockIdx.x % s.Tq;
    for (int i = threadIdx.x * kWide; i < s.NH * s.HS; i += blockDim.x * kWide) {
        const size_t head = size_t(b) * s.NH + i / s.HS;
        const auto o_sum = load<kWide>(token_of(sum.o, b, t) + i);
        const auto o_piece = load<kWide>(token_of(piece.o, b, t) + i);
        const Merge<float> weights(sum, piece, head, t);

        Vec<float, kWide> o;
        for (int k = 0; k < kWide; k++)
            o.x[k] = weights.merged(o_sum[k], o_piece[k]);
        store(token_of(dst, b, t) + i, o);
        __syncwarp();
        if (i % s.HS == 0)
            weights.store_lse(sum, head, t);
    }
}

template <class Y, class Z>
__global__ void add_kernel(AttentionShape s, HeadsView<Y> dst, HeadsView<Z> a, HeadsView<Z> b,
                           HeadsView<Z> c) {
    const int sequence = blockIdx.x / s.Tq;
    const int t = blockIdx.x % s.Tq;
    for (int i = threadIdx.x * kWide; i < s.NH * s.HS; i += blockDim.x * kWide) {
        Vec<float, kWide> sum = {};
        const auto add = [&](const HeadsView<Z>& x) {
            if (!x.ptr)
                return;
            const auto addend = load<kWide>(token_of(x, sequence, t) + i);
            for (int k = 0; k < kWide; k++)
                sum.x[k] += addend[k];
        };
        add(a);
        add(b);
        add(c);
        store(token_of(dst, sequence, t) + i, sum);
    }
}

// -------------------------------------------------------------------------------------------------
// Launchers

template <class... P, class... Arguments>
void launch(const Cuda& dev, void (*kernel)(AttentionShape, P...), const AttentionShape& s,
            Arguments... arguments) {
    if ((kWarp * kWide) % s.HS != 0)
        throw Error(format("ring attention: the head size is %d, but it must divide 128", s.HS));
    const unsigned tokens = static_cast<unsigned>(s.B) * s.Tq;
    const unsigned threads = ceil_div(s.NH * s.HS, kWide * kWarp) * kWarp;
    kernel<<<tokens, std::min(threads, kMaxThreads), 0, dev.stream>>>(s, arguments...);
    LAUNCH_CHECK("ring attention");
}

}  // namespace

template <class Y>
void merge(const Cuda& dev, const AttentionShape& s, HeadsView<Y> dst, const Partial<float>& sum,
           const Partial<float>& piece) {
    launch(dev, merge_kernel<Y>, s, dst, sum, piece);
}

template <class Y, class Z>
void add(const Cuda& dev, const AttentionShape& s, HeadsView<Y> dst, HeadsView<Z> a, HeadsView<Z> b,
         HeadsView<Z> c) {
    launch(dev, add_kernel<Y, Z>, s, dst, a, b, c);
}

template void merge(const Cuda&, const AttentionShape&, HeadsView<float>, const Partial<float>&,
                    const Partial<float>&);
template void merge(const Cuda&, const AttentionShape&, HeadsView<bf16>, const Partial<float>&,
                    const Partial<float>&);
#define ADD(Y, Z)                                                                     \
    template void add(const Cuda&, const AttentionShape&, HeadsView<Y>, HeadsView<Z>, \
                      HeadsView<Z>, HeadsView<Z>)
ADD(float, float);
ADD(bf16, float);
ADD(float, const float);
ADD(bf16, const bf16);
