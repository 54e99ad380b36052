// See peer_copy.h. A rank that dies leaves the others' streams waiting for its flag. The job then ends by _exit, as
// with NCCL.
#include <unistd.h>

#include <cstring>

#include "layers/comm/peer_copy.h"

// Gets a function of the driver from the runtime, so that libcuda stays out of the link.
template <class Function>
static Function driver_function(const char* name) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
#else
    CUDA_CHECK(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found));
#endif
    if (found != cudaDriverEntryPointSuccess || !function)
        throw Error(format("the driver has no %s; it must be of CUDA 12.0 or later", name));
    return reinterpret_cast<Function>(function);
}
static void driver_check(CUresult status, const char* what) {
    if (status != CUDA_SUCCESS) throw Error(format("%s failed with error %d", what, int(status)));
}

enum { kFree, kThere };

std::unique_ptr<PeerCopies> PeerCopies::open(const Cuda& dev, Job& job, int first, int size, void* memory,
                                             size_t bytes) {
    std::unique_ptr<PeerCopies> copies(new PeerCopies(dev));
    copies->rank_ = job.rank - first, copies->size_ = size;
    copies->own_ = static_cast<char*>(memory), copies->bytes_ = bytes;
    copies->flags_ = static_cast<uint32_t*>(dev.alloc(2 * size * sizeof(uint32_t)));
    dev.zero(copies->flags_, 2 * size * sizeof(uint32_t));
    dev.sync();

    struct Offer {
        char machine[64];
        cudaIpcMemHandle_t memory, flags;
        bool good;
    } mine = {};
    gethostname(mine.machine, sizeof mine.machine - 1);
    mine.good = cudaIpcGetMemHandle(&mine.memory, memory) == cudaSuccess &&
                cudaIpcGetMemHandle(&mine.flags, copies->flags_) == cudaSuccess;
    const std::vector<Offer> offers = job.all_gather(mine);

    const auto open_one = [](auto*& p, const cudaIpcMemHandle_t& handle) {
        void* opened = nullptr;
        if (cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess) return false;
        p = static_cast<std::decay_t<decltype(p)>>(opened);
        return true;
    };
    bool good = mine.good;
    copies->regions_.resize(size), copies->flags_of_.resize(size);
    for (int r = 0; r < size && good; r++) {
        const Offer& offer = offers[first + r];
        if (r == copies->rank_)
            copies->regions_[r] = copies->own_, copies->flags_of_[r] = copies->flags_;
        else
            good = offer.good && std::strcmp(offer.machine, mine.machine) == 0 &&
                   open_one(copies->regions_[r], offer.memory) && open_one(copies->flags_of_[r], offer.flags);
    }
    cudaGetLastError();  // a refusal is an answer here
    int flush = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&flush, cudaDevAttrCanFlushRemoteWrites, dev.device));
    copies->wait_ = CU_STREAM_WAIT_VALUE_EQ | (flush ? CU_STREAM_WAIT_VALUE_FLUSH : 0);
    for (int of_rank : job.all_gather(int(good))) good = good && of_rank;
    if (good) return copies;
    copies->close(job);
    return nullptr;
}

// CUDA leaves undefined what becomes of memory that is freed while another process has it mapped, so a barrier comes
// first.
void PeerCopies::close(Job& job) {
    for (int r = 0; r < size_; r++) {
        if (r == rank_) continue;
        if (regions_[r]) CUDA_CHECK(cudaIpcCloseMemHandle(regions_[r]));
        if (flags_of_[r]) CUDA_CHECK(cudaIpcCloseMemHandle(flags_of_[r]));
    }
    job.barrier();
    dev_.free(flags_);
}

void PeerCopies::say(cudaStream_t stream, int rank, int which) const {
    static const auto write = driver_function<decltype(&cuStreamWriteValue32)>("cuStreamWriteValue32");
    const auto flag = reinterpret_cast<CUdeviceptr>(flags_of_[rank] + which * size_ + rank_);
    driver_check(write(stream, flag, 1, CU_STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue32 of another GPU's flag");
}

void PeerCopies::wait(cudaStream_t stream, int rank, int which) const {
    static const auto write = driver_function<decltype(&cuStreamWriteValue32)>("cuStreamWriteValue32");
    static const auto wait_for = driver_function<decltype(&cuStreamWaitValue32)>("cuStreamWaitValue32");
    const auto flag = reinterpret_cast<CUdeviceptr>(flags_ + which * size_ + rank);
    driver_check(wait_for(stream, flag, 1, wait_), "cuStreamWaitValue32");
    driver_check(write(stream, flag, 0, CU_STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue32");
}

void PeerCopies::send_recv(cudaStream_t stream, int to, const void* send, size_t stride, size_t bytes, size_t rows,
                           const void* there, int from) const {
    say(stream, from, kFree);
    wait(stream, to, kFree);
    char* const target = regions_[to] + (static_cast<const char*>(there) - own_);
    if (rows == 1)
        CUDA_CHECK(cudaMemcpyAsync(target, send, bytes, cudaMemcpyDeviceToDevice, stream));
    else
        CUDA_CHECK(cudaMemcpy2DAsync(target, bytes, send, stride, bytes, rows, cudaMemcpyDeviceToDevice, stream));
    say(stream, to, kThere);
    wait(stream, from, kThere);
}
