// Tests every layer but attention against the fp64 reference, for float and bf16, and the device
// itself.
//
// A test describes a call once, and check() makes it on both backends. Inputs are random and
// rounded to X first, so that both compute from the same numbers. Outputs and scratch start as NaN;
// tensors that a layer adds into start as the same random values on both sides. Each call runs
// twice on the GPU and must give the same bits. Its inputs arrive late, and all memory is allocated
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
// - fp32 has a unit roundoff of 6e-8. A value is the result of a few operations. The error of a sum
//   of n random terms grows like √n·6e-8.
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
    return device_or_skip<OwnStream>();
}

template <class X>
double rounded(double x) {
    return static_cast<float>(static_cast<X>(static_cast<float>(x)));
}

// n normal values, rounded to X. Every call draws other ones.
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
    Values reference;  // the reference's results. Empty in an input, whose `start` is read
    Values first;      // the GPU's results of its first run

    virtual void reset() const = 0;  // writes `start` to the GPU
    virtual Values values() const = 0;
};

// The offset of a tensor that is not 16-byte aligned.
constexpr size_t kUnaligned = 1;

// A tensor of T on the GPU, where `offset` elements precede it.
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

// Starts as NaN. The reference does not use it.
struct Scratch : LateMemory {
    explicit Scratch(size_t bytes) : LateMemory(gpu(), bytes) {}
};

// A backend on which a call runs. on(x) is what the layer gets for the tensor x. on.late_device()
// is for the call under test, and on.device() for others.
struct OnReference {
    const Cpu cpu;
    const Cpu& device() const { return cpu; }
    const Cpu& late_device() const { return cpu; }

    double* operator()(AnyTensor& x) const {
        return x.reference.empty() ? x.start.data() : x.reference.data();
    }
    const int* operator()(const Ints& x) const { return x.host.data(); }
};
struct OnGpu {
    const Cuda& device() const { return gpu(); }
    // Whatever the next call reads arrives late (dev/test/late.h).
    const Cuda& late_device() const { return late(gpu()); }

    template <class T>
    T* operator()(const Tensor<T>& x) const {
        return x;
    }
    const int* operator()(const Ints& x) const { return x; }
};

// A tensor that a call writes or adds into, and the errors it may have. They are relative to its
// largest value, or to each value if `relative_to_each`, but never to less than `min_scale`.
struct Result {
    const char* name;
    AnyTensor& tensor;
    double tolerance = kFp32;
    double min_scale = 0.0;
    bool relative_to_each = false;
    // If set, the call adds the column sums of this other result to the tensor. They are expected
    // to be the sums of what the GPU stored there, not of the reference's values.
    const AnyTensor* column_sums_of = nullptr;
};

void compare(const std::string& what, const Result& r) {
    const Values& got = r.tensor.first;
    const Values& want = r.tensor.reference;
    double largest = 0;
    for (double w : want)
        largest = std::max(largest, std::fabs(w));

    for (size_t i = 0; i < want.size(); i++) {
        const double value = r.relative_to_each ? std::fabs(want[i]) : largest;
        const double scale = std::max(r.min_scale, value);
        const double error = std::fabs(got[i] - want[i]);
        if (error <= r.tolerance * scale)
            continue;
        test::report((what + " " + r.name).c_str(), static_cast<int>(i),
                     format("got %.9g, expected %.9g; off by %.2e of %.3g, %.2e allowed", got[i],
                            want[i], error / scale, scale, r.tolerance));
        return;
    }
}

// start + the column sums of what the GPU wrote to `rows`.
Values with_column_sums(const Values& start, const Values& rows) {
    Values sums = start;
    for (size_t i = 0; i < rows.size(); i++)
        sums[i % sums.size()] += rows[i];
    return sums;
}

