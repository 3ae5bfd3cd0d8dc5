"""`moorage replay`: shows past decisions from the ledger or a backup, or makes those of a recording again."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from moorage.cli.fleet.ledger import SETTINGS, ledger_guarded, scheduler_of
from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, print_err, print_out
from moorage.cli.framework.exit_codes import EXIT_DRIFT
from moorage.cli.framework.files import cannot_read
from moorage.cli.framework.interrupts import run
from moorage.cli.framework.options import OF_LEDGER, LedgerOptions
from moorage.cli.framework.render import utc_ms
from moorage.client.errors import NotFound, not_found, rejected
from moorage.schemas.actors import split, words
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.scheduler.ledger.ledger_reader import LedgerReader

#: columns of a line on a terminal, which comes before those after it are known: ledger, time, job, state, worker, GPUs
_WIDTHS: Final = (8, 24, 26, 10, 12, 7)


def replay(
    file: Annotated[
        Path | None, Parameter(help="A file that a scheduler wrote with --record; without it the ledger is read.")
    ] = None,
    /,
    *,
    at: Annotated[int | None, Parameter(help="Show what this record of the ledger decided.", value="RECORD")] = None,
    job: Annotated[
        str | None, Parameter(help="Only what concerns this job; tenant/job if several tenants have it.", value="JOB")
    ] = None,
    backup: Annotated[
        Path | None, Parameter(help="A file of moorage admin backup: the state then, and since which record.")
    ] = None,
    settings: Annotated[Path | None, Parameter(help=SETTINGS)] = None,
    options: LedgerOptions = OF_LEDGER,
) -> int:
    """Show what was decided, with the evidence that the ledger has of it; or decide it again, from a recording.

    From the ledger, it prints a line for each transition or operator's act: ledger record, ledger time, job, state,
    worker, GPUs, and why; on a terminal in columns, otherwise separated by tabs, with times in ms and GPUs by name. It
    reads the ledger itself, also while a leader runs, and like a scheduler it needs the ledger's own account. If
    records are gone because a snapshot has replaced them, it says so.

    From a recording, it prints a line for each placement. The exit code is 0 if every record came out byte for byte as
    it was, and 10 if one did not.
    """

    def act() -> int:
        if file is not None and backup is not None:
            raise rejected(
                "invalid-argument", "a recording and a backup exclude each other", next="name only one of the two"
            )
        if file is not None:
            return _decide_again(file, at, job, options)
        if backup is not None:
            return _replay_backup(backup, at, job, options)
        held, target = scheduler_of(settings, options)
        from moorage.scheduler.settings import ledger_url

        where = ledger_url(held.ledger_url_file) or target or held.nats
        return run(_replay_ledger(where, held.prefix, at, job, options))

    return ledger_guarded(options, act)


def _none_of(job: str, where: str) -> NotFound:
    return not_found(
        f"nothing about job {job} is in {where}",
        found=job,
        next="leave out --job to see the jobs that are there; write tenant/job for a job of another tenant",
    )


# --------------------------------------------------------------------------------------------- the ledger, a backup


async def _replay_ledger(
    where: str | None, prefix: str, at: int | None, job: str | None, options: LedgerOptions
) -> int:
    from moorage.bus.connection import connect
    from moorage.bus.jetstream import JetStream
    from moorage.scheduler.ledger import ledger_reader
    from moorage.schemas.subjects import Subjects

    async with await connect(where, "moorage-replay") as connection:
        ledger = ledger_reader.LedgerReader(JetStream(connection), Subjects(prefix))
        shown = records = 0
        async for record in ledger.records(at, job):
            if not records and at is None and ledger.base_seq:
                shown += _cut_away(ledger, options)
            records += 1
            for row in ledger_reader.rows(record):
                if job is None or ledger_reader.concerns(row, job):
                    shown += 1
                    show(row, options)
    if job is not None and not shown:
        raise _none_of(job, f"the {many(records, 'record')} read" if at is None else f"record {at}")
    print_err(f"{many(records, 'record')} read, {many(shown, 'line')}")
    return 0


def _cut_away(ledger: LedgerReader, options: LedgerOptions) -> int:
    """Print what the first snapshot knows of the jobs, and that the records before it were deleted. Returns the number
    of lines."""
    print_err(
        f"records up to {ledger.base_seq} were deleted after a snapshot; of their decisions only the results are known"
    )
    for row in ledger.before:
        show(row, options)
    return len(ledger.before)


def _replay_backup(file: Path, at: int | None, job: str | None, options: LedgerOptions) -> int:
    from moorage.scheduler.ledger import ledger_reader
    from moorage.scheduler.ledger.backup import read

    try:
        header, state = read(file)
    except OSError as error:
        raise cannot_read(file, error.strerror, "name a file of moorage admin backup") from None
    if at is not None and at > header.seq:
        raise rejected(
            "failed-precondition",
            f"the backup ends at record {header.seq} and does not contain record {at}",
            found=at,
            next="read the ledger itself, or a later backup",
        )
    shown = 0
    found = (
        ledger_reader.transitions_in(state)
        if job is not None and at is None
        else ledger_reader.placements_in(state, at)
    )
    for row in found:
        if job is None or ledger_reader.concerns(row, job):
            shown += 1
            show(row, options)
    if job is not None and not shown:
        raise _none_of(job, f"this backup of record {header.seq}")
    print_err(
        f"{many(shown, 'line')}, from the state at record {header.seq} of ledger {header.ledger_id}; a backup has "
        "no records, "
        "so why each decision was made is only in the ledger"
    )
    return 0


def show(row: dict[str, Any], options: LedgerOptions) -> None:
    """Print the line of a decision or of an operator's act."""
    if options.json:
        emit(row)
        return
    ledger, time_ms = row["ledger"], row.get("time_ms")
    if row["kind"] == "act":
        rest = {name: value for name, value in row.items() if name not in ("kind", "ledger", "epoch", "time_ms", "act")}
        told = ", ".join(
            f"{name} {_word(words(*split(value)) if name == 'by' else value)}" for name, value in rest.items()
        )
        _line(ledger, time_ms, [row["act"]], told)
        return
    name = f"{row['tenant']}/{row['job']}" + (f"/{row['replica']}" if row["replica"] >= 0 else "")
    why = [row.get("why", ""), f"by {words(row['by'], row.get('said', ''))}" if row.get("by") else ""]
    if "workers_known" in row:
        why.append(f"{row['workers_known']} workers known, {row['free_left']} left free")
        why.append(f"{row['placed_together']} replicas placed by this decision" if row["placed_together"] > 1 else "")
    why.append(f"waited {row['waited_ms'] / 1000:g} s" if "waited_ms" in row else "")
    cells = [name, row["state"], row.get("worker", "-"), _gpus(row.get("gpus", ()))]
    _line(ledger, time_ms, cells, "; ".join(filter(None, why)))


