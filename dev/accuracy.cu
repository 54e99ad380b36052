// The errors of every attention kernel against fp64, beside the errors of naive in the same precision on the same
// inputs.
//
//   oracle     the formula in fp64 on the GPU (dev/oracle.cuh), checked against layers/cpu's plain loops first
//   yardstick  naive in the same precision, in fp32 without TF32. naive_tf32 is shown beside it and has no bound
//   inputs     N(0,1), q five times as large, mean +0.5. For bf16 kernels they are rounded first, also for the oracle
//   figures    of out, lse, dq, dk, dv: largest and mean absolute error, relative L2 error, signal-to-noise ratio
//              20·log10(‖ref‖/‖error‖) in dB, and the multiples of naive's largest and L2 error, which dev/bounds.h bounds
//   masks      the partial form with keys that all or half of the queries do not see. Nothing may become NaN
//
// Outputs and scratch start as NaN. The exit code is 1 if an error is beyond its bound or NaN.
//
// Run: ./dev/accuracy --help
#include <array>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "attention/ring/blocks.h"
#include "dev/bench.h"
#include "dev/bounds.h"
#include "dev/oracle.cuh"
#include "layers/cpu/reference.h"
#include "run/options.h"

struct Options {
    std::string kernel = "all", shapes, dtype = "all", hs = "64", inputs = "all", out;
    int heads = 12;
    bool no_causal = false, quick = false, json = false, help = false;
};

static const char* const kQuickShapes = "2x64,2x255,2x1024";
static const char* const kShapes = "2x64,2x255,2x1024,1x4096,1x16384";

static Options parse(int argc, char** argv) {
    Options o;
    std::vector<Option> table = {
        {"--kernel", "", Option::String, &o.kernel, "flash_fp32, flash_bf16, … or all; naive always runs", ""},
        {"--shapes", "", Option::String, &o.shapes, "BxT,BxT,… (default: T from 64 to 16384, and 2x256 not causal)",
         ""},
        {"--heads", "", Option::Int, &o.heads, "number of heads NH", "1..1024"},
        {"--hs", "", Option::Choice, &o.hs, "head size HS", "64|128"},
        {"--dtype", "", Option::Choice, &o.dtype, "precision", "fp32|bf16|all"},
        {"--inputs", "", Option::Choice, &o.inputs, "which inputs", "normal|large_q|shifted|all"},
        {"--no-causal", "", Option::Flag, &o.no_causal, "every query sees every key", ""},
        {"--quick", "", Option::Flag, &o.quick, "T up to 1024", ""},
        {"--json", "", Option::Flag, &o.json, "append rows to dev/results/<gpu>/accuracy.jsonl", ""},
        {"--out", "", Option::String, &o.out, "append rows to this file", ""},
    };
    if (parse_options(argc, argv, table)) {
        std::fputs(options_help("accuracy", "The attention kernels' errors against fp64.", table).c_str(), stdout);
        o.help = true;
        return o;
    }
    if (!o.shapes.empty()) parse_shapes(o.shapes);
    check_kernel_name(o.kernel);
    return o;
}

