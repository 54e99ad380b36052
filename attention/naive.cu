// Naive attention is the formula as it stands, three matrix products and a softmax. It is the baseline of every
// benchmark.
//
//   S = scale·Q Kᵀ      P = softmax S      out = P V                                  lse = log Σ exp S
//   dV = Pᵀ dO          dP = dO Vᵀ         dS = P∘(dP − D),  D = rowsum(P∘dP)
//   dQ = scale·dS K     dK = scale·dSᵀ Q
//
// cuBLAS does the products, one batched call for the matrices of all B·NH heads. It reads q, k and v where the QKV
// matmul left them. A head is a matrix with row stride 3C, so nothing is permuted. The two softmax kernels in between
// are ours.
//
// S, P, dP and dS are (B, NH, T, T), and they bound this kernel. At HS = 64 an element of S costs 256 FLOPs and crosses
// the memory bus four times in forward. In backward it is 512 FLOPs and seven times. Flash attention's whole idea is
// never to write them.
//
// P overwrites S in `att`, which backward needs, and dS overwrites dP in scratch, which also holds the pointers. Their
// rows are padded to 16 bytes, so that any T gets wide accesses. Products and softmax work on full squares. Above the
// diagonal a causal P and dS are zero.
//
// Writes: out, lse, att; dqkv (every element).  Accumulates into: nothing.
// Limits: any T ≥ 1. A row of HS elements is a multiple of 16 bytes. Every buffer is 16-byte aligned.
// Run: ./dev/bench_attention --kernel naive
#include "attention/attention.h"
#include "layers/gpu/cublas.h"
#include "layers/gpu/vector.cuh"

