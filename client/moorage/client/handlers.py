"""Handlers (functions of a service that workers call): the request for a call, its progress, and its result.

The worker's side is `EmbeddedWorker`. A result is in the tenant's bucket before its job is SUCCEEDED
(docs/explanation/reasons.md). A small result is also sent to all clients that wait for results, and on the job's log
subject. A client that received it there does not read the bucket.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moorage.bus.jetstream import JetStream
from moorage.bus.results import ResultStore
from moorage.client.errors import NoOutput, rejected
from moorage.client.fields import FIELDS
from moorage.client.keywords import check_keywords
from moorage.client.output import Piece
from moorage.client.replicas import ASKED_MAX
from moorage.client.request_builder import body_of, build_request
from moorage.client.transitions import last_attempts
from moorage.schemas.codec import REQUEST_BYTES_MAX
from moorage.schemas.errors import problem
from moorage.schemas.frames import Change
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.handler import (
    DRIVER,
    HANDLER_NAME,
    INPUT_KEY,
    NOT_FINITE,
    decode_inline,
    decode_result,
    not_finite,
    result_object,
)
from moorage.schemas.job import SUCCEEDED, Request
from moorage.schemas.ranges import Ranges, count_of, numbers_in, ranges_of
from moorage.schemas.unreadable import UNREADABLE

if TYPE_CHECKING:
    from moorage.client.connected import Connected

#: fields of a request that a handler's request cannot have
NOT_OF_HANDLERS: Final = frozenset(
    {"driver", "image", "cwd", "user", "files", "files_of", "keep", "checkpoint", "setup", "setup_s"}
)
#: longest incomplete line of output that is kept, since its rest may make it a line of a handler
LINE_CHARS_MAX: Final = 128 * 1024


class Progress(msgspec.Struct, frozen=True):
    """The progress that a handler reports: `fraction` 0..1, with a line of text."""

    fraction: float
    text: str = ""
    replica: int = 0


OnProgress = Callable[[Progress], None]


class _Line(msgspec.Struct, frozen=True):
    """A line that a handler's worker writes to standard output: progress, or the name of the result with a small
    result itself."""

    progress: float | None = None
    text: str = ""
    result: str = ""
    content_type: str = ""
    value: Any = msgspec.UNSET


_decode_line: Final = msgspec.json.Decoder(_Line).decode


def handler_request(
    name: str, input: Any, gpu: GpuSpec | str | int | None, job: str | None, fields: Mapping[str, Any]
) -> Request:
    """Return the checked request for a handler; it requires a worker that offers it. Raises `Rejected`, TypeError."""
    if not HANDLER_NAME.fullmatch(name):
        raise rejected(
            "invalid-argument", f"{name[:80]!r} is not a valid handler name", found=name, allowed="[a-z0-9_.-]{1,48}"
        )
    check_keywords(fields, FIELDS - NOT_OF_HANDLERS, "of a function in a service's own process")
    named = dict(fields)
    config = dict(named.pop("driver_config", {}))
    if input is not None:
        config[DRIVER] = {INPUT_KEY: _plain(input)}
    body = {
        "run": {"driver": DRIVER, "argv": [name]},
        "driver_config": config,
        "requires": {**named.pop("requires", {}), f"{DRIVER}.{name}": ["1"]},
    }
    request = build_request(body, gpu, job, named)
    if (size := len(body_of(request))) > REQUEST_BYTES_MAX:
        raise rejected(
            "too-large",
            f"the request for handler {name} has {size} bytes",
            field="$.driver_config.handler.input",
            found=str(size),
            allowed=f"{REQUEST_BYTES_MAX} bytes",
            next="put the data where the handler can fetch it, and send its address",
        )
    return request


def _plain(value: Any) -> Any:
    try:
        if isinstance(value, bytes | bytearray | memoryview):
            raise TypeError("bytes are not")
        plain = msgspec.to_builtins(value, str_keys=True)
        if place := not_finite("input", plain):
            raise ValueError(f"{place} is {NOT_FINITE}: send it as text, or leave it out")
        return plain
    except (TypeError, ValueError) as error:
        raise rejected(
            "invalid-argument",
            f"a handler's input must be a value that JSON can hold: {error}",
            field="$.driver_config.handler.input",
            found=type(value).__name__,
        ) from None


class Heard:
    """The progress and the small results of a job's handlers, taken from the job's output."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress = on_progress
        self._begun: dict[int, str] = {}
        self._values: dict[str, _Line] = {}

    def take(self, piece: Piece) -> None:
        if piece.stream != "out":
            return
        *lines, rest = (self._begun.pop(piece.replica, "") + piece.text).split("\n")
        if 0 < len(rest) <= LINE_CHARS_MAX:
            self._begun[piece.replica] = rest
        for text in lines:
            try:
                line = _decode_line(text)
            except UNREADABLE:
                continue
            if line.result:
                self._values[line.result] = line
            elif line.progress is not None and self._on_progress is not None:
                self._on_progress(Progress(line.progress, line.text, piece.replica))

    def value(self, name: str) -> Any:
        """Return the small result of this name; UNSET if it was not received."""
        line = self._values.get(name)
        if line is None or line.value is msgspec.UNSET:
            return msgspec.UNSET
        return decode_inline(line.content_type, line.value)


