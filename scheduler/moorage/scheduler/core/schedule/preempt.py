"""Preemption in a pass: which jobs may preempt, how preemptions proceed, and which hosts are reserved meanwhile.

The ledger records which jobs end for which job, and which hosts are reserved (`Job.preempts`), so a new leader
continues where the old one stopped. Victims are searched once a second, after a pass has placed all it could.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.host import EXCLUSIVE
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.acts import Preempt, Stays
from moorage.scheduler.core.ledger.fairshare import GPU_MILLI, WEIGHT_DEFAULT
from moorage.scheduler.core.ledger.records import Count
from moorage.scheduler.core.ledger.state import LEAVING, Attempt, Job, State
from moorage.scheduler.core.lifecycle.relocating import staying_for
from moorage.scheduler.core.lifecycle.scaling import Scaling, Yields
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.scheduler.core.queue.queue import Group, Key
from moorage.scheduler.core.schedule.victims import ABOVE, LOWEST, VOID_MS, Choice, Preemption, Right, Victim

#: ledger ms between two searches
SEEK_MS: Final = 1_000
#: a job for which others are being ended counts towards `Ceilings.standing` for so long
STANDING_MS: Final = 60_000
#: jobs for which victims are searched each second, by one right after the other: two, and more as long as they look at
#: no more hosts than `LOOKS_MAX`. Each search reads up to `victims.READ_MAX` changed hosts
SEARCHES_MIN: Final = 2
LOOKS_MAX: Final = 2_048
#: jobs of one group for which victims are searched in one second
CANDIDATES_MAX: Final = 16
#: the most replicas of a job for which one search makes room
REPLICAS_MAX: Final = 64
#: a job of many replicas, whose victims have ended, keeps their hosts for so long: by then those it could start run
STARTED_MS: Final = 1_000
#: jobs asked to end that are tracked from record to record
FOLLOWED_MAX: Final = 10_000
#: what a queue group is known by from one second to the next: its priority, the index of its shape, its tenant
Kind = tuple[int, int, str]


def leaving_for(state: State, job: Job) -> Iterator[Attempt]:
    """Yield the attempts that still have to leave the hosts reserved for a job; other attempts may run on there."""
    if job.preempts is None:
        return
    hosts, jobs = job.preempts[0], set(job.preempts[1])
    for num in hosts:
        for attempt in state.worker_by_num[num].attempts.values():
            replica = attempt.replica
            if replica.job.num in jobs and (replica.attempt is not attempt or replica.state in LEAVING):
                yield attempt
    for attempt, _ in staying_for(state, job):
        yield attempt


class Candidate(NamedTuple):
    """A job that may end others if it has the right: its number and queue group, and how many replicas may start."""

    key: Key
    num: int
    group: Group
    replicas: int

    @property
    def kind(self) -> Kind:
        """The kind of its group."""
        return (self.group.priority, self.group.shape.index, self.group.tenant)


class UnderWay(NamedTuple):
    """GPUs by tenant: `awaited` by jobs for which others end, and its own that are `ending` for any reason."""

    awaited: Counter[str]
    ending: Counter[str]

    def add(self, tenant: str, shape: Shape, found: Choice) -> None:
        self.awaited[tenant] += found.replicas * shape.gpus
        for victim in found.victims:
            self.ending[victim.job.tenant] += victim.gpus


class Preempting:
    """Searches and tracks preemptions for one engine's state.

    Any job that is not preemptible itself may end preemptible ones. Jobs of at least `priority` may preempt jobs of
    lower priority; above 100, none may. With `reclaim`, jobs may also end others to get their tenant's guaranteed GPUs
    back. `knows_fleet` says whether every worker was heard from in this term, or had time to renew: a worker not heard
    from may have room. `stays` says whether a member serves until another one does in its place, or its grace is over.
    """

    def __init__(
        self,
        state: State,
        policy: Preemption,
        lifecycle: Lifecycle,
        priority: int,
        reclaim: bool,
        knows_fleet: Callable[[], bool],
        stays: Callable[[Attempt], bool],
        scaling: Scaling,
    ) -> None:
        self.state = state
        self.policy = policy
        self.lifecycle = lifecycle
        self.priority = priority
        self.reclaim = reclaim
        self.knows_fleet = knows_fleet
        self.stays = stays
        self.scaling = scaling
        self._sought_ms = 0
        self._seen: tuple[int, int, int] | None = None  # the `_view` of the last search; None if it left anything out
        #: by the kind of the group: ledger ms of the last search without result
        self._in_vain: dict[Kind, int] = {}
        self._stands_ms: dict[int, int] = {}  # job number -> ledger ms since which others are being ended for it
        self._void: dict[int, int] = {}  # job number -> ledger ms since which all its victims have ended
        #: numbers of jobs asked to end that may not have ended; None if all attempts must be read to find them
        self._asked: set[int] | None = None

    def allowed(self) -> bool:
        """Return whether a job may end others now."""
        return self.reclaim or self.priority <= 100 or self.state.preemptibles > 0 or bool(self.scaling.above)

    def held(self, draft: Draft, shape: Shape, priority: int, tenant: str) -> frozenset[int]:
        """Return the hosts reserved for jobs other than those of this shape, priority and tenant."""
        return self._hosts(draft, lambda job: not self._is_of(job, shape, priority, tenant))

    def own(self, draft: Draft, shape: Shape, priority: int, tenant: str) -> frozenset[int]:
        """Return the hosts reserved for jobs of this shape, priority and tenant."""
        return self._hosts(draft, lambda job: self._is_of(job, shape, priority, tenant))

    @staticmethod
    def _hosts(draft: Draft, which: Callable[[Job], bool]) -> frozenset[int]:
        return frozenset(num for job, hosts in draft.preempting if which(job) for num in hosts)

    def _is_of(self, job: Job, shape: Shape, priority: int, tenant: str) -> bool:
        policy = self.policy
        return tenant == job.tenant and policy.shape_of(job) is shape and policy.priority_of(job) == priority

    def settle(self, draft: Draft, waits: Callable[[Job], bool]) -> None:
        """Give up preemptions whose job no longer waits, or has not started although all its victims ended long ago."""
        before, self._void = self._void, {}  # rebuilt each time, so that a started job leaves no entry
        for num, job in list(draft.state.preempting.items()):
            if waits(job):
                if any(True for _ in leaving_for(draft.state, job)):
                    continue
                since_ms = before.get(num, draft.time_ms)
                if draft.time_ms - since_ms < self._keeps_ms(job):
                    self._void[num] = since_ms
                    continue
            draft.add(Preempt(num, [], []))

    def _keeps_ms(self, job: Job) -> int:
        """Return for how long hosts on which no job ends any more stay a job's."""
        if job.gang and job.preempts is not None and not job.preempts[1]:  # it has lost a rank
            return max(VOID_MS, round(self.lifecycle.request_of(job).repair_s * 1000))
        return VOID_MS if job.size == 1 or job.gang else STARTED_MS

    def _standing(self, draft: Draft) -> int:
        """Count the jobs for which others are being ended since less than `STANDING_MS`: a notice may take an hour."""
        before = self._stands_ms
        self._stands_ms = {num: before.get(num, draft.time_ms) for num in draft.state.preempting}
        return sum(draft.time_ms - since_ms < STANDING_MS for since_ms in self._stands_ms.values())

    def seek(
        self,
        draft: Draft,
        eligible: Callable[[Draft], Iterable[Candidate]],
        excluded: Callable[[Draft, Group], frozenset[int]],
    ) -> None:
        """At most once a second, end victims for the first jobs of groups that may preempt and found no room.

        A group that found no victims is tried after the others next time, so that a hopeless job does not use up the
        searches. No two jobs of unlike groups get the same host.
        """
        if draft.time_ms - self._sought_ms < SEEK_MS:
            self._seen = None  # what this pass was for may be one that no step tells of, as the end of a pause
            return
        if not self.knows_fleet():
            return
        state, searches, candidates = draft.state, 0, list(eligible(draft))
        self._sought_ms, self._seen, standing = draft.time_ms, None, self._standing(draft)
        most = max(SEARCHES_MIN, LOOKS_MAX // max(1, len(self.policy.fleet.hosts)))
        under_way = self._under_way(draft)
        self.policy.ending = {each for job in state.preempting.values() for each, _ in staying_for(state, job)}
        found_now, yielding = dict[Kind, set[int]](), self.scaling.yielding()
        kinds = {candidate.kind for candidate in candidates}
        vain = self._in_vain = {kind: at for kind, at in self._in_vain.items() if kind in kinds}
        hopeless = set[Kind]()
        for candidate in sorted(candidates, key=lambda row: (vain.get(row.kind, 0), row[:2])):
            _, num, group, replicas = candidate
            kind, job = candidate.kind, state.jobs.get(num)
            if job is None or job.num in state.preempting or kind in hopeless or draft.full:
                continue
            if job.ledger > state.seq:
                continue  # accepted with this record: nobody ends for it at once
            if searches >= most or standing + searches >= state.ceilings.standing:
                return
            rights = self._rights(job, candidate, under_way, yielding)
            if not rights:
                continue
            searches += 1
            closed = excluded(draft, group) | group.shape.refusing | self._taken_now(found_now, kind)
            for right in rights:
                wanted = 1 if right.reclaims else replicas
                with self.policy.fleet.avoiding(group.shape.avoid):
                    found = self.policy.choose(draft, group.shape, right, closed, under_way.ending, wanted)
                if found is not None:
                    found_now.setdefault(kind, set()).update(found.hosts)
                    self._end(draft, right, found)
                    under_way.add(job.tenant, group.shape, found)
                    break
            else:
                hopeless.add(kind)
                vain[kind] = draft.time_ms
        if draft.empty and not self.policy.lags:
            self._seen = self._view()

    def next_ms(self) -> float:
        """Return from which ledger ms on other jobs may end for one although nothing happens; infinity for never.

        After a search that left nothing out, that is when a job has run for long enough to be a victim.
        """
        if self.state.preempting or self.scaling.above:
            return self.state.time_ms  # what ends now is followed, and members above `min` follow their load
        if not self.allowed():
            return math.inf
        if self._seen != self._view():
            return self._sought_ms + SEEK_MS
        return self.policy.next_ms(self.state)

    def _view(self) -> tuple[int, int, int]:
        """Return a value that differs whenever a search may differ for a reason other than time."""
        return self.state.digest, self.policy.fleet.version, self.policy.fleet.changes

    def _taken_now(self, found: Mapping[Kind, set[int]], kind: Kind) -> set[int]:
        """Return the hosts that jobs got in this pass, but those where another of this kind may end more.

        That is where nothing is open: what is open counts for the first of them.
        """
        hosts = self.policy.fleet.hosts
        return {num for other, nums in found.items() for num in nums if other != kind or hosts[num].open}

    def asked_to_end(self, jobs: set[int]) -> None:
        """Note the jobs (by number) with attempts that this record asks to end, for any reason.

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
            leaving = sum(attempt.mask.bit_count() for attempt in leaving_for(draft.state, job))
            found.awaited[job.tenant] += max(self.policy.shape_of(job).gpus, leaving)
        if self._asked is None:
            attempts = (m for worker in draft.state.workers.values() for m in worker.attempts.values())
            self._asked = {m.replica.job.num for m in attempts if m.replica.state in LEAVING}
        self._asked |= draft.ends
        for job in draft.state.preempting.values():
            for attempt, _ in staying_for(draft.state, job):
                found.ending[attempt.replica.job.tenant] += attempt.home.bit_count()
        for num in list(self._asked):
            gpus = sum(m.mask.bit_count() for m in self._ending_of(jobs.get(num)))
            if gpus:
                found.ending[jobs[num].tenant] += gpus
            else:
                self._asked.remove(num)
        return found

    @staticmethod
    def _ending_of(job: Job | None) -> list[Attempt]:
        held = [replica.attempt for replica in job.rows.values()] if job is not None else []
        return [m for m in held if m is not None and m.replica.state in LEAVING]

    def _rights(self, job: Job, candidate: Candidate, under_way: UnderWay, yielding: list[Yields]) -> list[Right]:
        """Return by what rights a job may end others, in the order to try them; empty if it has none.

        Members of services above their `min` and preemptible jobs go first. Then it takes back its tenant's guaranteed
        GPUs. If that gives it no room, its priority decides, also among the jobs of its own tenant.
        """
        key, num, group, _ = candidate
        need, shape, rights = group.shape.gpus, group.shape, list[Right]()
        yields = self._given(job, key, under_way, [each for each in yielding if each.to(key, num, shape)])
        if shape.preemptible or (yields and shape.mode > EXCLUSIVE):
            return [Right(job, ABOVE + 1, reclaims=False, yields=yields)] if yields else []
        if self.state.preemptibles or yields:
            rights.append(Right(job, LOWEST + 1, reclaims=False, yields=yields))
        tenant = self.state.read_tenant(job.tenant)
        own = tenant.guaranteed - tenant.gpus - under_way.awaited[job.tenant]
        if self.reclaim and 0 < need <= own:
            rights.append(Right(job, group.priority, reclaims=True))
        if group.priority >= self.priority:
            rights.append(Right(job, group.priority, reclaims=False, spares=self.reclaim and need > 0))
        return rights

    def _given(self, job: Job, key: Key, under_way: UnderWay, yielding: Iterable[Yields]) -> dict[int, int]:
        """Return by job number how many members above `min` may end for a job that comes before them.

        Where only their shares put one tenant before the other, a tenant gives no more than leaves it, for its weight,
        with as much as the other one has then. So the one that got them is not the one to give them back.
        """
        found, taker = dict[int, int](), self.state.read_tenant(job.tenant)
        has, given = taker.rate_milli + GPU_MILLI * under_way.awaited[job.tenant], Counter[str]()
        for each in yielding:
            most, rate = each.most, each.rate_milli
            if each.tenant != job.tenant and each.key[:2] == key[:2] and rate:
                giver = self.state.read_tenant(each.tenant)
                left = giver.rate_milli - GPU_MILLI * under_way.ending[each.tenant] - given[each.tenant]
                mine, theirs = taker.weight or WEIGHT_DEFAULT, giver.weight or WEIGHT_DEFAULT
                most = max(0, min(most, (left * mine - has * theirs) // ((mine + theirs) * rate)))
                given[each.tenant] += most * rate
                has += most * rate
            if most > 0:
                found[each.num] = most
        return found

    def _end(self, draft: Draft, right: Right, found: Choice) -> None:
        victims = sorted({victim.job.num for victim in found.victims})
        draft.add(Preempt(right.job.num, sorted(found.hosts), victims))
        for victim in found.victims:
            attempt = victim.attempts[0]
            if victim.priority != ABOVE and self.stays(attempt):
                by_ms = draft.time_ms + int(self.lifecycle.request_of(victim.job).workload.grace_s * 1000)
                draft.add(Stays(right.job.num, victim.job.num, attempt.replica.index, by_ms))
                self.policy.ending.add(attempt)
                continue
            why = self._why(right, victim)
            # ends its gang too, with the notice that the request asks for
            self.lifecycle.leave(draft, attempt, why, Count.NONE)

    @staticmethod
    def _why(right: Right, victim: Victim) -> str:
        """Return the reason shown to the victim's tenant; it does not name another tenant's job."""
        mine, priority = right.job.tenant == victim.job.tenant, victim.priority
        if priority == ABOVE:
            whom = "an earlier or more urgent job" if mine else f"tenant {right.job.tenant}"
            return f"{whom} waits for what a member has, and comes first"
        whom = f"job {right.job.name}" if mine else f"tenant {right.job.tenant}"
        if priority == LOWEST:
            return f"preempted by {whom}: it is preemptible"
        if right.reclaims and not victim.gpus:
            return f"preempted: tenant {right.job.tenant} needs processors or memory for its guaranteed GPUs"
        if right.reclaims:
            return f"preempted: borrowed GPUs go back to tenant {right.job.tenant}"
        return f"preempted by {whom}: priority {right.priority} over {priority}"
