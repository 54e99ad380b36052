// One PTX instruction, one inline function. These are what sm_90a adds. The tensor memory
// accelerator (TMA) copies whole tiles, an mbarrier says when they have landed, and a warpgroup of
// four warps multiplies them straight out of shared memory. The manual's sections are named by
// their anchors in https://docs.nvidia.com/cuda/parallel-thread-execution/.
#pragma once
#include <cuda.h>  // CUtensorMap

#include <cstdint>
#include <cstring>

#include "cuda/ptx_sm80.cuh"  // smem_address, pack_bf16, exp2_approx

// -------------------------------------------------------------------------------------------------
// An mbarrier counts arrivals and bytes. Its phase ends when `count` threads have arrived and all
// expected bytes have landed. A phase is named by its parity, 0 first. Waiting for parity 1 of a
// new barrier returns at once.

// #parallel-synchronization-and-communication-instructions-mbarrier-init
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}
// Makes the inits above visible to the TMA unit. Other threads need a __syncthreads after it.
// #membar
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
// #parallel-synchronization-and-communication-instructions-mbarrier-arrive
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];\n" ::"r"(barrier)
                 : "memory");
}
// Arrives, and makes the phase wait for `bytes` of copies too.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier),
        "r"(bytes)
        : "memory");
}
// Waits for the end of the phase. The instruction sleeps for a time before it says that the phase
// has not ended.
// #parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    while (!done);
}

// Arrives at the same barrier of block `rank` of the cluster, whose shared memory is laid out like
// ours. It orders only this thread's use of that memory, because a release of cluster scope would
// wait for all its stores.
// #data-movement-and-conversion-instructions-mapa
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
// All threads of the cluster's blocks meet.
// #parallel-synchronization-and-communication-instructions-barrier-cluster
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}

// Named barriers, 1 to 15 (0 is __syncthreads), among `threads` of the block.
// #parallel-synchronization-and-communication-instructions-bar
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Does not wait. The barrier counts this thread among the `threads` that sync waits for.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// The lane, read anew rather than kept in a register. #special-registers-laneid
__device__ __forceinline__ int lane_id() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;\n" : "=r"(lane));
    return lane;
}

// Sets how many registers each thread of the warpgroup has from here on, a multiple of 8.
// #miscellaneous-instructions-setmaxnreg
template <int Registers>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Registers));
}

// Which of a pipeline's stages comes next, and the parity that a consumer waits for. The producer
// waits for the other.
template <int Stages>
struct PipelineState {
    int index = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        if (++index == Stages) {
            index = 0;
            phase ^= 1;
        }
    }
};

// -------------------------------------------------------------------------------------------------
// TMA. One thread starts a copy of a box of a tensor that a CUtensorMap describes. What lies
// outside of the tensor is read as zero and never written. Coordinates are in elements, fastest
// dimension first.

// Box → shared memory. Its bytes count on `barrier`.
// #data-movement-and-conversion-instructions-cp-async-bulk-tensor
__device__ __forceinline__ void tma_load_4d(uint32_t smem, const CUtensorMap* map, uint32_t barrier,
                                            int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
// The same to every block of the cluster whose bit is set in `blocks`. In each block, box and
// barrier lie at the same place as here.
__device__ __forceinline__ void tma_load_4d_multicast(uint32_t smem, const CUtensorMap* map,
                                                      uint32_t barrier, int c0, int c1, int c2,
                                                      int c3, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
        "multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;\n" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks)
        : "memory");
}
// Shared memory → box. The write joins this thread's bulk group.
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, uint32_t smem, int c0, int c1,
                                             int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], "
        "[%1];\n" ::"l"(map),
        "r"(smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
// Contiguous bytes, a multiple of 16, with both ends aligned to 16. The writes join this thread's
// bulk group.
// #data-movement-and-conversion-instructions-cp-async-bulk
__device__ __forceinline__ void bulk_load(uint32_t smem, const void* src, uint32_t bytes,
                                          uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];\n" ::"r"(smem),
        "l"(src), "r"(bytes), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void bulk_store(void* dst, uint32_t smem, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(dst),
                 "r"(smem), "r"(bytes)
                 : "memory");
}
// fp32: dst += smem, in L2. #data-movement-and-conversion-instructions-cp-reduce-async-bulk
__device__ __forceinline__ void bulk_add(float* dst, uint32_t smem, uint32_t bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(dst),
        "r"(smem), "r"(bytes)
        : "memory");
}
// Closes this thread's bulk group.
// #data-movement-and-conversion-instructions-cp-async-bulk-commit-group
__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}
// Waits until at most `Pending` of this thread's groups have still to read their shared memory.
// What has been read may be overwritten. bulk_wait waits until they are written.
// #data-movement-and-conversion-instructions-cp-async-bulk-wait-group
template <int Pending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(Pending) : "memory");
}
template <int Pending>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(Pending) : "memory");
}
// Orders this thread's ordinary writes to shared memory before later reads by TMA or wgmma. Other
// threads' writes need a barrier too. #membar (fence.proxy)
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// Four 8×8 matrices of 16-bit elements into shared memory, the reverse of ldmatrix_x4.
// #warp-level-matrix-instructions-stmatrix
__device__ __forceinline__ void stmatrix_x4(uint32_t smem, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(smem),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
// Stores 16 bytes if `wanted`. A branch instead would keep the compiler from interleaving what
// stands around it.
// #data-movement-and-conversion-instructions-st
template <class X>
__device__ __forceinline__ void store_16_if(bool wanted, void* p, const X& x) {
    static_assert(sizeof x == 16);
    uint4 w;
    memcpy(&w, &x, sizeof w);
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.v4.b32 [%1], {%2, %3, %4, "
        "%5};\n}\n" ::"r"(int{wanted}),
        "l"(p), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w));
}

