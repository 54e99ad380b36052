// A run's output directory.
#pragma once
#include <memory>
#include <string>

#include "data/file.h"
#include "run/settings.h"

// No other run writes to it while this object is there. A file system without locks does without.
struct OutputDir {
    explicit OutputDir(const std::string& path);
    void warn_if_replaced() {
        directory.warn_if_replaced();
        lock.warn_if_replaced();
    }

    HeldFile directory;
    HeldFile lock;
};

// Creates the output directory and locks it. Refuses one that is in use, and an earlier run in it
// that is not to be resumed.
std::unique_ptr<OutputDir> prepare_output_dir(const Options& o);
