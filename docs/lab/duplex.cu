// Both directions at once over a relay: which ways of making the copies have an engine each.
//
//   nvcc -O2 -std=c++17 -o duplex duplex.cu -lcuda && ./duplex [SECONDS]
//
// GPU 0's memory is virtual memory that GPU 1 may touch; copies between it and pinned host memory are made by streams of GPU 1, over whose
// link they go, or by GPU 0 itself. Each flow has four copies of 16 MiB under way for so long. GB/s of what was done.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string>
#include <vector>

#include "check.h"

constexpr size_t PIECE = 16 << 20, ALL = size_t(1) << 30;
constexpr int UNDER_WAY = 4;

enum How { ANY, NAMED, STAGED, BATCH };
static const char* const SAID[] = {"cuMemcpyAsync", "cuMemcpyHtoDAsync / DtoHAsync", "through a slot of its own", "cuMemcpyBatchAsync"};

static CUcontext contexts[4];  // GPU 0; GPU 1, three contexts

static CUdeviceptr memory(int on, size_t size) {
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, on};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    CHECK(cuMemCreate(&handle, size, &prop, 0));
    CHECK(cuMemAddressReserve(&at, size, 0, 0, 0));
    CHECK(cuMemMap(at, size, 0, handle, 0));
    CUmemAccessDesc access[2] = {};
    for (int gpu = 0; gpu < 2; gpu++) access[gpu] = {{CU_MEM_LOCATION_TYPE_DEVICE, gpu}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CHECK(cuMemSetAccess(at, size, access, 2));
    return at;
}

struct Flow {
    bool out;
    int context;  // that makes the copies
    How how;
    CUdeviceptr host, gpu, slots = 0;
    CUstream stream, side = nullptr;
    std::deque<CUevent> under_way;
    std::vector<CUevent> filled, emptied;
    size_t at = 0, done = 0;

    Flow(bool out, int context, How how, int home = 0) : out(out), context(context), how(how) {
        CHECK(cuCtxSetCurrent(contexts[0]));
        void* pinned;
        CHECK(cuMemHostAlloc(&pinned, ALL, CU_MEMHOSTALLOC_PORTABLE));
        host = CUdeviceptr(pinned);
        for (size_t byte = 0; byte < ALL; byte += 4096) static_cast<char*>(pinned)[byte] = 1;
        gpu = memory(home, ALL);
        if (how == STAGED) {
            slots = memory(1, UNDER_WAY * PIECE);
            CHECK(cuStreamCreate(&side, CU_STREAM_NON_BLOCKING));
            for (int slot = 0; slot < UNDER_WAY; slot++) {
                CUevent event;
                CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
                (out ? filled : emptied).push_back(event);
            }
        }
        CHECK(cuCtxSetCurrent(contexts[context]));
        CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        if (how == STAGED)
            for (int slot = 0; slot < UNDER_WAY; slot++) {
                CUevent event;
                CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
                (out ? emptied : filled).push_back(event);
            }
    }

    void copy(CUdeviceptr to, CUdeviceptr from, bool to_host, CUstream on, How by) {
        if (by == ANY) CHECK(cuMemcpyAsync(to, from, PIECE, on));
        else if (by == BATCH) {
            CUmemcpyAttributes attributes = {};
            attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
            size_t size = PIECE, first = 0;
            CHECK(cuMemcpyBatchAsync(&to, &from, &size, 1, &attributes, &first, 1, on));
        } else if (to_host) CHECK(cuMemcpyDtoHAsync(reinterpret_cast<void*>(to), from, PIECE, on));
        else CHECK(cuMemcpyHtoDAsync(to, reinterpret_cast<const void*>(from), PIECE, on));
    }

    void enqueue() {
        const CUdeviceptr host_at = host + at % ALL, gpu_at = gpu + at % ALL;
        CUevent end;
        if (how == STAGED) {
            const size_t slot = at / PIECE % UNDER_WAY;
            const CUdeviceptr staged = slots + slot * PIECE;
            CUstream fill = out ? side : stream, empty = out ? stream : side;
            CHECK(cuCtxSetCurrent(contexts[out ? 0 : context]));
            CHECK(cuStreamWaitEvent(fill, emptied[slot], 0));
            copy(staged, out ? gpu_at : host_at, false, fill, ANY);
            CHECK(cuEventRecord(filled[slot], fill));
            CHECK(cuCtxSetCurrent(contexts[out ? context : 0]));
            CHECK(cuStreamWaitEvent(empty, filled[slot], 0));
            copy(out ? host_at : gpu_at, staged, out, empty, ANY);
            CHECK(cuEventRecord(emptied[slot], empty));
            CHECK(cuEventCreate(&end, CU_EVENT_DISABLE_TIMING));
            CHECK(cuEventRecord(end, empty));
        } else {
            CHECK(cuCtxSetCurrent(contexts[context]));
            copy(out ? host_at : gpu_at, out ? gpu_at : host_at, out, stream, how);
            CHECK(cuEventCreate(&end, CU_EVENT_DISABLE_TIMING));
            CHECK(cuEventRecord(end, stream));
        }
        under_way.push_back(end);
        at += PIECE;
    }

