// Attention of a sequence's last row, which is all that the next token of a text needs.
//
//   s_j = scale·q·k_j      p = exp(s − m)      out = Σ p_j v_j / Σ p_j          over all rows j of the packed qkv
//
// Earlier calls made the rows before it, so qkv itself is the cache of keys and values. A block owns a head and walks
// over tiles of 1024 keys. Eight lanes share a key's dot product, and a thread has its p. For out, a thread adds 16 bytes
// of the columns over its slice of the keys, and a tree of fixed order adds the slices. Memory bounds it: 2·T·HS elements
// for one multiprocessor. Far beyond T = 1024 several blocks for a head would pay.
//
// Writes: out (NH, HS), in fp32.  Reads: qkv.  Accumulates into: nothing.
// Limits: any T ≥ 1. A row of HS elements is a multiple of 16 bytes, and at most 16 KB.
// Run: ./dev/test_attention last_row
#include "attention/attention.h"
#include "layers/gpu/vector.cuh"

namespace {

constexpr int kThreads = 1024, kLanes = 8;

template <class X>
__global__ void __launch_bounds__(kThreads)
    last_row_kernel(float* out, const X* qkv, int T, int NH, int HS, float scale) {
    constexpr int V = kVec<X>;
    __shared__ float p_smem[kThreads], o_smem[V][kThreads];
    const size_t C = size_t(NH) * HS, token = 3 * C;
    const int thread = threadIdx.x, lane = thread % kLanes, vectors = HS / V, slices = kThreads / vectors;
    const int slice = thread / vectors, d = thread % vectors * V;  // a rest of the threads has none of the slices
    const X *q = qkv + (T - 1) * token + blockIdx.x * HS, *k = qkv + C + blockIdx.x * HS, *v = k + C;

    float m = -INFINITY, l = 0.f, o[V] = {};
    for (int kv0 = 0; kv0 < T; kv0 += kThreads, k += kThreads * token, v += kThreads * token) {
        const int keys = min(kThreads, T - kv0);
        for (int j0 = 0; j0 < keys; j0 += kThreads / kLanes) {
            const int j = j0 + thread / kLanes;
            float s = 0.f;
            for (int i = lane * V; i < HS && j < keys; i += kLanes * V) {
                const auto x = load<V>(q + i), y = load<V>(k + j * token + i);
                for (int e = 0; e < V; e++) s += x[e] * y[e];
            }
            for (int offset = kLanes / 2; offset > 0; offset /= 2) s += __shfl_xor_sync(kFullMask, s, offset);
            if (lane == 0) p_smem[j] = scale * s;
        }
        __syncthreads();  // the tile's s is there
        const float s = thread < keys ? p_smem[thread] : -INFINITY, m_new = fmaxf(m, block_max(s));
        const float p = expf(s - m_new), shrink = expf(m - m_new);
        p_smem[thread] = p;
        l = l * shrink + block_sum(p);  // whose barriers also show everyone the tile's p
        for (int e = 0; e < V; e++) o[e] *= shrink;
        for (int j = slice; slice < slices && j < keys; j += slices) {
            const auto y = load<V>(v + j * token + d);
            for (int e = 0; e < V; e++) o[e] += p_smem[j] * y[e];
        }
        m = m_new;
        __syncthreads();  // everyone has read the tile's p
    }

    for (int e = 0; e < V; e++) o_smem[e][thread] = o[e];
    for (int n = slices, rest; n > 1; n = rest) {  // each slice of the first half adds one of the second
        rest = (n + 1) / 2;
        __syncthreads();
        if (slice + rest < n)
            for (int e = 0; e < V; e++) o_smem[e][thread] += o_smem[e][thread + rest * vectors];
    }
    if (slice > 0) return;
    Vec<float, V> row;
    for (int e = 0; e < V; e++) row.x[e] = o_smem[e][thread] / l;
    store(out + blockIdx.x * HS + d, row);
}

}  // namespace

template <class X>
void attention_last_row(const Cuda& dev, float* out, const X* qkv, int T, int NH, int HS) {
    if (HS % kVec<X> || HS > kThreads * kVec<X> || !vectorises<X>(HS, out, qkv))
        throw Error(format("attention of the last row: head size %d, expected a multiple of %d up to %d", HS, kVec<X>,
                           kThreads * kVec<X>));
    last_row_kernel<<<NH, kThreads, 0, dev.stream>>>(out, qkv, T, NH, HS, 1.f / sqrtf(static_cast<float>(HS)));
    LAUNCH_CHECK("last_row_kernel");
}
template void attention_last_row(const Cuda&, float*, const float*, int, int, int);
template void attention_last_row(const Cuda&, float*, const bf16*, int, int, int);
