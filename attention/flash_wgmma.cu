// Flash attention, forward only, bf16, wgmma and TMA (sm_90a). It is the plainest kernel in
// Hopper's instructions.
//
// For one tile of Br query rows against one tile of Bc keys at a time:
//   S  = scale·Q Kᵀ                (Br × Bc, registers)
//   m' = max(m, rowmax S)
//   P  = exp(S − m')
//   l  = e^{m−m'} l + rowsum P
//   O  = e^{m−m'} O + P V
// and after the last tile:
//   out = O / l
//   lse = m + log l
//
// New against flash_mma: a warpgroup of four warps multiplies 64 rows in one instruction. It reads
// K and V straight out of shared memory, so ldmatrix is gone. One thread asks the TMA unit for a
// whole tile, and none computes addresses. Both work asynchronously, so each has something to wait
// for:
//
//   TMA    an mbarrier, which counts the bytes that have landed. Its n-th use ends phase n.
//   wgmma  wgmma_wait. Until then the registers of S, P and O belong to the tensor cores.
//
// A block is one warpgroup and owns Br = 64 queries of one (b, head). It has room for one tile of K
// and one of V. The next K is on its way during the softmax and P V, and the next V during the next
// S and its softmax. flash_bf16_sm90 divides this work among warpgroups with roles, so that the
// tensor cores need not wait for the exponentials.
//
//   operand  where                                      layout
//   Q        shared memory                              A of S, rows of 128 bytes in TMA's swizzle
//   K        shared memory                              B of S, as it lies
//   P        registers, S's accumulator packed to bf16  A of O
//   V        shared memory                              B of O, transposed by wgmma
//
// Writes: out, lse (every element).  Scratch: none.
// Limits: HS in {64, 128}, any Tq and Tk, scale > 0, no backward, compute capability 9.0 alone.
// Run: ./dev/bench_attention --kernel flash_wgmma
#include "attention/launch.h"
#include "cuda/ptx_sm90.cuh"
#include "cuda/tensor_map.h"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
// kernels have empty bodies there, and what only they use is "never referenced"
#pragma nv_diag_suppress 177
#endif

namespace {

// -------------------------------------------------------------------------------------------------
// Tiles

constexpr int kThreads = 128, Br = 64, Bc = 128;

// A phase of each barrier is one copy. Its one arrival is that of the thread that starts the copy.
enum Barrier { QFull, KFull, VFull, kBarriers };
constexpr int kArrivals = 1;

// Bytes in shared memory: Q, K, V, barriers. 40 KB and 80 KB.
template <int HS>
struct Smem {
    static constexpr int K = Br * HS * 2, V = K + Bc * HS * 2, Barriers = V + Bc * HS * 2,
                         Bytes = Barriers + kBarriers * 8;
};

struct Args : AttentionForward<bf16> {  // the tensors
    int heads = s.B * s.NH;
    int shift = s.shift();  // query i sees keys j ≤ i + shift
    float scale = s.resolved_scale();
    float scale_log2 = s.scale_log2();  // exponentials are powers of 2
};

// One thread starts copying `Rows` tokens of a head from row0 on. Tokens that do not exist become
// zeros. A box of TMA is 64 columns wide, so HS 128 takes two, one behind the other. The barrier's
// phase ends when all bytes have landed.
template <int Rows, int HS>
__device__ void load_tile(uint32_t smem, const CUtensorMap& map, uint32_t barrier, int row0, int h,
                          int b) {
    mbarrier_arrive_expect(barrier, Rows * HS * 2);
    for (int d = 0; d < HS; d += 64)
        tma_load_4d(smem + d * Rows * 2, &map, barrier, d, h, row0, b);
}

// Where k-step kk, 16 columns, of a tile of `Rows` rows begins. A row has 128 bytes, and 64 columns
// make a box.
template <int Rows>
__device__ uint64_t k_step(uint64_t descriptor, int kk) {
    return wgmma_advance(descriptor, kk / 4 * Rows * 128 + kk % 4 * 32);
}

__device__ uint32_t parity(int n) {
    return n & 1;
}

// -------------------------------------------------------------------------------------------------
// Forward

template <int HS>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char smem[];
    const uint32_t q_smem = smem_address(smem);
    const uint32_t k_smem = q_smem + Smem<HS>::K;
    const uint32_t v_smem = q_smem + Smem<HS>::V;
    const auto barrier = [&](Barrier x) { return q_smem + Smem<HS>::Barriers + 8 * x; };
    // Blocks take the last tile of every head first. Its rows see the most keys, so the last to
    // finish are short.
    const int bh = blockIdx.x % args.heads;
    const int b = bh / args.s.NH;
    const int h = bh % args.s.NH;
    const int q0 = (gridDim.x / args.heads - 1 - blockIdx.x / args.heads) * Br;
    // its rows: row0 and row0 + 8
    const int lane = threadIdx.x % 32;
    const int row0 = q0 + threadIdx.x / 32 * 16 + lane / 4;
    const bool leader = threadIdx.x == 0;

