"""The guard of shared GPUs' memory in virtual time: whom it ends, after how long, and how often it looks.

`tests/system/worker/sharing/test_memory_guard.py` has the same guard over real processes and NVML.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any

import msgspec
import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import Device, Place
from moorage.schemas.job import Request
from moorage.system.proctree import Process
from moorage.testing.bus.bus import SimulatedClock
from moorage.worker.devices.readers.base import HeldUnknown, Inventory, SlotReading
from moorage.worker.driver import Driver
from moorage.worker.session.attempt_messages import Attempt, Event, HelloChanged, Log, OverGrant, OverSeen
from moorage.worker.sharing import memory_guard
from moorage.worker.sharing.memory_guard import FAILED_MAX, IDLE_LOOK_S, LOOK_S, WELL_MIN, MemoryGuard
from tests.scenes import played_by

LONG_S = 600
GRACE_S = 2.5
#: processes that exist as long as the test: itself, its parent, and init
FITS, GREEDY, OTHER = os.getpid(), os.getppid(), 1


def name_of(job: str) -> AttemptName:
    return ("acme", job, 0, 1, 10)


class Board(Inventory):
    """Two GPUs. `mib` has what processes hold of each; `broken` is what a question raises instead."""

    def __init__(self) -> None:
        self.mib: list[dict[int, int]] = [{}, {}]
        self.broken: Exception | None = None
        self.asked = 0

    def devices(self) -> list[Device]:
        return [Device(slot, "nvidia", "H100", f"GPU-{slot}", 81559, compute="9.0") for slot in range(2)]

    async def sample(self) -> list[SlotReading]:
        raise AssertionError("the guard asks what processes hold, and nothing else")

    async def memory_is_free(self, slot: int) -> bool:
        raise AssertionError("the guard asks what processes hold, and nothing else")

    async def held(self, slot: int) -> dict[int, int]:
        self.asked += slot == 0
        if self.broken is not None:
            raise self.broken
        return dict(self.mib[slot])


class Told(Driver):
    """A driver that tells whose processes are whose: of each pid the attempt, or None for one that hides it."""

    name = "process"
    tells_processes = True

    def __init__(self) -> None:
        super().__init__()
        self.whose: dict[int, AttemptName | None] = {}

    def attempts_of(self, pids: Collection[int]) -> dict[int, AttemptName | None]:
        return {pid: self.whose[pid] for pid in pids if pid in self.whose}


class Worker:
    """The agent of a guard, whose clock is the loop's; what the guard asks for is in `ended`, `said` and `hellos`."""

    def __init__(self, grace_s: float | None = GRACE_S) -> None:
        self.dropped = Counter[str]()
        self.board, self.driver = Board(), Told()
        self.held: dict[AttemptName, Attempt] = {}
        self.ended: list[tuple[float, str, str]] = []
        self.seen: set[tuple[str, int]] = set()  # which jobs it has told to be over, and on which GPU
        self.said: list[str] = []
        self.hellos = 0
        modes = ("exclusive", "mps", "time-slice")
        self.guard = MemoryGuard(self, self.held, self.board, {"process": self.driver}, modes, grace_s)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def post(self, subject: str, payload: bytes, reply: str = "") -> None: ...
    def wake(self) -> None: ...
    def spawn(self, work: Coroutine[Any, Any, None]) -> None: ...
    def call_driver(self, driver: Driver, step: Any) -> str:
        return ""

    def say(self, line: Log) -> None:
        self.said.append(line.text)

    def enqueue(self, event: Event) -> None:
        if isinstance(event, HelloChanged):
            self.hellos += 1
            return
        if isinstance(event, OverSeen):
            self.seen |= {(name[1], slot) for name, slot in event.items}
            return
        assert isinstance(event, OverGrant)
        self.ended += [(self.now(), name[1], why) for name, why in event.items]

    def runs(self, job: str, pid: int, mib: int, part_mib: int | None, mode: str = "time-slice", slot: int = 0) -> None:
        """A job runs whose process holds so much, or a job has another part from now on."""
        gpu: dict[str, Any] = {"sharing": mode}
        if part_mib is not None:
            gpu["share"] = {"memory_mib": part_mib}
        name, request = name_of(job), msgspec.convert({"gpu": gpu, "run": {"argv": ["true"]}}, Request)
        attempt = Attempt(name, Place(*name, [slot], mode, False, b""), request, 0.0)
        attempt.phase, attempt.driver = "running", "process"
        self.held[name] = attempt
        self.driver.whose[pid] = name
        self.board.mib[slot][pid] = mib


