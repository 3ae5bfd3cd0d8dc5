"""The pool, fact by fact of the source systems (37 to 42, 44, 46, and 25 to 27 for what placements share)."""

from __future__ import annotations

import asyncio
import gc
import threading
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from moorage.schemas.frames import Device
from moorage.schemas.gpu import Sharing
from moorage.worker.devices import pool as pool_module
from moorage.worker.devices.pool import (
    GpuLease,
    GpuLeaseEntry,
    GpuPool,
    PoolCorrupted,
    PoolFull,
    PoolLease,
    SlotsRefused,
)

T = TypeVar("T")


def devices(*indices: int, vendor: str = "nvidia") -> list[Device]:
    return [Device(index, vendor, f"{vendor} card", f"GPU-{vendor}-{index}") for index in indices]


def pool_of(slots: int, **more: Any) -> GpuPool:
    return GpuPool(devices(*range(slots)), **more)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


@types.coroutine
def one_step() -> Generator[None, None, None]:
    """Let everything that is ready run once."""
    yield


def claimed(pool: GpuPool) -> GpuLease:
    lease = pool.try_claim()
    assert lease is not None
    pool.validate()
    return lease


def refusal(pool: GpuPool, slots: list[int], mode: Any = "exclusive") -> tuple[str, tuple[int, ...]]:
    before = pool.slot_states(), pool.generation
    with pytest.raises(SlotsRefused) as refused:
        pool.try_claim_slots(slots, mode, "t/j/0")
    assert (pool.slot_states(), pool.generation) == before
    assert refused.value.code == "failed-precondition"
    pool.validate()
    return refused.value.reason, refused.value.slots


# -------------------------------------------------------------------------------------- claims of this process


def test_fact_37_an_empty_pool_answers_none_at_once() -> None:
    pool = GpuPool([])
    assert pool.try_claim() is None
    assert run(pool.claim()) is None
    assert (pool.capacity(), pool.snapshot_leases(), pool.pending_claimers()) == (0, [], 0)
    pool.validate()


async def test_fact_38_the_freed_device_goes_to_the_oldest_waiter() -> None:
    pool = pool_of(2)
    first, second = claimed(pool), claimed(pool)
    waiting = [asyncio.create_task(pool.claim()) for _ in range(3)]
    await one_step()
    assert not any(task.done() for task in waiting)
    second.release()
    oldest = await waiting[0]
    assert oldest is not None
    assert oldest.slot == 1
    first.release()
    assert (await waiting[1] or oldest).slot == 0
    assert not waiting[2].done()
    pool.validate()
    oldest.release()
    third = await waiting[2]
    assert third is not None
    third.release()
    (waiting[1].result() or third).release()
    assert [state.sharers for state in pool.slot_states()] == [0, 0]


def test_claims_take_the_first_free_slot_in_slot_order() -> None:
    pool = pool_of(3)
    leases = [claimed(pool) for _ in range(3)]
    leases[2].release()
    leases[0].release()
    again = [claimed(pool), claimed(pool)]
    assert [lease.slot for lease in again] == [0, 2]
    for lease in (leases[1], *again):
        lease.release()


async def test_fact_39_try_claim_never_overtakes_a_parked_waiter() -> None:
    pool = pool_of(1)
    lease = claimed(pool)
    waiting = asyncio.create_task(pool.claim())
    await one_step()
    lease.release()
    assert not waiting.done()  # granted, and has not run yet
    assert pool.try_claim() is None
    pool.validate()
    granted = await waiting
    assert granted is not None
    assert pool.try_claim() is None
    granted.release()
    claimed(pool).release()


async def test_fact_40_pending_claimers_counts_parked_claims() -> None:
    pool = pool_of(1)
    assert pool.pending_claimers() == 0
    lease = await pool.claim()
    assert lease is not None
    assert pool.pending_claimers() == 0
    waiting = [asyncio.create_task(pool.claim()) for _ in range(2)]
    await one_step()
    assert pool.pending_claimers() == 2
    assert pool.try_claim() is None
    assert pool.pending_claimers() == 2
    lease.release()
    assert pool.pending_claimers() == 1
    waiting[1].cancel()
    await asyncio.wait([waiting[1]])
    assert pool.pending_claimers() == 0
    (await waiting[0] or lease).release()
    pool.validate()


