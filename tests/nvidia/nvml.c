/* libnvidia-ml.so.1 for machines without a GPU: the calls that moorage makes, over the state of `state.h`.

   Signatures and numbers are those of NVIDIA's nvml.h. A line `fail call=NAME uuid=UUID code=N` has a call fail for a
   device (without uuid: for all), `hang call=NAME uuid=UUID` holds it until the line is gone, `absent call=NAME` has
   it say that this driver lacks it. Where there is a file `calls`, every call is written to it. */

#include "state.h"

typedef int ret;
enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, NO_DRIVER = 9, TIMEOUT = 10,
       NO_FUNCTION = 13 };
typedef struct { char uuid[128]; } *device;
static struct { char uuid[128]; } known[DEVICES_MAX * 8];
static int known_count;

static device handle_of(const char *uuid) {
    for (int n = 0; n < known_count; n++)
        if (!strcmp(known[n].uuid, uuid)) return (device)&known[n];
    if (known_count == DEVICES_MAX * 8) return NULL;
    snprintf(known[known_count].uuid, sizeof known[0].uuid, "%s", uuid);
    return (device)&known[known_count++];
}

static ret refused(const char *state, const char *call, const char *uuid) {
    const char *at = state;
    char *line, of[128];
    ret code = OK;
    while (!code && (line = stub_line(&at, "absent"))) {
        if (stub_is(line, "call", call)) code = NO_FUNCTION;
        free(line);
    }
    at = state;
    while (!code && (line = stub_line(&at, "fail"))) {
        if (stub_is(line, "call", call) && (!stub_word(line, "uuid", of, sizeof of) || !strcmp(of, uuid)))
            code = stub_number(line, "code", 999);
        free(line);
    }
    return code;
}

static int hangs(const char *state, const char *call, const char *uuid) {
    const char *at = state;
    char *line;
    int found = 0;
    while (!found && (line = stub_line(&at, "hang"))) {
        found = stub_is(line, "call", call) && stub_is(line, "uuid", uuid);
        free(line);
    }
    return found;
}

/* The state, to be freed, once the call may go on; or NULL, and why not in *code. */
static char *enter(const char *call, const char *uuid, ret *code) {
    char path[4096];
    if (stub_folder()) {
        snprintf(path, sizeof path, "%s/calls", stub_folder());
        FILE *calls = access(path, W_OK) ? NULL : fopen(path, "a");
        if (calls) { fprintf(calls, "%s %s\n", call, uuid); fclose(calls); }
    }
    char *state = stub_state();
    while (state && hangs(state, call, uuid)) {
        free(state);
        usleep(5000);
        state = stub_state();
    }
    *code = state ? refused(state, call, uuid) : NO_DRIVER;
    if (*code) { free(state); return NULL; }
    return state;
}

#define ENTER(uuid) ret code; char *state = enter(__func__, uuid, &code); if (!state) return code
#define ENTER_DEVICE(handle) ENTER((handle)->uuid); char *line = stub_device(state, (handle)->uuid, 0); \
    if (!line) { free(state); return INVALID; }
#define LEAVE(value) do { ret given = (value); free(line); free(state); return given; } while (0)

ret nvmlInitWithFlags(unsigned flags) { (void)flags; ENTER(""); free(state); return OK; }
ret nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
ret nvmlShutdown(void) { ENTER(""); free(state); return OK; }

const char *nvmlErrorString(ret code) {
    static char text[64];
    snprintf(text, sizeof text, "stub error %d", code);
    return code == NO_DRIVER ? "Driver Not Loaded" : code == 999 ? "Unknown Error"
        : code == 18 ? "RM has detected an NVML/RM version mismatch." : text;
}

ret nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER("");
    const char *at = state;
    char *line;
    for (*count = 0; (line = stub_line(&at, "device")); free(line)) ++*count;
    free(state);
    return OK;
}

