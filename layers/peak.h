// Dense tensor-core peaks (no sparsity) by GPU name, for MFU. From the vendor's data sheets, in TFLOP/s.
#pragma once
#include <string>

#include "layers/types.h"

// What --precision runs its matmuls on: bf16, TF32 or plain fp32. 0 for a GPU that is not in the table: MFU is then "n/a".
inline double peak_tflops(const std::string& gpu, bool is_bf16, bool tf32) {
    struct Peak {
        const char* part;  // of the device's name; the first match counts, so longer names come first
        double bf16, tf32, fp32;
    };
    static const Peak table[] = {
        {"GH200", 989, 494.5, 67}, {"H200", 989, 494.5, 67},    {"H100 PCIe", 756, 378, 51}, {"H100 NVL", 835, 417.5, 60},
        {"H100", 989, 494.5, 67},  {"A100", 312, 156, 19.5},    {"A800", 312, 156, 19.5},    {"A10G", 70, 35, 31.2},
        {"A10", 125, 62.5, 31.2},  {"A40", 149.7, 74.8, 37.4},  {"A30", 165, 82, 10.3},      {"L40S", 362, 183, 91.6},
        {"L40", 181, 90.5, 90.5},  {"L4", 121, 60, 30.3},       {"RTX 4090", 165.2, 82.6, 82.6}, {"RTX 3090", 71, 35.6, 35.6},
        {"RTX A6000", 154.8, 77.4, 38.7}, {"B200", 2250, 1125, 75}, {"V100", 0, 0, 15.7},   {"T4", 0, 0, 8.1},
    };
    for (const Peak& p : table)
        if (gpu.find(p.part) != std::string::npos) return is_bf16 ? p.bf16 : tf32 && p.tf32 > 0 ? p.tf32 : p.fp32;
    return 0;
}
