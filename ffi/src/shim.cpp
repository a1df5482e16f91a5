// Entry points that need C++: torch passes std::function and std::pair by value, and expects failures as exceptions.
//
// torch ─► gmlake_malloc (Rust, one jump) ─► gmlake_shim_malloc ─► glake_alloc (Rust) ─► back here ─► throw
//
// Exceptions are thrown here after Rust has returned, and unwind no Rust frame. None enters Rust either.

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <stdexcept>
#include <utility>

struct CUstream_st;

extern "C" {
std::int32_t glake_alloc(std::int32_t device, std::size_t size, void *stream, void **out);
std::int32_t glake_start(void);
std::int32_t glake_trim(std::int32_t device, std::uint64_t keep, std::uint64_t *released);
std::int32_t glake_set_fraction(std::int32_t device, double fraction);
std::int32_t glake_pool_begin(std::int32_t device, std::uint64_t first, std::uint64_t second,
                              bool (*filter)(void *context, void *stream), void *context, void (*drop)(void *context));
bool glake_started(void);
const char *glake_last_error(void);
}

namespace {

using Filter = std::function<bool(CUstream_st *)>;
using PoolId = std::pair<unsigned long long, unsigned long long>;

bool is_torch_loaded() {
    void *torch = dlopen("libc10.so", RTLD_NOLOAD | RTLD_LAZY);
    if (torch == nullptr) return false;
    dlclose(torch);
    return true;
}

// Torch turns this into a Python exception; a C program cannot catch it and checks the returned value.
void fail() {
    if (is_torch_loaded()) throw std::runtime_error(glake_last_error());
}

// A filter that throws accepts no stream: the allocation goes to the default pool.
bool ask(void *context, void *stream) {
    try {
        return (*static_cast<Filter *>(context))(static_cast<CUstream_st *>(stream));
    } catch (...) {
        return false;
    }
}

void drop(void *context) { delete static_cast<Filter *>(context); }

}  // namespace

extern "C" {

bool gmlake_shim_is_torch_loaded(void) { return is_torch_loaded(); }

void *gmlake_shim_malloc(std::size_t size, int device, void *stream) {
    void *block = nullptr;
    if (glake_alloc(device, size, stream, &block) != 0) fail();
    return block;
}

void gmlake_shim_init(int) {
    if (glake_start() != 0) fail();
}

void gmlake_shim_reset(void) {
    std::uint64_t released = 0;
    if (glake_started() && glake_trim(-1, 0, &released) != 0) fail();
}

void gmlake_shim_memory_fraction(double fraction, int device) {
    if (glake_set_fraction(device, fraction) != 0) fail();
}

void gmlake_shim_begin_allocate_to_pool(int device, PoolId id, Filter filter) {
    Filter *kept = nullptr;
    if (filter) kept = new Filter(std::move(filter));
    if (glake_pool_begin(device, id.first, id.second, kept ? ask : nullptr, kept, kept ? drop : nullptr) != 0) fail();
}
}
