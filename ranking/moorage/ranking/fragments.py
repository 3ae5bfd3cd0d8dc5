"""The ranker `fragments`: chooses the host on which the remaining devices stay most usable for likely later requests.

A host's score is how much the request adds to fragmentation there (`waste.py`), plus what the host is worth to other
requests (`prices.py`), in coarse steps. Ties go to the lowest worker number. The coarse steps and the fixed order are
not for speed: they act as first fit and keep hosts whole. Both parts use the request mix that actually arrives
(`mix.py`), counted from the accepted jobs in the ledger.

Scores are kept by shape and recomputed only for hosts that changed since the shape was last scored, so a frequent shape
costs a few rows and one search for the minimum. A test compares that with a scan of all hosts each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from moorage.ranking.gains import gains, gains_by_device
from moorage.ranking.mix import Mix
from moorage.ranking.prices import Prices
from moorage.ranking.table import CLASS, CPU, FREE, NO_ROOM, ROOM, TYPE, Ask, HostTable, Ints
from moorage.ranking.waste import Waste
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.fleet.host import EXCLUSIVE, NO_GPU
from moorage.scheduler.core.fleet.shape import DeviceAsked, Shape
from moorage.scheduler.core.rank.ranker import Choice, Pack

Keys = npt.NDArray[np.int32 | np.int64]

#: the score of a host where the request does not fit; scores of hosts where it fits use fewer than 2^24 steps
NOWHERE: Final = (1 << 31) - 1
#: the same, when replicas of the job are counted into the score
FAR: Final = 1 << 62
#: one step of the score, in thousandths of a GPU
STEP_MILLI: Final = 40
#: how many arrivals a device is simulated ahead; 0 is FGD itself, which leaves 0.6 points more idle if all requests ask
#: for shares
AHEAD: Final = 4
#: replicas of the same job on a host outweigh any score; so does, below that, a model name matched only inside a word
AVOID_BITS: Final = 44
WORDS_BITS: Final = 28
#: prices are recomputed when the fleet has grown or shrunk by this part
GREW_PART: Final = 16
#: replicas chosen between two looks at what is left: one for each `LOOK_HOSTS` hosts, at least `LOOK_MIN`
LOOK_HOSTS: Final = 8
LOOK_MIN: Final = 32
#: a mix is large with this many shapes, or CPU demands, times kinds of devices: its tables are made in parts
LARGE_SHAPES: Final = 4_096
LARGE_LEVELS: Final = 512
#: the most parts made without placing anything in between; then the rest is made at once
PARTS_MAX: Final = 16
#: scores kept: shapes times hosts, 4 bytes each
KEPT_MAX: Final = 3 << 20


class Scores:
    """The scores of all hosts for one shape, as of the table's change number `seen`."""

    __slots__ = ("ask", "charges", "keys", "made", "seen")

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.keys: Keys = np.zeros(0, np.int32)
        self.charges: Ints = np.zeros(0, np.int64)
        self.seen = -1
        self.made = -1  # the number of the waste and price tables that it was scored with


