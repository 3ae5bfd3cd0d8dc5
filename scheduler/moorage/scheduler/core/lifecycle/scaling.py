"""How many members a service has: as many as its calls need, between the bounds of its request.

Members say about once a second what they have to do (`MemberLoad`). From that follows how many are wanted; the ledger
gets each change of the number (`acts.Scale`), and nothing of the loads. Replicas beyond the number are parked in the
queue, as those beyond `max_running` are. So a new leader goes on with the number that it finds, and waits until it has
heard the members before it takes one away.

*Wanted* are as many as the calls (those that run and wait, as a mean, and what was refused) fill to 70 to 80 % of their
places, and one more than there are while calls wait longer than the request says, or are refused. One step up each
`scale_up_s`, once all members that are wanted answer calls: those that start will help. One step down each
`scale_down_s`, once fewer would have done for so long. Members above `min` may also end for a job that comes before
this one in the queue, as preemptible jobs do for any other (`schedule.victims`). Such a member is still wanted, and
waits for a place as others do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, NamedTuple

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Wake
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.ledger.acts import Lends, Scale
from moorage.scheduler.core.ledger.fairkeys import owner_of
from moorage.scheduler.core.ledger.records import Count
from moorage.scheduler.core.ledger.state import FROZEN, Attempt, Job, State
from moorage.scheduler.core.lifecycle.freezing import can_freeze
from moorage.scheduler.core.lifecycle.max_running import wanted_of
from moorage.scheduler.core.lifecycle.members import Old
from moorage.scheduler.core.lifecycle.swaps import Rung
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.scheduler.core.queue.order import QueueOrder
from moorage.scheduler.core.queue.queue import Group, Key
from moorage.schemas.answers.jobs import Woken
from moorage.schemas.attempt import AttemptName
from moorage.schemas.frames import Answer
from moorage.schemas.job import Request
from moorage.schemas.service import MemberLoad
from moorage.schemas.units import many

#: the part of all places that calls fill on average: above the first one member more is wanted; one less, if the others
#: would then be below the second
FULL: Final = 0.8
FILLED: Final = 0.7
#: over about this long the calls are averaged
MEAN_MS: Final = 10_000
#: a member that was not heard for so long does not answer calls
SILENT_MS: Final = 25_000
#: less than this is no call at a time
_NO_CALLS: Final = 0.01


def member_of(state: State, tenant: str, load: MemberLoad) -> Attempt | None:
    """Return the member that published this load; None if it is none of the current ones."""
    job = state.job(tenant, load.job)
    row = job.rows.get(load.replica) if job is not None else None
    member = None if row is None else row.attempt
    if member is None or member.fence != load.fence or load.attempt not in (0, member.no):
        return None
    return member


class _Heard:
    """What one member has said: its last frame, and means of what it does.

    Calls that wait in a member that is frozen, as for its turn, ask for no more members: once it runs on, it takes all
    of these. Of their waits that part counts which comes after.
    """

    __slots__ = ("at_ms", "busy", "from_ms", "load", "refused_s", "run_s", "woke_ms")

    def __init__(self, load: MemberLoad, mono_ms: int, is_frozen: bool) -> None:
        self.load = load
        self.at_ms = self.from_ms = mono_ms
        #: mean number of calls that run or wait at this member. It starts at 0, not at the first reading: a new member
        #: takes calls away from others, whose means fall at the same speed
        self.busy = 0.0
        self.refused_s = 0.0  # calls that it refuses in a second
        self.run_s = 0.0  # mean time of a run
        self.woke_ms = None if is_frozen else 0  # when it ran on after it was frozen; None until then

    @property
    def awake_ms(self) -> int:
        """How long it runs since it was frozen last; 0 while it is frozen."""
        return 0 if self.woke_ms is None else self.at_ms - self.woke_ms

    def take(self, load: MemberLoad, mono_ms: int, is_frozen: bool) -> bool:
        """Take the next frame; return whether there were calls since the last one."""
        before, passed_ms = self.load, max(1, mono_ms - self.at_ms)
        part = min(1.0, passed_ms / MEAN_MS)
        self.load, self.at_ms = load, mono_ms
        if is_frozen or self.woke_ms is None:
            self.woke_ms = None if is_frozen else mono_ms
        ran_ms, waited_ms = max(0, load.ran_ms - before.ran_ms), max(0, load.waited_ms - before.waited_ms)
        refused, ended = max(0, load.refused - before.refused), max(0, load.ended - before.ended)
        busy = 0.0 if is_frozen else float(load.running + load.waiting)
        if ended and ran_ms <= ended * passed_ms:  # of calls that are short the time that they took says more
            busy = (ran_ms + min(waited_ms, ended * self.awake_ms)) / passed_ms
        self.busy += part * (busy - self.busy)
        self.refused_s += part * (refused * 1000 / passed_ms - self.refused_s)
        if ended:
            run_s = ran_ms / ended / 1000
            self.run_s = run_s if not self.run_s else self.run_s + part * (run_s - self.run_s)
        return bool(ended or refused or load.running or load.waiting)


class _Service:
    """What is known of one job whose number of members follows its calls. Times are monotonic milliseconds."""

    __slots__ = ("called_ms", "heard", "low_ms", "moved_ms", "pressed")

    def __init__(self) -> None:
        self.heard: dict[AttemptName, _Heard] = {}
        self.called_ms: int | None = None  # when there was a call last
        self.low_ms: int | None = None  # since when fewer members would do
        self.moved_ms = -1  # ledger ms of the last step that was written
        self.pressed = ""  # what went wrong since the last step: calls waited too long, or were refused

    def quiet_ms(self, mono_ms: int) -> int:
        """Return for how long there was no call, counted from when the newest member was heard first."""
        begins = [heard.from_ms for heard in self.heard.values()]
        return mono_ms - max(begins if self.called_ms is None else [*begins, self.called_ms])


class Yields(NamedTuple):
    """A job with members above `min`: where it stands in the queue, its number and tenant, how many of them may end for
    one that comes before it, its shape, and what one of them counts towards its tenant's share."""

    key: Key
    num: int
    tenant: str
    most: int
    shape: Shape
    rate_milli: int

    def to(self, key: Key, num: int, shape: Shape) -> bool:
        """Return whether members end for a job of the queue: it comes first, and none would preempt it again."""
        again = shape.preemptible and not self.shape.preemptible
        return (key, num) < self[:2] and not again and bool(self.shape.count or not shape.count)


