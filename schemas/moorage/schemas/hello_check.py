"""Checks what a worker says of itself when it joins: bounds, and whether it contradicts itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import Hello, Join

#: the most bytes of a worker's description in a ledger record
HELLO_BYTES_MAX: Final = 64 * 1024
#: the largest number in a hello: the ledger's msgpack can hold it, with room
NUMBER_MAX: Final = 2**53
#: a worker's slots are one 64-bit mask in the ledger
SLOTS_MAX: Final = 64


class DeviceName(NamedTuple):
    vendor: str
    uuid: str


def devices_of(hello: Hello) -> list[DeviceName]:
    """Return the devices in a hello, by slot."""
    return [DeviceName(device.vendor, device.uuid) for device in hello.gpu_pool]


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
    yield "$.hello.gpu_cpu_milli", hello.gpu_cpu_milli
    for name, count in hello.counts.items():
        yield f"$.hello.counts.{name}", count
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
