// What the ring's study and its benchmark share: attention's tensors for one sequence (B = 1), or a rank's part of it.
#pragma once
#include "attention/ring/blocks.h"
#include "attention/ring/heads.h"
#include "dev/oracle.cuh"
#include "layers/layers.h"

template <class T>
T* as(const DeviceMemory& memory) {
    return static_cast<T*>(memory.get());
}

template <class X>
struct Sequence {
    const Cuda& dev;
    AttentionShape s;
    size_t n;  // elements of out
    DeviceMemory memory, stats, scratch;
    X *qkv, *dout, *out, *dqkv;
    float* lse;

    // All begins as NaN.
    Sequence(const Cuda& dev, int T, int NH, int HS)
        : dev(dev),
          s{1, T, NH, HS},
          n(size_t(T) * NH * HS),
          memory(poisoned(dev, 8 * n * sizeof(X))),
          stats(poisoned(dev, n / HS * sizeof(float))),
          scratch(poisoned(dev, attention_scratch_bytes<X>(dev, Attention::flash, 1, T, NH, HS))) {
        qkv = as<X>(memory), dout = qkv + 3 * n, out = dout + n, dqkv = out + n, lse = as<float>(stats);
    }
    // The inputs are random.
    Sequence(const Cuda& dev, int T, int NH, int HS, uint64_t seed) : Sequence(dev, T, NH, HS) {
        fill_normal(dev, qkv, 4 * n, seed);
    }
    // The inputs are those of a rank's two chunks.
    Sequence(const Sequence& whole, const Zigzag& zigzag, int rank)
        : Sequence(whole.dev, whole.s.T / zigzag.ranks, whole.s.NH, whole.s.HS) {
        const size_t half = n / 2;
        for (int i = 0; i < 2; i++) {
            const size_t at = zigzag.chunk(rank, i) * half;
            copy_rows(dev, qkv + 3 * i * half, 3 * half, whole.qkv + 3 * at, 3 * half, 3 * half, 1);
            copy_rows(dev, dout + i * half, half, whole.dout + at, half, half, 1);
        }
    }

    // By the unchunked kernel.
    void forward() const {
        attention_forward<X>(dev, Attention::flash, out, lse, nullptr, scratch.get(), qkv, 1, s.T, s.NH, s.HS);
    }
    void backward() const {
        attention_backward<X>(dev, Attention::flash, dqkv, scratch.get(), dout, out, lse, nullptr, qkv, 1, s.T, s.NH,
                              s.HS);
    }
    // By a ring or in chunks.
    template <class Parts>
    void forward(Parts& parts) const {
        parts.forward(out, lse, qkv);
    }
    template <class Parts>
    void backward(Parts& parts) const {
        parts.backward(dqkv, dout, out, lse, qkv);
    }
};
