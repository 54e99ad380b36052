// What the benchmarks share: the two timing protocols, random inputs, the GEMM rate to compare
// with, and result rows.
//
// A power-capped GPU slows down by 15 % within half a second of work, so a time means nothing
// without its protocol.
//   cool       0.5 s idle, 3 warm-ups, the median of 15 single launches, each after a rest
//   sustained  0.5 s back to back, then the mean of the next 0.5 s
// Both use device events, and both are reported. Compare figures only within one protocol.
#pragma once
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "attention/attention.h"
#include "common/random.h"
#include "cuda/cublas.h"
#include "cuda/cuda.h"
#include "run/log.h"
#include "run/options.h"

// Milliseconds, or a rate, in each protocol. NaN if not measured.
struct Figures {
    double cool = NAN;
    double sustained = NAN;
};

class Event {
  public:
    Event() { CUDA_CHECK(cudaEventCreate(&event_)); }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;

    void record(const Cuda& dev) { CUDA_CHECK(cudaEventRecord(event_, dev.stream)); }
    double ms_until(const Event& end) const {  // waits for `end`
        float ms;
        CUDA_CHECK(cudaEventSynchronize(end.event_));
        CUDA_CHECK(cudaEventElapsedTime(&ms, event_, end.event_));
        return ms;
    }

  private:
    cudaEvent_t event_;
};

// launch(i) enqueues the i-th run of the timed work, and may use i to rotate buffers.
//
// Before each run the GPU rests four times as long as the run before took, but at most max_rest ms.
// Without that the clock falls after 60 ms of attention's backward. Then the GPU pauses, so that
// the host can queue all of the run. So the time is the GPU's, and does not depend on how fast the
// host launches.
template <class Launch>
double cool_ms(const Cuda& dev, Launch launch, double max_rest = 50.) {
    constexpr int kWarmUps = 3;
    constexpr int kRuns = 15;
    constexpr unsigned kHeadStartNs = 200'000;
    dev.sync();
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    for (int i = 0; i < kWarmUps; i++)
        launch(i);

    std::array<double, kRuns> ms;
    double rest = 0.;
    for (int i = 0; i < kRuns; i++) {
        dev.sync();
        std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(rest));
        Event start;
        Event end;
        dev.pause(kHeadStartNs);
        start.record(dev);
        launch(kWarmUps + i);
        end.record(dev);
        ms[i] = start.ms_until(end);
        rest = std::min(4. * ms[i], max_rest);
    }

    std::nth_element(ms.begin(), ms.begin() + kRuns / 2, ms.end());
    return ms[kRuns / 2];
}

// The protocol needs to know roughly how long a run takes, so that runs fill half a second.
template <class Launch>
double sustained_ms(const Cuda& dev, double about_ms, Launch launch) {
    const int runs = std::max(1, static_cast<int>(std::ceil(500. / about_ms)));
    Event start;
    Event end;
    for (int i = 0; i < runs; i++)
        launch(i);

    start.record(dev);
    for (int i = 0; i < runs; i++)
        launch(i);
    end.record(dev);
    return start.ms_until(end) / runs;
}

template <class Launch>
Figures measure_ms(const Cuda& dev, bool quick, Launch launch) {
    Figures ms;
    ms.cool = cool_ms(dev, launch);
    if (!quick)
        ms.sustained = sustained_ms(dev, ms.cool, launch);
    return ms;
}

inline Figures tflops(double flops, const Figures& ms) {
    return {flops / ms.cool * 1e-9, flops / ms.sustained * 1e-9};
}

struct BatchShape {
    int B;
    int T;
};

inline BatchShape parse_shape(const std::string& text) {
    BatchShape shape = {};
    int used = 0;
    const int numbers = std::sscanf(text.c_str(), "%dx%d%n", &shape.B, &shape.T, &used);
    const bool is_all = used == static_cast<int>(text.size());
    if (numbers != 2 || !is_all || shape.B < 1 || shape.T < 1)
        throw UsageError(
            format("--shapes: \"%s\" is not a shape; give BxT, such as 4x1024", text.c_str()));
    return shape;
}

// Parses shapes such as "4x1024,2x16384". Throws UsageError.
inline std::vector<BatchShape> parse_shapes(const std::string& text) {
    std::vector<BatchShape> shapes;
    size_t begin = 0;
    while (begin <= text.size()) {
        const size_t end = std::min(text.find(',', begin), text.size());
        shapes.push_back(parse_shape(text.substr(begin, end - begin)));
        begin = end + 1;
    }
    return shapes;
}

// -------------------------------------------------------------------------------------------------
// Device memory and random inputs

using DeviceMemory = std::unique_ptr<void, std::function<void(void*)>>;

inline DeviceMemory device_memory(const Cuda& dev, size_t bytes) {
    return {dev.alloc(bytes), [&dev](void* p) { dev.free(p); }};
}

// x[i] ~ N(0,1) by Box-Muller on a mixed counter, so it depends on (seed, i) only. Zeros or
// constants would draw less power, and the clock would be higher than it is in use.
template <class X>
__global__ void normal_kernel(X* x, size_t n, uint64_t seed) {
    const size_t first = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const size_t step = size_t(gridDim.x) * blockDim.x;
    for (size_t i = first; i < n; i += step) {
        const uint64_t z = mix64((seed << 48) + i + kGolden);
        const float u = (static_cast<uint32_t>(z) + 1.f) * 0x1p-32f;
        const float angle = static_cast<uint32_t>(z >> 32) * 0x1p-31f;
        x[i] = static_cast<X>(sqrtf(-2.f * logf(u)) * cospif(angle));
    }
}
template <class X>
void fill_normal(const Cuda& dev, X* x, size_t n, uint64_t seed) {
    normal_kernel<<<8 * dev.num_sms, 256, 0, dev.stream>>>(x, n, seed);
    LAUNCH_CHECK("normal_kernel");
}

