// A training run: the model, and what accompanies it from step to step.
#pragma once
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "data/text.h"
#include "run/batches.h"
#include "run/checkpoints.h"
#include "run/data.h"
#include "run/evaluation.h"
#include "run/log.h"
#include "run/memory.h"
#include "run/output_dir.h"
#include "run/peak.h"
#include "run/report.h"
#include "run/settings.h"
#include "run/stop.h"

// A shell command that generates text with the model in this run's output directory, on the same
// device. It works in the directory from which this program was called.
inline std::string command_to_generate(const Options& o) {
    // A directory that is called "tiny" must not be taken for the preset.
    const bool named_like_preset = preset_config(o.output_dir).has_value();
    std::string command = shell_quoted(o.program) + " -e ";
    command += shell_quoted_path((named_like_preset ? "./" : "") + o.output_dir);
    command += " --generate 500 --prompt Once";
    if (!o.tokenizer.empty())
        command += " --tokenizer " + shell_quoted_path(o.tokenizer);
    if (o.device != "auto")
        command += " --device " + o.device;
    if (o.attention != Options().attention)
        command += " --attention " + o.attention;
    return command;
}

template <class Model>
struct Run {
    using Dev = typename Model::Dev;
    using X = typename Model::X;

    const Options& o;
    Model& model;
    const Dev& dev = model.dev;
    const Ranks<Dev>& ranks = model.ranks;
    const Data data;
    const Tokenizer& tokenizer;
    int step = 0;        // steps done
    int first_step = 0;  // steps done by earlier processes
    const double start = now();

    Log log;
    Stop<Model> stop;
    Batches<Model> batches;
    Evaluation<Model> evaluation;
    Checkpoints<Model> checkpoints;
    StepReport report;

    Run(const Options& o, Model& model, const Data& data, const Tokenizer& tokenizer,
        Loader train_loader)
        : o(o),
          model(model),
          data(data),
          tokenizer(tokenizer),
          stop(model),
          batches(o, model, std::move(train_loader)),
          evaluation(o, model, data, tokenizer, stop, log),
          checkpoints(o, model, batches, stop, log),
          report(o, {.flops_per_token = model.config.flops_per_token(o.T),
                     .ranks = ranks.size,
                     .peak = peak_tflops(dev.name, std::is_same_v<X, bf16>, dev.tf32)}) {}

    // ---------------------------------------------------------------------------------------------
    // Before the first step

    // Prints the options that have been changed, the device, the model, the data and the memory.
    void describe() const {
        Options defaults;
        if (ranks.size == 1) {  // a single rank uses neither, so neither counts as changed
            defaults.zero = o.zero;
            defaults.overlap = o.overlap;
        }
        // One of them is --prompt, which may contain anything.
        print_text(options_changed(Options(o).table(), defaults.table()));

        const Config& c = model.config;
        std::string attention = "plain loops";
        if constexpr (std::is_base_of_v<Cuda, Dev>)
            attention = attention_kernel<X>(dev, model.attention, c.HS()).name;
        std::printf("device             %s, %s%s, attention by %s\n", dev.name.c_str(),
                    name_of(dtype_of<X>()), model.tf32() ? " with TF32 matmuls" : "",
                    attention.c_str());
        if (ranks.size > 1)
            std::printf("ranks              %d, %d on this machine\n", ranks.size,
                        ranks.local_size);
        std::printf(
            "parameters         %.1f M: %d layers, %d heads, %d channels, %d positions, vocabulary "
            "%d (padded %d)\n",
            model.num_parameters / 1e6, c.L, c.NH, c.C, c.max_T, c.V, c.Vp);
        std::printf("train data         %s\n", batches.loader().description().c_str());
        if (evaluation.loader())
            std::printf("validation data    %s\n", evaluation.loader()->description().c_str());
        std::printf("memory             %.1f MiB: %s\n", model.total_bytes() / kMiB,
                    by_arena(model, kMiB, 1).c_str());
    }

    // Continues from the newest checkpoint of the output directory. False if there is none.
    bool restore() {
        const int newest = checkpoints.restore();
        if (newest < 0)
            return false;
        first_step = newest;
        step = newest;
        return true;
    }

