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
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
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
        const size_t i =
            std::find_if(guard.begin(), guard.end(), [](auto byte) { return byte != 0xFF; }) - guard.begin();
        if (i == guard.size()) return;
        const std::string where =
            i < kGuard ? format("%zu bytes before it", kGuard - i) : format("%zu bytes past its end", i - kGuard);
        test::report(__FILE__, __LINE__, format("written outside %s: %s", name, where.c_str()));
    }
};

template <class... Buffers>
void poison(const Cuda& dev, Buffers&... buffers) {
    (buffers.poison(dev), ...);
}

// The bytes of several buffers, for runs that must give the same.
using Bytes = std::vector<char>;
template <class... Buffers>
Bytes bytes_of(const Buffers&... buffers) {
    Bytes all;
    const auto add = [&](const auto& buffer) {
        all.resize(all.size() + buffer.bytes());
        gpu().download(all.data() + all.size() - buffer.bytes(), buffer, buffer.bytes());
    };
    (add(buffers), ...);
    return all;
}
static bool check_same(const std::string& what, const Bytes& got, const Bytes& want) {
    if (got != want) test::report(__FILE__, __LINE__, what + ": other bytes");
    return got == want;
}

// ---------------------------------------------------------------------------------------------------------------------
// Problems: a shape, its inputs, and the fp64 result

// The last three have logits of up to ±Case::logit:
//   constant  every logit is Case::logit, exactly if scale·HS is 8
//   mixed     a row's logits are of any size, and of one sign. The last row's are negative, because a kernel could take
//             its lse for the lse of rows beyond Tq.
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

static AttentionShape whole(int B, int T, int NH, int HS, bool causal = true, float scale = 0.f) {
    return {B, T, T, NH, HS, causal, scale};
}

// The tensors of a problem have as many tokens as the longer of both sides. The last Tq are the queries, and the last
// Tk the keys. So kernels get views with other memory before and between their rows.
struct Case {
    AttentionShape shape;
    Input input = Input::normal;
    float logit = 0.f;
    std::string text() const {
        return format("B%d Tq%d Tk%d NH%d HS%d %s%s, %s%s, SEED=%llu", shape.B, shape.Tq, shape.Tk, shape.NH, shape.HS,
                      shape.causal ? "causal" : "full",
                      shape.scale != 0.f ? format(" scale %g", shape.scale).c_str() : "",
                      kInputs[static_cast<int>(input)].text, logit != 0.f ? format(" %g", logit).c_str() : "",
                      static_cast<unsigned long long>(base_seed()));
    }
    int tokens() const { return std::max(shape.Tq, shape.Tk); }
};

using Result = std::array<std::vector<double>, kTensors>;  // out, dq (B,Tq,NH,HS), lse (B,NH,Tq), dk, dv (B,Tk,NH,HS)
using Errors = std::array<double, kTensors>;
struct NaiveErrors {
    Errors max, l2;  // max|naive − ref|, ‖naive − ref‖
};

