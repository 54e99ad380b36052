// Calls of the partial form on CUDA, for attention/ring/chunks.h and attention/ring/ring.h. The CPU has the same in
// layers/cpu/reference.h. The shape names the kernel.
#pragma once
#include "attention/partial.h"

// See the fields of PartialForm for what each does.
template <class X>
void attention_forward_partial(const Cuda& dev, float* o_acc, double* lse, Heads<const X> q, Heads<const X> k,
                               Heads<const X> v, const PartialShape& shape) {
    attention_kernel<X>(dev, shape.attention, shape.HS).partial->forward(dev, o_acc, lse, q, k, v, shape);
}
template <class X>
void attention_backward_partial(const Cuda& dev, float* dq_sum, float* dk, float* dv, void* scratch, Heads<const X> q,
                                Heads<const X> k, Heads<const X> v, Heads<const X> dout, const float* lse,
                                const float* D, const PartialShape& shape) {
    const AttentionKernel<X>& kernel = attention_kernel<X>(dev, shape.attention, shape.HS);
    kernel.partial->backward(dev, dq_sum, dk, dv, scratch, q, k, v, dout, lse, D, shape);
}
template <class X>
size_t attention_partial_scratch_bytes(const Cuda& dev, const PartialShape& shape) {
    return attention_kernel<X>(dev, shape.attention, shape.HS).partial->scratch_bytes(shape);
}
template <class X>
size_t attention_dq_sum_bytes(const Cuda& dev, const PartialShape& shape) {
    return attention_kernel<X>(dev, shape.attention, shape.HS).partial->dq_sum_bytes(shape);
}
template <class X>
void attention_write_dq(const Cuda& dev, Heads<X> dq, const float* dq_sum, const PartialShape& shape) {
    attention_kernel<X>(dev, shape.attention, shape.HS).partial->write_dq(dev, dq, dq_sum, shape);
}

// Rows of n elements, src_stride elements apart in src and dst_stride in dst, rounded to the type of dst.
template <class Y, class X>  // dst ← src
void copy_rows(const Cuda& dev, Y* dst, size_t dst_stride, const X* src, size_t src_stride, size_t n, size_t rows);
// dst ← dst + src
void add_rows(const Cuda& dev, float* dst, size_t dst_stride, const float* src, size_t src_stride, size_t n,
              size_t rows);
template <class Y>  // dst ← a + b
void sum_rows(const Cuda& dev, Y* dst, size_t dst_stride, const float* a, const float* b, size_t src_stride, size_t n,
              size_t rows);
