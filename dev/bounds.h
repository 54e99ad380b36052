// How large an attention kernel's error against fp64 may be: the rules of dev/test_attention and dev/accuracy.
//
//   max|kernel − ref64| ≤ max·max|naive − ref64| + tiny        ‖kernel − ref64‖ ≤ l2·‖naive − ref64‖
//
// naive runs in the same precision (fp32: without TF32) on the same inputs, which are rounded to X first. The rule asks
// for no more accuracy than the type has, and adapts to shape and inputs, which no absolute tolerance does.
#pragma once
#include <algorithm>
#include <cstring>

#include "attention/attention.h"

// The tensors that are compared.
enum { Out, Lse, Dq, Dk, Dv, kTensors };
static const char* const kNames[kTensors] = {"out", "lse", "dq", "dk", "dv"};

// Two equally good kernels sum in different orders: while their L2 errors agree to 3 %, the largest errors of a tensor
// differ by up to 2 either way, so FlashAttention's own tests take max = 2. bf16 needs no such room, as naive rounds S
// and dP too, which flash keeps in fp32; but among a few thousand elements one unlucky rounding decides. L2 errors are
// steady, but for dq: flash's D = rowsum(dO∘O) cancels less exactly than naive's rowsum(P∘dP), as O has been rounded in
// between. It shows where dP has a mean that D must cancel: in flash_fp32 by up to 2.1, in bf16 at very long T by up to
// 1.6, which an O rounded once from the exact one reaches too.
//
// flash_fp16x3 adds up in many short sums and is held to more. Its operands keep 22 bits: `roundoff` is one rounding of
// the result to that, which is all of the error where naive is exact: where one key has all the weight (T = 1), or all keys
// have the same. It counts only there: where naive's largest error is below one rounding to X.
// Its lse is the exception, because tensor cores truncate. For inputs of non-zero mean S is a sum of products of one sign,
// and each step of its two chains takes up to half a unit off. Naive's lse is not much worse than the rounding of the result.
struct ErrorBound {
    double max, l2, roundoff = 0;
};
template <class X>
ErrorBound error_bound(const AttentionKernel<X>& kernel, int tensor, const AttentionShape& s) {
    const size_t elements = size_t(s.B) * s.T * s.NH * s.HS;
    if (std::is_same_v<X, bf16>) return {elements < 1 << 16 ? 1.5 : 1, tensor == Dq && s.T > 4096 ? 2 : 1.25};
    if (std::strcmp(kernel.name, "flash_fp16x3") == 0)
        return tensor == Lse ? ErrorBound{2.5, 2.5} : ErrorBound{1.25, 1.25, 0x1p-22};
    return {2, tensor == Dq ? 2.5 : 1.5};
}

// Unit roundoff of X.
template <class X>
constexpr double kRoundoff = std::is_same_v<X, bf16> ? 0x1p-9 : 0x1p-24;

// `tiny` of a tensor whose largest element is `largest`: one rounding of it, for lse a few units of log and exp.
template <class X>
double one_rounding(int tensor, double largest) {
    return tensor == Lse ? 4 * kRoundoff<float> * std::max(1., largest) : kRoundoff<X> * largest;
}

// ErrorBound::roundoff, if naive's largest error is below one rounding of the reference's largest element.
template <class X>
double roundoff(const ErrorBound& k, int tensor, double naive_max, double largest) {
    return naive_max < one_rounding<X>(tensor, largest) ? k.roundoff : 0;
}

// bf16's lse has a rule of its own, because naive's comes from an S rounded to bf16 and flash's never leaves fp32. Allowed
// are 8 times the largest error of a bf16 flash kernel on test_attention's accuracy cases, in units of max(1, |lse|).
// ACCURACY=1 prints it there: 2.63e-7 on an H100, for both kernels.
constexpr double kBf16LseError = 2.63e-7;
inline double bf16_lse_bound(double largest) {
    return 8 * kBf16LseError * std::max(1., largest);
}
