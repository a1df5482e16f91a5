/* libcudart.so of a machine without one. As in no real one, its copies call the driver by names that a preloaded library may
   take: so the tests see that these calls pass. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

#include "stand_in.h"

int cuMemcpyAsync(void *to, const void *from, size_t size, void *stream);

struct record cudart = {.current = 13000};
static __thread int last_error;

static int copied(const char *name, void *to, const void *from, size_t size, int kind, void *stream) {
    __atomic_add_fetch(&cudart.calls, 1, __ATOMIC_SEQ_CST);
    cudart.last = (struct call){name, to, from, size, kind, stream, 0};
    int error = cudart.answer ? cudart.answer : cuMemcpyAsync(to, from, size, stream);
    if (error) last_error = error;
    return error;
}

#define NOW(name) \
    int name(void *to, const void *from, size_t size, int kind) { return copied(#name, to, from, size, kind, NULL); }
#define LATER(name)                                                                     \
    int name(void *to, const void *from, size_t size, int kind, void *stream) {         \
        return copied(#name, to, from, size, kind, stream);                             \
    }

NOW(cudaMemcpy)
NOW(cudaMemcpy_ptds)
LATER(cudaMemcpyAsync)
LATER(cudaMemcpyAsync_ptsz)

int cudaRuntimeGetVersion(int *version) {
    *version = cudart.current;
    return 0;
}

int cudaPeekAtLastError(void) { return last_error; }

int cudaGetLastError(void) {
    int error = last_error;
    last_error = 0;
    return error;
}

static int entry(const char *name, void **found, unsigned version, unsigned long long flags, int *outcome) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    int (*look)(const char *, void **, int, uint64_t, int *) =
        (int (*)(const char *, void **, int, uint64_t, int *))dlsym(driver, "cuGetProcAddress_v2");
    return look(name, found, (int)version, flags, outcome);
}

int cudaGetDriverEntryPoint(const char *name, void **found, unsigned long long flags, int *outcome) {
    return entry(name, found, (unsigned)cudart.current, flags, outcome);
}
int cudaGetDriverEntryPoint_ptsz(const char *name, void **found, unsigned long long flags, int *outcome) {
    return entry(name, found, (unsigned)cudart.current, flags ? flags : 2, outcome);
}
int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags,
                                     int *outcome) {
    return entry(name, found, version, flags, outcome);
}
int cudaGetDriverEntryPointByVersion_ptsz(const char *name, void **found, unsigned version, unsigned long long flags,
                                          int *outcome) {
    return entry(name, found, version, flags ? flags : 2, outcome);
}
