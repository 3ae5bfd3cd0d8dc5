"""The table of jobs that `moorage ls` shows, once or again and again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from moorage.cli.framework.exit_codes import shell_code
from moorage.cli.framework.fleets import Table
from moorage.cli.framework.render import ASLEEP, GAP, age, table, utc
from moorage.cli.jobs.replica_words import replica_words, shown_words
from moorage.cli.jobs.use import use_cell
from moorage.client.replicas import failed_words
from moorage.client.reported_words import value_words
from moorage.schemas.errors import is_as_asked
from moorage.schemas.exit_words import exit_words
from moorage.schemas.job import QUEUED, RUNNING, TERMINAL
from moorage.schemas.reasons import SCALED
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.schemas.answers.jobs import Awaited, Explained, JobRow, ReplicaStall, Scaled, ShownJob
    from moorage.schemas.frames import Stalled

COLUMNS: Final = ("JOB", "STATE", "GPU", "PRI", "TRY", "AGE", "RAN", "USE", "CODE", "WORKER", "WHY")
TENANT: Final = "TENANT"
NUMBERS: Final = ("PRI", "TRY", "AGE", "RAN", "USE", "CODE")
#: those that a narrow terminal does not show, the first one first
OPTIONAL: Final = ("TRY", "PRI", "CODE", "USE", "AGE", "RAN")
#: of a request that names no priority
PRIORITY_USUAL: Final = 50
#: columns of what jobs have reported
METRICS_MAX: Final = 12


def jobs_table(rows: Sequence[JobRow], *, of_all: bool = False) -> str:
    """Return the table; with `of_all`, each row begins with its tenant.

    On a terminal, the columns PRI and TRY are left out while no job differs from the usual: they would say nothing.
    """
    header = [TENANT, *COLUMNS] if of_all else [*COLUMNS]
    cells = [[row.tenant, *job_row(row)] if of_all else job_row(row) for row in rows]
    if sys.stdout.isatty():
        usual = {
            "PRI": all(row.priority in (None, PRIORITY_USUAL) for row in rows),
            "TRY": all(row.attempt <= 1 for row in rows),
        }
        for at in [header.index(name) for name in ("TRY", "PRI") if usual[name]]:
            header, cells = header[:at] + header[at + 1 :], [row[:at] + row[at + 1 :] for row in cells]
    return table(
        header,
        cells,
        numbers=[name for name in NUMBERS if name in header],
        optional=[name for name in OPTIONAL if name in header],
        shortened=("JOB",),
    )


def metrics_table(rows: Sequence[JobRow], *, of_all: bool = False) -> str:
    """Return the table with what jobs have reported of themselves last: a column for each name, the commonest first."""
    names = Counter(name for row in rows for name in row.reported)
    shown = [name for name, _ in names.most_common(METRICS_MAX)]
    numbers = [name for name in shown if not any(isinstance(row.reported.get(name), str) for row in rows)]
    header = [*([TENANT] if of_all else []), "JOB", "STATE", "RAN", *shown]
    cells = [
        [
            *([row.tenant] if of_all else []), row.job, row.state, None if row.ran_ms is None else age(row.ran_ms),
            *(value_words(row.reported[name]) if name in row.reported else None for name in shown),
        ]
        for row in rows
    ]  # fmt: skip
    return table(header, cells, numbers=["RAN", *numbers], shortened=("JOB",))


def whole_table(rows: Sequence[JobRow]) -> Table:
    """Return the table with every column, and each job's tenant."""
    return Table([TENANT, *COLUMNS], [[row.tenant, *job_row(row)] for row in rows], NUMBERS, OPTIONAL, ("JOB",))


def rank(state: str) -> int:
    """Return the place of a row among others: what holds GPUs comes first, then what waits, then what has ended."""
    return 2 if state in TERMINAL else 1 if state == QUEUED else 0


def job_row(row: JobRow) -> list[Any]:
    """Return the cells of a job's row, one for each of `COLUMNS`."""
    return [
        row.job,
        row.state,
        row.gpu,
        row.priority,
        row.attempt,
        age(row.age_ms),
        None if row.ran_ms is None else age(row.ran_ms),
        use_cell(row.use),
        code_cell(row.code),
        worker_cell(row),
        why_cell(row),
    ]


def why_cell(row: JobRow) -> str:
    """Return for what a job waits, how far its replicas are, or why it ended; "" if there is nothing to say."""
    return (
        stalled_words(row.stalled)
        or ", ".join(f"after {after_words(each)}" for each in row.after)
        or (f"not before {utc(row.not_before_ms)}" if row.not_before_ms else "")
        or (ASLEEP if is_at_rest(row) else "")
        or _replicas_words(row)
        or ended_by_itself(row.state, row.code, row.why or row.reason)
    )


def stalled_words(found: Sequence[ReplicaStall]) -> str:
    """Return for how long a running job has stalled, and what its GPUs do: `stalled for 12m: 8 GPUs at 0 %`; "" if it
    does not."""
    if not found:
        return ""
    longest = max(found, key=lambda each: each.seconds)
    of = f"{many(len(found), 'replica')} " if len(found) > 1 else ""
    return f"{of}stalled for {age(1000 * longest.seconds)}: {longest.why}"


