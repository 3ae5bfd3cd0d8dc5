"""`moorage ls --watch`: lists the jobs again whenever an event tells of a change."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any, Final

from moorage.cli.framework.console import emit, print_err, print_out
from moorage.cli.framework.options import RowOptions
from moorage.cli.framework.render import pipe_line
from moorage.cli.framework.screen import APART_S, Screen
from moorage.cli.jobs.job_rows import counts_line, job_row, matching
from moorage.client.answers import JobList
from moorage.client.errors import Overloaded, Unreachable
from moorage.client.reading import as_struct

if TYPE_CHECKING:
    from moorage.cli.jobs.listing import Listing
    from moorage.client.client import AsyncClient

#: ages grow without an event; on a terminal they are drawn again this often
REDRAW_S: Final = 5.0
#: an event may fall into a lost connection; in a pipe, the jobs are listed again this often without one
ASK_AGAIN_S: Final = 10.0


async def watch_jobs(client: AsyncClient, listing: Listing, options: RowOptions) -> None:
    """List the jobs until Ctrl-C: on a terminal redrawn in place, in a pipe a row for each job that changed, with
    --json whole answers."""
    screen = Screen(sys.stdout)
    tty = screen.live and not options.json and options.format is None
    shown: dict[tuple[str, str], tuple[Any, ...]] = {}
    before: list[tuple[Any, ...]] = []
    has_told = False
    changed = asyncio.Event()
    changed.set()
    subject = client._wire.subjects.events("*" if listing.of_all else client.tenant)
    listening = await client._wire.subscribe(subject, lambda _: changed.set())
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REDRAW_S if tty else ASK_AGAIN_S):
                    await changed.wait()
            has_heard = changed.is_set()
            changed.clear()
            try:
                answer = await listing.ask(runs_first=tty)
            except (Overloaded, Unreachable):
                if has_heard or tty:
                    raise
                continue  # while nothing happens, a pipe outlasts a leader that is away, or too busy to answer
            listed = as_struct(JobList, answer.data)
            rows, counts = listed.jobs, listed.counts
            if options.json:
                states = [(row.tenant, row.job, row.state, row.rev) for row in rows]
                if has_heard or states != before:
                    emit(answer)
                before = states
            elif tty:
                text = listing.table(rows) if rows else listing.none()
                unseen = 0 if listing.reason else matching(counts, listing.states) - len(rows)  # counts know no reason
                screen.draw(text.splitlines(), unseen=unseen, tail=[counts_line(counts) or "no job yet"])
            else:
                if not rows and not has_told:  # said once: the jobs are listed again and again
                    print_err(f"{listing.none()}; each change of a job prints a row")
                has_told = True
                _print_changed(listed, shown, options)
            await asyncio.sleep(APART_S)
    finally:
        await listening.unsubscribe()


def _print_changed(listed: JobList, shown: dict[tuple[str, str], tuple[Any, ...]], options: RowOptions) -> None:
    """Print the rows of jobs that have changed, oldest first."""
    for row, data in zip(reversed(listed.jobs), reversed(listed.data["jobs"]), strict=True):
        seen, of = (row.state, row.rev), (row.tenant, row.job)
        if shown.get(of) != seen:
            shown[of] = seen
            if not options.shown(None, [data]):
                print_out(pipe_line(job_row(row)))
    there = {(row.tenant, row.job) for row in listed.jobs}
    for name in [name for name in shown if name not in there]:
        del shown[name]
