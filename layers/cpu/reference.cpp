// Every layer as plain loops: the specification of the kernels, their fp64 oracle, and what trains
// on a machine without a GPU.
//
// Each function follows its formula. Three conventions hold throughout:
//   - Parallel loops run over outputs. A single thread computes all of an output's sum, in a fixed
//     order, so results do not depend on the number of threads. Sums over rows (weight gradients)
//     run in parallel over slices of columns.
//   - Sums are kept in A = Acc<X>, which here is X itself. Only the reductions, which have millions
//     of terms, use double.
//   - `omp simd reduction` splits a sum into one part per vector lane, which plain C++ does not
//     allow. The order is still fixed.
// Only add_product, the matrix product, is not plain, because it has to be fast.
#include "layers/cpu/reference.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common/threads.h"

// glibc has an exp for whole vectors, which g++ uses in simd loops if exp is declared like this.
// Its last bit may differ from that of the scalar exp, which computes a loop's remainder. So the
// parallel loops run over blocks of kBlock elements, whatever the number of threads.
#if defined(__GLIBC__) && defined(__x86_64__)
extern "C" __attribute__((simd("notinbranch"))) float expf(float) noexcept;
extern "C" __attribute__((simd("notinbranch"))) double exp(double) noexcept;
#endif

constexpr size_t kBlock = 1024;

// In a sum over rows, a thread handles this many columns at a time: whole cache lines, and enough
// to vectorise.
constexpr int kSlice = 64;

// -------------------------------------------------------------------------------------------------
// The device

Cpu::Cpu(int threads) {
    // asked before omp_set_num_threads(), which lowers OpenMP's limit for every later Cpu
    static const int available = available_threads();
    if (threads <= 0)
        threads = available;
    omp_set_num_threads(threads);
    name = format("CPU, %d thread%s", threads, threads == 1 ? "" : "s");
    total_bytes =
        static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGE_SIZE));
}

void* Cpu::alloc(size_t bytes) const {
    void* p = nullptr;
    if (posix_memalign(&p, 64, bytes) != 0)
        throw Error(format(
            "out of memory: cannot allocate %zu bytes on a machine that has %zu; use a smaller "
            "batch or model",
            bytes, total_bytes));
    return p;
}

// -------------------------------------------------------------------------------------------------
// Encoder: out[b,t] = wte[token[b,t]] + wpe[position of t]

template <class X>
void encoder_forward(const Cpu&, X* out, const int* tokens, const X* wte, const X* wpe, int B,
                     int T, int C, const Positions& positions) {
#pragma omp parallel for
    for (size_t n = 0; n < size_t(B) * T; n++) {
        const X* token = wte + size_t(tokens[n]) * C;
        const X* position = wpe + size_t(positions.at(n % T)) * C;
        for (int c = 0; c < C; c++)
            out[n * C + c] = token[c] + position[c];
    }
}

template <class X>
void encoder_backward(const Cpu&, Acc<X>* dwte, Acc<X>* dwpe, void*, const X* dout,
                      const int* tokens, int B, int T, int C, const Positions& positions) {
#pragma omp parallel for
    for (int c0 = 0; c0 < C; c0 += kSlice)
        for (size_t n = 0; n < size_t(B) * T; n++) {
            Acc<X>* dtoken = dwte + size_t(tokens[n]) * C;
            Acc<X>* dposition = dwpe + size_t(positions.at(n % T)) * C;
            for (int c = c0; c < std::min(c0 + kSlice, C); c++) {
                dtoken[c] += dout[n * C + c];
                dposition[c] += dout[n * C + c];
            }
        }
}

// -------------------------------------------------------------------------------------------------
// Layer norm (Ba, Kiros & Hinton 2016):
//   rstd = 1/√(variance + eps)
//   norm = (x − mean)·rstd
//   out  = weight·norm + bias
//
// Backward, with dnorm = weight·dout and mean(…) over the row:
//   dx      = rstd·(dnorm − mean(dnorm) − norm·mean(dnorm·norm))
//   dweight = Σ_n dout·norm
//   dbias   = Σ_n dout

template <class X>
void layernorm_forward(const Cpu&, X* out, Acc<X>* mean, Acc<X>* rstd, const X* inp,
                       const X* weight, const X* bias, size_t N, int C) {
    using A = Acc<X>;
    constexpr A eps = A(1e-5);
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const X* x = inp + n * C;
        A sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < C; c++)
            sum += x[c];
        const A mu = sum / C;

        A squares = 0;  // in a pass of its own, because E[x²] − E[x]² would cancel
