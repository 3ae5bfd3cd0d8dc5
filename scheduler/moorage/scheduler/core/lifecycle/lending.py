"""Checks what a worker says when it joins, and that no device is lent by two workers.

If two agents lent one GPU, it would be given away twice, each time by its own slot, and the ledger could not tell. For
example, two containers may see the same GPU, or a machine may join under a new name while the old name holds leases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.state import State, Worker
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import Hello, Join

#: the most bytes of a worker's description in a ledger record
HELLO_BYTES_MAX: Final = 64 * 1024
#: the largest number in a hello: the ledger's msgpack can hold it, with room
NUMBER_MAX: Final = 2**53
#: a worker's slots are one 64-bit mask in the ledger
SLOTS_MAX: Final = 64
#: the least characters of a worldwide unique device name: NVML and ROCm give `GPU-` or `MIG-` and at least 16 hex
#: digits; a card without a serial number is named by its PCI address, which occurs in every machine
OWN_NAME_CHARS_MIN: Final = 16
#: the table of lenders is read again from the state once it has twice as many devices as at the last reading, plus
#: this; so workers that rejoin with other devices leave nothing behind
LENDERS_SPARE: Final = 4_096


class DeviceName(NamedTuple):
    vendor: str
    uuid: str


class Lending:
    """Knows which worker lends a device. `kept` returns whether jobs wait for a lost worker's machine to return."""

    def __init__(self, state: State, kept: Callable[[Worker], bool], spare: int = LENDERS_SPARE) -> None:
        self._state = state
        self._kept = kept
        self._spare = spare
        self._lenders: dict[DeviceName, int] | None = None  # the last lender by worker number; None: not read yet
        self._lenders_max = 0
        self._draft: Draft | None = None
        self._joining: dict[DeviceName, str] = {}  # worker ids of this draft's joins

    def joined(self, worker: Worker) -> None:
        """Note, after the fold, that a worker lends the devices in its hello."""
        if self._lenders is not None:
            self._lenders.update(dict.fromkeys(_lent_by(worker), worker.num))
            if len(self._lenders) > self._lenders_max:
                self._lenders = None

    def check(self, draft: Draft, worker_id: str, hello: Hello, retry_after_s: float) -> Problem | None:
        """Return a problem if another worker lends one of the devices; else note them as joining in this draft.

        Only devices that the hello lends, and whose names are unique in the world, are checked.
        """
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

    def _lender(self, draft: Draft, name: DeviceName, worker_id: str) -> str | None:
        """Return the id of another worker that lends a device and may still run something on it; None for none."""
        workers = self._state.worker_by_num
        if self._lenders is None:
            self._lenders = {}
            for worker in workers.values():
                if worker.session or self._kept(worker):
                    self._lenders.update(dict.fromkeys(_lent_by(worker), worker.num))
            self._lenders_max = 2 * len(self._lenders) + self._spare
        lender = workers.get(self._lenders.get(name, -1))
        if lender is None or lender.id == worker_id:
            return None
        holds = draft.worker(lender).session or self._kept(lender)
        return lender.id if holds and name in _lent_by(lender) else None


def devices_of(hello: Hello) -> list[DeviceName]:
    """Return the devices in a hello, by slot."""
    return [DeviceName(device.vendor, device.uuid) for device in hello.gpu_pool]


def recorded_devices(worker: Worker) -> list[DeviceName]:
    """Return the devices in a worker's last hello, by slot."""
    return [DeviceName(device["vendor"], device["uuid"]) for device in worker.hello.get("gpu_pool", ())]


def _lent_by(worker: Worker) -> list[DeviceName]:
    """Return the devices that a worker lends, and those it no longer lends but on which members still run."""
    held = 0
    for member in worker.members.values():
        held |= member.home
    return _lent(recorded_devices(worker), worker.hello.get("lent_slots"), held)


def _lent(devices: list[DeviceName], lent: list[int] | None, held: int = 0) -> list[DeviceName]:
    """Return the lent devices, and those in the mask `held`, whose names are unique in the world.

    `lent` None stands for all devices.
    """
    return [
        name
        for slot, name in enumerate(devices)
        if len(name.uuid) >= OWN_NAME_CHARS_MIN and (lent is None or slot in lent or held >> slot & 1)
    ]


def check_hello(frame: Join) -> Problem | None:
    """Return a problem if a join exceeds its bounds or contradicts itself; None if it is valid.

    The bounds are 64 slots, 64 KiB in all, and valid numbers. Each device needs a name of its own and an index of its
    own, and lent slots must be in the pool.
    """
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
    except OverflowError:  # a number in a field that nothing here reads
        return problem("invalid-argument", "a number is out of its range", field="$.hello", allowed="64 bits")
    if size > HELLO_BYTES_MAX:
        return problem(
            "too-large",
            "the hello is too large",
            field="$.hello",
            found=size,
            allowed=f"{HELLO_BYTES_MAX} bytes",
            next="give the worker fewer or shorter labels, and short texts as machine and boot",
        )
    if len(hello.gpu_pool) > SLOTS_MAX:
        return problem(
            "invalid-argument",
            "a worker has too many slots",
            field="$.hello.gpu_pool",
            found=len(hello.gpu_pool),
            allowed=f"at most {SLOTS_MAX}",
            next="run two agents on this host, each of which sees a part of the devices",
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
                f"slots {before} and {slot} are the same device",
                field=field,
                found=device.uuid,
                allowed="each vendor and uuid once",
            )
    return _check_numbering(hello)


def _check_numbering(hello: Hello) -> Problem | None:
    """Return a problem if two devices have the same index, or a lent slot is not in the pool.

    The vendor's runtime names devices by index. Parts of one device (MIG) share its index.
    """
    numbered: dict[tuple[str, int], int] = {}
    for slot, device in enumerate(hello.gpu_pool):
        if device.mig:
            continue
        before = numbered.setdefault((device.vendor, device.index), slot)
        if before != slot:
            return problem(
                "invalid-argument",
                f"the {device.vendor} devices of slots {before} and {slot} have the same index",
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
    """Yield the numbers of a join that must be in range, each with its JSON path."""
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
