// Wide memory accesses, conversions and reductions, from which the layers' kernels are built.
//
// Most of those kernels are memory-bound, so each thread moves 16 bytes per instruction, as a
// Vec<float, 4> or Vec<bf16, 8>. The same kernel, instantiated with one element per Vec, works for
// any row length and alignment; vectorises() tells which of the two a call can use. The
// kernels' template parameter V is this number of elements.
#pragma once
#include <cstring>

#include "common/types.h"
#include "cuda/ptx_sm80.cuh"  // exp2_approx

constexpr int kWarp = 32;
constexpr unsigned kFullMask = 0xffffffffu;

template <class X>
__device__ inline float to_float(X x) {
    return static_cast<float>(x);
}

// N values of type X that are loaded and stored together. v[i] reads value i as a float, and v.x[i]
// is the value itself, to write it.
template <class X, int N>
struct alignas(N * sizeof(X)) Vec {
    X x[N];

    __device__ float operator[](int i) const {
        if constexpr (std::is_same_v<X, bf16> && N > 1) {
            // bf16 is the upper half of fp32. One instruction, whereas the toolkit's function is
            // two.
            unsigned pairs[N / 2];
            memcpy(pairs, x, sizeof x);
            const unsigned pair = pairs[i / 2];
            const bool upper = i % 2 == 1;
            return __uint_as_float(upper ? (pair & 0xffff0000u) : (pair << 16));
        } else {
            return to_float(x[i]);
        }
    }
};

// Elements of X in 16 bytes.
template <class X>
constexpr int kVec = 16 / sizeof(X);

// How a vector of N elements of X is loaded and stored: as kCount words of an integer type, for
// each of which the compiler emits one instruction. A word has 2, 4, 8 or 16 bytes.
template <class X, int N>
struct Words {
    static constexpr int kBytes = N * sizeof(X);
    using Word = std::conditional_t<
        kBytes == 2, unsigned short,
        std::conditional_t<kBytes == 4, unsigned, std::conditional_t<kBytes == 8, uint2, uint4>>>;
    static constexpr int kCount = kBytes / sizeof(Word);
    static_assert(kCount * sizeof(Word) == kBytes);
};

template <int N, class X>
__device__ inline Vec<X, N> load(const X* p) {
    using Word = typename Words<X, N>::Word;
    constexpr int kWords = Words<X, N>::kCount;
    Word words[kWords];
    for (int i = 0; i < kWords; i++)
        words[i] = reinterpret_cast<const Word*>(p)[i];

    Vec<X, N> v;
    memcpy(&v, words, sizeof v);
    return v;
}

template <int N, class X>
__device__ inline void store(X* p, const Vec<X, N>& v) {
    using Word = typename Words<X, N>::Word;
    constexpr int kWords = Words<X, N>::kCount;
    Word words[kWords];
    memcpy(words, &v, sizeof v);
    for (int i = 0; i < kWords; i++)
        reinterpret_cast<Word*>(p)[i] = words[i];
}

// Rounds to nearest even.
template <class X, int N>
__device__ inline Vec<X, N> round_to(const Vec<float, N>& v) {
    Vec<X, N> r;
    if constexpr (std::is_same_v<X, float>) {
        r = v;
    } else if constexpr (N == 1) {
        r.x[0] = __float2bfloat16_rn(v.x[0]);
    } else {
        for (int i = 0; i < N; i += 2) {  // one instruction rounds a pair
            const __nv_bfloat162 pair = __floats2bfloat162_rn(v.x[i], v.x[i + 1]);
            r.x[i] = pair.x;
            r.x[i + 1] = pair.y;
        }
    }
    return r;
}

template <int N>
__device__ inline void store(bf16* p, const Vec<float, N>& v) {
    store(p, round_to<bf16>(v));
}

// A store of at most 16 bytes for data that is not read again soon: it is evicted from the caches
// first.
template <class X, int N>
__device__ inline void store_streaming(X* p, const Vec<float, N>& v) {
    using Word = typename Words<X, N>::Word;
    static_assert(Words<X, N>::kCount == 1);
    const Vec<X, N> rounded = round_to<X>(v);
    Word word;
    memcpy(&word, &rounded, sizeof word);
    __stcs(reinterpret_cast<Word*>(p), word);
}

// Can rows of `row` elements that start at these pointers be read 16 bytes at a time? Null pointers
// count as aligned.
template <class X, class... P>
bool vectorises(size_t row, const P*... pointers) {
    return row % kVec<X> == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

// Reductions over a warp. Every lane gets the result, with the same bits.
template <class T>
__device__ inline T warp_sum(T x) {
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
        x += __shfl_xor_sync(kFullMask, x, offset);
    return x;
}

__device__ inline float warp_max(float x) {
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
        x = fmaxf(x, __shfl_xor_sync(kFullMask, x, offset));
    return x;
}

// Reduces over the block in a fixed order. Every thread of the block must call it, and every thread
// gets the result.
template <class WarpReduce>
__device__ inline float block_reduce(float x, float neutral, WarpReduce warp_reduce) {
    __shared__ float warp_smem[kWarp];
    const int lane = threadIdx.x % kWarp;
    const int warps = blockDim.x / kWarp;
    x = warp_reduce(x);
    __syncthreads();  // an earlier call's reads are done
    if (lane == 0)
        warp_smem[threadIdx.x / kWarp] = x;
    __syncthreads();
    return warp_reduce(lane < warps ? warp_smem[lane] : neutral);
}
__device__ inline float block_sum(float x) {
    return block_reduce(x, 0.f, [](float y) { return warp_sum(y); });
}
__device__ inline float block_max(float x) {
    return block_reduce(x, -INFINITY, [](float y) { return warp_max(y); });
}

__host__ __device__ constexpr unsigned ceil_div(size_t a, size_t b) {
    return static_cast<unsigned>((a + b - 1) / b);
}
