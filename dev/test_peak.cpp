// The peak table behind MFU, with the names that drivers report.
//
// Run: ./dev/test_peak
#include "dev/test.h"
#include "layers/peak.h"

namespace {

struct Case {
    const char* gpu;
    double bf16, tf32, fp32;  // --precision bf16; fp32; fp32 --no-tf32
};

void check(const Case& c) {
    const double got[] = {peak_tflops(c.gpu, true, true), peak_tflops(c.gpu, false, true),
                          peak_tflops(c.gpu, false, false)};
    const double want[] = {c.bf16, c.tf32, c.fp32};
    for (int i = 0; i < 3; i++)
        if (!(std::fabs(got[i] - want[i]) <= 0.01 * want[i]))
            test::report(__FILE__, __LINE__,
                         format("%s: %g, expected %g (%s)", c.gpu, got[i], want[i],
                                i == 0   ? "bf16"
                                : i == 1 ? "TF32"
                                         : "fp32"));
}

}  // namespace

// Figures as the data sheets and architecture papers print them, not as the table derives them.
TEST(data_sheet_figures_by_device_name) {
    for (const Case& c : std::initializer_list<Case>{
             {"Tesla V100-SXM2-16GB", 0, 15.7, 15.7},
             {"Tesla V100-PCIE-32GB", 0, 14, 14},
             {"Tesla V100S-PCIE-32GB", 0, 16.4, 16.4},
             {"Tesla T4", 0, 8.1, 8.1},
             {"NVIDIA GeForce RTX 2080 Ti", 0, 13.4, 13.4},
             {"Quadro RTX 6000", 0, 16.3, 16.3},
             {"NVIDIA TITAN RTX", 0, 16.3, 16.3},
             {"NVIDIA A100-SXM4-80GB", 312, 156, 19.5},
             {"NVIDIA A100 80GB PCIe", 312, 156, 19.5},
             {"A100-SXM4-40GB", 312, 156, 19.5},
             {"NVIDIA A800-SXM4-80GB", 312, 156, 19.5},
             {"NVIDIA A30", 165, 82, 10.3},
             {"NVIDIA A40", 149.7, 74.8, 37.4},
             {"NVIDIA A10", 125, 62.5, 31.2},
             {"NVIDIA A10G", 70, 35, 31.5},
             {"NVIDIA A2", 18, 9, 4.5},
             {"NVIDIA A16", 18, 9, 4.5},
             {"NVIDIA GeForce RTX 3080", 59.5, 29.8, 29.8},
             {"NVIDIA GeForce RTX 3090", 71.2, 35.6, 35.6},
             {"NVIDIA GeForce RTX 3090 Ti", 80, 40, 40},
             {"NVIDIA RTX A6000", 154.8, 77.4, 38.7},
             {"NVIDIA RTX A4000", 76.7, 38.3, 19.2},
             {"NVIDIA L4", 121, 60, 30.3},
             {"NVIDIA L40", 181, 90.5, 90.5},
             {"NVIDIA L40S", 362, 183, 91.6},
             {"NVIDIA GeForce RTX 4080", 97.5, 48.7, 48.7},
             {"NVIDIA GeForce RTX 4080 SUPER", 104.4, 52.2, 52.2},
             {"NVIDIA GeForce RTX 4070 Ti", 80.2, 40.1, 40.1},
             {"NVIDIA GeForce RTX 4070 Ti SUPER", 88.2, 44.1, 44.1},
             {"NVIDIA GeForce RTX 4090", 165.2, 82.6, 82.6},
             {"NVIDIA RTX 6000 Ada Generation", 364.2, 182.1, 91.1},
             {"NVIDIA RTX 4000 SFF Ada Generation", 76.7, 38.4, 19.2},
             {"NVIDIA H100 80GB HBM3", 989, 494.5, 67},
             {"NVIDIA H100 PCIe", 756, 378, 51},
             {"NVIDIA H100 NVL", 835.5, 417.5, 60},
             {"NVIDIA H800", 989, 494.5, 67},
             {"NVIDIA H20", 148, 74, 44},
             {"NVIDIA H200", 989, 494.5, 67},
             {"NVIDIA H200 NVL", 835.5, 417.5, 60},
             {"NVIDIA GH200 480GB", 989, 494.5, 67},
             {"NVIDIA GH200 144G HBM3e", 989, 494.5, 67},
             {"NVIDIA B200", 2250, 1125, 75},
             {"NVIDIA B300 SXM6 AC", 2250, 1125, 75},
             {"NVIDIA GB200", 2500, 1250, 80},
             {"NVIDIA GeForce RTX 5090", 209.5, 104.8, 104.8},
             {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 500, 250, 125},
             {"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 440, 220, 110},
         })
        check(c);
}

// Parts with rates of their own, slices, vGPUs, and names that merely contain a known one.
TEST(other_names_have_no_peak) {
    for (const char* gpu : {"",
                            "CPU, 2 threads",
                            "NVIDIA GeForce RTX 4090 Laptop GPU",
                            "NVIDIA GeForce RTX 2080 with Max-Q Design",
                            "NVIDIA RTX A2000 8GB Laptop GPU",
                            "NVIDIA RTX 5000 Ada Generation Laptop GPU",
                            "NVIDIA T400 4GB",
                            "NVIDIA T4G",
                            "NVIDIA L20",
                            "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
                            "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
                            "NVIDIA A40-48Q",
                            "GRID A100D-10C",
                            "NVIDIA GeForce RTX 5090 D",
                            "Tesla P100-PCIE-16GB",
                            "NVIDIA A1000",
                            "NVIDIA GeForce GTX 1660",
                            "NVIDIA RTX A400",
                            "NVIDIA H20-3e",
                            "NVIDIA PG506-230"})
        check({gpu, 0, 0, 0});
}

// Two rows of one name, or a name that no device name turns into, would be dead.
TEST(every_row_is_reachable) {
    for (const peak::Entry& e : peak::table) {
        CHECK(peak_tflops(std::string("NVIDIA ") + e.name, false, false) == e.rates.fp32);
        if (peak::part_of(e.name, true) != e.name)
            test::report(__FILE__, __LINE__, std::string(e.name) + " is not normal");
        int rows = 0;
        for (const peak::Entry& other : peak::table) rows += std::string(e.name) == other.name;
        if (rows != 1) test::report(__FILE__, __LINE__, format("%s: %d rows", e.name, rows));
    }
}

TEST_MAIN
