"""How much more requests that name models weigh when little is left that they could use.

Pressure (`pressure.py`) says how much of each kind of host is asked for, whatever the state of the hosts: enough to
keep a model from those who may go elsewhere. It does not see which hosts of that model are spoilt. Where 12
processors go with half a P100 and a host has 8 for each, two small requests take the host from those who name it,
although half of it is idle: there is plenty of P100 left then, and nothing at all for such a request. To tell those
hosts from the others, each request for one device that names models gets a weight in the count of what is wasted
(`waste.py`):

    weight = part of all requests * (left / left for it now  -  left / left on its kinds of devices)

that is, how many times what it could use now, with its processors and its room on a device, all that is left is,
beyond what pressure knows of. 0 while processors and room are no matter; as they run out, hosts where it still fits
get dear, those where it does not fit any more get no dearer than any other. What is given back counts as left, as for
pressure.

In whole numbers; no clock, no chance.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from moorage.scheduler.core.host import NO_GPU
from moorage.scheduler.core.rank.table import CPU, NO_ROOM, ROOM, ROOMS, TYPE, UNCOUNTED, HostTable, Ints
from moorage.scheduler.core.rank.waste import WEIGHTS
from moorage.scheduler.core.shape import Shape

#: the most that scarcity gives to one shape: as much as all requests have
WEIGHT_MAX: Final = WEIGHTS
#: weights that moved by no more than this together are left in use: less than a step of the score; or by so small a
#: part of them. New ones mean that every host is scored anew.
MOVED: Final = WEIGHTS // 32
MOVED_PART: Final = 8
#: shapes with the most arrivals that take part, and demands for processors that are told apart
SHAPES_MAX: Final = 1_024
LEVELS_MAX: Final = 64
_FINE: Final = 10  # bits of a weight beyond those that are used


class Scarcity:
    """The weights of one mix's shapes on one numbering of a table, by what is left."""

    def __init__(self, table: HostTable, mix: list[tuple[Shape, int]]) -> None:
        total = sum(count for _, count in mix) or 1
        bound: list[tuple[Shape, int, list[bool]]] = []
        for shape, count in mix:
            if shape.mode == NO_GPU or shape.count > 1:
                continue
            answers = [kind.rank(shape) > 0 for kind in table.kinds]
            if any(answers) and not all(answers):
                bound.append((shape, (count * WEIGHTS << _FINE) // total, answers))
        bound.sort(key=lambda row: -row[1])
        bound = bound[:SHAPES_MAX]
        #: the requests that may weigh more: what they take of processors, and of a device by kind and request
        self.cpus: Ints = np.array([shape.cpu_milli for shape, _, _ in bound], np.int64)
        needs = [[kind.need(shape) if ok[kind.index] else NO_ROOM for kind in table.kinds] for shape, _, ok in bound]
        self.needs: Ints = np.array(needs, np.int64).reshape(len(bound), len(table.kinds)).T.copy()
        self.weights: Ints = np.zeros(len(bound), np.int64)
        if not bound:
            return
        self._parts: Ints = np.array([part for _, part, _ in bound], np.int64)
        demands = np.unique(self.cpus)
        self._demands: Ints = demands[:: -(-len(demands) // LEVELS_MAX)]
        levels = self._demands.searchsorted(self.cpus, side="right")
        self._levels = len(self._demands) + 1
        self._size = len(table.kinds) * self._levels * ROOMS
        # where in the sums each shape stands, by kind; the last of a row of rooms is 0: no answer
        starts = np.arange(len(table.kinds)) * (self._levels * ROOMS)
        self._at: Ints = starts[:, None] + levels * ROOMS + self.needs
        self._kinds_at: Ints = starts[:, None] + np.where(self.needs == NO_ROOM, NO_ROOM, 1)
        hosts = np.bincount(table.cells[TYPE, : len(table)][table.alive()], minlength=len(table.types))
        empty = np.zeros((len(table.kinds), self._levels, ROOMS), np.int64)
        for kind in table.types:
            level = self._demands.searchsorted(kind.cpu_milli or UNCOUNTED, side="right")
            for device in kind.kinds:
                empty[device, level, 100] += hosts[kind.index]
        self._empty = self._summed(empty)

    def look(self, table: HostTable, every: int, back: int) -> bool:
        """Find the weights anew; whether they moved so far that they are in use now.

        `every` is what is left for all, in hundredths of a GPU; `back` 64ths of the empty fleet count as left.
        """
        if not len(self.cpus):
            return False
        cells = table.cells[:, : len(table)]
        at = self._demands.searchsorted(cells[CPU], side="right") * ROOMS + cells[ROOM:]
        at += table.kinds_of_type.take(cells[TYPE], 1) * (self._levels * ROOMS)
        devices = np.bincount(at.ravel(), minlength=self._size).reshape(-1, self._levels, ROOMS)
        left = self._summed(devices.astype(np.int64)) + (self._empty * back >> 6)
        now, ever = (np.maximum(1, left.take(places).sum(0)) for places in (self._at, self._kinds_at))
        more = self._parts * every // now - self._parts * every // ever
        found: Ints = np.minimum(WEIGHT_MAX, np.maximum(0, more >> _FINE))
        if int(np.abs(found - self.weights).sum()) <= max(MOVED, int(self.weights.sum()) // MOVED_PART):
            return False
        self.weights = found
        return True

    @staticmethod
    def _summed(devices: Ints) -> Ints:
        """Hundredths of GPUs left on devices with at least such processors beside them, and at least so much room."""
        room = np.arange(ROOMS)
        room[NO_ROOM] = 0
        found: Ints = (devices * room)[:, ::-1, ::-1].cumsum(1).cumsum(2)[:, ::-1, ::-1]
        return found
