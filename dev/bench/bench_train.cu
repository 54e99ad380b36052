// Training speed and memory of the whole step: upload, forward, loss, backward, clipping, update,
// and reading back the loss. Token ids are random, each as often as in text. The figures are
// sustained: 3 s of steps warm the GPU up, and the time is the mean of the next 5 s.
//
//   ./dev/bench_train                   GPT-2 124M in bf16 at several B
//   ./dev/bench_train --generation      a generated token, early and late in a text
//   ./dev/bench_train --model d12 --shapes 64x1024 --precision bf16 --attention flash --json
//
// Each shape is validated first: if the loss does not start at ln V and fall over 20 steps on one
// batch, no time is printed. --breakdown and --generation do not validate, and have warm-ups of
// their own.
#define TRAIN_GPT2_NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"  // parts of the program stay unused here
#include <list>
#include <map>

#include "cuda/activation.cuh"
#include "dev/common/bench.h"
#include "train_gpt2.cu"

namespace {

// -------------------------------------------------------------------------------------------------
// --breakdown runs the same model over a backend that is Cuda with a stopwatch around the layer
// calls

// What a call does: its FLOPs, and the least bytes that it must move, with every large tensor read
// or written once, unless a comment says otherwise.
struct Work {
    std::string name;
    double flops = 0;
    double bytes = 0;
};

struct Timed : Cuda {
    using Cuda::Cuda;
    double x_bytes = 0;  // sizeof(X), an element of activations and weights

    struct Line {
        double flops = 0;
        double bytes = 0;
        double ms = 0;
        int calls = 0;
    };
    mutable std::map<std::string, Line> lines;
    mutable std::vector<std::string> order;  // names as they first appear in the step

    struct Lap {
        std::string name;
        Event start;
        Event end;
    };
    mutable std::list<Lap> laps;

