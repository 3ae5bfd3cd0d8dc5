"""What the core raised in this term, and what is set aside because of it: counts, evidence, and until when.

Nothing here raises because of its arguments. It outlives the rebuilding of an engine's tables, ends with the term, and
depends on ledger time alone, so that a recording replays. Without a failure all of it is empty.
"""

from __future__ import annotations

import math
import traceback
from collections import Counter
from typing import Any, Final, Literal, NamedTuple

from moorage.schemas.errors import Problem, problem

#: steps of `Engine.build` that may be left out of a record: those at which it tells timers and groups apart
TIMERS: Final = "timers"
PLACING: Final = "placing"
#: parts of placing that read running attempts, and may be left out alone: jobs are placed all the same
RESERVING: Final = "reserving"
PREEMPTING: Final = "preempting"
PARTS_OF_PLACING: Final = frozenset((PLACING, RESERVING, PREEMPTING))

#: for how long a timer, a worker, or a tenant's requests of one verb are set aside
PAUSE_MS: Final = 60_000
#: for how long a step is left out that no request, job or worker was at hand for
STEP_PAUSE_MS: Final = 5_000
#: how many entries each table has at most, and how many kinds of failures are logged
ENTRIES_MAX: Final = 10_000
EVIDENCE_MAX: Final = 1_000
#: of the groups that failed at one worker, how many are remembered
GROUPS_MAX: Final = 16
#: how many characters of a traceback are kept, from its end
TRACE_CHARS_MAX: Final = 2_000

#: the kinds of what is set aside, each the first part of its keys: a step by its name, a timer by kind and subject, the
#: requests of one by tenant and verb, a worker by its id
Kind = Literal["step", "timer", "requests", "worker"]
Key = tuple[Any, ...]
#: the tenant and the first job of a queue group, or of a request
Asker = tuple[str, str]


class Failure(NamedTuple):
    """A failure, for the log."""

    where: str
    what: str
    trace: str


def trace_of(raised: BaseException) -> str:
    """Return the end of an exception's traceback."""
    return "".join(traceback.format_exception(raised))[-TRACE_CHARS_MAX:]


def failed(what: str, job: str) -> Problem:
    """Return the answer to an event on which the core raised."""
    return problem(
        "internal",
        f"the scheduler failed on this {what}: it was set aside, and nothing of it was recorded",
        job=job,
        next="for an operator: the scheduler's log shows where it failed, and `moorage doctor` how often",
    )


def unread(job: str = "") -> Problem:
    """Return the answer to a request that is refused because earlier ones failed."""
    return problem(
        "overloaded",
        "the scheduler failed on earlier requests of this kind, and takes no more of them for now",
        job=job,
        next="send it again later; an operator finds in the scheduler's log where it failed",
        retry_after_s=PAUSE_MS / 1000,
    )


class Containment:
    """`counts` are by what was at hand: ranking, request, worker, job, timer, step, output, task."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.unlogged: list[Failure] = []
        self.last: Failure | None = None
        self.last_ms = 0
        self.traces: dict[str, str] = {}  # tracebacks, by the reply subject of a request of the durable queue
        self.plain_ranker = False
        self.until: dict[Key, int] = {}  # what is set aside, until which ledger ms; a worker until its session is over
        self.jobs: dict[int, None] = {}  # numbers of jobs to hold: they stay out of the queue until a record does it
        self.cordons: dict[str, str] = {}  # workers to cordon, and why
        self.failed_at: dict[str, dict[Asker, tuple[int, ...]]] = {}  # by worker: the groups that failed there
        self.blamed: dict[Asker, str] = {}  # groups for which this record cordons a worker
        self._failed: dict[Key, int] = {}  # ledger ms of the last failure
        self._logged: set[str] = set()

    def note(self, kind: str, where: str, what: str, raised: BaseException, now_ms: int) -> str:
        """Count an exception by `kind`, and return the end of its traceback.

        It is queued for the log only the first time that this line of code raises this type of exception at `where`.
        """
        trace = trace_of(raised)
        self.counts[kind] += 1
        self.last, self.last_ms = Failure(where, what, trace), now_ms
        frames = traceback.extract_tb(raised.__traceback__)
        known = f"{where} {type(raised).__name__} {frames[-1].filename}:{frames[-1].lineno}" if frames else where
        if known not in self._logged and len(self._logged) < EVIDENCE_MAX:
            self._logged.add(known)
            self.unlogged.append(self.last)
        return trace

    def note_task(self, name: str, raised: BaseException, now_ms: int) -> None:
        """Count an exception of a task beside the records; that task logs it."""
        self.counts["task"] += 1
        self.last, self.last_ms = Failure(f"task {name}", type(raised).__name__, trace_of(raised)), now_ms

    def take_unlogged(self) -> list[Failure]:
        """Return the failures since the last call, for the log."""
        told, self.unlogged = self.unlogged, []
        return told

    def figures(self, now_ms: int) -> dict[str, Any]:
        """Return the figures that the verb `fleet` shows."""
        last = self.last
        return {
            "counts": dict(sorted(self.counts.items())),
            "plain_ranker": self.plain_ranker,
            "refused": sorted(
                f"{key[2]} of {key[1]}" for key in self.until if key[0] == "requests" and now_ms < self.until[key]
            ),
            "workers": sorted(key[1] for key in self.until if key[0] == "worker"),
            **({} if last is None else {"last": f"{last.where}: {last.what}", "last_ms": self.last_ms}),
        }

    def set_aside(self, until_ms: int, kind: Kind, *key: Any) -> None:
        _add(self.until, (kind, *key), until_ms)

    def is_aside(self, now_ms: int, kind: Kind, *key: Any) -> bool:
        return bool(self.until) and now_ms < self.until.get((kind, *key), 0)

    def fails_again(self, now_ms: int, *key: Any, within_ms: float = math.inf) -> bool:
        """Note that this has failed; return whether it had failed within so many ms before."""
        before = self._failed.pop(key, None)
        _add(self._failed, key, now_ms)
        return before is not None and now_ms - before < within_ms

    def forgive(self, *key: Any) -> None:
        """Let the next failure count as the first."""
        self._failed.pop(key, None)

    def pass_time(self, now_ms: int) -> None:
        """Forget what is over by this ledger time, but for workers."""
        self.until = {key: until for key, until in self.until.items() if now_ms < until or key[0] == "worker"}


def _add(table: dict[Key, int], key: Key, at_ms: int) -> None:
    """Write a row; a full table loses its oldest one for it."""
    if len(table) >= ENTRIES_MAX and key not in table:
        del table[next(iter(table))]
    table[key] = at_ms
