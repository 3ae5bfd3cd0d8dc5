"""Calls of a service that wait on disk: a job whose replicas call the service with their part of the items.

The items are a file of the job, one JSON value a line. The item of each replica, in the sense of a sweep, is the range
of its lines, as `100-199`. It runs `moorage call SERVICE --each FILE`, and keeps a line for each of its items: the
value of the answer, or the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from moorage.client.call_answers import ANSWERS, ITEMS, CallError, Outcome
from moorage.client.call_values import encoded
from moorage.client.durations import Duration, seconds
from moorage.client.errors import CallFailed, CallRefused, ClientError, TimedOut, Unreachable, rejected
from moorage.schemas.arrays import encoded_array
from moorage.schemas.ranges import NUMBERS_MAX, format_ranges
from moorage.schemas.service import CONTENT_TYPE
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.job import AsyncJob

#: of how many replicas a few items are, how many items one has before there are more, and the most replicas: their
#: ranges stand in the request, which are enough for the most items of a job
REPLICAS_USUAL: Final = 16
SHARE_USUAL: Final = 1000
REPLICAS_MAX: Final = 1000
#: replicas that run at the same time, each of which calls with its part of `at_once`
RUNNING_MAX: Final = 4
AT_ONCE: Final = 64
#: calls that wait give way to those whose callers do
PRIORITY: Final = 10
#: how often a call is made whose run was cut off: by its time, its member's end or a break
RUNS_MAX: Final = 3
#: seconds for which no live job may have the service before an item fails for that
NO_SERVICE_S: Final = 300.0
#: between two tries of a call that nobody took, beyond those of the call itself
AGAIN_S: Final = 1.0
#: between two lines of progress
TOLD_EVERY_S: Final = 10.0
_CUT_OFF: Final = ("member-died", "timed-out", "unreachable")


class Service(Protocol):
    """A service of a client, as far as calls for items need it."""

    async def call(self, data: Any, /, *, timeout: float, start_within: float) -> Any: ...


async def submit_many(
    submit: Callable[..., Coroutine[Any, Any, AsyncJob]],
    service: str,
    items: Iterable[Any],
    *,
    at_once: int = AT_ONCE,
    timeout: Duration | None = None,
    priority: int | None = None,
    headers: Mapping[str, str] | None = None,
    per_replica: int | None = None,
    job: str | None = None,
    **fields: Any,
) -> AsyncJob:
    """Submit the job; see `AsyncService.submit_many`."""
    if timeout is not None and seconds(timeout) <= 0:
        raise rejected("invalid-argument", "a call needs time", found=str(timeout), next="leave timeout out for 30 s")
    if at_once < 1 or (per_replica is not None and per_replica < 1):
        raise rejected(
            "invalid-argument", "at_once and per_replica must be at least 1", found=min(at_once, per_replica or 1),
            next="leave them out",
        )  # fmt: skip
    lines = await asyncio.to_thread(_lines, items)
    shares = _shares(len(lines), per_replica)
    running = min(RUNNING_MAX, at_once, len(shares), fields.get("max_running") or RUNNING_MAX)
    words = ["moorage", "call", service, "--each", ITEMS, "--lines", "{item}", "--to", ANSWERS]
    words += ["--at-once", str(at_once // running), "--priority", str(PRIORITY if priority is None else priority)]
    words += [] if timeout is None else ["--within", f"{seconds(timeout):g}s"]
    for name, value in (headers or {}).items():
        words += ["--header", f"{name}={value}".replace("{", "{{")]
    keep, files = fields.pop("keep", ()), fields.pop("files", ())
    labels = {"calls": service, **fields.pop("labels", {})}
    with tempfile.TemporaryDirectory() as stage:
        path = Path(stage, ITEMS)
        await asyncio.to_thread(path.write_bytes, b"".join(lines))
        named = {
            "max_failed": None, **fields, "calls": True, "items": shares, "max_running": running, "labels": labels,
            "keep": [ANSWERS, *keep], "files": [*([files] if isinstance(files, str) else files), path],
        }  # fmt: skip
        return await submit(words, None, job, **named)


def _lines(items: Iterable[Any]) -> list[bytes]:
    """Return a line of JSON for each item. Raises `Rejected` for the first that has none."""
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        raise _refused("items are a list of values, and not one")
    found: list[bytes] = []
    for at, item in enumerate(items):
        payload, about = encoded(item)
        if item is None or isinstance(item, str):
            payload = msgspec.json.encode(item)
        elif about.get(CONTENT_TYPE) != "application/json":
            raise _refused(f"item {at} is bytes or an array, and a job keeps its items as JSON")
        found.append(payload + b"\n")
        if at == NUMBERS_MAX:
            raise _refused(f"a job has at most {NUMBERS_MAX} items")
    if not found:
        raise _refused("there are no items")
    return found


def _refused(why: str) -> Exception:
    return rejected("invalid-argument", why, next="an item is a text, a number, or what else JSON can hold")


def _shares(count: int, per_replica: int | None) -> list[str]:
    """Return the lines of each replica, as `100-199`."""
    share = per_replica or max(min(-(-count // REPLICAS_USUAL), SHARE_USUAL), 1)
    if -(-count // share) > REPLICAS_MAX:
        raise rejected(
            "invalid-argument", f"{count} items are more than {REPLICAS_MAX} replicas take", found=per_replica,
            allowed=f"{-(-count // REPLICAS_MAX)} or more", next="leave per_replica out",
        )  # fmt: skip
    return [format_ranges(((at, min(at + share, count) - 1),)) for at in range(0, count, share)]


# ---------------------------------------------------------------------------------------------- in the job


async def call_each(
    service: Service,
    items: Sequence[Any],
    first: int,
    write: Callable[[Outcome], None],
    *,
    at_once: int,
    within_s: float,
) -> int:
    """Call the service with each item, the first of which has this number, and write what comes of it; return how many
    failed.

    A call that no member took is made again without end. One that was cut off is made `RUNS_MAX` times: a call may
    run more than once.
    """
    calling, told_s, over, failed = _Calling(service, within_s), time.monotonic(), 0, 0
    async for outcome in _at_once((calling.outcome(first + at, item) for at, item in enumerate(items)), at_once):
        write(outcome)
        over, failed = over + 1, failed + (outcome.error is not None)
        if outcome.error is not None:
            _tell(f"item {outcome.item}: {outcome.error.kind}: {outcome.error.message}")
        if time.monotonic() - told_s > TOLD_EVERY_S or over == len(items):
            told_s = time.monotonic()
            _tell(f"{over} of {many(len(items), 'item')}" + (f", {failed} failed" if failed else ""))
    return failed


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Calling:
    """The calls of a replica. `_none_since_s` is since when no live job has the service, and `_told_s` when it was told
    last why calls wait."""

    def __init__(self, service: Service, within_s: float) -> None:
        self._service = service
        self._within_s = within_s
        self._none_since_s: float | None = None
        self._told_s = time.monotonic()

    async def outcome(self, number: int, item: Any) -> Outcome:
        runs = 0
        while True:
            try:
                value = await self._service.call(item, timeout=2 * self._within_s, start_within=self._within_s)
                self._none_since_s = None
                return _answered(number, value)
            except CallRefused as error:
                if self._is_given_up(error):
                    return _failure(number, error)
            except (CallFailed, TimedOut, Unreachable) as error:
                self._none_since_s, runs = None, runs + 1
                if error.code not in _CUT_OFF or runs == RUNS_MAX:
                    return _failure(number, error)
            except (ClientError, TypeError, ValueError) as error:  # of its data, or of an answer that is no JSON
                return _failure(number, error)
            await asyncio.sleep(AGAIN_S)

    def _is_given_up(self, error: CallRefused) -> bool:
        if time.monotonic() - self._told_s > TOLD_EVERY_S:
            self._told_s = time.monotonic()
            _tell(f"calls wait: {error.code}: {error.problem.message}")
        if error.code != "no-service":
            self._none_since_s = None
            return False
        now_s = time.monotonic()
        self._none_since_s = self._none_since_s or now_s
        return now_s - self._none_since_s >= NO_SERVICE_S


def _failure(number: int, error: Exception) -> Outcome:
    kind = getattr(error, "kind", "") or getattr(error, "code", "") or type(error).__name__
    return Outcome(number, error=CallError(kind, str(error).removeprefix(f"{kind}: ")))


def _answered(number: int, value: Any) -> Outcome:
    if isinstance(value, bytes | bytearray | memoryview):
        return Outcome(number, base64=b64encode(value).decode())
    return Outcome(number, value.tolist() if encoded_array(value) is not None else value)


async def _at_once(calls: Iterable[Coroutine[Any, Any, Outcome]], at_once: int) -> AsyncIterator[Outcome]:
    """Yield what these calls come to, as they do, with so many of them under way."""
    loop, left = asyncio.get_running_loop(), iter(calls)
    under_way = {loop.create_task(call) for call in islice(left, at_once)}
    try:
        while under_way:
            over, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            under_way |= {loop.create_task(call) for call in islice(left, len(over))}
            for task in over:
                yield task.result()
    finally:
        for task in under_way:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*under_way, return_exceptions=True)
