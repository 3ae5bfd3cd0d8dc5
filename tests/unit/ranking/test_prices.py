"""Prices: what a device is worth depends on what runs out first, and on who needs what is left of it."""

from __future__ import annotations

from moorage.ranking.fragments import LOOK_MIN, Fragments
from moorage.ranking.prices import ONE, Prices
from moorage.ranking.table import TYPE, HostTable
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.schemas.gpu import GpuSpec
from tests.unit.ranking.test_fragments import add, request, worker


def test_no_gpu_is_dear_where_processors_run_out_first() -> None:
    """More processors are asked for than there are: the mix is as if it asked for all, and GPUs are left by then."""
    shapes, fleet = Shapes(), Fleet()
    for num, (model, gpus, cpu) in enumerate([("NVIDIA T4", 2, 104_000), *[("NVIDIA A10", 8, 64_000)] * 3]):
        add(fleet, worker(num, [model] * gpus, cpu))
    light, alone = shapes.of(request(GpuSpec(), 4_000)), shapes.of(request(None, 16_000))

    def dearest(mix: list[tuple[Shape, int]]) -> int:
        return int(Prices(HostTable(fleet), mix, None).settle().gpu.max())

    assert dearest([(light, 10), (alone, 2)]) * 4 > ONE
    assert dearest([(light, 10), (alone, 10)]) * 4 < ONE


T4, A10 = "NVIDIA T4", "NVIDIA A10"


def test_the_less_is_left_of_a_model_the_dearer_it_is_to_who_has_a_choice() -> None:
    shapes, fleet = Shapes(), Fleet()
    hosts = [add(fleet, worker(num, [(T4, A10)[num % 2]] * 4)) for num in range(8)]
    named, free = shapes.of(request(GpuSpec(model="=T4"))), shapes.of(request(GpuSpec()))
    table = HostTable(fleet)
    prices = Prices(table, [(named, 2), (free, 14)], None).settle()

    def charges() -> dict[str, int]:
        """What a request with a choice is charged by model."""
        table.look()
        prices.look(table)
        found = prices.charges(table, free).tolist()
        return {host.cls.devices[0][2]: found[table.cells[TYPE, row]] for row, host in enumerate(hosts)}

    empty = charges()
    assert empty[T4] > empty[A10]
    for host in hosts[:6:2]:
        fleet.take_all(host, free, [1, 2, 4, 8])
    assert charges()[T4] > empty[T4]
    for host in hosts[:6:2]:
        fleet.give_all(host, [(free, 1 << slot) for slot in range(4)])
    for host in hosts[1::2]:
        fleet.take_all(host, free, [1, 2, 4])
    assert charges()[T4] < empty[T4], "there are few of the others now"


def test_who_has_a_choice_leaves_the_last_of_a_model_to_who_has_none() -> None:
    """What is left is looked at between records, each time that enough hosts have changed."""
    shapes, fleet, ranker = Shapes(), Fleet(), Fragments()
    for num in range(24):
        add(fleet, worker(num, [(T4, A10)[num % 2]] * 4))
    named, free = shapes.of(request(GpuSpec(model="=T4"))), shapes.of(request(GpuSpec()))
    for shape, number in ((named, 30), (free, 60)):
        ranker.mix.add(shape, number)
    ranker.mix.use()
    taken = {T4: 0, A10: 0}
    for number in range(48 + LOOK_MIN // 2):
        assert ranker.prepare(fleet)
        shape = named if number % 3 == 0 else free
        choice = ranker.choose(fleet, shape, {}, frozenset())
        assert choice is not None
        fleet.take(choice.host, shape, choice.mask)
        taken[choice.host.cls.devices[0][2]] += shape is free
    assert taken[A10] > 4 * taken[T4]
