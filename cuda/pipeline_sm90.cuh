// Pipelines through shared memory on sm_90. Some threads, or the TMA unit, fill a buffer that
// others read. Two mbarriers (ptx_sm90.cuh) for each stage of the buffer keep them apart:
//
//   full     A phase ends when the stage has been filled. Readers wait for it.
//   empty    A phase ends when all readers are done with the stage. Whoever fills it next waits.
//
// The n-th use of a buffer, from 0 on, takes stage n % Stages, in round n / Stages. In each round
// each barrier ends one phase, and phases are named by their parity. Readers wait for `full` to end
// the phase of their own round. Whoever fills a stage waits for `empty` to end that of the round
// before, which has the other parity. In the first round that wait returns at once, as all stages
// are empty.
//
// A parity cannot tell a round from the next but one. It need not, if whoever waits at `full` also
// arrives at `empty`, or is awaited by somebody who does: then no stage is filled again, and no
// later phase of `full` ends, before that wait is over.
#pragma once
#include "cuda/ptx_sm90.cuh"

// The stage and the phase of a use. ++ goes on to the next.
template <int Stages>
struct PipelineState {
    int index = 0;       // of the stage
    uint32_t phase = 0;  // the parity of the round

    PipelineState() = default;
    // Of use n. It converts implicitly, so that buffer[n] or barriers.wait(n) mean use n.
    __device__ __forceinline__ PipelineState(uint32_t n)
        : index(n % Stages), phase(n / Stages % 2) {}

    __device__ __forceinline__ void operator++() {
        if (++index == Stages) {
            index = 0;
            phase ^= 1;
        }
    }
};

// The tiles of a buffer.
template <class Tile, int Stages>
struct PipelineBuffer {
    Tile tiles[Stages];

    __device__ __forceinline__ Tile& operator[](PipelineState<Stages> s) { return tiles[s.index]; }
    __device__ __forceinline__ const Tile& operator[](PipelineState<Stages> s) const {
        return tiles[s.index];
    }
    __device__ __forceinline__ uint32_t address(PipelineState<Stages> s) const {
        return smem_address(tiles) + s.index * uint32_t{sizeof(Tile)};
    }
};

// Its full or its empty barriers.
template <int Stages>
struct PipelineBarriers {
    uint64_t barriers[Stages];

    // `arrivals`: how many threads arrive in each phase.
    __device__ __forceinline__ void init(int arrivals) {
        for (int i = 0; i < Stages; i++)
            mbarrier_init(smem_address(&barriers[i]), arrivals);
    }
    __device__ __forceinline__ uint32_t address(PipelineState<Stages> s) const {
        return smem_address(barriers) + s.index * uint32_t{sizeof(uint64_t)};
    }
    __device__ __forceinline__ void arrive(PipelineState<Stages> s) const {
        mbarrier_arrive(address(s));
    }
};

template <int Stages>
struct FullBarriers : PipelineBarriers<Stages> {
    // Arrives, and makes the phase wait for `bytes` of copies too.
    __device__ __forceinline__ void arrive_expect(PipelineState<Stages> s, uint32_t bytes) const {
        mbarrier_arrive_expect(this->address(s), bytes);
    }
    __device__ __forceinline__ void wait(PipelineState<Stages> s) const {
        mbarrier_wait(this->address(s), s.phase);
    }
};

template <int Stages>
struct EmptyBarriers : PipelineBarriers<Stages> {
    // Waits for the phase of the round before this use's.
    __device__ __forceinline__ void wait(PipelineState<Stages> s) const {
        mbarrier_wait(this->address(s), s.phase ^ 1);
    }
};
