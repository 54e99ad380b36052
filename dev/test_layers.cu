// Tests every layer but attention against the fp64 reference, for float and bf16, and the device itself.
//
// Inputs are random and rounded to X first, so that both sides compute from the same numbers. What a layer writes
// starts as NaN, and so does scratch. What it adds into starts as random values, which the reference adds to as well.
// Layers with sums over rows run twice and must give the same bits. Whatever they read arrives late (dev/late.h).
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "dev/late.h"
#include "dev/test.h"
#include "layers/cpu/reference.h"
#include "layers/layers.h"
#include "layers/matmul_race.h"

namespace {

// Tolerances, relative to the largest reference value of the tensor:
// - fp32 has a unit roundoff of 6e-8. A value takes a few operations. The error of a sum of n random terms grows like
//   √n·6e-8.
constexpr double kFp32 = 4e-6;
// - bf16 output has one rounding to 8 bits, 2⁻⁸, after an error as for fp32.
constexpr double kBf16 = 1.0 / 256 + kFp32;
// - TF32 products lose all but 10 bits of both factors' mantissas, 2⁻¹⁰ each if they are cut off.
constexpr double kTf32 = 2.0 / 1024;
// - bf16 products are summed in fp32. Tensor cores cut sums off instead of rounding, so the error is 1.2e-7 an
//   addition and grows like n.
constexpr double kTensorCoreSum = 2e-5;

template <class X>
constexpr double kOutput = std::is_same_v<X, bf16> ? kBf16 : kFp32;

using Values = std::vector<double>;

Cuda& gpu() {
    std::string why;
    if (Cuda::count(&why) == 0) SKIP("no GPU (%s)", why.c_str());
    static OwnStream dev;
    return dev;
}

// The GPU for one call of a layer, made late for each call (see dev/late.h).
struct Late {
    Late() { gpu(); }
    operator const Cuda&() const { return late(gpu()); }
};
const Cpu& cpu() {
    static const Cpu dev;
    return dev;
}

uint64_t hash(uint64_t x) {
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdu;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53u;
    return x ^ (x >> 33);
}
double uniform(uint64_t seed, uint64_t i) {
    return (hash(hash(seed) + i) >> 11) * 0x1p-53;
}

float host_float(float x) {
    return x;
}
float host_float(bf16 x) {
    return __bfloat162float(x);
}
template <class X>
X rounded(double x) {
    if constexpr (std::is_same_v<X, bf16>)
        return __float2bfloat16_rn(static_cast<float>(x));
    else
        return static_cast<X>(x);
}

// n normal values, rounded to X. Every call draws new ones.
template <class X>
Values normal(size_t n, double scale = 1.0, double shift = 0.0) {
    static uint64_t seed = 0;
    seed++;
    Values values(n);
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform(seed, 2 * i)));
        values[i] = host_float(rounded<X>(shift + scale * radius * std::cos(2.0 * M_PI * uniform(seed, 2 * i + 1))));
    }
    return values;
}
std::vector<int> tokens_below(int V, size_t n, uint64_t seed) {
    std::vector<int> tokens(n);
    for (size_t i = 0; i < n; i++) tokens[i] = static_cast<int>(uniform(seed, i) * V);
    return tokens;
}

// An array on the GPU that starts poisoned. `offset` elements precede it, to break its alignment.
template <class T>
class Array {
  public:
    explicit Array(size_t n, size_t offset = 0)
        : n_(n), memory_(gpu(), (n + offset) * sizeof(T)), p_(static_cast<T*>(memory_.p) + offset) {}
    explicit Array(const Values& values, size_t offset = 0) : Array(values.size(), offset) { set(values); }
    explicit Array(const std::vector<int>& values) : Array(values.size()) {
        gpu().upload(p_, values.data(), n_ * sizeof(int));
        gpu().sync();
    }
    operator T*() const { return p_; }
    void set(const Values& values) {
        std::vector<T> host(n_);
#pragma omp parallel for
        for (size_t i = 0; i < n_; i++) host[i] = rounded<T>(values[i]);
        gpu().upload(p_, host.data(), n_ * sizeof(T));
        gpu().sync();
    }
    std::vector<T> raw() const {
        std::vector<T> host(n_);
        gpu().download(host.data(), p_, n_ * sizeof(T));
        return host;
    }
    Values values() const {
        Values values(n_);
        const std::vector<T> host = raw();
#pragma omp parallel for
        for (size_t i = 0; i < n_; i++) values[i] = host_float(host[i]);
        return values;
    }

  private:
    size_t n_;
    LateMemory memory_;
    T* p_;
};
using Scratch = Array<float>;
Scratch scratch_of(size_t bytes) {
    return Scratch(bytes / sizeof(float) + 1);
}

