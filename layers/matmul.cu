// The three products of a linear layer, through cuBLASLt, and the bias gradient of q, k and v.
//
//   out      = inp·weightᵀ + bias  (N,OC) = (N,C)·(C,OC)   epilogue: bias, and GELU or a residual
//   dinp     = dout·weight         (N,C)  = (N,OC)·(OC,C)  no epilogue: GELU's derivative is slow
//   dweight += doutᵀ·inp           (OC,C) = (OC,N)·(N,C)   fp32 output, beta = 1, or 0 to write it
//
// On Hopper, sm90/matmul_sm90.cu computes the products that an activation follows or precedes, if
// the shape allows it. The bias gradient of q, k and v, which layers.h derives, has kernels of our
// own, which add in a fixed order.
//
// cuBLAS is column-major, so our row-major (rows, cols) is its (cols, rows) with leading dimension
// cols. We ask it for the transposed products, in which every operand is a matrix as it is in
// memory or its transpose. In its terms, with A·B = D:
//
//   outᵀ     = weight·inpᵀ         (OC,N) = (OC,C)·(C,N)   A = weight, which is (C,OC), transposed
//   dinpᵀ    = weightᵀ·doutᵀ       (C,N)  = (C,OC)·(OC,N)
//   dweightᵀ = inpᵀ·dout           (C,OC) = (C,N)·(N,OC)   B = dout, which is (OC,N), transposed
//
// The first call with a shape makes a plan (descriptors and an algorithm), which is kept until the
// process ends. cuBLASLt's heuristic proposes several algorithms, of which the first is up to 20 %
// slower than the best, so they are autotuned (matmul_autotune.h). Which one wins may differ from
// run to run; the bits of the result do not. Algorithms that split K may only reduce in fp32
// through the workspace, which is done in a fixed order.
//
// Sums are fp32 throughout. X = float multiplies in TF32 (10 bits of mantissa) if dev.tf32, else in
// fp32.
//
// Limits: any N, C and OC, but odd sizes are slow.
#include <algorithm>
#include <compare>
#include <map>

#include "cuda/activation.cuh"
#include "cuda/cublas.h"
#include "cuda/partials.cuh"
#include "cuda/vector.cuh"
#include "layers/layers.h"
#include "layers/matmul_autotune.h"
#include "layers/sm90/matmul_sm90.h"

namespace {

// What a plan depends on.
struct PlanKey {
    MatmulProduct product;
    bool tf32;
    int device;
    int align_a;  // of the pointers, in bytes: some algorithms need 16
    int align_b;
    int align_d;  // of D and C

    auto operator<=>(const PlanKey&) const = default;
};

struct MatmulPlan {
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t a;
    cublasLtMatrixLayoutOpaque_t b;
    cublasLtMatrixLayoutOpaque_t d;
    cublasLtMatmulAlgo_t algorithm;

    template <class T>
    void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
        CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof value));
    }

    // The epilogue's operands are part of the descriptor.
    void set_epilogue_pointers(const MatmulOperands& o) {
        if (o.bias)
            set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, o.bias);
        if (o.pre)
            set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, o.pre);
    }

    // Runs the plan's algorithm or, while it is being autotuned, another candidate.
    cublasStatus_t run(const Cuda& dev, const cublasLtMatmulAlgo_t& candidate,
                       const MatmulOperands& o, bool accumulate) {
        const float alpha = 1.f;
        const float beta = accumulate ? 1.f : 0.f;
        return cublasLtMatmul(dev.blaslt, &operation, &alpha, o.a, &a, o.b, &b, &beta, o.addend(),
                              &d, o.d, &d, &candidate, dev.workspace, Cuda::kWorkspaceBytes,
                              dev.stream);
    }
};

// The largest power of two that divides the address, but at most 256.
int alignment(const void* p) {
    const auto address = reinterpret_cast<uintptr_t>(p);
    const uintptr_t lowest_bit = address & ~(address - 1);
    return static_cast<int>(std::min<uintptr_t>(lowest_bit, 256));
}

cublasLtEpilogue_t library_epilogue(Epilogue epilogue) {
    switch (epilogue) {
        case Epilogue::none: break;
        case Epilogue::bias: return CUBLASLT_EPILOGUE_BIAS;
        case Epilogue::bias_gelu: return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    }
    return CUBLASLT_EPILOGUE_DEFAULT;
}

