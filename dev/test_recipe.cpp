// Tests the recipe from end to end. ./train_gpt2cu trains a small model with every option away from its default. What
// it logs, prints, samples and saves is compared with fp64 loops of this file. They repeat the order of data,
// accumulation, clipping, AdamW, decay, schedules, validation and sampling. Only the layers are shared with the
// program. They are layers/cpu in double, which dev/test_reference checks against finite differences.
#include "layers/cpu/reference.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "dev/program.h"
#include "run/checkpoint.h"
#include "run/choices.h"

namespace {

using Vec = std::vector<double>;
using Tokens = std::vector<int>;

// ---------------------------------------------------------------------------------------------------------------------
// The model is GPT-2 in double. V is the program's byte vocabulary, so that it can write samples.

constexpr int kPositions = 24, V = 257, Vp = 264, L = 2, NH = 2, C = 32, HS = C / NH;
constexpr int kEnd = 256;  // <|endoftext|>. A letter's token is its distance from '!'

enum { WTE, WPE, LN1W, LN1B, QKVW, QKVB, ATTPROJW, ATTPROJB, LN2W, LN2B, FCW, FCB, FCPROJW, FCPROJB, LNFW, LNFB };
struct Tensor {
    const char* name;
    size_t size;  // of one layer
    size_t layers;
    bool decays = false;  // the matrices do
};
std::vector<Tensor> tensors_of(size_t positions, size_t vocabulary, size_t layers, size_t C) {
    return {{"wte", vocabulary * C, 1, true},
            {"wpe", positions * C, 1, true},
            {"ln1w", C, layers},
            {"ln1b", C, layers},
            {"qkvw", 3 * C * C, layers, true},
            {"qkvb", 3 * C, layers},
            {"attprojw", C * C, layers, true},
            {"attprojb", C, layers},
            {"ln2w", C, layers},
            {"ln2b", C, layers},
            {"fcw", 4 * C * C, layers, true},
            {"fcb", 4 * C, layers},
            {"fcprojw", 4 * C * C, layers, true},
            {"fcprojb", C, layers},
            {"lnfw", C, 1},
            {"lnfb", C, 1}};
}
const std::vector<Tensor> kTensors = tensors_of(kPositions, Vp, L, C);
const size_t kParameters = [] {
    size_t n = 0;
    for (const Tensor& t : kTensors) n += t.size * t.layers;
    return n;
}();
size_t offset_of(int tensor, int layer = 0) {
    size_t at = 0;
    for (int t = 0; t < tensor; t++) at += kTensors[t].size * kTensors[t].layers;
    return at + kTensors[tensor].size * layer;
}

void add(Vec& to, const Vec& x) {
    for (size_t i = 0; i < to.size(); i++) to[i] += x[i];
}
void add_column_sums(double* to, const Vec& x, size_t columns) {
    for (size_t i = 0; i < x.size(); i++) to[i % columns] += x[i];
}

struct Gpt2 {
    Cpu cpu{1};
    Vec p = Vec(kParameters);
    struct Layer {
        Vec ln1, mean1, rstd1, qkv, atty, lse, middle, ln2, mean2, rstd2, fch, gelu, out;
    };
    Layer layers[L];
    Vec encoded, lnf, meanf, rstdf;

    const double* w(int t, int l = 0) const { return p.data() + offset_of(t, l); }

