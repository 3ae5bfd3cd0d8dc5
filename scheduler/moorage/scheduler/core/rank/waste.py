"""Fragmentation of a host: the part of its devices that a request drawn from the mix could not use.

F of Weng et al., "Beware of Fragmentation" (USENIX ATC 2023), in whole numbers: percent of a device times the weight
of the mix. A device counts as useless for a request when the host lacks its processors, the device is of another
model, or less is left on it than the request needs; and all free devices do when there are fewer than it asks for.

A share leaves room that later ones fill, or nobody: so the room of a device is followed through some arrivals of the
mix (`ahead`), each taking its place there if it fits, before it is judged by the next. Processors are judged by the
next arrival alone: the devices of a host share them, and each would take them anew.

That sum splits into one term for each device and one for their number, which depend on the host's processors only by
*level*: how many of the mix's distinct demands for processors are covered. So F is a few look-ups in two tables:

    F(host) = sum over devices of waste[kind, level, room] + short[kind, level, free devices]
"""

from __future__ import annotations

from typing import Final

import numpy as np

from moorage.scheduler.core.host import NO_GPU
from moorage.scheduler.core.rank.table import CPU, FREE, KIND, NO_ROOM, ROOM, ROOMS, TYPE, HostTable, Ints
from moorage.scheduler.core.shape import Shape

#: the weights of a mix add up to about so much
WEIGHTS: Final = 1 << 14
FREE_MAX: Final = 64
#: more than any sum of waste, by so much that no step of a score hides it
HUGE: Final = 1 << 50
#: kinds times levels times rooms; beyond it only every second, third … of the demands for processors is told apart
CELLS_MAX: Final = 1 << 19


class Waste:
    """The tables of one mix over one table's kinds of devices; `ahead` arrivals are looked ahead, 0 is FGD itself."""

    def __init__(self, table: HostTable, mix: list[tuple[Shape, int]], ahead: int = 0) -> None:
        total = sum(count for _, count in mix) or 1
        weighed = [(shape, max(1, count * WEIGHTS // total)) for shape, count in mix]
        self.weight = sum(weight for _, weight in weighed) or 1
        with_gpu = [(shape, weight) for shape, weight in weighed if shape.mode != NO_GPU]
        demands = sorted({shape.cpu_milli for shape, _ in with_gpu})
        kinds = len(table.kinds) or 1
        told_apart = max(1, CELLS_MAX // (kinds * ROOMS) - 1)
        self.thresholds: Ints = np.array(demands[:: max(1, -(-len(demands) // told_apart))], np.int64)
        levels = self.levels = len(self.thresholds) + 1
        free = 1 + min(FREE_MAX, table.width)  # numbers of free devices that a host may have
        fits = np.zeros((kinds, levels, ROOMS), np.int64)  # weight by the least room that will do
        several = np.zeros((kinds, levels, ROOMS), np.int64)  # weight by the number of devices
        shapes = [shape for shape, _ in with_gpu]
        weights = np.array([weight for _, weight in with_gpu], np.int64)
        level = self.level(np.array([shape.cpu_milli for shape in shapes], np.int64))
        devices = np.array([shape.count for shape in shapes], np.int64)
        who, kind = table.answers_of(shapes).nonzero()
        np.add.at(fits, (kind, level[who], table.needs_of(shapes)[who, kind]), weights[who])
        more = devices[who] > 1
        who, kind = who[more], kind[more]
        np.add.at(several, (kind, level[who], devices[who]), weights[who])
        idle = idle_after(fits.sum(1)[:, :NO_ROOM], self.weight, ahead)
        self.waste: Ints = _unserved(fits)
        self.waste[:, :, :NO_ROOM] += idle[:, None]
        self.waste[:, :, NO_ROOM] = 0
        self.flat = self.waste.ravel()
        self.of_whole = self.flat[100:]  # of a device that is wholly free
        # of those it serves, requests for more devices than are free find none of them of use
        short = _short_of(several, free)
        self.shortens = bool(short.any())  # whether the mix asks for several devices
        self.short_flat = short.ravel()
        # by what the lack of free devices changes when a sharer takes one of them
        taken = np.zeros_like(short)
        among = short[:, :, :free]
        taken[:, :, 1:free] = among[:, :, :-1] - among[:, :, 1:]
        self.taken: Ints = taken.ravel()
        self.stride = levels * ROOMS

    def level(self, cpu: Ints) -> Ints:
        """Return how many of the mix's demands are covered by these processors."""
        return self.thresholds.searchsorted(cpu, side="right")

    def of(self, table: HostTable, cells: Ints) -> Ints:
        """Return the fragmentation of some hosts."""
        at = cells[KIND] * self.stride + self.level(cells[CPU]) * ROOMS
        found: Ints = self.flat.take(self.by_device(table, cells, at) + cells[ROOM:]).sum(0)
        if self.shortens:
            found += self.short_flat.take(at + cells[FREE])
        return found

    def by_device(self, table: HostTable, cells: Ints, at: Ints) -> Ints:
        """Return the places in the tables by device and host; `at` holds those of each host's first device."""
        if not table.mixed:
            return at
        found: Ints = at + (table.kinds_of_type.take(cells[TYPE], 1) - cells[KIND]) * self.stride
        return found

    def after_share(self, each: Ints, rooms: Ints, need: int | Ints, wasted: Ints) -> Ints:
        """Return what waste changes by when devices give so much of what they have left; huge where that is not enough.

        `each` are their places in the table, and `wasted` is what stands there.
        """
        change: Ints = self.flat.take(each - need)  # of another line where it is not enough, and written over
        change -= wasted
        left = (rooms - need).view(np.uint64)  # below 0 is more than any, too
        np.putmask(change, left > 100 - np.asarray(need, np.uint64), HUGE)
        return change

    def held_bytes(self) -> int:
        """Return what the tables take, in bytes."""
        return sum(int(array.nbytes) for array in (self.waste, self.short_flat, self.taken))


def _unserved(fits: Ints) -> Ints:
    """What is of no use to others than those served, of a device by kind, level and room: percent times their weight.

    `fits` is the weight by the least that will do, and is written over; all count that the highest level serves.
    """
    np.cumsum(fits, 1, out=fits)
    np.cumsum(fits, 2, out=fits)
    found: Ints = fits[:, -1:] - fits
    found *= np.arange(ROOMS)
    return found


def _short_of(several: Ints, free: int) -> Ints:
    """What of free devices is too few for requests for more, by how many are free; given their weight by devices.

    `free` is the numbers of free devices that a host may have.
    """
    found = np.zeros_like(several)
    if several.any():
        longer = several[:, :, :free].cumsum(1)
        every = several.sum(2).cumsum(1)
        found[:, :, :free] = 100 * np.arange(free) * (every[:, :, None] - longer.cumsum(2))
    return found


def idle_after(takes: Ints, weight: int, ahead: int) -> Ints:
    """What is of no use to the arrival after the next `ahead`, of a device by kind and room: percent times `weight`.

    `takes` is the weight of the requests that take so many percent, by kind; who does not fit goes elsewhere.
    """
    stays = weight - takes.cumsum(1)
    idle: Ints = np.arange(takes.shape[1]) * stays
    needs = [need for need, taken in enumerate(takes.sum(0).tolist()) if need and taken]
    for _ in range(ahead):
        after = stays * idle
        for need in needs:  # from a room to the one that is so much less
            after[:, need:] += takes[:, need, None] * idle[:, :-need]
        idle = after // weight
    return idle
