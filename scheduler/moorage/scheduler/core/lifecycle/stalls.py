"""Finds attempts that stall: no output, no progress, and devices that do no work for the `stall_s` of their request.

Each worker measures for how long its attempts have been still, and says so in every renewal, so a new leader knows it
at once and nothing of it is in the ledger. A gang stalls when all of its ranks are still: while one of them works, the
others wait for it. An attempt that stalls is told once (`on_stall` is warn), and taken back when it moves again; or it
is ended with its grace, which counts as a failure (`end`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from moorage.scheduler.core.draft import Draft, steps_to_end
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import Host
from moorage.scheduler.core.ledger.records import Count
from moorage.scheduler.core.ledger.state import RUNNING, Attempt, Job, State
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import AttemptUse, DeviceUse, Stalled
from moorage.schemas.units import many

#: the first rank of a gang to stand still is named if it did so this many seconds before the second: more than lies
#: between two readings of different workers
FIRST_S: Final = 10
#: stands for all replicas of a gang, and for no rank that differs
GANG: Final = -1


class Still(NamedTuple):
    """A running attempt that shows no sign of work, as its worker said last."""

    attempt: Attempt
    use: AttemptUse


class Stall(NamedTuple):
    """A stall that was told, of these attempts: that of other attempts is another stall."""

    attempts: frozenset[AttemptName]
    told: Stalled


class Stalls:
    """The stalls of one leader's term, over one state and fleet."""

    def __init__(self, state: State, fleet: Fleet, lifecycle: Lifecycle) -> None:
        self._state = state
        self._fleet = fleet
        self._lifecycle = lifecycle
        self._still: dict[int, dict[AttemptName, AttemptUse]] = {}  # by worker number, by the last renewal
        #: those that were told, by job number and replica, or GANG; each look puts another table in its place
        self.told: dict[int, dict[int, Stall]] = {}

    @property
    def watches(self) -> bool:
        """Whether attempts with a `stall_s` are still now, so that time alone may make them stall."""
        return bool(self._still or self.told)

    def on_renewal(self, host: Host) -> None:
        """Take what a host's renewal reports of attempts that are still."""
        if still := {name: use for name, use in host.use.items() if use.still_s > 0}:
            self._still[host.worker.num] = still
        else:
            self._still.pop(host.worker.num, None)

    def of_job(self, job: Job) -> list[Stalled]:
        """Return the stalls of a job, by replica."""
        found = self.told.get(job.num) if job.live else None
        return [] if found is None else [stall.told for _, stall in sorted(found.items())]

    def jobs(self) -> Iterator[tuple[Job, list[Stalled]]]:
        """Yield the jobs that stall, by number."""
        for num in sorted(self.told):
            if (job := self._state.jobs.get(num)) is not None and (found := self.of_job(job)):
                yield job, found

    def pass_time(self, draft: Draft) -> None:
        """Tell stalls that began and that are over, and end the attempts that are to end. Call it once a second."""
        if not self.watches:
            return
        stalled, told_now = self._stalled(), dict[int, dict[int, Stall]]()
        for (num, which), ranks in stalled.items():
            job = ranks[0].attempt.replica.job
            attempts = frozenset(each.attempt.name for each in ranks)
            told = _words(ranks, which)
            known = self.told.get(num, {}).get(which)
            run = self._lifecycle.request_of(job).workload
            if run.on_stall == "end":
                why = f"stalled: no output and no work of its GPUs for {run.stall_s:g} s; {told.why}"
                if draft.has_room(steps_to_end((ranks[0].attempt,))):
                    self._lifecycle.leave(draft, ranks[0].attempt, why, Count.RETRY, notice_s=0)
                continue  # without room it is ended a second later
            if known is None or known.attempts != attempts:
                draft.stalls.append((job, told))
            told_now.setdefault(num, {})[which] = Stall(attempts, told)
        for num, before in self.told.items():
            for which, stall in before.items():
                if (num, which) not in stalled:
                    self._take_back(draft, num, which, stall)
        self.told = told_now

    def _stalled(self) -> dict[tuple[int, int], list[Still]]:
        """Return what stalls now, by job number and replica: one attempt, or all ranks of a gang in their order."""
        found: dict[tuple[int, int], list[Still]] = {}
        for num, still in list(self._still.items()):
            if num not in self._fleet.hosts:
                del self._still[num]
                continue
            for attempt in self._state.worker_by_num[num].attempts.values():
                use = still.get(attempt.name)
                if use is None or attempt.replica.state != RUNNING or attempt.replica.attempt is not attempt:
                    continue  # of one that has ended, a later attempt may run, elsewhere
                job = attempt.replica.job
                stall_s = self._lifecycle.request_of(job).workload.stall_s
                if stall_s is not None and use.still_s >= stall_s:
                    key = (job.num, GANG if job.gang else attempt.replica.index)
                    found.setdefault(key, []).append(Still(attempt, use))
        for key, ranks in list(found.items()):
            if len(ranks) < ranks[0].attempt.replica.job.size and key[1] == GANG:
                del found[key]  # a rank works, and the others wait for it
            ranks.sort(key=lambda each: each.attempt.replica.index)
        return found

    def _take_back(self, draft: Draft, num: int, which: int, stall: Stall) -> None:
        """Tell that a job moves again, if the attempts that stalled still run."""
        job = self._state.jobs.get(num)
        if job is None:
            return
        replicas = [replica for replica in job.rows.values() if which in (GANG, replica.index)]
        attempts = frozenset(replica.attempt.name for replica in replicas if replica.attempt is not None)
        if attempts == stall.attempts and all(replica.state == RUNNING for replica in replicas):
            draft.stalls.append((job, msgspec.structs.replace(stall.told, seconds=0, why="it moves again")))


