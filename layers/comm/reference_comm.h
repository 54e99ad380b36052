// The collectives of the seam, CPU side. See layers/comm/comm.h for what each means. They use the job's connections, on
// the calling thread. Sums are taken in the order of ranks, so that every run and every rank has the same bits.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "layers/comm/job.h"
#include "layers/cpu/reference.h"

// Calls that do nothing when a rank's calls run one after the other. Sharing does nothing here either. But GPUs map
// each other's memory, which must not be freed before the sharing ends. So a rank that never ends it aborts here too.
class CallsInOrder {
  public:
    CallsInOrder() = default;
    CallsInOrder(const CallsInOrder&) = delete;
    ~CallsInOrder() {
        if (!shared_ || std::uncaught_exceptions() > 0) return;
        std::fprintf(stderr, "a rank ends while it shares memory with the others\n");
        std::abort();
    }
    void fork() {}
    void join() {}
    void head_start() {}
    void share(void* memory, size_t) { shared_ = memory; }
    template <class Calls>
    void group(Calls calls) {
        calls();
    }

  private:
    void* shared_ = nullptr;
};

class CpuComm : public CallsInOrder {
  public:
    CpuComm(const Cpu&, Job& job) : rank(job.rank), size(job.size), job_(job) {}
    // A group of `count` of the ranks in `all`, from `first` on.
    CpuComm(CpuComm& all, int first, int count)
        : rank(all.rank - first), size(count), job_(all.job_), first_(all.first_ + first) {}
    const int rank, size;

    void share(void* memory, size_t bytes) {  // as on GPUs, all ranks of the job must call it together
        job_.barrier();
        CallsInOrder::share(memory, bytes);
    }
    template <class A>
    void all_reduce(A* x, size_t n);
    template <class A>
    void reduce_scatter(A* out, const A* x, size_t n);
    template <class X>
    void all_gather(X* x, size_t n) {
        all_gather_bytes(reinterpret_cast<char*>(x), n * sizeof(X));
    }
    template <class X>
    void send_recv(int to, const X* send, size_t n, int from, X* recv, size_t m) {
        send_recv_bytes(to, send, n * sizeof(X), from, recv, m * sizeof(X));
    }
    template <class X>
    void send_recv_rows(int to, X* packed, const X* send, size_t stride, size_t n, size_t rows, int from, X* recv) {
        for (size_t r = 0; r < rows; r++) std::copy_n(send + r * stride, n, packed + r * n);
        send_recv(to, packed, rows * n, from, recv, rows * n);
    }

  private:
    Job& job_;
    const int first_ = 0;  // our rank 0's number in the job
    void all_gather_bytes(char* x, size_t bytes);
    void send_recv_bytes(int to, const void* send, size_t bytes_out, int from, void* recv, size_t bytes_in);
};
