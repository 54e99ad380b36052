// What a model has learned: its loss on validation data and its answers to multiple-choice
// questions. During a run, Evaluation shows both every few steps, and samples of the model's text.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "data/loader.h"
#include "parallel/watchdog.h"
#include "run/choices.h"
#include "run/data.h"
#include "run/log.h"
#include "run/range.h"
#include "run/sample.h"
#include "run/settings.h"
#include "run/stop.h"

// -------------------------------------------------------------------------------------------------
// Validation

// Validation data is read in order.
inline std::unique_ptr<Loader> validation_loader(const Options& o, const Source& source,
                                                 int vocabulary, const Tokenizer& tokenizer) {
    return std::make_unique<Loader>(source, LoaderOptions{.B = o.B, .T = o.T, .vocab = vocabulary},
                                    tokenizer);
}

struct Validation {
    double loss;  // mean over the windows
    uint64_t windows;
};

// The mean loss over the windows of the loader's first `max_batches` batches, or over all windows
// if there are fewer batches or `max_batches` is 0 or -1.
//
// Each group of ranks evaluates its part of the batches and, if its ranks share sequences, each
// rank its tokens of every window. The windows' losses are added in fp64 and in the order of the
// windows, so that the result does not depend on the number of groups.
template <class Model>
Validation validate(Model& model, Loader& loader, int max_batches) {
    const auto& ranks = model.ranks;
    Range range("validate");
    loader.reset();
    const uint64_t B = model.B;
    const uint64_t T = model.T;
    const uint64_t all = loader.windows();
    const uint64_t windows = max_batches > 0 ? std::min(max_batches * B, all) : all;
    std::vector<double> losses(windows);  // 0 if another group of ranks evaluates the window
    std::vector<int> host(model.batch_ints());
    std::vector<typename Model::A> token_losses(B * T);

    std::exception_ptr error;
    try {
        for (uint64_t first = 0; first < windows; first += B) {
            const uint64_t batch = first / B;
            const bool is_mine = batch % ranks.groups() == uint64_t(ranks.group());
            if (!is_mine) {
                loader.skip(1);
                continue;
            }
            model.fill_batch(host.data(), loader);
            model.upload(host.data(), 1);
            model.evaluate_micro_batch(0);
            note_progress();
            model.dev.download(token_losses.data(), model.token_losses(),
                               token_losses.size() * sizeof(token_losses[0]));
            // The loader fills its last batch with windows of the next epoch, which do not count.
            const uint64_t end = std::min(first + B, windows);
            for (uint64_t w = first; w < end; w++) {
                const auto row = token_losses.begin() + (w - first) * T;
                losses[w] = std::accumulate(row, row + T, 0.0) / (T * ranks.context);
            }
        }
    } catch (const Error&) {
        // Thrown below: first this rank takes part in the sum, which the others wait for.
        error = std::current_exception();
    }
    ranks.sum_over_ranks(losses);
    note_progress();
    if (error)
        std::rethrow_exception(error);
    return {.loss = std::accumulate(losses.begin(), losses.end(), 0.0) / windows,
            .windows = windows};
}

// -------------------------------------------------------------------------------------------------
// Multiple choice

// An ending of a question. It is one sequence of a batch: the question's context, then the ending.
struct EndingOfQuestion {
    size_t question;
    size_t ending;
};

// Writes the sequence's inputs and targets. Whatever follows the ending stays as it is.
inline void write_sequence(const Question& question, size_t ending, int* inputs, int* targets) {
    std::vector<int> text = question.context;
    const std::vector<int>& rest = question.endings[ending];
    text.insert(text.end(), rest.begin(), rest.end());
    std::copy(text.begin(), text.end() - 1, inputs);
    std::copy(text.begin() + 1, text.end(), targets);
}

// The mean loss of the ending's tokens, given the losses of a sequence's positions. The ending's
// first token is predicted at the last position of the context.
template <class A>
double ending_loss(const Question& question, size_t ending, const A* losses) {
    const A* const first = losses + question.context.size() - 1;
    const size_t n = question.endings[ending].size();
    return std::accumulate(first, first + n, 0.0) / n;
}

