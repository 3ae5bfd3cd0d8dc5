"""Wide worlds, by seed: what `wide.py` adds to those of `test_seeds.py`. More: `python -m tests.release.sim.many
--wide`.

What they found, each with a test of its own and a mutant: a join that came late brought a worker back that had said
goodbye; a device that was in another slot after a restart was used before its memory was seen free; a backup that was
restored again over a ledger restored from it began at the same numbers, and its workers knew more.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import pytest

from tests.release.sim.wide import WideWorld
from tests.turns import seeds

OFTEN: Final = 2
MORE: Final = 6


@pytest.mark.parametrize("seed", seeds(OFTEN, MORE))
def test_every_promise_holds_whatever_a_site_has(seed: int) -> None:
    run(seed)


@pytest.mark.slow
def test_an_end_that_was_told_and_forgotten_before_a_restore_is_not_told_again() -> None:
    run(200005)


@pytest.mark.long
def test_without_faults_services_are_told_what_becomes_of_their_jobs() -> None:
    """Over some worlds, as one alone may have none of this."""
    seen: Counter[str] = Counter()
    for seed in range(1, 9):
        world = WideWorld(seed, faults=0)
        world.run()
        assert world.did == {}
        assert world.followers.followed >= 5
        stays, sweeps = world.judge.stays, world.judge.sweeps
        seen.update(after=world.judge.afters.followed, restarts=stays.restarts, told=stays.told)
        seen.update(bounded=sweeps.bounded, again=sweeps.agains)
    assert all(seen[what] > 0 for what in ("after", "restarts", "told", "bounded", "again")), seen


def run(seed: int) -> WideWorld:
    world = WideWorld(seed)
    try:
        world.run()
    except AssertionError as violated:
        again = f"python -m tests.release.sim.many --wide --seeds 1 --from {seed}"
        pytest.fail(f"seed {seed}: {violated}\nrun it again: {again}\n{dict(world.did)}")
    return world
