// Text from a model, a token at a time.
#pragma once
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/random.h"
#include "data/tokenizer.h"
#include "layers/layers.h"
#include "parallel/watchdog.h"

struct Sampling {
    float temperature = 1.f;
    int top_k = 0;  // 0: all
};

// Draws a token from softmax(logits / temperature) over the top_k largest by the uniform u.
// Temperature 0: the largest.
int sample_token(std::vector<float> logits, const Sampling& s, double u);

// The first of n tokens that a model with T positions sees. A text that outgrows them goes on from
// their last half.
inline int window_begin(int n, int T) {
    const int step = T - (T + 1) / 2 + 1;
    return n <= T ? 0 : (n - T + step - 1) / step * step;
}

// Logits of the token after `context`. Every layer's qkv is the cache: its rows are those of the
// window's tokens. If the last call was for the same context without its last token (`grown`), only
// that token's row is computed.
template <class Model>
std::vector<typename Model::X> logits_of_last(Model& model, const std::vector<int>& context,
                                              bool grown = false) {
    using X = typename Model::X;
    const auto& config = model.config;
    const int n = static_cast<int>(context.size());
    const int begin = window_begin(n, model.T);
    const int used = n - begin;
    const int past = grown && begin == window_begin(n - 1, model.T) ? used - 1 : 0;
    // Rounds t up so that matmul plans are reused from text to text. The last token cannot see what
    // follows it.
    const int t = past ? 1 : std::min((used + 63) / 64 * 64, model.T);
    std::vector<int> tokens(context.begin() + begin + past, context.end());
    tokens.resize(t);
    const auto buffers = model.workspace();
    model.dev.upload(buffers.batch, tokens.data(), tokens.size() * sizeof(int));
    model.forward(buffers.batch, 1, t, true, past);
    matmul_forward<X>(model.dev, buffers.logits,
                      model.activations().lnf + size_t(used - past - 1) * config.C,
                      model.weights().wte, nullptr, 1, config.C, config.Vp);
    std::vector<X> logits(config.V);
    model.dev.download(logits.data(), buffers.logits, logits.size() * sizeof(X));
    return logits;
}

inline bool can_generate(int V) {
    return V == kByteVocab || V > kEndOfText;
}
inline int end_of_text(int V) {
    return V == kByteVocab ? kByteEndOfText : kEndOfText;
}

// What a model with V tokens continues: <|endoftext|> and the prompt.
inline std::vector<int> start_of_text(const Tokenizer& tokenizer, const std::string& prompt,
                                      int V) {
    if (!can_generate(V))
        throw Error(
            format("a model with a vocabulary of %d has no <|endoftext|> to start from: %d or at "
                   "least %d tokens",
                   V, kByteVocab, kEndOfText + 1));
    std::vector<int> context = tokenizer.encode_prompt(prompt, V, "--prompt");
    context.insert(context.begin(), end_of_text(V));
    return context;
}

// Continues `context` by up to n tokens, up to the next <|endoftext|>. Returns their text. `see`
// gets the text of each as it comes.
template <class Model>
std::string generate(Model& model, const Tokenizer& tokenizer, std::vector<int> context, int n,
                     const Sampling& s, uint64_t seed,
                     const std::function<void(const std::string&)>& see = nullptr) {
    std::string text;
    for (int i = 0; i < n; i++) {
        const auto logits = logits_of_last(model, context, i > 0);
        note_progress();
        const int token = sample_token({logits.begin(), logits.end()}, s, uniform(seed, i));
        if (token == end_of_text(model.config.V))
            break;
        context.push_back(token);
        const std::string piece = tokenizer.decode(token);
        text += piece;
        if (see)
            see(piece);
    }
    return text;
}
