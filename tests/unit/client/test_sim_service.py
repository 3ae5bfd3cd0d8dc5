"""`SimFleet.serve`: a caller of services tested in virtual time, with full, killed, sleeping and streaming members."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import pytest

from moorage.bus.transport import Delivery
from moorage.calls.served import Context
from moorage.calls.streams import LISTENS_S
from moorage.client import AsyncClient, CallFailed, CallRefused, Rejected, TimedOut, services
from moorage.serve import endpoint
from moorage.testing import SimFleet
from moorage.testing.bus.bus import SimulatedConnection
from tests.scenes import in_virtual_time
from tests.waiting import until


async def nap(data: Any) -> Any:
    await asyncio.sleep(float(data))
    return data


def now_s() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_it_answers_with_functions_coroutines_classes_and_in_parts() -> None:
    class Embedder:
        def load(self) -> None:
            self.size = 3

        def call(self, data: str, context: Context) -> list[Any]:
            if data == "wrong":
                raise ValueError("no such word")
            return [data] * self.size

        @endpoint
        def turned(self, data: str) -> str:
            return data[::-1]

    def count(data: int) -> Iterator[int]:
        yield from range(data)

    async def slowly(data: int) -> AsyncIterator[int]:
        for each in range(data):
            await asyncio.sleep(60)
            yield each

    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        for name, function in (("embed", Embedder), ("count", count), ("slowly", slowly), ("size", len)):
            await fleet.serve(name, function)
        assert await moorage.call("embed", "word") == ["word"] * 3
        assert await moorage.call("embed.turned", "word") == "drow"
        with pytest.raises(CallFailed, match="ValueError: no such word"):
            await moorage.call("embed", "wrong")
        with pytest.raises(Rejected, match="has no method 'nope'; its methods: turned") as told:
            await moorage.call("embed.nope", "word")
        assert told.value.code == "no-endpoint"
        assert await moorage.call("count", 3) == [0, 1, 2]
        began_s = now_s()
        assert [each async for each in moorage.service("slowly").stream(3, timeout="2m")] == [0, 1, 2]
        assert now_s() - began_s == pytest.approx(180, abs=5)
        assert await moorage.call("size", os.urandom(3_000_000)) == 3_000_000, "in parts"


@in_virtual_time
async def test_a_map_yields_an_answer_on_which_the_next_item_rests() -> None:
    answers: asyncio.Queue[str] = asyncio.Queue()
    is_closed = asyncio.Event()

    async def turns() -> AsyncIterator[str]:
        try:
            yield "a"
            while True:
                yield await answers.get() + "a"
        finally:
            is_closed.set()

    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        await fleet.serve("same", lambda data: data)
        mapping = moorage.service("same").map(turns())
        async with asyncio.timeout(60):
            while (answer := await anext(mapping)) != "aaa":
                answers.put_nowait(answer)
        assert not is_closed.is_set()
        await mapping.aclose()  # type: ignore[attr-defined]
        assert is_closed.is_set()


@in_virtual_time
async def test_a_map_whose_items_fail_yields_what_came_before() -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise OSError("the disk is gone")

    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        await fleet.serve("same", lambda data: data)
        mapping = moorage.service("same").map(items(), at_once=2)
        assert [await anext(mapping) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(OSError, match="the disk is gone"):
            await anext(mapping)


@in_virtual_time
async def test_an_answer_of_a_member_that_took_none_of_the_data_is_none() -> None:
    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        link, answering = moorage._wire.link, set[asyncio.Task[bool]]()

        def answer(delivery: Delivery) -> None:
            answering.add(asyncio.create_task(link.publish(delivery.reply, str(len(delivery.data)).encode(), "", {})))

        await link.subscribe(moorage._wire.subjects.call(moorage.tenant, "old"), answer)
        assert await moorage.call("old", b"abc") == b"3"
        with pytest.raises(CallFailed, match="of which its member took none") as failed:
            await moorage.call("old", os.urandom(3_000_000))
        assert failed.value.fixes == ("start the service's job again with this version of moorage",)
        with pytest.raises(CallFailed, match="of which its member took none"):
            [each async for each in moorage.service("old").stream(os.urandom(3_000_000))]


@in_virtual_time
async def test_calls_wait_in_a_queue_of_the_services_size_by_their_priority() -> None:
    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        embed = await fleet.serve("embed", nap, queue={"most": 50})
        await until(lambda: embed.members, what="a member serves")
        began, ended = asyncio.create_task(moorage.call("embed", 5, timeout="1h")), list[int]()

        async def call(priority: int) -> None:
            await moorage.service("embed", priority=priority).call(1, timeout="1h")
            ended.append(priority)

        await asyncio.sleep(1)
        await asyncio.gather(began, *(call(priority) for priority in range(50)))
        assert ended == sorted(ended, reverse=True)
        with pytest.raises(Rejected, match="no whole number from 0 to 100"):
            moorage.service("embed", priority=101)
        for no_number in (True, 50.0):
            with pytest.raises(Rejected, match="no whole number"):
                moorage.service("embed", priority=cast(Any, no_number))


@in_virtual_time
async def test_a_full_member_says_busy_and_a_cancelled_call_frees_its_place() -> None:
    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        await fleet.serve("nap", nap, gpu="1xH100")
        assert await moorage.call("nap", 50, timeout="60s") == 50
        calls = [asyncio.create_task(moorage.call("nap", 60, timeout="100s")) for _ in range(4)]
        await asyncio.sleep(1)
        with pytest.raises(CallRefused) as refused:
            await moorage.call("nap", 0, timeout="10s")
        assert refused.value.code == "service-busy"
        for call in calls[1:]:
            call.cancel()
        assert await calls[0] == 60
        with pytest.raises(TimedOut):
            await moorage.call("nap", 600, timeout="5s")
        assert await moorage.call("nap", 0, timeout="1s") == 0


@in_virtual_time
async def test_a_member_that_dies_is_told_at_once_and_is_there_again() -> None:
    async with SimFleet("2x8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        service = await fleet.serve("nap", nap, replicas=2)
        await until(lambda: len(service.members) == 2)
        calls = [asyncio.create_task(moorage.call("nap", 30, timeout="60s")) for _ in range(2)]
        await asyncio.sleep(1)
        began_s = now_s()
        service.kill_member()
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        (dead,) = done
        assert now_s() - began_s < 1
        with pytest.raises(CallFailed) as failed:
            await dead
        assert failed.value.code == "member-died"
        await until(lambda: len(service.members) == 2)
        assert await moorage.call("nap", 1) == 1
        with pytest.raises(KeyError, match="no member nap/7 serves nap, but nap/"):
            service.kill_member("nap/7")


@in_virtual_time
async def test_the_first_call_starts_a_member_and_the_last_one_lets_it_end() -> None:
    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        service = await fleet.serve("nap", nap, replicas={"min": 0, "max": 2}, load_s=8)
        assert service.members == []
        began_s = now_s()
        assert await moorage.call("nap", 0) == 0
        assert 8 <= now_s() - began_s < 12, "a cold start"
        await asyncio.sleep(300)
        assert service.members == []


@in_virtual_time
async def test_calls_run_in_batches_and_the_wait_for_others_is_not_added_under_load() -> None:
    ran: list[list[int]] = []

    async def step(items: list[int]) -> list[int]:
        ran.append(items)
        await asyncio.sleep(10)
        return [item * 2 for item in items]

    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        service = await fleet.serve("step", step, batch={"most": 3, "wait_ms": 5000})
        await until(lambda: bool(service.members))

        async def timed(item: int) -> float:
            began_s = now_s()
            assert await moorage.call("step", item, timeout="60s") == item * 2
            return now_s() - began_s

        assert await timed(1) == pytest.approx(15, abs=0.5), "alone, it waits for others"
        calls = [asyncio.create_task(timed(item)) for item in range(3)]
        await asyncio.sleep(2)
        calls += [asyncio.create_task(timed(item)) for item in (3, 4)]
        assert [round(each) for each in await asyncio.gather(*calls)] == [10, 10, 10, 18, 18]
        assert ran == [[1], [0, 1, 2], [3, 4]]
        given_up, other = (asyncio.create_task(timed(item)) for item in (5, 6))
        await asyncio.sleep(1)
        given_up.cancel()
        await other
        assert ran[3:] == [[6]]
        died = [asyncio.create_task(timed(item)) for item in (7, 8)]
        await asyncio.sleep(6)
        service.kill_member()
        for call in died:
            with pytest.raises(CallFailed, match="ended during the call"):
                await call
        await until(lambda: bool(service.members))
        waits = asyncio.create_task(timed(9))
        await asyncio.sleep(2)
        service.kill_member()
        await waits
        assert ran[4:] == [[7, 8], [9]], "what waited for its batch had not started, so it is sent again"

        await fleet.serve("sizes", lambda items: list(map(len, items)), batch={"most": 2, "wait_ms": 10_000})
        await moorage.call("sizes", b"")
        began_s = now_s()
        sizes = await asyncio.gather(moorage.call("sizes", os.urandom(3_000_000)), moorage.call("sizes", b"abc"))
        assert list(sizes) == [3_000_000, 3], "data in parts join their batch once they are whole"
        assert now_s() - began_s < 5


@in_virtual_time
async def test_a_batch_that_its_function_failed_is_not_tried_again_however_idempotent() -> None:
    ran: list[Any] = []

    def short(items: list[Any]) -> list[Any]:
        ran.extend(items)
        return []

    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        await fleet.serve("short", short, batch={"most": 2, "wait_ms": 0})
        with pytest.raises(CallFailed, match="found a list of 0") as failed:
            await moorage.call("short", 1, idempotent=True)
        assert (failed.value.code, ran) == ("bad-batch", [1])


def endless(closed: asyncio.Event) -> Callable[[Any], AsyncIterator[int]]:
    """Parts without an end; the event says that nobody waits for them any more."""

    async def parts(_: Any) -> AsyncIterator[int]:
        try:
            while True:
                await asyncio.sleep(0.1)
                yield 1
        finally:
            closed.set()

    return parts


@in_virtual_time
async def test_an_endless_answer_ends_whose_caller_or_member_loses_its_connection() -> None:
    """It kept its place for ever: the caller's inbox was there again, so each part was heard."""
    closed = asyncio.Event()
    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        await fleet.serve("endless", endless(closed))
        link = cast(SimulatedConnection, moorage._wire.link)
        stream = moorage.service("endless").stream()
        await anext(stream)
        link.lose()
        await asyncio.sleep(1)
        link.restore()  # before the member asks the server whether anybody listens
        with pytest.raises(CallFailed, match="was lost with a connection"):
            [each async for each in stream]
        await asyncio.sleep(1)
        assert closed.is_set()

        closed.clear()
        stream = moorage.service("endless").stream()
        await anext(stream)
        inbox = moorage._wire.subjects.member_inbox(moorage.tenant)
        [member] = [each for each in fleet._bus.connections if each.inbox_prefix == inbox]
        member.lose()
        await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(10)
        assert not closed.is_set()
        member.restore()
        await asyncio.sleep(2 * LISTENS_S)
        assert closed.is_set()


@in_virtual_time
async def test_parts_that_nobody_reads_are_kept_up_to_a_bound_and_then_the_call_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(services, "STREAM_BYTES_MAX", 100 * services.PART_BYTES)
    closed = asyncio.Event()
    async with SimFleet("8xH100") as fleet, AsyncClient(transport=fleet) as moorage:
        await fleet.serve("endless", endless(closed))
        stream = moorage.service("endless").stream()
        for _ in range(500):
            assert await anext(stream) == 1, "who reads them gets any number"
        await asyncio.sleep(5)
        assert await anext(stream) == 1
        await asyncio.sleep(10)
        with pytest.raises(CallFailed, match="came faster than they were read"):
            await anext(stream)
        await asyncio.sleep(1)
        assert closed.is_set()
