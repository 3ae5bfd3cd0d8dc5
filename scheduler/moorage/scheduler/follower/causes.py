"""Why groups of waiting jobs wait, found in the ledger alone. Pure: no I/O, no clock.

A group is what waits of one tenant, priority and shape. For each shape, every host's room has a *price*: `FREE`, or the
number of the newest job that would have to go. The price of the last replica that must have room decides: if it is
`FREE`, room is there, else the jobs that wait and are older than that number were passed.

Not in the ledger is what workers tell between records: devices in other use, engines that do not answer, load frames
that are missed. A group that keeps waiting beside room is `UNEXPLAINED`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE, Host
from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.records import GOODBYE
from moorage.scheduler.core.ledger.state import Job, State, Tenant, Worker
from moorage.scheduler.core.queue import limits
from moorage.scheduler.core.request_reader import RequestReader
from moorage.schemas.waited import Cause

FREE: Final = 1 << 62
#: for so long a host that was lost counts as one that is closed; one that said goodbye never does
LOST_MS: Final = 3_600_000

#: priority, shape, tenant
Kind = tuple[int, Shape, str]


class Verdict(NamedTuple):
    """Why a group waits, and the tenant to which that is due, "" for none.

    Of a full fleet, jobs with a lower number than `passed_by` were passed: `cause` and `holder` are theirs, `else_` is
    for the others.
    """

    cause: str
    holder: str = ""
    passed_by: int = 0
    else_: tuple[str, str] = ("", "")


class _Row(NamedTuple):
    """What one host is for a shape: its prices, the highest first, at most as many as have to start together."""

    is_open: bool
    prices: tuple[int, ...]
    shut: int  # replicas that would have room if all devices were well
    gpus: int  # that are free
    held: tuple[tuple[str, int], ...]  # matching GPUs by tenant


class _Rooms:
    """The rows of one shape, and their sums."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.rows: dict[int, _Row] = {}
        self.prices: list[int] = []  # of open hosts, ascending
        self.gpus = 0  # free on open hosts
        self.closed = 0  # replicas with room on closed hosts, or on devices that are not well
        self.ever = 0
        self.held = Counter[str]()

    def put(self, num: int, row: _Row | None) -> None:
        if (old := self.rows.pop(num, None)) is not None:
            self._count(old, -1)
            for price in old.prices if old.is_open else ():
                del self.prices[bisect_left(self.prices, price)]
        if row is not None:
            self.rows[num] = row
            self._count(row, 1)
            for price in row.prices if row.is_open else ():
                insort(self.prices, price)

    def _count(self, row: _Row, sign: int) -> None:
        self.ever += sign * (len(row.prices) + row.shut)
        self.gpus += sign * row.gpus * row.is_open
        self.closed += sign * (row.shut + (0 if row.is_open else row.prices.count(FREE)))
        for tenant, gpus in row.held:
            self.held[tenant] += sign * gpus

    @property
    def free(self) -> int:
        """How many replicas have room on open hosts now; those of one host up to as many as start together."""
        return len(self.prices) - bisect_left(self.prices, FREE)

    def free_on(self, nums: Iterable[int]) -> int:
        rows = (row for num in nums if (row := self.rows.get(num)) is not None)
        return sum(row.prices.count(FREE) for row in rows if row.is_open)


class _Standing(NamedTuple):
    """What a look has found for a shape: its rows, how many replicas have room, and who has most of its GPUs."""

    rooms: _Rooms
    free: int
    most: str


