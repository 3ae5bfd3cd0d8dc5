/* The limiter keeps the processes of a job to their part of a GPU: a library that LD_PRELOAD loads into them.

   It stands before functions of the CUDA driver and of NVML. Memory is reserved before the driver is asked for it, in the
   segment of limiter.h, which all processes of the attempt share, and is refused beyond the limit. Kernels wait for
   tokens, which the worker gives. Totals and free memory are told as those of the part. While an attempt is frozen its
   calls wait here, and the worker sees that they do.

   It is cooperative and no security boundary: a process that clears LD_PRELOAD, is linked statically, or calls the
   driver by other ways is not held. The worker's guard counts what such a process holds.

   Rules that the code below keeps (docs/decisions/0157):
   - The driver is asked first; an out-parameter counts only where the driver returned 0.
   - A function is replaced only where the address that was looked up is the driver's own.
   - Nothing in the segment is a lock, and a slot never moves. What a killed process held is in its slot alone.
   - Bytes are counted for each pointer, with the device on which they were allocated.

   Prototypes are those of NVIDIA's cuda.h and nvml.h, written down here since neither is there at the build. */

#define _GNU_SOURCE
#include "limiter.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef __GLIBC__
#error "the limiter needs glibc: with another C library it cannot find the real dlsym"
#endif

/* The oldest versions, so that the library loads in images from 2014 on. */
#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define OLDEST "GLIBC_2.17"
#else
#error "the limiter is written for x86-64 and aarch64"
#endif
__asm__(".symver dlvsym,dlvsym@" OLDEST);
__asm__(".symver dlopen,dlopen@" OLDEST);
__asm__(".symver dlerror,dlerror@" OLDEST);

#define HOOK __attribute__((visibility("default")))

typedef int CUresult, CUdevice, nvmlReturn_t;
typedef unsigned long long CUdeviceptr, handle_t;
typedef unsigned CUdeviceptr_v1;
typedef void *CUcontext, *CUstream, *CUfunction, *CUarray, *CUmipmappedArray, *CUmemoryPool, *CUgraph, *CUgraphExec,
    *CUgraphNode, *nvmlDevice_t;

enum { OK = 0, OUT_OF_MEMORY = 2, CU_NOT_FOUND = 500, NVML_NOT_FOUND = 13 };
enum { LOCATION_DEVICE = 1, NODE_KERNEL = 0 };

/* Every hook, all variants that a driver exports. */
#define CUDA_HOOKS(X) \
    X(cuGetProcAddress) X(cuGetProcAddress_v2) \
    X(cuMemAlloc) X(cuMemAlloc_v2) X(cuMemAllocManaged) X(cuMemAllocPitch) X(cuMemAllocPitch_v2) \
    X(cuMemAllocAsync) X(cuMemAllocAsync_ptsz) X(cuMemAllocFromPoolAsync) X(cuMemAllocFromPoolAsync_ptsz) \
    X(cuMemFree) X(cuMemFree_v2) X(cuMemFreeAsync) X(cuMemFreeAsync_ptsz) \
    X(cuMemCreate) X(cuMemRelease) X(cuMemMap) X(cuMemUnmap) X(cuMemRetainAllocationHandle) \
    X(cuMemImportFromShareableHandle) \
    X(cuArrayCreate) X(cuArrayCreate_v2) X(cuArray3DCreate) X(cuArray3DCreate_v2) X(cuArrayDestroy) \
    X(cuMipmappedArrayCreate) X(cuMipmappedArrayDestroy) \
    X(cuCtxDestroy) X(cuCtxDestroy_v2) X(cuDevicePrimaryCtxRetain) \
    X(cuDevicePrimaryCtxRelease) X(cuDevicePrimaryCtxRelease_v2) \
    X(cuDevicePrimaryCtxReset) X(cuDevicePrimaryCtxReset_v2) \
    X(cuMemGetInfo) X(cuMemGetInfo_v2) X(cuDeviceTotalMem) X(cuDeviceTotalMem_v2) \
    X(cuLaunchKernel) X(cuLaunchKernel_ptsz) X(cuLaunchKernelEx) X(cuLaunchKernelEx_ptsz) \
    X(cuLaunchCooperativeKernel) X(cuLaunchCooperativeKernel_ptsz) X(cuLaunchCooperativeKernelMultiDevice) \
    X(cuLaunch) X(cuLaunchGrid) X(cuLaunchGridAsync) \
    X(cuGraphInstantiate) X(cuGraphInstantiate_v2) X(cuGraphInstantiateWithFlags) X(cuGraphInstantiateWithParams) \
    X(cuGraphInstantiateWithParams_ptsz) X(cuGraphExecDestroy) X(cuGraphLaunch) X(cuGraphLaunch_ptsz)
/* Those that do nothing but wait while the attempt is frozen: what a process calls after a pause. What only asks, as
   cuDeviceGetCount, is left out. None of them has a floating-point argument, and each at most six words of arguments
   (GATED_WIDE: eight), so all of them are handed on alike. */
