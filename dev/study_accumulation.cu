// A study, not a kernel of the ladder. It shows what fp16 inside flash attention's forward would buy, and where 1/l is
// better placed. HS is 64, and attention is causal.
//
//   S = Q Kᵀ                  summed by the tensor cores in fp32 or in fp16                          qk16
//   P = exp(scale·S − m)      one by one in fp32, or in pairs: ex2.approx.f16x2, .bf16x2             exp16
//       / T                   a shift of the exponent that keeps any sum of P at most 1              shift
//   O = e^{m−m'} O + P V      summed in fp32, in fp16, or in fp16 for a tile of keys, fp32 between   pv16, pv16tile
//   out = O / l               once at the end, or O normalised at every tile:                        in-loop
//                             O = (e^{m−m'} l/l') O + (P / l') V
//   registers                 those that sums in fp16 leave free, for 3 blocks an SM, not 2,         more-warps
//                             or with wgmma for 4 warpgroups on a tile of keys, not 3
//
// Each choice is a flag of a template parameter, and two kernels take all of them. One uses mma.sync, after flash_bf16
// (sm_80+), and one wgmma, after flash_bf16_sm90 (9.0). They differ from those in two points. m is the true running
// maximum, so P ≤ 1 is a fact and the sums' bounds can be relied on. And wgmma's first tile is always a whole one. What
// differs between the variants is in the small functions of the second section. The kernels are vehicles.
//
// Sums in fp16 need operands in fp16, so bf16 has only the variants of 1/l, the shift and the exponentials.
//
//   oracle     the formula in fp64 on the GPU (dev/oracle.cuh)
//   yardstick  naive in the same type on the same inputs, with S and P rounded to it and sums in fp32
//   inputs     N(0,1), q five times as large, q and k 8 and 64 times, v N(0.5,1) times 1000, and all of mean 0.5
//   figures    of out: largest error, relative L2 error, signal-to-noise ratio, the multiple of naive's L2 error, and
//              how many elements are not finite. TFLOP/s, cool (dev/bench.h)
//
// A variant's errors come first. If at N(0,1), T = 1024 its L2 error is more than 4 times naive's, or is no number, it
// is not timed and the exit code is 1. What longer sequences and other inputs do to it, overflow too, is the study's
// result.
//
// Run: ./dev/study_accumulation --help
#include <cuda_fp16.h>

#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/launch.h"
#include "dev/bench.h"
#include "dev/oracle.cuh"
#include "layers/gpu/ptx_sm90.cuh"
#include "layers/gpu/tensor_map.h"
#include "run/options.h"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // kernels have empty bodies there, and what only they use is "never referenced"
#endif

__device__ inline float to_float(__half x) {  // the fp16 one beside those of layers/gpu/vector.cuh
    return __half2float(x);
}

namespace {

constexpr int HS = 64;

// ---------------------------------------------------------------------------------------------------------------------
// Variants

enum Flags { kQk16 = 1, kPv16 = 2, kPv16Tile = 4, kInLoop = 8, kShift = 16, kExp16 = 32, kMoreWarps = 64 };

template <class X_, int F>
struct Variant {
    using X = X_;  // of q, k, v, P and out
    static constexpr bool Qk16 = F & kQk16, Pv16 = F & kPv16, Pv16Tile = F & kPv16Tile;
    static constexpr bool InLoop = F & kInLoop, Exp16 = F & kExp16, MoreWarps = F & kMoreWarps;
    // kShift is an argument of the kernel.
    static_assert(!std::is_same_v<X, bf16> || !(Qk16 || Pv16 || Pv16Tile), "sums in fp16 need operands in fp16");
    static_assert(!(Pv16 && Pv16Tile));
};

std::string name_of(int flags) {
    static const char* const kNames[] = {"qk16", "pv16", "pv16tile", "in-loop", "shift", "exp16", "more-warps"};
    std::string name;
    for (int i = 0; i < 7; i++)
        if (flags >> i & 1) name += (name.empty() ? "" : "+") + std::string(kNames[i]);
    return name.empty() ? "base" : name;
}

// ---------------------------------------------------------------------------------------------------------------------
// Pairs of 16-bit elements in a register, the lower one in bits 0–15

template <class X>
using Pair = std::conditional_t<std::is_same_v<X, bf16>, __nv_bfloat162, __half2>;

template <class X>
__device__ __forceinline__ Pair<X> as_pair(uint32_t bits) {
    Pair<X> x;
    memcpy(&x, &bits, 4);
    return x;
}
template <class P>
__device__ __forceinline__ uint32_t bits_of(P x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
template <class X>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    return std::is_same_v<X, bf16> ? pack_bf16(low, high) : pack_f16(low, high);
}
template <class X>
__device__ __forceinline__ float2 unpack(uint32_t bits) {
    if constexpr (std::is_same_v<X, bf16>)
        return __bfloat1622float2(as_pair<bf16>(bits));
    else
        return __half22float2(as_pair<__half>(bits));
}
template <class X>
__device__ __forceinline__ uint32_t exp2_pair(uint32_t x) {
    if constexpr (!std::is_same_v<X, bf16>) return exp2_approx_f16x2(x);
#if __CUDA_ARCH__ >= 900
    return exp2_approx_bf16x2(x);
#else
    const float2 two = unpack<X>(x);  // sm_80 has it for fp16 only
    return pack<X>(exp2_approx(two.x), exp2_approx(two.y));
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// The variants differ in what follows. With g = lane/4 and t = 2·(lane%4) a lane holds of a 16 × 8 tile of S, P or O
//   fp32   [0..1] = (g, t..t+1)   [2..3] = (g+8, t..t+1)          pairs   [0] = (g, t..t+1)   [1] = (g+8, t..t+1)
// P is an A operand in the same layout. r = 0, 1 below are the rows g and g + 8.

template <bool Pairs>
using Tile = std::conditional_t<Pairs, uint32_t[2], float[4]>;

// Sets row r's columns from end[r] on to −∞. Columns count from the lane's first.
template <int N>
__device__ __forceinline__ void mask(float (&s)[N][4], const int (&end)[2]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (8 * n + e % 2 >= end[e / 2]) s[n][e] = -INFINITY;
}
template <int N>
__device__ __forceinline__ void mask(uint32_t (&s)[N][2], const int (&end)[2]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (8 * n >= end[r])
                s[n][r] = 0xFC00FC00;
            else if (8 * n + 1 >= end[r])
                s[n][r] = (s[n][r] & 0xFFFF) | 0xFC000000;
        }
}

// The largest value of row r in the lane's columns.
template <int N>
__device__ __forceinline__ float lane_max(const float (&s)[N][4], int r) {
    float x0 = s[0][2 * r], x1 = s[0][2 * r + 1];
#pragma unroll
    for (int n = 1; n < N; n++) x0 = fmaxf(x0, s[n][2 * r]), x1 = fmaxf(x1, s[n][2 * r + 1]);
    return fmaxf(x0, x1);
}
template <int N>
__device__ __forceinline__ float lane_max(const uint32_t (&s)[N][2], int r) {
    __half2 x = as_pair<__half>(s[0][r]);
#pragma unroll
    for (int n = 1; n < N; n++) x = __hmax2(x, as_pair<__half>(s[n][r]));
    return fmaxf(__low2float(x), __high2float(x));
}

// A row's part of l and of its reference. P = 2^(scale_log2·S − reference), and reference = scale_log2·m + shift.
struct Softmax {
    float scale_log2, shift_log2;
    float reference[2] = {-INFINITY, -INFINITY};
    float l[2] = {0.f, 0.f};  // without in-loop this lane's columns only, summed at the end
    float alpha[2];           // what the last tile scaled l by, and the factor for O
};

// Updates the references with the tile's maxima. Every row has met a key, so that none stays −∞.
template <class V, class S>
__device__ __forceinline__ void raise_reference(Softmax& x, const S& s) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float m = lane_max(s, r);
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        float reference = fmaxf(x.reference[r], fmaf(m, x.scale_log2, x.shift_log2));
        // The reference is subtracted in fp16. Any that fp16 can represent cancels exactly between P and l.
        if (V::Qk16 && V::Exp16) reference = __half2float(__float2half_rn(reference));
        x.alpha[r] = exp2_approx(x.reference[r] - reference);
        x.reference[r] = reference;
    }
}

