// cuBLAS as far as torch calls it: products are launched and do nothing.
//
// Its header needs others that no package of torch's brings. Here are names and results alone: of the operands of a
// product only the handle or the stream matters.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "account.h"
#include "streams.h"

namespace {

constexpr int kSuccess = 0;

struct Handle {
    void* stream = nullptr;
    int math = 0, pointers = 0;
};

int launch(void* stream) {
    played::put(played::stream_of(stream), {"product"});
    return kSuccess;
}

int made(void** object) {
    static char something[256];
    *object = something;
    return kSuccess;
}

}  // namespace

PLAYED_API int cublasCreate_v2(Handle** handle) {
    played::count("cublasCreate");
    played::note_if_closed("cublasCreate");
    *handle = new Handle;
    return kSuccess;
}
PLAYED_API int cublasDestroy_v2(Handle*) { return kSuccess; }
PLAYED_API int cublasSetStream_v2(Handle* handle, void* stream) { return handle->stream = stream, kSuccess; }
PLAYED_API int cublasSetWorkspace_v2(Handle*, void*, size_t num_bytes) {
    return played::count("bytes of cuBLAS's work spaces", (long)num_bytes), kSuccess;
}
PLAYED_API int cublasGetMathMode(Handle* handle, int* mode) { return *mode = handle->math, kSuccess; }
PLAYED_API int cublasSetMathMode(Handle* handle, int mode) { return handle->math = mode, kSuccess; }
PLAYED_API int cublasGetPointerMode_v2(Handle* handle, int* mode) { return *mode = handle->pointers, kSuccess; }
PLAYED_API int cublasSetPointerMode_v2(Handle* handle, int mode) { return handle->pointers = mode, kSuccess; }
PLAYED_API int cublasSetSmCountTarget(Handle*, int) { return kSuccess; }

#define PRODUCT(name) \
    PLAYED_API int name(Handle* handle) { return launch(handle->stream); }
#define FP64_PRODUCT(name)                \
    PLAYED_API int name(Handle* handle) { \
        played::count("product in fp64"); \
        return launch(handle->stream);    \
    }
PRODUCT(cublasSgemm_v2)
FP64_PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemv_v2)
FP64_PRODUCT(cublasDgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmStridedBatched)
FP64_PRODUCT(cublasDgemmStridedBatched)

PLAYED_API int cublasLtMatmulDescCreate(void** object) { return made(object); }
PLAYED_API int cublasLtMatmulPreferenceCreate(void** object) { return made(object); }
PLAYED_API int cublasLtMatrixLayoutCreate(void** object) { return made(object); }
PLAYED_API int cublasLtMatmulDescDestroy(void*) { return kSuccess; }
PLAYED_API int cublasLtMatmulPreferenceDestroy(void*) { return kSuccess; }
PLAYED_API int cublasLtMatrixLayoutDestroy(void*) { return kSuccess; }
PLAYED_API int cublasLtMatmulDescSetAttribute(void*) { return kSuccess; }
PLAYED_API int cublasLtMatmulPreferenceSetAttribute(void*) { return kSuccess; }
PLAYED_API int cublasLtMatrixLayoutSetAttribute(void*) { return kSuccess; }
PLAYED_API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* algorithms,
                                              int* number) {
    constexpr size_t algorithm_bytes = 64 + 8 + 4 + 4 + 16;  // cublasLtMatmulHeuristicResult_t
    memset(algorithms, 0, algorithm_bytes);                  // with the state 0, success
    *number = 1;
    return kSuccess;
}
PLAYED_API int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*,
                              const void*, void*, void*, void*, const void*, void*, size_t, void* stream) {
    return launch(stream);
}

// Descriptions of operands for CUTLASS's grouped products, which are launched as kernels of torch's.
PLAYED_API int cuTensorMapEncodeTiled() { return kSuccess; }
