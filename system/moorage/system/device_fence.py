"""Have the kernel refuse character devices to the processes of a cgroup.

In a cgroup of version 2 the kernel asks a program of type BPF_PROG_TYPE_CGROUP_DEVICE at each open and mknod; it needs
no controller, so it also works in a hierarchy without any. It takes root, or CAP_BPF and CAP_NET_ADMIN. Where only
version 1 is mounted, the controller `devices` does the same. Both refuse with EPERM. Neither takes back a
descriptor that is open already, or that another process hands over. Sources: bpf(2); linux/bpf.h; the kernel's
Documentation/admin-guide/cgroup-v1/devices.rst.
"""

import asyncio
import contextlib
import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from moorage.system.cgroup import CgroupFolder, cgroup_of

_MINOR_BITS: Final = 20
MINOR_MAX: Final = (1 << _MINOR_BITS) - 1
"""The greatest minor number of a device."""
MAJOR_MAX: Final = 511
"""The greatest major number that the kernel gives to character devices."""
RANGES_MAX: Final = 512
"""Most ranges of one fence: the program stays below the 4,096 instructions that every kernel takes."""
WRITES_MAX: Final = 5000
"""Most numbers of one fence in version 1, which takes them one by one (a whole major is one).

More would hold up the caller for a tenth of a second and longer.
"""

_SYSCALL: Final = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD: Final = 5
_PROG_ATTACH: Final = 8
_PROG_TYPE_CGROUP_DEVICE: Final = 15
_CGROUP_DEVICE: Final = 6
_ALLOW_MULTI: Final = 2
_CHARACTER: Final = 2
_ATTR_BYTES: Final = 128

# instructions: the class and operation, as in linux/bpf_common.h and linux/bpf.h
_LOAD_WORD: Final = 0x61
_AND: Final = 0x57
_MOVE: Final = 0xB7
_IF_NOT_EQUAL: Final = 0x55
_IF_LESS: Final = 0xA5
_IF_AT_MOST: Final = 0xB5
_SHIFT_LEFT: Final = 0x67
_OR_REGISTER: Final = 0x4F
_EXIT: Final = 0x95


class NodeRange(NamedTuple):
    """Character devices by number: one major, and the minors from `first` to `last`, both included."""

    major: int
    first: int = 0
    last: int = MINOR_MAX


class DeviceFences(Protocol):
    """Where a process's device nodes can be refused on this host."""

    kind: str
    """`cgroup2` or `cgroup1`."""

    def close(self, folder: CgroupFolder | None, name: str, refused: Sequence[NodeRange]) -> CgroupFolder | None:
        """Refuse these devices to a member, of which `folder` is the cgroup of version 2, before it has a process.

        Return the group of version 1 that was made for this; the member's process must be moved there, and the group
        removed when it is empty. None if `folder` itself is closed. Raises `OSError`, and then leaves no group.
        """
        ...


class ProgramFences:
    """Fences by device programs, each attached to a member's own cgroup of version 2. It goes with that cgroup."""

    kind = "cgroup2"

    def close(self, folder: CgroupFolder | None, name: str, refused: Sequence[NodeRange]) -> None:
        if folder is None:
            raise OSError(errno.ENOENT, "the member has no cgroup to attach the device program to")
        attach(folder.path, refused)


class ControllerFences:
    """Fences by the controller `devices` of version 1, in groups below one of our own."""

    kind = "cgroup1"

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def open(cls, name: str) -> "ControllerFences":
        """Make or find the group `name` below this process's own, and remove empty ones in it. Raises `OSError`."""
        own = own_devices_group()
        if own is None:
            raise OSError(errno.ENOENT, "no hierarchy of cgroup version 1 with the controller devices is mounted")
        path = str(own / name)
        os.makedirs(path, 0o755, exist_ok=True)
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                CgroupFolder(entry.path).remove_empty()
        return cls(path)

    def close(self, folder: CgroupFolder | None, name: str, refused: Sequence[NodeRange]) -> CgroupFolder:
        group = CgroupFolder(f"{self.path}/{name}")
        os.mkdir(group.path, 0o755)
        try:
            deny(group.path, refused)
        except OSError:
            group.remove_empty()
            raise
        return group

    def remove(self) -> None:
        """Remove the group of all members, if it is empty."""
        CgroupFolder(self.path).remove_empty()