def stopped_words(row: ShownJob) -> str:
    """Return how many processes of a running job a signal has stopped: `2 processes, by a signal such as SIGSTOP`; ""
    if there is none."""
    found = [each for each in row.replica_states if each.stopped]
    if not found:
        return ""
    count = sum(each.stopped for each in found)
    of = f" of replica {', '.join(str(each.replica) for each in found)}" if len(row.replica_states) > 1 else ""
    return f"{count} process{'es' if count > 1 else ''}{of}, by a signal such as SIGSTOP"


def _replicas_words(row: JobRow) -> str:
    """Return how many replicas run, wait and are done, how many are ready, and why they wait if all do.

    Members that a service does not need wait for nothing: it is said how many there may be."""
    if row.replicas is not None and row.reason == SCALED.name:
        states = {name: count for name, count in row.replicas.states.items() if name != QUEUED}
        running = replica_words(states, row.replicas.ended)
        return GAP.join(filter(None, (running, ready_cell(row), f"at most {row.replicas.of}")))
    why = row.why if row.hold is not None else row.reason
    waits = row.replicas is not None and row.state == QUEUED
    return GAP.join(filter(None, (shown_words(row.replicas), ready_cell(row), why if waits else "")))


def after_words(each: Awaited) -> str:
    """Return a job that another one waits for, its state, and which end counts: `prep RUNNING, whatever its end`."""
    which = {"any": ", whatever its end", "failed": ", if it does not succeed"}.get(each.when, "")
    return f"{each.job} {each.state}{which}"


def after_rows(told: JobRow | Explained) -> list[tuple[str, str]]:
    """Return a named value for each job that a job waits for, and for the time before which it may not start."""
    rows = [("after", after_words(each)) for each in told.after]
    return [*rows, ("not before", utc(told.not_before_ms) if told.not_before_ms else "")]


def members_words(scaled: Scaled | None) -> str:
    """Return how many members a service is to have, and why; "" for other jobs."""
    if scaled is None:
        return ""
    bounds = f"{scaled.wanted} wanted, of {scaled.min} to {scaled.max}"
    return bounds if scaled.why is None else f"{bounds}, since {age(scaled.since_ms or 0)}: {scaled.why}"


def ready_cell(row: JobRow) -> str:
    """Return how many of a job's running replicas are ready, `1 of 2 ready`; "" if all are, or none is looked at."""
    states = {row.state: 1} if row.replicas is None else row.replicas.states
    runs = states.get(RUNNING, 0)
    return f"{row.ready} of {runs} ready" if row.ready is not None and row.ready < runs else ""


def is_at_rest(row: JobRow) -> bool:
    """Return whether a job's row of `ls` is that of a service without members, as no calls come."""
    return row.state == QUEUED and row.reason == SCALED.name


def stall_event_words(stalled: Stalled) -> str:
    """Return what an event says of a stall, which is over if it has lasted no time."""
    of = f"replica {stalled.replica}" if stalled.replica > 0 else "the job"
    if not stalled.seconds:
        return f"{of} moves again"
    return f"{of} has stalled for {age(stalled.seconds * 1000)}, without output: {stalled.why}"


def worker_cell(row: JobRow) -> str:
    """Return a job's worker, how many others it has, and whether it is simulated: `sim-0002 +3 sim`."""
    return (row.worker or "-") + (f" +{row.workers - 1}" if row.workers > 1 else "") + (" sim" if row.simulated else "")


def ended_by_itself(state: str, code: int | None, why: str) -> str:
    """Return the reason of an end, also of a command that ended by itself with a code, of which no reason is kept.

    The bare word `end` says only that the worker ended it as asked, which the state says.
    """
    if not why or is_as_asked(why):
        has_failed = state == "FAILED" or (state == "QUEUED" and not why)  # queued again, with the code of that attempt
        return f"it ended by itself, {exit_words(code)}" if has_failed and code else ""
    return why


def end_of(shown: ShownJob) -> str:
    """Return why a job ended; of one with many replicas how many of them failed, unless something else ended it."""
    why = ended_by_itself(shown.state, shown.code, shown.why)
    if shown.state not in TERMINAL or (shown.why and not is_as_asked(shown.why)):
        return why
    return failed_words(shown.replicas) or why


def no_jobs(tenant: str, states: Sequence[str], others: Sequence[str] = (), *, history: bool = False) -> str:
    """Return that there is no job of a tenant in these states, and with these other words of the question."""
    asked = f" in {', '.join(states)}" if states else ""
    asked += f" with {' '.join(others)}" if others else ""
    return f"no jobs of {tenant}{asked} {'in memory or history' if history else 'in memory; --history looks further'}"


def matching(counts: dict[str, int], states: list[str]) -> int:
    """Return how many jobs are in these states, or in any state if none is named."""
    return sum(number for name, number in counts.items() if name in (states or counts))


def counts_line(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))


def code_cell(code: int | None) -> int | None:
    """Return an exit code for people; None where nothing ran."""
    return None if code is None else shell_code(code)
