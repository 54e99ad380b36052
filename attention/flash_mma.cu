// Flash attention, forward only, bf16, mma.sync (sm_80+). It is the plainest kernel on tensor cores.
//
// For one tile of Br query rows against one tile of Bc keys at a time:
//   S = scale·Q Kᵀ                                                  (Br × Bc, registers)
//   m' = max(m, rowmax S);  P = exp(S − m');  l = e^{m−m'} l + rowsum P;  O = e^{m−m'} O + P V
//   out = O / l;  lse = m + log l                                   (after the last tile)
//
// New against flash_fp32: a warp multiplies 16×16 by 16×8 in one instruction. Its operands are fragments, which lie
// spread over the lanes (mma_m16n8k16_bf16). The accumulator of S has the layout that the A operand of P V wants. So P
// changes from fp32 to bf16 where it is, and neither shared memory nor another lane sees it.
//
// A block of 4 warps owns Br = 64 queries of one (b, head), 16 a warp. Q's fragments stay in registers. K and V pass
// through shared memory, and ldmatrix brings them from there to fragments. V's are transposed on the way.
//
//   lane l, with g = l / 4 and c = 2 (l % 4), holds of a 16×8 tile of S:  (g, c), (g, c+1), (g+8, c), (g+8, c+1)
//   so four neighbouring lanes share the rows g and g + 8, and row sums and maxima need two shuffles
//
// Loads and products wait for each other. In flash_bf16 they overlap, and each fragment of K and V feeds two
// instructions, because its warps own 32 rows. It also has the backward.
//
// Writes: out, lse (every element).  Scratch: none.
// Limits: HS in {64, 128}; any T ≥ 1; scale > 0; no backward, no partial form.
// Run: ./dev/bench_attention --kernel flash_mma
#include <climits>

#include "attention/launch.h"
#include "layers/gpu/ptx_sm80.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#pragma nv_diag_suppress 177  // kernels have empty bodies there, and what only they use is "never referenced"
#endif

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Tiles

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int Br = 16 * kWarps, Bc = 64;

// With +8 elements, the rows of 16 bytes that ldmatrix reads at once, from 8 neighbouring rows, lie in different banks.
template <int HS>
using Tile = bf16[Bc][HS + 8];

// Copies keys [row0, row0 + Bc) of a head. Rows from T on become zeros, because P = 0 times NaN is NaN.
template <int HS>
__device__ void load_tile(Tile<HS>& tile, const bf16* head, size_t token, int row0, int T) {
    for (int i = 8 * threadIdx.x; i < Bc * HS; i += 8 * kThreads) {
        const int row = i / HS, d = i % HS;
        uint4 x{0, 0, 0, 0};
        if (row0 + row < T) x = *reinterpret_cast<const uint4*>(head + (row0 + row) * token + d);
        *reinterpret_cast<uint4*>(&tile[row][d]) = x;
    }
}

struct Args {
    Heads<const bf16> q, k, v;
    Heads<bf16> out;
    float* lse;        // (B,NH,T)
    int T, NH, heads;  // heads = B·NH
    bool causal;
    float scale, scale_log2;  // scale_log2 = scale·log2(e), because the exponentials are powers of 2
};

// ---------------------------------------------------------------------------------------------------------------------
// Forward

