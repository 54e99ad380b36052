// Studies whether attention's errors grow with the ranks of a ring. Causal, N(0,1), HS 64.
//
// The trainer's ring (attention/ring/ring.h) runs over N ranks, which are threads on one GPU. Shown
// are the mean and largest error against fp64 for two ways to carry partial results. Ours carries
// fp32. The other rounds every call's out, dq, dk and dv to bf16 before it merges them, as a ring
// over a library's attention does.
//
// N ranks may have 1.02 times the mean error of one rank, and 1.1 times its largest error. If ours
// have more, the exit code is 1. dev/test_attention checks the same for shorter sequences and fewer
// ranks.
//
// Run: ./dev/study_ring --help
#include <cstdio>
#include <string>
#include <vector>

#include "dev/common/bench.h"
#include "dev/common/ring_check.h"

struct Options : Output {
    int tokens = 8192;
    int heads = 12;
    std::string dtype = "all";
};

constexpr int HS = 64;

// A GPU that rounds the results of every attention call to `carry`: with fp32 our ring runs as it
// is, and with bf16 like a ring over a library's attention.
struct RoundingGpu : Cuda {
    DType carry = DType::f32;
};

// Rounds n elements of x (T, C), the only sequence, to bf16.
static __global__ void round_to_bf16_kernel(HeadsView<float> x, size_t C, size_t n) {
    const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    float& element = x.ptr[(i / C) * x.token_stride + i % C];
    element = __bfloat162float(__float2bfloat16_rn(element));
}
static void round_to_carry(const RoundingGpu& dev, const HeadsView<float>& x, int T, int NH) {
    if (dev.carry == DType::f32)
        return;
    const size_t C = size_t(NH) * HS;
    const size_t n = T * C;
    const unsigned blocks = static_cast<unsigned>((n + 255) / 256);
    round_to_bf16_kernel<<<blocks, 256, 0, dev.stream>>>(x, C, n);
    LAUNCH_CHECK("round_to_bf16_kernel");
}
template <class X>
void attention_forward(const RoundingGpu& dev, Attention kind,
                       const AttentionForward<X, float>& c) {
    attention_forward(static_cast<const Cuda&>(dev), kind, c);
    round_to_carry(dev, c.out, c.s.Tq, c.s.NH);
}
template <class X>
void attention_backward(const RoundingGpu& dev, Attention kind,
                        const AttentionBackward<X, float>& c) {
    attention_backward(static_cast<const Cuda&>(dev), kind, c);
    round_to_carry(dev, c.dq, c.s.Tq, c.s.NH);
    round_to_carry(dev, c.dk, c.s.Tk, c.s.NH);
    round_to_carry(dev, c.dv, c.s.Tk, c.s.NH);
}

template <class X>
void study(RoundingGpu& dev, const std::vector<DType>& carries, const Options& o, Log& log) {
    const char* dtype = name_of(dtype_of<X>());
    const AttentionShape s = whole(1, o.tokens, o.heads, HS);
    const Whole<X, RoundingGpu> sequence(dev, s, {.threads = kAllCores});
    std::printf("T %d: mean and largest error against fp64, and as multiples of one rank's\n",
                o.tokens);
    for (const DType carry : carries) {
        dev.carry = carry;
        TensorErrors one_rank;
        for (int ranks : {1, 2, 4, 8, 16}) {
            PieceErrors<X, RoundingGpu> errors;
            add_local_ring(errors, sequence, ranks);
            if (ranks == 1)
                one_rank = errors.pieces;
            if (carry == DType::f32)
                check_flat(errors.pieces, one_rank, ring_name(s, ranks));
            for (int tensor : {Out, Dq, Dk, Dv}) {
                const ErrorStats& e = errors.pieces[tensor];
                const double mean_ratio = e.mean() / one_rank[tensor].mean();
                const double max_ratio = e.largest / one_rank[tensor].largest;
                std::printf(
                    "%s, carried in %s, %2d ranks, %-3s: %.2e (%.2f), largest %.2e (%.2f)\n", dtype,
                    name_of(carry), ranks, kNames[tensor], e.mean(), mean_ratio, e.largest,
                    max_ratio);

                Row row = result_row(dev, "ring");
                row.add("study", "ring");
                row.add("dtype", dtype);
                row.add("T", o.tokens);
                row.add("NH", o.heads);
                row.add("HS", HS);
                row.add("carry", name_of(carry));
                row.add("ranks", ranks);
                row.add("tensor", kNames[tensor]);
                row.add("mean_error", e.mean());
                row.add("max_error", e.largest);
                row.add("mean_ratio", mean_ratio);
                row.add("max_ratio", max_ratio);
                log.write(row);
            }
        }
    }
}

int main(int argc, char** argv) {
    Options o;
    const std::vector<Option> table = {
        {"--tokens", "", Option::Int, &o.tokens, "tokens per sequence, a multiple of 32",
         "32..65536"},
        {"--heads", "", Option::Int, &o.heads, "number of heads NH", "1..1024"},
        {"--dtype", "", Option::Choice, &o.dtype, "precision", "fp32|bf16|all"},
    };
    const char* const about = "Measures the errors of ring attention by the number of ranks.";
    return bench_main(argc, argv, "study_ring", about, "ring.jsonl", o, table, [&] {
        if (o.tokens % 32)
            throw UsageError(format("--tokens %d is not a multiple of 32", o.tokens));
        RoundingGpu dev;
        dev.tf32 = false;
        Log log = results_log(dev, "ring", o);
        if (o.dtype != "bf16")
            study<float>(dev, {DType::f32}, o, log);
        if (o.dtype != "fp32")
            study<bf16>(dev, {DType::f32, DType::bf16}, o, log);
        return test::failed_checks() ? 1 : 0;
    });
}
