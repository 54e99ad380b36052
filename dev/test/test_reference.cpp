// Tests the CPU reference, the oracle of all other tests. Its own oracle is calculus: each backward
// is compared with central differences of its forward in fp64, along random directions and single
// elements, and each forward with its formula, written the naive way. Outputs that a layer writes
// start as NaN, and those that it adds into as random numbers.
//
// Run: ./dev/test_reference [part of a test's name]
#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "dev/common/test.h"
#include "dev/test/finite_difference.h"
#include "layers/cpu/reference.h"

using Vec = std::vector<double>;

static const Cpu dev;
static constexpr float inf = std::numeric_limits<float>::infinity();
static std::mt19937_64 rng(20240521);

// The same values for float and double, because they are rounded to float first.
template <class X = double>
static std::vector<X> randn(size_t n, double sigma = 1, double mean = 0) {
    std::normal_distribution<double> normal(mean, sigma);
    std::vector<X> x(n);
    for (X& value : x)
        value = X(float(normal(rng)));
    return x;
}

template <class X = double>
static std::vector<X> poison(size_t n) {
    return std::vector<X>(n, std::numeric_limits<X>::quiet_NaN());
}

static std::vector<int> random_tokens(size_t n, int V) {
    std::vector<int> tokens(n);
    for (int& t : tokens)
        t = int(rng() % V);
    return tokens;
}

static Vec operator-(Vec a, const Vec& b) {
    for (size_t i = 0; i < a.size(); i++)
        a[i] -= b[i];
    return a;
}

template <class X>
static bool same_bits(const std::vector<X>& a, const std::vector<X>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(X)) == 0;
}

// max|got − want| ≤ tol·max|want|
template <class X, class Y>
static void check_close(const std::string& what, const std::vector<X>& got,
                        const std::vector<Y>& want, double tol) {
    if (got.size() != want.size()) {
        test::report(__FILE__, __LINE__,
                     format("%s: %zu elements, not %zu", what.c_str(), got.size(), want.size()));
        return;
    }

    double worst = 0;
    double scale = 0;
    for (size_t i = 0; i < want.size(); i++) {
        const double error = std::fabs(double(got[i]) - want[i]);
        worst = std::isnan(error) ? inf : std::max(worst, error);
        scale = std::max(scale, std::fabs(double(want[i])));
    }
    if (!(worst <= tol * scale))
        test::report(__FILE__, __LINE__,
                     format("%s: off by %.3g of %.3g", what.c_str(), worst, scale));
}

// -------------------------------------------------------------------------------------------------
// The layers

// A layer with all its tensors, in float or double. What it writes starts as NaN, and what it adds
// into as random numbers. Names say which tensors belong together: the result "dx" is the gradient
// of the input "x", and the input "dout" weights the result "out" in the loss.
template <class X>
struct Layer {
    struct Tensor {
        std::string name;
        std::vector<X> x;
        std::vector<X> start;  // what the layer adds to, 0 if it writes
    };
    std::string what;
    std::deque<Tensor> inputs;
    std::deque<Tensor> results;
    std::function<void()> forward;
    std::function<void()> backward = [] {};
    // checks the results of a run against their definition; gets the layer, which may have moved
    std::function<void(Layer&)> formula = [](Layer&) {};

    explicit Layer(const std::string& what) : what(what) {}
    Layer(Layer&&) = default;  // and no copy, because the functions hold pointers into the tensors

    X* input(const char* name, size_t n, double sigma = 1, double mean = 0) {
        return inputs.emplace_back(Tensor{name, randn<X>(n, sigma, mean), {}}).x.data();
    }
    X* written(const char* name, size_t n) {
        return results.emplace_back(Tensor{name, poison<X>(n), std::vector<X>(n)}).x.data();
    }
    X* added(const char* name, size_t n) {
        const std::vector<X> x = randn<X>(n);
        return results.emplace_back(Tensor{name, x, x}).x.data();
    }

    Tensor& operator[](const std::string& name) {
        for (auto* tensors : {&inputs, &results})
            for (Tensor& t : *tensors)
                if (t.name == name)
                    return t;
        throw Error(what + " has no tensor " + name);
    }
    void run() {
        forward();
        backward();
    }
};

