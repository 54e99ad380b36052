#include "data/corpus.h"

#include "common/threads.h"
#include "data/file.h"
#include "data/grammar.h"
#include "data/tokenizer.h"

// The grammar, in the notation of data/grammar.h. What a story says early decides what happens
// later, which is what the grammar's tables are for: a row of `wish` is a wish with the trouble,
// the advice and the end that fit it.
EMBED(stories, "data/stories.txt");

namespace {

constexpr int kSeed = 1;

// The validation split has the first stories, so that it stays the same if the training split ever
// grows.
constexpr int kValStories = 1100;
constexpr int kTrainStories = 31000;

// The entropy of the validation split, in nats per token. If you change data/stories.txt,
// dev/test_corpus prints the new value.
constexpr double kValNats = 0.12731075475943862;

// The tokens of `count` stories, starting with number `first`.
std::vector<uint16_t> write_tokens(int first, int count) {
    std::vector<std::vector<int>> stories(count);
#pragma omp parallel for schedule(dynamic, 100) num_threads(available_threads())
    for (int i = 0; i < count; i++) {
        stories[i] = encode_bytes(write_story(kSeed, first + i));
    }

    std::vector<uint16_t> tokens;
    for (const std::vector<int>& story : stories) {
        tokens.push_back(kEndOfText);
        tokens.insert(tokens.end(), story.begin(), story.end());
    }
    return tokens;
}

}  // namespace

std::string write_story(uint64_t seed, uint64_t index) {
    static const Grammar grammar({stories_begin, stories_end});
    static const int root = grammar.rule("story");
    return grammar.write(root, seed, index);
}

const Corpus& builtin_corpus() {
    static const Corpus corpus = {.train = write_tokens(kValStories, kTrainStories),
                                  .val = write_tokens(0, kValStories),
                                  .val_nats = kValNats};
    return corpus;
}