// Checks that another form of a call gives the bits of the first run.
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
        if (r.column_sums_of)
            r.tensor.reference = with_column_sums(r.tensor.start, r.column_sums_of->first);
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
    // make builds for 90a, not 90. On a 9.0 the code may also come from PTX for 80, without wgmma.
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
    for (const bool on_another : {true, false}) {
        const Cuda& dev = late(gpu());
        CUDA_CHECK(cudaMemcpyAsync(to, from, 2 * sizeof(float), cudaMemcpyDeviceToDevice,
                                   on_another ? 0 : dev.stream));
        CHECK(same_bits(to.values(), on_another ? Values{3.0, 4.0} : Values{1.0, 2.0}));
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
    const std::vector<Result> results = {{"out", out, kOutput<X>}, {"dwte", dwte}, {"dwpe", dwpe}};
    check(label<X>("encoder", B, T, C), results, [&](const auto& on) {
        encoder_forward(on.late_device(), on(out), on(tokens), on(wte), on(wpe), B, T, C,
                        positions);
        std::vector<int> sorted(encoder_plan_ints(on.device(), N), -1);
        encoder_plan(on.device(), sorted.data(), token_list.data(), N);
        const Ints plan(sorted);
        const Scratch scratch(encoder_scratch_bytes(on.device(), B, T, C));
        encoder_backward(on.late_device(), on(dwte), on(dwpe), scratch.p, on(dout), on(plan), B, T,
                         C, positions);
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
    for (int i = 0; i < 4096; i++)
        different[i] = (i * 1021) % 4096;
    check_encoder<X>(16, 256, 64, 4096, different);

    // every token has a whole chunk and one of a single row, which makes the most partial sums
    // possible
    const int each = kEncoderChunk + 1;
    std::vector<int> pairs(each * 64);
    for (int i = 0; i < each * 64; i++)
        pairs[i] = i % 64;
    check_encoder<X>(each, 64, 64, 64, pairs);

    // a rank's two chunks of a sequence
    const Positions two_chunks = {.chunk = 33, .early = 33, .late = 7 * 33};
    check_encoder<X>(3, 66, 64, 40, tokens_below(40, 198, 3), two_chunks);
    const Positions from_the_start = {.chunk = 3, .early = 0, .late = 5};
    check_encoder<X>(2, 6, 65, 40, tokens_below(40, 12, 4), from_the_start);
}

// More work than the grids of backward have blocks, so that blocks take several items.
TEST_OF_X(encoder_beyond_the_grid) {
    const int num_sms = gpu().num_sms;

    // The second pass has a block per multiprocessor, for the tokens that have several chunks. Its
    // blocks take a second and a third token.
    const int many = 2 * num_sms + 5;
    const int each = kEncoderChunk + 3;
    std::vector<int> crowded(many * each);
    for (int i = 0; i < many * each; i++)
        crowded[i] = i % many;
    check_encoder<X>(each, many, 64, many, crowded);
    check_encoder<X>(each, many, 33, many, crowded);

    // The first pass has six blocks per multiprocessor if rows are wide.
    const int alone = 13 * num_sms;
    std::vector<int> single(alone);
    std::iota(single.rbegin(), single.rend(), 0);
    check_encoder<X>(13, num_sms, 1030, alone, single);
    check_encoder<X>(13, num_sms, 2048, alone, single);
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
        layernorm_forward(on.late_device(), on(out), on(mean), on(rstd), on(inp), on(weight),
                          on(bias), N, C);
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
        const Scratch scratch(layernorm_scratch_bytes(on.device(), C));
        layernorm_backward(on.late_device(), on(dinp), on(dweight), on(dbias),
                           with_sum ? on(dsum) : nullptr, scratch.p, on(dout), on(inp), on(weight),
                           on(mean_in), on(rstd_in), N, C);
    };

    const Result dx = {"dinp", dinp, kOutput<X>};
    const Result dw = {"dweight", dweight};
    const Result db = {"dbias", dbias};
    Result dx_sum = {"dinp_sum", dsum};
    dx_sum.column_sums_of = &dinp;
    dx_sum.min_scale = 1.0;  // sums of values around 1 may cancel
    check(what, {dx, dw, db, dx_sum}, [&](const auto& on) { backward(on, /*with_sum=*/true); });
    check_same(what + " without dinp_sum", {dx, dw, db},
               [&](const auto& on) { backward(on, /*with_sum=*/false); });
}

TEST_OF_X(layernorm) {
    for (size_t N : {1, 3, 127})
        for (int C : {1, 7, 64, 65, 768, 1600})
            check_layernorm<X>(N, C);
    for (int C : {65, 384, 512, 768, 1024, 1280, 1600})
        check_layernorm<X>(5000, C);
    // in the first a warp works on so many rows that it uses each stage several times
    const std::pair<size_t, int> shapes[] = {{20001, 768}, {13, 1024}, {300, 8192},
                                             {40, 3000},   {40, 8192}, {40, 8191}};
    for (const auto& [N, C] : shapes)
        check_layernorm<X>(N, C);
    check_layernorm<X>(127, 768, kUnaligned);
    check_layernorm<X>(5000, 1024, kUnaligned);
    CHECK_ERROR(layernorm_scratch_bytes(gpu(), 8193), "C = 8193");
}

// -------------------------------------------------------------------------------------------------
// Matmul

template <class X>
double product_tolerance() {
    if (std::is_same_v<X, bf16>)
        return kTensorCoreSum;
    return gpu().tf32 ? kTf32 : kFp32;
}

template <class X>
void check_matmul(size_t N, int C, int OC, size_t offset = 0) {
    const std::string what = label<X>("matmul", N, C, OC);
    const double product = product_tolerance<X>();
    const double output = std::max(product, kOutput<X>);
    Tensor<X> inp(randn<X>(N * C), offset);
    Tensor<X> weight(randn<X>(size_t(OC) * C), offset);
    Tensor<X> bias(randn<X>(OC));
    Tensor<X> other_bias(randn<X>(OC));
    Tensor<X> dout(randn<X>(N * OC), offset);
    Tensor<X> out(poison(N * OC), offset);
    Tensor<X> dinp(poison(N * C), offset);
    Tensor<X> residual(randn<X>(N * OC, 3.0), offset);

    const auto forward = [&](Tensor<X>& to, Tensor<X>* b, Tensor<X>* added) {
        // With odd sizes cuBLASLt may round the product before it adds the rest.
        const int terms = 1 + (b != nullptr) + (added != nullptr);
        const Result result = {.name = "out",
                               .tensor = to,
                               .tolerance = terms * output,
                               .min_scale = added ? 3.0 : 0.0};
        check(what + (b ? " bias" : "") + (added ? " residual" : ""), {result},
              [&](const auto& on) {
                  matmul_forward(on.late_device(), on(to), on(inp), on(weight),
                                 b ? on(*b) : nullptr, N, C, OC, added ? on(*added) : nullptr);
              });
    };

    // The second bias finds a plan that was made for the first.
    for (Tensor<X>* b : {&bias, &other_bias, static_cast<Tensor<X>*>(nullptr)}) {
        forward(out, b, nullptr);
        forward(out, b, &residual);
    }
    forward(residual, &bias, &residual);  // in place

    Tensor<float> dweight(randn<float>(size_t(OC) * C));
    Tensor<float> written(poison(size_t(OC) * C));

    struct Options {
        bool with_dinp;
        bool accumulate;
    };
    const auto backward = [&](const auto& on, Tensor<float>& to, const Options& o) {
        matmul_backward(on.late_device(), o.with_dinp ? on(dinp) : nullptr, on(to), on(dout),
                        on(inp), on(weight), N, C, OC, o.accumulate);
    };

    check(what, {{"dinp", dinp, output}, {"dweight", dweight, product}},
          [&](const auto& on) { backward(on, dweight, {.with_dinp = true, .accumulate = true}); });
    check_same(what + " without dinp", {{"dweight", dweight}}, [&](const auto& on) {
        backward(on, dweight, {.with_dinp = false, .accumulate = true});
    });
    check(what, {{"dweight written", written, product}}, [&](const auto& on) {
        backward(on, written, {.with_dinp = false, .accumulate = false});
    });
}

template <class X>
void check_matmuls() {
    const int shapes[][3] = {{1, 1, 1},         {1, 64, 64},   {3, 7, 5},       {127, 65, 33},
                             {127, 768, 257},   {3, 1600, 64}, {1000, 64, 768}, {1024, 768, 2304},
                             {256, 1600, 1600}, {2000, 129, 1}};
    for (const auto& [N, C, OC] : shapes)
        check_matmul<X>(N, C, OC);
    check_matmul<X>(127, 64, 64, kUnaligned);
    check_matmul<X>(2048, 512, 512, kUnaligned);  // large enough to be autotuned
}

template <class X>
void skip_without_tensor_cores_for() {
    if (std::is_same_v<X, bf16> && gpu().sm < 80)
        SKIP("bf16 needs compute capability 8.0");
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
    skip_without_tensor_cores_for<bf16>();
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
            const Scratch scratch(qkv_bias_scratch_bytes(on.device(), C));
            qkv_bias_backward(on.late_device(), on(dqkvb), scratch.p, on(dqkv), on(dprojb),
                              on(projw), N, C);
        },
        // by the formula, because the reference adds up all rows
        [&](const OnReference& on) {
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
    check_qkv_bias<bf16>(127, 64, kUnaligned);
}

// A float matmul that can sum over all of K at once, or split K in two parts.
struct SplittableProduct {
    MatmulProduct p = {.rows = 1024, .cols = 1024, .k = 2048};

    void run(const MatmulOperands& o, bool accumulate, bool split) const {
        if (split) {
            const size_t middle = 600;
            add_part(o, 0, middle, accumulate);
            add_part(o, middle, p.k, true);
        } else {
            add_part(o, 0, p.k, accumulate);
        }
    }

  private:
    // d = A·B over [from, to) of K, or d += that.
    void add_part(const MatmulOperands& o, size_t from, size_t to, bool accumulate) const {
        const float alpha = 1.f;
        const float beta = accumulate ? 1.f : 0.f;
        const float* const a = static_cast<const float*>(o.a) + from * p.rows;
        const float* const b = static_cast<const float*>(o.b) + from;
        CUBLAS_CHECK(cublasGemmEx(gpu().blas, CUBLAS_OP_N, CUBLAS_OP_N, p.rows, p.cols, to - from,
                                  &alpha, a, CUDA_R_32F, p.rows, b, CUDA_R_32F, p.k, &beta, o.d,
                                  CUDA_R_32F, p.rows, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    }
};

// Autotuning over algorithms of our own. One that adds in another order must be refused, even if
// the operands of the call cannot tell.
TEST(matmul_autotune) {
    enum Algorithm { kWhole, kSplit, kSplitIfAdded, kSplitOnOwn, kIdle };
    using Algorithms = std::vector<Algorithm>;
    using Numbers = std::vector<int>;
    SplittableProduct product;
    MatmulProduct& p = product.p;
    const size_t n = p.rows * p.k;
    const Tensor<float> ones(Values(n, 1.0));
    const Tensor<float> zeros(Values(n, 0.0));
    const Tensor<float> a(randn<float>(n));
    const Tensor<float> b(randn<float>(n));
    const Tensor<float> d(randn<float>(p.rows * p.cols));

    int runs = 0;
    const auto tune = [&](const Algorithms& algorithms, const float* a, const float* b) {
        runs = 0;
        return autotune(
            late(gpu()), p, {.d = d, .a = a, .b = b}, static_cast<int>(algorithms.size()),
            [&](int i, const MatmulOperands& o, bool add) {
                runs++;
                const Algorithm algorithm = algorithms[i];
                const bool split = algorithm == kSplit || (algorithm == kSplitIfAdded && add) ||
                                   (algorithm == kSplitOnOwn && o.a == a);
                if (algorithm != kIdle)
                    product.run(o, add, split);
                return true;
            });
    };

    // Where nothing can be compared, the first is taken without a run.
    const auto is_not_tuned = [&](const float* a, const float* b) {
        return tune({kWhole, kWhole}, a, b).equal == Numbers{0} && runs == 0;
    };

    for (const bool accumulate : {false, true}) {
        p.accumulate = accumulate;
        const Values before = d.values();
        const Algorithms all = {kWhole, kSplit, kWhole, kSplitIfAdded, kSplitOnOwn, kIdle};
        const AutotuneResult random = tune(all, a, b);
        CHECK((random.equal == Numbers{0, 2}));
        CHECK(random.fastest == 0 || random.fastest == 2);

        // the idle one is faster, but wrote nothing
        const AutotuneResult idle = tune({kWhole, kIdle}, a, b);
        CHECK(idle.equal == Numbers{0});
        CHECK(idle.fastest == 0);

        // these sums are exact in every order
        CHECK((tune(all, ones, ones).equal == Numbers{0, 2, 4}));
        // the first decides
        CHECK((tune({kSplit, kWhole, kSplit, kIdle}, ones, ones).equal == Numbers{0, 2}));
        // D is overwritten, unless the product adds to what is there
        CHECK(same_bits(d.values(), before) == accumulate);

        CHECK(is_not_tuned(zeros, b));
        CHECK(is_not_tuned(a, zeros));
        // as if memory were full, which it must not be while other tests run at the same time
        gpu().reserved = gpu().total_bytes;
        CHECK(is_not_tuned(a, b));
        gpu().reserved = 0;
    }
}

// Each set of adversarial operands is enough to tell a split of K.
TEST(matmul_adversarial_operands) {
    const SplittableProduct product;
    const size_t rows = product.p.rows;
    const size_t K = product.p.k;
    const Tensor<float> a(poison(rows * K));
    const Tensor<float> b(poison(rows * K));
    const Tensor<float> d(poison(rows * product.p.cols));
    for (int set = 0; set < kAdversarialSets; set++) {
        AdversarialOperand operand = {
            .side = AdversarialOperand::kA, .type = DType::f32, .lines = rows, .k = K};
        fill_adversarial(late(gpu()), a, set, operand);
        operand.side = AdversarialOperand::kB;
        operand.k_inner = true;
        fill_adversarial(late(gpu()), b, set, operand);

        const MatmulOperands operands = {.d = d, .a = a, .b = b};
        const auto result = [&](bool split) {
            product.run(operands, false, split);
            return d.values();
        };
        const bool split = true;
        if (same_bits(result(!split), result(split)))
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
              matmul_activation_forward(on.late_device(), on(out), on(pre), on(inp), on(weight),
                                        on(bias), N, C, OC);
          });
}

// dpre = (dout·weight)∘f'(pre), its sum over rows, and f(pre) once more. C is the width of pre.
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
        const Scratch scratch(matmul_activation_scratch_bytes(on.device(), N, C, OC));
        matmul_activation_backward(on.late_device(), on(dpre), on(sum),
                                   with_out ? on(out) : nullptr, scratch.p, on(dout), on(weight),
                                   on(pre), N, C, OC);
    };

    const Result dx = {"dpre", dpre, 2 * std::max(product_tolerance<X>(), kOutput<X>)};
    Result dx_sum = {"dpre_sum", sum};
    dx_sum.column_sums_of = &dpre;
    const Result again = {"out", out, kOutput<X>};
    const bool with_out = true;
    check(what, {dx, dx_sum, again}, [&](const auto& on) { call(on, with_out); });
    check_same(what + " without out", {dx, dx_sum}, [&](const auto& on) { call(on, !with_out); });
    check_same(what + " and activation_forward", {again}, [&](const OnGpu& on) {
        activation_forward(on.late_device(), on(out), on(pre), N * C);
    });
}
TEST_OF_X(matmul_activation) {
    skip_without_tensor_cores_for<X>();
    const int shapes[][3] = {{1, 8, 8},
                             {3, 7, 5},
                             {127, 65, 33},
                             {127, 768, 264},
                             {1000, 64, 768},
                             {1024, 768, 3072},
                             // for matmul_sm90
                             {1, 768, 256},    // one row
                             {129, 192, 512},  // one row more than a tile
                             {1000, 768, 256},
                             {20001, 64, 256},    // one chunk of K
                             {9000, 128, 512},    // two tiles per cluster
                             {9000, 64, 2560},    // six
                             {5000, 1024, 1280},  // two, with few epilogue warps in backward
                             {129, 1600, 6400},   // d48
                             {2100, 64, 6400}};   // two bands, the second with one pair of tiles
    for (const auto& [N, C, OC] : shapes) {
        check_matmul_activation<X>(N, C, OC);
        check_matmul_activation_backward<X>(N, OC, C);
    }
    check_matmul_activation<X>(127, 64, 256, kUnaligned);
    check_matmul_activation_backward<X>(127, 256, 64, kUnaligned);
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
        std::transform(std::begin(extremes), std::end(extremes), x.begin(), rounded<X>);
    Tensor<X> inp(x, offset);
    Tensor<X> dout(randn<X>(n), offset);
    Tensor<X> out(poison(n), offset);
    Tensor<X> dinp(poison(n), offset);
    Tensor<float> sum(randn<float>(C));

    // The result is a sizeable part of x, or its error is relative to 0.01.
    const Result result = {.name = "out",
                           .tensor = out,
                           .tolerance = kOutput<X>,
                           .min_scale = 1e-2,
                           .relative_to_each = true};
    check(what, {result},
          [&](const auto& on) { activation_forward(on.late_device(), on(out), on(inp), n); });

    const auto backward = [&](const auto& on, Tensor<X>& to, bool with_out) {
        const Scratch scratch(activation_scratch_bytes(on.device(), C));
        activation_backward(on.late_device(), on(to), on(sum), with_out ? on(out) : nullptr,
                            scratch.p, on(inp), on(dout), N, C);
    };

    const bool with_out = true;
    Result dx_sum = {"dinp_sum", sum};
    dx_sum.column_sums_of = &dinp;
    check(what, {{"dinp", dinp, kOutput<X>}, dx_sum},
          [&](const auto& on) { backward(on, dinp, !with_out); });

    // in place dinp overwrites dout
    dout.first = dinp.first;
    check_same(what + " in place, with out", {{"dinp", dout}, {"dinp_sum", sum}, {"out", out}},
               [&](const OnGpu& on) { backward(on, dout, with_out); });
}
TEST_OF_X(activation) {
    const int shapes[][2] = {{1, 1}, {1, 7}, {3, 64}, {1000, 8}, {33, 129}, {257, 3072}};
    for (const auto& [N, C] : shapes)
        check_activation<X>(N, C);
    check_activation<X>(64, 64, kUnaligned);
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
        classifier(on.late_device(), on(logits), on(losses), on(targets), dloss, N, V, Vp);
    };

    const float dloss = 0.37f;  // not 1/N, so that gradients and losses have a similar size
    // a loss is a difference of values of at least 1
    const Result loss = {.name = "losses", .tensor = losses, .tolerance = kFp32, .min_scale = 1.0};
    const Result gradient = {
        .name = "dlogits", .tensor = logits, .tolerance = kOutput<X>, .min_scale = dloss};
    check(what, {loss, gradient}, [&](const auto& on) { call(on, dloss); });
    for (size_t n = 0; n < N; n++)
        for (int v = V; v < Vp; v++)
            CHECK_NEAR(logits.first[n * Vp + v], 0.0, 0.0);

    // without a gradient the logits stay as they are
    logits.reset();
    logits.first = logits.values();
    check_same(what + " without dlogits", {{"losses", losses}, {"logits", logits}},
               [&](const OnGpu& on) { call(on, 0.f); });
}

