// Autotuning of the algorithm for one matrix product (matmul_autotune.h).
#include <algorithm>
#include <array>
#include <numeric>

#include "common/random.h"
#include "layers/layers.h"
#include "layers/matmul_autotune.h"

namespace {

constexpr double kAutotuneFlops = 1e9;  // smaller products are not worth it
constexpr int kThreads = 256;
constexpr int kBlocksPerSM = 8;
constexpr int kTimings = 5;  // per candidate
constexpr int kMedian = kTimings / 2;
constexpr int kRunsPerTiming = 3;
constexpr float kLargeFactor = 4096.f;  // of set 2's large elements, one at a random k of a line

// Each element is made from a hash: bit 0 is its sign, bits 1–4 an exponent in set 1, and bits
// 40–63 a mantissa that is random down to its last bit.
template <class X>
__global__ void adversarial_kernel(X* x, size_t lines, size_t K, bool k_inner, int set, bool is_b) {
    for (size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x; i < lines * K;
         i += size_t(gridDim.x) * kThreads) {
        const size_t line = k_inner ? i / K : i % lines;
        const size_t k = k_inner ? i % K : i / lines;

        // In set 0 the second half of k mirrors the first, in B with the opposite sign.
        const bool mirrored = set == 0 && k > K - 1 - k;
        const uint64_t seed = mix64(2 * set + int{is_b} + 1);
        const uint64_t hash = mix64(seed + line * K + (mirrored ? K - 1 - k : k));
        const bool negative = hash & 1;
        const int exponent = static_cast<int>((hash >> 1) & 15) - 8;

        float value = 1.f + (hash >> 40) * 0x1p-24f;
        if (negative)
            value = -value;
        if (mirrored && is_b)
            value = -value;
        if (set == 1)
            value = ldexpf(value, exponent);
        if (set == 2 && !is_b && k == mix64(line + 1) % K)
            value *= kLargeFactor;
        x[i] = X(value);
    }
}

// -------------------------------------------------------------------------------------------------

// Checksums of what one call of an algorithm wrote.
struct Outcome {
    bool ran = false;
    uint64_t d = 0;
    uint64_t pre = 0;

    bool operator==(const Outcome&) const = default;
};
struct Outcomes {
    Outcome written;  // beta = 0
    Outcome added;    // beta = 1

    bool operator==(const Outcomes&) const = default;
};

// The candidates for one product.
struct Candidates {
    const Cuda& dev;
    const MatmulProduct& product;
    const RunAlgorithm& run;

    size_t a_bytes() const { return product.rows * product.k * size_of(product.in); }
    size_t b_bytes() const { return product.k * product.cols * size_of(product.in); }
    size_t d_bytes() const { return product.rows * product.cols * size_of(product.out); }
    size_t pre_bytes() const { return product.rows * product.cols * size_of(product.in); }

    uint64_t checksum_of(const void* x, size_t bytes) const {
        return checksum(dev, dev.workspace, x, bytes);
    }
    bool can_be_compared(const MatmulOperands& o) const;

    Outcome outcome(int i, const MatmulOperands& o, bool accumulate) const;
    Outcomes outcomes(int i, const MatmulOperands& o) const;
    // Removes those whose bits on o are not the first one's.
    void keep_equal(std::vector<int>& equal, const MatmulOperands& o) const;

    float milliseconds(int i, const MatmulOperands& o) const;
    int fastest_of(const std::vector<int>& equal, const MatmulOperands& o) const;
};

// Checksums need aligned words, and an operand that is all 0 hides every difference.
bool Candidates::can_be_compared(const MatmulOperands& o) const {
    for (const void* x : {o.a, o.b, static_cast<const void*>(o.d), static_cast<const void*>(o.pre)})
        if (reinterpret_cast<uintptr_t>(x) % sizeof(uint32_t) != 0)
            return false;
    return checksum_of(o.a, a_bytes()) != 0 && checksum_of(o.b, b_bytes()) != 0;
}

Outcome Candidates::outcome(int i, const MatmulOperands& o, bool accumulate) const {
    Outcome result;
    result.ran = run(i, o, accumulate);
    result.d = checksum_of(o.d, d_bytes());
    if (o.pre)
        result.pre = checksum_of(o.pre, pre_bytes());
    return result;
}

// Algorithm i first writes D = A·B and then adds A·B to that, because an algorithm that splits K
// may add the old D before its parts or after them.
Outcomes Candidates::outcomes(int i, const MatmulOperands& o) const {
    dev.zero(o.d, d_bytes());  // so that no result of another algorithm is left there
    const Outcome written = outcome(i, o, false);
    const Outcome added = outcome(i, o, true);
    return {.written = written, .added = added};
}

void Candidates::keep_equal(std::vector<int>& equal, const MatmulOperands& o) const {
    const Outcomes expected = outcomes(0, o);
    equal.erase(std::remove_if(equal.begin() + 1, equal.end(),
                               [&](int i) { return outcomes(i, o) != expected; }),
                equal.end());
}

// How long kRunsPerTiming runs take.
float Candidates::milliseconds(int i, const MatmulOperands& o) const {
    cudaEvent_t start;
    cudaEvent_t end;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&end));

    CUDA_CHECK(cudaEventRecord(start, dev.stream));
    for (int r = 0; r < kRunsPerTiming; r++)
        run(i, o, product.accumulate);
    CUDA_CHECK(cudaEventRecord(end, dev.stream));
    CUDA_CHECK(cudaEventSynchronize(end));

    float ms;
    CUDA_CHECK(cudaEventElapsedTime(&ms, start, end));
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(end));
    return ms;
}

