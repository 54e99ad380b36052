// The backend seam, CPU side: the same list of layers as layers/layers.h, as plain loops.
//
// It is three things: the executable specification, the oracle of every kernel test (X = double), and
// the trainer of a machine without a GPU (X = float, OpenMP). No sum is split between threads, so results do not depend
// on their number. A run is bit-exact wherever the compiler's arithmetic is.
//
// Shapes, "writes" and "adds into" are as in layers/layers.h. All pointers are host memory. A = Acc<X> is X itself,
// double or float. Scratch arguments exist only to match the GPU's signatures.
#pragma once
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "layers/gpu/error.h"
#include "layers/gpu/types.h"

class CpuComm;  // layers/comm/reference_comm.h

struct Cpu {
    using Comm = CpuComm;
    struct Graph {  // has CudaGraph's interface and just runs the work
        template <class Work>
        void run(const Cpu&, Work work) {
            work();
        }
    };
    explicit Cpu(int threads = 0);  // 0: all cores

    void* alloc(size_t bytes) const;  // 64-byte aligned; throws Error
    void free(void* p) const { std::free(p); }
    void* alloc_host(size_t bytes) const { return alloc(bytes); }
    void free_host(void* p) const { free(p); }
    void zero(void* p, size_t bytes) const { std::memset(p, 0, bytes); }
    void upload(void* dst, const void* host, size_t bytes) const { std::memcpy(dst, host, bytes); }
    void download(void* host, const void* src, size_t bytes) const { std::memcpy(host, src, bytes); }
    void sync() const {}
    void profile(bool) const {}
    size_t free_bytes() const { return total_bytes; }

    static constexpr const char* kind = "cpu";
    std::string name;        // "CPU, 2 threads"
    size_t total_bytes = 0;  // physical memory
    bool tf32 = false;

    // No layer needs scratch, and the encoder's plan is the token list itself.
    friend size_t encoder_scratch_bytes(const Cpu&, int, int, int) { return 0; }
    friend size_t encoder_plan_ints(const Cpu&, size_t N) { return N; }
    friend void encoder_plan(const Cpu&, int* plan, const int* tokens, size_t N) { std::copy_n(tokens, N, plan); }
    friend size_t layernorm_scratch_bytes(const Cpu&, int) { return 0; }
    friend size_t qkv_bias_scratch_bytes(const Cpu&, int) { return 0; }
    friend size_t gelu_scratch_bytes(const Cpu&, int) { return 0; }
    friend size_t matmul_gelu_scratch_bytes(const Cpu&, size_t, int, int) { return 0; }
    friend size_t reduce_scratch_bytes(const Cpu&) { return 0; }
};

template <class X>
void encoder_forward(const Cpu&, X* out, const int* tokens, const X* wte, const X* wpe, int B, int T, int C,
                     const Positions& positions = {});
template <class X>
void encoder_backward(const Cpu&, Acc<X>* dwte, Acc<X>* dwpe, void* scratch, const X* dout, const int* plan, int B,
                      int T, int C, const Positions& positions = {});

template <class X>
void layernorm_forward(const Cpu&, X* out, Acc<X>* mean, Acc<X>* rstd, const X* inp, const X* weight, const X* bias,
                       size_t N, int C);
template <class X>
void layernorm_backward(const Cpu&, X* dinp, Acc<X>* dweight, Acc<X>* dbias, Acc<X>* dinp_sum, void* scratch,
                        const X* dout, const X* inp, const X* weight, const Acc<X>* mean, const Acc<X>* rstd, size_t N,
                        int C);

template <class X>
void matmul_forward(const Cpu&, X* out, const X* inp, const X* weight, const X* bias, size_t N, int C, int OC,
                    const X* residual = nullptr);
template <class X>
void matmul_backward(const Cpu&, X* dinp, Acc<X>* dweight, const X* dout, const X* inp, const X* weight, size_t N,
                     int C, int OC, bool accumulate = true);
// Adds up all rows of dqkv. The GPU has a shorter way.
template <class X>
void qkv_bias_backward(const Cpu&, Acc<X>* dqkvb, void*, const X* dqkv, const Acc<X>*, const X*, size_t N, int C) {
    for (size_t row = 0; row < N; row++)
        for (int c = 0; c < 3 * C; c++) dqkvb[c] += dqkv[row * 3 * C + c];
}