bool same_bits(const Values& a, const Values& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

// Errors are relative to the largest reference value, or to `least` if that is larger.
void compare(const std::string& what, const Values& got, const Values& want, double tolerance, double least = 0.0) {
    double largest = least;
    for (double w : want) largest = std::max(largest, std::fabs(w));
    for (size_t i = 0; i < want.size(); i++) {
        const double off = std::fabs(got[i] - want[i]);
        if (off <= tolerance * largest) continue;
        test::report(what.c_str(), static_cast<int>(i),
                     format("got %.9g, expected %.9g; off by %.2e of the largest, %.2e allowed", got[i], want[i],
                            off / largest, tolerance));
        return;
    }
}
template <class X>
std::string label(const char* what, size_t a, size_t b, size_t c) {
    return format("%s %s %zux%zux%zu", what, name_of(dtype_of<X>()), a, b, c);
}

// ---------------------------------------------------------------------------------------------------------------------
// The device

__global__ void empty_kernel() {}
TEST(device) {
    const Cuda& dev = gpu();
    cudaFuncAttributes built;  // make adds the a to 90. On a 9.0 the code may also come from PTX for 80
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
    CHECK(cudaGetLastError() == cudaSuccess);  // the failure is not reported again by the next check
    CHECK_ERROR(CUDA_CHECK(cudaSetDevice(99)), "cudaSetDevice(99)");
    CHECK_ERROR(CUBLAS_CHECK(CUBLAS_STATUS_NOT_SUPPORTED), "CUBLAS_STATUS_NOT_SUPPORTED");

    Array<float> array(Values{1.0, 2.0, 3.0});
    CHECK(same_bits(array.values(), {1.0, 2.0, 3.0}));
    dev.zero(array + 1, sizeof(float));
    CHECK(same_bits(array.values(), {1.0, 0.0, 3.0}));
    void* pinned = dev.alloc_host(64);
    CHECK(pinned);
    dev.free_host(pinned);
}

TEST(another_stream_is_noticed) {
    const Array<float> from(Values{1.0, 2.0}), to(Values{3.0, 4.0});
    for (const bool other : {true, false}) {
        const Late late;
        const Cuda& dev = late;
        CUDA_CHECK(cudaMemcpyAsync(to, from, 2 * sizeof(float), cudaMemcpyDeviceToDevice, other ? 0 : dev.stream));
        CHECK(same_bits(to.values(), other ? Values{3.0, 4.0} : Values{1.0, 2.0}));
        CHECK(same_bits(from.values(), {1.0, 2.0}));
    }
    const Late late;  // work that reads too early sees NaN
    const Cuda& dev = late;
    float early[2];
    CUDA_CHECK(cudaMemcpy(early, from, sizeof early, cudaMemcpyDeviceToHost));
    CHECK(std::isnan(early[0]) && std::isnan(early[1]));
    dev.download(early, from, sizeof early);
    CHECK(early[0] == 1.f && early[1] == 2.f);
}

// ---------------------------------------------------------------------------------------------------------------------
// Encoder

template <class X>
void check_encoder(int B, int T, int C, int V, const std::vector<int>& tokens, const Positions& at = {}) {
    const Late dev;
    const size_t N = size_t(B) * T;
    const std::string what = label<X>("encoder", B, T, C);
    const size_t positions = 1 + std::max(at.of(T - 1), at.of(std::min(at.chunk, T) - 1));
    const Values wte = normal<X>(size_t(V) * C), wpe = normal<X>(positions * C), dout = normal<X>(N * C);
    const Array<int> tokens_gpu(tokens);

    Values out(N * C);
    encoder_forward(cpu(), out.data(), tokens.data(), wte.data(), wpe.data(), B, T, C, at);
    const Array<X> out_gpu(N * C);
    encoder_forward<X>(dev, out_gpu, tokens_gpu, Array<X>(wte), Array<X>(wpe), B, T, C, at);
    compare(what + " out", out_gpu.values(), out, kOutput<X>);

    std::vector<int> plan(encoder_plan_ints(dev, N), -1);
    encoder_plan(dev, plan.data(), tokens.data(), N);
    const Array<int> plan_gpu(plan);
    Values dwte = normal<float>(size_t(V) * C), dwpe = normal<float>(positions * C);
    Array<float> dwte_gpu(dwte), dwpe_gpu(dwpe);
    const Array<X> dout_gpu(dout);
    const auto run = [&] {
        encoder_backward<X>(dev, dwte_gpu, dwpe_gpu, scratch_of(encoder_scratch_bytes(dev, B, T, C)), dout_gpu,
                            plan_gpu, B, T, C, at);
    };
    run();
    const Values first_dwte = dwte_gpu.values(), first_dwpe = dwpe_gpu.values();
    dwte_gpu.set(dwte), dwpe_gpu.set(dwpe);
    run();
    CHECK(same_bits(dwte_gpu.values(), first_dwte) && same_bits(dwpe_gpu.values(), first_dwpe));
    encoder_backward(cpu(), dwte.data(), dwpe.data(), nullptr, dout.data(), tokens.data(), B, T, C, at);
    compare(what + " dwte", first_dwte, dwte, kFp32);
    compare(what + " dwpe", first_dwpe, dwpe, kFp32);
}

template <class X>
void check_encoders() {
    const int shapes[][3] = {{1, 1, 1}, {1, 3, 7}, {3, 127, 65}, {2, 64, 768}, {5, 33, 1600}};
    for (const auto& [B, T, C] : shapes) check_encoder<X>(B, T, C, 257, tokens_below(257, size_t(B) * T, 1));
    check_encoder<X>(16, 256, 64, 40, tokens_below(40, 4096, 2));                   // every token has several chunks
    check_encoder<X>(16, 256, 64, 3, std::vector<int>(4096, 2));                    // one token
    check_encoder<X>(1, kEncoderChunk, 64, 3, std::vector<int>(kEncoderChunk, 2));  // exactly one chunk
    check_encoder<X>(1, kEncoderChunk + 1, 64, 3, std::vector<int>(kEncoderChunk + 1, 2));  // one more
    std::vector<int> different(4096), pairs(33 * 64);
    for (int i = 0; i < 4096; i++) different[i] = (i * 1021) % 4096;
    for (int i = 0; i < 33 * 64; i++) pairs[i] = i % 64;  // 33 positions a token, the most partial rows there can be
    check_encoder<X>(16, 256, 64, 4096, different);
    check_encoder<X>(33, 64, 64, 64, pairs);
    check_encoder<X>(3, 66, 64, 40, tokens_below(40, 198, 3), {33, 33, 7 * 33});  // a rank's two chunks of a sequence
    check_encoder<X>(2, 6, 65, 40, tokens_below(40, 12, 4), {3, 0, 5});
}
TEST(encoder_fp32) {
    check_encoders<float>();
}
TEST(encoder_bf16) {
    check_encoders<bf16>();
}

TEST(encoder_plan_errors) {
    const int tokens[] = {3, -1};
    std::vector<int> plan(encoder_plan_ints(gpu(), 2));
    CHECK_ERROR(encoder_plan(gpu(), plan.data(), tokens, 2), "token -1 at position 1");
}

// ---------------------------------------------------------------------------------------------------------------------
// Layer norm

template <class X>
void check_layernorm(size_t N, int C, size_t offset = 0) {
    const Late dev;
    const std::string what = label<X>("layernorm", N, C, offset);
    // A mean far from zero would expose a variance computed as E[x²] − E[x]².
    const Values a = normal<X>(N * C, 1.0, 8.0), b = normal<X>(N * C), weight = normal<X>(C, 0.5, 1.0),
                 bias = normal<X>(C);
    const Array<X> a_gpu(a, offset), b_gpu(b, offset), weight_gpu(weight, offset), bias_gpu(bias, offset);

    Values out(N * C), mean(N), rstd(N);
    layernorm_forward(cpu(), out.data(), mean.data(), rstd.data(), a.data(), weight.data(), bias.data(), N, C);
    const Array<X> out_gpu(N * C, offset);
    const Array<float> mean_gpu(N), rstd_gpu(N);
    layernorm_forward<X>(dev, out_gpu, mean_gpu, rstd_gpu, a_gpu, weight_gpu, bias_gpu, N, C);
    // x is near 8, so its distance to the mean has an absolute error of 8 roundings. C = 1 and 2 can have a tiny
    // variance.
    const double spread = C > 2 ? 8.0 : 1000.0;
    compare(what + " out", out_gpu.values(), out, std::max(kOutput<X>, spread * 6e-8));
    compare(what + " mean", mean_gpu.values(), mean, kFp32);
    compare(what + " rstd", rstd_gpu.values(), rstd, kFp32);

    // The residual can be placed apart, over a, or over b. The values must be the same each time.
    Values sum(N * C);
    for (size_t i = 0; i < N * C; i++) sum[i] = host_float(rounded<X>(a[i] + b[i]));  // as stored
    layernorm_forward(cpu(), out.data(), mean.data(), rstd.data(), sum.data(), weight.data(), bias.data(), N, C);
    for (int place = 0; place < 3; place++) {
        const Array<X> apart(N * C, offset), over_a(a, offset), over_b(b, offset), norm_gpu(N * C, offset);
        const Array<float> mean2(N), rstd2(N);
        X* residual = place == 0 ? apart : place == 1 ? over_a : over_b;
        residual_layernorm_forward<X>(dev, residual, norm_gpu, mean2, rstd2, over_a, over_b, weight_gpu, bias_gpu, N,
                                      C);
        CHECK(same_bits((place == 0 ? apart : place == 1 ? over_a : over_b).values(), sum));
        compare(what + " residual out", norm_gpu.values(), out, std::max(kOutput<X>, spread * 6e-8));
        compare(what + " residual mean", mean2.values(), mean, kFp32);
        compare(what + " residual rstd", rstd2.values(), rstd, kFp32);
    }

    // Backward, from the fp32 statistics that forward left.
    const Values dout = normal<X>(N * C);
    Values dinp = normal<X>(N * C), dweight = normal<float>(C), dbias = normal<float>(C), dsum = normal<float>(C);
    Array<X> dinp_gpu(dinp, offset);
    Array<float> dweight_gpu(dweight), dbias_gpu(dbias), dsum_gpu(dsum);
    const Array<X> dout_gpu(dout, offset);
    const auto run = [&](float* sum) {
        layernorm_backward<X>(dev, dinp_gpu, dweight_gpu, dbias_gpu, sum, scratch_of(layernorm_scratch_bytes(dev, C)),
                              dout_gpu, a_gpu, weight_gpu, mean_gpu, rstd_gpu, N, C);
    };
    run(dsum_gpu);
    const Values first[] = {dinp_gpu.values(), dweight_gpu.values(), dbias_gpu.values()};
    dinp_gpu.set(dinp), dweight_gpu.set(dweight), dbias_gpu.set(dbias);
    run(nullptr);
    CHECK(same_bits(dinp_gpu.values(), first[0]));
    for (size_t i = 0; i < N * C; i++) dsum[i % C] += first[0][i];
    compare(what + " dinp_sum", dsum_gpu.values(), dsum, kFp32, 1.0);  // of values around 1, which may cancel
    CHECK(same_bits(dweight_gpu.values(), first[1]) && same_bits(dbias_gpu.values(), first[2]));
    layernorm_backward(cpu(), dinp.data(), dweight.data(), dbias.data(), nullptr, nullptr, dout.data(), a.data(),
                       weight.data(), mean_gpu.values().data(), rstd_gpu.values().data(), N, C);
    compare(what + " dinp", first[0], dinp, kOutput<X>);
    compare(what + " dweight", first[1], dweight, kFp32);
    compare(what + " dbias", first[2], dbias, kFp32);
}

template <class X>
void check_layernorms() {
    for (size_t N : {1, 3, 127})
        for (int C : {1, 7, 64, 65, 768, 1600}) check_layernorm<X>(N, C);
    for (int C : {65, 512, 768, 1024, 1600}) check_layernorm<X>(5000, C);
    check_layernorm<X>(20001, 768);  // warps take enough rows to use a stage three times
    check_layernorm<X>(13, 1024);
    check_layernorm<X>(300, 8192);
    check_layernorm<X>(40, 3000);
    check_layernorm<X>(40, 8192);
    check_layernorm<X>(40, 8191);
    check_layernorm<X>(127, 768, 1);  // pointers that are not 16-byte aligned
    check_layernorm<X>(5000, 1024, 1);
    CHECK_ERROR(layernorm_scratch_bytes(gpu(), 8193), "C = 8193");
}
TEST(layernorm_fp32) {
    check_layernorms<float>();
}
TEST(layernorm_bf16) {
    check_layernorms<bf16>();
}

// ---------------------------------------------------------------------------------------------------------------------
// Matmul

template <class X>
void check_matmul(size_t N, int C, int OC, size_t offset = 0) {
    const Late dev;
    const std::string what = label<X>("matmul", N, C, OC);
    const double product = std::is_same_v<X, bf16> ? kTensorCoreSum : gpu().tf32 ? kTf32 : kFp32;
    const double output = std::max(product, kOutput<X>);
    const Values inp = normal<X>(N * C), weight = normal<X>(size_t(OC) * C), bias = normal<X>(OC),
                 dout = normal<X>(N * OC);
    const Array<X> inp_gpu(inp, offset), weight_gpu(weight, offset), bias_gpu(bias), dout_gpu(dout, offset);

    for (const bool with_bias : {true, false}) {
        Values out(N * OC);
        matmul_forward(cpu(), out.data(), inp.data(), weight.data(), with_bias ? bias.data() : nullptr, N, C, OC);
        const Array<X> out_gpu(N * OC, offset);
        matmul_forward<X>(dev, out_gpu, inp_gpu, weight_gpu, with_bias ? static_cast<X*>(bias_gpu) : nullptr, N, C, OC);
        // With odd sizes cuBLASLt may round the product before it adds the bias.
        compare(what + (with_bias ? " out, bias" : " out"), out_gpu.values(), out, with_bias ? 2.0 * output : output);
    }

    Values dinp(N * C), dweight = normal<float>(size_t(OC) * C);
    const Array<X> dinp_gpu(N * C, offset);
    Array<float> dweight_gpu(dweight);
    const auto run = [&](X* to) { matmul_backward<X>(dev, to, dweight_gpu, dout_gpu, inp_gpu, weight_gpu, N, C, OC); };
    run(dinp_gpu);
    const Values first[] = {dinp_gpu.values(), dweight_gpu.values()};
    dweight_gpu.set(dweight);
    run(dinp_gpu);
    CHECK(same_bits(dinp_gpu.values(), first[0]) && same_bits(dweight_gpu.values(), first[1]));
    dweight_gpu.set(dweight);
    run(nullptr);  // only dweight
    CHECK(same_bits(dweight_gpu.values(), first[1]));
    const Array<float> written(size_t(OC) * C);  // starts poisoned, because it is not added into
    matmul_backward<X>(dev, nullptr, written, dout_gpu, inp_gpu, weight_gpu, N, C, OC, false);
    Values written_want(size_t(OC) * C, std::numeric_limits<double>::quiet_NaN());
    matmul_backward<double>(cpu(), nullptr, written_want.data(), dout.data(), inp.data(), weight.data(), N, C, OC,
                            false);
    compare(what + " dweight written", written.values(), written_want, product);
    matmul_backward(cpu(), dinp.data(), dweight.data(), dout.data(), inp.data(), weight.data(), N, C, OC);
    compare(what + " dinp", first[0], dinp, output);
    compare(what + " dweight", first[1], dweight, product);
}

template <class X>
void check_qkv_bias(size_t N, int C, size_t offset = 0) {
    const std::string what = label<X>("qkv_bias", N, C, 3 * C);
    const Values dqkv = normal<X>(N * 3 * C), projw = normal<X>(size_t(C) * C), dprojb = normal<float>(C),
                 before = normal<float>(3 * C);
    Values want = before;
    for (int c = 0; c < C; c++) {
        for (size_t row = 0; row < N; row++) want[c] += dqkv[row * 3 * C + c];
        want[2 * C + c] = 0;
        for (int r = 0; r < C; r++) want[2 * C + c] += dprojb[r] * projw[size_t(r) * C + c];
    }
    const Array<X> dqkv_gpu(dqkv, offset), projw_gpu(projw, offset);
    const Array<float> dprojb_gpu(dprojb);
    Values first;
    for (int run = 0; run < 2; run++) {
        Values start = before;
        std::fill(start.begin() + 2 * C, start.end(), std::numeric_limits<double>::quiet_NaN());  // written
        const Array<float> dqkvb(start);
        qkv_bias_backward<X>(Late(), dqkvb, scratch_of(qkv_bias_scratch_bytes(gpu(), C)), dqkv_gpu, dprojb_gpu,
                             projw_gpu, N, C);
        const Values got = dqkvb.values();
        if (run == 0) compare(what, first = got, want, kFp32);
        CHECK(same_bits(got, first));
    }
}
TEST(qkv_bias) {
    for (const auto& [N, C] : {std::pair{size_t{1}, 1}, {3, 65}, {127, 768}, {5000, 64}, {1000, 1600}})
        check_qkv_bias<float>(N, C), check_qkv_bias<bf16>(N, C);
    check_qkv_bias<bf16>(127, 64, 1);
}

template <class X>
void check_matmuls() {
    const int shapes[][3] = {{1, 1, 1},     {1, 64, 64},     {3, 7, 5},         {127, 65, 33},     {127, 768, 257},
                             {3, 1600, 64}, {1000, 64, 768}, {1024, 768, 2304}, {256, 1600, 1600}, {2000, 129, 1}};
    for (const auto& [N, C, OC] : shapes) check_matmul<X>(N, C, OC);
    check_matmul<X>(127, 64, 64, 1);     // pointers aligned to one element only
    check_matmul<X>(2048, 512, 512, 1);  // large enough for algorithms to race
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
    if (gpu().sm < 80) SKIP("bf16 needs compute capability 8.0");
    check_matmuls<bf16>();
}

// A race of algorithms of our own. One that adds in another order is refused, also if the call's operands cannot tell.
enum { kWhole, kSplit, kSplitIfAdded, kSplitOnOwn, kIdle };
TEST(matmul_race) {
    const Cuda& dev = gpu();
    MatmulProduct p = {1024, 1024, 2048, false, false};
    const size_t n = p.rows * p.k;
    // A·B, over all of K at once or in two parts.
    const auto multiply = [&](const MatmulOperands& o, bool accumulate, bool split) {
        const float one = 1.f, zero = 0.f;
        const size_t cut = split ? 600 : 0;
        const auto part = [&](size_t from, size_t to, bool add) {
            CUBLAS_CHECK(cublasGemmEx(dev.blas, CUBLAS_OP_N, CUBLAS_OP_N, p.rows, p.cols, to - from, &one,
                                      static_cast<const float*>(o.a) + from * p.rows, CUDA_R_32F, p.rows,
                                      static_cast<const float*>(o.b) + from, CUDA_R_32F, p.k, add ? &one : &zero, o.d,
                                      CUDA_R_32F, p.rows, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
        };
        if (split) part(0, cut, accumulate);
        part(cut, p.k, accumulate || split);
    };
    const Array<float> ones(Values(n, 1.0)), a(normal<float>(n)), b(normal<float>(n)), zeros(Values(n, 0.0)),
        d(normal<float>(p.rows * p.cols));
    using Numbers = std::vector<int>;
    int runs = 0;
    const auto race_of = [&](const Numbers& kinds, const float* a, const float* b) {
        const RunAlgorithm run = [&](int i, const MatmulOperands& o, bool add) {
            runs++;
            const int kind = kinds[i];
            if (kind != kIdle)
                multiply(o, add, kind == kSplit || (kind == kSplitIfAdded && add) || (kind == kSplitOnOwn && o.a == a));
            return true;
        };
        return race(Late(), p, {d, a, b}, static_cast<int>(kinds.size()), run);
    };
    for (const bool accumulate : {false, true}) {
        p.accumulate = accumulate;
        const Values before = d.values();
        const Numbers kinds = {kWhole, kSplit, kWhole, kSplitIfAdded, kSplitOnOwn, kIdle};
        const RaceResult random = race_of(kinds, a, b);
        CHECK((random.equal == Numbers{0, 2}) && (random.fastest == 0 || random.fastest == 2));
        CHECK((race_of(kinds, ones, ones).equal == Numbers{0, 2, 4}));  // these sums are exact in every order
        CHECK((race_of({kSplit, kWhole, kSplit, kIdle}, ones, ones).equal == Numbers{0, 2}));  // the first decides
        const RaceResult idle = race_of({kWhole, kIdle}, a, b);  // the fastest, if it took part
        CHECK(idle.equal == Numbers{0} && idle.fastest == 0);
        CHECK(same_bits(d.values(), before) == accumulate);

        runs = 0;  // nothing can be compared, so the first is taken without a run
        CHECK((race_of({kWhole, kWhole}, zeros, b).equal == Numbers{0}) && runs == 0);
        CHECK((race_of({kWhole, kWhole}, a, zeros).equal == Numbers{0}) && runs == 0);
        std::vector<void*> rest;  // all memory but a few MiB, because hostile A and B take 16
        for (size_t bytes = dev.free_bytes(); bytes >= 4 << 20; bytes /= 2) try {
                rest.push_back(dev.alloc(bytes));
            } catch (const OutOfMemory&) {}
        CHECK((race_of({kWhole, kWhole}, a, b).equal == Numbers{0}) && runs == 0);
        for (void* p : rest) dev.free(p);
    }

    // Each hostile set can tell by itself, and is what its name says.
    const size_t rows = p.rows, K = p.k;
    const Array<float> hostile_a(n), hostile_b(n);
    const Array<bf16> hostile_bf16(n);
    for (int set = 0; set < kHostileSets; set++) {
        const auto fill = [&](auto* x, DType type, bool k_inner, bool second) {
            fill_hostile(Late(), x, type, rows, K, k_inner, set, second);
        };
        fill(static_cast<float*>(hostile_a), DType::f32, false, false);
        fill(static_cast<float*>(hostile_b), DType::f32, true, true);
        const MatmulOperands o = {d, hostile_a, hostile_b};
        multiply(o, false, false);
        const Values whole = d.values();
        multiply(o, false, true);
        if (same_bits(d.values(), whole)) test::report("hostile set", set, "a split of K gives the same bits");

        const Values x = hostile_a.values(), y = hostile_b.values();
        fill(static_cast<float*>(hostile_a), DType::f32, true, false);
        fill(static_cast<bf16*>(hostile_bf16), DType::bf16, true, false);
        const Values turned = hostile_a.values(), narrow = hostile_bf16.values();
        for (const size_t r : {size_t{0}, size_t{7}, rows - 1}) {
            double sum = 0.0, least = INFINITY, most = 0.0;
            int large = 0, negative = 0;
            for (size_t k = 0; k < K; k++) {
                const size_t m = K - 1 - k;
                const double v = x[k * rows + r];
                if (k < m) sum += std::fabs(v * y[r * K + k] + x[m * rows + r] * y[r * K + m]);
                least = std::min(least, std::fabs(v)), most = std::max(most, std::fabs(v));
                large += std::fabs(v) > 1000.0, negative += v < 0.0;
                CHECK(turned[r * K + k] == v && narrow[r * K + k] == host_float(rounded<bf16>(v)));
            }
            CHECK((sum == 0.0) == (set == 0) && negative > 800 && negative < 1250);
            CHECK(large == (set == 2) && (set == 1 ? most > 100.0 && least < 0.01 : least >= 1.0));
        }
    }
}

// pre = inp·weightᵀ + bias, out = gelu(pre).
template <class X>
void check_matmul_gelu(size_t N, int C, int OC, size_t offset = 0) {
    const Late dev;
    const std::string what = label<X>("matmul_gelu", N, C, OC);
    const double product = std::is_same_v<X, bf16> ? kTensorCoreSum : kTf32, output = 2 * std::max(product, kOutput<X>);
    const Values inp = normal<X>(N * C), weight = normal<X>(size_t(OC) * C, 1 / std::sqrt(C)), bias = normal<X>(OC);
    const Array<X> inp_gpu(inp, offset), weight_gpu(weight, offset), bias_gpu(bias);
    Values pre(N * OC), out(N * OC);
    matmul_gelu_forward(cpu(), out.data(), pre.data(), inp.data(), weight.data(), bias.data(), N, C, OC);
    const Array<X> pre_gpu(N * OC, offset), out_gpu(N * OC, offset);
    matmul_gelu_forward<X>(dev, out_gpu, pre_gpu, inp_gpu, weight_gpu, bias_gpu, N, C, OC);
    compare(what + " pre", pre_gpu.values(), pre, output);
    compare(what + " out", out_gpu.values(), out, output);
}
// dpre = (dout·weight)∘gelu'(pre), its sum over rows, and gelu(pre) again. C is pre's width.
template <class X>
void check_matmul_gelu_backward(size_t N, int C, int OC, size_t offset = 0) {
    const Late dev;
    const std::string what = label<X>("matmul_gelu_backward", N, C, OC);
    const double product = std::is_same_v<X, bf16> ? kTensorCoreSum : kTf32, output = 2 * std::max(product, kOutput<X>);
    const Values dout = normal<X>(N * OC), weight = normal<X>(size_t(OC) * C, 1 / std::sqrt(OC)),
                 pre = normal<X>(N * C, 2.0);
    const Array<X> dout_gpu(dout, offset), weight_gpu(weight, offset), pre_gpu(pre, offset);
    Values dpre(N * C), out(N * C), sum = normal<float>(C);
    const Array<X> dpre_gpu(N * C, offset), out_gpu(N * C, offset), dpre_alone(N * C, offset);
    const Array<float> sum_gpu(sum), sum_alone(sum);
    const auto run = [&](X* dpre, float* sum, X* out) {
        matmul_gelu_backward<X>(dev, dpre, sum, out, scratch_of(matmul_gelu_scratch_bytes(dev, N, C, OC)), dout_gpu,
                                weight_gpu, pre_gpu, N, C, OC);
    };
    run(dpre_gpu, sum_gpu, out_gpu);
    run(dpre_alone, sum_alone, nullptr);
    CHECK(same_bits(dpre_alone.values(), dpre_gpu.values()) && same_bits(sum_alone.values(), sum_gpu.values()));
    matmul_gelu_backward<double>(cpu(), dpre.data(), Values(C).data(), out.data(), nullptr, dout.data(), weight.data(),
                                 pre.data(), N, C, OC);
    compare(what + " dpre", dpre_gpu.values(), dpre, output);
    compare(what + " out", out_gpu.values(), out, kOutput<X>);
    const Values got = dpre_gpu.values();
    for (size_t i = 0; i < N * C; i++) sum[i % C] += got[i];
    compare(what + " dpre_sum", sum_gpu.values(), sum, kFp32);
    const Array<X> fresh(N * C, offset);  // what backward makes again has the bits that gelu_forward gives
    gelu_forward<X>(dev, fresh, pre_gpu, N * C);
    CHECK(same_bits(out_gpu.values(), fresh.values()));
}
template <class X>
void check_matmul_gelus() {
    // From the seventh on these are for matmul_sm90: one row, odd numbers of rows, one chunk of K, two tiles a cluster,
    // six, d48.
    const int shapes[][3] = {{1, 8, 8},         {3, 7, 5},        {127, 65, 33},    {127, 768, 264},  {1000, 64, 768},
                             {1024, 768, 3072}, {1, 768, 256},    {129, 192, 512},  {1000, 768, 256}, {20001, 64, 256},
                             {9000, 128, 512},  {9000, 64, 2560}, {129, 1600, 6400}};
    for (const auto& [N, C, OC] : shapes) {
        check_matmul_gelu<X>(N, C, OC);
        check_matmul_gelu_backward<X>(N, OC, C);
    }
    check_matmul_gelu<X>(127, 64, 256, 1);
    check_matmul_gelu_backward<X>(127, 256, 64, 1);
}
TEST(matmul_gelu_fp32) {
    check_matmul_gelus<float>();
}
TEST(matmul_gelu_bf16) {
    if (gpu().sm < 80) SKIP("bf16 needs compute capability 8.0");
    check_matmul_gelus<bf16>();
}
TEST(matmul_errors) {
    CHECK_ERROR(matmul_forward<float>(gpu(), nullptr, nullptr, nullptr, nullptr, 1, 0, 1), "C = 0");
    CHECK_ERROR(
        matmul_gelu_backward<bf16>(gpu(), nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 1, 1, 0),
        "OC = 0");
}

// ---------------------------------------------------------------------------------------------------------------------
// GELU

template <class X>
void check_gelu(size_t N, int C, size_t offset = 0) {
    const Late dev;
    const size_t n = N * C;
    const std::string what = label<X>("gelu", N, C, offset);
    Values inp = normal<X>(n, 2.0);
    const double extremes[] = {0.0, -0.0, 1e-30, -1e-30, 10.0, -10.0, 100.0, -100.0, 1e18, -1e18};
    if (n > 100)
        for (size_t i = 0; i < 10; i++) inp[i] = host_float(rounded<X>(extremes[i]));
    const Values dout = normal<X>(n);
    const Array<X> inp_gpu(inp, offset), out_gpu(n, offset), dinp_gpu(n, offset), dout_gpu(dout, offset);

    Values out(n), dinp(n), sum = normal<float>(C);
    const Array<float> sum_gpu(sum), again_sum_gpu(sum);
    const auto backward = [&](X* to, float* to_sum, X* again, const X* dout) {
        gelu_backward<X>(dev, to, to_sum, again, scratch_of(gelu_scratch_bytes(dev, C)), inp_gpu, dout, N, C);
    };
    gelu_forward(cpu(), out.data(), inp.data(), n);
    gelu_forward<X>(dev, out_gpu, inp_gpu, n);
    gelu_backward<double>(cpu(), dinp.data(), Values(C).data(), nullptr, nullptr, inp.data(), dout.data(), N, C);
    backward(dinp_gpu, sum_gpu, nullptr, dout_gpu);
    const Values got = dinp_gpu.values();
    // Errors are checked value by value, relative to the result if that is a sizeable part of x, else to 0.01.
    const Values got_out = out_gpu.values();
    for (size_t i = 0; i < n; i++) {
        if (std::fabs(got_out[i] - out[i]) <= kOutput<X> * std::max(std::fabs(out[i]), 1e-2)) continue;
        CHECK_NEAR(got_out[i], out[i], kOutput<X> * std::max(std::fabs(out[i]), 1e-2));
    }
    compare(what + " dinp", got, dinp, kOutput<X>);
    for (size_t i = 0; i < n; i++) sum[i % C] += got[i];
    compare(what + " dinp_sum", sum_gpu.values(), sum, kFp32);

    const Array<X> again(n, offset);  // in place, with the output again
    backward(dout_gpu, again_sum_gpu, again, dout_gpu);
    CHECK(same_bits(dout_gpu.values(), got) && same_bits(again_sum_gpu.values(), sum_gpu.values()));
    CHECK(same_bits(again.values(), got_out));
}
template <class X>
void check_gelus() {
    const int shapes[][2] = {{1, 1}, {1, 7}, {3, 64}, {1000, 8}, {33, 129}, {257, 3072}};
    for (const auto& [N, C] : shapes) check_gelu<X>(N, C);
    check_gelu<X>(64, 64, 1);
}
TEST(gelu_fp32) {
    check_gelus<float>();
}
TEST(gelu_bf16) {
    check_gelus<bf16>();
}

// ---------------------------------------------------------------------------------------------------------------------
// Classifier

template <class X>
void check_classifier(size_t N, int V, int Vp, double scale, size_t offset = 0) {
    const Late dev;
    const std::string what = label<X>("classifier", N, V, Vp);
    Values logits = normal<X>(N * Vp, scale);
    for (size_t n = 0; n < N; n++)
        std::fill(logits.begin() + n * Vp + V, logits.begin() + (n + 1) * Vp, std::numeric_limits<double>::quiet_NaN());
    std::vector<int> targets = tokens_below(V, N, 3);
    targets[0] = V - 1;
    Array<X> logits_gpu(logits, offset);
    const Array<int> targets_gpu(targets);
    const float dloss = 0.37f;  // not 1/N, so that gradients and losses have a similar size

    const auto before = logits_gpu.raw();
    const Array<float> eval_losses(N), losses_gpu(N);
    classifier<X>(dev, logits_gpu, eval_losses, targets_gpu, 0.f, N, V, Vp);
    CHECK(std::memcmp(logits_gpu.raw().data(), before.data(), before.size() * sizeof(X)) == 0);  // left alone
    classifier<X>(dev, logits_gpu, losses_gpu, targets_gpu, dloss, N, V, Vp);
    CHECK(same_bits(losses_gpu.values(), eval_losses.values()));

    Values losses(N);
    classifier(cpu(), logits.data(), losses.data(), targets.data(), double(dloss), N, V, Vp);
    compare(what + " losses", losses_gpu.values(), losses, kFp32, 1.0);  // a difference of values at least that large
    const Values dlogits = logits_gpu.values();
    compare(what + " dlogits", dlogits, logits, kOutput<X>, dloss);
    for (size_t n = 0; n < N; n++)
        for (int v = V; v < Vp; v++)
            if (!(dlogits[n * Vp + v] == 0.0)) CHECK_NEAR(dlogits[n * Vp + v], 0.0, 0.0);
}

template <class X>
void check_classifiers() {
    check_classifier<X>(1, 1, 1, 1.0);
    check_classifier<X>(3, 5, 7, 1.0);
    check_classifier<X>(3, 5, 8, 1.0);  // no whole vector
    check_classifier<X>(127, 263, 264, 1.0);
    check_classifier<X>(300, 260, 384, 1.0);
    check_classifier<X>(127, 257, 384, 1.0);
    check_classifier<X>(127, 257, 257, 5.0);
    check_classifier<X>(3, 384, 384, 1.0);
    check_classifier<X>(37, 50257, 50304, 1.0);
    check_classifier<X>(37, 50257, 50304, 5.0);
    check_classifier<X>(3, 50257, 50257, 5.0);
    check_classifier<X>(3, 257, 384, 1.0, 1);
    check_classifier<X>(1000, 257, 384, 1.0);  // several rows a block
    check_classifier<X>(265, 257, 384, 1.0);   // two, and in one three
    check_classifier<X>(300, 50257, 50304, 1.0);
    check_classifier<X>(3, 60001, 60032, 1.0);  // two rows fit no SM

    // A target outside the vocabulary, padding included, makes its row NaN. The other rows are as they should be.
    const int V = 257, Vp = 384;
    const Array<X> logits(normal<X>(4 * Vp));
    const Array<float> losses(4);
    classifier<X>(Late(), logits, losses, Array<int>(std::vector<int>{V, -1, 1000000, V - 1}), 1.f, 4, V, Vp);
    const Values got = losses.values(), dlogits = logits.values();
    CHECK(std::isnan(got[0]) && std::isnan(got[1]) && std::isnan(got[2]) && std::isfinite(got[3]));
    CHECK(std::isnan(dlogits[5]) && std::isfinite(dlogits[3 * Vp + 5]));
    CHECK_ERROR(classifier<X>(gpu(), logits, losses, nullptr, 1.f, 4, Vp + 1, Vp), "V = 385");

    // A logit that is NaN or +∞ is noticed in its row, wherever it is. −∞ is a probability of zero.
    for (int at : {0, 100, V - 1}) {
        Values broken = normal<X>(4 * Vp);
        broken[at] = NAN, broken[Vp + at] = INFINITY, broken[2 * Vp + at] = -INFINITY;
        const Array<X> broken_gpu(broken);
        classifier<X>(Late(), broken_gpu, losses, Array<int>(std::vector<int>{7, 7, 7, 7}), 1.f, 4, V, Vp);
        const Values loss = losses.values(), gradient = broken_gpu.values();
        CHECK(!std::isfinite(loss[0]) && !std::isfinite(loss[1]) && std::isfinite(loss[2]) && std::isfinite(loss[3]));
        CHECK(std::isnan(gradient[5]) && gradient[2 * Vp + at] == 0.0 && std::isfinite(gradient[3 * Vp + 5]));
    }
}
TEST(classifier_fp32) {
    check_classifiers<float>();
}
TEST(classifier_bf16) {
    check_classifiers<bf16>();
}

// ---------------------------------------------------------------------------------------------------------------------
// Reductions

TEST(reductions) {
    const Late dev;
    for (size_t n : {1, 3, 64, 1000, 1000003, 4000000}) {
        Values x = normal<float>(n, 1.0, 0.5);
        Array<float> x_gpu(x);
        const Array<float> out(1), again(1);
        for (const bool norm : {false, true}) {
            const auto run = [&](float* to) {
                const Scratch scratch = scratch_of(reduce_scratch_bytes(dev));
                norm ? global_norm(dev, to, scratch, x_gpu, n) : reduce_sum(dev, to, scratch, x_gpu, 0.25f, n);
            };
            x_gpu.set(x);
            run(out), run(again);
            double want = 0.0;
            norm ? global_norm(cpu(), &want, nullptr, x.data(), n)
                 : reduce_sum(cpu(), &want, nullptr, x.data(), 0.25, n);
            compare(format("%s of %zu", norm ? "global_norm" : "reduce_sum", n), out.values(), {want}, kFp32);
            CHECK(same_bits(out.values(), again.values()));

            for (const double broken : {double(NAN), double(INFINITY)}) {
                Values y = x;
                y[n / 2] = broken;
                x_gpu.set(y);
                run(out);
                CHECK(std::isnan(broken) ? std::isnan(out.values()[0]) : out.values()[0] == INFINITY);
            }
        }
    }
    const Array<float> one(Values{7.0}), out(1);  // nothing to add
    reduce_sum(dev, out, scratch_of(reduce_scratch_bytes(dev)), one, 1.f, 0);
    CHECK(same_bits(out.values(), {0.0}));
}

template <class X>
void check_count_nonfinite() {
    for (size_t n : {1, 1000, 300001}) {
        Values x = normal<X>(n);
        Array<X> x_gpu(x);
        const Array<double> scratch(1);
        CHECK(count_nonfinite<X>(Late(), scratch, x_gpu, n) == 0);
        x[0] = NAN;
        if (n > 1) x[n - 1] = INFINITY, x[n / 2] = -INFINITY;
        x_gpu.set(x);
        CHECK(count_nonfinite<X>(Late(), scratch, x_gpu, n) == (n > 1 ? 3 : 1));
    }
}
TEST(count_nonfinite) {
    check_count_nonfinite<float>();
    check_count_nonfinite<bf16>();
}

// ---------------------------------------------------------------------------------------------------------------------
// AdamW

// Ranges that begin and end anywhere, with a gap that must stay as it was.
constexpr size_t kAdamSize = 10007;
constexpr ParamRange kRanges[] = {
    {0, 1, false}, {1, 2050, true}, {2051, 6, false}, {2060, 7000, true}, {9060, 947, false}};
constexpr int kNumRanges = sizeof kRanges / sizeof kRanges[0];
AdamW hyper(int step, float max_norm = 1.f) {
    return {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, max_norm, step, 42};
}

// The optimizer's state. With X = bf16 the master must equal a float twin's parameters.
TEST(adamw_against_reference) {
    const Late dev;
    for (const float max_norm : {0.f, 1.f, 1000.f}) {
        Values p = normal<bf16>(kAdamSize), m(kAdamSize, 0.0), v(kAdamSize, 0.0);
        Array<float> p_gpu(p), m_gpu(m), v_gpu(v), master(p), m_bf16(m), v_bf16(v);
        Array<bf16> params(p);
        for (int step = 1; step <= 10; step++) {
            const Values g = normal<float>(kAdamSize, 3.0);
            double norm = 0.0;
            for (double x : g) norm += x * x;
            norm = static_cast<float>(std::sqrt(norm));
            const Array<float> g_gpu(g), norm_gpu(Values{norm});
            adamw_update<double>(cpu(), p.data(), nullptr, m.data(), v.data(), g.data(), &norm, kRanges, kNumRanges,
                                 hyper(step, max_norm));
            adamw_update<float>(dev, p_gpu, nullptr, m_gpu, v_gpu, g_gpu, norm_gpu, kRanges, kNumRanges,
                                hyper(step, max_norm));
            adamw_update<bf16>(dev, params, master, m_bf16, v_bf16, g_gpu, norm_gpu, kRanges, kNumRanges,
                               hyper(step, max_norm));
        }
        compare("adamw params", p_gpu.values(), p, kFp32);
        compare("adamw m", m_gpu.values(), m, kFp32);
        compare("adamw v", v_gpu.values(), v, kFp32);
        CHECK(same_bits(master.values(), p_gpu.values()));
        CHECK(same_bits(m_bf16.values(), m_gpu.values()) && same_bits(v_bf16.values(), v_gpu.values()));

        const Values exact = master.values(), stored = params.values();
        for (size_t i = 0; i < kAdamSize;
             i++) {  // one of the two bf16 neighbours: less than 2⁻⁷ of the power of two below
            const double ulp = std::ldexp(1.0, std::ilogb(exact[i]) - 7);
            if (!(std::fabs(stored[i] - exact[i]) < ulp)) CHECK_NEAR(stored[i], exact[i], ulp);
        }
    }
}

// Four ranks that each update their share write the same bits as one rank that updates all, stochastic rounding
// included.
TEST(adamw_shares) {
    const Late dev;
    const size_t piece = 1000, n = 3 * 4 * piece + 4096, own = n / 4;
    const Values start = normal<bf16>(n), g = normal<float>(n);
    const Array<float> g_gpu(g), norm(Values{30.0});
    Array<float> master(start), m(n), v(n), fp32(start), fp32_shared(start);
    Array<bf16> params(start), shared(start);
    const ParamRange all[] = {{0, 3 * 4 * piece, true}, {3 * 4 * piece, 4096, false}};
    m.set(Values(n, 0.0)), v.set(Values(n, 0.0));
    adamw_update<bf16>(dev, params, master, m, v, g_gpu, norm, all, 2, hyper(2));
    m.set(Values(n, 0.0)), v.set(Values(n, 0.0));
    adamw_update<float>(dev, fp32, nullptr, m, v, g_gpu, norm, all, 2, hyper(2));
    for (size_t r = 0; r < 4; r++) {
        const ParamRange share[] = {{r * piece, piece, true, 3, 4 * piece, r * piece},
                                    {3 * 4 * piece + r * 1024, 1024, false, 1, 4096, 9 * piece + r * 1024}};
        Values own_start(own), own_g(own);
        for (const ParamRange& range : share)
            for (size_t p = 0; p < range.pieces; p++)
                for (size_t k = 0; k < range.size; k++) {
                    own_start[range.state(p) + k] = start[range.piece(p) + k];
                    own_g[range.state(p) + k] = g[range.piece(p) + k];
                }
        Array<float> own_master(own_start), own_grads(own_g), own_m(Values(own, 0.0)), own_v(Values(own, 0.0));
        adamw_update<bf16>(dev, shared, own_master, own_m, own_v, own_grads, norm, share, 2, hyper(2));
        own_m.set(Values(own, 0.0)), own_v.set(Values(own, 0.0));
        adamw_update<float>(dev, fp32_shared, nullptr, own_m, own_v, own_grads, norm, share, 2, hyper(2));
    }
    CHECK(same_bits(shared.values(), params.values()) && same_bits(fp32_shared.values(), fp32.values()));
}

TEST(adamw_broken_norm) {
    const Late dev;
    for (const double norm : {double(NAN), double(INFINITY)}) {
        const Values p = normal<bf16>(kAdamSize), m = normal<float>(kAdamSize), v = normal<float>(kAdamSize, 0.1, 5.0);
        Array<float> master(p), m_gpu(m), v_gpu(v), fp32(p);
        Array<bf16> params(p);
        const Array<float> g(normal<float>(kAdamSize)), norm_gpu(Values{norm});
        adamw_update<bf16>(dev, params, master, m_gpu, v_gpu, g, norm_gpu, kRanges, kNumRanges, hyper(1));
        adamw_update<float>(dev, fp32, nullptr, m_gpu, v_gpu, g, norm_gpu, kRanges, kNumRanges, hyper(1));
        CHECK(same_bits(params.values(), p) && same_bits(master.values(), p) && same_bits(fp32.values(), p));
        CHECK(same_bits(m_gpu.values(), m) && same_bits(v_gpu.values(), v));
    }
}

// With lr = 0 the master stays and only the rounding acts. The mean over n draws is the master, within 4 sigma.
TEST(adamw_stochastic_rounding) {
    const Late dev;
    const size_t n = 1 << 20;
    const ParamRange all = {0, n, true};
    Array<float> master(n), m(n), v(n), g(normal<float>(n)), norm(Values{1.0});
    Array<bf16> params(n);
    const auto draw = [&](double value, int step) {
        master.set(Values(n, value)), m.set(Values(n, 0.0)), v.set(Values(n, 0.0));
        AdamW still = hyper(step);
        still.lr = 0.f;
        adamw_update<bf16>(dev, params, master, m, v, g, norm, &all, 1, still);
        return params.values();
    };
    int step = 0;
    for (const double fraction : {0.0, 1.0 / 4096, 0.25, 0.5, 0.9})
        for (const double sign : {1.0, -1.0}) {
            const double below = sign * 3.0, above = sign * (3.0 + 1.0 / 64),
                         value = float(below + fraction * (above - below));
            const double exact = (value - below) / (above - below);  // as fp32 holds it
            const Values drawn = draw(value, ++step);
            for (size_t lane = 0; lane < 4; lane++) {  // each of the elements that share a hash is counted apart
                size_t up = 0, neither = 0;
                for (size_t i = lane; i < n; i += 4) {
                    up += drawn[i] == above;
                    neither += drawn[i] != above && drawn[i] != below;
                }
                CHECK(neither == 0);
                CHECK_NEAR(up / (n / 4.0), exact, 4.0 * std::sqrt(exact * (1.0 - exact) / (n / 4.0)));
            }
        }
    const Values first = draw(3.007, 1), second = draw(3.007, 2);
    CHECK(same_bits(first, draw(3.007, 1)));
    size_t equal = 0;
    for (size_t i = 0; i < n; i++) equal += first[i] == second[i];
    CHECK(equal < n * 0.6);  // another step gives other bits, and about half agree by chance
    CHECK(std::isnan(draw(NAN, 1)[7]));
    CHECK(std::isnan(draw(INFINITY, 1)[7]));  // ∞ − 0·∞
}

TEST(adamw_errors) {
    const Late dev;
    const Array<float> x(64);
    const std::vector<ParamRange> ranges(33, {0, 1, true});
    CHECK_ERROR(adamw_update<float>(dev, x, nullptr, x, x, x, x, ranges.data(), 33, hyper(1)), "33 parameter ranges");
    CHECK_ERROR(adamw_update<float>(dev, x + 1, nullptr, x, x, x, x, ranges.data(), 1, hyper(1)), "aligned");
    CHECK_ERROR(adamw_update<float>(dev, x, nullptr, x, x, x, x, ranges.data(), 1, hyper(0)), "step 0");
    const ParamRange odd = {0, 6, true, 2, 12, 0};
    CHECK_ERROR(adamw_update<float>(dev, x, nullptr, x, x, x, x, &odd, 1, hyper(1)), "pieces of 6 elements");
}

}  // namespace

TEST_MAIN
