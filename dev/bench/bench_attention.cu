// Times the attention kernels. Each is validated first, on the inputs it is then timed with.
//
//   validation  relative L2 error of out, lse, dq, dk, dv against fp64 (dev/common/oracle.cuh).
//               Outputs, att and scratch start as NaN. A kernel that fails gets no time, and the
//               program ends with 1.
//   timing      both protocols of bench.h. Small problems rotate through copies of all buffers.
//               Their forward passes touch twice the L2 cache in total, so that every run reads
//               from memory.
//   passes      a kernel without backward is validated and timed forward only, and a line says so.
//   figures     ms, TFLOP/s, % of the GEMM rate in the same protocol, speed-up over naive in the
//               same precision. A forward pass counts 4·B·NH·T²·HS FLOPs (half of it if causal), a
//               backward pass 2.5 times that.
//   naive_tf32  is naive with TF32 products (fp32 data, 10 bits of each factor). naive itself has
//               none.
//
// A shape that a kernel's buffers do not fit is not timed.
//
// Run: ./dev/bench_attention --help
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dev/common/attention_bench.cuh"

template <class X>
struct Buffers {
    Poisoned<X> qkv, dout;
    KernelRun<X> run;

    Buffers(const Cuda& dev, const AttentionKernel<X>& kernel, const AttentionShape& s)
        : qkv(dev, 3 * s.rows() * s.HS), dout(dev, s.rows() * s.HS), run(dev, kernel, s) {
        fill_normal(dev, +qkv, 3 * run.n, 1);
        fill_normal(dev, +dout, run.n, 2);
    }
    void forward(const Cuda& dev) const { run.forward(dev, qkv); }
    void backward(const Cuda& dev) const { run.backward(dev, qkv, dout); }
    static size_t bytes(const AttentionKernel<X>& kernel, const AttentionShape& s) {
        return s.rows() * (8 * s.HS * sizeof(X) + sizeof(float)) + kernel.saved_bytes(s) +
               kernel.scratch_bytes(s);
    }
};

// The largest relative L2 error among out, lse, dq, dk, dv against fp64. NaN if one of them is NaN.
template <class X>
double relative_error(const Cuda& dev, const Buffers<X>& buffers) {
    const KernelRun<X>& run = buffers.run;
    const AttentionShape& s = run.s;
    Errors errors(dev, s);
    for_each_head<X>(dev, buffers.qkv, buffers.dout, s, [&](const Oracle& oracle, int b, int h) {
        errors.add<X>(oracle, run.out, run.lse, run.dqkv, b, h);
    });
    errors.fetch();
    double worst = 0;
    for (int tensor = 0; tensor < (run.kernel.has_backward() ? kTensors : Dq); tensor++)
        keep_worst(worst, errors.l2(tensor));
    return worst;
}

// -------------------------------------------------------------------------------------------------
// Measurement

using Measured = std::array<Figures, 2>;  // forward, backward

static std::string cells(double ms, double rate, double gemm, double naive_ms) {
    if (std::isnan(ms))
        return format("%9s %6s %5s %6s", "-", "-", "-", "-");
    const std::string speedup = std::isnan(naive_ms) ? "-" : format("%.2f", naive_ms / ms);
    return format("%9.4f %6.1f %5.1f %6s", ms, rate, 100 * rate / gemm, speedup.c_str());
}

