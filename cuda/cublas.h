// cuBLAS and cuBLASLt with checked calls. They are apart from cuda.h, because only matmuls need
// their 8000 lines.
#pragma once
#include <cublasLt.h>
#include <cublas_v2.h>

#include "cuda/cuda.h"

// Throws Error with file, line and the call itself.
void cublas_check(cublasStatus_t status, const char* file, int line, const char* what);
#define CUBLAS_CHECK(call) cublas_check((call), __FILE__, __LINE__, #call)
