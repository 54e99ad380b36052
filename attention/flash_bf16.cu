// Flash attention forward and backward, bf16, mma.sync (sm_80+).
//
// Forward, for one tile of Br query rows against one tile of Bc keys at a time:
//   S  = scale·Q Kᵀ                (Br × Bc, fp32 registers)
//   m' = max(m, rowmax S)
//   P  = exp(S − m')
//   l  = e^{m−m'} l + rowsum P
//   O  = e^{m−m'} O + P V
// and after the last tile:
//   out = O / l
//   lse = m + log l
//
// Backward:
//   D  = rowsum(dO∘O)
//   P  = exp(S − lse)
//   dP = dO Vᵀ
//   dS = P∘(dP − D)
//   dQ = scale·dS K
//   dK = scale·dSᵀ Q
//   dV = Pᵀ dO
//
// New against flash_mma: copies overlap products. cp.async brings tiles to shared memory in two
// stages, with one barrier a stage. A warp owns 32 rows, so that every fragment of the streamed
// operand feeds two MMAs. Otherwise shared-memory bandwidth would be the bound. (In dkdv_kernel at
// HS 128 registers allow only 16 rows.)
//
// Backward is two kernels, and each writes what it owns. So there are no atomics and no fp32 dQ in
// memory, and any order of blocks gives the same bits. dq_kernel keeps queries, streams keys and
// computes D. dkdv_kernel keeps keys and streams queries; it computes Sᵀ and dPᵀ, with keys as
// rows. In both kernels S, P, dP and dS never leave registers, because dS (dSᵀ) is the A operand of
// its product, as P is of P·V. The price is 7 products instead of 5.
//
// Under a causal mask a warp skips tiles in which its rows see nothing, and masks only those that
// the diagonal or the end of the keys crosses.
//
// Writes: forward out and lse, backward dq, dk and dv (every element, in bf16 or fp32).
// Scratch: LseD (B, NH, Tq), which dq_kernel writes for dkdv_kernel.
// Limits: HS in {64, 128}, any T ≥ 1, scale > 0.   Run: ./dev/bench_attention --kernel flash_bf16
#include <cmath>
#include <cstddef>

#include "attention/mma_bf16.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
// kernels have empty bodies there, and what only they use is "never referenced"
#pragma nv_diag_suppress 177
#endif

namespace {

constexpr char kName[] = "flash_bf16";

// -------------------------------------------------------------------------------------------------
// Tiles. A warp owns WarpTiles MMA tiles of 16 rows. Of a stage of Br or Bc rows of the streamed
// operand it works on kSub at a time. Registers decide the sizes: two blocks of 128 threads on an
// SM leave 255 a thread, and the accumulators take up to 192. Shared memory stays under the 99 KB
// that a block may have on sm_86, sm_89 and sm_120.

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kSub = 32;

// Which of the two stages tile j of the streamed operand goes through.
__device__ __forceinline__ int stage_index(int j) {
    return j & 1;
}

template <int HS>
struct ForwardTiles {
    static constexpr int WarpTiles = 2;
    static constexpr int Br = kWarps * WarpTiles * 16;
    // A step takes a whole stage. O and S take 64 registers each at HS 64, and 128 and 32 at HS
    // 128.
    static constexpr int Bc = HS == 64 ? 64 : 32;
    // Where it is not, its fragments are fetched again for every tile of keys.
    static constexpr bool QInRegisters = HS == 64;

    struct SharedMemory {  // 48 KB at HS 64, 64 KB at HS 128
        bf16 q[Br * HS];
        bf16 k[2][Bc * HS];  // two stages
        bf16 v[2][Bc * HS];
    };
};

template <int HS>
struct DqTiles {
    static constexpr int WarpTiles = 2;  // S and dP take 32 registers each
    static constexpr int Br = kWarps * WarpTiles * 16;
    // as large as fits, because each stage costs a barrier
    static constexpr int Bc = HS == 64 ? 128 : 32;
    static constexpr bool QInRegisters = HS == 64;  // and dO

