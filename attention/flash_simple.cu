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
// A thread owns one row, and at HS 128 two neighbouring threads share one. The block's own rows
// stay in shared memory, while tiles of the others pass by. Each output has one writer, so every
// run gives the same bits. Exercise: give a thread two rows.
//
// Writes: forward out and lse, backward dq, dk and dv (every element).  Scratch: D and 1/ΣP.
// Limits: HS in {64, 128}, any Tq and Tk, in backward Tq = Tk.
// Run: ./dev/bench_attention --kernel flash_simple
#include "attention/launch.h"

namespace {

constexpr char kName[] = "flash_simple";

// -------------------------------------------------------------------------------------------------
// Tiles. A line is what one thread owns of a row: at HS 64 the row, at HS 128 half of it.

constexpr int kThreads = 64;  // of a block, each with a line of the block's own tiles
constexpr int kPassing = 16;  // lines of a passing tile: 16 rows at HS 64, 8 at HS 128
constexpr int kOwn = 64;      // elements that a thread owns of a row, the length of a line
constexpr int kTerms = 16;    // terms of a sum that are added in one go: short chains round less
constexpr int kColumns = 16;  // columns of a line whose sums are made at once, in registers

// A line in shared memory. With 4 floats more, 8 threads that read 16 bytes of a line each hit
// different banks.
constexpr int kLine = kOwn + 4;
using Line = float[kLine];

template <int HS>
constexpr int kSplit = HS / kOwn;  // lines of a row, and threads that share it
template <int HS>
constexpr int kRowStride = kSplit<HS> * kLine;  // floats from a row of a tile to the next

static_assert(2 * (kThreads + kPassing) * sizeof(Line) <= (48 << 10),
              "dq_kernel's tiles do not fit");

// -------------------------------------------------------------------------------------------------
// Loads

// Copies rows of a head from row0 on, times factor. Rows from `end` on become zeros.
template <int HS, int Lines>
__device__ void load_tile(Line (&tile)[Lines], const float* head, size_t row_stride, int row0,
                          int end, float factor = 1.f) {
    for (int i = 4 * threadIdx.x; i < Lines * kOwn; i += 4 * kThreads) {
        const int row = row0 + i / HS;
        const int column = i % HS;
        float4 x{0.f, 0.f, 0.f, 0.f};
        if (row < end)
            x = *reinterpret_cast<const float4*>(head + row * row_stride + column);
        x.x *= factor;
        x.y *= factor;
        x.z *= factor;
        x.w *= factor;
        *reinterpret_cast<float4*>(&tile[i / kOwn][i % kOwn]) = x;
    }
}

// -------------------------------------------------------------------------------------------------
// Products

// s[j] = own · row j of a tile, summed over all HS columns. `own` is this thread's line of its row,
// and first_line the line of row 0 at the same columns.
template <int HS, int N>
__device__ void multiply_abt(float (&s)[N], const float* own, const float* first_line) {
    for (float& x : s)
        x = 0.f;  // if the callers did this, dq_kernel would take 19 registers more at HS 64
#pragma unroll 1  // only kTerms of `own` at a time are in registers
    for (int c = 0; c < kOwn; c += kTerms)
        for (int j = 0; j < N; j++) {
            float sum = 0.f;
            for (int d = c; d < c + kTerms; d++)
                sum += own[d] * first_line[j * kRowStride<HS> + d];
            s[j] += sum;
        }
    if (kSplit<HS> == 2)
        for (float& x : s)
            x += __shfl_xor_sync(~0u, x, 1);  // the other half of the row
}

// o += Σ_j p[j]·row j of a tile, at this thread's columns, where row 0 has first_line. The tile's
// sum is made apart and then added, so that the error does not grow with T.
template <int HS, int N>
__device__ void add_ab(float (&o)[kOwn], const float (&p)[N], const float* first_line) {
#pragma unroll
    for (int c = 0; c < kOwn; c += kColumns) {
        float sum[kColumns] = {};
        for (int j = 0; j < N; j++)
            for (int d = 0; d < kColumns; d++)
                sum[d] += p[j] * first_line[j * kRowStride<HS> + c + d];
        for (int d = 0; d < kColumns; d++)
            o[c + d] += sum[d];
    }
}

// This thread's line of row t of a head.
template <int HS, class X>
__device__ X* line_of_row(const WorkTile& w, const HeadsView<X>& x, int t) {
    const int line = threadIdx.x % kSplit<HS>;
    return w.head<HS>(x) + t * x.token_stride + line * kOwn;
}

__device__ void store_line(float* to, const float (&x)[kOwn], float factor) {
    for (int d = 0; d < kOwn; d++)
        to[d] = x[d] * factor;
}

// -------------------------------------------------------------------------------------------------
// Forward

using ForwardArgs = CallArgs<AttentionForward<float>>;

template <int HS>
__global__ void __launch_bounds__(kThreads, 4)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
    constexpr int Br = kThreads / kSplit<HS>;
    constexpr int Bc = kPassing / kSplit<HS>;
    __shared__ __align__(16) Line q_smem[kThreads];
    __shared__ __align__(16) Line k_smem[kPassing];
    __shared__ __align__(16) Line v_smem[kPassing];

