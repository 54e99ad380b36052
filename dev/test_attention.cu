// Every attention kernel of the table against the fp64 reference.
// kProperties at the end of this file lists what is tested of each.
//
// The rule of dev/bounds.h allows an error of at most k times naive's. naive itself, the yardstick, is held to a
// relative L2 error. ACCURACY=1 in the environment prints every error that is compared with a bound.
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
#include <memory>
#include <optional>
#include <random>
#include <set>
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

static uint64_t base_seed() {
    static const uint64_t seed = std::getenv("SEED") ? std::strtoull(std::getenv("SEED"), nullptr, 10) : 1;
    return seed;
}

// The device of all tests, in strict fp32. Without one, the test that asks for it is skipped.
static Cuda& gpu() {
    std::string why;
    if (Cuda::count(&why) == 0) SKIP("no GPU: %s", why.c_str());
    static Cuda* dev = nullptr;
    if (!dev) {
        dev = new Cuda(0);
        dev->tf32 = false;
    }
    return *dev;
}

// ---------------------------------------------------------------------------------------------------------------------
// Device memory between guards. It begins as NaN bytes.

template <class X>
class Buffer {
  public:
    Buffer(const char* name, size_t count) : name(name), count_(count) {
        base_ = static_cast<char*>(gpu().alloc(kGuard + bytes() + kGuard));
        CUDA_CHECK(cudaMemsetAsync(base_, 0xFF, kGuard + bytes() + kGuard, gpu().stream));
    }
    Buffer(const char* name, const std::vector<X>& values) : Buffer(name, values.size()) { upload(values); }
    ~Buffer() {
        try {  // after a fault on the device every call fails, and the test has reported it by then
            check_guards();
            gpu().free(base_);
        } catch (const Error&) {}
    }
    Buffer(const Buffer&) = delete;

    operator X*() const { return reinterpret_cast<X*>(base_ + kGuard); }
    size_t bytes() const { return count_ * sizeof(X); }
    void poison(const Cuda& dev) { CUDA_CHECK(cudaMemsetAsync(*this, 0xFF, bytes(), dev.stream)); }
    void upload(const std::vector<X>& values) { gpu().upload(*this, values.data(), values.size() * sizeof(X)); }
    void copy(const Cuda& dev, const Buffer& from) {
        CUDA_CHECK(cudaMemcpyAsync(*this, from, bytes(), cudaMemcpyDeviceToDevice, dev.stream));
    }
    std::vector<X> host() const { return host(0, count_); }
    std::vector<X> host(size_t first, size_t count) const {
        std::vector<X> values(count);
        gpu().download(values.data(), *this + first, count * sizeof(X));
        return values;
    }

    const char* const name;

  private:
    static constexpr size_t kGuard = 16384;
    char* base_;
    const size_t count_;

    void check_guards() {
        std::vector<unsigned char> guard(2 * kGuard);
        gpu().download(guard.data(), base_, kGuard);
        gpu().download(guard.data() + kGuard, base_ + kGuard + bytes(), kGuard);
        for (size_t i = 0; i < guard.size(); i++) {
            if (guard[i] == 0xFF) continue;
            const size_t distance = i < kGuard ? kGuard - i : i - kGuard;
            test::report(__FILE__, __LINE__,
                         format("written outside %s (%zu bytes), %zu bytes %s", name, bytes(), distance,
                                i < kGuard ? "before it" : "past its end"));
            return;
        }
    }
};

template <class... Buffers>
void poison(const Cuda& dev, Buffers&... buffers) {
    (buffers.poison(dev), ...);
}

