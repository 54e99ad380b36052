#include "run/settings.h"

#include <algorithm>
#include <climits>

#include "attention/attention.h"
#include "data/text.h"
#include "parallel/comm.h"
#include "parallel/shards.h"

std::vector<Option> Options::table() {
    using O = Option;
    // Name, letter, kind, value, help, range and, where a group begins, its heading.
    return {
        {"--train-data", "-i", O::Path, &train_data,
         "training data: token shards (quote a pattern such as 'data/train_*.bin') or a text file; "
         "default: the built-in corpus",
         "", "data"},
        {"--val-data", "-j", O::Path, &val_data,
         "validation data, likewise; default: the built-in corpus's, or none if -i is given"},
        {"--init", "-e", O::Path, &init,
         "model to start from: d12, d24, d36 or d48 (a new GPT-2 with that many layers), tiny (a "
         "new small model), a model file (ours or llm.c's), or the -o directory of a run (its "
         "newest checkpoint); default: d12 (CPU: tiny)",
         "", "model"},
        {"--precision", "", O::Choice, &precision,
         "type of weights and activations; default: bf16 if the GPU supports it, otherwise fp32",
         "auto|bf16|fp32"},
        {"--attention", "", O::Choice, &attention,
         "attention kernel; flash picks the fastest one for this precision and GPU",
         attention_names()},
        {"--device", "", O::Choice, &device, "where to run; default: the GPU if there is one",
         "auto|cuda|cpu"},
        {"--recompute", "-r", O::Int, &recompute,
         "save memory by recomputing activations in the backward pass; 0: none, 1: GELU (1% "
         "slower), 2: GELU and the layer norms (2% slower)",
         "0..2"},
        {"--no-tf32", "", O::Flag, &no_tf32,
         "compute fp32 matmuls in full precision instead of TF32"},
        {"--gpus", "", O::Int, &gpus,
         "train on N GPUs of this machine, with one process each; default: 1, or what torchrun, "
         "srun or mpirun has started",
         "1..1024", "several GPUs"},
        {"--zero", "-z", O::Int, &zero,
         "1: shard the optimizer state across the GPUs (ZeRO-1); default: 1 if the number of "
         "channels is a multiple of 4·GPUs, otherwise 0",
         "0..1"},
        {"--overlap", "", O::Int, &overlap,
         "1: sum gradients across the GPUs while the backward pass is still running; default: 1 on "
         "several machines, 0 on one",
         "0..1"},
        {"--context-parallel", "", O::Int, &context_parallel, "split each sequence across N GPUs",
         "1..1024"},
        {"--timeout", "", O::Int, &timeout,
         "exit after N seconds without progress, even if the cause is only a slow terminal or disk",
         "1..86400"},
        {"--batch", "-b", O::Int, &B,
         "B: sequences per micro-batch on each GPU; default: 8 (CPU: 4)", "1..65536", "batch"},
        {"--tokens", "-t", O::Int, &T,
         "T: tokens per sequence; default: as many as the model has positions, but at most 1024 "
         "(training on a CPU: 64)",
         "1..4194304"},
        {"--tokens-per-step", "-d", O::Int, &tokens_per_step,
         "tokens per optimizer step: B·T·GPUs / context-parallel, or a multiple of that to "
         "accumulate the gradients of several micro-batches; default: no accumulation",
         "1.."},
        {"--max-steps", "-x", O::Int, &max_steps,
         "optimizer steps; default: -1, which is one epoch of -i, or 6500 steps on the built-in "
         "corpus (CPU: 2000)",
         "-1.."},
        {"--no-shuffle", "", O::Flag, &no_shuffle, "read the training data in order"},
        {"--overfit", "-a", O::Flag, &overfit, "train on the first step's batch over and over"},
        {"--lr", "-l", O::Float, &lr, "peak learning rate; default: 3e-4 (tiny: 2e-3)", "0..",
         "optimizer"},
        {"--warmup", "-u", O::Int, &warmup,
         "warm-up steps; default: 5% of the run or 50 steps, whichever is more, but at most a "
         "third of the run",
         "0.."},
        {"--final-lr", "-q", O::Float, &final_lr, "learning rate at the end, as a fraction of --lr",
         "0..1"},
        {"--schedule", "-k", O::Choice, &schedule,
         "learning rate after the warm-up; wsd: constant, then decaying as 1 - sqrt(progress) in "
         "the last fifth of the run",
         "cosine|linear|constant|wsd"},
        {"--weight-decay", "-c", O::Float, &weight_decay,
         "AdamW's weight decay, applied to matrices and embeddings only", "0.."},
        {"--beta2", "", O::Float, &beta2, "AdamW's beta2, the decay rate of the second moment",
         "0..0.99999"},
        {"--max-norm", "", O::Float, &max_norm, "clip the gradient's norm to this; 0: don't clip",
         "0.."},
        {"--seed", "", O::Int, &seed,
         "random seed of the initial weights, the order of the data, stochastic rounding and "
         "samples",
         "0.."},
        {"--val-every", "-v", O::Int, &val_every,
         "steps between validations; 0: never; default: -1, which is about ten validations per run",
         "-1..", "monitoring"},
        {"--val-batches", "-m", O::Int, &val_batches,
         "micro-batches per validation; -1: all of the data; default: 20 (--eval-only: all)",
         "-1 or 1.."},
        {"--hellaswag", "", O::Path, &hellaswag,
         "HellaSwag file from data/hellaswag.py; each validation also measures accuracy on it"},
        {"--eval-only", "", O::Flag, &eval_only,
         "print the loss of the -e model on the -j data, then exit"},
        {"--sample-every", "-s", O::Int, &sample_every,
         "steps between samples of generated text; 0: never; default: -1, which is at most six "
         "samples per run",
         "-1.."},
        {"--sample-length", "-g", O::Int, &sample_length, "maximum number of tokens per sample",
         "1.."},
        {"--memory", "", O::Flag, &memory,
         "print how many bytes each tensor would need with these options, then exit"},
        {"--profile", "", O::Int, &profile,
         "let nsys or ncu profile N steps after five warm-up steps, then exit; default: don't "
         "profile",
         "1.."},
        {"--output-dir", "-o", O::Path, &output_dir,
         "directory for log.jsonl and checkpoints; default: none, and nothing is saved", "",
         "files"},
        {"--checkpoint-every", "-n", O::Int, &checkpoint_every,
         "steps between checkpoints; 0: only one, at the end", "0.."},
        {"--keep", "-nk", O::Int, &keep, "delete all but the newest N checkpoints; 0: keep all",
         "0.."},
        {"--keep-every", "-nm", O::Int, &keep_every,
         "with --keep, also keep every checkpoint whose step is a multiple of N; 0: no others",
         "0.."},
        {"--resume", "-y", O::Flag, &resume,
         "continue from the newest checkpoint in the -o directory"},
        {"--tokenizer", "", O::Path, &tokenizer,
         "gpt2_tokenizer.bin from data/prepare.py, to read and write text as GPT-2's BPE tokens; "
         "default: one token per byte"},
        {"--generate", "", O::Int, &generate,
         "generate up to N tokens with the -e model, then exit; default: train", "1..",
         "generation"},
        {"--samples", "", O::Int, &samples,
         "number of texts that --generate writes, with the seeds --seed, --seed + 1, …", "1.."},
        {"--prompt", "", O::String, &prompt,
         "text that samples and --generate continue; <|endoftext|> is put before it"},
        {"--temperature", "", O::Float, &temperature,
         "sampling temperature; 0: always the most likely token", "0.."},
        {"--top-k", "", O::Int, &top_k, "sample only from the N most likely tokens; 0: from all",
         "0.."},
    };
}

