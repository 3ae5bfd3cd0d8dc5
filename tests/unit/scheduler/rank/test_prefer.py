"""`gpu.prefer` of sharers: join others, or stay apart, whatever the scheduler's ranking would do."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.scheduler.core.config import Config
from moorage.schemas.gpu import GpuSpec
from tests.unit.scheduler.driving import Driving

RANKERS = ["pack", "fragments", "headroom"]


def fleet(ranker: str, workers: int = 2, gpus: int = 2) -> Driving:
    return Driving.with_hosts(*[gpus] * workers, config=Config(ranker=ranker))


def shares(prefer: str | None, mode: str = "mps", **more: Any) -> dict[str, Any]:
    return {"gpu": {"sharing": mode, "prefer": prefer, "share": {"compute_percent": 25}, **more}}


def places(drive: Driving, job: str, replicas: int) -> list[tuple[str, int]]:
    return [(drive.placed_on(job)[at], slot) for at in range(replicas) for slot in drive.slots(job, at)]


@pytest.mark.parametrize("mode", ["mps", "time-slice"])
@pytest.mark.parametrize("ranker", RANKERS)
def test_spread_takes_a_gpu_of_its_own_as_long_as_there_is_one(ranker: str, mode: str) -> None:
    drive = fleet(ranker)
    drive.submit("apart", replicas=4, **shares("spread", mode))
    assert len(set(places(drive, "apart", 4))) == 4
    drive.submit("more", replicas=4, **shares("spread", mode))
    assert len(set(places(drive, "more", 4))) == 4, "then beside as few others as there can be"


@pytest.mark.parametrize("ranker", RANKERS)
def test_pack_joins_the_fullest_gpu_that_has_room(ranker: str) -> None:
    drive = fleet(ranker)
    drive.submit("apart", replicas=3, **shares("spread"))
    drive.submit("pack", replicas=6, **shares("pack"))
    found = places(drive, "pack", 6)
    assert len(set(found)) == 2, "three beside the first, three beside the second"
    assert set(found) < set(places(drive, "apart", 3))
    drive.submit("whole", gpu={})
    assert drive.states("whole") == ["PLACED"], "the GPU that nobody shares was kept"


@pytest.mark.parametrize("ranker", RANKERS)
def test_several_gpus_a_replica_a_gang_and_a_host_each(ranker: str) -> None:
    drive = fleet(ranker, workers=2, gpus=4)
    drive.submit("first", replicas=2, **shares("spread", count=2, scheduling="spread"))
    assert sorted(drive.placed_on("first")) == ["w0", "w1"]
    drive.submit("second", replicas=2, **shares("spread", count=2, scheduling="spread"))
    assert not set(places(drive, "second", 2)) & set(places(drive, "first", 2)), "others of the same host"
    drive.submit("third", replicas=2, **shares("pack", count=2, scheduling="spread"))
    assert len(set(places(drive, "third", 2))) == 4
    drive.submit("gang", replicas=4, **shares("spread", scheduling="gang"))
    assert len(set(places(drive, "gang", 4))) == 4
    drive.submit("wide", **shares("spread", count=4))
    assert len(set(places(drive, "wide", 1))) == 4


def test_it_needs_sharing() -> None:
    trouble = GpuSpec(prefer="pack").trouble
    assert trouble is not None
    assert trouble.field == "gpu.prefer"
    assert GpuSpec(prefer="pack", sharing="mps").trouble is None
