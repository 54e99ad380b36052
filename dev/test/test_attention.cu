// Every attention kernel of the table against the fp64 reference. kProperties at the end lists what
// is tested of each.
//
// The rule of dev/common/bounds.h allows an error of at most k times naive's. naive itself, the
// yardstick, is held to a relative L2 error. ACCURACY=1 in the environment prints every error that
// is compared with a bound.
//
// Every buffer lies between two guards and starts as NaN bytes, guards included (dev/test/late.h).
// So an element that is not written, scratch that is not cleared and a read past the end all show
// as NaN. A write past the end changes a guard.
//
// Run: ./dev/test_attention [part of a test's name, e.g. flash_bf16]      SEED=n for other random
// numbers
#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "dev/common/bounds.h"
#include "dev/common/ring_check.h"
#include "dev/common/test.h"
#include "dev/test/late.h"
#include "layers/cpu/reference.h"
#include "layers/layers.h"

static const uint64_t kSeed =
    std::getenv("SEED") ? std::strtoull(std::getenv("SEED"), nullptr, 10) : 1;

// The device of all tests, in strict fp32. Without one, the test that asks for it is skipped. No
// other stream is ordered with its own.
static Cuda& gpu() {
    std::string why;
    if (Cuda::count(&why) == 0)
        SKIP("no GPU: %s", why.c_str());
    static Cuda& dev = *new OwnStream;
    dev.tf32 = false;
    return dev;
}

// -------------------------------------------------------------------------------------------------
// Device memory

using Memories = std::initializer_list<const LateMemory*>;

template <class X>
struct Buffer : LateMemory {
    Buffer(const char* name, size_t count) : LateMemory(gpu(), count * sizeof(X), name) {}
    operator X*() const { return static_cast<X*>(p); }
};
template <class A>
std::vector<A> download(const LateMemory& from, size_t first, size_t count) {
    std::vector<A> values(count);
    gpu().download(values.data(), static_cast<A*>(from.p) + first, count * sizeof(A));
    return values;
}

// -------------------------------------------------------------------------------------------------
// Problems: a shape, its inputs, and the fp64 result

// Three have logits of up to ±Case::logit:
//   constant  every logit is Case::logit, exactly if scale·HS is 8
//   mixed     a row's logits are of any size, and of one sign. The last row's are negative, because
//             a kernel could take its lse for the lse of rows beyond Tq.
//   ramp      they rise along the keys, 16 at a time, in half of the rows, and fall in the others.
//             So the maximum rises by hundreds whichever way a kernel walks.
//   tail      the last 128 keys have nearly all of the weight, and thousands of others the same
//             tiny one each. What a tile of those adds to a row's sum of P is just below half a
//             unit in the sum's last place. So a sum that starts with the last keys loses all
//             others, 1e-5 of itself, unless it keeps what its additions lose. Their values are 0,
//             because a sum of P V that starts with the last keys would lose them, too.
enum class Input {
    normal,
    large_q,
    shifted,
    early_keys,
    magnitudes,
    reversed,
    constant,
    mixed,
    ramp,
    tail
};

static const struct {
    const char* text;
    float factors[4] = {1, 1, 1, 1};  // of q, k, v, dout
    float shift = 0;
    float early = 1;  // of the first 32 keys
} kInputs[] = {{"N(0,1)"},
               {"q x5", {5, 1, 1, 1}},
               {"mean +0.5", {1, 1, 1, 1}, 0.5f},
               {"first keys x60", {1, 1, 1, 1}, 0, 60},
               {"q 1e15 k 1e-15 v 1e-20 dout 1e10", {1e15f, 1e-15f, 1e-20f, 1e10f}},
               {"q 1e-15 k 1e15 v 1e15 dout 1e-30", {1e-15f, 1e15f, 1e15f, 1e-30f}},
               {"all logits the same"},
               {"mixed logits"},
               {"logits that rise or fall"},
               {"a long tail of keys"}};

static AttentionShape whole(int B, int T, int NH, int HS, bool causal = true, float scale = 0.f) {
    return {.B = B, .Tq = T, .Tk = T, .NH = NH, .HS = HS, .causal = causal, .scale = scale};
}

// The last Tq of Tk tokens are queries.
static AttentionShape queries_of(int B, int Tq, int Tk, int NH, int HS) {
    return {.B = B, .Tq = Tq, .Tk = Tk, .NH = NH, .HS = HS};
}

// The tensors of a problem have Tk tokens, of which the last Tq are the queries. So kernels get
// views with other memory before and between their rows.
struct Case {
    AttentionShape shape;
    Input input = Input::normal;
    float logit = 0;
    std::string text() const {
        return format("B%d Tq%d Tk%d NH%d HS%d %s scale %g, %s, logit %g, SEED=%llu", shape.B,
                      shape.Tq, shape.Tk, shape.NH, shape.HS, shape.causal ? "causal" : "full",
                      shape.resolved_scale(), kInputs[static_cast<int>(input)].text, logit,
                      static_cast<unsigned long long>(kSeed));
    }
};

// What else lies in memory: lse_rest, which is a result too, and the inputs.
enum { Rest = kTensors, Q, K, V, Dout, kPlaces };
using Result = std::array<std::vector<double>, kTensors + 1>;
struct Norms {
    double max = 0, l2 = 0;  // the largest absolute value, the L2 norm
};
using TensorNorms = std::array<Norms, kTensors>;

template <class X>
struct Problem {
    Case c;
    std::array<std::vector<X>, 4> in = {};  // q, k, v and dout, (B, Tk, NH, HS)
    Result ref = {};
    std::array<double, kTensors> tiny = {};         // of the rule in dev/common/bounds.h
    mutable std::optional<TensorNorms> naive = {};  // naive's errors
};

// NaN if any difference is NaN.
static Norms error(const std::vector<double>& got, const std::vector<double>& want) {
    if (got.size() != want.size())
        throw Error(format("%zu elements, expected %zu", got.size(), want.size()));
    double max = 0;
    double squares = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const double difference = got[i] - want[i];
        keep_worst(max, std::fabs(difference));
        squares += difference * difference;
    }
    return {max, std::sqrt(squares)};
}
static Norms norms(const std::vector<double>& x) {
    return error(x, std::vector<double>(x.size()));
}

// How tensors lie in memory: qkv and dqkv (B, T, 3, NH, HS), out and dout (B, T, NH, HS), lse and
// lse_rest (B, NH, T). With a gap q, k and v lie one behind the other, rows and sequences have
// other memory before them, and no two tensors' strides are the same. Without one all may hold
// several copies of the problem.
struct Layout {
    AttentionShape s;
    int T = s.Tk, gap = 0, copies = 1;

    size_t C() const { return size_t(s.NH) * s.HS; }
    size_t room() const { return s.B * (T * (C() + kPlaces * gap) + gap); }  // of a tensor like out
    size_t stats_room() const { return s.B * s.NH * (T + kPlaces * gap); }   // of lse
    PieceCall all() const {
        return {.q0 = T - s.Tq, .Tq = s.Tq, .k0 = 0, .Tk = T, .causal = s.causal};
    }
    PieceCall every_token() const { return {.q0 = 0, .Tq = T, .k0 = 0, .Tk = T, .causal = false}; }
    AttentionShape shape(const PieceCall& p) const {
        AttentionShape piece = s;
        piece.B = s.B * copies;
        piece.Tq = p.Tq;
        piece.Tk = p.Tk;
        piece.causal = p.causal;
        return piece;
    }
    // What a piece has of a tensor.
    template <class A>
    HeadsView<A> view(int tensor, A* x, const PieceCall& p) const {
        const size_t more = (tensor + 1) * gap;
        const size_t row = C() + more;
        const size_t batch = T * row + gap;
        const HeadsView<A> alone{.ptr = x + gap, .batch_stride = batch, .token_stride = row};
        if (tensor == Lse || tensor == Rest)
            return HeadsView<A>{.ptr = x, .batch_stride = T + more, .token_stride = 1}.from(p.q0);
        if (tensor == Out || tensor == Dout)
            return alone.from(p.q0);
        PackedHeads<A> all = packed(x, T, s);
        if (gap) {
            all = {.q = alone, .k = alone, .v = alone};
            all.k.ptr += room();
            all.v.ptr += 2 * room();
        }
        if (tensor == Q || tensor == Dq)
            return all.q.from(p.q0);
        return (tensor == K || tensor == Dk ? all.k : all.v).from(p.k0);
    }
    template <class A>
    RowStatsView<A> stats(int tensor, A* x, const PieceCall& p) const {
        return {view(tensor, x, p).ptr, view(tensor, x, p).batch_stride};
    }
    template <class A>  // from the first copy
    std::vector<double> take(int tensor, const A* x, const PieceCall& p) const {
        const bool stats = tensor == Lse || tensor == Rest;
        const int tokens = tensor == Dk || tensor == Dv ? p.Tk : p.Tq;
        const int rows = s.B * (stats ? s.NH : 1) * tokens;
        const HeadsView<const A> from = view(tensor, x, p);
        std::vector<double> taken;
        for (int row = 0; row < rows; row++)
            for (size_t i = 0; i < (stats ? 1 : C()); i++)
                taken.push_back(from.row(row / tokens, row % tokens, 0, 0)[i]);
        return taken;
    }
    // An input (B, T, NH, HS) goes to its place.
    template <class A, class X>
    void put(int tensor, A* x, const std::vector<X>& values) const {
        const HeadsView<A> to = view(tensor, x, every_token());
        for (int row = 0; row < s.B * T; row++)
            std::copy_n(&values[row * C()], C(), to.row(row / T, row % T, 0, 0));
    }
    template <class X, class Y>
    AttentionForward<X, Y> forward(const PieceCall& p, const X* qkv, Y* out, Acc<X>* lse) const {
        AttentionForward<X, Y> call{shape(p)};
        call.q = view(Q, qkv, p);
        call.k = view(K, qkv, p);
        call.v = view(V, qkv, p);
        call.out = view(Out, out, p);
        call.lse = stats(Lse, lse, p);
        return call;
    }
    template <class X, class Y>
    AttentionBackward<X, Y> backward(const PieceCall& p, const X* qkv, const X* dout, const X* out,
                                     const Acc<X>* lse, Y* dqkv) const {
        AttentionBackward<X, Y> call{shape(p)};
        call.q = view(Q, qkv, p);
        call.k = view(K, qkv, p);
        call.v = view(V, qkv, p);
        call.dout = view(Dout, dout, p);
        call.out = view(Out, out, p);
        call.lse = stats(Lse, lse, p);
        call.dq = view(Dq, dqkv, p);
        call.dk = view(Dk, dqkv, p);
        call.dv = view(Dv, dqkv, p);
        return call;
    }
};

