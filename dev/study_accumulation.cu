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
// (sm_80+), and one wgmma, after flash_bf16_sm90 (9.0). They differ from those in three points. m is the true running
// maximum, so P ≤ 1 is a fact and the sums' bounds can be relied on. wgmma's first tile is always a whole one. And out
// is written straight from registers. The kernels are vehicles. What a variant changes stands in Variant and Rows.
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

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/mma_bf16.cuh"
#include "dev/bench.h"
#include "dev/oracle.cuh"
#include "layers/gpu/ptx_sm90.cuh"
#include "layers/gpu/tensor_map.h"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // kernels have empty bodies there, and what only they use is "never referenced"
#endif

__device__ inline float to_float(__half x) {  // the fp16 one beside those of layers/gpu/vector.cuh
    return __half2float(x);
}

extern __shared__ __align__(1024) unsigned char smem[];

namespace {

constexpr int HS = 64;

// ---------------------------------------------------------------------------------------------------------------------
// Variants. With g = lane/4 and t = 2·(lane%4) a lane holds of a 16 × 8 tile of S, P or O two neighbouring columns of
// two rows: [0] = (g, t..t+1), [1] = (g+8, t..t+1). They are a Float2, or a pair of 16-bit elements in one register.
// P is an A operand in the same layout. r = 0, 1 below are the rows g and g + 8.

enum Flags { kQk16 = 1, kPv16 = 2, kPv16Tile = 4, kInLoop = 8, kShift = 16, kExp16 = 32, kMoreWarps = 64 };

std::string name_of(int flags) {
    std::string name;
    for (const char* flag : {"qk16", "pv16", "pv16tile", "in-loop", "shift", "exp16", "more-warps"}) {
        if (flags & 1) name += (name.empty() ? "" : "+") + std::string(flag);
        flags >>= 1;
    }
    return name.empty() ? "base" : name;
}

// Two columns in fp32, with the operators that CUDA has for __half2 and __nv_bfloat162.
struct Float2 : float2 {
    __device__ friend Float2 operator+(Float2 a, Float2 b) { return {a.x + b.x, a.y + b.y}; }
    __device__ friend Float2 operator*(Float2 a, Float2 b) { return {a.x * b.x, a.y * b.y}; }
    __device__ friend Float2 __hmax2(Float2 a, Float2 b) { return {fmaxf(a.x, b.x), fmaxf(a.y, b.y)}; }
};

template <class X_, int F>  // kShift is an argument of the kernels
struct Variant {
    using X = X_;  // of q, k, v and out
    using Pair = std::conditional_t<std::is_same_v<X, bf16>, __nv_bfloat162, __half2>;
    static constexpr bool Qk16 = F & kQk16, Pv16 = F & kPv16, Pv16Tile = F & kPv16Tile;
    static constexpr bool InLoop = F & kInLoop, Exp16 = F & kExp16, MoreWarps = F & kMoreWarps;
    using S = std::conditional_t<Qk16, Pair, Float2>;
    using P = std::conditional_t<Exp16, Pair, Float2>;
    using O = std::conditional_t<Pv16, Pair, Float2>;
    static_assert(!std::is_same_v<X, bf16> || !(Qk16 || Pv16 || Pv16Tile), "sums in fp16 need operands in fp16");
    static_assert(!(Pv16 && Pv16Tile));
};

// x as another type of two columns, rounded if that is narrower.
template <class To, class From>
__device__ __forceinline__ To as(From x) {
    if constexpr (std::is_same_v<To, From>)
        return x;
    else if constexpr (std::is_same_v<To, Float2>)
        return {__low2float(x), __high2float(x)};
    else if constexpr (std::is_same_v<To, __half2>)
        return __floats2half2_rn(x.x, x.y);
    else
        return __floats2bfloat162_rn(x.x, x.y);
}
// The bits of a pair as one register, as the PTX wrappers take it, and back.
template <class To, class From>
__device__ __forceinline__ To bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    return reinterpret_cast<To&>(x);
}
template <class P>
__device__ __forceinline__ P exp2_of(P x) {
    if constexpr (std::is_same_v<P, __half2>) return bits<P>(exp2_approx_f16x2(bits<uint32_t>(x)));
#if __CUDA_ARCH__ >= 900  // sm_80 has it for fp16 only
    if constexpr (std::is_same_v<P, __nv_bfloat162>) return bits<P>(exp2_approx_bf16x2(bits<uint32_t>(x)));
#endif
    const Float2 y = as<Float2>(x);
    return as<P>(Float2{exp2_approx(y.x), exp2_approx(y.y)});
}

// The same for tiles.
template <class P, int N>
__device__ __forceinline__ auto& registers(P (&x)[N][2]) {
    using Registers = std::conditional_t<std::is_same_v<P, Float2>, float[4], uint32_t[2]>;
    return reinterpret_cast<Registers(&)[N]>(x);
}

// ---------------------------------------------------------------------------------------------------------------------
// What a lane computes of 16 queries, its rows g and g + 8, and a tile of Bc keys:
// P = 2^(scale_log2·S − reference), where reference = scale_log2·m + shift, and O += P V.

