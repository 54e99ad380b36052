// The built-in corpus: short English stories from a seeded stochastic grammar.
//
// Every choice is drawn from a known distribution, and no two sequences of choices write the same
// text. So the probability of a story is the product of its choices, and the entropy of the corpus
// is known exactly. In the long run a model's loss can approach it, but not pass it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

// Story number `index` of the corpus with this seed, without <|endoftext|>. Any index, in any
// order: each has its own random stream.
std::string write_story(uint64_t seed, uint64_t index);

struct Corpus {
    // byte tokens of GPT-2's vocabulary, each story after <|endoftext|>
    std::vector<uint16_t> train, val;
    double val_nats;  // entropy floor, nats per token, over the validation split
};
// The corpus, the same on every machine. The first call makes it, in about a second of one core,
// and a second call meanwhile waits for the first. Train and validation stories have disjoint
// indices.
const Corpus& builtin_corpus();