ret nvmlDeviceGetHandleByIndex_v2(unsigned index, device *found) {
    char uuid[128] = "", *all = stub_state(), *line = all ? stub_device(all, NULL, index) : NULL;
    if (line) stub_word(line, "uuid", uuid, sizeof uuid);
    free(line);
    free(all);
    ENTER(uuid);
    free(state);
    *found = *uuid ? handle_of(uuid) : NULL;
    return *found ? OK : INVALID;
}

ret nvmlDeviceGetHandleByUUID(const char *uuid, device *found) {
    ENTER(uuid);
    char *line = stub_device(state, uuid, 0);
    *found = line ? handle_of(uuid) : NULL;
    LEAVE(*found ? OK : NOT_FOUND);
}

/* The mode is `compute=N` of the device until one is set: that is in a file `mode.UUID`, as in a driver that outlives its
 * users. */
ret nvmlDeviceSetComputeMode(device handle, int mode) {
    ENTER_DEVICE(handle);
    char path[4096];
    snprintf(path, sizeof path, "%s/mode.%s", stub_folder(), handle->uuid);
    FILE *file = fopen(path, "w");
    if (file) { fprintf(file, "%d", mode); fclose(file); }
    LEAVE(file ? OK : 999);
}

ret nvmlDeviceGetComputeMode(device handle, int *mode) {
    ENTER_DEVICE(handle);
    char name[256];
    snprintf(name, sizeof name, "mode.%s", handle->uuid);
    char *text = stub_read(name);
    *mode = text ? atoi(text) : stub_number(line, "compute", 0);
    free(text);
    LEAVE(OK);
}

ret nvmlDeviceGetUUID(device handle, char *text, unsigned size) {
    ENTER_DEVICE(handle);
    snprintf(text, size, "%s", handle->uuid);
    LEAVE(OK);
}

ret nvmlDeviceGetMinorNumber(device handle, unsigned *minor) {
    ENTER_DEVICE(handle);
    *minor = stub_number(line, "minor", 0);
    LEAVE(OK);
}

ret nvmlDeviceGetName(device handle, char *text, unsigned size) {
    ENTER_DEVICE(handle);
    char name[96] = "NVIDIA_H100_80GB_HBM3";
    stub_word(line, "name", name, sizeof name);
    for (char *at = name; *at; at++) if (*at == '_') *at = ' ';
    snprintf(text, size, "%s", name);
    LEAVE(OK);
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };

ret nvmlDeviceGetPciInfo_v3(device handle, struct pci *pci) {
    ENTER_DEVICE(handle);
    memset(pci, 0, sizeof *pci);
    if (!stub_word(line, "pci", pci->bus_id, sizeof pci->bus_id)) strcpy(pci->bus_id, "00000000:17:00.0");
    LEAVE(OK);
}

ret nvmlDeviceGetCudaComputeCapability(device handle, int *major, int *minor) {
    ENTER_DEVICE(handle);
    *major = stub_number(line, "major", 9);
    *minor = stub_number(line, "minor", 0);
    LEAVE(OK);
}

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };

ret nvmlDeviceGetMemoryInfo(device handle, struct memory *memory) {
    ENTER_DEVICE(handle);
    memory->total = stub_number(line, "total", 81559) * MIB;
    memory->used = stub_used(state, handle->uuid) + stub_number(line, "reserved", 600) * MIB;
    memory->free = memory->total - memory->used;
    LEAVE(OK);
}

ret nvmlDeviceGetMemoryInfo_v2(device handle, struct memory_v2 *memory) {
    ENTER_DEVICE(handle);
    memory->total = stub_number(line, "total", 81559) * MIB;
    memory->reserved = stub_number(line, "reserved", 600) * MIB;
    memory->used = stub_used(state, handle->uuid);
    memory->free = memory->total - memory->used;
    LEAVE(OK);
}

ret nvmlDeviceGetTemperature(device handle, int sensor, unsigned *celsius) {
    (void)sensor;
    ENTER_DEVICE(handle);
    *celsius = stub_number(line, "temperature", 31);
    LEAVE(OK);
}