// Computes P of one tile and adds it to `sums`, which has a tile's shape.
template <class V>
__device__ __forceinline__ void exponentials(Tile<V::Exp16>& p, const Tile<V::Qk16>& s, Tile<V::Exp16>& sums,
                                             const Softmax& x) {
    using X = typename V::X;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if constexpr (V::Qk16 && V::Exp16) {
            const __half2 exponent =
                __hfma2(as_pair<X>(s[r]), __float2half2_rn(x.scale_log2), __float2half2_rn(-x.reference[r]));
            p[r] = exp2_approx_f16x2(bits_of(exponent));
        } else {
            float2 exponent;
            if constexpr (V::Qk16)
                exponent = unpack<X>(s[r]);
            else
                exponent = make_float2(s[2 * r], s[2 * r + 1]);
            exponent.x = fmaf(exponent.x, x.scale_log2, -x.reference[r]);
            exponent.y = fmaf(exponent.y, x.scale_log2, -x.reference[r]);
            if constexpr (V::Exp16)
                p[r] = exp2_pair<X>(pack<X>(exponent.x, exponent.y));
            else
                p[2 * r] = exp2_approx(exponent.x), p[2 * r + 1] = exp2_approx(exponent.y);
        }
        if constexpr (V::Exp16)
            sums[r] = bits_of(__hadd2(as_pair<X>(sums[r]), as_pair<X>(p[r])));
        else
            sums[2 * r] += p[2 * r], sums[2 * r + 1] += p[2 * r + 1];
    }
}

// Adds the tile's sums to l. In-loop l is the whole row's, alpha becomes the factor of a normalised O, and the result
// is the factor of P.
template <class V>
__device__ __forceinline__ float2 add_sums(Softmax& x, const Tile<V::Exp16>& sums) {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum;
        if constexpr (V::Exp16) {
            const float2 two = unpack<typename V::X>(sums[r]);
            sum = two.x + two.y;
        } else {
            sum = sums[2 * r] + sums[2 * r + 1];
        }
        if constexpr (V::InLoop) {
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
        }
        const float old = x.alpha[r] * x.l[r];
        x.l[r] = old + sum;
        inverse[r] = V::InLoop ? __fdividef(1.f, x.l[r]) : 1.f;
        if constexpr (V::InLoop) x.alpha[r] = old * inverse[r];
    }
    return make_float2(inverse[0], inverse[1]);
}

// Scales rows g and g + 8 of tiles: O by alpha, P by 1/l.
template <class X, int N>
__device__ __forceinline__ void scale_rows(float (&x)[N][4], float factor0, float factor1) {
#pragma unroll
    for (int n = 0; n < N; n++) x[n][0] *= factor0, x[n][1] *= factor0, x[n][2] *= factor1, x[n][3] *= factor1;
}
template <class X, int N>
__device__ __forceinline__ void scale_rows(uint32_t (&x)[N][2], float factor0, float factor1) {
    const Pair<X> factors[2] = {as_pair<X>(pack<X>(factor0, factor0)), as_pair<X>(pack<X>(factor1, factor1))};
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) x[n][r] = bits_of(__hmul2(as_pair<X>(x[n][r]), factors[r]));
}

// Scales O before a tile is added. A normalised O is always scaled, otherwise only if a row's maximum rose.
template <class V, class O>
__device__ __forceinline__ void rescale(O& o, const Softmax& x) {
    if (V::InLoop || __any_sync(~0u, !(x.alpha[0] == 1.f && x.alpha[1] == 1.f)))
        scale_rows<typename V::X>(o, x.alpha[0], x.alpha[1]);
}

// Adds a tile's product that was summed in fp16 to o.
template <int N>
__device__ __forceinline__ void add(float (&o)[N][4], const uint32_t (&product)[N][2]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float2 two = unpack<__half>(product[n][r]);
            o[n][2 * r] += two.x, o[n][2 * r + 1] += two.y;
        }
}

// a = columns [16·kk, 16·kk + 16) of P as an A operand.
template <class X, int N>
__device__ __forceinline__ void operand(uint32_t (&a)[4], const float (&p)[N][4], int kk) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = pack<X>(p[2 * kk + i / 2][i % 2 * 2], p[2 * kk + i / 2][i % 2 * 2 + 1]);
}
template <class X, int N>
__device__ __forceinline__ void operand(uint32_t (&a)[4], const uint32_t (&p)[N][2], int kk) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = p[2 * kk + i / 2][i % 2];
}

