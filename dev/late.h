// Makes tests notice a kernel that runs on another stream than the device's. Memory gets its content late, and only on
// the device's stream.
#pragma once
#include <algorithm>
#include <vector>

#include "layers/gpu/cublas.h"

// A GPU whose stream is ordered with no other stream, not even the default one.
struct OwnStream : Cuda {
    OwnStream() {
        CUDA_CHECK(cudaStreamDestroy(stream));
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUBLAS_CHECK(cublasSetStream(blas, stream));
        CUBLAS_CHECK(cublasSetWorkspace(blas, workspace, kWorkspaceBytes));
    }
};

// Device memory that late() knows. It begins as poison, all bits set, which is a NaN or −1.
struct LateMemory {
    LateMemory(const Cuda& dev, size_t bytes) : dev(dev), bytes(bytes), p(dev.alloc(bytes)), saved(dev.alloc(bytes)) {
        CUDA_CHECK(cudaMemsetAsync(p, 0xff, bytes, dev.stream));
        all().push_back(this);
    }
    ~LateMemory() {
        all().erase(std::find(all().begin(), all().end(), this));
        dev.free(p), dev.free(saved);
    }
    LateMemory(const LateMemory&) = delete;
    static std::vector<LateMemory*>& all() {
        static std::vector<LateMemory*> memory;
        return memory;
    }
    const Cuda& dev;
    const size_t bytes;
    void *const p, *const saved;
};

// Returns the device for a call under test. For half a millisecond on its stream all LateMemory is poison, and then it
// gets back what it held. A kernel on another stream reads that poison, and what it writes is lost.
inline const Cuda& late(const Cuda& dev) {
    for (const LateMemory* m : LateMemory::all()) {
        CUDA_CHECK(cudaMemcpyAsync(m->saved, m->p, m->bytes, cudaMemcpyDeviceToDevice, dev.stream));
        CUDA_CHECK(cudaMemsetAsync(m->p, 0xff, m->bytes, dev.stream));
    }
    dev.sync();
    dev.pause(500000);
    for (const LateMemory* m : LateMemory::all())
        CUDA_CHECK(cudaMemcpyAsync(m->p, m->saved, m->bytes, cudaMemcpyDeviceToDevice, dev.stream));
    return dev;
}
