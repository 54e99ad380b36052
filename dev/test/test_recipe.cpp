// Tests the recipe from end to end. ./train_gpt2cu trains a small model with every option away from
// its default, alone and on several ranks. What it logs, prints, samples and saves is compared with
// fp64 loops of this file. They repeat the model, clipping, AdamW, decay, schedules, validation and
// sampling. Three things are shared with the program. The layers are layers/cpu in double, which
// dev/test_reference checks. The gradient is that of the program's model in double, which
// dev/test_gpt2 checks against finite differences. The order of data is the loader's
// (dev/test_data).
#define TRAIN_GPT2_NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"  // parts of the program stay unused here
#include <climits>
#include <iterator>
#include <numeric>
#include <set>

// First, because what follows is made for it.
#include "train_gpt2.cu"

#include "dev/test/small_model.h"

namespace {

using Vec = std::vector<double>;
using Tokens = std::vector<int>;

// -------------------------------------------------------------------------------------------------
// The model is GPT-2 in double

struct Gpt2 {
    Vec p;
    Cpu cpu{1};
    explicit Gpt2(double end) {
        for (float x : make_weights(end))
            p.push_back(x);
    }
    const double* w(int t, int l = 0) const { return p.data() + offset_of(t, l); }

    // What follows each of n tokens: a row of Vp logits.
    Vec logits(const int* tokens, int n) {
        const size_t N = n;
        Vec x(N * C);
        Vec ln(N * C);
        Vec mean(N);
        Vec rstd(N);
        Vec qkv(N * 3 * C);
        Vec atty(N * C);
        Vec lse(N * NH);
        Vec fch(N * 4 * C);
        Vec act(N * 4 * C);
        Vec out(N * C);
        Vec logits(N * Vp);
        const auto layernorm = [&](int t, int l) {
            layernorm_forward(cpu, ln.data(), mean.data(), rstd.data(), x.data(), w(t, l),
                              w(t + 1, l), N, C);
        };
        const auto add_linear = [&](const Vec& from, int t, int l) {
            matmul_forward(cpu, out.data(), from.data(), w(t, l), w(t + 1, l), N, from.size() / N,
                           C);
            for (size_t i = 0; i < x.size(); i++)
                x[i] += out[i];
        };
        encoder_forward(cpu, x.data(), tokens, w(WTE), w(WPE), 1, n, C);
        for (int l = 0; l < L; l++) {
            layernorm(LN1W, l);
            matmul_forward(cpu, qkv.data(), ln.data(), w(QKVW, l), w(QKVB, l), N, C, 3 * C);
            attention_forward<double>(cpu, Attention::flash, atty.data(), lse.data(), nullptr,
                                      qkv.data(), 1, n, n, NH, HS);
            add_linear(atty, ATTPROJW, l);
            layernorm(LN2W, l);
            matmul_forward(cpu, fch.data(), ln.data(), w(FCW, l), w(FCB, l), N, C, 4 * C);
            activation_forward(cpu, act.data(), fch.data(), N * 4 * C);
            add_linear(act, FCPROJW, l);
        }
        layernorm(LNFW, 0);
        matmul_forward<double>(cpu, logits.data(), ln.data(), w(WTE), nullptr, N, C, Vp);
        return logits;
    }
    // The loss of each of n tokens. Its target is the one behind it.
    Vec losses(const int* tokens, int n) {
        Vec rows = logits(tokens, n);
        Vec losses(n);
        classifier(cpu, rows.data(), losses.data(), tokens + 1, 0.0, n, V, Vp);
        return losses;
    }
    // The mean loss of some windows of T + 1 tokens.
    double mean_loss(const std::vector<Tokens>& windows) {
        double sum = 0;
        for (const Tokens& window : windows)
            for (double x : losses(window.data(), T))
                sum += x;
        return sum / T / windows.size();
    }
    // Its gradient.
    Vec gradient(const std::vector<Tokens>& windows) {
        const int B = windows.size();
        GPT2<Cpu, double> model(cpu, {kPositions, V, Vp, L, NH, C},
                                {.B = B, .T = T, .training = true});
        model.allocate();
        std::copy(p.begin(), p.end(), model.weights().wte);
        std::vector<int> batch(model.batch_ints());
        for (int i = 0; i < B; i++) {
            std::copy_n(&windows[i][0], T, &batch[i * T]);
            std::copy_n(&windows[i][1], T, &batch[(B + i) * T]);
        }
        encoder_plan(cpu, &batch[2 * B * T], batch.data(), B * T);
        model.upload(batch.data(), 1);
        model.train_micro_batches();
        return Vec(model.gradients().wte, model.gradients().wte + kParameters);
    }
    // The mean loss of each ending's tokens, without the context's. The answer is the ending with
    // the least.
    Vec ending_losses(const Choice& c) {
        Vec means;
        for (const Tokens& ending : c.endings) {
            Tokens text = c.context;
            text.insert(text.end(), ending.begin(), ending.end());
            const Vec all = losses(text.data(), text.size() - 1);
            means.push_back(std::accumulate(all.end() - ending.size(), all.end(), 0.0) /
                            ending.size());
        }
        return means;
    }
};
int answer_of(const Vec& losses) {
    return static_cast<int>(std::min_element(losses.begin(), losses.end()) - losses.begin());
}

// -------------------------------------------------------------------------------------------------
// What the runs read: token shards and questions

// A few tokens after the last whole window belong to no window.
constexpr int kTrainWindows = 20, kValWindows = 23;
const Tokens kTrain = make_tokens(kTrainWindows * T + 6, 1),
             kVal = make_tokens(kValWindows * T + 4, 2);

std::vector<Tokens> val_windows(int n) {
    std::vector<Tokens> windows;
    for (int w = 0; w < n; w++)
        windows.emplace_back(&kVal[w * T], &kVal[w * T] + T + 1);
    return windows;
}
const std::vector<Choice> kChoices = [] {
    std::vector<Choice> choices(7);
    for (int i = 0; i < 7; i++) {
        choices[i].index = i;
        choices[i].label = (i * 5 + 1) % 4;
        choices[i].context = make_tokens(3 + i, 30 + i);
        for (int e = 0; e < 4; e++)
            choices[i].endings.push_back(make_tokens(2 + (i + 3 * e) % 5, 50 + 4 * i + e));
    }
    write_choices(dir() + "/choices.bin", choices);
    return choices;
}();

// The options that name them.
const std::string kTrainOptions =
    format("--device cpu -t %d -i ", T) + write_shard(dir() + "/train.bin", kTrain) + " ";
const std::string kValOptions = "-j " + write_shard(dir() + "/val.bin", kVal) + " ";
const std::string kQuestionOptions = "--hellaswag " + dir() + "/choices.bin ";
const std::string kModelOptions = "-e " + model_file(kEndOften) + " ";

// -------------------------------------------------------------------------------------------------
// What the runs write

std::string text_of(const std::string& row) {
    const std::string key = "\"text\": \"";
    const size_t begin = row.find(key) + key.size();
    return row.substr(begin, row.rfind('"') - begin);
}

Vec floats_at_the_end(const std::string& path, size_t n) {
    const std::string bytes = read_file(path);
    std::vector<float> x(n);
    if (bytes.size() < n * sizeof(float))
        throw Error(path + " is too short");
    std::memcpy(x.data(), bytes.data() + bytes.size() - n * sizeof(float), n * sizeof(float));
    return Vec(x.begin(), x.end());
}

// Walks along a sample of up to n tokens. Each must be one of the k likeliest after those before
// it. If a sample is shorter than n, the end of the text must have been one of them too. Returns
// the place of the least likely, from 1. dev/test_gpt2 sees how often each token is drawn.
int check_sample(Gpt2& model, int T, int k, const std::string& prompt, const std::string& text,
                 int n) {
    int place = 0;
    CHECK(text.compare(0, prompt.size(), prompt) == 0 && text.size() <= prompt.size() + n);
    Tokens context = {kEnd};
    for (char c : prompt)
        context.push_back(c - '!');
    // tokens that the model sees: all, and of a text that outgrows T the last half and what follows
    size_t seen = 0;
    for (size_t i = prompt.size(); i < std::min(text.size() + 1, prompt.size() + n); i++) {
        const int token = i < text.size() ? text[i] - '!' : kEnd;
        seen = i == prompt.size() ? context.size() : seen < size_t(T) ? seen + 1 : (T + 1) / 2;
        const Vec logits =
            model.logits(context.data() + context.size() - seen, static_cast<int>(seen));
        const double* const last = &logits.at(logits.size() - Vp);
        if (token < 0 || token >= V)
            throw Error("a token that has no probability");
        const auto likelier = [&](double x) { return x > last[token] + 1e-4; };
        place = std::max<int>(place, std::count_if(last, last + V, likelier) + 1);
        if (place > k)
            test::report(__FILE__, __LINE__,
                         format("token %zu of \"%s\" has place %d", i, text.c_str(), place));
        context.push_back(token);
    }
    return place;
}

// Checks the lines that a run prints against the rows of its log.
void check_lines(const std::string& text, const std::string& out, int steps, int tokens_per_step) {
    for (const char* kind : {"train", "val"})
        for (const std::string& row : rows(out, kind)) {
            const double ms = value(row, "step_ms");
            const double rate = value(row, "tokens_per_s");
            const double loss = value(row, "loss_nats");
            std::string line = format("val loss %.4f\n", loss);
            if (*kind == 't') {
                CHECK_NEAR(rate, tokens_per_step / (ms / 1000), 1e-9 * rate);
                CHECK(contains(row, "\"mfu_percent\": null"));
                line = format(
                    "loss %.4f | norm %.4f | lr %.2e | %.1f ms | %.0f tok/s | MFU n/a | ETA ", loss,
                    value(row, "grad_norm"), value(row, "lr"), ms, rate);
            }
            line = format("step %.0f/%d | ", value(row, "step"), steps) + line;
            if (!contains(text, line))
                test::report(__FILE__, __LINE__, out + ": not printed: " + line);
        }
}

// -------------------------------------------------------------------------------------------------
// The recipe

constexpr int kSteps = 24;

double rate(const Options& o, int step) {
    if (step < o.warmup)
        return o.lr / o.warmup * (step + 1);
    // 0 after warm-up, 1 at the last step
    const double x = double(step - o.warmup) / (kSteps - 1 - o.warmup);
    const double low = o.lr * o.final_lr;
    if (o.schedule == "cosine")
        return low + (o.lr - low) * std::pow(std::cos(M_PI / 2 * x), 2);
    if (o.schedule == "linear")
        return low * x + o.lr * (1 - x);
    // llm.c's wsd falls from step 19 of 24 on, because 19 is the whole part of 0.8·24.
    if (o.schedule == "wsd" && step > 19)
        return low + (o.lr - low) * (1 - std::sqrt((step - 19) / 5.0));
    return o.lr;
}

// Repeats the training in double and compares it with what the program wrote. `meant` are the
// options of the run, those at their defaults too. `clipped` is how many steps must have been
// clipped, or −1 for some. Two ranks that share sequences answer no questions. One of them writes
// the samples alone, so it sees half as many tokens.
void check_recipe(const std::string& options, const std::string& meant, const std::string& out,
                  int clipped) {
    std::istringstream words(meant);
    const Options o = options_of({std::istream_iterator<std::string>(words), {}});
    const bool questions = o.context_parallel == 1;
    const Result result = run(kTrainOptions + kValOptions + (questions ? kQuestionOptions : "") +
                              kModelOptions + options + format(" -x %d -o ", kSteps) + out);
    CHECK_RUN(result, 0, "checkpoint");
    check_lines(result.out, out, kSteps, o.tokens_per_step);
    Gpt2 model(kEndOften);
    const Vec start = model.p;
    Vec m(kParameters);
    Vec v(kParameters);

    size_t vals = 0;
    size_t samples = 0;
    const auto row = [&](const char* kind, size_t i) {
        const std::vector<std::string> all = rows(out, kind);
        return i < all.size() ? all[i] : std::string();
    };
    const auto watch = [&](int step) {
        if (step % o.val_every == 0 || step == kSteps) {
            const int windows =
                o.val_batches < 0 ? kValWindows : std::min(o.val_batches * o.B, kValWindows);
            CHECK_NEAR(value(row("val", vals), "step"), step, 0);
            CHECK_NEAR(value(row("val", vals), "loss_nats"), model.mean_loss(val_windows(windows)),
                       5e-6);
            int correct = 0;
            for (const Choice& c : kChoices)
                correct += answer_of(model.ending_losses(c)) == c.label;
            if (questions)
                CHECK_NEAR(value(row("hellaswag", vals), "step"), step, 0);
            if (questions)
                CHECK_NEAR(value(row("hellaswag", vals), "correct"), correct, 0);
            vals++;
        }
        if (step > 0 && (step % o.sample_every == 0 || step == kSteps)) {
            CHECK_NEAR(value(row("sample", samples), "step"), step, 0);
            check_sample(model, T / o.context_parallel, 1, o.prompt,
                         text_of(row("sample", samples)), o.sample_length);
            samples++;
        }
    };
    watch(0);
    Loader data(dir() + "/train.bin",
                {.T = T, .vocab = V, .shuffle = !o.no_shuffle, .seed = uint64_t(o.seed)});
    std::vector<Tokens> windows;
    int found_clipped = 0;
    for (int step = 0; step < kSteps; step++) {
        if (step == 0 || !o.overfit) {
            windows.assign(o.tokens_per_step / T, Tokens(T + 1));
            for (Tokens& window : windows) {
                Tokens targets(T);
                data.next(window.data(), targets.data());
                window[T] = targets[T - 1];
            }
        }
        const double loss = model.mean_loss(windows);
        const Vec g = model.gradient(windows);
        double norm = 0;
        for (double x : g)
            norm += x * x;
        norm = std::sqrt(norm);
        const std::string logged = row("train", step);
        CHECK_NEAR(value(logged, "step"), step + 1, 0);
        CHECK_NEAR(value(logged, "loss_nats"), loss, 5e-6);
        CHECK_NEAR(value(logged, "grad_norm"), norm, 1e-5 * norm);
        CHECK_NEAR(value(logged, "lr"), rate(o, step), 1e-6 * rate(o, step));
        const double clip = o.max_norm > 0 && norm > o.max_norm ? o.max_norm / norm : 1;
        found_clipped += clip < 1;
        for (int t = WTE; t <= LNFB; t++)
            for (size_t i = offset_of(t); i < offset_of(t) + kTensors[t].size * kTensors[t].layers;
                 i++) {
                m[i] = 0.9 * m[i] + 0.1 * clip * g[i];
                v[i] = o.beta2 * v[i] + (1 - o.beta2) * std::pow(clip * g[i], 2);
                const double m_hat = m[i] / (1 - std::pow(0.9, step + 1));
                const double v_hat = v[i] / (1 - std::pow(o.beta2, step + 1));
                const double decay = kTensors[t].decays ? o.weight_decay * model.p[i] : 0;
                model.p[i] -= rate(o, step) * (m_hat / (std::sqrt(v_hat) + 1e-8) + decay);
            }
        watch(step + 1);
    }
    CHECK(row("train", kSteps).empty() && row("val", vals).empty() &&
          row("sample", samples).empty());
    CHECK(clipped < 0 ? found_clipped > 2 && found_clipped < kSteps - 2 : found_clipped == clipped);

    // For each tensor this compares how far the parameters went, and both moments.
    const Vec end = floats_at_the_end(model_path(out, kSteps), kParameters);
    const Vec moments = floats_at_the_end(state_path(out, kSteps), 2 * kParameters);
    for (int t = WTE; t <= LNFB; t++)
        for (size_t l = 0; l < kTensors[t].layers; l++) {
            const size_t at = offset_of(t, l);
            const size_t n = kTensors[t].size;
            Vec went(n);
            Vec wanted(n);
            for (size_t i = 0; i < n; i++) {
                // a key's bias gradient is only rounding, which AdamW blows up
                if (t == QKVB && i / C == 1)
                    continue;
                went[i] = end[at + i] - start[at + i];
                wanted[i] = model.p[at + i] - start[at + i];
            }
            const auto check = [&](const char* what, const double* got, const double* want,
                                   double tolerance) {
                double d = 0;
                double sum = 0;
                for (size_t i = 0; i < n; i++) {
                    d += std::pow(got[i] - want[i], 2);
                    sum += want[i] * want[i];
                }
                const double error = std::sqrt(sum > 0 ? d / sum : d);
                if (!(error <= tolerance))
                    test::report(__FILE__, __LINE__,
                                 format("%s: %s %s of layer %zu: relative error %.1e > %.1e",
                                        out.c_str(), kTensors[t].name, what, l, error, tolerance));
            };
            check("updates", went.data(), wanted.data(), 1e-4);
            check("m", &moments[at], &m[at], 2e-5);
            check("v", &moments[kParameters + at], &v[at], 2e-5);
        }
}

}  // namespace

