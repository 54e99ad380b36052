// cuBLAS and cuBLASLt, with checked calls. Kept apart from cuda.h, because only the matmuls need
// the 8000 lines of their headers.
#pragma once
#include <cublasLt.h>
#include <cublas_v2.h>

#include "cuda/cuda.h"

// Throws Error with the file, the line and the call itself.
void cublas_check(cublasStatus_t status, const char* file, int line, const char* what);
#define CUBLAS_CHECK(call) cublas_check((call), __FILE__, __LINE__, #call)
