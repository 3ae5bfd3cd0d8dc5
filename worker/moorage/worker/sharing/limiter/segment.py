"""Read and write a segment: the file that a worker shares with the processes of one attempt; see limiter.h.

The agent makes it, writes the attempt's limits, heartbeats and tokens into it, stops and resumes calls, and removes it.

The file belongs to the job's user, who may write anything into it or cut it short. So it is read and written by
pread(2) and pwrite(2), never mapped, and nothing that is read from it is trusted beyond the job itself: counts are
bounded, and the worker keeps the tokens that it gave in its own memory.
"""

from __future__ import annotations

import os
import struct
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

MAGIC: Final = 0x74696D696C726F6D
VERSION: Final = 2
DEVICES_MAX: Final = 16
SLOTS_MAX: Final = 128
#: a token in the segment's unit
TOKEN: Final = 1_000_000
_START_BITS: Final = 42
#: upper bound of a number that a job may have written, so that sums of them fit
_NUMBER_MAX: Final = 1 << 62

_WORD: Final = 8
_AT_HEARTBEAT: Final = 4 * _WORD
_AT_GRANTED: Final = _AT_HEARTBEAT + _WORD
_AT_RATE: Final = _AT_GRANTED + DEVICES_MAX * _WORD
_AT_LIMIT: Final = _AT_RATE + DEVICES_MAX * _WORD
_AT_CONTEXT: Final = _AT_LIMIT + DEVICES_MAX * _WORD
_AT_BEYOND: Final = _AT_CONTEXT + DEVICES_MAX * _WORD
_AT_UUID: Final = _AT_BEYOND + DEVICES_MAX * _WORD
_AT_DEAD: Final = _AT_UUID + DEVICES_MAX * 16
_AT_FROZEN: Final = _AT_DEAD + SLOTS_MAX * _WORD
_AT_READING: Final = _AT_FROZEN + _WORD
_AT_TOLD: Final = _AT_READING + _WORD
_TOLD_BYTES: Final = _WORD + DEVICES_MAX * 2 * _WORD
_LINE: Final = 64
_AT_COUNTS: Final = -(-(_AT_TOLD + SLOTS_MAX * _TOLD_BYTES) // _LINE) * _LINE
_AT_BUCKETS: Final = _AT_COUNTS + _LINE
_AT_SLOTS: Final = _AT_BUCKETS + DEVICES_MAX * _LINE
_USE_WORDS: Final = 8
_SLOT_BYTES: Final = _LINE + DEVICES_MAX * _USE_WORDS * _WORD
SIZE: Final = _AT_SLOTS + SLOTS_MAX * _SLOT_BYTES


class SegmentError(Exception):
    """The file is not a segment of this release."""


class Part(NamedTuple):
    """An attempt's limits on one device. `limit_bytes` 0 is no limit.

    `context_bytes` are taken from the limit for each process that uses the device, until NVML has told what it holds.
    `rate` is the attempt's part of the compute in tokens a second (see `controller.RATE`); 0 throttles nothing.
    """

    uuid: str
    limit_bytes: int = 0
    context_bytes: int = 0
    rate: float = 0


class Counts(NamedTuple):
    """The counters of the job's processes; see limiter.h."""

    attached: int
    high: int
    refused: int
    opened: int
    crowded: int
    missed: int
    waiting: int


class Use(NamedTuple):
    """What a process uses of a device, in bytes; see limiter.h."""

    asking: int
    used: int
    begun: int
    done: int
    guess: int
    other_guess: int
    made: int
    other_made: int

    def guessed(self, first: int, last: int) -> int:
        """Return what was guessed since the reading `first` had begun, up to the beginning of `last`."""
        guesses = ((self.guess, self.made), (self.other_guess, self.other_made))
        return sum(size for size, made in guesses if first <= made < last)


class Slot(NamedTuple):
    """A process that uses a device.

    `number` is the slot's place in the segment, `owner` the process's number from `owner_of`, `pid` its pid in the PID
    namespace with the inode `pid_ns` (0: not written yet), `start_ticks` its start, and `uses` what it uses, by device.
    """

    number: int
    owner: int
    pid: int
    pid_ns: int
    start_ticks: int
    uses: tuple[Use, ...]

    @property
    def used(self) -> tuple[int, ...]:
        return tuple(use.used for use in self.uses)


class Reading(NamedTuple):
    """What processes counted when a reading of NVML began: see `Segment.begin_reading`.

    `done` is by owner and device. It is older than the slots, so what was done by then is in their `used`.
    """

    number: int
    slots: list[Slot]
    done: dict[int, tuple[int, ...]]


def owner_of(pid: int, start_ticks: int) -> int:
    """Return the number by which a slot names a process; `pid` is the one in the process's own PID namespace."""
    return pid << _START_BITS | start_ticks & ((1 << _START_BITS) - 1)


class Segment:
    """One attempt's segment, from `create` or `adopt`; `close` it, and remove the file, when the attempt is over."""

    def __init__(self, path: Path, descriptor: int, uuids: Sequence[str]) -> None:
        self.path = path
        self.uuids = uuids
        self.devices = len(uuids)
        self._file = descriptor
        self._granted = [0] * len(uuids)

    @classmethod
    def create(cls, path: Path, parts: Sequence[Part]) -> Segment:
        """Make the file, mode 0600, and return the segment. Raises OSError, also if the file exists.

        A file that cannot be written is removed. Raises ValueError for more than `DEVICES_MAX` devices, and for an
        invalid uuid of a device.
        """
        if len(parts) > DEVICES_MAX:
            raise ValueError(f"a limited job may have at most {DEVICES_MAX} GPUs, found {len(parts)}")
        begin = bytearray(_AT_COUNTS)
        struct.pack_into("@4Q", begin, 0, MAGIC, VERSION, SIZE, len(parts))
        for at, part in enumerate(parts):
            word = at * _WORD
            struct.pack_into("@Q", begin, _AT_RATE + word, round(part.rate * TOKEN))
            struct.pack_into("@Q", begin, _AT_LIMIT + word, part.limit_bytes)
            struct.pack_into("@Q", begin, _AT_CONTEXT + word, part.context_bytes)
            begin[_AT_UUID + at * 16 : _AT_UUID + at * 16 + 16] = _raw(part.uuid)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.truncate(descriptor, SIZE)
            os.pwrite(descriptor, begin, 0)
        except BaseException:
            os.close(descriptor)
            path.unlink()
            raise
        return cls(path, descriptor, [part.uuid for part in parts])

    @classmethod
    def adopt(cls, path: Path) -> Segment:
        """Take over a segment that another process of the worker has made. Raises OSError, SegmentError.

        Its `uuids` all begin with `GPU-`, also those of MIG slices.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            begin = os.pread(descriptor, _AT_DEAD, 0)
            if len(begin) < _AT_DEAD or os.fstat(descriptor).st_size != SIZE:
                raise SegmentError(f"{path} is cut short")
            magic, version, size, devices = struct.unpack_from("@4Q", begin)
            if (magic, version, size) != (MAGIC, VERSION, SIZE) or devices > DEVICES_MAX:
                raise SegmentError(f"{path} is not a segment of this release")
        except BaseException:
            os.close(descriptor)
            raise
        places = range(_AT_UUID, _AT_UUID + devices * 16, 16)
        found = cls(path, descriptor, [f"GPU-{uuid.UUID(bytes=begin[at : at + 16])}" for at in places])
        found._granted = [min(each, _NUMBER_MAX) for each in struct.unpack_from(f"@{devices}Q", begin, _AT_GRANTED)]
        return found

    def give(self, uid: int, gid: int) -> None:
        """Give the file to the user that runs the attempt. Raises OSError."""
        os.fchown(self._file, uid, gid)

    def let_all_write(self) -> None:
        """Let every user write to it, because a rootless engine maps users to other numbers. Raises OSError."""
        os.fchmod(self._file, 0o666)

    def close(self) -> None:
        """Close the file; later calls raise OSError."""
        os.close(self._file)
        self._file = -1

    @property
    def is_closed(self) -> bool:
        return self._file < 0

    # -- what the worker gives

    def beat(self, now_ns: int | None = None) -> None:
        """Write a heartbeat: the worker lived at this time of CLOCK_MONOTONIC, by default now. Raises OSError."""
        self._write(_AT_HEARTBEAT, time.monotonic_ns() if now_ns is None else now_ns)

    def refill(self, device: int, tokens: float, capacity: float) -> float:
        """Add tokens, but none beyond a level of `capacity`; return how many there then are. Raises OSError.

        The tokens are the difference of two numbers that only grow: the tokens given, which only the worker writes,
        and the tokens taken, which only the processes write.
        """
        taken = self.taken(device)
        most = taken + round(capacity * TOKEN)
        granted = self._granted[device]
        if granted < most:
            granted = min(granted + round(tokens * TOKEN), most)
            self._granted[device] = granted
            self._write(_AT_GRANTED + device * _WORD, granted)
        return (granted - taken) / TOKEN

    def set_limit(self, device: int, limit_bytes: int) -> None:
        """Change the limit of a device; the next allocation sees it. Raises OSError."""
        self._write(_AT_LIMIT + device * _WORD, limit_bytes)

    def set_rate(self, device: int, rate: float) -> None:
        """Change a device's part of the compute; 0: launches need no tokens. Raises OSError."""
        self._write(_AT_RATE + device * _WORD, round(rate * TOKEN))

    def rate(self, device: int) -> float:
        """Return a device's part of the compute in tokens a second; 0: launches need none. Raises OSError."""
        return min(self._read(_AT_RATE + device * _WORD)[0], _NUMBER_MAX) / TOKEN

    def hold_calls(self) -> None:
        """Have calls of the CUDA driver wait, as the attempt is about to be frozen. Raises OSError.

        Change nothing if they wait already: `is_wanted` still returns True for a call since the first `hold_calls`.
        """
        if not self._read(_AT_FROZEN)[0]:
            self._write(_AT_FROZEN, min(self.counts().waiting, _NUMBER_MAX) + 1)

    def let_calls_pass(self) -> None:
        """Have calls of the CUDA driver pass again. Raises OSError."""
        self._write(_AT_FROZEN, 0)

    def is_wanted(self) -> bool:
        """Return whether a call has come since `hold_calls`, whatever became of its process; False if calls pass."""
        (frozen,) = self._read(_AT_FROZEN)
        return frozen > 0 and min(self.counts().waiting, _NUMBER_MAX) + 1 != frozen

    def mark_dead(self, slot: Slot) -> None:
        """Mark the process of a slot as ended, so that its bytes are free. Raises OSError."""
        self._write(_AT_DEAD + slot.number * _WORD, slot.owner)

    # -- what NVML says that the processes hold

    def begin_reading(self) -> Reading:
        """Return what the processes count, before NVML is asked; `write_held` takes it back. Raises OSError."""
        number = min(self._read(_AT_READING)[0], _NUMBER_MAX) + 1
        self._write(_AT_READING, number)
        done = {slot.owner: tuple(use.done for use in slot.uses) for slot in self.slots()}  # `used` is read after it
        return Reading(number, [slot for slot in self.slots() if slot.owner in done], done)

    def write_held(self, reading: Reading, device: int, held: Mapping[int, int]) -> None:
        """Write what NVML says that processes hold beyond what they count: bytes by the slot's owner. Raises OSError.

        What changed while NVML was asked makes that uncertain by as much; then the number before, with the guesses that
        NVML's has in it now, stays as far as it can be true.
        """
        begun = {slot.owner: slot.uses[device].begun for slot in self.slots()}
        for slot in reading.slots:
            if slot.owner not in held or slot.owner not in begun:
                continue  # it has ended, or NVML does not list it
            at = _AT_TOLD + slot.number * _TOLD_BYTES
            at_device = at + _WORD + 2 * device * _WORD
            if self._read(at)[0] != slot.owner:
                os.pwrite(self._file, bytes(_TOLD_BYTES), at)
            before, seen = self._read(at_device, 2)
            use = slot.uses[device]
            before += use.guessed(seen, reading.number)
            exact = held[slot.owner] - use.used
            uncertain = max(begun[slot.owner] - reading.done[slot.owner][device], 0)
            beyond = min(max(before, exact - uncertain), exact + uncertain)
            self._write(at_device, min(max(beyond, 0), _NUMBER_MAX))
            self._write(at_device + _WORD, reading.number)
            self._write(at, slot.owner)

    def write_others(self, device: int, held: int) -> None:
        """Write how many bytes processes of the attempt without a slot hold by NVML. Raises OSError."""
        self._write(_AT_BEYOND + device * _WORD, held)

    # -- what the processes count

    def taken(self, device: int) -> int:
        """Return the tokens that launches have taken since the beginning, in millionths of a token."""
        return self._read(_AT_BUCKETS + device * _LINE)[0]

    def limit(self, device: int) -> int:
        """Return the limit of a device in bytes; 0 for none."""
        return self._read(_AT_LIMIT + device * _WORD)[0]

    def counts(self) -> Counts:
        """Return what the processes have counted."""
        return Counts(*self._read(_AT_COUNTS, len(Counts._fields)))

    def slots(self) -> list[Slot]:
        """Return the slots of the processes that use a device, without those that `mark_dead` marked as ended."""
        high = min(self.counts().high, SLOTS_MAX)
        words = _SLOT_BYTES // _WORD
        read = self._read(_AT_SLOTS, high * words)
        dead = self._read(_AT_DEAD, high)
        found = []
        for number in range(high):
            slot = read[number * words : (number + 1) * words]
            owner = slot[0]
            if owner and owner != dead[number]:
                words_of = (slot[_LINE // _WORD + at * _USE_WORDS :][:_USE_WORDS] for at in range(self.devices))
                uses = tuple(Use(*each) for each in words_of)
                start_ticks = owner & ((1 << _START_BITS) - 1)
                found.append(Slot(number, owner, owner >> _START_BITS, slot[1], start_ticks, uses))
        return found

    def used(self, device: int) -> int:
        """Return the bytes of a device that all processes of `slots` use."""
        return sum(slot.used[device] for slot in self.slots())

    def _read(self, at: int, count: int = 1) -> tuple[int, ...]:
        """Return `count` numbers; zeros if the job has cut its file short."""
        read = os.pread(self._file, count * _WORD, at)
        return struct.unpack(f"@{count}Q", read.ljust(count * _WORD, b"\0"))

    def _write(self, at: int, value: int) -> None:
        os.pwrite(self._file, struct.pack("@Q", value), at)


def _raw(name: str) -> bytes:
    """Return the sixteen bytes of a device's uuid. Raises ValueError for an invalid one."""
    return uuid.UUID(name.partition("-")[2]).bytes
