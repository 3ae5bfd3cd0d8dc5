/* What a driver takes of a device by itself, for both stubs of libcuda: pools, the memory of graphs, and modules. The file
   that includes this has before it `take_bytes` and `give_bytes` of a device, `free_other` for pointers of no pool,
   `current`, and DEVICES.

   A pool grows by pieces of 32 MiB and keeps what was freed up to its threshold. A graph is a number: how many kernel nodes
   of one block of 4096 threads it has, above 16 bits how many a graph in it has, and above 32 bits how many MiB a node of
   it allocates; what graphs allocated stays theirs until it is trimmed. A module takes the size of its text in whole pieces
   of 2 MiB, of the current device. A stream is a number: 256 and CUDA's number of its device. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PIECE 0x2000000ull
#define MODULE_PIECE 0x200000ull
enum { RESERVED = 5, USED = 7, THRESHOLD = 4 };

struct pool { int device; unsigned long long reserved, used, threshold; };
static struct pool default_pools[DEVICES], graph_pools[DEVICES];
struct block { struct pool *pool; unsigned long long bytes; };

static int grow(struct pool *pool, unsigned long long bytes) {
    if (bytes > 1ull << 60) return 2;
    if (pool->used + bytes > pool->reserved) {
        unsigned long long more = (pool->used + bytes - pool->reserved + PIECE - 1) / PIECE * PIECE;
        if (take_bytes(pool->device, more)) return 2;
        pool->reserved += more;
    }
    pool->used += bytes;
    return 0;
}

static void shrink(struct pool *pool, unsigned long long keep) {
    unsigned long long least = (pool->used + PIECE - 1) / PIECE * PIECE;
    if (keep < least) keep = least;
    if (pool->reserved <= keep) return;
    give_bytes(pool->device, pool->reserved - keep);
    pool->reserved = keep;
}

int cuDeviceGetDefaultMemPool(void **pool, int device) {
    default_pools[device].device = device;
    *pool = &default_pools[device];
    return 0;
}
int cuDeviceGetMemPool(void **pool, int device) { return cuDeviceGetDefaultMemPool(pool, device); }

struct pool_properties { int allocation, handles, location, id; };
int cuMemPoolCreate(void **pool, const struct pool_properties *of) {
    struct pool *made = calloc(1, sizeof *made);
    made->device = of->id;
    *pool = made;
    return 0;
}
int cuMemPoolDestroy(void *pool) { shrink(pool, 0); return 0; }
int cuMemPoolTrimTo(void *pool, size_t keep) { shrink(pool, keep); return 0; }
int cuMemPoolGetAttribute(void *of, int attribute, void *value) {
    struct pool *pool = of;
    *(unsigned long long *)value = attribute == RESERVED ? pool->reserved : pool->used;
    return 0;
}
int cuMemPoolSetAttribute(void *of, int attribute, void *value) {
    if (attribute == THRESHOLD) ((struct pool *)of)->threshold = *(unsigned long long *)value;
    return 0;
}

int cuStreamGetCtx(void *stream, void **context) { *context = (void *)((long)stream - 255); return 0; }
static __thread int pushed_over;
int cuCtxPushCurrent_v2(void *context) { pushed_over = current; current = (int)(long)context - 1; return 0; }
int cuCtxPopCurrent_v2(void **context) { (void)context; current = pushed_over; return 0; }

/* A pointer into a pool is odd. */
int cuMemAllocFromPoolAsync(unsigned long long *pointer, size_t bytes, void *pool, void *stream) {
    (void)stream;
    if (grow(pool, bytes)) return 2;
    struct block *block = malloc(sizeof *block);
    *block = (struct block){pool, bytes};
    *pointer = (uintptr_t)block | 1;
    return 0;
}
int cuMemAllocAsync(unsigned long long *pointer, size_t bytes, void *stream) {
    void *pool;
    int device = (long)stream > 2 ? (int)(long)stream - 256 : current;
    if (device < 0) return 201;
    cuDeviceGetDefaultMemPool(&pool, device);
    return cuMemAllocFromPoolAsync(pointer, bytes, pool, stream);
}
int cuMemFreeAsync(unsigned long long pointer, void *stream) {
    (void)stream;
    if (!(pointer & 1)) return free_other(pointer);
    struct block *block = (struct block *)(pointer & ~1ull);
    block->pool->used -= block->bytes;
    shrink(block->pool, block->pool->threshold);
    free(block);
    return 0;
}
int cuMemFree_v2(unsigned long long pointer) { return cuMemFreeAsync(pointer, NULL); }

