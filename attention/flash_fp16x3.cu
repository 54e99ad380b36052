// Flash attention forward and backward with fp32's accuracy on tensor cores: mma.sync on split fp16
// (sm_80+). It is flash_bf16's loop with four more ideas.
//
// 1. The split (fp16_pairs.cuh). An fp32 operand is a pair of fp16 numbers, 22 bits in all:
//
//      x · 2^e = hi + lo,   hi = fp16(x · 2^e),   lo = fp16(x · 2^e − hi)
//
//    Tiles arrive as floats (cp.async, one tile ahead), and the block splits them in shared memory.
//    That takes one barrier after the largest magnitude is known and one after the tile is written.
//    P and dS are split in registers, from accumulator to A operand.
//
// 2. The products. Each is three MMAs, the small terms first:
//
//      a·b ≈ a_lo·b_hi + a_hi·b_lo + a_hi·b_hi
//
//    Tensor cores truncate when they add, so no sum runs through them for long: a tile's product
//    starts at 0, and an ordinary FMA adds it to O, dQ, dK or dV.
//
// 3. The scales. 2^e brings the largest magnitude of a tile, or of the rows of a warp, to
//    [2^14, 2^15). To undo it costs nothing: 2^−e is part of a factor that is there anyway.
//
//      scale of        in product     undone in
//      Q, K            S = Q Kᵀ       the factor that turns S into an exponent of 2
//      P, 2^14; V      O += P V       the factor with which the tile's product is added to O
//      P, 2^14; dO     dV += Pᵀ dO    likewise
//      dS; K           dQ += dS K     likewise; dS has the scale of its own largest magnitude
//      dS; Q           dK += dSᵀ Q    likewise
//      dO, V           dP = dO Vᵀ     the FMA dP·unit − D
//
// 4. The softmax. An error in l, lse or D is shared by a whole row, so it does not average out.
//    Forward, for one tile of Br query rows against one tile of Bc keys at a time:
//
//      S  = scale·Q Kᵀ                (Br × Bc, fp32 registers)
//      m' = max(m, rowmax S)          (only where a row outgrew m by a factor of 2)
//      P  = exp(S − m')
//      l  = e^{m−m'} l + rowsum P     (with Kahan's correction)
//      O  = e^{m−m'} O + P V
//    and after the last tile:
//      out = O / l
//      lse = m + log l
//
//    Backward, in two kernels that each write what they own, as in flash_bf16:
//
//      D  = rowsum(dO∘O)
//      P  = exp(S − lse)
//      dP = dO Vᵀ
//      dS = P∘(dP − D)
//      dQ = scale·dS K
//      dK = scale·dSᵀ Q
//      dV = Pᵀ dO
//
//    D is computed by the same MMAs as dP, as the diagonal of dO Oᵀ, so that dP − D is exactly 0
//    where one key has all the weight. If a call covers every key, two sums per row show the errors
//    that its elements share: dS must add up to 0, and what it does add up to is D's error; P must
//    add up to 1, and what is missing is lse's error. dq_kernel corrects dQ by them, and D and lse
//    for dkdv_kernel. A call with some of the keys is given lse's rounding error, lse_rest.
//
// A warp owns 32 rows (16 at HS 128).
//
// Writes: forward out, lse and lse_rest, backward dq, dk and dv (every element).
// Scratch: LseD and P's factor (B, NH, Tq), which dq_kernel writes for dkdv_kernel.
// Limits: HS in {64, 128}, any T ≥ 1, scale > 0. A NaN or infinity spreads over the tile it is in.
// Run: ./dev/bench_attention --kernel flash_fp16x3
#include <cfloat>
#include <cmath>

#include "attention/fp16_pairs.cuh"
#include "attention/log.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
// kernels have empty bodies there, and what only they use is "never referenced"
#pragma nv_diag_suppress 177
#endif

namespace {

// -------------------------------------------------------------------------------------------------
// Tiles. A warp owns kWarpTiles MMA tiles of 16 rows. Two blocks of 128 threads share an SM, so a
// thread may have 255 registers and, on sm_90, a block 113 KB of shared memory. An SM of sm_86,
// sm_89 or sm_120 has room for one block, of at most 99 KB.

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
// Bytes of an element.
constexpr int kHalfBytes = 2;
constexpr int kPairBytes = 2 * kHalfBytes;
template <int HS>
constexpr int kWarpTiles = HS == 64 ? 2 : 1;

template <int HS>
struct ForwardTiles {
    static constexpr int Br = kWarps * kWarpTiles<HS> * 16;
    static constexpr int Bc = HS == 64 ? 64 : 32;
    static constexpr int Sub = 32;  // keys at a time

    // 80 KB: K and V as pairs (at first Q's hi part is there), K and V as floats, Q's lo part
    static constexpr int QLo = Stream<HS, Bc, kThreads>::Bytes;
    static constexpr int Smem = QLo + kHalfBytes * Br * HS;
};

template <int HS>
struct DqTiles {
    static constexpr int Br = kWarps * kWarpTiles<HS> * 16;
    static constexpr int Bc = HS == 64 ? 32 : 16;

    // 96 KB: Q and dO as pairs, then K and V as pairs and as floats. Offsets in bytes:
    static constexpr int Lo = kHalfBytes * Br * HS;  // from a hi part to its lo part
    static constexpr int Do = kPairBytes * Br * HS;
    static constexpr int Kv = 2 * Do;
    static constexpr int Smem = Kv + Stream<HS, Bc, kThreads>::Bytes;
};

template <int HS>
struct DkdvTiles {
    static constexpr int Bc = kWarps * kWarpTiles<HS> * 16;
    static constexpr int Br = HS == 64 ? 32 : 16;

