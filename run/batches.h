// The micro-batches of a step. The GPU works on one step's while the host prepares the next step's.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "data/loader.h"
#include "run/settings.h"

// Reads a micro-batch: tokens, then targets. All ranks of a context parallel group read the same
// sequences, and each keeps its own tokens of them.
template <class Model>
void next_tokens(const Model& m, int* host, Loader& loader) {
    const size_t N = m.sizes.N;
    if (m.ranks.context == 1)
        return loader.next(host, host + N);

    const size_t all = N * m.ranks.context;
    std::vector<int> whole(2 * all);
    loader.next(whole.data(), whole.data() + all);
    const Positions positions = m.positions();
    for (int part = 0; part < 2; part++)
        for (int b = 0; b < m.B; b++)
            for (int t = 0; t < m.T; t++)
                host[part * N + size_t(b) * m.T + t] =
                    whole[part * all + size_t(b) * m.sequence() + positions.at(t)];
}

template <class Model>
class Batches {
  public:
    Batches(const Options& o, Model& model, const Source& data, const Tokenizer& tokenizer)
        : model_(model),
          same_for_ever_(o.overfit),
          loader_(data,
                  {.B = o.B,
                   .T = o.T,
                   .vocab = model.config.V,
                   .shuffle = !o.no_shuffle,
                   .seed = uint64_t(o.seed)},
                  tokenizer) {
        if (loader_.windows() < uint64_t(o.B))
            throw Error(
                format("%s: %zu sequences of %d, and a batch takes %d; choose a smaller -b or -t",
                       data.name.c_str(), loader_.windows(), o.T, o.B));
        const size_t ints = size_t(model.micro_steps) * model.batch_ints();
        memory_ = static_cast<int*>(model.dev.alloc_host(2 * ints * sizeof(int)));
        current_ = memory_;
        next_ = memory_ + ints;
    }
    ~Batches() { model_.dev.free_host(memory_); }
    Batches(const Batches&) = delete;
    Batches& operator=(const Batches&) = delete;

    const Loader& loader() const { return loader_; }

    // This rank's micro-batches of the step at work, in pinned memory.
    const int* current() {
        if (!prepared_)
            prepare(current_);
        prepared_ = true;
        return current_;
    }

    // Prepares the next step's, unless this is the last one. Everything of the current step has
    // been read by then, so this is where a checkpoint of it goes on.
    void prepare_next(bool is_last) {
        if (same_for_ever_)
            return;
        position_ = loader_.state();
        if (is_last)
            return;
        prepare(next_);
        next_prepared_ = true;
    }

    // The next step begins.
    void advance() {
        if (std::exchange(next_prepared_, false))
            std::swap(current_, next_);
    }

    // Where the data goes on after the step at work.
    const LoaderState& position() const { return position_; }
    void restore(const LoaderState& position) {
        position_ = position;
        loader_.restore(position);
    }

  private:
    Model& model_;
    const bool same_for_ever_;  // --overfit
    Loader loader_;
    LoaderState position_{};
    int* memory_ = nullptr;
    int* current_ = nullptr;
    int* next_ = nullptr;
    bool prepared_ = false;  // the first step's
    bool next_prepared_ = false;

    // Group r of n takes micro-batches r, r + n, … of the step.
    void prepare(int* to) {
        const auto& ranks = model_.ranks;
        for (int i = 0; i < model_.micro_steps; i++) {
            loader_.skip(ranks.group());
            model_.fill_batch(to + i * model_.batch_ints(), loader_);
            loader_.skip(ranks.groups() - 1 - ranks.group());
        }
    }
};
