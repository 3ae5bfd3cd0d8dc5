"""LeaseArbiter: helpers on spare GPUs that never get into anybody's way."""

from __future__ import annotations

import asyncio
import random
import textwrap
from collections.abc import Callable, Collection
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.schemas.errors import Refused
from moorage.schemas.frames import Device
from moorage.worker.devices.pool import GpuPool
from moorage.worker.devices.pool_lease import GpuLease
from moorage.worker.lend import arbiter as arbiter_module
from moorage.worker.lend.arbiter import HELPER_FAILURES_MAX, PIECES_WAITING_MAX, ROUND_S, LeaseArbiter, Pieces
from tests.waiting import until


class WatchedPool(GpuPool):
    """Counts what is asked of it."""

    def __init__(self, count: int, on_change: Callable[[], None] | None = None) -> None:
        devices = [Device(index, "nvidia", "H100", f"GPU-{index}") for index in range(count)]
        super().__init__(devices, on_change=on_change)
        self.tried = 0

    def try_claim(self, slots: Collection[int] | None = None) -> GpuLease | None:
        self.tried += 1
        return super().try_claim(slots)

    def held(self) -> list[int]:
        return [state.slot for state in self.slot_states() if state.sharers]

    def all_free(self) -> bool:
        self.validate()
        return not self.held() and not self.pending_claimers()


class Clock:
    """The arbiter's wait, by hand: a round begins when the test says so, or when the arbiter is woken."""

    def __init__(self) -> None:
        self.rounds = 0
        self.periods: set[float] = set()
        self._timer = asyncio.Event()

    async def __call__(self, woken: asyncio.Event, seconds: float) -> None:
        self.rounds += 1
        self.periods.add(seconds)
        self._timer.clear()
        either = {asyncio.ensure_future(woken.wait()), asyncio.ensure_future(self._timer.wait())}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in either:
                each.cancel()

    async def tick(self) -> None:
        """The period is over; returns when the round after it is done."""
        before = self.rounds
        self._timer.set()
        await until(lambda: self.rounds > before)


class Gate:
    """A handler that records who does what, and holds each piece until it is let go."""

    def __init__(self) -> None:
        self.begun: list[tuple[Any, int]] = []
        self.doing: dict[Any, asyncio.Future[None]] = {}

    async def __call__(self, piece: Any, lease: GpuLease) -> None:
        assert not lease.released
        self.begun.append((piece, lease.slot))
        self.doing[piece] = asyncio.get_running_loop().create_future()
        try:
            await self.doing[piece]
        finally:
            del self.doing[piece]

    def let_go(self, piece: Any, error: Exception | None = None) -> None:
        if error is None:
            self.doing[piece].set_result(None)
        else:
            self.doing[piece].set_exception(error)

    def slots(self) -> dict[Any, int]:
        return dict(self.begun)


async def filled(handle: Callable[[Any, GpuLease], Any], *pieces: Any, size: int = 0) -> Pieces[Any]:
    work: Pieces[Any] = Pieces(handle, size=size, waiting_max=max(1, len(pieces)))
    for piece in pieces:
        await work.put(piece)
    work.close()
    return work


# ------------------------------------------------------------------------------------------- the first GPUs


async def test_the_smallest_work_gets_the_first_gpu() -> None:
    pool, gate = WatchedPool(3), Gate()
    works = [await filled(gate, f"size {size}", size=size) for size in (30, 10, 20)]
    async with LeaseArbiter(pool, works, wait=Clock()):
        await until(lambda: len(gate.begun) == 3)
        assert gate.begun == [("size 10", 0), ("size 20", 1), ("size 30", 2)]
        for piece in list(gate.doing):
            gate.let_go(piece)
    assert pool.all_free()


async def test_a_pool_without_gpus_refuses_the_job() -> None:
    work = await filled(Gate(), "a")
    with pytest.raises(Refused) as refused:
        async with LeaseArbiter(WatchedPool(0), [work]):
            raise AssertionError("unreachable")
    assert refused.value.code == "failed-precondition"


# ----------------------------------------------------------------------------------------------- helpers