    // Just over 96 KB: K and V as pairs, then Q and dO as pairs and as floats, then RowStats.
    // Offsets in bytes:
    static constexpr int Lo = kHalfBytes * Bc * HS;  // from a hi part to its lo part
    static constexpr int V = kPairBytes * Bc * HS;
    static constexpr int QDo = 2 * V;
    static constexpr int Stats = QDo + Stream<HS, Br, kThreads>::Bytes;

    // What the kernel needs of a tile's queries, in two stages one after the other.
    struct RowStats {
        alignas(16) LseD lse_D[2 * Br];  // read as LseDPair
        float factors[2 * Br];
    };
    static constexpr int Smem = Stats + static_cast<int>(sizeof(RowStats));
};

// -------------------------------------------------------------------------------------------------
// Forward

// The tensor cores get P times 2^14, and P ≤ 2.
constexpr int kPExponent = 14;
constexpr float kPScale = 1 << kPExponent;
constexpr float kLn2 = static_cast<float>(M_LN2);
constexpr float kLn2Rest = static_cast<float>(M_LN2 - kLn2);
constexpr float kLog2eRest = static_cast<float>(M_LOG2E - kLog2e);

// s (16·M × 8·N) += Q Kᵀ, with Q's hi part in registers. The large terms go in two chains as in
// multiply_abt, so that backward's S rounds as forward's does. (It need not have the same bits:
// tiles of other sizes may have other scales, and dkdv_kernel swaps the operands and so the small
// terms.)
template <int HS, int Lo, int M, int N>
__device__ __forceinline__ void multiply_qk(float (&s)[M][N][4],
                                            const uint32_t (&q_hi)[HS / 16][M][4],
                                            uint32_t q_lo_tile, PairTile<Lo> k_tile) {
    uint32_t k_hi[HS / 16][N / 2][4];
#pragma unroll  // or else the compiler unrolls later, and orders the instructions differently
    for (int kk = 0; kk < HS / 16; kk++) {
        uint32_t q_lo[M][4];
        uint32_t k_lo[4];
        load_a<HS>(q_lo, opaque(q_lo_tile), 16 * kk);
        for (int n = 0; n < N; n += 2) {
            ldmatrix_x4(k_hi[kk][n / 2], block16_b<HS>(k_tile.hi, 8 * n, 16 * kk));
            mma(s, n, q_lo, k_hi[kk][n / 2]);
        }
        for (int n = 0; n < N; n += 2) {
            ldmatrix_x4(k_lo, block16_b<HS>(k_tile.lo(), 8 * n, 16 * kk));
            mma(s, n, q_hi[kk], k_lo);
        }
    }
    for (int kk = 0; kk < HS / 32; kk++)
        for (int n = 0; n < N; n += 2)
            mma(s, n, q_hi[kk], k_hi[kk][n / 2]);
    for (int n = 0; n < N; n += 2) {
        float chain[M][2][4] = {};
        for (int kk = HS / 32; kk < HS / 16; kk++)
            mma(chain, 0, q_hi[kk], k_hi[kk][n / 2]);
        add_columns(s, n, chain);
    }
}

// What rounding added to l. It is in shared memory, because the loop leaves no registers for it.
template <int M>
struct alignas(8 * M) Excess {
    float l[M][2];
};

// The online softmax of a warp's rows, of which this lane has lane/4 and lane/4 + 8 in each MMA
// tile. Its m may still be −inf after a tile, because keys come from the last tile to the first,
// and a row may see none of the last ones.
template <int HS>
struct Softmax {
    static constexpr int M = kWarpTiles<HS>;
    float l[M][2] = {};  // of this lane's columns until finish
    float m[M][2];       // times log2(e)

    __device__ __forceinline__ Softmax() {
        for (int i = 0; i < M; i++)
            for (int r = 0; r < 2; r++)
                m[i][r] = -INFINITY;
    }

    // Turns s into P. s · s_unit is S·log2(e).
    template <int N>
    __device__ __forceinline__ void exponentials(float (&s)[M][N][4], float (&o)[M][HS / 8][4],
                                                 float s_unit, Excess<M>* l_excess) {
        float m_new[M][2];
        const bool outgrown = find_max(m_new, s, s_unit);
        Excess<M> excess = l_excess[opaque_thread_idx()];
        if (__any_sync(~0u, outgrown))
            rescale(o, excess, m_new);

        for (int i = 0; i < M; i++)
            for (int r = 0; r < 2; r++) {
                const float base = m[i][r] == -INFINITY ? 0.f : m[i][r];
                float sum = 0.f;
                for (int n = 0; n < N; n++)
                    for (int e = 2 * r; e < 2 * r + 2; e++) {
                        s[i][n][e] = exp2_approx(fmaf(s[i][n][e], s_unit, -base));
                        sum += s[i][n][e];
                    }
                // What an addition loses to rounding is kept for the next (Kahan), because all of a
                // row's P, and D, have l's error. If one key has most of the weight, every other
                // tile's sum is small beside l.
                const float addend = sum - excess.l[i][r];
                const float l_new = l[i][r] + addend;
                excess.l[i][r] = (l_new - l[i][r]) - addend;
                l[i][r] = l_new;
            }
        l_excess[opaque_thread_idx()] = excess;
    }

