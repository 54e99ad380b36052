// The two modes that do not train: --eval-only and --generate.
#pragma once
#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include "data/file.h"
#include "parallel/ranks.h"
#include "run/checkpoint_files.h"
#include "run/data.h"
#include "run/evaluation.h"
#include "run/log.h"
#include "run/memory.h"
#include "run/sample.h"
#include "run/settings.h"
#include "run/weights.h"

// Prints the answer to each question, with the losses that it follows from, and how many are right.
inline void print_answers(const std::vector<Question>& questions,
                          const std::vector<std::vector<double>>& losses) {
    for (size_t i = 0; i < questions.size(); i++) {
        std::string line;
        for (double loss : losses[i])
            line += format(" %.6f", loss);
        std::printf("question %d | answer %d | label %d | losses%s\n", questions[i].index,
                    answer(losses[i]), questions[i].label, line.c_str());
    }
    const int correct = count_correct(losses, questions);
    std::printf("hellaswag %d of %zu, %.2f%%\n", correct, questions.size(),
                100.0 * correct / questions.size());
}

// --eval-only prints the loss over the validation data, all of it unless --val-batches limits it,
// and the answers to the questions of --hellaswag one by one. With --hellaswag, validation data is
// used only if -j names some.
template <class Model>
int run_evaluate(const typename Model::Dev& dev, Options& o, const Config& config, bool from_file,
                 const Ranks<typename Model::Dev>& ranks) {
    const bool on_cpu = std::string(Model::Dev::kind) == "cpu";
    resolve_sizes(o, config.max_T, config.C, on_cpu, ranks.size);
    Model model(dev, config, {.attention = {o.attention}, .B = o.B, .T = o.T / ranks.context},
                ranks);

    std::vector<Question> questions;
    if (!o.hellaswag.empty())
        questions = read_questions(o.hellaswag, config.V, o.T);
    std::unique_ptr<Loader> val;
    double floor = NAN;
    if (questions.empty() || !o.val_data.empty()) {
        // Without -j this is the built-in corpus, because --eval-only accepts no -i.
        const Data data = o.val_data.empty() ? find_data(o) : Data{.val = o.val_data};
        val = validation_loader(o, data.val, config.V, Tokenizer(o.tokenizer));
        floor = data.floor;
    }

    allocate_or_explain(model);
    if (from_file)
        load(model, o.init);
    else
        init_random(model, o.seed);

    if (val) {
        if (ranks.rank == 0)
            std::fprintf(stderr, "validation data: %s\n", val->description().c_str());
        const auto [loss, windows] = validate(model, *val, o.val_batches);
        std::printf("val loss %.6f over %zu sequences of %d tokens%s\n", loss, windows, o.T,
                    std::isnan(floor) ? "" : format(" | floor %.6f", floor).c_str());
    }
    if (!questions.empty())
        print_answers(questions, ending_losses(model, questions));
    return 0;
}

// --generate prints the texts that follow --prompt, token by token.
template <class Model>
int run_generate(const typename Model::Dev& dev, const Options& o, const Config& config) {
    const int T = std::min(config.max_T, o.T ? o.T : 1024);
    const Tokenizer tokenizer(o.tokenizer);
    Model model(dev, config, {.attention = {o.attention}, .B = 1, .T = T, .cache = true});
    if (o.memory) {
        print_memory_table(model);
        return 0;
    }
    const std::vector<int> context = start_of_text(tokenizer, o.prompt, config.V);
    allocate_or_explain(model);
    load(model, o.init);

    TextPrinter printer;
    const auto print = [&](const std::string& text) {
        printer.print(text);
        if (std::fflush(stdout))
            throw file_error("the text", "write", errno);
    };
    int generated = 0;  // tokens
    const auto print_token = [&](const std::string& text) {
        generated++;
        print(text);
    };

    const Sampling sampling = {.temperature = o.temperature, .top_k = o.top_k};
    const double start = now();
    for (int i = 0; i < o.samples; i++) {
        if (i > 0)
            std::puts("---");
        print(o.prompt);
        generate(model, tokenizer, context, o.generate, sampling, uint64_t(o.seed) + i,
                 print_token);
        printer.end();
        std::puts("");
    }
    const double seconds = now() - start;
    std::fprintf(stderr, "%d tokens in %.1f s: %.0f tokens/s\n", generated, seconds,
                 generated / seconds);
    return 0;
}
