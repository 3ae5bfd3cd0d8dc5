"""`moorage ls --watch`: lists the jobs again whenever an event tells of a change."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, Final

from moorage.cli.framework.console import emit, say, tell
from moorage.cli.framework.options import RowOptions
from moorage.cli.framework.screen import APART_S, Screen
from moorage.cli.jobs.job_rows import counts_line, job_row, jobs_table, matching, no_jobs

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient

#: ages grow without an event; on a terminal they are drawn again this often
REDRAW_S: Final = 5.0


async def watch_jobs(client: AsyncClient, states: list[str], limit: int, options: RowOptions) -> None:
    """List the jobs until Ctrl-C: on a terminal redrawn in place, in a pipe a row for each job that changed, with
    --json whole answers."""
    screen = Screen(sys.stdout)
    tty = screen.live and not options.json and options.format is None
    shown: dict[str, tuple[Any, ...]] = {}
    changed = asyncio.Event()
    changed.set()
    listening = await client._wire.subscribe(client._wire.subjects.events(client.tenant), lambda _: changed.set())
    try:
        while True:
            try:
                async with asyncio.timeout(REDRAW_S if tty else None):
                    await changed.wait()
            except TimeoutError:
                pass  # only the ages are new
            changed.clear()
            answer = await client._wire.answer("ls", {"states": states, "limit": limit})
            rows = answer.data["jobs"]
            if options.json:
                emit(answer)
            elif tty:
                text = jobs_table(rows) if rows else no_jobs(client.tenant, states)
                counts = answer.data["counts"]
                unseen = matching(counts, states) - len(rows)
                screen.draw(text.splitlines(), unseen=unseen, tail=[counts_line(counts) or "no job yet"])
            else:
                _tell_changed(rows, shown, options, no_jobs(client.tenant, states))
            await asyncio.sleep(APART_S)
    finally:
        await listening.unsubscribe()


def _tell_changed(
    rows: list[dict[str, Any]], shown: dict[str, tuple[Any, ...]], options: RowOptions, none: str
) -> None:
    """Print the rows of jobs that have changed, oldest first. If there has been no job so far, `none` is said."""
    if not rows and not shown:
        say(f"{none}; each change of a job prints a row")
    for row in reversed(rows):
        seen = (row["state"], row["rev"])
        if shown.get(row["job"]) != seen:
            shown[row["job"]] = seen
            if not options.shown(None, [row]):
                tell("\t".join("-" if cell in (None, "") else str(cell).replace("\n", " ") for cell in job_row(row)))
    listed = {row["job"] for row in rows}
    for name in [name for name in shown if name not in listed]:
        del shown[name]
