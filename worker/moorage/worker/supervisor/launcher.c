/* The launcher: a small process that clones the supervisor's children, each of which becomes a job.
 *
 * They are created in their cgroup, because moving a process there takes a grace period of the kernel. They are created
 * with CLONE_PARENT, so they are children of the supervisor: it reaps them, and its death kills them.
 *
 * A message on the channel is one start: its length, in 4 bytes, and then the request, which is text with each word
 * ended by a null (`Child.request` in child.py). With it come descriptors: the pipe on which a failure is reported,
 * standard input, output and error, and the cgroup's folder if there is one, of version 2 or 1. A terminal as standard
 * input becomes the child's controlling one. The answer is the child's pid, or a negative error number, in 4 bytes. A
 * failure is reported as "STAGE ERRNO"; exec closes the pipe.
 *
 * If this file was not compiled, forked.py does the same for one start.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* CONTRACT is the exit status without arguments: by it launcher_client.py checks that the program runs here and is
 * built from this file. Raise it whenever the description above changes. */
enum { CONTRACT = 104, CANNOT_START = 127 };
enum { CONFIRM, IN, OUT, ERR, CGROUP, DESCRIPTORS_MAX };

/* Where the host runs out of memory, the kernel ends jobs before the agent and the supervisor, whatever score a service
 * manager gave those. As in forked.py. */
#define OOM_SCORE_ADJ "500"

#ifndef CLONE3
#define CLONE3 SYS_clone3
#endif

static pid_t supervisor;
static int channel, confirm;
static char *request, *next_word;

static void fail(const char *stage) {
    dprintf(confirm, "%s %d", stage, errno);
    _exit(CANNOT_START);
}

static void check(const char *stage, long result) { if (result < 0) fail(stage); }

static char *word(void) {
    char *found = next_word;
    next_word += strlen(found) + 1;
    return found;
}

static long long number(void) { return strtoll(word(), NULL, 10); }

/* Return a list in the form that exec needs; in the request its length precedes it. */
static char **words(void) {
    long long count = number();
    char **list = calloc(count + 1, sizeof *list);
    if (!list) fail("exec");
    for (long long place = 0; place < count; place++) list[place] = word();
    return list;
}

/* In a child: put everything in place and exec. Never returns. */
static void become(const int *descriptors, int moves) {
    confirm = descriptors[CONFIRM];
    close(channel);
    setsid();
    if (moves) {
        int procs = openat(descriptors[CGROUP], "cgroup.procs", O_WRONLY | O_CLOEXEC);
        check("cgroup", procs < 0 ? procs : write(procs, "0", 1));
    }
    /* Before the change of user: what root has set, a job cannot lower. */
    int score = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    /* Without /proc the score stays as it is. */
    if (score >= 0 && write(score, OOM_SCORE_ADJ, strlen(OOM_SCORE_ADJ)) < 0) errno = 0;
    close(score);
    check("cgroup", dup2(descriptors[IN], 0));
    check("cgroup", dup2(descriptors[OUT], 1));
    check("cgroup", dup2(descriptors[ERR], 2));
    if (isatty(0)) check("cgroup", ioctl(0, TIOCSCTTY, 0));
    next_word = request;

    for (long long left = number(); left > 0; left--) {
        int resource = number();
        struct rlimit limit;
        limit.rlim_cur = number();
        limit.rlim_max = number();
        check("limits", setrlimit(resource, &limit));
    }
    long long uid = number(), gid = number(), groups = number();
    gid_t *group_ids = calloc(groups + 1, sizeof *group_ids);
    if (!group_ids) fail("user");
    for (long long place = 0; place < groups; place++) group_ids[place] = number();
    if (uid >= 0) {
        /* It may reopen its streams itself (/dev/stdout). Files that it makes are private to its user. */
        umask(077);
        struct stat input;
        check("user", fstat(0, &input));
        if (S_ISFIFO(input.st_mode)) check("user", fchown(0, uid, gid));
        check("user", fchown(1, uid, gid));
        check("user", fchown(2, uid, gid));
        check("user", setgroups(groups, group_ids));
        check("user", setgid(gid));
        check("user", setuid(uid));
        /* A set-user-ID program must not give it another user. */
        check("user", prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    }
    check("cwd", chdir(word()));

    /* Set after setuid, which clears it. It is bound to the thread that made the launcher (the supervisor's main one). */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != supervisor) _exit(CANNOT_START);
    char **paths = words(), **arguments = words(), **environment = words();
    int refused = 0;
    for (; *paths; paths++) {
        execve(*paths, arguments, environment);
        if (errno != ENOENT && errno != ENOTDIR && errno != EACCES) fail("exec");
        /* As execvp(3): try the next path, but report a file that may not be executed before a missing one. */
        if (!refused || errno == EACCES) refused = errno;
    }
    errno = refused ? refused : ENOENT;
    fail("exec");
}

