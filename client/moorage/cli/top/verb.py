"""`moorage top`: the whole fleet on one screen."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, has_colour, is_live, paint, tell
from moorage.cli.framework.options import DEFAULTS, Options, guarded, with_client
from moorage.client.errors import rejected

if TYPE_CHECKING:
    from moorage.cli.top.feed import Feed
    from moorage.client.client import AsyncClient

#: what is printed into a pipe has no terminal's size
COLUMNS: Final = 80
ROWS: Final = 24


def top(
    *,
    once: Annotated[bool, Parameter(help="Print one picture of the fleet, and end.")] = False,
    ascii: Annotated[bool, Parameter(help="Draw with plain ASCII; by default where the terminal has no more.")] = False,
    filter: Annotated[
        str, Parameter(help="Only rows with this text, whatever its case; with ! before it, those without.")
    ] = "",
    options: Options = DEFAULTS,
) -> int:
    """Show the fleet on one screen: what is wrong, what fits now, who waits and why, who holds GPUs without using them.

    It only reads. An operator's key shows all, a tenant's the jobs of the tenant, an observer's the fleet without jobs.
    Keys: 1 to 5 show and hide a part, / filters, Enter opens a job, ? helps, q quits. With --once, in a pipe, a picture
    of 80 columns and 24 rows is printed; with --json, what it shows. The live screen needs the extra top.
    """

    async def work(client: AsyncClient) -> int | None:
        from moorage.cli.top.feed import Feed

        feed = Feed(client)
        await feed.open()
        try:
            if once or options.json:
                await feed.first()
                if options.json:
                    emit(feed.view())
                else:
                    _print(feed, filter, ascii)
                return None
            from moorage.cli.top.app import TopApp

            app = TopApp(client, feed, filter, ascii=ascii or not in_blocks())
            await app.run_async(mouse=False)
            return app.return_code
        finally:
            await feed.close()

    def act() -> int:
        if not (once or options.json):
            _need_a_screen()
        return with_client(options, work)

    return guarded(options, act)


def _need_a_screen() -> None:
    """Raise what says how to go on, unless there are a terminal and the package that draws on it."""
    from moorage.schemas.optional import optional

    if not is_live(sys.stdout) or not sys.stdin.isatty():
        raise rejected(
            "failed-precondition", "the live screen needs a terminal", next="print one picture: moorage top --once"
        )
    optional("textual", "'moorage[top]'")


def in_blocks() -> bool:
    """Return whether the output's encoding has the signs that are drawn."""
    try:
        "·▁█─…│".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _print(feed: Feed, wanted: str, ascii: bool) -> None:
    from moorage.cli.top.draw import Wishes, draw, panes_at_first

    columns, rows = (COLUMNS, ROWS) if not sys.stdout.isatty() else shutil.get_terminal_size()
    rows -= sys.stdout.isatty()  # the prompt comes below it
    wishes = Wishes(panes_at_first(columns, rows), wanted, ascii=ascii or not in_blocks())
    for line in draw(feed.view(), columns, rows, wishes).lines:
        if has_colour(sys.stdout):
            tell("".join(paint(text, style, sys.stdout) for text, style in line).rstrip())
        else:
            tell("".join(text for text, _ in line).rstrip())