#pragma omp simd reduction(+ : squares)
        for (int c = 0; c < C; c++)
            squares += (x[c] - mu) * (x[c] - mu);
        const A r = 1 / std::sqrt(squares / C + eps);

        for (int c = 0; c < C; c++)
            out[n * C + c] = weight[c] * ((x[c] - mu) * r) + bias[c];
        mean[n] = mu;
        rstd[n] = r;
    }
}

// sum[c] += Σ_n term(n, c)
template <class A, class Term>
static void add_columns(A* sum, size_t N, int C, Term term) {
#pragma omp parallel for
    for (int c0 = 0; c0 < C; c0 += kSlice) {
        const int width = std::min(kSlice, C - c0);
        A slice[kSlice] = {};
        for (size_t n = 0; n < N; n++)
            for (int c = 0; c < width; c++)
                slice[c] += term(n, c0 + c);

        for (int c = 0; c < width; c++)
            sum[c0 + c] += slice[c];
    }
}

template <class X>
void layernorm_backward(const Cpu&, X* dinp, Acc<X>* dweight, Acc<X>* dbias, Acc<X>* dinp_sum,
                        void*, const X* dout, const X* inp, const X* weight, const Acc<X>* mean,
                        const Acc<X>* rstd, size_t N, int C) {
    using A = Acc<X>;
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        const X* x = inp + n * C;
        const X* dy = dout + n * C;
        const A mu = mean[n];
        const A r = rstd[n];

        A dnorm_mean = 0;
        A dnorm_norm_mean = 0;
#pragma omp simd reduction(+ : dnorm_mean, dnorm_norm_mean)
        for (int c = 0; c < C; c++) {
            dnorm_mean += weight[c] * dy[c];
            dnorm_norm_mean += weight[c] * dy[c] * ((x[c] - mu) * r);
        }
        dnorm_mean /= C;
        dnorm_norm_mean /= C;

        for (int c = 0; c < C; c++)
            dinp[n * C + c] +=
                r * (weight[c] * dy[c] - dnorm_mean - (x[c] - mu) * r * dnorm_norm_mean);
    }

    add_columns(dweight, N, C, [=](size_t n, int c) {
        return dout[n * C + c] * ((inp[n * C + c] - mean[n]) * rstd[n]);
    });
    add_columns(dbias, N, C, [=](size_t n, int c) { return dout[n * C + c]; });
    if (dinp_sum)
        add_columns(dinp_sum, N, C, [=](size_t n, int c) { return dinp[n * C + c]; });
}

// -------------------------------------------------------------------------------------------------
// Matmul:
//   out     = inp·weightᵀ + bias
//   dinp    = dout·weight
//   dweight = doutᵀ·inp

namespace {
// A matrix with any strides: element (i, j) is p[i·row_stride + j·col_stride].
template <class X>
struct Matrix {
    const X* p;
    size_t row_stride;
    size_t col_stride;

    const X& at(size_t i, size_t j) const { return p[i * row_stride + j * col_stride]; }
    Matrix from(size_t i, size_t j) const {  // without the first i rows and j columns
        return {.p = &at(i, j), .row_stride = row_stride, .col_stride = col_stride};
    }
    Matrix transposed() const {
        return {.p = p, .row_stride = col_stride, .col_stride = row_stride};
    }
};

template <class X>
Matrix<X> row_major(const X* p, int columns) {
    return {.p = p, .row_stride = size_t(columns), .col_stride = 1};
}

struct Product {  // (M,N) = (M,K)·(K,N)
    size_t M;
    size_t N;
    size_t K;
};
}  // namespace

// Copies the first `width` columns of m's first `depth` rows to a contiguous strip. Its rows have W
// ≥ width elements, the rest of which are zeros.
template <size_t W, class Row, class X>
static void pack(Row* strip, Matrix<X> m, size_t depth, size_t width) {
    for (size_t k = 0; k < depth; k++)
        for (size_t w = 0; w < W; w++)
            strip[k][w] = w < width ? m.at(k, w) : X(0);
}

