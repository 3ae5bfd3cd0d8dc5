"""What a job uses of the GPUs that it has alone, measured by a real worker over NVML as a stub in C."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from moorage.schemas.codec import encode
from moorage.schemas.frames import Place, used_detail, used_of
from moorage.schemas.job import Request
from moorage.worker.inventory.base import SlotReading
from moorage.worker.member_messages import Member, MemberName
from moorage.worker.usage_meter import UsageMeter
from tests.nvidia.stub import Board
from tests.waiting import until
from tests.worker.test_memory_guard import GPU, name_of, scene

NAME: MemberName = ("acme", "j", 0, 1, 10)


def held(mode: str = "exclusive", slots: tuple[int, ...] = (0,), phase: str = "running") -> dict[MemberName, Member]:
    place = Place(*NAME, list(slots), mode, False, b"")

    request = msgspec.convert({"gpu": {}, "run": {"argv": ["true"]}}, Request)
    member = Member(NAME, place, request, 0.0)
    member.phase = phase  # type: ignore[assignment]
    return {NAME: member}


READINGS = [SlotReading(util_percent=50, memory_used_mib=1000), SlotReading(util_percent=100, memory_used_mib=3000)]


def test_what_devices_do_between_two_readings_counts_for_the_job_that_has_them() -> None:
    meter = UsageMeter(held(slots=(0, 1)))
    assert meter.read(READINGS, 100.0) is None, "it was not there at a reading before"
    metered = meter.read(READINGS, 102.0)
    assert metered is not None
    assert metered.items == [(NAME, 3000, 8_000_000)]


@pytest.mark.parametrize("wrong", [{"mode": "time-slice"}, {"phase": "claimed"}, {"phase": "exited"}, {"slots": ()}])
def test_others_are_not_measured(wrong: dict[str, object]) -> None:
    meter = UsageMeter(held(**wrong))  # type: ignore[arg-type]
    meter.read(READINGS, 100.0)
    assert meter.read(READINGS, 102.0) is None


def test_what_a_vm_uses_of_its_gpu_is_not_taken_for_nothing() -> None:
    meter = UsageMeter(held())
    readings = [SlotReading(handed_on=True), READINGS[1]]
    meter.read(readings, 100.0)
    assert meter.read(readings, 102.0) is None


@pytest.mark.parametrize("detail", ["", "used:", "used:1", "used:1,2,3", "used:-1,2", "used:1,²", f"used:1,{'9' * 15}"])
def test_a_detail_that_says_nothing(detail: str) -> None:
    assert used_of(detail) is None


def test_a_detail_says_what_was_used() -> None:
    assert used_of(used_detail(3, 4)) == (3, 4)
    assert used_of(used_detail(10**30, 10**30)) == (10**14 - 1, 10**14 - 1)


@pytest.mark.slow
async def test_the_end_of_a_job_says_what_it_used(nats_url: str, unique: str, tmp_path: Path) -> None:
    board = Board(GPU, used_mib=1, more={"util": 50})
    async with scene(nats_url, unique, tmp_path, board) as one:
        run = {"argv": ["/bin/sh", "-c", f"while [ ! -e {tmp_path}/stop ]; do sleep 0.05; done"]}
        await one.leader.want("w1", Place(*name_of("j"), [0], "exclusive", False, encode({"gpu": {}, "run": run})))

        def measured() -> Member | None:
            member = one.agent.members.held.get(name_of("j"))
            return member if member is not None and member.used is not None and member.used[0] >= 300 else None

        member = await until(measured, what="it is measured")
        assert member is not None
        (tmp_path / "stop").touch()
        freed = await one.leader.heard("w1", "freed", name_of("j"))
        used = used_of(freed.detail)
        assert used is not None
        assert member.used is not None
        assert used == (member.used[0], member.used[1] // 1000)
