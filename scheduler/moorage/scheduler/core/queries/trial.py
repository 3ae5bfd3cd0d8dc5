"""Whether something would be placed at once by all the rules of the queue: tried on the state as it is, in thought.

The planner places what fits in the order of the queue; here the answer is found without placing anybody, so that
explain may ask it of many changes while it changes nothing. Where the outcome hangs on what others would do first, it
is on the safe side: hosts that somebody else might take count as taken, and what cannot be told is a no. So a yes holds
on this state, with strict order, fair share, limits, reservations, preemption and drains; time that goes by is not
foreseen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Final, NamedTuple

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.host import EXCLUSIVE, Host
from moorage.scheduler.core.queue.queue import REPLICA_BITS, Line, Waits, entry
from moorage.scheduler.core.schedule.reserve import Reservation
from moorage.scheduler.core.schedule.runtime import DEPTH_MAX
from moorage.scheduler.core.shape import Shape
from moorage.scheduler.core.state import QUEUED, Job
from moorage.schemas.job import Request

#: lines of others that one answer looks at: with more of them that may move, nothing is sure
LINES_MAX: Final = 256
_NOBODY: Final[frozenset[int]] = frozenset()


class Case(NamedTuple):
    """What is tried: a request under a shape. `item` is its place in the queue, None behind all who are there.

    `gpus_max` is its tenant's limit then, 0 for none, `gpus` what that tenant leases when its turn comes; `lets_go`
    says whose lines may move by the change itself, `without` are the numbers of jobs that are gone by then.
    """

    request: Request
    shape: Shape
    priority: int
    deadline_ms: int | None
    gpus_max: int
    gpus: int
    lets_go: Callable[[Line], bool]
    without: frozenset[int]
    item: int | None = None


def starts_now(fleet: Fleet, shape: Shape, barred: frozenset[int], times: int = 1) -> bool:
    """Whether hosts that are open to it hold a replica of this shape now, of a gang all of them; so many `times`."""
    missing = shape.together * times
    for cls, _ in fleet.capable(shape):
        for bucket in cls.buckets[shape.count if shape.mode == EXCLUSIVE else 0 :]:
            for num, host in bucket.items():
                if num not in barred:
                    missing -= surely(host, shape)
                    if missing <= 0:
                        return True
    return False


def surely(host: Host, shape: Shape) -> int:
    """Replicas that a usable host holds now; of sharers on several devices each one at most, as they may overlap."""
    found = host.replicas_of(shape, "now")
    return min(found, 1) if shape.mode > EXCLUSIVE and shape.count > 1 else found


def might_take(fleet: Fleet, shape: Shape) -> frozenset[int]:
    """The hosts on which somebody who asks so could be put now."""
    return frozenset(
        num
        for cls, _ in fleet.capable(shape)
        for bucket in cls.buckets
        for num, host in bucket.items()
        if host.replicas_of(shape, "now") > 0
    )


class Trials:
    """Questions about one waiting job of an engine, as it stands between two records."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self.engine = engine
        self.job = job
        self.shape = engine.shape_of(job)
        self.request = engine.request_of(job)
        self.priority = engine.priority_of(job)
        self.draft = engine.standing_draft()
        self.now_ms = self.draft.time_ms
        self.leased = self.draft.tenant(job.tenant).gpus
        self.gpus_max = self.draft.tenant(job.tenant).gpus_max
        self.item = entry(job.num, next(replica.index for replica in job.replicas if replica.state == QUEUED))
        self._pauses = any(replica.not_before > self.now_ms for replica in job.replicas)
        self._strict = engine.planner.lines.order == "fifo"
        self._may_take: dict[int, frozenset[int]] = {}
        # what many changes have in common, by the jobs that are gone; a look at thousands of lines for each took a
        # quarter of a second
        self._others: dict[frozenset[int], dict[Line, list[int]]] = {}
        self._moving: dict[tuple[Callable[[Line], bool], frozenset[int]], dict[Line, list[int]]] = {}
        self._next: dict[frozenset[int], Reservation | None] = {}

    # ------------------------------------------------------------------------------------------ what is tried

    def instead(self, request: Request) -> bool:
        """Whether it starts at once when the job is cancelled and this is submitted in its place."""
        shape = self.engine.shape_for(self.engine.shapes.of(request), self.job.tenant, request)
        deadline_ms = None if request.deadline_s is None else self.now_ms + int(request.deadline_s * 1000)
        return self.is_placed(
            Case(
                request, shape, request.priority, deadline_ms, self.gpus_max, self.leased,
                self._goes_without, frozenset((self.job.num,)),
            )
        )  # fmt: skip

    def in_place(
        self,
        *,
        priority: int = -1,
        gpus_max: int = -1,
        gpus: int = -1,
        lets_go: Callable[[Line], bool],
        without: frozenset[int] = _NOBODY,
    ) -> bool:
        """Whether the job itself starts at once by a change of what stands around it; never in a pause."""
        if self._pauses:
            return False
        return self.is_placed(
            Case(
                self.request, self.shape, self.priority if priority < 0 else priority, self.job.deadline_ms,
                self.gpus_max if gpus_max < 0 else gpus_max, self.leased if gpus < 0 else gpus, lets_go, without,
                self.item,
            )
        )  # fmt: skip

    def _goes_without(self, line: Line) -> bool:
        """Whether a line may move once this job is gone from the queue."""
        held = self.engine.planner.holding.reservation
        if self._strict or (held is not None and held.num == self.job.num):
            return True
        return line.verdict.change != self.engine.fleet.changes or (
            bool(self.gpus_max) and line.tenant == self.job.tenant
        )

    # ------------------------------------------------------------------------------------------ the lines of others

    @cached_property
    def _lines(self) -> list[tuple[Line, list[int]]]:
        """Each line with its first few entries that wait, of this job too."""
        found = []
        for line in self.engine.queue.lines.values():
            waiting = self._waiting(line)
            if waiting:
                found.append((line, waiting))
        return found

    def _waiting(self, line: Line) -> list[int]:
        """The first of a line that wait: enough to see whether anybody but this job does."""
        planner, found = self.engine.planner, list[int]()
        for item in line.entries:
            if planner.lines.waits(self.draft, item):
                found.append(item)
                if len(found) > len(self.job.replicas) + DEPTH_MAX:
                    break
        return found

    def others(self, without: frozenset[int]) -> dict[Line, list[int]]:
        """The lines in which somebody waits who may start: not held, and not over its tenant's limit by itself."""
        found = self._others.get(without)
        if found is None:
            found = self._others[without] = {}
            for line, items in self._lines:
                rest = [item for item in items if item >> REPLICA_BITS not in without]
                if rest and not self._stands_still(line):
                    found[line] = rest
        return found

    def _stands_still(self, line: Line) -> bool:
        """Whether nobody of a line may start, whoever goes: its tenant is held."""
        return bool(line.tenant) and self.draft.tenant(line.tenant).hold is not None

    def is_over(self, line: Line) -> bool:
        """Whether a line waits for its tenant's limit as things are."""
        gpus_max = self.draft.tenant(line.tenant).gpus_max if line.tenant else 0
        return bool(gpus_max) and line.shape.gpus > gpus_max - self.draft.tenant(line.tenant).gpus

    def comes_before(self, line: Line, first: int, priority: int, item: int | None) -> bool:
        """Whether the first of a line goes before an entry of this priority; under fair share it may be anybody."""
        if self.engine.planner.lines.is_fair(self.draft):
            return True
        planner = self.engine.planner
        theirs, mine = planner.lines.standing_of(line.priority, first), priority
        if item is not None:
            mine = planner.lines.standing_of(priority, item)
        if mine <= planner.lines.aged_of(line.priority, first):
            theirs = max(theirs, mine)  # it comes up to this class once there is somebody in it
        return theirs > mine or (theirs == mine and (item is None or first < item))

    def stops(
        self, priority: int, item: int | None, without: frozenset[int], *, eased: bool = False
    ) -> list[tuple[Line, int]]:
        """In strict order: the lines whose first must start before an entry of this priority may, with that first.

        Whoever waits for the tenant's limit stops nobody, unless that is `eased`.
        """
        if not self._strict:
            return []
        return [
            (line, items[0])
            for line, items in self.others(without).items()
            if self.comes_before(line, items[0], priority, item)
            and not (self.is_over(line) and not (eased and line.tenant == self.job.tenant))
            and self.engine.admission.could_ever(line.shape)
        ]

    def first_ahead(self) -> Job | None:
        """In strict order: the job that comes first of those that stop this one."""
        stops = self.stops(self.priority, self.item, frozenset((self.job.num,)))
        standing = self.engine.planner.lines.standing_of
        first = min(stops, key=lambda stop: (-standing(stop[0].priority, stop[1]), stop[1]), default=None)
        return self.engine.state.jobs.get(first[1] >> REPLICA_BITS) if first is not None else None

    # ---------------------------------------------------------------------------------------------- the answer

    def is_placed(self, case: Case) -> bool:
        """Whether the next record places it, of a gang all of it, else at least one replica."""
        engine, shape, tenant = self.engine, case.shape, self.job.tenant
        if not engine.may_place(self.now_ms, engine.built_ms) or self.draft.tenant(tenant).hold is not None:
            return False
        without = case.without | {self.job.num}
        others = self.others(without)
        if not self._within_limit(case, others) or self.stops(
            case.priority, case.item, without, eased=case.item is not None
        ):
            return False
        mine = engine.queue.line_of(case.priority, shape, tenant)
        beside = others.get(mine, []) if mine is not None else []
        if mine is not None and (len(mine.entries) > DEPTH_MAX or not self._is_looked_at(mine, case)):
            return False
        before = len(beside) if case.item is None else sum(1 for item in beside if item < case.item)
        moving: list[Line] = []
        for line, items in self._that_move(case, without).items():
            if line is mine:
                continue
            if line.shape is shape and len(items) <= DEPTH_MAX:
                before += len(items)  # they take what it would: there has to be so much more
            else:
                moving.append(line)
        if len(moving) > LINES_MAX:
            return False
        taken = frozenset[int]().union(*map(self._takes, moving))
        if moving:
            taken |= self._left_by(case.without)
        taken |= engine.windows.barred_to(case.request.workload.timeout_s, case.deadline_ms, self.now_ms)
        taken |= engine.planner.preempting.held(self.draft, shape, case.priority, tenant) | shape.refusing
        with engine.fleet.avoiding(shape.avoid):
            if starts_now(engine.fleet, shape, taken | self._reserved(case), 1 + before):
                return True
            return self._fills_in(case) and starts_now(engine.fleet, shape, taken, 1)

    def _within_limit(self, case: Case, others: dict[Line, list[int]]) -> bool:
        """Whether its tenant may lease so many more, with what others of it lease first."""
        need = case.shape.gpus
        if not case.gpus_max or not need:
            return True
        left = case.gpus_max - case.gpus
        for line, items in others.items() if case.item is None else ():
            if line.tenant == self.job.tenant and line.shape.count:
                each = line.shape.gpus
                if left < each <= case.gpus_max and self.engine.planner.could_ever(line.shape):
                    return False  # under a limit nobody overtakes who waits for it
                if self._moves(line, items[0], case):
                    left -= each * len(line.entries)
        return need <= left

    def _is_looked_at(self, line: Line, case: Case) -> bool:
        """Whether a line that is there already is looked at in the next pass: not where it found no room before."""
        return (
            line.verdict.change != self.engine.fleet.changes
            or line.verdict.waits is not Waits.NO_ROOM
            or case.lets_go(line)
        )

    def _that_move(self, case: Case, without: frozenset[int]) -> dict[Line, list[int]]:
        """The lines of others of which somebody might be placed with what is tried, or before it."""
        key = (case.lets_go, without)
        found = self._moving.get(key) if case.item is None else None  # behind all, whatever it asks for
        if found is None:
            others = self.others(without).items()
            found = {line: items for line, items in others if self._moves(line, items[0], case)}
        if case.item is None:
            self._moving[key] = found
        return found

    def _moves(self, line: Line, first: int, case: Case) -> bool:
        """Whether somebody of a line might be placed with what is tried, or before it."""
        if not case.lets_go(line):
            return False
        return case.item is None or self.comes_before(line, first, case.priority, case.item)

    def _takes(self, line: Line) -> frozenset[int]:
        found = self._may_take.get(line.shape.index)
        if found is None:
            found = self._may_take[line.shape.index] = might_take(self.engine.fleet, line.shape)
        return found

    def _left_by(self, nums: frozenset[int]) -> frozenset[int]:
        """The hosts that these jobs leave by going: who finds no room now might find it there."""
        jobs = (self.engine.state.jobs.get(num) for num in nums)
        return frozenset(
            replica.member.worker.num
            for job in jobs
            if job is not None
            for replica in job.replicas
            if replica.member is not None
        )

    def _reserved(self, case: Case) -> frozenset[int]:
        """Hosts that are held back for somebody else, or would be by the time that it comes and this job has gone."""
        planner, shape = self.engine.planner, case.shape
        held = planner.holding.reservation
        if case.item is None and (held is None or held.num in (*case.without, self.job.num)):
            if case.without not in self._next:
                self._next[case.without] = planner.holding.next_reservation(self.draft, case.without)
            held = self._next[case.without]
        if held is None or held.num == self.job.num or planner.holding.passes(case.priority, shape, held):
            return _NOBODY
        return held.hosts

    def _fills_in(self, case: Case) -> bool:
        """Whether it surely ends before the hosts that are held back are needed."""
        held, most_ms = self.engine.planner.holding.reservation, None
        if held is not None and held.start_ms is not None and held.num not in (*case.without, self.job.num):
            most_ms = self.engine.estimates.most_ms(self.job.tenant, case.request, case.shape, self.job.accepted_ms)
        return held is not None and most_ms is not None and self.now_ms + most_ms <= (held.start_ms or 0)

    def ends_ms(self) -> list[int]:
        """Times from now, in ms, by which something has to be over to be let in: reservations, drains to come."""
        held, found = self.engine.planner.holding.reservation, []
        if held is not None and held.start_ms is not None and held.num != self.job.num:
            found.append(held.start_ms - self.now_ms)
        windows = self.engine.state.windows.values()
        found += [worker.window.leave_ms - self.now_ms for worker in windows if worker.window is not None]
        return sorted((ms for ms in set(found) if ms > 0), reverse=True)