template <class X>
void gelu_forward(const Cpu&, X* out, const X* inp, size_t n);
template <class X>
void gelu_backward(const Cpu&, X* dinp, Acc<X>* dinp_sum, X* out, void* scratch, const X* inp, const X* dout, size_t N,
                   int C);

template <class X>
void matmul_gelu_forward(const Cpu& dev, X* out, X* pre, const X* inp, const X* weight, const X* bias, size_t N, int C,
                         int OC) {
    matmul_forward(dev, pre, inp, weight, bias, N, C, OC);
    gelu_forward(dev, out, pre, N * OC);
}
template <class X>
void matmul_gelu_backward(const Cpu& dev, X* dpre, Acc<X>* dpre_sum, X* out, void* scratch, const X* dout,
                          const X* weight, const X* pre, size_t N, int C, int OC) {
    matmul_backward<X>(dev, dpre, nullptr, dout, nullptr, weight, N, C, OC);
    gelu_backward(dev, dpre, dpre_sum, out, scratch, pre, dpre, N, C);
}

template <class X>
void row_forward(const Cpu& dev, X* y, const X* x, const X* norm_weight, const X* norm_bias, const X* weight,
                 const X* bias, int C, int OC, bool gelu = false) {
    std::vector<X> n(x, x + C);
    Acc<X> mean, rstd;
    if (norm_weight) layernorm_forward(dev, n.data(), &mean, &rstd, x, norm_weight, norm_bias, 1, C);
    matmul_forward(dev, y, n.data(), weight, bias, 1, C, OC, norm_weight ? nullptr : y);
    if (gelu) gelu_forward(dev, y, y, OC);
}

// The oracle of the attention tests. It also takes the mask and the scale, which a layer never varies. out and lse have
// the rows from `first` on. HS is any size ≤ 256.
template <class X>
void attention_forward(const Cpu&, X* out, Acc<X>* lse, const X* qkv, int B, int T, int NH, int HS, bool causal,
                       Acc<X> scale, int first = 0);
template <class X>
void attention_backward(const Cpu&, X* dqkv, const X* dout, const X* out, const Acc<X>* lse, const X* qkv, int B, int T,
                        int NH, int HS, bool causal, Acc<X> scale);

// Attention has one form here, row by row with no T×T buffer, so which kernel is ignored.
template <class X>
void attention_forward(const Cpu& dev, Attention, X* out, Acc<X>* lse, X*, void*, const X* qkv, int B, int T, int NH,
                       int HS) {
    attention_forward<X>(dev, out, lse, qkv, B, T, NH, HS, true, 1 / std::sqrt(X(HS)));
}
template <class X>
void attention_backward(const Cpu& dev, Attention, X* dqkv, void*, const X* dout, const X* out, const Acc<X>* lse,
                        const X*, const X* qkv, int B, int T, int NH, int HS, int = 0, int = 0) {
    attention_backward<X>(dev, dqkv, dout, out, lse, qkv, B, T, NH, HS, true, 1 / std::sqrt(X(HS)));
}
template <class X>
void attention_last_row(const Cpu& dev, X* out, const X* qkv, int T, int NH, int HS) {
    std::vector<Acc<X>> lse(NH);
    attention_forward<X>(dev, out, lse.data(), qkv, 1, T, NH, HS, true, 1 / std::sqrt(X(HS)), T - 1);
}
template <class X>
size_t attention_scratch_bytes(const Cpu&, Attention, int, int, int, int) {
    return 0;
}
template <class X>
size_t attention_saved_bytes(const Cpu&, Attention, int, int, int, int) {
    return 0;
}
// Throws UsageError if `kind` is a GPU's kernel, or cannot do what the model needs.
template <class X>
void check_attention(const Cpu&, Attention kind, int, bool, bool context_parallel) {
    if (kind != Attention::flash && kind != Attention::naive)
        throw UsageError(
            format("--attention %s needs a GPU: the CPU has flash and naive", std::string(kind.name).c_str()));
    if (context_parallel && kind == Attention::naive)
        throw UsageError("--context-parallel needs --attention flash: naive has no partial form");
}

// The partial form (see attention/partial.h), and its helpers.
template <class X>
void attention_forward_partial(const Cpu&, Acc<X>* o_acc, double* lse, Heads<const X> q, Heads<const X> k,
                               Heads<const X> v, const PartialShape&);
