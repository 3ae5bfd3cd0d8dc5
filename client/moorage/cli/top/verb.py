"""`moorage top`: the whole fleet on one screen."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Final

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, has_colour, is_live, paint, print_out
from moorage.cli.framework.fleets import are_several, each_of
from moorage.cli.framework.options import DEFAULTS, Options, guarded, with_client
from moorage.client.errors import NoScheduler, rejected

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.client.view.view import View

#: what is printed into a pipe has no terminal's size
COLUMNS: Final = 80
ROWS: Final = 24
#: how long the first picture of the live screen waits for answers
FIRST_S: Final = 1.0


def top(
    *,
    once: Annotated[bool, Parameter(help="Print one picture of the fleet, and end.")] = False,
    ascii: Annotated[bool, Parameter(help="Draw with plain ASCII; by default where the terminal has no more.")] = False,
    filter: Annotated[
        str, Parameter(help="Only rows with this text, whatever its case; with ! before it, those without.")
    ] = "",
    at: Annotated[
        str | None,
        Parameter(
            help="As it was then, from the history alone: 14:03, 2026-11-21T14:03, or 2h ago.", value="TIME", timed=True
        ),
    ] = None,
    operate: Annotated[
        bool, Parameter(help="Allow an operator's acts behind `:`, each with the name typed again.")
    ] = False,
    options: Options = DEFAULTS,
) -> int:
    """Show the fleet on one screen: what is wrong, what fits now, who waits and why, who holds GPUs without using them.

    It only reads, unless --operate is given. An operator's key shows all, a tenant's the jobs of the tenant, an
    observer's the fleet without jobs. Keys: 1 to 5 show and hide a part, / filters, : goes to a name or a time, s
    sorts, Enter opens a job, ? helps, q quits. With --once, in a pipe, a picture of 80 columns and at most 24 rows is
    printed; with --json, what it shows. With --nats A --nats B, the screen has a line for each fleet and a column for
    it in each part, and --once prints a picture of each. The live screen needs the extra top.
    """

    at_ms: int | None = None

    async def work(client: AsyncClient) -> int | None:
        from moorage.cli.top.feed import Feed

        feed = Feed(client)
        await feed.open()
        try:
            past = None if at_ms is None else await feed.past(at_ms)
            if once or options.json:
                if past is None:
                    await feed.first()
                view = feed.view() if past is None else past
                if options.json:
                    emit(view)
                else:
                    _print(view, filter, ascii)
                return None
            with contextlib.suppress(NoScheduler, TimeoutError):  # the screen says so, and asks again
                async with asyncio.timeout(FIRST_S):
                    await feed.ask(whys=False)
            with _screen_of_its_own():  # at once: what draws from then on takes longer to load than the first answer
                _print(feed.view() if past is None else past, filter, ascii)
                from moorage.cli.top.app import TopApp
                from moorage.cli.top.watched import Watched

                app = TopApp(
                    [Watched(client, feed)], filter, ascii=ascii or not in_blocks(), past=past, operates=operate
                )
                await app.run_async(mouse=False)
            return app.return_code
        finally:
            await feed.close()

    def act() -> int:
        nonlocal at_ms
        if at is not None:
            from moorage.client.moments import past_ms

            at_ms = past_ms(at)
        if are_several(options):
            if once or options.json:
                return _each(options, work)
            _refuse_for_several(at=at, operate=operate)
            _need_a_screen()
            return _screen_of(options, filter, ascii or not in_blocks())
        if not (once or options.json):
            _need_a_screen()
        return with_client(options, work)

    return guarded(options, act)


def _each(options: Options, work: Callable[[AsyncClient], Awaitable[int | None]]) -> int:
    """Print a picture of each fleet, with its name above; 0 if one of them has answered."""
    codes = []
    for name, each in each_of(options):
        if not options.json:
            print_out(f"== {name} ==")
        codes.append(with_client(each, work))
    return 0 if 0 in codes else codes[0]


def _screen_of(options: Options, wanted: str, ascii: bool) -> int:
    """Show several fleets on the live screen until it is left; one that does not answer is a line there."""
    from moorage.cli.framework.interrupts import run
    from moorage.cli.top.app import TopApp
    from moorage.cli.top.watched import OneOfSeveral

    async def show() -> int | None:
        app = TopApp([OneOfSeveral(name, each) for name, each in each_of(options)], wanted, ascii=ascii)
        await app.run_async(mouse=False)
        return app.return_code

    with _screen_of_its_own():
        return run(show()) or 0


def _refuse_for_several(*, at: str | None, operate: bool) -> None:
    """Raise `Rejected` for what is of one fleet alone."""
    for option, is_given in (("--at", at is not None), ("--operate", operate)):
        if is_given:
            raise rejected("invalid-argument", f"{option} is about one fleet", next="give --nats once")


def _need_a_screen() -> None:
    """Raise what says how to go on, unless there are a terminal and the package that draws on it."""
    from moorage.schemas.optional import optional

    if not is_live(sys.stdout) or not sys.stdin.isatty():
        raise rejected(
            "failed-precondition", "the live screen needs a terminal", next="print one picture: moorage top --once"
        )
    if find_spec("textual") is None:  # it is loaded behind the first picture
        optional("textual", extra="top")


@contextlib.contextmanager
def _screen_of_its_own() -> Iterator[None]:
    """Leave the terminal as it was: what is drawn is on its other screen."""
    sys.stdout.write("\x1b[?1049h\x1b[H\x1b[?25l")
    try:
        yield
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()


def in_blocks() -> bool:
    """Return whether the output's encoding has the signs that are drawn."""
    try:
        "·▁█─…│".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _print(view: View, wanted: str, ascii: bool) -> None:
    from moorage.cli.top.draw import Wishes, draw, panes_at_first

    columns, rows = (COLUMNS, ROWS) if not sys.stdout.isatty() else shutil.get_terminal_size()
    rows -= sys.stdout.isatty()  # the prompt comes below it
    wishes = Wishes(panes_at_first(columns, rows), wanted, ascii=ascii or not in_blocks())
    for line in draw(view, columns, rows, wishes).lines:
        if has_colour(sys.stdout):
            print_out("".join(paint(text, style, sys.stdout) for text, style in line).rstrip())
        else:
            print_out("".join(text for text, _ in line).rstrip())
    sys.stdout.flush()
