// Tests the recipe from end to end. ./train_gpt2cu trains a small model with every option away from its default, alone
// and on several ranks. What it logs, prints, samples and saves is compared with fp64 loops of this file. They repeat
// the model, the order of data, clipping, AdamW, decay, schedules, validation and sampling. Two things are shared with
// the program. The layers are layers/cpu in double, which dev/test_reference checks. The gradient is that of the
// program's model in double, which dev/test_gpt2 checks against finite differences.
#define TRAIN_GPT2_NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"  // parts of the program stay unused here
#include <chrono>
#include <map>
#include <numeric>
#include <set>

#include "../train_gpt2.cu"
#include "dev/small_model.h"

namespace {

using Vec = std::vector<double>;
using Tokens = std::vector<int>;
using Clock = std::chrono::steady_clock;

// ---------------------------------------------------------------------------------------------------------------------
// The model is GPT-2 in double

struct Gpt2 {
    Vec p;
    Cpu cpu{1};
    explicit Gpt2(double end) {
        for (float x : make_weights(end)) p.push_back(x);
    }
    const double* w(int t, int l = 0) const { return p.data() + offset_of(t, l); }

    // The final layer norm's output.
    Vec forward(const int* tokens, int T) {
        const size_t N = T;
        Vec x(N * C), ln(N * C), mean(N), rstd(N), qkv(N * 3 * C), atty(N * C), lse(N * NH), fch(N * 4 * C),
            gelu(N * 4 * C), out(N * C);
        const auto layernorm = [&](int t, int l) {
            layernorm_forward(cpu, ln.data(), mean.data(), rstd.data(), x.data(), w(t, l), w(t + 1, l), N, C);
        };
        const auto add_linear = [&](const Vec& from, int t, int l) {
            matmul_forward(cpu, out.data(), from.data(), w(t, l), w(t + 1, l), N, from.size() / N, C);
            for (size_t i = 0; i < x.size(); i++) x[i] += out[i];
        };
        encoder_forward(cpu, x.data(), tokens, w(WTE), w(WPE), 1, T, C);
        for (int l = 0; l < L; l++) {
            layernorm(LN1W, l);
            matmul_forward(cpu, qkv.data(), ln.data(), w(QKVW, l), w(QKVB, l), N, C, 3 * C);
            attention_forward<double>(cpu, Attention::flash, atty.data(), lse.data(), nullptr, nullptr, qkv.data(), 1,
                                      T, NH, HS);
            add_linear(atty, ATTPROJW, l);
            layernorm(LN2W, l);
            matmul_forward(cpu, fch.data(), ln.data(), w(FCW, l), w(FCB, l), N, C, 4 * C);
            gelu_forward(cpu, gelu.data(), fch.data(), N * 4 * C);
            add_linear(gelu, FCPROJW, l);
        }
        layernorm(LNFW, 0);
        return ln;
    }
    // The loss of each of T tokens.
    Vec losses(const int* tokens, const int* targets, int T) {
        const Vec lnf = forward(tokens, T);
        Vec logits(T * Vp), losses(T);
        matmul_forward<double>(cpu, logits.data(), lnf.data(), w(WTE), nullptr, T, C, Vp);
        classifier(cpu, logits.data(), losses.data(), targets, 0.0, T, V, Vp);
        return losses;
    }
    // Mean loss of some windows of a stream. A window has T inputs, and the targets are one token later.
    double mean_loss(const Tokens& stream, const std::vector<int>& windows) {
        double sum = 0;
        for (int window : windows)
            for (double x : losses(&stream[window * T], &stream[window * T + 1], T)) sum += x;
        return sum / T / windows.size();
    }
    // Its gradient.
    Vec gradient(const Tokens& stream, const std::vector<int>& windows) {
        const int B = windows.size();
        GPT2<Cpu, double> model(cpu, {kPositions, V, Vp, L, NH, C}, Attention::flash, B, T, 1, true);
        model.allocate();
        std::copy(p.begin(), p.end(), model.weights().wte);
        std::vector<int> batch(model.batch_ints());
        for (int i = 0; i < B; i++) {
            std::copy_n(&stream[windows[i] * T], T, &batch[i * T]);
            std::copy_n(&stream[windows[i] * T + 1], T, &batch[(B + i) * T]);
        }
        encoder_plan(cpu, &batch[2 * B * T], batch.data(), B * T);
        model.upload(batch.data(), 1);
        model.train_micro_batches();
        return Vec(model.gradients().wte, model.gradients().wte + kParameters);
    }

