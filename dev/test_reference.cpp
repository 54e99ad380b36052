// Tests the CPU reference, the oracle of all other tests. Its own oracle is calculus. Each backward is compared with
// central differences of its forward in fp64, along random directions and single elements. Each forward is compared
// with its formula, written the naive way. Outputs that a layer writes start as NaN, and those it adds into start
// random.
//
// Run: ./dev/test_reference [part of a test's name]
#include <algorithm>
#include <array>
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

TEST(encoder) {
    const int V = 7;
    for (auto [B, T, C] : {std::array{1, 1, 1}, {2, 5, 3}, {3, 17, 130}}) {
        const std::string what = format("encoder B=%d T=%d C=%d", B, T, C);
        const size_t N = size_t(B) * T;
        const std::vector<int> tokens = random_tokens(N, V);
        std::vector<int> plan(encoder_plan_ints(dev, N));
        encoder_plan(dev, plan.data(), tokens.data(), N);
        CHECK(plan == tokens);

        Vec wte = randn(V * C), wpe = randn(T * C), out = poison(N * C), dout = randn(N * C);
        const auto forward = [&] { encoder_forward(dev, out.data(), tokens.data(), wte.data(), wpe.data(), B, T, C); };
        const auto loss = [&] { return forward(), dot(out, dout); };
        forward();
        for (size_t i = 0; i < N * C; i++) CHECK(out[i] == wte[tokens[i / C] * C + i % C] + wpe[i / C % T * C + i % C]);

        const Vec dwte0 = randn(V * C), dwpe0 = randn(T * C);
        Vec dwte = dwte0, dwpe = dwpe0;
        encoder_backward(dev, dwte.data(), dwpe.data(), nullptr, dout.data(), plan.data(), B, T, C);
        check_gradient(what + " wte", wte, dwte - dwte0, loss);
        check_gradient(what + " wpe", wpe, dwpe - dwpe0, loss);
    }
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
    for (auto [N, C] : {std::array{1, 1}, {3, 5}, {4, 64}, {33, 100}, {2, 333}}) {
        const std::string what = format("layernorm N=%d C=%d", N, C);
        Vec inp = randn(N * C, 2, 0.5), weight = randn(C, 1, 1), bias = randn(C), dout = randn(N * C);
        Vec out = poison(N * C), mean = poison(N), rstd = poison(N);
        const auto loss = [&] {
            layernorm_forward(dev, out.data(), mean.data(), rstd.data(), inp.data(), weight.data(), bias.data(), N, C);
            return dot(out, dout);
        };
        loss();
        for (int n = 0; n < N; n++) {
            double m = 0, variance = 0;
            for (int c = 0; c < C; c++) m += inp[n * C + c] / C;
            for (int c = 0; c < C; c++) variance += std::pow(inp[n * C + c] - m, 2) / C;
            CHECK_NEAR(mean[n], m, 1e-13);
            CHECK_NEAR(rstd[n], 1 / std::sqrt(variance + 1e-5), 1e-13 * rstd[n]);
            for (int c = 0; c < C; c++)
                CHECK_NEAR(out[n * C + c], (inp[n * C + c] - m) / std::sqrt(variance + 1e-5) * weight[c] + bias[c],
                           1e-12);
        }

        const Vec dinp0 = randn(N * C), dweight0 = randn(C), dbias0 = randn(C);
        Vec dinp = dinp0, dweight = dweight0, dbias = dbias0, dsum = dbias0;
        layernorm_backward(dev, dinp.data(), dweight.data(), dbias.data(), dsum.data(), nullptr, dout.data(),
                           inp.data(), weight.data(), mean.data(), rstd.data(), N, C);
        check_gradient(what + " inp", inp, dinp - dinp0, loss);
        check_gradient(what + " weight", weight, dweight - dweight0, loss);
        check_gradient(what + " bias", bias, dbias - dbias0, loss);
        for (int c = 0; c < C; c++) {
            double sum = dbias0[c];
            for (int n = 0; n < N; n++) sum += dinp[n * C + c];
            CHECK_NEAR(dsum[c], sum, 1e-12);
        }
    }
}

