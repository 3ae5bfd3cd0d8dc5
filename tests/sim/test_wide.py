"""Wide worlds, by seed: what `wide.py` adds to those of `test_seeds.py`. `make sim-wide SEEDS=300 FROM=1000` runs more.

What they found, each with a test of its own and a mutant: a join that came late brought a worker back that had said
goodbye; a device that was in another slot after a restart was used before its memory was seen free; a backup that was
restored again over a ledger restored from it began at the same numbers, and its workers knew more.
"""

from __future__ import annotations

import os
from typing import Any, Final

import pytest

from tests.sim.wide import WideWorld

FIRST: Final = int(os.environ.get("MOORAGE_SIM_FROM", "0"))
SEEDS: Final = int(os.environ.get("MOORAGE_SIM_WIDE_SEEDS", "90"))
PER_TEST: Final = 10
GROUPS: Final = 3


def spread(first: int) -> Any:
    return pytest.param(first, marks=pytest.mark.xdist_group(f"wide seeds {first // PER_TEST % GROUPS}"))


@pytest.mark.parametrize("first", list(map(spread, range(FIRST, FIRST + SEEDS, PER_TEST))))
def test_every_promise_holds_whatever_a_site_has(first: int) -> None:
    for seed in range(first, min(first + PER_TEST, FIRST + SEEDS)):
        run(seed)


def test_without_faults_services_are_told_what_becomes_of_their_jobs() -> None:
    world = WideWorld(1, faults=0)
    world.run()
    assert world.did == {}
    assert world.followers.followed >= 5


def run(seed: int) -> WideWorld:
    world = WideWorld(seed)
    try:
        world.run()
    except AssertionError as violated:
        again = f"make sim-wide SEEDS=1 FROM={seed}"
        pytest.fail(f"seed {seed}: {violated}\nrun it again: {again}\n{dict(world.did)}")
    return world
