// Tests the CPU reference, the oracle of all other tests. Its own oracle is calculus. Each backward is compared with
// central differences of its forward in fp64, along random directions and single elements. Each forward is compared
// with its formula, written the naive way. Outputs that a layer writes start as NaN, and those it adds into start
// random.
//
// Run: ./dev/test_reference [part of a test's name]
#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "dev/test.h"
#include "layers/cpu/reference.h"

using Vec = std::vector<double>;

static const Cpu dev;
static constexpr float inf = std::numeric_limits<float>::infinity();
static std::mt19937_64 rng(20240521);

// Exactly the same values for float and double, because they are rounded to float first.
template <class X = double>
static std::vector<X> randn(size_t n, double sigma = 1, double mean = 0) {
    std::normal_distribution<double> normal(mean, sigma);
    std::vector<X> x(n);
    for (X& value : x) value = X(float(normal(rng)));
    return x;
}
template <class X = double>
static std::vector<X> poison(size_t n) {
    return std::vector<X>(n, std::numeric_limits<X>::quiet_NaN());
}
static std::vector<int> random_tokens(size_t n, int V) {
    std::vector<int> tokens(n);
    for (int& t : tokens) t = int(rng() % V);
    return tokens;
}

static double dot(const Vec& a, const Vec& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}
static double norm(const Vec& a) {
    return std::sqrt(dot(a, a));
}
static Vec operator-(Vec a, const Vec& b) {
    for (size_t i = 0; i < a.size(); i++) a[i] -= b[i];
    return a;
}
template <class X>
static bool same_bits(const std::vector<X>& a, const std::vector<X>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(X)) == 0;
}

// max|got − want| ≤ tol·max|want|
template <class X, class Y>
static void check_close(const std::string& what, const std::vector<X>& got, const std::vector<Y>& want, double tol) {
    double worst = 0, scale = 0;
    for (size_t i = 0; i < want.size(); i++) {
        const double error = std::fabs(double(got[i]) - want[i]);
        worst = std::isnan(error) ? inf : std::max(worst, error);
        scale = std::max(scale, std::fabs(double(want[i])));
    }
    if (got.size() != want.size() || !(worst <= tol * scale))
        test::report(__FILE__, __LINE__, format("%s: off by %.3g of %.3g", what.c_str(), worst, scale));
}

// Checks that grad is dloss/dx. It moves x, in place and back, along a few random directions and a few single elements.
static void check_gradient(const std::string& what, Vec& x, const Vec& grad, const std::function<double()>& loss) {
    const Vec start = x;
    const double h = 1e-5, round_off = 1e-9 * (1 + std::fabs(loss()));
    for (int trial = 0; trial < 8; trial++) {
        Vec direction(x.size(), 0.0);
        if (trial < 3)
            direction = randn(x.size());
        else
            direction[trial == 3 ? 0 : trial == 4 ? x.size() - 1 : rng() % x.size()] = 1;
        double sides[2];
        for (int side = 0; side < 2; side++) {
            for (size_t i = 0; i < x.size(); i++) x[i] = start[i] + (side ? h : -h) * direction[i];
            sides[side] = loss();
        }
        x = start;
        const double measured = (sides[1] - sides[0]) / (2 * h), claimed = dot(grad, direction);
        const double tol = 1e-7 * norm(grad) * norm(direction) / std::sqrt(double(x.size())) + round_off;
        if (!(std::fabs(measured - claimed) <= tol))
            test::report(__FILE__, __LINE__,
                         format("%s, %s %d: gradient %.12g, finite difference %.12g (tolerance %.2g)", what.c_str(),
                                trial < 3 ? "direction" : "element", trial, claimed, measured, tol));
    }
}

// ---------------------------------------------------------------------------------------------------------------------

TEST(device) {
    CHECK(Cpu(2).name == "CPU, 2 threads");
    CHECK(Cpu(1).name == "CPU, 1 thread");
    const Cpu all;
    CHECK(all.total_bytes > (size_t(64) << 20));
    char* p = static_cast<char*>(all.alloc(1001));
    CHECK(reinterpret_cast<uintptr_t>(p) % 64 == 0);
    std::vector<char> there(1001, 'x'), back(1001, '?');
    all.upload(p, there.data(), 1001);
    all.download(back.data(), p, 1001);
    CHECK(back == there);
    all.zero(p, 1000);
    CHECK(p[0] == 0 && p[999] == 0 && p[1000] == 'x');
    all.free(p);
    CHECK_ERROR(all.alloc(size_t(1) << 62), "4611686018427387904 bytes");
}

// ---------------------------------------------------------------------------------------------------------------------

