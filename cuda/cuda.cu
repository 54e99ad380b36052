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
    cudaGetLastError();  // so that the next check does not report this error once more
    throw Error(format("%s:%d: CUDA: %s (%s) in %s%s", file, line, cudaGetErrorString(status),
                       cudaGetErrorName(status), before, what));
}

void cublas_check(cublasStatus_t status, const char* file, int line, const char* what) {
    if (status == CUBLAS_STATUS_SUCCESS)
        return;
    throw Error(format("%s:%d: cuBLAS: %s in %s", file, line, cublasGetStatusName(status), what));
}

namespace {

// Only the code that runs knows what it was compiled for. On a 9.0 that may be sm_90a, or PTX of an
// older architecture.
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
    int n = 0;
    // The driver's threads inherit the mask. If one of them took a signal, it would end a process
    // that waits for it.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    const cudaError_t status = cudaGetDeviceCount(&n);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (status != cudaSuccess) {
        cudaGetLastError();
        n = 0;
    }
    int driver = 0;  // its version, which stays 0 where there is none
    cudaDriverGetVersion(&driver);
    if (why)
        *why = !driver ? "no NVIDIA driver was found" : n == 0 ? cudaGetErrorString(status) : "";
    return n;
}

Cuda::Cuda(int device) : device(device) {
    std::string why;
    const int n = count(&why);
    if (n == 0)
        throw Error("no usable GPU (" + why + ")");
    if (device < 0 || device >= n)
        throw Error(format("no GPU %d: this machine has %d, numbered from 0", device, n));

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
            "GPU %d (%s) has compute capability %d.%d, which this program was not built for: "
            "rebuild with "
            "make clean, then make ARCH=%d%s",
            device, name.c_str(), properties.major, properties.minor, sm, sm == 90 ? "a" : ""));
    }

    // In a blocking stream, work that someone puts on the default stream is still ordered with
    // ours.
    CUDA_CHECK(cudaStreamCreate(&stream));
    CUDA_CHECK(cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&marked, cudaEventDisableTiming));
    workspace = alloc(kWorkspaceBytes);
    probe_kernel<<<1, 1, 0, stream>>>(static_cast<bool*>(workspace));
    LAUNCH_CHECK("probe_kernel");
    download(&sm90a, workspace, sizeof sm90a);
    CUBLAS_CHECK(cublasCreate(&blas));
    CUBLAS_CHECK(cublasSetStream(blas, stream));
    // cuBLAS promises bitwise reproducible results for one stream. A workspace of ours keeps it
    // from allocating while a CUDA graph is captured. It is set after the stream, because setting
    // the stream resets it.
    CUBLAS_CHECK(cublasSetWorkspace(blas, workspace, kWorkspaceBytes));
    CUBLAS_CHECK(cublasLtCreate(&blaslt));
}

// A destructor cannot throw, and after a failed kernel every call here fails once more, so statuses
// are dropped.
Cuda::~Cuda() {
    cudaStreamSynchronize(stream);
    cublasLtDestroy(blaslt);
    cublasDestroy(blas);
    cudaFree(workspace);
    cudaEventDestroy(marked);
    cudaStreamDestroy(aside);
    cudaStreamDestroy(stream);
}

void Cuda::download_marked(void* host, const void* src, size_t bytes) const {
    CUDA_CHECK(cudaStreamWaitEvent(aside, marked, 0));
    CUDA_CHECK(cudaMemcpyAsync(host, src, bytes, cudaMemcpyDeviceToHost, aside));
    CUDA_CHECK(cudaStreamSynchronize(aside));
}

void* Cuda::alloc(size_t bytes) const {
    void* p = nullptr;
    const cudaError_t status = cudaMalloc(&p, bytes);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        constexpr double GiB = 1 << 30;
        throw OutOfMemory(
            format("out of memory on GPU %d (%s): asked for %.2f GiB, free %.2f of %.2f GiB",
                   device, name.c_str(), bytes / GiB, free_bytes() / GiB, total_bytes / GiB));
    }
    CUDA_CHECK(status);
    return p;
}

// cudaMallocHost takes a third of a second for each GB, and lets no other call of CUDA through
// meanwhile. Memory in large pages, which several threads have touched, is pinned five times as
// fast.
void* Cuda::alloc_host(size_t bytes) const {
    constexpr size_t kSmallPage = 4 << 10;
    constexpr size_t kPage = 2 << 20;
    constexpr size_t kParts = 4;
    const size_t pages = (bytes + kPage - 1) / kPage;
    const size_t size = pages * kPage;
    char* const p = static_cast<char*>(std::aligned_alloc(kPage, size));
    cudaError_t status = cudaErrorMemoryAllocation;
    if (p) {
        madvise(p, size, MADV_HUGEPAGE);  // a wish; ordinary pages do too
        std::vector<std::future<void>> parts;
        for (size_t part = 0; part < kParts; part++) {
            const size_t begin = (pages * part / kParts) * kPage;
            const size_t end = (pages * (part + 1) / kParts) * kPage;
            parts.push_back(start_async([=] {
                for (size_t at = begin; at < end; at += kSmallPage) {
                    p[at] = 0;
                }
            }));
        }
        for (std::future<void>& part : parts) {
            part.get();
        }
        status = cudaHostRegister(p, size, cudaHostRegisterDefault);
    }
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        std::free(p);
        throw OutOfMemory(format(
            "out of pinned host memory: asked for %.1f MiB; free some, or leave out -o, because "
            "checkpoints need most of it",
            bytes / double(1 << 20)));
    }
    if (status != cudaSuccess)
        std::free(p);
    CUDA_CHECK(status);
    return p;
}

void Cuda::free_host(void* p) const {
    if (!p)
        return;
    cudaStreamSynchronize(stream);  // a copy may be on its way while an Error unwinds
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

void CudaGraph::end(const Cuda& dev, bool keep) {
    cudaGraph_t graph = nullptr;
    const cudaError_t status = cudaStreamEndCapture(dev.stream, &graph);
    if (!keep) {  // an Error is on its way
        if (graph)
            cudaGraphDestroy(graph);
        cudaGetLastError();
        return;
    }
    CUDA_CHECK(status);
    CUDA_CHECK(cudaGraphInstantiateWithFlags(&recorded_, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
}