    const int line = threadIdx.x % kSplit<HS>;  // which line of its row this thread owns
    const WorkTile w = work_tile(args.heads, args.s.NH, TileOrder::last_to_first);
    const int q0 = w.tile * Br;
    const int query = q0 + threadIdx.x / kSplit<HS>;  // this thread's
    const int Tq = args.s.Tq;
    const int Tk = args.s.Tk;
    load_tile<HS>(q_smem, w.head<HS>(args.q), args.q.token_stride, q0, Tq, args.scale);

    float o[kOwn] = {};
    float m = -INFINITY;
    // fp64, because an error of l is an error of out, and so of D. D's error is the same for all
    // keys, so it adds up in dQ.
    double l = 0.;
    for (int k0 = 0; k0 < min(Tk, q0 + Br + args.shift); k0 += Bc) {
        __syncthreads();  // everyone is done with the last tile
        load_tile<HS>(k_smem, w.head<HS>(args.k), args.k.token_stride, k0, Tk);
        load_tile<HS>(v_smem, w.head<HS>(args.v), args.v.token_stride, k0, Tk);
        __syncthreads();  // the tile is there

        // [quote]
        float s[Bc];
        float m_new = m;
        float l_tile = 0.f;
        multiply_abt<HS>(s, q_smem[threadIdx.x], k_smem[line]);
        for (int j = 0; j < Bc; j++) {
            if (k0 + j >= Tk || k0 + j > query + args.shift)
                s[j] = -INFINITY;
            m_new = fmaxf(m_new, s[j]);
        }
        const float rescale = expf(m - m_new);  // everything so far was relative to the old m
        for (float& x : s) {
            x = expf(x - m_new);  // S becomes P
            l_tile += x;
        }
        for (float& x : o)
            x *= rescale;
        l = l * rescale + l_tile;
        m = m_new;
        add_ab<HS>(o, s, v_smem[line]);
        // [end]
    }

    if (query >= Tq)
        return;
    w.stats(args.lse)[query] = m + logf(static_cast<float>(l));
    store_line(line_of_row<HS>(w, args.out, query), o, static_cast<float>(1. / l));
}

// -------------------------------------------------------------------------------------------------
// Backward. The rounding of lse to fp32 is an error of all P of a row, and a large one where lse is
// large. A row of P must sum to 1. So dq_kernel also adds up the P that it computes, and both
// kernels divide by that sum.

struct BackwardArgs : CallArgs<AttentionBackward<float>> {
    float* D = nullptr;            // (B, NH, T) in scratch
    float* inverse_sum = nullptr;  // likewise, 1/ΣP
};

template <int HS>
__global__ void __launch_bounds__(kThreads, 4)
    dq_kernel(const __grid_constant__ BackwardArgs args) {
    constexpr int Br = kThreads / kSplit<HS>;
    constexpr int Bc = kPassing / kSplit<HS>;
    __shared__ __align__(16) Line q_smem[kThreads];
    __shared__ __align__(16) Line do_smem[kThreads];
    __shared__ __align__(16) Line k_smem[kPassing];
    __shared__ __align__(16) Line v_smem[kPassing];

    const int line = threadIdx.x % kSplit<HS>;  // which line of its row this thread owns
    const WorkTile w = work_tile(args.heads, args.s.NH, TileOrder::last_to_first);
    const int q0 = w.tile * Br;
    const int query = q0 + threadIdx.x / kSplit<HS>;  // this thread's
    const int Tq = args.s.Tq;
    const int Tk = args.s.Tk;
    load_tile<HS>(q_smem, w.head<HS>(args.q), args.q.token_stride, q0, Tq, args.scale);
    load_tile<HS>(do_smem, w.head<HS>(args.dout), args.dout.token_stride, q0, Tq);
    __syncthreads();

    // D is the product of dO with a tile of one row, O, and so it is summed in the order of dO Vᵀ.
    // Then dP − D is exactly 0 where one key has all the weight, because O is its V.
    float D[1];
    float dq[kOwn] = {};
    float sum = 0.f;
    const int row = min(query, Tq - 1);  // threads without a query read the last one's out and lse
    multiply_abt<HS>(D, do_smem[threadIdx.x], line_of_row<HS>(w, args.out, row));
    const float lse = w.stats(args.lse)[row];

    for (int k0 = 0; k0 < min(Tk, q0 + Br + args.shift); k0 += Bc) {
        __syncthreads();  // everyone is done with the last tile
        load_tile<HS>(k_smem, w.head<HS>(args.k), args.k.token_stride, k0, Tk);
        load_tile<HS>(v_smem, w.head<HS>(args.v), args.v.token_stride, k0, Tk);
        __syncthreads();  // the tile is there

        float p[Bc];
        multiply_abt<HS>(p, q_smem[threadIdx.x], k_smem[line]);
        float ds[Bc];
        multiply_abt<HS>(ds, do_smem[threadIdx.x], v_smem[line]);  // dP
        float sum_tile = 0.f;
        for (int j = 0; j < Bc; j++) {
            const bool hidden = k0 + j >= Tk || k0 + j > query + args.shift;
            p[j] = hidden ? 0.f : expf(p[j] - lse);
            sum_tile += p[j];
            ds[j] = p[j] * (ds[j] - D[0]);
        }
        sum += sum_tile;
        add_ab<HS>(dq, ds, k_smem[line]);
    }

    if (query >= Tq)
        return;
    const size_t stat = static_cast<size_t>(w.bh) * Tq + query;
    args.D[stat] = D[0];
    args.inverse_sum[stat] = 1.f / sum;
    store_line(line_of_row<HS>(w, args.dq, query), dq, args.scale / sum);
}

