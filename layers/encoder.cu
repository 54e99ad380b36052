// Encoder: token and position embeddings.
//
//   out[b,t] = wte[token[b,t]] + wpe[p(t)]
//   dwte[v]    += Σ_{(b,t): token[b,t] = v} dout[b,t]
//   dwpe[p(t)] += Σ_b dout[b,t]
//
// p(t) = t, except on a rank that has only some of a sequence's tokens. Row b·T + t of the batch is
// that of token[b,t].
//
// With atomics, the sums in dwte would be added in a different order on every run, and thousands of
// blocks would queue for the row of a common token. Instead the host, which knows the batch before
// the GPU does, sorts the batch's rows by token. It cuts them into chunks of at most kEncoderChunk
// (common/types.h) rows of one token:
//
//   order    3 9 | 0 1 4 7 … (32 rows) | 41 42 … (11 rows) |  2  | …
//   token     17 |         262         |        262        | 318 |
//
// In pass 1 each block sums a chunk's rows of dout. If that is the token's only chunk, the sum is
// added to dwte at once; otherwise it is stored in scratch as a partial sum, a vector of C fp32.
// Pass 2 adds the partial sums, in order, of each token that has several. So the sums have a fixed
// order, and the work of a block is bounded however skewed the batch is.
//
// The launches depend on N alone, so that they can be captured in a CUDA graph. The kernels are
// memory-bound. Backward reads dout twice, once for wte and once for wpe.
//
// Writes: out.  Adds into: dwte, dwpe.
// Limits: any C; B·T must fit in an int.
#include <algorithm>
#include <vector>

#include "cuda/vector.cuh"
#include "layers/layers.h"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocksPerSM = 6;  // of pass 1: about as many as its registers allow

// A plan is what the host works out for a batch, as plain ints, so that it travels with the tokens.
// A "multi" is a token with several chunks, each of which makes a partial sum.
//
// The layout is where the parts of a plan start, with room for the most that N rows can need. A
// multi has at least kEncoderChunk + 1 rows, so there are at most N / (kEncoderChunk + 1) multis.
// A multi of r rows has ⌈r / kEncoderChunk⌉ partial sums, at most 2r / (kEncoderChunk + 1).
struct PlanLayout {
    size_t max_chunks;
    size_t max_multis;
    size_t max_partials;
    // Where each part starts, as an index of the plan's ints.
    size_t order;  // (N)           rows of the batch, sorted by token
    size_t begin;  // (chunks + 1)  chunk c is order[begin[c] .. begin[c + 1])
    size_t dest;   // (chunks)      where the chunk's sum goes: a token, or dest_of_partial()
    size_t multi;  // (multis, 3)   a Multi
    size_t ints;   // of the whole plan

    explicit PlanLayout(size_t N)
        : max_chunks(N),
          max_multis(N / (kEncoderChunk + 1)),
          max_partials(2 * N / (kEncoderChunk + 1)) {
        order = 2;  // after the numbers of chunks and of multis
        begin = order + N;
        dest = begin + max_chunks + 1;
        multi = dest + max_chunks;
        ints = multi + 3 * max_multis;
    }
};

// The dest of a chunk whose sum is partial sum p, because its token has several chunks. It is
// negative, unlike a token.
inline int dest_of_partial(int p) {
    return -1 - p;
}
__device__ inline int partial_of_dest(int dest) {
    return -1 - dest;
}

// A view of a plan that gives its parts names. Kernels only read it, so their Int is const int.
template <class Int>
struct EncoderPlan {
    struct Multi {
        Int& token;
        Int& first_partial;
        Int& end_partial;  // one past its last
    };

    Int* ints;
    PlanLayout at;

    __host__ __device__ Int& chunks() const { return ints[0]; }
    __host__ __device__ Int& multis() const { return ints[1]; }
    __host__ __device__ Int* order() const { return ints + at.order; }
    __host__ __device__ Int& begin(int chunk) const { return ints[at.begin + chunk]; }
    __host__ __device__ Int& end(int chunk) const { return ints[at.begin + chunk + 1]; }
    __host__ __device__ Int& dest(int chunk) const { return ints[at.dest + chunk]; }
    __host__ __device__ Int* rows(int chunk) const {  // end − begin of them
        return ints + at.order + ints[at.begin + chunk];
    }
    __host__ __device__ Multi multi(int m) const {
        Int* const entry = ints + at.multi + 3 * size_t(m);
        return {.token = entry[0], .first_partial = entry[1], .end_partial = entry[2]};
    }
};

