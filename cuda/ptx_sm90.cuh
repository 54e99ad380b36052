// PTX instructions as inline functions, one each: what sm_90a adds. The tensor memory accelerator
// (TMA) copies whole tiles, an mbarrier tells when they have arrived, and a warpgroup of four warps
// multiplies them straight out of shared memory. As in ptx_sm80.cuh, #… is an anchor in
// https://docs.nvidia.com/cuda/parallel-thread-execution/.
#pragma once
#include <cuda.h>  // CUtensorMap

#include <cstdint>
#include <cstring>

#include "cuda/ptx_sm80.cuh"  // smem_address, pack_bf16, exp2_approx

// -------------------------------------------------------------------------------------------------
// An mbarrier counts arrivals and bytes. Its current phase ends when `count` threads have arrived
// and all expected bytes have been copied. Phases are named by their parity, 0 first. On a new
// barrier, waiting for parity 1 returns at once, as if a phase before the first had ended.

// #parallel-synchronization-and-communication-instructions-mbarrier-init
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to the TMA unit. For other threads to see them, a
// __syncthreads must follow. #membar
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

// Waits until the phase has ended. If it has not ended after a while, in which the thread sleeps,
// the instruction returns false, hence the loop.
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

// Arrives at the same barrier in block `rank` of the cluster, whose shared memory has the same
// layout as ours. Its release has the scope of the block, because one of cluster scope would first
// wait for all of the thread's stores. So the other block learns that this thread is done reading a
// buffer, but must not rely on what it has written.
// #data-movement-and-conversion-instructions-mapa
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// __syncthreads for all blocks of the cluster.
// #parallel-synchronization-and-communication-instructions-barrier-cluster
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}

// Named barriers 1 to 15 (0 is __syncthreads) of `threads` threads of the block.
// #parallel-synchronization-and-communication-instructions-bar
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting: this thread counts as one of the `threads` for which sync waits.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// The lane, read from the special register each time, so that it needs no register of its own.
// #special-registers-laneid
__device__ __forceinline__ int lane_id() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;\n" : "=r"(lane));
    return lane;
}

// Changes how many registers each thread of the warpgroup has from here on, to a multiple of 8.
// #miscellaneous-instructions-setmaxnreg
template <int Registers>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Registers));
}

// -------------------------------------------------------------------------------------------------
// TMA. One thread starts the copy of a whole box of a tensor, which a CUtensorMap describes.
// Elements outside the tensor are read as zeros and never written. Coordinates are in elements,
// fastest dimension first.

// Box → shared memory. The bytes that have arrived are counted by `barrier`.
// #data-movement-and-conversion-instructions-cp-async-bulk-tensor
__device__ __forceinline__ void tma_load_4d(uint32_t smem, const CUtensorMap* map, uint32_t barrier,
                                            int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// The same to every block of the cluster whose bit is set in `blocks`. Box and barrier have the
// same addresses in each of these blocks as here.
__device__ __forceinline__ void tma_load_4d_multicast(uint32_t smem, const CUtensorMap* map,
                                                      uint32_t barrier, int c0, int c1, int c2,
                                                      int c3, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
        "multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;\n" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks)
        : "memory");
}

// Shared memory → box. The write is part of this thread's bulk group.
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, uint32_t smem, int c0, int c1,
                                             int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], "
        "[%1];\n" ::"l"(map),
        "r"(smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// Copies of contiguous bytes, a multiple of 16, with both addresses aligned to 16. As for boxes,
// the bytes of a load are counted by `barrier`, and stores and adds are part of this thread's bulk
// group.
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

// Waits until at most `Pending` of this thread's groups have yet to read their shared memory, so
// that the others' may be overwritten. bulk_wait also waits for their writes.
// #data-movement-and-conversion-instructions-cp-async-bulk-wait-group
template <int Pending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(Pending) : "memory");
}

template <int Pending>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(Pending) : "memory");
}

// Orders this thread's ordinary writes to shared memory before later reads by TMA or wgmma. For
// other threads' writes, a barrier is needed as well. #membar (fence.proxy)
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// Stores four 8×8 matrices of 16-bit elements to shared memory, the reverse of ldmatrix_x4.
// #warp-level-matrix-instructions-stmatrix
__device__ __forceinline__ void stmatrix_x4(uint32_t smem, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(smem),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// Stores 16 bytes if `wanted`. With a branch instead, the compiler could not interleave the code
// before and after it.
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
// Communication between blocks, through L2.

// Loads *p. Afterwards this thread sees everything that the writer's release made visible.
// #data-movement-and-conversion-instructions-ld
__device__ __forceinline__ int load_acquire_gpu(const int* p) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(x) : "l"(p) : "memory");
    return x;
}

