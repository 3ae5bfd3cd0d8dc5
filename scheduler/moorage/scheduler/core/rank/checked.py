"""Checks what a ranker of one's own chooses before the ledger has it; those of `rankers.PLACES` the tests check."""

from __future__ import annotations

from typing import ClassVar

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE, Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.rank.ranker import Choice, Ranker
from moorage.scheduler.core.rank.rankers import ranker_class
from moorage.schemas.own_class import is_own


class WrongChoice(Exception):
    """The ranker chose a host or GPUs that the request may not have now."""


def ranker_of(name: str) -> Ranker:
    """Make the ranker of this name; the choices of one's own are checked. Raises ValueError as `ranker_class`."""
    ranker = ranker_class(name)()
    return Checked(ranker) if is_own(name) else ranker


class Checked(Ranker):
    """Chooses with `main`, and raises `WrongChoice` for a choice that cannot be."""

    name: ClassVar[str] = "checked"

    def __init__(self, main: Ranker) -> None:
        self.main = main

    def choose(self, fleet: Fleet, shape: Shape, avoid: dict[int, int], excluded: frozenset[int]) -> Choice | None:
        self.main.work = self.work
        choice = self.main.choose(fleet, shape, avoid, excluded)
        self.work = self.main.work
        if choice is not None:
            _check(choice, fleet, shape, excluded)
        return choice

    def prepare(self, fleet: Fleet) -> bool:
        return self.main.prepare(fleet)

    def arrived(self, shape: Shape, replicas: int) -> None:
        self.main.arrived(shape, replicas)

    def again(self, choice: Choice, shape: Shape, most: int) -> list[int]:
        masks = self.main.again(choice, shape, most)
        if masks:
            _check_more(masks, choice.host, shape, most)
        return masks


def _check(choice: Choice, fleet: Fleet, shape: Shape, excluded: frozenset[int]) -> None:
    """Raise `WrongChoice` if a replica of this shape cannot be placed on the chosen host and devices."""
    host = choice.host
    num = host.worker.num
    if num in excluded or fleet.hosts.get(num) is not host or not host.usable or not host.replicas_of(shape, "now"):
        raise WrongChoice(f"it chose {host.worker.id}, which is excluded, not open or has no room for the request")
    _check_more([choice.mask], host, shape, 1)


def _check_more(masks: list[int], host: Host, shape: Shape, most: int) -> None:
    """Raise `WrongChoice` if these replicas cannot all be placed on the host beside what it has, or exceed `most`."""
    room = host.slots_for(shape)
    for mask in masks:
        if mask & ~room or mask.bit_count() != shape.count:
            raise WrongChoice(f"it chose GPUs {mask:#b} of {host.worker.id}; wanted are {shape.count} of {room:#b}")
        if shape.mode <= EXCLUSIVE:
            room &= ~mask
    if len(masks) > min(most, host.replicas_of(shape, "now")):
        raise WrongChoice(f"it placed {len(masks)} replicas on {host.worker.id} at once, which are too many")


def asked(shape: Shape) -> str:
    """Return a text of what a shape asks for, for logs."""
    models = "|".join(shape.models) or "any model"
    return f"{shape.count} GPU of {models}, mode {shape.mode}, {shape.together} at once, driver {shape.driver}"
