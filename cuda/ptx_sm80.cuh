// PTX instructions as inline functions, one each: what sm_80 and later GPUs have for asynchronous
// copies, matrix fragments and fast arithmetic. A comment such as
// #warp-level-matrix-instructions-ldmatrix is the anchor of the instruction's section in
// https://docs.nvidia.com/cuda/parallel-thread-execution/.
#pragma once
#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>

// The shared-memory address of a generic pointer, as the instructions below expect it.
// #data-movement-and-conversion-instructions-cvta
__device__ __forceinline__ uint32_t smem_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Starts copying 16 bytes to shared memory, bypassing L1 and registers. If !valid, it writes zeros
// and does not read src.
// #data-movement-and-conversion-instructions-cp-async
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* src, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(smem), "l"(src),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

// The same for 8 or 4 bytes, through L1, because .cg supports only 16 bytes.
__device__ __forceinline__ void cp_async_8(uint32_t smem, const void* src, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(smem), "l"(src),
                 "r"(valid ? 8 : 0)
                 : "memory");
}

__device__ __forceinline__ void cp_async_4(uint32_t smem, const void* src, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(smem), "l"(src),
                 "r"(valid ? 4 : 0)
                 : "memory");
}

// Closes this thread's group of copies.
// #data-movement-and-conversion-instructions-cp-async-commit-group
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most `Pending` of this thread's groups are still under way. To see other threads'
// copies, a thread also needs a barrier after this.
// #data-movement-and-conversion-instructions-cp-async-wait-group
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

// Loads four 8×8 matrices of 16-bit elements. Lanes 8i … 8i+7 give the addresses of the rows of
// matrix i. In r[i] lane l gets elements 2(l%4) and 2(l%4)+1 of row l/4 of matrix i.
// #warp-level-matrix-instructions-ldmatrix
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem)
                 : "memory");
}

// The same with each matrix transposed: lane l gets rows 2(l%4) and 2(l%4)+1 of column l/4.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t smem) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem)
                 : "memory");
}

// c (16×8, fp32) += a (16×16, row-major) · b (16×8, column-major). With g = l/4 and t = 2(l%4),
// lane l holds:
//   c[0..1] = (g, t..t+1)   c[2..3] = (g+8, t..t+1)
//   a[0] = (g, t..t+1)   a[1] = (g+8, t..t+1)   a[2] = (g, t+8..t+9)   a[3] = (g+8, t+8..t+9)
//   b0 = (t..t+1, g)     b1 = (t+8..t+9, g)
// #warp-level-matrix-fragment-mma-16816-float
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with operands in fp16.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with fp16 accumulators, packed as c[0] = (g, t..t+1), c[1] = (g+8, t..t+1).
__device__ __forceinline__ void mma_m16n8k16_f16_acc16(uint32_t (&c)[2], const uint32_t (&a)[4],
                                                       uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, "
        "{%0, %1};\n"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats, rounded to nearest even and packed into one register, `low` in bits 0–15.
// #data-movement-and-conversion-instructions-cvt
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// Not an instruction: the dot product of x and y, 8 bf16 each.
__device__ __forceinline__ float dot8(const uint4& x, const uint4& y) {
    const __nv_bfloat162* a = reinterpret_cast<const __nv_bfloat162*>(&x);
    const __nv_bfloat162* b = reinterpret_cast<const __nv_bfloat162*>(&y);
    float sum = 0.f;
    for (int i = 0; i < 4; i++) {
        const float2 u = __bfloat1622float2(a[i]);
        const float2 v = __bfloat1622float2(b[i]);
        sum += u.x * v.x + u.y * v.y;
    }
    return sum;
}

// The larger of two numbers, or NaN if one of them is NaN (fmaxf would return the other one).
// #floating-point-instructions-max
__device__ __forceinline__ float max_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// 1/x to 1 ulp, but 0 if the result would be subnormal. #floating-point-instructions-rcp
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// √x to 1 ulp, but 0 if x is subnormal. #floating-point-instructions-sqrt
__device__ __forceinline__ float sqrt_approx(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// eˣ = 2^(x·kLog2e)
constexpr float kLog2e = static_cast<float>(M_LOG2E);
// 2^x to 2 ulp, but 0 if the result would be subnormal, which exp2f handles. 2^−inf = 0.
// #floating-point-instructions-ex2
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// 2^x for two fp16 in one register. The results may be subnormal. It is one instruction only in
// PTX: sm_75 to sm_90 compute one half at a time. #half-precision-floating-point-instructions-ex2
__device__ __forceinline__ uint32_t exp2_approx_f16x2(uint32_t x) {
    uint32_t y;
    asm("ex2.approx.f16x2 %0, %1;\n" : "=r"(y) : "r"(x));
    return y;
}
