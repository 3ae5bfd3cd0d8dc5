"""Frames of a command that is run in a running job: the question, its answer, and the bytes between caller and worker.

The bytes travel on two subjects of a *stream*, `moorage.tty.<tenant>.<worker>.<stream>.in` and `.out`. A message there
is one byte that says what it is (`Mark`), then 8 bytes (the highest first) with an offset, then the rest. Offsets count
the bytes of one direction; standard output and standard error are counted together. A receiver that sees a gap ends the
stream, so no byte is lost unseen. The sender keeps at most `WINDOW_BYTES` that the receiver has not acknowledged.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import Annotated, Final

import msgspec

from moorage.schemas.ranges import NUMBERS_MAX

#: most bytes of one direction that are sent and not acknowledged
WINDOW_BYTES: Final = 256 * 1024
#: most bytes of output or input in one message
PIECE_BYTES_MAX: Final = 128 * 1024
#: each end says at least so often that it is there
BEAT_S: Final = 2.0
#: and is over for the other one after so much silence
DEAD_S: Final = 10.0
COMMAND_WORDS_MAX: Final = 1024
COMMAND_CHARS_MAX: Final = 64 * 1024
#: rows and columns of a terminal
CELLS_MAX: Final = 65535
_HEAD: Final = struct.Struct(">cQ")


class Mark(Enum):
    """What a message of a stream is. `in`: sent by the caller; `out`: sent by the worker; others by both."""

    READY = b"r"  # out: the worker listens, and waits for GO
    GO = b"g"  # in: the caller listens; the rest is `Terminal` as JSON, with zeros where it has no terminal
    STARTED = b"s"  # out: the command runs
    INPUT = b"i"  # in: bytes for standard input
    EOF = b"f"  # in: the end of standard input; the rest is one byte, which counts
    OUT = b"o"  # out: bytes of standard output
    ERR = b"e"  # out: bytes of standard error
    SIZE = b"w"  # in: the terminal's new size, `Terminal` as JSON
    SIGNAL = b"k"  # in: the name of a signal for the command, such as INT
    LEAVE = b"q"  # in: the caller goes, and the command is to end
    DETACH = b"d"  # in: the caller of `attach` leaves the terminal by its own will: its input stays open
    ACK = b"a"  # the offset up to which the bytes of the other direction are consumed
    BEAT = b"h"  # the sender is there, and has sent the bytes up to the offset
    END = b"x"  # out: nothing follows; the rest is `CommandEnd` as JSON


_MARKS: Final = {mark.value: mark for mark in Mark}


def piece(mark: Mark, offset: int = 0, rest: bytes = b"") -> bytes:
    """Return one message of a stream."""
    return _HEAD.pack(mark.value, offset) + rest


def read_piece(message: bytes) -> tuple[Mark, int, bytes]:
    """Return mark, offset and rest of a message. Raises ValueError if it is none."""
    if len(message) < _HEAD.size or message[:1] not in _MARKS:
        raise ValueError("not a message of a stream")
    _, offset = _HEAD.unpack_from(message)
    return _MARKS[message[:1]], offset, message[_HEAD.size :]


class Terminal(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The size of the caller's terminal, in characters; 0: not known."""

    rows: Annotated[int, msgspec.Meta(ge=0, le=CELLS_MAX)] = 0
    columns: Annotated[int, msgspec.Meta(ge=0, le=CELLS_MAX)] = 0


class ExecAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The question of `moorage.api.<tenant>.exec`: run a command in a running attempt of a job.

    The command's processes belong to the attempt: they have its user, folder, environment, devices and limits, and end
    with it. With `tty` the command has a terminal of its own, and standard error is part of standard output; `term` is
    its variable TERM. `by` is the caller's name for the job's history.

    With `attach` no command runs: the stream is the terminal of the job's own program, which has one with `run.stdin`
    as `stream`. It begins with the newest 64 KiB that the terminal has shown. One caller has it at a time.
    """

    job: str
    argv: list[str]  # the program and its arguments; no shell reads them. Empty with `attach`
    replica: Annotated[int, msgspec.Meta(ge=0, lt=NUMBERS_MAX)] = 0
    tty: bool = False
    term: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_.+-]{0,64}$")] = ""
    by: str = ""
    attach: bool = False

    def __post_init__(self) -> None:
        if self.attach:
            if self.argv or self.tty or self.term:
                raise ValueError("argv, tty and term are those of the job where attach is true, leave them out")
            return
        if not self.argv or not self.argv[0]:
            raise ValueError("argv must name a command, found none")
        if len(self.argv) > COMMAND_WORDS_MAX or sum(map(len, self.argv)) > COMMAND_CHARS_MAX:
            raise ValueError(
                f"argv must have at most {COMMAND_WORDS_MAX} words of {COMMAND_CHARS_MAX} characters in all"
            )
        if any("\0" in word for word in self.argv):
            raise ValueError("argv must not have a NUL")


class ExecGiven(msgspec.Struct, frozen=True, gc=False):
    """The data of the answer to `exec`: which worker runs the command, and the stream of its bytes.

    The worker waits `DEAD_S` for the caller's GO on the stream.
    """

    job: str
    replica: int
    attempt: int
    worker: str
    stream: str  # 128 random bits, in hexadecimal


class Exec(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The leader asks a worker to run a command in a running attempt, for the caller on this stream (see `ExecAsked`).

    It is sent once: a caller that hears nothing of the worker asks again, and gets another stream.
    """

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    stream: str
    argv: list[str]  # empty: no command, but the terminal of the job's own program (`ExecAsked.attach`)
    tty: bool = False
    term: str = ""


class Signal(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The leader asks a worker to send a signal to a running attempt's processes that handle it, once."""

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    signal: str  # as `SIGUSR1`


class CommandEnd(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """How a command ended: its exit code (minus the signal that ended it), or null and why the stream ended without it.

    With `error` the command did not run: the code of a problem, and `why` is its message. `code` is then null, or as of
    a shell: 127 for a program that is not there, 126 for one that cannot be run.
    """

    code: int | None = None
    why: str = ""
    error: str = ""
