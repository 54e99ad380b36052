// Autotuning of the algorithm for one matrix product: picks the fastest of the candidates whose
// results are bit-identical to the first one's. Only matmul.cu uses it; it is a file of its own so
// that a test can give it other algorithms.
//
// The promise is that every process computes the bits of the first algorithm, which is the one that
// the library proposes first. That choice depends on the GPU model, the driver, the library, the
// product and its operands' alignment, and on nothing that changes from run to run. Another
// algorithm qualifies only if it gives the same bits on adversarial operands, which are the same in
// every process, and on the call's own operands, each with beta = 0 and 1. So what the clock
// decides is only the speed.
//
// An algorithm that adds in another order could qualify only if it rounded alike in every element
// of all these results. If nothing can be compared (a small product, too little memory, an operand
// that is all 0), the first algorithm is used. As it is the reference in every other process too, a
// resumed run with more memory, or with other values, gives the same bits.
#pragma once
#include <compare>
#include <functional>
#include <vector>

#include "cuda/cuda.h"

enum class Epilogue { none, bias, bias_gelu };  // GELU in its tanh form

// D (rows × cols, column-major) = epilogue(op(A)·op(B) + beta·C), with inner dimension k. beta is 1
// if `accumulate`, and 0 otherwise.
struct MatmulProduct {
    size_t rows = 0;
    size_t cols = 0;
    size_t k = 0;
    bool transpose_a = false;
    bool transpose_b = false;
    Epilogue epilogue = Epilogue::none;
    bool accumulate = false;
    DType in = DType::f32;   // the type of A, B, bias and pre
    DType out = DType::f32;  // the type of D

    auto operator<=>(const MatmulProduct&) const = default;
};

struct MatmulOperands {
    void* d = nullptr;
    const void* a = nullptr;
    const void* b = nullptr;
    const void* bias = nullptr;  // one value per row of D
    void* pre = nullptr;         // for bias_gelu: receives the argument of GELU
    const void* c = nullptr;     // null: C is D

    const void* addend() const { return c ? c : d; }  // C
};

// Enqueues algorithm i, with beta = 1 if `accumulate`, else 0. Returns false if it cannot run.
using RunAlgorithm = std::function<bool(int i, const MatmulOperands&, bool accumulate)>;

struct AutotuneResult {
    int fastest;
    std::vector<int> equal;  // the first and all that gave its bits
};

// Tries algorithms 0 to count − 1, each by `run`; algorithm 0 is the library's first proposal.
// Overwrites D and pre, except that D is kept if the product adds to what is there.
AutotuneResult autotune(const Cuda& dev, const MatmulProduct& product, const MatmulOperands& o,
                        int count, const RunAlgorithm& run);

// One operand of an adversarial set. A line is a row of op(A) or a column of op(B): the k numbers
// of a dot product.
struct AdversarialOperand {
    enum Side { kA, kB };
    Side side = kA;
    DType type = DType::f32;
    size_t lines = 0;
    size_t k = 0;          // elements of a line
    bool k_inner = false;  // a line's elements are contiguous; otherwise they are `lines` apart
};

constexpr int kAdversarialSets = 3;
// Writes x. In set 0, the second half of k cancels what the first half adds. In set 1, elements
// vary in magnitude, not only in sign. In set 2, each row of A has one large element.
void fill_adversarial(const Cuda& dev, void* x, int set, const AdversarialOperand& operand);
