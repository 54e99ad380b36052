// Tests the recipe from end to end. ./train_gpt2cu trains a small model, alone and on several
// ranks, with options at and away from their defaults. What it logs, prints, samples and saves is
// compared with the fp64 loops of this file, which repeat the model, clipping, AdamW, decay,
// schedules, validation and sampling.
//
// Three things are shared with the program, and each has a test of its own: the layers are
// layers/cpu in double (dev/test_reference), the gradient is that of the program's model in double
// (dev/test_gpt2 compares it with finite differences), and the order of the data is the loader's
// (dev/test_data).
#define TRAIN_GPT2_NO_MAIN
#pragma GCC diagnostic ignored "-Wunused-function"  // parts of the program stay unused here
#include <climits>
#include <iterator>
#include <numeric>
#include <set>

#include "dev/test/small_model.h"
#include "train_gpt2.cu"

namespace {

using Vec = std::vector<double>;
using Tokens = std::vector<int>;

// -------------------------------------------------------------------------------------------------
// GPT-2 in double

struct Gpt2 {
    Vec p;  // the parameters, in the file's order
    Cpu cpu{1};

    explicit Gpt2(double end) {
        for (float x : make_weights(end))
            p.push_back(x);
    }

    const double* w(int tensor, int layer = 0) const { return p.data() + offset_of(tensor, layer); }

    // A row of Vp logits for each of n tokens: how likely each token is to follow it.
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