Scene = Callable[[Worker], Awaitable[None]]


def guarded(scene: Scene, grace_s: float | None = GRACE_S) -> None:
    """Play a scene beside a running guard, in virtual time."""

    async def main() -> None:
        worker = Worker(grace_s)
        await worker.guard.open()
        running = asyncio.get_running_loop().create_task(worker.guard.run())
        try:
            await asyncio.sleep(LOOK_S / 2)  # so that nothing in a scene is due together with a look
            await scene(worker)
            if running.done():
                running.result()
        finally:
            running.cancel()
            await asyncio.wait((running,))

    SimulatedClock().run(main())


@played_by(guarded)
async def test_an_attempt_over_its_part_ends_after_its_grace_and_its_neighbour_never(worker: Worker) -> None:
    worker.runs("fits", FITS, 4000, 4000)
    await asyncio.sleep(LONG_S)
    assert worker.ended == []
    worker.runs("greedy", GREEDY, 4001, 4000)
    since_s = worker.now()
    await asyncio.sleep(LONG_S)
    [(at_s, job, why)] = worker.ended  # once, however long it takes to end
    assert (job, why) == ("greedy", "over-memory: it holds 4001 MiB of GPU 0, 4000 are granted")
    assert GRACE_S <= at_s - since_s <= LOOK_S + GRACE_S


@played_by(guarded)
async def test_that_a_job_holds_too_much_is_told_before_it_ends(worker: Worker) -> None:
    worker.runs("fits", FITS, 4000, 4000)
    worker.runs("greedy", GREEDY, 4001, 4000, slot=1)
    await asyncio.sleep(LOOK_S)
    assert (worker.ended, worker.seen) == ([], {("greedy", 1)})


@played_by(guarded)
async def test_an_attempt_that_gives_memory_back_within_its_grace_has_the_whole_grace_again(worker: Worker) -> None:
    for _ in range(100):
        worker.runs("waves", GREEDY, 5000, 4000)
        await asyncio.sleep(GRACE_S - LOOK_S)
        worker.runs("waves", GREEDY, 4000, 4000)
        await asyncio.sleep(2 * LOOK_S)
    assert worker.ended == []


@played_by(guarded)
async def test_a_part_made_smaller_holds_from_the_next_look_on(worker: Worker) -> None:
    worker.runs("late", FITS, 1300, 6000)
    await asyncio.sleep(60)
    worker.runs("late", FITS, 1300, 1300)
    await asyncio.sleep(LONG_S)
    assert worker.ended == [], "it obeys, and gets no more"
    worker.runs("late", FITS, 1300, 700)
    await asyncio.sleep(LOOK_S + GRACE_S)
    assert [each[1] for each in worker.ended] == ["late"]


@pytest.mark.parametrize("hides", [True, False])
def test_a_process_that_hides_its_attempt_is_killed_alone_after_the_grace(
    monkeypatch: pytest.MonkeyPatch, hides: bool
) -> None:
    killed: list[tuple[float, int]] = []

    async def scene(worker: Worker) -> None:
        def kill(process: Process) -> bool:
            killed.append((worker.now(), process.pid))
            worker.board.mib[0].pop(process.pid)
            return True

        monkeypatch.setattr(memory_guard, "kill_process", kill)
        worker.runs("neighbour", FITS, 1000, 3000)
        worker.runs("hides", GREEDY, 1000, 3000)
        if hides:
            worker.driver.whose[GREEDY] = None
        await asyncio.sleep(LONG_S)
        assert worker.ended == []

    guarded(scene)
    assert [pid for _, pid in killed] == [GREEDY] * hides
    assert all(GRACE_S <= at_s <= 2 * LOOK_S + GRACE_S for at_s, _ in killed)


