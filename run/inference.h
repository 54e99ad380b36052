// What a model is made for if not for training: --eval-only and --generate.
#pragma once
#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include "run/evaluate.h"
#include "run/log.h"
#include "run/memory.h"
#include "run/sample.h"
#include "run/settings.h"
#include "run/weights.h"

// --eval-only prints the loss over the whole validation data, and the answers to --hellaswag one by one.
template <class Model, class Config, class Ranks>
int run_evaluate(const typename Model::Dev& dev, Options& o, const Config& config, bool from_file, Job& job,
                 const Ranks& ranks) {
    resolve_sizes(o, config.max_T, config.C, std::string(Model::Dev::kind) == "cpu", job.size);
    Model model(dev, config, o.kernel(), o.B, o.T / ranks.context, 1, false, 0, ranks);
    std::vector<Choice> choices;
    if (!o.hellaswag.empty()) choices = read_choices(o.hellaswag, config.V, o.T);
    std::unique_ptr<Loader> val;
    double floor = NAN;
    if (choices.empty() || !o.val_data.empty()) {
        const Data data = o.val_data.empty() ? find_data_together(o, job) : Data{"", o.val_data};
        if (data.val.empty()) throw UsageError("--eval-only with -i needs validation data: give it with -j");
        val = std::make_unique<Loader>(data.val, o.B, o.T, config.V, false, 0, Tokenizer(o.tokenizer));
        if (val->is_text_in_bytes() && from_file && job.rank == 0) warn_of_bytes(o, config.V);
        floor = data.floor;
    }
    allocate_or_explain(model);
    start_weights(model, o, from_file);
    if (val) {
        const auto [loss, batches] = validate(model, *val, o.val_batches, job);
        std::printf("val loss %.6f over %llu batches of %d x %d tokens%s\n", loss,
                    static_cast<unsigned long long>(batches), o.B, o.T,
                    std::isnan(floor) ? "" : format(" | floor %.6f", floor).c_str());
    }
    const std::vector<std::vector<double>> losses = ending_losses(model, choices, job);
    for (size_t i = 0; i < choices.size(); i++) {
        std::printf("question %d | answer %d | label %d | losses", choices[i].index, answer(losses[i]),
                    choices[i].label);
        for (double loss : losses[i]) std::printf(" %.6f", loss);
        std::printf("\n");
    }
    const int correct = count_correct(losses, choices);
    if (!choices.empty())
        std::printf("hellaswag %d of %zu, %.2f%%\n", correct, choices.size(), 100.0 * correct / choices.size());
    model.leave_ring();
    job.leave();
    return 0;
}

template <class Model, class Config>
int run_generate(const typename Model::Dev& dev, const Options& o, const Config& config) {
    const int T = std::min(config.max_T, o.T ? o.T : 1024);
    const Tokenizer tokenizer(o.tokenizer);
    if (!o.prompt.empty()) warn_of_bytes(o, config.V);
    Model model(dev, config, o.kernel(), 1, T, 1, false);
    allocate_or_explain(model);
    load(model, o.init);
    const std::string text = generate(model, tokenizer, o.prompt, o.generate, {o.temperature, o.top_k}, o.seed);
    std::printf("%s\n", for_terminal(text).c_str());
    return 0;
}
