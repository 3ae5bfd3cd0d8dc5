"""Rankers of one's own that choose what the request may not have: each starts as `Pack` would."""

from __future__ import annotations

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.rank.ranker import Choice, Pack


class _First(Pack):
    """Takes the first host of the fleet, whatever there is on it."""

    name = "first"

    def choose(self, fleet: Fleet, shape: Shape, avoid: dict[int, int], excluded: frozenset[int]) -> Choice | None:
        host = fleet.hosts[min(fleet.hosts)]
        return Choice(host, self.slots(shape))

    def slots(self, shape: Shape) -> int:
        return (1 << shape.count) - 1


class Leased(_First):
    """The lowest GPUs, leased or not."""


class TooMany(_First):
    """One GPU more than was asked for."""

    def slots(self, shape: Shape) -> int:
        return (2 << shape.count) - 1


class TwiceTheSame(Pack):
    """Further jobs get the same free GPU, all of them."""

    name = "twice"

    def again(self, choice: Choice, shape: Shape, most: int) -> list[int]:
        return [choice.host.open & -choice.host.open] * most


class Beyond(Pack):
    """More further jobs than the host has room for."""

    name = "beyond"

    def again(self, choice: Choice, shape: Shape, most: int) -> list[int]:
        return [0] * most
