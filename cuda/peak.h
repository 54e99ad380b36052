// The GPU's peak rate in dense matrix products, by its name, for MFU. Sources are NVIDIA's data sheets and architecture
// papers.
#pragma once
#include <cctype>
#include <regex>
#include <sstream>
#include <string>

namespace peak {

// TFLOP/s without sparsity, sums in fp32. 0 means that the GPU does not have that type.
struct Rates {
    double bf16, tf32, fp32;
};

// clang-format off
// Outside the data centre's largest chips, tensor cores keep a fixed ratio to the fp32 units. GeForce halves it for
// sums in fp32, which training needs.
constexpr Rates fp32_only(double fp32) { return {0, 0, fp32}; }
constexpr Rates half_rate(double fp32) { return {2 * fp32, fp32, fp32}; }
constexpr Rates full_rate(double fp32) { return {4 * fp32, 2 * fp32, fp32}; }
constexpr Rates a100 = {312, 156, 19.5}, h100 = {989, 494.5, 67}, h100_pcie = {756, 378, 51}, nvl = {835.5, 417.5, 60};

struct Entry {
    const char* name;  // without maker, line and size of memory
    Rates rates;
};

// Left out are names that stand for several chips (RTX 3050), and parts whose data sheets give no dense rates (GB10).
inline constexpr Entry table[] = {
    // Volta and Turing, which have neither bf16 nor TF32
    {"V100 SXM2", fp32_only(15.7)},       {"V100 SXM3", fp32_only(15.7)},       {"V100 DGXS", fp32_only(15.7)},
    {"V100 PCIE", fp32_only(14)},         {"V100S PCIE", fp32_only(16.4)},      {"T4", fp32_only(8.1)},
    {"RTX 2060", fp32_only(6.5)},         {"RTX 2060 SUPER", fp32_only(7.2)},   {"RTX 2070", fp32_only(7.5)},
    {"RTX 2070 SUPER", fp32_only(9.1)},   {"RTX 2080", fp32_only(10.1)},        {"RTX 2080 SUPER", fp32_only(11.2)},
    {"RTX 2080 TI", fp32_only(13.4)},     {"TITAN RTX", fp32_only(16.3)},       {"QUADRO RTX 4000", fp32_only(7.1)},
    {"QUADRO RTX 5000", fp32_only(11.2)}, {"QUADRO RTX 6000", fp32_only(16.3)}, {"QUADRO RTX 8000", fp32_only(16.3)},
    // Ampere
    {"A100", a100},                       {"A800", a100},                       {"A30", {165, 82, 10.3}},
    {"A2", full_rate(4.5)},               {"A10", full_rate(31.2)},             {"A10G", {70, 35, 31.5}},
    {"A16", full_rate(4.5)},              {"A40", full_rate(37.4)},             {"RTX 3060", half_rate(12.7)},
    {"RTX 3060 TI", half_rate(16.2)},     {"RTX 3070", half_rate(20.3)},        {"RTX 3070 TI", half_rate(21.7)},
    {"RTX 3080", half_rate(29.8)},        {"RTX 3080 TI", half_rate(34.1)},     {"RTX 3090", half_rate(35.6)},
    {"RTX 3090 TI", half_rate(40)},       {"RTX A2000", full_rate(8)},          {"RTX A4000", full_rate(19.2)},
    {"RTX A4500", full_rate(23.7)},       {"RTX A5000", full_rate(27.8)},       {"RTX A5500", full_rate(34.1)},
    {"RTX A6000", full_rate(38.7)},
    // Ada
    {"L4", {121, 60, 30.3}},              {"L40", half_rate(90.5)},             {"L40S", {362, 183, 91.6}},
    {"RTX 4060", half_rate(15.1)},        {"RTX 4060 TI", half_rate(22.1)},     {"RTX 4070", half_rate(29.1)},
    {"RTX 4070 SUPER", half_rate(35.5)},  {"RTX 4070 TI", half_rate(40.1)},     {"RTX 4070 TI SUPER", half_rate(44.1)},
    {"RTX 4080", half_rate(48.7)},        {"RTX 4080 SUPER", half_rate(52.2)},  {"RTX 4090", half_rate(82.6)},
    {"RTX 4090 D", half_rate(73.5)},      {"RTX 2000 ADA", full_rate(12)},      {"RTX 4000 ADA", full_rate(26.7)},
    {"RTX 4000 SFF ADA", full_rate(19.2)},{"RTX 4500 ADA", full_rate(39.6)},    {"RTX 5000 ADA", full_rate(65.3)},
    {"RTX 5880 ADA", full_rate(69.3)},    {"RTX 6000 ADA", full_rate(91.1)},
    // Hopper
    {"H100", h100},                       {"H100 PCIE", h100_pcie},             {"H100 NVL", nvl},
    {"H800", h100},                       {"H800 PCIE", h100_pcie},             {"H20", {148, 74, 44}},
    {"H200", h100},                       {"H200 NVL", nvl},                    {"GH200", h100},
    // Blackwell
    {"B200", {2250, 1125, 75}},           {"B300", {2250, 1125, 75}},           {"GB200", {2500, 1250, 80}},
    {"RTX 5050", half_rate(13.2)},        {"RTX 5060", half_rate(19.2)},        {"RTX 5060 TI", half_rate(23.7)},
    {"RTX 5070", half_rate(30.9)},        {"RTX 5070 TI", half_rate(43.9)},     {"RTX 5080", half_rate(56.3)},
    {"RTX 5090", half_rate(104.8)},
    {"RTX PRO 6000 BLACKWELL WORKSTATION EDITION", full_rate(125)},
    {"RTX PRO 6000 BLACKWELL MAX Q WORKSTATION EDITION", full_rate(110)},
};
// clang-format on

// A name in capitals, less the words that tell nothing about the rates. "NVIDIA GeForce RTX 4080 SUPER" becomes "RTX
// 4080 SUPER", and "NVIDIA H100 80GB HBM3" becomes "H100". Without socket, "A100-SXM4-40GB" is "A100" too.
inline std::string part_of(const std::string& gpu, bool with_socket) {
    static const std::regex dull("NVIDIA|TESLA|GEFORCE|GENERATION|HBM.*|[0-9]+GB?"), socket("SXM.*|PCIE|AC");
    std::string part, word, words;
    for (const char c : gpu) words += c == '-' ? ' ' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    for (std::istringstream in(words); in >> word;)
        if (!std::regex_match(word, dull) && (with_socket || !std::regex_match(word, socket)))
            part += (part.empty() ? "" : " ") + word;
    return part;
}

}  // namespace peak

// The peak of the type that --precision runs its matmuls on, which is bf16, TF32 or plain fp32. It is 0 for a GPU that
// is not in the table, and MFU is then "n/a". Only a whole name counts, because a laptop's part, a MIG slice or an
// unknown variant has rates of its own.
inline double peak_tflops(const std::string& gpu, bool is_bf16, bool tf32) {
    const std::string part[] = {peak::part_of(gpu, false), peak::part_of(gpu, true)};
    for (const bool with_socket : {true, false})
        for (const peak::Entry& e : peak::table)
            if (part[with_socket] == e.name)
                return is_bf16 ? e.rates.bf16 : tf32 && e.rates.tf32 > 0 ? e.rates.tf32 : e.rates.fp32;
    return 0;
}
