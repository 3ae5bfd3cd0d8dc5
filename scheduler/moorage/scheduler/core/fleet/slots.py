"""Which slots of a host one replica gets, as masks. `HostClass.rooms` and `pick` are what others ask."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

#: cached choices among linked slots: a few kinds of hosts, in as many states
SLOTS_KNOWN: Final = 65_536

#: sets of slots linked by NVLink, and by NUMA node (`host.HostClass.islands`)
Islands = tuple[tuple[int, ...], ...]


_SLOTS: Final = [[bit for bit in range(8) if mask >> bit & 1] for mask in range(256)]


def slots_of(mask: int) -> list[int]:
    """Return the slot positions of a mask, lowest first."""
    if mask < 256:
        return _SLOTS[mask]
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def first_of(slots: int, tiers: tuple[int, ...], count: int) -> int:
    """Return `count` slots: those of the first tier first (`host.Fit`), of each the lowest.

    `slots` must have at least as many in these tiers.
    """
    taken = 0
    for tier in tiers:
        part, missing = slots & tier, count - taken.bit_count()
        if part.bit_count() >= missing:
            return taken | _lowest(part, missing)
        taken |= part
    return taken


def alike(names: Iterable[str]) -> tuple[int, ...]:
    """Return the sets of slots whose devices have one name, by the names of all; () if all have the same."""
    found: dict[str, int] = {}
    for slot, name in enumerate(names):
        found[name] = found.get(name, 0) | 1 << slot
    return tuple(found.values()) if len(found) > 1 else ()


def first_alike(sets: tuple[int, ...], slots: int, tiers: tuple[int, ...], count: int) -> int:
    """Return those of these slots that are in one of the sets of like devices: in the one from which `count` come out
    of the earliest tiers. All of them, if no set has as many."""
    best, best_key = slots, len(tiers)
    for each in sets:
        part = slots & each
        if part.bit_count() >= count:
            taken = first_of(part, tiers, count)
            key = max(at for at, tier in enumerate(tiers) if taken & tier)
            if key < best_key:
                best, best_key = part, key
    return best


def _lowest(slots: int, count: int) -> int:
    taken = 0
    for _ in range(count):
        low = slots & -slots
        taken |= low
        slots ^= low
    return taken


@functools.lru_cache(SLOTS_KNOWN)
def linked(islands: Islands, slots: int, best: int, tiers: tuple[int, ...], count: int) -> int:
    """Return `count` slots of one island, the one with the least memory, and of those the fewest slots, that suffices.

    So large islands stay whole. If none suffices, as few islands as possible are used. `best` are the slots that match
    best; `islands` must not be empty.
    """
    within = best if best.bit_count() >= count else slots
    found = _smallest(within, islands[0], tiers, count) or _smallest(within, islands[1], tiers, count)
    if found:
        return found
    taken = 0
    for island in sorted(islands[0], key=lambda island: -(within & island).bit_count()):
        part = within & island
        missing = count - taken.bit_count()
        taken |= part if part.bit_count() <= missing else first_of(part, tiers, missing)
        if taken.bit_count() == count:
            return taken
    return first_of(slots, tiers, count)


def _smallest(slots: int, islands: tuple[int, ...], tiers: tuple[int, ...], count: int) -> int:
    """Return `count` slots within one island: with the least memory, of the fewest slots; 0 if none has enough."""
    last_first = tiers[::-1]
    best, best_key = 0, ([0], 0)
    for island in islands:
        part = slots & island
        if part.bit_count() < count:
            continue
        taken = first_of(part, tiers, count)
        key = [(taken & tier).bit_count() for tier in last_first], part.bit_count()
        if not best or key < best_key:
            best, best_key = taken, key
    return best


def groups(count: int, rooms: list[int]) -> int:
    """Return how many sharers of `count` devices each fit on devices that have room for the given numbers of sharers.

    A sharer uses each of its devices once. They all fit if each takes the devices with the most room.
    """
    most = sum(rooms) // count
    while most and sum(min(room, most) for room in rooms) < most * count:
        most -= 1
    return most
