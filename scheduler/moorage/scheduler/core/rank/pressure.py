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

What comes back counts as left, too: half of a fleet where as much is given back as taken, hardly any of one that fills.
That part is learned from what was taken and given between two looks.

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
#: what counts as left of a fleet in 64ths: so much always, and so much more where all that is taken is given back
LEFT_ALWAYS: Final = 2
LEFT_BACK: Final = 32
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
        """What an empty host has for it: hundredths of GPUs."""
        each = self.cpu_milli * self.devices
        groups = kind.gpus // self.devices
        if self.devices > 1:
            return 100 * self.devices * (min(groups, kind.cpu_milli // each) if kind.cpu_milli and each else groups)
        return min(100 * groups, kind.cpu_milli * 100 // each) if kind.cpu_milli and each else 100 * groups


class Pressure:
    """The pressure of one mix on one numbering of a table; `before` is whom it learned from what comes back."""

    def __init__(self, table: HostTable, mix: list[tuple[Shape, int]], before: Pressure | None) -> None:
        classes = classes_of(table, mix)
        mean = sum(each.cpu_milli * each.demand for each in classes) // _DEMAND
        hosts = np.bincount(table.cells[TYPE, : len(table)][table.alive()], minlength=len(table.types))
        #: the first is all requests alike, on all hosts
        self._classes = [Class(1, mean, _DEMAND, np.ones(len(table.types), np.bool_)), *classes]
        self._empty: list[Ints] = [
            hosts * each.runs_on * np.array([each.of_empty(kind) for kind in table.types], np.int64)
            for each in self._classes
        ]
        self._room: Ints = np.zeros(0, np.int64) if before is None else before._room
        self._generation: int = -1 if before is None else before._generation
        self._given: int = 0 if before is None else before._given
        self._taken: int = 0 if before is None else before._taken
        self._decided = 0
        self._look_after = max(LOOK_MIN, len(table) // LOOK_HOSTS)
        self.back = 0  # 64ths of the empty fleet that count as left
        self.left = 0  # what is left for all, hundredths of a GPU
        self.of_type: Ints = self._found(table)

    def decided(self, number: int) -> None:
        """So many replicas were decided on."""
        self._decided += number

    def until_look(self) -> int:
        """How many more replicas are decided on before the next look; 0 when it is due."""
        return max(0, self._look_after - self._decided)

    def look(self, table: HostTable) -> bool:
        """Find it anew; whether it moved so far that it is in use now."""
        self._decided = 0
        self._look_after = max(LOOK_MIN, len(table) // LOOK_HOSTS)
        found = self._found(table)
        if int(np.abs(found - self.of_type).max(initial=0)) <= MOVED:
            return False
        self.of_type = found
        return True

    def charges(self, gpus_percent: int) -> Ints:
        """What a request for so many hundredths of a GPU is charged by type of host, in thousandths of a GPU."""
        return self.of_type * (gpus_percent * 10) // (ONE * CHARGED_PART)

    def _found(self, table: HostTable) -> Ints:
        cells = table.cells[:, : len(table)]
        room: Ints = cells[ROOM:].sum(0)
        room -= NO_ROOM * (cells[ROOM:] == NO_ROOM).sum(0)
        self._learn(table, room)
        self.back = LEFT_ALWAYS + (min(LEFT_BACK, LEFT_BACK * self._given // self._taken) if self._taken else 0)
        columns = np.vstack((cells[TYPE], cells[FREE], np.maximum(0, cells[CPU]), room))
        every, *left = (
            _left(columns, each) + (empty * self.back >> 6)
            for each, empty in zip(self._classes, self._empty, strict=True)
        )
        asked = np.zeros(len(every), np.int64)
        for each, there in zip(self._classes[1:], left, strict=True):
            asked += each.demand * there // max(1, int(there.sum()))
        self.left = int(every.sum())
        pressure = asked * self.left // np.maximum(1, every) // (_DEMAND // ONE)
        found: Ints = np.minimum(PRESSURE_MAX, pressure)
        return found

    def _learn(self, table: HostTable, room: Ints) -> None:
        """What was taken and given back since the last look, older looks counting less."""
        if self._generation == table.generation:
            change = room[: len(self._room)] - self._room
            self._given += int(np.maximum(0, change).sum()) - (self._given >> 3)
            self._taken += int(np.maximum(0, -change).sum()) - (self._taken >> 3)
        self._generation, self._room = table.generation, room


def _left(columns: Ints, each: Class) -> Ints:
    """What is left for a class by type of host, hundredths of a GPU; rows are type, free devices, processors, room."""
    if not each.runs_on.all():
        columns = columns.take(each.runs_on.take(columns[0]).nonzero()[0], 1)
    kinds, free, cpu, room = columns
    if each.devices == 1:
        left = np.minimum(room, cpu * 100 // each.cpu_milli) if each.cpu_milli else room
    else:
        left = free // each.devices
        if each.cpu_milli:
            left = np.minimum(left, cpu // (each.cpu_milli * each.devices))
        left = left * (100 * each.devices)
    return np.bincount(kinds, left, minlength=len(each.runs_on)).astype(np.int64)


def classes_of(table: HostTable, mix: list[tuple[Shape, int]]) -> list[Class]:
    """The classes of a mix that ask for GPUs and that some host can run, those with the most demand first."""
    found: dict[tuple[int, bytes], list[int]] = {}
    answers: dict[tuple[object, ...], Bools] = {}
    cpus = np.array([kind.cpu_milli or UNCOUNTED for kind in table.types], np.int64)
    memory = np.array([kind.memory_mib or UNCOUNTED for kind in table.types], np.int64)
    for shape, number in mix:
        gpus = gpu_percent(table, shape)
        if not gpus:
            continue
        whole = shape.mode == EXCLUSIVE
        count = shape.count if whole else 1
        key = (shape.count, shape.vendor, shape.models, shape.min_memory_mib, shape.share_mib)
        answer = answers.get(key)
        if answer is None:
            answer = answers[key] = np.array([_answers(table, kind, shape) for kind in table.types], np.bool_)
        runs_on = answer & (cpus >= shape.cpu_milli) & (memory >= shape.memory_mib) if whole else answer
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


def _answers(table: HostTable, kind: HostType, shape: Shape) -> bool:
    return bool(kind.kinds) and kind.gpus >= shape.count and table.kinds[kind.kinds[0]].rank(shape) > 0