template <class X>
struct Problem {
    Case c;
    std::vector<X> qkv, dout;  // (B, T, 3, NH, HS), (B, T, NH, HS) with T = c.tokens()
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
// Moves a view (B, T, C) out of host memory, where NaN bytes stay as before a kernel wrote.
template <class X>
std::vector<double> take(const Heads<X>& x, int B, int T, size_t C) {
    std::vector<double> rows;
    for (int row = 0; row < B * T; row++) {
        X* const from = x.row(row / T, row % T, 0, 0);
        for (size_t i = 0; i < C; i++)
            rows.push_back(static_cast<std::conditional_t<std::is_same_v<X, bf16>, float, X>>(from[i]));
        std::memset(static_cast<void*>(from), 0xFF, C * sizeof(X));
    }
    return rows;
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
    const int T = p.c.tokens();
    const float steps = static_cast<float>(std::max(2, T / 16) - 1);  // of a ramp
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform(-1.f, 1.f);
    std::vector<float> w(s.NH * s.HS, 1.f);
    if (!constant)
        for (float& x : w) x = uniform(rng) < 0.f ? -1.f : 1.f;
    for (size_t row = 0; row < p.qkv.size() / s.HS; row++) {  // of (B, T, 3, NH)
        const int h = row % s.NH, part = row / s.NH % 3, t = row / s.NH / 3 % T;
        if (part == 2) continue;
        const bool key = part == 1;
        float x = uniform(rng);
        if (constant)
            x = key && p.c.logit < 0.f ? -1.f : 1.f;
        else if (mixed && key)
            x = 0.75f + 0.25f * x;
        else if (mixed)
            x = t == T - 1 ? -1.f : x;
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

// The problem without its result. Tokens that are no queries have a dout of 0. Tokens that are no keys repeat them. So
// run as a whole sequence it has the same results (see naive_errors).
template <class X>
Problem<X> inputs_of(const Case& c) {
    const AttentionShape& s = c.shape;
    const size_t C = size_t(s.NH) * s.HS, T = c.tokens();
    const auto& input = kInputs[static_cast<int>(c.input)];
    std::seed_seq seed{base_seed(), uint64_t(s.B), uint64_t(T), uint64_t(s.NH), static_cast<uint64_t>(c.input)};
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> normal;
    Problem<X> p{c, std::vector<X>(s.B * T * 3 * C), std::vector<X>(s.B * T * C)};
    for (size_t i = 0; i < p.qkv.size(); i++) {
        const size_t part = i / C % 3, t = i / C / 3 % T;
        const float early = part == 1 && t < 32 ? input.early : 1.f;
        p.qkv[i] = static_cast<X>((normal(rng) + input.shift) * input.factors[part] * early);
    }
    for (X& x : p.dout) x = static_cast<X>((normal(rng) + input.shift) * input.factors[3]);
    if (c.logit != 0.f) make_large_logits(p, rng);
    if (T % s.Tk) throw Error("queries that are more than the keys must be a multiple of them");
    for (size_t row = 0; row < s.B * T; row++) {
        const size_t t = row % T, last = row - t + T - s.Tk + t % s.Tk;
        if (t < T - s.Tq) std::fill_n(&p.dout[row * C], C, static_cast<X>(0.f));
        if (t < T - s.Tk) std::copy_n(&p.qkv[(last * 3 + 1) * C], 2 * C, &p.qkv[(row * 3 + 1) * C]);
    }
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
    const int T = p.c.tokens();
    std::vector<double> qkv = as_double(p.qkv);
    const auto largest = [&](int which) {
        return Largest(take(packed(qkv.data(), T, s.NH, s.HS, which), s.B, T, size_t(s.NH) * s.HS), s.HS);
    };
    const Largest q = largest(0), k = largest(1), v = largest(2), d_o(as_double(p.dout), s.HS);
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
    if (T <= 2) tiny[Lse] += u * S;
    // All keys are the same, and each row of dS sums to 0, so the exact dq is 0. The rounding of dS stays.
    if (p.c.input == Input::constant) tiny[Dq] += kRoundoff<X> * scale * dP * k.value;
    if (T == 2) {
        const double P = kRoundoff<X> + u * S;
        tiny[Out] += P * v.value;
        tiny[Dq] += P * scale * dP * k.value;
        tiny[Dk] += P * scale * dP * q.value;
        tiny[Dv] += P * T * d_o.value;
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
    AttentionShape s = c.shape;
    s.scale = s.resolved_scale();  // the fp32 number that kernels take
    for (int i = 0; i < kTensors; i++)
        p.ref[i].resize(size_t(s.B) * (i >= Dk ? s.Tk : s.Tq) * s.NH * (i == Lse ? 1 : s.HS));
    std::vector<double> qkv = as_double(p.qkv), dout = as_double(p.dout);
    const auto last = [&](auto x, int T) { return x.from(c.tokens() - T); };
    const auto input = [&](int which) { return packed<const double>(qkv.data(), c.tokens(), s.NH, s.HS, which); };
    const auto result = [&](int i) { return contiguous(p.ref[i].data(), i >= Dk ? s.Tk : s.Tq, s.NH, s.HS); };
    static const Cpu cpu;
    AttentionForward<double> f{s, last(input(0), s.Tq), last(input(1), s.Tk), last(input(2), s.Tk), result(Out)};
    f.lse = {p.ref[Lse].data(), size_t(s.Tq)};
    attention_forward(cpu, f);
    AttentionBackward<double> b{s, f.q, f.k, f.v};
    b.dout = last(contiguous<const double>(dout.data(), c.tokens(), s.NH, s.HS), s.Tq);
    b.out = contiguous<const double>(f.out.ptr, s.Tq, s.NH, s.HS);
    b.lse = {f.lse.ptr, f.lse.head};
    b.dq = result(Dq);
    b.dk = result(Dk);
    b.dv = result(Dv);
    attention_backward(cpu, b);
    p.tiny = tiny_errors(p);
    return cache.emplace(c.text(), std::move(p)).first->second;
}

// ---------------------------------------------------------------------------------------------------------------------
// Runs

// Device copies of a problem's inputs, `copies` times over, and poisoned outputs. qkv lies `misalign` elements past its
// natural place. Rows of out and dout lie C + gap elements apart. If Y is not X, forward runs twice, because backward
// takes an out of type X.
template <class X, class Y = X>
struct Run {
    const AttentionKernel<X>& kernel;
    const Problem<X>& p;
    const int copies, misalign, gap;
    const int T = p.c.tokens(), B = p.c.shape.B;
    const PieceCall all = {T - p.c.shape.Tq, p.c.shape.Tq, T - p.c.shape.Tk, p.c.shape.Tk, p.c.shape.causal};
    const size_t C = size_t(p.c.shape.NH) * p.c.shape.HS, n = B * T * (C + gap), rows = B * T * p.c.shape.NH;
    const AttentionShape s = shape_of(all);
    Buffer<X> qkv{"qkv", copies*p.qkv.size() + misalign}, dout{"dout", copies*n}, out{"out", copies*n};
    Buffer<X> att{"att", kernel.saved_bytes(s) / sizeof(X)};
    Buffer<Y> out_y{"out of type Y", kTwo ? copies*n : 0}, dqkv{"dqkv", copies*p.qkv.size()};
    Buffer<float> lse{"lse", copies*rows}, lse_rest{"lse_rest", copies*rows};
    Buffer<char> scratch{"scratch", kernel.scratch_bytes(s)};
    static constexpr bool kTwo = !std::is_same_v<X, Y>, kHasRest = std::is_same_v<X, float>;

    Run(const AttentionKernel<X>& kernel, const Problem<X>& p, int copies = 1, int misalign = 0, int gap = 0)
        : kernel(kernel), p(p), copies(copies), misalign(misalign), gap(gap) {
        std::vector<X> douts(n, static_cast<X>(NAN));
        for (int row = 0; row < B * T; row++) std::copy_n(&p.dout[row * C], C, &douts[row * (C + gap) + gap]);
        upload(qkv + misalign, p.qkv);
        upload(dout, douts);
    }
    void upload(X* to, const std::vector<X>& one) {
        gpu().upload(to, one.data(), one.size() * sizeof(X));
        for (int done = 1; done < copies; done *= 2)
            CUDA_CHECK(cudaMemcpyAsync(to + done * one.size(), to,
                                       std::min(done, copies - done) * one.size() * sizeof(X), cudaMemcpyDeviceToDevice,
                                       gpu().stream));
    }
    AttentionShape shape_of(const PieceCall& piece) const {
        const AttentionShape& whole = p.c.shape;
        return {B * copies, piece.Tq, piece.Tk, whole.NH, whole.HS, piece.causal, whole.scale};
    }

    // Views of the rows that a piece takes.
    template <class A>
    Heads<A> part(A* qkv, int which, const PieceCall& piece) const {
        return packed(qkv, T, s.NH, s.HS, which).from(which == 0 ? piece.q0 : piece.k0);
    }
    template <class A>
    Heads<A> out_rows(A* out, const PieceCall& piece) const {
        return Heads<A>{out + gap, T * (C + gap), C + gap}.from(piece.q0);
    }
    template <class Call>
    Call call_of(const PieceCall& piece) const {
        Call call{shape_of(piece)};
        const X* const inputs = qkv + misalign;
        call.q = part(inputs, 0, piece);
        call.k = part(inputs, 1, piece);
        call.v = part(inputs, 2, piece);
        call.lse = {lse + piece.q0, size_t(T)};
        call.att = att;
        return call;
    }

    void forward(const Cuda& dev = gpu()) {
        poison(dev, out, out_y, lse, lse_rest, att);
        if constexpr (kTwo) {
            auto call = call_of<AttentionForward<X, Y>>(all);
            call.out = out_rows<Y>(out_y, all);
            kernel.forward_fp32(dev, call);
        }
        auto call = call_of<AttentionForward<X>>(all);
        call.out = out_rows<X>(out, all);
        if (kHasRest && kernel.forward_fp32) call.lse_rest = {lse_rest + all.q0, size_t(T)};
        kernel.forward(dev, call);
    }
    // The gradients' shares that belong to a piece. lse and out are those of whole rows.
    void backward(const Cuda& dev, const PieceCall& piece, Buffer<char>& scratch) {
        poison(dev, dqkv, scratch);
        auto call = call_of<AttentionBackward<X, Y>>(piece);
        call.dout = out_rows<const X>(dout, piece);
        call.out = out_rows<const X>(out, piece);
        if (kHasRest && piece.Tk < all.Tk) call.lse_rest = {lse_rest + piece.q0, size_t(T)};
        call.dq = part<Y>(dqkv, 0, piece);
        call.dk = part<Y>(dqkv, 1, piece);
        call.dv = part<Y>(dqkv, 2, piece);
        call.scratch = scratch;
        if constexpr (kTwo)
            kernel.backward_fp32(dev, call);
        else
            kernel.backward(dev, call);
    }
    bool has_backward() const { return kernel.backward && (s.Tq == s.Tk || kernel.backward_fp32); }
    void backward(const Cuda& dev = gpu()) {
        if (has_backward()) backward(dev, all, scratch);
    }

    std::string text() const { return format("%s %s", kernel.name, p.c.text().c_str()); }
    // Takes a copy's rows out of a buffer like out, or like lse, and checks that nothing else has been written.
    template <class A>
    std::vector<double> rows_of(const Buffer<A>& buffer, bool like_lse, size_t copy = 0) const {
        const size_t size = like_lse ? rows : n;
        std::vector<A> host = buffer.host(copy * size, size);
        const Heads<A> view = like_lse ? Heads<A>{host.data() + all.q0, size_t(T), 1} : out_rows(host.data(), all);
        std::vector<double> taken = take(view, like_lse ? B * s.NH : B, s.Tq, like_lse ? 1 : C);
        check_untouched(buffer.name, host);
        return taken;
    }
    void take_gradients(Result& to, const PieceCall& piece, size_t copy = 0) const {
        std::vector<Y> host = dqkv.host(copy * p.qkv.size(), p.qkv.size());
        for (int which = 0; which < 3; which++)
            to[Dq + which] = take(part(host.data(), which, piece), B, which == 0 ? piece.Tq : piece.Tk, C);
        check_untouched(dqkv.name, host);
    }
    template <class A>
    void check_untouched(const char* name, const std::vector<A>& host) const {
        const auto is_poison = [](A x) { return std::isnan(static_cast<float>(x)); };
        const auto first = std::find_if_not(host.begin(), host.end(), is_poison);
        if (first != host.end())
            test::report(__FILE__, __LINE__,
                         format("%s: %s[%td] is outside of the view", text().c_str(), name, first - host.begin()));
    }
    Bytes bytes() const { return bytes_of(out, out_y, lse, lse_rest, dqkv); }
    Result result(size_t copy = 0) const {
        Result r;
        r[Out] = rows_of(out, false, copy);
        r[Lse] = rows_of(lse, true, copy);
        if (has_backward()) take_gradients(r, all, copy);
        return r;
    }
};

template <class X>
Result run(const AttentionKernel<X>& kernel, const Problem<X>& p, int gap = 0) {
    Run<X> r(kernel, p, 1, 0, gap);
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
// with. Its backward takes whole sequences, in which only the last rows are the problem's. Keys that come several times
// make lse larger, and share the gradients.
template <class X>
const NaiveErrors& naive_errors(const Problem<X>& p) {
    if (p.naive) return *p.naive;
    const AttentionShape& s = p.c.shape;
    const int T = p.c.tokens(), times = T / s.Tk;
    Problem<X> w = p;
    w.c.shape.Tq = w.c.shape.Tk = T;
    Result got = run(attention_kernel<X>(gpu(), Attention::naive, s.HS), w);
    p.naive.emplace();
    for (int i = 0; i < kTensors; i++) {
        const int rows = i >= Dk ? s.Tk : s.Tq, heads = i == Lse ? s.NH : 1;
        const size_t width = i == Lse ? 1 : size_t(s.NH) * s.HS;
        got[i] = take(Heads<double>{got[i].data(), T * width, width}.from(T - rows), s.B * heads, rows, width);
        for (double& x : got[i]) x = i == Lse ? x - std::log(times) : i >= Dk ? x * times : x;
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
    const double max = of_P + std::sqrt(p.c.tokens()) * 0x1p-24 + 3 * kRoundoff<X>, tiny = p.tiny[tensor];
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
    const bool luck = p.c.tokens() <= 2 || (constant && (tensor == Dq || tensor == Dk));
    return {k.max * naive + tiny, luck ? INFINITY : k.l2 * naive_l2 + one * l2_norm(p.ref[tensor]),
            format("%g·naive's %.3g + tiny %.3g, %g·naive's %.3g + one rounding %.3g", k.max, naive, tiny, k.l2,
                   naive_l2, one)};
}

// A rough bound is that for naive itself, which needs no run of naive.
template <class X>
Bound bound_of(const AttentionKernel<X>& kernel, const Problem<X>& p, int tensor, bool rough = false) {
    return kernel.flash && !rough ? flash_bound(kernel, p, tensor) : naive_bound(p, tensor);
}
template <class X>
void check_result(const AttentionKernel<X>& kernel, const Problem<X>& p, const Result& got, bool rough = false) {
    for (int i = 0; i < (got[Dq].empty() ? Dq : kTensors); i++)
        check_error(format("%s %s", kernel.name, p.c.text().c_str()), i, got[i], p.ref[i],
                    bound_of(kernel, p, i, rough));
}

constexpr int kGap = 32;
// Queries and keys that differ in number. All views have other memory between their rows.
template <class X>
void check_queries(const AttentionKernel<X>& kernel, const Case& c, bool rough = false) {
    check_result(kernel, problem<X>(c), run(kernel, problem<X>(c), kGap), rough);
}

// Cuts a whole problem. A causal piece must end where its queries do. So the keys from the last cut below its first
// query on stay together. All of its queries see the keys before.
static std::vector<PieceCall> pieces_of(const AttentionShape& s, std::vector<int> q_cuts,
                                        const std::vector<int>& k_cuts) {
    std::vector<PieceCall> pieces;
    q_cuts.push_back(s.Tq);
    int q0 = 0;
    for (int q1 : q_cuts) {
        int k0 = 0;
        for (int cut : k_cuts) {
            if (s.causal && cut > q0) break;
            pieces.push_back({q0, q1 - q0, k0, cut - k0, false});
            k0 = cut;
        }
        pieces.push_back({q0, q1 - q0, k0, (s.causal ? q1 : s.Tk) - k0, s.causal});
        q0 = q1;
    }
    return pieces;
}

// Forward in fp32 is what the whole call rounds. Backward over pieces gives shares that add up to the whole gradients.
// Their errors may be those of the whole call, a tenth more because sums have another order, and one fp32 rounding a
// piece.
template <class X>
void check_pieces(const AttentionKernel<X>& kernel, const Case& c, const std::vector<int>& q_cuts,
                  const std::vector<int>& k_cuts, bool rough = false) {
    const Problem<X>& p = problem<X>(c);
    Run<X, float> r(kernel, p, 1, 0, kGap);
    r.forward();
    Result got;
    got[Lse] = r.rows_of(r.lse, true);
    if constexpr (r.kTwo) {
        got[Out] = r.rows_of(r.out_y, false);
        std::vector<double> rounded = got[Out];
        for (double& x : rounded) x = static_cast<float>(static_cast<X>(static_cast<float>(x)));
        CHECK(rounded == r.rows_of(r.out, false));
    } else {
        CHECK(kernel.forward_fp32 == kernel.forward && kernel.backward_fp32 == kernel.backward);
        got[Out] = r.rows_of(r.out, false);
        const std::vector<double> rest = r.rows_of(r.lse_rest, true);
        const double log_l = std::log(c.shape.Tk);  // at most. Its rounding and that of m·ln 2 may be in the rest
        for (size_t i = 0; i < rest.size(); i++) CHECK_NEAR(rest[i], 0, 0x1p-23 * (std::fabs(got[Lse][i]) + log_l));
        CHECK(max_abs(rest) > 0);
    }

    const std::vector<PieceCall> pieces = pieces_of(c.shape, q_cuts, k_cuts);
    Errors rounding{}, rounding_l2{};
    for (const PieceCall& piece : pieces) {
        Buffer<char> scratch("a piece's scratch", kernel.scratch_bytes(r.shape_of(piece)));
        r.backward(gpu(), piece, scratch);
        Result share;
        r.take_gradients(share, piece);
        for (int i : {Dq, Dk, Dv}) {
            const size_t first = i == Dq ? piece.q0 : piece.k0, rows = i == Dq ? piece.Tq : piece.Tk;
            got[i].resize(p.ref[i].size());
            for (size_t e = 0; e < share[i].size(); e++)
                got[i][e + (e / r.C / rows * (r.T - rows) + first) * r.C] += share[i][e];
            rounding[i] += 0x1p-24 * max_abs(share[i]);
            rounding_l2[i] += 0x1p-24 * l2_norm(share[i]);
        }
    }
    for (int i = 0; i < kTensors; i++) {
        const Bound bound = bound_of(kernel, p, i, rough);
        check_error(format("%s in %zu pieces", r.text().c_str(), pieces.size()), i, got[i], p.ref[i],
                    {1.1 * bound.max + rounding[i], 1.1 * bound.l2 + rounding_l2[i], "1.1·" + bound.rule});
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The properties that are tested of every kernel

// Walks through the product of shapes and inputs. The counters' periods are coprime, so every pair of values meets.
// Long sequences come with few heads, because the reference's time grows with B·NH·T²·HS.
static std::vector<Case> accuracy_cases(bool flash_in_bf16) {
    std::vector<Case> all = {{whole(3, 65, 25, 64)},
                             {whole(3, 129, 25, 64), Input::shifted},
                             {whole(1, 200, 2, 64, true, 0.3f)},
                             {whole(1, 200, 2, 128, false, 0.02f), Input::large_q}};
    const std::pair<int, int> few[] = {{1, 1}, {1, 2}, {2, 1}}, many[] = {{1, 1}, {3, 12}, {1, 25}, {3, 1}, {1, 12}};
    int n = 0;
    for (int T : {1, 2, 63, 64, 65, 127, 129, 255, 1000, 1023, 1024, 1025})
        for (int HS : {64, 128})
            for (bool causal : {true, false}) {
                const auto [B, NH] = T > 129 ? few[n / 4 % 3] : many[n % 5];
                all.push_back({whole(B, T, NH, HS, causal), static_cast<Input>(n % 3)});
                n++;
            }
    for (int HS : {64, 128})
        for (bool causal : {true, false}) {
            all.push_back({whole(1, 128, 3, HS, causal)});  // exactly a tile or two of every kernel
            // flash_bf16_sm90 keeps its first maximum until a sum grows out of range. fp32's bounds, and naive's bound
            // for itself, are not made for the rounding of logits of several hundred.
            if (flash_in_bf16) all.push_back({whole(2, 450, 3, HS, causal), Input::early_keys});
        }
    for (int HS : {64, 128}) {
        for (Input input : {Input::magnitudes, Input::magnitudes_reversed})
            all.push_back({whole(1, 200, 2, HS), input});
        // flash_bf16_sm90's backward has fewer heads than this in work at a time, so later ones take over the place of
        // earlier ones. fp64's plain loops take seconds for them.
        if (flash_in_bf16) all.push_back({whole(HS == 64 ? 40 : 20, 129, 25, HS)});
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
        for (const auto& [input, logit] : inputs)
            for (int T : {33, 65, 100, 127, 129, 1001})
                for (bool causal : {true, false}) {
                    const int several = T < 1000 ? 2 : 1;
                    const Case c{whole(several, T, several, HS, causal, 8.f / static_cast<float>(HS)), input, logit};
                    check_result(kernel, problem<X>(c), run(kernel, problem<X>(c)));
                    if (kernel.backward_fp32) check_pieces(kernel, c, {T / 3}, {T / 4});
                }
}

template <class X>
void extremes(const AttentionKernel<X>& kernel) {
    for (int HS : {64, 128}) {
        Problem<X> p = inputs_of<X>({whole(2, 130, 3, HS)});
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
            const Problem<X> p = inputs_of<X>({whole(2, T, NH, HS, causal)});
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
                    size_t first = 0;
                    while (first < got[i].size() && !wrong(first)) first++;
                    if (first < got[i].size())
                        test::report(
                            __FILE__, __LINE__,
                            format("%s %s, NaN in %s of token %d, head %d, sequence %d: %s[%zu] is %g, without "
                                   "the NaN %g",
                                   kernel.name, p.c.text().c_str(), inputs[which].of, at, h, b, kNames[i], first,
                                   got[i][first], clean[i][first]));
                }
            }
        }
}

// The inputs arrive late on a stream with which no other is ordered, not even the default one. Scratch and outputs are
// poisoned on it too. So work on any other stream sees NaN, or the stream overwrites it.
template <class X, class Y>
void check_stream(const AttentionKernel<X>& kernel, const Problem<X>& p) {
    const auto bytes_on = [&](const Cuda& dev, unsigned pause) {
        Run<X, Y> r(kernel, p);
        const Buffer<X> late_qkv("late qkv", p.qkv), late_dout("late dout", p.dout);
        poison(gpu(), r.qkv, r.dout);
        gpu().sync();

        if (pause) dev.pause(pause);
        r.qkv.copy(dev, late_qkv);
        r.dout.copy(dev, late_dout);
        r.forward(dev);
        r.backward(dev);
        dev.sync();
        return r.bytes();
    };
    OwnStream other;
    other.tf32 = false;
    check_same(format("%s %s on a stream of its own, with late inputs", kernel.name, p.c.text().c_str()),
               bytes_on(other, 100000000), bytes_on(gpu(), 0));
}
template <class X>
void stream(const AttentionKernel<X>& kernel) {
    for (int HS : {64, 128}) {
        const Problem<X> p = inputs_of<X>({whole(2, 300, 3, HS)});
        check_stream<X, X>(kernel, p);
        if (kernel.backward_fp32) check_stream<X, float>(kernel, p);
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
                const Problem<X>& p = problem<X>({whole(2, T, 3, HS, causal)});
                gpu().block_smem = restore.bytes;
                const Result large = run(kernel, p);
                gpu().block_smem = 64 << 10;
                const Result small = run(kernel, p);
                check_result(kernel, p, small);
                if (T == 300 && restore.bytes >= 112 << 10) CHECK(small[Dk] != large[Dk]);  // another order of sums
            }
        const Case c{whole(2, 300, 3, HS)};
        check_pieces(kernel, c, {128, 165, 229}, {100});
        check_pieces(kernel, {whole(1, 129, 1, HS, true, 8.f / static_cast<float>(HS)), Input::constant, -128.f}, {29},
                     {13});
        check_queries(kernel, {{2, 130, 200, 3, HS}});
        gpu().block_smem = 48 << 10;
        CHECK_ERROR(run(kernel, problem<X>(c)), "shared memory");
    }
}

// The same bytes from every run.
template <class X, class Y>
void check_repeats(const AttentionKernel<X>& kernel, const AttentionShape& shape, int count) {
    const Problem<X> p = inputs_of<X>({shape});
    Run<X, Y> r(kernel, p);
    Bytes first;
    for (int i = 0; i < count; i++) {
        r.forward();
        r.backward();
        const Bytes bytes = r.bytes();
        if (i == 0) first = bytes;
        if (!check_same(format("%s, run %d", r.text().c_str(), i + 1), bytes, first)) return;
    }
}
template <class X>
void determinism(const AttentionKernel<X>& kernel) {
    const std::pair<AttentionShape, int> runs[] = {
        {whole(2, 1000, 12, 64), 20}, {whole(1, 1000, 5, 128, false), 20}, {whole(3, 130, 5, 64), 1000}};
    for (const auto& [shape, count] : runs) {
        check_repeats<X, X>(kernel, shape, count);
        if (kernel.backward_fp32) check_repeats<X, float>(kernel, shape, 3);
    }
}

// 160 tiles of 128 keys in all. So some of 132 multiprocessors get two, and more would queue for a turn. It runs many
// times, because who gets which must not matter.
template <class X>
void large(const AttentionKernel<X>& kernel) {
    for (int HS : {64, 128})
        for (bool causal : {false, true}) {
            const Case c{whole(2, 1010, 10, HS, causal)};
            check_pieces(kernel, c, {}, {}, true);
            check_repeats<X, float>(kernel, c.shape, 20);
        }
}

template <class X>
void queries(const AttentionKernel<X>& kernel) {
    int n = 0;
    for (int HS : {64, 128}) {
        for (int Tk : {1024, 2049})
            for (const auto& [B, Tq, NH] : {std::array{3, 1, 12}, {2, 63, 3}, {2, 65, 3}, {1, 1000, 1}}) {
                // In bf16 the rounding of O is an error of D, which in rows of so many shifted keys adds up in dQ.
                const int inputs = Tk > 1024 ? 2 : 3;
                check_queries(kernel, {{B, Tq, Tk, NH, HS}, static_cast<Input>(n++ % inputs)});
            }
        check_queries(kernel, {{1, 200, 1025, 2, HS, false}, Input::shifted});
        check_queries(kernel, {{2, 195, 65, 3, HS, false}});
        check_queries(kernel, {{2, 130, 200, 3, HS, true, 0.3f}});
    }
}

template <class X>
void pieces(const AttentionKernel<X>& kernel) {
    const std::pair<std::vector<int>, std::vector<int>> cuts[] = {
        {{}, {}},
        {{128}, {128}},
        {{128, 165, 229}, {37, 101, 172}},
        {{100, 200}, {60, 120, 180, 240}},
        {{1, 3, 299}, {1, 298}},
    };
    for (int HS : {64, 128}) {
        for (bool causal : {true, false})
            for (const auto& [q_cuts, k_cuts] : cuts)
                check_pieces(kernel, {whole(2, 300, 3, HS, causal)}, q_cuts, k_cuts);
        check_pieces(kernel, {whole(2, 300, 3, HS, true, 0.3f)}, {128}, {100});
        check_pieces(kernel, {whole(2, 300, 3, HS, false, 0.02f), Input::large_q}, {100, 200}, {37, 101});
    }
    check_pieces(kernel, {whole(1, 256, 12, 64), Input::large_q}, {64, 128, 192}, {128});
    check_pieces(kernel, {whole(1, 256, 12, 64), Input::shifted}, {128}, {64, 128, 192});
}

// Small enough for compute-sanitizer, because racecheck of `pieces` with flash_fp16x3 takes longer than four minutes.
// But it has so many heads that the persistent blocks of sm_90a wrap around their stages.
template <class X>
void few(const AttentionKernel<X>& kernel) {
    const int NH = kernel.min_sm == 90 ? 150 : 2;
    for (int HS : {64, 128}) {
        check_queries(kernel, {{1, 70, 200, NH, HS}}, true);
        if (kernel.backward_fp32) check_pieces(kernel, {whole(1, 200, NH, HS)}, {130}, {71}, true);
    }
}

// Forward and backward refuse what no kernel takes, and name it.
template <class X>
void check_refusals(const AttentionKernel<X>& kernel) {
    const AttentionShape good = whole(1, 64, 1, 64);
    const auto refused = [&](const char* why, auto change) {
        AttentionForward<X> f{good};
        AttentionBackward<X> b{good};
        change(f);
        change(b);
        CHECK_ERROR(kernel.forward(gpu(), f), why);
        if (kernel.backward) CHECK_ERROR(kernel.backward(gpu(), b), why);
    };
    refused("Tq 65", [](auto& c) { c.s.Tq = 65; });  // a causal mask needs Tq ≤ Tk
    refused("NH 0", [](auto& c) { c.s.NH = 0; });
    refused("head size 18", [](auto& c) { c.s.HS = 18; });
    refused("rows of q", [](auto& c) { c.q.ptr = reinterpret_cast<const X*>(sizeof(X)); });
    refused("rows of k", [](auto& c) { c.k.token = 1; });
    refused("rows of v", [](auto& c) { c.v.batch = 1; });
    refused("rows of out", [](auto& c) { c.out.token = 1; });
    AttentionBackward<X> fewer{{1, 63, 64, 1, 64}}, unaligned{good};
    unaligned.dk.token = 1;
    if (kernel.backward) CHECK_ERROR(kernel.backward(gpu(), unaligned), "rows of dk");
    if (kernel.backward && !kernel.backward_fp32) CHECK_ERROR(kernel.backward(gpu(), fewer), "Tq 63");
}

// What a kernel does not support gives an Error. What gives none must be right.
template <class X>
void limits(const AttentionKernel<X>& kernel) {
    const struct {
        AttentionShape shape;
        int misalign = 0;  // elements
    } cases[] = {{whole(2, 100, 3, 80)},     {whole(1, 70, 2, 32)},    {whole(2, 100, 3, 64), 1},
                 {whole(2, 100, 3, 128), 1}, {whole(65537, 1, 1, 64)},  // more than a grid's y or z
                 {whole(2731, 2, 25, 64)}};
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
    check_refusals(kernel);
}

// Runs one sequence `copies` times over, and looks at some of the copies.
template <class X>
void check_many(const AttentionKernel<X>& kernel, const Case& c, int copies) {
    const Problem<X>& p = problem<X>(c);
    AttentionShape s = c.shape;
    s.B *= copies;
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
    check_many(kernel, {whole(1, 65, 25, 64)}, kBig / (3 * 65 * 25 * 64) + 2);
}
template <class X>
void big_out(const AttentionKernel<X>& kernel) {
    check_many(kernel, {whole(1, 65, 25, 64)}, kBig / (65 * 25 * 64) + 2);
}
template <class X>
void groups(const AttentionKernel<X>& kernel) {
    check_many(kernel, {whole(1, 1040, 25, 128)}, 5);
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
    const Problem<X>& p = problem<X>({whole(2, 100, 3, 64)});
    const AttentionShape& s = p.c.shape;
    Run<X> r(kernel, p);
    CHECK(attention_saved_bytes<X>(dev, kind, s) == kernel.saved_bytes(s));
    CHECK(attention_scratch_bytes<X>(dev, kind, s) == kernel.scratch_bytes(s));
    if (Flash) CHECK(kernel.saved_bytes(s) == 0);
    attention_forward<X>(dev, kind, r.out, r.lse, r.att, r.qkv, s.B, s.Tq, s.Tk, s.NH, s.HS);
    attention_backward<X>(dev, kind, r.dqkv, r.scratch, r.dout, r.out, r.lse, r.att, r.qkv, s.B, s.Tq, s.NH, s.HS);
    check_result(kernel, p, r.result());
    // Some tokens more, as in generation.
    for (int Tq : {1, 33}) {
        const Problem<X>& more = problem<X>({{1, Tq, 100, 3, 64}});
        Run<X> last(kernel, more);
        Result got;
        attention_forward<X>(dev, kind, last.out, last.lse, last.att, last.qkv, 1, Tq, 100, 3, 64);
        got[Out] = as_double(last.out.host(0, Tq * last.C));
        got[Lse] = as_double(last.lse.host(0, Tq * 3));
        check_result(kernel, more, got);
    }
}
static const test::Register layer_tests[] = {
    {"layer_naive_fp32", check_layer<float, false>},
    {"layer_naive_bf16", check_layer<bf16, false>},
    {"layer_flash_fp32", check_layer<float, true>},
    {"layer_flash_bf16", check_layer<bf16, true>},
};

// Scratch that is enough for a call without a mask is enough with one, and with fewer queries or keys. A ring's memory
// relies on that (attention/ring/pieces.h).
TEST(scratch_grows_with_the_call) {
    const auto check = [](const auto& kernel, const AttentionShape& s, size_t enough) {
        if (kernel.scratch_bytes(s) <= enough) return;
        test::report(__FILE__, __LINE__,
                     format("%s: B%d Tq%d Tk%d NH%d HS%d %s needs more scratch than a larger call", kernel.name, s.B,
                            s.Tq, s.Tk, s.NH, s.HS, s.causal ? "causal" : "full"));
    };
    const auto check_all = [&](auto x) {
        const auto all = attention_kernels<decltype(x)>();
        for (const auto* kernel = all.begin; kernel != all.begin + all.count; kernel++)
            for (int HS : {64, 128})
                for (int NH : {1, 12, 32})
                    for (int T = 512; T <= 65536; T += T / 2) {
                        const size_t enough = kernel->scratch_bytes({1, T, T, NH, HS, false});
                        for (const auto& [Tq, Tk] : {std::pair{T, T}, {T / 2, T}, {T, T / 2}, {T / 2, T / 2}, {1, T}})
                            for (bool causal : {false, true})
                                if (!causal || Tq <= Tk) check(*kernel, {1, Tq, Tk, NH, HS, causal}, enough);
                    }
    };
    check_all(float{});
    check_all(bf16{});
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
            CHECK(rings.empty() == (k->backward_fp32 != nullptr));
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
    bool needs_fp32 = false;  // calls with results in fp32
};
template <class X>
constexpr Property<X> kProperties[] = {
    {"accuracy", accuracy<X>},        // out, lse, dq, dk, dv on the inputs and shapes that find bugs
    {"logits", logits<X>},            // of up to ±200, of one size, mixed and rising, whole and in pieces
    {"extremes", extremes<X>},        // zeros
    {"nan", one_nan<X>},              // one NaN reaches what depends on it, and no other head or distant row
    {"stream", stream<X>},            // all work is on the device's stream
    {"small tiles", small_tiles<X>},  // flash_fp32's, for GPUs with less shared memory
    {"determinism", determinism<X>},  // the same bytes from every run
    {"queries", queries<X>},          // fewer than keys, or more, in views
    {"pieces", pieces<X>, true},      // shares of pieces add up to the whole
    {"large", large<X>, true},        // more work than multiprocessors, in 20 runs
    {"few", few<X>},                  // a little of queries and pieces, for compute-sanitizer
    {"limits", limits<X>},            // what is not supported gives an Error, never a wrong result
    {"big", big<X>},                  // more than 2³¹ elements of qkv and dqkv
    {"big out", big_out<X>},          // also of out, dout and dq, if the GPU has the memory
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
    if (property.needs_fp32 && !kernel.backward_fp32) SKIP("%s takes whole sequences only", kernel.name);
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
