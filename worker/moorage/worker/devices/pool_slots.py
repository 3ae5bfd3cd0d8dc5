"""Keep the slots of one machine and the leases on them, for `pool.GpuPool`, which keeps the waiting claims."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from moorage.schemas.frames import Device
from moorage.schemas.gpu import SHARERS_MAX, Sharing
from moorage.worker.devices.pool_lease import PHASES, GpuLeaseEntry, Phase, PoolCorrupted, RefusalReason, SlotState

SLOTS_MAX: Final = 64  # a worker's slots are one 64-bit mask in the ledger
REASON_CHARS_MAX: Final = 200
_SHARED: Final[tuple[Literal["mps", "time-slice"], ...]] = ("mps", "time-slice")


@dataclass(slots=True)
class Slot:
    """One device. It is free if it has no holder and no party keeps it out of use."""

    device: Device
    mode: Sharing | None = None
    holders: list[int] = field(default_factory=list)  # lease numbers, the keys of `SlotTable.leases`
    closed_by: dict[str, str] = field(default_factory=dict)  # the parties that keep it out of use, and why
    quarantine: str = ""  # the newest of these reasons

    @property
    def free(self) -> bool:
        return not self.holders and not self.quarantine


@dataclass(slots=True)
class LeaseRecord:
    """The pool's record of a lease. It has no reference to the lease, so that a forgotten lease can be collected."""

    slots: tuple[int, ...]
    local: bool
    holder: str
    again: bool = False  # taken over from an earlier agent, so `lent` does not apply
    phase: Phase = "held"