// The same without that promise, unless a fence_gpu follows.
__device__ __forceinline__ int load_relaxed_gpu(const int* p) {
    int x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];\n" : "=r"(x) : "l"(p) : "memory");
    return x;
}

// Orders this thread's loads and stores before the fence ahead of those after it, as seen by all
// blocks. So a relaxed store that follows is a release. #membar
__device__ __forceinline__ void fence_gpu() {
    asm volatile("fence.acq_rel.gpu;\n" ::: "memory");
}

// #data-movement-and-conversion-instructions-st
__device__ __forceinline__ void store_relaxed_gpu(int* p, int x) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;\n" ::"l"(p), "r"(x) : "memory");
}

// A kernel launched with programmatic stream serialization starts when every block of the kernel
// before it has called grid_allow_dependents() or has ended. Before it reads what that kernel
// wrote, it calls grid_wait_dependency(), which returns when that kernel has ended.
// #parallel-synchronization-and-communication-instructions-griddepcontrol
__device__ __forceinline__ void grid_allow_dependents() {
    asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}

__device__ __forceinline__ void grid_wait_dependency() {
    asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

// -------------------------------------------------------------------------------------------------
// wgmma: D (64 × N, fp32 registers) = or += A (64 × 16) · B (16 × N), bf16, by a warpgroup. It is
// asynchronous: from wgmma_fence to wgmma_wait the registers of D, and those of A if it is in
// registers, belong to the tensor cores.
//
// Warp w of the warpgroup holds rows 16w … 16w+15, in the layout of mma.m16n8k16 (ptx_sm80.cuh):
// the 16×8 tile of columns 8n … 8n+7 is d[n], and a fragment of A is a[4]. So D, packed to bf16,
// can be the next product's A.

// The descriptor of a matrix in shared memory. The matrix is rows of 64 bf16 = 128 bytes in TMA's
// 128-byte swizzle. Eight rows make an atom of 1024 bytes, aligned to 1024, and atoms follow one
// another without gaps.
// #asynchronous-warpgroup-level-matrix-shared-memory-layout-matrix-descriptor
//   not transposed   a row is one m or n, its 64 elements are k.
//                    The next k-step of 16 is 32 bytes further on.
//   transposed       a row is one k, its 64 elements are m or n.
//                    The next k-step of 16 is 2048 bytes further on, and the next 64 of m or n are
//                    `next64` bytes further on.
// A matrix that is not transposed, or has no more than 64 of m or n, does not use next64, which is
// then 16 bytes: 1 in the descriptor, as PTX assumes there.
//
//   bits     value, addresses and offsets in units of 16 bytes
//   0–13     address
//   16–29    leading offset: next64
//   32–45    stride offset: from an atom to the next
//   62–63    1: 128-byte swizzle
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t smem, uint32_t next64 = 16) {
    constexpr uint64_t kSwizzle128B = uint64_t{1} << 62;
    constexpr uint64_t kStrideOffset = uint64_t{1024 / 16} << 32;
    const uint64_t leading_offset = uint64_t{next64 >> 4} << 16;
    const uint32_t address = (smem & 0x3FFFF) >> 4;
    return kSwizzle128B | kStrideOffset | leading_offset | address;
}

// The descriptor of what is `bytes` further on.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t descriptor, uint32_t bytes) {
    return descriptor + (bytes >> 4);
}

// K-step kk, 16 columns, of a tile of `Rows` rows that is not transposed. Its panels of 64 columns
// follow each other.
template <int Rows>
__device__ __forceinline__ uint64_t wgmma_column_step(uint64_t tile, int kk) {
    const int panel = kk / 4;
    const int bytes = kk % 4 * 32;  // into a row of 128
    return wgmma_advance(tile, panel * Rows * 128 + bytes);
}

// K-step kk, 16 rows, of a tile that is transposed.
__device__ __forceinline__ uint64_t wgmma_row_step(uint64_t tile, int kk) {
    return wgmma_advance(tile, kk * 16 * 128);
}

// Needed before the first wgmma that uses registers written by other instructions.
// #asynchronous-warpgroup-level-matrix-instructions-wgmma-fence
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

// #asynchronous-warpgroup-level-matrix-instructions-wgmma-commit-group
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Emits nothing, but keeps the compiler from moving uses of these registers across this point. Call
// it before wgmma_fence, and on results after a wait, which wgmma_wait does for those it is given.
template <int N>
__device__ __forceinline__ void wgmma_fence_operand(float (&d)[N][4]) {
    for (int n = 0; n < N; n++)
        asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}

