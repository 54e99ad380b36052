// Flash attention, fp32, as plain as a whole kernel can be (every GPU from sm_75). Read this rung first.
//
// Forward, a thread's query row against one tile of Bc keys at a time:
//   S = scale·Q Kᵀ;  m' = max(m, max S);  P = exp(S − m');  l = e^{m−m'} l + Σ P;  O = e^{m−m'} O + P V
//   out = O / l;  lse = m + log l                                   (after the last tile)
// Backward, given lse and D = rowsum(dO∘O):
//   P = exp(S − lse);  dS = P∘(dO Vᵀ − D)
//   dQ = scale·dS K                        dq_kernel: a thread owns a query, and keys pass by
//   dV = Pᵀ dO;  dK = scale·dSᵀ Q          dkdv_kernel: a thread owns a key, and queries pass by
//
// New against naive: nothing of size T × T is stored. m is the largest S so far. When it rises, what was summed so far
// shrinks by e^{m−m'}, so one pass over the keys is enough. Backward computes P again from lse.
//
// One thread owns one row. At HS 128 two neighbours share it. A block's own rows stay in shared memory, and tiles of
// others pass by. Each output has one writer, so every run gives the same bits. Exercise: give a thread two rows.
// Writes: forward out, lse; backward dqkv (every element).  Scratch: D and 1/ΣP.
// Limits: HS in {64, 128}; any T ≥ 1; no partial form.   Run: ./dev/bench_attention --kernel flash_simple
#include <climits>

#include "attention/launch.h"

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Tiles. A line holds what one thread owns of a row. With +4 floats, 8 threads that read 16 bytes of a line each hit
// different banks.

constexpr int kThreads = 64;  // of a block, and lines of its own tile
constexpr int kPassing = 16;  // lines of a passing tile: at HS 64 Bc = 16 keys or 8 queries, at HS 128 half as many
constexpr int kOwn = 64;      // elements of a row that a thread owns
constexpr int kTerms = 16;    // terms of a sum that are added in one go, because short chains of additions round less
using Line = float[kOwn + 4];
template <int HS>
constexpr int kSplit = HS / kOwn;  // lines of a row, and threads that share it
constexpr char kName[] = "flash_simple";
static_assert(2 * (kThreads + kPassing) * sizeof(Line) <= 48 << 10, "dq_kernel's tiles do not fit");

// Copies rows of a head from row0 on, times factor. Rows from T on become zeros.
template <int HS, int Lines>
__device__ void load_tile(Line (&tile)[Lines], const float* head, size_t token, int row0, int T, float factor = 1.f) {
    for (int i = 4 * threadIdx.x; i < Lines * kOwn; i += 4 * kThreads) {
        float4 x{0.f, 0.f, 0.f, 0.f};
        if (row0 + i / HS < T) x = *reinterpret_cast<const float4*>(head + (row0 + i / HS) * token + i % HS);
        x.x *= factor, x.y *= factor, x.z *= factor, x.w *= factor;
        *reinterpret_cast<float4*>(&tile[i / kOwn][i % kOwn]) = x;
    }
}

// s[j] = own · row j of a tile. `row` is this thread's line of row 0.
template <int HS, int N>
__device__ void dot_rows(float (&s)[N], const float* own, const float* row) {
    for (float& x : s) x = 0.f;
#pragma unroll 1  // only kTerms of `own` at a time are in registers
    for (int c = 0; c < kOwn; c += kTerms)
        for (int j = 0; j < N; j++) {
            float sum = 0.f;
            for (int d = c; d < c + kTerms; d++) sum += own[d] * row[j * kSplit<HS> * (kOwn + 4) + d];
            s[j] += sum;
        }
    if (kSplit<HS> == 2)
        for (float& x : s) x += __shfl_xor_sync(~0u, x, 1);
}

// acc += Σ_j p[j]·row j of a tile. A tile has a sum of its own, so that the error does not grow with T.
template <int HS, int N>
__device__ void add_rows(float (&acc)[kOwn], const float (&p)[N], const float* row) {
#pragma unroll
    for (int c = 0; c < kOwn; c += kTerms) {
        float sum[kTerms] = {};
        for (int j = 0; j < N; j++)
            for (int d = 0; d < kTerms; d++) sum[d] += p[j] * row[j * kSplit<HS> * (kOwn + 4) + c + d];
        for (int d = 0; d < kTerms; d++) acc[c + d] += sum[d];
    }
}

__device__ void store(float* to, const float (&x)[kOwn], float factor) {
    for (int d = 0; d < kOwn; d++) to[d] = x[d] * factor;
}

struct Args {
    float *out, *lse, *dqkv, *D, *inverse_sum;  // (B,T,NH,HS), (B,NH,T), (B,T,3,NH,HS), (B,NH,T), (B,NH,T)
    const float *qkv, *dout = nullptr;
    int T = 0, NH = 0, heads = 0, causal = 0;  // heads = B·NH
    float scale = 0.f;
};

