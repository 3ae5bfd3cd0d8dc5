"""Who is cancelled at any point, closes early or opens twice leaves nothing behind: a real server, a real node."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from moorage.bus.errors import ConnectionClosed
from moorage.client import AsyncClient
from moorage.client.follow import follower
from moorage.client.follow.follower import CROWD
from moorage.client.loop_thread import LoopThread
from tests.system.cli.node import Node
from tests.waiting import NeverHappened, until

#: more steps than anything here takes
STEPS_MAX = 200


class CancelledAt:
    """An awaitable that is cancelled at its `step`th wait; `was` says whether it came so far."""

    def __init__(self, work: Awaitable[Any], step: int) -> None:
        self._work = work
        self._step = step
        self.was = False

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        value: Any = None
        error: BaseException | None = None
        at = 0
        while True:
            try:
                waited = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as over:
                return over.value
            value = error = None
            if at == self._step:
                self.was = True
                if waited is not None:
                    waited._asyncio_future_blocking = False
                    waited.cancel()
                error = asyncio.CancelledError()
            else:
                try:
                    value = yield waited
                except BaseException as raised:
                    error = raised
            at += 1


async def at_every_step(once: Callable[[], Awaitable[Any]], after: Callable[[], Awaitable[None]]) -> int:
    """`once` cancelled at its first wait, at its second, … until it comes through; `after` looks what is left."""
    for step in range(STEPS_MAX):
        work = CancelledAt(once(), step)
        with contextlib.suppress(asyncio.CancelledError):
            async with asyncio.timeout(60):
                await work
        await after()
        if not work.was:
            return step
    raise AssertionError("it has no end")


async def all_of(items: AsyncIterator[Any]) -> None:
    async with contextlib.aclosing(cast("AsyncGenerator[Any, None]", items)) as closed:
        async for _ in closed:
            pass


async def _result(client: AsyncClient) -> None:
    await (await client.submit(["true"])).result(60)


async def _events(client: AsyncClient) -> None:
    await all_of((await client.submit(["true"])).events(60))


async def _logs(client: AsyncClient) -> None:
    await all_of((await client.submit(["echo", "hello"])).logs(60))


async def _run(client: AsyncClient) -> None:
    await client.run(["echo", "hello"], wait=60)


async def _wait(client: AsyncClient) -> None:
    await client.wait(await client.submit_many([["true"]] * 3), 60)


async def _frames(client: AsyncClient) -> None:
    async with contextlib.aclosing(cast("AsyncGenerator[Any, None]", client.fleet.frames())) as frames:
        await anext(frames)


async def _in_a_crowd(client: AsyncClient) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for at in range(CROWD + 1):
            await stack.enter_async_context(client.watch(f"crowd-{at}", output=True))


@pytest.mark.parametrize("once", [_result, _events, _logs, _run, _wait, _frames, _in_a_crowd])
async def test_a_call_that_is_cancelled_at_any_wait_leaves_nothing(
    node: Node, unique: str, once: Callable[[AsyncClient], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moorage.client.follow.follower.LINGER_S", 0.0)
    async with AsyncClient(node.url, tenant=unique) as client:
        link: Any = client._wire.link
        await client.ls()
        tasks = len(asyncio.all_tasks())
        subscriptions = len(link._subscriptions)

        async def nothing_is_left() -> None:
            await until(lambda: len(asyncio.all_tasks()) == tasks, 60, "the tasks of before")
            await until(lambda: client._wire._histories._timer is None, 60, "it stands no more")
            assert len(link._subscriptions) == subscriptions
            assert not client._wire._histories.followers
            assert not client._wire._histories.endless

        assert await at_every_step(lambda: once(client), nothing_is_left) >= 1
        await client.ls()


async def test_a_client_that_is_cancelled_while_it_opens_or_closes_leaves_no_connection(node: Node) -> None:
    await asyncio.sleep(0)
    before = asyncio.all_tasks()
    connections = _connections(node)

    async def nothing_is_left() -> None:
        await until_nothing_is_left(before, node, connections)

    async def opens() -> None:
        async with AsyncClient(node.url):
            pass

    assert await at_every_step(opens, nothing_is_left) >= 5


async def test_a_client_that_is_closed_while_it_opens_leaves_no_connection(node: Node) -> None:
    before = asyncio.all_tasks()
    connections = _connections(node)
    turns, was_late = 0, False
    while not was_late:
        client = AsyncClient(node.url)
        opening = asyncio.create_task(client.open())
        for _ in range(turns + 1):
            await asyncio.sleep(0)
        was_late = opening.done()
        await client.close()
        if not was_late:
            with pytest.raises(RuntimeError, match="closed while it was opened"):
                await opening
        await until_nothing_is_left(before, node, connections)
        turns = max(turns + 1, turns * 5 // 4)
    assert turns > 5
    async with AsyncClient(node.url) as client:  # closed while it opens, and opened again
        await client.close()
        await client.open()
        await client.ls()


async def test_an_exception_in_a_callers_handler_is_logged_with_its_traceback(
    node: Node, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: object) -> None:
        raise ZeroDivisionError("in the handler")

    async with AsyncClient(node.url, tenant=unique) as client:
        await client._wire.subscribe(client._wire.subjects.events(unique), fails)
        await client.submit(["true"])
        await until(lambda: caplog.records, what="it is logged")
    record = caplog.records[0]
    assert (record.name, record.levelname) == ("moorage.client", "ERROR")
    assert record.exc_info is not None
    assert "ZeroDivisionError: in the handler" in caplog.text


async def test_a_connection_whose_close_was_cancelled_is_closed_all_the_same(node: Node) -> None:
    client = await AsyncClient(node.url).__aenter__()
    link: Any = client._wire.link
    closing = CancelledAt(link.close(), 0)
    with pytest.raises(asyncio.CancelledError):
        await closing
    async with asyncio.timeout(60):
        await link.close()
    assert link.closed.is_set()
    await client.close()


async def test_a_client_is_opened_once_at_a_time(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        with pytest.raises(RuntimeError, match="open already"):
            await client.open()
        assert (await client.ls()).jobs is not None  # the first connection is the one there is
    await client.open()
    await client.close()
    with pytest.raises(RuntimeError, match="not open"):
        await client.ls()


def test_a_client_belongs_to_the_loop_that_opened_it(node: Node) -> None:
    """In another one nothing would ever answer it."""
    client, thread = AsyncClient(node.url), LoopThread("its own loop")
    thread.start()
    try:
        thread.call(client.open())

        async def elsewhere() -> None:
            with pytest.raises(RuntimeError, match="another event loop"):
                await client.ls()

        asyncio.run(elsewhere())
        thread.call(client.ls())
        thread.call(client.close())
    finally:
        thread.stop()


async def test_who_still_listens_when_the_client_is_closed_is_told(
    node: Node, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for silence in ("REPAIR_S", "REPAIR_S_FIRST"):  # after which a follower asks, and would hear it from that
        monkeypatch.setattr(follower, silence, 3600.0)
    client = AsyncClient(node.url, tenant=unique)
    await client.open()
    job = await client.submit(["hang"], driver="noop")
    listening = {
        name: asyncio.create_task(work)
        for name, work in {
            "events": all_of(client.events()),
            "fleet_frames": all_of(client.fleet.frames()),
            "job.events": all_of(job.events()),
            "job.logs": all_of(job.logs()),
            "job.result": job.result(),
            "wait": client.wait([job]),
        }.items()
    }
    await until(
        lambda: len(client._wire._histories.endless) == 2 and len(client._wire._histories.followers) == 4,
        30,
        "all of them listen",
    )
    await client.close()
    done, _ = await asyncio.wait(listening.values(), timeout=60)
    assert {name for name, task in listening.items() if task not in done} == set()
    for task in done:
        assert isinstance(task.exception(), RuntimeError | ConnectionClosed)


async def until_nothing_is_left(tasks: set[asyncio.Task[Any]], node: Node, connections: frozenset[str]) -> None:
    """Wait until the tasks and connections that have come since are gone. Raises AssertionError that names them."""

    def left() -> list[object]:
        return [*(asyncio.all_tasks() - tasks), *(_connections(node) - connections)]

    try:
        await until(lambda: not left(), 60)
    except NeverHappened:
        raise AssertionError(f"still there: {left()}") from None


def _connections(node: Node) -> frozenset[str]:
    """The connections of this process to the node's server, each by its local address and inode (proc_pid_net(5)).

    Other sockets are of whatever else runs in this process beside the test.
    """
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    own = {os.readlink(link) for link in links if os.path.islink(link)}
    port = f":{urlsplit(node.url).port:04X}"
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return frozenset(f"{row[1]} {row[9]}" for row in rows if row[2].endswith(port) and f"socket:[{row[9]}]" in own)
