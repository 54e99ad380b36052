// Times every layer but attention at the model's shapes. Each is validated first.
//
//   validation  compares the call on a few rows with the fp64 reference, by every tensor's relative L2 error. Outputs
//               and scratch start as NaN. A layer that fails gets no time, and the program ends with 1.
//   timing      both protocols of bench.h. At the default size all tensors are far larger than the L2 cache.
//   figures     ms, TB/s and % of a copy in the same protocol. A layer's bytes are the least that it must move, with
//               every tensor read or written once. Matmuls also have TFLOP/s and % of the GEMM rate.
//
// Run: ./dev/bench_layers --help
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "dev/bench.h"
#include "layers/cpu/reference.h"
#include "layers/layers.h"

namespace {

struct Options : Output {
    std::string layer, dtype = "bf16";
    int B = 64, T = 1024, C = 768;
    bool quick = false;
};

// One tensor of a call. It has `columns` elements for each row, or `columns` in all.
struct Tensor {
    enum Kind { X, A, Tokens } kind;  // X, A = Acc<X>, or a token id for each row, and the encoder's plan behind them
    bool per_row;
    size_t columns;
    double scale = 1;  // standard deviation of its values; 0 marks an output, which is NaN before the call
    double shift = 0;
    size_t same_as = ~size_t{0};  // an earlier tensor with the same values in another type
    bool compared = true;         // or each backend has its own form of it
};

// A call's tensors on one backend.
template <class Dev, class X>
struct Memory {
    const Dev& dev;
    size_t N;
    std::vector<void*> tensors;
    std::vector<size_t> sizes;  // elements
    void* scratch;

    X* x(int i) const { return static_cast<X*>(tensors[i]); }
    Acc<X>* a(int i) const { return static_cast<Acc<X>*>(tensors[i]); }
    int* tokens(int i) const { return static_cast<int*>(tensors[i]); }
    int* plan(int i) const { return tokens(i) + N; }

    Memory(const Dev& dev, size_t N, const std::vector<Tensor>& specs, size_t scratch_bytes) : dev(dev), N(N) {
        for (const Tensor& t : specs) {
            sizes.push_back(t.columns * (t.per_row ? N : 1));
            tensors.push_back(t.kind == Tensor::Tokens ? token_ids(t)
                              : t.kind == Tensor::X    ? normal<X>(t)
                                                       : normal<Acc<X>>(t));
        }
        scratch = poisoned(std::max<size_t>(scratch_bytes, 16));
    }
    ~Memory() {
        for (void* p : tensors) dev.free(p);
        dev.free(scratch);
    }
    Memory(const Memory&) = delete;

    template <class Y>
    std::vector<double> values(int i) const {
        std::vector<Y> raw(sizes[i]);
        dev.download(raw.data(), tensors[i], raw.size() * sizeof(Y));
        return {raw.begin(), raw.end()};
    }

  private:
    void* poisoned(size_t bytes) const {
        void* p = dev.alloc(bytes);
        if constexpr (std::is_same_v<Dev, Cpu>)
            std::memset(p, 0xFF, bytes);
        else
            CUDA_CHECK(cudaMemsetAsync(p, 0xFF, bytes, dev.stream));
        return p;
    }
    void* token_ids(const Tensor& t) const {
        std::vector<int> ids(N + encoder_plan_ints(dev, N));
        for (size_t i = 0; i < N; i++) ids[i] = static_cast<int>(mix64(i * kGolden) % t.columns);
        encoder_plan(dev, ids.data() + N, ids.data(), N);
        void* p = dev.alloc(ids.size() * sizeof(int));
        dev.upload(p, ids.data(), ids.size() * sizeof(int));
        dev.sync();
        return p;
    }
    template <class Y>
    void* normal(const Tensor& t) const {
        const size_t size = sizes.back();
        Y* p = static_cast<Y*>(poisoned(size * sizeof(Y)));
        if constexpr (!std::is_same_v<Dev, Cpu>)
            if (t.scale != 0) fill_normal(dev, p, size, std::min(tensors.size(), t.same_as) + 1, t.scale, t.shift);
        return p;
    }
};

constexpr int V = 50257, Vp = 50304;
constexpr size_t kChunk = 16384;  // rows of bf16 logits that the trainer holds at once

// The least that a call moves and computes, for each row and in addition, and its rows if they are not B·T.
struct Work {
    double bytes_per_row = 0, bytes = 0, flops_per_row = 0;
    size_t rows = 0;
};

template <class X>
class Bench {
  public:
    Bench(Cuda& dev, const Options& o) : dev_(dev), o_(o), N_(size_t(o.B) * o.T), log_(results_log(dev, "layers", o)) {}

