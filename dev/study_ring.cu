// Studies what chunks and rings do to attention's errors. Causal, N(0,1), HS 64.
//
//   chunks   compares attention in 8 x 8 chunks on one GPU (attention/ring/chunks.h) with the unchunked call. It shows
//            the largest difference of out, lse, dq, dk, dv in each chunk. It also shows two mistakes: a block's
//            backward with the lse and D of its own keys only, and a sum of dq that did not start from zero.
//   ring     runs the trainer's ring (attention/ring/ring.h) over N ranks, which are threads on one GPU. It shows the
//            mean and largest error of out, dq, dk, dv against fp64, for three ways to carry partial results:
//              fp32   ours
//              bf16   rounds every block's out, dq, dk, dv before merging, as a ring over a library's attention does
//              floor  fp64's result rounded once
//
// The exit code is 1 if N ranks have more than 1.02 times the mean error of one rank, or 1.1 times its largest error.
// It is also 1 if a chunk's difference from the unchunked call is more than twice that call's error against fp64, plus
// 1e-6.
//
// Run: ./dev/study_ring --help
#include <array>
#include <cstdio>
#include <list>
#include <string>
#include <vector>

#include "attention/merge.cuh"
#include "attention/ring/blocks.h"
#include "attention/ring/chunks.h"
#include "dev/local_comm.h"
#include "dev/ring_part.h"

struct Options : Output {
    int tokens = 8192, chunk_tokens = 1024, heads = 12;
    std::string dtype = "all";
};

constexpr int HS = 64;

struct Study {
    const Cuda& dev;
    const Options& options;
    Log& log;
    int beyond = 0;  // figures beyond their bounds

    Row row(const char* part, DType dtype, int T) const {
        Row row = result_row(dev, "ring");
        row.add("study", part).add("dtype", name_of(dtype)).add("T", T);
        return row.add("NH", options.heads).add("HS", HS);
    }
};

// One way of computing attention, and its errors. All have the same inputs.
template <class X>
struct Way {
    std::string carry;
    int ranks;
    Sequence<X> of;
    Errors errors;
    Way(const Cuda& dev, const std::string& carry, int ranks, int T, int NH)
        : carry(carry), ranks(ranks), of(dev, T, NH, HS, T), errors(dev, of.s) {}
};

// ---------------------------------------------------------------------------------------------------------------------
// Chunks

constexpr int kChunks = 8;

// Stands in for the GPU in Chunks and makes one of the two mistakes.
struct Mistaken {
    const Cuda& cuda;
    bool own_lse;  // or else the sums have been used for something else before
    operator const Cuda&() const { return cuda; }
    void zero(void* p, size_t bytes) const {
        own_lse ? cuda.zero(p, bytes) : fill_normal(cuda, static_cast<float*>(p), bytes / sizeof(float), 7);
    }
};

template <class X>
void attention_backward_partial(const Mistaken& dev, float* dq_sum, float* dk, float* dv, void* scratch,
                                Heads<const X> q, Heads<const X> k, Heads<const X> v, Heads<const X> dout,
                                const float* lse, const float* D, const PartialShape& s) {
    const Cuda& cuda = dev.cuda;
    if (!dev.own_lse) return attention_backward_partial<X>(cuda, dq_sum, dk, dv, scratch, q, k, v, dout, lse, D, s);
    const size_t n = size_t(s.Tq) * s.NH * HS;
    const DeviceMemory o = poisoned(cuda, n * sizeof(float)), out = poisoned(cuda, n * sizeof(X));
    const DeviceMemory own_lse = poisoned(cuda, n / HS * sizeof(double)),
                       own_D = poisoned(cuda, n / HS * sizeof(float));
    const DeviceMemory stats = poisoned(cuda, 2 * size_t(s.q_rows) * s.NH * sizeof(float));
    float *all_lse = as<float>(stats), *all_D = all_lse + size_t(s.q_rows) * s.NH;  // as far apart as lse and D
    PartialShape alone = s;
    alone.q_rows = alone.q_begin = 0;
    attention_clear_state(cuda, as<float>(o), as<double>(own_lse), alone);
    attention_forward_partial<X>(cuda, as<float>(o), as<double>(own_lse), q, k, v, alone);
    copy_rows(cuda, as<X>(out), n, as<float>(o), n, n, 1);
    attention_D<X>(cuda, as<float>(own_D), dout.ptr, as<X>(out), 1, s.Tq, s.NH, HS);
    copy_rows(cuda, all_lse, s.q_rows, as<double>(own_lse), s.Tq, s.Tq, s.NH);
    copy_rows(cuda, all_D, s.q_rows, as<float>(own_D), s.Tq, s.Tq, s.NH);
    attention_backward_partial<X>(cuda, dq_sum, dk, dv, scratch, q, k, v, dout, all_lse, all_D, s);
}

