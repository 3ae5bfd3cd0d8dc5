"""Check the request for a child, look up what it names, and encode it for the launcher."""

import errno
import os
import pwd
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from moorage.schemas.printable import in_one_line
from moorage.worker.supervisor.protocol import KEY_CHARS_MAX, StartAttempt

SEARCH_PATH_DEFAULT: Final = "/usr/local/bin:/usr/bin:/bin"
SECONDS_MAX: Final = 10 * 365 * 86400.0
OUTPUT_CAP_BYTES_MAX: Final = 1 << 40
#: the uid that the kernel uses for "no uid"
UID_NONE: Final = (1 << 32) - 1
#: most characters of a program, folder or PATH in a message; all of them together fit a report's detail
TOLD_CHARS_MAX: Final = 60
#: the same of a PATH, beside which the advice has to stay whole in a record's notes
PATH_CHARS_MAX: Final = 40
#: the worker's own `moorage`, which a job runs as `moorage` where its PATH has none: its members of services need one
OWN: Final = os.fsencode(os.path.join(os.path.dirname(sys.executable), "moorage"))
_ENCODING: Final = sys.getfilesystemencoding()
_ENCODING_ERRORS: Final = sys.getfilesystemencodeerrors()


@dataclass(eq=False)
class StartRefused(Exception):
    """A child cannot be started: `errno`, the `stage` that failed, and a readable message."""

    errno: int
    stage: str
    message: str


@dataclass(frozen=True, slots=True)
class Child:
    """A checked request, in the types that exec needs."""

    paths: list[bytes]
    argv: list[bytes]
    environ: list[bytes]
    search: str
    """Its PATH."""
    cwd: bytes
    ids: tuple[int, int, list[int]] | None
    limits: list[tuple[int, tuple[int, int]]]

    def request(self) -> bytes:
        """Return the bytes that launcher.c reads: words, each ended by a null; each list is preceded by its length.

        Limits, uid (-1: no other user), gid, groups, folder, the paths to try, arguments, environment.
        """
        uid, gid, groups = self.ids or (-1, -1, [])
        limits = [part for number, pair in self.limits for part in (number, *pair)]
        head = "\0".join(map(str, (len(self.limits), *limits, uid, gid, len(groups), *groups))).encode()
        lists = [word for each in (self.paths, self.argv, self.environ) for word in (str(len(each)).encode(), *each)]
        return b"\0".join((head, self.cwd, *lists, b""))


def checked_child(
    attempt: StartAttempt, environ: Mapping[str, str] | None = None, files: tuple[int, int] | None = None
) -> Child:
    """Return the child that a request asks for, with its user and signal looked up. Raises `StartRefused`.

    Neither its program nor its folder is looked for.
    `environ` replaces the request's own environment. `files` are its limits on open files.
    """
    environ = attempt.env if environ is None else environ
    _check(0 < len(attempt.key) <= KEY_CHARS_MAX, "request", f"key must have 1..{KEY_CHARS_MAX} characters")
    _check(bool(attempt.argv) and bool(attempt.argv[0]), "exec", "argv must begin with the name of a program")
    check_end(attempt)
    _check(0 <= attempt.output_cap_bytes <= OUTPUT_CAP_BYTES_MAX, "request", "output_cap_bytes out of bounds")
    for name in ("cpu_milli", "memory_bytes"):
        amount = getattr(attempt, name)
        _check(amount is None or amount > 0, "request", f"{name} must be above 0")
    variables = []
    try:
        for name, value in environ.items():
            if not name or "=" in name:
                raise StartRefused(errno.EINVAL, "request", f"not a name of a variable: {name!r}")
            variables.append(_bytes(f"{name}={value}"))
        argv = [_bytes(argument) for argument in attempt.argv]
        cwd = _bytes(attempt.cwd) if attempt.cwd is not None else b"/"
    except ValueError as error:
        raise StartRefused(errno.EINVAL, "request", str(error)) from None
    search = environ.get("PATH", SEARCH_PATH_DEFAULT)
    return Child(
        paths=_paths(argv[0], search),
        argv=argv,
        environ=variables,
        search=search,
        cwd=cwd,
        ids=None if attempt.user is None else resolve_user(attempt.user),
        limits=[] if files is None else [(resource.RLIMIT_NOFILE, files)],
    )


def reported_failure(child: Child, report: bytes) -> StartRefused:
    """Return why a child's program does not run, by what its process has written to the pipe: "STAGE ERRNO"."""
    stage, number = report.decode("ascii").split()
    return StartRefused(int(number), stage, why_not(child, stage, int(number)))


