/* Regions: memory that leaves its GPU and comes back, uses of it, and what is said about both. */
#define _GNU_SOURCE
#include <pthread.h>
#include <unistd.h>

#include "check.h"

static void fill(void *block, size_t size, unsigned seed) {
    unsigned char *host = malloc(size);
    for (size_t i = 0; i < size; i++) host[i] = (unsigned char)((i * 2654435761u >> 13) + seed);
    OK(glake_copy_async(block, host, size, NULL, GLAKE_COPY_BLOCKING, NULL));
    free(host);
}

static void compare(const void *block, size_t size, unsigned seed) {
    unsigned char *host = malloc(size);
    OK(glake_copy_async(host, block, size, NULL, GLAKE_COPY_BLOCKING, NULL));
    for (size_t i = 0; i < size; i++) CHECK(host[i] == (unsigned char)((i * 2654435761u >> 13) + seed));
    free(host);
}

static bool says(char *text, const char *part) {
    CHECK(text != NULL);
    bool found = strstr(text, part) != NULL;
    if (!found) fprintf(stderr, "%s\nhas no %s\n", text, part);
    glake_string_free(text);
    return found;
}

static void *region_block(const char *tag, int device, size_t size) {
    OK(glake_region_push(tag));
    void *block = block_of(device, size, NULL);
    OK(glake_region_pop());
    return block;
}

static void leaves_and_comes_back(void) {
    OK(glake_region_define("weights", GLAKE_POLICY_KEEP, GLAKE_HOST_COPY_DROP));
    OK(glake_region_define("weights", GLAKE_POLICY_KEEP, GLAKE_HOST_COPY_DROP));
    char *block = region_block("weights", 0, 20 * MIB), *other = block_of(0, 3 * MIB, NULL);
    CHECK(says(glake_region_of(block + MIB), "weights") && glake_region_of(other) == NULL);
    fill(block, 20 * MIB, 1);
    fill(other, 3 * MIB, 2);
    int64_t before = stats_of(0).all.reserved_bytes.current;

    char *report = glake_shrink("{\"tags\":[\"weights\"]}");
    CHECK(report != NULL && strstr(report, "\"copied\":20971520") != NULL && strstr(report, "\"resident\":0") != NULL);
    CHECK(strstr(report, "\"predicted_refill_seconds\":0.") != NULL && strstr(report, "\"holder\":") != NULL);
    glake_string_free(report);
    CHECK(stats_of(0).all.reserved_bytes.current <= before - (int64_t)(20 * MIB));
    CHECK(stats_of(0).all.allocated_bytes.current == (int64_t)(23 * MIB));
    CHECK(says(glake_regions_json(), "\"place\":\"host\"") && says(glake_regions_json(), "\"places\":{\"host\":"));
    CHECK(says(glake_snapshot_json(), "\"glake_regions\":[{"));
    CHECK(says(glake_gate_json(), "\"closed\":[\"weights\"]"));
    compare(other, 3 * MIB, 2);

    CHECK(says(glake_refill("{\"timeout_ms\":60000}"), "\"copied\":20971520"));
    CHECK(says(glake_gate_json(), "\"open\":true"));
    compare(block, 20 * MIB, 1);
    OK(glake_free(block));
    OK(glake_free(other));
}

static void what_is_touched_comes_back(void) {
    char *block = region_block("weights", 1, 9 * MIB), *other = block_of(1, 3 * MIB, NULL);
    fill(block, 9 * MIB, 3);
    fill(other, 3 * MIB, 4);
    glake_string_free(glake_shrink(NULL));
    compare(block, 9 * MIB, 3);
    CHECK(says(glake_gate_json(), "\"closed\":[\"default\"]"));
    void *more = block_of(1, MIB, NULL);
    CHECK(says(glake_gate_json(), "\"open\":true"));
    compare(other, 3 * MIB, 4);
    OK(glake_free(more));
    OK(glake_free(block));
    OK(glake_free(other));
}

static int answer;
static int events;

static int32_t hook(void *context, const char *event) {
    CHECK(context == &answer && strstr(event, "\"event\":") != NULL);
    __atomic_fetch_add(&events, 1, __ATOMIC_SEQ_CST);
    return *(int *)context;
}

static void hooks(void) {
    void *block = block_of(0, 3 * MIB, NULL);
    fill(block, 3 * MIB, 5);
    OK(glake_hooks_set(hook, hook, &answer, 10000));
    answer = 7;
    CHECK(glake_shrink(NULL) == NULL && glake_last_status() == GLAKE_CLOSED);
    CHECK(strstr(glake_last_error(), "the hook before refused with 7") != NULL);
    answer = 0;
    glake_string_free(glake_shrink(NULL));
    CHECK(events == 3);
    glake_string_free(glake_refill(NULL));
    CHECK(events == 5);
    OK(glake_hooks_set(NULL, NULL, NULL, -1));
    compare(block, 3 * MIB, 5);
    OK(glake_free(block));
}