// All but the last have no option at its default, and the last has all at their defaults. Ranks are
// grouped in each way. A largest norm of 2e-5 makes gradients so small that AdamW's ε matters.
// Samples take the likeliest tokens.
TEST(gate_baseline_training_follows_the_recipe) {
    const struct {
        int clipped;
        std::string given, meant = "";  // if it is not the same
    } cases[] = {{kSteps,
                  "--temperature 0 --gpus 4 --zero 0 --overlap 1 --seed 5 -b 2 -d 256 -k cosine -u "
                  "4 -l 0.008 -q 0.3 -c 0.4 "
                  "--beta2 0.8 --max-norm 2e-5 -v 6 -m 3 -s 7 -g 9 --prompt OnceIn"},
                 {-1,
                  "--top-k 1 --gpus 4 --zero 1 --overlap 1 --context-parallel 2 --seed 5 -b 3 -d "
                  "192 -k linear -u 1 -l 0.004 "
                  "-q 0.2 -c 0.7 --beta2 0.9 --max-norm 1.02 -v 9 -m 2 -s 5 -g 12 --prompt Xy"},
                 {-1,
                  "--overfit --top-k 1 --gpus 2 --overlap 0 --seed 5 -b 1 -d 64 -k wsd -u 3 -l "
                  "0.003 -q 0.4 -c 0.2 --beta2 0.99 "
                  "--max-norm 1.7 -v 12 -m 7 -s 12 -g 5 --prompt a"},
                 {0,
                  "--no-shuffle --temperature 0 --seed 1 -b 1 -d 32 -k constant -u 2 -l 0.002 -q "
                  "0.5 -c 0.3 --beta2 0.9 "
                  "--max-norm 0 -v 8 -m -1 -s 24 -g 20 --prompt So"},
                 {-1,
                  "--top-k 1 --gpus 4 --zero 0 --context-parallel 4 --seed 2 -b 2 -d 64 -k linear "
                  "-u 3 -l 0.002 -q 0.9 -c 0.1 "
                  "--beta2 0.9 --max-norm 1.7 -v 10 -m 2 -s 20 -g 4 --prompt b"},
                 {kSteps, "--temperature 0",
                  "-b 4 -d 64 -u 8 -l 2e-3 -q 0.1 -k cosine -c 0.1 --beta2 0.95 --max-norm 1 "
                  "--seed 1 -v 2 -m 20 -s 20 -g 700"}};
    int i = 0;
    for (const auto& [clipped, given, meant] : cases)
        check_recipe(given, meant.empty() ? given : meant, dir() + format("/recipe_%d", i++),
                     clipped);
}

