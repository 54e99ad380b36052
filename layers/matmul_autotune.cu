// Autotuning of the algorithm for one matrix product (see matmul_autotune.h).
#include <algorithm>
#include <array>

#include "common/random.h"
#include "layers/layers.h"
#include "layers/matmul_autotune.h"

namespace {

constexpr double kAutotuneFlops = 1e9;  // smaller products are not worth it
constexpr int kThreads = 256;
constexpr int kRounds = 5;  // of the clock
constexpr int kMedian = kRounds / 2;

template <class X>
__global__ void adversarial_kernel(X* x, size_t lines, size_t K, bool k_inner, int set,
                                   bool second) {
    for (size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x; i < lines * K;
         i += size_t(gridDim.x) * kThreads) {
        const size_t line = k_inner ? i / K : i % lines;
        const size_t k = k_inner ? i % K : i / lines;
        const bool mirror = set == 0 && k > K - 1 - k;
        const auto h = mix64(mix64(2 * set + second + 1) + line * K + (mirror ? K - 1 - k : k));
        float value = 1.f + (h >> 40) * 0x1p-24f;  // random bits to the last
        if (h & 1)
            value = -value;
        if (mirror && second)
            value = -value;
        if (set == 1)
            value = ldexpf(value, static_cast<int>(h >> 1 & 15) - 8);
        if (set == 2 && !second && k == mix64(line + 1) % K)
            value *= 4096.f;
        x[i] = X(value);
    }
}

// -------------------------------------------------------------------------------------------------

// What an algorithm makes of its operands: checksums.
struct Outcome {
    bool ran = false;
    uint64_t d = 0;
    uint64_t pre = 0;

    bool operator==(const Outcome&) const = default;
};
struct Outcomes {
    Outcome written;  // by beta = 0
    Outcome added;    // by beta = 1

    bool operator==(const Outcomes&) const = default;
};

// Milliseconds that three runs take.
template <class F>
float time_of(const Cuda& dev, F run) {
    cudaEvent_t start;
    cudaEvent_t end;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&end));
    CUDA_CHECK(cudaEventRecord(start, dev.stream));
    for (int i = 0; i < 3; i++)
        run();
    CUDA_CHECK(cudaEventRecord(end, dev.stream));
    CUDA_CHECK(cudaEventSynchronize(end));
    float ms;
    CUDA_CHECK(cudaEventElapsedTime(&ms, start, end));
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(end));
    return ms;
}

}  // namespace

void fill_adversarial(const Cuda& dev, void* x, int set, const AdversarialOperand& operand) {
    const auto launch = [&](auto* x) {
        const bool second = operand.side == AdversarialOperand::kB;
        adversarial_kernel<<<8 * dev.num_sms, kThreads, 0, dev.stream>>>(
            x, operand.lines, operand.k, operand.k_inner, set, second);
    };
    if (operand.type == DType::bf16)
        launch(static_cast<bf16*>(x));
    else
        launch(static_cast<float*>(x));
    LAUNCH_CHECK("adversarial_kernel");
}

AutotuneResult autotune(const Cuda& dev, const MatmulProduct& p, const MatmulOperands& o, int count,
                        const RunAlgorithm& run) {
    AutotuneResult result = {0, {0}};
    if (count == 1 || 2. * p.rows * p.cols * p.k < kAutotuneFlops)
        return result;
    for (const void* x : {o.a, o.b, static_cast<const void*>(o.d), static_cast<const void*>(o.pre)})
        if (reinterpret_cast<uintptr_t>(x) % 4)
            return result;  // checksums read words
    const size_t a_bytes = p.rows * p.k * size_of(p.in);
    const size_t b_bytes = p.k * p.cols * size_of(p.in);
    const size_t d_bytes = p.rows * p.cols * size_of(p.out);
    const size_t pre_bytes = p.rows * p.cols * size_of(p.in);
    const auto sum = [&](const void* x, size_t bytes) {
        return checksum(dev, dev.workspace, x, bytes);
    };
    if (!sum(o.a, a_bytes) || !sum(o.b, b_bytes))
        return result;

    // The memory holds adversarial A and B, and also D if the call's own D holds what the product
    // is added to.
    const auto aligned = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
    const bool in_place = p.accumulate && !o.c;
    const size_t b_at = aligned(a_bytes);
    const size_t d_at = b_at + aligned(b_bytes);
    const size_t bytes = d_at + (in_place ? d_bytes : 0);
    if (dev.free_bytes() < 2 * bytes)
        return result;
    char* memory;
    try {
        memory = static_cast<char*>(dev.alloc(bytes));
    } catch (const OutOfMemory&) {
        return result;
    }
    MatmulOperands own = o;
    if (in_place)
        own.d = memory + d_at;
    MatmulOperands adversarial = own;
    // the same in every process
    adversarial.a = memory;
    adversarial.b = memory + b_at;
    adversarial.c = nullptr;

    // What algorithm i makes of x. First it makes D = A·B, then it adds A·B to that, because those
    // that split K may add D before their parts or behind them.
    const auto outcome = [&](int i, const MatmulOperands& x) {
        const auto product = [&](bool accumulate) {
            Outcome made;
            made.ran = run(i, x, accumulate);
            made.d = sum(x.d, d_bytes);
            if (x.pre)
                made.pre = sum(x.pre, pre_bytes);
            return made;
        };
        dev.zero(x.d, d_bytes);  // nobody is judged by what another left there
        const Outcome written = product(false);
        const Outcome added = product(true);
        return Outcomes{.written = written, .added = added};
    };
    std::vector<int>& equal = result.equal;
    for (int i = 1; i < count; i++)
        equal.push_back(i);
    for (int set = 0; set <= kAdversarialSets && equal.size() > 1; set++) {
        const bool adversarial_set = set < kAdversarialSets;
        if (adversarial_set) {
            fill_adversarial(dev, memory, set,
                             {.side = AdversarialOperand::kA,
                              .type = p.in,
                              .lines = p.rows,
                              .k = p.k,
                              .k_inner = p.transpose_a});
            fill_adversarial(dev, memory + b_at, set,
                             {.side = AdversarialOperand::kB,
                              .type = p.in,
                              .lines = p.cols,
                              .k = p.k,
                              .k_inner = !p.transpose_b});
        }
        const MatmulOperands& x = adversarial_set ? adversarial : own;
        const Outcomes expected = outcome(0, x);
        equal.erase(std::remove_if(equal.begin() + 1, equal.end(),
                                   [&](int i) { return outcome(i, x) != expected; }),
                    equal.end());
    }
    // They take turns, because the GPU slows down while it gets warm. The median of a candidate's
    // times counts.
    std::vector<std::array<float, kRounds>> times(equal.size());
    for (int round = 0; round < kRounds && equal.size() > 1; round++)
        for (size_t k = 0; k < equal.size(); k++)
            times[k][round] = time_of(dev, [&] { run(equal[k], own, p.accumulate); });
    for (auto& t : times)
        std::sort(t.begin(), t.end());
    const auto fastest = std::min_element(times.begin(), times.end(),
                                          [](auto& a, auto& b) { return a[kMedian] < b[kMedian]; });
    result.fastest = equal[fastest - times.begin()];
    dev.free(memory);
    return result;
}