// A layer with all its tensors, in float or double. What it writes starts as NaN, and what it adds into starts random.
// The names tell what belongs together. The result "dx" is the gradient of the input "x", and the input "dout" weights
// the result "out" in the loss.
template <class X>
struct Layer {
    struct Tensor {
        std::string name;
        std::vector<X> x, start;
    };
    std::string what;
    std::deque<Tensor> inputs, results;
    std::function<void()> forward, backward = [] {};
    std::function<void(Layer&)> formula = [](Layer&) {};  // checks the results of a run against their definition

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
                if (t.name == name) return t;
        throw Error(what + " has no tensor " + name);
    }
    void run() { forward(), backward(); }
};

// Runs a layer and checks its results against their formula.
template <class X>
static void check_run(Layer<X>&& l) {
    const auto before = l.inputs;
    l.run();
    l.formula(l);
    for (size_t i = 0; i < before.size(); i++) CHECK(same_bits(l.inputs[i].x, before[i].x));
}
// Also checks its gradients against finite differences.
static void check(Layer<double>&& l) {
    check_run(std::move(l));
    const auto loss = [&] {
        l.forward();
        double sum = 0;
        for (const auto& t : l.inputs)
            if (t.name[0] == 'd') sum += dot(t.x, l[t.name.substr(1)].x);
        return sum;
    };
    for (const auto& t : l.results)
        if (t.name[0] == 'd') check_gradient(l.what + " " + t.name, l[t.name.substr(1)].x, t.x - t.start, loss);
    l.forward();  // leaves the results of the unperturbed inputs
}

// Checks that the layer has added the sums of x's columns into `sums`.
template <class Tensor>
static void check_column_sums(const Tensor& sums, const Tensor& t) {
    for (size_t c = 0; c < sums.x.size(); c++) {
        double want = sums.start[c];
        for (size_t i = c; i < t.x.size(); i += sums.x.size()) want += t.x[i];
        CHECK_NEAR(sums.x[c], want, 1e-12);
    }
}

template <class X>
static Layer<X> encoder_layer(int B, int T, int C, int V) {
    Layer<X> l(format("encoder B=%d T=%d C=%d", B, T, C));
    const int N = B * T;
    const std::vector<int> tokens = random_tokens(N, V);
    std::vector<int> plan(encoder_plan_ints(dev, N));
    encoder_plan(dev, plan.data(), tokens.data(), N);
    CHECK(plan == tokens);
    X *wte = l.input("wte", V * C), *wpe = l.input("wpe", T * C), *dout = l.input("dout", N * C);
    X *out = l.written("out", N * C), *dwte = l.added("dwte", V * C), *dwpe = l.added("dwpe", T * C);
    l.forward = [=] { encoder_forward(dev, out, tokens.data(), wte, wpe, B, T, C); };
    l.backward = [=] { encoder_backward(dev, dwte, dwpe, nullptr, dout, plan.data(), B, T, C); };
    l.formula = [=](Layer<X>&) {
        for (int i = 0; i < N * C; i++) CHECK(out[i] == wte[tokens[i / C] * C + i % C] + wpe[i / C % T * C + i % C]);
    };
    return l;
}

template <class X>
static Layer<X> residual_layernorm_layer(int N, int C) {
    Layer<X> l(format("residual_layernorm N=%d C=%d", N, C));
    X *a = l.input("a", N * C, 2, 0.5), *b = l.input("b", N * C);
    X *weight = l.input("weight", C, 1, 1), *bias = l.input("bias", C);
    X *dout = l.input("dout", N * C), *dresidual = l.input("dresidual", N * C);
    X *residual = l.written("residual", N * C), *out = l.written("out", N * C);
    X *mean = l.written("mean", N), *rstd = l.written("rstd", N);
    X *da = l.written("da", N * C), *db = l.written("db", N * C), *sum = l.added("sum of da", C);
    X *dweight = l.added("dweight", C), *dbias = l.added("dbias", C);
    l.forward = [=] { residual_layernorm_forward(dev, residual, out, mean, rstd, a, b, weight, bias, N, C); };
    l.backward = [=] {
        std::copy_n(dresidual, N * C, da);  // the residual stream goes on below as well
        layernorm_backward(dev, da, dweight, dbias, sum, nullptr, dout, residual, weight, mean, rstd, N, C);
        std::copy_n(da, N * C, db);
    };
    l.formula = [=](Layer<X>& l) {
        for (int i = 0; i < N * C; i++) CHECK(residual[i] == a[i] + b[i]);
        for (int n = 0; n < N; n++) {
            double m = 0, variance = 0;
            for (int c = 0; c < C; c++) m += residual[n * C + c] / C;
            for (int c = 0; c < C; c++) variance += std::pow(residual[n * C + c] - m, 2) / C;
            CHECK_NEAR(mean[n], m, 1e-13);
            CHECK_NEAR(rstd[n], 1 / std::sqrt(variance + 1e-5), 1e-13 * rstd[n]);
            for (int i = n * C; i < (n + 1) * C; i++)
                CHECK_NEAR(out[i], (residual[i] - m) / std::sqrt(variance + 1e-5) * weight[i % C] + bias[i % C], 1e-12);
        }
        std::vector<X> out_ = poison<X>(N * C), mean_ = poison<X>(N), rstd_ = poison<X>(N);
        layernorm_forward(dev, out_.data(), mean_.data(), rstd_.data(), residual, weight, bias, N, C);
        CHECK(same_bits(l["out"].x, out_) && same_bits(l["mean"].x, mean_) && same_bits(l["rstd"].x, rstd_));
        check_column_sums(l["sum of da"], l["da"]);
        std::vector<X> da_(dresidual, dresidual + N * C), dweight_(C), dbias_(C);  // without the sum
        layernorm_backward<X>(dev, da_.data(), dweight_.data(), dbias_.data(), nullptr, nullptr, dout, residual, weight,
                              mean, rstd, N, C);
        CHECK(same_bits(l["da"].x, da_));
    };
    return l;
}

