// The CPU side of the backend seam: the same list of layers as in layers/layers.h, as plain loops.
//
// These are the executable specification, the oracle of every kernel test (X = double), and what
// trains on a machine without a GPU (X = float, with OpenMP). No sum is split between threads, so
// results do not depend on how many there are. Two runs give the same bits wherever the compiler
// generates the same arithmetic.
//
// Shapes, "writes" and "adds into" mean the same as in layers/layers.h. All pointers are host
// memory. Acc<X> is X itself, double or float. Scratch arguments exist only to match the GPU's
// signatures.
#pragma once
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "attention/ring/pieces.h"
#include "common/error.h"
#include "common/random.h"
#include "data/file.h"

struct Cpu {
    // Communication of a single rank. Only on GPUs can the program have several; tests have several
    // on the CPU, as threads (dev/common/thread_comm.h).
    struct Comm {
        static constexpr int rank = 0;
        static constexpr int size = 1;
        template <class... A>
        explicit Comm(const A&...) {}
        void fork() {}
        void join() {}
        void head_start() {}
        void group(const std::function<void()>& calls) { calls(); }
        template <class A>
        void all_reduce(A*, size_t) {}
        template <class A>
        void reduce_scatter(A* out, const A* x, size_t n) {
            std::memcpy(out, x, n * sizeof(A));
        }
        template <class X>
        void all_gather(X*, size_t) {}
        void broadcast(void*, size_t) {}
        void send(int, const void*, size_t) {}
        void recv(int, void*, size_t) {}
        template <class X>
        void send_recv(int, const X*, size_t, int, X*, size_t) {}
        void host_all_gather(void*, size_t) {}
        std::string error() const { return ""; }
    };

    // CudaGraph's interface. It just runs the work.
    struct Graph {
        template <class Work>
        void run(const Cpu&, Work work) {
            work();
        }
    };

    // threads = 0 means available_threads(). The number applies to all parallel loops that the
    // calling thread starts, those of its earlier Cpus too, until it makes another Cpu.
    explicit Cpu(int threads = 0);

    void* alloc(size_t bytes) const;  // 64-byte aligned; throws Error
    void free(void* p) const { std::free(p); }
    void* alloc_host(size_t bytes) const { return alloc(bytes); }
    void free_host(void* p) const { free(p); }
    void zero(void* p, size_t bytes) const { std::memset(p, 0, bytes); }
    void upload(void* dst, const void* host, size_t bytes) const { std::memcpy(dst, host, bytes); }
    void download(void* host, const void* src, size_t bytes) const {
        std::memcpy(host, src, bytes);
    }
    void copy(void* dst, const void* src, size_t bytes) const { std::memmove(dst, src, bytes); }
    void mark() const {}
    void download_marked(void* host, const void* src, size_t bytes) const {
        download(host, src, bytes);
    }
    void sync() const {}
    void use() const {}
    void profile(bool) const {}
    size_t free_bytes() const { return total_bytes; }

    static constexpr const char* kind = "cpu";
    std::string name;        // "CPU, 2 threads"
    size_t total_bytes = 0;  // physical memory
    bool tf32 = false;

    // No layer needs scratch, and the encoder's plan is just the list of tokens.
    friend size_t encoder_scratch_bytes(const Cpu&, int, int, int) { return 0; }
    friend size_t encoder_plan_ints(const Cpu&, size_t N) { return N; }
    friend void encoder_plan(const Cpu&, int* plan, const int* tokens, size_t N) {
        std::copy_n(tokens, N, plan);
    }
    friend size_t layernorm_scratch_bytes(const Cpu&, int) { return 0; }
    friend size_t qkv_bias_scratch_bytes(const Cpu&, int) { return 0; }
    friend size_t activation_scratch_bytes(const Cpu&, int) { return 0; }
    friend size_t matmul_activation_scratch_bytes(const Cpu&, size_t, int, int) { return 0; }
    friend size_t reduce_scratch_bytes(const Cpu&) { return 0; }
};

template <class X>
void encoder_forward(const Cpu&, X* out, const int* tokens, const X* wte, const X* wpe, int B,
                     int T, int C, const Positions& positions = {});
template <class X>
void encoder_backward(const Cpu&, Acc<X>* dwte, Acc<X>* dwpe, void* scratch, const X* dout,
                      const int* plan, int B, int T, int C, const Positions& positions = {});

