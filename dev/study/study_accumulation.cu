// What do fp16 sums inside flash attention's forward gain, and what do they cost? This is a study,
// not a kernel of the ladder. Attention is causal, HS is 64, and q, k, v and out are fp16.
//
//   S = Q Kᵀ               summed by the tensor cores in fp32 or in fp16            qk16
//   P = exp(scale·S − m)   one by one in fp32, or in pairs by ex2.approx.f16x2      exp16
//   O = e^{m−m'} O + P V   summed in fp32, in fp16, or in fp16 for a tile of keys,  pv16, pv16tile
//                          fp32 between
//   registers              those that sums in fp16 leave free, for 3 blocks an SM,  more-warps
//                          not 2
//
// Each choice is a flag of the kernel's template parameter. Operands are fp16, because tensor cores
// sum no others in fp16. Otherwise the kernel differs from flash_bf16 (sm_80+) in three points:
//
//   m    is the true running maximum, so P ≤ 1. (flash_bf16's m may lag behind it, so that P can be
//        2⁸, and sums in fp16 would overflow that much sooner. qk16 and exp16 together round m to
//        fp16, so there P may exceed 1 by that rounding.)
//   l    is in fp32, but a lane first sums its P over the tile in P's type: in fp16 with exp16
//   out  goes from registers straight to memory, not by way of shared memory
//
//   oracle     the formula in fp64 on the GPU (dev/common/oracle.cuh)
//   yardstick  naive in fp16 on the same inputs, with S and P rounded to fp16, products summed in
//              fp32 and the softmax's l in fp64
//   inputs     N(0,1), q five times as large, q and k 8 and 64 times, v N(0.5,1) times 1000, and
//              all of mean 0.5
//   figures    of out: largest error, relative L2 error, signal-to-noise ratio, the multiple of
//              naive's L2 error, and how many elements are not finite. TFLOP/s, cool
//              (dev/common/bench.h)
//
// A variant's errors come first. If at N(0,1), T = 1024 its L2 error is more than 4 times naive's,
// or is no number, it is not timed and the exit code is 1. What longer sequences and other inputs
// do to it, overflow too, is the study's result.
//
// Run: ./dev/study_accumulation --help
#include <cuda_fp16.h>

#include <cmath>
#include <cstdio>
#include <list>
#include <set>
#include <string>
#include <vector>

#include "attention/mma_bf16.cuh"
#include "dev/common/attention_bench.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
// the kernel has an empty body there, and what only it uses is "never referenced"
#pragma nv_diag_suppress 177
#endif

__device__ inline float to_float(__half x) {  // as those of cuda/vector.cuh
    return __half2float(x);
}

namespace {

constexpr int HS = 64;

enum Flags { kQk16 = 1, kPv16 = 2, kPv16Tile = 4, kExp16 = 8, kMoreWarps = 16 };

// -------------------------------------------------------------------------------------------------
// Two neighbouring columns, in fp32 or in fp16. With g = lane/4 and t = 2·(lane%4) a lane holds
// columns t and t + 1 of two rows of a 16 × 8 tile of S, P or O: [0] of row g, [1] of row g + 8. P
// is an A operand in the same layout.

// In fp32, with the operators that CUDA has for __half2.
struct Float2 : float2 {
    __device__ friend Float2 operator+(Float2 a, Float2 b) { return {a.x + b.x, a.y + b.y}; }
    __device__ friend Float2 operator*(Float2 a, Float2 b) { return {a.x * b.x, a.y * b.y}; }
    // NOLINTNEXTLINE(bugprone-reserved-identifier): CUDA's name for the same of __half2
    __device__ friend Float2 __hmax2(Float2 a, Float2 b) {
        return {fmaxf(a.x, b.x), fmaxf(a.y, b.y)};
    }
};
template <bool InFp16>
using Pair = std::conditional_t<InFp16, __half2, Float2>;

// x as another type of pair, rounded if that is narrower.
template <class To, class From>
__device__ __forceinline__ To as(From x) {
    if constexpr (std::is_same_v<To, From>)
        return x;
    else if constexpr (std::is_same_v<To, Float2>)
        return {__low2float(x), __high2float(x)};
    else
        return __floats2half2_rn(x.x, x.y);
}
// From a __half2 to the register that the PTX wrappers take, and back.
template <class To, class From>
__device__ __forceinline__ To bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    return reinterpret_cast<To&>(x);
}
// N tiles of pairs as the registers of an MMA's accumulators: of a tile, four in fp32 or two in
// fp16.
template <class P, int N>
__device__ __forceinline__ auto& registers(P (&x)[N][2]) {
    using Registers = std::conditional_t<std::is_same_v<P, Float2>, float[4], uint32_t[2]>;
    return reinterpret_cast<Registers(&)[N]>(x);
}
__device__ __forceinline__ Float2 exp2_of(Float2 x) {
    return {exp2_approx(x.x), exp2_approx(x.y)};
}
__device__ __forceinline__ __half2 exp2_of(const __half2& x) {
    return bits<__half2>(exp2_approx_f16x2(bits<uint32_t>(x)));
}

