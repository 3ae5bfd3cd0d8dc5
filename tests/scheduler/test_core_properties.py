"""Everything at once, under faults: safety after every record, liveness once the faults stop."""

from __future__ import annotations

import pytest

from tests.scheduler.faulty_world import FaultyWorld


@pytest.mark.parametrize("seed", range(int(__import__("os").environ.get("N0","0")), int(__import__("os").environ.get("N","24"))))
def test_safety_under_faults_and_liveness_after(seed: int) -> None:
    world = FaultyWorld(seed, workers=2 + seed % 3)
    world.run(220)
    world.heal()
