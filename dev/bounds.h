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
// the largest result to that, which is all of the error where one key has all the weight and naive is exact (T = 1). It
// counts only where naive is that good: where its largest error is below one rounding to X.
// Its lse is the exception, because tensor cores truncate: a sum of products of one sign, as S is for inputs of
// non-zero mean, comes out too small by up to half a unit for each of its HS/16 steps, and naive's lse is not much
// worse than the rounding of the result.
//
// From |lse| > 64 on one kernel has bounds of its own, for the gradients alone: flash_fp32's backward takes P = exp(S − lse)
// from the lse in memory, whose rounding to fp32 is up to 2⁻¹⁸ of P there, and 2⁻¹⁷ from 128 on, while naive keeps P itself.
// flash_fp16x3 makes up for that rounding, and bf16's own is larger.
constexpr double kLargeLse = 64;
struct ErrorBound {
    double max, l2, roundoff = 0;
};
template <class X>
ErrorBound error_bound(const AttentionKernel<X>& kernel, int tensor, const AttentionShape& s, double largest_lse) {
    const size_t elements = size_t(s.B) * s.T * s.NH * s.HS;
    if (std::is_same_v<X, bf16>) return {elements < 1 << 16 ? 1.5 : 1, tensor == Dq && s.T > 4096 ? 2 : 1.25};
    if (std::strcmp(kernel.name, "flash_fp16x3") == 0)
        return tensor == Lse ? ErrorBound{2.5, 2.5} : ErrorBound{1.25, 1.25, 0x1p-22};
    if (tensor >= Dq && largest_lse > kLargeLse) return {25, 25};
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

// What the largest error of a tensor may be. naive: naive's. largest: the reference's largest element. tiny: at least one
// rounding of it.
template <class X>
double max_error_bound(const ErrorBound& k, int tensor, double naive, double largest, double tiny) {
    const bool naive_is_exact = naive < one_rounding<X>(tensor, largest);
    return k.max * naive + tiny + (naive_is_exact ? k.roundoff * largest : 0);
}

// bf16's lse has a rule of its own. naive's comes from an S rounded to bf16, flash's never leaves fp32: 8 times the largest
// error, in units of max(1, |lse|), that any bf16 flash kernel has on the cases of test_attention's accuracy.
// ACCURACY=1 prints it there. Not measured yet: 2⁻²⁰ is what fp32's S, exp and log should stay below.
constexpr double kBf16LseError = 0x1p-20;
inline double bf16_lse_bound(double largest) {
    return 8 * kBf16LseError * std::max(1., largest);
}