// Runs after dq_kernel, which writes D and inverse_sum.
template <int HS>
__global__ void __launch_bounds__(kThreads, 4)
    dkdv_kernel(const __grid_constant__ BackwardArgs args) {
    constexpr int kLines = kPassing / 2;  // half as many, because there are two sums
    constexpr int Br = kLines / kSplit<HS>;
    constexpr int Bc = kThreads / kSplit<HS>;
    __shared__ __align__(16) Line k_smem[kThreads];
    __shared__ __align__(16) Line v_smem[kThreads];
    __shared__ __align__(16) Line q_smem[kLines];
    __shared__ __align__(16) Line do_smem[kLines];

    const int line = threadIdx.x % kSplit<HS>;  // which line of its row this thread owns
    const WorkTile w = work_tile(args.heads, args.s.NH, TileOrder::first_to_last);
    const int k0 = w.tile * Bc;
    const int key = k0 + threadIdx.x / kSplit<HS>;  // this thread's
    const int Tq = args.s.Tq;
    const int Tk = args.s.Tk;
    const float* lse = w.stats(args.lse);
    const float* D = args.D + static_cast<size_t>(w.bh) * Tq;
    const float* inverse_sum = args.inverse_sum + static_cast<size_t>(w.bh) * Tq;
    load_tile<HS>(k_smem, w.head<HS>(args.k), args.k.token_stride, k0, Tk);
    load_tile<HS>(v_smem, w.head<HS>(args.v), args.v.token_stride, k0, Tk);

    float dk[kOwn] = {};
    float dv[kOwn] = {};
    for (int q0 = max(0, k0 - args.shift); q0 < Tq; q0 += Br) {
        __syncthreads();  // everyone is done with the last tile
        load_tile<HS>(q_smem, w.head<HS>(args.q), args.q.token_stride, q0, Tq, args.scale);
        load_tile<HS>(do_smem, w.head<HS>(args.dout), args.dout.token_stride, q0, Tq);
        __syncthreads();  // the tile is there

        float p[Br];
        multiply_abt<HS>(p, k_smem[threadIdx.x], q_smem[line]);
        float ds[Br];
        multiply_abt<HS>(ds, v_smem[threadIdx.x], do_smem[line]);  // dP
        for (int i = 0; i < Br; i++) {
            const bool visible = q0 + i < Tq && key <= q0 + i + args.shift;
            p[i] = visible ? expf(p[i] - lse[q0 + i]) * inverse_sum[q0 + i] : 0.f;
            ds[i] = visible ? p[i] * (ds[i] - D[q0 + i]) : 0.f;
        }
        add_ab<HS>(dv, p, do_smem[line]);
        add_ab<HS>(dk, ds, q_smem[line]);  // q_smem is scaled
    }

    if (key >= Tk)
        return;
    store_line(line_of_row<HS>(w, args.dk, key), dk, 1.f);
    store_line(line_of_row<HS>(w, args.dv, key), dv, 1.f);
}

// -------------------------------------------------------------------------------------------------
// Launchers

// Starts a block for each tile of each head. Tiles of keys are as many as tiles of queries, because
// backward has Tq = Tk.
template <class Args>
void launch(const Cuda& dev, void (*kernel)(Args), const Args& args) {
    const int threads_of_row = args.s.HS / kOwn;
    const int tiles = ceil_div(args.s.Tq, kThreads / threads_of_row);
    kernel<<<count_blocks(kName, tiles, args.heads), kThreads, 0, dev.stream>>>(args);
    LAUNCH_CHECK(kName);
}

void forward(const Cuda& dev, const AttentionForward<float>& c) {
    const ForwardArgs args{c};
    launch(dev, c.s.HS == 64 ? forward_kernel<64> : forward_kernel<128>, args);
}

void backward(const Cuda& dev, const AttentionBackward<float>& c) {
    BackwardArgs args{c};
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