// Checks a layer's results in double against their formula, and its gradients against finite
// differences. In float it must come close, and the number of threads may change no bit. make(x)
// returns the layer in the type of x, whose value does not count.
template <class Make>
static void check(Make make, double float_tolerance = 2e-6) {
    const uint64_t seed = rng();
    const auto run = [&](auto of_type, int threads) {
        const Cpu sets_the_number_of_threads(threads);
        rng.seed(seed);
        auto l = make(of_type);
        const auto before = l.inputs;
        l.run();
        for (size_t i = 0; i < before.size(); i++)
            CHECK(same_bits(l.inputs[i].x, before[i].x));
        return l;
    };
    Layer<double> l = run(double(), 1);
    const Layer<float> single = run(float(), 1);
    l.formula(l);

    for (size_t i = 0; i < l.results.size(); i++)
        check_close(l.what + " " + l.results[i].name, single.results[i].x, l.results[i].x,
                    float_tolerance);

    const Layer<double> again = run(double(), 3);
    const Layer<float> single_again = run(float(), 3);
    for (size_t i = 0; i < l.results.size(); i++)
        if (!same_bits(again.results[i].x, l.results[i].x) ||
            !same_bits(single_again.results[i].x, single.results[i].x))
            test::report(__FILE__, __LINE__, l.what + ": more threads change " + l.results[i].name);

    const Cpu all_threads;  // its constructor sets the number of threads, which loss() then uses
    const auto is_gradient = [](const auto& t) { return t.name[0] == 'd'; };
    const auto tensor_of = [&](const auto& gradient) -> auto& {
        return l[gradient.name.substr(1)];
    };
    const auto loss = [&] {
        l.forward();
        double sum = 0;
        for (const auto& t : l.inputs)
            if (is_gradient(t))
                sum += dot(t.x, tensor_of(t).x);
        return sum;
    };
    for (const auto& t : l.results)
        if (is_gradient(t))
            check_gradient(l.what + " " + t.name, tensor_of(t).x.data(), t.x - t.start, loss);
}
#define CHECK_LAYER(layer, ...) check([&](auto x) { return layer<decltype(x)>(__VA_ARGS__); })

// Checks that the layer has added the sums of t's columns to `sums`.
template <class Tensor>
static void check_column_sums(const Tensor& sums, const Tensor& t) {
    for (size_t c = 0; c < sums.x.size(); c++) {
        double want = sums.start[c];
        for (size_t i = c; i < t.x.size(); i += sums.x.size())
            want += t.x[i];
        CHECK_NEAR(sums.x[c], want, 1e-12);
    }
}

template <class X>
static Layer<X> encoder_layer(int B, int T, int C, int V, const Positions& at = {}) {
    Layer<X> l(format("encoder B=%d T=%d C=%d", B, T, C));
    const int N = B * T;
    const int positions = at.late + T;
    const std::vector<int> tokens = random_tokens(N, V);
    std::vector<int> plan(encoder_plan_ints(dev, N));
    encoder_plan(dev, plan.data(), tokens.data(), N);
    CHECK(plan == tokens);
    X* wte = l.input("wte", V * C);
    X* wpe = l.input("wpe", positions * C);
    X* dout = l.input("dout", N * C);
    X* out = l.written("out", N * C);
    X* dwte = l.added("dwte", V * C);
    X* dwpe = l.added("dwpe", positions * C);

    l.forward = [=] { encoder_forward(dev, out, tokens.data(), wte, wpe, B, T, C, at); };

    l.backward = [=] {
        encoder_backward(dev, dwte, dwpe, nullptr, dout, plan.data(), B, T, C, at);
    };

    l.formula = [=](Layer<X>&) {
        for (int n = 0; n < N; n++) {
            const int t = n % T;
            const int position = t < at.chunk ? at.early + t : at.late + t - at.chunk;
            for (int c = 0; c < C; c++)
                CHECK(out[n * C + c] == wte[tokens[n] * C + c] + wpe[position * C + c]);
        }
    };
    return l;
}

