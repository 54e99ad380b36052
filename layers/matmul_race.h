// The race among algorithms for one matrix product. It picks the fastest of those that compute the bits of the first.
// It is internal to matmul.cu, but a file of its own so that a test can feed the race algorithms of its own.
//
// The promise is that every process computes the bits of the first algorithm, which is the library's first proposal.
// That depends on the GPU model, the driver, the library, the product and its operands' alignment, and on nothing that
// changes from run to run. The others take part only if they give the same bits on hostile operands and on the call's
// own, each with beta = 0 and 1. The hostile operands are the same in every process. So the clock decides the speed
// alone.
//
// An algorithm that adds in another order could pass only by rounding alike in every element of all these results. The
// first wins where nothing can be compared (a small product, too little memory, an operand that is all 0). It is every
// other process's reference too, so a resumed run with more memory, or other values, has the same bits.
#pragma once
#include <functional>
#include <vector>

#include "cuda/cuda.h"

enum class Epilogue { none, bias, gelu };

// D (rows × cols, column-major) = epilogue(op(A)·op(B) + beta·C), with inner dimension k.
struct MatmulProduct {
    size_t rows, cols, k;
    bool transpose_a, transpose_b;
    Epilogue epilogue = Epilogue::none;
    bool accumulate = false;                  // beta = 1
    DType in = DType::f32, out = DType::f32;  // the types of A, B, bias and pre, and of D
};

// `bias` has one value for each row of D. `pre` is D before GELU, which Epilogue::gelu writes. Without `c`, C is D.
struct MatmulOperands {
    void* d;
    const void *a, *b;
    const void* bias = nullptr;
    void* pre = nullptr;
    const void* c = nullptr;
    const void* addend() const { return c ? c : d; }  // C
};

// Enqueues algorithm i, with beta = 1 (`accumulate`) or 0. Returns false if it cannot run.
using RunAlgorithm = std::function<bool(int i, const MatmulOperands&, bool accumulate)>;

struct RaceResult {
    int fastest;
    std::vector<int> equal;  // those that took part, the first and all that gave its bits
};
// Leaves anything in D and pre, but keeps D if the product adds to what is there.
RaceResult race(const Cuda& dev, const MatmulProduct& product, const MatmulOperands& o, int count,
                const RunAlgorithm& run);

// Writes A of a hostile set, or B if `second`. A line is a row of op(A) or a column of op(B). Its k elements lie one
// after the other (k_inner) or `lines` apart. In set 0 the second half of k takes back what the first adds. In set 1
// sizes are mixed too, not only signs. In set 2 each row of A has one large element.
constexpr int kHostileSets = 3;
void fill_hostile(const Cuda& dev, void* x, DType type, size_t lines, size_t k, bool k_inner, int set, bool second);