    struct SharedMemory {  // 97 KB at both head sizes
        bf16 q[Br * HS];
        bf16 dout[Br * HS];
        bf16 k[2][Bc * HS];
        bf16 v[2][Bc * HS];
        LseD lse_D[Br];
    };
};

template <int HS>
struct DkdvTiles {
    // dK and dV take 128 registers in all, Sᵀ and dPᵀ of kSub queries 16·WarpTiles each
    static constexpr int WarpTiles = HS == 64 ? 2 : 1;
    static constexpr int Bc = kWarps * WarpTiles * 16;
    static constexpr int Br = HS == 64 ? 128 : 32;  // a stage; registers do not limit it

    struct SharedMemory {  // 98 KB at HS 64, 65 KB at HS 128
        bf16 k[Bc * HS];
        bf16 v[Bc * HS];
        bf16 q[2][Br * HS];
        bf16 dout[2][Br * HS];
        LseDPair lse_D[2 * Br / 2];  // two stages of Br / 2 pairs of queries
    };
};

// -------------------------------------------------------------------------------------------------
// Softmax

// How many keys query `row` sees, counted from this lane's first column in a tile that starts at
// key k0. So the query does not see element e of fragment n if 8·n + e % 2 ≥ visible_columns.
__device__ __forceinline__ int visible_columns(const Problem<bf16>& p, int row, int k0) {
    return visible_keys(row, p.Tk, p.shift) - k0 - (threadIdx.x % 4) * 2;
}

// The online softmax of a warp's rows. This lane has rows lane/4 and lane/4 + 8 of each MMA tile.
// Its m may still be −inf after a tile, because keys come from the last tile to the first, and a
// row may see none of the last ones.
template <int M>
struct Softmax {
    float l[M][2] = {};  // of this lane's columns until finish
    float m[M][2];
    float m_log2[M][2];  // what exponents are relative to: m·scale_log2, or 0 if m is −inf

    __device__ __forceinline__ Softmax() {
        for (int i = 0; i < M; i++)
            for (int r = 0; r < 2; r++)
                m[i][r] = -INFINITY;
    }

    // m keeps the exponentials in range and need not be the maximum. So m, O and l follow the
    // maximum only when some row of the warp has outgrown it by a factor of more than 2^8, which
    // hardly ever happens after the first tile.
    template <int N, int OutN>
    __device__ __forceinline__ void raise_max(float scale_log2, const float (&s)[M][N][4],
                                              float (&o)[M][OutN][4]) {
        float m_new[M][2];
        bool outgrown = false;
        for (int i = 0; i < M; i++)
            for (int r = 0; r < 2; r++) {
                float x = m[i][r];
                for (int n = 0; n < N; n++)
                    x = fmaxf(x, fmaxf(s[i][n][2 * r], s[i][n][2 * r + 1]));
                m_new[i][r] = quad_max(x);
                // −inf − −inf is NaN, hence false
                outgrown |= (m_new[i][r] - m[i][r]) * scale_log2 > 8.f;
            }

        if (__any_sync(~0u, outgrown)) {
            for (int i = 0; i < M; i++)
                for (int r = 0; r < 2; r++) {
                    const float x = m_new[i][r];
                    const float rescale =
                        x == -INFINITY ? 1.f : exp2_approx((m[i][r] - x) * scale_log2);
                    m[i][r] = x;
                    l[i][r] *= rescale;
                    scale_row(o, i, r, rescale);
                }
        }
        for (int i = 0; i < M; i++)
            for (int r = 0; r < 2; r++)
                m_log2[i][r] = m[i][r] == -INFINITY ? 0.f : m[i][r] * scale_log2;
    }

    // Columns [16·kk, 16·kk + 16) of S become P.
    template <int N>
    __device__ __forceinline__ void exponentials(float scale_log2, float (&s)[M][N][4], int kk) {
        for (int i = 0; i < M; i++)
            for (int n = 2 * kk; n < 2 * kk + 2; n++)
                for (int e = 0; e < 4; e++) {
                    s[i][n][e] = exp2_approx(s[i][n][e] * scale_log2 - m_log2[i][e / 2]);
                    l[i][e / 2] += s[i][n][e];
                }
    }

