// The partial form of attention kernels, of which chunked and ring attention are made. It runs some queries against
// some keys and values, each with its global offset. It carries its state in fp32, and lse in fp64. Its types, Heads
// and PartialShape, are in layers/gpu/types.h.
#pragma once
#include "attention/attention.h"

template <class X>
struct PartialForm {
    // Reads and updates the running state, which is o_acc (B,Tq,NH,HS) fp32 and lse (B,NH,Tq) fp64. (The reason for
    // fp64 is in merge.cuh.) The merge is stable:
    //   o ← o − σ(lse_b − lse)(o − o_b);  lse ← logaddexp(lse, lse_b)
    // A row that has seen no key yet has lse = −inf. Its o is not read, because its first keys overwrite it.
    void (*forward)(const Cuda&, float* o_acc, double* lse, Heads<const X> q, Heads<const X> k, Heads<const X> v,
                    const PartialShape&);
    // Adds into the caller's dk and dv (B,Tk,NH,HS), or writes them if write_dkv, and adds into dq_sum. dk and dv are
    // fp32. They are contiguous, except that sequences are k_rows tokens apart. lse (B,NH,Tq) is the global one, and D
    // (B,NH,Tq) comes from attention_D. scratch has scratch_bytes(shape). What is enough for all queries is enough for
    // any part of them.
    //
    // dq_sum is the running fp32 sum of dQ (B,q_rows,NH,HS). Only the kernel knows its layout and scale. Allocate
    // dq_sum_bytes(), which depends on B, q_rows, NH and HS, and zero it before the first call. After the last one
    // write_dq, given the calls' scale, rounds it and writes every element of dq.
    void (*backward)(const Cuda&, float* dq_sum, float* dk, float* dv, void* scratch, Heads<const X> q,
                     Heads<const X> k, Heads<const X> v, Heads<const X> dout, const float* lse, const float* D,
                     const PartialShape&);
    size_t (*scratch_bytes)(const PartialShape&);
    size_t (*dq_sum_bytes)(const PartialShape&);
    void (*write_dq)(const Cuda&, Heads<X> dq, const float* dq_sum, const PartialShape&);
};

// dq_sum_bytes and write_dq for kernels whose dq_sum is plain rows, (B,q_rows,NH,HS) (ring/blocks.cu).
size_t dq_rows_bytes(const PartialShape&);
template <class X>
void write_dq_rows(const Cuda& dev, Heads<X> dq, const float* dq_sum, const PartialShape&);

// Helpers (partial.cu).
// Sets lse = −inf and o = 0. o_acc may be null if every row will see a key.
void attention_clear_state(const Cuda& dev, float* o_acc, double* lse, const PartialShape&);
template <class X>  // writes D (B,NH,T) = rowsum(dout∘out), where dout, out (B,T,NH,HS) are contiguous
void attention_D(const Cuda& dev, float* D, const X* dout, const X* out, int B, int T, int NH, int HS);
