// A GPU's peak rate in dense matrix products, for MFU: the GPUs that people train on, by the names
// that the driver reports. Names must match completely, because a laptop's GPU or a slice of one
// (MIG, vGPU) has a longer name and lower rates. For a GPU that is not in the table, MFU is "n/a";
// add a line from its data sheet.
#pragma once
#include <string>

// TFLOP/s without sparsity and with sums in fp32, which halve the rate of GeForce tensor cores. 0
// means that the GPU does not have the type.
struct PeakRates {
    const char* gpu;
    double bf16;
    double tf32;
    double fp32;
};

inline constexpr PeakRates kPeakRates[] = {
    {"Tesla V100-SXM2-16GB", 0, 0, 15.7},
    {"Tesla V100-SXM2-32GB", 0, 0, 15.7},
    {"Tesla T4", 0, 0, 8.1},
    {"NVIDIA A100-SXM4-40GB", 312, 156, 19.5},
    {"NVIDIA A100-SXM4-80GB", 312, 156, 19.5},
    {"NVIDIA A100 80GB PCIe", 312, 156, 19.5},
    {"NVIDIA A10G", 70, 35, 31.5},
    {"NVIDIA A40", 149.7, 74.8, 37.4},
    {"NVIDIA RTX A6000", 154.8, 77.4, 38.7},
    {"NVIDIA GeForce RTX 3090", 71, 35.6, 35.6},
    {"NVIDIA L4", 121, 60, 30.3},
    {"NVIDIA L40S", 362, 183, 91.6},
    {"NVIDIA GeForce RTX 4090", 165.2, 82.6, 82.6},
    {"NVIDIA RTX 6000 Ada Generation", 364.2, 182.1, 91.1},
    {"NVIDIA H100 80GB HBM3", 989, 494.5, 67},
    {"NVIDIA H100 PCIe", 756, 378, 51},
    {"NVIDIA H100 NVL", 835.5, 417.5, 60},
    {"NVIDIA H200", 989, 494.5, 67},
    {"NVIDIA GH200 480GB", 989, 494.5, 67},
    {"NVIDIA B200", 2250, 1125, 75},
    {"NVIDIA GeForce RTX 5090", 209.5, 104.8, 104.8},
};

// The peak of the type in which the matmuls run (bf16, TF32 or fp32), or 0 if it is not known.
inline double peak_tflops(const std::string& gpu, bool is_bf16, bool tf32) {
    for (const PeakRates& rates : kPeakRates) {
        if (gpu != rates.gpu)
            continue;
        if (is_bf16)
            return rates.bf16;
        return (tf32 && rates.tf32 > 0) ? rates.tf32 : rates.fp32;
    }
    return 0;
}
