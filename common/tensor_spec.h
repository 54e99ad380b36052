// The description of one tensor of the model: name, type, shape, and what the optimizer needs to
// know about it.
#pragma once
#include <algorithm>

#include "common/types.h"

// What a parameter is to the optimizer. Tables and matrices decay, vectors do not. A matrix is the
// weight of a matmul, a table is not. So the token embeddings are a matrix, because the logits use
// them too, and the position embeddings are a table.
enum ParamKind { kVector, kTable, kMatrix };

// (rows, cols), or a vector of n elements.
struct Extent {
    size_t rows;
    size_t cols;
    Extent(size_t rows, size_t cols) : rows(rows), cols(cols) {}
    Extent(size_t n) : rows(1), cols(n) {}
};

struct TensorSpec {
    static constexpr int kShared = -1;
    static constexpr size_t kNoPointer = ~size_t(0);

    const char* name;
    DType dtype;
    size_t rows;  // of one layer, if there are several
    size_t cols;
    // 0 for a tensor that is not per layer, kShared if all layers use the same memory in turn
    int layers = 0;
    ParamKind kind = kVector;
    // where the pointer to this tensor is in its struct of pointers, in bytes
    size_t pointer_offset = kNoPointer;

    size_t layer_elements() const { return rows * cols; }
    // of all layers; kShared is one layer's memory
    size_t elements() const { return layer_elements() * static_cast<size_t>(std::max(layers, 1)); }
    bool decays() const { return kind != kVector; }
    bool is_matrix() const { return kind == kMatrix; }
};