// Computes `to` in chunks. Mistakes are made in backward only, which takes the out and lse of `good`.
template <class X, class Dev>
void run_chunks(const Dev& dev, const Sequence<X>& to, const Sequence<X>& good) {
    const int T = to.s.T, chunk = (T + kChunks - 1) / kChunks;
    Chunks<Dev, X> chunks(dev, {1, T, T, to.s.NH, HS}, chunk, chunk);
    const DeviceMemory memory = poisoned(to.dev, chunks.bytes());
    chunks.place(memory.get());
    if constexpr (std::is_same_v<Dev, Cuda>) to.forward(chunks);
    chunks.backward(to.dqkv, to.dout, good.out, good.lse, to.qkv);
    to.dev.sync();
}

// max|a − b| of each tensor in each chunk.
using Differences = std::array<std::array<double, kTensors>, kChunks>;

template <class X>
Differences differences(const Sequence<X>& a, const Sequence<X>& b) {
    Differences largest{};
    const size_t C = size_t(a.s.NH) * HS, T = a.s.T, chunk = (T + kChunks - 1) / kChunks;
    // of(i) = {tensor, t} of the i-th element
    const auto compare = [&](const auto* x, const auto* y, size_t n, auto of) {
        std::vector<std::decay_t<decltype(*x)>> host_x(n), host_y(n);
        a.dev.download(host_x.data(), x, n * sizeof(*x));
        a.dev.download(host_y.data(), y, n * sizeof(*y));
        for (size_t i = 0; i < n; i++) {
            const std::pair<int, size_t> at = of(i);
            keep_worst(largest[at.second / chunk][at.first], std::fabs(double(float(host_x[i])) - float(host_y[i])));
        }
    };
    compare(a.out, b.out, a.n, [&](size_t i) { return std::pair(int(Out), i / C); });
    compare(a.lse, b.lse, a.n / HS, [&](size_t i) { return std::pair(int(Lse), i % T); });
    compare(a.dqkv, b.dqkv, 3 * a.n, [&](size_t i) { return std::pair(int(Dq + i / C % 3), i / C / 3); });
    return largest;
}

