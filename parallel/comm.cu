// Collectives over NCCL. If the Makefile finds no nccl.h, every call of it is an Error that says
// so.
//
// NCCL's kernels run on a stream of high priority, so that their few blocks get multiprocessors
// while backward's many still queue. Two events order it after the compute stream, and the compute
// stream after it. Both become edges when the step is captured as a CUDA graph. Such a graph must
// be destroyed first, because ncclCommDestroy waits for it.
#include <algorithm>
#include <exception>

#include "parallel/comm.h"

#ifdef HAVE_NCCL
#include <nccl.h>
static std::string nccl_error(ncclResult_t status, ncclComm* comm) {
    const char* more = ncclGetLastError(comm);
    return format("NCCL: %s: %s", ncclGetErrorString(status), more ? more : "");
}
static void nccl_check(ncclResult_t status, const char* file, int line, const char* what) {
    if (status == ncclSuccess)
        return;
    const std::string error = nccl_error(status, nullptr);
    throw Error(
        format("%s:%d: %s in %s (NCCL_DEBUG=INFO says more)", file, line, error.c_str(), what));
}
#define NCCL_CHECK(call) nccl_check((call), __FILE__, __LINE__, #call)
#else
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define NCCL_CHECK(call)                                                                 \
    throw Error(                                                                         \
        "built without NCCL, which several GPUs need: install libnccl-dev or give make " \
        "NCCL_HOME=…")
using ncclUniqueId = char[128];
#endif
static constexpr size_t kStageBytes = 64 << 10;

std::string NcclComm::version() {
    int version = 0;
    NCCL_CHECK(ncclGetVersion(&version));
    return std::to_string(version);
}
std::string NcclComm::new_id() {
    ncclUniqueId id = {};
    NCCL_CHECK(ncclGetUniqueId(&id));
    return std::string(reinterpret_cast<char*>(&id), sizeof id);
}

NcclComm::NcclComm(const Cuda& dev, int rank, int size, const std::string& id)
    : rank(rank), size(size), dev_(dev) {
    ncclUniqueId nccl_id = {};
    id.copy(reinterpret_cast<char*>(&nccl_id), sizeof nccl_id);
    NCCL_CHECK(ncclCommInitRank(&comm_, size, nccl_id, rank));
    begin();
}

NcclComm::NcclComm(NcclComm& all, int first, int count)
    : rank(all.rank - first), size(count), dev_(all.dev_) {
    NCCL_CHECK(ncclCommSplit(all.comm_, first, rank, &comm_, nullptr));
    begin();
}

void NcclComm::begin() {
    int least = 0;
    int greatest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming));
    stage_ = static_cast<char*>(dev_.alloc(kStageBytes));
}

std::string NcclComm::error() const {
#ifdef HAVE_NCCL
    ncclResult_t error = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &error);
    if (asked != ncclSuccess)
        error = asked;
    if (error != ncclSuccess && error != ncclInProgress)
        return nccl_error(error, comm_);
#endif
    return "";
}

// Statuses are dropped, because a destructor cannot throw.
NcclComm::~NcclComm() {
#ifdef HAVE_NCCL
    if (std::uncaught_exceptions() > 0) {
        ncclCommAbort(comm_);
        return;  // what follows might wait for the kernels of another communicator, which never end
    }
    ncclCommDestroy(comm_);
#endif
    dev_.free(stage_);
    cudaEventDestroy(ready_);
    cudaEventDestroy(done_);
    cudaStreamDestroy(stream_);
}

void NcclComm::fork() {
    CUDA_CHECK(cudaEventRecord(ready_, dev_.stream));
    CUDA_CHECK(cudaStreamWaitEvent(stream_, ready_, 0));
}
void NcclComm::join() {
    CUDA_CHECK(cudaEventRecord(done_, stream_));
    CUDA_CHECK(cudaStreamWaitEvent(dev_.stream, done_, 0));
}

// A kernel that fills the GPU, as attention's does, keeps NCCL's blocks waiting if it comes first,
// and they are an event later. No running block gives way. So the compute stream pauses, for about
// as long as a launch takes.
void NcclComm::head_start() {
    dev_.pause(5000);
}

void NcclComm::group(const std::function<void()>& calls) {
    NCCL_CHECK(ncclGroupStart());
    calls();
    NCCL_CHECK(ncclGroupEnd());
}
void NcclComm::all_reduce(float* x, size_t n) {
    NCCL_CHECK(ncclAllReduce(x, x, n, ncclFloat, ncclSum, comm_, stream_));
}
void NcclComm::reduce_scatter(float* out, const float* x, size_t n) {
    NCCL_CHECK(ncclReduceScatter(x, out, n, ncclFloat, ncclSum, comm_, stream_));
}
void NcclComm::all_gather_bytes(void* x, size_t bytes) {
    NCCL_CHECK(
        ncclAllGather(static_cast<char*>(x) + rank * bytes, x, bytes, ncclChar, comm_, stream_));
}
void NcclComm::broadcast(void* x, size_t bytes) {
    NCCL_CHECK(ncclBroadcast(x, x, bytes, ncclChar, 0, comm_, stream_));
}
void NcclComm::send(int to, const void* x, size_t bytes) {
    NCCL_CHECK(ncclSend(x, bytes, ncclChar, to, comm_, stream_));
}
void NcclComm::recv(int from, void* x, size_t bytes) {
    NCCL_CHECK(ncclRecv(x, bytes, ncclChar, from, comm_, stream_));
}

// Only this stream uses the stage, so the compute stream need not wait. What was called before it
// is done first.
void NcclComm::host_all_gather(void* all, size_t bytes) {
    char* const host = static_cast<char*>(all);
    const size_t most = kStageBytes / size;
    for (size_t at = 0; at < bytes; at += most) {
        const size_t n = std::min(most, bytes - at);
        CUDA_CHECK(cudaMemcpyAsync(stage_ + rank * n, host + rank * bytes + at, n,
                                   cudaMemcpyHostToDevice, stream_));
        all_gather_bytes(stage_, n);
        CUDA_CHECK(cudaMemcpy2DAsync(host + at, bytes, stage_, n, n, size, cudaMemcpyDeviceToHost,
                                     stream_));
    }
    CUDA_CHECK(cudaStreamSynchronize(stream_));
}
