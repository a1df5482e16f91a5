// How fast host memory is touched and pinned, by how many threads and in which order. Start several, one after another, before the first
// has ended, so that none has memory that another touched:
//
//     pinning GIB touch THREADS [populate]       touches huge pages alone
//     pinning GIB ahead THREADS [populate]       threads touch, this one pins each arena as soon as it is touched
//     pinning GIB ahead:N THREADS [populate]     the same, N threads pin
//     pinning GIB after:N THREADS [populate]     threads touch all of it, then N threads pin
//     pinning GIB each THREADS [populate]        each thread touches an arena and pins it
//     pinning GIB pin THREADS                    threads pin what nobody touched
//
// Pages are written to, or populated by madvise. Prints a line and keeps its memory until its input ends.
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <thread>
#include <vector>

#include "check.h"

constexpr size_t HUGE = 2 << 20, SMALL = 4 << 10, ARENA = 256 << 20;
constexpr int POPULATE_WRITE = 23;

static char *start;
static size_t size;
static bool populates;
static CUcontext context;
static std::atomic<size_t> next_page, next_arena;
static std::vector<std::atomic<size_t>> touched;

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void touch(size_t from, size_t bytes) {
    for (size_t at = from; at < from + bytes; at += HUGE) {
        if (!populates) {
            for (size_t page = at; page < at + HUGE; page += SMALL) *const_cast<volatile char *>(start + page) = 0;
        } else if (madvise(start + at, HUGE, POPULATE_WRITE)) {
            std::perror("MADV_POPULATE_WRITE");
            std::exit(1);
        }
    }
}

static void touch_pages() {
    for (size_t at; (at = next_page.fetch_add(HUGE)) < size;) {
        touch(at, HUGE);
        touched[at / ARENA] += HUGE;
    }
}

/// Arenas in turn: touched by others before, or by this thread now, or by nobody.
static void pin(bool waits, bool touches) {
    CHECK(cuCtxSetCurrent(context));
    for (size_t at; (at = next_arena.fetch_add(ARENA)) < size;) {
        while (waits && touched[at / ARENA] < ARENA) std::this_thread::sleep_for(std::chrono::microseconds(20));
        if (touches) touch(at, ARENA);
        CHECK(cuMemHostRegister(start + at, ARENA, CU_MEMHOSTREGISTER_PORTABLE));
    }
}

template <typename Work> static std::vector<std::thread> begin(int count, Work work) {
    std::vector<std::thread> threads;
    for (int number = 0; number < count; number++) threads.emplace_back(work);
    return threads;
}

static void end(std::vector<std::thread> threads) {
    for (std::thread &thread : threads) thread.join();
}

int main(int count, char **words) {
    const std::string_view given = count < 4 ? "" : words[2], way = given.substr(0, given.find(':'));
    const bool is_known = way == "touch" || way == "ahead" || way == "after" || way == "each" || way == "pin";
    const int gib = is_known ? std::atoi(words[1]) : 0, threads = is_known ? std::atoi(words[3]) : 0;
    const int pinning = way == given ? 1 : std::atoi(words[2] + way.size() + 1);
    if (gib < 1 || threads < 1 || pinning < 1) {
        return std::fputs("pinning GIB touch|ahead[:N]|after[:N]|each|pin THREADS [populate]: whole numbers above 0\n", stderr), 2;
    }
    size = static_cast<size_t>(gib) << 30;
    populates = count > 4;
    touched = std::vector<std::atomic<size_t>>(size / ARENA);
    CUdevice device;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    char *map = static_cast<char *>(mmap(nullptr, size + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    start = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(map) + HUGE - 1) / HUGE * HUGE);
    madvise(start, size, MADV_HUGEPAGE);
    const double begun = now();
    if (way == "each" || way == "pin") {
        end(begin(threads, [&] { pin(false, way == "each"); }));
    } else {
        std::vector<std::thread> touching = begin(threads, touch_pages), pins;
        if (way == "ahead") pins = begin(pinning, [] { pin(true, false); });
        end(std::move(touching));
        if (way == "after") pins = begin(pinning, [] { pin(false, false); });
        end(std::move(pins));
    }
    const double took = now() - begun;
    std::printf("%s GiB, %s, %d threads, %s: %.2f GB/s\n", words[1], words[2], threads, populates ? "populated" : "written", size / took / 1e9);
    std::fflush(stdout);
    return std::getchar(), 0;
}