def test_fact_41_sparse_indices_and_two_vendors_keep_their_identity() -> None:
    pool = GpuPool([*devices(0, 2, 5), *devices(0, vendor="intel")])
    leases = [claimed(pool) for _ in range(4)]
    assert [(lease.vendor, lease.index, lease.slot) for lease in leases] == [
        ("nvidia", 0, 0),
        ("nvidia", 2, 1),
        ("nvidia", 5, 2),
        ("intel", 0, 3),
    ]
    assert [lease.uuid for lease in leases][2:] == ["GPU-nvidia-5", "GPU-intel-0"]
    assert leases[3].name == "intel card"
    for lease in leases:
        lease.release()


def test_fact_42_the_snapshot_is_in_hello_order() -> None:
    pool = GpuPool([*devices(5, 2), *devices(0, vendor="amd")])
    lease = pool.try_claim_slots([1], "exclusive", "t/j/0")
    assert pool.snapshot_leases() == [
        GpuLeaseEntry("nvidia", "nvidia card", 5, False),
        GpuLeaseEntry("nvidia", "nvidia card", 2, True),
        GpuLeaseEntry("amd", "amd card", 0, False),
    ]
    lease.release()
    assert [entry.leased for entry in pool.snapshot_leases()] == [False] * 3


def test_fact_44_a_pool_that_disagrees_refuses_and_takes_nothing() -> None:
    pool = pool_of(3)
    lease = claimed(pool)
    assert refusal(pool, [2, 1, 0]) == ("leased", (0,))
    lease.release()
    pool.try_claim_slots([2, 1, 0], "exclusive", "t/j/0").release()


def test_fact_46_a_failed_holder_releases_its_lease() -> None:
    async def scene() -> None:
        pool = pool_of(1)
        with pytest.raises(ZeroDivisionError):
            async with await pool.claim() or claimed(pool):
                raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError), claimed(pool) as lease:
            raise ZeroDivisionError
        assert lease.released
        holder = asyncio.create_task(hold(pool))
        await one_step()
        assert pool.try_claim() is None
        holder.cancel()
        await asyncio.wait([holder])
        claimed(pool).release()

    async def hold(pool: GpuPool) -> None:
        async with claimed(pool):
            await asyncio.get_running_loop().create_future()

    run(scene())


def test_release_is_idempotent_and_frees_once() -> None:
    pool = pool_of(1)
    lease = claimed(pool)
    lease.release()
    again = claimed(pool)
    lease.release()
    assert pool.try_claim() is None
    again.release()
    pool.validate()


def test_a_forgotten_lease_is_released_with_a_warning() -> None:
    pool = pool_of(1)
    held = [claimed(pool)]
    with pytest.warns(ResourceWarning, match="dropped without release"):
        held.clear()
    claimed(pool).release()
    pool.validate()


async def clear_in(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


async def test_a_lease_forgotten_in_another_thread_wakes_the_waiter() -> None:
    pool = pool_of(1)
    held = [claimed(pool)]
    waiting = asyncio.create_task(pool.claim())
    await one_step()
    forgetful = threading.Thread(target=held.clear)
    with pytest.warns(ResourceWarning, match="dropped without release"):
        await clear_in(forgetful)
    lease = await waiting
    assert lease is not None
    lease.release()
    pool.validate()


async def test_a_cancelled_claim_hands_on_what_it_was_granted() -> None:
    pool = pool_of(1)
    lease = claimed(pool)
    first, second = (asyncio.create_task(pool.claim()) for _ in range(2))
    await one_step()
    lease.release()
    first.cancel()  # after the grant, before it runs
    assert pool.try_claim() is None
    await asyncio.wait([first])
    assert first.cancelled()
    granted = await second
    assert granted is not None
    granted.release()
    pool.validate()
    assert pool.snapshot_leases()[0].leased is False


async def test_a_grant_skips_a_claim_that_was_cancelled_and_has_not_run_since() -> None:
    pool = pool_of(1)
    lease = claimed(pool)
    first, second = (asyncio.create_task(pool.claim()) for _ in range(2))
    await one_step()
    first.cancel()
    assert pool.pending_claimers() == 1
    lease.release()
    assert pool.pending_claimers() == 0
    granted = await second
    assert granted is not None
    granted.release()
    assert first.cancelled()
    pool.validate()


def test_waiters_of_a_loop_that_is_gone_stand_in_nobodys_way() -> None:
    pool = pool_of(1)
    lease = claimed(pool)
    loop = asyncio.new_event_loop()
    waiting = pool.claim()
    task = loop.create_task(waiting)
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert pool.pending_claimers() == 1
    loop.close()
    assert pool.pending_claimers() == 0
    lease.release()
    claimed(pool).release()
    waiting.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    pool.validate()


def test_waiting_claims_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "WAITERS_MAX", 2)

    async def scene() -> None:
        pool = pool_of(1)
        with claimed(pool):
            waiting = [asyncio.create_task(pool.claim()) for _ in range(2)]
            await one_step()
            with pytest.raises(PoolFull) as full:
                await pool.claim()
            assert full.value.code == "queue-full"
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)

    run(scene())


