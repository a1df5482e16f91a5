/* Copies of an unchanged program between every kind of a GPU's memory and every kind of the host's: the error number
   that comes back, whether every byte is right, whether the context lives, how fast it was. kinds.py builds it, runs it
   without the preload library and under it, and compares.

       kinds NAME [--first N] [--most MIB] [--quick] [--relays SECONDS]

   NAME is a kind of the GPU's memory (malloc async mempool managed vmm ipc pool), or one of wrong, peers, contexts. A
   JSON line a case.
   --first    begins with case N: a program whose context is lost ends with 3, and the next one goes on
   --most     the largest copy (1024; 4, 64 and 1024 MiB are copied)
   --quick    1 GiB only of pinned and of pageable memory, by cudaMemcpyAsync on a made stream and by cudaMemcpy, once
   --relays   how long it copies until libgmlake.so says that its relays are ready (0: it does not ask)

   It needs no header of CUDA's: what it calls is declared here. Only GPU 0 is used, but for `peers`: GPUs that a
   program does not use lend their links. KINDS_LIBRARY names the libgmlake.so whose pool `pool` is of. Bytes on the GPU
   are written and read in blocks of 512 KiB, which no library takes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* ---- what is called of CUDA ---- */

typedef unsigned long long address;
struct ipc_handle { char bytes[64]; };
struct location { int type, id; };
struct pool_properties { int kind, handles; struct location at; void *windows; size_t most; char reserved[128]; };
struct memory_properties { int kind, handles; struct location at; void *windows; unsigned char flags[8]; };
struct access { struct location at; int flags; };

int cudaGetDeviceCount(int *count);
int cudaSetDevice(int device);
int cudaFree(void *memory);
int cudaMalloc(void **memory, size_t size);
int cudaMallocAsync(void **memory, size_t size, void *stream);
int cudaMallocFromPoolAsync(void **memory, size_t size, void *pool, void *stream);
int cudaMemPoolCreate(void **pool, const struct pool_properties *properties);
int cudaMallocManaged(void **memory, size_t size, unsigned flags);
int cudaHostAlloc(void **memory, size_t size, unsigned flags);
int cudaHostRegister(void *memory, size_t size, unsigned flags);
int cudaHostUnregister(void *memory);
int cudaFreeHost(void *memory);
int cudaIpcGetMemHandle(struct ipc_handle *handle, void *memory);
int cudaIpcOpenMemHandle(void **memory, struct ipc_handle handle, unsigned flags);
int cudaStreamCreateWithFlags(void **stream, unsigned flags);
int cudaStreamSynchronize(void *stream);
int cudaDeviceSynchronize(void);
int cudaMemset(void *memory, int value, size_t size);
int cudaMemcpy(void *to, const void *from, size_t size, int kind);
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream);
int cudaGetLastError(void);
int cudaDeviceEnablePeerAccess(int peer, unsigned flags);
int cudaDeviceDisablePeerAccess(int peer);
int cudaDeviceCanAccessPeer(int *can, int device, int peer);

int cuInit(unsigned flags);
int cuDeviceGet(int *device, int index);
int cuCtxCreate_v2(void **context, unsigned flags, int device);
int cuCtxSynchronize(void);
int cuMemAlloc_v2(address *memory, size_t size);
int cuMemHostAlloc(void **memory, size_t size, unsigned flags);
int cuMemsetD8Async(address memory, unsigned char value, size_t size, void *stream);
int cuStreamCreate(void **stream, unsigned flags);
int cuStreamSynchronize(void *stream);
int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t size, void *stream);
int cuMemcpyDtoHAsync_v2(void *to, address from, size_t size, void *stream);
int cuMemCreate(unsigned long long *handle, size_t size, const struct memory_properties *properties,
                unsigned long long flags);
