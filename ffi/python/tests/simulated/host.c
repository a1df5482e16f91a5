/* torch's pluggable allocator on the host's memory, which stands for a GPU's. */
#include <stdlib.h>
#include <sys/types.h>

void *host_malloc(ssize_t bytes, int device, void *stream) {
  (void)device, (void)stream;
  return malloc((size_t)bytes);
}
void host_free(void *block, ssize_t bytes, int device, void *stream) {
  (void)bytes, (void)device, (void)stream;
  free(block);
}