ret nvmlDeviceGetTotalEccErrors(device handle, int kind, int counter, unsigned long long *count) {
    ENTER_DEVICE(handle);
    *count = stub_number(line, "uncorrected", 0);
    LEAVE(kind == 1 && counter == 0 ? OK : INVALID); /* uncorrected, volatile */
}

ret nvmlDeviceGetUtilizationRates(device handle, unsigned rates[2]) {
    ENTER_DEVICE(handle);
    rates[0] = stub_number(line, "util", 0);
    rates[1] = 0;
    LEAVE(OK);
}

ret nvmlDeviceGetEncoderUtilization(device handle, unsigned *percent, unsigned *period_us) {
    ENTER_DEVICE(handle);
    *percent = stub_number(line, "encoder", 0);
    *period_us = 1000000;
    LEAVE(OK);
}

ret nvmlDeviceGetDecoderUtilization(device handle, unsigned *percent, unsigned *period_us) {
    ENTER_DEVICE(handle);
    *percent = stub_number(line, "decoder", 0);
    *period_us = 1000000;
    LEAVE(OK);
}

ret nvmlDeviceGetPowerUsage(device handle, unsigned *milliwatts) {
    ENTER_DEVICE(handle);
    long long told = stub_number(line, "power", -1);
    *milliwatts = told;
    LEAVE(told < 0 ? NOT_SUPPORTED : OK);
}

ret nvmlDeviceGetEnforcedPowerLimit(device handle, unsigned *milliwatts) {
    ENTER_DEVICE(handle);
    long long told = stub_number(line, "power_limit", -1);
    *milliwatts = told;
    LEAVE(told < 0 ? NOT_SUPPORTED : OK);
}

struct moment { unsigned long long taken_us; union { unsigned percent; unsigned long long wide; } value; };

/* Two samples: of `peak_age_s=N` ago what `peak=N`, `peak_encoder=N` or `peak_decoder=N` says, and of now 0. */
ret nvmlDeviceGetSamples(device handle, int kind, unsigned long long seen_us, int *type, unsigned *count, struct moment *found) {
    ENTER_DEVICE(handle);
    unsigned long long now_us = stub_now_us(CLOCK_REALTIME);
    const char *word = kind == 1 ? "peak" : kind == 3 ? "peak_encoder" : kind == 4 ? "peak_decoder" : NULL;
    if (!word) LEAVE(INVALID);
    long long percent = stub_number(line, word, 0), age_s = stub_number(line, "peak_age_s", 0);
    struct moment all[2] = {{now_us - age_s * 1000000ull, {.wide = percent}}, {now_us, {.wide = 0}}};
    unsigned first = all[0].taken_us > seen_us ? 0 : 1;
    *type = 1;
    if (!found) { *count = 2 - first; LEAVE(OK); }
    if (*count < 2 - first) LEAVE(SMALL);
    *count = 2 - first;
    memcpy(found, all + first, *count * sizeof *found);
    LEAVE(OK);
}

ret nvmlDeviceGetRemappedRows(device handle, unsigned *corrected, unsigned *not, unsigned *pending, unsigned *failed) {
    ENTER_DEVICE(handle);
    *corrected = *not = 0;
    *pending = stub_number(line, "rows_pending", 0);
    *failed = stub_number(line, "rows_failed", 0);
    LEAVE(OK);
}

struct field { unsigned id, scope; long long time, latency; int kind; ret code; unsigned long long value; };

ret nvmlDeviceGetFieldValues(device handle, int count, struct field *fields) {
    ENTER_DEVICE(handle);
    long long action = stub_number(line, "recovery", 0);
    for (int n = 0; n < count; n++) {
        fields[n].code = fields[n].id == 230 && action >= 0 ? OK : NOT_SUPPORTED;
        fields[n].value = action < 0 ? 0 : action;
    }
    LEAVE(OK);
}

struct fabric { unsigned char cluster[16]; ret status; unsigned clique, state; };
struct fabric_v2 { unsigned version; unsigned char cluster[16]; ret status; unsigned clique, state, health; };

