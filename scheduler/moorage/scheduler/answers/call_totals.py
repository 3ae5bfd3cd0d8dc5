"""Adds up what members of services count of their calls, for monitors and screens: by service, in one leader's term.

Soft state: the totals begin at zero in each term, like counters in Prometheus. A member counts from its own start, so
the first frame that this leader hears of an attempt is only where it begins. What follows is added as differences; a
lower value is a new start from zero, and so is another member of the same attempt. Frames come from tenants' programs,
so all that is kept of them is bounded.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from moorage.scheduler.answers.waited import OTHERS
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.core.lifecycle.scaling import SILENT_MS, member_of
from moorage.schemas.answers.jobs import ServiceUse
from moorage.schemas.answers.operators import ServiceCalls
from moorage.schemas.frames import ServiceLately
from moorage.schemas.names import JOB_CHARS_MAX
from moorage.schemas.service import (
    BATCH_SIZES,
    CALL_CODES_MAX,
    CALL_MS,
    MEMBERS_MAX,
    OTHER_CODES,
    CallCounts,
    MemberLoad,
)

#: services with totals of their own, the first ones of the term; the others share one row
SERVICES_MAX: Final = 200
#: and of one tenant
SERVICES_OF_TENANT_MAX: Final = 50
#: an attempt that was not heard for so long is forgotten. If it is heard again, that frame is where it begins
FORGET_MS: Final = 600_000
#: a larger number is none that a member can have counted, also of milliseconds of thousands of calls at the same time:
#: its frame is ignored
FIGURE_MAX: Final = 2**53
#: the same of calls that are there now, and of places for them
NOW_MAX: Final = 1_000_000
#: characters of a member's id, and of its job's: a longer one is none
NAME_CHARS_MAX: Final = JOB_CHARS_MAX
#: larger totals are sent as this one: what follows them may be read as a float
TOTAL_MAX: Final = 2**53
#: about what is called lately, and the steps in which it moves on
LATELY_MS: Final = 60_000
STEP_MS: Final = 10_000
#: the part of all calls that waited or ran no longer than is said of them
_MOST: Final = 0.9
_PARTS: Final = (0.5, 0.95)
#: characters of a member's last error
ERROR_CHARS_MAX: Final = 200
#: takes the place of a frame's own, which may fill all of its bytes, and take ten times as many in memory
_NO_COUNTS: Final = CallCounts()
#: tenant, service, and the attempt's own names or the id of a member that is none
_Attempt = tuple[str, str, Hashable]
_CODE: Final = re.compile(r"[0-9]{1,6}")

# what is counted, as one row of numbers: totals, then the classes of times and sizes
_ENDED, _REFUSED, _EXPIRED, _WAITED_MS, _RAN_MS, _BATCHED, _CLASSES = range(7)
_WAITED: Final = slice(_CLASSES, _CLASSES + len(CALL_MS) + 1)
_RAN: Final = slice(_WAITED.stop, _WAITED.stop + len(CALL_MS) + 1)
_BATCHES: Final = slice(_RAN.stop, _RAN.stop + len(BATCH_SIZES) + 1)
_NUMBERS: Final = _BATCHES.stop


class _Figures(NamedTuple):
    """What a member has counted, or a service: the numbers above, and answers with an error by code."""

    numbers: tuple[int, ...] = (0,) * _NUMBERS
    errors: Mapping[str, int] = {}

    @property
    def calls(self) -> int:
        """Calls that are over, however they ended."""
        return sum(self.numbers[_ENDED : _EXPIRED + 1])


class _Member(NamedTuple):
    """What a member said last, and when."""

    load: MemberLoad  # without its counts
    figures: _Figures
    at_ms: int


class _Mark(NamedTuple):
    """The totals of a moment."""

    at_ms: int
    figures: _Figures


class _Service:
    """The totals of one service, and its members, the one that was heard last at the end."""

    def __init__(self) -> None:
        self.total = _Figures()
        self.woken = 0
        self.heard_ms: int | None = None  # None before the first frame
        self._members: dict[tuple[_Attempt, str], _Member] = {}  # by attempt and member
        self._attempts = Counter[_Attempt]()  # how many members each has
        self._marks: deque[_Mark] = deque()

    def add_frame(self, attempt: _Attempt, load: MemberLoad, figures: _Figures, now_ms: int) -> None:
        self.heard_ms = now_ms
        key = (attempt, load.member)
        last = self._members.pop(key, None)
        begins = last is None and attempt not in self._attempts
        told = load.last_error[:ERROR_CHARS_MAX]
        self._members[key] = _Member(msgspec.structs.replace(load, counts=_NO_COUNTS, last_error=told), figures, now_ms)
        self._attempts[attempt] += last is None
        while len(self._members) > MEMBERS_MAX or self._first.at_ms < now_ms - FORGET_MS:
            self._forget(next(iter(self._members)))
        if not self._marks or now_ms - self._marks[-1].at_ms >= STEP_MS:
            self._marks.append(_Mark(now_ms, self.total))
            self._forget_marks(now_ms)
        if last is not None and not _is_lower(figures, last.figures):
            self.add(_difference(figures, last.figures))
        elif not begins:
            self.add(figures)

    def _forget(self, key: tuple[_Attempt, str]) -> None:
        del self._members[key]
        self._attempts[key[0]] -= 1
        if not self._attempts[key[0]]:
            del self._attempts[key[0]]

    def add(self, more: _Figures) -> None:
        self.total = _sum(self.total, more)

    def row(self, tenant: str, service: str, state: State | None, now_ms: int) -> ServiceCalls:
        """Return the totals."""
        numbers = [min(number, TOTAL_MAX) for number in self.total.numbers]
        return ServiceCalls(
            tenant=tenant,
            service=service,
            members=self.lately(tenant, service, state, now_ms).members,
            calls=sum(numbers[_ENDED : _EXPIRED + 1]),
            refused=numbers[_REFUSED],
            expired=numbers[_EXPIRED],
            woken=self.woken,
            errors={code: min(number, TOTAL_MAX) for code, number in self.total.errors.items()},
            waited=numbers[_WAITED],
            waited_ms=numbers[_WAITED_MS],
            ran=numbers[_RAN],
            ran_ms=numbers[_RAN_MS],
            batches=numbers[_BATCHES],
            batched=numbers[_BATCHED],
        )

    def lately(self, tenant: str, service: str, state: State | None, now_ms: int) -> ServiceLately:
        """Return who answers now, and what became of the calls of about the last minute.

        A member that was killed says no last word: those whose attempts have ended by this state do not answer.
        """
        self._forget_marks(now_ms)
        since = _difference(self.total, self._marks[0].figures) if self._marks else _Figures()
        current = [
            each.load
            for ((of, _, _), _), each in self._members.items()
            if now_ms - each.at_ms < SILENT_MS
            and (state is None or not each.load.job or member_of(state, of, each.load) is not None)
        ]
        taking = [each for each in current if not each.draining]
        return ServiceLately(
            tenant,
            service,
            members=len(taking),
            places=sum(each.places for each in taking),
            running=sum(each.running for each in current),
            waiting=sum(each.waiting for each in current),
            calls=since.calls,
            errors=sum(number for code, number in since.errors.items() if _is_of_service(code)),
            waited_ms=_most(since.numbers[_WAITED]),
            ran_ms=_most(since.numbers[_RAN]),
            job=next((each.job for each in reversed(current)), ""),
        )

    def use(self, tenant: str, service: str, state: State | None, now_ms: int) -> ServiceUse:
        """Return the same for who has the service, with its errors by code and the newest one."""
        now = self.lately(tenant, service, state, now_ms)
        since = _difference(self.total, self._marks[0].figures) if self._marks else _Figures()
        told = (each.load.last_error for each in reversed(self._members.values()) if each.load.last_error)
        return ServiceUse(
            members=now.members,
            places=now.places,
            running=now.running,
            waiting=now.waiting,
            calls=now.calls,
            errors=dict(since.errors),
            waited_ms=[_most(since.numbers[_WAITED], part) for part in _PARTS],
            ran_ms=[_most(since.numbers[_RAN], part) for part in _PARTS],
            last_error=next(told, ""),
        )

    def over_time(self, tenant: str, service: str, state: State | None, now_ms: int) -> tuple[float | None, ...]:
        """Return what `CallTotals.over_time` explains."""
        now = self.lately(tenant, service, state, now_ms)
        since = _difference(self.total, self._marks[0].figures) if self._marks else _Figures()
        per_s = 1000 / max(STEP_MS, now_ms - self._marks[0].at_ms) if self._marks else 0.0
        batches = sum(since.numbers[_BATCHES])
        ran, waited = since.numbers[_RAN], since.numbers[_WAITED]
        return (
            round(now.calls * per_s, 3),
            round(now.errors * per_s, 3),
            float(now.members),
            float(now.running),
            *(
                float(CALL_MS[-1] if ms is None else ms) if now.calls else None
                for ms in (_most(ran, _PARTS[0]), _most(ran, _PARTS[1]), _most(waited, _PARTS[1]))
            ),
            round(since.numbers[_BATCHED] / batches, 2) if batches else None,
        )

    @property
    def _first(self) -> _Member:
        return next(iter(self._members.values()))

    def _forget_marks(self, now_ms: int) -> None:
        while self._marks and now_ms - self._marks[0].at_ms > LATELY_MS:
            self._marks.popleft()


class CallTotals:
    """What became of the calls of a term, by tenant and service. Times are monotonic milliseconds.

    By `state`, members whose attempts have ended are not counted; None counts all that were heard lately.
    """

    def __init__(self, state: State | None = None) -> None:
        self._state = state
        self._services: dict[tuple[str, str], _Service] = {}
        self._others = _Service()
        self._of_tenant = Counter[str]()  # how many services each has
        self._full_until_ms = 0  # until then, none of the services has been silent for long

    def add_load(self, tenant: str, service: str, load: MemberLoad, now_ms: int) -> None:
        """Add what a member has counted since its last frame; a frame that cannot be true is ignored."""
        figures = _figures_of(load)
        if figures is not None:
            attempt = (load.job, load.replica, load.attempt, load.fence) if load.job else load.member
            self._of(tenant, service, now_ms).add_frame((tenant, service, attempt), load, figures, now_ms)

    def woken(self, tenant: str, service: str, now_ms: int) -> None:
        """Count that a caller had the first member of a service started."""
        self._of(tenant, service, now_ms).woken += 1

    def rows(self, now_ms: int) -> list[ServiceCalls]:
        """Return the totals of each service, by tenant and name."""
        return [each.row(tenant, service, self._state, now_ms) for tenant, service, each in self._each()]

    def use(self, tenant: str, service: str, now_ms: int) -> ServiceUse | None:
        """Return what is known of a service now; None if no member was heard, or it is among the others."""
        found = self._services.get((tenant, service))
        return None if found is None else found.use(tenant, service, self._state, now_ms)

    def lately(self, now_ms: int) -> list[ServiceLately]:
        """Return the services that have members or had calls in about the last minute: those with errors first, then
        those with most calls."""
        rows = [each.lately(tenant, service, self._state, now_ms) for tenant, service, each in self._each()]
        current = [row for row in rows if row.members or row.calls]
        return sorted(current, key=lambda row: (-row.errors, -row.calls, row.tenant, row.service))

    def over_time(self, now_ms: int) -> list[tuple[str, str, tuple[float | None, ...]]]:
        """Return of each service that has members or calls, of about the last minute: calls and errors a second,
        members, calls that run, ms that half of the calls and 95 % of them ran at most, ms that 95 % waited at most,
        and calls a batch. None is not known, as without calls; 60,000 ms may be more."""
        return [
            (tenant, service, each.over_time(tenant, service, self._state, now_ms))
            for tenant, service, each in self._each()
            if tenant != OTHERS and each.heard_ms is not None and now_ms - each.heard_ms < FORGET_MS
        ]

    def _each(self) -> Iterator[tuple[str, str, _Service]]:
        for (tenant, service), each in sorted(self._services.items()):
            yield tenant, service, each
        if self._others.heard_ms is not None:
            yield OTHERS, OTHERS, self._others

    def _of(self, tenant: str, service: str, now_ms: int) -> _Service:
        found = self._services.get((tenant, service))
        if found is not None:
            return found
        is_full = len(self._services) >= SERVICES_MAX and not self._give_up_one(now_ms)
        if is_full or self._of_tenant[tenant] >= SERVICES_OF_TENANT_MAX:
            found = self._others
        else:
            found = self._services[tenant, service] = _Service()
            self._of_tenant[tenant] += 1
        found.heard_ms = now_ms
        return found

    def _give_up_one(self, now_ms: int) -> bool:
        """Move the totals of a service that has had no member for long to the others; return whether there was one."""
        if now_ms < self._full_until_ms:
            return False
        key, oldest = min(self._services.items(), key=lambda each: each[1].heard_ms or 0)
        self._full_until_ms = (oldest.heard_ms or 0) + FORGET_MS
        if now_ms < self._full_until_ms:
            return False
        del self._services[key]
        self._of_tenant[key[0]] -= 1
        self._others.add(oldest.total)
        self._others.woken += oldest.woken
        self._others.heard_ms = now_ms
        return True


def _figures_of(load: MemberLoad) -> _Figures | None:
    """Return what a frame says, without classes of another number than ours; None if a number or a name of it cannot be
    true."""
    if max(len(load.member), len(load.job)) > NAME_CHARS_MAX:
        return None
    counts, errors = load.counts, dict[str, int]()
    for code, number in counts.errors.items():
        name = code if _CODE.fullmatch(code) else OTHER_CODES
        errors[name] = errors.get(name, 0) + number
    numbers = (
        *(load.ended, load.refused, load.expired, load.waited_ms, load.ran_ms, counts.batched),
        *_classes(counts.waited, CALL_MS),
        *_classes(counts.ran, CALL_MS),
        *_classes(counts.batches, BATCH_SIZES),
    )
    all_of_it = (*numbers, *errors.values())
    now = (load.places, load.running, load.waiting)
    is_true = min(*all_of_it, *now) >= 0 and max(all_of_it) <= FIGURE_MAX and max(now) <= NOW_MAX
    return _Figures(numbers, errors) if is_true and len(errors) <= CALL_CODES_MAX + 1 else None


def _is_of_service(code: str) -> bool:
    """Return whether a call failed by its service: not by its caller, and not as one that the caller tries again."""
    return not (code.startswith("4") and len(code) == 3) and code != "503"


def _classes(counted: tuple[int, ...], bounds: Sequence[int]) -> tuple[int, ...]:
    return counted if len(counted) == len(bounds) + 1 else (0,) * (len(bounds) + 1)


def _is_lower(now: _Figures, before: _Figures) -> bool:
    """Return whether any number of a member is lower than it was."""
    codes = any(now.errors.get(code, 0) < number for code, number in before.errors.items())
    return codes or any(map(operator.lt, now.numbers, before.numbers))


def _difference(now: _Figures, before: _Figures) -> _Figures:
    errors = {code: more for code, number in now.errors.items() if (more := number - before.errors.get(code, 0))}
    return _Figures(tuple(map(operator.sub, now.numbers, before.numbers)), errors)


def _sum(total: _Figures, more: _Figures) -> _Figures:
    numbers = tuple(map(operator.add, total.numbers, more.numbers))
    if not more.errors:
        return _Figures(numbers, total.errors)
    errors = dict(total.errors)
    for code, number in more.errors.items():
        name = code if code in errors or len(errors) < CALL_CODES_MAX else OTHER_CODES
        errors[name] = errors.get(name, 0) + number
    return _Figures(numbers, errors)


def _most(classes: Sequence[int], part: float = _MOST) -> int | None:
    """Return the bound below which this part of the calls is, in ms: 0 without calls, None beyond the last bound."""
    counts = list(accumulate(classes))
    if not counts[-1]:
        return 0
    at = bisect_left(counts, part * counts[-1])
    return CALL_MS[at] if at < len(CALL_MS) else None