// c += a·b for c (M,N) row-major, a (M,K), b (K,N). All three products of a linear layer are this
// one, with different strides.
//
// The innermost loop keeps a tile of Mr × Nr sums in vector registers. For each k it adds the outer
// product of Mr scalars of a and one cache line of b. The compiler splits that line into as many
// registers as the instruction set needs, so the sums occupy 6 registers of AVX-512, or 12 of AVX's
// 16. The loop reads packed strips of a and b, which are Kc deep. A strip of b (16 KiB) stays in L1
// while it is multiplied with Mc rows of a, and those rows are packed once for all of the Nc
// columns of b.
template <class X>
static void add_product(X* c, Matrix<X> a, Matrix<X> b, const Product& product) {
    const size_t M = product.M;
    const size_t N = product.N;
    const size_t K = product.K;

    constexpr size_t Mr = 6;
    constexpr size_t Nr = 64 / sizeof(X);
    constexpr size_t Mc = 4 * Mr;
    constexpr size_t Nc = 128 * Nr;
    constexpr size_t Kc = 256;
    struct AStrip {
        X at[Kc][Mr];
    };
    struct alignas(64) BStrip {
        X at[Kc][Nr];
    };

    std::vector<BStrip> b_strips((std::min(N, Nc) + Nr - 1) / Nr);
    for (size_t j0 = 0; j0 < N; j0 += Nc)
        for (size_t k0 = 0; k0 < K; k0 += Kc) {
            const size_t j1 = std::min(j0 + Nc, N);
            const size_t depth = std::min(Kc, K - k0);
#pragma omp parallel for
            for (size_t j = j0; j < j1; j += Nr)
                pack<Nr>(b_strips[(j - j0) / Nr].at, b.from(k0, j), depth, std::min(Nr, N - j));

#pragma omp parallel for
            for (size_t i0 = 0; i0 < M; i0 += Mc) {
                const size_t i1 = std::min(i0 + Mc, M);
                AStrip a_strips[Mc / Mr];
                for (size_t i = i0; i < i1; i += Mr)
                    pack<Mr>(a_strips[(i - i0) / Mr].at, a.from(i, k0).transposed(), depth,
                             std::min(Mr, M - i));

                for (size_t j = j0; j < j1; j += Nr)
                    for (size_t i = i0; i < i1; i += Mr) {
                        const AStrip& a_strip = a_strips[(i - i0) / Mr];
                        const BStrip& b_strip = b_strips[(j - j0) / Nr];

                        X sums[Mr][Nr] = {};
                        for (size_t k = 0; k < depth; k++)
                            for (size_t r = 0; r < Mr; r++)
#pragma omp simd
                                for (size_t w = 0; w < Nr; w++)
                                    sums[r][w] += a_strip.at[k][r] * b_strip.at[k][w];

                        // A copy, because indexing `sums` by variables would force it out of
                        // registers.
                        X tile[Mr][Nr];
                        std::memcpy(tile, sums, sizeof sums);
                        for (size_t r = 0; r < std::min(Mr, M - i); r++)
                            for (size_t w = 0; w < std::min(Nr, N - j); w++)
                                c[(i + r) * N + j + w] += tile[r][w];
                    }
            }
        }
}

template <class X>
void matmul_forward(const Cpu&, X* out, const X* inp, const X* weight, const X* bias, size_t N,
                    int C, int OC, const X* residual) {
#pragma omp parallel for
    for (size_t n = 0; n < N; n++)
        for (int o = 0; o < OC; o++)
            out[n * OC + o] = (bias ? bias[o] : X(0)) + (residual ? residual[n * OC + o] : X(0));

    add_product(out, row_major(inp, C), row_major(weight, C).transposed(),
                {.M = N, .N = size_t(OC), .K = size_t(C)});
}

template <class X>
void matmul_backward(const Cpu& dev, X* dinp, Acc<X>* dweight, const X* dout, const X* inp,
                     const X* weight, size_t N, int C, int OC, bool accumulate) {
    if (dweight && !accumulate)
        dev.zero(dweight, size_t(OC) * C * sizeof(Acc<X>));
    if (dweight)
        add_product(dweight, row_major(dout, OC).transposed(), row_major(inp, C),
                    {.M = size_t(OC), .N = size_t(C), .K = N});
    if (dinp) {
        dev.zero(dinp, N * C * sizeof(X));
        add_product(dinp, row_major(dout, OC), row_major(weight, C),
                    {.M = N, .N = size_t(C), .K = size_t(OC)});
    }
}

