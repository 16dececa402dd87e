// CUDA's runtime as far as torch calls it, with kernels that do nothing.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "account.h"
#include "memory.h"
#include "streams.h"

using namespace played;

namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local int current_device = 0;

// An error stays until it is read (cudaGetLastError), by a later launch if by nobody else.
cudaError_t failed(cudaError_t error) {
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
    return error;
}

cudaError_t put_or_fail(Stream* stream, Operation operation, bool can_be_captured = true) {
    bool is_done = put(stream, std::move(operation), can_be_captured) == Put::done;
    return is_done ? cudaSuccess : failed(cudaErrorStreamCaptureUnsupported);
}

// What may wait for all that the card has to do: forbidden in a capture, a fault while a stream waits for the host.
cudaError_t heavy_call(const char* name) {
    count(name);
    if (captures_here(capture_mode == cudaStreamCaptureModeRelaxed)) {
        fault(std::string("in a capture: ") + name);
        return failed(cudaErrorStreamCaptureUnsupported);
    }
    note_if_closed(name);
    return cudaSuccess;
}

int num_devices() {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) return (int)option("DEVICES", 1);
    int number = *visible != 0;
    for (; *visible; visible++) number += *visible == ',';
    return number;
}

int capability() { return (int)option("CAPABILITY", 90); }

struct CapturedGraph {
    std::shared_ptr<Graph> graph;
};

}  // namespace

// The device: an H100's sizes.

PLAYED_API cudaError_t cudaGetDeviceCount(int* number) {
    *number = num_devices();
    return *number ? cudaSuccess : failed(cudaErrorNoDevice);
}
PLAYED_API cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
PLAYED_API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= num_devices()) return failed(cudaErrorInvalidDevice);
    return current_device = device, cudaSuccess;
}
PLAYED_API cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
PLAYED_API cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
PLAYED_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* device, int) {
    *device = {};
    strcpy(device->name, "Played card");
    device->totalGlobalMem = total_bytes();
    device->major = capability() / 10, device->minor = capability() % 10;
    device->multiProcessorCount = 132, device->warpSize = 32, device->regsPerBlock = 65536;
    device->regsPerMultiprocessor = 65536, device->maxBlocksPerMultiProcessor = 32;
    device->sharedMemPerBlock = 48 << 10, device->sharedMemPerBlockOptin = 227 << 10;
    device->sharedMemPerMultiprocessor = 228 << 10, device->l2CacheSize = 50 << 20;
    device->maxThreadsPerBlock = 1024, device->maxThreadsPerMultiProcessor = 2048;
    device->maxThreadsDim[0] = device->maxThreadsDim[1] = 1024, device->maxThreadsDim[2] = 64;
    device->maxGridSize[0] = 2147483647, device->maxGridSize[1] = device->maxGridSize[2] = 65535;
    device->textureAlignment = 512, device->memPitch = 2147483647, device->asyncEngineCount = 3;
    device->unifiedAddressing = device->managedMemory = device->concurrentKernels = 1;
    device->streamPrioritiesSupported = 1;
    return cudaSuccess;
}
PLAYED_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
        case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
        case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
        case cudaDevAttrTextureAlignment: *value = 512; break;
        case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
        case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}
PLAYED_API cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int) {
    return snprintf(id, size, "0000:00:00.0"), cudaSuccess;
}
PLAYED_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
PLAYED_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
PLAYED_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}
PLAYED_API cudaError_t cudaDeviceSynchronize() {
    if (auto error = heavy_call("cudaDeviceSynchronize")) return error;
    return finish_all("cudaDeviceSynchronize"), cudaSuccess;
}
PLAYED_API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
PLAYED_API cudaError_t cudaPeekAtLastError() { return last_error; }
PLAYED_API const char* cudaGetErrorName(cudaError_t error) {
    static thread_local char text[48];
    return snprintf(text, sizeof text, "CUDA error %d of the played card", (int)error), text;
}
PLAYED_API const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
PLAYED_API cudaError_t cudaProfilerStart() { return cudaSuccess; }
PLAYED_API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// Memory.

