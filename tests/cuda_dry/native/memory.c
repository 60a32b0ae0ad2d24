/* Memory of the devices and of the host; see standin.h. All of it is the host's, and a copy is made
 * when it is asked for.
 *
 * Fresh memory is filled with bytes 0xff, so that floats read before they are written are not
 * numbers.
 */
#include "standin.h"
#include <pthread.h>

#define BLOCKS 65536

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
