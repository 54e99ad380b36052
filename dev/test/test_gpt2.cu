// Tests the whole model: gradients against finite differences and the fp64 reference, flash against
// naive over a training run, determinism and memory. Also tests the parts of the program that need
// no model. It includes the program itself.
#define TRAIN_GPT2_NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"  // parts of the program stay unused here
#include <cfloat>

// Included first, because train_threads.h uses what it declares.
#include "train_gpt2.cu"

#include "dev/common/bounds.h"
#include "dev/test/finite_difference.h"
#include "dev/test/late.h"
#include "dev/test/processes.h"
#include "dev/test/program.h"
#include "dev/test/train_threads.h"

namespace {

// HS = 64, the smallest that flash runs.
const Config kSmall = {.max_T = 80, .V = 250, .Vp = 256, .L = 2, .NH = 2, .C = 128};

Config preset(const char* name) {
    const std::optional<Config> config = preset_config(name);
    if (!config)
        throw Error(format("no preset %s", name));
    return *config;
}

// Tokens with structure, so that training has something to learn. Each is mostly a function of the
// one before.
std::vector<int> make_tokens(size_t n, int V, uint64_t seed) {
    std::vector<int> tokens(n);
    int token = 1;
    for (size_t i = 0; i < n; i++) {
        const int random = static_cast<int>(uniform(seed, 2 * i + 1) * V);
        token = uniform(seed, 2 * i) < 0.7 ? (token * 7 + 3) % V : random;
        tokens[i] = token;
    }
    return tokens;
}

// Uploads micro-batches `first`, first + 1, … of a stream of tokens, as fill_batch() lays them out.
template <class Dev, class X>
void upload_batches(GPT2<Dev, X>& model, const std::vector<int>& stream, size_t first) {
    const size_t n = size_t(model.B) * model.T;
    const size_t ints = model.batch_ints();
    std::vector<int> host(ints * model.micro_steps);
    for (int i = 0; i < model.micro_steps; i++) {
        const int* const from = stream.data() + (first + i) * n;
        int* const inputs = host.data() + i * ints;
        int* const targets = inputs + n;
        int* const plan = targets + n;
        std::copy_n(from, n, inputs);
        std::copy_n(from + 1, n, targets);
        encoder_plan(model.dev, plan, from, n);
    }
    model.upload(host.data(), model.micro_steps);
    model.dev.sync();
}

template <class T, class Dev, class X>
std::vector<T> download(const GPT2<Dev, X>& model, const void* from, size_t n) {
    std::vector<T> host(n);
    model.dev.download(host.data(), from, n * sizeof(T));
    return host;
}

void poison(const Cpu&, const Arena& a) {
    std::memset(a.base, 0xff, a.bytes);
}
void poison(const Cuda& dev, const Arena& a) {
    CUDA_CHECK(cudaMemsetAsync(a.base, 0xff, a.bytes, dev.stream));
}

// Mean loss of the step's micro-batches. Before it the gradients are NaN, so that all of them must
// be written.
template <class Dev, class X>
double loss_and_gradient(GPT2<Dev, X>& model) {
    poison(model.dev, model.grads);
    model.train_micro_batches();
    double sum = 0;
    for (Acc<X> loss : download<Acc<X>>(model, model.statistics().losses(), model.micro_steps))
        sum += loss;
    return sum / model.micro_steps;
}

const Cpu cpu;

// A model on the CPU with flash, allocated and with random weights.
template <class X>
struct Ready : GPT2<Cpu, X> {
    Ready(const Config& config, const ModelSettings& settings, const Ranks<Cpu>& ranks = {})
        : GPT2<Cpu, X>(cpu, config, settings, ranks) {
        this->allocate();
        init_random(*this, 3);
    }
};

AdamW hyper(double lr, int step) {
    return {.lr = static_cast<float>(lr),
            .beta1 = 0.9f,
            .beta2 = 0.95f,
            .eps = 1e-8f,
            .weight_decay = 0.1f,
            .max_norm = 1.f,
            .step = step,
            .seed = 1};
}

// What steps change: the parameters, and this rank's share of the optimizer's state.
template <class Model>
std::vector<char> state_of(const Model& model) {
    std::vector<char> state(model.params.bytes + model.adam.bytes);
    model.dev.download(state.data(), model.params.base, model.params.bytes);
    model.dev.download(state.data() + model.params.bytes, model.adam.base, model.adam.bytes);
    return state;
}

// Losses of `steps` steps from the same init, and the state at the end.
template <class X>
auto train(const Cuda& dev, const Config& config, Attention attention, int T, int steps,
           const std::vector<int>& stream, double lr) {
    GPT2<Cuda, X> model(dev, config, {.attention = attention, .B = 4, .T = T, .training = true});
    model.allocate();
    init_random(model, 42);
    std::vector<double> losses;
    for (int step = 0; step < steps; step++) {
        const double warmup = std::min(1.0, (step + 1) / 20.0);
        upload_batches(model, stream, step);
        losses.push_back(loss_and_gradient(model));
        model.update(hyper(lr * warmup, step + 1));
    }
    return std::pair(losses, state_of(model));
}

Cuda& gpu() {
    Cuda& dev = device_or_skip<Cuda>();
    dev.tf32 = true;
    return dev;
}
Cuda& gpu_without_tf32() {
    Cuda& dev = device_or_skip<Cuda>();
    dev.tf32 = false;
    return dev;
}

struct GradientCheck {
    Attention attention = Attention::flash;
    int B;
    int T;
    double bound;  // of a tensor's relative L2 error
    int recompute = 0;
};

// Compares the gradients of every parameter tensor with the fp64 reference, which has the same
// (rounded) weights and tokens.
template <class X>
void check_gradients(const Cuda& dev, const GradientCheck& o) {
    ModelSettings settings = {
        .attention = o.attention, .B = o.B, .T = o.T, .micro_steps = 2, .training = true};
    GPT2<Cpu, double> reference(cpu, kSmall, settings);
    settings.recompute = o.recompute;
    GPT2<Cuda, X> model(dev, kSmall, settings);
    reference.allocate();
    model.allocate();
    init_random(model, 7);
    const std::vector<X> weights = download<X>(model, model.params.base, model.num_parameters);
    std::copy(weights.begin(), weights.end(), reference.weights().wte);

    // so that the classifier gets a whole chunk and a smaller one
    model.sizes.chunk = (o.B * o.T + 1) * 2 / 3;
    // nothing may be read that this step did not write
    poison(dev, model.acts);
    const std::vector<int> stream = make_tokens(2 * o.B * o.T + 1, kSmall.V, 3);
    upload_batches(reference, stream, 0);
    upload_batches(model, stream, 0);
    const double want = loss_and_gradient(reference);
    const double got = loss_and_gradient(model);

    CHECK_NEAR(got, want, o.bound * want);
    for (size_t i = 0; i < model.grads.tensors.size(); i++) {
        const TensorSpec& t = model.grads.tensors[i];
        const std::vector<float> g = download<float>(model, model.grads.at(i), t.elements());
        const double* exact = static_cast<double*>(reference.grads.at(i));
        ErrorStats errors;
        for (size_t k = 0; k < g.size(); k++)
            errors.add(g[k], exact[k]);
        if (!(errors.l2() <= o.bound * errors.reference_l2()))
            test::report(__FILE__, __LINE__,
                         format("%s: relative error %.3g > %.3g", t.name,
                                errors.l2() / errors.reference_l2(), o.bound));
    }
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// Without a GPU

TEST(parameter_count_of_presets) {
    CHECK(!preset_config("d13"));
    // GPT-2's published sizes, without padding of the vocabulary.
    const std::pair<const char*, size_t> presets[] = {{"d12", 124439808},
                                                      {"d24", 354823168},
                                                      {"d36", 774030080},
                                                      {"d48", 1557611200},
                                                      {"tiny", 0}};
    for (const auto& [name, parameters] : presets) {
        const Config c = preset(name);
        CHECK(!parameters || c.num_parameters() == parameters + size_t(c.Vp - c.V) * c.C);
        size_t n = 0;
        for (const TensorSpec& t : Parameters<float>::list(c))
            n += t.elements();
        CHECK(c.num_parameters() == n);
        CHECK(c.Vp % 128 == 0 && c.Vp >= c.V && c.C == 64 * c.NH);
    }
}

// Marks the owner of each parameter of a rank's share, and checks that the share's parts are stored
// one after the other, in whole vectors, whatever part of the parameters is looked at.
void check_share(const std::vector<ParamRange>& share, int ranks, std::vector<int>& owners) {
    const size_t n = owners.size();
    std::vector<size_t> parameter_of(n / ranks, n);  // of each element of the state
    size_t next = 0;
    for_each_part(share, 0, n, [&](const SharePart& part) {
        const auto [parameter, state, count] = part;
        if (state != next || parameter + count > n)
            throw Error("not back to back, or outside");
        if (ranks > 1 && (parameter % 4 != 0 || count % 4 != 0))
            throw Error("off a vector");
        for (size_t k = 0; k < count; k++) {
            owners[parameter + k]++;
            parameter_of[state + k] = parameter + k;
        }
        next += count;
    });
    CHECK(next == n / ranks);

    constexpr size_t kWindow = 999;
    size_t seen = 0;
    for (size_t begin = 0; begin < n; begin += kWindow) {
        const size_t end = std::min(n, begin + kWindow);
        for_each_part(share, begin, end, [&](const SharePart& part) {
            const auto [parameter, state, count] = part;
            CHECK(parameter >= begin && parameter + count <= end);
            seen += count;
            for (size_t k = 0; k < count; k++)
                if (parameter_of[state + k] != parameter + k)
                    throw Error("elsewhere when looked at in parts");
        });
    }
    CHECK(seen == n / ranks);
}

// Each parameter belongs to one rank. dev/test_recipe tests that ranks that each train their share
// train as one rank does.
TEST(shares_divide_the_parameters) {
    const Arena params("parameters", Parameters<float>::list(kSmall), 1);
    const size_t n = kSmall.num_parameters();
    for (const bool overlap : {false, true})
        for (int ranks : {1, 2, 4, 8}) {
            CHECK(can_shard(kSmall.C, ranks));
            std::vector<int> owners(n);
            for (int r = 0; r < ranks; r++)
                check_share(share_of(params.tensors, r, ranks, overlap), ranks, owners);
            CHECK(std::count(owners.begin(), owners.end(), 1) == static_cast<ptrdiff_t>(n));
        }
    CHECK(!can_shard(128, 3));
    CHECK(!can_shard(64, 32));
}

// A share's m and v have no gap between them, although their sizes need not be multiples of the 64
// floats that an arena aligns to. optimizer_state::exchange() counts on that.
TEST(shares_of_the_optimizer_are_packed) {
    for (const char* name : {"tiny", "d12", "d36", "d48"})
        for (int ranks : {1, 2, 4, 8}) {
            const Config config = preset(name);
            if (!can_shard(config.C, ranks))
                continue;
            Ranks<Cpu> job;
            job.size = ranks;
            job.sharded = true;
            const GPT2<Cpu, float> model(Cpu(1), config, {.B = 1, .T = 64, .training = true}, job);
            const size_t own = model.num_parameters / ranks * sizeof(float);
            CHECK((model.adam.offsets == std::vector<size_t>{0, own, 2 * own}));
            CHECK(model.adam.bytes == 2 * own);
        }
}

// If the optimizer is sharded, a step sums gradients into a separate buffer, which comes after the
// statistics in memory and ends with the gate. The step must read nothing that was there before.
// The losses of all micro-batches and the norm are exactly the 64 floats that an arena aligns to.
// So if the statistics had no room for the norm of this share, it would overwrite a gradient.
TEST(a_sharded_step_reads_only_what_it_wrote) {
    Ranks<Cpu> ranks;
    ranks.comm = std::make_shared<Cpu::Comm>();
    ranks.sharded = true;
    constexpr int kMicroSteps = 63;
    const std::vector<int> stream = make_tokens(kMicroSteps * 20 + 1, kSmall.V, 3);
    const auto state_after_a_step = [&](bool sharded) {
        Ready<float> model(kSmall, {.B = 1, .T = 20, .micro_steps = kMicroSteps, .training = true},
                           sharded ? ranks : Ranks<Cpu>{});
        poison(cpu, model.buffers);
        upload_batches(model, stream, 0);
        for (int i = 0; i < kMicroSteps; i++) {
            const bool is_last = i + 1 == kMicroSteps;
            const bool sum_over_ranks = sharded && is_last;
            model.train_micro_batch(i, sum_over_ranks);
        }
        model.update(hyper(1e-3, 1));
        CHECK(std::isfinite(*model.statistics().norm()));
        return state_of(model);
    };
    CHECK(state_after_a_step(true) == state_after_a_step(false));
}

// The defaults that depend on the model, the ranks and the device. dev/test_recipe tests those that
// depend on no size.
TEST(defaults_of_sizes) {
    const struct {
        const char* model;
        bool on_cpu;
        int ranks;
        int B;
        int T;
        int tokens_per_step;
        int zero;
        float lr;
    } cases[] = {
        {"d12", false, 1, 8, 1024, 8192, 0, 3e-4f},  {"d48", false, 3, 8, 1024, 24576, 0, 3e-4f},
        {"d12", true, 1, 4, 64, 256, 0, 3e-4f},      {"tiny", false, 2, 8, 256, 4096, 1, 2e-3f},
        {"d12", false, 8, 8, 1024, 65536, 1, 3e-4f}, {"tiny", true, 3, 4, 64, 768, 0, 2e-3f}};
    for (const auto& c : cases) {
        const Config config = preset(c.model);
        Options o;
        resolve_sizes(o, config.max_T, config.C, c.on_cpu, c.ranks);
        CHECK(o.sample_length == 700);
        CHECK(o.B == c.B && o.T == c.T && o.tokens_per_step == c.tokens_per_step);
        CHECK(o.zero == c.zero);
        CHECK(o.lr == c.lr);
    }

    // The optimizer is divided among all ranks, including those that share a sequence. So it is not
    // divided here, because three ranks cannot divide 128 channels.
    Options three;
    three.context_parallel = 3;
    three.T = 96;
    resolve_sizes(three, 1024, 128, true, 3);
    CHECK(three.zero == 0);

    // An evaluation on a CPU takes whole sequences, too.
    Options evaluation;
    evaluation.eval_only = true;
    resolve_sizes(evaluation, 1024, 768, true, 1);
    CHECK(evaluation.T == 1024);
}

// The defaults that depend on the length of a run, which is that of the data if no steps are given.
TEST(defaults_of_steps) {
    const struct {
        int given;
        const char* data;
        bool on_cpu;
        uint64_t windows;  // of which a step takes 4
        int steps;
        int warmup;
        int val_every;
        int sample_every;
    } cases[] = {{-1, "", false, 0, 6500, 325, 650, 1300},
                 {-1, "", true, 0, 2000, 100, 200, 400},
                 {-1, "x", true, 1561, 391, 50, 39, 78},
                 {-1, "x", false, 3, 1, 0, 1, 20},
                 {-1, "x", true, 1560, 390, 50, 39, 78},
                 {-1, "x", false, 4, 1, 0, 1, 20},
                 {-1, "x", true, 8ull * INT_MAX, INT_MAX, INT_MAX / 20, INT_MAX / 10, INT_MAX / 5},
                 {30, "x", false, 9999, 30, 10, 3, 20},
                 {150, "", false, 0, 150, 50, 15, 30},
                 {1200, "", true, 0, 1200, 60, 120, 240}};
    for (const auto& c : cases) {
        Options o;
        o.max_steps = c.given;
        o.train_data = c.data;
        o.tokens_per_step = 256;
        o.T = 64;
        resolve_steps(o, c.on_cpu, c.windows);
        CHECK(o.max_steps == c.steps);
        CHECK(o.warmup == c.warmup);
        CHECK(o.val_every == c.val_every);
        CHECK(o.sample_every == c.sample_every);
        CHECK(o.val_batches == 20);
    }
}

// A number is accepted up to both ends of its option's range and refused beyond them. The ranges
// that matter to a run are repeated here: with a beta2 of 1 AdamW would divide by zero, and 0
// samples or 0 seconds make no run.
TEST(numbers_end_where_their_ranges_do) {
    const auto accepts = [](const Option& option, const std::string& value) {
        try {
            options_of({std::string(option.name) + "=" + value});
        } catch (const UsageError& e) {
            CHECK(contains(e.what(), option.name) && contains(e.what(), value));
            return false;
        }
        return true;
    };
    const auto check = [&](const Option& option, double value, bool in_range) {
        const std::string text = format(option.kind == Option::Int ? "%.0f" : "%.17g", value);
        if (accepts(option, text) != in_range) {
            test::report(__FILE__, __LINE__,
                         format("%s=%s is %s", option.name, text.c_str(),
                                in_range ? "refused" : "accepted"));
        }
    };

    std::map<std::string, std::string> ranges;
    for (const Option& option : Options().table()) {
        if (option.kind != Option::Int && option.kind != Option::Float) {
            continue;
        }
        const std::string range = option.range;
        ranges[option.name] = range;
        const size_t dots = range.find("..");
        const std::string low = range.substr(0, dots);
        const std::string high = range.substr(dots + 2);
        const bool whole = option.kind == Option::Int;
        CHECK(dots != std::string::npos && !low.empty());

        const double least = std::stod(low);
        const double type_max = whole ? double(INT_MAX) : double(FLT_MAX);
        const double most = high.empty() ? type_max : std::stod(high);
        const double step = whole ? 1 : 1e-6;
        check(option, least, true);
        check(option, least - step, false);
        check(option, most, true);
        check(option, whole ? most + 1 : most * 1.000001, false);
    }

    const std::pair<const char*, const char*> expected[] = {
        {"--beta2", "0..0.99999"}, {"--final-lr", "0..1"},       {"--recompute", "0..2"},
        {"--zero", "0..1"},        {"--overlap", "0..1"},        {"--context-parallel", "1..1024"},
        {"--timeout", "1..86400"}, {"--samples", "1.."},         {"--sample-length", "1.."},
        {"--lr", "0.."},           {"--weight-decay", "0.."},    {"--max-norm", "0.."},
        {"--temperature", "0.."},  {"--top-k", "0.."},           {"--seed", "0.."},
        {"--batch", "1..65536"},   {"--tokens-per-step", "1.."}, {"--keep", "0.."},
    };
    for (const auto& [name, range] : expected) {
        if (ranges[name] != range) {
            test::report(__FILE__, __LINE__,
                         format("%s has the range %s", name, ranges[name].c_str()));
        }
    }
}

// dev/test_recipe tests the schedules' shapes. These are the shortest and the longest runs, which
// it does not have.
TEST(schedules_of_the_shortest_runs) {
    Options o;
    o.lr = 1.f;
    o.final_lr = 0.1f;
    const struct {
        int warmup;
        int steps;
        int step;
        double rate;
    } cases[] = {{0, 1, 0, 1.0}, {4, 3, 2, 0.75}, {2, 3, 2, 1.0}};
    for (const char* kind : {"cosine", "linear", "constant", "wsd"})
        for (const auto& c : cases) {
            o.schedule = kind;
            o.warmup = c.warmup;
            o.max_steps = c.steps;
            CHECK_NEAR(o.learning_rate(c.step), c.rate, 1e-6);
        }

    // The longest run: wsd is constant for four fifths of it.
    o.schedule = "wsd";
    o.warmup = 10;
    o.max_steps = INT_MAX;
    CHECK_NEAR(o.learning_rate(INT_MAX / 5 * 4 - 10), 1, 1e-6);
    CHECK_NEAR(o.learning_rate(INT_MAX / 10 * 9), 0.1 + 0.9 * (1 - std::sqrt(0.5)), 1e-6);
}

// Evenly spaced random numbers choose each token exactly as often as it is likely.
TEST(sampling_follows_the_distribution) {
    const std::vector<float> logits = {0.f, std::log(2.f), std::log(5.f), -INFINITY};
    const double r2 = std::sqrt(2.0);
    const double r5 = std::sqrt(5.0);
    const double all = 1 + r2 + r5;
    const struct {
        Sampling sampling;  // temperature, top_k
        double p[4];        // of each token
    } cases[] = {{{1.f, 0}, {1 / 8., 2 / 8., 5 / 8., 0}},
                 {{1.f, 4}, {1 / 8., 2 / 8., 5 / 8., 0}},
                 {{1.f, 9}, {1 / 8., 2 / 8., 5 / 8., 0}},
                 {{1.f, 3}, {1 / 8., 2 / 8., 5 / 8., 0}},
                 {{1.f, 2}, {0, 2 / 7., 5 / 7., 0}},
                 {{1.f, 1}, {0, 0, 1, 0}},
                 {{0.f, 0}, {0, 0, 1, 0}},
                 {{0.f, 2}, {0, 0, 1, 0}},
                 {{.5f, 0}, {1 / 30., 4 / 30., 25 / 30., 0}},
                 {{.5f, 2}, {0, 4 / 29., 25 / 29., 0}},
                 {{2.f, 0}, {1 / all, r2 / all, r5 / all, 0}}};
    constexpr int n = 1000;
    for (const auto& c : cases) {
        int counts[4] = {};
        for (int i = 0; i < n; i++)
            counts[sample_token(logits, c.sampling, (i + 0.5) / n)]++;
        for (int v = 0; v < 4; v++) {
            const bool certain = c.p[v] == 0 || c.p[v] == 1;
            CHECK_NEAR(counts[v], n * c.p[v], certain ? 0 : 1);
        }
    }
}

// A Sampling is {temperature, top_k}.
TEST(sampling_of_equal_and_impossible_tokens) {
    CHECK(sample_token({1.f, 3.f, 3.f}, {0.f, 0}, 0.5) == 1);  // the first of equals

    // Of equals the first are among the k likeliest.
    for (const double u : {0.0, 0.3, 0.7, 0.999999}) {
        CHECK(sample_token({1.f, 3.f, 3.f, 3.f}, {1.f, 1}, u) == 1);
        CHECK(sample_token({1.f, 3.f, 3.f, 3.f}, {1.f, 2}, u) == (u < 0.5 ? 1 : 2));
    }

    // A token without a probability is never drawn, not even by the smallest and the largest random
    // number.
    for (const double u : {0.0, 1 - 0x1p-53}) {
        CHECK(sample_token({-INFINITY, 1.f, -INFINITY}, {1.f, 0}, u) == 1);
        CHECK(sample_token({1.f, 2.f, 1.f}, {1.f, 1}, u) == 1);
    }
}

// N by hand is 124475904 = 50304·768 + 1024·768 + 12·(12·768² + 13·768) + 2·768. A token takes
// 6·N + 6·12·768·1024 FLOPs.
//
// The runs are on a CPU with the name of a GPU that has 67 TFLOP/s, because otherwise they would
// have no MFU. A token of the tiny model takes 5349888 FLOPs at T = 32. Two ranks that share a
// sequence have twice the peak, and the whole T.
TEST(mfu_by_hand) {
    const Config config = preset("d12");
    CHECK(config.flops_per_token(1024) == 803478528);
    CHECK(config.flops_per_token(512) == 775166976);
    CHECK(std::isnan(mfu_percent(config.flops_per_token(1024), 1e5, 1, 0)));
    for (const int ranks : {1, 2}) {
        const std::string out = dir() + format("/mfu_%d", ranks);
        Options o;
        o.output_dir = out;
        o.init = "tiny";
        o.train_data = "README.md";
        o.B = 2;
        o.T = 32;
        o.max_steps = 1;
        o.val_every = 0;
        o.sample_every = 0;
        o.context_parallel = ranks;
        const auto train = [&](int rank, ThreadComm& comm) {
            Options mine = o;
            Threads dev(1);
            dev.name = "NVIDIA H100 80GB HBM3";
            ProcessGroup group;
            group.rank = rank;
            group.size = ranks;
            group.local_size = 1;  // as on several machines: the GPUs of all of them count
            this_thread = &comm;
            run_with<Threads, float>(dev, mine, group);
        };
        CHECK(quiet_error_of([&] { on_threads(ranks, train); }) == "");
        const std::string row = rows(out, "train").at(0);
        const double tok_s = value(row, "tokens_per_s");
        const double mfu = value(row, "mfu_percent");
        CHECK(tok_s > 0);
        CHECK_NEAR(mfu, 100 * tok_s * 5349888 / (ranks * 67e12), 1e-9 * mfu);
    }
}

// A rank uses the GPU of its number on this machine, or the only one that its launcher shows it.
TEST(each_rank_has_a_gpu) {
    const char* const shown = std::getenv("CUDA_VISIBLE_DEVICES");
    const std::string before = shown ? shown : "";
    unsetenv("CUDA_VISIBLE_DEVICES");
    ProcessGroup group;
    group.rank = 5;
    group.size = 8;
    for (const int local_rank : {0, 1, 3}) {
        group.local_rank = local_rank;
        CHECK(group.device(4) == local_rank);
    }
    CHECK_ERROR(group.device(3), "rank 5");
    CHECK_ERROR(group.device(1), "rank 5");
    setenv("CUDA_VISIBLE_DEVICES", "3", 1);
    CHECK(group.device(1) == 0);
    CHECK(group.device(4) == 3);
    CHECK_ERROR(group.device(2), "rank 5");
    unsetenv("CUDA_VISIBLE_DEVICES");
    if (shown) {
        setenv("CUDA_VISIBLE_DEVICES", before.c_str(), 1);
    }
}

namespace {

// Options of a run of the smallest model on the CPU.
Options small_run(const std::string& out, int steps) {
    Options o;
    o.output_dir = out;
    o.init = "tiny";
    o.train_data = text_file();
    o.B = 1;
    o.T = 16;
    o.val_every = 0;
    o.sample_every = 0;
    o.max_steps = steps;
    return o;
}

// A device that puts a NaN at the offset `at` of every download of exactly `bytes` bytes, unless
// that is 0.
struct Corrupting : Cpu {
    size_t bytes = 0;
    size_t at = 0;
    Corrupting() : Cpu(1) {}
    void download(void* host, const void* from, size_t n) const {
        Cpu::download(host, from, n);

        const float nan = NAN;
        if (bytes > 0 && n == bytes) {
            std::memcpy(static_cast<char*>(host) + at, &nan, sizeof nan);
        }
    }
};

// A device that is late with the batch of a step.
struct Late : Cpu {
    int step = 0;
    double seconds = 0;
    Late() : Cpu(1) {}
    void upload(void* to, const void* host, size_t n) const {
        Cpu::upload(to, host, n);
        if (g_step == step) {
            sleep_for(seconds);
        }
    }
};

// A device on which every layer, every upload or every download takes its time.
struct Slow : Threads {
    double layer_s = 0;
    double upload_s = 0;
    double download_s = 0;
    Slow() : Threads(1) {}

    void upload(void* to, const void* host, size_t n) const {
        Threads::upload(to, host, n);
        sleep_for(upload_s);
    }
    void download(void* host, const void* from, size_t n) const {
        Threads::download(host, from, n);
        sleep_for(download_s);
    }
};

int slow_layers = 0;  // calls of the two functions below

// Slow's layers: one of the forward pass and one of the backward pass stand for all.
template <class... Arguments>
void matmul_activation_forward(const Slow& dev, Arguments... arguments) {
    slow_layers++;
    sleep_for(dev.layer_s);
    matmul_activation_forward(static_cast<const Cpu&>(dev), arguments...);
}
template <class... Arguments>
void matmul_activation_backward(const Slow& dev, Arguments... arguments) {
    slow_layers++;
    sleep_for(dev.layer_s);
    matmul_activation_backward(static_cast<const Cpu&>(dev), arguments...);
}

}  // namespace

// A checkpoint whose files are whole but whose parameters are not finite. Nothing is trained from
// it.
TEST(a_checkpoint_that_is_not_finite_is_not_resumed) {
    const Config config = preset("tiny");
    const Arena params("parameters", Parameters<float>::list(config), 1);
    for (const size_t tensor : {size_t(0), size_t(7), params.tensors.size() - 1}) {
        const std::string out = dir() + format("/not_finite_%zu", tensor);
        const std::string name = params.tensors[tensor].name;
        Corrupting dev;
        dev.bytes = params.bytes;
        dev.at = params.offsets[tensor] + 8;
        Options o = small_run(out, 1);
        CHECK(quiet_error_of([&] { run_with<Corrupting, float>(dev, o, ProcessGroup()); }) == "");

        Options resumed = small_run(out, 2);
        resumed.resume = true;
        const Corrupting good;
        const std::string error =
            quiet_error_of([&] { run_with<Corrupting, float>(good, resumed, ProcessGroup()); });
        if (!contains(error, model_path(out, 1)) || !contains(error, ": " + name + ": 1 of ") ||
            !contains(error, " elements are not finite")) {
            test::report(__FILE__, __LINE__, name + ": " + error);
        }
        CHECK(!exists(model_path(out, 2)));
    }
}

// --timeout is for ordinary steps. The first step of a run, also of one that resumes, makes plans
// and connections, and may take longer.
TEST(the_first_step_may_take_longer_than_the_timeout) {
    const std::string from = dir() + "/in_time";
    Options o = small_run(from, 2);
    CHECK(quiet_error_of([&] { run_with<Cpu, float>(Cpu(1), o, ProcessGroup()); }) == "");

    const struct {
        int late_step;
        int code;
        const char* says;
        bool resumes;
    } cases[] = {
        {1, 0, "step 4/4", false}, {3, 0, "step 4/4", true}, {4, 1, "no progress for 5 s", true}};
    Processes runs[3];
    for (int i = 0; i < 3; i++) {
        runs[i].start([&, i] {
            const std::string out = from + format("_%d", i);
            if (cases[i].resumes) {
                std::filesystem::copy(from, out);
            }
            Options o = small_run(out, 4);
            o.resume = cases[i].resumes;
            o.timeout = 5;
            Late dev;
            dev.step = cases[i].late_step;
            dev.seconds = 8;
            ProcessGroup group;
            group.watchdog = std::make_unique<Watchdog>([] { return std::string("a rank"); });
            return run_with<Late, float>(dev, o, group);
        });
    }
    for (int i = 0; i < 3; i++) {
        runs[i].check({cases[i].code}, {cases[i].says});
    }
}

// Work that makes progress is no hang, however long all of it takes: with --timeout 1 layers that
// take 0.3 s each, and validation batches, sampled tokens and pieces of a checkpoint that take 0.2.
// The checkpoint is written in several pieces because two ranks share the optimizer, whose windows
// are no larger than the activations.
TEST(slow_work_that_goes_on_is_no_hang) {
    constexpr double kSlow = 0.2;
    const auto train = [](Options o, const Slow& dev, int ranks) {
        o.timeout = 1;
        on_threads(ranks, [&](int rank, ThreadComm& comm) {
            Options mine = o;
            ProcessGroup group;
            group.rank = rank;
            group.size = ranks;
            group.local_size = ranks;
            if (rank == 0)
                group.watchdog = std::make_unique<Watchdog>([] { return std::string("a rank"); });
            this_thread = &comm;
            run_with<Slow, float>(dev, mine, group);
        });
        return 0;
    };
    Processes runs;
    runs.start([&] {  // the second step has the short limit
        Slow dev;
        dev.layer_s = 0.3;  // so that one pass over the 4 layers alone is longer than the limit
        const int code = train(small_run("", 2), dev, 1);
        CHECK(slow_layers == 2 * 2 * preset("tiny").L);
        return code;
    });
    runs.start([&] {
        Options o = small_run("", 2);
        o.val_data = text_file();
        o.val_every = 2;
        o.val_batches = 8;
        Slow dev;
        dev.upload_s = kSlow;
        return train(o, dev, 1);
    });
    runs.start([&] {
        Options o = small_run("", 2);
        o.sample_every = 2;
        o.sample_length = 8;
        o.temperature = 1;
        Slow dev;
        dev.upload_s = kSlow;
        return train(o, dev, 1);
    });
    runs.start([&] {
        Slow dev;
        dev.download_s = kSlow;
        return train(small_run(dir() + "/slow_checkpoint", 2), dev, 2);
    });
    runs.check({0, 0, 0, 0});
}

// A signal to one rank ends all at the same step, whichever rank it is. The ranks here are threads
// of one process, which would all get the signal. So the test writes it to where a rank tells the
// others what it got.
TEST(a_signal_to_any_rank_ends_all) {
    constexpr int kRanks = 3;
    constexpr int kStep = 2;
    for (int signalled = 0; signalled < kRanks; signalled++) {
        Options o = small_run("", 5);
        o.zero = 0;
        std::vector<int> codes(kRanks);
        const auto train = [&](int rank, ThreadComm& comm) {
            Options mine = o;
            Threads dev(1);
            dev.after_upload = [&](void* to, size_t bytes) {
                if (rank == signalled && bytes == sizeof(int) && g_step == kStep) {
                    *static_cast<int*>(to) = SIGTERM;
                }
            };
            ProcessGroup group;
            group.rank = rank;
            group.size = kRanks;
            group.local_size = kRanks;
            this_thread = &comm;
            codes[rank] = run_with<Threads, float>(dev, mine, group);
        };
        CHECK(quiet_error_of([&] { on_threads(kRanks, train); }) == "");
        CHECK(codes == std::vector<int>(kRanks, 128 + SIGTERM));
        CHECK(g_step == kStep);
    }
}

// Files are read in order and completely, in pieces whose sizes a checksum accepts, whatever the
// size of the file.
TEST(files_are_read_in_pieces) {
    const std::string path = dir() + "/pieces.bin";
    const Cpu cpu(1);
    std::string bytes(70000, 'x');
    for (size_t i = 0; i < bytes.size(); i++)
        bytes[i] = static_cast<char>(mix64(i));
    write_file(path, bytes);
    const InputFile file(path);
    for (const size_t n : {0, 1, 31, 32, 33, 4096, 69997})
        for (const size_t most : {size_t(1), size_t(33), size_t(4096), ~size_t(0)}) {
            std::string got;
            Checksum64 checksum(n);
            const auto use = [&](const FilePiece& piece) {
                CHECK(piece.offset == got.size());
                CHECK(piece.bytes % Checksum64::kStep == 0 || piece.offset + piece.bytes == n);
                checksum.add(piece.data, piece.bytes);
                got.append(piece.data, piece.bytes);
            };
            stream_in(cpu, file, 3, n, use, most);
            CHECK(got == bytes.substr(3, n));
            CHECK(checksum.value() == checksum64(&bytes[3], n));
        }
}

// Recomputed activations have the bits that stored ones would have. dev/test_program tests how much
// memory each level takes.
TEST(recompute_does_not_change_gradients) {
    const int B = 2;
    const int T = 20;
    const std::vector<int> stream = make_tokens(2 * B * T + 1, kSmall.V, 3);
    std::vector<char> kept;
    for (int level : {0, 1, 2}) {
        Ready<double> model(
            kSmall, {.B = B, .T = T, .micro_steps = 2, .training = true, .recompute = level});
        poison(cpu, model.acts);
        upload_batches(model, stream, 0);
        loss_and_gradient(model);
        const std::vector<char> gradients =
            download<char>(model, model.grads.base, model.grads.bytes);
        if (level == 0)
            kept = gradients;
        CHECK(kept == gradients);
    }
}

TEST(reference_model_gradient_by_finite_differences) {
    const Config config = {.max_T = 9, .V = 30, .Vp = 32, .L = 2, .NH = 2, .C = 8};
    Ready<double> model(config, {.B = 2, .T = 9, .training = true});
    model.sizes.chunk = 11;  // the classifier gets a whole chunk and a smaller one

    double* w = model.weights().wte;
    // away from the symmetric start
    for (size_t i = 0; i < model.num_parameters; i++)
        w[i] += 0.2 * normal(11, i);

    upload_batches(model, make_tokens(2 * 9 + 1, config.V, 5), 0);
    loss_and_gradient(model);
    for (size_t i = 0; i < model.params.tensors.size(); i++) {
        const TensorSpec& t = model.params.tensors[i];
        const double* gradient = static_cast<double*>(model.grads.at(i));
        check_gradient(t.name, static_cast<double*>(model.params.at(i)),
                       {gradient, gradient + t.elements()}, [&] {
                           model.evaluate_micro_batch(0);
                           return model.statistics().losses()[0];
                       });
    }
}

// A chunk begins with 512 rows, and is doubled until it has all rows of the model or would become
// larger than 2 GiB.
TEST(logits_are_2_GiB_at_most) {
    const auto rows = [](int Vp) {
        const Config config = {.max_T = 160, .V = Vp, .Vp = Vp, .L = 1, .NH = 1, .C = 8};
        const GPT2<Cpu, double> model(cpu, config, {.B = 4, .T = 160, .training = true});
        const TensorSpec& logits = model.buffers.tensors[0];
        CHECK(logits.elements() == model.sizes.chunk * Vp);
        return model.sizes.chunk;
    };
    const int V = 1 << 18;  // of which 1024 rows are 2 GiB
    CHECK(rows(V) == 640);  // all that the model has, because a chunk of 1024 is allowed
    CHECK(rows(V + 128) == 512);
}

// Nothing is updated if a loss is infinite although the gradient is not, nor if there is a NaN in a
// parameter, whose name is reported.
template <class Dev, class X>
void check_nothing_is_updated(GPT2<Dev, X>& model, X* element, const char* says) {
    const auto update_stops = [&] {
        const std::vector<char> before = state_of(model);
        model.update(hyper(1e-3, 1));
        const Acc<X> norm = download<Acc<X>>(model, model.statistics().norm(), 1)[0];
        return !std::isfinite(norm) && state_of(model) == before;
    };
    upload_batches(model, make_tokens(model.micro_steps * model.B * model.T + 1, model.config.V, 5),
                   0);
    CHECK(std::isfinite(loss_and_gradient(model)));
    const Acc<X> infinite = INFINITY;
    Acc<X>* const last_loss = model.statistics().losses() + model.num_losses() - 1;
    model.dev.upload(last_loss, &infinite, sizeof infinite);
    CHECK(update_stops());

    const X nan = NAN;
    model.dev.upload(element, &nan, sizeof nan);
    CHECK(!(loss_and_gradient(model) <= 1e30));
    CHECK(update_stops());
    CHECK_ERROR(check_parameters(model, "it", ""),
                std::string("it: ") + says + " elements are not finite");
}

TEST(a_tensor_that_is_not_finite_is_named_and_nothing_is_updated) {
    const Config config = {.max_T = 16, .V = 30, .Vp = 32, .L = 3, .NH = 2, .C = 8};
    Ready<float> model(config, {.B = 2, .T = 16, .micro_steps = 2, .training = true});
    check_nothing_is_updated(model, model.weights(1).ln2w + 3, "ln2w: 1 of 24");
}

// On a machine with exactly as much memory as some batch takes, that batch fits, and no larger one.
TEST(out_of_memory_says_what_fits) {
    Cpu small(1);
    const auto with_batch = [&](int B) {
        return GPT2<Cpu, float>(small, kSmall, {.B = B, .T = 80, .training = true});
    };
    const size_t three = with_batch(3).total_bytes();
    const size_t one = with_batch(1).total_bytes();
    for (const auto& [memory, says] : {std::pair{three, "-b 3 would fit"},
                                       {three - 1, "-b 2 would fit"},
                                       {one, "-b 1 would fit"},
                                       {one - 1, "not even -b 1 would fit"}}) {
        small.total_bytes = memory;
        GPT2<Cpu, float> model = with_batch(9);
        CHECK_ERROR(allocate_or_explain(model), says);
    }
    small.total_bytes = three;
    GPT2<Cpu, float> fits = with_batch(3);
    allocate_or_explain(fits);
}

// Nothing is of size T².
template <class X, class Dev>
void check_memory_is_linear_in_T(const Dev& dev) {
    Config config = preset("d12");
    config.max_T = 1 << 20;
    const auto bytes = [&](int T) {
        const GPT2<Dev, X> model(dev, config, {.B = 1, .T = T, .training = true});
        return static_cast<double>(model.acts.bytes + model.buffers.bytes);
    };
    const double growth = bytes(131072) - bytes(65536);
    CHECK_NEAR((bytes(262144) - bytes(131072)) / growth, 2.0, 0.02);
}
TEST(flash_memory_is_linear_in_T) {
    check_memory_is_linear_in_T<float>(cpu);
    if (Cuda::count() > 0)
        check_memory_is_linear_in_T<bf16>(gpu());
}

TEST(arenas_are_what_is_allocated) {
    Ready<float> model(kSmall, {.B = 2, .T = 80, .micro_steps = 3, .training = true});
    size_t total = 0;
    for (const Arena* a : model.arenas()) {
        size_t end = 0;
        for (size_t i = 0; i < a->tensors.size(); i++) {
            const TensorSpec& t = a->tensors[i];
            if (t.elements() == 0)
                continue;
            const auto offset = [&](int layer) {
                return static_cast<size_t>(static_cast<char*>(a->at(i, layer)) - a->base);
            };
            CHECK(offset(0) >= end);  // in order, without overlap
            const int last_layer = std::max(t.layers - 1, 0);
            end = offset(last_layer) + t.layer_elements() * size_of(t.dtype);
        }
        // only padding for alignment is left at the end
        CHECK(end <= a->bytes && a->bytes < end + 256);
        total += a->bytes;
    }
    CHECK(total == model.total_bytes());
}

TEST(an_arena_has_no_tensor_that_is_not_in_it) {
    CHECK(Arena().pointers<Optimizer<float>>().m == nullptr);  // of a model that only generates
    CHECK(Arena("empty", {{.name = "none", .dtype = DType::f32, .rows = 0, .cols = 0}}).at(0) ==
          nullptr);
}

TEST(a_vocabulary_without_an_end_cannot_be_sampled) {
    for (const int V : {250, kByteEndOfText, kByteVocab + 1, kEndOfText}) {
        CHECK_ERROR(start_of_text(Tokenizer(), "", V), format("vocabulary of %d", V));
        CHECK(!can_generate(V));
    }
    for (const int V : {kByteVocab, kGpt2Vocab, 50304}) {
        CHECK(start_of_text(Tokenizer(), "", V).at(0) == (V == 257 ? 256 : 50256));
        CHECK(can_generate(V));
    }
}

// A model that caches k and v computes only the row of a new token, and a model that trains on
// several sequences can cache, too. Both give the logits of a model that computes the whole text,
// padded to 64 tokens or to T. Beyond T the window moves. dev/test_recipe tests what samples are.
TEST(cached_logits_are_the_same) {
    for (int T : {1, 2, 7, 80}) {
        Ready<float> whole(kSmall, {.B = 1, .T = T});
        Ready<float> trains(kSmall, {.B = 3, .T = T, .training = true});
        Ready<float> cached(kSmall, {.B = 1, .T = T, .cache = true});
        poison(cpu, trains.acts);
        poison(cpu, cached.acts);
        float* const second_row = cached.activations().encoded + (T > 1 ? kSmall.C : 0);
        int seen = 0;  // tokens in the window, before the new one
        for (int n = 1; n <= 2 * T + 5; n++) {
            const std::vector<int> text = make_tokens(n, kSmall.V, 3);
            const bool use_cache = n > 1;
            const std::vector<float> want = next_token_logits(whole, text);
            *second_row = NAN;
            CHECK(next_token_logits(cached, text, use_cache) == want);
            CHECK(next_token_logits(trains, text, use_cache) == want);

            const bool one_row = use_cache && seen < T;
            CHECK(std::isnan(*second_row) == one_row);

            const bool window_moves = seen == T;
            seen = window_moves ? (T + 1) / 2 : seen + 1;
            CHECK(window_begin(n, T) == n - seen);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// With a GPU

TEST(gpu_gradients_fp32_strict) {
    for (Attention a : {Attention::flash, Attention::naive})
        check_gradients<float>(gpu_without_tf32(),
                               {.attention = a, .B = 3, .T = 65, .bound = 2e-5});
    check_gradients<float>(gpu_without_tf32(), {.B = 1, .T = 1, .bound = 2e-5});
}
TEST(gpu_gradients_fp32_tf32) {
    for (Attention a : {Attention::flash, Attention::naive})
        check_gradients<float>(gpu(), {.attention = a, .B = 2, .T = 80, .bound = 5e-3});
}
TEST(gpu_gradients_bf16) {
    for (Attention a : {Attention::flash, Attention::naive})
        check_gradients<bf16>(gpu(), {.attention = a, .B = 3, .T = 65, .bound = 4e-2});
    for (int recompute : {1, 2})
        check_gradients<bf16>(gpu(), {.B = 3, .T = 65, .bound = 4e-2, .recompute = recompute});
}

TEST(gpu_flash_equals_naive_over_400_steps_fp32) {
    Config config = preset("d12");
    config.L = 4;
    config.max_T = 256;
    const std::vector<int> stream = make_tokens(400 * 4 * 256 + 1, config.V, 9);
    const auto losses = [&](Attention attention) {
        return train<float>(gpu_without_tf32(), config, attention, 256, 400, stream, 3e-4).first;
    };
    const std::vector<double> flash = losses(Attention::flash);
    const std::vector<double> naive = losses(Attention::naive);
    double worst = 0;
    for (size_t i = 0; i < flash.size(); i++)
        worst = std::max(worst, std::fabs(flash[i] - naive[i]));
    std::printf("  loss %.4f -> %.4f, largest difference %.2g\n", flash.front(), flash.back(),
                worst);
    CHECK(flash.back() < flash.front() - 1);
    CHECK_NEAR(worst, 0, 1e-3);
}

template <class X>
void check_determinism() {
    Config config = preset("d12");
    config.L = 3;
    const std::vector<int> stream = make_tokens(20 * 4 * 1024 + 1, config.V, 9);
    const auto run = [&] {
        return train<X>(gpu(), config, Attention::flash, 1024, 20, stream, 6e-4);
    };
    const auto first = run();
    for (bool graphs : {true, false}) {
        gpu().graphs = graphs;
        CHECK(run() == first);
    }
    gpu().graphs = true;
}
TEST(gpu_two_runs_are_bit_equal) {
    check_determinism<bf16>();
    check_determinism<float>();
}

// --memory prints what is allocated.
TEST(gpu_memory_is_what_the_table_says) {
    for (int recompute : {0, 1, 2}) {
        GPT2<Cuda, bf16> model(gpu(), preset("d12"),
                               {.B = 4, .T = 1024, .training = true, .recompute = recompute});
        size_t bytes = 0;
        size_t tensors = 0;
        for (const Arena* a : model.arenas())
            for (const TensorSpec& t : a->tensors) {
                bytes += t.elements() * size_of(t.dtype);
                tensors++;
            }
        // each tensor is aligned, and the driver rounds an allocation up to pages of 2 MiB
        const double tolerance = 256. * tensors + 5 * (2 << 20);
        double taken = 0;
        // several times, because another program may allocate memory at the same time
        for (int i = 0; i < 5 && !(std::fabs(taken - bytes) <= tolerance); i++) {
            for (Arena* a : model.arenas()) {
                gpu().free(a->base);
                a->base = nullptr;
            }
            const size_t before = gpu().free_bytes();
            model.allocate();
            taken = double(before) - gpu().free_bytes();
        }
        CHECK_NEAR(taken, double(bytes), tolerance);
    }
}

// The fp32 weights of a model file become the master weights as they are, and the bf16 weights
// rounded. The file is so large that it is read in several pieces.
TEST(gpu_master_weights_are_those_of_the_file) {
    const Config config = {.max_T = 16, .V = 30000, .Vp = 30080, .L = 1, .NH = 8, .C = 512};
    GPT2<Cuda, bf16> model(gpu(), config, {.B = 1, .T = 16, .training = true});
    model.allocate();
    std::vector<float> weights(model.num_parameters);
    for (size_t i = 0; i < weights.size(); i++)
        weights[i] = static_cast<float>(uniform(5, i)) - 0.5f;
    CHECK(weights.size() * sizeof(float) > 2 * (32 << 20));

    const std::string path = dir() + "/fp32.bin";
    write_model(path, {DType::f32, config}, weights.data());
    load(model, path);

    CHECK(download<float>(model, model.optimizer().master, weights.size()) == weights);
    const std::vector<bf16> rounded = download<bf16>(model, model.params.base, weights.size());
    size_t wrong = 0;
    for (size_t i = 0; i < weights.size(); i++)
        wrong += float(rounded[i]) != float(bf16(weights[i]));
    CHECK(wrong == 0);
}

TEST(gpu_update_stops_at_nan) {
    GPT2<Cuda, bf16> model(gpu(), kSmall, {.B = 2, .T = 64, .training = true});
    model.allocate();
    init_random(model, 3);
    check_nothing_is_updated(model, model.weights(1).qkvw + 17, "qkvw: 1 of 98304");
}

// The sums of the squared errors of logits, at each length of a text and over all lengths.
struct LogitErrors {
    std::map<int, double> at_length;
    double all = 0;

    void add(int length, double error) {
        at_length[length] += error * error;
        all += error * error;
    }
};

// Logits with and without the cache, against fp64. The text outgrows T.
template <class X>
void check_cached_logits(const Cuda& dev, Attention attention) {
    const Config config = {.max_T = 200, .V = 250, .Vp = 256, .L = 4, .NH = 4, .C = 256};
    Ready<double> exact(config, {.B = 1, .T = 200, .cache = true});
    GPT2<Cuda, X> model(dev, config, {.attention = attention, .B = 1, .T = 200, .cache = true});
    model.allocate();
    init_random(model, 3);
    poison(dev, model.acts);
    CHECK(model.optimizer().master == nullptr);
    const std::vector<X> weights = download<X>(model, model.params.base, model.num_parameters);
    std::copy(weights.begin(), weights.end(), exact.weights().wte);

    constexpr int kLongest = 320;
    LogitErrors without_cache;
    LogitErrors with_cache;
    std::map<int, double> largest;  // error at each length, without the cache
    for (bool cached : {false, true}) {
        LogitErrors& errors = cached ? with_cache : without_cache;
        for (int n = 1; n <= kLongest; n++) {
            const std::vector<int> text = make_tokens(n, config.V, 5);
            const std::vector<double> want = next_token_logits(exact, text, n > 1);
            const std::vector<X> got = next_token_logits(model, text, cached && n > 1);
            for (int v = 0; v < config.V; v++) {
                const double error = std::fabs(static_cast<float>(got[v]) - want[v]);
                errors.add(n, error);
                if (!cached)
                    largest[n] = std::max(largest[n], error);
            }

            const Sampling greedy = {0.f, 0};
            const int best = sample_token({want.begin(), want.end()}, greedy, 0);
            const int chosen = sample_token({got.begin(), got.end()}, greedy, 0);
            CHECK(want[best] - want[chosen] <= 2 * largest[n]);
        }
    }

    const double all = std::sqrt(with_cache.all / without_cache.all);
    double worst = 0;
    for (int n = 1; n <= kLongest; n++) {
        const double ratio = with_cache.at_length[n] / without_cache.at_length[n];
        worst = std::max(worst, std::sqrt(ratio));
    }
    std::printf(
        "  L2 error with the cache: %.3f of that without it, and %.3f at the worst length\n", all,
        worst);
    // A matmul of one row rounds otherwise than one of many. In bf16 a single length may have bad
    // luck.
    CHECK(all <= 1.1);
    CHECK(worst <= (std::is_same_v<X, bf16> ? 1.5 : 1.1));
}
TEST(gpu_cached_logits_fp32) {
    for (Attention a : {Attention::flash, Attention::naive})
        check_cached_logits<float>(gpu_without_tf32(), a);
}
TEST(gpu_cached_logits_bf16) {
    for (Attention a : {Attention::flash, Attention::naive})
        check_cached_logits<bf16>(gpu(), a);
}

TEST(gpu_out_of_memory_says_what_fits) {
    GPT2<Cuda, bf16> model(gpu(), preset("d48"), {.B = 4096, .T = 1024, .training = true});
    CHECK_ERROR(allocate_or_explain(model), "would fit");
    CHECK_ERROR(allocate_or_explain(model), "activations");
}

TEST_MAIN
