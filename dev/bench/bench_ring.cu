// The ring's speed: N GPUs against our own kernel on one, at the same total length. bf16, causal,
// B = 1.
//
//   single        the time of one GPU's kernel for all tokens, divided by N. A ring without any
//                 overhead would take this long
//   ring          the slowest rank's time. For the cool figure each timed run begins with a
//                 collective, so that all ranks start together. The collective's own time is
//                 measured and subtracted
//   compute only  the same calls without communication. Compared with single it shows the cost of
//                 cutting the sequence, and compared with ring the transfers that compute does not
//                 hide
//   hop           every rank sends its keys and values to the next rank, and nothing else happens
//
// A shorter ring is validated first, by the bounds of dev/common/ring_check.h. dev/common/bench.h
// explains the protocols.
//
// Run: ./dev/bench_ring --help
#include "dev/common/bench.h"
#include "dev/common/ring_check.h"
#include "parallel/comm.h"
#include "parallel/rendezvous.h"

struct Options : Output {
    int gpus = 0;
    int tokens = 16384;
    int heads = 12;
    std::string hs = "64";
};

// Random numbers, because zeros draw less power.
static DeviceMemory random_memory(const Cuda& dev, size_t bytes) {
    DeviceMemory memory = device_memory(dev, bytes);
    fill_normal(dev, static_cast<bf16*>(memory.get()), bytes / sizeof(bf16), 1);
    return memory;
}

enum { kForward, kBoth, kPasses };  // forward alone, forward and backward
using Passes = std::array<Figures, kPasses>;

struct Bench {
    const Options& options;
    const Cuda& dev;
    NcclComm& comm;
    const int N = comm.size;
    const int tokens = options.tokens;
    const int NH = options.heads;
    const int HS = std::atoi(options.hs.c_str());
    // for the collective that lets all ranks start together
    const DeviceMemory flag = random_memory(dev, 16);

    double slowest(double ms) const {
        std::vector<double> all(comm.size, ms);
        comm.host_all_gather(all.data(), sizeof ms);
        return *std::max_element(all.begin(), all.end());
    }
    // Without rests between the runs, because ranks would not rest equally long.
    template <class Work>
    double cool_together(Work work) const {
        const double max_rest = 0;
        const auto launch = [&](int) {
            comm.fork();
            comm.all_reduce(static_cast<float*>(flag.get()), 1);
            comm.join();
            work();
        };
        return slowest(cool_ms(dev, launch, max_rest));
    }

    template <class Work>
    Figures measure(Work work) const {
        const double start = cool_together([] {});  // the collective's own time
        Figures ms;
        ms.cool = cool_together(work) - start;
        ms.sustained = slowest(sustained_ms(dev, ms.cool, [&](int) { work(); }));
        return ms;
    }

    // `way` is the unchunked call or a ring.
    template <class Way>
    Passes time(Way& way, int T) const {
        const size_t n = size_t(T) * NH * HS;
        // 8·n elements, and n that are more than enough for lse and its rest in fp32
        const DeviceMemory memory = random_memory(dev, 9 * n * sizeof(bf16));
        bf16* const qkv = static_cast<bf16*>(memory.get());
        bf16* const dout = qkv + 3 * n;
        bf16* const out = dout + n;
        bf16* const dqkv = out + n;
        float* const lse = reinterpret_cast<float*>(dqkv + 3 * n);
        const auto forward = [&] { way.forward(out, lse, qkv); };
        const auto both = [&] {
            forward();
            way.backward(dqkv, dout, out, lse, qkv);
        };
        return {measure(forward), measure(both)};
    }

    template <class Through>
    Passes time_ring(Through& through) const {
        const AttentionShape own = {.B = 1, .Tq = tokens, .Tk = tokens, .NH = NH, .HS = HS};
        Ring<Cuda, bf16, Through> ring(dev, {.rank = comm.rank, .ranks = N}, own);
        const DeviceMemory memory = random_memory(dev, ring.bytes());
        ring.start(memory.get(), &through);
        return time(ring, tokens);
    }

