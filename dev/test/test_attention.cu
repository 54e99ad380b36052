// Tests every attention kernel of the table against the fp64 reference. kProperties at the end
// lists what is tested of each. Other tests are about the choice of a kernel, calls that are
// refused, and sequences in pieces.
//
// The rule of dev/common/bounds.h allows an error of at most some multiple of naive's. naive
// itself, the yardstick, has bounds of its own (naive_bound). ACCURACY=1 in the environment prints
// every error that is compared with a bound.
//
// Every Buffer is allocated between two guards and starts as NaN, as the guards do
// (dev/test/late.h). So an element that is not written, scratch that is not cleared and a read past
// the end all show as NaN, and a write past the end changes a guard.
//
// Run: ./dev/test_attention [part of a test's name, e.g. flash_bf16]
// SEED=n in the environment chooses other random numbers.
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

static uint64_t seed_from_environment() {
    const char* seed = std::getenv("SEED");
    return seed ? std::strtoull(seed, nullptr, 10) : 1;
}
static const uint64_t kSeed = seed_from_environment();

// The device of all tests, in strict fp32.
static Cuda& gpu() {
    Cuda& dev = device_or_skip<OwnStream>();
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

// The first three are kDistributions of dev/common/bounds.h. The others:
//   early_keys  the first 32 keys are 60 times as large
//   magnitudes  q and dout are very large, k and v very small
//   reversed    q and dout are very small, k and v very large
//   constant    every logit is Case::logit. For ±128 and ±200 it is so exactly if scale·HS is 8,
//               because q and k are then ±4 and ±5.
//   mixed       a row's logits are of any size up to ±Case::logit, and of one sign. The last row's
//               are negative, and so is its lse. A kernel could take that for the lse of rows
//               beyond Tq, where S is 0, and P = exp(−lse) would be infinite.
//   ramp        logits of up to ±Case::logit rise along the keys, in steps of 16 keys, in half of
//               the rows, and fall in the others. So the maximum rises by hundreds whichever way a
//               kernel walks.
//   tail        the last 128 keys have nearly all of the weight, and thousands of others the same
//               tiny weight each. What a tile of those adds to a row's sum of P is just below half
//               a unit in the sum's last place. So a sum that starts with the last keys loses all
//               others, 1e-5 of itself, unless it keeps what its additions lose. Their values are
//               0, because a sum of P V that starts with the last keys would lose them, too.
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

static const Distribution kInputs[] = {
    kDistributions[0],
    kDistributions[1],
    kDistributions[2],
    {.name = "early_keys", .text = "first keys x60"},
    {.name = "magnitudes",
     .text = "q 1e15 k 1e-15 v 1e-20 dout 1e10",
     .factor = {1e15f, 1e-15f, 1e-20f, 1e10f}},
    {.name = "reversed",
     .text = "q 1e-15 k 1e15 v 1e15 dout 1e-30",
     .factor = {1e-15f, 1e15f, 1e15f, 1e-30f}},
    {.name = "constant", .text = "all logits the same"},
    {.name = "mixed", .text = "mixed logits"},
    {.name = "ramp", .text = "logits that rise or fall"},
    {.name = "tail", .text = "a long tail of keys"},
};

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

// The tensors of a call: those of dev/common/bounds.h, then lse_rest, which is a result too, and
// the inputs.
enum { Rest = kTensors, Q, K, V, Dout, kCallTensors };
constexpr bool is_row_statistic(int tensor) {
    return tensor == Lse || tensor == Rest;
}

using Result = std::array<std::vector<double>, Rest + 1>;
struct Norms {
    double max = 0;  // the largest absolute value
    double l2 = 0;
};
using TensorNorms = std::array<Norms, kTensors>;

template <class X>
struct Problem {
    Case c;
    std::array<std::vector<X>, 4> inputs = {};  // q, k, v and dout, (B, Tk, NH, HS)
    Result ref = {};
    TensorNorms ref_norms = {};
    std::array<double, kTensors> tiny = {};         // of the rule in dev/common/bounds.h
    mutable std::optional<TensorNorms> naive = {};  // naive's errors

    std::vector<X>& input(int tensor) { return inputs[tensor - Q]; }
    const std::vector<X>& input(int tensor) const { return inputs[tensor - Q]; }
};

// Of got - want. NaN if any difference is NaN.
static Norms error(const std::vector<double>& got, const std::vector<double>& want) {
    if (got.size() != want.size())
        throw Error(format("%zu elements, expected %zu", got.size(), want.size()));
    ErrorStats errors;
    for (size_t i = 0; i < got.size(); i++)
        errors.add(got[i], want[i]);
    return {.max = errors.largest, .l2 = errors.l2()};
}

// Of `count` elements from x on.
template <class X>
Norms norms(const X* x, size_t count) {
    ErrorStats sizes;
    for (size_t i = 0; i < count; i++)
        sizes.add(static_cast<double>(x[i]), 0);
    return {.max = sizes.largest, .l2 = sizes.l2()};
}
static Norms norms(const std::vector<double>& x) {
    return norms(x.data(), x.size());
}

// Copies of fewer elements are left to one thread: it is done before all cores are awake. (nvcc
// sees no use in a pragma.)
[[maybe_unused]] constexpr size_t kWorthAllCores = 1 << 20;

// How tensors are laid out in memory: qkv and dqkv (B, T, 3, NH, HS), out and dout (B, T, NH, HS),
// lse and lse_rest (B, NH, T).
//
// With a gap, q, k and v are three tensors one after the other, there is other memory before rows
// and sequences, and no two tensors have the same strides. Without a gap, a buffer may hold several
// copies of the problem.
struct Layout {
    AttentionShape s;
    int T = s.Tk;
    int gap = 0;
    int copies = 1;

    size_t C() const { return size_t(s.NH) * s.HS; }

    // Elements of a tensor like out, and of one like lse, with the widest gaps of all tensors.
    size_t room() const { return s.B * (T * (C() + kCallTensors * gap) + gap); }
    size_t stats_room() const { return s.B * s.NH * (T + kCallTensors * gap); }

    // The call of the problem: its queries and all keys.
    PieceCall all() const {
        return {.q0 = T - s.Tq, .Tq = s.Tq, .k0 = 0, .Tk = T, .causal = s.causal};
    }
    // A piece whose views of q, out and the like have every token, not only the queries.
    PieceCall every_token() const { return {.q0 = 0, .Tq = T, .k0 = 0, .Tk = T, .causal = false}; }
    AttentionShape shape(const PieceCall& p) const {
        AttentionShape piece = s;
        piece.B = s.B * copies;
        piece.Tq = p.Tq;
        piece.Tk = p.Tk;
        piece.causal = p.causal;
        return piece;
    }

    // A piece's part of a tensor, whose buffer starts at x. The gap after each row grows with the
    // tensor's number. In a view of lse each head counts as a sequence, a row is one element, and
    // the gap comes after the last row of a head.
    template <class A>
    HeadsView<A> view(int tensor, A* x, const PieceCall& p) const {
        const size_t row_gap = (tensor + 1) * gap;
        if (is_row_statistic(tensor)) {
            const size_t head_stride = T + row_gap;
            return HeadsView<A>{.ptr = x, .batch_stride = head_stride, .token_stride = 1}.from(
                p.q0);
        }

        const size_t row_stride = C() + row_gap;
        const HeadsView<A> alone{
            .ptr = x + gap, .batch_stride = T * row_stride + gap, .token_stride = row_stride};
        if (tensor == Out || tensor == Dout)
            return alone.from(p.q0);

        PackedHeads<A> all = packed(x, T, s);
        if (gap > 0) {
            all = {.q = alone, .k = alone, .v = alone};
            all.k.ptr += room();
            all.v.ptr += 2 * room();
        }
        if (tensor == Q || tensor == Dq)
            return all.q.from(p.q0);
        if (tensor == K || tensor == Dk)
            return all.k.from(p.k0);
        return all.v.from(p.k0);
    }
    template <class A>
    RowStatsView<A> stats(int tensor, A* x, const PieceCall& p) const {
        const HeadsView<A> heads = view(tensor, x, p);
        return {heads.ptr, heads.batch_stride};
    }

    // The elements of a piece's part of a tensor, in its first copy.
    template <class A>
    std::vector<double> elements(int tensor, const A* x, const PieceCall& p) const {
        const int tokens = is_of_keys(tensor) ? p.Tk : p.Tq;
        const int sequences = is_row_statistic(tensor) ? s.B * s.NH : s.B;
        const size_t width = is_row_statistic(tensor) ? 1 : C();
        const HeadsView<const A> from = view(tensor, x, p);
        const int rows = sequences * tokens;
        std::vector<double> values(rows * width);
#pragma omp parallel for if (values.size() >= kWorthAllCores)
        for (int row = 0; row < rows; row++) {
            const A* const first = from.row(row / tokens, row % tokens, 0, 0);
            std::copy_n(first, width, &values[row * width]);
        }
        return values;
    }

    // Writes the values (B, T, NH, HS) of an input into its buffer.
    template <class A, class X>
    void store(int tensor, A* x, const std::vector<X>& values) const {
        const HeadsView<A> to = view(tensor, x, every_token());
#pragma omp parallel for if (values.size() >= kWorthAllCores)
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

// The x of make_large_logits() for one query or key. `random` is uniform in [-1, 1).
static float logit_factor(const Case& c, bool is_key, int t, float random) {
    const int T = c.shape.Tk;
    if (c.input == Input::constant)
        return is_key && c.logit < 0 ? -1.f : 1.f;
    if (c.input == Input::mixed) {
        if (is_key)
            return 0.75f + 0.25f * random;
        const bool is_last = t == T - 1;
        return is_last ? -1.f : random;
    }
    // A ramp: keys rise from -1 to 1, and the sign of a query turns that round.
    if (!is_key)
        return random < 0.f ? -1.f : 1.f;
    const int step = t / 16;
    const int last_step = std::max(2, T / 16) - 1;
    const float height = static_cast<float>(step) / static_cast<float>(last_step);
    return std::min(height, 1.f) * 2.f - 1.f;
}

// q_i = a(x_i w + noise), k_j = a(x_j w + noise). w is ±1s for each head, so S is x_i·x_j·|logit|
// plus noise of about 3. Constant inputs have no noise, and w = 1.
template <class X>
void make_large_logits(Problem<X>& p, std::mt19937_64& rng) {
    const AttentionShape& s = p.c.shape;
    const int T = s.Tk;
    const bool constant = p.c.input == Input::constant;
    const float a =
        std::sqrt(std::fabs(p.c.logit) / (s.resolved_scale() * static_cast<float>(s.HS)));
    const float noise = constant ? 0.f : 0.1f;
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform(-1.f, 1.f);

    std::vector<float> w(s.NH * s.HS);
    for (float& sign : w)
        sign = constant || uniform(rng) >= 0.f ? 1.f : -1.f;

    for (int row = 0; row < s.B * T * 3 * s.NH; row++) {  // of (B, T, 3, NH)
        const int h = row % s.NH;
        const int tensor = Q + (row / s.NH) % 3;
        const int token = row / s.NH / 3;
        if (tensor == V)
            continue;
        const bool is_key = tensor == K;
        const float x = logit_factor(p.c, is_key, token % T, uniform(rng));
        X* const head = &p.input(tensor)[(size_t(token) * s.NH + h) * s.HS];
        for (int d = 0; d < s.HS; d++)
            head[d] = static_cast<X>(a * (x * w[h * s.HS + d] + noise * normal(rng)));
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
        const int t = (row / s.NH) % s.Tk;
        const bool in_tail = t < s.Tk - 128;
        X* const query = &p.input(Q)[size_t(row) * s.HS];
        X* const key = &p.input(K)[size_t(row) * s.HS];
        X* const value = &p.input(V)[size_t(row) * s.HS];
        if (in_tail) {
            std::fill_n(key, s.HS, static_cast<X>(0.f));
            std::fill_n(value, s.HS, static_cast<X>(0.f));
        }
        key[0] = static_cast<X>(in_tail ? k : 0.f);
        query[0] = static_cast<X>(q);
    }
}

// The problem without its result. Tokens that are no queries have a dout of 0. So the problem has
// the same results if it is run as whole sequences (see naive_errors).
template <class X>
Problem<X> inputs_of(const Case& c) {
    const AttentionShape& s = c.shape;
    const size_t C = size_t(s.NH) * s.HS;
    const size_t T = s.Tk;
    const Distribution& input = kInputs[static_cast<int>(c.input)];
    std::seed_seq seed{kSeed, uint64_t(s.B), uint64_t(T), uint64_t(s.NH),
                       static_cast<uint64_t>(c.input)};
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> normal;

    Problem<X> p{c};
    for (auto& x : p.inputs)
        x.resize(s.B * T * C);
    for (size_t i = 0; i < s.B * T * 3 * C; i++) {  // of (B, T, 3, NH, HS)
        const size_t part = (i / C) % 3;
        const size_t token = i / C / 3;
        const bool is_key = part == K - Q;
        const bool early = c.input == Input::early_keys && is_key && token % T < 32;
        const float x = (normal(rng) + input.shift[part]) * input.factor[part];
        p.inputs[part][token * C + i % C] = static_cast<X>(early ? 60.f * x : x);
    }
    for (X& x : p.input(Dout))
        x = static_cast<X>((normal(rng) + input.shift[3]) * input.factor[3]);

    if (c.logit != 0)
        make_large_logits(p, rng);
    if (c.input == Input::tail)
        make_tail(p);

    for (size_t row = 0; row < s.B * T; row++) {
        const bool is_query = row % T >= T - s.Tq;
        if (!is_query)
            std::fill_n(&p.input(Dout)[row * C], C, static_cast<X>(0.f));
    }
    return p;
}

// Errors that another good kernel may make although a lucky naive one does not. The fp32 rounding
// error of a dot product a·b is about u|a||b|.
template <class X>
std::array<double, kTensors> tiny_errors(const Problem<X>& p) {
    const AttentionShape& s = p.c.shape;
    const int T = s.Tk;
    const auto largest = [&](int tensor) {  // the largest element, and the largest norm of a row
        const std::vector<X>& x = p.input(tensor);
        Norms norm;
        for (size_t row = 0; row < x.size(); row += s.HS) {
            const Norms of_row = norms(&x[row], s.HS);
            keep_worst(norm.max, of_row.max);
            keep_worst(norm.l2, of_row.l2);
        }
        return norm;
    };
    const Norms q = largest(Q);
    const Norms k = largest(K);
    const Norms v = largest(V);
    const Norms dout = largest(Dout);
    const double scale = s.resolved_scale();
    const double largest_dP = dout.l2 * v.l2;
    const double largest_S = scale * q.l2 * k.l2;
    constexpr double u = 0x1p-24;

    std::array<double, kTensors> tiny;
    for (int i = 0; i < kTensors; i++)
        tiny[i] = one_rounding<X>(i, p.ref_norms[i].max);

    // A query that sees one key has dS = P∘(dP − D) = 0. Naive's D = rowsum(P∘dP) cancels exactly.
    // Flash's D = rowsum(dO∘O) is another dot product than dP, so the rounding errors of both stay.
    tiny[Dq] += scale * 2 * u * largest_dP * k.max;
    tiny[Dk] += scale * 2 * u * largest_dP * q.max;

    // All keys are the same, and each row of dS sums to 0, so the exact dq is 0. The rounding of dS
    // stays.
    if (p.c.input == Input::constant)
        tiny[Dq] += kRoundoff<X> * scale * largest_dP * k.max;

    // With so few tokens naive's largest error is luck. So the error of an element of P, which is
    // u|S| and its rounding to X, is carried through.
    if (T <= 2)
        tiny[Lse] += u * largest_S;
    if (T == 2) {
        const double P_error = kRoundoff<X> + u * largest_S;
        tiny[Out] += P_error * v.max;
        tiny[Dq] += P_error * scale * largest_dP * k.max;
        tiny[Dk] += P_error * scale * largest_dP * q.max;
        tiny[Dv] += P_error * T * dout.max;
    }
    return tiny;
}

// The fp64 results of a problem.
template <class X>
Result reference_result(const Problem<X>& p) {
    Layout layout{p.c.shape};
    layout.s.scale = p.c.shape.resolved_scale();  // the fp32 number that kernels take
    const PieceCall all = layout.all();
    std::vector<double> qkv(3 * layout.room());
    std::vector<double> dout(layout.room());
    std::vector<double> out(layout.room());
    std::vector<double> lse(layout.stats_room());
    std::vector<double> dqkv(qkv.size());
    for (int i : {Q, K, V, Dout})
        layout.store(i, i == Dout ? dout.data() : qkv.data(), p.input(i));

    const Cpu cpu;  // with all cores, whatever an earlier Cpu had
    attention_forward(cpu, layout.forward<double>(all, qkv.data(), out.data(), lse.data()));
    attention_backward(cpu, layout.backward<double>(all, qkv.data(), dout.data(), out.data(),
                                                    lse.data(), dqkv.data()));

    Result result;
    result[Out] = layout.elements(Out, out.data(), all);
    result[Lse] = layout.elements(Lse, lse.data(), all);
    for (int i : {Dq, Dk, Dv})
        result[i] = layout.elements(i, dqkv.data(), all);
    return result;
}

// Each case is computed once, because the fp64 result is most of this program's time. The case is
// passed by value, because g++ 13 takes the result for a reference into the argument.
template <class X>
const Problem<X>& problem(Case c) {
    static std::map<std::string, Problem<X>> cache;
    const auto found = cache.find(c.text());
    if (found != cache.end())
        return found->second;

    Problem<X> p = inputs_of<X>(c);
    p.ref = reference_result(p);
    for (int i = 0; i < kTensors; i++)
        p.ref_norms[i] = norms(p.ref[i]);
    p.tiny = tiny_errors(p);
    return cache.emplace(c.text(), std::move(p)).first->second;
}

// -------------------------------------------------------------------------------------------------
// Runs, and the bounds of their errors

// A problem on the device: `copies` copies of its inputs, and poisoned outputs.
//
// Y is the type of the results. If it is not X, forward runs twice, because backward takes an out
// of type X.
template <class X, class Y = X>
struct Run {
    static constexpr bool kMixedTypes = !std::is_same_v<X, Y>;
    static constexpr bool kHasRest = std::is_same_v<X, float>;

    const AttentionKernel<X>& kernel;
    const Problem<X>& p;
    const Layout layout;
    const int copies = layout.copies;
    const PieceCall all = layout.all();
    const AttentionShape s = layout.shape(all);
    const size_t n = copies * layout.room();
    const size_t rows = copies * layout.stats_room();

    Buffer<X> qkv{"qkv", 3 * n};
    Buffer<X> dout{"dout", n};
    Buffer<X> out{"out", n};
    Buffer<X> att{"att", kernel.saved_bytes(s) / sizeof(X)};
    Buffer<Y> out_y{"out of type Y", kMixedTypes ? n : 0};
    Buffer<Y> dqkv{"dqkv", 3 * n};
    Buffer<float> lse{"lse", rows};
    Buffer<float> lse_rest{"lse_rest", rows};
    Buffer<char> scratch{"scratch", kernel.scratch_bytes(s)};

    Run(const AttentionKernel<X>& kernel, const Problem<X>& p, int gap = 0, int copies = 1)
        : kernel(kernel), p(p), layout{.s = p.c.shape, .gap = gap, .copies = copies} {
        std::vector<X> qkvs(3 * layout.room(), static_cast<X>(NAN));
        std::vector<X> douts(layout.room(), static_cast<X>(NAN));
        for (int i : {Q, K, V, Dout})
            layout.store(i, i == Dout ? douts.data() : qkvs.data(), p.input(i));
        upload(qkv, qkvs);
        upload(dout, douts);
    }

    void forward() {
        for (const LateMemory* m : Memories{&out, &out_y, &lse, &lse_rest, &att})
            m->poison();
        if constexpr (kMixedTypes)
            kernel.forward_fp32(gpu(), layout.forward<X, Y>(all, qkv, out_y, lse));
        auto call = layout.forward<X, X>(all, qkv, out, lse);
        call.att = att;
        if (kHasRest && kernel.supports.pieces)
            call.lse_rest = layout.stats<float>(Rest, lse_rest, all);
        kernel.forward(gpu(), call);
    }

    // A piece's share of the gradients. lse and out are those of whole rows.
    void backward(const PieceCall& piece, const Buffer<char>& scratch) {
        for (const LateMemory* m : Memories{&dqkv, &scratch})
            m->poison();
        auto call = layout.backward<X, Y>(piece, qkv, dout, out, lse, dqkv);
        call.att = att;
        call.scratch = scratch;
        if (kHasRest && piece.Tk < all.Tk)
            call.lse_rest = layout.stats<const float>(Rest, lse_rest, piece);
        if constexpr (kMixedTypes)
            kernel.backward_fp32(gpu(), call);
        else
            kernel.backward(gpu(), call);
    }

    bool has_backward() const {
        return kernel.has_backward() && (s.Tq == s.Tk || kernel.supports.pieces);
    }
    void forward_and_backward() {
        forward();
        if (has_backward())
            backward(all, scratch);
    }

    std::string text() const { return format("%s %s", kernel.name, p.c.text().c_str()); }

    // Reads what a piece wrote to the tensors in a buffer, in one of its copies, and checks that
    // nothing else has been written there.
    template <class A>
    void read(Result& to, std::initializer_list<int> tensors, const Buffer<A>& buffer,
              const PieceCall& piece, size_t copy = 0) const {
        const size_t size = buffer.bytes / sizeof(A) / copies;
        const std::vector<A> host = download<A>(buffer, copy * size, size);
        const auto count_written = [](const auto& x) {
            ptrdiff_t count = 0;
#pragma omp parallel for reduction(+ : count) if (x.size() >= kWorthAllCores)
            for (size_t i = 0; i < x.size(); i++)
                count += std::isnan(static_cast<double>(x[i])) ? 0 : 1;
            return count;
        };
        ptrdiff_t elsewhere = count_written(host);
        for (int i : tensors) {
            to[i] = layout.elements(i, host.data(), piece);
            elsewhere -= count_written(to[i]);
        }
        if (elsewhere != 0)
            test::report(__FILE__, __LINE__,
                         format("%s: %td elements of %s were written outside of the view",
                                text().c_str(), elsewhere, buffer.name));
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
    // The bytes of all results.
    auto bytes() const {
        std::vector<std::vector<char>> bytes;
        for (const LateMemory* m : Memories{&out, &out_y, &lse, &lse_rest, &dqkv})
            bytes.push_back(download<char>(*m, 0, m->bytes));
        return bytes;
    }

  private:
    void upload(X* to, const std::vector<X>& one) {
        const size_t bytes = one.size() * sizeof(X);
        gpu().upload(to, one.data(), bytes);
        for (int copy = 1; copy < copies; copy++)
            gpu().copy(to + copy * one.size(), to, bytes);
    }
};

template <class X>
Result run(const AttentionKernel<X>& kernel, const Problem<X>& p, int gap = 0) {
    Run<X> r(kernel, p, gap);
    r.forward_and_backward();
    return r.result();
}

// Naive's errors are computed only on demand, because compute-sanitizer finds races in cuBLAS,
// which naive multiplies with. Naive's backward takes whole sequences. Of its out, lse and dq only
// the last Tq rows belong to the problem, of dk and dv all.
template <class X>
const TensorNorms& naive_errors(const Problem<X>& p) {
    if (p.naive)
        return *p.naive;
    const AttentionShape& s = p.c.shape;
    Problem<X> whole = p;
    whole.c.shape.Tq = s.Tk;
    const Layout layout{whole.c.shape};
    const Result got = run(attention_kernel<X>(gpu(), Attention::naive, s.HS), whole);

    p.naive.emplace();
    for (int i = 0; i < kTensors; i++) {
        const int rows = is_of_keys(i) ? s.Tk : s.Tq;
        // Result has every gradient in the layout of out, so its rows are those of queries.
        const int like = i == Lse ? Lse : Out;
        const PieceCall last_rows{.q0 = s.Tk - rows, .Tq = rows, .k0 = 0, .Tk = 0, .causal = false};
        (*p.naive)[i] = error(layout.elements(like, got[i].data(), last_rows), p.ref[i]);
    }
    return *p.naive;
}

// What naive's own errors may be. The bound of the L2 error is relative to the tensor's norm, and
// that of the largest error to the largest element. The largest error has three parts: P's error,
// the error of a dot product of T terms, and three roundings to X (P or dS, dP, the result). Naive
// may have twice their sum. An error ε of S makes a relative error e^ε − 1 of P. S is a dot product
// of HS terms, in error by about √HS·u|S|, and naive rounds it to X. Only an S near its row's lse
// has weight. With large logits, that is an lse above 64, P's error is part of the L2 error, too.
template <class X>
Norms naive_bound(const Problem<X>& p, int tensor) {
    const Norms ref = p.ref_norms[tensor];
    const double lse = p.ref_norms[Lse].max;
    const double tiny = p.tiny[tensor];
    constexpr bool is_bf16 = std::is_same_v<X, bf16>;
    constexpr double u = 0x1p-24;

    const double S_error = (is_bf16 ? kRoundoff<X> : 0) + std::sqrt(p.c.shape.HS) * u;
    const double P_error = std::expm1(S_error * lse);
    const double max = P_error + std::sqrt(p.c.shape.Tk) * u + 3 * kRoundoff<X>;
    const double l2 = (is_bf16 ? 2e-2 : 1e-5) + (lse > 64 ? P_error : 0);
    return {.max = 2 * max * ref.max + tiny,
            .l2 = l2 * ref.l2 + tiny * std::sqrt(p.ref[tensor].size())};
}

template <class X>
Norms flash_bound(const AttentionKernel<X>& kernel, const Problem<X>& p, int tensor) {
    const Norms ref = p.ref_norms[tensor];
    if (tensor == Lse && std::is_same_v<X, bf16>)
        return {.max = bf16_lse_bound(ref.max), .l2 = INFINITY};
    const ErrorFactors factors = error_factors(kernel, tensor, p.c.shape);
    const Norms naive = naive_errors(p)[tensor];
    const bool constant = p.c.input == Input::constant;

    // If all logits are equal, all P of a row are the same number. Its rounding does not average
    // out, and naive's error is luck, because in fp32 1/65, for example, is nearly exact.
    const double P_roundoff = constant ? std::max(factors.operand_roundoff, 0x1p-23) : 0;
    const double operand_roundoff =
        allowed_operand_roundoff<X>(factors, tensor, naive.max, ref.max);
    const double relative = std::max(P_roundoff, operand_roundoff);
    const double max = factors.max_factor * naive.max + p.tiny[tensor] + relative * ref.max;

    // Naive's L2 error is luck if T ≤ 2, because a row has one or two keys. So it is in dq and dk
    // if all logits are equal: if S is exact, only D's rounding is left.
    const bool is_luck = p.c.shape.Tk <= 2 || (constant && (tensor == Dq || tensor == Dk));
    const double l2 = is_luck ? INFINITY : factors.l2_factor * naive.l2 + relative * ref.l2;
    return {.max = max, .l2 = l2};
}

enum class Bound {
    of_kernel,
    rough  // that of naive itself, which needs no run of naive
};

// A result that is the sum of several pieces. Its errors may be a tenth larger, because the sums
// are taken in another order, and larger by the rounding of the pieces.
struct SumOfPieces {
    size_t pieces = 0;  // 0: the result is no such sum
    TensorNorms rounding = {};
};

template <class X>
void check_result(const AttentionKernel<X>& kernel, const Problem<X>& p, const Result& got,
                  Bound which = Bound::of_kernel, const SumOfPieces& sum = {}) {
    const bool has_gradients = !got[Dq].empty();
    for (int i = 0; i < kTensors; i++) {
        if (is_gradient(i) && !has_gradients)
            continue;
        const Norms e = error(got[i], p.ref[i]);
        const Norms bound = kernel.flash && which == Bound::of_kernel ? flash_bound(kernel, p, i)
                                                                      : naive_bound(p, i);
        const double factor = sum.pieces > 0 ? 1.1 : 1;
        const double max = factor * bound.max + sum.rounding[i].max;
        const double l2 = factor * bound.l2 + sum.rounding[i].l2;
        const std::string text = format(
            "%s %s, %zu pieces: %s: largest error %.3g, %.2f of %.3g; L2 error %.3g, %.2f of %.3g",
            kernel.name, p.c.text().c_str(), sum.pieces, kNames[i], e.max, e.max / max, max, e.l2,
            e.l2 / l2, l2);
        if (!(e.max <= max && e.l2 <= l2))
            test::report(__FILE__, __LINE__, text);
        if (std::getenv("ACCURACY"))
            std::printf("  %s\n", text.c_str());
    }
}

// Where there are fewer queries than keys, the call is tested on tensors with a gap.
constexpr int kGap = 32;
template <class X>
void check_case(const AttentionKernel<X>& kernel, const Case& c, Bound bound = Bound::of_kernel) {
    const Problem<X>& p = problem<X>(c);
    const int gap = c.shape.Tq == c.shape.Tk ? 0 : kGap;
    check_result(kernel, p, run(kernel, p, gap), bound);
}

// Cuts the queries of a whole problem at q_cuts, and the keys that each range of queries sees at
// k_cuts. If the problem is causal, its keys are cut only up to the first query of the range, where
// all queries of the range see all keys before the cut. The keys from the last such cut to the last
// query are one causal piece, because a causal piece must end where its queries do.
static std::vector<PieceCall> pieces_of(const AttentionShape& s, std::vector<int> q_cuts,
                                        const std::vector<int>& k_cuts) {
    std::vector<PieceCall> pieces;
    q_cuts.push_back(s.Tq);
    int q0 = 0;
    for (int q1 : q_cuts) {
        PieceCall piece{.q0 = q0, .Tq = q1 - q0, .k0 = 0, .Tk = 0, .causal = false};
        for (int cut : k_cuts) {
            if (s.causal && cut > q0)
                break;
            piece.Tk = cut - piece.k0;
            pieces.push_back(piece);
            piece.k0 = cut;
        }
        const int k_end = s.causal ? q1 : s.Tk;
        piece.Tk = k_end - piece.k0;
        piece.causal = s.causal;
        pieces.push_back(piece);
        q0 = q1;
    }
    return pieces;
}

// Reads the results of forward for check_pieces(). An out in fp32 must be what the call in X
// rounds.
template <class X>
Result forward_result(const Run<X, float>& r) {
    Result got;
    r.read(got, {Lse}, r.lse, r.all);
    r.read(got, {Rest}, r.lse_rest, r.all);
    if constexpr (Run<X, float>::kMixedTypes) {
        Result narrow;
        r.read(got, {Out}, r.out_y, r.all);
        r.read(narrow, {Out}, r.out, r.all);
        std::vector<double> rounded = got[Out];
        for (double& x : rounded)
            x = static_cast<X>(static_cast<float>(x));
        CHECK(rounded == narrow[Out]);
    } else {
        const auto& launchers = r.kernel.unchecked;
        CHECK(launchers.forward_fp32 == launchers.forward);
        CHECK(launchers.backward_fp32 == launchers.backward);
        r.read(got, {Out}, r.out, r.all);

        // The rest is what rounding took from lse = m·ln 2 + log l. It may include the rounding
        // errors of log l, which is at most log Tk, and of m·ln 2.
        const double log_l = std::log(r.p.c.shape.Tk);
        for (size_t i = 0; i < got[Rest].size(); i++)
            CHECK_NEAR(got[Rest][i], 0, 0x1p-23 * (std::fabs(got[Lse][i]) + log_l));
        CHECK(norms(got[Rest]).max > 0);
    }
    return got;
}

// Forward over all keys, and then backward piece by piece. The pieces' shares must add up to the
// gradients of the whole. Each share may have one more fp32 rounding.
template <class X>
void check_pieces(const AttentionKernel<X>& kernel, const Case& c, const std::vector<int>& q_cuts,
                  const std::vector<int>& k_cuts, Bound bound = Bound::of_kernel) {
    const Problem<X>& p = problem<X>(c);
    Run<X, float> r(kernel, p, kGap);
    r.forward();
    Result got = forward_result(r);
    for (int i : {Dq, Dk, Dv})
        got[i].resize(p.ref[i].size());

    const std::vector<PieceCall> pieces = pieces_of(c.shape, q_cuts, k_cuts);
    const size_t C = r.layout.C();
    SumOfPieces sum{.pieces = pieces.size()};
    for (const PieceCall& piece : pieces) {
        Buffer<char> scratch("a piece's scratch", kernel.scratch_bytes(r.layout.shape(piece)));
        r.backward(piece, scratch);
        Result share;
        r.read(share, {Dq, Dk, Dv}, r.dqkv, piece);
        for (int i : {Dq, Dk, Dv}) {
            const size_t first = i == Dq ? piece.q0 : piece.k0;
            const size_t tokens = i == Dq ? piece.Tq : piece.Tk;
            for (size_t e = 0; e < share[i].size(); e++) {  // (B, tokens, C)
                const size_t b = e / C / tokens;
                const size_t t = (e / C) % tokens;
                got[i][(b * r.layout.T + first + t) * C + e % C] += share[i][e];
            }
            const Norms size = norms(share[i]);
            sum.rounding[i].max += 0x1p-24 * size.max;
            sum.rounding[i].l2 += 0x1p-24 * size.l2;
        }
    }
    check_result(kernel, p, got, bound, sum);
}

// -------------------------------------------------------------------------------------------------
// The properties that are tested of every kernel

// Shapes and inputs that find bugs. B with NH and the input go through their values at different
// paces, so that every pair of values occurs. Long sequences have few heads, because the
// reference's time grows with B·NH·T²·HS.
static std::vector<Case> accuracy_cases(bool flash_in_bf16) {
    std::vector<Case> cases = {
        {whole(3, 65, 25, 64)},
        {whole(3, 129, 25, 64), Input::shifted},
        {scaled(0.3f, whole(1, 200, 2, 64))},
        {scaled(0.02f, unmasked(whole(1, 200, 2, 128))), Input::large_q},
    };

    const std::pair<int, int> few[] = {{1, 1}, {1, 2}, {2, 1}};
    const std::pair<int, int> many[] = {{1, 1}, {3, 12}, {1, 25}, {3, 1}, {1, 12}};
    int n = 0;
    for (int T : {1, 2, 63, 64, 65, 127, 129, 255, 1000, 1023, 1024, 1025})
        for (int HS : {64, 128})
            for (bool causal : {true, false}) {
                const int lengths = n / 4;  // before T, each of which has four cases
                const auto [B, NH] = T > 129 ? few[lengths % 3] : many[n % 5];
                cases.push_back({whole(B, T, NH, HS, causal), static_cast<Input>(n % 3)});
                n++;
            }

    for (int HS : {64, 128}) {
        for (bool causal : {true, false}) {
            // Whole tiles only, but for the 192 queries of flash_bf16_sm90's forward at HS 64.
            cases.push_back({whole(1, 128, 3, HS, causal)});
            // flash_bf16_sm90 walks from the last keys to the first and keeps its first maximum
            // until a sum grows out of range. Only the bounds of bf16 allow for the rounding of
            // logits of several hundred.
            if (flash_in_bf16)
                cases.push_back({whole(2, 450, 3, HS, causal), Input::early_keys});
        }
        for (Input input : {Input::magnitudes, Input::reversed})
            cases.push_back({whole(1, 200, 2, HS), input});
        // More heads than flash_bf16_sm90's backward works on at a time, so that later heads take
        // earlier ones' place.
        if (flash_in_bf16)
            cases.push_back({whole(HS == 64 ? 40 : 20, 129, 25, HS)});
    }
    return cases;
}

template <class X>
void accuracy(const AttentionKernel<X>& kernel) {
    if (!kernel.has_backward())
        std::printf("  %s has no backward: out and lse only\n", kernel.name);
    const bool flash_in_bf16 = kernel.flash && std::is_same_v<X, bf16>;
    for (const Case& c : accuracy_cases(flash_in_bf16))
        check_case(kernel, c);
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
                    const int several = T < 1000 ? 2 : 1;  // sequences, and heads
                    const float scale = 8.f / static_cast<float>(HS);
                    const AttentionShape s = scaled(scale, whole(several, T, several, HS, causal));
                    const Case c{.shape = s, .input = input, .logit = logit};
                    check_case(kernel, c);
                    if (kernel.supports.pieces)
                        check_pieces(kernel, c, {T / 3}, {T / 4});
                }
}

// With q, k, v and dout of 0, all results are 0 but lse, which is the log of the number of keys.
template <class X>
void zeros(const AttentionKernel<X>& kernel) {
    constexpr int T = 130;
    for (int HS : {64, 128}) {
        Problem<X> p = inputs_of<X>({whole(2, T, 3, HS)});
        for (std::vector<X>& x : p.inputs)
            std::fill(x.begin(), x.end(), static_cast<X>(0.f));
        const Result got = run(kernel, p);
        for (int i : {Out, Dq, Dk, Dv})
            CHECK(norms(got[i]).max == 0);
        for (size_t i = 0; i < got[Lse].size(); i++) {
            const double keys = 1. + i % T;
            CHECK_NEAR(got[Lse][i], std::log(keys), 1e-6);
        }
    }
}

// Where an element of a result is: lse is (B, NH, T), the others are (B, T, NH, HS).
struct Position {
    int b;
    int t;
    int h;
    int d;  // 0 in lse
};
static Position position(int tensor, int index, const AttentionShape& s) {
    const int T = s.Tq;
    if (tensor == Lse)
        return {.b = index / T / s.NH, .t = index % T, .h = (index / T) % s.NH, .d = 0};
    const int row = index / s.HS;
    return {.b = row / s.NH / T, .t = (row / s.NH) % T, .h = row % s.NH, .d = index % s.HS};
}

// Rows of a head, `first` to `last` with both.
struct RowRange {
    int first;
    int last;
    bool contains(int t) const { return first <= t && t <= last; }
    RowRange widened(int rows) const { return {first - rows, last + rows}; }
};

// Where a NaN is put into q, k, v or dout, of 1000 tokens.
constexpr int kNanTokens = 1000;
constexpr Position kNan{.b = 1, .t = 500, .h = 1, .d = 5};

constexpr RowRange kNone{2 * kNanTokens, -kNanTokens};  // empty, even if it is widened by 1000
constexpr RowRange kItself{kNan.t, kNan.t};
constexpr RowRange kLater{kNan.t, kNanTokens - 1};
constexpr RowRange kEarlier{0, kNan.t};
constexpr RowRange kAll{0, kNanTokens - 1};

// Which rows of each result depend on the NaN, in causal attention.
static const struct {
    const char* input;
    RowRange rows[kTensors];  // of out, lse, dq, dk, dv
} kNanReach[] = {
    {"q", {kItself, kItself, kItself, kEarlier, kEarlier}},
    {"k", {kLater, kLater, kLater, kAll, kAll}},  // the last row of P is NaN, and sees every key
    {"v", {kLater, kNone, kLater, kAll, kNone}},
    {"dout", {kNone, kNone, kItself, kEarlier, kEarlier}},
};
// Without a mask, a NaN that reaches earlier or later rows reaches all of them.
static RowRange without_mask(const RowRange& causal) {
    return causal.first < causal.last ? kAll : causal;
}

// `rows` are those that depend on the NaN, and `clean` is the result without it. Of a row that
// depends on it, only the element in the NaN's column must be NaN: a NaN in v reaches no other
// column of out, and one in dout no other column of dv.
static void check_nan_in(int tensor, const RowRange& rows, int longest_tile,
                         const AttentionShape& s, const std::vector<double>& got,
                         const std::vector<double>& clean, const std::string& what) {
    for (int i = 0; i < static_cast<int>(got.size()); i++) {
        const Position at = position(tensor, i, s);
        const bool same_head = at.b == kNan.b && at.h == kNan.h;
        const bool same_column = at.d == kNan.d || tensor == Lse;
        const bool must_be_nan = same_head && same_column && rows.contains(at.t);
        const bool may_be_nan = same_head && rows.widened(longest_tile - 1).contains(at.t);
        const double want = must_be_nan ? NAN : clean[i];
        const bool right = must_be_nan ? std::isnan(got[i]) : (may_be_nan || got[i] == want);
        if (right)
            continue;
        test::report(
            __FILE__, __LINE__,
            format("%s: %s[%d] is %g, not %g", what.c_str(), kNames[tensor], i, got[i], want));
        return;
    }
}

// One element of q, k, v or dout is NaN. Every row that depends on it must be NaN in its column.
//
// Other heads, other sequences, and rows farther away than any tile is long, must have the bits
// that they have without the NaN. In between a tile may carry it, because on tensor cores a masked
// P of 0 times NaN is NaN. naive's tile is the head.
template <class X>
void one_nan(const AttentionKernel<X>& kernel) {
    const int longest_tile = kernel.flash ? 256 : kNanTokens;
    for (int HS : {64, 128})
        for (bool causal : {true, false}) {
            Problem<X> p = inputs_of<X>({whole(2, kNanTokens, 3, HS, causal)});
            const AttentionShape& s = p.c.shape;
            const size_t head = (kNan.b * kNanTokens + kNan.t) * s.NH + kNan.h;
            const Result clean = run(kernel, p);
            for (size_t input = 0; input < p.inputs.size(); input++) {  // q, k, v, dout
                X& element = p.inputs[input][head * HS + kNan.d];
                const X number = std::exchange(element, static_cast<X>(NAN));
                const Result got = run(kernel, p);
                element = number;

                const auto& [name, reach] = kNanReach[input];
                const std::string what =
                    format("%s %s, NaN in %s", kernel.name, p.c.text().c_str(), name);
                for (int i = 0; i < kTensors; i++) {
                    const RowRange rows = causal ? reach[i] : without_mask(reach[i]);
                    check_nan_in(i, rows, longest_tile, s, got[i], clean[i], what);
                }
            }
        }
}

// Every run writes the bytes of the first. Before the last run all memory is poison for a tenth of
// a second. So work on another stream reads NaN, or what it writes is lost.
template <class X, class Y>
void check_repeats(const AttentionKernel<X>& kernel, const AttentionShape& shape, int count) {
    const Problem<X> p = inputs_of<X>({shape});
    Run<X, Y> r(kernel, p);
    r.forward_and_backward();
    const auto first = r.bytes();
    for (int i = 1; i <= count; i++) {
        if (i == count)
            late(gpu(), 100'000'000);
        r.forward_and_backward();
        if (r.bytes() == first)
            continue;
        const char* when = i == count ? ", whose inputs came late on the device's stream" : "";
        test::report(__FILE__, __LINE__,
                     format("%s: other bytes in run %d%s", r.text().c_str(), i + 1, when));
        return;
    }
}

template <class X>
void determinism(const AttentionKernel<X>& kernel) {
    const struct {
        AttentionShape shape;
        int count;
    } runs[] = {{whole(2, 1000, 12, 64), 20},
                {unmasked(whole(1, 1000, 5, 128)), 20},
                {whole(3, 130, 5, 64), 1000}};
    for (const auto& [shape, count] : runs) {
        check_repeats<X, X>(kernel, shape, count);
        if (kernel.supports.pieces)
            check_repeats<X, float>(kernel, shape, 3);
    }
}

// 160 tiles of 128 keys in all. So some of an H100's 132 multiprocessors get two, and tiles have to
// wait for their turn. It runs many times, because it must not matter which multiprocessor gets
// which tile.
template <class X>
void large(const AttentionKernel<X>& kernel) {
    for (int HS : {64, 128})
        for (bool causal : {false, true}) {
            const Case c{whole(2, 1010, 10, HS, causal)};
            check_pieces(kernel, c, {}, {}, Bound::rough);
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
                // In bf16 the rounding of O is an error of D. In rows of 2049 shifted keys it adds
                // up in dQ.
                const int inputs = Tk > 1024 ? 2 : 3;
                const Input input = static_cast<Input>(n % inputs);
                n++;
                check_case(kernel, {queries_of(B, Tq, Tk, NH, HS), input});
            }
        check_case(kernel, {unmasked(queries_of(1, 200, 1025, 2, HS)), Input::shifted});
        check_case(kernel, {scaled(0.3f, queries_of(2, 130, 200, 3, HS))});
    }
}

// The problem's call, not cut into pieces, with results in fp32 where X is bf16.
template <class X>
void check_fp32_call(const AttentionKernel<X>& kernel, const Case& c) {
    const Problem<X>& p = problem<X>(c);
    Run<X, float> r(kernel, p, kGap);
    r.forward_and_backward();
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

// Tk − Tq around multiples of the tiles and of a warp's rows, so that the diagonal runs through
// their corners. A kernel that masks one tile too few, or visits one too few, is wrong there in a
// single element of the tile.
template <class X>
void shifts(const AttentionKernel<X>& kernel) {
    int n = 0;
    for (int HS : {64, 128})
        for (int shift :
             {14, 15, 16, 17, 30, 31, 32, 33, 62, 63, 64, 65, 94, 126, 127, 128, 129, 190, 254}) {
            const int Tq = n % 2 == 0 ? 200 : 130;
            n++;
            const Case c{queries_of(2, Tq, Tq + shift, 3, HS)};
            check_case(kernel, c);
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
            check_forward(kernel, {queries_of(1, 64, 8192, 1, HS), Input::tail});
    }
}

template <class X>
void pieces(const AttentionKernel<X>& kernel) {
    const struct {
        std::vector<int> q_cuts;
        std::vector<int> k_cuts;
    } cuts[] = {{{}, {}},
                {{128}, {128}},
                {{128, 165, 229}, {37, 101, 172}},
                {{100, 200}, {60, 120, 180, 240}},
                {{1, 3, 299}, {1, 298}}};
    for (int HS : {64, 128}) {
        for (bool causal : {true, false})
            for (const auto& [q_cuts, k_cuts] : cuts)
                check_pieces(kernel, {whole(2, 300, 3, HS, causal)}, q_cuts, k_cuts);
        check_pieces(kernel, {scaled(0.3f, whole(2, 300, 3, HS))}, {128}, {100});
        check_pieces(kernel, {scaled(0.02f, unmasked(whole(2, 300, 3, HS))), Input::large_q},
                     {100, 200}, {37, 101});
    }
    check_pieces(kernel, {whole(1, 256, 12, 64), Input::large_q}, {64, 128, 192}, {128});
    check_pieces(kernel, {whole(1, 256, 12, 64), Input::shifted}, {128}, {64, 128, 192});
}

// Chunks (attention/ring) that divide T and chunks that do not, also with more queries than keys.
template <class X>
void chunks(const AttentionKernel<X>& kernel) {
    for (int HS : {64, 128})
        for (bool causal : {true, false}) {
            const Whole<X, Cuda> all(gpu(), whole(2, 1000, 3, HS, causal),
                                     {.threads = kAllCores, .kind = {kernel.name}});
            for (const auto& [q_chunk, k_chunk] : std::vector<std::pair<int, int>>{
                     {500, 500}, {125, 250}, {128, 128}, {1000, 37}, {77, 1000}})
                check_chunks(all, q_chunk, k_chunk);
        }
}

// flash_fp32's tiles for 64 KB of shared memory, which is what Turing gives a block, and the Error
// where a block has less.
template <class X>
void small_tiles(const AttentionKernel<X>& kernel) {
    if (std::string(kernel.name) != "flash_fp32")
        SKIP("%s has one size of tiles", kernel.name);
    const struct Restore {
        int bytes = gpu().block_smem;
        ~Restore() { gpu().block_smem = bytes; }
    } before;
    for (int HS : {64, 128})
        for (bool causal : {true, false}) {
            const Problem<X>& p = problem<X>({whole(2, 300, 3, HS, causal)});
            gpu().block_smem = before.bytes;
            const Result large_tiles = run(kernel, p);
            gpu().block_smem = 64 << 10;
            // the order of sums shows that the tiles are other ones
            if (before.bytes >= (112 << 10))
                CHECK(run(kernel, p)[Dk] != large_tiles[Dk]);
            gpu().block_smem = 48 << 10;
            CHECK_ERROR(run(kernel, p), "shared memory");
        }
    gpu().block_smem = 64 << 10;
    for (auto* property : {accuracy<X>, logits<X>, queries<X>, pieces<X>})
        property(kernel);
}

// For compute-sanitizer (scripts/sanitize.sh), which takes longer than four minutes for racecheck
// of `pieces` with flash_fp16x3. There are still so many heads that the persistent blocks of sm_90a
// wrap around their stages.
template <class X>
void few(const AttentionKernel<X>& kernel) {
    const int NH = kernel.min_sm == 90 ? 150 : 2;
    for (int HS : {64, 128}) {
        check_case(kernel, {whole(1, 100, NH, HS)}, Bound::rough);
        check_case(kernel, {queries_of(1, 70, 200, NH, HS)}, Bound::rough);
        if (kernel.supports.pieces)
            check_pieces(kernel, {whole(1, 200, NH, HS)}, {130}, {71}, Bound::rough);
    }
}

// What a kernel does not support gives an Error. What gives none must be right.
template <class X>
void limits(const AttentionKernel<X>& kernel) {
    for (const AttentionShape& shape : {
             whole(2, 100, 3, 80),
             whole(1, 70, 2, 32),
             // more heads, and more sequences, than the 65535 of a grid's y or z
             whole(2731, 2, 25, 64),
             whole(65537, 1, 1, 64),
         }) {
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

// A call on many copies of one sequence, of which some are compared.
template <class X>
void check_copies(const AttentionKernel<X>& kernel, const AttentionShape& one, int copies) {
    const Problem<X>& p = problem<X>({one});
    AttentionShape all = one;
    all.B = copies;
    const size_t tensors = 8 * copies * p.input(Q).size() * sizeof(X);
    const size_t bytes = tensors + kernel.saved_bytes(all) + kernel.scratch_bytes(all);
    if (bytes > gpu().total_bytes / 10 * 8)
        SKIP("needs %.0f GiB of device memory", static_cast<double>(bytes) / (1 << 30));
    const int gap = 0;
    Run<X> r(kernel, p, gap, copies);
    r.forward_and_backward();
    for (int copy : {0, 1, copies / 3, copies / 2, copies - 2, copies - 1})
        check_result(kernel, p, r.result(copy));
}

// So many copies that out, dout and dq have 2³¹ elements. A third of them is enough for qkv and
// dqkv.
constexpr int kCopiesOf2G = (size_t{1} << 31) / (65 * 25 * 64);
template <class X>
void big(const AttentionKernel<X>& kernel) {
    check_copies(kernel, whole(1, 65, 25, 64), kCopiesOf2G / 3 + 2);
}
template <class X>
void big_out(const AttentionKernel<X>& kernel) {
    check_copies(kernel, whole(1, 65, 25, 64), kCopiesOf2G + 2);
}

// The heads are so many and so long that flash_bf16_sm90 works on them in groups, and uses a place
// in dQ's sum twice.
template <class X>
void groups(const AttentionKernel<X>& kernel) {
    check_copies(kernel, whole(1, 1040, 25, 128), 5);
}

// -------------------------------------------------------------------------------------------------
// Which kernel the trainer chooses. dev/test_gpt2 tests the layer itself, in a model's gradients
// and in generation

// Scratch that is enough for a call without a mask is enough with one, and with fewer queries or
// keys. A ring's memory relies on that (attention/ring/pieces.h).
template <class X>
static void check_scratch_grows(int HS, int NH, int T) {
    const AttentionKernels<X> kernels = attention_kernels<X>();
    const AttentionShape largest = unmasked(whole(1, T, NH, HS));
    const std::pair<int, int> lengths[] = {{T, T}, {T / 2, T}, {T, T / 2}, {T / 2, T / 2}, {1, T}};
    for (int i = 0; i < kernels.count; i++)
        for (const auto& [Tq, Tk] : lengths) {
            const AttentionKernel<X>& kernel = kernels.begin[i];
            const AttentionShape s = queries_of(1, Tq, Tk, NH, HS);
            CHECK(kernel.scratch_bytes(unmasked(s)) <= kernel.scratch_bytes(largest));
            if (Tq <= Tk)
                CHECK(kernel.scratch_bytes(s) <= kernel.scratch_bytes(largest));
        }
}
TEST(scratch_grows_with_the_call) {
    for (int HS : {64, 128})
        for (int NH : {1, 12, 32})
            for (int T = 512; T <= 65536; T += T / 2) {
                check_scratch_grows<float>(HS, NH, T);
                check_scratch_grows<bf16>(HS, NH, T);
            }
}

// What --attention accepts, and what a model is refused.
template <class X>
static void check_names() {
    const Cuda& dev = gpu();
    const AttentionKernels<X> kernels = attention_kernels<X>();
    for (int i = 0; i < kernels.count; i++) {
        const AttentionKernel<X>& k = kernels.begin[i];
        const Attention kind{k.name};
        if (!k.runs_on(dev)) {
            CHECK_ERROR(attention_kernel<X>(dev, kind, 64), k.name);
            continue;
        }
        CHECK(&attention_kernel<X>(dev, kind, 64) == &k);

        const AttentionShape s = whole(2, 100, 12, 64);
        CHECK(attention_saved_bytes<X>(dev, kind, s) == k.saved_bytes(s));
        CHECK(!k.flash || k.saved_bytes(s) == 0);
        CHECK(attention_scratch_bytes<X>(dev, kind, s) == k.scratch_bytes(s));

        const auto accepts = [&](bool training, bool ring) {
            return test::error_of([&] { check_attention<X>(dev, kind, 64, {training, ring}); })
                .empty();
        };
        const bool training = true;
        const bool ring = true;
        CHECK(accepts(!training, !ring));
        CHECK(accepts(training, !ring) == k.has_backward());
        CHECK(accepts(!training, ring) == k.supports.pieces);
    }

    check_attention<X>(dev, Attention::flash, 64, {.training = true, .context_parallel = true});
    const AttentionKernel<X>& flash = attention_kernel<X>(dev, Attention::flash, 64);
    const AttentionKernel<X>& naive = attention_kernel<X>(dev, Attention::naive, 64);
    CHECK(flash.flash && flash.runs_on(dev));
    CHECK(!naive.flash);
    CHECK_ERROR(attention_kernel<X>(dev, Attention::flash, 80), "80");
}
TEST(names) {
    const Cuda& dev = gpu();
    CHECK(std::string(attention_names()).rfind("flash|naive|flash_simple|", 0) == 0);
    check_names<float>();
    check_names<bf16>();
    CHECK_ERROR(attention_kernel<float>(dev, Attention{"flash_bf16"}, 64), "--precision bf16");
    CHECK_ERROR(attention_kernel<bf16>(dev, Attention{"flash_simple"}, 64), "--precision fp32");
    CHECK_ERROR(attention_kernel<bf16>(dev, Attention{"magic"}, 64), "no such kernel");
}

// -------------------------------------------------------------------------------------------------
// Calls that are refused. These tests need no GPU, because no refused call gets that far

// A device that no call may use.
static const Cuda& untouchable() {
    alignas(Cuda) static const char memory[sizeof(Cuda)] = {};
    return *reinterpret_cast<const Cuda*>(memory);
}

enum { Att = kCallTensors, Scratch };  // what else a call has an address of

// The addresses of a call's tensors. They are far apart, and there is no memory at them.
template <class A>
static A* address(int tensor) {
    return reinterpret_cast<A*>(uintptr_t(tensor + 1) << 40);
}

template <class X, class Y = X>
struct Calls {
    AttentionForward<X, Y> forward;
    AttentionBackward<X, Y> backward;

    // The tensors are packed, as the trainer's are, or have a gap.
    explicit Calls(const AttentionShape& s, int gap = 0) {
        const Layout layout{.s = s, .T = std::max(s.Tq, s.Tk), .gap = gap};
        PieceCall piece = layout.all();
        piece.Tk = s.Tk;  // less than the T of all() if there are more queries than keys
        Acc<X>* const lse = address<Acc<X>>(Lse);
        forward = layout.forward<X, Y>(piece, address<X>(Q), address<Y>(Out), lse);
        forward.att = address<X>(Att);
        backward = layout.backward<X, Y>(piece, address<X>(Q), address<X>(Dout), address<X>(Out),
                                         lse, address<Y>(Dq));
        backward.att = address<X>(Att);
        backward.scratch = address<char>(Scratch);
    }
};

// Tests of one kernel that change a good call in one place. `why` is a part of the error that this
// must give, or kAccepted.
template <class X>
struct Refusals {
    using Forward = AttentionForward<X>;
    using Backward = AttentionBackward<X>;

    static constexpr const char* kAccepted = nullptr;
    static constexpr int NH = 3;
    static constexpr int HS = 64;
    static constexpr int C = NH * HS;
    static constexpr int T = 48;

    const AttentionKernel<X>& kernel;
    const AttentionLimits limits = kernel.limits();
    const AttentionShape good = whole(2, T, NH, HS);

    // Asks the check that every kernel starts with, because there is no memory for a kernel to use.
    template <class Call>
    void accept(const Call& call) const {
        const std::string error = test::error_of([&] { check_call(limits, call); });
        if (!error.empty())
            test::report(__FILE__, __LINE__,
                         format("%s, Tq %d, refused: %s", kernel.name, call.s.Tq, error.c_str()));
    }
    void refuse(const Forward& call, const char* why) const {
        CHECK_ERROR(kernel.forward(untouchable(), call), why);
    }
    void refuse(const Backward& call, const char* why) const {
        if (kernel.has_backward())
            CHECK_ERROR(kernel.backward(untouchable(), call), why);
    }
    template <class Call>
    void check(const Call& call, const char* why) const {
        if (why == kAccepted)
            accept(call);
        else
            refuse(call, why);
    }

    // change(call) changes a good call.
    template <class Change>
    void forward(const char* why, Change change) const {
        Forward call = Calls<X>(good).forward;
        change(call);
        check(call, why);
    }
    template <class Change>
    void backward(const char* why, Change change) const {
        Backward call = Calls<X>(good).backward;
        change(call);
        check(call, why);
    }
    template <class Change>
    void both(const char* why, Change change) const {
        forward(why, change);
        backward(why, change);
    }

    void shapes() const {
        both(kAccepted, [](auto&) {});
        both("Tq is 49", [](auto& c) { c.s.Tq = T + 1; });  // a causal mask needs Tq ≤ Tk
        both("B 0", [](auto& c) { c.s.B = 0; });
        both("NH 0", [](auto& c) { c.s.NH = 0; });
        both("Tq 0", [](auto& c) { c.s.Tq = 0; });
        both("Tk -1", [](auto& c) { c.s.Tk = -1; });
        both("head size is 18", [](auto& c) { c.s.HS = 18; });
        both("head size is 0", [](auto& c) { c.s.HS = 0; });
        both(kernel.supports.any_head_size ? kAccepted : "head size is 32",
             [](auto& c) { c.s.HS = 32; });
        both("scale is -1", [](auto& c) { c.s.scale = -1; });

        // Fewer queries than keys, and more queries than keys.
        const AttentionShape fewer_queries = queries_of(2, 40, 48, NH, HS);
        const AttentionShape fewer_keys = unmasked(queries_of(2, 48, 40, NH, HS));
        for (const AttentionShape& s : {good, fewer_queries, fewer_keys})
            for (int gap : {0, kGap}) {
                const Calls<X> calls(s, gap);
                accept(calls.forward);
                if (kernel.supports.pieces || s.Tq == s.Tk)
                    accept(calls.backward);
                else
                    refuse(calls.backward, "whole sequences");
            }

        // A single row, whose strides are never used.
        both(kAccepted, [](auto& c) {
            c.s.B = 1;
            c.s.Tq = 1;
            c.s.Tk = 1;
            const auto clear_strides = [](auto& view) {
                view.batch_stride = 0;
                view.token_stride = 0;
            };
            clear_strides(c.q);
            clear_strides(c.k);
            clear_strides(c.v);
            clear_strides(c.out);
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
        backward("scratch is null", [](auto& c) { c.scratch = nullptr; });
        both(kernel.flash ? kAccepted : "att is null", [](auto& c) { c.att = nullptr; });

        // not aligned
        both("rows of q", [](auto& c) { c.q.ptr += 1; });
        both("rows of k", [](auto& c) { c.k.token_stride += 1; });
        both("rows of v", [](auto& c) { c.v.batch_stride += 1; });
        both("rows of out", [](auto& c) { c.out.ptr += 1; });
        backward("rows of dout", [](auto& c) { c.dout.token_stride += 1; });
        backward("rows of dq", [](auto& c) { c.dq.ptr += 1; });
        backward("rows of dk", [](auto& c) { c.dk.token_stride += 1; });
        backward("rows of dv", [](auto& c) { c.dv.batch_stride += 1; });
        backward("scratch", [](auto& c) { c.scratch = static_cast<char*>(c.scratch) + 4; });

        // rows that overlap each other
        both("rows of q", [](auto& c) { c.q.token_stride = C - 8; });
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
        // right behind v
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

        // All tensors of a forward in one, (B, T, q k v out, NH, HS), with out where it belongs or
        // a little to the left or right of that.
        const auto one_tensor = [](auto& c, size_t out_column) {
            X* const base = address<X>(Q);
            const auto columns_from = [=](auto& view, size_t column) {
                view = {.ptr = base + column, .batch_stride = T * 4 * C, .token_stride = 4 * C};
            };
            columns_from(c.q, 0);
            columns_from(c.k, C);
            columns_from(c.v, 2 * C);
            columns_from(c.out, out_column);
        };
        forward(kAccepted, [=](auto& c) { one_tensor(c, 3 * C); });
        forward("overlap", [=](auto& c) { one_tensor(c, 3 * C - 8); });
        forward("overlap", [=](auto& c) { one_tensor(c, 3 * C + 8); });  // into the next token's q

        // dk and dv with sequences next to each other in a token, as in a ring: (T, B, K and V, NH,
        // HS).
        const auto token_major = [](auto& c, size_t dv_column) {
            c.dk = {.ptr = address<X>(Dk), .batch_stride = 2 * C, .token_stride = 4 * C};
            c.dv = {
                .ptr = address<X>(Dk) + dv_column, .batch_stride = 2 * C, .token_stride = 4 * C};
        };
        backward(kAccepted, [=](auto& c) { token_major(c, C); });
        backward("overlap", [=](auto& c) { token_major(c, 2 * C); });  // dk of the next sequence

        // dk and dv of a sequence one after the other, (B, K and V, T, NH, HS).
        const auto dk_then_dv = [](auto& c, size_t dv_offset) {
            c.dk = {.ptr = address<X>(Dk), .batch_stride = 2 * T * C, .token_stride = C};
            c.dv = {
                .ptr = address<X>(Dk) + dv_offset, .batch_stride = 2 * T * C, .token_stride = C};
        };
        backward(kAccepted, [=](auto& c) { dk_then_dv(c, T * C); });
        backward("overlap", [=](auto& c) { dk_then_dv(c, T * C - 8); });
        backward("overlap", [=](auto& c) { dk_then_dv(c, T * C + C); });  // dk of the next sequence
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
            CHECK_ERROR(kernel.backward_fp32(untouchable(), call), "overlap");
            return;
        }
        CHECK_ERROR(kernel.forward_fp32(untouchable(), calls.forward), kernel.name);
        CHECK_ERROR(kernel.backward_fp32(untouchable(), calls.backward), kernel.name);
        if (!kernel.has_backward())
            CHECK_ERROR(kernel.backward(untouchable(), Calls<X>(good).backward), "no backward");
    }
};

// Calls one of the functions above for each kernel.
template <class X>
static void check_refusals(void (Refusals<X>::*checks)() const) {
    const AttentionKernels<X> kernels = attention_kernels<X>();
    for (int i = 0; i < kernels.count; i++)
        (Refusals<X>{kernels.begin[i]}.*checks)();
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
    CHECK_ERROR(attention_backward(Cpu(1), backward), "Tq is 49");
}
TEST(refused_fp32_results) {
    check_refusals(&Refusals<float>::fp32);
    check_refusals(&Refusals<bf16>::fp32);
}

// -------------------------------------------------------------------------------------------------
// What chunks and rings are made of, merge() and add() (attention/ring/pieces.h), in rows of any
// width

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

    // Compares every element, including those between the rows. The tolerance is relative to
    // numbers above 1, and absolute below.
    void check(const std::string& what, double tolerance) const {
        const std::vector<X> got = download<X>(device, 0, host.size());
        for (size_t i = 0; i < host.size(); i++) {
            const double x = static_cast<float>(got[i]);
            const double allowed = tolerance * std::max(1., std::fabs(host[i]));
            const bool both_nan = std::isnan(host[i]) && std::isnan(x);
            if (both_nan || std::fabs(x - host[i]) <= allowed)
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

// (B, T) rows of C elements, or (T, B) rows, with a gap after each.
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
    const auto rows = [&](size_t gap) { return Rows{.B = s.B, .T = s.Tq, .C = C, .gap = gap}; };
    const Rows of_sum = rows(8);
    const Rows of_piece = rows(16);
    const Rows of_dst = rows(24);
    const size_t head_stride = s.Tq + 3;  // of lse and the rest
    const size_t stats = s.B * s.NH * head_stride;
    constexpr double kLseSigma = 3;
    constexpr double kRestSigma = 1e-5;  // larger than a rest can be, so that an error in it shows
    Twin<float> sum("sum", normal<float>(of_sum.size(), 1));
    Twin<float> piece("piece", normal<float>(of_piece.size(), 2));
    Twin<float> lse("lse", normal<float>(stats, 3, kLseSigma));
    Twin<float> piece_lse("piece's lse", normal<float>(stats, 4, kLseSigma));
    Twin<float> rest("rest", normal<float>(stats, 5, kRestSigma));
    Twin<float> piece_rest("piece's rest", normal<float>(stats, 6, kRestSigma));
    Twin<Y> dst("dst", poison(of_dst.size()));

    // data(x) is a twin's memory on the host or on the device. merge() can write over `a` only if
    // `to` has the type of `a`. On the device a bf16 `to` has not.
    const auto merge_on = [&](const auto& dev, auto to, const auto& data) {
        using A = std::remove_pointer_t<decltype(data(sum))>;
        const Partial<A> a{.o = of_sum.of(data(sum)),
                           .lse = {data(lse), head_stride},
                           .rest = {data(rest), head_stride}};
        const Partial<A> b{.o = of_piece.of(data(piece)),
                           .lse = {data(piece_lse), head_stride},
                           .rest = {data(piece_rest), head_stride}};
        if constexpr (std::is_same_v<decltype(to), HeadsView<A>>)
            merge(dev, s, in_place ? a.o : to, a, b);
        else
            merge(dev, s, to, a, b);
    };
    const auto on_host = [](auto& x) { return x.host.data(); };
    const auto on_device = [](auto& x) { return static_cast<float*>(x.device); };
    merge_on(Cpu(1), of_dst.of(dst.host.data()), on_host);
    merge_on(late(gpu()), of_dst.of<Y>(dst.device), on_device);

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
        const bool is_row = i % head_stride < size_t(s.Tq);
        const double unit = 0x1p-24 * std::max(1., std::fabs(double(high[i])));
        if (is_row)
            CHECK_NEAR(low[i], 0, 2 * unit);
        CHECK_NEAR(double(high[i]) + low[i], lse.host[i] + rest.host[i], 4e-7);
    }
}

// Widths below, at and above what a block covers at once, which is 1,024. A row of d12 has 768
// elements, and 1,536 in dK and dV.
constexpr std::pair<int, int> kWidths[] = {{1, 64},  {5, 64},   {3, 128}, {8, 64},
                                           {9, 64},  {12, 64},  {16, 64}, {17, 64},
                                           {24, 64}, {13, 128}, {40, 64}, {50, 64}};
TEST(merge_of_wide_rows) {
    for (const auto& [NH, HS] : kWidths)
        for (const AttentionShape& s : {whole(2, 5, NH, HS), whole(1, 1, NH, HS)}) {
            const bool in_place = true;
            check_merge<float>(s, !in_place);
            check_merge<float>(s, in_place);
            check_merge<bf16>(s, !in_place);
        }
}

struct Addition {
    int addends;
    bool token_major;
    bool in_place = false;  // the sum overwrites the first addend
};

// The sum in Y of tensors of Z.
template <class Y, class Z>
static void check_add(const AttentionShape& s, const Addition& o) {
    using Value = std::remove_const_t<Z>;
    const size_t C = size_t(s.NH) * s.HS;
    const auto rows = [&](size_t gap) {
        return Rows{.B = s.B, .T = s.Tq, .C = C, .gap = gap, .token_major = o.token_major};
    };
    const Rows of_a = rows(8);
    const Rows of_b = rows(16);
    const Rows of_c = rows(24);
    const Rows of_dst = rows(32);
    Twin<Value> a("a", normal<Value>(of_a.size(), 1));
    Twin<Value> b("b", normal<Value>(of_b.size(), 2));
    Twin<Value> c("c", normal<Value>(of_c.size(), 3));
    Twin<Y> dst("dst", poison(of_dst.size()));

    // Only addends of the sum's type can be overwritten by it.
    const auto add_on = [&](const auto& dev, auto to, auto a, auto b, auto c) {
        using Addend = decltype(a);
        if (o.addends < 2)
            b = Addend{};
        if (o.addends < 3)
            c = Addend{};
        if constexpr (std::is_same_v<decltype(to), Addend>)
            add(dev, s, o.in_place ? a : to, a, b, c);
        else
            add(dev, s, to, a, b, c);
    };
    add_on(Cpu(1), of_dst.of(dst.host.data()), of_a.of(a.host.data()), of_b.of(b.host.data()),
           of_c.of(c.host.data()));
    add_on(late(gpu()), of_dst.of<Y>(dst.device), of_a.of<Z>(a.device), of_b.of<Z>(b.device),
           of_c.of<Z>(c.device));

    const std::string what =
        format("add of %d %s to %s, NH %d, HS %d%s:", o.addends, name_of(dtype_of<Value>()),
               name_of(dtype_of<Y>()), s.NH, s.HS, o.token_major ? ", token-major" : "");
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
                const Addition addition{.addends = addends, .token_major = token_major};
                Addition in_place = addition;
                in_place.in_place = true;
                check_add<float, float>(s, addition);
                check_add<float, float>(s, in_place);
                check_add<bf16, float>(s, addition);
            }
            const Addition copy{.addends = 1, .token_major = token_major};
            check_add<float, const float>(s, copy);
            check_add<bf16, const bf16>(s, copy);
        }
}

// -------------------------------------------------------------------------------------------------
// Rings (attention/ring), with the kernel that --attention flash names on this GPU. dev/test_ring
// has the CPU's

TEST(ring_of_threads) {
    for (const AttentionShape& s :
         {scaled(0.2f, whole(2, 48 * 17, 2, 64)), whole(2, 48 * 22, 2, 128)})
        for (const double q_sigma : {1., 3.}) {
            const WholeOptions o{.q_sigma = q_sigma, .threads = kAllCores};
            check_local_rings<float>(gpu(), s, o);
            check_local_rings<bf16>(gpu(), s, o);
        }
}

// Rows wider than what a block of merge() or add() covers at once, as those of d36 and d48 are.
TEST(wide_ring_of_threads) {
    const WholeOptions o{.threads = kAllCores};
    check_local_rings<float>(gpu(), whole(1, 48 * 8, 17, 64), o);
    check_local_rings<bf16>(gpu(), whole(1, 48 * 8, 17, 64), o);
}

TEST(ring_errors_do_not_grow_on_a_gpu) {
    constexpr int kSeeds = 5;
    const WholeOptions o{.threads = kAllCores};
    check_local_rings<float>(gpu(), whole(1, 2048, 4, 64), o, kSeeds);
    check_local_rings<bf16>(gpu(), whole(1, 2048, 4, 64), o, kSeeds);
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
    // errors of out, lse, dq, dk and dv, on the shapes and inputs that find bugs
    {"accuracy", accuracy<X>},
    // logits of up to ±200: of one size, mixed and rising, in whole calls and in pieces
    {"logits", logits<X>},
    // inputs of 0
    {"zeros", zeros<X>},
    // one NaN reaches what depends on it, and no other head or distant row
    {"nan", one_nan<X>},
    // flash_fp32's tiles for GPUs with less shared memory
    {"small tiles", small_tiles<X>},
    // every run writes the same bytes, and works on the device's stream only
    {"determinism", determinism<X>},
    // fewer queries than keys, in tensors with gaps
    {"queries", queries<X>},
    // the diagonal in every place of a tile
    {"shifts", shifts<X>},
    // thousands of keys of tiny weight
    {"tail", tail<X>},
    // the gradients of pieces add up to those of the whole
    {"pieces", pieces<X>, true},
    // forward and backward in chunks, whose results are merged and added up
    {"chunks", chunks<X>, true},
    // more work than multiprocessors, in 20 runs
    {"large", large<X>, true},
    // a few queries and pieces, for compute-sanitizer
    {"few", few<X>},
    // what is not supported gives an Error, never a wrong result
    {"limits", limits<X>},
    // more than 2³¹ elements of qkv and dqkv
    {"big", big<X>},
    // more than 2³¹ elements of out, dout and dq as well, if the GPU has the memory
    {"big out", big_out<X>},
    // more heads than flash_bf16_sm90 works on at once
    {"groups", groups<X>},
};

template <class X>
void check_property(const Property<X>& property, const AttentionKernel<X>& kernel) {
    const int sm = gpu().sm;
    if (!kernel.runs_on(gpu()))
        SKIP("%s needs sm_%d, this GPU is sm_%d", kernel.name, kernel.min_sm, sm);
    if (property.needs_fp32 && !kernel.supports.pieces)
        SKIP("%s takes whole sequences only", kernel.name);
    property.check(kernel);
}

// Their names are such as "flash_bf16 bf16 accuracy".
template <class X>
void add_tests() {
    const AttentionKernels<X> kernels = attention_kernels<X>();
    for (int i = 0; i < kernels.count; i++)
        for (const Property<X>& property : kProperties<X>) {
            const AttentionKernel<X>& kernel = kernels.begin[i];
            const std::string name =
                format("%s %s %s", kernel.name, name_of(dtype_of<X>()), property.name);
            test::cases().push_back({name, [&] { check_property(property, kernel); }});
        }
}

TEST_LIMIT(600);  // references of long sequences take long

int main(int argc, char** argv) {
    add_tests<float>();
    add_tests<bf16>();
    return test::main(argc, argv);
}