// q_i = a(x_i w + noise), k_j = a(y_j w + noise). w is ±1s for each head, so S is x_i·y_j·logit
// plus noise of about 3. Constant inputs have no noise, and w = 1.
template <class X>
void make_large_logits(Problem<X>& p, std::mt19937_64& rng) {
    const AttentionShape& s = p.c.shape;
    const bool constant = p.c.input == Input::constant;
    const bool mixed = p.c.input == Input::mixed;
    const float a =
        std::sqrt(std::fabs(p.c.logit) / (s.resolved_scale() * static_cast<float>(s.HS)));
    const int T = p.c.shape.Tk;
    const float steps = static_cast<float>(std::max(2, T / 16) - 1);  // of a ramp
    const float noise = constant ? 0.f : 0.1f;
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform(-1.f, 1.f);
    std::vector<float> w(s.NH * s.HS);
    for (float& x : w)
        x = constant || uniform(rng) >= 0.f ? 1.f : -1.f;
    for (int row = 0; row < s.B * T * 3 * s.NH; row++) {  // of (B, T, 3, NH)
        const int h = row % s.NH;
        const int part = row / s.NH % 3;
        const int token = row / s.NH / 3;
        const int t = token % T;
        if (part == 2)
            continue;
        const bool key = part == 1;
        const int sixteenth = t / 16;
        float x = uniform(rng);
        if (constant)
            x = key && p.c.logit < 0 ? -1.f : 1.f;
        else if (mixed)
            x = key ? 0.75f + 0.25f * x : t == T - 1 ? -1.f : x;
        else if (key)
            x = std::min(static_cast<float>(sixteenth) / steps, 1.f) * 2.f - 1.f;
        else
            x = x < 0.f ? -1.f : 1.f;
        for (int d = 0; d < s.HS; d++)
            p.in[part][(size_t(token) * s.NH + h) * s.HS + d] =
                static_cast<X>(a * (x * w[h * s.HS + d] + noise * normal(rng)));
    }
}

// In the tail S = −15.5 for every key. 128 logits of N(0,1) have Σ exp S ≈ 211, of which a lane of
// flash_fp16x3 has a quarter. It adds 8 keys of a tile at a time: 8·exp(−15.5) ≈ 0.9·2⁻²⁵ · 211/4.
template <class X>
void make_tail(Problem<X>& p) {
    const AttentionShape& s = p.c.shape;
    const float q = 8;
    const float k = -15.5f / (s.resolved_scale() * q);
    for (int row = 0; row < s.B * s.Tk * s.NH; row++) {
        const bool in_tail = row / s.NH % s.Tk < s.Tk - 128;
        X* const key = &p.in[1][size_t(row) * s.HS];
        if (in_tail) {
            std::fill_n(key, s.HS, static_cast<X>(0.f));
            std::fill_n(&p.in[2][size_t(row) * s.HS], s.HS, static_cast<X>(0.f));
        }
        key[0] = static_cast<X>(in_tail ? k : 0.f);
        p.in[0][size_t(row) * s.HS] = static_cast<X>(q);
    }
}

// The problem without its result. Tokens that are no queries have a dout of 0. So run as a whole
// sequence it has the same results (see naive_errors).
template <class X>
Problem<X> inputs_of(const Case& c) {
    const AttentionShape& s = c.shape;
    const size_t C = size_t(s.NH) * s.HS;
    const size_t T = c.shape.Tk;
    const auto& input = kInputs[static_cast<int>(c.input)];
    std::seed_seq seed{kSeed, uint64_t(s.B), uint64_t(T), uint64_t(s.NH),
                       static_cast<uint64_t>(c.input)};
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> normal;
    Problem<X> p{c};
    for (auto& x : p.in)
        x.resize(s.B * T * C);
    for (size_t i = 0; i < s.B * T * 3 * C; i++) {  // of (B, T, 3, NH, HS)
        const size_t part = i / C % 3;
        const size_t token = i / C / 3;
        const float early = part == 1 && token % T < 32 ? input.early : 1.f;
        p.in[part][token * C + i % C] =
            static_cast<X>((normal(rng) + input.shift) * input.factors[part] * early);
    }
    for (X& x : p.in[3])
        x = static_cast<X>((normal(rng) + input.shift) * input.factors[3]);
    if (c.logit != 0)
        make_large_logits(p, rng);
    if (c.input == Input::tail)
        make_tail(p);
    for (size_t row = 0; row < s.B * T; row++)
        if (row % T < T - s.Tq)
            std::fill_n(&p.in[3][row * C], C, static_cast<X>(0.f));
    return p;
}

// Errors that another good kernel may make though a lucky naive one does not. The fp32 rounding
// error of a dot product a·b is about u|a||b|.
template <class X>
std::array<double, kTensors> tiny_errors(const Problem<X>& p) {
    const AttentionShape& s = p.c.shape;
    const int T = p.c.shape.Tk;
    const auto largest = [&](int i) {  // element, and norm of a row
        const std::vector<double> x(p.in[i].begin(), p.in[i].end());
        Norms of = {norms(x).max, 0};
        for (size_t row = 0; row < x.size(); row += s.HS)
            of.l2 = std::max(of.l2, norms({x.begin() + row, x.begin() + row + s.HS}).l2);
        return of;
    };
    const Norms q = largest(0);
    const Norms k = largest(1);
    const Norms v = largest(2);
    const Norms d_o = largest(3);
    const double scale = s.resolved_scale();
    const double dP = d_o.l2 * v.l2;
    const double S = scale * q.l2 * k.l2;
    constexpr double u = 0x1p-24;
    std::array<double, kTensors> tiny;
    for (int i = 0; i < kTensors; i++)
        tiny[i] = one_rounding<X>(i, norms(p.ref[i]).max);
    // A query that sees one key has dS = P∘(dP − D) = 0. Naive's D = rowsum(P∘dP) cancels exactly.
    // Flash's D = rowsum(dO∘O) is another dot product than dP, so the rounding errors of both stay.
    tiny[Dq] += scale * 2 * u * dP * k.max;
    tiny[Dk] += scale * 2 * u * dP * q.max;
    // With so few tokens naive's largest error is luck. So the error of an element of P, which is
    // u|S| and its rounding to X, is carried through.
    if (T <= 2)
        tiny[Lse] += u * S;
    // All keys are the same, and each row of dS sums to 0, so the exact dq is 0. The rounding of dS
    // stays.
    if (p.c.input == Input::constant)
        tiny[Dq] += kRoundoff<X> * scale * dP * k.max;
    if (T == 2) {
        const double P = kRoundoff<X> + u * S;
        tiny[Out] += P * v.max;
        tiny[Dq] += P * scale * dP * k.max;
        tiny[Dk] += P * scale * dP * q.max;
        tiny[Dv] += P * T * d_o.max;
    }
    return tiny;
}

// Each case is computed once, because the fp64 result is most of this program's time.
template <class X>
// by value, because g++ 13 takes a reference for one into the argument
const Problem<X>& problem(Case c) {
    static std::map<std::string, Problem<X>> cache;
    const auto found = cache.find(c.text());
    if (found != cache.end())
        return found->second;

    Problem<X> p = inputs_of<X>(c);
    Layout layout{c.shape};
    layout.s.scale = c.shape.resolved_scale();  // the fp32 number that kernels take
    const PieceCall all = layout.all();
    std::vector<double> qkv(3 * layout.room());
    std::vector<double> dout(layout.room());
    std::vector<double> out(layout.room());
    std::vector<double> lse(layout.stats_room());
    std::vector<double> dqkv(qkv.size());
    for (int i : {Q, K, V, Dout})
        layout.put(i, i == Dout ? dout.data() : qkv.data(), p.in[i - Q]);
    static const Cpu cpu;
    attention_forward(cpu, layout.forward<double>(all, qkv.data(), out.data(), lse.data()));
    attention_backward(cpu, layout.backward<double>(all, qkv.data(), dout.data(), out.data(),
                                                    lse.data(), dqkv.data()));
    for (int i = 0; i < kTensors; i++)
        p.ref[i] = layout.take(i, i == Out ? out.data() : i == Lse ? lse.data() : dqkv.data(), all);
    p.tiny = tiny_errors(p);
    return cache.emplace(c.text(), std::move(p)).first->second;
}

// -------------------------------------------------------------------------------------------------
// Runs, and the bounds of their errors

// Device copies of a problem's inputs, `copies` times over, and poisoned outputs. If Y is not X,
// forward runs twice, because backward takes an out of type X.
template <class X, class Y = X>
struct Run {
    static constexpr bool kTwo = !std::is_same_v<X, Y>, kHasRest = std::is_same_v<X, float>;
    const AttentionKernel<X>& kernel;
    const Problem<X>& p;
    const Layout layout;
    const int copies = layout.copies;
    const PieceCall all = layout.all();
    const AttentionShape s = layout.shape(all);
    const size_t n = copies * layout.room(), rows = copies * layout.stats_room();
    Buffer<X> qkv{"qkv", 3 * n}, dout{"dout", n}, out{"out", n},
        att{"att", kernel.saved_bytes(s) / sizeof(X)};
    Buffer<Y> out_y{"out of type Y", kTwo ? n : 0}, dqkv{"dqkv", 3 * n};
    Buffer<float> lse{"lse", rows}, lse_rest{"lse_rest", rows};
    Buffer<char> scratch{"scratch", kernel.scratch_bytes(s)};

