// What a model needs: every tensor's bytes, and what to do if there are too few.
#pragma once
#include <cstdio>
#include <string>

#include "common/error.h"
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
    std::printf("%-12s %-10s %-5s %6s %14s %12s %14s\n", "arena", "tensor", "dtype", "layers",
                "elements", "MiB", "bytes/token");
    for (const Arena* a : model.arenas())
        for (const TensorSpec& t : a->tensors) {
            const double bytes = static_cast<double>(t.elements() * size_of(t.dtype));
            const std::string per_token = a == &model.acts ? format("%.1f", bytes / tokens) : "";
            if (bytes > 0)
                std::printf("%-12s %-10s %-5s %6d %14zu %12.2f %14s\n", a->name, t.name,
                            name_of(t.dtype), std::max(t.layers, 0), t.elements(), bytes / kMiB,
                            per_token.c_str());
        }
    std::printf("%-44s %26.2f %14.1f\n", "total, and activations per token",
                model.total_bytes() / kMiB, model.acts.bytes / tokens);
    if (model.training)
        std::printf("%-44s %26.2f\n", "host memory for checkpoints, with -o",
                    snapshot_bytes(model) / kMiB);
}

// "parameters 3.3, gradients 3.3, …", in a unit of so many bytes.
template <class Model>
std::string by_arena(Model& model, double unit, int digits) {
    std::string text;
    for (const Arena* a : model.arenas())
        if (a->bytes)
            text += format("%s%s %.*f", text.empty() ? "" : ", ", a->name, digits, a->bytes / unit);
    return text;
}

// If there is too little memory, it says what each arena asked for and the largest -b that would
// fit in what is free.
template <class Model>
void allocate_or_explain(Model& model) {
    const size_t free_bytes = model.dev.free_bytes();
    if (model.total_bytes() <= free_bytes)
        return model.allocate();
    const auto bytes_with = [&](int b) {
        auto settings = model.settings;
        settings.B = b;
        settings.micro_steps = 1;
        return Model(model.dev, model.config, settings, model.ranks).total_bytes();
    };
    int b = model.B - 1;
    while (b > 0 && bytes_with(b) > free_bytes)
        b--;
    std::string way_out = b > 0 ? format("-b %d would fit", b)
                                : "not even -b 1 fits: use a smaller -t, a smaller model, or more "
                                  "GPUs with --context-parallel";
    if (model.training && model.recompute < 2)
        way_out += "; --recompute 2 needs less";
    throw OutOfMemory(format("%s has %.2f GiB free, the model needs %.2f GiB at B=%d T=%d (%s): %s",
                             model.dev.name.c_str(), free_bytes / kGiB, model.total_bytes() / kGiB,
                             model.B, model.sequence(), by_arena(model, kGiB, 2).c_str(),
                             way_out.c_str()));
}
