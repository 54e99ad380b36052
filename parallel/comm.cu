// Communication over NCCL. If the Makefile finds no nccl.h, every call throws an Error that says
// so.
//
// NCCL's kernels run on a high-priority stream, so that their few blocks get SMs while the many
// blocks of backward are still queued. One event makes this stream wait for the compute stream, and
// another makes the compute stream wait for this one. When the step is captured as a CUDA graph,
// both become edges of the graph. Destroy such a graph before its communicator: ncclCommDestroy
// waits for it.
#include "parallel/comm.h"

#include <algorithm>
#include <exception>

#ifdef HAVE_NCCL
#include <nccl.h>

static std::string nccl_error(ncclResult_t status, ncclComm* comm) {
    const char* details = ncclGetLastError(comm);
    return format("NCCL: %s: %s", ncclGetErrorString(status), details ? details : "");
}

static void nccl_check(ncclResult_t status, const char* file, int line, const char* what) {
    if (status == ncclSuccess)
        return;
    const std::string error = nccl_error(status, nullptr);
    throw Error(
        format("%s:%d: %s in %s; NCCL_DEBUG=INFO prints more", file, line, error.c_str(), what));
}
#define NCCL_CHECK(call) nccl_check((call), __FILE__, __LINE__, #call)

#else
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define NCCL_CHECK(call)                                                                         \
    throw Error(                                                                                 \
        "this program was built without NCCL, which several GPUs need; install libnccl-dev and " \
        "build it again, or build it with make NCCL_HOME=DIR")
using ncclUniqueId = char[128];
#endif

static constexpr size_t kStagingBytes = 64 << 10;

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
    create_stream();
}

NcclComm::NcclComm(NcclComm& all, int first, int count)
    : rank(all.rank - first), size(count), dev_(all.dev_) {
    // Ranks that give the same color get a communicator, in which the key orders them.
    NCCL_CHECK(ncclCommSplit(all.comm_, /*color=*/first, /*key=*/rank, &comm_, nullptr));
    create_stream();
}

void NcclComm::create_stream() {
    int lowest = 0;
    int highest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest));
    CUDA_CHECK(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming));
    staging_ = static_cast<char*>(dev_.alloc(kStagingBytes));
}

std::string NcclComm::error() const {
#ifdef HAVE_NCCL
    ncclResult_t error = ncclSuccess;
    const ncclResult_t status = ncclCommGetAsyncError(comm_, &error);
    if (status != ncclSuccess)
        error = status;
    if (error != ncclSuccess && error != ncclInProgress)
        return nccl_error(error, comm_);
#endif
    return "";
}

// Ignores every status, because a destructor cannot throw.
NcclComm::~NcclComm() {
#ifdef HAVE_NCCL
    if (std::uncaught_exceptions() > 0) {
        ncclCommAbort(comm_);
        return;  // what follows could wait for kernels of another communicator, which never end
    }
    ncclCommDestroy(comm_);
#endif
    dev_.free(staging_);
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

// A kernel that fills the GPU, such as attention, must not start before NCCL's blocks do, because a
// running block is never preempted. But NCCL's kernels start later than the compute stream's next
// one, since they first wait for fork()'s event. So this holds up the compute stream for about as
// long as a launch takes.
void NcclComm::head_start() {
    constexpr unsigned kNanoseconds = 5000;
    dev_.pause(kNanoseconds);
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

// Only this stream uses the staging memory, so there is no need to wait for the compute stream.
// Communication that was queued before is complete when this returns, too.
void NcclComm::host_all_gather(void* all, size_t bytes) {
    char* const host = static_cast<char*>(all);
    const size_t piece = kStagingBytes / size;  // of each rank's part
    for (size_t at = 0; at < bytes; at += piece) {
        const size_t n = std::min(piece, bytes - at);
        CUDA_CHECK(cudaMemcpyAsync(staging_ + rank * n, host + rank * bytes + at, n,
                                   cudaMemcpyHostToDevice, stream_));
        all_gather_bytes(staging_, n);

        // A row is what one rank has sent: n bytes, n apart in staging_, `bytes` apart in `all`.
        CUDA_CHECK(cudaMemcpy2DAsync(host + at, bytes, staging_, n, /*width=*/n, /*height=*/size,
                                     cudaMemcpyDeviceToHost, stream_));
    }
    CUDA_CHECK(cudaStreamSynchronize(stream_));
}
