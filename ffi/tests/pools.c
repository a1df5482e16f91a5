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

struct restored {
    void *freed[4], *allocated[4];
    int frees, allocations;
};

static void note_freed(void *context, void *block) {
    struct restored *restored = context;
    restored->freed[restored->frees++ % 4] = block;
}

static void note_allocated(void *context, void *block, uint64_t size) {
    struct restored *restored = context;
    CHECK(size >= 300);
    restored->allocated[restored->allocations++ % 4] = block;
}

static void what_was_live_is_live_again(void) {
    OK(glake_pool_begin(0, 5, 0, NULL, NULL, NULL));
    char *stays = block_of(0, 3 * MIB, NULL), *goes = block_of(0, 5 * MIB, NULL);
    memset(goes, 'g', 5 * MIB);
    glake_checkpoint *checkpoint = NULL;
    OK(glake_pool_checkpoint(0, 5, 0, &checkpoint));
    OK(glake_free(goes));
    void *comes = block_of(0, 300, NULL);
    struct restored restored = {0};
    OK(glake_pool_restore(checkpoint, note_freed, note_allocated, &restored));
    CHECK(restored.frees == 2 && restored.allocations == 2 && live_in(5, 0) == 2);
    CHECK(restored.freed[0] == stays || restored.freed[1] == stays);
    CHECK(restored.freed[0] == comes || restored.freed[1] == comes);
    CHECK(restored.allocated[0] == goes || restored.allocated[1] == goes);
    CHECK(goes[0] == 'g' && goes[5 * MIB - 1] == 'g');
    FAILS(glake_free(comes), GLAKE_INVALID, "no block begins at");
    OK(glake_free(goes));
    OK(glake_free(stays));
    OK(glake_pool_end(0, 5, 0));
    OK(glake_pool_trim(0, 5, 0));
    CHECK(glake_pool_restore(checkpoint, NULL, NULL, NULL) == GLAKE_INVALID && live_in(5, 0) == 0);
    OK(glake_pool_release(0, 5, 0));
    FAILS(glake_pool_restore(checkpoint, NULL, NULL, NULL), GLAKE_INVALID, "no private pool (5, 0)");
    glake_checkpoint_drop(checkpoint);
    FAILS(glake_pool_restore(NULL, NULL, NULL, NULL), GLAKE_INVALID, "checkpoint is null");
    FAILS(glake_pool_checkpoint(0, 5, 0, &checkpoint), GLAKE_INVALID, "no private pool (5, 0)");
}

static bool moved(char *report) {
    bool all = report != NULL && strstr(report, "\"skipped\":[]") != NULL;
    glake_string_free(report);
    return all;
}

static void a_pool_that_is_given_up_leaves_and_comes_back(void) {
    OK(glake_pool_begin(0, 6, 0, NULL, NULL, NULL));
    char *lives = block_of(0, 3 * MIB, NULL), *goes = block_of(0, 5 * MIB, NULL);
    OK(glake_pool_end(0, 6, 0));
    memset(lives, 'l', 3 * MIB);
    bool is_private = false;
    OK(glake_is_private(lives + MIB, &is_private));
    CHECK(is_private);
    uint64_t id = 7;
    FAILS(glake_offload_begin(lives, MIB, NULL, &id), GLAKE_UNSUPPORTED, "the private pool (6, 0)");
    CHECK(id == 0);
    OK(glake_free(goes));
    OK(glake_pool_release(0, 6, 0));
    for (int round = 0; round < 2; round++) {
        CHECK(moved(glake_shrink(NULL)) && stats_of(0).all.reserved_bytes.current == 0);
        glake_string_free(glake_refill(NULL));
        CHECK(lives[0] == 'l' && lives[3 * MIB - 1] == 'l');
    }
    OK(glake_free(lives));
    // It is in no live block: its owner may count on it still.
    OK(glake_is_private(lives, &is_private));
    CHECK(is_private);
    OK(glake_is_private(&is_private, &is_private));
    CHECK(!is_private);
    CHECK(moved(glake_shrink(NULL)) && stats_of(0).all.reserved_bytes.current == 0);
    glake_string_free(glake_refill(NULL));
}

int main(void) {
    FAILS(glake_pool_release(0, 1, 1), GLAKE_INVALID, "no private pool (1, 1)");
    the_filter_says_what_goes_there();
    the_newest_pool_has_what_several_take();
    a_filter_is_dropped_where_nothing_begins();
    what_was_live_is_live_again();
    a_pool_that_is_given_up_leaves_and_comes_back();
    return 0;
}
