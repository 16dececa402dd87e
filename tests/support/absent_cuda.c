// Stands for libcuda.so.1 where there is no GPU: what Triton loads and launches a kernel with. Nothing runs. A launch
// is refused as a GPU would refuse it, and counted otherwise. The least shared memory comes from the environment.

#include <cuda.h>
#include <stdlib.h>

static int launches = 0;

int absent_cuda_launches(void) { return launches; }

static int shared_memory(void) { return atoi(getenv("ABSENT_CUDA_SHARED_MEMORY")); }

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : "error";
  return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { return *device = number, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)&launches, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? shared_memory() : 32;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) { return *module = (CUmodule)image, CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  return *function = (CUfunction)module, CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  return *clusters = 1, CUDA_SUCCESS;
}

// Limits: CUDA C++ Programming Guide, table of technical specifications.
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  unsigned int threads = config->blockDimX * config->blockDimY * config->blockDimZ;
  if (config->gridDimX - 1 >= 2147483647u || config->gridDimY - 1 >= 65535u || config->gridDimZ - 1 >= 65535u ||
      threads - 1 >= 1024u || config->sharedMemBytes > (unsigned int)shared_memory())
    return CUDA_ERROR_INVALID_VALUE;
  launches++;
  return CUDA_SUCCESS;
}
