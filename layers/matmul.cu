// Matmul through cuBLASLt: the three products of a linear layer, and the sum of its bias gradient.
//
//   out = inp·weightᵀ + bias      (N,OC) = (N,C)·(C,OC)       bias in the epilogue
//   dinp = dout·weight            (N,C)  = (N,OC)·(OC,C)
//   dweight += doutᵀ·inp          (OC,C) = (OC,N)·(N,C)       fp32 output, beta = 1
//   dbias += Σ_rows dout          two stages of our own, in a fixed order
//
// cuBLAS is column-major: our row-major (rows, cols) is its (cols, rows) with leading dimension cols. So it is asked
// for the transposed product, outᵀ = weight·inpᵀ and so on, where every operand is what lies in memory or its
// transpose.
//
// A plan (descriptors and the algorithm chosen by cuBLASLt's heuristic) is made at the first call with a shape and kept
// for the life of the process. Candidates are not timed against each other: the winner could differ from run to run,
// and the last bits of the result with it. Split-K algorithms may reduce through the workspace in fp32, which is in
// order.
//
// Sums are fp32 throughout. X = float multiplies in TF32 (10 bits of mantissa) if dev.tf32, else in fp32.
// Limits: any N, C, OC; odd sizes are slow.
#include <algorithm>
#include <map>
#include <tuple>

#include "layers/layers.h"
#include "layers/partials.cuh"
#include "layers/vector.cuh"

// D (rows × cols, column-major) = op(A)·op(B) + beta·C, with inner dimension k. C is D.
struct Product {
    int device;
    bool transpose_a, transpose_b, bias, accumulate, tf32;
    DType in, out;
    size_t rows, cols, k;
    int align_a, align_b, align_d;  // bytes by which the pointers are aligned: some algorithms need 16

    auto tie() const {
        return std::tie(device, transpose_a, transpose_b, bias, accumulate, tf32, in, out, rows, cols, k, align_a,
                        align_b, align_d);
    }
    bool operator<(const Product& o) const { return tie() < o.tie(); }
};

struct MatmulPlan {
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
};

static int alignment(const void* p) {
    const auto bits = reinterpret_cast<uintptr_t>(p);
    return static_cast<int>(std::min<uintptr_t>(bits & ~(bits - 1), 256));
}

static MatmulPlan make_plan(const Cuda& dev, const Product& p) {
    const auto type = [](DType t) { return t == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; };
    const auto layout = [](cublasLtMatrixLayoutOpaque_t* m, cudaDataType_t t, size_t rows, size_t cols) {
        CUBLAS_CHECK(cublasLtMatrixLayoutInit(m, t, rows, cols, static_cast<int64_t>(rows)));
    };
    MatmulPlan plan;
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
        CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(&plan.operation, attribute, &value, sizeof value));
    };
    CUBLAS_CHECK(cublasLtMatmulDescInit(&plan.operation, p.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                                        CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, p.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT);
    p.transpose_a ? layout(&plan.a, type(p.in), p.k, p.rows) : layout(&plan.a, type(p.in), p.rows, p.k);
    p.transpose_b ? layout(&plan.b, type(p.in), p.cols, p.k) : layout(&plan.b, type(p.in), p.k, p.cols);
    layout(&plan.d, type(p.out), p.rows, p.cols);

    cublasLtMatmulPreferenceOpaque_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceInit(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, Cuda::kWorkspaceBytes);
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(p.align_a));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(p.align_b));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(p.align_d));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(p.align_d));

    cublasLtMatmulHeuristicResult_t best;
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(dev.blaslt, &plan.operation, &plan.a, &plan.b, &plan.d,
                                                                 &plan.d, &preference, 1, &best, &found);
    if (status != CUBLAS_STATUS_SUCCESS || found == 0)
        throw Error(
            format("cuBLASLt has no algorithm for a %s matmul of %zu x %zu x %zu (pointers aligned to %d, %d and %d "
                   "bytes) on %s%s",
                   name_of(p.in), p.rows, p.cols, p.k, p.align_a, p.align_b, p.align_d, dev.name.c_str(),
                   p.in == DType::bf16 && dev.sm < 80 ? ": bf16 needs compute capability 8.0, use fp32" : ""));
    plan.algorithm = best.algo;
    return plan;
}