// -------------------------------------------------------------------------------------------------
// Between blocks, through L2.

// Loads *p. What the writer's release made visible is visible to this thread after it.
// #data-movement-and-conversion-instructions-ld
__device__ __forceinline__ int load_acquire_gpu(const int* p) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(x) : "l"(p) : "memory");
    return x;
}
// The same without that promise, which a later fence_gpu gives.
__device__ __forceinline__ int load_relaxed_gpu(const int* p) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];\n" : "=r"(x) : "l"(p) : "memory");
    return x;
}
// What this thread loaded and wrote before it comes before what follows, for all blocks. So a
// relaxed store after it is a release. #membar
__device__ __forceinline__ void fence_gpu() {
    asm volatile("fence.acq_rel.gpu;\n" ::: "memory");
}
// #data-movement-and-conversion-instructions-st
__device__ __forceinline__ void store_relaxed_gpu(int* p, int x) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;\n" ::"l"(p), "r"(x) : "memory");
}
// A kernel launched with programmatic stream serialization starts when all blocks of the kernel
// before it have allowed it or have ended. Where it needs that kernel's writes, it waits for its
// end.
// #parallel-synchronization-and-communication-instructions-griddepcontrol
__device__ __forceinline__ void grid_allow_dependents() {
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}
__device__ __forceinline__ void grid_wait_dependency() {
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

// -------------------------------------------------------------------------------------------------
// wgmma: D (64 × N, fp32 registers) = or += A (64 × 16) · B (16 × N), bf16. It is asynchronous.
// Between wgmma_fence and wgmma_wait the registers of D, and of A if it is in registers, belong to
// the tensor cores.
//
// Warp w of the warpgroup holds rows 16w … 16w+15 in the layout of mma.m16n8k16 (ptx_sm80.cuh). The
// 16×8 tile of columns 8n … 8n+7 is d[n][…], and the A fragment is a. So D, packed to bf16, is
// again an A operand.

// The descriptor of a matrix in shared memory. The matrix is rows of 64 bf16 = 128 bytes in TMA's
// 128-byte swizzle. Eight rows make an atom of 1024 bytes, aligned to 1024. Atoms follow each other
// every 1024 bytes.
// #asynchronous-warpgroup-level-matrix-shared-memory-layout-matrix-descriptor
//   not transposed   a row is one m or n, its 64 elements are k.
//                    A k-step of 16 is 32 bytes further on.
//   transposed       a row is one k, its 64 elements are m or n.
//                    A k-step of 16 is 2048 bytes further on, and the next 64 of m or n are
//                    `next64` bytes further on.
// Bits 0–13 address, 16–29 leading offset (next64), 32–45 stride offset (the atom's 1024), each /
// 16. 62–63 = 1 means this swizzle.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t smem, uint32_t next64 = 16) {
    return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | uint64_t{next64 >> 4} << 16 |
           (smem & 0x3FFFF) >> 4;
}
// The same `bytes` further on.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t descriptor, uint32_t bytes) {
    return descriptor + (bytes >> 4);
}

// Goes before the first wgmma that uses registers which other instructions wrote.
// #asynchronous-warpgroup-level-matrix-instructions-wgmma-fence
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
// #asynchronous-warpgroup-level-matrix-instructions-wgmma-commit-group
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
// No instruction, but it keeps the compiler from moving uses of d across this point. It goes before
// the fence.
template <int N>
__device__ __forceinline__ void wgmma_hold(float (&d)[N][4]) {
    for (int n = 0; n < N; n++)
        asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}
