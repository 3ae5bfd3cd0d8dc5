"""The history stream: the transitions of jobs, kept for days after the jobs left memory.

A job's story is written once the job has ended, or in parts while it grows long. The job leaves memory only after the
acknowledgement, so a crash loses nothing: the next leader writes again what is still in its memory. All of this runs
beside the loop that places jobs, at most four frames a second for each tenant while no story grows long. If the stream
accepts nothing, jobs go on; once too many ended jobs are in memory, the oldest leave it and their stories are lost, and
so are the oldest transitions of a story that grows too long (`dropped` counts these stories and transitions).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from moorage.bus.errors import BusError, JetStreamRefused
from moorage.bus.jetstream import Ack, JetStream
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import PartKept
from moorage.scheduler.core.ledger.state import STORY_PART, STORY_PART_REPLICA, Job
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.scheduler.core.outputs.story import Packing
from moorage.scheduler.core.queries.view import View
from moorage.schemas.subjects import Subjects

log = logging.getLogger("moorage.history")

#: time between two frames of one tenant, and for which a story waits for others, while no story is long
FRAME_EVERY_S: Final = 0.25
#: pause after a frame that was not stored
AGAIN_S: Final = 1.0
AGAIN_S_MAX: Final = 30.0
#: stories packed before the event loop runs other tasks
PACK_AT_ONCE: Final = 100
#: with more waiting stories, a tenant's stories are written without requests: transitions come first
WITH_REQUEST_MAX: Final = 1000
#: a queue longer than twice the jobs in memory plus this is cleared of jobs that have left memory
QUEUE_SPARE: Final = 1_000
#: the smallest stream that is tried if the server has no room for the configured size
BYTES_MIN: Final = 4 * 1024**2


def stream_config(subjects: Subjects, config: Config, replicas: int) -> dict[str, Any]:
    """Return the stream's settings; the oldest messages are dropped at either bound."""
    return {
        "name": subjects.history_stream,
        "subjects": [subjects.history_all],
        "storage": "file",
        "retention": "limits",
        "discard": "old",
        "max_age": int(config.history_keep * 1e9),
        "max_bytes": config.history_bytes,
        "allow_direct": True,
        "num_replicas": replicas,
    }


