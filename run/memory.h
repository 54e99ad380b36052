// What a model needs: every tensor's bytes, and what to do if there are too few.
#pragma once
#include <cstdio>
#include <string>

#include "layers/gpu/error.h"
#include "run/tensors.h"

constexpr double kMiB = 1 << 20, kGiB = 1 << 30;

// Of a checkpoint in rank 0's host memory, from which it is written while training goes on.
template <class Model>
size_t snapshot_bytes(const Model& model) {
    return model.ranks.rank > 0 ? 0 : model.params.bytes + model.adam.bytes * model.shards();
}

// Prints every tensor's size, and for what grows with the batch also the bytes that one token adds.
template <class Model>
void print_memory_table(Model& model) {
    const double tokens = static_cast<double>(model.B) * model.T;
    std::printf("%-12s %-10s %-5s %6s %14s %12s %14s\n", "arena", "tensor", "dtype", "layers", "elements", "MiB",
                "bytes/token");
    for (const Arena* a : model.arenas())
        for (const TensorSpec& t : a->tensors) {
            const double bytes = static_cast<double>(t.elements() * size_of(t.dtype));
            const std::string per_token = a == &model.acts ? format("%.1f", bytes / tokens) : "";
            if (bytes > 0)
                std::printf("%-12s %-10s %-5s %6d %14zu %12.2f %14s\n", a->name, t.name, name_of(t.dtype),
                            std::max(t.layers, 0), t.elements(), bytes / kMiB, per_token.c_str());
        }
    std::printf("%-44s %26.2f %14.1f\n", "total, and activations per token", model.total_bytes() / kMiB,
                model.acts.bytes / tokens);
    if (model.training)
        std::printf("%-44s %26.2f\n", "host memory for checkpoints, with -o", snapshot_bytes(model) / kMiB);
}

// Allocates the model, or says how much is free and how much it needs.
template <class Model>
void allocate_or_explain(Model& model) {
    const size_t free_bytes = model.dev.free_bytes();
    if (model.total_bytes() > free_bytes)
        throw OutOfMemory(format("%s has %.2f GiB free, the model needs %.2f GiB at B=%d T=%d; use a smaller -b or -t",
                                 model.dev.name.c_str(), free_bytes / kGiB, model.total_bytes() / kGiB, model.B,
                                 model.sequence()));
    model.allocate();
}
