// A training run: the model and all that accompanies it from step to step. Batches are prepared while the GPU works,
// losses checked and logged, the model validated and sampled, checkpoints written and read.
#pragma once
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "data/loader.h"
#include "data/text.h"
#include "run/checkpoint.h"
#include "run/evaluate.h"
#include "run/log.h"
#include "run/memory.h"
#include "run/peak.h"
#include "run/process.h"
#include "run/ranks.h"
#include "run/sample.h"
#include "run/settings.h"
#include "run/weights.h"

// The share of all ranks' GPUs, with a peak of so many TFLOP/s each. NaN if the peak is not known.
inline double mfu_percent(size_t flops_per_token, double tok_s, int ranks, double peak) {
    return peak > 0 ? 100 * tok_s * flops_per_token / (ranks * peak * 1e12) : NAN;
}

template <class Model>
class Run {
  public:
    using Dev = typename Model::Dev;
    using X = typename Model::X;
    using A = typename Model::A;

    Run(const Options& o, Model& model, const Data& data)
        : model(model),
          o(o),
          dev(model.dev),
          data(data),
          tokenizer(o.tokenizer),
          train(data.train, o.B, o.T, model.config.V, !o.no_shuffle, o.seed, tokenizer) {
        const auto& c = model.config;
        if (train.windows() < uint64_t(o.B))
            throw Error(format("%s: %zu sequences of %d, and a batch takes %d; choose a smaller -b or -t",
                               data.train.name.c_str(), train.windows(), o.T, o.B));
        if (!data.val.empty()) val = std::make_unique<Loader>(data.val, o.B, o.T, c.V, false, 0, tokenizer);
        if (o.sample_every && ranks.rank == 0) prompt = start_of_text(tokenizer, o.prompt, c.V);
        if (!o.hellaswag.empty()) choices = read_choices(o.hellaswag, c.V, o.T);
        const size_t ints = size_t(model.micro_steps) * model.batch_ints();
        host = static_cast<int*>(dev.alloc_host((2 * ints + 1) * sizeof(int)));
        now_at = host, next = host + ints, ends = host + 2 * ints;
        const size_t bytes = o.output_dir.empty() ? 0 : snapshot_bytes(model);
        if (bytes) snapshot = static_cast<char*>(dev.alloc_host(bytes));
        const char* const order = o.overfit ? "one batch" : o.no_shuffle ? "as it is" : "shuffled";
        identity.fields = {{"model", format("L=%d NH=%d C=%d V=%d", c.L, c.NH, c.C, c.V)},
                           {"precision", name_of(dtype_of<X>())},
                           {"device", Dev::kind},
                           {"B", std::to_string(o.B)},
                           {"T", std::to_string(o.T)},
                           {"tokens per step", std::to_string(o.tokens_per_step)},
                           {"seed", std::to_string(o.seed)},
                           {"order of data", order},
                           {"attention", o.attention},
                           {"matmuls", tf32() ? "TF32" : "full precision"},
                           {"data", hex(train.identity())}};
    }
    ~Run() {
        if (written.valid()) written.wait();  // when an Error unwinds
        dev.free_host(host), dev.free_host(snapshot);
    }

    Model& model;
    const Options& o;
    int step = 0;  // steps done

    void describe() const {
        const auto& c = model.config;
        Options settings = o, defaults;
        if (ranks.size == 1) defaults.zero = o.zero, defaults.overlap = o.overlap;
        std::string attention = "plain loops";
        if constexpr (std::is_base_of_v<Cuda, Dev>) attention = attention_kernel<X>(dev, model.attention, c.HS()).name;
        print_text(options_changed(settings.table(), defaults.table()));  // it has the prompt
        std::printf("device             %s, %s%s, attention by %s\n", dev.name.c_str(), name_of(dtype_of<X>()),
                    tf32() ? " with TF32 matmuls" : "", attention.c_str());
        if (ranks.size > 1) std::printf("ranks              %d, %d on this machine\n", ranks.size, ranks.local_size);
        std::printf(
            "parameters         %.1f M: %d layers, %d heads, %d channels, %d positions, vocabulary %d (padded %d)\n",
            model.num_parameters / 1e6, c.L, c.NH, c.C, c.max_T, c.V, c.Vp);
        std::printf("train data         %s\n", train.description().c_str());
        if (val) std::printf("validation data    %s\n", val->description().c_str());
        std::printf("memory             %.1f MiB: %s\n", model.total_bytes() / kMiB, by_arena(model, kMiB, 1).c_str());
    }