TEST_OF_X(classifier) {
    const int shapes[][3] = {{1, 1, 1},       {3, 5, 7},        {3, 5, 8},  // bf16: no whole vector
                             {127, 263, 264}, {300, 260, 384},  {127, 257, 384},
                             {3, 384, 384},   {1000, 257, 384}, {37, 50257, 50304}};
    for (const auto& [N, V, Vp] : shapes)
        check_classifier<X>(N, V, Vp, 1.0);
    check_classifier<X>(127, 257, 257, 5.0);
    check_classifier<X>(37, 50257, 50304, 5.0);
    check_classifier<X>(3, 50257, 50257, 5.0);
    check_classifier<X>(3, 257, 384, 1.0, kUnaligned);
}

// Both tests of bad rows use these. The rows before kNanRow have a target outside the vocabulary.
constexpr int kNanRow = 3;
constexpr int kInfiniteRow = 4;
constexpr int kMinusInfiniteRow = 5;

// A target outside the vocabulary, padding included, makes its row NaN. A logit that is NaN or +∞
// is noticed in its row, wherever it is. −∞ is a probability of zero. The other rows are as they
// should be.
TEST_OF_X(classifier_of_bad_rows) {
    const int V = 257;
    const int Vp = 384;
    const int N = 7;
    const std::vector<int> targets = {V, -1, 1000000, 7, 7, 7, V - 1};
    const Tensor<float> losses(poison(N));
    for (int at : {0, 100, V - 1}) {
        Values x = randn<X>(N * Vp);
        x[kNanRow * Vp + at] = NAN;
        x[kInfiniteRow * Vp + at] = INFINITY;
        x[kMinusInfiniteRow * Vp + at] = -INFINITY;
        const Tensor<X> logits(x);
        classifier<X>(late(gpu()), logits, losses, Ints(targets), 1.f, N, V, Vp);

        const Values loss = losses.values();
        const Values gradient = logits.values();
        for (int n = 0; n < N; n++) {
            const bool bad_target = n < kNanRow;
            const bool good = n > kInfiniteRow;
            if (bad_target)
                CHECK(std::isnan(loss[n]));
            else
                CHECK(std::isfinite(loss[n]) == good);
            // in the row of +∞ a gradient may be 0
            if (n != kInfiniteRow)
                CHECK(std::isfinite(gradient[n * Vp + 5]) == good);
        }
        CHECK(gradient[kMinusInfiniteRow * Vp + at] == 0.0);
    }
    CHECK_ERROR(classifier<X>(gpu(), nullptr, losses, nullptr, 1.f, N, Vp + 1, Vp), "V = 385");
}

