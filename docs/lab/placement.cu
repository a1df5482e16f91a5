// How fast each part of a process's pinned host memory goes over the links of two GPUs at once, and what order of copies makes of it.
//
//   nvcc -O2 -std=c++17 -o placement placement.cu -lcuda && ./placement [GIB]
//
// Blocks of 256 MiB are touched by 16 threads, pinned, and copied by halves, one over each link at the same time. The slowest and the
// fastest eighth of them are then copied in queues, one for each link, in parts of so many MiB. GB/s of both links together.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"

constexpr size_t MIB = 1 << 20, BLOCK = 256 * MIB, HUGE = 2 * MIB;
constexpr int THREADS = 16;

static char* host;
static CUcontext contexts[2];
static CUstream streams[2];
static CUdeviceptr memory[2];

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void copy(int gpu, bool out, size_t block, size_t from, size_t bytes) {
    char* at = host + block * BLOCK + from;
    CHECK(cuCtxSetCurrent(contexts[gpu]));
    if (out) {
        CHECK(cuMemcpyDtoHAsync(at, memory[gpu] + from, bytes, streams[gpu]));
    } else {
        CHECK(cuMemcpyHtoDAsync(memory[gpu] + from, at, bytes, streams[gpu]));
    }
}

/// GB/s of the copies that `begin` begins.
template <typename Begin> static double rate(size_t bytes, Begin begin) {
    const double begun = now();
    begin();
    for (int gpu = 0; gpu < 2; gpu++) {
        CHECK(cuCtxSetCurrent(contexts[gpu]));
        CHECK(cuStreamSynchronize(streams[gpu]));
    }
    return bytes / (now() - begun) / 1e9;
}

using Blocks = std::vector<size_t>;
/// What a link copies: a part of a block of one list, then the part behind it of a block of the next list. The parts between are left out.
struct Queue {
    std::vector<Blocks> turns;
};

static double together(bool out, const Queue (&queues)[2], size_t part) {
    const size_t blocks = queues[0].turns[0].size();
    return rate(2 * blocks * BLOCK, [&] {
        for (size_t block = 0; block < blocks; block++) {
            for (size_t from = 0; from < BLOCK; from += part) {
                for (int gpu = 0; gpu < 2; gpu++) {
                    const std::vector<Blocks>& turns = queues[gpu].turns;
                    copy(gpu, out, turns[from / part % turns.size()][block], from, part);
                }
            }
        }
    });
}

static double mean(const std::vector<double>& rates, const Blocks& blocks) {
    return std::accumulate(blocks.begin(), blocks.end(), 0.0, [&](double sum, size_t block) { return sum + rates[block]; }) / blocks.size();
}

int main(int count, char** words) {
    const int gib = count > 1 ? atoi(words[1]) : 44;
    const size_t size = size_t(gib) << 30, blocks = size / BLOCK, eighth = blocks / 8 / 2 * 2;
    if (gib < 4) return fputs("placement [GIB], at least 4\n", stderr), 2;

    int gpus;
    CHECK(cuInit(0));
    CHECK(cuDeviceGetCount(&gpus));
    if (gpus < 2) return fputs("placement: needs two GPUs\n", stderr), 2;
    for (int gpu = 0; gpu < 2; gpu++) {
        CHECK(cuDevicePrimaryCtxRetain(&contexts[gpu], gpu));
        CHECK(cuCtxSetCurrent(contexts[gpu]));
        CHECK(cuStreamCreate(&streams[gpu], CU_STREAM_NON_BLOCKING));
        CHECK(cuMemAlloc(&memory[gpu], BLOCK));
    }

    void* map = mmap(nullptr, size + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return perror("mmap"), 1;
    host = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(map) + HUGE - 1) / HUGE * HUGE);
    madvise(host, size, MADV_HUGEPAGE);
    std::atomic<size_t> next{0};
    std::vector<std::thread> threads;
    for (int number = 0; number < THREADS; number++) {
        threads.emplace_back([&] {
            for (size_t block; (block = next++) < blocks;) memset(host + block * BLOCK, 1, BLOCK);
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t block = 0; block < blocks; block++) CHECK(cuMemHostRegister(host + block * BLOCK, BLOCK, CU_MEMHOSTREGISTER_PORTABLE));

    for (bool out : {true, false}) {
        std::vector<double> both[2];
        for (std::vector<double>& round : both) {
            for (size_t block = 0; block < blocks; block++) {
                round.push_back(rate(BLOCK, [&] {
                    for (int gpu = 0; gpu < 2; gpu++) copy(gpu, out, block, gpu * BLOCK / 2, BLOCK / 2);
                }));
            }
        }
        // Which eighths: by the first round. How fast they are: by the second.
        Blocks order(blocks);
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](size_t one, size_t other) { return both[0][one] < both[0][other]; });
        const Blocks slow(order.begin(), order.begin() + eighth), fast(order.end() - eighth, order.end());
        printf("%s, blocks of 256 MiB by halves: slowest eighth %.1f, fastest %.1f\n", out ? "out" : "in", mean(both[1], slow), mean(both[1], fast));
        printf("  each in turn:");
        for (double each : both[1]) printf(" %.0f", each);
        for (int gpu = 0; gpu < 2; gpu++) {
            printf("\n  link %d alone:", gpu);
            for (const Blocks* these : {&slow, &fast}) {
                const double alone = rate(eighth * BLOCK, [&] {
                    for (size_t block : *these) copy(gpu, out, block, 0, BLOCK);
                });
                printf(" %s %.1f", these == &slow ? "slow" : "fast", alone);
            }
        }
        puts("");
        // Half of the slow ones and half of the fast ones for each link.
        const auto halves = [&](const Blocks& all) {
            return std::pair(Blocks(all.begin(), all.begin() + eighth / 2), Blocks(all.begin() + eighth / 2, all.end()));
        };
        const auto [slow0, slow1] = halves(slow);
        const auto [fast0, fast1] = halves(fast);
        for (size_t part : {BLOCK, 64 * MIB, 16 * MIB}) {
            printf("  parts of %3zu MiB: both fast %.1f, both slow %.1f, one fast and one slow %.1f", part / MIB,
                   together(out, {{{fast0}}, {{fast1}}}, part), together(out, {{{slow0}}, {{slow1}}}, part), together(out, {{{fast0}}, {{slow0}}}, part));
            if (part < BLOCK) {
                printf("; fast and slow in turn: both begin with a fast one %.1f, one with a slow one %.1f", together(out, {{{fast0, slow0}}, {{fast1, slow1}}}, part),
                       together(out, {{{fast0, slow0}}, {{slow1, fast1}}}, part));
            }
            puts("");
        }
        fflush(stdout);
    }
}
