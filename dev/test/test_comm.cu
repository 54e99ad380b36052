// Tests the collectives over NCCL, with a forked process for each rank: values, the order of
// streams, CUDA graphs and rings. On a machine with one GPU two ranks share it. Needs NCCL.
// dev/test_program tests a rank that dies while the others' GPUs wait for it.
//
// Run: ./dev/test_comm [part of a test's name]
#include <algorithm>

#include "data/file.h"
#include "dev/common/ring_check.h"
#include "dev/test/processes.h"
#include "dev/test/program.h"
#include "parallel/comm.h"
#include "parallel/rendezvous.h"

namespace {

using Floats = Tensor<Cuda, float>;
using Body = std::function<void(const Cuda&, NcclComm&)>;

// The number of GPUs. A separate process counts them, because CUDA does not survive a fork.
int gpus() {
    static const int count = [] {
        Processes one;
        one.start([] { return std::min(Cuda::count(), 100); });
        return one.wait()[0];
    }();
    if (count == 0)
        SKIP("no GPU");
    return count;
}

// Runs a job of two ranks and, if there are four GPUs, one of four. All ranks must end well. Each
// has a GPU, or two share the only one. NCCL refuses that on one machine, so it is told that they
// are on two.
void on_gpus(const Body& body) {
    if (contains(test::error_of([] { NcclComm::version(); }), "without NCCL"))
        SKIP("built without NCCL");
    const int all = gpus();
    for (int size = 2; size <= std::clamp(all, 2, 4); size *= 2) {
        const int port = free_port();
        Processes ranks;
        for (int rank = 0; rank < size; rank++)
            ranks.start([&, rank] {
                if (all == 1)
                    setenv("NCCL_HOSTID", format("%d", rank).c_str(), 1);
                const RankInfo self{.rank = rank,
                                    .size = size,
                                    .local_rank = rank,
                                    .local_size = size,
                                    .port = port,
                                    .address = "127.0.0.1",
                                    .job = "a job"};
                const std::string id = rendezvous(self, {}, rank == 0 ? NcclComm::new_id() : "");
                const Cuda dev(rank % all);
                NcclComm comm(dev, rank, size, id);
                body(dev, comm);
                return 0;
            });
        const std::vector<int> all_succeed(size, 0);
        ranks.check(all_succeed);
    }
}

// The elements x(0), x(1), …
template <class F>
std::vector<double> elements(size_t n, F x) {
    std::vector<double> all;
    for (size_t i = 0; i < n; i++)
        all.push_back(x(i));
    return all;
}

// A rank's elements are integers, so that sums are exact in any order. They differ from step to
// step.
double value(int rank, size_t i, int step = 0) {
    return (i * 7 + (rank + step) * 13) % 101;
}
double sum_of_values(int size, size_t i, int step = 0) {
    double sum = 0;
    for (int rank = 0; rank < size; rank++)
        sum += value(rank, i, step);
    return sum;
}

// These sums round. If ranks that each update all parameters got different bits, they would drift
// apart.
void check_sums_have_the_same_bits(const Cuda& dev, NcclComm& comm, size_t n) {
    uint64_t first_bits = 0;
    for (int run = 0; run < 3; run++) {
        Floats x(dev, elements(n, [&](size_t i) { return 1.f / (3.f + value(comm.rank, i)); }));
        comm.fork();
        comm.all_reduce(x.ptr, n);
        comm.join();

        const std::vector<double> sum = x.values();
        const uint64_t bits = checksum64(sum.data(), n * sizeof(double));
        if (run == 0)
            first_bits = bits;
        CHECK(bits == first_bits);
        for (uint64_t bits_of_rank : all_gather_values(comm, bits))
            CHECK(bits_of_rank == bits);
    }
}

}  // namespace