int cuMemAddressReserve(address *at, size_t size, size_t alignment, address wanted, unsigned long long flags);
int cuMemMap(address at, size_t size, size_t offset, unsigned long long handle, unsigned long long flags);
int cuMemSetAccess(address at, size_t size, const struct access *access, size_t count);

enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT };
enum { NON_BLOCKING = 1, PORTABLE = 1, MAPPED = 2, WRITE_COMBINED = 4 };
enum { THREADS = 8, LOST = 3, USAGE = 2, SETUP = 4 };
static const size_t MIB = (size_t)1 << 20, STEP = (size_t)512 << 10;

/* ---- the run ---- */

static const char *name;
static long first, next_case;
static size_t most = (size_t)1 << 30;
static bool quick;
static double relays = 15;
static void *made, *checks; /* streams */
static unsigned char *staging; /* pinned, 64 MiB */
static unsigned char *plain;   /* of cudaMalloc, 512 KiB */

static void fail(const char *what, int error) {
    fprintf(stderr, "kinds %s: %s: error %d\n", name, what, error);
    exit(SETUP);
}

static void check(const char *what, int error) {
    if (error) fail(what, error);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void *mapped(size_t size) {
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) fail("mmap", errno);
    return start;
}

/* ---- patterns: words that tell their place and their copy ---- */

static inline uint64_t word(size_t index, uint64_t seed) {
    return (index + 1) * 0x9e3779b97f4a7c15u ^ seed * 0xd6e8feb86659fd93u;
}

struct share {
    unsigned char *bytes;
    size_t begin, end, offset; /* the pattern's place of the first byte */
    uint64_t seed;
    bool compare;
    size_t wrong;
};

static void *work(void *given) {
    struct share *share = given;
    uint64_t *words = (uint64_t *)share->bytes;
    for (size_t i = share->begin / 8; i < share->end / 8; i++) {
        uint64_t here = word(i + share->offset / 8, share->seed);
        if (share->compare) share->wrong += words[i] != here;
        else words[i] = here;
    }
    return NULL;
}

/* Writes the pattern to memory of the host, or counts the words that differ from it. */
static size_t pattern(void *bytes, size_t size, size_t offset, uint64_t seed, bool compare) {
    pthread_t threads[THREADS];
    struct share shares[THREADS];
    size_t part = (size / THREADS + 4095) & ~(size_t)4095, wrong = 0;
    int count = 0;
    for (size_t begin = 0; begin < size; begin += part, count++) {
        size_t end = begin + part < size ? begin + part : size;
        shares[count] = (struct share){bytes, begin, end, offset, seed, compare, 0};
        if (pthread_create(&threads[count], NULL, work, &shares[count])) fail("a thread", errno);
    }
    for (int i = 0; i < count; i++) {
        pthread_join(threads[i], NULL);
        wrong += shares[i].wrong;
    }
    return wrong;
}

/* Between the GPU and the staging memory, in blocks that pass by every library. */
static int by_blocks(void *to, const void *from, size_t size, int kind) {
    for (size_t at = 0; at < size; at += STEP) {
        size_t part = size - at < STEP ? size - at : STEP;
        int error = cudaMemcpyAsync((char *)to + at, (const char *)from + at, part, kind, checks);
        if (error) return error;
    }
    return cudaStreamSynchronize(checks);
}

/* Memory of the GPU, or memory that only a GPU reads fast: the pattern written to it. */
static void put(unsigned char *memory, size_t size, uint64_t seed) {
    for (size_t at = 0; at < size; at += 64 * MIB) {
        size_t part = size - at < 64 * MIB ? size - at : 64 * MIB;
        pattern(staging, part, at, seed, false);
        check("writing the pattern", by_blocks(memory + at, staging, part, HOST_TO_DEVICE));
    }
}

