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

// X is the storage type of activations and weights. It is float or bf16 on CUDA, and float or double on the CPU. Sums,
// statistics, losses, weight gradients and optimizer state are Acc<X>.
template <class X>
using Acc = std::conditional_t<std::is_same_v<X, double>, double, float>;

enum class DType { f32, bf16, f64, i32 };

template <class X>
constexpr DType dtype_of() {
    if constexpr (std::is_same_v<X, float>) return DType::f32;
    else if constexpr (std::is_same_v<X, bf16>) return DType::bf16;
    else if constexpr (std::is_same_v<X, double>) return DType::f64;
    else return DType::i32;
}
constexpr size_t size_of(DType t) { return t == DType::bf16 ? 2 : t == DType::f64 ? 8 : 4; }
constexpr const char* name_of(DType t) {
    return t == DType::bf16 ? "bf16" : t == DType::f32 ? "fp32" : t == DType::f64 ? "fp64" : "int32";
}

// What --attention names. flash is the fastest kernel for X that the GPU can run. Any other name is a kernel's own
// (attention/attention.h). The CPU has one attention, which serves flash and naive.
struct Attention {
    std::string_view name;
    static const Attention flash, naive;
    bool operator==(const Attention& other) const { return name == other.name; }
    bool operator!=(const Attention& other) const { return name != other.name; }
};
inline constexpr Attention Attention::flash{"flash"}, Attention::naive{"naive"};

// A (B, T, NH, HS) tensor inside a larger one. Element (b, t, h, d) is ptr[b·batch + t·token + h·HS + d].
// Rows of HS elements are contiguous and 16-byte aligned.
template <class X>
struct Heads {
    X* ptr;
    size_t batch, token;  // strides in elements
    X* row(size_t b, size_t t, size_t h, int HS) const { return ptr + b * batch + t * token + h * HS; }
};

// Queries [q_offset, q_offset + Tq) against keys [k_offset, k_offset + Tk) of the same sequences. If causal, query i
// sees key j where q_offset + i ≥ k_offset + j, for any offsets and lengths.
//
// The tokens may be a part of longer tensors. Sequences are then q_rows tokens apart in the running output and k_rows
// in dk and dv, and heads are q_rows apart in lse and D. 0 stands for Tq or Tk. dq's running sum covers q_rows queries,
// and the call's own begin at q_begin.
struct PartialShape {
    int B, Tq, Tk, NH, HS;
    long long q_offset = 0, k_offset = 0;
    bool causal = true;
    float scale = 0.f;
    int q_rows = 0, k_rows = 0;
    bool write_dkv = false;  // backward writes dk and dv, instead of adding to them
    int q_begin = 0;
    Attention attention = Attention::flash;  // which kernel runs
    int first_head = 0, all_heads = 0;       // see AttentionShape
    int rows_of_q() const { return q_rows ? q_rows : Tq; }
    int rows_of_k() const { return k_rows ? k_rows : Tk; }
    float resolved_scale() const { return scale != 0.f ? scale : 1.f / sqrtf(static_cast<float>(HS)); }
    // The same for exponentials that are powers of 2.
    float scale_log2() const { return static_cast<float>(resolved_scale() * M_LOG2E); }
    // Query i sees keys j ≤ i + shift(). Beyond these bounds every query sees all keys, or none.
    int shift() const {
        return causal ? static_cast<int>(std::clamp<long long>(q_offset - k_offset, -Tq, Tk)) : Tk;
    }
};

// In long sequences the backward of every backward_period(NH)-th head of a model walks in the other direction (see
// attention/sm90_backward_work.cuh). A call with some of the heads should have a multiple.
constexpr int backward_period(int NH) { return NH % 3 == 0 ? 3 : 2; }

// The positions of a rank's rows in their sequence. The first `chunk` rows begin at position `early`, the others at
// `late`, as split attention deals them out (attention/ring/split.h). By default row t has position t.
struct Positions {
    int chunk = INT_MAX, early = 0, late = 0;
    __host__ __device__ int of(int row) const { return row < chunk ? early + row : late + (row - chunk); }
};

// Part of the flat parameter arena, for the optimizer. It has `pieces` pieces of `size` elements, decayed or not. The
// first begins at `begin`, and the others `stride` after one another. A rank that updates only its share keeps that
// share's gradients and optimizer state back to back. They leave out `skipped` elements of the arena before `begin`.
struct ParamRange {
    size_t begin, size;
    bool decay;
    size_t pieces = 1, stride = 0, skipped = 0;
    size_t piece(size_t p) const { return begin + p * stride; }          // in the arena
    size_t state(size_t p) const { return begin - skipped + p * size; }  // in gradients, m, v and master
};

struct AdamW {
    float lr, beta1, beta2, eps, weight_decay;
    float max_norm;  // gradients are scaled by min(1, max_norm / norm), or not at all if 0
    int step;        // from 1, for the bias correction
    uint64_t seed;   // of the stochastic rounding, mixed with step and the element's index
};

// The most positions of one token that a block adds up in the encoder's backward (encoder.cu).
constexpr int kEncoderChunk = 32;
