/* Another libcuda.so.1, for the limiter: more calls than cuda.c has, several devices, and so quick that what a library
   before it costs can be measured.

   What all processes hold of a device, and the most that they held at once, is counted in the file `quick` of the stub's
   folder, which is as large as `struct shared`. cuGetProcAddress chooses variants as that of driver 550 does. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_CONTEXT = 201, NOT_SUPPORTED = 801 };
#define DEVICES 8
#define MAPPINGS 1024
typedef unsigned long long u64;

static struct shared { _Atomic u64 total, used[DEVICES], peak[DEVICES], launches; } *shared;
static struct shared own = {.total = 16ull << 30};
static __thread int current = -1;
static int retained[DEVICES];

/* A pointer, a handle and an array are the address of one of these. */
struct memory { int device, references, mappings; u64 bytes; struct memory *next, *before; };
static struct memory *contexts[DEVICES]; /* what goes with each primary context */
static struct { u64 at; struct memory *memory; } mapped[MAPPINGS];
static _Atomic int busy;

static void lock(void) { while (atomic_exchange(&busy, 1)) {} }
static void unlock(void) { atomic_store(&busy, 0); }

int cuInit(unsigned flags) {
    (void)flags;
    char path[4096];
    if (shared) return OK;
    shared = &own;
    if (getenv("STUB_NVIDIA")) {
        snprintf(path, sizeof path, "%s/quick", getenv("STUB_NVIDIA"));
        int file = open(path, O_RDWR);
        if (file >= 0) {
            shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
            close(file);
            u64 none = 0;
            atomic_compare_exchange_strong(&shared->total, &none, own.total);
        }
    }
    return OK;
}

int cuDeviceGetCount(int *count) { *count = DEVICES; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < DEVICES ? OK : INVALID; }
int cuDeviceGetUuid(unsigned char *raw, int device) { memset(raw, 0x11 * (device + 1), 16); return OK; }
int cuDeviceTotalMem_v2(size_t *total, int device) { *total = shared->total; return device < DEVICES ? OK : INVALID; }
int cuCtxGetDevice(int *device) { *device = current; return current < 0 ? NO_CONTEXT : OK; }
int cuCtxSetCurrent(void *context) { current = (int)(long)context - 1; return OK; }
int cuCtxGetCurrent(void **context) { *context = (void *)(long)(current + 1); return OK; }

int cuDevicePrimaryCtxRetain(void **context, int device) {
    retained[device]++;
    *context = (void *)(long)(device + 1);
    return OK;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = retained[device] > 0;
    return OK;
}

static int take(int device, u64 bytes, struct memory **memory, int is_contexts) {
    if (device < 0) return NO_CONTEXT;
    if (bytes > shared->total) return NO_MEMORY;
    u64 now = atomic_fetch_add(&shared->used[device], bytes) + bytes, peak = shared->peak[device];
    if (now > shared->total) { atomic_fetch_sub(&shared->used[device], bytes); return NO_MEMORY; }
    while (now > peak && !atomic_compare_exchange_weak(&shared->peak[device], &peak, now)) {}
    struct memory *made = malloc(sizeof *made);
    *made = (struct memory){.device = device, .references = 1, .bytes = bytes};
    if (is_contexts) {
        lock();
        made->next = contexts[device];
        if (made->next) made->next->before = made;
        contexts[device] = made;
        unlock();
    }
    *memory = made;
    return OK;
}

static int drop(struct memory *memory) {
    lock();
    if (memory->before) memory->before->next = memory->next;
    else if (contexts[memory->device] == memory) contexts[memory->device] = memory->next;
    if (memory->next) memory->next->before = memory->before;
    unlock();
    atomic_fetch_sub(&shared->used[memory->device], memory->bytes);
    free(memory);
    return OK;
}

static int destroyed(int device) {
    retained[device] = 0;
    while (contexts[device]) drop(contexts[device]);
    return OK;
}