template <class X>
static Layer<X> matmul_layer(int N, int C, int OC, bool with_bias = true) {
    Layer<X> l(format("matmul %s N=%d C=%d OC=%d", name_of(dtype_of<X>()), N, C, OC));
    X *inp = l.input("inp", N * C), *weight = l.input("weight", OC * C), *bias = l.input("bias", OC);
    X *dout = l.input("dout", N * OC), *out = l.written("out", N * OC);
    X *dinp = l.written("dinp", N * C), *dweight = l.added("dweight", OC * C);
    l.forward = [=] { matmul_forward<X>(dev, out, inp, weight, with_bias ? bias : nullptr, N, C, OC); };
    l.backward = [=] { matmul_backward(dev, dinp, dweight, dout, inp, weight, N, C, OC); };
    l.formula = [=](Layer<X>& l) {
        const double tol = sizeof(X) == 8 ? 1e-14 : 1e-6;
        const std::vector<X>& start = l["dweight"].start;
        Vec out_(N * OC), dinp_(N * C), dweight_(start.begin(), start.end());
        for (int n = 0; n < N; n++)
            for (int o = 0; o < OC; o++) {
                double sum = with_bias ? bias[o] : 0;
                for (int c = 0; c < C; c++) {
                    sum += double(inp[n * C + c]) * weight[o * C + c];
                    dinp_[n * C + c] += double(dout[n * OC + o]) * weight[o * C + c];
                    dweight_[o * C + c] += double(dout[n * OC + o]) * inp[n * C + c];
                }
                out_[n * OC + o] = sum;
            }
        check_close(l.what + " out", l["out"].x, out_, tol);
        check_close(l.what + " dinp", l["dinp"].x, dinp_, tol);
        check_close(l.what + " dweight", l["dweight"].x, dweight_, tol);

        std::vector<X> alone = start;  // without dinp
        matmul_backward<X>(dev, nullptr, alone.data(), dout, inp, weight, N, C, OC);
        CHECK(same_bits(alone, l["dweight"].x));
        std::vector<X> written = poison<X>(OC * C), added(OC * C);  // in `written` there is nothing to add to
        matmul_backward<X>(dev, nullptr, written.data(), dout, inp, weight, N, C, OC, false);
        matmul_backward<X>(dev, nullptr, added.data(), dout, inp, weight, N, C, OC);
        CHECK(same_bits(written, added));
    };
    return l;
}

template <class X>
static Layer<X> gelu_layer(int N, int C) {
    Layer<X> l("gelu");
    X *inp = l.input("inp", N * C, 2), *dout = l.input("dout", N * C);
    X *out = l.written("out", N * C), *dinp = l.written("dinp", N * C), *sum = l.added("sum of dinp", C);
    l.forward = [=] { gelu_forward(dev, out, inp, N * C); };
    l.backward = [=] { gelu_backward<X>(dev, dinp, sum, nullptr, nullptr, inp, dout, N, C); };
    l.formula = [=](Layer<X>& l) {
        for (int i = 0; i < N * C; i++) {
            const double x = inp[i], u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
            CHECK_NEAR(out[i], 0.5 * x * (1 + std::tanh(u)), 1e-14 * (1 + std::fabs(x)));
        }
        check_column_sums(l["sum of dinp"], l["dinp"]);
    };
    return l;
}

