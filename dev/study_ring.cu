// Studies what chunks and rings do to attention's errors. Causal, N(0,1), HS 64.
//
//   chunks   compares attention in 8 x 8 chunks on one GPU (attention/ring/chunks.h) with the unchunked call. It shows the
//            largest difference of out, lse, dq, dk, dv in each chunk. It also shows two mistakes: a block's backward
//            with the lse and D of its own keys only, and a sum of dq that did not start from zero.
//   ring     runs the trainer's ring (attention/ring/ring.h) over N ranks, which are threads on one GPU. It shows the mean
//            and largest error of out, dq, dk, dv against fp64, for three ways to carry partial results:
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
#include <memory>
#include <string>
#include <vector>

#include "attention/merge.cuh"
#include "attention/ring/blocks.h"
#include "attention/ring/chunks.h"
#include "attention/ring/ring.h"
#include "dev/bench.h"
#include "dev/local_comm.h"
#include "dev/oracle.cuh"
#include "layers/layers.h"
#include "run/options.h"

struct Options {
    int tokens = 8192, chunk_tokens = 1024, heads = 12;
    std::string dtype = "all", out;
    bool json = false, help = false;
};
static Options parse(int argc, char** argv) {
    Options o;
    std::vector<Option> table = {
        {"--tokens", "", Option::Int, &o.tokens, "T of the ring, a multiple of 32", "32..65536"},
        {"--chunk-tokens", "", Option::Int, &o.chunk_tokens, "T of the chunks", "8..65536"},
        {"--heads", "", Option::Int, &o.heads, "number of heads NH", "1..1024"},
        {"--dtype", "", Option::Choice, &o.dtype, "precision", "fp32|bf16|all"},
        {"--json", "", Option::Flag, &o.json, "append rows to dev/results/<gpu>/ring.jsonl", ""},
        {"--out", "", Option::String, &o.out, "append rows to this file", ""},
    };
    o.help = parse_options(argc, argv, table);
    if (o.help)
        std::fputs(options_help("study_ring", "Errors of attention in chunks and over a ring.", table).c_str(), stdout);
    if (o.tokens % 32) throw UsageError(format("--tokens %d: expected a multiple of 32", o.tokens));
    return o;
}

constexpr int HS = 64;
constexpr int kRanks[] = {1, 2, 4, 8, 16};

struct Study {
    const Cuda& dev;
    const Options& options;
    Log& log;
    int beyond = 0;  // figures beyond their bounds
};

template <class T>
T* as(const DeviceMemory& memory) {
    return static_cast<T*>(memory.get());
}

// The inputs, the same for all, and below them the results of one way of computing attention.
template <class X>
struct Inputs {
    AttentionShape s;
    size_t n, rows;  // elements of out, of lse
    DeviceMemory memory;
    X *qkv, *dout;
    Inputs(const Cuda& dev, int T, int NH)
        : s{1, T, NH, HS}, n(size_t(T) * NH * HS), rows(size_t(T) * NH), memory(device_memory(dev, 4 * n * sizeof(X))) {
        qkv = as<X>(memory), dout = qkv + 3 * n;
        fill_normal(dev, qkv, 4 * n, T);
    }
};
template <class X>
struct Result {
    std::string carry;
    int ranks;
    DeviceMemory memory[3];
    X *out, *dqkv;
    float* lse;
    Errors errors;
    Result(const Cuda& dev, const std::string& carry, int ranks, const Inputs<X>& in)
        : carry(carry), ranks(ranks), errors(dev, in.s) {
        memory[0] = poisoned(dev, in.n * sizeof(X));
        memory[1] = poisoned(dev, 3 * in.n * sizeof(X));
        memory[2] = poisoned(dev, in.rows * sizeof(float));
        out = as<X>(memory[0]), dqkv = as<X>(memory[1]), lse = as<float>(memory[2]);
    }
};

