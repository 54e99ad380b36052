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
//   naive_tf32  is naive with TF32 products (fp32 data, 10 bits of each factor). naive itself uses
//               no TF32.
//
// A kernel whose buffers do not fit into the GPU's memory is not timed.
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
    Poisoned<X> qkv;
    Poisoned<X> dout;
    KernelRun<X> run;

    Buffers(const Cuda& dev, const AttentionKernel<X>& kernel, const AttentionShape& s)
        : qkv(dev, 3 * s.rows() * s.HS), dout(dev, s.rows() * s.HS), run(dev, kernel, s) {
        fill_normal(dev, qkv.ptr(), 3 * run.n, 1);
        fill_normal(dev, dout.ptr(), run.n, 2);
    }

    void forward(const Cuda& dev) const { run.forward(dev, qkv); }
    void backward(const Cuda& dev) const { run.backward(dev, qkv, dout); }
    static size_t bytes(const AttentionKernel<X>& kernel, const AttentionShape& s) {
        const size_t tensors = 8 * s.HS * sizeof(X);  // of a row: qkv, dout, out, dqkv
        const size_t lse = sizeof(float);
        return s.rows() * (tensors + lse) + kernel.saved_bytes(s) + kernel.scratch_bytes(s);
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
    for (int tensor = 0; tensor < kTensors; tensor++)
        if (!is_gradient(tensor) || run.kernel.has_backward())
            keep_worst(worst, errors.relative_l2(tensor));
    return worst;
}

// -------------------------------------------------------------------------------------------------
// Measurement

enum Pass { kForward, kBackward, kPasses };
using Measured = std::array<Figures, kPasses>;

static std::string cells(double ms, double rate, double gemm, double naive_ms) {
    if (std::isnan(ms))
        return format("%9s %6s %5s %6s", "-", "-", "-", "-");
    const std::string speedup = std::isnan(naive_ms) ? "-" : format("%.2f", naive_ms / ms);
    return format("%9.4f %6.1f %5.1f %6s", ms, rate, 100 * rate / gemm, speedup.c_str());
}

template <class X>
struct Bench {
    Cuda& dev;
    const AttentionOptions& options;
    Log& log;
    Figures gemm[2] = {};                           // TFLOP/s; [true]: with TF32
    std::map<std::string, Measured> naive_ms = {};  // by the shape's text()

    static std::string text(const AttentionShape& s) {
        return format("%4d %6d %3d %4d", s.B, s.Tq, s.NH, s.HS);
    }

    // Measures and prints the rates of the GEMMs that the subjects are compared with.
    void measure_gemm(const std::vector<Subject<X>>& subjects) {
        for (const Subject<X>& subject : subjects) {
            Figures& rate = gemm[subject.tf32];
            if (!std::isnan(rate.cool))
                continue;
            dev.tf32 = subject.tf32;
            rate = gemm_tflops<X>(dev, options.quick);
            std::printf("\n%s GEMM: %.0f TFLOP/s cool",
                        subject.tf32 ? "tf32" : name_of(dtype_of<X>()), rate.cool);
            if (!options.quick)
                std::printf(", %.0f sustained", rate.sustained);
        }
    }

