/* The first program of a container whose job has secrets. An engine shows a container's variables to its users, so the
 * secrets come in a file instead:
 *
 *     entry FILE PROGRAM [ARGUMENT...]
 *
 * FILE has entries NAME=VALUE, each ended by a null, which become variables. Then PROGRAM, searched in PATH, replaces
 * this program in the same process (exec). This program is linked statically, so that it runs in an image without
 * libraries. container_entry.py mounts it.
 */

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* CONTRACT is the exit status without arguments: raise it whenever the description above changes. */
enum { CONTRACT = 101, CANNOT_START = 126, NOT_FOUND = 127 };

static int refuse(const char *what) {
    int code = errno == ENOENT ? NOT_FOUND : CANNOT_START;
    fprintf(stderr, "moorage: cannot start %s: %s\n", what, strerror(errno));
    return code;
}

int main(int count, char **arguments) {
    if (count < 3) return CONTRACT;
    int file = open(arguments[1], O_RDONLY | O_CLOEXEC);
    struct stat about;
    if (file < 0 || fstat(file, &about) < 0) return refuse(arguments[1]);
    /* One null more than the file has, so that the last variable always ends. */
    char *text = calloc(about.st_size + 1, 1);
    if (!text) return refuse(arguments[1]);
    for (off_t have = 0; have < about.st_size;) {
        ssize_t more = read(file, text + have, about.st_size - have);
        if (more < 0) return refuse(arguments[1]);
        if (more == 0) break;
        have += more;
    }
    for (char *variable = text; variable < text + about.st_size; variable += strlen(variable) + 1)
        if (putenv(variable) < 0) return refuse(arguments[1]);
    execvp(arguments[2], arguments + 2);
    return refuse(arguments[2]);
}
