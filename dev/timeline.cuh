// Included before a kernel's file (Makefile: build/timeline/), so that each of its waits leaves two clock stamps. The
// kernel's text says nothing of it. A stamp costs some 30 clocks.
#pragma once
#include "layers/gpu/cuda.h"
#include "layers/gpu/ptx_sm90.cuh"

constexpr int kWaits = 1 << 16, kWarps = 16;
struct Timeline {  // of block 0. A wait goes to slot (begin / 32) % kWaits, because a counter would cost 250 clocks
    struct Wait {
        unsigned begin, end;  // the SM's clock
        int line;             // of the kernel's file, where the wait stands, or 0 in a slot that is free
    } waits[kWarps][kWaits];
};

#ifdef TIMELINE  // the name of the function that gives this kernel's stamps
namespace {
__device__ Timeline timeline;

// A wait in line `Line`. The first thread of each warp records it.
template <int Line>
struct At {
    static __device__ __forceinline__ void stamp(unsigned begin) {
        if (blockIdx.x > 0 || threadIdx.x % 32 > 0) return;
        timeline.waits[threadIdx.x / 32][begin / 32 % kWaits] = {begin, static_cast<unsigned>(clock()), Line};
    }
    static __device__ __forceinline__ void for_mbarrier(uint32_t barrier, uint32_t parity) {
        const unsigned begin = clock();
        mbarrier_wait(barrier, parity);
        stamp(begin);
    }
    template <int Pending, class... D>
    static __device__ __forceinline__ void for_wgmma(D&... results) {
        const unsigned begin = clock();
        wgmma_wait<Pending>(results...);
        stamp(begin);
    }
};
}  // namespace

void* TIMELINE() {
    void* address;
    CUDA_CHECK(cudaGetSymbolAddress(&address, timeline));
    return address;
}
#define mbarrier_wait At<__LINE__>::for_mbarrier
#define wgmma_wait    At<__LINE__>::template for_wgmma
#endif
