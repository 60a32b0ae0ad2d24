/* A CUDA runtime without a GPU, preloaded in place of the real one: four devices whose memory is
 * the host's.
 *
 * Memory, copies, streams and events are those that torch asks for, done at once. A kernel cannot
 * run here: its launch is an error, unless the caller has said that it computes the result itself
 * (dry_allow_launches). Every call that stops the host until the device is done is reported to
 * dry_watch. Functions that are not here are the real runtime's, which finds no driver and says so.
 */
#define _GNU_SOURCE /* dladdr */
#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DEVICE_BYTES (16ull << 30)
/* One for each rank that is simulated in a process, and with it a thread of autograd. */
#define DEVICES 4

/* Hidden, so that no other library finds them. */
#pragma GCC visibility push(hidden)
extern _Thread_local cudaError_t last_error;
extern _Thread_local int current; /* device */
cudaError_t stopped(const char *call);
#pragma GCC visibility pop
