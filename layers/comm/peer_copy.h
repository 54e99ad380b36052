// What travels between the GPUs of one machine, by their copy engines and without a multiprocessor.
//
// NCCL sends and receives with kernels. Beside kernels that fill the GPU, as attention's do, that costs twice. NCCL's
// blocks take multiprocessors away, and they move a fraction of what the links can. A copy engine takes none and moves
// all that the links can.
//
// Every rank offers a region of its memory and opens the others' regions (CUDA IPC). All regions have the same size and
// layout. Two flags in device memory order each transfer. A rank's stream says "open" to another rank when that one may
// write into its region or read it. The other's stream says "done" after its copies. A stream waits for a flag without
// the host (cuStreamWaitValue32) and then clears it, so that a CUDA graph can be replayed.
#pragma once
#include <cuda.h>

#include <functional>
#include <memory>
#include <vector>

#include "layers/comm/job.h"
#include "layers/gpu/cuda.h"

class PeerCopies {
  public:
    // For ranks first … first + size − 1 of the job, whose ranks all call this at once. All of them get null if one
    // cannot reach the others' memory, because it is on another machine or has no peer access. `memory` is all of one
    // Cuda::alloc.
    static std::unique_ptr<PeerCopies> open(const Cuda& dev, Job& job, int first, int size, void* memory, size_t bytes);
    // Unmaps the others' memory. All ranks of the job call it at once, when no transfer is under way. When it returns
    // no other rank has this one's memory mapped. An object destroyed without it, as while an Error unwinds, frees
    // nothing.
    void close(Job& job);
    PeerCopies(const PeerCopies&) = delete;

    // Is all of it in the region?
    bool has(const void* p, size_t bytes) const {
        const char* x = static_cast<const char*>(p);
        return x >= own_ && x + bytes <= own_ + bytes_;
    }
    // Enqueues the step of a ring. It sends to one rank and receives what one sends. `recv` is the same place in every
    // rank's own region. `send` may be anywhere.
    void send_recv(cudaStream_t stream, int to, const void* send, size_t bytes, int from, void* recv) const;
    // Enqueues what copies(peer) does for every other rank, while all ranks' regions are open. All ranks call it.
    void visit(cudaStream_t stream, const std::function<void(int peer)>& copies) const;
    char* at(int peer, void* x) const { return regions_[peer] + (static_cast<char*>(x) - own_); }

  private:
    explicit PeerCopies(const Cuda& dev) : dev_(dev) {}
    const Cuda& dev_;
    int rank_ = 0, size_ = 1;
    char* own_ = nullptr;
    size_t bytes_ = 0;
    uint32_t* flags_ = nullptr;  // each rank's "open" to this one, then each rank's "done"
    std::vector<char*> regions_;
    std::vector<uint32_t*> flags_of_;
    unsigned wait_ = 0;  // how a stream waits

    void say(cudaStream_t stream, int rank, int which) const;
    void wait(cudaStream_t stream, int rank, int which) const;
};
