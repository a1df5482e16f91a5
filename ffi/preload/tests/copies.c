/* What becomes of a copy. */
#define _GNU_SOURCE
#include "program.h"

int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t size, void *stream);

static int small(void) {
    all_native(MIB - 1);
    all_native(0);
    CHECK(gmlake() == NULL);
    return 0;
}

/* libgmlake.so is there, and has nothing to take copies with; or there is none. */
static int without(void) { return all_native(4 * MIB); }

static int of_another_kind(void) {
    struct record *engine = opened();
    static const int kinds[] = {HOST_TO_HOST, DEVICE_TO_DEVICE, 5, -1};
    for (int i = 0; i < 4 * COUNT; i++) {
        if (!ALL[i % COUNT].runtime) continue;
        forget();
        CHECK(make(&ALL[i % COUNT], 4 * MIB, kinds[i / COUNT]) == 0);
        was_native(&ALL[i % COUNT], 4 * MIB, kinds[i / COUNT]);
        CHECK(engine->calls == 0);
    }
    CHECK(cuMemcpyDtoDAsync_v2(to, from, 4 * MIB, STREAM) == 0 && engine->calls == 0);
    return 0;
}

static int not_taken(void) {
    struct record *engine = opened();
    static const int answers[] = {1, 2, 5};
    for (int i = 0; i < 3 * COUNT; i++) {
        const struct copies *with = &ALL[i % COUNT];
        forget();
        engine->answer = answers[i / COUNT];
        CHECK(make(with, 3 * MIB, HOST_TO_DEVICE) == 0);
        was_asked(with, 3 * MIB);
        was_native(with, 3 * MIB, HOST_TO_DEVICE);
        CHECK(memcmp(to, from, 3 * MIB) == 0 && cudaGetLastError() == 0);
    }
    return 0;
}

static int failed(void) {
    struct record *engine = opened();
    static const int answers[][2] = {{3, 999}, {-700, 700}, {-1, 1}, {77, 999}};
    for (int i = 0; i < 4 * COUNT; i++) {
        const struct copies *with = &ALL[i % COUNT];
        forget();
        engine->answer = answers[i / COUNT][0];
        int error = answers[i / COUNT][1], kept = with->runtime ? error : 0;
        CHECK(make(with, 3 * MIB, DEVICE_TO_HOST) == error);
        was_asked(with, 3 * MIB);
        CHECK(cuda.calls == 0 && cudart.calls == 0);
        CHECK(cudaPeekAtLastError() == kept && cudaPeekAtLastError() == kept && cudaGetLastError() == kept);
        CHECK(cudaPeekAtLastError() == 0 && cudaGetLastError() == 0);
    }
    /* The later failure is the last one, whoever met it. */
    engine->answer = -700;
    CHECK(make(&ALL[COUNT - 1], 3 * MIB, HOST_TO_DEVICE) == 700);
    cudart.answer = 11;
    CHECK(make(&ALL[COUNT - 1], 100, HOST_TO_DEVICE) == 11);
    CHECK(cudaPeekAtLastError() == 11 && cudaGetLastError() == 11 && cudaGetLastError() == 0);
    CHECK(make(&ALL[COUNT - 1], 100, HOST_TO_DEVICE) == 11);
    CHECK(make(&ALL[COUNT - 1], 3 * MIB, HOST_TO_DEVICE) == 700);
    CHECK(cudaPeekAtLastError() == 700 && cudaGetLastError() == 700 && cudaGetLastError() == 0);
    return 0;
}

/* A start that failed is not tried again at each copy. */
static int unavailable(void) {
    struct record *engine = opened();
    engine->answer = 4;
    engine->current = 0;
    CHECK(make(&ALL[0], 2 * MIB, 0) == 0 && engine->calls == 1);
    was_native(&ALL[0], 2 * MIB, 0);
    all_native(2 * MIB);
    CHECK(engine->calls == 0);
    return 0;
}

static struct record *at_the_end;

static void copy_at_the_end(void) {
    forget();
    CHECK(make(&ALL[0], 2 * MIB, 0) == 0 && at_the_end->calls == 1);
    was_native(&ALL[0], 2 * MIB, 0);
    puts("ended");
    fflush(stdout);
}

/* What has started and answers no more is at its end, and so is the program. */
static int ended(void) {
    at_the_end = opened();
    at_the_end->answer = 4;
    atexit(copy_at_the_end);
    return 0;
}

static int without_a_context(void) {
    struct record *engine = opened();
    cuda.current = 0;
    all_native(2 * MIB);
    CHECK(engine->calls == 0);
    return 0;
}

static int with_an_old_runtime(void) {
    cudart.current = 11080;
    struct record *engine = opened();
    for (int i = 0; i < COUNT; i++) {
        forget();
        CHECK(make(&ALL[i], 2 * MIB, HOST_TO_DEVICE) == 0 && engine->calls == !ALL[i].runtime);
        if (ALL[i].runtime) was_native(&ALL[i], 2 * MIB, HOST_TO_DEVICE);
    }
    return 0;
}

RUN(
{"taken", taken},
    {"small", small},
    {"without", without},
    {"of-another-kind", of_another_kind},
    {"not-taken", not_taken},
    {"failed", failed},
    {"unavailable", unavailable},
    {"ended", ended},
    {"without-a-context", without_a_context},
    {"with-an-old-runtime", with_an_old_runtime})
