/* An allocator that a program brings for one torch.cuda.MemPool, and whose memory it may unmap and map again while tensors live in it,
   as serving engines do that put a worker to sleep. Built by own_allocators.py. */
#include <stdlib.h>
#include <sys/types.h>

#include <cuda.h>

static struct segment { CUdeviceptr at; size_t bytes; CUmemGenericAllocationHandle handle; int device, mapped; } segments[4096];
static int used;
int own_given, own_taken, own_wrong;

static struct segment *find(CUdeviceptr at) {
  for (int i = 0; i < used; i++)
    if (segments[i].at != 0 && segments[i].at <= at && at < segments[i].at + segments[i].bytes) return &segments[i];
  return NULL;
}

/* 0, or CUDA's error. */
int own_map(CUdeviceptr inside) {
  struct segment *s = find(inside);
  CUmemAllocationProp p = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, s->device}};
  CUmemAccessDesc access = {.location = p.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CUresult error = cuMemCreate(&s->handle, s->bytes, &p, 0);
  if (!error) error = cuMemMap(s->at, s->bytes, 0, s->handle, 0);
  if (!error) error = cuMemSetAccess(s->at, s->bytes, &access, 1);
  s->mapped = !error;
  return error;
}

int own_unmap(CUdeviceptr inside) {
  struct segment *s = find(inside);
  CUresult error = cuMemUnmap(s->at, s->bytes);
  if (!error) error = cuMemRelease(s->handle);
  s->mapped = 0;
  return error;
}

void *own_alloc(ssize_t bytes, int device, CUstream stream) {
  const size_t whole = ((size_t)bytes + (2 << 20) - 1) >> 21 << 21;
  CUdeviceptr at = 0;
  (void)stream;
  if (used == 4096 || cuMemAddressReserve(&at, whole, 0, 0, 0)) return NULL;
  segments[used] = (struct segment){at, whole, 0, device, 0};
  used++;
  if (own_map(at)) {
    segments[used - 1].at = 0;
    cuMemAddressFree(at, whole);
    return NULL;
  }
  own_given++;
  return (void *)at;
}

void own_free(void *block, ssize_t bytes, int device, CUstream stream) {
  struct segment *s = find((CUdeviceptr)block);
  (void)bytes, (void)device, (void)stream;
  if (s == NULL || s->at != (CUdeviceptr)block || !s->mapped || own_unmap(s->at)) {
    own_wrong++;
    return;
  }
  cuMemAddressFree(s->at, s->bytes);
  s->at = 0;
  own_taken++;
}
