"""What a notebook shows of a client's objects, and a job that follows itself there."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from typing import TYPE_CHECKING, Any, Final

from moorage.client.changed import changed
from moorage.client.reported_words import reported_words
from moorage.schemas.errors import MoorageError
from moorage.schemas.job import QUEUED, TERMINAL

if TYPE_CHECKING:
    from moorage.schemas.answers.jobs import Explained

#: shortest time between two pictures of a job, in seconds
DRAW_S: Final = 0.5
#: most characters of an output, from its end, in the table of a result
TAIL_CHARACTERS: Final = 2_000


def in_notebook() -> bool:
    """Return whether IPython runs this process. Its loop waits for the code of a cell, so a cell may block it."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def table(title: str, rows: Mapping[str, str], below: str = "") -> str:
    """Return a table of names and values, as HTML; rows without a value are left out. `below` is HTML behind it."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:left;white-space:pre-wrap'>{escape(value)}</td></tr>"
        for name, value in rows.items()
        if value
    )
    return f"<table><caption>{escape(title)}</caption>{cells}</table>{below}"


def grid(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]], more: int = 0) -> str:
    """Return a table with a row for each of these, as HTML; columns without any value are left out. `more` is how many
    rows are not shown."""
    shown = [[("" if cell is None else str(cell)) for cell in row] for row in rows]
    kept = [at for at in range(len(heads)) if not shown or any(row[at] for row in shown)]
    left = "style='text-align:left'"
    head = "".join(f"<th {left}>{escape(heads[at])}</th>" for at in kept)
    body = "".join("<tr>" + "".join(f"<td {left}>{escape(row[at])}</td>" for at in kept) + "</tr>" for row in shown)
    below = f"<p>… and {more} more</p>" if more > 0 else ""
    return (
        f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"
    )


def tail(text: str) -> str:
    """Return the end of an output for a table."""
    shown = text.rstrip("\n")
    return shown if len(shown) <= TAIL_CHARACTERS else f"…{shown[-TAIL_CHARACTERS:]}"


def show(
    html: str,
    plain: str,
    changes: Callable[[], AsyncIterator[object]],
    draw: Callable[[], Awaitable[str]],
    begin: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    """Display `html`, and in the background what `draw` returns after each of the `changes`, until they end.

    `begin` starts that in the client's loop. Outside a notebook, as in IPython on a terminal, only print `plain`.
    """
    import IPython.display

    if getattr(IPython.get_ipython(), "kernel", None) is None:
        print(plain)
        return

    def drawn(html: str) -> dict[str, str]:
        return {"text/html": html, "text/plain": plain}

    display: Any = IPython.display.display
    handle = display(drawn(html), raw=True, display_id=True)
    begin(followed(changes, draw, lambda html: handle.update(drawn(html), raw=True)))


async def followed(
    changes: Callable[[], AsyncIterator[object]], draw: Callable[[], Awaitable[str]], put: Callable[[str], None]
) -> None:
    """Put what `draw` returns after changes, at most every `DRAW_S`, until they end or the client is closed."""
    async with changed(changes) as (event, listening):
        over = False
        while not over:
            await event.wait()
            event.clear()
            over = listening.done()  # the client was closed, or the job is over: the picture stays as it is
            with suppress(MoorageError, RuntimeError):  # what cannot be asked now is asked at the next change
                put(await draw())
            await asyncio.sleep(DRAW_S)


def picture(job: str, known: Mapping[str, str], explained: Explained) -> str:
    """Return a job's table from the answer of `explain`, with a bar of the replicas that are done if it has several.

    `known` has what its handle knows.
    """
    from moorage.schemas.answers.jobs import ReplicaCounts

    told = explained.replicas or ReplicaCounts()
    state, counts = explained.state, told.states
    done, of = sum(count for name, count in counts.items() if name in TERMINAL), sum(counts.values())
    rows = {
        **known,
        "worker": "" if of else known["worker"],  # of several replicas it is only the newest one's
        "state": state,
        "why": explained.means if state == QUEUED else explained.why,
        "done": f"{done} of {of}" if of else "",
        "reported": reported_words(explained.reported, of_several=bool(of)),
        **{name: _counted(count, told.ended.get(name, "")) for name, count in counts.items() if count},
    }
    return table(f"Job {job}", rows, f"<progress max='{of}' value='{done}'></progress>" if of else "")


def _counted(count: int, which: str) -> str:
    return f"{count}: {which}" if which else str(count)
