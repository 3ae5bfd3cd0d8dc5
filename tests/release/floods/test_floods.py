"""Two tenants or a worker flood from processes of their own: what others see of it."""

from __future__ import annotations

import pytest

from tests.release.floods.world import STRAY, WORKERS, flooded

#: of the default numbers of a scheduler
LEASE_S = 20.0


@pytest.mark.slow
async def test_floods_of_two_tenants_end_no_lease_and_no_job_and_others_are_answered() -> None:
    figures = await flooded(20)
    print(figures.words())
    assert figures.fleet == [], "no worker was lost, and no scheduler took over"
    assert figures.jobs == ["RUNNING"] * len(WORKERS)
    assert figures.renewals_s < LEASE_S, "each worker's renewals were answered"
    assert {"loud", "heavy"} >= set(figures.rationed) > set(), "the flooding tenants alone"
    assert figures.tenants_s
    assert figures.operators_s


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["renewals", "facts"])
async def test_the_flood_of_a_worker_ends_no_lease_and_no_job_and_others_are_answered(kind: str) -> None:
    figures = await flooded(20, {f"worker.{STRAY}": kind})
    print(figures.words())
    assert figures.fleet == [], "no worker was lost, and no scheduler took over"
    assert figures.jobs == ["RUNNING"] * len(WORKERS)
    assert figures.rationed == [], "it is no tenant"
    assert figures.tenants_s
    assert figures.operators_s
