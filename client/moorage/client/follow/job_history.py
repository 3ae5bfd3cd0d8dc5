"""What is known of one job: its transitions, merged by revision from every source (its subject, the tenant's frames,
the leader's answers and the history), and how it ended."""

from __future__ import annotations

import reprlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from moorage.schemas.errors import is_as_asked, rank_that_ended
from moorage.schemas.frames import Change, Event, Replicas
from moorage.schemas.job import CANCELLED, CANCELLING, ENDING, EXITED, FAILED, SUCCEEDED, TERMINAL
from moorage.schemas.names import SIMULATED_UUID, replaced_by
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.client.answers import JobInfo
    from moorage.schemas.answers.jobs import JobRow

#: sends a verb with its arguments, and returns the data of the answer: `Connected.read`
Reads = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]
#: most events that wait for earlier transitions; beyond it the leader is asked
AHEAD_MAX: Final = 64
#: of jobs with more replicas, not every transition is told
LISTED_MAX: Final = 1_024


class Shown(NamedTuple):
    """An answer of `show`, and the record up to which it holds."""

    info: JobInfo
    ledger: int


class Result(msgspec.Struct, frozen=True):
    """How a job ended. `changes` are the transitions that were seen, in order.

    `code` is the exit status of the attempt that decided the job's end: minus the signal if negative, 0 if all replicas
    succeeded, None if none is known, as when no attempt ran or its worker was lost. `value` is the return value of a
    handler, or a list of them if the job has several replicas; None for other jobs, and if the handler returned none.
    `replaced_by` is the id of the job that took its place (`instead_of`); None if it ended for another reason.
    Only `run` sets `stdout`, `stderr` and `lost_bytes`, the number of bytes known to be missing in them.
    """

    job: str
    state: str
    code: int | None = None
    why: str = ""
    changes: list[Change] = []
    stdout: str = ""
    stderr: str = ""
    lost_bytes: int = 0
    value: Any = None

    @property
    def replaced_by(self) -> str | None:
        return replaced_by(self.why) if self.state == CANCELLED else None

    def __repr__(self) -> str:
        words = [self.job, self.state, "" if self.code is None else f"code {self.code}", self.why]
        words += [f"{name} {len(text)}" for name, text in (("stdout", self.stdout), ("stderr", self.stderr)) if text]
        if self.value is not None:
            words.append(f"value {reprlib.repr(self.value)}")
        words.append(many(len(self.changes), "transition"))
        return f"<Result {'  '.join(filter(None, words))}>"

    def _repr_html_(self) -> str:
        from moorage.client.notebook import table, tail

        rows = {
            "state": self.state,
            "code": "" if self.code is None else str(self.code),
            "why": self.why,
            "transitions": str(len(self.changes)),
            "value": "" if self.value is None else reprlib.repr(self.value),
            "stdout": tail(self.stdout),
            "stderr": tail(self.stderr),
        }
        return table(f"Result of {self.job}", rows)


