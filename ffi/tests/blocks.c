/* Blocks with real bytes: simulated memory is readable and writable by the host at the addresses that are handed out. */
#include "check.h"

static void bytes_are_real_and_apart(void) {
    enum { BLOCKS = 64 };
    unsigned char *blocks[BLOCKS];
    size_t sizes[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        sizes[i] = i % 2 ? 300 + 1000 * (size_t)i : 3 * MIB + 512 * (size_t)i;
        blocks[i] = block_of(0, sizes[i], NULL);
        CHECK((size_t)blocks[i] % 512 == 0);
        memset(blocks[i], i + 1, sizes[i]);
    }
    for (int i = 0; i < BLOCKS; i++) {
        CHECK(blocks[i][0] == i + 1 && blocks[i][sizes[i] / 2] == i + 1 && blocks[i][sizes[i] - 1] == i + 1);
        OK(glake_free(blocks[i]));
    }
    CHECK(stats_of(0).all.allocated_bytes.current == 0);
}

static void the_same_stream_has_its_bytes_again_at_once(void) {
    void *first = block_of(0, 20 * MIB, NULL);
    OK(glake_free(first));
    void *again = block_of(0, 20 * MIB, NULL);
    CHECK(again == first);
    OK(glake_free(again));
}

static void blocks_are_found_by_any_address_in_them(void) {
    char *block = block_of(1, 5 * MIB + 1, NULL);
    glake_block found;
    OK(glake_find(block, &found));
    CHECK(found.base == block && found.requested == 5 * MIB + 1 && found.size == 5 * MIB + 512 && found.device == 1);
    size_t requested = 0;
    CHECK(gmlake_base_alloc(block, &requested) == block && requested == 5 * MIB + 1);
    CHECK(gmlake_base_alloc(block, NULL) == block);
    OK(glake_free(block));
    FAILS(glake_find(block, &found), GLAKE_INVALID, "is in no block");
    CHECK(gmlake_base_alloc(block, NULL) == NULL && gmlake_base_alloc(&found, NULL) == NULL);
}

static void nothing_is_no_error(void) {
    void *block = &block;
    int64_t before = stats_of(0).all.allocation.current;
    OK(glake_alloc(0, 0, NULL, &block));
    CHECK(block == NULL);
    CHECK(gmlake_malloc(0, 0, NULL) == NULL);
    CHECK(stats_of(0).all.allocation.current == before);
    /* No memory is taken by a region or a private pool either. */
    OK(glake_region_define("empty", GLAKE_POLICY_KEEP, GLAKE_HOST_COPY_DROP));
    OK(glake_region_push("empty"));
    OK(glake_alloc(0, 0, NULL, &block));
    CHECK(block == NULL && gmlake_malloc(0, 0, NULL) == NULL);
    OK(glake_region_pop());
    OK(glake_pool_begin(0, 0, 77, NULL, NULL, NULL));
    block = &block;
    OK(glake_alloc(0, 0, NULL, &block));
    CHECK(block == NULL && gmlake_malloc(0, 0, NULL) == NULL);
    OK(glake_pool_end(0, 0, 77));
    OK(glake_pool_release(0, 0, 77));
    CHECK(stats_of(0).all.allocation.current == before);
    gmlake_record_stream(NULL, NULL);
    OK(glake_copy_async(NULL, NULL, 0, NULL, GLAKE_COPY_BLOCKING, NULL));
    OK(glake_free(NULL));
    gmlake_free(NULL, 0, 0, NULL);
}

static void torch_s_names_are_the_same_pool(void) {
    gmlake_init(4);
    char *block = gmlake_malloc(7 * MIB, 2, NULL);
    CHECK(block != NULL);
    memset(block, 7, 7 * MIB);
    CHECK(stats_of(2).all.requested_bytes.current == (int64_t)(7 * MIB));
    gmlake_record_stream(block, NULL);
    gmlake_free(block, 7 * MIB, 2, NULL);
    gmlake_reset();
    CHECK(stats_of(2).all.reserved_bytes.current == 0);
    gmlake_memory_fraction(0.5, 2);
    double fraction = 0;
    OK(glake_fraction(2, &fraction));
    CHECK(fraction == 0.5);
}

static void trimming_gives_back_what_is_free(void) {
    void *kept = block_of(0, 40 * MIB, NULL), *freed = block_of(0, 400 * MIB, NULL);
    OK(glake_free(freed));
    uint64_t released = 0;
    OK(glake_trim(0, UINT64_MAX, &released));
    CHECK(released == 0);
    OK(glake_trim(-1, 0, &released));
    CHECK(released >= 400 * MIB);
    memset(kept, 1, 40 * MIB);
    OK(glake_free(kept));
    OK(glake_trim(0, 0, NULL));
    CHECK(stats_of(0).all.reserved_bytes.current == 0);
}

static void peaks_start_again(void) {
    OK(glake_reset_peaks(3));
    OK(glake_free(block_of(3, 30 * MIB, NULL)));
    CHECK(stats_of(3).all.allocated_bytes.peak == (int64_t)(30 * MIB));
    OK(glake_reset_peaks(3));
    glake_device_stats stats = stats_of(3);
    CHECK(stats.all.allocated_bytes.peak == 0 && stats.all.allocated_bytes.allocated == (int64_t)(30 * MIB));
    CHECK(stats.num_device_alloc > 0 && stats.extent_maps > 0);
}

int main(void) {
    CHECK(!glake_started() && glake_device_name() == NULL);
    CHECK(strcmp(glake_last_error(), "") == 0 && strcmp(gmlake_last_error(), "") == 0);
    CHECK(strcmp(glake_version(), "0.1.0") == 0 && glake_abi() == 2);
    int32_t devices = 0;
    OK(glake_device_count(&devices));
    CHECK(devices == 4 && glake_started() && strcmp(glake_device_name(), "sim:h200x4") == 0);

    bytes_are_real_and_apart();
    the_same_stream_has_its_bytes_again_at_once();
    blocks_are_found_by_any_address_in_them();
    nothing_is_no_error();
    torch_s_names_are_the_same_pool();
    trimming_gives_back_what_is_free();
    peaks_start_again();
    return 0;
}