TEST(residual_layernorm) {
    const int N = 9, C = 37;
    Vec a = randn(N * C), b = randn(N * C), weight = randn(C, 1, 1), bias = randn(C);
    Vec residual = poison(N * C), out = poison(N * C), mean = poison(N), rstd = poison(N);
    // The residual stream goes on below as well, and layernorm_backward adds into its gradient.
    const Vec dout = randn(N * C), dresidual = randn(N * C);
    const auto forward = [&](double* residual) {
        residual_layernorm_forward(dev, residual, out.data(), mean.data(), rstd.data(), a.data(), b.data(),
                                   weight.data(), bias.data(), N, C);
    };
    const auto loss = [&] { return forward(residual.data()), dot(out, dout) + dot(residual, dresidual); };
    loss();
    const Vec sum = residual;
    Vec plain = poison(N * C), plain_mean = poison(N), plain_rstd = poison(N);
    for (int i = 0; i < N * C; i++) CHECK(sum[i] == a[i] + b[i]);
    layernorm_forward(dev, plain.data(), plain_mean.data(), plain_rstd.data(), residual.data(), weight.data(),
                      bias.data(), N, C);
    CHECK(same_bits(out, plain) && same_bits(mean, plain_mean) && same_bits(rstd, plain_rstd));

    Vec dinp = dresidual, dweight(C), dbias(C);
    layernorm_backward<double>(dev, dinp.data(), dweight.data(), dbias.data(), nullptr, nullptr, dout.data(),
                               residual.data(), weight.data(), mean.data(), rstd.data(), N, C);
    check_gradient("residual_layernorm a", a, dinp, loss);
    check_gradient("residual_layernorm b", b, dinp, loss);

    for (Vec* in_place : {&a, &b}) {
        const Vec keep = *in_place;
        out = poison(N * C);
        forward(in_place->data());
        CHECK(same_bits(*in_place, sum) && same_bits(out, plain));
        *in_place = keep;
    }
}

// The sizes are around the tiles of the product: 6 rows, 8 or 16 columns, 24 rows, depth 256, 1024 or 2048 columns.
template <class X>
static void check_matmul(int N, int C, int OC, bool with_bias, double tol) {
    const std::string what = format("matmul %s N=%d C=%d OC=%d", name_of(dtype_of<X>()), N, C, OC);
    const std::vector<X> inp = randn<X>(N * C), weight = randn<X>(OC * C), bias = randn<X>(OC), dout = randn<X>(N * OC);
    std::vector<X> out = poison<X>(N * OC), dinp = poison<X>(N * C), dweight = randn<X>(OC * C);
    Vec out_(N * OC), dinp_(N * C), dweight_(dweight.begin(), dweight.end());
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
    const std::vector<X> dweight0 = dweight;
    matmul_forward(dev, out.data(), inp.data(), weight.data(), with_bias ? bias.data() : nullptr, N, C, OC);
    matmul_backward(dev, dinp.data(), dweight.data(), dout.data(), inp.data(), weight.data(), N, C, OC);
    check_close(what + " out", out, out_, tol);
    check_close(what + " dinp", dinp, dinp_, tol);
    check_close(what + " dweight", dweight, dweight_, tol);

    std::vector<X> alone = dweight0;  // without dinp
    matmul_backward<X>(dev, nullptr, alone.data(), dout.data(), inp.data(), weight.data(), N, C, OC);
    CHECK(same_bits(alone, dweight));

    std::vector<X> written(alone.size(), NAN), added(alone.size(), X(0));  // in `written` there is nothing to add to
    matmul_backward<X>(dev, nullptr, written.data(), dout.data(), inp.data(), weight.data(), N, C, OC, false);
    matmul_backward<X>(dev, nullptr, added.data(), dout.data(), inp.data(), weight.data(), N, C, OC);
    CHECK(same_bits(written, added));
}

TEST(matmul) {
    for (auto [N, C, OC] : {std::array{1, 1, 1},
                            {3, 5, 7},
                            {6, 256, 16},
                            {7, 257, 17},
                            {24, 255, 15},
                            {25, 600, 33},
                            {130, 24, 65},
                            {515, 9, 48},
                            {3, 2, 1025},
                            {2, 2049, 3},
                            {1, 3, 2060}}) {
        check_matmul<double>(N, C, OC, true, 1e-14);
        check_matmul<float>(N, C, OC, false, 1e-6);
    }
}