# ------------------------------------------------------------------------------------------------ placements


def test_a_placement_gets_exactly_its_slots_and_frees_them_in_two_steps() -> None:
    pool = pool_of(4)
    lease = pool.try_claim_slots([3, 1], "exclusive", "t/j/0")
    assert (lease.slots, lease.mode, lease.holder, lease.phase) == ((3, 1), "exclusive", "t/j/0", "held")
    assert [state.holders for state in pool.slot_states()] == [(), ("t/j/0",), (), ("t/j/0",)]
    lease.ended()
    lease.ended()
    assert "ended" in repr(lease)
    assert refusal(pool, [1]) == ("leased", (1,))
    assert [state.ending for state in pool.slot_states()] == [0, 1, 0, 1]
    lease.release()
    lease.release()
    assert [state.sharers for state in pool.slot_states()] == [0] * 4
    with pytest.raises(PoolCorrupted, match="cannot become ended"):
        lease.ended()
    assert "released" in repr(lease)


def test_a_placement_that_never_ran_is_released_in_one_step() -> None:
    pool = pool_of(1)
    pool.try_claim_slots([0], "exclusive", "t/j/0").release()
    claimed(pool).release()


def test_dropping_a_placements_lease_frees_nothing() -> None:
    pool = pool_of(1)
    lease: PoolLease | None = pool.try_claim_slots([0], "exclusive", "t/j/0")
    del lease
    gc.collect()
    assert refusal(pool, [0]) == ("leased", (0,))


def test_fact_25_exclusive_never_displaces_a_sharer() -> None:
    pool = pool_of(2)
    pool.try_claim_slots([0], "mps", "t/j/0")
    assert refusal(pool, [1, 0], "exclusive") == ("leased", (0,))
    local = claimed(pool)
    assert local.slot == 1
    assert pool.try_claim() is None
    local.release()


@pytest.mark.parametrize(("mode", "fit"), [("mps", 8), ("time-slice", 4)])
def test_fact_26_so_many_sharers_fit_and_one_more_does_not(mode: Any, fit: int) -> None:
    pool = pool_of(1)
    leases = [pool.try_claim_slots([0], mode, f"t/j/{number}") for number in range(fit)]
    assert pool.slot_states()[0].sharers == fit
    assert refusal(pool, [0], mode) == ("sharers-full", (0,))
    leases.pop().release()
    pool.try_claim_slots([0], mode, "t/other/0")


def test_a_worker_may_offer_fewer_sharers_and_never_more() -> None:
    pool = pool_of(2, sharers_max={"mps": 1, "time-slice": 99})
    pool.try_claim_slots([0], "mps", "t/j/0")
    assert refusal(pool, [0], "mps") == ("sharers-full", (0,))
    for number in range(4):
        pool.try_claim_slots([1], "time-slice", f"t/k/{number}")
    assert refusal(pool, [1], "time-slice") == ("sharers-full", (1,))
    assert refusal(pool_of(1, sharers_max={"mps": 0}), [0], "mps") == ("sharers-full", (0,))


@pytest.mark.parametrize(("held", "other"), [("mps", "time-slice"), ("time-slice", "mps")])
def test_fact_27_modes_do_not_mix_until_fully_released(held: Any, other: Any) -> None:
    pool = pool_of(1)
    first = pool.try_claim_slots([0], held, "t/j/0")
    second = pool.try_claim_slots([0], held, "t/j/1")
    first.ended()
    first.release()
    assert refusal(pool, [0], other) == ("mode-mixed", (0,))
    assert refusal(pool, [0], "exclusive") == ("leased", (0,))
    second.ended()
    assert refusal(pool, [0], other) == ("mode-mixed", (0,))
    second.release()
    pool.try_claim_slots([0], other, "t/j/2")


async def test_a_placement_never_waits_and_comes_after_local_claims() -> None:
    pool = pool_of(2, lent=[1])
    placed = pool.try_claim_slots([1], "time-slice", "t/j/0")
    local = claimed(pool)
    waiting = asyncio.create_task(pool.claim())
    await one_step()
    assert refusal(pool, [1], "time-slice") == ("local-claimer-waits", (1,))
    assert pool.try_claim_slots([], "exclusive", "t/cpu/0").slots == ()
    placed.release()
    granted = await waiting
    assert granted is not None
    assert granted.slot == 1
    granted.release()
    local.release()
    pool.try_claim_slots([1], "exclusive", "t/j/1").release()


