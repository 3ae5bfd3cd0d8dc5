"""`moorage policy test`: whether waits keep rules, on shaken copies of a trace; with a small counter-example."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from moorage.cli.fleet.playing import ERASED, configs_of, progress_of, trace_of_ledger
from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, print_err, print_out
from moorage.cli.framework.exit_codes import EXIT_FAILED
from moorage.cli.framework.files import cannot_read, cannot_write
from moorage.cli.framework.interrupts import raise_once
from moorage.cli.framework.options import LOCAL, LocalOptions, guarded
from moorage.cli.framework.render import table
from moorage.client.errors import rejected

if TYPE_CHECKING:
    from moorage.testing.simulate.policy import Judged
    from moorage.testing.simulate.trace import TraceEvent, TraceJob


def try_rules(
    rules: Annotated[Path, Parameter(help="The rules: a TOML file.")],
    /,
    *,
    trace: Annotated[Path, Parameter(help="A trace from the ledger, see moorage admin trace.", value="TRACE")],
    set: Annotated[
        list[str] | None, Parameter(help="A setting of the scheduler that is to be tested.", value="KEY=VALUE")
    ] = None,
    copies: Annotated[
        int, Parameter(help="On so many copies, in which each job comes up to a minute sooner or later.")
    ] = 5,
    counter_example: Annotated[
        Path | None,
        Parameter(help="Write the smallest part of the trace that breaks the first broken rule.", value="FILE"),
    ] = None,
    options: LocalOptions = LOCAL,
) -> int:
    """Test whether the waits of a trace keep rules, with the scheduler's own core and the settings that you give.

    A rule is a table [[rule]] with tenant, workload or neither, and some of mean_wait_s, p50_wait_s, p90_wait_s and
    max_wait_s. It is broken if all copies but one at most break it; then the exit code is 1. It needs no server.
    """

    def act() -> int:
        from moorage.cli.study.simulate import settings_of
        from moorage.testing.simulate.policy import judge, read_rules, shrunk
        from moorage.testing.simulate.shaken import COPIES_MAX, Side

        if not 1 <= copies <= COPIES_MAX:
            raise rejected(
                "invalid-argument", "--copies is out of bounds", found=copies, allowed=f"1..{COPIES_MAX}",
                next="--copies 5",
            )  # fmt: skip
        try:
            wanted = read_rules(rules)
        except OSError as error:
            raise cannot_read(rules, error.strerror, "name a file of rules") from None
        whole = trace_of_ledger(trace)
        found = settings_of([], set or [])
        if len(found) > 1:
            raise rejected("invalid-argument", "one value for each setting is tested", found=" ".join(set or []),
                           next="run it once for each")  # fmt: skip
        held = {str(key): str(value) for key, value in whole.head.get("settings", {}).items()}
        side = Side([], whole.jobs, whole.events, configs_of([held | found[0]])[0])
        until = whole.head.get("until_s")
        until_ms = None if until is None else int(until * 1000)
        raise_once()
        progress = progress_of("copies", "are played")
        judged = judge(wanted, side, copies, until_ms=until_ms, progress=progress)
        if progress is not None:
            sys.stderr.write(ERASED)
        if options.json:
            for each in judged:
                emit({"kind": "rule", **msgspec.to_builtins(each), "fails": each.fails})
        else:
            rows = [[one.rule, _is(one), one.jobs, f"{one.broken} of {one.copies}", _by(one.by)] for one in judged]
            print_out(table(["RULE", "IS", "JOBS", "BROKEN IN", "BY"], rows, numbers=("JOBS",)))
        for one in judged:
            if not one.jobs:
                print_err(f"{trace} has no job of which {one.rule} says anything")
        broken = next(((rule, each) for rule, each in zip(wanted, judged, strict=True) if each.fails), None)
        if broken is None:
            return 0
        if counter_example is not None:
            jobs, events = shrunk(broken[0], side, broken[1].copy, until_ms)
            _write(counter_example, jobs, events, until_ms)
            print_err(f"{counter_example}: {len(jobs)} of {len(whole.jobs)} jobs break {broken[1].rule}, too")
        return EXIT_FAILED

    return guarded(options, act)


def _is(judged: Judged) -> str:
    return "broken" if judged.fails else "kept" if judged.jobs else "no job"


def _by(by: dict[str, float]) -> str:
    return ", ".join(f"{kind.removesuffix('_wait_s')} {seconds:,.0f}s" for kind, seconds in by.items()) or "-"


def _write(path: Path, jobs: list[TraceJob], events: list[TraceEvent], until_ms: int | None) -> None:
    head: dict[str, Any] = {"trace": 1, "jobs": len(jobs)}
    if until_ms is not None:
        head["until_s"] = until_ms / 1000
    rows: list[dict[str, Any]] = [{"at_s": event.at_ms / 1000, event.kind: event.data} for event in events]
    rows += [
        {
            "at_s": job.at_ms / 1000, "runs_s": job.runs_ms / 1000, "tenant": job.tenant,
            "request": msgspec.to_builtins(job.request),
            "attempts": {key: (ms / 1000, code) for key, (ms, code) in job.attempts.items()},
        }
        for job in jobs
    ]  # fmt: skip
    rows.sort(key=lambda row: (row["at_s"], "runs_s" in row))
    try:
        path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in [head, *rows]))
    except OSError as error:
        raise cannot_write(path, error.strerror, "name another file") from None