template <int N>
__device__ __forceinline__ void wgmma_fence_operand(uint32_t (&a)[N][4]) {
    for (int n = 0; n < N; n++)
        asm volatile("" : "+r"(a[n][0]), "+r"(a[n][1]), "+r"(a[n][2]), "+r"(a[n][3])::"memory");
}

// Waits until at most `Pending` committed groups are still under way. `results` are the
// accumulators that the others have written.
// #asynchronous-warpgroup-level-matrix-instructions-wgmma-wait-group
template <int Pending, class... D>
__device__ __forceinline__ void wgmma_wait(D&... results) {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
    (wgmma_fence_operand(results), ...);
}

// The registers of d as operands of asm: D are read and written, W only written, and R are their
// numbers in the instruction's text.
// clang-format off
#define WGMMA_8(X, n) X(n), X(n + 1), X(n + 2), X(n + 3), X(n + 4), X(n + 5), X(n + 6), X(n + 7)
#define WGMMA_D1(n)   "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define WGMMA_D8(n)   WGMMA_8(WGMMA_D1, n)
#define WGMMA_W1(n)   "=f"(d[n][0]), "=f"(d[n][1]), "=f"(d[n][2]), "=f"(d[n][3])
#define WGMMA_W8(n)   WGMMA_8(WGMMA_W1, n)
#define WGMMA_R32  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "             \
                   "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "             \
                   "%28, %29, %30, %31"
#define WGMMA_R64  WGMMA_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, " \
                   "%45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, "             \
                   "%58, %59, %60, %61, %62, %63"
#define WGMMA_R128 WGMMA_R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, " \
                   "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, "             \
                   "%90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, "                \
                   "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, "            \
                   "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, "            \
                   "%124, %125, %126, %127"
// One wgmma, which adds to d if the operand `accumulate` is not 0, and overwrites d otherwise.
// `operands` are, in the instruction's order:
//   A, B                 descriptors, or A's four registers
//   p                    whether to add: the predicate that is set here
//   1, 1                 factors of A and B; −1 would negate them
//   one or two numbers   1 if transposed, else 0: of A, if it is in shared memory, and of B
#define WGMMA(shape, d, operands, accumulate)                                                      \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate ", 0;\n"                                        \
    "wgmma.mma_async.sync.aligned." shape " {" d "}, " operands ";\n}\n"
// clang-format on

// d = A · B, or d += A · B if `accumulate`, with both in shared memory. `a` and `b` are their
// descriptors. B is stored as N × 16, or as 16 × N if transposed. d is Tiles tiles of 8 columns, so
// N = 8·Tiles.
// #asynchronous-warpgroup-level-matrix-instructions-wgmma-mma
template <bool TransposedA = false, bool TransposedB = false, int Tiles>
__device__ __forceinline__ void wgmma_ss(float (&d)[Tiles][4], uint64_t a, uint64_t b,
                                         bool accumulate) {
    static_assert(Tiles == 8 || Tiles == 16 || Tiles == 32);
    if constexpr (Tiles == 8)
        asm volatile(
            WGMMA("m64n64k16.f32.bf16.bf16", WGMMA_R32, "%32, %33, p, 1, 1, %35, %36", "%34")
            : WGMMA_D8(0)
            : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{TransposedA}), "n"(int{TransposedB}));
    else if constexpr (Tiles == 16)
        asm volatile(
            WGMMA("m64n128k16.f32.bf16.bf16", WGMMA_R64, "%64, %65, p, 1, 1, %67, %68", "%66")
            : WGMMA_D8(0), WGMMA_D8(8)
            : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{TransposedA}), "n"(int{TransposedB}));
    else
        asm volatile(
            WGMMA("m64n256k16.f32.bf16.bf16", WGMMA_R128, "%128, %129, p, 1, 1, %131, %132", "%130")
            : WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24)
            : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{TransposedA}), "n"(int{TransposedB}));
}

// d = A · B. It does not read d, whose registers the compiler can use for something else until
// here.
template <bool TransposedA = false, bool TransposedB = false, int Tiles>
__device__ __forceinline__ void wgmma_ss_set(float (&d)[Tiles][4], uint64_t a, uint64_t b) {
    static_assert(Tiles == 8 || Tiles == 16);
    if constexpr (Tiles == 8)
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
template <bool TransposedB = false, int Tiles>
__device__ __forceinline__ void wgmma_rs(float (&d)[Tiles][4], const uint32_t (&a)[4], uint64_t b,
                                         bool accumulate) {
    static_assert(Tiles == 8 || Tiles == 16);
    if constexpr (Tiles == 8)
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