// Compares each element, up to a factor for its row, which the target's element tells. Errors
// relative to the largest value of a wide row would hide most of it.
void check_up_to_scale(const std::string& what, const AnyTensor& dlogits,
                       const std::vector<int>& targets, double tolerance) {
    const size_t N = targets.size();
    const size_t Vp = dlogits.first.size() / N;
    for (size_t n = 0; n < N; n++) {
        const double* got = &dlogits.first[n * Vp];
        const double* want = &dlogits.reference[n * Vp];
        const int target = targets[n];
        const double scale = got[target] != 0 ? want[target] / got[target] : 1;
        for (size_t v = 0; v < Vp; v++) {
            const double allowed = tolerance * std::fabs(want[v]) + 1e-30;
            if (std::fabs(scale * got[v] - want[v]) <= allowed)
                continue;
            test::report(what.c_str(), static_cast<int>(n * Vp + v),
                         format("got %.9g, expected %.9g", scale * got[v], want[v]));
            return;
        }
    }
}

// Losses and both gradients. Logits have standard deviation `scale`. If `sure`, those of the
// targets are near 17.
template <class X>
void check_cross_entropy(size_t N, int C, int V, int Vp, double scale, bool sure = false) {
    const std::string what = label<X>("cross_entropy", N, C, V);
    std::vector<int> classes = tokens_below(V, N, 3);
    classes[0] = V - 1;
    const Ints targets(classes);
    Tensor<X> weight(randn<X>(size_t(Vp) * C, scale / std::sqrt(C)));
    Values rows = randn<X>(N * C);
    if (sure)
        for (size_t n = 0; n < N; n++)
            for (int c = 0; c < C; c++) {
                const double of_target = weight.start[classes[n] * size_t(C) + c];
                rows[n * C + c] = rounded<X>(0.6 / scale * of_target * std::sqrt(C));
            }
    Tensor<X> inp(rows);
    Tensor<X> dlogits(poison(N * Vp));
    Tensor<float> losses(poison(N));
    Tensor<float> dweight(randn<float>(size_t(Vp) * C));
    const float dloss = 0.37f;
    const auto call = [&](const auto& on, float dloss) {
        const Scratch scratch(cross_entropy_scratch_bytes<X>(on.device(), N, C, Vp));
        cross_entropy(on.late_device(), on(dlogits), on(losses), scratch.p, on(inp), on(weight),
                      on(targets), dloss, N, C, V, Vp);
        if (dloss == 0.f)
            return;
        cross_entropy_backward(on.late_device(), on(inp), on(dweight), scratch.p, on(dlogits),
                               on(inp), on(weight), N, C, Vp);
    };

    // A logit is rounded to X, or its distance to the target's logit to fp16 (11 bits).
    const double largest = sure ? 20.0 : 6.0 * scale;
    const bool fused = cross_entropy_scratch_bytes<X>(gpu(), N, C, Vp) > 0;
    const double logit = fused ? 2.0 / 2048 : product_tolerance<X>() + kOutput<X>;
    const double gradient = 2 * (kOutput<X> + product_tolerance<X>()) + largest * logit;
    const Result loss = {
        .name = "losses", .tensor = losses, .tolerance = logit, .min_scale = largest};
    const Result dinp = {.name = "dinp",
                         .tensor = inp,
                         .tolerance = gradient,
                         .min_scale = sure ? 0.0 : dloss * scale / std::sqrt(C)};
    const Result dw = {"dweight", dweight, gradient};
    // not comparable, because the fused dlogits have no scale yet
    const Result unscaled = {
        .name = "dlogits", .tensor = dlogits, .tolerance = INFINITY, .min_scale = 1.0};
    check(what, {loss, dinp, dw, unscaled}, [&](const auto& on) { call(on, dloss); });
    if (fused)
        check_up_to_scale(what + " dlogits", dlogits, classes, gradient);

    check_same(what + " without gradients", {{"losses", losses}}, [&](const OnGpu& on) {
        inp.reset();
        call(on, 0.f);
    });
    for (double loss : losses.first) {
        CHECK(loss >= 0.0 || !fused);
        CHECK(loss < 1e-2 || !sure);
    }
}

