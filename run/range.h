#pragma once
#include <nvtx3/nvToolsExt.h>

#include "common/error.h"
#include "parallel/watchdog.h"

// A named stretch of the timeline for Nsight Systems (make profile). It is also a sign of life for the watchdog.
struct Range {
    explicit Range(const char* name) {
        nvtxRangePushA(name);
        progress++;
    }
    Range(const char* name, int i) : Range(format("%s %d", name, i).c_str()) {}
    ~Range() {
        nvtxRangePop();
        progress++;
    }
};