// finished() gives row r of O in out's form. finish() gives O's last factor, and lse.
template <class X>
__device__ __forceinline__ uint32_t finished(const float (&o)[4], int r, float factor) {
    return pack<X>(o[2 * r] * factor, o[2 * r + 1] * factor);
}
template <class X>
__device__ __forceinline__ uint32_t finished(const uint32_t (&o)[2], int r, float factor) {
    const float2 two = unpack<X>(o[r]);
    return pack<X>(two.x * factor, two.y * factor);
}
template <class V>
__device__ __forceinline__ void finish(const Softmax& x, float (&factor)[2], float (&lse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float l = x.l[r];
        if constexpr (!V::InLoop) {
            l += __shfl_xor_sync(~0u, l, 1);
            l += __shfl_xor_sync(~0u, l, 2);
        }
        factor[r] = V::InLoop ? 1.f : __fdividef(1.f, l);
        lse[r] = (x.reference[r] + __log2f(l)) * static_cast<float>(M_LN2);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// What a launch covers. Its items are tiles of queries. Heads come in groups whose keys and values stay in L2, longest
// tiles first.

struct Problem {
    int T, NH, heads, tiles, group;  // heads = B·NH
    float scale_log2, shift_log2;    // shift_log2 = log2(T), or 0
    float* lse;
    float one = 1.f;  // see to_operands
};
struct Work {
    int b, h, tile;  // tile 0 is the longest
};
__device__ __forceinline__ Work work_item(const Problem& p, int item) {
    const int first = item / (p.group * p.tiles) * p.group, size = min(p.group, p.heads - first);
    const int i = item - first * p.tiles, bh = first + i % size;
    return {bh / p.NH, bh % p.NH, i / size};
}
Problem problem(const AttentionShape& s, float* lse, int flags, int Br) {
    constexpr size_t kGroupBytes = 32 << 20;
    Problem p{s.T, s.NH, s.B * s.NH, ceil_div(s.T, Br), 0, 0, 0, lse};
    p.group = static_cast<int>(std::clamp<size_t>(kGroupBytes / (4 * size_t(s.T) * HS), 1, p.heads));
    p.scale_log2 = static_cast<float>(s.resolved_scale() * M_LOG2E);
    p.shift_log2 = flags & kShift ? std::log2(static_cast<float>(s.T)) : 0.f;
    if (size_t(p.tiles) * p.heads > INT_MAX / 2) throw Error("study_accumulation: more tiles than an int counts");
    return p;
}

// ---------------------------------------------------------------------------------------------------------------------
// mma.sync: a block of 4 warps with 32 queries each. K and V come through a 2-stage ring by cp.async (see
// flash_bf16.cu)

struct MmaTiles {
    static constexpr int M = 2, Threads = 128, Br = 4 * 16 * M, Bc = 64, KvBytes = Bc * HS * 2;
    static constexpr int Smem = Br * HS * 2 + 4 * KvBytes;
};
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
    return row * HS * 2 + ((chunk ^ (row & 7)) << 4);
}
template <int Rows, class X>
__device__ __forceinline__ void load_tile(uint32_t tile, const X* head, size_t token, int row0, int end) {
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const X* src = head + (row0 + row) * token + chunk * 8;
#pragma unroll
    for (int i = 0; i < Rows; i += MmaTiles::Threads / 8, src += MmaTiles::Threads / 8 * token)
        cp_async_16(tile + swizzled(row + i, chunk), src, row0 + row + i < end);
}
// The lane's address for ldmatrix of a 16×16 block, as an A operand or transposed as a B operand. The second function's
// is for a B operand whose columns are the tile's rows.
__device__ __forceinline__ uint32_t block16(uint32_t tile, int row, int col) {
    const int lane = threadIdx.x % 32;
    return ((tile + swizzled(lane % 16, lane / 16)) ^ (col * 2)) + row * HS * 2;
}
__device__ __forceinline__ uint32_t block16_b(uint32_t tile, int row, int col) {
    const int lane = threadIdx.x % 32;
    return ((tile + swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2)) ^ (col * 2)) + row * HS * 2;
}
template <class X, class C>
__device__ __forceinline__ void mma(C& c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<X, bf16>)
        mma_m16n8k16_bf16(c, a, b0, b1);
    else
        mma_m16n8k16_f16(c, a, b0, b1);
}

template <class X>
struct MmaArgs {
    Problem p;
    Heads<const X> q, k, v;
    Heads<X> out;
};

template <class V>
__global__ __launch_bounds__(MmaTiles::Threads,
                             V::MoreWarps ? 3
                                          : 2) void mma_kernel(const __grid_constant__ MmaArgs<typename V::X> args) {
#if __CUDA_ARCH__ >= 800
    using X = typename V::X;
    constexpr int M = MmaTiles::M, Br = MmaTiles::Br, Bc = MmaTiles::Bc, KvBytes = MmaTiles::KvBytes;
    const Problem& p = args.p;
    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t q_smem = smem_address(smem), k_smem = q_smem + Br * HS * 2, v_smem = k_smem + 2 * KvBytes;

    const Work w = work_item(p, blockIdx.x);
    const int q0 = (p.tiles - 1 - w.tile) * Br, warp_row = threadIdx.x / 32 * 16 * M, lane = threadIdx.x % 32;
    const int first_q = q0 + warp_row, last_q = first_q + 16 * M - 1;  // of the warp
    const int k_tiles = (min(q0 + Br, p.T) + Bc - 1) / Bc;
    auto head = [&](const auto& x) { return x.ptr + w.b * x.batch + w.h * HS; };

    auto load_kv = [&](int j) {
        load_tile<Bc>(k_smem + (j & 1) * KvBytes, head(args.k), args.k.token, j * Bc, p.T);
        load_tile<Bc>(v_smem + (j & 1) * KvBytes, head(args.v), args.v.token, j * Bc, p.T);
    };
    load_tile<Br>(q_smem, head(args.q), args.q.token, q0, p.T);
    cp_async_commit();
    load_kv(k_tiles - 1);
    cp_async_commit();

    uint32_t q_regs[HS / 16][M][4];
    Tile<V::Pv16> o[M][HS / 8] = {};
    Softmax rows[M];
#pragma unroll
    for (int i = 0; i < M; i++) rows[i].scale_log2 = p.scale_log2, rows[i].shift_log2 = p.shift_log2;
    cp_async_wait<1>();
    __syncthreads();
#pragma unroll
    for (int kk = 0; kk < HS / 16; kk++)
#pragma unroll
        for (int i = 0; i < M; i++) ldmatrix_x4(q_regs[kk][i], block16(q_smem + warp_row * HS * 2, 16 * i, kk * 16));

    auto step = [&](int j, auto masked) {
        const uint32_t k_tile = k_smem + (j & 1) * KvBytes, v_tile = v_smem + (j & 1) * KvBytes;
        Tile<V::Qk16> s[M][Bc / 8] = {};
        Tile<V::Exp16> probabilities[M][Bc / 8], sums[M] = {};
#pragma unroll
        for (int kk = 0; kk < HS / 16; kk++)
#pragma unroll
            for (int n = 0; n < Bc / 8; n += 2) {
                uint32_t b[4];
                ldmatrix_x4(b, block16_b(k_tile, 8 * n, kk * 16));
#pragma unroll
                for (int i = 0; i < M; i++) {
                    mma<X>(s[i][n], q_regs[kk][i], b[0], b[1]);
                    mma<X>(s[i][n + 1], q_regs[kk][i], b[2], b[3]);
                }
            }
#pragma unroll
        for (int i = 0; i < M; i++) {
            if constexpr (decltype(masked)::value) {
                const int row = first_q + 16 * i + lane / 4, column = j * Bc + lane % 4 * 2;
                mask(s[i], {min(p.T, row + 1) - column, min(p.T, row + 9) - column});
            }
            raise_reference<V>(rows[i], s[i]);
            if constexpr (!V::InLoop) rescale<V>(o[i], rows[i]);
        }
        auto exponentials_of = [&](int kk) {
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int n = 2 * kk; n < 2 * kk + 2; n++)
                    exponentials<V>(probabilities[i][n], s[i][n], sums[i], rows[i]);
        };
        if constexpr (V::InLoop) {  // nothing may be multiplied before the tile's sums are known
#pragma unroll
            for (int kk = 0; kk < Bc / 16; kk++) exponentials_of(kk);
#pragma unroll
            for (int i = 0; i < M; i++) {
                const float2 inverse = add_sums<V>(rows[i], sums[i]);
                rescale<V>(o[i], rows[i]);
                scale_rows<X>(probabilities[i], inverse.x, inverse.y);
            }
        }
        auto multiply_pv = [&](auto& c) {
#pragma unroll
            for (int kk = 0; kk < Bc / 16; kk++) {  // a k-step's MMAs beside the next one's exponentials
                if constexpr (!V::InLoop) exponentials_of(kk);
                uint32_t a[M][4];
#pragma unroll
                for (int i = 0; i < M; i++) operand<X>(a[i], probabilities[i], kk);
#pragma unroll
                for (int n = 0; n < HS / 8; n += 2) {
                    uint32_t b[4];
                    ldmatrix_x4_trans(b, block16(v_tile, 16 * kk, 8 * n));
#pragma unroll
                    for (int i = 0; i < M; i++) {
                        mma<X>(c[i][n], a[i], b[0], b[1]);
                        mma<X>(c[i][n + 1], a[i], b[2], b[3]);
                    }
                }
            }
        };
        if constexpr (V::Pv16Tile) {
            Tile<true> product[M][HS / 8] = {};
            multiply_pv(product);
#pragma unroll
            for (int i = 0; i < M; i++) add(o[i], product[i]);
        } else {
            multiply_pv(o);
        }
        if constexpr (!V::InLoop)
#pragma unroll
            for (int i = 0; i < M; i++) add_sums<V>(rows[i], sums[i]);
    };

    for (int j = k_tiles - 1; j >= 0; j--) {
        cp_async_wait<0>();
        __syncthreads();  // tile j is there for all, and all have left tile j + 1, whose stage the next load takes
        if (j > 0) load_kv(j - 1);
        cp_async_commit();
        if (j * Bc > last_q) continue;
        if (j * Bc + Bc > p.T || j * Bc + Bc - 1 > first_q)
            step(j, std::true_type{});
        else
            step(j, std::false_type{});
    }

    __syncwarp();