async def test_a_round_starts_one_helper_while_something_waits() -> None:
    pool, gate, clock = WatchedPool(4), Gate(), Clock()
    work = await filled(gate, "a", "b", "c")
    async with LeaseArbiter(pool, [work], wait=clock) as arbiter:
        await until(lambda: len(gate.doing) == 2)
        assert arbiter.helpers == 1
        await clock.tick()
        await until(lambda: len(gate.doing) == 3)
        assert gate.slots() == {"a": 0, "b": 1, "c": 2}
        tried = pool.tried
        await clock.tick()  # nothing waits: the fourth GPU is left alone, nobody even asks for it
        assert (arbiter.helpers, pool.held(), pool.tried) == (2, [0, 1, 2], tried)
        for piece in "abc":
            gate.let_go(piece)
    assert clock.periods == {ROUND_S} == {0.2}
    assert (work.done, arbiter.helpers, arbiter.helpers_started, arbiter.helpers_failed) == (3, 0, 2, 0)
    assert pool.all_free()


async def test_fact_45_no_helper_while_a_claim_waits() -> None:
    pool, gate, clock = WatchedPool(2), Gate(), Clock()
    theirs = pool.try_claim()
    assert theirs is not None
    work = await filled(gate, "a", "b", "c", "d")
    async with LeaseArbiter(pool, [work], wait=clock) as arbiter:
        await until(lambda: gate.doing)
        waiter = asyncio.ensure_future(pool.claim())
        await until(lambda: pool.pending_claimers() == 1)
        tried = pool.tried
        for _ in range(3):
            await clock.tick()
        assert (pool.tried, arbiter.helpers) == (tried, 0)
        theirs.release()
        lease = await waiter  # the freed GPU is the waiter's, whoever is woken first
        assert lease is not None
        await clock.tick()
        assert (lease.slot, arbiter.helpers) == (0, 0)
        lease.release()
        await clock.tick()
        await until(lambda: arbiter.helpers == 1)
        for piece in "abcd":
            await until(lambda piece=piece: piece in gate.doing)
            gate.let_go(piece)
    assert pool.all_free()


async def test_a_helper_gives_its_gpu_back_when_nothing_waits() -> None:
    pool, gate = WatchedPool(2), Gate()
    work = await filled(gate, "a", "b")
    async with LeaseArbiter(pool, [work], wait=Clock()) as arbiter:
        await until(lambda: len(gate.doing) == 2)
        gate.let_go("b")
        await until(lambda: arbiter.helpers == 0)
        assert pool.held() == [0]
        gate.let_go("a")
    assert pool.all_free()


async def test_helpers_go_to_the_first_work_that_has_something_waiting() -> None:
    pool, gate, clock = WatchedPool(4), Gate(), Clock()
    first = await filled(gate, "first a", "first b", size=2)
    second = await filled(gate, "second a", "second b", size=1)
    async with LeaseArbiter(pool, [first, second], wait=clock):
        await until(lambda: len(gate.doing) == 3)
        assert gate.begun == [("second a", 0), ("first a", 1), ("first b", 2)]
        await clock.tick()
        await until(lambda: "second b" in gate.doing)
        for piece in list(gate.doing):
            gate.let_go(piece)


async def test_a_new_piece_wakes_the_arbiter() -> None:
    pool, gate, clock = WatchedPool(2), Gate(), Clock()
    work: Pieces[str] = Pieces(gate)
    async with LeaseArbiter(pool, [work], wait=clock):
        await work.put("a")
        await until(lambda: gate.doing)
        await work.put("b")
        await until(lambda: len(gate.doing) == 2)  # no tick of the clock was needed
        work.close()
        gate.let_go("a")
        gate.let_go("b")


@pytest.mark.parametrize("helpers_max", [0, 1])
async def test_helpers_are_bounded(helpers_max: int) -> None:
    pool, gate, clock = WatchedPool(4), Gate(), Clock()
    work = await filled(gate, *"abcd")
    async with LeaseArbiter(pool, [work], wait=clock, helpers_max=helpers_max) as arbiter:
        for _ in range(3):
            await clock.tick()
        assert arbiter.helpers == helpers_max
        for piece in "abcd":
            await until(lambda piece=piece: piece in gate.doing)
            gate.let_go(piece)


# ----------------------------------------------------------------------------------------------- failures


