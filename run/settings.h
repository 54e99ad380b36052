// The options of a run, their defaults, and what must be true of them.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/types.h"
#include "parallel/rendezvous.h"
#include "run/options.h"

// A default that depends on device, model, ranks or data is "auto", a value outside of the option's
// range or, if its help says so, -1. resolve_sizes() and resolve_steps() replace most of these, and
// train_gpt2.cu those of --precision, --init and --overlap. The rest stay.
struct Options {
    std::string program = "./train_gpt2cu";  // as it was called

    std::string train_data;
    std::string val_data;
    std::string tokenizer;
    std::string init;
    std::string precision = "auto";
    std::string attention = "flash";
    std::string device = "auto";
    int recompute = 1;
    bool no_tf32 = false;

    int gpus = 0;
    int zero = -1;
    int overlap = -1;
    int context_parallel = 1;
    int timeout = 600;  // seconds

    int B = 0;
    int T = 0;
    int tokens_per_step = 0;
    int max_steps = -1;
    bool no_shuffle = false;
    bool overfit = false;

    float lr = -1;
    int warmup = -1;        // steps
    float final_lr = 0.1f;  // as a fraction of lr
    std::string schedule = "cosine";
    float weight_decay = 0.1f;
    float beta2 = 0.95f;
    float max_norm = 1.f;
    int seed = 1;

    int val_every = -1;
    int val_batches = 0;  // -1: all; 0: the default, which is all for --eval-only
    std::string hellaswag;
    bool eval_only = false;
    int sample_every = -1;
    int sample_length = 700;
    bool memory = false;
    int profile = 0;  // steps, or 0 to train

    std::string output_dir;
    int checkpoint_every = 0;
    int keep = 0;
    int keep_every = 0;
    bool resume = false;

    int generate = 0;  // tokens, or 0 to train
    int samples = 1;
    std::string prompt;
    float temperature = 1.f;
    int top_k = 0;

    std::vector<Option> table();  // points into this object
    Fields recipe() const;        // what a resumed run may change, by option
    // --timeout is meant for ordinary steps. The first one takes longer, because it makes plans and
    // connections, and data is read before it.
    double first_timeout() const { return timeout < 300 ? 300 : timeout; }
    double learning_rate(int step) const;  // of the step after `step` others
    AdamW adamw(int step) const;           // of the same step
};

// The sizes of a new model by name (train_gpt2.cu): "d12", "d24", "d36" and "d48" are GPT-2 with
// that many layers, also as "gpt2:d12", which llm.c accepts. "tiny" trains on a CPU in a minute.
// Nothing if `name` is none of these.
struct Config;
std::optional<Config> preset_config(const std::string& name);

// Throws a UsageError that names all options that were given but that this mode (--eval-only, say)
// would ignore.
void check_all_are_used(const Options& o, const std::vector<Option>& table);

// Throws an Error if options and launcher contradict each other, or if they ask for what this
// machine, with its `gpus` GPUs, does not have.
void check_ranks(const Options& o, const RankInfo& self, int gpus, const std::string& why_no_gpu);

// Sets the defaults that depend on device, model and ranks, and checks sizes.
void resolve_sizes(Options& o, int max_T, int C, bool on_cpu, int ranks);
// Sets the defaults that depend on the number of steps, which may be that of an epoch. `windows` is
// the number of sequences in the training data.
void resolve_steps(Options& o, bool on_cpu, uint64_t windows);