#pragma unroll
    for (int i = 0; i < M; i++) {  // rows go through the warp's own rows of Q, so that whole rows are written together
        float factor[2], lse[2];
        finish<V>(rows[i], factor, lse);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = warp_row + 16 * i + 8 * r + lane / 4;
            if (lane % 4 == 0 && q0 + row < p.T) p.lse[(size_t(w.b) * p.NH + w.h) * p.T + q0 + row] = lse[r];
#pragma unroll
            for (int n = 0; n < HS / 8; n++)
                *reinterpret_cast<uint32_t*>(smem + swizzled(row, n) + lane % 4 * 4) =
                    finished<X>(o[i][n], r, factor[r]);
        }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * M; i += 4) {
        const int row = warp_row + i + lane / 8, chunk = lane % 8;
        if (q0 + row < p.T)
            *reinterpret_cast<uint4*>(head(args.out) + (q0 + row) * args.out.token + chunk * 8) =
                *reinterpret_cast<const uint4*>(smem + swizzled(row, chunk));
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// wgmma: W consumer warpgroups of 64 queries and a producer on TMA. Blocks are persistent and take tiles from a
// counter. The barriers and the ring are those of flash_bf16_sm90.cu.

template <bool MoreWarps>
struct WgmmaTiles {
    static constexpr int W = MoreWarps ? 4 : 3, Br = 64 * W, Bc = 128, Threads = 128 * (1 + W), Stages = 4;
    static constexpr int ConsumerRegisters = MoreWarps ? 112 : 160;
    static constexpr int QBytes = 64 * HS * 2, KvBytes = Bc * HS * 2;
    static constexpr int Out = 2 * W * QBytes, K = Out + W * QBytes, V = K + Stages * KvBytes;
    static constexpr int Barriers = V + Stages * KvBytes, NextItem = Barriers + 4 * (W + Stages) * 8;
    static constexpr int Smem = NextItem + 2 * 4;
    static_assert(Smem <= 227 * 1024);
};

struct WgmmaArgs {
    Problem p;
    CUtensorMap q, k, v, out;
};
__device__ int next_item;  // the last block to ask sets it back to 0. One launch runs at a time

template <int Stages>
struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == Stages) stage = 0, phase ^= 1;
    }
};