// Attention as a layer has it, which is causal with scale 1/√HS, or with a mask and scale of its own.
struct Mask {
    bool causal;
    double scale;
};
template <class X>
static Layer<X> attention_layer(int B, int T, int NH, int HS, Attention kind, const Mask* own = nullptr) {
    const Mask mask = own ? *own : Mask{true, 1 / std::sqrt(double(HS))};
    Layer<X> l(format("attention T=%d HS=%d causal=%d scale=%.3g", T, HS, mask.causal, mask.scale));
    const size_t n = size_t(B) * T * NH * HS;
    X *qkv = l.input("qkv", 3 * n, 1, 0.1), *dout = l.input("dout", n), *out = l.written("out", n);
    X *lse = l.written("lse", B * NH * T), *dqkv = l.written("dqkv", 3 * n),
      *bias = l.added("sum of dqkv", 3 * NH * HS);
    l.forward = [=, layer = !own] {
        if (layer)
            attention_forward<X>(dev, kind, out, lse, nullptr, nullptr, qkv, B, T, NH, HS);
        else
            attention_forward<X>(dev, out, lse, qkv, B, T, NH, HS, mask.causal, mask.scale);
    };
    l.backward = [=, layer = !own] {
        if (layer)
            attention_backward<X>(dev, kind, dqkv, nullptr, dout, out, lse, nullptr, qkv, B, T, NH, HS);
        else
            attention_backward<X>(dev, dqkv, dout, out, lse, qkv, B, T, NH, HS, mask.causal, mask.scale);
        qkv_bias_backward<X>(dev, bias, nullptr, dqkv, nullptr, nullptr, B * T, NH * HS);
    };
    l.formula = [=](Layer<X>& l) {  // with the (T,T) matrix written out
        Vec out_ = poison(n), lse_ = poison(B * NH * T);
        for (int b = 0; b < B; b++)
            for (int h = 0; h < NH; h++)
                for (int i = 0; i < T; i++) {
                    const auto row = [&](int t, int which) {
                        return qkv + ((size_t(b * T + t) * 3 + which) * NH + h) * HS;
                    };
                    Vec S(T, -inf);
                    for (int j = 0; j < (mask.causal ? i + 1 : T); j++)
                        S[j] = mask.scale * std::inner_product(row(i, 0), row(i, 0) + HS, row(j, 1), 0.0);
                    double sum = 0;
                    for (double s : S) sum += std::exp(s);
                    lse_[(b * NH + h) * T + i] = std::log(sum);
                    for (int d = 0; d < HS; d++) {
                        double o = 0;
                        for (int j = 0; j < T; j++) o += std::exp(S[j]) / sum * row(j, 2)[d];
                        out_[(size_t(b * T + i) * NH + h) * HS + d] = o;
                    }
                }
        check_close(l.what + " out", l["out"].x, out_, 1e-14);
        check_close(l.what + " lse", l["lse"].x, lse_, 1e-14);
        check_column_sums(l["sum of dqkv"], l["dqkv"]);
    };
    return l;
}

// The gradient of a matmul's bias comes from another layer's backward. Here the layers are as in the trainer: q, k, v's
// product, attention, its projection, the residual's layer norm and the first half of the MLP.
static Layer<double> block_layer(int B, int T, int NH, int HS) {
    Layer<double> l("block");
    const int C = NH * HS, N = B * T;
    double *inp = l.input("inp", N * C), *qkvw = l.input("qkvw", 3 * C * C, 0.3), *qkvb = l.input("qkvb", 3 * C);
    double *projw = l.input("projw", C * C, 0.3), *projb = l.input("projb", C);
    double *lnw = l.input("lnw", C, 1, 1), *lnb = l.input("lnb", C);
    double *fcw = l.input("fcw", 4 * C * C, 0.3), *fcb = l.input("fcb", 4 * C);
    double *fcprojw = l.input("fcprojw", C * 4 * C, 0.3), *dout = l.input("dout", N * C);
    double *qkv = l.written("qkv", N * 3 * C), *atty = l.written("atty", N * C), *lse = l.written("lse", B * NH * T);
    double *proj = l.written("proj", N * C), *residual = l.written("residual", N * C), *ln = l.written("ln", N * C);
    double *mean = l.written("mean", N), *rstd = l.written("rstd", N), *out = l.written("out", N * C);
    double *fch = l.written("fch", N * 4 * C), *gelu = l.written("gelu", N * 4 * C);
    double *dqkvb = l.added("dqkvb", 3 * C), *dprojb = l.added("dprojb", C), *dfcb = l.added("dfcb", 4 * C);
    l.forward = [=] {
        matmul_forward(dev, qkv, inp, qkvw, qkvb, N, C, 3 * C);
        attention_forward<double>(dev, Attention::flash, atty, lse, nullptr, nullptr, qkv, B, T, NH, HS);
        matmul_forward(dev, proj, atty, projw, projb, N, C, C);
        residual_layernorm_forward(dev, residual, ln, mean, rstd, inp, proj, lnw, lnb, N, C);
        matmul_gelu_forward(dev, gelu, fch, ln, fcw, fcb, N, C, 4 * C);
        matmul_forward<double>(dev, out, gelu, fcprojw, nullptr, N, 4 * C, C);
    };
    l.backward = [=] {
        Vec fc = poison(N * 4 * C), dln = poison(N * C), dresidual(N * C), datty = poison(N * C);
        Vec dqkv = poison(N * 3 * C), dlnw(C), dlnb(C);
        matmul_gelu_backward<double>(dev, fc.data(), dfcb, nullptr, nullptr, dout, fcprojw, fch, N, 4 * C, C);
        matmul_backward<double>(dev, dln.data(), nullptr, fc.data(), nullptr, fcw, N, C, 4 * C);
        layernorm_backward<double>(dev, dresidual.data(), dlnw.data(), dlnb.data(), dprojb, nullptr, dln.data(),
                                   residual, lnw, mean, rstd, N, C);
        matmul_backward<double>(dev, datty.data(), nullptr, dresidual.data(), nullptr, projw, N, C, C);
        attention_backward<double>(dev, Attention::flash, dqkv.data(), nullptr, datty.data(), atty, lse, nullptr, qkv,
                                   B, T, NH, HS);
        qkv_bias_backward<double>(dev, dqkvb, nullptr, dqkv.data(), nullptr, nullptr, N, C);
    };
    l.formula = [=](Layer<double>& l) {  // what the GPU computes instead of two thirds of the sums
        const Vec added = l["dqkvb"].x - l["dqkvb"].start, dproj = l["dprojb"].x - l["dprojb"].start;
        for (int c = 0; c < C; c++) {
            double v = 0;
            for (int r = 0; r < C; r++) v += dproj[r] * projw[r * C + c];
            CHECK_NEAR(added[C + c], 0, 1e-12);
            CHECK_NEAR(added[2 * C + c], v, 1e-12);
        }
    };
    return l;
}