def fences_here(name: str, base: CgroupFolder | None) -> tuple[ProgramFences | ControllerFences | None, str]:
    """Return how devices can be refused here, and why they cannot if it is None. It is tried, and nothing is left.

    `base` is the group of version 2 in which members get theirs, None without one; `name` names ours in version 1.
    """
    trial = (NodeRange(195, 0, 0),)
    try:
        if base is None:
            fences = ControllerFences.open(name)
            fences.close(None, "trial", trial).remove_empty()
            return fences, ""
        folder = CgroupFolder(f"{base.path}/trial")
        os.makedirs(folder.path, 0o755, exist_ok=True)
        try:
            attach(folder.path, trial)
        finally:
            folder.remove_empty()
    except OSError as error:
        return None, f"{error.strerror or error}"
    return ProgramFences(), ""


# ---------------------------------------------------------------------------------------------------- version 2


def attach(folder: str, refused: Sequence[NodeRange]) -> None:
    """Refuse these character devices to a cgroup of version 2 and all below it, until the cgroup is removed.

    Programs of the groups above hold as before. Raises `OSError`.
    """
    code = program(refused)
    buffer, words = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"Apache-2.0")
    load = struct.pack("=IIQQ", _PROG_TYPE_CGROUP_DEVICE, len(code) // 8, *map(ctypes.addressof, (buffer, words)))
    try:
        with _unlimited_locked_memory():
            loaded = _bpf(_PROG_LOAD, load)
    except OSError as error:
        raise OSError(error.errno, f"the kernel does not load a device program: {error.strerror}") from None
    try:
        group = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _bpf(_PROG_ATTACH, struct.pack("=IIII", group, loaded, _CGROUP_DEVICE, _ALLOW_MULTI))
        except OSError as error:
            raise OSError(
                error.errno, f"the kernel does not attach a device program to {folder}: {error.strerror}"
            ) from None
        finally:
            os.close(group)
    finally:
        os.close(loaded)  # the cgroup holds it


@contextlib.contextmanager
def _unlimited_locked_memory() -> Iterator[None]:
    """Lift the limit to which kernels before 5.11 count programs: its default is used up after a few."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (OSError, ValueError):  # newer kernels count the memory of the cgroup instead
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def program(refused: Sequence[NodeRange]) -> bytes:
    """Return the instructions of a program that refuses these character devices and allows all other devices.

    Raises `OSError` for more than `RANGES_MAX`, or a number out of bounds.
    """
    _check(refused)
    ranges = merged(refused)
    count, skipped = len(ranges), iter(range(2 * len(ranges) - 1, -1, -1))
    head = [
        _instruction(_LOAD_WORD, 2, 1, 0),  # access_type: the kind of device is in its lower half
        _instruction(_AND, 2, value=0xFFFF),
        _instruction(_LOAD_WORD, 3, 1, 4),  # major
        _instruction(_SHIFT_LEFT, 3, value=_MINOR_BITS),
        _instruction(_LOAD_WORD, 4, 1, 8),  # minor
        _instruction(_OR_REGISTER, 3, 4),
        _instruction(_MOVE, 0, value=1),
        _instruction(_IF_NOT_EQUAL, 2, skip=2 * count, value=_CHARACTER),
    ]
    body = []
    for each in ranges:  # in order, so that the kernel's check of the program has one way on from each, not many
        body += [
            _instruction(_IF_LESS, 3, skip=next(skipped), value=_number(each.major, each.first)),
            _instruction(_IF_AT_MOST, 3, skip=1 + next(skipped), value=_number(each.major, each.last)),
        ]
    refuse = [_instruction(_MOVE, 0, value=0), _instruction(_EXIT)]
    return b"".join([*head, *body, _instruction(_EXIT), *refuse])


def merged(refused: Iterable[NodeRange]) -> list[NodeRange]:
    """Return the ranges in order, with those that overlap or touch as one."""
    found: list[NodeRange] = []
    for each in sorted(refused):
        if found and found[-1].major == each.major and each.first <= found[-1].last + 1:
            found[-1] = NodeRange(each.major, found[-1].first, max(found[-1].last, each.last))
        else:
            found.append(each)
    return found


def _number(major: int, minor: int) -> int:
    return major << _MINOR_BITS | minor


def _instruction(code: int, target: int = 0, source: int = 0, skip: int = 0, value: int = 0) -> bytes:
    """Return one instruction. `skip` is how many to jump over, or the offset of what is loaded."""
    return struct.pack("=BBhi", code, source << 4 | target, skip, value)


def _bpf(command: int, attributes: bytes) -> int:
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"the number of bpf(2) on {platform.machine()} is not known here")
    buffer = ctypes.create_string_buffer(attributes, _ATTR_BYTES)
    found = int(_libc.syscall(number, command, buffer, _ATTR_BYTES))
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


_libc: Final = ctypes.CDLL(None, use_errno=True)


# ---------------------------------------------------------------------------------------------------- version 1


def own_devices_group() -> Path | None:
    """Return the folder of this process's own group in the hierarchy with the controller `devices`; None without it."""
    return cgroup_of(controller="devices")


#: enters groups, then opens a file; the shell says why it cannot
_OPENS: Final = 'node=$1; shift; for group; do echo 0 >"$group/cgroup.procs" || exit 3; done; exec 3<"$node"'
_OPEN_S: Final = 10.0


async def is_refused(pid: int, node: str) -> bool:
    """Return whether the kernel refuses a device node of this host to the cgroups of a process, where that can be seen.

    It is tried by a short-lived process in those cgroups, so this process must be root; else the answer is False.
    """
    groups = [cgroup_of(pid, "devices"), cgroup_of(pid)]
    words = [str(group) for group in groups if group is not None]
    if not words or not os.path.exists(node):
        return False
    try:
        tried = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", _OPENS, "sh", node, *words, env={"LC_ALL": "C"},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError:
        return False
    try:
        async with asyncio.timeout(_OPEN_S):
            _, said = await tried.communicate()
    except TimeoutError:
        tried.kill()
        return False
    return tried.returncode not in (0, 3) and os.strerror(errno.EPERM).encode() in said


def deny(folder: str, refused: Sequence[NodeRange]) -> None:
    """Refuse these character devices to a group of version 1. Raises `OSError`.

    A group that is already limited to a list of devices is not supported: the kernel ignores there what is not in the
    list in the same words.
    """
    _check(refused)
    if Path(folder, "devices.list").read_text().split() != ["a", "*:*", "rwm"]:
        raise OSError(errno.EPERM, f"{folder} is limited to a list of devices already")
    words = list(_words(merged(refused)))
    if len(words) > WRITES_MAX:
        raise OSError(errno.E2BIG, f"{len(words)} devices to refuse, version 1 of cgroups takes at most {WRITES_MAX}")
    descriptor = os.open(f"{folder}/devices.deny", os.O_WRONLY | os.O_CLOEXEC)
    try:
        for each in words:
            os.write(descriptor, each)
    finally:
        os.close(descriptor)


def _words(refused: Iterable[NodeRange]) -> Iterable[bytes]:
    for major, first, last in refused:
        if (first, last) == (0, MINOR_MAX):
            yield b"c %d:* rwm" % major
        elif last - first >= WRITES_MAX:
            raise OSError(errno.E2BIG, f"devices {major}:{first}-{last}: version 1 of cgroups takes them one by one")
        else:
            yield from (b"c %d:%d rwm" % (major, minor) for minor in range(first, last + 1))


def _check(refused: Sequence[NodeRange]) -> None:
    if len(refused) > RANGES_MAX:
        raise OSError(errno.E2BIG, f"{len(refused)} ranges of devices to refuse, at most {RANGES_MAX}")
    for each in refused:
        if not (0 <= each.major <= MAJOR_MAX and 0 <= each.first <= each.last <= MINOR_MAX):
            raise OSError(errno.EINVAL, f"not a range of devices: {each.major}:{each.first}-{each.last}")
