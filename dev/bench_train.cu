// Training speed and memory: the whole step (upload, forward, loss, backward, clipping, update, loss read back) on
// random tokens, sustained: 3 s of steps to warm up, then the mean of the next 5 s.
//
//   ./dev/bench_train                                    GPT-2 124M in bf16 at several B
//   ./dev/bench_train --model d12 --shapes 64x1024 --precision bf16 --attention flash --json
//
// Validates first: the loss starts at ln V and falls over 20 steps on one batch, or no time is printed.
#define TRAIN_GPT2_NO_MAIN
#include "../train_gpt2.cu"
#include "dev/bench.h"

namespace {

struct Bench {
    std::string model = "d12", shapes, precision = "bf16", attention = "flash", out;
    int recompute = 0;
    bool json = false;
};

template <class X>
void bench(const Cuda& dev, const Bench& o, const Config& config, int B, int T) {
    GPT2<Cuda, X> model(dev, config, o.attention == "naive" ? Attention::naive : Attention::flash, B, T, 1, true,
                        o.recompute);
    allocate_or_explain(model);
    model.init_random(1);
    const size_t n = size_t(B) * T;
    std::vector<int> host(model.batch_ints());
    for (size_t i = 0; i < 2 * n; i++)
        host[i] = static_cast<int>(mix(3, i % n + i / n) % config.V);  // targets: the next token
    encoder_plan(dev, host.data() + 2 * n, host.data(), n);
    int* pinned = static_cast<int*>(dev.alloc_host(host.size() * sizeof(int)));
    std::copy(host.begin(), host.end(), pinned);

    float stats[2];
    int step = 0;
    auto train = [&] {
        model.upload(pinned, 1);
        model.train_micro_batch(0);
        model.update({3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.f, ++step, 1});
        dev.download(stats, model.stats(), sizeof stats);
        return stats[0];
    };
    const float first = train();
    for (int i = 0; i < 19; i++) train();
    const float loss = stats[0];
    if (!(std::fabs(first - std::log(config.V)) < 0.5f) || !(loss < first))
        throw Error(format("B=%d T=%d: the loss goes from %g to %g, expected from ln V = %g down: not timed", B, T,
                           first, loss, std::log(config.V)));

    using Clock = std::chrono::steady_clock;
    auto seconds_since = [](Clock::time_point start) {
        return std::chrono::duration<double>(Clock::now() - start).count();
    };
    for (const auto start = Clock::now(); seconds_since(start) < 3;) train();
    int steps = 0;
    const auto start = Clock::now();
    do train(), steps++;
    while (seconds_since(start) < 5);
    const double ms = seconds_since(start) / steps * 1e3, tok_s = n / ms * 1e3;
    const double mem_gib = (dev.total_bytes - dev.free_bytes()) / kGiB;  // with CUDA's own context and libraries
    const double peak = peak_tflops(dev.name, std::is_same_v<X, bf16>, dev.tf32);
    const double mfu = peak > 0 ? 100 * tok_s * config.flops_per_token(T) / (peak * 1e12) : NAN;
    dev.free_host(pinned);
    std::printf("%-5s %-5s %-6s %5d %7d %10.2f %10.0f %7.1f %9.2f\n", o.model.c_str(), o.precision.c_str(),
                o.attention.c_str(), B, T, ms, tok_s, mfu, mem_gib);
    std::fflush(stdout);
    Log log = results_log(dev, "train", o.out, o.json);
    log.write(result_row(dev, "train")
                  .add("kernel", "train_gpt2cu")
                  .add("model", o.model)
                  .add("dtype", o.precision)
                  .add("B", B)
                  .add("T", T)
                  .add("gpus", 1)
                  .add("attention", o.attention)
                  .add("recompute", o.recompute)
                  .add("deterministic", true)
                  .add("ms", ms)
                  .add("tok_s", tok_s)
                  .add("mfu", mfu)
                  .add("mem_gib", mem_gib)
                  .add("loss", double(loss)));
}

}  // namespace

int main(int argc, char** argv) {
    return run_program("bench_train", [&] {
        Bench o;
        bool no_tf32 = false;
        std::vector<Option> table = {
            {"--model", "", Option::Choice, &o.model, "which GPT-2", "tiny|d12|d24|d36|d48"},
            {"--shapes", "", Option::String, &o.shapes, "BxT,BxT,…; default: what the README shows", ""},
            {"--precision", "", Option::Choice, &o.precision, "storage of weights and activations", "bf16|fp32"},
            {"--attention", "", Option::Choice, &o.attention, "which attention", "flash|naive"},
            {"--recompute", "-r", Option::Int, &o.recompute, "as the trainer's option", "0..2"},
            {"--no-tf32", "", Option::Flag, &no_tf32, "strict fp32 matmuls", ""},
            {"--json", "", Option::Flag, &o.json, "append rows to dev/results", ""},
            {"--out", "", Option::String, &o.out, "append them to this file instead", ""},
        };
        if (parse_options(argc, argv, table)) {
            std::printf(
                "%s", options_help("bench_train", "Tokens per second and memory of the training step.", table).c_str());
            return 0;
        }
        if (o.shapes.empty()) o.shapes = o.precision == "bf16" ? "4x1024,8x1024,16x1024,64x1024" : "4x1024,16x1024";
        const auto shapes = parse_shapes(o.shapes);
        Cuda dev(0);
        dev.tf32 = !no_tf32 && dev.sm >= 80;
        Config config;
        find_config(o.model, &config);
        std::printf("%s, sustained, whole step\n%-5s %-5s %-6s %5s %7s %10s %10s %7s %9s\n", dev.name.c_str(), "model",
                    "dtype", "att", "B", "T", "ms", "tok/s", "MFU %", "GiB");
        for (const auto& [B, T] : shapes) {
            Config c = config;
            c.max_T = std::max(c.max_T, T);
            if (o.precision == "bf16")
                bench<bf16>(dev, o, c, B, T);
            else
                bench<float>(dev, o, c, B, T);
        }
        return 0;
    });
}
