/* Every mistake has an error, and none changes anything. */
#include "check.h"

static void pointers_that_are_no_block_s(void) {
    char *block = block_of(0, 8 * MIB, NULL);
    int local = 0;
    FAILS(glake_free(&local), GLAKE_INVALID, "never handed out by this library");
    FAILS(glake_free(block + 512), GLAKE_INVALID, "no block begins at");
    FAILS(glake_free(block + 1), GLAKE_INVALID, "no block begins at");
    FAILS(glake_record_stream(&local, NULL), GLAKE_INVALID, "no block begins at");
    OK(glake_free(block));
    FAILS(glake_free(block), GLAKE_INVALID, "freed before");
    gmlake_free(block, 8 * MIB, 0, NULL);
    gmlake_free(&local, 1, 0, NULL);
    gmlake_record_stream(&local, NULL);
    gmlake_record_stream(NULL, NULL);
    CHECK(stats_of(0).all.allocation.current == 0 && stats_of(0).all.allocation.freed == 1);
}

static void devices_that_are_none(void) {
    void *out = &out;
    FAILS(glake_alloc(-1, 1, NULL, &out), GLAKE_INVALID, "device -1 does not exist: 4 are here");
    FAILS(glake_alloc(4, 1, NULL, &out), GLAKE_INVALID, "device 4 does not exist");
    CHECK(gmlake_malloc(1, 99, NULL) == NULL && strstr(gmlake_last_error(), "device 99") != NULL);
    FAILS(glake_trim(7, 0, NULL), GLAKE_INVALID, "device 7");
    FAILS(glake_reset_peaks(-2), GLAKE_INVALID, "device -2");
    CHECK(glake_stats_json(4) == NULL && strstr(glake_last_error(), "device 4") != NULL);
    FAILS(glake_alloc(0, 1, (void *)0x1234567, &out), GLAKE_DRIVER, "");
}

static void sizes_that_no_device_has(void) {
    void *out = NULL;
    size_t sizes[] = {SIZE_MAX, SIZE_MAX - 511, SIZE_MAX / 2, 200 * GIB};
    for (int i = 0; i < 4; i++) {
        FAILS(glake_alloc(0, sizes[i], NULL, &out), GLAKE_OUT_OF_MEMORY, "CUDA out of memory. Tried to allocate ");
        CHECK(gmlake_malloc(sizes[i], 0, NULL) == NULL);
    }
    CHECK(out == NULL);
}

static void answers_that_have_no_place(void) {
    FAILS(glake_alloc(0, 1, NULL, NULL), GLAKE_INVALID, "out is null");
    FAILS(glake_alloc(0, 0, NULL, NULL), GLAKE_INVALID, "out is null");
    FAILS(glake_device_count(NULL), GLAKE_INVALID, "count is null");
    FAILS(glake_stats(0, NULL), GLAKE_INVALID, "out is null");
    FAILS(glake_fraction(0, NULL), GLAKE_INVALID, "fraction is null");
    FAILS(glake_pool_blocks(0, 0, 1, NULL, NULL), GLAKE_INVALID, "visit is null");
    CHECK(stats_of(0).all.allocation.current == 0);
}

static void fractions_that_are_none(void) {
    FAILS(glake_set_fraction(0, -0.1), GLAKE_INVALID, "out of range");
    FAILS(glake_set_fraction(0, 1.1), GLAKE_INVALID, "out of range");
    FAILS(glake_set_fraction(0, 0.0 / 0.0), GLAKE_INVALID, "out of range");
    FAILS(glake_set_fraction(9, 0.5), GLAKE_INVALID, "device 9");
    OK(glake_set_fraction(3, 0.25));
    void *out = NULL;
    FAILS(glake_alloc(3, 36 * GIB, NULL, &out), GLAKE_OUT_OF_MEMORY, " allowed; Of the reserved memory ");
    CHECK(stats_of(3).num_ooms == 1);
}

static void it_is_too_late_to_configure(void) {
    FAILS(glake_configure(NULL, NULL, "pool.extent = \"4MiB\""), GLAKE_INVALID, "already started");
    FAILS(glake_configure("fastest", NULL, NULL), GLAKE_INVALID, "is not a preset");
    FAILS(glake_configure(NULL, NULL, "[pool]\nextend = 1"), GLAKE_INVALID, "configuration:2: unknown key");
    FAILS(glake_configure("\xff", NULL, NULL), GLAKE_INVALID, "preset is no UTF-8");
}

int main(void) {
    char *never = NULL;
    FAILS(glake_free(&never), GLAKE_INVALID, "never handed out");
    CHECK(!glake_started());
    OK(glake_start());
    pointers_that_are_no_block_s();
    devices_that_are_none();
    sizes_that_no_device_has();
    answers_that_have_no_place();
    fractions_that_are_none();
    it_is_too_late_to_configure();
    glake_string_free(NULL);
    glake_checkpoint_drop(NULL);
    return 0;
}