template <class X>
void study_chunks(Study& study) {
    const Cuda& dev = study.dev;
    const DType dtype = dtype_of<X>();
    const int T = study.options.chunk_tokens, NH = study.options.heads;
    Way<X> whole(dev, "whole", 1, T, NH);
    const Sequence<X> chunked(dev, T, NH, HS, T), own_lse(dev, T, NH, HS, T), used(dev, T, NH, HS, T);
    whole.of.forward();
    whole.of.backward();
    run_chunks(dev, chunked, chunked);
    run_chunks(Mistaken{dev, true}, own_lse, chunked);
    run_chunks(Mistaken{dev, false}, used, chunked);

    // The error of the unchunked call itself against fp64. Chunks may differ from that call by twice as much, because
    // both may be off by it in opposite directions.
    for_each_head<X>(dev, whole.of.qkv, whole.of.dout, whole.of.s, [&](const Oracle& oracle, int b, int h) {
        whole.errors.add(oracle, whole.of.out, whole.of.lse, whole.of.dqkv, b, h);
    });
    whole.errors.fetch();

    std::printf("\n%s, T %d in %d chunks of %d: largest difference from the unchunked call\n", name_of(dtype), T,
                kChunks, (T + kChunks - 1) / kChunks);
    std::printf("  %5s", "chunk");
    for (const char* name : kNames) std::printf(" %9s", name);
    std::printf("   with the block's own lse: dq, dk, dv   dq into a used sum\n");
    const Differences d = differences(chunked, whole.of), wrong = differences(own_lse, whole.of),
                      dirty = differences(used, whole.of);
    for (int i = 0; i < kChunks; i++) {
        std::printf("  %5d", i);
        Row row = study.row("chunks", dtype, T);
        row.add("chunks", kChunks).add("chunk", i);
        for (int tensor = 0; tensor < kTensors; tensor++) {
            std::printf(" %9.2e", d[i][tensor]);
            row.add(kNames[tensor], d[i][tensor]);
            study.beyond += !(d[i][tensor] <= 2 * whole.errors.max(tensor) + 1e-6);
        }
        std::printf("   %9.2e %9.2e %9.2e              %9.2e\n", wrong[i][Dq], wrong[i][Dk], wrong[i][Dv],
                    dirty[i][Dq]);
        row.add("own_lse_dq", wrong[i][Dq]).add("own_lse_dk", wrong[i][Dk]).add("own_lse_dv", wrong[i][Dv]);
        study.log.write(row.add("used_sum_dq", dirty[i][Dq]));
    }
    std::printf("  %5s", "fp64");
    Row row = study.row("unchunked", dtype, T);
    for (int tensor = 0; tensor < kTensors; tensor++) {
        std::printf(" %9.2e", whole.errors.max(tensor));
        row.add(kNames[tensor], whole.errors.max(tensor));
    }
    std::printf("   the unchunked call's own largest error\n");
    study.log.write(row);
}

// ---------------------------------------------------------------------------------------------------------------------
// The ring

// Stands in for the GPU in a ring over a library's bf16 attention. The calls are the same, but a block's results are
// rounded before they are merged or added.
struct Rounding {
    const Cuda& cuda;
    operator const Cuda&() const { return cuda; }
    void zero(void* p, size_t bytes) const { cuda.zero(p, bytes); }
};

__global__ void round_trip_kernel(float* x, size_t n) {
    const size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n) x[i] = __bfloat162float(__float2bfloat16_rn(x[i]));
}
static void round_trip(const Cuda& dev, float* x, size_t n) {
    round_trip_kernel<<<blocks_of(n), kThreads, 0, dev.stream>>>(x, n);
    LAUNCH_CHECK("round_trip_kernel");
}
// Merges o_b, lse_b into o, lse. One thread block works on one row (t, h).
__global__ void merge_kernel(float* o, double* lse, const float* o_b, const double* lse_b, int rows, int NH) {
    const int t = blockIdx.x / NH, h = blockIdx.x % NH;
    const double a = lse[h * rows + t], b = lse_b[h * rows + t];
    const size_t i = size_t(blockIdx.x) * HS + threadIdx.x;
    __syncthreads();
    if (b == -INFINITY) return;
    const auto [weight, merged] = merge(a, b);
    o[i] = a == -INFINITY ? o_b[i] : o[i] - weight * (o[i] - o_b[i]);
    if (threadIdx.x == 0) lse[h * rows + t] = merged;
}