// Everything in a plan but the algorithm.
MatmulPlan make_descriptors(const PlanKey& key, const MatmulOperands& o) {
    const MatmulProduct& p = key.product;
    const auto type = [](DType t) { return t == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; };
    const auto init_layout = [](cublasLtMatrixLayoutOpaque_t* m, cudaDataType_t t, size_t rows,
                                size_t cols) {
        CUBLAS_CHECK(cublasLtMatrixLayoutInit(m, t, rows, cols, static_cast<int64_t>(rows)));
    };

    MatmulPlan plan;
    const auto compute = key.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    CUBLAS_CHECK(cublasLtMatmulDescInit(&plan.operation, compute, CUDA_R_32F));
    plan.set(CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    plan.set(CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    plan.set(CUBLASLT_MATMUL_DESC_EPILOGUE, library_epilogue(p.epilogue));
    if (o.pre)
        plan.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<int64_t>(p.rows));
    plan.set_epilogue_pointers(o);

    if (p.transpose_a)
        init_layout(&plan.a, type(p.in), p.k, p.rows);
    else
        init_layout(&plan.a, type(p.in), p.rows, p.k);
    if (p.transpose_b)
        init_layout(&plan.b, type(p.in), p.cols, p.k);
    else
        init_layout(&plan.b, type(p.in), p.k, p.cols);
    init_layout(&plan.d, type(p.out), p.rows, p.cols);
    return plan;
}

struct Proposals {
    static constexpr int kMost = 8;
    cublasLtMatmulHeuristicResult_t list[kMost];
    int count = 0;
};

// The algorithms that cuBLASLt proposes for the plan, the one it expects to be fastest first.
Proposals propose_algorithms(const Cuda& dev, const PlanKey& key, MatmulPlan& plan) {
    cublasLtMatmulPreferenceOpaque_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceInit(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
        CUBLAS_CHECK(
            cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, Cuda::kWorkspaceBytes);
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key.align_a));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key.align_b));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key.align_d));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key.align_d));

    Proposals proposals;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        dev.blaslt, &plan.operation, &plan.a, &plan.b, &plan.d, &plan.d, &preference,
        Proposals::kMost, proposals.list, &proposals.count);
    if (status != CUBLAS_STATUS_SUCCESS)
        proposals.count = 0;
    return proposals;
}

MatmulPlan make_plan(const Cuda& dev, const PlanKey& key, const MatmulOperands& o) {
    const MatmulProduct& p = key.product;
    MatmulPlan plan = make_descriptors(key, o);
    const Proposals candidates = propose_algorithms(dev, key, plan);
    if (candidates.count == 0) {
        const bool bf16_unsupported = p.in == DType::bf16 && dev.sm < 80;
        throw Error(format(
            "cuBLASLt has no algorithm for a %s matmul of %zu x %zu x %zu (pointers aligned to %d, "
            "%d and %d bytes) on %s%s",
            name_of(p.in), p.rows, p.cols, p.k, key.align_a, key.align_b, key.align_d,
            dev.name.c_str(),
            bf16_unsupported ? "; bf16 needs compute capability 8.0 or later: use --precision fp32"
                             : ""));
    }

    const RunAlgorithm run = [&](int i, const MatmulOperands& x, bool accumulate) {
        return plan.run(dev, candidates.list[i].algo, x, accumulate) == CUBLAS_STATUS_SUCCESS;
    };
    const AutotuneResult result = autotune(dev, p, o, candidates.count, run);
    plan.algorithm = candidates.list[result.fastest].algo;
    return plan;
}

// X is the type of A, B, bias and pre, and Y the type of D.
template <class X, class Y = X>
void multiply(const Cuda& dev, MatmulProduct product, const MatmulOperands& o) {
    if (product.rows == 0 || product.cols == 0 || product.k == 0)
        return;

    product.in = dtype_of<X>();
    product.out = dtype_of<Y>();
    const PlanKey key = {.product = product,
                         .tf32 = std::is_same_v<X, float> && dev.tf32,
                         .device = dev.device,
                         .align_a = alignment(o.a),
                         .align_b = alignment(o.b),
                         .align_d = std::min(alignment(o.d), alignment(o.addend()))};

    static std::map<PlanKey, MatmulPlan> plans;
    auto found = plans.find(key);
    if (found == plans.end())
        found = plans.emplace(key, make_plan(dev, key, o)).first;
    MatmulPlan& plan = found->second;

    plan.set_epilogue_pointers(o);
    CUBLAS_CHECK(plan.run(dev, plan.algorithm, o, product.accumulate));
}