#define VARIANTS(X, name) X(name) X(name##_ptsz)
#define COPIES(X, name) X(name) X(name##_v2) X(name##_ptds) X(name##_v2_ptds)
#define COPIES_ASYNC(X, name) X(name) X(name##_v2) X(name##_ptsz) X(name##_v2_ptsz)
#define FILLS(X, name) X(name) X(name##_v2) X(name##_ptds) X(name##_v2_ptds)
#define GATED(X) \
    X(cuCtxCreate) X(cuCtxCreate_v2) X(cuCtxCreate_v3) X(cuCtxCreate_v4) X(cuCtxSynchronize) \
    X(cuModuleLoad) X(cuModuleLoadData) X(cuModuleLoadDataEx) X(cuModuleLoadFatBinary) X(cuModuleUnload) \
    X(cuModuleGetFunction) X(cuModuleGetGlobal) X(cuModuleGetGlobal_v2) X(cuLibraryUnload) \
    X(cuLibraryGetModule) X(cuKernelGetFunction) \
    X(cuStreamCreate) X(cuStreamCreateWithPriority) X(cuStreamDestroy) X(cuStreamDestroy_v2) \
    VARIANTS(X, cuStreamQuery) VARIANTS(X, cuStreamSynchronize) VARIANTS(X, cuStreamWaitEvent) \
    VARIANTS(X, cuStreamAddCallback) VARIANTS(X, cuLaunchHostFunc) VARIANTS(X, cuStreamAttachMemAsync) \
    VARIANTS(X, cuStreamWriteValue32) VARIANTS(X, cuStreamWaitValue32) VARIANTS(X, cuStreamWriteValue32_v2) \
    VARIANTS(X, cuStreamWaitValue32_v2) VARIANTS(X, cuStreamWriteValue64) VARIANTS(X, cuStreamWaitValue64) \
    X(cuEventCreate) X(cuEventQuery) X(cuEventSynchronize) X(cuEventElapsedTime) X(cuEventDestroy) X(cuEventDestroy_v2) \
    VARIANTS(X, cuEventRecord) VARIANTS(X, cuEventRecordWithFlags) \
    X(cuMemcpy) X(cuMemcpy_ptds) VARIANTS(X, cuMemcpyAsync) X(cuMemcpyPeer) X(cuMemcpyPeer_ptds) \
    VARIANTS(X, cuMemcpyPeerAsync) COPIES(X, cuMemcpyHtoD) COPIES(X, cuMemcpyDtoH) COPIES(X, cuMemcpyDtoD) \
    COPIES(X, cuMemcpyDtoA) COPIES(X, cuMemcpyAtoD) COPIES(X, cuMemcpyHtoA) COPIES(X, cuMemcpyAtoH) \
    COPIES(X, cuMemcpyAtoA) COPIES(X, cuMemcpy2D) COPIES(X, cuMemcpy2DUnaligned) COPIES(X, cuMemcpy3D) \
    COPIES_ASYNC(X, cuMemcpyHtoDAsync) COPIES_ASYNC(X, cuMemcpyDtoHAsync) COPIES_ASYNC(X, cuMemcpyDtoDAsync) \
    COPIES_ASYNC(X, cuMemcpyHtoAAsync) COPIES_ASYNC(X, cuMemcpyAtoHAsync) COPIES_ASYNC(X, cuMemcpy2DAsync) \
    COPIES_ASYNC(X, cuMemcpy3DAsync) X(cuMemcpy3DPeer) X(cuMemcpy3DPeer_ptds) VARIANTS(X, cuMemcpy3DPeerAsync) \
    FILLS(X, cuMemsetD8) FILLS(X, cuMemsetD16) FILLS(X, cuMemsetD32) \
    FILLS(X, cuMemsetD2D8) FILLS(X, cuMemsetD2D16) FILLS(X, cuMemsetD2D32) \
    VARIANTS(X, cuMemsetD8Async) VARIANTS(X, cuMemsetD16Async) VARIANTS(X, cuMemsetD32Async) \
    VARIANTS(X, cuMemsetD2D8Async) VARIANTS(X, cuMemsetD2D16Async) VARIANTS(X, cuMemsetD2D32Async) \
    VARIANTS(X, cuMemPrefetchAsync) VARIANTS(X, cuMemPrefetchAsync_v2) X(cuMemAdvise) X(cuMemAdvise_v2) \
    X(cuMemAllocHost) X(cuMemAllocHost_v2) X(cuMemHostAlloc) X(cuMemFreeHost) X(cuMemHostRegister) \
    X(cuMemHostRegister_v2) X(cuMemHostUnregister) X(cuMemSetAccess) X(cuMemPoolCreate) X(cuMemPoolDestroy) \
    X(cuMemPoolTrimTo) VARIANTS(X, cuGraphUpload)
#define GATED_WIDE(X) X(cuLibraryLoadData) X(cuLibraryLoadFromFile)
#define NVML_HOOKS(X) X(nvmlDeviceGetMemoryInfo) X(nvmlDeviceGetMemoryInfo_v2)

#define ENUM(name) AT_##name,
enum { CUDA_HOOKS(ENUM) GATED(ENUM) GATED_WIDE(ENUM) AT_NVML, AT_before_nvml = AT_NVML - 1, NVML_HOOKS(ENUM) HOOKS };

static struct hook {
    const char *name;
    void *ours;
    _Atomic(void *) real;
} hooks[];

static struct limiter_segment *segment; /* NULL: this process is not limited */
static int devices;

/* State that a forked child must not inherit. The kernel empties the page in the child (MADV_WIPEONFORK), whatever way it
   was forked; an empty one means: no slot, nothing known, no lock taken. */
#define SHARDS 64
#define ORDINALS 64
static struct wiped {
    _Atomic uint32_t slot;  /* our slot and 1 */
    _Atomic uint32_t begun; /* the tables of this process are its own */
    _Atomic uint32_t attaching, mapping;
    _Atomic uint32_t launches; /* it has launched a kernel, and has tried to get a slot */
    _Atomic uint32_t shards[SHARDS];
    _Atomic uint8_t touched[LIMITER_DEVICES]; /* the context on this device is counted */
    _Atomic uint8_t index[ORDINALS];          /* by CUDA's ordinal: 0 not known yet, 1 not ours, else index and 2 */
} *wiped;

static void lock(_Atomic uint32_t *at) {
    while (atomic_exchange_explicit(at, 1, memory_order_acquire)) sched_yield();
}

static void unlock(_Atomic uint32_t *at) { atomic_store_explicit(at, 0, memory_order_release); }

/* ------------------------------------------------------------------------------------------- the real functions */

static void *real_dlsym(void *handle, const char *name) {
    static _Atomic(void *) found;
    void *(*real)(void *, const char *) = atomic_load(&found);
    if (!real) {
        real = dlvsym(RTLD_NEXT, "dlsym", OLDEST);
        if (!real) abort(); /* glibc keeps it for ever */
        atomic_store(&found, (void *)real);
    }
    return real(handle, name);
}

/* A library's handle once it is loaded; with `load` it is loaded now. dlerror(3) is left as it was found: empty. */
static void *library(const char *name, _Atomic(void *) *kept, bool load) {
    void *handle = atomic_load(kept);
    if (!handle) {
        handle = dlopen(name, RTLD_LAZY | (load ? 0 : RTLD_NOLOAD));
        if (handle) atomic_store(kept, handle);
        else dlerror();
    }
    return handle;
}

static void *libcuda(bool load) {
    static _Atomic(void *) kept;
    return library("libcuda.so.1", &kept, load);
}

static void *libnvml(bool load) {
    static _Atomic(void *) kept;
    return library("libnvidia-ml.so.1", &kept, load);
}

static int absent_in_cuda(void) { return CU_NOT_FOUND; }
static int absent_in_nvml(void) { return NVML_NOT_FOUND; }

/* The driver's own function of a hook; NULL where its library is not there or lacks it. */
static void *known_real(int at, bool load) {
    void *real = atomic_load_explicit(&hooks[at].real, memory_order_acquire);
    if (real) return real;
    void *handle = at < AT_NVML ? libcuda(load) : libnvml(load);
    real = handle ? real_dlsym(handle, hooks[at].name) : NULL;
    if (!real) { dlerror(); return NULL; }
    atomic_store_explicit(&hooks[at].real, real, memory_order_release);
    return real;
}

static void *real_of(int at) {
    void *real = known_real(at, true);
    return real ? real : at < AT_NVML ? (void *)absent_in_cuda : (void *)absent_in_nvml;
}

#define UNGATED(name) ((__typeof__(&name))real_of(AT_##name))

/* ------------------------------------------------------------------------------------------------- being frozen */

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

#define STALE_NS 2000000000ull
#define WAIT_NS_MIN 1000000
#define WAIT_NS_MAX 10000000

/* Whether the worker has given no sign for two seconds. */
static bool is_stale(void) {
    uint64_t beat = atomic_load(&segment->heartbeat), now = now_ns();
    return !beat || beat > now || now - beat > STALE_NS;
}

/* Say that a call wants to go on, and wait until the worker has resumed the attempt. Without a heartbeat the call goes on
   to the driver: an attempt that a worker was only about to freeze runs then, and for one that is frozen the driver
   waits, which no library can do better. */