    Run(const AttentionKernel<X>& kernel, const Problem<X>& p, int gap = 0, int copies = 1)
        : kernel(kernel), p(p), layout{.s = p.c.shape, .gap = gap, .copies = copies} {
        std::vector<X> qkvs(3 * layout.room(), static_cast<X>(NAN));
        std::vector<X> douts(layout.room(), static_cast<X>(NAN));
        for (int i : {Q, K, V, Dout})
            layout.put(i, i == Dout ? douts.data() : qkvs.data(), p.in[i - Q]);
        upload(qkv, qkvs);
        upload(dout, douts);
    }
    void upload(X* to, const std::vector<X>& one) {
        const size_t bytes = one.size() * sizeof(X);
        gpu().upload(to, one.data(), bytes);
        for (int copy = 1; copy < copies; copy++)
            CUDA_CHECK(cudaMemcpyAsync(to + copy * one.size(), to, bytes, cudaMemcpyDeviceToDevice,
                                       gpu().stream));
    }

    void forward() {
        for (const LateMemory* m : Memories{&out, &out_y, &lse, &lse_rest, &att})
            m->poison();
        if constexpr (kTwo)
            kernel.forward_fp32(gpu(), layout.forward<X, Y>(all, qkv, out_y, lse));
        auto call = layout.forward<X, X>(all, qkv, out, lse);
        call.att = att;
        if (kHasRest && kernel.supports.pieces)
            call.lse_rest = layout.stats<float>(Rest, lse_rest, all);
        kernel.forward(gpu(), call);
    }
    // The gradients' shares that belong to a piece. lse and out are those of whole rows.
    void backward(const PieceCall& piece, const Buffer<char>& scratch) {
        for (const LateMemory* m : Memories{&dqkv, &scratch})
            m->poison();
        auto call = layout.backward<X, Y>(piece, qkv, dout, out, lse, dqkv);
        call.att = att;
        call.scratch = scratch;
        if (kHasRest && piece.Tk < all.Tk)
            call.lse_rest = layout.stats<const float>(Rest, lse_rest, piece);
        if constexpr (kTwo)
            kernel.backward_fp32(gpu(), call);
        else
            kernel.backward(gpu(), call);
    }
    bool has_backward() const {
        return kernel.has_backward() && (s.Tq == s.Tk || kernel.supports.pieces);
    }
    void whole() {
        forward();
        if (has_backward())
            backward(all, scratch);
    }

    std::string text() const { return format("%s %s", kernel.name, p.c.text().c_str()); }
    // Takes what a piece wrote of a copy's tensors out of their buffer, and checks that nothing
    // else has been written.
    template <class A>
    void read(Result& to, std::initializer_list<int> tensors, const Buffer<A>& buffer,
              const PieceCall& piece, size_t copy = 0) const {
        const size_t size = buffer.bytes / sizeof(A) / copies;
        const std::vector<A> host = download<A>(buffer, copy * size, size);
        const auto count = [](const auto& x) {
            return std::count_if(x.begin(), x.end(),
                                 [](auto v) { return !std::isnan(static_cast<double>(v)); });
        };
        ptrdiff_t written = count(host);
        for (int i : tensors) {
            to[i] = layout.take(i, host.data(), piece);
            written -= count(to[i]);
        }
        if (written != 0)
            test::report(__FILE__, __LINE__,
                         format("%s: %td elements of %s outside of the view", text().c_str(),
                                written, buffer.name));
    }
    Result result(size_t copy = 0) const {
        Result r;
        read(r, {Out}, out, all, copy);
        read(r, {Lse}, lse, all, copy);
        read(r, {Rest}, lse_rest, all, copy);
        if (has_backward())
            read(r, {Dq, Dk, Dv}, dqkv, all, copy);
        return r;
    }
    auto bytes() const {
        std::vector<std::vector<char>> of;
        for (const LateMemory* m : Memories{&out, &out_y, &lse, &lse_rest, &dqkv})
            of.push_back(download<char>(*m, 0, m->bytes));
        return of;
    }
};

template <class X>
Result run(const AttentionKernel<X>& kernel, const Problem<X>& p, int gap = 0) {
    Run<X> r(kernel, p, gap);
    r.whole();
    return r.result();
}

// Naive's errors are computed only on demand, because compute-sanitizer finds races in cuBLAS,
// which naive multiplies with. Its backward takes whole sequences, in which only the last rows are
// the problem's.
template <class X>
const TensorNorms& naive_errors(const Problem<X>& p) {
    if (p.naive)
        return *p.naive;
    const AttentionShape& s = p.c.shape;
    Problem<X> w = p;
    w.c.shape.Tq = s.Tk;
    const Result got = run(attention_kernel<X>(gpu(), Attention::naive, s.HS), w);
    p.naive.emplace();
    for (int i = 0; i < kTensors; i++) {
        const int tokens = i >= Dk ? s.Tk : s.Tq;
        const PieceCall last{.q0 = s.Tk - tokens, .Tq = tokens, .k0 = 0, .Tk = 0, .causal = false};
        (*p.naive)[i] =
            error(Layout{w.c.shape}.take(i == Lse ? Lse : Out, got[i].data(), last), p.ref[i]);
    }
    return *p.naive;
}

// Naive's L2 error is relative to the tensor's norm. Its largest error is relative to the largest
// element. It has three parts: P's error, that of a dot product of T terms, and three roundings to
// X (P or dS, dP, the result). Naive may have twice their sum. An error ε of S makes a relative
// error e^ε − 1 of P. S is a dot product of HS terms, in error by about √HS·u|S|, and naive rounds
// it to X. Only an S near its row's lse has weight.
template <class X>
Norms naive_bound(const Problem<X>& p, int tensor) {
    const Norms ref = norms(p.ref[tensor]);
    const double lse = norms(p.ref[Lse]).max;
    const double tiny = p.tiny[tensor];
    const double of_S =
        (std::is_same_v<X, bf16> ? kRoundoff<X> : 0) + std::sqrt(p.c.shape.HS) * 0x1p-24;
    const double of_P = std::expm1(of_S * lse);
    const double l2 = (std::is_same_v<X, bf16> ? 2e-2 : 1e-5) + (lse > 64 ? of_P : 0);
    const double max = of_P + std::sqrt(p.c.shape.Tk) * 0x1p-24 + 3 * kRoundoff<X>;
    return {2 * max * ref.max + tiny, l2 * ref.l2 + tiny * std::sqrt(p.ref[tensor].size())};
}

template <class X>
Norms flash_bound(const AttentionKernel<X>& kernel, const Problem<X>& p, int tensor) {
    const Norms ref = norms(p.ref[tensor]);
    if (tensor == Lse && std::is_same_v<X, bf16>)
        return {bf16_lse_bound(ref.max), INFINITY};
    const ErrorBound k = error_bound(kernel, tensor, p.c.shape);
    const Norms naive = naive_errors(p)[tensor];
    const bool constant = p.c.input == Input::constant;
    // If all logits are equal, all P of a row are the same number. Its rounding does not average
    // out, and naive's error is luck, because 1/33 happens to be nearly exact.
    const double P = constant ? std::max(k.roundoff, 0x1p-23) : 0;
    const double one = std::max(P, roundoff<X>(k, tensor, naive.max, ref.max));
    const double tiny = p.tiny[tensor] + one * ref.max;
    // An exact naive's L2 error is luck. It is exact for T ≤ 2. If S is exact, only D's rounding is
    // left in dq and dk.
    const bool luck = p.c.shape.Tk <= 2 || (constant && (tensor == Dq || tensor == Dk));
    return {k.max * naive.max + tiny, luck ? INFINITY : k.l2 * naive.l2 + one * ref.l2};
}

// A rough bound is that for naive itself, which needs no run of naive. The sum of pieces may be in
// error by a tenth more, because sums have another order, and by its `rounding`.
template <class X>
void check_result(const AttentionKernel<X>& kernel, const Problem<X>& p, const Result& got,
                  bool rough = false, size_t pieces = 0, const TensorNorms& rounding = {}) {
    for (int i = 0; i < (got[Dq].empty() ? Dq : kTensors); i++) {
        const Norms e = error(got[i], p.ref[i]);
        const Norms bound = kernel.flash && !rough ? flash_bound(kernel, p, i) : naive_bound(p, i);
        const double max = (pieces ? 1.1 : 1) * bound.max + rounding[i].max;
        const double l2 = (pieces ? 1.1 : 1) * bound.l2 + rounding[i].l2;
        const std::string said = format(
            "%s %s, %zu pieces: %s: largest error %.3g, %.2f of %.3g; L2 error %.3g, %.2f of %.3g",
            kernel.name, p.c.text().c_str(), pieces, kNames[i], e.max, e.max / max, max, e.l2,
            e.l2 / l2, l2);
        if (!(e.max <= max && e.l2 <= l2))
            test::report(__FILE__, __LINE__, said);
        if (std::getenv("ACCURACY"))
            std::printf("  %s\n", said.c_str());
    }
}
constexpr int kGap = 32;
// Queries and keys that differ in number come with a gap.
template <class X>
void check_call(const AttentionKernel<X>& kernel, const Case& c, bool rough = false) {
    const Problem<X>& p = problem<X>(c);
    check_result(kernel, p, run(kernel, p, c.shape.Tq == c.shape.Tk ? 0 : kGap), rough);
}

