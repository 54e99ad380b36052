// A model's tensors. Each is declared in one line of a struct that is derived from Tensors:
//
//     X* qkv = each<X>("qkv", N * 3 * C, L);  // (N, 3, NH, HS)
//
// That line drives allocation, the pointer, the memory report, checkpoints and the search for the first tensor that is
// not finite. The struct is made in two ways. Over a list, it adds its tensors to that list, and an Arena lays them
// out. Over an Arena and a layer, its pointers point into the Arena's memory.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "layers/gpu/types.h"

struct TensorSpec {
    const char* name;
    DType dtype;
    size_t size;     // elements, of one layer if there are several
    int layers = 0;  // 0 for a tensor that is not per layer, kShared if every layer overwrites the last one's
    static constexpr int kShared = -1;
    bool decay = false;
    bool matmul = false;  // a matmul's weight
    size_t elements() const { return size * static_cast<size_t>(std::max(layers, 1)); }
};

struct Arena {
    const char* name = "";
    std::vector<TensorSpec> tensors;
    std::vector<size_t> offsets;  // bytes from base
    size_t bytes = 0;
    char* base = nullptr;

    Arena() = default;
    // align = 1 packs the tensors as they lie in a checkpoint.
    Arena(const char* name, std::vector<TensorSpec> specs, size_t align = 256) : name(name), tensors(std::move(specs)) {
        for (const TensorSpec& t : tensors) {
            offsets.push_back(bytes);
            bytes += (t.elements() * size_of(t.dtype) + align - 1) / align * align;
        }
    }
    // Tensor i, or layer l's part of it.
    void* at(size_t i, int l = 0) const {
        if (i >= tensors.size() || tensors[i].elements() == 0) return nullptr;  // as in a model that only generates
        const TensorSpec& t = tensors[i];
        return base + offsets[i] + (t.layers > 0 ? static_cast<size_t>(l) * t.size * size_of(t.dtype) : 0);
    }
};

class Tensors {
  public:
    explicit Tensors(std::vector<TensorSpec>& list) : list_(&list) {}
    explicit Tensors(const Arena& arena, int layer = 0) : arena_(&arena), layer_(layer) {}

  protected:
    // What a parameter is to the optimizer. A table and a matrix decay, and a matrix is a matmul's weight.
    enum Weight { kVector, kTable, kMatrix };
    template <class P>
    P* each(const char* name, size_t size, int layers, Weight weight = kVector) {
        if (list_)
            return list_->push_back({name, type_of<P>(), size, layers, weight != kVector, weight == kMatrix}), nullptr;
        return static_cast<P*>(arena_->at(next_++, layer_));
    }
    template <class P>
    P* once(const char* name, size_t size, Weight weight = kVector) {
        return each<P>(name, size, 0, weight);
    }

  private:
    template <class P>
    static constexpr DType type_of() {
        if constexpr (std::is_void_v<P>)
            return DType::i32;  // bytes, counted in fours
        else
            return dtype_of<P>();
    }
    std::vector<TensorSpec>* list_ = nullptr;
    const Arena* arena_ = nullptr;
    int layer_ = 0;
    size_t next_ = 0;
};

// The tensors of a struct T, which is made of `sizes`.
template <class T, class Sizes>
std::vector<TensorSpec> tensors_of(const Sizes& sizes) {
    std::vector<TensorSpec> list;
    T{Tensors(list), sizes};
    return list;
}
