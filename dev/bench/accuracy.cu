// The errors of every attention kernel against fp64, and how they compare with the errors of naive
// in the same precision on the same inputs.
//
//   oracle     the formula in fp64 on the GPU (dev/common/oracle.cuh), checked against layers/cpu's
//              plain loops first
//   yardstick  naive in the same precision, in fp32 without TF32. naive_tf32 is shown, too, but has
//              no bound
//   inputs     N(0,1), q five times as large, mean +0.5. For bf16 kernels they are rounded first,
//              for the oracle too
//   figures    of out, lse, dq, dk, dv: largest and mean absolute error, relative L2 error,
//              signal-to-noise ratio 20·log10(‖ref‖/‖error‖) in dB, and the multiples of naive's
//              largest and L2 error, which dev/common/bounds.h bounds
//
// naive always runs. Outputs and scratch start as NaN. The exit code is 1 if an error of a flash
// kernel is beyond its bound or NaN.
//
// Run: ./dev/accuracy --help
#include <list>
#include <string>
#include <vector>

#include "dev/common/attention_bench.cuh"
#include "dev/common/bounds.h"
#include "layers/cpu/reference.h"

static const char* const kQuickShapes = "2x64,2x255,2x1024";
static const char* const kShapes = "2x64,2x255,2x1024,1x4096,1x16384";

