// Split attention's speed: N GPUs against our own kernel on one, at the same total length. bf16, causal, B = 1.
//
//   single     the time of one GPU's kernel for all tokens, divided by N. Without any cost a split would take this long
//   split      the slowest rank's time, from a start that all ranks reach together (a collective before the clock), by
//              an exchange of heads or by the ring
//   no travel  compute only: the same calls without communication. Against single it shows the cost of cutting, and
//              against split the transfers that compute does not hide
//   hop        the largest transfer of the ring's steps, alone: K and V (forward), and also dK and dV in fp32 (backward)
//
// One process a GPU, as in the trainer. Each rank's chunks are validated first, at 2048 tokens a GPU. They are compared
// with the unchunked kernel of one GPU, relative to the largest value. dev/bench.h has the protocols.
//
// Run: ./dev/bench_ring --help
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "dev/ring_part.h"
#include "layers/comm/comm.h"
#include "layers/comm/job.h"
#include "layers/comm/reference_comm.h"

struct Options : Output {
    int gpus = 0, tokens = 16384, heads = 12;
    std::string hs = "64", form = "heads";
    bool quick = false, blocks = false, nccl = false;
};

// Sends through NCCL even between GPUs that could share memory, as between machines.
struct ByNccl : NcclComm {
    using NcclComm::NcclComm;
    void share(void*, size_t) {}
};

// Stands in for a communicator and sends nothing.
struct NoComm : CallsInOrder {
    const int rank, size;
    NoComm(int rank, int size) : rank(rank), size(size) {}
    template <class X>
    void send_recv(int, const X*, size_t, int, X*, size_t, X* = nullptr) {}
    template <class X>
    void send_recv_rows(int, X*, const X*, size_t, size_t, size_t, int, X*, X* = nullptr) {}
};

template <class Comm>
struct Bench {
    const Options& options;
    const Cuda& dev;
    Job& job;
    Comm& comm;
    const int NH = options.heads, HS = std::atoi(options.hs.c_str());
    const size_t flag_bytes = size_t(job.size) * sizeof(float);
    const DeviceMemory flag = device_memory(dev, flag_bytes);  // of the collective that lets all ranks start together

    Bench(const Options& o, const Cuda& dev, Job& job, Comm& comm) : options(o), dev(dev), job(job), comm(comm) {
        dev.zero(flag.get(), flag_bytes);
    }
    void start_together() const {
        comm.fork();
        comm.all_gather(as<float>(flag), 1);
        comm.join();
    }
    double slowest(double ms) const {
        const std::vector<double> all = job.all_gather(ms);
        return *std::max_element(all.begin(), all.end());
    }
    template <class Launch>
    Figures measure(Launch launch) const {
        // The collective's own time is measured alone and subtracted. Ranks would not rest equally long, so they do
        // not.
        const auto together = [&](auto work) {
            return slowest(cool_ms(
                dev, [&](int) { start_together(), work(); }, 0.));
        };
        const double idle = together([] {});
        Figures ms;
        ms.cool = together(launch) - idle;
        if (!options.quick) ms.sustained = slowest(sustained_ms(dev, ms.cool, [&](int) { launch(); }));
        return ms;
    }
    // Calls use(split) with a rank's part in it, of chunks of Tc tokens. Its memory is random, because zeros draw less
    // power.
    template <class Through, class Use>
    void with_split(Through& through, int Tc, Use use) const {
        const auto with = [&](auto&& split) {
            const DeviceMemory memory = device_memory(dev, split.bytes());
            fill_normal(dev, as<bf16>(memory), split.bytes() / sizeof(bf16), 2);
            dev.sync();  // others write into it from here on
            split.start(memory.get(), &through);
            use(split);
            split.stop();
        };
        if (options.form == "ring")
            with(Ring<Cuda, bf16, Through>(dev, job.rank, job.size, 1, Tc, NH, HS));
        else
            with(HeadExchange<Cuda, bf16, Through>(dev, job.rank, job.size, 1, Tc, NH, HS));
    }
};

template <class Comm>
void validate(const Bench<Comm>& b) {
    const int N = b.job.size, Tc = 1024;
    const Zigzag zigzag{N};
    const Sequence<bf16> whole(b.dev, 2 * N * Tc, b.NH, b.HS, 1), part(whole, zigzag, b.job.rank);
    whole.forward();
    whole.backward();
    b.with_split(b.comm, Tc, [&](auto& split) {
        part.forward(split);
        part.backward(split);
    });
    const auto check = [&](const char* name, const bf16* got, const bf16* want, size_t n) {  // n elements a chunk
        std::vector<bf16> x(n), y(n);
        for (int half = 0; half < 2; half++) {
            b.dev.download(x.data(), got + half * n, n * sizeof(bf16));
            b.dev.download(y.data(), want + zigzag.chunk(b.job.rank, half) * n, n * sizeof(bf16));
            double worst = 0, largest = 0;
            for (size_t i = 0; i < n; i++) {
                keep_worst(worst, std::fabs(double(float(x[i])) - float(y[i])));
                largest = std::max(largest, std::fabs(double(float(y[i]))));
            }
            if (!(worst <= 0x1p-7 * largest))
                throw Error(
                    format("rank %d, half %d: %s differs by %g from the unchunked kernel's, whose largest is %g",
                           b.job.rank, half, name, worst, largest));
        }
    };
    check("out", part.out, whole.out, part.n / 2);
    check("dqkv", part.dqkv, whole.dqkv, 3 * part.n / 2);
}

