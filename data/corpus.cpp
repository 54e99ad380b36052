// The built-in corpus, made in memory.
#include "data/corpus.h"

#include "common/threads.h"
#include "data/file.h"
#include "data/grammar.h"
#include "data/tokenizer.h"

// The grammar is data/stories.txt, in the notation of data/grammar.h. What a story says early
// decides what happens later. The tables carry that: a row of `wish` is a wish with the trouble,
// the advice and the end that fit it.
EMBED(stories, "data/stories.txt");

namespace {

constexpr int kSeed = 1;

// Validation comes first, so that its stories stay what they are if the training split ever grows.
constexpr int kValStories = 1100;
constexpr int kTrainStories = 31000;

// What the grammar writes. After a change of data/stories.txt dev/test_corpus says what belongs
// here.
constexpr double kValNats = 0.12731075475943862;  // per token

// The tokens of `count` stories, from number `first` on.
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
    static const Corpus corpus = {write_tokens(kValStories, kTrainStories),
                                  write_tokens(0, kValStories), kValNats};
    return corpus;
}