TEST_OF_X(cross_entropy) {
    skip_without_tensor_cores_for<X>();
    const int shapes[][4] = {{127, 65, 257, 264},
                             {300, 64, 257, 257},
                             // for matmul_sm90
                             {1, 64, 1, 8},       // one class
                             {37, 64, 257, 384},  // tiles past Vp
                             {300, 1600, 250, 264},
                             {127, 768, 1000, 1152},
                             {20001, 64, 600, 640},  // several tiles per cluster, in several bands
                             {9000, 128, 513, 768},
                             {37, 768, 50257, 50304}};  // GPT-2
    for (const auto& [N, C, V, Vp] : shapes)
        check_cross_entropy<X>(N, C, V, Vp, 1.0);
    check_cross_entropy<X>(127, 768, 1000, 1152, 5.0);
    check_cross_entropy<X>(37, 768, 50257, 50304, 5.0);
    // losses above 27.7, for which the rows are computed again
    check_cross_entropy<X>(300, 64, 257, 384, 30.0);
    check_cross_entropy<X>(3, 768, 50257, 50304, 30.0);
    const bool sure = true;
    check_cross_entropy<X>(127, 768, 1000, 1152, 1.0, sure);
}

// A target outside the vocabulary, and an input or a weight that is not finite, make the losses and
// gradients of their rows not finite.
TEST_OF_X(cross_entropy_of_bad_rows) {
    skip_without_tensor_cores_for<X>();
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
        cross_entropy<X>(late(gpu()), dlogits, losses, scratch.p, inp, weight, targets, 1.f, N, C,
                         V, Vp);
        cross_entropy_backward<X>(late(gpu()), inp, nullptr, scratch.p, dlogits, inp, weight, N, C,
                                  Vp);
        return inp.values();
    };

    Values rows = randn<X>(N * C);
    rows[kNanRow * C] = NAN;
    rows[kInfiniteRow * C + 5] = INFINITY;
    rows[kMinusInfiniteRow * C + 63] = -INFINITY;
    const Values dinp = run(rows, weight, {V, -1, 1000000, 7, 7, 7, 0, V - 1, 7, 7});
    const Values loss = losses.values();
    for (int n = 0; n < N; n++) {
        const bool good = n > kMinusInfiniteRow;
        CHECK(std::isfinite(loss[n]) == good);
        CHECK(std::isfinite(dinp[n * C]) == good);
    }

    for (const double broken : {double(NAN), double(INFINITY)}) {
        Values w = weight.start;
        w[100 * C + 1] = broken;
        run(Values(N * C, 1.0), Tensor<X>(w), std::vector<int>(N, 7));
        for (double x : losses.values())
            CHECK(!std::isfinite(x));
    }
}

