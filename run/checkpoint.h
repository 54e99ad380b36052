// Files that outlive the process: llm.c's model files, and our training state. Each is written under a temporary name,
// synced and then renamed, so a file under its final name is whole.
#pragma once
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "data/file.h"
#include "layers/comm/meet.h"
#include "layers/gpu/types.h"

// Throws an Error that names the file, what is wrong, what was expected and found, and what to do.
template <class Expected, class Found>
[[noreturn]] void refuse(const std::string& path, const std::string& what, const Expected& expected, const Found& found,
                         const char* advice) {
    std::ostringstream text;
    text << path << ": " << what << ": expected " << expected << ", found " << found << "; " << advice;
    throw Error(text.str());
}
inline std::string hex(uint64_t checksum) {
    return format("%016zx", checksum);
}

// ---- llm.c model files. The header is 256 int32: magic 20240326, version 3 (fp32) or 5 (bf16), and header[2..7] =
// maxT, V, L, NH, C, Vp. The sixteen tensors follow in llm.c's order, each stacked over layers.
struct Config {
    int max_T, V, Vp, L, NH, C;  // positions, vocabulary, padded vocabulary, layers, heads, channels

    int HS() const { return C / NH; }
    size_t num_parameters() const;  // of the sixteen tensors
    // Forward and backward. Each parameter costs 2 FLOPs forward and 4 backward, and causal attention 6·L·C·T.
    size_t flops_per_token(int T) const { return 6 * num_parameters() + 6 * static_cast<size_t>(L) * C * T; }
};
struct ModelHeader {
    DType dtype;
    Config config;
    size_t bytes() const { return config.num_parameters() * size_of(dtype); }  // of the parameters
};
std::string words(const ModelHeader&);  // "fp32, L=12 NH=12 C=768 V=50257"
// Throws Error if the file is not found or its magic, version, sizes or length are wrong.
ModelHeader read_model_header(const std::string& path);
// Reads the parameters as one block in file order, in the header's dtype.
void read_model_parameters(const std::string& path, const ModelHeader&, void* out);
void write_model(const std::string& path, const ModelHeader&, const void* parameters);

// ---- Training state (ours): magic, version, identity and sections {name, bytes, checksum}.
// Identity holds by name what a resumed run must have in common with the one before. The recipe, which is the schedule
// and the optimizer's options, may be changed on purpose.
struct Identity {
    Fields fields;       // {"B", "4"}, {"precision", "bf16"}, …
    Fields recipe = {};  // {"-l", "0.001"}, …
};
struct Section {
    std::string name;
    void* data;  // read into / written from
    size_t bytes;
};
// Calls `before_rename` when all is written, and the file does not have its name yet.
void write_state(const std::string& path, const Identity&, const std::vector<Section>&,
                 const std::function<void()>& before_rename = nullptr);
// Fills the sections, whose order is that of write_state. Throws Error if the file is damaged, or if the identity differs,
// naming the field and both values. Returns in words what differs in the recipe.
std::string read_state(const std::string& path, const Identity&, const std::vector<Section>&);

// Checkpoints of a run live in its output directory as model_00001000.bin and state_00001000.bin. The state is renamed
// last, so a step is complete when its state is there.
std::string model_path(const std::string& dir, int step);
std::string state_path(const std::string& dir, int step);
// The step of the newest file of a kind, "state" or "model", or -1.
int newest_checkpoint(const std::string& dir, const std::string& kind = "state");
// The step from which a run goes on, or -1. Throws Error if models have no state, unless a killed run left them.
int checkpoint_to_resume(const std::string& dir);
// Removes what killed runs left: temporaries and, beside states, models without one. Removes checkpoints too but the
// newest `keep` and every `keep_every`-th step's. 0 is all and none of them.
void prune_checkpoints(const std::string& dir, int keep, int keep_every);
