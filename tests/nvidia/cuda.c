/* libcuda.so.1 for machines without a GPU: devices that CUDA_VISIBLE_DEVICES names, and memory that is really counted.

   A process is frozen from another one, by its pid: `frozen.<pid>` has its state, and its files of `held` are
   in the folder `away` while it is checkpointed. Its allocations wait meanwhile. A line `checkpoint-fail call=Lock
   code=N pid=P breaks=1` has a call fail (without pid: of any process), `checkpoint-hang call=Lock pid=P` never return,
   `checkpoint-ring on=1` each call on a process wait while another one is locked, as with NCCL.

   Pools, graphs and modules take of a device what kept.h says. The first context of a process on a device takes `context` MiB of it (a line `context mib=N`, else 300). What a
   process holds stands in a file of its own, from which the NVML beside this one reads it. */

#include "state.h"

#include <fcntl.h>
#include <sys/mman.h>

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 100, NO_CONTEXT = 201 };
#define ALLOCATIONS_MAX 1024
#define DEVICES DEVICES_MAX

static char visible[DEVICES_MAX][128];
static int visible_count, current = -1;
static unsigned long long holds[DEVICES_MAX], sizes[ALLOCATIONS_MAX];
static int homes[ALLOCATIONS_MAX];

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

/* `0=2048M,1=3G` (also `0 3G`, one a line, as the played daemon writes): the bytes of a device; ~0 for none. */
static unsigned long long limit_in(const char *text, int device) {
    int number, read;
    unsigned long long size;
    char unit;
    while (text && sscanf(text, "%d%*[= ]%llu%c%n", &number, &size, &unit, &read) == 3) {
        if (number == device) return size * MIB * (unit == 'G' ? 1024 : 1);
        text += read + strspn(text + read, ",\n");
    }
    return ~0ull;
}

/* What a client of an MPS daemon may have of a device: its own limit lowers the daemon's, and never raises it, as an
   H200 showed on 2026-11-27. */
static unsigned long long mps_limit(int device) {
    char path[4200], text[1024] = "";
    const char *pipe = getenv("CUDA_MPS_PIPE_DIRECTORY");
    snprintf(path, sizeof path, "%s/limits", pipe ? pipe : "");
    FILE *file = pipe ? fopen(path, "r") : NULL;
    if (!file) return ~0ull;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    unsigned long long all = limit_in(text, device), own = limit_in(getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), device);
    return own < all ? own : all;
}

static int process_state(int pid);

/* Whether so much more fits on the device; if so it is taken. A process that is locked waits. */
static int take(int device, unsigned long long bytes) {
    while (process_state(getpid())) usleep(2000);
    char *state = stub_state(), *line = state ? stub_device(state, visible[device], 0) : NULL;
    int fits = line && stub_used(state, visible[device]) + bytes <= stub_number(line, "total", 81559) * MIB;
    free(line);
    free(state);
    fits = fits && holds[device] + bytes <= mps_limit(device);
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
    unsigned long long left = mps_limit(current) - holds[current];
    if (left < *free_bytes) *free_bytes = left;
    free(line);
    free(state);
    return OK;
}

int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes) {
    if (current < 0) return NO_CONTEXT;
    int at = 0, code;
    while (at < ALLOCATIONS_MAX && sizes[at]) at++;
    if (at == ALLOCATIONS_MAX) return NO_MEMORY;
    if ((code = take(current, bytes))) return code;
    homes[at] = current;
    sizes[at] = bytes;
    *pointer = 0x1000 + 2 * at;
    return OK;
}

static int take_bytes(int device, unsigned long long bytes) { return take(device, bytes); }
static void give_bytes(int device, unsigned long long bytes) {
    holds[device] -= bytes;
    tell(device);
}
static int free_other(unsigned long long pointer) {
    long at = ((long)pointer - 0x1000) / 2;
    if (at < 0 || at >= ALLOCATIONS_MAX) return INVALID;
    give_bytes(homes[at], sizes[at]);
    sizes[at] = 0;
    return OK;
}
#include "kept.h"

int cuGraphLaunch(void *exec, void *stream) { (void)stream; return launch_graph(exec) ? NO_MEMORY : OK; }

/* Each kernel has the device for as many microseconds as a line `kernel us=N` says, else for a thousand. What a process has
   had of it stands in a file of its own below `busy`. A launch waits while more than 20 ms of work are before it. */
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
    (void)function, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz;
    (void)shared, (void)stream, (void)parameters, (void)extra;
    static unsigned long long *busy, each, until;
    if (current < 0) return NO_CONTEXT;
    if (!busy) {
        char path[4096], *state = stub_state();
        const char *at = state ? state : "";
        char *line = stub_line(&at, "kernel");
        each = line ? stub_number(line, "us", 1000) : 1000;
        free(line);
        free(state);
        snprintf(path, sizeof path, "%s/busy/%d.%s", stub_folder(), getpid(), visible[current]);
        int file = open(path, O_RDWR | O_CREAT, 0666);
        if (file < 0 || ftruncate(file, sizeof *busy)) return INVALID;
        busy = mmap(NULL, sizeof *busy, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
    }
    unsigned long long now;
    while (until > (now = stub_now_us(CLOCK_MONOTONIC)) + 20000) usleep(until - now - 20000);
    until = (until > now ? until : now) + each;
    *busy += each;
    return OK;
}

