// What the programs of this folder share: a driver call that fails ends the program, and says which it was and why.
#pragma once
#include <cuda.h>

#include <cstdio>
#include <cstdlib>

static void check(CUresult result, const char* call, const char* file, int line) {
    if (result == CUDA_SUCCESS) return;
    const char* name = "unknown";
    cuGetErrorName(result, &name);
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, name);
    exit(1);
}
#define CHECK(call) check(call, #call, __FILE__, __LINE__)