class Scaling:
    """Follows the calls of services. The queue places as many replicas as are wanted, see `Draft.rescaled`.

    `up_s` and `down_s` are the least seconds between two steps up, and down. `refused(member)` says whether a member
    that was to sleep could not be frozen; `rung(job)` what members do while no calls come.
    """

    def __init__(
        self,
        state: State,
        lifecycle: Lifecycle,
        order: QueueOrder,
        priority_of: Callable[[Job], int],
        up_s: float,
        down_s: float,
        refused: Callable[[Attempt], bool],
        rung: Callable[[Job], Rung],
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._order = order
        self._priority_of = priority_of
        self._up_ms = int(up_s * 1000)
        self._down_ms = int(down_s * 1000)
        self._refused = refused
        self._rung = rung
        self._services: dict[int, _Service] = {}  # by job number
        #: numbers of the jobs that had members above `min` when their calls were last looked at
        self.above: set[int] = set()
        #: numbers of jobs that another one replaces: these get no more members, whose places the other one may need
        self.replaced: Collection[int] = ()

    def __contains__(self, num: int) -> bool:
        return num in self._services

    def add(self, job: Job, request: Request) -> None:
        """Follow the calls of a live job, if its number of members depends on them; else do so no more."""
        if request.scale is None or request.service is None:
            self._services.pop(job.num, None)
            self.above.discard(job.num)
        elif job.num not in self._services:
            self._services[job.num] = _Service()

    def on_load(self, tenant: str, load: MemberLoad, mono_ms: int) -> None:
        """Take a member's load; a frame of no member of such a service is ignored."""
        member = member_of(self._state, tenant, load)
        service = self._services.get(member.replica.job.num) if member is not None else None
        if member is None or service is None:
            return
        job = member.replica.job
        known, is_frozen = service.heard.get(member.name), load.rests or member.replica.state == FROZEN
        if known is None:
            known = service.heard[member.name] = _Heard(load, mono_ms, is_frozen)
            called = bool(load.running or load.waiting or load.ended or load.refused)
        else:
            if load.refused > known.load.refused:
                service.pressed = f"{many(load.refused - known.load.refused, 'call')} refused"
            called = known.take(load, mono_ms, is_frozen)
        if called:
            service.called_ms = mono_ms
        scale = self._lifecycle.request_of(job).scale
        waited_ms = min(load.oldest_ms, known.awake_ms)
        if scale is not None and waited_ms > scale.wait_target_ms:
            service.pressed = f"a call waited {waited_ms} ms"

    def wake(self, draft: Draft, asked: Wake, jobs: Iterable[Job], mono_ms: int) -> Answer | None:
        """Let a service without members have one; `jobs` are its live jobs. Return None if none of them is followed
        here."""
        for job in jobs:
            service = self._services.get(job.num)
            if service is None:
                continue
            request = self._lifecycle.request_of(job)
            service.called_ms = mono_ms
            wanted = wanted_of(job, request)
            if not wanted and service.moved_ms < draft.time_ms:
                wanted = 1
                self._move(draft, job, service, wanted, "woken by a caller")
                draft.woken.append((asked.tenant, asked.service))
            return Answer("wake", 0, Woken(service=asked.service, job=job.name, wanted=max(1, wanted)))
        return None

    def pass_time(self, draft: Draft, mono_ms: int) -> None:
        """Take the steps that are due; to be called about once a second."""
        self.above.clear()
        for num, service in list(self._services.items()):
            job = self._state.jobs.get(num)
            if job is None or job.over:
                del self._services[num]
            elif job.hold is None and not draft.full:
                self._look(draft, job, service, mono_ms)

    def begin_with(self, draft: Draft, job: Job, count: int, why: str) -> bool:
        """Let a job begin with so many members, as far as its bounds allow; return whether that changes anything."""
        request = self._lifecycle.request_of(job)
        scale, service = request.scale, self._services.get(job.num)
        if scale is None or service is None or job.scaled is not None:
            return False
        count = min(max(count, scale.min), scale.max)
        if count == scale.min:
            return False
        self._move(draft, job, service, count, why)
        return True

    def lender(self, job: Job) -> Old:
        """Return how many members a service has while none replaces it, and what of that it has lent."""
        request, (lent, ahead) = self._lifecycle.request_of(job), job.lent
        if request.scale is not None:
            return Old(wanted_of(job, request) + lent, lent, ahead, follows=True)
        full = min(request.copies, request.max_running or request.copies)
        if not lent and job.scaled is not None:
            lent = max(0, full - job.scaled.wanted)  # a snapshot may have lost it
        # more may serve than a `max_running` allows that is lower by now
        return Old(max(full, lent + self.count(job)), lent, min(ahead, lent))

    def count(self, job: Job) -> int:
        """Return how many members of a job have a place and were not asked to end, without one that is to replace
        another."""
        return sum(1 for _ in self._members(job))

    def lend(
        self, draft: Draft, job: Job, full: int, lent: tuple[int, int], why: str, member: Attempt | None = None
    ) -> None:
        """Let a service want so many members less than its full number from now on (`lent`, of these ahead).

        Members beyond that are asked to end, `member` first, else those that do not serve.
        """
        request, service = self._lifecycle.request_of(job), self._services.get(job.num)
        wanted = full - lent[0]
        if not lent[0] and request.scale is None:
            wanted = request.copies  # what `max_running` allows of them may change
        draft.add(Scale(job.num, wanted, why))
        draft.tell(Lends(job.num, *lent))  # a new leader that lacks it finds what it can in the number that is wanted
        draft.rescaled.append(job)
        if service is not None:
            service.moved_ms, service.low_ms = draft.time_ms, None
        if member is not None:
            self._lifecycle.leave(draft, member, why, Count.NONE)
        self.end_beyond(draft, job, full - lent[0], why)

    def end_beyond(self, draft: Draft, job: Job, most: int, why: str) -> None:
        """Ask the members of a job to end that are more than so many: those that answer no calls yet, then those with
        the fewest calls."""
        service, members = self._services.get(job.num), list(self._members(job))

        def calls(member: Attempt) -> tuple[int, int]:
            if service is None:
                return int(member.ready), -member.replica.index
            heard = service.heard.get(member.name)
            return (-1 if heard is None else heard.load.running + heard.load.waiting, -member.replica.index)

        for member in sorted(members, key=calls)[: max(0, len(members) - most)]:
            self._lifecycle.leave(draft, member, why, Count.NONE)

    def come_back(self, draft: Draft, job: Job, why: str) -> None:
        """Let a service want again what it has lent to a next version that is no more."""
        if job.scaled is None or job.over or not job.live:
            return
        old, request = self.lender(job), self._lifecycle.request_of(job)
        if any(job.lent) or (request.scale is None and job.scaled.wanted < request.copies):
            self.lend(draft, job, old.full, (0, 0), why)

    def yielding(self) -> list[Yields]:
        """Return the jobs with members above `min`, which end for jobs that come before these in the queue."""
        found = list[Yields]()
        for num in sorted(self.above):
            job = self._state.jobs.get(num)
            scale = self._lifecycle.request_of(job).scale if job is not None else None
            if job is None or scale is None or job.hold is not None:
                continue
            count = self.count(job) - scale.min
            if count > 0:
                shape = self._lifecycle.shape_of(job)
                rate_milli = self._order.rates.of(shape)
                found.append(Yields(self._standing(job), num, job.tenant, count, shape, rate_milli))
        return found

    # ---------------------------------------------------------------------------------------------- within

    def _look(self, draft: Draft, job: Job, service: _Service, mono_ms: int) -> None:
        """Take the step of one service that is due, if any, and ask those members to end that are too many."""
        wanted, members = wanted_of(job, self._lifecycle.request_of(job)), list(self._members(job))
        why = f"more than the {wanted} that are wanted"  # one that was asked to end, and cut off before, has come back
        step, said = self._step(draft, job, service, members, mono_ms) if len(members) <= wanted else (0, "")
        if step:
            wanted += step
            why = f"scaled to {wanted}: {said}"
            self._move(draft, job, service, wanted, said)
        if len(members) > wanted:
            self.end_beyond(draft, job, wanted, why)

    def _step(self, draft: Draft, job: Job, service: _Service, members: list[Attempt], mono_ms: int) -> tuple[int, str]:
        """Return by how many members more or fewer are wanted from now on, and why."""
        request = self._lifecycle.request_of(job)
        scale, spec = request.scale, request.service
        assert scale is not None
        assert spec is not None
        wanted = wanted_of(job, request)
        if len(members) > scale.min:
            self.above.add(job.num)
        if not members and wanted:
            service.low_ms = None
            return 0, ""
        needs, why, answering = self._needs(request, service, members, wanted, mono_ms)
        if needs >= wanted or answering < len(members):  # of those that are silent nothing is known
            service.low_ms = None
        elif service.low_ms is None:
            service.low_ms = mono_ms
        moved_ms = max(service.moved_ms, job.scaled.since_ms if job.scaled is not None else job.accepted_ms)
        since_ms = draft.time_ms - moved_ms
        if needs > wanted and since_ms >= self._up_ms and answering >= wanted and job.num not in self.replaced:
            return 1, why
        low_ms = 0 if service.low_ms is None else mono_ms - service.low_ms
        is_over = needs < wanted and low_ms >= self._down_ms and since_ms >= self._down_ms
        if wanted == 1 and spec.sleep_after_s:
            rung = self._rung(job)
            if rung == "stays" or (rung == "sleeps" and request.sleeps and self._can_freeze(members, request)):
                return 0, ""
            quiet_ms = service.quiet_ms(mono_ms) if answering == len(members) else 0
            is_over = not scale.min and quiet_ms >= spec.sleep_after_s * 1000
            why = f"no call for {many(quiet_ms // 1000, 'second')}"
        return -is_over, why

    def _can_freeze(self, members: list[Attempt], request: Request) -> bool:
        return any(can_freeze(each.worker, request) and not self._refused(each) for each in members)

    def _needs(
        self, request: Request, service: _Service, members: list[Attempt], wanted: int, mono_ms: int
    ) -> tuple[int, str, int]:
        """Return how many members the calls need, what is said of that, and how many answer calls now.

        `wanted` is how many are wanted now.
        """
        scale, spec = request.scale, request.service
        assert scale is not None
        assert spec is not None
        current = {member.name for member in members}
        service.heard = {
            name: heard
            for name, heard in service.heard.items()
            if name in current and mono_ms - heard.at_ms < SILENT_MS
        }
        heard = service.heard.values()
        answering = sum(not each.load.draining for each in heard)
        busy = sum(each.busy for each in heard) + sum(each.refused_s * each.run_s for each in heard)
        places = max(1.0, sum(each.load.places for each in heard) / len(heard)) if heard else float(spec.concurrency)
        full, filled = (math.ceil(busy / (places * part)) if busy > _NO_CALLS else 0 for part in (FULL, FILLED))
        needs = max(full, min(filled, wanted))
        why = f"{busy:.1f} calls at a time, and a member runs {places:g}"
        keeps_ms = min(self._down_ms, round(1000 * spec.sleep_after_s)) if spec.sleep_after_s else self._down_ms
        if service.called_ms is not None and mono_ms - service.called_ms < keeps_ms:
            needs = max(1, needs)  # else a last member that has ended sooner would begin anew
        if service.pressed:
            if answering >= wanted:  # else the members that start will help
                needs = max(needs, answering + 1)
                why = f"{service.pressed}; {why}"
            service.pressed = ""
        return min(max(needs, scale.min), scale.max), why, answering

    def _members(self, job: Job) -> Iterator[Attempt]:
        """Yield the members of a job on workers that were not asked to end, without one that is to replace another."""
        old, new = job.relocating or (-1, -1)
        leaves = job.rows.get(old)
        if leaves is None or leaves.attempt is None or not self._lifecycle.is_on_worker(leaves.attempt):
            new = -1  # it has done so
        for replica in job.rows.values():
            member = replica.attempt
            if member is not None and replica.index != new and self._lifecycle.is_on_worker(member):
                yield member

    def _move(self, draft: Draft, job: Job, service: _Service, wanted: int, why: str) -> None:
        service.moved_ms, service.low_ms = draft.time_ms, None
        self.want(draft, job, wanted, why)

    def want(self, draft: Draft, job: Job, wanted: int, why: str) -> None:
        """Let a job have so many members from now on."""
        draft.add(Scale(job.num, wanted, why))
        draft.rescaled.append(job)

    def _standing(self, job: Job) -> Key:
        """Return where a service stands in the queue."""
        mine = Group(self._priority_of(job), self._lifecycle.shape_of(job), owner_of(job), [job.num])
        key, tenant = self._order.key(mine), self._state.read_tenant(job.tenant)
        if 0 < tenant.gpus <= tenant.guaranteed:
            key = (0, *key[1:])  # what it has is its tenant's own
        return key