/* ------------------------------------------------------------------------------------------------ freezing by pid */

enum { RUNNING = 0, LOCKED = 1, CHECKPOINTED = 2, BROKEN = 3, ILLEGAL_STATE = 401, NOT_READY = 600 };

static int process_state(int pid) {
    char name[64];
    snprintf(name, sizeof name, "frozen.%d", pid);
    char *text = stub_read(name);
    int state = text ? atoi(text) : RUNNING;
    free(text);
    return state;
}

static void set_process_state(int pid, int state) {
    char path[4096], part[4200];
    snprintf(path, sizeof path, "%s/frozen.%d", stub_folder(), pid);
    snprintf(part, sizeof part, "%s.part", path);
    FILE *file = fopen(part, "w");
    if (!file) return;
    fprintf(file, "%d\n", state);
    fclose(file);
    rename(part, path);
}

/* Move the files of a process from one folder into the other. */
static void move_held(int pid, const char *from, const char *to) {
    char folder[4096], old[8600], fresh[8600], mark[32];
    snprintf(folder, sizeof folder, "%s/%s", stub_folder(), from);
    snprintf(mark, sizeof mark, "%d.", pid);
    DIR *entries = opendir(folder);
    struct dirent *entry;
    while (entries && (entry = readdir(entries))) {
        if (strncmp(entry->d_name, mark, strlen(mark))) continue;
        snprintf(old, sizeof old, "%s/%s", folder, entry->d_name);
        snprintf(fresh, sizeof fresh, "%s/%s/%s", stub_folder(), to, entry->d_name);
        rename(old, fresh);
    }
    if (entries) closedir(entries);
}

/* Whether a process other than this one is locked, or on its way to be resumed. */
static int another_is_locked(int pid) {
    int found = 0, other;
    DIR *entries = opendir(stub_folder());
    struct dirent *entry;
    while (entries && (entry = readdir(entries)))
        if (sscanf(entry->d_name, "frozen.%d", &other) == 1 && other != pid && !strstr(entry->d_name, ".part"))
            found |= process_state(other) == LOCKED;
    if (entries) closedir(entries);
    return found;
}

/* Whether a call is to go on; it is counted in `calls`, as NVML's are. */
static int begin(const char *call, int pid, int wanted) {
    char path[4096], *state = stub_state();
    const char *at = state ? state : "";
    char *line;
    int code = stub_lives(pid) ? OK : INVALID;
    snprintf(path, sizeof path, "%s/calls", stub_folder());
    FILE *calls = fopen(path, "a");
    if (calls) fprintf(calls, "%s %d\n", call, pid), fclose(calls);
    while ((line = stub_line(&at, "checkpoint-hang"))) {
        int only = stub_number(line, "pid", 0);
        if (stub_is(line, "call", call) && (!only || only == pid)) for (;;) pause();
        free(line);
    }
    at = state ? state : "";
    if ((line = stub_line(&at, "checkpoint-ring"))) {
        while (another_is_locked(pid)) usleep(10000);
        free(line);
    }
    at = state ? state : "";
    while ((line = stub_line(&at, "checkpoint-fail"))) {
        int only = stub_number(line, "pid", 0);
        if (stub_is(line, "call", call) && (!only || only == pid)) {
            code = stub_number(line, "code", 999);
            if (stub_number(line, "breaks", 0)) set_process_state(pid, BROKEN);
        }
        free(line);
    }
    free(state);
    return code ? code : wanted >= 0 && process_state(pid) != wanted ? ILLEGAL_STATE : OK;
}

int cuCheckpointProcessGetState(int pid, int *state) {
    int code = begin("GetState", pid, -1);
    *state = process_state(pid);
    return code;
}

/* Whether a kernel of the process runs, by a line `kernel pid=P`: a lock waits for its end. */
static int computes(int pid) {
    char *state = stub_state(), *line;
    const char *at = state ? state : "";
    int found = 0;
    while ((line = stub_line(&at, "kernel"))) {
        found |= stub_number(line, "pid", 0) == pid;
        free(line);
    }
    free(state);
    return found;
}

int cuCheckpointProcessLock(int pid, void *arguments) {
    int code = begin("Lock", pid, RUNNING);
    if (!code && computes(pid)) {
        usleep(1000 * *(unsigned *)arguments); /* an H200 answered so, and the process ran on */
        return NOT_READY;
    }
    if (!code) set_process_state(pid, LOCKED);
    return code;
}

int cuCheckpointProcessCheckpoint(int pid, void *arguments) {
    (void)arguments;
    int code = begin("Checkpoint", pid, LOCKED);
    if (!code) move_held(pid, "held", "away"), set_process_state(pid, CHECKPOINTED);
    return code;
}

int cuCheckpointProcessRestore(int pid, void *arguments) {
    (void)arguments;
    int code = begin("Restore", pid, CHECKPOINTED);
    if (!code) move_held(pid, "away", "held"), set_process_state(pid, LOCKED);
    return code;
}

int cuCheckpointProcessUnlock(int pid, void *arguments) {
    (void)arguments;
    int code = begin("Unlock", pid, LOCKED);
    if (!code) set_process_state(pid, RUNNING);
    return code;
}
