"""Counts where waits went, from each record of the ledger. Pure: no I/O, no clock.

What waits is a replica, or a gang as a whole: from the acceptance to its start, and again after each attempt from which
it comes back. Each ms of it has one cause (`schemas.waited.Cause`), so the parts of a wait are the wait, to the ms.

Groups of jobs are judged, not jobs (see `causes`), at most once in `LOOK_MS` of ledger time: a wait that is over sooner
is `placing`. What waits for the same cause is on one `Clock`: it counts the ms of its causes, and a job notes what it
shows as it comes and goes. So a change of cause costs the same for one job and for 20,000.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.state import CLAIMED, PLACED, QUEUED, TIME, Job, State
from moorage.scheduler.core.lifecycle.max_running import most_of
from moorage.scheduler.follower.causes import Causes, Kind, Verdict
from moorage.scheduler.follower.since import trouble_of_by, trouble_of_since
from moorage.scheduler.follower.waited_table import OTHERS, WaitedTable, begin_of, week_of
from moorage.scheduler.ledger.evidence import Placements
from moorage.schemas.errors import Problem, problem
from moorage.schemas.waited import Cause, WaitedAnswer, WaitedPart, WaitedRow

#: groups are judged at most once in so much ledger time, and in idle times too, as times pass
LOOK_MS: Final = 1_000
LOOK_IDLE_MS: Final = 10_000
#: parts of one job that are told
PARTS_MAX: Final = 6
#: the most rows in one answer; more rows come in further pages
ROWS_MAX: Final = 4_000
SINCE_S_DEFAULT: Final = 7 * 86_400
BY: Final = ("tenant", "model", "week", "cause", "holder")
_NEXT: Final = "moorage usage --help"
_STARTING: Final = frozenset((PLACED, CLAIMED))

#: a cause and its holder
Why = tuple[str, str]


class Clock:
    """The ms that passed for each cause while something of one tenant, model and size waited here."""

    __slots__ = ("gpus", "model", "ms", "since_ms", "tenant", "units", "why", "whys")

    def __init__(self, tenant: str, model: str, gpus: int, why: Why, since_ms: int) -> None:
        self.tenant, self.model, self.gpus = tenant, model, gpus
        self.why = why
        self.since_ms = since_ms
        self.units = 0
        self.whys: list[Why] = []
        self.ms: list[int] = []

    def run(self, table: WaitedTable, until_ms: int, why: Why | None = None) -> None:
        """Count up to a time, for another cause if there is `why`."""
        passed, why = until_ms - self.since_ms, why or self.why
        if passed <= 0:
            return
        if why not in self.whys:
            self.whys.append(why)
            self.ms.append(0)
        self.ms[self.whys.index(why)] += passed
        table.spread((self.tenant, self.model, *why), self.since_ms, until_ms, self.units, self.gpus)
        self.since_ms = until_ms


class _Row:
    """A live job: where its units wait, with what the clocks showed as they came, and the parts so far."""

    __slots__ = ("asked", "job", "kind", "parts", "places")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.kind: Kind | None = None
        self.asked: tuple[Any, ...] = ()
        self.places: dict[Clock, tuple[int, tuple[int, ...]]] = {}
        self.parts: dict[Why, int] = {}


class _Group:
    """The jobs of a tenant, priority and shape that may be placed: those that were passed, and the others."""

    __slots__ = ("kind", "nums", "others", "passed", "verdict")

    def __init__(self, kind: Kind, passed: Clock, others: Clock) -> None:
        self.kind = kind
        self.nums: list[int] = []  # ascending
        self.verdict = Verdict(Cause.PLACING)
        self.passed = passed
        self.others = others

    def clock_of(self, num: int) -> Clock:
        return self.passed if num < self.verdict.passed_by else self.others


class _Part(NamedTuple):
    cause: str
    holder: str
    ms: int


class _SavedRow(msgspec.Struct, array_like=True):
    num: int
    parts: list[_Part]


class _Saved(msgspec.Struct, array_like=True):
    table: list[Any]
    before: list[Any]
    rows: list[_SavedRow]
    ended: list[_SavedRow]
    verdicts: list[tuple[int, Verdict]]  # by a job of each group
    looked_ms: int
    from_ms: int
    changed: bool


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Saved).decode


class Waits:
    """What has been counted up to the record at which `state` stands; `state` is folded by the caller."""

    placed: Placements | None = None  # folded beside this, if it is

    def __init__(self, state: State) -> None:
        self.table = WaitedTable()
        self.from_ms = state.time_ms  # when counting began; 0: with the ledger
        self._ended: dict[int, list[_Part]] = {}  # jobs that are over and in memory
        self._looked_ms = 0
        self._begin(state)
        for job in state.jobs.values():
            if not job.over:
                self._enter(job, state.time_ms)

    def _begin(self, state: State) -> None:
        self._state = state
        self._epoch, self._time_ms = state.epoch, state.time_ms
        self._causes = Causes(state, lambda num: self.placed.guaranteed(num) if self.placed is not None else None)
        self._rows: dict[int, _Row] = {}
        self._groups: dict[Kind, _Group] = {}
        self._steady: dict[tuple[str, str, int, str], Clock] = {}  # clocks of one cause each
        self._again: dict[int, None] = {}  # jobs of which time alone may change something
        self._changed = True

    def _enter(self, job: Job, known_ms: int) -> _Row:
        """Begin with a job; if it has waited before `known_ms`, what it waited is unknown."""
        row = self._rows[job.num] = _Row(job)
        if job.accepted_ms < known_ms and not job.started and not job.attempt_no and job.size == 1:
            row.parts[Cause.UNKNOWN, ""] = known_ms - job.accepted_ms
        self._place(row)
        return row

    # -------------------------------------------------------------------------------------------- folding

    def fold(self, folded: Folded, *, decides: bool = True) -> None:
        """Count what a record changed; to be called after each record. `decides`: it has steps, acts or new jobs."""
        state = self._state
        if state.epoch != self._epoch:  # nobody led since the last record
            for clock in self._clocks():
                clock.run(self.table, self._time_ms)
                clock.run(self.table, state.time_ms, (Cause.AWAY, ""))
            self._epoch = state.epoch
        self._time_ms = state.time_ms
        self._causes.fold(folded)
        for job in folded.accepted:
            self._rows.setdefault(job.num, _Row(job))
        for job in folded.jobs.values():
            row = self._rows.get(job.num)
            if row is not None:
                self._place(row)
        for job in folded.accepted:
            if job.num not in folded.jobs:
                self._place(self._rows[job.num])
        for job in folded.ended:
            self._over(job)
        for job in folded.compacted:
            self._ended.pop(job.num, None)
        self._changed |= decides
        since = state.time_ms - self._looked_ms
        if (since >= LOOK_MS and (self._changed or since >= LOOK_IDLE_MS)) or since < 0:
            self._look()

    def _over(self, job: Job) -> None:
        row = self._rows.pop(job.num, None)
        if row is None:
            return
        self._move(row, {})
        self._again.pop(job.num, None)
        _, shape, tenant = row.kind or self._causes.kind_of(job)
        for (cause, holder), ms in row.parts.items():
            if ms:
                week = week_of(self._state.time_ms)
                self.table.add((week, tenant, _model(shape), cause, holder), 0, 0, 1)
        if parts := _largest(row.parts):
            self._ended[job.num] = parts

    def _place(self, row: _Row) -> None:
        """Put what of a job waits onto the clocks of its causes."""
        job, now_ms = row.job, self._state.time_ms
        if not job.live:
            self._leave(row)
            self._move(row, {})
            return
        asked = (job.avoid, job.resizes, self._causes.renamed)
        if row.asked != asked:
            if row.asked:
                job.shape = None  # its shape depends on these
            row.asked = asked
        kind = self._causes.kind_of(job)
        if row.kind != kind:
            self._leave(row)
            row.kind = kind
        _, shape, _ = kind
        waits, starting, pausing = job.waits, 0, 0
        for replica in job.rows.values():
            if replica.state in _STARTING:
                starting += 1
            elif replica.state == QUEUED and replica.not_before > now_ms:
                pausing += 1
        if shape.is_gang:
            waits, starting, pausing = int(waits > 0), int(starting > 0 and not waits), int(pausing > 0)
        wanted: dict[Clock, int] = {}
        timed = pausing > 0
        if waits:
            if job.awaits:
                cause = Cause.AFTER if any(num != TIME for num, _ in job.awaits) else Cause.NOT_BEFORE
                wanted[self._of(row, cause)] = waits
                waits = 0
            elif job.hold is not None:
                wanted[self._of(row, Cause.HELD)] = waits
                waits = 0
            elif not shape.is_gang and (job.size > 1 or shape.answers_calls or job.scaled is not None):
                most = most_of(job, self._causes.reader.request_of(job))
                if most is not None:
                    own = max(0, waits - max(0, most - job.on_workers))
                    timed = True
                    if own:
                        wanted[self._of(row, Cause.MAX_RUNNING)] = own
                        waits -= own
            pausing = min(pausing, waits)
            if pausing:
                wanted[self._of(row, Cause.BACKOFF)] = pausing
                waits -= pausing
        if starting:
            wanted[self._of(row, Cause.STARTING)] = starting
        if waits:
            wanted[self._join(row, kind)] = waits
        else:
            self._leave(row)
        if timed:
            self._again[job.num] = None
        else:
            self._again.pop(job.num, None)
        self._move(row, wanted)

    def _of(self, row: _Row, cause: str) -> Clock:
        """Return the clock of a cause that is not judged."""
        assert row.kind is not None
        _, shape, tenant = row.kind
        key = (tenant, _model(shape), shape.gpus, cause)
        clock = self._steady.get(key)
        if clock is None:
            clock = self._steady[key] = Clock(*key[:3], (cause, ""), self._state.time_ms)
        return clock

    def _join(self, row: _Row, kind: Kind) -> Clock:
        group = self._groups.get(kind)
        if group is None:
            _, shape, tenant = kind
            name = tenant, _model(shape), shape.gpus, (str(Cause.PLACING), ""), self._state.time_ms
            group = self._groups[kind] = _Group(kind, Clock(*name), Clock(*name))
        num, nums = row.job.num, group.nums
        at = bisect_left(nums, num)
        if at == len(nums) or nums[at] != num:
            nums.insert(at, num)
            self._changed = True
        return group.clock_of(num)

    def _leave(self, row: _Row) -> None:
        """Take a job out of its group."""
        group = self._groups.get(row.kind) if row.kind is not None else None
        if group is None:
            return
        at = bisect_left(group.nums, row.job.num)
        if at < len(group.nums) and group.nums[at] == row.job.num:
            del group.nums[at]

    def _move(self, row: _Row, wanted: dict[Clock, int]) -> None:
        """Let a job have these units on these clocks, and none on others."""
        now_ms, places = self._state.time_ms, row.places
        for clock, (units, noted) in list(places.items()):
            if wanted.get(clock) == units:
                continue
            clock.run(self.table, now_ms)
            _add(row.parts, clock, units, noted)
            clock.units -= units
            del places[clock]
        for clock, units in wanted.items():
            if clock not in places:
                clock.run(self.table, now_ms)
                clock.units += units
                places[clock] = units, tuple(clock.ms)

    def _clocks(self) -> Iterator[Clock]:
        yield from self._steady.values()
        for group in self._groups.values():
            yield group.passed
            yield group.others

    # -------------------------------------------------------------------------------------------- looking

    def _look(self) -> None:
        """Judge all groups anew."""
        now_ms = self._looked_ms = self._state.time_ms
        self._changed = False
        renamed = self._causes.renamed
        for num in list(self._again):
            if (row := self._rows.get(num)) is not None:
                self._place(row)
        for kind in [kind for kind, group in self._groups.items() if not group.nums]:
            del self._groups[kind]
        for key in [key for key, clock in self._steady.items() if not clock.units]:
            del self._steady[key]
        self._causes.look(self._groups)
        if self._causes.renamed != renamed:  # shapes of tenants that rules name are others now
            for row in list(self._rows.values()):
                self._place(row)
            self._causes.look(self._groups)
        held_up: dict[str, frozenset[int]] = {}
        for group in sorted(self._groups.values(), key=_turn):
            if group.nums:
                self._turn_to(group, self._causes.judge(group.kind, held_up, group.others.why[0]), now_ms)

    def _turn_to(self, group: _Group, verdict: Verdict, now_ms: int) -> None:
        """Let a group wait for another cause: jobs between the old and the new bound of those passed change sides."""
        old, group.verdict = group.verdict, verdict
        for clock, why in (
            (group.passed, verdict[:2]),
            (group.others, verdict.else_ if verdict.passed_by else verdict[:2]),
        ):
            if clock.why != why:
                clock.run(self.table, now_ms)
                clock.why = (str(why[0]), why[1])
        first, last = sorted((old.passed_by, verdict.passed_by))
        for num in group.nums[bisect_left(group.nums, first) : bisect_left(group.nums, last)]:
            row = self._rows[num]
            was, now = (
                (group.passed, group.others) if old.passed_by > verdict.passed_by else (group.others, group.passed)
            )
            if was in row.places:
                rest = {clock: units for clock, (units, _) in row.places.items() if clock is not was}
                self._move(row, {**rest, now: row.places[was][0]})

    # ----------------------------------------------------------------------------------------------- gaps

    def bridge(self, state: State, until_ms: int) -> None:
        """Go on from a later state, as the records before it are gone: nothing of that time is counted.

        A job that waited before the gap and is known behind it keeps its parts; the gap is unknown.
        """
        before = self._rows
        for row in before.values():
            self._move(row, {})
        ended, table, from_ms, was_ms = self._ended, self.table, self.from_ms, self._state.time_ms
        self._begin(state)
        self.table, self.from_ms = table, from_ms
        self._ended = {num: parts for num, parts in ended.items() if num in state.jobs}
        self._looked_ms = 0
        for job in state.jobs.values():
            if job.over:
                continue
            known = before.get(job.num)
            if known is None or known.job.name != job.name or known.job.ledger != job.ledger:
                self._enter(job, until_ms)
                continue
            row = self._rows[job.num] = _Row(job)
            row.parts = known.parts
            if job.waits and until_ms > was_ms:
                units = 1 if self._causes.kind_of(job)[1].is_gang else job.waits
                row.parts[Cause.UNKNOWN, ""] = row.parts.get((Cause.UNKNOWN, ""), 0) + units * (until_ms - was_ms)
            self._place(row)
        for clock in self._clocks():
            clock.since_ms = max(clock.since_ms, until_ms)

    # ----------------------------------------------------------------------------------------------- saves

    def dump(self) -> bytes:
        """Return all that is counted, as msgpack; `load` needs the state of the same record with it."""
        for clock in self._clocks():
            clock.run(self.table, self._state.time_ms)
        rows = [_SavedRow(num, parts) for num, row in self._rows.items() if (parts := _parts(self._so_far(row)))]
        ended = [_SavedRow(num, parts) for num, parts in self._ended.items()]
        verdicts = [(group.nums[0], group.verdict) for group in self._groups.values() if group.nums]
        return _encode(
            _Saved(
                self.table.dump(), list(self.table.before.items()), rows, ended, verdicts, self._looked_ms,
                self.from_ms, self._changed,
            )
        )  # fmt: skip

    @classmethod
    def load(cls, saved: bytes, state: State) -> Waits:
        """Return what was counted up to the record at which `state` stands; of a save without waits, from there on.

        Raises ValueError, LookupError, TypeError or msgspec's errors for bytes that are no such save.
        """
        if not saved:
            return cls(state)
        found, waits = _decode(saved), cls.__new__(cls)
        waits.table = WaitedTable.load((tuple(key), tuple(sums)) for key, sums in found.table)
        waits.table.before = {tuple(key): list(sums) for key, sums in found.before}
        waits.from_ms, waits._looked_ms = found.from_ms, found.looked_ms
        waits._ended = {row.num: row.parts for row in found.ended if row.num in state.jobs}
        waits._begin(state)
        of_jobs = {row.num: row.parts for row in found.rows}
        for job in state.jobs.values():
            if not job.over:
                row = waits._rows[job.num] = _Row(job)
                row.parts = {(part.cause, part.holder): part.ms for part in of_jobs.get(job.num, ())}
                waits._place(row)
        for num, verdict in found.verdicts:
            group = waits._groups.get(waits._causes.kind_of(state.jobs[num]))
            if group is not None:
                waits._turn_to(group, verdict, state.time_ms)
        waits._changed = found.changed
        return waits

    # ------------------------------------------------------------------------------------------- questions

    def _so_far(self, row: _Row) -> dict[Why, int]:
        """Return a live job's parts up to now."""
        parts, now_ms = dict(row.parts), self._state.time_ms
        for clock, (units, noted) in row.places.items():
            _add(parts, clock, units, noted)
            if now_ms > clock.since_ms:
                parts[clock.why] = parts.get(clock.why, 0) + units * (now_ms - clock.since_ms)
        return parts

    def parts_of(self, job: Job) -> list[_Part]:
        """Return the parts of a job in memory as cause, holder and ms, the largest first."""
        row = self._rows.get(job.num)
        return self._ended.get(job.num, []) if row is None else _largest(self._so_far(row))

    def waited(self, job: Job) -> list[WaitedPart]:
        """Return the parts of a job in memory as its tenant may know them."""
        return _as_told(job.tenant, self.parts_of(job))

    def totals(self) -> list[WaitedRow]:
        """Return all that was ever counted, by tenant, model and cause, up to now."""
        found = {key: list(sums) for key, sums in self.table.before.items()}
        for (_, tenant, model, cause, _), sums in self._rows_from(0):
            into = found.setdefault((tenant, model, cause), [0, 0, 0])
            for column, value in enumerate(sums):
                into[column] += value
        by = ["tenant", "model", "cause"]
        return [_told_row(by, (*key, "", -1), sums) for key, sums in sorted(found.items())]

    def waiting(self) -> Iterator[tuple[str, str, int]]:
        """Yield tenant, cause and number of what waits now."""
        for clock in self._clocks():
            if clock.units:
                yield clock.tenant, clock.why[0], clock.units

    def _rows_from(self, week: int) -> Iterator[tuple[Any, tuple[int, int, int]]]:
        """Yield the sums from a week on, and what waits now."""
        now_ms = self._state.time_ms
        yield from self.table.rows(week)
        now = WaitedTable()
        for clock in self._clocks():
            if clock.units:
                key = clock.tenant, clock.model, *clock.why
                now.spread(key, clock.since_ms, now_ms, clock.units, clock.gpus)
        yield from now.rows(week)

    def answer(
        self,
        tenant: str | None,
        arguments: dict[str, Any],
        gaps: Iterable[tuple[int, int]] = (),
        placed: Placements | None = None,
    ) -> dict[str, Any] | Problem:
        """Return where the waits of one tenant went, or of all, over whole weeks, including what waits now.

        `since_s` (7 days without it), `by` (without it cause) and `after` are as in `Usage.answer`; with `job` the
        answer has its parts, none if it is not in memory, and on what evidence it was placed last.
        """
        name = arguments.get("job")
        now_ms = self._state.time_ms
        if name is not None:
            job = self._state.job(tenant or "", name) if isinstance(name, str) else None
            found = WaitedAnswer(parts=[] if job is None else self.waited(job), until_ms=now_ms, from_ms=self.from_ms)
            found.placed = placed.of(job) if placed is not None else None
            return _plain(found)
        if arguments.get("ever"):
            ever = WaitedAnswer(rows=self.totals() if tenant is None else [], until_ms=now_ms, from_ms=self.from_ms)
            return _plain(ever)
        since_s, by, after = (arguments.get(word) for word in ("since_s", "by", "after"))
        since_s = SINCE_S_DEFAULT if since_s is None else since_s
        by = ["cause"] if by is None else by
        if trouble := trouble_of_since(since_s, _NEXT):
            return trouble
        if trouble := trouble_of_by(by, BY, _NEXT):
            return trouble
        if after is not None and not (isinstance(after, list) and [type(each) for each in after] == [str] * 4 + [int]):
            said = "after must be the `next` of the previous page"
            return problem("invalid-argument", said, field="$.after", found=str(after)[:80], next=_NEXT)
        week = week_of(max(0, now_ms - int(since_s * 1000)))
        sums = self._summed(tenant, week, by)
        keys = sorted(key for key in sums if after is None or key > tuple(after))
        answer = WaitedAnswer(
            rows=[_told_row(by, key, sums[key]) for key in keys[:ROWS_MAX]],
            from_ms=max(begin_of(week), self.from_ms),
            until_ms=now_ms,
            gaps=[list(gap) for gap in gaps if gap[1] >= begin_of(week)],
            next=list(keys[ROWS_MAX - 1]) if len(keys) > ROWS_MAX else [],
        )
        return _plain(answer)

    def _summed(self, tenant: str | None, week: int, by: list[str]) -> dict[tuple[str, str, str, str, int], list[int]]:
        """Return the sums grouped by the words of `by`; other parts of the key are "" or -1. A tenant asks for none of
        the names of others."""
        found: dict[tuple[str, str, str, str, int], list[int]] = {}
        for (of_week, name, model, cause, holder), sums in self._rows_from(week):
            if tenant is not None and name != tenant:
                continue
            if tenant is not None and holder not in ("", tenant):
                holder = OTHERS
            key = (
                name if "tenant" in by else "",
                model if "model" in by else "",
                cause if "cause" in by else "",
                holder if "holder" in by else "",
                of_week if "week" in by else -1,
            )
            into = found.setdefault(key, [0, 0, 0])
            for column, value in enumerate(sums):
                into[column] += value
        return found