    // call(memory) runs the layer. The code is the same on both backends.
    template <class Call>
    void layer(const std::string& name, const std::vector<Tensor>& tensors, Work work, Call call) {
        if (name.find(o_.layer) == std::string::npos) return;
        if (measured++ == 0) measure_ceilings();
        const size_t N = work.rows ? work.rows : N_;
        const double error = relative_error(tensors, call);
        if (!(error <= (std::is_same_v<X, bf16> ? 6e-3 : dev_.tf32 ? 2e-3 : 1e-5))) {
            std::printf("%-40s | WRONG: relative error %.2e against fp64\n", name.c_str(), error);
            wrong++;
            return;
        }
        const Memory<Cuda, X> memory(dev_, N, tensors, scratch_bytes());
        const Figures ms = measure_ms(dev_, o_.quick, [&](int) { call(memory); });
        const double bytes = work.bytes_per_row * N + work.bytes, flops = work.flops_per_row * N;
        Row row = result_row(dev_, "layers").add("layer", name).add("dtype", o_.dtype).add("rows", (long long)N);
        row.add("C", o_.C).add("ms", ms.cool).add("ms_sustained", ms.sustained);
        std::printf("%-40s | ", name.c_str());
        const auto cells = [&](const std::string& suffix, double ms, double copy, double gemm) {
            const double tb_s = bytes / ms * 1e-9, tflops = flops / ms * 1e-9;
            std::printf("%8.4f %6.2f %6.1f ", ms, tb_s, 1e14 * tb_s / copy);
            const std::string of_gemm = flops > 0 ? format("%7.0f %6.1f", tflops, 100 * tflops / gemm) : "";
            std::printf("%14s | ", of_gemm.c_str());
            row.add(("tb_s" + suffix).c_str(), tb_s).add(("copy_tb_s" + suffix).c_str(), copy * 1e-12);
            if (flops > 0) row.add(("tflops" + suffix).c_str(), tflops);
        };
        cells("", ms.cool, copy_.cool, gemm_.cool);
        if (!o_.quick) cells("_sustained", ms.sustained, copy_.sustained, gemm_.sustained);
        std::printf("%.1e\n", error);
        std::fflush(stdout);
        log_.write(row.add("relative_error", error));
    }

    int measured = 0, wrong = 0;

  private:
    static constexpr size_t kValidatedRows = 128;

    size_t scratch_bytes() const {  // enough for every layer
        const int rows = static_cast<int>(std::max(N_, kValidatedRows)), C = o_.C;
        return std::max({encoder_scratch_bytes(dev_, 1, rows, C), layernorm_scratch_bytes(dev_, C),
                         qkv_bias_scratch_bytes(dev_, C), gelu_scratch_bytes(dev_, 4 * C),
                         matmul_gelu_scratch_bytes(dev_, rows, 4 * C, C), reduce_scratch_bytes(dev_),
                         cross_entropy_scratch_bytes<X>(dev_, kChunk, C, Vp)});
    }
    void measure_ceilings() {
        copy_ = copy_rate(dev_, o_.quick), gemm_ = gemm_tflops<X>(dev_, o_.quick);
        std::printf("%s, %s, B %d, T %d, C %d; copy %.2f / %.2f TB/s, GEMM %.0f / %.0f TFLOP/s (cool / sustained)\n",
                    dev_.name.c_str(), o_.dtype.c_str(), o_.B, o_.T, o_.C, copy_.cool * 1e-12, copy_.sustained * 1e-12,
                    gemm_.cool, gemm_.sustained);
        std::printf("%-40s | %8s %6s %6s %7s %6s | %8s %6s %6s %7s %6s | error\n", "layer", "cool ms", "TB/s", "%copy",
                    "TFLOP/s", "%GEMM", "sust. ms", "TB/s", "%copy", "TFLOP/s", "%GEMM");
    }

