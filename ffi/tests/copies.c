/* Copies: every size, direction, kind of memory and stream, by every function; misuse; threads. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

static void *const LEGACY = (void *)1;
static void *const OWN = (void *)2;

enum { GPUS = 4, THREADS = 4 };

/* Pinned host memory, whole pages. */
static unsigned char *pinned(size_t size) {
    size = (size + 4095) & ~(size_t)4095;
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(start != MAP_FAILED);
    OK(glake_host_register(start, size));
    return start;
}

static void unpinned(void *start, size_t size) {
    OK(glake_host_unregister(start));
    CHECK(munmap(start, (size + 4095) & ~(size_t)4095) == 0);
}

/* Words that tell their place and their text. */
static uint64_t word(size_t place, unsigned seed) { return (place + 1) * 0x9e3779b97f4a7c15u ^ seed; }

static void fill(unsigned char *bytes, size_t size, unsigned seed) {
    for (size_t i = 0; i < size; i += 8) {
        uint64_t here = word(i, seed);
        memcpy(bytes + i, &here, size - i < 8 ? size - i : 8);
    }
}

static void check(const unsigned char *bytes, size_t size, unsigned seed) {
    for (size_t i = 0; i < size; i += 8) {
        uint64_t here = word(i, seed);
        CHECK(memcmp(bytes + i, &here, size - i < 8 ? size - i : 8) == 0);
    }
}

static void *stream_of(int device) {
    void *stream = NULL;
    OK(glake_stream_create(device, &stream));
    return stream;
}

/* There and back, through every way to wait. */
static void there_and_back(int device, unsigned char *host, unsigned char *back, size_t size, void *stream, unsigned seed) {
    unsigned char *block = block_of(device, size, NULL);
    fill(host, size, seed);
    memset(back, 0, size);
    OK(glake_copy_async(block, host, size, stream, GLAKE_COPY_BLOCKING, NULL));
    check(block, size, seed);
    uint64_t handle = 77;
    OK(glake_copy_async(back, block, size, stream, 0, &handle));
    OK(glake_copy_wait(handle));
    check(back, size, seed);
    FAILS(glake_copy_wait(handle), GLAKE_INVALID, "no copy has the handle");

    /* Ordered: the second overwrites the first, and the way back sees the second. */
    memset(back, 0, size);
    fill(host, size, seed + 1);
    OK(glake_copy_async(block, host, size, stream, GLAKE_COPY_CRITICAL, NULL));
    OK(glake_copy_async(back, block, size, stream, GLAKE_COPY_BACKGROUND, NULL));
    OK(glake_copy_async(block, host, size, stream, GLAKE_COPY_DIRECT, &handle));
    bool done = false;
    for (int i = 0; i < 200000 && !done; i++) {
        OK(glake_copy_done(handle, &done));
        usleep(50);
    }
    CHECK(done);
    OK(glake_copy_wait(handle));
    check(back, size, seed + 1);
    OK(glake_copy_async(back, block, size, stream, GLAKE_COPY_BLOCKING | GLAKE_COPY_VERIFY, &handle));
    CHECK(handle == 0);
    OK(glake_copy_wait(handle));
    OK(glake_free(block));
}

static void every_size_and_memory(void) {
    const size_t sizes[] = {1, 511, 4096, 300001, 3 * MIB + 5, 12 * MIB};
    const size_t most = 12 * MIB;
    unsigned char *host = pinned(most), *back = pinned(most);
    unsigned char *pageable = malloc(most), *other = malloc(most);
    CHECK(pageable != NULL && other != NULL);
    void *stream = stream_of(1), *streams[] = {NULL, LEGACY, OWN, stream};
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (unsigned s = 0; s < 4; s++) {
            there_and_back(s == 3, host, back, sizes[i], streams[s], i * 8 + s);
            there_and_back(s == 3, pageable, other, sizes[i], streams[s], i * 8 + s + 100);
        }
        there_and_back(1, host + 3, back + 1, sizes[i] - (sizes[i] > 5 ? 3 : 0), stream, 5);
    }
    OK(glake_stream_destroy(1, stream));
    free(pageable);
    free(other);
    unpinned(host, most);
    unpinned(back, most);
}

/* Between GPUs and between host buffers a copy is the driver's own. */
static void neither_end_is_the_other_side(void) {
    const size_t size = 2 * MIB;
    unsigned char *one = block_of(0, size, NULL), *two = block_of(0, size, NULL);
    unsigned char *host = pinned(size), *back = malloc(size);
    fill(host, size, 9);
    uint64_t handle = 0;
    OK(glake_copy_async(one, host, size, NULL, GLAKE_COPY_BLOCKING, NULL));
    OK(glake_copy_async(two, one, size, NULL, GLAKE_COPY_BLOCKING, NULL));
    check(two, size, 9);
    OK(glake_copy_async(back, host, size, NULL, 0, &handle));
    OK(glake_copy_wait(handle));
    check(back, size, 9);
    CHECK(glake_copy_try(two, one, size, NULL, 0) == 1 && glake_copy_try(back, host, size, NULL, 0) == 1);
    OK(glake_free(one));
    OK(glake_free(two));
    unpinned(host, size);
    free(back);
}