template <class X>
static Layer<X> classifier_layer(int N, int V, int Vp) {
    Layer<X> l(format("classifier N=%d V=%d Vp=%d", N, V, Vp));
    const X dloss = 0.37f;
    const std::vector<int> targets = random_tokens(N, V);
    X *logits = l.input("logits", N * Vp, 3), *dlosses = l.input("dlosses", N);
    X *losses = l.written("losses", N), *again = l.written("losses again", N), *dlogits = l.written("dlogits", N * Vp);
    for (int n = 0; n < N; n++)  // padding is never read. This is +∞, because NaN would hide from max
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
            for (int i = 0; i < V; i++) sum += std::exp(logits[n * Vp + i]);
            CHECK_NEAR(losses[n], -std::log(std::exp(logits[n * Vp + targets[n]]) / sum), 1e-13 * (1 + losses[n]));
            for (int i = V; i < Vp; i++) CHECK(dlogits[n * Vp + i] == 0);
        }
        CHECK(same_bits(l["losses"].x, l["losses again"].x));
    };
    return l;
}

// The sums over all gradients, and an update with their norm.
template <class X>
static Layer<X> update_layer(int n) {
    Layer<X> l("update");
    X *grads = l.input("grads", n, 1, 0.1), *sum = l.written("sum", 1), *norm = l.written("norm", 1);
    X *params = l.added("params", n), *m = l.added("m", n), *v = l.added("v", n);
    std::fill_n(v, n, X(0.5));  // squares
    l.forward = [=] {
        const ParamRange all = {0, size_t(n), true};
        reduce_sum(dev, sum, nullptr, grads, X(0.5), n);
        global_norm(dev, norm, nullptr, grads, n);
        adamw_update<X>(dev, params, nullptr, m, v, grads, norm, &all, 1, {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.f, 3, 0});
    };
    return l;
}

// ---------------------------------------------------------------------------------------------------------------------

TEST(encoder) {
    for (auto [B, T, C] : {std::array{1, 1, 1}, {2, 5, 3}, {3, 17, 130}}) check(encoder_layer<double>(B, T, C, 7));
    // In a rank's two chunks of a sequence rows 0 and 1 are at positions 2 and 3, rows 2 and 3 at 6 and 7.
    const Vec wte = {0}, wpe = {0, 1, 2, 3, 4, 5, 6, 7};
    const std::vector<int> tokens(8, 0);
    Vec out = poison(8), dwte(1), dwpe(8);
    encoder_forward(dev, out.data(), tokens.data(), wte.data(), wpe.data(), 2, 4, 1, {2, 2, 6});
    CHECK((out == Vec{2, 3, 6, 7, 2, 3, 6, 7}));
    encoder_backward(dev, dwte.data(), dwpe.data(), nullptr, out.data(), tokens.data(), 2, 4, 1, {2, 2, 6});
    CHECK((dwpe == Vec{0, 0, 4, 6, 0, 0, 12, 14}));
}

