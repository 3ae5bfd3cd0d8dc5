/* A program that uses CUDA: `app ROUTE WORD...` says what each word brings, a line each.

   ROUTE is how it finds the driver's functions: link (by the loader), dlsym, or proc (cuGetProcAddress); proc-ptsz asks
   for those of per-thread streams, proc-old for those of CUDA 3.1 and 11.3. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long u64;
struct property { int type, requested, location, id; };
struct array { size_t width, height; unsigned format, channels; };

#define CALLS(X) \
    X(cuInit, "cuInit", (unsigned)) X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (void **, int)) \
    X(cuCtxSetCurrent, "cuCtxSetCurrent", (void *)) \
    X(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", (int)) \
    X(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", (int)) \
    X(cuCtxDestroy_v2, "cuCtxDestroy", (void *)) \
    X(cuMemAlloc_v2, "cuMemAlloc", (u64 *, size_t)) X(cuMemFree_v2, "cuMemFree", (u64)) \
    X(cuMemAllocManaged, "cuMemAllocManaged", (u64 *, size_t, unsigned)) \
    X(cuMemAllocPitch_v2, "cuMemAllocPitch", (u64 *, size_t *, size_t, size_t, unsigned)) \
    X(cuMemAllocAsync, "cuMemAllocAsync", (u64 *, size_t, void *)) \
    X(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", (u64 *, size_t, void *, void *)) \
    X(cuMemFreeAsync, "cuMemFreeAsync", (u64, void *)) \
    X(cuArrayCreate_v2, "cuArrayCreate", (void **, const struct array *)) X(cuArrayDestroy, "cuArrayDestroy", (void *)) \
    X(cuMemCreate, "cuMemCreate", (u64 *, size_t, const struct property *, u64)) X(cuMemRelease, "cuMemRelease", (u64)) \
    X(cuMemMap, "cuMemMap", (u64, size_t, size_t, u64, u64)) X(cuMemUnmap, "cuMemUnmap", (u64, size_t)) \
    X(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", (u64 *, void *)) \
    X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", (u64 *, void *, int)) \
    X(cuMemGetInfo_v2, "cuMemGetInfo", (size_t *, size_t *)) X(cuDeviceTotalMem_v2, "cuDeviceTotalMem", (size_t *, int)) \
    X(cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags", (void **, void *, u64)) \
    X(cuGraphLaunch, "cuGraphLaunch", (void *, void *)) \
    X(cuGraphExecUpdate_v2, "cuGraphExecUpdate_v2", (void *, void *, void *)) \
    X(cuModuleLoadData, "cuModuleLoadData", (void **, const void *)) X(cuModuleUnload, "cuModuleUnload", (void *)) \
    X(cuDeviceGetDefaultMemPool, "cuDeviceGetDefaultMemPool", (void **, int)) \
    X(cuMemPoolCreate, "cuMemPoolCreate", (void **, const void *)) \
    X(cuMemPoolSetAttribute, "cuMemPoolSetAttribute", (void *, int, void *)) \
    X(cuLaunchKernel, "cuLaunchKernel", (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
                                         void *, void **, void **)) \
    X(cuLaunchCooperativeKernel, "cuLaunchCooperativeKernel", (void *, unsigned, unsigned, unsigned, unsigned, unsigned, \
                                                               unsigned, unsigned, void *, void **)) \
    X(cuLaunchKernelEx, "cuLaunchKernelEx", (const void *, void *, void **, void **)) \
    X(cuMemcpyHtoD_v2, "cuMemcpyHtoD", (u64, const void *, size_t)) \
    X(cuMemcpyHtoDAsync_v2, "cuMemcpyHtoDAsync", (u64, const void *, size_t, void *)) \
    X(cuMemsetD2D8Async, "cuMemsetD2D8Async", (u64, size_t, unsigned char, size_t, size_t, void *)) \
    X(cuLibraryLoadData, "cuLibraryLoadData", (void **, const void *, void *, void **, unsigned, void *, void **, unsigned)) \
    X(cuStreamSynchronize, "cuStreamSynchronize", (void *)) X(cuCtxSynchronize, "cuCtxSynchronize", (void)) \
    X(cuEventSynchronize, "cuEventSynchronize", (void *))
#define DECLARE(name, asked, arguments) int name arguments; static int (*p_##name) arguments;
CALLS(DECLARE)
int cuMemAlloc(unsigned *, unsigned);

static void resolve(const char *route) {
    if (!strcmp(route, "link")) {
#define LINK(name, asked, arguments) p_##name = name;
        CALLS(LINK)
        return;
    }
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
#define BY_DLSYM(name, asked, arguments) p_##name = dlsym(cuda, #name);
    CALLS(BY_DLSYM)
    if (strncmp(route, "proc", 4)) return;
    int is_old = !strcmp(route, "proc-old");
    int (*v1)(const char *, void **, int, u64) = dlsym(cuda, "cuGetProcAddress");
    int (*v2)(const char *, void **, int, u64, int *) = dlsym(cuda, "cuGetProcAddress_v2");
    void *again = NULL;
    if (is_old) v1("cuGetProcAddress", &again, 11030, 0), v1 = again;
    else v2("cuGetProcAddress", &again, 12000, 0, NULL), v2 = again;
    u64 flags = strcmp(route, "proc-ptsz") ? 0 : 2;
#define BY_PROC(name, asked, arguments) do { \
        void *at = NULL; int status; \
        if (is_old ? v1(asked, &at, 11030, flags) : v2(asked, &at, 12000, flags, &status)) abort(); \
        p_##name = at; \
    } while (0);
    CALLS(BY_PROC)
}

static u64 kept[65536];
static int count;

static int number_after(const char *word, const char *name, u64 *n, u64 *m) {
    size_t length = strlen(name);
    if (strncmp(word, name, length)) return 0;
    char *rest;
    *n = *m = 0;
    if (word[length] == 0) return 1;
    if (word[length] != '=') return 0;
    *n = strtoull(word + length + 1, &rest, 0);
    if (*rest == ',') *m = strtoull(rest + 1, NULL, 0);
    return 1;
}

static u64 racing_bytes;
static _Atomic int racing_denied;
static void *race(void *rounds) {
    p_cuCtxSetCurrent((void *)1);
    for (long n = 0; n < (long)rounds; n++) {
        u64 pointer;
        if (p_cuMemAlloc_v2(&pointer, racing_bytes) == 0) sched_yield(), p_cuMemFree_v2(pointer);
        else racing_denied++;
    }
    return NULL;
}

/* Random allocations against a sum of our own; returns how many answers were wrong. */
static int against_model(u64 rounds, u64 limit) {
    static u64 sizes[256], pointers[256];
    u64 sum = 0;
    int wrong = 0;
    for (u64 n = 0; n < rounds; n++) {
        int at = rand() % 256;
        if (sizes[at]) {
            if (p_cuMemFree_v2(pointers[at])) wrong++;
            sum -= sizes[at];
            sizes[at] = 0;
        } else {
            u64 bytes = 1 + rand() % (limit / 40);
            int fits = sum + bytes <= limit, code = p_cuMemAlloc_v2(&pointers[at], bytes);
            if (code != (fits ? 0 : 2)) wrong++;
            if (!code) sizes[at] = bytes, sum += bytes;
        }
        size_t total, left;
        p_cuMemGetInfo_v2(&left, &total);
        if (total != limit || left != limit - sum) wrong++;
    }
    for (int at = 0; at < 256; at++) if (sizes[at]) p_cuMemFree_v2(pointers[at]);
    return wrong;
}

