"""What jobs use of GPUs, alone and as sharers, measured by a real worker over NVML as a stub in C."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import encode
from moorage.schemas.frames import UNKNOWN_MS, Device, Place, ReadUse, sum_known, used_detail, used_of
from moorage.schemas.job import Request
from moorage.worker.devices.readers.base import ProcessUse, SlotReading
from moorage.worker.drivers.noop import NoopDriver
from moorage.worker.session.attempt_messages import Attempt, Metered
from moorage.worker.sharing import usage_meter
from moorage.worker.sharing.usage_meter import UsageMeter
from tests.nvidia.stub import Board
from tests.system.worker.sharing.test_memory_guard import GPU, name_of, scene
from tests.waiting import until

NAME: AttemptName = ("acme", "j", 0, 1, 10)


OTHER: AttemptName = ("acme", "k", 0, 1, 11)


def held(
    mode: str = "exclusive", slots: tuple[int, ...] = (0,), phase: str = "running", name: AttemptName = NAME
) -> dict[AttemptName, Attempt]:
    place = Place(*name, list(slots), mode, False, b"")
    request = msgspec.convert({"gpu": {}, "run": {"driver": "noop"}}, Request)
    attempt = Attempt(name, place, request, 0.0)
    attempt.phase = phase  # type: ignore[assignment]
    return {name: attempt}


class Telling(NoopDriver):
    """A driver that knows the attempts of processes; None is one that hides its attempt."""

    tells_processes = True
    attempts: ClassVar[dict[int, AttemptName | None]] = {1: NAME, 2: NAME, 3: OTHER, 4: None}

    def attempts_of(self, pids: Collection[int]) -> dict[int, AttemptName | None]:
        return {pid: self.attempts[pid] for pid in pids if pid in self.attempts}


def metered(attempts: dict[AttemptName, Attempt], *readings: SlotReading, tells: bool = True) -> list[Any] | None:
    """What is measured of two seconds in which the readings hold: ms of GPU, MiB ms, and the MiB held."""
    meter = UsageMeter(attempts, {"noop": Telling() if tells else NoopDriver()})
    assert meter.read(readings, 100.0) is None, "they were not there at a reading before"
    found = meter.read(readings, 102.0)
    assert found is None or isinstance(found, Metered)
    return None if found is None else found.items


READINGS = [SlotReading(util_percent=50, memory_used_mib=1000), SlotReading(util_percent=100, memory_used_mib=3000)]


def test_what_mps_clients_do_is_their_devices_use_and_an_equal_part_counts_for_each() -> None:
    """NVML tells the work of the server alone: seen on an H200, 2026-11-27."""
    attempts = held("mps") | held("mps", name=OTHER)
    reading = SlotReading(85, 9000, used_by={1: ProcessUse(1636, None), 3: ProcessUse(1636, None)})
    meter = UsageMeter(attempts, {"noop": Telling()})
    uses = meter.measure([reading], 100.0)
    assert {name: (use.percent, use.shared_by, use.memory_mib) for name, [use] in uses.items()} == {
        NAME: (85, 2, 1636), OTHER: (85, 2, 1636),
    }  # fmt: skip
    assert metered(attempts, reading) == [(name, 42 * 20, 1636 * 2000, 1636) for name in (NAME, OTHER)]
    page = meter.recent.page(ReadUse("s", *NAME, 5, 1), [Device(0, "nvidia", "H200", GPU)])
    assert [(line.percent, line.shared_by) for line in page.devices] == [([85], 2)]


def test_what_devices_do_between_two_readings_counts_for_the_job_that_has_them() -> None:
    assert metered(held(slots=(0, 1)), *READINGS) == [(NAME, 3000, 8_000_000, 4000)]


@pytest.mark.parametrize("wrong", [{"mode": "time-slice"}, {"phase": "claimed"}, {"phase": "exited"}, {"slots": ()}])
def test_others_are_not_measured(wrong: dict[str, Any]) -> None:
    assert metered(held(**wrong), *READINGS) is None


def test_what_runs_where_a_frozen_attempt_waits_is_measured_alone() -> None:
    both = held() | held(name=OTHER)
    both[NAME].frozen = True
    assert metered(both, READINGS[0]) == [(OTHER, 1000, 2_000_000, 1000)]


def test_what_a_vm_uses_of_its_gpu_is_not_taken_for_nothing() -> None:
    assert metered(held(), SlotReading(handed_on=True)) is None


def test_a_device_that_does_not_answer_measures_nothing() -> None:
    assert metered(held(), SlotReading(health="unresponsive")) is None


def test_where_a_device_does_not_tell_its_work_memory_alone_is_measured() -> None:
    found = metered(held(slots=(0, 1)), READINGS[0], SlotReading(memory_used_mib=10))
    assert found == [(NAME, UNKNOWN_MS, 2_020_000, 1010)]


def sharers(mode: str = "time-slice") -> dict[AttemptName, Attempt]:
    return held(mode) | held(mode, name=OTHER)


def shared(*uses: ProcessUse) -> SlotReading:
    """A device on which processes 1, 2 and so on use this much."""
    return SlotReading(100, 9000, used_by=dict(enumerate(uses, 1)))


@pytest.mark.parametrize("mode", ["time-slice", "mps"])
def test_a_sharer_uses_what_its_processes_use(mode: str) -> None:
    uses = (ProcessUse(1000, 30), ProcessUse(500, 10), ProcessUse(2000, 0), ProcessUse(64, 5), ProcessUse(64, 5))
    assert metered(sharers(mode), shared(*uses)) == [(NAME, 800, 3_000_000, 1500), (OTHER, 0, 4_000_000, 2000)]


def test_work_that_the_device_does_not_tell_by_process_is_unknown_and_not_none() -> None:
    uses = (ProcessUse(1000, None), ProcessUse(500, None))
    assert metered(sharers(), shared(*uses)) == [(NAME, UNKNOWN_MS, 3_000_000, 1500), (OTHER, 0, 0, 0)]


def test_of_sharers_nothing_is_measured_where_a_process_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = shared(ProcessUse(1000, 10))
    assert metered(sharers(), SlotReading(50, 1000)) is None, "the board does not tell processes"
    assert metered(sharers(), uses, tells=False) is None, "the driver does not know whose they are"
    monkeypatch.setattr(usage_meter, "sees_all_pids", lambda: False)
    absent = SlotReading(100, 9000, used_by={2**22 + 1: ProcessUse(1000, 10)})  # above the kernel's greatest pid
    assert metered(sharers(), absent) is None, "a number may be another process here"


def test_what_is_known_of_two_durations_is_their_sum() -> None:
    assert [sum_known(*each) for each in ((1, 2), (UNKNOWN_MS, 2), (1, UNKNOWN_MS))] == [3, 2, 1]
    assert sum_known(UNKNOWN_MS, UNKNOWN_MS) == UNKNOWN_MS


@pytest.mark.parametrize(
    "detail",
    ["", "used:", "used:1", "used:1,2,3", "used:-2,2", "used:1,-1", "used:-1,-1", "used:1,²", f"used:1,{'9' * 15}"],
)
def test_a_detail_that_says_nothing(detail: str) -> None:
    assert used_of(detail) is None


def test_a_detail_says_what_was_used() -> None:
    assert used_of(used_detail(3, 4)) == (3, 4)
    assert used_of(used_detail(UNKNOWN_MS, 4)) == (UNKNOWN_MS, 4)
    assert used_of(used_detail(10**30, 10**30)) == (10**14 - 1, 10**14 - 1)


@pytest.mark.slow
async def test_the_end_of_a_job_says_what_it_used(nats_url: str, unique: str, tmp_path: Path) -> None:
    board = Board(GPU, used_mib=1, more={"util": 50})
    async with scene(nats_url, unique, tmp_path, board) as one:
        run = {"argv": ["/bin/sh", "-c", f"while [ ! -e {tmp_path}/stop ]; do sleep 0.05; done"]}
        await one.leader.want("w1", Place(*name_of("j"), [0], "exclusive", False, encode({"gpu": {}, "run": run})))

        def measured() -> Attempt | None:
            attempt = one.agent.attempts.held.get(name_of("j"))
            return attempt if attempt is not None and attempt.used is not None and attempt.used[0] >= 300 else None

        attempt = await until(measured, what="it is measured")
        assert attempt is not None
        (tmp_path / "stop").touch()
        freed = await one.leader.await_report("w1", "freed", name_of("j"))
        used = used_of(freed.detail)
        assert used is not None
        assert attempt.used is not None
        assert used == (attempt.used[0], attempt.used[1] // 1000)


@pytest.mark.slow
async def test_the_end_of_a_sharer_says_what_its_own_processes_used(nats_url: str, unique: str, tmp_path: Path) -> None:
    async with scene(nats_url, unique, tmp_path, Board(GPU)) as one:
        pids = {job: await one.hold(job, mib, 4000) for job, mib in (("a", 1000), ("b", 3000))}
        one.stub.boards[0].set(more={"util": 90}, works={pids["a"]: 30, pids["b"]: 60})
        held = one.agent.attempts.held

        def measured() -> bool:
            return all((used := held[name_of(job)].used) is not None and used[0] >= 300 for job in pids)

        await until(measured, what="both are measured")
        for job in pids:
            (tmp_path / job).unlink()
            os.kill(pids[job], signal.SIGTERM)
        found = {job: used_of((await one.leader.await_report("w1", "freed", name_of(job))).detail) for job in pids}
        assert found["a"] is not None
        assert found["b"] is not None
        assert found["b"][0] / found["a"][0] == pytest.approx(2, rel=0.5)
        assert found["b"][1] / found["a"][1] == pytest.approx(3300 / 1300, rel=0.5)
