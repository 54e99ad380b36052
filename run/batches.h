// The micro-batches of a step. While the GPU works on one step, the host prepares the next step's.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "data/loader.h"
#include "run/settings.h"

// Reads a micro-batch, tokens and then targets, to `host`. The ranks of a context parallel group
// all read the same sequences, and each keeps its own positions of them.
template <class Model>
void read_micro_batch(const Model& m, int* host, Loader& loader) {
    const size_t N = m.sizes.N;
    if (m.ranks.context == 1)
        return loader.next(host, host + N);

    const size_t group_N = N * m.ranks.context;  // tokens of the whole sequences
    std::vector<int> whole(2 * group_N);
    loader.next(whole.data(), whole.data() + group_N);

    const Positions positions = m.positions();
    for (int part : {0, 1}) {  // tokens, targets
        const int* from = whole.data() + part * group_N;
        int* to = host + part * N;
        for (int b = 0; b < m.B; b++) {
            const int* sequence = from + size_t(b) * m.sequence_length();
            for (int t = 0; t < m.T; t++)
                to[size_t(b) * m.T + t] = sequence[positions.at(t)];
        }
    }
}

// The training data of a run, from its first window.
inline Loader training_loader(const Options& o, const Source& source, int vocabulary,
                              const Tokenizer& tokenizer) {
    Loader loader(source,
                  {.B = o.B,
                   .T = o.T,
                   .vocab = vocabulary,
                   .shuffle = !o.no_shuffle,
                   .seed = uint64_t(o.seed)},
                  tokenizer);
    if (loader.windows() < uint64_t(o.B))
        throw Error(format(
            "%s: has only %zu sequences of %d tokens, but a batch needs %d; use a smaller -b or -t",
            source.name.c_str(), loader.windows(), o.T, o.B));
    return loader;
}

template <class Model>
class Batches {
  public:
    Batches(const Options& o, Model& model, Loader loader)
        : model_(model), overfit_(o.overfit), loader_(std::move(loader)) {
        const size_t ints = size_t(model.micro_steps) * model.batch_ints();
        memory_ = static_cast<int*>(model.dev.alloc_host(2 * ints * sizeof(int)));
        current_ = memory_;
        next_ = memory_ + ints;
    }
    ~Batches() { model_.dev.free_host(memory_); }
    Batches(const Batches&) = delete;
    Batches& operator=(const Batches&) = delete;

    const Loader& loader() const { return loader_; }

    // This rank's micro-batches of the current step, in pinned memory.
    const int* current() {
        if (!current_prepared_)
            prepare(current_);
        current_prepared_ = true;
        return current_;
    }

    // Prepares the next step's micro-batches, unless this step is the last.
    void prepare_next(bool is_last) {
        if (overfit_)
            return;
        // The loader stands at the end of the current step's data, where a checkpoint of this step
        // resumes.
        position_ = loader_.state();
        if (is_last)
            return;
        prepare(next_);
        next_prepared_ = true;
    }

    // The step is done: the next step's micro-batches become the current ones.
    void advance() {
        if (!next_prepared_)
            return;
        std::swap(current_, next_);
        next_prepared_ = false;
    }

    // Where the data continues after the current step.
    const LoaderState& position() const { return position_; }
    void restore(const LoaderState& position) {
        position_ = position;
        loader_.restore(position);
    }

  private:
    // Group g of n trains on micro-batches g, g + n, … of the step.
    void prepare(int* to) {
        const auto& ranks = model_.ranks;
        for (int i = 0; i < model_.micro_steps; i++) {
            loader_.skip(ranks.group());
            model_.fill_batch(to + i * model_.batch_ints(), loader_);
            loader_.skip(ranks.groups() - 1 - ranks.group());
        }
    }

    Model& model_;
    const bool overfit_;  // all steps have the first one's micro-batches
    Loader loader_;
    LoaderState position_{};
    int* memory_ = nullptr;  // of current_ and next_
    int* current_ = nullptr;
    int* next_ = nullptr;
    bool current_prepared_ = false;  // from the first call of current() on
    bool next_prepared_ = false;
};