PLAYED_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    const size_t context = 520ul << 20;
    *total = total_bytes();
    *free = *total - std::min(*total, used_bytes() + context);
    return cudaSuccess;
}
PLAYED_API cudaError_t cudaMalloc(void** address, size_t num_bytes) {
    if (auto error = heavy_call("cudaMalloc")) return error;
    return (*address = allocate(num_bytes)) ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
PLAYED_API cudaError_t cudaFree(void* address) {
    if (!address) return cudaSuccess;
    if (auto error = heavy_call("cudaFree")) return error;
    finish_all("cudaFree");
    if (release(address)) return cudaSuccess;
    fault("cudaFree of what is not allocated");
    return failed(cudaErrorInvalidValue);
}
PLAYED_API cudaError_t cudaHostAlloc(void** address, size_t num_bytes, unsigned) {
    if (auto error = heavy_call("cudaHostAlloc")) return error;
    *address = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*address != MAP_FAILED && pin(*address, num_bytes) == Pinning::done) return cudaSuccess;
    return failed(cudaErrorMemoryAllocation);
}
PLAYED_API cudaError_t cudaFreeHost(void* address) {
    if (auto error = heavy_call("cudaFreeHost")) return error;
    finish_all("cudaFreeHost");
    // The pages stay: torch keeps them for good, but for a few.
    return unpin(address) == Pinning::done ? cudaSuccess : failed(cudaErrorInvalidValue);
}
// Registrations until one is refused; below 0: none is.
static long pins_left = -1;
PLAYED_API void played_refuse_pin(long after) { pins_left = after; }

PLAYED_API cudaError_t cudaHostRegister(void* address, size_t num_bytes, unsigned) {
    if (auto error = heavy_call("cudaHostRegister")) return error;
    if (!num_bytes) return failed(cudaErrorInvalidValue);
    if (pins_left >= 0 && pins_left-- == 0) return failed(cudaErrorMemoryAllocation);
    Pinning outcome = pin(address, num_bytes);
    if (outcome == Pinning::already) fault("memory is registered again");
    if (outcome == Pinning::already) return failed(cudaErrorHostMemoryAlreadyRegistered);
    return outcome == Pinning::done ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
PLAYED_API cudaError_t cudaHostUnregister(void* address) {
    if (auto error = heavy_call("cudaHostUnregister")) return error;
    finish_all("cudaHostUnregister");
    if (unpin(address) == Pinning::done) return cudaSuccess;
    fault("memory is unregistered that is not registered");
    return failed(cudaErrorHostMemoryNotRegistered);
}
PLAYED_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    *attributes = {};
    bool device = on_device(address), pinned = is_pinned(address);
    attributes->type = device ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    if (device || pinned) attributes->devicePointer = (void*)address;
    if (!device) attributes->hostPointer = (void*)address;
    return cudaSuccess;
}

// Copies. With EMPTY, large ones move nothing: models that this machine could not hold. What comes from the card then
// is zeros, which every reader understands: kernels that do nothing leave no results, and old bytes are no tokens.

namespace {

void move(char* target, const char* source, size_t num_bytes, bool to_device) {
    static const bool empty = option("EMPTY", 0);
    if (empty && num_bytes >= (1 << 20)) return;
    if (empty && !to_device) memset(target, 0, num_bytes);
    else memcpy(target, source, num_bytes);
}

cudaError_t copy(void* target, const void* source, size_t num_bytes, Stream* stream) {
    if (!num_bytes) return cudaSuccess;
    bool to_device = on_device(target), from_device = on_device(source);
    const char* kind = to_device && from_device ? "d2d" : to_device ? "h2d" : "d2h";
    count(to_device && from_device ? "bytes d2d" : to_device ? "bytes h2d" : "bytes d2h", (long)num_bytes);
    char *to = behind(target), *from = behind(source);
    if ((to_device && from_device) || is_pinned(to_device ? source : target, num_bytes))
        return put_or_fail(stream, {kind, [=] { move(to, from, num_bytes, to_device); }});
    // Pageable memory: the host waits, and does it.
    count("pageable copy");
    note_if_closed("a copy of pageable memory");
    if (is_capturing(stream)) {
        fault("in a capture: a copy of pageable memory");
        return failed(cudaErrorStreamCaptureUnsupported);
    }
    finish(stream);
    move(to, from, num_bytes, to_device);
    return cudaSuccess;
}

}  // namespace