template <class V>
__global__ __launch_bounds__(WgmmaTiles<V::MoreWarps>::Threads,
                             1) void wgmma_kernel(const __grid_constant__ WgmmaArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using X = typename V::X;
    using Tiles = WgmmaTiles<V::MoreWarps>;
    constexpr int W = Tiles::W, Br = Tiles::Br, Bc = Tiles::Bc, Stages = Tiles::Stages;
    const Problem& p = args.p;
    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t base = smem_address(smem), barriers = base + Tiles::Barriers;
    auto q_full = [&](int slot, int w) { return barriers + (slot * W + w) * 8; };
    auto q_empty = [&](int slot, int w) { return barriers + (2 * W + slot * W + w) * 8; };
    auto k_full = [&](int stage) { return barriers + (4 * W + stage) * 8; };
    auto v_full = [&](int stage) { return barriers + (4 * W + Stages + stage) * 8; };
    auto k_empty = [&](int stage) { return barriers + (4 * W + 2 * Stages + stage) * 8; };
    auto v_empty = [&](int stage) { return barriers + (4 * W + 3 * Stages + stage) * 8; };
    auto q_smem = [&](int slot, int w) { return base + (slot * W + w) * Tiles::QBytes; };
    auto k_smem = [&](int stage) { return base + Tiles::K + stage * Tiles::KvBytes; };
    auto v_smem = [&](int stage) { return base + Tiles::V + stage * Tiles::KvBytes; };
    int* const item_smem = reinterpret_cast<int*>(smem + Tiles::NextItem);  // [2], one per slot of Q. −1 if no more
    // Rows are counted from the last query. A remainder makes the shortest tile shorter, and its first warpgroups may
    // have q < 0.
    auto first_query = [&](const Work& w) { return (p.T + 63) / 64 * 64 - (w.tile + 1) * Br; };

    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * W; i++) {
            mbarrier_init(q_full(0, i), 1);
            mbarrier_init(q_empty(0, i), 4);
        }
        for (int i = 0; i < Stages; i++) {
            mbarrier_init(k_full(i), 1);
            mbarrier_init(v_full(i), 1);
            mbarrier_init(k_empty(i), 4 * W);
            mbarrier_init(v_empty(i), 4 * W);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup == 0) {  // the producer
        setmaxnreg_dec<32>();
        if (threadIdx.x == 0) {
            const int items = p.tiles * p.heads;
            Ring<Stages> ring;
            Work w{};
            auto load = [&](uint32_t to, const CUtensorMap& map, uint32_t barrier, int rows, int row0) {
                mbarrier_arrive_expect(barrier, rows * HS * 2);  // publishes item_smem too
                tma_load_4d(to, &map, barrier, 0, w.h, row0, w.b);
            };
            for (int i = 0, item = blockIdx.x;; i++) {
                for (int wg = 0; wg < W; wg++) mbarrier_wait(q_empty(i % 2, wg), (i / 2 & 1) ^ 1);
                item_smem[i % 2] = item < items ? item : -1;
                if (item >= items) {
                    for (int wg = 0; wg < W; wg++) mbarrier_arrive(q_full(i % 2, wg));
                    break;
                }
                w = work_item(p, item);
                const int taken = atomicAdd(&next_item, 1);
                if (taken == items - 1) next_item = 0;  // every block has asked for the last time
                item = gridDim.x + taken;
                const int q0 = first_query(w), k_tiles = (min(q0 + Br, p.T) + Bc - 1) / Bc;
                for (int wg = 0; wg < W; wg++)
                    load(q_smem(i % 2, wg), args.q, q_full(i % 2, wg), 64, max(0, q0 + 64 * wg));
                for (int j = k_tiles - 1; j >= 0; j--, ring.advance()) {
                    mbarrier_wait(k_empty(ring.stage), ring.phase ^ 1);
                    load(k_smem(ring.stage), args.k, k_full(ring.stage), Bc, j * Bc);
                    mbarrier_wait(v_empty(ring.stage), ring.phase ^ 1);
                    load(v_smem(ring.stage), args.v, v_full(ring.stage), Bc, j * Bc);
                }
            }
        }
    } else {
        setmaxnreg_inc<Tiles::ConsumerRegisters>();
        const int wg = warpgroup - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        auto release = [&](uint32_t barrier) {
            if (lane == 0) mbarrier_arrive(barrier);
        };
        Ring<Stages> ring;
        for (int i = 0;; i++) {
            mbarrier_wait(q_full(i % 2, wg), i / 2 & 1);
            const int item = __shfl_sync(~0u, item_smem[i % 2], 0);
            if (item < 0) break;
            const Work w = work_item(p, item);
            const int q0 = first_query(w), first_q = q0 + 64 * wg;
            const int k_tiles = (min(q0 + Br, p.T) + Bc - 1) / Bc;
            // my_tiles are those that some query here sees. Only the first is masked, because all queries see the
            // others whole.
            const int my_tiles = first_q < 0 ? 0 : (min(first_q + 64, p.T) + Bc - 1) / Bc;

            Tile<V::Qk16> s[Bc / 8];
            Tile<V::Exp16> probabilities[Bc / 8];
            Tile<V::Pv16> o[HS / 8] = {};
            Tile<true> product[HS / 8];  // for pv16tile, of the current tile
            uint32_t p_regs[Bc / 16][4];
            Softmax rows{p.scale_log2, p.shift_log2};
            float2 inverse;

            const uint64_t q_descriptor = wgmma_descriptor(q_smem(i % 2, wg));
            auto multiply_qk = [&](int stage) {
                const uint64_t k_descriptor = wgmma_descriptor(k_smem(stage));
                wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < HS / 16; kk++) {
                    const uint64_t a = wgmma_advance(q_descriptor, kk * 32), b = wgmma_advance(k_descriptor, kk * 32);
                    if constexpr (std::is_same_v<X, bf16>)
                        wgmma_ss(s, a, b, kk > 0);
                    else
                        wgmma_ss_f16(s, a, b, kk > 0);
                }
                wgmma_commit();
            };
            auto multiply_pv = [&](auto& c, int stage) {
                const uint64_t v_descriptor = wgmma_descriptor(v_smem(stage), Bc * 128);
                wgmma_hold(p_regs);
                wgmma_hold(c);
                wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < Bc / 16; kk++) {
                    const uint64_t b = wgmma_advance(v_descriptor, kk * 16 * 128);
                    if constexpr (std::is_same_v<X, bf16>)
                        wgmma_rs<true>(c, p_regs[kk], b, true);
                    else
                        wgmma_rs_f16(c, p_regs[kk], b, !V::Pv16Tile || kk > 0);
                }
                wgmma_commit();
            };
            auto start_pv = [&](int stage) {
                if constexpr (V::Pv16Tile)
                    multiply_pv(product, stage);
                else
                    multiply_pv(o, stage);
            };
            auto finish_pv = [&] {
                wgmma_wait<0>();
                if constexpr (V::Pv16Tile) {
                    wgmma_hold(product);
                    add(o, product);
                } else {
                    wgmma_hold(o);
                }
            };
            auto softmax = [&](int j, auto masked) {
                if constexpr (decltype(masked)::value) {
                    const int row = first_q + 16 * warp + lane / 4, column = j * Bc + lane % 4 * 2;
                    mask(s, {min(p.T, row + 1) - column, min(p.T, row + 9) - column});
                }
                raise_reference<V>(rows, s);
                Tile<V::Exp16> sums[1] = {};
#pragma unroll
                for (int n = 0; n < Bc / 8; n++) exponentials<V>(probabilities[n], s[n], sums[0], rows);
                wgmma_hold(probabilities);
                wgmma_hold(sums);
                inverse = add_sums<V>(rows, sums[0]);
            };
            auto to_operands = [&] {
                if constexpr (V::InLoop)
                    scale_rows<X>(probabilities, inverse.x, inverse.y);
                else if constexpr (V::Exp16)
                    // P is an operand already, but in separate registers. The compiler would save the copy by making P
                    // in p_regs, which belong to the tensor cores until finish_pv, and then serialize the wgmmas
                    // (C7513). So the copy is a product by a 1 that the compiler does not know.
                    scale_rows<X>(probabilities, p.one, p.one);
#pragma unroll
                for (int kk = 0; kk < Bc / 16; kk++) operand<X>(p_regs[kk], probabilities, kk);
            };
            // Computes S of tile j beside O += P V of the tile before it, whose stage `ring` names.
            auto step = [&](int j) {
                const Ring<Stages> previous = ring;
                ring.advance();
                mbarrier_wait(k_full(ring.stage), ring.phase);
                multiply_qk(ring.stage);
                start_pv(previous.stage);
                wgmma_wait<1>();
                wgmma_hold(s);
                softmax(j, std::false_type{});
                // This wait comes here, because it is a loop. So the compiler does not move the exponentials past the
                // wait below. They are to run beside O += P V.
                mbarrier_wait(v_full(ring.stage), ring.phase);
                finish_pv();
                rescale<V>(o, rows);
                release(k_empty(ring.stage));
                release(v_empty(previous.stage));
                to_operands();
            };

            int j = k_tiles - 1;
            for (; j >= my_tiles; j--, ring.advance()) {  // beyond this warpgroup's queries
                mbarrier_wait(k_full(ring.stage), ring.phase);
                release(k_empty(ring.stage));
                mbarrier_wait(v_full(ring.stage), ring.phase);
                release(v_empty(ring.stage));
            }
            if (my_tiles > 0) {
                mbarrier_wait(k_full(ring.stage), ring.phase);
                multiply_qk(ring.stage);
                wgmma_wait<0>();
                wgmma_hold(s);
                release(k_empty(ring.stage));
                softmax(j, std::true_type{});
                to_operands();
                mbarrier_wait(v_full(ring.stage), ring.phase);
                for (j--; j >= 0; j--) step(j);
                release(q_empty(i % 2, wg));
                start_pv(ring.stage);
                finish_pv();
                release(v_empty(ring.stage));
                ring.advance();
            } else {
                release(q_empty(i % 2, wg));
            }

            float factor[2], lse[2];
            finish<V>(rows, factor, lse);
            const int row = first_q + 16 * warp + lane / 4;
            float* lse_rows = p.lse + (size_t(w.b) * p.NH + w.h) * p.T;
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (lane % 4 == 0 && first_q >= 0 && row + 8 * r < p.T) lse_rows[row + 8 * r] = lse[r];
            const bool leader = threadIdx.x % 128 == 0;
            if (leader) bulk_wait_read<0>();
            named_barrier_sync(1 + wg, 128);  // the last store has left out_smem
            const uint32_t out_smem = base + Tiles::Out + wg * Tiles::QBytes;