Fields Options::recipe() const {
    const auto text = [](double x) { return format("%.7g", x); };
    return {{"-x", text(max_steps)},  {"-l", text(lr)},
            {"-u", text(warmup)},     {"-q", text(final_lr)},
            {"-k", schedule},         {"-c", text(weight_decay)},
            {"--beta2", text(beta2)}, {"--max-norm", text(max_norm)}};
}

// The warm-up is linear and reaches the full rate at step `warmup`. Then, unless the schedule is
// constant, the rate falls to final_lr·lr, which it reaches at the last step. wsd follows llm.c's
// curve, which would reach it one step later.
double Options::learning_rate(int step) const {
    if (step < warmup)
        return lr * (step + 1.0) / warmup;

    const bool wsd = schedule == "wsd";
    const int start = wsd ? static_cast<int>(max_steps * 4LL / 5) : warmup;  // of the fall
    const int end = wsd ? max_steps : max_steps - 1;
    const double length = std::max(end - start, 1);
    const double progress = std::clamp((step - start) / length, 0.0, 1.0);

    double factor = 1;  // from 1 to 0
    if (schedule == "cosine")
        factor = 0.5 * (1 + std::cos(M_PI * progress));
    else if (schedule == "linear")
        factor = 1 - progress;
    else if (wsd)
        factor = 1 - std::sqrt(progress);
    return lr * (final_lr + (1 - final_lr) * factor);
}

