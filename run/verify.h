// --verify: a GPU that computes or keeps a wrong bit without an error. A step gives the same bits each time. So the steps
// from a checkpoint to the next one are computed again, and what they end in is compared byte by byte.
//
// Cost: those steps, and a copy of the parameters and the optimizer's state in the host's memory.
// Limit: a GPU that errs twice in the same way is found only on another one.
#pragma once
#include <cstring>
#include <string>
#include <vector>

#include "run/nonfinite.h"

// What steps change, as it is now. A rank has its share of the optimizer's state.
struct Snapshot {
    std::vector<char> params, adam;

    template <class Model>
    explicit Snapshot(const Model& model) : params(model.params.bytes), adam(model.adam.bytes) {
        model.dev.download(params.data(), model.params.base, params.size());
        model.dev.download(adam.data(), model.adam.base, adam.size());
    }
};

// The tensors in which two snapshots differ, and how many of their elements do: "wte (3 of 98304 elements), …", or "".
template <class Model>
std::string differences(const Model& model, const Snapshot& once, const Snapshot& twice) {
    constexpr int kNamed = 3;  // at most so many
    std::string text;
    int found = 0;
    for (const Arena* a : {&model.params, &model.adam}) {
        const bool adam = a == &model.adam;
        const char *x = (adam ? once.adam : once.params).data(), *y = (adam ? twice.adam : twice.params).data();
        for (const auto& [i, l] : computation_order(*a, model.config.L)) {
            const TensorSpec& t = a->tensors[i];
            const size_t bytes = size_of(t.dtype), begin = a->offsets[i] + l * t.size * bytes;
            size_t n = 0;
            for (size_t at = begin; at < begin + t.size * bytes; at += bytes)
                n += std::memcmp(x + at, y + at, bytes) != 0;
            if (n == 0 || ++found > kNamed) continue;
            text += format("%s%s (%zu of %zu elements)", text.empty() ? "" : ", ", place_of(t, l).c_str(), n, t.size);
        }
    }
    return found > kNamed ? text + format(" and %d more", found - kNamed) : text;
}
