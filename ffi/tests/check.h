/* What the C tests have in common: a failed check says where and ends the program. */
#ifndef GLAKE_TESTS_CHECK_H
#define GLAKE_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gmlake.h"

#define CHECK(holds)                                                                                       \
    do {                                                                                                   \
        if (!(holds)) {                                                                                    \
            fprintf(stderr, "%s:%d: %s does not hold; last error: %s\n", __FILE__, __LINE__, #holds,       \
                    glake_last_error());                                                                   \
            exit(1);                                                                                       \
        }                                                                                                  \
    } while (0)

/* The call succeeds. */
#define OK(call) CHECK((call) == GLAKE_OK)

/* The call fails with this status, and the text says this. */
#define FAILS(call, status, says)                                                                          \
    do {                                                                                                   \
        CHECK((call) == (status));                                                                         \
        CHECK(strstr(glake_last_error(), says) != NULL);                                                   \
    } while (0)

#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

static inline void *block_of(int device, size_t size, void *stream) {
    void *block = NULL;
    OK(glake_alloc(device, size, stream, &block));
    CHECK(block != NULL);
    return block;
}

static inline glake_device_stats stats_of(int device) {
    glake_device_stats stats;
    OK(glake_stats(device, &stats));
    return stats;
}

#endif