/* Words that differ there; -1 where it cannot be read. */
static long got(const unsigned char *memory, size_t size, uint64_t seed) {
    size_t wrong = 0;
    for (size_t at = 0; at < size; at += 64 * MIB) {
        size_t part = size - at < 64 * MIB ? size - at : 64 * MIB;
        if (by_blocks(staging, memory + at, part, DEVICE_TO_HOST)) return -1;
        wrong += pattern(staging, part, at, seed, true);
    }
    return (long)wrong;
}

/* As above, of write-combined memory, by way of the GPU: the processor reads it at a hundredth of its speed. */
static long got_combined(const unsigned char *memory, size_t size, uint64_t seed) {
    size_t wrong = 0;
    for (size_t at = 0; at < size; at += STEP) {
        size_t part = size - at < STEP ? size - at : STEP;
        if (cudaMemcpyAsync(plain, memory + at, part, HOST_TO_DEVICE, checks)) return -1;
        if (cudaMemcpyAsync(staging, plain, part, DEVICE_TO_HOST, checks)) return -1;
        if (cudaStreamSynchronize(checks)) return -1;
        for (size_t i = 0; i < part / 8; i++) wrong += ((uint64_t *)staging)[i] != word(at / 8 + i, seed);
    }
    return (long)wrong;
}

/* What tells a case from the others of its kind. */
#define CASE "\"host\": \"%s\", \"direction\": \"%s\", \"bytes\": %zu, \"way\": \"%s\""

static bool is_alive(void) {
    int error = cudaMemset(plain, 1, 4096);
    if (!error) error = cudaDeviceSynchronize();
    return !error;
}

/* The case's line; a program whose context is lost ends. */
static void told(const char *what, int error, const char *right, double gbps) {
    cudaGetLastError();
    bool alive = is_alive();
    printf("{\"case\": %ld, \"name\": \"%s\", %s, \"error\": %d, \"right\": %s, \"alive\": %s, \"gbps\": %.3f}\n",
           next_case - 1, name, what, error, right, alive ? "true" : "false", gbps);
    fflush(stdout);
    if (!alive) exit(LOST);
}

/* Whether it is to be made; counts. */
static bool is_next(void) { return next_case++ >= first; }

/* ---- libgmlake.so, where there is one ---- */

static void *gmlake(void) {
    const char *file = getenv("KINDS_LIBRARY");
    void *library = dlopen("libgmlake.so", RTLD_NOW | RTLD_NOLOAD);
    return library || !file || !*file ? library : dlopen(file, RTLD_NOW | RTLD_LOCAL);
}

static bool relays_are_ready(void) {
    void *library = dlopen("libgmlake.so", RTLD_NOW | RTLD_NOLOAD);
    char *(*stats)(void) = library ? (char *(*)(void))dlsym(library, "glake_copy_stats_json") : NULL;
    void (*give_back)(char *) = library ? (void (*)(char *))dlsym(library, "glake_string_free") : NULL;
    char *text = stats && give_back ? stats() : NULL;
    bool ready = text && strstr(text, "\"ready\":true");
    if (text) give_back(text);
    return ready;
}

/* ---- memory of the GPU ---- */

static void *exported(size_t size) {
    int ways[2][2];
    if (pipe(ways[0]) || pipe(ways[1])) fail("pipe", errno);
    char amount[32];
    snprintf(amount, sizeof amount, "%zu", size);
    pid_t child = fork();
    if (child < 0) fail("fork", errno);
    if (child == 0) {
        dup2(ways[0][0], 0);
        dup2(ways[1][1], 1);
        for (int i = 0; i < 4; i++) close(ways[i / 2][i % 2]);
        unsetenv("LD_PRELOAD");
        execl("/proc/self/exe", "kinds", "export", amount, (char *)NULL);
        _exit(127);
    }
    close(ways[0][0]);
    close(ways[1][1]);
    struct ipc_handle handle;
    size_t have = 0;
    while (have < sizeof handle) {
        ssize_t more = read(ways[1][0], (char *)&handle + have, sizeof handle - have);
        if (more <= 0) fail("the process that exports memory gave none", 0);
        have += (size_t)more;
    }
    void *memory = NULL;
    check("cudaIpcOpenMemHandle", cudaIpcOpenMemHandle(&memory, handle, 1));
    return memory; /* the child ends when this process does */
}