    // The largest relative L2 error of any tensor after the call. NaN if a tensor has a NaN.
    template <class Call>
    double relative_error(const std::vector<Tensor>& tensors, Call call) {
        const Memory<Cuda, X> gpu(dev_, kValidatedRows, tensors, scratch_bytes());
        const Cpu reference;
        const Memory<Cpu, double> cpu(reference, kValidatedRows, tensors, 0);
        const auto on_gpu = [&](size_t i) {
            return tensors[i].kind == Tensor::X ? gpu.template values<X>(i) : gpu.template values<Acc<X>>(i);
        };
        std::vector<size_t> numbers;
        for (size_t i = 0; i < tensors.size(); i++)
            if (tensors[i].kind != Tensor::Tokens && tensors[i].compared) numbers.push_back(i);
        for (size_t i : numbers) {
            const std::vector<double> values = on_gpu(i);
            std::copy(values.begin(), values.end(), cpu.x(i));
        }
        call(gpu);
        call(cpu);
        double worst = 0;
        for (size_t i : numbers) {
            const std::vector<double> got = on_gpu(i);
            double error2 = 0, value2 = 0;
            for (size_t k = 0; k < got.size(); k++) {
                const double want = cpu.x(i)[k];
                error2 += (got[k] - want) * (got[k] - want);
                value2 += want * want;
            }
            const double error = error2 == 0 ? 0 : std::sqrt(error2 / value2);
            if (std::isnan(error)) return error;
            worst = std::max(worst, error);
        }
        return worst;
    }

