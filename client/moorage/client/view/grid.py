"""A sweep as a grid: a letter a replica, or one for several neighbours of very many."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Final, NamedTuple

from moorage.client.answers import JobInfo
from moorage.schemas.job import (
    CANCELLED,
    EXPIRED,
    FAILED,
    FROZEN,
    LOST_KEPT,
    QUEUED,
    REJECTED,
    STARTING,
    SUCCEEDED,
    TERMINAL,
    TIMED_OUT,
)
from moorage.schemas.ranges import Ranges, both, count_of, parse_told

#: cells of a grid: of more replicas, neighbours share one
CELLS_MAX: Final = 10_000


class Kind(NamedTuple):
    """How a replica is: its letter, and the word for it."""

    letter: str
    word: str


#: the worst first: neighbours that share a cell have the first of theirs
KINDS: Final = (
    Kind("F", "failed"),
    Kind("L", "lost"),
    Kind("X", "cancelled"),
    Kind("Z", "frozen"),
    Kind("?", "not told"),
    Kind("r", "running"),
    Kind("s", "starting"),
    Kind("q", "waiting"),
    Kind(".", "succeeded"),
)
WORDS: Final[Mapping[str, str]] = {kind.letter: kind.word for kind in KINDS}
_LETTERS: Final = (
    dict.fromkeys((FAILED, TIMED_OUT, REJECTED, EXPIRED), "F")
    | dict.fromkeys(STARTING, "s")
    | {LOST_KEPT: "L", CANCELLED: "X", FROZEN: "Z", QUEUED: "q", SUCCEEDED: "."}
)


class Grid(NamedTuple):
    """The letters of a job's replicas in the order of their numbers, `each` of them a letter."""

    letters: str
    each: int
    numbers: Ranges

    @property
    def counts(self) -> dict[str, int]:
        """How many cells there are of each letter, the worst first."""
        return {kind.letter: n for kind in KINDS if (n := self.letters.count(kind.letter))}

    def firsts(self, wide: int) -> list[int]:
        """Return the number of the first replica of each line of so many letters."""
        found, at = list[int](), 0
        for first, last in self.numbers:
            found += range(first - at % -(wide * self.each), last + 1, wide * self.each)
            at += last + 1 - first
        return found

    def lines(self, wide: int) -> list[str]:
        """Return the letters in lines of so many."""
        return [self.letters[at : at + wide] for at in range(0, len(self.letters), wide)]


def letter_of(state: str) -> str:
    """Return the letter of a replica's state."""
    return _LETTERS.get(state, "X" if state in TERMINAL else "r")


def grid(shown: JobInfo, most: int = CELLS_MAX) -> Grid | None:
    """Return the grid of a job of several replicas, of at most so many cells; None of one, and of a service that
    scales, whose members come and go."""
    if shown.replicas is None or shown.scaled is not None:
        return None
    size = count_of(shown.numbers)
    if size < 2:
        return None
    told = [(letter_of(state), *parse_told(text)) for state, text in {**shown.alive, **shown.replicas.ended}.items()]
    rest = "?" if any(is_cut for _, _, is_cut in told) else "."
    rank = {kind.letter: at for at, kind in enumerate(KINDS)}
    ranks = bytearray([rank[rest]]) * size
    begins = [first for first, _ in shown.numbers]
    before = [0, *accumulate(last + 1 - first for first, last in shown.numbers)]
    for letter, ranges, _ in told:
        for first, last in both(shown.numbers, ranges):
            part = bisect_right(begins, first) - 1
            at, many = before[part] + first - begins[part], last + 1 - first
            ranks[at : at + many] = bytes([rank[letter]]) * many
    each = -(-size // most)
    cells = ranks if each == 1 else [min(ranks[at : at + each]) for at in range(0, size, each)]
    return Grid("".join(KINDS[cell].letter for cell in cells), each, shown.numbers)
