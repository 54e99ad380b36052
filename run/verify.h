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
#include <sstream>
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
};

inline uint64_t checksum(const Cpu&, void*, const void* x, size_t bytes) {
    return checksum64(x, bytes);
}

// A step's checksums on this rank: "dwte=… dwpe=… … m=… v=…". Gradients are not yet summed over the ranks if the
// optimizer is divided among them.
template <class Model>
std::string checksums(const Model& model) {
    std::string text;
    for (const Arena* a : {&model.grads, &model.adam})
        for (size_t i = 0; i < a->tensors.size(); i++) {
            const TensorSpec& t = a->tensors[i];
            const size_t bytes = t.elements() * size_of(t.dtype);
            const uint64_t sum = checksum(model.dev, model.workspace().scratch, a->at(i), bytes);
            text += format("%s%s=%016zx ", a == &model.grads ? "d" : "", t.name, sum);
        }
    return text;
}

// The checksums of rank 0 by step, from the log of a run with --verify-every.
inline std::map<int, std::string> logged_checksums(const std::string& path) {
    std::map<int, std::string> sums;
    std::ifstream log(path);
    for (std::string line; std::getline(log, line);) {
        const size_t step = line.find("\"step\": "), begin = line.find("dwte=");
        if (step < begin && begin < line.size()) sums[std::atoi(&line[step + 8])] = line.substr(begin);
    }
    return sums;
}

inline std::string some_of(const std::vector<std::string>& names) {
    std::string text;
    for (size_t i = 0; i < names.size() && i < 3; i++) text += (i ? ", " : "") + names[i];
    return names.size() <= 3 ? text : text + format(" and %zu more", names.size() - 3);
}

// Where the checksums of a step differ: a key that orders such places by step and tensor, and the place in words.
constexpr size_t kKey = 14;
inline std::string difference(int step, const std::string& once, const std::string& twice) {
    std::istringstream a(once), b(twice);
    std::vector<std::string> names;
    int at = 0, first = 0;
    for (std::string x, y; a >> x && b >> y && y.find('=') != y.npos; at++) {
        if (x.compare(0, y.size(), y) == 0) continue;
        if (names.empty()) first = at;
        names.push_back(y.substr(0, y.find('=')));
    }
    return names.empty() ? "" : format("%010d%03d step %d (%s)", step, first, step, some_of(names).c_str());
}

// The tensors in which two snapshots differ, with how many of their elements do.
template <class Model>
std::vector<std::string> differences(const Model& model, const Snapshot& once, const Snapshot& twice) {
    std::vector<std::string> found;
    if (once.params == twice.params && once.adam == twice.adam) return found;
    for (const Arena* a : {&model.params, &model.adam}) {
        const bool adam = a == &model.adam;
        const char *x = (adam ? once.adam : once.params).data(), *y = (adam ? twice.adam : twice.params).data();
        for (const auto& [i, l] : computation_order(*a, model.config.L)) {
            const TensorSpec& t = a->tensors[i];
            const size_t bytes = size_of(t.dtype), begin = a->offsets[i] + l * t.size * bytes;
            size_t n = 0;
            for (size_t at = begin; at < begin + t.size * bytes; at += bytes)
                n += std::memcmp(x + at, y + at, bytes) != 0;
            if (n) found.push_back(format("%s (%zu of %zu elements)", place_of(t, l).c_str(), n, t.size));
        }
    }
    return found;
}

// Throws the same Corruption on all ranks if any rank's state after the steps differs. A rank is named if the first
// difference is its alone, and if the same GPUs computed the steps both times.
template <class Model>
void throw_if_different(const Model& model, Job& job, const Snapshot& once, const Snapshot& twice,
                        const std::string& first, bool same_gpus, int from, const std::string& advice) {
    const std::vector<std::string> places = job.all_gather(first),
                                   ends = job.all_gather(some_of(differences(model, once, twice)));
    std::string place, end;
    int rank = -1;  // of the first place, -1 if it is that of several
    for (int r = 0; r < job.size; r++) {
        if (end.empty()) end = ends[r];
        const int order = place.empty() ? -1 : places[r].compare(0, kKey, place, 0, kKey);
        if (places[r].empty() || order > 0) continue;
        rank = order < 0 ? r : -1, place = places[r];
    }
    if (end.empty()) return;
    const bool known = rank >= 0 && same_gpus;
    const std::string gpu = !known ? "unknown" : job.size == 1 ? model.dev.name : format("rank %d", rank);
    throw Corruption(format("steps %d to %d computed twice differ, first in %s; on GPU: %s; after them in %s; %s", from,
                            twice.step, place.empty() ? "an unknown step" : &place[kKey], gpu.c_str(), end.c_str(),
                            advice.c_str()));
}
