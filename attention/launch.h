// What the launchers of the kernels share. Their calls have been checked (check_call in call.h).
#pragma once
#include "attention/attention.h"

// How many tiles of b cover a ≥ 1.
inline int ceil_div(int a, int b) {
    return (a - 1) / b + 1;
}

// f(std::integral_constant<int, HS>), so that the head size is known to the compiler.
template <class F>
void with_head_size(int HS, F f) {
    if (HS == 64)
        f(std::integral_constant<int, 64>{});
    else
        f(std::integral_constant<int, 128>{});
}
