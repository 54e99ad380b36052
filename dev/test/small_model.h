// A model and data so small that a step takes a millisecond, for tests that run the program.
#pragma once
#include <random>

#include "dev/test/program.h"

// V is the program's byte vocabulary, so that it can write samples.
constexpr int kPositions = 24, V = 257, Vp = 264, L = 2, NH = 2, C = 32, HS = C / NH, T = 16;
constexpr int kEnd = 256;  // <|endoftext|>. A letter's token is its distance from '!'

// llm.c's sixteen tensors, in its file order.
struct TensorInFile {
    const char* name;
    size_t size;  // of one layer
    size_t layers;
    bool decays = false;  // the matrices do
};
inline std::vector<TensorInFile> tensors_in_file(size_t positions, size_t vocabulary, size_t L,
                                                 size_t C) {
    return {{"wte", vocabulary * C, 1, true},
            {"wpe", positions * C, 1, true},
            {"ln1w", C, L},
            {"ln1b", C, L},
            {"qkvw", 3 * C * C, L, true},
            {"qkvb", 3 * C, L},
            {"attprojw", C * C, L, true},
            {"attprojb", C, L},
            {"ln2w", C, L},
            {"ln2b", C, L},
            {"fcw", 4 * C * C, L, true},
            {"fcb", 4 * C, L},
            {"fcprojw", 4 * C * C, L, true},
            {"fcprojb", C, L},
            {"lnfw", C, 1},
            {"lnfb", C, 1}};
}
enum {
    WTE,
    WPE,
    LN1W,
    LN1B,
    QKVW,
    QKVB,
    ATTPROJW,
    ATTPROJB,
    LN2W,
    LN2B,
    FCW,
    FCB,
    FCPROJW,
    FCPROJB,
    LNFW,
    LNFB
};
inline const std::vector<TensorInFile> kTensors = tensors_in_file(kPositions, Vp, L, C);
inline size_t offset_of(int tensor, int layer = 0) {
    size_t at = 0;
    for (int t = 0; t < tensor; t++)
        at += kTensors[t].size * kTensors[t].layers;
    return tensor < 16 ? at + kTensors[tensor].size * layer : at;
}
inline const size_t kParameters = offset_of(16);

// The weights are large enough that windows differ in loss and gradients are clipped. Only letters
// are likely, so that samples can be read back. `end` says how likely the end of a text is. None is
// zero, because a step would change that at any rate.
constexpr double kEndOften = 0.4, kNoEnd = -5;
inline std::vector<float> make_weights(double end) {
    std::vector<float> p;
    std::mt19937_64 random(11);
    std::normal_distribution<double> normal;
    for (size_t i = 0; i < kParameters; i++)
        p.push_back(static_cast<float>(0.2 * normal(random)));
    for (int t : {LN1W, LN2W, LNFW})
        for (size_t i = 0; i < kTensors[t].size * kTensors[t].layers; i++)
            p[offset_of(t) + i] += 1;
    // a channel that says how likely each token is
    p[offset_of(LNFW)] = 1e-6f;
    p[offset_of(LNFB)] = 4;
    for (int v = 0; v < Vp; v++) {
        const int letter = (v + '!') | 32;
        p[v * C] = static_cast<float>(letter >= 'a' && letter <= 'z' ? 1e-6 : v == kEnd ? end : -5);
    }
    return p;
}
inline std::string model_header(int version, int NH = ::NH, int V = ::V) {
    return header_of({20240326, version, kPositions, V, L, NH, C, Vp});
}
inline std::string model_file(double end) {
    const std::string path = dir() + format("/model_%g.bin", end);
    if (!exists(path))
        write_file(path, model_header(3) + bytes_of(make_weights(end)));
    return path;
}

// Letters, most of which are a function of the one before, and here and there the end of a
// document.
inline std::vector<int> make_tokens(int n, int seed) {
    std::vector<int> tokens;
    std::mt19937_64 random(seed);
    for (int i = 0, at = 0; i < n; i++) {
        at = random() % 10 < 7 ? (at * 5 + 3) % 26 : random() % 26;
        tokens.push_back(random() % 12 == 0 ? kEnd : (random() % 2 ? 'A' : 'a') - '!' + at);
    }
    return tokens;
}