    template <class Call>
    void time(const Work& work, Call call) const {
        if (!lines.count(work.name))
            order.push_back(work.name);
        Line& line = lines[work.name];
        line.flops += work.flops;
        line.bytes += work.bytes;
        line.calls++;

        Lap& lap = laps.emplace_back();
        lap.name = work.name;
        lap.start.record(*this);
        call(static_cast<const Cuda&>(*this));
        lap.end.record(*this);
    }
    void collect() const {  // after a step
        for (const Lap& lap : laps)
            lines[lap.name].ms += lap.start.ms_until(lap.end);
        laps.clear();
    }
    void zero(void* p, size_t bytes) const {
        time({.name = "clear", .bytes = double(bytes)},
             [&](const Cuda& dev) { dev.zero(p, bytes); });
    }
};

// The layer functions again for Timed, with the signatures of layers.h and attention.h. Overload
// resolution prefers them to those for its base, Cuda. Calls of a step that have none here are not
// timed: those of a ring, because the benchmark has one GPU, and reduce_sum(), which only adds up
// losses.

Work product(const Timed& t, const std::string& what, double N, double C, double OC,
             double more_bytes = 0) {
    return {.name = format("matmul %.0f to %.0f %s", C, OC, what.c_str()),
            .flops = 2 * N * C * OC,
            .bytes = t.x_bytes * (N * C + N * OC + C * OC) + more_bytes};
}

template <class X>
void encoder_forward(const Timed& t, X* out, const int* tokens, const X* wte, const X* wpe, int B,
                     int T, int C, const Positions& positions = {}) {
    // the tokens' rows of wte, and out
    t.time({.name = "encoder forward", .bytes = 2 * t.x_bytes * B * T * C}, [&](const Cuda& dev) {
        encoder_forward(dev, out, tokens, wte, wpe, B, T, C, positions);
    });
}
template <class X>
void encoder_backward(const Timed& t, float* dwte, float* dwpe, void* scratch, const X* dout,
                      const int* plan, int B, int T, int C, const Positions& positions = {}) {
    // dout twice, for wte and for wpe (layers/encoder.cu); the gradients are not counted
    t.time({.name = "encoder backward", .bytes = 2 * t.x_bytes * B * T * C}, [&](const Cuda& dev) {
        encoder_backward(dev, dwte, dwpe, scratch, dout, plan, B, T, C, positions);
    });
}
template <class X>
void layernorm_forward(const Timed& t, X* out, float* mean, float* rstd, const X* inp,
                       const X* weight, const X* bias, size_t N, int C) {
    t.time({.name = "layernorm forward", .bytes = 2 * t.x_bytes * N * C}, [&](const Cuda& dev) {
        layernorm_forward(dev, out, mean, rstd, inp, weight, bias, N, C);
    });
}
template <class X>
void layernorm_backward(const Timed& t, X* dinp, float* dweight, float* dbias, float* dinp_sum,
                        void* scratch, const X* dout, const X* inp, const X* weight,
                        const float* mean, const float* rstd, size_t N, int C) {
    // dout, inp, and dinp, which is read and written
    t.time({.name = "layernorm backward", .bytes = 4 * t.x_bytes * N * C}, [&](const Cuda& dev) {
        layernorm_backward(dev, dinp, dweight, dbias, dinp_sum, scratch, dout, inp, weight, mean,
                           rstd, N, C);
    });
}
template <class X>
void matmul_activation_forward(const Timed& t, X* out, X* pre, const X* inp, const X* weight,
                               const X* bias, size_t N, int C, int OC) {
    const std::string what = format("forward, %s", kActivationName);
    t.time(product(t, what, N, C, OC, t.x_bytes * N * OC), [&](const Cuda& dev) {
        matmul_activation_forward(dev, out, pre, inp, weight, bias, N, C, OC);
    });
}
template <class X>
void qkv_bias_backward(const Timed& t, float* dqkvb, void* scratch, const X* dqkv,
                       const float* dprojb, const X* projw, size_t N, int C) {
    // of dqkv only dq, and projw: v's part is a product with it, and k's is zero (layers.h)
    const double bytes = t.x_bytes * (double(N) * C + double(C) * C);
    t.time({.name = "bias gradients of q, k, v", .bytes = bytes}, [&](const Cuda& dev) {
        qkv_bias_backward(dev, dqkvb, scratch, dqkv, dprojb, projw, N, C);
    });
}
template <class X>
void attention_forward(const Timed& t, Attention kind, X* out, float* lse, X* att, const X* qkv,
                       int B, int Tq, int T, int NH, int HS) {
    // q, k, v and out
    t.time({.name = "attention forward",
            .flops = 2. * B * T * T * NH * HS,
            .bytes = 4 * t.x_bytes * B * T * NH * HS},
           [&](const Cuda& dev) {
               attention_forward(dev, kind, out, lse, att, qkv, B, Tq, T, NH, HS);
           });
}
template <class X>
void attention_backward(const Timed& t, Attention kind, X* dqkv, void* scratch, const X* dout,
                        const X* out, const float* lse, const X* att, const X* qkv, int B, int T,
                        int NH, int HS) {
    // q, k, v, dout, out, dq, dk and dv
    t.time({.name = "attention backward",
            .flops = 5. * B * T * T * NH * HS,
            .bytes = 8 * t.x_bytes * B * T * NH * HS},
           [&](const Cuda& dev) {
               attention_backward(dev, kind, dqkv, scratch, dout, out, lse, att, qkv, B, T, NH, HS);
           });
}
template <class X>
void cross_entropy(const Timed& t, X* dlogits, float* losses, void* scratch, const X* inp,
                   const X* weight, const int* targets, float dloss, size_t N, int C, int V,
                   int Vp) {
    t.time(product(t, "forward, cross entropy", N, C, Vp), [&](const Cuda& dev) {
        cross_entropy(dev, dlogits, losses, scratch, inp, weight, targets, dloss, N, C, V, Vp);
    });
}
void global_norm(const Timed& t, float* out, void* scratch, const float* x, size_t n) {
    t.time({.name = "gradient norm", .bytes = double(sizeof(float) * n)},
           [&](const Cuda& dev) { global_norm(dev, out, scratch, x, n); });
}

template <class X>
void matmul_forward(const Timed& t, X* out, const X* inp, const X* weight, const X* bias, size_t N,
                    int C, int OC, const X* residual = nullptr) {
    t.time(
        product(t, "forward", N, C, OC, residual ? t.x_bytes * N * OC : 0),
        [&](const Cuda& dev) { matmul_forward(dev, out, inp, weight, bias, N, C, OC, residual); });
}
// Computes each gradient of a linear layer by a call of its own.
template <class X, class F>
void time_gradients(const Timed& t, X* dinp, float* dweight, size_t N, int C, int OC,
                    bool accumulate, F call) {
    // product() counts the weight, of type X. Its gradient has as many elements, but in fp32, and
    // they are written, or read and written.
    const double dweight_bytes = accumulate ? 2 * sizeof(float) : sizeof(float);
    const double more_bytes = double(C) * OC * (dweight_bytes - t.x_bytes);
    if (dweight)
        t.time(product(t, "weight gradient", N, C, OC, more_bytes),
               [&](const Cuda& dev) { call(dev, static_cast<X*>(nullptr), dweight); });
    if (dinp)
        t.time(product(t, "input gradient", N, C, OC),
               [&](const Cuda& dev) { call(dev, dinp, static_cast<float*>(nullptr)); });
}
template <class X>
void matmul_backward(const Timed& t, X* dinp, float* dweight, const X* dout, const X* inp,
                     const X* weight, size_t N, int C, int OC, bool accumulate = true) {
    time_gradients(
        t, dinp, dweight, N, C, OC, accumulate, [&](const Cuda& dev, X* dinp, float* dweight) {
            matmul_backward<X>(dev, dinp, dweight, dout, inp, weight, N, C, OC, accumulate);
        });
}
template <class X>
void cross_entropy_backward(const Timed& t, X* dinp, float* dweight, void* scratch,
                            const X* dlogits, const X* inp, const X* weight, size_t N, int C,
                            int Vp, bool accumulate) {
    time_gradients(t, dinp, dweight, N, C, Vp, accumulate,
                   [&](const Cuda& dev, X* dinp, float* dweight) {
                       cross_entropy_backward<X>(dev, dinp, dweight, scratch, dlogits, inp, weight,
                                                 N, C, Vp, accumulate);
                   });
}
template <class X>
void matmul_activation_backward(const Timed& t, X* dpre, float* dpre_sum, X* out, void* scratch,
                                const X* dout, const X* weight, const X* pre, size_t N, int C,
                                int OC) {
    const std::string what = format("input gradient, %s", kActivationName);
    t.time(product(t, what, N, C, OC, t.x_bytes * (out ? 2 : 1) * N * C), [&](const Cuda& dev) {
        matmul_activation_backward(dev, dpre, dpre_sum, out, scratch, dout, weight, pre, N, C, OC);
    });
}
template <class X>
void adamw_update(const Timed& t, X* params, float* master, float* m, float* v, const float* grads,
                  const float* norm, const ParamRange* ranges, int num_ranges, const AdamW& hyper) {
    double n = 0;
    for (int i = 0; i < num_ranges; i++)
        n += ranges[i].size;
    // The gradient, m, v and the parameters, all fp32, are read, and the last three are written.
    // Where these parameters are master weights, the model's own, of type X, are written, too.
    const double bytes = n * (7 * sizeof(float) + (master ? t.x_bytes : 0));
    t.time({.name = "adamw", .bytes = bytes}, [&](const Cuda& dev) {
        adamw_update(dev, params, master, m, v, grads, norm, ranges, num_ranges, hyper);
    });
}

// -------------------------------------------------------------------------------------------------
// The benchmark

struct Bench : Output {
    std::string model = "d12";
    std::string shapes;
    std::string precision = "bf16";
    std::string attention = "flash";
    int recompute = 1;
    bool breakdown = false;
    bool generation = false;
};

// Random token ids with p ∝ 1/(id + 2.7), as text has them by rank. GPT-2's low ids are its bytes
// and then its merges, most frequent first, so an id is nearly a rank. Uniform ids would flatter
// us: llm.c is 15 % slower on those.
struct TextIds {
    std::vector<double> up_to;  // the sum of p, not normalised

