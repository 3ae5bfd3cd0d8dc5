"""The limiter's heartbeats and tokens: what segments get by what NVML says of processes."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import Device
from moorage.system.proctree import read_process
from moorage.worker.devices.readers.base import HeldUnknown, Inventory
from moorage.worker.driver import Driver
from moorage.worker.sharing.limiter import feeder as module
from moorage.worker.sharing.limiter import segment
from moorage.worker.sharing.limiter.controller import RATE
from moorage.worker.sharing.limiter.feeder import RETRY_S, Feeder
from moorage.worker.sharing.limiter.owners import Owners
from moorage.worker.sharing.limiter.segment import TOKEN, Part, Segment, owner_of
from tests.waiting import until

GPU = "GPU-11111111-1111-1111-1111-111111111111"
OTHER = "GPU-22222222-2222-2222-2222-222222222222"
STEP_S = 0.1


class Used:
    """Devices whose processes use what a test says, in parts of a device; text is why that is unknown."""

    def __init__(self) -> None:
        self.of: dict[str, dict[int, float] | str] = {}
        self.holds: dict[str, dict[int, int]] = {}
        self.asked: list[str] = []

    def devices(self) -> list[Device]:
        return [Device(0, "nvidia", "H100", GPU), Device(1, "nvidia", "H100", OTHER)]

    async def held(self, slot: int) -> dict[int, int]:
        return self.holds.get((GPU, OTHER)[slot], {})

    async def worked(self, slot: int) -> dict[int, float]:
        self.asked.append(uuid := (GPU, OTHER)[slot])
        found = self.of.get(uuid, {})
        if isinstance(found, str):
            raise HeldUnknown(found)
        return {pid: part * 100 for pid, part in found.items()}


class Scene:
    """The control of one driver's attempts; its steps are at times of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.used = Used()
        self.now_s = 1000.0
        self.segments: dict[AttemptName, Segment] = {}
        self.owners = Owners()
        limits = SimpleNamespace(segments=self.segments, owners=self.owners)
        self.of: dict[int, AttemptName] = {}
        driver = SimpleNamespace(limits=limits, attempts_of=self.attempts_of)
        self.control = Feeder([cast(Driver, driver)], cast(Inventory, self.used))

    def attempts_of(self, pids: Collection[int]) -> dict[int, AttemptName | None]:
        return {pid: self.of[pid] for pid in pids if pid in self.of}

    def attempt(self, name: str, *parts: Part) -> Segment:
        made = self.segments["acme", name, 0, 1, 10] = Segment.create(self.folder / name, parts)
        return made

    def over(self, name: str) -> None:
        self.segments.pop(("acme", name, 0, 1, 10)).close()

    async def step(self, passed_s: float = STEP_S) -> None:
        self.now_s += passed_s
        await self.control.step(self.now_s)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def holds(one: Segment, number: int, owner: int, pid_ns: int, used: int = 0) -> None:
    """Have a slot of a segment be a process's, as the limiter does."""
    place = segment._AT_SLOTS + number * segment._SLOT_BYTES
    for at, value in ((0, owner), (8, pid_ns), (segment._LINE + 8, used)):
        one._write(place + at, value)
    one._write(segment._AT_COUNTS + 8, max(one.counts().high, number + 1))


def own_ticks() -> int:
    found = read_process(os.getpid())
    assert found is not None
    return found.start_ticks


def here() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def takes(one: Segment, device: int, tokens: float) -> float:
    """Have launches take so many tokens, as far as they are there; returns how many."""
    left = one.refill(device, 0, 0)
    taken = max(0.0, min(tokens, left))
    one._write(segment._AT_BUCKETS + device * segment._LINE, one.taken(device) + round(taken * TOKEN))
    return taken


# -------------------------------------------------------------------------------------------------------- its steps


@pytest.mark.parametrize("percent", [10, 30, 70])
async def test_a_job_that_always_has_work_comes_to_rest_at_its_part(scene: Scene, percent: int) -> None:
    """A device does 4,000 tokens of work a second; the job is one of two processes, and a neighbour counts for none."""
    busiest = 4000 * STEP_S
    one = scene.attempt("one", Part(GPU, rate=RATE * percent / 100))
    holds(one, 0, owner_of(os.getpid(), own_ticks()), here())
    used: list[float] = []
    for _ in range(600):
        one._granted[0] = one._read(segment._AT_GRANTED)[0]
        used.append(takes(one, 0, busiest) / busiest)
        scene.used.of[GPU] = {os.getpid(): used[-1], 1: 1.0 - used[-1]}
        await scene.step()
    assert sum(used[-300:]) / 300 == pytest.approx(percent / 100, abs=0.05)
    one.close()