// Cuts a whole problem. A causal piece must end where its queries do. So the keys from the last cut
// below its first query on stay together. All of its queries see the keys before.
static std::vector<PieceCall> pieces_of(const AttentionShape& s, std::vector<int> q_cuts,
                                        const std::vector<int>& k_cuts) {
    std::vector<PieceCall> pieces;
    q_cuts.push_back(s.Tq);
    int q0 = 0;
    for (int q1 : q_cuts) {
        int k0 = 0;
        for (int cut : k_cuts) {
            if (s.causal && cut > q0)
                break;
            pieces.push_back({.q0 = q0, .Tq = q1 - q0, .k0 = k0, .Tk = cut - k0, .causal = false});
            k0 = cut;
        }
        const int k_end = s.causal ? q1 : s.Tk;
        pieces.push_back({.q0 = q0, .Tq = q1 - q0, .k0 = k0, .Tk = k_end - k0, .causal = s.causal});
        q0 = q1;
    }
    return pieces;
}

// Forward in fp32 is what the whole call rounds. Backward's shares add up to the whole gradients.
// Each may have an fp32 rounding more.
template <class X>
void check_pieces(const AttentionKernel<X>& kernel, const Case& c, const std::vector<int>& q_cuts,
                  const std::vector<int>& k_cuts, bool rough = false) {
    const Problem<X>& p = problem<X>(c);
    Run<X, float> r(kernel, p, kGap);
    r.forward();
    Result got;
    r.read(got, {Lse}, r.lse, r.all);
    r.read(got, {Rest}, r.lse_rest, r.all);
    if constexpr (r.kTwo) {
        Result narrow;
        r.read(got, {Out}, r.out_y, r.all);
        r.read(narrow, {Out}, r.out, r.all);
        std::vector<double> rounded = got[Out];
        for (double& x : rounded)
            x = static_cast<X>(static_cast<float>(x));
        CHECK(rounded == narrow[Out]);
    } else {
        const auto& of = kernel.unchecked;
        CHECK(of.forward_fp32 == of.forward && of.backward_fp32 == of.backward);
        r.read(got, {Out}, r.out, r.all);
        // at most. Its rounding and that of m·ln 2 may be in the rest
        const double log_l = std::log(c.shape.Tk);
        for (size_t i = 0; i < got[Rest].size(); i++)
            CHECK_NEAR(got[Rest][i], 0, 0x1p-23 * (std::fabs(got[Lse][i]) + log_l));
        CHECK(norms(got[Rest]).max > 0);
    }

    const std::vector<PieceCall> pieces = pieces_of(c.shape, q_cuts, k_cuts);
    const size_t C = r.layout.C();
    TensorNorms rounding = {};
    for (const PieceCall& piece : pieces) {
        Buffer<char> scratch("a piece's scratch", kernel.scratch_bytes(r.layout.shape(piece)));
        r.backward(piece, scratch);
        Result share;
        r.read(share, {Dq, Dk, Dv}, r.dqkv, piece);
        for (int i : {Dq, Dk, Dv}) {
            const size_t first = i == Dq ? piece.q0 : piece.k0;
            const size_t rows = i == Dq ? piece.Tq : piece.Tk;
            got[i].resize(p.ref[i].size());
            for (size_t e = 0; e < share[i].size(); e++)
                got[i][e + (e / C / rows * (r.layout.T - rows) + first) * C] += share[i][e];
            const Norms size = norms(share[i]);
            rounding[i].max += 0x1p-24 * size.max;
            rounding[i].l2 += 0x1p-24 * size.l2;
        }
    }
    check_result(kernel, p, got, rough, pieces.size(), rounding);
}

// -------------------------------------------------------------------------------------------------
// The properties that are tested of every kernel

// Walks through the product of shapes and inputs. The counters' periods are coprime, so every pair
// of values meets. Long sequences come with few heads, because the reference's time grows with
// B·NH·T²·HS.
template <class X>
void accuracy(const AttentionKernel<X>& kernel) {
    if (!kernel.has_backward())
        std::printf("  %s has no backward: out and lse only\n", kernel.name);
    const bool flash_in_bf16 = kernel.flash && std::is_same_v<X, bf16>;
    std::vector<Case> all = {{whole(3, 65, 25, 64)},
                             {whole(3, 129, 25, 64), Input::shifted},
                             {whole(1, 200, 2, 64, true, 0.3f)},
                             {whole(1, 200, 2, 128, false, 0.02f), Input::large_q}};
    const std::pair<int, int> few[] = {{1, 1}, {1, 2}, {2, 1}};
    const std::pair<int, int> many[] = {{1, 1}, {3, 12}, {1, 25}, {3, 1}, {1, 12}};
    int n = 0;
    for (int T : {1, 2, 63, 64, 65, 127, 129, 255, 1000, 1023, 1024, 1025})
        for (int HS : {64, 128})
            for (bool causal : {true, false}) {
                const auto [B, NH] = T > 129 ? few[n / 4 % 3] : many[n % 5];
                all.push_back({whole(B, T, NH, HS, causal), static_cast<Input>(n % 3)});
                n++;
            }
    for (int HS : {64, 128}) {
        for (bool causal : {true, false}) {
            all.push_back({whole(1, 128, 3, HS, causal)});  // exactly a tile or two of every kernel
            // flash_bf16_sm90 walks from the last keys to the first and keeps its first maximum
            // until a sum grows out of range. Other bounds are not made for the rounding of logits
            // of several hundred.
            if (flash_in_bf16)
                all.push_back({whole(2, 450, 3, HS, causal), Input::early_keys});
        }
        for (Input input : {Input::magnitudes, Input::reversed})
            all.push_back({whole(1, 200, 2, HS), input});
        // flash_bf16_sm90's backward has fewer heads in work at a time, and later ones take earlier
        // ones' place.
        if (flash_in_bf16)
            all.push_back({whole(HS == 64 ? 40 : 20, 129, 25, HS)});
    }
    for (const Case& c : all)
        check_call(kernel, c);
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
                    const Case c{
                        whole(several, T, several, HS, causal, 8.f / static_cast<float>(HS)), input,
                        logit};
                    check_call(kernel, c);
                    if (kernel.supports.pieces)
                        check_pieces(kernel, c, {T / 3}, {T / 4});
                }
}

template <class X>
void extremes(const AttentionKernel<X>& kernel) {
    for (int HS : {64, 128}) {
        Problem<X> p = inputs_of<X>({whole(2, 130, 3, HS)});
        for (std::vector<X>& x : p.in)
            std::fill(x.begin(), x.end(), static_cast<X>(0.f));
        const Result zeros = run(kernel, p);
        for (int i : {Out, Dq, Dk, Dv})
            CHECK(norms(zeros[i]).max == 0);
        for (size_t i = 0; i < zeros[Lse].size(); i++)
            CHECK_NEAR(zeros[Lse][i], std::log(1. + i % 130), 1e-6);
    }
}

// One NaN stands in a row of q, k, v or dout of one head. Every element that depends on it is NaN.
// Other heads, other sequences, and rows farther away than any tile is long, have the bits that
// they have without it. In between a tile may carry it, because on tensor cores a masked P of 0
// times NaN is NaN. naive's tile is the head.
template <class X>
void one_nan(const AttentionKernel<X>& kernel) {
    constexpr int T = 1000;
    constexpr int NH = 3;
    constexpr int at = 500;
    constexpr int b = 1;
    constexpr int h = 1;
    constexpr int element = 5;
    const int near = kernel.flash ? 256 : T;
    using Rows = std::pair<int, int>;  // the first and the last
    constexpr Rows none{2 * T, -T};
    constexpr Rows row{at, at};
    constexpr Rows later{at, T - 1};
    constexpr Rows earlier{0, at};
    constexpr Rows all{0, T - 1};
    const struct {
        const char* of;
        // which rows of out, lse, dq, dk, dv depend on row `at`, in causal attention
        Rows reach[kTensors];
    } inputs[] = {{"q", {row, row, row, earlier, earlier}},
                  // the last of the rows of P that are NaN sees every key
                  {"k", {later, later, later, all, all}},
                  {"v", {later, none, later, all, none}},
                  {"dout", {none, none, row, earlier, earlier}}};
    for (int HS : {64, 128})
        for (int which = 0; which < 8; which++) {
            const bool causal = which < 4;
            const auto& [of, reach] = inputs[which % 4];
            Problem<X> p = inputs_of<X>({whole(2, T, NH, HS, causal)});
            const Result clean = run(kernel, p);
            p.in[which % 4][((b * T + at) * NH + h) * HS + element] = static_cast<X>(NAN);
            const Result got = run(kernel, p);
            for (int i = 0; i < kTensors; i++) {
                const auto [first, last] =
                    causal || reach[i].first >= reach[i].second ? reach[i] : all;
                // lse is (B, NH, T), the others are (B, T, NH, HS)
                const int width = i == Lse ? 1 : HS;
                for (int e = 0; e < static_cast<int>(got[i].size()); e++) {
                    const int r = e / width;
                    const int t = i == Lse ? r % T : r / NH % T;
                    const int head = i == Lse ? r / T % NH : r % NH;
                    const bool here = head == h && r / NH / T == b;
                    const bool must =
                        here && t >= first && t <= last && (e % width == element || i == Lse);
                    const bool may = here && t > first - near && t < last + near;
                    if (must ? std::isnan(got[i][e]) : may || got[i][e] == clean[i][e])
                        continue;
                    test::report(__FILE__, __LINE__,
                                 format("%s %s, NaN in %s: %s[%d] is %g, not %g", kernel.name,
                                        p.c.text().c_str(), of, kNames[i], e, got[i][e],
                                        must ? NAN : clean[i][e]));
                    break;
                }
            }
        }
}

