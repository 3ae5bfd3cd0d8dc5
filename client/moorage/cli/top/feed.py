"""Feeds a `Model` from a running fleet: the public frames as they come, and what the key in use may ask the leader."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moorage.cli.jobs.selectors import HELD, LIVE
from moorage.client.answers import Explanation, FleetInfo, JobList
from moorage.client.errors import NoScheduler, NotFound, NotPermitted, Unreachable
from moorage.client.pages import pages
from moorage.client.reading import as_struct
from moorage.client.view.model import LEFT, Model
from moorage.client.view.past import past_view
from moorage.schemas.answers.fleet import WorkerInfo
from moorage.schemas.answers.jobs import JobRow
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import MoorageError, Refused, problem
from moorage.schemas.frames import FleetDetail, FleetFrame, Hello, Load, Standing
from moorage.schemas.job import QUEUED
from moorage.schemas.waited import SeriesAnswer

if TYPE_CHECKING:
    from moorage.bus.transport import Delivery, Subscribed
    from moorage.client.client import AsyncClient
    from moorage.client.view.view import View

#: seconds between two rounds of questions; between two of them the public frames go on
ROUND_S: Final = 2.0
#: jobs that are listed: of those that hold GPUs the newest, of those that wait the oldest
JOBS_MAX: Final = 500
#: jobs in one answer about the past
PAGE: Final = 1000
#: waiting jobs that are explained, the oldest of each tenant and reason, and how long an explanation holds (s): it
#: costs the leader a walk over the fleet, and trials of what would help
WHYS_MAX: Final = 8
WHY_S: Final = 10.0
#: how long the first picture waits for loads where nothing else tells of use: a worker tells every 2 s
LOADS_S: Final = 2.5
#: how long the first picture waits for the leader's frame, of which two come a second, and for the one for operators
FRAME_S: Final = 5.0
#: how long a right that was taken away is not tried again: each try is a line in two logs
TAKEN_S: Final = 30.0

#: the numbers of the last hour: how far back, how often they are asked for, and how long an answer may take
HOUR_S: Final = 3_600
HOUR_EVERY_S: Final = 60.0
HOUR_WAIT_S: Final = 1.5

_Heard = FleetFrame | Hello | Load | Standing | FleetDetail
_decode: Final[Decoder[_Heard]] = Decoder(_Heard)


class Feed:
    """What keeps a model up to date. `heard` is set when something new is in it."""

    def __init__(self, client: AsyncClient) -> None:
        self.model = Model(now_ms())
        self.heard = asyncio.Event()
        self._client = client
        self._wire = client._wire
        self._subscribed: list[Subscribed] = []
        self.operates = self.lists = True  # whether this key may ask what operators ask, and what tenants ask
        #: whether it was told more than an observer is: from then on the key is an operator's or a tenant's, and a
        #: refusal means that its right was taken away, and may come back
        self.knows_more = False
        self.is_troubled = False  # whether the last round of questions failed
        self._hears_detail = True
        self._refused: NotPermitted | None = None
        self._taken: tuple[float, NotPermitted] | None = None
        self._explained: dict[tuple[str, str], float] = {}
        self._hour_s = float("-inf")
        #: how often jobs and workers were listed: what is worth a picture before numbers and explanations have come
        self.listed = 0
        self.listed_s = float("-inf")  # when that was last, on the monotonic clock

    async def open(self) -> None:
        """Subscribe to the frames that this key may hear: an operator's all, a tenant's none."""
        subjects = self._wire.subjects
        public = (subjects.fleet_frame, subjects.standing, subjects.hello_all, subjects.load_all)
        for subject in (*public, subjects.fleet_detail):
            try:
                self._subscribed.append(await self._wire.subscribe(subject, self._on_frame))
            except NotPermitted as error:
                self._hears_detail = False
                if subject == subjects.fleet_frame:
                    self.model.sees_fleet, self._refused = False, error

    async def close(self) -> None:
        """End what `open` began."""
        for subscription in self._subscribed:
            with contextlib.suppress(MoorageError):
                await subscription.unsubscribe()

    def view(self) -> View:
        """Return this moment."""
        return self.model.view(now_ms(), time.time_ns() // 1_000_000)

    def _on_frame(self, delivery: Delivery) -> None:
        try:
            frame = _decode(delivery.data)
        except Refused:
            return
        if isinstance(frame, FleetDetail):
            self.knows_more = True
            self.model.take_detail(frame)
        else:
            self.model.take_frame(frame, now_ms())
        self.heard.set()

    # ---------------------------------------------------------------------------------------------------- asking

    async def ask(self, *, whys: bool = True) -> None:
        """Ask the leader once for all that this key may ask; with `whys` also why the oldest jobs wait.

        Raises `NoScheduler`, `Unreachable`, and `NotPermitted` if that is nothing, and no frame may be heard, or if the
        server has taken away what this key might do.
        """
        if self._taken is not None and time.monotonic() - self._taken[0] < TAKEN_S:
            raise self._taken[1]
        self._taken = None
        try:
            await self._ask(whys=whys)
        except NotPermitted as error:
            self.model.unheard = error.problem.message
            if error.code == "permission-refused" and self.knows_more:
                self._taken = time.monotonic(), error
            raise
        except Unreachable as error:
            self.model.unheard = error.problem.message
            raise
        self.model.unheard = ""

    async def _ask(self, *, whys: bool) -> None:
        model = self.model
        self._wire.check_connected()  # an observer's key asks nothing, and would not know
        if self.operates:
            try:
                fleet, held, waits = await asyncio.gather(
                    self._wire.operate("fleet"),
                    self._wire.operate("ls", {"states": HELD, "limit": JOBS_MAX, "history": False}),
                    self._wire.operate("ls", {"states": [QUEUED], "limit": JOBS_MAX, "oldest": True}),
                )
            except NotPermitted:
                if self.knows_more:
                    raise
                self.operates = False
            else:
                self.knows_more = True
                model.take_fleet(as_struct(FleetInfo, fleet.data), now_ms())
                runs, queue = as_struct(JobList, held.data), as_struct(JobList, waits.data)
                model.take_jobs([*runs.jobs, *queue.jobs], queue.counts, more=bool(queue.next))
        if not self.operates and self.lists:
            try:
                asked = {"states": LIVE, "limit": JOBS_MAX, "oldest": True}
                listed = as_struct(JobList, (await self._wire.answer("ls", asked)).data)
            except NotPermitted:
                if self.knows_more:
                    raise
                self.lists = False
            else:
                self.knows_more = True
                model.take_jobs(listed.jobs, listed.counts, more=bool(listed.next))
        if self._refused is not None and not self.lists:
            raise self._refused
        model.unseen = self._unseen()
        model.own = self._client.tenant if self.lists and not self.operates else ""
        self.listed += 1
        self.listed_s = time.monotonic()
        self.heard.set()
        await self._hour()
        if whys and (self.operates or self.lists):
            await self._explain()
        self.heard.set()

    async def _hour(self) -> None:
        """Ask for the numbers of the last hour, once a minute; the follower that has them may be behind."""
        now_s = time.monotonic()
        if not (self.operates or self.lists) or now_s - self._hour_s < HOUR_EVERY_S:
            return
        self._hour_s = now_s
        wire, asked = self._wire, {"series": True, "since_s": HOUR_S}
        with contextlib.suppress(MoorageError, TimeoutError):
            async with asyncio.timeout(HOUR_WAIT_S):
                answer = await (wire.operate("usage", asked) if self.operates else wire.answer("usage", asked))
            of = "fleet/" if self.operates else f"tenant/{self._client.tenant}"
            series = msgspec.convert(answer.data, SeriesAnswer).series
            names = {what: series.get(f"{of}/{what}", []) for what in ("granted", "used", "waiting")}
            self.model.hour = {what: row for what, row in names.items() if any(each is not None for each in row)}

    def _unseen(self) -> list[str]:
        if self.operates:
            return []
        if not self.model.sees_fleet:
            return [f"the fleet, and jobs of other tenants than {self._client.tenant}: that takes an operator's key"]
        if self.lists:
            return [f"jobs of other tenants than {self._client.tenant}: that takes an operator's key"]
        return [
            "jobs, and why they wait: that takes an operator's key, or a tenant's",
            "what is wrong with schedulers, the durable queue and the history: that takes an operator's key",
        ]

    async def _explain(self) -> None:
        """Ask why the oldest waiting jobs wait, those that were not asked for lately."""
        wanted, now_s = self.model.oldest()[:WHYS_MAX], time.monotonic()
        self._explained = {key: at_s for key, at_s in self._explained.items() if key in wanted}
        due = [key for key in wanted if now_s - self._explained.get(key, -WHY_S) >= WHY_S]

        async def ask(tenant: str, job: str) -> None:
            with contextlib.suppress(NotFound):  # it began or ended meanwhile, and left memory
                answer = await self._wire.answer("explain", {"job": job}, tenant)
                self.model.take_why(tenant, as_struct(Explanation, answer.data))
            self._explained[tenant, job] = now_s

        await asyncio.gather(*(ask(*key) for key in due))

    async def past(self, at_ms: int) -> View:
        """Return the view of a moment of the past, in ms since 1970, from the history alone.

        An operator's key sees all of it, a tenant's the jobs of the tenant. Raises `NotPermitted`, `NoScheduler`.
        """
        workers: list[WorkerInfo] = []
        if self.operates:
            try:
                workers = (await self._client.fleet.show()).workers
            except NotPermitted:
                if self.knows_more:
                    raise
                self.operates = False
        rows: dict[tuple[str, str], JobRow] = {}
        ended: dict[str, int] = {}
        ask = partial(self._wire.operate if self.operates else self._wire.answer, "ls")
        async for listed in pages(ask, {"at_ms": at_ms, "limit": PAGE}):
            for row in listed.jobs:
                rows.setdefault((row.tenant, row.job), row)
            for state, jobs in listed.ended.items():
                ended[state] = ended.get(state, 0) + jobs
        return past_view(at_ms, list(rows.values()), ended, workers)

    async def first(self) -> None:
        """Ask once, and wait for the leader's frames; also for the loads, where nothing else tells of use.

        Raises `NoScheduler` if no leader sends a frame.
        """
        await self.ask()
        if self.model.sees_fleet and not await self.until(lambda: self.model.frame is not None, FRAME_S):
            why = f"no scheduler leads: no frame of the fleet came within {FRAME_S:g} s"
            raise NoScheduler(problem("no-scheduler", why))
        if self.operates and self._hears_detail:
            await self.until(lambda: self.model.detail is not None, FRAME_S)
        if not self.lists:
            await self.until(self._has_loads, LOADS_S)
        if self.operates and self.model.sees_fleet and self.view().idle:  # for how long is in a frame alone
            await self.until(lambda: self.model.knows_how_long, LOADS_S)

    def _has_loads(self) -> bool:
        frame = self.model.frame
        there = [row.worker for row in frame.workers if row.state != LEFT] if frame is not None else []
        return self.model.loads.issuperset(there)

    async def until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        """Wait until something holds of what was heard, for at most `limit_s`; return whether it does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not holds():
                    self.heard.clear()
                    await self.heard.wait()
        return holds()

    async def keep_asking(self, on_trouble: Callable[[MoorageError], Any]) -> None:
        """Ask again and again. An answer that fails is told, and the next round tries it again."""
        while True:
            try:
                await self.ask()
                self.is_troubled = False
            except MoorageError as error:
                self.is_troubled = True
                on_trouble(error)
            await asyncio.sleep(ROUND_S)


def now_ms() -> int:
    """Return the clock of the model: milliseconds that never go back."""
    return time.monotonic_ns() // 1_000_000
