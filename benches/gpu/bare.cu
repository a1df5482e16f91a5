// What bare driver calls make of a copy over several links, and what mapping costs beside copies: what the engine is measured against.
//
//     nvcc -O2 -o bare benches/gpu/bare.cu -lcuda && ./bare [--rest MICROSECONDS] [--access]
//
// A copy between pinned memory and GPU 0's is split evenly over 1 to N GPUs, in full stream order: forked from one stream of GPU 0 by an
// event, joined to it by one of each relay. Times are the host's, from the first call until the stream is done: median/99th percentile,
// and of the calls alone. "own first": GPU 0's own part is enqueued before the relays', not after them. --rest: so long between copies.
// --access: instead, what creating, mapping, opening and taking back a handle costs, on idle GPUs and beside copies.
#include <cuda.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static void check(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS) return;
    const char *name = "unknown";
    cuGetErrorName(result, &name);
    fprintf(stderr, "bare: %s: %s\n", what, name);
    exit(1);
}
#define CHECK(call) check(call, #call)

static const size_t MIB = 1 << 20;
static const int MOST = 8;
static int gpus;
static CUcontext contexts[MOST];
static CUstream user, lanes[MOST];
static CUevent forked, joined[MOST];

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

static void split(bool out, CUdeviceptr gpu, char *host, size_t size, int paths, bool own_first) {
    size_t part = size / paths / 4096 * 4096, own = size - part * (paths - 1);
    CHECK(cuCtxSetCurrent(contexts[0]));
    if (paths > 1) CHECK(cuEventRecord(forked, user));
    if (own_first) copy(out, gpu, host, own, user);
    for (int relay = 1; relay < paths; relay++) {
        size_t offset = own + part * (relay - 1);
        CHECK(cuCtxSetCurrent(contexts[relay]));
        CHECK(cuStreamWaitEvent(lanes[relay], forked, 0));
        copy(out, gpu + offset, host + offset, part, lanes[relay]);
    }
    CHECK(cuCtxSetCurrent(contexts[0]));
    if (!own_first) copy(out, gpu, host, own, user);
    for (int relay = 1; relay < paths; relay++) {
        CHECK(cuCtxSetCurrent(contexts[relay]));
        CHECK(cuEventRecord(joined[relay], lanes[relay]));
        CHECK(cuStreamWaitEvent(user, joined[relay], 0));
    }
    CHECK(cuCtxSetCurrent(contexts[0]));
}

static void settle() {
    for (int gpu = 0; gpu < gpus; gpu++) {
        CHECK(cuCtxSetCurrent(contexts[gpu]));
        CHECK(cuCtxSynchronize());
    }
    CHECK(cuCtxSetCurrent(contexts[0]));
}

static void copies(unsigned rest) {
    void *host;
    CHECK(cuMemHostAlloc(&host, 16 * MIB, CU_MEMHOSTALLOC_PORTABLE));
    memset(host, 1, 16 * MIB);
    CUdeviceptr gpu = mapped(16 * MIB);
    for (bool out : {false, true})
        for (size_t size : {MIB, 2 * MIB, 4 * MIB, 16 * MIB}) {
            printf("%s %2zu MiB:", out ? "d2h" : "h2d", size / MIB);
            for (int paths = 1; paths <= gpus; paths++)
                for (bool own_first : {false, true}) {
                    if (paths == 1 && own_first) continue;
                    std::vector<double> took, call;
                    for (int run = 0; run < 1000; run++) {
                        if (rest) usleep(rest);
                        double begin = now();
                        split(out, gpu, (char *)host, size, paths, own_first);
                        double issued = now();
                        CHECK(cuStreamSynchronize(user));
                        took.push_back(now() - begin);
                        call.push_back(issued - begin);
                    }
                    printf("  %d%s %.1f/%.0f call %.1f/%.0f", paths, own_first ? " own first" : "", at(took, .5), at(took, .99), at(call, .5), at(call, .99));
                }
            printf(" us\n");
            fflush(stdout);
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
    bool only_mappings = false;
    for (int n = 1; n < count; n++) {
        if (!strcmp(arguments[n], "--access")) only_mappings = true;
        else if (!strcmp(arguments[n], "--rest") && n + 1 < count) rest = unsigned(atoi(arguments[++n]));
        else {
            fprintf(stderr, "usage: bare [--rest MICROSECONDS] [--access]\n");
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
        CHECK(cuEventCreate(&joined[gpu], CU_EVENT_DISABLE_TIMING));
    }
    CHECK(cuStreamCreate(&user, CU_STREAM_NON_BLOCKING));
    CHECK(cuEventCreate(&forked, CU_EVENT_DISABLE_TIMING));
    only_mappings ? mappings() : copies(rest);
    return 0;
}
