"""Ten thousand random interleavings of a pool's callers, cancelled at every point; each seed is a whole case."""

from __future__ import annotations

import asyncio
import random
import types
from collections.abc import Callable, Generator
from typing import Final

import pytest

from moorage.schemas.frames import Device
from moorage.schemas.gpu import Sharing
from moorage.worker.devices.pool import GpuLease, GpuPool, PoolLease, SlotsRefused, SlotState
from tests.turns import turns

INTERLEAVINGS: Final = 10_000
TOGETHER: Final = 500
STEPS: Final = 24
MODES: Final[tuple[Sharing, ...]] = ("exclusive", "mps", "time-slice")


@types.coroutine
def one_step() -> Generator[None, None, None]:
    """Let everything that is ready run once."""
    yield


class Case:
    """One interleaving: callers that arrive, leave and are cancelled, and a plain model of who may hold what."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        slots = self.random.randint(1, 4)
        self.pool = GpuPool(
            [Device(2 * slot, "nvidia", "card", f"GPU-{slot}") for slot in range(slots)],
            sharers_max={"mps": 2, "time-slice": 2},
            on_change=lambda: self.pool.validate(),
        )
        self.claims: list[asyncio.Task[None]] = []
        self.arrived: list[int] = []  # parked claims by number, in order of arrival
        self.cancelled: set[int] = set()
        self.granted: list[int] = []  # parked claims in the order in which they ran with a lease
        self.leases: list[GpuLease] = []
        self.modes: dict[GpuLease, Sharing] = {}
        self.placements: list[PoolLease] = []
        self.steps: list[Callable[[], None]] = [
            self.arrive,
            self.arrive,
            self.cancel,
            self.release,
            self.release,
            self.try_claim,
            self.place,
            self.end,
            self.quarantine,
            self.unquarantine,
        ]

    def arrive(self) -> None:
        number, slots = len(self.claims), None
        if self.random.random() < 0.5:  # a borrower's claim: of some slots, whole or shared
            slots = self.random.sample(range(self.pool.capacity()), self.random.randint(1, self.pool.capacity()))
        mode = self.random.choice(MODES) if slots else "exclusive"
        self.claims.append(asyncio.create_task(self.caller(number, slots, mode)))

    def would_fit(self, state: SlotState, mode: str) -> bool:
        shared = state.mode == mode != "exclusive" and state.sharers < 2
        return not state.quarantine and (shared or not state.sharers)

    async def caller(self, number: int, slots: list[int] | None, mode: Sharing) -> None:
        parked = self.pool.pending_claimers() > 0 or not any(
            self.would_fit(state, mode) for state in self.pool.slot_states() if slots is None or state.slot in slots
        )
        if parked:
            self.arrived.append(number)
        lease = await self.pool.claim(slots, mode)
        assert lease is not None
        assert not lease.released
        assert slots is None or lease.slot in slots
        if parked:
            self.granted.append(number)
        self.leases.append(lease)
        self.modes[lease] = mode

    def cancel(self) -> None:
        alive = [number for number, task in enumerate(self.claims) if not task.done()]
        if alive:
            number = self.random.choice(alive)
            self.claims[number].cancel()
            self.cancelled.add(number)

    def release(self) -> None:
        if self.leases:
            self.leases.pop(self.random.randrange(len(self.leases))).release()

    def try_claim(self) -> None:
        waiting = self.pool.pending_claimers()
        lease = self.pool.try_claim()
        assert self.pool.pending_claimers() == waiting
        if lease is not None:
            assert waiting == 0
            self.leases.append(lease)
            self.modes[lease] = "exclusive"

    def place(self) -> None:
        count = self.random.randint(1, self.pool.capacity())
        slots = self.random.sample(range(self.pool.capacity()), count)
        waiting, before = self.pool.pending_claimers(), self.pool.slot_states()
        reason = ""
        try:
            self.placements.append(self.pool.try_claim_slots(slots, self.random.choice(MODES), "t/j/0"))
        except SlotsRefused as refused:
            reason = refused.reason
        assert (reason == "local-claimer-waits") == bool(waiting)
        assert not reason or self.pool.slot_states() == before

    def end(self) -> None:
        if self.placements:
            lease = self.random.choice(self.placements)
            if lease.phase == "held" and self.random.random() < 0.5:
                lease.ended()
            else:
                self.placements.remove(lease)
                lease.release()

    def quarantine(self) -> None:
        self.pool.quarantine(self.random.randrange(self.pool.capacity()), "drawn")

    def unquarantine(self) -> None:
        self.pool.unquarantine(self.random.randrange(self.pool.capacity()))

    async def play(self) -> None:
        for _ in range(STEPS):
            self.random.choice(self.steps)()
            self.check()
            if self.random.random() < 0.5:
                await one_step()
                self.check()
        await self.drain()

    async def drain(self) -> None:
        """Give everything back: each claim that was not cancelled must be served, and nothing may be left."""
        for slot in range(self.pool.capacity()):
            self.pool.unquarantine(slot)
        while self.placements:
            self.placements.pop().release()
        while any(not task.done() for task in self.claims):
            held = len(self.leases)
            self.release()
            await one_step()
            self.check()
            assert held or self.leases or self.pool.pending_claimers() == 0 or any(t.cancelling() for t in self.claims)
        while self.leases:
            self.leases.pop().release()
        for task in self.claims:
            if not task.cancelled():
                task.result()
        assert self.granted == [number for number in self.arrived if number in self.granted]
        assert not [number for number in self.arrived if number not in self.granted and number not in self.cancelled]
        assert all(not state.sharers for state in self.pool.slot_states())
        assert self.pool.pending_claimers() == 0
        self.check()

    def check(self) -> None:
        self.pool.validate()
        held = [(lease.slot, self.modes[lease]) for lease in self.leases]
        held += [(slot, lease.mode) for lease in self.placements for slot in lease.slots]
        for slot in range(self.pool.capacity()):
            modes = [mode for of, mode in held if of == slot]
            assert len(set(modes)) <= 1, "two modes on one device"
            assert len(modes) <= (1 if "exclusive" in modes else 2), "more holders than the mode allows"


@pytest.mark.parametrize("first", turns(range(0, INTERLEAVINGS, TOGETHER), often=1, more=9))
def test_no_interleaving_breaks_the_pool(first: int) -> None:
    async def play_all() -> None:
        for seed in range(first, first + TOGETHER):
            try:
                await Case(seed).play()
            except BaseException as failure:
                failure.add_note(f"seed {seed}")
                raise

    asyncio.run(play_all())