// The bias gradient of q, stage 1: sums over rows of dout, which are `stride` elements apart.
template <class X, int V>
__global__ void __launch_bounds__(kColumnThreads)
    bias_backward_kernel(float* __restrict__ partials, const X* __restrict__ dout, size_t N, int OC,
                         int stride) {
    column_sums<V, 4>(partials, N, OC, [=](size_t row, int c, float (&sum)[V]) {
        const auto dy = load<V>(dout + row * stride + c);
        for (int i = 0; i < V; i++)
            sum[i] += dy[i];
    });
}

// The bias gradient of v: out[c] = Σ_r x[r]·weight[r·C + c]. A block owns 32 columns.
template <class X>
__global__ void __launch_bounds__(kSumThreads)
    row_times_matrix_kernel(float* __restrict__ out, const float* __restrict__ x,
                            const X* __restrict__ weight, int C) {
    const int c = blockIdx.x * kWarp + (threadIdx.x % kWarp);
    const float sum = sum_over_rows(
        c < C ? C : 0, [=](int r) { return x[r] * to_float(weight[size_t(r) * C + c]); });
    if (threadIdx.x < kWarp && c < C)
        out[c] = sum;
}

// -------------------------------------------------------------------------------------------------

void check_sizes(int C, int OC) {
    if (C < 1 || OC < 1)
        throw Error(format("matmul: C = %d, OC = %d, expected at least 1", C, OC));
}

}  // namespace

template <class X>
void matmul_forward(const Cuda& dev, X* out, const X* inp, const X* weight, const X* bias, size_t N,
                    int C, int OC, const X* residual) {
    check_sizes(C, OC);
    // cuBLASLt's C, to which the product is added. Null: C is D.
    const X* c = residual == out ? nullptr : residual;
    multiply<X>(dev,
                MatmulProduct{.rows = size_t(OC),
                              .cols = N,
                              .k = size_t(C),
                              .transpose_a = true,
                              .epilogue = bias ? Epilogue::bias : Epilogue::none,
                              .accumulate = residual != nullptr},
                MatmulOperands{.d = out, .a = weight, .b = inp, .bias = bias, .c = c});
}

template <class X>
void matmul_activation_forward(const Cuda& dev, X* out, X* pre, const X* inp, const X* weight,
                               const X* bias, size_t N, int C, int OC) {
    check_sizes(C, OC);
    if constexpr (std::is_same_v<X, bf16>) {
        const Sm90Product product = {.N = N, .K = C, .columns = OC};
        if (matmul_sm90_supports(dev, product) && vectorises<X>(OC, out, pre, inp, weight, bias)) {
            matmul_sm90_activation_forward(
                dev, product, {.out = out, .pre = pre, .inp = inp, .weight = weight, .bias = bias});
            return;
        }
    }

    // cuBLASLt's GELU needs aligned rows. It is less precise than ours, but not so that it would
    // show in bf16.
    const bool in_epilogue = kActivationIsCublasGelu && std::is_same_v<X, bf16>;
    if (in_epilogue && vectorises<X>(OC, out, pre)) {
        multiply<X>(dev,
                    MatmulProduct{.rows = size_t(OC),
                                  .cols = N,
                                  .k = size_t(C),
                                  .transpose_a = true,
                                  .epilogue = Epilogue::bias_gelu},
                    MatmulOperands{.d = out, .a = weight, .b = inp, .bias = bias, .pre = pre});
    } else {
        matmul_forward(dev, pre, inp, weight, bias, N, C, OC);
        activation_forward(dev, out, pre, N * OC);
    }
}

