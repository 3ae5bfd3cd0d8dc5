"""Why the durable queue refused a request is known of each tenant, however many of another's it refuses."""

from __future__ import annotations

import pytest

from moorage.scheduler.durable import refused_submits
from moorage.scheduler.durable.refused_submits import RefusedSubmits
from moorage.schemas.errors import problem

WHY = problem("invalid-argument", "unknown field $.gpus")


def known(of: RefusedSubmits, tenant: str) -> list[str]:
    return [f"j{at}" for at in range(20) if of.why(tenant, f"j{at}") is not None]


def test_one_tenants_flood_forgets_its_own_and_what_is_refused_again_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_submits, "REFUSED_MAX_TENANT", 3)
    of = RefusedSubmits()
    of.note("quiet", "j0", WHY)
    for at in (0, 1, 2, 0, 3):
        of.note("loud", f"j{at}", WHY)
    assert (known(of, "loud"), known(of, "quiet")) == (["j0", "j2", "j3"], ["j0"])


def test_of_too_many_the_tenant_with_most_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_submits, "REFUSED_MAX", 5)
    of = RefusedSubmits()
    of.note("quiet", "j0", WHY)
    for at in range(10):
        of.note("loud", f"j{at}", WHY)
    of.note("quiet", "j1", WHY)
    assert (known(of, "loud"), known(of, "quiet")) == (["j7", "j8", "j9"], ["j0", "j1"])
