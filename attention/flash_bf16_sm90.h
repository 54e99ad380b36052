// Half of flash_bf16_sm90, of which the forward's file makes an AttentionKernel (attention.h).
#pragma once
#include "attention/attention.h"

template <class Y>  // bf16, float
void sm90_backward(const Cuda& dev, const AttentionBackward<bf16, Y>& call);
size_t sm90_bytes(const AttentionShape& s);  // of its scratch