    // Finds the maxima. Returns whether a row outgrew its m by more than a factor of 2. m only
    // keeps the exponentials in range and need not be the maximum, so O and l are rescaled if a row
    // of the warp did, which is rare after a few tiles.
    template <int N>
    __device__ __forceinline__ bool find_max(float (&m_new)[M][2], const float (&s)[M][N][4],
                                             float s_unit) const {
        bool outgrown = false;
        for (int i = 0; i < M; i++)
            for (int r = 0; r < 2; r++) {
                float x = s[i][0][2 * r];
                for (int n = 0; n < N; n++)
                    x = fmaxf(x, fmaxf(s[i][n][2 * r], s[i][n][2 * r + 1]));
                m_new[i][r] = fmaxf(m[i][r], quad_max(x) * s_unit);
                // −inf − −inf is NaN, which compares false
                outgrown |= m_new[i][r] - m[i][r] > 1.f;
            }
        return outgrown;
    }
    __device__ __forceinline__ void rescale(float (&o)[M][HS / 8][4], Excess<M>& excess,
                                            const float (&m_new)[M][2]) {
        for (int i = 0; i < M; i++)
            for (int r = 0; r < 2; r++) {
                const float x = m_new[i][r];
                const float alpha = x == -INFINITY ? 1.f : exp2_approx(m[i][r] - x);
                m[i][r] = x;
                l[i][r] *= alpha;
                excess.l[i][r] *= alpha;
                scale_row(o, i, r, alpha);
            }
    }

    // Makes l the sum over all columns, divides O by it and writes lse.
    __device__ __forceinline__ void finish(float (&o)[M][HS / 8][4], float (&lse)[M][2]) {
        for (int i = 0; i < M; i++)
            for (int r = 0; r < 2; r++) {
                const float sum = quad_sum(l[i][r]);
                lse[i][r] = fmaf(m[i][r], kLn2, fmaf(m[i][r], kLn2Rest, logf(sum)));
                l[i][r] = sum;
                scale_row(o, i, r, 1.f / sum);
            }
    }
    // What rounding took from lse.
    __device__ __forceinline__ float rest(int i, int r, float lse) const {
        return static_cast<float>(m[i][r] * M_LN2 + precise_log(l[i][r]) - lse);
    }
};

template <int HS>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ ForwardArgs<float, float> args) {
#if __CUDA_ARCH__ >= 800
    using Tiles = ForwardTiles<HS>;
    constexpr int Br = Tiles::Br;
    constexpr int Bc = Tiles::Bc;
    constexpr int Sub = Tiles::Sub;
    constexpr int M = kWarpTiles<HS>;
    using KV = Stream<HS, Bc, kThreads>;
    const Problem<float>& p = args.p;
    extern __shared__ __align__(256) unsigned char smem[];
    const KV kv{smem};

    __shared__ WorkTile w;  // the loops leave no register for it
    if (threadIdx.x == 0)
        w = work_tile(p, TileOrder::last_to_first);
    __syncthreads();
    const int warp_row = threadIdx.x / 32 * 16 * M;
    const int lane = threadIdx.x % 32;
    // The warp's first query: a function, as in dq_kernel.
    auto first_q = [&] { return w.tile * Br + warp_row; };
    const int k_tiles = visible_tiles<Br, Bc>(p, w.tile);

    auto copy_kv = [&](int j) {
        if (j < 0)
            return;
        kv.copy(p.k, p.v, w, j * Bc, p.Tk);
        cp_async_commit();
    };
    copy_kv(k_tiles - 1);

    // Q's hi part goes to registers, and the first tile of keys takes its place in shared memory.
    uint32_t q_hi[HS / 16][M][4];
    __shared__ float q_unit[kWarps];  // the loop leaves no register for it
    {
        unsigned char* rows = smem + warp_row * HS * kHalfBytes;
        q_unit[threadIdx.x / 32] = keep_rows<HS, 16 * M, Tiles::QLo>(
            rows, w.head<HS>(p.q), p.q.token_stride, first_q(), p.Tq);
        __syncwarp();
        for (int kk = 0; kk < HS / 16; kk++)
            load_a<HS>(q_hi[kk], smem_address(rows), kk * 16);
    }
    const uint32_t q_lo_tile = smem_address(smem) + Tiles::QLo + warp_row * HS * kHalfBytes;

    float o[M][HS / 8][4] = {};
    Softmax<HS> softmax;
    __shared__ Excess<M> l_excess[kThreads];
    l_excess[threadIdx.x] = Excess<M>{};

    // Tile j of keys, from the last to the first:
    //   split K(j), V(j) · start copying K(j−1), V(j−1) · for 32 keys at a time: S · mask · P, l ·
    //   split P · O += P V
    for (int j = k_tiles - 1; j >= 0; j--) {
        const auto largest = kv.split_tiles();
        copy_kv(j - 1);
        const int k_exponent = exponent_for(largest.x);
        const int v_exponent = exponent_for(largest.y);
        __syncthreads();  // tile j is there for all
        // Not 0, whatever underflows, because the mask's −∞ times it must stay −∞.
        const float s_unit = fmaxf(
            FLT_MIN, p.scale_log2 * q_unit[opaque_thread_idx() / 32] * power_of_two(-k_exponent));
        const float o_unit = power_of_two(-v_exponent - kPExponent);
#pragma unroll 1  // it would stay a loop anyway, but with its instructions in another order
        for (int sub = Bc - Sub; sub >= 0; sub -= Sub) {
            const int k0 = j * Bc + sub;
            // The first row that sees key k0, counted from the warp's first. It is negative if rows
            // before the warp's see it, too. Row first_row + i is the first that sees key k0 + i.
            const int first_row = k0 - p.shift - first_q();
            const bool none_visible = k0 >= p.Tk || first_row > 16 * M - 1;
            if (none_visible)
                continue;

            const auto k_tile = kv.x_tile().at(sub * HS * kHalfBytes);
            const auto v_tile = kv.y_tile().at(sub * HS * kHalfBytes);

            auto step = [&](auto masked) {
                float s[M][Sub / 8][4] = {};
                multiply_qk<HS>(s, q_hi, q_lo_tile, k_tile);

                if constexpr (decltype(masked)::value) {
                    const int lane = opaque_thread_idx() % 32;
                    for (int i = 0; i < M; i++)
                        for (int e = 0; e < 4; e++) {
                            const int row = 16 * i + e / 2 * 8 + lane / 4;  // of the warp's
                            // How many columns this row sees, counted from this lane's first.
                            const int visible = min(p.Tk - k0, row + 1 - first_row) - lane % 4 * 2;
                            for (int n = 0; n < Sub / 8; n++)
                                if (8 * n + e % 2 >= visible)
                                    s[i][n][e] = -INFINITY;
                        }
                }
                softmax.exponentials(s, o, s_unit, l_excess);

                uint32_t p_hi[Sub / 16][M][4];
                uint32_t p_lo[Sub / 16][M][4];
                pack_a(p_hi, p_lo, s, kPScale);
                add_ab<HS, Sub>(o, p_hi, p_lo, v_tile, o_unit);
            };
            const bool row_0_sees_all = first_row + Sub - 1 <= 0;
            const bool some_hidden = k0 + Sub > p.Tk || !row_0_sees_all;
            if (some_hidden)
                step(std::true_type{});
            else
                step(std::false_type{});
        }
    }

    float lse[M][2];
    softmax.finish(o, lse);
    const int q0 = w.tile * Br;
    const int lane_q = first_q() + lane / 4;  // this lane's first query
    for (int i = 0; i < M; i++)
        for (int r = 0; r < 2; r++) {
            const int t = lane_q + 16 * i + 8 * r;
            if (lane % 4 > 0 || t >= p.Tq)
                continue;
            w.stats(args.lse)[t] = lse[i][r];
            if (args.lse_rest.ptr)
                w.stats(args.lse_rest)[t] = softmax.rest(i, r, lse[i][r]);
        }
    store_rows<HS>(o, warp_row, w.head<HS>(args.out) + q0 * args.out.token_stride,
                   args.out.token_stride, p.Tq - q0);
#endif
}

