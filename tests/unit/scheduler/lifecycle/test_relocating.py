"""What happens to a member of a service while it moves: records that say more than one thing, cancels, lost hosts."""

from __future__ import annotations

from typing import Any, Final

from moorage.schemas.job import STATES
from tests.unit.scheduler.lifecycle.test_services_stay_up import READY, WATCHED_S, Site

#: a service that says nothing of being ready serves once it runs
RUNS: Final = {"run": {name: value for name, value in READY.items() if name != "ready"}}


def state(site: Site, index: int) -> str | None:
    """The state of a replica of `a`; None if it has no such replica."""
    now = site.job("a").state_of(index)
    return None if now is None else STATES[now]


def tick_until(site: Site, index: int, wanted: str) -> None:
    for _ in range(100):
        if state(site, index) == wanted:
            return
        site.tick(100)
    raise AssertionError(f"replica {index} is {state(site, index)}, never {wanted}")


def moving(members: int = 1, **fields: Any) -> Site:
    """A service whose first member moves from `w0` to `w1`, where its replacement runs."""
    site = Site(members, **fields)
    site.join_host("w1", members)
    site.operate("drain", "w0")
    assert site.watch(WATCHED_S, lambda: site.held_on("w1") == 1)
    return site


def test_the_end_of_a_moved_member_may_come_in_a_record_that_looks() -> None:
    site = moving(**RUNS)
    tick_until(site, 0, "CANCELLING")
    site.offer_facts()
    site.tick(1_000)
    assert (state(site, 0), state(site, 1)) == ("CANCELLED", "RUNNING")
    site.watch(3)
    assert site.job("a").numbers == ((1, 1),)