// c[0] and c[1] (16 × 8) += a b, with accumulators in fp32 or in fp16.
__device__ __forceinline__ void mma(float (*c)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    mma_m16n8k16_f16(c[0], a, b[0], b[1]);
    mma_m16n8k16_f16(c[1], a, b[2], b[3]);
}
__device__ __forceinline__ void mma(uint32_t (*c)[2], const uint32_t (&a)[4],
                                    const uint32_t (&b)[4]) {
    mma_m16n8k16_f16_acc16(c[0], a, b[0], b[1]);
    mma_m16n8k16_f16_acc16(c[1], a, b[2], b[3]);
}

// -------------------------------------------------------------------------------------------------
// The kernel. A block has 4 warps of 32 queries each. K and V come through a 2-stage ring by
// cp.async (see flash_bf16.cu)

constexpr int M = 2;  // 16-row tiles of queries per warp
constexpr int kBlockThreads = 128;
constexpr int Br = kBlockThreads / 32 * 16 * M;
constexpr int Bc = 64;
constexpr int QBytes = Br * HS * 2;
constexpr int KvBytes = Bc * HS * 2;         // a stage of K or of V
constexpr int kSmem = QBytes + 4 * KvBytes;  // two stages of each

// Which of the two stages holds tile j of keys.
__device__ __forceinline__ int stage_index(int j) {
    return j & 1;
}

constexpr int blocks_per_sm(int flags) {
    return (flags & kMoreWarps) != 0 ? 3 : 2;
}

using Args = ForwardArgs<__half, __half>;