static __attribute__((noinline, cold)) void wait_until_resumed(void) {
    atomic_fetch_add(&segment->waiting, 1);
    for (long wait = WAIT_NS_MIN; atomic_load(&segment->frozen) && !is_stale();) {
        nanosleep(&(struct timespec){0, wait}, NULL);
        wait = wait * 2 < WAIT_NS_MAX ? wait * 2 : WAIT_NS_MAX;
    }
}

/* Before each call of the driver. */
static inline void gate(void) {
    if (__builtin_expect(segment && atomic_load_explicit(&segment->frozen, memory_order_relaxed), 0))
        wait_until_resumed();
}

#define REAL(name) (gate(), UNGATED(name))

#define WORDS uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e, uint64_t f
#define GATE(name) HOOK CUresult name(WORDS) { return REAL(name)(a, b, c, d, e, f); }
#define GATE_WIDE(name) \
    HOOK CUresult name(WORDS, uint64_t g, uint64_t h) { return REAL(name)(a, b, c, d, e, f, g, h); }
GATED(GATE)
GATED_WIDE(GATE_WIDE)

/* A function of the driver that has no hook. */
#define DRIVER(name, ...) ({ \
    gate(); \
    static _Atomic(void *) kept; \
    void *at = atomic_load_explicit(&kept, memory_order_relaxed); \
    if (!at) { \
        void *handle = libcuda(true); \
        at = handle ? real_dlsym(handle, #name) : NULL; \
        if (!at) { dlerror(); at = (void *)absent_in_cuda; } \
        atomic_store_explicit(&kept, at, memory_order_relaxed); \
    } \
    (__VA_ARGS__)at; })

/* ------------------------------------------------------------------------------------------------ being attached */

/* The inode of this process's PID namespace, as in the link "pid:[4026531836]". */
static uint64_t pid_namespace(void) {
    char link[64];
    ssize_t length = readlink("/proc/self/ns/pid", link, sizeof link - 1);
    if (length <= 5) return 1; /* no /proc: it cannot be told, and 1 is no inode of a namespace */
    link[length] = 0;
    return strtoull(link + 5, NULL, 10);
}

/* When a process of our namespace was started; 0 where there is none, or nothing but its remains. */
static uint64_t start_of(long pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0) return 0;
    text[length] = 0;
    char *at = strrchr(text, ')'), state, *rest;
    if (!at || !at[1]) return 0;
    state = at[2];
    long threads = 0;
    uint64_t start = 0;
    rest = at + 2;
    for (int field = 3; field <= 22 && rest; field++) {
        if (field == 20) threads = atol(rest);
        if (field == 22) start = strtoull(rest, NULL, 10);
        rest = strchr(rest, ' ');
        if (rest) rest++;
    }
    if ((state == 'Z' && threads <= 1) || state == 'X') return 0; /* a first thread that ended leaves the others */
    return start;
}

/* Release the bytes of processes that have ended, as far as this process can see them. */
static void sweep(void) {
    uint64_t here = pid_namespace(), high = atomic_load(&segment->high);
    for (uint64_t at = 0; at < high && at < LIMITER_SLOTS; at++) {
        struct limiter_slot *slot = &segment->slots[at];
        uint64_t owner = atomic_load(&slot->owner);
        if (!owner || at + 1 == atomic_load(&wiped->slot)) continue;
        long pid = owner >> LIMITER_START_BITS;
        bool gone = atomic_load(&segment->dead[at]) == owner;
        if (!gone && here > 1 && atomic_load(&slot->pid_ns) == here) gone = LIMITER_OWNER(pid, start_of(pid)) != owner;
        if (!gone) continue;
        atomic_store(&slot->pid_ns, 0); /* before the owner: the next one's pid must not be looked for in this one's */
        atomic_compare_exchange_strong(&slot->owner, &owner, 0);
    }
}

/* Take a free slot, or our own from before an exec(2). Its bytes count against us until they are zero. */
static int claim(uint64_t owner) {
    for (int at = 0; at < LIMITER_SLOTS; at++) {
        struct limiter_slot *slot = &segment->slots[at];
        uint64_t found = atomic_load(&slot->owner);
        if (found && found != owner) continue;
        if (!found && !atomic_compare_exchange_strong(&slot->owner, &found, owner)) continue;
        for (int of = 0; of < LIMITER_DEVICES; of++) {
            atomic_store(&slot->of[of].asking, 0);
            atomic_store(&slot->of[of].used, 0);
        }
        atomic_store(&slot->pid_ns, pid_namespace());
        uint64_t high = atomic_load(&segment->high);
        while (high < (uint64_t)at + 1 && !atomic_compare_exchange_weak(&segment->high, &high, at + 1)) {}
        return at;
    }
    return -1;
}

/* This process's slot; NULL where all of them are taken. */
static struct limiter_slot *own_slot(void) {
    uint32_t slot = atomic_load_explicit(&wiped->slot, memory_order_relaxed);
    if (slot) return &segment->slots[slot - 1];
    lock(&wiped->attaching);
    if (!(slot = atomic_load(&wiped->slot))) {
        long pid = syscall(SYS_getpid);
        uint64_t owner = LIMITER_OWNER(pid, start_of(pid));
        sweep();
        int at = claim(owner);
        if (at < 0) atomic_fetch_add(&segment->crowded, 1);
        slot = at + 1;
        atomic_store(&wiped->slot, slot);
    }
    unlock(&wiped->attaching);
    return slot ? &segment->slots[slot - 1] : NULL;
}

static void wipe(void) { memset(wiped, 0, sizeof *wiped); }

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("MOORAGE_LIMITER");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    struct limiter_segment *found = MAP_FAILED;
    void *page = MAP_FAILED;
    if (lseek(file, 0, SEEK_END) == (off_t)sizeof *found)
        found = mmap(NULL, sizeof *found, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found == MAP_FAILED) return;
    if (found->magic == LIMITER_MAGIC && found->version == LIMITER_VERSION && found->size == sizeof *found)
        page = mmap(NULL, sizeof *wiped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) { munmap(found, sizeof *found); return; }
    wiped = page;
#ifdef MADV_WIPEONFORK
    if (madvise(page, sizeof *wiped, MADV_WIPEONFORK))
#endif
        pthread_atfork(NULL, NULL, wipe); /* before Linux 4.14 */
    devices = found->devices < LIMITER_DEVICES ? found->devices : LIMITER_DEVICES;
    segment = found;
    atomic_fetch_add(&found->attached, 1);
}

/* ------------------------------------------------------------------------------------------------------- devices */

static int index_of_uuid(const unsigned char *uuid) {
    for (int at = 0; at < devices; at++)
        if (!memcmp(segment->uuid[at], uuid, 16)) return at;
    return -1;
}

/* Where the segment has a device of CUDA's; -1: it is not one of the lease. */
static int index_of(CUdevice ordinal) {
    if (!segment || ordinal < 0 || ordinal >= ORDINALS) return -1;
    uint8_t known = atomic_load_explicit(&wiped->index[ordinal], memory_order_relaxed);
    if (known) return known - 2;
    unsigned char uuid[16];
    if (DRIVER(cuDeviceGetUuid_v2, CUresult(*)(unsigned char *, CUdevice))(uuid, ordinal) != OK
        && DRIVER(cuDeviceGetUuid, CUresult(*)(unsigned char *, CUdevice))(uuid, ordinal) != OK)
        return -1;
    int at = index_of_uuid(uuid);
    atomic_store_explicit(&wiped->index[ordinal], at + 2, memory_order_relaxed);
    return at;
}

