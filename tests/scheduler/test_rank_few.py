"""Hosts that are scored one by one (`few.py`) and with arrays (`gains.py`): the same hosts, gains and slots."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.host import EXCLUSIVE, Host
from moorage.scheduler.core.rank import few
from moorage.scheduler.core.rank.gains import gains, gains_by_device
from moorage.scheduler.core.rank.ranker import Pack
from moorage.scheduler.core.rank.table import NO_ROOM, NOTE, ROOM, Ask, HostTable
from moorage.scheduler.core.rank.waste import HUGE, Waste
from moorage.scheduler.core.shape import Shape, Shapes
from moorage.schemas.gpu import GpuSpec, Share, Sharing
from tests.scheduler.test_rank_fragments import MODELS, add, asked, request, worker


def _fleet(chance: random.Random, kinds: list[Shape], mixed: bool) -> Fleet:
    """Hosts of several models and sizes that are used at random; some devices are unwell, some hosts not usable."""
    fleet = Fleet()
    for num in range(40):
        count = chance.choice((0, 1, 2, 4, 8))
        models = [chance.choice(MODELS)] * count
        if mixed and num % 8 == 0:
            models = [chance.choice(MODELS) for _ in range(count)]
        add(fleet, worker(num, models, chance.choice((0, 8_000, 32_000)), memory_mib=chance.choice((0, 9_000))))
    for _ in range(90):
        shape = chance.choice(kinds)
        choice = Pack().choose(fleet, shape, {}, frozenset(chance.sample(range(40), 20)))
        if choice is not None:
            fleet.take(choice.host, shape, choice.mask)
    for num in chance.sample(range(40), 6):
        host: Host = fleet.hosts[num]
        host.sick, host.stale, host.waiting = chance.choice(((1, False, False), (2, True, False), (0, False, True)))
        fleet.refresh(host)
    return fleet


def _waste(chance: random.Random, table: HostTable, kinds: list[Shape], several: bool, weighed: bool) -> Waste:
    mix = [(shape, chance.randrange(1, 50)) for shape in kinds if several or shape.count <= 1]
    waste = Waste(table, mix, 4, [2_000, 5_000])
    if weighed:
        answering = np.array([[chance.choice((100, 100, NO_ROOM)) for _ in range(2)] for _ in table.kinds], np.int64)
        counts = np.array([1, 2 if several else 1], np.int64)
        waste.weigh(np.array([2_000, 5_000]), answering, np.array([700, 3_000]), counts)
    return waste


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("modes", [("mps",), ("time-slice",), ("mps", "time-slice")])
@pytest.mark.parametrize("seed", range(6))
def test_hosts_are_scored_one_by_one_as_with_arrays(seed: int, modes: tuple[Sharing, ...], mixed: bool) -> None:
    chance, shapes = random.Random(f"{seed} {modes} {mixed}"), Shapes()
    kinds = [asked(chance, shapes, modes) for _ in range(40)]
    kinds.append(shapes.of(request(GpuSpec(count=2), 1_000)))
    table = HostTable(_fleet(chance, kinds, mixed))
    several = seed % 2 == 0
    waste = _waste(chance, table, kinds, several, weighed=seed % 3 > 0)
    assert waste.shortens == several
    cells = table.cells[:, : len(table)]
    cells[NOTE] = waste.of(table, cells)
    for row, line in enumerate(table.lines):
        line[NOTE] = int(cells[NOTE, row])
        if not table.mixed:
            assert waste.of_one(line) == line[NOTE]
        assert line == table.cells[:, row].tolist()
    table.note = None if table.mixed else waste.of_one
    compared = shared = 0
    for shape in kinds:
        ask = Ask(shape, table)
        every = ask.able(table)
        some = np.array(sorted(chance.sample(range(len(table)), 20)), np.int64)
        assert few.able(table, ask, None) == every.tolist()
        assert ask.masks is not None or few.able(table, ask, some) == ask.able(table, some).tolist()
        if not few.is_simple(table, ask):
            continue
        found = gains(table, waste, ask, every, cells.take(every, 1)).tolist()
        for row, gain in zip(every.tolist(), found, strict=True):
            one, slot = few.gain(waste, ask, table.lines[row])
            assert (slot is None) == (gain < -HUGE >> 1)
            if slot is not None:
                assert one == gain
                compared += 1
            if slot is not None and shape.mode > EXCLUSIVE:
                assert slot == gains_by_device(table, waste, ask, row).argmax()
                shared += 1
    assert (compared > 100) == (not table.mixed)
    assert (shared > 20) == (not table.mixed and len(modes) == 1)


def test_a_sharer_is_offered_no_host_without_room_and_every_host_with_some() -> None:
    """A device that others share counts with what they leave, as an own one does where none is free."""
    shapes, fleet = Shapes(), Fleet()
    half, most = (shapes.of(request(GpuSpec(sharing="mps", share=Share(0, percent)))) for percent in (50, 80))
    hosts = [add(fleet, worker(num, [MODELS[0]])) for num in range(3)]
    for host, shape in zip(hosts, (half, most), strict=False):
        fleet.take(host, shape, 1)
    table = HostTable(fleet)
    for rows in (None, np.arange(3)):
        assert few.able(table, Ask(half, table), rows) == [0, 2]
        assert few.able(table, Ask(most, table), rows) == [2]


def test_who_asks_in_another_mode_is_not_offered_a_device_that_was_shared_before_anybody_asked_so() -> None:
    shapes, fleet = Shapes(), Fleet()
    mps, slices = (shapes.of(request(GpuSpec(sharing=mode, share=Share(0, 20)))) for mode in ("mps", "time-slice"))
    for num in range(2):
        add(fleet, worker(num, [MODELS[0]] * 2))
    fleet.take(fleet.hosts[0], mps, 0b01)
    table = HostTable(fleet)
    ask, rows = Ask(slices, table), np.arange(2)
    cells = table.cells.take(rows, 1)
    assert ask.rooms(table, rows, cells, cells[ROOM:]).T.tolist() == [[NO_ROOM, 100], [100, 100]]
    fleet.take(fleet.hosts[1], mps, 0b10)
    table.look()
    cells = table.cells.take(rows, 1)
    assert ask.rooms(table, rows, cells, cells[ROOM:]).T.tolist() == [[NO_ROOM, 100], [100, NO_ROOM]]
