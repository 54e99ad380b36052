// The collectives of the seam. NCCL runs on a stream of its own, so that gradients are summed over
// the ranks while backward goes on. All `size` ranks make the same calls in the same order. Tests
// have the same list for threads (dev/common/thread_comm.h). x, out and what is sent are device
// memory.
//
// Sums have the same bits on all ranks, and on every run with the same machine and number of ranks.
// NCCL's manual does not promise it, so dev/test_comm checks.
#pragma once
#include <functional>
#include <string>

#include "cuda/cuda.h"

struct ncclComm;  // NCCL's, of which this header needs only the name

class NcclComm {
  public:
    // All of these throw Error if this program was built without NCCL.
    static std::string version();
    // rank 0's, for all; random, so that no other job's ranks can know it
    static std::string new_id();
    NcclComm(const Cuda& dev, int rank, int size, const std::string& id);
    // Of `count` of all ranks, from `first` on, with a stream of its own. Every rank makes one, for
    // its own part.
    NcclComm(NcclComm& all, int first, int count);
    ~NcclComm();
    NcclComm(const NcclComm&) = delete;
    const int rank, size;

    void fork();  // what is called from here on waits for the device's work so far …
    void join();  // … and the device's further work waits for it
    // the device's further work begins a little later than what was called (see comm.cu)
    void head_start();
    // many calls as one, which NCCL starts together
    void group(const std::function<void()>& calls);

    void all_reduce(float* x, size_t n);  // x ← Σ over ranks of x
    // x has size parts of n elements, and out (n) ← Σ over ranks of part `rank` of their x.
    void reduce_scatter(float* out, const float* x, size_t n);
    template <class X>  // x has size parts of n elements, and part r ← rank r's part r
    void all_gather(X* x, size_t n) {
        all_gather_bytes(x, n * sizeof(X));
    }
    void broadcast(void* x, size_t bytes);  // x ← rank 0's x
    // between two ranks, which call nobody else meanwhile
    void send(int to, const void* x, size_t bytes);
    void recv(int from, void* x, size_t bytes);
    template <class X>  // sends n elements to one rank and receives m from one
    void send_recv(int to, const X* send_x, size_t n, int from, X* recv_x, size_t m) {
        group([&] {
            send(to, send_x, n * sizeof(X));
            recv(from, recv_x, m * sizeof(X));
        });
    }
    // For host memory. `all` has size parts of so many bytes, and part r ← rank r's part r. It
    // returns when that is done.
    void host_all_gather(void* all, size_t bytes);
    // what NCCL noticed by itself, "" if all is well; any thread may ask while this lives
    std::string error() const;

  private:
    const Cuda& dev_;
    ncclComm* comm_ = nullptr;
    cudaStream_t stream_ = nullptr;
    cudaEvent_t ready_ = nullptr, done_ = nullptr;
    char* stage_ = nullptr;  // of the device, for what is on the host

    void begin();
    void all_gather_bytes(void* x, size_t bytes);
};
