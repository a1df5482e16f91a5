/* NCCL's memory as an allocator for torch.cuda.MemPool, from the NCCL that torch has loaded. Built by nccl_pool.py. */
#include <dlfcn.h>
#include <stddef.h>
#include <sys/types.h>

static void *nccl(const char *name) {
  void *loaded = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_LAZY);
  return loaded == NULL ? NULL : dlsym(loaded, name);
}

void *nccl_alloc(ssize_t bytes, int device, void *stream) {
  int (*allocate)(void **, size_t) = (int (*)(void **, size_t))nccl("ncclMemAlloc");
  void *block = NULL;
  (void)device, (void)stream;
  return allocate != NULL && allocate(&block, bytes) == 0 ? block : NULL;
}

void nccl_free(void *block, ssize_t bytes, int device, void *stream) {
  int (*release)(void *) = (int (*)(void *))nccl("ncclMemFree");
  (void)bytes, (void)device, (void)stream;
  if (release != NULL) release(block);
}