class SlotTable:
    """The slots and leases; see `GpuPool` for the arguments.

    Raises ValueError for an invalid list of devices or slots.
    """

    def __init__(self, devices: Sequence[Device], sharers_max: Mapping[str, int], lent: Iterable[int] | None) -> None:
        if len(devices) > SLOTS_MAX:
            raise ValueError(f"a pool has at most {SLOTS_MAX} slots, found {len(devices)} devices")
        identities = {(device.vendor, device.uuid or device.index) for device in devices}
        if len(identities) != len(devices):
            raise ValueError("two devices of a pool have the same vendor and uuid")
        self.slots = [Slot(device) for device in devices]
        self.leases: dict[int, LeaseRecord] = {}
        self.free = len(self.slots)  # a second record, checked against the slots at every take and release
        self.sharers_max: dict[Sharing, int] = {"exclusive": 1}
        for mode in _SHARED:
            cap = SHARERS_MAX[mode]
            self.sharers_max[mode] = max(0, min(cap, sharers_max.get(mode, cap)))
        everything = frozenset(range(len(self.slots)))
        self.lent = everything if lent is None else frozenset(lent)
        if not self.lent <= everything:
            raise ValueError(f"lent slots must be 0..{len(self.slots) - 1}, found {sorted(self.lent - everything)}")
        self._next_lease = 1

    def at(self, slot: int) -> Slot:
        """Return a slot. Raises IndexError for an unknown one."""
        if not 0 <= slot < len(self.slots):
            raise IndexError(f"the pool has no slot {slot}")
        return self.slots[slot]

    # ------------------------------------------------------------------------------------------------ take and give

    def takes(self, position: int, mode: Sharing) -> bool:
        """Return whether a slot may be used in that mode: a device may be reserved for some modes."""
        kept = self.slots[position].device.modes
        return not kept or mode in kept

    def joins(self, position: int, mode: Sharing) -> bool:
        """Return whether a slot's present holders allow one more, by their mode; limits are not checked."""
        slot = self.slots[position]
        return slot.mode is None or (slot.mode == mode and mode != "exclusive")

    def why_not(self, position: int, mode: Sharing) -> RefusalReason | None:
        """Return why a placement cannot have this slot; None if it can."""
        slot = self.slots[position]
        if position not in self.lent:
            return "not-lent"
        if slot.quarantine:
            return "quarantined"
        if not self.takes(position, mode):
            return "mode-not-here"
        if slot.mode == "exclusive" or (slot.mode and mode == "exclusive"):
            return "leased"
        if slot.mode and slot.mode != mode:
            return "mode-mixed"
        return "sharers-full" if len(slot.holders) >= self.sharers_max[mode] else None

    def fitting(self, wanted: Collection[int] | None, mode: Sharing) -> int | None:
        """Return the slot that a claim gets now: one that is shared in its mode already, else the first free one.

        None if no slot fits. `wanted` are the acceptable positions; None for any.
        """
        if mode != "exclusive":
            for position, slot in enumerate(self.slots):
                if (wanted is not None and position not in wanted) or not self.takes(position, mode):
                    continue
                if slot.mode == mode and not slot.quarantine and len(slot.holders) < self.sharers_max[mode]:
                    return position
        if not self.free:
            return None
        for position, slot in enumerate(self.slots):
            if slot.free and (wanted is None or position in wanted) and self.takes(position, mode):
                return position
        expect(any(slot.free for slot in self.slots), f"the count says {self.free} slots are free, and none is")
        return None

    def take(
        self,
        positions: tuple[int, ...],
        mode: Sharing,
        holder: str,
        *,
        local: bool,
        again: bool = False,
    ) -> int:
        """Make a lease on these slots and return its number. Only `joins` is checked here, not `why_not`.

        Raises PoolCorrupted if a slot's present holders do not allow it.
        """
        number = self._next_lease
        self._next_lease += 1
        self.leases[number] = LeaseRecord(positions, local, holder, again)
        for position in positions:
            slot = self.slots[position]
            if slot.free:
                self.free -= 1
            if self.free < 0:
                raise PoolCorrupted("more slots are taken than there are")
            if not self.joins(position, mode):
                raise PoolCorrupted(f"slot {position} is held in {slot.mode}")
            slot.mode = mode
            slot.holders.append(number)
        return number

    def phase(self, number: int) -> Phase:
        record = self.leases.get(number)
        return record.phase if record else "released"

    def step(self, number: int, phase: Phase) -> LeaseRecord:
        """Move a lease to this phase. Raises PoolCorrupted for an illegal step."""
        now = self.phase(number)
        if phase not in PHASES[now]:
            raise PoolCorrupted(f"a lease that is {now} cannot become {phase}")
        record = self.leases[number]
        record.phase = phase
        return record

    def release(self, number: int) -> tuple[int, ...]:
        """End a lease and return its slots. Raises PoolCorrupted if it was released already."""
        record = self.step(number, "released")
        del self.leases[number]
        for position in record.slots:
            slot = self.slots[position]
            if number not in slot.holders:
                raise PoolCorrupted(f"lease {number} does not hold its slot {position}")
            slot.holders.remove(number)
            if not slot.holders:
                slot.mode = None
                if slot.free:
                    self._count_free()
        return record.slots

    def close(self, slot: int, reason: str, by: str) -> None:
        """Take a slot out of use until every party that closed it has opened it."""
        found = self.at(slot)
        if found.free:
            self.free -= 1
        found.closed_by.pop(by, None)  # so that the newest reason is last
        found.closed_by[by] = found.quarantine = reason[:REASON_CHARS_MAX]

    def open(self, slot: int, by: str) -> bool:
        """Undo `close` of the same `by`; return False if it had not closed the slot."""
        found = self.at(slot)
        if found.closed_by.pop(by, None) is None:
            return False
        found.quarantine = next(reversed(found.closed_by.values()), "")
        if found.free:
            self._count_free()
        return True

    def _count_free(self) -> None:
        self.free += 1
        expect(self.free <= len(self.slots), "more slots are free than there are")

    # --------------------------------------------------------------------------------------------- state for readers

    def entries(self) -> list[GpuLeaseEntry]:
        return [
            GpuLeaseEntry(slot.device.vendor, slot.device.name, slot.device.index, bool(slot.holders))
            for slot in self.slots
        ]

    def states(self) -> list[SlotState]:
        return [self._state(position, slot) for position, slot in enumerate(self.slots)]

    def _state(self, position: int, slot: Slot) -> SlotState:
        if not slot.holders:
            return SlotState(position, None, 0, 0, False, position in self.lent, slot.quarantine, ())
        records = [self.leases[number] for number in slot.holders]
        return SlotState(
            position,
            slot.mode,
            len(records),
            sum(record.phase == "ended" for record in records),
            any(record.local for record in records),
            position in self.lent,
            slot.quarantine,
            tuple(record.holder for record in records),
        )

    def validate(self) -> None:
        """Check the two records against each other, in O(slots + leases). Raises PoolCorrupted."""
        free = sum(slot.free for slot in self.slots)
        out_of_use = sum(bool(slot.quarantine) and not slot.holders for slot in self.slots)
        held = sum(bool(slot.holders) for slot in self.slots)
        expect(free == self.free, f"{free} slots are free, the count says {self.free}")
        expect(free + held + out_of_use == len(self.slots), "held + free + quarantined is not the capacity")
        for position, slot in enumerate(self.slots):
            expect(bool(slot.holders) == bool(slot.mode), f"slot {position} has a mode without holders, or none with")
            expect(len(set(slot.holders)) == len(slot.holders), f"slot {position} is held twice by one lease")
            if slot.mode:
                known = [self.leases[number] for number in slot.holders if number in self.leases]
                new = sum(not record.again for record in known)
                expect(new <= self.sharers_max[slot.mode], f"slot {position} has too many sharers")
            for number in slot.holders:
                record = self.leases.get(number)
                expect(record is not None and position in record.slots, f"slot {position} is held by no lease")
        for number, record in self.leases.items():
            for position in record.slots:
                expect(number in self.slots[position].holders, f"lease {number} does not hold its slot {position}")


def expect(true: bool, otherwise: str) -> None:
    """Raise PoolCorrupted unless `true`."""
    if not true:
        raise PoolCorrupted(otherwise)
