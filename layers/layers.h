// The backend seam, CUDA side: every layer as one call. dev/reference.h has the same list for the CPU; the trainer is
// written once over both. All pointers are device memory, all tensors row-major and contiguous, all launches go to
// dev.stream. "Writes" means every element, whatever was there before; "adds into" means the caller cleared it.
//
// Shapes: B batch, T tokens, C channels, N = B·T rows, V vocabulary, Vp padded vocabulary (a multiple of 128 is fastest), NH heads,
// HS = C/NH head size. X is float or bf16; statistics, losses and weight gradients are fp32.
// Errors (a failed CUDA or cuBLAS call, an unsupported shape) throw Error with file, line and what was attempted.
#pragma once
#include "layers/cuda.h"
#include "layers/types.h"

// ---------------------------------------------------------------------------------------------------------------------
// Encoder (encoder.cu): out = wte[token] + wpe[position of t]

// Writes out (B,T,C). tokens (B,T) in [0, V).
template <class X>
void encoder_forward(const Cuda& dev, X* out, const int* tokens, const X* wte, const X* wpe, int B, int T, int C,
                     const Positions& positions = {});

// Adds into dwte (Vp,C) and dwpe (maxT,C). Deterministic. scratch: encoder_scratch_bytes(). plan: device copy of what
// encoder_plan() wrote for these tokens.
template <class X>
void encoder_backward(const Cuda& dev, float* dwte, float* dwpe, void* scratch, const X* dout, const int* plan, int B,
                      int T, int C, const Positions& positions = {});
size_t encoder_scratch_bytes(const Cuda& dev, int B, int T, int C);

// Host side: ints that a plan for N positions needs, and the plan itself (see kEncoderChunk in types.h).
size_t encoder_plan_ints(const Cuda& dev, size_t N);
void encoder_plan(const Cuda& dev, int* plan, const int* tokens, size_t N);

// ---------------------------------------------------------------------------------------------------------------------
// Layer norm (layernorm.cu), over the last dimension, eps = 1e-5

// Writes out (N,C), mean (N), rstd (N).
template <class X>
void layernorm_forward(const Cuda& dev, X* out, float* mean, float* rstd, const X* inp, const X* weight, const X* bias,
                       size_t N, int C);

// residual = a + b, then layer norm of the residual as stored. Writes residual (N,C), out (N,C), mean (N), rstd (N).
// residual may be a or b.
template <class X>
void residual_layernorm_forward(const Cuda& dev, X* residual, X* out, float* mean, float* rstd, const X* a, const X* b,
                                const X* weight, const X* bias, size_t N, int C);

// Adds into dinp (N,C), dweight (C), dbias (C), and into dinp_sum (C) (null: not wanted) the sum over rows of the new
// dinp. Deterministic. scratch: layernorm_scratch_bytes().
template <class X>
void layernorm_backward(const Cuda& dev, X* dinp, float* dweight, float* dbias, float* dinp_sum, void* scratch,
                        const X* dout, const X* inp, const X* weight, const float* mean, const float* rstd, size_t N,
                        int C);
size_t layernorm_scratch_bytes(const Cuda& dev, int C);

// ---------------------------------------------------------------------------------------------------------------------
// Matmul (matmul.cu), cuBLASLt with cached plans: out = inp·weightᵀ + bias

// Writes out (N,OC). inp (N,C), weight (OC,C), bias (OC) or null.
template <class X>
void matmul_forward(const Cuda& dev, X* out, const X* inp, const X* weight, const X* bias, size_t N, int C, int OC);

// The same with GELU behind it: writes pre (N,OC) = inp·weightᵀ + bias, kept for backward, and out (N,OC) = gelu(pre).
template <class X>
void matmul_gelu_forward(const Cuda& dev, X* out, X* pre, const X* inp, const X* weight, const X* bias, size_t N, int C,
                         int OC);

// Adds into dweight (OC,C), or writes it if !accumulate, then writes dinp (N,C), which may be inp. Null: not computed.
// Deterministic. The bias's gradient, the sum of dout's rows, comes from what made dout: layernorm_backward's dinp_sum,
// matmul_gelu_backward's dpre_sum, qkv_bias_backward.
template <class X>
void matmul_backward(const Cuda& dev, X* dinp, float* dweight, const X* dout, const X* inp, const X* weight, size_t N,
                     int C, int OC, bool accumulate = true);

// What a linear layer of gelu(pre) hands back to pre: writes dpre (N,C) = (dout (N,OC)·weight (OC,C))∘gelu'(pre), adds
// its sum over rows into dpre_sum (C), and writes out (N,C) = gelu(pre) (null: not wanted). Deterministic.
// scratch: matmul_gelu_scratch_bytes().
template <class X>
void matmul_gelu_backward(const Cuda& dev, X* dpre, float* dpre_sum, X* out, void* scratch, const X* dout,
                          const X* weight, const X* pre, size_t N, int C, int OC);
