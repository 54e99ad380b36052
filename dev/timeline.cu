// Who waits for what, and when, in one block of flash_bf16_sm90: the picture of its pipeline, measured.
//
// The kernels are compiled once more with clock stamps at each wait (dev/timeline.cuh). The trainer has none. What lies
// between two waits of a warp is work. A wait has the name of what its line of the kernel's file waits for. That is a
// barrier, or the registers that a product writes.
//
// Run: ./dev/timeline --help
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "dev/bench.h"
#include "dev/timeline.cuh"

void* timeline_of_flash_bf16_sm90();
void* timeline_of_flash_bf16_sm90_backward();

struct Options : Output {
    std::string hs = "64";
    int T = 8192, from = 60'000, clocks = 8'000;
};

// "mbarrier_wait(shared.at(KFull, at.stage), …);" → "k_full", "wgmma_wait<1>(dk, dq);" → "dk,dq".
static std::string what_waits(const std::vector<std::string>& lines, int line) {
    const std::string& text = lines.at(line - 1);
    const size_t wait = text.find("_wait"), open = text.find('(', wait) + 1;
    if (wait == std::string::npos) throw Error(format("line %d of the kernel has no wait: run make again", line));
    std::string name;
    if (const size_t at = text.find("at(", open); at != std::string::npos) {  // a barrier of shared or control
        for (size_t i = at + 3; std::isalpha(text[i]); i++) {
            if (std::isupper(text[i]) && !name.empty()) name += '_';
            name += static_cast<char>(std::tolower(text[i]));
        }
    } else {
        name = text.substr(open, text.find(')', open) - open);
        name.erase(std::remove(name.begin(), name.end(), ' '), name.end());
    }
    return name;
}

// One row for each warp that waits, in clocks from the window's beginning.
static void report(const Cuda& dev, const Options& o, const char* pass, const std::string& file, const void* address,
                   const std::vector<int>& warps, Log& log) {
    std::vector<std::string> lines;
    std::ifstream source(file);
    if (!source) throw Error(file + ": cannot be read; run dev/timeline from the repository's root");
    for (std::string line; std::getline(source, line);) lines.push_back(line);
    const auto timeline = std::make_unique<Timeline>();
    dev.download(timeline.get(), address, sizeof(Timeline));
    const auto kept = [&](int warp) {  // in their order
        std::vector<Timeline::Wait> waits;
        for (const Timeline::Wait& wait : timeline->waits[warp])
            if (wait.line) waits.push_back(wait);
        std::sort(waits.begin(), waits.end(), [](auto& a, auto& b) { return static_cast<int>(a.begin - b.begin) < 0; });
        return waits;
    };
    const unsigned begin = kept(warps[0]).at(0).begin + o.from;
    for (const int warp : warps) {
        std::string waits;
        int stall = 0;
        for (const Timeline::Wait& wait : kept(warp)) {
            const int from = static_cast<int>(wait.begin - begin), to = static_cast<int>(wait.end - begin);
            if (to < 0 || from > o.clocks) continue;
            waits += format("%s%s %d %d", waits.empty() ? "" : ", ", what_waits(lines, wait.line).c_str(), from, to);
            stall += std::min(to, o.clocks) - std::max(from, 0);
        }
        std::printf("%s warp %2d waits in %4.1f %% of the clocks\n", pass, warp, 100. * stall / o.clocks);
        Row row = result_row(dev, "timeline");
        row.add("kernel", "flash_bf16_sm90").add("pass", pass).add("B", 2).add("T", o.T).add("NH", 12);
        row.add("HS", o.hs == "64" ? 64 : 128).add("clocks", o.clocks).add("warp", warp);
        log.write(row.add("waits", waits));
    }
}

static int run(const Options& o) {
    Cuda dev;
    const AttentionShape s{2, o.T, o.T, 12, std::atoi(o.hs.c_str()), true};
    const AttentionKernel<bf16>& kernel = flash_bf16_sm90;
    if (!kernel.runs_on(dev)) throw Error("flash_bf16_sm90 does not run on a " + dev.name);
    const size_t n = size_t(s.B) * s.Tq * s.NH * s.HS;
    const DeviceMemory memory = device_memory(dev, 8 * n * sizeof(bf16)),
                       lse = device_memory(dev, n / s.HS * sizeof(float)),
                       scratch = device_memory(dev, kernel.scratch_bytes(s));
    bf16 *qkv = static_cast<bf16*>(memory.get()), *dout = qkv + 3 * n, *out = dout + n, *dqkv = out + n;
    float* const rows = static_cast<float*>(lse.get());
    fill_normal(dev, qkv, 4 * n, 1);
    const Attention kind{kernel.name};
    attention_forward<bf16>(dev, kind, out, rows, nullptr, qkv, s.B, s.Tq, s.Tk, s.NH, s.HS);
    attention_backward<bf16>(dev, kind, dqkv, scratch.get(), dout, out, rows, nullptr, qkv, s.B, s.Tq, s.NH, s.HS);
    dev.sync();
    Log log = results_log(dev, "timeline", o);
    const std::string file = "attention/flash_bf16_sm90";
    std::vector<int> warps = {0, 4, 8};  // the producer, and the first warp of each consumer
    if (s.HS == 64) warps.push_back(12);
    report(dev, o, "fwd", file + ".cu", timeline_of_flash_bf16_sm90(), warps, log);
    report(dev, o, "bwd", file + "_backward.cu", timeline_of_flash_bf16_sm90_backward(), {0, 1, 2, 3, 4, 8}, log);
    return 0;
}

int main(int argc, char** argv) {
    Options o;
    const std::vector<Option> table = {
        {"--hs", "", Option::Choice, &o.hs, "head size HS", "64|128"},
        {"--length", "", Option::Int, &o.T, "length T of 2 sequences with 12 heads", "1024..65536"},
        {"--from", "", Option::Int, &o.from, "clocks after the block's first wait", "0..1000000000"},
        {"--clocks", "", Option::Int, &o.clocks, "clocks to show", "100..1000000"},
    };
    const char* const about = "Shows when the warps of an attention block wait.";
    return bench_main(argc, argv, "timeline", about, "timeline.jsonl", o, table, [&] { return run(o); });
}