/* `fabric=N` is the state (0: the GPU has none), `fabric_status=N` what became of it, `fabric_health=N` the mask. */
ret nvmlDeviceGetGpuFabricInfo(device handle, struct fabric *info) {
    ENTER_DEVICE(handle);
    info->state = stub_number(line, "fabric", 0);
    info->status = stub_number(line, "fabric_status", 0);
    LEAVE(OK);
}

ret nvmlDeviceGetGpuFabricInfoV(device handle, struct fabric_v2 *info) {
    ENTER_DEVICE(handle);
    info->state = stub_number(line, "fabric", 0);
    info->status = stub_number(line, "fabric_status", 0);
    info->health = stub_number(line, "fabric_health", 0);
    LEAVE(info->version == (sizeof *info | 2u << 24) ? OK : 25);
}

ret nvmlDeviceGetCurrentClocksThrottleReasons(device handle, unsigned long long *reasons) {
    ENTER_DEVICE(handle);
    *reasons = stub_number(line, "throttled", 0);
    LEAVE(OK);
}

ret nvmlDeviceGetP2PStatus(device one, device other, int what, int *status) {
    ENTER_DEVICE(one);
    char *second = stub_device(state, other->uuid, 0);
    *status = second && stub_number(line, "linked", 1) && stub_number(second, "linked", 1) ? 0 : 1;
    free(second);
    LEAVE(what == 2 ? OK : INVALID); /* over NVLink */
}

/* ---------------------------------------------------------------------------------------------------- processes */

struct process { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };

/* `kind` is of lines `process uuid=UUID pid=N mib=N kind=C`; a negative size is one that the driver does not tell. */
static ret processes(const char *call, device handle, unsigned *count, struct process *infos, char kind) {
    ret code;
    char *state = enter(call, handle->uuid, &code), *line;
    if (!state) return code;
    struct process found[HELD_MAX * 2];
    unsigned n = 0;
    const char *at = state;
    while ((line = stub_line(&at, "process")) && n < HELD_MAX) {
        char of[8] = "C";
        stub_word(line, "kind", of, sizeof of);
        long long mib = stub_number(line, "mib", -1);
        if (of[0] == kind && stub_is(line, "uuid", handle->uuid))
            found[n++] = (struct process){stub_number(line, "pid", 0), mib < 0 ? ~0ull : mib * MIB, ~0u, ~0u};
        free(line);
    }
    struct held held[HELD_MAX];
    int holders = stub_held(handle->uuid, held);
    at = state;
    line = stub_line(&at, "old_mps"); /* a server that owns what its clients hold */
    int server = line ? stub_number(line, "pid", 0) : 0;
    free(line);
    unsigned long long owned = 0;
    for (int h = 0; h < holders; h++) {
        int is_client = held[h].is_mps;
        if (is_client && server) owned += held[h].bytes;
        /* an H200 lists MPS clients twice, and in the list of MPS alone (2026-11-27); an old server owns their memory */
        if (kind == 'M' ? is_client : kind == 'C' && !(is_client && server))
            found[n++] = (struct process){held[h].pid, is_client && server ? ~0ull : held[h].bytes, ~0u, ~0u};
    }
    if (server && owned && kind == 'C') found[n++] = (struct process){server, owned, ~0u, ~0u};
    free(state);
    unsigned room = *count;
    *count = n;
    if (n > room || (n && !infos)) return SMALL;
    memcpy(infos, found, n * sizeof *found);
    return OK;
}

ret nvmlDeviceGetComputeRunningProcesses_v3(device handle, unsigned *count, struct process *infos) {
    return processes(__func__, handle, count, infos, 'C');
}

ret nvmlDeviceGetMPSComputeRunningProcesses_v3(device handle, unsigned *count, struct process *infos) {
    return processes(__func__, handle, count, infos, 'M');
}

ret nvmlDeviceGetGraphicsRunningProcesses_v3(device handle, unsigned *count, struct process *infos) {
    return processes(__func__, handle, count, infos, 'G');
}

