// Flash attention, bf16, mma.sync (sm_80+), as plain as it can be on tensor cores.
//
// Forward, for one tile of Br query rows against one tile of Bc keys at a time:
//   S  = scale·Q Kᵀ                (Br × Bc, registers)
//   m' = max(m, rowmax S)
//   P  = exp(S − m')
//   l  = e^{m−m'} l + rowsum P
//   O  = e^{m−m'} O + P V
// and after the last tile:
//   out = O / l
//   lse = m + log l
//
// Backward, given lse and D = rowsum(dO∘O):
//   P  = exp(S − lse)
//   dS = P∘(dO Vᵀ − D)
//   dQ = scale·dS K                dq_kernel: a block owns queries, and keys pass by
//   dK = scale·dSᵀ Q               dkdv_kernel: a block owns keys, and queries pass by
//   dV = Pᵀ dO                     dkdv_kernel, too
//
// New against flash_fp32: a warp multiplies 16×16 by 16×8 in one instruction. Its operands are
// fragments, which lie spread over the lanes (mma_m16n8k16_bf16). The accumulator of S has the
// layout that the A operand of P V wants. So P changes from fp32 to bf16 where it is, and neither
// shared memory nor another lane sees it. So does dS for dS K. dkdv_kernel computes Sᵀ and dPᵀ,
// with keys as rows, because then the same holds for Pᵀ and dSᵀ.
//
// A block of 4 warps owns 64 rows of one (b, head), 16 a warp, whose fragments stay in registers.
// The other tensors pass through shared memory, and ldmatrix brings them from there to fragments.
// It can transpose them on the way.
//
// Of a 16×8 tile of S, lane l holds the elements
//   (g,   c)  (g,   c+1)           with g = l / 4
//   (g+8, c)  (g+8, c+1)           and  c = 2 (l % 4)
// so four neighbouring lanes share the rows g and g + 8, and row sums and maxima need two shuffles.
//
// Loads and products wait for each other. In flash_bf16 they overlap, and each fragment from shared
// memory feeds two instructions, because its warps own 32 rows.
//
// Writes: forward out and lse, backward dq, dk and dv (every element).  Scratch: D.
// Limits: HS in {64, 128}, scale > 0, any Tq and Tk, in backward Tq = Tk.
// Run: ./dev/bench_attention --kernel flash_mma
#include "attention/launch.h"
#include "cuda/ptx_sm80.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
// kernels have empty bodies there, and what only they use is "never referenced"
#pragma nv_diag_suppress 177
#endif

