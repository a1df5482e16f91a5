/* What a program asks the driver for. */
#define _GNU_SOURCE
#include "program.h"

int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags);
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *outcome);
int cudaGetDriverEntryPoint(const char *name, void **found, unsigned long long flags, int *outcome);
int cudaGetDriverEntryPoint_ptsz(const char *name, void **found, unsigned long long flags, int *outcome);
int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags, int *outcome);
int cudaGetDriverEntryPointByVersion_ptsz(const char *name, void **found, unsigned version, unsigned long long flags, int *outcome);

struct answer {
    const char *name;
    int version;
    uint64_t flags;
    const char *ours; /* null: the real one's answer stands */
};

static const struct answer ANSWERS[] = {
    {"cuMemcpy", 13000, 0, "cuMemcpy"},
    {"cuMemcpy", 4000, 1, "cuMemcpy"},
    {"cuMemcpy", 12040, 2, "cuMemcpy_ptds"},
    {"cuMemcpyHtoD", 3020, 0, "cuMemcpyHtoD_v2"},
    {"cuMemcpyHtoD", 7000, 2, "cuMemcpyHtoD_v2_ptds"},
    {"cuMemcpyHtoD", 2000, 0, NULL},
    {"cuMemcpyHtoD", 3020, 2, NULL},
    {"cuMemcpyDtoH", 12000, 0, "cuMemcpyDtoH_v2"},
    {"cuMemcpyDtoH", 12000, 2, "cuMemcpyDtoH_v2_ptds"},
    {"cuMemcpyAsync", 4000, 0, "cuMemcpyAsync"},
    {"cuMemcpyAsync", 7000, 2, "cuMemcpyAsync_ptsz"},
    {"cuMemcpyHtoDAsync", 12000, 1, "cuMemcpyHtoDAsync_v2"},
    {"cuMemcpyHtoDAsync", 12000, 2, "cuMemcpyHtoDAsync_v2_ptsz"},
    {"cuMemcpyDtoHAsync", 12000, 0, "cuMemcpyDtoHAsync_v2"},
    {"cuMemcpyDtoHAsync", 12000, 2, "cuMemcpyDtoHAsync_v2_ptsz"},
    {"cuMemcpyDtoDAsync", 12000, 0, NULL},
    {"cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"},
    {"cuGetProcAddress", 11030, 0, "cuGetProcAddress"},
    {"cuNothing", 12000, 0, NULL},
};

static void is_answer(const struct answer *to_this, void *found, bool same) {
    void *real = NULL;
    int (*look)(const char *, void **, int, uint64_t, int *) = (int (*)(const char *, void **, int, uint64_t, int *))dlsym(
        dlopen("libcuda.so.1", RTLD_LAZY), "cuGetProcAddress_v2");
    look(to_this->name, &real, to_this->version, to_this->flags, NULL);
    if (to_this->ours == NULL) {
        CHECK(found == real);
        return;
    }
    void *ours = dlsym(RTLD_DEFAULT, to_this->ours);
    CHECK(ours != NULL && ours != real && found == (same ? ours : real));
}

static int entries(void) {
    for (size_t i = 0; i < sizeof ANSWERS / sizeof *ANSWERS; i++) {
        const struct answer *of = &ANSWERS[i];
        void *found[6] = {&found, &found, &found, &found, &found, &found};
        int outcome[3] = {-1, -1, -1}, missing = strcmp(of->name, "cuNothing") == 0;
        CHECK(cuGetProcAddress(of->name, &found[0], of->version, of->flags) == (missing ? 500 : 0));
        CHECK(cuGetProcAddress_v2(of->name, &found[1], of->version, of->flags, &outcome[0]) == 0 && outcome[0] == missing);
        CHECK(cuGetProcAddress_v2(of->name, &found[2], of->version, of->flags, NULL) == 0);
        CHECK(cudaGetDriverEntryPointByVersion(of->name, &found[3], (unsigned)of->version, of->flags, &outcome[1]) == 0);
        /* Here it is the flag for the legacy stream that must be given. */
        CHECK(cudaGetDriverEntryPointByVersion_ptsz(of->name, &found[4], (unsigned)of->version,
                                                    of->flags == 2 ? 0 : 1, &outcome[2]) == 0);
        CHECK(outcome[1] == missing && outcome[2] == missing);
        for (int j = 0; j < 5; j++) is_answer(of, found[j], true);
        if (of->version < 12000 || missing) continue;
        CHECK(cudaGetDriverEntryPoint(of->name, &found[5], of->flags, NULL) == 0);
        is_answer(of, found[5], true);
        CHECK(cudaGetDriverEntryPoint_ptsz(of->name, &found[5], of->flags == 2 ? 0 : 1, NULL) == 0);
        is_answer(of, found[5], true);
    }
    /* What was fetched is asked about as what was linked. */
    void *found = NULL;
    CHECK(cuGetProcAddress_v2("cuMemcpyDtoH", &found, 13000, 2, NULL) == 0);
    forget();
    CHECK(((int (*)(void *, const void *, size_t))found)(to, from, MIB) == 0 && gmlake()->calls == 1);
    CHECK(gmlake()->last.flags == (NOW | PTDS | FROM_GPU));
    return 0;
}

static int off(void) {
    all_native(4 * MIB);
    CHECK(gmlake() == NULL);
    void *found = NULL;
    CHECK(cuGetProcAddress_v2("cuMemcpyAsync", &found, 12000, 0, NULL) == 0);
    CHECK(found == dlsym(dlopen("libcuda.so.1", RTLD_LAZY), "cuMemcpyAsync") && found != (void *)cuMemcpyAsync);
    return 0;
}

RUN(
    {"off", off},
    {"entries", entries})