def _gpus(names: Sequence[Any]) -> str:
    """Return the number of GPUs for a person at a terminal, and their names in a pipe."""
    if sys.stdout.isatty():
        return many(len(names), "GPU") if names else "-"
    return ",".join(map(str, names)) or "-"


def _line(ledger: int, time_ms: int | None, cells: list[str], told: str) -> None:
    """Print the cells: in columns on a terminal, otherwise separated by tabs."""
    if not sys.stdout.isatty():
        when = "-" if time_ms is None else str(time_ms)
        print_out("\t".join([str(ledger or "-"), when, *cells, told]).rstrip())
        return
    when = "-" if time_ms is None else utc_ms(time_ms)
    padded = [cell.ljust(width) for cell, width in zip([str(ledger or "-"), when, *cells], _WIDTHS, strict=False)]
    print_out(" ".join([*padded, told]).rstrip())


def _word(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


# ------------------------------------------------------------------------------------------------------ a recording


def _decide_again(file: Path, at: int | None, job: str | None, options: LedgerOptions) -> int:
    from moorage.scheduler.ledger.recording import CannotReplay, placements
    from moorage.scheduler.ledger.recording import replay as decide_again

    records = differ = placed = 0
    try:
        for one in decide_again(file):
            records += 1
            if not one.same:
                differ += 1
                print_err(
                    f"record {one.seq} differs when decided again: the recording is of another release, or "
                    "moorage has a defect"
                )
                continue
            for row in placements(one) if at in (None, one.seq) else ():
                if job in (None, row["job"], f"{row['tenant']}/{row['job']}"):
                    placed += 1
                    _show_placement(row, options)
    except BrokenPipeError:
        raise  # of our output, and not of the file
    except (CannotReplay, OSError) as error:
        said = f"{file.name} cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        meant = f"moorage replay --backup {shlex.quote(str(file))}" if _is_backup(file) else "name a file of --record"
        raise rejected("invalid-argument", said, found=str(file), next=meant) from None
    print_err(
        f"{many(records, 'record')} decided again, {records - differ:,} of them byte for byte the same;"
        f" {many(placed, 'placement')}"
    )
    return EXIT_DRIFT if differ else 0


def _is_backup(file: Path) -> bool:
    from moorage.scheduler.ledger.backup import MAGIC

    try:
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _show_placement(row: dict[str, Any], options: LedgerOptions) -> None:
    if options.json:
        emit(row)
        return
    known = f"{row['workers_known']} workers known, {row['free_left']} left free" if "workers_known" in row else ""
    name = f"{row['tenant']}/{row['job']}/{row['replica']}"
    if sys.stdout.isatty():
        _line(row["ledger"], row["time_ms"], [name, "PLACED", row["worker"], _gpus(row["slots"])], known)
    else:
        _line(row["ledger"], row["time_ms"], [name, row["worker"], _gpus(row["slots"])], known)