template <int N>
__device__ __forceinline__ void wgmma_hold(uint32_t (&a)[N][4]) {
    for (int n = 0; n < N; n++)
        asm volatile("" : "+r"(a[n][0]), "+r"(a[n][1]), "+r"(a[n][2]), "+r"(a[n][3])::"memory");
}
// Waits until at most `Pending` committed groups are under way. The others have written `results`.
// #asynchronous-warpgroup-level-matrix-instructions-wgmma-wait-group
template <int Pending, class... D>
__device__ __forceinline__ void wgmma_wait(D&... results) {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
    (wgmma_hold(results), ...);
}

// clang-format off
#define WGMMA_8(X, n) X(n), X(n + 1), X(n + 2), X(n + 3), X(n + 4), X(n + 5), X(n + 6), X(n + 7)
#define WGMMA_D1(n)   "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define WGMMA_D8(n)   WGMMA_8(WGMMA_D1, n)
#define WGMMA_W1(n)   "=f"(d[n][0]), "=f"(d[n][1]), "=f"(d[n][2]), "=f"(d[n][3])
#define WGMMA_W8(n)   WGMMA_8(WGMMA_W1, n)
#define WGMMA_R32  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "   \
                   "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_R64  WGMMA_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "      \
                   "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_R128 WGMMA_R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "      \
                   "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "        \
                   "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, "          \
                   "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// One wgmma that adds to d if the operand `accumulate` is not 0, and sets d otherwise.
#define WGMMA(shape, d, operands, accumulate)                                                                          \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate ", 0;\n"                                                            \
    "wgmma.mma_async.sync.aligned." shape " {" d "}, " operands ";\n}\n"
// clang-format on

// d (+)= A · B with both in shared memory. `a` and `b` are their descriptors. B is N×16 (if not
// transposed its rows are n). The N of the instruction is 8 times d's.
// #asynchronous-warpgroup-level-matrix-instructions-wgmma-mma
template <bool TransposedA = false, bool TransposedB = false, int N>
__device__ __forceinline__ void wgmma_ss(float (&d)[N][4], uint64_t a, uint64_t b,
                                         bool accumulate) {
    static_assert(N == 8 || N == 16 || N == 32);
    if constexpr (N == 8)
        asm volatile(
            WGMMA("m64n64k16.f32.bf16.bf16", WGMMA_R32, "%32, %33, p, 1, 1, %35, %36", "%34")
            : WGMMA_D8(0)
            : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{TransposedA}), "n"(int{TransposedB}));
    else if constexpr (N == 32)
        asm volatile(
            WGMMA("m64n256k16.f32.bf16.bf16", WGMMA_R128, "%128, %129, p, 1, 1, %131, %132", "%130")
            : WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24)
            : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{TransposedA}), "n"(int{TransposedB}));
    else
        asm volatile(
            WGMMA("m64n128k16.f32.bf16.bf16", WGMMA_R64, "%64, %65, p, 1, 1, %67, %68", "%66")
            : WGMMA_D8(0), WGMMA_D8(8)
            : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{TransposedA}), "n"(int{TransposedB}));
}
// d = A · B, for accumulators that hold something else until then. d is not read, so its registers
// are free up to here.
template <bool TransposedA = false, bool TransposedB = false, int N>
__device__ __forceinline__ void wgmma_ss_set(float (&d)[N][4], uint64_t a, uint64_t b) {
    static_assert(N == 8 || N == 16);
    if constexpr (N == 8)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WGMMA_R32
                     "}, %32, %33, 0, 1, 1, %34, %35;\n"
                     : WGMMA_W8(0)
                     : "l"(a), "l"(b), "n"(int{TransposedA}), "n"(int{TransposedB}));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_R64
                     "}, %64, %65, 0, 1, 1, %66, %67;\n"
                     : WGMMA_W8(0), WGMMA_W8(8)
                     : "l"(a), "l"(b), "n"(int{TransposedA}), "n"(int{TransposedB}));
}
// The same as wgmma_ss with A in registers.
template <bool TransposedB = false, int N>
__device__ __forceinline__ void wgmma_rs(float (&d)[N][4], const uint32_t (&a)[4], uint64_t b,
                                         bool accumulate) {
    static_assert(N == 8 || N == 16);
    if constexpr (N == 8)
        asm volatile(WGMMA("m64n64k16.f32.bf16.bf16", WGMMA_R32,
                           "{%32, %33, %34, %35}, %36, p, 1, 1, %38", "%37")
                     : WGMMA_D8(0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}),
                       "n"(int{TransposedB}));
    else
        asm volatile(WGMMA("m64n128k16.f32.bf16.bf16", WGMMA_R64,
                           "{%64, %65, %66, %67}, %68, p, 1, 1, %70", "%69")
                     : WGMMA_D8(0), WGMMA_D8(8)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}),
                       "n"(int{TransposedB}));
}
