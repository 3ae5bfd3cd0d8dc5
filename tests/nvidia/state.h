/* What both stub libraries know: a folder that the test writes, named by STUB_NVIDIA.

   `state` has a line for each thing that is so, made of words `key=value`; it is read anew in every call, so a test
   changes a device by writing the file. `held` has a file for each process and device with the bytes that the process
   holds there: libcuda writes it, and whoever reads it removes that of a process that is gone, as a driver does. */

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MIB (1024ull * 1024)
#define STATE_MAX (256 * 1024)
#define DEVICES_MAX 64
#define HELD_MAX 512
#define CONTEXT_MIB 300

static const char *stub_folder(void) { return getenv("STUB_NVIDIA"); }

static char *stub_read(const char *name) {
    char path[4096], *text = malloc(STATE_MAX);
    if (!text || !stub_folder()) { free(text); return NULL; }
    snprintf(path, sizeof path, "%s/%s", stub_folder(), name);
    FILE *file = fopen(path, "r");
    if (!file) { free(text); return NULL; }
    size_t length = fread(text, 1, STATE_MAX - 1, file);
    fclose(file);
    text[length] = 0;
    return text;
}

/* `state`, which the test writes, and behind it `mig`, which nvmlDeviceCreateGpuInstance and its kin write. */
static char *stub_state(void) {
    char *state = stub_read("state"), *mig = state ? stub_read("mig") : NULL;
    if (mig) strncat(state, mig, STATE_MAX - 1 - strlen(state));
    free(mig);
    return state;
}

/* The value of `key` in a line, into `value`; 0 where the line has none. */
static int stub_word(const char *line, const char *key, char *value, size_t size) {
    char wanted[64];
    snprintf(wanted, sizeof wanted, " %s=", key);
    const char *found = strstr(line, wanted);
    if (!found) return 0;
    found += strlen(wanted);
    size_t length = strcspn(found, " \n");
    if (length >= size) length = size - 1;
    memcpy(value, found, length);
    value[length] = 0;
    return 1;
}

static long long stub_number(const char *line, const char *key, long long otherwise) {
    char value[64];
    return stub_word(line, key, value, sizeof value) ? strtoll(value, NULL, 0) : otherwise;
}

static int stub_is(const char *line, const char *key, const char *wanted) {
    char value[256];
    return stub_word(line, key, value, sizeof value) && !strcmp(value, wanted);
}

/* The next line of this kind behind *at, as one string that is to be freed; NULL at the end. */
static char *stub_line(const char **at, const char *kind) {
    while (**at) {
        size_t length = strcspn(*at, "\n");
        char *line = strndup(*at, length);
        *at += length + ((*at)[length] == '\n');
        if (line && !strncmp(line, kind, strlen(kind)) && line[strlen(kind)] == ' ') return line;
        free(line);
    }
    return NULL;
}

/* The line of a device or slice by its uuid, or of the device at a position; to be freed. */
static char *stub_device(const char *state, const char *uuid, int position) {
    const char *kinds[] = {"device", "slice"};
    for (int kind = 0; kind < (uuid ? 2 : 1); kind++) {
        const char *at = state;
        char *line;
        for (int n = 0; (line = stub_line(&at, kinds[kind])); n++) {
            if (uuid ? stub_is(line, "uuid", uuid) : n == position) return line;
            free(line);
        }
    }
    return NULL;
}

static int stub_lives(int pid) {
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    char *end = strrchr(text, ')');
    return end && strncmp(end, ") Z", 3) && strncmp(end, ") X", 3);
}

static inline unsigned long long stub_now_us(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000ull + now.tv_nsec / 1000;
}

struct held { int pid; unsigned long long bytes; int is_mps; };

/* What real processes hold of a device (of any, where uuid is NULL). */
static int stub_held(const char *uuid, struct held *found) {
    char path[4096];
    int count = 0;
    if (!stub_folder()) return 0;
    snprintf(path, sizeof path, "%s/held", stub_folder());
    DIR *folder = opendir(path);
    struct dirent *entry;
    while (folder && (entry = readdir(folder)) && count < HELD_MAX) {
        char *dot = strchr(entry->d_name, '.'), file[4400];
        int pid = atoi(entry->d_name);
        if (!dot || pid <= 0) continue;
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        if (!stub_lives(pid)) { unlink(file); continue; }
        if (uuid && strcmp(dot + 1, uuid)) continue;
        FILE *text = fopen(file, "r");
        struct held one = {pid, 0, 0};
        if (!text) continue;
        if (fscanf(text, "%llu %d", &one.bytes, &one.is_mps) == 2) found[count++] = one;
        fclose(text);
    }
    if (folder) closedir(folder);
    return count;
}

static unsigned long long stub_used(const char *state, const char *uuid) {
    char *line = stub_device(state, uuid, 0);
    unsigned long long used = line ? stub_number(line, "used", 1) * MIB : 0;
    free(line);
    struct held found[HELD_MAX];
    int count = stub_held(uuid, found);
    for (int n = 0; n < count; n++) used += found[n].bytes;
    /* what its slices use is used of the device */
    const char *at = state;
    while ((line = stub_line(&at, "slice"))) {
        char name[128];
        if (stub_is(line, "parent", uuid) && stub_word(line, "uuid", name, sizeof name)) used += stub_used(state, name);
        free(line);
    }
    return used;
}
