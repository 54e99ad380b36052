// The CUDA backend's device. It has one GPU, one stream, the cuBLAS handles and its memory, and
// checks its calls.
#pragma once
#include <cuda_runtime.h>

#include <string>

#include "common/error.h"
#include "common/types.h"

// Throws Error with file, line and the call itself.
void cuda_check(cudaError_t status, const char* file, int line, const char* what,
                const char* before = "");
#define CUDA_CHECK(call) cuda_check((call), __FILE__, __LINE__, #call)
// Goes after every launch and catches a bad configuration at once. An asynchronous fault shows at
// the next checked call.
#define LAUNCH_CHECK(kernel) \
    cuda_check(cudaGetLastError(), __FILE__, __LINE__, kernel, "launch of ")

struct OutOfMemory : Error {
    using Error::Error;
};

struct cublasContext;  // what a cublasHandle_t points to. cublas.h has the rest
struct cublasLtContext;
class CudaGraph;
class NcclComm;  // parallel/comm.h

struct Cuda {
    using Graph = CudaGraph;
    using Comm = NcclComm;
    explicit Cuda(int device = 0);  // throws Error if there is no such device
    ~Cuda();
    Cuda(const Cuda&) = delete;
    Cuda& operator=(const Cuda&) = delete;

    // How many devices are usable, 0 also when there is no driver. `why` (may be null) gets the
    // reason in words.
    static int count(std::string* why = nullptr);

    void* alloc(size_t bytes) const;       // device memory, throws OutOfMemory
    void* alloc_host(size_t bytes) const;  // pinned
    // Destructors free while an Error unwinds, so these must not throw. A failure shows at the next
    // checked launch.
    void free(void* p) const { cudaFree(p); }
    void free_host(void* p) const;
    void zero(void* p, size_t bytes) const { CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, stream)); }
    // asynchronous if host is pinned
    void upload(void* dst, const void* host, size_t bytes) const {
        CUDA_CHECK(cudaMemcpyAsync(dst, host, bytes, cudaMemcpyHostToDevice, stream));
    }
    // returns when the bytes are there
    void download(void* host, const void* src, size_t bytes) const {
        CUDA_CHECK(cudaMemcpyAsync(host, src, bytes, cudaMemcpyDeviceToHost, stream));
        sync();
    }
    // from device memory to device memory
    void copy(void* dst, const void* src, size_t bytes) const {
        CUDA_CHECK(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, stream));
    }
    // As download(), but it waits for no more than what was called before mark(). Later work goes
    // on meanwhile.
    void mark() const { CUDA_CHECK(cudaEventRecord(marked, stream)); }
    void download_marked(void* host, const void* src, size_t bytes) const;
    // by a thread that another one has started
    void use() const { CUDA_CHECK(cudaSetDevice(device)); }
    void sync() const { CUDA_CHECK(cudaStreamSynchronize(stream)); }
    void pause(unsigned ns) const;  // holds the stream up for that long
    void profile(bool on) const;    // marks what Nsight's --capture-range=cudaProfilerApi keeps
    size_t free_bytes() const;      // device memory that an alloc could still get

    static constexpr const char* kind = "cuda";
    int device = 0;
    int sm = 0;  // compute capability ×10, 90 for an H200
    // its code was compiled for sm_90a. Otherwise kernels that need wgmma are empty
    bool sm90a = false;
    int num_sms = 0;      // multiprocessors
    int block_smem = 0;   // bytes of shared memory that a block may have, which a test may lower
    size_t reserved = 0;  // bytes that free_bytes() leaves out, which a test may raise
    std::string name;     // "NVIDIA H200"
    size_t total_bytes = 0;
    bool tf32 = true;    // fp32 matmuls run on tensor cores, or if false in strict fp32
    bool graphs = true;  // if false CudaGraph::run only runs the work
    cudaStream_t stream = nullptr;
    cudaStream_t aside = nullptr;  // download_marked() reads here
    cudaEvent_t marked = nullptr;
    cublasContext* blas = nullptr;
    cublasLtContext* blaslt = nullptr;
    void* workspace = nullptr;  // cuBLAS's, kWorkspaceBytes
    static constexpr size_t kWorkspaceBytes = 64 << 20;
};

// A warning, if a GPU of compute capability sm/10 has kernels of its own and the program was built
// without them.
inline const char* missing_kernels(int sm, bool sm90a) {
    return sm == 90 && !sm90a ? "warning: the kernels for this GPU are missing, because the "
                                "program was built without "
                                "a GPU in sight: make clean, then make ARCH=90a\n"
                              : "";
}

// Work that is enqueued again and again in the same form. The first run is an ordinary one, because
// it may still make plans. The second is recorded as a CUDA graph. From then on the graph is
// replayed, so that the GPU does not wait for the host between kernels. The work may depend only on
// memory whose addresses stay.
class CudaGraph {
  public:
    CudaGraph() = default;
    ~CudaGraph() {
        if (recorded_)
            cudaGraphExecDestroy(recorded_);
    }
    CudaGraph(const CudaGraph&) = delete;

    template <class Work>
    void run(const Cuda& dev, Work work) {
        if (!dev.graphs || runs_++ == 0)
            return work();
        if (!recorded_) {
            CUDA_CHECK(cudaStreamBeginCapture(dev.stream, cudaStreamCaptureModeThreadLocal));
            try {
                work();
            } catch (...) {
                end(dev, false);
                throw;
            }
            end(dev, true);
        }
        CUDA_CHECK(cudaGraphLaunch(recorded_, dev.stream));
    }

  private:
    void end(const Cuda& dev, bool keep);
    int runs_ = 0;
    cudaGraphExec_t recorded_ = nullptr;
};
