/* A libcuda that knows memory, its sharing between processes and copies: over named shared memory of the host.
   Addresses are those of the host. A copy happens when its stream is waited for, so what reads too early reads too
   little. Every call is a line of $HYDRA_DRIVER_LOG. */
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, NO_CONTEXT = 201, NOT_MAPPED = 211, MOST = 64 };
typedef struct { char reserved[64]; } Handle;
typedef struct { uint64_t base; size_t size; int opened; int ours; char name[40]; } Allocation;
typedef struct { uint64_t to, from; size_t n; } Copy;
static Allocation allocations[MOST];
static Copy *copies;
static size_t n_copies, room;
static __thread void *context; /* of each thread; none at first */
static char primary;
#define DEMAND_CONTEXT if (context != &primary) return NO_CONTEXT

static void note(const char *format, ...) {
    const char *path = getenv("HYDRA_DRIVER_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    va_list args;
    va_start(args, format);
    vfprintf(file, format, args);
    va_end(args);
    fputc('\n', file);
    fclose(file);
}

static Allocation *at(uint64_t pointer, size_t n) {
    for (int i = 0; i < MOST; i++)
        if (allocations[i].base && pointer >= allocations[i].base &&
            pointer + n <= allocations[i].base + allocations[i].size)
            return &allocations[i];
    return NULL;
}

static int lost(const Allocation *a) { /* whether the process that made it is gone */
    return !a->ours && kill(atoi(a->name + strlen("/hydra-")), 0);
}

static Allocation *mapped(const char *name, size_t size, int flags) {
    int fd = shm_open(name, O_RDWR | flags, 0600);
    struct stat found;
    if (fd < 0 || (size && ftruncate(fd, size)) || fstat(fd, &found)) return NULL;
    void *base = mmap(NULL, found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    for (int i = 0; i < MOST && base != MAP_FAILED; i++)
        if (!allocations[i].base) {
            allocations[i] = (Allocation){(uint64_t)base, found.st_size, 0, flags != 0, ""};
            snprintf(allocations[i].name, sizeof allocations[i].name, "%s", name);
            return &allocations[i];
        }
    return NULL;
}

int cuInit(unsigned flags) { return flags ? INVALID : OK; }

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal ? INVALID : OK;
}

int cuDevicePrimaryCtxRetain(void **found, int device) {
    *found = &primary;
    return device ? INVALID : OK;
}

int cuCtxGetCurrent(void **found) {
    *found = context;
    return OK;
}

int cuCtxSetCurrent(void *wanted) {
    context = wanted;
    return OK;
}

int cuMemAlloc_v2(uint64_t *pointer, size_t size) {
    static int n;
    char name[40];
    snprintf(name, sizeof name, "/hydra-%d-%d", getpid(), n++);
    Allocation *made = mapped(name, size, O_CREAT | O_EXCL);
    if (!made) return INVALID;
    *pointer = made->base;
    return OK;
}

int cuMemFree_v2(uint64_t pointer) {
    Allocation *found = at(pointer, 1);
    if (!found || !found->ours) return INVALID;
    shm_unlink(found->name);
    munmap((void *)found->base, found->size);
    found->base = 0;
    return OK;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t pointer) {
    DEMAND_CONTEXT;
    Allocation *found = at(pointer, 1);
    if (!found) return INVALID;
    *base = found->base, *size = found->size;
    return OK;
}

int cuIpcGetMemHandle(Handle *handle, uint64_t pointer) {
    DEMAND_CONTEXT;
    Allocation *found = at(pointer, 1);
    if (!found || found->base != pointer || !found->ours || getenv("HYDRA_DRIVER_SHARES_NOTHING")) return INVALID;
    memset(handle, 0, sizeof *handle);
    strcpy(handle->reserved, found->name);
    note("export");
    return OK;
}

int cuIpcOpenMemHandle_v2(uint64_t *pointer, Handle handle, unsigned flags) {
    DEMAND_CONTEXT;
    if (flags != 1) return INVALID;
    Allocation *found = NULL;
    for (int i = 0; i < MOST && !found; i++)
        if (allocations[i].base && allocations[i].opened && !strcmp(allocations[i].name, handle.reserved))
            found = &allocations[i];
    if (!found) found = mapped(handle.reserved, 0, 0);
    if (found && lost(found)) munmap((void *)found->base, found->size), found->base = 0, found = NULL;
    note(found ? "open" : "open refused");
    if (!found) return INVALID;
    found->opened++;
    *pointer = found->base;
    return OK;
}

int cuIpcCloseMemHandle(uint64_t pointer) {
    DEMAND_CONTEXT;
    Allocation *found = at(pointer, 1);
    note("close");
    if (!found || !found->opened || found->base != pointer) return NOT_MAPPED;
    if (--found->opened == 0) munmap((void *)found->base, found->size), found->base = 0;
    return OK;
}

static int start(uint64_t to, uint64_t from, size_t n) {
    Allocation *source = at(from, n);
    if (!n || !at(to, n) || !source) return INVALID;
    if (lost(source)) return NOT_MAPPED;
    if (n_copies == room) copies = realloc(copies, (room = room * 2 + 64) * sizeof *copies);
    copies[n_copies++] = (Copy){to, from, n};
    return OK;
}

#ifndef OLD
typedef struct { int order; int hints[4]; unsigned flags; } Attributes;
int cuMemcpyBatchAsync_v2(uint64_t *to, uint64_t *from, size_t *sizes, size_t n, Attributes *attributes,
                          size_t *first, size_t n_attributes, void *stream) {
    DEMAND_CONTEXT;
    note("batch of %zu", n);
    if (!n || !stream || n_attributes != 1 || first[0] != 0 || attributes->order != 1) return INVALID;
    int problem = OK;
    for (size_t i = 0; i < n && !problem; i++) problem = start(to[i], from[i], sizes[i]);
    return problem;
}
#endif

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, void *stream) {
    DEMAND_CONTEXT;
    note("copy");
    return stream ? start(to, from, n) : INVALID;
}

int cuMemcpyDtoHAsync_v2(uint64_t to, uint64_t from, size_t n, void *stream) {
    DEMAND_CONTEXT;
    note("copy to host");
    Allocation *source = at(from, n);
    if (!n || at(to, n) || !source || !stream) return INVALID;
    if (lost(source)) return NOT_MAPPED;
    if (n_copies == room) copies = realloc(copies, (room = room * 2 + 64) * sizeof *copies);
    copies[n_copies++] = (Copy){to, from, n};
    return OK;
}

int cuStreamSynchronize(void *stream) {
    DEMAND_CONTEXT;
    note("synchronize");
    for (size_t i = 0; i < n_copies; i++) memcpy((void *)copies[i].to, (void *)copies[i].from, copies[i].n);
    n_copies = 0;
    return stream ? OK : INVALID;
}

int cuGetErrorName(int code, const char **name) {
    *name = code == INVALID      ? "CUDA_ERROR_INVALID_VALUE"
            : code == NO_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
                                 : "CUDA_ERROR_NOT_MAPPED";
    return OK;
}
