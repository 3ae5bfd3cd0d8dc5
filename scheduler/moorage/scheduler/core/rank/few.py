"""The scores of a few hosts, one by one: what `gains.py` finds for many with arrays.

Between two requests of a popular shape only some hosts change. An operation on short arrays costs as much as one on
long arrays, and a score is some 35 of them: for a few hosts plain numbers are cheaper. So the formula stands here a
second time, for what is common: hosts with devices of one kind, any slot of which answers, and sharers of one device
where all share in one mode. A test compares the two on any host.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from moorage.scheduler.core.host import EXCLUSIVE
from moorage.scheduler.core.rank.table import (
    CLASS,
    CPU,
    FREE,
    KIND,
    MEMORY,
    MOST,
    NO_ROOM,
    NOTE,
    ROOM,
    ROOMS,
    Ask,
    HostTable,
    Ints,
)
from moorage.scheduler.core.rank.waste import HUGE, Waste

#: hosts up to which those that are able are told one by one
FILTERED_MAX: Final = 48


def is_simple(table: HostTable, ask: Ask) -> bool:
    """Whether hosts may be scored here for a shape."""
    if table.mixed or ask.masks is not None:
        return False
    return ask.mode <= EXCLUSIVE or (ask.count == 1 and not table.modes & ~(1 << ask.mode))


def able(table: HostTable, ask: Ask, rows: Ints | None) -> list[int]:
    """As `Ask.able`."""
    if rows is None or len(rows) > FILTERED_MAX:
        found: list[int] = ask.able(table, rows).tolist()
        return found
    lines, fits = table.lines, ask.fits_class
    cpu, memory, free, most = ask.enough
    return [
        row
        for row in rows.tolist()
        if (line := lines[row])[CPU] >= cpu
        and line[FREE] >= free
        and line[MOST] >= most
        and line[MEMORY] >= memory
        and fits[line[CLASS]]
    ]


def gain(waste: Waste, ask: Ask, line: list[int]) -> tuple[int, int | None]:
    """What one replica takes off the waste of a host that is able, and the slot that a sharer gets, None for none."""
    kind, free = line[KIND], line[FREE]
    at = (kind * waste.levels + bisect_right(waste.demands, line[CPU] - ask.cpu)) * ROOMS
    wasted = waste.view[at : at + ROOMS]
    rooms = line[ROOM:]
    found: int = line[NOTE]
    if ask.mode <= EXCLUSIVE:
        for room in rooms:
            found -= wasted[room]
        if ask.mode == EXCLUSIVE:
            free -= ask.count
            found += ask.count * wasted[100]
        return found - waste.short_view[at + free] if waste.shortens else found, 0
    need, best, slot_of_best = ask.needs[kind], HUGE, None
    for slot, room in enumerate(rooms):
        found -= (here := wasted[room])
        if need <= room < NO_ROOM:
            change = wasted[room - need] - here
            if room == 100 and waste.shortens:
                change += waste.short_view[at + free - 1] - waste.short_view[at + free]
            if change < best:
                best, slot_of_best = change, slot
    if waste.shortens:
        found -= waste.short_view[at + free]
    return found - best, slot_of_best
