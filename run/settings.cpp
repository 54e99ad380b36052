#include "run/settings.h"

#include <algorithm>
#include <climits>

#include "attention/attention.h"
#include "data/text.h"
#include "parallel/comm.h"
#include "parallel/shards.h"

std::vector<Option> Options::table() {
    using O = Option;
    return {
        {"--train-data", "-i", O::Path, &train_data,
         "token shards (a glob) or a text file; default: the built-in corpus", "", "data"},
        {"--val-data", "-j", O::Path, &val_data, "the same for validation; default: none with -i"},
        {"--init", "-e", O::Path, &init,
         "d12, d24, d36, d48, tiny, a model file (llm.c's) or a run's -o; default: d12 (CPU: tiny)",
         "", "model"},
        {"--precision", "", O::Choice, &precision, "default: bf16 where the GPU has it, else fp32",
         "auto|bf16|fp32"},
        {"--attention", "", O::Choice, &attention,
         "the kernel; flash: the fastest for precision and GPU", attention_names()},
        {"--device", "", O::Choice, &device, "where to train; default: the GPU if there is one",
         "auto|cuda|cpu"},
        {"--recompute", "-r", O::Int, &recompute,
         "to save memory keep 1: no activation output (1 % slower), 2: "
         "no layer norm output either (2 %)",
         "0..2"},
        {"--no-tf32", "", O::Flag, &no_tf32, "strict fp32 matmuls (they use TF32 otherwise)"},
        {"--gpus", "", O::Int, &gpus,
         "processes, a GPU each; default: one, or as torchrun, srun or mpirun say", "1..1024",
         "several GPUs"},
        {"--zero", "-z", O::Int, &zero,
         "1: divide the optimizer among ranks; default: where channels divide", "0..1"},
        {"--overlap", "", O::Int, &overlap,
         "1: sum gradients beside backward; default: 1 between machines", "0..1"},
        {"--context-parallel", "", O::Int, &context_parallel,
         "divide each sequence among so many GPUs", "1..1024"},
        {"--timeout", "", O::Int, &timeout,
         "seconds without progress, also for a terminal or a disk, after which a rank gives up",
         "1..86400"},
        {"--batch", "-b", O::Int, &B, "sequences per micro-batch and GPU; default: 8 (CPU: 4)",
         "1..65536", "batch"},
        {"--tokens", "-t", O::Int, &T,
         "tokens per sequence; default: the model's positions, "
         "but at most 1024 (training on a CPU: 64)",
         "1..4194304"},
        {"--tokens-per-step", "-d", O::Int, &tokens_per_step,
         "tokens per update, a multiple of B·T·GPUs / context-parallel; default: that", "1.."},
        {"--max-steps", "-x", O::Int, &max_steps,
         "-1 is the default: two minutes on an H200 (CPU: one), or an epoch of -i", "-1.."},
        {"--no-shuffle", "", O::Flag, &no_shuffle, "read the training data in order"},
        {"--overfit", "-a", O::Flag, &overfit, "train on the first batch again and again"},
        {"--lr", "-l", O::Float, &lr, "learning rate; default: 3e-4 (tiny: 2e-3)", "0..",
         "optimizer"},
        {"--warmup", "-u", O::Int, &warmup,
         "steps; default: a twentieth of all, but at least 50 or a third", "0.."},
        {"--final-lr", "-q", O::Float, &final_lr, "learning rate at the end, as a fraction",
         "0..1"},
        {"--schedule", "-k", O::Choice, &schedule,
         "after the warm-up; wsd: constant, then 1 - sqrt in the last fifth",
         "cosine|linear|constant|wsd"},
        {"--weight-decay", "-c", O::Float, &weight_decay, "on matrices only", "0.."},
        {"--beta2", "", O::Float, &beta2, "AdamW's second decay", "0..0.99999"},
        {"--max-norm", "", O::Float, &max_norm, "clip the gradient's norm; 0: don't", "0.."},
        {"--seed", "", O::Int, &seed, "of initial weights, order of data, rounding and samples",
         "0.."},
        {"--val-every", "-v", O::Int, &val_every,
         "steps between validations, 0: never, -1 is the default: ten in the run", "-1..",
         "watching"},
        {"--val-batches", "-m", O::Int, &val_batches,
         "micro-batches per validation, -1: all; default: 20 (--eval-only: all)", "-1 or 1.."},
        {"--hellaswag", "", O::Path, &hellaswag,
         "with each validation, answer the questions of this file"},
        {"--eval-only", "", O::Flag, &eval_only, "validate the model of -e on -j, then exit"},
        {"--sample-every", "-s", O::Int, &sample_every,
         "steps between samples, 0: never, -1 is the default: five at most", "-1.."},
        {"--sample-length", "-g", O::Int, &sample_length, "tokens per sample, at most", "1.."},
        {"--memory", "", O::Flag, &memory,
         "print the bytes of every tensor of this command's run, then exit"},
        {"--profile", "", O::Int, &profile,
         "after five steps profile so many, then exit; default: train", "1.."},
        {"--output-dir", "-o", O::Path, &output_dir,
         "for log.jsonl and checkpoints; default: nothing is kept", "", "files"},
        {"--checkpoint-every", "-n", O::Int, &checkpoint_every,
         "steps between checkpoints, 0: only one, at the end", "0.."},
        {"--keep", "-nk", O::Int, &keep, "keep only so many checkpoints, 0: all", "0.."},
        {"--keep-every", "-nm", O::Int, &keep_every, "keep those of every so many steps, 0: don't",
         "0.."},
        {"--resume", "-y", O::Flag, &resume, "go on from the newest checkpoint in -o"},
        {"--tokenizer", "", O::Path, &tokenizer,
         "llm.c's tokenizer file: texts and prompts are in GPT-2's BPE"},
        {"--generate", "", O::Int, &generate,
         "write so many tokens with the model of -e, then exit; default: train", "1..",
         "generating"},
        {"--samples", "", O::Int, &samples, "so many texts, with the seeds from --seed on", "1.."},
        {"--prompt", "", O::String, &prompt,
         "what samples and --generate continue, after <|endoftext|>"},
        {"--temperature", "", O::Float, &temperature, "0: always the likeliest token", "0.."},
        {"--top-k", "", O::Int, &top_k, "choose among so many of the likeliest tokens, 0: all",
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

// Warm-up is linear and reaches the full rate at step `warmup`. Then --schedule takes it to
// final_lr·lr at the last step. The curve of wsd is llm.c's, which gets there one step later.
double Options::learning_rate(int step) const {
    if (step < warmup)
        return lr * (step + 1.0) / warmup;
    const bool wsd = schedule == "wsd";
    const int start = wsd ? static_cast<int>(max_steps * 4LL / 5) : warmup;
    const int end = wsd ? max_steps : max_steps - 1;
    // 0 before it falls
    const double at = std::clamp((step - start) / std::max<double>(end - start, 1), 0.0, 1.0);
    double factor = 1;
    if (schedule == "cosine")
        factor = 0.5 * (1 + std::cos(M_PI * at));
    else if (schedule == "linear")
        factor = 1 - at;
    else if (wsd)
        factor = 1 - std::sqrt(at);
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

// Which modes use an option. Whatever is in no row is for training, with or without --profile.
// --memory is not a mode: it asks about the command that it is added to, and takes its options.
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
    const char* does = "a run that trains";
    if (o.eval_only) {
        mode = kEvaluate;
        does = "--eval-only validates the model of -e on -j, and";
    } else if (o.generate > 0) {
        mode = kGenerate;
        does = "--generate writes texts on one device, and";
    } else if (o.profile > 0) {
        mode = kProfile;
        does = "--profile writes nothing, and";
    }

    std::string unused;
    for (const Option& option : table)
        if (option.given && !(modes_that_use(option.name) & mode))
            unused += (unused.empty() ? "" : ", ") + title(option);
    if (!unused.empty())
        throw UsageError(format("%s would ignore: %s; leave that out", does, unused.c_str()));
}

// -------------------------------------------------------------------------------------------------
// Defaults that depend on the run

void check_ranks(const Options& o, const RankInfo& self, int gpus, const std::string& why_no_gpu) {
    const int ranks = std::max(o.gpus, self.size);
    if (ranks % o.context_parallel)
        throw UsageError(format("--context-parallel %d does not divide --gpus %d: use --gpus %d",
                                o.context_parallel, ranks,
                                (ranks / o.context_parallel + 1) * o.context_parallel));
    if (o.context_parallel > 1 && !o.hellaswag.empty())
        throw UsageError("--hellaswag needs whole sequences: leave out --context-parallel");
    if (o.gpus > 0 && self.size > 1 && o.gpus != self.size)
        throw UsageError(format("--gpus %d, but the launcher started %d ranks: leave out --gpus",
                                o.gpus, self.size));
    if (o.generate > 0 && ranks > 1)
        throw UsageError("--generate runs on one GPU: leave out --gpus");
    if (ranks == 1 || o.memory)
        return;
    if (o.device == "cpu")
        throw UsageError("--device cpu has one rank: leave out --gpus");
    if (gpus == 0)
        throw Error("several ranks need a GPU each: " + why_no_gpu);
    NcclComm::version();  // throws if this program was built without NCCL
}

void resolve_sizes(Options& o, int max_T, int C, bool on_cpu, int all_ranks) {
    // groups with sequences of their own
    const int context = o.context_parallel;
    const int ranks = all_ranks / context;
    if (o.B == 0)
        o.B = on_cpu ? 4 : 8;
    if (o.T == 0)
        o.T = std::min(max_T, on_cpu && !o.eval_only ? 64 : 1024);
    if (context > 1 && o.T % (2 * context))
        throw UsageError(format("--tokens %d is not a multiple of 2·--context-parallel: use -t %d",
                                o.T, std::max(1, o.T / (2 * context)) * 2 * context));
    const long long micro_batch = static_cast<long long>(o.B) * o.T;
    const long long least = micro_batch * ranks;
    const std::string all =
        format("B·T·%s = %d·%d·%d", context > 1 ? "groups of ranks" : "ranks", o.B, o.T, ranks);
    if (micro_batch > INT_MAX / 4)  // the encoder's plan counts in ints
        throw UsageError(all + " is too many tokens for a micro-batch: use a smaller -b with -d");
    if (least > INT_MAX)
        throw UsageError(all + " is too many tokens for a step: use a smaller -b");
    if (o.tokens_per_step == 0)
        o.tokens_per_step = static_cast<int>(least);
    if (o.tokens_per_step % least)
        throw UsageError(
            format("--tokens-per-step %d is not a multiple of %s", o.tokens_per_step, all.c_str()));
    if (o.zero < 0)
        o.zero = all_ranks > 1 && can_shard(C, all_ranks);
    if (o.zero && all_ranks > 1 && !can_shard(C, all_ranks))
        throw UsageError(format("--zero 1: %d channels do not divide among %d ranks: use --zero 0",
                                C, all_ranks));
    if (o.lr < 0)
        o.lr = C < 256 ? 2e-3f : 3e-4f;
}
void resolve_steps(Options& o, bool on_cpu, uint64_t windows) {
    if (o.max_steps < 0 && o.train_data.empty())
        o.max_steps = on_cpu ? 2000 : 6500;
    const uint64_t a_step = o.tokens_per_step / o.T;
    if (o.max_steps < 0)
        o.max_steps =
            static_cast<int>(std::min<uint64_t>((windows + a_step - 1) / a_step, INT_MAX));
    if (o.warmup < 0)
        o.warmup = std::max(o.max_steps / 20, std::min(50, o.max_steps / 3));
    if (o.val_batches == 0)
        o.val_batches = 20;
    if (o.val_every < 0)
        o.val_every = std::max(1, o.max_steps / 10);
    if (o.sample_every < 0)
        o.sample_every = std::max(20, o.max_steps / 5);
}
