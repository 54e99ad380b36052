// Makes tests notice a kernel that runs on another stream than the device's, or writes outside of
// its memory. Memory lies between guards. In late() it gets its content late, and only on the
// device's stream.
#pragma once
#include <algorithm>
#include <vector>

#include "cuda/cublas.h"
#include "dev/common/test.h"

// A GPU whose stream is ordered with no other stream, not even the default one.
struct OwnStream : Cuda {
    OwnStream() {
        CUDA_CHECK(cudaStreamDestroy(stream));
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUBLAS_CHECK(cublasSetStream(blas, stream));
        CUBLAS_CHECK(cublasSetWorkspace(blas, workspace, kWorkspaceBytes));
    }
};

// Device memory between two guards, known to late(). It begins as poison, all bits set, which is a
// NaN or −1. So do the guards, and a read past the end shows too.
struct LateMemory {
    LateMemory(const Cuda& dev, size_t bytes, const char* name = "memory")
        : dev(dev),
          bytes(bytes),
          name(name),
          base(static_cast<char*>(dev.alloc(kGuard + bytes + kGuard))),
          p(base + kGuard) {
        CUDA_CHECK(cudaMemsetAsync(base, 0xff, kGuard + bytes + kGuard, dev.stream));
        all().push_back(this);
    }
    ~LateMemory() {
        all().erase(std::find(all().begin(), all().end(), this));
        try {  // after a fault on the device every call fails, and the test has reported it by then
            for (const char* guard : {base, base + kGuard + bytes}) {
                std::vector<unsigned char> host(kGuard);
                dev.download(host.data(), guard, kGuard);
                if (std::count(host.begin(), host.end(), 0xff) == kGuard)
                    continue;
                test::report(__FILE__, __LINE__,
                             format("written %s %s", guard == base ? "before" : "past", name));
            }
        } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the test has reported it
        }
        dev.free(base);
        dev.free(saved);
    }
    LateMemory(const LateMemory&) = delete;
    static std::vector<LateMemory*>& all() {
        static std::vector<LateMemory*> memory;
        return memory;
    }
    void poison() const { CUDA_CHECK(cudaMemsetAsync(p, 0xff, bytes, dev.stream)); }

    static constexpr ptrdiff_t kGuard = 16384;
    const Cuda& dev;
    const size_t bytes;
    const char* const name;
    char* const base;
    void* const p;
    void* saved = nullptr;  // what late() keeps of it
};

// Returns the device for a call under test. For so long on its stream all LateMemory is poison, and
// then it gets back what it held. A kernel on another stream reads that poison, and what it writes
// is lost.
inline const Cuda& late(const Cuda& dev, unsigned ns = 500'000) {
    for (LateMemory* m : LateMemory::all()) {
        if (!m->saved)
            m->saved = dev.alloc(std::max<size_t>(1, m->bytes));
        CUDA_CHECK(cudaMemcpyAsync(m->saved, m->p, m->bytes, cudaMemcpyDeviceToDevice, dev.stream));
        m->poison();
    }
    dev.sync();
    dev.pause(ns);
    for (const LateMemory* m : LateMemory::all())
        CUDA_CHECK(cudaMemcpyAsync(m->p, m->saved, m->bytes, cudaMemcpyDeviceToDevice, dev.stream));
    return dev;  // NOLINT(bugprone-return-const-ref-from-parameter): it outlives the call
}