struct sample { unsigned pid; unsigned long long taken_us; unsigned sm, memory, encoder, decoder; };

/* Lines `work uuid=UUID pid=N percent=N encoder=N decoder=N age_s=N`: what a process did of late. */
static unsigned told_work(const char *state, device handle, unsigned long long seen_us, unsigned long long now_us, struct sample *found) {
    unsigned n = 0;
    const char *at = state;
    char *work;
    while ((work = stub_line(&at, "work")) && n < HELD_MAX) {
        unsigned long long us = now_us - stub_number(work, "age_s", 0) * 1000000ull;
        if (stub_is(work, "uuid", handle->uuid) && us > seen_us)
            found[n++] = (struct sample){stub_number(work, "pid", 0), us, stub_number(work, "percent", 0), 0,
                                         stub_number(work, "encoder", 0), stub_number(work, "decoder", 0)};
        free(work);
    }
    return n;
}

/* What processes had of the device, by the files that libcuda writes: a sample each 50 ms at most, if it is asked for. */
static unsigned done_work(device handle, unsigned long long now_us, struct sample *found) {
    static struct { char name[512]; unsigned long long busy; struct sample last; } before[HELD_MAX];
    char path[4096], file[4700];
    unsigned n = 0;
    snprintf(path, sizeof path, "%s/busy", stub_folder());
    DIR *folder = opendir(path);
    struct dirent *entry;
    while (folder && n < HELD_MAX && (entry = readdir(folder))) {
        char *dot = strchr(entry->d_name, '.');
        int pid = atoi(entry->d_name), at = 0;
        unsigned long long busy = 0;
        if (pid <= 0 || !dot || strcmp(dot + 1, handle->uuid) || !stub_lives(pid)) continue;
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        FILE *text = fopen(file, "r");
        if (text && fread(&busy, sizeof busy, 1, text) != 1) busy = 0;
        if (text) fclose(text);
        while (at < HELD_MAX - 1 && *before[at].name && strcmp(before[at].name, entry->d_name)) at++;
        unsigned long long used = busy - before[at].busy, passed_us = now_us - before[at].last.taken_us;
        if (passed_us > 50000) {
            snprintf(before[at].name, sizeof before[at].name, "%s", entry->d_name);
            before[at].busy = busy;
            before[at].last = (struct sample){pid, now_us, used >= passed_us ? 100 : used * 100 / passed_us, 0, 0, 0};
        }
        if (before[at].last.sm) found[n++] = before[at].last;
    }
    if (folder) closedir(folder);
    return n;
}

ret nvmlDeviceGetProcessUtilization(device handle, struct sample *samples, unsigned *count, unsigned long long seen_us) {
    ENTER_DEVICE(handle);
    static struct sample found[2 * HELD_MAX];
    unsigned long long now_us = stub_now_us(CLOCK_REALTIME);
    unsigned room = samples ? *count : 0, n = told_work(state, handle, seen_us, now_us, found);
    if (now_us > seen_us) n += done_work(handle, now_us, found + n);
    *count = n;
    if (!n) LEAVE(NOT_FOUND);
    if (n > room) LEAVE(SMALL);
    memcpy(samples, found, n * sizeof *found);
    LEAVE(OK);
}

/* --------------------------------------------------------------------------------------------------------- MIG */

/* A GPU that says `divides=1` has these profiles, and its mode and slices stand in the file `mig`: a line `mode`, and for
   each GPU instance a line `instance` and, once it has its compute instance, a line `slice`, as in `state`. */
static const struct { const char *name; unsigned id, slices, parts, count, mib; } profiles[] = {
    {"1g.10gb", 19, 1, 1, 7, 9856}, {"2g.20gb", 14, 2, 2, 3, 20096}, {"3g.40gb", 9, 3, 4, 2, 40192},
    {"4g.40gb", 5, 4, 4, 1, 40192}, {"7g.80gb", 0, 7, 8, 1, 80384} };
