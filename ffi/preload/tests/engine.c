/* An unchanged program's copies under the real libgmlake.so, on its simulated GPUs: taken by the engine, over relays
   once these are ready, every byte compared. What is not taken reaches the stand-ins for CUDA's libraries, which count
   it. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <time.h>

#include "program.h"

#include "../../include/gmlake.h"

enum { DEVICE = 0, PATIENCE = 60 };

/* The preloaded library takes the file that the process has loaded; the program calls nothing of it that copies. */
static void *library;

static void *found(const char *name) {
    void *function = dlsym(library, name);
    if (function == NULL) fprintf(stderr, "%s\n", dlerror());
    CHECK(function != NULL);
    return function;
}

#define ITS(name) ((__typeof__(&name))found(#name))

static void done(int32_t status) {
    if (status != GLAKE_OK) fprintf(stderr, "libgmlake.so: %s\n", ITS(glake_last_error)());
    CHECK(status == GLAKE_OK);
}

static unsigned char *pinned(size_t size) {
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(start != MAP_FAILED);
    done(ITS(glake_host_register)(start, size));
    return start;
}

/* Words that tell their place and their copy. */
static void fill(unsigned char *bytes, size_t size, uint64_t copy) {
    for (size_t i = 0; i < size; i += 8) {
        uint64_t word = (i + 1) * 0x9e3779b97f4a7c15u ^ copy * 0xd6e8feb86659fd93u;
        memcpy(bytes + i, &word, size - i < 8 ? size - i : 8);
    }
}

/* What the engine's statistics say. */
struct told {
    bool ready;
    unsigned long long split, lost, over_relays;
};

static unsigned long long number_after(const char *text, const char *key, const char *end) {
    const char *at = strstr(text, key);
    CHECK(at != NULL && (end == NULL || at < end));
    return strtoull(at + strlen(key), NULL, 10);
}

static struct told told(void) {
    char *text = ITS(glake_copy_stats_json)();
    CHECK(text != NULL);
    struct told told = {
        .ready = strstr(text, "\"ready\":true") != NULL,
        .split = number_after(text, "\"split_copies\":", NULL),
        .lost = number_after(text, "\"lost_copies\":", NULL),
    };
    const char *path = strstr(text, "\"paths\":[");
    CHECK(path != NULL);
    const char *last = strchr(path, ']');
    for (path = strchr(path, '{'); path != NULL && path < last; path = strchr(path + 1, '{')) {
        const char *end = strchr(path, '}');
        CHECK(end != NULL);
        if (number_after(path, "\"relay\":", end) == number_after(path, "\"target\":", end)) continue;
        told.over_relays += number_after(path, "\"bytes\":", end);
    }
    ITS(glake_string_free)(text);
    return told;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* The ways to copy: the runtime's and the driver's, that return at once or when the bytes are there. */
enum way { LATER, RUNTIME, DRIVER_LATER, DRIVER, WAYS };

static void copy(enum way way, void *target, const void *source, size_t size, int kind, void *stream) {
    bool in = kind == HOST_TO_DEVICE;
    switch (way) {
    case LATER: CHECK(cudaMemcpyAsync(target, source, size, kind, stream) == 0); break;
    case RUNTIME: CHECK(cudaMemcpy(target, source, size, kind) == 0); break;
    case DRIVER_LATER:
        CHECK((in ? cuMemcpyHtoDAsync_v2 : cuMemcpyDtoHAsync_v2)(target, source, size, stream) == 0);
        break;
    default: CHECK((in ? cuMemcpyHtoD_v2 : cuMemcpyDtoH_v2)(target, source, size) == 0); break;
    }
}

static void wait_for(void *stream) { done(ITS(glake_stream_synchronize)(DEVICE, stream)); }

/* Copies that reached CUDA's libraries. */
static int passed(void) { return cudart.calls + cuda.calls; }

static int over_relays(void) {
    const size_t most = 64 * MIB, sizes[] = {16 * MIB, 24 * MIB + 4096, 64 * MIB, 16 * MIB + 5};
    const char *file = getenv("GLAKE_LIBRARY");
    CHECK(file != NULL);
    library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) fprintf(stderr, "%s\n", dlerror());
    CHECK(library != NULL);
    alarm(180); /* a build without optimization moves some GiB here */