// -------------------------------------------------------------------------------------------------
// Backward

struct BackwardArgs {
    Problem<float> p;
    HeadsView<const float> dout;
    HeadsView<const float> out;
    RowStatsView<const float> lse;
    RowStatsView<const float> lse_rest;  // null only in a call with all of its rows' keys
    LseD* lse_D;                         // (B, NH, Tq); D has been multiplied by the query's factor
    // (B, NH, Tq): 2^(lse_log2 − log2(e)·lse), for what lse_log2 has no bits for. P should be
    // multiplied by it. Instead dq_kernel multiplies D by it, and dkdv_kernel dO. Then dV = Pᵀ dO
    // and dS = P∘(dO Vᵀ − D) come out the same.
    float* factors;
    HeadsView<float> dq;
    HeadsView<float> dk;
    HeadsView<float> dv;
};

// Sums of P are integers in units of 2^-30, because a float would lose what is small beside 1.
constexpr uint32_t kPSumOne = 1 << 30;

// What a row's dS and P add up to beyond 0 and 1. P's excess is a relative error, so log2(e)·lse is
// off by log2(e) times as much.
struct RowError {
    float dS;
    float P;
};
// Finds it from the sums of this lane's columns.
__device__ __forceinline__ RowError error_of_row(float dS_sum, uint32_t P_sum) {
    // quad_sum() of both, interleaved
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
        dS_sum += __shfl_xor_sync(~0u, dS_sum, lanes);
        P_sum += __shfl_xor_sync(~0u, P_sum, lanes);
    }
    const int excess = static_cast<int>(P_sum - kPSumOne);
    return {.dS = dS_sum, .P = static_cast<float>(excess) / kPSumOne};
}

// Splits Q and dO of the warp's rows into shared memory and finds their units, log2(e)·lse and D.
// For D, which is the diagonal of dO Oᵀ, O is there first, in Q's place.
template <int HS, int M, class FirstRow>
__device__ __forceinline__ void load_rows(float& q_unit, float& do_unit, float (&lse_log2)[M][2],
                                          float (&D)[M][2], unsigned char* q_rows,
                                          const BackwardArgs& args, const WorkTile& w,
                                          FirstRow first_q) {
    constexpr int Rows = 16 * M;
    constexpr int Lo = DqTiles<HS>::Lo;
    unsigned char* const do_rows = q_rows + DqTiles<HS>::Do;
    const Problem<float>& p = args.p;
    const PairTile<Lo> q_tile{smem_address(q_rows)};
    const PairTile<Lo> do_tile = q_tile.at(DqTiles<HS>::Do);
    const int lane = threadIdx.x % 32;
    // In an 8×8 block lane 4·g + g/2 has the diagonal element of row g. It is the (g % 2)-th of the
    // lane's two.
    const int g = lane / 4;
    const int diagonal_lane = 4 * g + g / 2;

    do_unit = keep_rows<HS, Rows, Lo>(do_rows, w.head<HS>(args.dout), args.dout.token_stride,
                                      first_q(), p.Tq);
    float do_o[M][2 * M][4] = {};  // dO Oᵀ
    const float do_o_unit =
        do_unit * keep_rows<HS, Rows, Lo>(q_rows, w.head<HS>(args.out), args.out.token_stride,
                                          first_q(), p.Tq);
    __syncwarp();
    // out is never null, but the branch keeps 8 bytes from spilling.
    if (args.out.ptr)
        multiply_abt<HS, 1>(do_o, do_tile, q_tile);
    __syncwarp();  // Q takes O's place
    q_unit = keep_rows<HS, Rows, Lo>(q_rows, w.head<HS>(p.q), p.q.token_stride, first_q(), p.Tq);
    __syncwarp();

    for (int i = 0; i < M; i++)
        for (int r = 0; r < 2; r++) {
            const int t = first_q() + 16 * i + 8 * r + lane / 4;
            // An infinite lse makes P 0 in a row past Tq. S is 0 there, so that with a finite lse
            // P = e^−lse could be infinite and spoil the scale that the warp's rows share.
            lse_log2[i][r] = t < p.Tq ? w.stats(args.lse)[t] * kLog2e : INFINITY;

            // this lane's two elements of the 8×8 block whose rows and columns begin at 16·i + 8·r
            const float* block = do_o[i][2 * i + r] + 2 * r;
            const float mine = g % 2 ? block[1] : block[0];
            D[i][r] = do_o_unit * __shfl_sync(~0u, mine, diagonal_lane);
        }
}

