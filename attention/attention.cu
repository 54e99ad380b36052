// Which attention kernel runs, the check of a call, and the layer's two calls.
//
// A new kernel is declared at the end of attention.h and listed in its table below. If it is to be
// what `flash` means, its name also goes into fastest_kernels().
#include <numeric>
#include <string>
#include <vector>

#include "attention/attention.h"

// -------------------------------------------------------------------------------------------------
// The ladder. Each rung is faster forward than the one before.

template <>
AttentionKernels<float> attention_kernels() {
    static const AttentionKernel<float> table[] = {naive_fp32, flash_simple, flash_fp32,
                                                   flash_fp16x3};
    return {table, std::size(table)};
}

template <>
AttentionKernels<bf16> attention_kernels() {
    static const AttentionKernel<bf16> table[] = {naive_bf16, flash_mma, flash_bf16, flash_wgmma,
                                                  flash_bf16_sm90};
    return {table, std::size(table)};
}

namespace {

// What `flash` means: the first of these that the GPU can run. All have backward and support
// pieces.
template <class X>
std::vector<const char*> fastest_kernels() {
    if constexpr (std::is_same_v<X, bf16>)
        return {"flash_bf16_sm90", "flash_bf16"};
    else
        return {"flash_fp16x3", "flash_fp32"};
}

template <class X>
const AttentionKernel<X>* find(std::string_view name) {
    const AttentionKernels<X> all = attention_kernels<X>();
    for (int i = 0; i < all.count; i++)
        if (all.begin[i].name == name)
            return &all.begin[i];
    return nullptr;
}

// If this GPU can run none of them, the last, so that attention_kernel() can say what that needs.
template <class X>
const AttentionKernel<X>* find_fastest(const Cuda& dev) {
    const AttentionKernel<X>* kernel = nullptr;
    for (const char* name : fastest_kernels<X>()) {
        kernel = find<X>(name);
        if (kernel->runs_on(dev))
            break;
    }
    return kernel;
}

// Says whether it is the other precision that has a kernel of that name.
template <class X>
[[noreturn]] void throw_no_such_kernel(const std::string& name) {
    using Other = std::conditional_t<std::is_same_v<X, float>, bf16, float>;
    if (!find<Other>(name))
        throw UsageError(format("--attention %s: no such kernel; --help lists them", name.c_str()));
    const char* other = name_of(dtype_of<Other>());
    throw UsageError(
        format("--attention %s only computes in %s; use --precision %s, or --attention flash",
               name.c_str(), other, other));
}

}  // namespace

template <class X>
const AttentionKernel<X>& attention_kernel(const Cuda& dev, Attention kind, int HS) {
    const std::string name(kind.name);
    const bool flash = kind == Attention::flash;
    const AttentionKernel<X>* kernel = flash ? find_fastest<X>(dev) : find<X>(name);
    if (!kernel)
        throw_no_such_kernel<X>(name);

    if (!kernel->supports.any_head_size && HS != 64 && HS != 128)
        throw Error(format(
            "--attention %s needs a head size of 64 or 128, but the model's is %d; use --attention "
            "naive, or a model with C/64 or C/128 heads",
            name.c_str(), HS));
    if (!kernel->runs_on(dev))
        throw Error(format(
            "--attention %s in %s needs compute capability %d.%d%s, but %s has %d.%d; use %s",
            name.c_str(), name_of(dtype_of<X>()), kernel->min_sm / 10, kernel->min_sm % 10,
            kernel->needs_wgmma() ? " and a program built with make ARCH=90a" : "",
            dev.name.c_str(), dev.sm / 10, dev.sm % 10,
            flash ? "--precision fp32 or --attention naive" : "--attention flash"));
    return *kernel;
}

template <class X>
void check_attention(const Cuda& dev, Attention kind, int HS, const AttentionUse& use) {
    const AttentionKernel<X>& kernel = attention_kernel<X>(dev, kind, HS);
    if (use.training && !kernel.has_backward())
        throw UsageError(format(
            "--attention %s has no backward pass, so it can evaluate and generate but not train; "
            "use --attention flash",
            kernel.name));
    if (use.context_parallel && !kernel.supports.pieces)
        throw UsageError(format(
            "--context-parallel splits sequences, but %s needs whole ones; use --attention flash",
            kernel.name));
}

