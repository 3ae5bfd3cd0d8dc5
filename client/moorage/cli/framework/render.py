"""Makes text for people: tables without boxes, ages, states, cells. Nothing here has an effect; it only asks whether a
terminal reads."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeVar

from moorage.cli.framework.console import paint, plain
from moorage.cli.framework.wrapping import columns_of, cut_off, fitting, in_lines, padded
from moorage.client.durations import age, utc

if TYPE_CHECKING:
    from datetime import datetime

    from moorage.schemas.answers.jobs import Explained

__all__ = ["Rows", "age", "facts", "ordinal", "state", "table", "utc", "waits"]

T = TypeVar("T")

GAP: Final = "  "
#: hours below the second are shown with digits that count, down to the first
_HOURS_SHOWN: Final = 0.0001
_HOURS_SMALL: Final = 0.01
#: the state of a service that has no members, as no calls come
ASLEEP: Final = "asleep: the first call starts it"
#: the wished width of the last column; the least one at which its text is cut and not put into a line of its own
LAST_COLUMN_MIN: Final = 12
LAST_COLUMN_LEAST: Final = 4
#: how narrow a column may become whose cells lose their middle
SHORTENED_MIN: Final = 14
#: the wished width of a last column whose text goes on in further lines
WRAPPED_COLUMN_MIN: Final = 24

_STATE_STYLE: Final = {
    "RUNNING": "green",
    "SUCCEEDED": "green",
    "up": "green",
    "FAILED": "red",
    "TIMED_OUT": "red",
    "REJECTED": "red",
    "FROZEN": "cyan",
    "LOST_KEPT": "red",
    "lost": "red",
    "stale": "yellow",
    "not-heard": "yellow",
    "QUEUED": "yellow",
    "EXPIRED": "yellow",
    "draining": "yellow",
    "cordoned": "yellow",
    "leaving": "yellow",
    "agent-stopped": "yellow",
    "starts-fail": "red",
    "disk-full": "red",
    "CANCELLED": "dim",
    "left": "dim",
}


def hours(of: float) -> str:
    """Return hours with two decimals, below a hundredth with two digits that count."""
    return f"{of:.2g}" if _HOURS_SHOWN <= of < _HOURS_SMALL else f"{of:.2f}"


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    numbers: Sequence[str] = (),
    optional: Sequence[str] = (),
    shortened: Sequence[str] = (),
    wraps: bool = False,
    stream: TextIO | None = None,
) -> str:
    """Return rows under an upper-case header. On a terminal they are aligned, and the last column is cut to fit; in a
    pipe they are separated by tabs, uncut and without color.

    `numbers` names the columns that are aligned to the right. `optional` names the columns that a narrow terminal does
    not show; the first of them goes first, and the header, or a line below it, says which are gone. Then the cells of
    the columns in `shortened` lose their middle. With `wraps`, the last column continues on further lines instead of
    being cut. If the terminal is too narrow even so, each cell has a line of its own.
    """
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        return "\n".join(map(pipe_line, [header, *rows]))
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = {name: max(map(columns_of, column)) for name, *column in zip(header, header, *texts, strict=True)}
    made = Rows(
        header, numbers=numbers, optional=optional, shortened=shortened, widths=widths, wraps=wraps, stream=stream
    )
    return "\n".join(map(made.line, texts)) if texts else "\n".join(made.heading())


class Rows:
    """A table whose rows come one by one.

    On a terminal they stand under a header, and are fitted as in `table`. Each column is as wide as its widest cell so
    far, and at least as wide as `widths` says by the column's name. A terminal that is narrow at the first row does not
    show the columns in `optional`. In a pipe, rows are separated by tabs, uncut and without a header.
    """

    def __init__(
        self,
        header: Sequence[str],
        *,
        numbers: Sequence[str] = (),
        optional: Sequence[str] = (),
        shortened: Sequence[str] = (),
        widths: Mapping[str, int] | None = None,
        wraps: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._header = self._whole_header = list(header)
        self._numbers = numbers
        self._optional = optional
        self._shortened = shortened
        self._wraps = wraps
        known = {header[-1]: LAST_COLUMN_MIN, **(widths or {})}
        self._widths = [max(len(name), known.get(name, 0)) for name in header]
        self._begun = False

    def line(self, row: Sequence[Any]) -> str:
        """Return the row as one line or, if the terminal is too narrow, several. The first row of one line has the
        header before it."""
        if not self._stream.isatty():
            return pipe_line(row)
        if not self._begun:
            self._leave_out()
        columns, whole = shutil.get_terminal_size().columns, [_text(cell) for cell in row]
        texts = [text for text, name in zip(whole, self._whole_header, strict=True) if name in self._header]
        widths = [max(width, columns_of(text)) for width, text in zip(self._widths, texts, strict=True)]
        widths = _narrowed(widths, self._header, self._shortened, columns, self._wanted(widths[-1]))
        last = _room(columns, widths)
        if last < self._wanted(widths[-1], LAST_COLUMN_LEAST):  # the next row that fits has the header, if none had it
            return _record(self._whole_header, whole, columns, self._stream)
        heading = [] if self._begun else self.heading(widths)
        self._widths, self._begun = widths, True
        texts = [*map(_shortened, texts[:-1], widths), texts[-1]]
        first, *rest = in_lines(texts[-1], last, breaks=True) if self._wraps else [texts[-1]]
        line = _line([*texts[:-1], first], widths, self._header, self._numbers, last, self._stream)
        return "\n".join([*heading, line, *(" " * (columns - last) + each for each in rest)])

    def heading(self, widths: Sequence[int] = ()) -> list[str]:
        """Return the header, which names the columns that are left out, if need be in a line below it."""
        widths = widths or self._widths
        last = _room(shutil.get_terminal_size().columns, widths)
        header, below = self._header, list[str]()
        if left_out := ", ".join(name for name in self._whole_header if name not in header):
            whole = f"{header[-1]} (no {left_out})"
            if len(whole) <= last and header[-1] not in self._numbers:
                header = [*header[:-1], whole]
            else:
                below = [f"(no {left_out})"]
        lines = [_line(header, widths, self._header, self._numbers, last), *below]
        return [paint(line, "dim", self._stream) for line in lines]

    def _wanted(self, width: int, most: int = 0) -> int:
        """Return how wide the last column should be where its cells have this width: a number is never cut."""
        if self._header[-1] in self._numbers:
            return width
        return min(width, most or (WRAPPED_COLUMN_MIN if self._wraps else LAST_COLUMN_MIN))

    def _leave_out(self) -> None:
        for name in self._optional:
            if _room(shutil.get_terminal_size().columns, self._widths) >= self._wanted(self._widths[-1]):
                return
            if name in self._header:  # else it was left out at an earlier row, which was no line
                at = self._header.index(name)
                self._header, self._widths = _without(self._header, at), _without(self._widths, at)


def _room(columns: int, widths: Sequence[int]) -> int:
    """Return how wide the last column can be, beside the columns before it."""
    return columns - sum(widths[:-1]) - len(GAP) * (len(widths) - 1)


def _narrowed(
    widths: Sequence[int], header: Sequence[str], shortened: Sequence[str], columns: int, wanted: int
) -> list[int]:
    """Return the widths with these columns narrower, down to `SHORTENED_MIN`, until the last one has `wanted`."""
    found = list(widths)
    for name in shortened:
        lacks = wanted - _room(columns, found)
        if lacks > 0 and name in header:
            at = list(header).index(name)
            found[at] = max(min(found[at], SHORTENED_MIN), found[at] - lacks)
    return found


def _shortened(text: str, width: int) -> str:
    """Return the text, without its middle if it is wider than `width`."""
    if columns_of(text) <= width:
        return text
    behind = (width - 1) // 2
    return f"{fitting(text, width - 1 - behind)}…{fitting(text[::-1], behind)[::-1]}"


def _record(header: Sequence[str], row: Sequence[str], columns: int, stream: TextIO) -> str:
    """Return a row as lines: its first cell, and below it a line for each further cell that has a value."""
    width = max(len(name) for name in header)
    first = f"{header[0]} {row[0]}"
    lines = [first if columns_of(first) <= columns else row[0]]
    for name, cell in zip(header[1:], row[1:], strict=True):
        if cell == "-":
            continue
        first, *rest = in_lines(cell, max(columns - width - 2 * len(GAP), 1), breaks=True)
        shown = state(first, stream) if name == "STATE" else first
        lines.append(f"{GAP}{paint(name.ljust(width), 'dim', stream)}{GAP}{shown}")
        lines += [" " * (width + 2 * len(GAP)) + line for line in rest]
    return "\n".join(lines)


def _without(cells: Sequence[T], at: int) -> list[T]:
    return [*cells[:at], *cells[at + 1 :]]


def _line(
    row: Sequence[str],
    widths: Sequence[int],
    header: Sequence[str],
    numbers: Sequence[str],
    last: int,
    stream: TextIO | None = None,
) -> str:
    cells = []
    for at, (cell, width) in enumerate(zip(row, widths, strict=True)):
        is_last = at == len(row) - 1
        if is_last:
            cell = cut_off(cell, last)
        is_number = header[at] in numbers
        text = cell if is_last and not is_number else padded(cell, width, right=is_number)
        cells.append(state(text, stream) if stream is not None and header[at] == "STATE" else text)
    return GAP.join(cells).rstrip()


def pipe_line(cells: Sequence[Any]) -> str:
    """Return cells as a line of a pipe: what would end a cell or the line is a blank."""
    return "\t".join(_text(cell).replace("\t", " ") for cell in cells)


def _text(cell: Any) -> str:
    if cell is None or cell == "":
        return "-"
    text = (",".join(map(str, cell)) or "-") if isinstance(cell, (list, tuple)) else str(cell)
    return plain(text.replace("\n", " "))


def state(text: str, stream: TextIO) -> str:
    """Return a state in its color, or unchanged if it has none or the stream shows no colors."""
    return paint(text, _STATE_STYLE.get(text.strip(), ""), stream)


def facts(pairs: Sequence[tuple[str, Any]], stream: TextIO | None = None) -> str:
    """Return names and values, one pair a line; those without a value are left out."""
    stream = sys.stdout if stream is None else stream
    shown = [(name, _text(value)) for name, value in pairs if value not in (None, "", [], {})]
    if not stream.isatty():
        return "\n".join(f"{name}\t{value}" for name, value in shown)
    width = max((len(name) for name, _ in shown), default=0)
    room = max(shutil.get_terminal_size().columns - width - len(GAP), LAST_COLUMN_MIN)
    lines = []
    for name, value in shown:
        indent = " " * width + GAP
        # a word that does not fit begins in a line of its own
        if max(map(columns_of, value.split()), default=0) > room:
            indent = GAP
            first, *rest = "", *in_lines(value, max(room + width, 1))
        else:
            first, *rest = in_lines(value, room)
        first = state(first, stream) if name == "state" else first
        lines.append(f"{paint(name.ljust(width), 'dim', stream)}{GAP}{first}".rstrip())
        lines += [indent + line for line in rest]
    return "\n".join(lines)


def wrapped(text: str, indent: int) -> list[str]:
    """Return the text in lines that fit a terminal beside an indent of so many characters, broken between words."""
    return in_lines(text, max(shutil.get_terminal_size().columns - indent, LAST_COLUMN_MIN)) or [""]


def waits(why: Explained) -> str:
    """Return why a job waits as one line, from the answer of `explain`: `2nd of 5 ~4m busy: needs 1 more H100 on one
    host`."""
    if is_asleep(why):
        return ASLEEP
    place = place_of(why) if why.position is not None else ""
    about = f"~{age(why.starts.p50_ms)}" if why.starts is not None else ""
    told = why.because if why.after or why.not_before_ms else why.means
    reason = f"{why.reason}: " + (f"needs {why.needs}" if why.needs else told)
    return GAP.join(filter(None, (place, about, reason)))


def is_asleep(why: Explained) -> bool:
    """Return whether a job is a service without members, as no calls come, from the answer of `explain`."""
    from moorage.schemas.reasons import SCALED

    return why.reason == SCALED.name and why.scaled is not None and why.scaled.wanted == 0


def place_of(why: Explained) -> str:
    """Return a job's place in the queue: `2nd of 5`. In a very long queue, these are counts of replicas and not of
    jobs."""
    place = f"{ordinal(why.position or 0)} of {why.queued}"
    return f"{place} replicas" if why.queued_of == "replicas" else place


def ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def day_and_time(moment: datetime, now: datetime) -> str:
    """Return a future moment as a person says it, in the time zone of `now`: `today 22:00`, `2026-11-27 22:00`."""
    days = (moment.date() - now.date()).days
    return f"{('today', 'tomorrow')[days] if days in (0, 1) else moment.date()} {moment:%H:%M}"


def utc_ms(milliseconds: int) -> str:
    """Return milliseconds since 1970 as `2026-11-20T11:36:02.507Z`."""
    return f"{utc(milliseconds)[:-1]}.{milliseconds % 1000:03d}Z"


def ports_words(ports: Mapping[str, str]) -> str:
    """Return where the ports of a container are reached: `8080 at 10.0.0.5:30001`."""
    return ", ".join(f"{own} at {where}" for own, where in ports.items())
