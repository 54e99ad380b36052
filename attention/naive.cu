// Naive attention: the formula step by step, a softmax between matrix products. It is the baseline
// of every benchmark.
//
// Forward:
//   S   = scale·Q Kᵀ
//   P   = softmax S
//   out = P V
//   lse = log Σ exp S
//
// Backward:
//   dP = dO Vᵀ
//   D  = rowsum(P∘dP)
//   dS = P∘(dP − D)
//   dQ = scale·dS K
//   dK = scale·dSᵀ Q
//   dV = Pᵀ dO
//
// cuBLAS does the products, reading q, k and v in place from the output of the QKV matmul. A head
// is a matrix with row stride 3C, so nothing is permuted. The two softmax kernels in between are
// ours.
//
// S, P, dP and dS are (B, NH, Tq, Tk), and their traffic bounds this kernel. At HS = 64 an element
// of S costs 256 FLOPs and crosses the memory bus four times in forward; in backward it costs 512
// FLOPs and crosses it seven times. Flash attention's whole idea is never to write them.
//
// P overwrites S in `att`, which backward needs, and dS overwrites dP in scratch. Rows are padded
// to 16 bytes, so that any Tk gets wide accesses. Products skip nothing that a mask hides. P and
// dS are zero there.
//
// Writes: forward out, lse and att, backward dq, dk and dv (every element).
// Scratch: dP, followed by the lists of matrices.
// Limits: any Tq and Tk, in backward Tq = Tk. A row of HS elements is a multiple of 16 bytes.
// Run: ./dev/bench_attention --kernel naive
#include "attention/launch.h"
#include "cuda/cublas.h"
#include "cuda/vector.cuh"

namespace {

constexpr char kName[] = "naive";

// -------------------------------------------------------------------------------------------------
// Softmax. A warp works on a short row of S, so that it needs no barrier, and a block on a long
// one. (With a warp for each long row, so many would be in flight at once that a row would have
// left the cache by the time of its second pass.)

constexpr int kThreads = 128;
constexpr int kShortRowBytes = 2048;

// Elements from one row of S to the next.
template <class X>
__host__ __device__ constexpr int row_stride(int Tk) {
    return (Tk + kVec<X> - 1) / kVec<X> * kVec<X>;
}

// Overwrites S with P in att (rows, ld), with zeros after the row's last visible key, and writes
// lse. A row is a query (b, h, i), and RowThreads threads work on it, a warp or the block.
template <class X, int RowThreads>
__global__ void softmax_forward_kernel(X* att, RowStatsView<float> lse, size_t rows, int Tq, int Tk,
                                       int shift) {
    constexpr int V = kVec<X>;
    const size_t row = size_t(blockIdx.x) * (kThreads / RowThreads) + threadIdx.x / RowThreads;
    if (row >= rows)
        return;  // all threads of a row, or none

    const int thread = threadIdx.x % RowThreads;  // of the row's
    const int i = row % Tq;
    const int keys = visible_keys(i, Tk, shift);
    const int ld = row_stride<X>(Tk);
    X* s = att + row * ld;

    // One pass finds the maximum m and the sum l. When m grows, what was summed so far shrinks.
    float m = -INFINITY;
    float l = 0.f;
    for (int j = thread * V; j < keys; j += RowThreads * V) {
        const Vec<X, V> x = load<V>(s + j);
        float m_new = m;
        for (int e = 0; e < V; e++)
            if (j + e < keys)
                m_new = fmaxf(m_new, x[e]);
        float sum = 0.f;
        for (int e = 0; e < V; e++)
            if (j + e < keys)
                sum += expf(x[e] - m_new);
        l = l * expf(m - m_new) + sum;
        m = m_new;
    }
    const float m_row = RowThreads == kWarp ? warp_max(m) : block_max(m);
    l *= expf(m - m_row);
    l = RowThreads == kWarp ? warp_sum(l) : block_sum(l);
    if (thread == 0)
        lse.ptr[row / Tq * lse.head_stride + i] = m_row + logf(l);

    const float inv_l = 1.f / l;
    for (int j = thread * V; j < ld; j += RowThreads * V) {
        Vec<float, V> p{};
        if (j < keys) {
            const Vec<X, V> x = load<V>(s + j);
            for (int e = 0; e < V; e++)
                p.x[e] = (j + e < keys) ? expf(x[e] - m_row) * inv_l : 0.f;
        }
        store(s + j, p);
    }
}

// Overwrites dP with dS in datt (rows, ld). The products that follow apply scale.
template <class X, int RowThreads>
__global__ void softmax_backward_kernel(X* datt, const X* att, size_t rows, int Tq, int Tk,
                                        int shift) {
    constexpr int V = kVec<X>;
    const size_t row = size_t(blockIdx.x) * (kThreads / RowThreads) + threadIdx.x / RowThreads;
    if (row >= rows)
        return;  // all threads of a row, or none

    const int thread = threadIdx.x % RowThreads;  // of the row's
    const int i = row % Tq;
    const int keys = visible_keys(i, Tk, shift);
    const int ld = row_stride<X>(Tk);
    const X* p_row = att + row * ld;
    X* dp_row = datt + row * ld;

    float D = 0.f;
    for (int j = thread * V; j < keys; j += RowThreads * V) {
        const Vec<X, V> p = load<V>(p_row + j);
        const Vec<X, V> dp = load<V>(dp_row + j);
        for (int e = 0; e < V; e++)
            if (j + e < keys)
                D += p[e] * dp[e];
    }
    D = RowThreads == kWarp ? warp_sum(D) : block_sum(D);

    for (int j = thread * V; j < ld; j += RowThreads * V) {
        Vec<float, V> ds{};
        if (j < keys) {
            const Vec<X, V> p = load<V>(p_row + j);
            const Vec<X, V> dp = load<V>(dp_row + j);
            for (int e = 0; e < V; e++)
                ds.x[e] = (j + e < keys) ? p[e] * (dp[e] - D) : 0.f;
        }
        store(dp_row + j, ds);
    }
}

// -------------------------------------------------------------------------------------------------
// Products

// One row-major matrix for each (b, h), at ptr + b·batch_stride + h·head_stride. Operands and
// results alike have a const ptr, because cuBLAS takes both as void*.
template <class X>
struct Matrices {
    const X* ptr;
    size_t batch_stride;
    size_t head_stride;
    int ld;  // elements from a row to the next
    int rows;
    int cols;
    cublasOperation_t op = CUBLAS_OP_N;  // what a product does with it first
    void** list = nullptr;               // their addresses, as cuBLAS wants them