// One warp per row.
template <class X, int V>
__global__ void __launch_bounds__(kThreads)
    encoder_forward_kernel(X* __restrict__ out, const int* __restrict__ tokens,
                           const X* __restrict__ wte, const X* __restrict__ wpe, size_t N, int T,
                           int C, Positions positions) {
    const size_t row = size_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    if (row >= N)
        return;

    const X* token = wte + size_t(tokens[row]) * C;
    const X* position = wpe + size_t(positions.at(row % T)) * C;
    for (int c = (threadIdx.x % kWarp) * V; c < C; c += kWarp * V) {
        const auto x = load<V>(token + c);
        const auto y = load<V>(position + c);
        Vec<float, V> sum;
        for (int i = 0; i < V; i++)
            sum.x[i] = x[i] + y[i];
        store(out + row * C + c, sum);
    }
}

// Computes dwpe. A thread owns V columns of one t and adds over the batch.
template <class X, int V>
__global__ void __launch_bounds__(kThreads)
    position_backward_kernel(float* __restrict__ dwpe, const X* __restrict__ dout, int B, size_t TC,
                             int C, Positions positions) {
    const size_t i = (size_t(blockIdx.x) * kThreads + threadIdx.x) * V;  // element of (T,C)
    if (i >= TC)
        return;

    Vec<float, V> sum = {};
#pragma unroll 8
    for (int b = 0; b < B; b++) {
        const auto dy = load<V>(dout + b * TC + i);
        for (int k = 0; k < V; k++)
            sum.x[k] += dy[k];
    }

    const int t = i / C;
    const size_t c = i % C;
    float* dposition = dwpe + size_t(positions.at(t)) * C + c;
    auto total = load<V>(dposition);
    for (int k = 0; k < V; k++)
        total.x[k] += sum[k];
    store(dposition, total);
}

// Pass 1. A block handles chunks blockIdx.x, blockIdx.x + gridDim.x, …; a thread owns V columns.
template <class X, int V>
__global__ void __launch_bounds__(kThreads)
    token_backward_kernel(float* __restrict__ dwte, float* __restrict__ partials,
                          const X* __restrict__ dout, const int* __restrict__ plan_ints,
                          PlanLayout at, int C) {
    const EncoderPlan<const int> plan = {.ints = plan_ints, .at = at};
    const int num_chunks = plan.chunks();
    for (int chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
        const int* rows = plan.rows(chunk);
        const int count = plan.end(chunk) - plan.begin(chunk);
        const int dest = plan.dest(chunk);
        for (int c = threadIdx.x * V; c < C; c += blockDim.x * V) {
            // dwte is loaded early, so that its latency overlaps the sum.
            Vec<float, V> total = {};
            if (dest >= 0)
                total = load<V>(dwte + size_t(dest) * C + c);

            Vec<float, V> sum = {};
#pragma unroll 4
            for (int r = 0; r < count; r++) {
                const auto dy = load<V>(dout + size_t(rows[r]) * C + c);
                for (int k = 0; k < V; k++)
                    sum.x[k] += dy[k];
            }

            for (int k = 0; k < V; k++)
                total.x[k] += sum[k];
            if (dest >= 0)
                store(dwte + size_t(dest) * C + c, total);
            else
                store(partials + size_t(partial_of_dest(dest)) * C + c, total);
        }
    }
}

// Pass 2. A block owns 32 columns (blockIdx.y) of a token. Each warp adds every kWarps-th partial
// sum, then warp 0 adds the warps' sums.
__global__ void __launch_bounds__(kThreads)
    token_partials_kernel(float* __restrict__ dwte, const float* __restrict__ partials,
                          const int* __restrict__ plan_ints, PlanLayout at, int C) {
    __shared__ float sum_smem[kWarps][kWarp];
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int c = blockIdx.y * kWarp + lane;
    const EncoderPlan<const int> plan = {.ints = plan_ints, .at = at};
    const int num_multis = plan.multis();
    for (int m = blockIdx.x; m < num_multis; m += gridDim.x) {
        const auto multi = plan.multi(m);
        const int token = multi.token;
        const int first = multi.first_partial;
        const int end = multi.end_partial;

        float sum = 0.f;
        if (c < C)
#pragma unroll 8
            for (int p = first + warp; p < end; p += kWarps)
                sum += partials[size_t(p) * C + c];
        sum_smem[warp][lane] = sum;
        __syncthreads();

        if (warp == 0 && c < C) {
            for (int w = 1; w < kWarps; w++)
                sum += sum_smem[w][lane];
            dwte[size_t(token) * C + c] += sum;
        }
        __syncthreads();  // before the next token's sums overwrite these
    }
}

}  // namespace

// -------------------------------------------------------------------------------------------------

template <class X>
void encoder_forward(const Cuda& dev, X* out, const int* tokens, const X* wte, const X* wpe, int B,
                     int T, int C, const Positions& positions) {
    const size_t N = size_t(B) * T;
    if (N == 0)
        return;

    const auto kernel = vectorises<X>(C, out, wte, wpe) ? encoder_forward_kernel<X, kVec<X>>
                                                        : encoder_forward_kernel<X, 1>;
    kernel<<<ceil_div(N, kWarps), kThreads, 0, dev.stream>>>(out, tokens, wte, wpe, N, T, C,
                                                             positions);
    LAUNCH_CHECK("encoder_forward_kernel");
}