// A sample takes tokens that are likely after all that the model sees.
TEST(samples_follow_the_model) {
    Gpt2 model(kNoEnd);
    const std::string generate = "--device cpu -e " + model_file(kNoEnd) + " --generate 250 ";
    std::set<std::string> texts;
    const struct {
        const char *options, *prompt;
        int T, k, most;  // `most` is the place of the least likely token to expect, from 1
    } cases[] = {{"--seed 1 --temperature 0.5 --top-k 3 --prompt Fox ", "Fox", kPositions, 3, 3},
                 {"--seed 2 --temperature 0.5 --top-k 3 --prompt Fox -t 8 ", "Fox", 8, 3, 3},
                 {"--seed 1 --temperature 2 --top-k 5 --prompt Fax ", "Fax", kPositions, 5, 5},
                 {"--seed 2 --temperature 0 ", "", kPositions, 1, 1},
                 {"", "", kPositions, V, 20},
                 {"--seed 2 ", "", kPositions, V, 20}};
    std::string last;
    for (const auto& c : cases) {
        last = run(generate + c.options + "2>/dev/null").out;
        texts.insert(last);
        const int place =
            check_sample(model, c.T, c.k, c.prompt, last.substr(0, last.size() - 1), 250);
        CHECK(last.size() == std::strlen(c.prompt) + 251 &&
              (c.k == V ? place >= c.most : place == c.most));
    }
    CHECK(texts.size() == 6 && run(generate + "--seed 2 2>/dev/null").out == last);
}