class Fragments(Pack):
    """Chooses the host with the least added fragmentation; with `spread`, first by this job's replicas there."""

    name: ClassVar[str] = "fragments"

    def __init__(self) -> None:
        self.mix = Mix()
        self._table: HostTable | None = None
        self._stamp: tuple[int, ...] = (0,)
        self._scores: dict[Shape, Scores] = {}
        self._prices: Prices | None = None
        self._made = 0  # grows with all new tables; stamps may repeat while their tables differ
        self._hosts = 0
        #: replicas chosen since the last look at what is left. Some found no room, or others had their turn first: such
        #: a look comes early, and there is at most one before a record
        self._decided = 0
        #: the stamp of the tables being made, and the parts that remain; for the mix at the time it began
        self._renewal: tuple[tuple[int, ...], Iterator[None]] | None = None
        self._parts = 0  # parts made since the last choices
        self._renewed = False  # use the tables just made for this record, even if the mix has changed meanwhile
        self._plain = True
        self._plain_of = (-1, -1)

    def arrived(self, shape: Shape, replicas: int) -> None:
        self.mix.add(shape, replicas)

    def choose(self, fleet: Fleet, shape: Shape, avoid: dict[int, int], excluded: frozenset[int]) -> Choice | None:
        if self._is_plain(fleet, shape):
            return super().choose(fleet, shape, avoid, excluded)
        table = self._look(fleet)
        self._decided += 1
        found = self._scores_of(table, shape)
        keys = found.keys
        nowhere = NOWHERE
        if avoid or excluded:
            keys, nowhere = _beside(table, keys, avoid, excluded), FAR
        row = int(keys.argmin()) if len(keys) else -1
        if row < 0 or keys.item(row) == nowhere:
            if found.ask.is_exact(table):
                return None
            return super().choose(fleet, shape, avoid, excluded)  # what one number a device could not say
        host = table.hosts[row]
        assert host is not None
        if shape.mode == NO_GPU:
            return Choice(host, 0)
        if shape.mode == EXCLUSIVE:
            slots = host.pick(shape)
            assert slots is not None, "its row says that it has room"
            return Choice(host, slots)
        return self._shared(table, found, row, avoid, excluded)

    # --------------------------------------------------------------------------------- keeping up

    def _is_plain(self, fleet: Fleet, shape: Shape) -> bool:
        """Return whether best fit decides, because the mix is unknown or nothing in it can fragment.

        Nothing can fragment while all requests ask for one whole device of any kind and hosts have enough CPU for all
        devices.
        """
        if self.mix.version == 0 or shape.linked:  # its table knows no links
            return True
        return shape.mode == EXCLUSIVE and shape.count == 1 and self._is_of_no_matter(fleet)

    def _is_of_no_matter(self, fleet: Fleet) -> bool:
        """Return whether nothing in the mix can fragment."""
        stands = (self.mix.version, fleet.inventory)
        if stands != self._plain_of:
            self._plain_of = stands
            self._plain = self._fragments_nothing(fleet)
        return self._plain

    def _fragments_nothing(self, fleet: Fleet) -> bool:
        kinds = {device[1:] for cls in fleet.classes.values() for device in cls.devices}
        # whether some kinds match, or some do not; computed once for equal requests
        answered: dict[DeviceAsked, set[bool]] = {}
        most = 0
        whole = True
        for shape, _ in self.mix.all():
            by = answered.get(shape.device_asked)
            if by is None:
                by = {shape.device_rank(*kind, shape.slot_index or 0) > 0 for kind in kinds}
                answered[shape.device_asked] = by
            if shape.mode != NO_GPU and True not in by:
                continue  # a shape that no device of the fleet matches fragments nothing, however many of its jobs wait
            most = max(most, shape.cpu_milli)
            whole = whole and shape.mode == EXCLUSIVE and shape.count == 1 and False not in by
        return whole and not any(0 < host.cpu_milli < most * len(host.cls.devices) for host in fleet.hosts.values())

    def prepare(self, fleet: Fleet) -> bool:
        """Make a large new mix's tables over several records, and return whether choices can be made.

        Nothing is placed meanwhile. A mix that changes meanwhile is taken into use the next time.
        """
        self._renewed = False
        if self.mix.version == 0 or self._is_of_no_matter(fleet):
            return True
        table = self._table_of(fleet)
        stamp = self._stamp_of(table)
        if stamp == self._stamp:
            self._look_at_what_is_left(table)
        if stamp == self._stamp or not self._is_large(table) or self._parts >= PARTS_MAX:
            self._renewal, self._parts = None, 0  # in one go, if the fleet keeps changing
            return True
        if self._renewal is None or self._renewal[0][:-1] != stamp[:-1]:  # made for another fleet
            self._renewal = stamp, self._renewing(table, stamp)
        self._parts += 1
        for _ in self._renewal[1]:
            return False
        self._renewal, self._parts = None, 0
        self._renewed = True
        return True

    def _look_at_what_is_left(self, table: HostTable) -> None:
        """Renew the charge for what is left, once enough was chosen; between records, so a record has one."""
        assert self._prices is not None
        if self._decided >= max(LOOK_MIN, len(table) // LOOK_HOSTS):
            self._decided = 0
            self._made += self._prices.look(table)

    def _is_large(self, table: HostTable) -> bool:
        shapes = self.mix.all()
        if len(shapes) * len(table.kinds) > LARGE_SHAPES:
            return True
        return len({shape.cpu_milli for shape, _ in shapes}) * len(table.kinds) > LARGE_LEVELS

    def _table_of(self, fleet: Fleet) -> HostTable:
        """Return the table, up to date."""
        table = self._table
        if table is None or table.fleet is not fleet:
            table = self._table = HostTable(fleet)
            self._scores.clear()
            self._prices = None
        else:
            table.look()
        return table

    def _stamp_of(self, table: HostTable) -> tuple[int, ...]:
        """Return what identifies the tables of waste and prices: the fleet's kinds and size, and the mix."""
        hosts = len(table) - table.dead
        if abs(hosts - self._hosts) * GREW_PART > self._hosts:
            self._hosts = hosts  # prices are for a fleet of this size
        version = self._stamp[-1] if self._renewed else self.mix.version
        return (id(table), table.generation, len(table.kinds), len(table.types), self._hosts, version)

    def _renewing(self, table: HostTable, stamp: tuple[int, ...]) -> Iterator[None]:
        """Recompute all tables that follow from the mix, in parts; the event loop runs between parts."""
        mix, top = self.mix.all(), self.mix.top()
        prices = Prices(table, mix, self._prices)
        yield from prices.settling()
        yield
        waste = Waste(table, top, AHEAD)
        yield
        self._prices, self._waste = prices, waste
        self._stamp = stamp
        self._made += 1
        self._step = STEP_MILLI * waste.weight

    def _look(self, fleet: Fleet) -> HostTable:
        """Return the host table, up to date, after renewing the other tables if fleet or mix have changed."""
        table = self._table_of(fleet)
        stamp = self._stamp_of(table)
        if stamp != self._stamp:
            for _ in self._renewing(table, stamp):
                pass
        return table

    def _scores_of(self, table: HostTable, shape: Shape) -> Scores:
        found = self._scores.get(shape)
        if found is None:
            if len(self._scores) * len(table) >= KEPT_MAX:
                del self._scores[next(iter(self._scores))]  # the least recently used
            found = Scores(Ask(shape, table))
        else:
            del self._scores[shape]
        self._scores[shape] = found
        self._catch_up(table, found)
        return found

    def _catch_up(self, table: HostTable, found: Scores) -> None:
        """Update the scores of the hosts that changed since this shape was last scored."""
        ask, every = found.ask, False
        if len(ask.fits) != len(table.classes) or ask.generation != table.generation or ask.kinds != len(table.kinds):
            ask.renew(table)
            every = True
        if found.made != self._made:
            assert self._prices is not None
            found.charges = self._prices.charges(table, ask.shape) * self._waste.weight + self._step - 1
            found.made = self._made
            every = True
        rows: Ints | None = None
        if every or len(found.keys) != len(table):
            found.keys = np.full(len(table), NOWHERE, np.int32)
        elif found.seen == table.changes:
            return
        else:
            rows = table.written_since(found.seen)
            found.keys[rows] = NOWHERE
        found.seen = table.changes
        self.work += len(table) if rows is None else len(rows)
        self._score(table, found, rows)

    # ------------------------------------------------------------------------------------ scoring

    def _score(self, table: HostTable, found: Scores, rows: Ints | None) -> None:
        """Compute the scores of those rows (or of all) where the shape may fit."""
        rows = found.ask.able(table, rows)
        if len(rows):
            cells = table.cells.take(rows, 1)
            found.keys[rows] = self._keys(found, cells, gains(table, self._waste, found.ask, rows, cells))

    def _keys(self, found: Scores, cells: Ints, gain: Ints) -> Ints:
        # cost minus gain in thousandths of a GPU, in steps; one division rounds down like two
        loss = found.charges.take(cells[TYPE])
        loss -= gain * 10
        loss //= self._step
        if found.ask.ranked:
            loss += found.ask.ranks.take(cells[CLASS]) << WORDS_BITS
        keys: Ints = np.minimum(loss, NOWHERE)  # huge values mean that it does not fit
        return keys

    def _shared(
        self, table: HostTable, found: Scores, row: int, avoid: dict[int, int], excluded: frozenset[int]
    ) -> Choice | None:
        """Return the device of the best host with the best score; if its room was misjudged, the choice of Pack.

        For several devices, always the choice of Pack. A device's room is one number in the table, while Pack checks
        compute, memory and sharers.
        """
        host, ask, shape = table.hosts[row], found.ask, found.ask.shape
        assert host is not None
        if shape.count == 1:
            slot = int(gains_by_device(table, self._waste, ask, row).argmax())
            device = host.shared.get(slot)
            if host.open >> slot & 1 if device is None else host.room_beside(slot, device, shape):
                return Choice(host, 1 << slot)
        return super().choose(table.fleet, shape, avoid, excluded)

    def held_bytes(self) -> int:
        """Return the memory of tables and scores in bytes, for measurements."""
        table = self._table
        if table is None:
            return 0
        rows = table.cells.nbytes + table.mode.nbytes + table.changed.nbytes + 500 * len(table)
        scores = sum(found.keys.nbytes + found.charges.nbytes for found in self._scores.values())
        return rows + scores + self._waste.held_bytes()

    # ---------------------------------------------------------------------------------- many at once

    def again(self, choice: Choice, shape: Shape, most: int) -> list[int]:
        if self.mix.version == 0 or shape.linked or (self._plain and shape.mode == EXCLUSIVE and shape.count == 1):
            return super().again(choice, shape, most)
        table, host, count = self._table, choice.host, shape.count
        if table is None or shape.spread or shape.mode != EXCLUSIVE or shape.together > 1:
            return []
        found = self._scores_of(self._look(table.fleet), shape)
        row, keys = table.row_of[host.worker.num], found.keys
        if keys[row] == NOWHERE or int(keys.argmin()) != row:
            return []
        own, keys[row] = int(keys[row]), NOWHERE
        other = int(keys.argmin())
        rival = (int(keys[other]), other)
        keys[row] = own
        masks = host.pick_more(shape, most)
        cells = np.repeat(table.cells[:, row : row + 1], len(masks), axis=1)
        for number, mask in enumerate(masks[:-1]):
            taken = [ROOM + slot for slot in range(table.width) if mask >> slot & 1]
            cells[taken, number + 1 :] = NO_ROOM
        before = np.arange(len(masks))
        cells[CPU] -= before * (shape.cpu_milli if host.cpu_milli else 0)
        cells[FREE] -= before * count
        gain = gains(table, self._waste, found.ask, np.full(len(masks), row, np.int64), cells)
        for number, key in enumerate(self._keys(found, cells, gain).tolist()):
            if (key, row) > rival:
                masks = masks[:number]
                break
        self._decided += len(masks)
        return masks


def _beside(table: HostTable, keys: Keys, avoid: dict[int, int], excluded: frozenset[int]) -> Keys:
    """Return scores in which excluded hosts have no room, and this job's replicas on a host outweigh its score."""
    found = keys.astype(np.int64)
    found[keys == NOWHERE] = FAR
    for num in excluded:
        row = table.row_of.get(num)
        if row is not None:
            found[row] = FAR
    for num, count in avoid.items():
        row = table.row_of.get(num)
        if row is not None and found[row] != FAR:
            found[row] += count << AVOID_BITS
    return found
