// The backward half of flash_bf16_sm90, for the file of the forward half, which puts the two
// together as an AttentionKernel (attention.h).
#pragma once
#include "attention/attention.h"

template <class Y>  // bf16, float
void sm90_backward(const Cuda& dev, const AttentionBackward<bf16, Y>& call);
size_t sm90_scratch_bytes(const AttentionShape& s);