template <class X, class Y>
void matmul_backward(const Cuda& dev, std::type_identity_t<Y>* dinp, float* dweight, const X* dout,
                     const X* inp, const X* weight, size_t N, int C, int OC, bool accumulate) {
    check_sizes(C, OC);
    if (dweight)
        multiply<X, float>(dev,
                           MatmulProduct{.rows = size_t(C),
                                         .cols = size_t(OC),
                                         .k = N,
                                         .transpose_b = true,
                                         .accumulate = accumulate},
                           MatmulOperands{.d = dweight, .a = inp, .b = dout});
    if (dinp)
        multiply<X, Y>(dev, MatmulProduct{.rows = size_t(C), .cols = N, .k = size_t(OC)},
                       MatmulOperands{.d = dinp, .a = weight, .b = dout});
}

template <class X>
void qkv_bias_backward(const Cuda& dev, float* dqkvb, void* scratch, const X* dqkv,
                       const float* dprojb, const X* projw, size_t N, int C) {
    check_sizes(C, 3 * C);
    row_times_matrix_kernel<<<ceil_div(C, kWarp), kSumThreads, 0, dev.stream>>>(dqkvb + 2 * C,
                                                                                dprojb, projw, C);
    LAUNCH_CHECK("row_times_matrix_kernel");
    if (N == 0)
        return;

    const bool vector = vectorises<X>(C, dqkv);
    const int V = vector ? kVec<X> : 1;
    const auto kernel = vector ? bias_backward_kernel<X, kVec<X>> : bias_backward_kernel<X, 1>;
    const int slices = column_sum_slices(dev, C, N);
    const dim3 grid(ceil_div(C, kWarp * V), slices);
    float* partials = static_cast<float*>(scratch);
    kernel<<<grid, kColumnThreads, 0, dev.stream>>>(partials, dqkv, N, C, 3 * C);
    LAUNCH_CHECK("bias_backward_kernel");
    add_partials(dev, {dqkvb}, {.sums = partials, .rows = slices, .columns = C});
}

size_t qkv_bias_scratch_bytes(const Cuda& dev, int C) {
    return column_sum_bytes(dev, C);
}

template <class X>
void matmul_activation_backward(const Cuda& dev, X* dpre, float* dpre_sum, X* out, void* scratch,
                                const X* dout, const X* weight, const X* pre, size_t N, int C,
                                int OC) {
    check_sizes(C, OC);
    if constexpr (std::is_same_v<X, bf16>) {
        const Sm90Product product = {.N = N, .K = OC, .columns = C};
        if (matmul_sm90_supports(dev, product) &&
            vectorises<X>(C, dpre, out, scratch, dout, weight, pre)) {
            matmul_sm90_activation_backward(dev, product,
                                            {.dpre = dpre,
                                             .dpre_sum = dpre_sum,
                                             .out = out,
                                             .scratch = scratch,
                                             .dout = dout,
                                             .weight = weight,
                                             .pre = pre});
            return;
        }
    }

    matmul_backward<X>(dev, dpre, nullptr, dout, nullptr, weight, N, C, OC);
    activation_backward(dev, dpre, dpre_sum, out, scratch, pre, dpre, N, C);
}

size_t matmul_activation_scratch_bytes(const Cuda& dev, size_t N, int C, int OC) {
    const Sm90Product product = {.N = N, .K = OC, .columns = C};
    const size_t fused =
        matmul_sm90_supports(dev, product) ? matmul_sm90_scratch_bytes(product) : 0;
    return std::max(fused, activation_scratch_bytes(dev, C));
}

#define INSTANTIATE(X)                                                                            \
    template void matmul_forward(const Cuda&, X*, const X*, const X*, const X*, size_t, int, int, \
                                 const X*);                                                       \
    template void matmul_activation_forward(const Cuda&, X*, X*, const X*, const X*, const X*,    \
                                            size_t, int, int);                                    \
    template void matmul_backward<X>(const Cuda&, X*, float*, const X*, const X*, const X*,       \
                                     size_t, int, int, bool);                                     \
    template void matmul_activation_backward(const Cuda&, X*, float*, X*, void*, const X*,        \
                                             const X*, const X*, size_t, int, int);               \
    template void qkv_bias_backward(const Cuda&, float*, void*, const X*, const float*, const X*, \
                                    size_t, int);
INSTANTIATE(float)
INSTANTIATE(bf16)
template void matmul_backward<bf16, float>(const Cuda&, float*, float*, const bf16*, const bf16*,
                                           const bf16*, size_t, int, int, bool);
