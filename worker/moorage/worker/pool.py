"""`GpuPool`: who holds which device of this machine, now. The pool owns the truth; a scheduler only proposes.

Two kinds of holder share one table of slots. Code inside the worker's process claims devices, whole or as a sharer of
one mode, in order of arrival (`claim`, `try_claim`). Placements take named slots, at once or not at all, alone or as
sharers (`try_claim_slots`), and are refused while a local claimer waits. A slot is keyed by its position in the list of
devices the pool was built from, which is hello's order; a device's identity is (vendor, uuid).

What comes free is handed to the oldest waiter that it fits in the very call that frees it, so that between the two
nobody can see it free. A waiter that it does not fit keeps its place, and nobody behind it is served before it.

Not thread-safe: one pool belongs to one thread, and waiting claims to that thread's event loop. Only the last-resort
release of a forgotten lease may come from another thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moorage.schemas.frames import Device
from moorage.schemas.gpu import Sharing
from moorage.worker.pool_lease import (
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
from moorage.worker.slot_table import SlotTable, expect

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
    """What a waiting claim would take."""

    ticket: int
    slots: frozenset[int] | None
    mode: Sharing


class GpuPool:
    """The slots of one machine. See the module's text for the rules.

    `devices` in slot order, at most `SLOTS_MAX`, no (vendor, uuid) twice; none is legal. `sharers_max` are hello's
    caps, which may only lower the defaults; a device that has `modes` is held in those alone. `lent` are the positions
    that placements may use, None for all; claims of this process may take any. `on_change` is called after every
    change, with the pool consistent: it must not raise. Raises ValueError for a list of devices or slots that cannot
    be.
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
        self._abandoned: deque[int] = deque()  # leases the collector found; any thread may append
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next_ticket = 1
        self._last_ticket_granted = 0
        self.generation = 0  # grows with every change
        self.on_change = on_change

    # ------------------------------------------------------------------------------------- claims of this process

    def capacity(self) -> int:
        """The number of slots, whatever holds them."""
        return len(self._table.slots)

    @property
    def devices(self) -> list[Device]:
        """The devices of its slots, in slot order."""
        return [slot.device for slot in self._table.slots]

    def pending_claimers(self) -> int:
        """Claims that wait now: one less as soon as one is granted or cancelled, even before it runs again."""
        self._reap()
        return sum(not _is_dead(waiter) for waiter in self._waiters)

    def try_claim(self) -> GpuLease | None:
        """The first free slot in slot order; None at once where there is none. Never overtakes a waiter."""
        self._reap()
        return self._try(_Want(0, None, "exclusive"))

    async def claim(self, slots: Collection[int] | None = None, mode: Sharing = "exclusive") -> GpuLease | None:
        """A slot, waiting first come, first served; None at once on a pool without slots.

        `slots` are the positions that will do (None: any); with a shared `mode` the claim is one of the sharers of a
        device, within its caps, and its `release` is the end of this share alone. Raises ValueError for slots that are
        not there, or none, and for a mode in which no device has a sharer here.

        A cancelled claim leaves nothing behind: one that was granted in the meantime hands its slot on. For a time
        limit use `asyncio.timeout`; before Python 3.12 `asyncio.wait_for` may drop a lease granted at the last moment.
        Raises PoolFull where `WAITERS_MAX` claims wait.
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
        except BaseException:  # CancelledError, or GeneratorExit where a loop is torn down around us
            if self._waiters.pop(waiter, None) is not None:
                self._serve()  # who came behind may fit what is free
                self._changed()
            if waiter.done() and not waiter.cancelled():
                waiter.result().release()
            raise

    # ------------------------------------------------------------------------------------------------ placements

    def try_claim_slots(self, slots: Sequence[int], mode: Sharing, holder: str, *, guest: bool = False) -> PoolLease:
        """All of `slots` for a placement, or SlotsRefused with the reason and nothing taken. Never waits.

        `holder` names the member in `slot_states`. No slots at all (a job without a GPU) is always granted. A `guest`
        gets slots that another placement has alone, which must be frozen: one guest each.
        """
        self._reap()
        wanted = tuple(slots)
        if wanted and (guest or len(wanted) > 1 or self._waiters or not self._is_open(wanted[0], mode)):
            self._check_wanted(wanted, mode, guest)
        number = self._table.take(wanted, mode, holder, local=False, guest=guest)
        if wanted:
            self._changed()
        return PoolLease(self, number, wanted, mode, holder)

    def take_again(self, slots: Sequence[int], mode: Sharing, holder: str, *, guest: bool = False) -> PoolLease:
        """As `try_claim_slots` for what runs on them already: whoever has a device keeps it, whatever may be lent now.

        Slots that are not there are left out. Raises SlotsRefused for what another has.
        """
        wanted = tuple(dict.fromkeys(slot for slot in slots if 0 <= slot < self.capacity()))
        if taken := tuple(slot for slot in wanted if not self._table.joins(slot, mode, guest)):
            raise SlotsRefused("leased", taken)
        number = self._table.take(wanted, mode, holder, local=False, again=True, guest=guest)
        if wanted:
            self._changed()
        return PoolLease(self, number, wanted, mode, holder)

    def _is_open(self, position: int, mode: Sharing) -> bool:
        """Whether one slot passes every check of `_check_wanted`: most placements are such, and take the short way."""
        return 0 <= position < self.capacity() and self._table.why_not(position, mode) is None

    def _check_wanted(self, wanted: tuple[int, ...], mode: Sharing, guest: bool = False) -> None:
        if unknown := tuple(position for position in wanted if not 0 <= position < self.capacity()):
            raise SlotsRefused("unknown-slot", unknown)
        if len(set(wanted)) != len(wanted):
            raise SlotsRefused("duplicate-slot", tuple(sorted({p for p in wanted if wanted.count(p) > 1})))
        if self._somebody_waits():
            raise SlotsRefused("local-claimer-waits", wanted)
        refused: dict[RefusalReason, list[int]] = {}
        for position in wanted:
            if reason := self._table.why_not(position, mode, guest):
                refused.setdefault(reason, []).append(position)
        if refused:
            reason, positions = next(iter(refused.items()))
            raise SlotsRefused(reason, tuple(positions))

    # ------------------------------------------------------------------------------- quarantine, and who may use what

    def quarantine(self, slot: int, reason: str, by: str = "") -> None:
        """Take a slot out of use: whoever holds it keeps it, nobody gets it after.

        `by` says who closes it, by any word: it stays closed until each who closed it has opened it. A later reason of
        the same one replaces the first. Raises ValueError for an empty reason, IndexError for a slot that is not there.
        """
        if not reason:
            raise ValueError("a quarantine needs a reason")
        self._reap()
        self._table.close(slot, reason, by)
        self._changed()

    def unquarantine(self, slot: int, by: str = "") -> None:
        """Open a slot that `by` closed; it is in use again once nobody keeps it closed, first for the oldest waiter.

        Not closed by this one: nothing.
        """
        self._reap()
        if self._table.open(slot, by):
            self._serve()
            self._changed()

    @property
    def lent(self) -> frozenset[int]:
        """The positions that placements may use."""
        return self._table.lent

    def set_lent(self, slots: Iterable[int] | None) -> None:
        """Change which positions placements may use (None: all); what they hold already, they keep."""
        lent = self._table.checked_lent(slots)
        if lent != self._table.lent:
            self._table.lent = lent
            self._changed()

    # ------------------------------------------------------------------------------------------------- looking at it

    def snapshot_leases(self) -> list[GpuLeaseEntry]:
        """One entry a slot in hello's order: true at this moment, and no promise for the next."""
        self._reap()
        return self._table.entries()

    def slot_states(self) -> list[SlotState]:
        """Every slot with its mode, sharers and quarantine, in hello's order."""
        self._reap()
        return self._table.states()

    def busy_slots(self) -> list[int]:
        """The positions that no placement can have because a local claim holds them or they are in quarantine."""
        return [state.slot for state in self.slot_states() if state.local or state.quarantine]

    def shared_slots(self) -> list[int]:
        """The positions that sharers use now."""
        return [state.slot for state in self.slot_states() if state.mode not in (None, "exclusive")]

    def validate(self) -> None:
        """Check the pool against itself, in O(slots + leases + waiters); raises PoolCorrupted."""
        self._reap()
        self._table.validate()
        tickets = [want.ticket for want in self._waiters.values()]
        expect(tickets == sorted(tickets), "the waiters are out of order")
        expect(not tickets or tickets[0] > self._last_ticket_granted, "a waiter was overtaken")
        for waiter, want in self._waiters.items():  # one that was cancelled serves those behind it when it runs again
            expect(
                _is_dead(waiter) or self._table.fitting(want.slots, want.mode) is None,
                "a claim waits although a slot would do",
            )
            break

    # ------------------------------------------------------------------------------------------------------ inside

    def _try(self, want: _Want) -> GpuLease | None:
        """At once, unless somebody waits."""
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
        """Hand what is free to the oldest claims that still wait, up to the first that it does not fit.

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
        if self.on_change is not None:
            self.on_change()

    def _abandon(self, number: int) -> None:
        # The collector may run in any thread and in the middle of any method of ours: only leave a note.
        self._abandoned.append(number)
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._reap)

    def _reap(self) -> None:
        while self._abandoned:
            self._release(self._abandoned.popleft())


def _is_dead(waiter: asyncio.Future[GpuLease]) -> bool:
    """Cancelled, or of a loop that is gone: nobody will ever take what it is given."""
    return waiter.done() or waiter.get_loop().is_closed()