class JobHistory:
    """The transitions of one job, each once, in the order of their revisions, and without a gap up to `rev`.

    Of a job with more than 1,024 replicas there are only the exceptions. `replicas` has how many are in which state.

    `take` merges received events, `accept` the leader's answers. `is_stale` says that events may have been missed.
    `ahead` has events that arrived before the transitions that precede them. In both cases the leader has to be asked.
    """

    __slots__ = (
        "__weakref__",
        "ahead",
        "changes",
        "is_stale",
        "job",
        "ledger",
        "replicas",
        "rev",
        "simulated",
        "state",
        "why",
    )

    def __init__(self, job: str) -> None:
        self.job = job
        self.rev = 0
        self.state = ""
        self.why = ""
        self.ledger = 0  # the record of the last transition
        self.changes: list[Change] = []
        self.replicas: Replicas | None = None
        self.ahead: list[Event] = []
        self.is_stale = False
        self.simulated = False

    @property
    def has_gap(self) -> bool:
        """Whether the leader has to be asked for what is missing."""
        return self.is_stale or bool(self.ahead)

    @property
    def last_rev(self) -> int:
        """The newest revision that was received, even if there is a gap before it."""
        return self.ahead[-1].rev if self.ahead else self.rev

    @property
    def is_over(self) -> bool:
        return self.state in TERMINAL

    def take(self, event: Event) -> Event | None:
        """Merge a received event. Return its new part; None if nothing is new, or if there is a gap before it."""
        rev, changes = self.rev, event.changes
        if event.rev <= rev:
            is_kept_so = event.enforced is not None and not changes
            besides = (event.waiting, event.idle, event.stalled)
            is_news = is_kept_so or any(each is not None for each in besides)
            if event.rev < rev or not is_news:
                return None
            self.why = event.why or self.why
            return event  # no transition: why the job waits, how its share is enforced, that it is idle or stalls
        if event.replicas is not None:  # of very many: what it leaves out is counted
            if event.replicas.after > rev:
                self._keep_ahead(event)
                return None
            return self._append(msgspec.structs.replace(event, changes=behind(rev, changes)))
        if len(changes) != event.rev - rev or changes[0].rev != rev + 1:
            changes = behind(rev, changes)
            if len(changes) != event.rev - rev:
                self._keep_ahead(event)
                return None
            event = msgspec.structs.replace(event, changes=changes)
        return self._append(event)

    def accept(self, event: Event) -> list[Event]:
        """Merge an answer of the leader, and return the new events.

        The leader is right: transitions that it does not know are lost. After a ledger was restored from a backup, the
        answer may have fewer transitions than the history.
        """
        rev, news = self.rev, list[Event]()
        if event.rev > rev or event.state != self.state:
            news.append(self._append(msgspec.structs.replace(event, changes=behind(rev, event.changes))))
        self.rev, self.ledger = event.rev, event.ledger
        ahead, self.ahead = self.ahead, []
        news += [fresh for each in ahead if (fresh := self.take(each)) is not None]
        if event.rev <= rev:  # the leader does not have the transitions before them: another request would not help
            self.ahead.clear()
        return news

    def knows_more_than(self, shown: Shown) -> bool:
        """Return whether an answer is older than the history, such as that of a replaced leader.

        A restored ledger begins with a higher record number than any before, so its answers count as newer.
        """
        return 0 < shown.info.rev < self.rev and shown.ledger < self.ledger

    def all_changes(self) -> list[Change]:
        """Return all transitions that were received, those after a gap included."""
        if not self.ahead:
            return self.changes
        return self.changes + [change for event in self.ahead for change in event.changes]

    def so_far(self, tenant: str) -> Event:
        """Return all transitions so far as one event."""
        return Event(tenant, self.job, self.rev, self.state, self.ledger, list(self.changes), self.why, self.simulated)

    def result(self, shown: JobRow | None) -> Result:
        """Return the job's result; `shown` is the last answer about it."""
        return result_of(self.job, self.state, self.changes, self.why, shown)

    def _append(self, event: Event) -> Event:
        self.rev, self.state, self.ledger = event.rev, event.state, event.ledger
        self.why = event.why or self.why
        self.replicas = event.replicas or self.replicas
        self.simulated = self.simulated or event.simulated
        self.changes += event.changes
        return event

    def _keep_ahead(self, event: Event) -> None:
        if len(self.ahead) >= AHEAD_MAX:
            self.is_stale = True
        elif not self.ahead or event.rev > self.ahead[-1].rev:
            self.ahead.append(event)


def shown_event(tenant: str, job: str, shown: Shown, rev: int, changes: list[Change]) -> Event:
    """Return an answer of `show` as an event, with these transitions."""
    info = shown.info
    simulated = info.simulated or any(gpu.startswith(SIMULATED_UUID) for change in changes for gpu in change.gpus)
    name = tenant, job, rev, info.state, shown.ledger
    return Event(*name, changes, info.why, simulated, replicas=replicas_in(info))


def replicas_in(row: JobRow) -> Replicas | None:
    """Return the counts of a job with more than 1,024 replicas; None for other jobs."""
    counts = row.replicas
    return None if counts is None or counts.of <= LISTED_MAX else Replicas(counts.of, counts.states)


def behind(rev: int, changes: list[Change]) -> list[Change]:
    """Return the transitions after revision `rev`."""
    return [change for change in changes if change.rev > rev]


def decided(changes: Sequence[Change], state: str) -> Change | None:
    """Return the transition that decided the job's final `state`; None if it was not seen.

    For a gang that failed, it is the transition of the rank that failed first: the last transitions have the code of
    every rank.
    """
    ended = [change for change in changes if change.state == state] if state in TERMINAL else []
    if not ended:
        return None
    exits = (each for each in changes if each.state == EXITED and each.attempt == ended[-1].attempt)
    first = next((change for change in exits if change.code), None) if state == FAILED else None
    return first or next((change for change in ended if change.code), ended[-1])


def result_of(job: str, state: str, changes: list[Change], why: str, shown: JobRow | None) -> Result:
    """Return the result of a job that has ended. `shown` is the last answer about it, for transitions not seen."""
    last = decided(changes, state)
    well = 0 if state == SUCCEEDED else None  # the end of a succeeded gang has no code: every rank exited with 0
    if last is None:
        code, told = (None, "") if shown is None else (shown.code, shown.why)
        return Result(job, state, well if code is None else code, told or why, changes)
    code = well if last.code is None else last.code
    of_gang = (each.why for each in changes if each.state == state and rank_that_ended(each.why) is not None)
    ended = next(of_gang, last.why)
    if state == CANCELLED or is_as_asked(ended):  # the reason in the order says more than the worker's
        asked = (CANCELLING,) if state == CANCELLED else (CANCELLING, ENDING)
        ended = next((each.why for each in reversed(changes) if each.state in asked and each.why), ended)
    return Result(job, state, code, ended, changes)
