// The collectives of the seam, CUDA side. NCCL runs on a stream of its own, so that gradients are summed over the ranks
// while backward goes on. layers/comm/reference_comm.h has the same list for the CPU. All `size` ranks make the same
// calls in the same order. x and out are device memory.
//
//   fork()                       what is called from here on waits for the device's work so far …
//   join()                       … and the device's further work waits for it
//   head_start()                 the device's further work begins a little later than what was called (see comm.cu)
//   group(calls)                 many calls as one, which NCCL starts together
//   all_reduce(x, n)             x ← Σ over ranks of x
//   reduce_scatter(out, x, n)    x has size parts of n elements, and out (n) ← Σ over ranks of part `rank` of their x
//   all_gather(x, n)             x has size parts of n elements, and part r ← rank r's part r
//   send_recv(to, send, n, from, recv, m)
//                                sends n elements to one rank and receives m from one
//
// Sums have the same bits on all ranks, and on every run with the same machine and number of ranks. NCCL does this, but
// its manual does not promise it, so dev/test_comm checks.
#pragma once
#include "layers/comm/job.h"
#include "layers/gpu/cuda.h"

struct ncclComm;  // NCCL's, of which this header needs only the name

class NcclComm {
  public:
    // Throws Error if this program was built without NCCL, or NCCL cannot connect the ranks.
    NcclComm(const Cuda& dev, Job& job);
    // A communicator of `count` of all ranks, from `first` on, with a stream of its own. Every rank makes one, for its
    // own part.
    NcclComm(NcclComm& all, int first, int count);
    ~NcclComm();
    NcclComm(const NcclComm&) = delete;
    NcclComm& operator=(const NcclComm&) = delete;
    const int rank, size;

    void fork();
    void join();
    void head_start();
    void group(const std::function<void()>& calls);

    void all_reduce(float* x, size_t n);
    void reduce_scatter(float* out, const float* x, size_t n);
    template <class X>
    void all_gather(X* x, size_t n) {
        all_gather_bytes(reinterpret_cast<char*>(x), n * sizeof(X));
    }
    template <class X>
    void send_recv(int to, const X* send, size_t n, int from, X* recv, size_t m) {
        send_recv_bytes(to, send, n * sizeof(X), from, recv, m * sizeof(X));
    }

  private:
    const Cuda& dev_;
    Job& job_;
    ncclComm* comm_ = nullptr;
    cudaStream_t stream_ = nullptr;
    cudaEvent_t ready_ = nullptr, done_ = nullptr;

    void begin();
    std::string asynchronous_error() const;
    void all_gather_bytes(char* x, size_t bytes);
    void send_recv_bytes(int to, const void* send, size_t bytes_out, int from, void* recv, size_t bytes_in);
};
