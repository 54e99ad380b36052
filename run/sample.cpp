// Draws a token. This file is compiled for speed, because the GPU waits for it.
#include "run/sample.h"

#include <cmath>
#include <numeric>

namespace {

// Makes all but the k largest logits -∞. Of equal ones the first count as larger.
void keep_top_k(std::vector<float>& logits, int k) {
    std::vector<int> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    const auto larger = [&](int x, int y) {
        return logits[x] != logits[y] ? logits[x] > logits[y] : x < y;
    };
    std::partial_sort(order.begin(), order.begin() + k, order.end(), larger);
    for (size_t i = k; i < order.size(); i++)
        logits[order[i]] = -INFINITY;
}

}  // namespace

int sample_token(std::vector<float> logits, const Sampling& s, double u) {
    if (s.temperature <= 0) {
        const auto largest = std::max_element(logits.begin(), logits.end());
        return static_cast<int>(largest - logits.begin());
    }
    if (s.top_k > 0 && static_cast<size_t>(s.top_k) < logits.size())
        keep_top_k(logits, s.top_k);

    float largest = logits[0];
#pragma omp simd reduction(max : largest)
    for (size_t i = 0; i < logits.size(); i++)
        largest = std::max(largest, logits[i]);

    std::vector<float>& p = logits;  // in place, each logit becomes its probability times `sum`
    double sum = 0;
    for (float& x : p) {
        x = std::exp((x - largest) / s.temperature);
        sum += x;
    }

    // The first token whose cumulative probability exceeds u, or the last token. Both sides of the
    // comparison are times `sum`.
    size_t token = 0;
    double cumulative = p[0];
    while (cumulative <= u * sum && token + 1 < p.size()) {
        token++;
        cumulative += p[token];
    }
    return static_cast<int>(token);
}
