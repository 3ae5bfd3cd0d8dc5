"""Prices: what the devices, CPU and memory of each kind of host are worth to the request mix.

A market is all hosts with the same devices and a similar amount of CPU for each. The mix, scaled to fill the fleet, is
spread over the markets that can run it, with more on cheap ones. A resource asked for beyond its supply becomes dearer,
one left over becomes cheaper, until both agree (a tatonnement; the fixed point is the dual of the transport problem
"which requests go to which hosts so that most GPUs are used"). So CPU beside idle devices has a price where it is
scarce and none where it is plentiful, and requests without a GPU go where they harm least.

Prices belong to a fleet and a mix, whatever runs there now. Devices of which little is left for those who need them are
dearer by a charge of their own (`look`): were the mix spread over the devices that are left, each class in proportion
over the markets that can run it, then each would be asked for so often, against the mean of all. So the last devices of
a model go to requests that name it, where others have a choice.

All values are integers, without clock, chance or floats, in units of 1 / `ONE` of an idle GPU: the same mix and fleet
give the same prices on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from moorage.ranking.table import NO_ROOM, RANKS_MAX, ROOM, TYPE, HostTable, HostType, Ints
from moorage.scheduler.core.fleet.host import EXCLUSIVE, NO_GPU
from moorage.scheduler.core.fleet.shape import DeviceAsked, Shape
from moorage.schemas.memo import Memo

#: the value of one idle GPU
ONE: Final = 1 << 16
#: the lowest price, so that it can rise again; it is subtracted where prices are used
FLOOR: Final = ONE // 200
CEILING: Final = 2 * ONE
ROUNDS_FIRST: Final = 150
ROUNDS_AGAIN: Final = 100
ROUNDS_A_PART: Final = 50
#: how strongly demand prefers the cheapest market: by 2^-(16 * CHOOSY / ONE) for each sixteenth of an octave
CHOOSY: Final = 692  # e^-30 for a whole GPU's difference
#: each round moves a price by 1 / this of the gap between demand and supply
STEP: Final = 20
#: packing needs slack: demand for CPU and memory counts with this many percent
HOST_DEMAND_PERCENT: Final = 110
#: the most classes of requests that count, those with the most demand first; with more markets than this, nothing is
#: priced
CLASSES_MAX: Final = 192
MARKETS_MAX: Final = 256
#: the most classes times markets, since all are computed for each new mix
CELLS_MAX: Final = 8_192
#: the weight of a price against fragmentation, in halves
PRICE_HALVES: Final = 4

#: the charge of a GPU that is asked for as often as the mean is 1 / this of a GPU; `WANTED_ONE` is the mean
WANTED_PART: Final = 3
WANTED_ONE: Final = 1 << 10
WANTED_MAX: Final = 2 * WANTED_ONE
#: a change up to this keeps the old charge: a new one means that every host is scored again
WANTED_MOVED: Final = WANTED_ONE // 16
#: this many 64ths of the empty fleet always count as left: some of it becomes free again
LEFT_ALWAYS: Final = 2

_POWERS: Final = np.array([round(32768 * 2 ** (-n / 16)) for n in range(16)], np.int64)


def _market_of(kind: HostType) -> tuple[int, int, int]:
    """Return the market of a host type: kind of device, their number, and CPU for each in quarter octaves."""
    each = kind.cpu_milli // max(1, kind.gpus)
    octave = each.bit_length()
    quarter = (each << 2 >> octave - 1) & 3 if octave > 1 else 0
    return (kind.kinds[0] if kind.kinds else -1, kind.gpus, octave << 2 | quarter)


class Prices:
    """The prices for one mix on one numbering of a host table.

    `before` has the prices to start from, so that fewer rounds are needed. The prices are valid once `settling` has
    ended.
    """

    def __init__(self, table: HostTable, mix: list[tuple[Shape, int]], before: Prices | None) -> None:
        self._of_type: list[int] = []
        keys: dict[tuple[int, int, int], int] = {}
        for kind in table.types:
            self._of_type.append(keys.setdefault(_market_of(kind), len(keys)))
        self.keys = keys
        count = len(keys)
        self.types = np.array(self._of_type, np.int64)
        hosts = np.bincount(table.cells[TYPE, : len(table)][table.alive()], minlength=len(table.types))
        self.gpus = np.zeros(count, np.int64)
        self.stock = np.zeros((2, count), np.int64)  # CPU and memory; 0 where not reported
        for kind, number in zip(table.types, hosts.tolist(), strict=True):
            market = self._of_type[kind.index]
            self.gpus[market] += number * kind.gpus
            self.stock[0, market] += number * kind.cpu_milli
            self.stock[1, market] += number * kind.memory_mib
        self.gpu = np.full(count, ONE // 2, np.int64)
        self.host = np.full((2, count), ONE // 8, np.int64)
        if before is not None:
            for key, market in keys.items():
                old = before.keys.get(key)
                if old is not None:
                    self.gpu[market] = before.gpu[old]
                    self.host[:, market] = before.host[:, old]
        total = int(self.gpus.sum())
        # GPUs for each unit of the host's resource, in 2^-32
        self.worth = np.where(self.stock > 0, (self.gpus << 32) // np.maximum(self.stock, 1), 0)
        self._runs_on: Memo[tuple[bool, DeviceAsked, int], Ints] = Memo(RANKS_MAX)
        self.priced = 0 < count <= MARKETS_MAX and total > 0
        self._unit: Ints = self.worth >> 8
        self._over: Ints = np.zeros((3, count), np.int64)  # prices of GPU, CPU and memory above `FLOOR`
        #: by class its part of all GPUs asked for, in 2^-20, and 1 for each market that can run it
        self._asked: Ints = np.zeros((0, 1), np.int64)
        self._reach: Ints = np.zeros((0, count), np.int64)
        self._wanted: Ints = np.zeros(count, np.int64)
        self._to_settle = table, mix, total, ROUNDS_FIRST if before is None else ROUNDS_AGAIN

    def settling(self) -> Iterator[None]:
        """Compute the prices, yielding after each `ROUNDS_A_PART` rounds."""
        if self.priced:
            yield from self._settle(*self._to_settle)
        self._over = np.vstack((self.gpu, self.host)) - FLOOR
        self.look(self._to_settle[0])

    def look(self, table: HostTable) -> bool:
        """Recompute the charge for what is left, and use it if it changed enough; return whether it did."""
        rooms = table.cells[ROOM:, : len(table)]
        room = np.where(rooms == NO_ROOM, 0, rooms).sum(0)
        left = np.bincount(self.types.take(table.cells[TYPE, : len(table)]), room, len(self.gpus)).astype(np.int64)
        left += self.gpus * 100 * LEFT_ALWAYS >> 6
        there = self._reach * left
        asked = (self._asked * there // np.maximum(1, there.sum(1, keepdims=True))).sum(0)
        mean = np.maximum(1, self._asked.sum() * left // max(1, int(left.sum())))
        wanted = np.minimum(WANTED_MAX, asked * WANTED_ONE // mean)
        if int(np.abs(wanted - self._wanted).max(initial=0)) <= WANTED_MOVED:
            return False
        self._wanted = wanted
        return True

    def settle(self) -> Prices:
        """Compute the prices at once, and return them."""
        for _ in self.settling():
            pass
        return self

    def _classes(self, table: HostTable, mix: list[tuple[Shape, int]]) -> list[tuple[int, int, int, Ints, int]]:
        """Return classes of requests: (GPU percent, CPU, memory, markets, number of requests).

        Those that can run somewhere, with the most demand first, up to a bound.
        """
        found: dict[tuple[int, int, int, bytes], int] = {}
        fits: dict[object, Ints] = {}
        for shape, number in mix:
            gpu = gpu_percent(table, shape)
            key = (shape.mode == NO_GPU, shape.count, shape.gpu_kind)
            ok = fits.get(key)
            if ok is None:
                ok = fits[key] = self.allowed(table, shape)
            entry = (gpu, shape.cpu_milli, shape.memory_mib, ok.tobytes())
            found[entry] = found.get(entry, 0) + number
        reaching: dict[bytes, int] = {}
        for (gpu, _, _, reach), number in found.items():
            if gpu and any(reach):
                reaching[reach] = reaching.get(reach, 0) + gpu * number
        if reaching:
            most = sorted(reaching.items(), key=lambda pair: -pair[1])[:CLASSES_MAX]
            every = sum(gpus for _, gpus in most)
            self._asked = np.array([[(gpus << 20) // every] for _, gpus in most], np.int64)
            self._reach = np.array([np.frombuffer(reach, np.int64) for reach, _ in most])
        rows = [
            (gpu, cpu, memory, np.frombuffer(ok, np.int64), number)
            for (gpu, cpu, memory, ok), number in found.items()
            if any(ok)
        ]
        mean = int(self.stock[0].sum()) * 100 // int(self.gpus.sum())  # CPU for each hundredth of a GPU, times 10,000
        rows.sort(key=lambda row: -row[4] * max(row[0], row[1] * 10_000 // max(1, mean)))
        return rows[: min(CLASSES_MAX, max(16, CELLS_MAX // len(self.keys)))]

    def allowed(self, table: HostTable, shape: Shape) -> Ints:
        """Return 1 for each market whose empty hosts can run the shape, else 0."""
        ok = np.zeros(len(self.keys), np.int64)
        ok[self.types if shape.mode == NO_GPU else self.types[table.holds(shape)]] = 1
        return ok

    def _settle(self, table: HostTable, mix: list[tuple[Shape, int]], total: int, rounds: int) -> Iterator[None]:
        rows = self._classes(table, mix)
        asked = sum(gpu * number for gpu, _, _, _, number in rows)
        if not asked:
            self.priced = False
            return
        scale = self._scale(rows, asked, total)
        ok = np.array([row[3] for row in rows], np.int64)
        with_gpu = np.array([row[0] > 0 for row in rows])
        supply = np.maximum(1, (self.gpus << 20) // total)
        everything = [max(1, int(stock.sum())) for stock in self.stock]
        stocks = np.array(
            [np.maximum(1, stock // (everything[i] >> 20 or 1)) for i, stock in enumerate(self.stock)], np.int64
        )
        demand = np.array([(row[0] * row[4] * scale << 20) // (asked * 100 * total) for row in rows], np.int64)
        wants = np.array(
            [
                [
                    min(
                        1 << 24,
                        (row[1 + i] * row[4] * scale * HOST_DEMAND_PERCENT << 20) // (asked * 100 * everything[i]),
                    )
                    for row in rows
                ]
                for i in range(2)
            ],
            np.int64,
        )
        # what one GPU's worth of a class takes of a market's CPU and memory, in 2^-10 of what the market has for each
        # GPU
        mean = max(1, (total << 32) // everything[0])
        per = np.zeros((2, len(rows), len(self.keys)), np.int64)
        for row, (gpu, cpu, memory, _, _) in enumerate(rows):
            for i, want in enumerate((cpu, memory)):
                worth = self.worth[i] * want >> 22
                unit = gpu if gpu else max(1, cpu * 100 * mean >> 32)
                per[i, row] = np.minimum(worth * 100 // max(1, unit), 1 << 24)
        weight = np.where(with_gpu[:, None], supply[None, :], stocks[0][None, :]) * ok
        refuse = np.where(with_gpu, 1 << 20, 0)[:, None]
        # a round is some twenty calls on small arrays, so devices, CPU and memory are handled in one array where
        # possible
        shut, takes_gpu = np.where(ok > 0, 0, 1 << 40), with_gpu[:, None].astype(np.int64)
        asks, there = np.vstack((demand, wants)), np.vstack((supply, stocks))
        prices = np.vstack((self.gpu, self.host))
        for done in range(rounds):
            if done % ROUNDS_A_PART == 0:
                yield
            charge = (per[0] * prices[1] + per[1] * prices[2] >> 10) + takes_gpu * prices[0]
            least = np.minimum.reduce(charge + shut, 1)[:, None]
            share = _spread(charge - least, weight)
            refused = _spread(np.maximum(0, ONE - least), refuse)
            flow = (share << 15) // np.maximum(1, np.add.reduce(share, 1)[:, None] + refused)
            prices = _moved(prices, asks @ flow // there)
        self.gpu, self.host = prices[0], prices[1:]
        self.host[self.stock == 0] = FLOOR

    def _scale(self, rows: list[tuple[int, int, int, Ints, int]], asked: int, total: int) -> int:
        """Return for how many hundredths of GPUs the scaled mix asks: all there are, or fewer if CPU runs out first."""
        cpu = sum(row[1] * row[4] for row in rows)
        counted = 100 * int(self.gpus[self.stock[0] > 0].sum())  # GPUs on hosts that report their CPU
        for_all = asked * int(self.stock[0].sum())  # what `cpu` would be if all GPUs and all CPU were asked for
        return 100 * total * for_all // (cpu * counted) if 0 < for_all < cpu * counted else 100 * total

    def charges(self, table: HostTable, shape: Shape) -> Ints:
        """Return the cost of a shape on each type of host above the cheapest usable type, in thousandths of a GPU.

        If nothing is priced, or no type can run the shape, all are 0.
        """
        runs_on = self._types_for(table, shape)
        if not self.priced or not len(runs_on):
            return np.zeros(len(table.types), np.int64)
        # thousandths of a GPU
        worth = np.minimum(np.array([[shape.cpu_milli], [shape.memory_mib]]) * 1000 * self._unit >> 24, 1 << 24)
        cost = gpu_percent(table, shape) * 10 * self._over[0] + (worth * self._over[1:]).sum(0)
        wanted = self._wanted * gpu_percent(table, shape) * 10 // (WANTED_ONE * WANTED_PART)
        total = ((PRICE_HALVES * cost >> 17) + wanted).take(self.types)
        total -= np.minimum.reduce(total.take(runs_on))
        above: Ints = np.maximum(0, total)
        return above

    def _types_for(self, table: HostTable, shape: Shape) -> Ints:
        """Return the types of hosts in whose market the shape can run; the same for all requests for such devices."""
        key = shape.mode == NO_GPU, shape.device_asked, shape.count
        found = self._runs_on.get(key)
        if found is None:
            found = self._runs_on.put(key, self.allowed(table, shape).take(self.types).nonzero()[0])
        return found


def gpu_percent(table: HostTable, shape: Shape) -> int:
    """Return how many hundredths of a GPU one replica takes, on the kind of device where that is most."""
    if shape.mode <= EXCLUSIVE:
        return 100 * shape.count
    if shape.compute_percent:
        return shape.compute_percent * shape.count
    needs = table.needs(shape)[table.answers(shape)]
    return (int(needs.max()) if len(needs) else 100) * shape.count


def _spread(above: Ints, weight: Ints) -> Ints:
    """Return weight * 2^-(above * CHOOSY / ONE / 16 ...): how demand is spread over markets, unscaled."""
    sixteenths = np.minimum(above * CHOOSY >> 16, 16 * 60)
    found: Ints = weight * _POWERS[sixteenths & 15] >> 15 + (sixteenths >> 4)
    return found


def _moved(price: Ints, use: Ints) -> Ints:
    """Return the prices after a round in which `use` was asked for (2^15 is the whole supply)."""
    gap = np.minimum(np.maximum(use, 1 << 14), 1 << 16) - (1 << 15)
    moved: Ints = np.minimum(np.maximum(price + (price * gap >> 15) // STEP, FLOOR), CEILING)
    return moved
