"""A simulation as a picture: GPUs leased and jobs waiting over time, and how long each class of request waited.

Plain SVG 1.1, written by hand: three panels of lines and bars do not justify a plotting library. Colors are those of
Okabe and Ito, which color-blind readers tell apart; every series has a name in the legend, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from moorage.testing.simulate.measures import CLASSES, HOUR_MS, Report
from moorage.testing.simulate.world import Moment

WIDTH: Final = 960
#: vertical lines of one series; more than the picture has columns cannot be seen
COLUMNS: Final = 800
_LEFT, _RIGHT, _TOP, _GAP, _HEIGHT = 64, 16, 64, 56, 180
_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_INK, _FAINT, _PAPER = "#333333", "#dddddd", "#ffffff"

#: the most runs in one picture: as many as there are colours
SERIES_MAX: Final = len(_COLOURS)


class Series(NamedTuple):
    """One run: its name in the legend, its report and its timeline."""

    name: str
    report: Report
    points: Sequence[Moment]


def ticks(most: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers from 0 up to `most`: steps of 1, 2 or 5 times a power of 10.

    Only 0 if `most` is not above 0.
    """
    if most <= 0:
        return [0.0]
    rough = most / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [step * number for number in range(int(most / step + 1e-9) + 1)]


def chart(title: str, series: Sequence[Series]) -> str:
    """Return the picture of the first `SERIES_MAX` runs of one trace, as a whole SVG document."""
    series = series[:SERIES_MAX]
    end_h = max((run.points[-1].at_ms / HOUR_MS for run in series if run.points), default=1.0) or 1.0
    gpus = max((run.report.gpus for run in series), default=1)
    waiting = max((point.waiting for run in series for point in run.points), default=0)
    leased = [[(p.at_ms, p.leased_milli / 1000) for p in run.points] for run in series]
    queued = [[(p.at_ms, float(p.waiting)) for p in run.points] for run in series]
    panels = [
        _Panel(0, "GPUs leased", end_h, max(1, gpus)).lines(leased),
        _Panel(1, "jobs waiting", end_h, max(1, waiting)).lines(queued),
        _bars(2, series),
    ]
    height = _TOP + 3 * (_HEIGHT + _GAP)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
            f' font-family="sans-serif" font-size="12" fill="{_INK}" role="img" aria-label="{escape(title)}">',
            f'<rect width="{WIDTH}" height="{height}" fill="{_PAPER}"/>',
            _text(_LEFT, 20, title, size=15),
            *_legend(series),
            *panels,
            "</svg>\n",
        )
    )


def _legend(series: Sequence[Series]) -> list[str]:
    parts, x = [], _LEFT
    for number, run in enumerate(series):
        parts.append(f'<rect x="{x}" y="32" width="12" height="12" fill="{_COLOURS[number]}"/>')
        parts.append(_text(x + 18, 42, run.name))
        x += 40 + 7 * len(run.name)
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


class _Panel:
    """One diagram: `most` is the top of its scale, `end_h` the right end of its hours (0: it has none)."""

    def __init__(self, row: int, title: str, end_h: float, most: float) -> None:
        self._title = title
        self._end_ms = end_h * HOUR_MS
        self._most = most
        self._top = _TOP + row * (_HEIGHT + _GAP) + 16
        self.bottom = self._top + _HEIGHT
        self.wide = WIDTH - _LEFT - _RIGHT

    def scale(self) -> list[str]:
        parts = [_text(_LEFT, self._top - 6, self._title)]
        for value in ticks(self._most):
            y = self._at(value)
            parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_FAINT}"/>')
            parts.append(_text(_LEFT - 6, y + 4, f"{value:g}", anchor="end"))
        for hours in ticks(self._end_ms / HOUR_MS, 8) if self._end_ms else ():
            x = _LEFT + self.wide * hours * HOUR_MS / self._end_ms
            parts.append(_text(x, self.bottom + 16, f"{hours:g} h", anchor="middle"))
        return parts

    def bar(self, x: float, wide: float, value: float, longest: float, colour: str) -> list[str]:
        y, top, centre = self._at(value), self._at(longest), x + wide / 2
        return [
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{self.bottom - y:.1f}" fill="{colour}"/>',
            f'<line x1="{centre:.1f}" x2="{centre:.1f}" y1="{top:.1f}" y2="{self.bottom}" stroke="{colour}"/>',
        ]

    def lines(self, series: Sequence[Sequence[tuple[int, float]]]) -> str:
        parts = self.scale()
        for number, points in enumerate(series):
            path = " ".join(self._path(points))
            parts.append(f'<path d="{path}" fill="none" stroke="{_COLOURS[number]}" stroke-width="1.2"/>')
        return "\n".join(parts)

    def _path(self, points: Sequence[tuple[int, float]]) -> list[str]:
        """Return the SVG path of a step line; each column has its least and greatest value, so that no peak is lost."""
        columns: dict[int, tuple[float, float, float]] = {}
        for at_ms, value in points:
            column = int(COLUMNS * at_ms / self._end_ms)
            low, high, _ = columns.get(column, (value, value, value))
            columns[column] = (min(low, value), max(high, value), value)
        path: list[str] = []
        for column, (low, high, last) in columns.items():
            x = _LEFT + self.wide * column / COLUMNS
            if path:
                path.append(f"H{x:.1f}")
            path += [
                f"{'V' if path else f'M{x:.1f} '}{self._at(low):.1f}",
                f"V{self._at(high):.1f}",
                f"V{self._at(last):.1f}",
            ]
        return path

    def _at(self, value: float) -> float:
        return self._top + _HEIGHT * (1 - value / self._most)


def _bars(row: int, series: Sequence[Series]) -> str:
    """Return the bars of mean wait by class, one for each run, with its longest wait as a thin line."""
    names = [name for name, _ in CLASSES if any(name in run.report.classes for run in series)]
    groups = [[run.report.classes.get(name) for run in series] for name in names]
    most = max((one.wait_max_h for group in groups for one in group if one is not None), default=1.0) or 1.0
    panel = _Panel(row, "hours waited by class: mean (bar) and longest (line)", 0, most)
    parts = panel.scale()
    room = panel.wide / max(1, len(names))
    bar = min(48.0, room * 0.8 / max(1, len(series)))
    for place, (name, group) in enumerate(zip(names, groups, strict=True)):
        middle = _LEFT + room * (place + 0.5)
        parts.append(_text(middle, panel.bottom + 16, name, anchor="middle"))
        for number, one in enumerate(group):
            if one is not None:
                x = middle + bar * (number - len(group) / 2)
                parts += panel.bar(x, bar * 0.9, one.wait_mean_h, one.wait_max_h, _COLOURS[number])
    return "\n".join(parts)