// The second text after the largest seed has the seed after it, which is no int.
TEST(seeds_of_samples_pass_the_largest_int) {
    const Cpu one_thread(1);
    GPT2<Cpu, float> model(one_thread, {kPositions, V, Vp, L, NH, C},
                           {.B = 1, .T = kPositions, .cache = true});
    model.allocate();
    load(model, model_file(kNoEnd));
    const Tokenizer bytes;
    std::string expected;
    for (const uint64_t seed : {uint64_t(INT_MAX), uint64_t(INT_MAX) + 1}) {
        expected += expected.empty() ? "" : "---\n";
        expected += generate(model, bytes, start_of_text(bytes, "", V), 60, {}, seed) + "\n";
    }
    const std::string command =
        "--device cpu -e " + model_file(kNoEnd) + " --generate 60 --samples 2 ";
    CHECK(run(command + format("--seed %d 2>/dev/null", INT_MAX)).out == expected);

    // What is counted at the end are its tokens, without the prompts.
    CHECK_RUN(run(command + "--prompt Once"), 0, "120 tokens in ");
}

// A new model has as many positions as its sequences need, and a trained one has those that it has.
TEST(only_a_new_model_gets_more_positions) {
    const std::string memory = "--device cpu --memory ";
    const auto wpe = [&](const std::string& options) {
        const Result r = run(memory + options);
        CHECK_RUN(r, 0, "wpe");
        std::istringstream columns(r.out.substr(std::min(r.out.find(" wpe "), r.out.size())));
        std::string name;
        std::string type;
        int layers = 0;
        int elements = 0;
        columns >> name >> type >> layers >> elements;
        return elements;
    };
    CHECK(wpe("-e tiny -t 64") == 256 * 128);
    CHECK(wpe("-e tiny -t 256") == 256 * 128);
    CHECK(wpe("-e tiny -t 300") == 300 * 128);
    CHECK(wpe("-e " + model_file(kNoEnd) + format(" -t %d", kPositions)) == kPositions * C);
    CHECK_RUN(run(memory + "-e " + model_file(kNoEnd) + format(" -t %d", kPositions + 1)), 1,
              format("-t %d", kPositions));
}

