// Every attention kernel of the table against the fp64 reference.
//
//   accuracy     out, lse, dq, dk, dv on the inputs and shapes that find bugs
//   logits       of up to ±200, of one size, mixed and rising, whole, in chunks, and in masked blocks
//   extremes     zeros
//   nan          one NaN reaches what depends on it, and no other head, sequence or distant row
//   stream       all work is on the device's stream
//   small tiles  flash_fp32's, for GPUs with less shared memory
//   determinism  the same bytes from every run
//   block        chunked queries and keys in any order equal the whole, masked blocks add nothing, sums are added into
//   large block  a block with more work than multiprocessors is right, and gives the same bytes in every run
//   few blocks   a little of that, for compute-sanitizer
//   limits       what a kernel does not support gives an Error, never a wrong result
//   big          tensors of more than 2³¹ elements
//   groups       more heads than are in work at a time
//
// The rule of dev/bounds.h allows an error of at most k times naive's. naive itself, the yardstick, is held to a
// relative L2 error.
//
// Every buffer lies between two guards and starts as NaN bytes, guards included. So an element that is not written,
// scratch that is not cleared and a read past the end all show as NaN. A write past the end changes a guard.
//
// Run: ./dev/test_attention [part of a test's name, e.g. flash_bf16]      SEED=n for other random numbers
#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include <list>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "attention/ring/blocks.h"
#include "attention/ring/chunks.h"
#include "dev/bounds.h"
#include "dev/late.h"
#include "dev/test.h"
#include "layers/cpu/reference.h"
#include "layers/layers.h"

// The limit on naive's relative L2 error.
template <class X>
constexpr double kNaiveL2 = std::is_same_v<X, bf16> ? 2e-2 : 1e-5;

static uint64_t base_seed() {
    static const uint64_t seed = std::getenv("SEED") ? std::strtoull(std::getenv("SEED"), nullptr, 10) : 1;
    return seed;
}

// The device of all tests, in strict fp32. Without one, the test that asks for it is skipped.
static Cuda& own_gpu() {
    std::string why;
    if (Cuda::count(&why) == 0) SKIP("no GPU: %s", why.c_str());
    static Cuda* dev = nullptr;
    if (!dev) {
        dev = new Cuda(0);
        dev->tf32 = false;
    }
    return *dev;
}
static const Cuda& gpu() {
    return own_gpu();
}

template <class X>
const AttentionKernel<X>& kernel_for_this_gpu(int index) {
    const Cuda& dev = gpu();
    const AttentionKernel<X>& kernel = attention_kernels<X>().begin[index];
    if (!kernel.runs_on(dev)) SKIP("%s needs sm_%d, this GPU is sm_%d", kernel.name, kernel.min_sm, dev.sm);
    return kernel;
}

// How many of the tensors out, lse, dq, dk, dv a kernel computes.
template <class X>
int tensors_of(const AttentionKernel<X>& kernel) {
    return kernel.backward ? kTensors : Dq;
}

template <class X>
const AttentionKernel<X>& naive() {
    const AttentionKernels<X> all = attention_kernels<X>();
    for (int i = 0; i < all.count; i++)
        if (!all.begin[i].flash) return all.begin[i];
    throw Error("attention_kernels has no naive kernel");
}

// ---------------------------------------------------------------------------------------------------------------------
// Device memory between guards

class Buffer {
  public:
    Buffer(const char* name, size_t bytes) : name_(name), bytes_(bytes) {
        base_ = static_cast<char*>(gpu().alloc(kGuard + bytes + kGuard));
        CUDA_CHECK(cudaMemsetAsync(base_, 0xFF, kGuard + bytes + kGuard, gpu().stream));
    }
    template <class X>
    Buffer(const char* name, const std::vector<X>& values) : Buffer(name, values.size() * sizeof(X)) {
        gpu().upload(data(), values.data(), bytes_);
    }
    ~Buffer() {
        try {  // after a fault on the device every call fails, and the test has reported it by then
            check_guards();
            gpu().free(base_);
        } catch (const Error&) {}
    }
    Buffer(const Buffer&) = delete;

    char* data() { return base_ + kGuard; }
    template <class X>
    X* as() {
        return reinterpret_cast<X*>(data());
    }
    void poison() { poison(gpu().stream); }
    void poison(cudaStream_t stream) { CUDA_CHECK(cudaMemsetAsync(data(), 0xFF, bytes_, stream)); }
    std::vector<char> bytes() { return download<char>(bytes_); }
    template <class X>
    std::vector<X> download(size_t count, size_t first = 0) {
        std::vector<X> host(count);
        gpu().download(host.data(), as<X>() + first, count * sizeof(X));
        return host;
    }

  private:
    static constexpr size_t kGuard = 16384;
    const char* name_;
    char* base_;
    size_t bytes_;