    void forward(const int* tokens, int T) {
        const size_t N = T;
        encoded.resize(N * C), lnf.resize(N * C), meanf.resize(N), rstdf.resize(N);
        encoder_forward(cpu, encoded.data(), tokens, w(WTE), w(WPE), 1, T, C);
        const Vec* x = &encoded;
        for (int l = 0; l < L; l++) {
            Layer& a = layers[l];
            for (Vec* v : {&a.mean1, &a.rstd1, &a.mean2, &a.rstd2}) v->resize(N);
            for (Vec* v : {&a.ln1, &a.atty, &a.middle, &a.ln2, &a.out}) v->resize(N * C);
            for (Vec* v : {&a.fch, &a.gelu}) v->resize(N * 4 * C);
            a.qkv.resize(N * 3 * C), a.lse.resize(N * NH);
            layernorm_forward(cpu, a.ln1.data(), a.mean1.data(), a.rstd1.data(), x->data(), w(LN1W, l), w(LN1B, l), N,
                              C);
            matmul_forward(cpu, a.qkv.data(), a.ln1.data(), w(QKVW, l), w(QKVB, l), N, C, 3 * C);
            attention_forward<double>(cpu, Attention::flash, a.atty.data(), a.lse.data(), nullptr, nullptr,
                                      a.qkv.data(), 1, T, NH, HS);
            matmul_forward(cpu, a.middle.data(), a.atty.data(), w(ATTPROJW, l), w(ATTPROJB, l), N, C, C);
            add(a.middle, *x);
            layernorm_forward(cpu, a.ln2.data(), a.mean2.data(), a.rstd2.data(), a.middle.data(), w(LN2W, l),
                              w(LN2B, l), N, C);
            matmul_forward(cpu, a.fch.data(), a.ln2.data(), w(FCW, l), w(FCB, l), N, C, 4 * C);
            gelu_forward(cpu, a.gelu.data(), a.fch.data(), N * 4 * C);
            matmul_forward(cpu, a.out.data(), a.gelu.data(), w(FCPROJW, l), w(FCPROJB, l), N, 4 * C, C);
            add(a.out, a.middle);
            x = &a.out;
        }
        layernorm_forward(cpu, lnf.data(), meanf.data(), rstdf.data(), x->data(), w(LNFW), w(LNFB), N, C);
    }

    // The loss of each of T tokens. If g is given, dloss times the gradient of their sum is added to it.
    Vec losses(const int* tokens, const int* targets, int T, Vec* g = nullptr, double dloss = 0) {
        forward(tokens, T);
        const size_t N = T;
        Vec logits(N * Vp), losses(N), dx(N * C), dln(N * C), wide(N * 4 * C), dqkv(N * 3 * C);
        matmul_forward<double>(cpu, logits.data(), lnf.data(), w(WTE), nullptr, N, C, Vp);
        classifier(cpu, logits.data(), losses.data(), targets, dloss, N, V, Vp);
        if (!g) return losses;
        const auto d = [&](int t, int l = 0) { return g->data() + offset_of(t, l); };
        matmul_backward(cpu, dln.data(), d(WTE), logits.data(), lnf.data(), w(WTE), N, C, Vp);
        layernorm_backward<double>(cpu, dx.data(), d(LNFW), d(LNFB), nullptr, nullptr, dln.data(),
                                   layers[L - 1].out.data(), w(LNFW), meanf.data(), rstdf.data(), N, C);
        for (int l = L - 1; l >= 0; l--) {
            Layer& a = layers[l];
            add_column_sums(d(FCPROJB, l), dx, C);
            matmul_backward(cpu, wide.data(), d(FCPROJW, l), dx.data(), a.gelu.data(), w(FCPROJW, l), N, 4 * C, C);
            gelu_backward<double>(cpu, wide.data(), d(FCB, l), nullptr, nullptr, a.fch.data(), wide.data(), N, 4 * C);
            matmul_backward(cpu, dln.data(), d(FCW, l), wide.data(), a.ln2.data(), w(FCW, l), N, C, 4 * C);
            layernorm_backward<double>(cpu, dx.data(), d(LN2W, l), d(LN2B, l), nullptr, nullptr, dln.data(),
                                       a.middle.data(), w(LN2W, l), a.mean2.data(), a.rstd2.data(), N, C);
            add_column_sums(d(ATTPROJB, l), dx, C);
            matmul_backward(cpu, dln.data(), d(ATTPROJW, l), dx.data(), a.atty.data(), w(ATTPROJW, l), N, C, C);
            attention_backward<double>(cpu, Attention::flash, dqkv.data(), nullptr, dln.data(), a.atty.data(),
                                       a.lse.data(), nullptr, a.qkv.data(), 1, T, NH, HS);
            add_column_sums(d(QKVB, l), dqkv, 3 * C);
            matmul_backward(cpu, dln.data(), d(QKVW, l), dqkv.data(), a.ln1.data(), w(QKVW, l), N, C, 3 * C);
            layernorm_backward<double>(cpu, dx.data(), d(LN1W, l), d(LN1B, l), nullptr, nullptr, dln.data(),
                                       l ? layers[l - 1].out.data() : encoded.data(), w(LN1W, l), a.mean1.data(),
                                       a.rstd1.data(), N, C);
        }
        encoder_backward(cpu, d(WTE), d(WPE), nullptr, dx.data(), tokens, 1, T, C);
        return losses;
    }

