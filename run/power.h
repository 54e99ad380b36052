// --watch-power: a GPU's power, clock and temperature, and whether they hold it back. They come from the driver's own
// library NVML. It is loaded at run time if it is there, so the program needs neither its header nor a link to it.
#pragma once
#include <dlfcn.h>

#include <cstdio>
#include <string>

#include "layers/layers.h"
#include "run/log.h"

class PowerWatch {
  public:
    // Looks every so many steps, or never if `every` is 0. A run on the CPU watches the first GPU, if there is one.
    template <class Dev>
    PowerWatch(int every, const Dev& dev) : every(every) {
        if (every == 0) return;
        char bus[32] = "";  // NVML counts GPUs that CUDA_VISIBLE_DEVICES hides, so it gets an address
        if constexpr (std::is_same_v<Dev, Cuda>) CUDA_CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, dev.device));
        nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        const bool found = nvml && call("nvmlInit_v2") &&
                           (*bus ? call("nvmlDeviceGetHandleByPciBusId_v2", static_cast<const char*>(bus), &gpu)
                                 : call("nvmlDeviceGetHandleByIndex_v2", 0u, &gpu));
        if (found) return;
        const char* const why = nvml ? "it knows no such GPU" : dlerror();
        std::fprintf(stderr, "--watch-power: the driver's NVML does not answer (%s); nothing is watched\n", why);
        this->every = 0;
    }
    // For the row of this step, while the GPU still works on it.
    void look(int step) {
        seen = every > 0 && step % every == 0 && call("nvmlDeviceGetPowerUsage", gpu, &milliwatts) &&
               call("nvmlDeviceGetClockInfo", gpu, kSmClock, &clock) &&
               call("nvmlDeviceGetTemperature", gpu, kGpuSensor, &celsius);
        if (!seen) return;
        unsigned long long reasons = 0;
        call("nvmlDeviceGetCurrentClocksEventReasons", gpu, &reasons) ||  // of drivers since 535
            call("nvmlDeviceGetCurrentClocksThrottleReasons", gpu, &reasons);
        looks++, watts += milliwatts / 1e3, by_power += (reasons & kByPower) > 0, by_heat += (reasons & kByHeat) > 0;
    }
    void add_to(Row& row) const {
        if (!seen) return;
        row.add("gpu_watts", milliwatts / 1e3).add("sm_mhz", int(clock)).add("gpu_celsius", int(celsius));
    }
    std::string summary() const {  // a line, or nothing
        const char* text =
            "GPU power %.0f W on average of %d looks, held back by power in %d and by heat in %d of them\n";
        return looks ? format(text, watts / looks, looks, by_power, by_heat) : "";
    }

  private:
    static constexpr int kSmClock = 1, kGpuSensor = 0;  // NVML's numbers
    // The software's power cap and the hardware's power brake. The two thermal slowdowns. 8 may be either.
    static constexpr unsigned long long kByPower = 0x04 | 0x80, kByHeat = 0x20 | 0x40;
    template <class... Args>
    bool call(const char* name, Args... args) const {
        const auto function = reinterpret_cast<int (*)(Args...)>(dlsym(nvml, name));
        return function && function(args...) == 0;
    }

    int every;
    void *nvml = nullptr, *gpu = nullptr;
    bool seen = false;  // at this step
    unsigned milliwatts = 0, clock = 0, celsius = 0;
    int looks = 0, by_power = 0, by_heat = 0;
    double watts = 0;  // of all looks
};