template <class X>
static Layer<X> layernorm_layer(int N, int C) {
    Layer<X> l(format("layernorm N=%d C=%d", N, C));
    X* inp = l.input("inp", N * C, 2, 0.5);
    X* dout = l.input("dout", N * C);
    X* weight = l.input("weight", C, 1, 1);
    X* bias = l.input("bias", C);
    X* out = l.written("out", N * C);
    X* mean = l.written("mean", N);
    X* rstd = l.written("rstd", N);
    X* dinp = l.added("dinp", N * C);
    X* sum = l.added("sum of dinp", C);
    X* dweight = l.added("dweight", C);
    X* dbias = l.added("dbias", C);

    l.forward = [=] { layernorm_forward(dev, out, mean, rstd, inp, weight, bias, N, C); };

    l.backward = [=] {
        layernorm_backward(dev, dinp, dweight, dbias, sum, nullptr, dout, inp, weight, mean, rstd,
                           N, C);
    };

    l.formula = [=](Layer<X>& l) {
        for (int n = 0; n < N; n++) {
            double m = 0;
            for (int c = 0; c < C; c++)
                m += inp[n * C + c] / C;
            double variance = 0;
            for (int c = 0; c < C; c++)
                variance += std::pow(inp[n * C + c] - m, 2) / C;
            const double deviation = std::sqrt(variance + 1e-5);

            CHECK_NEAR(mean[n], m, 1e-13);
            CHECK_NEAR(rstd[n], 1 / deviation, 1e-13 * rstd[n]);
            for (int c = 0; c < C; c++) {
                const double normalised = (inp[n * C + c] - m) / deviation;
                CHECK_NEAR(out[n * C + c], normalised * weight[c] + bias[c], 1e-12);
            }
        }
        check_column_sums(l["sum of dinp"], l["dinp"]);
    };
    return l;
}

template <class X>
static Layer<X> matmul_layer(int N, int C, int OC, bool with_bias = true) {
    Layer<X> l(format("matmul %s N=%d C=%d OC=%d", name_of(dtype_of<X>()), N, C, OC));
    X* inp = l.input("inp", N * C);
    X* weight = l.input("weight", OC * C);
    X* bias = l.input("bias", OC);
    X* dout = l.input("dout", N * OC);
    X* out = l.written("out", N * OC);
    X* dinp = l.written("dinp", N * C);
    X* dweight = l.added("dweight", OC * C);
    const X* residual = with_bias ? nullptr : dout;  // any values will do

    l.forward = [=] {
        matmul_forward<X>(dev, out, inp, weight, with_bias ? bias : nullptr, N, C, OC, residual);
    };

    l.backward = [=] { matmul_backward(dev, dinp, dweight, dout, inp, weight, N, C, OC); };

    l.formula = [=](Layer<X>& l) {
        Vec want(N * OC);
        for (int n = 0; n < N; n++)
            for (int o = 0; o < OC; o++) {
                double sum = with_bias ? bias[o] : residual[n * OC + o];
                for (int c = 0; c < C; c++)
                    sum += double(inp[n * C + c]) * weight[o * C + c];
                want[n * OC + o] = sum;
            }
        check_close(l.what + " out", l["out"].x, want, 1e-14);
    };
    return l;
}

template <class X>
static Layer<X> gelu_layer(int N, int C) {
    Layer<X> l("gelu");
    X* inp = l.input("inp", N * C, 2);
    X* dout = l.input("dout", N * C);
    X* out = l.written("out", N * C);
    X* dinp = l.written("dinp", N * C);
    X* sum = l.added("sum of dinp", C);

    l.forward = [=] { activation_forward(dev, out, inp, N * C); };

    l.backward = [=] { activation_backward<X>(dev, dinp, sum, nullptr, nullptr, inp, dout, N, C); };

    l.formula = [=](Layer<X>& l) {
        for (int i = 0; i < N * C; i++) {
            const double x = inp[i];
            const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
            CHECK_NEAR(out[i], 0.5 * x * (1 + std::tanh(u)), 1e-14 * (1 + std::fabs(x)));
        }
        check_column_sums(l["sum of dinp"], l["dinp"]);
    };
    return l;
}

struct AttentionResult {
    Vec out;
    Vec lse;
};

