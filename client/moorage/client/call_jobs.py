"""The calls of an executor: sent as replicas of jobs, and settled as these end.

Calls that come while a job is being submitted are the next job: so a thousand of them are a few jobs, and a single one
does not wait. A map is one job.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import pickle
import re
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import InvalidStateError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from moorage.client import call_runner
from moorage.client.by_value import copy_cloudpickle
from moorage.client.client import AsyncClient
from moorage.client.errors import ItemFailed
from moorage.client.fields import FIELDS
from moorage.client.keywords import check_keywords
from moorage.client.mapping import READS_MAX, batches_of, rows_of
from moorage.client.stored_file import stored_file
from moorage.client.sweeps import INLINE_BYTES_MAX
from moorage.schemas.errors import MoorageError
from moorage.schemas.handler import result_object
from moorage.schemas.job import RUNNING, SUCCEEDED
from moorage.schemas.ranges import NUMBERS_MAX, format_ranges, parse_ranges
from moorage.schemas.unreadable import UNREADABLE

if TYPE_CHECKING:
    from moorage.client.job import AsyncJob
    from moorage.schemas.answers.jobs import ReplicaInfo

#: fields that the calls themselves give
NOT_OF_CALLS: Final = frozenset({"replicas", "indices", "items", "max_running", "driver", "instead_of", "service"})
#: bytes of the calls in one job of single calls; one that is larger has a job of its own
GROUP_BYTES_MAX: Final = 64 << 20
#: bytes of a call that stands in the request: its base64, with the JSON around it
_INLINE_BYTES_MAX: Final = INLINE_BYTES_MAX - 1024
#: for how long the files of an executor are taken to be in the bucket still, in seconds
_SENT_S: Final = 600.0
_LABEL_CHARS_MAX: Final = 63

log = logging.getLogger("moorage.client")


class Settled(Protocol):
    """What a call's caller waits for: a future of asyncio, or one of concurrent.futures."""

    def cancelled(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...
    def cancel(self) -> bool: ...


class _Header(msgspec.Struct, frozen=True):
    kind: str = ""
    message: str = ""
    traceback: str = ""
    pickled: str = ""


_decode_header: Final = msgspec.json.Decoder(_Header).decode


class _Elsewhere(Exception):
    """The traceback of an exception in its job, as the cause of the exception here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Call:
    """A pickled call, its future, and once it is submitted its job and number there."""

    __slots__ = ("blobs", "future", "is_over", "job", "number", "on_placed", "on_running")

    def __init__(
        self, function: bytes, arguments: bytes, future: Settled, on_running: Callable[[], None] | None = None,
        on_placed: Callable[[str, int], None] | None = None,
    ) -> None:  # fmt: skip
        self.blobs = function, arguments
        self.future = future
        self.on_running = on_running
        self.on_placed = on_placed
        self.job: AsyncJob | None = None
        self.number = 0
        self.is_over = False

    @property
    def bytes(self) -> int:
        return len(self.blobs[0]) + len(self.blobs[1])

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        """Give the caller the value or the error, unless it waits no longer."""
        self.is_over = True
        with contextlib.suppress(InvalidStateError, asyncio.InvalidStateError):
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(value)


class CallJobs:
    """Calls as jobs of an open client. All methods are of its event loop."""

    def __init__(
        self, client: AsyncClient, gpu: Any, max_workers: int | None, python: str, fields: Mapping[str, Any]
    ) -> None:
        check_keywords(fields, FIELDS - NOT_OF_CALLS, "of an executor, whose calls are replicas of jobs")
        self._client = client
        self._gpu = gpu
        self._max_workers = max_workers
        self._python = python
        self._fields = dict(fields)
        self._files = self._fields.pop("files", [])
        self._files = (
            [self._files] if isinstance(self._files, str) or hasattr(self._files, "__fspath__") else self._files
        )
        self._waiting: deque[tuple[str, list[Call], bool]] = deque()  # name, calls, whether it is a map
        self._running: dict[asyncio.Task[None], tuple[list[Call], bool]] = {}
        self._to_cancel: dict[str, tuple[AsyncJob, list[int]]] = {}
        self._cancelling: asyncio.Task[None] | None = None
        self._pumping: asyncio.Task[None] | None = None
        self._sent: tuple[float, dict[str, Any]] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.jobs: list[str] = []

    def add(self, name: str, calls: list[Call], *, is_map: bool = False) -> None:
        """Have calls run: those of a map as one job."""
        if calls:
            self._waiting.append((name, calls, is_map))
            self._idle.clear()
            self._pump()

    def cancelled(self, call: Call) -> None:
        """End a call whose future was cancelled."""
        if call.is_over or call.job is None:
            return  # one that waits here is left out when its turn comes
        self._to_cancel.setdefault(call.job.job, (call.job, []))[1].append(call.number)
        if self._cancelling is None or self._cancelling.done():
            self._cancelling = asyncio.create_task(self._cancel())

    async def until_idle(self) -> None:
        """Wait until all calls are over, and what was cancelled has ended."""
        await self._idle.wait()

    def calls(self) -> list[Call]:
        """Return the calls that are not over."""
        known = [call for _, calls, _ in self._waiting for call in calls]
        known += [call for calls, _ in self._running.values() for call in calls]
        return [call for call in known if not call.is_over]

    async def end(self) -> None:
        """Forget what waits and follow no job any longer; jobs go on."""
        tasks = [each for each in (self._pumping, self._cancelling, *self._running) if each is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # ------------------------------------------------------------------------------------------------- to jobs

    def _pump(self) -> None:
        if self._waiting and (self._pumping is None or self._pumping.done()):
            self._pumping = asyncio.create_task(self._submit_all())
        elif not self._waiting and not self._running and (self._pumping is None or self._pumping.done()):
            self._idle.set()

    async def _submit_all(self) -> None:
        while group := self._next():
            name, calls, is_map = group
            # while this is sent it counts as running, so that no later one passes the bound
            task = asyncio.create_task(self._run(name, calls, is_map, sent := asyncio.Event()))
            self._running[task] = calls, is_map
            task.add_done_callback(self._over)
            await sent.wait()
        self._pumping = None
        if not self._waiting and not self._running:
            self._idle.set()

    def _over(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._pump()

    def _room(self) -> int | None:
        """Return how many more calls may be on workers; None for any number."""
        if self._max_workers is None:
            return None
        taken = 0
        for calls, is_map in self._running.values():
            left = sum(not call.is_over for call in calls)
            taken += self._max_workers if is_map and left else left
        return max(self._max_workers - taken, 0)

    def _next(self) -> tuple[str, list[Call], bool] | None:
        """Take the calls of the next job: a map, or as many single ones as there are and may be."""
        room = self._room()
        taken: list[Call] = []
        names: list[str] = []
        size = 0
        while self._waiting:
            name, calls, is_map = self._waiting[0]
            calls[:] = [call for call in calls if not call.future.cancelled()]
            if not calls:
                self._waiting.popleft()
                continue
            if is_map:
                if taken or (room is not None and room < (self._max_workers or 0)):
                    break
                return self._waiting.popleft()
            [call] = calls
            if (room is not None and len(taken) >= room) or len(taken) == NUMBERS_MAX:
                break
            if taken and size + call.bytes > GROUP_BYTES_MAX:
                break
            self._waiting.popleft()
            taken.append(call)
            names.append(name)
            size += call.bytes
        return (names[0], taken, False) if taken else None

    async def _run(self, name: str, calls: list[Call], is_map: bool, sent: asyncio.Event) -> None:
        try:
            try:
                job = await self._submitted(name, calls, is_map)
            finally:
                sent.set()
            for number, call in enumerate(calls):
                call.job, call.number = job, number
                if call.on_placed is not None:
                    call.on_placed(job.job, number)
                if call.future.cancelled():
                    self.cancelled(call)
            await self._follow(job, calls)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # of the submit, or of following: all who wait have it
            for call in calls:
                if not call.is_over:
                    call.settle(error=error)

    async def _submitted(self, name: str, calls: Sequence[Call], is_map: bool) -> AsyncJob:
        blobs = [call.blobs for call in calls]
        items = [" ".join(base64.b64encode(blob).decode() for blob in call) for call in blobs]
        fields = {**self._fields, "replicas": len(calls), "keep": [call_runner.VALUE, *self._fields.get("keep", ())]}
        if sum(map(len, items)) + 3 * len(items) <= _INLINE_BYTES_MAX:
            fields |= await self._files_of_all() | {"items": items}
        else:
            fields |= await self._brought(await asyncio.to_thread(call_runner.packed, blobs))
        if is_map and self._max_workers is not None:
            fields["max_running"] = min(self._max_workers, len(calls))
        fields.setdefault("max_failed", None)
        fields["labels"] = {"function": name[:_LABEL_CHARS_MAX], **fields.get("labels", {})}
        version = "{}.{}".format(*sys.version_info)
        words = [self._python, f"{call_runner.FOLDER}/{call_runner.RUNNER}", version]
        job = await self._client.submit(words, self._gpu, **fields)
        self.jobs.append(job.job)
        return job

    async def _files_of_all(self) -> dict[str, Any]:
        """Return the fields with the files of calls that stand in the request: they are sent once."""
        if self._sent is None or time.monotonic() - self._sent[0] > _SENT_S:
            self._sent = time.monotonic(), await self._brought(None)
        return self._sent[1]

    async def _brought(self, content: bytes | None) -> dict[str, Any]:
        return await brought(self._client, self._files, content)

    # ------------------------------------------------------------------------------------------------- to values

    async def _follow(self, job: AsyncJob, calls: Sequence[Call]) -> None:
        wire = self._client._wire
        async with contextlib.aclosing(rows_of(wire, job.job, range(len(calls)), job.events)) as looks:
            async for ended, others in looks:
                for row in others:
                    call = calls[row.replica]
                    if row.state == RUNNING and call.on_running is not None:
                        call.on_running()
                for some in batches_of(ended, READS_MAX):
                    await asyncio.gather(*(self._settle(job.job, calls[row.replica], row) for row in some))
                if ended:
                    self._pump()

    async def _settle(self, job: str, call: Call, row: ReplicaInfo) -> None:
        if row.state == "CANCELLED":
            call.is_over = True
            call.future.cancel()
            return
        content: bytes | None = None
        if row.fence and not call.future.cancelled():
            name = result_object(job, row.replica, row.fence)
            try:
                content = await stored_file(
                    self._client._wire, name, call_runner.VALUE, call_runner.VALUE_BYTES_MAX + 65536
                )
            except MoorageError as error:  # it may be there, and cannot be read
                call.settle(error=error)
                return
        call.settle(**outcome_of(job, row, content))

    async def _cancel(self) -> None:
        while self._to_cancel:
            _, (job, numbers) = self._to_cancel.popitem()
            which = format_ranges(parse_ranges(",".join(map(str, sorted(set(numbers))))))
            try:
                await job.cancel("its future was cancelled", replica=which)
            except MoorageError as error:
                log.warning("replicas %s of job %s are not cancelled: %s", which, job.job, error)


def outcome_of(job: str, row: ReplicaInfo, content: bytes | None) -> dict[str, Any]:
    """Return the `value` or the `error` of a call from what its replica has kept."""
    number, state, code = row.replica, row.state, row.code
    if content is None:
        why = "its value is no longer kept, or it ended itself" if state == SUCCEEDED else row.why
        return {"error": ItemFailed(job, number, state, code, why)}
    line, _, blob = content.partition(b"\n")
    try:
        head = _decode_header(line)
    except UNREADABLE as error:
        return {"error": ItemFailed(job, number, state, code, f"what it kept cannot be read: {error}")}
    try:
        found = pickle.loads(blob) if head.pickled or not head.kind else None
    except Exception as error:  # of a class that is not here
        if not head.kind:
            why = f"its value cannot be read here: {type(error).__name__}: {error}"
            return {"error": ItemFailed(job, number, state, code, why)}
        found = None
    if not head.kind and state == SUCCEEDED:
        return {"value": found}
    if not head.kind:  # it returned, and ended as a failure all the same
        return {"error": ItemFailed(job, number, state, code, row.why)}
    if isinstance(found, Exception):
        found.__cause__ = _Elsewhere(head.traceback)
        found.add_note(f"in replica {number} of job {job}")
        return {"error": found}
    return {"error": ItemFailed(job, number, state, code, head.message, kind=head.kind, text=head.traceback)}


def listed_files(files: Any) -> Sequence[Any]:
    """Return the paths of a field `files`, which may be one path."""
    return [files] if isinstance(files, str | os.PathLike) else list(files)


async def brought(
    client: AsyncClient, files: Sequence[Any], content: bytes | None, *, stays: bool = False
) -> dict[str, Any]:
    """Send the runner, cloudpickle, the calls of one job if there are any, and the caller's `files`; return the fields
    of a request with these. `stays` is for a process that answers many calls."""
    with tempfile.TemporaryDirectory() as stage:
        folder = Path(stage, call_runner.FOLDER)
        folder.mkdir()
        shutil.copyfile(call_runner.__file__, (Path(stage) if stays else folder) / call_runner.RUNNER)
        copy_cloudpickle(folder)
        if content is not None:
            await asyncio.to_thread((folder / call_runner.CALLS).write_bytes, content)
        fields: Any = {"files": [*files, stage]}
        await client._bring(fields)
    return dict(fields)


def label_of(function: Any) -> str:
    """Return a function's name as the label of its jobs."""
    name = getattr(function, "__qualname__", "") or type(function).__name__
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_") or "call"


def chunks_of(tuples: Iterable[tuple[Any, ...]], size: int) -> list[list[tuple[Any, ...]]]:
    """Return argument tuples in chunks of `size`."""
    found: list[list[tuple[Any, ...]]] = []
    for each in tuples:
        if not found or len(found[-1]) == size:
            found.append([])
        found[-1].append(each)
    return found