template <class X>
void run_whole(const Cuda& dev, const Inputs<X>& in, const Result<X>& to) {
    const DeviceMemory scratch =
        poisoned(dev, attention_scratch_bytes<X>(dev, Attention::flash, 1, in.s.T, in.s.NH, HS));
    attention_forward<X>(dev, Attention::flash, to.out, to.lse, nullptr, scratch.get(), in.qkv, 1, in.s.T, in.s.NH, HS);
    attention_backward<X>(dev, Attention::flash, to.dqkv, scratch.get(), in.dout, to.out, to.lse, nullptr, in.qkv, 1,
                          in.s.T, in.s.NH, HS);
    dev.sync();
}

// ---------------------------------------------------------------------------------------------------------------------
// Chunks

constexpr int kChunks = 8;

using Differences = std::array<std::array<double, kTensors>, kChunks>;

template <class X>
std::vector<float> download(const Cuda& dev, const X* from, size_t n) {
    std::vector<X> raw(n);
    dev.download(raw.data(), from, n * sizeof(X));
    return std::vector<float>(raw.begin(), raw.end());
}

// max|a − b| of each tensor in each chunk.
template <class X>
Differences differences(const Cuda& dev, const Inputs<X>& in, const Result<X>& a, const Result<X>& b) {
    Differences largest{};
    const size_t C = size_t(in.s.NH) * HS, chunk = (in.s.T + kChunks - 1) / kChunks;
    const auto note = [&](int tensor, size_t t, float x, float y) {
        keep_worst(largest[t / chunk][tensor], std::fabs(double(x) - y));
    };
    const std::vector<float> out_a = download(dev, a.out, in.n), out_b = download(dev, b.out, in.n);
    const std::vector<float> lse_a = download(dev, a.lse, in.rows), lse_b = download(dev, b.lse, in.rows);
    const std::vector<float> dqkv_a = download(dev, a.dqkv, 3 * in.n), dqkv_b = download(dev, b.dqkv, 3 * in.n);
    for (size_t i = 0; i < in.n; i++) note(Out, i / C, out_a[i], out_b[i]);
    for (size_t i = 0; i < in.rows; i++) note(Lse, i % in.s.T, lse_a[i], lse_b[i]);
    for (size_t i = 0; i < 3 * in.n; i++) note(Dq + i / C % 3, i / C / 3, dqkv_a[i], dqkv_b[i]);
    return largest;
}