    // So many sets of buffers that forward's reads and writes fill the L2 twice.
    size_t sets_of_buffers(const AttentionKernel<X>& kernel, const AttentionShape& s) const {
        int l2_bytes = 0;
        CUDA_CHECK(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, dev.device));
        const size_t touched = 4 * s.rows() * s.HS * sizeof(X) + kernel.saved_bytes(s);
        return (2 * size_t(l2_bytes) + touched - 1) / touched;
    }

    // naive in bf16 stores S, P, dP and dS in bf16 and is off by 4e-3. TF32 has 10 bits and is off
    // by 1e-3. fp32 is off by 3e-6 at T = 16384.
    static double error_limit(const Subject<X>& subject) {
        if (std::is_same_v<X, bf16>)
            return 1e-2;
        return subject.tf32 ? 5e-3 : 1e-5;
    }

    // Validates and times a kernel. False if it gave a wrong result.
    bool run(const Subject<X>& subject, const AttentionShape& s) {
        const AttentionKernel<X>& kernel = *subject.kernel;
        const char* dtype = name_of(dtype_of<X>());
        const std::string shape = text(s);
        dev.tf32 = subject.tf32;

        const size_t sets = sets_of_buffers(kernel, s);
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

        const double error = relative_error(dev, *runs[0]);
        const double limit = error_limit(subject);
        if (!(error <= limit)) {
            std::printf("%-17s %-5s %-4s %s | WRONG: relative L2 error %.2g > %.2g, not timed\n",
                        subject.name, dtype, "", shape.c_str(), error, limit);
            return false;
        }

        const auto forward = [&](int i) { runs[i % sets]->forward(dev); };
        const auto backward = [&](int i) { runs[i % sets]->backward(dev); };
        Measured ms;
        ms[kForward] = measure_ms(dev, options.quick, forward);
        if (kernel.has_backward())
            ms[kBackward] = measure_ms(dev, options.quick, backward);
        else
            std::printf("%-17s %-5s has no backward\n", subject.name, dtype);
        if (subject.is_naive())
            naive_ms[shape] = ms;

        report(subject, s, kForward, ms[kForward], error);
        if (kernel.has_backward())
            report(subject, s, kBackward, ms[kBackward], error);
        return true;
    }

    void report(const Subject<X>& subject, const AttentionShape& s, Pass pass, const Figures& ms,
                double error) {
        const char* dtype = name_of(dtype_of<X>());
        const char* pass_name = pass == kForward ? "fwd" : "bwd";
        const std::string shape = text(s);
        const double forward_flops = 4. * s.B * s.NH * s.Tq * s.Tk * s.HS * (s.causal ? 0.5 : 1.);
        const double flops = forward_flops * (pass == kForward ? 1. : 2.5);
        const Figures rate = tflops(flops, ms);
        const Figures& gemm_rate = gemm[subject.tf32];
        const auto naive = naive_ms.find(shape);
        const Figures naive_pass = naive == naive_ms.end() ? Figures() : naive->second[pass];
        std::printf(
            "%-17s %-5s %-4s %s | %s | %s | %.1e\n", subject.name, dtype, pass_name, shape.c_str(),
            cells(ms.cool, rate.cool, gemm_rate.cool, naive_pass.cool).c_str(),
            cells(ms.sustained, rate.sustained, gemm_rate.sustained, naive_pass.sustained).c_str(),
            error);
        std::fflush(stdout);

        Row row = result_row(dev, "attention");
        row.add("kernel", subject.name);
        row.add("pass", pass_name);
        row.add("dtype", dtype);
        row.add("B", s.B);
        row.add("T", s.Tq);
        row.add("NH", s.NH);
        row.add("HS", s.HS);
        row.add("causal", s.causal);
        row.add("deterministic", true);
        row.add("ms", ms.cool);
        row.add("tflops", rate.cool);
        row.add("gemm_tflops", gemm_rate.cool);
        row.add("ms_sustained", ms.sustained);
        row.add("tflops_sustained", rate.sustained);
        row.add("gemm_tflops_sustained", gemm_rate.sustained);
        row.add("relative_error", error);
        log.write(row);
    }
};

// Returns how many kernels were wrong.
template <class X>
int bench_all(Cuda& dev, const AttentionOptions& options, const std::string& default_shapes,
              Log& log) {
    if (!options.has<X>())
        return 0;
    std::vector<Subject<X>> subjects;
    for (const Subject<X>& subject : subjects_on<X>(dev))
        if (options.has_kernel(subject.name))
            subjects.push_back(subject);
    if (subjects.empty())
        return 0;

    Bench<X> bench{.dev = dev, .options = options, .log = log};
    bench.measure_gemm(subjects);
    std::printf("\n%-17s %-5s %-4s %4s %6s %3s %4s | %9s %6s %5s %6s | %9s %6s %5s %6s | error\n",
                "kernel", "dtype", "pass", "B", "T", "NH", "HS", "cool ms", "TF/s", "%GEMM",
                "xnaive", "sust. ms", "TF/s", "%GEMM", "xnaive");
    int wrong = 0;
    for (const auto& [B, T] :
         parse_shapes(options.shapes.empty() ? default_shapes : options.shapes))
        for (const Subject<X>& subject : subjects)
            if (!bench.run(subject, options.shape(B, T)))
                wrong++;
    return wrong;
}

int main(int argc, char** argv) {
    AttentionOptions options;
    const AttentionProgram program{
        .name = "bench_attention",
        .about = "Validates and times the attention kernels.",
        .results = "attention",
        .shapes = "from 4x1024 to 2x16384, depending on the precision",
        .quick = "time only single calls on a cool GPU, not sustained load"};
    const char* const fp32_shapes = "4x1024,32x1024,4x4096,2x16384";
    const char* const bf16_shapes = "4x1024,32x1024,64x1024,4x2048,4x4096,4x8192,2x16384";
    return attention_main(argc, argv, program, options, [&](Cuda& dev, Log& log) {
        std::printf("%s, %s\n", dev.name.c_str(), options.no_causal ? "not causal" : "causal");
        int wrong = bench_all<float>(dev, options, fp32_shapes, log);
        wrong += bench_all<bf16>(dev, options, bf16_shapes, log);
        if (wrong)
            std::fprintf(stderr, "bench_attention: %d wrong results\n", wrong);
        return wrong ? 1 : 0;
    });
}
