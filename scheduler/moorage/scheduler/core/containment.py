"""What the core raised, and what follows: counts, evidence, pauses, and how much of it one tenant may cause.

Nothing here raises because of its arguments. It outlives the rebuilding of an engine's tables and depends only on
ledger time, so that a recording replays.
"""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any, Final, NamedTuple

#: steps of `Engine.build` that may be skipped in a record
SECOND: Final = "each second"
UNMATCHED: Final = "unmatched"
TIMERS: Final = "timers"
PLACING: Final = "placing"
RETENTION: Final = "retention"
STEPS: Final = (SECOND, UNMATCHED, TIMERS, PLACING, RETENTION)

#: a failed thing is tried again after this pause, which doubles each time that it fails again
PAUSE_MS: Final = 1_000
PAUSE_MS_MAX: Final = 64_000
#: a thing that works for this long after its pause begins with the short pause again
FORGIVEN_MS: Final = 60_000
#: how many pauses, and how many kinds of failures, are remembered
PAUSES_MAX: Final = 10_000
EVIDENCE_MAX: Final = 1_000
#: how many characters of a traceback are kept, from its end
TRACE_CHARS_MAX: Final = 2_000
#: if the scheduler fails on this many frames of one worker within `FORGIVEN_MS`, the worker's session ends
TRIES_MAX: Final = 3
#: how many ms of each second the leader spends on rebuilding its tables because of tenants' requests, and how many ms
#: one tenant may cause before its requests have to wait
REBUILD_MS_A_SECOND: Final = 20
REBUILD_MS_MAX: Final = 100
#: jobs and hosts that are put into the tables in a ms, at the least
REBUILT_A_MS: Final = 50


class Failure(NamedTuple):
    """A failure, for the log."""

    where: str
    what: str
    trace: str


def trace_of(raised: BaseException) -> str:
    """Return the end of an exception's traceback."""
    return "".join(traceback.format_exception(raised))[-TRACE_CHARS_MAX:]


class Containment:
    """`counts` are by what failed: ranking, request, worker, job, timer, step, output, slow, task."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.unlogged: list[Failure] = []
        self.last: Failure | None = None
        self.last_ms = 0
        self.traces: dict[str, str] = {}  # tracebacks, by the reply subject of a request of the durable queue
        self.safe_until_ms = 0  # ledger ms until which to use the plain ranker, and one event a record
        self.alone_until_ms = 0  # ledger ms until which to take one event a record, to find the failing one
        self.failing: dict[str, int] = {}  # workers whose sessions are to end, and since when in ledger ms
        self._pauses: dict[str, tuple[int, int]] = {}  # (ledger ms until which it lasts, its length)
        self._tries: dict[str, tuple[int, int]] = {}  # by worker: number of failures, and time of the last
        self._debts: dict[str, tuple[int, int]] = {}  # by tenant: ms of rebuilding, and as of when
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
            "plain_ranker": self.is_paused("ranking", now_ms) or now_ms < self.safe_until_ms,
            "safe_mode": now_ms < self.safe_until_ms,
            "tenants": sorted(name for name in self._debts if self.wait_ms(name, now_ms)),
            "workers": sorted(self.failing),
            **({} if last is None else {"last": f"{last.where}: {last.what}", "last_ms": self.last_ms}),
        }

    # ------------------------------------------------------------------------------------------------ pauses

    def pause(self, what: str, now_ms: int) -> int:
        """Note that something failed; return the ledger time until which not to try it again."""
        until_ms, pause_ms = self._pauses.get(what, (0, 0))
        again = pause_ms and now_ms < until_ms + FORGIVEN_MS
        pause_ms = min(2 * pause_ms, PAUSE_MS_MAX) if again else PAUSE_MS
        if len(self._pauses) >= PAUSES_MAX and what not in self._pauses:
            self._pauses = {key: row for key, row in self._pauses.items() if now_ms < row[0] + FORGIVEN_MS}
            if len(self._pauses) >= PAUSES_MAX:
                del self._pauses[next(iter(self._pauses))]
        self._pauses[what] = now_ms + pause_ms, pause_ms
        return now_ms + pause_ms

    def until_ms(self, what: str) -> int:
        return self._pauses.get(what, (0, 0))[0]

    def is_paused(self, what: str, now_ms: int) -> bool:
        return now_ms < self.until_ms(what)

    def paused(self, kind: str, now_ms: int) -> dict[int, int]:
        """Return what of this kind is paused, by its number: until which ledger ms."""
        skip = len(kind) + 1
        return {
            int(what[skip:]): until_ms
            for what, (until_ms, _) in self._pauses.items()
            if now_ms < until_ms and what.startswith(kind) and what[skip:].isdecimal()
        }

    def put_off_timers(self, now_ms: int) -> dict[tuple[int, int], int]:
        """Return the paused timers, by kind and subject: until which ledger ms."""
        return {
            (int(kind), int(what)): until_ms
            for name, (until_ms, _) in self._pauses.items()
            if now_ms < until_ms and name.startswith("timer ")
            for kind, what in (name[6:].split(" "),)
        }

    def ranking(self) -> tuple[int, int]:
        return self._pauses.get("ranking", (0, 0))

    def set_ranking(self, until_ms: int, pause_ms: int) -> None:
        self._pauses["ranking"] = until_ms, pause_ms

    # ---------------------------------------------------------------------------------- failing workers and tenants

    def worker_failed(self, worker: str, now_ms: int) -> bool:
        """Count a failure on a worker's frame; return whether it was one too many, so that its session is to end."""
        count, last_ms = self._tries.get(worker, (0, now_ms))
        count = count + 1 if now_ms - last_ms < FORGIVEN_MS else 1
        if len(self._tries) >= PAUSES_MAX:
            self._tries.clear()
        self._tries[worker] = count, now_ms
        if count < TRIES_MAX:
            return False
        del self._tries[worker]
        self.failing.setdefault(worker, now_ms)
        return True

    def charge(self, tenant: str, cost_ms: int, now_ms: int) -> None:
        """Charge a tenant with the time for which its request made a record and the tables be built again."""
        self._debts[tenant] = self._debt_ms(tenant, now_ms) + cost_ms, now_ms

    def wait_ms(self, tenant: str, now_ms: int) -> int:
        """Return for how long this tenant's requests have to wait, in ms; 0 if not at all."""
        over_ms = self._debt_ms(tenant, now_ms) - REBUILD_MS_MAX
        return 0 if over_ms <= 0 else 1_000 * over_ms // self._paid_a_second() + 1

    @property
    def in_debt(self) -> bool:
        return bool(self._debts)

    def forget_paid(self, now_ms: int) -> None:
        self._debts = {name: row for name, row in self._debts.items() if self._debt_ms(name, now_ms)}

    def _paid_a_second(self) -> int:
        return max(1, REBUILD_MS_A_SECOND // max(1, len(self._debts)))

    def _debt_ms(self, tenant: str, now_ms: int) -> int:
        debt_ms, as_of_ms = self._debts.get(tenant, (0, now_ms))
        return max(0, debt_ms - (now_ms - as_of_ms) * self._paid_a_second() // 1_000)


def _line_of(raised: BaseException) -> str:
    """Return the place in the code that raised an exception."""
    frames = traceback.extract_tb(raised.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
