// The choice of a token. It is compiled for speed, because the GPU waits for it.
#include "run/sample.h"

#include <cmath>
#include <numeric>

int sample_token(std::vector<float> p, const Sampling& s, double u) {
    if (s.temperature <= 0)
        return static_cast<int>(std::max_element(p.begin(), p.end()) - p.begin());
    if (s.top_k > 0 && static_cast<size_t>(s.top_k) < p.size()) {
        std::vector<int> order(p.size());  // the largest and the first of equals first
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + s.top_k, order.end(),
                          [&](int x, int y) { return p[x] != p[y] ? p[x] > p[y] : x < y; });
        for (size_t i = s.top_k; i < order.size(); i++)
            p[order[i]] = -INFINITY;
    }
    float top = p[0];
#pragma omp simd reduction(max : top)
    for (size_t i = 0; i < p.size(); i++)
        top = std::max(top, p[i]);
    double sum = 0;
    double seen = 0;
    for (float& x : p)
        sum += x = std::exp((x - top) / s.temperature);
    size_t i = 0;
    while ((seen += p[i]) <= u * sum && i + 1 < p.size())
        i++;
    return static_cast<int>(i);
}
