"""Preemption in a pass: which jobs may preempt, how preemptions proceed, and which hosts are reserved meanwhile.

The ledger records which jobs end for which job, and which hosts are reserved (`Job.preempts`), so a new leader
continues where the old one stopped. Victims are searched once a second, after a pass has placed all it could.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.acts import Preempt
from moorage.scheduler.core.ledger.records import Count
from moorage.scheduler.core.ledger.state import CANCELLING, ENDING, Job, Member, State
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.scheduler.core.queue.queue import REPLICA_BITS, Group, Key
from moorage.scheduler.core.schedule.victims import VOID_MS, Choice, Preemption, Right

#: the most jobs for which others are being ended at one time
STANDING_MAX: Final = 16
#: jobs for which victims are searched each second, by one right after the other; each search reads up to
#: `victims.READ_MAX` changed hosts
SEARCHES_MAX: Final = 2
#: jobs asked to end that are tracked from record to record
FOLLOWED_MAX: Final = 10_000
_NOBODY: Final[frozenset[int]] = frozenset()
_LEAVING: Final = frozenset((ENDING, CANCELLING))


def leaving_for(state: State, job: Job) -> Iterator[Member]:
    """Yield the members that still have to leave the hosts reserved for a job; other members may run on there."""
    if job.preempts is None:
        return
    hosts, jobs = job.preempts[0], set(job.preempts[1])
    for num in hosts:
        for member in state.worker_by_num[num].members.values():
            replica = member.replica
            if replica.job.num in jobs and (replica.member is not member or replica.state in _LEAVING):
                yield member


class UnderWay(NamedTuple):
    """GPUs by tenant: `awaited` by jobs for which others end, and its own that are `ending` for any reason."""

    awaited: Counter[str]
    ending: Counter[str]

    def add(self, tenant: str, shape: Shape, found: Choice) -> None:
        self.awaited[tenant] += shape.gpus
        for victim in found.victims:
            self.ending[victim.job.tenant] += victim.gpus


class Preempting:
    """Searches and tracks preemptions for one engine's state.

    Jobs of at least `priority` may preempt jobs of lower priority; above 100, none may. With `reclaim`, jobs may also
    end others to get their tenant's guaranteed GPUs back. `knows_fleet` says whether every worker was heard from in
    this term, or had time to renew: a worker not heard from may have room.
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
        self._in_vain: dict[int, int] = {}  # queue entry -> ledger ms of the last search without result
        self._void: dict[int, int] = {}  # job number -> ledger ms since which all its victims have ended
        #: numbers of jobs asked to end that may not have ended; None if all members must be read to find them
        self._asked: set[int] | None = None

    @property
    def allowed(self) -> bool:
        return self.reclaim or self.priority <= 100

    def held(self, draft: Draft, shape: Shape, priority: int, tenant: str) -> frozenset[int]:
        """Return the hosts reserved for jobs other than those of this shape, priority and tenant."""
        return self._hosts(draft, lambda job: not self._is_of(job, shape, priority, tenant))

    def own(self, draft: Draft, shape: Shape, priority: int, tenant: str) -> frozenset[int]:
        """Return the hosts reserved for jobs of this shape, priority and tenant."""
        return self._hosts(draft, lambda job: self._is_of(job, shape, priority, tenant))

    @staticmethod
    def _hosts(draft: Draft, which: Callable[[Job], bool]) -> frozenset[int]:
        standing = [(job, job.preempts[0]) for job in draft.state.preempting.values() if job.preempts is not None]
        return frozenset(num for job, hosts in standing if which(job) for num in hosts)

    def _is_of(self, job: Job, shape: Shape, priority: int, tenant: str) -> bool:
        policy = self.policy
        return tenant == job.tenant and policy.shape_of(job) is shape and policy.priority_of(job) == priority

    def settle(self, draft: Draft, waits: Callable[[Job], bool]) -> None:
        """Give up preemptions whose job no longer waits, or has not started although all its victims ended long ago."""
        before, self._void = self._void, {}  # rebuilt each time, so that a started job leaves no entry
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
        """At most once a second, end victims for the first jobs of groups that may preempt and found no room.

        A job without victims is tried after the others next time, so that a hopeless job does not use up the searches.
        No two jobs get the same host. A record in which an operator changes a priority searches no victims, since the
        state still has the old priorities; the next record does.
        """
        if draft.time_ms - self._sought_ms < 1000:
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
            rights = self._rights(draft, job, group, under_way)
            if not rights:
                continue
            searches += 1
            closed = excluded(group) | found_now | group.shape.refusing
            for right in rights:
                with self.policy.fleet.avoiding(group.shape.avoid):
                    found = self.policy.choose(draft, group.shape, right, closed, under_way.ending)
                if found is not None:
                    found_now |= found.hosts
                    self._end(draft, right, found)
                    under_way.add(job.tenant, group.shape, found)
                    break
            else:
                vain[item] = draft.time_ms

    def asked_to_end(self, jobs: set[int]) -> None:
        """Note the jobs (by number) with members that this record asks to end, for any reason.

        Their tenants have less to give back, although they still lease those GPUs.
        """
        if not self.reclaim or self._asked is None:
            return
        self._asked |= jobs
        if len(self._asked) > FOLLOWED_MAX:
            self._asked = None

    def seek_at_once(self) -> None:
        """Let the next pass search for victims, however recent the last search was."""
        self._sought_ms = 0

    def _under_way(self, draft: Draft) -> UnderWay:
        """Return the GPUs that are awaited and that are ending, by tenant."""
        found, jobs = UnderWay(Counter(), Counter()), draft.state.jobs
        for job in draft.state.preempting.values():
            shape = self.policy.shape_of(job)
            found.awaited[job.tenant] += shape.gpus
        if self._asked is None:
            members = (m for worker in draft.state.workers.values() for m in worker.members.values())
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

    def _rights(self, draft: Draft, job: Job, group: Group, under_way: UnderWay) -> list[Right]:
        """Return by what rights a job may end others, in the order to try them; empty if it has none.

        It takes back its tenant's guaranteed GPUs first. If that gives it no room, its priority decides, also among the
        jobs of its own tenant.
        """
        need, rights = group.shape.gpus, list[Right]()
        tenant = draft.tenant(job.tenant)
        own = tenant.guaranteed - tenant.gpus - under_way.awaited[job.tenant]
        if self.reclaim and 0 < need <= own:
            rights.append(Right(job, group.priority, reclaims=True))
        if group.priority >= self.priority:
            rights.append(Right(job, group.priority, reclaims=False, spares=self.reclaim and need > 0))
        return rights

    def _end(self, draft: Draft, right: Right, found: Choice) -> None:
        victims = sorted({victim.job.num for victim in found.victims})
        draft.add(Preempt(right.job.num, sorted(found.hosts), victims))
        for victim in found.victims:
            why = self._why(right, victim.job, victim.priority)
            # ends its gang too, with the notice that the request asks for
            self.lifecycle.leave(draft, victim.members[0], why, Count.NONE)

    @staticmethod
    def _why(right: Right, victim: Job, priority: int) -> str:
        """Return the reason shown to the victim's tenant; it does not name another tenant's job."""
        mine = right.job.tenant == victim.tenant
        whom = f"job {right.job.name}" if mine else f"tenant {right.job.tenant}"
        if right.reclaims:
            return f"preempted: borrowed GPUs go back to tenant {right.job.tenant}"
        return f"preempted by {whom}: priority {right.priority} over {priority}"
