// Checks gradients by calculus: central differences in fp64.
#pragma once
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "dev/common/test.h"

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// Checks that grad is dloss/dx. It moves x, in place and back, along three random directions, and
// along the first, the last and three random elements.
inline void check_gradient(const std::string& what, double* x, const std::vector<double>& grad,
                           const std::function<double()>& loss) {
    static std::mt19937_64 rng(20240521);
    const size_t n = grad.size();
    const std::vector<double> start(x, x + n);
    const double h = 1e-5;
    const double round_off = 1e-9 * (1 + std::fabs(loss()));

    const auto check = [&](const std::string& where, const std::vector<double>& direction) {
        const auto loss_at = [&](double step) {
            for (size_t i = 0; i < n; i++)
                x[i] = start[i] + step * direction[i];
            return loss();
        };
        const double below = loss_at(-h);
        const double above = loss_at(h);
        std::copy(start.begin(), start.end(), x);

        const double measured = (above - below) / (2 * h);
        const double claimed = dot(grad, direction);
        const double squares = dot(grad, grad) * dot(direction, direction);
        const double tolerance = 1e-7 * std::sqrt(squares / double(n)) + round_off;
        if (!(std::fabs(measured - claimed) <= tolerance))
            test::report(__FILE__, __LINE__,
                         format("%s, %s: gradient %.12g, finite difference %.12g (tolerance %.2g)",
                                what.c_str(), where.c_str(), claimed, measured, tolerance));
    };

    for (int trial = 0; trial < 3; trial++) {
        std::vector<double> direction(n);
        for (double& d : direction)
            d = std::normal_distribution<double>()(rng);
        check(format("random direction %d", trial), direction);
    }

    std::vector<size_t> elements = {0, n - 1};
    for (int i = 0; i < 3; i++)
        elements.push_back(rng() % n);
    for (size_t element : elements) {
        std::vector<double> direction(n, 0.0);
        direction[element] = 1;
        check(format("element %zu", element), direction);
    }
}
