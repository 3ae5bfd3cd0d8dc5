"""A sweep as a grid of letters in a terminal, at most twenty lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moorage.client.view.grid import WORDS, grid

if TYPE_CHECKING:
    from moorage.client.answers import JobInfo

LINES_MAX: Final = 20
#: replicas of which a line says enough
FEW: Final = 16
_WIDE: Final = 100


def grid_lines(shown: JobInfo, columns: int) -> list[str]:
    """Return what the letters mean, and lines that begin with the number of their first replica; [] for a job of few
    replicas."""
    label = len(str(max((last for _, last in shown.numbers), default=0)))
    wide = max(10, min(_WIDE, (columns - label - 1) // 10 * 10))
    drawn = grid(shown, LINES_MAX * wide)
    if drawn is None or (drawn.each == 1 and len(drawn.letters) <= FEW):
        return []
    legend = "  ".join(f"{letter} {WORDS[letter]}" for letter in drawn.counts)
    several = f"  (a letter is {drawn.each} replicas, the worst of them)" if drawn.each > 1 else ""
    firsts = drawn.firsts(wide)
    return [
        legend + several,
        *(f"{first:>{label}} {line}" for first, line in zip(firsts, drawn.lines(wide), strict=True)),
    ]
