"""A record without a submit waits for the submit that comes right after it, and for nothing else; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

import msgspec

from moorage.bus.connection import Connection
from moorage.bus.transport import Delivery
from moorage.scheduler.leader.service import Scheduler
from moorage.scheduler.leader.term import SHARE_AFTER, SHARE_WAIT_S
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.frames import Device, Hello, Join, Joined, Renew, Report, ReportFrame, Wanted
from moorage.schemas.subjects import Subjects
from moorage.testing.bus.bus import SimulatedBus, SimulatedConnection
from moorage.testing.bus.clock import SimulatedClock
from moorage.testing.bus.network import SERVER, Faults, FaultyNetwork
from tests.scenes import played_by
from tests.waiting import until

SUBJECTS: Final = Subjects("t")
#: one way, in ms: an append takes 0.4, the next request comes 0.2 after an answer, and reports 0.3 after a placement
CALLER_MS, WORKER_MS, LEDGER_MS = 0.1, 0.15, 0.2
JOBS: Final = 40
SLOTS: Final = 8

_wanted: Final = Decoder[Wanted](Wanted)
_joined: Final = Decoder[Joined](Joined)


class Fleet:
    """One worker, whose attempts have ended as soon as they are placed."""

    def __init__(self, connection: SimulatedConnection) -> None:
        self.connection = connection
        self.session = ""
        self.told = 0
        self._telling: set[asyncio.Task[Any]] = set()

    async def join(self) -> None:
        pool = [Device(slot, "nvidia", "H100", f"GPU-{slot}", 81_559) for slot in range(SLOTS)]
        hello = Hello("w", "b", drivers=["noop"], cpu_milli=64_000, memory_mib=2**20, gpu_pool=pool, simulated=True)
        await self.connection.subscribe(SUBJECTS.worker("w", "wanted"), self.on_wanted)
        answer = await self._ask("join", Join("machine", "b", 1, hello))
        self.session = _joined(answer.data).session
        await self._ask("renew", Renew(self.session, 1))

    def on_wanted(self, delivery: Delivery) -> None:
        reports = [
            Report(kind, place.tenant, place.job, place.replica, place.attempt, place.fence)
            for place in _wanted(delivery.data).place
            for kind in ("claimed", "started", "exited", "freed")
        ]
        self.told += 1
        task = asyncio.ensure_future(self._ask("fact", ReportFrame(self.session, self.told, reports)))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _ask(self, verb: str, frame: Any) -> Delivery:
        return await self.connection.request(SUBJECTS.worker("w", verb), encode(frame, json=False), 5)


class Caller:
    def __init__(self, connection: SimulatedConnection, clock: SimulatedClock) -> None:
        self.connection = connection
        self.clock = clock
        self.sent = self.made = self.ended = 0
        self._heard = asyncio.Event()

    async def open(self) -> None:
        await self.connection.subscribe(SUBJECTS.events("*"), self.on_events)

    def on_events(self, delivery: Delivery) -> None:
        self.ended += delivery.data.count(b'"state":"SUCCEEDED","ledger"')
        self._heard.set()

    async def submit(self, gpus: int = 1) -> None:
        """Submit a job and wait for the answer. One with more GPUs than the worker has waits for ever."""
        self.made += gpus <= SLOTS
        self.sent += 1
        asks = {"job": f"j{self.sent}", "events": "tenant", "gpu": {"count": gpus}, "run": {"driver": "noop"}}
        answer = await self.connection.request(SUBJECTS.api("acme", "submit"), msgspec.json.encode(asks), 5)
        assert b'"accepted"' in answer.data

    async def until_ended(self) -> float:
        """Return how many ms it takes until all jobs that can run have ended."""
        began_s = self.clock.now_s
        while self.ended < self.made:
            self._heard.clear()
            await self._heard.wait()
        return (self.clock.now_s - began_s) * 1000


def on_a_quiet_machine(scene: Callable[[Scheduler, Caller, SimulatedClock], Awaitable[None]]) -> None:
    network, clock = FaultyNetwork(1), SimulatedClock()
    ways = (("caller", "world", CALLER_MS), ("worker", "world", WORKER_MS), ("ledger", SERVER, LEDGER_MS))
    for one, other, ms in ways:
        network.between(one, other, Faults(delay_ms=(ms, ms)))
    bus = SimulatedBus(network)

    async def main() -> None:
        links = bus.connect("world"), bus.connect("ledger", account="ledger")
        scheduler = Scheduler(cast("Connection", links[0]), cast("Connection", links[1]), subjects=SUBJECTS)
        running = asyncio.ensure_future(scheduler.run())
        await until(scheduler.leading.is_set, 60)
        await Fleet(bus.connect("worker")).join()
        caller = Caller(bus.connect("caller"), clock)
        await caller.open()
        await scene(scheduler, caller, clock)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    clock.run(main())


def records(scheduler: Scheduler) -> int:
    assert scheduler.term is not None
    return scheduler.term.records


@played_by(on_a_quiet_machine)
async def test_a_caller_that_submits_one_after_the_other_needs_one_append_a_job(
    scheduler: Scheduler, caller: Caller, clock: SimulatedClock
) -> None:
    """Otherwise every second submit waits for the append that tells of an end."""
    for _ in range(2 * SHARE_AFTER + 2):
        await caller.submit()
    before, began_s = records(scheduler), clock.now_s
    for _ in range(JOBS):
        await caller.submit()
    took_ms = (clock.now_s - began_s) * 1000
    assert records(scheduler) - before <= JOBS + 2
    assert took_ms / JOBS < 2 * CALLER_MS + 2 * LEDGER_MS + 0.05
    assert await caller.until_ended() < SHARE_WAIT_S * 1000 + 10 * LEDGER_MS


@played_by(on_a_quiet_machine)
async def test_where_a_job_waits_for_room_no_record_waits(
    scheduler: Scheduler, caller: Caller, clock: SimulatedClock
) -> None:
    await caller.submit(gpus=9)
    for _ in range(2 * SHARE_AFTER + 2):
        await caller.submit()
    before = records(scheduler)
    for _ in range(JOBS):
        await caller.submit()
    assert records(scheduler) - before > 1.3 * JOBS


@played_by(on_a_quiet_machine)
async def test_a_caller_that_waits_for_an_end_waits_for_nothing_else(
    scheduler: Scheduler, caller: Caller, clock: SimulatedClock
) -> None:
    for _ in range(JOBS):
        await caller.submit()
        # placed, reported, appended, announced: no time of the scheduler's own
        assert await caller.until_ended() < 2 * WORKER_MS + 2 * LEDGER_MS + CALLER_MS + 0.05


@played_by(on_a_quiet_machine)
async def test_a_wait_without_a_submit_is_the_last_one(
    scheduler: Scheduler, caller: Caller, clock: SimulatedClock
) -> None:
    for _ in range(JOBS):
        await caller.submit()
    await caller.until_ended()
    for _ in range(5):
        await caller.submit()
        assert await caller.until_ended() < SHARE_WAIT_S * 1000 / 2