static void lists(void) {
    enum { COUNT = 700 };
    const size_t size = 16 << 10;
    unsigned char *host = pinned(COUNT * size), *back = pinned(COUNT * size), *block = block_of(0, COUNT * size, NULL);
    glake_copy_block there[COUNT], here[COUNT];
    fill(host, COUNT * size, 3);
    for (size_t i = 0; i < COUNT; i++) {
        size_t place = i * 37 % COUNT;
        there[i] = (glake_copy_block){block + place * size, host + i * size, size};
        here[i] = (glake_copy_block){back + i * size, block + place * size, size};
    }
    there[5].size = there[6].size = here[5].size = here[6].size = 1; /* and of other sizes */
    uint64_t handle = 0;
    OK(glake_copy_list(there, COUNT, OWN, 0, &handle));
    OK(glake_copy_wait(handle));
    OK(glake_copy_list(here, COUNT, OWN, GLAKE_COPY_BLOCKING, &handle));
    CHECK(handle == 0);
    for (size_t i = 0; i < COUNT; i++) {
        size_t length = there[i].size;
        CHECK(memcmp(back + i * size, host + i * size, length) == 0);
        CHECK(length == size || back[i * size + 1] == 0);
    }
    OK(glake_copy_list(there, 3, OWN, GLAKE_COPY_BLOCKING, NULL));
    OK(glake_copy_list(NULL, 0, OWN, GLAKE_COPY_BLOCKING, NULL));
    OK(glake_copy_list(NULL, 0, OWN, 0, &handle));
    OK(glake_copy_wait(handle));
    FAILS(glake_copy_list(NULL, 3, OWN, 0, NULL), GLAKE_INVALID, "blocks is null");
    there[7].from = NULL;
    FAILS(glake_copy_list(there, COUNT, OWN, 0, NULL), GLAKE_INVALID, "from is null");
    OK(glake_free(block));
    unpinned(host, COUNT * size);
    unpinned(back, COUNT * size);
}

static void one_to_all(void) {
    for (size_t size = 1000; size < 20 * MIB; size *= 19) {
        unsigned char *host = pinned(size), *blocks[GPUS];
        void *to[GPUS];
        fill(host, size, 60);
        for (int i = 0; i < GPUS; i++) to[i] = blocks[i] = block_of(i, size, NULL);
        uint64_t handle = 0;
        OK(glake_copy_to_all(to, GPUS, host, size, NULL, 0, &handle));
        OK(glake_copy_wait(handle));
        for (int i = 0; i < GPUS; i++) {
            check(blocks[i], size, 60);
            memset(blocks[i], 0, size);
        }
        OK(glake_copy_to_all(to, GPUS, host, size, OWN, GLAKE_COPY_BLOCKING, NULL));
        for (int i = 0; i < GPUS; i++) {
            check(blocks[i], size, 60);
            OK(glake_free(blocks[i]));
        }
        OK(glake_copy_to_all(NULL, 0, host, size, OWN, GLAKE_COPY_BLOCKING, NULL));
        FAILS(glake_copy_to_all(NULL, 2, host, size, OWN, 0, NULL), GLAKE_INVALID, "to is null");
        unpinned(host, size);
    }
}

static void mistakes(void) {
    char bytes[8] = "", *block = block_of(0, 8, NULL);
    uint64_t handle = 5;
    bool done = true;
    FAILS(glake_copy_async(block, bytes, 8, NULL, 3, NULL), GLAKE_INVALID, "flags 0x3 ask for priority 3");
    FAILS(glake_copy_async(block, bytes, 8, NULL, 0x100, NULL), GLAKE_INVALID, "have 0x100, which means nothing");
    FAILS(glake_copy_async(block, bytes, 8, NULL, GLAKE_COPY_VERIFY, NULL), GLAKE_INVALID, "GLAKE_COPY_VERIFY needs GLAKE_COPY_BLOCKING");
    FAILS(glake_copy_async(NULL, bytes, 8, NULL, 0, &handle), GLAKE_INVALID, "to is null: it must point to the 8 bytes");
    FAILS(glake_copy_async(block, NULL, 8, NULL, 0, &handle), GLAKE_INVALID, "from is null: it must point to the 8 bytes");
    CHECK(handle == 5);
    FAILS(glake_copy_wait(123456789), GLAKE_INVALID, "handle 123456789: it was waited for before, or never given");
    FAILS(glake_copy_done(123456789, &done), GLAKE_INVALID, "handle 123456789");
    FAILS(glake_copy_done(0, NULL), GLAKE_INVALID, "done is null");
    FAILS(glake_copy_async(block, bytes, 8, (void *)0x1234567, 0, NULL), GLAKE_DRIVER, "");
    FAILS(glake_host_register(bytes, 8), GLAKE_DRIVER, "");
    FAILS(glake_host_unregister(bytes), GLAKE_DRIVER, "");
    FAILS(glake_stream_synchronize(9, NULL), GLAKE_INVALID, "device 9");
    OK(glake_copy_async(NULL, NULL, 0, NULL, 0, &handle));
    OK(glake_copy_wait(handle));
    OK(glake_copy_done(0, &done));
    CHECK(done);
    OK(glake_copy_wait(0));
    OK(glake_free(block));
}