// False if the kernel gave a wrong result.
template <class X>
bool bench(const Cuda& dev, const Subject<X>& subject, const AttentionShape& s, bool quick,
           const Figures& gemm, std::map<std::string, Measured>& naive_ms, Log& log) {
    const AttentionKernel<X>& kernel = *subject.kernel;
    const char* dtype = name_of(dtype_of<X>());
    const std::string shape = format("%4d %6d %3d %4d", s.B, s.Tq, s.NH, s.HS);

    // Enough sets of buffers that forward's reads and writes fill the L2 twice.
    int l2_bytes = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, dev.device));
    const size_t touched = 4 * s.rows() * s.HS * sizeof(X) + kernel.saved_bytes(s);
    const size_t sets = (2 * size_t(l2_bytes) + touched - 1) / touched;
    const size_t bytes = sets * Buffers<X>::bytes(kernel, s) + Oracle::bytes(s.Tq, s.HS);
    const size_t free = dev.free_bytes();
    if (bytes + (size_t{1} << 30) > free) {
        std::printf("%-17s %-5s %-4s %s | out of memory: needs %.1f GiB, free are %.1f\n",
                    subject.name, dtype, "", shape.c_str(), bytes / 0x1p30, free / 0x1p30);
        return true;
    }
    std::vector<std::unique_ptr<const Buffers<X>>> runs;
    for (size_t i = 0; i < sets; i++) {
        runs.push_back(std::make_unique<const Buffers<X>>(dev, kernel, s));
        runs[i]->forward(dev);
        runs[i]->backward(dev);
    }

    // naive in bf16 stores S, P, dP and dS in bf16 and is off by 4e-3. TF32 has 10 bits and is off
    // by 1e-3. fp32 is off by 3e-6 at T = 16384.
    const double error = relative_error(dev, *runs[0]);
    const double limit = std::is_same_v<X, bf16> ? 1e-2 : subject.tf32 ? 5e-3 : 1e-5;
    if (!(error <= limit)) {
        std::printf("%-17s %-5s %-4s %s | WRONG: relative L2 error %.2g > %.2g, not timed\n",
                    subject.name, dtype, "", shape.c_str(), error, limit);
        return false;
    }

    Measured measured;
    measured[0] = measure_ms(dev, quick, [&](int i) { runs[i % sets]->forward(dev); });
    if (kernel.has_backward())
        measured[1] = measure_ms(dev, quick, [&](int i) { runs[i % sets]->backward(dev); });
    else
        std::printf("%-17s %-5s has no backward\n", subject.name, dtype);
    if (subject.is_naive())
        naive_ms[shape] = measured;
    const auto naive = naive_ms.find(shape);
    const double forward_flops = 4. * s.B * s.NH * s.Tq * s.Tk * s.HS * (s.causal ? 0.5 : 1.);
    for (int pass = 0; pass < (kernel.has_backward() ? 2 : 1); pass++) {
        const Figures ms = measured[pass];
        const Figures rate = tflops(forward_flops * (pass ? 2.5 : 1.), ms);
        const Figures naive_pass = naive == naive_ms.end() ? Figures() : naive->second[pass];
        const char* pass_name = pass ? "bwd" : "fwd";
        std::printf(
            "%-17s %-5s %-4s %s | %s | %s | %.1e\n", subject.name, dtype, pass_name, shape.c_str(),
            cells(ms.cool, rate.cool, gemm.cool, naive_pass.cool).c_str(),
            cells(ms.sustained, rate.sustained, gemm.sustained, naive_pass.sustained).c_str(),
            error);
        std::fflush(stdout);
        Row row = result_row(dev, "attention");
        row.add("kernel", subject.name)
            .add("pass", pass_name)
            .add("dtype", dtype)
            .add("B", s.B)
            .add("T", s.Tq);
        row.add("NH", s.NH).add("HS", s.HS).add("causal", s.causal).add("deterministic", true);
        row.add("ms", ms.cool).add("tflops", rate.cool).add("gemm_tflops", gemm.cool);
        row.add("ms_sustained", ms.sustained).add("tflops_sustained", rate.sustained);
        row.add("gemm_tflops_sustained", gemm.sustained).add("relative_error", error);
        log.write(row);
    }
    return true;
}

// Returns how many kernels were wrong.
template <class X>
int bench_all(Cuda& dev, const AttentionOptions& options, const std::string& default_shapes,
              Log& log) {
    if (!options.has<X>())
        return 0;
    std::vector<Subject<X>> subjects;
    for (const Subject<X>& subject : subjects_on<X>(dev))
        if (options.kernel == "all" || options.kernel == subject.name)
            subjects.push_back(subject);
    if (subjects.empty())
        return 0;

    Figures gemm[2];  // without TF32, with it
    for (const Subject<X>& subject : subjects) {
        Figures& rate = gemm[subject.tf32];
        if (!std::isnan(rate.cool))
            continue;
        dev.tf32 = subject.tf32;
        rate = gemm_tflops<X>(dev, options.quick);
        std::printf("\n%s GEMM: %.0f TFLOP/s cool", subject.tf32 ? "tf32" : name_of(dtype_of<X>()),
                    rate.cool);
        if (!options.quick)
            std::printf(", %.0f sustained", rate.sustained);
    }
    std::printf("\n%-17s %-5s %-4s %4s %6s %3s %4s | %9s %6s %5s %6s | %9s %6s %5s %6s | error\n",
                "kernel", "dtype", "pass", "B", "T", "NH", "HS", "cool ms", "TF/s", "%GEMM",
                "xnaive", "sust. ms", "TF/s", "%GEMM", "xnaive");
    int wrong = 0;
    std::map<std::string, Measured> naive_ms;
    for (const auto& [B, T] :
         parse_shapes(options.shapes.empty() ? default_shapes : options.shapes))
        for (const Subject<X>& subject : subjects) {
            dev.tf32 = subject.tf32;
            wrong += !bench(dev, subject, options.shape(B, T), options.quick, gemm[subject.tf32],
                            naive_ms, log);
        }
    return wrong;
}

int main(int argc, char** argv) {
    AttentionOptions options;
    const AttentionProgram program{"bench_attention", "Validates and times the attention kernels.",
                                   "attention", "by precision, 4x1024 to 2x16384",
                                   "skip the sustained protocol"};
    return attention_main(argc, argv, program, options, [&](Cuda& dev, Log& log) {
        std::printf("%s, %s\n", dev.name.c_str(), options.no_causal ? "not causal" : "causal");
        int wrong = bench_all<float>(dev, options, "4x1024,32x1024,4x4096,2x16384", log);
        wrong += bench_all<bf16>(dev, options,
                                 "4x1024,32x1024,64x1024,4x2048,4x4096,4x8192,2x16384", log);
        if (wrong)
            std::fprintf(stderr, "bench_attention: %d wrong results\n", wrong);
        return wrong ? 1 : 0;
    });
}