// Does what Chunks::backward does, but makes one of the two mistakes.
template <class X>
void run_wrong(const Cuda& dev, const Inputs<X>& in, const Result<X>& good, const Result<X>& to, bool own_lse) {
    const int T = in.s.T, NH = in.s.NH, chunk = (T + kChunks - 1) / kChunks;
    const size_t C = size_t(NH) * HS;
    const PartialShape all{1, T, T, NH, HS};
    const DeviceMemory sums = device_memory(dev, 2 * in.n * sizeof(float));
    const size_t of_sum = attention_dq_sum_bytes<X>(dev, all);
    const DeviceMemory dq_sum = device_memory(dev, of_sum);
    const DeviceMemory partial = device_memory(dev, 2 * chunk * C * sizeof(float));
    const DeviceMemory stats = device_memory(dev, 2 * size_t(T) * NH * sizeof(float));
    const DeviceMemory D = device_memory(dev, size_t(chunk) * NH * sizeof(float));
    const DeviceMemory running = device_memory(dev, size_t(chunk) * NH * sizeof(double));
    const DeviceMemory scratch = poisoned(dev, attention_partial_scratch_bytes<X>(dev, all));
    float *dk = as<float>(sums), *dv = dk + in.n;
    float *o = as<float>(partial), *lse = as<float>(stats), *all_D = lse + size_t(T) * NH;
    X* rounded = reinterpret_cast<X*>(o + chunk * C);
    dev.zero(dk, 2 * in.n * sizeof(float));
    dev.zero(dq_sum.get(), of_sum);
    if (!own_lse) fill_normal(dev, as<float>(dq_sum), of_sum / sizeof(float), 7);  // used for something else before
    const auto heads = [&](const X* x, int t0, int part, int parts) {
        return Heads<const X>{x + (size_t(t0) * parts + part) * C, size_t(T) * parts * C, parts * C};
    };
    for (int q0 = 0; q0 < T; q0 += chunk)
        for (int k0 = 0; k0 <= q0; k0 += chunk) {
            PartialShape s{1, std::min(chunk, T - q0), std::min(chunk, T - k0), NH, HS, q0, k0};
            const X* out = good.out + q0 * C;
            copy_rows(dev, lse + q0, T, good.lse + q0, T, s.Tq, NH);
            if (own_lse) {
                attention_clear_state(dev, o, as<double>(running), s);
                attention_forward_partial<X>(dev, o, as<double>(running), heads(in.qkv, q0, 0, 3),
                                             heads(in.qkv, k0, 1, 3), heads(in.qkv, k0, 2, 3), s);
                copy_rows(dev, lse + q0, T, as<double>(running), s.Tq, s.Tq, NH);
                attention_round<X>(dev, rounded, o, s.Tq * C);
                out = rounded;
            }
            attention_D<X>(dev, as<float>(D), in.dout + q0 * C, out, 1, s.Tq, NH, HS);
            copy_rows(dev, all_D + q0, T, as<float>(D), s.Tq, s.Tq, NH);
            s.q_rows = T, s.q_begin = q0;
            attention_backward_partial<X>(dev, as<float>(dq_sum), dk + k0 * C, dv + k0 * C, scratch.get(),
                                          heads(in.qkv, q0, 0, 3), heads(in.qkv, k0, 1, 3), heads(in.qkv, k0, 2, 3),
                                          heads(in.dout, q0, 0, 1), lse + q0, all_D + q0, s);
        }
    copy_rows(dev, to.out, in.n, good.out, in.n, in.n, 1);
    copy_rows(dev, to.lse, in.rows, good.lse, in.rows, in.rows, 1);
    attention_write_dq<X>(dev, {to.dqkv, 3 * in.n, 3 * C}, as<float>(dq_sum), all);
    for (int part = 1; part < 3; part++) copy_rows(dev, to.dqkv + part * C, 3 * C, dk + (part - 1) * in.n, C, C, T);
}