    // Mean loss of the windows `windows` of a stream. A window has T inputs, and the targets are one token later.
    double mean_loss(const Tokens& stream, const std::vector<int>& windows, int T, Vec* g = nullptr) {
        double sum = 0;
        for (int window : windows) {
            const int* tokens = stream.data() + size_t(window) * T;
            for (double x : losses(tokens, tokens + 1, T, g, 1.0 / T / windows.size())) sum += x;
        }
        return sum / T / windows.size();
    }

    // Logits of the token after the last T of `context`.
    Vec logits(const Tokens& context, int T) {
        const int n = std::min<int>(T, context.size());
        forward(context.data() + context.size() - n, n);
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
// What the runs read: a checkpoint, token shards, questions

constexpr int T = 16, kTrainWindows = 20, kValWindows = 23;

bool is_letter(int token) {
    return (token >= 'A' - '!' && token <= 'Z' - '!') || (token >= 'a' - '!' && token <= 'z' - '!');
}

// The weights are large enough that windows differ in loss and gradients are clipped. Only letters are likely, so that
// samples can be read back. `end` says how likely the end of a text is.
Gpt2 make_model(double end) {
    Gpt2 model;
    std::mt19937_64 random(11);
    std::normal_distribution<double> normal;
    for (int t = WTE; t <= LNFB; t++)
        for (size_t i = 0; i < kTensors[t].size * kTensors[t].layers; i++) {
            const bool norm_weight = t == LN1W || t == LN2W || t == LNFW;
            model.p[offset_of(t) + i] = (norm_weight ? 1 : 0) + 0.2 * normal(random);
        }
    model.p[offset_of(LNFW)] = 0, model.p[offset_of(LNFB)] = 4;  // a channel that says how likely each token is
    for (int v = 0; v < Vp; v++) model.p[offset_of(WTE) + v * C] = is_letter(v) ? 0 : v == kEnd ? end : -5;
    for (double& x : model.p) x = static_cast<float>(x);
    return model;
}
constexpr double kEndOften = 0.4, kNoEnd = -5;

std::string bytes_of(const void* data, size_t bytes) {
    return std::string(static_cast<const char*>(data), bytes);
}

std::string model_file(double end) {
    const std::string path = dir() + format("/model_%g.bin", end);
    if (exists(path)) return path;
    const Gpt2 model = make_model(end);
    int32_t header[256] = {20240326, 3, kPositions, V, L, NH, C, Vp};
    const std::vector<float> p(model.p.begin(), model.p.end());
    write_file(path, bytes_of(header, sizeof header) + bytes_of(p.data(), p.size() * sizeof(float)));
    return path;
}

// Letters, most of which are a function of the one before, and here and there the end of a document.
Tokens make_tokens(int n, int seed) {
    Tokens tokens;
    std::mt19937_64 random(seed);
    for (int i = 0, at = 0; i < n; i++) {
        at = random() % 10 < 7 ? (at * 5 + 3) % 26 : random() % 26;
        tokens.push_back(random() % 12 == 0 ? kEnd : (random() % 2 ? 'A' : 'a') - '!' + at);
    }
    return tokens;
}
// A few tokens after the last whole window belong to no window.
const Tokens& train_tokens() {
    static const Tokens tokens = make_tokens(kTrainWindows * T + 6, 1);
    return tokens;
}
const Tokens& val_tokens() {
    static const Tokens tokens = make_tokens(kValWindows * T + 4, 2);
    return tokens;
}
std::string shard_file(const std::string& name, const Tokens& tokens) {
    const std::string path = dir() + "/" + name;
    int32_t header[256] = {20240520, 1, static_cast<int32_t>(tokens.size())};
    std::vector<uint16_t> stored;
    for (int token : tokens) stored.push_back(token == kEnd ? 50256 : token);  // shards store it in GPT-2's vocabulary
    write_file(path, bytes_of(header, sizeof header) + bytes_of(stored.data(), 2 * stored.size()));
    return path;
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
    return format("--device cpu -t %d -i ", T) + shard_file("train.bin", train_tokens()) + " ";
}
std::string val_options() {
    const std::string choices = dir() + "/choices.bin";
    write_choices(choices, make_choices());
    return "-j " + shard_file("val.bin", val_tokens()) + " --hellaswag " + choices + " ";
}

// ---------------------------------------------------------------------------------------------------------------------
// What the runs write

std::vector<std::string> rows(const std::string& out, const std::string& kind) {
    std::vector<std::string> found;
    std::istringstream log(read_file(out + "/log.jsonl"));
    for (std::string line; std::getline(log, line);)
        if (contains(line, "\"kind\": \"" + kind + "\"")) found.push_back(line);
    return found;
}
double value(const std::string& row, const std::string& key) {
    return number_after(row, "\"" + key + "\": ");
}
Vec values(const std::string& out, const std::string& kind, const std::string& key) {
    Vec found;
    for (const std::string& row : rows(out, kind)) found.push_back(value(row, key));
    return found;
}
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
    Gpt2 model = make_model(kEndOften);
    Vec losses;
    for (int w = 0; w < kTrainWindows; w++) losses.push_back(model.mean_loss(train_tokens(), {w}, T));
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
    std::string extra;  // options that change no number. Samples take the likeliest tokens
    int seed, B, windows;  // `windows` is for one step
    std::string schedule;
    int warmup;
    double lr, final_lr, weight_decay, beta2, max_norm;
    int val_every, val_batches, sample_every, sample_length;
    std::string prompt;
};
constexpr int kSteps = 24;

// Gives every number with its option, under its long name, or with `letters` under its letter if it has one.
std::string options_of(const Recipe& r, bool letters) {
    const struct {
        const char *name, *letter;
        std::string value;
    } options[] = {{"--seed", "", std::to_string(r.seed)},
                   {"--batch", "-b", std::to_string(r.B)},
                   {"--tokens-per-step", "-d", std::to_string(r.windows * T)},
                   {"--schedule", "-k", r.schedule},
                   {"--warmup", "-u", std::to_string(r.warmup)},
                   {"--lr", "-l", format("%g", r.lr)},
                   {"--final-lr", "-q", format("%g", r.final_lr)},
                   {"--weight-decay", "-c", format("%g", r.weight_decay)},
                   {"--beta2", "", format("%g", r.beta2)},
                   {"--max-norm", "", format("%g", r.max_norm)},
                   {"--val-every", "-v", std::to_string(r.val_every)},
                   {"--val-batches", "-m", std::to_string(r.val_batches)},
                   {"--sample-every", "-s", std::to_string(r.sample_every)},
                   {"--sample-length", "-g", std::to_string(r.sample_length)},
                   {"--prompt", "", r.prompt}};
    std::string text = r.extra;
    for (const auto& o : options) text += format(" %s '%s'", letters && *o.letter ? o.letter : o.name, o.value.c_str());
    return text;
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
// been clipped, or −1 for some.
void check_recipe(const Recipe& r, const std::string& options, const std::string& out, int clipped) {
    const Result result = run(data_options() + val_options() + "-e " + model_file(kEndOften) + " " + options +
                              format(" -x %d -o ", kSteps) + out);
    CHECK_RUN(result, 0, "checkpoint");
    check_lines(result.out, out, kSteps, r.windows * T);
    Gpt2 model = make_model(kEndOften);
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
            CHECK_NEAR(value(row("val", vals), "loss_nats"), model.mean_loss(val_tokens(), windows, T), 5e-6);
            int correct = 0;
            for (const Choice& c : make_choices()) correct += model.answer(c) == c.label;
            CHECK_NEAR(value(row("hellaswag", vals), "step"), step, 0);
            CHECK_NEAR(value(row("hellaswag", vals), "correct"), correct, 0);
            vals++;
        }
        if (step > 0 && (step % r.sample_every == 0 || step == kSteps)) {
            CHECK_NEAR(value(row("sample", samples), "step"), step, 0);
            SampleCheck{model, T, 1}(r.prompt, text_of(row("sample", samples)), r.sample_length);
            samples++;
        }
    };
    watch(0);
    int found_clipped = 0;
    for (int step = 0; step < kSteps; step++) {
        const auto first = order_of(r.seed).begin() + step * r.windows;
        Vec g(kParameters);
        const double loss = model.mean_loss(train_tokens(), {first, first + r.windows}, T, &g);
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
        {{"--top-k 1 --gpus 2 --zero 0", 5, 3, 6, "linear", 1, 0.004, 0.2, 0.7, 0.9, 1.7, 9, 2, 5, 12, "Xy"}, -1},
        {{"--top-k 1 --gpus 2", 5, 1, 4, "wsd", 3, 0.003, 0.4, 0.2, 0.99, 1.7, 12, 7, 12, 5, "a"}, -1},
        {{"--temperature 0", 1, 1, 2, "constant", 2, 0.002, 0.5, 0.3, 0.9, 0, 8, 20, 24, 20, "So"}, 0},
    };
    int i = 0;
    for (const auto& c : cases)
        check_recipe(c.recipe, options_of(c.recipe, i % 2), dir() + format("/recipe_%d", i), c.clipped), i++;
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
    Gpt2 model = make_model(kNoEnd);
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
    model = make_model(kEndOften);
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
    Gpt2 model = make_model(kEndOften);
    const std::string options =
        format("--device cpu --eval-only -b 3 -t %d -e ", T) + model_file(kEndOften) + " " + val_options();
    for (int batches : {0, 2}) {
        const Result r = run(options + format("-m %d", batches));
        std::vector<int> windows((batches ? batches : kValWindows / 3) * 3);
        std::iota(windows.begin(), windows.end(), 0);
        CHECK_RUN(r, 0, format("over %zu batches of 3 x %d tokens\n", windows.size() / 3, T).c_str());
        CHECK_NEAR(number_after(r.out, "val loss "), model.mean_loss(val_tokens(), windows, T), 5e-6);
        int correct = 0;
        for (const Choice& c : make_choices()) {
            const int answer = model.answer(c);
            const std::string line = format("question %d | answer %d | label %d | losses", c.index, answer, c.label);
            correct += answer == c.label;
            const size_t at = r.out.find(line);
            if (at == std::string::npos) throw Error("expected " + line);
            std::istringstream losses(r.out.substr(at + line.size(), r.out.find('\n', at) - at - line.size()));
            for (const Tokens& ending : c.endings) {
                double loss = NAN;
                losses >> loss;
                CHECK_NEAR(loss, model.ending_loss(c.context, ending), 5e-6);
            }
        }
        CHECK(contains(r.out, format("hellaswag %d of 7, %.2f%%\n", correct, correct / 0.07)));
    }
    // Without -m it takes all batches, although a run in training would take 20.
    const std::string one_by_one = format("--device cpu --eval-only -b 1 -t %d -j ", T) + dir() + "/val.bin -e ";
    CHECK_RUN(run(one_by_one + model_file(kEndOften)), 0,
              format("over %d batches of 1 x %d tokens\n", kValWindows, T).c_str());
    const Result questions = run(format("--device cpu --eval-only -b 3 -t %d --hellaswag ", T) + dir() +
                                 "/choices.bin -e " + model_file(kEndOften));
    CHECK_RUN(questions, 0, "hellaswag ");
    CHECK(!contains(questions.out, "val loss"));
    // Questions longer than T do not fit into a batch, here or in training.
    for (const std::string& how : {std::string("--eval-only "), "-x 1 " + data_options() + "-t 8 "})
        CHECK_RUN(run("--device cpu -t 8 " + how + "--hellaswag " + dir() + "/choices.bin -e " + model_file(kEndOften)),
                  1, "length of an example");
}

// Checks what a new model starts from, and that steps take as long as the log says, by a clock outside the program.
TEST(a_new_model_starts_as_gpt2_does) {
    const std::string options = "--device cpu -e tiny -v 0 -s 0 -l 1e-30 -i " + shard_file("train.bin", train_tokens());
    Vec weights[2];
    for (int seed : {1, 2}) {
        const std::string out = dir() + format("/new_%d", seed);
        const int steps = seed == 1 ? 24 : 1;
        const std::string command =
            "./train_gpt2cu " + options + (seed > 1 ? " --seed 2" : "") + format(" -x %d -o ", steps) + out;
        FILE* pipe = popen(command.c_str(), "r");
        std::string text;
        std::vector<std::chrono::steady_clock::time_point> seen;
        for (char line[1000]; fgets(line, sizeof line, pipe); text += line)
            if (!std::strncmp(line, "step ", 5)) seen.push_back(std::chrono::steady_clock::now());
        CHECK(pclose(pipe) == 0);
        check_lines(text, out, steps, 256);
        const Vec ms = values(out, "train", "step_ms");
        if (seen.size() != size_t(steps) || ms.size() != seen.size()) throw Error("steps are missing");
        if (steps > 1) {
            const double ratio = std::accumulate(ms.begin() + 1, ms.end(), 0.0) /
                                 std::chrono::duration<double, std::milli>(seen.back() - seen.front()).count();
            CHECK(ratio > 0.7 && ratio < 1.4);
        }
        const std::string row = rows(out, "run").at(0);  // logs defaults too
        for (const auto& [key, number] : std::map<std::string, double>{
                 {"B", 4}, {"T", 64}, {"tokens_per_step", 256}, {"steps", steps}, {"seed", seed}, {"gpus", 1}})
            CHECK_NEAR(value(row, key), number, 0);

        const int32_t header[8] = {20240326, 3, 256, 257, 4, 2, 128, 384};  // the tiny model
        CHECK(read_file(model_path(out, steps)).compare(0, sizeof header, bytes_of(header, sizeof header)) == 0);
        const std::vector<Tensor> tensors = tensors_of(256, 384, 4, 128);
        Vec& w = weights[seed - 1];
        w = floats_at_the_end(model_path(out, steps), static_cast<size_t>(value(row, "parameters")));
        const double* at = w.data();
        Vec before(4 * 128 * 128);  // of another matrix, because no two may be correlated
        for (const Tensor& t : tensors)
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
                double moments[5] = {}, with_before = 0;
                for (size_t i = 0; i < n; i++) {
                    for (int k = 1; k < 5; k++) moments[k] += std::pow(at[i] / sigma, k) / n;
                    if (i < before.size()) with_before += at[i] / sigma * before[i] / n;
                }
                const bool normal = std::fabs(moments[1]) < 5 / std::sqrt(n) &&
                                    std::fabs(moments[2] - 1) < 5 * std::sqrt(2.0 / n) &&
                                    std::fabs(moments[3]) < 5 * std::sqrt(15.0 / n) &&
                                    std::fabs(moments[4] - 3) < 5 * std::sqrt(96.0 / n);
                if (!normal || !(std::fabs(with_before) < 5 / std::sqrt(n)))
                    test::report(__FILE__, __LINE__,
                                 format("%s of layer %zu: moments %.4f %.4f %.4f %.4f, with another matrix %.4f",
                                        t.name, l, moments[1], moments[2], moments[3], moments[4], with_before));
                for (size_t i = 0; i < std::min(n, before.size()); i++) before[i] = at[i] / sigma;
            }
        CHECK(at == w.data() + w.size());
    }
    double together = 0;  // of the two seeds' wte
    for (size_t i = 0; i < 257 * 128; i++) together += weights[0][i] / 0.02 * weights[1][i] / 0.02;
    CHECK_NEAR(together, 0, 5 * std::sqrt(257.0 * 128));
}

// This run is so long that its end is minutes away. A token in the fourth window that no model knows ends it.
TEST(a_long_run_says_when_it_ends) {
    Tokens tokens = train_tokens();
    tokens[3 * T + 5] = 999;
    const std::string out = dir() + "/long";
    const Result r = run(format("--device cpu --no-shuffle -b 1 -t %d -x 4000000 -l 0.5 -e ", T) +
                         model_file(kEndOften) + " -i " + shard_file("late.bin", tokens) + " -o " + out);
    CHECK_RUN(r, 1, "999");
    check_lines(r.out, out, 4000000, T);
    const Vec lr = values(out, "train", "lr");
    CHECK(lr.size() == 3);
    for (size_t i = 0; i < lr.size(); i++) CHECK_NEAR(lr[i], 0.5 * (i + 1) / 200000, 1e-12);  // a twentieth warms up
    CHECK(!contains(r.out, "ETA 0:"));
}

TEST_MAIN