AdamW Options::adamw(int step) const {
    return {.lr = static_cast<float>(learning_rate(step)),
            .beta1 = 0.9f,
            .beta2 = beta2,
            .eps = 1e-8f,
            .weight_decay = weight_decay,
            .max_norm = max_norm,
            .step = step + 1,
            .seed = uint64_t(seed)};
}

// -------------------------------------------------------------------------------------------------
// Modes

namespace {

enum Mode { kTrain = 1, kProfile = 2, kEvaluate = 4, kGenerate = 8 };

// Which modes use an option. An option in no row is for training, with or without --profile.
// --memory is not a mode: it asks about the command to which it is added, and accepts that
// command's options.
constexpr struct {
    int modes;
    const char* options;
} kUses[] = {
    {kTrain | kProfile | kEvaluate | kGenerate,
     "--init --precision --attention --device --no-tf32 --tokens --seed --tokenizer"},
    {kTrain | kProfile | kEvaluate,
     "--val-data --gpus --context-parallel --timeout --batch --val-batches --hellaswag"},
    {kTrain | kProfile | kGenerate, "--prompt --temperature --top-k"},
    {kTrain | kGenerate, "--memory"},
    {kTrain, "--max-steps --output-dir --checkpoint-every --keep --keep-every --resume"},
    {kProfile, "--profile"},
    {kEvaluate, "--eval-only"},
    {kGenerate, "--generate --samples"},
};

int modes_that_use(const std::string& option) {
    for (const auto& row : kUses) {
        const std::vector<std::string> options = split(row.options, " ");
        if (std::find(options.begin(), options.end(), option) != options.end())
            return row.modes;
    }
    return kTrain | kProfile;
}

}  // namespace

void check_all_are_used(const Options& o, const std::vector<Option>& table) {
    Mode mode = kTrain;
    const char* beginning = "a training run";  // of the message
    if (o.eval_only) {
        mode = kEvaluate;
        beginning = "--eval-only just validates the -e model on the -j data, and";
    } else if (o.generate > 0) {
        mode = kGenerate;
        beginning = "--generate only generates text, on one device, and";
    } else if (o.profile > 0) {
        mode = kProfile;
        beginning = "--profile writes no files, and";
    }

    std::string unused;
    for (const Option& option : table)
        if (option.given && (modes_that_use(option.name) & mode) == 0)
            unused += (unused.empty() ? "" : ", ") + title(option);
    if (!unused.empty())
        throw UsageError(format("%s would ignore %s; leave that out", beginning, unused.c_str()));
}

// -------------------------------------------------------------------------------------------------
// Defaults that depend on the run

