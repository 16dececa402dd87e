// CUDA's driver as far as Triton, torch and batchgen call it, with kernels that do nothing.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

#include "account.h"
#include "memory.h"
#include "streams.h"

using namespace played;

#define DONE(...) return __VA_ARGS__, CUDA_SUCCESS

PLAYED_API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
PLAYED_API CUresult cuDriverGetVersion(int* version) { DONE(*version = CUDA_VERSION); }
PLAYED_API CUresult cuDeviceGet(CUdevice* device, int number) { DONE(*device = number); }
PLAYED_API CUresult cuDeviceGetCount(int* number) { DONE(cudaGetDeviceCount(number)); }
PLAYED_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    DONE(cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device));
}
PLAYED_API CUresult cuDeviceGetUuid(CUuuid* id, CUdevice) { DONE(memset(id, 7, sizeof *id)); }
PLAYED_API CUresult cuCtxGetCurrent(CUcontext* context) { DONE(*context = (CUcontext)1); }
PLAYED_API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
PLAYED_API CUresult cuCtxGetDevice(CUdevice* device) { DONE(cudaGetDevice(device)); }
PLAYED_API CUresult cuCtxGetLimit(size_t* value, CUlimit) { DONE(*value = 1 << 20); }
PLAYED_API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
PLAYED_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { DONE(*context = (CUcontext)1); }
PLAYED_API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
    DONE(*flags = 0, *is_active = 1);
}
PLAYED_API CUresult cuGetErrorString(CUresult error, const char** text) {
    DONE(*text = cudaGetErrorString((cudaError_t)error));
}
PLAYED_API CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }

PLAYED_API CUresult cuModuleLoadData(CUmodule* module, const void*) {
    count("cuModuleLoadData");
    note_if_closed("cuModuleLoadData");
    if (captures_here(false)) fault("in a capture: cuModuleLoadData");
    DONE(*module = (CUmodule)1);
}
PLAYED_API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    DONE(*function = (CUfunction)strdup(name));
}
PLAYED_API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
PLAYED_API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
    bool threads = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
    DONE(*value = threads ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0);
}
PLAYED_API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
PLAYED_API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
PLAYED_API CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
    DONE(*clusters = 1);
}
// Limits: CUDA C++ Programming Guide, table of technical specifications.
PLAYED_API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
    unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
    if (config->gridDimX - 1 >= 2147483647u || config->gridDimY - 1 >= 65535u || config->gridDimZ - 1 >= 65535u ||
        threads - 1 >= 1024u || config->sharedMemBytes > 227u << 10) {
        fault(std::string("a grid, block or shared memory that no card takes: ") + (const char*)function);
        return CUDA_ERROR_INVALID_VALUE;
    }
    put(stream_of(config->hStream), {"triton kernel"});
    return CUDA_SUCCESS;
}
PLAYED_API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    if (!on_device((void*)address) && !is_pinned((void*)address)) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) DONE(*(CUdeviceptr*)value = address);
    DONE(*(int*)value = 0);
}
PLAYED_API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
    DONE(*status = is_capturing(stream_of(stream)) ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE);
}

// An error of all waits for values, as of a driver that lacks them; 0: it has them.
static int wait_error = 0;
PLAYED_API void played_refuse_waits(int error) { wait_error = error; }

#undef cuStreamWaitValue32
PLAYED_API CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    if (wait_error) return (CUresult)wait_error;
    if (address % 4 || (flags & 3) != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_INVALID_VALUE;
    if (!is_pinned((void*)address, 4) && !on_device((void*)address)) {
        fault("a stream waits at a value that is not pinned");
        return CUDA_ERROR_INVALID_VALUE;
    }
    auto* counter = (std::atomic<uint32_t>*)behind((void*)address);
    bool is_done = wait_value(stream_of(stream), counter, value) == Put::done;
    return is_done ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
PLAYED_API CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    return cuStreamWaitValue32_v2(stream, address, value, flags);
}
