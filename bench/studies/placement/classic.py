"""The classic policies, each as published, so that a comparison is paired: the same fleet, filters and tie rule.

As Weng et al., "Beware of Fragmentation" (USENIX ATC 2023) evaluate them: scores are whole numbers 0..100, the highest
wins, and the first host in the order of worker numbers wins ties. A sharer gets the device with the least left that
suffices, unless the policy says otherwise. Every decision looks at every host. As everywhere here, hosts with fewer
replicas of a job that spreads come first, and a model named in whole words goes before one found inside a word.

They are for comparison and no part of what is installed. Any place that takes a ranker takes them by `module:Class`,
with the root of the source tree on `PYTHONPATH`: `bench.studies.placement.classic:Fgd`.
"""

from __future__ import annotations

import math
from typing import ClassVar, Final

import numpy as np

from moorage.ranking.gains import gains, gains_by_device
from moorage.ranking.mix import Mix, most_frequent
from moorage.ranking.table import CLASS, CPU, FREE, NO_ROOM, ROOM, TYPE, Ask, HostTable, Ints
from moorage.ranking.waste import HUGE, Waste
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE, NO_GPU, Host
from moorage.scheduler.core.fleet.shape import Shape
from moorage.scheduler.core.rank.ranker import Choice, Pack

BEST_SCORE: Final = 100
#: a fraction of the largest host, in whole numbers
_PART: Final = 20
#: shapes whose matching is kept
_ASKS_MAX: Final = 4_096
_ODD: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1


class Classic(Pack):
    """Filters, ties and devices; a policy says how good each host is that passes the filters."""

    def __init__(self) -> None:
        self._table: HostTable | None = None
        self._asks: dict[Shape, Ask] = {}

    def scores(self, table: HostTable, ask: Ask, rows: Ints, cells: Ints) -> Ints:
        """0..100 for each of some hosts on which it fits; may keep what `slot_of` needs."""
        raise NotImplementedError

    def again(self, choice: Choice, shape: Shape, most: int) -> list[int]:
        return []  # another choice than Pack's: each replica is chosen for itself

    def choose(self, fleet: Fleet, shape: Shape, avoid: dict[int, int], excluded: frozenset[int]) -> Choice | None:
        table = self._table
        if table is None or table.fleet is not fleet:
            table = self._table = HostTable(fleet)
            self._asks.clear()
        table.look()
        ask = self._ask(table, shape)
        rows = ask.able(table)
        cells = table.cells.take(rows, 1)
        if shape.mode > EXCLUSIVE:
            fits = _least_room(ask, table, rows, cells) != NO_ROOM
            rows, cells = rows[fits], cells[:, fits]
        if excluded:
            may = [table.nums[row] not in excluded for row in rows.tolist()]
            rows, cells = rows[may], cells[:, may]
        if not len(rows):
            return None if ask.is_exact(table) else super().choose(fleet, shape, avoid, excluded)
        keys = (ask.ranks[cells[CLASS]] << 10) - self.scores(table, ask, rows, cells)
        if avoid:
            keys += np.array([avoid.get(table.nums[row], 0) for row in rows.tolist()], np.int64) << 16
        row = int(rows[int(keys.argmin())])
        host = table.hosts[row]
        assert host is not None
        if shape.mode == NO_GPU:
            return Choice(host, 0)
        if shape.mode == EXCLUSIVE:
            slots = host.pick(shape)
            assert slots is not None, "its row says that it has room"
            return Choice(host, slots)
        slot = self.slot_of(table, ask, row) if shape.count == 1 else -1
        if slot >= 0 and _takes(host, slot, shape):
            return Choice(host, 1 << slot)
        return super().choose(fleet, shape, avoid, excluded)

    def _ask(self, table: HostTable, shape: Shape) -> Ask:
        ask = self._asks.get(shape)
        if ask is None:
            if len(self._asks) >= _ASKS_MAX:
                self._asks.clear()
            ask = self._asks[shape] = Ask(shape, table)
        elif ask.generation != table.generation or len(ask.fits) != len(table.classes) or ask.kinds != len(table.kinds):
            ask.renew(table)
        return ask

    def slot_of(self, table: HostTable, ask: Ask, row: int) -> int:
        """The device of a host that one sharer gets: the one with the least left that suffices, the lowest of those."""
        return int(_rooms_of_one(ask, table, row).argmin())


def _takes(host: Host, slot: int, shape: Shape) -> bool:
    device = host.shared.get(slot)
    return bool(host.open >> slot & 1 if device is None else host.room_beside(slot, device, shape))


def _rooms_of_one(ask: Ask, table: HostTable, row: int) -> Ints:
    found: Ints = _rooms_that_suffice(ask, table, np.array([row], np.int64), table.cells[:, row : row + 1])[:, 0]
    return found