    void poll(bool goes_on = true) {
        while (!under_way.empty() && cuEventQuery(under_way.front()) == CUDA_SUCCESS) {
            CHECK(cuEventDestroy(under_way.front()));
            under_way.pop_front();
            done += PIECE;
        }
        while (goes_on && under_way.size() < UNDER_WAY) enqueue();
    }
};

static void run(const std::string& said, std::vector<Flow*> flows, double seconds) {
    using clock = std::chrono::steady_clock;
    auto passed = [](clock::time_point since) { return std::chrono::duration<double>(clock::now() - since).count(); };
    for (auto begin = clock::now(); passed(begin) < seconds / 4;)
        for (Flow* flow : flows) flow->poll();
    for (Flow* flow : flows) flow->done = 0;
    auto begin = clock::now();
    while (passed(begin) < seconds)
        for (Flow* flow : flows) flow->poll();
    const double took = passed(begin);
    double sum = 0;
    printf("%-72s", said.c_str());
    for (Flow* flow : flows) {
        sum += flow->done / took / 1e9;
        printf(" %s %5.1f", flow->out ? "out" : "in", flow->done / took / 1e9);
    }
    printf("  sum %6.1f\n", sum);
    fflush(stdout);
    for (int context = 0; context < 4; context++) {
        CHECK(cuCtxSetCurrent(contexts[context]));
        CHECK(cuCtxSynchronize());
    }
    for (Flow* flow : flows) flow->poll(false);
}

int main(int count, char** words) {
    const double seconds = count > 1 ? atof(words[1]) : 0.3;
    int gpus_here = 0;
    if (seconds <= 0 || count > 2) {
        fprintf(stderr, "usage: duplex [SECONDS]\n");
        return 2;
    }
    CHECK(cuInit(0));
    CHECK(cuDeviceGetCount(&gpus_here));
    if (gpus_here < 2) {
        fprintf(stderr, "duplex: needs two GPUs, here are %d\n", gpus_here);
        return 2;
    }
    CUdevice gpus[2];
    for (int gpu = 0; gpu < 2; gpu++) {
        CHECK(cuDeviceGet(&gpus[gpu], gpu));
        CHECK(cuDevicePrimaryCtxRetain(&contexts[gpu], gpus[gpu]));
    }
    for (int more = 2; more < 4; more++) CHECK(cuCtxCreate(&contexts[more], nullptr, 0, gpus[1]));
    Flow own_out(true, 0, ANY), own_in(false, 0, ANY);
    run("GPU 0's own link, alone", {&own_out}, seconds);
    run("", {&own_in}, seconds);
    run("both at once", {&own_out, &own_in}, seconds);
    std::vector<std::pair<Flow*, Flow*>> relays;
    for (How how : {ANY, NAMED, STAGED}) {
        auto* out = new Flow(true, 2, how);
        auto* in = new Flow(false, 2, how);
        run(std::string("GPU 1's link, ") + SAID[how] + ", alone", {out}, seconds);
        run("", {in}, seconds);
        run("both at once", {out, in}, seconds);
        relays.emplace_back(out, in);
    }
    Flow elsewhere(false, 3, ANY);
    run("GPU 1's link, cuMemcpyAsync, both at once, a context each", {relays[0].first, &elsewhere}, seconds);
    run("out by cuMemcpyAsync, in through a slot", {relays[0].first, relays[2].second}, seconds);
    run("out through a slot, in by cuMemcpyAsync", {relays[2].first, relays[0].second}, seconds);
    auto all = [&](const char* said, Flow* out, Flow* in) { run(said, {&own_out, &own_in, out, in}, seconds); };
    all("all four: cuMemcpyAsync", relays[0].first, relays[0].second);
    all("all four: named", relays[1].first, relays[1].second);
    all("all four: out by cuMemcpyAsync, in through a slot", relays[0].first, relays[2].second);
    all("all four: out through a slot, in by cuMemcpyAsync", relays[2].first, relays[0].second);
    all("all four: both through slots", relays[2].first, relays[2].second);
    Flow far_out(true, 1, ANY, 1), far_in(false, 1, ANY, 1);
    run("each GPU's own link to its own memory", {&own_out, &own_in, &far_out, &far_in}, seconds);
    run("GPU 1's own link to its own memory beside a relay's, in", {&far_out, relays[0].second}, seconds);
    run("the same, out", {&far_in, relays[0].first}, seconds);
    Flow batch_out(true, 2, BATCH), batch_in(false, 2, BATCH);
    run("GPU 1's link, cuMemcpyBatchAsync, both at once", {&batch_out, &batch_in}, seconds);
    return 0;
}
