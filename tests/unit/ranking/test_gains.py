"""What a placement takes off the waste of a host (`gains.py`) is what the waste is less by once it is placed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moorage.ranking.gains import gains, gains_by_device
from moorage.ranking.table import CPU, FREE, NO_ROOM, ROOM, TYPE, Ask, HostTable
from moorage.ranking.waste import HUGE, Waste
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE, Host
from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.scheduler.core.rank.ranker import Pack
from moorage.schemas.gpu import GpuSpec, Share, Sharing
from tests.unit.ranking.test_fragments import MODELS, add, asked, request, worker


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


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("modes", [("mps",), ("time-slice",), ("mps", "time-slice")])
@pytest.mark.parametrize("seed", range(6))
def test_a_gain_is_what_is_wasted_less_once_it_is_placed(seed: int, modes: tuple[Sharing, ...], mixed: bool) -> None:
    chance, shapes = random.Random(f"{seed} {modes} {mixed}"), Shapes()
    kinds = [asked(chance, shapes, modes) for _ in range(40)]
    kinds.append(shapes.of(request(GpuSpec(count=2), 1_000)))
    fleet = _fleet(chance, kinds, mixed)
    table = HostTable(fleet)
    several = seed % 2 == 0
    waste = Waste(table, [(shape, chance.randrange(1, 50)) for shape in kinds if several or shape.count <= 1], 4)
    assert waste.shortens == several
    compared = shared = 0
    for shape in kinds:
        ask = Ask(shape, table)
        if shape.mode > EXCLUSIVE and shape.count > 1:
            continue  # what its devices do to each other is left out
        rows = ask.able(table)
        found = gains(table, waste, ask, rows, table.cells.take(rows, 1)).tolist()
        for row, gain in zip(rows.tolist(), found, strict=True):
            host = table.hosts[row]
            assert host is not None
            if shape.mode > EXCLUSIVE:
                by_device = gains_by_device(table, waste, ask, row).tolist()
                assert max(by_device) == gain
                for slot, one in enumerate(by_device):
                    need = ask.needs[table.kinds_of_type[slot, table.cells[TYPE, row]]]
                    if one > -HUGE >> 1:
                        assert need <= table.cells[ROOM + slot, row] < NO_ROOM
                        assert one == _wasted_less(table, waste, row, shape, 1 << slot, need)
                        shared += 1
            elif len({device[1:] for device in host.cls.devices}) <= 1:  # else it is counted as of one kind
                slots = host.pick(shape)
                assert slots is not None
                assert gain == _wasted_less(table, waste, row, shape, slots, 100)
                compared += 1
    assert compared > 100
    assert shared > 10


def _wasted_less(table: HostTable, waste: Waste, row: int, shape: Shape, mask: int, need: int) -> int:
    """Return by how much less of a host is wasted once a replica takes so many percent of each of these slots."""
    before = table.cells[:, row : row + 1]
    after = before.copy()
    after[CPU] -= shape.cpu_milli
    for slot in range(table.width):
        if mask >> slot & 1:
            after[FREE] -= after[ROOM + slot] == 100
            after[ROOM + slot] = after[ROOM + slot] - need if shape.mode > EXCLUSIVE else NO_ROOM
    return int(waste.of(table, before)[0] - waste.of(table, after)[0])


def test_a_sharer_is_offered_no_host_without_room_and_every_host_with_some() -> None:
    """A device that others share counts with what they leave, as an own one does where none is free."""
    shapes, fleet = Shapes(), Fleet()
    half, most = (shapes.of(request(GpuSpec(sharing="mps", share=Share(0, percent)))) for percent in (50, 80))
    hosts = [add(fleet, worker(num, [MODELS[0]])) for num in range(3)]
    for host, shape in zip(hosts, (half, most), strict=False):
        fleet.take(host, shape, 1)
    table = HostTable(fleet)
    for rows in (None, np.arange(3)):
        assert Ask(half, table).able(table, rows).tolist() == [0, 2]
        assert Ask(most, table).able(table, rows).tolist() == [2]


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