// result[i][e] is the mean loss of the tokens of ending e after the context of question i. The
// ending with the lowest loss is the model's answer.
template <class Model>
std::vector<std::vector<double>> ending_losses(Model& model,
                                               const std::vector<Question>& questions) {
    Range range("multiple choice");
    const size_t B = model.B;
    const size_t T = model.T;
    const size_t N = B * T;
    std::vector<EndingOfQuestion> sequences;  // of all batches
    for (size_t i = 0; i < questions.size(); i++)
        for (size_t e = 0; e < questions[i].endings.size(); e++)
            sequences.push_back({.question = i, .ending = e});

    std::vector<double> means(sequences.size());  // 0 if another rank computes it
    std::vector<int> host(model.batch_ints());
    std::vector<typename Model::A> token_losses(N);
    for (size_t first = 0; first < sequences.size(); first += B) {
        const size_t batch = first / B;
        const bool is_mine = batch % model.ranks.size == size_t(model.ranks.rank);
        if (!is_mine)
            continue;

        const size_t end = std::min(first + B, sequences.size());
        std::fill(host.begin(), host.end(), 0);
        for (size_t s = first; s < end; s++) {
            int* const inputs = host.data() + (s - first) * T;
            int* const targets = inputs + N;
            write_sequence(questions[sequences[s].question], sequences[s].ending, inputs, targets);
        }
        model.upload(host.data(), 1);
        model.evaluate_micro_batch(0);
        note_progress();
        model.dev.download(token_losses.data(), model.token_losses(), N * sizeof(token_losses[0]));
        for (size_t s = first; s < end; s++)
            means[s] = ending_loss(questions[sequences[s].question], sequences[s].ending,
                                   token_losses.data() + (s - first) * T);
    }
    model.ranks.sum_over_ranks(means);
    note_progress();

    std::vector<std::vector<double>> result(questions.size());
    for (size_t s = 0; s < sequences.size(); s++)
        result[sequences[s].question].push_back(means[s]);
    return result;
}

inline int answer(const std::vector<double>& ending_losses) {
    const auto lowest = std::min_element(ending_losses.begin(), ending_losses.end());
    return static_cast<int>(lowest - ending_losses.begin());
}

inline int count_correct(const std::vector<std::vector<double>>& losses,
                         const std::vector<Question>& questions) {
    int correct = 0;
    for (size_t i = 0; i < questions.size(); i++)
        if (answer(losses[i]) == questions[i].label)
            correct++;
    return correct;
}

// -------------------------------------------------------------------------------------------------

// Prints and logs, when due: the validation loss, the answers to --hellaswag, and samples.
template <class Model>
class Evaluation {
  public:
    Evaluation(const Options& o, Model& model, const Data& data, const Tokenizer& tokenizer,
               Stop<Model>& stop, Log& log)
        : o_(o), model_(model), floor_(data.floor), tokenizer_(tokenizer), stop_(stop), log_(log) {
        const int V = model.config.V;
        if (!data.val.empty())
            val_ = validation_loader(o, data.val, V, tokenizer);
        if (o.sample_every && model.ranks.rank == 0)
            prompt_ = start_of_text(tokenizer, o.prompt, V);
        if (!o.hellaswag.empty())
            questions_ = read_questions(o.hellaswag, V, o.T);
    }

    const Loader* loader() const { return val_.get(); }  // null without validation data
    double loss() const { return loss_; }                // of the last validation, or NaN
    std::string floor() const { return std::isnan(floor_) ? "" : format(" | floor %.4f", floor_); }

    // Call this when `step` steps are done.
    void run_if_due(int step) {
        if (is_due(o_.val_every, step)) {
            if (val_)
                stop_.defer_error([&] { validate(step); });
            if (!questions_.empty())
                answer_questions(step);
        }
        // Meanwhile the other ranks wait in the next step.
        if (is_due(o_.sample_every, step) && step > 0 && model_.ranks.rank == 0)
            sample(step);
    }

  private:
    bool is_due(int every, int step) const {
        return every > 0 && (step % every == 0 || step == o_.max_steps);
    }

    void validate(int step) {
        loss_ = ::validate(model_, *val_, o_.val_batches).loss;
        std::printf("step %d/%d | val loss %.4f%s\n", step, o_.max_steps, loss_, floor().c_str());
        log_.write(Row("val").add("step", step).add("loss_nats", loss_).add("floor_nats", floor_));
    }

    void answer_questions(int step) {
        const int correct = count_correct(ending_losses(model_, questions_), questions_);
        const int all = static_cast<int>(questions_.size());
        std::printf("step %d/%d | hellaswag %d of %d, %.2f%%\n", step, o_.max_steps, correct, all,
                    100. * correct / all);
        stop_.defer_error([&] {
            log_.write(
                Row("hellaswag").add("step", step).add("correct", correct).add("examples", all));
        });
    }

    void sample(int step) {
        Range range("sample");
        const Sampling sampling = {.temperature = o_.temperature, .top_k = o_.top_k};
        const std::string text = o_.prompt + generate(model_, tokenizer_, prompt_, o_.sample_length,
                                                      sampling, mix(o_.seed, step));
        std::printf("step %d/%d | sample\n---\n", step, o_.max_steps);
        print_text(text);
        std::puts("\n---");
        stop_.defer_error([&] { log_.write(Row("sample").add("step", step).add("text", text)); });
    }

    const Options& o_;
    Model& model_;
    const double floor_;  // no model can get below this loss; NaN if it is not known
    const Tokenizer& tokenizer_;
    Stop<Model>& stop_;
    Log& log_;
    std::unique_ptr<Loader> val_;
    std::vector<int> prompt_;  // that samples continue
    std::vector<Question> questions_;
    double loss_ = NAN;
};
