"""The calls of an executor that keeps its processes: a service of its own, which ends with the executor.

Its members end by themselves after some minutes without a call, so a program that died holds no GPU; the next call
then starts others.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from moorage.client import call_runner
from moorage.client.call_jobs import NOT_OF_CALLS, Call, brought, listed_files, outcome_of
from moorage.client.client import AsyncClient
from moorage.client.errors import CallRefused
from moorage.client.fields import FIELDS
from moorage.client.job_ids import fresh_job_id
from moorage.client.keywords import check_keywords
from moorage.schemas.answers.jobs import ReplicaInfo
from moorage.schemas.errors import MoorageError
from moorage.schemas.job import FAILED
from moorage.schemas.service import INPUT_BYTES_MAX, OUTPUT_BYTES_MAX, ServiceSpec

if TYPE_CHECKING:
    from moorage.client.job import AsyncJob

#: fields of a job that ends with its call
NOT_OF_WARM: Final = frozenset({"limit", "retries", "retry", "keep", "max_failed", "checkpoint", "checkpoint_every_s"})
WORKERS_DEFAULT: Final = 1
#: how often a process that died is started again; one that cannot start at all is told soon
RESTARTS_MAX: Final = 3
#: longest wait for a process and for its answer, in seconds
_CALL_S_MAX: Final = 86_400.0
#: codes of a call that no process took, since all of them have ended
_GONE: Final = ("no-service", "no-member")


class WarmCalls:
    """Calls of an open client that the members of one service answer. All methods are of its event loop."""

    def __init__(
        self,
        client: AsyncClient,
        gpu: Any,
        max_workers: int | None,
        python: str,
        idle_s: float,
        fields: Mapping[str, Any],
    ) -> None:
        why = "of an executor that keeps its processes: a call there has no job of its own"
        check_keywords(fields, FIELDS - NOT_OF_CALLS - NOT_OF_WARM, why)
        self._client = client
        self._gpu = gpu
        self._workers = max_workers or WORKERS_DEFAULT
        self._python = python
        self._fields = dict(fields)
        self._fields["env"] = {**self._fields.get("env", {}), call_runner.IDLE: str(idle_s)}
        self._files = listed_files(self._fields.pop("files", []))
        self._room = asyncio.Semaphore(2 * self._workers)  # one for each process that works, and one that waits there
        self._tasks: dict[Call, asyncio.Task[None]] = {}
        self._starting = asyncio.Lock()
        self._job: AsyncJob | None = None
        self._answers: AsyncJob | None = None  # the one that has answered a call
        self._idle = asyncio.Event()
        self._idle.set()
        self.jobs: list[str] = []

    def add(self, _name: str, calls: list[Call], *, is_map: bool = False) -> None:
        """Have calls run."""
        for call in calls:
            self._idle.clear()
            self._tasks[call] = task = asyncio.create_task(self._run(call))
            task.add_done_callback(partial(self._over, call))

    def _over(self, call: Call, _: asyncio.Task[None]) -> None:
        del self._tasks[call]
        if not self._tasks:
            self._idle.set()

    def cancelled(self, call: Call) -> None:
        """Wait no longer for a call whose future was cancelled. One that runs goes on to its end."""
        if (task := self._tasks.get(call)) is not None:
            task.cancel()

    async def until_idle(self) -> None:
        """Wait until all calls are over."""
        await self._idle.wait()

    def calls(self) -> list[Call]:
        """Return the calls that are not over."""
        return list(self._tasks)

    async def end(self) -> None:
        """End the processes."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._job is not None:
            with contextlib.suppress(MoorageError):
                await self._job.cancel("its executor was shut down")

    async def _run(self, call: Call) -> None:
        try:
            async with self._room:
                job = self._job or await self._started(None)
                if call.on_placed is not None:
                    call.on_placed(job.job, 0)
                if call.on_running is not None:
                    call.on_running()
                version = "{}.{}".format(*sys.version_info).encode()
                data = version + b"\n" + call_runner.packed([call.blobs])
                try:
                    content = await self._called(job, data)
                except CallRefused as error:
                    if error.code not in _GONE or (job is not self._answers and (await job.show()).state == FAILED):
                        raise  # it never answered: another one would not
                    job = await self._started(job)
                    content = await self._called(job, data)
                self._answers = job
            call.settle(**outcome_of(job.job, ReplicaInfo(replica=0, state="SUCCEEDED"), content))
        except asyncio.CancelledError:
            call.is_over = True
            call.future.cancel()
            raise
        except Exception as error:
            call.settle(error=error)

    async def _called(self, job: AsyncJob, data: bytes) -> bytes:
        found: bytes = await self._client.service(job.job).call(data, timeout=_CALL_S_MAX)
        return found

    async def _started(self, gone: AsyncJob | None) -> AsyncJob:
        """Return the job whose processes answer, once it is submitted: another one than that which is gone."""
        async with self._starting:
            if self._job is None or self._job is gone:
                fields = {**self._fields, **await brought(self._client, self._files, None, stays=True)}
                name = fresh_job_id()
                fields = {"restart": "on-failure", "max_restarts": RESTARTS_MAX, **fields}
                fields["service"] = ServiceSpec(name, input_bytes=INPUT_BYTES_MAX, output_bytes=OUTPUT_BYTES_MAX)
                module = call_runner.RUNNER.removesuffix(".py")
                words = [self._python, "-m", "moorage.cli", "serve", f"{module}:answered"]
                self._job = await self._client.submit(words, self._gpu, name, replicas=self._workers, **fields)
                self.jobs.append(name)
            return self._job
