"""What a member and the program that it serves with say to each other, over a local socket that the program inherits.

A frame is one line of JSON, and behind it as many bytes as its `bytes` says. It is small enough for any language: see
the page of the protocol. Each frame has one of the keys below, which says what it is; other keys may come later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from moorage.schemas.service import OUTPUT_BYTES_MAX
from moorage.schemas.unreadable import UNREADABLE

#: a longer line is no frame; the server's max_payload bounds the bytes behind it
LINE_BYTES_MAX: Final = 256 * 1024
#: calls that a program may have ahead of the one that runs
AHEAD_MAX: Final = 16
BODY_BYTES_MAX: Final = 64 * 1024 * 1024
#: of a frame of the program: an answer may be split for its caller
ANSWER_BYTES_MAX: Final = OUTPUT_BYTES_MAX


class ToProgram(msgspec.Struct, frozen=True, omit_defaults=True):
    """A frame for the program: a `call`, a `cancel` of one, or the `end`."""

    call: int = 0  # number of a new call; its data are behind the line
    bytes: int = 0  # how many bytes follow the line
    headers: dict[str, str] = {}  # the caller's own
    file: str = ""  # the file that has the data of a call, where they came in parts; gone once it is answered
    wait_ms: int = 0  # milliseconds after which its caller no longer waits
    ahead: bool = False  # of a call: it has no place yet. Its number is in the pipe, unless it is taken back
    more: bool = False  # of a call: the next frame is another call of the same batch
    cancel: int = 0  # number of a call whose caller no longer waits: answer it or not, it is not sent
    endpoint: str = ""  # of a call: the service's method that it is for; "" for the service itself
    end: bool = False  # no call follows: the program ends once it has answered those that it has


class FromProgram(msgspec.Struct, frozen=True, omit_defaults=True):
    """A frame from the program: it is `ready`, or an `answer`, a `part` of one, or an `error`."""

    ready: int = 0  # it takes calls from now on, at most this many at the same time
    ahead: int = 0  # with `ready`: so many more calls may be sent ahead, before they have a place
    endpoints: list[str] = []  # with `ready`: names of the methods that it has, beside the service itself
    answer: int = 0  # number of a call that is answered; the answer is behind the line
    part: int = 0  # number of a call of which a part is answered; more follows, and an `answer` at the end
    error: int = 0  # number of a call that failed
    in_parts: bool = False  # of an answer: its end behind parts, of which there may be none
    bytes: int = 0  # how many bytes follow the line
    headers: dict[str, str] = {}  # for the caller
    message: str = ""  # of an error: what went wrong
    code: int = 0  # of an error: the program's own number for it, 400..599
    kind: str = ""  # of an error: its class, such as ValueError
    bad_batch: bool = False  # of an error: the answers of a batch were none for each of its calls


class BadFrame(Exception):
    """What came over the socket is no frame."""


_encode: Final = msgspec.json.Encoder().encode
decode_to_program: Final = msgspec.json.Decoder(ToProgram).decode
decode_from_program: Final = msgspec.json.Decoder(FromProgram).decode


def frame(head: ToProgram | FromProgram, body: bytes = b"") -> bytes:
    """Return a frame as bytes; `head.bytes` must be the length of the body."""
    return b"%b\n%b" % (_encode(head), body)


class Frames:
    """Takes frames of the program out of what is read from the socket, in any pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: FromProgram | None = None

    def feed(self, data: bytes) -> Iterator[tuple[FromProgram, bytes]]:
        """Yield each whole frame. Raises BadFrame."""
        buffer = self._buffer
        buffer += data
        while True:
            if self._head is None:
                end = buffer.find(b"\n")
                if end < 0:
                    if len(buffer) > LINE_BYTES_MAX:
                        raise BadFrame(f"a line has more than {LINE_BYTES_MAX} bytes")
                    return
                try:
                    head = decode_from_program(bytes(buffer[:end]))
                except UNREADABLE as error:
                    raise BadFrame(f"a line is no frame: {error}") from None
                if not 0 <= head.bytes <= ANSWER_BYTES_MAX:
                    raise BadFrame(f"bytes must be 0..{ANSWER_BYTES_MAX}, found {head.bytes}")
                del buffer[: end + 1]
                self._head = head
            head = self._head
            if len(buffer) < head.bytes:
                return
            body = bytes(buffer[: head.bytes])
            del buffer[: head.bytes]
            self._head = None
            yield head, body