    // Divides O by l. Writes lse.
    template <int OutN>
    __device__ __forceinline__ void finish(float scale_log2, float (&o)[M][OutN][4],
                                           float (&lse)[M][2]) {
        for (int i = 0; i < M; i++)
            for (int r = 0; r < 2; r++) {
                const float sum = quad_sum(l[i][r]);
                lse[i][r] = (m[i][r] * scale_log2 + __log2f(sum)) * static_cast<float>(M_LN2);
                scale_row(o, i, r, __fdividef(1.f, sum));
            }
    }
};

// -------------------------------------------------------------------------------------------------
// Forward

template <int HS, class Y>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ ForwardArgs<bf16, Y> args) {
#if __CUDA_ARCH__ >= 800
    using Tiles = ForwardTiles<HS>;
    constexpr int Br = Tiles::Br;
    constexpr int Bc = Tiles::Bc;
    constexpr int M = Tiles::WarpTiles;
    constexpr int RowBytes = HS * sizeof(bf16);
    constexpr int TileBytes = Bc * RowBytes;  // of K or V
    const Problem<bf16>& p = args.p;
    extern __shared__ __align__(256) unsigned char smem[];
    using SharedMemory = typename Tiles::SharedMemory;
    const uint32_t q_smem = smem_address(smem);
    const uint32_t k_smem = q_smem + offsetof(SharedMemory, k);
    const uint32_t v_smem = q_smem + offsetof(SharedMemory, v);

    const WorkTile w = work_tile(p, TileOrder::last_to_first);
    const int q0 = w.tile * Br;
    const int warp_row = threadIdx.x / 32 * 16 * M;  // the warp's first row of the tile
    const int lane = threadIdx.x % 32;
    const int warp_q0 = q0 + warp_row;
    const int last_q = warp_q0 + 16 * M - 1;  // the warp's
    const bf16* q = w.head<HS>(p.q);
    const bf16* k = w.head<HS>(p.k);
    const bf16* v = w.head<HS>(p.v);
    // Keys before k_end are those that the last query sees. (visible_tiles() is the same, but here
    // it costs more instructions.)
    const int k_end = min(p.Tk, min(q0 + Br, p.Tq) + p.shift);
    const int k_tiles = ceil_div<Bc>(k_end);

    auto load_kv = [&](int j) {
        load_tile<HS, Bc, kThreads>(k_smem + stage_index(j) * TileBytes, k, p.k.token_stride,
                                    j * Bc, p.Tk);
        load_tile<HS, Bc, kThreads>(v_smem + stage_index(j) * TileBytes, v, p.v.token_stride,
                                    j * Bc, p.Tk);
    };
    load_tile<HS, Br, kThreads>(q_smem, q, p.q.token_stride, q0, p.Tq);
    cp_async_commit();
    load_kv(k_tiles - 1);
    cp_async_commit();

    RowOperand<HS, M, Tiles::QInRegisters> q_rows;
    float o[M][HS / 8][4] = {};
    Softmax<M> softmax;
    if constexpr (Tiles::QInRegisters) {
        cp_async_wait<1>();
        __syncthreads();
        for (int kk = 0; kk < HS / 16; kk++)
            q_rows.load(q_smem + warp_row * RowBytes, kk);
    }

    // Tile j of keys: S; mask; raise m; P and O += P V, a k-step at a time.
    auto step = [&](int j, auto masked) {
        float s[M][Bc / 8][4] = {};
        const uint32_t k_tile = k_smem + stage_index(j) * TileBytes;
        const uint32_t v_tile = v_smem + stage_index(j) * TileBytes;
#pragma unroll  // or else the compiler unrolls later, when it has already ordered the loads
        for (int kk = 0; kk < HS / 16; kk++)
            multiply_abt<HS>(s, q_rows.kept_or_loaded(q_smem + warp_row * RowBytes, kk), k_tile,
                             kk * 16);

        if constexpr (decltype(masked)::value) {
            for (int i = 0; i < M; i++)
                for (int e = 0; e < 4; e++) {
                    const int row = fragment_row(warp_q0 + 16 * i, e, lane);
                    const int visible = visible_columns(p, row, j * Bc);
                    for (int n = 0; n < Bc / 8; n++)
                        if (8 * n + e % 2 >= visible)
                            s[i][n][e] = -INFINITY;
                }
        }

        softmax.raise_max(p.scale_log2, s, o);
        // [quote]
        // a k-step's MMAs of P·V overlap the next one's exponentials
        for (int kk = 0; kk < Bc / 16; kk++) {
            softmax.exponentials(p.scale_log2, s, kk);
            uint32_t a[M][4];
            pack_a(a, s, kk);
            add_ab<HS>(o, a, v_tile, 16 * kk);
        }
        // [end]
    };

    for (int j = k_tiles - 1; j >= 0; j--) {
        cp_async_wait<0>();
        // tile j is there for all, and all are done with tile j + 1, whose stage the next load
        // fills
        __syncthreads();
        if (j > 0)
            load_kv(j - 1);
        cp_async_commit();

        const int k0 = j * Bc;
        const bool none_visible = k0 > last_q + p.shift;
        if (none_visible)
            continue;
        const bool some_hidden = k0 + Bc > p.Tk || k0 + Bc - 1 > warp_q0 + p.shift;
        if (some_hidden)
            step(j, std::true_type{});
        else
            step(j, std::false_type{});
    }

    float lse[M][2];
    softmax.finish(p.scale_log2, o, lse);
    // by way of the warp's rows of Q, at the start of smem
    store_rows<HS>(o, smem, warp_row, w.head<HS>(args.out) + q0 * args.out.token_stride,
                   args.out.token_stride, p.Tq - q0);
    // after out: with lse first the compiler makes the loop above 2 % slower
    for (int i = 0; i < M; i++)
        for (int r = 0; r < 2; r++) {
            const int row = fragment_row(warp_q0 + 16 * i, 2 * r, lane);
            if (lane % 4 == 0 && row < p.Tq)
                w.stats(args.lse)[row] = lse[i][r];
        }
#endif
}

