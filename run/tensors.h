// A model's tensors. A struct of pointers lists its tensors, one line each:
//
//     t.each("qkv", &Activations::qkv, N * 3 * C, L);  // (N, 3, NH, HS)
//
// The list is all that allocation, memory report and checkpoints need to know about a tensor. An
// Arena is one piece of memory for the tensors of a list. It fills the struct with the pointers to
// one layer's tensors.
#pragma once
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "common/tensor_spec.h"

struct TensorList : std::vector<TensorSpec> {
    using std::vector<TensorSpec>::vector;

    // A tensor that each of `layers` layers has. S is the struct, P the type of an element.
    template <class S, class P>
    void each(const char* name, P* S::* member, const Extent& extent, int layers,
              ParamKind kind = kVector) {
        push_back({.name = name,
                   .dtype = type_of<P>(),
                   .rows = extent.rows,
                   .cols = extent.cols,
                   .layers = layers,
                   .kind = kind,
                   .pointer_offset = offset_of(member)});
    }

    // A tensor of the whole model.
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

    // offsetof() for a pointer to a member.
    template <class S, class P>
    static size_t offset_of(P* S::* member) {
        const S s{};
        return reinterpret_cast<const char*>(&(s.*member)) - reinterpret_cast<const char*>(&s);
    }
};

struct Arena {
    const char* name = "";
    TensorList tensors;
    std::vector<size_t> offsets;  // of the tensors, in bytes from base
    size_t bytes = 0;
    char* base = nullptr;

    Arena() = default;

    // Each tensor starts at a multiple of `align` bytes. With 1 they are packed, as in a model
    // file.
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
        const size_t layer = t.layers > 0 ? l : 0;
        return base + offsets[i] + layer * t.layer_elements() * size_of(t.dtype);
    }

    // A struct of pointers to layer l's tensors. An empty tensor's pointer is null.
    template <class S>
    S pointers(int l = 0) const {
        S s{};
        for (size_t i = 0; i < tensors.size(); i++) {
            if (tensors[i].pointer_offset == TensorSpec::kNoPointer)
                continue;
            void* const tensor = at(i, l);
            std::memcpy(reinterpret_cast<char*>(&s) + tensors[i].pointer_offset, &tensor,
                        sizeof tensor);
        }
        return s;
    }
};
