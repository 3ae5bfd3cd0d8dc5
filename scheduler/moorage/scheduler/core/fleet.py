"""The soft view of the workers, indexed by what requests ask for; rebuilt after a takeover.

Hosts with the same devices, labels and drivers form a class: whether a shape fits is answered once a class. In a
class, usable hosts stand in buckets by their number of wholly free devices, so best-fit is the first bucket that is
not empty, not a scan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal

from moorage.scheduler.core.records import Mode
from moorage.scheduler.core.shape import Avoid, Shape
from moorage.scheduler.core.state import Member, Worker
from moorage.schemas.frames import OTHERS
from moorage.schemas.gpu import SHARERS_MAX

NO_GPU: Final = int(Mode.NONE)
EXCLUSIVE: Final = int(Mode.EXCLUSIVE)
#: shapes that a class remembers its answer for
FITS_MAX: Final = 50_000
#: members of one worker: so that its renewal, its join and its loss each fit one frame or record
MEMBERS_MAX: Final = 4096
#: tenants that workers' rules name, in all; who would name more is taken to have none, and refuses by itself
NAMED_MAX: Final = 10_000
When = Literal["ever", "emptied", "now"]
#: the drivers that each tenant may have on a worker, as its hello tells it; empty: any
Rules = dict[str, frozenset[str]]
_MODE_WORDS: Final = {int(Mode.EXCLUSIVE): "exclusive", int(Mode.MPS): "mps", int(Mode.TIME_SLICE): "time-slice"}


class SharedDevice:
    """A device that sharers of one mode use: never two modes on one device (fact 27)."""

    __slots__ = ("memory_mib", "mode", "percent", "users")

    def __init__(self, mode: int) -> None:
        self.mode = mode
        self.users = 0
        self.memory_mib = 0
        self.percent = 0


class Fit:
    """What a shape finds on a class: which device slots answer, how well, or why none does."""

    __slots__ = ("best_mask", "mask", "rank", "reason")

    def __init__(self, mask: int, rank: int, reason: str, best_mask: int = 0) -> None:
        self.mask = mask
        self.rank = rank
        self.best_mask = best_mask  # the slots that answer as well as the best one
        self.reason = reason  # empty where the class could run it


def _islands(pool: list[dict[str, Any]]) -> tuple[tuple[int, ...], ...]:
    """The slots that NVLink joins, and those of one NUMA node; empty where all, or none, stand together.

    Links are taken as they are said, in either direction; a hello of an older worker says none.
    """
    slot_of = {int(device["index"]): slot for slot, device in enumerate(pool)}
    linked = [1 << slot for slot in range(len(pool))]
    for slot, device in enumerate(pool):
        for peer in device.get("peers", ()):
            other = slot_of.get(peer, slot)
            both = linked[slot] | linked[other]
            for member in range(len(pool)):
                if both >> member & 1:
                    linked[member] = both
    nodes: dict[int, int] = {}
    for slot, device in enumerate(pool):
        node = int(device.get("numa", -1))
        nodes[node] = nodes.get(node, 0) | 1 << slot
    by_link, by_node = tuple(dict.fromkeys(linked)), tuple(nodes.values())
    if len(by_link) in (1, len(pool)):
        by_link = by_node
    return (by_link, by_node) if 1 < len(by_link) < len(pool) else ()


class HostClass:
    """Hosts that answer every request alike, but for what is free."""

    __slots__ = (
        "buckets",
        "devices",
        "drivers",
        "drivers_for",
        "fits",
        "hosts",
        "islands",
        "key",
        "labels",
        "modes",
        "shared_open",
        "sharers_max",
    )

    def __init__(self, key: Any, hello: dict[str, Any], drivers_for: Rules) -> None:
        self.key = key
        self.drivers_for = drivers_for
        self.devices = [
            (int(d["index"]), str(d["vendor"]), str(d["name"]), int(d.get("memory_mib", 0))) for d in hello["gpu_pool"]
        ]
        self.drivers = frozenset(hello["drivers"])
        self.modes = frozenset(hello["modes"])
        self.labels: dict[str, str] = hello["labels"]
        self.sharers_max = {
            mode: max(1, min(most, int(hello["sharers_max"].get(mode, most)))) for mode, most in SHARERS_MAX.items()
        }
        #: sets of slots linked over NVLink, and those on one NUMA node; empty where neither tells devices apart
        self.islands = _islands(hello["gpu_pool"])
        self.hosts: dict[int, Host] = {}
        self.buckets: list[dict[int, Host]] = [{} for _ in range(len(self.devices) + 1)]
        self.shared_open: dict[int, dict[tuple[int, int], SharedDevice]] = {2: {}, 3: {}}
        self.fits: dict[int, Fit] = {}

    def fit(self, shape: Shape) -> Fit:
        found = self.fits.get(shape.index)
        if found is None:
            if len(self.fits) >= FITS_MAX:
                self.fits.clear()
            found = self.fits[shape.index] = self._fit(shape)
        return found

    def _fit(self, shape: Shape) -> Fit:
        if shape.driver not in self.drivers:
            return Fit(0, 0, "driver")
        if self.drivers_for and shape.driver not in self.permitted(shape.tenant):
            return Fit(0, 0, "rules")
        for label, allowed in shape.requires.items():
            if self.labels.get(label) not in allowed:
                return Fit(0, 0, "label")
        if shape.mode == NO_GPU:
            return Fit(0, 2, "")
        if not self.devices:
            return Fit(0, 0, "no-gpu")
        if _MODE_WORDS[shape.mode] not in self.modes:
            return Fit(0, 0, "sharing")
        ranks = [shape.device_rank(vendor, name, memory, index) for index, vendor, name, memory in self.devices]
        best = max(ranks)
        if best == 0:
            return Fit(0, 0, self._device_reason(shape))
        mask = sum(1 << slot for slot, rank in enumerate(ranks) if rank)
        if mask.bit_count() < shape.count:
            return Fit(0, best, "count")
        return Fit(mask, best, "", sum(1 << slot for slot, rank in enumerate(ranks) if rank == best))

    def permitted(self, tenant: str) -> frozenset[str]:
        """The drivers that a tenant may have where there are rules; "" is any that none of them names."""
        return self.drivers_for.get(tenant, self.drivers_for.get(OTHERS, frozenset()))

    def _device_reason(self, shape: Shape) -> str:
        """Which filter the devices fail first: vendor, model, then memory."""
        left = [d for d in self.devices if not shape.vendor or d[1].lower() == shape.vendor]
        if not left:
            return "vendor"
        named = [
            d
            for d in left
            if shape.device_rank(d[1], d[2], 2**62, d[0] if shape.slot_index is None else shape.slot_index)
        ]
        if not named:
            return "model"
        return "memory" if all(d[3] < max(shape.min_memory_mib, shape.share_mib) for d in named) else "slot"

    def places(self, slots: int, shape: Shape) -> int:
        """How many devices' worth of a shape these empty slots hold: one each, or as many as sharers fit."""
        if shape.mode <= EXCLUSIVE:
            return slots.bit_count()
        most = self.sharers(shape.mode)
        if shape.compute_percent:
            most = min(most, 100 // shape.compute_percent)
        if not shape.share_mib:
            return most * slots.bit_count()
        return sum(min(most, d[3] // shape.share_mib) for slot, d in enumerate(self.devices) if slots >> slot & 1)

    def sharers(self, mode: int) -> int:
        return int(self.sharers_max.get(_MODE_WORDS[mode], 1))


class Host:
    """One worker as placement sees it."""

    __slots__ = (
        "bucket",
        "busy",
        "closed",
        "cls",
        "cpu_free",
        "cpu_milli",
        "free",
        "heard",
        "held",
        "last_ms",
        "lent",
        "load_ms",
        "memory_free",
        "memory_mib",
        "shared",
        "sick",
        "stale",
        "troubles",
        "util_percent",
        "waiting",
        "worker",
    )

    def __init__(self, worker: Worker, cls: HostClass) -> None:
        hello = worker.hello
        self.worker = worker
        self.cls = cls
        self.cpu_milli = self.cpu_free = int(hello["cpu_milli"])
        self.memory_mib = self.memory_free = int(hello["memory_mib"])
        lent = hello.get("lent_slots")
        every = (1 << len(cls.devices)) - 1
        self.lent = every if lent is None else sum(1 << slot for slot in set(lent) if 0 <= slot < 64) & every
        self.held = 0  # members counted in
        self.closed = worker.flag != "open"  # cordoned or draining, from the operator's word on
        self.free = self.lent  # slots that nobody of ours uses
        self.shared: dict[int, SharedDevice] = {}
        self.busy = 0  # slots that somebody else uses: local claimers, a foreign process, one just refused
        self.sick = 0  # slots whose health is not ok
        self.troubles: dict[int, tuple[str, str]] = {}  # by slot, by its last load frame: (health or foreign, detail)
        self.waiting = False  # a local claimer waits: full for the scheduler (H42)
        self.heard = False  # renewed in this reign
        self.last_ms = 0  # monotonic ms of the last renewal answered in this reign
        self.load_ms = -1  # monotonic ms of the last load frame; -1: none in this reign and session
        self.util_percent = 0  # mean of its devices, by its last load frame
        self.stale = False  # load frames are missed: nothing new here
        self.bucket = -1

    @property
    def shut(self) -> int:
        """Slots that nobody is put on, whoever of ours leaves them: used by others, unwell, or in quarantine."""
        return self.busy | self.sick | self.worker.quarantined | self.worker.unwell_mask

    @property
    def open(self) -> int:
        """Slots that may be given out wholly; none while a local claimer waits for a device (H42)."""
        return 0 if self.waiting else self.free & ~self.shut

    def room_beside(self, slot: int, device: SharedDevice, shape: Shape) -> bool:
        """Whether one more sharer of this shape's mode and share fits on a device that others share."""
        if device.mode != shape.mode or device.users >= self.cls.sharers(shape.mode):
            return False
        if self.waiting or self.shut >> slot & 1:
            return False
        if shape.compute_percent and device.percent + shape.compute_percent > 100:
            return False
        memory = self.cls.devices[slot][3]
        return not (shape.share_mib and device.memory_mib + shape.share_mib > memory)

    def replicas_of(self, shape: Shape, when: When) -> int:
        """At most how many replicas of a shape this host could hold.

        `ever`: if it were empty and well; `emptied`: once ours have left; `now`: beside what is there.
        """
        fit = self.cls.fit(shape)
        if fit.reason:
            return 0
        now = when == "now"
        most = MEMBERS_MAX - (self.held if now else 0)
        if shape.count:
            slots = fit.mask & (self.open if now else self.lent)
            if when == "emptied":
                slots &= 0 if self.waiting else ~self.shut
            rooms, devices = 0, slots.bit_count()
            for slot, device in self.shared.items() if now else ():
                if fit.mask >> slot & 1 and self.room_beside(slot, device, shape):
                    rooms += 1
                    devices += 1
            rooms += self.cls.places(slots, shape)
            most = min(most, rooms // shape.count) if devices >= shape.count else 0
        if shape.cpu_milli and self.cpu_milli:
            most = min(most, (self.cpu_free if now else self.cpu_milli) // shape.cpu_milli)
        if shape.memory_mib and self.memory_mib:
            most = min(most, (self.memory_free if now else self.memory_mib) // shape.memory_mib)
        return max(0, most)

    def rooms_beside(self, shape: Shape) -> int:
        """How many replicas' CPU, memory and members this host has room for now."""
        most = MEMBERS_MAX - self.held
        if shape.cpu_milli and self.cpu_milli:
            most = min(most, self.cpu_free // shape.cpu_milli)
        if shape.memory_mib and self.memory_mib:
            most = min(most, self.memory_free // shape.memory_mib)
        return most

    def fits_host(self, shape: Shape) -> bool:
        """CPU and memory of the host; 0 milli known means the worker did not say, and nothing is counted."""
        if self.held >= MEMBERS_MAX:
            return False
        if shape.cpu_milli and self.cpu_milli and shape.cpu_milli > self.cpu_free:
            return False
        return not (shape.memory_mib and self.memory_mib and shape.memory_mib > self.memory_free)

    def could_ever(self, shape: Shape) -> bool:
        return self.replicas_of(shape, "ever") > 0

    @contextlib.contextmanager
    def without(self, slots: int) -> Iterator[None]:
        """These slots cannot be chosen meanwhile."""
        sick, self.sick = self.sick, self.sick | slots
        try:
            yield
        finally:
            self.sick = sick

    @property
    def usable(self) -> bool:
        return self.heard and not self.stale and not self.closed and bool(self.worker.session)


class Fleet:
    """All hosts. Every change goes through here, so that the buckets always agree with the hosts."""

    def __init__(self) -> None:
        self.classes: dict[Any, HostClass] = {}
        self.hosts: dict[int, Host] = {}
        self.changes = 0  # grows with everything that may let somebody start
        self.inventory = 0  # grows when the set of classes or hosts changes
        #: worker numbers of hosts that came, went or changed; a ranker that keeps a table empties it
        self.touched: set[int] = set()
        #: the same, for whoever shows the fleet to observers and empties it then
        self.redrawn: set[int] = set()
        #: tenants that rules of some worker name: what they ask for is told apart
        self.named: set[str] = set()
        #: for a ranker that asked for it: members of each host by `rank_classic.tag_of`
        self.tags: dict[int, dict[int, int]] | None = None

    # ----------------------------------------------------------------------------------- membership

    def join(self, worker: Worker, members: Iterable[tuple[Member, Shape]]) -> Host:
        """A new session: its inventory, less what its members hold."""
        self.leave(worker.num)
        hello = worker.hello
        rules = self.rules_of(hello)
        key = (
            tuple((d["index"], d["vendor"], d["name"], d.get("memory_mib", 0)) for d in hello["gpu_pool"]),
            _islands(hello["gpu_pool"]),
            tuple(hello["drivers"]),
            tuple(hello["modes"]),
            tuple(sorted(hello["labels"].items())),
            tuple(sorted(hello["sharers_max"].items())),
            tuple(sorted((tenant, tuple(sorted(drivers))) for tenant, drivers in rules.items())),
        )
        cls = self.classes.get(key)
        if cls is None:
            cls = self.classes[key] = HostClass(key, hello, rules)
        host = Host(worker, cls)
        cls.hosts[worker.num] = self.hosts[worker.num] = host
        for member, shape in members:
            self.take(host, shape, member.mask)
        self.inventory += 1
        self.refresh(host)
        return host

    def rules_of(self, hello: dict[str, Any]) -> Rules:
        """Its rules; the tenants that they name are told apart from now on. Of an older worker there are none."""
        rules = {tenant: frozenset(drivers) for tenant, drivers in (hello.get("drivers_for") or {}).items()}
        named = self.named | rules.keys() - {OTHERS}
        if len(named) > NAMED_MAX:
            return {}
        self.named = named
        return rules

    def leave(self, worker_num: int) -> None:
        host = self.hosts.pop(worker_num, None)
        if host is None:
            return
        self._unfile(host)
        if self.tags is not None:
            self.tags.pop(worker_num, None)
        del host.cls.hosts[worker_num]
        if not host.cls.hosts:
            del self.classes[host.cls.key]
        self.inventory += 1
        self.touched.add(worker_num)
        self.redrawn.add(worker_num)

    def refresh(self, host: Host) -> None:
        """File a host where its state says; call after anything about it changed."""
        self.touched.add(host.worker.num)
        self.redrawn.add(host.worker.num)
        bucket = host.open.bit_count() if host.usable else -1
        was = host.bucket
        if bucket != was:
            if was >= 0:
                del host.cls.buckets[was][host.worker.num]
            if bucket >= 0:
                host.cls.buckets[bucket][host.worker.num] = host
            if (was < 0) != (bucket < 0):
                self._file_shared(host, bucket >= 0)
            host.bucket = bucket
            if bucket > was:
                self.changes += 1

    def _unfile(self, host: Host) -> None:
        if host.bucket >= 0:
            del host.cls.buckets[host.bucket][host.worker.num]
            self._file_shared(host, False)
            host.bucket = -1

    def _file_shared(self, host: Host, filed: bool) -> None:
        for slot, device in host.shared.items():
            shelf = host.cls.shared_open[device.mode]
            if filed and device.users < host.cls.sharers(device.mode):
                shelf[(host.worker.num, slot)] = device
            else:
                shelf.pop((host.worker.num, slot), None)

    # ------------------------------------------------------------------------------ taking and giving

    def take(self, host: Host, shape: Shape, mask: int) -> None:
        """Count a member in: devices, CPU and memory."""
        self.take_all(host, shape, [mask])

    def take_all(self, host: Host, shape: Shape, masks: list[int]) -> None:
        """Count members of one shape on one host in; it is filed once."""
        count = len(masks)
        if self.tags is not None:
            self._tag(host, shape, count)
        host.held += count
        host.cpu_free -= shape.cpu_milli * count
        host.memory_free -= shape.memory_mib * count
        if shape.mode <= EXCLUSIVE:
            for mask in masks:
                host.free &= ~mask
        else:
            for mask in masks:
                self._take_shared(host, shape, mask)
        self.refresh(host)

    def _tag(self, host: Host, shape: Shape, count: int) -> None:
        if self.tags is not None and shape.mode != NO_GPU:
            tags = self.tags.setdefault(host.worker.num, {})
            tag = shape.count if shape.mode == EXCLUSIVE else -1
            tags[tag] = tags.get(tag, 0) + count
            if tags[tag] <= 0:
                del tags[tag]

    def _take_shared(self, host: Host, shape: Shape, mask: int) -> None:
        num, cls = host.worker.num, host.cls
        while mask:
            bit = mask & -mask
            mask ^= bit
            slot = bit.bit_length() - 1
            device = host.shared.get(slot)
            if device is None:
                device = host.shared[slot] = SharedDevice(shape.mode)
                host.free &= ~bit
            device.users += 1
            device.memory_mib += shape.share_mib
            device.percent += shape.compute_percent
            if device.users >= cls.sharers(device.mode):
                cls.shared_open[device.mode].pop((num, slot), None)
            elif host.bucket >= 0:
                cls.shared_open[device.mode][(num, slot)] = device

    def give(self, host: Host, shape: Shape, mask: int) -> None:
        """Count a member out again."""
        self.give_all(host, [(shape, mask)])

    def give_all(self, host: Host, taken: list[tuple[Shape, int]]) -> None:
        """Count members of one host out again; it is filed once."""
        for shape, mask in taken:
            if self.tags is not None:
                self._tag(host, shape, -1)
            host.held -= 1
            host.cpu_free += shape.cpu_milli
            host.memory_free += shape.memory_mib
            if shape.mode <= EXCLUSIVE:
                host.free |= mask & host.lent
            else:
                self._give_shared(host, shape, mask)
        self.changes += 1
        self.refresh(host)

    def _give_shared(self, host: Host, shape: Shape, mask: int) -> None:
        num, cls = host.worker.num, host.cls
        while mask:
            bit = mask & -mask
            mask ^= bit
            slot = bit.bit_length() - 1
            device = host.shared.get(slot)
            if device is None:
                continue
            device.users -= 1
            device.memory_mib -= shape.share_mib
            device.percent -= shape.compute_percent
            if device.users == 0:
                del host.shared[slot]
                cls.shared_open[device.mode].pop((num, slot), None)
                host.free |= bit & host.lent
            elif host.bucket >= 0 and device.users < cls.sharers(device.mode):
                cls.shared_open[device.mode][(num, slot)] = device

    # ----------------------------------------------------------------------------------- questions

    @contextlib.contextmanager
    def avoiding(self, avoid: Avoid) -> Iterator[None]:
        """Nobody is placed on these devices (worker number, slot mask) meanwhile; nothing counts as changed by it."""
        changes = self.changes
        with contextlib.ExitStack() as stack:
            hosts = [(self.hosts[num], mask) for num, mask in avoid if num in self.hosts]
            for host, mask in hosts:
                stack.enter_context(host.without(mask))
                self.refresh(host)
            yield
        for host, _ in hosts:
            self.refresh(host)
        self.changes = changes

    def capable(self, shape: Shape) -> Iterator[tuple[HostClass, Fit]]:
        """The classes that could ever run this shape."""
        for cls in self.classes.values():
            fit = cls.fit(shape)
            if not fit.reason:
                yield cls, fit

    def validate(self) -> None:
        """Buckets and shelves agree with the hosts. Raises AssertionError."""
        for cls in self.classes.values():
            filed = {num: count for count, bucket in enumerate(cls.buckets) for num in bucket}
            for num, host in cls.hosts.items():
                expected = host.open.bit_count() if host.usable else -1
                assert host.bucket == expected, f"{host.worker.id} is filed under {host.bucket}, not {expected}"
                assert filed.get(num, -1) == host.bucket, f"{host.worker.id} stands in bucket {filed.get(num)}"
                for slot, device in host.shared.items():
                    assert not host.free >> slot & 1, f"{host.worker.id}: slot {slot} is free and shared"
                    is_open = (num, slot) in cls.shared_open[device.mode]
                    expected_open = host.usable and device.users < cls.sharers(device.mode)
                    assert is_open == expected_open, f"{host.worker.id}: slot {slot} on the wrong shelf"
