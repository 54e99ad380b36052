// Tests the collectives over NCCL, with a forked process for each GPU. It tests values, streams, CUDA graphs, and a
// rank that dies while the others' GPUs wait for it. Needs two GPUs and NCCL. (dev/test_job.cpp has the CPU's.)
//
// Run: ./dev/test_comm [part of a test's name]
#include <algorithm>

#include "attention/ring/blocks.h"
#include "dev/local_comm.h"
#include "dev/ranks.h"
#include "dev/ring_check.h"
#include "layers/comm/comm.h"
#include "run/checkpoint.h"

namespace {

// A separate process asks, because CUDA does not survive a fork.
int gpus() {
    static const int count = [] {
        Processes one;
        one.start([] { return std::min(Cuda::count(), 100); });
        return one.wait()[0];
    }();
    if (count < 2) SKIP("%d GPUs", count);
    return std::min(count, 4);
}

// Two to four ranks, each with one GPU.
template <class F>
void on_gpus(F body) {
    const int most = gpus();
    for (int size = 2; size <= most; size *= 2) {
        ForkedRanks ranks(size,
                    [=](Job& job) {
                        Cuda dev(job.rank);
                        NcclComm comm(dev, job);
                        body(dev, comm, job);
                        job.leave();
                        return 0;
                    },
                    {60, 20});
        const std::vector<int> codes = ranks.wait(100);
        if (contains(ranks.text(), "without NCCL")) SKIP("built without NCCL");
        for (int code : codes)
            if (code != 0) test::report(__FILE__, __LINE__, format("%d: %s", code, ranks.text().c_str()));
    }
}

// The values are integers, so that sums are exact in any order.
float value(int rank, size_t i) {
    return static_cast<float>((i * 7 + rank * 13) % 101);
}
float sum_of_values(int size, size_t i) {
    float sum = 0;
    for (int r = 0; r < size; r++) sum += value(r, i);
    return sum;
}

// Device memory that holds x(i).
struct Floats {
    const Cuda& dev;
    size_t n;
    float* ptr;
    template <class F>
    Floats(const Cuda& dev, size_t n, F x) : dev(dev), n(n), ptr(static_cast<float*>(dev.alloc(n * sizeof(float)))) {
        set(x);
    }
    ~Floats() { dev.free(ptr); }
    Floats(const Floats&) = delete;
    template <class F>
    void set(F x) {
        std::vector<float> host(n);
        for (size_t i = 0; i < n; i++) host[i] = x(i);
        dev.upload(ptr, host.data(), n * sizeof(float));
        dev.sync();
    }
    template <class F>
    bool equal(F x) const {
        std::vector<float> host(n);
        dev.download(host.data(), ptr, n * sizeof(float));
        for (size_t i = 0; i < n; i++)
            if (!(host[i] == x(i))) return false;
        return true;
    }
};

}  // namespace

TEST(nccl_collectives) {
    on_gpus([](const Cuda& dev, NcclComm& comm, Job&) {
        const int size = comm.size, rank = comm.rank;
        for (const size_t n : {4, 1000, 1 << 20}) {
            Floats reduced(dev, n, [=](size_t i) { return value(rank, i); });
            Floats parts(dev, size * n, [=](size_t i) { return value(rank, i); }),
                own(dev, n, [](size_t) { return NAN; });
            Floats all(dev, size * n, [=](size_t i) { return i / n == size_t(rank) ? value(rank, i) : NAN; });
            Floats sent(dev, n, [=](size_t i) { return value(rank, i); }), got(dev, n, [](size_t) { return -1; });
            comm.fork();
            comm.group([&] {
                comm.all_reduce(reduced.ptr, n);
                comm.reduce_scatter(own.ptr, parts.ptr, n);
                comm.all_gather(all.ptr, n);
            });
            const int before = (rank + size - 1) % size;
            const auto sent_by = [=](int r) { return n / (1 + r % 2); };
            comm.send_recv((rank + 1) % size, sent.ptr, sent_by(rank), before, got.ptr, sent_by(before));
            comm.join();
            Floats packed(dev, n / 2, [](size_t) { return NAN; }), rows(dev, n / 2, [](size_t) { return NAN; });
            comm.fork();
            comm.send_recv_rows((rank + 1) % size, packed.ptr, sent.ptr, 4, 2, n / 4, before, rows.ptr);
            comm.join();
            CHECK(rows.equal([=](size_t i) { return value(before, i / 2 * 4 + i % 2); }));
            CHECK(reduced.equal([=](size_t i) { return sum_of_values(size, i); }));
            CHECK(own.equal([=](size_t i) { return sum_of_values(size, rank * n + i); }));
            CHECK(all.equal([=](size_t i) { return value(static_cast<int>(i / n), i); }));
            CHECK(got.equal([=](size_t i) { return i < sent_by(before) ? value(before, i) : -1; }));
        }
    });
}

