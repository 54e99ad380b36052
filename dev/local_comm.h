// Ranks of a ring as threads that share one GPU: the ring itself, at any N, where there is no second GPU. All work goes
// to one stream, so that what is enqueued before a barrier comes before what is enqueued after it.
#pragma once
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "dev/reference_comm.h"
#include "layers/cuda.h"

class LocalComm : public CallsInOrder {
  public:
    struct Shared {
        explicit Shared(int size) : sent(size) {}
        std::vector<const void*> sent;
        std::mutex mutex;
        std::condition_variable all_here;
        int here = 0;
        uint64_t round = 0;
        void barrier() {
            std::unique_lock<std::mutex> lock(mutex);
            const uint64_t mine = round;
            if (++here == static_cast<int>(sent.size())) {
                here = 0, round++;
                all_here.notify_all();
            } else {
                all_here.wait(lock, [&] { return round != mine; });
            }
        }
    };
    LocalComm(const Cuda& dev, Shared& shared, int rank)
        : rank(rank), size(static_cast<int>(shared.sent.size())), dev_(dev), shared_(shared) {}
    const int rank, size;

    template <class X>
    void send_recv(int, const X* send, size_t, int from, X* recv, size_t m) {
        shared_.sent[rank] = send;
        shared_.barrier();  // everyone's work on what it sends is enqueued
        CUDA_CHECK(cudaMemcpyAsync(recv, shared_.sent[from], m * sizeof(X), cudaMemcpyDeviceToDevice, dev_.stream));
        shared_.barrier();  // and here the copies are
    }
    template <class X>
    void send_recv_rows(int to, X* packed, const X* send, size_t stride, size_t n, size_t rows, int from, X* recv) {
        CUDA_CHECK(cudaMemcpy2DAsync(packed, n * sizeof(X), send, stride * sizeof(X), n * sizeof(X), rows,
                                     cudaMemcpyDeviceToDevice, dev_.stream));
        send_recv(to, packed, rows * n, from, recv, rows * n);
    }

  private:
    const Cuda& dev_;
    Shared& shared_;
};

// Calls body(comm) as each of `ranks` ranks.
template <class Body>
void on_local_ranks(const Cuda& dev, int ranks, Body body) {
    LocalComm::Shared shared(ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; rank++)
        threads.emplace_back([&, rank] {
            try {
                CUDA_CHECK(cudaSetDevice(dev.device));
                LocalComm comm(dev, shared, rank);
                body(comm);
            } catch (const std::exception& e) {  // the others would wait for ever
                std::fprintf(stderr, "error: rank %d: %s\n", rank, e.what());
                std::_Exit(1);
            }
        });
    for (std::thread& thread : threads) thread.join();
}
