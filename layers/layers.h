// The CUDA side of the backend seam. Every layer is one call. layers/cpu/reference.h has the same
// list for the CPU, and the trainer is written once for both. All pointers are device memory, all
// tensors are row-major and contiguous, and everything is launched on dev.stream. The arguments are
// first the outputs, then scratch, then the inputs. "Writes" means every element, whatever was
// there before. "Adds into" means that the caller has initialised it.
//
// Shapes: B batch, T tokens, C channels, N = B·T rows, V vocabulary, Vp padded vocabulary (a
// multiple of 128 is fastest), NH heads, HS = C/NH head size. X is float or bf16. Statistics,
// losses and weight gradients are fp32. Errors (a failed CUDA or cuBLAS call, an unsupported shape)
// are thrown as Error with file, line and what was attempted.
#pragma once
#include "common/types.h"
#include "cuda/cuda.h"

// -------------------------------------------------------------------------------------------------
// Encoder (encoder.cu): out = wte[token] + wpe[position of t]

// Writes out (B,T,C). tokens (B,T) in [0, V).
template <class X>
void encoder_forward(const Cuda& dev, X* out, const int* tokens, const X* wte, const X* wpe, int B,
                     int T, int C, const Positions& positions = {});

// Adds into dwte (Vp,C) and dwpe (maxT,C). Deterministic. Needs encoder_scratch_bytes() of scratch.
// plan is a copy, on the device, of what encoder_plan() wrote for these tokens.
template <class X>
void encoder_backward(const Cuda& dev, float* dwte, float* dwpe, void* scratch, const X* dout,
                      const int* plan, int B, int T, int C, const Positions& positions = {});
size_t encoder_scratch_bytes(const Cuda& dev, int B, int T, int C);

// On the host: the number of ints in a plan for N tokens, and a function that writes one. A plan is
// plain ints, so that it can be uploaded with the batch.
size_t encoder_plan_ints(const Cuda& dev, size_t N);
void encoder_plan(const Cuda& dev, int* plan, const int* tokens, size_t N);

// -------------------------------------------------------------------------------------------------
// Layer norm (layernorm.cu), over the last dimension
constexpr float kLayernormEps = 1e-5f;

// Writes out (N,C), mean (N), rstd (N).
template <class X>
void layernorm_forward(const Cuda& dev, X* out, float* mean, float* rstd, const X* inp,
                       const X* weight, const X* bias, size_t N, int C);

// Adds into dinp (N,C), dweight (C) and dbias (C). Adds the sum over rows of the new dinp into
// dinp_sum (C), unless that is null. Deterministic. Needs layernorm_scratch_bytes() of scratch.
template <class X>
void layernorm_backward(const Cuda& dev, X* dinp, float* dweight, float* dbias, float* dinp_sum,
                        void* scratch, const X* dout, const X* inp, const X* weight,
                        const float* mean, const float* rstd, size_t N, int C);
size_t layernorm_scratch_bytes(const Cuda& dev, int C);

// -------------------------------------------------------------------------------------------------
// Matmul (matmul.cu), cuBLASLt with cached plans: out = inp·weightᵀ + bias

// Writes out (N,OC). inp (N,C), weight (OC,C), bias (OC) or null. Adds residual (N,OC), which may
// be the same as out, unless it is null.
template <class X>
void matmul_forward(const Cuda& dev, X* out, const X* inp, const X* weight, const X* bias, size_t N,
                    int C, int OC, const X* residual = nullptr);

// The same, followed by the activation f. Writes pre (N,OC) = inp·weightᵀ + bias, which backward
// needs, and out (N,OC) = f(pre).
template <class X>
void matmul_activation_forward(const Cuda& dev, X* out, X* pre, const X* inp, const X* weight,
                               const X* bias, size_t N, int C, int OC);

// Adds into dweight (OC,C), or writes it if !accumulate, then writes dinp (N,C), which may be inp.
// A null output is not computed. dinp is X or, if Y is float, fp32. Deterministic. The bias
// gradient is the sum of dout's rows. The call that made dout computes it (layernorm_backward's
// dinp_sum, matmul_activation_backward's dpre_sum), or qkv_bias_backward does.
template <class X, class Y = X>
void matmul_backward(const Cuda& dev, std::type_identity_t<Y>* dinp, float* dweight, const X* dout,
                     const X* inp, const X* weight, size_t N, int C, int OC,
                     bool accumulate = true);

// Backward of a linear layer and of the activation before it. Writes dpre (N,C) = (dout
// (N,OC)·weight (OC,C))∘f'(pre) and adds its sum over rows into dpre_sum (C). Also writes out (N,C)
// = f(pre), unless out is null. Deterministic. Needs matmul_activation_scratch_bytes() of scratch.
template <class X>
void matmul_activation_backward(const Cuda& dev, X* dpre, float* dpre_sum, X* out, void* scratch,
                                const X* dout, const X* weight, const X* pre, size_t N, int C,
                                int OC);
size_t matmul_activation_scratch_bytes(const Cuda& dev, size_t N, int C, int OC);