// Tests the oracle against layers/cpu in double, with blocks of 100 rows, of which the last is not
// whole.
static void check_oracle(const Cuda& dev, int HS) {
    const int T = 255;
    const int block = 100;
    AttentionShape s{.B = 1, .Tq = T, .Tk = T, .NH = 1, .HS = HS};
    const size_t n = size_t(T) * HS;
    const Poisoned<float> inputs(dev, 4 * n);
    fill_normal(dev, inputs.ptr(), 4 * n, 1);
    std::vector<float> host(4 * n);
    dev.download(host.data(), inputs, 4 * n * sizeof(float));
    const std::vector<double> qkv(host.begin(), host.begin() + 3 * n);
    const std::vector<double> dout(host.begin() + 3 * n, host.end());

    for (bool causal : {true, false}) {
        s.causal = causal;
        std::vector<double> want[kTensors];
        std::vector<double> dqkv(3 * n);
        want[Out].resize(n);
        want[Lse].resize(T);
        double* const out = want[Out].data();
        double* const lse = want[Lse].data();
        attention_forward(Cpu(), layer_forward<double>(out, lse, qkv.data(), s));
        attention_backward(
            Cpu(), layer_backward<double>(dqkv.data(), dout.data(), out, lse, qkv.data(), s));
        for (size_t i = 0; i < 3 * n; i++)  // (T, 3, HS)
            want[Dq + (i / HS) % 3].push_back(dqkv[i]);

        Oracle oracle(dev, T, HS, block);
        gather<float>(dev, oracle, inputs, inputs + 3 * n, s, 0, 0);
        oracle.run(causal, 1 / std::sqrt(static_cast<double>(HS)));
        for (int i = 0; i < kTensors; i++) {
            std::vector<double> got(want[i].size());
            dev.download(got.data(), oracle.results[i], got.size() * sizeof(double));
            for (size_t j = 0; j < got.size(); j++) {
                const double tolerance = 1e-12 * std::max(1., std::fabs(want[i][j]));
                if (std::fabs(got[j] - want[i][j]) <= tolerance)
                    continue;
                throw Error(format(
                    "the fp64 reference is wrong: at T %d, HS %d, %s, its %s[%zu] is %.17g, "
                    "whereas layers/cpu computes %.17g",
                    T, HS, causal ? "causal" : "not causal", kNames[i], j, got[j], want[i][j]));
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------
// One shape and input

struct Study {
    Cuda& dev;
    const AttentionOptions& options;
    Log& log;
    int beyond = 0;  // errors that exceed their bounds
};

template <class X>
void report(Study& study, const Result<X>& result, const Errors& naive, const AttentionShape& s,
            const Distribution& input, int tensor) {
    const Errors& e = result.errors;
    const double ratio_max = e.max(tensor) / naive.max(tensor);
    const double ratio_l2 = e.relative_l2(tensor) / naive.relative_l2(tensor);
    const double largest = e.largest_value(tensor);

    const bool has_bound = result.run.kernel.flash;
    const ErrorFactors factors = error_factors(result.run.kernel, tensor, s);
    std::string rule = format("%g %g", factors.max_factor, factors.l2_factor);
    bool ok = true;  // by the rule, even if the kernel has no bound
    if (tensor == Lse && std::is_same_v<X, bf16>) {
        rule = "absolute";
        ok = e.max(tensor) <= bf16_lse_bound(largest);
    } else {
        const double tiny = one_rounding<X>(tensor, largest);
        const double relative =
            allowed_operand_roundoff<X>(factors, tensor, naive.max(tensor), largest);
        const double max = factors.max_factor * naive.max(tensor) + tiny + relative * largest;
        const bool l2_is_luck = s.Tq <= 2;  // naive's, because a row has only one or two keys
        ok = e.max(tensor) <= max && (l2_is_luck || ratio_l2 <= factors.l2_factor);
    }
    const bool within_bounds = !has_bound || ok;
    if (!within_bounds)
        study.beyond++;
    std::string verdict;
    if (has_bound)
        verdict = within_bounds ? rule : "BEYOND " + rule;

    std::printf("  %-4s %-14s %9.2e %9.2e %9.2e %7.1f | %6.2f %6.2f %s\n", kNames[tensor],
                result.name, e.max(tensor), e.mean(tensor), e.relative_l2(tensor), e.snr_db(tensor),
                ratio_max, ratio_l2, verdict.c_str());

    Row row = result_row(study.dev, "accuracy");
    row.add("kernel", result.name);
    row.add("dtype", name_of(dtype_of<X>()));
    row.add("B", s.B);
    row.add("T", s.Tq);
    row.add("NH", s.NH);
    row.add("HS", s.HS);
    row.add("causal", s.causal);
    row.add("input", input.name);
    row.add("tensor", kNames[tensor]);
    row.add("max_error", e.max(tensor));
    row.add("mean_error", e.mean(tensor));
    row.add("relative_l2", e.relative_l2(tensor));
    row.add("snr_db", e.snr_db(tensor));
    row.add("ratio_max", ratio_max);
    row.add("ratio_l2", ratio_l2);
    row.add("within_bounds", within_bounds);
    study.log.write(row);
}

template <class X>
void compare(Study& study, const std::vector<Subject<X>>& subjects, const AttentionShape& s,
             const Distribution& input) {
    Cuda& dev = study.dev;
    const AttentionKernel<X>& naive = *subjects[0].kernel;

    std::printf("%s B%d T%d NH%d HS%d %s, %s\n", name_of(dtype_of<X>()), s.B, s.Tq, s.NH, s.HS,
                s.causal ? "causal" : "not causal", input.text);

    const size_t tensors = 40 * s.rows() * s.HS * sizeof(X);  // roughly, of all kernels
    const size_t bytes =
        naive.saved_bytes(s) + naive.scratch_bytes(s) + Oracle::bytes(s.Tq, s.HS) + tensors;
    if (bytes + (size_t{1} << 30) > dev.free_bytes()) {
        std::printf("  skipped: naive needs %.1f GiB, free are %.1f\n", bytes / 0x1p30,
                    dev.free_bytes() / 0x1p30);
        return;
    }

    const std::list<Result<X>> results = results_on(dev, subjects, s, input);
    for (int i = 0; i < kTensors; i++)
        for (const Result<X>& r : results)
            if (!is_gradient(i) || r.run.kernel.has_backward())
                report(study, r, results.front().errors, s, input, i);
    std::fflush(stdout);
}

template <class X>
void study_all(Study& study) {
    const AttentionOptions& o = study.options;
    if (!o.has<X>())
        return;
    std::vector<Subject<X>> subjects;  // naive is always one of them, and so is naive_tf32
    bool any_chosen = false;
    for (const Subject<X>& subject : subjects_on<X>(study.dev)) {
        const bool chosen = o.has_kernel(subject.name);
        any_chosen |= chosen;
        if (chosen || !subject.kernel->flash)
            subjects.push_back(subject);
    }
    if (!any_chosen)
        return;

    const std::string default_shapes = o.quick ? kQuickShapes : kShapes;
    for (const auto& [B, T] : parse_shapes(o.shapes.empty() ? default_shapes : o.shapes))
        for (const Distribution& input : kDistributions)
            compare(study, subjects, o.shape(B, T), input);
    if (o.shapes.empty()) {
        const AttentionShape not_causal = {
            .B = 2, .Tq = 256, .Tk = 256, .NH = 2, .HS = std::atoi(o.hs.c_str()), .causal = false};
        compare(study, subjects, not_causal, kDistributions[0]);
    }
}

int main(int argc, char** argv) {
    AttentionOptions options;
    const AttentionProgram program{.name = "accuracy",
                                   .about = "Measures the attention kernels' errors against fp64.",
                                   .results = "accuracy",
                                   .shapes = "T from 64 to 16384, and 2x256 not causal",
                                   .quick = "only T up to 1024"};
    return attention_main(argc, argv, program, options, [&](Cuda& dev, Log& log) {
        check_oracle(dev, std::atoi(options.hs.c_str()));
        std::printf("%s: errors against fp64, and multiples of naive's\n", dev.name.c_str());
        std::printf("  %-4s %-14s %9s %9s %9s %7s | %6s %6s bounds\n", "", "kernel", "max", "mean",
                    "rel. L2", "SNR dB", "x max", "x L2");
        Study study{.dev = dev, .options = options, .log = log};
        study_all<float>(study);
        study_all<bf16>(study);
        if (study.beyond)
            std::fprintf(stderr, "accuracy: %d errors exceed their bounds\n", study.beyond);
        return study.beyond ? 1 : 0;
    });
}
