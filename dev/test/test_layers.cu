// Tests every layer but attention against the fp64 reference, for float and bf16, and the device
// itself.
//
// A test describes a call once, and check() makes it on both backends. Inputs are random and
// rounded to X first, so that both compute from the same numbers. What a layer writes starts as
// NaN, and so does scratch. What it adds into starts as random values on both sides. Each call runs
// twice on the GPU and must give the same bits. Whatever it reads arrives late, and all memory lies
// between guards (dev/test/late.h).
#include <deque>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "common/random.h"
#include "dev/common/test.h"
#include "dev/test/late.h"
#include "layers/cpu/reference.h"
#include "layers/layers.h"
#include "layers/matmul_autotune.h"

namespace {

// Tolerances, relative to the largest reference value of the tensor:
// - fp32 has a unit roundoff of 6e-8. A value takes a few operations. The error of a sum of n
//   random terms grows like √n·6e-8.
constexpr double kFp32 = 4e-6;
// - bf16 output has one rounding to 8 bits, 2⁻⁸, after an error as for fp32.
constexpr double kBf16 = 1.0 / 256 + kFp32;
// - TF32 products lose all but 10 bits of both factors' mantissas, 2⁻¹⁰ each if they are cut off.
constexpr double kTf32 = 2.0 / 1024;
// - bf16 products are summed in fp32. Tensor cores cut sums off instead of rounding, so the error
//   is 1.2e-7 an addition and grows like n.
constexpr double kTensorCoreSum = 2e-5;

template <class X>
constexpr double kOutput = std::is_same_v<X, bf16> ? kBf16 : kFp32;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
using Values = std::vector<double>;

Cuda& gpu() {
    std::string why;
    if (Cuda::count(&why) == 0)
        SKIP("no GPU (%s)", why.c_str());
    static OwnStream dev;
    return dev;
}
// The GPU for one call of a layer, made late for each call (see dev/test/late.h).
struct Late {
    operator const Cuda&() const { return late(gpu()); }
};

template <class X>
double rounded(double x) {
    return static_cast<float>(static_cast<X>(static_cast<float>(x)));
}
// n normal values, rounded to X. Every call draws new ones.
template <class X>
Values randn(size_t n, double scale = 1.0, double shift = 0.0) {
    static uint64_t seed = 0;
    seed++;
    Values values(n);
#pragma omp parallel for
    for (size_t i = 0; i < n; i++)
        values[i] = rounded<X>(shift + scale * normal(seed, i));
    return values;
}
Values poison(size_t n) {
    return Values(n, kNaN);
}
std::vector<int> tokens_below(int V, size_t n, uint64_t seed) {
    std::vector<int> tokens(n);
    for (size_t i = 0; i < n; i++)
        tokens[i] = static_cast<int>(uniform(seed, i) * V);
    return tokens;
}
bool same_bits(const Values& a, const Values& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

// -------------------------------------------------------------------------------------------------
// A call on both backends

struct AnyTensor {
    Values start;
    Values reference;  // the reference's results. Of an input it reads `start`
    Values first;      // the GPU's results, after its first run
    virtual void reset() const = 0;
    virtual Values values() const = 0;
};

// A tensor that is T on the GPU. There `offset` elements precede it, to break its alignment.
template <class T>
struct Tensor : AnyTensor {
    const LateMemory memory;
    T* const p;

    explicit Tensor(const Values& values, size_t offset = 0)
        : memory(gpu(), (values.size() + offset) * sizeof(T)),
          p(static_cast<T*>(memory.p) + offset) {
        start = values;
        reset();
    }
    operator T*() const { return p; }
    void reset() const override {
        std::vector<T> host(start.size());
#pragma omp parallel for
        for (size_t i = 0; i < host.size(); i++)
            host[i] = static_cast<T>(static_cast<float>(start[i]));
        gpu().upload(p, host.data(), host.size() * sizeof(T));
        gpu().sync();
    }
    Values values() const override {
        std::vector<T> host(start.size());
        gpu().download(host.data(), p, host.size() * sizeof(T));
        Values values(host.size());
#pragma omp parallel for
        for (size_t i = 0; i < host.size(); i++)
            values[i] = static_cast<float>(host[i]);
        return values;
    }
};

struct Ints {
    const std::vector<int> host;
    const LateMemory memory;
    explicit Ints(const std::vector<int>& values)
        : host(values), memory(gpu(), values.size() * sizeof(int)) {
        gpu().upload(memory.p, host.data(), host.size() * sizeof(int));
        gpu().sync();
    }
    operator int*() const { return static_cast<int*>(memory.p); }
};

// Begins as NaN. The reference does not use it.
struct Scratch : LateMemory {
    explicit Scratch(size_t bytes) : LateMemory(gpu(), bytes + sizeof(float)) {}
};

// A backend on which a call runs. on(x) is what the layer gets for the tensor x.
struct OnReference {
    const Cpu dev;
    double* operator()(AnyTensor& x) const {
        return x.reference.empty() ? x.start.data() : x.reference.data();
    }
    const int* operator()(const Ints& x) const { return x.host.data(); }
};
struct OnGpu {
    Late dev;
    template <class T>
    T* operator()(const Tensor<T>& x) const {
        return x;
    }
    const int* operator()(const Ints& x) const { return x; }
};

// A tensor that a call writes or adds into. Errors are relative to its largest value, or to `least`
// if that is larger.
struct Result {
    const char* name;
    AnyTensor& tensor;
    double tolerance = kFp32;
    double least = 0.0;
    bool each = false;  // errors are relative to each value instead of the largest
    // adds into the tensor the sum of this result's rows, as stored
    const AnyTensor* summed = nullptr;
};

void compare(const std::string& what, const Result& r) {
    const Values& got = r.tensor.first;
    const Values& want = r.tensor.reference;
    double largest = r.least;
    for (double w : want)
        largest = std::max(largest, std::fabs(w));
    for (size_t i = 0; i < want.size(); i++) {
        const double scale = r.each ? std::max(r.least, std::fabs(want[i])) : largest;
        const double off = std::fabs(got[i] - want[i]);
        if (off <= r.tolerance * scale)
            continue;
        test::report((what + " " + r.name).c_str(), static_cast<int>(i),
                     format("got %.9g, expected %.9g; off by %.2e of %.3g, %.2e allowed", got[i],
                            want[i], off / scale, scale, r.tolerance));
        return;
    }
}

// Another form of a call gives the bits of the first run.
template <class Call>
void check_same(const std::string& what, const std::vector<Result>& results, Call call) {
    for (const Result& r : results)
        r.tensor.reset();
    call(OnGpu());
    for (const Result& r : results)
        if (!same_bits(r.tensor.values(), r.tensor.first))
            test::report((what + " " + r.name).c_str(), 0, "other bits");
}

// Runs `reference` on the CPU and `call` on the GPU, and compares their results.
template <class Call, class Reference>
void check(const std::string& what, const std::vector<Result>& results, Call call,
           Reference reference) {
    for (const Result& r : results) {
        r.tensor.reference = r.tensor.start;
        r.tensor.reset();
    }
    reference(OnReference());
    call(OnGpu());
    for (const Result& r : results) {
        r.tensor.first = r.tensor.values();
        if (r.summed) {
            r.tensor.reference = r.tensor.start;
            const size_t C = r.tensor.start.size();
            for (size_t i = 0; i < r.summed->first.size(); i++)
                r.tensor.reference[i % C] += r.summed->first[i];
        }
        compare(what, r);
    }
    check_same(what, results, call);
}
template <class Call>
void check(const std::string& what, const std::vector<Result>& results, Call call) {
    check(what, results, call, call);
}

template <class X>
std::string label(const char* what, size_t a, size_t b, size_t c) {
    return format("%s %s %zux%zux%zu", what, name_of(dtype_of<X>()), a, b, c);
}

// A test for each type of activations, name_fp32 and name_bf16.
#define TEST_OF_X(name)       \
    template <class X>        \
    void with_##name();       \
    TEST(name##_fp32) {       \
        with_##name<float>(); \
    }                         \
    TEST(name##_bf16) {       \
        with_##name<bf16>();  \
    }                         \
    template <class X>        \
    void with_##name()

// -------------------------------------------------------------------------------------------------
// The device

__global__ void empty_kernel() {}
TEST(device) {
    const Cuda& dev = gpu();
    // make adds the a to 90. On a 9.0 the code may also come from PTX for 80
    cudaFuncAttributes built;
    CUDA_CHECK(cudaFuncGetAttributes(&built, empty_kernel));
    CHECK(dev.sm90a == (dev.sm == 90 && built.ptxVersion == 90));
    CHECK(dev.sm >= 50 && dev.num_sms > 0 && dev.total_bytes > 0 && !dev.name.empty());
    CHECK(dev.free_bytes() > 0 && dev.free_bytes() < dev.total_bytes);
    CHECK_ERROR(Cuda(99), "no GPU 99");
    CHECK_ERROR(Cuda(-1), "no GPU -1");
    bool out_of_memory = false;
    try {
        dev.alloc(size_t{1} << 50);
    } catch (const OutOfMemory& e) {
        out_of_memory = std::strstr(e.what(), "1048576.00 GiB");
    }
    CHECK(out_of_memory);
    // the failure is not reported again by the next check
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK_ERROR(CUDA_CHECK(cudaSetDevice(99)), "cudaSetDevice(99)");
    CHECK_ERROR(CUBLAS_CHECK(CUBLAS_STATUS_NOT_SUPPORTED), "CUBLAS_STATUS_NOT_SUPPORTED");
}

TEST(another_stream_is_noticed) {
    const Tensor<float> from({1.0, 2.0});
    const Tensor<float> to({3.0, 4.0});
    for (const bool other : {true, false}) {
        const Late late;
        const Cuda& dev = late;
        CUDA_CHECK(cudaMemcpyAsync(to, from, 2 * sizeof(float), cudaMemcpyDeviceToDevice,
                                   other ? 0 : dev.stream));
        CHECK(same_bits(to.values(), other ? Values{3.0, 4.0} : Values{1.0, 2.0}));
        CHECK(same_bits(from.values(), {1.0, 2.0}));
    }
}

// -------------------------------------------------------------------------------------------------
// Encoder

template <class X>
void check_encoder(int B, int T, int C, int V, const std::vector<int>& token_list,
                   const Positions& positions = {}) {
    const size_t N = size_t(B) * T;
    const int last_early = positions.at(std::min(positions.chunk, T) - 1);
    const size_t rows = 1 + std::max(positions.at(T - 1), last_early);
    const Ints tokens(token_list);
    Tensor<X> wte(randn<X>(size_t(V) * C));
    Tensor<X> wpe(randn<X>(rows * C));
    Tensor<X> dout(randn<X>(N * C));
    Tensor<X> out(poison(N * C));
    Tensor<float> dwte(randn<float>(size_t(V) * C));
    Tensor<float> dwpe(randn<float>(rows * C));
    check(label<X>("encoder", B, T, C), {{"out", out, kOutput<X>}, {"dwte", dwte}, {"dwpe", dwpe}},
          [&](const auto& on) {
              encoder_forward(on.dev, on(out), on(tokens), on(wte), on(wpe), B, T, C, positions);
              std::vector<int> sorted(encoder_plan_ints(on.dev, N), -1);
              encoder_plan(on.dev, sorted.data(), token_list.data(), N);
              const Ints plan(sorted);
              const Scratch scratch(encoder_scratch_bytes(on.dev, B, T, C));
              encoder_backward(on.dev, on(dwte), on(dwpe), scratch.p, on(dout), on(plan), B, T, C,
                               positions);
          });
}

TEST_OF_X(encoder) {
    const int shapes[][3] = {{1, 1, 1}, {1, 3, 7}, {3, 127, 65}, {2, 64, 768}, {5, 33, 1600}};
    for (const auto& [B, T, C] : shapes)
        check_encoder<X>(B, T, C, 257, tokens_below(257, size_t(B) * T, 1));
    // every token has several chunks
    check_encoder<X>(16, 256, 64, 40, tokens_below(40, 4096, 2));
    // one token, with many chunks, one and two
    for (const int same : {4096, kEncoderChunk, kEncoderChunk + 1})
        check_encoder<X>(1, same, 64, 3, std::vector<int>(same, 2));
    std::vector<int> different(4096);
    std::vector<int> pairs(33 * 64);
    for (int i = 0; i < 4096; i++)
        different[i] = (i * 1021) % 4096;
    // 33 positions a token, the most partial rows there can be
    for (int i = 0; i < 33 * 64; i++)
        pairs[i] = i % 64;
    check_encoder<X>(16, 256, 64, 4096, different);
    check_encoder<X>(33, 64, 64, 64, pairs);

    // The second pass has a block for each multiprocessor. With more tokens that have several
    // chunks, its blocks go on to a second and a third one.
    const int many = 2 * gpu().num_sms + 5;
    const int each = kEncoderChunk + 3;
    std::vector<int> crowded(many * each);
    for (int i = 0; i < many * each; i++)
        crowded[i] = i % many;
    check_encoder<X>(each, many, 64, many, crowded);
    check_encoder<X>(each, many, 33, many, crowded);

    // The first pass has six blocks for each multiprocessor, if rows are wide. Here its blocks go
    // on, too.
    const int alone = 13 * gpu().num_sms;
    std::vector<int> single(alone);
    std::iota(single.rbegin(), single.rend(), 0);
    check_encoder<X>(13, gpu().num_sms, 1030, alone, single);
    check_encoder<X>(13, gpu().num_sms, 2048, alone, single);

    // a rank's two chunks of a sequence
    check_encoder<X>(3, 66, 64, 40, tokens_below(40, 198, 3), {33, 33, 7 * 33});
    check_encoder<X>(2, 6, 65, 40, tokens_below(40, 12, 4), {3, 0, 5});
}

// -------------------------------------------------------------------------------------------------
// Layer norm

template <class X>
void check_layernorm(size_t N, int C, size_t offset = 0) {
    const std::string what = label<X>("layernorm", N, C, offset);
    // A mean far from zero would expose a variance computed as E[x²] − E[x]².
    Tensor<X> inp(randn<X>(N * C, 1.0, 8.0), offset);
    Tensor<X> weight(randn<X>(C, 0.5, 1.0), offset);
    Tensor<X> bias(randn<X>(C), offset);
    Tensor<X> out(poison(N * C), offset);
    Tensor<float> mean(poison(N));
    Tensor<float> rstd(poison(N));
    // x is near 8, so its distance to the mean has an absolute error of 8 roundings. C = 1 and 2
    // can have a tiny variance.
    const double spread = C > 2 ? 8.0 : 1000.0;
    const double output = std::max(kOutput<X>, spread * 6e-8);
    check(what, {{"out", out, output}, {"mean", mean}, {"rstd", rstd}}, [&](const auto& on) {
        layernorm_forward(on.dev, on(out), on(mean), on(rstd), on(inp), on(weight), on(bias), N, C);
    });

    // Backward, from fp32 statistics.
    Values m = mean.reference;
    Values s = rstd.reference;
    for (size_t n = 0; n < N; n++) {
        m[n] = rounded<float>(m[n]);
        s[n] = rounded<float>(s[n]);
    }
    Tensor<float> mean_in(m);
    Tensor<float> rstd_in(s);
    Tensor<float> dweight(randn<float>(C));
    Tensor<float> dbias(randn<float>(C));
    Tensor<float> dsum(randn<float>(C));
    Tensor<X> dout(randn<X>(N * C), offset);
    Tensor<X> dinp(randn<X>(N * C), offset);
    const auto backward = [&](const auto& on, bool with_sum) {
        const Scratch scratch(layernorm_scratch_bytes(on.dev, C));
        layernorm_backward(on.dev, on(dinp), on(dweight), on(dbias), with_sum ? on(dsum) : nullptr,
                           scratch.p, on(dout), on(inp), on(weight), on(mean_in), on(rstd_in), N,
                           C);
    };
    const Result dx = {"dinp", dinp, kOutput<X>};
    const Result dw = {"dweight", dweight};
    const Result db = {"dbias", dbias};
    // of values around 1, which may cancel
    const Result dx_sum = {"dinp_sum", dsum, kFp32, 1.0, false, &dinp};
    check(what, {dx, dw, db, dx_sum}, [&](const auto& on) { backward(on, true); });
    check_same(what + " without dinp_sum", {dx, dw, db},
               [&](const auto& on) { backward(on, false); });
}

TEST_OF_X(layernorm) {
    for (size_t N : {1, 3, 127})
        for (int C : {1, 7, 64, 65, 768, 1600})
            check_layernorm<X>(N, C);
    for (int C : {65, 384, 512, 768, 1024, 1280, 1600})
        check_layernorm<X>(5000, C);
    // warps take enough rows to use a stage three times
    const std::pair<size_t, int> shapes[] = {{20001, 768}, {13, 1024}, {300, 8192},
                                             {40, 3000},   {40, 8192}, {40, 8191}};
    for (const auto& [N, C] : shapes)
        check_layernorm<X>(N, C);
    check_layernorm<X>(127, 768, 1);  // pointers that are not 16-byte aligned
    check_layernorm<X>(5000, 1024, 1);
    CHECK_ERROR(layernorm_scratch_bytes(gpu(), 8193), "C = 8193");
}

// -------------------------------------------------------------------------------------------------
// Matmul

template <class X>
double product_tolerance() {
    return std::is_same_v<X, bf16> ? kTensorCoreSum : gpu().tf32 ? kTf32 : kFp32;
}

template <class X>
void check_matmul(size_t N, int C, int OC, size_t offset = 0) {
    const std::string what = label<X>("matmul", N, C, OC);
    const double product = product_tolerance<X>();
    const double output = std::max(product, kOutput<X>);
    Tensor<X> inp(randn<X>(N * C), offset);
    Tensor<X> weight(randn<X>(size_t(OC) * C), offset);
    Tensor<X> bias(randn<X>(OC));
    Tensor<X> dout(randn<X>(N * OC), offset);
    Tensor<X> out(poison(N * OC), offset);
    Tensor<X> dinp(poison(N * C), offset);
    Tensor<X> residual(randn<X>(N * OC, 3.0), offset);
    const auto forward = [&](Tensor<X>& to, bool with_bias, Tensor<X>* added) {
        // With odd sizes cuBLASLt may round the product before it adds the rest.
        check(what + (with_bias ? " bias" : "") + (added ? " residual" : ""),
              {{"out", to, (1.0 + with_bias + (added != nullptr)) * output, added ? 3.0 : 0.0}},
              [&](const auto& on) {
                  matmul_forward(on.dev, on(to), on(inp), on(weight),
                                 with_bias ? on(bias) : nullptr, N, C, OC,
                                 added ? on(*added) : nullptr);
              });
    };
    for (const bool with_bias : {true, false})
        forward(out, with_bias, nullptr);
    // in place
    forward(out, true, &residual), forward(out, false, &residual),
        forward(residual, true, &residual);

    Tensor<float> dweight(randn<float>(size_t(OC) * C));
    Tensor<float> written(poison(size_t(OC) * C));
    const auto backward = [&](const auto& on, Tensor<float>& to, bool with_dinp, bool accumulate) {
        matmul_backward(on.dev, with_dinp ? on(dinp) : nullptr, on(to), on(dout), on(inp),
                        on(weight), N, C, OC, accumulate);
    };
    check(what, {{"dinp", dinp, output}, {"dweight", dweight, product}},
          [&](const auto& on) { backward(on, dweight, true, true); });
    check_same(what + " without dinp", {{"dweight", dweight}},
               [&](const auto& on) { backward(on, dweight, false, true); });
    check(what, {{"dweight written", written, product}},
          [&](const auto& on) { backward(on, written, false, false); });
}

template <class X>
void check_matmuls() {
    const int shapes[][3] = {{1, 1, 1},         {1, 64, 64},   {3, 7, 5},       {127, 65, 33},
                             {127, 768, 257},   {3, 1600, 64}, {1000, 64, 768}, {1024, 768, 2304},
                             {256, 1600, 1600}, {2000, 129, 1}};
    for (const auto& [N, C, OC] : shapes)
        check_matmul<X>(N, C, OC);
    check_matmul<X>(127, 64, 64, 1);     // pointers aligned to one element only
    check_matmul<X>(2048, 512, 512, 1);  // large enough to be autotuned
}
TEST(matmul_tf32) {
    check_matmuls<float>();
}
TEST(matmul_fp32) {
    gpu().tf32 = false;
    check_matmuls<float>();
    gpu().tf32 = true;
}
TEST(matmul_bf16) {
    if (gpu().sm < 80)
        SKIP("bf16 needs compute capability 8.0");
    check_matmuls<bf16>();
}

template <class X>
void check_qkv_bias(size_t N, int C, size_t offset = 0) {
    Tensor<X> dqkv(randn<X>(N * 3 * C), offset);
    Tensor<X> projw(randn<X>(size_t(C) * C), offset);
    Values start = randn<float>(3 * C);
    std::fill(start.begin() + 2 * C, start.end(), kNaN);  // v's part is written
    Tensor<float> dqkvb(start);
    Tensor<float> dprojb(randn<float>(C));
    check(
        label<X>("qkv_bias", N, C, 3 * C), {{"dqkvb", dqkvb}},
        [&](const OnGpu& on) {
            const Scratch scratch(qkv_bias_scratch_bytes(on.dev, C));
            qkv_bias_backward(on.dev, on(dqkvb), scratch.p, on(dqkv), on(dprojb), on(projw), N, C);
        },
        [&](const OnReference& on) {  // a formula, because the reference adds up all rows
            for (int c = 0; c < C; c++) {
                double& q = on(dqkvb)[c];
                double& v = on(dqkvb)[2 * C + c];
                for (size_t row = 0; row < N; row++)
                    q += on(dqkv)[row * 3 * C + c];
                v = 0;
                for (int r = 0; r < C; r++)
                    v += on(dprojb)[r] * on(projw)[size_t(r) * C + c];
            }
        });
}
TEST(qkv_bias) {
    const int shapes[][2] = {{1, 1}, {3, 65}, {127, 768}, {5000, 64}, {1000, 1600}};
    for (const auto& [N, C] : shapes) {
        check_qkv_bias<float>(N, C);
        check_qkv_bias<bf16>(N, C);
    }
    check_qkv_bias<bf16>(127, 64, 1);
}

// Autotuning over algorithms of our own. One that adds in another order is refused, also if the
// call's operands cannot tell.
enum { kWhole, kSplit, kSplitIfAdded, kSplitOnOwn, kIdle };
TEST(matmul_autotune) {
    const Cuda& dev = gpu();
    MatmulProduct p = {.rows = 1024, .cols = 1024, .k = 2048};
    const size_t rows = p.rows;
    const size_t K = p.k;
    const size_t n = rows * K;
    const Tensor<float> ones(Values(n, 1.0));
    const Tensor<float> zeros(Values(n, 0.0));
    const Tensor<float> a(randn<float>(n));
    const Tensor<float> b(randn<float>(n));
    const Tensor<float> d(randn<float>(rows * p.cols));
    // A·B, over all of K at once or in two parts.
    const auto multiply = [&](const MatmulOperands& o, bool accumulate, bool split) {
        const float one = 1.f;
        const float zero = 0.f;
        const auto part = [&](size_t from, size_t to, bool add) {
            CUBLAS_CHECK(cublasGemmEx(dev.blas, CUBLAS_OP_N, CUBLAS_OP_N, rows, p.cols, to - from,
                                      &one, static_cast<const float*>(o.a) + from * rows,
                                      CUDA_R_32F, rows, static_cast<const float*>(o.b) + from,
                                      CUDA_R_32F, K, add ? &one : &zero, o.d, CUDA_R_32F, rows,
                                      CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
        };
        if (split)
            part(0, 600, accumulate);
        part(split ? 600 : 0, K, accumulate || split);
    };
    int runs = 0;
    using Numbers = std::vector<int>;
    const auto tuned = [&](const Numbers& kinds, const float* a, const float* b) {
        runs = 0;
        return autotune(Late(), p, {.d = d, .a = a, .b = b}, static_cast<int>(kinds.size()),
                        [&](int i, const MatmulOperands& o, bool add) {
                            runs++;
                            const bool split = kinds[i] == kSplit ||
                                               (kinds[i] == kSplitIfAdded && add) ||
                                               (kinds[i] == kSplitOnOwn && o.a == a);
                            if (kinds[i] != kIdle)
                                multiply(o, add, split);
                            return true;
                        });
    };
    for (const bool accumulate : {false, true}) {
        p.accumulate = accumulate;
        const Values before = d.values();
        const Numbers kinds = {kWhole, kSplit, kWhole, kSplitIfAdded, kSplitOnOwn, kIdle};
        const AutotuneResult random = tuned(kinds, a, b);
        const AutotuneResult idle = tuned({kWhole, kIdle}, a, b);
        CHECK((random.equal == Numbers{0, 2}) && (random.fastest == 0 || random.fastest == 2));
        // the idle one is faster, but wrote nothing
        CHECK(idle.equal == Numbers{0} && idle.fastest == 0);
        // these sums are exact in every order
        CHECK((tuned(kinds, ones, ones).equal == Numbers{0, 2, 4}));
        // the first decides
        CHECK((tuned({kSplit, kWhole, kSplit, kIdle}, ones, ones).equal == Numbers{0, 2}));
        CHECK(same_bits(d.values(), before) == accumulate);

        // Where nothing can be compared the first is taken without a run.
        const auto not_tuned = [&](const float* a, const float* b) {
            return tuned({kWhole, kWhole}, a, b).equal == Numbers{0} && runs == 0;
        };
        CHECK(not_tuned(zeros, b) && not_tuned(a, zeros));
        // as if memory were full, which it must not be while other tests run beside
        gpu().reserved = dev.total_bytes;
        CHECK(not_tuned(a, b));
        gpu().reserved = 0;
    }

    // Each adversarial set can tell a split of K by itself.
    const Tensor<float> adversarial_a(poison(n));
    const Tensor<float> adversarial_b(poison(n));
    for (int set = 0; set < kAdversarialSets; set++) {
        AdversarialOperand operand = {
            .side = AdversarialOperand::kA, .type = DType::f32, .lines = rows, .k = K};
        fill_adversarial(Late(), adversarial_a, set, operand);
        operand.side = AdversarialOperand::kB;
        operand.k_inner = true;
        fill_adversarial(Late(), adversarial_b, set, operand);
        const MatmulOperands operands = {.d = d, .a = adversarial_a, .b = adversarial_b};
        multiply(operands, false, false);
        const Values whole = d.values();
        multiply(operands, false, true);
        if (same_bits(d.values(), whole))
            test::report("adversarial set", set, "a split of K gives the same bits");
    }
}

// pre = inp·weightᵀ + bias, out = f(pre).
template <class X>
void check_matmul_activation(size_t N, int C, int OC, size_t offset = 0) {
    const double output = 2 * std::max(product_tolerance<X>(), kOutput<X>);
    Tensor<X> inp(randn<X>(N * C), offset);
    Tensor<X> weight(randn<X>(size_t(OC) * C, 1 / std::sqrt(C)), offset);
    Tensor<X> bias(randn<X>(OC));
    Tensor<X> pre(poison(N * OC), offset);
    Tensor<X> out(poison(N * OC), offset);
    check(label<X>("matmul_activation", N, C, OC), {{"pre", pre, output}, {"out", out, output}},
          [&](const auto& on) {
              matmul_activation_forward(on.dev, on(out), on(pre), on(inp), on(weight), on(bias), N,
                                        C, OC);
          });
}
// dpre = (dout·weight)∘f'(pre), its sum over rows, and f(pre) once more. C is pre's width.
template <class X>
void check_matmul_activation_backward(size_t N, int C, int OC, size_t offset = 0) {
    const std::string what = label<X>("matmul_activation_backward", N, C, OC);
    Tensor<X> dout(randn<X>(N * OC), offset);
    Tensor<X> weight(randn<X>(size_t(OC) * C, 1 / std::sqrt(OC)), offset);
    Tensor<X> pre(randn<X>(N * C, 2.0), offset);
    Tensor<X> dpre(poison(N * C), offset);
    Tensor<X> out(poison(N * C), offset);
    Tensor<float> sum(randn<float>(C));
    const auto call = [&](const auto& on, bool with_out) {
        const Scratch scratch(matmul_activation_scratch_bytes(on.dev, N, C, OC));
        matmul_activation_backward(on.dev, on(dpre), on(sum), with_out ? on(out) : nullptr,
                                   scratch.p, on(dout), on(weight), on(pre), N, C, OC);
    };
    const Result dx = {"dpre", dpre, 2 * std::max(product_tolerance<X>(), kOutput<X>)};
    const Result dx_sum = {"dpre_sum", sum, kFp32, 0.0, false, &dpre};
    const Result again = {"out", out, kOutput<X>};
    check(what, {dx, dx_sum, again}, [&](const auto& on) { call(on, true); });
    check_same(what + " without out", {dx, dx_sum}, [&](const auto& on) { call(on, false); });
    check_same(what + " and activation_forward", {again},
               [&](const OnGpu& on) { activation_forward(on.dev, on(out), on(pre), N * C); });
}
TEST_OF_X(matmul_activation) {
    if (std::is_same_v<X, bf16> && gpu().sm < 80)
        SKIP("bf16 needs compute capability 8.0");
    // From the seventh on these are for matmul_sm90: one row, odd numbers of rows, one chunk of K,
    // two tiles a cluster, six, two with few epilogue warps in backward, d48.
    const int shapes[][3] = {
        {1, 8, 8},         {3, 7, 5},        {127, 65, 33},      {127, 768, 264},  {1000, 64, 768},
        {1024, 768, 3072}, {1, 768, 256},    {129, 192, 512},    {1000, 768, 256}, {20001, 64, 256},
        {9000, 128, 512},  {9000, 64, 2560}, {5000, 1024, 1280}, {129, 1600, 6400}};
    for (const auto& [N, C, OC] : shapes) {
        check_matmul_activation<X>(N, C, OC);
        check_matmul_activation_backward<X>(N, OC, C);
    }
    check_matmul_activation<X>(127, 64, 256, 1);
    check_matmul_activation_backward<X>(127, 256, 64, 1);
}
TEST(errors_of_encoder_and_matmul) {
    const int tokens[] = {3, -1};
    std::vector<int> plan(encoder_plan_ints(gpu(), 2));
    CHECK_ERROR(encoder_plan(gpu(), plan.data(), tokens, 2), "token -1 at position 1");
    CHECK_ERROR(matmul_forward<float>(gpu(), nullptr, nullptr, nullptr, nullptr, 1, 0, 1), "C = 0");
    CHECK_ERROR(matmul_activation_backward<bf16>(gpu(), nullptr, nullptr, nullptr, nullptr, nullptr,
                                                 nullptr, nullptr, 1, 1, 0),
                "OC = 0");
}

// -------------------------------------------------------------------------------------------------
// The activation

template <class X>
void check_activation(size_t N, int C, size_t offset = 0) {
    const size_t n = N * C;
    const std::string what = label<X>("activation", N, C, offset);
    Values x = randn<X>(n, 2.0);
    const double extremes[] = {0.0, -0.0, 1e-30, -1e-30, 10.0, -10.0, 100.0, -100.0, 1e18, -1e18};
    if (n > 100)
        std::transform(extremes, extremes + 10, x.begin(), rounded<X>);
    Tensor<X> inp(x, offset);
    Tensor<X> dout(randn<X>(n), offset);
    Tensor<X> out(poison(n), offset);
    Tensor<X> dinp(poison(n), offset);
    Tensor<float> sum(randn<float>(C));
    // Errors of `out` are relative to the result if that is a sizeable part of x, else to 0.01.
    check(what, {{"out", out, kOutput<X>, 1e-2, true}},
          [&](const auto& on) { activation_forward(on.dev, on(out), on(inp), n); });
    const auto backward = [&](const auto& on, Tensor<X>& to, bool with_out) {
        const Scratch scratch(activation_scratch_bytes(on.dev, C));
        activation_backward(on.dev, on(to), on(sum), with_out ? on(out) : nullptr, scratch.p,
                            on(inp), on(dout), N, C);
    };
    check(what, {{"dinp", dinp, kOutput<X>}, {"dinp_sum", sum, kFp32, 0.0, false, &dinp}},
          [&](const auto& on) { backward(on, dinp, false); });
    dout.first = dinp.first;
    check_same(what + " in place, with out", {{"dinp", dout}, {"dinp_sum", sum}, {"out", out}},
               [&](const OnGpu& on) { backward(on, dout, true); });
}
TEST_OF_X(activation) {
    const int shapes[][2] = {{1, 1}, {1, 7}, {3, 64}, {1000, 8}, {33, 129}, {257, 3072}};
    for (const auto& [N, C] : shapes)
        check_activation<X>(N, C);
    check_activation<X>(64, 64, 1);
}

// -------------------------------------------------------------------------------------------------
// Classifier

template <class X>
void check_classifier(size_t N, int V, int Vp, double scale, size_t offset = 0) {
    const std::string what = label<X>("classifier", N, V, Vp);
    Values x = randn<X>(N * Vp, scale);
    for (size_t n = 0; n < N; n++)
        std::fill(x.begin() + n * Vp + V, x.begin() + (n + 1) * Vp, kNaN);
    std::vector<int> classes = tokens_below(V, N, 3);
    classes[0] = V - 1;
    const Ints targets(classes);
    Tensor<X> logits(x, offset);
    Tensor<float> losses(poison(N));
    const auto call = [&](const auto& on, float dloss) {
        classifier(on.dev, on(logits), on(losses), on(targets), dloss, N, V, Vp);
    };
    const float dloss = 0.37f;  // not 1/N, so that gradients and losses have a similar size
    // A loss is a difference of values of at least 1.
    check(what, {{"losses", losses, kFp32, 1.0}, {"dlogits", logits, kOutput<X>, dloss}},
          [&](const auto& on) { call(on, dloss); });
    for (size_t n = 0; n < N; n++)
        for (int v = V; v < Vp; v++)
            if (!(logits.first[n * Vp + v] == 0.0))
                CHECK_NEAR(logits.first[n * Vp + v], 0.0, 0.0);

    logits.reset();
    logits.first = logits.values();  // without a gradient they are left alone
    check_same(what + " without dlogits", {{"losses", losses}, {"logits", logits}},
               [&](const OnGpu& on) { call(on, 0.f); });
}

TEST_OF_X(classifier) {
    const int shapes[][3] = {{1, 1, 1},
                             {3, 5, 7},
                             {3, 5, 8},
                             {127, 263, 264},
                             {300, 260, 384},
                             // the third has no whole vector
                             {127, 257, 384},
                             {3, 384, 384},
                             {1000, 257, 384},
                             {37, 50257, 50304}};
    for (const auto& [N, V, Vp] : shapes)
        check_classifier<X>(N, V, Vp, 1.0);
    check_classifier<X>(127, 257, 257, 5.0);
    check_classifier<X>(37, 50257, 50304, 5.0);
    check_classifier<X>(3, 50257, 50257, 5.0);
    check_classifier<X>(3, 257, 384, 1.0, 1);

    // A target outside the vocabulary, padding included, makes its row NaN. A logit that is NaN or
    // +∞ is noticed in its row, wherever it is. −∞ is a probability of zero. The other rows are as
    // they should be.
    const int V = 257;
    const int Vp = 384;
    const int N = 7;
    const Tensor<float> losses(poison(N));
    for (int at : {0, 100, V - 1}) {
        Values x = randn<X>(N * Vp);
        x[3 * Vp + at] = NAN;
        x[4 * Vp + at] = INFINITY;
        x[5 * Vp + at] = -INFINITY;
        const Tensor<X> logits(x);
        classifier<X>(Late(), logits, losses, Ints({V, -1, 1000000, 7, 7, 7, V - 1}), 1.f, N, V,
                      Vp);
        const Values loss = losses.values();
        const Values gradient = logits.values();
        for (int n = 0; n < N; n++) {
            CHECK(n < 3 ? std::isnan(loss[n]) : std::isfinite(loss[n]) == (n > 4));
            if (n != 4)
                CHECK(std::isfinite(gradient[n * Vp + 5]) == (n > 4));
        }
        CHECK(gradient[5 * Vp + at] == 0.0);
    }
    CHECK_ERROR(classifier<X>(gpu(), nullptr, losses, nullptr, 1.f, N, Vp + 1, Vp), "V = 385");
}

// Losses and both gradients. Logits have standard deviation `scale`, and are near 17 for the
// targets if sure.
template <class X>
void check_cross_entropy(size_t N, int C, int V, int Vp, double scale, bool sure = false) {
    const std::string what = label<X>("cross_entropy", N, C, V);
    std::vector<int> classes = tokens_below(V, N, 3);
    classes[0] = V - 1;
    const Ints targets(classes);
    Tensor<X> weight(randn<X>(size_t(Vp) * C, scale / std::sqrt(C)));
    Values rows = randn<X>(N * C);
    for (size_t i = 0; sure && i < N * C; i++)
        rows[i] = rounded<X>(0.6 / scale * weight.start[classes[i / C] * size_t(C) + i % C] *
                             std::sqrt(C));
    Tensor<X> inp(rows);
    Tensor<X> dlogits(poison(N * Vp));
    Tensor<float> losses(poison(N));
    Tensor<float> dweight(randn<float>(size_t(Vp) * C));
    const float dloss = 0.37f;
    const auto call = [&](const auto& on, float dloss) {
        const Scratch scratch(cross_entropy_scratch_bytes<X>(on.dev, N, C, Vp));
        cross_entropy(on.dev, on(dlogits), on(losses), scratch.p, on(inp), on(weight), on(targets),
                      dloss, N, C, V, Vp);
        if (dloss == 0.f)
            return;
        cross_entropy_backward(on.dev, on(inp), on(dweight), scratch.p, on(dlogits), on(inp),
                               on(weight), N, C, Vp);
    };
    // A logit is rounded to X, or its distance to the target's to fp16 (11 bits).
    const double largest = sure ? 20.0 : 6.0 * scale;
    const bool fused = cross_entropy_scratch_bytes<X>(gpu(), N, C, Vp) > 0;
    const double logit = fused ? 2.0 / 2048 : product_tolerance<X>() + kOutput<X>;
    const double gradient = 2 * (kOutput<X> + product_tolerance<X>()) + largest * logit;
    check(what,
          {{"losses", losses, logit, largest},
           {"dinp", inp, gradient, sure ? 0.0 : dloss * scale / std::sqrt(C)},
           {"dweight", dweight, gradient},
           {"dlogits", dlogits, INFINITY, 1.0}},  // have no scale yet
          [&](const auto& on) { call(on, dloss); });
    // Each of dlogits up to its row's scale, which the target's tells. Largest values hide most of
    // a wide row.
    for (size_t n = 0; fused && n < N; n++) {
        const double* got = &dlogits.first[n * Vp];
        const double* want = &dlogits.reference[n * Vp];
        const double row = got[classes[n]] != 0 ? want[classes[n]] / got[classes[n]] : 1;
        for (int v = 0; v < Vp; v++)
            if (!(std::fabs(row * got[v] - want[v]) <= gradient * std::fabs(want[v]) + 1e-30)) {
                test::report((what + " dlogits").c_str(), static_cast<int>(n * Vp) + v,
                             format("got %.9g, expected %.9g", row * got[v], want[v]));
                return;
            }
    }
    check_same(what + " without gradients", {{"losses", losses}},
               [&](const OnGpu& on) { inp.reset(), call(on, 0.f); });
    for (double loss : losses.first)
        CHECK((loss >= 0.0 || !fused) && (loss < 1e-2 || !sure));
}

TEST_OF_X(cross_entropy) {
    if (std::is_same_v<X, bf16> && gpu().sm < 80)
        SKIP("bf16 needs compute capability 8.0");
    // All but the first two are for matmul_sm90: one class, tiles past Vp, some and many tiles a
    // cluster, GPT-2's.
    const int shapes[][4] = {{127, 65, 257, 264},   {300, 64, 257, 257},   {1, 64, 1, 8},
                             {37, 64, 257, 384},    {300, 1600, 250, 264}, {127, 768, 1000, 1152},
                             {20001, 64, 600, 640}, {9000, 128, 513, 768}, {37, 768, 50257, 50304}};
    for (const auto& [N, C, V, Vp] : shapes)
        check_cross_entropy<X>(N, C, V, Vp, 1.0);
    check_cross_entropy<X>(127, 768, 1000, 1152, 5.0);
    check_cross_entropy<X>(37, 768, 50257, 50304, 5.0);
    // losses above 27.7, for which the rows are computed again
    check_cross_entropy<X>(300, 64, 257, 384, 30.0);
    check_cross_entropy<X>(3, 768, 50257, 50304, 30.0);
    check_cross_entropy<X>(127, 768, 1000, 1152, 1.0, true);

    // A target outside the vocabulary and a number that is none make their rows NaN.
    const int N = 10;
    const int C = 64;
    const int V = 257;
    const int Vp = 384;
    const Tensor<X> weight(randn<X>(Vp * C, 0.1));
    const Tensor<X> dlogits(poison(N * Vp));
    const Tensor<float> losses(poison(N));
    const auto run = [&](const Values& rows, const Tensor<X>& weight,
                         const std::vector<int>& classes) {
        const Tensor<X> inp(rows);
        const Ints targets(classes);
        const Scratch scratch(cross_entropy_scratch_bytes<X>(gpu(), N, C, Vp));
        cross_entropy<X>(Late(), dlogits, losses, scratch.p, inp, weight, targets, 1.f, N, C, V,
                         Vp);
        cross_entropy_backward<X>(Late(), inp, nullptr, scratch.p, dlogits, inp, weight, N, C, Vp);
        return inp.values();
    };
    Values rows = randn<X>(N * C);
    rows[3 * C] = NAN;
    rows[4 * C + 5] = INFINITY;
    rows[5 * C + 63] = -INFINITY;
    const Values dinp = run(rows, weight, {V, -1, 1000000, 7, 7, 7, 0, V - 1, 7, 7});
    const Values loss = losses.values();
    for (int n = 0; n < N; n++)
        CHECK(std::isfinite(loss[n]) == (n > 5) && std::isfinite(dinp[n * C]) == (n > 5));
    for (const double broken : {double(NAN), double(INFINITY)}) {
        Values w = weight.start;
        w[100 * C + 1] = broken;
        run(Values(N * C, 1.0), Tensor<X>(w), std::vector<int>(N, 7));
        for (double x : losses.values())
            CHECK(!std::isfinite(x));
    }
}

// -------------------------------------------------------------------------------------------------
// Reductions

// The numbers are the CPU's, up to one unit in the last place, and exactly the mean where sigma is
// 0. Any part of them is filled with the same bits.
template <class X>
void check_init_normal() {
    constexpr size_t n = 100003;
    // relative to a power of 2
    constexpr double kUnit = std::is_same_v<X, bf16> ? 0x1p-7 : 0x1p-23;
    const Cpu cpu;
    for (const size_t first : {size_t(0), size_t(1) << 33})
        for (const double sigma : {0.02, 0.0}) {
            Tensor<X> x(poison(n + 1), 1);
            init_normal<X>(Late(), x, n, 0.25, sigma, 7, first);
            std::vector<X> want(n);
            init_normal(cpu, want.data(), n, 0.25, sigma, 7, first);
            const Values got = x.values();
            size_t others = 0;
            for (size_t i = 0; i < n; i++) {
                const double w = static_cast<float>(want[i]);
                others += got[i] != w;
                CHECK_NEAR(got[i], w,
                           sigma == 0 ? 0 : kUnit * std::exp2(std::floor(std::log2(std::fabs(w)))));
            }
            CHECK(others < n / 1000 && std::isnan(got[n]));
            Tensor<X> part(poison(777));
            init_normal<X>(Late(), part, 777, 0.25, sigma, 7, first + 1234);
            CHECK(same_bits(part.values(), Values(got.begin() + 1234, got.begin() + 1234 + 777)));
        }
}
TEST(init_normal_fp32) {
    check_init_normal<float>();
}
TEST(init_normal_bf16) {
    check_init_normal<bf16>();
}

// Each rounding is the one to nearest, as the CPU's.
TEST(convert) {
    const Values values = randn<float>(10007);
    Tensor<float> single(values);
    Tensor<bf16> half(values);
    const auto check = [&](auto& in, auto& out) {
        convert(Late(), out.p, in.p, values.size());
        const Values got = out.values();
        for (size_t i = 0; i < values.size(); i++) {
            CHECK(got[i] == rounded<std::remove_pointer_t<decltype(out.p + 0)>>(in.start[i]));
        }
    };
    Tensor<float> to_float(poison(values.size()));
    Tensor<bf16> to_bf16(poison(values.size()));
    check(single, to_float);
    check(single, to_bf16);
    half.start = half.values();
    to_float.reset();
    to_bf16.reset();
    check(half, to_float);
    check(half, to_bf16);
}

TEST(reductions) {
    Tensor<float> out({kNaN});
    for (size_t n : {1, 3, 64, 1000, 1000003, 4000000}) {
        Tensor<float> x(randn<float>(n, 1.0, 0.5));
        for (const bool norm : {false, true}) {
            const auto call = [&](const auto& on) {
                const Scratch scratch(reduce_scratch_bytes(on.dev));
                const std::decay_t<decltype(*on(out))> quarter = 0.25;
                norm ? global_norm(on.dev, on(out), scratch.p, on(x), n)
                     : reduce_sum(on.dev, on(out), scratch.p, on(x), quarter, n);
            };
            check(format("%s of %zu", norm ? "global_norm" : "reduce_sum", n), {{"", out}}, call);
            const double whole = x.start[n / 2];
            for (const double broken : {double(NAN), double(INFINITY)}) {
                x.start[n / 2] = broken;
                x.reset();
                call(OnGpu());
                CHECK(count_nonfinite<float>(Late(), Scratch(sizeof(double)).p, x, n) == 1);
                CHECK(std::isnan(broken) ? std::isnan(out.values()[0])
                                         : out.values()[0] == INFINITY);
            }
            x.start[n / 2] = whole;
            x.reset();
        }
    }
    const Tensor<float> seven({7.0});  // nothing to add
    reduce_sum(Late(), out, Scratch(reduce_scratch_bytes(gpu())).p, seven, 1.f, 0);
    CHECK(same_bits(out.values(), {0.0}));
}

// A changed sign makes another, and so do two words that change places. Zeros have none, wherever
// they lie.
TEST(checksums) {
    Tensor<float> x(randn<float>(300001));
    const Scratch scratch(sizeof(double));
    const auto sum = [&] {
        return x.reset(),
               checksum(Late(), scratch.p, static_cast<float*>(x), 300001 * sizeof(float));
    };
    const uint64_t before = sum();
    CHECK(sum() == before && checksum(Late(), scratch.p, nullptr, 0) == 0);
    x.start[300000] *= -1;
    CHECK(sum() != before);
    x.start[300000] *= -1;
    std::swap(x.start[0], x.start[7]);
    CHECK(sum() != before);
    std::fill(x.start.begin(), x.start.end(), 0.f);
    CHECK(sum() == 0);
}

// -------------------------------------------------------------------------------------------------
// AdamW

// Ranges that begin and end anywhere, with a gap that must stay as it was.
constexpr size_t kAdamSize = 10007;
constexpr ParamRange kRanges[] = {{.begin = 0, .size = 1, .decay = false},
                                  {.begin = 1, .size = 2050, .decay = true},
                                  {.begin = 2051, .size = 6, .decay = false},
                                  {.begin = 2060, .size = 7000, .decay = true},
                                  {.begin = 9060, .size = 947, .decay = false}};
AdamW hyper(int step, float max_norm = 1.f) {
    return {.lr = 1e-2f,
            .beta1 = 0.9f,
            .beta2 = 0.95f,
            .eps = 1e-8f,
            .weight_decay = 0.1f,
            .max_norm = max_norm,
            .step = step,
            .seed = 42};
}

// The optimizer's state. With X = bf16 the master must equal a float twin's parameters.
TEST(adamw_against_reference) {
    for (const float max_norm : {0.f, 1.f, 1000.f}) {
        const Values zeros(kAdamSize, 0.0);
        Tensor<float> p(randn<bf16>(kAdamSize));
        Tensor<float> m(zeros);
        Tensor<float> v(zeros);
        Tensor<float> master(p.start);
        Tensor<float> m_bf16(zeros);
        Tensor<float> v_bf16(zeros);
        Tensor<bf16> params(p.start);
        std::deque<Tensor<float>> g;
        std::deque<Tensor<float>> norm;
        for (int step = 1; step <= 10; step++) {
            const Values& x = g.emplace_back(randn<float>(kAdamSize, 3.0)).start;
            norm.emplace_back(Values{
                rounded<float>(std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0)))});
        }
        check(format("adamw with max_norm %g", max_norm), {{"params", p}, {"m", m}, {"v", v}},
              [&](const auto& on) {
                  for (int step = 1; step <= 10; step++)
                      adamw_update(on.dev, on(p), nullptr, on(m), on(v), on(g[step - 1]),
                                   on(norm[step - 1]), kRanges, std::size(kRanges),
                                   hyper(step, max_norm));
              });
        for (int step = 1; step <= 10; step++)
            adamw_update<bf16>(Late(), params, master, m_bf16, v_bf16, g[step - 1], norm[step - 1],
                               kRanges, std::size(kRanges), hyper(step, max_norm));
        CHECK(same_bits(master.values(), p.first));
        CHECK(same_bits(m_bf16.values(), m.first) && same_bits(v_bf16.values(), v.first));

        const Values exact = master.values();
        const Values stored = params.values();
        for (size_t i = 0; i < kAdamSize; i++) {
            // One of the two bf16 neighbours: less than 2⁻⁷ of the power of two below.
            const double ulp = std::ldexp(1.0, std::ilogb(exact[i]) - 7);
            if (!(std::fabs(stored[i] - exact[i]) < ulp))
                CHECK_NEAR(stored[i], exact[i], ulp);
        }
    }
}

// Four ranks that each update their share write the same bits as one rank that updates all,
// stochastic rounding included.
TEST(adamw_shares) {
    const size_t piece = 1000;
    const size_t n = 3 * 4 * piece + 4096;
    const size_t own = n / 4;
    const Values start = randn<bf16>(n);
    const Tensor<float> g(randn<float>(n));
    const Tensor<float> norm({30.0});
    const Tensor<float> fp32(start);
    const Tensor<float> fp32_shared(start);
    const Tensor<bf16> params(start);
    const Tensor<bf16> shared(start);
    // The same state updates a model in bf16 and one in fp32.
    const auto update = [&](bf16* params, float* fp32, const Values& start, const float* g,
                            const ParamRange(&ranges)[2]) {
        Tensor<float> master(start);
        Tensor<float> m(Values(start.size(), 0.0));
        Tensor<float> v(m.start);
        adamw_update<bf16>(Late(), params, master, m, v, g, norm, ranges, 2, hyper(2));
        m.reset(), v.reset();
        adamw_update<float>(Late(), fp32, nullptr, m, v, g, norm, ranges, 2, hyper(2));
    };
    update(params, fp32, start, g, {{0, 3 * 4 * piece, true}, {3 * 4 * piece, 4096, false}});
    for (size_t r = 0; r < 4; r++) {
        const ParamRange share[] = {{.begin = r * piece,
                                     .size = piece,
                                     .decay = true,
                                     .pieces = 3,
                                     .stride = 4 * piece,
                                     .skipped = r * piece},
                                    {.begin = 3 * 4 * piece + r * 1024,
                                     .size = 1024,
                                     .decay = false,
                                     .pieces = 1,
                                     .stride = 4096,
                                     .skipped = 9 * piece + r * 1024}};
        Values own_start(own);
        Values own_g(own);
        for (const ParamRange& range : share)
            for (size_t p = 0; p < range.pieces; p++) {
                std::copy_n(&start[range.piece(p)], range.size, &own_start[range.state(p)]);
                std::copy_n(&g.start[range.piece(p)], range.size, &own_g[range.state(p)]);
            }
        update(shared, fp32_shared, own_start, Tensor<float>(own_g), share);
    }
    CHECK(same_bits(shared.values(), params.values()) &&
          same_bits(fp32_shared.values(), fp32.values()));
}

// A step whose gradient norm is not finite changes nothing, whether gradients are clipped or not.
// To clip them to 0 would not do, because m and v would decay and bf16 parameters be rounded anew.
TEST(adamw_without_a_finite_norm) {
    const auto unchanged = [](const AnyTensor& x) { return same_bits(x.values(), x.start); };
    for (const double bad : {double(NAN), double(INFINITY)})
        for (const float max_norm : {0.f, 1.f}) {
            const AdamW step = hyper(3, max_norm);
            const Tensor<float> g(randn<float>(kAdamSize));
            const Tensor<float> norm({bad});
            const Tensor<float> m(randn<float>(kAdamSize));
            const Tensor<float> v(randn<float>(kAdamSize, 0.1, 1.0));

            const Tensor<float> fp32(randn<float>(kAdamSize));
            adamw_update<float>(Late(), fp32, nullptr, m, v, g, norm, kRanges, std::size(kRanges),
                                step);
            CHECK(unchanged(fp32) && unchanged(m) && unchanged(v));

            const Tensor<float> master(randn<float>(kAdamSize));
            const Tensor<bf16> params(randn<bf16>(kAdamSize));
            adamw_update<bf16>(Late(), params, master, m, v, g, norm, kRanges, std::size(kRanges),
                               step);
            CHECK(unchanged(params) && unchanged(master) && unchanged(m) && unchanged(v));
        }
}

// beta^t needs more than fp32. There a power is wrong by 2e-5 at step 2, a product of t factors by
// 5e-4 at step 100. Each parameter starts at 0, so after the step it is the update.
TEST(adamw_bias_correction) {
    const size_t n = 1000;
    const ParamRange all = {0, n, false};
    for (const int step : {1, 2, 100, 100000}) {
        Tensor<float> p(Values(n, 0.0));
        Tensor<float> m(randn<float>(n, 0.1, 1.0));
        Tensor<float> v(randn<float>(n, 0.1, 1.0));
        Tensor<float> g(randn<float>(n));
        Tensor<float> norm({1.0});
        AdamW slow = hyper(step);
        slow.beta1 = 0.99999f;
        slow.beta2 = 0.9999f;
        check(format("adamw at step %d", step),
              {{"params", p, kFp32, 0.0, true}, {"m", m}, {"v", v}}, [&](const auto& on) {
                  adamw_update(on.dev, on(p), nullptr, on(m), on(v), on(g), on(norm), &all, 1,
                               slow);
              });
    }
}

// With lr = 0 the master stays and only the rounding acts. The mean over n draws is the master,
// within 4 sigma.
TEST(adamw_stochastic_rounding) {
    const size_t n = 1 << 20;
    const ParamRange all = {0, n, true};
    const Values zeros(n, 0.0);
    Tensor<float> master(zeros);
    Tensor<float> m(zeros);
    Tensor<float> v(zeros);
    Tensor<float> g(randn<float>(n));
    Tensor<float> norm({1.0});
    Tensor<bf16> params(poison(n));
    const auto draw = [&](double value, int step, uint64_t seed = 42) {
        master.start.assign(n, value);
        master.reset(), m.reset(), v.reset();
        AdamW still = hyper(step);
        still.lr = 0.f;
        still.seed = seed;
        adamw_update<bf16>(Late(), params, master, m, v, g, norm, &all, 1, still);
        return params.values();
    };
    int step = 0;
    for (const double fraction : {0.0, 1.0 / 4096, 0.25, 0.5, 0.9})
        for (const double sign : {1.0, -1.0}) {
            const double below = sign * 3.0;
            const double above = sign * (3.0 + 1.0 / 64);
            const double value = float(below + fraction * (above - below));
            const double exact = (value - below) / (above - below);  // as fp32 holds it
            const Values drawn = draw(value, ++step);
            // each of the elements that share a hash is counted apart
            for (size_t lane = 0; lane < 4; lane++) {
                size_t up = 0;
                size_t neither = 0;
                for (size_t i = lane; i < n; i += 4) {
                    up += drawn[i] == above;
                    neither += drawn[i] != above && drawn[i] != below;
                }
                CHECK(neither == 0);
                CHECK_NEAR(up / (n / 4.0), exact,
                           4.0 * std::sqrt(exact * (1.0 - exact) / (n / 4.0)));
            }
        }
    const Values first = draw(3.007, 1);
    CHECK(same_bits(first, draw(3.007, 1)));
    // Another step, another seed, and both with the same sum give other bits, of which about half
    // agree by chance.
    for (const Values& other : {draw(3.007, 2), draw(3.007, 1, 43), draw(3.007, 2, 41)}) {
        size_t equal = 0;
        for (size_t i = 0; i < n; i++)
            equal += first[i] == other[i];
        CHECK(equal < n * 0.6);
    }
    CHECK(std::isnan(draw(NAN, 1)[7]));
    CHECK(std::isnan(draw(INFINITY, 1)[7]));  // ∞ − 0·∞
}

TEST(adamw_errors) {
    const Tensor<float> x(poison(64));
    const auto update = [&](size_t offset, const std::vector<ParamRange>& ranges, int step) {
        adamw_update<float>(gpu(), x + offset, nullptr, x, x, x, x, ranges.data(),
                            static_cast<int>(ranges.size()), hyper(step));
    };
    const ParamRange one = {0, 1, true};
    CHECK_ERROR(update(0, std::vector<ParamRange>(33, one), 1), "33 parameter ranges");
    CHECK_ERROR(update(1, {one}, 1), "aligned");
    CHECK_ERROR(update(0, {one}, 0), "step 0");
    const ParamRange pieces = {.begin = 0, .size = 6, .decay = true, .pieces = 2, .stride = 12};
    CHECK_ERROR(update(0, {pieces}, 1), "pieces of 6 elements");
}

}  // namespace

TEST_MAIN
