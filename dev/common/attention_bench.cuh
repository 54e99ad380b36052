// What the programs about attention share: the options and kernels of bench_attention and accuracy,
// and the inputs of accuracy and study_accumulation, with a kernel's results and their errors.
#pragma once
#include <cstdlib>
#include <cstring>
#include <list>
#include <string>
#include <vector>

#include "dev/common/bench.h"
#include "dev/common/oracle.cuh"

struct AttentionOptions : Output {
    std::string kernel = "all";
    std::string shapes;
    std::string dtype = "all";
    std::string hs = "64";
    int heads = 12;
    bool no_causal = false;
    bool quick = false;

    template <class X>
    bool has() const {
        return dtype == "all" || dtype == name_of(dtype_of<X>());
    }
    bool has_kernel(const char* name) const { return kernel == "all" || kernel == name; }

    AttentionShape shape(int B, int T) const {
        const int HS = std::atoi(hs.c_str());
        return {.B = B, .Tq = T, .Tk = T, .NH = heads, .HS = HS, .causal = !no_causal};
    }
};

// What differs between the two programs.
struct AttentionProgram {
    const char* name;
    const char* about;
    const char* results;  // the file's name, without .jsonl
    const char* shapes;   // the default, for --help
    const char* quick;    // what --quick does
};

// The programs' main. It parses the command line into `o` and calls run(dev, log) unless the
// command line only asks for help.
template <class Run>
int attention_main(int argc, char** argv, const AttentionProgram& program, AttentionOptions& o,
                   Run run) {
    const std::string shapes =
        std::string("batch sizes and sequence lengths, as BxT,BxT,… (default: ") + program.shapes +
        ")";
    const char* const all_but_flash = std::strchr(attention_names(), '|');  // "|naive|…"
    const std::string kernels = std::string("all|naive_tf32") + all_but_flash;
    const std::vector<Option> table = {
        {"--kernel", "", Option::Choice, &o.kernel, "kernel to run", kernels.c_str()},
        {"--shapes", "", Option::String, &o.shapes, shapes.c_str()},
        {"--heads", "", Option::Int, &o.heads, "number of heads NH", "1..1024"},
        {"--hs", "", Option::Choice, &o.hs, "head size HS", "64|128"},
        {"--dtype", "", Option::Choice, &o.dtype, "precision", "fp32|bf16|all"},
        {"--no-causal", "", Option::Flag, &o.no_causal,
         "no causal mask: every query sees every key"},
        {"--quick", "", Option::Flag, &o.quick, program.quick},
    };
    return bench_main(argc, argv, program.name, program.about,
                      program.results + std::string(".jsonl"), o, table, [&] {
                          if (!o.shapes.empty())
                              parse_shapes(o.shapes);
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

// The kernels that this GPU can run, in the order of the ladder.
template <class X>
std::vector<Subject<X>> subjects_on(const Cuda& dev) {
    std::vector<Subject<X>> all;
    const AttentionKernels<X> kernels = attention_kernels<X>();
    for (const AttentionKernel<X>* k = kernels.begin; k != kernels.begin + kernels.count; k++) {
        if (!k->runs_on(dev))
            continue;
        all.push_back({.name = k->name, .kernel = k, .tf32 = false});
        if (!k->flash && std::is_same_v<X, float>)
            all.push_back({.name = "naive_tf32", .kernel = k, .tf32 = true});
    }
    return all;
}

// Elements of device memory that start as NaN.
template <class X>
struct Poisoned {
    DeviceMemory memory;
    Poisoned(const Cuda& dev, size_t count) : memory(poisoned(dev, count * sizeof(X))) {}
    X* ptr() const { return static_cast<X*>(memory.get()); }
    operator X*() const { return ptr(); }
};

// A kernel's passes, and all that it writes, poisoned.
template <class X>
struct KernelRun {
    const AttentionKernel<X>& kernel;
    const AttentionShape s;
    const size_t n = s.rows() * s.HS;
    Poisoned<X> out;
    Poisoned<X> dqkv;
    Poisoned<X> att;
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
        if (!kernel.has_backward())
            return;
        AttentionBackward<X> c = layer_backward<X>(dqkv, dout, out, lse, qkv, s);
        c.att = att;
        c.scratch = scratch;
        kernel.backward(dev, c);
    }
};

// -------------------------------------------------------------------------------------------------
// Errors against the oracle

// x has n elements of N(0,1): qkv (…, 3, C), and then dout (…, C). Shifts and scales them to those
// of `input`, whose parts 0 to 3 are q, k, v and dout.
template <class X>
__global__ void shape_inputs_kernel(X* x, size_t n, int C, Distribution input) {
    const size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x;
    const bool is_dout = i >= n / 4 * 3;
    const int part = is_dout ? 3 : (i / C) % 3;
    if (i < n)
        x[i] = static_cast<X>((to_float(x[i]) + input.shift[part]) * input.factor[part]);
}

// What a kernel wrote, and its errors.
template <class X>
struct Result {
    const char* name;
    KernelRun<X> run;
    Errors errors;

    Result(Cuda& dev, const Subject<X>& subject, const AttentionShape& s, const X* qkv,
           const X* dout)
        : name(subject.name), run(dev, *subject.kernel, s), errors(dev, s) {
        dev.tf32 = subject.tf32;
        run.forward(dev, qkv);
        run.backward(dev, qkv, dout);
        dev.sync();
        // the next kernel needs the memory
        run.att.memory.reset();
        run.scratch.memory.reset();
    }
};

// The results of each subject, on the same input.
template <class X>
std::list<Result<X>> results_on(Cuda& dev, const std::vector<Subject<X>>& subjects,
                                const AttentionShape& s, const Distribution& input) {
    const size_t n = s.rows() * s.HS;
    const Poisoned<X> inputs(dev, 4 * n);
    X* const qkv = inputs;
    X* const dout = qkv + 3 * n;
    const uint64_t seed = s.Tq;
    fill_normal(dev, qkv, 4 * n, seed);
    shape_inputs_kernel<<<blocks_of(4 * n), kThreads, 0, dev.stream>>>(qkv, 4 * n, s.NH * s.HS,
                                                                       input);
    LAUNCH_CHECK("shape_inputs_kernel");

    std::list<Result<X>> results;
    for (const Subject<X>& subject : subjects)
        results.emplace_back(dev, subject, s, qkv, dout);

    for_each_head<X>(dev, qkv, dout, s, [&](const Oracle& oracle, int b, int h) {
        for (Result<X>& r : results)
            r.errors.template add<X>(oracle, r.run.out, r.run.lse, r.run.dqkv, b, h);
    });
    for (Result<X>& r : results)
        r.errors.fetch();
    return results;
}
