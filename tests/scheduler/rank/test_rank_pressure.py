"""Pressure: those who may go anywhere keep off what others must have, by how much of it is left for whom."""

from __future__ import annotations

import random

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.scheduler.core.rank.fragments import Fragments
from moorage.scheduler.core.rank.pressure import LOOK_MIN, ONE, Left, Pressure, classes_of
from moorage.scheduler.core.rank.prices import ONE as ONE_GPU
from moorage.scheduler.core.rank.prices import Prices
from moorage.scheduler.core.rank.ranker import lowest_slots
from moorage.scheduler.core.rank.table import TYPE, HostTable
from moorage.schemas.gpu import GpuSpec
from tests.scheduler.rank.test_rank_fragments import add, request, worker

T4, A10 = "NVIDIA T4", "NVIDIA A10"


def fleet_of(*hosts: tuple[str, int, int]) -> tuple[Fleet, list[Host]]:
    """Hosts with a model, so many devices, and processors in thousandths."""
    fleet = Fleet()
    return fleet, [add(fleet, worker(num, [model] * gpus, cpu)) for num, (model, gpus, cpu) in enumerate(hosts)]


def pressures(fleet: Fleet, mix: list[tuple[Shape, int]]) -> list[int]:
    """By host, on a table of its own: two sorts of hosts must differ in devices or processors."""
    table = HostTable(fleet)
    found = Pressure(table, mix).of_type.tolist()
    return [found[kind] for kind in table.cells[TYPE, : len(table)].tolist()]


def place(fleet: Fleet, host: Host, shape: Shape) -> int:
    mask = host.open & -host.open if shape.count == 1 else (1 << shape.count) - 1
    fleet.take(host, shape, mask)
    return mask


def test_whoever_may_go_anywhere_presses_everywhere_alike() -> None:
    shapes = Shapes()
    fleet, _ = fleet_of((T4, 4, 0), (A10, 8, 0))
    assert set(pressures(fleet, [(shapes.of(request(GpuSpec())), 7)])) <= {ONE - 1, ONE}  # rounded down


def test_what_is_left_for_them_counts_and_not_what_there_was() -> None:
    """Of 46 GPUs asked for, 6 must be T4, 16 are for two who take a host: T4 are kept until whole hosts are rarer."""
    shapes = Shapes()
    named, large, free = (shapes.of(request(gpu)) for gpu in (GpuSpec(model="=T4"), GpuSpec(count=8), GpuSpec()))
    fleet, (_, _, *big) = fleet_of((T4, 4, 0), (T4, 4, 0), *[(A10, 8, 0)] * 4)
    mix = [(named, 6), (large, 2), (free, 24)]
    rare, common = pressures(fleet, mix)[1:3]
    assert rare > common
    for host in big[1:]:
        for _ in range(5):
            place(fleet, host, free)
    rare, common = pressures(fleet, mix)[1:3]
    assert common > rare


def test_those_who_need_many_processors_press_on_the_hosts_that_have_them() -> None:
    shapes = Shapes()
    fleet, _ = fleet_of((A10, 8, 128_000), *[(A10, 8, 96_000)] * 3)
    free, few, many = (
        shapes.of(request(GpuSpec(count=count), cpu)) for count, cpu in ((1, 4_000), (8, 32_000), (8, 120_000))
    )
    first, *others = pressures(fleet, [(free, 40), (few, 4), (many, 2)])
    assert first > max(others)