def _rooms_that_suffice(ask: Ask, table: HostTable, rows: Ints, cells: Ints) -> Ints:
    """What is left on each device where it is enough, else `NO_ROOM`."""
    rooms = ask.rooms(table, rows, cells, cells[ROOM:])
    needs = np.array(ask.needs, np.int64)[table.kinds_of_type.take(cells[TYPE], 1)]
    found: Ints = np.where(rooms >= needs, rooms, NO_ROOM)
    return found


def _least_room(ask: Ask, table: HostTable, rows: Ints, cells: Ints) -> Ints:
    """The least that suffices on some device, for each host: on the last of several where it asks for several."""
    rooms = _rooms_that_suffice(ask, table, rows, cells)
    found: Ints = np.sort(rooms, axis=0)[ask.count - 1] if ask.count <= len(rooms) else rooms[0] * 0 + NO_ROOM
    return found


def _largest(table: HostTable) -> tuple[int, int]:
    """Processors and hundredths of GPUs of the largest hosts: what fractions are of."""
    return (
        max((kind.cpu_milli for kind in table.types), default=0) or 1,
        100 * max((kind.gpus for kind in table.types), default=0) or 1,
    )


def _left(table: HostTable, cells: Ints) -> tuple[Ints, Ints]:
    """Processors, and hundredths of GPUs, left on some hosts; those not counted are as many as the largest has."""
    rooms = cells[ROOM:]
    return np.minimum(cells[CPU], _largest(table)[0]), np.where(rooms == NO_ROOM, 0, rooms).sum(0)


def _asked(ask: Ask) -> tuple[int, int]:
    """Processors, and hundredths of GPUs, that one replica takes."""
    need = max(ask.needs, default=0) if ask.mode > EXCLUSIVE else 100
    return ask.cpu, need * ask.count


