"""Preemption in the pass: which jobs may ask for it, what becomes of it, and which hosts are held meanwhile.

The ledger says which jobs end for which job and which hosts are held (`Job.preempts`), so a new leader goes on where
the old one stopped. Victims are looked for once a second, after a pass has placed all that it could.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.acts import Preempt
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.scheduler.core.queue.queue import REPLICA_BITS, Group, Key
from moorage.scheduler.core.records import Count
from moorage.scheduler.core.schedule.victims import VOID_MS, Choice, Preemption, Right
from moorage.scheduler.core.shape import Shape
from moorage.scheduler.core.state import CANCELLING, ENDING, Job, Member, State

#: jobs for which others end at one time
STANDING_MAX: Final = 16
#: searches for victims a second: each reads up to `preemption.READ_MAX` hosts anew
SEARCHES_MAX: Final = 2
#: jobs that were asked to end which are followed from record to record
FOLLOWED_MAX: Final = 10_000
_NOBODY: Final[frozenset[int]] = frozenset()
_LEAVING: Final = frozenset((ENDING, CANCELLING))


def leaving_for(state: State, job: Job) -> Iterator[Member]:
    """Yield the members that still have to leave the hosts held for a job; others of their jobs may run on there."""
    if job.preempts is None:
        return
    hosts, jobs = job.preempts[0], set(job.preempts[1])
    for num in hosts:
        for member in state.worker_by_num[num].members.values():
            replica = member.replica
            if replica.job.num in jobs and (replica.member is not member or replica.state in _LEAVING):
                yield member


class UnderWay(NamedTuple):
    """GPUs by tenant: `awaited` by its jobs that others end for, and its own that are `ending`, for whatever reason."""

    awaited: Counter[str]
    ending: Counter[str]

    def add(self, tenant: str, shape: Shape, found: Choice) -> None:
        self.awaited[tenant] += shape.gpus
        for victim in found.victims:
            self.ending[victim.job.tenant] += victim.gpus


class Preempting:
    """Over one engine's state; `priority` from which jobs may preempt, above 100 for none.

    `knows_fleet` says whether every worker was heard in this reign, or has had time to renew: one that was not may have
    room.
    """

    def __init__(
        self,
        policy: Preemption,
        lifecycle: Lifecycle,
        priority: int,
        reclaim: bool,
        knows_fleet: Callable[[], bool],
    ) -> None:
        self.policy = policy
        self.lifecycle = lifecycle
        self.priority = priority
        self.reclaim = reclaim
        self.knows_fleet = knows_fleet
        self._sought_ms = 0
        self._in_vain: dict[int, int] = {}  # entry of the queue -> ledger ms at which no victims were found for it last
        self._void: dict[int, int] = {}  # job number -> since when no job ends for it any more
        #: jobs that were asked to end and may not have yet; None where all members have to be looked at for that
        self._asked: set[int] | None = None

    @property
    def allowed(self) -> bool:
        return self.reclaim or self.priority <= 100

    def held(self, draft: Draft, shape: Shape, priority: int, tenant: str) -> frozenset[int]:
        """Return the hosts that are held for others than a group of this shape, priority and tenant."""
        return self._hosts(draft, lambda job: not self._is_of(job, shape, priority, tenant))

    def own(self, draft: Draft, shape: Shape, priority: int, tenant: str) -> frozenset[int]:
        """Return the hosts that are held for such a group."""
        return self._hosts(draft, lambda job: self._is_of(job, shape, priority, tenant))

    @staticmethod
    def _hosts(draft: Draft, which: Callable[[Job], bool]) -> frozenset[int]:
        standing = [(job, job.preempts[0]) for job in draft.state.preempting.values() if job.preempts is not None]
        return frozenset(num for job, hosts in standing if which(job) for num in hosts)

    def _is_of(self, job: Job, shape: Shape, priority: int, tenant: str) -> bool:
        policy = self.policy
        return tenant in (job.tenant, "") and policy.shape_of(job) is shape and policy.priority_of(job) == priority

    def settle(self, draft: Draft, waits: Callable[[Job], bool]) -> None:
        """Give up what is void: the job waits no more, or has not started though all its victims have ended."""
        before, self._void = self._void, {}  # built anew, so that a job that has started leaves nothing behind
        for num, job in draft.state.preempting.items():
            if waits(job):
                if any(True for _ in leaving_for(draft.state, job)):
                    continue
                since_ms = before.get(num, draft.time_ms)
                if draft.time_ms - since_ms < VOID_MS:
                    self._void[num] = since_ms
                    continue
            draft.add(Preempt(num, [], []))

    def seek(
        self,
        draft: Draft,
        eligible: Callable[[], list[tuple[Key, int, Group]]],
        excluded: Callable[[Group], frozenset[int]],
    ) -> None:
        """Once a second: find victims for the first jobs of the groups that may preempt and found no room.

        A job for which no victims were found comes behind the others, the longest ago first: a job that can never be
        helped must not use up the searches. No two jobs get the same host. A record in which an operator
        changes a priority seeks no victims, since the old priorities are still in the state; the next record does.
        """
        if draft.time_ms - self._sought_ms < 1000 or not draft.level_allows(Preempt.LEVEL):
            return
        if draft.reprioritized or not self.knows_fleet():
            return
        state, searches, groups = draft.state, 0, eligible()
        self._sought_ms = draft.time_ms
        under_way = self._under_way(draft)
        found_now: frozenset[int] = _NOBODY
        vain = self._in_vain = {item: self._in_vain[item] for _, item, _ in groups if item in self._in_vain}
        for _, item, group in sorted(groups, key=lambda row: (vain.get(row[1], 0), row)):
            job = state.jobs.get(item >> REPLICA_BITS)
            if job is None or job.num in state.preempting or draft.full:
                continue
            if searches >= SEARCHES_MAX or len(state.preempting) + searches >= STANDING_MAX:
                return
            right = self._right(draft, job, group, under_way)
            if right is None:
                continue
            searches += 1
            with self.policy.fleet.avoiding(group.shape.avoid):
                closed = excluded(group) | found_now | group.shape.refusing
                found = self.policy.choose(draft, group.shape, right, closed, under_way.ending)
            if found is None:
                vain[item] = draft.time_ms
                continue
            found_now |= found.hosts
            self._end(draft, right, found)
            under_way.add(job.tenant, group.shape, found)

    def asked_to_end(self, jobs: set[int]) -> None:
        """Some members of these jobs, by number, are asked to end with this record, for whatever reason.

        A tenant has less to give back by those, though it leases their GPUs still.
        """
        if not self.reclaim or self._asked is None:
            return
        self._asked |= jobs
        if len(self._asked) > FOLLOWED_MAX:
            self._asked = None

    def seek_at_once(self) -> None:
        """Victims are looked for with the next pass, however short a time ago they were."""
        self._sought_ms = 0

    def _under_way(self, draft: Draft) -> UnderWay:
        """Return what others end for already, and what ends."""
        found, jobs = UnderWay(Counter(), Counter()), draft.state.jobs
        for job in draft.state.preempting.values():
            shape = self.policy.shape_of(job)
            found.awaited[job.tenant] += shape.gpus
        if self._asked is None:
            members = (m for worker in draft.state.worker_by_num for m in worker.members.values())
            self._asked = {m.replica.job.num for m in members if draft.replica(m.replica).state in _LEAVING}
        self._asked |= draft.ends
        for num in list(self._asked):
            gpus = sum(m.mask.bit_count() for m in self._ending_of(draft, jobs.get(num)))
            if gpus:
                found.ending[jobs[num].tenant] += gpus
            else:
                self._asked.remove(num)
        return found

    @staticmethod
    def _ending_of(draft: Draft, job: Job | None) -> list[Member]:
        held = [draft.replica(replica).member for replica in job.replicas] if job is not None else []
        return [m for m in held if m is not None and draft.replica(m.replica).state in _LEAVING]

    def _right(self, draft: Draft, job: Job, group: Group, under_way: UnderWay) -> Right | None:
        need = group.shape.gpus
        tenant = draft.tenant(job.tenant)
        own = tenant.guaranteed - tenant.gpus - under_way.awaited[job.tenant]
        if self.reclaim and 0 < need <= own:
            return Right(job, group.priority, reclaims=True)
        borrows = self.reclaim and need > 0
        return Right(job, group.priority, reclaims=False, borrows=borrows) if group.priority >= self.priority else None

    def _end(self, draft: Draft, right: Right, found: Choice) -> None:
        victims = sorted({victim.job.num for victim in found.victims})
        draft.add(Preempt(right.job.num, sorted(found.hosts), victims))
        for victim in found.victims:
            why = self._why(right, victim.job, victim.priority)
            self.lifecycle.leave(draft, victim.members[0], why, Count.NONE)  # with its gang, told to save itself

    @staticmethod
    def _why(right: Right, victim: Job, priority: int) -> str:
        """Told to the victim's tenant: another tenant's job is not named."""
        mine = right.job.tenant == victim.tenant
        whom = f"job {right.job.name}" if mine else f"tenant {right.job.tenant}"
        if right.reclaims:
            return f"preempted: borrowed GPUs go back to tenant {right.job.tenant}"
        return f"preempted by {whom}: priority {right.priority} over {priority}"