// --eval-only prints the loss over all windows, whatever B and the number of ranks, or over those
// of -m batches, and the loss of each ending.
TEST(evaluation_says_what_the_model_loses) {
    Gpt2 model(kEndOften);
    const std::string only = format("--device cpu --eval-only -t %d ", T) + kModelOptions;
    const struct {
        std::string options;
        int windows;
        bool questions;
    } cases[] = {{kValOptions + "-b 3 " + kQuestionOptions, kValWindows, true},
                 {kValOptions + "-b 3 -m 2 --gpus 3 " + kQuestionOptions, 6, true},
                 {kValOptions + "-b 3 -m 5 --gpus 4 --context-parallel 2", 15, false},
                 // all, although training takes 20 batches
                 {kValOptions + "-b 1", kValWindows, false},
                 {kValOptions + format("-b %d", kValWindows + 5), kValWindows, false},
                 {kQuestionOptions + "-b 3", 0, true}};
    for (const auto& c : cases) {
        const Result r = run(only + c.options);
        CHECK_RUN(r, 0, c.windows ? format("over %d sequences of %d tokens\n", c.windows, T) : "");
        if (c.windows)
            CHECK_NEAR(number_after(r.out, "val loss "), model.mean_loss(val_windows(c.windows)),
                       2e-6);
        CHECK(contains(r.out, "val loss") == (c.windows > 0) &&
              contains(r.out, "hellaswag") == c.questions);
        if (!c.questions)
            continue;
        int correct = 0;
        for (const Choice& q : kChoices) {
            const Vec losses = model.ending_losses(q);
            const int answer = answer_of(losses);
            const std::string line =
                format("question %d | answer %d | label %d | losses", q.index, answer, q.label);
            correct += answer == q.label;
            CHECK(contains(r.out, line));
            std::istringstream printed(
                r.out.substr(std::min(r.out.find(line) + line.size(), r.out.size())));
            for (const double loss : losses) {
                double x = NAN;
                printed >> x;
                CHECK_NEAR(x, loss, 5e-6);
            }
        }
        CHECK(contains(r.out, format("hellaswag %d of 7, %.2f%%\n", correct, correct / 0.07)));
    }
}