// What a block works on. Long rows come first, so that the last blocks to finish have little to do.
template <int HS>
struct Work {
    size_t C, qkv, out, stat;                        // where the head begins in tensors like qkv, out and lse
    int row0, row, line = threadIdx.x % kSplit<HS>;  // the block's first row, this thread's row and line
    __device__ Work(const Args& args, bool last_first) : C(static_cast<size_t>(args.NH) * HS) {
        const int bh = blockIdx.x % args.heads, tile = blockIdx.x / args.heads, tiles = gridDim.x / args.heads;
        const size_t token = static_cast<size_t>(bh / args.NH) * args.T, h = bh % args.NH;
        qkv = token * 3 * C + h * HS, out = token * C + h * HS, stat = static_cast<size_t>(bh) * args.T;
        row0 = (last_first ? tiles - 1 - tile : tile) * (kThreads / kSplit<HS>);
        row = row0 + threadIdx.x / kSplit<HS>;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Forward

template <int HS>
__global__ void __launch_bounds__(kThreads, 4) forward_kernel(Args args) {
    constexpr int Br = kThreads / kSplit<HS>, Bc = kPassing / kSplit<HS>;
    __shared__ __align__(16) Line q_smem[kThreads], k_smem[kPassing], v_smem[kPassing];
    const Work<HS> w(args, true);
    const float *q = args.qkv + w.qkv, *k = q + w.C, *v = k + w.C;
    load_tile<HS>(q_smem, q, 3 * w.C, w.row0, args.T, args.scale);

    float o[kOwn] = {}, m = -INFINITY;
    double l = 0.;  // in fp32 its rounding errors would be D's, the same for all keys, and add up in dQ
    for (int kv0 = 0; kv0 < (args.causal ? min(args.T, w.row0 + Br) : args.T); kv0 += Bc) {
        __syncthreads();  // everyone is done with the last tile
        load_tile<HS>(k_smem, k, 3 * w.C, kv0, args.T);
        load_tile<HS>(v_smem, v, 3 * w.C, kv0, args.T);
        __syncthreads();  // the tile is there
        // [quote]
        float s[Bc], m_new = m, l_tile = 0.f;
        dot_rows<HS>(s, q_smem[threadIdx.x], k_smem[w.line]);
        for (int j = 0; j < Bc; j++) {
            if (kv0 + j >= args.T || (args.causal && kv0 + j > w.row)) s[j] = -INFINITY;
            m_new = fmaxf(m_new, s[j]);
        }
        const float correction = expf(m - m_new);          // everything so far was relative to the old m
        for (float& x : s) l_tile += x = expf(x - m_new);  // S becomes P
        for (float& x : o) x *= correction;
        l = l * correction + l_tile, m = m_new;
        add_rows<HS>(o, s, v_smem[w.line]);
        // [end]
    }
    if (w.row >= args.T) return;
    args.lse[w.stat + w.row] = m + logf(static_cast<float>(l));
    store(args.out + w.out + w.row * w.C + w.line * kOwn, o, static_cast<float>(1. / l));
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward. The rounding of lse to fp32 is an error of all P of a row, and a large one where lse is large. A row of P
// sums to 1, so dq_kernel also finds the sum that it gets, and both kernels divide by it.

template <int HS>
__global__ void __launch_bounds__(kThreads, 4) dq_kernel(Args args) {
    constexpr int Br = kThreads / kSplit<HS>, Bc = kPassing / kSplit<HS>;
    __shared__ __align__(16) Line q_smem[kThreads], do_smem[kThreads], k_smem[kPassing], v_smem[kPassing];
    const Work<HS> w(args, true);
    const float *q = args.qkv + w.qkv, *k = q + w.C, *v = k + w.C;
    load_tile<HS>(q_smem, q, 3 * w.C, w.row0, args.T, args.scale);
    load_tile<HS>(do_smem, args.dout + w.out, w.C, w.row0, args.T);
    __syncthreads();
    // D is summed like dO Vᵀ. So dP − D is exactly 0 where one key has all the weight, because O is its V.
    float D[1], dq[kOwn] = {}, sum = 0.f;
    const int row = min(w.row, args.T - 1);  // threads without a row compute another one's again
    dot_rows<HS>(D, do_smem[threadIdx.x], args.out + w.out + row * w.C + w.line * kOwn);
    const float lse = args.lse[w.stat + row];

    for (int kv0 = 0; kv0 < (args.causal ? min(args.T, w.row0 + Br) : args.T); kv0 += Bc) {
        __syncthreads();
        load_tile<HS>(k_smem, k, 3 * w.C, kv0, args.T);
        load_tile<HS>(v_smem, v, 3 * w.C, kv0, args.T);
        __syncthreads();
        float p[Bc], ds[Bc], sum_tile = 0.f;
        dot_rows<HS>(p, q_smem[threadIdx.x], k_smem[w.line]);
        dot_rows<HS>(ds, do_smem[threadIdx.x], v_smem[w.line]);
        for (int j = 0; j < Bc; j++) {
            p[j] = kv0 + j >= args.T || (args.causal && kv0 + j > w.row) ? 0.f : expf(p[j] - lse);
            sum_tile += p[j];
            ds[j] = p[j] * (ds[j] - D[0]);
        }
        sum += sum_tile;
        add_rows<HS>(dq, ds, k_smem[w.line]);
    }
    if (w.row >= args.T) return;
    args.D[w.stat + w.row] = D[0], args.inverse_sum[w.stat + w.row] = 1.f / sum;
    store(args.dqkv + w.qkv + w.row * 3 * w.C + w.line * kOwn, dq, args.scale / sum);
}

template <int HS>
__global__ void __launch_bounds__(kThreads, 4) dkdv_kernel(Args args) {
    constexpr int kLines = kPassing / 2, Br = kLines / kSplit<HS>;  // half as many, because there are two sums
    __shared__ __align__(16) Line k_smem[kThreads], v_smem[kThreads], q_smem[kLines], do_smem[kLines];
    const Work<HS> w(args, false);  // its rows are keys
    const float *q = args.qkv + w.qkv, *k = q + w.C, *v = k + w.C;
    load_tile<HS>(k_smem, k, 3 * w.C, w.row0, args.T);
    load_tile<HS>(v_smem, v, 3 * w.C, w.row0, args.T);

    float dk[kOwn] = {}, dv[kOwn] = {};
    for (int q0 = args.causal ? w.row0 : 0; q0 < args.T; q0 += Br) {
        __syncthreads();
        load_tile<HS>(q_smem, q, 3 * w.C, q0, args.T, args.scale);
        load_tile<HS>(do_smem, args.dout + w.out, w.C, q0, args.T);
        __syncthreads();
        float p[Br], ds[Br];
        dot_rows<HS>(p, k_smem[threadIdx.x], q_smem[w.line]);
        dot_rows<HS>(ds, v_smem[threadIdx.x], do_smem[w.line]);
        for (int i = 0; i < Br; i++) {
            const bool seen = q0 + i < args.T && (!args.causal || w.row <= q0 + i);
            p[i] = seen ? expf(p[i] - args.lse[w.stat + q0 + i]) * args.inverse_sum[w.stat + q0 + i] : 0.f;
            ds[i] = seen ? p[i] * (ds[i] - args.D[w.stat + q0 + i]) : 0.f;
        }
        add_rows<HS>(dv, p, do_smem[w.line]);
        add_rows<HS>(dk, ds, q_smem[w.line]);  // q_smem is scaled
    }
    if (w.row >= args.T) return;
    store(args.dqkv + w.qkv + (w.row * 3 + 1) * w.C + w.line * kOwn, dk, 1.f);
    store(args.dqkv + w.qkv + (w.row * 3 + 2) * w.C + w.line * kOwn, dv, 1.f);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

// Completes args from the shape, and starts a block for each tile of rows of each head.
void launch(const Cuda& dev, void (*kernel)(Args), const AttentionShape& s, Args args) {
    check_shape(kName, whole(s));
    for (const float* x : {args.qkv, args.dout}) check_aligned(kName, "qkv or dout", x);
    args.T = s.T, args.NH = s.NH, args.heads = s.B * s.NH, args.causal = s.causal, args.scale = s.resolved_scale();
    const size_t blocks = static_cast<size_t>(args.heads) * ceil_div(s.T, kThreads * kOwn / s.HS);
    if (blocks > INT_MAX) throw Error(format("%s: %zu tiles are too many: use a smaller batch", kName, blocks));
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, dev.stream>>>(args);
    LAUNCH_CHECK(kName);
}

void forward(const Cuda& dev, float* out, float* lse, float*, void*, const float* qkv, const AttentionShape& s) {
    launch(dev, s.HS == 64 ? forward_kernel<64> : forward_kernel<128>, s, {out, lse, nullptr, nullptr, nullptr, qkv});
}

// dq_kernel comes first, because dkdv_kernel needs the D and the inverse_sum that it writes.
void backward(const Cuda& dev, float* dqkv, void* scratch, const float* dout, const float* out, const float* lse,
              const float*, const float* qkv, const AttentionShape& s) {
    float *D = static_cast<float*>(scratch), *inverse_sum = D + static_cast<size_t>(s.B) * s.NH * s.T;
    const Args args{const_cast<float*>(out), const_cast<float*>(lse), dqkv, D, inverse_sum, qkv, dout};
    launch(dev, s.HS == 64 ? dq_kernel<64> : dq_kernel<128>, s, args);
    launch(dev, s.HS == 64 ? dkdv_kernel<64> : dkdv_kernel<128>, s, args);
}

size_t scratch_bytes(const AttentionShape& s) {
    return 2 * static_cast<size_t>(s.B) * s.NH * s.T * sizeof(float);
}

}  // namespace

const AttentionKernel<float> flash_simple = {kName, 75, true, no_bytes, scratch_bytes, forward, backward};