TEST(matmul_gradient) {
    for (auto [N, C, OC] : {std::array{1, 1, 1}, {5, 7, 11}, {33, 20, 26}}) {
        const std::string what = format("matmul N=%d C=%d OC=%d", N, C, OC);
        Vec inp = randn(N * C), weight = randn(OC * C), bias = randn(OC), dout = randn(N * OC), out = poison(N * OC);
        const auto loss = [&] {
            matmul_forward(dev, out.data(), inp.data(), weight.data(), bias.data(), N, C, OC);
            return dot(out, dout);
        };
        const Vec dweight0 = randn(OC * C);
        Vec dinp = poison(N * C), dweight = dweight0;
        matmul_backward(dev, dinp.data(), dweight.data(), dout.data(), inp.data(), weight.data(), N, C, OC);
        check_gradient(what + " inp", inp, dinp, loss);
        check_gradient(what + " weight", weight, dweight - dweight0, loss);
    }
}

TEST(gelu) {
    const size_t n = 17 * 59;
    Vec inp = randn(n, 2), out = poison(n), dout = randn(n), dinp = poison(n);
    const auto loss = [&] { return gelu_forward(dev, out.data(), inp.data(), n), dot(out, dout); };
    loss();
    for (size_t i = 0; i < n; i++) {
        const double x = inp[i], u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
        CHECK_NEAR(out[i], 0.5 * x * (1 + std::tanh(u)), 1e-14 * (1 + std::fabs(x)));
    }
    const int N = 17, C = n / N;
    Vec sum(C), none(C), again = poison(n);
    gelu_backward<double>(dev, dinp.data(), none.data(), nullptr, nullptr, inp.data(), dout.data(), N, C);
    check_gradient("gelu", inp, dinp, loss);

    loss();  // from the unperturbed input again
    Vec in_place = dout;
    gelu_backward(dev, in_place.data(), sum.data(), again.data(), nullptr, inp.data(), in_place.data(), N, C);
    CHECK(same_bits(in_place, dinp) && same_bits(again, out) && same_bits(sum, none));
    for (int c = 0; c < C; c++) {
        double want = 0;
        for (int r = 0; r < N; r++) want += dinp[r * C + c];
        CHECK_NEAR(sum[c], want, 1e-12);
    }

    const std::vector<float> far = {-1e4f, -100, -20, 0, 20, 100, 1e4f}, ones(far.size(), 1);
    std::vector<float> y = poison<float>(far.size()), dy = y;
    gelu_forward(dev, y.data(), far.data(), far.size());
    std::vector<float> ignored(far.size());
    gelu_backward<float>(dev, dy.data(), ignored.data(), nullptr, nullptr, far.data(), ones.data(), 1, far.size());
    for (size_t i = 0; i < far.size(); i++) {
        CHECK(y[i] == std::max(far[i], 0.f));
        CHECK(dy[i] == (far[i] > 0 ? 1.f : far[i] < 0 ? 0.f : 0.5f));
    }
}

// Attention with the (T,T) matrix written out, and out and lse by the definition.
static void naive_attention(Vec& out, Vec& lse, const Vec& qkv, int B, int T, int NH, int HS, bool causal,
                            double scale) {
    const auto at = [&](int b, int t, int which, int h, int d) {
        return qkv[(((size_t(b) * T + t) * 3 + which) * NH + h) * HS + d];
    };
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++)
            for (int i = 0; i < T; i++) {
                Vec S(T, -inf);
                for (int j = 0; j < (causal ? i + 1 : T); j++) {
                    S[j] = 0;
                    for (int d = 0; d < HS; d++) S[j] += scale * at(b, i, 0, h, d) * at(b, j, 1, h, d);
                }
                double sum = 0;
                for (double s : S) sum += std::exp(s);
                lse[(b * NH + h) * T + i] = std::log(sum);
                for (int d = 0; d < HS; d++) {
                    double o = 0;
                    for (int j = 0; j < T; j++) o += std::exp(S[j]) / sum * at(b, j, 2, h, d);
                    out[((size_t(b) * T + i) * NH + h) * HS + d] = o;
                }
            }
}