// -------------------------------------------------------------------------------------------------
// The activation f, which is GELU in its tanh form, as in GPT-2 (Hendrycks & Gimpel 2016):
//   f(x) = ½x(1 + tanh u),   u = √(2/π)·(x + 0.044715 x³)
//
// As ½(1 + tanh u) = σ(2u) = 1/(1 + e^{−2u}), one exponential is enough, and nothing cancels for
// large negative x. With s = σ(2u):
//   f(x)  = x·s
//   f'(x) = s + x·s(1 − s)·2u'

template <class A>
static A two_u(A x) {
    const A root = std::sqrt(A(8) / A(M_PI));  // 2·√(2/π)
    return root * (x + A(0.044715) * x * x * x);
}
template <class A>
static A two_du(A x) {
    const A root = std::sqrt(A(8) / A(M_PI));
    return root * (1 + 3 * A(0.044715) * x * x);
}
template <class A>
static A activation(A x) {
    return x / (1 + std::exp(-two_u(x)));
}
template <class A>
static A activation_derivative(A x) {
    const A s = 1 / (1 + std::exp(-two_u(x)));
    return s + x * s * (1 - s) * two_du(x);
}

template <class X>
void activation_forward(const Cpu&, X* out, const X* inp, size_t n) {
#pragma omp parallel for
    for (size_t i0 = 0; i0 < n; i0 += kBlock)
#pragma omp simd
        for (size_t i = i0; i < std::min(i0 + kBlock, n); i++)
            out[i] = activation(inp[i]);
}

template <class X>
void activation_backward(const Cpu& dev, X* dinp, Acc<X>* dinp_sum, X* out, void*, const X* inp,
                         const X* dout, size_t N, int C) {
    const size_t elements = N * C;
    if (out)
        activation_forward(dev, out, inp, elements);

#pragma omp parallel for
    for (size_t i0 = 0; i0 < elements; i0 += kBlock)
#pragma omp simd
        for (size_t i = i0; i < std::min(i0 + kBlock, elements); i++)
            dinp[i] = dout[i] * activation_derivative(inp[i]);

    add_columns(dinp_sum, N, C, [=](size_t n, int c) { return dinp[n * C + c]; });
}

// -------------------------------------------------------------------------------------------------
// Attention, one row (query) at a time, over the keys that the query sees:
//   s   = scale·Kq
//   lse = log Σ exp s
//   p   = exp(s − lse)
//   out = Vᵀp
//
// Backward (Dao et al. 2022, appendix B.4) recomputes p from the stored lse. With D = do·o:
//   dp_j  = do·v_j
//   ds_j  = p_j (dp_j − D)
//   dq   += scale·ds_j k_j
//   dk_j += scale·ds_j q
//   dv_j += p_j do
// D replaces the sum Σ_j p_j dp_j in the softmax's derivative:
//   Σ_j p_j (do·v_j) = do·Σ_j p_j v_j = do·o

template <class X>
static X dot(const X* a, const X* b, int n) {
    X sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}
// y += alpha·x
template <class X>
static void axpy(X* y, X alpha, const X* x, int n) {
#pragma omp simd
    for (int i = 0; i < n; i++)
        y[i] += alpha * x[i];
}

namespace {
template <class A>
struct SoftmaxOfRow {
    A max;  // of s
    A sum;  // of exp(s − max)
};
}  // namespace

// Turns a row's s into exp(s − max).
template <class A>
static SoftmaxOfRow<A> exponentials(A* s, int n) {
    A max = -std::numeric_limits<A>::infinity();
#pragma omp simd reduction(max : max)
    for (int j = 0; j < n; j++)
        max = std::max(max, s[j]);

#pragma omp simd
    for (int j = 0; j < n; j++)
        s[j] = std::exp(s[j] - max);

    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; j++)
        sum += s[j];
    return {.max = max, .sum = sum};
}

constexpr int kMaxHeadSize = 256;

// Calls f(HS). The usual head sizes are passed as compile-time constants, so that a row of q, o or
// dq is kept in registers.
template <class F>
static void with_head_size(int HS, F f) {
    if (HS > kMaxHeadSize)
        throw Error(format("attention: the head size is %d, but on a CPU it can be at most %d", HS,
                           kMaxHeadSize));
    if (HS == 32)
        return f(std::integral_constant<int, 32>{});
    if (HS == 64)
        return f(std::integral_constant<int, 64>{});
    f(HS);
}

