// What bare driver calls make of a region that leaves GPU 0 and comes back: its copies, and in some order the calls for its memory.
//
//     nvcc -O2 -std=c++17 -o moves docs/lab/moves.cu -lcuda && ./moves [--peer | --register] [--extents N]
//
// N extents (64) of 128 MiB, open to every GPU, to pinned memory over one link a GPU; with --peer of 256 MiB, to handles of GPU 1 that are
// made meanwhile. --register: huge pages that are registered, as the host pool's are, instead of the driver's own memory.
//
// Milliseconds from the first call until the last returned, the median of five, and of the calls in the last one. "join": each extent's
// copies begin when those of the one before have ended on every link; else each link goes on by itself. "beside": unmapped so many at a
// time while others are copied; "thread": by another thread; "apart": while nothing is copied, and released one by one as the next copies
// begin; "end": when all is copied. "window": so many extents have copies enqueued.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "check.h"

static const size_t MIB = 1 << 20;
static const int MOST = 8, PIECES = 4, RUNS = 5;
static int gpus, extents = 64;
static bool to_peer, registers, is_here;
static size_t size;
static CUcontext contexts[MOST];
static CUstream lanes[MOST];
static std::vector<CUevent> ends[MOST];
static CUevent forked;
static CUdeviceptr home, away;
static char *host;
static std::vector<CUmemGenericAllocationHandle> held, lodged;
// Who may touch what is lodged, and how large a handle is there.
static std::vector<int> guests;
static size_t lodging;

static double now() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

enum Call { CREATE, ACCESS, LODGE, COPY, WAIT, UNMAP, RELEASE, CALLS };
static const char *const NAMES[CALLS] = {"create", "access", "lodge", "copy", "wait", "unmap", "release"};
static double spent[CALLS];

template <class Work> static void timed(Call call, Work work) {
    double begin = now();
    work();
    spent[call] += now() - begin;
}

static CUmemGenericAllocationHandle memory_of(int gpu, size_t size) {
    CUmemAllocationProp memory;
    memset(&memory, 0, sizeof memory);
    memory.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    memory.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    memory.location.id = gpu;
    CUmemGenericAllocationHandle handle;
    CHECK(cuMemCreate(&handle, size, &memory, 0));
    return handle;
}

