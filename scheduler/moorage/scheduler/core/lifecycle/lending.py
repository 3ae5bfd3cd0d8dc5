"""What a worker may say of itself when it joins, and that no device is lent by two workers.

Two agents that lend one GPU, say two containers that both see it, or one machine under a new name while the old name
still holds leases, would have it given away twice: each by its own slots, with nothing in the ledger against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.state import State, Worker
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import Hello, Join

#: what a ledger record holds of a worker's description at most
HELLO_BYTES_MAX: Final = 64 * 1024
#: numbers of a hello go into the ledger: what msgpack can hold, with room
NUMBER_MAX: Final = 2**53
#: a worker's slots are one 64-bit mask in the ledger
SLOTS_MAX: Final = 64
#: characters from which a device's name is its own in the whole world: NVML and ROCm give `GPU-` or `MIG-` and at least
#: 16 hex digits; a card without a number of its own is named by its PCI address, which every machine has
OWN_NAME_CHARS_MIN: Final = 16
#: devices that are remembered beside twice as many as were lent when the table was read: then it is read anew from the
#: state, so that workers which join with other devices each time leave nothing behind
LENDERS_SPARE: Final = 4_096


class DeviceName(NamedTuple):
    vendor: str
    uuid: str


class Lending:
    """Which worker lends a device. `kept` says whether jobs wait for a lost worker's very machine."""

    def __init__(self, state: State, kept: Callable[[Worker], bool], spare: int = LENDERS_SPARE) -> None:
        self._state = state
        self._kept = kept
        self._spare = spare
        self._lenders: dict[DeviceName, int] | None = None  # who did at last, by worker number; None: not read yet
        self._lenders_max = 0
        self._draft: Draft | None = None
        self._joining: dict[DeviceName, str] = {}  # by this draft: the worker's id
        self._twice: list[tuple[DeviceName, int, int]] | None = None  # of before this reign; none comes to them

    def joined(self, worker: Worker) -> None:
        """After the fold: this worker lends what its hello says."""
        if self._lenders is not None:
            self._lenders.update(dict.fromkeys(_lent_by(worker), worker.num))
            if len(self._lenders) > self._lenders_max:
                self._lenders = None

    def check(self, draft: Draft, worker_id: str, hello: Hello, retry_after_s: float) -> Problem | None:
        """Whether somebody else lends one of its devices. One that is taken counts as joining in this draft."""
        if draft is not self._draft:
            self._draft, self._joining = draft, {}
        devices = devices_of(hello)
        names = _lent(devices, hello.lent_slots)
        for name in names:
            other = self._joining.get(name) or self._lender(draft, name, worker_id)
            if other in (None, worker_id):
                continue
            return problem(
                "gpu-lent-twice",
                f"worker {other} lends this GPU until it says goodbye or is lost, and its kept jobs are over",
                field=f"$.hello.gpu_pool[{devices.index(name)}].uuid",
                found=name.uuid,
                allowed="a GPU that no other worker lends",
                next=f"stop one of the two agents, or let each see GPUs of its own; wait if {other} was this machine",
                retry_after_s=retry_after_s,
            )
        self._joining.update(dict.fromkeys(names, worker_id))
        return None

    def lent_twice(self) -> list[dict[str, str]]:
        """Devices that two sessions lend at once: they joined under a release that took both, and stay until one joins
        anew. None comes to them in this reign, so they are looked for once."""
        if self._twice is None:
            first: dict[DeviceName, int] = {}
            self._twice = []
            for worker in self._state.worker_by_num:
                for name in _lent_by(worker) if worker.session else ():
                    other = first.setdefault(name, worker.num)
                    if other != worker.num:
                        self._twice.append((name, other, worker.num))
        workers = self._state.worker_by_num
        return [
            {"uuid": name.uuid, "worker": workers[one].id, "other": workers[two].id}
            for name, one, two in self._twice
            if all(workers[num].session and name in _lent_by(workers[num]) for num in (one, two))
        ]

    def _lender(self, draft: Draft, name: DeviceName, worker_id: str) -> str | None:
        """Who else than this worker lends it and may still run something on it, as of this draft."""
        workers = self._state.worker_by_num
        if self._lenders is None:
            self._lenders = {}
            for worker in workers:
                if worker.session or self._kept(worker):
                    self._lenders.update(dict.fromkeys(_lent_by(worker), worker.num))
            self._lenders_max = 2 * len(self._lenders) + self._spare
        num = self._lenders.get(name)
        if num is None:
            return None
        worker = workers[num]
        if worker.id == worker_id:
            return None
        holds = draft.worker(worker).session or self._kept(worker)
        return worker.id if holds and name in _lent_by(worker) else None


def devices_of(hello: Hello) -> list[DeviceName]:
    """Its devices, by slot."""
    return [DeviceName(device.vendor, device.uuid) for device in hello.gpu_pool]