    Matrices transposed() const {
        Matrices t = *this;
        t.op = CUBLAS_OP_T;
        return t;
    }
};

// A head's matrix of tokens, (T, HS), of q, out, ….
template <class X>
auto tokens(const HeadsView<X>& x, const HeadsShape& s) {
    return Matrices<std::remove_const_t<X>>{.ptr = x.ptr,
                                            .batch_stride = x.batch_stride,
                                            .head_stride = size_t(s.HS),
                                            .ld = static_cast<int>(x.token_stride),
                                            .rows = s.T,
                                            .cols = s.HS};
}

// S, P, dP or dS, (Tq, Tk) with rows padded to 16 bytes.
template <class X>
Matrices<X> scores(const X* att, const AttentionShape& s) {
    const int ld = row_stride<X>(s.Tk);
    const size_t head_stride = size_t(s.Tq) * ld;
    return {.ptr = att,
            .batch_stride = s.NH * head_stride,
            .head_stride = head_stride,
            .ld = ld,
            .rows = s.Tq,
            .cols = s.Tk};
}

constexpr int kMaxLists = 9;  // of a pass; backward has the most

// Bytes of att, and of backward's scratch: each holds scores, followed by the lists of a pass.
template <class X>
size_t scores_and_lists_bytes(const AttentionShape& s) {
    const size_t heads = size_t(s.B) * s.NH;
    const size_t scores_bytes = s.B * scores<X>(nullptr, s).batch_stride * sizeof(X);
    const size_t lists_bytes = kMaxLists * heads * sizeof(void*);
    return scores_bytes + lists_bytes;
}

// Writes the lists of all matrices of a pass. A thread writes one (b, h)'s entry of each.
template <class... M>
__global__ void list_kernel(int heads, int NH, M... matrices) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= heads)
        return;
    const int b = i / NH;
    const int h = i % NH;
    const auto write = [&](const auto& m) {
        m.list[i] = (void*)(m.ptr + b * m.batch_stride + h * m.head_stride);
    };
    (write(matrices), ...);
}

// Gives each of `matrices` its list and fills them all in one launch. The lists lie behind
// `before`, which is the scores in att or scratch.
template <class X, class... M>
void make_lists(const Cuda& dev, const AttentionShape& s, const Matrices<X>& before,
                M&... matrices) {
    static_assert(sizeof...(M) <= kMaxLists);
    const int heads = s.B * s.NH;
    void** list = (void**)(before.ptr + s.B * before.batch_stride);
    const auto place = [&](auto& m) {
        m.list = list;
        list += heads;
    };
    (place(matrices), ...);
    list_kernel<<<ceil_div(heads, kThreads), kThreads, 0, dev.stream>>>(heads, s.NH, matrices...);
    LAUNCH_CHECK("list_kernel");
}

