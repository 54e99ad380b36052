// SplitMix64 (Steele, Lea & Flood 2014): random bits as a function of a counter, on the host and on the device, the
// same on every machine.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define RANDOM_HD __host__ __device__
#else
#define RANDOM_HD
#endif

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;  // 2⁶⁴/φ: what a counter is counted up by, so that many bits change

// The finaliser: every bit of the input reaches every bit of the result.
RANDOM_HD inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
#undef RANDOM_HD
