"""A driver of the user's own, named among a worker's drivers as module:Class."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.errors import Refused, refuse
from moorage.schemas.frames import End
from moorage.schemas.job import Request
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.agent.journal import Journal, is_in_use
from moorage.worker.agent.run import start
from moorage.worker.devices.readers.simulated import SimulatedInventory
from moorage.worker.driver import Assignment, Living
from moorage.worker.drivers.noop import NoopDriver
from moorage.worker.session.attempt_messages import Ended
from moorage.worker.settings import WorkerSettings
from tests.system.worker.agent.test_agent_process import body, name_of, place
from tests.waiting import until


class Unnamed(NoopDriver):
    name = ""


class Unclosed(NoopDriver):
    """A driver that does not close."""

    name = "unclosed"

    async def close(self) -> None:
        raise OSError("it stays")


async def test_a_driver_that_does_not_close_keeps_nothing_else_open(nats_url: str, unique: str, tmp_path: Path) -> None:
    drivers = ("tests.system.worker.drivers.test_own_driver:Unclosed", "process")
    settings = WorkerSettings(tmp_path, "w1", prefix=unique, simulate="1xH100", drivers=drivers)
    worker = await start(settings, nats_url)
    (agent,) = worker.agents
    journal = agent.journal
    assert isinstance(journal, Journal)
    with pytest.raises(OSError, match="it stays"):
        await worker.host.remove(agent)
    assert not is_in_use(journal.path)
    await worker.stop()


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("nosuch:Driver", "there is no module 'nosuch'"),
        ("pathlib:Path", "it is no Driver"),
        ("moorage.worker.drivers.noop:NoopDriver", "its name 'noop' is taken or empty"),
        ("tests.system.worker.drivers.test_own_driver:Unnamed", "its name '' is taken or empty"),
        ("lxc", "no driver lxc"),
    ],
)
async def test_what_is_no_driver_is_refused_before_anything_starts(tmp_path: Path, word: str, told: str) -> None:
    settings = WorkerSettings(tmp_path, "w1", simulate="1xH100", drivers=("noop", word))
    with pytest.raises(Refused) as refused:
        await start(settings, "nats://127.0.0.1:9")
    problem = refused.value.problem
    assert told in problem.message
    assert problem.field == "$.drivers"


class Brittle(NoopDriver):
    """A driver with a fault for each of its methods: the request's `cwd` names the one that breaks."""

    name = "brittle"

    def check(self, request: Request) -> None:
        self._break(request.workload.cwd, "check")

    def start(self, assignments: list[Assignment]) -> None:
        for assignment in assignments:
            self._break(assignment.run.cwd, "start")
        super().start(assignments)

    def end(self, name: AttemptName, grace_s: float, why: str) -> None:
        if why == "/end":
            self._break(why, "end")
        super().end(name, grace_s, why)

    def set_fence(self, deadline_s: float, grace_s: float) -> None:
        self._break("/set_fence", "set_fence")

    @staticmethod
    def _break(wanted: str | None, method: str) -> None:
        if wanted == f"/{method}":
            raise IndexError(f"nothing at in-\udcff of {method}")
        if wanted == f"/{method}-refused":  # as `Assignment.environment` does
            raise refuse("failed-precondition", "no daemon of MPS")