// c = alpha · a b for each (b, h). To cuBLAS, which is column-major, each of our row-major matrices
// is its transpose. So we ask it for cᵀ = bᵀ aᵀ.
template <class X>
void multiply(const Cuda& dev, const AttentionShape& s, Matrices<X> c, float alpha, Matrices<X> a,
              Matrices<X> b) {
    constexpr cudaDataType type = std::is_same_v<X, bf16> ? CUDA_R_16BF : CUDA_R_32F;
    const auto compute =
        (std::is_same_v<X, float> && dev.tf32) ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    const float beta = 0.f;
    const int k = a.op == CUBLAS_OP_N ? a.cols : a.rows;
    CUBLAS_CHECK(cublasGemmBatchedEx(dev.blas, b.op, a.op, c.cols, c.rows, k, &alpha, b.list, type,
                                     b.ld, a.list, type, a.ld, &beta, c.list, type, c.ld,
                                     s.B * s.NH, compute, CUBLAS_GEMM_DEFAULT));
}

// -------------------------------------------------------------------------------------------------
// Launchers

// Launches one of a softmax's two kernels, with a warp for each row of S if rows are short and a
// block for each if not.
template <class X, class Kernel, class... Tensors>
void launch(const Cuda& dev, const AttentionShape& s, Kernel* kernel_of_warps,
            Kernel* kernel_of_blocks, Tensors... tensors) {
    const bool short_rows = s.Tk * sizeof(X) <= kShortRowBytes;
    const size_t rows = s.rows();
    const size_t blocks = short_rows ? (rows - 1) / (kThreads / kWarp) + 1 : rows;
    if (blocks > INT_MAX)
        throw Error(format("%s: %zu rows are more than one launch covers; use a smaller batch",
                           kName, rows));
    Kernel* kernel = short_rows ? kernel_of_warps : kernel_of_blocks;
    kernel<<<unsigned(blocks), kThreads, 0, dev.stream>>>(tensors..., rows, s.Tq, s.Tk, s.shift());
    LAUNCH_CHECK("softmax kernel");
}

template <class X>
void forward(const Cuda& dev, const AttentionForward<X>& c) {
    const AttentionShape& s = c.s;
    auto q = tokens(c.q, s.queries());
    auto k = tokens(c.k, s.keys());
    auto v = tokens(c.v, s.keys());
    auto out = tokens(c.out, s.queries());
    auto att = scores(c.att, s);
    make_lists(dev, s, att, q, k, v, out, att);

    // [quote]
    multiply(dev, s, att, s.resolved_scale(), q, k.transposed());  // S, which becomes P
    launch<X>(dev, s, softmax_forward_kernel<X, kWarp>, softmax_forward_kernel<X, kThreads>, c.att,
              c.lse);
    multiply(dev, s, out, 1.f, att, v);
    // [end]
}

template <class X>
void backward(const Cuda& dev, const AttentionBackward<X>& c) {
    const AttentionShape& s = c.s;
    X* dp = static_cast<X*>(c.scratch);  // becomes dS
    auto q = tokens(c.q, s.queries());
    auto k = tokens(c.k, s.keys());
    auto v = tokens(c.v, s.keys());
    auto dq = tokens(c.dq, s.queries());
    auto dk = tokens(c.dk, s.keys());
    auto dv = tokens(c.dv, s.keys());
    auto dout = tokens(c.dout, s.queries());
    auto att = scores(c.att, s);
    auto datt = scores(dp, s);
    make_lists(dev, s, datt, q, k, v, dq, dk, dv, dout, att, datt);

    multiply(dev, s, dv, 1.f, att.transposed(), dout);
    multiply(dev, s, datt, 1.f, dout, v.transposed());
    launch<X>(dev, s, softmax_backward_kernel<X, kWarp>, softmax_backward_kernel<X, kThreads>, dp,
              c.att);
    multiply(dev, s, dq, s.resolved_scale(), datt, k);
    multiply(dev, s, dk, s.resolved_scale(), datt.transposed(), q);
}

template <class X>
constexpr AttentionKernel<X> kNaive = {
    .name = kName,
    .min_sm = 75,
    .flash = false,
    .supports = {.any_head_size = true},
    .saved_bytes = scores_and_lists_bytes<X>,
    .scratch_bytes = scores_and_lists_bytes<X>,
    .unchecked = {.forward = forward<X>, .backward = backward<X>},
};

}  // namespace

const AttentionKernel<float> naive_fp32 = kNaive<float>;
const AttentionKernel<bf16> naive_bf16 = kNaive<bf16>;