enum { PROFILES = 5, PARTS_MAX = 8, INSTANCES_MAX = 64, IN_USE = 19, INSUFFICIENT = 23 };
typedef struct { char gpu[128]; unsigned id; } *instance;
static struct { char gpu[128]; unsigned id; } instances[INSTANCES_MAX];

static instance instance_of(const char *gpu, unsigned id) {
    for (int n = 0; n < INSTANCES_MAX; n++) {
        if (!*instances[n].gpu) {
            snprintf(instances[n].gpu, sizeof instances[n].gpu, "%s", gpu);
            instances[n].id = id;
        }
        if (instances[n].id == id && !strcmp(instances[n].gpu, gpu)) return (instance)&instances[n];
    }
    return NULL;
}

/* Write the file `mig` anew, with what of it `keeps` and one line more. */
static void rewrite(int (*keeps)(const char *line, const void *what), const void *what, const char *more) {
    char path[4096], fresh[4200], *old = stub_read("mig");
    snprintf(path, sizeof path, "%s/mig", stub_folder());
    snprintf(fresh, sizeof fresh, "%s.new", path);
    FILE *file = fopen(fresh, "w");
    for (char *line = old ? strtok(old, "\n") : NULL; line; line = strtok(NULL, "\n"))
        if (keeps(line, what)) fprintf(file, "%s\n", line);
    fprintf(file, "%s", more);
    fclose(file);
    rename(fresh, path);
    free(old);
}

static int keeps_all(const char *line, const void *what) { (void)line, (void)what; return 1; }
static int keeps_others(const char *line, const void *what) {
    const instance of = (instance)what;
    return !stub_is(line, "parent", of->gpu) || stub_number(line, "instance", -1) != of->id;
}
static int keeps_instances(const char *line, const void *what) {
    return strncmp(line, "slice", 5) || keeps_others(line, what);
}
static int keeps_no_mode(const char *line, const void *what) {
    return strncmp(line, "mode", 4) || !stub_is(line, "uuid", what);
}

static int mode_of(const char *state, device handle, const char *line) {
    const char *at = state;
    char *each;
    int mode = stub_number(line, "mig", 0);
    while ((each = stub_line(&at, "mode"))) {
        if (stub_is(each, "uuid", handle->uuid)) mode = stub_number(each, "mig", mode);
        free(each);
    }
    return mode;
}

ret nvmlDeviceGetMigMode(device handle, unsigned *current, unsigned *pending) {
    ENTER_DEVICE(handle);
    *current = *pending = mode_of(state, handle, line);
    LEAVE(OK);
}

ret nvmlDeviceSetMigMode(device handle, unsigned mode, ret *status) {
    ENTER_DEVICE(handle);
    char more[256];
    snprintf(more, sizeof more, "mode uuid=%s mig=%u\n", handle->uuid, mode);
    *status = OK;
    int divides = stub_number(line, "divides", 0);
    if (divides == 1) rewrite(keeps_no_mode, handle->uuid, more); /* 2: at its next reset, which never comes */
    LEAVE(divides ? OK : NOT_SUPPORTED);
}

struct gpu_profile { unsigned version, id, p2p, slices, count, units[6]; unsigned long long mib; char name[96]; };

ret nvmlDeviceGetGpuInstanceProfileInfoV(device handle, unsigned number, struct gpu_profile *info) {
    ENTER_DEVICE(handle);
    int is_one = number < PROFILES && stub_number(line, "divides", 0);
    if (is_one) {
        info->id = profiles[number].id;
        info->slices = profiles[number].slices;
        info->count = profiles[number].count;
        info->mib = profiles[number].mib;
        snprintf(info->name, sizeof info->name, "MIG %s", profiles[number].name);
    }
    LEAVE(is_one ? OK : NOT_SUPPORTED);
}

static unsigned profile_at(unsigned id) {
    unsigned n = 0;
    while (n < PROFILES && profiles[n].id != id) n++;
    return n;
}