// -------------------------------------------------------------------------------------------------
// Backward

template <class Y>
struct BackwardArgs {
    Problem<bf16> p;
    HeadsView<const bf16> dout;
    HeadsView<const bf16> out;
    RowStatsView<const float> lse;
    LseD* lse_D;  // (B, NH, Tq)
    HeadsView<Y> dq;
    HeadsView<Y> dk;
    HeadsView<Y> dv;
};

// Writes lse_D of the warp's rows, for this kernel to shared memory and for dkdv_kernel to
// args.lse_D. A lane loads the lse of one row. For D, HS/8 lanes share a row of dO and O, 8
// elements each. Rows past Tq get lse = +inf, so that their P is 0, and the last row's D.
template <int HS, int M, class Args>
__device__ __forceinline__ void find_lse_D(const Args& args, const WorkTile& w, const bf16* dout,
                                           LseD* lse_D_smem, int q0, int warp_row) {
    constexpr int Pieces = HS / 8;  // of 16 bytes in a row, one a lane
    constexpr int RowsAtOnce = 32 / Pieces;
    constexpr int N = 16 * M / RowsAtOnce;
    const Problem<bf16>& p = args.p;
    const int lane = threadIdx.x % 32;
    const int lse_row = warp_row + lane % (16 * M);  // whose lse this lane loads
    const int t = q0 + lse_row;
    const float lse_log2 = t < p.Tq ? w.stats(args.lse)[t] * kLog2e : INFINITY;
    const bf16* out = w.head<HS>(args.out);

    // all loads come before the first sum, so that their latency is paid once
    uint4 x[N];
    uint4 y[N];
    for (int i = 0; i < N; i++) {
        const int query = q0 + warp_row + i * RowsAtOnce + lane / Pieces;
        const size_t token = min(query, p.Tq - 1);
        const size_t column = (lane % Pieces) * 8;
        x[i] = *reinterpret_cast<const uint4*>(dout + token * args.dout.token_stride + column);
        y[i] = *reinterpret_cast<const uint4*>(out + token * args.out.token_stride + column);
    }
    for (int i = 0; i < N; i++) {
        float D = dot8(x[i], y[i]);
        for (int lanes = 1; lanes < Pieces; lanes *= 2)
            D += __shfl_xor_sync(~0u, D, lanes);
        if (lane % Pieces == 0)
            lse_D_smem[warp_row + i * RowsAtOnce + lane / Pieces].D = D;
    }
    __syncwarp();

    lse_D_smem[lse_row].lse_log2 = lse_log2;
    if (t < p.Tq)
        args.lse_D[static_cast<size_t>(w.bh) * p.Tq + t] =
            LseD{.lse_log2 = lse_log2, .D = lse_D_smem[lse_row].D};
    __syncwarp();
}