    // Throws an Error if the ranks' data or parameters differ. Their options have been compared in
    // the rendezvous.
    void check_ranks_agree() {
        if (ranks.size == 1)
            return;
        const struct {
            const char* name;
            uint64_t hash;
        } must_be_equal[] = {
            {"data", batches.loader().identity()},
            {"validation data", evaluation.loader() ? evaluation.loader()->identity() : 0},
            {"parameters",
             checksum(dev, model.workspace().scratch, model.params.base, model.params.bytes)}};
        for (const auto& [name, hash] : must_be_equal) {
            const std::vector<uint64_t> hashes = ranks.all_gather(hash);
            for (int r = 1; r < ranks.size; r++)
                if (hashes[r] != hashes[0])
                    throw Error(format(
                        "the %s of rank %d differ from rank 0's; give every rank the same files",
                        name, r));
        }
    }

    // Starts a new log or, when resuming, drops the rows of steps that will be done again. `output`
    // is null on ranks that write no files.
    void open_log(OutputDir* output) {
        if (!output)
            return;
        checkpoints.clean_up(*output);
        const std::string path = o.output_dir + "/log.jsonl";
        const bool resumed = step > 0;
        if (resumed)
            Log::truncate_after(path, step);
        log.open(path, resumed);

        std::string settings;
        for (const Field& option : options_settings(Options(o).table()))
            settings += option.name + " " + option.value + "\n";
        Row row("run");
        row.add("device", dev.name);
        row.add("precision", name_of(dtype_of<X>()));
        row.add("attention", o.attention);
        row.add("parameters", static_cast<long long>(model.num_parameters));
        row.add("B", o.B);
        row.add("T", o.T);
        row.add("tokens_per_step", o.tokens_per_step);
        row.add("steps", o.max_steps);
        row.add("seed", o.seed);
        row.add("gpus", ranks.size);
        row.add("context_parallel", ranks.context);
        row.add("settings", settings);
        row.add("floor_nats", data.floor);
        log.write(row);
    }

    // ---------------------------------------------------------------------------------------------
    // The parts of a step that need more than one of the members

    bool goes_on() const { return step < o.max_steps && !stop.signal() && !stop.failed(); }

    void begin_step() {
        report.begin_step(step, first_step);
        checkpoints.poll();
        g_step = step + 1;  // for the watchdog's message
        ranks.set_timeout(step > first_step ? o.timeout : o.first_timeout());
    }

    void prepare_next_batches() {
        const bool is_last = step + 1 == o.max_steps;
        stop.defer_error([&] { batches.prepare_next(is_last); });
    }

    // Waits for the loss and the gradient's norm, prints and logs them. Throws an Error if one of
    // them is not finite.
    void end_step() {
        const Statistics statistics = model.statistics().download(dev);
        note_progress();
        stop.receive_flags();
        if (!statistics.finite())
            throw_not_finite(statistics);
        batches.advance();
        step++;
        const Row row = report.print_step(step, statistics);
        stop.defer_error([&] { log.write(row); });
    }

    // Throws an Error that names what is not finite.
    [[noreturn]] void throw_not_finite(const Statistics& statistics) {
        checkpoints.wait();  // so that the last good checkpoint is complete
        const std::string what = format("step %d: loss %g, gradient norm %g", step + 1,
                                        statistics.loss, statistics.norm);
        check_parameters(model, what, checkpoints.last_good());
        throw Error(what + "; the model was not updated; " + checkpoints.last_good());
    }

    // ---------------------------------------------------------------------------------------------
    // After the last step

    // Prints how the run went, what is kept, and what to do next.
    void conclude() const {
        if (step == first_step || o.profile)
            return;
        const double val_loss = evaluation.loss();
        const std::string val = std::isnan(val_loss) ? "" : format(" | val loss %.4f", val_loss);
        std::printf("%d steps in %s | loss %.4f%s%s | %.0f tok/s\n", step - first_step,
                    minutes(now() - start).c_str(), report.loss(), val.c_str(),
                    evaluation.floor().c_str(), report.tokens_per_second());

        if (o.output_dir.empty()) {
            std::puts("nothing was saved; -o DIR saves the model and the log");
            return;
        }
        std::string next = "the same command with -y, to continue this run";
        if (!stop.signal() && can_generate(model.config.V))
            next = command_to_generate(o);
        std::printf("the model is %s\nnext: %s\n", model_path(o.output_dir, step).c_str(),
                    next.c_str());
    }
};
