// Both forms of a flash kernel, the whole one (attention.h) and the partial one (partial.h), made of one function for
// each pass. What belongs to the other form is null.
#pragma once
#include "attention/launch.h"
#include "attention/partial.h"

template <class X>
struct ForwardCall {
    PartialShape s;
    Heads<const X> q, k, v;
    Heads<X> out = {};  // whole form: written
    float* lse = nullptr;
    float* o_acc = nullptr;  // partial form: merged into
    double* lse_acc = nullptr;
};

template <class X>
struct BackwardCall {
    PartialShape s;
    Heads<const X> q, k, v, dout;
    const float* lse;
    void* scratch;
    Heads<const X> out = {};  // whole form
    Heads<X> dq = {}, dk = {}, dv = {};
    const float* D = nullptr;  // partial form
    Heads<float> dq_sum = {}, dk_sum = {}, dv_sum = {};
};

// A kernel's row of the ladder is BothForms<…>::kernel(min_sm). launch_forward and launch_backward need not check
// shapes and alignment.
template <class X, const char* Name, void launch_forward(const Cuda&, const ForwardCall<X>&),
          void launch_backward(const Cuda&, const BackwardCall<X>&),
          size_t scratch_bytes(const PartialShape&, bool partial)>
struct BothForms {
    using Input = std::pair<const char*, Heads<const X>>;
    static void check(const PartialShape& s, std::initializer_list<Input> inputs) {
        check_shape(Name, s);
        for (const auto& [name, x] : inputs) check_aligned(Name, name, x);
    }
    static void run(const Cuda& dev, const ForwardCall<X>& c) {
        check(c.s, {{"q", c.q}, {"k", c.k}, {"v", c.v}});
        check_aligned(Name, "out", c.out);
        check_aligned(Name, "o_acc", c.o_acc);
        launch_forward(dev, c);
    }
    static void run(const Cuda& dev, const BackwardCall<X>& c) {
        check(c.s, {{"q", c.q}, {"k", c.k}, {"v", c.v}, {"dout", c.dout}, {"out", c.out}});
        check_aligned(Name, "dqkv", c.dq);
        check_aligned(Name, "dq_sum", c.dq_sum);
        check_aligned(Name, "dk", c.dk_sum);
        check_aligned(Name, "dv", c.dv_sum);
        check_aligned(Name, "scratch", c.scratch);
        launch_backward(dev, c);
    }

    static void forward(const Cuda& dev, X* out, float* lse, X*, void*, const X* qkv, const AttentionShape& s) {
        ForwardCall<X> c{whole(s), packed(qkv, s, 0), packed(qkv, s, 1), packed(qkv, s, 2)};
        c.out = contiguous(out, s.T, s.NH, s.HS), c.lse = lse;
        run(dev, c);
    }
    static void forward_partial(const Cuda& dev, float* o_acc, double* lse, Heads<const X> q, Heads<const X> k,
                                Heads<const X> v, const PartialShape& s) {
        ForwardCall<X> c{s, q, k, v};
        c.o_acc = o_acc, c.lse_acc = lse;
        run(dev, c);
    }
    static void backward(const Cuda& dev, X* dqkv, void* scratch, const X* dout, const X* out, const float* lse,
                         const X*, const X* qkv, const AttentionShape& s) {
        const Heads<const X> douts = contiguous(dout, s.T, s.NH, s.HS);
        BackwardCall<X> c{whole(s), packed(qkv, s, 0), packed(qkv, s, 1), packed(qkv, s, 2), douts, lse, scratch};
        c.out = contiguous(out, s.T, s.NH, s.HS);
        c.dq = packed(dqkv, s, 0), c.dk = packed(dqkv, s, 1), c.dv = packed(dqkv, s, 2);
        run(dev, c);
    }
    static void backward_partial(const Cuda& dev, float* dq_sum, float* dk, float* dv, void* scratch, Heads<const X> q,
                                 Heads<const X> k, Heads<const X> v, Heads<const X> dout, const float* lse,
                                 const float* D, const PartialShape& s) {
        BackwardCall<X> c{s, q, k, v, dout, lse, scratch};
        c.dq_sum = contiguous(dq_sum, s.rows_of_q(), s.NH, s.HS), c.dq_sum.ptr += s.q_begin * c.dq_sum.token;
        c.dk_sum = contiguous(dk, s.rows_of_k(), s.NH, s.HS), c.dv_sum = contiguous(dv, s.rows_of_k(), s.NH, s.HS);
        c.D = D;
        run(dev, c);
    }

    static size_t whole_scratch_bytes(const AttentionShape& s) { return scratch_bytes(whole(s), false); }
    static size_t partial_scratch_bytes(const PartialShape& s) { return scratch_bytes(s, true); }
    static constexpr PartialForm<X> partial{forward_partial, backward_partial, partial_scratch_bytes, dq_rows_bytes,
                                            write_dq_rows<X>};
    static constexpr AttentionKernel<X> kernel(int min_sm) {
        return {Name, min_sm, true, no_bytes, whole_scratch_bytes, forward, backward, &partial};
    }
};
