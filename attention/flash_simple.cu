// Flash attention, fp32, as plain as a whole kernel can be (every GPU from sm_75). Read this rung
// first.
//
// Forward, a thread's query row against one tile of Bc keys at a time:
//   S  = scale·Q Kᵀ
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
//   dQ = scale·dS K                dq_kernel: a thread owns a query, and keys pass by
//   dK = scale·dSᵀ Q               dkdv_kernel: a thread owns a key, and queries pass by
//   dV = Pᵀ dO                     dkdv_kernel, too
//
// New against naive: nothing of size T × T is stored. m is the largest S so far. When it rises,
// what was summed so far shrinks by e^{m−m'}, so one pass over the keys is enough. Backward
// computes P again from lse.
//
// One thread owns one row. At HS 128 two neighbours share it. A block's own rows stay in shared
// memory, and tiles of others pass by. Each output has one writer, so every run gives the same
// bits. Exercise: give a thread two rows.
// Writes: forward out and lse, backward dq, dk and dv (every element).  Scratch: D and 1/ΣP.
// Limits: HS in {64, 128}, any Tq and Tk, in backward Tq = Tk.   Run: ./dev/bench_attention
// --kernel flash_simple
#include "attention/launch.h"

namespace {

// -------------------------------------------------------------------------------------------------
// Tiles. A line holds what one thread owns of a row. With +4 floats, 8 threads that read 16 bytes
// of a line each hit different banks.

constexpr int kThreads = 64;  // of a block, and lines of its own tile
// lines of a passing tile: at HS 64 Bc = 16 keys or 8 queries, at HS 128 half as many
constexpr int kPassing = 16;
constexpr int kOwn = 64;  // elements of a row that a thread owns
// terms of a sum that are added in one go, because short chains of additions round less
constexpr int kTerms = 16;
using Line = float[kOwn + 4];
template <int HS>
constexpr int kSplit = HS / kOwn;  // lines of a row, and threads that share it
constexpr char kName[] = "flash_simple";
static_assert(2 * (kThreads + kPassing) * sizeof(Line) <= 48 << 10, "dq_kernel's tiles do not fit");

// Copies rows of a head from row0 on, times factor. Rows from T on become zeros.
template <int HS, int Lines>
__device__ void load_tile(Line (&tile)[Lines], const float* head, size_t token, int row0, int T,
                          float factor = 1.f) {
    for (int i = 4 * threadIdx.x; i < Lines * kOwn; i += 4 * kThreads) {
        float4 x{0.f, 0.f, 0.f, 0.f};
        if (row0 + i / HS < T)
            x = *reinterpret_cast<const float4*>(head + (row0 + i / HS) * token + i % HS);
        x.x *= factor;
        x.y *= factor;
        x.z *= factor;
        x.w *= factor;
        *reinterpret_cast<float4*>(&tile[i / kOwn][i % kOwn]) = x;
    }
}

// s[j] = own · row j of a tile. `row` is this thread's line of row 0.
template <int HS, int N>
__device__ void dot_rows(float (&s)[N], const float* own, const float* row) {
    for (float& x : s)
        x = 0.f;
#pragma unroll 1  // only kTerms of `own` at a time are in registers
    for (int c = 0; c < kOwn; c += kTerms)
        for (int j = 0; j < N; j++) {
            float sum = 0.f;
            for (int d = c; d < c + kTerms; d++)
                sum += own[d] * row[j * kSplit<HS> * (kOwn + 4) + d];
            s[j] += sum;
        }
    if (kSplit<HS> == 2)
        for (float& x : s)
            x += __shfl_xor_sync(~0u, x, 1);
}

// acc += Σ_j p[j]·row j of a tile. A tile has a sum of its own, so that the error does not grow
// with T.
template <int HS, int N>
__device__ void add_rows(float (&acc)[kOwn], const float (&p)[N], const float* row) {
#pragma unroll
    for (int c = 0; c < kOwn; c += kTerms) {
        float sum[kTerms] = {};
        for (int j = 0; j < N; j++)
            for (int d = 0; d < kTerms; d++)
                sum[d] += p[j] * row[j * kSplit<HS> * (kOwn + 4) + c + d];
        for (int d = 0; d < kTerms; d++)
            acc[c + d] += sum[d];
    }
}

__device__ void store(float* to, const float (&x)[kOwn], float factor) {
    for (int d = 0; d < kOwn; d++)
        to[d] = x[d] * factor;
}

template <class Call>
struct Args : Call {   // the tensors
    int heads, shift;  // heads = B·NH. Query i sees keys j ≤ i + shift
    float scale;
    float *D = nullptr, *inverse_sum = nullptr;  // (B,NH,T) each, in backward's scratch
    explicit Args(const Call& c)
        : Call(c), heads(c.s.B * c.s.NH), shift(c.s.shift()), scale(c.s.resolved_scale()) {}
};
using ForwardArgs = Args<AttentionForward<float>>;
using BackwardArgs = Args<AttentionBackward<float>>;

// What a block works on. Long rows come first, so that the last blocks to finish have little to do.
template <int HS>
struct WorkTile {
    int bh, b, h;  // the head
    // the block's first row, this thread's row and line
    int row0, row, line = threadIdx.x % kSplit<HS>;
    __device__ WorkTile(int heads, int NH, bool last_first) {
        const int tile = blockIdx.x / heads;
        const int tiles = gridDim.x / heads;
        bh = blockIdx.x % heads;
        b = bh / NH;
        h = bh % NH;
        row0 = (last_first ? tiles - 1 - tile : tile) * (kThreads / kSplit<HS>);
        row = row0 + threadIdx.x / kSplit<HS>;
    }
    template <class X>
    __device__ X* head(const HeadsView<X>& x) const {
        return x.ptr + b * x.batch_stride + h * HS;
    }
    // This thread's part of its row.
    template <class X>
    __device__ X* own(const HeadsView<X>& x) const {
        return head(x) + row * x.token_stride + line * kOwn;
    }
};

// -------------------------------------------------------------------------------------------------
// Forward

template <int HS>
__global__ void __launch_bounds__(kThreads, 4) forward_kernel(ForwardArgs args) {
    constexpr int Br = kThreads / kSplit<HS>;
    constexpr int Bc = kPassing / kSplit<HS>;
    __shared__ __align__(16) Line q_smem[kThreads], k_smem[kPassing], v_smem[kPassing];
    const WorkTile<HS> w(args.heads, args.s.NH, true);
    const int Tq = args.s.Tq;
    const int Tk = args.s.Tk;
    load_tile<HS>(q_smem, w.head(args.q), args.q.token_stride, w.row0, Tq, args.scale);

    float o[kOwn] = {};
    float m = -INFINITY;
    // in fp32 its rounding errors would be D's, the same for all keys, and add up in dQ
    double l = 0.;
    for (int kv0 = 0; kv0 < min(Tk, w.row0 + Br + args.shift); kv0 += Bc) {
        __syncthreads();  // everyone is done with the last tile
        load_tile<HS>(k_smem, w.head(args.k), args.k.token_stride, kv0, Tk);
        load_tile<HS>(v_smem, w.head(args.v), args.v.token_stride, kv0, Tk);
        __syncthreads();  // the tile is there
        // [quote]
        float s[Bc];
        float m_new = m;
        float l_tile = 0.f;
        dot_rows<HS>(s, q_smem[threadIdx.x], k_smem[w.line]);
        for (int j = 0; j < Bc; j++) {
            if (kv0 + j >= Tk || kv0 + j > w.row + args.shift)
                s[j] = -INFINITY;
            m_new = fmaxf(m_new, s[j]);
        }
        // everything so far was relative to the old m
        const float correction = expf(m - m_new);
        for (float& x : s)
            l_tile += x = expf(x - m_new);  // S becomes P
        for (float& x : o)
            x *= correction;
        l = l * correction + l_tile;
        m = m_new;
        add_rows<HS>(o, s, v_smem[w.line]);
        // [end]
    }
    if (w.row >= Tq)
        return;
    args.lse.ptr[w.bh * args.lse.head_stride + w.row] = m + logf(static_cast<float>(l));
    store(w.own(args.out), o, static_cast<float>(1. / l));
}

// -------------------------------------------------------------------------------------------------
// Backward. The rounding of lse to fp32 is an error of all P of a row, and a large one where lse is
// large. A row of P sums to 1, so dq_kernel also finds the sum that it gets, and both kernels
// divide by it.

template <int HS>
__global__ void __launch_bounds__(kThreads, 4) dq_kernel(BackwardArgs args) {
    constexpr int Br = kThreads / kSplit<HS>;
    constexpr int Bc = kPassing / kSplit<HS>;
    __shared__ __align__(16) Line q_smem[kThreads], do_smem[kThreads], k_smem[kPassing],
        v_smem[kPassing];
    const WorkTile<HS> w(args.heads, args.s.NH, true);
    const int Tq = args.s.Tq;
    const int Tk = args.s.Tk;
    load_tile<HS>(q_smem, w.head(args.q), args.q.token_stride, w.row0, Tq, args.scale);
    load_tile<HS>(do_smem, w.head(args.dout), args.dout.token_stride, w.row0, Tq);
    __syncthreads();
    // D is summed like dO Vᵀ. So dP − D is exactly 0 where one key has all the weight, because O is
    // its V.
    float D[1];
    float dq[kOwn] = {};
    float sum = 0.f;
    const int row = min(w.row, Tq - 1);  // threads without a row compute another one's again
    dot_rows<HS>(D, do_smem[threadIdx.x],
                 w.head(args.out) + row * args.out.token_stride + w.line * kOwn);
    const float lse = args.lse.ptr[w.bh * args.lse.head_stride + row];

    for (int kv0 = 0; kv0 < min(Tk, w.row0 + Br + args.shift); kv0 += Bc) {
        __syncthreads();
        load_tile<HS>(k_smem, w.head(args.k), args.k.token_stride, kv0, Tk);
        load_tile<HS>(v_smem, w.head(args.v), args.v.token_stride, kv0, Tk);
        __syncthreads();
        float p[Bc];
        float ds[Bc];
        float sum_tile = 0.f;
        dot_rows<HS>(p, q_smem[threadIdx.x], k_smem[w.line]);
        dot_rows<HS>(ds, do_smem[threadIdx.x], v_smem[w.line]);
        for (int j = 0; j < Bc; j++) {
            p[j] = kv0 + j >= Tk || kv0 + j > w.row + args.shift ? 0.f : expf(p[j] - lse);
            sum_tile += p[j];
            ds[j] = p[j] * (ds[j] - D[0]);
        }
        sum += sum_tile;
        add_rows<HS>(dq, ds, k_smem[w.line]);
    }
    if (w.row >= Tq)
        return;
    const size_t stat = static_cast<size_t>(w.bh) * Tq + w.row;
    args.D[stat] = D[0];
    args.inverse_sum[stat] = 1.f / sum;
    store(w.own(args.dq), dq, args.scale / sum);
}

template <int HS>
__global__ void __launch_bounds__(kThreads, 4) dkdv_kernel(BackwardArgs args) {
    // half as many, because there are two sums
    constexpr int kLines = kPassing / 2;
    constexpr int Br = kLines / kSplit<HS>;
    __shared__ __align__(16) Line k_smem[kThreads], v_smem[kThreads], q_smem[kLines],
        do_smem[kLines];
    const WorkTile<HS> w(args.heads, args.s.NH, false);  // its rows are keys
    const int Tq = args.s.Tq;
    const int Tk = args.s.Tk;
    const float* lse = args.lse.ptr + w.bh * args.lse.head_stride;
    const float* D = args.D + static_cast<size_t>(w.bh) * Tq;
    const float* inverse_sum = args.inverse_sum + static_cast<size_t>(w.bh) * Tq;
    load_tile<HS>(k_smem, w.head(args.k), args.k.token_stride, w.row0, Tk);
    load_tile<HS>(v_smem, w.head(args.v), args.v.token_stride, w.row0, Tk);

    float dk[kOwn] = {};
    float dv[kOwn] = {};
    for (int q0 = max(0, w.row0 - args.shift); q0 < Tq; q0 += Br) {
        __syncthreads();
        load_tile<HS>(q_smem, w.head(args.q), args.q.token_stride, q0, Tq, args.scale);
        load_tile<HS>(do_smem, w.head(args.dout), args.dout.token_stride, q0, Tq);
        __syncthreads();
        float p[Br];
        float ds[Br];
        dot_rows<HS>(p, k_smem[threadIdx.x], q_smem[w.line]);
        dot_rows<HS>(ds, v_smem[threadIdx.x], do_smem[w.line]);
        for (int i = 0; i < Br; i++) {
            const bool seen = q0 + i < Tq && w.row <= q0 + i + args.shift;
            p[i] = seen ? expf(p[i] - lse[q0 + i]) * inverse_sum[q0 + i] : 0.f;
            ds[i] = seen ? p[i] * (ds[i] - D[q0 + i]) : 0.f;
        }
        add_rows<HS>(dv, p, do_smem[w.line]);
        add_rows<HS>(dk, ds, q_smem[w.line]);  // q_smem is scaled
    }
    if (w.row >= Tk)
        return;
    store(w.own(args.dk), dk, 1.f);
    store(w.own(args.dv), dv, 1.f);
}

// -------------------------------------------------------------------------------------------------
// Launchers

// Starts a block for each tile of queries of each head, or of keys, because backward has as many.
template <class Call>
void launch(const Cuda& dev, void (*kernel)(Args<Call>), const Args<Call>& args) {
    const size_t blocks =
        static_cast<size_t>(args.heads) * ceil_div(args.s.Tq, kThreads * kOwn / args.s.HS);
    if (blocks > INT_MAX)
        throw Error(format("%s: %zu tiles are too many: use a smaller batch", kName, blocks));
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, dev.stream>>>(args);
    LAUNCH_CHECK(kName);
}

void forward(const Cuda& dev, const AttentionForward<float>& c) {
    launch(dev, c.s.HS == 64 ? forward_kernel<64> : forward_kernel<128>, ForwardArgs(c));
}

// dq_kernel comes first, because dkdv_kernel needs the D and the inverse_sum that it writes.
void backward(const Cuda& dev, const AttentionBackward<float>& c) {
    BackwardArgs args(c);
    args.D = static_cast<float*>(c.scratch);
    args.inverse_sum = args.D + c.s.rows();
    launch(dev, c.s.HS == 64 ? dq_kernel<64> : dq_kernel<128>, args);
    launch(dev, c.s.HS == 64 ? dkdv_kernel<64> : dkdv_kernel<128>, args);
}

size_t scratch_bytes(const AttentionShape& s) {
    return 2 * s.rows() * sizeof(float);
}

}  // namespace

const AttentionKernel<float> flash_simple = {
    .name = kName,
    .min_sm = 75,
    .flash = true,
    .scratch_bytes = scratch_bytes,
    .unchecked = {.forward = forward, .backward = backward},
};
