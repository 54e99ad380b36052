// A model's tensors. A struct of pointers lists them, one line each:
//
//     t.each("qkv", &Activations::qkv, N * 3 * C, L);  // (N, 3, NH, HS)
//
// The list drives allocation, the pointers, the memory report and checkpoints. An Arena lays the
// tensors of a list out, and points a struct to one layer's parts of them.
#pragma once
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "common/tensor_spec.h"

struct TensorList : std::vector<TensorSpec> {
    using std::vector<TensorSpec>::vector;
    template <class S, class P>
    void each(const char* name, P* S::* member, const Extent& extent, int layers,
              ParamKind kind = kVector) {
        const S s{};
        const size_t pointer =
            reinterpret_cast<const char*>(&(s.*member)) - reinterpret_cast<const char*>(&s);
        push_back({.name = name,
                   .dtype = type_of<P>(),
                   .rows = extent.rows,
                   .cols = extent.cols,
                   .layers = layers,
                   .kind = kind,
                   .pointer = pointer});
    }
    template <class S, class P>
    void once(const char* name, P* S::* member, const Extent& extent, ParamKind kind = kVector) {
        each(name, member, extent, 0, kind);
    }

  private:
    template <class P>
    static constexpr DType type_of() {
        if constexpr (std::is_void_v<P>)
            return DType::i32;  // bytes, counted in fours
        else
            return dtype_of<P>();
    }
};

struct Arena {
    const char* name = "";
    TensorList tensors;
    std::vector<size_t> offsets;  // bytes from base
    size_t bytes = 0;
    char* base = nullptr;

    Arena() = default;
    // align = 1 packs the tensors as they lie in a checkpoint.
    Arena(const char* name, TensorList list, size_t align = 256)
        : name(name), tensors(std::move(list)) {
        for (const TensorSpec& t : tensors) {
            offsets.push_back(bytes);
            bytes += (t.elements() * size_of(t.dtype) + align - 1) / align * align;
        }
    }
    // Tensor i, or layer l's part of it.
    void* at(size_t i, int l = 0) const {
        const TensorSpec& t = tensors[i];
        if (t.elements() == 0)
            return nullptr;
        return base + offsets[i] +
               (t.layers > 0 ? static_cast<size_t>(l) * t.size() * size_of(t.dtype) : 0);
    }
    // Pointers to layer l's tensors. Without tensors, as in a model that only generates, all are
    // null.
    template <class S>
    S pointers(int l = 0) const {
        S s{};
        for (size_t i = 0; i < tensors.size(); i++) {
            void* const tensor = at(i, l);
            if (tensors[i].pointer == TensorSpec::kNoPointer)
                continue;
            std::memcpy(reinterpret_cast<char*>(&s) + tensors[i].pointer, &tensor, sizeof tensor);
        }
        return s;
    }
};
