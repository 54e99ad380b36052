// Autotuning of the algorithm for one matrix product. It picks the fastest of those that compute
// the bits of the first. It is internal to matmul.cu, but a file of its own so that a test can feed
// it algorithms of its own.
//
// The promise is that every process computes the bits of the first algorithm, which is the
// library's first proposal. That depends on the GPU model, the driver, the library, the product and
// its operands' alignment, and on nothing that changes from run to run. The others take part only
// if they give the same bits on adversarial operands and on the call's own, each with beta = 0 and
// 1. The adversarial operands are the same in every process. So the clock decides the speed alone.
//
// An algorithm that adds in another order could pass only by rounding alike in every element of all
// these results. The first wins where nothing can be compared (a small product, too little memory,
// an operand that is all 0). It is every other process's reference too, so a resumed run with more
// memory, or other values, has the same bits.
#pragma once
#include <compare>
#include <functional>
#include <vector>

#include "cuda/cuda.h"

enum class Epilogue { none, bias, bias_gelu };  // GELU in its tanh form

// D (rows × cols, column-major) = epilogue(op(A)·op(B) + beta·C), with inner dimension k.
struct MatmulProduct {
    size_t rows = 0;
    size_t cols = 0;
    size_t k = 0;
    bool transpose_a = false;
    bool transpose_b = false;
    Epilogue epilogue = Epilogue::none;
    bool accumulate = false;  // beta = 1
    DType in = DType::f32;    // the type of A, B, bias and pre
    DType out = DType::f32;   // the type of D

    auto operator<=>(const MatmulProduct&) const = default;
};

struct MatmulOperands {
    void* d = nullptr;
    const void* a = nullptr;
    const void* b = nullptr;
    const void* bias = nullptr;  // one value for each row of D
    void* pre = nullptr;         // bias_gelu writes D before GELU here
    const void* c = nullptr;     // null: C is D

    const void* addend() const { return c ? c : d; }  // C
};

// Enqueues algorithm i, with beta = 1 (`accumulate`) or 0. Returns false if it cannot run.
using RunAlgorithm = std::function<bool(int i, const MatmulOperands&, bool accumulate)>;

struct AutotuneResult {
    int fastest;
    std::vector<int> equal;  // those that took part, the first and all that gave its bits
};
// Leaves anything in D and pre, but keeps D if the product adds to what is there.
AutotuneResult autotune(const Cuda& dev, const MatmulProduct& product, const MatmulOperands& o,
                        int count, const RunAlgorithm& run);

// One operand of an adversarial set. A line is a row of op(A) or a column of op(B).
struct AdversarialOperand {
    enum Side { kA, kB };
    Side side = kA;
    DType type = DType::f32;
    size_t lines = 0;
    size_t k = 0;          // elements of a line
    bool k_inner = false;  // a line's elements are contiguous; otherwise they are `lines` apart
};
// Writes x. In set 0 the second half of k takes back what the first adds. In set 1 sizes are mixed
// too, not only signs. In set 2 each row of A has one large element.
constexpr int kAdversarialSets = 3;
void fill_adversarial(const Cuda& dev, void* x, int set, const AdversarialOperand& operand);
