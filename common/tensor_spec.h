// What one tensor of a model is.
#pragma once
#include <algorithm>

#include "common/types.h"

// What a parameter is to the optimizer. A table and a matrix decay, and a matrix is a matmul's
// weight.
enum Weight { kVector, kTable, kMatrix };

// (rows, cols), or a vector of n elements.
struct Extent {
    size_t rows;
    size_t cols;
    Extent(size_t rows, size_t cols) : rows(rows), cols(cols) {}
    Extent(size_t n) : rows(1), cols(n) {}
};

struct TensorSpec {
    const char* name;
    DType dtype;
    size_t rows;  // of one layer, if there are several
    size_t cols;
    // 0 for a tensor that is not per layer, kShared if every layer overwrites the last one's
    int layers = 0;
    static constexpr int kShared = -1;
    Weight weight = kVector;
    static constexpr size_t kNoPointer = ~size_t(0);
    size_t pointer = kNoPointer;  // where its pointer is in the struct, in bytes

    size_t size() const { return rows * cols; }  // elements of one layer
    size_t elements() const { return size() * static_cast<size_t>(std::max(layers, 1)); }
    bool decays() const { return weight != kVector; }
    bool is_matrix() const { return weight == kMatrix; }
};
