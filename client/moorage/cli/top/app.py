"""The live screen of `moorage top`: it reads keys and draws the picture; what the picture is, `draw` decides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input, Static

from moorage.cli.framework.console import error_line, plain
from moorage.cli.framework.interrupts import ENDING
from moorage.cli.top.commands import WORDS, Act, Command, command_in, perform
from moorage.cli.top.draw import PANES, SIGNS, SORTS, Drawn, Fleets, Line, Target, Wishes, draw_all, panes_at_first
from moorage.cli.top.job import job_text
from moorage.cli.top.worker import worker_text
from moorage.client.moments import past_ms
from moorage.schemas.errors import MoorageError
from moorage.schemas.printable import shown

if TYPE_CHECKING:
    from moorage.cli.top.watched import Watched
    from moorage.client.client import AsyncClient
    from moorage.client.view.view import View

#: seconds between two pictures: the leader sends two frames a second
PICTURE_S: Final = 0.5
#: seconds between two looks at an open job or worker
ASKED_S: Final = 2.0
_STYLES: Final = {
    "": Style(),
    **{name: Style.parse(name) for name in ("dim", "bold", "red", "green", "yellow", "cyan", "reverse")},
}
HELP: Final = f"""\
moorage top: the whole fleet on one screen. It only reads, unless it was started with --operate.

  1 to 5      show and hide a part: {", ".join(f"{number} {name}" for number, name in PANES.items())}
  /           only rows with this text, in all parts; !text: those without it; Enter, Esc
  :           go to a job, worker, tenant or part by its name, or the beginning of one;
              at 14:03, at 2h: as it was then, from the history alone; now: back
              with --operate: drain, cordon, uncordon n07; hold, release vision/train-42, then why
  s           sort the jobs: {", ".join(SORTS)}
  up, down    choose a job (also k, j)
  Enter       the job: why it waits and what would help, its history, use and output
  Esc         back; without an open job, no filter
  q, Ctrl-C   end

Signs, one for each GPU
  {SIGNS}
  f kept for a frozen job  - not lent
Behind a worker's name, where there are many: / cordoned or draining  ? not heard  ! starts fail  - stopped

An operator's key shows all, a tenant's the jobs of the tenant, an observer's the fleet without jobs.
"""


class Picture(Widget):
    """The picture, drawn line by line: only lines that changed are written to the terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._strips: list[Strip] = []
        self.lines: list[Line] = []

    def show(self, drawn: Drawn) -> None:
        """Take the lines of a new picture."""
        before, self.lines = self.lines, drawn.lines
        self._strips = [_strip(line, self.size.width) for line in drawn.lines]
        changed = [
            Region(0, at, self.size.width, 1)
            for at, line in enumerate(drawn.lines)
            if at >= len(before) or before[at] != line
        ]
        if len(before) != len(drawn.lines):
            self.refresh()
        elif changed:
            self.refresh(*changed)

    def again(self) -> None:
        """Forget what is drawn: the terminal has another size."""
        self.lines = []

    def render_line(self, y: int) -> Strip:
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width)


def _strip(line: Line, width: int) -> Strip:
    return Strip([Segment(shown(text), _STYLES[style]) for text, style in line]).adjust_cell_length(width)


class Page(Screen[None]):
    """A text over the whole screen that is scrolled with the arrows: the help, or a job."""

    AUTO_FOCUS = "VerticalScroll"  # the arrows scroll
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "app.pop_screen", "back")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(Text.from_ansi(self.text), id="text")
        yield Static("Esc back  arrows scroll", id="keys")

    def show(self, text: str) -> None:
        """Show another text in its place."""
        if text != self.text:
            self.text = text
            self.query_one("#text", Static).update(Text.from_ansi(plain(text)))


class AskedPage(Page):
    """A job or a worker, asked for again and again."""

    def __init__(self, name: str, ask: Callable[[], Awaitable[str]]) -> None:
        super().__init__(f"asking for {name}")
        self._text = ask

    def on_mount(self) -> None:
        self._ask()
        self.set_interval(ASKED_S, self._ask)

    def _ask(self) -> None:
        self.run_worker(self._asked(), group="asked", exclusive=True)

    async def _asked(self) -> None:
        try:
            self.show(await self._text())
        except MoorageError as error:
            self.show(error_line(error))


