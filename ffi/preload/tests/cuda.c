/* libcuda.so.1 of a machine without one: the copies move bytes at once. */
#include <string.h>

#include "stand_in.h"

struct record cuda = {.current = 1};

static int copied(const char *name, void *to, const void *from, size_t size, void *stream) {
    __atomic_add_fetch(&cuda.calls, 1, __ATOMIC_SEQ_CST);
    cuda.last = (struct call){name, to, from, size, -1, stream, 0};
    if (cuda.answer == 0) memmove(to, from, size);
    return cuda.answer;
}

#define NOW(name) \
    int name(void *to, const void *from, size_t size) { return copied(#name, to, from, size, NULL); }
#define LATER(name) \
    int name(void *to, const void *from, size_t size, void *stream) { return copied(#name, to, from, size, stream); }

NOW(cuMemcpy)
NOW(cuMemcpy_ptds)
NOW(cuMemcpyHtoD_v2)
NOW(cuMemcpyHtoD_v2_ptds)
NOW(cuMemcpyDtoH_v2)
NOW(cuMemcpyDtoH_v2_ptds)
LATER(cuMemcpyAsync)
LATER(cuMemcpyAsync_ptsz)
LATER(cuMemcpyHtoDAsync_v2)
LATER(cuMemcpyHtoDAsync_v2_ptsz)
LATER(cuMemcpyDtoHAsync_v2)
LATER(cuMemcpyDtoHAsync_v2_ptsz)
/* No hook knows this one. */
LATER(cuMemcpyDtoDAsync_v2)

int cuCtxGetCurrent(void **context) {
    *context = cuda.current ? &cuda : NULL;
    return 0;
}

int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags);
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *outcome);

int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *outcome) {
    const struct {
        const char *name;
        int since;
        void *legacy, *own;
    } functions[] = {
        {"cuMemcpy", 4000, cuMemcpy, cuMemcpy_ptds},
        {"cuMemcpyHtoD", 3020, cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds},
        {"cuMemcpyHtoD", 2000, &cuda, &cuda}, /* the first one, of 32 bits */
        {"cuMemcpyDtoH", 3020, cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds},
        {"cuMemcpyAsync", 4000, cuMemcpyAsync, cuMemcpyAsync_ptsz},
        {"cuMemcpyHtoDAsync", 3020, cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz},
        {"cuMemcpyDtoHAsync", 3020, cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz},
        {"cuMemcpyDtoDAsync", 3020, cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2},
        {"cuGetProcAddress", 12000, cuGetProcAddress_v2, cuGetProcAddress_v2},
        {"cuGetProcAddress", 11030, cuGetProcAddress, cuGetProcAddress},
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        if (strcmp(functions[i].name, name) != 0 || functions[i].since > version) continue;
        *found = flags & 2 ? functions[i].own : functions[i].legacy;
        if (outcome != NULL) *outcome = 0;
        return 0;
    }
    *found = NULL;
    if (outcome != NULL) *outcome = 1;
    return 0;
}

int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
    int outcome = 0;
    cuGetProcAddress_v2(name, found, version, flags, &outcome);
    return outcome ? 500 : 0;
}
