// The parameters a model starts with: random ones, or those of a file.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
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

// Reads file[begin, begin + bytes) in order and calls use(piece) for each piece, while a thread
// reads the next one. `use` may start an upload of the piece: its memory is not overwritten before
// the device has done everything it was given. All pieces but the last are whole steps of a
// checksum: as many as fit into both 32 MiB and `most_per_piece` bytes, or one if none fits.
template <class Dev, class F>
void stream_in(const Dev& dev, const InputFile& file, size_t begin, size_t bytes, F use,
               size_t most_per_piece = SIZE_MAX) {
    if (bytes == 0)
        return;
    constexpr size_t kStep = Checksum64::kStep;
    constexpr size_t kPiece = 32 << 20;
    const size_t needed = (bytes + kStep - 1) / kStep * kStep;
    const size_t allowed = std::max(most_per_piece / kStep, size_t(1)) * kStep;
    const size_t size = std::min({kPiece, needed, allowed});

    // Two buffers: one is used while the other is filled.
    const auto free = [&](char* p) { dev.free_host(p); };
    const std::unique_ptr<char, decltype(free)> memory(static_cast<char*>(dev.alloc_host(2 * size)),
                                                       free);
    const auto buffer = [&](size_t at) { return memory.get() + ((at / size) % 2) * size; };
    const auto read = [&](size_t at) {
        file.read(begin + at, buffer(at), std::min(size, bytes - at));
    };

    std::future<void> reading;  // is destroyed, and so waited for, before the memory it reads into
    read(0);
    for (size_t at = 0; at < bytes; at += size) {
        if (reading.valid())
            reading.get();
        dev.sync();  // the previous piece is no longer needed
        if (at + size < bytes)
            reading = start_async([&read, at, size] { read(at + size); });
        use(FilePiece{.data = buffer(at), .offset = at, .bytes = std::min(size, bytes - at)});
        note_progress();
    }
    dev.sync();
}

// Throws an Error that begins with `what` if a parameter is not finite.
template <class Model>
void check_parameters(Model& model, const std::string& what, const std::string& advice) {
    for (size_t i = 0; i < model.params.tensors.size(); i++) {
        const TensorSpec& t = model.params.tensors[i];
        const auto* x = static_cast<const typename Model::X*>(model.params.at(i));
        const size_t bad = count_nonfinite(model.dev, model.workspace().scratch, x, t.elements());
        if (bad > 0)
            throw Error(format("%s: %s: %zu of %zu elements are not finite; %s", what.c_str(),
                               t.name, bad, t.elements(), advice.c_str()));
    }
}

// The normal distribution that a tensor's first values are drawn from: GPT-2's initialisation
// (Radford et al. 2019, §2.3). Weights have σ = 0.02, scaled by 1/√(2L) in the two projections into
// the residual stream. Biases are 0 and layer norm weights 1.
struct InitialDistribution {
    double mean;
    double sigma;
};
inline InitialDistribution initial_distribution(const TensorSpec& t, int L) {
    const std::string name = t.name;
    if (name == "attprojw" || name == "fcprojw")
        return {.mean = 0, .sigma = 0.02 / std::sqrt(2.0 * L)};
    const bool is_weight = t.decays();  // a matrix or an embedding table
    if (is_weight)
        return {.mean = 0, .sigma = 0.02};
    const bool norm_weight = name == "ln1w" || name == "ln2w" || name == "lnfw";
    return {.mean = norm_weight ? 1.0 : 0.0, .sigma = 0};
}

// Padding rows of wte are 0. Parameter i depends on the seed and i alone, so all ranks get the
// same.
template <class Model>
void init_random(Model& model, uint64_t seed) {
    using A = typename Model::A;
    const auto& dev = model.dev;
    const Config& config = model.config;
    const auto own = model.share(model.ranks.rank);
    A* const master = model.optimizer().master;

    size_t begin = 0;  // of the tensor, among all parameters
    for (const TensorSpec& t : model.params.tensors) {
        const InitialDistribution init = initial_distribution(t, config.L);
        const bool padded = std::string(t.name) == "wte";
        const size_t end = begin + t.elements();
        const size_t padding_begin = padded ? begin + size_t(config.V) * config.C : end;
        // Writes parameters first … first + n - 1, of which those from padding_begin on are 0.
        const auto fill = [&](auto* x, size_t first, size_t n) {
            const size_t drawn = first < padding_begin ? std::min(n, padding_begin - first) : 0;
            init_normal(dev, x, drawn, init.mean, init.sigma, seed, first);

            constexpr InitialDistribution zero = {.mean = 0, .sigma = 0};
            init_normal(dev, x + drawn, n - drawn, zero.mean, zero.sigma, seed, first + drawn);
        };
        fill(model.all_parameters() + begin, begin, t.elements());
        if (master)
            for_each_part(own, begin, end, [&](const SharePart& part) {
                fill(master + part.state_begin, part.begin, part.size);
            });
        begin = end;
    }
    dev.sync();
}

// Loads a model file whose parameters are stored as `File`: all of them as X, and this rank's share
// as master weights. The memory of activations holds each piece before it is converted.
template <class File, class Model>
void load_as(Model& model, const InputFile& file) {
    const auto& dev = model.dev;
    const auto own = model.share(model.ranks.rank);
    auto* const master = model.optimizer().master;
    char* const staged = model.acts.base;
    const size_t bytes = model.num_parameters * sizeof(File);
    const auto use = [&](const FilePiece& piece) {
        const File* const values = reinterpret_cast<const File*>(staged);
        const size_t first = piece.offset / sizeof(File);
        const size_t count = piece.bytes / sizeof(File);
        dev.upload(staged, piece.data, piece.bytes);
        convert(dev, model.all_parameters() + first, values, count);
        if (master)
            for_each_part(own, first, first + count, [&](const SharePart& part) {
                convert(dev, master + part.state_begin, values + (part.begin - first), part.size);
            });
    };
    const size_t most_per_piece = model.acts.bytes;  // room for `staged`
    stream_in(dev, file, kHeaderBytes, bytes, use, most_per_piece);
}

// Loads a model file of either type.
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
