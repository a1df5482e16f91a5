/* A program that is linked with none of CUDA's libraries and loads an extension that is, as Python does. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char there[4 << 20], here[4 << 20];

int main(int count, char **arguments) {
    /* Nobody has the real function yet: an error of CUDA's, and the program lives. */
    int (*copy)(void *, const void *, size_t, int) = (int (*)(void *, const void *, size_t, int))dlsym(RTLD_DEFAULT, "cudaMemcpy");
    if (copy == NULL || copy(there, here, sizeof here, 1) != 302 || copy(there, here, 1, 1) != 302) return 3;
    void *extension = dlopen(count == 2 ? arguments[1] : "", RTLD_NOW | RTLD_LOCAL);
    if (extension == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 4;
    }
    int (*extended)(void *, const void *, size_t) = (int (*)(void *, const void *, size_t))dlsym(extension, "extended");
    memset(here, 'x', sizeof here);
    for (size_t size = 1; size <= sizeof here; size *= 4) {
        memset(there, 0, sizeof there);
        if (extended(there, here, size) != 0 || memcmp(there, here, size) != 0) return 5;
    }
    void *library = dlopen("libgmlake.so", RTLD_LAZY | RTLD_NOLOAD);
    int *asked = library == NULL ? NULL : (int *)dlsym(library, "gmlake");
    printf("asked %d\n", asked == NULL ? -1 : *asked);
    return 0;
}