template <int HS, class Y>
__global__ void __launch_bounds__(kThreads, 2)
    dq_kernel(const __grid_constant__ BackwardArgs<Y> args) {
#if __CUDA_ARCH__ >= 800
    using Tiles = DqTiles<HS>;
    constexpr int Br = Tiles::Br;
    constexpr int Bc = Tiles::Bc;
    constexpr int M = Tiles::WarpTiles;
    constexpr int RowBytes = HS * sizeof(bf16);
    constexpr int TileBytes = Bc * RowBytes;  // of K or V
    const Problem<bf16>& p = args.p;
    extern __shared__ __align__(256) unsigned char smem[];
    using SharedMemory = typename Tiles::SharedMemory;
    const uint32_t q_smem = smem_address(smem);
    const uint32_t do_smem = q_smem + offsetof(SharedMemory, dout);
    const uint32_t k_smem = q_smem + offsetof(SharedMemory, k);
    const uint32_t v_smem = q_smem + offsetof(SharedMemory, v);
    LseD* lse_D_smem = reinterpret_cast<SharedMemory*>(smem)->lse_D;

    __shared__ WorkTile w;  // the loops leave no register for it
    if (threadIdx.x == 0)
        w = work_tile(p, TileOrder::last_to_first);
    __syncthreads();
    const int q0 = w.tile * Br;
    const int warp_row = threadIdx.x / 32 * 16 * M;  // the warp's first row of the tile
    const int lane = threadIdx.x % 32;
    const int warp_q0 = q0 + warp_row;
    const int last_q = warp_q0 + 16 * M - 1;  // the warp's
    const bf16* dout = w.head<HS>(args.dout);
    const int k_tiles = visible_tiles<Br, Bc>(p, w.tile);

    auto load_kv = [&](int j) {
        load_tile<HS, Bc, kThreads>(k_smem + stage_index(j) * TileBytes, w.head<HS>(p.k),
                                    p.k.token_stride, j * Bc, p.Tk);
        load_tile<HS, Bc, kThreads>(v_smem + stage_index(j) * TileBytes, w.head<HS>(p.v),
                                    p.v.token_stride, j * Bc, p.Tk);
    };
    load_tile<HS, Br, kThreads>(q_smem, w.head<HS>(p.q), p.q.token_stride, q0, p.Tq);
    load_tile<HS, Br, kThreads>(do_smem, dout, args.dout.token_stride, q0, p.Tq);
    cp_async_commit();
    load_kv(0);
    cp_async_commit();

    find_lse_D<HS, M>(args, w, dout, lse_D_smem, q0, warp_row);  // while those copies run
    float lse_log2[M][2];
    float D[M][2];
    for (int i = 0; i < M; i++)
        for (int r = 0; r < 2; r++) {
            const LseD lse_D = lse_D_smem[warp_row + 16 * i + 8 * r + lane / 4];
            lse_log2[i][r] = lse_D.lse_log2;
            D[i][r] = lse_D.D;
        }

    RowOperand<HS, M, Tiles::QInRegisters> q_rows;
    RowOperand<HS, M, Tiles::QInRegisters> do_rows;
    float dq[M][HS / 8][4] = {};
    if constexpr (Tiles::QInRegisters) {
        cp_async_wait<1>();
        __syncthreads();
        for (int kk = 0; kk < HS / 16; kk++) {
            q_rows.load(q_smem + warp_row * RowBytes, kk);
            do_rows.load(do_smem + warp_row * RowBytes, kk);
        }
    }

    // Keys [j·Bc + sub, j·Bc + sub + kSub): S and dP; P and dS; dQ += dS K.
    auto step = [&](int j, int sub, auto masked) {
        constexpr bool Masked = decltype(masked)::value;
        const uint32_t k_tile = k_smem + stage_index(j) * TileBytes + sub * RowBytes;
        const uint32_t v_tile = k_tile + (v_smem - k_smem);
        float s[M][kSub / 8][4] = {};
        float dp[M][kSub / 8][4];
        for (int i = 0; i < M; i++)
            for (int n = 0; n < kSub / 8; n++)
                for (int e = 0; e < 4; e++)
                    dp[i][n][e] = -D[i][e / 2];  // the product adds to it (dP − D)

#pragma unroll  // or else the compiler unrolls later, when it has already ordered the loads
        for (int kk = 0; kk < HS / 16; kk++) {
            const auto& q_regs = q_rows.kept_or_loaded(q_smem + warp_row * RowBytes, kk);
            const auto& do_regs = do_rows.kept_or_loaded(do_smem + warp_row * RowBytes, kk);
            multiply_abt<HS>(s, q_regs, k_tile, kk * 16);
            multiply_abt<HS>(dp, do_regs, v_tile, kk * 16);
        }

        for (int i = 0; i < M; i++)
            for (int e = 0; e < 4; e++) {
                const int row = fragment_row(warp_q0 + 16 * i, e, lane);
                const int visible = visible_columns(p, row, j * Bc + sub);
                for (int n = 0; n < kSub / 8; n++) {
                    const float P = exp2_approx(s[i][n][e] * p.scale_log2 - lse_log2[i][e / 2]);
                    const bool hidden = Masked && 8 * n + e % 2 >= visible;
                    s[i][n][e] = hidden ? 0.f : P * dp[i][n][e];  // dS
                }
            }
        add_ab<HS>(dq, s, k_tile);
    };

    for (int j = 0; j < k_tiles; j++) {
        cp_async_wait<0>();
        // tile j is there for all, and all are done with tile j − 1, whose stage the next load
        // fills
        __syncthreads();
        if (j + 1 < k_tiles)
            load_kv(j + 1);
        cp_async_commit();

#pragma unroll 1
        for (int sub = 0; sub < Bc; sub += kSub) {
            const int k0 = j * Bc + sub;
            const bool none_visible = k0 > last_q + p.shift;
            if (none_visible)
                continue;
            const bool some_hidden = k0 + kSub > p.Tk || k0 + kSub - 1 > warp_q0 + p.shift;
            if (some_hidden)
                step(j, sub, std::true_type{});
            else
                step(j, sub, std::false_type{});
        }
    }

    scale(dq, p.scale);
    // by way of the warp's rows of Q, at the start of smem
    store_rows<HS>(dq, smem, warp_row, w.head<HS>(args.dq) + q0 * args.dq.token_stride,
                   args.dq.token_stride, p.Tq - q0);
#endif
}

