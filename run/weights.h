// A model's first parameters: random, or from a file.
#pragma once
#include <algorithm>
#include <cmath>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "parallel/shards.h"
#include "parallel/watchdog.h"
#include "run/checkpoint_files.h"
#include "run/tensors.h"

// A piece of what is read from a file, in pinned memory.
struct FilePiece {
    const char* data;
    size_t offset;  // in what is read
    size_t bytes;
};

// Reads bytes of a file in order and calls use(piece) for each piece, which may be uploaded: its
// memory is used again only when the device has done what was called for it. A thread reads the
// next piece meanwhile. Pieces are whole steps of a checksum, and have `most` bytes at most.
template <class Dev, class F>
void stream_in(const Dev& dev, const InputFile& file, size_t begin, size_t bytes, size_t most,
               F use) {
    if (bytes == 0)
        return;
    constexpr size_t kStep = Checksum64::kStep;
    constexpr size_t kPiece = 32 << 20;
    const size_t needed = (bytes + kStep - 1) / kStep * kStep;
    const size_t size = std::min({kPiece, needed, std::max(most / kStep, size_t(1)) * kStep});
    const auto free = [&](char* p) { dev.free_host(p); };
    const std::unique_ptr<char, decltype(free)> memory(static_cast<char*>(dev.alloc_host(2 * size)),
                                                       free);
    const auto half = [&](size_t at) { return memory.get() + at / size % 2 * size; };
    const auto read = [&](size_t at) {
        file.read(begin + at, half(at), std::min(size, bytes - at));
    };

    std::future<void> reading;  // goes before the memory into which it reads
    read(0);
    for (size_t at = 0; at < bytes; at += size) {
        if (reading.valid())
            reading.get();
        dev.sync();  // the piece before this one is no longer needed
        if (at + size < bytes)
            reading = start_async([&read, at, size] { read(at + size); });
        use(FilePiece{.data = half(at), .offset = at, .bytes = std::min(size, bytes - at)});
        note_progress();
    }
    dev.sync();
}

// Throws Error if a parameter is not finite.
template <class Model>
void check_parameters(Model& model, const std::string& what, const std::string& advice) {
    for (size_t i = 0; i < model.params.tensors.size(); i++) {
        const TensorSpec& t = model.params.tensors[i];
        const auto* x = static_cast<const typename Model::X*>(model.params.at(i));
        const size_t bad = count_nonfinite(model.dev, model.workspace().scratch, x, t.elements());
        if (bad)
            throw Error(format("%s: not finite: %s (%zu of %zu elements); %s", what.c_str(), t.name,
                               bad, t.elements(), advice.c_str()));
    }
}

// GPT-2's initialisation (Radford et al. 2019, §2.3). Weights are normal with σ = 0.02, scaled by
// 1/√(2L) in the two projections into the residual stream. Biases are 0 and layer norm weights 1.
// Padding rows of wte are 0. Parameter i depends on the seed and i alone, so all ranks get the
// same.
template <class Model>
void init_random(Model& model, uint64_t seed) {
    using A = typename Model::A;
    const auto& dev = model.dev;
    const auto& config = model.config;
    const auto own = model.share(model.ranks.rank);
    A* const master = model.optimizer().master;
    size_t begin = 0;  // of the tensor, among all parameters
    for (const TensorSpec& t : model.params.tensors) {
        const std::string name = t.name;
        const bool projection = name == "attprojw" || name == "fcprojw";
        const bool norm_weight = name[0] == 'l' && name.back() == 'w';
        const double sigma = !t.decays() ? 0 : projection ? 0.02 / std::sqrt(2.0 * config.L) : 0.02;
        const double mean = norm_weight ? 1 : 0;
        const size_t used = name == "wte" ? size_t(config.V) * config.C : t.elements();
        const auto fill = [&](auto* x, size_t first, size_t n) {
            const size_t random = first < begin + used ? std::min(n, begin + used - first) : 0;
            init_normal(dev, x, random, mean, sigma, seed, first);
            init_normal(dev, x + random, n - random, 0, 0, seed, 0);
        };
        fill(model.weights().wte + begin, begin, t.elements());
        if (master)
            for_each_part(own, begin, begin + t.elements(), [&](const SharePart& part) {
                fill(master + part.state, part.parameter, part.count);
            });
        begin += t.elements();
    }
    dev.sync();
}

// The parameters of a model file of type File, as X and as this rank's share of the master weights.
template <class File, class Model>
void load_as(Model& model, const InputFile& file) {
    const auto& dev = model.dev;
    const auto own = model.share(model.ranks.rank);
    auto* const master = model.optimizer().master;
    char* const staged = model.acts.base;
    const size_t bytes = model.num_parameters * sizeof(File);
    stream_in(dev, file, kHeaderBytes, bytes, model.acts.bytes, [&](const FilePiece& piece) {
        const File* const values = reinterpret_cast<const File*>(staged);
        const size_t first = piece.offset / sizeof(File);
        const size_t count = piece.bytes / sizeof(File);
        dev.upload(staged, piece.data, piece.bytes);
        convert(dev, model.weights().wte + first, values, count);
        if (master)
            for_each_part(own, first, first + count, [&](const SharePart& part) {
                convert(dev, master + part.state, values + (part.parameter - first), part.count);
            });
    });
}

// Those of a model file, whichever type it has.
template <class Model>
void load(Model& model, const std::string& path) {
    const ModelHeader header = read_model_header(path);
    const InputFile file(path);
    if (header.dtype == DType::bf16)
        load_as<bf16>(model, file);
    else
        load_as<float>(model, file);
    check_parameters(model, path, "give an earlier checkpoint");
}