namespace {

// -------------------------------------------------------------------------------------------------
// Tiles and fragments

constexpr char kName[] = "flash_mma";
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kRows = 16 * kWarps;  // of a block: Br, and dkdv_kernel's Bc
// of backward's other tiles, because accumulators leave no registers for more
constexpr int kPassing = 32;

// With +8 elements, the rows of 16 bytes that ldmatrix reads at once, from 8 neighbouring rows, lie
// in different banks.
template <int HS, int Bc>
using Tile = bf16[Bc][HS + 8];
template <int HS>
using Fragments = uint32_t[HS / 16][4];  // 16 rows of Q, K, V, dO or O as A operands
template <int N>
using Accumulator = float[N / 8][4];  // 16 rows of N columns

// Copies rows [row0, row0 + N) of a head. Rows from `end` on become zeros, because P = 0 times NaN
// is NaN.
template <int HS, int N>
__device__ void load_tile(Tile<HS, N>& tile, const HeadsView<const bf16>& head, int row0, int end) {
    // threads of a row, and rows of a step
    constexpr int kLanes = HS / 8;
    constexpr int kStep = kThreads / kLanes;
    const int d = threadIdx.x % kLanes * 8;
    int row = threadIdx.x / kLanes;
    const bf16* src = head.ptr + (row0 + row) * head.token_stride + d;
    for (; row < N; row += kStep, src += kStep * head.token_stride) {
        uint4 x{0, 0, 0, 0};
        if (row0 + row < end)
            x = *reinterpret_cast<const uint4*>(src);
        *reinterpret_cast<uint4*>(&tile[row][d]) = x;
    }
}

// Loads a warp's rows straight from global memory. This lane's are `row` and row + 8. Rows from
// `end` on become zeros.
template <int HS>
__device__ void load_rows(Fragments<HS>& regs, const HeadsView<const bf16>& head, int row,
                          int end) {
    for (int kk = 0; kk < HS / 16; kk++)
        for (int i = 0; i < 4; i++) {
            const int r = row + i % 2 * 8;
            const int d = 16 * kk + i / 2 * 8 + threadIdx.x % 4 * 2;
            regs[kk][i] =
                r < end ? *reinterpret_cast<const uint32_t*>(head.ptr + r * head.token_stride + d)
                        : 0;
        }
}
// Stores them, times factor.
template <int HS>
__device__ void store_rows(const Accumulator<HS>& x, const HeadsView<bf16>& head, int row, int end,
                           float factor) {
    for (int r = 0; r < 2; r++) {
        if (row + 8 * r >= end)
            continue;
        bf16* to = head.ptr + (row + 8 * r) * head.token_stride + threadIdx.x % 4 * 2;
        for (int n = 0; n < HS / 8; n++)
            *reinterpret_cast<uint32_t*>(to + 8 * n) =
                pack_bf16(x[n][2 * r] * factor, x[n][2 * r + 1] * factor);
    }
}

// s = q · kᵀ. The rows of k are the columns of a B operand. The matrices of ldmatrix are keys n …
// n+7 in the columns d … d+7 and d+8 … d+15, then keys n+8 … n+15.
template <int HS, int N>
__device__ void multiply(Accumulator<N>& s, const Fragments<HS>& q_regs,
                         const Tile<HS, N>& k_smem) {
    const int lane = threadIdx.x % 32;
    for (float (&x)[4] : s)
        x[0] = x[1] = x[2] = x[3] = 0.f;
    for (int kk = 0; kk < HS / 16; kk++)
        for (int n = 0; n < N; n += 16) {
            uint32_t b_regs[4];
            ldmatrix_x4(
                b_regs,
                smem_address(&k_smem[n + lane / 16 * 8 + lane % 8][16 * kk + lane / 8 % 2 * 8]));
            mma_m16n8k16_bf16(s[n / 8], q_regs[kk], b_regs[0], b_regs[1]);
            mma_m16n8k16_bf16(s[n / 8 + 1], q_regs[kk], b_regs[2], b_regs[3]);
        }
}

// o += p · v. Two tiles of the accumulator p, 16×8 each, are one A operand of 16×16. v's rows are
// the rows of a B operand, so ldmatrix transposes: keys kk … kk+7 and kk+8 … kk+15 of columns n …
// n+7, then of n+8 … n+15.
template <int HS, int N>
__device__ void add_product(Accumulator<HS>& o, const Accumulator<N>& p,
                            const Tile<HS, N>& v_smem) {
    const int lane = threadIdx.x % 32;
    // [quote]
    for (int kk = 0; kk < N; kk += 16) {
        const float (&left)[4] = p[kk / 8];
        const float (&right)[4] = p[kk / 8 + 1];
        const uint32_t p_regs[4] = {pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]),
                                    pack_bf16(right[0], right[1]), pack_bf16(right[2], right[3])};
        for (int n = 0; n < HS; n += 16) {
            uint32_t b_regs[4];
            ldmatrix_x4_trans(b_regs, smem_address(&v_smem[kk + lane % 16][n + lane / 16 * 8]));
            mma_m16n8k16_bf16(o[n / 8], p_regs, b_regs[0], b_regs[1]);
            mma_m16n8k16_bf16(o[n / 8 + 1], p_regs, b_regs[2], b_regs[3]);
        }
    }
    // [end]
}

template <class Call>
struct Args : Call {  // the tensors
    int heads = this->s.B * this->s.NH;
    int shift = this->s.shift();  // query i sees keys j ≤ i + shift
    float scale = this->s.resolved_scale();
    float scale_log2 = this->s.scale_log2();  // exponentials are powers of 2
    RowStatsView<float> D = {};               // backward's, in scratch
};
using ForwardArgs = Args<AttentionForward<bf16>>;
using BackwardArgs = Args<AttentionBackward<bf16>>;