// Adds a thread's pieces of a tile of K to its part of the sum of all keys.
template <int N>
__device__ __forceinline__ void add_keys(float4* k_sums, const float4 (&k)[N]) {
    float4 sum = k_sums[opaque_thread_idx()];
    for (const float4& x : k) {
        sum.x += x.x;
        sum.y += x.y;
        sum.z += x.z;
        sum.w += x.w;
    }
    k_sums[opaque_thread_idx()] = sum;
}
// The mean of the keys that have passed by, in this lane's columns of an accumulator. The threads
// have summed in parts: k_sums is kThreads / (HS / 4) rows of HS floats.
template <int HS>
__device__ __forceinline__ void mean_key(float2 (&k_mean)[HS / 8], const float4* k_sums, int keys) {
    for (int n = 0; n < HS / 8; n++) {
        const float2* columns = reinterpret_cast<const float2*>(k_sums) + 4 * n + threadIdx.x % 4;
        k_mean[n] = {0.f, 0.f};
        for (int i = 0; i < kThreads / (HS / 4); i++) {
            k_mean[n].x += columns[i * HS / 2].x;
            k_mean[n].y += columns[i * HS / 2].y;
        }
        k_mean[n].x /= keys;
        k_mean[n].y /= keys;
    }
}

// The rows' errors, once all keys are summed: corrects dq, which it also scales, and writes D, lse
// and P's factor for dkdv_kernel.
template <int HS, int M>
__device__ __forceinline__ void correct_rows(float (&dq)[M][HS / 8][4], float (&D)[M][2],
                                             const float (&lse_log2)[M][2],
                                             const float (&dS_sum)[M][2],
                                             const uint32_t (&P_sum)[M][2], const float4* k_sums,
                                             const BackwardArgs& args, const WorkTile& w) {
    constexpr int Br = DqTiles<HS>::Br;
    constexpr int Bc = DqTiles<HS>::Bc;
    constexpr int Rows = 16 * M;
    const Problem<float>& p = args.p;

    // dq has D's error times the weighted mean key Σ P K. The plain mean stands in for it, to save
    // a product.
    float2 k_mean[HS / 8];
    const bool whole_row = !args.lse_rest.ptr;
    if (whole_row) {
        // Counted again, because k_tiles would take a register from the loop.
        const int keys = min(visible_tiles<Br, Bc>(p, w.tile) * Bc, p.Tk);
        mean_key<HS>(k_mean, k_sums, keys);
    }
    for (int i = 0; i < M; i++)
        for (int r = 0; r < 2; r++) {
            const unsigned thread = opaque_thread_idx();
            const int t = w.tile * Br + thread / 32 * Rows + 16 * i + 8 * r + thread % 32 / 4;
            const int row = min(t, p.Tq - 1);
            const size_t at = static_cast<size_t>(w.bh) * p.Tq + row;

            float change;  // of log2(e)·lse
            if (whole_row) {
                const RowError error = error_of_row(dS_sum[i][r], P_sum[i][r]);
                D[i][r] += error.dS;
                change = error.P * kLog2e;
                for (int n = 0; n < HS / 8; n++) {
                    dq[i][n][2 * r] -= error.dS * k_mean[n].x;
                    dq[i][n][2 * r + 1] -= error.dS * k_mean[n].y;
                }
            } else {
                // What rounding took from lse_log2, from log2(e) and from lse.
                const float lse = w.stats(args.lse)[row];
                const float rest = w.stats(args.lse_rest)[row];
                change = fmaf(lse, kLog2e, -lse_log2[i][r]) + (lse * kLog2eRest + rest * kLog2e);
            }

            const float correction = 1.f - kLn2 * change;  // 2^−change, of P and so of dq
            scale_row(dq, i, r, p.scale * correction);
            if (thread % 4 == 0 && t < p.Tq) {  // for dkdv_kernel
                const float corrected = lse_log2[i][r] + change;
                const float lost = (lse_log2[i][r] - corrected) + change;  // to rounding
                const float factor = 1.f - kLn2 * lost;                    // 2^−lost
                args.lse_D[at] = {.lse_log2 = corrected, .D = D[i][r] * factor};
                args.factors[at] = factor;
            }
        }
}

