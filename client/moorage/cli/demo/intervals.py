"""Checks which holders had which things at the same time, for the demo, the fault runs and the simulation.

It knows nothing of schedulers, pools or leases and imports nothing of ours, so that no mistake is made on both sides:
things are held by holders, from a moment until a moment, alone or as one of so many of a mode.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Final, Generic, NamedTuple, TypeVar

Thing = TypeVar("Thing", bound=Hashable)
Holder = TypeVar("Holder", bound=Hashable)

#: the mode in which a thing has one holder
ALONE: Final = "exclusive"
#: of what happens at one moment: an end before a beginning, and behind both the end of what began and ended there
_END, _BEGIN, _END_AT_ONCE = range(3)


def clash(mode: str, other: str) -> bool:
    """Return whether two holders in these modes must not hold one thing at once, however many it may have."""
    return mode != other or mode == ALONE


class Holders(Generic[Thing, Holder]):
    """The holders of each thing now; `take` and `leave` come in order of time. `most` bounds holders by mode."""

    def __init__(self, most: Mapping[str, int] | None = None) -> None:
        self._most = most or {}
        self._held: defaultdict[Thing, dict[Holder, str]] = defaultdict(dict)

    def take(self, thing: Thing, holder: Holder, mode: str = ALONE) -> list[Holder]:
        """Add a holder to a thing. Returns the holders it conflicts with: all sharers where it is one too many.

        A holder that has the thing already changes nothing.
        """
        held = self._held[thing]
        if holder in held:
            return []
        beside = [other for other, its in held.items() if clash(mode, its)]
        if not beside and len(held) >= self._most.get(mode, len(held) + 1):
            beside = list(held)
        held[holder] = mode
        return beside

    def leave(self, thing: Thing, holder: Holder) -> None:
        """Remove a holder from a thing; it need not have held it."""
        held = self._held.get(thing, {})
        held.pop(holder, None)
        if not held:
            self._held.pop(thing, None)


class Span(NamedTuple, Generic[Thing, Holder]):
    """A thing held from `began` until before `ended`, on one clock or count for all.

    None where the end was not seen: then only its beginning is sure, and nothing that comes later clashes with it.
    """

    thing: Thing
    holder: Holder
    began: float
    ended: float | None
    mode: str = ALONE


class Overlap(NamedTuple, Generic[Thing, Holder]):
    """A span that began while conflicting holders had the thing, with these holders."""

    late: Span[Thing, Holder]
    beside: list[Holder]


def overlaps(
    spans: Iterable[Span[Thing, Holder]], most: Mapping[str, int] | None = None
) -> Iterator[Overlap[Thing, Holder]]:
    """Every span that began beside others that it must not be beside, in order of time.

    `most` is how many may share a thing, by mode. One holder's spans of one thing are told apart. O(n log n) and the
    clashes themselves.
    """
    edges: list[tuple[float, int, int]] = []
    all_spans = list(spans)
    for number, span in enumerate(all_spans):
        ended = span.began if span.ended is None else span.ended
        if ended < span.began:
            raise ValueError(f"{span.holder} held {span.thing} until {ended}, before it began at {span.began}")
        edges.append((span.began, _BEGIN, number))
        edges.append((ended, _END if ended > span.began else _END_AT_ONCE, number))
    now: Holders[Thing, int] = Holders(most)
    for _, edge, number in sorted(edges):
        span = all_spans[number]
        if edge != _BEGIN:
            now.leave(span.thing, number)
        elif beside := now.take(span.thing, number, span.mode):
            yield Overlap(span, [all_spans[other].holder for other in beside])
