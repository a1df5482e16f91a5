/* Private pools: counted, routed by filters, given up with the last owner. */
#include "check.h"

struct filter {
    void *stream;
    int asked, dropped;
};

static bool takes(void *context, void *stream) {
    struct filter *filter = context;
    filter->asked++;
    return stream == filter->stream;
}

static void dropped(void *context) { ((struct filter *)context)->dropped++; }

static int owners(uint64_t first, uint64_t second) {
    int32_t count = -1;
    OK(glake_pool_use_count(0, first, second, &count));
    return count;
}

static void count_block(void *context, void *block, uint64_t size) {
    CHECK(block != NULL && size > 0);
    ++*(int *)context;
}

static int live_in(uint64_t first, uint64_t second) {
    int live = 0;
    OK(glake_pool_blocks(0, first, second, count_block, &live));
    return live;
}

static void the_filter_says_what_goes_there(void) {
    struct filter filter = {(void *)1, 0, 0};
    OK(glake_pool_begin(0, 0, 7, takes, &filter, dropped));
    CHECK(owners(0, 7) == 1);
    void *outside = block_of(0, 3 * MIB, (void *)2), *inside = block_of(0, 3 * MIB, (void *)1);
    CHECK(filter.asked == 2 && live_in(0, 7) == 1);
    FAILS(glake_pool_begin(0, 0, 7, NULL, NULL, NULL), GLAKE_INVALID, "go to private pool (0, 7) already");
    CHECK(owners(0, 7) == 1);
    OK(glake_pool_end(0, 0, 7));
    CHECK(filter.dropped == 1);
    void *after = block_of(0, 3 * MIB, (void *)1);
    CHECK(filter.asked == 2 && live_in(0, 7) == 1);
    FAILS(glake_pool_end(0, 0, 7), GLAKE_INVALID, "no private pool (0, 7)");

    OK(glake_pool_create(0, 0, 7));
    CHECK(owners(0, 7) == 2);
    OK(glake_pool_release(0, 0, 7));
    OK(glake_pool_release(0, 0, 7));
    CHECK(owners(0, 7) == 0);
    FAILS(glake_pool_release(0, 0, 7), GLAKE_INVALID, "no private pool (0, 7)");
    FAILS(glake_pool_blocks(0, 0, 7, count_block, NULL), GLAKE_INVALID, "no private pool (0, 7)");

    memset(inside, 5, 3 * MIB);
    OK(glake_free(inside));
    OK(glake_free(outside));
    OK(glake_free(after));
    OK(glake_trim(0, 0, NULL));
    CHECK(stats_of(0).all.reserved_bytes.current == 0);
}

static void the_newest_pool_has_what_several_take(void) {
    OK(glake_pool_begin(0, 3, 0, NULL, NULL, NULL));
    OK(glake_pool_begin(0, 4, 0, NULL, NULL, NULL));
    void *newest = block_of(0, 300, NULL);
    CHECK(live_in(4, 0) == 1 && live_in(3, 0) == 0);
    OK(glake_pool_end(0, 4, 0));
    void *older = block_of(0, 300, NULL);
    CHECK(live_in(3, 0) == 1);
    OK(glake_pool_release(0, 3, 0));
    FAILS(glake_pool_end(0, 3, 0), GLAKE_INVALID, "no private pool (3, 0)");
    OK(glake_pool_release(0, 4, 0));
    OK(glake_free(newest));
    OK(glake_free(older));
}

static void a_filter_is_dropped_where_nothing_begins(void) {
    struct filter filter = {NULL, 0, 0};
    FAILS(glake_pool_begin(17, 0, 1, takes, &filter, dropped), GLAKE_INVALID, "device 17");
    CHECK(filter.dropped == 1);
    CHECK(glake_pool_begin(0, 0, 1, NULL, &filter, dropped) == GLAKE_OK && filter.dropped == 2);
    OK(glake_pool_end(0, 0, 1));
    OK(glake_pool_release(0, 0, 1));
}

int main(void) {
    FAILS(glake_pool_release(0, 1, 1), GLAKE_INVALID, "no private pool (1, 1)");
    the_filter_says_what_goes_there();
    the_newest_pool_has_what_several_take();
    a_filter_is_dropped_where_nothing_begins();
    return 0;
}
