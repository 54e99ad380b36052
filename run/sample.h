// Text from a model, one token at a time.
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
    int top_k = 0;  // 0: all tokens
};

// Draws a token from softmax(logits / temperature), restricted to the top_k largest logits, with u
// uniform in [0, 1). With temperature 0, returns the token with the largest logit.
int sample_token(std::vector<float> logits, const Sampling& s, double u);

// Of a text of n tokens a model with T positions sees only a window, the last T tokens or fewer.
// Returns where it begins. When a text outgrows its window, the window moves on and keeps only the
// most recent half, so that it moves rarely: each move makes the KV cache useless.
inline int window_begin(int n, int T) {
    if (n <= T)
        return 0;
    // The window moves when it would have T + 1 tokens, and then has half of these.
    const int tokens_after_move = (T + 1) / 2;
    const int stride = T + 1 - tokens_after_move;
    const int moves = (n - T + stride - 1) / stride;  // rounded up
    return moves * stride;
}

// Logits of the token after `context`. `grown`: since the previous call the context has grown by
// one token. Then qkv, the KV cache, holds the other tokens' rows, and only one row is computed,
// unless the window has moved.
template <class Model>
std::vector<typename Model::X> next_token_logits(Model& model, const std::vector<int>& context,
                                                 bool grown = false) {
    using X = typename Model::X;
    const auto& config = model.config;
    const int n = static_cast<int>(context.size());
    const int begin = window_begin(n, model.T);
    const int window = n - begin;  // tokens
    const bool cached = grown && begin == window_begin(n - 1, model.T);
    const int past = cached ? window - 1 : 0;
    const int last_row = window - past - 1;  // the last token's, among the rows to compute

    // Without cached rows the number of rows to compute is rounded up, so that matmul plans are
    // reused for other texts. The last token does not see the rows after it, whose tokens are 0.
    const int rounded = std::min((window + 63) / 64 * 64, model.T);
    const int t = past > 0 ? 1 : rounded;
    std::vector<int> tokens(context.begin() + begin + past, context.end());
    tokens.resize(t);

    const auto buffers = model.workspace();
    model.dev.upload(buffers.batch, tokens.data(), tokens.size() * sizeof(int));
    model.forward(buffers.batch, {.b = 1, .t = t, .past = past, .alone = true});
    const X* last = model.activations().lnf + size_t(last_row) * config.C;
    matmul_forward<X>(model.dev, buffers.logits, last, model.weights().wte, nullptr, 1, config.C,
                      config.Vp);

    std::vector<X> logits(config.V);
    model.dev.download(logits.data(), buffers.logits, logits.size() * sizeof(X));
    return logits;
}

// A model with V tokens can generate text if <|endoftext|> is one of them.
inline bool can_generate(int V) {
    return V == kByteVocab || V >= kGpt2Vocab;
}

// The tokens that a model with V tokens continues: <|endoftext|> and the prompt.
inline std::vector<int> start_of_text(const Tokenizer& tokenizer, const std::string& prompt,
                                      int V) {
    if (!can_generate(V))
        throw Error(format(
            "this model's vocabulary of %d tokens has no <|endoftext|> to start a text with; give "
            "a model with %d or at least %d tokens",
            V, kByteVocab, kGpt2Vocab));
    std::vector<int> context = tokenizer.encode_prompt(prompt, V, "--prompt");
    context.insert(context.begin(), end_of_text_id(V));
    return context;
}

// Continues `context` by at most n tokens, until the next <|endoftext|>, and returns their text.
// on_token(text) is called with each token's text at once.
template <class Model>
std::string generate(Model& model, const Tokenizer& tokenizer, std::vector<int> context, int n,
                     const Sampling& s, uint64_t seed,
                     const std::function<void(const std::string&)>& on_token = nullptr) {
    std::string text;
    for (int i = 0; i < n; i++) {
        const auto logits = next_token_logits(model, context, i > 0);
        note_progress();
        const int token = sample_token({logits.begin(), logits.end()}, s, uniform(seed, i));
        if (token == end_of_text_id(model.config.V))
            break;
        context.push_back(token);

        const std::string piece = tokenizer.decode(token);
        text += piece;
        if (on_token)
            on_token(piece);
    }
    return text;
}