async def value_of(client: Connected, job: str, changes: Sequence[Change], heard: Heard, numbers: Ranges) -> Any:
    """Return the value that the function returned; if the job has several replicas, a list by replica.

    A replica that returned nothing has None. A value is removed from `Histories.results`. Raises what
    `AsyncClient.submit` raises, `NoOutput` for a result that is no longer kept or whose attempt is no longer known, and
    `NotPermitted` if the user may not read the tenant's bucket.
    """
    replicas = count_of(numbers)
    ends = {change.replica: change for change in changes if change.fence}
    if len(ends) < replicas:
        ends |= await last_attempts(client, await client.show(job), replicas)
    values: list[Any] = []
    for replica in numbers_in(numbers):
        end = ends.get(replica)
        if end is None or end.result == 0:
            values.append(None)
            continue
        name = result_object(job, replica, end.fence)
        sent = client._histories.results.pop(name, None)
        if sent is None or sent.value is msgspec.UNSET:
            value = heard.value(name)
        else:
            value = decode_inline(sent.content_type, sent.value)
        values.append(await _stored(client, job, name, end.result) if value is msgspec.UNSET else value)
    return values if replicas > 1 else values[0]


async def values_of(client: Connected, job: str, numbers: Ranges) -> AsyncIterator[tuple[int, Any]]:
    """Yield the number and the value of each of these replicas that SUCCEEDED, `ASKED_MAX` at a time.

    Raises as `value_of`.
    """
    left = numbers_in(numbers)
    while some := list(islice(left, ASKED_MAX)):
        for row in (await client.show(job, ranges_of(some))).replica_states:
            if row.state == SUCCEEDED:
                name = result_object(job, row.replica, row.fence)
                yield row.replica, None if row.result == 0 else await _stored(client, job, name, row.result)


async def _stored(client: Connected, job: str, name: str, seq: int | None) -> Any:
    """Return a result from the bucket. Raises `NoOutput` if it is no longer kept.

    If the end names no result (`seq` is None), None is returned for a missing one.
    """
    context = client.context
    api = "$JS.API" if context is None else context.api_prefix
    store = ResultStore(JetStream(client.link, api), client.subjects.prefix)
    found = await client.again(lambda: store.get(client.tenant, name, seq))
    if found is not None:
        return decode_result(found)
    if seq is None:
        return None
    raise NoOutput(
        problem(
            "not-kept",
            f"the result of job {job} is no longer kept: the settings result_keep and result_bytes limit it, unless the"
            " bucket was made with other limits",
            job=job,
            found=f"no {name} in message {seq} of {client.subjects.result_bucket(client.tenant)}",
            next="submit it again",
        )
    )