// -------------------------------------------------------------------------------------------------
// Initial values of parameters, and conversions

// The numbers are the CPU's, up to one unit in the last place, and exactly the mean where sigma is
// 0. Any part of them is filled with the same bits.
template <class X>
void check_init_normal() {
    constexpr size_t n = 100003;
    // of the last place, relative to the power of 2 below a number
    constexpr double kUnit = std::is_same_v<X, bf16> ? 0x1p-7 : 0x1p-23;
    const Cpu cpu;
    for (const size_t first : {size_t(0), size_t(1) << 33})
        for (const double sigma : {0.02, 0.0}) {
            Tensor<X> x(poison(n + 1), kUnaligned);  // the last element is not to be filled
            init_normal<X>(late(gpu()), x, n, 0.25, sigma, 7, first);
            std::vector<X> want(n);
            init_normal(cpu, want.data(), n, 0.25, sigma, 7, first);
            const Values got = x.values();
            size_t different = 0;
            for (size_t i = 0; i < n; i++) {
                const double w = static_cast<float>(want[i]);
                const double power_below = std::exp2(std::floor(std::log2(std::fabs(w))));
                different += got[i] != w;
                CHECK_NEAR(got[i], w, sigma == 0 ? 0 : kUnit * power_below);
            }
            CHECK(different < n / 1000);
            CHECK(std::isnan(got[n]));

            constexpr size_t kFrom = 1234;
            constexpr size_t kSize = 777;
            Tensor<X> part(poison(kSize));
            init_normal<X>(late(gpu()), part, kSize, 0.25, sigma, 7, first + kFrom);
            const auto begin = got.begin() + kFrom;
            CHECK(same_bits(part.values(), Values(begin, begin + kSize)));
        }
}
TEST(init_normal_fp32) {
    check_init_normal<float>();
}
TEST(init_normal_bf16) {
    check_init_normal<bf16>();
}

