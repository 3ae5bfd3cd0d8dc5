"""`rooms` says for how many replicas a host has devices, `pick` which one gets: one after the other, as many fit."""

from __future__ import annotations

import random

import pytest

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE
from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.schemas.gpu import GpuSpec, Share
from tests.turns import turns
from tests.unit.ranking.test_fragments import add, asked, request, worker

MODELS = ("NVIDIA T4", "NVIDIA A10", "NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize("seed", turns(range(40), often=4, more=8))
def test_as_many_are_picked_as_there_are_rooms(seed: int) -> None:
    chance, shapes, fleet = random.Random(seed), Shapes(), Fleet()
    islands = chance.choice((1, 2))
    pool = [
        {
            "index": index,
            "uuid": f"GPU-{index}",
            "vendor": "nvidia",
            "name": chance.choice(MODELS),
            "memory_mib": chance.choice((24_000, 40_000)),
            "numa": index % islands,
        }
        for index in range(8)
    ]
    host = add(fleet, worker(0, [], chance.choice((0, 64_000)), gpu_pool=pool))
    compared = 0
    for _ in range(60):
        shape: Shape = asked(chance, shapes)
        fit = host.cls.fit(shape)
        if fit.reason or (shape.mode > EXCLUSIVE and shape.count > 1):  # of several shared ones each is a choice
            continue
        rooms, taken = host.replicas_of(shape, "now"), []
        while host.fits_host(shape) and (slots := host.pick(shape)) is not None:
            assert slots.bit_count() == shape.count
            assert not slots & ~host.slots_for(shape)
            fleet.take(host, shape, slots)
            taken.append(slots)
            if shape.mode == 0 and len(taken) == min(rooms, 8):
                break
        assert len(taken) == (min(rooms, 8) if shape.mode == 0 else rooms)
        compared += bool(taken)
        for slots in taken[chance.choice((0, 1)) :]:
            fleet.give(host, shape, slots)
    assert compared > 3


def test_more_at_once_are_those_one_by_one() -> None:
    shapes, fleet = Shapes(), Fleet()
    host = add(fleet, worker(0, [MODELS[0]] * 3 + [MODELS[1]] * 4, 5_000))
    shape = shapes.of(request(GpuSpec(count=2), 2_000))
    more = host.pick_more(shape, 9)
    assert len(more) == 2, "processors are enough for two"
    for slots in more:
        assert slots == host.pick(shape)
        fleet.take(host, shape, slots)
    assert host.pick_more(shape, 9) == []


def test_a_sharer_of_several_devices_joins_those_in_use() -> None:
    shapes, fleet = Shapes(), Fleet()
    host = add(fleet, worker(0, [MODELS[0]] * 4))
    one, two = (shapes.of(request(GpuSpec(count=count, sharing="mps", share=Share(0, 50)))) for count in (1, 2))
    assert host.pick_beside(two) is None
    fleet.take(host, one, 0b100)
    assert host.pick_beside(two) == 0b101
    assert host.cls.rooms(0b1011, two, [1]) == 3
