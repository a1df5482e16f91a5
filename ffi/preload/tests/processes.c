/* Threads, forks, and what it all costs. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/wait.h>
#include <time.h>

#include "program.h"

int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *outcome);

enum { THREADS = 8, ROUNDS = 50 };

static void *copy_at_once(void *argument) {
    size_t size = MIB + 4096 * (size_t)argument;
    unsigned char *mine = malloc(size), *there = malloc(size);
    for (int i = 0; i < ROUNDS; i++) {
        memset(mine, i + 1, size);
        const struct copies *with = &ALL[((size_t)argument + (size_t)i) % COUNT];
        int error = with->runtime && with->later ? with->make(there, mine, size, DEFAULT, STREAM)
                    : with->runtime              ? with->make(there, mine, size, DEFAULT)
                    : with->later                ? with->make(there, mine, size, STREAM)
                                                 : with->make(there, mine, size);
        CHECK(error == 0 && memcmp(mine, there, size) == 0);
    }
    free(mine);
    free(there);
    return NULL;
}

static int threads(void) {
    pthread_t all[THREADS];
    for (size_t i = 0; i < THREADS; i++) CHECK(pthread_create(&all[i], NULL, copy_at_once, (void *)i) == 0);
    for (size_t i = 0; i < THREADS; i++) CHECK(pthread_join(all[i], NULL) == 0);
    /* Those that came while one opened the library went on natively. */
    int asked = gmlake()->calls;
    CHECK(asked > 0 && asked <= THREADS * ROUNDS && cuda.calls == THREADS * ROUNDS);
    return 0;
}

static void child_of(int (*body)(void)) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(20);
        exit(body());
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static int asks_nobody(void) {
    all_native(2 * MIB);
    CHECK(gmlake()->calls == 0);
    void *found = NULL;
    CHECK(cuGetProcAddress_v2("cuMemcpyAsync", &found, 12000, 0, NULL) == 0 && found != (void *)cuMemcpyAsync);
    return 0;
}

static int forked(void) {
    child_of(taken);
    opened();
    child_of(asks_nobody);
    return taken();
}

static void *copy_once(void *unused) {
    (void)unused;
    CHECK(cuMemcpy(to, from, 2 * MIB) == 0);
    return NULL;
}

/* libgmlake.so takes its time to be loaded: a child that is forked meanwhile has nobody who will be done with it. */
static int forked_meanwhile(void) {
    pthread_t opener;
    CHECK(pthread_create(&opener, NULL, copy_once, NULL) == 0);
    usleep(200000);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(20);
        cuda.calls = 0;
        for (int i = 0; i < COUNT; i++) CHECK(make(&ALL[i], 2 * MIB, DEFAULT) == 0 && cuda.calls == i + 1);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(pthread_join(opener, NULL) == 0 && gmlake()->calls == 1);
    return 0;
}

/* One that is loaded serves, whatever GLAKE_LIBRARY names. */
static int loaded_before(void) {
    CHECK(dlopen(getenv("STAND_IN_LIBRARY"), RTLD_NOW | RTLD_LOCAL) != NULL);
    return taken();
}

/* A few ns over the real function: the median of both, one after the other. */
static double median_ns(int (*copy)()) {
    enum { TIMES = 1000, EACH = 20 };
    static double taken_ns[TIMES];
    for (int i = 0; i < TIMES; i++) {
        struct timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        for (int j = 0; j < EACH; j++) copy(to, from, 8, STREAM);
        clock_gettime(CLOCK_MONOTONIC, &end);
        taken_ns[i] = ((double)(end.tv_sec - begin.tv_sec) * 1e9 + (double)(end.tv_nsec - begin.tv_nsec)) / EACH;
    }
    for (int i = 1; i < TIMES; i++)
        for (int j = i; j > 0 && taken_ns[j] < taken_ns[j - 1]; j--) {
            double other = taken_ns[j];
            taken_ns[j] = taken_ns[j - 1];
            taken_ns[j - 1] = other;
        }
    return taken_ns[TIMES / 2];
}

static int fast(void) {
    int (*real)() = (int (*)())dlsym(dlopen("libcuda.so.1", RTLD_LAZY), "cuMemcpyAsync");
    CHECK(real != cuMemcpyAsync);
    opened();
    double native = median_ns(real), ours = median_ns(cuMemcpyAsync);
    printf("a small copy: native %.1f ns, under the preload library %.1f ns\n", native, ours);
    CHECK(ours < native + 500);
    return 0;
}

RUN(
    {"threads", threads},
    {"forked", forked},
    {"forked-meanwhile", forked_meanwhile},
    {"loaded-before", loaded_before},
    {"fast", fast})
