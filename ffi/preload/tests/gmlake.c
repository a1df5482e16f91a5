/* libgmlake.so that records what it is asked and answers as it is told. Built without COPIES, it is one of before there were
   copies; with another ABI or RELEASE, of another version; SLOW, one that takes its time to be loaded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <unistd.h>

#include "stand_in.h"

#ifndef ABI
#define ABI 2
#endif
#ifndef RELEASE
#define RELEASE "0.1.0"
#endif

struct record gmlake = {.current = 1};

uint32_t glake_abi(void) { return ABI; }
const char *glake_version(void) { return RELEASE; }
bool glake_started(void) { return gmlake.current; }
const char *glake_last_error(void) { return "the stand-in was told to fail"; }

#ifdef SLOW
__attribute__((constructor)) static void load(void) { usleep(600000); }
#endif

#ifdef COPIES
int32_t glake_copy_try(void *to, const void *from, size_t size, void *stream, uint32_t flags) {
    __atomic_add_fetch(&gmlake.calls, 1, __ATOMIC_SEQ_CST);
    gmlake.last = (struct call){"glake_copy_try", to, from, size, -1, stream, flags};
    if (gmlake.answer != 0) return gmlake.answer;
    /* By the name that every program's call goes through, to show that this one passes. */
    int (*copy)(void *, const void *, size_t, void *) =
        (int (*)(void *, const void *, size_t, void *))dlsym(RTLD_DEFAULT, "cuMemcpyHtoDAsync_v2");
    return copy(to, from, size, stream) ? 3 : 0;
}
#endif