static void *shrinks(void *report) {
    *(char **)report = glake_shrink("{\"tags\":[\"weights\"]}");
    return NULL;
}

static void the_gate(void) {
    const char *tags[] = {"weights"};
    void *block = region_block("weights", 0, 5 * MIB);
    fill(block, 5 * MIB, 6);
    uint64_t use = 0;
    OK(glake_use_begin(tags, 1, GLAKE_WHEN_CLOSED_REFUSE, -1, &use));
    CHECK(glake_shrink("{\"tags\":[\"weights\"],\"timeout_ms\":20}") == NULL && glake_last_status() == GLAKE_TIMEOUT);
    CHECK(strstr(glake_last_error(), "1 use of 'weights' was still running") != NULL);
    pthread_t thread;
    char *report = NULL;
    CHECK(pthread_create(&thread, NULL, shrinks, &report) == 0);
    char *gate;
    while (strstr(gate = glake_gate_json(), "\"closing\":[[\"weights\"]]") == NULL) glake_string_free(gate), usleep(1000);
    glake_string_free(gate);
    compare(block, 5 * MIB, 6);
    OK(glake_use_end(use));
    CHECK(pthread_join(thread, NULL) == 0 && says(report, "\"resident\":0"));
    FAILS(glake_use_end(use), GLAKE_INVALID, "it was ended before");
    FAILS(glake_use_begin(tags, 1, GLAKE_WHEN_CLOSED_REFUSE, -1, &use), GLAKE_CLOSED, "the gate is closed: 'weights'");
    FAILS(glake_use_begin(tags, 1, GLAKE_WHEN_CLOSED_HOLD, 20, &use), GLAKE_TIMEOUT, "was held for");
    FAILS(glake_gate_wait(tags, 1, GLAKE_WHEN_CLOSED_REFUSE, -1), GLAKE_CLOSED, "the gate is closed: 'weights'");
    FAILS(glake_gate_wait(tags, 1, GLAKE_WHEN_CLOSED_HOLD, 20), GLAKE_TIMEOUT, "was held for");
    OK(glake_use_begin(NULL, 0, GLAKE_WHEN_CLOSED_REFILL, -1, &use));
    compare(block, 5 * MIB, 6);
    OK(glake_use_end(use));
    OK(glake_free(block));
}

struct steps {
    uint64_t use;
    void *block;
    int parked;
};

// Steps of a use until it was parked once.
static void *runs(void *context) {
    struct steps *steps = context;
    while (steps->parked == 0) {
        compare(steps->block, 5 * MIB, 7);
        steps->parked = glake_safepoint(steps->use);
    }
    compare(steps->block, 5 * MIB, 7);
    return NULL;
}

static void safe_points(void) {
    const char *tags[] = {"weights"};
    struct steps one = {.block = region_block("weights", 0, 5 * MIB)}, other;
    fill(one.block, 5 * MIB, 7);
    CHECK(!glake_safepoint_wanted() && glake_safepoint(99) == 0 && glake_safepoint_arrive(99) == 0);
    FAILS(glake_use_join(99), GLAKE_INVALID, "99");
    OK(glake_use_begin(tags, 1, GLAKE_WHEN_CLOSED_REFUSE, -1, &one.use));
    OK(glake_use_join(one.use));
    other = one;
    pthread_t threads[2];
    CHECK(pthread_create(&threads[0], NULL, runs, &one) == 0 && pthread_create(&threads[1], NULL, runs, &other) == 0);
    CHECK(says(glake_shrink("{\"tags\":[\"weights\"]}"), "\"resident\":0"));
    CHECK(says(glake_gate_json(), "\"parked\":1"));
    FAILS(glake_use_join(one.use), GLAKE_CLOSED, "is parked");
    glake_string_free(glake_refill(NULL));
    CHECK(pthread_join(threads[0], NULL) == 0 && pthread_join(threads[1], NULL) == 0);
    CHECK(one.parked == 1 && other.parked == 1);
    OK(glake_use_leave(one.use));
    OK(glake_use_end(one.use));
    OK(glake_free(one.block));
}