template <class X>
struct Args : ForwardArgs<X, X> {
    float shift_log2;  // log2(T), or 0
};

template <class V, int Bc>
struct Rows {
    using P = typename V::P;
    using O = typename V::O;
    using Pair = typename V::Pair;
    float scale_log2, shift_log2;
    float p_factor[2];  // of the last tile's P. In-loop it becomes 1/l
    float reference[2] = {-INFINITY, -INFINITY};
    float l[2] = {0.f, 0.f};  // without in-loop this lane's columns only, summed at the end
    float alpha[2];           // what the last tile scaled l by, and the factor for O
    typename V::S s[Bc / 8][2];
    P p[Bc / 8][2], sums[1][2];  // sums are P's over the tile, in its own type
    O o[HS / 8][2] = {};
    __half2 product[HS / 8][2];  // for pv16tile, P V of one tile

    __device__ __forceinline__ void clear() {
        for (int r = 0; r < 2; r++) {
            for (int n = 0; n < Bc / 8; n++) s[n][r] = {};
            for (int n = 0; n < HS / 8; n++) product[n][r] = {};
        }
    }

    // Sets the keys to −∞ that a query does not see. The lane's queries are row and row + 8, its first key is `key`.
    __device__ __forceinline__ void mask(int row, int key, int T) {
        const auto lowest = as<typename V::S>(Float2{-INFINITY, -INFINITY});
        for (int r = 0; r < 2; r++) {
            const int end = min(T, row + 8 * r + 1) - key;
            for (int n = 0; n < Bc / 8; n++) {
                if (8 * n >= end) s[n][r].x = lowest.x;
                if (8 * n + 1 >= end) s[n][r].y = lowest.y;
            }
        }
    }

    // Updates the references with the tile's maxima. Every row has met a key, so that none stays −∞.
    __device__ __forceinline__ void raise_reference() {
        for (int r = 0; r < 2; r++) {
            auto larger = s[0][r];
            for (int n = 1; n < Bc / 8; n++) larger = __hmax2(larger, s[n][r]);
            float m = fmaxf(as<Float2>(larger).x, as<Float2>(larger).y);
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
            float raised = fmaxf(reference[r], fmaf(m, scale_log2, shift_log2));
            // The reference is subtracted in fp16. Any that fp16 can represent cancels exactly between P and l.
            if (V::Qk16 && V::Exp16) raised = __half2float(__float2half_rn(raised));
            alpha[r] = exp2_approx(reference[r] - raised);
            reference[r] = raised;
            sums[0][r] = {};
        }
    }

    // Computes P of keys [8·n, 8·n + 8) and adds it to the tile's sums.
    __device__ __forceinline__ void exponentials(int n) {
        for (int r = 0; r < 2; r++) {
            if constexpr (V::Qk16 && V::Exp16) {
                p[n][r] = exp2_of(__hfma2(s[n][r], __float2half2_rn(scale_log2), __float2half2_rn(-reference[r])));
            } else {
                const Float2 x = as<Float2>(s[n][r]);
                const float minus = -reference[r];
                p[n][r] = exp2_of(as<P>(Float2{fmaf(x.x, scale_log2, minus), fmaf(x.y, scale_log2, minus)}));
            }
            sums[0][r] = sums[0][r] + p[n][r];
        }
    }

    static __device__ float sum_of_row(float x) {  // a row's four lanes are neighbours
        x += __shfl_xor_sync(~0u, x, 1);
        return x + __shfl_xor_sync(~0u, x, 2);
    }
    // Adds the tile's sums to l. In-loop l is the whole row's, and alpha becomes the factor of a normalised O.
    __device__ __forceinline__ void add_sums() {
        for (int r = 0; r < 2; r++) {
            const float sum = as<Float2>(sums[0][r]).x + as<Float2>(sums[0][r]).y, old = alpha[r] * l[r];
            l[r] = old + (V::InLoop ? sum_of_row(sum) : sum);
            if (!V::InLoop) continue;
            p_factor[r] = __fdividef(1.f, l[r]);
            alpha[r] = old * p_factor[r];
        }
    }

    // Scales rows of P or O.
    template <class Y, int N>
    static __device__ __forceinline__ void scale(Y (&x)[N][2], const float (&factor)[2]) {
        for (int n = 0; n < N; n++)
            for (int r = 0; r < 2; r++) x[n][r] = x[n][r] * as<Y>(Float2{factor[r], factor[r]});
    }
    // Scales O before a tile is added. A normalised O is always scaled, otherwise only if a row's maximum rose.
    __device__ __forceinline__ void rescale() {
        if (V::InLoop || __any_sync(~0u, !(alpha[0] == 1.f && alpha[1] == 1.f))) scale(o, alpha);
    }