    Cuda& dev_;
    const Options& o_;
    const size_t N_;
    Log log_;
    Figures copy_, gemm_;
};

template <class X>
int run(Cuda& dev, const Options& o) {
    const int C = o.C;
    const double x = sizeof(X), f = sizeof(float);
    Bench<X> b(dev, o);
    const auto X_ = [](size_t columns, double scale = 1) { return Tensor{Tensor::X, true, columns, scale}; };
    const auto w_ = [](size_t size, double scale = 1) { return Tensor{Tensor::X, false, size, scale}; };
    const auto A_ = [](size_t columns, double scale = 1) { return Tensor{Tensor::A, true, columns, scale}; };
    const auto g_ = [](size_t size, double scale = 1) { return Tensor{Tensor::A, false, size, scale}; };
    const Tensor tokens = {Tensor::Tokens, true, V};
    const Tensor rstd = {Tensor::A, true, 1, 0.1, 1};
    constexpr double kOut = 0;
    const auto no = [](auto* p) { return static_cast<decltype(p)>(nullptr); };  // an argument not wanted or not needed

    b.layer("encoder forward", {X_(C, kOut), tokens, w_(size_t(V) * C), w_(size_t(o.T) * C)}, {2 * x * C},
            [&](const auto& m) {
                const int T = static_cast<int>(std::min<size_t>(m.N, o.T));
                encoder_forward(m.dev, m.x(0), m.tokens(1), m.x(2), m.x(3), static_cast<int>(m.N / T), T, C);
            });
    b.layer("encoder backward", {g_(size_t(V) * C), g_(size_t(o.T) * C), X_(C), tokens}, {2 * x * C},
            [&](const auto& m) {
                const int T = static_cast<int>(std::min<size_t>(m.N, o.T));
                encoder_backward(m.dev, m.a(0), m.a(1), m.scratch, m.x(2), m.plan(3), static_cast<int>(m.N / T), T, C);
            });
    b.layer("layernorm forward", {X_(C, kOut), A_(1, kOut), A_(1, kOut), X_(C), w_(C), w_(C)}, {2 * x * C},
            [&](const auto& m) { layernorm_forward(m.dev, m.x(0), m.a(1), m.a(2), m.x(3), m.x(4), m.x(5), m.N, C); });
    b.layer("layernorm backward", {X_(C), g_(C), g_(C), g_(C), X_(C), X_(C), w_(C), A_(1, 0.1), rstd}, {4 * x * C},
            [&](const auto& m) {
                layernorm_backward(m.dev, m.x(0), m.a(1), m.a(2), m.a(3), m.scratch, m.x(4), m.x(5), m.x(6), m.a(7),
                                   m.a(8), m.N, C);
            });
    b.layer("gelu forward", {X_(4 * C, kOut), X_(4 * C)}, {8 * x * C},
            [&](const auto& m) { gelu_forward(m.dev, m.x(0), m.x(1), m.N * 4 * C); });
    b.layer(
        "gelu backward, gelu again", {X_(4 * C, kOut), g_(4 * C), X_(4 * C, kOut), X_(4 * C), X_(4 * C)}, {16 * x * C},
        [&](const auto& m) { gelu_backward(m.dev, m.x(0), m.a(1), m.x(2), m.scratch, m.x(3), m.x(4), m.N, 4 * C); });
    const Tensor dlogits = {Tensor::X, true, Vp, 0, 0, ~size_t{0}, false};
    b.layer(format("matmul %d to %d forward, cross entropy", C, Vp),
            {dlogits, A_(1, kOut), X_(C), w_(size_t(Vp) * C, 1 / std::sqrt(C)), tokens},
            {x * (C + Vp), x * C * Vp, 2. * C * Vp, kChunk}, [&](const auto& m) {
                cross_entropy(m.dev, m.x(0), m.a(1), m.scratch, m.x(2), m.x(3), m.tokens(4), 1e-4f, m.N, C, V, Vp);
            });
    const size_t parameters = size_t(124) << 20;
    b.layer("gradient norm", {g_(1, kOut), A_(1)}, {f, 0, 0, parameters},
            [&](const auto& m) { global_norm(m.dev, m.a(0), m.scratch, m.a(1), m.N); });
    const Tensor master = {Tensor::A, true, 1, 1, 0, 0}, squares = {Tensor::A, true, 1, 1e-3, 1e-2};
    b.layer("adamw", {X_(1), master, A_(1), squares, A_(1), g_(1)},
            {7 * f + (sizeof(X) < sizeof(float) ? x : 0), 0, 0, parameters}, [&](const auto& m) {
                const ParamRange range = {0, m.N, true};
                adamw_update(m.dev, m.x(0), m.a(1), m.a(2), m.a(3), m.a(4), m.a(5), &range, 1,
                             {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.f, 1, 1});
                if constexpr (std::is_same_v<std::decay_t<decltype(m.dev)>, Cpu>)
                    std::copy_n(m.x(0), m.N, m.a(1));  // the reference keeps no master weights
            });

    const auto matmuls = [&](int C, int OC, size_t rows) {
        const std::string name = format("matmul %d to %d ", C, OC);
        const double flops = 2. * C * OC, moved = x * (C + OC), weight = x * C * OC;
        const Tensor w = w_(size_t(OC) * C, 1 / std::sqrt(C));
        b.layer(name + "forward", {X_(OC, kOut), X_(C), w, w_(OC)}, {moved, weight, flops, rows},
                [=](const auto& m) { matmul_forward(m.dev, m.x(0), m.x(1), m.x(2), m.x(3), m.N, C, OC); });
        b.layer(
            name + "weight gradient", {g_(size_t(OC) * C), X_(OC), X_(C)}, {moved, 2 * f * C * OC, flops, rows},
            [=](const auto& m) { matmul_backward(m.dev, no(m.x(1)), m.a(0), m.x(1), m.x(2), no(m.x(1)), m.N, C, OC); });
        b.layer(name + "input gradient", {X_(C, kOut), X_(OC), w}, {moved, weight, flops, rows}, [=](const auto& m) {
            matmul_backward(m.dev, m.x(0), nullptr, m.x(1), no(m.x(1)), m.x(2), m.N, C, OC);
        });
    };
    matmuls(C, 3 * C, 0);
    matmuls(C, C, 0);
    matmuls(C, 4 * C, 0);
    matmuls(4 * C, C, 0);
    matmuls(C, Vp, kChunk);
    b.layer(format("matmul %d to %d forward, gelu", C, 4 * C),
            {X_(4 * C, kOut), X_(4 * C, kOut), X_(C), w_(size_t(4) * C * C, 1 / std::sqrt(C)), w_(4 * C)},
            {9 * x * C, 4 * x * C * C, 8. * C * C},
            [&](const auto& m) { matmul_gelu_forward(m.dev, m.x(0), m.x(1), m.x(2), m.x(3), m.x(4), m.N, C, 4 * C); });
    b.layer(format("matmul %d to %d input gradient, gelu", 4 * C, C),
            {X_(4 * C, kOut), g_(4 * C), X_(4 * C, kOut), X_(C), w_(size_t(4) * C * C, 1 / std::sqrt(C)), X_(4 * C)},
            {13 * x * C, 4 * x * C * C, 8. * C * C}, [&](const auto& m) {
                matmul_gelu_backward(m.dev, m.x(0), m.a(1), m.x(2), m.scratch, m.x(3), m.x(4), m.x(5), m.N, 4 * C, C);
            });
    const Tensor start = {Tensor::A, false, size_t(3) * C, 1, 0, 0};  // the first tensor's values before the call
    b.layer("bias gradients of q, k, v", {g_(3 * C), X_(3 * C), g_(C), w_(size_t(C) * C, 1 / std::sqrt(C)), start},
            {x * C, x * C * C}, [&](const auto& m) {
                qkv_bias_backward(m.dev, m.a(0), m.scratch, m.x(1), m.a(2), m.x(3), m.N, C);
                if constexpr (std::is_same_v<std::decay_t<decltype(m.dev)>, Cpu>) {
                    // The reference added up dk and dv. The GPU's shortcut gives these sums only for attention's dqkv,
                    // not for random values. So we compute here what the shortcut gives.
                    std::copy_n(m.a(4) + C, C, m.a(0) + C);
                    matmul_backward<double>(m.dev, m.a(0) + 2 * C, nullptr, m.a(2), nullptr, m.x(3), 1, C, C);
                }
            });
    if (b.measured == 0) throw UsageError("--layer: no layer's name contains \"" + o.layer + "\"");
    if (b.wrong) std::fprintf(stderr, "bench_layers: %d wrong results\n", b.wrong);
    return b.wrong ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
    Options o;
    const std::vector<Option> table = {
        {"--layer", "", Option::String, &o.layer, "only layers whose name contains this"},
        {"--dtype", "", Option::Choice, &o.dtype, "storage of weights and activations", "bf16|fp32"},
        {"--batch", "-b", Option::Int, &o.B, "sequences", "1..1024"},
        {"--tokens", "-t", Option::Int, &o.T, "tokens of a sequence", "1..65536"},
        {"--channels", "", Option::Int, &o.C, "channels of the model", "1..8192"},
        {"--quick", "", Option::Flag, &o.quick, "skip the sustained protocol"},
    };
    return bench_main(argc, argv, "bench_layers", "Validates and times the layers.", "layers.jsonl", o, table, [&] {
        Cuda dev;
        return o.dtype == "bf16" ? run<bf16>(dev, o) : run<float>(dev, o);
    });
}
