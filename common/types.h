// The types that both backends share.
#pragma once
#include <cuda_bf16.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

using bf16 = __nv_bfloat16;

// X is the storage type of activations and weights. It is float or bf16 on CUDA, and float or
// double on the CPU. Sums, statistics, losses, weight gradients and optimizer state are Acc<X>.
template <class X>
using Acc = std::conditional_t<std::is_same_v<X, double>, double, float>;

enum class DType { f32, bf16, f64, i32 };

template <class X>
constexpr DType dtype_of() {
    if constexpr (std::is_same_v<X, float>)
        return DType::f32;
    else if constexpr (std::is_same_v<X, bf16>)
        return DType::bf16;
    else if constexpr (std::is_same_v<X, double>)
        return DType::f64;
    else
        return DType::i32;
}
constexpr size_t size_of(DType t) {
    return t == DType::bf16 ? 2 : t == DType::f64 ? 8 : 4;
}
constexpr const char* name_of(DType t) {
    return t == DType::bf16  ? "bf16"
           : t == DType::f32 ? "fp32"
           : t == DType::f64 ? "fp64"
                             : "int32";
}

// What --attention names. flash is the fastest kernel for X that the GPU can run. Any other name is
// a kernel's own (attention/attention.h). The CPU has one attention, which serves flash and naive.
struct Attention {
    std::string_view name;
    static const Attention flash, naive;
    bool operator==(const Attention&) const = default;
};
inline constexpr Attention Attention::flash{"flash"}, Attention::naive{"naive"};

// A (B, T, NH, HS) tensor inside a larger one. Element (b, t, h, d) is
//   ptr[b·batch_stride + t·token_stride + h·HS + d].
// Rows of HS elements are contiguous and 16-byte aligned.
template <class X>
struct HeadsView {
    X* ptr;
    size_t batch_stride;  // elements from a sequence to the next
    size_t token_stride;  // elements from a token to the next
    __host__ __device__ X* row(size_t b, size_t t, size_t h, int HS) const {
        return ptr + b * batch_stride + t * token_stride + h * HS;
    }
    HeadsView from(size_t t) const {  // without the first t tokens
        HeadsView later = *this;
        later.ptr += t * token_stride;
        return later;
    }
};

// How large such a tensor is.
struct HeadsShape {
    int B;
    int T;
    int heads;
    int HS;
    size_t C() const { return size_t(heads) * HS; }  // elements of a token
    size_t elements() const { return B * T * C(); }
};

// The positions of a rank's rows in their sequence. The first `chunk` rows begin at position
// `early`, the others at `late`, as the ring deals them out (attention/ring/ring.h). By default row
// t has position t.
struct Positions {
    int chunk = INT_MAX, early = 0, late = 0;
    __host__ __device__ int of(int row) const {
        return row < chunk ? early + row : late + (row - chunk);
    }
};

// Part of the flat parameter arena, for the optimizer. It has `pieces` pieces of `size` elements,
// decayed or not. The first begins at `begin`, and the others `stride` after one another. A rank
// that updates only its share keeps that share's gradients and optimizer state back to back. They
// leave out `skipped` elements of the arena before `begin`.
struct ParamRange {
    size_t begin, size;
    bool decay;
    size_t pieces = 1, stride = 0, skipped = 0;
    size_t piece(size_t p) const { return begin + p * stride; }  // in the arena
    // in gradients, m, v and master
    size_t state(size_t p) const { return begin - skipped + p * size; }
};

struct AdamW {
    float lr, beta1, beta2, eps, weight_decay;
    float max_norm;  // gradients are scaled by min(1, max_norm / norm), or not at all if 0
    int step;        // from 1, for the bias correction
    uint64_t seed;   // of the stochastic rounding, mixed with step and the element's index
};

// The most positions of one token that a block adds up in the encoder's backward (encoder.cu).
constexpr int kEncoderChunk = 32;
