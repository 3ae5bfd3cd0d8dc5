"""The ranker that the settings name, and the plain one in its place once that has raised.

A ranker that raised may have left its tables half written, so it chooses no more; after a pause another one is made
(`ContainedEngine`). What the plain ranker needs is the fleet alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.rank.ranker import Choice, Pack, Ranker
from moorage.scheduler.core.shape import Shape


class RankerFailed(Exception):
    """In a replay: here the ranker failed when this was recorded."""


class FallingBack(Ranker):
    """Chooses as `main` does until that raises; `failed` is then told where, of which shape, and what was raised."""

    name: ClassVar[str] = "falling-back"

    def __init__(self, make: Callable[[], Ranker] | None, failed: Callable[[str, str, Exception], None]) -> None:
        """None for the plain ranker alone."""
        self.plain = Pack()
        self.main: Ranker | None = None
        self.calls = 0  # of `main`
        self.failed_at: list[int] = []  # the numbers of the calls that failed since this was emptied
        self.fails_at: set[int] = set()  # in a replay: those that failed then
        self._failed = failed
        if make is not None:
            try:
                self.main = make()
            except Exception as raised:
                self._fall_back("made", "", raised)

    def _fall_back(self, where: str, asked: str, raised: Exception) -> None:
        self.main = None
        self.failed_at.append(self.calls)
        self._failed(where, asked, raised)

    def _begin(self) -> None:
        self.calls += 1
        if self.fails_at and self.calls in self.fails_at:
            raise RankerFailed

    def give_up(self, raised: Exception) -> None:
        """It takes too long: use the plain one from now on."""
        if self.main is not None:
            self._fall_back("slow", "", raised)

    def choose(self, fleet: Fleet, shape: Shape, avoid: dict[int, int], excluded: frozenset[int]) -> Choice | None:
        main = self.main
        if main is not None:
            try:
                self._begin()
                main.work = self.work
                choice = main.choose(fleet, shape, avoid, excluded)
                self.work = main.work
                return choice
            except Exception as raised:
                self._fall_back("choose", f"{asked(shape)}; {len(fleet.hosts)} hosts", raised)
        return self.plain.choose(fleet, shape, avoid, excluded)

    def prepare(self, fleet: Fleet) -> bool:
        main = self.main
        if main is not None:
            try:
                self._begin()
                return main.prepare(fleet)
            except Exception as raised:
                self._fall_back("prepare", f"{len(fleet.hosts)} hosts", raised)
        return self.plain.prepare(fleet)

    def arrived(self, shape: Shape, replicas: int) -> None:
        main = self.main
        if main is not None:
            try:
                self._begin()
                main.arrived(shape, replicas)
            except Exception as raised:
                self._fall_back("arrived", asked(shape), raised)

    def again(self, choice: Choice, shape: Shape, most: int) -> list[int]:
        main = self.main
        if main is not None:
            try:
                self._begin()
                return main.again(choice, shape, most)
            except Exception as raised:
                self._fall_back("again", asked(shape), raised)
                return []  # what it has chosen need not be what the plain one would
        return self.plain.again(choice, shape, most)


def asked(shape: Shape) -> str:
    """Return what a shape asks for, as evidence."""
    models = "|".join(shape.models) or "any model"
    return f"{shape.count} GPU of {models}, mode {shape.mode}, {shape.together} at once, driver {shape.driver}"
