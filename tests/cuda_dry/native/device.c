/* What the tests ask of the stand-in, the devices, and kernels; see standin.h. */
#include "standin.h"
#include <dlfcn.h>
#include <stdio.h>

typedef void (*Watch)(const char *call);

static _Atomic(Watch) watch;
static _Thread_local int launches_allowed;
_Thread_local cudaError_t last_error;
_Thread_local int current;

void dry_watch(Watch wanted) { watch = wanted; }
void dry_allow_launches(int allowed) { launches_allowed = allowed; }

cudaError_t stopped(const char *call) {
    Watch wanted = watch;
    if (wanted) wanted(call);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) { return *count = DEVICES, cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = current, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= DEVICES) return last_error = cudaErrorInvalidDevice;
    return current = device, cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) {
    return *least = 0, *most = -5, cudaSuccess;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

/* sizes of an H100, from which torch and FBGEMM choose their launches */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
    memset(out, 0, sizeof *out);
    strcpy(out->name, "stand-in without kernels");
    out->major = 9;
    out->totalGlobalMem = DEVICE_BYTES;
    out->multiProcessorCount = 132;
    out->warpSize = 32;
    out->l2CacheSize = 50 << 20;
    out->maxThreadsPerBlock = 1024;
    out->maxThreadsPerMultiProcessor = 2048;
    out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
    out->maxThreadsDim[2] = 64;
    out->maxGridSize[0] = 0x7fffffff;
    out->maxGridSize[1] = out->maxGridSize[2] = 0xffff;
    out->regsPerBlock = out->regsPerMultiprocessor = 65536;
    out->sharedMemPerBlock = 48 << 10;
    out->sharedMemPerBlockOptin = 227 << 10;
    out->sharedMemPerMultiprocessor = 228 << 10;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr what, int device) {
    struct cudaDeviceProp p;
    cudaGetDeviceProperties(&p, device);
    switch (what) {
    case cudaDevAttrComputeCapabilityMajor: *out = p.major; break;
    case cudaDevAttrMultiProcessorCount: *out = p.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *out = p.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *out = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *out = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *out = p.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *out = p.maxGridSize[2]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *out = (int)p.sharedMemPerMultiprocessor;
        break;
    default: *out = 0;
    }
    return cudaSuccess;
}

/* ---- kernels */

static cudaError_t launch(const void *function) {
    Dl_info found = {0};
    if (launches_allowed) return cudaSuccess;
    dladdr(function, &found);
    fprintf(stderr, "no kernel can run here: %s\n",
            found.dli_sname ? found.dli_sname : "without a name");
    return last_error = cudaErrorNotSupported;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    return *kernel = (cudaKernel_t)function, cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args,
                               size_t shared, cudaStream_t s) {
    return launch(kernel);
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **args,
                             size_t shared, cudaStream_t s) {
    return launch(function);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
                                void **args) {
    return launch(function);
}
cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute what, int value) {
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->ptxVersion = out->binaryVersion = 90;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *f,
                                                                   int threads, size_t shared,
                                                                   unsigned g) {
    return *out = 2048 / (threads ? threads : 1), cudaSuccess;
}
