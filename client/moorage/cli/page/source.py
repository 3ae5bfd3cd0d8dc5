"""What the pages are drawn from: one feed for all browsers, the lanes, and answers of the leader that are kept for a
moment, so that many browsers cost it one question. Nothing is asked while no browser is open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from moorage.cli.framework.console import error_line
from moorage.cli.jobs.selectors import LIVE
from moorage.cli.page.draw import OUTPUT_IS_ITS, JobDetail
from moorage.cli.page.draw_service import ServiceDetail
from moorage.cli.top.feed import ROUND_S, Feed, now_ms
from moorage.cli.top.job import tail
from moorage.client.answers import JobInfo, JobList
from moorage.client.durations import utc
from moorage.client.errors import NoScheduler, NotFound, NotPermitted, Unreachable
from moorage.client.failures import failed_replicas
from moorage.client.reading import as_struct
from moorage.client.view.lanes import KEPT_MS, Lanes
from moorage.client.view.model import is_leased
from moorage.client.waited import told_of
from moorage.schemas.answers.fleet import DeviceRow
from moorage.schemas.answers.jobs import ServiceRow, ServicesAnswer
from moorage.schemas.answers.operators import UsageAnswer, UsageRow
from moorage.schemas.codec import Decoder
from moorage.schemas.errors import MoorageError, Refused, problem
from moorage.schemas.frames import Event, Events, ServiceLately
from moorage.schemas.job import QUEUED, TERMINAL
from moorage.schemas.printable import in_one_line
from moorage.schemas.waited import SeriesAnswer, WaitedAnswer, WaitedRow

if TYPE_CHECKING:
    from moorage.bus.transport import Delivery, Subscribed
    from moorage.cli.jobs.use import UseRow
    from moorage.client.client import AsyncClient
    from moorage.client.errors import FailedReplica
    from moorage.client.view.view import View

#: a picture is made at most this often, however many browsers look
PICTURE_S: Final = 0.25
#: how long a page waits for an answer before it is drawn with what is there, and how many answers are kept
FIRST_S: Final = 2.0
#: how long it waits for the first round of questions after a while in which nobody looked: then what was listed before
#: is drawn, and the stream brings what changed
AGAIN_S: Final = 0.2
#: how much older than it should be an answer is before the page says from when it is
OLD_S: Final = 5.0
KEPT_MAX: Final = 512
#: histories of running jobs that are asked for in one round, because their beginning was not heard
HISTORIES_MAX: Final = 16
#: rows of a page of jobs that the leader lists, and seconds for which those that are over and the usage hold
PAGE_ROWS: Final = 50
#: failed replicas whose item and last line a job's page has
FAILED_ROWS: Final = 20
SLOW_S: Final = 10.0
#: questions whether a page of jobs has another one behind it: each reads a part of the history
AHEAD_MAX: Final = 4
#: seconds for which a moment of the past holds: what was written late may still come
PAST_S: Final = 30.0
HOUR_S: Final = 3_600
DAY_S: Final = 24 * HOUR_S
#: seconds for which it is known what devices a worker has
DEVICES_S: Final = 60.0

_decode: Final[Decoder[Events | Event]] = Decoder(Events | Event)
#: when the old answers came with which a page is drawn, by the monotonic clock; see `Source.ages`
_ages: Final[ContextVar[list[float] | None]] = ContextVar("_ages", default=None)

log = logging.getLogger("moorage.page")


def _fault(at: str, error: Exception) -> MoorageError:
    """Return the error of a fault of the page itself."""
    why = f"the page failed at {at}: {type(error).__name__}: {in_one_line(str(error))}"
    return MoorageError(problem("internal", why, next="see the log of moorage page"))


class _Kept:
    """An answer, and when it came; `error` is what its last question ended with, and `at_s` when."""

    __slots__ = ("at_s", "came_s", "error", "task", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.came_s = float("-inf")
        self.error: MoorageError | None = None
        self.at_s = float("-inf")
        self.task: asyncio.Task[None] | None = None


class Source:
    """Keeps up what the pages show. `outputs` are open clients with tenants' keys, by tenant."""

    def __init__(self, client: AsyncClient, outputs: Mapping[str, AsyncClient]) -> None:
        self.client = client
        self.feed = Feed(client)
        self.lanes = Lanes()
        self.trouble = ""
        self._outputs = outputs
        self._watchers = 0
        self._watched = asyncio.Event()
        self._rounds = 0
        self._subscribed: Subscribed | None = None
        self._view: View | None = None
        self._view_s = float("-inf")
        self._kept: OrderedDict[object, _Kept] = OrderedDict()

    @property
    def private(self) -> bool:
        """Whether the key shows more than an observer's does: jobs, tenants, usage. It stays so when its rights are
        taken away, since what it showed before is still here."""
        return self.feed.operates or self.feed.lists or self.feed.knows_more or self._subscribed is not None

    async def open(self) -> None:
        """Subscribe to what the key may hear."""
        await self.feed.open()
        wire = self.client._wire
        with contextlib.suppress(NotPermitted):
            self._subscribed = await wire.subscribe(wire.subjects.events("*"), self._on_events)

    async def close(self) -> None:
        """End what `open` began, and all questions."""
        tasks = [kept.task for kept in self._kept.values() if kept.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.feed.close()
        if self._subscribed is not None:
            with contextlib.suppress(MoorageError):
                await self._subscribed.unsubscribe()

    def _on_events(self, delivery: Delivery) -> None:
        try:
            frame = _decode(delivery.data)
        except Refused:
            return
        for event in frame.jobs if isinstance(frame, Events) else [frame]:
            self.lanes.add(event.tenant, event.job, event.changes)

    # --------------------------------------------------------------------------------------------------- the feed

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Have the leader asked for as long as somebody looks; begin with an answer and a frame, if they come."""
        self._watchers += 1
        if not self._watched.is_set():
            self._watched.set()
            rounds, listed = self._rounds, self.feed.listed
            limit_s = AGAIN_S if listed else FIRST_S
            await self.feed.until(lambda: self._rounds > rounds or self.feed.listed > listed, limit_s)
        model = self.feed.model
        if model.sees_fleet and model.frame is None:
            await self.feed.until(lambda: model.frame is not None, FIRST_S)
        try:
            yield
        finally:
            self._watchers -= 1

    async def keep_asking(self) -> None:
        """Ask while somebody looks, until this is cancelled."""
        while True:
            await self._watched.wait()
            try:
                await self.feed.ask()
                await self._lanes_of_running()
                self.trouble = ""
            except MoorageError as error:
                self.trouble = error_line(error)
            except Exception as error:  # a fault of the page itself: what else it shows goes on
                before, self.trouble = self.trouble, error_line(_fault("a round of questions", error))
                if self.trouble != before:
                    log.exception("the page failed at a round of questions, and asks again every %g s", ROUND_S)
            self._rounds += 1
            self.feed.heard.set()
            await asyncio.sleep(ROUND_S)
            if not self._watchers:
                self._watched.clear()

    @staticmethod
    @contextlib.contextmanager
    def ages() -> Iterator[list[float]]:
        """Gather when the old answers came, by the monotonic clock, with which a page is drawn meanwhile."""
        found: list[float] = []
        token = _ages.set(found)
        try:
            yield found
        finally:
            _ages.reset(token)

    def told(self, ages: Sequence[float] = (), *, past: bool = False) -> str:
        """Return what is wrong with what is shown: a question failed, or answers are from before (`ages`, and those
        about jobs and hosts, but for a moment of the past); "" if nothing is."""
        now_s, old_s = time.monotonic(), [*ages]
        if not past and self.feed.listed and now_s - self.feed.listed_s >= ROUND_S + OLD_S:
            old_s.append(self.feed.listed_s)
        if not old_s:
            return self.trouble
        at = utc(time.time_ns() // 1_000_000 - round(1000 * (now_s - min(old_s))))
        at = at[11:19] if now_s - min(old_s) < DAY_S / 2 else at[:19]
        return "; ".join(filter(None, (self.trouble, f"some of this page is as of {at} UTC")))

    def view(self) -> View:
        """Return this moment: the same one for all who ask within a quarter of a second."""
        now_s = time.monotonic()
        if self._view is None or now_s - self._view_s >= PICTURE_S * 0.9:
            self._view, self._view_s = self.feed.view(), now_s
        return self._view

    def load(self, worker: str) -> Any:
        """Return a worker's newest load."""
        return self.feed.model.load_of(worker, now_ms())

    async def _lanes_of_running(self) -> None:
        """Learn of the leases whose beginning or end was not heard, and of GPUs that do nothing."""
        view = self.view()
        self.lanes.forget(view.at_ms - KEPT_MS)
        for worker in view.workers:
            for slot, (sign, used) in enumerate(zip(worker.cells, worker.use, strict=True)):
                if used == 0 and is_leased(sign):
                    self.lanes.idle(worker.worker, slot, view.at_ms)
        if not self.private:
            return
        unheard = [
            (row.tenant, row.job)
            for row in view.jobs
            if row.worker and row.state != QUEUED and (row.tenant, row.job) not in self.lanes.jobs
        ]
        for tenant, job in unheard[:HISTORIES_MAX]:
            with contextlib.suppress(MoorageError):
                answer = await self.client._wire.answer("show", {"job": job, "events": "tenant"}, tenant)
                self.lanes.add(tenant, job, as_struct(JobInfo, answer.data).changes)

    # ---------------------------------------------------------------------------------------------------- answers

    async def kept(self, key: object, fresh_s: float, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return the answer to a question that was asked less than `fresh_s` seconds ago, or ask it.

        An older answer is returned while the next one is on its way, and while nobody answers: `ages` says so. Raises
        what the question ended with, and TimeoutError if there is no answer so far.
        """
        kept = self._kept.setdefault(key, _Kept())
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT_MAX:
            _, dropped = self._kept.popitem(last=False)
            if dropped.task is not None:
                dropped.task.cancel()
        if kept.task is None and time.monotonic() - kept.at_s >= fresh_s:
            kept.task = asyncio.create_task(self._asked(kept, ask))
        if kept.value is None and kept.error is None and kept.task is not None:
            await asyncio.wait({kept.task}, timeout=FIRST_S)
        if kept.error is not None and (kept.value is None or not isinstance(kept.error, NoScheduler | Unreachable)):
            raise kept.error
        if kept.value is None:
            raise TimeoutError
        ages = _ages.get()
        if ages is not None and time.monotonic() - kept.came_s >= fresh_s + OLD_S:
            ages.append(kept.came_s)
        return kept.value

    async def _asked(self, kept: _Kept, ask: Callable[[], Awaitable[Any]]) -> None:
        try:
            kept.value, kept.error = await ask(), None
            kept.came_s = time.monotonic()
        except MoorageError as error:
            kept.error = error
        except Exception as error:
            fault = _fault("a question", error)
            if kept.error is None or kept.error.problem != fault.problem:
                log.exception("the page failed at a question")
            kept.error = fault
        finally:
            kept.at_s, kept.task = time.monotonic(), None

    async def job_detail(self, tenant: str, job: str) -> JobDetail:
        """Return what a job's page shows. Raises `NotFound`, `NotPermitted`, `NoScheduler`, TimeoutError."""

        async def ask() -> JobDetail:
            from moorage.cli.jobs.use import use_rows

            wire = self.client._wire
            shown = as_struct(JobInfo, (await wire.answer("show", {"job": job, "events": "tenant"}, tenant)).data)
            over = shown.state in TERMINAL
            why = None if over else await wire.explain(job, tenant)
            use: list[UseRow] = []
            own = self._outputs.get(tenant)
            if not over:
                with contextlib.suppress(MoorageError):
                    use = await use_rows(own or self.client, job, None, tenant)
            output = await self._output(own, tenant, shown)
            may_read = not output or output[0] != OUTPUT_IS_ITS
            failed: list[FailedReplica] = []
            if shown.replicas is not None and shown.replicas.ended:
                with contextlib.suppress(MoorageError):
                    by = (own or self.client)._wire
                    failed = await failed_replicas(by, shown, FAILED_ROWS, may_read=may_read)
            told = await told_of(self.client, shown, tenant)
            life = SeriesAnswer()
            with contextlib.suppress(MoorageError):  # what counts may be behind
                life = await self._series({"job": job}, tenant)
            return JobDetail(shown, why, use, output, failed, told, life)

        detail: JobDetail = await self.kept(("job", tenant, job), ROUND_S, ask)
        return detail

    async def _output(self, own: AsyncClient | None, tenant: str, shown: JobInfo) -> list[str]:
        caption, lines = await tail(own or self.client, tenant, shown)
        return [OUTPUT_IS_ITS if caption.startswith(OUTPUT_IS_ITS) else caption, *lines]

    async def past(self, at: str) -> View:
        """Return the view of a moment of the past: `14:03`, `2h` (ago) or a date with a time, by this machine's clock.

        Raises `Rejected` for anything else, and what asking raises.
        """
        from moorage.client.moments import past_ms

        at_ms = past_ms(at)

        async def ask() -> View:
            return await self.feed.past(at_ms)

        view: View = await self.kept(("past", at), PAST_S, ask)
        return view

    async def devices(self, worker: str) -> list[DeviceRow]:
        """Return the devices of a worker, in the order of its cells, as an operator is told; [] if this key may not
        ask, or there is no such worker."""

        async def ask() -> Any:
            from moorage.cli.fleet.workers import worker_of

            return (await worker_of(self.client, worker))[1].devices or []

        if not self.feed.operates:
            return []
        try:
            found: list[DeviceRow] = await self.kept(("devices", worker), DEVICES_S, ask)
        except (NotFound, TimeoutError):
            return []
        return found

    async def ended(self, tenant: str, after: str) -> JobList:
        """Return a page of the jobs that are over, newest first, from behind `after` on: of a tenant, or with "" of all
        that the key may list."""
        return await self._listed(
            ("ended", tenant, after), tenant, {"states": sorted(TERMINAL), "after": after}, SLOW_S
        )

    async def on_worker(self, worker: str) -> JobList:
        """Return the jobs that are on a worker now."""
        return await self._listed(("on", worker), "", {"worker": worker, "states": LIVE, "history": False}, ROUND_S)

    async def _listed(self, key: object, tenant: str, asked: dict[str, Any], fresh_s: float) -> JobList:
        async def page(after: dict[str, Any]) -> JobList:
            wire, arguments = self.client._wire, {"limit": PAGE_ROWS, **asked, **after}
            if self.feed.operates:
                answer = await wire.operate("ls", {**arguments, "tenant": tenant})
            else:
                answer = await wire.answer("ls", arguments, tenant or self.client.tenant)
            return as_struct(JobList, answer.data)

        async def ask() -> JobList:
            found = ahead = await page({})
            with contextlib.suppress(MoorageError):  # the history cannot be read now, and the next page says why
                for _ in range(AHEAD_MAX):  # the leader names a next page wherever the history may have more
                    if not ahead.next:
                        return replace(found, next="")
                    ahead = await page({"after": ahead.next, "limit": 1})
                    if ahead.jobs:
                        break
            return found

        listed: JobList = await self.kept(key, fresh_s, ask)
        return listed

    async def usage(self, since_s: float, by: tuple[str, ...]) -> tuple[list[UsageRow], int]:
        """Return sums of GPU time, of all tenants that the key may read, and from when on they are."""

        async def ask() -> Any:
            from moorage.cli.fleet.usage_pages import all_pages

            asked = {"since_s": since_s, "by": list(by)}
            answer = await all_pages(self.client, asked, of_all=self.feed.operates)
            sums = msgspec.convert(answer.data, UsageAnswer)
            return sums.rows, sums.from_ms

        found: tuple[list[UsageRow], int] = await self.kept(("usage", since_s, by), SLOW_S, ask)
        return found

    async def waits(self, since_s: float) -> tuple[list[WaitedRow], int]:
        """Return where waits went by week and cause, of all tenants that the key may read, and from when on."""

        async def ask() -> Any:
            from moorage.cli.fleet.usage_pages import all_pages

            asked = {"since_s": since_s, "by": ["week", "cause"], "waits": True}
            answer = await all_pages(self.client, asked, of_all=self.feed.operates)
            sums = msgspec.convert(answer.data, WaitedAnswer)
            return sums.rows, sums.from_ms

        found: tuple[list[WaitedRow], int] = await self.kept(("waits", since_s), SLOW_S, ask)
        return found

    async def series(self, since_s: int, *, worker: str = "", tenant: str = "", service: str = "") -> SeriesAnswer:
        """Return numbers over time: of a host, a tenant, or a tenant's service; else of the fleet for operators, and of
        the key's own tenant for others."""

        async def ask() -> Any:
            asked = {"since_s": since_s} | {
                name: value for name, value in (("worker", worker), ("service", service)) if value
            }
            return await self._series(asked, tenant)

        found: SeriesAnswer = await self.kept(("series", since_s, worker, tenant, service), SLOW_S, ask)
        return found

    async def _series(self, asked: dict[str, Any], tenant: str) -> SeriesAnswer:
        wire, asked = self.client._wire, {"series": True, **asked}
        of_all = self.feed.operates and not tenant
        answer = await (wire.operate("usage", asked) if of_all else wire.answer("usage", asked, tenant or None))
        return msgspec.convert(answer.data, SeriesAnswer)

    async def service(self, tenant: str, name: str, since_s: int) -> ServiceDetail:
        """Return what is known of a service; what its members last failed with is its own tenant's alone."""
        spans = HOUR_S, DAY_S, 31 * DAY_S
        shown = await self.series(since_s, tenant=tenant, service=name)
        told = [await self.series(each, tenant=tenant, service=name) for each in spans]
        lately = next((row for row in self.view().services if (row.tenant, row.service) == (tenant, name)), None)
        own = self._outputs.get(tenant) or (self.client if tenant == self.client.tenant else None)
        row = None
        if own is not None and not (own is self.client and self.feed.operates):
            row = next((each for each in await self._services(own) if each.service == name), None)
        if lately is None and row is not None and row.use is not None:
            use = row.use
            lately = ServiceLately(
                tenant, name, use.members, use.places, use.running, use.waiting, use.calls,
                sum(use.errors.values()), (use.waited_ms or [0])[-1], (use.ran_ms or [0])[-1], row.job,
            )  # fmt: skip
        return ServiceDetail(shown, told, lately, row)

    async def _services(self, own: AsyncClient) -> list[ServiceRow]:
        async def ask() -> Any:
            return msgspec.convert((await own._wire.answer("services", {})).data, ServicesAnswer).services

        found: list[ServiceRow] = await self.kept(("services", own.tenant), ROUND_S, ask)
        return found
