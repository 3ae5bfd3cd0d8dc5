/* The limiter keeps the processes of a job to their part of a GPU: a library that LD_PRELOAD loads into them.

   It stands before functions of the CUDA driver and of NVML. Memory is reserved before the driver is asked for it, in the
   segment of limiter.h, which all processes of the attempt share, and is refused beyond the limit. What the driver takes
   by itself, the worker reads from NVML each second and writes there: it counts too. Kernels wait for
   tokens, which the worker gives. Totals and free memory are told as those of the part. While an attempt is frozen its
   calls wait here, and the worker sees that they do.

   It is cooperative and no security boundary: a process that clears LD_PRELOAD, is linked statically, or calls the
   driver by other ways is not held. The worker's guard counts what such a process holds.

   Rules that the code below keeps (docs/decisions/0157):
   - The driver is asked first; an out-parameter counts only where the driver returned 0.
   - A function is replaced only where the address that was looked up is the driver's own.
   - Nothing in the segment is a lock, and a slot never moves. What a killed process held is in its slot alone.
   - Bytes are counted for each pointer, with the device on which they were allocated; of a pool and of graphs counts
     what the driver keeps for them.

   Prototypes are those of NVIDIA's cuda.h and nvml.h, written down here since neither is there at the build. */

#define _GNU_SOURCE
#include "limiter.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
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
enum { LOCATION_DEVICE = 1, NODE_KERNEL = 0, NODE_GRAPH = 4, NODE_ALLOCATION = 10 };

/* Every hook, all variants that a driver exports. */
#define CUDA_HOOKS(X) \
    X(cuGetProcAddress) X(cuGetProcAddress_v2) \
    X(cuMemAlloc) X(cuMemAlloc_v2) X(cuMemAllocManaged) X(cuMemAllocPitch) X(cuMemAllocPitch_v2) \
    X(cuMemAllocAsync) X(cuMemAllocAsync_ptsz) X(cuMemAllocFromPoolAsync) X(cuMemAllocFromPoolAsync_ptsz) \
    X(cuMemPoolCreate) X(cuMemPoolDestroy) \
    X(cuModuleLoad) X(cuModuleLoadData) X(cuModuleLoadDataEx) X(cuModuleLoadFatBinary) X(cuLibraryLoadData) \
    X(cuLibraryLoadFromFile) \
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
    X(cuGraphInstantiateWithParams_ptsz) X(cuGraphExecDestroy) X(cuGraphExecUpdate) X(cuGraphExecUpdate_v2) \
    X(cuGraphLaunch) X(cuGraphLaunch_ptsz)
/* Those that do nothing but wait while the attempt is frozen: what a process calls after a pause. What only asks, as
   cuDeviceGetCount, is left out. None of them has a floating-point argument, and each at most six words of arguments, so
   all of them are handed on alike. */
#define VARIANTS(X, name) X(name) X(name##_ptsz)
#define COPIES(X, name) X(name) X(name##_v2) X(name##_ptds) X(name##_v2_ptds)
#define COPIES_ASYNC(X, name) X(name) X(name##_v2) X(name##_ptsz) X(name##_v2_ptsz)
#define FILLS(X, name) X(name) X(name##_v2) X(name##_ptds) X(name##_v2_ptds)
#define GATED(X) \
    X(cuCtxCreate) X(cuCtxCreate_v2) X(cuCtxCreate_v3) X(cuCtxCreate_v4) X(cuCtxSynchronize) \
    X(cuModuleUnload) \
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
    X(cuMemHostRegister_v2) X(cuMemHostUnregister) X(cuMemSetAccess) \
    X(cuMemPoolTrimTo) VARIANTS(X, cuGraphUpload)
#define NVML_HOOKS(X) X(nvmlDeviceGetMemoryInfo) X(nvmlDeviceGetMemoryInfo_v2)

#define ENUM(name) AT_##name,
enum { CUDA_HOOKS(ENUM) GATED(ENUM) AT_NVML, AT_before_nvml = AT_NVML - 1, NVML_HOOKS(ENUM) HOOKS };

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
    _Atomic uint32_t attaching, mapping, guessing, pooling;
    _Atomic uint32_t swept; /* dead processes' bytes were released once */
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
GATED(GATE)

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

enum { UNSEEN = -1 };

/* When a process of our namespace was started; 0 where nothing but its remains are there, UNSEEN where /proc does not show
   it: there is none, or it is another user's and /proc hides those. */
