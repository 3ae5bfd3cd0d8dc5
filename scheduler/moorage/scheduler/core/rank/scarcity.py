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

Requests for several whole devices, whether they name models or not, get one as well, times the devices they ask for,
since so many are idle when they find no host. Without it, small requests take the last hosts that have processors, or
the model, for them, as they find room to the end.

In whole numbers; no clock, no chance.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from moorage.scheduler.core.host import EXCLUSIVE, NO_GPU
from moorage.scheduler.core.rank.table import CPU, FREE, KIND, NO_ROOM, ROOM, ROOMS, TYPE, UNCOUNTED, HostTable, Ints
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
        self._one = One(table, mix)
        self._several = Several(table, mix)
        both = (self._one, self._several)
        #: the requests that may weigh more: what they take of processors, and of a device by kind and request; devices
        self.cpus: Ints = np.concatenate([each.cpus for each in both])
        self.needs: Ints = np.concatenate([each.needs for each in both], 1)
        self.counts: Ints = np.concatenate([np.ones(len(self._one.cpus), np.int64), self._several.counts])
        self.weights: Ints = np.zeros(len(self.cpus), np.int64)

    def look(self, table: HostTable, every: int, back: int) -> bool:
        """Find the weights anew; whether they moved so far that they are in use now.

        `every` is what is left for all, in hundredths of a GPU; `back` 64ths of the empty fleet count as left.
        """
        if not len(self.cpus):
            return False
        cells = table.cells[:, : len(table)]
        more = np.concatenate([each.more(table, cells, every, back) for each in (self._one, self._several)])
        found: Ints = np.minimum(WEIGHT_MAX, np.maximum(0, more >> _FINE))
        if int(np.abs(found - self.weights).sum()) <= max(MOVED, int(self.weights.sum()) // MOVED_PART):
            return False
        self.weights = found
        return True


class One:
    """Requests for one device that name models."""

    def __init__(self, table: HostTable, mix: list[tuple[Shape, int]]) -> None:
        total = sum(count for _, count in mix) or 1
        ones = [(shape, count) for shape, count in mix if shape.mode != NO_GPU and shape.count == 1]
        answers = table.answers_of([shape for shape, _ in ones])
        named = np.logical_and(answers.any(1), ~answers.all(1)).tolist()
        bound = [
            (shape, (count * WEIGHTS << _FINE) // total)
            for (shape, count), is_bound in zip(ones, named, strict=True)
            if is_bound
        ]
        bound.sort(key=lambda row: -row[1])
        bound = bound[:SHAPES_MAX]
        self.cpus: Ints = np.array([shape.cpu_milli for shape, _ in bound], np.int64)
        shapes = [shape for shape, _ in bound]
        self.needs: Ints = np.where(table.answers_of(shapes), table.needs_of(shapes), NO_ROOM).T.copy()
        if not bound:
            return
        self._parts: Ints = np.array([part for _, part in bound], np.int64)
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
        self._empty = _summed(empty)

    def more(self, table: HostTable, cells: Ints, every: int, back: int) -> Ints:
        """What each should weigh more, not cut off, in 2^-10."""
        if not len(self.cpus):
            return self.cpus
        at = self._demands.searchsorted(cells[CPU], side="right") * ROOMS + cells[ROOM:]
        at += table.kinds_of_type.take(cells[TYPE], 1) * (self._levels * ROOMS)
        devices = np.bincount(at.ravel(), minlength=self._size).reshape(-1, self._levels, ROOMS)
        left = _left(devices, self._empty, back)
        now, ever = (np.maximum(1, left.take(places).sum(0)) for places in (self._at, self._kinds_at))
        return _beyond(self._parts, every, now, ever)


class Several:
    """Requests for several whole devices."""

    def __init__(self, table: HostTable, mix: list[tuple[Shape, int]]) -> None:
        total = sum(count for _, count in mix) or 1
        several = [(shape, count) for shape, count in mix if shape.mode == EXCLUSIVE and shape.count > 1]
        answers = np.logical_or.reduce(table.answers_of([shape for shape, _ in several]), 1).tolist()
        asked = [
            (shape, (count * shape.count * WEIGHTS << _FINE) // total)
            for (shape, count), answered in zip(several, answers, strict=True)
            if answered
        ]
        asked.sort(key=lambda row: -row[1])
        asked = asked[:SHAPES_MAX]
        kinds = len(table.kinds)
        self.cpus: Ints = np.array([shape.cpu_milli for shape, _ in asked], np.int64)
        self.counts: Ints = np.array([shape.count for shape, _ in asked], np.int64)
        self._answers: Ints = table.answers_of([shape for shape, _ in asked]).T.astype(np.int64)
        self.needs: Ints = np.where(self._answers > 0, 100, NO_ROOM)
        if not asked:
            return
        self._parts: Ints = np.array([weight for _, weight in asked], np.int64)
        demands = np.unique(self.cpus)
        self._demands: Ints = demands[:: -(-len(demands) // LEVELS_MAX)]
        levels = self._demands.searchsorted(self.cpus, side="right")
        most = max((kind.gpus for kind in table.types), default=0)
        self._shape = (kinds, len(self._demands) + 1, max(most, int(self.counts.max())) + 1)
        empty = np.zeros(self._shape, np.int64)
        hosts = np.bincount(table.cells[TYPE, : len(table)][table.alive()], minlength=len(table.types))
        for kind in table.types:
            if kind.kinds:
                level = self._demands.searchsorted(kind.cpu_milli or UNCOUNTED, side="right")
                empty[kind.kinds[0], level, kind.gpus] += hosts[kind.index]
        self._empty = _summed(empty)
        # where in the sums each stands, by kind, and where those of any processors do
        kind_at = np.arange(kinds)[:, None] * (self._shape[1] * self._shape[2]) + self.counts
        self._at: Ints = np.stack((kind_at + levels * self._shape[2], kind_at))

    def more(self, table: HostTable, cells: Ints, every: int, back: int) -> Ints:
        """As of one device; what is left are the free devices of hosts with enough of them."""
        if not len(self.cpus):
            return self.cpus
        kinds, levels, sizes = self._shape
        at = (cells[KIND] * levels + self._demands.searchsorted(cells[CPU], side="right")) * sizes + cells[FREE]
        hosts = np.bincount(at, minlength=kinds * levels * sizes).reshape(self._shape)
        left = _left(hosts, self._empty, back)
        now, ever = np.maximum(1, 100 * (left.take(self._at) * self._answers).sum(1))
        return _beyond(self._parts, every, now, ever)


def _beyond(parts: Ints, every: int, now: Ints, ever: Ints) -> Ints:
    """All that is left by what is left for each now, less the same by what is left on its devices; times its part."""
    more: Ints = parts * every // now - parts * every // ever
    return more


def _left(number: Ints, empty: Ints, back: int) -> Ints:
    """`_summed`, and what comes back of an empty fleet."""
    found: Ints = _summed(number.astype(np.int64)) + (empty * back >> 6)
    return found


def _summed(number: Ints) -> Ints:
    """Of things by kind, level of processors and size: the sizes of all with at least such a level and such a size."""
    size = np.arange(number.shape[2])
    size[NO_ROOM:] = 0
    found: Ints = (number * size)[:, ::-1, ::-1].cumsum(1).cumsum(2)[:, ::-1, ::-1]
    return found
