// Communication among ranks, by NCCL. It runs on a stream of its own, so that gradients can be
// summed over the ranks during backward. Tests have the same interface for threads
// (dev/common/thread_comm.h).
//
// All `size` ranks must make the same calls in the same order, except for send and recv. Pointers
// are to device memory unless the name says "host".
//
// Sums have the same bits on all ranks, and in every run on the same machine with the same number
// of ranks. NCCL's manual does not promise that, so dev/test_comm checks it.
#pragma once
#include <functional>
#include <string>

#include "cuda/cuda.h"

struct ncclComm;  // NCCL's own type

class NcclComm {
  public:
    // If this program was built without NCCL, these two and the constructors throw Error.
    static std::string version();
    // The id by which ranks find each other: made by rank 0, given to all. It is random, so that no
    // other job can know it.
    static std::string new_id();

    NcclComm(const Cuda& dev, int rank, int size, const std::string& id);
    // A communicator, with a stream of its own, of the `count` ranks of `all` from `first` on. All
    // ranks call this together, each for the part that it belongs to.
    NcclComm(NcclComm& all, int first, int count);
    ~NcclComm();
    NcclComm(const NcclComm&) = delete;

    const int rank;
    const int size;

    // Later communication waits for what the compute stream has queued so far.
    void fork();
    // Later work on the compute stream waits for the communication queued so far.
    void join();
    // Delays the compute stream a little, so that the communication queued so far starts first.
    void head_start();
    // Makes many calls as one, which NCCL starts together.
    void group(const std::function<void()>& calls);

    // x (n) ← the sum over the ranks of their x
    void all_reduce(float* x, size_t n);
    // x (size, n), out (n) ← the sum over the ranks of part `rank` of their x
    void reduce_scatter(float* out, const float* x, size_t n);
    // x (size, n), part r ← rank r's part r
    template <class X>
    void all_gather(X* x, size_t n) {
        all_gather_bytes(x, n * sizeof(X));
    }
    // x ← rank 0's x
    void broadcast(void* x, size_t bytes);
    // From one rank to another. A send and its recv must come at the same place among the calls
    // that both ranks make. In one group() a rank can send and receive at once.
    void send(int to, const void* x, size_t bytes);
    void recv(int from, void* x, size_t bytes);
    // Sends send_n elements to one rank while receiving recv_n from another.
    template <class X>
    void send_recv(int to, const X* send_x, size_t send_n, int from, X* recv_x, size_t recv_n) {
        group([&] {
            send(to, send_x, send_n * sizeof(X));
            recv(from, recv_x, recv_n * sizeof(X));
        });
    }
    // For host memory: all (size, bytes), part r ← rank r's part r. Returns when `all` is complete.
    void host_all_gather(void* all, size_t bytes);

    // An error that NCCL has found since, or "". Any thread may ask.
    std::string error() const;

  private:
    const Cuda& dev_;
    ncclComm* comm_ = nullptr;
    cudaStream_t stream_ = nullptr;
    cudaEvent_t ready_ = nullptr;
    cudaEvent_t done_ = nullptr;
    char* staging_ = nullptr;  // device memory through which host memory is sent

    void create_stream();
    void all_gather_bytes(void* x, size_t bytes);
};