const char* attention_names() {
    static const std::string names = [] {
        std::string list = "flash|naive";
        const auto add = [&](const auto& kernels) {
            for (int i = 0; i < kernels.count; i++)
                if (kernels.begin[i].flash)
                    list += std::string("|") + kernels.begin[i].name;
        };
        add(attention_kernels<float>());
        add(attention_kernels<bf16>());
        return list;
    }();
    return names.c_str();
}

// -------------------------------------------------------------------------------------------------
// The check of a call's memory

namespace {

// Bytes from the first of a sequence to the end of its last row.
size_t extent_of_sequence(const CallMemory& m) {
    return (m.rows.count - 1) * m.rows.stride + m.row_bytes;
}
// The same of all sequences.
size_t extent(const CallMemory& m) {
    return (m.sequences.count - 1) * m.sequences.stride + extent_of_sequence(m);
}

// True if no two rows overlap, with dimension `inner` varying fastest.
bool rows_apart(size_t row_bytes, const CallMemory::Dimension& inner,
                const CallMemory::Dimension& outer) {
    const size_t group_bytes = (inner.count - 1) * inner.stride + row_bytes;
    const bool apart_in_a_group = inner.count == 1 || inner.stride >= row_bytes;
    const bool groups_apart = outer.count == 1 || outer.stride >= group_bytes;
    return apart_in_a_group && groups_apart;
}

// True if a and b share no byte. Both views consist of blocks (rows, or whole sequences), of
// a_bytes and b_bytes, that start at multiples of `period` from the view's first block. b's first
// block is `distance` after a's. So if periods are counted from a's first block, a's blocks are all
// at the start of a period, and b's all at the same offset within one. A block of b has to begin
// after the end of a's and to end within the period.
bool apart_in_a_period(size_t distance, size_t a_bytes, size_t b_bytes, size_t period) {
    const size_t offset = distance % period;
    return offset >= a_bytes && offset + b_bytes <= period;
}

// The greatest periods that both views have, 0 if neither has a second sequence or row.
struct Periods {
    size_t sequences = 0;  // of where sequences start
    size_t rows = 0;       // of where rows start, in all sequences
};
Periods common_periods(const CallMemory& a, const CallMemory& b) {
    Periods p;
    for (const CallMemory* m : {&a, &b}) {
        if (m->sequences.count > 1)
            p.sequences = std::gcd(p.sequences, m->sequences.stride);
        if (m->rows.count > 1)
            p.rows = std::gcd(p.rows, m->rows.stride);
    }
    p.rows = std::gcd(p.rows, p.sequences);
    return p;
}

// Whether two views may share a byte. Views of one packed tensor have overlapping extents but
// interleaved rows, (B, T, 3, NH, HS), or interleaved sequences, (B, 3, T, NH, HS). This is
// conservative: it may report an overlap for unusual strides, but never misses one.
bool overlap(const CallMemory& a, const CallMemory& b) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(a.ptr);
    const uintptr_t second = reinterpret_cast<uintptr_t>(b.ptr);
    if (first > second)
        return overlap(b, a);
    const size_t distance = second - first;
    if (distance >= extent(a))
        return false;

    const Periods period = common_periods(a, b);
    const bool all_sequences_apart =
        period.sequences > 0 &&
        apart_in_a_period(distance, extent_of_sequence(a), extent_of_sequence(b), period.sequences);
    const bool all_rows_apart =
        period.rows > 0 && apart_in_a_period(distance, a.row_bytes, b.row_bytes, period.rows);
    return !all_sequences_apart && !all_rows_apart;
}

// Throws Error if the memory is missing, misaligned or overlaps itself.
void check_rows(const AttentionLimits& limits, const CallMemory& m) {
    if (!m.ptr)
        throw Error(format("%s: %s is null; allocate memory for it", limits.name, m.name));

    const bool aligned = reinterpret_cast<uintptr_t>(m.ptr) % m.alignment == 0 &&
                         m.sequences.stride % m.alignment == 0 && m.rows.stride % m.alignment == 0;
    if (!aligned)
        throw Error(format(
            "%s: the rows of %s must be %zu-byte aligned, but its address is %p and its strides "
            "are %zu and %zu bytes",
            limits.name, m.name, m.alignment, m.ptr, m.sequences.stride, m.rows.stride));

    const bool apart = rows_apart(m.row_bytes, m.rows, m.sequences) ||  // (B, T, …)
                       rows_apart(m.row_bytes, m.sequences, m.rows);    // (T, B, …)
    if (!apart)
        throw Error(format(
            "%s: the rows of %s overlap: there are %zu × %zu of %zu bytes, with strides of %zu and "
            "%zu bytes",
            limits.name, m.name, m.sequences.count, m.rows.count, m.row_bytes, m.sequences.stride,
            m.rows.stride));
}

}  // namespace

