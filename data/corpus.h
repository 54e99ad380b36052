// The built-in corpus: short English stories from a seeded stochastic grammar.
//
// Every choice is drawn from a known distribution, and no two sequences of choices write the same
// text. So the probability of a story is the product of the probabilities of its choices, and the
// entropy of the corpus is known exactly. In the long run a model's loss can approach the entropy,
// but not get below it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

// Story number `index` of the corpus with this seed, without <|endoftext|>. Stories can be written
// in any order, because each has a random stream of its own.
std::string write_story(uint64_t seed, uint64_t index);

struct Corpus {
    // Byte tokens of GPT-2's vocabulary; <|endoftext|> is before each story. No story is in both.
    std::vector<uint16_t> train;
    std::vector<uint16_t> val;
    double val_nats;  // the entropy of the validation split, in nats per token
};

// The corpus is the same on every machine. The first call makes it, in about a second on one core;
// a call from another thread meanwhile waits for it.
const Corpus& builtin_corpus();