async def test_a_failed_helper_fails_no_job_and_its_piece_is_done_by_another() -> None:
    pool, gate, clock = WatchedPool(2), Gate(), Clock()
    work = await filled(gate, "a", "b", "c")
    async with LeaseArbiter(pool, [work], wait=clock) as arbiter:
        await until(lambda: len(gate.doing) == 2)
        gate.let_go("b", RuntimeError("the device fell over"))
        await until(lambda: arbiter.helpers == 0)
        assert pool.held() == [0]
        assert (arbiter.helpers_failed, arbiter.helpers_started) == (1, 1)  # the next one comes by the clock
        gate.let_go("a")
        await until(lambda: gate.begun[-1] == ("b", 0))  # at the head of the queue, by the own worker
        gate.let_go("b")
        await until(lambda: "c" in gate.doing)
        gate.let_go("c")
    assert work.done == 3
    assert pool.all_free()


async def test_a_work_whose_helpers_keep_failing_gets_no_more_of_them() -> None:
    pool, clock = WatchedPool(2), Clock()
    begun: list[int] = []
    own = asyncio.Event()

    async def handle(piece: int, lease: GpuLease) -> None:
        begun.append(lease.slot)
        if lease.slot == 1:
            raise RuntimeError("this device does not do")
        await own.wait()

    work = await filled(handle, 0, 1)
    async with LeaseArbiter(pool, [work], wait=clock) as arbiter:
        for _ in range(HELPER_FAILURES_MAX + 3):
            await clock.tick()
        assert arbiter.helpers_failed == arbiter.helpers_started == HELPER_FAILURES_MAX
        own.set()
    assert begun == [0] + [1] * HELPER_FAILURES_MAX + [0]
    assert work.done == 2
    assert pool.all_free()


async def test_a_helper_that_does_nothing_makes_no_loop_without_a_pause() -> None:
    class Idle:
        size = 1

        def waiting(self) -> int:
            return 1

        def on_waiting(self, wake: Callable[[], None]) -> None:
            pass

        async def run(self, lease: GpuLease) -> None:
            await over.wait()

        async def help(self, lease: GpuLease) -> None:
            return

    over, clock, pool = asyncio.Event(), Clock(), WatchedPool(2)
    async with LeaseArbiter(pool, [Idle()], wait=clock) as arbiter:
        for rounds in range(1, 4):
            await until(lambda rounds=rounds: (arbiter.helpers, arbiter.helpers_started) == (0, rounds))
            await clock.tick()
        over.set()
    assert pool.all_free()


async def test_an_own_workers_error_is_the_jobs_and_ends_everybody() -> None:
    pool, gate = WatchedPool(3), Gate()
    first = await filled(gate, "first", "helped", size=1)
    second = await filled(gate, "second", size=2)
    arbiter = LeaseArbiter(pool, [first, second], wait=Clock())

    async def job() -> None:
        async with arbiter:
            await until(lambda: len(gate.doing) == 3)
            gate.let_go("first", RuntimeError("no such film"))
            await asyncio.get_running_loop().create_future()  # the block would wait for ever: it is cancelled

    with pytest.raises(ExceptionGroup) as raised:
        await job()
    assert [str(error) for error in raised.value.exceptions] == ["no such film"]
    assert (gate.doing, arbiter.helpers) == ({}, 0)
    assert pool.all_free()


@pytest.mark.parametrize("gpus", [1, 2, 3])
async def test_a_cancelled_job_gives_every_gpu_back(gpus: int) -> None:
    pool, gate = WatchedPool(gpus), Gate()

    async def job() -> None:
        works = [await filled(gate, f"{number}a", f"{number}b", size=number) for number in range(2)]
        async with LeaseArbiter(pool, works, wait=Clock()):
            await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(job())
    await until(lambda: len(gate.doing) == gpus)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.all_free()


async def test_a_helper_cancelled_before_it_began_gives_its_gpu_back() -> None:
    pool, gate = WatchedPool(3), Gate()

    async def fail(piece: str, lease: GpuLease) -> None:
        raise RuntimeError("at once")

    works = [await filled(gate, "a", "b", size=0), await filled(fail, "c", size=1)]
    arbiter = LeaseArbiter(pool, works, wait=Clock())
    with pytest.raises(ExceptionGroup):
        async with arbiter:
            await asyncio.get_running_loop().create_future()
    assert (arbiter.helpers_started, gate.begun) == (1, [("a", 0)])
    assert pool.all_free()