PLAYED_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
    return copy(to, from, size, stream_of(stream));
}
PLAYED_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
    return copy(to, from, size, stream_of(stream));
}
PLAYED_API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
    if (auto error = heavy_call("cudaMemcpy")) return error;
    finish_all("cudaMemcpy");
    return move(behind(to), behind(from), size, on_device(to)), cudaSuccess;
}
PLAYED_API cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch,
                                         size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
    char *to = behind(target), *from = behind(source);
    return put_or_fail(stream_of(stream), {"2d", [=] {
                                               for (size_t row = 0; row < height; row++)
                                                   memcpy(to + row * target_pitch, from + row * source_pitch, width);
                                           }});
}
PLAYED_API cudaError_t cudaMemsetAsync(void* address, int value, size_t num_bytes, cudaStream_t stream) {
    char* to = behind(address);
    return put_or_fail(stream_of(stream), {"memset", [=] { memset(to, value, num_bytes); }});
}
PLAYED_API cudaError_t cudaMemset(void* address, int value, size_t num_bytes) {
    return cudaMemsetAsync(address, value, num_bytes, nullptr);
}
PLAYED_API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
    return cudaSuccess;
}
PLAYED_API cudaError_t cudaGetSymbolAddress(void** address, const void*) {
    return *address = allocate(4096), cudaSuccess;
}

// Streams and events.

PLAYED_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
    return *stream = (cudaStream_t)new_stream(priority), cudaSuccess;
}
PLAYED_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
PLAYED_API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
PLAYED_API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
PLAYED_API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    return *priority = stream_of(stream)->priority, cudaSuccess;
}
PLAYED_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    count("cudaStreamSynchronize");
    Stream* stream = stream_of(handle);
    if (is_capturing(stream) || captures_here(capture_mode == cudaStreamCaptureModeRelaxed)) {
        fault("in a capture: cudaStreamSynchronize");
        return failed(cudaErrorStreamCaptureUnsupported);
    }
    return finish(stream), cudaSuccess;
}
PLAYED_API cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return is_idle(stream_of(stream)) ? cudaSuccess : cudaErrorNotReady;
}
PLAYED_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    return *event = (cudaEvent_t) new Event{!(flags & cudaEventDisableTiming)}, cudaSuccess;
}
PLAYED_API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
PLAYED_API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }  // operations may still refer to it
PLAYED_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return record((Event*)event, stream_of(stream)), cudaSuccess;
}
PLAYED_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}
PLAYED_API cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (captures_here(capture_mode == cudaStreamCaptureModeRelaxed)) {
        fault("in a capture: cudaEventQuery");
        return failed(cudaErrorStreamCaptureUnsupported);
    }
    return is_reached((Event*)event) ? cudaSuccess : cudaErrorNotReady;
}
PLAYED_API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    count("cudaEventSynchronize");
    return finish((Event*)event), cudaSuccess;
}
PLAYED_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
    auto *start = (Event*)first, *stop = (Event*)second;
    if (!start->is_timed || !stop->is_timed || !start->recorded || !stop->recorded) {
        fault("the time between events that have no times");
        return failed(cudaErrorInvalidResourceHandle);
    }
    if (!is_reached(start) || !is_reached(stop)) return cudaErrorNotReady;
    *milliseconds = (float)((stop->at_s - start->at_s) * 1e3);
    return cudaSuccess;
}
PLAYED_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    bool is_done = wait_event(stream_of(stream), (Event*)event) == Put::done;
    return is_done ? cudaSuccess : failed(cudaErrorStreamCaptureIsolation);
}
PLAYED_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    return put_or_fail(stream_of(stream), {"host function", [=] { function(data); }});
}
PLAYED_API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
    return put_or_fail(stream_of(stream), {"callback", [=] { function(stream, cudaSuccess, data); }}, false);
}

// Captures and graphs.