namespace {

// A warp works on a short row of S, so that it needs no barrier, and a block on a long one. With a warp each, so many
// long rows would be in flight that a row has left the cache when its second pass begins.
constexpr int kBlock = 128;
constexpr int kShortRowBytes = 2048;

template <int Threads>
__device__ float row_sum(float x) {
    return Threads == kWarp ? warp_sum(x) : block_sum(x);
}
template <int Threads>
__device__ float row_max(float x) {
    return Threads == kWarp ? warp_max(x) : block_max(x);
}

// Overwrites S with P in att (rows, ld), with zeros behind the row's last key, and writes lse (rows). A row is a query
// (b, h, i).
template <class X, int Threads, bool Causal>
__global__ void softmax_forward_kernel(X* att, float* lse, size_t rows, int T, int ld) {
    constexpr int V = kVec<X>;
    const size_t row = size_t(blockIdx.x) * (kBlock / Threads) + threadIdx.x / Threads;
    if (row >= rows) return;  // all threads of a row, or none
    const int lane = threadIdx.x % Threads;
    const int keys = Causal ? static_cast<int>(row % T) + 1 : T;
    X* s = att + row * ld;

    // One pass finds the maximum m and the sum l. When m grows, what was summed so far shrinks.
    float m = -INFINITY, l = 0.f;
    for (int j = lane * V; j < keys; j += Threads * V) {
        const Vec<X, V> x = load<V>(s + j);
        float m_new = m, sum = 0.f;
        for (int e = 0; e < V; e++)
            if (j + e < keys) m_new = fmaxf(m_new, x[e]);
        for (int e = 0; e < V; e++)
            if (j + e < keys) sum += expf(x[e] - m_new);
        l = l * expf(m - m_new) + sum;
        m = m_new;
    }
    const float m_row = row_max<Threads>(m);
    l = row_sum<Threads>(l * expf(m - m_row));
    if (lane == 0) lse[row] = m_row + logf(l);

    const float inv_l = 1.f / l;
    for (int j = lane * V; j < ld; j += Threads * V) {
        Vec<float, V> p{};
        if (j < keys) {
            const Vec<X, V> x = load<V>(s + j);
            for (int e = 0; e < V; e++) p.x[e] = j + e < keys ? expf(x[e] - m_row) * inv_l : 0.f;
        }
        store(s + j, p);
    }
}

// Overwrites dP with dS in datt (rows, ld). The products that follow apply scale.
template <class X, int Threads, bool Causal>
__global__ void softmax_backward_kernel(X* datt, const X* att, size_t rows, int T, int ld) {
    constexpr int V = kVec<X>;
    const size_t row = size_t(blockIdx.x) * (kBlock / Threads) + threadIdx.x / Threads;
    if (row >= rows) return;
    const int lane = threadIdx.x % Threads;
    const int keys = Causal ? static_cast<int>(row % T) + 1 : T;
    const X* p_row = att + row * ld;
    X* dp_row = datt + row * ld;

    float D = 0.f;
    for (int j = lane * V; j < keys; j += Threads * V) {
        const Vec<X, V> p = load<V>(p_row + j), dp = load<V>(dp_row + j);
        for (int e = 0; e < V; e++)
            if (j + e < keys) D += p[e] * dp[e];
    }
    D = row_sum<Threads>(D);

    for (int j = lane * V; j < ld; j += Threads * V) {
        Vec<float, V> ds{};
        if (j < keys) {
            const Vec<X, V> p = load<V>(p_row + j), dp = load<V>(dp_row + j);
            for (int e = 0; e < V; e++) ds.x[e] = j + e < keys ? p[e] * (dp[e] - D) : 0.f;
        }
        store(dp_row + j, ds);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

// One matrix for each (b, h). It begins at ptr + b·batch + h·head bytes, and its rows are `ld` elements apart.
struct Matrices {
    char* ptr;
    size_t batch, head;
    int ld;
};
// Part 0, 1, 2 = q, k, v of a packed (B, T, 3, NH, HS).
template <class X>
Matrices part(X* qkv, int which, const AttentionShape& s) {
    const size_t C = size_t(s.NH) * s.HS;
    return {(char*)(qkv + which * C), s.T * 3 * C * sizeof(X), s.HS * sizeof(X), static_cast<int>(3 * C)};
}
template <class X>
Matrices tokens(X* x, const AttentionShape& s) {  // (B, T, NH, HS)
    const size_t C = size_t(s.NH) * s.HS;
    return {(char*)x, s.T * C * sizeof(X), s.HS * sizeof(X), static_cast<int>(C)};
}
template <class X>
Matrices squares(X* att, const AttentionShape& s) {  // (B, NH, T, T), rows padded to 16 bytes
    const int ld = ceil_div(s.T, kVec<X>) * kVec<X>;
    const size_t head = size_t(s.T) * ld * sizeof(X);
    return {(char*)att, head * s.NH, head, ld};
}

// Writes pointers (count, B, NH), in which cublasGemmBatchedEx finds its matrices. One launch does all of a pass.
constexpr int kMostOperands = 9;
struct Operands {
    Matrices of[kMostOperands];
    int count;
};
__global__ void pointers_kernel(void** pointers, Operands operands, size_t heads, int NH) {
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= operands.count * heads) return;
    const Matrices& m = operands.of[i / heads];
    const size_t head = i % heads;
    pointers[i] = m.ptr + head / NH * m.batch + head % NH * m.head;
}

// Batched products among the operands of a pass. An operand is named by its index.
template <class X>
class Products {
  public:
    Products(const Cuda& dev, void** pointers, const Operands& operands, const AttentionShape& s)
        : dev_(dev), pointers_(pointers), operands_(operands), heads_(size_t(s.B) * s.NH) {
        pointers_kernel<<<ceil_div(operands.count * heads_, kBlock), kBlock, 0, dev.stream>>>(pointers, operands,
                                                                                              heads_, s.NH);
        LAUNCH_CHECK("pointers_kernel");
    }
    // Row-major c (m × n) = alpha · a b, where a is (m × k), or (k × m) if transposed, and b likewise. cuBLAS is
    // column-major, and a row-major matrix is its transpose already. So it is asked for cᵀ = bᵀ aᵀ.
    void multiply(int c, float alpha, int a, bool transpose_a, int b, bool transpose_b, int m, int n, int k) const {
        constexpr cudaDataType type = std::is_same_v<X, bf16> ? CUDA_R_16BF : CUDA_R_32F;
        const bool tf32 = std::is_same_v<X, float> && dev_.tf32;
        const float beta = 0.f;
        const auto matrices = [&](int i) { return pointers_ + i * heads_; };
        CUBLAS_CHECK(cublasGemmBatchedEx(
            dev_.blas, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k,
            &alpha, matrices(b), type, operands_.of[b].ld, matrices(a), type, operands_.of[a].ld, &beta, matrices(c),
            type, operands_.of[c].ld, static_cast<int>(heads_),
            tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    }

  private:
    const Cuda& dev_;
    void** pointers_;
    const Operands& operands_;
    size_t heads_;
};

template <class X>
size_t saved_bytes(const AttentionShape& s) {
    return squares<X>(nullptr, s).batch * s.B;
}
// dP, then the pointers.
template <class X>
size_t scratch_bytes(const AttentionShape& s) {
    return saved_bytes<X>(s) + kMostOperands * size_t(s.B) * s.NH * sizeof(void*);
}
template <class X>
void** pointers_in(void* scratch, const AttentionShape& s) {
    return reinterpret_cast<void**>(static_cast<char*>(scratch) + saved_bytes<X>(s));
}

// cuBLAS cannot see how the pointers in an array are aligned, so it relies on 16 bytes. So do our kernels.
template <class X, class... P>
void check_limits(const AttentionShape& s, const P*... buffers) {
    if (s.HS * sizeof(X) % 16 != 0)
        throw Error(format("naive attention: head size %d, expected a multiple of %d", s.HS, kVec<X>));
    if (((reinterpret_cast<uintptr_t>(buffers) % 16 != 0) || ...))
        throw Error("naive attention: a buffer is not 16-byte aligned; Cuda::alloc gives aligned memory");
}

// Calls launch(threads, causal, blocks) with the first two as compile-time constants.
template <class X, class Launch>
void for_rows(const AttentionShape& s, Launch launch) {
    const size_t rows = size_t(s.B) * s.NH * s.T;
    auto with = [&](auto threads) {
        const size_t blocks = (rows + kBlock / threads - 1) / (kBlock / threads);
        if (blocks > 0x7fffffff)
            throw Error(format("naive attention: %zu rows of attention are too many for a grid", rows));
        if (s.causal)
            launch(threads, std::true_type(), static_cast<unsigned>(blocks));
        else
            launch(threads, std::false_type(), static_cast<unsigned>(blocks));
    };
    if (s.T * sizeof(X) <= kShortRowBytes)
        with(std::integral_constant<int, kWarp>());
    else
        with(std::integral_constant<int, kBlock>());
}

template <class X>
void forward(const Cuda& dev, X* out, float* lse, X* att, void* scratch, const X* qkv, const AttentionShape& s) {
    check_limits<X>(s, out, att, static_cast<const X*>(scratch), qkv);
    enum { Q, K, V, P, Out, kCount };  // S becomes P
    const Operands operands = {{part(qkv, 0, s), part(qkv, 1, s), part(qkv, 2, s), squares(att, s), tokens(out, s)},
                               kCount};
    const Products<X> products(dev, pointers_in<X>(scratch, s), operands, s);

    // [quote]
    products.multiply(P, s.resolved_scale(), Q, false, K, true, s.T, s.T, s.HS);
    for_rows<X>(s, [&](auto threads, auto causal, unsigned blocks) {
        softmax_forward_kernel<X, threads, causal>
            <<<blocks, kBlock, 0, dev.stream>>>(att, lse, size_t(s.B) * s.NH * s.T, s.T, operands.of[P].ld);
        LAUNCH_CHECK("softmax_forward_kernel");
    });
    products.multiply(Out, 1.f, P, false, V, false, s.T, s.HS, s.T);
    // [end]
}

template <class X>
void backward(const Cuda& dev, X* dqkv, void* scratch, const X* dout, const X*, const float*, const X* att,
              const X* qkv, const AttentionShape& s) {
    X* datt = static_cast<X*>(scratch);
    check_limits<X>(s, dqkv, datt, dout, att, qkv);
    enum { Q, K, P, V, DOut, DS, DQ, DK, DV, kCount };  // dP becomes dS
    const Operands operands = {{part(qkv, 0, s), part(qkv, 1, s), squares(att, s), part(qkv, 2, s), tokens(dout, s),
                                squares(datt, s), part(dqkv, 0, s), part(dqkv, 1, s), part(dqkv, 2, s)},
                               kCount};
    const Products<X> products(dev, pointers_in<X>(scratch, s), operands, s);
    const float scale = s.resolved_scale();

    products.multiply(DV, 1.f, P, true, DOut, false, s.T, s.HS, s.T);
    products.multiply(DS, 1.f, DOut, false, V, true, s.T, s.T, s.HS);
    for_rows<X>(s, [&](auto threads, auto causal, unsigned blocks) {
        softmax_backward_kernel<X, threads, causal>
            <<<blocks, kBlock, 0, dev.stream>>>(datt, att, size_t(s.B) * s.NH * s.T, s.T, operands.of[DS].ld);
        LAUNCH_CHECK("softmax_backward_kernel");
    });
    products.multiply(DQ, scale, DS, false, K, false, s.T, s.HS, s.T);
    products.multiply(DK, scale, DS, true, Q, false, s.T, s.HS, s.T);
}

template <class X>
constexpr AttentionKernel<X> kNaive = {"naive", 75, false, saved_bytes<X>, scratch_bytes<X>, forward<X>, backward<X>};

}  // namespace

const AttentionKernel<float> naive_fp32 = kNaive<float>;
const AttentionKernel<bf16> naive_bf16 = kNaive<bf16>;