// The bias gradient of the matmul that computes q, k and v, whose output gradient is dqkv (N,3C).
// The projection after attention has the weight projw (C,C) and the bias gradient dprojb (C). Only
// q's part needs a sum over dqkv.
//   dqkvb[0, C)    q: adds the sum of dq's rows.
//   dqkvb[C, 2C)   k: always zero, not touched. Adding the same vector to every key shifts a row's
//                  logits equally, which softmax ignores.
//   dqkvb[2C, 3C)  v: writes dprojb·projw. Let dout be the gradient of attention's output, and
//                  dproj that of the projection's. Then dout = dproj·projw, and as rows of P sum
//                  to 1, Σ dv = Σ Pᵀ·dout = Σ dout. It does not add, because dprojb already
//                  contains the sums of earlier micro-batches.
// Needs qkv_bias_scratch_bytes() of scratch.
template <class X>
void qkv_bias_backward(const Cuda& dev, float* dqkvb, void* scratch, const X* dqkv,
                       const float* dprojb, const X* projw, size_t N, int C);
size_t qkv_bias_scratch_bytes(const Cuda& dev, int C);

// -------------------------------------------------------------------------------------------------
// The activation f (activation.cu, cuda/activation.cuh), which is GELU in its tanh form

// Writes out (n).
template <class X>
void activation_forward(const Cuda& dev, X* out, const X* inp, size_t n);

// Writes dinp (N,C) = dout∘f'(inp) and adds its sum over rows into dinp_sum (C). dinp may be dout.
// Also writes out (N,C) = f(inp), unless out is null. Deterministic. Needs
// activation_scratch_bytes() of scratch.
template <class X>
void activation_backward(const Cuda& dev, X* dinp, float* dinp_sum, X* out, void* scratch,
                         const X* inp, const X* dout, size_t N, int C);
size_t activation_scratch_bytes(const Cuda& dev, int C);

// -------------------------------------------------------------------------------------------------
// Classifier (classifier.cu): logits = inp·weightᵀ, and softmax cross-entropy over them

// Writes losses (N) = −log softmax(logits)[target]. inp (N,C), weight (Vp,C). If dloss != 0, it
// also prepares for cross_entropy_backward, which must get the same dlogits (N,Vp) and scratch. A
// target outside [0, V) makes its loss and its gradients NaN. Needs cross_entropy_scratch_bytes()
// of scratch. Pointers to X must be aligned to 16 bytes if X is bf16.
template <class X>
void cross_entropy(const Cuda& dev, X* dlogits, float* losses, void* scratch, const X* inp,
                   const X* weight, const int* targets, float dloss, size_t N, int C, int V,
                   int Vp);
// Writes dinp and adds into or writes dweight, as matmul_backward does. dlogits and scratch are as
// cross_entropy left them: dlogits is the gradient of the logits, except that the scales of its
// rows may be in scratch.
template <class X>
void cross_entropy_backward(const Cuda& dev, X* dinp, float* dweight, void* scratch,
                            const X* dlogits, const X* inp, const X* weight, size_t N, int C,
                            int Vp, bool accumulate = true);
template <class X>
size_t cross_entropy_scratch_bytes(const Cuda& dev, size_t N, int C, int Vp);

// Writes losses (N) = −log softmax(logits)[target]. If dloss != 0 it overwrites logits (N,Vp) with
// their gradient dloss·(softmax − onehot), which is zero in the padding columns [V, Vp). If dloss
// == 0, logits are not changed. A target outside [0, V) makes its loss and gradient NaN.
template <class X>
void classifier(const Cuda& dev, X* logits, float* losses, const int* targets, float dloss,
                size_t N, int V, int Vp);

// -------------------------------------------------------------------------------------------------
// Reductions and the optimizer (global_norm.cu, adamw.cu)

// Writes out[0] = scale · Σ x. Deterministic. Needs reduce_scratch_bytes() of scratch.
void reduce_sum(const Cuda& dev, float* out, void* scratch, const float* x, float scale, size_t n);
// Writes out[0] = √Σ x², which is not finite if an x is not. Deterministic. Needs
// reduce_scratch_bytes() of scratch.
void global_norm(const Cuda& dev, float* out, void* scratch, const float* x, size_t n);
size_t reduce_scratch_bytes(const Cuda& dev);

// Returns how many elements are NaN or ±inf. Waits for the device, so it is only for error reports.
// Needs 8 bytes of scratch.
template <class X>
size_t count_nonfinite(const Cuda& dev, void* scratch, const X* x, size_t n);
// Returns a hash of x's 4-byte words and their positions, which is 0 if all words are 0. Waits for
// the device. Needs 8 bytes of scratch.
uint64_t checksum(const Cuda& dev, void* scratch, const void* x, size_t bytes);

// One AdamW step (Loshchilov & Hutter 2019, Algorithm 2) over all ranges, in one launch. Updates
// master, m and v, and writes params. If X is bf16, params are rounded stochastically. If X is
// float, params are the master weights, and `master` is ignored. Within a step, the random bits
// depend only on an element's index in params, so that several ranks, each of which updates a
// shard, write the same as a single rank that updates all. norm is the gradient's global norm, one
// float on the device. If it is not finite, nothing is updated.
template <class X>
void adamw_update(const Cuda& dev, X* params, float* master, float* m, float* v, const float* grads,
                  const float* norm, const ParamRange* ranges, int num_ranges, const AdamW& hyper);

// -------------------------------------------------------------------------------------------------
// Initial values of parameters (parameters.cu)

// Writes x[i] = mean + sigma·z, rounded to float and then to X. z is a standard normal number that
// depends only on seed and first + i. The CPU's result may differ by one unit in the last place of
// a float.
template <class X>
void init_normal(const Cuda& dev, X* x, size_t n, double mean, double sigma, uint64_t seed,
                 size_t first);
// Writes out[i] = in[i], rounded to To. Both are float or bf16.
template <class To, class From>
void convert(const Cuda& dev, To* out, const From* in, size_t n);
