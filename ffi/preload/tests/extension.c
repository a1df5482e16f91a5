/* What late.c loads. */
#include <stddef.h>

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream);

int extended(void *to, const void *from, size_t size) { return cudaMemcpyAsync(to, from, size, 4, NULL); }