// Every run writes the bytes of the first. Before the last one all memory is poison for a tenth of
// a second. So work on another stream reads NaN, or what it writes is lost.
template <class X, class Y>
void check_repeats(const AttentionKernel<X>& kernel, const AttentionShape& shape, int count) {
    const Problem<X> p = inputs_of<X>({shape});
    Run<X, Y> r(kernel, p);
    r.whole();
    const auto first = r.bytes();
    for (int i = 1; i <= count; i++) {
        if (i == count)
            late(gpu(), 100'000'000);
        r.whole();
        if (r.bytes() == first)
            continue;
        const char* when = i == count ? ", whose inputs came late on the device's stream" : "";
        return test::report(__FILE__, __LINE__,
                            format("%s: other bytes in run %d%s", r.text().c_str(), i + 1, when));
    }
}
template <class X>
void determinism(const AttentionKernel<X>& kernel) {
    const std::pair<AttentionShape, int> runs[] = {{whole(2, 1000, 12, 64), 20},
                                                   {whole(1, 1000, 5, 128, false), 20},
                                                   {whole(3, 130, 5, 64), 1000}};
    for (const auto& [shape, count] : runs) {
        check_repeats<X, X>(kernel, shape, count);
        if (kernel.supports.pieces)
            check_repeats<X, float>(kernel, shape, 3);
    }
}

// 160 tiles of 128 keys in all. So some of 132 multiprocessors get two, and more would queue for a
// turn. It runs many times, because who gets which must not matter.
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
            for (const auto& [B, Tq, NH] : std::vector<std::array<int, 3>>{
                     {3, 1, 12}, {2, 63, 3}, {2, 65, 3}, {1, 1000, 1}}) {
                // In bf16 the rounding of O is an error of D, which in rows of so many shifted keys
                // adds up in dQ.
                const int inputs = Tk > 1024 ? 2 : 3;
                const Input input = static_cast<Input>(n++ % inputs);
                check_call(kernel, {queries_of(B, Tq, Tk, NH, HS), input});
            }
        AttentionShape full = queries_of(1, 200, 1025, 2, HS);
        full.causal = false;
        check_call(kernel, {full, Input::shifted});
        AttentionShape scaled = queries_of(2, 130, 200, 3, HS);
        scaled.scale = 0.3f;
        check_call(kernel, {scaled});
    }
}

// A call with fp32 results where X is bf16. Its gradients are those of all keys.
template <class X>
void check_fp32_call(const AttentionKernel<X>& kernel, const Case& c) {
    const Problem<X>& p = problem<X>(c);
    Run<X, float> r(kernel, p, kGap);
    r.whole();
    Result got = r.result();
    r.read(got, {Out}, r.out_y, r.all);
    check_result(kernel, p, got);
}

template <class X>
void check_forward(const AttentionKernel<X>& kernel, const Case& c) {
    const Problem<X>& p = problem<X>(c);
    Run<X> r(kernel, p, kGap);
    r.forward();
    Result got;
    r.read(got, {Out}, r.out, r.all);
    r.read(got, {Lse}, r.lse, r.all);
    check_result(kernel, p, got);
}

// Tk − Tq around multiples of the tiles and of what a warp owns, so that the diagonal runs through
// their corners. A kernel that takes a tile too many for unmasked, or one too few for visible, is
// wrong there in a single element of the tile.
template <class X>
void shifts(const AttentionKernel<X>& kernel) {
    int n = 0;
    for (int HS : {64, 128})
        for (int shift :
             {14, 15, 16, 17, 30, 31, 32, 33, 62, 63, 64, 65, 94, 126, 127, 128, 129, 190, 254}) {
            const int Tq = n++ % 2 ? 130 : 200;
            const Case c{queries_of(2, Tq, Tq + shift, 3, HS)};
            check_call(kernel, c);
            if (std::is_same_v<X, bf16> && kernel.supports.pieces)
                check_fp32_call(kernel, c);
        }
    for (int HS : {64, 128})
        for (int Tk : {31, 32, 33, 63, 64, 65, 127, 128, 129})  // as in generation
            check_forward(kernel, {queries_of(4, 1, Tk, 25, HS)});
}

// Forward alone, because backward makes a row's P add up to 1 whatever lse is.
template <class X>
void tail(const AttentionKernel<X>& kernel) {
    if constexpr (std::is_same_v<X, bf16>) {
        SKIP("%s: bf16 has too few digits for the tail", kernel.name);
    } else {
        for (int HS : {64, 128})
            check_forward(kernel, {{1, 64, 8192, 1, HS}, Input::tail});
    }
}

template <class X>
void pieces(const AttentionKernel<X>& kernel) {
    const std::pair<std::vector<int>, std::vector<int>> cuts[] = {{{}, {}},
                                                                  {{128}, {128}},
                                                                  {{128, 165, 229}, {37, 101, 172}},
                                                                  {{100, 200}, {60, 120, 180, 240}},
                                                                  {{1, 3, 299}, {1, 298}}};
    for (int HS : {64, 128}) {
        for (bool causal : {true, false})
            for (const auto& [q_cuts, k_cuts] : cuts)
                check_pieces(kernel, {whole(2, 300, 3, HS, causal)}, q_cuts, k_cuts);
        check_pieces(kernel, {whole(2, 300, 3, HS, true, 0.3f)}, {128}, {100});
        check_pieces(kernel, {whole(2, 300, 3, HS, false, 0.02f), Input::large_q}, {100, 200},
                     {37, 101});
    }
    check_pieces(kernel, {whole(1, 256, 12, 64), Input::large_q}, {64, 128, 192}, {128});
    check_pieces(kernel, {whole(1, 256, 12, 64), Input::shifted}, {128}, {64, 128, 192});
}

// Chunks that divide T and chunks that do not, also with more queries than keys (attention/ring).
template <class X>
void chunks(const AttentionKernel<X>& kernel) {
    for (int HS : {64, 128})
        for (bool causal : {true, false}) {
            const Whole<X, Cuda> all(gpu(), whole(2, 1000, 3, HS, causal), 1, 1, 0,
                                     Attention{kernel.name});
            for (const auto& [q_chunk, k_chunk] : std::vector<std::pair<int, int>>{
                     {500, 500}, {125, 250}, {128, 128}, {1000, 37}, {77, 1000}})
                check_chunks(all, q_chunk, k_chunk);
        }
}

// flash_fp32's tiles for 64 KB of shared memory, which is what Turing gives a block, and the Error
// if there is less.
template <class X>
void small_tiles(const AttentionKernel<X>& kernel) {
    if (std::string(kernel.name) != "flash_fp32")
        SKIP("%s has one size of tiles", kernel.name);
    const struct Restore {
        int bytes = gpu().block_smem;
        ~Restore() { gpu().block_smem = bytes; }
    } restore;
    for (int HS : {64, 128})
        for (bool causal : {true, false}) {
            const Problem<X>& p = problem<X>({whole(2, 300, 3, HS, causal)});
            gpu().block_smem = restore.bytes;
            const Result large = run(kernel, p);
            gpu().block_smem = 64 << 10;
            // another order of sums
            if (restore.bytes >= 112 << 10)
                CHECK(run(kernel, p)[Dk] != large[Dk]);
            gpu().block_smem = 48 << 10;
            CHECK_ERROR(run(kernel, p), "shared memory");
        }
    gpu().block_smem = 64 << 10;
    for (auto* property : {accuracy<X>, logits<X>, queries<X>, pieces<X>})
        property(kernel);
}

// Small enough for compute-sanitizer, because racecheck of `pieces` with flash_fp16x3 takes longer
// than four minutes. But it has so many heads that the persistent blocks of sm_90a wrap around
// their stages.
template <class X>
void few(const AttentionKernel<X>& kernel) {
    const int NH = kernel.min_sm == 90 ? 150 : 2;
    for (int HS : {64, 128}) {
        check_call(kernel, {whole(1, 100, NH, HS)}, true);
        check_call(kernel, {queries_of(1, 70, 200, NH, HS)}, true);
        if (kernel.supports.pieces)
            check_pieces(kernel, {whole(1, 200, NH, HS)}, {130}, {71}, true);
    }
}

// What a kernel does not support gives an Error. What gives none must be right.
template <class X>
void limits(const AttentionKernel<X>& kernel) {
    for (const AttentionShape& shape :
         {whole(2, 100, 3, 80), whole(1, 70, 2, 32), whole(2731, 2, 25, 64),
          whole(65537, 1, 1, 64)}) {  // more than a grid's y or z
        const Problem<X>& p = problem<X>({shape});
        Result got;
        const std::string error = test::error_of([&] { got = run(kernel, p); });
        if (error.empty())
            check_result(kernel, p, got);
        gpu().sync();  // an Error from a launcher leaves the device fit for work
    }
    // A kernel that has no results in fp32 says so, and so does the dispatcher.
    if (kernel.supports.pieces)
        return;
    const AttentionShape s = whole(1, 64, 1, 64);
    CHECK_ERROR(attention_forward(gpu(), Attention{kernel.name}, AttentionForward<X, float>{s}),
                kernel.name);
    CHECK_ERROR(attention_backward(gpu(), Attention{kernel.name}, AttentionBackward<X, float>{s}),
                kernel.name);
}

// Runs one sequence several times over, and looks at some of the copies.
template <class X, int T, int HS, int Copies>
void many(const AttentionKernel<X>& kernel) {
    AttentionShape s = whole(1, T, 25, HS);
    const Problem<X>& p = problem<X>({s});
    s.B = Copies;
    const size_t bytes =
        8 * Copies * p.in[0].size() * sizeof(X) + kernel.saved_bytes(s) + kernel.scratch_bytes(s);
    if (bytes > gpu().total_bytes / 10 * 8)
        SKIP("needs %.0f GiB of device memory", static_cast<double>(bytes) / (1 << 30));
    Run<X> r(kernel, p, 0, Copies);
    r.whole();
    for (int copy : {0, 1, Copies / 3, Copies / 2, Copies - 2, Copies - 1})
        check_result(kernel, p, r.result(copy));
}
constexpr int kBig = (size_t{1} << 31) / (65 * 25 * 64);  // so many copies of out have 2³¹ elements