// Checks what a new model starts from, and that a step's time and rate are those of its tokens.
TEST(a_new_model_starts_as_gpt2_does) {
    // another matrix, and the same one of the other seed, because no two may be correlated
    Vec before[2];
    for (int seed : {1, 2}) {
        const std::string out = dir() + format("/new_%d", seed);
        const Result r = run("--device cpu -e tiny -v 0 -s 0 -l 1e-30 -i " + dir() +
                             format("/train.bin --seed %d -x 24 -o ", seed) + out);
        CHECK_RUN(r, 0, "step 24/24");
        const Vec ms = values(out, "train", "step_ms");
        const Vec rate = values(out, "train", "tokens_per_s");
        CHECK(ms.size() == 24 && rate.size() == 24);
        for (size_t i = 0; i < ms.size(); i++)
            CHECK_NEAR(rate[i] * ms[i], 1000.0 * 256, 1e-6 * 256000);
        check_lines(r.out, out, 24, 256);
        // the tiny model
        const std::vector<int32_t> header = {20240326, 3, 256, 257, 4, 2, 128, 384};
        CHECK(read_file(model_path(out, 24)).find(bytes_of(header)) == 0);
        const Vec w = floats_at_the_end(
            model_path(out, 24), static_cast<size_t>(values(out, "run", "parameters").at(0)));
        const double* at = w.data();
        for (const TensorInFile& t : tensors_in_file(256, 384, 4, 128))
            for (size_t l = 0; l < t.layers; l++, at += t.size) {
                const std::string name = t.name;
                if (!t.decays) {
                    const double want = name == "ln1w" || name == "ln2w" || name == "lnfw";
                    for (size_t i = 0; i < t.size; i++)
                        CHECK_NEAR(at[i], want, 1e-20);
                    continue;
                }
                const size_t n = name == "wte" ? 257 * 128 : t.size;
                // rows that pad the vocabulary
                for (size_t i = n; i < t.size; i++)
                    CHECK(at[i] == 0);
                const double sigma =
                    name == "attprojw" || name == "fcprojw" ? 0.02 / std::sqrt(8.0) : 0.02;
                // The normal distribution's first four moments, and the variances of their
                // estimates.
                const double expected[5] = {1, 0, 1, 0, 3};
                const double variance[5] = {0, 1, 2, 15, 96};
                Vec x(at, at + n);
                for (double& value : x)
                    value /= sigma;
                for (int k = 1; k < 5; k++) {
                    double moment = 0;
                    for (double value : x)
                        moment += std::pow(value, k) / n;
                    CHECK_NEAR(moment, expected[k], 5 * std::sqrt(variance[k] / n));
                }
                for (Vec& other : before) {
                    const size_t both = std::min(n, other.size());
                    CHECK_NEAR(std::inner_product(&x[0], &x[both], other.begin(), 0.0), 0,
                               5 * std::sqrt(both));
                }
                before[0] = x;
                if (name == "wte")
                    before[1] = x;
            }
        CHECK(at == w.data() + w.size());
    }
}

// In fp32 1 − β² would be off by up to a thousandth.
TEST(bias_correction_is_fp64) {
    const float one = 1;
    const float near_one = 0.99999f;
    const ParamRange range = {0, 1, false};
    for (int step = 1; step < 10; step++)
        for (const auto& [beta1, beta2] : {std::pair{near_one, 0.f}, {0.f, near_one}}) {
            float p = 0;
            float m = 0;
            float v = 0;
            adamw_update<float>(Cpu(1), &p, nullptr, &m, &v, &one, &one, &range, 1,
                                {1, beta1, beta2, 0, 0, 0, step, 0});
            const double beta = near_one;
            const double share = (1 - beta) / (1 - std::pow(beta, step));
            CHECK_NEAR(p, beta1 > 0 ? -share : -1 / std::sqrt(share), 1e-6 / share);
        }
}

TEST_MAIN