def recorded_devices(worker: Worker) -> list[DeviceName]:
    """Those of a worker's last hello, by slot."""
    return [DeviceName(device["vendor"], device["uuid"]) for device in worker.hello.get("gpu_pool", ())]


def _lent_by(worker: Worker) -> list[DeviceName]:
    """What a worker lends, and what it lends no more but something of ours still runs on."""
    held = 0
    for member in worker.members.values():
        held |= member.mask
    return _lent(recorded_devices(worker), worker.hello.get("lent_slots"), held)


def _lent(devices: list[DeviceName], lent: list[int] | None, held: int = 0) -> list[DeviceName]:
    """Those lent to the scheduler, or of the slots in the mask `held`, whose names no other device has."""
    return [
        name
        for slot, name in enumerate(devices)
        if len(name.uuid) >= OWN_NAME_CHARS_MIN and (lent is None or slot in lent or held >> slot & 1)
    ]


def check_hello(frame: Join) -> Problem | None:
    """Bounds of a join, so that its record stays within its own: 64 slots, each with a name, 64 KiB in all; and that
    its numbers name what is there."""
    hello = frame.hello
    for field, number in _numbers(frame):
        if not 0 <= number <= NUMBER_MAX:
            return problem(
                "invalid-argument",
                "a number is out of its range",
                field=field,
                found=number,
                allowed=f"0..{NUMBER_MAX}",
            )
    try:
        size = len(msgspec.msgpack.encode(hello)) + len(frame.machine.encode()) + len(frame.boot.encode())
    except OverflowError:  # one that nothing here reads
        return problem("invalid-argument", "a number is out of its range", field="$.hello", allowed="64 bits")
    if size > HELLO_BYTES_MAX:
        return problem(
            "too-large",
            "the hello is too large",
            field="$.hello",
            found=size,
            allowed=f"{HELLO_BYTES_MAX} bytes",
            next="fewer or shorter labels; machine and boot are short names",
        )
    if len(hello.gpu_pool) > SLOTS_MAX:
        return problem(
            "invalid-argument",
            "a worker has too many slots",
            field="$.hello.gpu_pool",
            found=len(hello.gpu_pool),
            allowed=f"at most {SLOTS_MAX}",
            next="let two agents see one part each",
        )
    slots: dict[DeviceName, int] = {}
    for slot, device in enumerate(devices_of(hello)):
        field = f"$.hello.gpu_pool[{slot}].uuid"
        if not device.uuid.strip():
            return problem("invalid-argument", "a device has no name", field=field, found="", allowed="its uuid")
        before = slots.setdefault(device, slot)
        if before != slot:
            return problem(
                "invalid-argument",
                f"slots {before} and {slot} are one device",
                field=field,
                found=device.uuid,
                allowed="each vendor and uuid once",
            )
    return _check_numbering(hello)


def _check_numbering(hello: Hello) -> Problem | None:
    """Indices name devices to their vendor's runtime, and slots stand for one each: what is said of another counts for
    none. Parts of one device (MIG) have its index."""
    numbered: dict[tuple[str, int], int] = {}
    for slot, device in enumerate(hello.gpu_pool):
        if device.mig:
            continue
        before = numbered.setdefault((device.vendor, device.index), slot)
        if before != slot:
            return problem(
                "invalid-argument",
                f"the {device.vendor} devices of slots {before} and {slot} have one index",
                field=f"$.hello.gpu_pool[{slot}].index",
                found=device.index,
                allowed="each index once a vendor",
                next="number them as the vendor's runtime does, gaps allowed; parts of one device say mig: true",
            )
    for at, slot in enumerate(hello.lent_slots or ()):
        if slot >= len(hello.gpu_pool):
            return problem(
                "invalid-argument",
                "a slot is lent that is not in the pool",
                field=f"$.hello.lent_slots[{at}]",
                found=slot,
                allowed=f"0..{len(hello.gpu_pool) - 1}" if hello.gpu_pool else "none: the pool is empty",
                next="lent_slots are positions in gpu_pool; leave it out to lend all of them",
            )
    return None


def _numbers(frame: Join) -> Iterable[tuple[str, int]]:
    """Every number of a join, with its JSON path."""
    hello = frame.hello
    yield "$.n", frame.n
    yield "$.hello.cpu_milli", hello.cpu_milli
    yield "$.hello.memory_mib", hello.memory_mib
    for mode, most in hello.sharers_max.items():
        yield f"$.hello.sharers_max.{mode}", most
    for at, slot in enumerate(hello.lent_slots or ()):
        yield f"$.hello.lent_slots[{at}]", slot
    for slot, device in enumerate(hello.gpu_pool):
        path = f"$.hello.gpu_pool[{slot}]"
        yield f"{path}.index", device.index
        yield f"{path}.memory_mib", device.memory_mib
        for at, peer in enumerate(device.peers):
            yield f"{path}.peers[{at}]", peer