TEST(attention) {
    const int B = 2, NH = 3;
    for (int T : {1, 2, 17})
        for (int HS : {4, 32, 64})
            for (bool causal : {true, false})
                for (double scale : {1 / std::sqrt(double(HS)), 0.3}) {
                    const std::string what = format("attention T=%d HS=%d causal=%d scale=%.3g", T, HS, causal, scale);
                    const size_t n = size_t(B) * T * NH * HS;
                    Vec qkv = randn(3 * n), out = poison(n), lse = poison(B * NH * T), dout = randn(n),
                        dqkv = poison(3 * n);
                    const auto loss = [&] {
                        attention_forward<double>(dev, out.data(), lse.data(), qkv.data(), B, T, NH, HS, causal, scale);
                        return dot(out, dout);
                    };
                    loss();
                    Vec out_ = poison(n), lse_ = poison(B * NH * T);
                    naive_attention(out_, lse_, qkv, B, T, NH, HS, causal, scale);
                    check_close(what + " out", out, out_, 1e-14);
                    check_close(what + " lse", lse, lse_, 1e-14);

                    attention_backward<double>(dev, dqkv.data(), dout.data(), out.data(), lse.data(), qkv.data(), B, T,
                                               NH, HS, causal, scale);
                    check_gradient(what, qkv, dqkv, loss);
                }
}

TEST(attention_of_a_layer) {  // is the causal one with scale 1/√HS
    const int B = 2, T = 19, NH = 2, HS = 12;
    const size_t n = size_t(B) * T * NH * HS;
    const Vec qkv = randn(3 * n), dout = randn(n);
    Vec out = poison(n), lse = poison(B * NH * T), dqkv = poison(3 * n), out_ = out, lse_ = lse, dqkv_ = dqkv;
    for (Attention kind : {Attention::flash, Attention::naive}) {
        attention_forward<double>(dev, kind, out.data(), lse.data(), nullptr, nullptr, qkv.data(), B, T, NH, HS);
        attention_backward<double>(dev, kind, dqkv.data(), nullptr, dout.data(), out.data(), lse.data(), nullptr,
                                   qkv.data(), B, T, NH, HS);
        const double scale = 1 / std::sqrt(double(HS));
        attention_forward<double>(dev, out_.data(), lse_.data(), qkv.data(), B, T, NH, HS, true, scale);
        attention_backward<double>(dev, dqkv_.data(), dout.data(), out_.data(), lse_.data(), qkv.data(), B, T, NH, HS,
                                   true, scale);
        CHECK(same_bits(out, out_) && same_bits(lse, lse_) && same_bits(dqkv, dqkv_));
    }
    CHECK_ERROR(attention_forward<double>(dev, Attention::flash, out.data(), lse.data(), nullptr, nullptr, qkv.data(),
                                          1, 1, 1, 257),
                "head size 257");
}