template <class X>
void layernorm_forward(const Cpu&, X* out, Acc<X>* mean, Acc<X>* rstd, const X* inp,
                       const X* weight, const X* bias, size_t N, int C);
template <class X>
void layernorm_backward(const Cpu&, X* dinp, Acc<X>* dweight, Acc<X>* dbias, Acc<X>* dinp_sum,
                        void* scratch, const X* dout, const X* inp, const X* weight,
                        const Acc<X>* mean, const Acc<X>* rstd, size_t N, int C);

template <class X>
void matmul_forward(const Cpu&, X* out, const X* inp, const X* weight, const X* bias, size_t N,
                    int C, int OC, const X* residual = nullptr);
template <class X>
void matmul_backward(const Cpu&, X* dinp, Acc<X>* dweight, const X* dout, const X* inp,
                     const X* weight, size_t N, int C, int OC, bool accumulate = true);
// Sums all rows of dqkv, which the GPU's version avoids.
template <class X>
void qkv_bias_backward(const Cpu&, Acc<X>* dqkvb, void*, const X* dqkv, const Acc<X>*, const X*,
                       size_t N, int C) {
    for (size_t row = 0; row < N; row++)
        for (int c = 0; c < 3 * C; c++)
            dqkvb[c] += dqkv[row * 3 * C + c];
}

template <class X>
void activation_forward(const Cpu&, X* out, const X* inp, size_t n);
template <class X>
void activation_backward(const Cpu&, X* dinp, Acc<X>* dinp_sum, X* out, void* scratch, const X* inp,
                         const X* dout, size_t N, int C);

template <class X>
void matmul_activation_forward(const Cpu& dev, X* out, X* pre, const X* inp, const X* weight,
                               const X* bias, size_t N, int C, int OC) {
    matmul_forward(dev, pre, inp, weight, bias, N, C, OC);
    activation_forward(dev, out, pre, N * OC);
}
template <class X>
void matmul_activation_backward(const Cpu& dev, X* dpre, Acc<X>* dpre_sum, X* out, void* scratch,
                                const X* dout, const X* weight, const X* pre, size_t N, int C,
                                int OC) {
    matmul_backward<X>(dev, dpre, nullptr, dout, nullptr, weight, N, C, OC);
    activation_backward(dev, dpre, dpre_sum, out, scratch, pre, dpre, N, C);
}

// A call as attention/call.h describes it, computed row by row, without a T×T buffer, for any HS ≤
// 256. It is the oracle of the attention tests. A scale of 0 means 1/√HS, computed in X.
template <class X>
void attention_forward(const Cpu&, const AttentionForward<X>& call);
template <class X>
void attention_backward(const Cpu&, const AttentionBackward<X>& call);
// The CPU has only one form of attention, so the kernel's name is ignored.
template <class X>
void attention_forward(const Cpu& dev, Attention, const AttentionForward<X>& call) {
    attention_forward(dev, call);
}
template <class X>
void attention_backward(const Cpu& dev, Attention, const AttentionBackward<X>& call) {
    attention_backward(dev, call);
}

// The layer (attention/attention.h).
template <class X>
void attention_forward(const Cpu& dev, Attention, X* out, Acc<X>* lse, X*, const X* qkv, int B,
                       int Tq, int Tk, int NH, int HS) {
    const AttentionShape s{.B = B, .Tq = Tq, .Tk = Tk, .NH = NH, .HS = HS};
    attention_forward(dev, layer_forward(out, lse, qkv, s));
}
template <class X>
void attention_backward(const Cpu& dev, Attention, X* dqkv, void*, const X* dout, const X* out,
                        const Acc<X>* lse, const X*, const X* qkv, int B, int T, int NH, int HS) {
    const AttentionShape s{.B = B, .Tq = T, .Tk = T, .NH = NH, .HS = HS};
    attention_backward(dev, layer_backward(dqkv, dout, out, lse, qkv, s));
}
template <class X>
size_t attention_scratch_bytes(const Cpu&, Attention, const AttentionShape&) {
    return 0;
}
template <class X>
size_t attention_saved_bytes(const Cpu&, Attention, const AttentionShape&) {
    return 0;
}
// Throws UsageError if `kind` is a GPU's kernel, or cannot do what the model needs.
template <class X>
void check_attention(const Cpu&, Attention kind, int, const AttentionUse& use) {
    if (kind != Attention::flash && kind != Attention::naive)
        throw UsageError(format("--attention %s needs a GPU; on a CPU use flash or naive",
                                std::string(kind.name).c_str()));
    if (use.context_parallel && kind == Attention::naive)
        throw UsageError(
            "--context-parallel splits sequences, but naive needs whole ones; use --attention "
            "flash");
}

