"""Scarcity: who may go anywhere takes the hosts on which those who name a model find no processors any more."""

from __future__ import annotations

import pytest

from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.rank.fragments import Fragments
from moorage.scheduler.core.rank.pressure import LEFT_ALWAYS, LEFT_BACK
from moorage.scheduler.core.rank.scarcity import Scarcity
from moorage.scheduler.core.rank.table import HostTable
from moorage.scheduler.core.rank.waste import WEIGHTS
from moorage.scheduler.core.shape import Shape, Shapes
from moorage.schemas.gpu import GpuSpec, Share
from tests.scheduler.test_rank_fragments import add, request, worker

P100, A10 = "NVIDIA P100", "NVIDIA A10"


class World:
    """Four hosts of two P100 with 8 processors for each, and two of 8 A10 with plenty; all but few may go anywhere."""

    def __init__(self) -> None:
        self.fleet, self.shapes = Fleet(), Shapes()
        self.old = [add(self.fleet, worker(num, [P100] * 2, 16_000)) for num in range(4)]
        self.new = [add(self.fleet, worker(4 + num, [A10] * 8, 256_000)) for num in range(2)]
        half = Share(0, 50)
        self.free = self.shapes.of(request(GpuSpec(), 3_000))
        self.named = self.shapes.of(request(GpuSpec(model="=P100", sharing="mps", share=half), 12_000))
        self.light = self.shapes.of(request(GpuSpec(model="=P100", sharing="mps", share=half), 1_000))
        self.alone = self.shapes.of(request(None, 6_000))

    def weights(self, mix: list[tuple[Shape, int]], back: int = LEFT_ALWAYS) -> dict[Shape, int]:
        table = HostTable(self.fleet)
        found = Scarcity(table, mix)
        found.look(table, 2_400, back)
        asked = [shape for shape, _ in mix if shape.models]
        return {shape: weight for shape, weight in zip(asked, found.weights.tolist(), strict=True) if weight}


def _told(world: World) -> Fragments:
    """A ranker that knows of 97 requests that may go anywhere, and 3 that name a model: too few for the mix itself."""
    ranker = Fragments()
    for shape, number in ((world.free, 97), (world.named, 3)):
        ranker.mix.add(shape, number)
    ranker.mix.use()
    return ranker


def test_only_those_who_name_a_model_and_find_no_processors_weigh_more() -> None:
    world = World()
    mix = [(world.free, 80), (world.light, 10), (world.named, 10)]
    assert world.weights(mix) == {}
    for host in world.old[:3]:  # two whole devices are free there, and 10 processors
        world.fleet.take(host, world.alone, 0)
    weights = world.weights(mix)
    assert set(weights) == {world.named}
    # of 2,400 hundredths it finds 200 and what always counts, on devices of which 800 are left: 12 times less than 3
    assert WEIGHTS // 10 * 7 < weights[world.named] < WEIGHTS // 10 * 9
    assert world.weights(mix, LEFT_ALWAYS + LEFT_BACK)[world.named] < weights[world.named] // 2


def test_who_may_go_anywhere_takes_the_hosts_that_are_spoilt() -> None:
    """The first host is where ties go, and the only one left on which 12 processors are."""
    world = World()
    for host in world.old[1:]:
        world.fleet.take(host, world.alone, 0)
    ranker = _told(world)
    assert world.named not in [shape for shape, _ in ranker.mix.top()]
    away = frozenset(host.worker.num for host in world.new)
    for _ in range(6):
        choice = ranker.choose(world.fleet, world.free, {}, away)
        assert choice is not None
        assert choice.host in world.old[1:]
        world.fleet.take(choice.host, world.free, choice.mask)
    choice = ranker.choose(world.fleet, world.named, {}, frozenset())
    assert choice is not None
    assert choice.host is world.old[0]


def test_processors_that_run_out_later_are_seen_at_the_next_look() -> None:
    world = World()
    ranker = _told(world)
    away = frozenset(host.worker.num for host in world.new)
    first = ranker.choose(world.fleet, world.free, {}, away)
    assert first is not None
    assert first.host is world.old[0]
    for host in world.old[1:]:
        world.fleet.take(host, world.alone, 0)
    for _ in range(64):
        choice = ranker.choose(world.fleet, world.free, {}, away)
    assert choice is not None
    assert choice.host is not world.old[0]


@pytest.mark.parametrize("cpu_milli", [4_000, 12_000])
def test_hosts_that_have_processors_for_several_gpus_are_taken_last(cpu_milli: int) -> None:
    """The first host is where ties go; the others have 8 free GPUs, too, but no 48 processors for who asks for all.

    With 8 processors a GPU in the fleet, GPUs are what runs out with the first demand, processors with the second.
    """
    fleet, shapes = Fleet(), Shapes()
    hosts = [add(fleet, worker(num, [A10] * 8, 64_000)) for num in range(4)]
    small, large = shapes.of(request(GpuSpec(), cpu_milli)), shapes.of(request(GpuSpec(count=8), 48_000))
    alone = shapes.of(request(None, 17_000))
    ranker = Fragments()
    for shape, number in ((small, 97), (large, 3)):
        ranker.mix.add(shape, number)
    ranker.mix.use()
    assert large not in [shape for shape, _ in ranker.mix.top()]
    for host in hosts[1:]:
        fleet.take(host, alone, 0)
    for _ in range(4):
        choice = ranker.choose(fleet, small, {}, frozenset())
        assert choice is not None
        assert choice.host in hosts[1:]
        fleet.take(choice.host, small, choice.mask)
    choice = ranker.choose(fleet, large, {}, frozenset())
    assert choice is not None
    assert choice.host is hosts[0]
