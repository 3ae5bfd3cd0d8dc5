"""Counts GPU time and memory by tenant, person, model and hour, from each record of the ledger. Pure: no I/O, no clock.

A job counts in the table once it is over; until then it is counted by itself, so that what its workers measured can be
spread over all of its attempts. Records that nobody counted are a gap, which each answer about its time tells.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from moorage.scheduler.core.ledger.folding import Folded
from moorage.scheduler.core.ledger.records import SEQUENCES_AHEAD
from moorage.scheduler.core.ledger.state import PLACED, REPLICA, Job, State, Transition
from moorage.scheduler.core.operate.orders import limit_of
from moorage.scheduler.follower.granted import HOUR_MS, SUMS, Counting, Granted, in_seconds
from moorage.scheduler.follower.since import trouble_of_by, trouble_of_since
from moorage.scheduler.follower.usage_table import UsageTable
from moorage.schemas.answers.operators import UsageAnswer, UsageRow
from moorage.schemas.errors import Problem, problem
from moorage.schemas.job import Request
from moorage.schemas.request_cache import RequestCache
from moorage.schemas.signed import person_in

#: the most rows in one answer; more rows come in further pages
ROWS_MAX: Final = 4_000
SINCE_S_DEFAULT: Final = 7 * 86_400
BY: Final = ("tenant", "person", "model", "hour")
#: gaps that are remembered; beyond it the two oldest count as one
GAPS_MAX: Final = 16
_NEXT: Final = "moorage usage --help"
#: what a row of an answer is of: tenant, person, model, hour since the epoch
_Sum = tuple[str, str, str, int]


class Gap(NamedTuple):
    """Records that were purged before they were counted: the sequences and the ledger ms behind which, and up to which,
    they are missing."""

    after_seq: int
    through_seq: int
    from_ms: int
    until_ms: int

    @property
    def records(self) -> int:
        return self.through_seq - self.after_seq

    @property
    def is_restore(self) -> bool:
        """Whether a restore made it: the restored ledger begins so far ahead, and no ledger has room for as many."""
        return self.records >= SEQUENCES_AHEAD


class _Live(msgspec.Struct, array_like=True):
    """A job that is not over, in a save."""

    num: int
    held: list[Any]
    sums: list[tuple[str, int, int, int]]
    used: tuple[int, int]


class _Saved(msgspec.Struct, array_like=True):
    table: list[tuple[str, str, bytes, bytes]]
    live: list[_Live]
    gaps: list[Gap]


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Saved).decode


class Usage:
    """What has been counted up to the record at which `state` stands; `state` is folded by the caller."""

    def __init__(self, state: State) -> None:
        self.table = UsageTable()
        self.gaps: list[Gap] = []
        self._requests = RequestCache()
        self._live: dict[int, Granted] = {}
        self._follow(state)

    def _follow(self, state: State) -> None:
        self._state = state
        self._counting = Counting(state, self._request_of)
        for job in state.jobs.values():
            job.told = job.rev  # its transitions so far are counted, or in a gap

    def _request_of(self, job: Job) -> Request:
        return self._requests.read_accepted(job.body)[1].request

    # -------------------------------------------------------------------------------------------- counting

    def fold(self, folded: Folded) -> None:
        """Count what a record changed; to be called after each record."""
        live = self._live
        for job in folded.jobs.values():
            new = job.rev - max(job.told, 1)  # revision 1 is ACCEPTED, which is no row
            job.told = job.rev
            if new <= 0:
                continue
            granted = live.get(job.num)
            if granted is None:
                granted = live[job.num] = Granted()
            self._counting.add(granted, job, job.history[-new:])
        for job in folded.ended:
            self._over(job)

    def _over(self, job: Job) -> None:
        granted = self._live.pop(job.num, None)
        if granted is not None:
            for (model, hour), sums in self._counting.until(granted, job, self._state.time_ms).items():
                self.table.add(whose(job), model, hour, sums)

    def bridge(self, state: State) -> Gap:
        """Go on from a later state, as the records before it are gone; return the gap, which nobody counted.

        What attempts held before the gap counts up to its beginning, what they hold behind it from its end on. A
        restore may go back in time: then both are the moment up to which the replaced ledger was counted.
        """
        before, until_ms = self._state, max(self._state.time_ms, state.time_ms)
        for num in list(self._live):
            self._over(before.jobs[num])
        gap = Gap(before.seq, state.seq, before.time_ms, until_ms)
        self.gaps.append(gap)
        if len(self.gaps) > GAPS_MAX:
            first, second = self.gaps[:2]
            self.gaps[:2] = [Gap(first.after_seq, second.through_seq, first.from_ms, second.until_ms)]
        self._follow(state)
        for job in state.jobs.values():
            for replica in job.rows.values():
                attempt = replica.attempt
                if attempt is not None:
                    row: Transition = (
                        job.rev, until_ms, replica.index, attempt.no, PLACED, attempt.worker.num,
                        attempt.mask, 0, "", attempt.fence, "",
                    )  # fmt: skip
                    self._live.setdefault(job.num, Granted(job.used)).held[replica.index] = row
        return gap

    # ----------------------------------------------------------------------------------------------- saves

    def dump(self) -> bytes:
        """Return all that is counted, as msgpack; `load` needs the state of the same record with it."""
        live = [
            _Live(num, list(each.held.values()), [(*where, a, b) for where, (a, b) in each.sums.items()], each.used)
            for num, each in self._live.items()
        ]
        return _encode(_Saved(self.table.dump(), live, self.gaps))

    @classmethod
    def load(cls, saved: bytes, state: State) -> Usage:
        """Return what was counted up to the record at which `state` stands.

        Raises ValueError, LookupError, TypeError or msgspec's errors for bytes that are no such save.
        """
        found, usage = _decode(saved), cls(state)
        usage.table, usage.gaps = UsageTable.load(found.table), found.gaps
        for each in found.live:
            state.jobs[each.num]  # raises KeyError
            granted = usage._live[each.num] = Granted(each.used)
            granted.held = {row[REPLICA]: row for row in each.held}
            granted.sums = {(model, hour): [milli_ms, mib_ms] for model, hour, milli_ms, mib_ms in each.sums}
        return usage

    # ------------------------------------------------------------------------------------------- questions

    def answer(self, tenant: str | None, arguments: dict[str, Any]) -> dict[str, Any] | Problem:
        """Return the usage of one tenant, or of all, over whole hours, including jobs that are not over.

        The first hour is that of `since_s` seconds ago (7 days without it); `by` lists what to group by (without it
        tenant and model); `after` is the `next` of the page before. `gaps` has the times, in ledger ms, of which
        nothing was counted; it is missing if there are none. `restores` has those of them that are restores. Without a
        `tenant` it is of all tenants.
        """
        for word in ("job", "ever", "worker"):
            if arguments.get(word) is not None:
                return problem(
                    "invalid-argument", f"{word} is for questions about waits or series", field=f"$.{word}",
                    found=arguments[word], next="add waits: true, or series: true",
                )  # fmt: skip
        since_s, by, after = (arguments.get(name) for name in ("since_s", "by", "after"))
        since_s = SINCE_S_DEFAULT if since_s is None else since_s
        by = ["tenant", "model"] if by is None else by
        if trouble := trouble_of_since(since_s, _NEXT):
            return trouble
        if trouble := trouble_of_by(by, BY, _NEXT):
            return trouble
        if after is not None and not _is_key(after):
            said = "after must be the `next` of the previous page"
            return problem("invalid-argument", said, field="$.after", found=str(after)[:80], next=_NEXT)
        now_ms = self._state.time_ms
        from_hour = max(0, now_ms - int(since_s * 1000)) // HOUR_MS
        last = None if after is None else tuple(after)
        summed = self._summed(tenant, from_hour, by)
        found = sorted(key for key in summed if last is None or key > last)
        told = [gap for gap in self.gaps if gap.until_ms >= from_hour * HOUR_MS]
        gaps = [[gap.from_ms, gap.until_ms] for gap in told]
        restores = [[gap.from_ms, gap.until_ms] for gap in told if gap.is_restore]
        answer = UsageAnswer(
            rows=[_row(by, key, summed[key]) for key in found[:ROWS_MAX]],
            from_ms=from_hour * HOUR_MS,
            until_ms=now_ms,
            gaps=gaps,
            restores=restores,
            limit=None if tenant is None else limit_of(self._state, self._state.read_tenant(tenant)),
            next=list(found[ROWS_MAX - 1]) if len(found) > ROWS_MAX else [],
        )
        plain: dict[str, Any] = msgspec.to_builtins(answer)
        return plain

    def _summed(self, tenant: str | None, from_hour: int, by: list[str]) -> dict[_Sum, list[int]]:
        """Return the sums grouped by the words of `by`; other parts of the key are "" or -1."""
        by_tenant, by_person, by_model, by_hour = (word in by for word in BY)
        found: dict[_Sum, list[int]] = {}

        def add(name: str, model: str, hour: int, sums: Any) -> None:
            name, _, person = name.partition("/")
            which = name if by_tenant else "", person if by_person else ""
            key = (*which, model if by_model else "", hour if by_hour else -1)
            into = found.get(key)
            if into is None:
                into = found[key] = [0] * SUMS
            for column, value in enumerate(sums):
                into[column] += value

        for (name, model, hour), sums in self.table.rows(from_hour, tenant):
            add(name, model, hour, sums)
        state = self._state
        for num, granted in self._live.items():
            job = state.jobs[num]
            if tenant is None or job.tenant == tenant:
                for (model, hour), of_job in self._counting.until(granted, job, state.time_ms).items():
                    if hour >= from_hour:
                        add(whose(job), model, hour, of_job)
        return found


def _is_key(after: Any) -> bool:
    kinds = (str, str, str, int)
    return isinstance(after, list) and len(after) == len(kinds) and all(map(isinstance, after, kinds))


def whose(job: Job) -> str:
    """Return whose job it is in the table: its tenant, and the person who submitted it, if that is known."""
    person = person_in(job.body)
    return f"{job.tenant}/{person}" if person else job.tenant


def _row(by: list[str], key: _Sum, sums: list[int]) -> UsageRow:
    return UsageRow(
        tenant=key[0] if "tenant" in by else None,
        person=key[1] if "person" in by else None,
        model=key[2] if "model" in by else None,
        hour_ms=key[3] * HOUR_MS if "hour" in by else None,
        **in_seconds(sums),
    )