PLAYED_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    return std::swap(*mode, capture_mode), cudaSuccess;
}
PLAYED_API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
    Stream* stream = stream_of(handle);
    if (stream == stream_of(nullptr)) return failed(cudaErrorStreamCaptureUnsupported);
    if (is_capturing(stream)) return failed(cudaErrorIllegalState);
    return count("captures"), begin_capture(stream), cudaSuccess;
}
PLAYED_API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t, const cudaGraphNode_t*,
                                                     const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode mode) {
    return cudaStreamBeginCapture(stream, mode);
}
PLAYED_API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    if (!is_capturing(stream_of(stream))) return failed(cudaErrorIllegalState);
    return *graph = (cudaGraph_t) new CapturedGraph{end_capture(stream_of(stream))}, cudaSuccess;
}
PLAYED_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    *status = is_capturing(stream_of(stream)) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
PLAYED_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                                unsigned long long* id, cudaGraph_t* graph,
                                                const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                                size_t* number) {
    if (id) *id = stream_of(stream)->capture_id;
    if (graph) *graph = nullptr;
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (number) *number = 0;
    return cudaStreamIsCapturing(stream, status);
}
PLAYED_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* ready, cudaGraph_t graph, unsigned long long) {
    return *ready = (cudaGraphExec_t) new CapturedGraph{*(CapturedGraph*)graph}, cudaSuccess;
}
PLAYED_API cudaError_t cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t stream) {
    return count("cudaGraphLaunch"), replay(((CapturedGraph*)ready)->graph, stream_of(stream)), cudaSuccess;
}
PLAYED_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete (CapturedGraph*)graph, cudaSuccess; }
PLAYED_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return delete (CapturedGraph*)graph, cudaSuccess; }
PLAYED_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* number) {
    return *number = ((CapturedGraph*)graph)->graph->operations.size(), cudaSuccess;
}
PLAYED_API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* n) {
    return *n = 0, cudaSuccess;
}

// Kernels of torch, which do nothing.

namespace {

thread_local struct {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
} pushed;

cudaError_t launch(dim3 grid, cudaStream_t stream) {
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535) {
        fault("a grid of torch's that is empty or too large");
        return failed(cudaErrorInvalidConfiguration);
    }
    return put_or_fail(stream_of(stream), {"kernel"});
}

}  // namespace

PLAYED_API void** __cudaRegisterFatBinary(void*) {
    static void* handle[4];
    return handle;
}
PLAYED_API void __cudaRegisterFatBinaryEnd(void**) {}
PLAYED_API void __cudaUnregisterFatBinary(void**) {}
PLAYED_API char __cudaInitModule(void**) { return 1; }
PLAYED_API void __cudaRegisterFunction(void**) {}
PLAYED_API void __cudaRegisterVar(void**) {}
PLAYED_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                                struct CUstream_st* stream) {
    return pushed = {grid, block, shared_bytes, stream}, 0;
}
PLAYED_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
    *grid = pushed.grid, *block = pushed.block, *shared_bytes = pushed.shared_bytes;
    return *(cudaStream_t*)stream = pushed.stream, cudaSuccess;
}
PLAYED_API cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3, void**, size_t, cudaStream_t stream) {
    return launch(grid, stream);
}
PLAYED_API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3 grid, dim3, void**, size_t, cudaStream_t stream) {
    return launch(grid, stream);
}
PLAYED_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
    return launch(config->gridDim, config->stream);
}
PLAYED_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    return *kernel = (cudaKernel_t)function, cudaSuccess;
}
PLAYED_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024, attributes->numRegs = 32, attributes->maxDynamicSharedSizeBytes = 48 << 10;
    return attributes->ptxVersion = attributes->binaryVersion = capability(), cudaSuccess;
}
PLAYED_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
PLAYED_API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) {
    return cudaSuccess;
}
PLAYED_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                              unsigned) {
    return *blocks = 8, cudaSuccess;
}

// The driver's functions that torch asks for by name. What is not played says that it is not supported.
PLAYED_API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                        cudaDriverEntryPointQueryResult* result) {
    *function = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
    if (!*function) *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = (void*)+[]() -> int { return cudaErrorNotSupported; };
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