// Calls f(b, h, row, memory) for every row of every head, in parallel. `memory` is room for n
// numbers, which the rows of a thread share.
template <class X, class F>
static void for_each_row(const AttentionShape& s, int rows, int n, F f) {
#pragma omp parallel
    {
        std::vector<X> memory(n);
#pragma omp for collapse(3) schedule(dynamic, 16)
        for (int b = 0; b < s.B; b++)
            for (int h = 0; h < s.NH; h++)
                for (int row = 0; row < rows; row++)
                    f(b, h, row, memory.data());
    }
}

// Query i sees this many keys, the first ones.
static int keys_seen(const AttentionShape& s, int i) {
    return s.causal ? i + s.shift() + 1 : s.Tk;
}

// The first query that sees key j. All later ones see it, too.
static int first_query(const AttentionShape& s, int j) {
    return s.causal ? std::max(0, j - s.shift()) : 0;
}

// 1/√HS in X's precision, unless the shape has another scale.
template <class X>
static X scale_of(const AttentionShape& s) {
    return s.scale != 0 ? X(s.scale) : 1 / std::sqrt(X(s.HS));
}

template <class X>
constexpr AttentionLimits kAttentionLimits = {
    .name = "attention on the CPU",
    .alignment = alignof(X),
    .supports = {.any_head_size = true, .pieces = true, .lse_rest = true},
};

template <class X>
void attention_forward(const Cpu&, const AttentionForward<X>& c) {
    check_call(kAttentionLimits<X>, c);
    const AttentionShape& s = c.s;
    const X scale = scale_of<X>(s);

    with_head_size(s.HS, [&](auto HS) {
        for_each_row<X>(s, s.Tq, s.Tk, [&](int b, int h, int i, X* p) {
            const int keys = keys_seen(s, i);
            for (int j = 0; j < keys; j++)
                p[j] = scale * dot(c.q.row(b, i, h, HS), c.k.row(b, j, h, HS), HS);
            const SoftmaxOfRow<X> softmax = exponentials(p, keys);

            // Instead of p, o is divided by the sum of p.
            X o[kMaxHeadSize] = {};
            for (int j = 0; j < keys; j++)
                axpy<X>(o, p[j], c.v.row(b, j, h, HS), HS);
            for (int d = 0; d < HS; d++)
                o[d] /= softmax.sum;
            std::copy_n(o, HS, c.out.row(b, i, h, HS));

            const size_t head = size_t(b) * s.NH + h;
            const X lse = softmax.max + std::log(softmax.sum);
            c.lse.at(head, i) = lse;
            if (c.lse_rest.ptr) {
                const double exact = double(softmax.max) + std::log(double(softmax.sum));
                c.lse_rest.at(head, i) = X(exact - lse);
            }
        });
    });
}

namespace {
// D = do·o for every query of every head.
template <class X>
class Dots {
  public:
    explicit Dots(const AttentionShape& s)
        : NH_(s.NH), Tq_(s.Tq), values_(size_t(s.B) * s.NH * s.Tq) {}
    X& at(int b, int h, int i) { return values_[(size_t(b) * NH_ + h) * Tq_ + i]; }

  private:
    int NH_;
    int Tq_;
    std::vector<X> values_;
};
}  // namespace

// Writes dq and D. A query's dq is a sum over the keys that it sees.
template <class X, class Size>
static void query_gradients(const AttentionBackward<X>& c, Size HS, X scale, Dots<X>& D) {
    const AttentionShape& s = c.s;
    for_each_row<X>(s, s.Tq, s.Tk, [&](int b, int h, int i, X* p) {
        const int keys = keys_seen(s, i);
        const X* q_i = c.q.row(b, i, h, HS);
        const X* do_i = c.dout.row(b, i, h, HS);
        const X D_i = dot(do_i, c.out.row(b, i, h, HS), HS);
        D.at(b, h, i) = D_i;

        const size_t head = size_t(b) * s.NH + h;
        const X lse = c.lse.at(head, i);
        for (int j = 0; j < keys; j++)
            p[j] = scale * dot(q_i, c.k.row(b, j, h, HS), HS) - lse;
        if (c.lse_rest.ptr)
            for (int j = 0; j < keys; j++)
                p[j] -= c.lse_rest.at(head, i);
#pragma omp simd
        for (int j = 0; j < keys; j++)
            p[j] = std::exp(p[j]);

        X dq_i[kMaxHeadSize] = {};
        for (int j = 0; j < keys; j++) {
            const X ds = p[j] * (dot(do_i, c.v.row(b, j, h, HS), HS) - D_i);
            axpy<X>(dq_i, scale * ds, c.k.row(b, j, h, HS), HS);
        }
        std::copy_n(dq_i, HS, c.dq.row(b, i, h, HS));
    });
}

