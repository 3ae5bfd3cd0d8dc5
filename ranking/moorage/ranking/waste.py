"""The fragmentation of a host: the part of its devices that a request drawn from the mix cannot use.

This is F of Weng et al., "Beware of Fragmentation" (USENIX ATC 2023), in integers: percent of a device times the weight
of the mix. A device is useless for a request if the host lacks the CPU, the device is of another model, or less of it
is left than the request needs. All free devices are useless if there are fewer than the request asks for.

A share leaves room that later shares may or may not fill. So the room of a device is simulated through `ahead` arrivals
of the mix, each taking its place there if it fits, and then judged by the next arrival. CPU is judged by the next
arrival alone, since the devices of a host share it and each would take it again.

The sum splits into one term for each device and one for the number of free devices. They depend on the host's CPU only
by its *level*: how many of the mix's distinct CPU demands it covers. So F is a few look-ups in two tables:

    F(host) = sum over devices of waste[kind, level, room] + short[kind, level, free devices]
"""

from __future__ import annotations

from typing import Final

import numpy as np

from moorage.ranking.table import CPU, FREE, KIND, NO_ROOM, ROOM, ROOMS, TYPE, HostTable, Ints
from moorage.scheduler.core.fleet.host import NO_GPU
from moorage.scheduler.core.fleet.shape import Shape

#: the weights of a mix add up to about this
WEIGHTS: Final = 1 << 14
FREE_MAX: Final = 64
#: larger than any sum of waste, so that no step of a score hides it
HUGE: Final = 1 << 50
#: kinds times levels times rooms; beyond it only every second, third … CPU demand has a level of its own
CELLS_MAX: Final = 1 << 19


class Waste:
    """The waste tables of one mix for the kinds of one host table; `ahead` arrivals are simulated, 0 is FGD itself."""

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
        fits = np.zeros((kinds, levels, ROOMS), np.int64)  # weight by the least room that suffices
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
        self.of_whole = self.flat[100:]  # of a wholly free device
        # requests for more devices than are free cannot use the free ones
        short = _short_of(several, free)
        self.shortens = bool(short.any())  # whether the mix asks for several devices at once
        self.short_flat = short.ravel()
        # how the term for the number of free devices changes when a sharer takes one of them
        taken = np.zeros_like(short)
        among = short[:, :, :free]
        taken[:, :, 1:free] = among[:, :, :-1] - among[:, :, 1:]
        self.taken: Ints = taken.ravel()
        self.stride = levels * ROOMS

    def level(self, cpu: Ints) -> Ints:
        """Return how many of the mix's CPU demands this CPU covers."""
        return self.thresholds.searchsorted(cpu, side="right")

    def of(self, table: HostTable, cells: Ints) -> Ints:
        """Return the fragmentation of some hosts, in percent of a device times the weight of the mix."""
        at = cells[KIND] * self.stride + self.level(cells[CPU]) * ROOMS
        found: Ints = self.flat.take(self.by_device(table, cells, at) + cells[ROOM:]).sum(0)
        if self.shortens:
            found += self.short_flat.take(at + cells[FREE])
        return found

    def by_device(self, table: HostTable, cells: Ints, at: Ints) -> Ints:
        """Return the table positions by device and host; `at` has the positions of each host's first device.

        If no host has devices of different kinds, that is `at` itself, as all devices of a host have the same position.
        """
        if not table.mixed:
            return at
        found: Ints = at + (table.kinds_of_type.take(cells[TYPE], 1) - cells[KIND]) * self.stride
        return found

    def after_share(self, each: Ints, rooms: Ints, need: int | Ints, wasted: Ints) -> Ints:
        """Return the change of waste when each device gives `need` of its room; huge where it has less.

        `each` are the devices' positions in the table, and `wasted` the values there.
        """
        # devices with too little room read another row here; the last line overwrites them
        change: Ints = self.flat.take(each - need)
        change -= wasted
        left = (rooms - need).view(np.uint64)  # as unsigned, a negative number is larger than any other
        np.putmask(change, left > 100 - np.asarray(need, np.uint64), HUGE)
        return change

    def held_bytes(self) -> int:
        """Return the memory of the tables in bytes."""
        return sum(int(array.nbytes) for array in (self.waste, self.short_flat, self.taken))


def _unserved(fits: Ints) -> Ints:
    """Return the waste by kind, level and room for requests that the device does not serve: percent times weight.

    `fits` is the weight by the least room that suffices, and is overwritten. All requests count that the highest level
    serves.
    """
    np.cumsum(fits, 1, out=fits)
    np.cumsum(fits, 2, out=fits)
    found: Ints = fits[:, -1:] - fits
    found *= np.arange(ROOMS)
    return found


def _short_of(several: Ints, free: int) -> Ints:
    """Return the waste of free devices that are too few for a request, by how many are free.

    `several` is the weight by number of devices; `free` is how many different numbers of free devices there can be.
    """
    found = np.zeros_like(several)
    if several.any():
        longer = several[:, :, :free].cumsum(1)
        every = several.sum(2).cumsum(1)
        found[:, :, :free] = 100 * np.arange(free) * (every[:, :, None] - longer.cumsum(2))
    return found


def idle_after(takes: Ints, weight: int, ahead: int) -> Ints:
    """Return the waste of a device after the next `ahead` arrivals, by kind and room: percent times `weight`.

    `takes` is the weight of the requests that take this many percent, by kind; requests that do not fit go elsewhere.
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