static uint64_t start_of(long pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return UNSEEN;
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

/* Whether a process of our namespace has ended. */
static bool has_ended(uint64_t owner) {
    long pid = owner >> LIMITER_START_BITS;
    uint64_t start = start_of(pid);
    if (start != (uint64_t)UNSEEN) return LIMITER_OWNER(pid, start) != owner;
    int before = errno;
    bool ended = kill(pid, 0) && errno == ESRCH;
    errno = before;
    return ended;
}

/* Release the bytes of processes that have ended, as far as this process can see them. */
static void sweep(void) {
    uint64_t here = pid_namespace(), high = atomic_load(&segment->high);
    for (uint64_t at = 0; at < high && at < LIMITER_SLOTS; at++) {
        struct limiter_slot *slot = &segment->slots[at];
        uint64_t owner = atomic_load(&slot->owner);
        if (!owner || at + 1 == atomic_load(&wiped->slot)) continue;
        bool gone = atomic_load(&segment->dead[at]) == owner;
        if (!gone && here > 1 && atomic_load(&slot->pid_ns) == here) gone = has_ended(owner);
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
            struct limiter_use *use = &slot->of[of];
            atomic_store(&use->asking, 0);
            atomic_store(&use->used, 0);
            atomic_store(&use->guess[0], 0);
            atomic_store(&use->guess[1], 0);
            atomic_store(&use->done, atomic_load(&use->begun)); /* a killed process is never done */
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

/* The newest reading of NVML in which the process of a slot was told; 0: none. */
static uint64_t told_of(uint64_t at, int device, uint64_t owner, uint64_t *beyond) {
    struct limiter_told *told = &segment->told[at];
    if (atomic_load(&told->owner) != owner) { *beyond = 0; return 0; }
    *beyond = atomic_load(&told->of[device].beyond);
    return atomic_load(&told->of[device].reading);
}

/* What all living processes hold, by their own count and beyond it, and what they are asking for. A process counts what it
   takes into `used` before it takes it out of `asking`; so `asking` is read first, and nothing is missed. */
static uint64_t sum(int device, uint64_t *asking) {
    uint64_t used = atomic_load(&segment->beyond[device]), high = atomic_load(&segment->high), beyond;
    *asking = 0;
    for (uint64_t at = 0; at < high && at < LIMITER_SLOTS; at++) {
        struct limiter_slot *slot = &segment->slots[at];
        uint64_t owner = atomic_load(&slot->owner);
        if (!owner || atomic_load(&segment->dead[at]) == owner) continue;
        struct limiter_use *use = &slot->of[device];
        *asking += atomic_load(&use->asking);
        used += atomic_load(&use->used);
        uint64_t reading = told_of(at, device, owner, &beyond);
        used += beyond;
        for (int n = 0; n < 2; n++)
            if (atomic_load(&use->made[n]) >= reading) used += atomic_load(&use->guess[n]);
    }
    return used;
}

/* Between its beginning and its end the driver may or may not have taken or freed these bytes: what NVML says meanwhile is
   uncertain by so much. */
static void begin_change(int device, uint64_t bytes) {
    struct limiter_slot *slot = own_slot();
    if (slot) atomic_fetch_add(&slot->of[device].begun, bytes);
}

static void end_change(int device, uint64_t bytes) {
    struct limiter_slot *slot = own_slot();
    if (slot) atomic_fetch_add(&slot->of[device].done, bytes);
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
        if (fits) {
            atomic_fetch_add(&slot->of[device].begun, bytes);
            atomic_fetch_add(&slot->of[device].used, bytes);
        }
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

/* Count bytes that were taken as a guess: until a reading of NVML that begins from now on is told. Which one is the newest
   is asked once the guess stands there, since a reading that has begun by then may not have seen it. */
static void make_guess(int device, uint64_t bytes) {
    struct limiter_slot *slot = own_slot();
    uint64_t beyond;
    if (!slot) return;
    struct limiter_use *use = &slot->of[device];
    int at = atomic_load(&segment->reading) & 1;
    lock(&wiped->guessing);
    uint64_t reading = told_of(slot - segment->slots, device, atomic_load(&slot->owner), &beyond);
    if (atomic_load(&use->made[at]) < reading) atomic_store(&use->guess[at], 0);
    atomic_store(&use->made[at], UINT64_MAX);
    atomic_fetch_add(&use->guess[at], bytes);
    atomic_store(&use->made[at], atomic_load(&segment->reading));
    unlock(&wiped->guessing);
    give_back(device, bytes);
    end_change(device, bytes);
}

static bool spare(int device);

#define READING_NS 1500000000ull /* the worker reads NVML each second */

/* Wait until what this process took by a guess has been read from NVML, where the worker lives. Return false at once where
   so many bytes would not fit without its guesses. */
static bool wait_for_reading(struct limiter_slot *slot, int device, uint64_t bytes) {
    struct limiter_use *use = &slot->of[device];
    uint64_t beyond, asking, owner = atomic_load(&slot->owner), until = now_ns() + READING_NS, newest = 0, guessed = 0;
    uint64_t reading = told_of(slot - segment->slots, device, owner, &beyond);
    for (int n = 0; n < 2; n++) {
        uint64_t made = atomic_load(&use->made[n]), guess = atomic_load(&use->guess[n]);
        if (made < reading || !guess) continue;
        guessed += guess;
        if (made > newest) newest = made;
    }
    uint64_t used = sum(device, &asking) - guessed, limit = atomic_load(&segment->limit[device]);
    if (!guessed || bytes > limit || used > limit - bytes || is_stale()) return false;
    while (told_of(slot - segment->slots, device, owner, &beyond) <= newest && now_ns() < until)
        nanosleep(&(struct timespec){0, WAIT_NS_MAX}, NULL);
    return true;
}

/* Take bytes of the limit before the driver is asked for them; with the first ones those of the context. `end_change`
   says that the driver is done with them. */
static CUresult reserve(int device, uint64_t bytes) {
    struct limiter_slot *slot = own_slot();
    if (!slot) return OUT_OF_MEMORY;
    if (!atomic_load_explicit(&wiped->touched[device], memory_order_relaxed)
        && !atomic_exchange(&wiped->touched[device], 1)) {
        uint64_t context = atomic_load(&segment->context[device]);
        if (!take(slot, device, context)) {
            atomic_store(&wiped->touched[device], 0);
            atomic_fetch_add(&segment->refused, 1);
            return OUT_OF_MEMORY;
        }
        make_guess(device, context);
    }
    if (take(slot, device, bytes) || (spare(device) && take(slot, device, bytes))
        || (wait_for_reading(slot, device, bytes) && take(slot, device, bytes)))
        return OK;
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
    uint64_t memory;               /* of a graph: what its nodes allocate */
    CUdevice home;                 /* and where */
};

#define BUCKETS (1 << 16)
static struct held *table[BUCKETS];
static struct mapping { uint64_t at, size, handle; } *mappings;
static size_t mappings_count, mappings_room;
static int pools_count;

static uint32_t bucket_of(enum kind kind, uint64_t key) {
    return ((key ^ key >> 9) * 0x9e3779b97f4a7c15ull + kind * 0x5bd1e995u) >> 48;
}

#define SHARD(bucket) (&wiped->shards[(bucket) % SHARDS])

/* In a forked child: drop the copied entries, which belong to its parent. */
static void forget_all(void) {
    memset(table, 0, sizeof table);
    mappings_count = 0;
    pools_count = 0;
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
    int device = entry->device;
    uint64_t bytes = entry->bytes;
    if (code != OK) drop(entry);
    else {
        entry->key = key;
        keep(entry);
    }
    end_change(device, bytes);
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

static void settle_all(void);

/* The entry is removed first: as soon as the driver has freed it, another thread may get the same key. */
#define FREE(kind, key, call) do { \
    struct held *entry = take_out(kind, (uint64_t)(key)); \
    int device = entry ? entry->device : 0; \
    uint64_t bytes = entry ? entry->bytes : 0; \
    if (entry) begin_change(device, bytes); \
    CUresult code = (call); \
    if (entry && code == OK) drop(entry); \
    else if (entry) keep(entry); \
    if (entry) end_change(device, bytes); \
    else settle_all(); /* it may be of a pool */ \
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

/* Pools, and the memory of a device's graphs. The driver keeps of them what was freed, as it likes, and gives it out again:
   so what counts is what it has for them, and an allocation takes of the limit what they lack. One at a time: the next
   one must see what the one before it has left. */

enum { POOL_RESERVED = 5, POOL_USED = 7, GRAPHS_USED = 0, GRAPHS_RESERVED = 2 };
#define POOLS 64
#define POOL_GROWS 0x2000000ull /* the driver lets a pool grow by pieces of so many bytes */

struct pool {
    CUmemoryPool pool; /* NULL: of the graphs of its device */
    CUdevice home;
    int device;        /* -1: it is not of the lease, and does not count */
    uint64_t counted;
    uint64_t quiet;    /* the newest reading of NVML when it was counted; 0: that reading was not over */
};
static struct pool pools[POOLS];

static uint64_t ask_pool(struct pool *of, int attribute) {
    uint64_t value = 0;
    CUresult code = of->pool
        ? DRIVER(cuMemPoolGetAttribute, CUresult(*)(CUmemoryPool, int, void *))(of->pool, attribute, &value)
        : DRIVER(cuDeviceGetGraphMemAttribute, CUresult(*)(CUdevice, int, void *))(of->home, attribute, &value);
    return code == OK ? value : 0;
}

static uint64_t reserved_of(struct pool *of) { return ask_pool(of, of->pool ? POOL_RESERVED : GRAPHS_RESERVED); }

/* The entry of a pool, or of a device's graphs; NULL where there are too many: those count when NVML has told. */
static struct pool *pool_of(CUmemoryPool pool, CUdevice home) {
    for (int n = 0; n < pools_count; n++)
        if (pools[n].pool == pool && (pool || pools[n].home == home)) return &pools[n];
    if (pools_count == POOLS) return NULL;
    pools[pools_count] = (struct pool){pool, home, index_of(home), 0, 0};
    return &pools[pools_count++];
}

/* Count what the driver has for it now. What it gave up by itself, nobody knows when, is still taken for a guess where a
   reading of NVML has begun since it was counted last: that one may have seen it gone, and the count still there. */
static void settle(struct pool *of, bool trimmed) {
    struct limiter_slot *slot = of->device < 0 ? NULL : own_slot();
    if (!slot) return;
    uint64_t beyond, reading = atomic_load(&segment->reading), now = reserved_of(of);
    uint64_t told = told_of(slot - segment->slots, of->device, atomic_load(&slot->owner), &beyond);
    if (now > of->counted) atomic_fetch_add(&slot->of[of->device].used, now - of->counted);
    else if (now < of->counted) {
        begin_change(of->device, of->counted - now);
        if (trimmed || of->quiet == atomic_load(&segment->reading) + 1) {
            give_back(of->device, of->counted - now);
            end_change(of->device, of->counted - now);
        } else make_guess(of->device, of->counted - now);
    }
    of->counted = now;
    of->quiet = told == reading ? reading + 1 : 0;
}

/* A call of the driver's that another one makes has all taken already. */
static __thread __attribute__((tls_model("initial-exec"))) bool in_pool;

static void settle_all(void) {
    if (!pools_count || in_pool) return;
    begin();
    lock(&wiped->pooling);
    for (int n = 0; n < pools_count; n++) settle(&pools[n], false);
    unlock(&wiped->pooling);
}

/* Have the driver give up what it keeps for this process's pools and graphs on a device, as it does itself where it runs
   out of memory. Return whether it had kept anything. */
static bool spare_locked(int device) {
    bool any = false;
    for (int n = 0; n < pools_count; n++) {
        struct pool *of = &pools[n];
        if (of->device != device || !of->counted) continue;
        uint64_t before = of->counted;
        settle(of, false);
        begin_change(device, before);
        if (of->pool) DRIVER(cuMemPoolTrimTo, CUresult(*)(CUmemoryPool, size_t))(of->pool, 0);
        else DRIVER(cuDeviceGraphMemTrim, CUresult(*)(CUdevice))(of->home);
        settle(of, true);
        end_change(device, before);
        any |= of->counted < before;
    }
    return any;
}

static bool spare(int device) {
    if (!pools_count || in_pool) return false;
    begin();
    lock(&wiped->pooling);
    bool any = spare_locked(device);
    unlock(&wiped->pooling);
    return any;
}

/* What `bytes` more need beyond what the driver has for the pool already. */
static uint64_t lacks(struct pool *of, uint64_t bytes) {
    uint64_t has = reserved_of(of), needs;
    if (__builtin_add_overflow(ask_pool(of, of->pool ? POOL_USED : GRAPHS_USED), bytes, &needs)) return UINT64_MAX;
    if (needs <= has) return 0;
    needs -= has;
    return needs > UINT64_MAX - POOL_GROWS ? UINT64_MAX : (needs + POOL_GROWS - 1) / POOL_GROWS * POOL_GROWS;
}

/* Lock the pools and take what an allocation needs, before the call of the driver that is made meanwhile. */
static CUresult enter_pool(struct pool **of, CUmemoryPool pool, CUdevice home, uint64_t bytes, uint64_t *taken) {
    *of = NULL;
    *taken = 0;
    if (!segment || home < 0 || in_pool) return OK;
    begin();
    lock(&wiped->pooling);
    in_pool = true;
    *of = pool_of(pool, home);
    CUresult code = OK;
    if (*of && (*of)->device >= 0) {
        *taken = lacks(*of, bytes);
        code = *taken ? reserve((*of)->device, *taken) : OK;
        if (code != OK && spare_locked((*of)->device)) {
            *taken = lacks(*of, bytes);
            code = *taken ? reserve((*of)->device, *taken) : OK;
        }
        if (code == OK) return OK;
    } else if (*of) *of = NULL;
    if (code != OK) *of = NULL;
    in_pool = false;
    unlock(&wiped->pooling);
    return code;
}

static void leave_pool(struct pool *of, uint64_t taken) {
    if (!of) return;
    settle(of, false);
    if (taken) {
        give_back(of->device, taken);
        end_change(of->device, taken);
    }
    in_pool = false;
    unlock(&wiped->pooling);
}

/* CUDA's number of a stream's device; -1 where it cannot be told. */
static CUdevice home_of(CUstream stream) {
    CUcontext context = NULL;
    CUdevice home = -1;
    if (!segment) return -1;
    bool other = (uintptr_t)stream > 2 /* 0..2 are the default streams */
        && DRIVER(cuStreamGetCtx, CUresult(*)(CUstream, CUcontext *))(stream, &context) == OK
        && DRIVER(cuCtxPushCurrent_v2, CUresult(*)(CUcontext))(context) == OK;
    if (DRIVER(cuCtxGetDevice, CUresult(*)(CUdevice *))(&home) != OK) home = -1;
    if (other) DRIVER(cuCtxPopCurrent_v2, CUresult(*)(CUcontext *))(&context);
    return home;
}

/* The device of a pool that was not made here is the one whose own pool it is, or else that of the stream. */
static CUdevice home_of_pool(CUmemoryPool pool, CUstream stream) {
    int count = 0;
    if (!segment) return -1;
    for (int n = 0; n < pools_count; n++)
        if (pools[n].pool == pool) return pools[n].home;
    DRIVER(cuDeviceGetCount, CUresult(*)(int *))(&count);
    for (CUdevice home = 0; home < count && home < ORDINALS; home++) {
        CUmemoryPool own = NULL;
        if (DRIVER(cuDeviceGetDefaultMemPool, CUresult(*)(CUmemoryPool *, CUdevice))(&own, home) == OK && own == pool)
            return home;
    }
    return home_of(stream);
}

#define ALLOCATE_ASYNC(name) \
    HOOK CUresult name(CUdeviceptr *pointer, size_t bytes, CUstream stream) { \
        struct pool *of; \
        uint64_t taken; \
        CUdevice home = home_of(stream); \
        CUmemoryPool pool = NULL; \
        if (home >= 0 && DRIVER(cuDeviceGetMemPool, CUresult(*)(CUmemoryPool *, CUdevice))(&pool, home) != OK) home = -1; \
        CUresult code = enter_pool(&of, pool, home, bytes, &taken); \
        if (code != OK) return code; \
        code = REAL(name)(pointer, bytes, stream); \
        leave_pool(of, taken); \
        return code; \
    }
ALLOCATE_ASYNC(cuMemAllocAsync)
ALLOCATE_ASYNC(cuMemAllocAsync_ptsz)

#define ALLOCATE_FROM_POOL(name) \
    HOOK CUresult name(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) { \
        struct pool *of; \
        uint64_t taken; \
        CUresult code = enter_pool(&of, pool, pool ? home_of_pool(pool, stream) : -1, bytes, &taken); \
        if (code != OK) return code; \
        code = REAL(name)(pointer, bytes, pool, stream); \
        leave_pool(of, taken); \
        return code; \
    }
ALLOCATE_FROM_POOL(cuMemAllocFromPoolAsync)
ALLOCATE_FROM_POOL(cuMemAllocFromPoolAsync_ptsz)

struct pool_properties { int allocation, handles; struct { int type, id; } location; };

HOOK CUresult cuMemPoolCreate(CUmemoryPool *pool, const struct pool_properties *of) {
    CUresult code = REAL(cuMemPoolCreate)(pool, of);
    if (code != OK || !segment || !of) return code;
    begin();
    lock(&wiped->pooling);
    pool_of(*pool, of->location.type == LOCATION_DEVICE ? of->location.id : -1);
    unlock(&wiped->pooling);
    return code;
}

HOOK CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    CUresult code = REAL(cuMemPoolDestroy)(pool);
    if (code != OK || !segment) return code;
    begin();
    lock(&wiped->pooling);
    for (int n = 0; n < pools_count; n++) {
        if (!pool || pools[n].pool != pool) continue;
        if (pools[n].device >= 0) give_back(pools[n].device, pools[n].counted); /* what is still in use NVML tells */
        pools[n] = pools[--pools_count];
        break;
    }
    unlock(&wiped->pooling);
    return code;
}

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
            if (entry->bytes < counted) { \
                give_back(entry->device, counted - entry->bytes); \
                end_change(entry->device, counted - entry->bytes); \
            } else if (entry->bytes > counted && reserve(entry->device, entry->bytes - counted) != OK) { \
                entry->bytes = counted; \
                free_##name(*pointer); \
                return answered(entry, OUT_OF_MEMORY, 0); \
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
    int device = gone ? gone->device : 0;
    uint64_t bytes = gone ? gone->bytes : 0;
    if (gone) begin_change(device, bytes);
    CUresult code = REAL(cuMemRelease)(handle);
    if (gone && code == OK) drop(gone);
    else if (gone) gone->references = 1, keep(gone);
    else if (is_known && code != OK) change(handle, 1, 0, NULL);
    if (bytes) end_change(device, bytes);
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

/* Begin or end a change of which nobody knows beforehand how much it frees: of anything that this process has. */
static void change_all(uint64_t *bytes, bool begins) {
    struct limiter_slot *slot = segment && atomic_load(&wiped->slot) ? own_slot() : NULL;
    for (int device = 0; slot && device < devices; device++) {
        if (begins) bytes[device] = atomic_load(&slot->of[device].used);
        atomic_fetch_add(begins ? &slot->of[device].begun : &slot->of[device].done, bytes[device]);
    }
}

HOOK CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
    uint64_t bytes[LIMITER_DEVICES] = {0};
    change_all(bytes, true);
    CUresult code = REAL(cuMemUnmap)(at, size);
    if (code == OK && segment) {
        begin();
        lock(&wiped->mapping);
        for (size_t n = 0; n < mappings_count;) {
            if (mappings[n].at < at || mappings[n].at - at >= size) { n++; continue; }
            handle_t handle = mappings[n].handle;
            mappings[n] = mappings[--mappings_count];
            change(handle, 0, -1, NULL);
        }
        unlock(&wiped->mapping);
    }
    change_all(bytes, false);
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
    HOOK CUresult name(CUdevice ordinal) { \
        uint64_t bytes[LIMITER_DEVICES] = {0}; \
        change_all(bytes, true); \
        CUresult code = primary_left(REAL(name)(ordinal), ordinal); \
        change_all(bytes, false); \
        return code; \
    }
LEAVE_PRIMARY(cuDevicePrimaryCtxRelease)
LEAVE_PRIMARY(cuDevicePrimaryCtxRelease_v2)
LEAVE_PRIMARY(cuDevicePrimaryCtxReset)
LEAVE_PRIMARY(cuDevicePrimaryCtxReset_v2)

#define DESTROY_CONTEXT(name) \
    HOOK CUresult name(CUcontext context) { \
        uint64_t bytes[LIMITER_DEVICES] = {0}; \
        change_all(bytes, true); \
        CUresult code = REAL(name)(context); \
        if (code == OK) drop_context(context); \
        change_all(bytes, false); \
        return code; \
    }
DESTROY_CONTEXT(cuCtxDestroy)
DESTROY_CONTEXT(cuCtxDestroy_v2)

/* Modules. What one takes of the device nobody tells: its image's size is a guess, which counts until NVML has told, and
   no more than a bound, since images have code for devices that are not here. */

#define MODULE_GRAIN 0x200000ull
#define MODULE_MOST 0x2000000ull

static uint64_t file_bytes(const char *name) {
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    off_t size = lseek(file, 0, SEEK_END);
    close(file);
    return size > 0 ? size : 0;
}

/* The size of an image: a fat binary or what points to one, an ELF file, or text. */
static uint64_t image_bytes(const void *image) {
    const struct { uint32_t magic, version; const void *data; } *wrapper = image;
    const struct { uint32_t magic; uint16_t version, header; uint64_t size; } *fat = image;
    const struct { unsigned char ident[16]; uint64_t kind, entry, programs, sections; uint32_t flags; uint16_t sizes[6]; }
        *elf = image;
    if (!image) return 0;
    if (wrapper->magic == 0x466243b1) return image_bytes(wrapper->data);
    if (fat->magic == 0xba55ed50) return fat->header + fat->size;
    if (!memcmp(image, "\177ELF", 4)) return elf->sections + (uint64_t)elf->sizes[3] * elf->sizes[4];
    return strnlen(image, MODULE_MOST);
}

static CUresult begin_module(int device, uint64_t *bytes) {
    *bytes = (*bytes + MODULE_GRAIN - 1) / MODULE_GRAIN * MODULE_GRAIN;
    if (*bytes > MODULE_MOST) *bytes = MODULE_MOST;
    return device < 0 ? OK : reserve(device, *bytes);
}

static CUresult end_module(int device, uint64_t bytes, CUresult code) {
    if (device < 0) return code;
    if (code == OK) make_guess(device, bytes);
    else {
        give_back(device, bytes);
        end_change(device, bytes);
    }
    return code;
}

#define LOAD(name, size, declared, passed) \
    HOOK CUresult name declared { \
        int device = current(); \
        uint64_t bytes = size; \
        CUresult code = begin_module(device, &bytes); \
        return code == OK ? end_module(device, bytes, REAL(name) passed) : code; \
    }
#define LIBRARY_OPTIONS \
    void *options, void *values, unsigned count, void *library_options, void *library_values, unsigned library_count
LOAD(cuModuleLoad, file_bytes(name), (void **module, const char *name), (module, name))
LOAD(cuModuleLoadData, image_bytes(image), (void **module, const void *image), (module, image))
LOAD(cuModuleLoadFatBinary, image_bytes(image), (void **module, const void *image), (module, image))
LOAD(cuModuleLoadDataEx, image_bytes(image),
     (void **module, const void *image, unsigned count, void *options, void *values),
     (module, image, count, options, values))
LOAD(cuLibraryLoadData, image_bytes(image), (void **library, const void *image, LIBRARY_OPTIONS),
     (library, image, options, values, count, library_options, library_values, library_count))
LOAD(cuLibraryLoadFromFile, file_bytes(name), (void **library, const char *name, LIBRARY_OPTIONS),
     (library, name, options, values, count, library_options, library_values, library_count))

/* ---------------------------------------------------------------------------------------------------- what is told */

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* The part of a device in place of the device: never more than there is, and never less than nothing. Who asks the driver
   has a context: it is taken off what is free even before it counts, so that what is told can be taken. */
static void tell(int device, bool has_context, uint64_t *total, uint64_t *free_bytes, uint64_t *used) {
    uint64_t asking, limit = device < 0 ? 0 : atomic_load(&segment->limit[device]);
    if (!limit) return;
    if (!atomic_exchange(&wiped->swept, 1)) sweep(); /* a new process first gives back what dead ones held */
    settle_all();
    uint64_t held = sum(device, &asking);
    *used = held;
    if (has_context && !atomic_load(&wiped->touched[device])) held += atomic_load(&segment->context[device]);
    *total = least(*total, limit);
    *free_bytes = least(*free_bytes, held >= *total ? 0 : *total - held);
}

HOOK CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    CUresult code = REAL(cuMemGetInfo_v2)(free_bytes, total);
    if (code != OK) return code;
    uint64_t all = total ? *total : UINT64_MAX, left = free_bytes ? *free_bytes : UINT64_MAX, used;
    tell(current(), true, &all, &left, &used);
    if (total) *total = all;
    if (free_bytes) *free_bytes = left;
    return code;
}

HOOK CUresult cuMemGetInfo(unsigned *free_bytes, unsigned *total) {
    CUresult code = REAL(cuMemGetInfo)(free_bytes, total);
    if (code != OK) return code;
    uint64_t all = total ? *total : UINT64_MAX, left = free_bytes ? *free_bytes : UINT64_MAX, used;
    tell(current(), true, &all, &left, &used);
    if (total) *total = all;
    if (free_bytes) *free_bytes = left;
    return code;
}

#define TOTAL(name, number_t) \
    HOOK CUresult name(number_t *total, CUdevice ordinal) { \
        CUresult code = REAL(name)(total, ordinal); \
        if (code != OK || !total) return code; \
        uint64_t all = *total, left = 0, used; \
        tell(index_of(ordinal), false, &all, &left, &used); \
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
        tell(index_in_nvml(device), false, &total, &left, &used); \
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
struct allocation_node {
    struct pool_properties of;
    void *more[9];
    const void *access;
    size_t accesses, bytes;
    CUdeviceptr pointer;
};
_Static_assert(sizeof(struct allocation_node) == 120, "as in cuda.h");

/* Add a graph's cost and the memory that its nodes allocate, and those of the graphs in it. What conditional nodes may run
   is not told: each costs as one kernel. */
static void count_graph(CUgraph graph, struct held *into) {
    size_t count = 0;
    CUresult (*nodes_of)(CUgraph, CUgraphNode *, size_t *) =
        DRIVER(cuGraphGetNodes, CUresult(*)(CUgraph, CUgraphNode *, size_t *));
    CUgraphNode *nodes = nodes_of(graph, NULL, &count) == OK && count ? calloc(count, sizeof *nodes) : NULL;
    if (!nodes || nodes_of(graph, nodes, &count) != OK) into->bytes += (count ? count : 1) * cost_of(1);
    else for (size_t n = 0; n < count; n++) {
        struct kernel_node kernel;
        struct allocation_node allocation;
        CUgraph child;
        int type = -1;
        double threads = 1;
        DRIVER(cuGraphNodeGetType, CUresult(*)(CUgraphNode, int *))(nodes[n], &type);
        if (type == NODE_KERNEL
            && DRIVER(cuGraphKernelNodeGetParams, CUresult(*)(CUgraphNode, void *))(nodes[n], &kernel) == OK)
            threads = THREADS(&kernel);
        else if (type == NODE_ALLOCATION
            && DRIVER(cuGraphMemAllocNodeGetParams, CUresult(*)(CUgraphNode, void *))(nodes[n], &allocation) == OK) {
            into->memory += allocation.bytes;
            into->home = allocation.of.location.id;
        } else if (type == NODE_GRAPH
            && DRIVER(cuGraphChildGraphNodeGetGraph, CUresult(*)(CUgraphNode, CUgraph *))(nodes[n], &child) == OK)
            count_graph(child, into);
        into->bytes += cost_of(threads);
    }
    free(nodes);
}

static CUresult instantiated(CUresult code, CUgraphExec *exec, CUgraph graph) {
    struct held *entry = code == OK && segment && exec ? calloc(1, sizeof *entry) : NULL;
    if (!entry) return code;
    *entry = (struct held){.key = (uintptr_t)*exec, .kind = GRAPH, .device = -1, .home = -1};
    count_graph(graph, entry);
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

HOOK CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *node, int *result) {
    return instantiated(REAL(cuGraphExecUpdate)(exec, graph, node, result), &exec, graph);
}

HOOK CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, void *result) {
    return instantiated(REAL(cuGraphExecUpdate_v2)(exec, graph, result), &exec, graph);
}

HOOK CUresult cuGraphExecDestroy(CUgraphExec exec) {
    free(take_out(GRAPH, (uintptr_t)exec));
    return REAL(cuGraphExecDestroy)(exec);
}

/* Pay for a launch; returns what it allocates, and where. */
static uint64_t pay_for_graph(CUgraphExec exec, CUdevice *home) {
    *home = -1;
    if (!segment) return 0;
    begin();
    uint32_t bucket = bucket_of(GRAPH, (uintptr_t)exec);
    lock(SHARD(bucket));
    struct held *known = *find(GRAPH, (uintptr_t)exec, bucket);
    uint64_t cost = known ? known->bytes : cost_of(1), memory = known ? known->memory : 0;
    if (known) *home = known->home;
    unlock(SHARD(bucket));
    int device = throttled();
    const uint64_t most = 10 * LIMITER_TOKEN;
    for (; device >= 0 && cost; cost -= least(cost, most)) spend(device, least(cost, most));
    return memory;
}

#define LAUNCH_GRAPH(name) \
    HOOK CUresult name(CUgraphExec exec, CUstream stream) { \
        struct pool *of; \
        uint64_t taken; \
        CUdevice home; \
        uint64_t memory = pay_for_graph(exec, &home); \
        CUresult code = enter_pool(&of, NULL, memory ? home : -1, memory, &taken); \
        if (code != OK) return code; \
        code = REAL(name)(exec, stream); \
        leave_pool(of, taken); \
        return code; \
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
static struct hook hooks[] = {CUDA_HOOKS(ENTRY) GATED(ENTRY) NVML_HOOKS(ENTRY)};