/* The device of the current context; -1 where there is none, or it is not of the lease. */
static int current(void) {
    CUdevice ordinal;
    if (!segment || DRIVER(cuCtxGetDevice, CUresult(*)(CUdevice *))(&ordinal) != OK) return -1;
    return index_of(ordinal);
}

/* -------------------------------------------------------------------------------------------------------- memory */

/* What all living processes hold and, of others than `bytes` of our own asking, are asking for. A process counts what it
   takes into `used` before it takes it out of `asking`; so `asking` is read first, and nothing is missed. */
static uint64_t sum(int device, uint64_t *asking) {
    uint64_t used = 0, high = atomic_load(&segment->high);
    *asking = 0;
    for (uint64_t at = 0; at < high && at < LIMITER_SLOTS; at++) {
        struct limiter_slot *slot = &segment->slots[at];
        uint64_t owner = atomic_load(&slot->owner);
        if (!owner || atomic_load(&segment->dead[at]) == owner) continue;
        *asking += atomic_load(&slot->of[device].asking);
        used += atomic_load(&slot->of[device].used);
    }
    return used;
}

static void give_back(int device, uint64_t bytes) {
    struct limiter_slot *slot = own_slot();
    if (!slot) return;
    uint64_t used = atomic_load(&slot->of[device].used);
    while (!atomic_compare_exchange_weak(&slot->of[device].used, &used, used > bytes ? used - bytes : 0)) {}
}

/* Take bytes of the limit. A process first writes `asking` and then reads the sum: processes that ask at the same time
   see each other, so the limit holds. If they fit only one by one, they withdraw and try again. */
static bool take(struct limiter_slot *slot, int device, uint64_t bytes) {
    const uint64_t limit = atomic_load_explicit(&segment->limit[device], memory_order_relaxed);
    if (bytes > (limit ? limit : UINT64_MAX / 4)) return false;
    int seen_full = 0;
    for (int tries = 0; tries < 10000; tries++) {
        uint64_t asking, used;
        atomic_fetch_add(&slot->of[device].asking, bytes);
        used = sum(device, &asking);
        bool fits = !limit || used + asking <= limit;
        if (fits) atomic_fetch_add(&slot->of[device].used, bytes);
        atomic_fetch_sub(&slot->of[device].asking, bytes);
        if (fits) return true;
        if (used + bytes > limit) { /* the sum is not of one moment: what was freed meanwhile may be in it */
            if (seen_full++ == 1) sweep();
            if (seen_full > 2) return false;
        }
        sched_yield();
    }
    return false;
}

static CUresult reserve(int device, uint64_t bytes) {
    struct limiter_slot *slot = own_slot();
    if (!slot) return OUT_OF_MEMORY;
    if (!atomic_load_explicit(&wiped->touched[device], memory_order_relaxed)
        && !atomic_exchange(&wiped->touched[device], 1)) {
        if (!take(slot, device, atomic_load(&segment->context[device]))) {
            atomic_store(&wiped->touched[device], 0);
            atomic_fetch_add(&segment->refused, 1);
            return OUT_OF_MEMORY;
        }
    }
    if (take(slot, device, bytes)) return OK;
    atomic_fetch_add(&segment->refused, 1);
    return OUT_OF_MEMORY;
}

/* What was counted for each pointer, handle or array of this process, and the cost of each graph. */
enum kind { POINTER, HANDLE, ARRAY, GRAPH };

struct held {
    struct held *next;
    uint64_t key, bytes;
    CUcontext context; /* it goes with its context; NULL: it does not */
    int device;
    uint8_t kind;
    uint32_t references, mappings; /* of a handle */
};

#define BUCKETS (1 << 16)
static struct held *table[BUCKETS];
static struct mapping { uint64_t at, size, handle; } *mappings;
static size_t mappings_count, mappings_room;

static uint32_t bucket_of(enum kind kind, uint64_t key) {
    return ((key ^ key >> 9) * 0x9e3779b97f4a7c15ull + kind * 0x5bd1e995u) >> 48;
}

#define SHARD(bucket) (&wiped->shards[(bucket) % SHARDS])

/* In a forked child: drop the copied entries, which belong to its parent. */
static void forget_all(void) {
    memset(table, 0, sizeof table);
    mappings_count = 0;
}

static void begin(void) {
    if (atomic_load_explicit(&wiped->begun, memory_order_acquire)) return;
    static _Atomic uint32_t was_used;
    lock(&wiped->attaching);
    if (!atomic_load(&wiped->begun)) {
        if (atomic_exchange(&was_used, 1)) forget_all();
        atomic_store(&wiped->begun, 1);
    }
    unlock(&wiped->attaching);
}

static struct held **find(enum kind kind, uint64_t key, uint32_t bucket) {
    struct held **at = &table[bucket];
    while (*at && ((*at)->key != key || (*at)->kind != kind)) at = &(*at)->next;
    return at;
}

/* Remember; what had the same key before was freed by a way that has no hook, so its bytes go back. */
static void keep(struct held *entry) {
    begin();
    uint32_t bucket = bucket_of(entry->kind, entry->key);
    lock(SHARD(bucket));
    struct held **at = find(entry->kind, entry->key, bucket), *old = *at;
    if (old) *at = old->next;
    entry->next = table[bucket];
    table[bucket] = entry;
    unlock(SHARD(bucket));
    if (old) {
        if (old->device >= 0) give_back(old->device, old->bytes);
        free(old);
    }
}

/* Remove the entry of a key and return it; NULL if there is none. */
static struct held *take_out(enum kind kind, uint64_t key) {
    if (!segment) return NULL;
    begin();
    uint32_t bucket = bucket_of(kind, key);
    lock(SHARD(bucket));
    struct held **at = find(kind, key, bucket), *found = *at;
    if (found) *at = found->next;
    unlock(SHARD(bucket));
    return found;
}

static void drop(struct held *entry) {
    give_back(entry->device, entry->bytes);
    free(entry);
}

/* All of a context that was destroyed. */
static void drop_context(CUcontext context) {
    if (!segment || !context) return;
    begin();
    for (uint32_t bucket = 0; bucket < BUCKETS; bucket++) {
        if (!table[bucket]) continue;
        lock(SHARD(bucket));
        struct held **at = &table[bucket], *gone = NULL;
        while (*at) {
            struct held *entry = *at;
            if (entry->context != context) { at = &entry->next; continue; }
            *at = entry->next;
            entry->next = gone;
            gone = entry;
        }
        unlock(SHARD(bucket));
        while (gone) {
            struct held *next = gone->next;
            drop(gone);
            gone = next;
        }
    }
}

