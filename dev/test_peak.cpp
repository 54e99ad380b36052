// Tests the peak table behind MFU, with the names that drivers report.
//
// Run: ./dev/test_peak
#include <tuple>

#include "dev/test.h"
#include "cuda/peak.h"

namespace {

struct Case {
    std::string gpu;
    double bf16, tf32, fp32;  // --precision bf16, fp32, fp32 --no-tf32
};

void check(const Case& c) {
    for (const auto& [want, is_bf16, tf32] :
         {std::tuple{c.bf16, true, true}, {c.tf32, false, true}, {c.fp32, false, false}}) {
        const double got = peak_tflops(c.gpu, is_bf16, tf32);
        if (!(std::fabs(got - want) <= 0.01 * want))
            test::report(__FILE__, __LINE__, format("%s: %g, expected %g", c.gpu.c_str(), got, want));
    }
}

}  // namespace

// clang-format off
// The figures are as the data sheets and architecture papers print them, not as the table derives them.
TEST(data_sheet_figures_by_device_name) {
    const Case cases[] = {
        {"Tesla V100-SXM2-16GB", 0, 15.7, 15.7}, {"Tesla V100-PCIE-32GB", 0, 14, 14},
        {"Tesla V100S-PCIE-32GB", 0, 16.4, 16.4}, {"Tesla T4", 0, 8.1, 8.1},
        {"NVIDIA GeForce RTX 2080 Ti", 0, 13.4, 13.4}, {"Quadro RTX 6000", 0, 16.3, 16.3},
        {"NVIDIA TITAN RTX", 0, 16.3, 16.3}, {"NVIDIA A100-SXM4-80GB", 312, 156, 19.5},
        {"NVIDIA A100 80GB PCIe", 312, 156, 19.5}, {"A100-SXM4-40GB", 312, 156, 19.5},
        {"NVIDIA A800-SXM4-80GB", 312, 156, 19.5}, {"NVIDIA A30", 165, 82, 10.3}, {"NVIDIA A40", 149.7, 74.8, 37.4},
        {"NVIDIA A10", 125, 62.5, 31.2}, {"NVIDIA A10G", 70, 35, 31.5}, {"NVIDIA A2", 18, 9, 4.5},
        {"NVIDIA A16", 18, 9, 4.5}, {"NVIDIA GeForce RTX 3080", 59.5, 29.8, 29.8},
        {"NVIDIA GeForce RTX 3090", 71.2, 35.6, 35.6}, {"NVIDIA GeForce RTX 3090 Ti", 80, 40, 40},
        {"NVIDIA RTX A6000", 154.8, 77.4, 38.7}, {"NVIDIA RTX A4000", 76.7, 38.3, 19.2},
        {"NVIDIA L4", 121, 60, 30.3}, {"NVIDIA L40", 181, 90.5, 90.5}, {"NVIDIA L40S", 362, 183, 91.6},
        {"NVIDIA GeForce RTX 4080", 97.5, 48.7, 48.7}, {"NVIDIA GeForce RTX 4080 SUPER", 104.4, 52.2, 52.2},
        {"NVIDIA GeForce RTX 4070 Ti", 80.2, 40.1, 40.1}, {"NVIDIA GeForce RTX 4070 Ti SUPER", 88.2, 44.1, 44.1},
        {"NVIDIA GeForce RTX 4090", 165.2, 82.6, 82.6}, {"NVIDIA RTX 6000 Ada Generation", 364.2, 182.1, 91.1},
        {"NVIDIA RTX 4000 SFF Ada Generation", 76.7, 38.4, 19.2}, {"NVIDIA H100 80GB HBM3", 989, 494.5, 67},
        {"NVIDIA H800", 989, 494.5, 67}, {"NVIDIA H200", 989, 494.5, 67}, {"NVIDIA GH200 480GB", 989, 494.5, 67},
        {"NVIDIA GH200 144G HBM3e", 989, 494.5, 67}, {"NVIDIA H100 PCIe", 756, 378, 51},
        {"NVIDIA H100 NVL", 835.5, 417.5, 60}, {"NVIDIA H200 NVL", 835.5, 417.5, 60}, {"NVIDIA H20", 148, 74, 44},
        {"NVIDIA B200", 2250, 1125, 75}, {"NVIDIA B300 SXM6 AC", 2250, 1125, 75}, {"NVIDIA GB200", 2500, 1250, 80},
        {"NVIDIA H800 PCIe", 756, 378, 51}, {"NVIDIA GeForce RTX 5090", 209.5, 104.8, 104.8},
        {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 500, 250, 125},
        {"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 440, 220, 110}};
    for (const Case& c : cases) check(c);
}

// The other figures follow from cores and clock, with an addition and a multiplication per core and cycle in fp32.
// Tensor cores are `tensor` times as fast in bf16, and half as fast in TF32. Turing's have neither type.
TEST(rates_by_cores_and_boost_clock) {
    using Chip = std::tuple<const char*, int, double>;  // cores, GHz
    const auto line = [](const std::string& line, int tensor, const std::vector<Chip>& chips) {
        for (const auto& [chip, cores, ghz] : chips) {
            const double fp32 = 2 * cores * ghz / 1000;
            check({line + chip, tensor * fp32, std::max(1., tensor / 2.) * fp32, fp32});
        }
    };
    line("NVIDIA GeForce RTX ", 0, {
        {"2060", 1920, 1.68}, {"2060 SUPER", 2176, 1.65}, {"2070", 2304, 1.62}, {"2070 SUPER", 2560, 1.77},
        {"2080", 2944, 1.71}, {"2080 SUPER", 3072, 1.815}});
    line("Quadro RTX ", 0, {{"4000", 2304, 1.545}, {"5000", 3072, 1.815}, {"8000", 4608, 1.77}});
    line("NVIDIA GeForce RTX ", 2, {
        {"3060", 3584, 1.777}, {"3060 Ti", 4864, 1.665}, {"3070", 5888, 1.725}, {"3070 Ti", 6144, 1.77},
        {"3080 Ti", 10240, 1.665}, {"4060", 3072, 2.46}, {"4060 Ti", 4352, 2.535}, {"4070", 5888, 2.475},
        {"4070 SUPER", 7168, 2.475}, {"4090 D", 14592, 2.52}, {"5050", 2560, 2.57}, {"5060", 3840, 2.5},
        {"5060 Ti", 4608, 2.57}, {"5070", 6144, 2.51}, {"5070 Ti", 8960, 2.45}, {"5080", 10752, 2.62}});
    line("NVIDIA RTX ", 4, {
        {"A2000 12GB", 3328, 1.2}, {"A4500", 7168, 1.65}, {"A5000", 8192, 1.695}, {"A5500", 10240, 1.665},
        {"2000 Ada Generation", 2816, 2.13}, {"4000 Ada Generation", 6144, 2.175},
        {"4500 Ada Generation", 7680, 2.58}, {"5000 Ada Generation", 12800, 2.55},
        {"5880 Ada Generation", 14080, 2.46}});
}

// Parts with unusual rates, slices, vGPUs, and names that merely contain a known one.
TEST(other_names_have_no_peak) {
    for (const char* gpu : {
        "", "CPU, 2 threads", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 2080 with Max-Q Design",
        "NVIDIA RTX A2000 8GB Laptop GPU", "NVIDIA RTX 5000 Ada Generation Laptop GPU", "NVIDIA T400 4GB",
        "NVIDIA T4G", "NVIDIA L20", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA A40-48Q", "GRID A100D-10C", "NVIDIA GeForce RTX 5090 D", "Tesla P100-PCIE-16GB", "NVIDIA A1000",
        "NVIDIA GeForce GTX 1660", "NVIDIA RTX A400", "NVIDIA H20-3e", "NVIDIA PG506-230"})
        check({gpu, 0, 0, 0});
}
// clang-format on

// A name that no device name turns into, or that a row above has, would never be used.
TEST(every_row_is_reachable) {
    for (const peak::Entry& e : peak::table)
        if (peak_tflops(std::string("NVIDIA ") + e.name, false, false) != e.rates.fp32)
            test::report(__FILE__, __LINE__, e.name);
}

TEST_MAIN
