#pragma once
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "run/tensors.h"

// If a loss is not finite, this runs the step again, micro-batch by micro-batch, and names the first tensor in the
// order of computation.

// "wpe", or "ln1w of layer 3".
inline std::string place_of(const TensorSpec& t, int l) {
    return t.name + (t.layers > 0 ? format(" of layer %d", l) : "");
}

// An arena's tensors in the order of computation: those before the layers, then layer by layer, then those after them.
inline std::vector<std::pair<size_t, int>> computation_order(const Arena& arena, int layers) {
    size_t first = 0, last = arena.tensors.size();
    while (first < last && arena.tensors[first].layers == 0) first++;
    while (last > first && arena.tensors[last - 1].layers == 0) last--;
    std::vector<std::pair<size_t, int>> order;
    for (size_t i = 0; i < first; i++) order.push_back({i, 0});
    for (int l = 0; l < layers; l++)
        for (size_t i = first; i < last; i++)
            if (arena.tensors[i].layers != TensorSpec::kShared) order.push_back({i, l});
    for (size_t i = last; i < arena.tensors.size(); i++) order.push_back({i, 0});
    return order;
}

// The first tensor of an arena that is not finite, or "".
template <class Model>
std::string first_nonfinite_in(Model& model, const Arena& arena, bool backwards = false) {
    using X = typename Model::X;
    using A = typename Model::A;
    auto order = computation_order(arena, model.config.L);
    if (backwards) std::reverse(order.begin(), order.end());
    for (const auto& [i, l] : order) {
        const TensorSpec& t = arena.tensors[i];
        const void* const x = arena.at(i, l);
        if (!x) continue;
        void* const scratch = model.workspace().scratch;
        const size_t bad = t.dtype == dtype_of<X>()
                               ? count_nonfinite(model.dev, scratch, static_cast<const X*>(x), t.size)
                               : count_nonfinite(model.dev, scratch, static_cast<const A*>(x), t.size);
        if (bad) return format("%s (%s, %zu of %zu elements)", place_of(t, l).c_str(), arena.name, bad, t.size);
    }
    return "";
}

template <class Model>
void check_parameters(Model& model, const std::string& what, const std::string& advice) {
    const std::string bad = first_nonfinite_in(model, model.params);
    if (!bad.empty()) throw Error(what + ": not finite: " + bad + "; " + advice);
}

constexpr char kNoneFound[] = "none on a second run";

template <class Model>
std::string first_nonfinite(Model& model) {
    const bool shared = model.ranks.context > 1;
    std::string found = first_nonfinite_in(model, model.params);
    // No rank that shares sequences may stop before the others do.
    for (int i = 0; i < model.micro_steps && (found.empty() || shared); i++) {
        model.evaluate_micro_batch(i);
        if (found.empty()) found = first_nonfinite_in(model, model.acts);
        if (!found.empty() && !shared) break;
        model.train_micro_batch(i);
        if (found.empty()) found = first_nonfinite_in(model, model.grads, true);
    }
    return found.empty() ? kNoneFound : found;
}