// The bytes of several buffers, each with its name, for runs that must give the same.
using Bytes = std::vector<std::pair<std::string, std::vector<char>>>;
template <class... Buffers>
Bytes bytes_of(const Buffers&... buffers) {
    Bytes all;
    const auto add = [&](const auto& buffer) {
        std::vector<char> bytes(buffer.bytes());
        gpu().download(bytes.data(), buffer, bytes.size());
        all.push_back({buffer.name, std::move(bytes)});
    };
    (add(buffers), ...);
    return all;
}
// Reports the first tensor that differs, and returns whether there is none.
static bool check_same(const std::string& what, const Bytes& got, const Bytes& want) {
    for (size_t i = 0; i < want.size(); i++) {
        const auto& [name, bytes] = want[i];
        const auto first = std::mismatch(bytes.begin(), bytes.end(), got[i].second.begin()).first;
        if (first == bytes.end()) continue;
        test::report(__FILE__, __LINE__,
                     format("%s: %s differs from byte %td of %zu on", what.c_str(), name.c_str(), first - bytes.begin(),
                            bytes.size()));
        return false;
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Problems: a shape, its inputs, and the fp64 result

// The last three have logits of up to ±Case::logit:
//   constant  every logit is Case::logit, exactly if scale·HS is 8
//   mixed     a row's logits are of any size, and of one sign. The last row's are negative, because a kernel could take
//             its lse for the lse of rows beyond T.
//   ramp      they rise along the keys, 16 at a time, in half of the rows, and fall in the others. So the maximum rises
//             by hundreds whichever way a kernel walks.
enum class Input { normal, large_q, shifted, early_keys, magnitudes, magnitudes_reversed, constant, mixed, ramp };

static const struct {
    const char* text;
    float factors[4] = {1, 1, 1, 1};  // of q, k, v, dout
    float shift = 0;
    float early = 1;  // of the first 32 keys
} kInputs[] = {{"N(0,1)"},
               {"q x5", {5, 1, 1, 1}},
               {"mean +0.5", {1, 1, 1, 1}, 0.5f},
               // The maximum of these logits grows by hundreds while a kernel walks from the last keys to the first.
               {"first keys x60", {1, 1, 1, 1}, 0, 60},
               {"q 1e15 k 1e-15 v 1e-20 dout 1e10", {1e15f, 1e-15f, 1e-20f, 1e10f}},
               {"q 1e-15 k 1e15 v 1e15 dout 1e-30", {1e-15f, 1e15f, 1e15f, 1e-30f}},
               {"every logit"},
               {"mixed logits up to"},
               {"logits that rise or fall by twice"}};

struct Case {
    AttentionShape shape;
    Input input = Input::normal;
    float logit = 0.f;
    std::string text() const {
        return format("B%d T%d NH%d HS%d %s%s, %s%s, SEED=%llu", shape.B, shape.T, shape.NH, shape.HS,
                      shape.causal ? "causal" : "full",
                      shape.scale != 0.f ? format(" scale %g", shape.scale).c_str() : "",
                      kInputs[static_cast<int>(input)].text, logit != 0.f ? format(" %g", logit).c_str() : "",
                      static_cast<unsigned long long>(base_seed()));
    }
};

using Result = std::array<std::vector<double>, kTensors>;  // out, dq, dk, dv (B,T,NH,HS), and lse (B,NH,T)
using Errors = std::array<double, kTensors>;
struct NaiveErrors {
    Errors max, l2;  // max|naive − ref|, ‖naive − ref‖
};

template <class X>
struct Problem {
    Case c;
    std::vector<X> qkv, dout;
    Result ref = {};
    Errors tiny = {};  // of the rule in dev/bounds.h
    mutable std::optional<NaiveErrors> naive = {};
};

template <class X>
std::vector<double> as_double(const std::vector<X>& v) {
    std::vector<double> d(v.size());
    for (size_t i = 0; i < v.size(); i++) d[i] = static_cast<double>(static_cast<float>(v[i]));
    return d;
}

// (B, T, 3, NH, HS) as three tensors (B, T, NH, HS).
static void split(Result& to, const std::vector<double>& dqkv, const AttentionShape& s) {
    const size_t C = size_t(s.NH) * s.HS;
    for (int part = 0; part < 3; part++) {
        std::vector<double>& x = to[Dq + part] = std::vector<double>(dqkv.size() / 3);
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
    double worst = 0;
    for (size_t i = 0; i < got.size(); i++) keep_worst(worst, std::fabs(got[i] - want[i]));
    return worst;
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
    const float steps = static_cast<float>(std::max(2, s.T / 16) - 1);  // of a ramp
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform(-1.f, 1.f);
    std::vector<float> w(s.NH * s.HS, 1.f);
    if (!constant)
        for (float& x : w) x = uniform(rng) < 0.f ? -1.f : 1.f;
    for (size_t row = 0; row < p.qkv.size() / s.HS; row++) {  // of (B, T, 3, NH)
        const int h = row % s.NH, part = row / s.NH % 3, t = row / s.NH / 3 % s.T;
        if (part == 2) continue;
        const bool key = part == 1;
        float x = uniform(rng);
        if (constant)
            x = key && p.c.logit < 0.f ? -1.f : 1.f;
        else if (mixed && key)
            x = 0.75f + 0.25f * x;
        else if (mixed)
            x = t == s.T - 1 ? -1.f : x;
        else if (key)
            x = std::min(static_cast<float>(t / 16) / steps, 1.f) * 2.f - 1.f;
        else
            x = x < 0.f ? -1.f : 1.f;
        for (int d = 0; d < s.HS; d++) {
            const float noise = constant ? 0.f : 0.1f * normal(rng);
            p.qkv[row * s.HS + d] = static_cast<X>(a * (x * w[h * s.HS + d] + noise));
        }
    }
}

// The problem without its result.
template <class X>
Problem<X> inputs_of(const Case& c) {
    const AttentionShape& s = c.shape;
    const size_t C = size_t(s.NH) * s.HS;
    const auto& input = kInputs[static_cast<int>(c.input)];
    std::seed_seq seed{base_seed(), uint64_t(s.B), uint64_t(s.T), uint64_t(s.NH), static_cast<uint64_t>(c.input)};
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> normal;
    Problem<X> p{c, std::vector<X>(s.B * s.T * 3 * C), std::vector<X>(s.B * s.T * C)};
    for (size_t i = 0; i < p.qkv.size(); i++) {
        const size_t part = i / C % 3, t = i / C / 3 % s.T;
        const float early = part == 1 && t < 32 ? input.early : 1.f;
        p.qkv[i] = static_cast<X>((normal(rng) + input.shift) * input.factors[part] * early);
    }
    for (X& x : p.dout) x = static_cast<X>((normal(rng) + input.shift) * input.factors[3]);
    if (c.logit != 0.f) make_large_logits(p, rng);
    return p;
}

// The largest absolute value and the largest norm of a row in a tensor (…, HS).
struct Largest {
    double value = 0, norm = 0;
    Largest(const std::vector<double>& x, int HS) : value(max_abs(x)) {
        for (size_t row = 0; row < x.size(); row += HS)
            norm = std::max(norm, l2_norm({x.begin() + row, x.begin() + row + HS}));
    }
};

// Errors that another good kernel may make though a lucky naive one does not. The fp32 rounding error of a dot product
// a·b is about u|a||b|.
template <class X>
Errors tiny_errors(const Problem<X>& p) {
    const AttentionShape& s = p.c.shape;
    Result parts;
    split(parts, as_double(p.qkv), s);
    const Largest q(parts[Dq], s.HS), k(parts[Dk], s.HS), v(parts[Dv], s.HS), d_o(as_double(p.dout), s.HS);
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

// Each case is computed once, because the fp64 result is most of this program's time.
template <class X>
const Problem<X>& problem(Case c) {  // by value, because g++ 13 takes a reference for one into the argument
    static std::map<std::string, Problem<X>> cache;
    const auto found = cache.find(c.text());
    if (found != cache.end()) return found->second;

    Problem<X> p = inputs_of<X>(c);
    const AttentionShape& s = c.shape;
    const std::vector<double> qkv = as_double(p.qkv), dout = as_double(p.dout);
    std::vector<double> dqkv(qkv.size()), &out = p.ref[Out], &lse = p.ref[Lse];
    out.resize(dout.size());
    lse.resize(size_t(s.B) * s.NH * s.T);
    static const Cpu cpu;
    const double scale = s.resolved_scale();
    attention_forward<double>(cpu, out.data(), lse.data(), qkv.data(), s.B, s.T, s.NH, s.HS, s.causal, scale);
    attention_backward<double>(cpu, dqkv.data(), dout.data(), out.data(), lse.data(), qkv.data(), s.B, s.T, s.NH, s.HS,
                               s.causal, scale);
    split(p.ref, dqkv, s);
    p.tiny = tiny_errors(p);
    return cache.emplace(c.text(), std::move(p)).first->second;
}

// ---------------------------------------------------------------------------------------------------------------------
// Runs of the whole form

static AttentionShape times(AttentionShape s, int copies) {
    s.B *= copies;
    return s;
}

// Device copies of a problem's inputs, `copies` times over, and poisoned outputs. qkv lies `misalign` elements past its
// natural place.
template <class X>
struct Run {
    const AttentionKernel<X>& kernel;
    const AttentionShape s;
    const size_t copies, n, rows;  // elements of out and of lse in a copy
    Buffer<X> qkv_memory, dout{"dout", copies*n}, out{"out", copies*n}, dqkv{"dqkv", copies * 3 * n};
    Buffer<X> att{"att", kernel.saved_bytes(s) / sizeof(X)};
    Buffer<float> lse{"lse", copies* rows};
    Buffer<char> scratch{"scratch", kernel.scratch_bytes(s)};
    X* const qkv;

    Run(const AttentionKernel<X>& kernel, const Problem<X>& p, int copies = 1, int misalign = 0)
        : kernel(kernel),
          s(times(p.c.shape, copies)),
          copies(copies),
          n(p.dout.size()),
          rows(n / s.HS),
          qkv_memory("qkv", misalign + copies * 3 * n),
          qkv(qkv_memory + misalign) {
        upload(qkv, p.qkv);
        upload(dout, p.dout);
    }
    void upload(X* to, const std::vector<X>& one) {
        gpu().upload(to, one.data(), one.size() * sizeof(X));
        for (size_t done = 1; done < copies; done *= 2)
            CUDA_CHECK(cudaMemcpyAsync(to + done * one.size(), to,
                                       std::min(done, copies - done) * one.size() * sizeof(X), cudaMemcpyDeviceToDevice,
                                       gpu().stream));
    }
    void forward(const Cuda& dev = gpu()) {
        poison(dev, out, lse, att, scratch);
        kernel.forward(dev, out, lse, att, scratch, qkv, s);
    }
    void backward(const Cuda& dev = gpu()) {
        if (!kernel.backward) return;
        poison(dev, dqkv, scratch);
        kernel.backward(dev, dqkv, scratch, dout, out, lse, att, qkv, s);
    }
    Result result(size_t copy = 0) const {
        Result r;
        r[Out] = as_double(out.host(copy * n, n));
        r[Lse] = as_double(lse.host(copy * rows, rows));
        if (kernel.backward) split(r, as_double(dqkv.host(copy * 3 * n, 3 * n)), s);
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

// How many of the tensors out, lse, dq, dk, dv a kernel computes.
template <class X>
int tensors_of(const AttentionKernel<X>& kernel) {
    return kernel.backward ? kTensors : Dq;
}

// Naive's errors are computed only on demand, because compute-sanitizer finds races in cuBLAS, which naive multiplies
// with.
template <class X>
const NaiveErrors& naive_errors(const Problem<X>& p) {
    if (p.naive) return *p.naive;
    const Result got = run(attention_kernel<X>(gpu(), Attention::naive, p.c.shape.HS), p);
    p.naive.emplace();
    for (int i = 0; i < kTensors; i++) {
        p.naive->max[i] = max_error(got[i], p.ref[i]);
        p.naive->l2[i] = l2_error(got[i], p.ref[i]);
    }
    return *p.naive;
}

// ---------------------------------------------------------------------------------------------------------------------
// Bounds of errors

struct Bound {
    double max, l2;    // of the largest error, of the L2 error
    std::string rule;  // in words
};
static void check_error(const std::string& what, int tensor, const std::vector<double>& got,
                        const std::vector<double>& want, const Bound& bound) {
    const double max = max_error(got, want), l2 = l2_error(got, want);
    const std::string said =
        format("%s: %s: largest error %.3g, %.2f of %.3g; L2 error %.3g, %.2f of %.3g (%s)", what.c_str(),
               kNames[tensor], max, max / bound.max, bound.max, l2, l2 / bound.l2, bound.l2, bound.rule.c_str());
    if (!(max <= bound.max && l2 <= bound.l2)) test::report(__FILE__, __LINE__, said);
    if (std::getenv("ACCURACY")) std::printf("  %s\n", said.c_str());
}

// An error ε of S makes a relative error e^ε − 1 of P. S is a dot product of HS terms, in error by about √HS·u|S|, and
// naive rounds it to X. Only an S near its row's lse has weight.
template <class X>
double error_of_P(const Problem<X>& p) {
    const double of_S = (std::is_same_v<X, bf16> ? kRoundoff<X> : 0) + std::sqrt(p.c.shape.HS) * 0x1p-24;
    return std::expm1(of_S * max_abs(p.ref[Lse]));
}
constexpr double kLargeLse = 64;  // P's error counts from here on

// Naive's L2 error is relative to the tensor's norm. Its largest error, relative to the largest element, has P's error,
// a dot product of T terms, and one rounding to X each of P or dS, of dP and of the result. Naive may have twice that.
template <class X>
Bound naive_bound(const Problem<X>& p, int tensor) {
    const double of_P = error_of_P(p), size = static_cast<double>(p.ref[tensor].size());
    const double l2 = (std::is_same_v<X, bf16> ? 2e-2 : 1e-5) + (max_abs(p.ref[Lse]) > kLargeLse ? of_P : 0);
    const double max = of_P + std::sqrt(p.c.shape.T) * 0x1p-24 + 3 * kRoundoff<X>, tiny = p.tiny[tensor];
    return {2 * max * max_abs(p.ref[tensor]) + tiny, l2 * l2_norm(p.ref[tensor]) + tiny * std::sqrt(size),
            format("naive: 2·%.3g of the largest, %.3g of the norm, tiny %.3g", max, l2, tiny)};
}

template <class X>
Bound flash_bound(const AttentionKernel<X>& kernel, const Problem<X>& p, int tensor) {
    const double largest = max_abs(p.ref[tensor]);
    if (tensor == Lse && std::is_same_v<X, bf16>)
        return {bf16_lse_bound(largest), INFINITY, format("8·%.3g·max(1, |lse| %.3g)", kBf16LseError, largest)};
    const ErrorBound k = error_bound(kernel, tensor, p.c.shape);
    const double naive = naive_errors(p).max[tensor], naive_l2 = naive_errors(p).l2[tensor];
    const bool constant = p.c.input == Input::constant;
    // If all logits are equal, all P of a row are the same number. Its rounding does not average out, and naive's error
    // is luck, because 1/33 happens to be nearly exact.
    const double P = constant ? std::max(k.roundoff, 0x1p-23) : 0;
    const double one = std::max(P, roundoff<X>(k, tensor, naive, largest)), tiny = p.tiny[tensor] + one * largest;
    // If naive is exact its L2 error is luck. It is exact for T ≤ 2. If S is exact, only D's rounding is left in dq and
    // dk.
    const bool luck = p.c.shape.T <= 2 || (constant && (tensor == Dq || tensor == Dk));
    return {k.max * naive + tiny, luck ? INFINITY : k.l2 * naive_l2 + one * l2_norm(p.ref[tensor]),
            format("%g·naive's %.3g + tiny %.3g, %g·naive's %.3g + one rounding %.3g", k.max, naive, tiny, k.l2,
                   naive_l2, one)};
}

template <class X>
void check_result(const AttentionKernel<X>& kernel, const Problem<X>& p, const Result& got) {
    for (int i = 0; i < tensors_of(kernel); i++)
        check_error(format("%s %s", kernel.name, p.c.text().c_str()), i, got[i], p.ref[i],
                    kernel.flash ? flash_bound(kernel, p, i) : naive_bound(p, i));
}

// ---------------------------------------------------------------------------------------------------------------------
// The partial form

struct Chunk {
    int begin, size;  // rows of queries or of keys
};

// The state of partial calls on a problem, whose qkv and dout are on the device. Its tensors hold q_rows queries and
// k_rows keys of each sequence. dq_sum's row dq_begin is that of the first query.
template <class X>
struct Partial {
    const PartialForm<X>& form;
    const AttentionShape s;
    const X *const qkv, *const dout;
    const int q_rows, k_rows, dq_begin = 0;
    const long long q_position = 0, k_position = 0;  // of the first query and the first key
    const Chunk queries = {0, q_rows - dq_begin}, keys = {0, k_rows};
    const size_t C = size_t(s.NH) * s.HS, rows = size_t(s.B) * s.NH * q_rows, n_keys = s.B * k_rows * C;
    Buffer<float> o{"o_acc", rows*s.HS}, lse{"lse", rows}, D{"D", rows}, dk{"dk", n_keys}, dv{"dv", n_keys};
    Buffer<float> dq_sum{"dq_sum", form.dq_sum_bytes(shape(queries, keys)) / sizeof(float)};
    Buffer<double> running{"running lse", rows};
    Buffer<X> dq{"dq", rows* s.HS};
    Buffer<char> scratch{"scratch", form.scratch_bytes(shape(queries, keys))};

    PartialShape shape(Chunk q, Chunk k) const {
        PartialShape shape{s.B, q.size, k.size, s.NH, s.HS, q_position + q.begin, k_position + k.begin};
        shape.causal = s.causal, shape.scale = s.scale;
        shape.q_rows = q_rows, shape.k_rows = k_rows, shape.q_begin = dq_begin + q.begin;
        return shape;
    }
    Heads<const X> heads(int part, Chunk c) const { return {qkv + c.begin * 3 * C + part * C, s.T * 3 * C, 3 * C}; }
    // o is left alone if every query will see a key.
    void clear(const Cuda& dev, bool clear_o) {
        attention_clear_state(dev, clear_o ? static_cast<float*>(o) : nullptr, running, shape(queries, keys));
        dev.zero(dq_sum, dq_sum.bytes());
    }
    void forward(const Cuda& dev, Chunk q, Chunk k) {
        form.forward(dev, o + q.begin * C, running + q.begin, heads(0, q), heads(1, k), heads(2, k), shape(q, k));
    }
    void round_lse(const Cuda& dev) { copy_rows<float, double>(dev, lse, rows, running, rows, rows, 1); }
    void backward(const Cuda& dev, Chunk q, Chunk k, bool write_dkv, Buffer<char>& scratch) {
        PartialShape both = shape(q, k);
        both.write_dkv = write_dkv;
        form.backward(dev, dq_sum, dk + k.begin * C, dv + k.begin * C, scratch, heads(0, q), heads(1, k), heads(2, k),
                      {dout + q.begin * C, s.T * C, C}, lse + q.begin, D + q.begin, both);
    }
    void write_dq(const Cuda& dev) { form.write_dq(dev, {dq, q_rows * C, C}, dq_sum, shape(queries, keys)); }

    // All queries against all keys, with D = 0. Even the poison is on the device's stream.
    void one_block(const Cuda& dev, bool write_dkv) {
        poison(dev, o, running, lse, dq, dk, dv, scratch);
        clear(dev, true);
        for (int twice = 0; twice < 2; twice++) forward(dev, queries, keys);  // the second may merge empty with empty
        round_lse(dev);
        dev.zero(D, D.bytes());
        if (!write_dkv)
            for (Buffer<float>* x : {&dk, &dv}) dev.zero(*x, x->bytes());
        backward(dev, queries, keys, write_dkv, scratch);
        write_dq(dev);
    }
    Bytes bytes() const { return bytes_of(o, lse, dq_sum, dk, dv, dq); }
};

// Computes D with attention_D, and checks it on the host against fp64 with the bound of a dot product's rounding error.
template <class X>
void check_D(const Buffer<float>& D_buffer, const Buffer<X>& out, const Buffer<X>& dout, const AttentionShape& s) {
    attention_D<X>(gpu(), D_buffer, dout, out, s.B, s.T, s.NH, s.HS);
    const std::vector<float> D = D_buffer.host();
    const std::vector<double> o = as_double(out.host()), d_o = as_double(dout.host());
    for (size_t row = 0; row < D.size(); row++) {
        const size_t b = row / s.T / s.NH, h = row / s.T % s.NH, t = row % s.T;
        double sum = 0, magnitude = 0;
        for (int d = 0; d < s.HS; d++) {
            const size_t i = ((b * s.T + t) * s.NH + h) * s.HS + d;
            sum += o[i] * d_o[i];
            magnitude += std::fabs(o[i] * d_o[i]);
        }
        CHECK_NEAR(D[row], sum, s.HS * 0x1p-24 * magnitude);
    }
}

// How a problem is cut into chunks. dk and dv are added into accumulators that start as `prefill`·N(0,1). If prefill is
// 0 the first block of a chunk writes them instead. All tensors are `more` rows longer than the problem, and a third of
// these come first in dq's sum.
struct Cut {
    std::vector<int> q_sizes, k_sizes;
    float prefill = 0.f;
    int more = 0;
    long long first_position = 0;
};
static std::vector<Chunk> chunks(const std::vector<int>& sizes) {
    std::vector<Chunk> all;
    for (int size : sizes) all.push_back({all.empty() ? 0 : all.back().begin + all.back().size, size});
    return all;
}

// Runs a problem chunk by chunk, in shuffled order as a ring would.
template <class X>
void check_blocks(const AttentionKernel<X>& kernel, const Case& c, const Cut& cut) {
    const Problem<X>& p = problem<X>(c);
    const AttentionShape& s = c.shape;
    const Result whole = run(kernel, p);
    const std::vector<Chunk> q_chunks = chunks(cut.q_sizes), k_chunks = chunks(cut.k_sizes);
    const size_t C = size_t(s.NH) * s.HS, heads = size_t(s.B) * s.NH;
    const int rows = s.T + cut.more, dq_begin = cut.more / 3;
    const Buffer<X> qkv("qkv", p.qkv), dout("dout", p.dout), out("out", p.dout.size());
    Partial<X> partial{*kernel.partial, s, qkv, dout, rows, rows, dq_begin, cut.first_position, cut.first_position};
    std::mt19937_64 rng(base_seed());
    std::normal_distribution<float> normal;
    Result got, want = p.ref;
    // From (count, rows, width) the problem's T rows, which begin at row `first`.
    const auto part_of = [&](const auto& x, size_t count, size_t width, int first = 0) {
        std::vector<double> part;
        for (size_t i = 0; i < count; i++)
            for (size_t j = first * width; j < (first + s.T) * width; j++)
                part.push_back(static_cast<float>(x[i * rows * width + j]));
        return part;
    };

    // Forward, with the one rounding at the end.
    partial.clear(gpu(), false);
    for (Chunk q : q_chunks) {
        std::vector<Chunk> order = k_chunks;
        std::shuffle(order.begin(), order.end(), rng);
        for (Chunk k : order) partial.forward(gpu(), q, k);
    }
    partial.round_lse(gpu());
    got[Out] = part_of(partial.o.host(), s.B, C);
    got[Lse] = part_of(partial.lse.host(), heads, 1);
    const Buffer<float> unrounded("o_fp32", std::vector<float>(got[Out].begin(), got[Out].end()));
    const size_t n = got[Out].size();
    copy_rows<X, float>(gpu(), out, n, unrounded, n, n, 1);
    const std::vector<X> rounded = out.host();
    for (size_t i = 0; i < rounded.size(); i++) CHECK(float(rounded[i]) == float(X(float(got[Out][i]))));

    // Backward, with pairs of chunks in shuffled order, each with the global lse and D of its queries.
    const Buffer<float> D("D", heads * s.T);
    check_D(D, out, dout, s);
    copy_rows<float, float>(gpu(), partial.D, rows, D, s.T, s.T, heads);
    for (int tensor = Dk; tensor <= Dv && cut.prefill != 0.f; tensor++) {
        std::vector<float> start(partial.n_keys);
        for (float& x : start) x = cut.prefill * normal(rng);
        (tensor == Dk ? partial.dk : partial.dv).upload(start);
        const std::vector<double> of_problem = part_of(start, s.B, C);
        for (size_t i = 0; i < of_problem.size(); i++) want[tensor][i] += of_problem[i];
    }
    std::vector<std::pair<Chunk, Chunk>> pairs;
    for (Chunk q : q_chunks)
        for (Chunk k : k_chunks) pairs.push_back({q, k});
    std::shuffle(pairs.begin(), pairs.end(), rng);
    std::set<int> written;  // the first rows of chunks of keys
    for (const auto& [q, k] : pairs) {
        const bool write_dkv = cut.prefill == 0.f && written.insert(k.begin).second;
        Buffer<char> exact("scratch", partial.form.scratch_bytes(partial.shape(q, k)));
        partial.backward(gpu(), q, k, write_dkv, exact);
    }
    partial.write_dq(gpu());
    const std::vector<X> dq = partial.dq.host();
    for (size_t i = 0; i < dq.size(); i++) {
        const int row = static_cast<int>(i / C % rows);
        if (row < dq_begin || row >= dq_begin + s.T) CHECK(static_cast<float>(dq[i]) == 0.f);
    }
    got[Dq] = part_of(dq, s.B, C, dq_begin);
    got[Dk] = part_of(partial.dk.host(), s.B, C);
    got[Dv] = part_of(partial.dv.host(), s.B, C);

    // Blocks are as good as the kernel's whole form, plus one fp32 rounding for each merge. Chunks change the order of
    // sums, so the largest error may differ by chance (see dev/bounds.h), but the L2 error may not.
    const double merges = static_cast<double>(std::max(q_chunks.size(), k_chunks.size())) * 0x1p-24;
    // A partial call gets lse in fp32, and its rounding is a relative error of P. It counts if lse is large, and twice
    // in the largest error, because what is added up is larger than the sum and lse's error is in each part.
    const double largest_lse = max_abs(p.ref[Lse]);
    const bool large = largest_lse > kLargeLse;
    // Large logits leave a few keys with all the weight, so that in bf16 few roundings decide this error, too.
    const double k_l2 = std::is_same_v<X, bf16> && large ? 1.25 : 1.1;
    for (int i = 0; i < kTensors; i++) {
        const double of_lse = i >= Dq && large ? 0x1p-24 * largest_lse : 0, relative = merges + of_lse;
        const double max = max_error(whole[i], p.ref[i]), l2 = l2_error(whole[i], p.ref[i]);
        const bool luck = c.input == Input::constant && (i == Dq || i == Dk);  // as in flash_bound
        check_error(format("%s %s in %zu x %zu chunks, prefill %g", kernel.name, c.text().c_str(), q_chunks.size(),
                           k_chunks.size(), cut.prefill),
                    i, got[i], want[i],
                    {2 * max + std::max(p.tiny[i], (relative + of_lse) * max_abs(want[i])),
                     luck ? INFINITY : k_l2 * l2 + relative * l2_norm(want[i]),
                     format("the whole form's: 2·%.3g, %g·%.3g", max, k_l2, l2)});
    }
}

// Queries before any of their keys. Their rows stay as attention_clear_state made them, and have zero gradients.
template <class X>
void check_masked_block(const AttentionKernel<X>& kernel, int HS, int Tq, int Tk, int k_position,
                        Input input = Input::normal, float logit = 0.f) {
    const Problem<X> p = inputs_of<X>({{2, std::max(Tq, Tk), 3, HS, true}, input, logit});
    const Buffer<X> qkv("qkv", p.qkv), dout("dout", p.dout);
    Partial<X> partial{*kernel.partial, p.c.shape, qkv, dout, Tq, Tk, 0, 0, k_position};
    partial.one_block(gpu(), false);
    // x is (…, rows, width). Masked rows have the value, and the others are finite.
    const auto check = [&](int tensor, const auto& x, int rows, int width, auto masked, float value) {
        for (size_t i = 0; i < x.size(); i++) {
            const int row = static_cast<int>(i / width % rows);
            const float found = static_cast<float>(x[i]);
            if (masked(row) ? found != value : !std::isfinite(found))
                test::report(__FILE__, __LINE__,
                             format("%s %s, %d queries against %d keys from %d on: %s of token %d is %g", kernel.name,
                                    p.c.text().c_str(), Tq, Tk, k_position, kNames[tensor], row, found));
        }
    };
    const auto no_keys = [&](int query) { return query < k_position; };
    const auto no_queries = [&](int key) { return key + k_position >= Tq; };
    const int C = p.c.shape.NH * HS;
    check(Lse, partial.lse.host(), Tq, 1, no_keys, -INFINITY);
    check(Out, partial.o.host(), Tq, C, no_keys, 0.f);
    check(Dq, partial.dq.host(), Tq, C, no_keys, 0.f);
    check(Dk, partial.dk.host(), Tk, C, no_queries, 0.f);
    check(Dv, partial.dv.host(), Tk, C, no_queries, 0.f);
}

// ---------------------------------------------------------------------------------------------------------------------
// The properties that are tested of every kernel

// Walks through the product of shapes and inputs. The counters' periods are coprime, so every pair of values meets.
// Long sequences come with few heads, because the reference's time grows with B·NH·T²·HS.
static std::vector<Case> accuracy_cases(bool flash_in_bf16) {
    std::vector<Case> all = {{{3, 65, 25, 64}},
                             {{3, 129, 25, 64}, Input::shifted},
                             {{1, 200, 2, 64, true, 0.3f}},
                             {{1, 200, 2, 128, false, 0.02f}, Input::large_q}};
    const std::pair<int, int> few[] = {{1, 1}, {1, 2}, {2, 1}}, many[] = {{1, 1}, {3, 12}, {1, 25}, {3, 1}, {1, 12}};
    int n = 0;
    for (int T : {1, 2, 63, 64, 65, 127, 129, 255, 1000, 1023, 1024, 1025})
        for (int HS : {64, 128})
            for (bool causal : {true, false}) {
                const auto [B, NH] = T > 129 ? few[n / 4 % 3] : many[n % 5];
                all.push_back({{B, T, NH, HS, causal}, static_cast<Input>(n % 3)});
                n++;
            }
    for (int HS : {64, 128})
        for (bool causal : {true, false}) {
            all.push_back({{1, 128, 3, HS, causal}});  // exactly a tile or two of every kernel
            // flash_bf16_sm90 keeps its first maximum until a sum grows out of range. fp32's bounds, and naive's bound
            // for itself, are not made for the rounding of logits of several hundred.
            if (flash_in_bf16) all.push_back({{2, 450, 3, HS, causal}, Input::early_keys});
        }
    for (int HS : {64, 128}) {
        for (Input input : {Input::magnitudes, Input::magnitudes_reversed}) all.push_back({{1, 200, 2, HS}, input});
        // flash_bf16_sm90's backward has fewer heads than this in work at a time, so later ones take over the place of
        // earlier ones. fp64's plain loops take seconds for them.
        if (flash_in_bf16) all.push_back({{HS == 64 ? 40 : 20, 129, 25, HS}});
    }
    return all;
}

template <class X>
void accuracy(const AttentionKernel<X>& kernel) {
    if (!kernel.backward) std::printf("  %s has no backward: out and lse only\n", kernel.name);
    for (const Case& c : accuracy_cases(std::is_same_v<X, bf16> && kernel.flash))
        check_result(kernel, problem<X>(c), run(kernel, problem<X>(c)));
}

// Large logits, at lengths that leave tiles ragged.
template <class X>
void logits(const AttentionKernel<X>& kernel) {
    const std::pair<Input, float> inputs[] = {{Input::constant, -128.f}, {Input::constant, 128.f},
                                              {Input::constant, -200.f}, {Input::constant, 200.f},
                                              {Input::mixed, 200.f},     {Input::ramp, 200.f}};
    for (int HS : {64, 128})
        for (const auto& [input, logit] : inputs) {
            for (int T : {33, 65, 100, 127, 129, 1001})
                for (bool causal : {true, false}) {
                    const int several = T < 1000 ? 2 : 1;
                    const Case c{{several, T, several, HS, causal, 8.f / static_cast<float>(HS)}, input, logit};
                    const Problem<X>& p = problem<X>(c);
                    check_result(kernel, p, run(kernel, p));
                    if (kernel.partial)
                        check_blocks(kernel, c, {{T / 3, T - T / 3}, {T / 2, T - T / 2}, 0.f, T % 2 ? 0 : 9});
                }
            if (kernel.partial) check_masked_block(kernel, HS, 130, 200, 33, input, logit);
        }
}

template <class X>
void extremes(const AttentionKernel<X>& kernel) {
    for (int HS : {64, 128}) {
        Problem<X> p = inputs_of<X>({{2, 130, 3, HS, true}});
        for (std::vector<X>* x : {&p.qkv, &p.dout}) std::fill(x->begin(), x->end(), static_cast<X>(0.f));
        const Result zeros = run(kernel, p);
        for (int i = 0; i < tensors_of(kernel); i++)
            if (i != Lse) CHECK(max_error(zeros[i], std::vector<double>(zeros[i].size())) == 0);
        for (size_t i = 0; i < zeros[Lse].size(); i++) CHECK_NEAR(zeros[Lse][i], std::log(1. + i % 130), 1e-6);
    }
}

// One NaN stands in a row of q, k, v or dout of one head of one sequence. Every element that depends on it is NaN.
// Elements of other heads and sequences, and of rows farther away than any tile is long, have the bits that they have
// without the NaN. In between a tile may carry it, because on tensor cores a masked P of 0 times NaN is NaN. naive's
// products are over whole heads, so its tile is the head.
template <class X>
void one_nan(const AttentionKernel<X>& kernel) {
    constexpr int T = 1000, NH = 3, at = 500, b = 1, h = 1, element = 5;
    const int near = kernel.flash ? 256 : T;
    enum Reach { none, row, later, earlier, all };  // which rows depend on row `at`, in causal attention
    const struct {
        const char* of;
        Reach reach[kTensors];  // out, lse, dq, dk, dv
    } inputs[] = {{"q", {row, row, row, earlier, earlier}},
                  {"k", {later, later, later, all, all}},  // the last of the rows of P that are NaN sees every key
                  {"v", {later, none, later, all, none}},
                  {"dout", {none, none, row, earlier, earlier}}};
    for (int HS : {64, 128})
        for (bool causal : {true, false}) {
            const Problem<X> p = inputs_of<X>({{2, T, NH, HS, causal}});
            const Result clean = run(kernel, p);
            for (int which = 0; which < 4; which++) {
                Problem<X> with_nan = p;
                const size_t token = b * T + at;
                X& x = which < 3 ? with_nan.qkv[((token * 3 + which) * NH + h) * HS + element]
                                 : with_nan.dout[(token * NH + h) * HS + element];
                x = static_cast<X>(std::numeric_limits<float>::quiet_NaN());
                const Result got = run(kernel, with_nan);
                for (int i = 0; i < tensors_of(kernel); i++) {
                    const Reach reach = inputs[which].reach[i];
                    const bool any = reach == all || (!causal && reach != row);
                    const int from = any || reach == earlier ? 0 : at, to = any || reach == later ? T - 1 : at;
                    const auto wrong = [&](size_t e) {
                        const int width = i == Lse ? 1 : HS;  // lse is (B, NH, T), the others are (B, T, NH, HS)
                        const int r = e / width, t = i == Lse ? r % T : r / NH % T;
                        const int head = i == Lse ? r / T % NH : r % NH, sequence = r / NH / T;
                        const bool reached = head == h && sequence == b && reach != none;
                        if (reached && t >= from && t <= to && (i == Lse || static_cast<int>(e % HS) == element))
                            return !std::isnan(got[i][e]);
                        const bool may = reached && t > from - near && t < to + near;
                        return !may && got[i][e] != clean[i][e];
                    };
                    size_t count = 0, first = 0;
                    for (size_t e = got[i].size(); e-- > 0;)
                        if (wrong(e)) first = e, count++;
                    if (count)
                        test::report(__FILE__, __LINE__,
                                     format("%s %s, NaN in %s of token %d, head %d, sequence %d: %zu elements of %s "
                                            "should be NaN, or as without it; the first is %zu: %g, without the NaN %g",
                                            kernel.name, p.c.text().c_str(), inputs[which].of, at, h, b, count,
                                            kNames[i], first, got[i][first], clean[i][first]));
                }
            }
        }
}

// The inputs arrive late on a stream with which no other is ordered, not even the default one. Scratch and outputs are
// poisoned on it too. So work on any other stream sees NaN, or the stream overwrites it.
template <class X>
Bytes all_forms_on(const Cuda& dev, const AttentionKernel<X>& kernel, const Problem<X>& p, unsigned pause) {
    Run<X> r(kernel, p);
    const AttentionShape& s = r.s;
    const Buffer<X> late_qkv("late qkv", p.qkv), late_dout("late dout", p.dout);
    Buffer<X> rounded("rounded", r.n);
    Buffer<float> D("D", r.rows);
    std::unique_ptr<Partial<X>> block;
    if (kernel.partial) block.reset(new Partial<X>{*kernel.partial, s, r.qkv, r.dout, s.T, s.T});
    poison(gpu(), r.qkv_memory, r.dout);
    gpu().sync();

    if (pause) dev.pause(pause);
    r.qkv_memory.copy(dev, late_qkv);
    r.dout.copy(dev, late_dout);
    r.forward(dev);
    r.backward(dev);
    poison(dev, D, rounded);
    attention_D<X>(dev, D, r.dout, r.out, s.B, s.T, s.NH, s.HS);
    if (block) {
        block->one_block(dev, true);
        copy_rows<X, float>(dev, rounded, r.n, block->o, r.n, r.n, 1);
    }
    dev.sync();
    Bytes bytes = bytes_of(r.out, r.lse, r.dqkv, D, rounded);
    if (block)
        for (auto& tensor : block->bytes()) bytes.push_back({"the partial form's " + tensor.first, tensor.second});
    return bytes;
}
template <class X>
void stream(const AttentionKernel<X>& kernel) {
    OwnStream other;
    other.tf32 = false;
    for (int HS : {64, 128}) {
        const Problem<X> p = inputs_of<X>({{2, 300, 3, HS, true}});
        check_same(format("%s %s on a stream of its own, with late inputs", kernel.name, p.c.text().c_str()),
                   all_forms_on(other, kernel, p, 100000000), all_forms_on(gpu(), kernel, p, 0));
    }
}

// flash_fp32's tiles for 64 KB of shared memory, which is what Turing gives a block, and the Error if there is less.
template <class X>
void small_tiles(const AttentionKernel<X>& kernel) {
    if (std::string(kernel.name) != "flash_fp32") SKIP("%s has one size of tiles", kernel.name);
    const struct Restore {
        int bytes = gpu().block_smem;
        ~Restore() { gpu().block_smem = bytes; }
    } restore;
    for (int HS : {64, 128}) {
        for (int T : {1, 33, 129, 300})
            for (bool causal : {true, false}) {
                const Problem<X>& p = problem<X>({{2, T, 3, HS, causal}});
                gpu().block_smem = restore.bytes;
                const Result large = run(kernel, p);
                gpu().block_smem = 64 << 10;
                const Result small = run(kernel, p);
                check_result(kernel, p, small);
                if (T == 300 && restore.bytes >= 112 << 10) CHECK(small[Dk] != large[Dk]);  // another order of sums
            }
        const Case c{{2, 300, 3, HS, true}};
        check_blocks(kernel, c, {{128, 37, 64, 71}, {100, 200}, 0.f, 9});
        check_blocks(kernel, {{1, 129, 1, HS, true, 8.f / static_cast<float>(HS)}, Input::constant, -128.f},
                     {{29, 100}, {65, 64}, 1.f});
        check_masked_block(kernel, HS, 130, 200, 1);
        gpu().block_smem = 48 << 10;
        CHECK_ERROR(run(kernel, problem<X>(c)), "shared memory");
    }
}

template <class X>
void determinism(const AttentionKernel<X>& kernel) {
    const std::pair<AttentionShape, int> runs[] = {
        {{2, 1000, 12, 64, true}, 20}, {{1, 1000, 5, 128, false}, 20}, {{3, 130, 5, 64, true}, 1000}};
    for (const auto& [shape, count] : runs) {
        const Problem<X> p = inputs_of<X>({shape});
        Run<X> r(kernel, p);
        Bytes first;
        for (int i = 0; i < count; i++) {
            r.forward();
            r.backward();
            const Bytes bytes = bytes_of(r.out, r.lse, r.dqkv);
            if (i == 0) first = bytes;
            if (!check_same(format("%s %s, run %d", kernel.name, p.c.text().c_str(), i + 1), bytes, first)) return;
        }
    }
}

template <class X>
void block(const AttentionKernel<X>& kernel) {
    const std::vector<int> uneven_q = {128, 37, 64, 71}, uneven_k = {37, 64, 71, 128};
    const Cut cuts[] = {{{300}, {300}},
                        {uneven_q, uneven_k},
                        {{100, 100, 100}, {60, 60, 60, 60, 60}},
                        {uneven_q, uneven_k, 0.f, 9},
                        {{100, 200}, uneven_q, 2.f, 100},
                        {uneven_k, {299, 1}, 1.f, 0, 1LL << 33},
                        {{1, 2, 297}, uneven_q, 3.f, 0, 7}};
    for (int HS : {64, 128}) {
        for (bool causal : {true, false})
            for (const Cut& cut : cuts) check_blocks(kernel, {{2, 300, 3, HS, causal}}, cut);
        check_blocks(kernel, {{2, 300, 3, HS, true, 0.3f}}, {uneven_q, uneven_k});
        check_blocks(kernel, {{2, 300, 3, HS, false, 0.02f}, Input::large_q}, {uneven_k, {100, 200}, 1.f, 9});
        check_masked_block(kernel, HS, 64, 96, 64);    // all rows, just
        check_masked_block(kernel, HS, 64, 96, 1000);  // all rows, by far
        check_masked_block(kernel, HS, 200, 130, 150);
        check_masked_block(kernel, HS, 130, 200, 1);
    }
    check_blocks(kernel, {{1, 256, 12, 64, true}, Input::large_q}, {{64, 64, 64, 64}, {128, 128}});
    check_blocks(kernel, {{1, 256, 12, 64, true}, Input::shifted}, {{128, 128}, {64, 64, 64, 64}});
}

// Without a mask, and with 160 key tiles of 128 keys in all: some of 132 multiprocessors get two, and more would queue
// for a turn. It runs many times, because who gets which must not matter.
template <class X>
void large_block(const AttentionKernel<X>& kernel) {
    for (int HS : {64, 128}) {
        const Case c{{2, 1010, 10, HS, false}};
        check_blocks(kernel, c, {{1010}, {1010}, 0.f, 9});
        const Problem<X>& p = problem<X>(c);
        const Buffer<X> qkv("qkv", p.qkv), dout("dout", p.dout);
        Partial<X> block{*kernel.partial, c.shape, qkv, dout, 1010, 1010};
        Bytes first;
        for (int i = 0; i < 20; i++) {
            block.one_block(gpu(), true);
            const Bytes bytes = block.bytes();
            if (i == 0) first = bytes;
            check_same(format("%s %s in one block, run %d", kernel.name, c.text().c_str(), i + 1), bytes, first);
        }
    }
}

// Small enough for compute-sanitizer, because racecheck of `block` with flash_fp16x3 takes longer than four minutes.
// But it has so many heads that the persistent blocks of sm_90a wrap around their stages.
template <class X>
void few_blocks(const AttentionKernel<X>& kernel) {
    for (int HS : {64, 128}) {
        const Case c{{1, 200, kernel.min_sm == 90 ? 150 : 2, HS, true}};
        check_blocks(kernel, c, {{130, 70}, {71, 129}});
        check_blocks(kernel, c, {{200}, {71, 129}, 2.f, 9, 7});
        check_masked_block(kernel, HS, 130, 200, 1);
    }
}

// What a kernel does not support gives an Error. What gives none must be right.
template <class X>
void limits(const AttentionKernel<X>& kernel) {
    const struct {
        AttentionShape shape;
        int misalign = 0;  // elements
    } cases[] = {{{2, 100, 3, 80}},     {{1, 70, 2, 32}},    {{2, 100, 3, 64}, 1},
                 {{2, 100, 3, 128}, 1}, {{65537, 1, 1, 64}},  // more than a grid's y or z
                 {{2731, 2, 25, 64}}};
    for (const auto& [shape, misalign] : cases) {
        const Problem<X>& p = problem<X>({shape});
        Result got;
        const std::string error = test::error_of([&, misalign = misalign] {
            Run<X> r(kernel, p, 1, misalign);
            r.forward();
            r.backward();
            got = r.result();
        });
        if (error.empty()) check_result(kernel, p, got);
        gpu().sync();  // an Error from a launcher leaves the device fit for work
    }
    if (kernel.flash)
        CHECK_ERROR(kernel.forward(gpu(), nullptr, nullptr, nullptr, nullptr, nullptr, {1, 64, 1, 80}), "80");
    if (!kernel.partial) return;
    const struct {
        int q_rows, q_begin, k_rows;
        const char* why;
    } outside[] = {{100, 37, 0, "of 100"}, {100, -1, 0, "-1"}, {63, 0, 0, "of 63"}, {0, 0, 64, "of 64"}};
    for (const auto& o : outside) {
        PartialShape shape{1, 64, 65, 1, 64};
        shape.q_rows = o.q_rows, shape.q_begin = o.q_begin, shape.k_rows = o.k_rows;
        CHECK_ERROR(kernel.partial->forward(gpu(), nullptr, nullptr, {}, {}, {}, shape), o.why);
        CHECK_ERROR(kernel.partial->backward(gpu(), nullptr, nullptr, nullptr, nullptr, {}, {}, {}, {}, nullptr,
                                             nullptr, shape),
                    o.why);
    }
}

// Runs one sequence `copies` times over, and looks at some of the copies.
template <class X>
void check_many(const AttentionKernel<X>& kernel, const Case& c, int copies) {
    const Problem<X>& p = problem<X>(c);
    const AttentionShape s = times(c.shape, copies);
    const size_t bytes = 8 * copies * p.dout.size() * sizeof(X) + kernel.saved_bytes(s) + kernel.scratch_bytes(s);
    if (bytes > gpu().total_bytes / 10 * 8)
        SKIP("needs %.0f GiB of device memory", static_cast<double>(bytes) / (1 << 30));
    Run<X> r(kernel, p, copies);
    r.forward();
    r.backward();
    for (int copy : {0, 1, copies / 3, copies / 2, copies - 2, copies - 1}) check_result(kernel, p, r.result(copy));
}
constexpr size_t kBig = size_t{1} << 31;
template <class X>
void big(const AttentionKernel<X>& kernel) {
    check_many(kernel, {{1, 65, 25, 64}}, kBig / (3 * 65 * 25 * 64) + 2);
}
template <class X>
void big_out(const AttentionKernel<X>& kernel) {
    check_many(kernel, {{1, 65, 25, 64}}, kBig / (65 * 25 * 64) + 2);
}
template <class X>
void groups(const AttentionKernel<X>& kernel) {
    check_many(kernel, {{1, 1040, 25, 128}}, 5);
}

// ---------------------------------------------------------------------------------------------------------------------
// The layer that the trainer calls, and which kernel it takes

template <class X, bool Flash>
void check_layer() {
    const Attention kind = Flash ? Attention::flash : Attention::naive;
    const Cuda& dev = gpu();
    const AttentionKernel<X>& kernel = attention_kernel<X>(dev, kind, 64);
    CHECK(kernel.flash == Flash);
    CHECK(dev.sm >= kernel.min_sm);
    const Problem<X>& p = problem<X>({{2, 100, 3, 64, true}});
    const AttentionShape& s = p.c.shape;
    Run<X> r(kernel, p);
    CHECK(attention_saved_bytes<X>(dev, kind, s.B, s.T, s.NH, s.HS) == kernel.saved_bytes(s));
    CHECK(attention_scratch_bytes<X>(dev, kind, s.B, s.T, s.NH, s.HS) == kernel.scratch_bytes(s));
    if (Flash) CHECK(kernel.saved_bytes(s) == 0);
    attention_forward<X>(dev, kind, r.out, r.lse, r.att, r.scratch, r.qkv, s.B, s.T, s.NH, s.HS);
    poison(dev, r.scratch);
    attention_backward<X>(dev, kind, r.dqkv, r.scratch, r.dout, r.out, r.lse, r.att, r.qkv, s.B, s.T, s.NH, s.HS);
    check_result(kernel, p, r.result());
}

// Attention in chunks (attention/ring/chunks.h) with the layer's kernel is as good as the unchunked call, plus one fp32
// rounding for each merge. That holds for chunk sizes that divide T and for those that do not.
template <class X>
void check_chunks() {
    const std::pair<int, int> sizes[] = {{500, 500}, {125, 250}, {128, 128}, {1000, 37}, {77, 1000}};
    for (int HS : {64, 128})
        for (bool causal : {true, false}) {
            const AttentionKernel<X>& kernel = attention_kernel<X>(gpu(), Attention::flash, HS);
            const Problem<X>& p = problem<X>({{2, 1000, 3, HS, causal}});
            const AttentionShape& s = p.c.shape;
            const Result whole = run(kernel, p);
            for (const auto& [q_chunk, k_chunk] : sizes) {
                Run<X> r(kernel, p);
                Chunks<Cuda, X> chunks(gpu(), {s.B, s.T, s.T, s.NH, HS, 0, 0, causal}, q_chunk, k_chunk);
                Buffer<char> memory("memory of chunks", chunks.bytes());
                chunks.place(memory);
                chunks.forward(r.out, r.lse, r.qkv);
                poison(gpu(), memory);
                chunks.backward(r.dqkv, r.dout, r.out, r.lse, r.qkv);
                const Result got = r.result();
                const double merges = (s.T - 1) / std::min(q_chunk, k_chunk) * 0x1p-24;
                for (int i = 0; i < kTensors; i++)
                    check_error(format("%s in chunks of %d x %d", p.c.text().c_str(), q_chunk, k_chunk), i, got[i],
                                p.ref[i],
                                {1.1 * max_error(whole[i], p.ref[i]) + p.tiny[i] + merges * max_abs(p.ref[i]),
                                 1.1 * l2_error(whole[i], p.ref[i]) + merges * l2_norm(p.ref[i]), "1.1·unchunked"});
            }
        }
}
static const test::Register layer_tests[] = {
    {"chunks_fp32", check_chunks<float>},
    {"chunks_bf16", check_chunks<bf16>},
    {"layer_naive_fp32", check_layer<float, false>},
    {"layer_naive_bf16", check_layer<bf16, false>},
    {"layer_flash_fp32", check_layer<float, true>},
    {"layer_flash_bf16", check_layer<bf16, true>},
};

// The last row of a sequence, which serves all kernels and is fp32 as naive in fp32 is. What lies around qkv is NaN.
template <class X>
void last_row() {
    const std::pair<Input, float> inputs[] = {
        {Input::normal, 0.f}, {Input::large_q, 0.f}, {Input::mixed, 200.f}, {Input::ramp, 200.f}};
    for (int T : {1, 2, 63, 64, 65, 1000, 1023, 1024, 1025, 2500})
        for (const auto& [NH, HS] : {std::pair{12, 64}, {1, 128}, {3, 80}, {25, 8}})
            for (const auto& [input, logit] : inputs) {
                const Problem<X> p = inputs_of<X>({{1, T, NH, HS}, input, logit});
                const size_t C = NH * HS;
                std::vector<double> want(C);
                attention_last_row<double>(Cpu(), want.data(), as_double(p.qkv).data(), T, NH, HS);
                const Problem<float> fp32 = {p.c, {p.qkv.begin(), p.qkv.end()}, {p.dout.begin(), p.dout.end()}};
                Run<float> naive(attention_kernel<float>(gpu(), Attention::naive, HS), fp32);
                naive.forward();
                // The largest error of one row is luck where a few keys have all the weight. So the error of an element
                // of P, which is that of its S, is carried through.
                const double error = max_error(as_double(naive.out.host((T - 1) * C, C)), want),
                             of_P = 4 * kRoundoff<float> * logit * max_abs(as_double(p.qkv)),
                             bound = 2 * error + 4 * one_rounding<float>(Out, max_abs(want)) + of_P;
                const Buffer<X> qkv("qkv", p.qkv);
                Buffer<float> out("out", C), again("out again", C);
                attention_last_row<X>(gpu(), out, qkv, T, NH, HS);
                attention_last_row<X>(gpu(), again, qkv, T, NH, HS);
                const std::vector<double> got = as_double(out.host());
                CHECK(got == as_double(again.host()));
                check_error("last row of " + p.c.text(), Out, got, want, {bound, INFINITY, "2·naive"});
            }
    CHECK_ERROR(attention_last_row<X>(gpu(), nullptr, nullptr, 1, 1, 18), "head size 18");
}
static const test::Register last_row_tests[] = {{"last_row_fp32", last_row<float>}, {"last_row_bf16", last_row<bf16>}};

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
        CHECK_ERROR(attention_kernel<X>(dev, Attention::flash, 80), "80");
    };
    check(float{});
    check(bf16{});
    CHECK_ERROR(attention_kernel<float>(dev, Attention{"flash_bf16"}, 64), "--precision bf16");
    CHECK_ERROR(attention_kernel<bf16>(dev, Attention{"flash_simple"}, 64), "--precision fp32");
    CHECK_ERROR(attention_kernel<bf16>(dev, Attention{"magic"}, 64), "no such kernel");
}

// ---------------------------------------------------------------------------------------------------------------------
// One test per kernel and property

template <class X>
struct Property {
    const char* name;
    void (*check)(const AttentionKernel<X>&);
    bool of_partial_form = false;
};
template <class X>
constexpr Property<X> kProperties[] = {
    {"accuracy", accuracy<X>},        // out, lse, dq, dk, dv on the inputs and shapes that find bugs
    {"logits", logits<X>},            // of up to ±200, of one size, mixed and rising, whole, in chunks, and masked
    {"extremes", extremes<X>},        // zeros
    {"nan", one_nan<X>},              // one NaN reaches what depends on it, and no other head or distant row
    {"stream", stream<X>},            // all work is on the device's stream
    {"small tiles", small_tiles<X>},  // flash_fp32's, for GPUs with less shared memory
    {"determinism", determinism<X>},  // the same bytes from every run
    {"block", block<X>, true},        // chunks in any order equal the whole, masked blocks add nothing
    {"large block", large_block<X>, true},  // one with more work than multiprocessors, in 20 runs
    {"few blocks", few_blocks<X>, true},    // a little of that, for compute-sanitizer
    {"limits", limits<X>},                  // what is not supported gives an Error, never a wrong result
    {"big", big<X>},                        // more than 2³¹ elements of qkv and dqkv
    {"big out", big_out<X>},                // also of out, dout and dq, if the GPU has the memory
    // The heads are so many and so long that flash_bf16_sm90 takes them in groups and uses a place in dQ's sum twice.
    {"groups", groups<X>}};
constexpr int kCount = std::size(kProperties<float>);

// A test is a plain function, so the numbers of the kernel and of the property are template parameters.
template <class X, int Kernel, int Which>
void check_property() {
    const AttentionKernel<X>& kernel = attention_kernels<X>().begin[Kernel];
    const Property<X>& property = kProperties<X>[Which];
    const Cuda& dev = gpu();
    if (!kernel.runs_on(dev)) SKIP("%s needs sm_%d, this GPU is sm_%d", kernel.name, kernel.min_sm, dev.sm);
    if (property.of_partial_form && !kernel.partial) SKIP("%s has no partial form", kernel.name);
    property.check(kernel);
}
template <class X, int... I>
void add_tests(std::integer_sequence<int, I...>) {
    static std::list<std::string> names;
    void (*const tests[])() = {check_property<X, I / kCount, I % kCount>...};
    const AttentionKernels<X> kernels = attention_kernels<X>();
    if (kernels.count * kCount > static_cast<int>(sizeof...(I)))
        throw Error("test_attention: more kernels than tests, raise the number in main");
    for (int i = 0; i < kernels.count * kCount; i++) {
        names.push_back(format("%s %s %s", kernels.begin[i / kCount].name, name_of(dtype_of<X>()),
                               kProperties<X>[i % kCount].name));
        test::cases().push_back({names.back().c_str(), tests[i]});
    }
}

TEST_LIMIT(600);  // references of long sequences take long

int main(int argc, char** argv) {
    constexpr auto room = std::make_integer_sequence<int, 6 * kCount>();  // for this many kernels of a precision
    add_tests<float>(room);
    add_tests<bf16>(room);
    return test::main(argc, argv);
}
