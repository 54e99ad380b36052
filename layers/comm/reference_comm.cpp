// The collectives on the CPU, built from the job's exchange of bytes and plain sums.
#include "layers/comm/reference_comm.h"

#include <algorithm>
#include <vector>

// Every rank sends part r of its x to rank r. Then it adds up the copies of its own part in the order of ranks.
template <class A>
void CpuComm::reduce_scatter(A* out, const A* x, size_t n) {
    std::vector<A> parts(size * n);
    std::vector<Transfer> transfers;
    for (int r = 0; r < size; r++)
        transfers.push_back({first_ + r, x + r * n, n * sizeof(A), parts.data() + r * n, n * sizeof(A)});
    job_.exchange(transfers);
    std::copy_n(x + rank * n, n, parts.data() + rank * n);
    std::copy_n(parts.data(), n, out);
    for (int r = 1; r < size; r++)
        for (size_t i = 0; i < n; i++) out[i] += parts[r * n + i];
}

// All parts have the same length, rounded up, so the end of x may not fill the last one.
template <class A>
void CpuComm::all_reduce(A* x, size_t n) {
    const size_t part = (n + size - 1) / size;
    std::vector<A> padded(part * size), sum(part);
    std::copy_n(x, n, padded.data());
    reduce_scatter(sum.data(), padded.data(), part);
    std::copy_n(sum.data(), part, padded.data() + rank * part);
    all_gather(padded.data(), part);
    std::copy_n(padded.data(), n, x);
}

void CpuComm::all_gather_bytes(char* x, size_t bytes) {
    std::vector<Transfer> transfers;
    for (int r = 0; r < size; r++) transfers.push_back({first_ + r, x + rank * bytes, bytes, x + r * bytes, bytes});
    job_.exchange(transfers);
}

void CpuComm::send_recv_bytes(int to, const void* send, size_t bytes_out, int from, void* recv, size_t bytes_in) {
    if (to == rank)
        std::copy_n(static_cast<const char*>(send), bytes_out, static_cast<char*>(recv));
    else if (to == from)
        job_.exchange({{first_ + to, send, bytes_out, recv, bytes_in}});
    else
        job_.exchange({{first_ + to, send, bytes_out, nullptr, 0}, {first_ + from, nullptr, 0, recv, bytes_in}});
}

template void CpuComm::all_reduce(float*, size_t);
template void CpuComm::all_reduce(double*, size_t);
template void CpuComm::reduce_scatter(float*, const float*, size_t);
template void CpuComm::reduce_scatter(double*, const double*, size_t);
