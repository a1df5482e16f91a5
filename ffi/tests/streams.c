/* Threads and streams. Handle 1 (and null) is the legacy default stream, 2 the calling thread's own. */
#include <pthread.h>

#include "check.h"

static void *const OWN = (void *)2;

enum { THREADS = 8, ROUNDS = 2000, KEPT = 16 };

struct worker {
    pthread_t thread;
    unsigned number;
};

/* Each thread allocates on its own stream or the legacy one, marks its blocks, and finds its marks again. */
static void *work(void *argument) {
    struct worker *self = argument;
    unsigned char *kept[KEPT] = {NULL};
    size_t sizes[KEPT] = {0};
    unsigned random = self->number * 2654435761u + 1;
    for (int round = 0; round < ROUNDS; round++) {
        random = random * 1664525u + 1013904223u;
        int place = (random >> 8) % KEPT;
        if (kept[place] != NULL) {
            unsigned char mark = (unsigned char)(self->number * KEPT + (unsigned)place);
            CHECK(kept[place][0] == mark && kept[place][sizes[place] - 1] == mark);
            OK(glake_free(kept[place]));
        }
        sizes[place] = random % 3 ? 1 + random % 60000 : MIB + random % (6 * MIB);
        kept[place] = block_of((int)(random >> 4) % 2, sizes[place], random % 5 ? OWN : NULL);
        kept[place][0] = kept[place][sizes[place] - 1] = (unsigned char)(self->number * KEPT + (unsigned)place);
    }
    for (int place = 0; place < KEPT; place++) OK(glake_free(kept[place]));
    return NULL;
}

static void threads_share_the_pools(void) {
    struct worker workers[THREADS];
    for (unsigned i = 0; i < THREADS; i++) {
        workers[i].number = i;
        CHECK(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(workers[i].thread, NULL) == 0);
    for (int device = 0; device < 2; device++) {
        CHECK(stats_of(device).all.allocation.current == 0 && stats_of(device).num_ooms == 0);
        OK(glake_trim(device, 0, NULL));
        CHECK(stats_of(device).all.reserved_bytes.current == 0);
    }
}

static void *fail(void *unused) {
    (void)unused;
    CHECK(strcmp(glake_last_error(), "") == 0);
    FAILS(glake_free(&unused), GLAKE_INVALID, "never handed out");
    return NULL;
}

static void *free_it(void *block) {
    OK(glake_free(block));
    return NULL;
}

static void run(void *(*body)(void *), void *argument) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, body, argument) == 0 && pthread_join(thread, NULL) == 0);
}

static void errors_are_of_the_thread_that_met_them(void) {
    FAILS(glake_alloc(77, 1, NULL, &(void *){NULL}), GLAKE_INVALID, "device 77");
    run(fail, NULL);
    CHECK(strstr(glake_last_error(), "device 77") != NULL);
}

static void any_thread_may_free(void) {
    void *block = block_of(0, 3 * MIB, OWN);
    run(free_it, block);
    void *again = block_of(0, 3 * MIB, OWN);
    CHECK(again == block);
    OK(glake_free(again));
}

/* Bytes that another stream used are nobody's until all work of that moment is done. */
static void a_recorded_block_is_withheld(void *stream) {
    OK(glake_trim(0, 0, NULL));
    void *block = block_of(0, 40 * MIB, NULL);
    OK(glake_record_stream(block, stream));
    OK(glake_pool_begin(0, 1, 1, NULL, NULL, NULL));
    OK(glake_free(block));
    glake_device_stats stats = stats_of(0);
    CHECK(stats.all.allocation.current == 0 && stats.all.active_bytes.current == (int64_t)(40 * MIB));
    OK(glake_pool_end(0, 1, 1));
    OK(glake_pool_release(0, 1, 1));
    OK(glake_trim(0, 0, NULL));
    CHECK(stats_of(0).all.active_bytes.current == 0 && stats_of(0).all.reserved_bytes.current == 0);
}

/* Pending bytes are another stream's once all work of the moment of the free is done. */
static void streams_are_made_and_destroyed(void) {
    void *one = NULL, *two = NULL;
    OK(glake_stream_create(0, &one));
    OK(glake_stream_create(0, &two));
    CHECK(one != two && one != NULL);
    OK(glake_trim(0, 0, NULL));
    void *block = block_of(0, 40 * MIB, one);
    OK(glake_free(block));
    OK(glake_trim(0, UINT64_MAX, NULL));
    int64_t reserved = stats_of(0).all.reserved_bytes.current;
    void *other = block_of(0, 40 * MIB, two);
    CHECK(stats_of(0).all.reserved_bytes.current == reserved);
    OK(glake_free(other));
    OK(glake_stream_destroy(0, one));
    FAILS(glake_stream_destroy(0, one), GLAKE_INVALID, "GPU 0 has no stream 0x");
    FAILS(glake_stream_destroy(1, two), GLAKE_INVALID, "GPU 1 has no stream 0x");
    FAILS(glake_stream_create(0, NULL), GLAKE_INVALID, "out is null");
    OK(glake_stream_destroy(0, two));
}

/* What the library costs: a hit makes no call of the driver and allocates nothing. */
static void hits_cost_nothing(void) {
    void *block = block_of(1, 9 * MIB, NULL);
    OK(glake_free(block));
    OK(glake_trim(1, UINT64_MAX, NULL));
    uint64_t heap = glake_heap_allocations();
    for (int i = 0; i < 1000; i++) {
        OK(glake_alloc(1, 9 * MIB, NULL, &block));
        OK(glake_free(block));
    }
    CHECK(heap > 0 && glake_heap_allocations() - heap < 500); /* the thread that ticks has some */
    uint64_t calls = 0, microseconds = 0;
    OK(glake_driver_calls(&calls, &microseconds));
    OK(glake_driver_calls(NULL, NULL));
    CHECK(calls > 10);
}

int main(void) {
    OK(glake_start());
    threads_share_the_pools();
    errors_are_of_the_thread_that_met_them();
    any_thread_may_free();
    a_recorded_block_is_withheld(OWN);
    void *of_another_gpu = NULL;
    OK(glake_stream_create(1, &of_another_gpu));
    a_recorded_block_is_withheld(of_another_gpu);
    OK(glake_stream_destroy(1, of_another_gpu));
    streams_are_made_and_destroyed();
    hits_cost_nothing();
    return 0;
}