@pytest.mark.slow
async def test_a_driver_that_breaks_on_one_job_ends_neither_the_worker_nor_another_job(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    def request(words: list[str], cwd: str | None = None) -> bytes:
        return body("", run={"driver": "brittle", "argv": words, "cwd": cwd})

    settings = WorkerSettings(
        tmp_path,
        "w1",
        unique,
        simulate="4xH100",
        drivers=("tests.system.worker.drivers.test_own_driver:Brittle",),
        leases=False,
    )
    async with ScriptedLeader(nats_url, unique) as leader:
        worker = await start(settings, nats_url)
        try:
            await leader.joined("w1")
            seat = leader.seat("w1")
            names = {
                job: name_of(job, fence=10 + at)
                for at, job in enumerate(("check", "start", "hangs", "well", "refused"))
            }
            await leader.want(
                "w1",
                place(names["check"], request(["hang"], "/check"), (0,)),
                place(names["start"], request(["hang"], "/start"), (1,)),
                place(names["hangs"], request(["hang"]), (2,)),
                place(names["well"], request(["exit", "0"]), (3,)),
            )
            await leader.await_report("w1", "freed", names["well"])
            await leader.want("w1", place(names["refused"], request(["hang"], "/start-refused"), (3,)))
            assert (await leader.await_report("w1", "exited", names["refused"])).code == 126
            refused = await leader.await_report("w1", "refused", names["check"])
            assert refused.detail.startswith(
                r"not-here: the driver brittle broke: IndexError: nothing at in-\udcff of check (_break"
            )
            failed = await leader.await_report("w1", "exited", names["start"])
            assert failed.code == 126
            assert failed.detail.startswith("start-failed: the driver brittle broke: IndexError")
            await leader.await_report("w1", "freed", names["start"])
            assert (await leader.await_report("w1", "exited", names["well"])).code == 0
            await leader.want("w1", End(*names["hangs"], "/end", 0))
            await leader.await_report("w1", "quarantined", names["hangs"])
            await leader.want("w1", End(*names["hangs"], "once more", 0))
            assert not worker.host.failed.done()
            assert seat.kinds(names["check"]) == ["refused"]
        finally:
            await worker.stop()


class Cracked(NoopDriver):
    """A driver that fails on what an earlier agent left, and on what it is asked about itself."""

    name = "cracked"

    async def open(self) -> list[Living]:
        await super().open()
        return [
            Living(name_of("hangs"), "running"),
            Living(name_of("ended"), "exited"),
            Living(name_of("ends"), "running"),
        ]

    def end(self, name: AttemptName, grace_s: float, why: str) -> None:
        if name[1] == "hangs":
            raise OSError("it has no handle")
        self.report(Ended([(name, 0, "exit")]))

    def forget(self, names: list[AttemptName]) -> None:
        raise OSError(f"never heard of {names}")

    def can(self) -> Capabilities:
        raise OSError("nothing")

    def keeps(self, settings: WorkerSettings) -> dict[str, float]:
        raise OSError("nothing")


async def test_a_driver_that_fails_on_what_was_left_keeps_no_worker_out(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    drivers = ("tests.system.worker.drivers.test_own_driver:Cracked", "noop")
    settings = WorkerSettings(tmp_path, "w1", unique, simulate="2xH100", drivers=drivers, leases=False)
    async with ScriptedLeader(nats_url, unique) as leader:
        worker = await start(settings, nats_url)
        try:
            await leader.joined("w1")
            (agent,) = worker.agents
            hello = agent.reporter.hello()
            assert replace(hello.capabilities["cracked"], enforced={}, resizes={}) == Cracked.capabilities
            await until(lambda: not any(state.quarantine for state in agent.pool.slot_states()), what="seen free")
            job = name_of("job")
            await leader.want("w1", place(job, body("", run={"driver": "noop", "argv": ["exit", "0"]}), (0, 1)))
            assert (await leader.await_report("w1", "exited", job)).code == 0
            assert not worker.host.failed.done()
        finally:
            await worker.stop()


async def test_gpus_of_an_attempt_that_no_driver_can_end_are_closed_until_their_memory_is_free(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: object, slot: int) -> bool:
        return False

    monkeypatch.setattr(SimulatedInventory, "memory_is_free", never)
    drivers = ("tests.system.worker.drivers.test_own_driver:Cracked",)
    settings = WorkerSettings(tmp_path, "w1", unique, simulate="2xH100", drivers=drivers, leases=False)
    async with ScriptedLeader(nats_url, unique) as leader:
        worker = await start(settings, nats_url)
        try:
            await leader.joined("w1")
            (agent,) = worker.agents
            assert all(state.quarantine for state in agent.pool.slot_states())
        finally:
            await worker.stop()