async def test_a_share_that_is_changed_holds_from_the_next_step(scene: Scene) -> None:
    one = scene.attempt("one", Part(GPU, rate=RATE * 0.7))
    await scene.step()
    await scene.step()
    [attempt] = scene.control._attempts.values()
    assert attempt.controllers[0].target == pytest.approx(0.7)
    one.set_rate(0, RATE * 0.2)
    await scene.step()
    assert attempt.controllers[0].target == pytest.approx(0.2)
    one.set_rate(0, 0)
    await scene.step()
    assert not attempt.controllers, "it has all of it"
    one.close()


async def test_fact_59_the_heartbeat_is_of_each_step_and_of_every_attempt(scene: Scene) -> None:
    made = [scene.attempt(str(number), Part(GPU)) for number in range(3)]
    before_ns = time.monotonic_ns()
    await scene.step()
    assert all(before_ns <= one._read(segment._AT_HEARTBEAT)[0] <= time.monotonic_ns() for one in made)
    for one in made:
        one.close()


async def test_where_nvml_tells_nothing_tokens_come_at_a_constant_rate_and_it_is_said_once(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    one = scene.attempt("one", Part(GPU, rate=1000), Part(OTHER, rate=3))
    scene.used.of[GPU] = scene.used.of[OTHER] = "Not Supported"
    for _ in range(30):
        await scene.step()
    found = Segment.adopt(one.path)
    assert found.refill(0, 0, 0) == pytest.approx(2000), "room for two seconds"
    assert found.refill(1, 0, 0) == pytest.approx(29 * STEP_S * 3), "less than the dearest launch"
    assert caplog.text.count("device 11111111-1111-1111-1111-111111111111: Not Supported") == 1
    assert caplog.text.count("device 22222222-2222-2222-2222-222222222222: Not Supported") == 1
    assert "GPU-" not in caplog.text, "it may be a MIG slice"
    assert scene.used.asked == [GPU, OTHER], "they are not asked at each step"
    for uuid in (GPU, OTHER):
        scene.used.of[uuid] = {}
    await scene.step(RETRY_S)
    assert caplog.text.count("is known again") == 2
    [attempt] = scene.control._attempts.values()
    assert set(attempt.controllers) == {0, 1}
    found.close()
    one.close()


async def test_a_job_whose_processes_cannot_be_told_has_a_constant_rate(scene: Scene) -> None:
    """Of another PID namespace, and not found here: they seem to use nothing, and would get all of the GPU."""
    one = scene.attempt("one", Part(GPU, rate=1000))
    holds(one, 0, owner_of(7, 1), 4)
    scene.owners.sees_all_pids = False
    for _ in range(3):
        await scene.step()
    found = Segment.adopt(one.path)
    assert found.refill(0, 0, 0) == pytest.approx(200)
    found.close()
    one.close()


async def test_a_pid_of_another_namespace_is_no_process_of_this_one(scene: Scene) -> None:
    one = scene.attempt("one", Part(GPU, rate=1000))
    scene.used.of[GPU] = {2**22: 0.5}  # beyond the greatest pid that there can be
    scene.control._sees_all_pids = False
    for _ in range(3):
        await scene.step()
    [attempt] = scene.control._attempts.values()
    assert not attempt.controllers, "its rate is constant"
    one.close()


async def test_an_attempt_that_ends_meanwhile_writes_into_no_other_file(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor may be another file's by the time that NVML answers."""
    one = scene.attempt("one", Part(GPU, rate=1000))
    await scene.step()
    number = one._file
    worked = scene.used.worked

    async def ends(slot: int) -> dict[int, float]:
        scene.over("one")
        other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
        if other != number:
            os.dup2(other, number)
            os.close(other)
        return await worked(slot)

    monkeypatch.setattr(scene.used, "worked", ends)
    await scene.step(2.0)
    os.close(number)
    assert (tmp_path / "other").read_bytes() == b""
    await scene.step()
    assert not scene.control._attempts


@pytest.mark.parametrize("is_measured", [True, False])
async def test_what_a_job_writes_into_its_segment_costs_it_alone(scene: Scene, is_measured: bool) -> None:
    forged = scene.attempt("forged", Part(GPU, rate=1000))
    one = scene.attempt("one", Part(GPU, rate=1000))
    for at in range(segment._AT_HEARTBEAT, segment._AT_UUID, 8):
        forged._write(at, 2**64 - 1)
    forged._write(segment._AT_COUNTS + 8, 2**64 - 1)
    forged._write(segment._AT_BUCKETS, 2**64 - 1)
    if not is_measured:
        scene.used.of[GPU] = "Not Supported"
    for _ in range(200):
        await scene.step()
    assert one._read(segment._AT_HEARTBEAT)[0]
    assert one._read(segment._AT_GRANTED)[0], "its neighbour has its tokens"
    forged.close()
    one.close()


async def test_without_a_free_descriptor_it_goes_on_with_the_segments_that_it_has(scene: Scene) -> None:
    one = scene.attempt("one", Part(GPU))
    await scene.step()
    one.beat(1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        await scene.step(2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert one._read(segment._AT_HEARTBEAT)[0] > 1
    one.close()


async def test_what_dead_processes_held_is_given_back(scene: Scene) -> None:
    one = scene.attempt("one", Part(GPU))
    own, ticks = os.getpid(), own_ticks()
    scene.owners.sees_all_pids = True
    # a process of this namespace, one of its number that is over, one of another namespace that is found by its number
    # there, and one that is not
    mine, before = owner_of(own, ticks), owner_of(own, ticks - 1)
    for number, (owner, namespace) in enumerate(((mine, here()), (before, here()), (mine, 4), (owner_of(7, 1), 4))):
        holds(one, number, owner, namespace, 100 + number)
    assert one.used(0) == 406
    await scene.step()
    await scene.step(2.0)
    assert [slot.number for slot in one.slots()] == [0, 2]
    assert one.used(0) == 202
    assert [scene.owners.pid_of(slot) for slot in one.slots()] == [own, own]
    scene.over("one")
    await scene.step(2.0)
    assert not scene.owners._hosts, "nothing is kept of an attempt that is over"


async def test_each_second_a_segment_is_told_what_nvml_says_of_its_processes(scene: Scene) -> None:
    """The slot of this process, which counts 100 MiB and holds 400, and a process of the job without a slot."""
    one = scene.attempt("one", Part(GPU, limit_bytes=1 << 30), Part(OTHER))
    mine = owner_of(os.getpid(), own_ticks())
    holds(one, 0, mine, here(), 100 << 20)
    await scene.step()
    scene.of = {7: ("acme", "one", 0, 1, 10), 8: ("acme", "other", 0, 1, 10)}
    scene.used.holds[GPU] = {os.getpid(): 400, 7: 50, 8: 60}
    await scene.step(2.0)
    assert told(one, 0) == (mine, 300 << 20, one._read(segment._AT_READING)[0])
    assert one._read(segment._AT_BEYOND)[0] == 50 << 20
    scene.used.holds[GPU] = {os.getpid(): 80, 9: 50}
    await scene.step(2.0)
    assert told(one, 0)[1] == 0, "it is never less than what the process counts"
    assert one._read(segment._AT_BEYOND)[0] == 0
    one.close()


def told(one: Segment, number: int) -> tuple[int, ...]:
    """Return what the process of a slot was told of the first device: its owner, the bytes, and the reading."""
    return one._read(segment._AT_TOLD + number * segment._TOLD_BYTES, 3)


async def test_what_changes_while_nvml_is_asked_leaves_the_number_before_as_far_as_it_can_be(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = scene.attempt("one", Part(GPU, limit_bytes=1 << 30))
    mine = owner_of(os.getpid(), own_ticks())
    holds(one, 0, mine, here(), 100)
    at = segment._AT_SLOTS + segment._LINE
    changes, moves, mib = 0, 0, 0

    async def held(slot: int) -> dict[int, int]:
        nonlocal changes
        changes += moves
        one._write(at + 2 * 8, changes)  # it took or freed so much, and the driver is done
        one._write(at + 3 * 8, changes)
        return {os.getpid(): mib}

    monkeypatch.setattr(scene.used, "held", held)
    await scene.step()
    for changed, says, guess, beyond in (
        (0, 300, 7 << 20, 300),
        (10, 305, 0, 300),  # within what changed: the number before may be true
        (10, 320, 0, 310),  # it is at least this
        (10, 200, 0, 210),  # and at most this
        (10, 205, 3 << 20, 213),  # the guess is in what NVML says
        (0, 200, 0, 200),
    ):
        moves, mib = changed << 20, says
        one._write(at + 4 * 8, guess)
        one._write(at + 6 * 8, one._read(segment._AT_READING)[0])
        await scene.step(2.0)
        assert told(one, 0)[1:] == ((beyond << 20) - 100, one._read(segment._AT_READING)[0])
    one.close()


async def test_a_step_that_fails_is_logged_once_and_the_next_ones_go_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = scene.attempt("one", Part(GPU))
    steps = 0

    async def fails(now_s: float) -> None:
        nonlocal steps
        steps += 1
        if steps < 4:
            raise ZeroDivisionError
        one.beat()

    monkeypatch.setattr(module, "STEP_S", 0.0)
    monkeypatch.setattr(scene.control, "step", fails)
    running = asyncio.create_task(scene.control.run())
    await until(lambda: one._read(segment._AT_HEARTBEAT)[0], what="a heartbeat")
    running.cancel()
    assert caplog.text.count("a step failed") == 1
    one.close()