    unsigned char *block = ITS(gmlake_malloc)(most, DEVICE, NULL);
    CHECK(block != NULL);
    unsigned char *source = pinned(most), *other = pinned(most), *back = pinned(most);
    void *stream = NULL;
    done(ITS(glake_stream_create)(DEVICE, &stream));
    uint64_t seed = 0;

    /* Right from the first one on, whoever makes it, until relays carry what goes each way by each way of asking. */
    double end = now() + PATIENCE;
    for (int turn = 0; turn < 2 * WAYS; turn++) {
        int kind = turn % 2 ? DEVICE_TO_HOST : HOST_TO_DEVICE;
        for (bool carried = false; !carried;) {
            CHECK(now() < end); /* relays are made in the background */
            struct told before = told();
            cuda.calls = cudart.calls = 0;
            bool in = kind == HOST_TO_DEVICE;
            unsigned char *from_here = in ? source : block, *to_there = in ? block : back;
            fill(from_here, 16 * MIB, ++seed);
            copy(turn / 2, to_there, from_here, 16 * MIB, kind, stream);
            wait_for(stream);
            CHECK(memcmp(to_there, from_here, 16 * MIB) == 0);
            struct told after = told();
            carried = after.over_relays > before.over_relays;
            /* It is the engine's or CUDA's, and not both's. */
            CHECK(!carried || passed() == 0);
            CHECK(carried || passed() > 0 || after.ready);
            if (!carried) usleep(10000);
        }
    }
    CHECK(told().ready);

    for (unsigned s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int turn = 0; turn < 2 * WAYS; turn++) {
            size_t size = sizes[s];
            int kind = turn % 2 ? DEVICE_TO_HOST : HOST_TO_DEVICE;
            bool in = kind == HOST_TO_DEVICE;
            unsigned char *from_here = in ? source : block, *to_there = in ? block : back;
            fill(from_here, size, ++seed);
            memset(to_there, 0, most);
            struct told before = told();
            cuda.calls = cudart.calls = 0;
            copy(turn / 2, to_there, from_here, size, kind, stream);
            /* A copy that is to be there when the call returns is. */
            if (turn / 2 == LATER || turn / 2 == DRIVER_LATER) wait_for(stream);
            CHECK(memcmp(to_there, from_here, size) == 0);
            for (size_t i = size; i < most; i++) CHECK(to_there[i] == 0);
            struct told after = told();
            CHECK(passed() == 0);
            CHECK(after.split == before.split + 1 && after.over_relays > before.over_relays && after.lost == 0);
        }

    /* In the order of the stream: the later copy's bytes are there, and what is copied back behind it are these. */
    fill(source, most, ++seed);
    fill(other, most, ++seed);
    memset(back, 0, most);
    cuda.calls = cudart.calls = 0;
    copy(LATER, block, source, most, HOST_TO_DEVICE, stream);
    copy(LATER, block, other, most, HOST_TO_DEVICE, stream);
    copy(LATER, back, block, most, DEVICE_TO_HOST, stream);
    wait_for(stream);
    CHECK(passed() == 0 && memcmp(block, other, most) == 0 && memcmp(back, other, most) == 0);

    /* What is small is CUDA's, once. */
    struct told before = told();
    memset(block, 0, MIB);
    copy(LATER, block, source, MIB - 1, HOST_TO_DEVICE, stream);
    CHECK(cudart.calls == 1 && memcmp(block, source, MIB - 1) == 0 && block[MIB - 1] == 0);
    CHECK(told().split == before.split);

    ITS(gmlake_free)(block, most, DEVICE, NULL);
    done(ITS(glake_stream_destroy)(DEVICE, stream));
    unsigned char *host[] = {source, other, back};
    for (int i = 0; i < 3; i++) done(ITS(glake_host_unregister)(host[i]));
    return 0;
}

RUN({"over-relays", over_relays})
