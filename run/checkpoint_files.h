// The files of a checkpoint: llm.c's model files, and our training state. Each is written under a
// temporary name, synced and then renamed, so that a file with its final name is always complete.
#pragma once
#include <sstream>
#include <string>
#include <vector>

#include "common/field.h"
#include "common/types.h"
#include "data/file.h"
#include "data/loader.h"

// Throws an Error that says which file is wrong, in what, what was expected and found, and what to
// do.
template <class Expected, class Found>
[[noreturn]] void refuse(const std::string& path, const std::string& what, const Expected& expected,
                         const Found& found, const char* advice) {
    std::ostringstream text;
    text << path << ": " << what << ": expected " << expected << ", found " << found << "; "
         << advice;
    throw Error(text.str());
}

inline std::string hex(uint64_t checksum) {
    return format("%016zx", checksum);
}

// -------------------------------------------------------------------------------------------------
// llm.c's model files. The header is 256 int32: magic 20240326, version 3 (fp32) or 5 (bf16), then
// maxT, V, L, NH, C, Vp, and zeros. The sixteen tensors follow in llm.c's order, each with all
// its layers.
struct Config {
    int max_T;  // positions
    int V;      // vocabulary
    int Vp;     // vocabulary, padded
    int L;      // layers
    int NH;     // heads
    int C;      // channels

    int HS() const { return C / NH; }  // channels of a head
    size_t num_parameters() const;     // in all sixteen tensors
    // Of forward and backward: each parameter costs 2 FLOPs in forward and 4 in backward, and
    // causal attention 6·L·C·T.
    size_t flops_per_token(int T) const {
        return 6 * num_parameters() + 6 * static_cast<size_t>(L) * C * T;
    }
};
struct ModelHeader {
    DType dtype;
    Config config;
    size_t bytes() const { return config.num_parameters() * size_of(dtype); }  // of the parameters
};
std::string description(const ModelHeader&);  // "fp32, L=12 NH=12 C=768 V=50257"
// Throws an Error if there is no such file, or if its magic, version, sizes or length are wrong.
ModelHeader read_model_header(const std::string& path);
void write_model(const std::string& path, const ModelHeader&, const void* parameters);

// -------------------------------------------------------------------------------------------------
// The training state (ours): a text head, one checksum, and the optimizer's arrays. Its format is
// in checkpoint_files.cpp.

// The settings of a run that its state records, by name.
struct Identity {
    // These must be the same to resume: {"B", "4"}, {"precision", "bf16"}, …
    Fields fields;
    // These may be changed on purpose, the schedule and the optimizer's options: {"-l", "0.001"}, …
    Fields recipe = {};
    // The values of those `fields` that older states lack, because there was no choice yet. So far
    // a run has none (CONTRIBUTING.md has an example).
    Fields implied = {};
};

// How far a run has come.
struct Counters {
    uint64_t step = 0;
    uint64_t model_checksum = 0;  // of the parameters in the model file of the same step
    LoaderState data;             // where the training data continues
};

void write_state(const std::string& path, const Identity&, const Counters&, Block optimizer);

// Reads a state file. The constructor reads the head. It throws an Error if the file is damaged or
// if the identity differs, and names the field and both values. The caller then reads the
// optimizer's arrays from `file`, add()s each piece in order, and calls check() at the end, which
// throws an Error if head or arrays are damaged.
class StateFile {
  public:
    StateFile(const std::string& path, const Identity&, size_t optimizer_bytes);

    void add(const void* piece, size_t bytes) { checksum_.add(piece, bytes); }
    void check() const;

    const InputFile file;
    size_t begin = 0;  // of the arrays in the file
    Counters counters;
    std::string recipe_changes;  // "-l from 0.001 to 0.002, …", or ""

  private:
    void check_whole_file();

    std::string expected_;  // the checksum in the head
    Checksum64 checksum_{0};
};

// -------------------------------------------------------------------------------------------------
// A run's checkpoint of step 1000 is model_00001000.bin and state_00001000.bin in its output
// directory. The model is renamed last, so a checkpoint is complete once its model exists. A model
// without a state belongs to the user: it is never deleted and never overwritten.
std::string model_path(const std::string& dir, int step);
std::string state_path(const std::string& dir, int step);
std::string state_name(int step);  // without the directory

// The step of the newest model, with or without a state, or -1.
int newest_model(const std::string& dir);

// The step of the newest model that has its state, or -1 if there is no model. Throws an Error if a
// newer model has no state, if no model has one, or if there are several states and no model.
int checkpoint_to_resume(const std::string& dir);

// Deletes what a killed run leaves: temporary files, and a single state that is newer than all
// models. Other states without a model are named on stderr and kept.
void remove_leftovers(const std::string& dir);

// Deletes checkpoints, except the newest `keep` of them (0 keeps all) and those at every
// `keep_every`-th step (0 exempts none).
void prune_checkpoints(const std::string& dir, int keep, int keep_every);
