// A named stretch of the timeline for Nsight Systems (make profile), while the object exists.
#pragma once
#include <nvtx3/nvToolsExt.h>

#include "common/error.h"

struct Range {
    explicit Range(const char* name) { nvtxRangePushA(name); }
    Range(const char* name, int i) : Range(format("%s %d", name, i).c_str()) {}
    ~Range() { nvtxRangePop(); }
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;
};