        // The bias of a layer norm or of a linear layer is the tensor after its weight.
        const auto layernorm = [&](int weight, int l) {
            layernorm_forward(cpu, ln.data(), mean.data(), rstd.data(), x.data(), w(weight, l),
                              w(weight + 1, l), N, C);
        };
        const auto add_linear = [&](const Vec& from, int weight, int l) {
            const size_t width = from.size() / N;
            matmul_forward(cpu, out.data(), from.data(), w(weight, l), w(weight + 1, l), N, width,
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

    // The loss of each of n tokens in predicting the token after it.
    Vec losses(const int* tokens, int n) {
        Vec rows = logits(tokens, n);
        Vec losses(n);
        classifier(cpu, rows.data(), losses.data(), tokens + 1, /*dloss=*/0.0, n, V, Vp);
        return losses;
    }

    // The mean loss of windows of T + 1 tokens.
    double mean_loss(const std::vector<Tokens>& windows) {
        double sum = 0;
        for (const Tokens& window : windows)
            for (double x : losses(window.data(), T))
                sum += x;
        return sum / T / windows.size();
    }

    // The gradient of mean_loss.
    Vec gradient(const std::vector<Tokens>& windows) {
        const int B = windows.size();
        GPT2<Cpu, double> model(cpu, {kPositions, V, Vp, L, NH, C},
                                {.B = B, .T = T, .training = true});
        model.allocate();
        std::copy(p.begin(), p.end(), model.weights().wte);

        std::vector<int> batch(model.batch_ints());
        int* const inputs = batch.data();
        int* const targets = inputs + B * T;
        int* const plan = targets + B * T;
        for (int i = 0; i < B; i++) {
            std::copy_n(&windows[i][0], T, inputs + i * T);
            std::copy_n(&windows[i][1], T, targets + i * T);
        }
        encoder_plan(cpu, plan, inputs, B * T);

        model.upload(batch.data(), /*micro_batches=*/1);
        model.train_micro_batches();
        return Vec(model.gradients().wte, model.gradients().wte + kParameters);
    }

    // For each ending the mean loss of its tokens, without those of the context.
    Vec ending_losses(const Question& question) {
        Vec means;
        for (const Tokens& ending : question.endings) {
            Tokens text = question.context;
            text.insert(text.end(), ending.begin(), ending.end());
            const Vec all = losses(text.data(), text.size() - 1);
            const double sum = std::accumulate(all.end() - ending.size(), all.end(), 0.0);
            means.push_back(sum / ending.size());
        }
        return means;
    }
};

// The ending with the least loss.
int answer_of(const Vec& ending_losses) {
    const auto least = std::min_element(ending_losses.begin(), ending_losses.end());
    return static_cast<int>(least - ending_losses.begin());
}

// -------------------------------------------------------------------------------------------------
// What the runs read: token shards and questions

// A few tokens after the last whole window belong to no window.
constexpr int kTrainWindows = 20;
constexpr int kValWindows = 23;
const Tokens kTrain = make_tokens(kTrainWindows * T + 6, 1);
const Tokens kVal = make_tokens(kValWindows * T + 4, 2);

std::vector<Tokens> val_windows(int n) {
    std::vector<Tokens> windows;
    for (int w = 0; w < n; w++)
        windows.emplace_back(&kVal[w * T], &kVal[w * T] + T + 1);
    return windows;
}

const std::vector<Question> kQuestions = [] {
    std::vector<Question> questions(7);
    for (int i = 0; i < 7; i++) {
        questions[i].index = i;
        questions[i].label = (i * 5 + 1) % 4;
        questions[i].context = make_tokens(3 + i, 30 + i);
        for (int e = 0; e < 4; e++)
            questions[i].endings.push_back(make_tokens(2 + (i + 3 * e) % 5, 50 + 4 * i + e));
    }
    write_questions(dir() + "/choices.bin", questions);
    return questions;
}();

// The options that name these files.
const std::string kTrainOptions =
    format("--device cpu -t %d -i ", T) + write_shard(dir() + "/train.bin", kTrain) + " ";
const std::string kValOptions = "-j " + write_shard(dir() + "/val.bin", kVal) + " ";
const std::string kQuestionOptions = "--hellaswag " + dir() + "/choices.bin ";
const std::string kModelOptions = "-e " + model_file(kEndOften) + " ";

// -------------------------------------------------------------------------------------------------
// What the runs write

// The row that was logged after `step` steps, "" if there is none.
std::string row_at(const std::string& out, const std::string& kind, int step) {
    for (const std::string& row : rows(out, kind))
        if (value(row, "step") == step)
            return row;
    return "";
}

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

// What a sample was asked to be.
struct SampleOptions {
    std::string prompt;
    int length;  // at most so many tokens after the prompt
    int top_k;
    int T;  // tokens that the model may see, which -t or sharing makes fewer than it has positions
};

// A token's rank among all that may follow, from 1. Tokens that are about as likely share a rank.
int rank_of(const Vec& logits, int token) {
    const double* const last = &logits.at(logits.size() - Vp);
    const auto is_likelier = [&](double x) { return x > last[token] + 1e-4; };
    return 1 + static_cast<int>(std::count_if(last, last + V, is_likelier));
}

// Walks along a sample, in which each token must be one of the k likeliest after those before it.
// If the sample is shorter than was asked for, <|endoftext|> must be one of them where it ends.
// Returns the rank of the least likely token. dev/test_gpt2 checks how often each token is drawn.
int check_sample(Gpt2& model, const SampleOptions& o, const std::string& text) {
    const size_t first = o.prompt.size();
    const size_t longest = first + o.length;
    CHECK(text.compare(0, first, o.prompt) == 0 && text.size() <= longest);

    Tokens context = {kEnd};
    for (char c : o.prompt)
        context.push_back(c - '!');
    size_t seen = context.size();  // the model sees this many of the last tokens of the context
    int worst_rank = 0;
    for (size_t i = first; i < std::min(text.size() + 1, longest); i++) {
        const int token = i < text.size() ? text[i] - '!' : kEnd;
        if (token < 0 || token >= V)
            throw Error("a token that has no probability");

        const int* const window = context.data() + context.size() - seen;
        const int rank = rank_of(model.logits(window, static_cast<int>(seen)), token);
        worst_rank = std::max(worst_rank, rank);
        if (rank > o.top_k)
            test::report(__FILE__, __LINE__,
                         format("token %zu of \"%s\" has rank %d", i, text.c_str(), rank));

        // a text that outgrows what the model may see continues from its last tokens, half as many
        context.push_back(token);
        seen = seen < size_t(o.T) ? seen + 1 : (o.T + 1) / 2;
    }
    return worst_rank;
}

// A row of kind "train" or "val" as the run prints it, up to the remaining time.
std::string line_of(const std::string& kind, const std::string& row, int steps) {
    const std::string step = format("step %.0f/%d | ", value(row, "step"), steps);
    const double loss = value(row, "loss_nats");
    if (kind == "val")
        return step + format("val loss %.4f\n", loss);
    return step + format("loss %.4f | norm %.4f | lr %.2e | %.1f ms | %.0f tok/s | MFU n/a | ETA ",
                         loss, value(row, "grad_norm"), value(row, "lr"), value(row, "step_ms"),
                         value(row, "tokens_per_s"));
}

// Checks what a run printed against the rows of its log, and their times against the tokens.
void check_lines(const std::string& printed, const std::string& out, int steps,
                 int tokens_per_step) {
    for (const std::string& row : rows(out, "train")) {
        const double rate = value(row, "tokens_per_s");
        CHECK_NEAR(rate, tokens_per_step / (value(row, "step_ms") / 1000), 1e-9 * rate);
        CHECK(contains(row, "\"mfu_percent\": null"));
    }
    for (const char* kind : {"train", "val"})
        for (const std::string& row : rows(out, kind)) {
            const std::string line = line_of(kind, row, steps);
            if (!contains(printed, line))
                test::report(__FILE__, __LINE__, out + ": not printed: " + line);
        }
}

// -------------------------------------------------------------------------------------------------
// The recipe

constexpr int kSteps = 24;

double rate_at(const Options& o, int step) {
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

// Repeats a run's training in double.
struct Replay {
    const Options& o;
    Gpt2 model{kEndOften};
    Vec m = Vec(kParameters);
    Vec v = Vec(kParameters);
    int clipped_steps = 0;
    Loader data{dir() + "/train.bin",
                {.T = T, .vocab = V, .shuffle = !o.no_shuffle, .seed = uint64_t(o.seed)}};
    std::vector<Tokens> windows = {};  // of the current step

    // What a step logs.
    struct Logged {
        double loss;
        double norm;
        double rate;
    };

    Logged train(int step) {
        if (step == 0 || !o.overfit)
            read_windows();

        const Vec gradient = model.gradient(windows);
        const double norm =
            std::sqrt(std::inner_product(gradient.begin(), gradient.end(), gradient.begin(), 0.0));
        const Logged logged = {model.mean_loss(windows), norm, rate_at(o, step)};

        const bool clips = o.max_norm > 0 && norm > o.max_norm;
        clipped_steps += clips ? 1 : 0;
        update(gradient, clips ? o.max_norm / norm : 1, logged.rate, step);
        return logged;
    }

  private:
    void read_windows() {
        windows.assign(o.tokens_per_step / T, Tokens(T + 1));
        for (Tokens& window : windows) {
            Tokens targets(T);
            data.next(window.data(), targets.data());
            window[T] = targets[T - 1];
        }
    }

    // AdamW with the gradient times `scale`.
    void update(const Vec& gradient, double scale, double rate, int step) {
        const double m_share = 1 - std::pow(0.9, step + 1);
        const double v_share = 1 - std::pow(o.beta2, step + 1);
        for (int t = WTE; t <= LNFB; t++) {
            const double decay = kTensors[t].decays ? o.weight_decay : 0;
            for (size_t i = elements_before(t); i < elements_before(t + 1); i++) {
                const double g = scale * gradient[i];
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
                const double direction = m[i] / m_share / (std::sqrt(v[i] / v_share) + 1e-8);
                model.p[i] -= rate * (direction + decay * model.p[i]);
            }
        }
    }
};

// What happens every so many steps also happens after the last.
bool is_due(int step, int every) {
    return step % every == 0 || step == kSteps;
}
Vec due_steps(int first, int every) {
    Vec steps;
    for (int step = first; step <= kSteps; step++)
        if (is_due(step, every))
            steps.push_back(step);
    return steps;
}

void check_step(const Replay::Logged& expected, const std::string& row) {
    CHECK_NEAR(value(row, "loss_nats"), expected.loss, 5e-6);
    CHECK_NEAR(value(row, "grad_norm"), expected.norm, 1e-5 * expected.norm);
    CHECK_NEAR(value(row, "lr"), expected.rate, 1e-6 * expected.rate);
}

// Ranks that share sequences answer no questions.
bool has_questions(const Options& o) {
    return o.context_parallel == 1;
}

void check_validation(Gpt2& model, const Options& o, const std::string& out, int step) {
    const int windows =
        o.val_batches < 0 ? kValWindows : std::min(o.val_batches * o.B, kValWindows);
    CHECK_NEAR(value(row_at(out, "val", step), "loss_nats"), model.mean_loss(val_windows(windows)),
               5e-6);
    if (!has_questions(o))
        return;

    int correct = 0;
    for (const Question& q : kQuestions)
        correct += answer_of(model.ending_losses(q)) == q.label ? 1 : 0;
    CHECK_NEAR(value(row_at(out, "hellaswag", step), "correct"), correct, 0);
}

// A single rank writes the samples, also where several share a sequence. It then sees only its part
// of the positions.
void check_sample_at(Gpt2& model, const Options& o, const std::string& out, int step) {
    const SampleOptions options = {
        .prompt = o.prompt, .length = o.sample_length, .top_k = 1, .T = T / o.context_parallel};
    check_sample(model, options, text_of(row_at(out, "sample", step)));
}

double relative_error(const Vec& got, const Vec& want) {
    double difference = 0;
    double sum = 0;
    for (size_t i = 0; i < want.size(); i++) {
        difference += std::pow(got[i] - want[i], 2);
        sum += want[i] * want[i];
    }
    return std::sqrt(sum > 0 ? difference / sum : difference);
}

// Compares for each tensor how far the parameters moved, and both moments.
void check_end(const Replay& replay, const std::string& out) {
    const Vec start = Gpt2(kEndOften).p;
    const Vec end = floats_at_the_end(model_path(out, kSteps), kParameters);
    const Vec moments = floats_at_the_end(state_path(out, kSteps), 2 * kParameters);
    const double* const m = moments.data();
    const double* const v = m + kParameters;

    for (int t = WTE; t <= LNFB; t++)
        for (size_t l = 0; l < kTensors[t].layers; l++) {
            const size_t at = offset_of(t, l);
            const size_t n = kTensors[t].size;
            const auto part = [&](const double* all) { return Vec(all + at, all + at + n); };
            const auto check = [&](const char* what, const Vec& got, const Vec& want,
                                   double tolerance) {
                const double error = relative_error(got, want);
                if (!(error <= tolerance))
                    test::report(__FILE__, __LINE__,
                                 format("%s: %s %s of layer %zu: relative error %.1e > %.1e",
                                        out.c_str(), kTensors[t].name, what, l, error, tolerance));
            };

            Vec moved(n);
            Vec expected(n);
            for (size_t i = 0; i < n; i++) {
                // the gradient of a key's bias is only rounding, which AdamW blows up
                const bool is_key_bias = t == QKVB && i / C == 1;
                if (is_key_bias)
                    continue;
                moved[i] = end[at + i] - start[at + i];
                expected[i] = replay.model.p[at + i] - start[at + i];
            }
            check("updates", moved, expected, 1e-4);
            check("m", part(m), part(replay.m.data()), 2e-5);
            check("v", part(v), part(replay.v.data()), 2e-5);
        }
}

enum class Clipped { never, sometimes, always };

void check_clipped(int steps, Clipped expected) {
    if (expected == Clipped::never)
        CHECK(steps == 0);
    if (expected == Clipped::sometimes)
        CHECK(steps > 2 && steps < kSteps - 2);
    if (expected == Clipped::always)
        CHECK(steps == kSteps);
}

struct Recipe {
    Clipped clipped;
    std::string options;          // that the run is given
    std::string meant = options;  // those it trains with: the same, or its defaults written out
};

void check_recipe(const Recipe& recipe, const std::string& out) {
    std::istringstream words(recipe.meant);
    const Options o = options_of({std::istream_iterator<std::string>(words), {}});
    const Result result =
        run(kTrainOptions + kValOptions + (has_questions(o) ? kQuestionOptions : "") +
            kModelOptions + recipe.options + format(" -x %d -o ", kSteps) + out);
    CHECK_RUN(result, 0, "checkpoint");
    check_lines(result.out, out, kSteps, o.tokens_per_step);

    const Vec validated = due_steps(0, o.val_every);
    CHECK(values(out, "train", "step") == due_steps(1, 1));
    CHECK(values(out, "val", "step") == validated);
    CHECK(values(out, "hellaswag", "step") == (has_questions(o) ? validated : Vec()));
    CHECK(values(out, "sample", "step") == due_steps(1, o.sample_every));

    Replay replay{o};
    check_validation(replay.model, o, out, 0);
    for (int step = 0; step < kSteps; step++) {
        const int done = step + 1;
        check_step(replay.train(step), row_at(out, "train", done));
        if (is_due(done, o.val_every))
            check_validation(replay.model, o, out, done);
        if (is_due(done, o.sample_every))
            check_sample_at(replay.model, o, out, done);
    }
    check_clipped(replay.clipped_steps, recipe.clipped);
    check_end(replay, out);
}

}  // namespace

// The last recipe has the options at their defaults, and in the others each is away from it at
// least once. Ranks are grouped in each way. A largest norm of 2e-5 makes gradients so small that
// AdamW's ε matters. Samples take the likeliest tokens.
TEST(gate_baseline_training_follows_the_recipe) {
    const Recipe recipes[] = {
        {Clipped::always,
         "--gpus 4 --zero 0 --overlap 1 --seed 5 -b 2 -d 256 "
         "-k cosine -u 4 -l 0.008 -q 0.3 -c 0.4 --beta2 0.8 --max-norm 2e-5 "
         "-v 6 -m 3 -s 7 -g 9 --temperature 0 --prompt OnceIn"},
        {Clipped::sometimes,
         "--gpus 4 --zero 1 --overlap 1 --context-parallel 2 --seed 5 -b 3 -d 192 "
         "-k linear -u 1 -l 0.004 -q 0.2 -c 0.7 --beta2 0.9 --max-norm 1.02 "
         "-v 9 -m 2 -s 5 -g 12 --top-k 1 --prompt Xy"},
        {Clipped::sometimes,
         "--gpus 2 --overlap 0 --seed 5 -b 1 -d 64 --overfit "
         "-k wsd -u 3 -l 0.003 -q 0.4 -c 0.2 --beta2 0.99 --max-norm 1.7 "
         "-v 12 -m 7 -s 12 -g 5 --top-k 1 --prompt a"},
        {Clipped::never,
         "--seed 1 -b 1 -d 32 --no-shuffle "
         "-k constant -u 2 -l 0.002 -q 0.5 -c 0.3 --beta2 0.9 --max-norm 0 "
         "-v 8 -m -1 -s 24 -g 20 --temperature 0 --prompt So"},
        {Clipped::sometimes,
         "--gpus 4 --zero 0 --context-parallel 4 --seed 2 -b 2 -d 64 "
         "-k linear -u 3 -l 0.002 -q 0.9 -c 0.1 --beta2 0.9 --max-norm 1.7 "
         "-v 10 -m 2 -s 20 -g 4 --top-k 1 --prompt b"},
        {.clipped = Clipped::always,
         .options = "--temperature 0",
         .meant = "-b 4 -d 64 --seed 1 "
                  "-k cosine -u 8 -l 2e-3 -q 0.1 -c 0.1 --beta2 0.95 --max-norm 1 "
                  "-v 2 -m 20 -s 20 -g 700"}};
    int number = 0;
    for (const Recipe& recipe : recipes)
        check_recipe(recipe, dir() + format("/recipe_%d", number++));
}

// -------------------------------------------------------------------------------------------------
// Samples

// Each token of a sample is likely after all that the model sees.
TEST(samples_follow_the_model) {
    Gpt2 model(kNoEnd);
    const std::string generate = "--device cpu -e " + model_file(kNoEnd) + " --generate 250 ";
    const struct {
        const char* options;
        const char* prompt;
        int T;
        int top_k;
        int worst_rank;  // of a token. If top_k is V, it is at least this, otherwise exactly this
    } cases[] = {{"--seed 1 --temperature 0.5 --top-k 3 --prompt Fox ", "Fox", kPositions, 3, 3},
                 {"--seed 2 --temperature 0.5 --top-k 3 --prompt Fox -t 8 ", "Fox", 8, 3, 3},
                 {"--seed 1 --temperature 2 --top-k 5 --prompt Fax ", "Fax", kPositions, 5, 5},
                 {"--seed 2 --temperature 0 ", "", kPositions, 1, 1},
                 {"", "", kPositions, V, 20},
                 {"--seed 2 ", "", kPositions, V, 20}};
    std::set<std::string> texts;
    std::string last;
    for (const auto& c : cases) {
        last = run(generate + c.options + "2>/dev/null").out;
        texts.insert(last);
        CHECK(last.size() == std::strlen(c.prompt) + 250 + 1);

        const std::string text = last.substr(0, last.size() - 1);  // without the line's end
        const int rank = check_sample(
            model, {.prompt = c.prompt, .length = 250, .top_k = c.top_k, .T = c.T}, text);
        CHECK(c.top_k == V ? rank >= c.worst_rank : rank == c.worst_rank);
    }
    CHECK(texts.size() == std::size(cases));
    CHECK(run(generate + "--seed 2 2>/dev/null").out == last);
}

// If --seed is the largest int, the second text's seed is one more, which is no int.
TEST(seeds_of_samples_pass_the_largest_int) {
    const Cpu one_thread(1);
    GPT2<Cpu, float> model(one_thread, {kPositions, V, Vp, L, NH, C},
                           {.B = 1, .T = kPositions, .cache = true});
    model.allocate();
    load(model, model_file(kNoEnd));
    const Tokenizer bytes;
    const auto text = [&](uint64_t seed) {
        return generate(model, bytes, start_of_text(bytes, "", V), 60, {}, seed) + "\n";
    };

    const std::string command =
        "--device cpu -e " + model_file(kNoEnd) + " --generate 60 --samples 2 ";
    CHECK(run(command + format("--seed %d 2>/dev/null", INT_MAX)).out ==
          text(INT_MAX) + "---\n" + text(uint64_t(INT_MAX) + 1));

    // The tokens of both texts are counted, without their prompts.
    CHECK_RUN(run(command + "--prompt Once"), 0, "120 tokens in ");
}

// -------------------------------------------------------------------------------------------------
// Evaluation

namespace {

// The loss of each ending, and the answer, as --eval-only prints them.
void check_answers(Gpt2& model, const std::string& printed) {
    int correct = 0;
    for (const Question& q : kQuestions) {
        const Vec losses = model.ending_losses(q);
        const int answer = answer_of(losses);
        correct += answer == q.label ? 1 : 0;

        const std::string line =
            format("question %d | answer %d | label %d | losses", q.index, answer, q.label);
        const size_t at = printed.find(line);
        CHECK(at != std::string::npos);
        if (at == std::string::npos)
            continue;
        std::istringstream numbers(printed.substr(at + line.size()));
        for (const double loss : losses) {
            double x = NAN;
            numbers >> x;
            CHECK_NEAR(x, loss, 5e-6);
        }
    }
    const size_t questions = kQuestions.size();
    CHECK(contains(printed, format("hellaswag %d of %zu, %.2f%%\n", correct, questions,
                                   100.0 * correct / questions)));
}

}  // namespace

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
        CHECK_RUN(r, 0);
        CHECK(contains(r.out, "val loss") == (c.windows > 0));
        CHECK(contains(r.out, "hellaswag") == c.questions);
        if (c.windows > 0) {
            CHECK(contains(r.out, format("over %d sequences of %d tokens\n", c.windows, T)));
            CHECK_NEAR(number_after(r.out, "val loss "), model.mean_loss(val_windows(c.windows)),
                       2e-6);
        }
        if (c.questions)
            check_answers(model, r.out);
    }
}

// -------------------------------------------------------------------------------------------------
// New models

namespace {

// How many elements of wpe a command would allocate.
int elements_of_wpe(const std::string& options) {
    const Result r = run("--device cpu --memory " + options);
    CHECK_RUN(r, 0, " wpe ");
    std::istringstream columns(text_from(r.out, " wpe "));
    std::string name;
    std::string type;
    int layers = 0;
    int elements = 0;
    columns >> name >> type >> layers >> elements;
    return elements;
}

}  // namespace

// A new model gets as many positions as its sequences need, and at least 256. A trained one keeps
// those that it has.
TEST(only_a_new_model_gets_more_positions) {
    CHECK(elements_of_wpe("-e tiny -t 64") == 256 * 128);
    CHECK(elements_of_wpe("-e tiny -t 256") == 256 * 128);
    CHECK(elements_of_wpe("-e tiny -t 300") == 300 * 128);

    const std::string trained = "-e " + model_file(kNoEnd);
    CHECK(elements_of_wpe(trained + format(" -t %d", kPositions)) == kPositions * C);
    CHECK_RUN(run("--device cpu --memory " + trained + format(" -t %d", kPositions + 1)), 1,
              format("-t %d", kPositions));
}

namespace {

// The first four moments are those of the standard normal distribution, as closely as the number of
// values allows.
void check_standard_normal(const Vec& x) {
    const struct {
        int power;
        double expected;
        double variance;  // of x to this power
    } moments[] = {{1, 0, 1}, {2, 1, 2}, {3, 0, 15}, {4, 3, 96}};
    const double n = static_cast<double>(x.size());
    for (const auto& m : moments) {
        double mean = 0;
        for (double value : x)
            mean += std::pow(value, m.power) / n;
        CHECK_NEAR(mean, m.expected, 5 * std::sqrt(m.variance / n));
    }
}

// For values of a standard normal distribution.
void check_uncorrelated(const Vec& x, const Vec& y) {
    const size_t n = std::min(x.size(), y.size());
    CHECK_NEAR(std::inner_product(x.begin(), x.begin() + n, y.begin(), 0.0), 0, 5 * std::sqrt(n));
}

// The model --init tiny.
constexpr size_t kTinyPositions = 256;
constexpr size_t kTinyVocabulary = 257;
constexpr size_t kTinyPadded = 384;
constexpr size_t kTinyLayers = 4;
constexpr size_t kTinyHeads = 2;
constexpr size_t kTinyChannels = 128;

// Checks the weights of one layer of a tensor and returns its random ones, divided by their
// standard deviation.
Vec check_initial(const TensorInFile& tensor, const double* w) {
    const std::string name = tensor.name;
    if (!tensor.decays) {
        const double constant = name == "ln1w" || name == "ln2w" || name == "lnfw" ? 1 : 0;
        for (size_t i = 0; i < tensor.size; i++)
            CHECK_NEAR(w[i], constant, 1e-20);
        return {};
    }
    // the rows that pad the vocabulary are zero
    const size_t n = name == "wte" ? kTinyVocabulary * kTinyChannels : tensor.size;
    for (size_t i = n; i < tensor.size; i++)
        CHECK(w[i] == 0);

    const bool is_projection = name == "attprojw" || name == "fcprojw";
    const double sigma = is_projection ? 0.02 / std::sqrt(2.0 * kTinyLayers) : 0.02;
    Vec x(w, w + n);
    for (double& value : x)
        value /= sigma;
    check_standard_normal(x);
    return x;
}

}  // namespace

// Neighbouring matrices are not correlated, nor is any matrix with the token embedding of its
// model, nor are the token embeddings of two seeds. The rate is too small to change a weight.
TEST(a_new_model_starts_as_gpt2_does) {
    constexpr int steps = 4;
    const int tokens_per_step = 4 * 64;  // B·T by default
    Vec before;  // the matrix checked last. For a model's first one it is the other model's last
    Vec wte;     // the token embedding checked last. For a model's own it is the other one's
    for (int seed : {1, 2}) {
        const std::string out = dir() + format("/new_%d", seed);
        const Result r = run("--device cpu -e tiny -v 0 -s 0 -l 1e-30 -i " + dir() +
                             format("/train.bin --seed %d -x %d -o ", seed, steps) + out);
        CHECK_RUN(r, 0, format("step %d/%d", steps, steps));
        CHECK(rows(out, "train").size() == steps);
        check_lines(r.out, out, steps, tokens_per_step);

        const std::vector<int32_t> header = {20240326,        3,           kTinyPositions,
                                             kTinyVocabulary, kTinyLayers, kTinyHeads,
                                             kTinyChannels,   kTinyPadded};
        CHECK(read_file(model_path(out, steps)).find(bytes_of(header)) == 0);
        const auto parameters = static_cast<size_t>(values(out, "run", "parameters").at(0));
        const Vec w = floats_at_the_end(model_path(out, steps), parameters);
        const double* at = w.data();
        for (const TensorInFile& tensor :
             tensors_in_file(kTinyPositions, kTinyPadded, kTinyLayers, kTinyChannels))
            for (size_t l = 0; l < tensor.layers; l++) {
                const Vec x = check_initial(tensor, at);
                at += tensor.size;
                if (x.empty())
                    continue;
                check_uncorrelated(x, before);
                check_uncorrelated(x, wte);
                before = x;
                if (tensor.name == std::string("wte"))
                    wte = x;
            }
        CHECK(at == w.data() + w.size());
    }
}

TEST_MAIN