/* An allocation that is asked of the driver: NULL in *entry where it does not count. */
static CUresult ask(struct held **entry, enum kind kind, int device, uint64_t bytes) {
    *entry = NULL;
    if (device < 0) return OK;
    struct held *made = calloc(1, sizeof *made);
    if (!made) return OUT_OF_MEMORY;
    CUresult code = reserve(device, bytes);
    if (code != OK) { free(made); return code; }
    made->kind = kind;
    made->device = device;
    made->bytes = bytes;
    made->references = 1;
    *entry = made;
    return OK;
}

/* Take the driver's answer to it. */
static CUresult answered(struct held *entry, CUresult code, uint64_t key) {
    if (!entry) return code;
    if (code != OK) { drop(entry); return code; }
    entry->key = key;
    keep(entry);
    return code;
}

static CUcontext current_context(void) {
    CUcontext context = NULL;
    DRIVER(cuCtxGetCurrent, CUresult(*)(CUcontext *))(&context);
    return context;
}

/* An allocation of the current context's device. `is_contexts`: it goes with the context. */
#define ALLOCATE(kind, bytes, is_contexts, key, call) do { \
    struct held *entry; \
    CUresult code = ask(&entry, kind, current(), bytes); \
    if (code != OK) return code; \
    if (entry && (is_contexts)) entry->context = current_context(); \
    code = (call); \
    return answered(entry, code, code == OK ? (uint64_t)(key) : 0); \
} while (0)

/* The entry is removed first: as soon as the driver has freed it, another thread may get the same key. */
#define FREE(kind, key, call) do { \
    struct held *entry = take_out(kind, (uint64_t)(key)); \
    CUresult code = (call); \
    if (entry && code == OK) drop(entry); \
    else if (entry) keep(entry); \
    return code; \
} while (0)

HOOK CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    ALLOCATE(POINTER, bytes, true, *pointer, REAL(cuMemAlloc_v2)(pointer, bytes));
}

HOOK CUresult cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned bytes) {
    ALLOCATE(POINTER, bytes, true, *pointer, REAL(cuMemAlloc)(pointer, bytes));
}

HOOK CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned flags) {
    ALLOCATE(POINTER, bytes, true, *pointer, REAL(cuMemAllocManaged)(pointer, bytes, flags));
}

#define ALLOCATE_ASYNC(name) \
    HOOK CUresult name(CUdeviceptr *pointer, size_t bytes, CUstream stream) { \
        ALLOCATE(POINTER, bytes, false, *pointer, REAL(name)(pointer, bytes, stream)); \
    }
ALLOCATE_ASYNC(cuMemAllocAsync)
ALLOCATE_ASYNC(cuMemAllocAsync_ptsz)

#define ALLOCATE_FROM_POOL(name) \
    HOOK CUresult name(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) { \
        ALLOCATE(POINTER, bytes, false, *pointer, REAL(name)(pointer, bytes, pool, stream)); \
    }
ALLOCATE_FROM_POOL(cuMemAllocFromPoolAsync)
ALLOCATE_FROM_POOL(cuMemAllocFromPoolAsync_ptsz)

HOOK CUresult cuMemFree_v2(CUdeviceptr pointer) { FREE(POINTER, pointer, REAL(cuMemFree_v2)(pointer)); }
HOOK CUresult cuMemFree(CUdeviceptr_v1 pointer) { FREE(POINTER, pointer, REAL(cuMemFree)(pointer)); }

HOOK CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    FREE(POINTER, pointer, REAL(cuMemFreeAsync)(pointer, stream));
}

HOOK CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream) {
    FREE(POINTER, pointer, REAL(cuMemFreeAsync_ptsz)(pointer, stream));
}

static uint64_t times(uint64_t a, uint64_t b) {
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

/* The driver chooses the pitch: rows are asked for at the alignment of all devices so far, and what it chose counts. */
#define PITCH 512
#define ALLOCATE_PITCH(name, pointer_t, number_t) \
    HOOK CUresult name(pointer_t *pointer, number_t *pitch, number_t width, number_t height, unsigned element) { \
        struct held *entry; \
        CUresult code = ask(&entry, POINTER, current(), times(((uint64_t)width + PITCH - 1) / PITCH * PITCH, height)); \
        if (code != OK) return code; \
        if (entry) entry->context = current_context(); \
        code = REAL(name)(pointer, pitch, width, height, element); \
        if (entry && code == OK) { \
            uint64_t counted = entry->bytes; \
            entry->bytes = times(*pitch, height); \
            if (entry->bytes < counted) give_back(entry->device, counted - entry->bytes); \
            else if (entry->bytes > counted && reserve(entry->device, entry->bytes - counted) != OK) { \
                entry->bytes = counted; \
                drop(entry); \
                free_##name(*pointer); \
                return OUT_OF_MEMORY; \
            } \
        } \
        return answered(entry, code, code == OK ? *pointer : 0); \
    }
static void free_cuMemAllocPitch(CUdeviceptr_v1 pointer) { REAL(cuMemFree)(pointer); }
static void free_cuMemAllocPitch_v2(CUdeviceptr pointer) { REAL(cuMemFree_v2)(pointer); }
ALLOCATE_PITCH(cuMemAllocPitch, CUdeviceptr_v1, unsigned)
ALLOCATE_PITCH(cuMemAllocPitch_v2, CUdeviceptr, size_t)

/* Arrays. An unknown format counts with four bytes a channel: its real size is not documented. */
static uint64_t array_bytes(uint64_t width, uint64_t height, uint64_t depth, unsigned format, unsigned channels) {
    unsigned each = 4;
    if (format == 0x01 || format == 0x08) each = 1;
    else if (format == 0x02 || format == 0x09 || format == 0x10) each = 2;
    uint64_t row = times(width, (uint64_t)each * channels);
    return times(times(row, height ? height : 1), depth ? depth : 1);
}

struct array_v1 { unsigned width, height, format, channels; };
struct array_v2 { size_t width, height; unsigned format, channels; };
struct array3d_v1 { unsigned width, height, depth, format, channels, flags; };
struct array3d_v2 { size_t width, height, depth; unsigned format, channels, flags; };

#define CREATE_ARRAY(name, descriptor_t, depth) \
    HOOK CUresult name(CUarray *array, const descriptor_t *of) { \
        if (!of) return REAL(name)(array, of); \
        ALLOCATE(ARRAY, array_bytes(of->width, of->height, depth, of->format, of->channels), true, (uintptr_t)*array, \
                 REAL(name)(array, of)); \
    }
CREATE_ARRAY(cuArrayCreate, struct array_v1, 0)
CREATE_ARRAY(cuArrayCreate_v2, struct array_v2, 0)
CREATE_ARRAY(cuArray3DCreate, struct array3d_v1, of->depth)
CREATE_ARRAY(cuArray3DCreate_v2, struct array3d_v2, of->depth)

HOOK CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const struct array3d_v2 *of, unsigned levels) {
    if (!of) return REAL(cuMipmappedArrayCreate)(array, of, levels);
    uint64_t bytes = 0, w = of->width, h = of->height, d = of->depth;
    for (unsigned level = 0; level < levels && level < 32; level++) {
        uint64_t more = array_bytes(w, h, d, of->format, of->channels);
        bytes = bytes + more < bytes ? UINT64_MAX : bytes + more;
        w = w > 1 ? w / 2 : w, h = h > 1 ? h / 2 : h, d = d > 1 ? d / 2 : d;
    }
    ALLOCATE(ARRAY, bytes, true, (uintptr_t)*array, REAL(cuMipmappedArrayCreate)(array, of, levels));
}

