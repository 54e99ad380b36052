// What a model needs in memory: every tensor's bytes, and what to do if there is too little.
#pragma once
#include <cstdio>
#include <string>

#include "common/error.h"
#include "run/buffers.h"
#include "run/tensors.h"

constexpr double kMiB = 1 << 20;
constexpr double kGiB = 1 << 30;

// The snapshot of a checkpoint in rank 0's host memory.
template <class Model>
size_t snapshot_bytes(const Model& model) {
    return model.ranks.rank > 0 ? 0 : model.params.bytes + model.adam.bytes * model.shards();
}

// Prints the size of every tensor and, of activations, also the bytes per token.
template <class Model>
void print_memory_table(Model& model) {
    const double tokens = static_cast<double>(model.B) * model.T;
    std::printf("%-12s %-10s %-5s %6s %14s %12s %14s\n", "arena", "tensor", "dtype", "layers",
                "elements", "MiB", "bytes/token");
    for (const Arena* a : model.arenas()) {
        for (const TensorSpec& t : a->tensors) {
            const double bytes = static_cast<double>(t.elements() * size_of(t.dtype));
            if (bytes == 0)
                continue;
            const std::string per_token = a == &model.acts ? format("%.1f", bytes / tokens) : "";
            std::printf("%-12s %-10s %-5s %6d %14zu %12.2f %14s\n", a->name, t.name,
                        name_of(t.dtype), std::max(t.layers, 0), t.elements(), bytes / kMiB,
                        per_token.c_str());
        }
    }
    std::printf("%-44s %26.2f %14.1f\n", "total, and activations per token",
                model.total_bytes() / kMiB, model.acts.bytes / tokens);
    if (model.training)
        std::printf("%-44s %26.2f\n", "host memory for checkpoints, with -o",
                    snapshot_bytes(model) / kMiB);
}

// "parameters 3.3, gradients 3.3, …", in multiples of `unit` bytes.
template <class Model>
std::string by_arena(Model& model, double unit, int digits) {
    std::string text;
    for (const Arena* a : model.arenas()) {
        if (a->bytes == 0)
            continue;
        text += text.empty() ? "" : ", ";
        text += format("%s %.*f", a->name, digits, a->bytes / unit);
    }
    return text;
}

// The largest B below the model's with which it would fit into `free_bytes`, or 0.
template <class Model>
int largest_batch(const Model& model, size_t free_bytes) {
    for (int b = model.B - 1; b > 0; b--) {
        auto settings = model.settings;
        settings.B = b;
        settings.micro_steps = 1;  // -d may ask for more, but each needs only some 20 bytes a token
        Model smaller(model.dev, model.config, settings, model.ranks);
        if (smaller.total_bytes() <= free_bytes)
            return b;
    }
    return 0;
}

// Allocates the model's memory. If there is too little, the error says what each arena needs and
// the largest -b that would fit.
template <class Model>
void allocate_or_explain(Model& model) {
    const size_t free_bytes = model.dev.free_bytes();
    if (model.total_bytes() <= free_bytes)
        return model.allocate();

    const int b = largest_batch(model, free_bytes);
    std::string advice =
        b > 0 ? format("-b %d would fit", b)
              : "not even -b 1 would fit, so use a smaller -t, a smaller model, or more GPUs with "
                "--context-parallel";
    if (model.training && model.recompute < kRecomputeNorms)
        advice += "; --recompute 2 needs less";
    throw OutOfMemory(format(
        "out of memory: %s has %.2f GiB free, but the model needs %.2f GiB at B=%d T=%d (%s); %s",
        model.dev.name.c_str(), free_bytes / kGiB, model.total_bytes() / kGiB, model.B,
        model.sequence_length(), by_arena(model, kGiB, 2).c_str(), advice.c_str()));
}