template <int HS>
__global__ void __launch_bounds__(kThreads, 2)
    dq_kernel(const __grid_constant__ BackwardArgs args) {
#if __CUDA_ARCH__ >= 800
    using Tiles = DqTiles<HS>;
    constexpr int Br = Tiles::Br;
    constexpr int Bc = Tiles::Bc;
    constexpr int M = kWarpTiles<HS>;
    constexpr int Rows = 16 * M;
    using KV = Stream<HS, Bc, kThreads>;
    const Problem<float>& p = args.p;
    extern __shared__ __align__(256) unsigned char smem[];
    const KV kv{smem + Tiles::Kv};

    __shared__ WorkTile w;  // the loops leave no register for it
    if (threadIdx.x == 0)
        w = work_tile(p, TileOrder::last_to_first);
    __syncthreads();
    const int warp_row = threadIdx.x / 32 * Rows;
    const int lane = threadIdx.x % 32;
    // The warp's first query: a function, because a variable would spill at HS 64.
    auto first_q = [&] { return w.tile * Br + static_cast<int>(opaque_thread_idx() / 32 * Rows); };
    const int k_tiles = visible_tiles<Br, Bc>(p, w.tile);

    auto copy_kv = [&](int j) {
        kv.copy(p.k, p.v, w, j * Bc, p.Tk);
        cp_async_commit();
    };
    copy_kv(0);

    unsigned char* q_rows = smem + warp_row * HS * kHalfBytes;
    const PairTile<Tiles::Lo> q_tile{smem_address(q_rows)};
    const PairTile<Tiles::Lo> do_tile = q_tile.at(Tiles::Do);
    float q_unit;
    float do_unit;
    float lse_log2[M][2];
    float D[M][2];
    load_rows<HS>(q_unit, do_unit, lse_log2, D, q_rows, args, w, first_q);

    // Over this lane's columns. P's is in units of 1 / kPSumOne.
    float dS_sum[M][2] = {};
    uint32_t P_sum[M][2] = {};
    // Each thread's part of the sum of all keys. The loop leaves no registers for it.
    __shared__ float4 k_sums[kThreads];
    k_sums[threadIdx.x] = float4{0.f, 0.f, 0.f, 0.f};
    float dq[M][HS / 8][4] = {};

    // Tile j of keys:
    //   split K(j), V(j) · start copying K(j+1), V(j+1) · S · dP · P, dS and their sums · split dS
    //   · dQ += dS K
    for (int j = 0; j < k_tiles; j++) {
        const auto largest =
            kv.split_tiles([&](const auto& k) { add_keys(k_sums, k); }, [](int) { return 1.f; });
        if (j + 1 < k_tiles)
            copy_kv(j + 1);
        __syncthreads();  // tile j is there for all
        const int k0 = j * Bc;
        const bool none_visible = k0 > first_q() + Rows - 1 + p.shift;
        if (none_visible)
            continue;

        const float k_unit = unit_for(largest.x);
        const float s_unit = p.scale_log2 * q_unit * k_unit;
        const float dp_unit = do_unit * unit_for(largest.y);

        auto step = [&](auto masked) {
            constexpr bool Masked = decltype(masked)::value;
            float s[M][Bc / 8][4] = {};
            float dp[M][Bc / 8][4] = {};
            float P_tile[M][2] = {};
            float dS_tile[M][2] = {};
            multiply_abt<HS, 2>(s, q_tile, kv.x_tile());
            multiply_abt<HS, 1>(dp, do_tile, kv.y_tile());

            const int warp_q0 = first_q();
            for (int i = 0; i < M; i++)
                for (int e = 0; e < 4; e++) {
                    const int row = fragment_row(warp_q0 + 16 * i, e, lane);
                    // How many columns this row sees, counted from this lane's first.
                    const int visible = visible_keys(row, p.Tk, p.shift) - k0 - lane % 4 * 2;
                    for (int n = 0; n < Bc / 8; n++) {
                        float P = exp2_approx(fmaf(s[i][n][e], s_unit, -lse_log2[i][e / 2]));
                        if (Masked && 8 * n + e % 2 >= visible)
                            P = 0.f;
                        s[i][n][e] = P * fmaf(dp[i][n][e], dp_unit, -D[i][e / 2]);
                        P_tile[i][e / 2] += P;
                        dS_tile[i][e / 2] += s[i][n][e];
                    }
                }
            for (int i = 0; i < M; i++)
                for (int r = 0; r < 2; r++) {
                    P_sum[i][r] += __float2uint_rn(P_tile[i][r] * kPSumOne);
                    dS_sum[i][r] += dS_tile[i][r];
                }

            const uint32_t dS_largest = warp_largest(s);
            uint32_t hi[Bc / 16][M][4];
            uint32_t lo[Bc / 16][M][4];
            pack_a(hi, lo, s, factor_for(dS_largest));
            add_ab<HS, Bc>(dq, hi, lo, kv.x_tile(), unit_for(dS_largest) * k_unit);
        };
        const bool some_hidden = k0 + Bc > p.Tk || k0 + Bc - 1 > first_q() + p.shift;
        if (some_hidden)
            step(std::true_type{});
        else
            step(std::false_type{});
    }

    correct_rows<HS>(dq, D, lse_log2, dS_sum, P_sum, k_sums, args, w);
    store_rows<HS>(dq, warp_row, w.head<HS>(args.dq) + w.tile * Br * args.dq.token_stride,
                   args.dq.token_stride, p.Tq - w.tile * Br);
#endif
}

// What undoes the scale of a warp's rows.
struct alignas(8) Units {
    float k;
    float v;
};