    // All ranks must have the same data and parameters. They have the same options since they met.
    void agree() {
        if (ranks.size == 1) return;
        const std::pair<const char*, uint64_t> hashes[] = {{"data", train.identity()},
                                                           {"validation data", val ? val->identity() : 0},
                                                           {"parameters", checksum(dev, model.workspace().scratch, model.params.base,
                                                                                  model.params.bytes)}};
        for (const auto& [name, mine] : hashes) {
            const std::vector<uint64_t> all = ranks.gather(mine);
            for (int r = 1; r < ranks.size; r++)
                if (all[r] != all[0])
                    throw Error(format("%s: rank %d has others than rank 0; give all the same", name, r));
        }
    }

    // A fresh run starts a new log. A resumed run drops the rows that it will write again. `held` is
    // the output directory, or null on a rank that writes no files.
    void open_log(OutputDir* held) {
        output = held;
        if (!output) return;
        remove_leftovers(o.output_dir);
        prune_checkpoints(o.output_dir, o.keep, o.keep_every);
        const std::string path = o.output_dir + "/log.jsonl";
        if (step > 0) Log::truncate_after(path, step);
        log = std::make_unique<Log>(path, step > 0);
        Row row("run");
        Options settings = o;
        row.add("device", dev.name).add("precision", name_of(dtype_of<X>())).add("attention", o.attention);
        row.add("parameters", static_cast<long long>(model.num_parameters)).add("B", o.B).add("T", o.T);
        row.add("tokens_per_step", o.tokens_per_step).add("steps", o.max_steps).add("seed", o.seed);
        row.add("gpus", ranks.size).add("context_parallel", model.ranks.context);
        row.add("settings", options_settings(settings.table()));
        log->write(row.add("floor_nats", data.floor));
    }

    // -----------------------------------------------------------------------------------------------------------------
    // The parts of a step, in their order

    // The step's micro-batches, in pinned memory. All but the first step's have been prepared by prepare_next().
    const int* batch() {
        began = now();
        if (step <= first_step + 2) timed_from = step, timed_since = began, step_seconds = 0;
        if (written.valid() && written.wait_for(std::chrono::seconds(0)) == std::future_status::ready)
            end_of_writing();
        if (!prepared) prepare(now_at);
        prepared = true;
        g_step = step + 1;
        ranks.allow(step > first_step ? o.timeout : long_timeout(o));
        return now_at;
    }
    AdamW hyper() const {
        const auto lr = static_cast<float>(o.learning_rate(step));
        return {lr, 0.9f, o.beta2, 1e-8f, o.weight_decay, o.max_norm, step + 1, uint64_t(o.seed)};
    }
    // Prepares the next step's micro-batches while the GPU works. A signal or an error of one rank becomes one of all,
    // at the same step.
    void prepare_next() {
        if (!o.overfit) position = train.state();
        if (another()) keep_error_of([&] { prepare(next); });
        if (ranks.size == 1) return;
        *ends = int(g_signal) | (late_error ? kFailed : 0);
        gather_ends(model, ends);
    }
    // Reads the loss and the gradients' norm, prints and logs them. Throws if one is not finite.
    void finish_step() {
        std::vector<A> stats(model.num_losses() + 1);
        dev.download_marked(stats.data(), model.stats(), stats.size() * sizeof(A));
        if (ranks.size > 1) hear_ends();
        loss = 0;  // in the order of the data, whichever rank had it
        for (int i = 0; i < model.micro_steps; i++)
            for (int r = 0; r < ranks.size; r++) loss += stats[r * model.micro_steps + i];
        loss /= model.num_losses();
        const double norm = stats.back();
        if (!std::isfinite(loss) || !std::isfinite(norm)) {
            await_checkpoint();  // so that the last good one is whole
            const std::string what = format("step %d: loss %g, gradient norm %g", step + 1, loss, norm);
            check_parameters(model, what, last_good());
            throw Error(what + "; nothing was updated; " + last_good());
        }
        if (another()) std::swap(now_at, next);
        const double lr = o.learning_rate(step), ms = 1e3 * (now() - began), tok_s = o.tokens_per_step / ms * 1e3;
        const double mfu = mfu_percent(model.config.flops_per_token(o.T), tok_s, ranks.size, peak);
        step++;
        step_seconds += ms / 1e3;
        std::printf("step %d/%d | loss %.4f | norm %.4f | lr %.2e | %.1f ms | %.0f tok/s | MFU %s | ETA %s\n", step,
                    o.max_steps, loss, norm, lr, ms, tok_s, peak > 0 ? format("%.1f%%", mfu).c_str() : "n/a",
                    minutes((o.max_steps - step) * (now() - timed_since) / (step - timed_from)).c_str());
        Row row("train");
        row.add("step", step).add("loss_nats", loss).add("grad_norm", norm).add("lr", lr);
        row.add("step_ms", ms).add("tokens_per_s", tok_s).add("mfu_percent", mfu);
        keep_error_of([&] { log->write(row); });
    }

