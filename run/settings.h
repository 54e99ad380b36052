// The options of a run, their defaults, and what must be true of them.
#pragma once
#include <cmath>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "common/types.h"
#include "data/file.h"
#include "data/loader.h"
#include "parallel/meet.h"
#include "run/options.h"

struct Options {
    std::string program = "./train_gpt2cu";  // as it was called
    std::string train_data, val_data, init, output_dir, tokenizer;
    int B = 0, T = 0, tokens_per_step = 0, max_steps = -1, seed = 1;
    float lr = -1, final_lr = 0.1f, weight_decay = 0.1f, max_norm = 1.f, beta2 = 0.95f;
    int warmup = -1;
    std::string schedule = "cosine";
    int val_every = -1, val_batches = 0, sample_every = -1, sample_length = 700;
    std::string hellaswag;
    bool eval_only = false;
    int checkpoint_every = 0, keep = 0, keep_every = 0;
    bool resume = false, overfit = false, no_tf32 = false, no_shuffle = false, memory = false;
    int profile = 0;
    std::string precision = "auto", attention = "flash", device = "auto";
    int recompute = 1;
    int gpus = 0, zero = -1, overlap = -1, context_parallel = 1, timeout = 600;
    int generate = 0, samples = 1, top_k = 0;
    std::string prompt;
    float temperature = 1.f;

    std::vector<Option> table();
    Fields recipe() const;  // what a resumed run may change, by option
    Attention kernel() const { return {attention}; }
    double learning_rate(int step) const;  // of the step that starts after `step` steps
};

// "d12", "d24", "d36" and "d48" are GPT-2 with that many layers. "tiny" is what a CPU trains in a
// minute. llm.c also writes "gpt2:d12". False if a name is none of these (train_gpt2.cu).
struct Config;
bool find_config(const std::string& name, Config* config);

// Throws UsageError if options were given that this mode (--eval-only, say) would ignore, and names
// them all.
void check_all_are_used(const Options& o, const std::vector<Option>& table);

// The defaults that depend on device, model and ranks. resolve_steps has those that need the size of the data.
void resolve_sizes(Options& o, int max_T, int C, bool on_cpu, int all_ranks);
void resolve_steps(Options& o, bool on_cpu, uint64_t windows);  // of the training data

// A run's output directory. No other run writes to it while this object is there. A file system
// without locks does without.
struct OutputDir {
    explicit OutputDir(const std::string& path);
    void warn_if_replaced() {
        directory.warn_if_replaced();
        lock.warn_if_replaced();
    }

    HeldFile directory;
    HeldFile lock;
};

// Creates the output directory and locks it. Refuses one that is in use, and an earlier run in it
// that is not to be resumed.
std::unique_ptr<OutputDir> prepare_output_dir(const Options& o);

// Where the data comes from, and the loss that no model can beat, if that is known.
struct Data {
    Source train, val;
    double floor = NAN;  // nats per token of the validation data
};
Data find_data(const Options& o);
// Begins to make the built-in corpus in a thread, if a run with these options needs it. find_data() waits for it.
std::future<void> begin_corpus(const Options& o);
