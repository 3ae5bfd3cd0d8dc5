"""The fleet as integer columns, so that rankers can score every host in a few array operations.

A row is a host, in the order of worker numbers: the first row wins ties, also after a takeover. `Fleet.touched` names
the hosts that changed since the last update; only their rows are written again. The room of a device is one number in
percent: the least of its remaining compute, memory and sharers, or `NO_ROOM` if it takes no job.

The first axis of every array is the column, the second the row: adding up the few devices of many hosts then takes a
few operations on long rows, 5 to 10 times as fast as many operations on short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import ATTEMPTS_MAX, EXCLUSIVE, NO_GPU, Fit, Host, HostClass
from moorage.scheduler.core.fleet.shape import DeviceAsked, Shape
from moorage.schemas.memo import Memo

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: the room of a device that takes no job or does not exist: one above the largest
NO_ROOM: Final = 101
ROOMS: Final = 102
#: "not reported by the worker"; no request exceeds it
UNCOUNTED: Final = 1 << 40
#: how many ways of asking for a device are cached for each kind
RANKS_MAX: Final = 4_096
#: everything is renumbered when the classes, types or kinds without hosts exceed this plus this many for each in use.
#: Workers may rejoin with other devices or CPU each time
STALE_SPARE: Final = 64
STALE_EACH: Final = 4
#: the last rows written are kept in order, and used if they are at most this part of all rows
WRITTEN_KEPT: Final = 4_096
WRITTEN_PART: Final = 8
#: first index of `HostTable.cells`; from ROOM on, the room of each device; MOST is the largest of those
CPU, MEMORY, FREE, MOST, CLASS, TYPE, KIND, ROOM = range(8)


class Kind:
    """A kind of device: equal vendor, name, memory, compute capability and number of sharers."""

    __slots__ = ("_ranks", "compute", "index", "memory_mib", "name", "sharers", "slot", "vendor")

    def __init__(self, key: tuple[Any, ...], index: int) -> None:
        self._ranks: Memo[DeviceAsked, int] = Memo(RANKS_MAX)
        self.index = index
        self.vendor, self.name, self.memory_mib, self.compute = str(key[0]), str(key[1]), int(key[2]), int(key[3])
        self.sharers = {2: int(key[4]), 3: int(key[5])}

    def rank(self, shape: Shape) -> int:
        """Return how well such a device matches a shape, as `Shape.device_rank`, ignoring its index in the host."""
        rank = self._ranks.get(shape.device_asked)
        if rank is None:
            slot = shape.slot_index if shape.slot_index is not None else 0
            rank = self._ranks.put(
                shape.device_asked, shape.device_rank(self.vendor, self.name, self.memory_mib, self.compute, slot)
            )
        return rank

    def need(self, shape: Shape) -> int:
        """Return what one replica takes of such a device, in percent: the most of compute, memory and sharers."""
        if shape.mode <= EXCLUSIVE:
            return 100
        need = max(1, shape.compute_percent, 100 // self.sharers[shape.mode])
        if shape.share_mib and self.memory_mib:
            need = max(need, 100 * shape.share_mib // self.memory_mib)
        return min(100, need)


class HostType:
    """A type of host: equal devices and CPU, and nearly equal memory, when empty."""

    __slots__ = ("cpu_milli", "gpus", "index", "kinds", "memory_mib")

    def __init__(self, kinds: tuple[int, ...], cpu_milli: int, memory_mib: int, index: int) -> None:
        self.kinds = kinds
        self.cpu_milli = cpu_milli
        self.memory_mib = memory_mib
        self.gpus = len(kinds)
        self.index = index


class HostTable:
    """Rows of all hosts of a fleet. `look` brings it up to date; rankers must not write to the columns."""

    def __init__(self, fleet: Fleet, stale_spare: int = STALE_SPARE) -> None:
        self.fleet = fleet
        self._stale_spare = stale_spare
        self.kinds: list[Kind] = []
        self.types: list[HostType] = []
        self.classes: list[HostClass] = []
        self._kind_of: dict[tuple[Any, ...], int] = {}
        self._type_of: dict[tuple[Any, ...], int] = {}
        self._class_of: dict[int, int] = {}
        self._answers: Memo[DeviceAsked, Bools] = Memo(RANKS_MAX)
        self._needs: Memo[tuple[int, int, int], Ints] = Memo(RANKS_MAX)
        self._holds: Memo[tuple[DeviceAsked, int], Bools] = Memo(RANKS_MAX)
        self.generation = 0  # grows when rows, classes, types or kinds are renumbered: callers must drop their caches
        self.changes = 0  # number of rows written so far, counting repeats
        self._written: Ints = np.zeros(WRITTEN_KEPT, np.int64)  # the last rows written, as a ring
        self._build()

    # ------------------------------------------------------------------------------------ building

    def _build(self) -> None:
        """Number all hosts again."""
        fleet = self.fleet
        self.touched: set[int] = set()
        fleet.touched = self.touched
        nums = sorted(fleet.hosts)
        self.nums: list[int] = []
        self.hosts: list[Host | None] = []
        self._of: list[tuple[int, int, int]] = []  # (class, type, kind of the first device) of each row
        self.row_of: dict[int, int] = {}
        self.dead = 0
        self.width = max((len(cls.devices) for cls in fleet.classes.values()), default=1) or 1
        self._reserve(max(64, len(nums) + len(nums) // 4))
        self.generation += 1
        self.mixed = False  # whether any host has devices of different kinds
        # whether any device's room was ever less than its compute left, because of sharers or memory
        self.hidden = False
        self.modes = 0  # the sharing modes ever seen in use, as bits
        self._tells_modes = False  # whether `mode` is maintained; not needed while all sharers use one mode
        self.types.clear()
        if self._is_many(len(self.kinds), len(fleet.classes) * self.width):
            self.kinds.clear()
            self._kind_of.clear()
            self._answers.clear()
            self._needs.clear()
        self._holds.clear()
        self._type_of.clear()
        self._kinds_of_type: Ints = np.zeros((self.width, 0), np.int64)
        self.classes.clear()
        self._class_of.clear()
        for num in nums:
            self._append(num, fleet.hosts[num])

    def written_since(self, seen: int) -> Ints:
        """Return the rows that changed after this change number, in any order, possibly repeated; fast if few."""
        count = self.changes - seen
        start = seen % WRITTEN_KEPT
        if count * WRITTEN_PART > len(self.nums) or start + count > WRITTEN_KEPT:
            return (self.changed[: len(self.nums)] > seen).nonzero()[0]
        return self._written[start : start + count]

    def modes_of(self, rows: Ints) -> Ints:
        """Return the mode in which each device of these rows is shared; 0 for none."""
        if not self._tells_modes:
            self._tells_modes = True
            for row, host in enumerate(self.hosts):
                if host is not None:
                    self._write_mode(row, host)
        found: Ints = self.mode.take(rows, 1)
        return found

    def alive(self) -> Bools:
        """Return for each row whether it is a host; the others have left."""
        return np.array([host is not None for host in self.hosts], np.bool_)

    def _reserve(self, rows: int) -> None:
        self.cells = np.full((ROOM + self.width, rows), NO_ROOM, np.int64)
        self.mode = np.zeros((self.width, rows), np.int64)
        self._no_rooms = [NO_ROOM] * self.width
        self.changed = np.zeros(rows, np.int64)  # the number of each row's last change

    def _append(self, num: int, host: Host) -> None:
        row = len(self.nums)
        if row == len(self.changed):
            self._grow()
        self.nums.append(num)
        self.hosts.append(None)
        self._of.append((-1, -1, -1))
        self.row_of[num] = row
        self._describe(row, host)

    def _grow(self) -> None:
        more = max(64, len(self.changed) // 2)
        self.cells = np.concatenate([self.cells, np.full((len(self.cells), more), NO_ROOM, np.int64)], 1)
        self.mode = np.concatenate([self.mode, np.zeros((self.width, more), np.int64)], 1)
        self.changed = np.concatenate([self.changed, np.zeros(more, np.int64)])

    def _describe(self, row: int, host: Host) -> None:
        """Fill the row of a host that is new or joined again."""
        self.hosts[row] = host
        kind = self._index_type(host)
        self._of[row] = (self._index_class(host.cls), kind.index, kind.kinds[0] if kind.kinds else 0)
        self._write(row, host)

    def _index_class(self, cls: HostClass) -> int:
        index = self._class_of.get(id(cls))
        if index is None or self.classes[index] is not cls:
            index = self._class_of[id(cls)] = len(self.classes)
            self.classes.append(cls)
        return index

    def kind_at(self, cls: HostClass, mask: int) -> int:
        """Return the number of the kind of the lowest slot of a mask; 0 if the mask is empty."""
        if not mask:
            return 0
        kind = cls.devices[(mask & -mask).bit_length() - 1][1:]
        return self._kind_of[*kind, cls.sharers(2), cls.sharers(3)]

    def _index_type(self, host: Host) -> HostType:
        cls = host.cls
        kinds = tuple(self._index_kind((*device[1:], cls.sharers(2), cls.sharers(3))) for device in cls.devices)
        key = (kinds, host.cpu_milli, nearly(host.memory_mib))
        index = self._type_of.get(key)
        if index is None:
            index = self._type_of[key] = len(self.types)
            self.types.append(HostType(*key, index))
            self.mixed = self.mixed or len(set(kinds)) > 1
        return self.types[index]

    @property
    def kinds_of_type(self) -> Ints:
        """The kind of each device, a column for each host type."""
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
        """Return, by kind, whether such a device matches the shape; see `Kind.rank`."""
        found = self._answers.get(shape.device_asked)
        if found is None or len(found) != len(self.kinds):
            row = np.array([kind.rank(shape) > 0 for kind in self.kinds], np.bool_)
            found = self._answers.put(shape.device_asked, row)
        return found

    def needs(self, shape: Shape) -> Ints:
        """Return, by kind, what one replica takes of such a device; see `Kind.need`."""
        key = (shape.mode, shape.compute_percent, shape.share_mib)
        found = self._needs.get(key)
        if found is None or len(found) != len(self.kinds):
            found = self._needs.put(key, np.array([kind.need(shape) for kind in self.kinds], np.int64))
        return found

    def answers_of(self, shapes: Sequence[Shape]) -> Bools:
        """Return `answers` of several shapes, a row for each."""
        found: Bools = self._rows_of(shapes, lambda shape: shape.device_asked, self.answers, np.bool_)
        return found

    def needs_of(self, shapes: Sequence[Shape]) -> Ints:
        """Return `needs` of several shapes, a row for each."""
        found: Ints = self._rows_of(
            shapes, lambda shape: (shape.mode, shape.compute_percent, shape.share_mib), self.needs, np.int64
        )
        return found

    def _rows_of(
        self, shapes: Sequence[Shape], key_of: Callable[[Shape], object], row_of: Callable[[Shape], Any], dtype: Any
    ) -> Any:
        """Return `row_of` of each shape, computed once for shapes with equal keys."""
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
        """Return, by type, whether an empty host has enough matching devices, judged by the kind of its first device.

        False for hosts without devices.
        """
        key = (shape.device_asked, shape.count)
        found = self._holds.get(key)
        if found is None or len(found) != len(self.types):
            answers = self.answers(shape)
            row = [
                bool(kind.kinds) and kind.gpus >= shape.count and bool(answers[kind.kinds[0]]) for kind in self.types
            ]
            found = self._holds.put(key, np.array(row, np.bool_))
        return found

    # ------------------------------------------------------------------------------------ keeping up

    def __len__(self) -> int:
        return len(self.nums)

    def look(self) -> None:
        """Write the rows of all hosts that changed since the last update; renumber all hosts if it must.

        Then `generation` grows.
        """
        touched = self.touched
        if self.fleet.touched is not touched:  # another table has replaced this one's set meanwhile
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
            elif self.hosts[row] is host and self.classes[self._of[row][0]] is host.cls:
                self._write(row, host)
            elif len(host.cls.devices) > self.width:  # the host rejoined with more devices than any host had
                self._build()
                return
            else:
                self.dead -= self.hosts[row] is None
                self._describe(row, host)
        touched.clear()
        if new or self.dead > 64 + len(self.nums) // 2 or self._is_stale():
            self._add(new)

    def _is_many(self, known: int, there: int) -> bool:
        return known > self._stale_spare + STALE_EACH * there

    def _is_stale(self) -> bool:
        """Return whether most of the numbered classes or types have no hosts any more."""
        fleet = self.fleet
        return self._is_many(len(self.classes), len(fleet.classes)) or self._is_many(len(self.types), len(fleet.hosts))

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
        """Mark a row as having no room."""
        self._put(row, [-1, -1, 0, 0, *self._of[row], *self._no_rooms])

    def _put(self, row: int, line: list[int]) -> None:
        self.cells[:, row] = line
        self._written[self.changes % WRITTEN_KEPT] = row
        self.changes += 1
        self.changed[row] = self.changes

    def _write(self, row: int, host: Host) -> None:
        """Write what is left on a host into its row."""
        if host.bucket < 0 or host.held >= ATTEMPTS_MAX:  # the host is not usable or is full
            self._close(row)
            return
        cpu = host.cpu_free if host.cpu_milli else UNCOUNTED
        memory = host.memory_free if host.memory_mib else UNCOUNTED
        line = [cpu, memory, 0, 0, *self._of[row], *self._no_rooms]
        self._write_rooms(line, host)
        self._put(row, line)
        if self._tells_modes:
            self._write_mode(row, host)

    def _write_mode(self, row: int, host: Host) -> None:
        self.mode[:, row] = 0
        for slot, device in host.shared.items():
            self.mode[slot, row] = device.mode

    def _write_rooms(self, line: list[int], host: Host) -> None:
        """Write the room of each device of a host, the number of free ones, and the largest room."""
        shut, waiting = host.shut, host.waiting
        free = 0 if waiting else host.free & ~shut & ~host.awaited  # `Host.open`
        line[FREE] = free.bit_count()
        most = 100 if free else 0
        while free:
            low = free & -free
            line[ROOM - 1 + low.bit_length()] = 100
            free ^= low
        mode = sharers = 0
        for slot, device in host.shared.items():
            if device.mode != mode:
                mode, sharers = device.mode, host.cls.sharers(device.mode)
                self.modes |= 1 << mode
            if waiting or shut >> slot & 1:
                continue
            left = room = 100 - device.percent
            by_number = 100 * (sharers - device.users) // sharers
            if by_number < room:
                room = by_number
            if device.memory_mib:
                memory = host.cls.devices[slot][3]
                if memory:
                    room = min(room, 100 * (memory - device.memory_mib) // memory)
            line[ROOM + slot] = room
            if room < left:
                self.hidden = True
            if room > most:
                most = room
        line[MOST] = most


def nearly(memory_mib: int) -> int:
    """Return a memory size rounded down by less than 2%: equal machines report sizes that differ by some MiB."""
    step = max(0, memory_mib.bit_length() - 7)
    return memory_mib >> step << step


class Ask:
    """A shape's needs, by the classes and kinds of one numbering of the table."""

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
        self.needs: tuple[int, ...] = ()
        self.renew(table)

    def renew(self, table: HostTable) -> None:
        """Recompute for classes and kinds added since."""
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
        devices = shape.count if shape.mode == EXCLUSIVE else 0
        room = min(self.needs, default=0) if shape.mode > EXCLUSIVE else 0
        #: the least CPU, MEMORY, FREE and MOST that a host must have
        enough = (shape.cpu_milli, shape.memory_mib or -UNCOUNTED, devices, room)
        self.least: Ints = np.array(enough, np.int64)[:, None]
        self.kinds = len(table.kinds)
        # the kind of the first matching slot, by class
        self.kinds_asked: Ints = np.array(
            [table.kind_at(cls, fit.mask) for cls, fit in zip(table.classes, found, strict=True)], np.int64
        )
        self.generation = table.generation

    def is_exact(self, table: HostTable) -> bool:
        """Return whether the room numbers decide exactly; if not, a sharer may fit although its row says no."""
        if self.mode <= EXCLUSIVE:
            return True
        return not table.hidden and all(need == self.shape.compute_percent for need in self.needs)

    def able(self, table: HostTable, rows: Ints | None = None) -> Ints:
        """Return those of the given rows (default: all) with a usable class and enough CPU, memory and devices now.

        That is judged by the numbers of the table: a sharer may still not fit.
        """
        cells = table.cells[:, : len(table)]
        heads = cells[: CLASS + 1] if rows is None else cells[: CLASS + 1].take(rows, 1)
        ok: Bools = np.logical_and.reduce(heads[:CLASS] >= self.least)
        if not self.all_fit:
            ok &= self.fits.take(heads[CLASS])
        if self.mode == EXCLUSIVE and self.masks is not None:
            whole = (cells[ROOM:] if rows is None else cells[ROOM:].take(rows, 1)) == 100
            whole &= self.masks.take(heads[CLASS], 1)
            ok &= whole.sum(0) >= self.count
        return ok.nonzero()[0] if rows is None else rows[ok]

    def rooms(self, table: HostTable, rows: Ints, cells: Ints, room: Ints) -> Ints:
        """Return what the devices of these rows have left for the shape; `NO_ROOM` on devices that it cannot use."""
        if self.masks is not None:
            room = np.where(self.masks.take(cells[CLASS], 1), room, NO_ROOM)
        if self.mode > EXCLUSIVE and table.modes & ~(1 << self.mode):
            mode = table.modes_of(rows)
            room = np.where((mode == 0) | (mode == self.mode), room, NO_ROOM)
        return room

    def need(self, table: HostTable, cells: Ints) -> int | Ints:
        """Return what a replica takes of the devices of some rows, by device and row where kinds differ."""
        if len(set(self.needs)) == 1:
            return self.needs[0]
        needs = np.array(self.needs, np.int64)
        found: Ints = needs.take(table.kinds_of_type.take(cells[TYPE], 1) if table.mixed else cells[KIND])
        return found