// -------------------------------------------------------------------------------------------------
// Which kernel the trainer takes. dev/test_gpt2 has the layer itself, in a model's gradients and in
// generation

// Scratch that is enough for a call without a mask is enough with one, and with fewer queries or
// keys. A ring's memory relies on that (attention/ring/pieces.h).
TEST(scratch_grows_with_the_call) {
    const auto check = [](const auto& kernels, int HS, int NH, int T) {
        for (int i = 0; i < kernels.count; i++)
            for (const auto& [Tq, Tk] : std::vector<std::pair<int, int>>{
                     {T, T}, {T / 2, T}, {T, T / 2}, {T / 2, T / 2}, {1, T}})
                for (bool causal : {false, Tq <= Tk}) {
                    const auto& kernel = kernels.begin[i];
                    AttentionShape s = queries_of(1, Tq, Tk, NH, HS);
                    s.causal = causal;
                    CHECK(kernel.scratch_bytes(s) <=
                          kernel.scratch_bytes(whole(1, T, NH, HS, false)));
                }
    };
    for (int HS : {64, 128})
        for (int NH : {1, 12, 32})
            for (int T = 512; T <= 65536; T += T / 2) {
                check(attention_kernels<float>(), HS, NH, T);
                check(attention_kernels<bf16>(), HS, NH, T);
            }
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
            const AttentionShape s = whole(2, 100, 12, 64);
            CHECK(attention_saved_bytes<X>(dev, kind, s) == k->saved_bytes(s) &&
                  (!k->flash || k->saved_bytes(s) == 0));
            CHECK(attention_scratch_bytes<X>(dev, kind, s) == k->scratch_bytes(s));
            const auto takes = [&](bool training, bool ring) {
                return test::error_of([&] { check_attention<X>(dev, kind, 64, {training, ring}); })
                    .empty();
            };
            CHECK(takes(false, false));
            CHECK(takes(true, false) == k->has_backward());
            CHECK(takes(false, true) == k->supports.pieces);
        }
        check_attention<X>(dev, Attention::flash, 64, {.training = true, .context_parallel = true});
        const AttentionKernel<X>& flash = attention_kernel<X>(dev, Attention::flash, 64);
        CHECK(flash.flash && flash.runs_on(dev) &&
              !attention_kernel<X>(dev, Attention::naive, 64).flash);
        CHECK_ERROR(attention_kernel<X>(dev, Attention::flash, 80), "80");
    };
    check(float{});
    check(bf16{});
    CHECK_ERROR(attention_kernel<float>(dev, Attention{"flash_bf16"}, 64), "--precision bf16");
    CHECK_ERROR(attention_kernel<bf16>(dev, Attention{"flash_simple"}, 64), "--precision fp32");
    CHECK_ERROR(attention_kernel<bf16>(dev, Attention{"magic"}, 64), "no such kernel");
}

// -------------------------------------------------------------------------------------------------
// Calls that are refused. These tests need no GPU, because no refused call comes to one

// A device that nobody may touch.
static const Cuda& nobody() {
    alignas(Cuda) static const char memory[sizeof(Cuda)] = {};
    return *reinterpret_cast<const Cuda*>(memory);
}

// A call's tensors at addresses that are far apart. Nothing is there. `number` is a tensor's
// enumerator.
template <class A>
static A* address(int number) {
    return reinterpret_cast<A*>(uintptr_t(number + 1) << 40);
}
enum { Att = kPlaces, ScratchBytes };

template <class X, class Y = X>
struct Calls {
    AttentionForward<X, Y> forward;
    AttentionBackward<X, Y> backward;

    // Of packed tensors, as the trainer's, or with a gap.
    explicit Calls(const AttentionShape& s, int gap = 0) {
        const Layout layout{.s = s, .T = std::max(s.Tq, s.Tk), .gap = gap};
        PieceCall piece = layout.all();
        piece.Tk = s.Tk;
        Acc<X>* const lse = address<Acc<X>>(Lse);
        forward = layout.forward<X, Y>(piece, address<X>(Q), address<Y>(Out), lse);
        forward.att = address<X>(Att);
        backward = layout.backward<X, Y>(piece, address<X>(Q), address<X>(Dout), address<X>(Out),
                                         lse, address<Y>(Dq));
        backward.att = address<X>(Att);
        backward.scratch = address<char>(ScratchBytes);
    }
};

template <class X>
struct Refusals {
    const AttentionKernel<X>& kernel;
    const AttentionLimits limits = kernel.limits();
    using Forward = AttentionForward<X>;
    using Backward = AttentionBackward<X>;

    template <class Call>
    void accept(const Call& call) const {
        const std::string error = test::error_of([&] { check_call(limits, call); });
        if (!error.empty())
            test::report(kernel.name, call.s.Tq, "refused: " + error);
    }
    void refuse(const Forward& call, const char* why) const {
        CHECK_ERROR(kernel.forward(nobody(), call), why);
    }
    void refuse(const Backward& call, const char* why) const {
        if (kernel.has_backward())
            CHECK_ERROR(kernel.backward(nobody(), call), why);
    }
    // A good call, or forward or backward alone, after `change`.
    template <class Change>
    void both(const char* why, Change change) const {
        forward(why, change);
        backward(why, change);
    }
    template <class Change>
    void forward(const char* why, Change change) const {
        Forward call = Calls<X>(good).forward;
        change(call);
        why ? refuse(call, why) : accept(call);
    }
    template <class Change>
    void backward(const char* why, Change change) const {
        Backward call = Calls<X>(good).backward;
        change(call);
        why ? refuse(call, why) : accept(call);
    }

    static constexpr int NH = 3, HS = 64, C = NH * HS, T = 48;
    const AttentionShape good = whole(2, T, NH, HS);
    static constexpr const char* kAccepted = nullptr;

    void shapes() const {
        both(kAccepted, [](auto&) {});
        both("Tq 49", [](auto& c) { c.s.Tq = T + 1; });  // a causal mask needs Tq ≤ Tk
        both("B 0", [](auto& c) { c.s.B = 0; });
        both("NH 0", [](auto& c) { c.s.NH = 0; });
        both("Tq 0", [](auto& c) { c.s.Tq = 0; });
        both("Tk -1", [](auto& c) { c.s.Tk = -1; });
        both("head size 18", [](auto& c) { c.s.HS = 18; });
        both("head size 0", [](auto& c) { c.s.HS = 0; });
        both(kernel.supports.any_head_size ? kAccepted : "head size 32",
             [](auto& c) { c.s.HS = 32; });
        both("scale -1", [](auto& c) { c.s.scale = -1; });

        // Fewer queries than keys, more of them, and single rows, whose strides nobody follows.
        const AttentionShape fewer_queries = queries_of(2, 40, 48, NH, HS);
        AttentionShape fewer_keys = queries_of(2, 48, 40, NH, HS);
        fewer_keys.causal = false;
        for (const AttentionShape& s : {good, fewer_queries, fewer_keys})
            for (int gap : {0, kGap}) {
                const Calls<X> calls(s, gap);
                accept(calls.forward);
                if (kernel.supports.pieces || s.Tq == s.Tk)
                    accept(calls.backward);
                else
                    refuse(calls.backward, "whole sequences");
            }
        both(kAccepted, [](auto& c) {
            c.s.B = c.s.Tq = c.s.Tk = 1;
            for (auto* x : {&c.q, &c.k, &c.v})
                x->batch_stride = x->token_stride = 0;
            c.out.batch_stride = c.out.token_stride = 0;
        });
    }

    void views() const {
        both("q is null", [](auto& c) { c.q.ptr = nullptr; });
        both("k is null", [](auto& c) { c.k.ptr = nullptr; });
        both("v is null", [](auto& c) { c.v.ptr = nullptr; });
        both("out is null", [](auto& c) { c.out.ptr = nullptr; });
        both("lse is null", [](auto& c) { c.lse.ptr = nullptr; });
        backward("dout is null", [](auto& c) { c.dout.ptr = nullptr; });
        backward("dq is null", [](auto& c) { c.dq.ptr = nullptr; });
        backward("dk is null", [](auto& c) { c.dk.ptr = nullptr; });
        backward("dv is null", [](auto& c) { c.dv.ptr = nullptr; });
        if (kernel.has_backward() && kernel.scratch_bytes(good) > 0)
            backward("scratch is null", [](auto& c) { c.scratch = nullptr; });
        both(kernel.flash ? kAccepted : "att is null", [](auto& c) { c.att = nullptr; });

        both("rows of q", [](auto& c) { c.q.ptr += 1; });  // these are not aligned
        both("rows of k", [](auto& c) { c.k.token_stride += 1; });
        both("rows of v", [](auto& c) { c.v.batch_stride += 1; });
        both("rows of out", [](auto& c) { c.out.ptr += 1; });
        backward("rows of dout", [](auto& c) { c.dout.token_stride += 1; });
        backward("rows of dq", [](auto& c) { c.dq.ptr += 1; });
        backward("rows of dk", [](auto& c) { c.dk.token_stride += 1; });
        backward("rows of dv", [](auto& c) { c.dv.batch_stride += 1; });
        backward("scratch", [](auto& c) { c.scratch = static_cast<char*>(c.scratch) + 4; });

        both("rows of q", [](auto& c) { c.q.token_stride = C - 8; });  // these overlap each other
        both("rows of k", [](auto& c) { c.k.token_stride = 0; });
        both("rows of v", [](auto& c) { c.v.batch_stride = 0; });
        both("rows of q", [](auto& c) { c.q.batch_stride = 16 * c.q.token_stride; });
        both("rows of out", [](auto& c) { c.out.batch_stride = (T - 1) * C; });
        both("lse", [](auto& c) { c.lse.head_stride = T - 1; });
        both(kAccepted, [](auto& c) { c.lse.head_stride = T; });
    }

