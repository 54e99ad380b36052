// The built-in corpus: short English stories from a seeded stochastic grammar.
//
// Every choice is drawn from a known distribution, and no two sequences of choices write the same text. So the
// probability of a story is the product of its choices, and the entropy of the corpus is known exactly. In the long run
// a model's loss can approach it, but not pass it.
#pragma once
#include <cstdint>
#include <string>

// Story number `index` of the corpus with this seed, without <|endoftext|>. Any index, in any order: each has its own
// random stream.
std::string write_story(uint64_t seed, uint64_t index);

struct Corpus {
    std::string train_path, val_path;  // llm.c shards of byte tokens, each document after <|endoftext|>
    double val_nats;                   // entropy floor, nats per token, over the validation split
};
// The corpus in `dir`, generated there (in seconds, with a line of progress) unless it is there already and whole.
// Train and validation stories have disjoint indices. Throws Error if dir cannot be written.
Corpus builtin_corpus(const std::string& dir, bool quiet = false);
