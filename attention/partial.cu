// Helpers of the partial form: the state before the first call, D for all calls, and the rounding of a sum.
//
// Writes: attention_clear_state lse and o_acc, attention_D D, attention_round dst.  Limits: HS in {64, 128} for D.
#include <climits>
#include <cmath>

#include "attention/partial.h"

namespace {

constexpr int kThreads = 256;

unsigned blocks_for(size_t threads, const char* what) {
    const size_t blocks = (threads + kThreads - 1) / kThreads;
    if (blocks > INT_MAX)
        throw Error(format("%s: %zu elements are more than one launch can cover; use a smaller batch", what, threads));
    return static_cast<unsigned>(blocks);
}

__global__ void fill_kernel(double* x, double value, size_t n) {
    const size_t i = blockIdx.x * static_cast<size_t>(kThreads) + threadIdx.x;
    if (i < n) x[i] = value;
}

// kTerms elements of x as floats.
constexpr int kTerms = 16;
__device__ void load_terms(float (&to)[kTerms], const float* x) {
    for (int i = 0; i < kTerms / 4; i++) {
        const float4 v = reinterpret_cast<const float4*>(x)[i];
        to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
    }
}
__device__ void load_terms(float (&to)[kTerms], const bf16* x) {
    for (int i = 0; i < kTerms / 8; i++) {
        const uint4 v = reinterpret_cast<const uint4*>(x)[i];
        const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
        for (int p = 0; p < 4; p++) {  // bf16 is a float's upper 16 bits. The first of a pair lies in the lower ones
            to[8 * i + 2 * p] = __uint_as_float(pairs[p] << 16);
            to[8 * i + 2 * p + 1] = __uint_as_float(pairs[p] & 0xffff0000u);
        }
    }
}

// D = rowsum(dout∘out). HS/16 neighbouring lanes own a row, kTerms each, and add their sums from left to right.
// flash_fp32 sums dP = dO Vᵀ in the same order. If one key has all the weight, out = v, so dP − D is exactly 0.
template <class X, int HS>
__global__ void D_kernel(float* D, const X* dout, const X* out, int T, int NH, size_t rows) {
    constexpr int kLanes = HS / kTerms;
    const size_t thread = blockIdx.x * static_cast<size_t>(kThreads) + threadIdx.x;
    const size_t row = thread / kLanes;  // (b·T + t)·NH + h
    float sum = 0.f;
    if (row < rows) {
        float dout_regs[kTerms], out_regs[kTerms];
        load_terms(dout_regs, dout + thread * kTerms);
        load_terms(out_regs, out + thread * kTerms);
        for (int i = 0; i < kTerms; i++) sum = fmaf(dout_regs[i], out_regs[i], sum);
    }
    float total = 0.f;
    for (int lane = 0; lane < kLanes; lane++) total += __shfl_sync(~0u, sum, lane, kLanes);
    if (row < rows && thread % kLanes == 0) {
        const size_t h = row % NH, t = row / NH % T, b = row / NH / T;
        D[(b * NH + h) * T + t] = total;
    }
}

template <class X>
__global__ void round_kernel(X* dst, const float* src, size_t n) {
    const size_t i = blockIdx.x * static_cast<size_t>(kThreads) + threadIdx.x;
    if (i < n) dst[i] = static_cast<X>(src[i]);
}

}  // namespace

void attention_clear_state(const Cuda& dev, float* o_acc, double* lse, const PartialShape& s) {
    const size_t rows = static_cast<size_t>(s.B) * s.NH * s.rows_of_q();
    if (o_acc) dev.zero(o_acc, rows * s.HS * sizeof(float));
    fill_kernel<<<blocks_for(rows, "attention_clear_state"), kThreads, 0, dev.stream>>>(lse, -INFINITY, rows);
    LAUNCH_CHECK("fill_kernel");
}

template <class X>
void attention_D(const Cuda& dev, float* D, const X* dout, const X* out, int B, int T, int NH, int HS) {
    if (HS != 64 && HS != 128) throw Error(format("attention_D: head size must be 64 or 128, found %d", HS));
    if ((reinterpret_cast<uintptr_t>(dout) | reinterpret_cast<uintptr_t>(out)) % 16)
        throw Error("attention_D: dout and out must be 16-byte aligned");
    const size_t rows = static_cast<size_t>(B) * T * NH;
    const unsigned blocks = blocks_for(rows * (HS / kTerms), "attention_D");
    if (HS == 64)
        D_kernel<X, 64><<<blocks, kThreads, 0, dev.stream>>>(D, dout, out, T, NH, rows);
    else
        D_kernel<X, 128><<<blocks, kThreads, 0, dev.stream>>>(D, dout, out, T, NH, rows);
    LAUNCH_CHECK("D_kernel");
}

template <class X>
void attention_round(const Cuda& dev, X* dst, const float* src, size_t n) {
    if (n == 0) return;
    round_kernel<<<blocks_for(n, "attention_round"), kThreads, 0, dev.stream>>>(dst, src, n);
    LAUNCH_CHECK("round_kernel");
}

template void attention_D(const Cuda&, float*, const float*, const float*, int, int, int, int);
template void attention_D(const Cuda&, float*, const bf16*, const bf16*, int, int, int, int);
template void attention_round(const Cuda&, float*, const float*, size_t);
template void attention_round(const Cuda&, bf16*, const float*, size_t);
