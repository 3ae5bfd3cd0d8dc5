/* The launcher in C: what launcher.py does, see there, at a quarter of the price.
 *
 * A clone of an interpreter copies its page tables, runs Python on pages that are copied as they are touched, and has
 * all of them torn down again by exec: over a millisecond. A clone here shares the launcher's memory until its exec
 * (CLONE_VM), on a stack of its own and without stopping the launcher: a program on a dead network file system must
 * not hold up the others, which is what vfork(2) would do. So until exec a child makes bare system calls alone, which
 * do not touch errno, and reads its batch, which is used again only once the kernel has told that all of its children
 * have left this memory (CLONE_CHILD_CLEARTID). A child that becomes another user gets a copy of the memory instead.
 *
 * A spare is such a child that has no request yet: it waits on a socket of its own for one, so that a start which comes
 * alone waits for neither this process nor a clone (docs/decisions/0039).
 *
 * Packets, answers and the confirm pipe: see launcher_client.py. Both ends are one installation on one machine.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { CGROUP = 1, LIMITS, USER, CWD, EXEC };
enum { PACKET_BYTES_MAX = 128 * 1024, DESCRIPTORS_MAX = 64, CHILDREN_MAX = 16, STACK_BYTES = 16 * 1024 };
enum { CHANNEL = 3, CANNOT_START = 127, USAGE = 64 };
enum { SPARE = -1, SPARE_BYTES_MAX = 16 * 1024, SPARE_STRINGS_MAX = 1024, SPARE_DESCRIPTORS = 5, SPARE_CGROUP = 4 };

#if __SIZEOF_POINTER__ != 8
#error "the system calls named here take other arguments on 32-bit machines: launcher.py serves there"
#endif
#ifndef CLONE3
#define CLONE3 SYS_clone3
#endif

struct limit {
    int64_t resource;
    uint64_t soft, hard;
};

/* Then follow the limits, the groups, and as text that ends in a null: cwd, paths, arguments, environment. */
struct request {
    int32_t bytes, slot, out, err, cgroup, becomes_user;
    uint32_t uid, gid;
    int32_t groups, limits, paths, arguments, environment, padding;
};

struct child {
    _Alignas(16) char stack[STACK_BYTES];
    int is_here; /* cleared by the kernel once the child has left this memory */
    int in_cgroup;
    const struct request *request;
    const int *descriptors;
    char **strings;
};

struct batch {
    struct batch *next;
    char *large; /* a body that was too large for a packet, mapped */
    size_t large_bytes;
    char **strings;
    int descriptors[DESCRIPTORS_MAX];
    struct child children[CHILDREN_MAX];
    _Alignas(8) char body[PACKET_BYTES_MAX];
};

struct spare {
    struct child child; /* the first, so that one is the other */
    struct spare *next;
    int descriptors[SPARE_DESCRIPTORS];
    char *strings[SPARE_STRINGS_MAX];
    _Alignas(8) char body[SPARE_BYTES_MAX];
};

static pid_t parent;

#if defined(__x86_64__) && !defined(PORTABLE)
static long call(long number, long a, long b, long c, long d, long e) {
    register long fourth __asm__("r10") = d;
    register long fifth __asm__("r8") = e;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "0"(number), "D"(a), "S"(b), "d"(c), "r"(fourth), "r"(fifth)
                     : "rcx", "r11", "memory");
    return result;
}

/* In the child, which begins on the stack of `arguments`, calls `run`, which never returns. */
static long clone_and_run(struct clone_args *arguments, void (*run)(struct child *), struct child *child) {
    long result;
    __asm__ volatile("syscall\n\ttest %0, %0\n\tjnz 1f\n\tmov %3, %%rdi\n\tcall *%2\n\tud2\n1:"
                     : "=a"(result)
                     : "0"((long)CLONE3), "r"(run), "r"(child), "D"(arguments), "S"(sizeof *arguments)
                     : "rcx", "r11", "memory");
    return result;
}

static const int shares_memory = 1;
#else
static long call(long number, long a, long b, long c, long d, long e) {
    long result = syscall(number, a, b, c, d, e);
    return result < 0 ? -errno : result;
}

static long clone_and_run(struct clone_args *arguments, void (*run)(struct child *), struct child *child) {
    long result = call(CLONE3, (long)arguments, sizeof *arguments, 0, 0, 0);
    if (result == 0) run(child);
    return result;
}