template <int HS>
__global__ void __launch_bounds__(kThreads, 2)
    dkdv_kernel(const __grid_constant__ BackwardArgs args) {
#if __CUDA_ARCH__ >= 800
    using Tiles = DkdvTiles<HS>;
    constexpr int Br = Tiles::Br;
    constexpr int Bc = Tiles::Bc;
    constexpr int M = kWarpTiles<HS>;
    constexpr int Rows = 16 * M;
    using QdO = Stream<HS, Br, kThreads>;
    const Problem<float>& p = args.p;
    extern __shared__ __align__(256) unsigned char smem[];
    const QdO q_do{smem + Tiles::QDo};
    auto* const row_stats = reinterpret_cast<typename Tiles::RowStats*>(smem + Tiles::Stats);

    __shared__ WorkTile w;  // the loops leave no register for it
    if (threadIdx.x == 0)
        w = work_tile(p, TileOrder::first_to_last);
    __syncthreads();
    const int warp_row = threadIdx.x / 32 * Rows;
    const int lane = threadIdx.x % 32;
    // The warp's first key: a function, because a variable would spill at HS 64.
    auto first_k = [&] { return w.tile * Bc + warp_row; };
    // the first query that sees key k0 is k0 − shift
    const int first_tile = max(0, w.tile * Bc - p.shift) / Br;
    const int q_tiles = ceil_div<Br>(p.Tq);
    // Where the queries of tile j begin in row_stats, which has two stages.
    const auto first_stat = [](int j) { return (j & 1) * Br; };

    // Queries past Tq arrive as zeros, as do their dO, lse and D. So their P is 1, not 0 as in
    // dq_kernel, but it adds nothing. Keys past Tk are masked, because their dS could spoil the
    // scale that the warp's keys share.
    auto copy_q = [&](int j) {
        const int row = j * Br + threadIdx.x;
        q_do.copy(p.q, args.dout, w, j * Br, p.Tq);
        if (threadIdx.x < Br) {
            const size_t at = static_cast<size_t>(w.bh) * p.Tq + row;
            const uint32_t i = first_stat(j) + threadIdx.x;
            cp_async_8(smem_address(row_stats->lse_D) + i * 8, args.lse_D + at, row < p.Tq);
            cp_async_4(smem_address(row_stats->factors) + i * 4, args.factors + at, row < p.Tq);
        }
        cp_async_commit();
    };
    copy_q(first_tile);

    unsigned char* k_rows = smem + warp_row * HS * kHalfBytes;
    __shared__ Units units[kWarps];  // the loop leaves no register for them
    {
        constexpr int Lo = Tiles::Lo;
        const float k_unit =
            keep_rows<HS, Rows, Lo>(k_rows, w.head<HS>(p.k), p.k.token_stride, first_k(), p.Tk);
        const float v_unit = keep_rows<HS, Rows, Lo>(k_rows + Tiles::V, w.head<HS>(p.v),
                                                     p.v.token_stride, first_k(), p.Tk);
        units[threadIdx.x / 32] = {.k = k_unit, .v = v_unit};
        __syncwarp();
    }
    const PairTile<Tiles::Lo> k_tile{smem_address(k_rows)};
    const PairTile<Tiles::Lo> v_tile = k_tile.at(Tiles::V);
    float dk[M][HS / 8][4] = {};
    float dv[M][HS / 8][4] = {};

    // Tile j of queries; S, P, dP and dS are transposed:
    //   split Q(j), dO(j) · start copying Q(j+1), dO(j+1) · S · mask · P · split P · dV += Pᵀ dO ·
    //   dP · dS · split dS · dK += dSᵀ Q
    for (int j = first_tile; j < q_tiles; j++) {
        const auto largest = q_do.split_tiles(
            [](const auto&) {}, [&](int row) { return row_stats->factors[first_stat(j) + row]; });
        if (j + 1 < q_tiles)
            copy_q(j + 1);
        const int q_exponent = exponent_for(largest.x);
        const int do_exponent = exponent_for(largest.y);
        __syncthreads();  // tile j is there for all

        const int keys = p.Tk - first_k();  // from the warp's first on
        // The first query that sees the warp's first key, counted from the tile's first. It is
        // negative if queries before the tile see it, too. Query first_query + i is the first that
        // sees the warp's key i.
        const int first_query = first_k() - p.shift - j * Br;
        const bool none_visible = first_query > Br - 1;
        if (none_visible)
            continue;

        auto step = [&](auto masked) {
            const float q_unit = power_of_two(-q_exponent);
            const LseDPair* lse_D =
                reinterpret_cast<const LseDPair*>(row_stats->lse_D) + first_stat(j) / 2;
            float s[M][Br / 8][4] = {};
            float dp[M][Br / 8][4] = {};
            uint32_t hi[Br / 16][M][4];  // hi and lo: P, then dS
            uint32_t lo[Br / 16][M][4];

            multiply_abt<HS, 2>(s, k_tile, q_do.x_tile());
            const float s_unit =
                fmaxf(FLT_MIN, p.scale_log2 * q_unit * units[opaque_thread_idx() / 32].k);
            if constexpr (decltype(masked)::value) {
                for (int i = 0; i < M; i++)
                    for (int e = 0; e < 4; e++) {
                        const int key = fragment_row(16 * i, e, lane);  // of the warp's
                        // How many columns do not see this key, counted from this lane's first.
                        const int hidden = key < keys ? first_query + key - lane % 4 * 2 : Br;
                        for (int n = 0; n < Br / 8; n++)
                            if (8 * n + e % 2 < hidden)
                                s[i][n][e] = -INFINITY;
                    }
            }
            for (int n = 0; n < Br / 8; n++) {
                const LseDPair c = lse_D[4 * n + lane % 4];  // of this lane's columns e = 0 and 1
                for (int i = 0; i < M; i++)
                    for (int e = 0; e < 4; e++)
                        s[i][n][e] =
                            exp2_approx(fmaf(s[i][n][e], s_unit, -c.columns[e % 2].lse_log2));
            }

            pack_a(hi, lo, s, kPScale);
            add_ab<HS, Br>(dv, hi, lo, q_do.y_tile(), power_of_two(-do_exponent - kPExponent));

            multiply_abt<HS, 1>(dp, v_tile, q_do.y_tile());
            const float dp_unit = units[opaque_thread_idx() / 32].v * power_of_two(-do_exponent);
            for (int n = 0; n < Br / 8; n++) {
                const LseDPair c = lse_D[4 * n + lane % 4];
                for (int i = 0; i < M; i++)
                    // P is joined from its halves, because its registers were needed. So P and dS
                    // are still times 2^14 here.
                    for (int r = 0; r < 2; r++) {
                        const float2 P =
                            join(hi[n / 2][i][n % 2 * 2 + r], lo[n / 2][i][n % 2 * 2 + r]);
                        dp[i][n][2 * r] = P.x * fmaf(dp[i][n][2 * r], dp_unit, -c.columns[0].D);
                        dp[i][n][2 * r + 1] =
                            P.y * fmaf(dp[i][n][2 * r + 1], dp_unit, -c.columns[1].D);
                    }
            }

            const uint32_t dS_largest = warp_largest(dp);
            pack_a(hi, lo, dp, factor_for(dS_largest));
            add_ab<HS, Br>(dk, hi, lo, q_do.x_tile(),
                           power_of_two(-exponent_for(dS_largest) - kPExponent) * q_unit);
        };
        const bool query_0_sees_all = first_query + Rows - 1 <= 0;
        const bool some_hidden = keys < Rows || !query_0_sees_all;
        if (some_hidden)
            step(std::true_type{});
        else
            step(std::false_type{});
    }

    scale(dk, p.scale);
    const int k0 = w.tile * Bc;
    store_rows<HS>(dk, warp_row, w.head<HS>(args.dk) + k0 * args.dk.token_stride,
                   args.dk.token_stride, p.Tk - k0);
    store_rows<HS>(dv, warp_row, w.head<HS>(args.dv) + k0 * args.dv.token_stride,
                   args.dv.token_stride, p.Tk - k0);
#endif
}