// Times each kind of block of a rank's passes alone, as a share of the unchunked kernel's rate. This shows what cutting
// into blocks costs. The shapes are the ring's (attention/ring/ring.h).
template <class Comm>
void run_blocks(const Bench<Comm>& b) {
    const int NH = b.NH, HS = b.HS, T = b.options.tokens, Tc = T / 2;
    const size_t C = size_t(NH) * HS, n = T * C, rows = size_t(T) * NH;
    const Sequence<bf16> whole(b.dev, b.job.size * T, NH, HS, 1);
    const Figures single[2] = {b.measure([&] { whole.forward(); }), b.measure([&] { whole.backward(); })};
    const double pairs = 0.5 * whole.s.T * whole.s.T;  // pairs of query and key in the unchunked call
    const PartialShape largest{1, T, T, NH, HS};
    const DeviceMemory sums = device_memory(b.dev, 3 * n * sizeof(float)),
                       stats = device_memory(b.dev, rows * (sizeof(double) + 2 * sizeof(float))),
                       dq_sum = device_memory(b.dev, attention_dq_sum_bytes<bf16>(b.dev, largest)),
                       scratch = device_memory(b.dev, attention_partial_scratch_bytes<bf16>(b.dev, largest));
    float *o = as<float>(sums), *dk = o + n, *dv = dk + n;
    double* running = as<double>(stats);
    float *lse = reinterpret_cast<float*>(running + rows), *D = lse + rows;
    fill_normal(b.dev, lse, rows, 1, 0.1f, 10.f);
    fill_normal(b.dev, D, rows, 2, 0.1f);
    fill_normal(b.dev, dk, 2 * n, 3);
    b.dev.zero(dq_sum.get(), attention_dq_sum_bytes<bf16>(b.dev, largest));
    attention_clear_state(b.dev, o, running, largest);
    const auto heads = [&](const bf16* x, int t0, int part, int parts) {
        return Heads<const bf16>{x + (size_t(t0) * parts + part) * C, 0, parts * C};
    };
    if (b.job.rank == 0)
        std::printf(
            "%s, a rank of %d's blocks alone, %d tokens each, NH %d, HS %d: ms cool/sustained (%% of unchunked)\n",
            b.dev.name.c_str(), b.job.size, T, NH, HS);
    const struct {
        const char* name;
        int q0, Tq, Tk;
        bool own, forward, backward, write;
        double pairs;  // in Tc²
    } kinds[] = {{"own keys", 0, T, T, true, true, false, false, 2},
                 {"own keys, late chunk", Tc, Tc, T, true, false, true, true, 1.5},
                 {"own keys, early chunk", 0, Tc, Tc, true, false, true, false, 0.5},
                 {"an early chunk of keys", 0, T, Tc, false, true, true, true, 2},
                 {"both chunks of keys", Tc, Tc, T, false, true, true, true, 2}};
    for (const auto& kind : kinds) {
        PartialShape s{1, kind.Tq, kind.Tk, NH, HS, kind.q0, 0, kind.own, 0.f, T, T};
        s.q_begin = kind.q0, s.write_dkv = kind.write;
        const int q0 = kind.q0, parts = kind.own ? 3 : 2;  // other ranks' keys and values come without queries
        const auto q = heads(whole.qkv, q0, 0, 3), k = heads(whole.qkv, 0, parts - 2, parts),
                   v = heads(whole.qkv, 0, parts - 1, parts), dout = heads(whole.dout, q0, 0, 1);
        const double ideal = 100 * kind.pairs * Tc * Tc / pairs;
        const auto show = [&](const char* pass, const Figures& of_single, const Figures& ms) {
            if (b.job.rank == 0)
                std::printf("  %-22s %-8s %.3f/%.3f (%.1f/%.1f %%)\n", kind.name, pass, ms.cool, ms.sustained,
                            ideal * of_single.cool / ms.cool, ideal * of_single.sustained / ms.sustained);
        };
        if (kind.forward)
            show("forward", single[0],
                 b.measure([&] { attention_forward_partial<bf16>(b.dev, o + q0 * C, running + q0, q, k, v, s); }));
        if (kind.backward)
            show("backward", single[1], b.measure([&] {
                attention_backward_partial<bf16>(b.dev, as<float>(dq_sum), dk, dv, scratch.get(), q, k, v, dout,
                                                 lse + q0, D + q0, s);
            }));
    }
}

