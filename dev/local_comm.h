// Ranks as threads that share one device. This runs real split attention at any N without a second GPU. On a GPU all
// work goes to one stream, so that work enqueued before a barrier runs before work enqueued after it.
#pragma once
#include <pthread.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "attention/ring/blocks.h"
#include "layers/comm/reference_comm.h"

// The devices differ only in a thread's first call and in a copy.
inline void use_here(const Cpu&) {
    Cpu(1);  // OpenMP's number of threads is set for each calling thread
}
inline void use_here(const Cuda& dev) {
    CUDA_CHECK(cudaSetDevice(dev.device));
}
inline void copy_bytes(const Cpu&, void* to, const void* from, size_t bytes) {
    std::memcpy(to, from, bytes);
}
inline void copy_bytes(const Cuda& dev, void* to, const void* from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, dev.stream));
}

template <class Dev>
class LocalComm : public CallsInOrder {
  public:
    struct Shared {
        explicit Shared(int size) : sent(size) { pthread_barrier_init(&all_here, nullptr, size); }
        ~Shared() { pthread_barrier_destroy(&all_here); }
        Shared(const Shared&) = delete;
        struct Message {
            const void* data;
            size_t bytes;
            int to;
            ptrdiff_t lands;  // where in its memory the receiver wants it, says the sender
        };
        std::vector<Message> sent;
        pthread_barrier_t all_here;
    };
    LocalComm(const Dev& dev, Shared& shared, int rank)
        : rank(rank), size(static_cast<int>(shared.sent.size())), dev_(dev), shared_(shared) {}
    const int rank, size;

    template <class X>
    void send_recv(int to, const X* send, size_t n, int from, X* recv, size_t m, X* there = nullptr) {
        const auto lands = [&](X* at) { return reinterpret_cast<char*>(at) - static_cast<char*>(memory_); };
        shared_.sent[rank] = {send, n * sizeof(X), to, lands(there ? there : recv)};
        pthread_barrier_wait(&shared_.all_here);  // now every rank's work on what it sends is enqueued
        const auto& its = shared_.sent[from];
        if (its.to != rank || its.bytes != m * sizeof(X) || its.lands != lands(recv))
            throw Error(format("rank %d sends rank %d %zu bytes for offset %td", from, its.to, its.bytes, its.lands));
        copy_bytes(dev_, recv, its.data, its.bytes);
        pthread_barrier_wait(&shared_.all_here);  // now the copies are enqueued too
    }
    template <class X>
    void send_recv_rows(int to, X* packed, const X* send, size_t stride, size_t n, size_t rows, int from, X* recv,
                        X* there = nullptr) {
        copy_rows(dev_, packed, n, send, stride, n, rows);
        send_recv(to, packed, rows * n, from, recv, rows * n, there);
    }

  private:
    const Dev& dev_;
    Shared& shared_;
};

// Calls body(comm) as each of `ranks` ranks.
template <class Dev, class Body>
void on_local_ranks(const Dev& dev, int ranks, Body body) {
    typename LocalComm<Dev>::Shared shared(ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; rank++)
        threads.emplace_back([&, rank] {
            try {
                use_here(dev);
                LocalComm<Dev> comm(dev, shared, rank);
                body(comm);
            } catch (const std::exception& e) {  // the others would wait for ever
                std::fprintf(stderr, "error: rank %d: %s\n", rank, e.what());
                std::_Exit(1);
            }
        });
    for (std::thread& thread : threads) thread.join();
}