size_t matmul_gelu_scratch_bytes(const Cuda& dev, size_t N, int C, int OC);

// The bias gradient of the product that makes q, k and v, from dqkv (N,3C), its gradient, and from projw (C,C) and
// dprojb (C), weight and bias gradient of the projection behind attention. Two of the three need no sum over dqkv:
//   dqkvb[0, C)    q's: adds the sum of dq's rows.
//   dqkvb[C, 2C)   k's: zero, left alone. What is added to all keys alike changes no softmax.
//   dqkvb[2C, 3C)  v's: written. Rows of P sum to 1, so Σ dv = Σ Pᵀ·dout = Σ dout, and dout = dproj·projw: dprojb·projw.
// scratch: qkv_bias_scratch_bytes().
template <class X>
void qkv_bias_backward(const Cuda& dev, float* dqkvb, void* scratch, const X* dqkv, const float* dprojb, const X* projw,
                       size_t N, int C);
size_t qkv_bias_scratch_bytes(const Cuda& dev, int C);

// ---------------------------------------------------------------------------------------------------------------------
// GELU, tanh form (gelu.cu)

// Writes out (n).
template <class X>
void gelu_forward(const Cuda& dev, X* out, const X* inp, size_t n);

// Writes dinp (N,C) = dout∘gelu'(inp), which may be dout; adds its sum over rows into dinp_sum (C); writes out (N,C) =
// gelu(inp) (null: not wanted). Deterministic. scratch: gelu_scratch_bytes().
template <class X>
void gelu_backward(const Cuda& dev, X* dinp, float* dinp_sum, X* out, void* scratch, const X* inp, const X* dout,
                   size_t N, int C);
size_t gelu_scratch_bytes(const Cuda& dev, int C);

// ---------------------------------------------------------------------------------------------------------------------
// Attention (attention/): softmax(scale·QKᵀ)V, causal, scale = 1/√HS. The contract is in attention/attention.h.

// Writes out (B,T,C) and lse (B,NH,T). att: attention_saved_bytes() that only naive uses, kept for backward.
template <class X>
void attention_forward(const Cuda& dev, Attention kind, X* out, float* lse, X* att, void* scratch, const X* qkv, int B,
                       int T, int NH, int HS);

// Writes dqkv (B,T,3,NH,HS). out, lse, att as forward left them. Deterministic.
template <class X>
void attention_backward(const Cuda& dev, Attention kind, X* dqkv, void* scratch, const X* dout, const X* out,
                        const float* lse, const X* att, const X* qkv, int B, int T, int NH, int HS);
template <class X>
size_t attention_scratch_bytes(const Cuda& dev, Attention kind, int B, int T, int NH, int HS);
template <class X>
size_t attention_saved_bytes(const Cuda& dev, Attention kind, int B, int T, int NH, int HS);

// ---------------------------------------------------------------------------------------------------------------------
// Classifier (classifier.cu): softmax cross-entropy over logits

// Writes losses (N) = −log softmax(logits)[target]. With dloss != 0 logits (N,Vp) are overwritten by their gradient
// dloss·(softmax − onehot), zero in the padding columns [V, Vp); with dloss == 0 they are left alone. A
// target outside [0, V) makes its loss and gradient NaN.
template <class X>
void classifier(const Cuda& dev, X* logits, float* losses, const int* targets, float dloss, size_t N, int V, int Vp);

// ---------------------------------------------------------------------------------------------------------------------
// Reductions and the optimizer (global_norm.cu, adamw.cu)

// Writes out[0] = scale · Σ x, deterministic. scratch: reduce_scratch_bytes().
void reduce_sum(const Cuda& dev, float* out, void* scratch, const float* x, float scale, size_t n);
// Writes out[0] = √Σ x², deterministic (NaN and inf come through). scratch: reduce_scratch_bytes().
void global_norm(const Cuda& dev, float* out, void* scratch, const float* x, size_t n);
size_t reduce_scratch_bytes(const Cuda& dev);

// Number of elements that are NaN or ±inf; waits for the device. For error reports only. scratch: 8 bytes.
template <class X>
size_t count_nonfinite(const Cuda& dev, void* scratch, const X* x, size_t n);

// One AdamW step (Loshchilov & Hutter 2019, Algorithm 2) over all ranges in one launch. Updates master, m and v, and writes
// params: rounded stochastically if X is bf16; for X = float params is the master itself and `master` is ignored. The random
// bits depend on an element's place in params alone: ranks that update their shares write what one would for all.
// norm: device, one float, the gradient's global norm; if it is not finite nothing is updated.
template <class X>
void adamw_update(const Cuda& dev, X* params, float* master, float* m, float* v, const float* grads, const float* norm,
                  const ParamRange* ranges, int num_ranges, const AdamW& hyper);
