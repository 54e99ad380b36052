// Copies between the GPUs of one machine by their copy engines: the step of a ring, without a multiprocessor.
//
// NCCL sends and receives by kernels. Beside kernels that fill the GPU, as attention's do, that costs twice: NCCL's blocks
// take multiprocessors away, and they move a fraction of what the links can. A copy engine takes none and moves all.
//
// Every rank offers a region of its memory, all of the same size and laid out alike, and opens those of the others (CUDA
// IPC). A transfer writes into the receiver's region. Two flags in device memory order it: the receiver's stream says
// "free" to the sender, when what was there is no longer needed; the sender's says "there" behind its copy. A stream waits
// for a flag by itself (cuStreamWaitValue32), and then sets it back, so that a CUDA graph can be replayed.
#pragma once
#include <cuda.h>

#include <memory>
#include <vector>

#include "data/job.h"
#include "layers/cuda.h"

class PeerCopies {
  public:
    // Of the ranks first … first + size − 1 of the job; all its ranks call this at once. Null for all of them if one cannot
    // reach the others' memory: not on the same machine, no peer access. `memory` is all of one Cuda::alloc.
    static std::unique_ptr<PeerCopies> open(const Cuda& dev, Job& job, int first, int size, void* memory, size_t bytes);
    // Leaves the others' memory; all ranks of the job call it at once, when no transfer is under way. When it returns no
    // other rank has this one's memory mapped. Who is destroyed without it, as while an Error unwinds, frees nothing.
    void close(Job& job);
    PeerCopies(const PeerCopies&) = delete;

    // Is all of it in the region?
    bool has(const void* p, size_t bytes) const {
        const char* x = static_cast<const char*>(p);
        return x >= own_ && x + bytes <= own_ + bytes_;
    }
    // On the stream: rows of `bytes`, `stride` bytes apart, to one rank, where they are without gaps, and from one rank
    // what it sends. All ranks have the same `recv`, in their own regions; `send` may be anywhere.
    void send_recv(cudaStream_t stream, int to, const void* send, size_t stride, size_t bytes, size_t rows, int from,
                   void* recv) const;

  private:
    explicit PeerCopies(const Cuda& dev) : dev_(dev) {}
    const Cuda& dev_;
    int rank_ = 0, size_ = 1;
    char* own_ = nullptr;
    size_t bytes_ = 0;
    uint32_t* flags_ = nullptr;  // "free" of each rank, then "there" of each rank, as they say it to this one
    std::vector<char*> regions_;
    std::vector<uint32_t*> flags_of_;
    unsigned wait_ = 0;  // how a stream waits

    void say(cudaStream_t stream, int rank, int which) const;
    void wait(cudaStream_t stream, int rank, int which) const;
};
