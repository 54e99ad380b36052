// A tensor map tells the TMA unit of sm_90 where the rows of a (B, T, NH, HS) tensor are in memory,
// whatever its strides.
#pragma once
#include <cuda.h>

#include "common/types.h"
#include "cuda/cuda.h"

// cuTensorMapEncodeTiled is a function of the driver. We ask the runtime for its address, so that
// the program need not link libcuda.
inline auto tensor_map_encoder() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                cudaEnableDefault, &found));
#else
    CUDA_CHECK(
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found));
#endif
    if (found != cudaDriverEntryPointSuccess || !function)
        throw Error(
            "the GPU driver has no cuTensorMapEncodeTiled; install a driver for CUDA 12.0 or "
            "later");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

// Describes x, 16-bit or fp32, for copies of boxes at coordinates (d, h, t, b). A box is 128 bytes
// of one head by `rows` tokens of one sequence. In shared memory its rows are in TMA's 128-byte
// swizzle, which stores 16-byte chunk c of row r at chunk c ^ (r % 8). Each sequence ends at T, so
// a box that extends past it reads zeros, not the next sequence's rows. Throws Error if the driver
// refuses.
template <class X>
CUtensorMap tensor_map(const char* name, const HeadsView<X>& x, const HeadsShape& s, int rows) {
    // TMA moves bits, so it need not know whether they are bf16 or fp16.
    constexpr auto kType =
        sizeof(X) == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    const cuuint64_t dims[4] = {cuuint64_t(s.HS), cuuint64_t(s.heads), cuuint64_t(s.T),
                                cuuint64_t(s.B)};
    const cuuint64_t strides[3] = {s.HS * sizeof(X), x.token_stride * sizeof(X),
                                   x.batch_stride * sizeof(X)};
    const cuuint32_t box[4] = {128 / sizeof(X), 1, cuuint32_t(rows), 1};
    const cuuint32_t element_strides[4] = {1, 1, 1, 1};

    static const auto encode = tensor_map_encoder();
    CUtensorMap map;
    const CUresult status =
        encode(&map, kType, 4, const_cast<std::remove_const_t<X>*>(x.ptr), dims, strides, box,
               element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS)
        throw Error(
            format("tensor_map: cuTensorMapEncodeTiled of %s failed with error %d: B %d, T %d, "
                   "NH %d, HS %d, strides %zu and %zu elements, address %p",
                   name, int(status), s.B, s.T, s.heads, s.HS, x.batch_stride, x.token_stride,
                   static_cast<const void*>(x.ptr)));
    return map;
}
