// What bare driver calls make of a copy over several links, and what mapping costs beside copies: what the engine is measured against.
//
//     nvcc -O2 -std=c++17 -o bare docs/lab/bare.cu -lcuda && ./bare [--rest MICROSECONDS] [--stay | --idle] [--limit] [--access | --calls]
//
// A copy between pinned memory and GPU 0's is split evenly over 1 to N GPUs, in full stream order: forked from one stream of GPU 0 by an
// event, joined to it by one of each relay. Times are the host's, from the first call until the stream is done: median/99th percentile,
// and of the calls alone. "own first": GPU 0's own part is enqueued before the relays', not after them. --rest: so long between copies.
// --stay: GPU 0's context stays current for what goes on the relays' streams too. --idle: the fork is left out where GPU 0's stream is
// found idle. --limit: in turns with these, every GPU copies its own share to its own memory on a stream of its own, all at once.
// --access: instead, what creating, mapping, opening and taking back a handle costs, on idle GPUs and beside copies. --calls: instead,
// what each call costs that such a copy is made of; "another" is the last GPU.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "check.h"

static const size_t MIB = 1 << 20;
static const int MOST = 8;
static int gpus;
static CUcontext contexts[MOST];
static CUstream user, lanes[MOST], own[MOST];
static CUevent forked, joined[MOST];
static bool stay, asks, with_limit;

