"""`moorage replay`: what a leader decided, decided again from its recording; nobody is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from moorage.cli.arguments import Parameter
from moorage.cli.console import EXIT_DRIFT, emit, say, tell
from moorage.cli.options import DEFAULTS, Options, guarded

if TYPE_CHECKING:
    from moorage.scheduler.recording import Replayed

_PLACE: Final = 0


def replay(
    file: Annotated[Path, Parameter(help="What a scheduler wrote with --record.")],
    /,
    *,
    job: Annotated[str | None, Parameter(help="Placements of this job alone; tenant/job where it is not one.")] = None,
    options: Options = DEFAULTS,
) -> int:
    """Decide again what a leader decided, from its recording, and show each placement with its evidence.

    A line a placement: ledger record, ledger time in ms, job, replica, worker, slots, and how many workers were known.
    Ends with 0 where every record came out byte for byte as it was, with 10 where one did not.
    """

    def act() -> int:
        from moorage.client.errors import rejected
        from moorage.scheduler.recording import CannotReplay
        from moorage.scheduler.recording import replay as decide_again

        records = differ = placed = 0
        try:
            for one in decide_again(file):
                records += 1
                if not one.same:
                    differ += 1
                    say(f"record {one.seq} came out otherwise than it was: another release, or a defect")
                    continue
                for row in placements(one):
                    if job in (None, row["job"], f"{row['tenant']}/{row['job']}"):
                        placed += 1
                        _show(row, options)
        except (CannotReplay, OSError) as error:
            raise rejected("invalid-argument", str(error), found=str(file), next="name a file of --record") from None
        say(f"{records:,} records decided again, {records - differ:,} of them byte for byte; {placed:,} placements")
        return EXIT_DRIFT if differ else 0

    return guarded(options, act)


def placements(one: Replayed) -> Iterator[dict[str, Any]]:
    """The placements of a record, with what stands in it of why."""
    record, state = one.record, one.state
    known = {record.evidence[at]: record.evidence[at + 2 : at + 4] for at in range(0, len(record.evidence) - 3, 4)}
    steps = record.steps
    evidence: list[int] = []
    for at in range(0, len(steps), 6):
        op, num, replica, worker, mask = steps[at : at + 5]
        if op != _PLACE:
            continue
        found = state.jobs.get(num)
        evidence = known.get(num, evidence)
        yield {
            "kind": "placement",
            "ledger": one.seq,
            "time_ms": record.time,
            "tenant": found.tenant if found is not None else "",
            "job": found.name if found is not None else str(num),
            "replica": replica,
            "worker": state.worker_by_num[worker].id,
            "slots": [slot for slot in range(64) if mask >> slot & 1],
            **({"workers_known": evidence[0], "free_left": evidence[1]} if len(evidence) == 2 else {}),
        }


def _show(row: dict[str, Any], options: Options) -> None:
    if options.json:
        emit(row)
        return
    slots = ",".join(map(str, row["slots"])) or "-"
    known = f"{row['workers_known']} workers known, {row['free_left']} left free" if "workers_known" in row else ""
    name = f"{row['tenant']}/{row['job']}/{row['replica']}"
    tell(f"{row['ledger']}\t{row['time_ms']}\t{name}\t{row['worker']}\t{slots}\t{known}")