template <int F>
__global__ void __launch_bounds__(kBlockThreads, blocks_per_sm(F))
    mma_kernel(const __grid_constant__ Args args) {
#if __CUDA_ARCH__ >= 800
    constexpr bool Qk16 = F & kQk16;
    constexpr bool Pv16 = F & kPv16;
    constexpr bool Pv16Tile = F & kPv16Tile;
    constexpr bool Exp16 = F & kExp16;
    using S = Pair<Qk16>;
    using P = Pair<Exp16>;
    using O = Pair<Pv16>;
    extern __shared__ __align__(256) unsigned char smem[];
    const auto& p = args.p;
    const uint32_t q_smem = smem_address(smem);
    const uint32_t k_smem = q_smem + QBytes;
    const uint32_t v_smem = k_smem + 2 * KvBytes;
    const WorkTile w = work_tile(p, TileOrder::last_to_first);
    const int q0 = w.tile * Br;
    const int warp_row = threadIdx.x / 32 * 16 * M;
    const int lane = threadIdx.x % 32;
    const int first_q = q0 + warp_row;
    const int last_q = first_q + 16 * M - 1;  // of the warp
    const int k_tiles = (min(q0 + Br, p.Tq) + Bc - 1) / Bc;

    // a copy need not know fp16 from bf16
    auto head = [&](const auto& x) { return reinterpret_cast<const bf16*>(w.head<HS>(x)); };
    auto load_kv = [&](int j) {
        const uint32_t stage = stage_index(j) * KvBytes;
        load_tile<HS, Bc, kBlockThreads>(k_smem + stage, head(p.k), p.k.token_stride, j * Bc, p.Tq);
        load_tile<HS, Bc, kBlockThreads>(v_smem + stage, head(p.v), p.v.token_stride, j * Bc, p.Tq);
    };
    load_tile<HS, Br, kBlockThreads>(q_smem, head(p.q), p.q.token_stride, q0, p.Tq);
    cp_async_commit();
    load_kv(k_tiles - 1);
    cp_async_commit();

    // Of rows g and g + 8 of each 16 queries: P = 2^(scale_log2·S − reference), where
    // reference = scale_log2·m.
    uint32_t q_regs[HS / 16][M][4];
    O o[M][HS / 8][2] = {};
    float reference[M][2];
    float l[M][2] = {};  // l is of this lane's columns until the end
    for (int i = 0; i < M; i++)
        reference[i][0] = reference[i][1] = -INFINITY;
    cp_async_wait<1>();
    __syncthreads();
    for (int kk = 0; kk < HS / 16; kk++)
        load_a<HS>(q_regs[kk], q_smem + warp_row * HS * 2, kk * 16);

    // S and P of tile j of keys, and O += P V. `masked` says whether some query does not see all.
    auto step = [&](int j, auto masked) {
        const uint32_t k_tile = k_smem + stage_index(j) * KvBytes;
        const uint32_t v_tile = v_smem + stage_index(j) * KvBytes;
        uint32_t b[4];
        S s[M][Bc / 8][2] = {};
        for (int kk = 0; kk < HS / 16; kk++)
            for (int n = 0; n < Bc / 8; n += 2) {
                ldmatrix_x4(b, block16_b<HS>(k_tile, 8 * n, kk * 16));
                for (int i = 0; i < M; i++)
                    mma(registers(s[i]) + n, q_regs[kk][i], b);
            }

        float alpha[M][2];  // what the tile scales l and O by
        P sums[M][2] = {};  // P's over the tile, in its own type
        for (int i = 0; i < M; i++) {
            for (int r = 0; r < 2; r++) {
                // keys that the query does not see become −∞
                if constexpr (decltype(masked)::value) {
                    const S lowest = as<S>(Float2{-INFINITY, -INFINITY});
                    const int query = first_q + 16 * i + 8 * r + lane / 4;
                    const int first_key = j * Bc + (lane % 4) * 2;  // of this lane's columns
                    const int end = min(p.Tq, query + 1) - first_key;
                    for (int n = 0; n < Bc / 8; n++) {
                        if (8 * n >= end)
                            s[i][n][r].x = lowest.x;
                        if (8 * n + 1 >= end)
                            s[i][n][r].y = lowest.y;
                    }
                }
                S largest = s[i][0][r];  // of even and of odd columns
                for (int n = 1; n < Bc / 8; n++)
                    largest = __hmax2(largest, s[i][n][r]);
                const float m = quad_max(fmaxf(as<Float2>(largest).x, as<Float2>(largest).y));

                // Finite unless S overflows, because every row sees the tile's first key: a tile
                // that starts after first_q, a multiple of 32, starts after last_q, too, and is
                // skipped.
                float raised = fmaxf(reference[i][r], m * p.scale_log2);
                // Here fp16 subtracts the reference, so it has to be one that fp16 can represent.
                // Any near the maximum will do: O and l have the same factor.
                if (Qk16 && Exp16)
                    raised = __half2float(__float2half_rn(raised));
                alpha[i][r] = exp2_approx(reference[i][r] - raised);
                reference[i][r] = raised;
            }
            // some row's maximum rose
            if (__any_sync(~0u, !(alpha[i][0] == 1.f && alpha[i][1] == 1.f)))
                for (int n = 0; n < HS / 8; n++)
                    for (int r = 0; r < 2; r++)
                        o[i][n][r] = o[i][n][r] * as<O>(Float2{alpha[i][r], alpha[i][r]});
        }

        [[maybe_unused]] __half2 product[M][HS / 8][2] = {};  // for pv16tile, P V of the tile
        // the MMAs of a k-step overlap the exponentials of the next
        for (int kk = 0; kk < Bc / 16; kk++) {
            uint32_t a[M][4];  // columns [16·kk, 16·kk + 16) of P
            for (int i = 0; i < M; i++)
                for (int e = 0; e < 4; e++) {
                    // register e of the A operand: row g or g + 8, in the first or second 8 columns
                    const int n = 2 * kk + e / 2;
                    const int r = e % 2;
                    const float minus = -reference[i][r];
                    P x;
                    if constexpr (Qk16 && Exp16) {
                        x = exp2_of(__hfma2(s[i][n][r], __float2half2_rn(p.scale_log2),
                                            __float2half2_rn(minus)));
                    } else {
                        const Float2 y = as<Float2>(s[i][n][r]);
                        x = exp2_of(as<P>(Float2{fmaf(y.x, p.scale_log2, minus),
                                                 fmaf(y.y, p.scale_log2, minus)}));
                    }
                    sums[i][r] = sums[i][r] + x;
                    a[i][e] = bits<uint32_t>(as<__half2>(x));
                }
            for (int n = 0; n < HS / 8; n += 2) {
                ldmatrix_x4_trans(b, block16<HS>(v_tile, 16 * kk, 8 * n));
                for (int i = 0; i < M; i++)
                    if constexpr (Pv16Tile)
                        mma(registers(product[i]) + n, a[i], b);
                    else
                        mma(registers(o[i]) + n, a[i], b);
            }
        }
        for (int i = 0; i < M; i++)
            for (int r = 0; r < 2; r++) {
                if constexpr (Pv16Tile)
                    for (int n = 0; n < HS / 8; n++)
                        o[i][n][r] = o[i][n][r] + as<O>(product[i][n][r]);
                const Float2 sum = as<Float2>(sums[i][r]);
                l[i][r] = alpha[i][r] * l[i][r] + (sum.x + sum.y);
            }
    };

    for (int j = k_tiles - 1; j >= 0; j--) {
        cp_async_wait<0>();
        // tile j is there for all, and all have left tile j + 1, whose stage the next load takes
        __syncthreads();
        if (j > 0)
            load_kv(j - 1);
        cp_async_commit();
        if (j * Bc > last_q)
            continue;
        if (j * Bc + Bc > p.Tq || j * Bc + Bc - 1 > first_q)
            step(j, std::true_type{});
        else
            step(j, std::false_type{});
    }

    for (int i = 0; i < M; i++)
        for (int r = 0; r < 2; r++) {
            const int query = first_q + 16 * i + 8 * r + lane / 4;
            const float sum = quad_sum(l[i][r]);
            const float factor = __fdividef(1.f, sum);
            if (query >= p.Tq)
                continue;
            if (lane % 4 == 0)
                args.lse.ptr[w.bh * args.lse.head_stride + query] =
                    (reference[i][r] + __log2f(sum)) * static_cast<float>(M_LN2);
            auto* out =
                reinterpret_cast<__half2*>(w.head<HS>(args.out) + query * args.out.token_stride);
            for (int n = 0; n < HS / 8; n++)
                out[4 * n + lane % 4] =
                    as<__half2>(as<Float2>(o[i][n][r]) * Float2{factor, factor});
        }
#endif
}

