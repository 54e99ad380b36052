// Silent corruption is a GPU that computes or keeps a wrong bit without an error. A step gives the same bits each time,
// so steps are computed twice and compared: in a running job (--verify-every), or between two checkpoints (--verify).
// What counts is the state after the steps. Each step's checksums only tell where a difference began.
//
// Cost: twice the time, and a read of gradients and optimizer state in each step.
// Memory: on the host twice the parameters and the optimizer's state, of which a rank may have a share. None on the GPU.
// Limit: a GPU that errs twice in the same way is found only by --verify on another one.
#pragma once
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "data/loader.h"
#include "layers/comm/job.h"
#include "run/nonfinite.h"

// What steps change.
struct Snapshot {
    int step = -1;
    LoaderState position{};
    std::vector<char> params, adam;

    template <class Model>
    void take(const Model& model, int at_step, const LoaderState& at) {
        step = at_step, position = at;
        params.resize(model.params.bytes), adam.resize(model.adam.bytes);
        model.dev.download(params.data(), model.params.base, params.size());
        model.dev.download(adam.data(), model.adam.base, adam.size());
    }
    template <class Model>
    void put_back(const Model& model) const {
        model.dev.upload(model.params.base, params.data(), params.size());
        model.dev.upload(model.adam.base, adam.data(), adam.size());
        model.dev.sync();
    }
};

inline uint64_t checksum(const Cpu&, void*, const void* x, size_t bytes) {
    return checksum64(x, bytes);
}
constexpr size_t kChecksumText = 17;

// A step's checksums on this rank, in hex. They are of its gradients, not yet summed over the ranks if the optimizer is
// divided among them, and of its optimizer state.
template <class Model>
std::string checksums(const Model& model) {
    std::string text;
    for (const Arena* a : {&model.grads, &model.adam})
        for (size_t i = 0; i < a->tensors.size(); i++) {
            const TensorSpec& t = a->tensors[i];
            const size_t bytes = t.elements() * size_of(t.dtype);
            const uint64_t sum = checksum(model.dev, model.workspace().scratch, a->at(i), bytes);
            text += format("%016llx ", static_cast<unsigned long long>(sum));
        }
    return text;
}

// The checksums of rank 0 by step, from the log of a run with --verify-every.
inline std::map<int, std::string> logged_checksums(const std::string& path) {
    std::map<int, std::string> sums;
    std::ifstream log(path);
    const std::string before = "\"checksums\": \"";
    for (std::string line; std::getline(log, line);) {
        const size_t step = line.find("\"step\": "), begin = line.find(before) + before.size();
        if (step != std::string::npos && begin >= before.size())
            sums[std::atoi(line.c_str() + step + 8)] = line.substr(begin, line.rfind('"') - begin);
    }
    return sums;
}

inline std::string some_of(const std::vector<std::string>& names) {
    std::string text;
    for (size_t i = 0; i < names.size() && i < 3; i++) text += (i ? ", " : "") + names[i];
    return names.size() <= 3 ? text : text + format(" and %zu more", names.size() - 3);
}

// Where two computations of a step differ first: the step, 0 for its gradients or 1 for the optimizer, and in words.
constexpr size_t kPlaceText = 11;
template <class Model>
std::string difference(const Model& model, int step, const std::string& once, const std::string& twice) {
    if (once.size() != twice.size()) return "";  // there is no checksum of the first time
    size_t at = 0;
    for (const Arena* a : {&model.grads, &model.adam}) {
        std::vector<std::string> names;
        for (const TensorSpec& t : a->tensors) {
            if (once.compare(at, kChecksumText, twice, at, kChecksumText)) names.push_back(t.name);
            at += kChecksumText;
        }
        if (!names.empty())
            return format("%010d%d step %d (%s: %s)", step, a == &model.adam, step, a->name, some_of(names).c_str());
    }
    return "";
}

// The tensors of an arena in which two copies of it differ, with how many of their elements do.
inline std::vector<std::string> differences(const Arena& arena, int layers, const std::vector<char>& once,
                                            const std::vector<char>& twice) {
    std::vector<std::string> found;
    if (once == twice) return found;
    for (const auto& [i, l] : computation_order(arena, layers)) {
        const TensorSpec& t = arena.tensors[i];
        const size_t bytes = size_of(t.dtype), begin = arena.offsets[i] + l * t.size * bytes;
        size_t n = 0;
        for (size_t at = begin; at < begin + t.size * bytes; at += bytes)
            n += std::memcmp(&once[at], &twice[at], bytes) != 0;
        const std::string layer = t.layers > 0 ? format(" of layer %d", l) : "";
        if (n) found.push_back(format("%s%s (%zu of %zu elements)", t.name, layer.c_str(), n, t.size));
    }
    return found;
}

// Throws the same Corruption on all ranks if any rank's state after the steps differs. A rank is named if the first
// difference is its alone, and if the same GPUs computed the steps both times.
template <class Model>
void throw_if_different(const Model& model, Job& job, const Snapshot& once, const Snapshot& twice,
                        const std::string& first, bool same_gpus, int from, const std::string& advice) {
    std::vector<std::string> differ = differences(model.params, model.config.L, once.params, twice.params);
    for (const std::string& d : differences(model.adam, model.config.L, once.adam, twice.adam)) differ.push_back(d);
    const std::vector<std::string> places = job.all_gather(first), ends = job.all_gather(some_of(differ));
    std::string earliest, end;
    int rank = -1;
    for (int r = 0; r < job.size; r++) {
        if (end.empty()) end = ends[r];
        const int order = earliest.empty() ? -1 : places[r].compare(0, kPlaceText, earliest, 0, kPlaceText);
        if (places[r].empty() || order > 0) continue;
        rank = order < 0 ? r : -1;
        if (order < 0) earliest = places[r];
    }
    if (end.empty()) return;
    const std::string place = earliest.empty() ? "an unknown step" : earliest.substr(kPlaceText + 1);
    const bool known = rank >= 0 && same_gpus;
    const std::string gpu = !known ? "unknown" : job.size == 1 ? model.dev.name : format("rank %d", rank);
    throw Corruption(format("steps %d to %d computed twice differ, first in %s; on GPU: %s; after them in %s; %s", from,
                            twice.step, place.c_str(), gpu.c_str(), end.c_str(), advice.c_str()));
}
