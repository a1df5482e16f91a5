/* The calls of CUDA's runtime that torch makes where no kernel runs, so that torch starts on a machine without a GPU and its tensors
   can be made, copied and freed on simulated memory, which is memory. Preloaded into the process; everything else fails there. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>

#include <cuda_runtime_api.h>

static __thread int device;
static char streams[4096];
static int used_streams = 16;

/* What the tests ask about afterwards. */
int peer_copies;
int peer_accesses;
int last_peer_access; /* 10 * from + to */

cudaError_t cudaGetDeviceCount(int *count) { *count = atoi(getenv("SIMULATED_DEVICES")); return cudaSuccess; }
cudaError_t cudaGetDevice(int *current) { *current = device; return cudaSuccess; }
cudaError_t cudaSetDevice(int wanted) { device = wanted; return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { *free = 1ull << 30; *total = 64ull << 30; return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  (void)flags, (void)priority;
  *stream = (cudaStream_t)&streams[__sync_fetch_and_add(&used_streams, 16)];
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { (void)stream; return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { (void)stream; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  (void)stream;
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { (void)mode; return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  (void)kind;
  memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  (void)stream;
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes, cudaStream_t stream) {
  (void)to_device, (void)from_device, (void)stream;
  peer_copies++;
  memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int from, int to) { *can = from != to; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  (void)flags;
  peer_accesses++;
  last_peer_access = 10 * device + peer;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int of) {
  (void)of;
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "simulated");
  properties->totalGlobalMem = 64ull << 30;
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int of) {
  (void)attribute, (void)of;
  *value = 1;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { (void)flags; *event = (cudaEvent_t)malloc(8); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { (void)event, (void)stream; return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { (void)flags; return cudaEventRecord(event, stream); }
cudaError_t cudaEventQuery(cudaEvent_t event) { (void)event; return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { (void)event; return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { (void)stream, (void)event, (void)flags; return cudaSuccess; }

/* An allocator that a program brings along, and what it was asked for. Memory that its owner has unmapped cannot be touched. */
static struct segment { char *at; size_t bytes; int mapped; } segments[1024];
static int used_segments;
size_t own_room = 1ull << 40;
int own_given;
int own_taken;
int own_wrong; /* Asked to free what it does not have, or has unmapped. */
void (*own_called)(void); /* Called by it each time, if a test says so. */

static struct segment *own_segment(const void *address) {
  for (int at = 0; at < used_segments; at++)
    if (segments[at].at != NULL && segments[at].at <= (const char *)address && (const char *)address < segments[at].at + segments[at].bytes)
      return &segments[at];
  return NULL;
}
void *own_alloc(ssize_t bytes, int on, cudaStream_t stream) {
  (void)on, (void)stream;
  if (own_called != NULL) own_called();
  if ((size_t)bytes > own_room || used_segments == 1024) return NULL;
  void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return NULL;
  own_given++;
  own_room -= bytes;
  segments[used_segments++] = (struct segment){at, bytes, 1};
  return at;
}
void own_free(void *at, ssize_t bytes, int on, cudaStream_t stream) {
  (void)on, (void)stream;
  if (own_called != NULL) own_called();
  struct segment *segment = own_segment(at);
  if (segment == NULL || segment->at != at || segment->bytes != (size_t)bytes || !segment->mapped) {
    own_wrong++;
    return;
  }
  own_taken++;
  own_room += bytes;
  munmap(at, bytes);
  segment->at = NULL;
}
void own_map(void *inside, int mapped) {
  struct segment *segment = own_segment(inside);
  segment->mapped = mapped;
  mprotect(segment->at, segment->bytes, mapped ? PROT_READ | PROT_WRITE : PROT_NONE);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
  const struct segment *segment = own_segment(address);
  memset(attributes, 0, sizeof *attributes);
  attributes->type = segment != NULL && segment->mapped ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
