// The race among algorithms for one matrix product: the fastest runs, of those that compute the bits of the first.
// Internal to matmul.cu; apart from it so that a test can feed the race algorithms of its own.
//
// What is promised: every process computes the bits of the first algorithm, which is the library's first proposal. That
// depends on the GPU model, the driver, the library, the product and its operands' alignment, and on nothing that
// changes from run to run. Others take part only if they give the same bits on hostile operands, which are the same in
// every process, and on the call's own, each with beta = 0 and 1. The clock then decides the speed alone.
//
// An algorithm that adds in another order could pass only by rounding alike in every element of all these results.
// Where nothing can be compared, the first runs: a small product, too little memory, an operand that is all 0. The
// first is every other process's reference too, so a resumed run with more memory, or other values, has the same bits.
#pragma once
#include <functional>
#include <vector>

#include "layers/cuda.h"

enum class Epilogue { none, bias, gelu };

// D (rows × cols, column-major) = epilogue(op(A)·op(B) + beta·C), with inner dimension k. C is D.
struct MatmulProduct {
    size_t rows, cols, k;
    bool transpose_a, transpose_b;
    Epilogue epilogue = Epilogue::none;
    bool accumulate = false;                   // beta = 1
    DType in = DType::f32, out = DType::f32;  // of A, B, bias and pre; of D
};

// `bias`: one value a row of D. `pre`: D before GELU, written by Epilogue::gelu.
struct MatmulOperands {
    void* d;
    const void *a, *b;
    const void* bias = nullptr;
    void* pre = nullptr;
};

// Enqueues algorithm i, with beta = 1 or 0; false if it cannot run.
using RunAlgorithm = std::function<bool(int i, const MatmulOperands&, bool accumulate)>;

struct RaceResult {
    int fastest;
    std::vector<int> equal;  // who took part: the first, and all that gave its bits
};
// Leaves anything in D and pre, but keeps D if the product accumulates.
RaceResult race(const Cuda& dev, const MatmulProduct& product, const MatmulOperands& o, int count,
                const RunAlgorithm& run);

// Writes A (`second`: B) of a hostile set. A line is a row of op(A), or a column of op(B), of k elements, which lie one
// after the other (k_inner) or `lines` apart. In set 0 the second half of k takes back what the first adds, in set 1
// signs and sizes are mixed, in set 2 each row of A has one large element.
constexpr int kHostileSets = 3;
void fill_hostile(const Cuda& dev, void* x, DType type, size_t lines, size_t k, bool k_inner, int set, bool second);
