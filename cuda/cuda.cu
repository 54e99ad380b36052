// The CUDA backend's device (see cuda.h).
#include <cuda_profiler_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <future>
#include <vector>

#include "common/threads.h"
#include "cuda/cublas.h"
#include "cuda/cuda.h"

void cuda_check(cudaError_t status, const char* file, int line, const char* what,
                const char* before) {
    if (status == cudaSuccess)
        return;
    cudaGetLastError();  // clears the error, or the next check would report it again
    throw Error(format("%s:%d: CUDA: %s (%s) in %s%s", file, line, cudaGetErrorString(status),
                       cudaGetErrorName(status), before, what));
}

void cublas_check(cublasStatus_t status, const char* file, int line, const char* what) {
    if (status == CUBLAS_STATUS_SUCCESS)
        return;
    throw Error(format("%s:%d: cuBLAS: %s in %s", file, line, cublasGetStatusName(status), what));
}

namespace {

// Only the code that runs knows what it was compiled for: on a GPU of compute capability 9.0 that
// may be sm_90a, or PTX for an older architecture.
__global__ void probe_kernel(bool* sm90a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    *sm90a = true;
#else
    *sm90a = false;
#endif
}

__global__ void pause_kernel(unsigned ns) {
    unsigned long long start;
    unsigned long long now;

    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - start < ns);
}

}  // namespace

void Cuda::pause(unsigned ns) const {
    pause_kernel<<<1, 1, 0, stream>>>(ns);
    LAUNCH_CHECK("pause_kernel");
}

int Cuda::count(std::string* why) {
    // The first call into the driver starts its threads, which inherit our signal mask. So all
    // signals are blocked during the call. Otherwise a signal that our own threads block, because
    // one of them waits for it, could be delivered to a driver's thread and end the process.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int n = 0;
    const cudaError_t status = cudaGetDeviceCount(&n);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);

    if (status != cudaSuccess) {
        cudaGetLastError();
        n = 0;
    }

    int driver = 0;  // its version, which stays 0 if there is no driver
    cudaDriverGetVersion(&driver);
    if (why) {
        *why = "";
        if (driver == 0)
            *why = "no NVIDIA driver was found";
        else if (n == 0)
            *why = cudaGetErrorString(status);
    }
    return n;
}

Cuda::Cuda(int device) : device(device) {
    std::string why;
    const int n = count(&why);
    if (n == 0)
        throw Error("no usable GPU (" + why + ")");
    if (device < 0 || device >= n)
        throw Error(format("there is no GPU %d: this machine has %d, numbered from 0", device, n));

    CUDA_CHECK(cudaSetDevice(device));

    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    sm = 10 * properties.major + properties.minor;
    num_sms = properties.multiProcessorCount;
    block_smem = static_cast<int>(properties.sharedMemPerBlockOptin);
    name = properties.name;
    total_bytes = properties.totalGlobalMem;

    cudaFuncAttributes attributes;  // can be read only if this binary has code for the device
    if (cudaFuncGetAttributes(&attributes, probe_kernel) != cudaSuccess) {
        cudaGetLastError();
        throw Error(format(
            "GPU %d (%s) has compute capability %d.%d, which this program was not built for; run "
            "make ARCH=%d%s",
            device, name.c_str(), properties.major, properties.minor, sm, sm == 90 ? "a" : ""));
    }

    // A blocking stream: work that someone puts on the default stream is still ordered with ours.
    CUDA_CHECK(cudaStreamCreate(&stream));
    CUDA_CHECK(cudaStreamCreateWithFlags(&download_stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&marked, cudaEventDisableTiming));

    workspace = alloc(kWorkspaceBytes);
    probe_kernel<<<1, 1, 0, stream>>>(static_cast<bool*>(workspace));
    LAUNCH_CHECK("probe_kernel");
    download(&sm90a, workspace, sizeof sm90a);

    // cuBLAS promises bitwise reproducible results as long as it works in a single stream. Giving
    // it a workspace keeps it from allocating while a CUDA graph is captured. The workspace is set
    // after the stream, because setting the stream resets it.
    CUBLAS_CHECK(cublasCreate(&blas));
    CUBLAS_CHECK(cublasSetStream(blas, stream));
    CUBLAS_CHECK(cublasSetWorkspace(blas, workspace, kWorkspaceBytes));
    CUBLAS_CHECK(cublasLtCreate(&blaslt));
}