static void sealed(void) {
    OK(glake_region_define("sealed", GLAKE_POLICY_SEALED, GLAKE_HOST_COPY_RETAIN));
    void *block = region_block("sealed", 0, 6 * MIB);
    fill(block, 6 * MIB, 7);
    OK(glake_region_prepare("sealed"));
    OK(glake_region_seal("sealed", false));
    for (int round = 0; round < 3; round++) {
        CHECK(says(glake_shrink("{\"tags\":[\"sealed\"]}"), round == 0 ? "\"copied\":6291456" : "\"copied\":0"));
        OK(glake_region_wait("sealed", 0, NULL));
        compare(block, 6 * MIB, 7);
    }
    OK(glake_region_unseal("sealed"));
    FAILS(glake_region_seal("weights", false), GLAKE_INVALID, "was not made to be sealed");
    OK(glake_free(block));
}

static void plain_memory_stays(void) {
    OK(glake_region_define("beside", GLAKE_POLICY_KEEP, GLAKE_HOST_COPY_DROP));
    char *leaves = region_block("beside", 0, 8 * MIB);
    OK(glake_plain_push());
    char *plain = block_of(0, 8 * MIB, NULL);
    OK(glake_plain_pop());
    fill(plain, 8 * MIB, 3);
    fill(leaves, 8 * MIB, 4);
    unsigned char handle[64];
    size_t length = sizeof handle;
    uint64_t offset = 0;
    FAILS(glake_share(plain, handle, sizeof handle, &length, &offset), GLAKE_UNSUPPORTED, "is plain");
    OK(glake_region_fix(plain, true));
    CHECK(says(glake_shrink("{}"), "plain memory, which stays"));
    compare(plain, 8 * MIB, 3);
    CHECK(says(glake_refill("{}"), "\"copied\":"));
    compare(leaves, 8 * MIB, 4);
    OK(glake_free(plain));
    OK(glake_free(leaves));
    FAILS(glake_plain_pop(), GLAKE_INVALID, "allocates no plain memory");
}

static void mistakes(void) {
    const char *tags[] = {"sealed", "nothing"};
    uint64_t use = 0;
    FAILS(glake_region_define(NULL, 0, 0), GLAKE_INVALID, "tag is null");
    FAILS(glake_region_define("x", 3, 0), GLAKE_INVALID, "policy 3: 0 (keep)");
    FAILS(glake_region_define("x", 0, 3), GLAKE_INVALID, "host_copy 3: 0 (drop)");
    FAILS(glake_region_define("default", 0, 0), GLAKE_INVALID, "cannot be called 'default'");
    FAILS(glake_region_define("weights", 2, 0), GLAKE_INVALID, "is there as keep");
    FAILS(glake_region_push("nothing"), GLAKE_INVALID, "no region 'nothing'");
    FAILS(glake_region_pop(), GLAKE_INVALID, "in no region");
    OK(glake_pool_fix(0, 77, true));
    OK(glake_pool_fix(0, 77, false));
    FAILS(glake_pool_fix(0, 77, false), GLAKE_INVALID, "private pool (0, 77) is not fixed");
    FAILS(glake_region_order(tags, 2), GLAKE_INVALID, "no region 'nothing'");
    OK(glake_region_order(tags, 1));
    FAILS(glake_region_order(NULL, 1), GLAKE_INVALID, "tags is null");
    FAILS(glake_region_wait("sealed", 77, NULL), GLAKE_INVALID, "device 77");
    FAILS(glake_use_begin(NULL, 0, 3, -1, &use), GLAKE_INVALID, "when_closed 3");
    FAILS(glake_use_begin(NULL, 0, 0, -1, NULL), GLAKE_INVALID, "use is null");
    CHECK(glake_shrink("{\"tier\":\"tape\"}") == NULL && glake_last_status() == GLAKE_INVALID);
    CHECK(strstr(glake_last_error(), "tier \"tape\": \"host\"") != NULL);
    CHECK(glake_refill("{\"tags\":[\"nothing\"]}") == NULL && glake_last_status() == GLAKE_INVALID);
}

struct told {
    int wants, grows;
    uint64_t returned, wanted;
};

static void tell(void *context, int32_t event, int32_t device, uint64_t bytes) {
    struct told *told = context;
    CHECK(device == 0);
    if (event == GLAKE_LEASE_RETURNED) told->returned += bytes;
    if (event == GLAKE_LEASE_WANT) told->wants++, told->wanted += bytes;
    if (event == GLAKE_LEASE_GROW) {
        told->grows++;
        OK(glake_lease_grant(device, bytes));
    }
}

