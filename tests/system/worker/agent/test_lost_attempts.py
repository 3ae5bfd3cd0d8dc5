"""What the worker believes, against what its driver, the supervisor and the engine really have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection

import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.frames import Finding, Look, Looked
from moorage.schemas.job import Request
from moorage.testing.conformance.bench import WORKER, Bench, open_bench
from moorage.testing.conformance.leader import until
from moorage.worker.agent import lost_attempts
from moorage.worker.agent.run import start
from moorage.worker.driver import Assignment, DriverEvent, Publish, ReportEvent
from moorage.worker.drivers.process.driver import ProcessDriver
from moorage.worker.session.attempt_messages import Ended

EXITS = {"run": {"argv": ["true"]}}
HANGS = {"run": {"argv": ["sleep", "600"]}}

_decode_looked = Decoder[Looked](Looked)


class LosesEnds(ProcessDriver):
    """It loses the report of each end, and of nothing else."""

    name = "loses"

    def attach(self, report: ReportEvent, publish: Publish) -> None:
        def tell(event: DriverEvent) -> None:
            if not isinstance(event, Ended) or event.items[0][2] == "lost":
                report(event)

        super().attach(tell, publish)


class OnlyOnce(ProcessDriver):
    """Its first answer leaves out every attempt, its later answers are right; `asked` counts them."""

    name = "once"
    asked = 0

    async def living(self, names: Collection[AttemptName]) -> Collection[AttemptName] | None:
        type(self).asked += 1
        return () if self.asked == 1 else await super().living(names)


class BringsForLong(ProcessDriver):
    """What its attempts need does not come."""

    name = "brings"
    asked = 0

    def _is_ready(self, assignment: Assignment) -> bool:
        return False

    async def _made_ready(self, assignment: Assignment, attempt: object) -> object:  # type: ignore[override]
        return await asyncio.Event().wait()

    async def living(self, names: Collection[AttemptName]) -> Collection[AttemptName] | None:
        type(self).asked += 1
        return await super().living(names)

    def check(self, request: Request) -> None:
        """Take every request."""


@contextlib.asynccontextmanager
async def worker_with(url: str, driver: type[ProcessDriver]) -> AsyncIterator[Bench]:
    async with open_bench(url, f"{__name__}:{driver.__name__}", 20.0) as bench:
        running = await start(bench.settings, url)
        try:
            await bench.joined()
            yield bench
        finally:
            await running.stop()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_attempts, "LOOK_RENEWALS", 0.5)


async def place(bench: Bench, request: dict[str, dict[str, list[str]]]) -> AttemptName:
    name = bench.name()
    await bench.place(name, {"run": request["run"] | {"driver": bench.driver}})
    return name


async def test_an_attempt_of_which_nothing_runs_is_ended_as_lost(nats_url: str, often: None) -> None:
    async with worker_with(nats_url, LosesEnds) as bench:
        name = await place(bench, EXITS)
        exited = await bench.ended(name)
        assert (exited.code, exited.detail) == (-9, "lost")
        await bench.ended(await place(bench, EXITS))  # on the same GPU


async def test_one_answer_that_leaves_an_attempt_out_ends_nothing(nats_url: str, often: None) -> None:
    async with worker_with(nats_url, OnlyOnce) as bench:
        OnlyOnce.asked = 0
        name = await place(bench, HANGS)
        await until(lambda: OnlyOnce.asked > 6, what="several looks")
        assert "exited" not in bench.seat.kinds(name)
        await bench.end(name, 0.0)
        assert (await bench.ended(name)).detail == "end"


async def test_an_attempt_whose_needs_are_still_brought_is_not_lost(nats_url: str, often: None) -> None:
    async with worker_with(nats_url, BringsForLong) as bench:
        BringsForLong.asked = 0
        name = await place(bench, HANGS)
        await until(lambda: BringsForLong.asked > 6, what="several looks")
        assert bench.seat.kinds(name) == ["claimed"]
        await bench.end(name, 0.0)
        assert (await bench.ended(name)).detail == "end"


async def test_an_audit_lists_an_attempt_of_which_nothing_runs(nats_url: str) -> None:
    async with worker_with(nats_url, LosesEnds) as bench:
        name, subject = await place(bench, EXITS), bench.leader.subjects.worker(WORKER, "looked")
        await bench.await_report("started", name)
        looked = await bench.leader.nc.subscribe(subject)
        frame = None
        while frame is None or not frame.findings:  # the supervisor may see the end a moment later
            await bench.leader.nc.publish(bench.leader.subjects.look, encode(Look(0, bench.leader.epoch)))
            frame = _decode_looked((await looked.next_msg(60)).data)
        assert frame.findings == [Finding("nothing-runs", -1, "", name=f"acme/a/0 fence {name[4]}")]
