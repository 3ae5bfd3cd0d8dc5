"""Checks which holders had which things at the same time, for the demo, the fault runs and the simulation.

It knows nothing of schedulers, pools or leases and imports nothing of ours, so that no mistake is made on both sides:
a holder has a thing from one moment until another, alone or as one of several sharers of one mode.
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
    """Return whether two holders in these modes must not have one thing at the same time, whatever their number."""
    return mode != other or mode == ALONE


class Holders(Generic[Thing, Holder]):
    """Keeps track of which holders have each thing now. Call `take` and `leave` in the order of time.

    `most` says by mode how many may share a thing; a mode that it lacks has no limit.
    """

    def __init__(self, most: Mapping[str, int] | None = None) -> None:
        self._most = most or {}
        self._held: defaultdict[Thing, dict[Holder, str]] = defaultdict(dict)

    def take(self, thing: Thing, holder: Holder, mode: str = ALONE) -> list[Holder]:
        """Let a holder take a thing, and return the holders with which this conflicts: all sharers if they are now one
        too many.

        A holder that already has the thing changes nothing.
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
        """Let a holder give up a thing. It need not have had it."""
        held = self._held.get(thing, {})
        held.pop(holder, None)
        if not held:
            self._held.pop(thing, None)


class Span(NamedTuple, Generic[Thing, Holder]):
    """A time during which a holder had a thing: from `began` until just before `ended`, both by the same clock or count
    for all spans.

    `ended` is None if the end was not seen. Only the beginning is sure then, and nothing that begins later conflicts
    with the span.
    """

    thing: Thing
    holder: Holder
    began: float
    ended: float | None
    mode: str = ALONE


class Overlap(NamedTuple, Generic[Thing, Holder]):
    """A span (`late`) that began while other holders had its thing, and the holders with which it conflicts
    (`beside`)."""

    late: Span[Thing, Holder]
    beside: list[Holder]


def overlaps(
    spans: Iterable[Span[Thing, Holder]], most: Mapping[str, int] | None = None
) -> Iterator[Overlap[Thing, Holder]]:
    """Yield each span that began while holders with which it conflicts had its thing, in the order of time.

    `most` is that of `Holders`. Two spans of one holder count as two holders. Takes O(n log n), and time for each
    conflict. Raises ValueError for a span that ends before it begins.
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