template <int HS>
__global__ void __launch_bounds__(kThreads) forward_kernel(Args args) {
#if __CUDA_ARCH__ >= 800
    __shared__ __align__(16) Tile<HS> k_smem, v_smem;
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4 * 2;  // of a fragment: this lane's row and column
    // Blocks take the last tile of every head first. Its rows see the most keys, so the last to finish are short.
    const int bh = blockIdx.x % args.heads, b = bh / args.NH, h = bh % args.NH;
    const int q0 = (gridDim.x / args.heads - 1 - blockIdx.x / args.heads) * Br;
    const int row0 = q0 + threadIdx.x / 32 * 16 + g;  // this lane's queries are row0 and row0 + 8
    const bf16* q = args.q.ptr + b * args.q.batch + h * HS;
    const bf16* k = args.k.ptr + b * args.k.batch + h * HS;
    const bf16* v = args.v.ptr + b * args.v.batch + h * HS;

    // Q in the layout of an A operand, straight from global memory. Rows from T on are zeros.
    uint32_t q_regs[HS / 16][4];
    for (int kk = 0; kk < HS / 16; kk++)
        for (int i = 0; i < 4; i++) {
            const int row = row0 + i % 2 * 8, d = 16 * kk + i / 2 * 8 + c;
            q_regs[kk][i] = row < args.T ? *reinterpret_cast<const uint32_t*>(q + row * args.q.token + d) : 0;
        }

    float o[HS / 8][4] = {};
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {};  // of this lane's two rows. l is of its own columns until the end
    const int kv_end = args.causal ? min(args.T, q0 + Br) : args.T;
    for (int kv0 = 0; kv0 < kv_end; kv0 += Bc) {
        __syncthreads();  // everyone is done with the last tile
        load_tile<HS>(k_smem, k, args.k.token, kv0, args.T);
        load_tile<HS>(v_smem, v, args.v.token, kv0, args.T);
        __syncthreads();  // the tile is there

        // S = Q Kᵀ. K's rows are the columns of a B operand. The matrices of ldmatrix are keys n … n+7 in the columns
        // d … d+7 and d+8 … d+15, then keys n+8 … n+15.
        float s[Bc / 8][4] = {};
        for (int kk = 0; kk < HS / 16; kk++)
            for (int n = 0; n < Bc; n += 16) {
                uint32_t b_regs[4];
                ldmatrix_x4(b_regs, smem_address(&k_smem[n + lane / 16 * 8 + lane % 8][16 * kk + lane / 8 % 2 * 8]));
                mma_m16n8k16_bf16(s[n / 8], q_regs[kk], b_regs[0], b_regs[1]);
                mma_m16n8k16_bf16(s[n / 8 + 1], q_regs[kk], b_regs[2], b_regs[3]);
            }

        if (kv0 + Bc > args.T || (args.causal && kv0 + Bc > q0)) {  // the last keys, and the diagonal
            for (int n = 0; n < Bc / 8; n++)
                for (int e = 0; e < 4; e++) {
                    const int key = kv0 + 8 * n + c + e % 2;
                    if (key >= args.T || (args.causal && key > row0 + e / 2 * 8)) s[n][e] = -INFINITY;
                }
        }

        // Online softmax. Everything so far was relative to the old m.
        for (int r = 0; r < 2; r++) {
            float m_new = m[r];
            for (int n = 0; n < Bc / 8; n++) m_new = fmaxf(m_new, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            for (int bit = 1; bit <= 2; bit *= 2) m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, bit));
            const float correction = exp2_approx((m[r] - m_new) * args.scale_log2);
            m[r] = m_new;
            l[r] *= correction;
            for (int n = 0; n < HS / 8; n++) o[n][2 * r] *= correction, o[n][2 * r + 1] *= correction;
            for (int n = 0; n < Bc / 8; n++)
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    s[n][e] = exp2_approx(s[n][e] * args.scale_log2 - m_new * args.scale_log2);  // S becomes P
                    l[r] += s[n][e];
                }
        }

        // O += P V. Two tiles of the accumulator of S, 16×8 each, are one A operand of 16×16. V's rows are the rows of
        // a B operand, so ldmatrix transposes: keys kk … kk+7 and kk+8 … kk+15 of columns n … n+7, then of n+8 … n+15.
        // [quote]
        for (int kk = 0; kk < Bc; kk += 16) {
            const float(&left)[4] = s[kk / 8], (&right)[4] = s[kk / 8 + 1];
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

    for (int r = 0; r < 2; r++) {
        for (int bit = 1; bit <= 2; bit *= 2) l[r] += __shfl_xor_sync(~0u, l[r], bit);
        const int row = row0 + 8 * r;
        if (row >= args.T) continue;
        bf16* out = args.out.ptr + b * args.out.batch + row * args.out.token + h * HS + c;
        for (int n = 0; n < HS / 8; n++)
            *reinterpret_cast<uint32_t*>(out + 8 * n) = pack_bf16(o[n][2 * r] / l[r], o[n][2 * r + 1] / l[r]);
        if (c == 0) args.lse[static_cast<size_t>(bh) * args.T + row] = m[r] * args.scale + logf(l[r]);
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

constexpr char kName[] = "flash_mma";

void forward(const Cuda& dev, bf16* out, float* lse, bf16*, void*, const bf16* qkv, const AttentionShape& s) {
    check_shape(kName, whole(s));
    check_aligned(kName, "qkv", qkv);
    check_aligned(kName, "out", out);
    Args args;
    args.q = packed(qkv, s, 0), args.k = packed(qkv, s, 1), args.v = packed(qkv, s, 2);
    args.out = contiguous(out, s.T, s.NH, s.HS), args.lse = lse;
    args.T = s.T, args.NH = s.NH, args.heads = s.B * s.NH, args.causal = s.causal;
    args.scale = s.resolved_scale(), args.scale_log2 = static_cast<float>(s.resolved_scale() * M_LOG2E);
    const size_t blocks = static_cast<size_t>(args.heads) * ceil_div(s.T, Br);
    if (blocks > INT_MAX) throw Error(format("%s: %zu tiles are too many: use a smaller batch", kName, blocks));
    const auto kernel = s.HS == 64 ? forward_kernel<64> : forward_kernel<128>;
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, dev.stream>>>(args);
    LAUNCH_CHECK(kName);
}

}  // namespace

const AttentionKernel<bf16> flash_mma = {kName, 80, true, no_bytes, no_bytes, forward};