// The gradient of a matmul's bias comes from another layer's backward. Here the layers are as in the trainer: q, k, v's
// product, attention, its projection, the residual's layer norm and the first half of the MLP.
TEST(bias_gradients) {
    const int B = 2, T = 9, NH = 2, HS = 5, C = NH * HS, N = B * T;
    const Vec inp = randn(N * C), qkvw = randn(3 * C * C, 0.3), projw = randn(C * C, 0.3), lnw = randn(C, 1, 1),
              lnb = randn(C), fcw = randn(4 * C * C, 0.3), fcprojw = randn(C * 4 * C, 0.3), dout = randn(N * C);
    Vec qkvb = randn(3 * C), projb = randn(C), fcb = randn(4 * C);
    Vec qkv = poison(N * 3 * C), atty = poison(N * C), lse = poison(B * NH * T), proj = poison(N * C),
        ln = poison(N * C), residual = poison(N * C), mean = poison(N), rstd = poison(N), fch = poison(N * 4 * C),
        gelu = fch, out = ln;
    const auto loss = [&] {
        matmul_forward(dev, qkv.data(), inp.data(), qkvw.data(), qkvb.data(), N, C, 3 * C);
        attention_forward<double>(dev, Attention::flash, atty.data(), lse.data(), nullptr, nullptr, qkv.data(), B, T,
                                  NH, HS);
        matmul_forward(dev, proj.data(), atty.data(), projw.data(), projb.data(), N, C, C);
        residual_layernorm_forward(dev, residual.data(), ln.data(), mean.data(), rstd.data(), inp.data(), proj.data(),
                                   lnw.data(), lnb.data(), N, C);
        matmul_gelu_forward(dev, gelu.data(), fch.data(), ln.data(), fcw.data(), fcb.data(), N, C, 4 * C);
        matmul_forward<double>(dev, out.data(), gelu.data(), fcprojw.data(), nullptr, N, 4 * C, C);
        return dot(out, dout);
    };
    loss();

    const Vec dqkvb0 = randn(3 * C), dprojb0 = randn(C), dfcb0 = randn(4 * C);
    Vec dqkvb = dqkvb0, dprojb = dprojb0, dfcb = dfcb0, dlnw(C), dlnb(C);
    Vec dwide = poison(N * 4 * C), dln = poison(N * C), dresidual(N * C), datty = poison(N * C),
        dqkv = poison(N * 3 * C);
    matmul_gelu_backward<double>(dev, dwide.data(), dfcb.data(), nullptr, nullptr, dout.data(), fcprojw.data(),
                                 fch.data(), N, 4 * C, C);
    matmul_backward<double>(dev, dln.data(), nullptr, dwide.data(), nullptr, fcw.data(), N, C, 4 * C);
    layernorm_backward(dev, dresidual.data(), dlnw.data(), dlnb.data(), dprojb.data(), nullptr, dln.data(),
                       residual.data(), lnw.data(), mean.data(), rstd.data(), N, C);
    matmul_backward<double>(dev, datty.data(), nullptr, dresidual.data(), nullptr, projw.data(), N, C, C);
    attention_backward<double>(dev, Attention::flash, dqkv.data(), nullptr, datty.data(), atty.data(), lse.data(),
                               nullptr, qkv.data(), B, T, NH, HS);
    qkv_bias_backward<double>(dev, dqkvb.data(), nullptr, dqkv.data(), nullptr, nullptr, N, C);
    dqkvb = dqkvb - dqkvb0, dprojb = dprojb - dprojb0, dfcb = dfcb - dfcb0;
    check_gradient("qkvb", qkvb, dqkvb, loss);
    check_gradient("projb", projb, dprojb, loss);
    check_gradient("fcb", fcb, dfcb, loss);

    for (int c = 0; c < C; c++) {  // what the GPU computes instead of two thirds of the sums
        double v = 0;
        for (int r = 0; r < C; r++) v += dprojb[r] * projw[r * C + c];
        CHECK_NEAR(dqkvb[C + c], 0, 1e-12);
        CHECK_NEAR(dqkvb[2 * C + c], v, 1e-12);
    }
}

TEST(attention_large_scores) {
    const int B = 1, T = 65, NH = 2, HS = 64;
    const size_t n = size_t(B) * T * NH * HS;
    for (float sharpen : {5.f, 1e4f}) {  // scores to ±1e5, at which exp overflows unless the maximum is subtracted
        std::vector<float> qkv = randn<float>(3 * n, 1, 0.5), out = poison<float>(n), lse = poison<float>(B * NH * T);
        std::vector<float> dout = randn<float>(n), dqkv = poison<float>(3 * n);
        for (size_t i = 0; i < 3 * n; i++)
            if (i / (NH * HS) % 3 == 0) qkv[i] *= sharpen;
        attention_forward<float>(dev, Attention::flash, out.data(), lse.data(), nullptr, nullptr, qkv.data(), B, T, NH,
                                 HS);
        attention_backward<float>(dev, Attention::flash, dqkv.data(), nullptr, dout.data(), out.data(), lse.data(),
                                  nullptr, qkv.data(), B, T, NH, HS);
        CHECK(count_nonfinite(dev, nullptr, out.data(), n) == 0);
        CHECK(count_nonfinite(dev, nullptr, lse.data(), lse.size()) == 0);
        CHECK(count_nonfinite(dev, nullptr, dqkv.data(), 3 * n) == 0);
        float largest = 0;  // out is an average of v
        for (size_t i = 0; i < 3 * n; i++)
            if (i / (NH * HS) % 3 == 2) largest = std::max(largest, std::fabs(qkv[i]));
        for (float o : out) CHECK(std::fabs(o) <= largest * 1.0001f);
    }
}