// ---------------------------------------------------------------------------------------------------------------------
// Tests the oracle against layers/cpu in double, with a last block that is not whole.
static void check_oracle(const Cuda& dev, int HS) {
    const AttentionShape s{1, 255, 1, HS};
    const int T = s.T;
    const size_t n = size_t(T) * HS;
    const DeviceMemory memory = device_memory(dev, 4 * n * sizeof(float));
    float* qkv = static_cast<float*>(memory.get());
    fill_normal(dev, qkv, 4 * n, 1);
    std::vector<float> inputs(4 * n);
    dev.download(inputs.data(), qkv, 4 * n * sizeof(float));
    const std::vector<double> host_qkv(inputs.begin(), inputs.begin() + 3 * n),
        host_dout(inputs.begin() + 3 * n, inputs.end());
    for (bool causal : {true, false}) {
        std::vector<double> want[kTensors], dqkv(3 * n);
        want[Out].resize(n);
        want[Lse].resize(T);
        const Cpu cpu;
        const double scale = 1 / std::sqrt(static_cast<double>(HS));
        attention_forward<double>(cpu, want[Out].data(), want[Lse].data(), host_qkv.data(), 1, T, 1, HS, causal, scale);
        attention_backward<double>(cpu, dqkv.data(), host_dout.data(), want[Out].data(), want[Lse].data(),
                                   host_qkv.data(), 1, T, 1, HS, causal, scale);
        for (size_t i = 0; i < 3 * n; i++) want[Dq + i / HS % 3].push_back(dqkv[i]);

        Oracle oracle(dev, T, HS, 100);
        gather(dev, oracle, qkv, qkv + 3 * n, s, 0, 0);
        oracle.run(causal, scale);
        for (int i = 0; i < kTensors; i++) {
            std::vector<double> got(want[i].size());
            dev.download(got.data(), oracle.results[i], got.size() * sizeof(double));
            for (size_t j = 0; j < got.size(); j++)
                if (!(std::fabs(got[j] - want[i][j]) <= 1e-12 * std::max(1., std::fabs(want[i][j]))))
                    throw Error(format("the oracle is wrong: T %d, HS %d, %s, %s[%zu] = %.17g, layers/cpu has %.17g", T,
                                       HS, causal ? "causal" : "not causal", kNames[i], j, got[j], want[i][j]));
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// One shape and input

// What a kernel wrote, and its errors.
template <class X>
struct Result {
    std::string name;
    const AttentionKernel<X>* kernel;
    DeviceMemory out, lse, dqkv;
    Errors errors;

    Result(const Cuda& dev, const std::string& name, const AttentionKernel<X>& kernel, const X* qkv, const X* dout,
           const AttentionShape& s)
        : name(name), kernel(&kernel), errors(dev, s) {
        const size_t rows = size_t(s.B) * s.T * s.NH, n = rows * s.HS;
        out = poisoned(dev, n * sizeof(X));
        lse = poisoned(dev, rows * sizeof(float));
        dqkv = poisoned(dev, 3 * n * sizeof(X));
        const DeviceMemory att = poisoned(dev, kernel.saved_bytes(s)), scratch = poisoned(dev, kernel.scratch_bytes(s));
        X* const att_ptr = static_cast<X*>(att.get());
        kernel.forward(dev, out_ptr(), lse_ptr(), att_ptr, scratch.get(), qkv, s);
        CUDA_CHECK(cudaMemsetAsync(scratch.get(), 0xFF, kernel.scratch_bytes(s), dev.stream));
        if (kernel.backward)
            kernel.backward(dev, dqkv_ptr(), scratch.get(), dout, out_ptr(), lse_ptr(), att_ptr, qkv, s);
        dev.sync();
    }
    X* out_ptr() const { return static_cast<X*>(out.get()); }
    float* lse_ptr() const { return static_cast<float*>(lse.get()); }
    X* dqkv_ptr() const { return static_cast<X*>(dqkv.get()); }
};

struct Input {
    const char *name, *text;
    float q_factor, shift;
};
static const Input kInputs[] = {
    {"normal", "N(0,1)", 1.f, 0.f}, {"large_q", "q x5", 5.f, 0.f}, {"shifted", "mean +0.5", 1.f, 0.5f}};

// Adds shift to x (…, parts, C). If there are several parts it then multiplies part 0 by factor.
template <class X>
__global__ void shape_inputs_kernel(X* x, size_t n, int C, int parts, float factor, float shift) {
    const size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n) x[i] = static_cast<X>((to_float(x[i]) + shift) * (parts > 1 && i / C % parts == 0 ? factor : 1.f));
}

// A kernel's largest ratios over all shapes and inputs.
struct Worst {
    std::array<double, kTensors> max{}, l2{};
    bool forward_only = false;
};

struct Study {
    Cuda& dev;
    const Options& options;
    Log& log;
    int beyond = 0;  // figures beyond their bounds
    std::map<std::string, Worst> worst = {};
};

template <class X>
void report(Study& study, const Result<X>& result, const Errors& naive, const AttentionShape& s, const Input& input,
            int tensor) {
    const Errors& e = result.errors;
    const bool bound = result.kernel->flash, bf16_lse = tensor == Lse && std::is_same_v<X, bf16>;
    const ErrorBound k = error_bound(*result.kernel, tensor, s);
    const double ratio_max = e.max(tensor) / naive.max(tensor), ratio_l2 = e.l2(tensor) / naive.l2(tensor);
    const double largest = e.largest_value(tensor);
    const double most = k.max * naive.max(tensor) + one_rounding<X>(tensor, largest) +
                        roundoff<X>(k, tensor, naive.max(tensor), largest) * largest;
    const bool ok =
        bf16_lse ? e.max(tensor) <= bf16_lse_bound(largest) : e.max(tensor) <= most && (s.T <= 2 || ratio_l2 <= k.l2);
    const std::string rule = bf16_lse ? "absolute" : format("%g %g", k.max, k.l2);
    std::printf("  %-4s %-14s %9.2e %9.2e %9.2e %7.1f | %6.2f %6.2f %s\n", kNames[tensor], result.name.c_str(),
                e.max(tensor), e.mean(tensor), e.l2(tensor), e.snr_db(tensor), ratio_max, ratio_l2,
                !bound ? ""
                : ok   ? rule.c_str()
                       : ("BEYOND " + rule).c_str());
    if (bound) {
        study.beyond += !ok;
        Worst& worst = study.worst[format("%-14s %s", result.name.c_str(), name_of(dtype_of<X>()))];
        worst.forward_only = !result.kernel->backward;
        keep_worst(worst.max[tensor], ratio_max);
        keep_worst(worst.l2[tensor], ratio_l2);
    }
    Row row = result_row(study.dev, "accuracy");
    row.add("kernel", result.name).add("dtype", name_of(dtype_of<X>())).add("B", s.B).add("T", s.T).add("NH", s.NH);
    row.add("HS", s.HS).add("causal", s.causal).add("input", input.name).add("tensor", kNames[tensor]);
    row.add("max_error", e.max(tensor)).add("mean_error", e.mean(tensor)).add("relative_l2", e.l2(tensor));
    row.add("snr_db", e.snr_db(tensor)).add("ratio_max", ratio_max).add("ratio_l2", ratio_l2);
    row.add("within_bounds", !bound || ok);
    study.log.write(row);
}

template <class X>
void compare_kernels(Study& study, const AttentionShape& s, const Input& input,
                     const std::vector<const AttentionKernel<X>*>& kernels) {
    Cuda& dev = study.dev;
    const size_t n = size_t(s.B) * s.T * s.NH * s.HS;
    const AttentionKernel<X>& naive = *kernels[0];
    std::printf("%s B%d T%d NH%d HS%d %s, %s\n", name_of(dtype_of<X>()), s.B, s.T, s.NH, s.HS,
                s.causal ? "causal" : "not causal", input.text);
    const size_t bytes = naive.saved_bytes(s) + naive.scratch_bytes(s) + Oracle::bytes(s.T, s.HS) + 40 * n * sizeof(X);
    if (bytes + (size_t{1} << 30) > dev.free_bytes()) {
        std::printf("  skipped: naive needs %.1f GiB, free are %.1f\n", bytes / 0x1p30, dev.free_bytes() / 0x1p30);
        return;
    }
    const DeviceMemory memory = device_memory(dev, 4 * n * sizeof(X));
    X *qkv = static_cast<X*>(memory.get()), *dout = qkv + 3 * n;
    fill_normal(dev, qkv, 4 * n, s.T);
    const int C = s.NH * s.HS;
    shape_inputs_kernel<<<blocks_of(3 * n), kThreads, 0, dev.stream>>>(qkv, 3 * n, C, 3, input.q_factor, input.shift);
    shape_inputs_kernel<<<blocks_of(n), kThreads, 0, dev.stream>>>(dout, n, C, 1, 1.f, input.shift);
    LAUNCH_CHECK("shape_inputs_kernel");

    std::list<Result<X>> results;
    for (const AttentionKernel<X>* kernel : kernels) {
        results.emplace_back(dev, kernel->name, *kernel, qkv, dout, s);
        if (kernel == &naive && std::is_same_v<X, float>) {
            dev.tf32 = true;
            results.emplace_back(dev, kNaiveTf32, *kernel, qkv, dout, s);
            dev.tf32 = false;
        }
    }
    Oracle oracle(dev, s.T, s.HS);
    for (int b = 0; b < s.B; b++)
        for (int h = 0; h < s.NH; h++) {
            gather(dev, oracle, qkv, dout, s, b, h);
            oracle.run(s.causal, s.resolved_scale());
            for (Result<X>& r : results) r.errors.add(oracle, r.out_ptr(), r.lse_ptr(), r.dqkv_ptr(), b, h);
        }
    for (Result<X>& r : results) r.errors.fetch();
    for (int i = 0; i < kTensors; i++)
        for (const Result<X>& r : results)
            if (i < Dq || r.kernel->backward) report(study, r, results.front().errors, s, input, i);
    std::fflush(stdout);
}

// ---------------------------------------------------------------------------------------------------------------------
// Masked rows

// Queries [0, T) against keys from k_offset on. The first k_offset rows see nothing and must stay as they were. The
// others must be finite. Forward runs twice, because the second call merges empty with empty.
template <class X>
void check_masked(Study& study, const AttentionKernel<X>& kernel, int HS, int T, int k_offset) {
    const Cuda& dev = study.dev;
    const PartialShape s{1, T, T, 2, HS, 0, k_offset};
    const size_t C = size_t(s.NH) * HS, n = T * C, rows = size_t(s.NH) * T;
    const DeviceMemory inputs = device_memory(dev, 4 * n * sizeof(X)), state = device_memory(dev, n * sizeof(float));
    const DeviceMemory lse = device_memory(dev, rows * sizeof(float)), D = device_memory(dev, rows * sizeof(float));
    const DeviceMemory running = device_memory(dev, rows * sizeof(double));
    const DeviceMemory gradients = device_memory(dev, 2 * n * sizeof(float)), dq = device_memory(dev, n * sizeof(X));
    const DeviceMemory dq_sum = device_memory(dev, kernel.partial->dq_sum_bytes(s));
    const DeviceMemory scratch = poisoned(dev, kernel.partial->scratch_bytes(s));
    X* qkv = static_cast<X*>(inputs.get());
    float *o = static_cast<float*>(state.get()), *lse_ptr = static_cast<float*>(lse.get());
    float *dk = static_cast<float*>(gradients.get()), *sum = static_cast<float*>(dq_sum.get());
    fill_normal(dev, qkv, 4 * n, 1);
    fill_normal(dev, static_cast<float*>(D.get()), rows, 2);
    dev.zero(dk, 2 * n * sizeof(float));
    dev.zero(sum, kernel.partial->dq_sum_bytes(s));
    double* const running_lse = static_cast<double*>(running.get());
    attention_clear_state(dev, o, running_lse, s);
    const auto part = [&](int i) { return Heads<const X>{qkv + i * C, 3 * n, 3 * C}; };
    for (int twice = 0; twice < 2; twice++) kernel.partial->forward(dev, o, running_lse, part(0), part(1), part(2), s);
    copy_rows(dev, lse_ptr, rows, running_lse, rows, rows, 1);
    kernel.partial->backward(dev, sum, dk, dk + n, scratch.get(), part(0), part(1), part(2), {qkv + 3 * n, n, C},
                             lse_ptr, static_cast<const float*>(D.get()), s);
    kernel.partial->write_dq(dev, {static_cast<X*>(dq.get()), n, C}, sum, s);

    std::vector<float> host_o(n), host_lse(rows), host_dkv(2 * n);
    std::vector<X> host_dq(n);
    dev.download(host_o.data(), o, n * sizeof(float));
    dev.download(host_lse.data(), lse_ptr, rows * sizeof(float));
    dev.download(host_dq.data(), dq.get(), n * sizeof(X));
    dev.download(host_dkv.data(), dk, 2 * n * sizeof(float));
    size_t wrong = 0;
    for (size_t i = 0; i < rows; i++)
        wrong += !(static_cast<int>(i % T) < k_offset ? host_lse[i] == -INFINITY : std::isfinite(host_lse[i]));
    for (size_t i = 0; i < n; i++) {
        const bool empty = static_cast<int>(i / C) < k_offset;
        for (float x : {host_o[i], float(host_dq[i])}) wrong += !(empty ? x == 0.f : std::isfinite(x));
    }
    for (float x : host_dkv) wrong += !std::isfinite(x);
    std::printf("%-14s %s %d queries against %d keys from position %d on: %s\n", kernel.name, name_of(dtype_of<X>()), T,
                T, k_offset, wrong ? format("%zu elements WRONG", wrong).c_str() : "ok");
    study.beyond += wrong > 0;
}

// ---------------------------------------------------------------------------------------------------------------------

template <class X>
void study_all(Study& study) {
    const Options& o = study.options;
    if (o.dtype != "all" && o.dtype != name_of(dtype_of<X>())) return;
    const AttentionKernels<X> all = attention_kernels<X>();
    std::vector<const AttentionKernel<X>*> kernels;  // naive, which comes first in the table, then the chosen ones
    for (const AttentionKernel<X>* k = all.begin; k != all.begin + all.count; k++)
        if (k->runs_on(study.dev) && (!k->flash || o.kernel == "all" || o.kernel == k->name)) kernels.push_back(k);
    if (kernels.empty() || (kernels.size() == 1 && o.kernel != "all" && o.kernel != "naive")) return;

    const int HS = std::atoi(o.hs.c_str());
    const std::string shapes = !o.shapes.empty() ? o.shapes : o.quick ? kQuickShapes : kShapes;
    for (const auto& [B, T] : parse_shapes(shapes))
        for (const Input& input : kInputs)
            if (o.inputs == "all" || o.inputs == input.name)
                compare_kernels<X>(study, {B, T, o.heads, HS, !o.no_causal}, input, kernels);
    if (o.shapes.empty()) compare_kernels<X>(study, {2, 256, 2, HS, false}, kInputs[0], kernels);
    for (const AttentionKernel<X>* k : kernels)
        if (k->partial)
            for (int k_offset : {255, 1000, 128, 1}) check_masked(study, *k, HS, 255, k_offset);
}

static int run(const Options& options) {
    std::string why;
    if (Cuda::count(&why) == 0) throw Error("accuracy needs a GPU: " + why);
    Cuda dev;
    dev.tf32 = false;
    check_oracle(dev, std::atoi(options.hs.c_str()));
    Log log = results_log(dev, "accuracy", options.out, options.json);
    std::printf("%s: errors against fp64, and multiples of naive's\n", dev.name.c_str());
    std::printf("  %-4s %-14s %9s %9s %9s %7s | %6s %6s bounds\n", "", "kernel", "max", "mean", "rel. L2", "SNR dB",
                "x max", "x L2");
    Study study{dev, options, log};
    study_all<float>(study);
    study_all<bf16>(study);
    std::printf("\nLargest multiples of naive's error, max / L2\n%-19s", "");
    for (const char* name : kNames) std::printf("  %-11s", name);
    for (const auto& [kernel, worst] : study.worst) {
        std::printf("\n%s", kernel.c_str());
        for (int i = 0; i < (worst.forward_only ? Dq : kTensors); i++)
            std::printf("  %4.2f / %4.2f", worst.max[i], worst.l2[i]);
        if (worst.forward_only) std::printf("  (no backward)");
    }
    std::printf("\n");
    if (study.beyond) std::fprintf(stderr, "accuracy: %d figures beyond their bounds\n", study.beyond);
    return study.beyond ? 1 : 0;
}

int main(int argc, char** argv) {
    return run_program("accuracy", [&] {
        const Options options = parse(argc, argv);
        return options.help ? 0 : run(options);
    });
}