// The formula, with a row of S written out.
template <class X>
static AttentionResult plain_attention(const AttentionShape& s, const HeadsView<const X>& queries,
                                       const HeadsView<const X>& keys,
                                       const HeadsView<const X>& values) {
    const int HS = s.HS;
    const double scale = s.scale != 0 ? s.scale : 1 / std::sqrt(double(HS));
    AttentionResult result;
    result.out = poison(size_t(s.B) * s.Tq * s.NH * HS);
    result.lse = poison(s.B * s.NH * s.Tq);
    for (int b = 0; b < s.B; b++)
        for (int h = 0; h < s.NH; h++)
            for (int i = 0; i < s.Tq; i++) {
                const X* q = queries.row(b, i, h, HS);
                const int seen = s.causal ? s.Tk - s.Tq + i + 1 : s.Tk;
                Vec S(s.Tk, -inf);
                for (int j = 0; j < seen; j++)
                    S[j] = scale * std::inner_product(q, q + HS, keys.row(b, j, h, HS), 0.0);

                double sum = 0;
                for (double x : S)
                    sum += std::exp(x);
                result.lse[(b * s.NH + h) * s.Tq + i] = std::log(sum);

                for (int d = 0; d < HS; d++) {
                    double o = 0;
                    for (int j = 0; j < s.Tk; j++)
                        o += std::exp(S[j]) / sum * values.row(b, j, h, HS)[d];
                    result.out[(size_t(b * s.Tq + i) * s.NH + h) * HS + d] = o;
                }
            }
    return result;
}

// The last Tq of Tk tokens are queries. `rest` (B, NH, Tq) may be null.
template <class X>
static Layer<X> attention_layer(const AttentionShape& s, X* rest = nullptr) {
    const int B = s.B;
    const int Tq = s.Tq;
    const int Tk = s.Tk;
    const int NH = s.NH;
    const int HS = s.HS;
    const int first_query = Tk - Tq;  // the tokens before it are keys only
    Layer<X> l(
        format("attention Tq=%d Tk=%d HS=%d causal=%d scale=%.3g", Tq, Tk, HS, s.causal, s.scale));
    const size_t n = size_t(B) * Tq * NH * HS;
    const size_t all = size_t(B) * Tk * NH * HS;
    X* qkv = l.input("qkv", 3 * all, 1, 0.1);
    X* dout = l.input("dout", n);
    X* out = l.written("out", n);
    X* lse = l.written("lse", B * NH * Tq);
    X* dqkv = l.written("dqkv", 3 * all);
    X* sum = l.added("sum of dqkv", 3 * NH * HS);
    const PackedHeads<const X> in = packed<const X>(qkv, Tk, s);
    const PackedHeads<X> gradients = packed(dqkv, Tk, s);
    const HeadsView<const X> queries = in.q.from(first_query);

    l.forward = [=] {
        AttentionForward<X> c{s};
        c.q = queries;
        c.k = in.k;
        c.v = in.v;
        c.out = contiguous(out, s.queries());
        c.lse = {lse, size_t(Tq)};
        c.lse_rest = {rest, size_t(Tq)};
        attention_forward(dev, c);
    };

    l.backward = [=] {
        AttentionBackward<X> c{s};
        c.q = queries;
        c.k = in.k;
        c.v = in.v;
        c.dout = contiguous<const X>(dout, s.queries());
        c.out = contiguous<const X>(out, s.queries());
        c.lse = {lse, size_t(Tq)};
        c.lse_rest = {rest, size_t(Tq)};
        c.dq = gradients.q.from(first_query);
        c.dk = gradients.k;
        c.dv = gradients.v;
        // no call writes these
        for (int b = 0; b < B; b++)
            for (int t = 0; t < first_query; t++)
                std::fill_n(gradients.q.row(b, t, 0, HS), NH * HS, X(0));
        attention_backward(dev, c);
        qkv_bias_backward<X>(dev, sum, nullptr, dqkv, nullptr, nullptr, B * Tk, NH * HS);
    };

    l.formula = [=](Layer<X>& l) {
        const AttentionResult want = plain_attention<X>(s, queries, in.k, in.v);
        check_close(l.what + " out", l["out"].x, want.out, 1e-14);
        check_close(l.what + " lse", l["lse"].x, want.lse, 1e-14);
        check_column_sums(l["sum of dqkv"], l["dqkv"]);
    };
    return l;
}