    void check_guards() {
        std::vector<unsigned char> guard(2 * kGuard);
        gpu().download(guard.data(), base_, kGuard);
        gpu().download(guard.data() + kGuard, base_ + kGuard + bytes_, kGuard);
        for (size_t i = 0; i < guard.size(); i++) {
            if (guard[i] == 0xFF) continue;
            const long long at = static_cast<long long>(i) - static_cast<long long>(kGuard);
            test::report(__FILE__, __LINE__,
                         format("written outside %s (%zu bytes), %lld bytes %s", name_, bytes_, at < 0 ? -at : at,
                                at < 0 ? "before it" : "past its end"));
            return;
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Problems: a shape, its inputs, and the fp64 result

// The last three have logits of up to ±Case::logit:
//   constant  every logit is Case::logit, exactly if scale·HS is 8
//   mixed     a row's logits are of any size, and of one sign. The last row's are negative, because a kernel could take
//             its lse for the lse of rows beyond T.
//   ramp      they rise along the keys, 16 at a time, in half of the rows, and fall in the others. So the maximum rises
//             by hundreds whichever way a kernel walks.
enum class Input { normal, large_q, shifted, early_keys, magnitudes, magnitudes_reversed, constant, mixed, ramp };

struct Case {
    AttentionShape shape;
    Input input = Input::normal;
    float logit = 0.f;
    std::string text() const {
        const char* inputs[] = {"N(0,1)",
                                "q x5",
                                "mean +0.5",
                                "first keys x60",
                                "q 1e15 k 1e-15 v 1e-20 dout 1e10",
                                "q 1e-15 k 1e15 v 1e15 dout 1e-30",
                                "every logit",
                                "mixed logits up to",
                                "logits that rise or fall by twice"};
        return format("B%d T%d NH%d HS%d %s%s, %s%s, SEED=%llu", shape.B, shape.T, shape.NH, shape.HS,
                      shape.causal ? "causal" : "full",
                      shape.scale != 0.f ? format(" scale %g", shape.scale).c_str() : "",
                      inputs[static_cast<int>(input)], logit != 0.f ? format(" %g", logit).c_str() : "",
                      static_cast<unsigned long long>(base_seed()));
    }
};

using Result = std::array<std::vector<double>, kTensors>;  // out, dq, dk, dv (B,T,NH,HS), and lse (B,NH,T)
using Errors = std::array<double, kTensors>;

template <class X>
struct Problem {
    Case c;
    std::vector<X> qkv, dout;
    Result ref;
    Errors tiny;  // of the rule in dev/bounds.h
};

template <class X>
X round_to(float x) {
    if constexpr (std::is_same_v<X, bf16>)
        return __float2bfloat16(x);
    else
        return x;
}
template <class X>
std::vector<double> as_double(const std::vector<X>& v) {
    std::vector<double> d(v.size());
    for (size_t i = 0; i < v.size(); i++) d[i] = static_cast<double>(static_cast<float>(v[i]));
    return d;
}

// (B, T, 3, NH, HS) as three tensors (B, T, NH, HS).
static void split(Result& to, const std::vector<double>& dqkv, size_t C) {
    for (size_t part = 0; part < 3; part++) {
        std::vector<double>& x = to[Dq + part];
        x.resize(dqkv.size() / 3);
        for (size_t i = 0; i < x.size(); i++) x[i] = dqkv[(i / C * 3 + part) * C + i % C];
    }
}

static double max_abs(const std::vector<double>& x) {
    double m = 0;
    for (double v : x) m = std::max(m, std::fabs(v));
    return m;
}
// NaN if any difference is NaN.
static double max_error(const std::vector<double>& got, const std::vector<double>& want) {
    if (got.size() != want.size()) throw Error(format("%zu elements, expected %zu", got.size(), want.size()));
    double m = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const double e = std::fabs(got[i] - want[i]);
        if (std::isnan(e)) return e;
        m = std::max(m, e);
    }
    return m;
}
static double l2_error(const std::vector<double>& got, const std::vector<double>& want) {
    double sum = 0;
    for (size_t i = 0; i < got.size(); i++) sum += (got[i] - want[i]) * (got[i] - want[i]);
    return std::sqrt(sum);
}
static double l2_norm(const std::vector<double>& x) {
    return l2_error(x, std::vector<double>(x.size()));
}

// In inputs with a logit q_i = a(x_i w + noise) and k_j = a(y_j w + noise). w is a vector of ±1 for each head, so S is
// x_i·y_j·logit, plus noise of about 3. Constant inputs have no noise, and w = 1.
template <class X>
void make_large_logits(Problem<X>& p, std::mt19937_64& rng) {
    const AttentionShape& s = p.c.shape;
    const bool constant = p.c.input == Input::constant, mixed = p.c.input == Input::mixed;
    const float a = std::sqrt(std::fabs(p.c.logit) / (s.resolved_scale() * static_cast<float>(s.HS)));
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform(-1.f, 1.f);
    std::vector<float> w(s.NH * s.HS, 1.f);
    if (!constant)
        for (float& x : w) x = uniform(rng) < 0.f ? -1.f : 1.f;
    for (size_t row = 0; row < p.qkv.size() / s.HS; row++) {  // of (B, T, 3, NH)
        const size_t h = row % s.NH, part = row / s.NH % 3, t = row / s.NH / 3 % s.T;
        if (part == 2) continue;
        float size = uniform(rng);
        if (constant)
            size = part == 1 && p.c.logit < 0.f ? -1.f : 1.f;
        else if (mixed && part == 0)
            size = t + 1 == static_cast<size_t>(s.T) ? -1.f : size;
        else if (mixed)
            size = 0.75f + 0.25f * size;
        else if (part == 0)
            size = size < 0.f ? -1.f : 1.f;
        else
            size =
                std::min(static_cast<float>(t / 16) / static_cast<float>(std::max(2, s.T / 16) - 1), 1.f) * 2.f - 1.f;
        for (int d = 0; d < s.HS; d++) {
            const float noise = constant ? 0.f : 0.1f * normal(rng);
            p.qkv[row * s.HS + d] = round_to<X>(a * (size * w[h * s.HS + d] + noise));
        }
    }
}

template <class X>
void make_inputs(Problem<X>& p) {
    const AttentionShape& s = p.c.shape;
    const size_t N = static_cast<size_t>(s.B) * s.T, C = static_cast<size_t>(s.NH) * s.HS;
    std::seed_seq seed{base_seed(), static_cast<uint64_t>(s.B), static_cast<uint64_t>(s.T), static_cast<uint64_t>(s.NH),
                       static_cast<uint64_t>(p.c.input)};
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> normal;
    p.qkv.resize(N * 3 * C);
    p.dout.resize(N * C);
    const float factors[][4] = {// of q, k, v, dout
                                {1, 1, 1, 1},
                                {5, 1, 1, 1},
                                {1, 1, 1, 1},
                                {1, 1, 1, 1},
                                {1e15f, 1e-15f, 1e-20f, 1e10f},
                                {1e-15f, 1e15f, 1e15f, 1e-30f},
                                {1, 1, 1, 1},
                                {1, 1, 1, 1},
                                {1, 1, 1, 1}};
    const float shift = p.c.input == Input::shifted ? 0.5f : 0.f, *factor = factors[static_cast<int>(p.c.input)];
    // The maximum of these logits grows by hundreds while a kernel walks from the last keys to the first.
    const float early_factor = p.c.input == Input::early_keys ? 60.f : 1.f;
    for (size_t i = 0; i < p.qkv.size(); i++) {
        const bool is_early_key = i / C % 3 == 1 && i / C / 3 % s.T < 32;
        p.qkv[i] = round_to<X>((normal(rng) + shift) * factor[i / C % 3] * (is_early_key ? early_factor : 1.f));
    }
    for (X& x : p.dout) x = round_to<X>((normal(rng) + shift) * factor[3]);
    if (p.c.logit != 0.f) make_large_logits(p, rng);
}

// The largest absolute value and the largest norm of a head's row, in part `first` of `parts`.
struct Largest {
    double value = 0, norm = 0;
};
template <class X>
Largest largest(const std::vector<X>& x, const AttentionShape& s, int parts, int first) {
    Largest m;
    for (size_t row = 0; row < x.size() / s.HS; row++) {
        if (static_cast<int>(row / s.NH % parts) != first) continue;
        double sum = 0;
        for (int d = 0; d < s.HS; d++) {
            const double v = static_cast<float>(x[row * s.HS + d]);
            m.value = std::max(m.value, std::fabs(v));
            sum += v * v;
        }
        m.norm = std::max(m.norm, std::sqrt(sum));
    }
    return m;
}

// Errors that another good kernel may make though a lucky naive one does not. The fp32 rounding error of a dot product
// a·b is about u|a||b|.
template <class X>
Errors tiny_errors(const Problem<X>& p) {
    const AttentionShape& s = p.c.shape;
    const Largest q = largest(p.qkv, s, 3, 0), k = largest(p.qkv, s, 3, 1), v = largest(p.qkv, s, 3, 2);
    const Largest d_o = largest(p.dout, s, 1, 0);
    const double scale = s.resolved_scale(), dP = d_o.norm * v.norm, S = scale * q.norm * k.norm;
    constexpr double u = 0x1p-24;
    Errors tiny;
    for (int i = 0; i < kTensors; i++) tiny[i] = one_rounding<X>(i, max_abs(p.ref[i]));
    // A query that sees one key has P = 1 and dS = P∘(dP − D) = 0. Naive's D = rowsum(P∘dP) cancels exactly.
    // Flash's D = rowsum(dO∘O) is another dot product than dP, so the rounding errors of both stay in dS.
    tiny[Dq] += scale * 2 * u * dP * k.value;
    tiny[Dk] += scale * 2 * u * dP * q.value;
    // With so few tokens cuBLAS sums in a way of its own, and naive's largest error is luck. So the error of an element
    // of P, which is u|S| and its rounding to X, is carried through.
    if (s.T <= 2) tiny[Lse] += u * S;
    // All keys are the same, and each row of dS sums to 0, so the exact dq is 0. The rounding of dS stays.
    if (p.c.input == Input::constant) tiny[Dq] += kRoundoff<X> * scale * dP * k.value;
    if (s.T == 2) {
        const double P = kRoundoff<X> + u * S;
        tiny[Out] += P * v.value;
        tiny[Dq] += P * scale * dP * k.value;
        tiny[Dk] += P * scale * dP * q.value;
        tiny[Dv] += P * s.T * d_o.value;
    }
    return tiny;
}

// ---------------------------------------------------------------------------------------------------------------------
// Runs of the whole form

// Device copies of a problem's inputs, and poisoned outputs.
template <class X>
struct Run {
    const AttentionKernel<X>& kernel;
    AttentionShape s;
    size_t n, rows;  // elements of out, of lse
    Buffer qkv, dout, out, lse, att, scratch, dqkv;

    Run(const AttentionKernel<X>& kernel, const Problem<X>& p)
        : kernel(kernel),
          s(p.c.shape),
          n(p.dout.size()),
          rows(static_cast<size_t>(s.B) * s.NH * s.T),
          qkv("qkv", p.qkv),
          dout("dout", p.dout),
          out("out", n * sizeof(X)),
          lse("lse", rows * sizeof(float)),
          att("att", kernel.saved_bytes(s)),
          scratch("scratch", kernel.scratch_bytes(s)),
          dqkv("dqkv", 3 * n * sizeof(X)) {}

    void forward() {
        for (Buffer* b : {&out, &lse, &att, &scratch}) b->poison();
        kernel.forward(gpu(), out.as<X>(), lse.as<float>(), att.as<X>(), scratch.data(), qkv.as<X>(), s);
    }
    void backward() {
        if (!kernel.backward) return;
        for (Buffer* b : {&dqkv, &scratch}) b->poison();
        kernel.backward(gpu(), dqkv.as<X>(), scratch.data(), dout.as<X>(), out.as<X>(), lse.as<float>(), att.as<X>(),
                        qkv.as<X>(), s);
    }
    Result result() {
        Result r;
        r[Out] = as_double(out.template download<X>(n));
        r[Lse] = as_double(lse.template download<float>(rows));
        if (kernel.backward) split(r, as_double(dqkv.template download<X>(3 * n)), static_cast<size_t>(s.NH) * s.HS);
        return r;
    }
};

template <class X>
Result run(const AttentionKernel<X>& kernel, const Problem<X>& p) {
    Run<X> r(kernel, p);
    r.forward();
    r.backward();
    return r.result();
}

static Errors errors(double (*norm)(const std::vector<double>&, const std::vector<double>&), const Result& got,
                     const Result& want) {
    Errors e;
    for (int i = 0; i < kTensors; i++) e[i] = norm(got[i], want[i]);
    return e;
}

// Each case is computed once, because the fp64 result is most of this program's time.
template <class X>
const Problem<X>& problem(const Case& c) {
    static std::map<std::string, Problem<X>> cache;
    const auto found = cache.find(c.text());
    if (found != cache.end()) return found->second;

    Problem<X> p;
    p.c = c;
    make_inputs(p);
    const AttentionShape& s = c.shape;
    const std::vector<double> qkv = as_double(p.qkv), dout = as_double(p.dout);
    std::vector<double> dqkv(qkv.size());
    p.ref[Out].resize(dout.size());
    p.ref[Lse].resize(static_cast<size_t>(s.B) * s.NH * s.T);
    static const Cpu cpu;
    const double scale = s.resolved_scale();
    attention_forward<double>(cpu, p.ref[Out].data(), p.ref[Lse].data(), qkv.data(), s.B, s.T, s.NH, s.HS, s.causal,
                              scale);
    attention_backward<double>(cpu, dqkv.data(), dout.data(), p.ref[Out].data(), p.ref[Lse].data(), qkv.data(), s.B,
                               s.T, s.NH, s.HS, s.causal, scale);
    split(p.ref, dqkv, static_cast<size_t>(s.NH) * s.HS);
    p.tiny = tiny_errors(p);
    return cache.emplace(c.text(), std::move(p)).first->second;
}

// Naive's errors are computed only on demand, because compute-sanitizer finds races in cuBLAS, which naive multiplies
// with.
struct NaiveErrors {
    Errors max;  // max|naive − ref|
    Errors l2;   // ‖naive − ref‖
};
template <class X>
const NaiveErrors& naive_errors(const Problem<X>& p) {
    static std::map<std::string, NaiveErrors> cache;
    const auto found = cache.find(p.c.text());
    if (found != cache.end()) return found->second;
    const Result got = run(naive<X>(), p);
    return cache.emplace(p.c.text(), NaiveErrors{errors(max_error, got, p.ref), errors(l2_error, got, p.ref)})
        .first->second;
}

// An error ε of S makes a relative error e^ε − 1 of P. S is a dot product of HS terms, in error by about √HS·u|S|, and
// naive rounds it to X. Only an S near its row's lse has weight.
template <class X>
double error_of_P(const Problem<X>& p) {
    const double of_S = (std::is_same_v<X, bf16> ? kRoundoff<X> : 0) + std::sqrt(p.c.shape.HS) * 0x1p-24;
    return std::expm1(of_S * max_abs(p.ref[Lse]));
}
// The norm of every tensor has about the same relative error. While logits are small kNaiveL2 covers it.
constexpr double kLargeLse = 64;
template <class X>
double large_logits_error(const Problem<X>& p) {
    return max_abs(p.ref[Lse]) > kLargeLse ? error_of_P(p) : 0;
}
// Naive's largest error, relative to a tensor's largest element. It has P's error, a dot product of T terms, and one
// rounding to X each of P or dS, of dP and of the result. Naive's own bound is twice that.
template <class X>
double naive_error(const Problem<X>& p) {
    return error_of_P(p) + std::sqrt(p.c.shape.T) * 0x1p-24 + 3 * kRoundoff<X>;
}

template <class X>
void check_result(const AttentionKernel<X>& kernel, const Problem<X>& p, const Result& got) {
    for (int i = 0; i < tensors_of(kernel); i++) {
        const auto check = [&](const char* norm, double error, double bound, const char* rule) {
            if (!(error <= bound))
                test::report(__FILE__, __LINE__,
                             format("%s %s: %s: %s error %.3g > %.3g, %s", kernel.name, p.c.text().c_str(), kNames[i],
                                    norm, error, bound, rule));
        };
        const double error = max_error(got[i], p.ref[i]), error_l2 = l2_error(got[i], p.ref[i]);
        const double largest = max_abs(p.ref[i]);
        if (!kernel.flash) {
            const double norm = std::sqrt(static_cast<double>(got[i].size()));
            const double relative = kNaiveL2<X> + large_logits_error(p);
            check("L2", error_l2, relative * l2_norm(p.ref[i]) + p.tiny[i] * norm,
                  format("%.3g of the reference", relative).c_str());
            const double relative_max = 2 * naive_error(p);
            check("max", error, relative_max * largest + p.tiny[i],
                  format("2·%.3g of the largest, %.3g, + tiny %.3g", relative_max / 2, largest, p.tiny[i]).c_str());
        } else if (i == Lse && std::is_same_v<X, bf16>) {
            check("max", error, bf16_lse_bound(largest),
                  format("8·%.3g·max(1, |lse| %.3g)", kBf16LseError, largest).c_str());
        } else {
            const ErrorBound k = error_bound(kernel, i, p.c.shape);
            const NaiveErrors& naive = naive_errors(p);
            // If all logits are equal, all P of a row are the same number. Its rounding does not average out, and
            // naive's error is luck, because 1/33 happens to be nearly exact.
            const double P = p.c.input != Input::constant ? 0 : std::max(k.roundoff, 0x1p-23);
            const double one = std::max(P, roundoff<X>(k, i, naive.max[i], largest)), tiny = p.tiny[i] + one * largest;
            check("max", error, k.max * naive.max[i] + tiny,
                  format("%g·naive's %.3g + tiny %.3g", k.max, naive.max[i], tiny).c_str());
            // If naive is exact its L2 error is luck. It is exact for T ≤ 2. If S is exact, only D's rounding is left
            // in dq and dk.
            const bool exact_dS = p.c.input == Input::constant && (i == Dq || i == Dk);
            if (p.c.shape.T > 2 && !exact_dS)
                check("L2", error_l2, k.l2 * naive.l2[i] + one * l2_norm(p.ref[i]),
                      format("%g·naive's %.3g, one rounding %.3g", k.l2, naive.l2[i], one * l2_norm(p.ref[i])).c_str());
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Accuracy

// Walks through the product of shapes and inputs. The counters' periods are coprime, so every pair of values meets.
// Long sequences come with few heads, because the reference's time grows with B·NH·T²·HS.
static std::vector<Case> accuracy_cases() {
    std::vector<Case> all;
    const std::pair<int, int> few[] = {{1, 1}, {1, 2}, {2, 1}}, many[] = {{1, 1}, {3, 12}, {1, 25}, {3, 1}, {1, 12}};
    int n = 0;
    for (int T : {1, 2, 63, 64, 65, 127, 129, 255, 1000, 1023, 1024, 1025})
        for (int HS : {64, 128})
            for (bool causal : {true, false}) {
                const auto [B, NH] = T > 129 ? few[n / 4 % 3] : many[n % 5];
                all.push_back({{B, T, NH, HS, causal}, static_cast<Input>(n % 3)});
                n++;
            }
    all.push_back({{3, 65, 25, 64, true}, Input::normal});
    all.push_back({{3, 129, 25, 64, true}, Input::shifted});
    // flash_bf16_sm90's backward has fewer heads than this in work at a time, so later ones take over the place of
    // earlier ones. Only flash kernels in bf16 run these, because fp64's plain loops take seconds for them.
    all.push_back({{40, 129, 25, 64, true}, Input::normal});
    all.push_back({{20, 129, 25, 128, true}, Input::normal});
    all.push_back({{1, 200, 2, 64, true, 0.3f}, Input::normal});
    all.push_back({{1, 200, 2, 128, false, 0.02f}, Input::large_q});
    // flash_bf16_sm90 keeps its first maximum until a sum grows out of range. Only flash kernels in bf16 run these,
    // because fp32's bounds, and naive's bound for itself, are not made for the rounding of logits of several hundred.
    for (int HS : {64, 128}) {
        all.push_back({{2, 450, 3, HS, true}, Input::early_keys});
        all.push_back({{2, 450, 3, HS, false}, Input::early_keys});
    }
    // These are exactly a tile or two of every kernel.
    for (int HS : {64, 128})
        for (bool causal : {true, false}) all.push_back({{1, 128, 3, HS, causal}});
    for (int HS : {64, 128})
        for (Input input : {Input::magnitudes, Input::magnitudes_reversed})
            all.push_back({{1, 200, 2, HS, true}, input});
    return all;
}

// ACCURACY=1 in the environment makes it print every largest error and relative L2 error (and its multiple of naive's).
template <class X>
void accuracy(int index) {
    const AttentionKernel<X>& kernel = kernel_for_this_gpu<X>(index);
    if (!kernel.backward) std::printf("  %s has no backward: out and lse only\n", kernel.name);
    double lse_error = 0;
    for (const Case& c : accuracy_cases()) {
        const bool for_flash_in_bf16 = c.input == Input::early_keys || c.shape.B >= 20;
        if (for_flash_in_bf16 && !(std::is_same_v<X, bf16> && kernel.flash)) continue;
        const Problem<X>& p = problem<X>(c);
        const Result got = run(kernel, p);
        check_result(kernel, p, got);
        if (!std::getenv("ACCURACY")) continue;
        const NaiveErrors& naive = naive_errors(p);
        std::printf("  %-60s", c.text().c_str());
        for (int i = 0; i < tensors_of(kernel); i++) {
            const double max = max_error(got[i], p.ref[i]), l2 = l2_error(got[i], p.ref[i]);
            std::printf(" %s %.1e (%.2f) L2 %.1e (%.2f)", kNames[i], max, max / naive.max[i], l2 / l2_norm(p.ref[i]),
                        l2 / naive.l2[i]);
        }
        std::printf("\n");
        lse_error = std::max(lse_error, max_error(got[Lse], p.ref[Lse]) / std::max(1., max_abs(p.ref[Lse])));
    }
    if (std::getenv("ACCURACY"))
        std::printf("  %s %s: largest error of lse / max(1, |lse|): %.3g = 2^%.2f\n", kernel.name,
                    name_of(dtype_of<X>()), lse_error, std::log2(lse_error));
}

// ---------------------------------------------------------------------------------------------------------------------
// Extremes: all inputs are zeros

template <class X>
void extremes(int index) {
    const AttentionKernel<X>& kernel = kernel_for_this_gpu<X>(index);
    for (int HS : {64, 128}) {
        Problem<X> p;
        p.c = {{2, 130, 3, HS, true}, Input::normal};
        const AttentionShape& s = p.c.shape;
        make_inputs(p);
        for (std::vector<X>* x : {&p.qkv, &p.dout}) std::fill(x->begin(), x->end(), round_to<X>(0.f));
        const Result zeros = run(kernel, p);
        for (int i = 0; i < tensors_of(kernel); i++)
            if (i != Lse) CHECK(max_error(zeros[i], std::vector<double>(zeros[i].size())) == 0);
        for (size_t i = 0; i < zeros[Lse].size(); i++) CHECK_NEAR(zeros[Lse][i], std::log(1. + i % s.T), 1e-6);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// One NaN stands in a row of q, k, v or dout of one head of one sequence. Every element that depends on it is NaN.
// Elements of other heads and sequences, and of rows farther away than any tile is long, have the bits that they have
// without the NaN. In between a tile may carry it, because on tensor cores a masked P of 0 times NaN is NaN. naive's
// products are over whole heads, so its tile is the head.

enum class Reach { none, row, later, earlier, all };  // rows of a tensor that depend on row `at`, in causal attention

template <class X>
void one_nan(int index) {
    const AttentionKernel<X>& kernel = kernel_for_this_gpu<X>(index);
    constexpr int T = 1000, at = 500, tile = 256, b = 1, h = 1, element = 5;
    constexpr Reach none = Reach::none, row = Reach::row, later = Reach::later, earlier = Reach::earlier,
                    all = Reach::all;
    const struct {
        const char* of;
        Reach reach[kTensors];  // out, lse, dq, dk, dv
    } inputs[] = {{"q", {row, row, row, earlier, earlier}},
                  {"k", {later, later, later, all, all}},  // the last of the rows of P that are NaN sees every key
                  {"v", {later, none, later, all, none}},
                  {"dout", {none, none, row, earlier, earlier}}};
    for (int HS : {64, 128})
        for (bool causal : {true, false}) {
            Problem<X> p;
            p.c = {{2, T, 3, HS, causal}};
            make_inputs(p);
            const AttentionShape& s = p.c.shape;
            const Result clean = run(kernel, p);
            for (int which = 0; which < 4; which++) {
                Problem<X> with_nan = p;
                const size_t token = static_cast<size_t>(b) * T + at;
                X& x = which < 3 ? with_nan.qkv[((token * 3 + which) * s.NH + h) * HS + element]
                                 : with_nan.dout[(token * s.NH + h) * HS + element];
                x = round_to<X>(std::numeric_limits<float>::quiet_NaN());
                const Result got = run(kernel, with_nan);
                for (int i = 0; i < tensors_of(kernel); i++) {
                    const Reach reach = inputs[which].reach[i];
                    size_t wrong = 0, first = 0;
                    for (size_t e = 0; e < got[i].size(); e++) {
                        const size_t r = i == Lse ? e : e / HS;  // row of (B, NH, T) or (B, T, NH)
                        const int t = static_cast<int>(i == Lse ? r % T : r / s.NH % T);
                        const size_t head = i == Lse ? r / T % s.NH : r % s.NH, sequence = r / s.NH / T;
                        bool must = false, may = false;
                        if (head == h && sequence == b && reach != none) {
                            const int near = kernel.flash ? tile : T;
                            const bool any = reach == all || (!causal && reach != row);
                            const int from = any || reach == earlier ? 0 : at, to = any || reach == later ? T - 1 : at;
                            must = t >= from && t <= to && (i == Lse || e % HS == element);
                            may = t > from - near && t < to + near;
                        }
                        const bool same = got[i][e] == clean[i][e];
                        if (must ? !std::isnan(got[i][e]) : !may && !same) {
                            if (!wrong++) first = e;
                        }
                    }
                    if (wrong)
                        test::report(
                            __FILE__, __LINE__,
                            format(
                                "%s %s, NaN in %s of token %d, head %d, sequence %d: %zu elements of %s should be NaN, "
                                "or as without it; the first is %zu: %g, without the NaN %g",
                                kernel.name, p.c.text().c_str(), inputs[which].of, at, h, b, wrong, kNames[i], first,
                                got[i][first], clean[i][first]));
                }
            }
        }
}

// Part 0, 1, 2 = q, k, v of a packed qkv, from token `begin` on.
template <class X>
Heads<const X> heads(const X* qkv, int part, int begin, const AttentionShape& s) {
    const size_t C = static_cast<size_t>(s.NH) * s.HS;
    return {qkv + begin * 3 * C + part * C, s.T * 3 * C, 3 * C};
}

// ---------------------------------------------------------------------------------------------------------------------
// Streams. The inputs arrive late on a stream with which no other is ordered, not even the default one. Scratch and
// outputs are poisoned on it too. So work on any other stream sees NaN, or the stream overwrites it.

template <class X>
std::vector<char> all_forms_on(const Cuda& dev, const AttentionKernel<X>& kernel, const Problem<X>& p, unsigned pause) {
    Run<X> r(kernel, p);
    const AttentionShape& s = r.s;
    const size_t C = static_cast<size_t>(s.NH) * s.HS, n = r.n, rows = r.rows;
    const bool blocks = kernel.partial;
    const PartialShape shape{s.B, s.T, s.T, s.NH, s.HS, 0, 0, s.causal};
    Buffer late_qkv("late qkv", p.qkv), late_dout("late dout", p.dout);
    Buffer o("o_acc", n * sizeof(float)), running("running lse", rows * sizeof(double)),
        lse("lse", rows * sizeof(float));
    Buffer D("D", rows * sizeof(float)), dkv("dkv", 2 * n * sizeof(float)), dq("dq", n * sizeof(X));
    Buffer rounded("rounded", n * sizeof(X));
    Buffer partial_scratch("block scratch", blocks ? kernel.partial->scratch_bytes(shape) : 0);
    Buffer dq_sum("dq_sum", blocks ? kernel.partial->dq_sum_bytes(shape) : 0);
    r.qkv.poison(), r.dout.poison();
    gpu().sync();

    const auto poison = [&](std::initializer_list<Buffer*> buffers) {
        for (Buffer* b : buffers) b->poison(dev.stream);
    };
    if (pause) dev.pause(pause);
    poison(
        {&r.out, &r.lse, &r.att, &r.scratch, &r.dqkv, &o, &running, &lse, &D, &dkv, &dq, &rounded, &partial_scratch});
    CUDA_CHECK(cudaMemcpyAsync(r.qkv.data(), late_qkv.data(), 3 * n * sizeof(X), cudaMemcpyDeviceToDevice, dev.stream));
    CUDA_CHECK(cudaMemcpyAsync(r.dout.data(), late_dout.data(), n * sizeof(X), cudaMemcpyDeviceToDevice, dev.stream));
    X *qkv = r.qkv.template as<X>(), *dout = r.dout.template as<X>(), *out = r.out.template as<X>();
    kernel.forward(dev, out, r.lse.template as<float>(), r.att.template as<X>(), r.scratch.data(), qkv, s);
    poison({&r.scratch});
    if (kernel.backward)
        kernel.backward(dev, r.dqkv.template as<X>(), r.scratch.data(), dout, out, r.lse.template as<float>(),
                        r.att.template as<X>(), qkv, s);
    std::vector<Buffer*> results = {&r.out, &r.lse, &r.dqkv};
    if (blocks) {
        const Heads<const X> q = heads<X>(qkv, 0, 0, s), k = heads<X>(qkv, 1, 0, s), v = heads<X>(qkv, 2, 0, s);
        PartialShape backward = shape;
        backward.write_dkv = true;
        attention_clear_state(dev, o.as<float>(), running.as<double>(), shape);
        kernel.partial->forward(dev, o.as<float>(), running.as<double>(), q, k, v, shape);
        attention_round<X>(dev, rounded.as<X>(), o.as<float>(), n);
        copy_rows(dev, lse.as<float>(), rows, running.as<double>(), rows, rows, 1);
        attention_D<X>(dev, D.as<float>(), dout, rounded.as<X>(), s.B, s.T, s.NH, s.HS);
        dev.zero(dq_sum.data(), kernel.partial->dq_sum_bytes(shape));
        kernel.partial->backward(dev, dq_sum.as<float>(), dkv.as<float>(), dkv.as<float>() + n, partial_scratch.data(),
                                 q, k, v, {dout, s.T * C, C}, lse.as<float>(), D.as<float>(), backward);
        kernel.partial->write_dq(dev, {dq.as<X>(), s.T * C, C}, dq_sum.as<float>(), shape);
        results.insert(results.end(), {&rounded, &lse, &D, &dkv, &dq});
    }
    dev.sync();
    std::vector<char> bytes;
    for (Buffer* b : results) {
        const std::vector<char> more = b->bytes();
        bytes.insert(bytes.end(), more.begin(), more.end());
    }
    return bytes;
}

template <class X>
void stream(int index) {
    const AttentionKernel<X>& kernel = kernel_for_this_gpu<X>(index);
    OwnStream other;
    other.tf32 = false;
    for (int HS : {64, 128}) {
        Problem<X> p;
        p.c = {{2, 300, 3, HS, true}};
        make_inputs(p);
        const std::vector<char> want = all_forms_on(gpu(), kernel, p, 0),
                                got = all_forms_on(other, kernel, p, 100000000);
        const size_t first = std::mismatch(got.begin(), got.end(), want.begin()).first - got.begin();
        if (got != want)
            test::report(
                __FILE__, __LINE__,
                format("%s %s: on a stream of its own, with late inputs, results differ from byte %zu of %zu on: "
                       "out, lse, dqkv, then the partial form's out, lse, D, dk, dv, dq",
                       kernel.name, p.c.text().c_str(), first, got.size()));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Determinism

template <class X>
void determinism(int index) {
    const AttentionKernel<X>& kernel = kernel_for_this_gpu<X>(index);
    const std::pair<AttentionShape, int> runs[] = {
        {{2, 1000, 12, 64, true}, 20}, {{1, 1000, 5, 128, false}, 20}, {{3, 130, 5, 64, true}, 1000}};
    for (const auto& [shape, count] : runs) {
        Problem<X> p;
        p.c = {shape, Input::normal};
        make_inputs(p);
        Run<X> r(kernel, p);
        std::vector<char> first[3];
        for (int i = 0; i < count; i++) {
            r.forward();
            r.backward();
            Buffer* outputs[3] = {&r.out, &r.lse, &r.dqkv};
            const char* names[3] = {"out", "lse", "dqkv"};
            for (int k = 0; k < (kernel.backward ? 3 : 2); k++) {
                std::vector<char> bytes = outputs[k]->bytes();
                if (i == 0)
                    first[k] = std::move(bytes);
                else if (bytes != first[k]) {
                    test::report(__FILE__, __LINE__,
                                 format("%s %s: %s of run %d differs from the first", kernel.name, p.c.text().c_str(),
                                        names[k], i + 1));
                    return;
                }
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Partial form

struct Chunk {
    int begin, size;
};
static std::vector<Chunk> chunks(const std::vector<int>& sizes) {
    std::vector<Chunk> all;
    int begin = 0;
    for (int size : sizes) {
        all.push_back({begin, size});
        begin += size;
    }
    return all;
}

// Puts one chunk's (B, size, NH, HS) into its place in (B, T, NH, HS), and (B, NH, size) into (B, NH, T). A chunk's own
// tensors are `more` rows longer than it.
static void place(std::vector<double>& to, const std::vector<float>& from, Chunk c, int more, const AttentionShape& s) {
    const size_t C = static_cast<size_t>(s.NH) * s.HS;
    for (int b = 0; b < s.B; b++)
        for (size_t i = 0; i < c.size * C; i++)
            to[(static_cast<size_t>(b) * s.T + c.begin) * C + i] = from[b * (c.size + more) * C + i];
}
static void place_rows(std::vector<double>& to, const std::vector<float>& from, Chunk c, int more,
                       const AttentionShape& s) {
    for (int bh = 0; bh < s.B * s.NH; bh++)
        for (int i = 0; i < c.size; i++)
            to[static_cast<size_t>(bh) * s.T + c.begin + i] = from[bh * (c.size + more) + i];
}

// Computes D with attention_D, and checks it on the host against fp64 with the bound of a dot product's rounding error.
template <class X>
std::vector<float> checked_D(Buffer& out, const Problem<X>& p) {
    const AttentionShape& s = p.c.shape;
    const size_t rows = static_cast<size_t>(s.B) * s.NH * s.T;
    Buffer dout("dout", p.dout), D_buffer("D", rows * sizeof(float));
    attention_D<X>(gpu(), D_buffer.as<float>(), dout.as<X>(), out.as<X>(), s.B, s.T, s.NH, s.HS);
    const std::vector<float> D = D_buffer.download<float>(rows);
    const std::vector<double> o = as_double(out.download<X>(p.dout.size())), d_o = as_double(p.dout);
    for (size_t row = 0; row < rows; row++) {
        const size_t b = row / s.T / s.NH, h = row / s.T % s.NH, t = row % s.T;
        double sum = 0, magnitude = 0;
        for (int d = 0; d < s.HS; d++) {
            const size_t i = ((b * s.T + t) * s.NH + h) * s.HS + d;
            sum += o[i] * d_o[i];
            magnitude += std::fabs(o[i] * d_o[i]);
        }
        CHECK_NEAR(D[row], sum, s.HS * 0x1p-24 * magnitude);
    }
    return D;
}

// Runs the problem chunk by chunk, key chunks in shuffled order as a ring would bring them. Offsets start at
// `first_position`. dk and dv are added into accumulators that start as `prefill`·N(0,1). If prefill is 0 the first
// block of a chunk writes them instead. The chunks' tensors are `more` rows longer than the chunks. In dq's sum a third
// of these rows come first.
template <class X>
void check_blocks(const AttentionKernel<X>& kernel, const Case& c, const std::vector<int>& q_sizes,
                  const std::vector<int>& k_sizes, long long first_position, float prefill, int more = 0) {
    const Problem<X>& p = problem<X>(c);
    const AttentionShape& s = c.shape;
    const Result whole = run(kernel, p);
    const std::vector<Chunk> q_chunks = chunks(q_sizes), k_chunks = chunks(k_sizes);
    const size_t C = static_cast<size_t>(s.NH) * s.HS, row = s.B * C;  // elements of one token in all sequences
    std::mt19937_64 rng(base_seed());
    std::normal_distribution<float> normal;
    Buffer qkv("qkv", p.qkv), dout("dout", p.dout);
    auto shape_of = [&](Chunk q, Chunk k) {
        return PartialShape{
            s.B,      q.size,  k.size,        s.NH,         s.HS, first_position + q.begin, first_position + k.begin,
            s.causal, s.scale, q.size + more, k.size + more};
    };

    Result got, want = p.ref;
    for (int i = 0; i < kTensors; i++) got[i].resize(p.ref[i].size());

    // Forward, with the one rounding at the end.
    std::list<Buffer> lse, o;
    for (Chunk q : q_chunks) {
        const size_t rows = static_cast<size_t>(q.size + more) * s.B * s.NH;
        o.emplace_back("o_acc", (q.size + more) * row * sizeof(float));
        Buffer running("running lse", rows * sizeof(double));
        attention_clear_state(gpu(), static_cast<float*>(nullptr), running.as<double>(), shape_of(q, {0, s.T}));
        std::vector<Chunk> order = k_chunks;
        std::shuffle(order.begin(), order.end(), rng);
        for (Chunk k : order)
            kernel.partial->forward(gpu(), o.back().as<float>(), running.as<double>(),
                                    heads(qkv.as<X>(), 0, q.begin, s), heads(qkv.as<X>(), 1, k.begin, s),
                                    heads(qkv.as<X>(), 2, k.begin, s), shape_of(q, k));
        place(got[Out], o.back().download<float>((q.size + more) * row), q, more, s);
        const std::vector<double> running_host = running.download<double>(rows);
        lse.emplace_back("lse", std::vector<float>(running_host.begin(), running_host.end()));
        place_rows(got[Lse], lse.back().download<float>(rows), q, more, s);
    }
    const std::vector<float> o_all(got[Out].begin(), got[Out].end());
    Buffer o_fp32("o_fp32", o_all), out("out", o_all.size() * sizeof(X));
    attention_round<X>(gpu(), out.as<X>(), o_fp32.as<float>(), o_all.size());
    const std::vector<X> rounded = out.download<X>(o_all.size());
    for (size_t i = 0; i < o_all.size(); i++)
        CHECK(static_cast<float>(rounded[i]) == static_cast<float>(round_to<X>(o_all[i])));

    // Backward, with pairs of chunks in shuffled order, each with the global lse and D of its queries.
    const std::vector<float> D_all = checked_D<X>(out, p);
    std::list<Buffer> D, dq_sum, dk, dv;
    auto accumulator = [&](const char* name, Chunk chunk, int tensor) {
        std::vector<float> start((chunk.size + more) * row);
        for (float& x : start) x = prefill * normal(rng);
        std::vector<double> start_in_place(p.ref[tensor].size());
        place(start_in_place, start, chunk, more, s);
        if (prefill == 0.f) std::fill(start.begin(), start.end(), NAN);
        for (size_t i = 0; i < start_in_place.size(); i++) want[tensor][i] += start_in_place[i];
        return std::pair<const char*, std::vector<float>>(name, start);
    };
    auto emplace = [](std::list<Buffer>& list, const std::pair<const char*, std::vector<float>>& a) {
        list.emplace_back(a.first, a.second);
    };
    for (Chunk q : q_chunks) {
        std::vector<float> D_chunk;
        for (int bh = 0; bh < s.B * s.NH; bh++)
            for (int i = 0; i < q.size + more; i++)
                D_chunk.push_back(i < q.size ? D_all[static_cast<size_t>(bh) * s.T + q.begin + i] : NAN);
        D.emplace_back("D", D_chunk);
        const size_t sum_bytes = kernel.partial->dq_sum_bytes(shape_of(q, q));
        dq_sum.emplace_back("dq_sum", std::vector<char>(sum_bytes, 0));
    }
    for (Chunk k : k_chunks) {
        emplace(dk, accumulator("dk", k, Dk));
        emplace(dv, accumulator("dv", k, Dv));
    }
    std::vector<std::pair<size_t, size_t>> pairs;
    for (size_t i = 0; i < q_chunks.size(); i++)
        for (size_t j = 0; j < k_chunks.size(); j++) pairs.push_back({i, j});
    std::shuffle(pairs.begin(), pairs.end(), rng);
    std::vector<bool> begun(k_chunks.size());
    for (const auto& [i, j] : pairs) {
        const Chunk q = q_chunks[i], k = k_chunks[j];
        PartialShape shape = shape_of(q, k);
        shape.write_dkv = prefill == 0.f && !begun[j];
        shape.q_begin = more / 3;
        begun[j] = true;
        Buffer scratch("scratch", kernel.partial->scratch_bytes(shape));
        const Heads<const X> dout_heads{dout.as<X>() + q.begin * C, s.T * C, C};
        kernel.partial->backward(gpu(), std::next(dq_sum.begin(), i)->as<float>(),
                                 std::next(dk.begin(), j)->as<float>(), std::next(dv.begin(), j)->as<float>(),
                                 scratch.data(), heads(qkv.as<X>(), 0, q.begin, s), heads(qkv.as<X>(), 1, k.begin, s),
                                 heads(qkv.as<X>(), 2, k.begin, s), dout_heads, std::next(lse.begin(), i)->as<float>(),
                                 std::next(D.begin(), i)->as<float>(), shape);
    }
    for (size_t i = 0; i < q_chunks.size(); i++) {
        const Chunk q = q_chunks[i];
        const size_t rows = q.size + more, begin = more / 3;
        Buffer dq("dq", rows * row * sizeof(X));
        kernel.partial->write_dq(gpu(), {dq.as<X>(), rows * C, C}, std::next(dq_sum.begin(), i)->as<float>(),
                                 shape_of(q, q));
        const std::vector<double> written = as_double(dq.download<X>(rows * row));
        for (size_t e = 0; e < written.size(); e++)
            if (const size_t t = e / C % rows; t < begin || t >= begin + q.size) CHECK(written[e] == 0);
        place(got[Dq], std::vector<float>(written.begin() + begin * C, written.end()), q, more, s);
    }
    for (size_t j = 0; j < k_chunks.size(); j++) {
        place(got[Dk], std::next(dk.begin(), j)->download<float>((k_chunks[j].size + more) * row), k_chunks[j], more,
              s);
        place(got[Dv], std::next(dv.begin(), j)->download<float>((k_chunks[j].size + more) * row), k_chunks[j], more,
              s);
    }

    // Blocks are as good as the kernel's whole form, plus one fp32 rounding for each merge. Chunks change the order of
    // sums, so the largest error may differ by chance (see dev/bounds.h), but the L2 error may not.
    const double merges = static_cast<double>(std::max(q_chunks.size(), k_chunks.size())) * 0x1p-24;
    // A partial call gets lse in fp32, and its rounding is a relative error of P. It counts if lse is large, and twice
    // in the largest error, because what is added up is larger than the sum.
    const double largest_lse = max_abs(p.ref[Lse]), lse_rounding = largest_lse > kLargeLse ? 0x1p-24 * largest_lse : 0;
    for (int i = 0; i < kTensors; i++) {
        const auto check = [&](const char* norm, double error, double bound) {
            if (!(error <= bound))
                test::report(
                    __FILE__, __LINE__,
                    format("%s %s in %zu x %zu chunks, prefill %g: %s: %s error %.3g > %.3g", kernel.name,
                           c.text().c_str(), q_chunks.size(), k_chunks.size(), prefill, kNames[i], norm, error, bound));
        };
        // The largest error counts it twice, because what is added up is larger than its sum and lse's error is in each
        // part.
        const double extra = i >= Dq ? lse_rounding : 0, relative = merges + extra;
        check("max", max_error(got[i], want[i]),
              2 * max_error(whole[i], p.ref[i]) + std::max(p.tiny[i], (relative + extra) * max_abs(want[i])));
        if (c.input == Input::constant && (i == Dq || i == Dk)) continue;  // as in check_result
        // Large logits leave a few keys with all the weight, so that in bf16 few roundings decide this error, too.
        const double few = std::is_same_v<X, bf16> && largest_lse > kLargeLse ? 1.25 : 1.1;
        check("L2", l2_error(got[i], want[i]), few * l2_error(whole[i], p.ref[i]) + relative * l2_norm(want[i]));
    }
}

// Queries before any of their keys. Their rows stay as attention_clear_state made them, and have zero gradients.
template <class X>
void check_masked_blocks(const AttentionKernel<X>& kernel, int HS, int Tq, int Tk, int k_offset,
                         Input input = Input::normal, float logit = 0.f) {
    const int T = std::max(Tq, Tk);
    Problem<X> p;
    p.c = {{2, T, 3, HS, true}, input, logit};
    make_inputs(p);
    const AttentionShape& s = p.c.shape;
    const size_t C = static_cast<size_t>(s.NH) * HS, rows = static_cast<size_t>(s.B) * s.NH * Tq, n_q = s.B * Tq * C,
                 n_k = s.B * Tk * C;
    const PartialShape shape{s.B, Tq, Tk, s.NH, HS, 0, k_offset};
    Buffer qkv("qkv", p.qkv), dout("dout", p.dout), o("o_acc", n_q * sizeof(float));
    Buffer running("running lse", rows * sizeof(double)), lse("lse", rows * sizeof(float));
    Buffer D("D", std::vector<float>(rows, 0.f)), dq("dq", n_q * sizeof(X));
    Buffer dq_sum("dq_sum", std::vector<char>(kernel.partial->dq_sum_bytes(shape), 0));
    Buffer dk("dk", std::vector<float>(n_k, 0.f)), dv("dv", std::vector<float>(n_k, 0.f));
    Buffer scratch("scratch", kernel.partial->scratch_bytes(shape));
    const Heads<const X> q = heads(qkv.as<X>(), 0, 0, s), k = heads(qkv.as<X>(), 1, 0, s),
                         v = heads(qkv.as<X>(), 2, 0, s);
    attention_clear_state(gpu(), o.as<float>(), running.as<double>(), shape);
    for (int twice = 0; twice < 2; twice++)  // the second time merges empty with empty
        kernel.partial->forward(gpu(), o.as<float>(), running.as<double>(), q, k, v, shape);
    copy_rows(gpu(), lse.as<float>(), rows, running.as<double>(), rows, rows, 1);
    kernel.partial->backward(gpu(), dq_sum.as<float>(), dk.as<float>(), dv.as<float>(), scratch.data(), q, k, v,
                             {dout.as<X>(), s.T * C, C}, lse.as<float>(), D.as<float>(), shape);
    kernel.partial->write_dq(gpu(), {dq.as<X>(), Tq * C, C}, dq_sum.as<float>(), shape);

    const std::vector<float> o_host = o.download<float>(n_q), lse_host = lse.download<float>(rows);
    const std::vector<double> dq_host = as_double(dq.download<X>(n_q));
    const auto check = [&](const char* tensor, size_t token, double value, bool ok) {
        if (!ok)
            test::report(__FILE__, __LINE__,
                         format("%s %s, %d queries against %d keys from %d on: %s of token %zu is %g", kernel.name,
                                p.c.text().c_str(), Tq, Tk, k_offset, tensor, token, value));
    };
    for (size_t i = 0; i < rows; i++) {
        const bool empty = static_cast<int>(i % Tq) < k_offset;
        check("lse", i % Tq, lse_host[i],
              empty ? lse_host[i] == -std::numeric_limits<float>::infinity() : std::isfinite(lse_host[i]));
    }
    for (size_t i = 0; i < n_q; i++) {
        const size_t t = i / C % Tq;
        const bool empty = static_cast<int>(t) < k_offset;
        check("out", t, o_host[i], empty ? o_host[i] == 0.f : std::isfinite(o_host[i]));
        check("dq", t, dq_host[i], empty ? dq_host[i] == 0 : std::isfinite(dq_host[i]));
    }
    for (Buffer* b : {&dk, &dv}) {
        const std::vector<float> host = b->download<float>(n_k);
        for (size_t i = 0; i < n_k; i++) {
            const size_t t = i / C % Tk;
            const bool unseen = static_cast<int>(t) + k_offset >= Tq;
            check(b == &dk ? "dk" : "dv", t, host[i], unseen ? host[i] == 0.f : std::isfinite(host[i]));
        }
    }
}

template <class X>
void block(int index) {
    const AttentionKernel<X>& kernel = kernel_for_this_gpu<X>(index);
    if (!kernel.partial) SKIP("%s has no partial form", kernel.name);
    const std::vector<int> uneven_q = {128, 37, 64, 71}, uneven_k = {37, 64, 71, 128};
    for (int HS : {64, 128})
        for (bool causal : {true, false}) {
            const Case c{{2, 300, 3, HS, causal}, Input::normal};
            check_blocks(kernel, c, {300}, {300}, 0, 0.f);
            check_blocks(kernel, c, uneven_q, uneven_k, 0, 0.f);
            check_blocks(kernel, c, {100, 100, 100}, {60, 60, 60, 60, 60}, 0, 0.f);
            check_blocks(kernel, c, uneven_q, uneven_k, 0, 0.f, 9);
            check_blocks(kernel, c, {100, 200}, uneven_q, 0, 2.f, 100);
            check_blocks(kernel, c, uneven_k, {299, 1}, 1LL << 33, 1.f);
            check_blocks(kernel, c, {1, 2, 297}, uneven_q, 7, 3.f);
        }
    for (int HS : {64, 128}) {
        check_blocks(kernel, {{2, 300, 3, HS, true, 0.3f}}, uneven_q, uneven_k, 0, 0.f);
        check_blocks(kernel, {{2, 300, 3, HS, false, 0.02f}, Input::large_q}, uneven_k, {100, 200}, 0, 1.f, 9);
    }
    check_blocks(kernel, {{1, 256, 12, 64, true}, Input::large_q}, {64, 64, 64, 64}, {128, 128}, 0, 0.f);
    check_blocks(kernel, {{1, 256, 12, 64, true}, Input::shifted}, {128, 128}, {64, 64, 64, 64}, 0, 0.f);
    for (int HS : {64, 128}) {
        check_masked_blocks(kernel, HS, 64, 96, 64);    // all rows, just
        check_masked_blocks(kernel, HS, 64, 96, 1000);  // all rows, by far
        check_masked_blocks(kernel, HS, 200, 130, 150);
        check_masked_blocks(kernel, HS, 130, 200, 1);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Large logits, at lengths that leave tiles ragged

template <class X>
void logits(int index) {
    const AttentionKernel<X>& kernel = kernel_for_this_gpu<X>(index);
    const std::pair<Input, float> inputs[] = {{Input::constant, -128.f}, {Input::constant, 128.f},
                                              {Input::constant, -200.f}, {Input::constant, 200.f},
                                              {Input::mixed, 200.f},     {Input::ramp, 200.f}};
    for (int T : {33, 65, 100, 127, 129, 1001})
        for (int HS : {64, 128})
            for (bool causal : {true, false})
                for (const auto& [input, logit] : inputs) {
                    const int several = T < 1000 ? 2 : 1;
                    const Case c{{several, T, several, HS, causal, 8.f / static_cast<float>(HS)}, input, logit};
                    const Problem<X>& p = problem<X>(c);
                    check_result(kernel, p, run(kernel, p));
                    if (!kernel.partial) continue;
                    check_blocks(kernel, c, {T / 3, T - T / 3}, {T / 2, T - T / 2}, 0, 0.f, T % 2 ? 0 : 9);
                }
    if (!kernel.partial) return;
    for (int HS : {64, 128})
        for (const auto& [input, logit] : inputs) check_masked_blocks(kernel, HS, 130, 200, 33, input, logit);
}

// flash_fp32's tiles for 64 KB of shared memory, which is what Turing gives a block, and the Error if there is less.
template <class X>
void small_tiles(int index) {
    const AttentionKernel<X>& kernel = kernel_for_this_gpu<X>(index);
    if (std::string(kernel.name) != "flash_fp32") SKIP("%s has one size of tiles", kernel.name);
    const struct Restore {
        int bytes = gpu().block_smem;
        ~Restore() { own_gpu().block_smem = bytes; }
    } restore;
    for (int HS : {64, 128}) {
        for (int T : {1, 33, 129, 300})
            for (bool causal : {true, false}) {
                const Case c{{2, T, 3, HS, causal}};
                const Problem<X>& p = problem<X>(c);
                own_gpu().block_smem = restore.bytes;
                const Result large = run(kernel, p);
                own_gpu().block_smem = 64 << 10;
                const Result small = run(kernel, p);
                check_result(kernel, p, small);
                if (T == 300 && restore.bytes >= 112 << 10) CHECK(small[Dk] != large[Dk]);  // another order of sums
            }
        const Case c{{2, 300, 3, HS, true}};
        check_blocks(kernel, c, {128, 37, 64, 71}, {100, 200}, 0, 0.f, 9);
        check_blocks(kernel, {{1, 129, 1, HS, true, 8.f / static_cast<float>(HS)}, Input::constant, -128.f}, {29, 100},
                     {65, 64}, 0, 1.f);
        check_masked_blocks(kernel, HS, 130, 200, 1);
        own_gpu().block_smem = 48 << 10;
        const Problem<X>& p = problem<X>(c);
        CHECK_ERROR(run(kernel, p), "shared memory");
        own_gpu().block_smem = restore.bytes;
    }
}

// Without a mask, and with 160 key tiles of 128 keys in all: some of 132 multiprocessors get two, and more would queue
// for a turn. It runs many times, because who gets which must not matter.
template <class X>
void large_block(int index) {
    const AttentionKernel<X>& kernel = kernel_for_this_gpu<X>(index);
    if (!kernel.partial) SKIP("%s has no partial form", kernel.name);
    for (int HS : {64, 128}) {
        const Case c{{2, 1010, 10, HS, false}, Input::normal};
        check_blocks(kernel, c, {1010}, {1010}, 0, 0.f, 9);
        const Problem<X>& p = problem<X>(c);
        const AttentionShape& s = p.c.shape;
        const size_t C = static_cast<size_t>(s.NH) * HS, n = s.B * s.T * C,
                     rows = static_cast<size_t>(s.B) * s.NH * s.T;
        PartialShape shape{s.B, s.T, s.T, s.NH, HS, 0, 0, false};
        shape.write_dkv = true;
        Buffer qkv("qkv", p.qkv), dout("dout", p.dout), lse("lse", std::vector<float>(rows, 7.f));
        Buffer D("D", std::vector<float>(rows, 0.1f)), scratch("scratch", kernel.partial->scratch_bytes(shape));
        std::vector<char> first;
        for (int i = 0; i < 20; i++) {
            Buffer dq("dq", std::vector<char>(kernel.partial->dq_sum_bytes(shape), 0)),
                dkv("dkv", 2 * n * sizeof(float));
            kernel.partial->backward(gpu(), dq.as<float>(), dkv.as<float>(), dkv.as<float>() + n, scratch.data(),
                                     heads(qkv.as<X>(), 0, 0, s), heads(qkv.as<X>(), 1, 0, s),
                                     heads(qkv.as<X>(), 2, 0, s), {dout.as<X>(), s.T * C, C}, lse.as<float>(),
                                     D.as<float>(), shape);
            std::vector<char> bytes = dq.bytes(), more = dkv.bytes();
            bytes.insert(bytes.end(), more.begin(), more.end());
            if (i == 0) first = bytes;
            CHECK(bytes == first);
        }
    }
}

// A test small enough for compute-sanitizer, because racecheck of `block` with flash_fp16x3 takes longer than four
// minutes. But it has so many heads that the persistent blocks of sm_90a wrap around their stages.
template <class X>
void few_blocks(int index) {
    const AttentionKernel<X>& kernel = kernel_for_this_gpu<X>(index);
    if (!kernel.partial) SKIP("%s has no partial form", kernel.name);
    const int NH = kernel.min_sm == 90 ? 150 : 2;
    for (int HS : {64, 128}) {
        const Case c{{1, 200, NH, HS, true}, Input::normal};
        check_blocks(kernel, c, {130, 70}, {71, 129}, 0, 0.f);
        check_blocks(kernel, c, {200}, {71, 129}, 7, 2.f, 9);
        check_masked_blocks(kernel, HS, 130, 200, 1);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Limits

// Runs a case with qkv `misalign` elements past its natural place. An Error is fine, and so is the right result.
template <class X>
void check_error_or_right(const AttentionKernel<X>& kernel, const Case& c, int misalign) {
    Problem<X> p;
    p.c = c;
    make_inputs(p);
    if (misalign) {
        std::vector<X> moved(p.qkv.size() + misalign, round_to<X>(1.f));
        std::copy(p.qkv.begin(), p.qkv.end(), moved.begin() + misalign);
        Run<X> r(kernel, p);
        Buffer qkv("qkv", moved);
        const std::string error = test::error_of([&] {
            kernel.forward(gpu(), r.out.template as<X>(), r.lse.template as<float>(), r.att.template as<X>(),
                           r.scratch.data(), qkv.as<X>() + misalign, r.s);
            if (kernel.backward)
                kernel.backward(gpu(), r.dqkv.template as<X>(), r.scratch.data(), r.dout.template as<X>(),
                                r.out.template as<X>(), r.lse.template as<float>(), r.att.template as<X>(),
                                qkv.as<X>() + misalign, r.s);
        });
        if (error.empty()) check_result(kernel, problem<X>(c), r.result());
    } else {
        Result got;
        const std::string error = test::error_of([&] { got = run(kernel, p); });
        if (error.empty()) check_result(kernel, problem<X>(c), got);
    }
    gpu().sync();  // an Error from a launcher leaves the device fit for work
}

template <class X>
void limits(int index) {
    const AttentionKernel<X>& kernel = kernel_for_this_gpu<X>(index);
    check_error_or_right(kernel, {{2, 100, 3, 80, true}}, 0);
    check_error_or_right(kernel, {{1, 70, 2, 32, true}}, 0);
    check_error_or_right(kernel, {{2, 100, 3, 64, true}}, 1);
    check_error_or_right(kernel, {{2, 100, 3, 128, true}}, 1);
    check_error_or_right(kernel, {{65537, 1, 1, 64, true}}, 0);  // more than a grid's y or z
    check_error_or_right(kernel, {{2731, 2, 25, 64, true}}, 0);
    if (kernel.flash) {
        const AttentionShape unsupported{1, 64, 1, 80};
        CHECK_ERROR(kernel.forward(gpu(), nullptr, nullptr, nullptr, nullptr, nullptr, unsupported), "80");
    }
    if (!kernel.partial) return;
    const auto check_outside = [&](PartialShape shape, const char* why) {
        CHECK_ERROR(kernel.partial->forward(gpu(), nullptr, nullptr, {}, {}, {}, shape), why);
        CHECK_ERROR(kernel.partial->backward(gpu(), nullptr, nullptr, nullptr, nullptr, {}, {}, {}, {}, nullptr,
                                             nullptr, shape),
                    why);
    };
    PartialShape shape{1, 64, 65, 1, 64};
    shape.q_rows = 100, shape.q_begin = 37;
    check_outside(shape, "of 100");
    shape.q_begin = -1;
    check_outside(shape, "-1");
    shape.q_begin = 0, shape.q_rows = 63;
    check_outside(shape, "of 63");
    shape.q_rows = 0, shape.k_rows = 64;
    check_outside(shape, "of 64");
}

// Runs one sequence B times over, and looks at some of the copies.
template <class X>
void check_many(const AttentionKernel<X>& kernel, const Case& c, size_t B, const std::vector<size_t>& looked_at) {
    const Problem<X>& p = problem<X>(c);
    AttentionShape s = c.shape;
    const size_t n = p.dout.size(), rows = static_cast<size_t>(s.NH) * s.T;
    s.B = static_cast<int>(B);
    const size_t bytes = 8 * B * n * sizeof(X) + kernel.saved_bytes(s) + kernel.scratch_bytes(s);
    if (bytes > gpu().total_bytes / 10 * 8)
        SKIP("needs %.0f GiB of device memory", static_cast<double>(bytes) / (1 << 30));

    Buffer qkv("qkv", 3 * B * n * sizeof(X)), dout("dout", B * n * sizeof(X)), out("out", B * n * sizeof(X));
    Buffer lse("lse", B * rows * sizeof(float)), dqkv("dqkv", 3 * B * n * sizeof(X));
    Buffer att("att", kernel.saved_bytes(s)), scratch("scratch", kernel.scratch_bytes(s));
    auto fill = [&](Buffer& buffer, const std::vector<X>& one) {
        gpu().upload(buffer.data(), one.data(), one.size() * sizeof(X));
        for (size_t done = 1; done < B; done *= 2)
            CUDA_CHECK(cudaMemcpyAsync(buffer.as<X>() + done * one.size(), buffer.data(),
                                       std::min(done, B - done) * one.size() * sizeof(X), cudaMemcpyDeviceToDevice,
                                       gpu().stream));
    };
    fill(qkv, p.qkv);
    fill(dout, p.dout);
    kernel.forward(gpu(), out.as<X>(), lse.as<float>(), att.as<X>(), scratch.data(), qkv.as<X>(), s);
    scratch.poison();
    if (kernel.backward)
        kernel.backward(gpu(), dqkv.as<X>(), scratch.data(), dout.as<X>(), out.as<X>(), lse.as<float>(), att.as<X>(),
                        qkv.as<X>(), s);
    for (size_t b : looked_at) {
        Result got;
        got[Out] = as_double(out.download<X>(n, b * n));
        got[Lse] = as_double(lse.download<float>(rows, b * rows));
        if (kernel.backward)
            split(got, as_double(dqkv.download<X>(3 * n, b * 3 * n)), static_cast<size_t>(s.NH) * s.HS);
        check_result(kernel, p, got);
    }
}
// More than 2³¹ elements of qkv and dqkv, and if the GPU has the memory also of out, dout and dq.
template <class X>
void big(int index) {
    const size_t B = (size_t{1} << 31) / (3 * 65 * 25 * 64) + 2;
    check_many(kernel_for_this_gpu<X>(index), {{1, 65, 25, 64, true}}, B, {0, 1, B - 1});
}
template <class X>
void big_out(int index) {
    const size_t B = (size_t{1} << 31) / (65 * 25 * 64) + 2;
    check_many(kernel_for_this_gpu<X>(index), {{1, 65, 25, 64, true}}, B, {0, 1, B / 3, B - 2, B - 1});
}
// The heads are so many and so long that flash_bf16_sm90 takes them in groups and uses a place in dQ's sum a second
// time.
template <class X>
void groups(int index) {
    check_many(kernel_for_this_gpu<X>(index), {{1, 1040, 25, 128, true}}, 5, {0, 1, 2, 3, 4});
}

// ---------------------------------------------------------------------------------------------------------------------
// The layer that the trainer calls

template <class X>
void check_layer(Attention kind) {
    const Cuda& dev = gpu();
    const AttentionKernel<X>& kernel = attention_kernel<X>(dev, kind, 64);
    CHECK(kernel.flash == (kind == Attention::flash));
    CHECK(dev.sm >= kernel.min_sm);
    const Case c{{2, 100, 3, 64, true}};
    const Problem<X>& p = problem<X>(c);
    const AttentionShape& s = p.c.shape;
    Run<X> r(kernel, p);
    CHECK(attention_saved_bytes<X>(dev, kind, s.B, s.T, s.NH, s.HS) == kernel.saved_bytes(s));
    CHECK(attention_scratch_bytes<X>(dev, kind, s.B, s.T, s.NH, s.HS) == kernel.scratch_bytes(s));
    if (kind == Attention::flash) CHECK(kernel.saved_bytes(s) == 0);
    attention_forward<X>(dev, kind, r.out.template as<X>(), r.lse.template as<float>(), r.att.template as<X>(),
                         r.scratch.data(), r.qkv.template as<X>(), s.B, s.T, s.NH, s.HS);
    r.scratch.poison();
    attention_backward<X>(dev, kind, r.dqkv.template as<X>(), r.scratch.data(), r.dout.template as<X>(),
                          r.out.template as<X>(), r.lse.template as<float>(), r.att.template as<X>(),
                          r.qkv.template as<X>(), s.B, s.T, s.NH, s.HS);
    check_result(kernel, p, r.result());
}
// Attention in chunks (attention/ring/chunks.h) with the layer's kernel is as good as the unchunked call, plus one fp32
// rounding for each merge. That holds for chunk sizes that divide T and for those that do not.
template <class X>
void check_chunks() {
    const Cuda& dev = gpu();
    for (int HS : {64, 128})
        for (bool causal : {true, false})
            for (const std::pair<int, int>& chunk :
                 {std::pair<int, int>{500, 500}, {125, 250}, {128, 128}, {1000, 37}, {77, 1000}}) {
                const Case c{{2, 1000, 3, HS, causal}};
                const Problem<X>& p = problem<X>(c);
                const AttentionShape& s = p.c.shape;
                const Result whole = run(attention_kernel<X>(dev, Attention::flash, HS), p);
                Run<X> r(attention_kernel<X>(dev, Attention::flash, HS), p);
                Chunks<Cuda, X> chunks(dev, {s.B, s.T, s.T, s.NH, HS, 0, 0, causal}, chunk.first, chunk.second);
                Buffer memory("memory of chunks", chunks.bytes());
                chunks.place(memory.data());
                chunks.forward(r.out.template as<X>(), r.lse.template as<float>(), r.qkv.template as<X>());
                memory.poison();
                chunks.backward(r.dqkv.template as<X>(), r.dout.template as<X>(), r.out.template as<X>(),
                                r.lse.template as<float>(), r.qkv.template as<X>());
                const Result got = r.result();
                const double merges = (s.T - 1) / std::min(chunk.first, chunk.second) * 0x1p-24;
                for (int i = 0; i < kTensors; i++) {
                    const auto check = [&](const char* norm, double error, double bound) {
                        if (!(error <= bound))
                            test::report(__FILE__, __LINE__,
                                         format("%s in chunks of %d x %d: %s: %s error %.3g > %.3g", c.text().c_str(),
                                                chunk.first, chunk.second, kNames[i], norm, error, bound));
                    };
                    check("L2", l2_error(got[i], p.ref[i]),
                          1.1 * l2_error(whole[i], p.ref[i]) + merges * l2_norm(p.ref[i]));
                    check("max", max_error(got[i], p.ref[i]),
                          1.1 * max_error(whole[i], p.ref[i]) + p.tiny[i] + merges * max_abs(p.ref[i]));
                }
            }
}
TEST(chunks_fp32) {
    check_chunks<float>();
}
TEST(chunks_bf16) {
    check_chunks<bf16>();
}

TEST(layer_naive_fp32) {
    check_layer<float>(Attention::naive);
}
TEST(layer_naive_bf16) {
    check_layer<bf16>(Attention::naive);
}
TEST(layer_flash_fp32) {
    check_layer<float>(Attention::flash);
}
TEST(layer_flash_bf16) {
    check_layer<bf16>(Attention::flash);
}
// What --attention accepts, and what a model is refused.
TEST(names) {
    const Cuda& dev = gpu();
    CHECK(std::string(attention_names()).rfind("flash|naive|flash_simple|", 0) == 0);
    const auto check = [&](auto x) {
        using X = decltype(x);
        const AttentionKernels<X> all = attention_kernels<X>();
        for (const AttentionKernel<X>* k = all.begin; k != all.begin + all.count; k++) {
            const Attention kind{k->name};
            if (!k->runs_on(dev)) {
                CHECK_ERROR(attention_kernel<X>(dev, kind, 64), k->name);
                continue;
            }
            CHECK(&attention_kernel<X>(dev, kind, 64) == k);
            check_attention<X>(dev, kind, 64, false, false);
            const std::string trains = test::error_of([&] { check_attention<X>(dev, kind, 64, true, false); });
            CHECK(trains.empty() == (k->backward != nullptr));
            const std::string rings = test::error_of([&] { check_attention<X>(dev, kind, 64, false, true); });
            CHECK(rings.empty() == (k->partial != nullptr));
        }
        check_attention<X>(dev, Attention::flash, 64, true, true);
    };
    check(float{});
    check(bf16{});
    CHECK_ERROR(attention_kernel<float>(dev, Attention{"flash_bf16"}, 64), "--precision bf16");
    CHECK_ERROR(attention_kernel<bf16>(dev, Attention{"flash_simple"}, 64), "--precision fp32");
    CHECK_ERROR(attention_kernel<bf16>(dev, Attention{"magic"}, 64), "no such kernel");
}
TEST(layer_unsupported_head_size) {
    CHECK_ERROR(attention_kernel<float>(gpu(), Attention::flash, 80), "80");
    CHECK_ERROR(attention_kernel<bf16>(gpu(), Attention::flash, 80), "80");
}

// ---------------------------------------------------------------------------------------------------------------------
// One test per kernel and property. A test is a plain function, so the kernel's index in the table is a template
// parameter.

template <class X, int Index>
void add_tests() {
    if (Index >= attention_kernels<X>().count) return;
    static std::list<std::string> names;
    auto add = [](const char* what, void (*run)()) {
        names.push_back(format("%s %s %s", attention_kernels<X>().begin[Index].name, name_of(dtype_of<X>()), what));
        test::cases().push_back({names.back().c_str(), run});
    };
    add("accuracy", [] { accuracy<X>(Index); });
    add("logits", [] { logits<X>(Index); });
    add("extremes", [] { extremes<X>(Index); });
    add("nan", [] { one_nan<X>(Index); });
    add("stream", [] { stream<X>(Index); });
    add("small tiles", [] { small_tiles<X>(Index); });
    add("determinism", [] { determinism<X>(Index); });
    add("block", [] { block<X>(Index); });
    add("large block", [] { large_block<X>(Index); });
    add("few blocks", [] { few_blocks<X>(Index); });
    add("limits", [] { limits<X>(Index); });
    add("big", [] { big<X>(Index); });
    add("big out", [] { big_out<X>(Index); });
    add("groups", [] { groups<X>(Index); });
}
template <int... Index>
void add_all_tests(std::integer_sequence<int, Index...>) {
    constexpr int room = sizeof...(Index);
    if (attention_kernels<float>().count > room || attention_kernels<bf16>().count > room)
        throw Error("test_attention: more kernels than tests, raise the number in main");
    (add_tests<float, Index>(), ...);
    (add_tests<bf16, Index>(), ...);
}

TEST_LIMIT(600);  // references of long sequences take long

int main(int argc, char** argv) {
    add_all_tests(std::make_integer_sequence<int, 6>());
    return test::main(argc, argv);
}