static double now() {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static double at(std::vector<double> times, double part) {
    std::sort(times.begin(), times.end());
    return times[size_t((times.size() - 1) * part)];
}

static CUmemAllocationProp memory_of(int gpu) {
    CUmemAllocationProp memory;
    memset(&memory, 0, sizeof memory);
    memory.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    memory.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    memory.location.id = gpu;
    return memory;
}

static std::vector<CUmemAccessDesc> open_to(int count) {
    std::vector<CUmemAccessDesc> open(count);
    for (int gpu = 0; gpu < count; gpu++) {
        memset(&open[gpu], 0, sizeof open[gpu]);
        open[gpu].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        open[gpu].location.id = gpu;
        open[gpu].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    return open;
}

// Memory of GPU 0 that every GPU may touch.
static CUdeviceptr mapped(size_t size) {
    CUmemAllocationProp memory = memory_of(0);
    CUmemGenericAllocationHandle handle;
    CUdeviceptr start;
    CHECK(cuMemCreate(&handle, size, &memory, 0));
    CHECK(cuMemAddressReserve(&start, size, 2 * MIB, 0, 0));
    CHECK(cuMemMap(start, size, 0, handle, 0));
    std::vector<CUmemAccessDesc> open = open_to(gpus);
    CHECK(cuMemSetAccess(start, size, open.data(), open.size()));
    return start;
}

static void copy(bool out, CUdeviceptr gpu, char *host, size_t size, CUstream stream) {
    if (out) CHECK(cuMemcpyDtoHAsync(host, gpu, size, stream));
    else CHECK(cuMemcpyHtoDAsync(gpu, host, size, stream));
}

static void enter(int gpu) {
    if (!stay) CHECK(cuCtxSetCurrent(contexts[gpu]));
}

static void split(bool out, CUdeviceptr gpu, char *host, size_t size, int paths, bool own_first) {
    size_t part = size / paths / 4096 * 4096, first = size - part * (paths - 1);
    enter(0);
    bool forks = paths > 1 && !(asks && cuStreamQuery(user) == CUDA_SUCCESS);
    if (forks) CHECK(cuEventRecord(forked, user));
    if (own_first) copy(out, gpu, host, first, user);
    for (int relay = 1; relay < paths; relay++) {
        size_t offset = first + part * (relay - 1);
        enter(relay);
        if (forks) CHECK(cuStreamWaitEvent(lanes[relay], forked, 0));
        copy(out, gpu + offset, host + offset, part, lanes[relay]);
    }
    enter(0);
    if (!own_first) copy(out, gpu, host, first, user);
    for (int relay = 1; relay < paths; relay++) {
        enter(relay);
        CHECK(cuEventRecord(joined[relay], lanes[relay]));
        CHECK(cuStreamWaitEvent(user, joined[relay], 0));
    }
    enter(0);
}

// Every GPU's own share to its own memory.
static void at_once(bool out, const CUdeviceptr *memory, char *host, size_t size) {
    size_t part = size / gpus;
    for (int gpu = 0; gpu < gpus; gpu++) {
        CHECK(cuCtxSetCurrent(contexts[gpu]));
        copy(out, memory[gpu], host + part * gpu, part, own[gpu]);
    }
    for (int gpu = 0; gpu < gpus; gpu++) CHECK(cuStreamSynchronize(own[gpu]));
    CHECK(cuCtxSetCurrent(contexts[0]));
}

static void settle() {
    for (int gpu = 0; gpu < gpus; gpu++) {
        CHECK(cuCtxSetCurrent(contexts[gpu]));
        CHECK(cuCtxSynchronize());
    }
    CHECK(cuCtxSetCurrent(contexts[0]));
}

// Whether all bytes arrive, there and back, in the parts that split() makes.
static void compare(CUdeviceptr gpu, char *host, size_t size) {
    for (int paths = 1; paths <= gpus; paths++)
        for (bool own_first : {false, true}) {
            for (size_t n = 0; n < size; n++) host[n] = char((n * 2654435761u + paths) >> 7);
            std::vector<char> sent(host, host + size);
            split(false, gpu, host, size, paths, own_first);
            CHECK(cuStreamSynchronize(user));
            memset(host, 0, size);
            split(true, gpu, host, size, paths, own_first);
            CHECK(cuStreamSynchronize(user));
            if (memcmp(host, sent.data(), size)) {
                fprintf(stderr, "bare: bytes differ over %d links\n", paths);
                exit(1);
            }
        }
}

struct Way {
    int paths;
    bool own_first;
    std::vector<double> took, call;
};

static void copies(unsigned rest) {
    void *host;
    CHECK(cuMemHostAlloc(&host, 16 * MIB, CU_MEMHOSTALLOC_PORTABLE));
    memset(host, 1, 16 * MIB);
    CUdeviceptr gpu = mapped(16 * MIB);
    compare(gpu, (char *)host, 16 * MIB);
    CUdeviceptr memory[MOST];
    for (int number = 0; number < gpus; number++) {
        CHECK(cuCtxSetCurrent(contexts[number]));
        CHECK(cuMemAlloc(&memory[number], 16 * MIB));
    }
    CHECK(cuCtxSetCurrent(contexts[0]));
    for (bool out : {false, true})
        for (size_t size : {MIB, 2 * MIB, 4 * MIB, 16 * MIB}) {
            // All ways in turns: what ran just before makes a difference of microseconds.
            std::vector<Way> ways;
            for (int paths = 1; paths <= gpus; paths++)
                for (bool own_first : {false, true})
                    if (paths > 1 || !own_first) ways.push_back({paths, own_first, {}, {}});
            std::vector<double> limit;
            for (int run = 0; run < 1000; run++)
                for (Way &way : ways) {
                    if (rest) usleep(rest);
                    double begin = now();
                    split(out, gpu, (char *)host, size, way.paths, way.own_first);
                    double issued = now();
                    CHECK(cuStreamSynchronize(user));
                    way.took.push_back(now() - begin);
                    way.call.push_back(issued - begin);
                    if (!with_limit) continue;
                    begin = now();
                    at_once(out, memory, (char *)host, size);
                    limit.push_back(now() - begin);
                }
            printf("%s %2zu MiB:", out ? "d2h" : "h2d", size / MIB);
            for (const Way &way : ways)
                printf("  %d%s %.1f/%.0f call %.1f/%.0f", way.paths, way.own_first ? " own first" : "", at(way.took, .5), at(way.took, .99), at(way.call, .5), at(way.call, .99));
            if (with_limit) printf("  limit %.1f/%.0f", at(limit, .5), at(limit, .99));
            printf(" us\n");
            fflush(stdout);
        }
}

template <typename Call> static void cost(const char *what, Call call) {
    const int runs = 10000;
    settle();
    for (int run = 0; run < 100; run++) call();
    settle();
    double begin = now();
    for (int run = 0; run < runs; run++) call();
    printf("%-40s %.3f us\n", what, (now() - begin) / runs);
    settle();
}

static void calls() {
    CUcontext current;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUstreamCaptureStatus status;
    int last = gpus - 1;
    auto here = [&](int gpu, auto call) { return [=] { CHECK(cuCtxPushCurrent(contexts[gpu])); call(); CUcontext popped; CHECK(cuCtxPopCurrent(&popped)); }; };
    auto record = [&] { CHECK(cuEventRecord(joined[last], lanes[last])); };
    auto wait = [&] { CHECK(cuStreamWaitEvent(lanes[last], forked, 0)); };
    cost("clock", [&] { now(); });
    cost("current context", [&] { CHECK(cuCtxGetCurrent(&current)); });
    cost("capture mode", [&] { CHECK(cuThreadExchangeStreamCaptureMode(&mode)); });
    cost("push and pop the current context", here(0, [] {}));
    cost("push and pop another", here(last, [] {}));
    cost("whether a stream is captured", [&] { CHECK(cuStreamIsCapturing(user, &status)); });
    unsigned flags;
    cost("flags of a stream", [&] { CHECK(cuStreamGetFlags(user, &flags)); });
    cost("whether a stream is idle", [&] { cuStreamQuery(user); });
    int ready = 0;
    cost("record, and ask for it at once", [&] { CHECK(cuEventRecord(forked, user)); ready += cuEventQuery(forked) == CUDA_SUCCESS; });
    printf("passed at once: %d of 10100\n", ready);
    cost("record on another GPU's stream", record);
    cost("the same in its context", here(last, record));
    cost("wait on another GPU's stream", wait);
    cost("the same in its context", here(last, wait));
    void *host;
    CHECK(cuMemHostAlloc(&host, 2 * MIB, CU_MEMHOSTALLOC_PORTABLE));
    CUcontext of;
    cost("the context of a stream", [&] { CHECK(cuStreamGetCtx(user, &of)); });
    unsigned long long values[5];
    CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                   CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_BUFFER_ID};
    void *places[] = {&values[0], &values[1], &values[2], &values[3], &values[4]};
    cost("what pinned memory is, in five words", [&] { CHECK(cuPointerGetAttributes(5, names, places, (CUdeviceptr)host)); });
    CUdeviceptr gpu = mapped(2 * MIB);
    for (int lane : {0, last}) {
        std::vector<double> took;
        for (int run = 0; run < 1000; run++) {
            settle();
            double begin = now();
            copy(false, gpu, (char *)host, 4096, lanes[lane]);
            took.push_back(now() - begin);
        }
        printf("%-40s %.3f us\n", lane ? "copy on another GPU's stream" : "copy on its own stream", at(took, .5));
    }
}

static void mappings() {
    size_t total = 8192 * MIB, moved = 16384 * MIB, buffer = 1024 * MIB, slice = 16 * MIB;
    void *host;
    CUdeviceptr base, gpu = mapped(buffer);
    CHECK(cuMemHostAlloc(&host, buffer, CU_MEMHOSTALLOC_PORTABLE));
    CHECK(cuMemAddressReserve(&base, total, 2 * MIB, 0, 0));
    const char *beside[] = {"idle GPUs", "beside copies to GPU 0", "beside copies from GPU 0"};
    for (int load = 0; load < 3; load++)
        for (size_t size : {256 * MIB, 1024 * MIB})
            for (int count : {1, gpus}) {
                settle();
                for (size_t offset = 0; load && offset < moved; offset += slice) {
                    int lane = int(offset / slice % gpus);
                    CHECK(cuCtxSetCurrent(contexts[lane]));
                    copy(load == 2, gpu + offset % buffer, (char *)host + offset % buffer, slice, lanes[lane]);
                }
                CHECK(cuCtxSetCurrent(contexts[0]));
                CUmemAllocationProp memory = memory_of(0);
                std::vector<CUmemAccessDesc> open = open_to(count);
                std::vector<CUmemGenericAllocationHandle> handles(total / size);
                double begin = now();
                for (auto &handle : handles) CHECK(cuMemCreate(&handle, size, &memory, 0));
                double created = now();
                for (size_t n = 0; n < handles.size(); n++) CHECK(cuMemMap(base + n * size, size, 0, handles[n], 0));
                double mapped = now();
                for (size_t n = 0; n < handles.size(); n++) CHECK(cuMemSetAccess(base + n * size, size, open.data(), open.size()));
                double opened = now();
                for (size_t n = 0; n < handles.size(); n++) CHECK(cuMemUnmap(base + n * size, size));
                double unmapped = now();
                for (auto &handle : handles) CHECK(cuMemRelease(handle));
                double n = double(handles.size());
                printf("%s, %zu MiB open to %d: create %.1f, map %.1f, open %.1f, unmap %.1f, release %.1f us each\n", beside[load], size / MIB, count,
                       (created - begin) / n, (mapped - created) / n, (opened - mapped) / n, (unmapped - opened) / n, (now() - unmapped) / n);
                fflush(stdout);
            }
    settle();
}

int main(int count, char **arguments) {
    unsigned rest = 0;
    void (*measure)() = nullptr;
    for (int n = 1; n < count; n++) {
        if (!strcmp(arguments[n], "--access")) measure = mappings;
        else if (!strcmp(arguments[n], "--calls")) measure = calls;
        else if (!strcmp(arguments[n], "--stay")) stay = true;
        else if (!strcmp(arguments[n], "--idle")) asks = true;
        else if (!strcmp(arguments[n], "--limit")) with_limit = true;
        else if (!strcmp(arguments[n], "--rest") && n + 1 < count) rest = unsigned(atoi(arguments[++n]));
        else {
            fprintf(stderr, "usage: bare [--rest MICROSECONDS] [--stay | --idle] [--limit] [--access | --calls]\n");
            return 2;
        }
    }
    CHECK(cuInit(0));
    CHECK(cuDeviceGetCount(&gpus));
    gpus = std::min(gpus, MOST);
    if (gpus == 0) {
        fprintf(stderr, "bare: no GPU is visible\n");
        return 1;
    }
    for (int gpu = gpus - 1; gpu >= 0; gpu--) {
        CHECK(cuDevicePrimaryCtxRetain(&contexts[gpu], gpu));
        CHECK(cuCtxSetCurrent(contexts[gpu]));
        CHECK(cuStreamCreate(&lanes[gpu], CU_STREAM_NON_BLOCKING));
        CHECK(cuStreamCreate(&own[gpu], CU_STREAM_NON_BLOCKING));
        CHECK(cuEventCreate(&joined[gpu], CU_EVENT_DISABLE_TIMING));
    }
    CHECK(cuStreamCreate(&user, CU_STREAM_NON_BLOCKING));
    CHECK(cuEventCreate(&forked, CU_EVENT_DISABLE_TIMING));
    measure ? measure() : copies(rest);
    return 0;
}