class History:
    """The writer of one term. `take` is called after every record; `wake` when something was offered to the engine."""

    def __init__(
        self, jetstream: JetStream, subjects: Subjects, engine: Engine, replicas: int, wake: Callable[[], None]
    ) -> None:
        self._js = jetstream
        self._subjects = subjects
        self._engine = engine
        self._replicas = replicas
        self._wake = wake
        self._waiting: dict[str, deque[int]] = {}  # tenant -> job numbers, in the order in which the jobs ended
        self._some = asyncio.Event()
        self._long = asyncio.Event()  # a story is long: without a pause, or memory drops its oldest transitions
        self._wait_s = AGAIN_S
        self.frames = 0
        self.stories = 0
        self.refused = 0  # frames that were not stored
        # stories in memory may be unwritten, which only the previous leader knew: write them again
        state = engine.state
        some = [state.jobs[num] for num in state.ended]
        for job in state.jobs.values():
            if not job.over and len(job.story) >= STORY_PART + STORY_PART_REPLICA * len(job.replicas):
                some.append(job)
        if some:
            self._add(some)

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def figures(self) -> dict[str, int]:
        """Return the figures for `fleet` and service discovery."""
        return {
            "waiting": self.waiting,
            "frames": self.frames,
            "stories": self.stories,
            "refused": self.refused,
            "dropped": View(self._engine).history_dropped,
        }

    def take(self, outputs: Outputs) -> None:
        """Queue the jobs whose stories are to be written."""
        if outputs.ended or outputs.long:
            self._add([*outputs.ended, *outputs.long])
        if outputs.long:
            self._long.set()

    def _add(self, some: list[Job]) -> None:
        waiting, jobs = self._waiting, self._engine.state.jobs
        touched: dict[str, deque[int]] = {}
        for job in some:
            tenant = job.tenant
            queue = touched.get(tenant)
            if queue is None:
                queue = touched[tenant] = waiting.setdefault(tenant, deque())
            if not queue or queue[-1] != job.num:
                queue.append(job.num)
        for queue in touched.values():
            while queue and queue[0] not in jobs:
                queue.popleft()  # it left memory unwritten, as the stream has accepted nothing for long
            if len(queue) > 2 * len(jobs) + QUEUE_SPARE:  # also behind a long story that waits
                waits = [num for num in dict.fromkeys(queue) if num in jobs]
                queue.clear()
                queue.extend(waits)
        self._some.set()

    @property
    def is_idle(self) -> bool:
        """Whether no story waits to be written."""
        return not self._waiting

    # ---------------------------------------------------------------------------------------------- writing

    async def run(self) -> None:
        """Create the stream, then write stories forever; no failure ends this."""
        while not await self._tried(self.ensure()):
            pass
        while True:
            await self._some.wait()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._long.wait(), FRAME_EVERY_S)
            self._some.clear()
            self._long.clear()
            for tenant in list(self._waiting):
                await self._tried(self._write(tenant))

    async def _tried(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work` and return True; on failure log the failure, pause, and return False."""
        try:
            await work
        except BusError as error:
            log.warning("the history of jobs cannot be written now; jobs are not affected: %s", error)
        except Exception:  # a defect of moorage must not stop the scheduler
            log.exception("the history of jobs could not be written")
        else:
            self._wait_s = AGAIN_S
            return True
        self.refused += 1
        self._some.set()
        await asyncio.sleep(self._wait_s)
        self._wait_s = min(self._wait_s * 2, AGAIN_S_MAX)
        return False

    async def ensure(self) -> None:
        """Create the stream, smaller than configured if the server lacks room, or update it. Raises `BusError`."""
        config = stream_config(self._subjects, self._engine.config, self._replicas)
        await self._js.ensure_stream_with_room(config, frozenset({"max_age", "max_bytes"}), BYTES_MIN)

    async def _write(self, tenant: str) -> None:
        """Write one frame of a tenant's waiting stories. Raises `BusError`; then all of them still wait."""
        queue = self._waiting[tenant]
        packing = Packing(self._engine.state, tenant)
        taken: list[int] = []
        try:
            await self._pack(packing, queue, taken)
            if packing.packed:
                await self._publish(tenant, packing)
                taken = [job.num for job, _, _, over in packing.packed if job.over and not over]
        finally:
            queue.extendleft(reversed(taken))  # stories not written, or written in part
        if queue:
            self._some.set()
        else:
            del self._waiting[tenant]

    async def _pack(self, packing: Packing, queue: deque[int], taken: list[int]) -> None:
        """Fill a frame from the queue; `taken` gets the job numbers taken from it, even on failure."""
        jobs, with_request = self._engine.state.jobs, len(queue) <= WITH_REQUEST_MAX
        while queue:
            some: list[Job] = []
            while queue and len(some) < PACK_AT_ONCE:
                num = queue.popleft()
                job = jobs.get(num)
                if job is not None and not job.kept:
                    some.append(job)
                    taken.append(num)
            left = packing.add_plain(some, with_request=with_request)
            for at, job in enumerate(left):
                if not packing.add(job, with_request=with_request):
                    rest = dict.fromkeys(job.num for job in left[at:])
                    taken[:] = [num for num in taken if num not in rest]
                    queue.extendleft(reversed(rest))
                    return
            if queue:
                await asyncio.sleep(0)

    async def _publish(self, tenant: str, packing: Packing) -> None:
        answer = await self._js.append(self._subjects.history(tenant), packing.frame())
        if not isinstance(answer, Ack):
            if answer.nobody_listens:  # the stream no longer exists
                await self.ensure()
            raise JetStreamRefused(
                f"append to the history of {tenant}", answer.code, answer.err_code, answer.description
            )
        self.frames += 1
        parts = False
        for job, first, last, over in packing.packed:
            if over:
                self._engine.kept(job, answer.seq)
                self.stories += 1
            else:
                self._engine.offer(PartKept(job.num, answer.seq, first, last))
                parts = True
        if parts:
            self._wake()
