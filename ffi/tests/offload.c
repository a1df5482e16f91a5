/* Bytes of blocks that go to host memory and come back to other blocks: there is nothing to wait for but streams. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { THREADS = 4 };

static void *stream_of(int device) {
    void *stream = NULL;
    OK(glake_stream_create(device, &stream));
    return stream;
}

static void fill(unsigned char *bytes, size_t size, unsigned seed) {
    for (size_t i = 0; i < size; i++) bytes[i] = (unsigned char)((i * 31 >> 7) + seed * 101);
}

static void check(const unsigned char *bytes, size_t size, size_t skipped, unsigned seed) {
    for (size_t i = 0; i < size; i++) CHECK(bytes[i] == (unsigned char)(((i + skipped) * 31 >> 7) + seed * 101));
}

static uint64_t offloaded(const void *bytes, uint64_t size, void *stream) {
    uint64_t id = 0;
    OK(glake_offload_begin(bytes, size, stream, &id));
    CHECK(id > 0);
    return id;
}

/* A figure of the report. */
static long long figure(const char *name) {
    char key[64], *json = glake_offload_stats_json();
    CHECK(json != NULL);
    snprintf(key, sizeof key, "\"%s\":", name);
    char *found = strstr(json, key);
    CHECK(found != NULL);
    long long value = atoll(found + strlen(key));
    glake_string_free(json);
    return value;
}

static void there_and_back(int device, size_t size, unsigned seed) {
    void *stream = stream_of(device);
    unsigned char *block = block_of(device, size, stream);
    fill(block, size, seed);
    uint64_t generation = 0, other = 0;
    OK(glake_generation(block + size / 2, &generation));
    uint64_t whole = offloaded(block, size, stream);
    uint64_t part = offloaded(block + size / 3, size / 5, stream);
    CHECK(whole != part);
    OK(glake_free(block));
    unsigned char *next = block_of(device, size, stream), *back = block_of(device, size, stream);
    OK(glake_generation(next, &other));
    CHECK(generation != other);
    OK(glake_stream_synchronize(device, stream)); /* the program's own order: the host writes */
    OK(glake_offload_reload(whole, back, stream));
    OK(glake_offload_wait(whole, stream));
    OK(glake_offload_reload(part, next, stream));
    OK(glake_offload_wait(part, stream));
    OK(glake_stream_synchronize(device, stream));
    check(back, size, 0, seed);
    check(next, size / 5, size / 3, seed);
    OK(glake_offload_reload(whole, next, stream)); /* again, to other memory */
    OK(glake_offload_wait(whole, NULL));
    OK(glake_offload_wait(whole, stream));
    OK(glake_stream_synchronize(device, stream));
    check(next, size, 0, seed);
    OK(glake_offload_release(whole));
    OK(glake_offload_release(part));
    OK(glake_free(next));
    OK(glake_free(back));
    OK(glake_stream_destroy(device, stream));
}

static void every_size(void) {
    const size_t sizes[] = {40, 511, 4096, 300001, 3 * MIB + 5, 12 * MIB};
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) there_and_back(i % 2, sizes[i], i);
    CHECK(figure("entries") == 0 && figure("host_bytes") == 0);
    CHECK(figure("copies_out") == 12 && figure("copies_in") == 18 && figure("refused") == 0);
}

static void what_is_refused_stays_where_it_is(void) {
    unsigned char *block = block_of(0, 2 * MIB, NULL), here[64];
    fill(block, 2 * MIB, 3);
    uint64_t id = 77, value = 0;
    FAILS(glake_offload_begin(here, sizeof here, NULL, &id), GLAKE_UNSUPPORTED, "no memory of this library's");
    CHECK(id == 0);
    FAILS(glake_generation(here, &value), GLAKE_UNSUPPORTED, "no memory of this library's");
    FAILS(glake_offload_begin(block + MIB, 2 * MIB, NULL, &id), GLAKE_INVALID, "do not lie in it");
    FAILS(glake_offload_begin(block, MIB, NULL, NULL), GLAKE_INVALID, "id is null");
    FAILS(glake_offload_release(12345), GLAKE_INVALID, "released before, or never given");
    FAILS(glake_offload_wait(12345, NULL), GLAKE_INVALID, "released before, or never given");
    FAILS(glake_offload_prepare(99, MIB), GLAKE_INVALID, "does not exist");
    id = offloaded(block, 2 * MIB, NULL);
    FAILS(glake_offload_wait(id, NULL), GLAKE_INVALID, "begin to reload it first");
    FAILS(glake_offload_reload(id, here, NULL), GLAKE_UNSUPPORTED, "no memory of this library's");
    unsigned char *theirs = block_of(1, 2 * MIB, NULL), *small = block_of(0, MIB, NULL);
    FAILS(glake_offload_reload(id, theirs, NULL), GLAKE_INVALID, "copy it on");
    FAILS(glake_offload_reload(id, small, NULL), GLAKE_INVALID, "do not lie in it");
    check(block, 2 * MIB, 0, 3);
    OK(glake_offload_release(id));
    FAILS(glake_offload_release(id), GLAKE_INVALID, "released before, or never given");
    FAILS(glake_offload_reload(id, block, NULL), GLAKE_INVALID, "released before, or never given");
    OK(glake_free(block));
    FAILS(glake_offload_begin(block, MIB, NULL, &id), GLAKE_INVALID, "is in no block");
    OK(glake_free(theirs));
    OK(glake_free(small));
    id = offloaded(NULL, 0, NULL);
    OK(glake_offload_reload(id, NULL, NULL));
    OK(glake_offload_wait(id, NULL));
    OK(glake_offload_release(id));
}

