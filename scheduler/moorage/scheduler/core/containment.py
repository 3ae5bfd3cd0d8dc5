"""What the core raised in this term, and what is set aside because of it: counts, evidence, and for how long.

Nothing here raises because of its arguments. It outlives the rebuilding of an engine's tables, ends with the term, and
depends on ledger time alone, so that a recording replays.
"""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any, Final, NamedTuple

#: steps of `Engine.build` that may be left out of a record
ASIDE: Final = "aside"
SECOND: Final = "each second"
UNMATCHED: Final = "unmatched"
TIMERS: Final = "timers"
TELLING: Final = "telling"
PLACING: Final = "placing"
SCALING: Final = "scaling"
RETENTION: Final = "retention"
STEPS: Final = (ASIDE, SECOND, UNMATCHED, TIMERS, TELLING, PLACING, SCALING, RETENTION)

#: for how long a timer, a worker, or a tenant's requests of one verb are set aside
PAUSE_MS: Final = 60_000
#: for how long a step is left out that no request, job or worker was at hand for
STEP_PAUSE_MS: Final = 5_000
#: how many entries each table has at most, and how many kinds of failures are logged
ENTRIES_MAX: Final = 10_000
EVIDENCE_MAX: Final = 1_000
#: how many characters of a traceback are kept, from its end
TRACE_CHARS_MAX: Final = 2_000


class Failure(NamedTuple):
    """A failure, for the log."""

    where: str
    what: str
    trace: str


class Out(NamedTuple):
    """A worker whose frames are refused: until the ledger time `until_ms`, and until its session is over.

    `for_good`: until an operator speaks; `is_cordoned`: since the ledger has it cordoned.
    """

    until_ms: int
    for_good: bool
    is_cordoned: bool = False


def trace_of(raised: BaseException) -> str:
    """Return the end of an exception's traceback."""
    return "".join(traceback.format_exception(raised))[-TRACE_CHARS_MAX:]


class Containment:
    """`counts` are by what was at hand: ranking, request, worker, job, timer, step, output, task."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.unlogged: list[Failure] = []
        self.last: Failure | None = None
        self.last_ms = 0
        self.traces: dict[str, str] = {}  # tracebacks, by the reply subject of a request of the durable queue
        self.plain_ranker = False
        self.jobs: dict[int, None] = {}  # numbers of jobs to hold: they stay out of the queue until a record does it
        self.timers: dict[tuple[int, int], int] = {}  # by kind and subject: until which ledger ms it does not ring
        self.steps: dict[str, int] = {}  # until which ledger ms a step is left out
        self.out: dict[str, Out] = {}  # by worker
        self._failed_once: dict[str, int] = {}  # by worker: when, in ledger ms
        self._raised: dict[tuple[str, str], int] = {}  # by (tenant, verb): ledger ms of the last failure
        self._refused: dict[tuple[str, str], int] = {}  # by (tenant, verb): until which ledger ms
        self._logged: set[str] = set()

    # ---------------------------------------------------------------------------------------------- evidence

    def note(self, kind: str, where: str, what: str, raised: BaseException, now_ms: int) -> str:
        """Count an exception by `kind`, and return the end of its traceback.

        It is queued for the log only the first time that this line of code raises this type of exception at `where`.
        """
        trace = trace_of(raised)
        self.counts[kind] += 1
        self.last, self.last_ms = Failure(where, what, trace), now_ms
        known = f"{where} {type(raised).__name__} {_line_of(raised)}"
        if known not in self._logged and len(self._logged) < EVIDENCE_MAX:
            self._logged.add(known)
            self.unlogged.append(self.last)
        return trace

    def note_task(self, name: str, raised: BaseException, now_ms: int) -> None:
        """Count an exception of a task beside the records; that task logs it."""
        self.counts["task"] += 1
        self.last, self.last_ms = Failure(f"task {name}", type(raised).__name__, trace_of(raised)), now_ms

    def take_unlogged(self) -> list[Failure]:
        told, self.unlogged = self.unlogged, []
        return told

    def figures(self, now_ms: int) -> dict[str, Any]:
        """Return the figures that the verb `fleet` shows."""
        last = self.last
        return {
            "counts": dict(sorted(self.counts.items())),
            "plain_ranker": self.plain_ranker,
            "refused": sorted(f"{verb} of {name}" for name, verb in self._refused if self.refuses(name, verb, now_ms)),
            "workers": sorted(self.out),
            **({} if last is None else {"last": f"{last.where}: {last.what}", "last_ms": self.last_ms}),
        }

    # ---------------------------------------------------------------------------------------------- requests

    def charge(self, tenant: str, verb: str, now_ms: int) -> None:
        """Note that a request failed. From the second within `PAUSE_MS` on, the tenant's requests of that verb are
        refused for as long."""
        key = tenant, verb
        if now_ms - self._raised.get(key, -PAUSE_MS) < PAUSE_MS:
            self._refused[key] = now_ms + PAUSE_MS
        _bounded(self._raised, now_ms - PAUSE_MS)
        self._raised[key] = now_ms

    def refuses(self, tenant: str, verb: str, now_ms: int) -> bool:
        """Return whether a tenant's requests of this verb are refused unread now."""
        return bool(self._refused) and now_ms < self._refused.get((tenant, verb), 0)

    @property
    def refuses_some(self) -> bool:
        return bool(self._refused)

    @property
    def pauses_some(self) -> bool:
        """Whether time alone may change what is set aside."""
        return bool(self._refused or self.steps or self.timers)

    # ---------------------------------------------------------------------------------------------- what waits

    def put_off_timer(self, timer: tuple[int, int], now_ms: int) -> None:
        _bounded(self.timers, now_ms)
        self.timers[timer] = now_ms + PAUSE_MS

    def put_out(self, worker: str, now_ms: int) -> None:
        """Set a worker aside: its frames are refused until its session is over, and then for the rest of a pause.

        The second time until an operator speaks.
        """
        if len(self.out) >= ENTRIES_MAX:
            del self.out[next(iter(self.out))]
        self.out[worker] = Out(now_ms + PAUSE_MS, worker in self._failed_once)
        _bounded(self._failed_once, now_ms)
        self._failed_once[worker] = now_ms

    def let_in(self, worker: str, *, forgiven: bool) -> None:
        """Take a worker's frames again; `forgiven` by an operator, so that its next failure counts as its first."""
        del self.out[worker]
        if forgiven:
            self._failed_once.pop(worker, None)

    def pass_time(self, now_ms: int) -> None:
        """Forget what is over by this ledger time."""
        self.timers = {timer: until_ms for timer, until_ms in self.timers.items() if now_ms < until_ms}
        self.steps = {step: until_ms for step, until_ms in self.steps.items() if now_ms < until_ms}
        self._raised = {key: at_ms for key, at_ms in self._raised.items() if now_ms - at_ms < PAUSE_MS}
        self._refused = {key: until_ms for key, until_ms in self._refused.items() if now_ms < until_ms}


def _bounded(table: dict[Any, int], over_ms: int) -> None:
    """Make room in a full table: drop the rows that are over at `over_ms`, and else the oldest."""
    if len(table) < ENTRIES_MAX:
        return
    for key in [key for key, at_ms in table.items() if at_ms <= over_ms]:
        del table[key]
    if len(table) >= ENTRIES_MAX:
        del table[next(iter(table))]


def _line_of(raised: BaseException) -> str:
    """Return the place in the code that raised an exception."""
    frames = traceback.extract_tb(raised.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