template <class X>
void study_chunks(Study& study) {
    const Cuda& dev = study.dev;
    const Inputs<X> in(dev, study.options.chunk_tokens, study.options.heads);
    const int T = in.s.T, chunk = (T + kChunks - 1) / kChunks;
    Result<X> whole(dev, "whole", 1, in), chunked(dev, "chunks", 1, in), own_lse(dev, "own_lse", 1, in),
        used(dev, "used_sum", 1, in);
    run_whole(dev, in, whole);
    Chunks<Cuda, X> chunks(dev, {1, T, T, in.s.NH, HS}, chunk, chunk);
    const DeviceMemory memory = poisoned(dev, chunks.bytes());
    chunks.place(memory.get());
    chunks.forward(chunked.out, chunked.lse, in.qkv);
    chunks.backward(chunked.dqkv, in.dout, chunked.out, chunked.lse, in.qkv);
    run_wrong(dev, in, chunked, own_lse, true);
    run_wrong(dev, in, chunked, used, false);

    // The error of the unchunked call itself against fp64. Chunks may differ from that call by twice as much, because
    // both may be off by it in opposite directions.
    Oracle oracle(dev, T, HS);
    for (int h = 0; h < in.s.NH; h++) {
        gather(dev, oracle, in.qkv, in.dout, in.s, 0, h);
        oracle.run(true, in.s.resolved_scale());
        whole.errors.add(oracle, whole.out, whole.lse, whole.dqkv, 0, h);
    }
    whole.errors.fetch();

    std::printf("\n%s, T %d in %d chunks of %d: largest difference from the unchunked call\n", name_of(dtype_of<X>()),
                T, kChunks, chunk);
    std::printf("  %5s", "chunk");
    for (const char* name : kNames) std::printf(" %9s", name);
    std::printf("   with the block's own lse: dq, dk, dv   dq into a used sum\n");
    const Differences d = differences(dev, in, chunked, whole), wrong = differences(dev, in, own_lse, whole),
                      dirty = differences(dev, in, used, whole);
    for (int i = 0; i < kChunks; i++) {
        std::printf("  %5d", i);
        Row row = result_row(dev, "ring");
        row.add("study", "chunks").add("dtype", name_of(dtype_of<X>())).add("T", T).add("NH", in.s.NH).add("HS", HS);
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
    for (int tensor = 0; tensor < kTensors; tensor++) std::printf(" %9.2e", whole.errors.max(tensor));
    std::printf("   the unchunked call's own largest error\n");
    Row row = result_row(dev, "ring");
    row.add("study", "unchunked").add("dtype", name_of(dtype_of<X>())).add("T", T).add("NH", in.s.NH).add("HS", HS);
    for (int tensor = 0; tensor < kTensors; tensor++) row.add(kNames[tensor], whole.errors.max(tensor));
    study.log.write(row);
}

// ---------------------------------------------------------------------------------------------------------------------
// The ring

// The backend of a ring over a library's bf16 attention. The calls are the same, but a block's results are rounded
// before they are merged or added.
struct Rounding {
    const Cuda& cuda;
    float* partial;  // three blocks' results
    operator const Cuda&() const { return cuda; }
    void zero(void* p, size_t bytes) const { cuda.zero(p, bytes); }
};

__global__ void round_trip_kernel(float* x, size_t n) {
    const size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n) x[i] = __bfloat162float(__float2bfloat16_rn(x[i]));
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
static void round_trip(const Rounding& dev, float* x, size_t n) {
    round_trip_kernel<<<blocks_of(n), kThreads, 0, dev.cuda.stream>>>(x, n);
    LAUNCH_CHECK("round_trip_kernel");
}

template <class X>
void attention_forward_partial(const Rounding& dev, float* o_acc, double* lse, Heads<const X> q, Heads<const X> k,
                               Heads<const X> v, const PartialShape& s) {
    const size_t rows = size_t(s.rows_of_q()) * s.NH;  // the block's rows come first
    float* o = dev.partial;
    double* own_lse = reinterpret_cast<double*>(o + rows * HS);
    attention_clear_state(dev.cuda, o, own_lse, s);
    attention_forward_partial<X>(dev.cuda, o, own_lse, q, k, v, s);
    round_trip(dev, o, rows * HS);
    merge_kernel<<<static_cast<unsigned>(s.Tq * s.NH), HS, 0, dev.cuda.stream>>>(o_acc, lse, o, own_lse, s.rows_of_q(),
                                                                                 s.NH);
    LAUNCH_CHECK("merge_kernel");
}
template <class X>
void attention_backward_partial(const Rounding& dev, float* dq_sum, float* dk, float* dv, void* scratch,
                                Heads<const X> q, Heads<const X> k, Heads<const X> v, Heads<const X> dout,
                                const float* lse, const float* D, const PartialShape& s) {
    const size_t of_q = attention_dq_sum_bytes<X>(dev, s) / sizeof(float), of_k = size_t(s.Tk) * s.NH * HS;
    float *q_part = dev.partial, *k_part = q_part + of_q, *v_part = k_part + of_k;
    PartialShape alone = s;  // its sums have their own memory; as B = 1, dk and dv need room for Tk rows only
    alone.write_dkv = false;
    dev.zero(q_part, (of_q + 2 * of_k) * sizeof(float));
    attention_backward_partial<X>(dev.cuda, q_part, k_part, v_part, scratch, q, k, v, dout, lse, D, alone);
    round_trip(dev, q_part, of_q + 2 * of_k);
    if (s.write_dkv) dev.zero(dk, of_k * sizeof(float)), dev.zero(dv, of_k * sizeof(float));
    add_rows(dev.cuda, dq_sum, of_q, q_part, of_q, of_q, 1);
    add_rows(dev.cuda, dk, of_k, k_part, of_k, of_k, 1);
    add_rows(dev.cuda, dv, of_k, v_part, of_k, of_k, 1);
}
template <class X>
size_t attention_partial_scratch_bytes(const Rounding& dev, const PartialShape& s) {
    return attention_partial_scratch_bytes<X>(dev.cuda, s);
}
// If the kernel scales dq_sum only at the end, we round dq without its scale. That changes nothing, because at HS 64
// the scale is a power of two.
template <class X>
size_t attention_dq_sum_bytes(const Rounding& dev, const PartialShape& s) {
    return attention_dq_sum_bytes<X>(dev.cuda, s);
}
template <class X>
void attention_write_dq(const Rounding& dev, Heads<X> dq, const float* dq_sum, const PartialShape& s) {
    attention_write_dq<X>(dev.cuda, dq, dq_sum, s);
}

// Runs a rank's part of the sequence through the ring and copies the results to their places.
template <class X, class Dev>
void run_rank(const Dev& dev, const Cuda& cuda, LocalComm<Cuda>& comm, const Inputs<X>& in, const Result<X>& to) {
    const Zigzag zigzag{to.ranks};
    const int T = in.s.T, NH = in.s.NH, Tc = T / (2 * to.ranks);
    const size_t C = size_t(NH) * HS, n = Tc * C;
    const DeviceMemory tensors = poisoned(cuda, 16 * n * sizeof(X)), stats = poisoned(cuda, 2 * n / HS * sizeof(float));
    X *qkv = as<X>(tensors), *dout = qkv + 6 * n, *out = dout + 2 * n, *dqkv = out + 2 * n;
    float* lse = as<float>(stats);
    for (int half = 0; half < 2; half++) {
        const size_t at = zigzag.chunk(comm.rank, half) * n;
        copy_rows(cuda, qkv + 3 * half * n, 3 * n, in.qkv + 3 * at, 3 * n, 3 * n, 1);
        copy_rows(cuda, dout + half * n, n, in.dout + at, n, n, 1);
    }
    Ring<Dev, X, LocalComm<Cuda>> ring(dev, comm.rank, comm.size, 1, Tc, NH, HS);
    const DeviceMemory memory = poisoned(cuda, ring.bytes());
    ring.start(memory.get(), &comm);
    ring.forward(out, lse, qkv);
    ring.backward(dqkv, dout, out, lse, qkv);
    ring.stop();
    for (int half = 0; half < 2; half++) {
        const size_t chunk = zigzag.chunk(comm.rank, half), at = chunk * n;
        copy_rows(cuda, to.out + at, n, out + half * n, n, n, 1);
        copy_rows(cuda, to.dqkv + 3 * at, 3 * n, dqkv + 3 * half * n, 3 * n, 3 * n, 1);
        copy_rows(cuda, to.lse + chunk * Tc, T, lse + half * Tc, 2 * Tc, Tc, NH);
    }
    cuda.sync();
}
template <class X>
void run_ring(const Cuda& dev, const Inputs<X>& in, const Result<X>& to) {
    on_local_ranks(dev, to.ranks, [&](LocalComm<Cuda>& comm) {
        if (to.carry == "fp32") return run_rank<X>(dev, dev, comm, in, to);
        const size_t of_rank = in.n / to.ranks;
        const PartialShape rows{1, in.s.T / to.ranks, 1, in.s.NH, HS};
        const DeviceMemory partial = poisoned(dev, attention_dq_sum_bytes<X>(dev, rows) + 3 * of_rank * sizeof(float));
        run_rank<X>(Rounding{dev, as<float>(partial)}, dev, comm, in, to);
    });
}

// The floor: fp64's results of head h, rounded once.
template <class X>
__global__ void scatter_kernel(X* to, size_t stride, const double* from, int T, int n) {
    const size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < size_t(T) * n) to[i / n * stride + i % n] = static_cast<X>(static_cast<float>(from[i]));
}
template <class X>
void round_oracle(const Cuda& dev, const Oracle& oracle, const Inputs<X>& in, const Result<X>& to, int h) {
    const size_t C = size_t(in.s.NH) * HS;
    const int T = in.s.T;
    const unsigned blocks = blocks_of(size_t(T) * HS);
    scatter_kernel<<<blocks, kThreads, 0, dev.stream>>>(to.out + h * HS, C, oracle.results[Out], T, HS);
    scatter_kernel<<<blocks_of(T), kThreads, 0, dev.stream>>>(to.lse + size_t(h) * T, 1, oracle.results[Lse], T, 1);
    for (int part = 0; part < 3; part++)
        scatter_kernel<<<blocks, kThreads, 0, dev.stream>>>(to.dqkv + part * C + h * HS, 3 * C,
                                                            oracle.results[Dq + part], T, HS);
    LAUNCH_CHECK("scatter_kernel");
}

