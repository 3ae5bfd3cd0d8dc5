"""A child to be started: judge the request of it, look up what it names, and put it into the launcher's words."""

import errno
import os
import pwd
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from moorage.schemas.printable import in_one_line
from moorage.worker.supervisor import launcher
from moorage.worker.supervisor.protocol import KEY_CHARS_MAX, StartMember

SEARCH_PATH_DEFAULT: Final = "/usr/local/bin:/usr/bin:/bin"
SECONDS_MAX: Final = 10 * 365 * 86400.0
OUTPUT_CAP_BYTES_MAX: Final = 1 << 40
UID_NONE: Final = (1 << 32) - 1
"""What the kernel takes for no uid at all."""
TOLD_CHARS_MAX: Final = 60
"""Of a program, a folder or a PATH in the words for people; all of them together fit a fact's detail."""
_KEY_CHARS: Final = f"key must have 1..{KEY_CHARS_MAX} characters"
_NULL: Final = "argv, env and cwd may not hold a null character"
_ENCODING: Final = sys.getfilesystemencoding()
_ENCODING_ERRORS: Final = sys.getfilesystemencodeerrors()
_LIMITS: Final = {
    name.removeprefix("RLIMIT_"): value for name, value in vars(resource).items() if name.startswith("RLIMIT_")
}

Ids: TypeAlias = tuple[int, int, list[int]]
Request: TypeAlias = bytes


class StartRefused(Exception):
    """A child cannot be started: `errno`, the `stage` that failed, and a message for people."""

    def __init__(self, number: int, stage: str, message: str) -> None:
        super().__init__(message)
        self.errno = number
        self.stage = stage
        self.message = message


@dataclass(frozen=True, slots=True)
class Child:
    """A judged request, in the types that exec wants."""

    paths: list[bytes]
    argv: list[bytes]
    environ: bytes
    """Its `variables` in one, with a null between two."""
    variables: int
    search: str
    """Its PATH."""
    cwd: bytes
    ids: Ids | None
    limits: list[tuple[int, tuple[int, int]]]

    def request(self, slot: int, stdout: int, stderr: int, cgroup: int) -> Request:
        """What the launcher reads; the last three are places in the packet's list of descriptors, -1 for none."""
        uid, gid, groups = self.ids or (0, 0, [])
        counts = (len(groups), len(self.limits), len(self.paths), len(self.argv), self.variables, 0)
        environ = (self.environ,) if self.variables else ()
        body = b"".join(
            (
                *(launcher.LIMIT.pack(number, *pair) for number, pair in self.limits),
                struct.pack(f"={len(groups)}I", *groups),
                b"\0".join((self.cwd, *self.paths, *self.argv, *environ, b"")),
            )
        )
        padding = -len(body) % 8
        size = launcher.REQUEST.size + len(body) + padding
        head = (size, slot, stdout, stderr, cgroup, self.ids is not None, uid, gid, *counts)
        return launcher.REQUEST.pack(*head) + body + bytes(padding)


def judge(member: StartMember, environ: Mapping[str, str] | None = None) -> Child:
    """Check one request and look up what it names; `environ` is what it gets in the place of its own.

    Raises `StartRefused`; the file system is not touched.
    """
    if environ is None:
        environ = member.env
    _check(0 < len(member.key) <= KEY_CHARS_MAX, "request", _KEY_CHARS)
    _check(bool(member.argv) and bool(member.argv[0]), "exec", "argv must begin with the name of a program")
    _check(_is_duration(member.grace_s), "request", "grace_s must be a duration in seconds")
    _check(member.timeout_s is None or _is_duration(member.timeout_s), "request", "timeout_s must be a duration")
    _check(member.ends_in_s is None or _is_duration(member.ends_in_s), "request", "ends_in_s must be a duration")
    _check(0 <= member.output_cap_bytes <= OUTPUT_CAP_BYTES_MAX, "request", "output_cap_bytes out of bounds")
    _check(member.cpu_milli is None or member.cpu_milli > 0, "request", "cpu_milli must be above 0")
    _check(member.memory_bytes is None or member.memory_bytes > 0, "request", "memory_bytes must be above 0")
    if member.checkpoint_signal is not None:
        signal_number(member.checkpoint_signal)
        before_s = member.checkpoint_before_s
        fine = before_s is not None and _is_duration(before_s)
        _check(fine, "request", "checkpoint_signal needs checkpoint_before_s")
    for name in environ:
        if not name or "=" in name:
            raise StartRefused(errno.EINVAL, "request", f"not a name of a variable: {name!r}")
    try:
        argv = [_bytes(argument) for argument in member.argv]
        variables = _block(environ)
        cwd = _bytes(member.cwd) if member.cwd is not None else b"/"
    except ValueError as error:
        raise StartRefused(errno.EINVAL, "request", str(error)) from None
    search = environ.get("PATH", SEARCH_PATH_DEFAULT)
    return Child(
        paths=_paths(argv[0], search),
        argv=argv,
        environ=variables,
        variables=len(environ),
        search=search,
        cwd=cwd,
        ids=None if member.user is None else _resolve_user(member.user),
        limits=[_limit(name, pair) for name, pair in member.limits.items()],
    )