// What a block works on. Long rows come first, so that the last blocks to finish have little to do.
struct WorkTile {
    int bh, b, h, row0;  // the head, and the block's first row
    __device__ WorkTile(int heads, int NH, bool last_first)
        : bh(blockIdx.x % heads), b(bh / NH), h(bh % NH) {
        const int tile = blockIdx.x / heads;
        const int tiles = gridDim.x / heads;
        row0 = (last_first ? tiles - 1 - tile : tile) * kRows;
    }
    template <int HS, class X>
    __device__ HeadsView<X> head(const HeadsView<X>& x) const {
        HeadsView<X> head = x;
        head.ptr += b * x.batch_stride + h * HS;
        return head;
    }
    template <class A>
    __device__ A* stats(const RowStatsView<A>& x) const {
        return x.ptr + bh * x.head_stride;
    }
};

// -------------------------------------------------------------------------------------------------
// Forward

template <int HS>
__global__ void __launch_bounds__(kThreads) forward_kernel(ForwardArgs args) {
#if __CUDA_ARCH__ >= 800
    constexpr int Br = kRows;
    constexpr int Bc = 64;
    __shared__ __align__(16) Tile<HS, Bc> k_smem, v_smem;
    const WorkTile w(args.heads, args.s.NH, true);
    // of a fragment: this lane's row and column
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int c = lane % 4 * 2;
    // this lane's queries are row0 and row0 + 8
    const int row0 = w.row0 + threadIdx.x / 32 * 16 + g;
    const int Tq = args.s.Tq;
    const int Tk = args.s.Tk;
    Fragments<HS> q_regs;
    load_rows<HS>(q_regs, w.head<HS>(args.q), row0, Tq);

    Accumulator<HS> o = {};
    // of this lane's two rows. l is of its own columns until the end
    float m[2] = {-INFINITY, -INFINITY};
    float l[2] = {};
    for (int kv0 = 0; kv0 < min(Tk, w.row0 + Br + args.shift); kv0 += Bc) {
        __syncthreads();  // everyone is done with the last tile
        load_tile<HS, Bc>(k_smem, w.head<HS>(args.k), kv0, Tk);
        load_tile<HS, Bc>(v_smem, w.head<HS>(args.v), kv0, Tk);
        __syncthreads();  // the tile is there

        Accumulator<Bc> s;
        multiply<HS, Bc>(s, q_regs, k_smem);
        if (kv0 + Bc > Tk || kv0 + Bc - 1 > w.row0 + args.shift)  // the last keys, and the diagonal
            for (int n = 0; n < Bc / 8; n++)
                for (int e = 0; e < 4; e++) {
                    const int key = kv0 + 8 * n + c + e % 2;
                    if (key >= Tk || key > row0 + e / 2 * 8 + args.shift)
                        s[n][e] = -INFINITY;
                }

        // Online softmax. Everything so far was relative to the old m.
        for (int r = 0; r < 2; r++) {
            float m_new = m[r];
            for (int n = 0; n < Bc / 8; n++)
                m_new = fmaxf(m_new, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            for (int bit = 1; bit <= 2; bit *= 2)
                m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, bit));
            const float correction = exp2_approx((m[r] - m_new) * args.scale_log2);
            m[r] = m_new;
            l[r] *= correction;
            for (int n = 0; n < HS / 8; n++) {
                o[n][2 * r] *= correction;
                o[n][2 * r + 1] *= correction;
            }
            for (int n = 0; n < Bc / 8; n++)
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    // S becomes P
                    s[n][e] = exp2_approx(s[n][e] * args.scale_log2 - m_new * args.scale_log2);
                    l[r] += s[n][e];
                }
        }
        add_product<HS, Bc>(o, s, v_smem);
    }

    for (int r = 0; r < 2; r++) {
        for (int bit = 1; bit <= 2; bit *= 2)
            l[r] += __shfl_xor_sync(~0u, l[r], bit);
        for (int n = 0; n < HS / 8; n++)
            for (int e = 2 * r; e < 2 * r + 2; e++)
                o[n][e] /= l[r];
        const int row = row0 + 8 * r;
        if (c == 0 && row < Tq)
            w.stats(args.lse)[row] = m[r] * args.scale + logf(l[r]);
    }
    store_rows<HS>(o, w.head<HS>(args.out), row0, Tq, 1.f);