int cuDevicePrimaryCtxRelease_v2(int device) { return --retained[device] ? OK : destroyed(device); }
int cuDevicePrimaryCtxReset_v2(int device) { return destroyed(device); }
int cuCtxDestroy_v2(void *context) { return destroyed((int)(long)context - 1); }

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    if (current < 0) return NO_CONTEXT;
    *total = shared->total;
    *free_bytes = *total - shared->used[current];
    return OK;
}

int cuMemAlloc_v2(u64 *pointer, size_t bytes) { return take(current, bytes, (struct memory **)pointer, 1); }
/* Pointers of 32 bits: they cannot be given back here. */
int cuMemAlloc(unsigned *pointer, unsigned bytes) {
    struct memory *memory;
    int code = take(current, bytes, &memory, 0);
    if (code == OK) *pointer = (unsigned)(u64)memory;
    return code;
}
int cuMemAllocManaged(u64 *pointer, size_t bytes, unsigned flags) { (void)flags; return cuMemAlloc_v2(pointer, bytes); }
int cuMemAllocPitch_v2(u64 *pointer, size_t *pitch, size_t width, size_t height, unsigned element) {
    (void)element;
    *pitch = (width + 1023) / 1024 * 1024;
    return cuMemAlloc_v2(pointer, *pitch * height);
}

static int take_bytes(int device, u64 bytes) {
    struct memory *memory;
    int code = take(device, bytes, &memory, 0);
    if (code == OK) free(memory);
    return code;
}
static void give_bytes(int device, u64 bytes) { atomic_fetch_sub(&shared->used[device], bytes); }
static int free_other(u64 pointer) { return drop((struct memory *)pointer); }
#include "kept.h"

int cuMemAllocAsync_ptsz(u64 *pointer, size_t bytes, void *stream) { return cuMemAllocAsync(pointer, bytes, stream); }
int cuMemAllocFromPoolAsync_ptsz(u64 *pointer, size_t bytes, void *pool, void *stream) {
    return cuMemAllocFromPoolAsync(pointer, bytes, pool, stream);
}
int cuMemFreeAsync_ptsz(u64 pointer, void *stream) { return cuMemFreeAsync(pointer, stream); }

struct array { size_t width, height; unsigned format, channels; };
struct array3d { size_t width, height, depth; unsigned format, channels, flags; };
int cuArrayCreate_v2(void **array, const struct array *of) {
    return take(current, of->width * (of->height ? of->height : 1) * of->channels * 4, (struct memory **)array, 1);
}
int cuArray3DCreate_v2(void **array, const struct array3d *of) {
    return take(current, of->width * of->height * of->depth * of->channels * 4, (struct memory **)array, 1);
}
int cuArrayDestroy(void *array) { return drop(array); }

/* ------------------------------------------------------------------------------------------ memory by handles */

struct property { int type, requested, location, id; };

int cuMemCreate(u64 *handle, size_t bytes, const struct property *of, u64 flags) {
    (void)flags;
    return take(of->location == 1 ? of->id : DEVICES - 1, bytes, (struct memory **)handle, 0);
}
static int left(struct memory *memory) { return memory->references || memory->mappings ? OK : drop(memory); }
int cuMemRelease(u64 handle) { ((struct memory *)handle)->references--; return left((struct memory *)handle); }
int cuMemMap(u64 at, size_t size, size_t offset, u64 handle, u64 flags) {
    (void)size, (void)offset, (void)flags;
    for (int n = 0; n < MAPPINGS; n++)
        if (!mapped[n].memory) {
            mapped[n].at = at;
            mapped[n].memory = (struct memory *)handle;
            mapped[n].memory->mappings++;
            return OK;
        }
    return NO_MEMORY;
}
int cuMemUnmap(u64 at, size_t size) {
    for (int n = 0; n < MAPPINGS; n++)
        if (mapped[n].memory && mapped[n].at >= at && mapped[n].at - at < size) {
            struct memory *memory = mapped[n].memory;
            mapped[n].memory = NULL;
            memory->mappings--;
            left(memory);
        }
    return OK;
}
int cuMemRetainAllocationHandle(u64 *handle, void *at) {
    for (int n = 0; n < MAPPINGS; n++)
        if (mapped[n].memory && mapped[n].at == (u64)at) {
            mapped[n].memory->references++;
            *handle = (u64)mapped[n].memory;
            return OK;
        }
    return INVALID;
}
/* What another process exports is a handle of no bytes of this one's. */
int cuMemExportToShareableHandle(void *shared_handle, u64 handle, int type, u64 flags) {
    (void)handle, (void)type, (void)flags;
    *(int *)shared_handle = 3;
    return OK;
}
int cuMemImportFromShareableHandle(u64 *handle, void *shared_handle, int type) {
    (void)shared_handle, (void)type;
    struct memory *memory = calloc(1, sizeof *memory);
    memory->references = 1;
    *handle = (u64)memory;
    return OK;
}

