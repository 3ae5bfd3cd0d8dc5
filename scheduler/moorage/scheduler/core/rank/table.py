"""The fleet as columns of whole numbers, so that rankers can look at every host in a few array operations.

A row is a host, in the order of worker numbers: the first row wins ties, today and after a takeover. `Fleet.touched`
names what changed since the last look; only those rows are written again. What a device has left is one number in
percent: the least of its compute, memory and sharers left, `NO_ROOM` where it takes nobody.

The first axis of every array here is the column, the second the row: what is added up or compared over the few devices
of many hosts is then a few operations on long rows, 5 to 10 times as fast as many on short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moorage.scheduler.core.fleet import Fleet
from moorage.scheduler.core.host import EXCLUSIVE, MEMBERS_MAX, NO_GPU, Fit, Host, HostClass
from moorage.scheduler.core.shape import DeviceAsked, Shape

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

#: the room of a device that takes nobody, or is not there: one above the largest
NO_ROOM: Final = 101
ROOMS: Final = 102
#: stands for "the worker did not say", which no request exceeds
UNCOUNTED: Final = 1 << 40
#: ways of asking for a device of which a kind remembers how well it answers: a new mix asks for each of its shapes
RANKS_MAX: Final = 4_096
#: rows written last that are known in their order, and the part of all rows up to which they are looked up there
WRITTEN_KEPT: Final = 4_096
WRITTEN_PART: Final = 8
#: first index of `HostTable.cells`; from ROOM on, what each device has left
CPU, MEMORY, FREE, CLASS, TYPE, KIND, NOTE, ROOM = range(8)


_NO_ROWS: Final = np.zeros(0, np.int64)


class Kind:
    """Devices that answer alike: vendor, name, memory, and how many sharers they take."""

    __slots__ = ("_ranks", "index", "memory_mib", "name", "sharers", "slot", "vendor")

    def __init__(self, key: tuple[Any, ...], index: int) -> None:
        self._ranks: dict[DeviceAsked, int] = {}
        self.index = index
        self.vendor, self.name, self.memory_mib = str(key[0]), str(key[1]), int(key[2])
        self.sharers = {2: int(key[3]), 3: int(key[4])}

    def rank(self, shape: Shape) -> int:
        """Whether such a device answers a shape, as `Shape.device_rank`; its place in the host is not looked at."""
        rank = self._ranks.get(shape.device_asked)
        if rank is None:
            if len(self._ranks) >= RANKS_MAX:
                self._ranks.clear()
            slot = shape.slot_index if shape.slot_index is not None else 0
            rank = shape.device_rank(self.vendor, self.name, self.memory_mib, slot)
            self._ranks[shape.device_asked] = rank
        return rank

    def need(self, shape: Shape) -> int:
        """What one replica takes of such a device, in percent: the most that compute, memory or sharers ask for."""
        if shape.mode <= EXCLUSIVE:
            return 100
        need = max(1, shape.compute_percent, 100 // self.sharers[shape.mode])
        if shape.share_mib and self.memory_mib:
            need = max(need, 100 * shape.share_mib // self.memory_mib)
        return min(100, need)


class HostType:
    """Hosts with the same devices and processors, and nearly as much memory, when empty."""

    __slots__ = ("cpu_milli", "gpus", "index", "kinds", "memory_mib")

    def __init__(self, kinds: tuple[int, ...], cpu_milli: int, memory_mib: int, index: int) -> None:
        self.kinds = kinds
        self.cpu_milli = cpu_milli
        self.memory_mib = memory_mib
        self.gpus = len(kinds)
        self.index = index


class HostTable:
    """Rows of all hosts of a fleet. `look` brings it up to date; columns are read, never written, by rankers."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        #: what a ranker wants to stand beside a row, in the place NOTE, whenever that is written
        self.note: Callable[[list[int]], int] | None = None
        self.kinds: list[Kind] = []
        self.types: list[HostType] = []
        self.classes: list[HostClass] = []
        self._kind_of: dict[tuple[Any, ...], int] = {}
        self._type_of: dict[tuple[Any, ...], int] = {}
        self._class_of: dict[int, int] = {}
        self._answers: dict[DeviceAsked, Bools] = {}
        self._needs: dict[tuple[int, int, int], Ints] = {}
        self._holds: dict[tuple[DeviceAsked, int], Bools] = {}
        self.generation = 0  # grows when rows, classes, types or kinds were renumbered: forget all about them
        self.changes = 0  # rows that were written so far, each as often as it was
        self._written: Ints = np.zeros(WRITTEN_KEPT, np.int64)  # the last of them, as a ring
        self._build()

    # ------------------------------------------------------------------------------------ building

    def _build(self) -> None:
        """Number all hosts anew."""
        fleet = self.fleet
        self.touched: set[int] = set()
        fleet.touched = self.touched
        nums = sorted(fleet.hosts)
        self.nums: list[int] = []
        self.hosts: list[Host | None] = []
        self._is: dict[int, tuple[int, int, int]] = {}  # class, type and first kind by row
        self.row_of: dict[int, int] = {}
        self.dead = 0
        self.width = max((len(cls.devices) for cls in fleet.classes.values()), default=1) or 1
        self._reserve(max(64, len(nums) + len(nums) // 4))
        self.generation += 1
        self.mixed = False  # whether some host has devices of several kinds
        self.hidden = False  # whether sharers' number or memory ever left less of a device than their compute did
        self.modes = 0  # the shared modes that were ever seen in use, as bits
        self.types.clear()
        self._holds.clear()
        self._type_of.clear()
        self._kinds_of_type: Ints = _NO_ROWS
        self.classes.clear()
        self._class_of.clear()
        for num in nums:
            self._append(num, fleet.hosts[num])

    def changed_since(self, seen: int) -> Ints:
        """The rows that changed after the change of this number."""
        return (self.changed[: len(self.nums)] > seen).nonzero()[0]

    def written_since(self, seen: int) -> Ints:
        """The same rows in any order, some of them more than once: without a look at all where they are few."""
        count = self.changes - seen
        start = seen % WRITTEN_KEPT
        if count * WRITTEN_PART > len(self.nums) or start + count > WRITTEN_KEPT:
            return self.changed_since(seen)
        return self._written[start : start + count]

    def modes_of(self, rows: Ints) -> Ints:
        """The mode in which each device of some rows is shared, 0 for none."""
        found: Ints = self.mode.take(rows, 1)
        return found

    def alive(self) -> Bools:
        """Which rows are hosts: the others have left."""
        return np.array([host is not None for host in self.hosts], np.bool_)

    def _reserve(self, rows: int) -> None:
        self.cells = np.full((ROOM + self.width, rows), NO_ROOM, np.int64)
        self.mode = np.zeros((self.width, rows), np.int64)
        self.slots: Ints = np.arange(self.width)[:, None]
        self.changed = np.zeros(rows, np.int64)  # the number of each row's last change

    def _append(self, num: int, host: Host) -> None:
        row = len(self.nums)
        if row == len(self.changed):
            self._grow()
        self.nums.append(num)
        self.hosts.append(None)
        self.row_of[num] = row
        self._describe(row, host)

    def _grow(self) -> None:
        more = max(64, len(self.changed) // 2)
        self.cells = np.concatenate([self.cells, np.full((len(self.cells), more), NO_ROOM, np.int64)], 1)
        self.mode = np.concatenate([self.mode, np.zeros((self.width, more), np.int64)], 1)
        self.changed = np.concatenate([self.changed, np.zeros(more, np.int64)])

    def _describe(self, row: int, host: Host) -> None:
        """A host that is new, or joined anew."""
        self.hosts[row] = host
        kind = self._index_type(host)
        self._is[row] = (self._index_class(host.cls), kind.index, kind.kinds[0] if kind.kinds else 0)
        self._write(row, host)

    def _index_class(self, cls: HostClass) -> int:
        index = self._class_of.get(id(cls))
        if index is None or self.classes[index] is not cls:
            index = self._class_of[id(cls)] = len(self.classes)
            self.classes.append(cls)
        return index

    def kind_at(self, cls: HostClass, mask: int) -> int:
        """The kind of the lowest slot of a mask; 0 for none."""
        if not mask:
            return 0
        _, vendor, name, memory = cls.devices[(mask & -mask).bit_length() - 1]
        return self._kind_of[vendor, name, memory, cls.sharers(2), cls.sharers(3)]

    def _index_type(self, host: Host) -> HostType:
        cls = host.cls
        kinds = tuple(
            self._index_kind((vendor, name, memory, cls.sharers(2), cls.sharers(3)))
            for _, vendor, name, memory in cls.devices
        )
        key = (kinds, host.cpu_milli, nearly(host.memory_mib))
        index = self._type_of.get(key)
        if index is None:
            index = self._type_of[key] = len(self.types)
            self.types.append(HostType(*key, index))
            self.mixed = self.mixed or len(set(kinds)) > 1
        return self.types[index]

    @property
    def kinds_of_type(self) -> Ints:
        """The kind of each device of each type; a column a type."""
        if self._kinds_of_type.size != len(self.types) * self.width:
            padded = [[*t.kinds, *[0] * (self.width - t.gpus)] for t in self.types]
            self._kinds_of_type = np.array(padded, np.int64).reshape(len(self.types), self.width).T.copy()
        return self._kinds_of_type

    def _index_kind(self, key: tuple[Any, ...]) -> int:
        index = self._kind_of.get(key)
        if index is None:
            index = self._kind_of[key] = len(self.kinds)
            self.kinds.append(Kind(key, index))
        return index

    # --------------------------------------------------------------------------------- what answers a shape

    def answers(self, shape: Shape) -> Bools:
        """By kind, whether such a device answers; as `Kind.rank`."""
        found = self._answers.get(shape.device_asked)
        if found is None or len(found) != len(self.kinds):
            if len(self._answers) >= RANKS_MAX:
                self._answers.clear()
            found = np.array([kind.rank(shape) > 0 for kind in self.kinds], np.bool_)
            self._answers[shape.device_asked] = found
        return found

    def needs(self, shape: Shape) -> Ints:
        """By kind, what one replica takes of such a device; as `Kind.need`."""
        key = (shape.mode, shape.compute_percent, shape.share_mib)
        found = self._needs.get(key)
        if found is None or len(found) != len(self.kinds):
            if len(self._needs) >= RANKS_MAX:
                self._needs.clear()
            found = self._needs[key] = np.array([kind.need(shape) for kind in self.kinds], np.int64)
        return found

    def answers_of(self, shapes: Sequence[Shape]) -> Bools:
        """`answers` of many: a row a shape."""
        found: Bools = self._rows_of(shapes, lambda shape: shape.device_asked, self.answers, np.bool_)
        return found

    def needs_of(self, shapes: Sequence[Shape]) -> Ints:
        """`needs` of many: a row a shape."""
        found: Ints = self._rows_of(
            shapes, lambda shape: (shape.mode, shape.compute_percent, shape.share_mib), self.needs, np.int64
        )
        return found

    def _rows_of(
        self, shapes: Sequence[Shape], key_of: Callable[[Shape], object], row_of: Callable[[Shape], Any], dtype: Any
    ) -> Any:
        """Most ask as others do: each way of asking is looked up once."""
        at: dict[object, int] = {}
        rows: list[Any] = []
        places: list[int] = []
        for shape in shapes:
            key = key_of(shape)
            place = at.get(key)
            if place is None:
                place = at[key] = len(rows)
                rows.append(row_of(shape))
            places.append(place)
        return np.array(rows, dtype).reshape(len(rows), len(self.kinds))[places]

    def holds(self, shape: Shape) -> Bools:
        """By type, whether the devices of such a host, when it is empty, answer and are enough."""
        key = (shape.device_asked, shape.count)
        found = self._holds.get(key)
        if found is None or len(found) != len(self.types):
            if len(self._holds) >= RANKS_MAX:
                self._holds.clear()
            answers = self.answers(shape)
            found = self._holds[key] = np.array(
                [bool(kind.kinds) and kind.gpus >= shape.count and bool(answers[kind.kinds[0]]) for kind in self.types],
                np.bool_,
            )
        return found

    # ------------------------------------------------------------------------------------ keeping up

    def __len__(self) -> int:
        return len(self.nums)

    def look(self) -> None:
        """Write the rows of every host that changed since the last look."""
        touched = self.touched
        if self.fleet.touched is not touched:  # somebody else looked after this fleet meanwhile
            self._build()
            return
        if not touched:
            return
        hosts, row_of = self.fleet.hosts, self.row_of
        new = []
        for num in sorted(touched) if len(touched) > 1 else touched:
            row = row_of.get(num)
            host = hosts.get(num)
            if row is None:
                if host is not None:
                    new.append((num, host))
            elif host is None:
                self._bury(row)
            elif self.hosts[row] is host and self.classes[self._is[row][0]] is host.cls:
                self._write(row, host)
            elif len(host.cls.devices) > self.width:  # it came back with more devices than any host had
                self._build()
                return
            else:
                self.dead -= self.hosts[row] is None
                self._describe(row, host)
        touched.clear()
        if new or self.dead > 64 + len(self.nums) // 2 or len(self.classes) > 64 + 4 * len(self.fleet.classes):
            self._add(new)

    def _add(self, new: list[tuple[int, Host]]) -> None:
        wide = any(len(host.cls.devices) > self.width for _, host in new)
        late = new and self.nums and new[0][0] < self.nums[-1]
        if wide or late or self.dead > 64 + len(self.nums) // 2 or not new:
            self._build()
            return
        for num, host in new:
            self._append(num, host)

    def _bury(self, row: int) -> None:
        if self.hosts[row] is not None:
            self.dead += 1
            self.hosts[row] = None
        self._close(row)

    def _close(self, row: int) -> None:
        """Nobody fits on this row."""
        self.cells[:, row] = [-1, -1, 0, *self._is[row], 0, *[NO_ROOM] * self.width]
        self._mark(row)

    def _mark(self, row: int) -> None:
        self._written[self.changes % WRITTEN_KEPT] = row
        self.changes += 1
        self.changed[row] = self.changes

    def _write(self, row: int, host: Host) -> None:
        """What is left on a host."""
        if host.bucket < 0 or host.held >= MEMBERS_MAX:  # filed nowhere: not usable
            self._close(row)
            return
        rooms, modes, free = rooms_of(host, self.width)
        cells = [
            host.cpu_free if host.cpu_milli else UNCOUNTED,
            host.memory_free if host.memory_mib else UNCOUNTED,
            free,
            *self._is[row],
            0,
            *rooms,
        ]
        if self.note is not None:
            cells[NOTE] = self.note(cells)
        self.cells[:, row] = cells
        self._mark(row)
        if modes is not None:
            for slot, device in host.shared.items():
                self.modes |= 1 << device.mode
                if rooms[slot] != NO_ROOM and rooms[slot] < 100 - device.percent:
                    self.hidden = True
        if self.modes & self.modes - 1:
            self.mode[:, row] = modes or 0


def nearly(memory_mib: int) -> int:
    """Less by under a hundredth: machines of one kind tell some MiB more or less, and are still of one type."""
    step = max(0, memory_mib.bit_length() - 7)
    return memory_mib >> step << step


def rooms_of(host: Host, width: int) -> tuple[list[int], list[int] | None, int]:
    """What each device of a host has left, the mode it is shared in, and how many are free; modes None: all 0."""
    shut = host.shut
    open_ = 0 if host.waiting else host.free & ~shut  # `Host.open`
    count, every = open_.bit_count(), len(host.cls.devices)
    rooms = [100] * every if count == every else [100 if open_ >> slot & 1 else NO_ROOM for slot in range(every)]
    rooms += [NO_ROOM] * (width - every)
    if not host.shared:
        return rooms, None, count
    modes = [0] * width
    mode = most = 0
    for slot, device in host.shared.items():
        modes[slot] = device.mode
        if not host.waiting and not shut >> slot & 1:
            if device.mode != mode:
                mode, most = device.mode, host.cls.sharers(device.mode)
            room, by_number = 100 - device.percent, 100 * (most - device.users) // most
            if by_number < room:
                room = by_number
            if device.memory_mib:
                memory = host.cls.devices[slot][3]
                if memory:
                    room = min(room, 100 * (memory - device.memory_mib) // memory)
            rooms[slot] = room
    return rooms, modes, count


class Ask:
    """A shape, as seen by one numbering of the table: which classes answer and what it takes of each kind."""

    __slots__ = (
        "all_fit",
        "count",
        "cpu",
        "fits",
        "generation",
        "kinds",
        "kinds_asked",
        "least",
        "masks",
        "mode",
        "needs",
        "ranked",
        "ranks",
        "shape",
    )

    def __init__(self, shape: Shape, table: HostTable) -> None:
        self.shape = shape
        self.generation = -1
        self.count = shape.count
        self.cpu = shape.cpu_milli
        self.mode = shape.mode
        devices = shape.count if shape.mode == EXCLUSIVE else 0
        self.least: Ints = np.array([[shape.cpu_milli], [shape.memory_mib or -UNCOUNTED], [devices]], np.int64)
        self.needs: tuple[int, ...] = ()
        self.renew(table)

    def renew(self, table: HostTable) -> None:
        """Answer for the classes and kinds that came since."""
        shape = self.shape
        found: list[Fit] = [cls.fit(shape) for cls in table.classes]
        self.fits: Bools = np.array([not fit.reason for fit in found], np.bool_)
        self.all_fit = bool(self.fits.all())
        self.ranks: Ints = np.array([2 - fit.rank if not fit.reason else 0 for fit in found], np.int64)
        self.ranked = bool(self.ranks.any())
        self.masks: Bools | None = None
        if shape.mode != NO_GPU and any(
            not fit.reason and fit.mask != (1 << len(cls.devices)) - 1
            for fit, cls in zip(found, table.classes, strict=True)
        ):
            width = range(table.width)
            self.masks = np.array([[bool(fit.mask >> slot & 1) for fit in found] for slot in width], np.bool_)
        self.needs = tuple(table.needs(shape).tolist())
        self.kinds = len(table.kinds)
        # the kind of the first slot that answers, by class
        self.kinds_asked: Ints = np.array(
            [table.kind_at(cls, fit.mask) for cls, fit in zip(table.classes, found, strict=True)], np.int64
        )
        self.generation = table.generation

    def is_exact(self, table: HostTable) -> bool:
        """Whether one number a device says all: else a sharer may fit where its row says that it does not."""
        if self.mode <= EXCLUSIVE:
            return True
        return not table.hidden and all(need == self.shape.compute_percent for need in self.needs)

    def able(self, table: HostTable, rows: Ints) -> tuple[Ints, Ints]:
        """Those of some rows that have the class, processors, memory and devices now, and their cells."""
        cells = table.cells
        ok: Bools = np.logical_and.reduce(cells[:CLASS].take(rows, 1) >= self.least)
        if not self.all_fit:
            ok &= self.fits.take(cells[CLASS].take(rows))
        if self.mode == EXCLUSIVE and self.masks is not None:
            whole = (cells[ROOM:].take(rows, 1) == 100) & self.masks.take(cells[CLASS].take(rows), 1)
            ok &= whole.sum(0) >= self.count
        rows = rows[ok]
        return rows, cells.take(rows, 1)

    def rooms(self, table: HostTable, rows: Ints, cells: Ints, room: Ints) -> Ints:
        """What the devices of some rows have left for this shape; `room` with `NO_ROOM` where it may not go."""
        if self.masks is not None:
            room = np.where(self.masks.take(cells[CLASS], 1), room, NO_ROOM)
        if self.mode > EXCLUSIVE and table.modes & ~(1 << self.mode):
            mode = table.modes_of(rows)
            room = np.where((mode == 0) | (mode == self.mode), room, NO_ROOM)
        return room