TEST(layernorm) {
    for (auto [N, C] : {std::array{1, 1}, {3, 5}, {4, 64}, {33, 100}, {2, 333}})
        check(residual_layernorm_layer<double>(N, C));
    const int N = 9, C = 37;
    Layer<double> l = residual_layernorm_layer<double>(N, C);
    check(std::move(l));
    for (const char* in_place : {"a", "b"}) {
        Vec a = l["a"].x, b = l["b"].x, out = poison(N * C), mean(N), rstd(N);
        Vec& residual = in_place[0] == 'a' ? a : b;
        residual_layernorm_forward(dev, residual.data(), out.data(), mean.data(), rstd.data(), a.data(), b.data(),
                                   l["weight"].x.data(), l["bias"].x.data(), N, C);
        CHECK(same_bits(residual, l["residual"].x) && same_bits(out, l["out"].x));
    }
}

// The sizes are around the tiles of the product: 6 rows, 8 or 16 columns, 24 rows, depth 256, 1024 or 2048 columns.
TEST(matmul) {
    const std::array<int, 3> sizes[] = {{1, 1, 1},     {3, 5, 7},     {6, 256, 16},  {7, 257, 17},
                                        {24, 255, 15}, {25, 600, 33}, {130, 24, 65}, {515, 9, 48},
                                        {3, 2, 1025},  {2, 2049, 3},  {1, 3, 2060}};
    for (auto [N, C, OC] : sizes) {
        check_run(matmul_layer<double>(N, C, OC));
        check_run(matmul_layer<float>(N, C, OC, false));
    }
    for (auto [N, C, OC] : {std::array{1, 1, 1}, {5, 7, 11}, {33, 20, 26}}) check(matmul_layer<double>(N, C, OC));
}

TEST(gelu) {
    const int N = 17, C = 59;
    Layer<double> l = gelu_layer<double>(N, C);
    check(std::move(l));
    Vec in_place = l["dout"].x, sum = l["sum of dinp"].start, again = poison(N * C);
    gelu_backward(dev, in_place.data(), sum.data(), again.data(), nullptr, l["inp"].x.data(), in_place.data(), N, C);
    CHECK(same_bits(in_place, l["dinp"].x) && same_bits(sum, l["sum of dinp"].x) && same_bits(again, l["out"].x));

    const std::vector<float> far = {-1e4f, -100, -20, 0, 20, 100, 1e4f}, ones(far.size(), 1);
    std::vector<float> y = poison<float>(far.size()), dy = y, ignored(far.size());
    gelu_forward(dev, y.data(), far.data(), far.size());
    gelu_backward<float>(dev, dy.data(), ignored.data(), nullptr, nullptr, far.data(), ones.data(), 1, far.size());
    for (size_t i = 0; i < far.size(); i++) {
        CHECK(y[i] == std::max(far[i], 0.f));
        CHECK(dy[i] == (far[i] > 0 ? 1.f : far[i] < 0 ? 0.f : 0.5f));
    }
}

TEST(attention) {
    for (int T : {1, 2, 17})
        for (int HS : {4, 32, 64})
            for (bool causal : {true, false})
                for (double scale : {1 / std::sqrt(double(HS)), 0.3}) {
                    const Mask mask = {causal, scale};
                    check(attention_layer<double>(2, T, 3, HS, Attention::flash, &mask));
                }
    for (Attention kind : {Attention::flash, Attention::naive}) check(attention_layer<double>(2, 19, 2, 12, kind));
    CHECK_ERROR(attention_layer<double>(1, 1, 1, 257, Attention::flash).run(), "head size 257");
}

TEST(bias_gradients) {
    check(block_layer(2, 9, 2, 5));
}

TEST(attention_large_scores) {
    const int T = 65, NH = 2, HS = 64;
    for (float sharpen : {5.f, 1e4f}) {  // scores to ±1e5, at which exp overflows unless the maximum is subtracted
        Layer<float> l = attention_layer<float>(1, T, NH, HS, Attention::flash);
        std::vector<float>& qkv = l["qkv"].x;
        float largest = 0;  // out is an average of v
        for (size_t i = 0; i < qkv.size(); i++) {
            qkv[i] += 0.5f;
            if (i / (NH * HS) % 3 == 0) qkv[i] *= sharpen;
            if (i / (NH * HS) % 3 == 2) largest = std::max(largest, std::fabs(qkv[i]));
        }
        l.run();
        for (const char* name : {"out", "lse", "dqkv"})
            CHECK(count_nonfinite(dev, nullptr, l[name].x.data(), l[name].x.size()) == 0);
        for (float o : l["out"].x) CHECK(std::fabs(o) <= largest * 1.0001f);
    }
}