    if (leader) {
        for (Barrier x : {QFull, KFull, VFull})
            mbarrier_init(barrier(x), kArrivals);
        fence_mbarrier_init();
        load_tile<Br, HS>(q_smem, q_map, barrier(QFull), q0, h, b);
        load_tile<Bc, HS>(k_smem, k_map, barrier(KFull), 0, h, b);
        load_tile<Bc, HS>(v_smem, v_map, barrier(VFull), 0, h, b);
    }
    __syncthreads();  // the barriers are there for all
    const uint64_t q_tile = wgmma_descriptor(q_smem);
    const uint64_t k_tile = wgmma_descriptor(k_smem);
    const uint64_t v_tile = wgmma_descriptor(v_smem, Bc * 128);
    mbarrier_wait(barrier(QFull), parity(0));

    float s[Bc / 8][4];
    float o[HS / 8][4] = {};
    uint32_t p_regs[Bc / 16][4];
    // of this lane's two rows. l is of its own columns until the end
    float m[2] = {-INFINITY, -INFINITY};
    float l[2] = {};
    const int Tq = args.s.Tq;
    const int Tk = args.s.Tk;
    const int tiles = (min(Tk, q0 + Br + args.shift) + Bc - 1) / Bc;
    for (int j = 0; j < tiles; j++) {
        const int kv0 = j * Bc;
        // [quote]
        // S = Q Kᵀ
        mbarrier_wait(barrier(KFull), parity(j));
        wgmma_fence_operand(s);
        wgmma_fence();
        for (int kk = 0; kk < HS / 16; kk++)
            wgmma_ss(s, k_step<Br>(q_tile, kk), k_step<Bc>(k_tile, kk), kk > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence_operand(s);
        __syncthreads();  // all warps are done with K, because wgmma_wait covers only this one
        if (leader && j + 1 < tiles)
            load_tile<Bc, HS>(k_smem, k_map, barrier(KFull), kv0 + Bc, h, b);
        // [end]

        if (kv0 + Bc > Tk || kv0 + Bc - 1 > q0 + args.shift) {  // the last keys, and the diagonal
            for (int n = 0; n < Bc / 8; n++)
                for (int e = 0; e < 4; e++) {
                    const int key = kv0 + 8 * n + lane % 4 * 2 + e % 2;
                    if (key >= Tk || key > row0 + e / 2 * 8 + args.shift)
                        s[n][e] = -INFINITY;
                }
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
            for (int n = 0; n < Bc / 8; n++) {
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    // S becomes P
                    s[n][e] = exp2_approx(s[n][e] * args.scale_log2 - m_new * args.scale_log2);
                    l[r] += s[n][e];
                }
                p_regs[n / 2][n % 2 * 2 + r] = pack_bf16(s[n][2 * r], s[n][2 * r + 1]);
            }
        }

        // O += P V
        mbarrier_wait(barrier(VFull), parity(j));
        wgmma_fence_operand(p_regs);
        wgmma_fence_operand(o);
        wgmma_fence();
        for (int kk = 0; kk < Bc / 16; kk++)
            wgmma_rs<true>(o, p_regs[kk], wgmma_advance(v_tile, kk * 16 * 128), true);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_fence_operand(o);
        __syncthreads();  // all warps are done with V
        if (leader && j + 1 < tiles)
            load_tile<Bc, HS>(v_smem, v_map, barrier(VFull), kv0 + Bc, h, b);
    }

    for (int r = 0; r < 2; r++) {
        for (int bit = 1; bit <= 2; bit *= 2)
            l[r] += __shfl_xor_sync(~0u, l[r], bit);
        const int row = row0 + 8 * r;
        if (row >= Tq)
            continue;
        bf16* out = args.out.ptr + b * args.out.batch_stride + row * args.out.token_stride +
                    h * HS + lane % 4 * 2;
        for (int n = 0; n < HS / 8; n++)
            *reinterpret_cast<uint32_t*>(out + 8 * n) =
                pack_bf16(o[n][2 * r] / l[r], o[n][2 * r + 1] / l[r]);
        if (lane % 4 == 0)
            args.lse.ptr[bh * args.lse.head_stride + row] = m[r] * args.scale + logf(l[r]);
    }
#endif
}

// -------------------------------------------------------------------------------------------------
// Launchers

constexpr char kName[] = "flash_wgmma";

template <int HS>
void launch(const Cuda& dev, const Args& args) {
    const AttentionShape& s = args.s;
    const CUtensorMap q_map = tensor_map("q", args.q, s.queries(), Br);
    const CUtensorMap k_map = tensor_map("k", args.k, s.keys(), Bc);
    const CUtensorMap v_map = tensor_map("v", args.v, s.keys(), Bc);
    const size_t blocks = static_cast<size_t>(args.heads) * ceil_div(s.Tq, Br);
    if (blocks > INT_MAX)
        throw Error(format("%s: %zu tiles are too many: use a smaller batch", kName, blocks));
    constexpr int kSmem = Smem<HS>::Bytes;
    CUDA_CHECK(cudaFuncSetAttribute(forward_kernel<HS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    kSmem));
    forward_kernel<HS>
        <<<static_cast<unsigned>(blocks), kThreads, kSmem, dev.stream>>>(q_map, k_map, v_map, args);
    LAUNCH_CHECK(kName);
}

void forward(const Cuda& dev, const AttentionForward<bf16>& c) {
    c.s.HS == 64 ? launch<64>(dev, {c}) : launch<128>(dev, {c});
}

}  // namespace

const AttentionKernel<bf16> flash_wgmma = {
    .name = kName,
    .min_sm = 90,
    .flash = true,
    .unchecked = {.forward = forward},
};
