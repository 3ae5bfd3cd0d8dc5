"""The history stream: what became of jobs, kept for days after they left memory.

A job's story is written once the job is over, or in parts while it grows long; the job leaves memory only after the
acknowledgement, so a crash loses nothing: the next leader writes again what is still in its memory. All of it runs
beside the loop that places jobs, at most four frames a second a tenant; a stream that takes nothing stops nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from moorage.bus.errors import BusError, JetStreamRefused
from moorage.bus.jetstream import Ack, JetStream
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.effects.outputs import Outputs
from moorage.scheduler.core.effects.story import Packing
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import PartKept
from moorage.scheduler.core.queries.view import View
from moorage.scheduler.core.state import STORY_PART, STORY_PART_REPLICA, Job
from moorage.schemas.subjects import Subjects

log = logging.getLogger("moorage.history")

#: between two frames of one tenant, and how long a story waits for others at least
FRAME_EVERY_S: Final = 0.25
#: after a frame that was not taken
AGAIN_S: Final = 1.0
AGAIN_S_MAX: Final = 30.0
#: stories packed between two turns of the event loop, so that other work is not held up
PACK_AT_ONCE: Final = 100
#: a tenant with more stories waiting gets them written without their requests: transitions come first
WITH_REQUEST_MAX: Final = 1000
#: numbers of jobs that wait beyond twice those in memory: then those that are not there any more are cleared out
QUEUE_SPARE: Final = 1_000
#: the smallest stream that is tried where the server has no room for what is configured
BYTES_MIN: Final = 4 * 1024**2


def stream_config(subjects: Subjects, config: Config, replicas: int) -> dict[str, Any]:
    """Return the stream's settings; the oldest goes at either bound."""
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
    """One reign's writer. `take` is called after every record; `wake` when something was offered to the engine."""

    def __init__(
        self, jetstream: JetStream, subjects: Subjects, engine: Engine, replicas: int, wake: Callable[[], None]
    ) -> None:
        self._js = jetstream
        self._subjects = subjects
        self._engine = engine
        self._replicas = replicas
        self._wake = wake
        self._waiting: dict[str, deque[int]] = {}  # tenant -> numbers of its jobs, in the order of their ends
        self._some = asyncio.Event()
        self._wait_s = AGAIN_S
        self.frames = 0
        self.stories = 0
        self.refused = 0  # frames that the stream did not take
        # whatever is in memory may not be written: the leader before knew, this one writes it again
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
        """Return what `fleet` and the discovery show."""
        return {
            "waiting": self.waiting,
            "frames": self.frames,
            "stories": self.stories,
            "refused": self.refused,
            "dropped": View(self._engine).stories_dropped,
        }

    def take(self, outputs: Outputs) -> None:
        """Note whose story is to be written."""
        if outputs.ended or outputs.long:
            self._add([*outputs.ended, *outputs.long])

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
                queue.popleft()  # it left memory without its history: the stream has taken nothing for long
            if len(queue) > 2 * len(jobs) + QUEUE_SPARE:  # behind a long story that waits, too
                waits = [num for num in dict.fromkeys(queue) if num in jobs]
                queue.clear()
                queue.extend(waits)
        self._some.set()

    @property
    def is_idle(self) -> bool:
        """Whether every story is written."""
        return not self._waiting

    # ---------------------------------------------------------------------------------------------- writing

    async def run(self) -> None:
        """Write for ever. Nothing that happens here ends it."""
        while not await self._tried(self.ensure()):
            pass
        while True:
            await self._some.wait()
            await asyncio.sleep(FRAME_EVERY_S)
            self._some.clear()
            for tenant in list(self._waiting):
                await self._tried(self._write(tenant))

    async def _tried(self, work: Coroutine[Any, Any, None]) -> bool:
        """False, after a pause, when it failed; why is in the log."""
        try:
            await work
        except BusError as error:
            log.warning("the history cannot be written now, jobs go on: %s", error)
        except Exception:  # a defect of ours must not stop the scheduler
            log.exception("the history could not be written")
        else:
            self._wait_s = AGAIN_S
            return True
        self.refused += 1
        self._some.set()
        await asyncio.sleep(self._wait_s)
        self._wait_s = min(self._wait_s * 2, AGAIN_S_MAX)
        return False

    async def ensure(self) -> None:
        """Make the stream, as large as it is configured or else as the server has room. Raises `BusError`."""
        config = stream_config(self._subjects, self._engine.config, self._replicas)
        await self._js.ensure_stream_with_room(config, frozenset({"max_age", "max_bytes"}), BYTES_MIN)

    async def _write(self, tenant: str) -> None:
        """One frame of a tenant: what waits, as far as it has room. Raises `BusError`; then all of it waits still."""
        queue = self._waiting[tenant]
        packing = Packing(self._engine.state, tenant)
        taken: list[int] = []
        try:
            await self._pack(packing, queue, taken)
            if packing.packed:
                await self._publish(tenant, packing)
                taken = [job.num for job, _, _, over in packing.packed if job.over and not over]
        finally:
            queue.extendleft(reversed(taken))  # those that were not written, or in part
        if queue:
            self._some.set()
        else:
            del self._waiting[tenant]

    async def _pack(self, packing: Packing, queue: deque[int], taken: list[int]) -> None:
        """Fill a frame from the queue; what was taken from there is in `taken`, whatever happens."""
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
            if answer.nobody_listens:  # no such stream, any more
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