    // Logits of the token after the last T of `context`.
    Vec logits(const Tokens& context, int T) {
        const int n = std::min<int>(T, context.size());
        const Vec lnf = forward(context.data() + context.size() - n, n);
        Vec row(V);
        for (int v = 0; v < V; v++)
            for (int c = 0; c < C; c++) row[v] += lnf[(n - 1) * C + c] * w(WTE)[v * C + c];
        return row;
    }

    // The mean loss of an ending's tokens, without the context's.
    double ending_loss(const Tokens& context, const Tokens& ending) {
        Tokens text = context;
        text.insert(text.end(), ending.begin(), ending.end());
        const Vec all = losses(text.data(), text.data() + 1, text.size() - 1);
        return std::accumulate(all.end() - ending.size(), all.end(), 0.0) / ending.size();
    }
    int answer(const Choice& c) {
        Vec losses;
        for (const Tokens& ending : c.endings) losses.push_back(ending_loss(c.context, ending));
        return static_cast<int>(std::min_element(losses.begin(), losses.end()) - losses.begin());
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// What the runs read: token shards and questions

constexpr int kTrainWindows = 20, kValWindows = 23;

// A few tokens after the last whole window belong to no window.
const Tokens& train_tokens() {
    static const Tokens tokens = make_tokens(kTrainWindows * T + 6, 1);
    return tokens;
}
const Tokens& val_tokens() {
    static const Tokens tokens = make_tokens(kValWindows * T + 4, 2);
    return tokens;
}
std::vector<Choice> make_choices() {
    std::vector<Choice> choices(7);
    for (int i = 0; i < 7; i++) {
        choices[i].index = i, choices[i].label = (i * 5 + 1) % 4;
        choices[i].context = make_tokens(3 + i, 30 + i);
        for (int e = 0; e < 4; e++) choices[i].endings.push_back(make_tokens(2 + (i + 3 * e) % 5, 50 + 4 * i + e));
    }
    return choices;
}

// Options that every run here has.
std::string data_options() {
    return format("--device cpu -t %d -i ", T) + write_shard(dir() + "/train.bin", train_tokens()) + " ";
}
std::string val_options() {
    return "-j " + write_shard(dir() + "/val.bin", val_tokens()) + " ";
}
std::string question_options() {
    write_choices(dir() + "/choices.bin", make_choices());
    return "--hellaswag " + dir() + "/choices.bin ";
}

// ---------------------------------------------------------------------------------------------------------------------
// What the runs write

std::string text_of(const std::string& row) {
    const std::string key = "\"text\": \"";
    const size_t begin = row.find(key) + key.size();
    return row.substr(begin, row.rfind('"') - begin);
}

// Relative L2 distance, or the absolute one if `b` is 0.
double apart(const double* a, const double* b, size_t n) {
    double d = 0, s = 0;
    for (size_t i = 0; i < n; i++) d += (a[i] - b[i]) * (a[i] - b[i]), s += b[i] * b[i];
    return std::sqrt(s > 0 ? d / s : d);
}
Vec floats_at_the_end(const std::string& path, size_t n) {
    const std::string bytes = read_file(path);
    std::vector<float> x(n);
    if (bytes.size() < n * sizeof(float)) throw Error(path + " is too short");
    std::memcpy(x.data(), bytes.data() + bytes.size() - n * sizeof(float), n * sizeof(float));
    return Vec(x.begin(), x.end());
}

// A run with nearly no learning rate trains on one window a step. The windows are found by their losses.
std::vector<int> windows_of(const std::string& options, int steps, const std::string& out) {
    CHECK_RUN(run(data_options() + "-e " + model_file(kEndOften) + " -b 1 -v 0 -l 1e-30 " + options +
                  format(" -x %d -o ", steps) + out),
              0, "checkpoint");
    Gpt2 model(kEndOften);
    Vec losses;
    for (int w = 0; w < kTrainWindows; w++) losses.push_back(model.mean_loss(train_tokens(), {w}));
    std::vector<int> windows;
    for (double loss : values(out, "train", "loss_nats")) {
        windows.push_back(-1);
        for (int w = 0; w < kTrainWindows; w++)
            if (std::fabs(loss - losses[w]) < 5e-6) windows.back() = w;
        if (windows.back() < 0) throw Error(format("%s: no window has a loss of %.7f", out.c_str(), loss));
    }
    if (windows.size() != size_t(steps)) throw Error(format("%zu of %d steps in the log", windows.size(), steps));
    return windows;
}
// Some epochs of a seed's order, from a run that also writes samples.
std::string order_folder(int seed) {
    return dir() + format("/order_%d", seed);
}
const std::vector<int>& order_of(int seed) {
    static std::map<int, std::vector<int>> known;
    if (!known.count(seed))
        known[seed] = windows_of(format("-s 40 -g 30 --seed %d", seed), 10 * kTrainWindows, order_folder(seed));
    return known[seed];
}

// Walks along a sample. Each of its tokens must be one of the k likeliest after those before it. If a sample is shorter
// than n, the end of the text must have been one of them too.
struct SampleCheck {
    Gpt2& model;
    int T, k;
    double temperature = 1;
    int tokens = 0, place = 0;         // place of the least likely token taken, from 1
    double surplus = 0, variance = 0;  // how often the likeliest was taken, less its probability

    void operator()(const std::string& prompt, const std::string& text, int n) {
        if (text.compare(0, prompt.size(), prompt) || text.size() > prompt.size() + n)
            return test::report(__FILE__, __LINE__, format("sample \"%s\" of \"%s\"", text.c_str(), prompt.c_str()));
        Tokens context = {kEnd};
        for (char c : prompt) context.push_back(c - '!');
        for (size_t i = prompt.size(); i < std::min(text.size() + 1, prompt.size() + n); i++, tokens++) {
            const int token = i < text.size() ? text[i] - '!' : kEnd;
            const Vec logits = model.logits(context, T);
            if (token < 0 || token >= V) return test::report(__FILE__, __LINE__, "a token that has no probability");
            Vec sorted = logits;
            std::sort(sorted.rbegin(), sorted.rend());
            if (!(logits[token] >= sorted[k - 1] - 1e-4))
                test::report(__FILE__, __LINE__,
                             format("token %zu of \"%s\" is not among the %d likeliest", i, text.c_str(), k));
            const auto likelier = [&](double x) { return x > logits[token] + 1e-4; };
            place = std::max<int>(place, std::count_if(sorted.begin(), sorted.end(), likelier) + 1);
            double sum = 0;
            for (int r = 0; r < k; r++) sum += std::exp((sorted[r] - sorted[0]) / temperature);
            surplus += (logits[token] == sorted[0]) - 1 / sum, variance += (1 - 1 / sum) / sum;
            context.push_back(token);
        }
    }
};

// Checks the lines that a run prints, word by word, against the rows of its log.
void check_lines(const std::string& text, const std::string& out, int steps, int tokens_per_step) {
    double mean_ms = 0;
    const auto expect = [&](const std::string& line) {
        if (!contains(text, line + "\n"))
            test::report(__FILE__, __LINE__, format("%s: not printed: %s", out.c_str(), line.c_str()));
    };
    for (const std::string& row : rows(out, "train")) {
        const int step = static_cast<int>(value(row, "step"));
        const double ms = value(row, "step_ms"), rate = value(row, "tokens_per_s");
        CHECK_NEAR(rate, tokens_per_step / (ms / 1000), 1e-9 * rate);
        CHECK(contains(row, "\"mfu_percent\": null"));
        mean_ms = step == 1 ? ms : mean_ms + (ms - mean_ms) / 20;
        const int eta = static_cast<int>((steps - step) * mean_ms / 1000);
        expect(format("step %d/%d | loss %.4f | norm %.4f | lr %.2e | %.1f ms | %.0f tok/s | MFU n/a | ETA %d:%02d",
                      step, steps, value(row, "loss_nats"), value(row, "grad_norm"), value(row, "lr"), ms, rate,
                      eta / 60, eta % 60));
    }
    for (const std::string& row : rows(out, "val"))
        expect(format("step %.0f/%d | val loss %.4f", value(row, "step"), steps, value(row, "loss_nats")));
    for (const std::string& row : rows(out, "hellaswag"))
        expect(format("step %.0f/%d | hellaswag %.0f of %.0f, %.2f%%", value(row, "step"), steps, value(row, "correct"),
                      value(row, "examples"), 100 * value(row, "correct") / value(row, "examples")));
    for (const std::string& row : rows(out, "sample"))
        expect(format("step %.0f/%d | sample\n---\n%s\n---", value(row, "step"), steps, text_of(row).c_str()));
}

// ---------------------------------------------------------------------------------------------------------------------
// The recipe

struct Recipe {
    std::string extra;     // options that change no number. Samples take the likeliest tokens
    int seed, B, windows;  // `windows` is for one step
    std::string schedule;
    int warmup;
    double lr, final_lr, weight_decay, beta2, max_norm;
    int val_every, val_batches, sample_every, sample_length;
    std::string prompt;
};
constexpr int kSteps = 24;

// dev/test_program sees that an option's long name and its letter set the same.
std::string options_of(const Recipe& r) {
    return r.extra +
           format(" --seed %d -b %d -d %d -k %s -u %d -l %g -q %g -c %g", r.seed, r.B, r.windows * T,
                  r.schedule.c_str(), r.warmup, r.lr, r.final_lr, r.weight_decay) +
           format(" --beta2 %g --max-norm %g -v %d -m %d -s %d -g %d --prompt '%s'", r.beta2, r.max_norm, r.val_every,
                  r.val_batches, r.sample_every, r.sample_length, r.prompt.c_str());
}

double rate(const Recipe& r, int step) {
    if (step < r.warmup) return r.lr / r.warmup * (step + 1);
    const double x = double(step - r.warmup) / (kSteps - 1 - r.warmup);  // 0 after warm-up, 1 at the last step
    const double low = r.lr * r.final_lr;
    if (r.schedule == "cosine") return low + (r.lr - low) * std::pow(std::cos(M_PI / 2 * x), 2);
    if (r.schedule == "linear") return low * x + r.lr * (1 - x);
    if (r.schedule == "wsd") return x < 0.8 ? r.lr : low + (r.lr - low) * 5 * (1 - x);
    return r.lr;
}

// Repeats the training in double and compares it with what the program wrote. `clipped` is how many steps must have
// been clipped, or −1 for some. Two ranks that share sequences answer no questions. One of them writes the samples
// alone, so it sees half as many tokens.
void check_recipe(const Recipe& r, const std::string& options, const std::string& out, int clipped) {
    const bool questions = !contains(options, "--context-parallel");
    const Result result = run(data_options() + val_options() + (questions ? question_options() : "") + "-e " +
                              model_file(kEndOften) + " " + options + format(" -x %d -o ", kSteps) + out);
    CHECK_RUN(result, 0, "checkpoint");
    check_lines(result.out, out, kSteps, r.windows * T);
    Gpt2 model(kEndOften);
    const Vec start = model.p;
    Vec m(kParameters), v(kParameters);

    size_t vals = 0, samples = 0;
    const auto row = [&](const char* kind, size_t i) {
        const std::vector<std::string> all = rows(out, kind);
        return i < all.size() ? all[i] : std::string();
    };
    const auto watch = [&](int step) {
        if (step % r.val_every == 0 || step == kSteps) {
            std::vector<int> windows(std::min(r.val_batches, kValWindows / r.B) * r.B);
            std::iota(windows.begin(), windows.end(), 0);
            CHECK_NEAR(value(row("val", vals), "step"), step, 0);
            CHECK_NEAR(value(row("val", vals), "loss_nats"), model.mean_loss(val_tokens(), windows), 5e-6);
            int correct = 0;
            for (const Choice& c : make_choices()) correct += model.answer(c) == c.label;
            if (questions) CHECK_NEAR(value(row("hellaswag", vals), "step"), step, 0);
            if (questions) CHECK_NEAR(value(row("hellaswag", vals), "correct"), correct, 0);
            vals++;
        }
        if (step > 0 && (step % r.sample_every == 0 || step == kSteps)) {
            CHECK_NEAR(value(row("sample", samples), "step"), step, 0);
            SampleCheck{model, questions ? T : T / 2, 1}(r.prompt, text_of(row("sample", samples)), r.sample_length);
            samples++;
        }
    };
    watch(0);
    int found_clipped = 0;
    for (int step = 0; step < kSteps; step++) {
        const auto first = order_of(r.seed).begin() + step * r.windows;
        const std::vector<int> windows(first, first + r.windows);
        const double loss = model.mean_loss(train_tokens(), windows);
        const Vec g = model.gradient(train_tokens(), windows);
        double norm = 0;
        for (double x : g) norm += x * x;
        norm = std::sqrt(norm);
        const std::string logged = row("train", step);
        CHECK_NEAR(value(logged, "step"), step + 1, 0);
        CHECK_NEAR(value(logged, "loss_nats"), loss, 5e-6);
        CHECK_NEAR(value(logged, "grad_norm"), norm, 1e-5 * norm);
        CHECK_NEAR(value(logged, "lr"), rate(r, step), 1e-6 * rate(r, step));
        const double clip = r.max_norm > 0 && norm > r.max_norm ? r.max_norm / norm : 1;
        found_clipped += clip < 1;
        for (int t = WTE; t <= LNFB; t++)
            for (size_t i = offset_of(t); i < offset_of(t) + kTensors[t].size * kTensors[t].layers; i++) {
                m[i] = 0.9 * m[i] + 0.1 * clip * g[i];
                v[i] = r.beta2 * v[i] + (1 - r.beta2) * std::pow(clip * g[i], 2);
                const double m_hat = m[i] / (1 - std::pow(0.9, step + 1)),
                             v_hat = v[i] / (1 - std::pow(r.beta2, step + 1));
                const double decay = kTensors[t].decays ? r.weight_decay * model.p[i] : 0;
                model.p[i] -= rate(r, step) * (m_hat / (std::sqrt(v_hat) + 1e-8) + decay);
            }
        watch(step + 1);
    }
    CHECK(row("train", kSteps).empty() && row("val", vals).empty() && row("sample", samples).empty());
    CHECK(clipped < 0 ? found_clipped > 2 && found_clipped < kSteps - 2 : found_clipped == clipped);

    // For each tensor this compares how far the parameters went, and both moments.
    const Vec end = floats_at_the_end(model_path(out, kSteps), kParameters),
              moments = floats_at_the_end(state_path(out, kSteps), 2 * kParameters);
    for (int t = WTE; t <= LNFB; t++)
        for (size_t l = 0; l < kTensors[t].layers; l++) {
            const size_t at = offset_of(t, l), n = kTensors[t].size;
            Vec went(n), wanted(n);
            for (size_t i = 0; i < n; i++) {
                if (t == QKVB && i / C == 1) continue;  // a key's bias gradient is only rounding, which AdamW blows up
                went[i] = end[at + i] - start[at + i], wanted[i] = model.p[at + i] - start[at + i];
            }
            const auto check = [&](const char* what, const double* got, const double* want, double tolerance) {
                const double error = apart(got, want, n);
                if (!(error <= tolerance))
                    test::report(__FILE__, __LINE__,
                                 format("%s: %s %s of layer %zu: relative error %.1e > %.1e", out.c_str(),
                                        kTensors[t].name, what, l, error, tolerance));
            };
            check("updates", went.data(), wanted.data(), 1e-4);
            check("m", &moments[at], &m[at], 2e-5);
            check("v", &moments[kParameters + at], &v[at], 2e-5);
        }
}

}  // namespace

// The first four have no option at its default, and the last has all at their defaults. A largest norm of 2e-5 makes
// gradients so small that AdamW's ε matters.
TEST(training_follows_the_recipe) {
    const Recipe defaults = {"--temperature 0", 1, 4, 4, "cosine", 8, 2e-3, 0.1, 0.1, 0.95, 1, 2, 20, 4, 700, ""};
    const struct {
        Recipe recipe;
        int clipped;
    } cases[] = {
        {{"--temperature 0", 5, 2, 6, "cosine", 4, 0.008, 0.3, 0.4, 0.8, 2e-5, 6, 3, 7, 9, "OnceIn"}, kSteps},
        {{"--top-k 1 --gpus 4 --zero 0 --context-parallel 2", 5, 3, 6, "linear", 1, 0.004, 0.2, 0.7, 0.9, 1.7, 9, 2, 5,
          12, "Xy"},
         -1},
        {{"--top-k 1 --gpus 2 --overlap 1", 5, 1, 4, "wsd", 3, 0.003, 0.4, 0.2, 0.99, 1.7, 12, 7, 12, 5, "a"}, -1},
        {{"--temperature 0", 1, 1, 2, "constant", 2, 0.002, 0.5, 0.3, 0.9, 0, 8, 20, 24, 20, "So"}, 0},
    };
    int i = 0;
    for (const auto& c : cases)
        check_recipe(c.recipe, options_of(c.recipe), dir() + format("/recipe_%d", i), c.clipped), i++;
    check_recipe(defaults, defaults.extra, dir() + "/defaults", kSteps);
}

// Each epoch has each window once, in an order that depends on the seed and the epoch. With --no-shuffle and --overfit
// it does not.
TEST(order_of_the_data) {
    std::set<std::vector<int>> orders;
    for (int seed : {1, 5})
        for (auto epoch = order_of(seed).begin(); epoch != order_of(seed).end(); epoch += kTrainWindows) {
            std::vector<int> order(epoch, epoch + kTrainWindows);
            CHECK(orders.insert(order).second && !std::is_sorted(order.begin(), order.end()));
            std::sort(order.begin(), order.end());
            for (int w = 0; w < kTrainWindows; w++) CHECK(order[w] == w);
        }
    const std::vector<int> plain = windows_of("-s 0 --no-shuffle", kTrainWindows + 5, dir() + "/plain");
    for (size_t i = 0; i < plain.size(); i++) CHECK(plain[i] == int(i) % kTrainWindows);
    CHECK(windows_of("-s 0 --overfit --seed 5", 4, dir() + "/overfit") == std::vector<int>(4, order_of(5)[0]));
}

// A sample takes each token as often as it is likely after all that the model sees, which is the prompt and the last T
// tokens.
TEST(samples_follow_the_model) {
    Gpt2 model(kNoEnd);
    const std::string generate = "--device cpu -e " + model_file(kNoEnd) + " --generate 250 ";
    std::set<std::string> texts;
    const struct {
        const char *options, *prompt;
        int T, k, most;  // `most` is the place of the least likely token to expect, from 1
        double temperature;
    } cases[] = {{"--seed 1 --temperature 0.5 --top-k 3 --prompt Fox ", "Fox", kPositions, 3, 3, 0.5},
                 {"--seed 2 --temperature 0.5 --top-k 3 --prompt Fox -t 8 ", "Fox", 8, 3, 3, 0.5},
                 {"--seed 1 --temperature 2 --top-k 5 --prompt Fax ", "Fax", kPositions, 5, 5, 2},
                 {"--seed 2 --temperature 0 ", "", kPositions, 1, 1, 1},
                 {"", "", kPositions, V, 20, 1},
                 {"--seed 2 ", "", kPositions, V, 20, 1}};
    std::string last;
    for (const auto& c : cases) {
        const Result r = run(generate + c.options);
        CHECK_RUN(r, 0, c.prompt);
        last = r.out.substr(0, r.out.find('\n'));
        texts.insert(last);
        SampleCheck check{model, c.T, c.k, c.temperature};
        check(c.prompt, last, 250);
        CHECK(check.tokens == 250 && (c.k == V ? check.place >= c.most : check.place == c.most));
        CHECK_NEAR(check.surplus, 0, 4 * std::sqrt(check.variance));
    }
    CHECK(texts.size() == 6);
    CHECK(run(generate + "--seed 2 ").out == last + "\n");
    // Prints nothing that a terminal takes for a command.
    const Result orders = run(generate + "--prompt '\x1b[2J'");
    CHECK_RUN(orders, 0, "[2J");
    CHECK(!contains(orders.out, "\x1b"));

    // In a run whose weights stand still each step and each seed gives another sample. Some end by themselves.
    texts.clear();
    size_t ended = 0;
    model = Gpt2(kEndOften);
    for (int seed : {1, 5}) {
        order_of(seed);  // the run
        for (const std::string& row : rows(order_folder(seed), "sample")) {
            SampleCheck{model, T, V}("", text_of(row), 30);
            texts.insert(text_of(row)), ended += text_of(row).size() < 30;
        }
    }
    CHECK(texts.size() == 10 && ended > 0 && ended < 10);
}

// --eval-only prints the loss over all whole batches, or over -m of them, and the loss of each ending.
TEST(evaluation_says_what_the_model_loses) {
    Gpt2 model(kEndOften);
    const std::string base = format("--device cpu --eval-only -b 3 -t %d -e ", T) + model_file(kEndOften) + " ",
                      data = base + val_options();
    const struct {
        std::string options;
        int batches;
        bool questions;
    } cases[] = {{data + question_options(), kValWindows / 3, true},
                 {data + question_options() + "-m 2 --gpus 3", 2, true},
                 {data + "-m 5 --gpus 4 --context-parallel 2", 5, false},
                 {base + "-b 1 " + val_options(), kValWindows, false},  // all batches, although training takes 20
                 {base + question_options(), 0, true}};
    for (const auto& c : cases) {
        const int B = contains(c.options, "-b 1") ? 1 : 3;
        const Result r = run(c.options);
        std::vector<int> windows(c.batches * B);
        std::iota(windows.begin(), windows.end(), 0);
        CHECK_RUN(r, 0, c.batches ? format("over %d batches of %d x %d tokens\n", c.batches, B, T).c_str() : "");
        if (c.batches) CHECK_NEAR(number_after(r.out, "val loss "), model.mean_loss(val_tokens(), windows), 5e-6);
        CHECK(contains(r.out, "val loss") == (c.batches > 0) && contains(r.out, "hellaswag") == c.questions);
        if (!c.questions) continue;
        int correct = 0;
        for (const Choice& q : make_choices()) {
            const int answer = model.answer(q);
            const std::string line = format("question %d | answer %d | label %d | losses", q.index, answer, q.label);
            correct += answer == q.label;
            const size_t at = r.out.find(line);
            if (at == std::string::npos) throw Error("expected " + line);
            std::istringstream losses(r.out.substr(at + line.size(), r.out.find('\n', at) - at - line.size()));
            for (const Tokens& ending : q.endings) {
                double loss = NAN;
                losses >> loss;
                CHECK_NEAR(loss, model.ending_loss(q.context, ending), 5e-6);
            }
        }
        CHECK(contains(r.out, format("hellaswag %d of 7, %.2f%%\n", correct, correct / 0.07)));
    }
    // Questions longer than T do not fit into a batch, here or in training.
    for (const std::string& how : {std::string("--eval-only "), "-x 1 " + data_options() + "-t 8 "})
        CHECK_RUN(run("--device cpu -t 8 " + how + question_options() + "-e " + model_file(kEndOften)), 1,
                  "length of an example");
}

// Checks what a new model starts from, and that steps take as long as the log says, by a clock outside the program.
TEST(a_new_model_starts_as_gpt2_does) {
    const std::string options =
        "--device cpu -e tiny -v 0 -s 0 -l 1e-30 -i " + write_shard(dir() + "/train.bin", train_tokens());
    Vec weights[2];
    for (int seed : {1, 2}) {
        const std::string out = dir() + format("/new_%d", seed);
        const int steps = seed == 1 ? 24 : 1;
        std::vector<Clock::time_point> seen;
        const Result r = shell("./train_gpt2cu " + options + format(" --seed %d -x %d -o ", seed, steps) + out,
                               [&](const std::string& line) {
                                   if (line.find("step ") == 0) seen.push_back(Clock::now());
                               });
        check_lines(r.out, out, steps, 256);
        const Vec ms = values(out, "train", "step_ms");
        if (r.code || seen.size() != size_t(steps) || ms.size() != seen.size()) throw Error("steps are missing");
        if (steps > 1) {
            const double ratio = std::accumulate(ms.begin() + 1, ms.end(), 0.0) /
                                 std::chrono::duration<double, std::milli>(seen.back() - seen.front()).count();
            CHECK(ratio > 0.7 && ratio < 1.4);
        }
        const std::string row = rows(out, "run").at(0);  // logs defaults too
        CHECK(contains(row, format("\"B\": 4, \"T\": 64, \"tokens_per_step\": 256, \"steps\": %d, \"seed\": %d, "
                                   "\"gpus\": 1",
                                   steps, seed)));

        const std::vector<int32_t> header = {20240326, 3, 256, 257, 4, 2, 128, 384};  // the tiny model
        CHECK(read_file(model_path(out, steps)).find(bytes_of(header)) == 0);
        Vec& w = weights[seed - 1];
        w = floats_at_the_end(model_path(out, steps), static_cast<size_t>(value(row, "parameters")));
        const double* at = w.data();
        Vec before(4 * 128 * 128);  // of another matrix, because no two may be correlated
        for (const TensorInFile& t : tensors_in_file(256, 384, 4, 128))
            for (size_t l = 0; l < t.layers; l++, at += t.size) {
                const std::string name = t.name;
                if (!t.decays) {
                    const double want = name == "ln1w" || name == "ln2w" || name == "lnfw";
                    for (size_t i = 0; i < t.size; i++) CHECK_NEAR(at[i], want, 1e-20);
                    continue;
                }
                const size_t n = name == "wte" ? 257 * 128 : t.size;
                for (size_t i = n; i < t.size; i++) CHECK(at[i] == 0);  // rows that pad the vocabulary
                const double sigma = name == "attprojw" || name == "fcprojw" ? 0.02 / std::sqrt(8.0) : 0.02;
                // The normal distribution's first four moments, and the variances of their estimates.
                const double expected[5] = {1, 0, 1, 0, 3}, variance[5] = {0, 1, 2, 15, 96};
                double moments[5] = {}, with_before = 0;
                for (size_t i = 0; i < n; i++) {
                    for (int k = 1; k < 5; k++) moments[k] += std::pow(at[i] / sigma, k) / n;
                    if (i < before.size()) with_before += at[i] / sigma * before[i] / n;
                }
                for (int k = 1; k < 5; k++) CHECK_NEAR(moments[k], expected[k], 5 * std::sqrt(variance[k] / n));
                CHECK_NEAR(with_before, 0, 5 / std::sqrt(n));
                for (size_t i = 0; i < std::min(n, before.size()); i++) before[i] = at[i] / sigma;
            }
        CHECK(at == w.data() + w.size());
    }
    double together = 0;  // of the two seeds' wte
    for (size_t i = 0; i < 257 * 128; i++) together += weights[0][i] / 0.02 * weights[1][i] / 0.02;
    CHECK_NEAR(together, 0, 5 * std::sqrt(257.0 * 128));
}

// This run is so long that its end is minutes away. A token in the fourth window that no model knows ends it, in that
// window's step, although batches are prepared a step ahead.
TEST(a_long_run_says_when_it_ends) {
    Tokens tokens = train_tokens();
    tokens[3 * T + 5] = 999;
    const std::string out = dir() + "/long";
    const std::string command = format("--device cpu --no-shuffle -b 1 -t %d -l 0.5 -e ", T) + model_file(kEndOften) +
                                " -i " + write_shard(dir() + "/late.bin", tokens) + " ";
    CHECK_RUN(run(command + "-v 0 -x 3"), 0, "step 3/3");  // the fourth window is read ahead, but not used
    const Result r = run(command + "-x 4000000 -o " + out);
    CHECK_RUN(r, 1, "999");
    check_lines(r.out, out, 4000000, T);
    const Vec lr = values(out, "train", "lr");
    CHECK(lr.size() == 3);
    for (size_t i = 0; i < lr.size(); i++) CHECK_NEAR(lr[i], 0.5 * (i + 1) / 200000, 1e-12);  // a twentieth warms up
    CHECK(!contains(r.out, "ETA 0:"));
}

TEST_MAIN