static void open(CUdeviceptr start, size_t size, const std::vector<int> &whom) {
    std::vector<CUmemAccessDesc> access(whom.size());
    memset(access.data(), 0, access.size() * sizeof access[0]);
    for (size_t n = 0; n < whom.size(); n++) {
        access[n].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        access[n].location.id = whom[n];
        access[n].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    CHECK(cuMemSetAccess(start, size, access.data(), access.size()));
}

static std::vector<int> everybody() {
    std::vector<int> all;
    for (int gpu = 0; gpu < gpus; gpu++) all.push_back(gpu);
    return all;
}

static void make(int extent) {
    timed(CREATE, [&] {
        held[extent] = memory_of(0, size);
        CHECK(cuMemMap(home + extent * size, size, 0, held[extent], 0));
    });
    timed(ACCESS, [&] { open(home + extent * size, size, everybody()); });
}

static void unmap(int from, int to) {
    timed(UNMAP, [&] { CHECK(cuMemUnmap(home + from * size, (to - from) * size)); });
}

static void release(int from, int to) {
    timed(RELEASE, [&] {
        for (int extent = from; extent < to; extent++) CHECK(cuMemRelease(held[extent]));
    });
}

static void lodge(int extent) {
    size_t at = extent * size;
    if (at % lodging) return;
    timed(LODGE, [&] {
        lodged.push_back(memory_of(1, lodging));
        CHECK(cuMemMap(away + at, lodging, 0, lodged.back(), 0));
        open(away + at, lodging, guests);
    });
}

static void dislodge() {
    if (!lodged.empty()) CHECK(cuMemUnmap(away, lodged.size() * lodging));
    for (CUmemGenericAllocationHandle handle : lodged) CHECK(cuMemRelease(handle));
    lodged.clear();
}

static void copy(int extent, bool out, bool join) {
    size_t at = extent * size;
    if (to_peer && out) lodge(extent);
    timed(COPY, [&] {
        if (to_peer) {
            CHECK(out ? cuMemcpyDtoDAsync(away + at, home + at, size, lanes[0]) : cuMemcpyDtoDAsync(home + at, away + at, size, lanes[0]));
            CHECK(cuEventRecord(ends[0][extent], lanes[0]));
            return;
        }
        if (join) CHECK(cuEventRecord(forked, lanes[0]));
        for (int gpu = 0; gpu < gpus; gpu++) {
            CHECK(cuCtxSetCurrent(contexts[gpu]));
            if (join && gpu) CHECK(cuStreamWaitEvent(lanes[gpu], forked, 0));
            size_t piece = size / gpus / PIECES;
            for (int n = 0; n < PIECES; n++) {
                size_t offset = at + (gpu * PIECES + n) * piece;
                if (out) CHECK(cuMemcpyDtoHAsync(host + offset, home + offset, piece, lanes[gpu]));
                else CHECK(cuMemcpyHtoDAsync(home + offset, host + offset, piece, lanes[gpu]));
            }
            CHECK(cuEventRecord(ends[gpu][extent], lanes[gpu]));
            if (join && gpu) CHECK(cuStreamWaitEvent(lanes[0], ends[gpu][extent], 0));
        }
        CHECK(cuCtxSetCurrent(contexts[0]));
    });
}

static void wait(int extent) {
    timed(WAIT, [&] {
        for (int gpu = 0; gpu < (to_peer ? 1 : gpus); gpu++) CHECK(cuEventSynchronize(ends[gpu][extent]));
    });
}

// Does what it is given, one after another, on a thread of GPU 0.
class Helper {
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> work;
    bool over = false;
    std::thread thread{[this] {
        CHECK(cuCtxSetCurrent(contexts[0]));
        for (std::unique_lock<std::mutex> held(lock);;) {
            changed.wait(held, [&] { return over || !work.empty(); });
            if (work.empty()) return;
            std::function<void()> next = std::move(work.front());
            work.pop_front();
            held.unlock();
            next();
            held.lock();
        }
    }};

  public:
    void give(std::function<void()> next) {
        std::lock_guard<std::mutex> held(lock);
        work.push_back(std::move(next));
        changed.notify_one();
    }
    ~Helper() {
        {
            std::lock_guard<std::mutex> held(lock);
            over = true;
        }
        changed.notify_one();
        thread.join();
    }
};

enum Order { STAYS, BESIDE, THREAD, APART, END };

static void leave(Order order, bool join, int window, int batch) {
    int waited = 0, unmapped = 0, released = 0;
    {
        Helper helper;
        auto go = [&](int to) {
            int from = unmapped;
            unmapped = to;
            auto both = [=] { unmap(from, to), release(from, to); };
            if (order == THREAD) helper.give(both);
            else if (order == APART) unmap(from, to);
            else both();
            if (order != APART) released = to;
        };
        for (int extent = 0; extent < extents; extent++) {
            copy(extent, true, join);
            if (released < unmapped) release(released, released + 1), released++;
            while (extent + 1 - waited >= window) wait(waited++);
            if (order == APART && extent + 1 - unmapped >= batch)
                while (waited <= extent) wait(waited++);
            if (order != STAYS && order != END && waited - unmapped >= batch) go(waited);
        }
        while (waited < extents) wait(waited++);
        if (order != STAYS && unmapped < extents) go(extents);
    }
    if (order != STAYS) release(released, extents);
}

static void enter(bool join, bool makes) {
    for (int extent = 0; extent < extents; extent++) {
        if (makes) make(extent);
        copy(extent, false, join);
    }
    for (int extent = 0; extent < extents; extent++) wait(extent);
}

static void present(bool here) {
    if (here && !is_here)
        for (int extent = 0; extent < extents; extent++) make(extent);
    if (!here && is_here) unmap(0, extents), release(0, extents);
    is_here = here;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

template <class Before, class Work> static void measure(const char *name, Before before, Work work) {
    std::vector<double> times;
    for (int run = 0; run < RUNS; run++) {
        before();
        memset(spent, 0, sizeof spent);
        double begin = now();
        work();
        times.push_back(now() - begin);
    }
    std::sort(times.begin(), times.end());
    printf("%-44s %6.1f ms %5.0f GB/s  ", name, times[RUNS / 2], extents * size / times[RUNS / 2] / 1e6);
    for (int call = 0; call < CALLS; call++)
        if (spent[call] > 0.1) printf("  %s %.1f", NAMES[call], spent[call]);
    printf("\n");
    fflush(stdout);
}

static void out(const char *name, Order order, bool join, int window, int batch) {
    // Memory that was released a moment before takes longer to open.
    measure(name, [] { dislodge(), present(true); }, [=] {
        leave(order, join, window, batch);
        is_here = order == STAYS;
    });
}

static char *pinned(size_t size) {
    void *start = nullptr;
    if (!registers) {
        CHECK(cuMemHostAlloc(&start, size, CU_MEMHOSTALLOC_PORTABLE));
        return static_cast<char *>(start);
    }
    start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) {
        perror("moves: mmap");
        exit(1);
    }
    madvise(start, size, MADV_HUGEPAGE);
    memset(start, 1, size);
    CHECK(cuMemHostRegister(start, size, CU_MEMHOSTREGISTER_PORTABLE));
    return static_cast<char *>(start);
}

static void links() {
    double begin = now();
    host = pinned(extents * size);
    printf("%d GPUs, %zu MiB, pinned in %.0f ms\n", gpus, extents * size / MIB, now() - begin);
    out("out: copies alone", STAYS, false, extents, 0);
    out("out: copies alone, join", STAYS, true, extents, 0);
    out("out: copies alone, join, window 3", STAYS, true, 3, 0);
    out("out: 2 beside, join, window 3", BESIDE, true, 3, 2);
    out("out: 2 beside, window 3", BESIDE, false, 3, 2);
    out("out: 2 beside, window 8", BESIDE, false, 8, 2);
    out("out: 2 on a thread, window 8", THREAD, false, 8, 2);
    out("out: 8 beside, window 12", BESIDE, false, 12, 8);
    out("out: 16 beside, join, window 20", BESIDE, true, 20, 16);
    out("out: 8 apart, window 8", APART, false, 8, 8);
    out("out: 16 apart, window 8", APART, false, 8, 16);
    out("out: 16 apart, join, window 8", APART, true, 8, 16);
    out("out: end", END, false, extents, 0);
    measure("back: copies alone", [] { present(true); }, [] { enter(false, false); });
    measure("back: copies alone, join", [] { present(true); }, [] { enter(true, false); });
    auto makes = [](bool join) { enter(join, true), is_here = true; };
    measure("back: join", [] { present(false); }, [&] { makes(true); });
    measure("back", [] { present(false); }, [&] { makes(false); });
    measure("back: mapping alone", [] { present(false); }, [] {
        for (int extent = 0; extent < extents; extent++) make(extent);
        is_here = true;
    });
}

static void peer() {
    printf("%d GPUs, %zu MiB, to GPU 1\n", gpus, extents * size / MIB);
    std::vector<int> all = everybody();
    std::swap(all[0], all[1]);
    struct {
        const char *name;
        std::vector<int> guests;
        size_t lodging;
        Order order;
        int batch;
    } rows[] = {
        {"lodging of 1 GiB open to all, 32 apart", all, 1024 * MIB, APART, 32},
        {"1 GiB, to its owner and its guest, 32 apart", {1, 0}, 1024 * MIB, APART, 32},
        {"1 GiB, to its guest, 32 apart", {0}, 1024 * MIB, APART, 32},
        {"256 MiB, to both, 32 apart", {1, 0}, 256 * MIB, APART, 32},
        {"256 MiB, to both, 16 apart", {1, 0}, 256 * MIB, APART, 16},
        {"256 MiB, to both, guest first, 16 apart", {0, 1}, 256 * MIB, APART, 16},
        {"256 MiB, to both, 16 beside", {1, 0}, 256 * MIB, BESIDE, 16},
        {"256 MiB, to both, 16 on a thread", {1, 0}, 256 * MIB, THREAD, 16},
        {"256 MiB, to all, 16 apart", all, 256 * MIB, APART, 16},
    };
    for (const auto &row : rows) {
        dislodge();
        guests = row.guests, lodging = row.lodging;
        out(row.name, row.order, false, 8, row.batch);
    }
}

int main(int count, char **arguments) {
    for (int n = 1; n < count; n++) {
        if (!strcmp(arguments[n], "--peer")) to_peer = true;
        else if (!strcmp(arguments[n], "--register")) registers = true;
        else if (!strcmp(arguments[n], "--extents") && n + 1 < count) extents = atoi(arguments[++n]);
        else {
            fprintf(stderr, "usage: moves [--peer | --register] [--extents N]\n");
            return 2;
        }
    }
    CHECK(cuInit(0));
    CHECK(cuDeviceGetCount(&gpus));
    gpus = std::min(gpus, MOST);
    if (extents < 1 || (to_peer && gpus < 2)) {
        fprintf(stderr, "moves: %s\n", extents < 1 ? "at least one extent" : "--peer needs two GPUs");
        return 2;
    }
    for (int gpu = gpus - 1; gpu >= 0; gpu--) {
        CHECK(cuDevicePrimaryCtxRetain(&contexts[gpu], gpu));
        CHECK(cuCtxSetCurrent(contexts[gpu]));
        CHECK(cuStreamCreate(&lanes[gpu], CU_STREAM_NON_BLOCKING));
        ends[gpu].resize(extents);
        for (CUevent &end : ends[gpu]) CHECK(cuEventCreate(&end, CU_EVENT_DISABLE_TIMING));
    }
    CHECK(cuEventCreate(&forked, CU_EVENT_DISABLE_TIMING));
    size = (to_peer ? 256 : 128) * MIB;
    held.resize(extents);
    CHECK(cuMemAddressReserve(&home, extents * size, 0, 0, 0));
    // A handle that is larger than an extent may reach past the last one.
    CHECK(cuMemAddressReserve(&away, extents * size + 1024 * MIB, 0, 0, 0));
    if (to_peer) peer();
    else links();
    return 0;
}