static bool stats_say(const char *text) {
    char *stats = glake_copy_stats_json();
    CHECK(stats != NULL);
    bool says = strstr(stats, text) != NULL;
    glake_string_free(stats);
    return says;
}

static void *copies(void *number) {
    int device = (int)(size_t)number;
    const size_t size = 6 * MIB;
    unsigned char *host = pinned(size), *back = pinned(size);
    void *stream = stream_of(device);
    for (unsigned i = 0; i < 6; i++) {
        there_and_back(device, host, back, size - i * 1000, stream, i);
        there_and_back(0, host, back, size - i * 1000, i % 2 ? NULL : OWN, i);
    }
    /* The thread's own default stream by a flag. */
    unsigned char *block = block_of(0, size, OWN);
    fill(host, size, 1);
    OK(glake_copy_async(block, host, size, NULL, GLAKE_COPY_PTDS, NULL));
    OK(glake_stream_synchronize(0, OWN));
    check(block, size, 1);
    OK(glake_free(block));
    OK(glake_stream_destroy(device, stream));
    unpinned(host, size);
    unpinned(back, size);
    return NULL;
}

static void threads_at_once(void) {
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, copies, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

static void without_relays_nothing_is_taken(void) {
    unsigned char *block = block_of(0, 4 * MIB, NULL), *host = pinned(4 * MIB);
    CHECK(stats_say("\"multi_path\":false") && stats_say("\"relays\":[]"));
    CHECK(glake_copy_try(block, host, 4 * MIB, NULL, 0) == 1);
    OK(glake_free(block));
    unpinned(host, 4 * MIB);
}

static void relays_take_what_is_large(void) {
    const size_t size = 16 * MIB;
    unsigned char *block = block_of(0, size, NULL), *host = pinned(size);
    fill(host, size, 41);
    CHECK(glake_copy_try(block, host, 4096, NULL, 0) == 1 && stats_say("\"split_copies\":0"));
    CHECK(glake_copy_try(block, host, size, NULL, GLAKE_COPY_BLOCKING) == 0);
    check(block, size, 41);
    CHECK(!stats_say("\"split_copies\":0") && stats_say("\"relay\":3,"));
    memset(host, 0, size);
    CHECK(glake_copy_try(host, block, size, NULL, 0) == 0);
    OK(glake_stream_synchronize(-1, NULL));
    check(host, size, 41);
    CHECK(glake_copy_try(host, block, size, NULL, GLAKE_COPY_DIRECT) == 1);
    CHECK(glake_copy_try(host, block, size, NULL, 0x500) == GLAKE_INVALID);
    OK(glake_free(block));
    unpinned(host, size);
}

/* What was pinned a few copies before is not asked for again: the bytes are right all the same. */
static void memory_is_pinned_no_more(void) {
    const size_t size = 8 * MIB;
    unsigned char *block = block_of(0, size, NULL), *host = pinned(size);
    void *stream = stream_of(0);
    for (unsigned seed = 1; seed < 8; seed++) {
        if (seed == 4) OK(glake_host_unregister(host));
        fill(host, size, seed);
        uint64_t handle = 0;
        OK(glake_copy_async(block, host, size, stream, 0, &handle));
        OK(glake_copy_wait(handle));
        check(block, size, seed);
        memset(host, 0, size);
        OK(glake_copy_async(host, block, size, stream, 0, &handle));
        OK(glake_copy_wait(handle));
        check(host, size, seed);
    }
    OK(glake_stream_destroy(0, stream));
    OK(glake_free(block));
    CHECK(munmap(host, size) == 0);
}

int main(void) {
    /* This program uses all GPUs. */
    OK(glake_configure(NULL, NULL, "transfer.shared_gpus = true"));
    CHECK(stats_say("\"native_copies\":0"));
    every_size_and_memory();
    neither_end_is_the_other_side();
    lists();
    one_to_all();
    mistakes();
    without_relays_nothing_is_taken();
    threads_at_once();
    CHECK(!stats_say("\"native_copies\":0,"));
    OK(glake_multi_path(1));
    OK(glake_multi_path(1));
    CHECK(stats_say("\"multi_path\":true"));
    for (int i = 0; i < 20000 && !stats_say("\"ready\":true"); i++) usleep(1000);
    CHECK(stats_say("\"ready\":true") && stats_say("\"relays\":[0,1,2,3]") && stats_say("\"split_copies\":0"));
    relays_take_what_is_large();
    memory_is_pinned_no_more();
    every_size_and_memory();
    neither_end_is_the_other_side();
    lists();
    one_to_all();
    threads_at_once();
    OK(glake_multi_path(0));
    CHECK(stats_say("\"multi_path\":false") && stats_say("\"relays\":[]"));
    every_size_and_memory();
    for (int i = 0; i < GPUS; i++) CHECK(stats_of(i).all.allocation.current == 0);
    return 0;
}