void check_memory(const AttentionLimits& limits, std::initializer_list<CallMemory> memory) {
    for (const CallMemory& m : memory)
        if (m.row_bytes > 0)
            check_rows(limits, m);

    for (auto a = memory.begin(); a != memory.end(); a++)
        for (auto b = memory.begin(); b != a; b++) {
            const bool both_used = a->row_bytes > 0 && b->row_bytes > 0;
            const bool one_written = a->written || b->written;
            if (both_used && one_written && overlap(*a, *b))
                throw Error(format(
                    "%s: %s and %s overlap, although %s is written; give it memory of its own",
                    limits.name, b->name, a->name, a->written ? a->name : b->name));
        }
}

// -------------------------------------------------------------------------------------------------
// The layer: causal, scale 1/√HS

template <class X>
void attention_forward(const Cuda& dev, Attention kind, X* out, float* lse, X* att, const X* qkv,
                       int B, int Tq, int Tk, int NH, int HS) {
    const AttentionShape s{.B = B, .Tq = Tq, .Tk = Tk, .NH = NH, .HS = HS};
    AttentionForward<X> c = layer_forward(out, lse, qkv, s);
    c.att = att;
    attention_kernel<X>(dev, kind, HS).forward(dev, c);
}

template <class X>
void attention_backward(const Cuda& dev, Attention kind, X* dqkv, void* scratch, const X* dout,
                        const X* out, const float* lse, const X* att, const X* qkv, int B, int T,
                        int NH, int HS) {
    const AttentionShape s{.B = B, .Tq = T, .Tk = T, .NH = NH, .HS = HS};
    AttentionBackward<X> c = layer_backward(dqkv, dout, out, lse, qkv, s);
    c.att = att;
    c.scratch = scratch;
    attention_kernel<X>(dev, kind, HS).backward(dev, c);
}

template <class X>
void attention_forward(const Cuda& dev, Attention kind, const AttentionForward<X, float>& call) {
    attention_kernel<X>(dev, kind, call.s.HS).forward_fp32(dev, call);
}

template <class X>
void attention_backward(const Cuda& dev, Attention kind, const AttentionBackward<X, float>& call) {
    attention_kernel<X>(dev, kind, call.s.HS).backward_fp32(dev, call);
}

template <class X>
size_t attention_scratch_bytes(const Cuda& dev, Attention kind, const AttentionShape& shape) {
    return attention_kernel<X>(dev, kind, shape.HS).scratch_bytes(shape);
}

template <class X>
size_t attention_saved_bytes(const Cuda& dev, Attention kind, const AttentionShape& shape) {
    return attention_kernel<X>(dev, kind, shape.HS).saved_bytes(shape);
}

// -------------------------------------------------------------------------------------------------

#define INSTANTIATE(X)                                                                            \
    template const AttentionKernel<X>& attention_kernel(const Cuda&, Attention, int);             \
    template void check_attention<X>(const Cuda&, Attention, int, const AttentionUse&);           \
    template void attention_forward(const Cuda&, Attention, X*, float*, X*, const X*, int, int,   \
                                    int, int, int);                                               \
    template void attention_backward(const Cuda&, Attention, X*, void*, const X*, const X*,       \
                                     const float*, const X*, const X*, int, int, int, int);       \
    template void attention_forward(const Cuda&, Attention, const AttentionForward<X, float>&);   \
    template void attention_backward(const Cuda&, Attention, const AttentionBackward<X, float>&); \
    template size_t attention_scratch_bytes<X>(const Cuda&, Attention, const AttentionShape&);    \
    template size_t attention_saved_bytes<X>(const Cuda&, Attention, const AttentionShape&)
INSTANTIATE(float);
INSTANTIATE(bf16);
