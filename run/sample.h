// Text from a model, a token at a time.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "data/random.h"
#include "data/tokenizer.h"
#include "layers/gpu/error.h"
#include "run/range.h"

struct Sampling {
    float temperature = 1.f;
    int top_k = 0;  // 0: all
};

// Logits of the token after `context`, whose last T tokens the model sees.
template <class Model>
std::vector<float> logits_of_last(Model& model, const std::vector<int>& context) {
    using X = typename Model::X;
    const auto& config = model.config;
    const int used = static_cast<int>(std::min<size_t>(context.size(), model.T));
    // Rounds t up so that matmul plans are reused from token to token. The last token cannot see what follows it.
    const int t = std::min((used + 63) / 64 * 64, model.T);
    std::vector<int> padded(t, 0);
    std::copy(context.end() - used, context.end(), padded.begin());
    const auto buffers = model.workspace();
    model.dev.upload(buffers.batch, padded.data(), padded.size() * sizeof(int));
    model.forward(buffers.batch, 1, t, true);
    matmul_forward<X>(model.dev, buffers.logits, model.activations().lnf + size_t(used - 1) * config.C,
                      model.weights().wte, nullptr, 1, config.C, config.Vp);
    std::vector<X> row(config.Vp);
    model.dev.download(row.data(), buffers.logits, row.size() * sizeof(X));
    std::vector<float> logits(config.V);
    for (int v = 0; v < config.V; v++) logits[v] = static_cast<float>(row[v]);
    return logits;
}

// Draws a token from softmax(logits / temperature) over the top_k largest, with the uniform number u. Temperature 0
// takes the largest.
inline int sample_token(const std::vector<float>& logits, const Sampling& s, double u) {
    std::vector<int> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    const size_t k = s.top_k > 0 ? std::min<size_t>(s.top_k, order.size()) : order.size();
    auto larger = [&](int x, int y) { return logits[x] != logits[y] ? logits[x] > logits[y] : x < y; };
    if (s.temperature <= 0) return *std::min_element(order.begin(), order.end(), larger);
    if (k < order.size()) std::partial_sort(order.begin(), order.begin() + k, order.end(), larger);
    order.resize(k);
    const float top = logits[*std::min_element(order.begin(), order.end(), larger)];
    std::vector<double> cumulative;
    double sum = 0;
    for (int v : order) cumulative.push_back(sum += std::exp((static_cast<double>(logits[v]) - top) / s.temperature));
    const size_t i = std::lower_bound(cumulative.begin(), cumulative.end(), u * sum) - cumulative.begin();
    return order[std::min(i, k - 1)];
}

inline bool can_generate(int V) {
    return V == kByteVocab || V > kEndOfText;
}

// Continues `prompt` (which <|endoftext|> precedes) by up to n tokens, ending at the next <|endoftext|>.
template <class Model>
std::string generate(Model& model, const Tokenizer& tokenizer, const std::string& prompt, int n, const Sampling& s,
                     uint64_t seed) {
    Range range("sample");
    const int end = model.config.V == kByteVocab ? kByteEndOfText : kEndOfText;
    if (!can_generate(model.config.V))
        throw Error(
            format("a model with a vocabulary of %d has no <|endoftext|> to start from: %d or at least %d tokens",
                   model.config.V, kByteVocab, kEndOfText + 1));
    std::vector<int> context = {end};
    for (int token : tokenizer.encode(prompt, model.config.V, "--prompt")) context.push_back(token);
    std::string text = prompt;
    for (int i = 0; i < n; i++) {
        const int token = sample_token(logits_of_last(model, context), s, uniform(seed, i));
        if (token == end) break;
        context.push_back(token);
        text += tokenizer.decode(token);
    }
    return text;
}