ret nvmlDeviceGetGpuInstances(device handle, unsigned id, instance *found, unsigned *count) {
    ENTER_DEVICE(handle);
    const char *at = state;
    char *each;
    for (*count = 0; (each = stub_line(&at, "instance")); free(each))
        if (stub_is(each, "parent", handle->uuid) && stub_number(each, "profile", -1) == id)
            found[(*count)++] = instance_of(handle->uuid, stub_number(each, "instance", 0));
    LEAVE(OK);
}

ret nvmlDeviceCreateGpuInstance(device handle, unsigned id, instance *made) {
    ENTER_DEVICE(handle);
    unsigned at_profile = profile_at(id), parts = 0, highest = 0;
    const char *at = state;
    char *each, more[256];
    while ((each = stub_line(&at, "instance"))) {
        if (stub_is(each, "parent", handle->uuid)) {
            parts += profiles[profile_at(stub_number(each, "profile", 0))].parts;
            unsigned used = stub_number(each, "instance", 0);
            if (used > highest) highest = used;
        }
        free(each);
    }
    if (!mode_of(state, handle, line)) LEAVE(NOT_SUPPORTED);
    if (at_profile == PROFILES) LEAVE(INVALID);
    if (parts + profiles[at_profile].parts > PARTS_MAX) LEAVE(INSUFFICIENT);
    snprintf(more, sizeof more, "instance parent=%s instance=%u profile=%u\n", handle->uuid, highest + 1, id);
    rewrite(keeps_all, NULL, more);
    *made = instance_of(handle->uuid, highest + 1);
    LEAVE(OK);
}

struct compute_profile { unsigned version, id, slices, count, units[6]; char name[96]; };

/* The profile of an instance, in `profiles`. */
static unsigned profile_of(const char *state, instance of) {
    const char *at = state;
    char *each;
    unsigned found = PROFILES;
    while ((each = stub_line(&at, "instance"))) {
        if (stub_is(each, "parent", of->gpu) && stub_number(each, "instance", 0) == of->id)
            found = profile_at(stub_number(each, "profile", 0));
        free(each);
    }
    return found;
}

ret nvmlGpuInstanceGetComputeInstanceProfileInfoV(
    instance of, unsigned number, unsigned engine, struct compute_profile *info) {
    ENTER(of->gpu);
    unsigned found = profile_of(state, of);
    int is_one = engine == 0 && found < PROFILES && number < PROFILES && profiles[number].slices <= profiles[found].slices;
    if (is_one) {
        info->id = number;
        info->slices = profiles[number].slices;
        info->count = profiles[found].slices / profiles[number].slices;
    }
    free(state);
    return is_one ? OK : NOT_SUPPORTED;
}

ret nvmlGpuInstanceGetComputeInstances(instance of, unsigned id, instance *found, unsigned *count) {
    ENTER(of->gpu);
    const char *at = state;
    char *each;
    for (*count = 0; (each = stub_line(&at, "slice")); free(each))
        if (!keeps_others(each, of) && profile_of(state, of) == id) found[(*count)++] = of;
    free(state);
    return OK;
}

ret nvmlGpuInstanceCreateComputeInstance(instance of, unsigned id, instance *made) {
    ENTER(of->gpu);
    unsigned found = profile_of(state, of);
    free(state);
    if (found != id) return INVALID;
    char more[512];
    snprintf(more, sizeof more,
        "slice uuid=MIG-%u-%s parent=%s instance=%u index=%u total=%u name=NVIDIA_H100_80GB_HBM3_MIG_%s used=0\n",
        of->id, of->gpu, of->gpu, of->id, of->id - 1, profiles[found].mib, profiles[found].name);
    rewrite(keeps_all, NULL, more);
    *made = of;
    return OK;
}

ret nvmlComputeInstanceDestroy(instance of) {
    ENTER(of->gpu);
    char uuid[256];
    snprintf(uuid, sizeof uuid, "MIG-%u-%s", of->id, of->gpu);
    struct held held[HELD_MAX];
    int is_used = stub_held(uuid, held);
    free(state);
    if (is_used) return IN_USE;
    rewrite(keeps_instances, of, "");
    return OK;
}