def why_not(child: Child, stage: str, number: int) -> str:
    """What a child that could not exec was looking for, and where: one line for people.

    The file system is not asked again: a job may have mounted what never answers.
    """
    cwd, program = _told(child.cwd), _told(child.argv[0])
    is_absent = number in (errno.ENOENT, errno.ENOTDIR)
    if stage == "cwd":
        return f"no folder {cwd}" if is_absent else f"folder {cwd}: {os.strerror(number)}"
    if stage != "exec":
        return os.strerror(number)
    if not is_absent:
        return f"{program}: {os.strerror(number)}"
    if b"/" in child.argv[0]:
        where = "on the worker" if child.argv[0].startswith(b"/") else f"in {cwd} (--cwd names the folder)"
        why = f"no {program} {where}, or not what its first line names"
    else:
        why = f"no program {program} in PATH {_told(child.search.encode(_ENCODING, _ENCODING_ERRORS))}"
    if len(child.argv) == 1 and b" " in child.argv[0]:
        why += "; it is one word: leave the quotes out, or use sh -c"
    return why


def _told(text: bytes) -> str:
    """In one line, cut, and in quotes where a blank would make it look like two."""
    line = in_one_line(text.decode(_ENCODING, "replace"))
    line = line if len(line) <= TOLD_CHARS_MAX else f"{line[: TOLD_CHARS_MAX - 1]}…"
    return f"'{line}'" if " " in line or not line else line


def signal_number(name: str) -> signal.Signals:
    """The signal called `SIGUSR1` or the like. Raises `StartRefused`."""
    try:
        number = signal.Signals[name]
    except KeyError:
        raise StartRefused(errno.EINVAL, "request", f"no such signal: {name}") from None
    _check(number not in (signal.SIGKILL, signal.SIGSTOP), "request", f"no process can take {name}")
    return number


def _check(fine: bool, stage: str, message: str) -> None:
    if not fine:
        raise StartRefused(errno.EINVAL, stage, message)


def _is_duration(seconds: float) -> bool:
    return 0 <= seconds <= SECONDS_MAX


def _block(environ: Mapping[str, str]) -> bytes:
    text = "\0".join([f"{name}={value}" for name, value in environ.items()])
    if text.count("\0") > max(0, len(environ) - 1):
        raise ValueError(_NULL)
    return text.encode(_ENCODING, _ENCODING_ERRORS)


def _bytes(text: str) -> bytes:
    if "\0" in text:
        raise ValueError(_NULL)
    return text.encode(_ENCODING, _ENCODING_ERRORS)  # os.fsencode, which takes thrice as long over its arguments' types


def _paths(program: bytes, search: str) -> list[bytes]:
    if b"/" in program:
        return [program]
    return [os.path.join(folder or b".", program) for folder in os.fsencode(search).split(b":")]


def _limit(name: str, pair: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    number = _LIMITS.get(name.upper())
    if number is None:
        raise StartRefused(errno.EINVAL, "limits", f"no such limit: {name} (known: {', '.join(sorted(_LIMITS))})")
    _check(all(-1 <= value < 1 << 63 for value in pair), "limits", f"limit {name} out of bounds")
    return number, pair


def _resolve_user(user: str | int) -> Ids | None:
    try:
        entry = pwd.getpwnam(user) if isinstance(user, str) and not user.isdecimal() else pwd.getpwuid(int(user))
    except KeyError:
        if isinstance(user, str) and not user.isdecimal():
            raise StartRefused(errno.EINVAL, "user", f"no such user: {user}") from None
        uid = int(user)
        if not 0 <= uid < UID_NONE:
            raise StartRefused(errno.EINVAL, "user", f"not a uid: {user}") from None
        # A uid without an entry gets the group of its own number and no other, never group 0.
        ids = (uid, uid, [uid])
    except (OverflowError, ValueError):
        raise StartRefused(errno.EINVAL, "user", f"not a uid: {user}") from None
    else:
        ids = (entry.pw_uid, entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid))
    # An unprivileged supervisor may start jobs of its own user, but may not call setgroups.
    return None if os.geteuid() != 0 and ids[0] == os.geteuid() else ids
