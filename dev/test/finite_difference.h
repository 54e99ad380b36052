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

// Checks that grad is dloss/dx. It moves x, in place and back, along a few random directions and a
// few single elements.
inline void check_gradient(const std::string& what, double* x, const std::vector<double>& grad,
                           const std::function<double()>& loss) {
    static std::mt19937_64 rng(20240521);
    const size_t n = grad.size();
    const std::vector<double> start(x, x + n);
    const double h = 1e-5;
    const double round_off = 1e-9 * (1 + std::fabs(loss()));
    for (int trial = 0; trial < 8; trial++) {
        std::vector<double> direction(n, 0.0);
        if (trial < 3)
            for (double& d : direction)
                d = std::normal_distribution<double>()(rng);
        else
            direction[trial == 3 ? 0 : trial == 4 ? n - 1 : rng() % n] = 1;
        double sides[2];
        for (int side = 0; side < 2; side++) {
            for (size_t i = 0; i < n; i++)
                x[i] = start[i] + (side ? h : -h) * direction[i];
            sides[side] = loss();
        }
        std::copy(start.begin(), start.end(), x);
        const double measured = (sides[1] - sides[0]) / (2 * h);
        const double claimed = dot(grad, direction);
        const double tol =
            1e-7 * std::sqrt(dot(grad, grad) * dot(direction, direction) / double(n)) + round_off;
        if (!(std::fabs(measured - claimed) <= tol))
            test::report(
                __FILE__, __LINE__,
                format("%s, %s %d: gradient %.12g, finite difference %.12g (tolerance %.2g)",
                       what.c_str(), trial < 3 ? "direction" : "element", trial, claimed, measured,
                       tol));
    }
}
