// What torch asks for and batchgen does without: by name alone, without the headers that declare operands.
#include "account.h"

namespace {
constexpr int kNotSupported = 801;  // of the runtime and of the driver
}

#define NOT_PLAYED(name) \
    PLAYED_API int name() { return kNotSupported; }
NOT_PLAYED(cuPointerGetAttributes)
NOT_PLAYED(cudaDeviceGetDefaultMemPool)
NOT_PLAYED(cudaFreeAsync)
NOT_PLAYED(cudaGraphAddNode)
NOT_PLAYED(cudaGraphDebugDotPrint)
NOT_PLAYED(cudaIpcCloseMemHandle)
NOT_PLAYED(cudaIpcGetEventHandle)
NOT_PLAYED(cudaIpcGetMemHandle)
NOT_PLAYED(cudaIpcOpenEventHandle)
NOT_PLAYED(cudaIpcOpenMemHandle)
NOT_PLAYED(cudaLibraryGetKernel)
NOT_PLAYED(cudaLibraryLoadData)
NOT_PLAYED(cudaLibraryUnload)
NOT_PLAYED(cudaMallocAsync)
NOT_PLAYED(cudaMemPoolGetAttribute)
NOT_PLAYED(cudaMemPoolSetAccess)
NOT_PLAYED(cudaMemPoolSetAttribute)
NOT_PLAYED(cudaMemPoolTrimTo)
NOT_PLAYED(cudaStreamUpdateCaptureDependencies)