static int export(size_t size) {
    void *memory = NULL;
    struct ipc_handle handle;
    int error = cudaMalloc(&memory, size);
    if (!error) error = cudaIpcGetMemHandle(&handle, memory);
    if (error) fail("export", error);
    if (write(1, &handle, sizeof handle) != sizeof handle) return 1;
    char byte;
    while (read(0, &byte, 1) > 0) {}
    return 0;
}

static void *of_kind(const char *kind, size_t size) {
    void *memory = NULL, *pool = NULL;
    const struct location gpu = {1, 0};
    if (!strcmp(kind, "malloc")) check("cudaMalloc", cudaMalloc(&memory, size));
    else if (!strcmp(kind, "managed")) check("cudaMallocManaged", cudaMallocManaged(&memory, size, 1));
    else if (!strcmp(kind, "ipc")) memory = exported(size);
    else if (!strcmp(kind, "async")) check("cudaMallocAsync", cudaMallocAsync(&memory, size, made));
    else if (!strcmp(kind, "mempool")) {
        struct pool_properties properties = {.kind = 1, .at = gpu};
        check("cudaMemPoolCreate", cudaMemPoolCreate(&pool, &properties));
        check("cudaMallocFromPoolAsync", cudaMallocFromPoolAsync(&memory, size, pool, made));
    } else if (!strcmp(kind, "vmm")) {
        struct memory_properties properties = {.kind = 1, .at = gpu};
        struct access access = {gpu, 3};
        unsigned long long handle = 0;
        address at = 0;
        check("cuMemCreate", cuMemCreate(&handle, size, &properties, 0));
        check("cuMemAddressReserve", cuMemAddressReserve(&at, size, 0, 0, 0));
        check("cuMemMap", cuMemMap(at, size, 0, handle, 0));
        check("cuMemSetAccess", cuMemSetAccess(at, size, &access, 1));
        memory = (void *)(uintptr_t)at;
    } else if (!strcmp(kind, "pool")) {
        void *library = gmlake();
        if (!library) fprintf(stderr, "kinds: KINDS_LIBRARY must name libgmlake.so: %s\n", dlerror());
        if (!library) exit(SETUP);
        void *(*allocate)(size_t, int32_t, void *) =
            (void *(*)(size_t, int32_t, void *))dlsym(library, "gmlake_malloc");
        const char *(*why)(void) = (const char *(*)(void))dlsym(library, "glake_last_error");
        memory = allocate(size, 0, NULL);
        if (!memory) fprintf(stderr, "kinds: gmlake_malloc: %s\n", why());
        if (!memory) exit(SETUP);
    } else {
        fprintf(stderr, "kinds: %s is none of malloc async mempool managed vmm ipc pool wrong peers contexts\n", kind);
        exit(USAGE);
    }
    check("the memory's stream", cudaStreamSynchronize(made));
    return memory;
}

/* ---- memory of the host ---- */

enum host { PINNED, COMBINED, MAPPED_TOO, REGISTERED, PAGEABLE, GAP, ADJACENT, HOSTS };
static const char *const HOST_NAMES[] = {"pinned",   "write-combined", "mapped", "registered",
                                         "pageable", "gap",            "adjacent"};