template <class X>
void study_rings(Study& study) {
    const Cuda& dev = study.dev;
    const Inputs<X> in(dev, study.options.tokens, study.options.heads);
    std::list<Result<X>> results;
    results.emplace_back(dev, "floor", 1, in);
    for (int ranks : kRanks) results.emplace_back(dev, "fp32", ranks, in);
    if (std::is_same_v<X, bf16>)
        for (int ranks : kRanks) results.emplace_back(dev, "bf16", ranks, in);
    for (const Result<X>& r : results)
        if (r.carry != "floor") run_ring(dev, in, r);
    Oracle oracle(dev, in.s.T, HS);
    for (int h = 0; h < in.s.NH; h++) {
        gather(dev, oracle, in.qkv, in.dout, in.s, 0, h);
        oracle.run(true, in.s.resolved_scale());
        round_oracle(dev, oracle, in, results.front(), h);
        for (Result<X>& r : results) r.errors.add(oracle, r.out, r.lse, r.dqkv, 0, h);
    }
    for (Result<X>& r : results) r.errors.fetch();

    std::printf("\n%s, T %d, %d heads: error against fp64, mean and largest, and as multiples of N = 1's\n",
                name_of(dtype_of<X>()), in.s.T, in.s.NH);
    std::printf("  %-5s %2s", "carry", "N");
    for (int tensor : {Out, Dq, Dk, Dv}) std::printf(" | %-28s", kNames[tensor]);
    std::printf("\n");
    const Result<X>* one = nullptr;
    for (const Result<X>& r : results) {
        if (r.ranks == 1) one = &r;
        std::printf("  %-5s %2d", r.carry.c_str(), r.ranks);
        bool flat = true;
        for (int tensor : {Out, Dq, Dk, Dv}) {
            const double mean = r.errors.mean(tensor), max = r.errors.max(tensor);
            const double mean_ratio = mean / one->errors.mean(tensor), max_ratio = max / one->errors.max(tensor);
            flat &= mean_ratio <= 1.02 && max_ratio <= 1.1;
            std::printf(" | %8.2e %8.2e %4.2f %4.2f", mean, max, mean_ratio, max_ratio);
            Row row = result_row(dev, "ring");
            row.add("study", "ring").add("dtype", name_of(dtype_of<X>())).add("T", in.s.T).add("NH", in.s.NH);
            row.add("HS", HS).add("carry", r.carry).add("ranks", r.ranks).add("tensor", kNames[tensor]);
            row.add("mean_error", mean).add("max_error", max).add("mean_ratio", mean_ratio);
            study.log.write(row.add("max_ratio", max_ratio));
        }
        const bool bound = r.carry == "fp32";
        study.beyond += bound && !flat;
        std::printf("%s\n", bound && !flat ? "  GROWS" : "");
    }
}

// ---------------------------------------------------------------------------------------------------------------------

static int run(const Options& options) {
    std::string why;
    if (Cuda::count(&why) == 0) throw Error("study_ring needs a GPU: " + why);
    Cuda dev;
    dev.tf32 = false;
    Log log = results_log(dev, "ring", options.out, options.json);
    Study study{dev, options, log};
    const bool fp32 = options.dtype != "bf16", bf = options.dtype != "fp32";
    if (fp32) study_chunks<float>(study);
    if (bf) study_chunks<bf16>(study);
    if (fp32) study_rings<float>(study);
    if (bf) study_rings<bf16>(study);
    if (study.beyond) std::fprintf(stderr, "study_ring: %d figures beyond their bounds\n", study.beyond);
    return study.beyond ? 1 : 0;
}

int main(int argc, char** argv) {
    return run_program("study_ring", [&] {
        const Options options = parse(argc, argv);
        return options.help ? 0 : run(options);
    });
}
