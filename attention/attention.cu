// Which attention kernel runs, the layer's two calls, and the helpers of the block form.
//
// A new kernel is one name in its table below. If it is to be what `flash` means, its name also goes into kFastest.
#include <climits>
#include <cmath>
#include <string>
#include <vector>

#include "attention/attention.h"

// ---------------------------------------------------------------------------------------------------------------------
// The ladder, slowest first

template <>
AttentionKernels<float> attention_kernels() {
    static const AttentionKernel<float> table[] = {naive_fp32, flash_simple, flash_fp32, flash_fp16x3};
    return {table, sizeof(table) / sizeof(table[0])};
}
template <>
AttentionKernels<bf16> attention_kernels() {
    static const AttentionKernel<bf16> table[] = {naive_bf16, flash_mma, flash_bf16, flash_wgmma, flash_bf16_sm90};
    return {table, sizeof(table) / sizeof(table[0])};
}

namespace {

// What `flash` means: the first of these that the GPU can run. All have every form.
template <class X>
const std::vector<const char*> kFastest = {"flash_fp16x3", "flash_fp32"};
template <>
const std::vector<const char*> kFastest<bf16> = {"flash_bf16_sm90", "flash_bf16"};

template <class X>
const AttentionKernel<X>* find(std::string_view name) {
    const AttentionKernels<X> all = attention_kernels<X>();
    for (const AttentionKernel<X>* k = all.begin; k != all.begin + all.count; k++)
        if (k->name == name) return k;
    return nullptr;
}

}  // namespace

template <class X>
const AttentionKernel<X>& attention_kernel(const Cuda& dev, Attention kind, int HS) {
    const std::string name(kind.name);
    const AttentionKernel<X>* kernel = find<X>(kind.name);
    if (kind == Attention::flash)
        for (const char* fastest : kFastest<X>)
            if (kernel = find<X>(fastest); kernel->runs_on(dev)) break;
    if (!kernel) {
        using Other = std::conditional_t<std::is_same_v<X, float>, bf16, float>;
        if (!find<Other>(kind.name)) throw UsageError(format("--attention %s: there is no such kernel", name.c_str()));
        throw UsageError(format("--attention %s computes in %s: use --precision %s, or --attention flash", name.c_str(),
                                name_of(dtype_of<Other>()), name_of(dtype_of<Other>())));
    }
    if (kernel->flash && HS != 64 && HS != 128)
        throw Error(
            format("attention: %s needs a head size of 64 or 128, found %d; choose NH = C/64 or C/128, or use "
                   "--attention naive",
                   name.c_str(), HS));
    if (!kernel->runs_on(dev))
        throw Error(format("attention: %s %s needs compute capability %d.%d%s, %s has %d.%d; use %s",
                           name_of(dtype_of<X>()), name.c_str(), kernel->min_sm / 10, kernel->min_sm % 10,
                           kernel->min_sm == 90 ? " and code for sm_90a" : "", dev.name.c_str(), dev.sm / 10,
                           dev.sm % 10,
                           kind == Attention::flash ? "--precision fp32 or --attention naive" : "--attention flash"));
    return *kernel;
}

template <class X>
void check_attention(const Cuda& dev, Attention kind, int HS, bool training, bool context_parallel) {
    const AttentionKernel<X>& kernel = attention_kernel<X>(dev, kind, HS);
    if (training && !kernel.backward)
        throw UsageError(
            format("--attention %s has no backward, so it can only generate and evaluate: train with --attention flash",
                   kernel.name));
    if (context_parallel && !kernel.forward_block)
        throw UsageError(format("--context-parallel needs --attention flash: %s has no block form", kernel.name));
}

const char* attention_names() {
    static const std::string names = [] {
        std::string list = "flash|naive";
        const auto add = [&](const auto& kernels) {
            for (int i = 0; i < kernels.count; i++)
                if (kernels.begin[i].flash) list += std::string("|") + kernels.begin[i].name;
        };
        add(attention_kernels<float>());
        add(attention_kernels<bf16>());
        return list;
    }();
    return names.c_str();
}

// ---------------------------------------------------------------------------------------------------------------------
// The layer: causal, scale 1/√HS