template <class X>
void attention_backward_partial(const Cpu&, Acc<X>* dq_sum, Acc<X>* dk, Acc<X>* dv, void* scratch, Heads<const X> q,
                                Heads<const X> k, Heads<const X> v, Heads<const X> dout, const Acc<X>* lse,
                                const Acc<X>* D, const PartialShape&);
template <class X>
size_t attention_partial_scratch_bytes(const Cpu&, const PartialShape&) {
    return 0;
}
template <class X>
size_t attention_dq_sum_bytes(const Cpu&, const PartialShape& s) {
    return size_t(s.B) * s.rows_of_q() * s.NH * s.HS * sizeof(Acc<X>);
}
template <class A>  // merges o_b (HS) and lse_b, one row's result over more keys, into o (HS) and lse over those so far
void attention_merge(A* o, double* lse, const A* o_b, double lse_b, int HS);
template <class X>
void attention_D(const Cpu&, Acc<X>* D, const X* dout, const X* out, int B, int T, int NH, int HS);
template <class A>
void attention_clear_state(const Cpu&, A* o_acc, double* lse, const PartialShape& s) {
    const size_t rows = size_t(s.B) * s.rows_of_q() * s.NH;
    if (o_acc) std::fill_n(o_acc, rows * s.HS, A(0));
    std::fill_n(lse, rows, -std::numeric_limits<double>::infinity());
}
// Rows of n elements, src_stride apart in src, dst_stride apart in dst.
template <class Y, class X>  // dst ← src
void copy_rows(const Cpu&, Y* dst, size_t dst_stride, const X* src, size_t src_stride, size_t n, size_t rows) {
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < n; i++) dst[r * dst_stride + i] = static_cast<Y>(src[r * src_stride + i]);
}
template <class A>  // dst ← dst + src
void add_rows(const Cpu&, A* dst, size_t dst_stride, const A* src, size_t src_stride, size_t n, size_t rows) {
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < n; i++) dst[r * dst_stride + i] += src[r * src_stride + i];
}
template <class Y, class A>  // dst ← a + b
void sum_rows(const Cpu&, Y* dst, size_t dst_stride, const A* a, const A* b, size_t src_stride, size_t n, size_t rows) {
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < n; i++) dst[r * dst_stride + i] = a[r * src_stride + i] + b[r * src_stride + i];
}
template <class X>
void attention_write_dq(const Cpu& cpu, Heads<X> dq, const Acc<X>* dq_sum, const PartialShape& s) {
    const size_t C = size_t(s.NH) * s.HS, rows = s.rows_of_q();
    for (int b = 0; b < s.B; b++) copy_rows(cpu, dq.ptr + b * dq.batch, dq.token, dq_sum + b * rows * C, C, C, rows);
}

template <class X>
void classifier(const Cpu&, X* logits, Acc<X>* losses, const int* targets, Acc<X> dloss, size_t N, int V, int Vp);
template <class X>
size_t cross_entropy_scratch_bytes(const Cpu&, size_t, int, int) {
    return 0;
}
template <class X>
void cross_entropy(const Cpu& dev, X* dlogits, Acc<X>* losses, void*, const X* inp, const X* weight, const int* targets,
                   Acc<X> dloss, size_t N, int C, int V, int Vp) {
    matmul_forward<X>(dev, dlogits, inp, weight, nullptr, N, C, Vp);
    classifier(dev, dlogits, losses, targets, dloss, N, V, Vp);
}
template <class X>
void cross_entropy_backward(const Cpu& dev, X* dinp, Acc<X>* dweight, void*, const X* dlogits, const X* inp,
                            const X* weight, size_t N, int C, int Vp, bool accumulate = true) {
    matmul_backward<X>(dev, dinp, dweight, dlogits, inp, weight, N, C, Vp, accumulate);
}

template <class A>  // A = float or double
void reduce_sum(const Cpu&, A* out, void* scratch, const A* x, A scale, size_t n);
template <class A>
void global_norm(const Cpu&, A* out, void* scratch, const A* x, size_t n);
template <class X>
size_t count_nonfinite(const Cpu&, void* scratch, const X* x, size_t n);

template <class X>
void adamw_update(const Cpu&, X* params, Acc<X>* master, Acc<X>* m, Acc<X>* v, const Acc<X>* grads, const Acc<X>* norm,
                  const ParamRange* ranges, int num_ranges, const AdamW& hyper);
