// How large an attention kernel's error against fp64 may be: the rules of dev/test_attention and
// dev/accuracy, and the inputs that both apply them to.
//
//   max|kernel − ref64| ≤ max_factor·max|naive − ref64| + tiny
//   ‖kernel − ref64‖    ≤ l2_factor·‖naive − ref64‖
//
// Where naive is exact, flash_fp16x3 may add operand_roundoff. bf16's lse has a rule of its own.
//
// naive runs in the same precision (fp32 without TF32) on the same inputs, which are rounded to X
// first. So the rule asks for no more accuracy than the type has and, unlike an absolute tolerance,
// adapts to shapes and inputs.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/attention.h"

// The tensors that are compared.
enum { Out, Lse, Dq, Dk, Dv, kTensors };
static const char* const kNames[kTensors] = {"out", "lse", "dq", "dk", "dv"};

constexpr bool is_gradient(int tensor) {
    return tensor == Dq || tensor == Dk || tensor == Dv;
}
// Its tokens are the keys', not the queries'.
constexpr bool is_of_keys(int tensor) {
    return tensor == Dk || tensor == Dv;
}

// q, k, v and dout are (N(0,1) + shift)·factor.
struct Distribution {
    const char* name;
    const char* text;
    float factor[4] = {1, 1, 1, 1};
    float shift[4] = {};
};
inline const Distribution kDistributions[] = {
    {.name = "normal", .text = "N(0,1)"},
    {.name = "large_q", .text = "q x5", .factor = {5, 1, 1, 1}},
    {.name = "shifted", .text = "mean +0.5", .shift = {0.5f, 0.5f, 0.5f, 0.5f}},
};

// Keeps the larger of worst and x in worst. NaN counts as larger than any number.
inline void keep_worst(double& worst, double x) {
    if (x > worst || std::isnan(x))
        worst = x;
}

// The errors of a tensor's elements. If one of them is NaN, so are their largest and their sums.
struct ErrorStats {
    double largest = 0;
    double sum = 0;
    double sum_squares = 0;
    double reference_squares = 0;  // the sum of the reference's squares
    size_t elements = 0;

    void add(double got, double reference) {
        const double error = std::fabs(got - reference);
        keep_worst(largest, error);
        sum += error;
        sum_squares += error * error;
        reference_squares += reference * reference;
        elements++;
    }
    double mean() const { return sum / static_cast<double>(elements); }
    double l2() const { return std::sqrt(sum_squares); }
    double reference_l2() const { return std::sqrt(reference_squares); }
};

// -------------------------------------------------------------------------------------------------
// The bounds

// How many times naive's error a kernel's may be.
//
// max_factor: two equally good kernels sum in different orders. Their L2 errors agree to 3 %, but
// the largest errors of a tensor differ by a factor of up to 2 either way. FlashAttention's own
// tests therefore take 2. bf16 needs no such room, because naive also rounds S and dP, which flash
// keeps in fp32. Only tensors below 2¹⁶ elements get 1.5, because one unlucky rounding decides
// there.
//
// l2_factor: L2 errors are steady except for dq. flash's D = rowsum(dO∘O) cancels less exactly than
// naive's rowsum(P∘dP), because O has been rounded in between. This shows if dP has a mean that D
// must cancel. In flash_fp32 dq's error is then up to 2.1 times naive's. In bf16 it is up to 1.6
// times naive's at very long T, as it would be with an O rounded once from the exact one.
//
// flash_fp16x3 adds in many short sums, so its bounds are tighter. Its operands keep 22 bits, and
// `operand_roundoff` allows one rounding of the result to 22 bits. That rounding is the whole error
// if naive is exact, because one key has all the weight (T = 1) or all keys have the same weight.
// So it counts only if naive's largest error is below one rounding to X.
//
// flash_fp16x3's lse gets more room, because tensor cores truncate. With inputs of non-zero mean, S
// is a sum of products of one sign, and each step of its two chains takes off up to a unit.
// Naive's lse is hardly worse than the rounding of the result.
struct ErrorFactors {
    double max_factor;
    double l2_factor;
    double operand_roundoff = 0;
};

template <class X>
ErrorFactors error_factors(const AttentionKernel<X>& kernel, int tensor, const AttentionShape& s) {
    if (std::is_same_v<X, bf16>) {
        const int tokens = is_of_keys(tensor) ? s.Tk : s.Tq;
        const size_t elements = size_t(s.B) * tokens * s.NH * s.HS;
        const bool is_small = elements < (1 << 16);
        const bool is_long_dq = tensor == Dq && s.Tk > 4096;
        return {.max_factor = is_small ? 1.5 : 1, .l2_factor = is_long_dq ? 2 : 1.25};
    }
    if (std::strcmp(kernel.name, "flash_fp16x3") == 0) {
        if (tensor == Lse)
            return {.max_factor = 2.5, .l2_factor = 2.5};
        return {.max_factor = 1.25, .l2_factor = 1.25, .operand_roundoff = 0x1p-22};
    }
    return {.max_factor = 2, .l2_factor = tensor == Dq ? 2.5 : 1.5};
}

// Unit roundoff of fp32. For bf16 only half of its unit roundoff of 2⁻⁸, so bf16's bounds are
// stricter.
template <class X>
constexpr double kRoundoff = std::is_same_v<X, bf16> ? 0x1p-9 : 0x1p-24;

// `tiny` of a tensor whose largest element is `largest`: one rounding of that element, or for lse a
// few units of log and exp.
template <class X>
double one_rounding(int tensor, double largest) {
    if (tensor == Lse)
        return 4 * kRoundoff<float> * std::max(1., largest);
    return kRoundoff<X> * largest;
}

// ErrorFactors::operand_roundoff if it counts: naive's largest error is below one rounding of the
// reference's largest element.
template <class X>
double allowed_operand_roundoff(const ErrorFactors& factors, int tensor, double naive_max,
                                double largest) {
    const bool naive_is_exact = naive_max < one_rounding<X>(tensor, largest);
    return naive_is_exact ? factors.operand_roundoff : 0;
}

// bf16's lse has a rule of its own, because naive computes it from an S rounded to bf16, whereas
// flash's never leaves fp32. The bound is 8 times the largest error of a bf16 flash kernel on
// test_attention's accuracy cases, in units of max(1, |lse|). That error is 2.63e-7 on an H100.
// ACCURACY=1 makes test_attention print each error's share of its bound.
constexpr double kBf16LseError = 2.63e-7;
inline double bf16_lse_bound(double largest) {
    return 8 * kBf16LseError * std::max(1., largest);
}
