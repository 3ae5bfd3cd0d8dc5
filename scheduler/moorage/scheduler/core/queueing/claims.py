"""Who gets hosts reserved next: whole hosts first, within bounds; many hosts only once that is worth what it idles.

Room for a request that needs whole hosts comes only where hosts are held back, for others by itself; so whole hosts go
first. Whoever waits longest of the others is passed by that for as many hosts as the fleet has, each of them once so to
speak, and then goes first.

Hosts that are held back for a gang stand idle until the last of them is free: of n hosts n - 1 wait for one. So a gang
that needs n of H hosts, and became the first after it had waited a time t beyond `reserve_after`, lets others run on
for another 3/2 t (n - 1) / H before its hosts are closed. One that is first at once, or needs one host, waits no
longer; one that takes half of the fleet less than three quarters as long again; and often enough others end meanwhile.
Where hosts were closed for another of its line since, t counts from then: it has waited for those before it as well,
and of many that came together each would else wait by a factor longer than the one before.
It is the slack that Talby and Feitelson give to everybody ("Supporting Priorities and Improving Utilization of the IBM
SP Scheduler Using Slack-Based Backfilling", 1999), in proportion to what a reservation costs.

Soft, and no input of its own: a new leader has not seen since when somebody is first, and lets who came before it wait
no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.queueing.queue import Head, Line
from moorage.scheduler.core.queueing.reserve import Reservation
from moorage.scheduler.core.shape import Shape

#: entries of which it is known since when they were first
FIRST_MAX: Final = 1_024
#: by how much of its wait, times the share of the fleet that would idle, a gang lets others run on: 3 to 2
LETS_ON: Final = (3, 2)


class Claim(NamedTuple):
    """The first of a line that is out of patience; what has less goes first."""

    head: Head
    later: bool  # room for it comes by itself
    item: int
    line: Line
    accepted_ms: int


class Claims:
    """The order of claims, and when the first of them is due. All times in ledger ms."""

    __slots__ = ("_began_ms", "_fleet", "_passed", "_passed_hosts", "_patience_ms", "_since")

    def __init__(self, fleet: Fleet, patience_ms: int) -> None:
        self._fleet = fleet
        self._patience_ms = patience_ms
        self._began_ms = -1  # this leader's first pass
        self._since: dict[int, int] = {}  # entry -> since when it is first
        self._passed = -1  # the entry that has waited longest of those that need no whole host
        self._passed_hosts = 0  # hosts that were held past it for whoever came later

    def in_order(self, claims: list[Claim]) -> list[Claim]:
        """Who goes first. `later` of each says whether it could do without whole hosts."""
        others = [claim for claim in claims if claim.later]
        if others and min(others).item == self._passed and self._passed_hosts >= len(self._fleet.hosts):
            claims = [claim._replace(later=False) for claim in claims]
        return sorted(claims)

    def begin(self, now_ms: int) -> None:
        """A pass over the queue: jobs accepted before the first one this leader has not seen wait."""
        if self._began_ms < 0:
            self._began_ms = now_ms

    def comes_due(self, claim: Claim, now_ms: int, waits: Callable[[int], bool]) -> bool:
        """Whether hosts are to be closed by now for whoever is first, as is remembered; `waits` tells who waits still.

        Asked in the course of a pass alone, so that a replay of the reign remembers the same.
        """
        needed, of = hosts_needed(self._fleet, claim.line.shape)
        if not 1 < needed <= of:
            return True
        since = self._since.get(claim.item)
        if since is None:
            since = now_ms if claim.accepted_ms >= self._began_ms else claim.accepted_ms + self._patience_ms
            if len(self._since) >= FIRST_MAX:
                self._since = {item: at for item, at in self._since.items() if waits(item)}
            if len(self._since) >= FIRST_MAX:
                return True
            self._since[claim.item] = since
        waited_from = max(claim.accepted_ms + self._patience_ms, claim.line.granted_ms)
        waited, (times, by) = max(0, since - waited_from), LETS_ON
        return (now_ms - since) * of * by >= waited * (needed - 1) * times

    def granted(self, held: Reservation, claims: list[Claim]) -> None:
        """Hosts are held for one of these claims."""
        others = [claim for claim in claims if claim.later]
        mine = next(claim for claim in claims if claim.item == held.item)
        mine.line.granted_ms = held.since_ms
        if not others or mine.later:
            return
        first = min(others)
        if (first.head, first.item) < (mine.head, mine.item):
            if first.item != self._passed:
                self._passed, self._passed_hosts = first.item, 0
            self._passed_hosts += len(held.hosts)


def _sizes(fleet: Fleet, shape: Shape) -> Iterator[tuple[int, int]]:
    """(GPUs of a host, hosts) of each class that could run it."""
    for cls, _ in fleet.capable(shape):
        yield len(cls.devices), len(cls.hosts)


def fills_hosts(fleet: Fleet, shape: Shape) -> bool:
    """Whether it asks at once for as many GPUs as the largest host that could run it has, or more."""
    most = max((gpus for gpus, _ in _sizes(fleet, shape)), default=0)
    return 0 < most <= shape.gpus


def hosts_needed(fleet: Fleet, shape: Shape) -> tuple[int, int]:
    """How many empty hosts it takes at least to hold all of it, and how many there are that could run it."""
    each = max((gpus // shape.count if shape.count else shape.together for gpus, _ in _sizes(fleet, shape)), default=0)
    return (-(-shape.together // each) if each else 0), sum(hosts for _, hosts in _sizes(fleet, shape))
