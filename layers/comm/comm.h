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
//   send_recv(to, send, n, from, recv, m, there)
//                                sends n elements to one rank and receives m from one, for split attention. `there` is
//                                where this rank has what the other one calls recv, and recv itself if left out
//   send_recv_rows(to, packed, send, stride, n, rows, from, recv, there)
//                                sends rows of n elements, `stride` apart, to one rank, which gets them without gaps,
//                                and receives as many from one. With NCCL the device first closes the gaps in `packed`
//                                (rows·n), and the call forks anew
//   share(memory, bytes)         lets the GPUs' copy engines do a send_recv within `memory` and a send_recv_rows into
//                                it, if the GPUs reach each other (peer_copy.h). All ranks have memory of the same size
//                                with the same layout. Null ends it, and when it returns the memory may be freed
//
// Sums have the same bits on all ranks, and on every run with the same machine and number of ranks. NCCL does this, but
// its manual does not promise it, so dev/test_comm checks.
#pragma once
#include "layers/comm/job.h"
#include "layers/comm/peer_copy.h"

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
    void share(void* memory, size_t bytes);
    void group(const std::function<void()>& calls);

    void all_reduce(float* x, size_t n);
    void reduce_scatter(float* out, const float* x, size_t n);
    template <class X>
    void all_gather(X* x, size_t n) {
        all_gather_bytes(reinterpret_cast<char*>(x), n * sizeof(X));
    }
    template <class X>
    void send_recv(int to, const X* send, size_t n, int from, X* recv, size_t m, X* there = nullptr) {
        send_recv_bytes(to, send, n * sizeof(X), from, recv, m * sizeof(X), there ? there : recv);
    }
    template <class X>
    void send_recv_rows(int to, X* packed, const X* send, size_t stride, size_t n, size_t rows, int from, X* recv,
                        X* there = nullptr) {
        send_recv_rows_bytes(to, packed, send, stride * sizeof(X), n * sizeof(X), rows, from, recv,
                             there ? there : recv);
    }

  private:
    const Cuda& dev_;
    Job& job_;
    ncclComm* comm_ = nullptr;
    cudaStream_t stream_ = nullptr;
    cudaEvent_t ready_ = nullptr, done_ = nullptr;
    const int first_ = 0;  // rank 0's number in the job
    std::unique_ptr<PeerCopies> copies_;

    void begin();
    std::string asynchronous_error() const;
    void all_gather_bytes(char* x, size_t bytes);
    void send_recv_bytes(int to, const void* send, size_t bytes_out, int from, void* recv, size_t bytes_in,
                         void* there);
    void send_recv_rows_bytes(int to, void* packed, const void* send, size_t stride, size_t bytes, size_t rows,
                              int from, void* recv, void* there);
};