TEST(classifier) {
    for (auto [N, V, Vp] : {std::array{1, 1, 1}, {5, 7, 7}, {9, 13, 128}, {3, 300, 384}})
        check(classifier_layer<double>(N, V, Vp));

    // Targets outside the vocabulary, padding included, give a loss of NaN. Their neighbours do not notice.
    const int V = 5, Vp = 8;
    const std::vector<int> targets = {2, -1, 2, V, Vp, 1 << 30};
    std::vector<float> logits = randn<float>(targets.size() * Vp), losses(targets.size());
    for (float dloss : {0.f, 1.f}) {
        classifier(dev, logits.data(), losses.data(), targets.data(), dloss, targets.size(), V, Vp);
        for (size_t n = 0; n < targets.size(); n++) {
            CHECK(std::isnan(losses[n]) == (targets[n] != 2));
            if (dloss != 0) CHECK(std::isnan(logits[n * Vp]) == (targets[n] != 2));
        }
    }

    std::vector<float> huge = {3e4f, -3e4f, 2e4f}, loss = {0};  // exp overflows without the maximum
    const int target = 2;
    classifier(dev, huge.data(), loss.data(), &target, 1.f, 1, 3, 3);
    CHECK(loss[0] == 1e4f);
    CHECK(huge[0] == 1 && huge[1] == 0 && huge[2] == -1);
}

TEST(reductions) {
    for (size_t n : {0, 1, 7, 1000, 100003}) {
        const std::vector<float> x = randn<float>(n, 1, 0.1);
        double sum = 0, squares = 0;
        for (float value : x) sum += value, squares += double(value) * value;
        float got = nanf("");
        reduce_sum(dev, &got, nullptr, x.data(), 0.5f, n);
        CHECK_NEAR(got, 0.5 * sum, 1e-7 * std::fabs(sum));
        global_norm(dev, &got, nullptr, x.data(), n);
        CHECK_NEAR(got, std::sqrt(squares), 1e-7 * std::sqrt(squares));
    }
    for (float bad : {nanf(""), inf, -inf}) {
        std::vector<float> x = randn<float>(1000);
        x[777] = x[1] = bad;
        float norm_ = 0;
        global_norm(dev, &norm_, nullptr, x.data(), x.size());
        CHECK(!std::isfinite(norm_));
        CHECK(count_nonfinite(dev, nullptr, x.data(), x.size()) == 2);
        const Vec wide(x.begin(), x.end());
        CHECK(count_nonfinite(dev, nullptr, wide.data(), wide.size()) == 2);
        CHECK(count_nonfinite(dev, nullptr, wide.data(), 777) == 1);
    }
}

// A scalar AdamW, after the paper's Algorithm 2.
struct ScalarAdamW {
    double p, m = 0, v = 0;
    void step(double g, const AdamW& h, bool decay) {
        m = h.beta1 * m + (1.0 - h.beta1) * g;
        v = h.beta2 * v + (1.0 - h.beta2) * g * g;
        const double m_hat = m / (1 - std::pow(h.beta1, h.step)), v_hat = v / (1 - std::pow(h.beta2, h.step));
        p = p - h.lr * (m_hat / (std::sqrt(v_hat) + h.eps) + (decay ? h.weight_decay * p : 0));
    }
};

template <class X>
static void check_adamw(float max_norm, double tol) {
    const std::vector<ParamRange> ranges = {{2, 30, true}, {32, 5, false}, {40, 60, true}};  // 0, 1, 37…39 are in none
    const size_t n = 103;
    std::vector<X> params = randn<X>(n), m(n), v(n);
    const std::vector<X> start = params;
    std::vector<ScalarAdamW> scalars;
    for (X p : params) scalars.push_back({double(p)});

    AdamW hyper = {0.01f, 0.9f, 0.99f, 1e-6f, 0.1f, max_norm, 0, 0};
    for (hyper.step = 1; hyper.step <= 6; hyper.step++) {
        const std::vector<X> grads = randn<X>(n, std::pow(10.0, hyper.step - 4));  // norms from 0.01 to 1000
        X grad_norm;
        global_norm(dev, &grad_norm, nullptr, grads.data(), n);
        hyper.lr *= 0.9f;
        adamw_update<X>(dev, params.data(), nullptr, m.data(), v.data(), grads.data(), &grad_norm, ranges.data(), 3,
                        hyper);
        const double clip = max_norm > 0 && grad_norm > max_norm ? max_norm / double(grad_norm) : 1;
        for (const ParamRange& range : ranges)
            for (size_t i = range.begin; i < range.begin + range.size; i++)
                scalars[i].step(clip * grads[i], hyper, range.decay);
    }
    Vec p_(n), m_(n), v_(n);
    for (size_t i = 0; i < n; i++) p_[i] = scalars[i].p, m_[i] = scalars[i].m, v_[i] = scalars[i].v;
    check_close("adamw params", params, p_, tol);
    check_close("adamw m", m, m_, tol);
    check_close("adamw v", v, v_, tol);
    for (size_t i : {0, 1, 37, 39, 100, 102}) CHECK(params[i] == start[i] && m[i] == 0 && v[i] == 0);

    for (X bad : {std::numeric_limits<X>::quiet_NaN(), std::numeric_limits<X>::infinity()}) {
        const std::vector<X> params0 = params, m0 = m, v0 = v, grads = randn<X>(n);
        adamw_update<X>(dev, params.data(), nullptr, m.data(), v.data(), grads.data(), &bad, ranges.data(), 3, hyper);
        CHECK(same_bits(params, params0) && same_bits(m, m0) && same_bits(v, v0));
    }
}

