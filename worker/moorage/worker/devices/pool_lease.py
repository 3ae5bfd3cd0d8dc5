"""Define what a pool hands out: leases, the states of its slots, and its refusals. The pool itself is in `pool`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Protocol

from moorage.schemas.errors import MoorageError, problem
from moorage.schemas.frames import Device
from moorage.schemas.gpu import Sharing

WAITERS_MAX: Final = 10_000

RefusalReason = Literal[
    "local-claimer-waits",  # claims made inside the process come first
    "unknown-slot",
    "duplicate-slot",
    "not-lent",  # the service keeps this slot for its own claims
    "quarantined",
    "leased",  # taken by a local claimer, or wanted alone while another holder has it
    "mode-mixed",  # shared in another mode until fully released
    "sharers-full",
    "mode-not-here",  # its worker keeps this slot for other modes
]
Phase = Literal["held", "ended", "released"]

#: The legal steps of a placement's lease; `ended` is the wait for the device's memory to be free.
PHASES: Final[dict[Phase, frozenset[Phase]]] = {
    "held": frozenset({"ended", "released"}),
    "ended": frozenset({"released"}),
    "released": frozenset(),
}


class PoolCorrupted(RuntimeError):
    """The pool's two records of its slots contradict each other: nothing that it returns can be relied on."""


class PoolFull(MoorageError):
    """A claim cannot wait, because `WAITERS_MAX` claims wait already."""

    def __init__(self) -> None:
        super().__init__(
            problem("queue-full", f"{WAITERS_MAX} claims wait for a GPU already", allowed=f"{WAITERS_MAX} waiting")
        )


class SlotsRefused(MoorageError):
    """A placement cannot have these slots now; nothing was taken. `slots` are the slots that prevent it."""

    def __init__(self, reason: RefusalReason, slots: tuple[int, ...]) -> None:
        self.reason: Final[RefusalReason] = reason
        self.slots: Final = slots
        which = ", ".join(map(str, slots)) or "none"
        super().__init__(problem("failed-precondition", f"the pool refuses the slots: {reason} ({which})", found=which))


@dataclass(frozen=True, slots=True)
class GpuLeaseEntry:
    """A slot as in the load frame: `name` is the device's name, `index` its own index."""

    vendor: str
    name: str
    index: int
    leased: bool


@dataclass(frozen=True, slots=True)
class SlotState:
    """Everything that a pool knows of a slot.

    `local`: a claim of this process has it; `ending`: ended, not yet seen free.
    """

    slot: int
    mode: Sharing | None
    sharers: int
    ending: int
    local: bool
    lent: bool
    quarantine: str
    holders: tuple[str, ...]


class LeaseHome(Protocol):
    """What a lease needs of its pool; `number` identifies the lease and is never used twice."""

    def _release(self, number: int) -> None: ...

    def _end(self, number: int) -> None: ...

    def _phase(self, number: int) -> Phase: ...

    def _abandon(self, number: int) -> None:
        """Record that a lease was dropped; the garbage collector calls it, in any thread and at any point."""
        ...


class GpuLease:
    """A claim's lease of one device, whole or as a sharer, until `release()`.

    ``async with`` and ``with`` release it at the end of the block, error or not.

    A lease that is dropped without release is released by the garbage collector with a ResourceWarning, but late or
    never.
    """

    __slots__ = ("__weakref__", "_number", "_pool", "device", "slot")

    def __init__(self, pool: LeaseHome, number: int, slot: int, device: Device) -> None:
        self._pool: LeaseHome | None = pool
        self._number = number
        self.slot: Final = slot
        self.device: Final = device

    @property
    def vendor(self) -> str:
        return self.device.vendor

    @property
    def index(self) -> int:
        """The device's own index, not the slot. Indices may have gaps, and two vendors may both use one."""
        return self.device.index

    @property
    def uuid(self) -> str:
        return self.device.uuid

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def released(self) -> bool:
        return self._pool is None

    def release(self) -> None:
        """Free the slot, or hand it to the oldest waiter. Calling it again does nothing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._release(self._number)

    def __enter__(self) -> GpuLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    async def __aenter__(self) -> GpuLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool._abandon(self._number)
            warnings.warn(f"{self!r} was dropped without release()", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<GpuLease slot {self.slot} {self.vendor} {self.index} {self.uuid}{' released' * self.released}>"


class PoolLease:
    """A placement's lease on its slots.

    It is freed in two steps: its processes are over, then its devices are seen free.

    Dropping it frees nothing, because a device whose memory was not checked must not be used again.
    """

    __slots__ = ("_number", "_pool", "holder", "mode", "slots")

    def __init__(self, pool: LeaseHome, number: int, slots: tuple[int, ...], mode: Sharing, holder: str) -> None:
        self._pool = pool
        self._number = number
        self.slots: Final = slots
        self.mode: Final[Sharing] = mode
        self.holder: Final = holder

    @property
    def phase(self) -> Phase:
        return self._pool._phase(self._number)

    def ended(self) -> None:
        """Record that the attempt's processes are gone; the slots stay busy. A second call does nothing.

        After release it raises PoolCorrupted.
        """
        if self.phase != "ended":
            self._pool._end(self._number)

    def release(self) -> None:
        """Free the slots: the devices are seen free, or nothing ever ran on them. A second call does nothing."""
        if self.phase != "released":
            self._pool._release(self._number)

    def __repr__(self) -> str:
        return f"<PoolLease {self.holder} slots {list(self.slots)} {self.mode} {self.phase}>"