static unsigned char *host_memory(enum host kind, size_t size) {
    void *memory = NULL;
    unsigned flags = kind == COMBINED ? WRITE_COMBINED : kind == MAPPED_TOO ? MAPPED : 0;
    if (kind <= MAPPED_TOO) {
        check("cudaHostAlloc", cudaHostAlloc(&memory, size, flags));
        return memory;
    }
    memory = mapped(size);
    memset(memory, 1, size);
    /* The first registration ends at `begin`, the second one begins at `end`. */
    size_t begin = kind == REGISTERED ? size : kind == GAP ? size / 8 * 3 : size / 2;
    size_t end = kind == GAP ? size / 8 * 5 : size / 2;
    if (kind == PAGEABLE) return memory;
    check("cudaHostRegister", cudaHostRegister(memory, begin, 0));
    if (kind != REGISTERED) check("cudaHostRegister", cudaHostRegister((char *)memory + end, size - end, 0));
    return memory;
}

static void give_host_back(enum host kind, unsigned char *memory, size_t size) {
    if (kind <= MAPPED_TOO) {
        check("cudaFreeHost", cudaFreeHost(memory));
        return;
    }
    if (kind != PAGEABLE) check("cudaHostUnregister", cudaHostUnregister(memory));
    if (kind == GAP) check("cudaHostUnregister", cudaHostUnregister(memory + size / 8 * 5));
    if (kind == ADJACENT) check("cudaHostUnregister", cudaHostUnregister(memory + size / 2));
    munmap(memory, size);
}

/* ---- copies ---- */

enum way { ASYNC, LEGACY, NOW, DRIVER, WAYS };
static const char *const WAY_NAMES[] = {"async", "legacy", "now", "driver"};

/* One copy and its wait; the first error. */
static int copy(enum way way, void *to, const void *from, size_t size, bool in, double *seconds) {
    int kind = in ? HOST_TO_DEVICE : DEVICE_TO_HOST, error;
    void *stream = way == LEGACY ? NULL : made;
    double begin = now();
    if (way == NOW) error = cudaMemcpy(to, from, size, kind);
    else if (way != DRIVER) error = cudaMemcpyAsync(to, from, size, kind, stream);
    else if (in) error = cuMemcpyHtoDAsync_v2((address)(uintptr_t)to, from, size, stream);
    else error = cuMemcpyDtoHAsync_v2(to, (address)(uintptr_t)from, size, stream);
    int waited = way == NOW ? 0 : cudaStreamSynchronize(stream);
    *seconds = now() - begin;
    return error ? error : waited;
}

/* Copies until the relays are there, and the paths of the streams that are used here. */
static void warm_up(unsigned char *memory) {
    if (relays <= 0) return;
    size_t size = most < 16 * MIB ? most : 16 * MIB;
    unsigned char *host = host_memory(PINNED, size);
    double begin = now(), seconds, ready = -1;
    while (now() - begin < relays && (ready < 0 || now() - ready < 0.5))
        for (int turn = 0; turn < 2 * WAYS; turn++) {
            bool in = turn % 2 == 0;
            check("a first copy", copy(turn / 2, in ? memory : host, in ? host : memory, size, in, &seconds));
            if (ready < 0 && relays_are_ready()) ready = now();
        }
    printf("{\"note\": \"%s: relays %s\", \"after\": %.1f}\n", name, ready < 0 ? "were never ready" : "ready",
           (ready < 0 ? now() : ready) - begin);
    fflush(stdout);
    give_host_back(PINNED, host, size);
}

/* The target cleared, the copy made, its bytes looked at: whether they are right, or null where it was refused. */
static const char *made_right(enum way way, enum host kind, unsigned char *memory, unsigned char *host, size_t size,
                              bool in, uint64_t seed, int repeat, int *error, double *best) {
    if (in) check("cudaMemset", cudaMemset(memory, 0, size));
    else if (kind == COMBINED) memset(host, 0, size);
    else pattern(host, size, 0, ~seed, false);
    check("cudaDeviceSynchronize", cudaDeviceSynchronize());
    for (int i = 0; i < repeat && !*error; i++) {
        double seconds;
        *error = copy(way, in ? memory : host, in ? host : memory, size, in, &seconds);
        if (!*error && (*best == 0 || seconds < *best)) *best = seconds;
    }
    if (*error) return "null";
    *error = cudaDeviceSynchronize();
    if (*error) return "null";
    long wrong = in                 ? got(memory, size, seed)
                 : kind == COMBINED ? got_combined(host, size, seed)
                                    : (long)pattern(host, size, 0, seed, true);
    return wrong == 0 ? "true" : "false";
}

