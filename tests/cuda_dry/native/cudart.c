/* A CUDA runtime without a GPU, preloaded in place of the real one: four devices whose memory is
 * the host's.
 *
 * Memory, copies, streams and events are those that torch asks for, done at once. A kernel cannot
 * run here: its launch is an error, unless the caller has said that it computes the result itself
 * (dry_allow_launches). Every call that stops the host until the device is done is reported to
 * dry_watch. Functions that are not here are the real runtime's, which finds no driver and says so.
 *
 * Fresh device memory is filled with bytes 0xff, so that floats read before they are written are
 * not numbers.
 */
#define _GNU_SOURCE /* dladdr */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define DEVICE_BYTES (16ull << 30)
#define BLOCKS 65536
/* One for each rank that is simulated in a process, and with it a thread of autograd. */
#define DEVICES 4

/* ---- what the tests ask of this file */

typedef void (*Watch)(const char *call);

static _Atomic(Watch) watch;
static _Thread_local int launches_allowed;
static _Thread_local cudaError_t last_error;
static _Thread_local int current;

void dry_watch(Watch wanted) { watch = wanted; }
void dry_allow_launches(int allowed) { launches_allowed = allowed; }

static cudaError_t stopped(const char *call) {
    Watch wanted = watch;
    if (wanted) wanted(call);
    return cudaSuccess;
}

/* ---- memory */

static struct Block {
    char *start;
    size_t bytes;
    enum cudaMemoryType type;
    int device;
} blocks[BLOCKS];
static int known;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static cudaError_t take(void **out, size_t bytes, enum cudaMemoryType type) {
    bytes = bytes ? bytes : 1;
    if (bytes > DEVICE_BYTES || posix_memalign(out, 4096, bytes))
        return last_error = cudaErrorMemoryAllocation;
    memset(*out, 0xff, bytes);
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < known && blocks[i].start) i++;
    if (i == BLOCKS) abort();
    if (i == known) known++;
    blocks[i] = (struct Block){*out, bytes, type, current};
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static cudaError_t give(void *start) {
    if (!start) return cudaSuccess;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < known && blocks[i].start != start) i++;
    if (i < known) blocks[i].start = NULL;
    pthread_mutex_unlock(&lock);
    if (i == known) return last_error = cudaErrorInvalidValue;
    free(start);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t bytes) { return take(out, bytes, cudaMemoryTypeDevice); }
cudaError_t cudaMallocManaged(void **out, size_t bytes, unsigned f) {
    return take(out, bytes, cudaMemoryTypeManaged);
}
cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned f) {
    return take(out, bytes, cudaMemoryTypeHost);
}
cudaError_t cudaFree(void *start) { return give(start); }
cudaError_t cudaFreeHost(void *start) { return give(start); }
cudaError_t cudaHostGetDevicePointer(void **out, void *host, unsigned f) {
    return *out = host, cudaSuccess;
}
cudaError_t cudaMemAdvise(const void *p, size_t n, enum cudaMemoryAdvise a,
                          struct cudaMemLocation at) {
    return cudaSuccess;
}
cudaError_t cudaMemPrefetchAsync(const void *p, size_t n, struct cudaMemLocation at, unsigned f,
                                 cudaStream_t s) {
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *unused, size_t *all) {
    return *unused = *all = DEVICE_BYTES, cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p) {
    const char *at = p;
    memset(out, 0, sizeof *out);
    out->type = cudaMemoryTypeUnregistered;
    out->device = -1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < known; i++) {
        if (blocks[i].start && at >= blocks[i].start && at < blocks[i].start + blocks[i].bytes) {
            out->type = blocks[i].type;
            out->device = blocks[i].device;
            out->devicePointer = out->hostPointer = (void *)at;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s) {
    memmove(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    memmove(to, from, bytes);
    return stopped("cudaMemcpy");
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t s) {
    return memset(to, value, bytes), cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    return memset(to, value, bytes), cudaSuccess;
}

/* ---- the device */

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

/* ---- streams and events: work is done when it is queued, but the host learns of it as it would of
 * a GPU's
 *
 * An event is known to have passed once the host has waited for it, or for its stream after it. So
 * code that asks before it waits is told to wait here, as it would be on a busy GPU. Who asks a
 * hundred times is let through.
 */

struct Stream {
    atomic_long recorded, known;
};
struct Event {
    struct Stream *stream;
    long number;
    double ms;
    int asked;
};
static struct Stream default_stream; /* of all devices */

static struct Stream *stream_of(cudaStream_t s) {
    return (uintptr_t)s < 4096 ? &default_stream : (struct Stream *)s;
}

static cudaError_t new_stream(cudaStream_t *out) {
    return (*out = calloc(1, sizeof(struct Stream))) ? cudaSuccess
                                                     : (last_error = cudaErrorMemoryAllocation);
}

cudaError_t cudaStreamCreate(cudaStream_t *out) { return new_stream(out); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned f) { return new_stream(out); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned f, int priority) {
    return new_stream(out);
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
    return cudaSuccess;
} /* not freed: events may point to it */
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *out) { return *out = 0, cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    struct Stream *stream = stream_of(s);
    stream->known = (long)stream->recorded;
    return stopped("cudaStreamSynchronize");
}
cudaError_t cudaDeviceSynchronize(void) { return stopped("cudaDeviceSynchronize"); }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *out) {
    return *out = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *out,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    *out = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

static struct Event *event_of(cudaEvent_t e) { return (struct Event *)e; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned f) {
    return (*out = calloc(1, sizeof(struct Event))) ? cudaSuccess
                                                    : (last_error = cudaErrorMemoryAllocation);
}
cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return free(e), cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t e) {
    struct Event *event = event_of(e);
    if (!event->stream || event->number <= event->stream->known || ++event->asked > 100)
        return cudaSuccess;
    return last_error = cudaErrorNotReady;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    struct Stream *stream = stream_of(s);
    *event_of(e) = (struct Event){stream, atomic_fetch_add(&stream->recorded, 1) + 1, now_ms(), 0};
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) {
    return cudaEventRecord(e, s);
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    struct Event *event = event_of(e);
    if (event->stream && event->number > event->stream->known) event->stream->known = event->number;
    return stopped("cudaEventSynchronize");
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    return *ms = (float)(event_of(b)->ms - event_of(a)->ms), cudaSuccess;
}