    // -----------------------------------------------------------------------------------------------------------------
    // What happens between steps

    bool goes_on() const { return step < o.max_steps && !interrupted() && !failed(); }
    bool due(int every) const { return every > 0 && (step % every == 0 || step == o.max_steps); }
    int interrupted() const { return ranks.size == 1 ? int(g_signal) : signal; }  // by which signal, to any rank
    // An error of the data, the log or a checkpoint, on any rank. The run ends with a checkpoint, and the rank that has it throws it.
    bool failed() const { return ranks.size == 1 ? late_error != nullptr : others_failed; }
    void rethrow() const {
        if (late_error) std::rethrow_exception(late_error);
    }

    // The loss on the validation data, and the answers to multiple-choice questions.
    void validate() {
        if (val)
            keep_error_of([&] {
                val_loss = ::validate(model, *val, o.val_batches).loss;
                std::printf("step %d/%d | val loss %.4f%s\n", step, o.max_steps, val_loss, floor().c_str());
                log->write(Row("val").add("step", step).add("loss_nats", val_loss).add("floor_nats", data.floor));
            });
        if (choices.empty()) return;
        const int correct = count_correct(ending_losses(model, choices), choices), all = choices.size();
        std::printf("step %d/%d | hellaswag %d of %d, %.2f%%\n", step, o.max_steps, correct, all, 100. * correct / all);
        keep_error_of(
            [&] { log->write(Row("hellaswag").add("step", step).add("correct", correct).add("examples", all)); });
    }

    // Writes a text, on rank 0. The others wait at the next step.
    void sample() {
        if (step == 0 || ranks.rank > 0) return;
        Range range("sample");
        const Sampling sampling = {o.temperature, o.top_k};
        const std::string text =
            o.prompt + generate(model, tokenizer, prompt, o.sample_length, sampling, mix(o.seed, step));
        std::printf("step %d/%d | sample\n---\n", step, o.max_steps);
        print_text(text);
        std::puts("\n---");
        keep_error_of([&] { log->write(Row("sample").add("step", step).add("text", text)); });
    }

    // A checkpoint of this step, which a thread writes. Training waits only for the snapshot, and for the checkpoint
    // before if it is still being written.
    void save() {
        Range range("checkpoint");
        await_checkpoint();
        check_parameters(model, format("step %d: no checkpoint is written", step), last_good());
        if (ranks.rank == 0) dev.download(snapshot, model.params.base, model.params.bytes);
        move_optimizer(model, true, [&](size_t offset, const char* device, size_t bytes) {
            dev.download(snapshot + model.params.bytes + offset, device, bytes);
        });
        dev.sync();
        if (ranks.rank > 0) return;
        identity.recipe = o.recipe();
        writing = step;
        const Counters counters{uint64_t(step), 0, position};
        ranks.allow(0);  // without a thread to spare it is written here
        written = start_async([this, counters] { write_checkpoint(counters); });
        ranks.allow(o.timeout);
    }

    // A checkpoint of what is good, also after an error. Where it cannot be written it is tried once more.
    void save_at_the_end() {
        if (!o.output_dir.empty() && step > 0) {
            await_checkpoint();
            for (int tries = 0; tries < 2 && last_checkpoint != step; tries++) {
                save();
                await_checkpoint();
            }
        }
        keep_error_of([&] { log->retry(); });
    }

    // How it went, what is kept, what to do next.
    void conclude() {
        if (step == first_step || o.profile) return;
        const std::string val = std::isnan(val_loss) ? "" : format(" | val loss %.4f", val_loss);
        std::printf("%d steps in %s | loss %.4f%s%s | %.0f tok/s\n", step - first_step, minutes(now() - begin).c_str(),
                    loss, val.c_str(), floor().c_str(), o.tokens_per_step * double(step - timed_from) / step_seconds);
        if (o.output_dir.empty()) return void(std::puts("nothing was kept: -o DIR keeps model and log"));
        std::string next = "the same command with -y, which goes on";
        if (!interrupted() && can_generate(model.config.V))
            next = command_to_generate();
        std::printf("the model is %s\nnext: %s\n", model_path(o.output_dir, step).c_str(), next.c_str());
    }