static void of_memory(unsigned char *memory) {
    const size_t sizes[] = {4 * MIB, 64 * MIB, 1024 * MIB};
    for (int kind = 0; kind < HOSTS; kind++) {
        bool whole = kind != GAP && kind != ADJACENT;
        size_t length = whole || most < 64 * MIB ? most : 64 * MIB;
        unsigned char *host = NULL; /* made where a case wants it */
        for (int s = 0; s < 3; s++) {
            size_t size = sizes[s];
            if (size > most || (!whole && size != length)) continue;
            for (int turn = 0; turn < 2 * WAYS; turn++) {
                enum way way = turn / 2;
                bool in = turn % 2 == 0;
                bool rare = (way != ASYNC && way != NOW) || (kind != PINNED && kind != PAGEABLE);
                if (quick && size > 64 * MIB && rare) continue;
                if (!is_next()) continue;
                if (!host) host = host_memory(kind, length);
                uint64_t seed = (uint64_t)next_case;
                if (in) pattern(host, size, 0, seed, false);
                else put(memory, size, seed);
                int error = 0, repeats = size <= 4 * MIB ? 7 : size <= 64 * MIB ? 3 : 1;
                double best = 0;
                const char *right = made_right(way, kind, memory, host, size, in, seed, 1, &error, &best);
                if (!error && !strcmp(right, "true") && !(quick && size > 64 * MIB))
                    right = made_right(way, kind, memory, host, size, in, seed, repeats, &error, &best);
                char what[200];
                snprintf(what, sizeof what, CASE, HOST_NAMES[kind], in ? "h2d" : "d2h", size, WAY_NAMES[way]);
                told(what, error, right, error || best == 0 ? 0 : (double)size / best / 1e9);
            }
        }
        if (host) give_host_back(kind, host, length);
    }
}

/* Kinds that do not say what the ends are. */
static void wrong_directions(void) {
    size_t most_here = most < 64 * MIB ? most : 64 * MIB;
    unsigned char *ends[] = {of_kind("malloc", most_here),     of_kind("malloc", most_here),
                             host_memory(PINNED, most_here),   host_memory(PINNED, most_here),
                             host_memory(PAGEABLE, most_here), host_memory(PAGEABLE, most_here)};
    static const char *const names[] = {"device", "device", "pinned", "pinned", "pageable", "pageable"};
    static const int kinds[] = {HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT, 5, -1};
    warm_up(ends[0]);
    for (size_t size = 4 * MIB; size <= most_here; size *= 16)
        for (int to = 0; to < 6; to += 2)
            for (int from = 1; from < 6; from += 2)
                for (int i = 0; i < 16; i++) {
                    /* Seven kinds by each of the runtime's calls, then the driver's two. */
                    int way = i / 7, kind = kinds[i % 7];
                    if (!is_next()) continue;
                    void *target = ends[to], *source = ends[from];
                    int error;
                    if (way == 0) error = cudaMemcpyAsync(target, source, size, kind, made);
                    else if (way == 1) error = cudaMemcpy(target, source, size, kind);
                    else if (i == 14) error = cuMemcpyHtoDAsync_v2((address)(uintptr_t)target, source, size, made);
                    else error = cuMemcpyDtoHAsync_v2(target, (address)(uintptr_t)source, size, made);
                    int waited = cudaStreamSynchronize(made);
                    char asked[20], what[200];
                    if (way < 2) snprintf(asked, sizeof asked, "kind %d", kind);
                    else snprintf(asked, sizeof asked, "%s", i == 14 ? "HtoD" : "DtoH");
                    char between[40];
                    snprintf(between, sizeof between, "%s from %s", names[to], names[from]);
                    snprintf(what, sizeof what, CASE, between, asked, size,
                             way == 0 ? "async" : way == 1 ? "now" : "driver");
                    told(what, error ? error : waited, "null", 0);
                }
}

