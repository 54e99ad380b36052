// The collectives of the seam, CPU side. See layers/comm/comm.h for what each means. They use the job's connections, on
// the calling thread. Sums are taken in the order of ranks, so that every run and every rank has the same bits.
#pragma once
#include <algorithm>
#include <vector>

#include "layers/comm/job.h"
#include "layers/cpu/reference.h"

// Calls that do nothing when a rank's calls run one after the other.
struct CallsInOrder {
    void fork() {}
    void join() {}
    void head_start() {}
    template <class Calls>
    void group(Calls calls) {
        calls();
    }
};

class CpuComm : public CallsInOrder {
  public:
    explicit CpuComm(Job& job) : rank(job.rank), size(job.size), job_(job) {}
    CpuComm(const Cpu&, Job& job) : CpuComm(job) {}
    // A group of `count` of the ranks in `all`, from `first` on.
    CpuComm(CpuComm& all, int first, int count)
        : rank(all.rank - first), size(count), job_(all.job_), first_(all.first_ + first) {}
    const int rank, size;

    // All parts have the same length, rounded up, so the end of x may not fill the last one.
    template <class A>
    void all_reduce(A* x, size_t n) {
        const size_t part = (n + size - 1) / size;
        std::vector<A> padded(part * size);
        std::copy_n(x, n, padded.data());
        reduce_scatter(padded.data() + rank * part, padded.data(), part);
        all_gather(padded.data(), part);
        std::copy_n(padded.data(), n, x);
    }
    // Every rank sends part r of its x to rank r. Then it adds up the copies of its own part in the order of ranks.
    template <class A>
    void reduce_scatter(A* out, const A* x, size_t n) {
        std::vector<A> parts(size * n);
        std::copy_n(x + rank * n, n, parts.data() + rank * n);
        std::vector<Transfer> transfers;
        for (int r = 0; r < size; r++) {
            transfers.push_back(Transfer::to(first_ + r, x + r * n, n * sizeof(A)));
            transfers.push_back(Transfer::from(first_ + r, parts.data() + r * n, n * sizeof(A)));
        }
        job_.exchange(transfers);
        std::copy_n(parts.data(), n, out);
        for (int r = 1; r < size; r++)
            for (size_t i = 0; i < n; i++) out[i] += parts[r * n + i];
    }
    template <class X>
    void all_gather(X* x, size_t n) {
        job_.gather_bytes(x, n * sizeof(X), first_, size);
    }
    template <class X>
    void send_recv(int to, const X* send, size_t n, int from, X* recv, size_t m) {
        if (to == rank) std::copy_n(send, n, recv);
        job_.exchange(
            {Transfer::to(first_ + to, send, n * sizeof(X)), Transfer::from(first_ + from, recv, m * sizeof(X))});
    }

  private:
    Job& job_;
    const int first_ = 0;  // our rank 0's number in the job
};