class TopApp(App[None]):
    """The live screen of a fleet whose feed is open, or of several fleets."""

    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None  # else the hidden line of the filter would take the keys
    CSS = """
    Screen, Picture, VerticalScroll, Static, Input { background: ansi_default; color: ansi_default; }
    Picture { height: 1fr; width: 1fr; }
    VerticalScroll { height: 1fr; scrollbar-size-vertical: 1; }
    #keys { dock: bottom; height: 1; }
    Input { dock: bottom; height: 1; border: none; padding: 0; display: none; }
    Input.asked { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"pane({number})", name) for number, name in PANES.items()),
        Binding("slash", "filter", "filter"),
        Binding("colon", "command", "go"),
        Binding("s", "sort", "sort"),
        Binding("question_mark", "help", "help"),
        Binding("down,j", "move(1)", "down"),
        Binding("up,k", "move(-1)", "up"),
        Binding("enter", "open", "open"),
        Binding("escape", "unfilter", "no filter"),
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", priority=True),
    ]

    def __init__(
        self,
        fleets: Sequence[Watched],
        filter: str = "",
        *,
        ascii: bool = False,
        past: View | None = None,
        operates: bool = False,
    ) -> None:
        super().__init__(ansi_color=True)
        self._fleets = fleets
        self._filter = filter
        self._ascii = ascii
        self._past = past  # a moment of the past in place of the present
        self._panes: set[int] | None = None
        self._cursor: Target | None = None
        self._targets: list[Target] = []
        self._trouble = ""
        self._operates = operates
        self._sort = next(iter(SORTS))
        self._asked: Act | None = None  # whose name is to be typed again
        self._said = ""  # what came of the last command, until the next key

    def compose(self) -> ComposeResult:
        yield Picture()
        yield Input(id="filter", placeholder="only rows with this text; !text: those without it", compact=True)
        yield Input(id="command", placeholder=WORDS, compact=True)
        yield Input(id="again", compact=True)

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        for number in ENDING[1:]:  # else they would leave the terminal as the screen has it
            loop.add_signal_handler(number, partial(self.exit, return_code=128 + number))
        for each in self._fleets:
            self.run_worker(each.keep_asking(self._show_error), group=f"feed {each.name}")
        self.set_interval(PICTURE_S, self.draw)
        self.call_after_refresh(self.draw)

    def on_unmount(self) -> None:
        for number in ENDING[1:]:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _show_error(self, error: MoorageError) -> None:
        self._trouble = error_line(error)

    def on_resize(self, _: events.Resize) -> None:
        self.screen_stack[0].query_one(Picture).again()
        self.call_after_refresh(self.draw)

    def draw(self) -> None:
        """Draw this moment."""
        picture = self.screen_stack[0].query_one(Picture)
        columns, rows = picture.size
        if not columns or self.screen is not self.screen_stack[0]:
            return
        panes = panes_at_first(columns, rows) if self._panes is None else self._panes
        wishes = Wishes(
            panes, self._filter, self._cursor, self._ascii, live=True, sort=self._sort, operates=self._operates
        )
        drawn = draw_all(self._told(), columns, rows, wishes)
        self._targets = drawn.targets
        one = self._fleets[0].feed if len(self._fleets) == 1 else None
        if self._trouble and one is not None and one.is_troubled:
            drawn.lines[-1] = [(self._trouble[:columns], "red")]
        elif self._said:
            drawn.lines[-1] = [(self._said[:columns], "bold")]
        picture.show(drawn)

    def _told(self) -> Fleets:
        """Return what is seen of each fleet. Where there is but one, its last view stands while it does not answer."""
        if self._past is not None:
            return [("", self._past)]
        if len(self._fleets) == 1 and (feed := self._fleets[0].feed) is not None:
            return [("", feed.view())]
        return [(each.name, each.told()) for each in self._fleets]

    def _client_of(self, name: str) -> AsyncClient | None:
        """Return the client of a fleet; None, which the last line says, if it does not answer."""
        client = next((each.client for each in self._fleets if each.name == name), None)
        if client is None:
            self._show_note(f"{name} does not answer")
        return client

    def _show_note(self, text: str) -> None:
        self._said = text
        self.draw()

    # --------------------------------------------------------------------------------------------------- what keys do

    def action_pane(self, number: int) -> None:
        """Show a part that is hidden, hide one that is shown."""
        size = self.screen_stack[0].query_one(Picture).size
        panes = set(panes_at_first(*size)) if self._panes is None else self._panes
        self._panes = panes ^ {number}
        self.draw()

    def action_move(self, by: int) -> None:
        """Put the cursor on the next job, or on the one before."""
        if not self._targets:
            return
        at = self._targets.index(self._cursor) + by if self._cursor in self._targets else (0 if by > 0 else -1)
        self._cursor = self._targets[at % len(self._targets)]
        self.draw()

    def action_open(self) -> None:
        """Open the job under the cursor."""
        if self._cursor is not None and self.screen is self.screen_stack[0]:
            tenant, job, fleet = self._cursor
            if (client := self._client_of(fleet)) is None:
                return
            text = partial(job_text, client, tenant, job, ascii=self._ascii)
            self.push_screen(AskedPage(f"{job} of {tenant}", text))

    def action_help(self) -> None:
        """Show the keys and the signs."""
        if self.screen is self.screen_stack[0]:
            self.push_screen(Page(HELP))

    def action_sort(self) -> None:
        """Sort the jobs in the next way."""
        names = list(SORTS)
        self._sort = names[(names.index(self._sort) + 1) % len(names)]
        self._show_note(f"jobs by {self._sort}")

    def action_filter(self) -> None:
        """Ask for the text of a filter, in the last line."""
        self._ask_for("filter", self._filter)

    def action_command(self) -> None:
        """Ask for where to go, or what to do, in the last line."""
        if self.screen is self.screen_stack[0]:
            self._ask_for("command")

    def _ask_for(self, name: str, text: str = "", placeholder: str = "") -> None:
        self._said = ""
        asked = self.query_one(f"#{name}", Input)
        asked.value = text
        asked.placeholder = placeholder or asked.placeholder
        asked.add_class("asked")
        asked.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "filter":
            self._filter = event.value
            self.draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._end_asking()
        if event.input.id == "command" and event.value.strip():
            views = [(name, view) for name, view in self._told() if not isinstance(view, str)]
            self._obey(*command_in(event.value, views))
        elif event.input.id == "again":
            self._confirmed(event.value.strip())

    def _end_asking(self) -> None:
        for asked in self.query(Input):
            asked.remove_class("asked")
        self.set_focus(None)
        self.draw()

    def action_unfilter(self) -> None:
        """End the filter, and what is asked for in the last line; or leave the past."""
        asking = any(asked.has_class("asked") for asked in self.query(Input))
        if not asking and not self._filter and self._past is not None:
            self._past = None
        self._asked, self._said = None, ""
        self._filter = self.query_one("#filter", Input).value = ""
        self._end_asking()

    # ----------------------------------------------------------------------------------------------------- commands

    def _obey(self, command: Command, fleet: str) -> None:
        if command.trouble:
            self._show_note(command.trouble)
        elif command.job is not None:
            self._cursor = command.job._replace(fleet=fleet)
            self.action_open()
        elif command.worker:
            if (client := self._client_of(fleet)) is not None:
                self.push_screen(AskedPage(command.worker, partial(worker_text, client, command.worker)))
        elif command.tenant:
            self._filter = command.tenant
            self.draw()
        elif command.pane:
            self._panes = {command.pane}
            self.draw()
        elif command.now:
            self._past = None
            self.draw()
        elif command.at and len(self._fleets) > 1:
            self._show_note("the past is of one fleet: give --nats once")
        elif command.at:
            self.run_worker(self._go_to(command.at), group="past", exclusive=True)
        elif command.act is not None:
            self._begin(command.act)

    async def _go_to(self, moment: str) -> None:
        try:
            at_ms = past_ms(moment)
            self._show_note(f"reading the history of {moment}")
            feed = self._fleets[0].feed
            assert feed is not None
            self._past = await feed.past(at_ms)
            self._show_note("")
        except MoorageError as error:
            self._show_note(error_line(error))

    def _begin(self, act: Act) -> None:
        if not self._operates:
            self._show_note(f"this screen only reads; to {act.verb}, start it with moorage top --operate")
            return
        self._asked = act
        self._ask_for("again", placeholder=f"to {act.verb} {act.name}, type its name again; Esc: not")

    def _confirmed(self, name: str) -> None:
        act, self._asked = self._asked, None
        if act is None:
            return
        if name != act.name:
            self._show_note(f"not done: {name or 'nothing'} is not {act.name}")
            return
        self.run_worker(self._perform(act), group="act")

    async def _perform(self, act: Act) -> None:
        try:
            if (client := self._client_of("")) is not None:  # of several fleets, none is acted on
                self._show_note(await perform(client, act))
        except MoorageError as error:
            self._show_note(error_line(error))