// Merging and adding the results of pieces (attention/ring/pieces.h).
template <class A>
void merge(const Cpu&, const AttentionShape& s, HeadsView<A> dst, const Partial<A>& sum,
           const Partial<A>& piece) {
    for (int row = 0; row < s.B * s.NH * s.Tq; row++) {
        const int t = row % s.Tq;
        const int head = row / s.Tq;
        const int b = head / s.NH;
        const int h = head % s.NH;
        const Merge<A> weights(sum, piece, head, t);
        const A* o_sum = sum.o.row(b, t, h, s.HS);
        const A* o_piece = piece.o.row(b, t, h, s.HS);
        A* o = dst.row(b, t, h, s.HS);
        for (int d = 0; d < s.HS; d++)
            o[d] = weights.merged(o_sum[d], o_piece[d]);
        weights.store_lse(sum, head, t);
    }
}
template <class A, class Z>
void add(const Cpu&, const AttentionShape& s, HeadsView<A> dst, HeadsView<Z> a, HeadsView<Z> b = {},
         HeadsView<Z> c = {}) {
    for (int row = 0; row < s.B * s.Tq; row++)
        for (int i = 0; i < s.NH * s.HS; i++) {
            // A token's heads are contiguous, so i runs over all of them.
            const auto at = [&](const auto& x) -> auto& {
                return x.row(row / s.Tq, row % s.Tq, 0, s.HS)[i];
            };
            at(dst) = at(a) + (b.ptr ? at(b) : 0) + (c.ptr ? at(c) : 0);
        }
}

template <class X>
void classifier(const Cpu&, X* logits, Acc<X>* losses, const int* targets, Acc<X> dloss, size_t N,
                int V, int Vp);
template <class X>
size_t cross_entropy_scratch_bytes(const Cpu&, size_t, int, int) {
    return 0;
}
template <class X>
void cross_entropy(const Cpu& dev, X* dlogits, Acc<X>* losses, void*, const X* inp, const X* weight,
                   const int* targets, Acc<X> dloss, size_t N, int C, int V, int Vp) {
    matmul_forward<X>(dev, dlogits, inp, weight, nullptr, N, C, Vp);
    classifier(dev, dlogits, losses, targets, dloss, N, V, Vp);
}
template <class X>
void cross_entropy_backward(const Cpu& dev, X* dinp, Acc<X>* dweight, void*, const X* dlogits,
                            const X* inp, const X* weight, size_t N, int C, int Vp,
                            bool accumulate = true) {
    matmul_backward<X>(dev, dinp, dweight, dlogits, inp, weight, N, C, Vp, accumulate);
}

template <class A>  // A = float or double
void reduce_sum(const Cpu&, A* out, void* scratch, const A* x, A scale, size_t n);
template <class A>
void global_norm(const Cpu&, A* out, void* scratch, const A* x, size_t n);
template <class X>
size_t count_nonfinite(const Cpu&, void* scratch, const X* x, size_t n);

inline uint64_t checksum(const Cpu&, void*, const void* x, size_t bytes) {
    return checksum64(x, bytes);
}

template <class X>
void adamw_update(const Cpu&, X* params, Acc<X>* master, Acc<X>* m, Acc<X>* v, const Acc<X>* grads,
                  const Acc<X>* norm, const ParamRange* ranges, int num_ranges, const AdamW& hyper);

template <class X>
void init_normal(const Cpu&, X* x, size_t n, double mean, double sigma, uint64_t seed,
                 size_t first) {
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        const double value = sigma == 0.0 ? mean : mean + sigma * normal(seed, first + i);
        x[i] = static_cast<X>(static_cast<Acc<X>>(value));
    }
}
template <class To, class From>
void convert(const Cpu&, To* out, const From* in, size_t n) {
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        out[i] = static_cast<To>(static_cast<float>(in[i]));
    }
}