template <int F>
void forward(const Cuda& dev, const AttentionForward<__half>& c) {
    const Args args{.p = problem(c), .out = c.out, .lse = c.lse};
    launch(dev,
           {.name = "mma_kernel",
            .HS = HS,
            .tiles = ceil_div(c.s.Tq, Br),
            .streamed_rows = c.s.Tq,
            .threads = kBlockThreads,
            .smem = kSmem},
           mma_kernel<F>, args);
}

// -------------------------------------------------------------------------------------------------
// Naive, the yardstick. P takes the place of S in att

__global__ void softmax_kernel(__half* s, int T) {  // a block owns a row
    __half* row = s + size_t(blockIdx.x) * T;
    const int seen = blockIdx.x + 1;
    double m = -INFINITY;
    double l = 0;
    for (int j = threadIdx.x; j < seen; j += kThreads)
        m = Max::of(m, to_float(row[j]));
    m = block_reduce<Max>(m);
    for (int j = threadIdx.x; j < seen; j += kThreads)
        l += expf(to_float(row[j]) - m);
    l = block_reduce<Sum>(l);
    for (int j = threadIdx.x; j < T; j += kThreads)
        row[j] = static_cast<__half>(j < seen ? expf(to_float(row[j]) - m) / static_cast<float>(l)
                                              : 0.f);
}