#pragma unroll
            for (int n = 0; n < HS / 8; n += 2) {
                uint32_t packed[4];
#pragma unroll
                for (int k = 0; k < 4; k++) packed[k] = finished<X>(o[n + k / 2], k % 2, factor[k % 2]);
                stmatrix_x4(out_smem + swizzled(16 * warp + lane % 16, n + lane / 16), packed);
            }
            fence_proxy_async();
            named_barrier_sync(1 + wg, 128);
            if (leader && first_q >= 0) {
                tma_store_4d(&args.out, out_smem, 0, w.h, first_q, w.b);
                bulk_commit();
            }
        }
        if (threadIdx.x % 128 == 0) bulk_wait_read<0>();  // shared memory must outlive the reads
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

template <class X, int F>
void forward_mma(const Cuda& dev, X* out, float* lse, const X* qkv, const AttentionShape& s) {
    const auto kernel = mma_kernel<Variant<X, F & ~kShift>>;
    const MmaArgs<X> args{problem(s, lse, F, MmaTiles::Br), packed(qkv, s, 0), packed(qkv, s, 1), packed(qkv, s, 2),
                          contiguous(out, s.T, s.NH, HS)};
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MmaTiles::Smem));
    kernel<<<args.p.tiles * args.p.heads, MmaTiles::Threads, MmaTiles::Smem, dev.stream>>>(args);
    LAUNCH_CHECK("mma_kernel");
}

template <class X, int F>
void forward_wgmma(const Cuda& dev, X* out, float* lse, const X* qkv, const AttentionShape& s) {
    using V = Variant<X, F & ~kShift>;
    using Tiles = WgmmaTiles<V::MoreWarps>;
    const auto kernel = wgmma_kernel<V>;
    WgmmaArgs args{problem(s, lse, F, Tiles::Br), {}, {}, {}, {}};
    // TMA moves bits, so fp16 is as good to it as bf16.
    const auto map = [&](const char* name, const Heads<const X>& x, int rows) {
        return tensor_map(name, Heads<const bf16>{reinterpret_cast<const bf16*>(x.ptr), x.batch, x.token}, s.B, s.T,
                          s.NH, HS, rows);
    };
    args.q = map("q", packed(qkv, s, 0), 64);
    args.k = map("k", packed(qkv, s, 1), Tiles::Bc);
    args.v = map("v", packed(qkv, s, 2), Tiles::Bc);
    args.out = map("out", contiguous<const X>(out, s.T, s.NH, HS), 64);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiles::Smem));
    kernel<<<std::min(args.p.tiles * args.p.heads, dev.num_sms), Tiles::Threads, Tiles::Smem, dev.stream>>>(args);
    LAUNCH_CHECK("wgmma_kernel");
}

template <class X>
struct Subject {
    int flags;
    void (*forward[2])(const Cuda&, X* out, float* lse, const X* qkv, const AttentionShape&);  // mma.sync, wgmma
};
const char* const kVehicles[] = {"mma.sync", "wgmma"};

template <class X, int... F>
std::vector<Subject<X>> subjects_of() {
    return {{F, {forward_mma<X, F>, forward_wgmma<X, F>}}...};
}
template <class X>
std::vector<Subject<X>> subjects() {  // each choice alone, then together
    constexpr int kAll16 = kQk16 | kPv16 | kExp16;
    if constexpr (std::is_same_v<X, bf16>)
        return subjects_of<X, 0, kInLoop, kShift, kExp16, kInLoop | kExp16>();
    else
        return subjects_of<X, 0, kQk16, kPv16, kPv16Tile, kExp16, kInLoop, kShift, kQk16 | kPv16, kQk16 | kExp16,
                           kPv16 | kInLoop, kPv16 | kShift, kAll16, kAll16 | kMoreWarps, kAll16 | kInLoop,
                           kAll16 | kShift, kQk16 | kPv16Tile | kExp16>();
}

// ---------------------------------------------------------------------------------------------------------------------
// The yardstick, with S and P rounded to X and sums in fp32

template <class X>
__global__ void softmax_kernel(X* s, int T) {  // a block owns a row
    X* row = s + size_t(blockIdx.x) * T;
    const int seen = blockIdx.x + 1;
    double m = -INFINITY, l = 0;
    for (int j = threadIdx.x; j < seen; j += kThreads) m = Max::of(m, to_float(row[j]));
    m = block_reduce<Max>(m);
    for (int j = threadIdx.x; j < seen; j += kThreads) l += expf(to_float(row[j]) - m);
    l = block_reduce<Sum>(l);
    for (int j = threadIdx.x; j < T; j += kThreads)
        row[j] = static_cast<X>(j < seen ? expf(to_float(row[j]) - m) / static_cast<float>(l) : 0.f);
}