// Writes dk and dv. A key's are sums over the queries that see it.
template <class X, class Size>
static void key_gradients(const AttentionBackward<X>& c, Size HS, X scale, Dots<X>& D) {
    const AttentionShape& s = c.s;
    for_each_row<X>(s, s.Tk, s.Tq, [&](int b, int h, int j, X* p) {
        const int first = first_query(s, j);
        const X* k_j = c.k.row(b, j, h, HS);
        const X* v_j = c.v.row(b, j, h, HS);

        const size_t head = size_t(b) * s.NH + h;
        for (int i = first; i < s.Tq; i++)
            p[i] = scale * dot(c.q.row(b, i, h, HS), k_j, HS) - c.lse.at(head, i);
        if (c.lse_rest.ptr)
            for (int i = first; i < s.Tq; i++)
                p[i] -= c.lse_rest.at(head, i);
#pragma omp simd
        for (int i = first; i < s.Tq; i++)
            p[i] = std::exp(p[i]);

        X dk_j[kMaxHeadSize] = {};
        X dv_j[kMaxHeadSize] = {};
        for (int i = first; i < s.Tq; i++) {
            const X* do_i = c.dout.row(b, i, h, HS);
            const X ds = p[i] * (dot(do_i, v_j, HS) - D.at(b, h, i));
            axpy<X>(dk_j, scale * ds, c.q.row(b, i, h, HS), HS);
            axpy<X>(dv_j, p[i], do_i, HS);
        }
        std::copy_n(dk_j, HS, c.dk.row(b, j, h, HS));
        std::copy_n(dv_j, HS, c.dv.row(b, j, h, HS));
    });
}

template <class X>
void attention_backward(const Cpu&, const AttentionBackward<X>& c) {
    check_call(kAttentionLimits<X>, c);
    const X scale = scale_of<X>(c.s);
    Dots<X> D(c.s);
    with_head_size(c.s.HS, [&](auto HS) {
        query_gradients(c, HS, scale, D);
        key_gradients(c, HS, scale, D);
    });
}

// -------------------------------------------------------------------------------------------------
// Classifier:
//   loss = −log softmax(x)[target] = log Σ exp(x − max) + max − x[target]
//   dx   = dloss·(softmax(x) − onehot)

template <class X>
void classifier(const Cpu&, X* logits, Acc<X>* losses, const int* targets, Acc<X> dloss, size_t N,
                int V, int Vp) {
    using A = Acc<X>;
#pragma omp parallel for
    for (size_t n = 0; n < N; n++) {
        X* x = logits + n * Vp;
        const int target = targets[n];
        const A max = *std::max_element(x, x + V);
        A sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < V; i++)
            sum += std::exp(x[i] - max);

        // A target outside the vocabulary makes the loss and the gradient NaN, so that the
        // optimizer does not update anything.
        const bool valid = target >= 0 && target < V;
        const A one_or_nan = valid ? A(1) : std::numeric_limits<A>::quiet_NaN();
        losses[n] = one_or_nan * (std::log(sum) + max - x[valid ? target : 0]);
        if (dloss == 0)
            continue;

#pragma omp simd
        for (int i = 0; i < V; i++)
            x[i] = one_or_nan * dloss * (std::exp(x[i] - max) / sum - (i == target));
        std::fill(x + V, x + Vp, X(0));
    }
}

// -------------------------------------------------------------------------------------------------
// Reductions, each by a single thread and in double

template <class A>
void reduce_sum(const Cpu&, A* out, void*, const A* x, A scale, size_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++)
        sum += x[i];
    out[0] = A(scale * sum);
}