def why_not(child: Child, stage: str, number: int) -> str:
    """Return one readable line about a start that failed at this stage with this error number.

    The file system is not asked again, because a job may have mounted one that never answers.
    """
    cwd, program = _one_line(child.cwd), _one_line(child.argv[0])
    is_absent = number in (errno.ENOENT, errno.ENOTDIR)
    if stage == "cwd":
        return f"no folder {cwd}" if is_absent else f"folder {cwd}: {os.strerror(number)}"
    if stage != "exec":
        return os.strerror(number)
    if number == errno.ENOEXEC:
        return (
            f"{program} has no first line as #!/bin/sh, or is for another processor; a script of a shell runs as"
            f" sh {program}"
        )
    if not is_absent:
        return f"{program}: {os.strerror(number)}"
    if b"/" in child.argv[0]:
        where = (
            "on the worker"
            if child.argv[0].startswith(b"/")
            else f"in {cwd} (--with brings files there, --cwd names another folder)"
        )
        why = f"no {program} {where}, or not what its first line names (without CR LF)"
    else:
        searched = f"in PATH {_one_line(child.search.encode(_ENCODING, _ENCODING_ERRORS), PATH_CHARS_MAX)}"
        why = f"no program {program} {searched}"
        if child.argv[0] == b"python":  # the end of a long text is cut, as it passes the scheduler
            why = f"no program python: name python3, or an environment's python by its path; it is not {searched}"
    if len(child.argv) == 1 and b" " in child.argv[0]:
        why += "; it is one word: leave the quotes out, or use sh -c"
    return why


def _one_line(text: bytes, most: int = TOLD_CHARS_MAX) -> str:
    """Return text in one line, only the end of a long one, and quoted if it has a blank."""
    line = in_one_line(text.decode(_ENCODING, "replace"))
    line = line if len(line) <= most else f"…{line[1 - most :]}"
    return f"'{line}'" if " " in line or not line else line


def check_end(attempt: StartAttempt) -> None:
    """Check what says when and how an attempt ends: its times and its checkpoint signal. Raises `StartRefused`."""
    for name in ("grace_s", "timeout_s", "ends_in_s", "checkpoint_before_s"):
        seconds = getattr(attempt, name)
        _check(seconds is None or 0 <= seconds <= SECONDS_MAX, "request", f"{name} must be a duration in seconds")
    if attempt.checkpoint_signal is not None:
        signal_number(attempt.checkpoint_signal)
        _check(attempt.checkpoint_before_s is not None, "request", "checkpoint_signal needs checkpoint_before_s")


def signal_number(name: str) -> signal.Signals:
    """Return the signal with a name such as `SIGUSR1`. Raises `StartRefused` for others, SIGKILL and SIGSTOP."""
    number = signal.Signals.__members__.get(name)
    if number is None:
        raise StartRefused(errno.EINVAL, "request", f"no such signal: {name}")
    _check(number not in (signal.SIGKILL, signal.SIGSTOP), "request", f"no process can take {name}")
    return number


def _check(fine: bool, stage: str, message: str) -> None:
    if not fine:
        raise StartRefused(errno.EINVAL, stage, message)


def _bytes(text: str) -> bytes:
    if "\0" in text:
        raise ValueError("argv, env and cwd may not hold a null character")
    return text.encode(_ENCODING, _ENCODING_ERRORS)  # faster than os.fsencode, which checks its argument's type


def _paths(program: bytes, search: str) -> list[bytes]:
    if b"/" in program:
        return [program]
    paths = [os.path.join(folder or b".", program) for folder in os.fsencode(search).split(b":")]
    return [*paths, OWN] if program == b"moorage" else paths


def resolve_user(user: str | int) -> tuple[int, int, list[int]] | None:
    """Return uid, gid and groups; None if the user is the supervisor's own and the supervisor is not root.

    Raises `StartRefused` for a name without an entry, or a number that is no uid.
    """
    try:
        entry = pwd.getpwnam(user) if isinstance(user, str) and not user.isdecimal() else pwd.getpwuid(int(user))
    except KeyError:
        _check(isinstance(user, int) or user.isdecimal(), "user", f"no such user: {user}")
        uid = int(user)
        _check(0 <= uid < UID_NONE, "user", f"not a uid: {user}")
        # A uid without an entry gets the group of the same number and no other group, never group 0.
        ids = (uid, uid, [uid])
    except (OverflowError, ValueError):
        raise StartRefused(errno.EINVAL, "user", f"not a uid: {user}") from None
    else:
        ids = (entry.pw_uid, entry.pw_gid, os.getgrouplist(entry.pw_name, entry.pw_gid))
    # An unprivileged supervisor may start jobs of its own user, but may not call setgroups.
    return None if os.geteuid() != 0 and ids[0] == os.geteuid() else ids
