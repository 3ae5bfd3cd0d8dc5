"""What has to leave its worker, and when it is asked to end; a member of a service ends once its replacement serves.

All has to leave a worker that is drained: by a deadline it is asked in time for its notice and its grace, without one
it runs on. A member that is preempted is asked at the latest after its grace, and has its notice and its grace then. A
worker that was told to end ends all itself, and members are asked shortly before. All that serves nobody there is asked
at once: what is no service, and members that have not been ready yet.

Of a service one member moves at a time: the job gets one more replica, which waits in the queue like any other, and
counts towards limits and quotas. Where these or the fleet have no room, a member that is preempted ends, and others run
on until they are asked. The number of the member, or that of a replacement that is not needed any more, is taken away
once it is over, though its attempt may keep devices in quarantine. A service of which not all replicas run, by its
calls or its `max_running`, has numbers to spare: one of them is the replacement's, and the old one waits until it is
its turn.

The ledger has which number leaves for which (`Job.relocating`), so a new leader goes on with it. That a worker was told
to end is in each of its renewals and not in the ledger: its next session, or an older scheduler, has nothing to clear.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from moorage.scheduler.core.draft import Draft, steps_to_end
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.ledger.acts import Relocate, RelocateAgain, Relocated
from moorage.scheduler.core.ledger.records import MOVED, NOTICE_S_MAX, Count
from moorage.scheduler.core.ledger.state import (
    CANCELLED,
    FROZEN,
    IS_TERMINAL,
    MAY_END,
    QUEUED,
    RUNNING,
    RUNS,
    Attempt,
    Job,
    Replica,
    State,
    Worker,
)
from moorage.scheduler.core.lifecycle.max_running import most_of, top_of
from moorage.scheduler.core.lifecycle.members import Move, has_settled, move_on, notice_to_leave
from moorage.scheduler.core.lifecycle.scaling import Scaling
from moorage.scheduler.core.lifecycle.services import Services
from moorage.scheduler.core.lifecycle.transitions import Lifecycle
from moorage.scheduler.core.lifecycle.windows import GRACE_S_MAX
from moorage.schemas.job import Request
from moorage.schemas.ranges import NUMBERS_MAX, count_of, without

#: after a replacement that ended before it served, the next one is begun this much later
AGAIN_MS: Final = 60_000
#: a member that is preempted ends once its replacement has found no place in so many looks, one each second
LOOKS_MAX: Final = 2
#: members are asked to end so long before their worker, which was told to end, ends them itself
AHEAD_MS: Final = 2_000
_NOT_NEEDED: Final = "the member that it was to replace goes on, or has ended"


class Leaves(NamedTuple):
    """Why an attempt has to leave its worker, and the ledger ms at which it ends all the same, infinity for none.

    `told`: its worker ends it itself then. `is_awaited`: another job waits for what it holds, so it ends as soon as its
    replacement finds no place. Before a drain begins it has to leave in time, and does not move (`now` is false).
    """

    why: str
    by_ms: float
    told: bool = False
    is_awaited: bool = False
    now: bool = True


def must_leave(fleet: Fleet, worker: Worker) -> Leaves | None:
    """Return why all that runs has to leave a worker, and when; None where all may stay."""
    window, drains, host = worker.window, worker.flag == "draining", fleet.hosts.get(worker.num)
    by_ms = math.inf if window is None else window.leave_ms
    if host is not None and host.leaves_ms is not None:
        return Leaves(f"{worker.id} was told to end", min(by_ms, host.leaves_ms - AHEAD_MS), told=True)
    if window is None and not drains:
        return None
    return Leaves(f"{worker.id} is drained" + (f": {window.why}" if window and window.why else ""), by_ms, now=drains)


def staying_for(state: State, job: Job) -> Iterator[tuple[Attempt, int]]:
    """Yield the members of services that end for a job once others serve, each with the ledger ms of its end."""
    if job.preempts is None or len(job.preempts) < 3:
        return
    hosts, _, stay = job.preempts
    for num, index, by_ms in zip(stay[::3], stay[1::3], stay[2::3], strict=True):
        row = victim.rows.get(index) if (victim := state.jobs.get(num)) is not None else None
        if row is not None and row.attempt is not None and row.attempt.worker.num in hosts and row.state in MAY_END:
            yield row.attempt, by_ms


def is_serving(replica: Replica, request: Request) -> bool:
    """Return whether a replica is ready for calls; one whose request does not say how to see that, once it runs."""
    if replica.state != RUNNING or replica.attempt is None:
        return False
    return request.workload.ready is None or replica.attempt.ready


def _has_replaced(replica: Replica, request: Request, now_ms: int) -> bool:
    """Return whether a replacement serves, for as long as its request says."""
    ready = request.workload.ready
    serves = is_serving(replica, request)
    return serves and (ready is None or has_settled(replica, ready.for_ms(replaces=False), now_ms))


def _has_served(member: Attempt, request: Request) -> bool:
    """Return whether a member of a service runs or sleeps, and was ready for calls at some time."""
    row = member.replica
    if request.service is None or row.state not in RUNS:
        return False
    return request.workload.ready is None or member.ever_ready or row.state == FROZEN


def _is_spare(job: Job, index: int, request: Request) -> bool:
    """Return whether as many replicas serve besides this one as may run while none moves."""
    most = most_of(job, request)
    serving = sum(is_serving(row, request) for row in job.rows.values() if row.index != index)
    return most is not None and serving >= most - 1


class Relocating:
    """Moves members of services."""

    def __init__(self, state: State, fleet: Fleet, lifecycle: Lifecycle, services: Services, scaling: Scaling) -> None:
        self._state = state
        self._fleet = fleet
        self._lifecycle = lifecycle
        self._services = services
        self._scaling = scaling
        self._jobs: set[int] = set()  # numbers of jobs of which a replica moves, as of the record in flight
        self._looks: dict[int, int] = {}  # by job number: in how many looks its replacement had no place
        self._again_ms: dict[int, int] = {}  # by job number: ledger ms before which no next replacement is begun
        self._leaving: dict[Attempt, Leaves] = {}  # as of `end_due`

    def add(self, job: Job) -> None:
        """Go on with what a leader before has begun."""
        if job.relocating is not None:
            self._jobs.add(job.num)

    def end_due(self, draft: Draft) -> None:
        """Ask to end what may not go on any longer where it is; to be called once a second, before `pass_time`."""
        self._leaving.clear()
        self._again_ms = {num: due_ms for num, due_ms in self._again_ms.items() if due_ms > draft.time_ms}
        for member, leaves in self._leaves(draft.time_ms):
            self._leaving[member] = leaves
            notice_s = self._notice_s(member, leaves, draft.time_ms)
            if notice_s is None or not self._lifecycle.is_on_worker(member):
                continue
            if draft.full or not draft.has_room(steps_to_end((member,))):
                draft.is_short = True  # it follows a second later
            else:
                self._lifecycle.leave(draft, member, leaves.why, Count.NONE, notice_s)

    def _leaves(self, now_ms: int) -> Iterator[tuple[Attempt, Leaves]]:
        """Yield the attempts that have to leave their workers."""
        soon_ms = now_ms + 1000 * (NOTICE_S_MAX + GRACE_S_MAX)
        for worker in self._state.workers.values():
            if (leaves := must_leave(self._fleet, worker)) is not None and (leaves.now or leaves.by_ms <= soon_ms):
                current = [member for member in worker.attempts.values() if member.replica.attempt is member]
                yield from ((member, leaves) for member in current)
        for job in self._state.preempting.values():
            for member, by_ms in staying_for(self._state, job):
                whom = f"job {job.name}" if member.replica.job.tenant == job.tenant else f"tenant {job.tenant}"
                yield member, Leaves(f"preempted by {whom}", by_ms, is_awaited=True)

    def _notice_s(self, member: Attempt, leaves: Leaves, now_ms: int) -> int | None:
        """Return with which notice a member is asked to end now; None if it goes on."""
        request, notice_s = self._lifecycle.request_of(member.replica.job), self._lifecycle.notice_s(member.replica.job)
        left_s = max(0.0, leaves.by_ms - now_ms) / 1000
        if leaves.is_awaited:
            return None if left_s and self.moves(member) else notice_s
        if leaves.told:
            return notice_to_leave(left_s, 0.0, notice_s, goes_on=_has_served(member, request))
        return notice_to_leave(left_s, min(request.workload.grace_s, GRACE_S_MAX), notice_s)

    def pass_time(self, draft: Draft) -> None:
        """Take the next step of each move, and begin those that are wanted; to be called once a second.

        That is behind all else in the record that may end a member: for what the record begins here, it is too late.
        """
        moving = frozenset(self._jobs)  # the next move of a job begins once the record of the last one is stored
        for num in sorted(self._jobs):
            job = self._state.jobs.get(num)
            if job is None or job.over:
                self._jobs.discard(num)
                self._looks.pop(num, None)
            elif job.relocating is not None and not draft.bulk_full:
                self._go_on(draft, job, *job.relocating)
        for member, leaves in self._leaving.items():
            if leaves.now:
                self._begin(draft, member, moving)

    def moves(self, member: Attempt) -> bool:
        """Return whether a member serves, and may go on until another one does."""
        job = member.replica.job
        request = self._lifecycle.request_of(job)
        serves = self._moves(job, request) and is_serving(member.replica, request)
        return serves and job.num not in self._again_ms

    def _begin(self, draft: Draft, member: Attempt, moving: frozenset[int]) -> None:
        """Begin the move of a member that has to leave."""
        job, request = member.replica.job, self._lifecycle.request_of(member.replica.job)
        if job.num in moving or job.num in self._jobs or job.relocating is not None or job.num in self._again_ms:
            return
        if draft.full or not self._lifecycle.is_on_worker(member) or not self._moves(job, request):
            return
        bounded, again = request.scale is not None or request.max_running is not None, False
        if bounded and (spare := self._spare(draft, job)) is not None:
            new = spare
        else:
            top = top_of(job, request)
            new = self._free(draft, job, top)
            if new >= NUMBERS_MAX:
                return
            draft.enlarged.append(job)
            again = new <= top
        self._jobs.add(job.num)
        self._looks[job.num] = 0
        draft.add((RelocateAgain if again else Relocate)(job.num, member.replica.index, new))

    @staticmethod
    def _free(draft: Draft, job: Job, top: int) -> int:
        """Return a number for one replica more: the lowest one whose replica was taken away, if all of it is over."""
        lingering = {index for index, _ in job.lingering or ()}
        gone = without(((0, top),), job.numbers) if draft.may(RelocateAgain) else ()
        numbers = (number for first, last in gone for number in range(first, last + 1))
        return next((number for number in numbers if number not in lingering), top + 1)

    def _moves(self, job: Job, request: Request) -> bool:
        """Return whether members of a job move: of a service, unless its next version takes its place anyway."""
        if request.service is None or request.workload.items is not None or job.hold is not None:
            return False
        live = self._services.live(job.tenant, request.service.name)
        return live[:1] == [job] and not any(self._services.replaces(each) for each in live[1:])

    @staticmethod
    def _spare(draft: Draft, job: Job) -> int | None:
        """Return the number of the first replica that waits for nothing but calls; None if all run."""
        back = [row.index for row in job.rows.values() if row.state == QUEUED and row.not_before <= draft.time_ms]
        return min([*back, *(first for first, _ in job.fresh[:1])], default=None)

    def _go_on(self, draft: Draft, job: Job, old: int, new: int) -> None:
        """Take the next step of a move."""
        request = self._lifecycle.request_of(job)
        row, member = job.rows.get(new), job.rows[old].attempt if old in job.rows else None
        leaves = None if member is None else self._leaving.get(member)
        now = self._state_of(job, new)
        if now == QUEUED and leaves is not None and leaves.is_awaited:
            self._looks[job.num] = self._looks.get(job.num, 0) + 1
        move = Move(
            self._state_of(job, old),
            now,
            job.size - count_of(job.leaving) > request.copies,
            job.has_moved,
            leaves is not None and self._moves(job, request),
            row is not None and _has_replaced(row, request, draft.time_ms),
            _is_spare(job, old, request),
            leaves is not None and leaves.is_awaited and self._looks.get(job.num, 0) >= LOOKS_MAX,
        )
        step = move_on(move)
        reason = "" if leaves is None else leaves.why
        why = {
            "replaced": f"{MOVED}{new}: {reason}",
            "it ended before": f"{MOVED}{new}",
            "spare": f"another replica serves in its place: {reason}",
        }.get(step.phase, reason)
        if step.rests:
            self._again_ms[job.num] = draft.time_ms + AGAIN_MS
        if step.old == "gone":
            self._cancel(draft, job, old, why)
        elif step.old == "waits" and member is not None:
            self._lifecycle.leave(draft, member, why, Count.NONE)
        if step.gives_up:
            self._give_up(draft, job, new, has_more=move.own)
        if step.over:  # else it could take the place of one more itself
            self._is_over(draft, job, {"old": old, "new": new, "none": -1}[step.over])

    @staticmethod
    def _state_of(job: Job, index: int) -> int:
        row = job.rows.get(index)
        state = row.state if row is not None else job.state_of(index)
        return CANCELLED if state is None else state

    def _give_up(self, draft: Draft, job: Job, new: int, *, has_more: bool) -> None:
        """End a replacement that is not needed; where it has no number of its own, only if more than may run do so."""
        if has_more:
            self._cancel(draft, job, new, _NOT_NEEDED)
            return
        self._is_over(draft, job, -1)
        if (most := most_of(job, self._lifecycle.request_of(job))) is not None:
            self._scaling.end_beyond(draft, job, most, _NOT_NEEDED)

    def _cancel(self, draft: Draft, job: Job, index: int, why: str) -> None:
        self._lifecycle.cancel(draft, job, why, ((index, index),))

    def _is_over(self, draft: Draft, job: Job, gone: int) -> None:
        """Write that a move is over, and take this number away, -1 for none: once the record of its end is stored."""
        state = job.state_of(gone) if gone >= 0 else CANCELLED
        if state is None or not IS_TERMINAL[state] or draft.names(job, gone):
            return
        draft.add(Relocated(job.num, gone))
        self._jobs.discard(job.num)
        self._looks.pop(job.num, None)