#endif
}

// -------------------------------------------------------------------------------------------------
// Backward

template <int HS>
__global__ void __launch_bounds__(kThreads) dq_kernel(BackwardArgs args) {
#if __CUDA_ARCH__ >= 800
    constexpr int Br = kRows;
    constexpr int Bc = kPassing;
    __shared__ __align__(16) Tile<HS, Bc> k_smem, v_smem;
    const WorkTile w(args.heads, args.s.NH, true);
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int c = lane % 4 * 2;
    const int row0 = w.row0 + threadIdx.x / 32 * 16 + g;
    const int T = args.s.Tq;
    Fragments<HS> q_regs;
    Fragments<HS> do_regs;
    Fragments<HS> o_regs;
    load_rows<HS>(q_regs, w.head<HS>(args.q), row0, T);
    load_rows<HS>(do_regs, w.head<HS>(args.dout), row0, T);
    load_rows<HS>(o_regs, w.head<HS>(args.out), row0, T);

    float D[2] = {};
    float lse_log2[2];
    for (int kk = 0; kk < HS / 16; kk++)
        for (int i = 0; i < 4; i++) {
            const auto& x = reinterpret_cast<const __nv_bfloat162&>(do_regs[kk][i]);
            const auto& y = reinterpret_cast<const __nv_bfloat162&>(o_regs[kk][i]);
            D[i % 2] += __low2float(x) * __low2float(y) + __high2float(x) * __high2float(y);
        }
    for (int r = 0; r < 2; r++) {
        const int row = row0 + 8 * r;
        for (int bit = 1; bit <= 2; bit *= 2)
            D[r] += __shfl_xor_sync(~0u, D[r], bit);
        if (c == 0 && row < T)
            w.stats(args.D)[row] = D[r];
        lse_log2[r] = row < T ? w.stats(args.lse)[row] * kLog2e : INFINITY;
    }

    Accumulator<HS> dq = {};
    for (int kv0 = 0; kv0 < min(T, w.row0 + Br + args.shift); kv0 += Bc) {
        __syncthreads();  // everyone is done with the last tile
        load_tile<HS, Bc>(k_smem, w.head<HS>(args.k), kv0, T);
        load_tile<HS, Bc>(v_smem, w.head<HS>(args.v), kv0, T);
        __syncthreads();  // the tile is there
        Accumulator<Bc> s;
        Accumulator<Bc> dp;
        multiply<HS, Bc>(s, q_regs, k_smem);
        multiply<HS, Bc>(dp, do_regs, v_smem);
        for (int n = 0; n < Bc / 8; n++)
            for (int e = 0; e < 4; e++) {
                const int r = e / 2;
                const int key = kv0 + 8 * n + c + e % 2;
                const bool seen = key < T && key <= row0 + 8 * r + args.shift;
                const float p = exp2_approx(s[n][e] * args.scale_log2 - lse_log2[r]);
                s[n][e] = seen ? p * (dp[n][e] - D[r]) : 0.f;  // S becomes dS
            }
        add_product<HS, Bc>(dq, s, k_smem);
    }
    store_rows<HS>(dq, w.head<HS>(args.dq), row0, T, args.scale);
#endif
}