class Random(Classic):
    """Any host that fits, and any device of it, by a counter that is mixed: no clock, the same order each time."""

    name: ClassVar[str] = "random"

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._state = seed * _ODD & _WORD

    def _below(self, bound: int) -> int:
        """splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
        self._state = self._state + _ODD & _WORD
        word = self._state
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
        return (word ^ word >> 31) % bound

    def scores(self, table: HostTable, ask: Ask, rows: Ints, cells: Ints) -> Ints:
        found = np.zeros(len(rows), np.int64)
        found[self._below(len(rows))] = BEST_SCORE
        return found

    def slot_of(self, table: HostTable, ask: Ask, row: int) -> int:
        rooms = _rooms_of_one(ask, table, row)
        slots = np.flatnonzero(rooms != NO_ROOM)
        return int(slots[self._below(len(slots))])


class DotProduct(Classic):
    """The smaller the product of what is asked and what is left, as parts of the largest host, the better."""

    name: ClassVar[str] = "dot-product"

    def scores(self, table: HostTable, ask: Ask, rows: Ints, cells: Ints) -> Ints:
        found = np.zeros(len(rows), np.int64)
        for left, asked, most in zip(_left(table, cells), _asked(ask), _largest(table), strict=True):
            found += ((left << _PART) // most) * ((asked << _PART) // most)
        return BEST_SCORE * ((2 << 2 * _PART) - found) >> 2 * _PART + 1


class BestFit(Classic):
    """The less is left afterwards, as parts of the largest host, the better."""

    name: ClassVar[str] = "best-fit"

    def scores(self, table: HostTable, ask: Ask, rows: Ints, cells: Ints) -> Ints:
        found = np.zeros(len(rows), np.int64)
        for left, asked, most in zip(_left(table, cells), _asked(ask), _largest(table), strict=True):
            found += ((left - asked) << _PART) // most
        return BEST_SCORE * ((2 << _PART) - found) >> _PART + 1


class GpuPacking(Classic):
    """First shared devices, the fullest first; then free devices of hosts in use; then hosts without any use."""

    name: ClassVar[str] = "gpu-packing"

    def scores(self, table: HostTable, ask: Ask, rows: Ints, cells: Ints) -> Ints:
        if ask.mode == NO_GPU:
            return np.zeros(len(rows), np.int64)
        free = cells[FREE]
        size = np.array([kind.gpus for kind in table.types], np.int64)[cells[TYPE]]
        if ask.mode == EXCLUSIVE:
            on_used = np.full(len(rows), max(BEST_SCORE // 2 - ask.count, BEST_SCORE // 3), np.int64)
        else:
            least = _least_room(ask, table, rows, cells)
            shared = np.maximum(BEST_SCORE - least // 10, BEST_SCORE // 2)
            on_used = np.where(least == 100, BEST_SCORE // 2 - 1, shared)
        found: Ints = np.where(free == size, np.maximum(BEST_SCORE // 3 - free, free), on_used)
        return found


class GpuClustering(Classic):
    """Requests for as many GPUs each stand together: hosts with only such, with such among others, idle, with others.

    What runs on a host is known from its own choices, since it was made; a host is forgotten once it is wholly free.
    """

    name: ClassVar[str] = "gpu-clustering"

    def __init__(self) -> None:
        super().__init__()
        self._kinds_on: dict[int, set[int]] = {}  # worker number -> `_kind_of` of what was placed there

    def choose(self, fleet: Fleet, shape: Shape, avoid: dict[int, int], excluded: frozenset[int]) -> Choice | None:
        choice = super().choose(fleet, shape, avoid, excluded)
        if choice is not None and shape.mode != NO_GPU:
            self._kinds_on.setdefault(choice.host.worker.num, set()).add(_kind_of(shape))
        return choice

    def scores(self, table: HostTable, ask: Ask, rows: Ints, cells: Ints) -> Ints:
        if ask.mode == NO_GPU:
            return np.zeros(len(rows), np.int64)
        own = _kind_of(ask.shape)
        free = (cells[FREE] == np.array([kind.gpus for kind in table.types], np.int64)[cells[TYPE]]).tolist()
        quarter = BEST_SCORE // 4
        most = _largest(table)[1]
        found = quarter * (most - _left(table, cells)[1]) // most
        for position, row in enumerate(rows.tolist()):
            num = table.nums[row]
            if free[position]:
                self._kinds_on.pop(num, None)
            there = self._kinds_on.get(num, ())
            if own in there:
                found[position] += 3 * quarter if len(there) == 1 else 2 * quarter
            elif not there:
                found[position] += quarter
        return found


def _kind_of(shape: Shape) -> int:
    """Return what GPU clustering tells requests apart by: the number of GPUs, or -1 for a shared one."""
    return shape.count if shape.mode == EXCLUSIVE else -1


class Fgd(Classic):
    """Fragmentation gradient descent: the most fragmentation taken away, squeezed into 0..100 by a sigmoid.

    As published, requests that differ in memory alone are one in the mix, and of a host's devices a sharer gets the
    first that reaches the host's score. With shapes told apart by memory as well, 0.3 points more of cpu050 find room.

    The mix is told (`mix.add` for all that will come, then `mix.use`) or learned from arrivals, as here by default.
    """

    name: ClassVar[str] = "fgd"

    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()
        self._stamp: tuple[int, ...] = ()

    def arrived(self, shape: Shape, replicas: int) -> None:
        self.mix.add(shape, replicas)

    def scores(self, table: HostTable, ask: Ask, rows: Ints, cells: Ints) -> Ints:
        stamp = (id(table), table.generation, len(table.kinds), self.mix.version)
        if stamp != self._stamp:
            self._stamp = stamp
            self._waste = Waste(table, most_frequent(but_for_memory(self.mix.all())))
            self._steps: Ints = np.array([step * self._waste.weight // 10_000 for step in _SIGMOID], np.int64)
        gain = gains(table, self._waste, ask, rows, cells)
        return np.where(gain < -HUGE >> 1, -1, np.searchsorted(self._steps, gain, side="right"))

    def slot_of(self, table: HostTable, ask: Ask, row: int) -> int:
        gain = gains_by_device(table, self._waste, ask, row)
        # below every step is -1 for a device that does not suffice, so that one that does wins over it
        return int(np.where(gain < -HUGE >> 1, -1, np.searchsorted(self._steps, gain, side="right")).argmax())


def but_for_memory(counted: list[tuple[Shape, int]]) -> list[tuple[Shape, int]]:
    """The mix with requests that differ in a host's memory alone counted as the first of them."""
    first: dict[tuple[object, ...], Shape] = {}
    count: dict[tuple[object, ...], int] = {}
    for shape, number in counted:
        devices = (shape.mode, shape.count, shape.vendor, shape.models, shape.min_memory_mib, shape.slot_index)
        key = (*devices, shape.compute_percent, shape.share_mib, shape.cpu_milli)
        first.setdefault(key, shape)
        count[key] = count.get(key, 0) + number
    return [(first[key], number) for key, number in count.items()]


#: where 100 / (1 + e^-x) reaches 1, 2 … 99, in millionths; x is the gain in GPUs
_SIGMOID: Final = [round(1_000_000 * math.log(score / (100 - score))) for score in range(1, 100)]

CLASSIC: Final[dict[str, type[Classic]]] = {
    policy.name: policy for policy in (Random, DotProduct, GpuClustering, GpuPacking, BestFit, Fgd)
}
