"""Frames of a job's output: pieces that are published while it runs, and pages of what its worker keeps."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from moorage.schemas.frames.version import VERSION
from moorage.schemas.ranges import NUMBERS_MAX

#: standard output, standard error
StreamName = Literal["out", "err"]
#: what can be read of the output that a worker keeps: the two streams, and in which order their bytes arrived
LogStream = Literal["out", "err", "order"]


class Output(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="log"):
    """A piece of a replica's output, on `moorage.log.<tenant>.<job>.<replica>`. It is published once, so it may be
    lost.

    - `offset` counts bytes of this stream (out or err) within this attempt. `next` is the offset after this piece.
    - `text` is decoded, and bytes that are not UTF-8 are replaced; if there are any, `data` has the bytes (base64 in
      JSON).
    - A frame with `note` or `ports` is no output. `note` is what the worker does before the start, as `pulling the
      image a/b:1: 34 %`, or a warning, which begins with `warning[`. `ports` say where each port of a started container
      is reached.
    """

    attempt: int
    stream: StreamName
    offset: int
    text: str
    next: int = 0
    v: int = VERSION
    end: bool = False
    data: bytes | None = None
    note: str = ""
    ports: dict[str, str] = {}  # `address:port` on the host, by the container's own port


class ResultLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a function. `result` is its name, `<job>.<replica>.<fence>`. This struct is also the last line of
    the attempt's output.

    A large `value` is left out. Bytes are in base64. `tail` is the end of what a failed attempt wrote.
    """

    result: str
    size_bytes: int = 0
    content_type: str = ""
    value: Any = msgspec.UNSET
    tail: str = ""


class Results(msgspec.Struct, frozen=True, tag_field="kind", tag="results"):
    """Results that a worker finished in one turn: a message in the stream of the tenant's bucket.

    Those of at most 2 KiB, and the tails of failed attempts, are also published on `moorage.log.<tenant>.~.0` for
    all subscribers, and may be lost there.
    """

    results: list[ResultLine]
    v: int = VERSION


#: bytes of output in one page
LOG_PAGE_BYTES_MAX: Final = 256 * 1024
LOG_PAGE_BYTES_DEFAULT: Final = 64 * 1024
LOG_OFFSET_MAX: Final = 1 << 50

_Count = Annotated[int, msgspec.Meta(ge=0, le=LOG_OFFSET_MAX)]


class LogsAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The question of `moorage.api.<tenant>.logs`: a page of the output that a job's worker keeps.

    If `attempt` is null, it is the replica's newest one. `offset` counts bytes of the stream from its beginning; a
    negative one counts from its end. `limit` bounds the page, in bytes.

    The stream `order` tells in which order the bytes of the other two arrived. It has numbers of 4 bytes, the lowest
    byte first: the number of bytes of `out`, then that of `err`, of `out` again, and so on. What arrived after the last
    number is not told. It is empty if one of the streams is, and if the worker does not record it.
    """

    job: str
    replica: Annotated[int, msgspec.Meta(ge=0, lt=NUMBERS_MAX)] = 0
    attempt: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)] | None = None
    stream: LogStream = "out"
    offset: Annotated[int, msgspec.Meta(ge=-LOG_OFFSET_MAX, le=LOG_OFFSET_MAX)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=LOG_PAGE_BYTES_MAX)] = LOG_PAGE_BYTES_DEFAULT


class ReadLog(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="read-log"):
    """The leader asks a worker for a page of an attempt's output. `session` proves that the leader asks.

    `ended_ms` is the ledger time of the attempt's end, 0 while it runs.
    """

    session: str
    tenant: str
    job: str
    replica: Annotated[int, msgspec.Meta(ge=0, lt=NUMBERS_MAX)]
    attempt: _Count
    fence: _Count
    driver: str
    stream: LogStream
    offset: Annotated[int, msgspec.Meta(ge=-LOG_OFFSET_MAX, le=LOG_OFFSET_MAX)]
    limit: Annotated[int, msgspec.Meta(ge=1, le=LOG_PAGE_BYTES_MAX)]
    ended_ms: int = 0
    v: int = VERSION


class LogPage(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="log-page"):
    """A page of output: the bytes from `offset` up to `next`, which is where the next page begins.

    - The bytes are in `text` if they are UTF-8, else in `data` (base64 in JSON).
    - `size` is the offset behind the last byte that is kept now. `truncated` says that the worker did not keep all: the
      bytes from `cut_from` up to `cut_to` are missing; if both are 0, those after `size`. A page that is asked for at
      a missing byte begins at `cut_to`.
    - `over`: the stream has ended, and this page goes up to its end.
    - `attempt` 0: the replica has not been placed yet.
    - `ports`: by the container's own ports, where each is reached (`address:port`) while it runs.
    """

    attempt: _Count
    stream: LogStream
    offset: _Count = 0
    next: _Count = 0
    size: _Count = 0
    text: str = ""
    data: bytes | None = None
    over: bool = False
    truncated: bool = False
    replica: int = 0
    worker: str = ""
    v: int = VERSION
    ports: dict[str, str] = {}
    cut_from: _Count = 0
    cut_to: _Count = 0
