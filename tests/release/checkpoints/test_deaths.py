"""Fifty real deaths of hosts under trainings, at random moments."""

from __future__ import annotations

import pytest

from moorage.bus.embedded import EmbeddedServer
from tests.release.checkpoints import virtual_deaths
from tests.release.checkpoints.deaths import world


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_fifty_hosts_die_at_random_moments_and_no_training_loses_what_was_stored(
    nats_server: EmbeddedServer, unique: str
) -> None:
    found = await world(nats_server, unique, seed=1, deaths=50)
    assert found.deaths == 50
    assert found.nothing_stored < 25


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20))
def test_two_thousand_hosts_die_in_virtual_time_and_no_training_loses_more_than_the_time_between_sets(
    seed: int,
) -> None:
    with virtual_deaths.next_level():
        found = virtual_deaths.world(seed, deaths=100)
    assert found.deaths == 100
    assert found.nothing_stored < 20