template <class A>
void global_norm(const Cpu&, A* out, void*, const A* x, size_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++)
        sum += double(x[i]) * x[i];
    out[0] = A(std::sqrt(sum));
}

template <class X>
size_t count_nonfinite(const Cpu&, void*, const X* x, size_t n) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        count += !std::isfinite(x[i]);
    return count;
}

// -------------------------------------------------------------------------------------------------
// AdamW (Loshchilov & Hutter 2019, Algorithm 2), after clipping g by the global norm:
//   m ← β₁m + (1 − β₁)g
//   v ← β₂v + (1 − β₂)g²
//   m̂ = m/(1 − β₁ᵗ)
//   v̂ = v/(1 − β₂ᵗ)
//   p ← p − lr·(m̂/(√v̂ + ε) + λp)

template <class X>
void adamw_update(const Cpu&, X* params, Acc<X>*, Acc<X>* m, Acc<X>* v, const Acc<X>* grads,
                  const Acc<X>* norm, const ParamRange* ranges, int num_ranges,
                  const AdamW& hyper) {
    using A = Acc<X>;
    if (!std::isfinite(*norm))
        return;

    const A clip = hyper.max_norm > 0 ? std::min(A(1), A(hyper.max_norm) / *norm) : A(1);
    const A lr = hyper.lr;
    const A beta1 = hyper.beta1;
    const A beta2 = hyper.beta2;
    const A eps = hyper.eps;
    // 1 − βᵗ, in double, because it cancels for small t.
    const A bias_correction1 = A(1 - std::pow(double(hyper.beta1), hyper.step));
    const A bias_correction2 = A(1 - std::pow(double(hyper.beta2), hyper.step));

    for (const ParamRange* range = ranges; range < ranges + num_ranges; range++) {
        const A decay = range->decay ? hyper.weight_decay : 0;
        for (size_t piece = 0; piece < range->pieces; piece++) {
            const size_t begin = range->piece_begin(piece);
            const size_t state = range->state_begin(piece);
#pragma omp parallel for
            for (size_t k = 0; k < range->size; k++) {
                const size_t i = begin + k;
                const size_t s = state + k;
                const A g = clip * grads[s];
                m[s] = beta1 * m[s] + (1 - beta1) * g;
                v[s] = beta2 * v[s] + (1 - beta2) * g * g;
                const A m_hat = m[s] / bias_correction1;
                const A v_hat = v[s] / bias_correction2;
                params[i] -= lr * (m_hat / (std::sqrt(v_hat) + eps) + decay * params[i]);
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------

#define INSTANTIATE(X)                                                                             \
    template void encoder_forward(const Cpu&, X*, const int*, const X*, const X*, int, int, int,   \
                                  const Positions&);                                               \
    template void encoder_backward(const Cpu&, X*, X*, void*, const X*, const int*, int, int, int, \
                                   const Positions&);                                              \
    template void layernorm_forward(const Cpu&, X*, X*, X*, const X*, const X*, const X*, size_t,  \
                                    int);                                                          \
    template void layernorm_backward(const Cpu&, X*, X*, X*, X*, void*, const X*, const X*,        \
                                     const X*, const X*, const X*, size_t, int);                   \
    template void matmul_forward(const Cpu&, X*, const X*, const X*, const X*, size_t, int, int,   \
                                 const X*);                                                        \
    template void matmul_backward(const Cpu&, X*, X*, const X*, const X*, const X*, size_t, int,   \
                                  int, bool);                                                      \
    template void activation_forward(const Cpu&, X*, const X*, size_t);                            \
    template void activation_backward(const Cpu&, X*, X*, X*, void*, const X*, const X*, size_t,   \
                                      int);                                                        \
    template void attention_forward(const Cpu&, const AttentionForward<X>&);                       \
    template void attention_backward(const Cpu&, const AttentionBackward<X>&);                     \
    template void classifier(const Cpu&, X*, X*, const int*, X, size_t, int, int);                 \
    template void reduce_sum(const Cpu&, X*, void*, const X*, X, size_t);                          \
    template void global_norm(const Cpu&, X*, void*, const X*, size_t);                            \
    template size_t count_nonfinite(const Cpu&, void*, const X*, size_t);                          \
    template void adamw_update(const Cpu&, X*, X*, X*, X*, const X*, const X*, const ParamRange*,  \
                               int, const AdamW&);
INSTANTIATE(float)
INSTANTIATE(double)
