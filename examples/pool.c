/* A block, bytes there and back, and a region that leaves its GPU and comes back to its address.
 *
 *     cc -std=c11 -Iffi/include examples/pool.c -o pool -Ltarget/release -lgmlake -Wl,-rpath,$PWD/target/release
 *     GLAKE_DEVICE=sim ./pool                          # a simulated GPU; without the variable CUDA's GPU 0
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gmlake.h"

/* Every call answers a status; why it failed is the calling thread's last error. */
static void ok(int32_t status) {
    if (status != GLAKE_OK) {
        fprintf(stderr, "status %d: %s\n", status, glake_last_error());
        exit(1);
    }
}

/* Reports are JSON texts of the library; null is a failure. */
static void report(const char *what, char *json) {
    ok(json == NULL ? glake_last_status() : GLAKE_OK);
    printf("%s: %.100s\n", what, json);
    glake_string_free(json);
}

int main(void) {
    const size_t size = (size_t)64 << 20;
    unsigned char *there, *here = malloc(size), *back = calloc(size, 1);
    if (here == NULL || back == NULL) return 1;
    for (size_t i = 0; i < size; i++) here[i] = (unsigned char)(i * 31 >> 7);

    ok(glake_region_define("weights", GLAKE_POLICY_KEEP, GLAKE_HOST_COPY_DROP));
    ok(glake_region_push("weights")); /* what this thread allocates is the region's, until the pop */
    ok(glake_alloc(0, size, NULL, (void **)&there));
    ok(glake_region_pop());

    uint64_t copy; /* ordered on the default stream, as cuMemcpyAsync is */
    ok(glake_copy_async(there, here, size, NULL, GLAKE_COPY_NORMAL, &copy));
    ok(glake_copy_wait(copy));

    report("shrink", glake_shrink("{\"tags\": [\"weights\"]}"));
    report("refill", glake_refill("{\"tags\": [\"weights\"]}"));

    ok(glake_copy_async(back, there, size, NULL, GLAKE_COPY_BLOCKING, NULL));
    int same = memcmp(here, back, size) == 0;
    printf("%s: %s at the same address\n", glake_device_name(), same ? "the same bytes" : "OTHER BYTES");
    ok(glake_free(there));
    free(here);
    free(back);
    return !same;
}