template <class Comm>
void run_bench(const Bench<Comm>& b) {
    const Options& o = b.options;
    const int N = b.job.size, Tc = o.tokens / 2;
    validate(b);
    const Sequence<bf16> whole(b.dev, N * o.tokens, b.NH, b.HS, 1), part(whole, Zigzag{N}, b.job.rank);
    const auto time = [&](const Sequence<bf16>& on, auto&... by) -> std::array<Figures, 2> {
        return {b.measure([&] { on.forward(by...); }), b.measure([&] { on.forward(by...), on.backward(by...); })};
    };
    const auto time_split = [&](auto& comm) {
        std::array<Figures, 2> ms;
        b.with_split(comm, Tc, [&](auto& split) { ms = time(part, split); });
        return ms;
    };
    NoComm none(b.job.rank, N);
    const std::array<Figures, 2> single = time(whole), split_ms = time_split(b.comm), still = time_split(none);

    const size_t n = 2 * part.n, bytes = 2 * n * (sizeof(bf16) + sizeof(float));  // n: K and V
    const DeviceMemory memory = device_memory(b.dev, bytes);
    b.comm.share(memory.get(), bytes);
    bf16* kv = as<bf16>(memory);
    float* dkv = reinterpret_cast<float*>(kv + 2 * n);
    const int next = (b.job.rank + 1) % N, before = (b.job.rank + N - 1) % N;
    Figures hop[2];
    for (int pass = 0; pass < 2; pass++)
        hop[pass] = b.measure([&] {
            b.comm.fork();
            b.comm.group([&] {
                b.comm.send_recv(next, kv, n, before, kv + n, n);
                if (pass == 1) b.comm.send_recv(next, dkv, n, before, dkv + n, n);
            });
            b.comm.join();
        });
    b.comm.share(nullptr, 0);

    if (b.job.rank > 0) return;
    Log log = results_log(b.dev, "ring_speed", o);
    const char* passes[] = {"forward", "forward+backward"};
    std::printf("%s, %d GPUs, %d tokens each, NH %d, HS %d, bf16: ms cool/sustained\n", b.dev.name.c_str(), N, o.tokens,
                b.NH, b.HS);
    for (int pass = 0; pass < 2; pass++) {
        const Figures one{single[pass].cool / N, single[pass].sustained / N};
        const auto show = [&](const char* what, const Figures& ms) {
            std::printf("  %s %7.3f/%7.3f (%.1f/%.1f %%)", what, ms.cool, ms.sustained, 100 * one.cool / ms.cool,
                        100 * one.sustained / ms.sustained);
        };
        std::printf("  %-16s single/%d %7.3f/%7.3f", passes[pass], N, one.cool, one.sustained);
        show(o.form.c_str(), split_ms[pass]);
        show("no travel", still[pass]);
        std::printf("  hop %.3f/%.3f\n", hop[pass].cool, hop[pass].sustained);
        Row row = result_row(b.dev, "ring_speed");
        row.add("form", o.form)
            .add("pass", passes[pass])
            .add("gpus", N)
            .add("tokens_per_gpu", o.tokens)
            .add("NH", b.NH)
            .add("HS", b.HS);
        row.add("single_ms", one.cool).add("single_ms_sustained", one.sustained);
        row.add("ms", split_ms[pass].cool).add("ms_sustained", split_ms[pass].sustained);
        row.add("still_ms", still[pass].cool).add("still_ms_sustained", still[pass].sustained);
        log.write(row.add("hop_ms", hop[pass].cool).add("hop_ms_sustained", hop[pass].sustained));
    }
}

int main(int argc, char** argv) {
    Options o;
    const std::vector<Option> table = {
        {"--gpus", "", Option::Int, &o.gpus, "so many GPUs of this machine; 0: as a launcher started us", "0..64"},
        {"--tokens", "", Option::Int, &o.tokens, "tokens per GPU", "256..1048576"},
        {"--heads", "", Option::Int, &o.heads, "number of heads NH", "1..1024"},
        {"--hs", "", Option::Choice, &o.hs, "head size HS", "64|128"},
        {"--form", "", Option::Choice, &o.form, "an exchange of heads or the ring", "heads|ring"},
        {"--quick", "", Option::Flag, &o.quick, "cool figures only"},
        {"--nccl", "", Option::Flag, &o.nccl, "send and receive by NCCL, as between machines"},
        {"--blocks", "", Option::Flag, &o.blocks, "each kind of block alone, then exit"},
    };
    return bench_main(
        argc, argv, "bench_ring", "The speed of attention that is split over GPUs.", "ring_speed.jsonl", o, table, [&] {
            const Place place = place_from_environment();
            if (o.gpus > 1 && place.size == 1) return launch_ranks(o.gpus, argv);
            if (place.size < 2) throw UsageError("a split has at least two ranks: give --gpus, or use a launcher");
            if (o.form == "heads" && o.heads % place.size > 0)
                throw UsageError(
                    format("%d heads cannot be divided among %d GPUs: add --form ring", o.heads, place.size));
            Job job(place);
            return job.guard([&] {
                Cuda dev(job.local_rank);
                const auto with = [&](auto&& comm) {
                    const Bench bench(o, dev, job, comm);
                    o.blocks ? run_blocks(bench) : run_bench(bench);
                    job.leave();
                };
                o.nccl ? with(ByNccl(dev, job)) : with(NcclComm(dev, job));
                return 0;
            });
        });
}