// The sums of these values round. If ranks that each update all parameters got different bits, they would drift apart.
TEST(nccl_sums_have_the_same_bits) {
    on_gpus([](const Cuda& dev, NcclComm& comm, Job& job) {
        const auto fraction = [rank = comm.rank](size_t i) { return 1.f / (3.f + value(rank, i)); };
        for (const size_t n : {4, 1000, 1 << 20}) {
            Floats x(dev, n, fraction);
            std::vector<float> host(n);
            uint64_t first = 0;
            for (int again = 0; again < 3; again++) {
                x.set(fraction);
                comm.fork();
                comm.all_reduce(x.ptr, n);
                comm.join();
                dev.download(host.data(), x.ptr, n * sizeof(float));
                const uint64_t bits = checksum64(host.data(), n * sizeof(float));
                if (again == 0) first = bits;
                CHECK(bits == first);
                for (uint64_t of_rank : job.all_gather(bits)) CHECK(of_rank == bits);
            }
        }
    });
}

// The order of streams. The sums are of what the device wrote before fork(), and it reads them after join(). The same
// happens in a CUDA graph, replayed, with calls outside the graph in between.
TEST(nccl_in_a_graph) {
    on_gpus([](const Cuda& dev, NcclComm& comm, Job&) {
        const size_t n = 1 << 20;
        const int size = comm.size, rank = comm.rank;
        Floats from(dev, n, [](size_t) { return 0.f; }), x(dev, n, [](size_t) { return NAN; });
        Floats y(dev, n, [](size_t) { return NAN; });
        CudaGraph graph;
        for (int step = 0; step < 5; step++) {
            from.set([=](size_t i) { return value(rank + step, i); });
            graph.run(dev, [&] {
                CUDA_CHECK(cudaMemcpyAsync(x.ptr, from.ptr, n * sizeof(float), cudaMemcpyDeviceToDevice, dev.stream));
                for (int bucket = 0; bucket < 4; bucket++) {
                    comm.fork();
                    comm.all_reduce(x.ptr + bucket * n / 4, n / 4);
                }
                comm.join();
                CUDA_CHECK(cudaMemcpyAsync(y.ptr, x.ptr, n * sizeof(float), cudaMemcpyDeviceToDevice, dev.stream));
            });
            comm.fork();
            comm.all_reduce(x.ptr, n);
            comm.join();
            const auto sum = [=](size_t i) {
                float total = 0;
                for (int r = 0; r < size; r++) total += value(r + step, i);
                return total;
            };
            CHECK(y.equal(sum));
            CHECK(x.equal([=](size_t i) { return size * sum(i); }));
        }
    });
}

// The ring on a machine with one GPU. Its ranks are threads.
template <class F>
void on_one_gpu(F check) {
    Processes one;
    one.start([&] {
        if (Cuda::count() == 0) return 77;
        check(Cuda());
        return 0;
    });
    const int code = one.wait(100)[0];
    if (code == 77) SKIP("no GPU");
    if (code != 0) test::report(__FILE__, __LINE__, format("%d: %s", code, one.text().c_str()));
}
TEST(ring_of_threads) {
    on_one_gpu([](const Cuda& dev) {
        for (const AttentionShape& s : {AttentionShape{2, 48 * 17, 2, 64, true, 0.2f}, {2, 48 * 22, 2, 128}})
            for (double q_sigma : {1., 3.}) {
                check_local_rings<float>(dev, s, q_sigma, 0);
                check_local_rings<bf16>(dev, s, q_sigma, 0);
            }
    });
}
TEST(ring_errors_do_not_grow_on_a_gpu) {
    on_one_gpu([](const Cuda& dev) {
        check_flat<float>(dev, {1, 2048, 4, 64}, 0);
        check_flat<bf16>(dev, {1, 2048, 4, 64}, 0);
    });
}

// Goes through NCCL, as between machines, whether or not the GPUs reach each other's memory.
struct ByNccl : NcclComm {
    using NcclComm::NcclComm;
    void share(void*, size_t) {}
};
template <class Comm>
void check_rings(const Cuda& dev, Comm& comm, Job& job) {
    const AttentionShape s{2, 2 * comm.size * 100, 2, 64, true, 0.2f};
    check_ring<float>(dev, comm, job, s);
    check_ring<bf16>(dev, comm, job, s);
    check_ring<bf16>(dev, comm, job, {1, 2 * comm.size * 128, 1, 128}, 3);
}
// Checks every flash kernel that this GPU would choose against the whole sequence in fp64, with copy engines and with
// NCCL, and two rings of two ranks side by side.
TEST(nccl_ring_attention) {
    on_gpus([](const Cuda& dev, NcclComm& comm, Job& job) {
        check_rings(dev, comm, job);
        ByNccl by_nccl(comm, 0, comm.size);
        check_rings(dev, by_nccl, job);
        NcclComm pair(comm, comm.rank / 2 * 2, 2);
        check_rings(dev, pair, job);
    });
}

TEST(nccl_death_of_a_rank) {
    gpus();
    ForkedRanks ranks(2,
                [](Job& job) {
                    Cuda dev(job.rank);
                    NcclComm comm(dev, job);
                    Floats x(dev, 1 << 20, [](size_t) { return 1.f; });
                    if (job.rank == 1) raise(SIGKILL);
                    comm.fork();
                    comm.all_reduce(x.ptr, x.n);
                    comm.join();
                    dev.sync();  // for ever
                    return 0;
                },
                {60, 20});
    const std::vector<int> codes = ranks.wait(60);
    if (contains(ranks.text(), "without NCCL")) SKIP("built without NCCL");
    CHECK((codes == std::vector<int>{1, 137}));
    CHECK(contains(ranks.text(), "rank 1 (pid "));
}

TEST_MAIN
