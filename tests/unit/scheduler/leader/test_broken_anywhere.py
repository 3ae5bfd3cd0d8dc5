"""Whatever function raises as a record is built, what it is about is set aside, and all else goes on.

Worlds by seed, see `broken_world`; many of them: `python -m tests.release.sim.broken --seeds 200`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.ceilings import BOUNDS, worlds_with
from tests.turns import turns
from tests.unit.scheduler.broken_world import Forgiving, failure, forgiving
from tests.unit.scheduler.faulty_world import FaultyWorld

#: seeds of worlds with defects of a moment (even) and with ones that last (odd)
SEEDS: Final = 40


@pytest.fixture(autouse=True, params=BOUNDS)
def bounds(request: pytest.FixtureRequest) -> Iterator[None]:
    with worlds_with(BOUNDS[request.param]):
        yield


@pytest.mark.parametrize("seed", turns(range(SEEDS), often=4, more=12))
def test_a_function_that_raises_sets_aside_what_it_is_about_and_all_else_goes_on(seed: int) -> None:
    found = failure(seed)
    assert not found, f"{found}\npython -m tests.release.sim.broken --seeds 1 --from {seed}"


@pytest.mark.parametrize("seed", turns(range(SEEDS), often=2, more=6))
def test_a_record_that_is_taken_back_and_built_again_changes_no_jobs_fate(seed: int) -> None:
    with forgiving(seed):
        before = Forgiving.raised.total()
        world = FaultyWorld(seed, workers=2 + seed % 3)
        world.run(220)
        world.heal()
        assert Forgiving.raised.total() > before