def _words(ranks: Sequence[Still], which: int) -> Stalled:
    """Return a stall in words: what the devices do, and which rank of a gang differs from the others."""
    seconds = min(each.use.still_s for each in ranks)
    if which != GANG:
        return Stalled(seconds, which, _doing(ranks))
    kinds: dict[tuple[bool, bool], list[Still]] = {}
    for each in ranks:
        kinds.setdefault(_kind(each.use.devices), []).append(each)
    if len(kinds) > 1:
        odd = kinds[min(kinds, key=lambda kind: (len(kinds[kind]), kind))]  # of two alike in number, the one at 0 %
        others = [each for each in ranks if each not in odd]
        return Stalled(seconds, _rank(odd), f"{_named(odd)}: {_doing(odd)}; the others: {_doing(others)}")
    first, *rest = sorted(ranks, key=lambda each: -each.use.still_s)
    earlier_s = first.use.still_s - (rest[0].use.still_s if rest else first.use.still_s)
    if earlier_s >= FIRST_S:
        why = f"{_named([first])}: it stood still {earlier_s} s earlier; {_doing(ranks)}"
        return Stalled(seconds, _rank([first]), why)
    return Stalled(seconds, GANG, f"no rank differs: {_doing(ranks)}")


def _rank(ranks: Sequence[Still]) -> int:
    return ranks[0].attempt.replica.index


def _named(ranks: Sequence[Still]) -> str:
    first, rest = ranks[0].attempt, len(ranks) - 1
    more = f" and {many(rest, 'other rank')}" if rest else ""
    return f"rank {first.replica.index} on {first.worker.id}{more} differ{'' if rest else 's'}"


def _kind(devices: Sequence[DeviceUse]) -> tuple[bool, bool]:
    """Return whether some devices are at work without effect, and whether none is idle."""
    return any(use.percent for use in devices), all(use.percent for use in devices)


def _doing(ranks: Sequence[Still]) -> str:
    """Return what the devices of these attempts do, as `1 GPU at 0 %, 7 GPUs at 100 % with at most 120 of 700 W`."""
    devices = [use for each in ranks for use in each.use.devices]
    full = [use for use in devices if use.percent]
    parts = [f"{many(len(devices) - len(full), 'GPU')} at 0 %"] if len(full) < len(devices) else []
    if full:
        most = max(full, key=lambda use: use.power_w or 0)
        parts.append(f"{many(len(full), 'GPU')} at 100 % with at most {most.power_w} of {most.power_limit_w} W")
    return ", ".join(parts)
