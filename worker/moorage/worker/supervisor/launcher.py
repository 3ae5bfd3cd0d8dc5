"""The launcher: a very small process that clones the supervisor's children, so that cloning is cheap.

The cost of a clone grows with the memory of the process that is cloned (some 60 microseconds a MiB of private
memory), so this file is run by path, with `python -I -S`, and imports nothing but what it needs. Its clones are made
with CLONE_PARENT: they are the supervisor's children, who reaps them and whose death kills them.

`launcher.c` does the same at a quarter of the price, where a C compiler is there to build it (`compiled_launcher.py`).

It reads packets from a SEQPACKET socket on the lowest descriptor after standard error. What is in a packet, and in the
answer, stands in `launcher_client.py`. A child that cannot exec writes (slot, stage, error number), 4 bytes each, in
the order of this machine, to the confirm pipe, which else closes as it execs.
"""

import _socket
import ctypes
import errno
import os
import resource
import signal
import struct
import sys

CHANNEL = 3
PACKET_BYTES_MAX = 128 * 1024
DESCRIPTORS_MAX = 64
#: one request: bytes, slot, out, err, cgroup, becomes_user, uid, gid, then how many groups, limits, paths, arguments
#: and variables. The limits follow, the groups, and as text that ends in a null: cwd, paths, arguments, variables.
REQUEST = struct.Struct("=6i2I6i")
LIMIT = struct.Struct("=3q")
STAGE_CGROUP, STAGE_LIMITS, STAGE_USER, STAGE_CWD, STAGE_EXEC = 1, 2, 3, 4, 5

_MSG_CMSG_CLOEXEC = 0x40000000
_CLONE_PARENT = 0x00008000
_CLONE_INTO_CGROUP = 0x200000000
_SYS_CLONE3 = 435
_SYS_CLONE = {"x86_64": 56, "aarch64": 220, "riscv64": 220, "loongarch64": 220, "ppc64le": 120}
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38

# PyDLL keeps the interpreter's lock, so that the child returns as its holder; nothing else runs in this process.
_libc = ctypes.PyDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_prctl = _libc.prctl


class _CloneArguments(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "flags",
            "pidfd",
            "child_tid",
            "parent_tid",
            "exit_signal",
            "stack",
            "stack_size",
            "tls",
            "set_tid",
            "set_tid_size",
            "cgroup",
        )
    ]


_arguments = _CloneArguments()
_reference = ctypes.byref(_arguments)
_size = ctypes.sizeof(_arguments)


def clone3(cgroup: int) -> int:
    """A child of this process's parent, in the cgroup of that descriptor unless it is -1. Raises `OSError`."""
    _arguments.flags = _CLONE_PARENT if cgroup < 0 else _CLONE_PARENT | _CLONE_INTO_CGROUP
    _arguments.cgroup = max(cgroup, 0)
    return _checked(_syscall(_SYS_CLONE3, _reference, _size))