template <int HS, class Y>
__global__ void __launch_bounds__(kThreads, 2)
    dkdv_kernel(const __grid_constant__ BackwardArgs<Y> args) {
#if __CUDA_ARCH__ >= 800
    using Tiles = DkdvTiles<HS>;
    constexpr int Br = Tiles::Br;
    constexpr int Bc = Tiles::Bc;
    constexpr int M = Tiles::WarpTiles;
    constexpr int RowBytes = HS * sizeof(bf16);
    constexpr int TileBytes = Br * RowBytes;  // of Q or dO
    const Problem<bf16>& p = args.p;
    extern __shared__ __align__(256) unsigned char smem[];
    using SharedMemory = typename Tiles::SharedMemory;
    const uint32_t k_smem = smem_address(smem);
    const uint32_t v_smem = k_smem + offsetof(SharedMemory, v);
    const uint32_t q_smem = k_smem + offsetof(SharedMemory, q);
    const uint32_t do_smem = k_smem + offsetof(SharedMemory, dout);
    const uint32_t lse_D_smem = k_smem + offsetof(SharedMemory, lse_D);
    const auto& lse_D = reinterpret_cast<const SharedMemory*>(smem)->lse_D;

    __shared__ WorkTile w;  // the loops leave no register for it
    if (threadIdx.x == 0)
        w = work_tile(p, TileOrder::first_to_last);
    __syncthreads();
    const int k0 = w.tile * Bc;
    const int warp_row = threadIdx.x / 32 * 16 * M;  // the warp's first row of the tile
    const int lane = threadIdx.x % 32;
    const int warp_k0 = k0 + warp_row;
    const int last_k = warp_k0 + 16 * M - 1;  // the warp's
    // the first query that sees key k0 is k0 − shift
    const int first_tile = max(0, k0 - p.shift) / Br;
    const int q_tiles = ceil_div<Br>(p.Tq);

    // Queries past Tq arrive as zeros, as do their dO, lse and D. So their P is 1, not 0 as in
    // dq_kernel, but it adds nothing. Keys past Tk fill rows that are never written.
    auto load_q = [&](int j) {
        const int stage = stage_index(j);
        const int row = j * Br + threadIdx.x;  // whose lse and D this thread copies
        load_tile<HS, Br, kThreads>(q_smem + stage * TileBytes, w.head<HS>(p.q), p.q.token_stride,
                                    j * Br, p.Tq);
        load_tile<HS, Br, kThreads>(do_smem + stage * TileBytes, w.head<HS>(args.dout),
                                    args.dout.token_stride, j * Br, p.Tq);
        if (threadIdx.x < Br)
            cp_async_8(lse_D_smem + (stage * Br + threadIdx.x) * sizeof(LseD),
                       args.lse_D + static_cast<size_t>(w.bh) * p.Tq + row, row < p.Tq);
    };
    load_tile<HS, Bc, kThreads>(k_smem, w.head<HS>(p.k), p.k.token_stride, k0, p.Tk);
    load_tile<HS, Bc, kThreads>(v_smem, w.head<HS>(p.v), p.v.token_stride, k0, p.Tk);
    load_q(first_tile);
    cp_async_commit();

    float dk[M][HS / 8][4] = {};
    float dv[M][HS / 8][4] = {};
    // Queries [j·Br + sub, j·Br + sub + kSub): Sᵀ; Pᵀ; dV += Pᵀ dO; dPᵀ; dSᵀ; dK += dSᵀ Q.
    auto step = [&](int j, int sub, auto masked) {
        constexpr bool Masked = decltype(masked)::value;
        const uint32_t q_tile = q_smem + stage_index(j) * TileBytes + sub * RowBytes;
        const uint32_t do_tile = q_tile + (do_smem - q_smem);
        // S and dP are transposed: their rows are keys.
        float s[M][kSub / 8][4] = {};
        float dp[M][kSub / 8][4];
        uint32_t a[M][4];
#pragma unroll  // or else the compiler unrolls later, when it has already ordered the loads
        for (int kk = 0; kk < HS / 16; kk++) {
            load_a<HS>(a, k_smem + warp_row * RowBytes, kk * 16);
            multiply_abt<HS>(s, a, q_tile, kk * 16);
        }

        // lse and D of this lane's two queries in fragment n.
        auto query_pair = [&](int n) {
            return lse_D[(stage_index(j) * Br + sub + 8 * n) / 2 + lane % 4];
        };
        for (int n = 0; n < kSub / 8; n++) {
            const LseDPair pair = query_pair(n);
            for (int i = 0; i < M; i++)
                for (int e = 0; e < 4; e++) {
                    const int key = fragment_row(warp_k0 + 16 * i, e, lane);
                    const int query = fragment_col(j * Br + sub + 8 * n, e, lane);
                    const float P =
                        exp2_approx(s[i][n][e] * p.scale_log2 - pair.columns[e % 2].lse_log2);
                    s[i][n][e] = (Masked && query + p.shift < key) ? 0.f : P;
                }
        }
        add_ab<HS>(dv, s, do_tile);

        for (int n = 0; n < kSub / 8; n++) {
            const LseDPair pair = query_pair(n);
            for (int i = 0; i < M; i++)
                for (int e = 0; e < 4; e++)
                    dp[i][n][e] = -pair.columns[e % 2].D;  // the product adds to it (dP − D)
        }
#pragma unroll 2  // with 4 the compiler would fetch so far ahead that it spills
        for (int kk = 0; kk < HS / 16; kk++) {
            load_a<HS>(a, v_smem + warp_row * RowBytes, kk * 16);
            multiply_abt<HS>(dp, a, do_tile, kk * 16);
        }

        for (int i = 0; i < M; i++)
            for (int n = 0; n < kSub / 8; n++)
                for (int e = 0; e < 4; e++)
                    s[i][n][e] *= dp[i][n][e];  // dS
        add_ab<HS>(dk, s, q_tile);
    };

    for (int j = first_tile; j < q_tiles; j++) {
        cp_async_wait<0>();
        // tile j is there for all, and all are done with tile j − 1, whose stage the next load
        // fills
        __syncthreads();
        if (j + 1 < q_tiles) {
            load_q(j + 1);
            cp_async_commit();
        }

#pragma unroll 1
        for (int sub = 0; sub < Br; sub += kSub) {
            const int q0 = j * Br + sub;
            const bool none_visible = q0 + kSub - 1 + p.shift < warp_k0;
            if (none_visible)
                continue;
            const bool some_hidden = q0 + p.shift < last_k;
            if (some_hidden)
                step(j, sub, std::true_type{});
            else
                step(j, sub, std::false_type{});
        }
    }

    scale(dk, p.scale);
    // by way of the warp's rows of K, at the start of smem, and of V
    store_rows<HS>(dk, smem, warp_row, w.head<HS>(args.dk) + k0 * args.dk.token_stride,
                   args.dk.token_stride, p.Tk - k0);
    store_rows<HS>(dv, smem + offsetof(SharedMemory, v), warp_row,
                   w.head<HS>(args.dv) + k0 * args.dv.token_stride, args.dv.token_stride,
                   p.Tk - k0);
#endif
}