/* Reserved memory is filled by the host, comes to blocks, and takes a block's bytes. */
static void reserved_memory_has_one_address(void) {
    uint64_t id = 0;
    void *host = NULL, *again = NULL;
    OK(glake_offload_reserve(0, 2 * MIB, &id));
    OK(glake_offload_host(id, &host));
    fill(host, 2 * MIB, 9);
    unsigned char *block = block_of(0, 2 * MIB, NULL);
    for (int turn = 0; turn < 2; turn++) {
        OK(glake_offload_reload(id, block, NULL));
        OK(glake_offload_wait(id, NULL));
        OK(glake_stream_synchronize(0, NULL));
        check(block, 2 * MIB, 0, turn ? 4 : 9);
        fill(block, 2 * MIB, 4);
        OK(glake_offload_store(id, block, NULL));
        OK(glake_offload_host(id, &again));
        CHECK(again == host);
        check(host, 2 * MIB, 0, 4);
    }
    OK(glake_free(block));
    OK(glake_offload_release(id));
    FAILS(glake_offload_host(id, &host), GLAKE_INVALID, "released before, or never given");
    CHECK(host == NULL);
    FAILS(glake_offload_host(id, NULL), GLAKE_INVALID, "host is null");
    FAILS(glake_offload_reserve(99, MIB, &id), GLAKE_INVALID, "does not exist");
    FAILS(glake_offload_reserve(0, MIB, NULL), GLAKE_INVALID, "id is null");
}

static void streamed_weights_are_moved_in_their_order(void) {
    uint64_t site = 0, bytes[] = {MIB, MIB, MIB, MIB};
    uint32_t blocks[] = {0, 1, 2, 3}, places[8];
    size_t left = 0, begun = 0;
    OK(glake_offload_site_create(&site));
    FAILS(glake_offload_used(site, 0, 1, true, places, 8, &left, &begun), GLAKE_INVALID, "streams 0");
    OK(glake_offload_stream(site, bytes, blocks, 4));
    OK(glake_offload_used(site, 0, 1, true, places, 8, &left, &begun));
    CHECK(left == 0 && begun == 3 && places[0] == 0 && places[2] == 2);
    OK(glake_offload_used(site, 1, 1, false, places, 8, &left, &begun));
    CHECK(left == 1 && begun == 1 && places[0] == 0 && places[1] == 3);
    FAILS(glake_offload_used(site, 0, 7, true, places, 8, &left, &begun), GLAKE_INVALID, "a number from 0 to 2");
    FAILS(glake_offload_used(site, 0, 1, true, places, 1, &left, &begun), GLAKE_INVALID, "room is 1");
    FAILS(glake_offload_stream(site, NULL, blocks, 4), GLAKE_INVALID, "bytes is null");
    OK(glake_offload_site_release(site));
}

static void *work(void *seed) {
    for (unsigned i = 0; i < 12; i++) there_and_back((int)(i % 2), 300001 + i * 100003, (unsigned)(size_t)seed + i);
    return NULL;
}

static void threads_do_not_meet(void) {
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)(i * 50)) == 0);
    for (size_t i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(figure("entries") == 0 && figure("host_bytes") == 0);
}

/* Host memory and the gauges of a device are what they were. */
static void nothing_is_left(void) {
    uint64_t freed = 0;
    OK(glake_trim(-1, 0, &freed));
    CHECK(figure("host_pinned_bytes") == 0 && figure("held_bytes") == 0);
    for (int device = 0; device < 2; device++) CHECK(stats_of(device).all.reserved_bytes.current == 0);
    OK(glake_offload_prepare(0, 5 * MIB));
    CHECK(figure("host_pinned_bytes") >= (long long)(5 * MIB));
    OK(glake_trim(-1, 0, &freed));
}

static void a_forked_child_gives_nothing_up(void) {
    unsigned char *block = block_of(0, 2 * MIB, NULL);
    uint64_t id = offloaded(block, 2 * MIB, NULL), other = 0;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        OK(glake_offload_release(id));
        FAILS(glake_offload_begin(block, 2 * MIB, NULL, &other), GLAKE_UNAVAILABLE, "was forked");
        FAILS(glake_offload_reload(id, block, NULL), GLAKE_UNAVAILABLE, "was forked");
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(glake_offload_release(id));
    OK(glake_free(block));
}

/* Handlers run in reverse: this one after the library's own. */
static uint64_t left[8];
static void at_the_end(void) {
    uint64_t id = 0;
    for (int i = 0; i < 4; i++) CHECK(glake_offload_release(left[i]) == GLAKE_OK);
    CHECK(glake_offload_begin(&id, 1, NULL, &id) == GLAKE_UNAVAILABLE);
}

int main(void) {
    CHECK(atexit(at_the_end) == 0);
    OK(glake_start());
    every_size();
    what_is_refused_stays_where_it_is();
    reserved_memory_has_one_address();
    streamed_weights_are_moved_in_their_order();
    threads_do_not_meet();
    nothing_is_left();
    a_forked_child_gives_nothing_up();
    /* The process ends while copies are under way, and with what nobody releases. */
    unsigned char *block = block_of(0, 64 * MIB, NULL), *target = block_of(0, 64 * MIB, NULL);
    for (int i = 0; i < 8; i++) left[i] = offloaded(block, 64 * MIB, NULL);
    OK(glake_offload_reload(left[5], target, NULL));
    return 0;
}
