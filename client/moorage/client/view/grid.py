"""A sweep as a grid: a letter a replica, or one for several neighbours of very many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
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
from moorage.schemas.ranges import Ranges, count_of, numbers_in, parse_ranges

#: cells of a grid: of more replicas, neighbours share one
CELLS_MAX: Final = 10_000
CUT: Final = ", …"


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
    told = {**shown.alive, **shown.replicas.ended}
    is_cut = any(text.endswith(CUT) for text in told.values())
    rest = "?" if is_cut else "."
    of = {
        number: letter_of(state)
        for state, text in told.items()
        for number in numbers_in(parse_ranges(text.removesuffix(CUT)))
    }
    letters = (of.get(number, rest) for number in numbers_in(shown.numbers))
    each = -(-size // most)
    return Grid("".join(letters if each == 1 else _worst(letters, each)), each, shown.numbers)


def _worst(letters: Iterator[str], each: int) -> Iterator[str]:
    """Yield the worst letter of each so many."""
    rank = {kind.letter: at for at, kind in enumerate(KINDS)}
    while some := list(islice(letters, each)):
        yield min(some, key=rank.__getitem__)
