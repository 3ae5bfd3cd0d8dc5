"""Runs the configured ranker, and replaces it by the plain one once it has failed.

It fails when it raises, or chooses what cannot be. The latter is seen only of a ranker of your own, whose choices are
checked before the ledger has them; those of `rankers.PLACES` are checked by the tests.

A ranker that raised may have left its tables half written, so it makes no more choices until the next term. The plain
ranker needs only the fleet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE, Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.rank.ranker import Choice, Pack, Ranker


class WrongChoice(Exception):
    """The ranker chose a host or GPUs that the request may not have now."""


class FallingBack(Ranker):
    """Chooses with `main` until that fails; from then on `main` is None, and `plain` chooses.

    At the failure `failed` is called with the place, the request and the exception.
    """

    name: ClassVar[str] = "falling-back"

    def __init__(
        self, make: Callable[[], Ranker] | None, failed: Callable[[str, str, Exception], None], *, checks: bool
    ) -> None:
        """Make `main` with `make`; if that is None or raises, use only the plain ranker.

        `checks`: check each choice of `main`.
        """
        self.plain = Pack()
        self.main: Ranker | None = None
        self._failed = failed
        self._checks = checks
        if make is not None:
            try:
                self.main = make()
            except Exception as raised:
                self._fall_back("made", "", raised)

    def _fall_back(self, where: str, asked: str, raised: Exception) -> None:
        self.main = None
        self._failed(where, asked, raised)

    def choose(self, fleet: Fleet, shape: Shape, avoid: dict[int, int], excluded: frozenset[int]) -> Choice | None:
        main = self.main
        if main is not None:
            try:
                main.work = self.work
                choice = main.choose(fleet, shape, avoid, excluded)
                self.work = main.work
                if self._checks and choice is not None:
                    _check(choice, fleet, shape, excluded)
                return choice
            except Exception as raised:
                self._fall_back("choose", f"{asked(shape)}; {len(fleet.hosts)} hosts", raised)
        return self.plain.choose(fleet, shape, avoid, excluded)

    def prepare(self, fleet: Fleet) -> bool:
        main = self.main
        if main is not None:
            try:
                return main.prepare(fleet)
            except Exception as raised:
                self._fall_back("prepare", f"{len(fleet.hosts)} hosts", raised)
        return self.plain.prepare(fleet)

    def arrived(self, shape: Shape, replicas: int) -> None:
        main = self.main
        if main is not None:
            try:
                main.arrived(shape, replicas)
            except Exception as raised:
                self._fall_back("arrived", asked(shape), raised)

    def again(self, choice: Choice, shape: Shape, most: int) -> list[int]:
        main = self.main
        if main is not None:
            try:
                masks = main.again(choice, shape, most)
                if self._checks and masks:
                    _check_more(masks, choice.host, shape, most)
                return masks
            except Exception as raised:
                self._fall_back("again", asked(shape), raised)
                return []  # the plain ranker may not have made the choice that this continues
        return self.plain.again(choice, shape, most)


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
