// The two halves of flash_bf16_sm90: the forward's file makes one AttentionKernel of both. Signatures and meaning are
// those of AttentionKernel<bf16>'s fields in attention.h.
#pragma once
#include "attention/attention.h"

void flash_bf16_sm90_backward(const Cuda& dev, bf16* dqkv, void* scratch, const bf16* dout, const bf16* out,
                              const float* lse, const bf16* att, const bf16* qkv, const AttentionShape& s);
void flash_bf16_sm90_backward_partial(const Cuda& dev, float* dq_sum, float* dk, float* dv, void* scratch,
                                      Heads<const bf16> q, Heads<const bf16> k, Heads<const bf16> v,
                                      Heads<const bf16> dout, const float* lse, const float* D, const PartialShape& s);
size_t flash_bf16_sm90_dq_sum_bytes(const PartialShape& s);
void flash_bf16_sm90_write_dq(const Cuda& dev, Heads<bf16> dq, const float* dq_sum, const PartialShape& s);
size_t flash_bf16_sm90_scratch_bytes(const AttentionShape& s);
size_t flash_bf16_sm90_partial_scratch_bytes(const PartialShape& s);
