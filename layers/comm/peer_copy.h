// What split attention sends between the GPUs of one machine, by their copy engines and without a multiprocessor.
//
// NCCL sends and receives with kernels. Beside kernels that fill the GPU, as attention's do, that costs twice. NCCL's
// blocks take multiprocessors away, and they move a fraction of what the links can. A copy engine takes none and moves
// all that the links can.
//
// Every rank offers a region of its memory and opens the others' regions (CUDA IPC). All regions have the same size and
// layout. A transfer writes into the receiver's region, and two flags in device memory order it. The receiver's stream
// says "free" to the sender when what was there is no longer needed. The sender's stream says "there" after its copy. A
// stream waits for a flag without the host (cuStreamWaitValue32) and then clears it, so that a CUDA graph can be
// replayed.
#pragma once
#include <cuda.h>

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
    // Enqueues a transfer. It sends rows of `bytes` bytes, `stride` bytes apart, to one rank, which gets them without
    // gaps, at the place that `there` is in this rank's own region. `send` may be anywhere. It receives what one rank
    // sends.
    void send_recv(cudaStream_t stream, int to, const void* send, size_t stride, size_t bytes, size_t rows,
                   const void* there, int from) const;

  private:
    explicit PeerCopies(const Cuda& dev) : dev_(dev) {}
    const Cuda& dev_;
    int rank_ = 0, size_ = 1;
    char* own_ = nullptr;
    size_t bytes_ = 0;
    uint32_t* flags_ = nullptr;  // each rank's "free" to this one, then each rank's "there"
    std::vector<char*> regions_;
    std::vector<uint32_t*> flags_of_;
    unsigned wait_ = 0;  // how a stream waits

    void say(cudaStream_t stream, int rank, int which) const;
    void wait(cudaStream_t stream, int rank, int which) const;
};
