// The options of a run, their defaults, and what must be true of them.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/types.h"
#include "parallel/rendezvous.h"
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
    // --timeout is for ordinary steps. The first one makes plans and connections, and before it
    // data is read.
    double first_timeout() const { return timeout < 300 ? 300 : timeout; }
    double learning_rate(int step) const;  // of the step that starts after `step` steps
    AdamW adamw(int step) const;           // of the same step
};

// The sizes of a new model by name (train_gpt2.cu): "d12", "d24", "d36" and "d48" are GPT-2 with that
// many layers, also as "gpt2:d12", which llm.c accepts. "tiny" trains on a CPU in a minute. Nothing
// if `name` is none of these.
struct Config;
std::optional<Config> preset_config(const std::string& name);

// Throws UsageError if options were given that this mode (--eval-only, say) would ignore, and names
// them all.
void check_all_are_used(const Options& o, const std::vector<Option>& table);

// What options and launcher ask for must fit together, and this machine, which has `gpus` GPUs,
// must have it.
void check_ranks(const Options& o, const RankInfo& self, int gpus, const std::string& why_no_gpu);

// The defaults that depend on device, model and ranks. resolve_steps has those that need the size
// of the data.
void resolve_sizes(Options& o, int max_T, int C, bool on_cpu, int all_ranks);
void resolve_steps(Options& o, bool on_cpu, uint64_t windows);  // of the training data
