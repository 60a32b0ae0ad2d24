/* Streams and events; see standin.h. Work is done when it is queued, but the host learns of it as
 * it would of a GPU's.
 *
 * An event is known to have passed once the host has waited for it, or for its stream after it. So
 * code that asks before it waits is told to wait here, as it would be on a busy GPU. Who asks a
 * hundred times is let through.
 */
#include "standin.h"
#include <time.h>

struct Stream {
    atomic_long recorded, known;
    struct Stream *next;
};
struct Event {
    struct Stream *stream;
    long number;
    double ms;
    int asked;
};
static struct Stream default_stream; /* of all devices */
static struct Stream *_Atomic streams = &default_stream;

static struct Stream *stream_of(cudaStream_t s) {
    return (uintptr_t)s < 4096 ? &default_stream : (struct Stream *)s;
}

static cudaError_t new_stream(cudaStream_t *out) {
    struct Stream *stream = calloc(1, sizeof *stream);
    if (!stream) return last_error = cudaErrorMemoryAllocation;
    stream->next = streams;
    while (!atomic_compare_exchange_weak(&streams, &stream->next, stream)) {
    }
    *out = (cudaStream_t)stream;
    return cudaSuccess;
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
cudaError_t cudaDeviceSynchronize(void) {
    for (struct Stream *stream = streams; stream; stream = stream->next)
        stream->known = (long)stream->recorded;
    return stopped("cudaDeviceSynchronize");
}
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