/* There and back, so many times: the number of them that were right. */
static int there_and_back(unsigned char *memory, unsigned char *host, size_t size, int times, int *error) {
    int right = 0;
    for (int i = 0; i < times && !*error; i++) {
        uint64_t seed = (uint64_t)next_case * 1000 + (uint64_t)i;
        double seconds;
        pattern(host, size, 0, seed, false);
        *error = copy(i % WAYS, memory, host, size, true, &seconds);
        if (!*error) *error = cudaDeviceSynchronize();
        bool there = !*error && got(memory, size, seed) == 0;
        pattern(host, size, 0, ~seed, false);
        if (!*error) *error = copy(i % WAYS, host, memory, size, false, &seconds);
        right += there && !*error && pattern(host, size, 0, seed, true) == 0;
    }
    return right;
}

static void peer_case(const char *what, int error, const char *right) {
    char text[200];
    snprintf(text, sizeof text, CASE, what, "", (size_t)0, "");
    told(text, error, right, 0);
}

/* The program's own peer access: nobody has taken it before, and what it takes back is missed by nobody. */
static void peers(void) {
    int count = 0, can = 0;
    check("cudaGetDeviceCount", cudaGetDeviceCount(&count));
    if (count >= 2) check("cudaDeviceCanAccessPeer", cudaDeviceCanAccessPeer(&can, 0, 1));
    if (!can) {
        printf("{\"note\": \"peers: SKIPPED: needs two GPUs that reach each other\"}\n");
        return;
    }
    size_t size = most < 64 * MIB ? most : 64 * MIB;
    unsigned char *memory = of_kind("malloc", size), *host = host_memory(PINNED, size);
    void *remote = NULL;
    warm_up(memory);
    for (int round = 0; round < 2; round++) {
        for (int step = 0; step < 2; step++) {
            for (int gpu = 0; gpu < 2; gpu++) {
                if (!is_next()) continue;
                check("cudaSetDevice", cudaSetDevice(gpu));
                int error = step == 0 ? cudaDeviceEnablePeerAccess(1 - gpu, 0) : cudaDeviceDisablePeerAccess(1 - gpu);
                if (gpu == 1 && !remote) check("cudaMalloc", cudaMalloc(&remote, MIB));
                check("cudaSetDevice", cudaSetDevice(0));
                char what[100];
                snprintf(what, sizeof what, "round %d: cudaDevice%sPeerAccess on GPU %d", round,
                         step == 0 ? "Enable" : "Disable", gpu);
                peer_case(what, error, "null");
            }
            if (!is_next()) continue;
            int error = 0, right = there_and_back(memory, host, size, 8, &error);
            char what[100];
            snprintf(what, sizeof what, "round %d: 8 copies each way with peer access %s", round,
                     step == 0 ? "on" : "off");
            peer_case(what, error, right == 8 ? "true" : "false");
        }
    }
}