/* ---------------------------------------------------------------------------------------------------- launches */

#define SHAPE unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f
static int launched(void) { atomic_fetch_add_explicit(&shared->launches, 1, memory_order_relaxed); return OK; }
#define UNUSED_SHAPE (void)a, (void)b, (void)c, (void)d, (void)e, (void)f
int cuLaunchKernel(void *k, SHAPE, unsigned s, void *stream, void **parameters, void **extra) {
    UNUSED_SHAPE, (void)k, (void)s, (void)stream, (void)parameters, (void)extra;
    return launched();
}
int cuLaunchKernel_ptsz(void *k, SHAPE, unsigned s, void *stream, void **parameters, void **extra) {
    return cuLaunchKernel(k, a, b, c, d, e, f, s, stream, parameters, extra);
}
int cuLaunchCooperativeKernel(void *k, SHAPE, unsigned s, void *stream, void **parameters) {
    return cuLaunchKernel(k, a, b, c, d, e, f, s, stream, parameters, NULL);
}
int cuLaunchKernelEx(const void *config, void *k, void **parameters, void **extra) {
    (void)config, (void)k, (void)parameters, (void)extra;
    return launched();
}
int cuLaunchGrid(void *k, int width, int height) { (void)k, (void)width, (void)height; return launched(); }

/* Of these nothing is kept; those with many arguments return a number of all of them. */
int cuMemcpyHtoD_v2(u64 to, const void *from, size_t bytes) { (void)to, (void)from, (void)bytes; return OK; }
int cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t bytes, void *stream) {
    (void)stream;
    return cuMemcpyHtoD_v2(to, from, bytes);
}
int cuMemcpyHtoDAsync_v2_ptsz(u64 to, const void *from, size_t bytes, void *stream) {
    return cuMemcpyHtoDAsync_v2(to, from, bytes, stream);
}
int cuMemsetD2D8Async(u64 to, size_t pitch, unsigned char value, size_t width, size_t height, void *stream) {
    return (int)(to + 2 * pitch + 3 * value + 4 * width + 5 * height + 6 * (u64)stream);
}
int cuLibraryLoadData(void **library, const void *code, void *jit, void **values, unsigned count, void *options,
                      void **option_values, unsigned option_count) {
    return (int)((u64)library + (code ? 20 : 0) + 3 * (u64)jit + 4 * (u64)values + 5 * count + 6 * (u64)options
                 + 7 * (u64)option_values + 8 * option_count);
}
int cuStreamSynchronize(void *stream) { (void)stream; return OK; }
int cuCtxSynchronize(void) { return OK; }
int cuEventSynchronize(void *event) { (void)event; return OK; }

int cuGraphLaunch(void *exec, void *stream) { (void)stream; return launch_graph(exec) ? NO_MEMORY : launched(); }
int cuGraphLaunch_ptsz(void *exec, void *stream) { return cuGraphLaunch(exec, stream); }

/* ---------------------------------------------------------------------------------------------------- look-ups */

int cuGetProcAddress(const char *, void **, int, u64);
int cuGetProcAddress_v2(const char *, void **, int, u64, int *);

