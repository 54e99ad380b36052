// Collectives over NCCL. Without it (the Makefile finds no nccl.h) there is only a constructor that says so.
//
// NCCL's kernels run on a stream of high priority, so that their few blocks get multiprocessors while backward's many
// still queue. One event orders it after the compute stream, and another orders the compute stream after it. Both
// become edges when the step is captured as a CUDA graph. Such a graph must be destroyed before its communicator,
// because ncclCommDestroy waits for it.
//
// A collective whose other ranks are gone never ends. NCCL notices some failures by itself, so the job's watching
// thread asks for its asynchronous error every second. Whatever the reason, the process then leaves by _exit, which
// ends its kernels. ncclCommAbort is for the destructor that runs while an Error unwinds.
#include "layers/comm/comm.h"

#ifdef HAVE_NCCL
#include <nccl.h>

static void nccl_check(ncclResult_t status, const char* file, int line, const char* what) {
    if (status == ncclSuccess) return;
    const char* more = ncclGetLastError(nullptr);
    throw Error(format("%s:%d: NCCL: %s in %s: %s (NCCL_DEBUG=INFO says more)", file, line, ncclGetErrorString(status),
                       what, more ? more : ""));
}
#define NCCL_CHECK(call) nccl_check((call), __FILE__, __LINE__, #call)

NcclComm::NcclComm(const Cuda& dev, Job& job) : rank(job.rank), size(job.size), dev_(dev), job_(job) {
    ncclUniqueId id = {};  // random, so that no other job's ranks can know it
    if (rank == 0) NCCL_CHECK(ncclGetUniqueId(&id));
    job.broadcast(&id, sizeof id);
    NCCL_CHECK(ncclCommInitRank(&comm_, size, id, rank));
    begin();
}

NcclComm::NcclComm(NcclComm& all, int first, int count)
    : rank(all.rank - first), size(count), dev_(all.dev_), job_(all.job_) {
    NCCL_CHECK(ncclCommSplit(all.comm_, first, rank, &comm_, nullptr));
    begin();
}

void NcclComm::begin() {
    int least = 0, greatest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
    CUDA_CHECK(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming));
    job_.also_watch([this] { return asynchronous_error(); });
}

std::string NcclComm::asynchronous_error() const {
    ncclResult_t error = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &error);  // any thread may ask
    if (asked != ncclSuccess) error = asked;
    if (error == ncclSuccess || error == ncclInProgress) return "";
    const char* more = ncclGetLastError(comm_);
    return format("NCCL: %s: %s", ncclGetErrorString(error), more ? more : "");
}

// Statuses are dropped, because a destructor cannot throw.
NcclComm::~NcclComm() {
    job_.also_watch(nullptr);
    if (std::uncaught_exceptions() > 0)
        ncclCommAbort(comm_);
    else
        ncclCommDestroy(comm_);
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

// A kernel that fills the GPU and stays until its work is done, as attention's does, keeps NCCL's blocks waiting if it
// comes first. No running block gives way to one of higher priority. Both may begin when the same work before them
// ends, and NCCL's blocks are an event later. So the compute stream pauses, for about as long as a launch takes.
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

void NcclComm::all_gather_bytes(char* x, size_t bytes) {
    NCCL_CHECK(ncclAllGather(x + rank * bytes, x, bytes, ncclChar, comm_, stream_));
}

void NcclComm::send_recv_bytes(int to, const void* send, size_t bytes_out, int from, void* recv, size_t bytes_in) {
    group([&] {
        NCCL_CHECK(ncclSend(send, bytes_out, ncclChar, to, comm_, stream_));
        NCCL_CHECK(ncclRecv(recv, bytes_in, ncclChar, from, comm_, stream_));
    });
}

#else

NcclComm::NcclComm(const Cuda& dev, Job& job) : rank(job.rank), size(job.size), dev_(dev), job_(job) {
    throw Error(
        "several GPUs need NCCL, which this program was built without: install it (libnccl-dev), or say where it is "
        "with make NCCL_HOME=…, and build again");
}
NcclComm::NcclComm(NcclComm& all, int first, int count)
    : rank(all.rank - first), size(count), dev_(all.dev_), job_(all.job_) {}
NcclComm::~NcclComm() = default;
void NcclComm::fork() {}
void NcclComm::join() {}
void NcclComm::head_start() {}
void NcclComm::group(const std::function<void()>&) {}
void NcclComm::all_reduce(float*, size_t) {}
void NcclComm::reduce_scatter(float*, const float*, size_t) {}
void NcclComm::all_gather_bytes(char*, size_t) {}
void NcclComm::send_recv_bytes(int, const void*, size_t, int, void*, size_t) {}

#endif