async def test_a_claim_of_some_slots_waits_for_those_and_is_overtaken_by_nobody() -> None:
    pool = pool_of(3)
    first, second = pool.try_claim_slots([0], "exclusive", "t/j/0"), claimed(pool)
    picky = asyncio.create_task(pool.claim([0, 1]))
    behind = asyncio.create_task(pool.claim())
    await one_step()
    assert (pool.pending_claimers(), pool.try_claim()) == (2, None)  # slot 2 is free, and the first in line waits
    assert refusal(pool, [2]) == ("local-claimer-waits", (2,))
    second.release()
    held = [await picky, await behind]
    assert [lease and lease.slot for lease in held] == [1, 2]
    first.release()
    picky, behind = asyncio.create_task(pool.claim([1])), asyncio.create_task(pool.claim([0]))
    await one_step()
    assert not behind.done()
    picky.cancel()  # who was in the way goes, and what is free fits the next
    held.append(await behind)
    assert [lease and lease.slot for lease in held] == [1, 2, 0]
    for wrong in ([], [3], [-1]):
        with pytest.raises(ValueError, match="slots must be"):
            await pool.claim(wrong)
    for lease in held:
        assert lease is not None
        lease.release()


async def test_shared_claims_stand_in_the_same_line_within_their_caps() -> None:
    pool = pool_of(2, sharers_max={"mps": 2, "time-slice": 0})
    placed = pool.try_claim_slots([0], "mps", "t/j/0")
    share = await pool.claim(mode="mps")
    assert share is not None
    assert share.slot == 0  # with the sharers that are there, so that whole devices stay free
    assert pool.busy_slots() == [0]
    whole = claimed(pool)
    next_share, behind = asyncio.create_task(pool.claim([0], "mps")), asyncio.create_task(pool.claim([0]))
    await one_step()
    placed.ended()
    await one_step()
    assert not next_share.done()
    placed.release()
    second = await next_share
    assert second is not None
    assert (second.slot, pool.slot_states()[0].sharers, behind.done()) == (0, 2, False)
    share.release()
    assert not behind.done()
    second.release()
    last = await behind
    assert last is not None
    assert last.slot == 0
    with pytest.raises(ValueError, match="no device of this pool is shared by time-slice"):
        await pool.claim(mode="time-slice")  # it would wait for ever, and refuse every placement meanwhile
    assert not pool.pending_claimers()
    whole.release()
    last.release()


def test_slots_that_cannot_be_are_refused() -> None:
    pool = pool_of(2)
    assert refusal(pool, [0, 2, -1]) == ("unknown-slot", (2, -1))
    assert refusal(pool, [0, 1, 0]) == ("duplicate-slot", (0,))


def test_a_service_keeps_slots_for_itself() -> None:
    pool = pool_of(3, lent=[2])
    assert refusal(pool, [2, 0, 1]) == ("not-lent", (0, 1))
    pool.try_claim_slots([2], "exclusive", "t/j/0").release()
    with pytest.raises(ValueError, match="lent slots"):
        pool_of(3, lent=[3])


async def test_a_quarantined_slot_goes_to_nobody_until_an_operator_speaks() -> None:
    pool = pool_of(1)
    placed = pool.try_claim_slots([0], "exclusive", "t/j/0")
    placed.ended()
    pool.quarantine(0, "memory did not come back")
    placed.release()
    pool.validate()
    assert pool.try_claim() is None
    assert refusal(pool, [0]) == ("quarantined", (0,))
    assert pool.slot_states()[0].quarantine == "memory did not come back"
    assert pool.busy_slots() == [0]
    waiting = asyncio.create_task(pool.claim())
    await one_step()
    assert not waiting.done()
    pool.unquarantine(0)
    pool.unquarantine(0)
    lease = await waiting
    assert lease is not None
    assert pool.busy_slots() == [0]
    lease.release()
    assert pool.busy_slots() == []
    pool.validate()


