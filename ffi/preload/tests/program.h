/* What the test programs have in common: programs that copy, and know nothing of GLake. Each is run under libglake_preload.so with
   the name of a scenario, and ends with 0 if all that it saw is what it would have seen without that library, and if the engine
   was asked as it should. */
#ifndef GLAKE_PRELOAD_TESTS_PROGRAM_H
#define GLAKE_PRELOAD_TESTS_PROGRAM_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "stand_in.h"

#define CHECK(holds)                                                               \
    do {                                                                           \
        if (!(holds)) {                                                            \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #holds); \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

#define MIB ((size_t)1 << 20)

enum { NORMAL = 0, NOW = 0x10, PTDS = 0x40, TO_GPU = 0x100, FROM_GPU = 0x200 };
enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT };

extern struct record cuda, cudart;

#define DRIVER_NOW(X) \
    X(cuMemcpy, NOW) X(cuMemcpy_ptds, NOW | PTDS) X(cuMemcpyHtoD_v2, NOW | TO_GPU) \
    X(cuMemcpyHtoD_v2_ptds, NOW | PTDS | TO_GPU) X(cuMemcpyDtoH_v2, NOW | FROM_GPU) \
    X(cuMemcpyDtoH_v2_ptds, NOW | PTDS | FROM_GPU)
#define DRIVER_LATER(X) \
    X(cuMemcpyAsync, NORMAL) X(cuMemcpyAsync_ptsz, PTDS) X(cuMemcpyHtoDAsync_v2, TO_GPU) \
    X(cuMemcpyHtoDAsync_v2_ptsz, PTDS | TO_GPU) X(cuMemcpyDtoHAsync_v2, FROM_GPU) \
    X(cuMemcpyDtoHAsync_v2_ptsz, PTDS | FROM_GPU)
#define RUNTIME_NOW(X) X(cudaMemcpy, NOW) X(cudaMemcpy_ptds, NOW | PTDS)
#define RUNTIME_LATER(X) X(cudaMemcpyAsync, NORMAL) X(cudaMemcpyAsync_ptsz, PTDS)

#define DECLARE(name, flags) int name();
DRIVER_NOW(DECLARE) DRIVER_LATER(DECLARE) RUNTIME_NOW(DECLARE) RUNTIME_LATER(DECLARE)
int cudaGetLastError(void);
int cudaPeekAtLastError(void);

/* ---- every function that copies ---- */

struct copies {
    const char *name;
    int (*make)();
    bool runtime, later;
    uint32_t flags;
};

#define ROW_DN(name, flags) {#name, name, false, false, flags},
#define ROW_DL(name, flags) {#name, name, false, true, flags},
#define ROW_RN(name, flags) {#name, name, true, false, flags},
#define ROW_RL(name, flags) {#name, name, true, true, flags},
static const struct copies ALL[] = {
    DRIVER_NOW(ROW_DN) DRIVER_LATER(ROW_DL) RUNTIME_NOW(ROW_RN) RUNTIME_LATER(ROW_RL)};
enum { COUNT = sizeof ALL / sizeof *ALL };

static unsigned char *from, *to;
static void *const STREAM = (void *)0x5742;
/* Of the last copy. */
static int made_kind;

static inline int make(const struct copies *with, size_t size, int kind) {
    made_kind = kind;
    if (with->runtime && with->later) return with->make(to, from, size, kind, STREAM);
    if (with->runtime) return with->make(to, from, size, kind);
    if (with->later) return with->make(to, from, size, STREAM);
    return with->make(to, from, size);
}

/* What libgmlake.so was asked; null while it is not loaded. */
static inline struct record *gmlake(void) {
    void *library = dlopen("libgmlake.so", RTLD_LAZY | RTLD_NOLOAD);
    return library == NULL ? NULL : dlsym(library, "gmlake");
}

static inline void forget(void) {
    memset(to, 0, 4 * MIB);
    cuda.calls = cudart.calls = 0;
    cuda.last = cudart.last = (struct call){0};
    if (gmlake() != NULL) gmlake()->calls = 0;
}

/* The copy reached the real function as it was made, once, and what that calls went to the driver. */
static inline void was_native(const struct copies *with, size_t size, int kind) {
    const struct call *last = with->runtime ? &cudart.last : &cuda.last;
    CHECK((with->runtime ? cudart.calls : cuda.calls) == 1);
    CHECK(strcmp(last->name, with->name) == 0 && last->to == to && last->from == from && last->size == size);
    CHECK(last->kind == (with->runtime ? kind : -1) && last->stream == (with->later ? STREAM : NULL));
}

static inline void was_asked(const struct copies *with, size_t size) {
    const struct record *asked = gmlake();
    CHECK(asked != NULL && asked->calls == 1);
    CHECK(asked->last.to == to && asked->last.from == from && asked->last.size == size);
    CHECK(asked->last.stream == (with->later ? STREAM : NULL));
    /* The runtime's functions say by the kind which way they go, the driver's by their names. */
    uint32_t way = made_kind == HOST_TO_DEVICE ? TO_GPU : made_kind == DEVICE_TO_HOST ? FROM_GPU : 0;
    CHECK(asked->last.flags == (with->flags | (with->runtime ? way : 0)));
}

/* Opens libgmlake.so by a first copy. */
static inline struct record *opened(void) {
    forget();
    CHECK(make(&ALL[0], MIB, 0) == 0 && gmlake() != NULL && gmlake()->calls == 1);
    forget();
    return gmlake();
}

/* Each of them reaches the real function, whatever that answers. */
static inline int all_native(size_t size) {
    for (int i = 0; i < COUNT; i++) {
        forget();
        CHECK(make(&ALL[i], size, HOST_TO_DEVICE) == 0);
        was_native(&ALL[i], size, HOST_TO_DEVICE);
        CHECK(memcmp(to, from, size) == 0);
        cuda.answer = 700;
        CHECK(make(&ALL[i], size, DEFAULT) == 700);
        CHECK(cudaPeekAtLastError() == (ALL[i].runtime ? 700 : 0) && cudaGetLastError() == (ALL[i].runtime ? 700 : 0));
        CHECK(cudaGetLastError() == 0);
        cuda.answer = 0;
    }
    return 0;
}

/* Each of them is the engine's. */
static inline int taken(void) {
    static const size_t sizes[] = {MIB, MIB + 1, 4 * MIB};
    static const int kinds[] = {HOST_TO_DEVICE, DEVICE_TO_HOST, DEFAULT};
    for (int i = 0; i < 3 * COUNT; i++) {
        const struct copies *with = &ALL[i % COUNT];
        size_t size = sizes[i / COUNT];
        forget();
        CHECK(make(with, size, kinds[i / COUNT]) == 0);
        was_asked(with, size);
        /* The engine's own call of the driver went there, and to the engine no more. */
        CHECK(cudart.calls == 0 && cuda.calls == 1 && strcmp(cuda.last.name, "cuMemcpyHtoDAsync_v2") == 0);
        CHECK(memcmp(to, from, size) == 0);
        CHECK(cudaPeekAtLastError() == 0 && cudaGetLastError() == 0);
    }
    return 0;
}

/* Runs the scenario that the first argument names. */
struct scenario {
    const char *name;
    int (*body)(void);
};

static inline int run(int count, char **arguments, const struct scenario *scenarios, size_t known) {
    from = malloc(4 * MIB);
    to = malloc(4 * MIB);
    for (size_t i = 0; i < 4 * MIB; i++) from[i] = (unsigned char)(i * 2654435761u >> 13);
    alarm(60);
    for (size_t i = 0; count == 2 && i < known; i++)
        if (strcmp(arguments[1], scenarios[i].name) == 0) return scenarios[i].body();
    fprintf(stderr, "no such scenario\n");
    return 2;
}

#define RUN(...)                                                                            \
    int main(int count, char **arguments) {                                                 \
        static const struct scenario scenarios[] = {__VA_ARGS__};                           \
        return run(count, arguments, scenarios, sizeof scenarios / sizeof *scenarios);      \
    }

#endif