    // For a shell in the directory where this program was called, on the same device.
    std::string command_to_generate() const {
        Config ignored;
        const bool a_preset = find_config(o.output_dir, &ignored);  // a directory that is called "tiny"
        std::string command = shell_quoted(o.program) + " -e ";
        command += shell_quoted_path((a_preset ? "./" : "") + o.output_dir);
        command += " --generate 500 --prompt Once";
        if (!o.tokenizer.empty())
            command += " --tokenizer " + shell_quoted_path(o.tokenizer);
        if (o.device != "auto")
            command += " --device " + o.device;
        if (o.attention != Options().attention)
            command += " --attention " + o.attention;
        return command;
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Starting from a checkpoint

    // The newest; false if there is none. Rank 0 reads and sends, because the directory need not exist on other
    // machines.
    bool restore() {
        ranks.allow(0);  // a disk may take its time
        const int newest = ranks.gather(ranks.rank > 0 ? -1 : checkpoint_to_resume(o.output_dir))[0];
        if (newest < 0) {
            ranks.allow(long_timeout(o));
            return false;
        }
        const std::string path = model_path(o.output_dir, newest);
        identity.recipe = o.recipe();
        std::unique_ptr<StateFile> state;  // of rank 0
        if (ranks.rank == 0) state = open_checkpoint(newest);
        const Counters counters = ranks.gather(state ? state->counters : Counters{})[0];
        if (state) read_parameters(path, counters.model_checksum);
        send_to_all(model, &Model::params);
        move_optimizer(model, false, [&](size_t offset, char* device, size_t bytes) {
            stream_in(dev, state->file, state->begin + offset, bytes, bytes, [&](const char* piece, size_t at, size_t n) {
                dev.upload(device + at, piece, n);
                state->add(piece, n);
            });
        });
        if (state) state->check();
        dev.sync();
        check_parameters(model, path, kRemove);
        train.restore(position = counters.data);
        last_checkpoint = step = first_step = newest;
        ranks.allow(long_timeout(o));
        return true;
    }

    uint64_t train_windows() const { return train.windows(); }

  private:
    const Dev& dev;
    const Data data;
    const Ranks<Dev>& ranks = model.ranks;
    const Tokenizer tokenizer;
    std::vector<int> prompt;  // of samples
    Loader train;
    std::unique_ptr<Loader> val;
    std::vector<Choice> choices;
    Identity identity;
    std::unique_ptr<Log> log = std::make_unique<Log>();
    OutputDir* output = nullptr;  // null: this rank writes no files
    int first_step = 0;  // of this process
    int last_checkpoint = -1, signal = 0;
    const double begin = now(), peak = peak_tflops(model.dev.name, std::is_same_v<X, bf16>, model.dev.tf32);
    double began = 0;                   // when the step began
    double loss = NAN, val_loss = NAN;  // the last ones
    // The pace is that of the steps after the second, because the first two make plans, connections and a CUDA graph.
    int timed_from = 0;
    double timed_since = 0, step_seconds = 0;

    bool tf32() const { return dev.tf32 && std::is_same_v<X, float>; }
    std::string floor() const { return std::isnan(data.floor) ? "" : format(" | floor %.4f", data.floor); }

    // Batches of two steps, pinned. The GPU works on one while the other is prepared. The training data continues at
    // `position` after the first of them.
    int *host = nullptr, *now_at = nullptr, *next = nullptr;
    bool prepared = false;
    LoaderState position{};
    std::exception_ptr late_error;  // the first one of this rank that does not spoil the step
    bool others_failed = false;
    int* ends = nullptr;  // pinned: the signal that this rank got, and whether it failed
    static constexpr int kFailed = 256;
    void hear_ends() {
        std::vector<int> all(ranks.size);
        dev.download_marked(all.data(), model.workspace().ends, all.size() * sizeof(int));
        for (const int e : all) {
            signal = std::max(signal, e % kFailed);
            others_failed |= e >= kFailed;
        }
    }
    bool another() const { return !o.overfit && step + 1 < o.max_steps; }
    template <class F>
    void keep_error_of(F body) {
        try {
            body();
        } catch (const std::exception&) {
            if (!late_error) late_error = std::current_exception();
        }
    }
    void prepare(int* to) {  // group r of n takes micro-batches r, r + n, … of the step
        for (int i = 0; i < model.micro_steps; i++) {
            train.skip(model.ranks.group());
            model.fill_batch(to + i * model.batch_ints(), train);
            train.skip(model.ranks.groups() - 1 - model.ranks.group());
        }
    }
    std::string last_good() const {
        const std::string path = last_checkpoint < 0 ? "none" : model_path(o.output_dir, last_checkpoint);
        return "last good checkpoint: " + path + "; a lower -l or a longer -u may help";
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Checkpoints

    // The parameters and the optimizer's state, in pinned memory, on rank 0 alone.
    char* snapshot = nullptr;
    std::future<void> written;  // the last checkpoint, by write_checkpoint()
    int writing = -1;           // its step
    int tried = -1;             // the last step of which this process began to write a checkpoint
    std::exception_ptr prune_error;
    // Waits for the checkpoint that is being written. All ranks call this together.
    void await_checkpoint() {
        ranks.allow(0);  // a disk may take its time
        if (written.valid()) end_of_writing();
        if (ranks.rank == 0) ranks.allow(o.timeout);  // the others may still wait for its disk
        last_checkpoint = ranks.gather(last_checkpoint)[0];
        ranks.allow(o.timeout);
    }
    // An error of writing ends the run, which then tries again. A checkpoint counts when it is whole, even if older ones
    // could not be removed.
    void end_of_writing() {
        keep_error_of([&] {
            written.get();
            last_checkpoint = writing;
            if (prune_error) std::rethrow_exception(std::exchange(prune_error, nullptr));
        });
    }

    // Runs beside training, and reads nothing that changes until await_checkpoint() returns. The model is written last,
    // because a checkpoint is there when its model is.
    void write_checkpoint(Counters counters) {
        const double start = now();
        const int step = static_cast<int>(counters.step);
        const std::string state = state_path(o.output_dir, step);
        const std::string path = model_path(o.output_dir, step);
        if (tried != step && access(path.c_str(), F_OK) == 0)
            throw Error(path + ": is not this run's, and is not overwritten; move it away");
        tried = step;
        counters.model_checksum = checksum64(snapshot, model.params.bytes);
        log->sync();  // no checkpoint is ahead of its log, whatever happens
        log->warn_if_replaced();
        output->warn_if_replaced();
        write_state(state, identity, counters,
                    {snapshot + model.params.bytes, model.adam.bytes * model.shards()});
        try {
            write_model(path, {dtype_of<X>(), model.config}, snapshot);
        } catch (...) {
            if (access(path.c_str(), F_OK)) unlink(state.c_str());  // what is tried next may need its space
            throw;
        }
        std::printf("checkpoint %s (and state_%08d.bin): %.2f GB in %.2f s\n", path.c_str(), step,
                    snapshot_bytes(model) / 1e9, now() - start);
        try {
            prune_checkpoints(o.output_dir, o.keep, o.keep_every);
        } catch (const Error&) {
            prune_error = std::current_exception();
        }
    }

    std::unique_ptr<StateFile> open_checkpoint(int newest) const {
        const std::string path = model_path(o.output_dir, newest);
        auto state = std::make_unique<StateFile>(state_path(o.output_dir, newest), identity,
                                                 model.adam.bytes * model.shards());
        if (!state->recipe_changes.empty())
            std::printf("changed since the checkpoint: %s\n", state->recipe_changes.c_str());
        if (state->counters.step != uint64_t(newest))
            refuse(state->file.path, "the step in it", newest, state->counters.step,
                   "give it and its model their names back");
        const ModelHeader header = read_model_header(path);
        const ModelHeader mine = {dtype_of<X>(), model.config};
        if (std::memcmp(&header, &mine, sizeof header)) refuse(path, "a model", words(mine), words(header), kRemove);
        return state;
    }

    // As they are in the file of a model like this one.
    void read_parameters(const std::string& path, uint64_t expected) {
        const InputFile file(path);
        const size_t bytes = model.params.bytes;
        Checksum64 checksum(bytes);
        stream_in(dev, file, kHeaderBytes, bytes, bytes, [&](const char* piece, size_t at, size_t n) {
            dev.upload(model.params.base + at, piece, n);
            checksum.add(piece, n);
        });
        if (checksum.value() != expected)
            refuse(path, "damaged parameters", hex(expected), hex(checksum.value()), kRemove);
    }
    static constexpr char kRemove[] = "remove it and its state to resume from the checkpoint before";
};
