"""Everything at once, under faults: safety after every record, liveness once the faults stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.ceilings import BOUNDS, worlds_with
from tests.turns import turns
from tests.unit.scheduler.faulty_world import FaultyWorld

#: a failing seed is `FaultyWorld(seed, workers=2 + seed % 3)`; a soak raises this number
SEEDS: Final = 40


@pytest.fixture(autouse=True, params=BOUNDS)
def bounds(request: pytest.FixtureRequest) -> Iterator[None]:
    with worlds_with(BOUNDS[request.param]):
        yield


@pytest.mark.parametrize("seed", turns(range(SEEDS), often=1, more=15))
def test_safety_under_faults_and_liveness_after(seed: int) -> None:
    world = FaultyWorld(seed, workers=2 + seed % 3)
    world.run(220)
    world.heal()
