// The CUDA backend's device: one GPU, the stream that everything is launched to, the cuBLAS
// handles, and calls that allocate and copy memory. Every CUDA call is checked.
#pragma once
#include <cuda_runtime.h>

#include <string>

#include "common/error.h"
#include "common/types.h"

// Throws Error with the file, the line and the call itself.
void cuda_check(cudaError_t status, const char* file, int line, const char* what,
                const char* before = "");
#define CUDA_CHECK(call) cuda_check((call), __FILE__, __LINE__, #call)
// Follows every launch. It reports a bad launch configuration at once; a fault inside the kernel is
// asynchronous, and the next checked call reports it.
#define LAUNCH_CHECK(kernel) \
    cuda_check(cudaGetLastError(), __FILE__, __LINE__, kernel, "launch of ")

struct OutOfMemory : Error {
    using Error::Error;
};

struct cublasContext;  // a cublasHandle_t points to one; cuda/cublas.h includes the headers
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

    // How many devices are usable; 0 if there is no driver either. Writes the reason for 0 to
    // `why`, unless that is null.
    static int count(std::string* why = nullptr);

    // Memory on the device, and pinned memory on the host. Both throw OutOfMemory.
    void* alloc(size_t bytes) const;
    void* alloc_host(size_t bytes) const;
    // These must not throw, because destructors call them while an Error unwinds. A failure shows
    // up at the next checked launch.
    void free(void* p) const { cudaFree(p); }
    void free_host(void* p) const;

    void zero(void* p, size_t bytes) const { CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, stream)); }
    // From host to device, asynchronously if the host's memory is pinned.
    void upload(void* dst, const void* host, size_t bytes) const {
        CUDA_CHECK(cudaMemcpyAsync(dst, host, bytes, cudaMemcpyHostToDevice, stream));
    }
    // From device to host. Returns when the bytes have arrived.
    void download(void* host, const void* src, size_t bytes) const {
        CUDA_CHECK(cudaMemcpyAsync(host, src, bytes, cudaMemcpyDeviceToHost, stream));
        sync();
    }
    // From device to device.
    void copy(void* dst, const void* src, size_t bytes) const {
        CUDA_CHECK(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, stream));
    }
    // download_marked() is a download() that waits only for the work enqueued before mark(). Later
    // work runs meanwhile.
    void mark() const { CUDA_CHECK(cudaEventRecord(marked, stream)); }
    void download_marked(void* host, const void* src, size_t bytes) const;

    // A new thread calls this before any other call.
    void use() const { CUDA_CHECK(cudaSetDevice(device)); }
    void sync() const { CUDA_CHECK(cudaStreamSynchronize(stream)); }
    void pause(unsigned ns) const;  // keeps the stream busy for that long
    // Starts or ends the range of Nsight's --capture-range=cudaProfilerApi.
    void profile(bool on) const;
    size_t free_bytes() const;  // how much alloc() could still return

    static constexpr const char* kind = "cuda";
    std::string name;  // "NVIDIA H200"
    int device = 0;
    int sm = 0;  // 10 times the compute capability: 90 for an H200
    // Was the program compiled for sm_90a? If not, kernels that use wgmma are empty.
    bool sm90a = false;
    int num_sms = 0;     // multiprocessors
    int block_smem = 0;  // bytes of shared memory that a block may have; tests may lower it
    size_t total_bytes = 0;
    size_t reserved = 0;  // bytes that free_bytes() leaves out; tests may raise it

    bool tf32 = true;    // fp32 matmuls may use tensor cores, in TF32
    bool graphs = true;  // if false, CudaGraph::run just runs the work

    cudaStream_t stream = nullptr;
    cudaStream_t download_stream = nullptr;  // of download_marked()
    cudaEvent_t marked = nullptr;            // recorded by mark()
    cublasContext* blas = nullptr;
    cublasLtContext* blaslt = nullptr;
    static constexpr size_t kWorkspaceBytes = 64 << 20;
    void* workspace = nullptr;  // for cuBLAS and cuBLASLt
};

// Returns a warning if we have kernels for a GPU of this compute capability (times 10) and the
// program was built without them, or "".
inline const char* missing_kernels(int sm, bool sm90a) {
    if (sm != 90 || sm90a)
        return "";
    return "warning: the kernels for this GPU are missing, because the program was built on a "
           "machine without one; run make ARCH=90a\n";
}

// Work that is enqueued again and again in the same form. The first run is an ordinary one, because
// it may still make matmul plans. The second run is recorded as a CUDA graph, and from then on that
// graph is replayed, so that the GPU does not wait for the host between kernels. Recorded kernels
// keep their arguments, so everything that changes from run to run must be read from memory at
// fixed addresses.
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
        if (!dev.graphs)
            return work();

        runs_++;
        if (runs_ == 1)
            return work();

        if (!recorded_) {
            begin_capture(dev);
            try {
                work();
            } catch (...) {
                abandon_capture(dev);
                throw;
            }
            end_capture(dev);
        }
        CUDA_CHECK(cudaGraphLaunch(recorded_, dev.stream));
    }

  private:
    void begin_capture(const Cuda& dev);
    void end_capture(const Cuda& dev);
    void abandon_capture(const Cuda& dev);

    int runs_ = 0;
    cudaGraphExec_t recorded_ = nullptr;
};