def test_attempts_without_a_part_or_alone_on_their_gpu_are_left_alone() -> None:
    async def scene(worker: Worker) -> None:
        worker.runs("counted", FITS, 9000, None)
        worker.runs("alone", GREEDY, 9000, None, mode="exclusive", slot=1)
        worker.runs("granted", OTHER, 1000, 2000)
        await asyncio.sleep(LONG_S)
        assert worker.ended == []

    guarded(scene, 0.0)


def test_a_guard_that_is_turned_off_asks_nothing_and_promises_nothing() -> None:
    async def scene(worker: Worker) -> None:
        worker.runs("greedy", GREEDY, 6000, 4000)
        await asyncio.sleep(LONG_S)
        assert (worker.ended, worker.board.asked) == ([], 0)
        memory = {mode: each.memory for mode, each in worker.guard.levels(worker.driver).items()}
        assert memory == {"exclusive": "hard", "mps": "advisory", "time-slice": "advisory"}

    guarded(scene, None)


@played_by(guarded)
async def test_it_looks_each_second_while_attempts_share_and_each_ten_otherwise(worker: Worker) -> None:
    before = worker.board.asked
    await asyncio.sleep(60)
    assert worker.board.asked - before == 60 / IDLE_LOOK_S
    worker.runs("fits", FITS, 1000, 4000)
    await asyncio.sleep(LOOK_S)
    before = worker.board.asked
    await asyncio.sleep(60)
    assert worker.board.asked - before == 60 / LOOK_S


@pytest.mark.parametrize(
    ("broken", "why"), [(HeldUnknown("NVML is broken"), "NVML is broken"), (ZeroDivisionError(), "ZeroDivisionError")]
)
def test_a_level_falls_after_some_failed_looks_and_rises_after_more_good_ones(broken: Exception, why: str) -> None:
    async def scene(worker: Worker) -> None:
        def level() -> str:
            return worker.guard.levels(worker.driver)["time-slice"].memory

        worker.runs("shares", FITS, 1000, 2000)
        await asyncio.sleep(LOOK_S)
        worker.board.broken = broken
        await asyncio.sleep((FAILED_MAX - 1) * LOOK_S)
        assert (level(), worker.hellos) == ("guarded", 0), "one look that fails is no failure"
        await asyncio.sleep(LOOK_S)
        assert (level(), worker.hellos) == ("advisory", 1)
        assert why in worker.guard.why_not["time-slice"]
        await asyncio.sleep(LONG_S)
        worker.board.broken = None
        await asyncio.sleep((WELL_MIN - 1) * LOOK_S)
        assert (level(), worker.hellos) == ("advisory", 1)
        await asyncio.sleep(LOOK_S)
        assert (level(), worker.hellos) == ("guarded", 2)
        assert worker.ended == []

    guarded(scene)


def test_each_change_names_the_modes_that_it_is_about() -> None:
    async def scene() -> list[str]:
        worker = Worker()

        def judge(count: int, **failed: str) -> None:
            for _ in range(count):
                worker.guard._judge({mode.replace("_", "-"): why for mode, why in failed.items()})

        judge(FAILED_MAX, mps="NVML X")
        judge(WELL_MIN - FAILED_MAX, mps="NVML X")
        judge(FAILED_MAX, mps="NVML X", time_slice="NVML Y")
        judge(WELL_MIN, mps="NVML X")
        return worker.said

    assert SimulatedClock().run(scene()) == [
        "memory is no longer guarded (mps: NVML X)",
        "memory is no longer guarded (time-slice: NVML Y)",
        "memory is guarded again (time-slice)",
    ]