// The one with the smallest median. They are timed in turn, because the GPU slows down as it gets
// warm.
int Candidates::fastest_of(const std::vector<int>& equal, const MatmulOperands& o) const {
    if (equal.size() == 1)
        return equal[0];

    std::vector<std::array<float, kTimings>> times(equal.size());
    for (int timing = 0; timing < kTimings; timing++)
        for (size_t e = 0; e < equal.size(); e++)
            times[e][timing] = milliseconds(equal[e], o);

    for (auto& t : times)
        std::sort(t.begin(), t.end());
    const auto fastest = std::min_element(times.begin(), times.end(),
                                          [](auto& a, auto& b) { return a[kMedian] < b[kMedian]; });
    return equal[fastest - times.begin()];
}

void fill_adversarial_operands(const Cuda& dev, int set, const MatmulProduct& p, void* a, void* b) {
    fill_adversarial(dev, a, set,
                     {.side = AdversarialOperand::kA,
                      .type = p.in,
                      .lines = p.rows,
                      .k = p.k,
                      .k_inner = p.transpose_a});
    fill_adversarial(dev, b, set,
                     {.side = AdversarialOperand::kB,
                      .type = p.in,
                      .lines = p.cols,
                      .k = p.k,
                      .k_inner = !p.transpose_b});
}

size_t round_up_to_256(size_t bytes) {
    return (bytes + 255) / 256 * 256;
}

}  // namespace

void fill_adversarial(const Cuda& dev, void* x, int set, const AdversarialOperand& operand) {
    const auto launch = [&](auto* x) {
        const bool is_b = operand.side == AdversarialOperand::kB;
        adversarial_kernel<<<kBlocksPerSM * dev.num_sms, kThreads, 0, dev.stream>>>(
            x, operand.lines, operand.k, operand.k_inner, set, is_b);
    };
    if (operand.type == DType::bf16)
        launch(static_cast<bf16*>(x));
    else
        launch(static_cast<float*>(x));
    LAUNCH_CHECK("adversarial_kernel");
}

AutotuneResult autotune(const Cuda& dev, const MatmulProduct& p, const MatmulOperands& o, int count,
                        const RunAlgorithm& run) {
    AutotuneResult first_wins = {.fastest = 0, .equal = {0}};
    const Candidates candidates = {.dev = dev, .product = p, .run = run};
    if (count == 1 || 2. * p.rows * p.cols * p.k < kAutotuneFlops)
        return first_wins;
    if (!candidates.can_be_compared(o))
        return first_wins;

    // The memory holds adversarial A and B. It also holds D if the product adds to what is in the
    // call's own D, which must not change.
    const bool own_d_is_input = p.accumulate && !o.c;
    const size_t b_offset = round_up_to_256(candidates.a_bytes());
    const size_t d_offset = b_offset + round_up_to_256(candidates.b_bytes());
    const size_t bytes = d_offset + (own_d_is_input ? candidates.d_bytes() : 0);
    if (dev.free_bytes() < 2 * bytes)
        return first_wins;
    char* memory;
    try {
        memory = static_cast<char*>(dev.alloc(bytes));
    } catch (const OutOfMemory&) {
        return first_wins;
    }

    // The call's own A and B, and the adversarial ones. Both write the same D.
    MatmulOperands own = o;
    if (own_d_is_input)
        own.d = memory + d_offset;
    MatmulOperands adversarial = own;
    adversarial.a = memory;
    adversarial.b = memory + b_offset;
    adversarial.c = nullptr;

    std::vector<int> equal(count);
    std::iota(equal.begin(), equal.end(), 0);
    for (int set = 0; set < kAdversarialSets && equal.size() > 1; set++) {
        fill_adversarial_operands(dev, set, p, memory, memory + b_offset);
        candidates.keep_equal(equal, adversarial);
    }
    if (equal.size() > 1)
        candidates.keep_equal(equal, own);

    const int fastest = candidates.fastest_of(equal, own);
    dev.free(memory);
    return {.fastest = fastest, .equal = equal};
}