template <class X>
void attention_forward(const Cuda& dev, Attention kind, X* out, float* lse, X* att, void* scratch, const X* qkv, int B,
                       int T, int NH, int HS) {
    attention_kernel<X>(dev, kind, HS).forward(dev, out, lse, att, scratch, qkv, AttentionShape{B, T, NH, HS});
}

template <class X>
void attention_backward(const Cuda& dev, Attention kind, X* dqkv, void* scratch, const X* dout, const X* out,
                        const float* lse, const X* att, const X* qkv, int B, int T, int NH, int HS) {
    attention_kernel<X>(dev, kind, HS)
        .backward(dev, dqkv, scratch, dout, out, lse, att, qkv, AttentionShape{B, T, NH, HS});
}

template <class X>
size_t attention_scratch_bytes(const Cuda& dev, Attention kind, int B, int T, int NH, int HS) {
    return attention_kernel<X>(dev, kind, HS).scratch_bytes(AttentionShape{B, T, NH, HS});
}

template <class X>
size_t attention_saved_bytes(const Cuda& dev, Attention kind, int B, int T, int NH, int HS) {
    return attention_kernel<X>(dev, kind, HS).saved_bytes(AttentionShape{B, T, NH, HS});
}

// ---------------------------------------------------------------------------------------------------------------------
// Helpers of the block form

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

// kChunk elements of x as floats.
constexpr int kChunk = 16;
__device__ void load_chunk(float (&to)[kChunk], const float* x) {
    for (int i = 0; i < kChunk / 4; i++) {
        const float4 v = reinterpret_cast<const float4*>(x)[i];
        to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
    }
}
__device__ void load_chunk(float (&to)[kChunk], const bf16* x) {
    for (int i = 0; i < kChunk / 8; i++) {
        const uint4 v = reinterpret_cast<const uint4*>(x)[i];
        const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
        for (int p = 0; p < 4; p++) {  // bf16 is the upper half of a float. The first of a pair lies in the lower half
            to[8 * i + 2 * p] = __uint_as_float(pairs[p] << 16);
            to[8 * i + 2 * p + 1] = __uint_as_float(pairs[p] & 0xffff0000u);
        }
    }
}

// D = rowsum(dout∘out). HS/16 neighbouring lanes own a row, a chunk each, and add the chunks from left to right.
// flash_fp32 sums dP = dO Vᵀ in the same order. If one key has all the weight, out = v, so dP − D is exactly 0.
template <class X, int HS>
__global__ void D_kernel(float* D, const X* dout, const X* out, int T, int NH, size_t rows) {
    constexpr int kLanes = HS / kChunk;
    const size_t thread = blockIdx.x * static_cast<size_t>(kThreads) + threadIdx.x;
    const size_t row = thread / kLanes;  // (b·T + t)·NH + h
    float sum = 0.f;
    if (row < rows) {
        float dout_regs[kChunk], out_regs[kChunk];
        load_chunk(dout_regs, dout + thread * kChunk);
        load_chunk(out_regs, out + thread * kChunk);
        for (int i = 0; i < kChunk; i++) sum = fmaf(dout_regs[i], out_regs[i], sum);
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

void attention_clear_state(const Cuda& dev, float* o_acc, double* lse, const BlockShape& s) {
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
    const unsigned blocks = blocks_for(rows * (HS / kChunk), "attention_D");
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

// ---------------------------------------------------------------------------------------------------------------------

#define INSTANTIATE(X)                                                                                              \
    template const AttentionKernel<X>& attention_kernel(const Cuda&, Attention, int);                               \
    template void check_attention<X>(const Cuda&, Attention, int, bool, bool);                                      \
    template void attention_forward(const Cuda&, Attention, X*, float*, X*, void*, const X*, int, int, int, int);   \
    template void attention_backward(const Cuda&, Attention, X*, void*, const X*, const X*, const float*, const X*, \
                                     const X*, int, int, int, int);                                                 \
    template size_t attention_scratch_bytes<X>(const Cuda&, Attention, int, int, int, int);                         \
    template size_t attention_saved_bytes<X>(const Cuda&, Attention, int, int, int, int);                           \
    template void attention_D(const Cuda&, float*, const X*, const X*, int, int, int, int);                         \
    template void attention_round(const Cuda&, X*, const float*, size_t)
INSTANTIATE(float);
INSTANTIATE(bf16);