static const int shares_memory = 0; /* a stack of one's own takes a word of assembly */
#endif

static int descriptor(const struct child *child, int place) {
    return child->descriptors[place];
}

static void fail(struct child *child, int32_t stage, long result) {
    int32_t said[3] = {child->request->slot, stage, (int32_t)-result};
    call(SYS_write, descriptor(child, 0), (long)said, sizeof said, 0, 0);
    call(SYS_exit_group, CANNOT_START, 0, 0, 0, 0);
}

/* In a child: end with the supervisor. It follows the death of the parent's spawning thread; the supervisor has one. */
static void follow_parent(void) {
    call(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (call(SYS_getppid, 0, 0, 0, 0, 0) != parent) call(SYS_exit_group, CANNOT_START, 0, 0, 0, 0);
}

/* In the child: put everything in place and exec. Bare system calls only; never returns. */
static void become(struct child *child) {
    const struct request *request = child->request;
    long result = call(SYS_setsid, 0, 0, 0, 0, 0);
    if (request->cgroup >= 0 && !child->in_cgroup) {
        int folder = descriptor(child, request->cgroup);
        long procs = call(SYS_openat, folder, (long)"cgroup.procs", O_WRONLY | O_CLOEXEC, 0, 0);
        result = procs < 0 ? procs : call(SYS_write, procs, (long)"0", 1, 0, 0);
        if (result < 0) fail(child, CGROUP, result);
    }
    if ((result = call(SYS_dup3, descriptor(child, request->out), 1, 0, 0, 0)) < 0) fail(child, CGROUP, result);
    if ((result = call(SYS_dup3, descriptor(child, request->err), 2, 0, 0, 0)) < 0) fail(child, CGROUP, result);

    const struct limit *limit = (const struct limit *)(request + 1);
    for (int number = 0; number < request->limits; number++, limit++) {
        result = call(SYS_prlimit64, 0, limit->resource, (long)&limit->soft, 0, 0);
        if (result < 0) fail(child, LIMITS, result);
    }
    if (request->becomes_user) {
        /* Its output is its own to open again (/dev/stdout); what it makes is nobody else's to read. */
        call(SYS_umask, 077, 0, 0, 0, 0);
        if ((result = call(SYS_fchown, 1, request->uid, request->gid, 0, 0)) < 0 ||
            (result = call(SYS_fchown, 2, request->uid, request->gid, 0, 0)) < 0 ||
            (result = call(SYS_setgroups, request->groups, (long)limit, 0, 0, 0)) < 0 ||
            (result = call(SYS_setgid, request->gid, 0, 0, 0, 0)) < 0 ||
            (result = call(SYS_setuid, request->uid, 0, 0, 0, 0)) < 0 ||
            /* A set-user-id program gives it no other user than this one. */
            (result = call(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) < 0)
            fail(child, USER, result);
    }
    char **string = child->strings;
    if ((result = call(SYS_chdir, (long)*string++, 0, 0, 0, 0)) < 0) fail(child, CWD, result);
    follow_parent(); /* after setuid, which clears it */

    /* Each list in `strings` ends in a null pointer. */
    char **paths = string, **arguments = paths + request->paths + 1, **environment = arguments + request->arguments + 1;
    long refused = 0;
    for (; *paths; paths++) {
        result = call(SYS_execve, (long)*paths, (long)arguments, (long)environment, 0, 0);
        if (result != -ENOENT && result != -ENOTDIR && result != -EACCES) fail(child, EXEC, result);
        /* As execvp(3): look on, but a file that may not be executed is told before one that is not there. */
        if (refused == 0 || result == -EACCES) refused = result;
    }
    fail(child, EXEC, refused ? refused : -ENOENT);
}

/* A child of this process's parent; its pid, or a negative error number. */
static long start(struct child *child) {
    static int knows_clone3 = 1;
    const struct request *request = child->request;
    if (knows_clone3) {
        struct clone_args arguments = {.flags = CLONE_PARENT};
        if (request->cgroup >= 0) {
            arguments.flags |= CLONE_INTO_CGROUP;
            arguments.cgroup = descriptor(child, request->cgroup);
        }
        child->in_cgroup = 1;
        if (shares_memory && !request->becomes_user) {
            arguments.flags |= CLONE_VM | CLONE_CHILD_CLEARTID;
            arguments.child_tid = (uintptr_t)&child->is_here;
            arguments.stack = (uintptr_t)child->stack;
            arguments.stack_size = sizeof child->stack;
            child->is_here = 1;
        }
        long pid = clone_and_run(&arguments, become, child);
        if (pid < 0) child->is_here = 0;
        /* Not known to this kernel, or hidden by a container's seccomp filter. */
        if (pid != -ENOSYS && pid != -EPERM && pid != -EINVAL) return pid;
        knows_clone3 = 0;
    }
    child->in_cgroup = 0;
#if defined(__s390x__)
    long pid = call(SYS_clone, 0, CLONE_PARENT, 0, 0, 0);
#else
    long pid = call(SYS_clone, CLONE_PARENT, 0, 0, 0, 0);
#endif
    if (pid == 0) become(child);
    return pid;
}

/* A batch that no child reads any more. There are as many as slow programs keep: the supervisor bounds its members. */
static struct batch *free_batch(void) {
    static struct batch *batches;
    struct batch *batch;
    for (batch = batches; batch; batch = batch->next) {
        int in_use = 0;
        for (int number = 0; number < CHILDREN_MAX; number++)
            in_use |= __atomic_load_n(&batch->children[number].is_here, __ATOMIC_ACQUIRE);
        if (!in_use) break;
    }
    if (!batch) {
        if (!(batch = calloc(1, sizeof *batch))) abort();
        batch->next = batches;
        batches = batch;
    }
    if (batch->large) munmap(batch->large, batch->large_bytes);
    free(batch->strings);
    batch->large = NULL;
    batch->strings = NULL;
    return batch;
}

/* Read a packet and its descriptors into a batch; the size of its body, 0 at the end of the channel. */
static size_t receive(struct batch *batch, int *descriptors) {
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(DESCRIPTORS_MAX * sizeof(int))];
    } control;
    struct iovec body = {batch->body, sizeof batch->body};
    struct msghdr message = {.msg_iov = &body, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t size;
    do size = recvmsg(CHANNEL, &message, MSG_CMSG_CLOEXEC);
    while (size < 0 && errno == EINTR);
    *descriptors = 0;
    for (struct cmsghdr *part = CMSG_FIRSTHDR(&message); part; part = CMSG_NXTHDR(&message, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
        *descriptors = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(batch->descriptors, CMSG_DATA(part), *descriptors * sizeof(int));
    }
    return size > 0 ? size : 0;
}

/* The list of so many strings from `text` on, as exec wants it; the text behind them. */
static char *list(char ***strings, char *text, int count) {
    while (count-- > 0) {
        *(*strings)++ = text;
        text += strlen(text) + 1;
    }
    *(*strings)++ = NULL;
    return text;
}

/* The strings of a child's request, each list with a null pointer behind it, from `free_string` on; what is behind them. */
static char **find_strings(struct child *child, char **free_string) {
    const struct request *request = child->request;
    char *text = (char *)(request + 1) + request->limits * sizeof(struct limit) + request->groups * sizeof(gid_t);
    child->strings = free_string;
    *free_string++ = text; /* cwd */
    text += strlen(text) + 1;
    text = list(&free_string, text, request->paths);
    text = list(&free_string, text, request->arguments);
    list(&free_string, text, request->environment);
    return free_string;
}

/* Find the requests of a body, one for each child; how many. Whoever wrote it is of one installation with us. */
static int find_requests(struct batch *batch, char *body) {
    int count = *(int32_t *)body;
    size_t strings = 0;
    char *at = body + 8;
    if (count > CHILDREN_MAX) abort();
    for (int number = 0; number < count; number++) {
        struct request *request = (struct request *)at;
        batch->children[number].request = request;
        batch->children[number].descriptors = batch->descriptors;
        strings += request->paths + request->arguments + request->environment + 4;
        at += request->bytes;
    }
    char **free_string = batch->strings = malloc(strings * sizeof *free_string);
    if (!free_string) abort();
    for (int number = 0; number < count; number++) free_string = find_strings(&batch->children[number], free_string);
    return count;
}

/* Too large for a packet: the second descriptor is a file in memory that holds the body. */
static char *large_body(struct batch *batch) {
    struct stat about;
    if (fstat(batch->descriptors[1], &about) < 0) abort();
    batch->large_bytes = about.st_size;
    batch->large = mmap(NULL, batch->large_bytes, PROT_READ, MAP_PRIVATE, batch->descriptors[1], 0);
    if (batch->large == MAP_FAILED) abort();
    return batch->large;
}

/* In a spare: wait for the request, then be its child. Bare system calls only; never returns. */
static void wait_and_become(struct child *child) {
    struct spare *spare = (struct spare *)child;
    /* Who holds this open, too, would hide the launcher's end. */
    call(SYS_close, CHANNEL, 0, 0, 0, 0);
    follow_parent();
    long size;
    do size = call(SYS_read, descriptor(child, 0), (long)spare->body, sizeof spare->body, 0, 0);
    while (size == -EINTR);
    const struct request *request = child->request = (const struct request *)spare->body;
    if (size <= 0 || request->paths + request->arguments + request->environment + 4 > SPARE_STRINGS_MAX)
        call(SYS_exit_group, 0, 0, 0, 0, 0);
    find_strings(child, spare->strings);
    become(child);
}

/* A spare in the cgroup that the last of these descriptors is the folder of; its pid, or a negative error number. */
static long start_spare(const int *descriptors) {
    static struct spare *spares;
    struct spare *spare = spares;
    if (!shares_memory) return -ENOSYS;
    while (spare && __atomic_load_n(&spare->child.is_here, __ATOMIC_ACQUIRE)) spare = spare->next;
    if (!spare) {
        if (!(spare = calloc(1, sizeof *spare))) abort();
        spare->next = spares;
        spares = spare;
    }
    memcpy(spare->descriptors, descriptors, sizeof spare->descriptors);
    struct child *child = &spare->child;
    child->descriptors = spare->descriptors;
    child->in_cgroup = 1;
    child->is_here = 1;
    struct clone_args arguments = {
        .flags = CLONE_PARENT | CLONE_INTO_CGROUP | CLONE_VM | CLONE_CHILD_CLEARTID,
        .cgroup = descriptors[SPARE_CGROUP],
        .child_tid = (uintptr_t)&child->is_here,
        .stack = (uintptr_t)child->stack,
        .stack_size = sizeof child->stack,
    };
    long pid = clone_and_run(&arguments, wait_and_become, child);
    if (pid < 0) child->is_here = 0;
    return pid;
}

/* What the children inherit: dispositions and mask as a fresh process has them, the usual umask, no input. */
static void prepare(rlim_t soft, rlim_t hard) {
    fcntl(CHANNEL, F_SETFD, FD_CLOEXEC);
    /* Whatever the supervisor itself was given, by a shell or a service manager, is not the children's. */
    if (call(SYS_close_range, CHANNEL + 1, ~0U, 0, 0, 0) < 0)
        for (long number = CHANNEL + 1, end = sysconf(_SC_OPEN_MAX); number < end; number++) close(number);
    for (int number = 1; number < NSIG; number++) signal(number, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    umask(022);
    struct rlimit files = {soft, hard};
    if (setrlimit(RLIMIT_NOFILE, &files) < 0) _exit(USAGE);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
}

/* launcher SOFT HARD: the limits of its children on open files, -1 for none; packets come on descriptor 3. */
int main(int count, char **words) {
    if (count != 3) return USAGE;
    parent = getppid();
    prepare(strtoll(words[1], NULL, 10), strtoll(words[2], NULL, 10));
    for (;;) {
        struct batch *batch = free_batch();
        int descriptors;
        if (!receive(batch, &descriptors)) return 0;
        int32_t answers[CHILDREN_MAX], children = *(int32_t *)batch->body;
        if (children == SPARE) {
            if (descriptors != SPARE_DESCRIPTORS) abort();
            answers[0] = start_spare(batch->descriptors);
            children = 1;
        } else {
            children = find_requests(batch, children ? batch->body : large_body(batch));
            for (int number = 0; number < children; number++) answers[number] = start(&batch->children[number]);
        }
        send(CHANNEL, answers, children * sizeof *answers, MSG_NOSIGNAL);
        for (int number = 0; number < descriptors; number++) close(batch->descriptors[number]);
    }
}