template <class X>
void attention_forward_partial(const Rounding& dev, float* o_acc, double* lse, Heads<const X> q, Heads<const X> k,
                               Heads<const X> v, const PartialShape& s) {
    const Cuda& cuda = dev.cuda;
    const size_t rows = size_t(s.rows_of_q()) * s.NH;  // the block's rows come first
    const DeviceMemory o = poisoned(cuda, rows * HS * sizeof(float)), own_lse = poisoned(cuda, rows * sizeof(double));
    attention_clear_state(cuda, as<float>(o), as<double>(own_lse), s);
    attention_forward_partial<X>(cuda, as<float>(o), as<double>(own_lse), q, k, v, s);
    round_trip(cuda, as<float>(o), rows * HS);
    merge_kernel<<<static_cast<unsigned>(s.Tq * s.NH), HS, 0, cuda.stream>>>(o_acc, lse, as<float>(o),
                                                                             as<double>(own_lse), s.rows_of_q(), s.NH);
    LAUNCH_CHECK("merge_kernel");
}
// If the kernel scales dq_sum only at the end, we round dq without its scale. That changes nothing, because at HS 64
// the scale is a power of two.
template <class X>
void attention_backward_partial(const Rounding& dev, float* dq_sum, float* dk, float* dv, void* scratch,
                                Heads<const X> q, Heads<const X> k, Heads<const X> v, Heads<const X> dout,
                                const float* lse, const float* D, const PartialShape& s) {
    const Cuda& cuda = dev.cuda;
    const size_t of_q = attention_dq_sum_bytes<X>(cuda, s) / sizeof(float), of_k = size_t(s.Tk) * s.NH * HS;
    const DeviceMemory partial = poisoned(cuda, (of_q + 2 * of_k) * sizeof(float));
    float *q_part = as<float>(partial), *k_part = q_part + of_q, *v_part = k_part + of_k;
    PartialShape alone = s;  // its sums have their own memory; as B = 1, dk and dv need room for Tk rows only
    alone.write_dkv = false;
    dev.zero(q_part, (of_q + 2 * of_k) * sizeof(float));
    attention_backward_partial<X>(cuda, q_part, k_part, v_part, scratch, q, k, v, dout, lse, D, alone);
    round_trip(cuda, q_part, of_q + 2 * of_k);
    if (s.write_dkv) dev.zero(dk, of_k * sizeof(float)), dev.zero(dv, of_k * sizeof(float));
    add_rows(cuda, dq_sum, of_q, q_part, of_q, of_q, 1);
    add_rows(cuda, dk, of_k, k_part, of_k, of_k, 1);
    add_rows(cuda, dv, of_k, v_part, of_k, of_k, 1);
}

// Runs a rank's part of the sequence through the ring and copies the results to their places.
template <class X, class Dev>
void run_rank(const Dev& dev, LocalComm<Cuda>& comm, const Sequence<X>& whole) {
    const Cuda& cuda = whole.dev;
    const Zigzag zigzag{comm.size};
    const Sequence<X> part(whole, zigzag, comm.rank);
    const size_t n = part.n / 2, Tc = part.s.T / 2;
    Ring<Dev, X, LocalComm<Cuda>> ring(dev, comm.rank, comm.size, 1, Tc, part.s.NH, HS);
    const DeviceMemory memory = poisoned(cuda, ring.bytes());
    ring.start(memory.get(), &comm);
    part.forward(ring);
    part.backward(ring);
    ring.stop();
    for (int half = 0; half < 2; half++) {
        const size_t chunk = zigzag.chunk(comm.rank, half), at = chunk * n;
        copy_rows(cuda, whole.out + at, n, part.out + half * n, n, n, 1);
        copy_rows(cuda, whole.dqkv + 3 * at, 3 * n, part.dqkv + 3 * half * n, 3 * n, 3 * n, 1);
        copy_rows(cuda, whole.lse + chunk * Tc, whole.s.T, part.lse + half * Tc, 2 * Tc, Tc, whole.s.NH);
    }
    cuda.sync();
}

// The floor: fp64's results of head h, rounded once.
template <class X>
__global__ void scatter_kernel(X* to, size_t stride, const double* from, int T, int n) {
    const size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < size_t(T) * n) to[i / n * stride + i % n] = static_cast<X>(static_cast<float>(from[i]));
}
template <class X>
void round_oracle(const Oracle& oracle, const Sequence<X>& to, int h) {
    const size_t C = size_t(to.s.NH) * HS;
    const int T = to.s.T;
    const auto scatter = [&](int tensor, auto* x, size_t stride, int n) {
        scatter_kernel<<<blocks_of(size_t(T) * n), kThreads, 0, to.dev.stream>>>(x, stride, oracle.results[tensor], T,
                                                                                 n);
        LAUNCH_CHECK("scatter_kernel");
    };
    scatter(Out, to.out + h * HS, C, HS);
    scatter(Lse, to.lse + size_t(h) * T, 1, 1);
    for (int part = 0; part < 3; part++) scatter(Dq + part, to.dqkv + part * C + h * HS, 3 * C, HS);
}

