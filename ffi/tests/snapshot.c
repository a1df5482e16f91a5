/* What the library tells about its memory: segments, JSON, the largest request, stitching. */
#include "check.h"

struct sum {
    uint64_t segments, stitched, size, live, at, end;
};

static void add_segment(void *context, const glake_segment *segment) {
    struct sum *sum = context;
    CHECK(sum->at == sum->end);
    CHECK(segment->device == 0 && segment->pool_first == 0 && segment->pool_second == 0);
    sum->segments++;
    if (segment->stitched) {
        sum->stitched++;
        sum->at = sum->end = 0;
        return;
    }
    sum->size += segment->size;
    sum->at = segment->address;
    sum->end = segment->address + segment->size;
}

static void add_block(void *context, const glake_segment_block *block) {
    struct sum *sum = context;
    if (block->live) sum->live += block->size;
    if (sum->end == 0) return;
    CHECK(block->address == sum->at && (block->requested == 0) == !block->live);
    sum->at += block->size;
}

static struct sum sum_of(int device) {
    struct sum sum = {0};
    OK(glake_segments(device, add_segment, add_block, &sum));
    CHECK(sum.at == sum.end);
    OK(glake_segments(device, NULL, NULL, NULL));
    return sum;
}

static void segments_add_up(void) {
    void *blocks[] = {block_of(0, 300, NULL), block_of(0, 30 * MIB, NULL), block_of(0, 5 * MIB + 7, NULL)};
    OK(glake_free(blocks[1]));
    struct sum sum = sum_of(0);
    glake_device_stats stats = stats_of(0);
    CHECK(sum.size == (uint64_t)stats.all.reserved_bytes.current);
    CHECK(sum.live == (uint64_t)stats.all.allocated_bytes.current);
    CHECK(stats.all.inactive_split.current > 0 && stats.all.inactive_split_bytes.current > 0);
    OK(glake_free(blocks[0]));
    OK(glake_free(blocks[2]));
    CHECK(sum_of(1).segments == 0);
}

/* Every other of many blocks is freed; one as long as several of them lies on their memory. */
static void a_stitched_block_holds_real_bytes(void) {
    enum { BLOCKS = 12 };
    unsigned char *blocks[BLOCKS];
    OK(glake_trim(0, 0, NULL));
    for (int i = 0; i < BLOCKS; i++) blocks[i] = block_of(0, 64 * MIB, NULL);
    for (int i = 0; i < BLOCKS; i += 2) OK(glake_free(blocks[i]));
    for (int i = 1; i < BLOCKS; i += 2) memset(blocks[i], i, 64 * MIB);
    int64_t reserved = stats_of(0).all.reserved_bytes.current;
    unsigned char *long_block = block_of(0, 256 * MIB, NULL);
    CHECK(stats_of(0).stitches == 1 && stats_of(0).all.reserved_bytes.current == reserved);
    CHECK(sum_of(0).stitched == 1);
    memset(long_block, 0xee, 256 * MIB);
    for (int i = 1; i < BLOCKS; i += 2) {
        CHECK(blocks[i][0] == i && blocks[i][64 * MIB - 1] == i);
        OK(glake_free(blocks[i]));
    }
    CHECK(long_block[0] == 0xee && long_block[100 * MIB] == 0xee && long_block[256 * MIB - 1] == 0xee);
    glake_block found;
    OK(glake_find(long_block + 99 * MIB, &found));
    CHECK(found.base == long_block && found.requested == 256 * MIB);
    OK(glake_free(long_block));
}

static void the_largest_request_is_served(void) {
    OK(glake_set_fraction(1, 0.01));
    void *held = block_of(1, 200 * MIB, NULL);
    uint64_t most = 0;
    OK(glake_largest(1, &most));
    CHECK(most > GIB);
    void *out = NULL;
    FAILS(glake_alloc(1, most + MIB, NULL, &out), GLAKE_OUT_OF_MEMORY, "CUDA out of memory");
    out = block_of(1, most, NULL);
    OK(glake_free(out));
    OK(glake_free(held));
}

static void texts_are_json(void) {
    char *stats = glake_stats_json(0), *snapshot = glake_snapshot_json();
    CHECK(stats != NULL && stats[0] == '{' && strstr(stats, "\"active_bytes.all.peak\":") != NULL);
    CHECK(strstr(stats, "\"glake.stitches\":") != NULL);
    CHECK(snapshot != NULL && strstr(snapshot, "\"device_traces\":[[") != NULL);
    glake_string_free(stats);
    glake_string_free(snapshot);
}

static void history_is_kept_on_request(void) {
    CHECK(!glake_history_enabled());
    OK(glake_record_history(true, 3, true));
    CHECK(glake_history_enabled());
    OK(glake_free(block_of(2, 300, NULL)));
    char *snapshot = glake_snapshot_json();
    CHECK(strstr(snapshot, "\"action\":\"free_completed\"") != NULL);
    glake_string_free(snapshot);
    OK(glake_record_history(false, 0, false));
    CHECK(!glake_history_enabled());
}

static void totals_start_again(void) {
    CHECK(stats_of(0).all.allocation.allocated > 0 && stats_of(0).stitches > 0);
    OK(glake_reset_totals(0));
    CHECK(stats_of(0).all.allocation.allocated == 0 && stats_of(0).stitches == 0);
    CHECK(stats_of(0).num_sync_all_streams == 0 && stats_of(0).all.reserved_bytes.current > 0);
}

int main(void) {
    CHECK(!glake_history_enabled());
    segments_add_up();
    a_stitched_block_holds_real_bytes();
    the_largest_request_is_served();
    texts_are_json();
    history_is_kept_on_request();
    totals_start_again();
    return 0;
}