// Rounds to nearest, as the CPU does.
template <class To, class From>
void check_convert(const Tensor<From>& in) {
    const Values from = in.values();
    const Tensor<To> out(poison(from.size()));
    convert(late(gpu()), out.p, in.p, from.size());
    const Values got = out.values();
    for (size_t i = 0; i < from.size(); i++)
        CHECK(got[i] == rounded<To>(from[i]));
}
TEST(convert) {
    const Values values = randn<float>(10007);
    const Tensor<float> single(values);
    const Tensor<bf16> half(values);
    check_convert<float>(single);
    check_convert<bf16>(single);
    check_convert<float>(half);
    check_convert<bf16>(half);
}

// -------------------------------------------------------------------------------------------------
// Reductions

void check_reduction(bool norm, Tensor<float>& x) {
    const size_t n = x.start.size();
    Tensor<float> out({kNaN});

    const auto call = [&](const auto& on) {
        const Scratch scratch(reduce_scratch_bytes(on.device()));
        const std::decay_t<decltype(*on(out))> quarter = 0.25;
        if (norm)
            global_norm(on.late_device(), on(out), scratch.p, on(x), n);
        else
            reduce_sum(on.late_device(), on(out), scratch.p, on(x), quarter, n);
    };

    check(format("%s of %zu", norm ? "global_norm" : "reduce_sum", n), {{"", out}}, call);

    const double original = x.start[n / 2];
    for (const double broken : {double(NAN), double(INFINITY)}) {
        x.start[n / 2] = broken;
        x.reset();
        call(OnGpu());
        const double result = out.values()[0];
        CHECK(std::isnan(broken) ? std::isnan(result) : result == INFINITY);
        CHECK(count_nonfinite<float>(late(gpu()), Scratch(sizeof(double)).p, x, n) == 1);
    }
    x.start[n / 2] = original;
    x.reset();
}
TEST(reductions) {
    for (size_t n : {1, 3, 64, 1000, 1000003, 4000000}) {
        Tensor<float> x(randn<float>(n, 1.0, 0.5));
        for (const bool norm : {false, true})
            check_reduction(norm, x);
    }

    const Tensor<float> out({kNaN});
    const Tensor<float> seven({7.0});
    const size_t none = 0;
    reduce_sum(late(gpu()), out, Scratch(reduce_scratch_bytes(gpu())).p, seven, 1.f, none);
    CHECK(same_bits(out.values(), {0.0}));
}

// Another sign makes another checksum, and so do two words that are swapped. The checksum of any
// number of zeros is 0.
TEST(checksums) {
    constexpr size_t n = 300001;
    Tensor<float> x(randn<float>(n));
    const Scratch scratch(sizeof(double));

    const auto sum = [&] {
        x.reset();
        return checksum(late(gpu()), scratch.p, static_cast<float*>(x), n * sizeof(float));
    };
    const uint64_t before = sum();
    CHECK(sum() == before);
    CHECK(checksum(late(gpu()), scratch.p, nullptr, 0) == 0);

    x.start[n - 1] *= -1;
    CHECK(sum() != before);
    x.start[n - 1] *= -1;

    std::swap(x.start[0], x.start[7]);
    CHECK(sum() != before);

    std::fill(x.start.begin(), x.start.end(), 0.f);
    CHECK(sum() == 0);
}

// -------------------------------------------------------------------------------------------------
// AdamW

// Ranges that begin and end anywhere. Between the third and the fourth there is a gap, which must
// stay as it was.
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

// Parameters, m and v after ten steps. The same steps with bf16 parameters must give the same m and
// v, and the parameters as master weights.
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
            const double squares = std::inner_product(x.begin(), x.end(), x.begin(), 0.0);
            norm.emplace_back(Values{rounded<float>(std::sqrt(squares))});
        }

        check(format("adamw with max_norm %g", max_norm), {{"params", p}, {"m", m}, {"v", v}},
              [&](const auto& on) {
                  for (int step = 1; step <= 10; step++)
                      adamw_update(on.late_device(), on(p), nullptr, on(m), on(v), on(g[step - 1]),
                                   on(norm[step - 1]), kRanges, std::size(kRanges),
                                   hyper(step, max_norm));
              });
        for (int step = 1; step <= 10; step++)
            adamw_update<bf16>(late(gpu()), params, master, m_bf16, v_bf16, g[step - 1],
                               norm[step - 1], kRanges, std::size(kRanges), hyper(step, max_norm));
        CHECK(same_bits(master.values(), p.first));
        CHECK(same_bits(m_bf16.values(), m.first));
        CHECK(same_bits(v_bf16.values(), v.first));

        const Values exact = master.values();
        const Values stored = params.values();
        for (size_t i = 0; i < kAdamSize; i++) {
            // one of the two bf16 neighbours, so less than 2⁻⁷ of the power of 2 below away
            const double ulp = std::ldexp(1.0, std::ilogb(exact[i]) - 7);
            CHECK_NEAR(stored[i], exact[i], ulp);
            CHECK(std::fabs(stored[i] - exact[i]) < ulp);
        }
    }
}