def test_a_fleet_that_fills_is_looked_at_again() -> None:
    """Those who may go anywhere keep off the T4 until whole hosts are what is scarce."""
    shapes = Shapes()
    fleet, _ = fleet_of(*[(T4, 4, 0)] * 12, *[(A10, 8, 0)] * 12)
    ranker = Fragments()
    named, large, free = (shapes.of(request(gpu)) for gpu in (GpuSpec(model="=T4"), GpuSpec(count=8), GpuSpec()))
    for shape, number in ((named, 36), (free, 288), (large, 8)):
        ranker.mix.add(shape, number)
    ranker.mix.use()
    whole: dict[str, int] = {}  # hosts with all 8 free when the first went there
    for _ in range(96):
        choice = ranker.choose(fleet, free, {}, frozenset())
        assert choice is not None
        whole.setdefault(choice.host.cls.devices[0][2], sum(h.open.bit_count() == 8 for h in fleet.hosts.values()))
        fleet.take(choice.host, free, choice.mask)
    assert whole[A10] == 12
    assert 0 < whole[T4] < 12


def test_a_group_goes_no_further_than_the_next_look() -> None:
    """So that it is placed as its replicas one by one, each after the look that is due before it."""
    shapes = Shapes()
    fleet, _ = fleet_of((A10, 8, 0), (T4, 4, 0))
    ranker = Fragments()
    named, free = shapes.of(request(GpuSpec(model="=T4"))), shapes.of(request(GpuSpec()))
    for shape in [named, free] * 32:
        ranker.arrived(shape, 1)
    for _ in range(LOOK_MIN - 2):
        choice = ranker.choose(fleet, free, {}, frozenset())
    assert choice is not None
    fleet.take(choice.host, free, choice.mask)
    assert len(ranker.again(choice, free, 7)) == 2


def _prices(mix: list[tuple[Shape, int]], fleet: Fleet) -> Prices:
    return Prices(HostTable(fleet), mix, None).settle()


def test_no_gpu_is_dear_where_processors_run_out_first() -> None:
    """More processors are asked for than there are: the mix is as if it asked for all, and GPUs are left by then."""
    shapes = Shapes()
    fleet, _ = fleet_of((T4, 2, 104_000), *[(A10, 8, 64_000)] * 3)
    light, alone = shapes.of(request(GpuSpec(), 4_000)), shapes.of(request(None, 16_000))
    assert _prices([(light, 10), (alone, 2)], fleet).gpu.max() * 4 > ONE_GPU
    assert _prices([(light, 10), (alone, 10)], fleet).gpu.max() * 4 < ONE_GPU


def test_what_is_left_is_counted_by_what_changed_as_it_is_anew() -> None:
    """Over places and ends, a host that comes back with other devices, and one that is not usable for a while."""
    chance, shapes = random.Random(7), Shapes()
    fleet, hosts = fleet_of(*[(model, gpus, cpu) for model in (T4, A10) for gpus in (2, 4, 8) for cpu in (0, 32_000)])
    kinds = [
        shapes.of(request(gpu, cpu))
        for cpu in (0, 3_000)
        for gpu in (GpuSpec(), GpuSpec(count=2), GpuSpec(model="T4"), GpuSpec(count=4, model="A10"))
    ]
    table = HostTable(fleet)
    classes = classes_of(table, [(shape, 1) for shape in kinds])
    kept = Left(table, classes)
    kept.look(table)
    held: list[tuple[Host, Shape, int]] = []
    for number in range(200):
        host, shape = chance.choice(hosts), chance.choice(kinds)
        if host.usable and host.open.bit_count() >= shape.count and host.fits_host(shape):
            mask = lowest_slots(host.open, shape.count)
            fleet.take(host, shape, mask)
            held.append((host, shape, mask))
        if held and chance.random() < 0.4:
            fleet.give(*held.pop(chance.randrange(len(held))))
        if number % 40 == 20:
            idle = next(host for host in hosts if host.held == 0)
            hosts[hosts.index(idle)] = add(fleet, worker(idle.worker.num, [chance.choice((T4, A10))] * 2, 32_000))
        if number % 30 == 10:
            host.sick = 1 - host.sick
            fleet.refresh(host)
        if chance.random() < 0.3:
            table.look()
            assert len(table.types) == len(classes[0].runs_on), "all came back as one that there was"
            kept.look(table)
            anew = Left(table, classes)
            anew.look(table)
            assert (kept.by_type == anew.by_type).all()
    assert len(held) > 5