HOOK CUresult cuArrayDestroy(CUarray array) { FREE(ARRAY, (uintptr_t)array, REAL(cuArrayDestroy)(array)); }

HOOK CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) {
    FREE(ARRAY, (uintptr_t)array, REAL(cuMipmappedArrayDestroy)(array));
}

/* Physical memory by handles. It is there until its last reference has been released and its last mapping is gone.
   Memory of the host does not count, nor what another process exported: that counts there. */

struct location { int type, id; };
struct property { int type, requested; struct location location; };

HOOK CUresult cuMemCreate(handle_t *handle, size_t bytes, const struct property *of, unsigned long long flags) {
    struct held *entry = NULL;
    if (of && of->location.type == LOCATION_DEVICE) {
        CUresult code = ask(&entry, HANDLE, index_of(of->location.id), bytes);
        if (code != OK) return code;
    }
    CUresult code = REAL(cuMemCreate)(handle, bytes, of, flags);
    return answered(entry, code, code == OK ? *handle : 0);
}

/* Change the references and mappings of a handle, and return whether it is known here. With the last of them it is taken
   out: into *last, or else its bytes go back. */
static bool change(handle_t handle, int references, int mapped, struct held **last) {
    if (!segment) return false;
    begin();
    uint32_t bucket = bucket_of(HANDLE, handle);
    struct held *gone = NULL;
    lock(SHARD(bucket));
    struct held **at = find(HANDLE, handle, bucket), *entry = *at;
    if (entry) {
        entry->references += references;
        entry->mappings += mapped;
        if (!entry->references && !entry->mappings) {
            gone = entry;
            *at = entry->next;
        }
    }
    unlock(SHARD(bucket));
    if (gone && last) *last = gone;
    else if (gone) drop(gone);
    return entry != NULL;
}

HOOK CUresult cuMemRelease(handle_t handle) {
    struct held *gone = NULL; /* taken out before the driver frees it, as with FREE */
    bool is_known = change(handle, -1, 0, &gone);
    CUresult code = REAL(cuMemRelease)(handle);
    if (gone && code == OK) drop(gone);
    else if (gone) gone->references = 1, keep(gone);
    else if (is_known && code != OK) change(handle, 1, 0, NULL);
    return code;
}

HOOK CUresult cuMemRetainAllocationHandle(handle_t *handle, void *address) {
    CUresult code = REAL(cuMemRetainAllocationHandle)(handle, address);
    if (code == OK) change(*handle, 1, 0, NULL);
    return code;
}

HOOK CUresult cuMemImportFromShareableHandle(handle_t *handle, void *os_handle, int type) {
    CUresult code = REAL(cuMemImportFromShareableHandle)(handle, os_handle, type);
    if (code == OK) change(*handle, 1, 0, NULL); /* our own, come back */
    return code;
}

HOOK CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, handle_t handle, unsigned long long flags) {
    CUresult code = REAL(cuMemMap)(at, size, offset, handle, flags);
    if (code != OK || !change(handle, 0, 1, NULL)) return code;
    lock(&wiped->mapping);
    if (mappings_count == mappings_room) {
        size_t room = mappings_room ? mappings_room * 2 : 256;
        struct mapping *more = realloc(mappings, room * sizeof *more);
        if (more) mappings = more, mappings_room = room;
    }
    if (mappings_count < mappings_room) mappings[mappings_count++] = (struct mapping){at, size, handle};
    unlock(&wiped->mapping);
    return code;
}

HOOK CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
    CUresult code = REAL(cuMemUnmap)(at, size);
    if (code != OK || !segment) return code;
    begin();
    lock(&wiped->mapping);
    for (size_t n = 0; n < mappings_count;) {
        if (mappings[n].at < at || mappings[n].at - at >= size) { n++; continue; }
        handle_t handle = mappings[n].handle;
        mappings[n] = mappings[--mappings_count];
        change(handle, 0, -1, NULL);
    }
    unlock(&wiped->mapping);
    return code;
}

/* What goes with a context. A primary context is known by the device, and ends with its last reference. */

static CUcontext primary[ORDINALS];

HOOK CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice ordinal) {
    CUresult code = REAL(cuDevicePrimaryCtxRetain)(context, ordinal);
    if (code == OK && ordinal >= 0 && ordinal < ORDINALS) primary[ordinal] = *context;
    return code;
}

static CUresult primary_left(CUresult code, CUdevice ordinal) {
    unsigned flags;
    int active = 1;
    if (code != OK || !segment || ordinal < 0 || ordinal >= ORDINALS) return code;
    if (DRIVER(cuDevicePrimaryCtxGetState, CUresult(*)(CUdevice, unsigned *, int *))(ordinal, &flags, &active) == OK
        && !active)
        drop_context(primary[ordinal]);
    return code;
}

#define LEAVE_PRIMARY(name) \
    HOOK CUresult name(CUdevice ordinal) { return primary_left(REAL(name)(ordinal), ordinal); }
LEAVE_PRIMARY(cuDevicePrimaryCtxRelease)
LEAVE_PRIMARY(cuDevicePrimaryCtxRelease_v2)
LEAVE_PRIMARY(cuDevicePrimaryCtxReset)
LEAVE_PRIMARY(cuDevicePrimaryCtxReset_v2)

#define DESTROY_CONTEXT(name) \
    HOOK CUresult name(CUcontext context) { \
        CUresult code = REAL(name)(context); \
        if (code == OK) drop_context(context); \
        return code; \
    }
DESTROY_CONTEXT(cuCtxDestroy)
DESTROY_CONTEXT(cuCtxDestroy_v2)

/* ---------------------------------------------------------------------------------------------------- what is told */

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* The part of a device in place of the device: never more than there is, and never less than nothing. */
static void tell(int device, uint64_t *total, uint64_t *free_bytes, uint64_t *used) {
    uint64_t asking, limit = device < 0 ? 0 : atomic_load(&segment->limit[device]);
    if (!limit) return;
    own_slot(); /* a new process first gives back what dead ones held */
    uint64_t held = sum(device, &asking);
    *total = least(*total, limit);
    *free_bytes = least(*free_bytes, held >= *total ? 0 : *total - held);
    *used = held;
}

/* Who asks the driver what is free has a context there: it counts from now on, so that what is told as free can be taken.
   False where not even the context fits. */
static bool counts_context(int device) {
    return device < 0 || !atomic_load(&segment->limit[device]) || reserve(device, 0) == OK;
}

HOOK CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    CUresult code = REAL(cuMemGetInfo_v2)(free_bytes, total);
    if (code != OK) return code;
    uint64_t all = total ? *total : UINT64_MAX, left = free_bytes ? *free_bytes : UINT64_MAX, used;
    int device = current();
    bool has_room = counts_context(device);
    tell(device, &all, &left, &used);
    if (total) *total = all;
    if (free_bytes) *free_bytes = has_room ? left : 0;
    return code;
}