// Comes after dq_kernel, which writes D.
template <int HS>
__global__ void __launch_bounds__(kThreads) dkdv_kernel(BackwardArgs args) {
#if __CUDA_ARCH__ >= 800
    constexpr int Br = kPassing;
    __shared__ __align__(16) Tile<HS, Br> q_smem, do_smem;
    __shared__ float lse_smem[Br], D_smem[Br];  // lse_smem is lse·log2(e)
    const WorkTile w(args.heads, args.s.NH, false);
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int c = lane % 4 * 2;
    // this lane's keys are row0 and row0 + 8
    const int row0 = w.row0 + threadIdx.x / 32 * 16 + g;
    const int T = args.s.Tq;
    Fragments<HS> k_regs;
    Fragments<HS> v_regs;
    load_rows<HS>(k_regs, w.head<HS>(args.k), row0, T);
    load_rows<HS>(v_regs, w.head<HS>(args.v), row0, T);

    Accumulator<HS> dk = {};
    Accumulator<HS> dv = {};
    for (int q0 = max(0, w.row0 - args.shift); q0 < T; q0 += Br) {
        __syncthreads();  // everyone is done with the last tile
        load_tile<HS, Br>(q_smem, w.head<HS>(args.q), q0, T);
        load_tile<HS, Br>(do_smem, w.head<HS>(args.dout), q0, T);
        if (threadIdx.x < Br) {
            // with an lse of +inf a row that does not exist has P = 0
            const int row = q0 + threadIdx.x;
            lse_smem[threadIdx.x] = row < T ? w.stats(args.lse)[row] * kLog2e : INFINITY;
            D_smem[threadIdx.x] = row < T ? w.stats(args.D)[row] : 0.f;
        }
        __syncthreads();  // the tile is there
        Accumulator<Br> s;
        Accumulator<Br> dp;  // transposed: rows are keys
        multiply<HS, Br>(s, k_regs, q_smem);
        for (int n = 0; n < Br / 8; n++)
            for (int e = 0; e < 4; e++) {
                const int i = 8 * n + c + e % 2;  // of the tile's queries
                const bool seen = row0 + e / 2 * 8 <= q0 + i + args.shift;
                // S becomes P
                s[n][e] = seen ? exp2_approx(s[n][e] * args.scale_log2 - lse_smem[i]) : 0.f;
            }
        add_product<HS, Br>(dv, s, do_smem);
        multiply<HS, Br>(dp, v_regs, do_smem);
        for (int n = 0; n < Br / 8; n++)
            // P becomes dS
            for (int e = 0; e < 4; e++)
                s[n][e] *= dp[n][e] - D_smem[8 * n + c + e % 2];
        add_product<HS, Br>(dk, s, q_smem);
    }
    store_rows<HS>(dk, w.head<HS>(args.dk), row0, T, args.scale);
    store_rows<HS>(dv, w.head<HS>(args.dv), row0, T, 1.f);
#endif
}

// -------------------------------------------------------------------------------------------------
// Launchers

// Starts a block for each tile of queries of each head, or of keys, because backward has as many.
template <class Call>
void launch(const Cuda& dev, void (*kernel)(Args<Call>), const Args<Call>& args) {
    const size_t blocks = static_cast<size_t>(args.heads) * ceil_div(args.s.Tq, kRows);
    if (blocks > INT_MAX)
        throw Error(format("%s: %zu tiles are too many: use a smaller batch", kName, blocks));
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, dev.stream>>>(args);
    LAUNCH_CHECK(kName);
}

void forward(const Cuda& dev, const AttentionForward<bf16>& c) {
    launch(dev, c.s.HS == 64 ? forward_kernel<64> : forward_kernel<128>, ForwardArgs{c});
}
void backward(const Cuda& dev, const AttentionBackward<bf16>& c) {
    BackwardArgs args{c};
    args.D = {static_cast<float*>(c.scratch), static_cast<size_t>(c.s.Tq)};
    launch(dev, c.s.HS == 64 ? dq_kernel<64> : dq_kernel<128>, args);
    launch(dev, c.s.HS == 64 ? dkdv_kernel<64> : dkdv_kernel<128>, args);
}

size_t scratch_bytes(const AttentionShape& s) {
    return s.rows() * sizeof(float);
}

}  // namespace

const AttentionKernel<bf16> flash_mma = {
    .name = kName,
    .min_sm = 80,
    .flash = true,
    .scratch_bytes = scratch_bytes,
    .unchecked = {.forward = forward, .backward = backward},
};