template <class X>
static Layer<X> classifier_layer(int N, int V, int Vp) {
    Layer<X> l(format("classifier N=%d V=%d Vp=%d", N, V, Vp));
    const X dloss = 0.37f;
    const std::vector<int> targets = random_tokens(N, V);
    X* logits = l.input("logits", N * Vp, 3);
    X* dlosses = l.input("dlosses", N);
    X* losses = l.written("losses", N);
    X* again = l.written("losses again", N);
    X* dlogits = l.written("dlogits", N * Vp);
    // Padding is never read. It is +∞, because std::max could drop a NaN.
    for (int n = 0; n < N; n++)
        std::fill(logits + n * Vp + V, logits + (n + 1) * Vp, inf);
    std::fill_n(dlosses, N, dloss);

    l.forward = [=] { classifier<X>(dev, logits, losses, targets.data(), 0, N, V, Vp); };

    l.backward = [=] {
        std::copy_n(logits, N * Vp, dlogits);
        classifier(dev, dlogits, again, targets.data(), dloss, N, V, Vp);
    };

    l.formula = [=](Layer<X>& l) {
        for (int n = 0; n < N; n++) {
            double sum = 0;
            for (int i = 0; i < V; i++)
                sum += std::exp(logits[n * Vp + i]);
            const double probability = std::exp(logits[n * Vp + targets[n]]) / sum;
            CHECK_NEAR(losses[n], -std::log(probability), 1e-13 * (1 + losses[n]));
            for (int i = V; i < Vp; i++)
                CHECK(dlogits[n * Vp + i] == 0);
        }
        CHECK(same_bits(l["losses"].x, l["losses again"].x));
    };
    return l;
}

// -------------------------------------------------------------------------------------------------
// The tests

TEST(encoder) {
    for (auto [B, T, C] : {std::array{1, 1, 1}, {2, 5, 3}, {3, 17, 130}})
        CHECK_LAYER(encoder_layer, B, T, C, 7);
    const Positions two_chunks = {.chunk = 2, .early = 2, .late = 6};  // as a rank of a ring has
    CHECK_LAYER(encoder_layer, 2, 4, 3, 7, two_chunks);
}

TEST(layernorm) {
    for (auto [N, C] : {std::array{1, 3}, {3, 5}, {4, 64}, {9, 37}, {33, 100}, {2, 333}, {258, 60}})
        CHECK_LAYER(layernorm_layer, N, C);
}

// The sizes are close to those that add_product() cuts a product into: Mr = 6 and Mc = 24 rows, a
// depth of Kc = 256, and Nr = 8 and Nc = 1024 columns, or twice as many in float.
TEST(matmul) {
    const std::array<int, 3> sizes[] = {{1, 1, 1},     {3, 5, 7},     {6, 256, 16},  {7, 257, 17},
                                        {24, 255, 15}, {25, 600, 33}, {130, 24, 65}, {515, 9, 48},
                                        {3, 2, 1025},  {2, 2049, 3},  {1, 3, 2060}};
    for (auto [N, C, OC] : sizes) {
        const bool with_bias = N % 2 == 1;  // or else with a residual
        check([&](auto x) { return matmul_layer<decltype(x)>(N, C, OC, with_bias); }, 1e-6);
    }
}

TEST(gelu) {
    CHECK_LAYER(gelu_layer, 17, 59);

    const std::vector<float> far = {-1e4f, -100, -20, 0, 20, 100, 1e4f};
    const std::vector<float> ones(far.size(), 1);
    std::vector<float> y = poison<float>(far.size());
    std::vector<float> dy = y;
    std::vector<float> ignored(far.size());
    activation_forward(dev, y.data(), far.data(), far.size());
    activation_backward<float>(dev, dy.data(), ignored.data(), nullptr, nullptr, far.data(),
                               ones.data(), 1, far.size());
    const std::vector<float> slopes = {0, 0, 0, 0.5f, 1, 1, 1};
    for (size_t i = 0; i < far.size(); i++)
        CHECK(y[i] == std::max(far[i], 0.f));
    CHECK(dy == slopes);
}