static void leases(void) {
    static struct told told;
    uint64_t taken = 1, made = stats_of(0).made_bytes;
    CHECK(glake_lease_grant(0, MIB) == GLAKE_INVALID && stats_of(0).lease_bytes == -1);
    OK(glake_lease_watch(tell, &told));
    OK(glake_region_define("leased", GLAKE_POLICY_KEEP, GLAKE_HOST_COPY_DROP));
    OK(glake_lease_set(0, made));
    void *block = region_block("leased", 0, 8 * MIB);
    CHECK(told.grows == 1 && stats_of(0).made_bytes == made + 8 * MIB);
    fill(block, 8 * MIB, 11);
    glake_string_free(glake_shrink("{\"tags\":[\"leased\"]}"));
    CHECK(told.returned == 8 * MIB && stats_of(0).lease_bytes == (int64_t)made);
    OK(glake_lease_grant(0, 10 * MIB));
    CHECK(says(glake_refill("{\"tags\":[\"leased\"]}"), "\"mapped\":8388608"));
    CHECK(told.wants == 1 && told.wanted == (1ull << 30) - 2 * MIB);
    compare(block, 8 * MIB, 11);
    OK(glake_lease_take(0, 100 * MIB, &taken));
    CHECK(taken >= 2 * MIB && stats_of(0).lease_bytes == (int64_t)stats_of(0).made_bytes);
    OK(glake_lease_watch(NULL, NULL));
    OK(glake_free(block));
    CHECK(glake_alloc(0, 64 * MIB, NULL, &block) == GLAKE_OUT_OF_MEMORY && strstr(glake_last_error(), "glake.lease.grant") != NULL);
    OK(glake_lease_set(0, GLAKE_LEASE_NONE));
    OK(glake_leave());
    FAILS(glake_join("a b", NULL), GLAKE_INVALID, "1 to 64 of the characters");
    FAILS(glake_join("a", "agent.sock"), GLAKE_INVALID, "from the root");
    FAILS(glake_join("a", "/nowhere/agent.sock"), GLAKE_UNAVAILABLE, "/nowhere");
}

static void decommits(void) {
    OK(glake_region_define("cache", GLAKE_POLICY_KEEP, GLAKE_HOST_COPY_DROP));
    char *cache = region_block("cache", 0, 32 * MIB);
    fill(cache, 32 * MIB, 12);
    uint64_t before = stats_of(0).made_bytes, went = 0, made = 0;
    OK(glake_decommit(cache + 16 * MIB, 16 * MIB, &went));
    CHECK(went == 16 * MIB && stats_of(0).made_bytes == before - 16 * MIB);
    CHECK(says(glake_regions_json(), "\"decommitted\":16777216"));
    unsigned char byte;
    CHECK(glake_copy_async(&byte, cache + 20 * MIB, 1, NULL, GLAKE_COPY_BLOCKING, NULL) == GLAKE_INVALID);
    CHECK(strstr(glake_last_error(), "commit it first") != NULL);
    CHECK(glake_copy_async(cache, cache + 10 * MIB, 8 * MIB, NULL, GLAKE_COPY_BLOCKING, NULL) == GLAKE_INVALID);
    glake_string_free(glake_shrink(NULL));
    CHECK(says(glake_refill(NULL), "\"evicted\":0"));
    compare(cache, 16 * MIB, 12);
    OK(glake_commit(cache + 16 * MIB, 1, &made));
    OK(glake_commit(cache + 16 * MIB, 16 * MIB, NULL));
    CHECK(made > 0 && stats_of(0).made_bytes == before);
    fill(cache, 32 * MIB, 13);
    compare(cache, 32 * MIB, 13);
    OK(glake_decommit(cache, 32 * MIB, NULL));
    CHECK(glake_decommit(cache + 31 * MIB, 2 * MIB, &went) == GLAKE_INVALID);
    OK(glake_free(cache));
    CHECK(glake_decommit(cache, MIB, NULL) == GLAKE_INVALID && glake_commit(cache, MIB, NULL) == GLAKE_INVALID);
}

int main(void) {
    OK(glake_configure(NULL, NULL, "tiers = { extent = \"4MiB\", host_spare = 0 }"));
    leaves_and_comes_back();
    what_is_touched_comes_back();
    hooks();
    the_gate();
    safe_points();
    sealed();
    plain_memory_stays();
    mistakes();
    leases();
    decommits();
    glake_string_free(glake_refill(NULL));
    OK(glake_trim(-1, 0, NULL));
    for (int i = 0; i < 2; i++) CHECK(stats_of(i).all.reserved_bytes.current == 0);
    CHECK(says(glake_memory_usage_json(), "\"holder\":\"pinned host memory: free\""));
    return 0;
}