# --------------------------------------------------------------------------------------------- the rest of the API


async def test_what_cannot_be_is_refused() -> None:
    pool, work = WatchedPool(1), await filled(Gate(), "a")
    with pytest.raises(ValueError, match="works, found 0"):
        LeaseArbiter(pool, [])
    with pytest.raises(ValueError, match="helpers_max"):
        LeaseArbiter(pool, [work], helpers_max=-1)
    with pytest.raises(ValueError, match="round_s"):
        LeaseArbiter(pool, [work], round_s=0)
    with pytest.raises(ValueError, match="waiting_max"):
        Pieces(Gate(), waiting_max=0)
    with pytest.raises(ValueError, match="after close"):
        await work.put("b")


async def test_put_waits_for_room() -> None:
    work: Pieces[int] = Pieces(Gate())
    for piece in range(PIECES_WAITING_MAX):
        await work.put(piece)
    blocked = asyncio.ensure_future(work.put(99))
    late = asyncio.ensure_future(work.put(100))
    await asyncio.wait({blocked, late}, timeout=0)
    assert work.waiting() == PIECES_WAITING_MAX
    assert not blocked.done()
    work.close()  # nobody may wait for ever for a queue that is closed
    with pytest.raises(ValueError, match="after close"):
        await blocked
    with pytest.raises(ValueError, match="after close"):
        await late


async def test_the_example_of_the_documentation_runs() -> None:
    text = arbiter_module.__doc__ or ""
    code = textwrap.dedent(text.split("::\n", 1)[1].split("\nEach piece has", 1)[0])
    made: list[tuple[int, str]] = []
    names: dict[str, Any] = {
        "asyncio": asyncio,
        "GpuLease": GpuLease,
        "GpuPool": GpuPool,
        "LeaseArbiter": LeaseArbiter,
        "Pieces": Pieces,
        "make_picture": lambda frame, uuid: made.append((frame, uuid)),
    }
    exec(code, names)
    pool = WatchedPool(3)
    await names["film"](pool, 20)
    assert sorted(frame for frame, _ in made) == list(range(20))
    assert {uuid for _, uuid in made} <= {"GPU-0", "GPU-1", "GPU-2"}
    assert pool.all_free()


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), gpus=st.integers(1, 4), pieces=st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_every_piece_is_done_once_whatever_helpers_do(seed: int, gpus: int, pieces: list[int]) -> None:
    """Helpers that fail, other claims that come and go, and rounds at any moment."""
    source = random.Random(seed)
    pool = WatchedPool(gpus)
    done: list[tuple[int, int]] = []
    works: list[Owned] = []

    class Owned(Pieces[int]):
        """Knows the lease of its own worker, which must not fail here."""

        own: GpuLease | None = None

        async def run(self, lease: GpuLease) -> None:
            self.own = lease
            await super().run(lease)

    async def step() -> None:
        for _ in range(source.randrange(4)):
            await asyncio.sleep(0)

    def handler(number: int) -> Callable[[int, GpuLease], Any]:
        async def handle(piece: int, lease: GpuLease) -> None:
            await step()
            if lease is not works[number].own and source.random() < 0.4:
                raise RuntimeError("a helper fails")
            done.append((number, piece))

        return handle

    async def wait(event: asyncio.Event, seconds: float) -> None:
        await step()
        await asyncio.sleep(0)

    async def others() -> None:
        for _ in range(3):
            lease = await pool.claim()
            assert lease is not None
            with lease:
                await step()
            await step()

    async def feed(work: Owned) -> None:
        for piece in range(work.size):
            await work.put(piece)
        work.close()

    async def job() -> None:
        works.extend(Owned(handler(number), size=count) for number, count in enumerate(pieces))
        other = asyncio.ensure_future(others())
        async with LeaseArbiter(pool, works, wait=wait):
            await asyncio.gather(*(feed(work) for work in works))
        await other

    asyncio.run(job())
    assert sorted(done) == [(number, piece) for number, count in enumerate(pieces) for piece in range(count)]
    assert pool.all_free()