// -------------------------------------------------------------------------------------------------
// The rates to compare with

// n of the n × n matrices of gemm_tflops().
template <class X>
int gemm_size(const Cuda& dev) {
    return std::is_same_v<X, bf16> || dev.tf32 ? 8192 : 4096;
}

// What cuBLAS reaches on a large square product in X, in TFLOP/s. In fp32 it uses TF32 if dev.tf32
// is set.
template <class X>
Figures gemm_tflops(const Cuda& dev, bool quick) {
    constexpr bool is_bf16 = std::is_same_v<X, bf16>;
    const int n = gemm_size<X>(dev);
    const cudaDataType type = is_bf16 ? CUDA_R_16BF : CUDA_R_32F;
    const cublasComputeType_t compute =
        !is_bf16 && dev.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    const size_t size = size_t(n) * n;
    const DeviceMemory memory = device_memory(dev, 3 * size * sizeof(X));
    X* a = static_cast<X*>(memory.get());
    X* b = a + size;
    X* c = b + size;
    fill_normal(dev, a, 2 * size, 1);

    const float alpha = 1.f;
    const float beta = 0.f;
    const auto product = [&](int) {
        CUBLAS_CHECK(cublasGemmEx(dev.blas, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &alpha, a, type, n,
                                  b, type, n, &beta, c, type, n, compute, CUBLAS_GEMM_DEFAULT));
    };
    return tflops(2. * n * n * n, measure_ms(dev, quick, product));
}

// Bytes per second of a device-to-device copy that fits in no cache. Both reads and writes count.
inline Figures copy_rate(const Cuda& dev) {
    constexpr size_t kBytes = size_t(1) << 30;
    const DeviceMemory memory = device_memory(dev, 2 * kBytes);
    char* p = static_cast<char*>(memory.get());
    const auto copy = [&](int) {
        CUDA_CHECK(cudaMemcpyAsync(p + kBytes, p, kBytes, cudaMemcpyDeviceToDevice, dev.stream));
    };
    const Figures ms = measure_ms(dev, false, copy);
    constexpr double kMoved = 2. * kBytes;  // read and written
    return {1e3 * kMoved / ms.cool, 1e3 * kMoved / ms.sustained};
}

// -------------------------------------------------------------------------------------------------
// Result rows: dev/results/<gpu>/<bench>.jsonl

inline std::string first_line_of(const char* command) {
    std::string line;
    std::FILE* const pipe = popen(command, "r");
    if (!pipe)
        return line;
    int c = std::fgetc(pipe);
    while (c != EOF && c != '\n') {
        line += static_cast<char>(c);
        c = std::fgetc(pipe);
    }
    pclose(pipe);
    return line;
}

// Where a benchmark appends its rows: to the file `out` if it is given, else to dev/results if
// `json`, and else nowhere.
struct Output {
    std::string out;
    bool json = false;
};

// The main of a benchmark. It adds the options of its output, `to`, to the table, and calls run()
// unless the command line only asks for help. `file` is only what --help says of the rows' file.
// results_log() opens it.
inline int bench_main(int argc, char** argv, const char* name, const char* about,
                      const std::string& file, Output& to, std::vector<Option> table,
                      const std::function<int()>& run) {
    const std::string json = "append the results to dev/results/<gpu>/" + file;
    table.push_back({"--json", "", Option::Flag, &to.json, json.c_str()});
    table.push_back(
        {"--out", "", Option::String, &to.out, "append the results to this file instead"});
    return run_program(name, [&] {
        if (parse_options(argc, argv, table) == Parsed::options)
            return run();
        std::fputs(options_help(name, about, table).c_str(), stdout);
        return 0;
    });
}

inline Log results_log(const Cuda& dev, const std::string& bench, const Output& to) {
    if (to.out.empty() && !to.json)
        return Log();
    std::string gpu = dev.name;
    std::replace(gpu.begin(), gpu.end(), ' ', '-');
    const std::string default_path = "dev/results/" + gpu + "/" + bench + ".jsonl";
    const std::filesystem::path path = to.out.empty() ? default_path : to.out;
    if (path.has_parent_path())
        std::filesystem::create_directories(path.parent_path());
    return Log(path.string());
}

// "COMMIT clean" or "COMMIT dirty": build/tree.cpp, from scripts/tree.sh
extern const char built_from[];

inline std::string utc_now() {
    char date[32];
    const std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
    return date;
}

// A row that says where its figures come from. Rows of the same run may be compared. The
// environment variable RUN names the run; without it the time of the first row is its name.
inline Row result_row(const Cuda& dev, const char* bench) {
    static const std::string tree = built_from;
    static const std::string commit = tree.substr(0, tree.find(' '));
    static const char* const named = std::getenv("RUN");
    static const std::string run = named && *named ? named : utc_now();
    static const std::string driver =
        first_line_of("nvidia-smi --query-gpu=driver_version --format=csv,noheader -i 0");
    int version = 0;  // 12040 is 12.4
    CUDA_CHECK(cudaRuntimeGetVersion(&version));

    Row row(bench);
    row.add("commit", commit);
    row.add("dirty", tree != commit + " clean");
    row.add("run", run);
    row.add("date", utc_now());
    row.add("gpu", dev.name);
    row.add("driver", driver);
    row.add("cuda", format("%d.%d", version / 1000, (version % 1000) / 10));
    return row;
}