TEST(nccl_collectives) {
    on_gpus([](const Cuda& dev, NcclComm& comm) {
        const int size = comm.size;
        const int rank = comm.rank;
        const int next = (rank + 1) % size;
        const int before = (rank + size - 1) % size;
        const auto mine = [=](size_t i) { return value(rank, i); };
        for (const size_t n : {4, 1000, 1 << 20}) {
            // ranks send different numbers of elements
            const auto count_sent_by = [=](int r) { return n / (1 + r % 2); };

            Floats reduced(dev, elements(n, mine));
            Floats parts(dev, elements(size * n, mine));
            Floats own(dev, n);
            const auto mine_or_nan = [=](size_t i) {
                return i / n == size_t(rank) ? mine(i) : NAN;
            };
            Floats all(dev, elements(size * n, mine_or_nan));
            Floats sent(dev, elements(n, mine));
            Floats got(dev, std::vector<double>(n, -1));
            Floats first(dev, elements(n, mine));
            Floats passed_on(dev, elements(n, mine));

            comm.fork();
            comm.group([&] {
                comm.all_reduce(reduced.ptr, n);
                comm.reduce_scatter(own.ptr, parts.ptr, n);
                comm.all_gather(all.ptr, n);
            });
            comm.send_recv(next, sent.ptr, count_sent_by(rank), before, got.ptr,
                           count_sent_by(before));
            comm.broadcast(first.ptr, n * sizeof(float));
            if (rank == 0)
                comm.send(1, passed_on.ptr, n * sizeof(float));
            if (rank == 1)
                comm.recv(0, passed_on.ptr, n * sizeof(float));
            comm.join();

            // A rank's part of `all` begins at element rank·n, and so do its values.
            const auto of_all = [=](size_t i) { return value(static_cast<int>(i / n), i); };
            const auto of_first = [](size_t i) { return value(0, i); };
            const auto sum = [=](size_t i) { return sum_of_values(size, i); };
            const auto own_sum = [=](size_t i) { return sum_of_values(size, rank * n + i); };
            const auto received = [=](size_t i) {
                return i < count_sent_by(before) ? value(before, i) : -1;
            };
            CHECK(first.values() == elements(n, of_first));
            CHECK(passed_on.values() == (rank == 1 ? elements(n, of_first) : elements(n, mine)));
            CHECK(reduced.values() == elements(n, sum));
            CHECK(own.values() == elements(n, own_sum));
            CHECK(all.values() == elements(size * n, of_all));
            CHECK(got.values() == elements(n, received));

            std::vector<float> host(size * n, -1);
            for (size_t i = 0; i < n; i++)
                host[rank * n + i] = static_cast<float>(mine(i));
            comm.host_all_gather(host.data(), n * sizeof(float));
            for (size_t i = 0; i < host.size(); i++)
                CHECK(host[i] == value(static_cast<int>(i / n), i % n));

            check_sums_have_the_same_bits(dev, comm, n);
        }
    });
}

// The order of streams: sums are of what the device wrote before fork(), and the device reads them
// after join(). The same holds in a CUDA graph that is replayed, with calls outside the graph in
// between.
TEST(nccl_in_a_graph) {
    on_gpus([](const Cuda& dev, NcclComm& comm) {
        const size_t n = 1 << 20;
        const size_t bytes = n * sizeof(float);
        Floats from(dev, n);
        Floats x(dev, n);
        Floats y(dev, n);
        CudaGraph graph;
        for (int step = 0; step < 5; step++) {
            const Floats values(dev,
                                elements(n, [&](size_t i) { return value(comm.rank, i, step); }));
            dev.copy(from.ptr, values.ptr, bytes);
            dev.sync();
            graph.run(dev, [&] {
                dev.copy(x.ptr, from.ptr, bytes);
                for (int bucket = 0; bucket < 4; bucket++) {
                    comm.fork();
                    comm.all_reduce(x.ptr + bucket * n / 4, n / 4);
                }
                comm.join();
                dev.copy(y.ptr, x.ptr, bytes);
            });
            comm.fork();
            comm.all_reduce(x.ptr, n);
            comm.join();

            const auto sum = [&](size_t i) { return sum_of_values(comm.size, i, step); };
            CHECK(y.values() == elements(n, sum));
            CHECK(x.values() == elements(n, [&](size_t i) { return comm.size * sum(i); }));
        }
    });
}

// All ranks in a ring, and pairs of ranks in rings of their own at the same time.
TEST(nccl_ring) {
    on_gpus([](const Cuda& dev, NcclComm& comm) {
        NcclComm pair(comm, (comm.rank / 2) * 2, 2);
        for (NcclComm* ring : {&comm, &pair}) {
            const int T = 2 * ring->size * 100;
            const AttentionShape s = scaled(0.2f, whole(2, T, 2, 64));
            check_ring<float>(dev, *ring, s);
            check_ring<bf16>(dev, *ring, s);
            check_ring<bf16>(dev, *ring, whole(1, T, 1, 128), {.q_sigma = 3});
        }
    });
}

TEST_MAIN
