// Torch's side of the library: what is passed by value, and what is thrown where torch is loaded. For torch stands an
// empty libc10.so, which GLAKE_FAKE_C10 names.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#include "check.h"

using Id = std::pair<unsigned long long, unsigned long long>;

template <typename Call>
static std::string thrown(Call call) {
    try {
        call();
    } catch (const std::runtime_error &error) {
        return error.what();
    }
    return "";
}

static bool begins(const std::string &text, const char *with) { return text.rfind(with, 0) == 0; }

static void filters_and_ids_come_by_value() {
    int asked = 0;
    std::string long_name(100, 'x'); // so that the function does not fit into itself
    CUstream_st *const mine = reinterpret_cast<CUstream_st *>(1);
    std::function<bool(CUstream_st *)> filter = [&asked, long_name, mine](CUstream_st *stream) {
        asked += long_name.size() == 100;
        return stream == mine;
    };
    gmlake_begin_allocate_to_pool(1, Id(0, 0x1234567890abcdefull), filter);
    void *inside = gmlake_malloc(5 * MIB, 1, mine), *outside = gmlake_malloc(5 * MIB, 1, reinterpret_cast<void *>(2));
    CHECK(asked == 2 && inside != nullptr && outside != nullptr);
    int live = 0;
    auto count = [](void *context, void *, std::uint64_t) { ++*static_cast<int *>(context); };
    OK(glake_pool_blocks(1, 0, 0x1234567890abcdefull, count, &live));
    CHECK(live == 1);
    gmlake_end_allocate_to_pool(1, Id(0, 0x1234567890abcdefull));
    std::int32_t owners = 0;
    OK(glake_pool_use_count(1, 0, 0x1234567890abcdefull, &owners));
    CHECK(owners == 1);
    gmlake_free(inside, 5 * MIB, 1, mine);
    gmlake_free(outside, 5 * MIB, 1, nullptr);
    gmlake_release_pool(1, Id(0, 0x1234567890abcdefull));
    OK(glake_pool_use_count(1, 0, 0x1234567890abcdefull, &owners));
    CHECK(owners == 0);
}

static void a_filter_that_throws_takes_nothing() {
    gmlake_begin_allocate_to_pool(1, Id(9, 0), [](CUstream_st *) -> bool { throw std::runtime_error("no"); });
    void *block = gmlake_malloc(300, 1, nullptr);
    CHECK(block != nullptr);
    gmlake_begin_allocate_to_pool(1, Id(10, 0), std::function<bool(CUstream_st *)>());
    void *other = gmlake_malloc(300, 1, nullptr);
    int live = 0;
    auto count = [](void *context, void *, std::uint64_t) { ++*static_cast<int *>(context); };
    OK(glake_pool_blocks(1, 9, 0, count, &live));
    CHECK(live == 0);
    OK(glake_pool_blocks(1, 10, 0, count, &live));
    CHECK(live == 1);
    for (unsigned long long id : {9, 10}) {
        gmlake_end_allocate_to_pool(1, Id(id, 0));
        gmlake_release_pool(1, Id(id, 0));
    }
    gmlake_free(block, 300, 1, nullptr);
    gmlake_free(other, 300, 1, nullptr);
}

static void without_torch_nothing_is_thrown() {
    CHECK(gmlake_malloc(1000 * GIB, 0, nullptr) == nullptr);
    gmlake_memory_fraction(2.0, 0);
    gmlake_begin_allocate_to_pool(44, Id(1, 0), [](CUstream_st *) { return true; });
    CHECK(std::strstr(gmlake_last_error(), "device 44") != nullptr);
}

static void with_torch_what_fails_is_thrown() {
    void *torch = dlopen(std::getenv("GLAKE_FAKE_C10"), RTLD_NOW);
    CHECK(torch != nullptr);
    CHECK(begins(thrown([] { gmlake_malloc(1000 * GIB, 0, nullptr); }), "CUDA out of memory. Tried to allocate 1000.00 GiB"));
    CHECK(begins(thrown([] { gmlake_malloc(1, 44, nullptr); }), "device 44 does not exist"));
    CHECK(begins(thrown([] { gmlake_memory_fraction(2.0, 0); }), "a memory fraction of 2 is out of range"));
    auto all = [](CUstream_st *) { return true; };
    CHECK(begins(thrown([&] { gmlake_begin_allocate_to_pool(44, Id(1, 0), all); }), "device 44 does not exist"));
    // What destructors call throws nothing.
    gmlake_end_allocate_to_pool(0, Id(77, 0));
    gmlake_release_pool(0, Id(77, 0));
    gmlake_free(&torch, 1, 0, nullptr);
    gmlake_record_stream(&torch, nullptr);
    CHECK(gmlake_malloc(0, 0, nullptr) == nullptr);
    gmlake_reset();
    gmlake_init(4);
}

// What destructors of torch's call, in a forked child and after the library's own handler of the exit: an exception would end the
// process by a signal.
static void give_up() noexcept {
    gmlake_end_allocate_to_pool(0, Id(5, 0));
    gmlake_release_pool(0, Id(5, 0));
    gmlake_reset();
}

static void a_forked_child_gives_up_into_the_void() {
    gmlake_begin_allocate_to_pool(0, Id(5, 0), [](CUstream_st *) { return false; });
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        give_up();
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    std::int32_t owners = 0;
    OK(glake_pool_use_count(0, 5, 0, &owners));
    CHECK(owners == 1);
}

int main() {
    std::atexit(give_up);
    gmlake_init(4);
    CHECK(glake_started());
    filters_and_ids_come_by_value();
    a_filter_that_throws_takes_nothing();
    without_torch_nothing_is_thrown();
    with_torch_what_fails_is_thrown();
    a_forked_child_gives_up_into_the_void();
    return 0;
}