template <class X>
void naive(const Cuda& dev, X* out, const X* qkv, const AttentionShape& s) {
    const cudaDataType type = std::is_same_v<X, bf16> ? CUDA_R_16BF : CUDA_R_16F;
    const int T = s.T, C = s.NH * HS;
    const DeviceMemory memory = poisoned(dev, size_t(T) * T * sizeof(X));
    X* const att = static_cast<X*>(memory.get());
    const float scale = s.resolved_scale(), one = 1.f, zero = 0.f;
    for (int i = 0; i < s.B * s.NH; i++) {
        const X* q = qkv + size_t(i / s.NH) * T * 3 * C + i % s.NH * HS;
        X* o = out + size_t(i / s.NH) * T * C + i % s.NH * HS;
        // cuBLAS counts by columns, so it computes Sᵀ = K Qᵀ and Oᵀ = Vᵀ Pᵀ.
        CUBLAS_CHECK(cublasGemmEx(dev.blas, CUBLAS_OP_T, CUBLAS_OP_N, T, T, HS, &scale, q + C, type, 3 * C, q, type,
                                  3 * C, &zero, att, type, T, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
        softmax_kernel<<<T, kThreads, 0, dev.stream>>>(att, T);
        LAUNCH_CHECK("softmax_kernel");
        CUBLAS_CHECK(cublasGemmEx(dev.blas, CUBLAS_OP_N, CUBLAS_OP_N, HS, T, T, &one, q + 2 * C, type, 3 * C, att, type,
                                  T, &zero, o, type, C, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    }
    dev.sync();
}

// ---------------------------------------------------------------------------------------------------------------------
// Inputs and errors

struct Input {
    const char *name, *text;
    float factor[3], shift[3];  // of q, k, v, which are (N(0,1) + shift)·factor
};
const Input kInputs[] = {
    {"normal", "N(0,1)", {1, 1, 1}, {}},
    {"large_q", "q x5", {5, 1, 1}, {}},
    {"large_qk", "q, k x8", {8, 8, 1}, {}},
    {"huge_qk", "q, k x64", {64, 64, 1}, {}},
    {"large_v", "v N(0.5,1) x1000", {1, 1, 1000}, {0, 0, 0.5f}},
    {"shifted", "mean +0.5", {1, 1, 1}, {0.5f, 0.5f, 0.5f}},
};

template <class X>
__global__ void shape_inputs_kernel(X* qkv, size_t n, int C, Input input) {
    const size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x;
    const int part = i / C % 3;
    if (i < n) qkv[i] = static_cast<X>((to_float(qkv[i]) + input.shift[part]) * input.factor[part]);
}

template <class X>
__global__ void count_not_finite_kernel(unsigned* count, const X* x, size_t n) {
    const size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n && !isfinite(to_float(x[i]))) atomicAdd(count, 1u);
}

// What a kernel wrote, and how far off it is.
template <class X>
struct Result {
    DeviceMemory out, lse, sums, count;
    ErrorSums error{}, lse_error{};
    unsigned not_finite = 0;

    Result(const Cuda& dev, const AttentionShape& s)
        : out(poisoned(dev, elements(s) * sizeof(X))),
          lse(poisoned(dev, elements(s) / HS * sizeof(float))),
          sums(device_memory(dev, 2 * sizeof(ErrorSums))),
          count(device_memory(dev, sizeof(unsigned))) {
        dev.zero(sums.get(), 2 * sizeof(ErrorSums));
        dev.zero(count.get(), sizeof(unsigned));
    }
    static size_t elements(const AttentionShape& s) { return size_t(s.B) * s.T * s.NH * HS; }
    X* out_ptr() const { return static_cast<X*>(out.get()); }
    float* lse_ptr() const { return static_cast<float*>(lse.get()); }

    // Adds head h of sequence b, whose reference the oracle has computed.
    void add(const Cuda& dev, const Oracle& oracle, const AttentionShape& s, int b, int h) {
        const int C = s.NH * HS;
        ErrorSums* const to = static_cast<ErrorSums*>(sums.get());
        const auto blocks = [&](int n) { return std::min(blocks_of(size_t(s.T) * n), 4u * dev.num_sms); };
        error_kernel<<<blocks(HS), kThreads, 0, dev.stream>>>(to, out_ptr() + size_t(b) * s.T * C + h * HS, C,
                                                              oracle.results[Out], s.T, HS);
        error_kernel<<<blocks(1), kThreads, 0, dev.stream>>>(to + 1, lse_ptr() + (size_t(b) * s.NH + h) * s.T, 1,
                                                             oracle.results[Lse], s.T, 1);
        LAUNCH_CHECK("error_kernel");
    }
    void fetch(const Cuda& dev, const AttentionShape& s) {
        count_not_finite_kernel<<<blocks_of(elements(s)), kThreads, 0, dev.stream>>>(
            static_cast<unsigned*>(count.get()), out_ptr(), elements(s));
        LAUNCH_CHECK("count_not_finite_kernel");
        dev.download(&error, sums.get(), sizeof error);
        dev.download(&lse_error, static_cast<ErrorSums*>(sums.get()) + 1, sizeof lse_error);
        dev.download(&not_finite, count.get(), sizeof not_finite);
    }
    double l2() const { return std::sqrt(error.error2 / error.value2); }
};

// ---------------------------------------------------------------------------------------------------------------------
// The study

constexpr int kValidated = 1024;  // the T of the check
constexpr double kAllowed = 4;    // the multiple of naive's L2 error that must not be passed

struct Options {
    std::string vehicle = "all", dtype = "all", variant = "all", shapes = "32x1024,4x4096,2x16384", out;
    std::string lengths = "2x1024,1x4096,1x16384";
    bool quick = false, json = false, help = false;
};

Options parse(int argc, char** argv) {
    Options o;
    std::vector<Option> table = {
        {"--vehicle", "", Option::Choice, &o.vehicle, "which kernel", "mma.sync|wgmma|all"},
        {"--dtype", "", Option::Choice, &o.dtype, "of q, k, v, P and out", "fp16|bf16|all"},
        {"--variant", "", Option::String, &o.variant, "base, pv16, qk16+pv16, … or all", ""},
        {"--shapes", "", Option::String, &o.shapes, "BxT,BxT,… to time, with 12 heads", ""},
        {"--lengths", "", Option::String, &o.lengths, "BxT,BxT,… for errors, with 2 heads", ""},
        {"--quick", "", Option::Flag, &o.quick, "errors at T = 1024, no times", ""},
        {"--json", "", Option::Flag, &o.json, "append rows to dev/results/<gpu>/accumulation.jsonl", ""},
        {"--out", "", Option::String, &o.out, "append rows to this file", ""},
    };
    if (parse_options(argc, argv, table)) {
        std::fputs(
            options_help("study_accumulation", "fp16 in flash attention's forward: speed, errors, overflow.", table)
                .c_str(),
            stdout);
        o.help = true;
        return o;
    }
    if (o.quick) o.lengths = "2x1024", o.shapes.clear();
    bool validates = false;
    for (const auto& [B, T] : parse_shapes(o.lengths)) validates |= T == kValidated;
    if (!validates) throw UsageError(format("--lengths: no T = %d, at which variants are validated", kValidated));
    if (!o.shapes.empty()) parse_shapes(o.shapes);
    return o;
}

template <class X>
struct Study {
    const Cuda& dev;
    const Options& options;
    Log& log;
    struct Chosen {
        Subject<X> subject;
        int vehicle;
        bool wrong = false;
    };
    std::vector<Chosen> subjects = {};
    int wrong = 0;

    static constexpr const char* dtype = std::is_same_v<X, bf16> ? "bf16" : "fp16";

    Row row_of(const char* kernel, const std::string& variant, const AttentionShape& s) const {
        Row row = result_row(dev, "accumulation");
        row.add("kernel", kernel).add("variant", variant).add("pass", "fwd").add("dtype", dtype).add("B", s.B);
        return row.add("T", s.T).add("NH", s.NH).add("HS", HS).add("causal", true);
    }

    void choose() {
        for (int vehicle = 0; vehicle < 2; vehicle++)
            for (const Subject<X>& x : ::subjects<X>()) {
                const bool runs = vehicle ? dev.sm90a : dev.sm >= 80;
                if (runs && (options.vehicle == "all" || options.vehicle == kVehicles[vehicle]) &&
                    (options.variant == "all" || options.variant == name_of(x.flags)))
                    subjects.push_back({x, vehicle});
            }
    }

    void errors(const AttentionShape& s, const Input& input) {
        const size_t n = Result<X>::elements(s);
        const DeviceMemory memory = device_memory(dev, 3 * n * sizeof(X));
        X* const qkv = static_cast<X*>(memory.get());
        fill_normal(dev, qkv, 3 * n, s.T);
        shape_inputs_kernel<<<blocks_of(3 * n), kThreads, 0, dev.stream>>>(qkv, 3 * n, s.NH * HS, input);
        LAUNCH_CHECK("shape_inputs_kernel");

        std::vector<Result<X>> results;
        results.emplace_back(dev, s);
        naive(dev, results[0].out_ptr(), qkv, s);
        for (const auto& [x, vehicle, _] : subjects) {
            results.emplace_back(dev, s);
            x.forward[vehicle](dev, results.back().out_ptr(), results.back().lse_ptr(), qkv, s);
        }
        Oracle oracle(dev, s.T, HS);
        for (int b = 0; b < s.B; b++)
            for (int h = 0; h < s.NH; h++) {
                gather(dev, oracle, qkv, qkv, s, b, h);
                oracle.run(true, s.resolved_scale());
                for (Result<X>& r : results) r.add(dev, oracle, s, b, h);
            }
        results[0].fetch(dev, s);
        std::printf("\n%s B%d T%d NH%d, %s: max |out| %.3g, naive's L2 error %.2e\n", dtype, s.B, s.T, s.NH, input.text,
                    results[0].error.largest, results[0].l2());
        for (size_t i = 0; i < subjects.size(); i++) {
            auto& [x, vehicle, is_wrong] = subjects[i];
            Result<X>& r = results[i + 1];
            r.fetch(dev, s);
            const double ratio = r.l2() / results[0].l2();
            const bool ok = !(&input == &kInputs[0] && s.T == kValidated) || ratio <= kAllowed;
            wrong += !ok;
            is_wrong |= !ok;
            std::printf("  %-8s %-26s max %9.2e  L2 %9.2e  %6.1f dB  x%-6.2f lse %8.1e", kVehicles[vehicle],
                        name_of(x.flags).c_str(), r.error.largest_error, r.l2(), -20 * std::log10(r.l2()), ratio,
                        r.lse_error.largest_error);
            if (r.not_finite) std::printf("  %u of %zu not finite", r.not_finite, n);
            std::printf("%s\n", ok ? "" : "  WRONG");
            Row row = row_of(kVehicles[vehicle], name_of(x.flags), s);
            row.add("input", input.name).add("max_error", r.error.largest_error).add("relative_l2", r.l2());
            row.add("snr_db", -20 * std::log10(r.l2())).add("ratio_l2", ratio);
            row.add("max_lse_error", r.lse_error.largest_error);
            row.add("not_finite", static_cast<long long>(r.not_finite)).add("elements", static_cast<long long>(n));
            log.write(row);
        }
        std::fflush(stdout);
    }

    void time(const AttentionShape& s) {
        const size_t n = Result<X>::elements(s);
        const DeviceMemory memory = device_memory(dev, 3 * n * sizeof(X));
        X* const qkv = static_cast<X*>(memory.get());
        fill_normal(dev, qkv, 3 * n, 1);
        const Result<X> result(dev, s);
        std::printf("\n%s B%d T%d NH%d: TFLOP/s cool\n", dtype, s.B, s.T, s.NH);
        const auto timed = [&](const char* kernel, const std::string& variant, const std::function<void(int)>& launch) {
            const double ms = cool_ms(dev, launch), rate = 4. * s.B * s.NH * s.T * s.T * HS / 2 / ms * 1e-9;
            std::printf("  %-15s %-26s %8.4f ms  %6.1f\n", kernel, variant.c_str(), ms, rate);
            std::fflush(stdout);
            log.write(row_of(kernel, variant, s).add("ms", ms).add("tflops", rate));
        };
        for (const auto& [x, vehicle, is_wrong] : subjects)
            if (!is_wrong && !(x.flags & kShift))  // the shift is an argument, so the kernel is the same
                timed(kVehicles[vehicle], name_of(x.flags), [&, forward = x.forward[vehicle]](int) {
                    forward(dev, result.out_ptr(), result.lse_ptr(), qkv, s);
                });
        if constexpr (std::is_same_v<X, bf16>)  // the vehicles are to be judged beside the trainer's kernels
            for (const AttentionKernel<bf16>* k : {&flash_bf16, &flash_bf16_sm90})
                if (k->runs_on(dev) && options.variant == "all")
                    timed(k->name, "trainer",
                          [&](int) { k->forward(dev, result.out_ptr(), result.lse_ptr(), nullptr, nullptr, qkv, s); });
    }

    void run() {
        if (options.dtype != "all" && options.dtype != dtype) return;
        choose();
        if (subjects.empty()) return;
        for (const auto& [B, T] : parse_shapes(options.lengths))
            for (const Input& input : kInputs) errors({B, T, 2, HS}, input);
        if (options.shapes.empty()) return;
        for (const auto& [B, T] : parse_shapes(options.shapes)) time({B, T, 12, HS});
    }
};

int run(const Options& options) {
    std::string why;
    if (Cuda::count(&why) == 0) throw Error("study_accumulation needs a GPU: " + why);
    Cuda dev;
    Log log = results_log(dev, "accumulation", options.out, options.json);
    std::printf("%s: fp16 in flash attention's forward, causal, HS %d\n", dev.name.c_str(), HS);
    Study<__half> fp16{dev, options, log};
    Study<bf16> bf16s{dev, options, log};
    fp16.run();
    bf16s.run();
    if (fp16.subjects.empty() && bf16s.subjects.empty())
        throw Error("study_accumulation: nothing to run: no such --variant, or none for this GPU");
    if (const int wrong = fp16.wrong + bf16s.wrong) {
        std::fprintf(stderr, "study_accumulation: %d variants with more than %g times naive's error\n", wrong,
                     kAllowed);
        return 1;
    }
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    return run_program("study_accumulation", [&] {
        const Options options = parse(argc, argv);
        return options.help ? 0 : run(options);
    });
}