template <class X>
void study_rings(Study& study) {
    const Cuda& dev = study.dev;
    const DType dtype = dtype_of<X>();
    const int T = study.options.tokens, NH = study.options.heads;
    std::list<Way<X>> ways;
    ways.emplace_back(dev, "floor", 1, T, NH);
    for (const char* carry : {"fp32", "bf16"})
        for (int ranks : {1, 2, 4, 8, 16})
            if (carry == std::string("fp32") || dtype == DType::bf16) ways.emplace_back(dev, carry, ranks, T, NH);
    for (const Way<X>& way : ways)
        if (way.carry != "floor")
            on_local_ranks(dev, way.ranks, [&](LocalComm<Cuda>& comm) {
                way.carry == "fp32" ? run_rank(dev, comm, way.of) : run_rank(Rounding{dev}, comm, way.of);
            });
    const Sequence<X>& in = ways.front().of;
    for_each_head<X>(dev, in.qkv, in.dout, in.s, [&](const Oracle& oracle, int b, int h) {
        round_oracle(oracle, in, h);
        for (Way<X>& way : ways) way.errors.add(oracle, way.of.out, way.of.lse, way.of.dqkv, b, h);
    });
    for (Way<X>& way : ways) way.errors.fetch();

    std::printf("\n%s, T %d, %d heads: error against fp64, mean and largest, and as multiples of N = 1's\n",
                name_of(dtype), T, NH);
    std::printf("  %-5s %2s", "carry", "N");
    for (int tensor : {Out, Dq, Dk, Dv}) std::printf(" | %-28s", kNames[tensor]);
    std::printf("\n");
    const Errors* one = nullptr;
    for (const Way<X>& way : ways) {
        if (way.ranks == 1) one = &way.errors;
        std::printf("  %-5s %2d", way.carry.c_str(), way.ranks);
        bool flat = true;
        for (int tensor : {Out, Dq, Dk, Dv}) {
            const double mean = way.errors.mean(tensor), max = way.errors.max(tensor);
            const double mean_ratio = mean / one->mean(tensor), max_ratio = max / one->max(tensor);
            flat &= mean_ratio <= 1.02 && max_ratio <= 1.1;
            std::printf(" | %8.2e %8.2e %4.2f %4.2f", mean, max, mean_ratio, max_ratio);
            Row row = study.row("ring", dtype, T);
            row.add("carry", way.carry).add("ranks", way.ranks).add("tensor", kNames[tensor]);
            row.add("mean_error", mean).add("max_error", max).add("mean_ratio", mean_ratio);
            study.log.write(row.add("max_ratio", max_ratio));
        }
        const bool grows = way.carry == "fp32" && !flat;
        study.beyond += grows;
        std::printf("%s\n", grows ? "  GROWS" : "");
    }
}

// ---------------------------------------------------------------------------------------------------------------------

int main(int argc, char** argv) {
    Options o;
    const std::vector<Option> table = {
        {"--tokens", "", Option::Int, &o.tokens, "T of the ring, a multiple of 32", "32..65536"},
        {"--chunk-tokens", "", Option::Int, &o.chunk_tokens, "T of the chunks", "8..65536"},
        {"--heads", "", Option::Int, &o.heads, "number of heads NH", "1..1024"},
        {"--dtype", "", Option::Choice, &o.dtype, "precision", "fp32|bf16|all"},
    };
    const char* const about = "Errors of attention in chunks and over a ring.";
    return bench_main(argc, argv, "study_ring", about, "ring.jsonl", o, table, [&] {
        if (o.tokens % 32) throw UsageError(format("--tokens %d: expected a multiple of 32", o.tokens));
        Cuda dev;
        dev.tf32 = false;
        Log log = results_log(dev, "ring", o);
        Study study{dev, o, log};
        const bool fp32 = o.dtype != "bf16", bf = o.dtype != "fp32";
        if (fp32) study_chunks<float>(study);
        if (bf) study_chunks<bf16>(study);
        if (fp32) study_rings<float>(study);
        if (bf) study_rings<bf16>(study);
        if (study.beyond) std::fprintf(stderr, "study_ring: %d figures beyond their bounds\n", study.beyond);
        return study.beyond ? 1 : 0;
    });
}
