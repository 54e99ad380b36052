// Helpers of the partial form: the state before the first call, and D for all calls.
//
// Writes: attention_clear_state lse and o_acc, attention_D D.  Limits: HS in {64, 128} for D.
#include <climits>
#include <cmath>

#include "attention/partial.h"
#include "layers/gpu/vector.cuh"

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

// D = rowsum(dout∘out). HS/16 neighbouring lanes own a row, kTerms each, and add their sums from left to right.
// flash_fp32 sums dP = dO Vᵀ in the same order. If one key has all the weight, out = v, so dP − D is exactly 0.
constexpr int kTerms = 16;
template <class X, int HS>
__global__ void D_kernel(float* D, const X* dout, const X* out, int T, int NH, size_t rows) {
    constexpr int kLanes = HS / kTerms;
    const size_t thread = blockIdx.x * static_cast<size_t>(kThreads) + threadIdx.x;
    const size_t row = thread / kLanes;  // (b·T + t)·NH + h
    float sum = 0.f;
    if (row < rows) {
        const auto dout_regs = load<kTerms>(dout + thread * kTerms);
        const auto out_regs = load<kTerms>(out + thread * kTerms);
        for (int i = 0; i < kTerms; i++) sum = fmaf(dout_regs[i], out_regs[i], sum);
    }
    float total = 0.f;
    for (int lane = 0; lane < kLanes; lane++) total += __shfl_sync(~0u, sum, lane, kLanes);
    if (row < rows && thread % kLanes == 0) {
        const size_t h = row % NH, t = row / NH % T, b = row / NH / T;
        D[(b * NH + h) * T + t] = total;
    }
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

template void attention_D(const Cuda&, float*, const float*, const float*, int, int, int, int);
template void attention_D(const Cuda&, float*, const bf16*, const bf16*, int, int, int, int);