TEST(classifier) {
    for (auto [N, V, Vp] : {std::array{1, 1, 1}, {5, 7, 7}, {9, 13, 128}, {3, 300, 384}}) {
        const std::string what = format("classifier N=%d V=%d Vp=%d", N, V, Vp);
        const double dloss = 0.37;
        const std::vector<int> targets = random_tokens(N, V);
        Vec logits = randn(N * Vp, 3), losses = poison(N);
        for (int n = 0; n < N; n++)  // padding is never read. This is +∞, because NaN would hide from max
            std::fill(&logits[n * Vp] + V, &logits[n * Vp] + Vp, inf);

        const Vec before = logits;
        const auto loss = [&] {
            classifier(dev, logits.data(), losses.data(), targets.data(), 0.0, N, V, Vp);
            return dloss * std::accumulate(losses.begin(), losses.end(), 0.0);
        };
        loss();
        CHECK(same_bits(logits, before));
        for (int n = 0; n < N; n++) {
            double sum = 0;
            for (int i = 0; i < V; i++) sum += std::exp(logits[n * Vp + i]);
            CHECK_NEAR(losses[n], -std::log(std::exp(logits[n * Vp + targets[n]]) / sum), 1e-13 * (1 + losses[n]));
        }

        Vec dlogits = logits, same_losses = poison(N);
        classifier(dev, dlogits.data(), same_losses.data(), targets.data(), dloss, N, V, Vp);
        CHECK(same_bits(losses, same_losses));
        for (int n = 0; n < N; n++)
            for (int i = V; i < Vp; i++) CHECK(dlogits[n * Vp + i] == 0);
        for (double& x : logits)
            if (std::isinf(x)) x = 0;  // so that all of it can be moved
        check_gradient(what, logits, dlogits, loss);
    }

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

// Runs every layer once, with inputs from `seed`, and returns the outputs one after the other.
template <class X>
static std::vector<std::pair<const char*, std::vector<X>>> every_layer(const Cpu& dev, int B, int T, int NH, int HS,
                                                                       int V) {
    rng.seed(7);
    std::vector<std::pair<const char*, std::vector<X>>> results;
    const int C = NH * HS, OC = 3 * C, N = B * T, Vp = (V + 127) / 128 * 128;
    const auto in = [](size_t n) { return randn<X>(n, 1, 0.1); };
    const auto keep = [&](const char* name, std::vector<X>& x) { results.push_back({name, x}); };
    const std::vector<int> tokens = random_tokens(N, V);
    const std::vector<X> inp = in(N * C), other = in(N * C), dout = in(N * C), weight = in(C), bias = in(C);
    const std::vector<X> big = in(size_t(OC) * C), big_bias = in(OC), big_dout = in(N * OC);
    const std::vector<X> wte = in(Vp * C), wpe = in(T * C);

    std::vector<X> out = poison<X>(N * C), mean = poison<X>(N), rstd = poison<X>(N), residual = poison<X>(N * C);
    encoder_forward(dev, out.data(), tokens.data(), wte.data(), wpe.data(), B, T, C);
    keep("encoder out", out);
    std::vector<X> dwte(Vp * C), dwpe(T * C);
    encoder_backward(dev, dwte.data(), dwpe.data(), nullptr, dout.data(), tokens.data(), B, T, C);
    keep("dwte", dwte);
    keep("dwpe", dwpe);

    residual_layernorm_forward(dev, residual.data(), out.data(), mean.data(), rstd.data(), inp.data(), other.data(),
                               weight.data(), bias.data(), N, C);
    keep("residual", residual);
    keep("layernorm out", out);
    keep("mean", mean);
    keep("rstd", rstd);
    std::vector<X> dinp = in(N * C), dweight = in(C), dbias = in(C);
    layernorm_backward<X>(dev, dinp.data(), dweight.data(), dbias.data(), nullptr, nullptr, dout.data(),
                          residual.data(), weight.data(), mean.data(), rstd.data(), N, C);
    keep("layernorm dinp", dinp);
    keep("layernorm dweight", dweight);
    keep("layernorm dbias", dbias);

    std::vector<X> qkv = poison<X>(N * OC), dbig = in(size_t(OC) * C), dbig_bias = in(OC);
    matmul_forward(dev, qkv.data(), inp.data(), big.data(), big_bias.data(), N, C, OC);
    matmul_backward(dev, dinp.data(), dbig.data(), big_dout.data(), inp.data(), big.data(), N, C, OC);
    qkv_bias_backward<X>(dev, dbig_bias.data(), nullptr, big_dout.data(), nullptr, nullptr, N, C);
    keep("matmul out", qkv);
    keep("matmul dinp", dinp);
    keep("matmul dweight", dbig);
    keep("qkv dbias", dbig_bias);

    gelu_forward(dev, out.data(), inp.data(), N * C);
    gelu_backward<X>(dev, dinp.data(), std::vector<X>(C).data(), nullptr, nullptr, inp.data(), dout.data(), N, C);
    keep("gelu out", out);
    keep("gelu dinp", dinp);

    std::vector<X> lse = poison<X>(B * NH * T), dqkv = poison<X>(N * OC);
    const std::vector<X> packed = in(N * OC);
    attention_forward<X>(dev, Attention::flash, out.data(), lse.data(), nullptr, nullptr, packed.data(), B, T, NH, HS);
    attention_backward<X>(dev, Attention::flash, dqkv.data(), nullptr, dout.data(), out.data(), lse.data(), nullptr,
                          packed.data(), B, T, NH, HS);
    keep("attention out", out);
    keep("attention lse", lse);
    keep("attention dqkv", dqkv);

    std::vector<X> logits = in(N * Vp), losses = poison<X>(N), norms = poison<X>(2);
    classifier(dev, logits.data(), losses.data(), tokens.data(), X(0.25), N, V, Vp);
    keep("losses", losses);
    keep("dlogits", logits);

    std::vector<X> params = in(N * C), m = in(N * C), v(N * C, X(0.5));
    reduce_sum(dev, &norms[0], nullptr, inp.data(), X(0.5), N * C);
    global_norm(dev, &norms[1], nullptr, inp.data(), N * C);
    const ParamRange all = {0, size_t(N) * C, true};
    adamw_update<X>(dev, params.data(), nullptr, m.data(), v.data(), inp.data(), &norms[1], &all, 1,
                    {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.f, 3, 0});
    keep("sum and norm", norms);
    keep("adamw params", params);
    keep("adamw m", m);
    keep("adamw v", v);
    return results;
}

TEST(float_agrees_with_double) {
    for (auto [B, T, NH, HS, V] : {std::array{1, 1, 1, 3, 2}, {3, 37, 2, 32, 100}, {2, 129, 3, 20, 300}}) {
        const auto single = every_layer<float>(dev, B, T, NH, HS, V);
        const auto dbl = every_layer<double>(dev, B, T, NH, HS, V);
        for (size_t i = 0; i < dbl.size(); i++)
            check_close(format("%s B=%d T=%d NH=%d HS=%d", dbl[i].first, B, T, NH, HS), single[i].second, dbl[i].second,
                        2e-6);
    }
}

TEST(results_do_not_depend_on_threads) {
    for (auto [B, T, NH, HS, V] : {std::array{3, 50, 3, 32, 200}, {1, 111, 5, 17, 130}}) {
        const auto one = every_layer<float>(Cpu(1), B, T, NH, HS, V);
        for (int threads : {2, 3}) {
            const auto several = every_layer<float>(Cpu(threads), B, T, NH, HS, V);
            for (size_t i = 0; i < one.size(); i++)
                if (!same_bits(one[i].second, several[i].second))
                    test::report(__FILE__, __LINE__, format("%s: %d threads differ from one", one[i].first, threads));
        }
        const auto one_d = every_layer<double>(Cpu(1), B, T, NH, HS, V),
                   three_d = every_layer<double>(Cpu(3), B, T, NH, HS, V);
        for (size_t i = 0; i < one_d.size(); i++) CHECK(same_bits(one_d[i].second, three_d[i].second));
    }
    const Cpu restore_all_threads;
}

TEST_MAIN