    Figures time_hop() const {
        const size_t n = size_t(tokens) * 2 * NH * HS;  // of keys and values
        const DeviceMemory memory = random_memory(dev, 2 * n * sizeof(bf16));
        bf16* const sent = static_cast<bf16*>(memory.get());
        bf16* const received = sent + n;
        const int next = (comm.rank + 1) % N;
        const int previous = (comm.rank + N - 1) % N;
        return measure([&] {
            comm.fork();
            comm.send_recv(next, sent, n, previous, received, n);
            comm.join();
        });
    }
};

static void run_bench(const Bench& b) {
    const int T = 2 * b.N * 150;
    check_ring<bf16>(b.dev, b.comm, whole(1, T, 2, b.HS));
    if (test::failed_checks())
        throw Error(format("rank %d: the results of ring attention are wrong, so it is not timed",
                           b.comm.rank));

    Cpu::Comm none;  // sends nothing
    const int all = b.N * b.tokens;
    const Unchunked<bf16, Cuda> unchunked{b.dev, whole(1, all, b.NH, b.HS)};
    const Passes single = b.time(unchunked, all);
    const Passes ring = b.time_ring(b.comm);
    const Passes compute_only = b.time_ring(none);
    const Figures hop = b.time_hop();
    if (b.comm.rank > 0)
        return;

    Log log = results_log(b.dev, "ring_speed", b.options);
    std::printf(
        "%s, %d GPUs, %d tokens each, NH %d, HS %d, bf16: ms cool/sustained (share of one GPU's "
        "rate), hop %.3f/%.3f\n",
        b.dev.name.c_str(), b.N, b.tokens, b.NH, b.HS, hop.cool, hop.sustained);
    for (int pass : {kForward, kBoth}) {
        const char* name = pass == kBoth ? "forward+backward" : "forward";
        const Figures one{single[pass].cool / b.N, single[pass].sustained / b.N};
        Row row = result_row(b.dev, "ring_speed");
        row.add("pass", name);
        row.add("gpus", b.N);
        row.add("tokens_per_gpu", b.tokens);
        row.add("NH", b.NH);
        row.add("HS", b.HS);

        std::printf("  %-16s", name);
        // prints a figure, and adds the fields of the row that begin with `prefix`
        const auto show = [&](const char* what, const std::string& prefix, const Figures& ms) {
            std::printf("  %s %.3f/%.3f (%.1f/%.1f %%)", what, ms.cool, ms.sustained,
                        100 * one.cool / ms.cool, 100 * one.sustained / ms.sustained);
            row.add((prefix + "ms").c_str(), ms.cool);
            row.add((prefix + "ms_sustained").c_str(), ms.sustained);
        };
        show("single", "single_", one);
        show("ring", "", ring[pass]);
        show("compute only", "still_", compute_only[pass]);  // "still", because nothing is sent
        row.add("hop_ms", hop.cool).add("hop_ms_sustained", hop.sustained);
        std::printf("\n");
        log.write(row);
    }
}

int main(int argc, char** argv) {
    Options o;
    const std::vector<Option> table = {
        {"--gpus", "", Option::Int, &o.gpus,
         "start one rank on each of N GPUs of this machine; 0: a launcher has started the ranks",
         "0..64"},
        {"--tokens", "", Option::Int, &o.tokens, "tokens per GPU", "256..1048576"},
        {"--heads", "", Option::Int, &o.heads, "number of heads NH", "1..1024"},
        {"--hs", "", Option::Choice, &o.hs, "head size HS", "64|128"},
    };
    return bench_main(
        argc, argv, "bench_ring",
        "Times ring attention, in which each GPU has a part of every sequence "
        "(--context-parallel).",
        "ring_speed.jsonl", o, table, [&] {
            const RankInfo self = rank_from_environment();
            if (o.gpus > 1 && self.size == 1)
                return launch_ranks(o.gpus, argv);
            if (self.size < 2)
                throw UsageError("a ring needs at least two ranks; give --gpus, or use a launcher");
            const std::string id = rendezvous(self, {}, self.rank == 0 ? NcclComm::new_id() : "");
            Cuda dev(self.local_rank);
            NcclComm comm(dev, self.rank, self.size, id);
            run_bench({o, dev, comm});
            return 0;
        });
}
