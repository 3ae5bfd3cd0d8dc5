"""Computes by how much a replica reduces the waste of hosts (`waste.py`), in percent of a device times the mix weight.

`cells` is what the hosts have left, or would have.
"""

from __future__ import annotations

import numpy as np

from moorage.ranking.table import CLASS, CPU, FREE, KIND, ROOM, ROOMS, Ask, HostTable, Ints
from moorage.ranking.waste import HUGE, Waste
from moorage.scheduler.core.fleet.host import EXCLUSIVE


def gains(table: HostTable, waste: Waste, ask: Ask, rows: Ints, cells: Ints) -> Ints:
    """Return the gain for each host; below `-HUGE >> 1` where a sharer does not fit."""
    gain, change = _before_devices(table, waste, ask, rows, cells)
    if change is None:
        return gain
    if ask.count == 1:
        gain -= np.minimum.reduce(change, 0)
    elif ask.count <= len(change):  # the sum of the best devices; how they affect each other is ignored
        change.partition(ask.count - 1, axis=0)
        gain -= np.add.reduce(change[: ask.count], 0)
    else:
        gain -= HUGE
    return gain


def gains_by_device(table: HostTable, waste: Waste, ask: Ask, row: int) -> Ints:
    """Return the gain for a sharer on each device of one host; below `-HUGE >> 1` where it does not fit."""
    gain, change = _before_devices(table, waste, ask, np.array([row], np.int64), table.cells[:, row : row + 1])
    assert change is not None, "only a sharer chooses a device"
    found: Ints = (gain - change)[:, 0]
    return found


def _before_devices(table: HostTable, waste: Waste, ask: Ask, rows: Ints, cells: Ints) -> tuple[Ints, Ints | None]:
    """Return the gain without the shared device, and the change of waste for each shared device.

    The second is huge where a device has too little room, and None for a request that shares nothing. Hosts with and
    without the replica are looked up in one call, since a call costs more than the few rows that it usually gets.
    """
    count = cells.shape[1]
    both = np.concatenate((cells, cells), 1)
    both[CPU, :count] -= ask.cpu
    if ask.mode == EXCLUSIVE:
        both[FREE, :count] -= ask.count
    at = both[KIND] * waste.stride
    at += waste.level(both[CPU]) * ROOMS
    each = waste.by_device(table, both, at) + both[ROOM:]
    wasted = waste.flat.take(each)
    total = np.add.reduce(wasted, 0)
    if waste.shortens:
        total += waste.short_flat.take(at + both[FREE])
    gain: Ints = total[count:] - total[:count]
    at = at[:count]
    if ask.mode == EXCLUSIVE:
        asked = at + (ask.kinds_asked.take(cells[CLASS]) - cells[KIND]) * waste.stride if table.mixed else at
        gain += ask.count * waste.of_whole.take(asked)
    if ask.mode <= EXCLUSIVE:
        return gain, None
    rooms = ask.rooms(table, rows, cells, cells[ROOM:])
    change = waste.after_share(each[:, :count], rooms, ask.need(table, cells), wasted[:, :count])
    if waste.shortens:
        change += (rooms == 100) * waste.taken.take(at + cells[FREE])
    return gain, change