size_t encoder_scratch_bytes(const Cuda&, int B, int T, int C) {
    return PlanLayout(size_t(B) * T).max_partials * C * sizeof(float);
}

size_t encoder_plan_ints(const Cuda&, size_t N) {
    return PlanLayout(N).ints;
}

// Writes the rows to `order`, sorted by token (a counting sort). Returns where the rows of each
// token start, and where the last token's end.
static std::vector<int> sort_by_token(int* order, const int* tokens, size_t N) {
    int token_end = 0;  // one past the largest token
    for (size_t i = 0; i < N; i++) {
        if (tokens[i] < 0)
            throw Error(format("encoder_plan: token %d at position %zu is negative", tokens[i], i));
        token_end = std::max(token_end, tokens[i] + 1);
    }

    std::vector<int> start(token_end + 1, 0);
    for (size_t i = 0; i < N; i++)
        start[tokens[i] + 1]++;
    for (int token = 0; token < token_end; token++)
        start[token + 1] += start[token];

    std::vector<int> next(start);
    for (size_t i = 0; i < N; i++) {
        const int token = tokens[i];
        order[next[token]] = static_cast<int>(i);
        next[token]++;
    }
    return start;
}

void encoder_plan(const Cuda&, int* ints, const int* tokens, size_t N) {
    const EncoderPlan<int> plan = {.ints = ints, .at = PlanLayout(N)};
    const std::vector<int> start = sort_by_token(plan.order(), tokens, N);
    const int token_end = static_cast<int>(start.size()) - 1;

    int chunks = 0;
    int multis = 0;
    int partials = 0;
    for (int token = 0; token < token_end; token++) {
        const int begin = start[token];
        const int end = start[token + 1];
        const bool several = end - begin > kEncoderChunk;
        const int first_partial = partials;
        for (int i = begin; i < end; i += kEncoderChunk) {
            plan.begin(chunks) = i;
            plan.dest(chunks) = several ? dest_of_partial(partials) : token;
            chunks++;
            if (several)
                partials++;
        }

        if (several) {
            const auto multi = plan.multi(multis);
            multi.token = token;
            multi.first_partial = first_partial;
            multi.end_partial = partials;
            multis++;
        }
    }

    plan.begin(chunks) = static_cast<int>(N);
    plan.chunks() = chunks;
    plan.multis() = multis;
}

template <class X>
void encoder_backward(const Cuda& dev, float* dwte, float* dwpe, void* scratch, const X* dout,
                      const int* plan, int B, int T, int C, const Positions& positions) {
    const size_t N = size_t(B) * T;
    const size_t TC = size_t(T) * C;
    if (N == 0)
        return;

    const PlanLayout at(N);
    float* partials = static_cast<float*>(scratch);
    const bool vector = vectorises<X>(C, dout, dwte, dwpe, partials);
    const int V = vector ? kVec<X> : 1;

    const auto position_kernel =
        vector ? position_backward_kernel<X, kVec<X>> : position_backward_kernel<X, 1>;
    position_kernel<<<ceil_div(TC, kThreads * V), kThreads, 0, dev.stream>>>(dwpe, dout, B, TC, C,
                                                                             positions);
    LAUNCH_CHECK("position_backward_kernel");

    const int threads = std::min<int>(kThreads, ceil_div(C, V * kWarp) * kWarp);
    const size_t blocks_per_sm = kBlocksPerSM * (kThreads / threads);
    const size_t blocks = std::min(at.max_chunks, dev.num_sms * blocks_per_sm);
    const auto token_kernel =
        vector ? token_backward_kernel<X, kVec<X>> : token_backward_kernel<X, 1>;
    token_kernel<<<static_cast<unsigned>(blocks), threads, 0, dev.stream>>>(dwte, partials, dout,
                                                                            plan, at, C);
    LAUNCH_CHECK("token_backward_kernel");

    if (at.max_multis == 0)
        return;
    const size_t multi_blocks = std::min<size_t>(at.max_multis, dev.num_sms);
    const dim3 grid(static_cast<unsigned>(multi_blocks), ceil_div(C, kWarp));
    token_partials_kernel<<<grid, kThreads, 0, dev.stream>>>(dwte, partials, plan, at, C);
    LAUNCH_CHECK("token_partials_kernel");
}

#define INSTANTIATE(X)                                                                            \
    template void encoder_forward(const Cuda&, X*, const int*, const X*, const X*, int, int, int, \
                                  const Positions&);                                              \
    template void encoder_backward(const Cuda&, float*, float*, void*, const X*, const int*, int, \
                                   int, int, const Positions&);
INSTANTIATE(float)
INSTANTIATE(bf16)