def _plain(answer: WaitedAnswer) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(answer)
    return plain


def _turn(group: _Group) -> tuple[int, int]:
    """Return a key by which groups would start: their priority, then their first job."""
    return -group.kind[0], group.nums[0] if group.nums else 0


def _add(parts: dict[Why, int], clock: Clock, units: int, noted: tuple[int, ...]) -> None:
    """Add what passed on a clock since it showed `noted`."""
    for at, (why, ms) in enumerate(zip(clock.whys, clock.ms, strict=True)):
        passed = ms - (noted[at] if at < len(noted) else 0)
        if passed:
            parts[why] = parts.get(why, 0) + units * passed


def _model(shape: Any) -> str:
    return "|".join(shape.models) or ("any" if shape.count else "none")


def _parts(parts: dict[Why, int]) -> list[_Part]:
    return [_Part(str(cause), holder, ms) for (cause, holder), ms in parts.items() if ms]


def _largest(parts: dict[Why, int]) -> list[_Part]:
    """Return the largest parts, and the sum of the others as the last one of `PARTS_MAX`."""
    found = sorted(_parts(parts), key=lambda part: (-part.ms, part.cause, part.holder))
    if len(found) > PARTS_MAX:
        rest = _Part(Cause.REST, "", sum(part.ms for part in found[PARTS_MAX - 1 :]))
        return [*found[: PARTS_MAX - 1], rest]
    return found


def _as_told(tenant: str, parts: Iterable[_Part]) -> list[WaitedPart]:
    sums: dict[tuple[str, bool | None], int] = {}
    for part in parts:
        key = part.cause, part.holder == tenant if part.holder else None
        sums[key] = sums.get(key, 0) + part.ms
    return [WaitedPart(cause=cause, own=own, ms=ms) for (cause, own), ms in sums.items()]


def _told_row(by: list[str], key: tuple[str, str, str, str, int], sums: list[int]) -> WaitedRow:
    return WaitedRow(
        tenant=key[0] if "tenant" in by else None,
        model=key[1] if "model" in by else None,
        cause=key[2] if "cause" in by else None,
        holder=key[3] if "holder" in by else None,
        week_ms=begin_of(key[4]) if "week" in by else None,
        wait_s=sums[0] / 1000,
        gpu_s=sums[1] / 1000,
        jobs=sums[2],
    )
