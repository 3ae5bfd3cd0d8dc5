"""What is made for members before they come: bounded, given back, and never under a name that was used before."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.worker.cgroup import CgroupBase
from moorage.worker.supervisor.kit_pool import KITS_MAX, KitPool
from tests.waiting import until
from tests.worker.supervisor_rig import CGROUPS_WORK


@pytest.fixture
def grouped() -> Iterator[CgroupBase]:
    if not CGROUPS_WORK:
        pytest.skip("no writable cgroup v2 here")
    made = CgroupBase.open(f"moorage-kits-{os.getpid()}")
    assert made is not None
    yield made
    made.remove()


@pytest.fixture(params=["cgroup", "walk"])
def base(request: pytest.FixtureRequest) -> CgroupBase | None:
    return request.getfixturevalue("grouped") if request.param == "cgroup" else None


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def groups(base: CgroupBase | None) -> list[str]:
    return [] if base is None else [each.name for each in Path(base.path).iterdir() if each.is_dir()]


async def test_a_stock_is_bounded_and_given_back(base: CgroupBase | None) -> None:
    before = descriptors()
    pool = KitPool(base)
    pool.fill()
    for _ in range(KITS_MAX):
        pool.add()
    assert len(pool) == KITS_MAX
    assert len(groups(base)) == (0 if base is None else KITS_MAX)
    pool.close()
    pool.fill()
    assert len(pool) == 0
    assert descriptors() == before
    assert groups(base) == []


async def test_a_kit_serves_one_member_and_one_that_is_missing_is_made(base: CgroupBase | None) -> None:
    pool = KitPool(base)
    pool.fill()
    kits = [pool.take() for _ in range(KITS_MAX + 2)]
    assert len(pool) == 0
    assert len({kit.stdout for kit in kits} | {kit.stderr for kit in kits}) == 2 * len(kits)
    for kit in kits:
        assert not os.get_blocking(kit.stdout[0])
        assert os.get_blocking(kit.stdout[1])
        os.write(kit.stderr[1], b"x")
        assert os.read(kit.stderr[0], 9) == b"x"
    if base is not None:
        assert len({kit.cgroup.path for kit in kits if kit.cgroup is not None}) == len(kits)
        assert all(os.path.samestat(os.fstat(kit.folder), os.stat(kit.cgroup.path)) for kit in kits if kit.cgroup)
    for kit in kits:
        kit.close()
    assert groups(base) == []


async def test_after_a_start_that_none_follows_it_is_filled_again(base: CgroupBase | None) -> None:
    pool = KitPool(base)
    pool.fill()
    pool.take().close()
    pool.fill_later()
    async with asyncio.timeout(30):
        await until(lambda: len(pool) == KITS_MAX)
    pool.fill_later()
    pool.close()


async def test_a_group_that_somebody_cleared_away_is_not_used(grouped: CgroupBase) -> None:
    pool = KitPool(grouped)
    pool.fill()
    for name in groups(grouped):
        os.rmdir(f"{grouped.path}/{name}")
    kit = pool.take()
    assert kit.cgroup is not None
    assert kit.cgroup.exists()
    kit.close()
    pool.close()
    assert groups(grouped) == []


async def test_no_two_supervisors_name_a_group_alike(grouped: CgroupBase) -> None:
    """The next one kills what stands under the names of the former one's members: none of its own may be there."""
    named: list[set[str]] = []
    for _ in range(2):
        kits = [pool.take() for pool in [KitPool(grouped)] for _ in range(2)]
        named.append({kit.cgroup.path for kit in kits if kit.cgroup is not None})
        for kit in kits:
            kit.close()
    former, own = named
    assert len(former) == len(own) == 2
    assert not former & own
