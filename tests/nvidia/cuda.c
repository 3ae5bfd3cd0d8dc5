/* libcuda.so.1 for machines without a GPU: devices that CUDA_VISIBLE_DEVICES names, and memory that is really counted.

   The first context of a process on a device takes `context` MiB of it (a line `context mib=N`, else 300). What a
   process holds stands in a file of its own, from which the NVML beside this one reads it. */

#include "state.h"

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 100, NO_CONTEXT = 201 };
#define ALLOCATIONS_MAX 1024

static char visible[DEVICES_MAX][128];
static int visible_count, current = -1;
static unsigned long long holds[DEVICES_MAX], sizes[ALLOCATIONS_MAX];
static int homes[ALLOCATIONS_MAX], allocations;

static void add_visible(const char *state, const char *wanted) {
    int is_index = *wanted && strspn(wanted, "0123456789") == strlen(wanted);
    char *line = stub_device(state, is_index ? NULL : wanted, is_index ? atoi(wanted) : 0);
    if (line && visible_count < DEVICES_MAX) stub_word(line, "uuid", visible[visible_count++], 128);
    free(line);
}

int cuInit(unsigned flags) {
    (void)flags;
    char *state = stub_state(), number[16];
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    if (!state) return NO_DEVICE;
    visible_count = 0;
    if (wanted) {
        char *list = strdup(wanted), *rest = list, *one;
        while ((one = strsep(&rest, ","))) add_visible(state, one);
        free(list);
    } else {
        for (int n = 0; n < DEVICES_MAX; n++) {
            snprintf(number, sizeof number, "%d", n);
            add_visible(state, number);
        }
    }
    free(state);
    return visible_count ? OK : NO_DEVICE;
}

int cuDeviceGetCount(int *count) { *count = visible_count; return OK; }

int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= visible_count) return INVALID;
    *device = ordinal;
    return OK;
}

int cuDeviceGetUuid(unsigned char *raw, int device) {
    const char *text = strchr(visible[device], '-') + 1;
    for (int n = 0; n < 16; text++)
        if (*text != '-') {
            if (sscanf(text, "%2hhx", &raw[n++]) != 1) return INVALID;
            text++;
        }
    return OK;
}

static void tell(int device) {
    char path[4096], part[4200];
    int is_mps = getenv("CUDA_MPS_PIPE_DIRECTORY") != NULL;
    snprintf(path, sizeof path, "%s/held/%d.%s", stub_folder(), getpid(), visible[device]);
    snprintf(part, sizeof part, "%s/part.%d", stub_folder(), getpid());
    FILE *file = fopen(part, "w");
    if (!file) return;
    fprintf(file, "%llu %d\n", holds[device], is_mps);
    fclose(file);
    rename(part, path);
}

/* Whether so much more fits on the device; if so it is taken. */
static int take(int device, unsigned long long bytes) {
    char *state = stub_state(), *line = state ? stub_device(state, visible[device], 0) : NULL;
    int fits = line && stub_used(state, visible[device]) + bytes <= stub_number(line, "total", 81559) * MIB;
    free(line);
    free(state);
    if (!fits) return NO_MEMORY;
    holds[device] += bytes;
    tell(device);
    return OK;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    char *state = stub_state();
    const char *at = state ? state : "";
    char *line = stub_line(&at, "context");
    unsigned long long mib = line ? stub_number(line, "mib", CONTEXT_MIB) : CONTEXT_MIB;
    free(line);
    free(state);
    *context = (void *)(long)(device + 1);
    return holds[device] ? OK : take(device, mib * MIB);
}

int cuCtxGetDevice(int *device) { *device = current; return current < 0 ? NO_CONTEXT : OK; }
int cuCtxGetCurrent(void **context) { *context = (void *)(long)(current + 1); return OK; }
int cuCtxSetCurrent(void *context) { current = (int)(long)context - 1; return OK; }

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    if (current < 0) return NO_CONTEXT;
    char *state = stub_state(), *line = state ? stub_device(state, visible[current], 0) : NULL;
    if (!line) { free(state); return NO_DEVICE; }
    *total = stub_number(line, "total", 81559) * MIB;
    *free_bytes = *total - stub_used(state, visible[current]);
    free(line);
    free(state);
    return OK;
}

int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes) {
    if (current < 0) return NO_CONTEXT;
    if (allocations == ALLOCATIONS_MAX) return NO_MEMORY;
    int code = take(current, bytes);
    if (code) return code;
    homes[allocations] = current;
    sizes[allocations] = bytes;
    *pointer = 0x1000 + allocations++;
    return OK;
}

int cuMemFree_v2(unsigned long long pointer) {
    long n = (long)pointer - 0x1000;
    if (n < 0 || n >= allocations) return INVALID;
    holds[homes[n]] -= sizes[n];
    sizes[n] = 0;
    tell(homes[n]);
    return OK;
}