HOOK CUresult cuMemGetInfo(unsigned *free_bytes, unsigned *total) {
    CUresult code = REAL(cuMemGetInfo)(free_bytes, total);
    if (code != OK) return code;
    uint64_t all = total ? *total : UINT64_MAX, left = free_bytes ? *free_bytes : UINT64_MAX, used;
    int device = current();
    bool has_room = counts_context(device);
    tell(device, &all, &left, &used);
    if (total) *total = all;
    if (free_bytes) *free_bytes = has_room ? left : 0;
    return code;
}

#define TOTAL(name, number_t) \
    HOOK CUresult name(number_t *total, CUdevice ordinal) { \
        CUresult code = REAL(name)(total, ordinal); \
        if (code != OK || !total) return code; \
        uint64_t all = *total, left = 0, used; \
        tell(index_of(ordinal), &all, &left, &used); \
        *total = all; \
        return code; \
    }
TOTAL(cuDeviceTotalMem, unsigned)
TOTAL(cuDeviceTotalMem_v2, size_t)

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };

static int index_in_nvml(nvmlDevice_t device) {
    static _Atomic(void *) kept;
    char text[96];
    unsigned char uuid[16];
    int at = 0;
    void *handle = segment ? libnvml(true) : NULL;
    if (handle && !atomic_load(&kept)) atomic_store(&kept, real_dlsym(handle, "nvmlDeviceGetUUID"));
    nvmlReturn_t (*ask_uuid)(nvmlDevice_t, char *, unsigned) = atomic_load(&kept);
    if (!handle || !ask_uuid || ask_uuid(device, text, sizeof text) != OK) return -1;
    for (const char *c = strchr(text, '-'); c && *c && at < 16;) {
        if (*c == '-') { c++; continue; }
        if (sscanf(c, "%2hhx", &uuid[at++]) != 1) return -1;
        c += 2;
    }
    return at == 16 ? index_of_uuid(uuid) : -1;
}

#define MEMORY_INFO(name, memory_t) \
    HOOK nvmlReturn_t name(nvmlDevice_t device, memory_t *memory) { \
        nvmlReturn_t code = UNGATED(name)(device, memory); \
        if (code != OK || !memory) return code; \
        uint64_t total = memory->total, left = memory->free, used = memory->used; \
        tell(index_in_nvml(device), &total, &left, &used); \
        memory->total = total; \
        memory->free = left; \
        memory->used = least(used, total); \
        return code; \
    }
MEMORY_INFO(nvmlDeviceGetMemoryInfo, struct memory)
MEMORY_INFO(nvmlDeviceGetMemoryInfo_v2, struct memory_v2)

/* ------------------------------------------------------------------------------------------------------- launches */

/* e to the power of -x, without libm, whose versions differ between images. */
static double decay(double x) {
    if (x > 40) return 0;
    double y = x / 64, sum = 1 - y * (1 - y / 2 * (1 - y / 3 * (1 - y / 4 * (1 - y / 5 * (1 - y / 6 * (1 - y / 7))))));
    for (int n = 0; n < 6; n++) sum *= sum;
    return sum;
}

/* What a kernel of so many threads costs, in millionths of a token: 0.1 for one thread, toward 10 for very many. */
static uint64_t cost_of(double threads) {
    static __thread __attribute__((tls_model("initial-exec"))) double last_threads;
    static __thread __attribute__((tls_model("initial-exec"))) uint64_t last_cost;
    if (threads < 1) threads = 1;
    if (threads != last_threads) {
        last_cost = LIMITER_TOKEN * (0.1 + 9.9 * (1 - decay(threads / 400000)));
        last_threads = threads;
    }
    return last_cost;
}

/* Wait until the tokens are there. A launch that waits has taken nothing. Without a heartbeat no launch waits: a worker
   that has ended must not stop its jobs. */
static void spend(int device, uint64_t cost) {
    uint64_t taken = atomic_load_explicit(&segment->bucket[device].taken, memory_order_relaxed);
    for (long wait = WAIT_NS_MIN;;) {
        uint64_t granted = atomic_load_explicit(&segment->granted[device], memory_order_relaxed);
        if ((int64_t)(granted - taken) >= (int64_t)cost) {
            if (atomic_compare_exchange_weak(&segment->bucket[device].taken, &taken, taken + cost)) return;
            continue;
        }
        if (is_stale()) {
            atomic_fetch_add(&segment->opened, 1);
            return;
        }
        if (!atomic_load(&segment->rate[device])) return;
        nanosleep(&(struct timespec){0, wait}, NULL);
        wait = wait * 2 < WAIT_NS_MAX ? wait * 2 : WAIT_NS_MAX;
        taken = atomic_load(&segment->bucket[device].taken);
    }
}

/* The device whose launches are throttled now; -1: none. */
static inline int throttled(void) {
    if (!segment) return -1;
    int device = devices == 1 ? 0 : current();
    if (device < 0 || !atomic_load_explicit(&segment->rate[device], memory_order_relaxed)) return -1;
    if (!atomic_load_explicit(&wiped->launches, memory_order_relaxed)) { /* what it uses counts by its slot */
        atomic_store(&wiped->launches, 1);
        own_slot();
    }
    return device;
}

static inline void pay(double threads) {
    int device = throttled();
    if (device >= 0) spend(device, cost_of(threads));
}

#define THREADS(of) ((double)(of)->grid[0] * (of)->grid[1] * (of)->grid[2] * (of)->block[0] * (of)->block[1] * (of)->block[2])
#define SHAPE unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz
#define SHAPED gx, gy, gz, bx, by, bz

#define LAUNCH_KERNEL(name) \
    HOOK CUresult name(CUfunction f, SHAPE, unsigned shared, CUstream stream, void **parameters, void **extra) { \
        pay((double)gx * gy * gz * bx * by * bz); \
        return REAL(name)(f, SHAPED, shared, stream, parameters, extra); \
    }
LAUNCH_KERNEL(cuLaunchKernel)
LAUNCH_KERNEL(cuLaunchKernel_ptsz)

#define LAUNCH_COOPERATIVE(name) \
    HOOK CUresult name(CUfunction f, SHAPE, unsigned shared, CUstream stream, void **parameters) { \
        pay((double)gx * gy * gz * bx * by * bz); \
        return REAL(name)(f, SHAPED, shared, stream, parameters); \
    }
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel)
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel_ptsz)

struct launch_config { unsigned grid[3], block[3]; }; /* and more fields, which only the driver uses */

#define LAUNCH_EX(name) \
    HOOK CUresult name(const struct launch_config *config, CUfunction f, void **parameters, void **extra) { \
        if (config) pay(THREADS(config)); \
        return REAL(name)(config, f, parameters, extra); \
    }
LAUNCH_EX(cuLaunchKernelEx)
LAUNCH_EX(cuLaunchKernelEx_ptsz)

struct launch_parameters {
    CUfunction function;
    unsigned grid[3], block[3], shared;
    CUstream stream;
    void **parameters;
};