// A destructor cannot throw, and after a failed kernel every call here fails again, so the statuses
// are ignored.
Cuda::~Cuda() {
    cudaStreamSynchronize(stream);
    cublasLtDestroy(blaslt);
    cublasDestroy(blas);
    cudaFree(workspace);
    cudaEventDestroy(marked);
    cudaStreamDestroy(download_stream);
    cudaStreamDestroy(stream);
}

void Cuda::download_marked(void* host, const void* src, size_t bytes) const {
    CUDA_CHECK(cudaStreamWaitEvent(download_stream, marked, 0));
    CUDA_CHECK(cudaMemcpyAsync(host, src, bytes, cudaMemcpyDeviceToHost, download_stream));
    CUDA_CHECK(cudaStreamSynchronize(download_stream));
}

void* Cuda::alloc(size_t bytes) const {
    void* p = nullptr;
    const cudaError_t status = cudaMalloc(&p, bytes);

    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        constexpr double GiB = 1 << 30;
        throw OutOfMemory(format(
            "out of memory on GPU %d (%s): asked for %.2f GiB, but only %.2f of %.2f GiB are free",
            device, name.c_str(), bytes / GiB, free_bytes() / GiB, total_bytes / GiB));
    }
    CUDA_CHECK(status);
    return p;
}

// cudaMallocHost takes a third of a second per GB, and no other CUDA call gets through meanwhile.
// Memory in large pages that several threads have already touched is pinned five times as fast.
static constexpr size_t kLargePage = 2 << 20;

// Lets the system map `pages` large pages at p, by a write to each page, from several threads.
static void touch_pages(char* p, size_t pages) {
    constexpr size_t kSmallPage = 4 << 10;
    constexpr size_t kThreads = 4;

    madvise(p, pages * kLargePage, MADV_HUGEPAGE);  // a hint: small pages work, too
    std::vector<std::future<void>> parts;
    for (size_t i = 0; i < kThreads; i++) {
        const size_t begin = (pages * i / kThreads) * kLargePage;
        const size_t end = (pages * (i + 1) / kThreads) * kLargePage;
        parts.push_back(start_async([=] {
            for (size_t offset = begin; offset < end; offset += kSmallPage)
                p[offset] = 0;
        }));
    }

    for (std::future<void>& part : parts)
        part.get();
}

void* Cuda::alloc_host(size_t bytes) const {
    const size_t pages = (bytes + kLargePage - 1) / kLargePage;
    const size_t size = pages * kLargePage;
    char* const p = static_cast<char*>(std::aligned_alloc(kLargePage, size));

    cudaError_t status = cudaErrorMemoryAllocation;  // if aligned_alloc() has failed
    if (p) {
        touch_pages(p, pages);
        status = cudaHostRegister(p, size, cudaHostRegisterDefault);
    }
    if (status != cudaSuccess)
        std::free(p);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        throw OutOfMemory(format(
            "out of pinned host memory: asked for %.1f MiB; free some, or leave out -o, because "
            "checkpoints need most of it",
            bytes / double(1 << 20)));
    }
    CUDA_CHECK(status);
    return p;
}

void Cuda::free_host(void* p) const {
    if (!p)
        return;
    cudaStreamSynchronize(stream);  // while an Error unwinds, a copy may still be under way
    cudaHostUnregister(p);
    std::free(p);
}

void Cuda::profile(bool on) const {
    sync();
    CUDA_CHECK(on ? cudaProfilerStart() : cudaProfilerStop());
}

size_t Cuda::free_bytes() const {
    size_t free = 0;
    size_t total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return free - std::min(free, reserved);
}

void CudaGraph::begin_capture(const Cuda& dev) {
    CUDA_CHECK(cudaStreamBeginCapture(dev.stream, cudaStreamCaptureModeThreadLocal));
}

void CudaGraph::end_capture(const Cuda& dev) {
    cudaGraph_t graph = nullptr;
    CUDA_CHECK(cudaStreamEndCapture(dev.stream, &graph));
    CUDA_CHECK(cudaGraphInstantiateWithFlags(&recorded_, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
}

// Called while an Error unwinds, so failures are ignored.
void CudaGraph::abandon_capture(const Cuda& dev) {
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(dev.stream, &graph);
    if (graph)
        cudaGraphDestroy(graph);
    cudaGetLastError();
}