TEST(attention) {
    for (auto [Tq, Tk] : {std::array{1, 1}, {2, 2}, {17, 17}, {1, 9}, {5, 9}})
        for (int HS : {4, 32, 64})
            for (bool causal : {true, false})
                for (float scale : {0.f, 0.3f})
                    CHECK_LAYER(attention_layer, {.B = 2,
                                                  .Tq = Tq,
                                                  .Tk = Tk,
                                                  .NH = 3,
                                                  .HS = HS,
                                                  .causal = causal,
                                                  .scale = scale});
    for (auto [T, HS] : {std::array{19, 12}, {129, 20}})
        CHECK_LAYER(attention_layer, {.B = 2, .Tq = T, .Tk = T, .NH = 2, .HS = HS});

    CHECK_ERROR(attention_layer<double>({.B = 1, .Tq = 1, .Tk = 1, .NH = 1, .HS = 257}).run(),
                "head size is 257");
    const AttentionForward<double> c{.s = {.B = 1, .Tq = 3, .Tk = 2, .NH = 1, .HS = 4}};
    CHECK_ERROR(attention_forward(dev, c), "Tq is 3 and Tk is 2");
}

// lse and its rest together are lse in more digits. Backward subtracts both, so if the rest is
// larger by log 2, P is half as large.
TEST(attention_rest_of_lse) {
    std::vector<float> rest(65 * 2);
    rng.seed(7);
    const AttentionShape s{.B = 1, .Tq = 65, .Tk = 65, .NH = 2, .HS = 32};
    Layer<float> l = attention_layer<float>(s, rest.data());
    rng.seed(7);
    Layer<double> exact = attention_layer<double>(s);
    l.run();
    exact.run();

    double error_with_rest = 0;
    double error_without = 0;
    for (size_t i = 0; i < rest.size(); i++) {
        const double error = l["lse"].x[i] - exact["lse"].x[i];
        error_with_rest += std::fabs(error + rest[i]);
        error_without += std::fabs(error);
    }
    CHECK(error_with_rest < 0.8 * error_without);

    const std::vector<float> before = l["dqkv"].x;
    for (float& r : rest)
        r += std::log(2.f);
    l.backward();
    const size_t C = size_t(s.NH) * s.HS;
    for (size_t i = 0; i < before.size(); i++) {
        const bool is_dv = (i / C) % 3 == 2;
        if (is_dv)
            CHECK_NEAR(l["dqkv"].x[i], before[i] / 2, 1e-6 * (1 + std::fabs(before[i])));
    }
}

// With the larger scale, scores lie beyond ±1e5, where exp overflows unless the maximum is
// subtracted. With the other they are ordinary, up to about ±30.
TEST(attention_large_scores) {
    for (float scale : {1.f, 1e4f}) {
        Layer<float> l =
            attention_layer<float>({.B = 1, .Tq = 65, .Tk = 65, .NH = 2, .HS = 64, .scale = scale});
        l.run();
        for (const char* name : {"out", "lse", "dqkv"})
            CHECK(count_nonfinite(dev, nullptr, l[name].x.data(), l[name].x.size()) == 0);
    }
}

TEST(classifier) {
    for (auto [N, V, Vp] : {std::array{1, 1, 1}, {5, 7, 7}, {9, 13, 128}, {258, 300, 384}})
        CHECK_LAYER(classifier_layer, N, V, Vp);

    // Targets outside the vocabulary, padding included, give a loss of NaN, which does not spread
    // to other rows.
    const int V = 5;
    const int Vp = 8;
    const std::vector<int> targets = {2, -1, 2, V, Vp, 1 << 30};
    std::vector<float> logits = randn<float>(targets.size() * Vp);
    std::vector<float> losses(targets.size());
    for (float dloss : {0.f, 1.f}) {
        classifier(dev, logits.data(), losses.data(), targets.data(), dloss, targets.size(), V, Vp);
        for (size_t n = 0; n < targets.size(); n++) {
            const bool is_outside = targets[n] < 0 || targets[n] >= V;
            CHECK(std::isnan(losses[n]) == is_outside);
            if (dloss != 0)
                CHECK(std::isnan(logits[n * Vp]) == is_outside);
        }
    }

    // exp overflows unless the maximum is subtracted
    std::vector<float> huge = {3e4f, -3e4f, 2e4f};
    float loss = 0;
    classifier(dev, huge.data(), &loss, &targets[0], 1.f, 1, 3, 3);
    CHECK(loss == 1e4f);
    CHECK((huge == std::vector<float>{1, 0, -1}));
}