#define ONE(name) {#name, 0, 0, (void *)name}
/* name as asked for, the version from which it is that, whether it is for per-thread streams (1) or for all (0) */
static const struct { const char *name; int from, ptsz; void *at; } known[] = {
    {"cuMemAlloc", 3020, 0, (void *)cuMemAlloc_v2}, {"cuMemAlloc", 2000, 0, (void *)cuMemAlloc},
    {"cuMemAllocAsync", 11020, 1, (void *)cuMemAllocAsync_ptsz}, {"cuMemAllocAsync", 11020, 0, (void *)cuMemAllocAsync},
    {"cuMemFree", 3020, 0, (void *)cuMemFree_v2}, {"cuMemGetInfo", 3020, 0, (void *)cuMemGetInfo_v2},
    {"cuDeviceTotalMem", 3020, 0, (void *)cuDeviceTotalMem_v2},
    {"cuMemAllocPitch", 3020, 0, (void *)cuMemAllocPitch_v2}, {"cuArrayCreate", 3020, 0, (void *)cuArrayCreate_v2},
    {"cuLaunchKernel", 7000, 1, (void *)cuLaunchKernel_ptsz}, {"cuLaunchKernel", 4000, 0, (void *)cuLaunchKernel},
    {"cuGetProcAddress", 12000, 0, (void *)cuGetProcAddress_v2}, {"cuGetProcAddress", 11030, 0, (void *)cuGetProcAddress},
    {"cuDevicePrimaryCtxRelease", 11000, 0, (void *)cuDevicePrimaryCtxRelease_v2},
    {"cuDevicePrimaryCtxReset", 11000, 0, (void *)cuDevicePrimaryCtxReset_v2},
    {"cuCtxDestroy", 4000, 0, (void *)cuCtxDestroy_v2},
    {"cuMemcpyHtoD", 3020, 0, (void *)cuMemcpyHtoD_v2},
    {"cuMemcpyHtoDAsync", 7000, 1, (void *)cuMemcpyHtoDAsync_v2_ptsz},
    {"cuMemcpyHtoDAsync", 3020, 0, (void *)cuMemcpyHtoDAsync_v2},
    ONE(cuMemsetD2D8Async), ONE(cuLibraryLoadData), ONE(cuStreamSynchronize), ONE(cuCtxSynchronize),
    ONE(cuEventSynchronize),
    ONE(cuInit), ONE(cuDeviceGet), ONE(cuDevicePrimaryCtxRetain), ONE(cuCtxSetCurrent), ONE(cuMemAllocManaged),
    ONE(cuMemFreeAsync), ONE(cuMemAllocFromPoolAsync), ONE(cuArrayDestroy), ONE(cuMemCreate), ONE(cuMemRelease),
    ONE(cuMemMap), ONE(cuMemUnmap), ONE(cuMemRetainAllocationHandle), ONE(cuMemImportFromShareableHandle),
    ONE(cuGraphInstantiateWithFlags), ONE(cuGraphExecUpdate_v2), ONE(cuModuleLoadData), ONE(cuModuleUnload),
    ONE(cuMemPoolCreate), ONE(cuMemPoolSetAttribute), ONE(cuDeviceGetDefaultMemPool), ONE(cuGraphLaunch), ONE(cuLaunchKernelEx), ONE(cuLaunchCooperativeKernel),
};

int cuGetProcAddress_v2(const char *symbol, void **found, int version, u64 flags, int *status) {
    *found = NULL;
    for (size_t n = 0; n < sizeof known / sizeof *known && !*found; n++)
        if (!strcmp(known[n].name, symbol) && version >= known[n].from && (!known[n].ptsz || flags == 2))
            *found = known[n].at;
    if (status) *status = !*found;
    return OK;
}

int cuGetProcAddress(const char *symbol, void **found, int version, u64 flags) {
    return cuGetProcAddress_v2(symbol, found, version, flags, NULL);
}
