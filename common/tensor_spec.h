// What one tensor of a model is.
#pragma once
#include <algorithm>

#include "common/types.h"

// What a parameter is to the optimizer. A table and a matrix decay, and a matrix is a matmul's weight.
enum Weight { kVector, kTable, kMatrix };

struct TensorSpec {
    const char* name;
    DType dtype;
    size_t size;     // elements, of one layer if there are several
    int layers = 0;  // 0 for a tensor that is not per layer, kShared if every layer overwrites the last one's
    static constexpr int kShared = -1;
    bool decay = false;
    bool matmul = false;  // a matmul's weight
    static constexpr size_t kNoPointer = ~size_t(0);
    size_t pointer = kNoPointer;  // where its pointer is in the struct, in bytes
    size_t elements() const { return size * static_cast<size_t>(std::max(layers, 1)); }
};