static double used_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

static void one(const char *word) {
    u64 n, m;
    size_t a, b;
    void *p;
#define KEEP(code) do { int got = (code); if (!got) count++; printf("%d\n", got); } while (0)
    if (number_after(word, "alloc", &n, &m)) KEEP(p_cuMemAlloc_v2(&kept[count], n));
    else if (number_after(word, "managed", &n, &m)) KEEP(p_cuMemAllocManaged(&kept[count], n, 1));
    else if (number_after(word, "pitch", &n, &m)) KEEP(p_cuMemAllocPitch_v2(&kept[count], &a, n, m, 4));
    else if (number_after(word, "async", &n, &m)) KEEP(p_cuMemAllocAsync(&kept[count], n, NULL));
    else if (number_after(word, "pool", &n, &m)) {
        if (!m) p_cuDeviceGetDefaultMemPool(&p, 0);
        else p_cuMemPoolCreate(&p, (int[16]){1, 0, 1, m});
        KEEP(p_cuMemAllocFromPoolAsync(&kept[count], n, p, NULL));
    } else if (number_after(word, "stream", &n, &m)) KEEP(p_cuMemAllocAsync(&kept[count], n, (void *)(256 + m)));
    else if (number_after(word, "keeps", &n, &m)) {
        p_cuDeviceGetDefaultMemPool(&p, n);
        printf("%d\n", p_cuMemPoolSetAttribute(p, 4, &(u64){~0ull}));
    } else if (number_after(word, "module", &n, &m)) {
        char *text = calloc(1, n + 1);
        KEEP(p_cuModuleLoadData((void **)&kept[count], memset(text, '/', n)));
        free(text);
    } else if (number_after(word, "unload", &n, &m)) printf("%d\n", p_cuModuleUnload((void *)kept[n]));
    else if (number_after(word, "array", &n, &m)) {
        KEEP(p_cuArrayCreate_v2((void **)&kept[count], &(struct array){n, m, 0x20, 1}));
    } else if (number_after(word, "old", &n, &m)) {
        int (*old)(unsigned *, unsigned) = (void *)p_cuMemAlloc_v2;
        unsigned pointer;
        printf("%d\n", old(&pointer, n));
    } else if (number_after(word, "create", &n, &m)) {
        KEEP(p_cuMemCreate(&kept[count], n, &(struct property){1, 1, m == 99 ? 3 : 1, m}, 0));
    } else if (number_after(word, "map", &n, &m)) printf("%d\n", p_cuMemMap(m, 4096, 0, kept[n], 0));
    else if (number_after(word, "unmap", &n, &m)) printf("%d\n", p_cuMemUnmap(n, m));
    else if (number_after(word, "retain", &n, &m)) KEEP(p_cuMemRetainAllocationHandle(&kept[count], (void *)n));
    else if (number_after(word, "import", &n, &m)) KEEP(p_cuMemImportFromShareableHandle(&kept[count], NULL, 1));
    else if (number_after(word, "release", &n, &m)) printf("%d\n", p_cuMemRelease(kept[n]));
    else if (number_after(word, "free", &n, &m)) printf("%d\n", p_cuMemFree_v2(kept[n]));
    else if (number_after(word, "freeasync", &n, &m)) printf("%d\n", p_cuMemFreeAsync(kept[n], NULL));
    else if (number_after(word, "destroy", &n, &m)) printf("%d\n", p_cuArrayDestroy((void *)kept[n]));
    else if (number_after(word, "device", &n, &m)) {
        p_cuDevicePrimaryCtxRetain(&p, n);
        printf("%d\n", p_cuCtxSetCurrent(p));
    } else if (number_after(word, "leave", &n, &m)) printf("%d\n", p_cuDevicePrimaryCtxRelease_v2(n));
    else if (number_after(word, "reset", &n, &m)) printf("%d\n", p_cuDevicePrimaryCtxReset_v2(n));
    else if (number_after(word, "ctxdestroy", &n, &m)) printf("%d\n", p_cuCtxDestroy_v2((void *)(long)(n + 1)));
    else if (number_after(word, "info", &n, &m)) {
        p_cuMemGetInfo_v2(&a, &b);
        printf("%zu of %zu\n", a, b);
    } else if (number_after(word, "total", &n, &m)) {
        p_cuDeviceTotalMem_v2(&a, n);
        printf("%zu\n", a);
    } else if (number_after(word, "launch", &n, &m)) {
        for (u64 k = 0; k < n; k++) p_cuLaunchKernel(NULL, 1, 1, 1, m ? m : 1, 1, 1, 0, NULL, NULL, NULL);
        printf("%llu launched\n", n);
    } else if (number_after(word, "launchex", &n, &m)) {
        printf("%d\n", p_cuLaunchKernelEx((unsigned[16]){1, 1, 1, n, 1, 1}, NULL, NULL, NULL));
    } else if (number_after(word, "cooperative", &n, &m)) {
        printf("%d\n", p_cuLaunchCooperativeKernel(NULL, 1, 1, 1, n, 1, 1, 0, NULL, NULL));
    } else if (number_after(word, "graph", &n, &m)) {
        p_cuGraphInstantiateWithFlags(&p, (void *)n, 0);
        if (m) p_cuGraphExecUpdate_v2(p, (void *)m, NULL);
        printf("%d\n", p_cuGraphLaunch(p, NULL));
    } else if (number_after(word, "copy", &n, &m)) {
        printf("%d\n", p_cuMemcpyHtoD_v2(0, NULL, n) + p_cuMemcpyHtoDAsync_v2(0, NULL, n, NULL));
    } else if (number_after(word, "wide", &n, &m)) {
        int six = p_cuMemsetD2D8Async(1000000, 100000, 10, 1000, 100, (void *)1);
        printf("%d %d\n", six, p_cuLibraryLoadData((void *)1, "code", (void *)100, (void *)1000, 10000, (void *)2,
                                                   (void *)20, 200));
    } else if (number_after(word, "synchronize", &n, &m)) {
        printf("%d\n", n == 0 ? p_cuStreamSynchronize(NULL) : n == 1 ? p_cuCtxSynchronize() : p_cuEventSynchronize(NULL));
    } else if (number_after(word, "race", &n, &m)) {
        pthread_t threads[8];
        for (u64 t = 0; t < n; t++) pthread_create(&threads[t], NULL, race, (void *)m);
        for (u64 t = 0; t < n; t++) pthread_join(threads[t], NULL);
        printf("%d denied\n", racing_denied);
    } else if (number_after(word, "racing", &n, &m)) racing_bytes = n;
    else if (number_after(word, "model", &n, &m)) printf("%d wrong\n", against_model(n, m));
    else if (number_after(word, "fork", &n, &m)) { /* n: the child goes on with the words, its parent waits */
        pid_t child = fork();
        if (child) {
            waitpid(child, NULL, 0);
            if (n) exit(0);
        } else if (!n) exit(0);
        else prctl(PR_SET_PDEATHSIG, SIGKILL);
    } else if (number_after(word, "stay", &n, &m)) pause();
    else if (number_after(word, "bench-launch", &n, &m)) {
        double began = used_ns();
        for (u64 k = 0; k < n; k++) p_cuLaunchKernel(NULL, 8, 8, 1, 256, 1, 1, 0, NULL, NULL, NULL);
        printf("%.2f\n", (used_ns() - began) / n);
    } else if (number_after(word, "bench-alloc", &n, &m)) { /* an allocation and its free count as two */
        double began = used_ns();
        u64 pointer;
        for (u64 k = 0; k < n; k++) p_cuMemAlloc_v2(&pointer, 4096), p_cuMemFree_v2(pointer);
        printf("%.2f\n", (used_ns() - began) / n / 2);
    } else printf("what is %s?\n", word);
    fflush(stdout);
}

int main(int argc, char **argv) {
    resolve(argc > 1 ? argv[1] : "link");
    if (p_cuInit(0)) return 1;
    void *context;
    p_cuDevicePrimaryCtxRetain(&context, 0);
    p_cuCtxSetCurrent(context);
    for (int n = 2; n < argc; n++) one(argv[n]);
    char line[256];
    while (argc == 2 && fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        one(line);
    }
    return 0;
}