    explicit TextIds(int V) {
        double sum = 0;
        for (int id = 0; id < V; id++) {
            sum += 1 / (id + 2.7);
            up_to.push_back(sum);
        }
    }
    int draw(uint64_t seed, uint64_t index) const {
        const double random = uniform(seed, index) * up_to.back();
        const auto id = std::upper_bound(up_to.begin(), up_to.end() - 1, random);
        return static_cast<int>(id - up_to.begin());
    }
};

// A model with a batch of such tokens, and its step.
template <class Dev, class X>
struct Trainer {
    const Dev& dev;
    GPT2<Dev, X> model;
    int* pinned;
    int step = 0;

    Trainer(const Dev& dev, const Bench& o, const Config& config, int B, int T)
        : dev(dev),
          model(dev, config,
                {.attention = {o.attention},
                 .B = B,
                 .T = T,
                 .training = true,
                 .recompute = o.recompute}) {
        allocate_or_explain(model);
        init_random(model, 1);

        const size_t n = size_t(B) * T;
        pinned = static_cast<int*>(dev.alloc_host(model.batch_ints() * sizeof(int)));
        int* const inputs = pinned;
        int* const targets = inputs + n;
        int* const plan = targets + n;
        const TextIds ids(config.V);
        for (size_t i = 0; i < n; i++) {
            inputs[i] = ids.draw(3, i);
            targets[i] = ids.draw(3, i + 1);
        }
        encoder_plan(dev, plan, inputs, n);
    }
    ~Trainer() { dev.free_host(pinned); }

