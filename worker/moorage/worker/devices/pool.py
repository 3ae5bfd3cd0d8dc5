"""Keep the record of which holder has which device of this machine now. The scheduler only proposes; the pool decides.

Two kinds of holder share one table of slots. Code inside the worker's process claims devices, whole or as a sharer of
one mode, in order of arrival (`claim`, `try_claim`). Placements take named slots, at once or not at all, alone or as
sharers (`try_claim_slots`); they are refused while a local claimer waits. A slot is keyed by its position in the list
of devices that the pool was built from, which is the order of hello; a device's identity is (vendor, uuid).

The call that frees a slot also hands it to the oldest waiter that it fits, so no other code can see it free in between.
A waiter that the slot does not fit keeps its place, and no later waiter is served before it.

The pool is not thread-safe: it belongs to one thread, and waiting claims belong to that thread's event loop. Only the
garbage collector's release of a forgotten lease may come from another thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moorage.schemas.frames import Device
from moorage.schemas.gpu import Sharing
from moorage.worker.devices.pool_lease import (
    WAITERS_MAX,
    GpuLease,
    GpuLeaseEntry,
    Phase,
    PoolCorrupted,
    PoolFull,
    PoolLease,
    RefusalReason,
    SlotsRefused,
    SlotState,
)
from moorage.worker.devices.pool_slots import SlotTable, expect

__all__ = [
    "GpuLease",
    "GpuLeaseEntry",
    "GpuPool",
    "PoolCorrupted",
    "PoolFull",
    "PoolLease",
    "SlotState",
    "SlotsRefused",
]


@dataclass(frozen=True, slots=True)
class _Want:
    """What a waiting claim needs."""

    ticket: int
    slots: frozenset[int] | None
    mode: Sharing


class GpuPool:
    """The slots of one machine. See the module's docstring for the rules.

    `devices` are in slot order, at most `SLOTS_MAX`, each (vendor, uuid) once; the list may be empty. `sharers_max` are
    the limits from hello, which may only lower the defaults. A device with `modes` is claimed in those modes only.
    `lent` are the positions that placements may use, None for all; claims of this process may take any position.
    `on_change` is called after every change, when the pool is consistent; it must not raise. Raises ValueError for an
    invalid list of devices or slots.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        sharers_max: Mapping[str, int] | None = None,
        lent: Iterable[int] | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self._table = SlotTable(devices, sharers_max or {}, lent)
        self._waiters: dict[asyncio.Future[GpuLease], _Want] = {}  # in order of arrival
        self._abandoned: deque[int] = deque()  # leases that the garbage collector found; any thread may append
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next_ticket = 1
        self._last_ticket_granted = 0
        self.generation = 0  # grows with every change
        self._on_change = on_change

    # ------------------------------------------------------------------------------------- claims of this process

    def capacity(self) -> int:
        """Return the number of slots, free or not."""
        return len(self._table.slots)

    @property
    def devices(self) -> list[Device]:
        """The devices of its slots, in slot order."""
        return [slot.device for slot in self._table.slots]

    def pending_claimers(self) -> int:
        """Return how many claims wait now.

        A granted or cancelled claim is not among them, even before it runs again.
        """
        self._reap()
        return sum(not _is_dead(waiter) for waiter in self._waiters)

    def try_claim(self, slots: Collection[int] | None = None) -> GpuLease | None:
        """Return a lease of the first free one of `slots` (None: any); None if none is free or a claim waits."""
        self._reap()
        return self._try(_Want(0, None if slots is None else frozenset(slots), "exclusive"))

    async def claim(self, slots: Collection[int] | None = None, mode: Sharing = "exclusive") -> GpuLease | None:
        """Wait for a slot, first come, first served, and return its lease; None at once if the pool has no slots.

        `slots` are the acceptable positions (None: any). With a shared `mode` the claim is one of the sharers of a
        device, within the mode's limits, and its `release` ends this share alone. Raises ValueError for an unknown
        position, for an empty `slots`, and for a mode in which no acceptable device can be shared. Raises PoolFull if
        `WAITERS_MAX` claims wait.

        A cancelled claim leaves nothing behind: a claim that was granted in the meantime hands its slot on. For a time
        limit use `asyncio.timeout`; before Python 3.12 `asyncio.wait_for` may drop a lease granted at the last moment.
        """
        capacity = self.capacity()
        if not capacity:
            return None
        wanted = None if slots is None else frozenset(slots)
        if wanted is not None and not (wanted and wanted <= set(range(capacity))):
            raise ValueError(f"slots must be some of 0..{capacity - 1}, found {sorted(wanted)}")
        table = self._table
        if not table.sharers_max[mode] or not any(table.takes(slot, mode) for slot in wanted or range(capacity)):
            raise ValueError(f"no device of this pool is shared by {mode}, or none of these slots")
        self._reap()
        want = _Want(self._next_ticket, wanted, mode)
        lease = self._try(want)
        if lease is not None:
            return lease
        if len(self._waiters) >= WAITERS_MAX:
            raise PoolFull
        self._loop = asyncio.get_running_loop()
        waiter: asyncio.Future[GpuLease] = self._loop.create_future()
        self._waiters[waiter] = want
        self._next_ticket += 1
        self._changed()
        try:
            return await waiter
        except BaseException:  # CancelledError, or GeneratorExit while the event loop is torn down
            if self._waiters.pop(waiter, None) is not None:
                self._serve()  # a later waiter may fit what is free
                self._changed()
            if waiter.done() and not waiter.cancelled():
                waiter.result().release()
            raise

    # ------------------------------------------------------------------------------------------------ placements

    def try_claim_slots(self, slots: Sequence[int], mode: Sharing, holder: str) -> PoolLease:
        """Claim all of `slots` for a placement, or raise SlotsRefused with the reason and claim nothing. Never waits.

        `holder` names the attempt in `slot_states`. No slots (a job without a GPU) are always granted.
        """
        self._reap()
        wanted = tuple(slots)
        if wanted and (len(wanted) > 1 or self._waiters or not self._is_open(wanted[0], mode)):
            self._check_wanted(wanted, mode)
        number = self._table.take(wanted, mode, holder, local=False)
        if wanted:
            self._changed()
        return PoolLease(self, number, wanted, mode, holder)

    def take_again(self, slots: Sequence[int], mode: Sharing, holder: str) -> PoolLease:
        """Claim slots for an attempt that runs on them already, whatever `lent` says now.

        Unknown slots are left out. Raises SlotsRefused for a slot that another lease has alone or in another mode.
        """
        wanted = tuple(dict.fromkeys(slot for slot in slots if 0 <= slot < self.capacity()))
        if taken := tuple(slot for slot in wanted if not self._table.joins(slot, mode)):
            raise SlotsRefused("leased", taken)
        number = self._table.take(wanted, mode, holder, local=False, again=True)
        if wanted:
            self._changed()
        return PoolLease(self, number, wanted, mode, holder)

    def _is_open(self, position: int, mode: Sharing) -> bool:
        """Return whether one slot passes every check of `_check_wanted`: the short way that most placements take."""
        return 0 <= position < self.capacity() and self._table.why_not(position, mode) is None

    def _check_wanted(self, wanted: tuple[int, ...], mode: Sharing) -> None:
        if unknown := tuple(position for position in wanted if not 0 <= position < self.capacity()):
            raise SlotsRefused("unknown-slot", unknown)
        if len(set(wanted)) != len(wanted):
            raise SlotsRefused("duplicate-slot", tuple(sorted({p for p in wanted if wanted.count(p) > 1})))
        if self._somebody_waits():
            raise SlotsRefused("local-claimer-waits", wanted)
        refused: dict[RefusalReason, list[int]] = {}
        for position in wanted:
            if reason := self._table.why_not(position, mode):
                refused.setdefault(reason, []).append(position)
        if refused:
            reason, positions = next(iter(refused.items()))
            raise SlotsRefused(reason, tuple(positions))

    # ------------------------------------------------------------------------------- quarantine, and who may use what

    def quarantine(self, slot: int, reason: str, by: str = "") -> None:
        """Take a slot out of use: a present holder keeps it, and it is not given out again.

        `by` names the party that closes it: the slot stays closed until every party that closed it has opened it. A
        later reason of one party replaces its earlier one. Raises ValueError for an empty reason, IndexError for an
        unknown slot.
        """
        if not reason:
            raise ValueError("a quarantine needs a reason")
        self._reap()
        self._table.close(slot, reason, by)
        self._changed()

    def unquarantine(self, slot: int, by: str = "") -> None:
        """Open a slot that `by` closed. Once no party keeps it closed it is in use again, first for the oldest waiter.

        If `by` did not close the slot, nothing happens.
        """
        self._reap()
        if self._table.open(slot, by):
            self._serve()
            self._changed()

    @property
    def lent(self) -> frozenset[int]:
        """The positions that placements may use."""
        return self._table.lent

    # ------------------------------------------------------------------------------------------------ state for readers

    def snapshot_leases(self) -> list[GpuLeaseEntry]:
        """Return one entry per slot, in hello's order: the state at this moment."""
        self._reap()
        return self._table.entries()

    def slot_states(self) -> list[SlotState]:
        """Return every slot with its mode, sharers and quarantine, in hello's order."""
        self._reap()
        return self._table.states()

    def busy_slots(self) -> list[int]:
        """Return the positions that no placement can have because of a local claim or a quarantine."""
        return [state.slot for state in self.slot_states() if state.local or state.quarantine]

    def shared_slots(self) -> list[int]:
        """Return the positions that sharers use now."""
        return [state.slot for state in self.slot_states() if state.mode not in (None, "exclusive")]

    def validate(self) -> None:
        """Check the pool's invariants, in O(slots + leases + waiters). Raises PoolCorrupted."""
        self._reap()
        self._table.validate()
        tickets = [want.ticket for want in self._waiters.values()]
        expect(tickets == sorted(tickets), "the waiters are out of order")
        expect(not tickets or tickets[0] > self._last_ticket_granted, "a waiter was overtaken")
        for waiter, want in self._waiters.items():  # a cancelled waiter serves the later ones when it runs again
            expect(
                _is_dead(waiter) or self._table.fitting(want.slots, want.mode) is None,
                "a claim waits although a slot would do",
            )
            break

    # ------------------------------------------------------------------------------------------------------ inside

    def _try(self, want: _Want) -> GpuLease | None:
        """Return a lease at once, or None if no slot fits or a claim waits already."""
        if self._waiters and self._somebody_waits():
            return None
        position = self._table.fitting(want.slots, want.mode)
        if position is None:
            return None
        lease = self._take_local(position, want.mode)
        self._changed()
        return lease

    def _take_local(self, position: int, mode: Sharing) -> GpuLease:
        number = self._table.take((position,), mode, "local", local=True)
        return GpuLease(self, number, position, self._table.slots[position].device)

    def _phase(self, number: int) -> Phase:
        return self._table.phase(number)

    def _end(self, number: int) -> None:
        if self._table.step(number, "ended").slots:
            self._changed()

    def _release(self, number: int) -> None:
        self._reap()
        if self._table.release(number):
            self._serve()
            self._changed()

    def _serve(self) -> None:
        """Hand free slots to the oldest waiting claims, up to the first claim that no slot fits.

        A grant to a waiter is part of the change that made room for it.
        """
        while self._waiters:
            waiter, want = next(iter(self._waiters.items()))
            if _is_dead(waiter):
                del self._waiters[waiter]
                continue
            position = self._table.fitting(want.slots, want.mode)
            if position is None:
                return
            del self._waiters[waiter]
            expect(want.ticket > self._last_ticket_granted, f"ticket {want.ticket} was overtaken")
            self._last_ticket_granted = want.ticket
            waiter.set_result(self._take_local(position, want.mode))

    def _somebody_waits(self) -> bool:
        return any(not _is_dead(waiter) for waiter in self._waiters)

    def _changed(self) -> None:
        self.generation += 1
        if self._on_change is not None:
            self._on_change()

    def _abandon(self, number: int) -> None:
        # The collector may run in any thread and in the middle of any method of the pool, so this only leaves a note.
        self._abandoned.append(number)
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._reap)

    def _reap(self) -> None:
        while self._abandoned:
            self._release(self._abandoned.popleft())


def _is_dead(waiter: asyncio.Future[GpuLease]) -> bool:
    """Return whether a waiter was granted a slot or cancelled, or its event loop is closed: it can be given nothing."""
    return waiter.done() or waiter.get_loop().is_closed()
