// Files that outlive the process: llm.c's model files, and our training state. Each is written
// under a temporary name, synced and then renamed, so a file under its final name is whole.
#pragma once
#include <sstream>
#include <string>
#include <vector>

#include "common/field.h"
#include "common/types.h"
#include "data/file.h"
#include "data/loader.h"

// Throws an Error that names the file, what is wrong, what was expected and found, and what to do.
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
// llm.c model files. The header is 256 int32: magic 20240326, version 3 (fp32) or 5 (bf16), and
// header[2..7] = maxT, V, L, NH, C, Vp. The sixteen tensors follow in llm.c's order, each stacked
// over layers.
struct Config {
    // positions, vocabulary, padded vocabulary, layers, heads, channels
    int max_T, V, Vp, L, NH, C;

    int HS() const { return C / NH; }
    size_t num_parameters() const;  // of the sixteen tensors
    // Forward and backward. Each parameter costs 2 FLOPs forward and 4 backward, and causal
    // attention 6·L·C·T.
    size_t flops_per_token(int T) const {
        return 6 * num_parameters() + 6 * static_cast<size_t>(L) * C * T;
    }
};
struct ModelHeader {
    DType dtype;
    Config config;
    size_t bytes() const { return config.num_parameters() * size_of(dtype); }  // of the parameters
};
std::string words(const ModelHeader&);  // "fp32, L=12 NH=12 C=768 V=50257"
// Throws Error if the file is not found or its magic, version, sizes or length are wrong.
ModelHeader read_model_header(const std::string& path);
void write_model(const std::string& path, const ModelHeader&, const void* parameters);

// -------------------------------------------------------------------------------------------------
// Training state (ours): a text head, one checksum, then the optimizer's arrays
// (checkpoint_files.cpp has the format).

// What a run is, by name. A resumed run must have `fields` in common with the one before, whereas
// `recipe`, the schedule and the optimizer's options, may be changed on purpose.
struct Identity {
    Fields fields;       // {"B", "4"}, {"precision", "bf16"}, …
    Fields recipe = {};  // {"-l", "0.001"}, …
    // What a state means that lacks one of `fields`, because it was written before there was a
    // choice.
    Fields implied = {};
};
// Where a run is.
struct Counters {
    uint64_t step = 0;
    uint64_t model_checksum = 0;  // of the parameters in the model file of the same step
    LoaderState data;             // where the training data goes on
};
void write_state(const std::string& path, const Identity&, const Counters&, Block optimizer);

// A state file that is being read: the head first, then the optimizer's arrays in pieces, in their
// order. Throws Error if the file is damaged, or if the identity differs, naming the field and both
// values.
class StateFile {
  public:
    StateFile(const std::string& path, const Identity&, size_t optimizer_bytes);
    const InputFile file;
    size_t begin = 0;  // of the arrays
    Counters counters;
    std::string recipe_changes;  // in words, "" if there are none

    // Every piece that has been read, and then once that this was all. Only then is what was read
    // known to be right.
    void add(const void* piece, size_t bytes) { checksum_.add(piece, bytes); }
    void check() const;

  private:
    void check_whole_file();
    std::string expected_;  // the checksum
    Checksum64 checksum_{0};
};

// -------------------------------------------------------------------------------------------------
// The checkpoints of a run are model_00001000.bin and state_00001000.bin in its output directory.
// The state is written first and the model gets its name last, so a checkpoint is there when its
// model is. A model without a state is the user's: it is never deleted and never overwritten.
std::string model_path(const std::string& dir, int step);
std::string state_path(const std::string& dir, int step);

// The step of the newest model, with a state or without, or -1.
int newest_model(const std::string& dir);
// The step of the newest model that has its state, or -1 if there is no model. Throws Error if a
// model without a state lies ahead of it, if no model has one, or if there are several states and
// no model.
int checkpoint_to_resume(const std::string& dir);
// Removes what a killed run leaves: temporaries, and one state newer than every model. Names other
// states that have no model on stderr, and leaves them.
void remove_leftovers(const std::string& dir);
// Removes checkpoints, except the newest `keep` of them (0 keeps all) and those at every
// `keep_every`-th step (0 exempts none).
void prune_checkpoints(const std::string& dir, int keep, int keep_every);