    // Returns the loss.
    float train() {
        step++;
        model.upload(pinned, 1);
        model.train_micro_batches();
        model.update({.lr = 3e-4f,
                      .beta1 = 0.9f,
                      .beta2 = 0.95f,
                      .eps = 1e-8f,
                      .weight_decay = 0.1f,
                      .max_norm = 1.f,
                      .step = step,
                      .seed = 1});
        float loss;
        dev.download(&loss, model.statistics().losses(), sizeof loss);
        return loss;
    }

    // Trains for that long and calls after_step() after each step. Returns the mean milliseconds of
    // a step.
    template <class F>
    double train_for(double seconds, F after_step) {
        using Clock = std::chrono::steady_clock;
        const auto start = Clock::now();
        for (int steps = 1;; steps++) {
            train();
            after_step();
            const double passed = std::chrono::duration<double>(Clock::now() - start).count();
            if (passed >= seconds)
                return passed / steps * 1e3;
        }
    }
};

// A row of a call, or of all of them if `call` is null.
Row row_of(const Cuda& dev, const char* kind, const char* ids, const Bench& o,
           const BatchShape& shape, const char* call = nullptr) {
    Row row = result_row(dev, kind);
    row.add("kernel", "train_gpt2cu");
    if (call)
        row.add("call", call);
    row.add("model", o.model);
    row.add("dtype", o.precision);
    row.add("B", shape.B);
    row.add("T", shape.T);
    row.add("ids", ids);
    if (!call)
        row.add("gpus", 1);
    row.add("attention", o.attention);
    row.add("recompute", o.recompute);
    return row;
}

template <class X>
void bench(const Cuda& dev, const Bench& o, const Config& config, const BatchShape& shape) {
    const auto [B, T] = shape;
    Trainer<Cuda, X> trainer(dev, o, config, B, T);
    const float first = trainer.train();
    float loss = first;
    for (int step = 2; step <= 20; step++)
        loss = trainer.train();
    const bool starts_random = std::fabs(first - std::log(config.V)) < 0.5f;
    const bool falls = loss < first;
    if (!starts_random || !falls)
        throw Error(format(
            "B=%d T=%d: the loss went from %g to %g, but it should fall from ln V = %g; not timed",
            B, T, first, loss, std::log(config.V)));

    const auto nothing = [] {};
    trainer.train_for(3, nothing);
    const double ms = trainer.train_for(5, nothing);
    const double tok_s = double(B) * T / ms * 1e3;
    // includes CUDA's context and libraries
    const double mem_gib = (dev.total_bytes - dev.free_bytes()) / kGiB;
    const double peak = peak_tflops(dev.name, std::is_same_v<X, bf16>, dev.tf32);
    const double mfu = mfu_percent(config.flops_per_token(T), tok_s, 1, peak);
    std::printf("%-5s %-5s %-6s %5d %7d %10.2f %10.0f %7.1f %9.2f\n", o.model.c_str(),
                o.precision.c_str(), o.attention.c_str(), B, T, ms, tok_s, mfu, mem_gib);
    std::fflush(stdout);

    Log log = results_log(dev, "train", o);
    Row row = row_of(dev, "train", "text-like", o, shape);
    row.add("deterministic", true);
    row.add("ms", ms);
    row.add("tok_s", tok_s);
    row.add("mfu", mfu);
    row.add("mem_gib", mem_gib);
    row.add("loss", double(loss));
    log.write(row);
}

template <class X>
void breakdown(const Timed& dev, const Bench& o, const Config& config, const BatchShape& shape) {
    const auto [B, T] = shape;
    const bool quick = false;
    const Figures gemm = gemm_tflops<X>(dev, quick);
    const Figures copy = copy_rate(dev);  // bytes per second
    Trainer<Timed, X> trainer(dev, o, config, B, T);
    constexpr int kSteps = 20;  // of kernels launched one by one: main() turns graphs off

    // Warms the GPU up. What these steps have recorded is dropped.
    trainer.train_for(2, [&] { dev.laps.clear(); });
    dev.lines.clear();
    dev.order.clear();

    Event first;
    Event last;
    first.record(dev);
    for (int i = 0; i < kSteps; i++) {
        trainer.train();
        dev.collect();
    }
    last.record(dev);
    const double step_ms = first.ms_until(last) / kSteps;

    std::printf(
        "\n%s %s B=%d T=%d, sustained: a step of %.2f ms; for comparison %.0f TFLOP/s (GEMM of "
        "%d³), %.2f TB/s (copy)\n",
        o.model.c_str(), o.precision.c_str(), B, T, step_ms, gemm.sustained, gemm_size<X>(dev),
        copy.sustained * 1e-12);
    std::printf("%-40s %5s %8s %6s %8s %6s %8s %6s %8s\n", "call", "calls", "ms", "% step",
                "TFLOP/s", "%", "TB/s", "%", "ms above");
    Log log = results_log(dev, "breakdown", o);
    double sum = 0;
    for (const std::string& name : dev.order) {
        const Timed::Line& line = dev.lines[name];
        const double ms = line.ms / kSteps;
        const double tflops = line.flops / line.ms * 1e-9;
        const double tb_s = line.bytes / line.ms * 1e-9;
        const double gemm_ms = line.flops / gemm.sustained * 1e-9;
        const double copy_ms = line.bytes / copy.sustained * 1e3;
        const double least_ms = std::max(gemm_ms, copy_ms) / kSteps;
        // a call may beat the GEMM and the copy measured here
        const double lost_ms = std::max(0., ms - least_ms);
        sum += ms;

        std::printf("%-40s %5d %8.3f %6.1f %8.1f %6.1f %8.3f %6.1f %8.3f\n", name.c_str(),
                    line.calls / kSteps, ms, 100 * ms / step_ms, tflops,
                    100 * tflops / gemm.sustained, tb_s, 100e12 * tb_s / copy.sustained, lost_ms);

        Row row = row_of(dev, "breakdown", "text-like", o, shape, name.c_str());
        row.add("calls", line.calls / kSteps);
        row.add("ms", ms);
        row.add("step_ms", step_ms);
        row.add("tflops", tflops);
        row.add("tb_s", tb_s);
        row.add("gemm_tflops_sustained", gemm.sustained);
        row.add("gemm_size", gemm_size<X>(dev));
        row.add("copy_tb_s_sustained", copy.sustained * 1e-12);
        row.add("lost_ms", lost_ms);
        log.write(row);
    }
    std::printf("%-40s %5s %8.3f %6.1f\n", "all of these", "", sum, 100 * sum / step_ms);
}

// Milliseconds that a generated token takes, at several positions of a text: the best of 19, after
// one that fills the cache.
template <class X>
void generation(const Cuda& dev, const Bench& o, const Config& config) {
    GPT2<Cuda, X> model(dev, config,
                        {.attention = {o.attention}, .B = 1, .T = config.max_T, .cache = true});
    model.allocate();
    init_random(model, 1);
    std::printf("%s, one text\n%-5s %-5s %-6s %8s %12s\n", dev.name.c_str(), "model", "dtype",
                "att", "position", "ms a token");
    Log log = results_log(dev, "generation", o);
    for (const int position : {10, 100, 500, 1000}) {
        double best = INFINITY;
        for (int i = 0; i < 20; i++) {
            const bool use_cache = i > 0;
            const double start = now();
            next_token_logits(model, std::vector<int>(position + i, 7), use_cache);
            if (use_cache)
                best = std::min(best, 1e3 * (now() - start));
        }
        std::printf("%-5s %-5s %-6s %8d %12.3f\n", o.model.c_str(), o.precision.c_str(),
                    o.attention.c_str(), position, best);
        Row row = row_of(dev, "generation", "one id", o, {.B = 1, .T = config.max_T});
        row.add("position", position);
        row.add("ms", best);
        log.write(row);
    }
}

template <class X>
void run(Timed& dev, const Bench& o) {
    dev.x_bytes = sizeof(X);
    const std::optional<Config> preset = preset_config(o.model);
    if (!preset)
        throw UsageError("--model: there is no model called " + o.model);
    const Config& config = *preset;
    if (o.generation) {
        generation<X>(dev, o, config);
        return;
    }

    if (!o.breakdown)
        std::printf("%s, sustained, whole step\n%-5s %-5s %-6s %5s %7s %10s %10s %7s %9s\n",
                    dev.name.c_str(), "model", "dtype", "att", "B", "T", "ms", "tok/s", "MFU %",
                    "GiB");
    for (const BatchShape& shape : parse_shapes(o.shapes)) {
        Config c = config;
        c.max_T = std::max(c.max_T, shape.T);
        if (o.breakdown)
            breakdown<X>(dev, o, c, shape);
        else
            bench<X>(dev, o, c, shape);
    }
}

std::string default_shapes(const Bench& o) {
    if (o.breakdown)
        return "64x1024";
    return o.precision == "bf16" ? "4x1024,16x1024,64x1024" : "4x1024,16x1024";
}

}  // namespace