void naive(const Cuda& dev, const AttentionForward<__half>& c) {
    const cudaDataType type = CUDA_R_16F;
    const int T = c.s.Tq;
    const int in = c.q.token_stride;
    const int out = c.out.token_stride;
    const float scale = c.s.resolved_scale();
    const float one = 1.f;
    const float zero = 0.f;
    for (int b = 0; b < c.s.B; b++)
        for (int h = 0; h < c.s.NH; h++) {
            const __half* q = c.q.row(b, 0, h, HS);
            const __half* k = c.k.row(b, 0, h, HS);
            const __half* v = c.v.row(b, 0, h, HS);
            // cuBLAS counts by columns, so it computes Sᵀ = K Qᵀ and Oᵀ = Vᵀ Pᵀ.
            CUBLAS_CHECK(cublasGemmEx(dev.blas, CUBLAS_OP_T, CUBLAS_OP_N, T, T, HS, &scale, k, type,
                                      in, q, type, in, &zero, c.att, type, T, CUBLAS_COMPUTE_32F,
                                      CUBLAS_GEMM_DEFAULT));
            softmax_kernel<<<T, kThreads, 0, dev.stream>>>(c.att, T);
            LAUNCH_CHECK("softmax_kernel");
            CUBLAS_CHECK(cublasGemmEx(dev.blas, CUBLAS_OP_N, CUBLAS_OP_N, HS, T, T, &one, v, type,
                                      in, c.att, type, T, &zero, c.out.row(b, 0, h, HS), type, out,
                                      CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
        }
}

// -------------------------------------------------------------------------------------------------
// The study

template <int F>
AttentionKernel<__half> variant(const char* name) {
    return {.name = name, .min_sm = 80, .flash = true, .unchecked = {.forward = forward<F>}};
}
const AttentionKernel<__half> kKernels[] = {
    {.name = "naive",
     .min_sm = 80,
     .flash = false,
     .supports = {.any_head_size = true},
     .saved_bytes = [](const AttentionShape& s) { return sizeof(__half) * s.Tq * s.Tk; },
     .unchecked = {.forward = naive}},
    variant<0>("base"),
    variant<kQk16>("qk16"),
    variant<kPv16>("pv16"),
    variant<kPv16Tile>("pv16tile"),
    variant<kExp16>("exp16"),
    variant<kQk16 | kPv16>("qk16+pv16"),
    variant<kQk16 | kExp16>("qk16+exp16"),
    variant<kQk16 | kPv16 | kExp16>("qk16+pv16+exp16"),
    variant<kQk16 | kPv16 | kExp16 | kMoreWarps>("qk16+pv16+exp16+more-warps"),
    variant<kQk16 | kPv16Tile | kExp16>("qk16+pv16tile+exp16"),
};

// Of q, k and v, because there is no backward.
const Distribution kInputs[] = {
    {.name = "normal", .text = "N(0,1)"},
    {.name = "large_q", .text = "q x5", .factor = {5, 1, 1}},
    {.name = "large_qk", .text = "q, k x8", .factor = {8, 8, 1}},
    {.name = "huge_qk", .text = "q, k x64", .factor = {64, 64, 1}},
    {.name = "large_v", .text = "v N(0.5,1) x1000", .factor = {1, 1, 1000}, .shift = {0, 0, 0.5f}},
    {.name = "shifted", .text = "mean +0.5", .factor = {1, 1, 1}, .shift = {0.5f, 0.5f, 0.5f}},
};

// On normal inputs at this T, an L2 error may be at most kAllowed times naive's.
constexpr int kValidated = 1024;
constexpr double kAllowed = 4;

struct Study {
    Cuda& dev;
    Log& log;
    std::set<std::string> wrong = {};  // variants

    Row row_of(const char* variant, const AttentionShape& s) const {
        Row row = result_row(dev, "accumulation");
        row.add("kernel", "mma.sync");
        row.add("variant", variant);
        row.add("pass", "fwd");
        row.add("dtype", "fp16");
        row.add("B", s.B);
        row.add("T", s.Tq);
        row.add("NH", s.NH);
        row.add("HS", HS);
        row.add("causal", true);
        return row;
    }

    void errors(const AttentionShape& s, const Distribution& input) {
        std::vector<Subject<__half>> subjects;
        for (const AttentionKernel<__half>& kernel : kKernels)
            subjects.push_back({.name = kernel.name, .kernel = &kernel, .tf32 = false});
        const std::list<Result<__half>> results = results_on(dev, subjects, s, input);
        const Errors& naive = results.front().errors;
        std::printf("\nB%d T%d NH%d, %s: max |out| %.3g, naive's L2 error %.2e\n", s.B, s.Tq, s.NH,
                    input.text, naive.largest_value(Out), naive.relative_l2(Out));
        for (auto result = std::next(results.begin()); result != results.end(); result++) {
            const Errors& e = result->errors;
            std::vector<__half> out(s.rows() * HS);
            dev.download(out.data(), result->run.out, out.size() * sizeof(__half));
            const long long elements = out.size();
            const long long finite =
                std::count_if(out.begin(), out.end(), [](float x) { return std::isfinite(x); });
            const double ratio = e.relative_l2(Out) / naive.relative_l2(Out);
            const bool validated = std::strcmp(input.name, "normal") == 0 && s.Tq == kValidated;
            const bool ok = !validated || ratio <= kAllowed;
            if (!ok)
                wrong.insert(result->name);
            std::printf("  %-26s max %9.2e  L2 %9.2e  %6.1f dB  x%-6.2f lse %8.1e", result->name,
                        e.max(Out), e.relative_l2(Out), e.snr_db(Out), ratio, e.max(Lse));
            if (finite < elements)
                std::printf("  %lld of %lld not finite", elements - finite, elements);
            std::printf("%s\n", ok ? "" : "  WRONG");

            Row row = row_of(result->name, s);
            row.add("input", input.name);
            row.add("max_error", e.max(Out));
            row.add("relative_l2", e.relative_l2(Out));
            row.add("snr_db", e.snr_db(Out));
            row.add("ratio_l2", ratio);
            row.add("max_lse_error", e.max(Lse));
            row.add("not_finite", elements - finite);
            row.add("elements", elements);
            log.write(row);
        }
        std::fflush(stdout);
    }

    void time(const AttentionShape& s) const {
        const size_t n = 3 * s.rows() * HS;
        const Poisoned<__half> qkv(dev, n);
        fill_normal(dev, qkv.ptr(), n, 1);
        std::printf("\nB%d T%d NH%d: TFLOP/s cool\n", s.B, s.Tq, s.NH);
        for (const AttentionKernel<__half>& kernel : kKernels) {
            if (!kernel.flash || wrong.count(kernel.name))
                continue;
            const KernelRun<__half> run(dev, kernel, s);
            const double ms = cool_ms(dev, [&](int) { run.forward(dev, qkv); });
            const double rate = 4. * s.B * s.NH * s.Tq * s.Tk * HS / 2 / ms * 1e-9;
            std::printf("  %-26s %8.4f ms  %6.1f\n", kernel.name, ms, rate);
            std::fflush(stdout);
            log.write(row_of(kernel.name, s).add("ms", ms).add("tflops", rate));
        }
    }
};

}  // namespace

int main(int argc, char** argv) {
    Output output;
    bool quick = false;
    const std::vector<Option> table = {
        {"--quick", "", Option::Flag, &quick, "measure only the errors at T = 1024"}};
    const char* const about =
        "Measures what fp16 in flash attention's forward pass would gain and cost: speed, errors, "
        "overflow.";
    return bench_main(
        argc, argv, "study_accumulation", about, "accumulation.jsonl", output, table, [&] {
            Cuda dev;
            if (!kKernels[0].runs_on(dev))
                throw Error(
                    "there is nothing to run: fp16 sums need compute capability 8.0 or later");
            Log log = results_log(dev, "accumulation", output);
            std::printf("%s: fp16 in flash attention's forward, causal, HS %d\n", dev.name.c_str(),
                        HS);
            Study study{.dev = dev, .log = log};
            for (const auto& [B, T] : parse_shapes(quick ? "2x1024" : "2x1024,1x4096,1x16384"))
                for (const Distribution& input : kInputs)
                    study.errors({.B = B, .Tq = T, .Tk = T, .NH = 2, .HS = HS}, input);
            if (!quick)
                for (const auto& [B, T] : parse_shapes("32x1024,4x4096,2x16384"))
                    study.time({.B = B, .Tq = T, .Tk = T, .NH = 12, .HS = HS});
            if (study.wrong.empty())
                return 0;
            std::fprintf(stderr,
                         "study_accumulation: %zu variants have more than %g times naive's error\n",
                         study.wrong.size(), kAllowed);
            return 1;
        });
}
