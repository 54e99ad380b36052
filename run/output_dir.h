// A run's output directory, which one run at a time may use.
#pragma once
#include <memory>
#include <string>

#include "data/file.h"
#include "run/settings.h"

// The directory, locked while this object exists. On a file system without locks it is not locked.
struct OutputDir {
    explicit OutputDir(const std::string& path);

    void warn_if_replaced() {
        directory.warn_if_replaced();
        lock.warn_if_replaced();
    }

    HeldFile directory;
    HeldFile lock;
};

// Creates and locks the output directory. Throws an Error if another run is using it, or if it has
// an earlier run and -y is not given.
std::unique_ptr<OutputDir> prepare_output_dir(const Options& o);