class Causes:
    """The hosts of a state as the ledger tells them; `look` after records, `judge` for the verdicts."""

    def __init__(self, state: State, guaranteed: Callable[[int], bool | None]) -> None:
        """`guaranteed` returns whether a job was placed within its tenant's guarantee, None if it does not know."""
        self._state = state
        self._guaranteed = guaranteed
        self._fleet = Fleet()
        self.reader = RequestReader(self._fleet, Shapes())
        self._seen: dict[int, tuple[Any, ...]] = {}  # by worker: what of it decides
        self._changed = set(state.worker_by_num)  # workers of which that may be otherwise by now
        self._absent: set[int] = set()  # those without a session: time alone changes what they count
        self._held: dict[int, list[tuple[Shape, int]]] = {}  # by worker: what is taken on its host
        self._rooms: dict[Shape, _Rooms] = {}
        self._standing: dict[Shape, _Standing] = {}  # as of the last look
        self.renamed = 0  # grows when workers' rules name further tenants, and shapes have to be made anew

    def kind_of(self, job: Job) -> Kind:
        return self.reader.kind_of(job)

    # --------------------------------------------------------------------------------------------- hosts

    def fold(self, folded: Folded) -> None:
        """Note which hosts a record may have changed."""
        note = self._changed.add
        for attempt in folded.placed:
            note(attempt.worker.num)
        for worker in (*folded.gave, *folded.workers, *folded.forgotten):
            note(worker.num)

    def look(self, kinds: Iterable[Kind]) -> None:
        """Follow the state: the hosts that have changed since the last look, for the shapes of these groups."""
        wanted = {shape for _, shape, _ in kinds}
        for shape in self._rooms.keys() - wanted:
            del self._rooms[shape]
        new = [_Rooms(shape) for shape in sorted(wanted - self._rooms.keys(), key=lambda shape: shape.index)]
        known, workers = list(self._rooms.values()), self._state.worker_by_num
        for num in sorted(self._changed | self._absent) if wanted else ():
            if (worker := workers.get(num)) is None:
                self._gone(num)
                continue
            (self._absent.discard if worker.session else self._absent.add)(num)
            now = _decides(worker), not worker.session and self._is_gone(worker)
            if self._seen.get(num) != now:
                self._seen[num] = now
                self._read(worker, known)
        if wanted:
            self._changed.clear()
        self._standing.clear()
        for rooms in new:
            self._rooms[rooms.shape] = rooms
        if new:
            for num in self._seen:
                self._read(workers[num], new)

    def _is_gone(self, worker: Worker) -> bool:
        """Return whether a host does not count any more: it left for good, or was lost long ago."""
        if worker.session:
            return False
        return worker.left_why == GOODBYE or self._state.time_ms - worker.left_ms > LOST_MS

    def _gone(self, num: int) -> None:
        self._seen.pop(num, None)
        self._absent.discard(num)
        self._held.pop(num, None)
        self._fleet.leave(num)
        self._fleet.left.clear()
        for rooms in self._rooms.values():
            rooms.put(num, None)

    def _read(self, worker: Worker, all_rooms: list[_Rooms]) -> None:
        """Find a host's rows: what it holds is put onto it one after another, the oldest job first."""
        host = self._empty_host(worker)
        if host is None:
            for rooms in all_rooms:
                rooms.put(worker.num, None)
            return
        fits = [rooms for rooms in all_rooms if self._may_fit(host, rooms)]
        without = [_avoided(rooms.shape, worker.num) for rooms in fits]
        left = [self._room(host, rooms.shape, out) for rooms, out in zip(fits, without, strict=True)]
        prices: list[list[int]] = [[] for _ in fits]
        held_now: list[tuple[Shape, int]] = []
        attempts = sorted(worker.attempts.values(), key=lambda attempt: (attempt.replica.job.num, attempt.fence))
        for attempt in attempts:
            job, shape = attempt.replica.job, self.reader.shape_of_attempt(attempt)
            self._fleet.hold(host, attempt, shape)
            held_now.append((shape, attempt.mask))
            for at, rooms in enumerate(fits):
                now = self._room(host, rooms.shape, without[at])
                prices[at] += [job.num] * (left[at] - now)
                left[at] = now
        if all(attempt.mask == attempt.home for attempt in attempts):
            self._held[worker.num] = held_now
        for at, rooms in enumerate(fits):
            shape, most = rooms.shape, rooms.shape.together
            found = (FREE,) * min(left[at], most) + tuple(reversed(prices[at]))
            mask = host.cls.fit(shape).mask
            shut = host.cls.rooms(host.free & mask, shape) - left[at] if worker.out and shape.count else 0
            held = Counter[str]()
            for attempt in attempts if shape.count else ():
                held[attempt.replica.job.tenant] += (attempt.mask & mask).bit_count()
            rooms.put(
                worker.num,
                _Row(
                    bool(worker.session) and not host.closed,
                    found[:most],
                    min(most, max(0, shut)),
                    (host.slots_for(shape) | host.open_to(shape)).bit_count() if shape.count else 0,
                    tuple(held.items()),
                ),
            )

    def _empty_host(self, worker: Worker) -> Host | None:
        """Return a worker's host as if nothing ran there; None if it does not count."""
        host, held = self._fleet.hosts.get(worker.num), self._held.pop(worker.num, None)
        if host is not None and held is not None and worker.session and host.labels is worker.inventory.labels:
            host.closed = worker.flag != "open"
            self._fleet.give_all(host, held)
            return host
        named = len(self._fleet.named)
        host = None
        if worker.hello and not self._is_gone(worker):
            with suppress(Exception):  # a hello that the scheduler could not use either: it leaves such a host out
                host = self._fleet.join(worker, ())
                host.heard = True
        else:
            self._fleet.leave(worker.num)
        self._fleet.left.clear()
        self.renamed += len(self._fleet.named) != named
        return host

    def _may_fit(self, host: Host, rooms: _Rooms) -> bool:
        self._fleet.distinguish(rooms.shape)
        if host.worker.num not in rooms.shape.refusing and not host.cls.fit(rooms.shape).reason:
            return True
        rooms.put(host.worker.num, None)
        return False

    def _room(self, host: Host, shape: Shape, without: int) -> int:
        return host.replicas_of(shape, "now", without)

    # ------------------------------------------------------------------------------------------- verdicts

    def judge(self, kind: Kind, held_up: dict[str, frozenset[int]], waited: str) -> Verdict:
        """Return why a group waits, that waited for `waited` up to now.

        `held_up` has, by tenant, the parts of its limits of which an earlier job needs more than is left. Groups of a
        tenant are judged in the order in which they would start, each for the later ones.
        """
        _, shape, name = kind
        tenant = self._state.read_tenant(name)
        if tenant.hold is not None:
            return Verdict(Cause.HELD)
        if self._is_limited(tenant, shape, held_up):
            return Verdict(Cause.LIMIT)
        rooms, free, most = self._standing.get(shape) or self._stand(shape)
        kept, keeper = self._kept(kind)
        together = shape.together
        if free - rooms.free_on(kept) >= together:
            return Verdict(Cause.UNEXPLAINED if waited in (Cause.PLACING, Cause.UNEXPLAINED) else Cause.PLACING)
        if free >= together:
            return Verdict(Cause.RESERVED, keeper)
        if rooms.ever < together:
            return Verdict(Cause.NO_HOST)
        if free + rooms.closed >= together or len(rooms.prices) < together:
            return Verdict(Cause.CLOSED)
        if shape.count and shape.mode <= EXCLUSIVE and rooms.gpus >= shape.gpus:
            return Verdict(Cause.FRAGMENTED)
        passer = rooms.prices[-together]
        other = self._state.jobs.get(passer)
        if other is None:
            return Verdict(Cause.FULL, most)
        return Verdict(self._right(kind, other), other.tenant, passer, (Cause.FULL, most))

    def _stand(self, shape: Shape) -> _Standing:
        rooms = self._in_one_place(self._rooms[shape])
        most = max(rooms.held.items(), key=lambda row: (row[1], row[0]), default=("", 0))[0]
        found = self._standing[shape] = _Standing(rooms, rooms.free, most)
        return found

    def _in_one_place(self, rooms: _Rooms) -> _Rooms:
        """Return the rows of the place with the most room, of a shape whose ranks stay in one place; else all rows."""
        shape = rooms.shape
        if self._fleet.places(shape) == (shape,):
            return rooms
        found = dict[tuple[str | None, ...], _Rooms]()
        for num, row in rooms.rows.items():
            labels = self._fleet.hosts[num].labels
            found.setdefault(tuple(map(labels.get, shape.same)), _Rooms(shape)).put(num, row)

        def room(each: _Rooms) -> tuple[bool, int, int]:
            return each.ever >= shape.together, each.free, each.free + each.closed

        best = max(found.values(), key=room, default=None)
        return rooms if best is None else best

    def _is_limited(self, tenant: Tenant, shape: Shape, held_up: dict[str, frozenset[int]]) -> bool:
        short = limits.short(self._state, tenant, shape)
        if short or limits.taken(self._state, tenant, shape):
            parts = limits.HOLDING_UP.intersection(short)
            if parts:
                held_up.setdefault(tenant.name, parts)
            return True
        needs = limits.needs(shape)
        return any(needs[part] for part in held_up.get(tenant.name, ()))

    def _kept(self, kind: Kind) -> tuple[frozenset[int], str]:
        """Return the workers that are kept for jobs of other groups, and the tenant of the first of these jobs."""
        state, found, keeper = self._state, set[int](), ""
        for num, workers in self._keeping():
            job = state.jobs.get(num)
            if job is not None and job.waits and self.kind_of(job) != kind:
                found.update(workers)
                keeper = keeper or job.tenant
        return frozenset(found), keeper

    def _keeping(self) -> list[tuple[int, tuple[int, ...]]]:
        held = self._state.reserved
        found = [] if held is None else [held[:2]]
        return [*found, *((num, job.preempts[0]) for num, job in self._state.preempting.items() if job.preempts)]

    def _right(self, kind: Kind, other: Job) -> str:
        """Return by what right a later job was before a group."""
        priority, _, name = kind
        tenant = self._state.tenants[other.tenant]
        if self.reader.priority_of(other) > priority:
            return Cause.PRIORITY
        if other.tenant == name:
            return Cause.OWN
        within = self._guaranteed(other.num)
        if within is None:  # as it is by now
            within = 0 < tenant.guaranteed >= tenant.gpus
        return Cause.GUARANTEE if within else Cause.SHARE


def _decides(worker: Worker) -> tuple[Any, ...]:
    """Return what of a worker decides who has room on it."""
    held = worker.attempts  # their keys have the fence
    return worker.session, worker.flag, worker.out, worker.n, *held, *[attempt.mask for attempt in held.values()]


def _avoided(shape: Shape, num: int) -> int:
    return next((mask for worker, mask in shape.avoid if worker == num), 0)