/* ------------------------------------------------------------------------------------------------------- graphs */

struct kernel_node { void *function; unsigned grid[3], block[3], shared; void *more[4]; };
struct allocation_node { struct pool_properties of; void *more[11]; size_t bytes; unsigned long long pointer; };
struct graph_exec { unsigned long long bytes; int device; };

int cuGraphGetNodes(void *graph, void **nodes, size_t *count) {
    uintptr_t kernels = (uintptr_t)graph & 0xffff, child = (uintptr_t)graph >> 16 & 0xffff, mib = (uintptr_t)graph >> 32;
    *count = kernels + !!child + !!mib;
    for (uintptr_t n = 0; nodes && n < kernels; n++) nodes[n] = (void *)1;
    if (nodes && child) nodes[kernels] = (void *)(child << 8 | 2);
    if (nodes && mib) nodes[kernels + !!child] = (void *)(mib << 8 | 3);
    return 0;
}
int cuGraphNodeGetType(void *node, int *type) {
    static const int types[] = {-1, 0, 4, 10};
    *type = types[(uintptr_t)node & 0xff];
    return 0;
}
int cuGraphKernelNodeGetParams(void *node, struct kernel_node *of) {
    (void)node;
    *of = (struct kernel_node){.grid = {4, 1, 1}, .block = {1024, 1, 1}};
    return 0;
}
int cuGraphChildGraphNodeGetGraph(void *node, void **graph) { *graph = (void *)((uintptr_t)node >> 8); return 0; }
int cuGraphMemAllocNodeGetParams(void *node, struct allocation_node *of) {
    *of = (struct allocation_node){.of = {1, 0, 1, current}, .bytes = ((uintptr_t)node >> 8) << 20};
    return 0;
}
int cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) {
    (void)flags;
    struct graph_exec *made = malloc(sizeof *made);
    *made = (struct graph_exec){((uintptr_t)graph >> 32) << 20, current};
    *exec = made;
    return 0;
}
int cuGraphExecUpdate_v2(void *exec, void *graph, void *result) {
    (void)result;
    ((struct graph_exec *)exec)->bytes = ((uintptr_t)graph >> 32) << 20;
    return 0;
}
int cuGraphExecDestroy(void *exec) { free(exec); return 0; }
static int launch_graph(struct graph_exec *exec) { /* what it allocates it frees at its end */
    struct pool *pool = &graph_pools[exec->device];
    pool->device = exec->device;
    if (exec->bytes && grow(pool, exec->bytes)) return 2;
    pool->used -= exec->bytes;
    return 0;
}
int cuDeviceGetGraphMemAttribute(int device, int attribute, void *value) {
    *(unsigned long long *)value = attribute == 2 ? graph_pools[device].reserved : graph_pools[device].used;
    return 0;
}
int cuDeviceGraphMemTrim(int device) { shrink(&graph_pools[device], 0); return 0; }

/* ------------------------------------------------------------------------------------------------------ modules */

struct module { int device; unsigned long long bytes; };
int cuModuleLoadData(void **module, const void *image) {
    unsigned long long bytes = (strlen(image) + MODULE_PIECE - 1) / MODULE_PIECE * MODULE_PIECE;
    if (take_bytes(current, bytes)) return 2;
    struct module *made = malloc(sizeof *made);
    *made = (struct module){current, bytes};
    *module = made;
    return 0;
}
int cuModuleUnload(void *of) {
    struct module *module = of;
    give_bytes(module->device, module->bytes);
    free(module);
    return 0;
}