    void overlaps() const {
        forward("overlap", [](auto& c) { c.out.ptr = const_cast<X*>(c.q.ptr); });
        forward("overlap",
                [](auto& c) { c.out.ptr = const_cast<X*>(c.v.row(1, T - 1, NH - 1, HS)); });
        // Right behind v.
        forward(kAccepted, [](auto& c) { c.out.ptr = const_cast<X*>(c.v.row(1, T - 1, NH, HS)); });
        forward("overlap",
                [](auto& c) { c.lse.ptr = reinterpret_cast<float*>(c.out.row(1, T - 1, 0, HS)); });
        forward(kernel.flash ? kAccepted : "overlap",
                [](auto& c) { c.att = const_cast<X*>(c.k.ptr); });
        backward("overlap", [](auto& c) { c.dq.ptr = const_cast<X*>(c.q.ptr); });
        backward("overlap", [](auto& c) { c.dq.ptr = const_cast<X*>(c.k.ptr); });
        backward("overlap", [](auto& c) { c.dk.ptr = c.dv.ptr; });
        backward("overlap", [](auto& c) { c.dk.ptr += 8; });  // into dv's columns
        backward("overlap", [](auto& c) { c.dv.ptr = const_cast<X*>(c.dout.ptr); });
        backward("overlap", [](auto& c) { c.dv.ptr = const_cast<X*>(c.out.row(0, 3, 0, HS)); });
        backward("overlap", [](auto& c) { c.scratch = c.dk.ptr; });
        backward("overlap", [](auto& c) { c.scratch = const_cast<float*>(c.lse.ptr); });
        backward("overlap",
                 [](auto& c) { c.lse.ptr = reinterpret_cast<float*>(c.dv.row(1, 0, 0, HS)); });

        // All of a forward in one tensor (B, T, q k v out, NH, HS), and out a little to the left or
        // right.
        const auto beside = [](auto& c, size_t column) {
            X* const base = address<X>(Q);
            const auto place = [=](auto& view, size_t at) {
                view = {.ptr = base + at, .batch_stride = T * 4 * C, .token_stride = 4 * C};
            };
            place(c.q, 0);
            place(c.k, C);
            place(c.v, 2 * C);
            place(c.out, column);
        };
        forward(kAccepted, [=](auto& c) { beside(c, 3 * C); });
        forward("overlap", [=](auto& c) { beside(c, 3 * C - 8); });
        forward("overlap", [=](auto& c) { beside(c, 3 * C + 8); });  // reaches the next token's q
        // dk and dv with sequences side by side in a token, as a ring's (T, B, K and V, NH, HS).
        const auto token_major = [](auto& c, size_t column) {
            c.dk = {.ptr = address<X>(Dk), .batch_stride = 2 * C, .token_stride = 4 * C};
            c.dv = {.ptr = address<X>(Dk) + column, .batch_stride = 2 * C, .token_stride = 4 * C};
        };
        backward(kAccepted, [=](auto& c) { token_major(c, C); });
        backward("overlap", [=](auto& c) { token_major(c, 2 * C); });  // dk of the next sequence
        // dk and dv of a sequence behind each other, (B, K and V, T, NH, HS).
        const auto behind = [](auto& c, size_t elements) {
            c.dk = {.ptr = address<X>(Dk), .batch_stride = 2 * T * C, .token_stride = C};
            c.dv = {.ptr = address<X>(Dk) + elements, .batch_stride = 2 * T * C, .token_stride = C};
        };
        backward(kAccepted, [=](auto& c) { behind(c, T * C); });
        backward("overlap", [=](auto& c) { behind(c, T * C - 8); });
        backward("overlap", [=](auto& c) { behind(c, T * C + C); });  // dk of the next sequence
    }

    void rests() const {
        const auto with_rest = [](auto& c) { c.lse_rest = {address<float>(Rest), size_t(T)}; };
        both(limits.supports.lse_rest ? kAccepted : "lse_rest", with_rest);
        if (!limits.supports.lse_rest)
            return;
        both("lse_rest", [](auto& c) { c.lse_rest = {address<float>(Rest), size_t(T - 1)}; });
        forward("overlap", [](auto& c) { c.lse_rest = c.lse; });
        backward(kAccepted, [](auto& c) { c.lse_rest = c.lse; });  // both are read
    }

    // Results in fp32.
    void fp32() const {
        const auto& launchers = kernel.unchecked;
        CHECK((launchers.forward_fp32 != nullptr) == kernel.supports.pieces);
        CHECK((launchers.backward_fp32 != nullptr) == kernel.supports.pieces);

        const Calls<X, float> calls(good);
        if (kernel.supports.pieces) {
            accept(calls.forward);
            accept(calls.backward);
            AttentionBackward<X, float> call = calls.backward;
            call.dq.ptr = const_cast<float*>(call.lse.ptr);
            CHECK_ERROR(kernel.backward_fp32(nobody(), call), "overlap");
            return;
        }
        CHECK_ERROR(kernel.forward_fp32(nobody(), calls.forward), kernel.name);
        CHECK_ERROR(kernel.backward_fp32(nobody(), calls.backward), kernel.name);
        if (!kernel.has_backward())
            CHECK_ERROR(kernel.backward(nobody(), Calls<X>(good).backward), "no backward");
    }
};
template <class X>
static void check_refusals(void (Refusals<X>::*of)() const) {
    const AttentionKernels<X> kernels = attention_kernels<X>();
    for (int i = 0; i < kernels.count; i++)
        (Refusals<X>{kernels.begin[i]}.*of)();
}
TEST(refused_shapes) {
    check_refusals(&Refusals<float>::shapes);
    check_refusals(&Refusals<bf16>::shapes);
}
TEST(refused_views) {
    check_refusals(&Refusals<float>::views);
    check_refusals(&Refusals<bf16>::views);
}
TEST(refused_overlaps) {
    check_refusals(&Refusals<float>::overlaps);
    check_refusals(&Refusals<bf16>::overlaps);
}
TEST(refused_rests_of_lse) {
    check_refusals(&Refusals<float>::rests);
    check_refusals(&Refusals<bf16>::rests);
}
TEST(refused_on_the_cpu) {
    const Calls<double> calls(whole(2, 48, 3, 64));
    AttentionForward<double> forward = calls.forward;
    forward.out.ptr = const_cast<double*>(forward.k.ptr);
    CHECK_ERROR(attention_forward(Cpu(1), forward), "overlap");
    AttentionBackward<double> backward = calls.backward;
    backward.s.Tq = 49;
    CHECK_ERROR(attention_backward(Cpu(1), backward), "Tq 49");
}
TEST(refused_fp32_results) {
    check_refusals(&Refusals<float>::fp32);
    check_refusals(&Refusals<bf16>::fp32);
}

// -------------------------------------------------------------------------------------------------
// What pieces are made of (attention/ring/pieces.h), in rows of any width

// The same numbers in X on the device and in fp64 on the host.
template <class X>
struct Twin {
    std::vector<double> host;
    Buffer<X> device;

    Twin(const char* name, const std::vector<double>& numbers)
        : host(numbers), device(name, numbers.size()) {
        std::vector<X> values;
        for (double x : numbers)
            values.push_back(static_cast<X>(static_cast<float>(x)));
        gpu().upload(device, values.data(), values.size() * sizeof(X));
        gpu().sync();
    }
    // Compares all of it, also what is between the rows. A tolerance is relative to numbers above
    // 1.
    void check(const std::string& what, double tolerance) const {
        const std::vector<X> got = download<X>(device, 0, host.size());
        for (size_t i = 0; i < host.size(); i++) {
            const double x = static_cast<float>(got[i]);
            const double allowed = tolerance * std::max(1., std::fabs(host[i]));
            const bool right =
                std::isnan(host[i]) ? std::isnan(x) : std::fabs(x - host[i]) <= allowed;
            if (right)
                continue;
            test::report(__FILE__, __LINE__,
                         format("%s %s[%zu] is %.9g, expected %.9g", what.c_str(), device.name, i,
                                x, host[i]));
            return;
        }
    }
};
static std::vector<double> poison(size_t n) {
    return std::vector<double>(n, NAN);
}

// (B, T) rows of C with a gap behind each, or (T, B) rows.
struct Rows {
    int B;
    int T;
    size_t C;
    size_t gap;
    bool token_major = false;
    size_t row() const { return C + gap; }
    size_t size() const { return B * T * row(); }
    template <class A>
    HeadsView<A> of(A* x) const {
        if (token_major)
            return {.ptr = x, .batch_stride = row(), .token_stride = B * row()};
        return {.ptr = x, .batch_stride = T * row(), .token_stride = row()};
    }
};

constexpr double kSums = 4e-6;  // a few fp32 roundings of numbers up to 5
template <class Y>
constexpr double kRounded = std::is_same_v<Y, bf16> ? 1. / 256 : kSums;