// Updating shares of a tensor in three pieces and of one in one, each with its own state, equals one update of
// everything.
TEST(adamw_shares) {
    const size_t n = 3 * 40 + 24, ranks = 4;
    const AdamW hyper = {0.01f, 0.9f, 0.99f, 1e-6f, 0.1f, 1.f, 3, 0};
    const Vec start = randn(n), grads = randn(n);
    const double norm = ::norm(grads);
    Vec params = start, m(n, 0.5), v(n, 0.25), shared = start;
    const ParamRange all[] = {{0, 120, true}, {120, 24, false}};
    adamw_update<double>(dev, params.data(), nullptr, m.data(), v.data(), grads.data(), &norm, all, 2, hyper);
    for (size_t r = 0; r < ranks; r++) {
        const ParamRange own[] = {{r * 10, 10, true, 3, 40, r * 10}, {120 + r * 6, 6, false, 1, 24, 90 + r * 6}};
        Vec own_grads(36), own_m(36, 0.5), own_v(36, 0.25);
        for (const ParamRange& range : own)
            for (size_t p = 0; p < range.pieces; p++)
                std::copy_n(&grads[range.piece(p)], range.size, &own_grads[range.state(p)]);
        adamw_update<double>(dev, shared.data(), nullptr, own_m.data(), own_v.data(), own_grads.data(), &norm, own, 2,
                             hyper);
        for (const ParamRange& range : own)
            for (size_t p = 0; p < range.pieces; p++)
                CHECK(std::equal(&m[range.piece(p)], &m[range.piece(p)] + range.size, &own_m[range.state(p)]));
    }
    CHECK(same_bits(shared, params));
}

TEST(adamw) {
    for (float max_norm : {0.f, 1.f}) {
        check_adamw<double>(max_norm, 1e-14);
        check_adamw<float>(max_norm, 1e-6);
    }
}

// ---------------------------------------------------------------------------------------------------------------------

// Runs every layer once, with inputs from one seed.
template <class X>
static std::vector<Layer<X>> every_layer(int B, int T, int NH, int HS, int V) {
    rng.seed(7);
    const int C = NH * HS, N = B * T, Vp = (V + 127) / 128 * 128;
    std::vector<Layer<X>> all;
    all.push_back(encoder_layer<X>(B, T, C, V));
    all.push_back(residual_layernorm_layer<X>(N, C));
    all.push_back(matmul_layer<X>(N, C, 3 * C));
    all.push_back(gelu_layer<X>(N, C));
    all.push_back(attention_layer<X>(B, T, NH, HS, Attention::flash));
    all.push_back(classifier_layer<X>(N, V, Vp));
    all.push_back(update_layer<X>(N * C));
    for (Layer<X>& l : all) l.run();
    return all;
}

TEST(float_agrees_with_double) {
    for (auto [B, T, NH, HS, V] : {std::array{1, 1, 1, 3, 2}, {3, 37, 2, 32, 100}, {2, 129, 3, 20, 300}}) {
        const auto single = every_layer<float>(B, T, NH, HS, V);
        const auto dbl = every_layer<double>(B, T, NH, HS, V);
        for (size_t i = 0; i < dbl.size(); i++)
            for (size_t k = 0; k < dbl[i].results.size(); k++)
                check_close(dbl[i].what + " " + dbl[i].results[k].name, single[i].results[k].x, dbl[i].results[k].x,
                            2e-6);
    }
}

template <class X>
static void check_threads(const std::vector<int>& numbers, int B, int T, int NH, int HS, int V) {
    const auto with = [&](int threads) {
        const Cpu so_many(threads);
        return every_layer<X>(B, T, NH, HS, V);
    };
    const auto one = with(1);
    for (int threads : numbers) {
        const auto several = with(threads);
        for (size_t i = 0; i < one.size(); i++)
            for (size_t k = 0; k < one[i].results.size(); k++)
                if (!same_bits(one[i].results[k].x, several[i].results[k].x))
                    test::report(__FILE__, __LINE__,
                                 format("%s: another %s with %d threads", one[i].what.c_str(),
                                        one[i].results[k].name.c_str(), threads));
    }
    const Cpu restore_all_threads;
}

TEST(results_do_not_depend_on_threads) {
    for (auto [B, T, NH, HS, V] : {std::array{3, 50, 3, 32, 200}, {1, 111, 5, 17, 130}}) {
        check_threads<float>({2, 3}, B, T, NH, HS, V);
        check_threads<double>({3}, B, T, NH, HS, V);
    }
}

TEST_MAIN
