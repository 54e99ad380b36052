// The collectives of the seam. NCCL runs on a stream of its own, so that gradients are summed over the ranks while
// backward goes on. All `size` ranks make the same calls in the same order. Tests have the same list for threads
// (dev/thread_comm.h). x, out and what is sent are device memory.
//
//   fork()                       what is called from here on waits for the device's work so far …
//   join()                       … and the device's further work waits for it
//   head_start()                 the device's further work begins a little later than what was called (see comm.cu)
//   group(calls)                 many calls as one, which NCCL starts together
//   all_reduce(x, n)             x ← Σ over ranks of x
//   reduce_scatter(out, x, n)    x has size parts of n elements, and out (n) ← Σ over ranks of part `rank` of their x
//   all_gather(x, n)             x has size parts of n elements, and part r ← rank r's part r
//   broadcast(x, bytes)          x ← rank 0's x
//   send(to, x, bytes), recv(from, x, bytes)     between two ranks, which call nobody else meanwhile
//   send_recv(to, send, n, from, recv, m)        sends n elements to one rank and receives m from one
//
// Small things on the host go through a small buffer of the device. These return when they are done:
//
//   host_all_gather(all, bytes)  all has size parts of so many bytes, and part r ← rank r's part r
//   all_gather_values(mine)      every rank's value, by rank
//
// Sums have the same bits on all ranks, and on every run with the same machine and number of ranks. NCCL does this, but
// its manual does not promise it, so dev/test_comm checks.
#pragma once
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "layers/gpu/cuda.h"

struct ncclComm;  // NCCL's, of which this header needs only the name

class NcclComm {
  public:
    // All of these throw Error if this program was built without NCCL.
    static std::string version();
    static std::string new_id();  // rank 0's, for all; random, so that no other job's ranks can know it
    NcclComm(const Cuda& dev, int rank, int size, const std::string& id);
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
        all_gather_bytes(x, n * sizeof(X));
    }
    void broadcast(void* x, size_t bytes);
    void send(int to, const void* x, size_t bytes);
    void recv(int from, void* x, size_t bytes);
    template <class X>
    void send_recv(int to, const X* send_x, size_t n, int from, X* recv_x, size_t m) {
        group([&] {
            send(to, send_x, n * sizeof(X));
            recv(from, recv_x, m * sizeof(X));
        });
    }

    void host_all_gather(void* all, size_t bytes);
    template <class T>
    std::vector<T> all_gather_values(T mine) {
        static_assert(std::is_trivially_copyable_v<T>);
        std::vector<T> all(size, mine);
        host_all_gather(all.data(), sizeof(T));
        return all;
    }

    // What NCCL noticed by itself, "" if all is well. Any thread may ask, as long as this lives.
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

