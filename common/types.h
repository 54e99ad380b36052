// The types that the CUDA and the CPU backend share.
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

// X is the type in which activations and weights are stored: float or bf16 on CUDA, float or double
// on the CPU. Sums, statistics, losses, weight gradients and optimizer state are Acc<X>.
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

constexpr size_t size_of(DType t) {  // in bytes
    switch (t) {
        case DType::bf16: return 2;
        case DType::f64: return 8;
        default: return 4;
    }
}

constexpr const char* name_of(DType t) {
    switch (t) {
        case DType::f32: return "fp32";
        case DType::bf16: return "bf16";
        case DType::f64: return "fp64";
        default: return "int32";
    }
}

// A value of --attention. "flash" is the fastest kernel for X that the GPU can run; any other name
// is that of one kernel (attention/attention.h). The CPU has one attention, which it uses for both
// "flash" and "naive".
struct Attention {
    std::string_view name;
    static const Attention flash;
    static const Attention naive;
    bool operator==(const Attention&) const = default;
};
inline constexpr Attention Attention::flash{"flash"};
inline constexpr Attention Attention::naive{"naive"};

// A (B, T, NH, HS) tensor inside a larger one. Its element (b, t, h, d) is
//   ptr[b·batch_stride + t·token_stride + h·HS + d]
// and its rows of HS elements are contiguous and 16-byte aligned.
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

// The sizes of such a tensor.
struct HeadsShape {
    int B;
    int T;
    int heads;
    int HS;
    size_t C() const { return size_t(heads) * HS; }  // elements per token
    size_t elements() const { return B * T * C(); }
};

// Where a rank's rows are in their sequence. In context parallel training a rank has two chunks of
// it: the first `chunk` rows start at position `early`, the others at `late`
// (attention/ring/ring.h). By default row t has position t.
struct Positions {
    int chunk = INT_MAX;
    int early = 0;
    int late = 0;
    __host__ __device__ int at(int row) const {
        return row < chunk ? early + row : late + (row - chunk);
    }
};

// One tensor's range of the parameters, for the optimizer: `pieces` pieces of `size` elements, the
// first at element `begin` of the parameter arena and each `stride` elements after the one before.
// (If the optimizer is sharded, a rank may have a piece of every layer.) A rank's gradients and
// optimizer state leave out all elements that are not its own. `skipped` of these are before
// `begin`, so the first piece's gradients start at begin − skipped.
struct ParamRange {
    size_t begin;
    size_t size;
    bool decay;  // by AdamW's weight decay
    size_t pieces = 1;
    size_t stride = 0;
    size_t skipped = 0;

    // where piece p starts in the arena
    size_t piece_begin(size_t p) const { return begin + p * stride; }
    // where it starts in gradients, m, v and master weights
    size_t state_begin(size_t p) const { return begin - skipped + p * size; }
};

struct AdamW {
    float lr;
    float beta1;
    float beta2;
    float eps;
    float weight_decay;
    float max_norm;  // gradients are scaled by min(1, max_norm / norm), or not at all if 0
    int step;        // from 1, for the bias correction
    uint64_t seed;   // for stochastic rounding; mixed with the step and the element's index
};

// The encoder's backward adds up the rows of one token in chunks of at most this many, one block
// per chunk (layers/encoder.cu).
constexpr int kEncoderChunk = 32;
