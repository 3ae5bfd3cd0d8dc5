"""Pressure: how much of the remaining room of each kind of host is wanted by requests that cannot run elsewhere.

A class is all requests of the mix for the same number of devices that the same kinds of hosts can run when empty,
judged by model and number of devices and, for whole devices, CPU and memory. (If shares were judged by CPU too, they
would add pressure on hosts with many cores, which are priced already: 0.9 points worse where all ask for shares.) What
is left for a class is what it could use now: the free devices of hosts with enough of them, as far as CPU allows. If
the demand of each class were spread over what is left for it in proportion, then each remaining GPU would be asked for
so much:

    pressure[kind] = sum over classes of demand[class] * left[class, kind] / left[class]  /  (left[kind] / left)

It is 1 for a kind under average pressure; requests that can run anywhere add the same to all kinds. So T4 hosts are
kept for requests that name T4 as long as other requests need not use them, and whole hosts, once few are left, for
requests for 8 GPUs, both in the same unit: GPUs asked for by GPU left. Computed for an empty fleet alone, it kept T4
idle until no whole host was left; this way both run out at the same time.

A small part of the empty fleet always counts as left, as some of it becomes free again. All values are integers,
without clock or chance: the same mix and fleet give the same pressure everywhere.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from moorage.scheduler.core.fleet.host import EXCLUSIVE
from moorage.scheduler.core.fleet.shape import Shape
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

#: a pressure of 1
ONE: Final = 1 << 10
PRESSURE_MAX: Final = 2 * ONE
#: at a pressure of 1, a request for one GPU is charged 1 / this of a GPU
CHARGED_PART: Final = 3
#: a change up to this keeps the old pressure: a new one means that every host is scored again
MOVED: Final = ONE // 16
#: decisions between two updates: one for each `LOOK_HOSTS` hosts, at least `LOOK_MIN`
LOOK_HOSTS: Final = 8
LOOK_MIN: Final = 32
#: this many 64ths of the empty fleet always count as left
LEFT_ALWAYS: Final = 2
#: only the classes with the most demand count, at most this many
CLASSES_MAX: Final = 64
_DEMAND: Final = 1 << 20


class Class(NamedTuple):
    """Requests of one class: GPUs of each, CPU for each GPU, its part of all demand, the host types that it can use."""

    devices: int
    cpu_milli: int
    demand: int  # 2^-20
    runs_on: Bools

    def of_empty(self, kind: HostType) -> int:
        """Return what an empty host has for this class, in hundredths of GPUs."""
        each = self.cpu_milli * self.devices
        groups = kind.gpus // self.devices
        if self.devices > 1:
            return 100 * self.devices * (min(groups, kind.cpu_milli // each) if kind.cpu_milli and each else groups)
        return min(100 * groups, kind.cpu_milli * 100 // each) if kind.cpu_milli and each else 100 * groups


class Pressure:
    """The pressure on each type of host, computed for one mix of requests and one host table.

    The table numbers the types of hosts. If the numbers change, make a new `Pressure`.
    """

    def __init__(self, table: HostTable, mix: list[tuple[Shape, int]]) -> None:
        classes = classes_of(table, mix)
        mean = sum(each.cpu_milli * each.demand for each in classes) // _DEMAND
        hosts = np.bincount(table.cells[TYPE, : len(table)][table.alive()], minlength=len(table.types))
        #: the first class stands for all requests together, on all hosts
        classes = [Class(1, mean, _DEMAND, np.ones(len(table.types), np.bool_)), *classes]
        self._left = Left(table, classes)
        empty = [[each.of_empty(kind) for kind in table.types] for each in classes]
        runs_on = np.array([each.runs_on for each in classes])
        self._empty: Ints = hosts * runs_on * np.array(empty, np.int64)
        #: a row for each class; no rows if no request asks for a GPU that a host has
        self._demands: Ints = np.array([each.demand for each in classes[1:]], np.int64).reshape(-1, 1)
        self._look_later(table)
        self.of_type: Ints = self._found(table)

    def decided(self, number: int) -> None:
        """Count placed replicas towards the next update."""
        self._decided += number

    def until_look(self) -> int:
        """Return how many more replicas may be placed before the next update; 0 when it is due."""
        return max(0, self._look_after - self._decided)

    def _look_later(self, table: HostTable) -> None:
        self._decided = 0
        self._look_after = max(LOOK_MIN, len(table) // LOOK_HOSTS)

    def look(self, table: HostTable) -> bool:
        """Recompute the pressure, and use it if it changed enough; return whether it did."""
        self._look_later(table)
        found = self._found(table)
        if int(np.abs(found - self.of_type).max(initial=0)) <= MOVED:
            return False
        self.of_type = found
        return True

    def charges(self, gpus_percent: int) -> Ints:
        """Return the charge for `gpus_percent` hundredths of a GPU by type of host, in thousandths of a GPU."""
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
    """Return the sum of what the devices of each host have left."""
    found: Ints = np.where(rooms == NO_ROOM, 0, rooms).sum(0)
    return found


class Left:
    """What is left for each class by type of host, in hundredths of a GPU; updated from changed rows.

    Rows are computed in floating point, where division takes a tenth of the time. All values are whole numbers below
    2^47, so rounding down is exact.
    """

    def __init__(self, table: HostTable, classes: list[Class]) -> None:
        #: classes for one device first, then those for several
        order = sorted(range(len(classes)), key=lambda index: classes[index].devices > 1)
        ordered = [classes[index] for index in order]
        self._place: Ints = np.array(order).argsort()  # the place of each class in that order
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
        """What is left, a row for each class in the order given."""
        return self._sums.take(self._place, 0)

    def look(self, table: HostTable) -> None:
        """Update the sums with the rows that changed since the last update."""
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
        if not np.array_equal(types, before):  # a worker joined again with other devices
            self._add(before, left - more, -1)
            self._types[changed], more = types, left
        self._by_row[:, changed] = left
        self._add(types, more, 1)

    def _of(self, cells: Ints, room: Ints) -> Floats:
        """Return what these hosts have left for each class (rows), whatever the type of host."""
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
    """Return the classes of a mix that ask for GPUs and can run somewhere, those with the most demand first.

    They are at most `CLASSES_MAX`.
    """
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