void check_ranks(const Options& o, const RankInfo& self, int gpus, const std::string& why_no_gpu) {
    const int ranks = std::max(o.gpus, self.size);
    const int context = o.context_parallel;
    if (ranks % context != 0)
        throw UsageError(format("--context-parallel %d does not divide --gpus %d; use --gpus %d",
                                context, ranks, (ranks / context + 1) * context));
    if (context > 1 && !o.hellaswag.empty())
        throw UsageError("--hellaswag needs whole sequences; leave out --context-parallel");
    if (o.gpus > 0 && self.size > 1 && o.gpus != self.size)
        throw UsageError(format("--gpus is %d, but the launcher started %d ranks; leave out --gpus",
                                o.gpus, self.size));
    // A launcher may have started the ranks, without --gpus.
    const char* const advice = self.size > 1 ? "start a single process" : "leave out --gpus";
    if (o.generate > 0 && ranks > 1)
        throw UsageError(format("--generate runs on one GPU; %s", advice));
    if (ranks == 1 || o.memory)
        return;
    if (o.device == "cpu")
        throw UsageError(format("--device cpu runs as one process; %s", advice));
    if (gpus == 0)
        throw Error(format("each rank needs a GPU of its own: %s; %s", why_no_gpu.c_str(), advice));
    NcclComm::version();  // throws if this program was built without NCCL
}

void resolve_sizes(Options& o, int max_T, int C, bool on_cpu, int ranks) {
    const int context = o.context_parallel;
    const int groups = ranks / context;  // each with sequences of its own
    if (o.B == 0)
        o.B = on_cpu ? 4 : 8;
    if (o.T == 0)
        o.T = std::min(max_T, on_cpu && !o.eval_only ? 64 : 1024);
    const int chunks = 2 * context;  // of a sequence (attention/ring/ring.h)
    if (context > 1 && o.T % chunks != 0)
        throw UsageError(
            format("--tokens %d is not a multiple of twice --context-parallel; use -t %d", o.T,
                   std::max(1, o.T / chunks) * chunks));

    const long long micro_batch = static_cast<long long>(o.B) * o.T;
    const long long least = micro_batch * groups;  // tokens per step
    const std::string product =
        format("B·T·%s = %d·%d·%d", context > 1 ? "groups of ranks" : "ranks", o.B, o.T, groups);
    if (micro_batch > INT_MAX / 4)  // the encoder's plan has over 3 ints a row, and counts in ints
        throw UsageError(product +
                         " is too many tokens for a micro-batch; use a smaller -b with -d");
    if (least > INT_MAX)
        throw UsageError(product + " is too many tokens for a step; use a smaller -b");
    if (o.tokens_per_step == 0)
        o.tokens_per_step = static_cast<int>(least);
    if (o.tokens_per_step % least != 0)
        throw UsageError(format("--tokens-per-step %d is not a multiple of %s; use -d %lld",
                                o.tokens_per_step, product.c_str(),
                                std::max(1LL, o.tokens_per_step / least) * least));

    // The optimizer is sharded across all ranks, also those that share a sequence.
    if (o.zero < 0)
        o.zero = ranks > 1 && can_shard(C, ranks) ? 1 : 0;
    if (o.zero > 0 && ranks > 1 && !can_shard(C, ranks))
        throw UsageError(format(
            "--zero 1: %d channels are not a multiple of 4·%d ranks; use --zero 0", C, ranks));
    if (o.lr < 0)
        o.lr = C < 256 ? 2e-3f : 3e-4f;
}

void resolve_steps(Options& o, bool on_cpu, uint64_t windows) {
    if (o.max_steps < 0 && o.train_data.empty())
        o.max_steps = on_cpu ? 2000 : 6500;
    if (o.max_steps < 0) {
        const uint64_t windows_per_step = o.tokens_per_step / o.T;
        const uint64_t epoch = (windows + windows_per_step - 1) / windows_per_step;
        o.max_steps = static_cast<int>(std::min<uint64_t>(epoch, INT_MAX));
    }

    if (o.warmup < 0)
        o.warmup = std::max(o.max_steps / 20, std::min(50, o.max_steps / 3));
    if (o.val_batches == 0)
        o.val_batches = 20;
    if (o.val_every < 0)
        o.val_every = std::max(1, o.max_steps / 10);
    if (o.sample_every < 0)
        o.sample_every = std::max(20, o.max_steps / 5);
}
