"""The leader's view of the workers, indexed by what requests ask for; rebuilt after a takeover.

Hosts with the same devices and drivers form a class: whether a shape fits is computed once a class. Within a class,
usable hosts are kept in buckets by their number of wholly free devices, so best fit takes the first bucket that is not
empty, without a scan. Labels split a class only where some request has required them (`distinguish`): most hosts have a
label of their own, such as a name or serial number, and a class for each host would turn every answer into a scan.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final
from weakref import WeakValueDictionary

from moorage.scheduler.core.fleet.host import EXCLUSIVE, Fit, Fits, Host, HostClass, SharedDevice
from moorage.scheduler.core.fleet.kit import Kit, Rules, kit_of
from moorage.scheduler.core.fleet.places import Places
from moorage.scheduler.core.fleet.shape import Avoid, Shape
from moorage.scheduler.core.ledger.inventory import Inventory
from moorage.scheduler.core.ledger.state import Attempt, Worker
from moorage.schemas.frames import OTHERS, Device
from moorage.schemas.frames.fleet import names_of

#: the most tenants that the workers' rules may name in all; beyond it a worker counts as one without rules, and refuses
#: jobs by itself
NAMED_MAX: Final = 10_000
#: with more required label values (or device names) than this, hosts are split by all of their labels (or names)
ASKED_MAX: Final = 4_096
#: any host, in place of a worker's number
ANYWHERE: Final = -1
#: touched hosts, beyond two for each host, at which they are forgotten
TOUCHED_SPARE: Final = 1_024
#: how many recent changes are remembered with their host
OPENED_MAX: Final = 1_024
#: with more opened hosts than this, the whole fleet is scanned instead
OPENED_HOSTS_MAX: Final = 8
_NONE: Final = frozenset[int]()


class Fleet:
    """All hosts. Every change goes through this class, so that the buckets always agree with the hosts."""

    def __init__(self) -> None:
        self.classes: dict[Any, HostClass] = {}
        self.hosts: dict[int, Host] = {}
        #: hosts that left with the record being built, by worker number: it may be taken back
        self.left: dict[int, Host] = {}
        #: the hosts with attempts that are frozen
        self.with_frozen: dict[int, Host] = {}
        #: the hosts that keep cores for jobs with GPUs
        self.keeping: dict[int, Host] = {}
        #: by the number of the job of a service that sleeps: the workers of its frozen members
        self.asleep = dict[int, set[int]]()
        #: by number, jobs of services that sleep whose members could not be frozen for others: until when (monotonic
        #: ms) they are no guests
        self.no_guests = dict[int, int]()
        #: by worker: the slots of attempts that could not be frozen for others, and that do not end for them
        self.stuck = dict[int, int]()
        #: by kit, for hosts that are alike but for labels; kept by their classes
        self._fits: WeakValueDictionary[Kit, Fits] = WeakValueDictionary()
        self._changes = 0
        self._opened: deque[int] = deque(maxlen=OPENED_MAX)  # the workers of the last changes, newest last
        self.inventory = 0  # grows when the set of classes or hosts changes
        self.version = 0  # grows when anything about a host may have changed
        #: worker numbers of hosts that came, left or changed; a ranker that keeps a table empties it
        self.touched: set[int] = set()
        #: the same, for `FleetFrames`, which empties it
        self.redrawn: set[int] = set()
        #: tenants that some worker's rules name; their shapes are kept separate
        self.named: set[str] = set()
        #: label -> value -> the hosts that have it
        self.labelled: dict[str, dict[str, list[int]]] = {}
        #: label -> values that some request has required; only values that some host has, see `distinguish`
        self._asked: dict[str, set[str]] = {}
        self._asked_count = 0
        self._asked_names: set[str] = set()  # device names that some request has asked for, and that some host has
        #: device name -> hosts; None until a request has asked for one
        self._by_name: dict[str, set[int]] | None = None
        self._places = Places(self.classes, self.labelled, self.distinguish, lambda: self.inventory)

    # -------------------------------------------------------------------------- what lets a job start

    @property
    def changes(self) -> int:
        """A number that grows with every change that may let a job start."""
        return self._changes

    def opens(self, worker_num: int = ANYWHERE) -> None:
        """Note that a job may now start on this host, or on any host, that could not start before."""
        self._changes += 1
        self._opened.append(worker_num)

    def unchanged_since(self, changes: int) -> None:
        """Drop all changes noted since then, because they were undone."""
        for _ in range(min(self._changes - changes, len(self._opened))):
            self._opened.pop()
        self._changes = changes

    def opened_since(self, changes: int) -> list[Host] | None:
        """Return the hosts that were opened since that change; None if these may be any: check all hosts."""
        count = self._changes - changes
        if count > len(self._opened):
            return None
        nums = dict.fromkeys(islice(reversed(self._opened), count))
        if ANYWHERE in nums or len(nums) > OPENED_HOSTS_MAX:
            return None
        return [host for num in nums if (host := self.hosts.get(num)) is not None]

    def has_opened(self, changes: int, nums: frozenset[int] | None) -> bool:
        """Return whether a job may now start on one of these hosts (with None: on any) that could not at that change.

        True if that is no longer known.
        """
        count = self._changes - changes
        if count <= 0 or nums is None or count > len(self._opened):
            return count > 0
        return any(num == ANYWHERE or num in nums for num in islice(reversed(self._opened), count))

    # ----------------------------------------------------------------------------------- membership

    def join(self, worker: Worker, attempts: Iterable[tuple[Attempt, Shape]]) -> Host:
        """Add a worker's new session: its inventory, less what its attempts hold. Return its host."""
        self.leave(worker.num)
        inventory = worker.inventory
        host = Host(worker, self._class_of(kit_of(inventory, self.rules_of(inventory)), inventory))
        if self._by_name is not None:
            self._name(worker)
        for label, value in inventory.labels.items():
            self.labelled.setdefault(label, {}).setdefault(value, []).append(worker.num)
        self.hosts[worker.num] = host
        self._enter(host)
        for attempt, shape in attempts:
            self.hold(host, attempt, shape)
        self.inventory += 1
        self.refresh(host)
        return host

    def hold(self, host: Host, attempt: Attempt, shape: Shape) -> None:
        """Count what an attempt holds on its host, which may be frozen there."""
        self.take(host, shape, attempt.mask)
        if attempt.mask != attempt.home:
            self._note_frozen(host, attempt)

    def _class_of(self, kit: Kit, inventory: Inventory) -> HostClass:
        """Return the class for a host: an equal kit, and equal values of all required labels."""
        labels = inventory.labels
        if self._asked_count <= ASKED_MAX:
            labels = {label: value for label, value in labels.items() if value in self._asked.get(label, ())}
        named = self._named_slots(inventory)
        key = (kit, tuple(sorted(labels.items())), tuple(sorted(named.items())))
        cls = self.classes.get(key)
        if cls is None:
            fits = self._fits.setdefault(kit, Fits())
            cls = self.classes[key] = HostClass(key, kit, labels, fits, named)
        return cls

    def _named_slots(self, inventory: Inventory) -> dict[str, int]:
        """Return the slots by each device name that a request has asked for; by all names once too many were."""
        named: dict[str, int] = {}
        for slot, device in enumerate(inventory.gpu_pool if self._asked_names else ()):
            for name in device_names(device):
                if name in self._asked_names or len(self._asked_names) > ASKED_MAX:
                    named[name] = named.get(name, 0) | 1 << slot
        return named

    def _enter(self, host: Host) -> None:
        host.cls.hosts[host.worker.num] = host
        if host.cpu_kept:
            self.keeping[host.worker.num] = host
        host.cls.sizes.setdefault(host.size, {})[host.worker.num] = host

    def _exit(self, host: Host) -> None:
        """Remove a host from its class, and the class with its last host."""
        self._unfile(host)
        cls, num = host.cls, host.worker.num
        self.keeping.pop(num, None)
        del cls.hosts[num]
        alike = cls.sizes[host.size]
        del alike[num]
        if not alike:
            del cls.sizes[host.size]
        if not cls.hosts:
            del self.classes[cls.key]

    def distinguish(self, shape: Shape) -> None:
        """Note what a request requires: hosts that differ in it are in different classes from now on.

        That concerns labels and device names; a device index needs no split, as all hosts of a class have the same
        ones. Must be called before a class is asked whether the shape fits, and again for the shapes that wait once a
        host has joined: a value that no host has is not remembered, so that refused requests leave nothing behind. The
        first time, it moves each host that has the value.
        """
        if shape.requires:
            self._distinguish_labels(shape.requires)
        for each in shape.where:  # a host without the label is apart from each value of it
            values = list(self.labelled.get(each.label, ())) if each.sign != "!=" else [each.value or ""]
            self._distinguish_labels({each.label: values})
        for label in shape.same:
            self._distinguish_labels({label: list(self.labelled.get(label, ()))})
        if shape.device_ids:
            self._distinguish_devices(shape.device_ids)

    def _distinguish_labels(self, requires: Mapping[str, Sequence[str]]) -> None:
        for label, values in requires.items():
            hosts = self.labelled.get(label)
            if hosts is None:
                continue
            for value in sorted(set(values).difference(self._asked.get(label, ()))):
                if value not in hosts:
                    continue
                self._asked.setdefault(label, set()).add(value)
                self._asked_count += 1
                for num in list(hosts[value]):
                    if self.hosts[num].cls.labels.get(label) != value:
                        self._sort_anew(self.hosts[num])

    def _distinguish_devices(self, ids: Sequence[str]) -> None:
        if self._by_name is None:
            self._by_name = {}
            for host in self.hosts.values():
                self._name(host.worker)
        for name in ids:
            if name.isdecimal() or name in self._asked_names or name not in self._by_name:
                continue
            self._asked_names.add(name)
            for num in sorted(self._by_name[name]):  # beyond the bound a host is split by all its names
                if name not in self.hosts[num].cls.named_slots:
                    self._sort_anew(self.hosts[num])

    def _name(self, worker: Worker) -> None:
        assert self._by_name is not None
        for device in worker.inventory.gpu_pool:
            for name in device_names(device):
                self._by_name.setdefault(name, set()).add(worker.num)

    def _sort_anew(self, host: Host) -> None:
        cls = self._class_of(host.cls.kit, host.worker.inventory)
        self._exit(host)
        host.cls = cls
        self._enter(host)
        self.inventory += 1
        self.refresh(host)

    def rules_of(self, inventory: Inventory) -> Rules:
        """Return a worker's rules, and note the tenants that they name, whose shapes are then kept separate.

        A worker counts as one without rules if it would name tenants beyond `NAMED_MAX`.
        """
        drivers = {tenant: frozenset(words) for tenant, words in inventory.drivers_for.items()}
        users = inventory.mps_users
        named = self.named | (drivers.keys() | (users or {}).keys()) - {OTHERS}
        if len(named) > NAMED_MAX:
            return Rules({}, None)
        self.named = named
        return Rules(drivers, users)

    def leave(self, worker_num: int) -> None:
        host = self.hosts.pop(worker_num, None)
        self.with_frozen.pop(worker_num, None)
        if host is None:
            return
        self.left[worker_num] = host
        self._exit(host)
        for device in host.worker.inventory.gpu_pool if self._by_name is not None else ():
            for name in device_names(device):
                self._unname(name, worker_num)
        for label, value in host.labels.items():
            values = self.labelled[label]
            values[value].remove(worker_num)
            if values[value]:
                continue
            del values[value]
            if value in self._asked.get(label, ()):
                self._asked[label].remove(value)
                self._asked_count -= 1
            if not values:
                del self.labelled[label]
                self._asked.pop(label, None)
        self.inventory += 1
        self.touched.add(worker_num)
        self.redrawn.add(worker_num)

    def forget(self, worker_num: int) -> None:
        """Drop what is noted of a worker without a session that the ledger has forgotten."""
        self.redrawn.discard(worker_num)
        if len(self.touched) > 2 * len(self.hosts) + TOUCHED_SPARE:
            self.touched = set()  # a ranker that keeps a table builds it again; others never empty this set

    def _unname(self, name: str, worker_num: int) -> None:
        nums = self._by_name.get(name) if self._by_name is not None else None
        if nums is not None:
            nums.discard(worker_num)
            if not nums and self._by_name is not None:
                del self._by_name[name]
                self._asked_names.discard(name)

    def slept(self, mono_ms: int) -> None:
        """Count all workers as heard from just now, after this process was suspended or could not append for a while.

        That silence is not the workers' fault (H28).
        """
        for host in self.hosts.values():
            host.last_ms = max(host.last_ms, mono_ms)
            if host.load_ms >= 0:
                host.load_ms = max(host.load_ms, mono_ms)

    def unheard(self, ms: int, mono_ms: int) -> None:
        """Take `ms`, in which no worker could be heard, out of the silence of each, up to the present moment (H28)."""
        for host in self.hosts.values():
            host.last_ms = max(host.last_ms, min(host.last_ms + ms, mono_ms))
            if host.load_ms >= 0:
                host.load_ms = max(host.load_ms, min(host.load_ms + ms, mono_ms))

    def refresh(self, host: Host) -> None:
        """Put a host into the bucket of its current state; must be called after any change of a host."""
        self.version += 1
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
                self.opens(host.worker.num)

    def out_changed(self, worker: Worker, before: int) -> None:
        """File a host anew whose worker's `out` was `before`, and may have changed since."""
        host = self.hosts.get(worker.num)
        if host is None or worker.out == before:
            return
        if before & ~worker.out:
            self.opens(worker.num)  # `refresh` misses a shared device that reopens
        self.refresh(host)

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
        """Count an attempt's devices, CPU and memory as used."""
        self.take_all(host, shape, [mask])

    def take_all(self, host: Host, shape: Shape, masks: list[int]) -> None:
        """Count attempts of one shape on one host as used; the host is filed once."""
        count = len(masks)
        host.held += count
        host.version += 1
        host.cpu_free -= shape.cpu_milli * count
        if not shape.count:
            host.cpu_rest -= shape.cpu_milli * count
        host.memory_free -= shape.memory_mib * count
        for name, each in shape.counts:
            host.counts_free[name] = host.counts_free.get(name, 0) - each * count
        if shape.mode <= EXCLUSIVE:
            for mask in masks:
                host.free &= ~mask
        else:
            for mask in masks:
                self._take_shared(host, shape, mask)
        self.refresh(host)

    def _take_shared(self, host: Host, shape: Shape, mask: int) -> None:
        num, cls = host.worker.num, host.cls
        while mask:
            bit = mask & -mask
            mask ^= bit
            slot = bit.bit_length() - 1
            device = host.shared.get(slot)
            if device is None:
                device = host.shared[slot] = SharedDevice(shape.mode, cls.user_of(shape))
                host.free &= ~bit
            device.users += 1
            device.memory_mib += shape.share_mib
            device.percent += shape.compute_percent
            if device.users >= cls.sharers(device.mode):
                cls.shared_open[device.mode].pop((num, slot), None)
            elif host.bucket >= 0:
                cls.shared_open[device.mode][(num, slot)] = device

    def give(self, host: Host, shape: Shape, mask: int) -> None:
        """Count an attempt's devices, CPU and memory as free again."""
        self.give_all(host, [(shape, mask)])

    def give_all(self, host: Host, taken: list[tuple[Shape, int]]) -> None:
        """Count attempts of one host as free again: shape and mask. The host is filed once."""
        host.version += 1
        for shape, mask in taken:
            host.held -= 1
            host.cpu_free += shape.cpu_milli
            if not shape.count:
                host.cpu_rest += shape.cpu_milli
            host.memory_free += shape.memory_mib
            for name, each in shape.counts:
                host.counts_free[name] = host.counts_free.get(name, 0) + each
            if shape.mode <= EXCLUSIVE:
                host.free |= mask & host.lent
            else:
                self._give_shared(host, shape, mask)
        self.opens(host.worker.num)
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

    def freeze(self, host: Host, attempt: Attempt, shape: Shape) -> None:
        """Count the devices of an attempt as free, and its CPU and memory as used still: it is frozen."""
        host.version += 1
        if shape.mode <= EXCLUSIVE:
            host.free |= attempt.home & host.lent
        else:
            self._give_shared(host, shape, attempt.home)
        self._note_frozen(host, attempt)
        self.opens(host.worker.num)
        self.refresh(host)

    def _note_frozen(self, host: Host, attempt: Attempt) -> None:
        host.frozen[attempt.name] = attempt
        host.awaited |= attempt.home
        self.with_frozen[host.worker.num] = host

    def resume(self, host: Host, attempt: Attempt, shape: Shape) -> None:
        """Count the devices of a frozen attempt as used again."""
        host.version += 1
        if shape.mode <= EXCLUSIVE:
            host.free &= ~attempt.home
        else:
            self._take_shared(host, shape, attempt.home)
        self.refresh(host)

    def set_awaited(self, host: Host, awaited: int, turns: int, needed: int, kept: dict[int, tuple[int, int]]) -> None:
        """Note which slots of a host frozen members wait for, on which of them members of services that sleep take
        turns, which of them take no job, and what of shared ones stays free for those that sleep.
        """
        if (host.awaited, host.turns, host.needed, host.kept) == (awaited, turns, needed, kept):
            return
        opened = (awaited & ~host.awaited) | (turns & ~host.turns)
        if (host.awaited & ~awaited) | (host.needed & ~needed) | (opened & ~needed) or kept != host.kept:
            self.opens(host.worker.num)
        host.awaited, host.turns, host.needed, host.kept = awaited, turns, needed, kept
        host.version += 1
        self.refresh(host)

    def closed_turns(self, host: Host, num: int) -> int:
        """Return the slots that a job does not take in turns with the services that sleep there.

        Its own frozen members wait for them: replicas of one service would only push each other out. Or it is one whose
        attempts could not be frozen.
        """
        if num in self.no_guests:
            return host.turns
        closed = 0
        for attempt in host.frozen.values():
            closed |= attempt.home if attempt.replica.job.num == num else 0
        return closed & host.turns

    def closed_to(self, num: int, shape: Shape) -> frozenset[int]:
        """Return the workers on which a job has no room now without its `closed_turns`, and others of its shape may."""
        found = set[int]()
        for of in self.with_frozen if num in self.no_guests else self.asleep.get(num, ()):
            host = self.with_frozen.get(of)
            opened = host.guest_slots(shape) if host is not None else 0
            if host is None or not opened:
                continue
            closed = opened & self.closed_turns(host, num)
            if closed and host.cls.pick(opened & ~closed, shape) is None:
                found.add(of)
        return frozenset(found) if found else _NONE

    # ----------------------------------------------------------------------------------- questions

    def keeping_from(self, shape: Shape) -> frozenset[int]:
        """Return the workers that keep the cores which a shape would need for jobs with GPUs: no ranker knows of it."""
        if shape.count or not shape.cpu_milli or not self.keeping:
            return _NONE
        return frozenset(num for num, host in self.keeping.items() if shape.cpu_milli > host.cpu_rest)

    @contextlib.contextmanager
    def avoiding(self, avoid: Avoid) -> Iterator[None]:
        """Make these devices (worker number, slot mask) unavailable inside the block; it does not count as a change.

        The order of hosts in their buckets is restored: a question must not change which host comes first.
        """
        changes, version = self.changes, self.version
        hosts = [(self.hosts[num], mask) for num, mask in avoid if num in self.hosts]
        stood = {(id(host.cls), host.bucket): host.cls.buckets[host.bucket] for host, _ in hosts if host.bucket >= 0}
        orders = [(bucket, list(bucket)) for bucket in stood.values()]
        try:
            with contextlib.ExitStack() as stack:
                for host, mask in hosts:
                    stack.enter_context(host.without(mask))
                    self.refresh(host)
                yield
        finally:  # even if the block raises, every host is filed correctly
            for host, _ in hosts:
                self.refresh(host)
            self.unchanged_since(changes)
            self.version = version
            for bucket, nums in orders:
                if bucket.keys() == set(nums):  # nothing was placed inside the block
                    rows = {num: bucket[num] for num in nums}
                    bucket.clear()
                    bucket.update(rows)

    @contextlib.contextmanager
    def uncordoned(self, host: Host) -> Iterator[None]:
        """Let a host take jobs inside the block although its worker is cordoned; it does not count as a change."""
        changes, closed = self.changes, host.closed
        if not closed:
            yield
            return
        host.closed = False
        self.refresh(host)
        try:
            yield
        finally:
            host.closed = True
            self.refresh(host)
            self.unchanged_since(changes)

    def capable(self, shape: Shape) -> Iterator[tuple[HostClass, Fit]]:
        """Yield the classes that a shape fits, with how; their hosts may still lend too little, or be too small."""
        for cls in self.classes.values() if shape.place is None else self._places.classes(shape.place):
            fit = cls.fit(shape)
            if not fit.reason:
                yield cls, fit

    def gpus_labelled(self, label: str) -> set[str]:
        """Return the values that single GPUs have of a label. `labelled` has those of hosts."""
        every = (dict(labels) for cls in self.classes.values() for labels in cls.kit.slot_labels)
        return {labels[label] for labels in every if label in labels}

    def places(self, shape: Shape) -> tuple[Shape, ...]:
        """Return the shapes for the places in one of which all ranks of a gang run; see `Places.of`."""
        return self._places.of(shape)

    def each_place(self, shape: Shape) -> tuple[Shape, ...]:
        """Return the same, also where no worker has a `site`; see `Places.each`."""
        return self._places.each(shape)

    def lack(self, shape: Shape, replicas: int) -> int:
        """Return how many of so many replicas of a shape all hosts together could not hold, if they were empty and
        healthy; 0 or less if they could hold them all. It must be one of `places`."""
        for cls, _ in self.capable(shape):
            for alike in cls.sizes.values():  # hosts of one size give the same answer
                replicas -= len(alike) * next(iter(alike.values())).replicas_of(shape, "ever")
                if replicas <= 0:
                    return replicas
        return replicas

    def lacking(self, shape: Shape) -> frozenset[int]:
        """Return the hosts that have too few of the counters left that a shape takes of its host."""
        if not shape.counts:
            return _NONE
        return frozenset(num for num, host in self.hosts.items() if not host.times(shape, host.counts_free))

    def usable(self, shape: Shape, excluded: frozenset[int] = frozenset()) -> Iterator[tuple[Host, Fit]]:
        """Yield the usable hosts outside `excluded` that a shape fits, with how; they may have no room now."""
        for cls, fit in self.capable(shape):
            for num, host in cls.hosts.items():
                if host.bucket >= 0 and num not in excluded:
                    yield host, fit

    def validate(self) -> None:
        """Check that buckets and shelves agree with the hosts. Raises AssertionError."""
        for cls in self.classes.values():
            sized = {num: size for size, alike in cls.sizes.items() for num in alike}
            assert sized == {num: host.size for num, host in cls.hosts.items()}, "hosts are filed by another size"
            assert all(cls.sizes.values()), "a size that no host has"
            filed = {num: count for count, bucket in enumerate(cls.buckets) for num in bucket}
            for num, host in cls.hosts.items():
                assert cls.labels.items() <= host.labels.items(), f"{host.worker.id} is in a class with other labels"
                for label, value in host.labels.items():
                    assert num in self.labelled[label][value], f"{host.worker.id} is not known by its {label}"
                    required = value in self._asked.get(label, ())
                    assert not required or label in cls.labels, f"{host.worker.id} is not told apart by {label}"
                assert not host.needed & ~host.awaited, f"{host.worker.id}: a needed slot is not awaited"
                assert (num in self.with_frozen) or not host.frozen, f"{host.worker.id}: its frozen jobs are not noted"
                expected = host.open.bit_count() if host.usable else -1
                assert host.bucket == expected, f"{host.worker.id} is filed under {host.bucket}, not {expected}"
                assert filed.get(num, -1) == host.bucket, f"{host.worker.id} is in bucket {filed.get(num)}"
                for slot, device in host.shared.items():
                    assert not host.free >> slot & 1, f"{host.worker.id}: slot {slot} is free and shared"
                    is_open = (num, slot) in cls.shared_open[device.mode]
                    expected_open = host.usable and device.users < cls.sharers(device.mode)
                    assert is_open == expected_open, f"{host.worker.id}: slot {slot} on the wrong shelf"


def device_names(device: Device) -> list[str]:
    """Return the names of a device of a hello, apart from its index."""
    return names_of(device.uuid, device.pci, device.cdi)
