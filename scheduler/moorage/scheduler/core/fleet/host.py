"""One worker as the scheduler places jobs on it, and the class of workers with the same devices and drivers."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final, Literal

from moorage.scheduler.core.fleet.filters import FILTERS, MODE_WORDS, failed, has_labels
from moorage.scheduler.core.fleet.kit import Device, Kit
from moorage.scheduler.core.fleet.shape import DeviceAsked, Place, Shape
from moorage.scheduler.core.fleet.slots import alike, first_alike, first_of, groups, linked
from moorage.scheduler.core.ledger.records import Mode
from moorage.scheduler.core.ledger.state import Attempt, Worker
from moorage.schemas import reasons
from moorage.schemas.attempt import AttemptName
from moorage.schemas.driver_config import takes_ids
from moorage.schemas.frames import AGENT_STOPPED, DISK_FULL, OTHERS, AttemptUse, Reported
from moorage.schemas.frames.fleet import slots_named
from moorage.schemas.gpu import SHARERS_MAX
from moorage.schemas.job import HOST_COUNTER
from moorage.schemas.memo import Memo

NO_GPU: Final = int(Mode.NONE)
EXCLUSIVE: Final = int(Mode.EXCLUSIVE)
#: attempts of one worker, bounded so that its renewal, its join and its loss each fit into one frame or record
ATTEMPTS_MAX: Final = 4096
#: shapes whose fit is cached for each class
FITS_MAX: Final = 50_000
#: ways of asking for devices whose slots are cached
RANKS_MAX: Final = 1_024
#: so many load frames in a row may be missed, and nothing new is placed on the host
LOADS_MISSED_MAX: Final = 3
When = Literal["ever", "emptied", "now"]
#: slots lent, thousandths of a core, of these kept for jobs with GPUs, MiB, counters
Size = tuple[int, int, int, int, tuple[tuple[str, int], ...]]


class SharedDevice:
    """A shared device; all sharers of a device use one mode. `user` is as in `HostClass.user_of`."""

    __slots__ = ("memory_mib", "mode", "percent", "user", "users")

    def __init__(self, mode: int, user: str) -> None:
        self.mode = mode
        self.user = user
        self.users = 0
        self.memory_mib = 0
        self.percent = 0


class Fit:
    """The result of matching a shape with a class: the matching slots and how well, or why there are none.

    `tiers` divides the matching slots into sets to be used in this order: the best matches first, and of equal matches
    those with the least memory, so that the others are left to requests that need them. No matching device has less
    memory than `least_mib`.
    """

    __slots__ = ("best_mask", "least_mib", "mask", "rank", "reason", "tiers")

    def __init__(
        self, mask: int, rank: int, reason: str, best_mask: int = 0, tiers: tuple[int, ...] = (), least_mib: int = 0
    ) -> None:
        self.mask = mask
        self.rank = rank
        self.best_mask = best_mask  # the slots that match as well as the best one
        self.tiers = tiers
        self.least_mib = least_mib
        self.reason = reason  # empty if the class could run it


class Fits(Memo[int, Fit]):
    """Cached fits by shape index, shared by classes that differ only in labels."""

    def __init__(self) -> None:
        super().__init__(FITS_MAX)


_OTHER_LABEL: Final = Fit(0, 0, reasons.LABEL.name)
_OTHER_DEVICE: Final = Fit(0, 0, reasons.DEVICE.name)
#: filters checked before labels
_BEFORE_LABELS: Final = tuple(FILTERS)[: list(FILTERS).index(reasons.LABEL.name)]


def _within(found: Fit, mask: int) -> Fit:
    """Return this fit on these of its slots alone."""
    tiers = tuple(tier & mask for tier in found.tiers if tier & mask)
    return Fit(mask, found.rank, "", mask & found.best_mask or mask, tiers, found.least_mib)


class HostClass:
    """Hosts with equal devices, drivers, rules and required labels: a shape fits all of them or none.

    They may differ in what they lend, in CPU and memory, and in what is free.
    """

    __slots__ = (
        "_by_label",
        "_ranks",
        "alike",
        "buckets",
        "devices",
        "drivers",
        "fits",
        "hosts",
        "key",
        "kit",
        "labels",
        "mps_users",
        "named_slots",
        "shared_open",
        "sharers_max",
        "sizes",
        "takes",
    )

    def __init__(self, key: Any, kit: Kit, labels: dict[str, str], fits: Fits, named_slots: dict[str, int]) -> None:
        self.key = key
        self.kit = kit
        self.devices = kit.devices
        self.drivers = kit.drivers
        #: sets of slots with devices of one name; empty if all have the same
        self.alike = alike(device[2] for device in kit.devices)
        self.mps_users = None if kit.mps_users is None else dict(kit.mps_users)
        #: slots by device name, for names that requests have asked for; see `Fleet.distinguish`
        self.named_slots = named_slots
        #: by mode, the slots that allow it: a worker may restrict a device to some modes
        self.takes = {
            mode: sum(1 << slot for slot, kept in enumerate(kit.kept_for) if not kept or word in kept)
            for mode, word in MODE_WORDS.items()
        }
        self.labels = labels  # of its hosts' labels, those that some request has required
        most_of = dict(kit.sharers_max)
        self.sharers_max = {mode: max(1, min(most, int(most_of.get(mode, most)))) for mode, most in SHARERS_MAX.items()}
        self.hosts: dict[int, Host] = {}
        #: the same by what a host holds when empty: see `Host.size`
        self.sizes: dict[Size, dict[int, Host]] = {}
        self.buckets: list[dict[int, Host]] = [{} for _ in range(len(self.devices) + 1)]
        self.shared_open: dict[int, dict[tuple[int, int], SharedDevice]] = {2: {}, 3: {}}
        self.fits = fits
        self._ranks: Memo[tuple[DeviceAsked, int], Fit] = Memo(RANKS_MAX)
        #: cached fits where its GPUs have labels of their own, by shape index and place
        self._by_label: Memo[tuple[int, Place | None], Fit] = Memo(RANKS_MAX)

    def fit(self, shape: Shape) -> Fit:
        found = self.fits.get(shape.index)
        if found is None:
            found = self.fits.put(shape.index, self._fit(shape))
        return self._fit_by_name(shape, found) if shape.by_name else found

    def _fit_by_name(self, shape: Shape, found: Fit) -> Fit:
        if shape.count and self.kit.slot_labels:
            key = shape.index, shape.place
            return self._by_label.get(key) or self._by_label.put(key, self._fit_by_slot(shape, found))
        if not has_labels(self.labels, shape):
            return found if found.reason in _BEFORE_LABELS else _OTHER_LABEL
        return found if not shape.device_ids or found.reason else self._exact(shape, found)

    def _fit_by_slot(self, shape: Shape, found: Fit) -> Fit:
        """Return the fit on those GPUs that have the labels which a shape requires."""
        slots = self.labelled_slots(shape)
        if not slots:
            return found if found.reason in _BEFORE_LABELS else _OTHER_LABEL
        if found.reason or shape.device_ids:
            return found if found.reason else self._exact(shape, found)
        mask = found.mask & slots
        return _within(found, mask) if self.rooms(mask, shape) else _OTHER_LABEL

    def labelled_slots(self, shape: Shape) -> int:
        """Return the slots of the GPUs that have the labels which a shape requires, their host's included; all (-1) or
        none, where no GPU has labels of its own, and for a shape without GPUs."""
        if not shape.count or not self.kit.slot_labels:
            return -has_labels(self.labels, shape)
        own = enumerate(map(dict, self.kit.slot_labels))
        return sum(1 << slot for slot, labels in own if has_labels(self.labels, shape, labels))

    def exactly(self, shape: Shape) -> int:
        """Return the slots of the devices that a shape names; 0 if any does not match, or its driver takes no names."""
        if not takes_ids(shape.driver):
            return 0
        return slots_named(shape.device_ids, self._slots_of, self.answering(shape) & self.labelled_slots(shape))

    def _exact(self, shape: Shape, found: Fit) -> Fit:
        mask = self.exactly(shape)
        return _within(found, mask) if mask else _OTHER_DEVICE

    def _slots_of(self, name: str) -> int:
        if name.isdecimal():
            return sum(1 << slot for slot, device in enumerate(self.devices) if str(device[0]) == name)
        return self.named_slots.get(name, 0)

    def _fit(self, shape: Shape) -> Fit:
        """Return the fit of a shape, ignoring labels and named devices."""
        if reason := failed(self, shape, "host"):
            return Fit(0, 0, reason)
        if shape.mode == NO_GPU:
            return Fit(0, 2, "")
        found = self._ranked(shape)
        if not found.reason and (reason := failed(self, shape, "devices")):
            return Fit(0, found.rank, reason)
        return found

    def answering(self, shape: Shape) -> int:
        """Return the slots whose devices match a shape that asks for GPUs."""
        return self._ranked(shape).mask

    def _ranked(self, shape: Shape) -> Fit:
        """Return the matching slots, or why none matches. Cached.

        Thousands of shapes may ask for one model and differ only in CPU. Slots that do not allow the mode are left out;
        if no others match, the reason is not a filter of one device.
        """
        takes = self.takes[shape.mode]
        found = self._ranks.get((shape.device_asked, takes))
        if found is None:
            ranks = [
                shape.device_rank(*device[1:], device[0]) if takes >> slot & 1 else 0
                for slot, device in enumerate(self.devices)
            ]
            best, tiers = max(ranks), dict[tuple[int, int], int]()
            for slot, rank in enumerate(ranks):
                if rank:
                    kind = (-rank, self.devices[slot][3])
                    tiers[kind] = tiers.get(kind, 0) | 1 << slot
            best_mask = sum(slots for (rank, _), slots in tiers.items() if rank == -best)
            order = tuple(tiers[kind] for kind in sorted(tiers))
            reason = "" if best else failed(self, shape, "one device")
            least_mib = min((mib for _, mib in tiers), default=0)
            fit = Fit(sum(order), best, reason, best_mask, order, least_mib)
            found = self._ranks.put((shape.device_asked, takes), fit)
        return found

    def memory_of(self, slots: int) -> int:
        """Return the memory of the devices in these slots, in MiB."""
        return sum(device[3] for slot, device in enumerate(self.devices) if slots >> slot & 1)

    def user_of(self, shape: Shape) -> str:
        """Return a text for the user that a sharer runs as; "" if a device's sharers may run as any user."""
        if self.mps_users is None or shape.mode != Mode.MPS:
            return ""
        number = self.mps_users.get(shape.tenant, self.mps_users.get(OTHERS))
        return f"user {shape.user}" if number is None else str(number)

    def named(self, shape: Shape) -> list[Device]:
        """Return the devices that match a shape, ignoring memory, compute capability and the index that it asks for."""
        return [
            d
            for d in self.devices
            if shape.device_rank(d[1], d[2], 2**62, 2**62, d[0] if shape.slot_index is None else shape.slot_index)
        ]

    def rooms(self, slots: int, shape: Shape, beside: Iterable[int] = ()) -> int:
        """Return for how many replicas these devices are enough: matching empty slots, and shared ones.

        `beside` has for how many sharers each shared device has room. CPU and memory are not considered. Never more
        than one host may take of a gang.
        """
        if not shape.count:
            return ATTEMPTS_MAX
        if shape.is_whole:
            return min(shape.on_host_max, slots.bit_count() // shape.count)
        if shape.linked:
            return min(shape.on_host_max, sum((slots & each).bit_count() // shape.count for each in self.kit.links))
        if shape.count == 1:
            return min(shape.on_host_max, sum(beside) + self._places(slots, shape))
        return min(shape.on_host_max, groups(shape.count, [*beside, *self.places_of(slots, shape).values()]))

    def rooms_at_most(self, shape: Shape) -> int:
        """Return a bound of `rooms` for whole devices over all usable hosts, by how many each has free."""
        return sum(free // shape.count * len(bucket) for free, bucket in enumerate(self.buckets))

    def pick(self, slots: int, shape: Shape) -> int | None:
        """Return those of these matching slots that one replica gets; None if they are too few.

        Several are of one model, if as many of one are there. The best matches first (A10 before A100 for `A10`), then
        those with the least memory, then the lowest; linked ones where there are islands (see `slots.linked`).
        """
        count = shape.count
        if slots.bit_count() < count:
            return None
        if not count:
            return 0
        fit = self.fit(shape)
        if shape.linked:
            return self._pick_linked(slots, shape, fit)
        if count > 1 and self.alike:
            slots = first_alike(self.alike, slots, fit.tiers, count)
        if not self.kit.islands:
            return first_of(slots, fit.tiers, count)
        return linked(self.kit.islands, slots, slots & fit.best_mask, fit.tiers, count)

    def _pick_linked(self, slots: int, shape: Shape, fit: Fit) -> int | None:
        """Return as many of these slots as NVLink joins, of the smallest set that has them; None if none has."""
        parts = [slots & each for each in self.kit.links if (slots & each).bit_count() >= shape.count]
        if not parts:
            return None
        part = min(parts, key=int.bit_count)
        return first_of(
            first_alike(self.alike, part, fit.tiers, shape.count) if self.alike else part, fit.tiers, shape.count
        )

    def places_of(self, slots: int, shape: Shape) -> dict[int, int]:
        """Return for each of these empty slots how many sharers of a shape fit there."""
        return {slot: self._places(1 << slot, shape) for slot in range(slots.bit_length()) if slots >> slot & 1}

    def _places(self, slots: int, shape: Shape) -> int:
        most = self.sharers(shape.mode)
        if shape.compute_percent:
            most = min(most, 100 // shape.compute_percent)
        if not shape.share_mib:
            return most * slots.bit_count()
        return sum(min(most, d[3] // shape.share_mib) for slot, d in enumerate(self.devices) if slots >> slot & 1)

    def sharers(self, mode: int) -> int:
        return int(self.sharers_max.get(MODE_WORDS[mode], 1))


#: the fields of a host that are heard from its worker in this term, beside the ledger
HEARD: Final = (
    "busy", "data", "down", "heard", "last_ms", "leaves_ms", "load_ms", "refused", "reported", "sick", "stale",
    "stopped", "temperature_c", "troubles", "use", "util_percent", "waiting", "warning", "warnings",
)  # fmt: skip


_NOTHING: Final = frozenset[str]()


class Host:
    """One worker as placement sees it."""

    __slots__ = (
        "awaited",
        "bucket",
        "busy",
        "closed",
        "cls",
        "counts",
        "counts_free",
        "cpu_free",
        "cpu_kept",
        "cpu_milli",
        "cpu_rest",
        "data",
        "down",
        "free",
        "frozen",
        "heard",
        "held",
        "kept",
        "labels",
        "last_ms",
        "leaves_ms",
        "lent",
        "load_ms",
        "loads_within_ms",
        "memory_free",
        "memory_mib",
        "needed",
        "refused",
        "reported",
        "shared",
        "sick",
        "stale",
        "stopped",
        "temperature_c",
        "troubles",
        "turns",
        "use",
        "util_percent",
        "version",
        "waiting",
        "warning",
        "warnings",
        "ways",
        "worker",
    )

    def __init__(self, worker: Worker, cls: HostClass) -> None:
        inventory = worker.inventory
        self.worker = worker
        self.cls = cls
        self.cpu_milli = self.cpu_free = inventory.cpu_milli
        self.memory_mib = self.memory_free = inventory.memory_mib
        lent = inventory.lent_slots
        every = (1 << len(cls.devices)) - 1
        self.lent = every if lent is None else sum(1 << slot for slot in set(lent))
        #: CPU that only jobs with GPUs may have; and of the rest, what no job without a GPU has
        self.cpu_kept = min(self.cpu_milli, inventory.gpu_cpu_milli * self.lent.bit_count())
        self.cpu_rest = self.cpu_milli - self.cpu_kept
        self.counts = inventory.counts  # counters that jobs take of it
        self.counts_free = dict(self.counts)
        self.held = 0  # number of attempts counted
        self.version = 0  # grows whenever attempts are counted in or out
        self.labels = inventory.labels
        self.closed = worker.flag != "open"  # cordoned, draining, shut; from the record with the act on
        self.free = self.lent  # slots not used by moorage's jobs
        self.frozen: dict[AttemptName, Attempt] = {}  # attempts without devices: see `lifecycle.frozen`
        self.awaited = 0  # the slots on which these were placed, which take preemptible jobs alone
        self.turns = 0  # those of them that also take members of services that sleep: only such members wait for them
        self.needed = 0  # those of them that take no job, as one of these is to have them next
        #: of shared devices, by slot: the MiB and percent that stay free for the largest that sleeps there
        self.kept: dict[int, tuple[int, int]] = {}
        #: by each of those that is to have its devices next: the attempts that give them up for it
        self.ways: dict[AttemptName, tuple[Attempt, ...]] = {}
        self.shared: dict[int, SharedDevice] = {}
        self.busy = 0  # slots in other use: local claims, a foreign process, a refusal just now
        self.refused = 0  # those of them that were refused since the last renewal: nothing else is known of them
        self.sick = 0  # slots whose health is not ok
        self.warnings: dict[int, tuple[str, str]] = {}  # likewise: (kind, detail) of what closes nothing
        self.warning = ""  # likewise: what is wrong with the host itself and closes nothing
        self.troubles: dict[int, tuple[str, str]] = {}  # by slot, from its last load frame: (health or foreign, detail)
        self.waiting = False  # a local claim waits: the host counts as full (H42)
        self.heard = False  # renewed in this term
        self.last_ms = 0  # monotonic ms of the last renewal answered in this term
        self.load_ms = -1  # monotonic ms of the last load frame; -1: none in this term and session
        #: nothing new is placed here if there is no load frame for so long
        self.loads_within_ms = int(LOADS_MISSED_MAX * inventory.load_s * 1000)
        self.util_percent = 0  # mean of its devices, by its last load frame
        self.temperature_c: int | None = None  # of its hottest device, likewise; None: none says so
        self.stale = False  # renewals or load frames are missing: no new jobs here
        #: drivers whose engine does not answer, by its last renewal: (why, for how many seconds)
        self.down: dict[str, tuple[str, int]] = {}
        #: ledger ms at which its worker, which was told to end, ends what it holds; None: it stays
        self.leaves_ms: int | None = None
        #: what attempts use of their devices, by its last renewal
        self.use: dict[AttemptName, AttemptUse] = {}
        #: what it has fetched for jobs, by its last load frame: see `held_data.held_key`
        self.data = _NOTHING
        #: how many processes of attempts are stopped, by its last renewal
        self.stopped: dict[AttemptName, int] = {}
        #: what attempts have reported of themselves, by its renewals
        self.reported: dict[AttemptName, Reported] = {}
        self.bucket = -1

    @property
    def disk_full(self) -> bool:
        """Whether it starts nothing because the disk of its worker is full."""
        return any(why.startswith(DISK_FULL) for why, _ in self.down.values())

    @property
    def agent_stopped(self) -> bool:
        """Whether its worker's agent has stopped and left its jobs running."""
        return any(why.startswith(AGENT_STOPPED) for why, _ in self.down.values())

    @property
    def stays(self) -> bool:
        """Whether its agent goes on: it was neither told to end, nor stopped."""
        return self.leaves_ms is None and not (self.down and self.agent_stopped)

    def keep(self, mask: int) -> None:
        """Count slots on which the worker refused something as busy, until a renewal reports what keeps them (H41)."""
        self.refused |= mask & ~self.busy
        self.busy |= mask

    @property
    def size(self) -> Size:
        """The host's capacity, see `Size`. Hosts of equal capacity compare equal."""
        counts = tuple(sorted(self.counts.items())) if self.counts else ()
        return self.lent, self.cpu_milli, self.cpu_kept, self.memory_mib, counts

    def cpu_of(self, shape: Shape) -> int:
        """Return the CPU, in thousandths of a core, that jobs of this shape may have in all."""
        return self.cpu_milli if shape.count else self.cpu_milli - self.cpu_kept

    def cpu_left(self, shape: Shape, leaving: Iterable[Shape] = ()) -> int:
        """Return the CPU, in thousandths of a core, that a shape may have once replicas of those shapes have left."""
        free, rest = self.cpu_free, self.cpu_rest
        for other in leaving:
            free += other.cpu_milli
            rest += 0 if other.count else other.cpu_milli
        return free if shape.count else min(free, rest)

    @property
    def shut(self) -> int:
        """The slots that take no job even if moorage's jobs leave them: in other use, unhealthy, or in quarantine."""
        worker = self.worker
        return self.busy | self.sick | worker.quarantined | worker.unwell_mask

    @property
    def open(self) -> int:
        """Slots that may be given out whole to any job; none while a local claim waits for a device (H42)."""
        return 0 if self.waiting else self.free & ~self.shut & ~self.awaited

    def open_to(self, shape: Shape) -> int:
        """Return the matching slots that may be given out whole to a shape, also those that frozen jobs wait for."""
        awaited = self.awaited
        if shape.preemptible:
            awaited = self.needed
        elif shape.sleeps and self.cls.kit.lets_sleep(shape.driver, by_request=shape.sleeps_itself):
            awaited = self.needed | (awaited & ~self.turns)
        closed = self.shut | awaited
        return 0 if self.waiting else self.free & ~closed & self.cls.fit(shape).mask

    def opened_by(self, leaving: Collection[Attempt], freed: int) -> int:
        """Return the slots that may be given out whole once these attempts, which hold `freed`, have left."""
        if self.waiting:
            return 0
        awaited = 0
        for attempt in self.frozen.values():
            awaited |= 0 if attempt in leaving else attempt.home
        return (self.free | freed & self.lent) & ~self.shut & ~awaited

    def guest_slots(self, shape: Shape) -> int:
        """Return the matching slots for a shape that gives them back once those that wait for them are to have them:
        the free ones, and for a sharer the shared ones with room.
        """
        slots = self.open_to(shape)
        if shape.mode > EXCLUSIVE and (shape.preemptible or shape.sleeps):
            beside = self.awaited & ~self.needed & (-1 if shape.preemptible else self.turns) & self.cls.fit(shape).mask
            slots |= sum(
                1 << slot
                for slot, device in self.shared.items()
                if beside >> slot & 1 and self._room_on(slot, device, shape) > 0
            )
        return slots

    def has_room(self, shape: Shape, home: int) -> bool:
        """Return whether a frozen attempt of a shape has room on all of its devices now."""
        if self.waiting or home & self.shut:
            return False
        shared = {slot: device for slot, device in self.shared.items() if home >> slot & 1}
        if shape.mode <= EXCLUSIVE or not shared:
            return not home & ~self.free
        rest = home & ~sum(1 << slot for slot in shared)
        return not rest & ~self.free and all(self._room_on(slot, device, shape) > 0 for slot, device in shared.items())

    def room_beside(self, slot: int, device: SharedDevice, shape: Shape) -> int:
        """Return how many more sharers of this shape's mode, user and share fit on this shared device, beside the
        largest that sleeps there.
        """
        if self.waiting or self.shut >> slot & 1 or self.needed >> slot & 1:
            return 0
        if not self.awaited >> slot & 1:
            return self._room_on(slot, device, shape)
        kept = self.kept.get(slot)
        return 0 if kept is None else self._room_on(slot, device, shape, kept, kept_users=1)

    def may_share(self, device: SharedDevice, shape: Shape) -> bool:
        """Return whether sharers of a shape are beside those of a device, by mode and user."""
        return device.mode == shape.mode and not (device.user and device.user != self.cls.user_of(shape))

    def lack_on(self, slot: int, device: SharedDevice, shape: Shape) -> tuple[int, int, int]:
        """Return how many sharers, MiB and percent too many a shared device has for one more; 0 or less for none."""
        percent = device.percent + shape.compute_percent - 100 if shape.compute_percent else 0
        mib = device.memory_mib + shape.share_mib - self.cls.devices[slot][3] if shape.share_mib else 0
        return device.users + 1 - self.cls.sharers(shape.mode), mib, percent

    def _room_on(
        self, slot: int, device: SharedDevice, shape: Shape, kept: tuple[int, int] = (0, 0), kept_users: int = 0
    ) -> int:
        if not self.may_share(device, shape):
            return 0
        most = self.cls.sharers(shape.mode) - device.users - kept_users
        if shape.compute_percent:
            most = min(most, (100 - device.percent - kept[1]) // shape.compute_percent)
        if shape.share_mib:
            most = min(most, (self.cls.devices[slot][3] - device.memory_mib - kept[0]) // shape.share_mib)
        return max(0, most)

    def replicas_of(self, shape: Shape, when: When, without: int = 0) -> int:
        """Return how many replicas of a shape this host could hold at most.

        `when` is `ever`: if it were empty and healthy; `emptied`: once moorage's jobs have left, without the devices
        that are `shut`; or `now`: beside what runs there now. It does not matter whether the host is `usable`. The
        slots of the mask `without` are not counted.
        """
        fit = self.cls.fit(shape)
        if fit.reason or (when != "ever" and shape.driver in self.down):
            return 0
        now = when == "now"
        most = ATTEMPTS_MAX - (self.held if now else 0)
        if shape.count:
            slots = (self.open_to(shape) if now else fit.mask & self.lent) & ~without
            if when == "emptied":
                slots &= 0 if self.waiting else ~self.shut
            beside = self.rooms_on_shared(shape) if now and self.shared else {}
            most = min(most, self.cls.rooms(slots, shape, beside.values()))
        if shape.cpu_milli or shape.memory_mib:
            cpu_milli = self.cpu_left(shape) if now else self.cpu_of(shape)
            most = self.within(shape, most, cpu_milli, self.memory_free if now else self.memory_mib)
        if shape.counts:
            most = min(most, self.times(shape, self.counts_free if now else self.counts))
        return max(0, most)

    def times(self, shape: Shape, counts: dict[str, int]) -> int:
        """Return for how many replicas of a shape that takes counters of its host these are enough."""
        return max(0, min(counts.get(name, 0) // each for name, each in shape.counts))

    def within(self, shape: Shape, most: int, cpu_milli: int, memory_mib: int) -> int:
        """Return for how many replicas of a shape, at most `most`, this much CPU and memory is enough."""
        if shape.cpu_milli and self.cpu_milli:
            most = min(most, cpu_milli // shape.cpu_milli)
        if shape.memory_mib and self.memory_mib:
            most = min(most, memory_mib // shape.memory_mib)
        return most

    def may_have_room(self, shape: Shape) -> bool:
        """Return whether a replica may start here now, by a quick check that never misses one that can."""
        if shape.driver in self.down:
            return False
        if shape.cpu_milli > self.cpu_free and self.cpu_milli:
            return False
        return shape.count <= self.free.bit_count() + len(self.shared) and not self.cls.fit(shape).reason

    def rooms_on_shared(self, shape: Shape) -> dict[int, int]:
        """Return the shared devices on which a shape has room, by slot, each with the number of sharers that fit."""
        mask = self.cls.fit(shape).mask
        rooms = {
            slot: self.room_beside(slot, device, shape) for slot, device in self.shared.items() if mask >> slot & 1
        }
        return {slot: room for slot, room in rooms.items() if room}

    def slots_for(self, shape: Shape) -> int:
        """Return the slots on which a shape could start now: those wholly free, and for a sharer those with room."""
        slots = self.open & self.cls.fit(shape).mask
        if shape.mode > EXCLUSIVE and self.shared:
            slots |= sum(1 << slot for slot in self.rooms_on_shared(shape))
        return slots

    def pick(self, shape: Shape) -> int | None:
        """Return the slots that one replica gets now; None if there are too few. CPU and memory: see `fits_host`."""
        return self.cls.pick(self.slots_for(shape), shape)

    def pick_more(self, shape: Shape, most: int) -> list[int]:
        """Return the slots of as many replicas, at most `most`, as fit now on wholly free devices."""
        free = self.open & self.cls.fit(shape).mask
        most = min(most, self.cls.rooms(free, shape), ATTEMPTS_MAX - self.held)
        most = min(most, self.times(shape, self.counts_free)) if shape.counts else most
        masks: list[int] = []
        for _ in range(self.within(shape, most, self.cpu_left(shape), self.memory_free)):
            mask = self.cls.pick(free, shape)
            assert mask is not None, "there is room"
            free ^= mask
            masks.append(mask)
        return masks

    def pick_beside(self, shape: Shape) -> int | None:
        """Return the slots of a sharer of several devices: shared ones first, then free ones.

        None if none is shared, or they are too few. A gang's replicas get those with the most room: in any other order
        the last of them may find room on too few devices, where all of them would have fitted (`slots.groups`).
        """
        joined, free = self.rooms_on_shared(shape), self.open & self.cls.fit(shape).mask
        rooms = joined | self.cls.places_of(free, shape)
        if not joined or len(rooms) < shape.count:
            return None
        slots = sorted(rooms, key=rooms.__getitem__, reverse=True) if shape.together > 1 else list(rooms)
        return sum(1 << slot for slot in slots[: shape.count])

    def fits_host(self, shape: Shape) -> bool:
        """Return whether CPU, memory and attempt entries suffice for a replica, and its driver's engine answers.

        CPU or memory of 0 is not checked.
        """
        if shape.driver in self.down:
            return False
        if self.held >= ATTEMPTS_MAX or (shape.counts and not self.times(shape, self.counts_free)):
            return False
        if shape.cpu_milli and self.cpu_milli and shape.cpu_milli > self.cpu_left(shape):
            return False
        return not (shape.memory_mib and self.memory_mib and shape.memory_mib > self.memory_free)

    @contextlib.contextmanager
    def without(self, slots: int) -> Iterator[None]:
        """Make these slots unavailable inside the block; the caller refreshes the fleet's buckets."""
        sick, self.sick = self.sick, self.sick | slots
        try:
            yield
        finally:
            self.sick = sick

    @property
    def usable(self) -> bool:
        return self.heard and not self.stale and not self.closed and self.stays and bool(self.worker.session)


def too_few_lent(hosts: Iterable[Host], shape: Shape) -> str:
    """Return a text if no host lends enough matching devices for one replica, else an empty text.

    `hosts` must not be empty.
    """
    lent = [(host, host.lent & host.cls.fit(shape).mask) for host in hosts]
    if any(host.cls.rooms(slots, shape) for host, slots in lent):
        return ""
    return f"the most matching GPUs that one worker lends is {max(slots.bit_count() for _, slots in lent)}"


def apart(shape: Shape) -> str:
    """Return a text to put behind a number of replicas that hosts hold, if one host takes only one; else ""."""
    return ", each on a host of its own" if shape.on_host_max == 1 else ""


def size_of_largest(hosts: list[Host], shape: Shape) -> str:
    """Return the most cores, and the most GiB of memory, that a shape may have of one of these hosts, as text.

    `hosts` must not be empty.
    """
    cores, gib = max(host.cpu_of(shape) for host in hosts) / 1000, max(host.memory_mib for host in hosts) // 1024
    kept = " for jobs without a GPU" * any(host.cpu_of(shape) < host.cpu_milli for host in hosts)
    counts = [f"{max(host.counts.get(name, 0) for host in hosts)} {HOST_COUNTER}{name}, " for name, _ in shape.counts]
    return f"{''.join(counts)}{cores:g} cores{kept} and {gib} GiB"
