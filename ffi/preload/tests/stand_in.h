/* What the stand-ins for CUDA's libraries and for libgmlake.so tell the test program of the calls that reached them. */
#ifndef GLAKE_PRELOAD_TESTS_STAND_IN_H
#define GLAKE_PRELOAD_TESTS_STAND_IN_H

#include <stddef.h>
#include <stdint.h>

/* One copy that reached a library. */
struct call {
    const char *name;
    void *to;
    const void *from;
    size_t size;
    int kind; /* of the runtime; -1 elsewhere */
    void *stream;
    uint32_t flags; /* of libgmlake.so */
};

/* All of a library's, and how it is to answer. */
struct record {
    int calls; /* atomic */
    struct call last;
    int answer;
    int current; /* libcuda: whether there is a context; libcudart: its version; libgmlake: whether it has started */
};

#endif