// Four ranks that each update their share write the same bits as one rank that updates all,
// stochastic rounding included.
TEST(adamw_shares) {
    constexpr size_t kRanks = 4;
    constexpr size_t kPieces = 3;  // of a matrix, that each rank owns
    constexpr size_t kPiece = 1000;
    constexpr size_t kMatrix = kPieces * kRanks * kPiece;
    constexpr size_t kVector = 4096;  // after the matrix
    const size_t n = kMatrix + kVector;
    const size_t own = n / kRanks;
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
        adamw_update<bf16>(late(gpu()), params, master, m, v, g, norm, ranges, 2, hyper(2));
        m.reset();
        v.reset();
        adamw_update<float>(late(gpu()), fp32, nullptr, m, v, g, norm, ranges, 2, hyper(2));
    };
    update(params, fp32, start, g,
           {{.begin = 0, .size = kMatrix, .decay = true},
            {.begin = kMatrix, .size = kVector, .decay = false}});

    for (size_t r = 0; r < kRanks; r++) {
        const size_t vector = kVector / kRanks;  // this rank's part
        const size_t matrix_of_others = kMatrix - kPieces * kPiece;
        const ParamRange share[] = {{.begin = r * kPiece,
                                     .size = kPiece,
                                     .decay = true,
                                     .pieces = kPieces,
                                     .stride = kRanks * kPiece,
                                     .skipped = r * kPiece},
                                    {.begin = kMatrix + r * vector,
                                     .size = vector,
                                     .decay = false,
                                     .pieces = 1,
                                     .stride = kVector,
                                     .skipped = matrix_of_others + r * vector}};
        Values own_start(own);
        Values own_g(own);
        for (const ParamRange& range : share)
            for (size_t p = 0; p < range.pieces; p++) {
                const size_t from = range.piece_begin(p);
                const size_t to = range.state_begin(p);
                std::copy_n(&start[from], range.size, &own_start[to]);
                std::copy_n(&g.start[from], range.size, &own_g[to]);
            }
        update(shared, fp32_shared, own_start, Tensor<float>(own_g), share);
    }
    CHECK(same_bits(shared.values(), params.values()));
    CHECK(same_bits(fp32_shared.values(), fp32.values()));
}

// A step whose gradient norm is not finite changes nothing, whether gradients are clipped or not.
// Clipping them to 0 would not do, because m and v would decay and bf16 parameters would be rounded
// again.
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
            adamw_update<float>(late(gpu()), fp32, nullptr, m, v, g, norm, kRanges,
                                std::size(kRanges), step);
            CHECK(unchanged(fp32) && unchanged(m) && unchanged(v));

            const Tensor<float> master(randn<float>(kAdamSize));
            const Tensor<bf16> params(randn<bf16>(kAdamSize));
            adamw_update<bf16>(late(gpu()), params, master, m, v, g, norm, kRanges,
                               std::size(kRanges), step);
            CHECK(unchanged(params) && unchanged(master) && unchanged(m) && unchanged(v));
        }
}

// beta^t needs more than fp32. With a power in fp32 the update would be off by 2e-5 at step 2, and
// with a product of t factors by 5e-4 at step 100. Each parameter starts at 0, so after the step it
// is the update.
TEST(adamw_bias_correction) {
    const size_t n = 1000;
    const ParamRange all = {.begin = 0, .size = n, .decay = false};
    for (const int step : {1, 2, 100, 100000}) {
        Tensor<float> p(Values(n, 0.0));
        Tensor<float> m(randn<float>(n, 0.1, 1.0));
        Tensor<float> v(randn<float>(n, 0.1, 1.0));
        Tensor<float> g(randn<float>(n));
        Tensor<float> norm({1.0});
        AdamW slow = hyper(step);
        slow.beta1 = 0.99999f;
        slow.beta2 = 0.9999f;
        const Result update = {.name = "params", .tensor = p, .relative_to_each = true};
        check(format("adamw at step %d", step), {update, {"m", m}, {"v", v}}, [&](const auto& on) {
            adamw_update(on.late_device(), on(p), nullptr, on(m), on(v), on(g), on(norm), &all, 1,
                         slow);
        });
    }
}

// With lr = 0 the master stays and only the rounding acts. The mean of the draws is the master,
// within 4 sigma.
TEST(adamw_stochastic_rounding) {
    const size_t n = 1 << 20;
    const ParamRange all = {.begin = 0, .size = n, .decay = true};
    const Values zeros(n, 0.0);
    Tensor<float> master(zeros);
    Tensor<float> m(zeros);
    Tensor<float> v(zeros);
    Tensor<float> g(randn<float>(n));
    Tensor<float> norm({1.0});
    Tensor<bf16> params(poison(n));

    const auto draw = [&](double value, int step, uint64_t seed = 42) {
        master.start.assign(n, value);
        master.reset();
        m.reset();
        v.reset();
        AdamW still = hyper(step);
        still.lr = 0.f;
        still.seed = seed;
        adamw_update<bf16>(late(gpu()), params, master, m, v, g, norm, &all, 1, still);
        return params.values();
    };
    int step = 0;
    for (const double fraction : {0.0, 1.0 / 4096, 0.25, 0.5, 0.9})
        for (const double sign : {1.0, -1.0}) {
            const double below = sign * 3.0;
            const double above = sign * (3.0 + 1.0 / 64);
            const double value = float(below + fraction * (above - below));
            const double exact = (value - below) / (above - below);  // as fp32 holds it
            step++;
            const Values drawn = draw(value, step);
            // Four elements share a hash. Each of the four is counted by itself.
            for (size_t lane = 0; lane < 4; lane++) {
                size_t up = 0;
                size_t neither = 0;
                for (size_t i = lane; i < n; i += 4) {
                    up += drawn[i] == above;
                    neither += drawn[i] != above && drawn[i] != below;
                }
                CHECK(neither == 0);
                const double draws = n / 4.0;
                const double sigma = std::sqrt(exact * (1.0 - exact) / draws);
                CHECK_NEAR(up / draws, exact, 4.0 * sigma);
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
    const ParamRange one = {.begin = 0, .size = 1, .decay = true};
    CHECK_ERROR(update(0, std::vector<ParamRange>(33, one), 1), "33 parameter ranges");
    CHECK_ERROR(update(1, {one}, 1), "aligned");
    CHECK_ERROR(update(0, {one}, 0), "step is 0");
    const ParamRange pieces = {.begin = 0, .size = 6, .decay = true, .pieces = 2, .stride = 12};
    CHECK_ERROR(update(0, {pieces}, 1), "pieces of 6, 12 apart");
}

}  // namespace

TEST_MAIN
