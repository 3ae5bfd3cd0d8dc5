"""What a pool hands out: leases, what it says of its slots, and how it refuses. The pool itself is in `pool`."""

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
    "not-frozen",  # wanted by a guest, and not one placement's alone, or with a guest
    "leased",  # held by a local claimer, or wanted alone while somebody holds it
    "mode-mixed",  # shared in another mode until fully released
    "sharers-full",
    "mode-not-here",  # its worker keeps this slot for other modes
]
Phase = Literal["held", "ended", "released"]

#: Every legal step of a placement's lease; `ended` is the wait for the device's memory to come back.
PHASES: Final[dict[Phase, frozenset[Phase]]] = {
    "held": frozenset({"ended", "released"}),
    "ended": frozenset({"released"}),
    "released": frozenset(),
}


class PoolCorrupted(RuntimeError):
    """The pool's two accounts of itself differ: a state that cannot be. Nothing it says can be relied on."""


class PoolFull(MoorageError):
    """More than `WAITERS_MAX` claims wait already."""

    def __init__(self) -> None:
        super().__init__(
            problem("queue-full", f"{WAITERS_MAX} claims wait for a GPU already", allowed=f"{WAITERS_MAX} waiting")
        )


class SlotsRefused(MoorageError):
    """A placement cannot have these slots now; nothing was taken. `slots` are those that stand in the way."""

    def __init__(self, reason: RefusalReason, slots: tuple[int, ...]) -> None:
        self.reason: Final[RefusalReason] = reason
        self.slots: Final = slots
        which = ", ".join(map(str, slots)) or "none"
        super().__init__(problem("failed-precondition", f"the pool refuses the slots: {reason} ({which})", found=which))


@dataclass(frozen=True, slots=True)
class GpuLeaseEntry:
    """A slot as the load frame tells it: `name` is the device's name, `index` its own index."""

    vendor: str
    name: str
    index: int
    leased: bool


@dataclass(frozen=True, slots=True)
class SlotState:
    """All that a pool knows of a slot; `local`: held by a claim of this process, `ending`: ended, not yet seen free."""

    slot: int
    mode: Sharing | None
    sharers: int
    ending: int
    local: bool
    lent: bool
    quarantine: str
    holders: tuple[str, ...]


class LeaseHome(Protocol):
    """What a lease needs of its pool; `number` is the lease's own, never used twice."""

    def _release(self, number: int) -> None: ...

    def _end(self, number: int) -> None: ...

    def _phase(self, number: int) -> Phase: ...

    def _abandon(self, number: int) -> None:
        """Called by the collector, in any thread and in the middle of anything."""
        ...


class GpuLease:
    """One whole device, until `release()`; ``async with`` and ``with`` release it on the way out, error or not.

    A lease that is dropped unreleased is released by the collector with a ResourceWarning: late, and only luck.
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
        """The device's own index, which may be sparse and which two vendors may both use; not the slot."""
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
    """A placement's hold on its slots, freed in two steps: its processes are over, then its devices are seen free.

    Dropping it frees nothing: a device whose memory nobody looked at must not go round.
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
        """The member's processes are gone; the slots stay busy. Again: nothing. After release: raises PoolCorrupted."""
        if self.phase != "ended":
            self._pool._end(self._number)

    def release(self) -> None:
        """The devices are seen free (or nothing ever ran on them). Calling it again does nothing."""
        if self.phase != "released":
            self._pool._release(self._number)

    def __repr__(self) -> str:
        return f"<PoolLease {self.holder} slots {list(self.slots)} {self.mode} {self.phase}>"