    // a = columns [16·kk, 16·kk + 16) of P as an A operand.
    __device__ __forceinline__ void operand(uint32_t (&a)[4], int kk) const {
        for (int i = 0; i < 4; i++) a[i] = bits<uint32_t>(as<Pair>(p[2 * kk + i / 2][i % 2]));
    }
    // Where P V is summed: in O, or in the tile's product, which is then added to O.
    __device__ __forceinline__ auto& pv() {
        if constexpr (V::Pv16Tile)
            return registers(product);
        else
            return registers(o);
    }
    __device__ __forceinline__ void add_product() {
        for (int n = 0; V::Pv16Tile && n < HS / 8; n++)
            for (int r = 0; r < 2; r++) o[n][r] = o[n][r] + as<O>(product[n][r]);
    }

    // Divides O by l. Writes out and lse of queries `row` and row + 8, which are none if row < 0.
    __device__ __forceinline__ void write(const Args<typename V::X>& args, const Work& w, int row) const {
        for (int r = 0; r < 2; r++, row += 8) {
            const float sum = V::InLoop ? l[r] : sum_of_row(l[r]), factor = V::InLoop ? 1.f : __fdividef(1.f, sum);
            if (row < 0 || row >= args.p.Tq) continue;
            if (threadIdx.x % 4 == 0)
                args.lse.ptr[w.bh * args.lse.head + row] = (reference[r] + __log2f(sum)) * static_cast<float>(M_LN2);
            auto* out = reinterpret_cast<Pair*>(head_of(args.out, w, HS) + row * args.out.token);
            for (int n = 0; n < HS / 8; n++)
                out[4 * n + threadIdx.x % 4] = as<Pair>(as<Float2>(o[n][r]) * Float2{factor, factor});
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// mma.sync: a block of 4 warps with 32 queries each. K and V come through a 2-stage ring by cp.async (see
// flash_bf16.cu)

template <class V>
struct Mma {
    using X = typename V::X;
    static constexpr int M = 2, Threads = 128, Br = 4 * 16 * M, Bc = 64, KvBytes = Bc * HS * 2;
    static constexpr int Smem = Br * HS * 2 + 4 * KvBytes;
    uint32_t q_regs[HS / 16][M][4];
    Rows<V, Bc> rows[M];

    // c[0] and c[1] (16 × 8) += a b.
    template <class C>
    static __device__ __forceinline__ void mma(C* c, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
        for (int i = 0; i < 2; i++)
            if constexpr (std::is_same_v<X, bf16>)
                mma_m16n8k16_bf16(c[i], a, b[2 * i], b[2 * i + 1]);
            else
                mma_m16n8k16_f16(c[i], a, b[2 * i], b[2 * i + 1]);
    }

    // S and P of one tile of keys, and O += P V. The lane's first query is `row`, and its first key is `key`.
    template <bool Masked>
    __device__ __forceinline__ void step(uint32_t k_tile, uint32_t v_tile, int row, int key, int T) {
        uint32_t b[4];
        for (int i = 0; i < M; i++) rows[i].clear();
        for (int kk = 0; kk < HS / 16; kk++)
            for (int n = 0; n < Bc / 8; n += 2) {
                ldmatrix_x4(b, block16_b<HS>(k_tile, 8 * n, kk * 16));
                for (int i = 0; i < M; i++) mma(registers(rows[i].s) + n, q_regs[kk][i], b);
            }
        for (int i = 0; i < M; i++) {
            if (Masked) rows[i].mask(row + 16 * i, key, T);
            rows[i].raise_reference();
            if (!V::InLoop) rows[i].rescale();
        }
        auto exponentials = [&](int kk) {
            for (int i = 0; i < M; i++)
                for (int n = 2 * kk; n < 2 * kk + 2; n++) rows[i].exponentials(n);
        };
        if (V::InLoop) {  // nothing may be multiplied before the tile's sums are known
            for (int kk = 0; kk < Bc / 16; kk++) exponentials(kk);
            for (int i = 0; i < M; i++) {
                rows[i].add_sums();
                rows[i].rescale();
                rows[i].scale(rows[i].p, rows[i].p_factor);
            }
        }
        for (int kk = 0; kk < Bc / 16; kk++) {  // a k-step's MMAs beside the next one's exponentials
            if (!V::InLoop) exponentials(kk);
            uint32_t a[M][4];
            for (int i = 0; i < M; i++) rows[i].operand(a[i], kk);
            for (int n = 0; n < HS / 8; n += 2) {
                ldmatrix_x4_trans(b, block16<HS>(v_tile, 16 * kk, 8 * n));
                for (int i = 0; i < M; i++) mma(rows[i].pv() + n, a[i], b);
            }
        }
        for (int i = 0; i < M; i++) {
            rows[i].add_product();
            if (!V::InLoop) rows[i].add_sums();
        }
    }
};

template <class V>
__global__ void __launch_bounds__(Mma<V>::Threads, V::MoreWarps ? 3 : 2)
    mma_kernel(const __grid_constant__ Args<typename V::X> args) {
#if __CUDA_ARCH__ >= 800
    constexpr int M = Mma<V>::M, Br = Mma<V>::Br, Bc = Mma<V>::Bc, KvBytes = Mma<V>::KvBytes;
    const auto& p = args.p;
    const uint32_t q_smem = smem_address(smem), k_smem = q_smem + Br * HS * 2, v_smem = k_smem + 2 * KvBytes;
    const Work w = work_of(p, true);
    const int q0 = w.tile * Br, warp_row = threadIdx.x / 32 * 16 * M, lane = threadIdx.x % 32;
    const int first_q = q0 + warp_row, last_q = first_q + 16 * M - 1;  // of the warp
    const int k_tiles = (min(q0 + Br, p.Tq) + Bc - 1) / Bc;

    // Not head_of, whose 64-bit offset makes more-warps spill registers. A copy need not know fp16 from bf16.
    auto head = [&](const auto& x) { return reinterpret_cast<const bf16*>(x.ptr + w.b * x.batch + w.h * HS); };
    auto load_kv = [&](int j) {
        load_tile<HS, Bc, Mma<V>::Threads>(k_smem + (j & 1) * KvBytes, head(p.k), p.k.token, j * Bc, p.Tq);
        load_tile<HS, Bc, Mma<V>::Threads>(v_smem + (j & 1) * KvBytes, head(p.v), p.v.token, j * Bc, p.Tq);
    };
    load_tile<HS, Br, Mma<V>::Threads>(q_smem, head(p.q), p.q.token, q0, p.Tq);
    cp_async_commit();
    load_kv(k_tiles - 1);
    cp_async_commit();

    Mma<V> warp;
    for (auto& r : warp.rows) r.scale_log2 = p.scale_log2, r.shift_log2 = args.shift_log2;
    cp_async_wait<1>();
    __syncthreads();
    for (int kk = 0; kk < HS / 16; kk++) load_a<HS>(warp.q_regs[kk], q_smem + warp_row * HS * 2, kk * 16);

    for (int j = k_tiles - 1; j >= 0; j--) {
        cp_async_wait<0>();
        __syncthreads();  // tile j is there for all, and all have left tile j + 1, whose stage the next load takes
        if (j > 0) load_kv(j - 1);
        cp_async_commit();
        if (j * Bc > last_q) continue;
        const uint32_t k_tile = k_smem + (j & 1) * KvBytes, v_tile = v_smem + (j & 1) * KvBytes;
        if (j * Bc + Bc > p.Tq || j * Bc + Bc - 1 > first_q)
            warp.template step<true>(k_tile, v_tile, first_q + lane / 4, j * Bc + lane % 4 * 2, p.Tq);
        else
            warp.template step<false>(k_tile, v_tile, first_q + lane / 4, j * Bc + lane % 4 * 2, p.Tq);
    }
    for (int i = 0; i < M; i++) warp.rows[i].write(args, w, first_q + 16 * i + lane / 4);
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// wgmma: W consumer warpgroups of 64 queries and a producer on TMA. Blocks are persistent and take tiles from a
// counter. The barriers and the ring are those of flash_bf16_sm90.cu.

template <class X>
struct WgmmaArgs : Args<X> {
    CUtensorMap q, kv[2];
    float one = 1.f;  // see to_operands
};
__device__ int next_item;  // the last block to ask sets it back to 0. One launch runs at a time

template <class V>
struct Wgmma {
    static constexpr bool Bf16 = std::is_same_v<typename V::X, bf16>;
    static constexpr int W = V::MoreWarps ? 4 : 3, Br = 64 * W, Bc = 128, Threads = 128 * (1 + W), Stages = 4;
    static constexpr int ConsumerRegisters = V::MoreWarps ? 112 : 160;
    static constexpr int QBytes = 64 * HS * 2, KvBytes = Bc * HS * 2;
    static constexpr int Kv = 2 * W * QBytes, Barriers = Kv + 2 * Stages * KvBytes;
    static constexpr int NextItem = Barriers + 4 * (W + Stages) * 8, Smem = NextItem + 2 * 4;
    static_assert(Smem <= 227 * 1024);

    // Shared memory of warpgroup wg's i-th item, and of the block's n-th tile of K (kv = 0) and V (1).
    static __device__ uint32_t at(int byte) { return smem_address(smem) + byte; }
    static __device__ uint32_t q(int i, int wg) { return at((i % 2 * W + wg) * QBytes); }
    static __device__ uint32_t tile(int kv, int n) { return at(Kv + (kv * Stages + n % Stages) * KvBytes); }
    static __device__ uint32_t q_full(int i, int wg) { return at(Barriers + (i % 2 * W + wg) * 8); }
    static __device__ uint32_t q_empty(int i, int wg) { return q_full(i, wg) + 2 * W * 8; }
    static __device__ uint32_t full(int kv, int n) { return at(Barriers + (4 * W + kv * Stages + n % Stages) * 8); }
    static __device__ uint32_t empty(int kv, int n) { return full(2 + kv, n); }
    static __device__ int& item(int i) { return reinterpret_cast<int*>(smem + NextItem)[i % 2]; }  // −1: no more
    static __device__ int q_parity(int i) { return i / 2 & 1; }  // what consumers wait for. The producer: the other
    static __device__ int parity(int n) { return n / Stages & 1; }

    // Rows are counted from the last query. A remainder makes the shortest tile shorter, and its first warpgroups may
    // have q < 0. Tile 0 is the longest.
    static __device__ int first_query(int T, int tile) { return (T + 63) / 64 * 64 - (tile + 1) * Br; }
    static __device__ int key_tiles(int T, int end_q) { return (min(T, end_q) + Bc - 1) / Bc; }

    static __device__ __forceinline__ void producer(const WgmmaArgs<typename V::X>& args) {
        const auto& p = args.p;
        const int items = p.tiles * p.heads;
        Work w{};
        auto load = [&](uint32_t to, const CUtensorMap& map, uint32_t barrier, int rows, int row0) {
            mbarrier_arrive_expect(barrier, rows * HS * 2);  // publishes the item too
            tma_load_4d(to, &map, barrier, 0, w.h, row0, w.b);
        };
        for (int i = 0, n = 0, next = blockIdx.x;; i++) {
            for (int wg = 0; wg < W; wg++) mbarrier_wait(q_empty(i, wg), !q_parity(i));
            item(i) = next < items ? next : -1;
            if (next >= items) {
                for (int wg = 0; wg < W; wg++) mbarrier_arrive(q_full(i, wg));
                break;
            }
            w = work_of(p, false, next);
            const int taken = atomicAdd(&next_item, 1);
            if (taken == items - 1) next_item = 0;  // every block has asked for the last time
            next = gridDim.x + taken;
            const int q0 = first_query(p.Tq, w.tile);
            for (int wg = 0; wg < W; wg++) load(q(i, wg), args.q, q_full(i, wg), 64, max(0, q0 + 64 * wg));
            for (int j = key_tiles(p.Tq, q0 + Br) - 1; j >= 0; j--, n++)
                for (int kv = 0; kv < 2; kv++) {
                    mbarrier_wait(empty(kv, n), !parity(n));
                    load(tile(kv, n), args.kv[kv], full(kv, n), Bc, j * Bc);
                }
        }
    }

    // What a warpgroup computes of its 64 queries.
    Rows<V, Bc> rows;
    uint32_t p_regs[Bc / 16][4];

    __device__ __forceinline__ void start_qk(uint32_t q_smem, uint32_t k_smem) {
        const uint64_t q = wgmma_descriptor(q_smem), k = wgmma_descriptor(k_smem);
        wgmma_fence();
        for (int kk = 0; kk < HS / 16; kk++)
            if constexpr (Bf16)
                wgmma_ss(registers(rows.s), wgmma_advance(q, kk * 32), wgmma_advance(k, kk * 32), kk > 0);
            else
                wgmma_ss_f16(registers(rows.s), wgmma_advance(q, kk * 32), wgmma_advance(k, kk * 32), kk > 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void start_pv(uint32_t v_smem) {
        const uint64_t v = wgmma_descriptor(v_smem, Bc * 128);
        wgmma_hold(p_regs);
        wgmma_hold(rows.pv());
        wgmma_fence();
        for (int kk = 0; kk < Bc / 16; kk++)
            if constexpr (Bf16)
                wgmma_rs<true>(rows.pv(), p_regs[kk], wgmma_advance(v, kk * 16 * 128), true);
            else
                wgmma_rs_f16(rows.pv(), p_regs[kk], wgmma_advance(v, kk * 16 * 128), !V::Pv16Tile || kk > 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void finish_pv() {
        wgmma_wait<0>(rows.pv());
        rows.add_product();
    }
    __device__ __forceinline__ void softmax() {
        rows.raise_reference();
        for (int n = 0; n < Bc / 8; n++) rows.exponentials(n);
        wgmma_hold(registers(rows.p));
        wgmma_hold(registers(rows.sums));
        rows.add_sums();
    }
    __device__ __forceinline__ void to_operands() {
        // With exp16 P is an operand already, but in separate registers. The compiler would save the copy by making P
        // in p_regs, which belong to the tensor cores until finish_pv, and then serialize the wgmmas (C7513). So the
        // copy is a product by p_factor, a 1 that the compiler does not know.
        if (V::InLoop || V::Exp16) rows.scale(rows.p, rows.p_factor);
        for (int kk = 0; kk < Bc / 16; kk++) rows.operand(p_regs[kk], kk);
    }

    static __device__ __forceinline__ void consumer(const WgmmaArgs<typename V::X>& args, int wg) {
        const auto& p = args.p;
        const int T = p.Tq, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        auto wait_full = [&](int kv, int n) { mbarrier_wait(full(kv, n), parity(n)); };
        auto release = [&](uint32_t barrier) {
            if (lane == 0) mbarrier_arrive(barrier);
        };
        for (int i = 0, n = 0;; i++) {
            mbarrier_wait(q_full(i, wg), q_parity(i));
            const int taken = __shfl_sync(~0u, item(i), 0);
            if (taken < 0) break;
            const Work w = work_of(p, false, taken);
            const int q0 = first_query(T, w.tile), first_q = q0 + 64 * wg, row = first_q + 16 * warp + lane / 4;
            // my_tiles are those that some query here sees. Only the first is masked, because all queries see the
            // others whole.
            const int my_tiles = first_q < 0 ? 0 : key_tiles(T, first_q + 64);
            Wgmma my{{p.scale_log2, args.shift_log2, {args.one, args.one}}};

            int j = key_tiles(T, q0 + Br) - 1;
            for (; j >= my_tiles; j--, n++)  // beyond this warpgroup's queries
                for (int kv = 0; kv < 2; kv++) {
                    wait_full(kv, n);
                    release(empty(kv, n));
                }
            if (my_tiles > 0) {
                wait_full(0, n);
                my.start_qk(q(i, wg), tile(0, n));
                wgmma_wait<0>(registers(my.rows.s));
                release(empty(0, n));
                my.rows.mask(row, j * Bc + lane % 4 * 2, T);
                my.softmax();
                my.to_operands();
                wait_full(1, n);
                for (j--, n++; j >= 0; j--, n++) {  // S of the n-th tile beside O += P V of the one before
                    wait_full(0, n);
                    my.start_qk(q(i, wg), tile(0, n));
                    my.start_pv(tile(1, n - 1));
                    wgmma_wait<1>(registers(my.rows.s));
                    my.softmax();
                    // This wait comes here, because it is a loop. So the compiler does not move the exponentials past
                    // the wait below. They are to run beside O += P V.
                    wait_full(1, n);
                    my.finish_pv();
                    my.rows.rescale();
                    release(empty(0, n));
                    release(empty(1, n - 1));
                    my.to_operands();
                }
            }
            release(q_empty(i, wg));
            if (my_tiles > 0) {
                my.start_pv(tile(1, n - 1));
                my.finish_pv();
                release(empty(1, n - 1));
            }
            my.rows.write(args, w, row);
        }
    }
};

template <class V>
__global__ void __launch_bounds__(Wgmma<V>::Threads, 1)
    wgmma_kernel(const __grid_constant__ WgmmaArgs<typename V::X> args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Block = Wgmma<V>;
    if (threadIdx.x == 0) {
        for (int i : {0, 1})  // slots of Q
            for (int wg = 0; wg < Block::W; wg++) {
                mbarrier_init(Block::q_full(i, wg), 1);
                mbarrier_init(Block::q_empty(i, wg), 4);
            }
        for (int kv : {0, 1})
            for (int n = 0; n < Block::Stages; n++) {
                mbarrier_init(Block::full(kv, n), 1);
                mbarrier_init(Block::empty(kv, n), 4 * Block::W);
            }
        fence_mbarrier_init();
    }
    __syncthreads();

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        setmaxnreg_dec<32>();
        if (threadIdx.x == 0) Block::producer(args);
    } else {
        setmaxnreg_inc<Block::ConsumerRegisters>();
        Block::consumer(args, warpgroup - 1);
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// What is compared: the kernels, and naive as the yardstick, with S and P rounded to X and sums in fp32

template <class X, int F, bool OnWgmma>
void forward(const Cuda& dev, X* out, float* lse, const X* qkv, const AttentionShape& s) {
    using V = Variant<X, F & ~kShift>;
    const auto part = [&](int which) { return packed(qkv, s.Tk, s.NH, HS, which); };
    const Args<X> args{
        {problem(part(0), part(1), part(2), s), contiguous(out, s.Tq, s.NH, HS), {lse, size_t(s.Tq)}, {}},
        F & kShift ? std::log2(static_cast<float>(s.Tq)) : 0.f};
    if constexpr (OnWgmma) {
        using Tiles = Wgmma<V>;
        const auto map = [&](const char* name, const Heads<const X>& x, int rows) {
            return tensor_map(name, x, s.B, s.Tq, s.NH, HS, rows);
        };
        const WgmmaArgs<X> wgmma_args{
            args, map("q", args.p.q, 64), {map("k", args.p.k, Tiles::Bc), map("v", args.p.v, Tiles::Bc)}};
        launch("wgmma_kernel", wgmma_kernel<V>, wgmma_args, ceil_div(s.Tq, Tiles::Br), s.Tq, HS, Tiles::Threads,
               Tiles::Smem, dev, dev.num_sms);
    } else {
        launch("mma_kernel", mma_kernel<V>, args, ceil_div(s.Tq, Mma<V>::Br), s.Tq, HS, Mma<V>::Threads, Mma<V>::Smem,
               dev);
    }
}

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
    const int T = s.Tq, C = s.NH * HS;
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
    size_t elements;
    DeviceMemory memory[2];
    X* out;
    float* lse;
    Errors errors;

    Result(const Cuda& dev, const AttentionShape& s) : elements(size_t(s.B) * s.Tq * s.NH * HS), errors(dev, s) {
        memory[0] = poisoned(dev, elements * sizeof(X));
        memory[1] = poisoned(dev, elements / HS * sizeof(float));
        out = static_cast<X*>(memory[0].get());
        lse = static_cast<float*>(memory[1].get());
    }
    unsigned not_finite(const Cuda& dev) const {
        const DeviceMemory on_device = device_memory(dev, sizeof(unsigned));
        unsigned count = 0, *const device_count = static_cast<unsigned*>(on_device.get());
        dev.zero(device_count, sizeof count);
        count_not_finite_kernel<<<blocks_of(elements), kThreads, 0, dev.stream>>>(device_count, out, elements);
        LAUNCH_CHECK("count_not_finite_kernel");
        dev.download(&count, device_count, sizeof count);
        return count;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The study

constexpr int kValidated = 1024;  // the T of the check
constexpr double kAllowed = 4;    // the multiple of naive's L2 error that must not be passed

struct Options : Output {
    std::string vehicle = "all", dtype = "all", variant = "all", shapes = "32x1024,4x4096,2x16384";
    std::string lengths = "2x1024,1x4096,1x16384";
    bool quick = false;
};

template <class X>
struct Subject {
    const char* vehicle;  // mma.sync or wgmma
    int flags;
    void (*forward)(const Cuda&, X* out, float* lse, const X* qkv, const AttentionShape&);
    bool wrong = false;
};

template <class X>
struct Study {
    const Cuda& dev;
    const Options& options;
    Log& log;
    std::vector<Subject<X>> subjects = {};

    static constexpr const char* dtype = std::is_same_v<X, bf16> ? "bf16" : "fp16";

    // Those of the variants F that were asked for and that this GPU can run.
    template <int... F>
    void choose() {
        const auto add = [&](bool runs, const Subject<X>& x) {
            if (runs && (options.vehicle == "all" || options.vehicle == x.vehicle) &&
                (options.variant == "all" || options.variant == name_of(x.flags)))
                subjects.push_back(x);
        };
        (add(dev.sm >= 80, {"mma.sync", F, forward<X, F, false>}), ...);
        (add(dev.sm90a, {"wgmma", F, forward<X, F, true>}), ...);
    }
    void choose_all() {  // each choice alone, then together
        constexpr int kAll16 = kQk16 | kPv16 | kExp16;
        if constexpr (std::is_same_v<X, bf16>)
            choose<0, kInLoop, kShift, kExp16, kInLoop | kExp16>();
        else
            choose<0, kQk16, kPv16, kPv16Tile, kExp16, kInLoop, kShift, kQk16 | kPv16, kQk16 | kExp16, kPv16 | kInLoop,
                   kPv16 | kShift, kAll16, kAll16 | kMoreWarps, kAll16 | kInLoop, kAll16 | kShift,
                   kQk16 | kPv16Tile | kExp16>();
    }

    Row row_of(const char* kernel, const std::string& variant, const AttentionShape& s) const {
        Row row = result_row(dev, "accumulation");
        row.add("kernel", kernel).add("variant", variant).add("pass", "fwd").add("dtype", dtype).add("B", s.B);
        return row.add("T", s.Tq).add("NH", s.NH).add("HS", HS).add("causal", true);
    }

    void errors(const AttentionShape& s, const Input& input) {
        std::vector<Result<X>> results;  // of naive and of the subjects
        for (size_t i = 0; i <= subjects.size(); i++) results.emplace_back(dev, s);
        const size_t n = results[0].elements;
        const DeviceMemory memory = device_memory(dev, 3 * n * sizeof(X));
        X* const qkv = static_cast<X*>(memory.get());
        fill_normal(dev, qkv, 3 * n, s.Tq);
        shape_inputs_kernel<<<blocks_of(3 * n), kThreads, 0, dev.stream>>>(qkv, 3 * n, s.NH * HS, input);
        LAUNCH_CHECK("shape_inputs_kernel");

        naive(dev, results[0].out, qkv, s);
        for (size_t i = 0; i < subjects.size(); i++)
            subjects[i].forward(dev, results[i + 1].out, results[i + 1].lse, qkv, s);
        for_each_head<X>(dev, qkv, qkv, s, [&](const Oracle& oracle, int b, int h) {
            for (Result<X>& r : results) r.errors.add(oracle, r.out, r.lse, static_cast<const X*>(nullptr), b, h);
        });
        for (Result<X>& r : results) r.errors.fetch();

        const double naive_l2 = results[0].errors.l2(Out);
        std::printf("\n%s B%d T%d NH%d, %s: max |out| %.3g, naive's L2 error %.2e\n", dtype, s.B, s.Tq, s.NH,
                    input.text, results[0].errors.largest_value(Out), naive_l2);
        for (size_t i = 0; i < subjects.size(); i++) {
            Subject<X>& x = subjects[i];
            const Result<X>& r = results[i + 1];
            const Errors& e = r.errors;
            const unsigned not_finite = r.not_finite(dev);
            const double ratio = e.l2(Out) / naive_l2;
            const bool ok = !(&input == &kInputs[0] && s.Tq == kValidated) || ratio <= kAllowed;
            x.wrong |= !ok;
            std::printf("  %-8s %-26s max %9.2e  L2 %9.2e  %6.1f dB  x%-6.2f lse %8.1e", x.vehicle,
                        name_of(x.flags).c_str(), e.max(Out), e.l2(Out), e.snr_db(Out), ratio, e.max(Lse));
            if (not_finite) std::printf("  %u of %zu not finite", not_finite, n);
            std::printf("%s\n", ok ? "" : "  WRONG");
            Row row = row_of(x.vehicle, name_of(x.flags), s);
            row.add("input", input.name).add("max_error", e.max(Out)).add("relative_l2", e.l2(Out));
            row.add("snr_db", e.snr_db(Out)).add("ratio_l2", ratio).add("max_lse_error", e.max(Lse));
            row.add("not_finite", static_cast<long long>(not_finite));
            log.write(row.add("elements", static_cast<long long>(n)));
        }
        std::fflush(stdout);
    }

    void time(const AttentionShape& s) {
        const Result<X> to(dev, s);
        const DeviceMemory memory = device_memory(dev, 3 * to.elements * sizeof(X));
        X* const qkv = static_cast<X*>(memory.get());
        fill_normal(dev, qkv, 3 * to.elements, 1);
        std::printf("\n%s B%d T%d NH%d: TFLOP/s cool\n", dtype, s.B, s.Tq, s.NH);
        const auto timed = [&](const char* kernel, const std::string& variant, auto launch) {
            const double ms = cool_ms(dev, launch), rate = 4. * s.B * s.NH * s.Tq * s.Tk * HS / 2 / ms * 1e-9;
            std::printf("  %-15s %-26s %8.4f ms  %6.1f\n", kernel, variant.c_str(), ms, rate);
            std::fflush(stdout);
            log.write(row_of(kernel, variant, s).add("ms", ms).add("tflops", rate));
        };
        for (const Subject<X>& x : subjects)
            if (!x.wrong && !(x.flags & kShift))  // the shift is an argument, so the kernel is the same
                timed(x.vehicle, name_of(x.flags), [&](int) { x.forward(dev, to.out, to.lse, qkv, s); });
        if constexpr (std::is_same_v<X, bf16>)  // the vehicles are to be judged beside the trainer's kernels
            for (const AttentionKernel<bf16>* k : {&flash_bf16, &flash_bf16_sm90})
                if (k->runs_on(dev) && options.variant == "all")
                    timed(k->name, "trainer", [&](int) {
                        attention_forward<bf16>(dev, Attention{k->name}, to.out, to.lse, nullptr, qkv, s.B, s.Tq, s.Tk,
                                                s.NH, HS);
                    });
    }

    int run() {  // how many variants are wrong
        if (options.dtype == "all" || options.dtype == dtype) choose_all();
        if (subjects.empty()) return 0;
        for (const auto& [B, T] : parse_shapes(options.lengths))
            for (const Input& input : kInputs) errors({B, T, T, 2, HS}, input);
        if (!options.shapes.empty())
            for (const auto& [B, T] : parse_shapes(options.shapes)) time({B, T, T, 12, HS});
        return std::count_if(subjects.begin(), subjects.end(), [](const Subject<X>& x) { return x.wrong; });
    }
};

int study(Options& o) {
    if (o.quick) o.lengths = "2x1024", o.shapes.clear();
    bool validates = false;
    for (const auto& [B, T] : parse_shapes(o.lengths)) validates |= T == kValidated;
    if (!validates) throw UsageError(format("--lengths: no T = %d, at which variants are validated", kValidated));
    if (!o.shapes.empty()) parse_shapes(o.shapes);

    Cuda dev;
    Log log = results_log(dev, "accumulation", o);
    std::printf("%s: fp16 in flash attention's forward, causal, HS %d\n", dev.name.c_str(), HS);
    Study<__half> fp16{dev, o, log};
    Study<bf16> bf16s{dev, o, log};
    int wrong = fp16.run();
    wrong += bf16s.run();
    if (fp16.subjects.empty() && bf16s.subjects.empty())
        throw Error("nothing to run: no such --variant, or none for this GPU");
    if (wrong == 0) return 0;
    std::fprintf(stderr, "study_accumulation: %d variants with more than %g times naive's error\n", wrong, kAllowed);
    return 1;
}

}  // namespace

int main(int argc, char** argv) {
    Options o;
    const std::vector<Option> table = {
        {"--vehicle", "", Option::Choice, &o.vehicle, "which kernel", "mma.sync|wgmma|all"},
        {"--dtype", "", Option::Choice, &o.dtype, "of q, k, v, P and out", "fp16|bf16|all"},
        {"--variant", "", Option::String, &o.variant, "base, pv16, qk16+pv16, … or all"},
        {"--shapes", "", Option::String, &o.shapes, "BxT,BxT,… to time, with 12 heads"},
        {"--lengths", "", Option::String, &o.lengths, "BxT,BxT,… for errors, with 2 heads"},
        {"--quick", "", Option::Flag, &o.quick, "errors at T = 1024, no times"},
    };
    const char* const about = "fp16 in flash attention's forward: speed, errors, overflow.";
    return bench_main(argc, argv, "study_accumulation", about, "accumulation.jsonl", o, table,
                      [&] { return study(o); });
}