/* A context of the program's own: its default stream is another one than the primary context's. */
static void contexts(void) {
    void *context = NULL, *own = NULL, *host = NULL, *back = NULL;
    int device = 0;
    address memory = 0, small = 0;
    size_t size = most < 64 * MIB ? most : 64 * MIB;
    check("cuInit", cuInit(0));
    check("cuDeviceGet", cuDeviceGet(&device, 0));
    check("cuCtxCreate", cuCtxCreate_v2(&context, 0, device));
    check("cuMemAlloc", cuMemAlloc_v2(&memory, size));
    check("cuMemAlloc", cuMemAlloc_v2(&small, 4096));
    check("cuMemHostAlloc", cuMemHostAlloc(&host, size, PORTABLE));
    check("cuMemHostAlloc", cuMemHostAlloc(&back, size, PORTABLE));
    check("cuStreamCreate", cuStreamCreate(&own, NON_BLOCKING));
    double begin = now();
    bool ready = relays <= 0;
    while (!ready && now() - begin < relays) {
        check("a first copy", cuMemcpyHtoDAsync_v2(memory, host, size, own));
        check("its wait", cuStreamSynchronize(own));
        ready = relays_are_ready();
    }
    for (int which = 0; which < 2; which++) {
        void *stream = which == 0 ? NULL : own;
        int right = 0, error = 0;
        if (!is_next()) continue;
        double before = now();
        for (int i = 0; i < 20 && !error; i++) {
            uint64_t seed = (uint64_t)(which * 20 + i + 1);
            pattern(host, size, 0, seed, false);
            memset(back, 0, size);
            /* All behind each other on one stream: the pattern goes over the zeros, and comes back. */
            error = cuMemsetD8Async(memory, 0, size, stream);
            if (!error) error = cuMemcpyHtoDAsync_v2(memory, host, size, stream);
            if (!error) error = cuMemcpyDtoHAsync_v2(back, memory, size, stream);
            if (!error) error = cuStreamSynchronize(stream);
            right += !error && pattern(back, size, 0, seed, true) == 0;
        }
        double took = now() - before;
        int after = cuMemsetD8Async(small, 1, 4096, NULL);
        if (!after) after = cuCtxSynchronize();
        printf("{\"case\": %ld, \"name\": \"%s\", " CASE ", \"error\": %d, \"right\": %s, \"alive\": %s, \"gbps\": 0, "
               "\"seconds\": %.2f}\n",
               next_case - 1, name, which == 0 ? "its default stream, 20 times" : "a stream of its own, 20 times",
               "there and back", size, "driver", error, right == 20 ? "true" : "false", after ? "false" : "true", took);
        fflush(stdout);
        if (after) exit(LOST);
    }
}

int main(int count, char **words) {
    name = count > 1 ? words[1] : "";
    if (!strcmp(name, "export") && count == 3) return export(strtoull(words[2], NULL, 10));
    for (int i = 2; i < count; i++) {
        bool more = i + 1 < count;
        if (!strcmp(words[i], "--first") && more) first = atol(words[++i]);
        else if (!strcmp(words[i], "--most") && more) most = strtoull(words[++i], NULL, 10) * MIB;
        else if (!strcmp(words[i], "--relays") && more) relays = atof(words[++i]);
        else if (!strcmp(words[i], "--quick")) quick = true;
        else name = "";
    }
    if (!*name || *name == '-' || most < 4 * MIB) {
        fprintf(stderr, "usage: kinds malloc|async|mempool|managed|vmm|ipc|pool|wrong|peers|contexts "
                        "[--first N] [--most MIB] [--quick] [--relays SECONDS]\n");
        return USAGE;
    }
    if (!strcmp(name, "contexts")) {
        contexts();
        return 0;
    }
    check("cudaSetDevice", cudaSetDevice(0));
    check("cudaFree", cudaFree(NULL));
    check("cudaStreamCreateWithFlags", cudaStreamCreateWithFlags(&made, NON_BLOCKING));
    check("cudaStreamCreateWithFlags", cudaStreamCreateWithFlags(&checks, NON_BLOCKING));
    check("cudaHostAlloc", cudaHostAlloc((void **)&staging, 64 * MIB, 0));
    check("cudaMalloc", cudaMalloc((void **)&plain, STEP));
    if (!strcmp(name, "wrong")) wrong_directions();
    else if (!strcmp(name, "peers")) peers();
    else {
        unsigned char *memory = of_kind(name, most);
        warm_up(memory);
        of_memory(memory);
    }
    return 0;
}