ret nvmlGpuInstanceDestroy(instance of) {
    ENTER(of->gpu);
    const char *at = state;
    char *each;
    int is_used = 0;
    while ((each = stub_line(&at, "slice"))) {
        is_used |= !keeps_others(each, of);
        free(each);
    }
    free(state);
    if (is_used) return IN_USE;
    rewrite(keeps_others, of, "");
    return OK;
}

ret nvmlDeviceGetMaxMigDeviceCount(device handle, unsigned *count) {
    ENTER_DEVICE(handle);
    *count = 7;
    LEAVE(OK);
}

/* Of a slice: its GPU instance has its index, and one compute instance. */
ret nvmlDeviceGetGpuInstanceId(device handle, unsigned *id) {
    ENTER_DEVICE(handle);
    *id = stub_number(line, "index", 0);
    LEAVE(OK);
}

ret nvmlDeviceGetComputeInstanceId(device handle, unsigned *id) {
    ENTER_DEVICE(handle);
    *id = 0;
    LEAVE(OK);
}

ret nvmlDeviceGetMigDeviceHandleByIndex(device handle, unsigned index, device *slice) {
    ENTER_DEVICE(handle);
    const char *at = state;
    char *each, uuid[128] = "";
    while (!*uuid && (each = stub_line(&at, "slice"))) {
        if (stub_is(each, "parent", handle->uuid) && stub_number(each, "index", 0) == (long long)index)
            stub_word(each, "uuid", uuid, sizeof uuid);
        free(each);
    }
    *slice = *uuid ? handle_of(uuid) : NULL;
    LEAVE(*slice ? OK : NOT_FOUND);
}

/* ------------------------------------------------------------------------------------------------------ events */

struct event { device device; unsigned long long type, data; unsigned gpu_instance, compute_instance; };
struct set { long offset; unsigned long long types[DEVICES_MAX]; device devices[DEVICES_MAX]; int count; };

ret nvmlEventSetCreate(struct set **set) {
    ENTER("");
    free(state);
    *set = calloc(1, sizeof **set);
    return OK;
}

ret nvmlEventSetFree(struct set *set) {
    ENTER("");
    free(state);
    free(set);
    return OK;
}

ret nvmlDeviceGetSupportedEventTypes(device handle, unsigned long long *types) {
    ENTER_DEVICE(handle);
    *types = stub_number(line, "events", 0xB);
    LEAVE(OK);
}

ret nvmlDeviceRegisterEvents(device handle, unsigned long long types, struct set *set) {
    ENTER_DEVICE(handle);
    if (set->count < DEVICES_MAX) {
        set->devices[set->count] = handle;
        set->types[set->count++] = types;
    }
    LEAVE(types & ~(unsigned long long)stub_number(line, "events", 0xB) ? NOT_SUPPORTED : OK);
}

/* The next line of the file `events`: `UUID TYPE DATA`, or `error CODE`. */
ret nvmlEventSetWait_v2(struct set *set, struct event *event, unsigned timeout_ms) {
    ENTER("");
    free(state);
    for (unsigned waited_ms = 0;; waited_ms += 5) {
        char *text = stub_read("events"), name[128];
        unsigned long long type, data;
        size_t length = text ? strlen(text) : 0;
        char *next = text && set->offset < (long)length ? text + set->offset : NULL;
        if (next && strchr(next, '\n')) {
            set->offset += strcspn(next, "\n") + 1;
            int words = sscanf(next, "%127s %lli %lli", name, (long long *)&type, (long long *)&data);
            free(text);
            if (words == 2) return (ret)type;
            for (int n = 0; words == 3 && n < set->count; n++)
                if (!strcmp(set->devices[n]->uuid, name) && set->types[n] & type) {
                    *event = (struct event){set->devices[n], type, data, ~0u, ~0u};
                    return OK;
                }
            continue;
        }
        free(text);
        if (waited_ms >= timeout_ms) return TIMEOUT;
        usleep(5000);
    }
}