HOOK CUresult cuLaunchCooperativeKernelMultiDevice(struct launch_parameters *list, unsigned count, unsigned flags) {
    for (unsigned n = 0; list && n < count; n++) pay(THREADS(&list[n]));
    return REAL(cuLaunchCooperativeKernelMultiDevice)(list, count, flags);
}

/* The oldest ones: the shape of a block is set beforehand, and counts as one thread. */
HOOK CUresult cuLaunch(CUfunction f) { pay(1); return REAL(cuLaunch)(f); }

HOOK CUresult cuLaunchGrid(CUfunction f, int width, int height) {
    pay((double)width * height);
    return REAL(cuLaunchGrid)(f, width, height);
}

HOOK CUresult cuLaunchGridAsync(CUfunction f, int width, int height, CUstream stream) {
    pay((double)width * height);
    return REAL(cuLaunchGridAsync)(f, width, height, stream);
}

/* A graph costs what its kernels cost, and the least for each other node; it is counted when it is instantiated. */

struct kernel_node { CUfunction function; unsigned grid[3], block[3], shared; void *more[8]; };

static uint64_t graph_cost(CUgraph graph) {
    size_t count = 0;
    CUresult (*nodes_of)(CUgraph, CUgraphNode *, size_t *) =
        DRIVER(cuGraphGetNodes, CUresult(*)(CUgraph, CUgraphNode *, size_t *));
    if (nodes_of(graph, NULL, &count) != OK || !count) return cost_of(1);
    CUgraphNode *nodes = calloc(count, sizeof *nodes);
    uint64_t cost = 0;
    if (!nodes || nodes_of(graph, nodes, &count) != OK) cost = count * cost_of(1);
    else for (size_t n = 0; n < count; n++) {
        struct kernel_node kernel;
        int type = -1;
        DRIVER(cuGraphNodeGetType, CUresult(*)(CUgraphNode, int *))(nodes[n], &type);
        bool is_known = type == NODE_KERNEL
            && DRIVER(cuGraphKernelNodeGetParams, CUresult(*)(CUgraphNode, struct kernel_node *))(nodes[n], &kernel) == OK;
        cost += cost_of(is_known ? THREADS(&kernel) : 1);
    }
    free(nodes);
    return cost;
}

static CUresult instantiated(CUresult code, CUgraphExec *exec, CUgraph graph) {
    struct held *entry = code == OK && segment && exec ? calloc(1, sizeof *entry) : NULL;
    if (!entry) return code;
    *entry = (struct held){.key = (uintptr_t)*exec, .kind = GRAPH, .device = -1, .bytes = graph_cost(graph)};
    keep(entry);
    return code;
}

#define INSTANTIATE(name, declared, passed) \
    HOOK CUresult name declared { return instantiated(REAL(name) passed, exec, graph); }
INSTANTIATE(cuGraphInstantiate, (CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *log, size_t size),
            (exec, graph, node, log, size))
INSTANTIATE(cuGraphInstantiate_v2, (CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *log, size_t size),
            (exec, graph, node, log, size))
INSTANTIATE(cuGraphInstantiateWithFlags, (CUgraphExec *exec, CUgraph graph, unsigned long long flags),
            (exec, graph, flags))
INSTANTIATE(cuGraphInstantiateWithParams, (CUgraphExec *exec, CUgraph graph, void *with), (exec, graph, with))
INSTANTIATE(cuGraphInstantiateWithParams_ptsz, (CUgraphExec *exec, CUgraph graph, void *with), (exec, graph, with))

HOOK CUresult cuGraphExecDestroy(CUgraphExec exec) {
    free(take_out(GRAPH, (uintptr_t)exec));
    return REAL(cuGraphExecDestroy)(exec);
}

static void pay_for_graph(CUgraphExec exec) {
    int device = throttled();
    if (device < 0) return;
    begin();
    uint32_t bucket = bucket_of(GRAPH, (uintptr_t)exec);
    lock(SHARD(bucket));
    struct held *known = *find(GRAPH, (uintptr_t)exec, bucket);
    uint64_t cost = known ? known->bytes : cost_of(1);
    unlock(SHARD(bucket));
    for (const uint64_t most = 10 * LIMITER_TOKEN; cost; cost -= least(cost, most)) spend(device, least(cost, most));
}

#define LAUNCH_GRAPH(name) \
    HOOK CUresult name(CUgraphExec exec, CUstream stream) { \
        pay_for_graph(exec); \
        return REAL(name)(exec, stream); \
    }
LAUNCH_GRAPH(cuGraphLaunch)
LAUNCH_GRAPH(cuGraphLaunch_ptsz)

/* -------------------------------------------------------------------------------------------------------- look-ups */

/* The hook of a function of the driver, by its address; else the address. So a look-up by any name, version or flag gets
   the hook of just the variant that the driver chose. */
static void *hook_at(void *real, const char *symbol) {
    bool is_ours = false;
    size_t length = symbol ? strlen(symbol) : 0;
    for (int at = 0; at < AT_NVML; at++) {
        if (known_real(at, false) == real) return hooks[at].ours;
        if (length && !strncmp(hooks[at].name, symbol, length) && !hooks[at].name[length]) is_ours = true;
    }
    if (is_ours && segment) atomic_fetch_add(&segment->missed, 1);
    return real;
}

HOOK CUresult cuGetProcAddress(const char *symbol, void **pointer, int version, unsigned long long flags) {
    CUresult code = UNGATED(cuGetProcAddress)(symbol, pointer, version, flags);
    if (code == OK && pointer && *pointer) *pointer = hook_at(*pointer, symbol);
    return code;
}

HOOK CUresult cuGetProcAddress_v2(
    const char *symbol, void **pointer, int version, unsigned long long flags, int *status) {
    CUresult code = UNGATED(cuGetProcAddress_v2)(symbol, pointer, version, flags, status);
    if (code == OK && pointer && *pointer) *pointer = hook_at(*pointer, symbol);
    return code;
}

/* Our hook in place of what a look-up found, or what it found. */
static __attribute__((noinline)) void *looked_up(void *handle, const char *name) {
    for (int at = 0; at < HOOKS; at++) {
        if (strcmp(hooks[at].name, name)) continue;
        void *real = known_real(at, false);
        if (handle == RTLD_NEXT) return real ? hooks[at].ours : real_dlsym(handle, name);
        void *found = real_dlsym(handle, name);
        if (found == hooks[at].ours) return real ? found : NULL; /* in this library, of a driver that is not there */
        return found && found == real ? hooks[at].ours : found;
    }
    return real_dlsym(handle, name);
}

/* For all other names the real one is called as the last step: by the address to which it returns it knows who asks,
   which counts for RTLD_NEXT. */
HOOK void *dlsym(void *restrict handle, const char *restrict name) {
    if (segment && ((name[0] == 'c' && name[1] == 'u') || !strncmp(name, "nvml", 4)))
        for (int at = 0; at < HOOKS; at++)
            if (!strcmp(hooks[at].name, name)) return looked_up(handle, name);
    return real_dlsym(handle, name);
}

#define ENTRY(name) {#name, (void *)name, NULL},
static struct hook hooks[] = {CUDA_HOOKS(ENTRY) GATED(ENTRY) GATED_WIDE(ENTRY) NVML_HOOKS(ENTRY)};
