"""How much of what is left of each kind of host is asked for by those who cannot go elsewhere.

A class is all requests of the mix that ask for as many devices and that the same kinds of hosts can run when empty: by
model and number of devices and, where they ask for whole ones, by processors and memory. (For shares, too, they would
press on hosts with many processors, which are priced already: 0.9 points less where all ask for shares.) What is left
for a class is what it could use now: on hosts with enough free devices, as far as their processors go. Were each class
spread over what is left for it, in proportion, so much would be asked for of each GPU that is left:

    pressure[kind] = sum over classes of demand[class] * left[class, kind] / left[class]  /  (left[kind] / left)

1 where it is as everywhere; who can go anywhere adds the same to all. So T4 are kept for those who name them as long as
others need not fill them, and whole hosts, once few are left, for requests for 8 GPUs: each in the same unit, GPUs
asked for by a GPU that is left. Taken of an empty fleet alone, it kept T4 idle until no whole host was left; now both
run out at the same time.

A little of the empty fleet always counts as left, as some of it will come back.

In whole numbers; no clock, no chance: the same mix and the same states of a fleet give the same pressure everywhere.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from moorage.scheduler.core.host import EXCLUSIVE
from moorage.scheduler.core.rank.prices import gpu_percent
from moorage.scheduler.core.rank.table import (
    CPU,
    FREE,
    NO_ROOM,
    ROOM,
    TYPE,
    UNCOUNTED,
    Bools,
    Floats,
    HostTable,
    HostType,
    Ints,
)
from moorage.scheduler.core.shape import Shape

#: a pressure of 1 is so much
ONE: Final = 1 << 10
PRESSURE_MAX: Final = 2 * ONE
#: of a pressure of 1, a request that asks for one GPU is charged this part of a GPU: 1 / so much
CHARGED_PART: Final = 4
#: a pressure that moved by no more than this is left in use: new ones mean that every host is scored anew
MOVED: Final = ONE // 16
#: decisions between two looks: so many for each host, at least
LOOK_HOSTS: Final = 8
LOOK_MIN: Final = 32
#: so many 64ths of the empty fleet count as left besides what is
LEFT_ALWAYS: Final = 2
#: classes with the most demand that take part
CLASSES_MAX: Final = 64
_DEMAND: Final = 1 << 20


class Class(NamedTuple):
    """Requests alike: devices each, thousandths of a processor a GPU, part of all GPUs asked for, hosts by type."""

    devices: int
    cpu_milli: int
    demand: int  # 2^-20
    runs_on: Bools

    def of_empty(self, kind: HostType) -> int:
        """Return what an empty host has for it: hundredths of GPUs."""
        each = self.cpu_milli * self.devices
        groups = kind.gpus // self.devices
        if self.devices > 1:
            return 100 * self.devices * (min(groups, kind.cpu_milli // each) if kind.cpu_milli and each else groups)
        return min(100 * groups, kind.cpu_milli * 100 // each) if kind.cpu_milli and each else 100 * groups


class Pressure:
    """The pressure of one mix on one numbering of a table."""

    def __init__(self, table: HostTable, mix: list[tuple[Shape, int]]) -> None:
        classes = classes_of(table, mix)
        mean = sum(each.cpu_milli * each.demand for each in classes) // _DEMAND
        hosts = np.bincount(table.cells[TYPE, : len(table)][table.alive()], minlength=len(table.types))
        #: the first is all requests alike, on all hosts
        classes = [Class(1, mean, _DEMAND, np.ones(len(table.types), np.bool_)), *classes]
        self._left = Left(table, classes)
        empty = [[each.of_empty(kind) for kind in table.types] for each in classes]
        runs_on = np.array([each.runs_on for each in classes])
        self._empty: Ints = hosts * runs_on * np.array(empty, np.int64)
        #: a row a class; no row where no request of the mix asks for a GPU that some host has
        self._demands: Ints = np.array([each.demand for each in classes[1:]], np.int64).reshape(-1, 1)
        self._look_later(table)
        self.of_type: Ints = self._found(table)

    def decided(self, number: int) -> None:
        """So many replicas were decided on."""
        self._decided += number

    def until_look(self) -> int:
        """Return how many more replicas are decided on before the next look; 0 when it is due."""
        return max(0, self._look_after - self._decided)

    def _look_later(self, table: HostTable) -> None:
        self._decided = 0
        self._look_after = max(LOOK_MIN, len(table) // LOOK_HOSTS)

    def look(self, table: HostTable) -> bool:
        """Find it anew; whether it moved so far that it is in use now."""
        self._look_later(table)
        found = self._found(table)
        if int(np.abs(found - self.of_type).max(initial=0)) <= MOVED:
            return False
        self.of_type = found
        return True

    def charges(self, gpus_percent: int) -> Ints:
        """Return what a request for so many hundredths of a GPU is charged by type of host, in thousandths of a GPU."""
        return self.of_type * (gpus_percent * 10) // (ONE * CHARGED_PART)

    def _found(self, table: HostTable) -> Ints:
        self._left.look(table)
        left = self._left.by_type + (self._empty * LEFT_ALWAYS >> 6)
        every, left = left[0], left[1:]
        asked = (self._demands * left // np.maximum(1, left.sum(1, keepdims=True))).sum(0)
        pressure = asked * int(every.sum()) // np.maximum(1, every) // (_DEMAND // ONE)
        found: Ints = np.minimum(PRESSURE_MAX, pressure)
        return found


def _room_of(rooms: Ints) -> Ints:
    """Return what all devices of some hosts have left together."""
    found: Ints = np.where(rooms == NO_ROOM, 0, rooms).sum(0)
    return found


class Left:
    """What is left for each class by type of host, hundredths of a GPU, caught up with the rows that changed.

    Of each row in floating point, where division takes a tenth of the time. All of them are whole numbers below 2^47,
    so that what is rounded down is exact.
    """

    def __init__(self, table: HostTable, classes: list[Class]) -> None:
        #: those that ask for one device, then those for several
        order = sorted(range(len(classes)), key=lambda index: classes[index].devices > 1)
        ordered = [classes[index] for index in order]
        self._place: Ints = np.array(order).argsort()  # where in that order each class stands
        self._ones = sum(each.devices == 1 for each in ordered)
        devices = [[each.devices] for each in ordered[self._ones :]]
        self._devices: Floats = np.array(devices, np.float64).reshape(-1, 1)
        cpus = np.array([[each.cpu_milli * each.devices] for each in ordered], np.float64)
        self._cpus: Floats = np.maximum(1, cpus)
        self._free_of_cpus: Ints = np.flatnonzero(cpus == 0)
        self._runs_on: Floats = np.array([each.runs_on for each in ordered], np.float64)
        self._starts: Ints = (np.arange(len(ordered)) * len(table.types))[:, None]
        self._seen = -1
        self._types: Ints = np.zeros(0, np.int64)
        self._by_row: Floats = np.zeros((len(ordered), 0))
        self._sums: Ints = np.zeros((len(ordered), len(table.types)), np.int64)

    @property
    def by_type(self) -> Ints:
        """A row a class, as they were told."""
        return self._sums.take(self._place, 0)

    def look(self, table: HostTable) -> None:
        """Catch up with the rows that changed since the last look."""
        if len(self._types) != len(table):
            changed = np.arange(len(table))
            self._types = table.cells[TYPE, : len(table)].copy()
            self._by_row = np.zeros((len(self._by_row), len(table)))
            self._sums[:] = 0
        else:
            changed = table.changed_since(self._seen)
        self._seen = table.changes
        cells = table.cells.take(changed, 1)
        types, before = cells[TYPE], self._types.take(changed)
        left = self._of(cells, _room_of(cells[ROOM:]))
        left *= self._runs_on.take(types, 1)
        more = left - self._by_row.take(changed, 1)
        if not np.array_equal(types, before):  # a worker that joined anew with other devices
            self._add(before, left - more, -1)
            self._types[changed], more = types, left
        self._by_row[:, changed] = left
        self._add(types, more, 1)

    def _of(self, cells: Ints, room: Ints) -> Floats:
        """Return what some hosts have left for each class, a row a class, on whatever type of host."""
        ones, cpu = self._ones, np.maximum(0, cells[CPU])
        left = np.empty((len(self._cpus), len(room)))
        np.divide(cpu * 100, self._cpus[:ones], out=left[:ones])
        np.divide(cpu, self._cpus[ones:], out=left[ones:])
        if len(self._free_of_cpus):
            left[self._free_of_cpus] = UNCOUNTED
        np.minimum(left[:ones], room, out=left[:ones])
        np.minimum(left[ones:], cells[FREE] / self._devices, out=left[ones:])
        np.floor(left, out=left)
        left[ones:] *= 100 * self._devices
        return left

    def _add(self, types: Ints, left: Floats, sign: int) -> None:
        counted = np.bincount((self._starts + types).ravel(), left.ravel(), minlength=self._sums.size)
        self._sums += sign * counted.astype(np.int64).reshape(self._sums.shape)


def classes_of(table: HostTable, mix: list[tuple[Shape, int]]) -> list[Class]:
    """Return the classes of a mix that ask for GPUs and that some host can run, those with the most demand first."""
    found: dict[tuple[int, bytes], list[int]] = {}
    cpus = np.array([kind.cpu_milli or UNCOUNTED for kind in table.types], np.int64)
    memory = np.array([kind.memory_mib or UNCOUNTED for kind in table.types], np.int64)
    asking = [(shape, number, gpus) for shape, number in mix if (gpus := gpu_percent(table, shape))]
    large = np.array([(shape.cpu_milli, shape.memory_mib) for shape, _, _ in asking], np.int64).reshape(-1, 2)
    enough = (cpus >= large[:, :1]) & (memory >= large[:, 1:])
    enough[[shape.mode != EXCLUSIVE for shape, _, _ in asking]] = True
    enough &= np.array([table.holds(shape) for shape, _, _ in asking], np.bool_).reshape(enough.shape)
    for (shape, number, gpus), runs_on in zip(asking, enough, strict=True):
        count = shape.count if shape.mode == EXCLUSIVE else 1
        sums = found.setdefault((count, runs_on.tobytes()), [0, 0])
        sums[0] += gpus * number
        sums[1] += shape.cpu_milli * number
    total = sum(gpus for gpus, _ in found.values()) or 1
    rows = [
        Class(count, cpu * 100 // gpus, gpus * _DEMAND // total, np.frombuffer(runs_on, np.bool_))
        for (count, runs_on), (gpus, cpu) in found.items()
        if any(runs_on)
    ]
    rows.sort(key=lambda row: -row.demand)
    return rows[:CLASSES_MAX]
