/* What the preload library adds to a small copy: the hooked cudaMemcpyAsync, which the program's own calls reach, and the real one of
   libcudart in turns. preload.py builds and runs it.

       preload LIBCUDART PAIRS

   Prints a JSON line for each direction, size and way of timing: the medians of both, and of the differences of the pairs, in us. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef int copy_async(void *to, const void *from, size_t size, int kind, void *stream);
typedef int synchronize(void *stream);

enum { TO_GPU = 1, FROM_GPU = 2, LARGE = 8 << 20 };

static void fail(const char *what, const char *why) {
    fprintf(stderr, "preload: %s: %s\n", what, why ? why : "not found");
    exit(2);
}

static void *find(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found) fail(name, dlerror());
    return found;
}

static void check(const char *what, int error) {
    if (error) {
        fprintf(stderr, "preload: %s: CUDA error %d\n", what, error);
        exit(2);
    }
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

static double median(double *values, int count) {
    qsort(values, count, sizeof *values, by_value);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

int main(int count, char **words) {
    if (count != 3) fail("usage", "preload LIBCUDART PAIRS");
    int pairs = atoi(words[2]);
    void *library = dlopen(words[1], RTLD_NOW | RTLD_GLOBAL);
    if (!library) fail(words[1], dlerror());
    if (pairs < 1) fail("PAIRS", "must be 1 or more");
    /* Under LD_PRELOAD the preloaded library comes first in the global scope; a library's own handle begins with the library. */
    copy_async *copies[2] = {(copy_async *)find(library, "cudaMemcpyAsync"), (copy_async *)find(RTLD_DEFAULT, "cudaMemcpyAsync")};
    if (copies[0] == copies[1]) fail("cudaMemcpyAsync", "is libcudart's own: run this under LD_PRELOAD=libglake_preload.so");
    synchronize *wait = (synchronize *)find(library, "cudaStreamSynchronize");
    void *host, *device, *stream;
    check("cudaHostAlloc", ((int (*)(void **, size_t, unsigned))find(library, "cudaHostAlloc"))(&host, LARGE, 0));
    check("cudaMalloc", ((int (*)(void **, size_t))find(library, "cudaMalloc"))(&device, LARGE));
    check("cudaStreamCreateWithFlags", ((int (*)(void **, unsigned))find(library, "cudaStreamCreateWithFlags"))(&stream, 1));
    /* Large ones first, until the engine and its relays are there: after that the least size that it takes is settled. */
    double begin = now();
    do {
        check("a copy of 8 MiB", copies[1](device, host, LARGE, TO_GPU, stream));
        check("cudaStreamSynchronize", wait(stream));
    } while (now() - begin < 5e6);
    double *times[3];
    for (int i = 0; i < 3; i++) times[i] = malloc(pairs * sizeof(double));
    for (int kind = TO_GPU; kind <= FROM_GPU; kind++)
        for (size_t size = 4 << 10; size <= 512 << 10; size *= 2)
            for (int synced = 0; synced < 2; synced++) {
                void *to = kind == TO_GPU ? device : host, *from = kind == TO_GPU ? host : device;
                for (int pair = -50; pair < pairs; pair++) {
                    double taken[2];
                    for (int turn = 0; turn < 2; turn++) {
                        int which = (turn + pair) & 1; /* each goes first in every second pair */
                        double start = now();
                        int error = copies[which](to, from, size, kind, stream);
                        if (synced) error |= wait(stream);
                        taken[which] = now() - start;
                        check("a small copy", error);
                        if (!synced) check("cudaStreamSynchronize", wait(stream));
                    }
                    if (pair < 0) continue;
                    for (int which = 0; which < 2; which++) times[which][pair] = taken[which];
                    times[2][pair] = taken[1] - taken[0];
                }
                printf("{\"direction\": \"%s\", \"bytes\": %zu, \"synced\": %s, \"pairs\": %d, \"real_us\": %.3f, \"hooked_us\": %.3f, "
                       "\"difference_us\": %.3f}\n",
                       kind == TO_GPU ? "h2d" : "d2h", size, synced ? "true" : "false", pairs, median(times[0], pairs),
                       median(times[1], pairs), median(times[2], pairs));
            }
    return 0;
}