// -------------------------------------------------------------------------------------------------
// Launchers

constexpr char kName[] = "flash_fp16x3";

template <class Call>
void check_size(const Call& c) {
    if (std::max(c.s.Tq, c.s.Tk) > INT_MAX / 4)
        throw Error(format(
            "%s: Tq is %d and Tk is %d, but one launch covers at most %d; use shorter sequences",
            kName, c.s.Tq, c.s.Tk, INT_MAX / 4));
}
void forward(const Cuda& dev, const AttentionForward<float>& c) {
    check_size(c);
    const ForwardArgs<float, float> args{
        .p = problem(c), .out = c.out, .lse = c.lse, .lse_rest = c.lse_rest};
    with_head_size(c.s.HS, [&](auto HS) {
        using Tiles = ForwardTiles<HS>;
        launch(dev,
               {.name = kName,
                .HS = HS,
                .tiles = ceil_div(c.s.Tq, Tiles::Br),
                .streamed_rows = c.s.Tk,
                .threads = kThreads,
                .smem = Tiles::Smem},
               forward_kernel<HS>, args);
    });
}
void backward(const Cuda& dev, const AttentionBackward<float>& c) {
    check_size(c);
    LseD* lse_D = static_cast<LseD*>(c.scratch);
    float* factors = reinterpret_cast<float*>(lse_D + c.s.rows());
    const BackwardArgs args{.p = problem(c),
                            .dout = c.dout,
                            .out = c.out,
                            .lse = c.lse,
                            .lse_rest = c.lse_rest,
                            .lse_D = lse_D,
                            .factors = factors,
                            .dq = c.dq,
                            .dk = c.dk,
                            .dv = c.dv};
    with_head_size(c.s.HS, [&](auto HS) {
        using Dq = DqTiles<HS>;
        using Dkdv = DkdvTiles<HS>;
        launch(dev,
               {.name = kName,
                .HS = HS,
                .tiles = ceil_div(c.s.Tq, Dq::Br),
                .streamed_rows = c.s.Tk,
                .threads = kThreads,
                .smem = Dq::Smem},
               dq_kernel<HS>, args);
        launch(dev,
               {.name = kName,
                .HS = HS,
                .tiles = ceil_div(c.s.Tk, Dkdv::Bc),
                .streamed_rows = c.s.Tq,
                .threads = kThreads,
                .smem = Dkdv::Smem},
               dkdv_kernel<HS>, args);
    });
}
size_t scratch_bytes(const AttentionShape& s) {
    return s.rows() * (sizeof(LseD) + sizeof(float));
}

}  // namespace

const AttentionKernel<float> flash_fp16x3 = {
    .name = kName,
    .min_sm = 80,
    .flash = true,
    .supports = {.pieces = true, .lse_rest = true},
    .scratch_bytes = scratch_bytes,
    .unchecked = {.forward = forward,
                  .backward = backward,
                  .forward_fp32 = forward,
                  .backward_fp32 = backward},
};