/* Make a child of the supervisor, in the cgroup if there is one. Return its pid, or a negative error number. */
static int32_t start(const int *descriptors, int count) {
    static int knows_clone3 = 1;
    int has_cgroup = count > CGROUP;
    long pid = -1;
    if (knows_clone3) {
        struct clone_args arguments = {.flags = CLONE_PARENT};
        if (has_cgroup) {
            arguments.flags |= CLONE_INTO_CGROUP;
            arguments.cgroup = descriptors[CGROUP];
        }
        pid = syscall(CLONE3, &arguments, sizeof arguments);
        if (pid == 0) become(descriptors, 0);
        /* Unknown to this kernel, blocked by a container's seccomp filter, or (EBADF) the group is of version 1. */
        knows_clone3 = pid > 0 || (errno != ENOSYS && errno != EPERM && errno != EINVAL && errno != EBADF);
    }
    if (!knows_clone3) {
        pid = syscall(SYS_clone, CLONE_PARENT, 0, 0, 0, 0);
        if (pid == 0) become(descriptors, has_cgroup);
    }
    return pid < 0 ? -errno : pid;
}

/* Read the next request and its descriptors. Return how many descriptors, 0 at the end of the channel. */
static int receive(int *descriptors) {
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(DESCRIPTORS_MAX * sizeof(int))];
    } control;
    uint32_t size;
    struct iovec head = {&size, sizeof size};
    struct msghdr message = {.msg_iov = &head, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (recvmsg(channel, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL) != sizeof size) return 0;
    if (!(request = realloc(request, size))) abort();
    if (recv(channel, request, size, MSG_WAITALL) != size) return 0;
    struct cmsghdr *part = CMSG_FIRSTHDR(&message);
    int count = part ? (part->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0;
    if (count) memcpy(descriptors, CMSG_DATA(part), count * sizeof(int));
    return count;
}

static void close_range_of(unsigned first, unsigned last) {
    if (first > last || syscall(SYS_close_range, first, last, 0) == 0) return;
    for (unsigned number = first, end = sysconf(_SC_OPEN_MAX); number <= last && number < end; number++) close(number);
}

/* Arguments: SUPERVISOR, the supervisor's pid, and CHANNEL, the descriptor of the channel. */
int main(int count, char **arguments) {
    if (count != 3) return CONTRACT;
    supervisor = atoi(arguments[1]);
    channel = atoi(arguments[2]);
    prctl(PR_SET_NAME, "launcher"); /* else its name would be the number of a descriptor */
    /* Its children must not inherit what a shell or a service manager gave to the supervisor. */
    close_range_of(3, channel - 1);
    close_range_of(channel + 1, ~0U);
    fcntl(channel, F_SETFD, FD_CLOEXEC);
    umask(022);
    for (int descriptors[DESCRIPTORS_MAX];;) {
        int received = receive(descriptors);
        if (received <= ERR) return 0;
        int32_t answer = start(descriptors, received);
        /* Before the answer: the supervisor reads the end of the pipe once the child is over. */
        for (int place = 0; place < received; place++) close(descriptors[place]);
        send(channel, &answer, sizeof answer, MSG_NOSIGNAL);
    }
}
