// What a model knows: its loss on data that it has not seen, its answers to multiple-choice
// questions, and what a run shows of these, and of the model's texts, every so many steps.
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

struct Validation {
    double loss;
    uint64_t windows;
};

// Mean loss over the windows of the loader's first `at_most` batches, or over all windows if it is
// not positive or too large. Each rank evaluates its share of the batches, and ranks that share
// sequences their tokens of each window. The windows' losses are summed in fp64 and in their order,
// whatever the number of ranks. Windows that fill up the last batch do not count. If the data
// cannot be read, all ranks end together, and this one throws.
template <class Model>
Validation validate(Model& model, Loader& loader, int at_most) {
    const auto& ranks = model.ranks;
    Range range("validate");
    loader.reset();
    std::vector<int> host(model.batch_ints());
    const uint64_t B = model.B;
    const uint64_t T = model.T;
    const uint64_t all = loader.windows();
    const uint64_t windows = at_most > 0 ? std::min(at_most * B, all) : all;
    std::vector<double> losses(windows);
    std::vector<typename Model::A> tokens(B * T);
    std::exception_ptr error;
    try {
        for (uint64_t first = 0; first < windows; first += B) {
            if (first / B % ranks.groups() != uint64_t(ranks.group())) {
                loader.skip(1);
                continue;
            }
            model.fill_batch(host.data(), loader);
            model.upload(host.data(), 1);
            model.evaluate_micro_batch(0);
            note_progress();
            model.dev.download(tokens.data(), model.losses(), tokens.size() * sizeof(tokens[0]));
            for (uint64_t w = first; w < std::min(first + B, windows); w++) {
                const auto begin = tokens.begin() + (w - first) * T;
                losses[w] = std::accumulate(begin, begin + T, 0.0) / (T * ranks.context);
            }
        }
    } catch (const Error&) {
        error = std::current_exception();
    }
    ranks.sum_over_ranks(losses);
    note_progress();
    if (error)
        std::rethrow_exception(error);
    return {std::accumulate(losses.begin(), losses.end(), 0.0) / windows, windows};
}

// losses[i][e] is the mean loss of ending e's tokens after choice i's context. The lowest is the
// model's answer.
template <class Model>
std::vector<std::vector<double>> ending_losses(Model& model, const std::vector<Choice>& choices) {
    Range range("multiple choice");
    const size_t B = model.B;
    const size_t T = model.T;
    const size_t N = B * T;
    struct Row {
        size_t choice;
        size_t ending;
    };
    std::vector<Row> rows;  // of all batches, one after another
    for (size_t i = 0; i < choices.size(); i++)
        for (size_t e = 0; e < choices[i].endings.size(); e++)
            rows.push_back({i, e});
    std::vector<double> means(rows.size());  // 0 if another rank computes it
    std::vector<int> host(model.batch_ints());
    std::vector<typename Model::A> position(N);
    for (size_t first = 0; first < rows.size(); first += B) {
        if (first / B % model.ranks.size != size_t(model.ranks.rank))
            continue;
        const size_t last = std::min(first + B, rows.size());
        std::fill(host.begin(), host.end(), 0);
        for (size_t r = first; r < last; r++) {
            const auto [i, e] = rows[r];
            std::vector<int> text = choices[i].context;
            text.insert(text.end(), choices[i].endings[e].begin(), choices[i].endings[e].end());
            std::copy(text.begin(), text.end() - 1, &host[(r - first) * T]);
            std::copy(text.begin() + 1, text.end(), &host[N + (r - first) * T]);
        }
        model.upload(host.data(), 1);
        model.evaluate_micro_batch(0);
        note_progress();
        model.dev.download(position.data(), model.losses(), N * sizeof(position[0]));
        for (size_t r = first; r < last; r++) {
            const auto [i, e] = rows[r];
            const size_t begin = (r - first) * T + choices[i].context.size() - 1;
            const size_t n = choices[i].endings[e].size();
            means[r] =
                std::accumulate(position.begin() + begin, position.begin() + begin + n, 0.0) / n;
        }
    }
    model.ranks.sum_over_ranks(means);
    note_progress();
    std::vector<std::vector<double>> losses(choices.size());
    for (size_t r = 0; r < rows.size(); r++)
        losses[rows[r].choice].push_back(means[r]);
    return losses;
}
inline int answer(const std::vector<double>& losses) {
    return static_cast<int>(std::min_element(losses.begin(), losses.end()) - losses.begin());
}
inline int count_correct(const std::vector<std::vector<double>>& losses,
                         const std::vector<Choice>& choices) {
    int correct = 0;
    for (size_t i = 0; i < choices.size(); i++)
        correct += answer(losses[i]) == choices[i].label;
    return correct;
}

template <class Model>
class Evaluation {
  public:
    Evaluation(const Options& o, Model& model, const Data& data, const Tokenizer& tokenizer,
               Stop<Model>& stop, Log& log)
        : o_(o), model_(model), floor_(data.floor), tokenizer_(tokenizer), stop_(stop), log_(log) {
        const int V = model.config.V;
        if (!data.val.empty())
            val_ = std::make_unique<Loader>(data.val, LoaderOptions{.B = o.B, .T = o.T, .vocab = V},
                                            tokenizer);
        if (o.sample_every && model.ranks.rank == 0)
            prompt_ = start_of_text(tokenizer, o.prompt, V);
        if (!o.hellaswag.empty())
            choices_ = read_choices(o.hellaswag, V, o.T);
    }

    const Loader* loader() const { return val_.get(); }  // null without validation data
    double loss() const { return loss_; }                // the last one, NaN before
    std::string floor() const { return std::isnan(floor_) ? "" : format(" | floor %.4f", floor_); }

    // `step` steps are done.
    void run_if_due(int step) {
        if (due(o_.val_every, step)) {
            if (val_)
                stop_.defer_error([&] { validate(step); });
            if (!choices_.empty())
                answer_questions(step);
        }
        if (due(o_.sample_every, step) && step > 0 && model_.ranks.rank == 0)
            sample(step);  // the other ranks wait at the next step
    }

  private:
    const Options& o_;
    Model& model_;
    const double floor_;
    const Tokenizer& tokenizer_;
    Stop<Model>& stop_;
    Log& log_;
    std::unique_ptr<Loader> val_;
    std::vector<int> prompt_;  // of samples
    std::vector<Choice> choices_;
    double loss_ = NAN;

    bool due(int every, int step) const {
        return every > 0 && (step % every == 0 || step == o_.max_steps);
    }

    void validate(int step) {
        loss_ = ::validate(model_, *val_, o_.val_batches).loss;
        std::printf("step %d/%d | val loss %.4f%s\n", step, o_.max_steps, loss_, floor().c_str());
        log_.write(Row("val").add("step", step).add("loss_nats", loss_).add("floor_nats", floor_));
    }

    void answer_questions(int step) {
        const int correct = count_correct(ending_losses(model_, choices_), choices_);
        const int all = static_cast<int>(choices_.size());
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
};
