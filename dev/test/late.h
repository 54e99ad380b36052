// Makes tests notice a kernel that runs on another stream than the device's, or accesses memory
// outside of its tensors. LateMemory is allocated between guards. late() lets it get its content
// late, and only on the device's stream.
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

// The device of all of a program's tests. A test that asks for it where there is none is skipped.
template <class Device>
Device& device_or_skip() {
    std::string why;
    if (Cuda::count(&why) == 0)
        SKIP("no GPU: %s", why.c_str());
    static Device& dev = *new Device;  // never destroyed, so that no memory outlives it
    return dev;
}

// Device memory between two guards, known to late(). It starts as poison, all bits set, which is a
// NaN or −1. The guards are poison too, so that a read past the end shows.
struct LateMemory {
    static constexpr ptrdiff_t kGuard = 16384;
    const Cuda& dev;
    const size_t bytes;
    const char* const name;
    char* const base;
    void* const p;
    void* saved = nullptr;  // a copy of the content, for late()

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
        try {
            check_guard(base, "before");
            check_guard(base + kGuard + bytes, "past");
        } catch (const Error&) {  // NOLINT(bugprone-empty-catch)
            // After a fault on the device every call fails, and the test has reported it by then.
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

  private:
    void check_guard(const char* guard, const char* where) const {
        std::vector<unsigned char> host(kGuard);
        dev.download(host.data(), guard, kGuard);
        if (std::count(host.begin(), host.end(), 0xff) != kGuard)
            test::report(__FILE__, __LINE__, format("written %s %s", where, name));
    }
};

// Returns the device for a call under test. For `ns` nanoseconds on its stream all LateMemory is
// poison, and then it gets back its content. So a kernel on another stream reads poison, or what it
// writes is lost.
inline const Cuda& late(const Cuda& dev, unsigned ns = 500'000) {
    for (LateMemory* m : LateMemory::all()) {
        if (!m->saved)
            m->saved = dev.alloc(std::max<size_t>(1, m->bytes));
        dev.copy(m->saved, m->p, m->bytes);
        m->poison();
    }

    dev.sync();  // so that even a kernel that starts at once on another stream reads the poison
    dev.pause(ns);
    for (const LateMemory* m : LateMemory::all())
        dev.copy(m->p, m->saved, m->bytes);
    return dev;  // NOLINT(bugprone-return-const-ref-from-parameter): it outlives the call
}
