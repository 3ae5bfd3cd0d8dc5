"""The soonest that a request could start by what runs now: a lower bound, for refusing what cannot make it in time.

Optimistic in every doubt: the queue ahead, limits and shares count as nothing, whoever has a lower priority as gone,
and each member as over after the shortest run that was ever seen of its kind (and lasted as long as it has). Only where
enough such runs were seen does a bound stand; a worker that could run it and is closed may open at any moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.host import EXCLUSIVE, Host
from moorage.scheduler.core.line.durations import Durations
from moorage.scheduler.core.line.reading import Reading
from moorage.scheduler.core.shape import Shape
from moorage.scheduler.core.state import AT_EXITED, AT_RUNNING, Member, State, started_ms

#: runs that must have been seen before the shortest of them bounds anything
SAMPLES_SURE: Final = 8
#: members that are looked at; with more of them no bound is found
MEMBERS_MAX: Final = 4_096

#: how long a member lasts at least from now, in ms; 0 where nothing is sure
Least = Callable[[Member], int]


def soonest_ms(fleet: Fleet, shape: Shape, least: Least) -> int:
    """In how many ms the fleet could hold it, all of it for a gang; 0 for now, and where no bound stands."""
    missing, looked = shape.together, 0
    frees: list[tuple[int, int]] = []  # after how many ms, and how many replicas more
    for cls, _ in fleet.capable(shape):
        for host in cls.hosts.values():
            looked += len(host.worker.members)
            if not host.usable or host.waiting or looked > MEMBERS_MAX:
                return 0
            missing -= host.replicas_of(shape, "now")
            frees += _frees(host, shape, least)
    if missing <= 0:
        return 0
    frees.sort()
    for after_ms, more in frees:
        missing -= more
        if missing <= 0:
            return after_ms
    return 0  # it is not what runs that it waits for


def _frees(host: Host, shape: Shape, least: Least) -> list[tuple[int, int]]:
    """When this host holds how many more, as its members end one after the other."""
    ends = sorted(
        ((least(member), member.fence, member) for member in host.worker.members.values()), key=lambda e: e[:2]
    )
    rooms, open_ = host.replicas_of(shape, "now"), host.open
    cpu, memory = host.cpu_free, host.memory_free
    fit = host.cls.fit(shape).mask
    found: list[tuple[int, int]] = []
    for after_ms, _, member in ends:
        open_ |= member.mask & host.lent & ~host.shut
        asked = member.replica.job.shape
        assert isinstance(asked, Shape)
        cpu, memory = cpu + asked.cpu_milli, memory + asked.memory_mib
        most = host.replicas_of(shape, "ever")
        if shape.count:
            places = host.cls.places(open_ & fit, shape)
            shared = len(host.shared) * host.cls.sharers(shape.mode) if shape.mode > EXCLUSIVE else 0
            most = min(most, (places + shared) // shape.count)
        if shape.cpu_milli and host.cpu_milli:
            most = min(most, cpu // shape.cpu_milli)
        if shape.memory_mib and host.memory_mib:
            most = min(most, memory // shape.memory_mib)
        if most > rooms:
            found.append((after_ms, most - rooms))
            rooms = most
    return found


class Soonest:
    """How soon something could start at the earliest, whoever waits before it."""

    def __init__(self, state: State, fleet: Fleet, reading: Reading, durations: Durations) -> None:
        self._state = state
        self._fleet = fleet
        self._reading = reading
        self._durations = durations

    def of(self, shape: Shape, priority: int) -> int:
        """In how many ms, where every worker was heard in this reign."""
        return soonest_ms(self._fleet, shape, lambda member: self._least_ms(member, priority))

    def _least_ms(self, member: Member, priority: int) -> int:
        """How long a member lasts at least, by what was seen; 0 where nothing is sure, or where it may be preempted."""
        job = member.replica.job
        if member.phase == AT_EXITED or self._reading.priority_of(job) < priority:
            return 0
        elapsed_ms = max(0, self._state.time_ms - started_ms(job, member)) if member.phase == AT_RUNNING else 0
        found = self._durations.remaining(
            job.tenant, self._reading.workload_of(job), self._reading.shape_of(job), elapsed_ms
        )
        return found.least_ms if found is not None and found.samples >= SAMPLES_SURE else 0
