// Random numbers as functions of a counter, by SplitMix64 (Steele, Lea & Flood 2014). They have the
// same bits on the host, on the device and on every machine, except that normal() may differ in its
// last bits, because libraries differ in the last bits of the logarithm and the cosine.
#pragma once
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define RANDOM_HD __host__ __device__
#else
#define RANDOM_HD
#endif

// 2⁶⁴/φ, SplitMix64's increment. Multiples of it differ in many bits.
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

// SplitMix64's finaliser: every bit of x affects every bit of the result.
RANDOM_HD inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// 64 random bits: number `index` of the stream that `seed` starts. mix(x) alone is a hash of x.
RANDOM_HD inline uint64_t mix(uint64_t seed, uint64_t index = 0) {
    return mix64(seed + (index + 1) * kGolden);
}

// uniform in [0, 1)
RANDOM_HD inline double uniform(uint64_t seed, uint64_t index) {
    return static_cast<double>(mix(seed, index) >> 11) * 0x1p-53;
}

// N(0, 1), by the Box–Muller transform
RANDOM_HD inline double normal(uint64_t seed, uint64_t index) {
    const double u = uniform(seed, 2 * index);
    const double v = uniform(seed, 2 * index + 1);
    return std::sqrt(-2.0 * std::log(1.0 - u)) * std::cos(2.0 * M_PI * v);
}
#undef RANDOM_HD
