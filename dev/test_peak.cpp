// Tests the peak table behind MFU, with the names that drivers report.
//
// Run: ./dev/test_peak
#include "data/file.h"
#include "dev/test.h"
#include "run/peak.h"

namespace {

struct Case {
    const char* gpu;
    double bf16, tf32, fp32;  // --precision bf16, fp32, fp32 --no-tf32
};

void check(const Case& c) {
    const double got[] = {peak_tflops(c.gpu, true, true), peak_tflops(c.gpu, false, true),
                          peak_tflops(c.gpu, false, false)};
    const double want[] = {c.bf16, c.tf32, c.fp32};
    const char* const names[] = {"bf16", "TF32", "fp32"};
    for (int i = 0; i < 3; i++)
        if (!(std::fabs(got[i] - want[i]) <= 0.01 * want[i]))
            test::report(__FILE__, __LINE__, format("%s: %g, expected %g (%s)", c.gpu, got[i], want[i], names[i]));
}

}  // namespace

// Each rule and each form of a name. The figures are as the data sheets print them, not as the table derives them.
TEST(data_sheet_figures_by_device_name) {
    const struct {
        std::vector<const char*> gpus;
        double bf16, tf32, fp32;
    } cases[] = {
        {{"Tesla V100-SXM2-16GB"}, 0, 15.7, 15.7},
        {{"Tesla V100-PCIE-32GB"}, 0, 14, 14},
        {{"Tesla T4"}, 0, 8.1, 8.1},
        {{"NVIDIA GeForce RTX 2080 Ti"}, 0, 13.4, 13.4},
        {{"Quadro RTX 6000", "NVIDIA TITAN RTX"}, 0, 16.3, 16.3},
        {{"NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "A100-SXM4-40GB", "NVIDIA A800-SXM4-80GB"}, 312, 156, 19.5},
        {{"NVIDIA A40"}, 149.7, 74.8, 37.4},
        {{"NVIDIA GeForce RTX 3090"}, 71.2, 35.6, 35.6},
        {{"NVIDIA RTX A4000"}, 76.7, 38.3, 19.2},
        {{"NVIDIA L40S"}, 362, 183, 91.6},
        {{"NVIDIA GeForce RTX 4070 Ti SUPER"}, 88.2, 44.1, 44.1},
        {{"NVIDIA RTX 4000 SFF Ada Generation"}, 76.7, 38.4, 19.2},
        {{"NVIDIA H100 80GB HBM3", "NVIDIA H800", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e"},
         989,
         494.5,
         67},
        {{"NVIDIA H100 PCIe"}, 756, 378, 51},
        {{"NVIDIA H100 NVL", "NVIDIA H200 NVL"}, 835.5, 417.5, 60},
        {{"NVIDIA B200", "NVIDIA B300 SXM6 AC"}, 2250, 1125, 75},
        {{"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"}, 440, 220, 110}};
    for (const auto& c : cases)
        for (const char* gpu : c.gpus) check({gpu, c.bf16, c.tf32, c.fp32});
}

// The checksum is of figures that were all compared with their data sheets, within 1 %. Where a sheet has none, that is
// 2 FLOPs for each core and cycle at boost clock. Compare a new row too, and then write the new checksum here.
TEST(no_figure_has_changed) {
    std::string all;
    for (const peak::Entry& e : peak::table)
        all += format("%s %g %g %g\n", e.name, e.rates.bf16, e.rates.tf32, e.rates.fp32);
    if (checksum64(all.data(), all.size()) != 0xb344a9bcdd45e227u)
        test::report(__FILE__, __LINE__,
                     format("checksum %016zx: %s", checksum64(all.data(), all.size()), all.c_str()));
}

// Parts with unusual rates, slices, vGPUs, and names that merely contain a known one.
TEST(other_names_have_no_peak) {
    const std::string names =
        "; CPU, 2 threads; NVIDIA GeForce RTX 4090 Laptop GPU; NVIDIA GeForce RTX 2080 with Max-Q Design; "
        "NVIDIA RTX A2000 8GB Laptop GPU; NVIDIA RTX 5000 Ada Generation Laptop GPU; NVIDIA T400 4GB; NVIDIA T4G; "
        "NVIDIA L20; NVIDIA A100-SXM4-40GB MIG 1g.5gb; NVIDIA H100 80GB HBM3 MIG 3g.40gb; NVIDIA A40-48Q; "
        "GRID A100D-10C; NVIDIA GeForce RTX 5090 D; Tesla P100-PCIE-16GB; NVIDIA A1000; NVIDIA GeForce GTX 1660; "
        "NVIDIA RTX A400; NVIDIA H20-3e; NVIDIA PG506-230; ";
    for (size_t at = 0, end; (end = names.find("; ", at)) != names.npos; at = end + 2)
        check({names.substr(at, end - at).c_str(), 0, 0, 0});
}

// A second row with the same name, or a name that no device name turns into, would never be used.
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
