"""The table of jobs that `moorage ls` shows, once or again and again."""

from __future__ import annotations

from typing import Any, Final

from moorage.cli.framework.exit_codes import shell_code
from moorage.cli.framework.render import age, table
from moorage.cli.jobs.use import use_cell

COLUMNS: Final = ("JOB", "STATE", "GPU", "PRI", "TRY", "AGE", "USE", "CODE", "WORKER", "WHY")


def jobs_table(rows: list[dict[str, Any]]) -> str:
    return table(
        COLUMNS,
        [job_row(row) for row in rows],
        numbers=("PRI", "TRY", "AGE", "USE", "CODE"),
        optional=("TRY", "PRI", "CODE", "USE", "AGE"),
        shortened=("JOB",),
    )


def job_row(row: dict[str, Any]) -> list[Any]:
    """Return the cells of a job's row, one for each of `COLUMNS`."""
    return [
        row["job"],
        row["state"],
        row["gpu"],
        row["priority"],
        row["attempt"],
        age(row["age_ms"]),
        use_cell(row),
        code_cell(row["code"]),
        worker_cell(row),
        ended_by_itself(row["state"], row["code"], row["why"]),
    ]


def worker_cell(row: dict[str, Any]) -> str:
    """Return a job's worker, how many others it has, and whether it is simulated: `sim-0002 +3 sim`."""
    return (
        (row.get("worker") or "-")
        + (f" +{row['workers'] - 1}" if row.get("workers", 0) > 1 else "")
        + (" sim" if row.get("simulated") else "")
    )


def ended_by_itself(state: str, code: int | None, why: str) -> str:
    """Return the reason of an end, also of a command that ended by itself with a code, of which no reason is kept.

    The bare word `end` says only that the worker ended it as asked, which the state says.
    """
    if why in ("", "end"):
        return f"it ended by itself, with code {shell_code(code)}" if state == "FAILED" and code else ""
    return why


def no_jobs(tenant: str, states: list[str]) -> str:
    asked = f" in {', '.join(states)}" if states else ""
    return f"no jobs of tenant {tenant}{asked} in memory"


def matching(counts: dict[str, int], states: list[str]) -> int:
    """Return how many jobs are in these states, or in any state if none is named."""
    return sum(number for name, number in counts.items() if name in (states or counts))


def counts_line(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))


def code_cell(code: int | None) -> int | None:
    """Return an exit code for people; None where nothing ran."""
    return None if code is None else shell_code(code)
