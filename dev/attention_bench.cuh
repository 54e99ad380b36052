// What bench_attention and accuracy share: options, kernels, and what a kernel writes.
#pragma once
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "dev/bench.h"
#include "dev/oracle.cuh"

struct AttentionOptions : Output {
    std::string kernel = "all", shapes, dtype = "all", hs = "64";
    int heads = 12;
    bool no_causal = false, quick = false;

    template <class X>
    bool has() const {
        return dtype == "all" || dtype == name_of(dtype_of<X>());
    }
    AttentionShape shape(int B, int T) const { return {B, T, T, heads, std::atoi(hs.c_str()), !no_causal}; }
};

// What differs between the two programs.
struct AttentionProgram {
    const char *name, *about, *results, *shapes, *quick;
};

// The programs' main. It calls run(dev, options, log) unless the command line only asks for help.
template <class Run>
int attention_main(int argc, char** argv, const AttentionProgram& program, AttentionOptions& o, Run run) {
    const std::string shapes = std::string("BxT,BxT,… (default: ") + program.shapes + ")";
    const std::string kernels = std::string("all|naive_tf32") + std::strchr(attention_names(), '|');  // without "flash"
    const std::vector<Option> table = {
        {"--kernel", "", Option::Choice, &o.kernel, "which kernel", kernels.c_str()},
        {"--shapes", "", Option::String, &o.shapes, shapes.c_str()},
        {"--heads", "", Option::Int, &o.heads, "number of heads NH", "1..1024"},
        {"--hs", "", Option::Choice, &o.hs, "head size HS", "64|128"},
        {"--dtype", "", Option::Choice, &o.dtype, "precision", "fp32|bf16|all"},
        {"--no-causal", "", Option::Flag, &o.no_causal, "every query sees every key"},
        {"--quick", "", Option::Flag, &o.quick, program.quick},
    };
    return bench_main(argc, argv, program.name, program.about, program.results + std::string(".jsonl"), o, table, [&] {
        if (!o.shapes.empty()) parse_shapes(o.shapes);
        Cuda dev;
        Log log = results_log(dev, program.results, o);
        return run(dev, log);
    });
}

// A kernel of the table, or naive with TF32 products.
template <class X>
struct Subject {
    const char* name;
    const AttentionKernel<X>* kernel;
    bool tf32;
    bool is_naive() const { return !kernel->flash && !tf32; }
};
// Those that this GPU runs, slowest first.
template <class X>
std::vector<Subject<X>> subjects_on(const Cuda& dev) {
    std::vector<Subject<X>> all;
    const AttentionKernels<X> kernels = attention_kernels<X>();
    for (const AttentionKernel<X>* k = kernels.begin; k != kernels.begin + kernels.count; k++) {
        if (!k->runs_on(dev)) continue;
        all.push_back({k->name, k, false});
        if (!k->flash && std::is_same_v<X, float>) all.push_back({"naive_tf32", k, true});
    }
    return all;
}

// Elements of device memory that start as NaN.
template <class X>
struct Poisoned {
    DeviceMemory memory;
    Poisoned(const Cuda& dev, size_t count) : memory(poisoned(dev, count * sizeof(X))) {}
    operator X*() const { return static_cast<X*>(memory.get()); }
};

// All that a kernel writes, poisoned, and its passes.
template <class X>
struct KernelRun {
    const AttentionKernel<X>& kernel;
    const AttentionShape s;
    const size_t n = s.rows() * s.HS;
    Poisoned<X> out, dqkv, att;
    Poisoned<float> lse;
    Poisoned<char> scratch;

    KernelRun(const Cuda& dev, const AttentionKernel<X>& kernel, const AttentionShape& s)
        : kernel(kernel),
          s(s),
          out(dev, n),
          dqkv(dev, 3 * n),
          att(dev, kernel.saved_bytes(s) / sizeof(X)),
          lse(dev, s.rows()),
          scratch(dev, kernel.scratch_bytes(s)) {}
    void forward(const Cuda& dev, const X* qkv) const {
        AttentionForward<X> c = layer_forward<X>(out, lse, qkv, s);
        c.att = att;
        kernel.forward(dev, c);
    }
    void backward(const Cuda& dev, const X* qkv, const X* dout) const {
        if (!kernel.backward) return;
        AttentionBackward<X> c = layer_backward<X>(dqkv, dout, out, lse, qkv, s);
        c.att = att;
        c.scratch = scratch;
        kernel.backward(dev, c);
    }
};