template <class Y>
static void check_merge(const AttentionShape& s, bool in_place) {
    const size_t C = size_t(s.NH) * s.HS;
    const Rows of_sum{s.B, s.Tq, C, 8};
    const Rows of_piece{s.B, s.Tq, C, 16};
    const Rows of_dst{s.B, s.Tq, C, 24};
    const size_t head = s.Tq + 3;  // from one head's statistics to the next's
    const size_t stats = s.B * s.NH * head;
    Twin<float> sum("sum", normal<float>(of_sum.size(), 1));
    Twin<float> piece("piece", normal<float>(of_piece.size(), 2));
    Twin<float> lse("lse", normal<float>(stats, 3, 3));
    Twin<float> piece_lse("piece's lse", normal<float>(stats, 4, 3));
    Twin<float> rest("rest",
                     normal<float>(stats, 5, 1e-5));  // larger than one can be, so that it counts
    Twin<float> piece_rest("piece's rest", normal<float>(stats, 6, 1e-5));
    Twin<Y> dst("dst", poison(of_dst.size()));

    const auto merge_on = [&](const auto& dev, auto to, const auto& of, auto in) {
        using A = decltype(in);
        const Piece<A> a{
            .o = of_sum.of<A>(of(sum)), .lse = {of(lse), head}, .rest = {of(rest), head}};
        const Piece<A> b{.o = of_piece.of<A>(of(piece)),
                         .lse = {of(piece_lse), head},
                         .rest = {of(piece_rest), head}};
        if constexpr (std::is_same_v<decltype(to), HeadsView<A>>)
            merge(dev, s, in_place ? a.o : to, a, b);
        else
            merge(dev, s, to, a, b);
    };
    const auto on_host = [](auto& x) { return x.host.data(); };
    const auto on_device = [](auto& x) { return static_cast<float*>(x.device); };
    merge_on(Cpu(1), of_dst.of(dst.host.data()), on_host, double{});
    merge_on(late(gpu()), of_dst.of<Y>(dst.device), on_device, float{});

    const std::string what =
        format("merge to %s, NH %d, HS %d:", name_of(dtype_of<Y>()), s.NH, s.HS);
    sum.check(what, kSums);
    dst.check(what, kRounded<Y>);
    piece.check(what, 0);
    piece_lse.check(what, 0);
    piece_rest.check(what, 0);

    // lse and its rest are one number in twice the digits. The CPU's lse has all of them.
    const std::vector<float> high = download<float>(lse.device, 0, stats);
    const std::vector<float> low = download<float>(rest.device, 0, stats);
    for (size_t i = 0; i < stats; i++) {
        const bool is_row = i % head < size_t(s.Tq);
        const double unit = 0x1p-24 * std::max(1., std::fabs(double(high[i])));
        if (is_row && !(std::fabs(low[i]) <= 2 * unit))
            CHECK_NEAR(low[i], 0, 2 * unit);
        CHECK_NEAR(double(high[i]) + low[i], lse.host[i] + rest.host[i], 4e-7);
    }
}
// Widths below, at and above what a block covers at once, which is 1,024. A d12 has 768, and twice
// that for dK and dV.
constexpr std::pair<int, int> kWidths[] = {{1, 64},  {5, 64},   {3, 128}, {8, 64},
                                           {9, 64},  {12, 64},  {16, 64}, {17, 64},
                                           {24, 64}, {13, 128}, {40, 64}, {50, 64}};
TEST(merge_of_wide_rows) {
    for (const auto& [NH, HS] : kWidths)
        for (const AttentionShape& s : {whole(2, 5, NH, HS), whole(1, 1, NH, HS)}) {
            check_merge<float>(s, false);
            check_merge<float>(s, true);
            check_merge<bf16>(s, false);
        }
}

// The sum of `addends` tensors of Z. In place dst is the first of them.
template <class Y, class Z>
static void check_add(const AttentionShape& s, int addends, bool token_major,
                      bool in_place = false) {
    using Value = std::remove_const_t<Z>;
    const size_t C = size_t(s.NH) * s.HS;
    const auto rows = [&](size_t gap) { return Rows{s.B, s.Tq, C, gap, token_major}; };
    const Rows of_a = rows(8);
    const Rows of_b = rows(16);
    const Rows of_c = rows(24);
    const Rows of_dst = rows(32);
    Twin<Value> a("a", normal<Value>(of_a.size(), 1));
    Twin<Value> b("b", normal<Value>(of_b.size(), 2));
    Twin<Value> c("c", normal<Value>(of_c.size(), 3));
    Twin<Y> dst("dst", poison(of_dst.size()));

    const auto add_on = [&](const auto& dev, auto to, auto a, auto b, auto c) {
        using Addend = decltype(a);
        if (addends < 2)
            b = Addend{};
        if (addends < 3)
            c = Addend{};
        if constexpr (std::is_same_v<decltype(to), Addend>)
            add(dev, s, in_place ? a : to, a, b, c);
        else
            add(dev, s, to, a, b, c);
    };
    add_on(Cpu(1), of_dst.of(dst.host.data()), of_a.of(a.host.data()), of_b.of(b.host.data()),
           of_c.of(c.host.data()));
    add_on(late(gpu()), of_dst.of<Y>(dst.device), of_a.of<Z>(a.device), of_b.of<Z>(b.device),
           of_c.of<Z>(c.device));

    const std::string what =
        format("add of %d %s to %s, NH %d, HS %d%s:", addends, name_of(dtype_of<Value>()),
               name_of(dtype_of<Y>()), s.NH, s.HS, token_major ? ", token-major" : "");
    dst.check(what, kRounded<Y>);
    a.check(what, kSums);
    b.check(what, 0);
    c.check(what, 0);
}
TEST(add_of_wide_rows) {
    for (const auto& [NH, HS] : kWidths)
        for (bool token_major : {false, true}) {
            const AttentionShape s = whole(2, 5, NH, HS);
            for (int addends : {1, 2, 3}) {
                check_add<float, float>(s, addends, token_major);
                check_add<float, float>(s, addends, token_major, true);
                check_add<bf16, float>(s, addends, token_major);
            }
            check_add<float, const float>(s, 1, token_major);
            check_add<bf16, const bf16>(s, 1, token_major);
        }
}

// -------------------------------------------------------------------------------------------------
// Rings (attention/ring), with the kernel that --attention flash names on this GPU. dev/test_ring
// has the CPU's

TEST(ring_of_threads) {
    for (const AttentionShape& s :
         {whole(2, 48 * 17, 2, 64, true, 0.2f), whole(2, 48 * 22, 2, 128)})
        for (const double q_sigma : {1., 3.}) {
            check_local_rings<float>(gpu(), s, q_sigma, 0);
            check_local_rings<bf16>(gpu(), s, q_sigma, 0);
        }
}
// Wider than a block of merge's and add's threads covers at once, as rows of d36 and d48 are.
TEST(wide_ring_of_threads) {
    check_local_rings<float>(gpu(), whole(1, 48 * 8, 17, 64), 1, 0);
    check_local_rings<bf16>(gpu(), whole(1, 48 * 8, 17, 64), 1, 0);
}
TEST(ring_errors_do_not_grow_on_a_gpu) {
    check_local_rings<float>(gpu(), whole(1, 2048, 4, 64), 1, 0, 5);
    check_local_rings<bf16>(gpu(), whole(1, 2048, 4, 64), 1, 0, 5);
}

// -------------------------------------------------------------------------------------------------
// One test per kernel and property

template <class X>
struct Property {
    const char* name;
    void (*check)(const AttentionKernel<X>&);
    bool needs_fp32 = false;  // calls with results in fp32
};
template <class X>
constexpr Property<X> kProperties[] = {
    {"accuracy", accuracy<X>},  // out, lse, dq, dk, dv on the inputs and shapes that find bugs
    {"logits", logits<X>},      // of up to ±200, of one size, mixed and rising, whole and in pieces
    {"extremes", extremes<X>},  // zeros
    {"nan", one_nan<X>},  // one NaN reaches what depends on it, and no other head or distant row
    {"small tiles", small_tiles<X>},  // flash_fp32's, for GPUs with less shared memory
    {"determinism", determinism<X>},  // the same bytes from every run, all on the device's stream
    {"queries", queries<X>},          // fewer than keys, in views
    {"shifts", shifts<X>},            // the diagonal in every place of a tile
    {"tail", tail<X>},                // thousands of keys of tiny weight
    {"pieces", pieces<X>, true},      // shares of pieces add up to the whole
    {"chunks", chunks<X>, true},      // pieces forward and backward, merged and added up
    {"large", large<X>, true},        // more work than multiprocessors, in 20 runs
    {"few", few<X>},                  // a little of queries and pieces, for compute-sanitizer
    {"limits", limits<X>},            // what is not supported gives an Error, never a wrong result
    {"big", many<X, 65, 64, kBig / 3 + 2>},  // more than 2³¹ elements of qkv and dqkv
    {"big out", many<X, 65, 64, kBig + 2>},  // also of out, dout and dq, if the GPU has the memory
    // The heads are so many and so long that flash_bf16_sm90 takes them in groups and uses a place
    // in dQ's sum twice.
    {"groups", many<X, 1040, 128, 5>}};

// A test is a plain function, so its number is a template parameter, of all kernels' properties in
// a row.
constexpr int kRoom = 6;  // for this many kernels of a precision
template <class X, int I = 0>
void add_tests() {
    constexpr int number = I / std::size(kProperties<X>);
    constexpr int which = I % std::size(kProperties<X>);
    if (number == attention_kernels<X>().count)
        return;
    if constexpr (number < kRoom) {
        static const std::string name =
            format("%s %s %s", attention_kernels<X>().begin[number].name, name_of(dtype_of<X>()),
                   kProperties<X>[which].name);
        const auto run = [] {
            const AttentionKernel<X>& kernel = attention_kernels<X>().begin[number];
            const Property<X>& property = kProperties<X>[which];
            const int sm = gpu().sm;
            if (!kernel.runs_on(gpu()))
                SKIP("%s needs sm_%d, this GPU is sm_%d", kernel.name, kernel.min_sm, sm);
            if (property.needs_fp32 && !kernel.supports.pieces)
                SKIP("%s takes whole sequences only", kernel.name);
            property.check(kernel);
        };
        test::cases().push_back({name.c_str(), run});
        add_tests<X, I + 1>();
    } else
        throw Error("test_attention: more kernels than tests, raise kRoom");
}

TEST_LIMIT(600);  // references of long sequences take long

int main(int argc, char** argv) {
    add_tests<float>();
    add_tests<bf16>();
    return test::main(argc, argv);
}
