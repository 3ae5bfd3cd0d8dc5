"""The classic policies choose as they are defined; each places what fits and nothing else."""

from __future__ import annotations

import random

import pytest

from bench.studies.placement.classic import CLASSIC, Fgd, but_for_memory
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.scheduler.core.rank.ranker import Pack
from moorage.schemas.gpu import GpuSpec, Share
from tests.unit.ranking.test_fragments import add, asked, fits, request, worker

T4 = "NVIDIA T4"


def fleet_of(*sizes: tuple[int, int]) -> tuple[Fleet, list[Host]]:
    """Hosts with so many GPUs and processors each, in thousandths."""
    fleet = Fleet()
    return fleet, [add(fleet, worker(num, [T4] * gpus, cpu)) for num, (gpus, cpu) in enumerate(sizes)]


def share(percent: int, shapes: Shapes, cpu_milli: int = 0) -> Shape:
    return shapes.of(request(GpuSpec(sharing="mps", share=Share(0, percent)), cpu_milli))


def chosen(name: str, fleet: Fleet, shape: Shape) -> tuple[int, int]:
    choice = CLASSIC[name]().choose(fleet, shape, {}, frozenset())
    assert choice is not None
    return choice.host.worker.num, choice.mask


def test_best_fit_leaves_least_of_the_sum_of_both() -> None:
    fleet, _ = fleet_of((8, 96_000), (2, 96_000), (2, 16_000))
    assert chosen("best-fit", fleet, Shapes().of(request(GpuSpec(), 8_000))) == (2, 1)


def test_dot_product_goes_where_least_of_what_is_asked_for_is_left() -> None:
    fleet, _ = fleet_of((8, 32_000), (2, 128_000))
    shapes = Shapes()
    assert chosen("dot-product", fleet, shapes.of(request(GpuSpec(), 1_000)))[0] == 1
    assert chosen("dot-product", fleet, shapes.of(request(None, 30_000)))[0] == 0


def test_fgd_counts_requests_that_differ_in_memory_alone_as_one() -> None:
    shapes = Shapes()
    half = share(50, shapes)
    whole = [shapes.of(request(GpuSpec(), memory_mib=1024 * size)) for size in range(1, 11)]
    assert but_for_memory([(half, 90), *((shape, 1) for shape in whole)]) == [(half, 90), (whole[0], 10)]
    others = [shapes.of(request(GpuSpec(model="A10"))), shapes.of(request(GpuSpec(), 1_000)), shapes.of(request(None))]
    apart = [(shape, 1) for shape in (half, whole[0], share(40, shapes), *others)]
    assert but_for_memory(apart) == apart


def test_fgd_gives_a_sharer_the_first_device_that_reaches_the_score_of_its_host() -> None:
    shapes = Shapes()
    fleet, (host,) = fleet_of((2, 0))
    ranker, fills = Fgd(), share(45, shapes)
    for shape, count in ((fills, 46), (share(25, shapes), 46), (share(50, shapes), 8)):
        ranker.mix.add(shape, count)
    ranker.mix.use()
    fleet.take(host, share(55, shapes), 0b10)  # the rest of it is just filled: better by less than a step
    choice = ranker.choose(fleet, fills, {}, frozenset())
    assert choice is not None
    assert choice.mask == 0b01


def test_random_is_the_same_each_time_and_goes_everywhere() -> None:
    fleet, _ = fleet_of(*[(2, 0)] * 5)
    shape = Shapes().of(request(GpuSpec()))
    runs = []
    for _ in range(2):
        ranker = CLASSIC["random"]()
        found = [ranker.choose(fleet, shape, {}, frozenset()) for _ in range(60)]
        runs.append([choice.host.worker.num for choice in found if choice is not None])
    assert runs[0] == runs[1]
    assert set(runs[0]) == set(range(5))


@pytest.mark.parametrize("name", sorted(CLASSIC))
@pytest.mark.parametrize("seed", range(4))
def test_what_fits_is_placed_and_nothing_else(name: str, seed: int) -> None:
    chance, shapes, fleet, ranker = random.Random(seed), Shapes(), Fleet(), CLASSIC[name]()
    kinds = [asked(chance, shapes) for _ in range(20)]
    for num in range(8):
        models = [chance.choice((T4, "NVIDIA A10"))] * chance.choice((0, 1, 4, 8))
        add(fleet, worker(num, models, chance.choice((0, 16_000))))
    members: list[tuple[Host, Shape, int]] = []
    for _ in range(150):
        shape = chance.choice(kinds)
        ranker.arrived(shape, 1)
        excluded = frozenset(chance.sample(range(8), chance.choice((0, 2))))
        choice = ranker.choose(fleet, shape, {}, excluded)
        assert (choice is None) == (Pack().choose(fleet, shape, {}, excluded) is None)
        if choice is not None:
            assert fits(choice, shape)
            fleet.take(choice.host, shape, choice.mask)
            members.append((choice.host, shape, choice.mask))
        while members and chance.random() < 0.4:
            fleet.give(*members.pop(chance.randrange(len(members))))
    assert members
