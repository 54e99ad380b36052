// Accumulators of the tensor cores, as they are spread over the lanes of a warp.
//
// mma.sync and wgmma leave 16 rows and 8·N columns of a product as N fragments of 16 × 8, in
// registers float c[N][4]. In fragment n lane l holds, with g = l / 4 and t = 2 (l % 4),
//
//             columns 8n + t, 8n + t + 1
//   row g      c[n][0]  c[n][1]
//   row g + 8  c[n][2]  c[n][3]
//
// so the four lanes of a quad share two rows.
#pragma once
#include "cuda/ptx_sm80.cuh"

// The row and the column of a lane's element e = 0 … 3, that is c[n][e], in a fragment whose first
// row is row0 and whose first column is col0.
__device__ __forceinline__ int fragment_row(int row0, int e, int lane) {
    return row0 + (e / 2) * 8 + lane / 4;
}
__device__ __forceinline__ int fragment_col(int col0, int e, int lane) {
    return col0 + (lane % 4) * 2 + e % 2;
}

// The maximum and the sum over the quad that shares a row. All four lanes get it.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
template <class X>
__device__ __forceinline__ X quad_sum(X x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Row r of this lane's two, r = 0 or 1, times factor.
template <int N>
__device__ __forceinline__ void scale_row(float (&c)[N][4], int r, float factor) {
    for (int n = 0; n < N; n++) {
        c[n][2 * r] *= factor;
        c[n][2 * r + 1] *= factor;
    }
}

// The online softmax of row r. s and m are of Q Kᵀ, and the exponent applies the scale. Raises m to
// the largest s so far, and returns e^{scale·(m−m')}.
template <int N>
__device__ __forceinline__ float raise_max(float& m, const float (&s)[N][4], int r,
                                           float scale_log2) {
    float m_new = m;
    for (int n = 0; n < N; n++)
        m_new = fmaxf(m_new, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    m_new = quad_max(m_new);
    const float rescale = exp2_approx((m - m_new) * scale_log2);
    m = m_new;
    return rescale;
}