int main(int argc, char** argv) {
    Bench o;
    const std::vector<Option> table = {
        {"--model", "", Option::Choice, &o.model, "size of GPT-2", "tiny|d12|d24|d36|d48"},
        {"--shapes", "", Option::String, &o.shapes,
         "batch sizes and sequence lengths, as BxT,BxT,…; default: those of the README's tables"},
        {"--precision", "", Option::Choice, &o.precision, "type of weights and activations",
         "bf16|fp32"},
        {"--attention", "", Option::Choice, &o.attention, "attention kernel", attention_names()},
        {"--recompute", "-r", Option::Int, &o.recompute,
         "recompute activations in the backward pass, as ./train_gpt2cu -r does", "0..2"},
        {"--breakdown", "", Option::Flag, &o.breakdown, "instead time the layer calls of a step"},
        {"--generation", "", Option::Flag, &o.generation,
         "instead time generated tokens, early and late in a text"},
    };
    const char* const about = "Measures the training step: tokens per second and memory.";
    const char* const files = "train.jsonl, breakdown.jsonl or generation.jsonl";
    return bench_main(argc, argv, "bench_train", about, files, o, table, [&] {
        if (o.shapes.empty())
            o.shapes = default_shapes(o);
        parse_shapes(o.shapes);  // before the GPU is used, because they may be wrong
        Timed dev(0);
        dev.tf32 = dev.sm >= 80;
        dev.graphs = !o.breakdown;
        if (o.precision == "bf16")
            run<bf16>(dev, o);
        else
            run<float>(dev, o);
        return 0;
    });
}
