// A model's first parameters: random, or from a file.
#pragma once
#include <cmath>
#include <string>
#include <vector>

#include "data/random.h"
#include "run/checkpoint.h"
#include "run/ranks.h"
#include "run/settings.h"
#include "run/tensors.h"

// Throws Error if a parameter is not finite.
template <class Model>
void check_parameters(Model& model, const std::string& what, const std::string& advice) {
    for (size_t i = 0; i < model.params.tensors.size(); i++) {
        const TensorSpec& t = model.params.tensors[i];
        const auto* x = static_cast<const typename Model::X*>(model.params.at(i));
        const size_t bad = count_nonfinite(model.dev, model.workspace().scratch, x, t.elements());
        if (bad)
            throw Error(format("%s: not finite: %s (%zu of %zu elements); %s", what.c_str(), t.name, bad, t.elements(),
                               advice.c_str()));
    }
}

// Uploads the values as X, and as this rank's share of the master weights. The host rounds them to X.
template <class Model>
void set_parameters(Model& model, std::vector<typename Model::A>& values) {
    using A = typename Model::A;
    using X = typename Model::X;
    const auto& dev = model.dev;
    const size_t n = model.num_parameters;
    if (A* const master = model.optimizer().master) {
        std::vector<A> own(n / model.shards());
        for_each_piece(model.share(model.ranks.rank), n, model.shards(), 1,
                       [&](size_t at, size_t state, size_t n) { std::copy_n(&values[at], n, &own[state]); });
        dev.upload(master, own.data(), own.size() * sizeof(A));
        dev.sync();
    }
    std::vector<X> rounded(Model::has_master ? n : 0);
#pragma omp parallel for
    for (size_t i = 0; i < rounded.size(); i++) rounded[i] = static_cast<X>(values[i]);
    dev.upload(model.params.base, Model::has_master ? static_cast<void*>(rounded.data()) : values.data(),
               model.params.bytes);
    dev.sync();
}

// GPT-2's initialisation (Radford et al. 2019, §2.3). Weights are normal with σ = 0.02, scaled by 1/√(2L) in the two
// projections into the residual stream. Biases are 0 and layer norm weights 1. Padding rows of wte are 0.
template <class Model>
void init_random(Model& model, uint64_t seed) {
    using A = typename Model::A;
    const auto& config = model.config;
    std::vector<A> values(model.num_parameters);
    size_t at = 0;
    for (const TensorSpec& t : model.params.tensors) {
        const std::string name = t.name;
        const bool projection = name == "attprojw" || name == "fcprojw",
                   norm_weight = name[0] == 'l' && name.back() == 'w';
        const double sigma = 0.02 / (projection ? std::sqrt(2.0 * config.L) : 1.0);
        const size_t used = name == "wte" ? size_t(config.V) * config.C : t.elements();
#pragma omp parallel for
        for (size_t i = 0; i < used; i++)
            values[at + i] = static_cast<A>(t.decay ? sigma * normal(seed, at + i) : norm_weight ? 1.0 : 0.0);
        at += t.elements();
    }
    set_parameters(model, values);
}

// Those of a model file, whichever type it has.
template <class Model>
void load(Model& model, const std::string& path) {
    using A = typename Model::A;
    const size_t n = model.num_parameters;
    const ModelHeader header = read_model_header(path);
    std::vector<A> values(n);
    const auto read_as = [&](auto type) {
        std::vector<decltype(type)> raw(n);
        read_model_parameters(path, header, raw.data());
        for (size_t i = 0; i < n; i++) values[i] = static_cast<A>(static_cast<float>(raw[i]));
    };
    header.dtype == DType::bf16 ? read_as(bf16{}) : read_as(float{});
    set_parameters(model, values);
    check_parameters(model, path, "give an earlier checkpoint");
}