def test_a_slot_can_be_quarantined_while_it_is_free_or_held() -> None:
    pool = pool_of(2)
    pool.quarantine(0, "ecc")
    pool.quarantine(0, "still ecc")
    lease = claimed(pool)
    assert lease.slot == 1
    pool.quarantine(1, "x" * 1000)
    pool.unquarantine(1)
    pool.validate()
    assert pool.try_claim() is None
    lease.release()
    pool.unquarantine(0)
    claimed(pool).release()
    with pytest.raises(IndexError):
        pool.quarantine(2, "no such slot")
    with pytest.raises(ValueError, match="reason"):
        pool.quarantine(0, "")


def test_busy_slots_are_local_or_quarantined_ones_alone() -> None:
    pool = pool_of(4)
    pool.try_claim_slots([0], "exclusive", "t/j/0")
    with claimed(pool) as local:
        pool.quarantine(3, "hot")
        assert pool.busy_slots() == [local.slot, 3] == [1, 3]


# ------------------------------------------------------------------------------------------------ the pool itself


async def test_every_change_counts_and_is_told() -> None:
    told: list[int] = []

    def on_change() -> None:
        pool.validate()
        told.append(pool.generation)

    pool = pool_of(2, on_change=on_change)
    local = claimed(pool)
    placed = pool.try_claim_slots([1], "exclusive", "t/j/0")
    waiting = asyncio.create_task(pool.claim())
    await one_step()
    cancelled = asyncio.create_task(pool.claim())
    await one_step()
    cancelled.cancel()
    await asyncio.wait([cancelled])
    local.release()
    (await waiting or local).release()
    placed.ended()
    placed.release()
    pool.quarantine(0, "hot")
    pool.unquarantine(0)
    assert told == list(range(1, 12))


@pytest.mark.parametrize(
    "same", [[*devices(0), *devices(0)], [Device(1, "acme", "a", ""), Device(1, "acme", "b", "")], devices(*range(65))]
)
def test_devices_that_cannot_be_a_pool_are_refused(same: list[Device]) -> None:
    with pytest.raises(ValueError, match=r"same vendor and uuid|at most 64"):
        GpuPool(same)


def test_drift_between_the_two_accounts_is_never_passed_over() -> None:
    pool = pool_of(1)
    with claimed(pool):
        pool._table.free = 1
        with pytest.raises(PoolCorrupted, match="none is"):
            pool.try_claim()
        with pytest.raises(PoolCorrupted, match="the count says 1"):
            pool.validate()
        pool._table.free = 0
    lease = claimed(pool)
    pool._table.slots[0].holders.clear()
    with pytest.raises(PoolCorrupted, match="does not hold"):
        lease.release()


# ------------------------------------------------------------------------------------- devices kept for some modes


def kept_for(*words: str) -> GpuPool:
    return GpuPool([replace(device, modes=kept.split()) for device, kept in zip(devices(0, 1, 2), words, strict=True)])


def test_a_device_is_held_in_the_modes_that_it_is_kept_for_alone() -> None:
    pool = kept_for("mps", "exclusive", "")
    assert [device.modes for device in pool.devices] == [["mps"], ["exclusive"], []]
    assert refusal(pool, [0]) == ("mode-not-here", (0,))
    assert refusal(pool, [1, 2], "mps") == ("mode-not-here", (1,))
    pool.try_claim_slots([0, 2], "mps", "t/j/0").release()
    pool.try_claim_slots([1, 2], "exclusive", "t/j/0").release()
    held = pool.take_again([0], "exclusive", "t/j/1")
    assert held.phase == "held", "what runs keeps its device"
    held.release()


async def test_claims_of_this_process_go_by_the_modes_too() -> None:
    pool = kept_for("mps", "exclusive", "mps")
    held = claimed(pool)
    assert held.slot == 1
    assert pool.try_claim() is None
    sharers = [await pool.claim(mode="mps") for _ in range(9)]
    assert [lease.slot for lease in sharers if lease] == [0] * 8 + [2]
    kept: list[tuple[set[int] | None, Sharing]] = [({0, 2}, "exclusive"), ({1}, "mps"), (None, "time-slice")]
    for slots, mode in kept:
        with pytest.raises(ValueError, match="or none of these slots"):
            await pool.claim(slots, mode)
    held.release()
    for lease in sharers:
        assert lease is not None
        lease.release()
    pool.validate()


async def test_a_device_kept_for_another_mode_has_no_more_sharers() -> None:
    pool = kept_for("exclusive", "mps", "exclusive")
    held = pool.take_again([0], "mps", "t/j/0")
    lease = await pool.claim(mode="mps")
    assert lease is not None
    assert lease.slot == 1
    assert refusal(pool, [0], "mps") == ("mode-not-here", (0,))
    lease.release()
    held.release()
