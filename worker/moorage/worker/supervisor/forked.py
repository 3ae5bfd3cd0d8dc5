"""Start a child without the compiled launcher: a fork of the supervisor does the same as launcher.c, but slower."""

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import signal
import stat
import termios
from typing import Final, NoReturn

from moorage.system.proctree import PR_SET_PDEATHSIG
from moorage.worker.supervisor.child import Child

CANNOT_START: Final = 127
OOM_SCORE_ADJ: Final = b"500"
"""As in launcher.c."""
_PR_SET_NO_NEW_PRIVS: Final = 38
_libc: Final = ctypes.CDLL(None, use_errno=True)


def start(child: Child, confirm: int, stdin: int, stdout: int, stderr: int, cgroup: int = -1) -> int:
    """Make the process and return its pid. Descriptors are as in launcher.c, -1 is no cgroup. Raises `OSError`."""
    supervisor = os.getpid()
    # Until exec, a signal to the child would run this process's handlers there and wake this process's loop.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become(child, supervisor, confirm, (stdin, stdout, stderr), cgroup)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become(child: Child, supervisor: int, confirm: int, streams: tuple[int, int, int], cgroup: int) -> NoReturn:
    stage = "cgroup"
    number = errno.EINVAL
    try:
        os.setsid()
        for descriptor, source in enumerate(streams):
            os.dup2(source, descriptor)
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        first = 3
        for kept in sorted({confirm, cgroup} - {-1}):  # a child that hangs before exec must keep no lock or socket open
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        if cgroup >= 0:
            os.write(os.open("cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=cgroup), b"0")
        with contextlib.suppress(OSError):
            os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC), OOM_SCORE_ADJ)
        for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(each, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.umask(0o022)
        stage = "limits"
        for limit, pair in child.limits:
            resource.prlimit(0, limit, pair)
        stage = "user"
        if child.ids is not None:
            uid, gid, groups = child.ids
            # It may reopen its streams itself (/dev/stdout). Files that it makes are private to its user.
            os.umask(0o077)
            for descriptor in (0, 1, 2) if stat.S_ISFIFO(os.fstat(0).st_mode) else (1, 2):
                os.fchown(descriptor, uid, gid)
            os.setgroups(groups)
            os.setgid(gid)
            os.setuid(uid)
            # A set-user-ID program must not give it another user.
            if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "no_new_privs")
        stage = "cwd"
        os.chdir(child.cwd)
        stage = "exec"
        # Set after setuid, which clears it. It is bound to the thread that forked: the supervisor's main thread.
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(CANNOT_START)
        environ = dict(entry.split(b"=", 1) for entry in child.environ)
        refused = 0
        for path in child.paths:
            try:
                os.execve(path, child.argv, environ)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
                    raise
                # As execvp(3): try the next path, but report a file that may not be executed before a missing one.
                if not refused or error.errno == errno.EACCES:
                    refused = error.errno
        number = refused or errno.ENOENT
    except OSError as error:
        number = error.errno or errno.EIO
    finally:
        os.write(confirm, f"{stage} {number}".encode())
        os._exit(CANNOT_START)
