"""The request mix: when what was counted is taken into use, and how what was counted before fades."""

from __future__ import annotations

import random

from moorage.ranking.mix import (
    DRIFT_EVERY,
    DRIFT_PERCENT,
    LOOK_EVERY,
    LOOK_FIRST,
    LOOK_LEAST,
    LOOK_PART,
    UNIT,
    Mix,
)
from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.schemas.gpu import GpuSpec
from tests.unit.ranking.test_fragments import request


def test_the_mix_changes_when_requests_do_and_forgets_the_old_ones() -> None:
    shapes, mix = Shapes(), Mix()
    old, new = shapes.of(request(GpuSpec())), shapes.of(request(GpuSpec(count=4)))
    for _ in range(LOOK_FIRST):
        mix.add(old)
    assert (mix.version, mix.top()) == (1, [(old, mix.counts[old])])
    for _ in range(1000):
        mix.add(old)
    assert mix.version == 1  # nothing new
    for _ in range(120_000):
        mix.add(new)
    assert [shape for shape, _ in mix.top()] == [new]


def test_a_young_mix_is_used_anew_as_a_quarter_more_came() -> None:
    """Of 200 shapes alike, what was seen of each is by chance for long, so the mix drifts at every look."""
    shapes, mix, chance = Shapes(), Mix(), random.Random(1)
    alike = [shapes.of(request(GpuSpec(), 1_000 + cpu)) for cpu in range(200)]
    used, expected, at = [], [], LOOK_FIRST
    for number in range(1, 3 * DRIFT_EVERY):
        version = mix.version
        mix.add(chance.choice(alike))
        if mix.version != version:
            used.append(number)
        if number == at:
            expected.append(at)
            at += max(LOOK_LEAST, at // LOOK_PART) if at < DRIFT_EVERY else DRIFT_EVERY
    assert used == expected
    assert len(expected) > 10


def _grown(late: int, replicas: int) -> tuple[Mix, Shape]:
    """A mix of one class after 20,000 arrivals, and then another that is one in a hundred, or some jobs of several."""
    shapes, mix = Shapes(), Mix()
    old = [shapes.of(request(GpuSpec(), 1_000 * cpu)) for cpu in range(4)]
    new = shapes.of(request(GpuSpec(count=8)))
    for number in range(20_000):
        mix.add(old[number % 4])
    for number in range(2 * LOOK_EVERY):
        mix.add(old[number % 4])
        if number % (2 * LOOK_EVERY // late) == 0:
            mix.add(new, replicas)
    return mix, new


def test_a_class_that_comes_late_is_in_the_mix_though_it_is_rare() -> None:
    mix, new = _grown(64, 1)
    used = dict(mix.all())
    assert new in used
    assert used[new] * 100 < DRIFT_PERCENT * sum(used.values())


def test_a_few_jobs_of_many_replicas_are_no_change() -> None:
    mix, new = _grown(8, 8)
    assert mix.counts[new]
    assert new not in dict(mix.all())


def test_what_was_counted_before_a_change_counts_half() -> None:
    shapes, mix = Shapes(), Mix()
    old, new = shapes.of(request(GpuSpec())), shapes.of(request(GpuSpec(count=8)))
    for _ in range(4 * LOOK_EVERY):
        mix.add(old)
    before, version, came = mix.counts[old], mix.version, 0
    while mix.version == version:
        mix.add(new)
        came += 1
        assert came <= LOOK_EVERY
    assert mix.counts[old] * 2 == before
    assert mix.counts[new] * 2 == UNIT * came


def test_a_mix_that_stays_as_it_is_remembers_no_more_however_long_it_lasts() -> None:
    """One in fifty arrivals asks for processors as none did before: too few for a drift, and of one class."""
    shapes, mix = Shapes(), Mix()
    old = [shapes.of(request(GpuSpec(count=1 + number), 1_000)) for number in range(4)]
    for number in range(8 * LOOK_EVERY):
        mix.add(old[number % 4])
    version = mix.version
    for number in range(16 * LOOK_EVERY):
        mix.add(old[number % 4] if number % 50 else shapes.of(request(GpuSpec(), 10_000 + number)))
    assert mix.version == version
    assert len(mix._since) == len(mix._squares) == 4


def test_shapes_and_classes_are_counted_up_to_a_bound() -> None:
    """Every arrival is of another class: what is counted is cut at each look, and what comes often is still seen."""
    shapes, mix, most = Shapes(), Mix(counted_max=16), 0
    for number in range(4 * LOOK_EVERY):
        mix.add(shapes.of(request(GpuSpec(min_memory_mib=number))))
        most = max(most, len(mix.counts), len(mix._since), len(mix._squares))
    assert most <= 16 + LOOK_EVERY
    often = shapes.of(request(GpuSpec(count=4)))
    for _ in range(2 * LOOK_EVERY):
        mix.add(often)
    assert mix.top()[0][0] is often
    assert len(mix.counts) <= 16