TEST(reductions) {
    for (size_t n : {0, 1, 7, 100003}) {
        const std::vector<float> x = randn<float>(n, 1, 0.1);
        double sum = 0;
        double squares = 0;
        for (float value : x) {
            sum += value;
            squares += double(value) * value;
        }
        float got = nanf("");
        reduce_sum(dev, &got, nullptr, x.data(), 0.5f, n);
        CHECK_NEAR(got, 0.5 * sum, 1e-7 * std::fabs(sum));
        global_norm(dev, &got, nullptr, x.data(), n);
        CHECK_NEAR(got, std::sqrt(squares), 1e-7 * std::sqrt(squares));
    }
    for (float bad : {nanf(""), inf, -inf}) {
        std::vector<float> x = randn<float>(1000);
        x[1] = bad;
        x[777] = bad;
        float norm = 0;
        global_norm(dev, &norm, nullptr, x.data(), x.size());
        CHECK(!std::isfinite(norm));
        CHECK(count_nonfinite(dev, nullptr, x.data(), x.size()) == 2);

        const Vec wide(x.begin(), x.end());
        CHECK(count_nonfinite(dev, nullptr, wide.data(), 777) == 1);
    }
}

// dev/test_recipe repeats every update of a run in fp64, with ranks that update shares, too.
TEST(adamw_without_a_finite_norm) {
    const Vec start = randn(9);
    const ParamRange all = {.begin = 0, .size = 9, .decay = true};
    const AdamW hyper = {.lr = 1e-2f,
                         .beta1 = 0.9f,
                         .beta2 = 0.95f,
                         .eps = 1e-8f,
                         .weight_decay = 0.1f,
                         .max_norm = 1.f,
                         .step = 3,
                         .seed = 0};
    for (const double bad : {double(nanf("")), double(inf)}) {
        Vec params = start;
        Vec m = start;
        Vec v = start;
        adamw_update<double>(dev, params.data(), nullptr, m.data(), v.data(), start.data(), &bad,
                             &all, 1, hyper);
        CHECK(params == start);
        CHECK(m == start);
        CHECK(v == start);
    }
}

// One element with a gradient of 1 and with a β near 1, first as β1 and then as β2. With powers in
// fp32, 1 − β² would be off by 5e-6 of itself and 1 − β³ by 1e-5, which is more than either check
// allows.
TEST(bias_correction_is_fp64) {
    const float one = 1;
    const float near_one = 0.99999f;
    const double beta = near_one;
    const ParamRange range = {.begin = 0, .size = 1, .decay = false};
    const auto updated = [&](float beta1, float beta2, int step) {
        const AdamW hyper = {.lr = 1,
                             .beta1 = beta1,
                             .beta2 = beta2,
                             .eps = 0,
                             .weight_decay = 0,
                             .max_norm = 0,
                             .step = step,
                             .seed = 0};
        float p = 0;
        float m = 0;
        float v = 0;
        adamw_update<float>(dev, &p, nullptr, &m, &v, &one, &one, &range, 1, hyper);
        return p;
    };
    for (int step = 1; step < 10; step++) {
        const double share = (1 - beta) / (1 - std::pow(beta, step));
        CHECK_NEAR(updated(near_one, 0, step), -share, 1e-6 / share);
        CHECK_NEAR(updated(0, near_one, step), -1 / std::sqrt(share), 1e-6 / share);
    }
}

// Cpu(1) sets OpenMP's number of threads, which must not become the number that there is.
TEST(one_thread_for_one_cpu_is_not_one_for_the_next) {
    const std::string all = Cpu().name;
    CHECK(Cpu(1).name == "CPU, 1 thread");
    CHECK(Cpu().name == all);
}

TEST_MAIN
