// A model and data so small that a step takes a millisecond, for tests that run the program.
#pragma once
#include <random>

#include "dev/test/program.h"

constexpr int kPositions = 24;
constexpr int V = 257;  // the program's byte vocabulary, so that it can write samples
constexpr int Vp = 264;
constexpr int L = 2;
constexpr int NH = 2;
constexpr int C = 32;
constexpr int HS = C / NH;
constexpr int T = 16;
constexpr int kEnd = 256;  // <|endoftext|>. The token of a letter is its distance from '!'

// llm.c's sixteen tensors, in its file order.
struct TensorInFile {
    const char* name;
    size_t size;  // of one layer
    size_t layers;
    bool decays = false;  // the matrices do
};
inline std::vector<TensorInFile> tensors_in_file(size_t positions, size_t padded_vocabulary,
                                                 size_t L, size_t C) {
    constexpr bool decays = true;
    return {{"wte", padded_vocabulary * C, 1, decays},
            {"wpe", positions * C, 1, decays},
            {"ln1w", C, L},
            {"ln1b", C, L},
            {"qkvw", 3 * C * C, L, decays},
            {"qkvb", 3 * C, L},
            {"attprojw", C * C, L, decays},
            {"attprojb", C, L},
            {"ln2w", C, L},
            {"ln2b", C, L},
            {"fcw", 4 * C * C, L, decays},
            {"fcb", 4 * C, L},
            {"fcprojw", 4 * C * C, L, decays},
            {"fcprojb", C, L},
            {"lnfw", C, 1},
            {"lnfb", C, 1}};
}
enum {  // their indices
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
    LNFB,
    kTensorCount
};
inline const std::vector<TensorInFile> kTensors = tensors_in_file(kPositions, Vp, L, C);

// The elements of all tensors before this one. Before kTensorCount, that is of all sixteen.
inline size_t elements_before(int tensor) {
    size_t elements = 0;
    for (int t = 0; t < tensor; t++)
        elements += kTensors[t].size * kTensors[t].layers;
    return elements;
}
inline size_t offset_of(int tensor, int layer = 0) {
    return elements_before(tensor) + kTensors[tensor].size * layer;
}
inline const size_t kParameters = elements_before(kTensorCount);

// The weights are so large that windows differ in loss and gradients are clipped. Only letters are
// likely, so that samples can be read back. No weight is zero: a step whose learning rate is 1e-30
// changes a zero, but is too small to change any other weight.
//
// The last layer norm makes the first channel 4 at every position. So a token's logit is about 4
// times the first element of its row of wte, plus what the other channels add. `end` is the first
// element of the row of <|endoftext|>, and says how likely that token is: kEndOften or kNoEnd.
constexpr double kEndOften = 0.4;
constexpr double kUnlikely = -5;
constexpr double kNoEnd = kUnlikely;
inline std::vector<float> make_weights(double end) {
    std::vector<float> p;
    std::mt19937_64 random(11);
    std::normal_distribution<double> normal;
    for (size_t i = 0; i < kParameters; i++)
        p.push_back(static_cast<float>(0.2 * normal(random)));
    for (int t : {LN1W, LN2W, LNFW})
        for (size_t i = 0; i < kTensors[t].size * kTensors[t].layers; i++)
            p[offset_of(t) + i] += 1;

    constexpr double kAlmostZero = 1e-6;
    p[offset_of(LNFW)] = kAlmostZero;
    p[offset_of(LNFB)] = 4;
    for (int v = 0; v < Vp; v++) {
        const int character = v + '!';
        const bool is_upper_case = character >= 'A' && character <= 'Z';
        const bool is_lower_case = character >= 'a' && character <= 'z';
        double first_element = kUnlikely;
        if (is_upper_case || is_lower_case)
            first_element = kAlmostZero;
        else if (v == kEnd)
            first_element = end;
        p[offset_of(WTE) + v * C] = static_cast<float>(first_element);
    }
    return p;
}

// The header of this model, or of one with another number of heads or another vocabulary.
inline std::string model_header(int version, int heads = NH, int vocabulary = V) {
    return header_of({20240326, version, kPositions, vocabulary, L, heads, C, Vp});
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
    int letter = 0;
    for (int i = 0; i < n; i++) {
        const bool is_predictable = random() % 10 < 7;
        letter = is_predictable ? (letter * 5 + 3) % 26 : random() % 26;
        const bool is_end = random() % 12 == 0;
        if (is_end) {
            tokens.push_back(kEnd);
        } else {
            const char first = random() % 2 ? 'A' : 'a';
            tokens.push_back(first + letter - '!');
        }
    }
    return tokens;
}
