// How long mapping takes beside copies that leave the GPU, and beside others.
//
//     nvcc -O2 -std=c++17 -o mapping docs/lab/mapping.cu -lcuda && ./mapping
//
// 224 extents of 2 MiB are mapped side by side, opened and unmapped, with 448 MiB twelve times on their way over the link in pieces of some
// size: in milliseconds, the first two calls that open apart from the others. "left": how long the copies went on then; 0: longer than the
// calls did not. Then one extent of 448 MiB; then the time of single calls that open 2 MiB.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "check.h"

using Clock = std::chrono::steady_clock;
static const size_t MIB = 1 << 20, SIZE = 448 * MIB, EXTENT = 2 * MIB;
static const int EXTENTS = SIZE / EXTENT, COPIES = 12;

template <class Call> static double time_of(Call call) {
    auto before = Clock::now();
    call();
    return std::chrono::duration<double, std::milli>(Clock::now() - before).count();
}

enum Way { NONE, OUT, IN, WITHIN };

int main() {
    CUdevice device;
    CUcontext primary, other;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&primary, device));
#if CUDA_VERSION >= 13000
    CUctxCreateParams plain = {};
    CHECK(cuCtxCreate(&other, &plain, 0, device));
#else
    CHECK(cuCtxCreate(&other, 0, device));
#endif
    CHECK(cuCtxSetCurrent(primary));
    char *host = (char *)mmap(nullptr, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    CHECK(cuMemHostRegister(host, SIZE, CU_MEMHOSTREGISTER_PORTABLE));
    CUmemAllocationProp of = {};
    of.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    of.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    CUmemAccessDesc open = {of.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr memory, base;
    CUmemGenericAllocationHandle whole;
    CHECK(cuMemAddressReserve(&memory, SIZE, 0, 0, 0));
    CHECK(cuMemCreate(&whole, SIZE, &of, 0));
    CHECK(cuMemMap(memory, SIZE, 0, whole, 0));
    CHECK(cuMemSetAccess(memory, SIZE, &open, 1));
    CHECK(cuMemAddressReserve(&base, SIZE, 0, 0, 0));
    std::vector<CUmemGenericAllocationHandle> extents(EXTENTS);
    for (auto &extent : extents) CHECK(cuMemCreate(&extent, EXTENT, &of, 0));
    CUstream streams[2];
    CHECK(cuStreamCreate(&streams[0], CU_STREAM_NON_BLOCKING));
    CHECK(cuCtxSetCurrent(other));
    CHECK(cuStreamCreate(&streams[1], CU_STREAM_NON_BLOCKING));
    auto copies = [&](Way way, size_t piece, int context, int count) {
        CHECK(cuCtxSetCurrent(context ? other : primary));
        for (int n = 0; n < count && way != NONE; n++)
            for (size_t at = 0; at < SIZE; at += piece) {
                if (way == OUT) CHECK(cuMemcpyDtoHAsync(host + at, memory + at, piece, streams[context]));
                if (way == IN) CHECK(cuMemcpyHtoDAsync(memory + at, host + at, piece, streams[context]));
                if (way == WITHIN) CHECK(cuMemcpyDtoDAsync(memory + at, memory + at, piece, streams[context]));
            }
        CHECK(cuCtxSetCurrent(primary));
    };
    struct {
        const char *name;
        Way way;
        size_t piece;
        int context;
    } modes[] = {{"nothing", NONE, SIZE, 0},      {"out", OUT, SIZE, 0},     {"out, 16 MiB pieces", OUT, 16 * MIB, 0},
                 {"out, own context", OUT, SIZE, 1}, {"in", IN, SIZE, 0},       {"in, 16 MiB pieces", IN, 16 * MIB, 0},
                 {"within the GPU", WITHIN, SIZE, 0}};
    for (auto &mode : modes) {
        copies(mode.way, mode.piece, mode.context, COPIES);
        double map = time_of([&] { for (int n = 0; n < EXTENTS; n++) CHECK(cuMemMap(base + n * EXTENT, EXTENT, 0, extents[n], 0)); });
        double first = time_of([&] { CHECK(cuMemSetAccess(base, EXTENT, &open, 1)); });
        double second = time_of([&] { CHECK(cuMemSetAccess(base + EXTENT, EXTENT, &open, 1)); });
        double rest = time_of([&] { CHECK(cuMemSetAccess(base + 2 * EXTENT, SIZE - 2 * EXTENT, &open, 1)); });
        double unmap = time_of([&] { CHECK(cuMemUnmap(base, SIZE)); });
        double left = time_of([&] { CHECK(cuStreamSynchronize(streams[mode.context])); });
        printf("%-20s map %.2f  open one %.2f, %.2f  all others %.1f  unmap %.2f  left %.0f ms\n", mode.name, map, first, second, rest, unmap, left);
    }
    copies(OUT, SIZE, 0, COPIES);
    double one = time_of([&] {
        CHECK(cuMemMap(base, SIZE, 0, whole, 0));
        CHECK(cuMemSetAccess(base, SIZE, &open, 1));
    });
    double unmap = time_of([&] { CHECK(cuMemUnmap(base, SIZE)); });
    CHECK(cuStreamSynchronize(streams[0]));
    printf("one extent of 448 MiB beside copies out: mapped and opened %.2f, unmapped %.2f ms\n", one, unmap);
    for (size_t piece : {448 * MIB, 64 * MIB, 16 * MIB, 4 * MIB}) {
        copies(OUT, piece, 0, 6);
        std::vector<double> times;
        for (int n = 0; n < 40; n++) {
            CHECK(cuMemMap(base + n * EXTENT, EXTENT, 0, extents[n], 0));
            times.push_back(time_of([&] { CHECK(cuMemSetAccess(base + n * EXTENT, EXTENT, &open, 1)); }));
        }
        CHECK(cuStreamSynchronize(streams[0]));
        CHECK(cuMemUnmap(base, 40 * EXTENT));
        std::sort(times.begin(), times.end());
        printf("copies out in pieces of %zu MiB: a call that opens 2 MiB takes %.2f, at most %.2f ms\n", piece / MIB, times[20], times.back());
    }
}