def clone(number: int) -> int:
    """The same by the older call, always in this process's own cgroup. Raises `OSError`."""
    zero = ctypes.c_long(0)
    return _checked(_syscall(number, ctypes.c_long(_CLONE_PARENT), zero, zero, zero, zero))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def become(request: bytes, descriptors: list[int], confirm: int, parent: int, moved: bool) -> None:
    """In the child: put everything in place and exec. Never returns."""
    _, slot, out, err, cgroup, becomes_user, uid, gid, groups, limits, paths, argv, environ, _ = REQUEST.unpack_from(
        request
    )
    at = REQUEST.size + limits * LIMIT.size
    text = at + 4 * groups
    group_ids = struct.unpack_from(f"={groups}I", request, at)
    cwd, *words = request[text:].split(b"\0", 1 + paths + argv + environ)[:-1]
    stage = STAGE_CGROUP
    try:
        os.setsid()
        if cgroup >= 0 and not moved:
            procs = os.open("cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=descriptors[cgroup])
            os.write(procs, b"0")
        os.dup2(descriptors[out], 1)
        os.dup2(descriptors[err], 2)
        stage = STAGE_LIMITS
        for number in range(limits):
            name, soft, hard = LIMIT.unpack_from(request, REQUEST.size + number * LIMIT.size)
            resource.setrlimit(name, (soft, hard))
        stage = STAGE_USER
        if becomes_user:
            # Its output is its own to open again (/dev/stdout); what it makes is nobody else's to read.
            for descriptor in (1, 2):
                os.fchown(descriptor, uid, gid)
            os.umask(0o077)
            os.setgroups(group_ids)
            os.setgid(gid)
            os.setuid(uid)
            # A set-user-id program gives it no other user than this one.
            if _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "no_new_privs")
        stage = STAGE_CWD
        os.chdir(cwd)
        stage = STAGE_EXEC
        # After setuid, which clears it. It follows the death of the parent's spawning thread; the supervisor has one.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(127)
        refused = None
        variables = dict(word.split(b"=", 1) for word in words[paths + argv :])
        for path in words[:paths]:
            try:
                os.execve(path, words[paths : paths + argv], variables)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
                    raise
                # As execvp(3): look on, but a file that may not be executed is told before one that is not there.
                if refused is None or error.errno == errno.EACCES:
                    refused = error
        raise refused or FileNotFoundError(errno.ENOENT, "")
    except OSError as error:
        number = error.errno or errno.EIO
    except BaseException:
        number = errno.EINVAL
    try:
        os.write(confirm, struct.pack("=3i", slot, stage, number))
    finally:
        os._exit(127)


class Cloning:
    """The newer call, and from its first refusal on the older one."""

    def __init__(self) -> None:
        self._older = 0  # that call's number

    def child(self, cgroup: int) -> tuple[int, bool]:
        """(process id, whether it was born in the cgroup of that descriptor); 0 in the child. Raises `OSError`."""
        if not self._older:
            try:
                return clone3(cgroup), True
            except OSError as error:
                # Not known to this kernel, or hidden by a container's seccomp filter.
                if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
                    raise
                self._older = _SYS_CLONE.get(os.uname().machine, 0)
                if not self._older:
                    raise
        return clone(self._older), False


def prepare(soft: int, hard: int) -> None:
    """What the children inherit: signals as a fresh process has them, the usual umask and limits, no open files."""
    os.set_inheritable(CHANNEL, False)
    # Whatever the supervisor itself was given, by a shell or a service manager, is not the children's.
    os.closerange(CHANNEL + 1, os.sysconf("SC_OPEN_MAX"))
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def receive(channel: _socket.socket) -> tuple[bytes, list[int]]:
    """The next packet, with its descriptors. Ends this process where the supervisor is gone."""
    space = _socket.CMSG_SPACE(4 * DESCRIPTORS_MAX)
    data, ancillary, _, _ = channel.recvmsg(PACKET_BYTES_MAX, space, _MSG_CMSG_CLOEXEC)
    if not data:
        os._exit(0)
    descriptors = [
        int.from_bytes(raw[at : at + 4], sys.byteorder)
        for _, _, raw in ancillary
        for at in range(0, len(raw) - len(raw) % 4, 4)
    ]
    (count,) = struct.unpack_from("=i", data)
    if not count:
        # Too large for a packet: the second descriptor is a file in memory that holds it.
        with open(descriptors[1], "rb", closefd=False) as file:
            data = file.read()
    return data, descriptors


def main() -> None:
    prepare(*(int(argument) for argument in sys.argv[1:3]))
    channel = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, CHANNEL)
    parent, cloning = os.getppid(), Cloning()
    while True:
        data, descriptors = receive(channel)
        (count,) = struct.unpack_from("=i", data)
        answers = []
        at = 8
        for _ in range(count):
            size, _, _, _, cgroup = struct.unpack_from("=5i", data, at)
            request, at = data[at : at + size], at + size
            try:
                pid, moved = cloning.child(descriptors[cgroup] if cgroup >= 0 else -1)
            except OSError as error:
                answers.append(-(error.errno or errno.EAGAIN))
                continue
            if pid == 0:
                become(request, descriptors, descriptors[0], parent, moved)
            answers.append(pid)
        channel.send(struct.pack(f"={len(answers)}i", *answers))
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    main()
