// What a run shows of its model every so many steps: the loss on validation data, answers to multiple-choice questions,
// and a text.
#pragma once
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "run/data.h"
#include "run/evaluate.h"
#include "run/log.h"
#include "run/sample.h"
#include "run/settings.h"
#include "run/stop.h"

template <class Model>
class Evaluation {
  public:
    Evaluation(const Options& o, Model& model, const Data& data, const Tokenizer& tokenizer, Stop<Model>& stop, Log& log)
        : o_(o), model_(model), floor_(data.floor), tokenizer_(tokenizer), stop_(stop), log_(log) {
        const int V = model.config.V;
        if (!data.val.empty())
            val_ = std::make_unique<Loader>(data.val, o.B, o.T, V, false, 0, tokenizer);
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

    bool due(int every, int step) const { return every > 0 && (step % every == 0 || step == o_.max_steps); }

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
        stop_.defer_error(
            [&] { log_.write(Row("hellaswag").add("step", step).add("correct", correct).add("examples", all)); });
    }

    void sample(int step) {
        Range range("sample");
        const Sampling sampling = {.temperature = o_.temperature, .top_k = o_.top_k};
        const std::string text =
            o_.prompt + generate(model_, tokenizer_, prompt_, o_.sample_length, sampling, mix(o_.seed, step));
        std::printf("step %d/%d | sample\n---\n", step, o_.max_steps);
        print_text(text);
        std::puts("\n---");
        stop_.defer_error([&] { log_.write(Row("sample").add("step", step).add("text", text)); });
    }
};