// d (rows × cols, column-major) = op(a)·op(b) (+ bias, one value a row of d) (+ d).
template <class X, class Y>
static void multiply(const Cuda& dev, Y* d, const X* a, bool transpose_a, const X* b, bool transpose_b, const X* bias,
                     bool accumulate, size_t rows, size_t cols, size_t k) {
    if (rows == 0 || cols == 0 || k == 0) return;
    const Product product = {dev.device,
                             transpose_a,
                             transpose_b,
                             bias != nullptr,
                             accumulate,
                             std::is_same_v<X, float> && dev.tf32,
                             dtype_of<X>(),
                             dtype_of<Y>(),
                             rows,
                             cols,
                             k,
                             alignment(a),
                             alignment(b),
                             alignment(d)};
    static std::map<Product, MatmulPlan> plans;
    auto found = plans.find(product);
    if (found == plans.end()) found = plans.emplace(product, make_plan(dev, product)).first;
    MatmulPlan& plan = found->second;
    if (bias)
        CUBLAS_CHECK(
            cublasLtMatmulDescSetAttribute(&plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
    const float alpha = 1.f, beta = accumulate ? 1.f : 0.f;
    CUBLAS_CHECK(cublasLtMatmul(dev.blaslt, &plan.operation, &alpha, a, &plan.a, b, &plan.b, &beta, d, &plan.d, d,
                                &plan.d, &plan.algorithm, dev.workspace, Cuda::kWorkspaceBytes, dev.stream));
}

// Bias gradient, stage 1. A block owns 32·V columns (blockIdx.x) of every gridDim.y-th group of kWarps rows.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocksPerSM = 8;

template <class X, int V>
__global__ void __launch_bounds__(kThreads)
    bias_backward_kernel(float* __restrict__ partials, const X* __restrict__ dout, size_t N, int OC) {
    __shared__ float sum_smem[kWarps][V][kWarp];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int c = (blockIdx.x * kWarp + lane) * V;
    float sum[V] = {};
    if (c < OC) {
#pragma unroll 4
        for (size_t row = static_cast<size_t>(blockIdx.y) * kWarps + warp; row < N; row += size_t{gridDim.y} * kWarps) {
            const auto dy = load<V>(dout + row * OC + c);
            for (int i = 0; i < V; i++) sum[i] += dy[i];
        }
    }
    for (int i = 0; i < V; i++) sum_smem[warp][i][lane] = sum[i];
    __syncthreads();
    if (warp > 0 || c >= OC) return;
    for (int i = 0; i < V; i++) {
        for (int w = 1; w < kWarps; w++) sum[i] += sum_smem[w][i][lane];
        partials[static_cast<size_t>(blockIdx.y) * OC + c + i] = sum[i];
    }
}

// Slices of rows, each of which leaves a partial row: enough to fill the GPU when a slice is OC/(32·V) blocks of the
// widest V. It does not depend on N or X, so neither does the scratch.
static int bias_slices(const Cuda& dev, int OC) {
    return std::max<int>(1, dev.num_sms * kBlocksPerSM / ceil_div(OC, kWarp * kVec<bf16>));
}

// ---------------------------------------------------------------------------------------------------------------------

static void check_sizes(int C, int OC) {
    if (C < 1 || OC < 1) throw Error(format("matmul: C = %d, OC = %d, expected at least 1", C, OC));
}

template <class X>
void matmul_forward(const Cuda& dev, X* out, const X* inp, const X* weight, const X* bias, size_t N, int C, int OC) {
    check_sizes(C, OC);
    multiply<X, X>(dev, out, weight, true, inp, false, bias, false, OC, N, C);
}

template <class X>
void matmul_backward(const Cuda& dev, X* dinp, float* dweight, float* dbias, void* scratch, const X* dout, const X* inp,
                     const X* weight, size_t N, int C, int OC) {
    check_sizes(C, OC);
    if (dbias && N > 0) {
        const bool vector = vectorises<X>(OC, dout);
        const auto kernel = vector ? bias_backward_kernel<X, kVec<X>> : bias_backward_kernel<X, 1>;
        const int slices = static_cast<int>(std::min<size_t>(bias_slices(dev, OC), ceil_div(N, kWarps)));
        const dim3 grid(ceil_div(OC, kWarp * (vector ? kVec<X> : 1)), slices);
        float* partials = static_cast<float*>(scratch);
        kernel<<<grid, kThreads, 0, dev.stream>>>(partials, dout, N, OC);
        LAUNCH_CHECK("bias_backward_kernel");
        add_partials(dev, dbias, nullptr, partials, slices, OC);
    }
    multiply<X, float>(dev, dweight, inp, false, dout, true, nullptr, true, C, OC, N);
    if (dinp) multiply<X, X>(dev, dinp, weight, false, dout, false, nullptr, false, C, N, OC);
}

size_t matmul_scratch_bytes(const Cuda& dev, int OC) {
    return static_cast<size_t>(bias_slices(dev, OC)) * OC * sizeof(float);
}

#define INSTANTIATE(X)                                                                                               \
    template void matmul_forward(const Cuda&, X*, const X*, const X*, const X*, size_t, int, int);                   \
    template void matmul_backward(const Cuda&, X*, float*, float*, void*, const X*, const X*, const X*, size_t, int, \
                                  int);
INSTANTIATE(float)
INSTANTIATE(bf16)