// -------------------------------------------------------------------------------------------------
// Launchers

template <class Y>
void forward(const Cuda& dev, const AttentionForward<bf16, Y>& c) {
    const ForwardArgs<bf16, Y> args{.p = problem(c), .out = c.out, .lse = c.lse};
    with_head_size(c.s.HS, [&](auto HS) {
        using Tiles = ForwardTiles<HS>;
        launch(dev,
               {.name = kName,
                .HS = HS,
                .tiles = ceil_div(c.s.Tq, Tiles::Br),
                .streamed_rows = c.s.Tk,
                .threads = kThreads,
                .smem = sizeof(typename Tiles::SharedMemory)},
               forward_kernel<HS, Y>, args);
    });
}
template <class Y>
void backward(const Cuda& dev, const AttentionBackward<bf16, Y>& c) {
    const BackwardArgs<Y> args{.p = problem(c),
                               .dout = c.dout,
                               .out = c.out,
                               .lse = c.lse,
                               .lse_D = static_cast<LseD*>(c.scratch),
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
                .smem = sizeof(typename Dq::SharedMemory)},
               dq_kernel<HS, Y>, args);
        launch(dev,
               {.name = kName,
                .HS = HS,
                .tiles = ceil_div(c.s.Tk, Dkdv::Bc),
                .streamed_rows = c.s.Tq,
                .threads = kThreads,
                .smem = sizeof(typename Dkdv::SharedMemory)},
               dkdv_kernel<HS, Y>, args);
    });
}
size_t scratch_bytes(const AttentionShape& s) {
    return s.rows() * sizeof(LseD);
}

}  // namespace

const AttentionKernel<bf16> flash_bf16 = {
    .name = kName,
    .min_sm = 80,
    .flash = true,
    .supports = {.pieces = true},
    .scratch_bytes = scratch_bytes,
    .unchecked = {.forward = forward<bf16>,
                  .backward = backward<bf16>,
                  .forward_fp32 = forward<float>,
                  .backward_fp32 = backward<float>},
};
