"""The connection over nats-py against a real server, through kills, stops, refusals and floods."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg

from moorage.bus.connection import Connection, State, connect, flush_all
from moorage.bus.contexts import Context
from moorage.bus.embedded import EmbeddedServer
from moorage.bus.errors import (
    BusError,
    CannotConnect,
    ConnectionClosed,
    Disconnected,
    HandlerFailed,
    NoResponders,
    NotAuthorized,
    PermissionRefused,
    RequestTimeout,
)
from moorage.bus.transport import Delivery
from tests.ports import free_ports
from tests.servers import MortalServer, Server
from tests.waiting import until


async def test_a_cancelled_request_leaves_nothing_behind(nats_url: str, unique: str) -> None:
    async with await connect(nats_url, "a") as a:
        heard: list[Delivery] = []
        await a.subscribe(unique, heard.append)
        waiting = asyncio.create_task(a.request(unique, b"", 60))
        await until(lambda: heard)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(a._answers) == 0


async def test_who_is_asked_one_question_cannot_tell_the_inbox_of_another(nats_url: str, unique: str) -> None:
    """A leaf node may publish in all of a scheduler's inboxes, and hears the questions to its own workers."""
    async with await connect(nats_url, "a") as a, await connect(nats_url, "b") as b:
        heard: list[Delivery] = []
        await b.subscribe(unique, heard.append)
        asking = [asyncio.create_task(a.request(unique, b"", 60)) for _ in range(20)]
        await until(lambda: len(heard) == len(asking))
        for question in heard:
            await b.send([(question.reply, question.reply.encode(), "")])
        answers = await asyncio.gather(*asking)
        assert {each.data.decode() for each in answers} == {each.reply for each in heard}
        numbers = sorted(int(each.reply.rpartition(".")[2]) for each in heard)
        assert min(later - earlier for earlier, later in itertools.pairwise(numbers)) > 1 << 32


async def test_a_cancelled_flush_leaves_the_connection_reading(nats_url: str, unique: str) -> None:
    """Its PONG comes all the same, and finds nobody."""
    heard = asyncio.Event()
    async with await connect(nats_url, "asker") as connection:
        await connection.subscribe(unique, lambda _: heard.set())
        for turns in range(20):
            flushing = asyncio.create_task(connection.flush())
            for _ in range(turns):  # its PONG is here within a few of them
                await asyncio.sleep(0)
            flushing.cancel()
        await connection.send([(unique, b"", "")])
        await connection.flush(2.0)
        await asyncio.wait_for(heard.wait(), 60)
        assert connection.reconnects == 0


def test_a_loop_may_end_right_behind_a_dial_that_was_cancelled() -> None:
    """As at the end of a program whose server is away; the socket was left to the garbage collector."""
    with socket.create_server(("127.0.0.1", 0)) as silent, contextlib.ExitStack() as sockets:

        async def main() -> None:
            url = f"nats://127.0.0.1:{silent.getsockname()[1]}"
            dialing = asyncio.create_task(connect(url, "d", give_up_after_s=None))
            sockets.enter_context((await asyncio.to_thread(silent.accept))[0])
            dialing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await dialing

        asyncio.run(main())
        with warnings.catch_warnings(record=True) as left:
            warnings.simplefilter("always")
            gc.collect()
    assert [str(each.message) for each in left] == []


async def test_a_subscribe_that_is_cancelled_hears_nothing(nats_url: str, unique: str) -> None:
    heard: list[Delivery] = []
    async with await connect(nats_url, "a") as a:
        for turns in range(1, 6):
            making = asyncio.create_task(a.subscribe(unique, heard.append))
            for _ in range(turns):
                await asyncio.sleep(0)
            if making.cancel():
                await asyncio.wait([making])
                assert making.cancelled()
            else:
                await making.result().unsubscribe()
        with pytest.raises(NoResponders):
            await a.request(unique, b"", 5)
        assert not heard


async def test_a_member_of_a_group_that_leaves_it_behind_its_last_message_loses_none(
    nats_url: str, unique: str
) -> None:
    """With `unsubscribe` alone, the messages that the server had sent before it knew were dropped."""
    async with await connect(nats_url, "a") as a, await connect(nats_url, "b") as b, await connect(nats_url, "c") as c:
        stays: list[Delivery] = []
        leaves: list[Delivery] = []
        await a.subscribe(unique, stays.append, "group")
        leaving = await b.subscribe(unique, leaves.append, "group")
        sent = 0

        async def send() -> None:
            nonlocal sent
            for _ in range(25):
                sent += await c.send([(unique, b"", "")] * 100)
                await asyncio.sleep(0)

        while not leaves:
            await send()
        await asyncio.gather(leaving.drain(), send())
        await until(lambda: len(stays) + len(leaves) == sent, what="all messages at one of the two")
        assert leaving.client is None


@pytest.mark.parametrize("raised", [KeyError("bad"), asyncio.CancelledError()])
async def test_a_failing_handler_is_told_and_the_next_message_comes(
    nats_url: str, unique: str, raised: BaseException
) -> None:
    told: list[BusError] = []
    async with await connect(nats_url, "a", on_error=told.append) as a:
        heard: list[bytes] = []

        def handler(delivery: Delivery) -> None:
            if delivery.data == b"bad":
                raise raised
            heard.append(delivery.data)

        await a.subscribe(unique, handler)
        await a.send([(unique, b"bad", ""), (unique, b"good", "")])
        await until(lambda: heard == [b"good"])
        assert isinstance(told[0], HandlerFailed)
        assert told[0].cause is raised
        assert len(told) == 1


async def test_a_subscription_takes_no_task_and_its_handler_gets_each_message_as_it_is_read(
    nats_url: str, unique: str
) -> None:
    async with await connect(nats_url, "a") as a:
        before, heard = asyncio.all_tasks(), ""

        def handler(delivery: Delivery) -> None:
            nonlocal heard
            heard += delivery.subject[-1]

        for name in "xy":
            await a.subscribe(f"{unique}.{name}", handler)
        assert asyncio.all_tasks() == before
        await a.send([(f"{unique}.{name}", b"", "") for name in "xyxyxy"])
        await until(lambda: heard == "xyxyxy", what="six messages in the order in which they were sent")


async def test_first_connect_gives_up_in_time(unique: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(CannotConnect) as raised:
            await connect(f"nats://user:secret@127.0.0.1:{port}", unique, give_up_after_s=0.2)
    assert str(port) in str(raised.value)
    assert "secret" not in f"{raised.value} {raised.value.url}"


async def test_first_connect_waits_for_a_server_that_comes(mortal_server: MortalServer) -> None:
    await mortal_server.stop()
    connecting = asyncio.create_task(connect(mortal_server.url, "early", give_up_after_s=None))
    await asyncio.sleep(0)
    await mortal_server.start()
    async with await connecting as connection:
        assert connection.state is State.CONNECTED
        assert connection.server_version.startswith("2.")


async def test_of_several_servers_the_living_one_is_used(nats_url: str, unique: str) -> None:
    async with await connect(f"nats://127.0.0.1:1,{nats_url}", unique) as connection:
        assert connection.is_connected


async def test_wrong_credentials_fail_at_once(nats_server: Server) -> None:
    url = f"nats://scheduler-ledger:wrong@127.0.0.1:{nats_server.port}"
    with pytest.raises(NotAuthorized) as raised:
        await connect(url, "x", give_up_after_s=None)
    assert "wrong" not in str(raised.value)


async def test_credentials_by_context(nats_server: Server, unique: str) -> None:
    password = urlsplit(nats_server.ledger_url).password or ""
    context = Context(url=nats_server.url, user="scheduler-ledger", password=password, inbox_prefix=f"_INBOX.{unique}")
    async with await connect(context, "x") as connection:
        assert connection.inbox_prefix == f"_INBOX.{unique}"
        assert (await connection.request("$JS.API.INFO", b"", 5)).subject.startswith(f"_INBOX.{unique}.")


async def test_a_killed_server_fails_the_pending_and_the_connection_returns(
    mortal_server: MortalServer, unique: str
) -> None:
    states: list[State] = []
    async with await connect(mortal_server.url, "a", on_state=states.append) as a:
        heard: list[Delivery] = []
        await a.subscribe(unique, heard.append)
        pending = [asyncio.create_task(a.request(unique, b"%d" % i, 60)) for i in range(20)]
        await until(lambda: len(heard) == 20)
        await mortal_server.kill()
        for task in pending:
            with pytest.raises(Disconnected) as raised:
                await task
            assert raised.value.subject == unique
        assert not a.is_connected
        # What is sent now is lost; a request waits for the connection.
        assert await a.send([(unique, b"lost", "")] * 3) == 0
        waiting = asyncio.create_task(a.request(f"{unique}.none", b"", 30))
        await mortal_server.start()
        with pytest.raises(NoResponders):
            await waiting
        heard.clear()
        await a.send([(unique, b"back", "")])
        await until(lambda: [d.data for d in heard] == [b"back"])
        assert a.reconnects == 1
        assert not a.closed.is_set()
    assert states[:3] == [State.CONNECTED, State.RECONNECTING, State.CONNECTED]
    assert states[-1] is State.CLOSED


async def test_a_cancellation_of_the_clients_own_does_not_end_the_redialing(
    mortal_server: MortalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await connect(mortal_server.url, "a") as a:
        connect_one = Client.connect
        leaked: list[bool] = []

        async def connect_and_leak(client: Client, *args: Any, **options: Any) -> None:
            if not leaked:
                leaked.append(True)
                raise asyncio.CancelledError  # as out of nats-py, when a task that it awaits was cancelled
            await connect_one(client, *args, **options)

        monkeypatch.setattr(Client, "connect", connect_and_leak)
        await mortal_server.kill()
        await mortal_server.start()
        await until(lambda: leaked and a.is_connected)


async def test_a_request_while_disconnected_times_out(fresh_server: EmbeddedServer, unique: str) -> None:
    async with await connect(fresh_server.url, "a") as a:
        await fresh_server.kill()
        await until(lambda: not a.is_connected)
        with pytest.raises(RequestTimeout):
            await a.request(unique, b"", 0.05)


@pytest.mark.parametrize("use", ["request", "flush"])
async def test_close_ends_the_wait_for_a_connection(fresh_server: EmbeddedServer, unique: str, use: str) -> None:
    a = await connect(fresh_server.url, "a")
    await fresh_server.kill()
    await until(lambda: not a.is_connected)
    async with asyncio.timeout(60):
        waiting = asyncio.create_task(a.request(unique, b"", 600) if use == "request" else a.flush(600))
        await asyncio.sleep(0)
        await a.close()
        with pytest.raises(ConnectionClosed):
            await waiting
    assert not a.is_connected


async def stop(server: EmbeddedServer) -> None:
    """Stop all threads of a server; those that have not seen the signal yet would still answer."""
    os.kill(server.pid, signal.SIGSTOP)
    threads = Path(f"/proc/{server.pid}/task")
    await until(lambda: all(") T " in stat.read_text() for stat in threads.glob("*/stat")), what="it has stopped")


async def test_close_ends_a_flush_that_the_server_does_not_answer(
    fresh_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py leaves its PING waiting when it closes; the task stayed as long as its loop."""
    for module in ("connection", "dialing"):
        monkeypatch.setattr(f"moorage.bus.{module}.DRAIN_TIMEOUT_S", 0.05)  # it drains in vain
    before = asyncio.all_tasks()
    a = await connect(fresh_server.url, "a")
    await stop(fresh_server)
    try:
        async with asyncio.timeout(60):
            waiting = asyncio.create_task(a.flush(600))
            await asyncio.sleep(0)
            await a.close()
            with pytest.raises(ConnectionClosed):
                await waiting
            await until(lambda: asyncio.all_tasks() == before)
    finally:
        os.kill(fresh_server.pid, signal.SIGCONT)


async def test_close_while_there_is_no_server(fresh_server: EmbeddedServer, unique: str) -> None:
    for _ in range(3):
        again = await EmbeddedServer.start(fresh_server.data_dir.parent / f"nats-{unique}")
        a = await connect(again.url, "a")
        await a.subscribe(unique, lambda _: None)
        await again.kill()
        await until(lambda a=a: not a.is_connected)
        async with asyncio.timeout(60):
            await a.close()
        assert a.closed.is_set()


async def test_a_subscription_made_while_disconnected_comes_with_the_connection(
    mortal_server: MortalServer, unique: str
) -> None:
    async with await connect(mortal_server.url, "a") as a:
        await mortal_server.kill()
        await until(lambda: not a.is_connected)
        heard: list[Delivery] = []
        making = asyncio.create_task(a.subscribe(unique, heard.append))
        await mortal_server.start()
        await making
        await until(lambda: a.is_connected)
        await a.send([(unique, b"", "")])
        await until(lambda: heard)


async def test_a_request_that_finds_the_client_dead_leaves_no_error_that_nobody_reads(
    nats_server: Server, unique: str
) -> None:
    """asyncio logged "Future exception was never retrieved", once for each try."""
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    async with await connect(nats_server.url, "a") as a:
        client: Any = a._client
        was, client._status = client._status, Client.CLOSED
        with pytest.raises(Disconnected):
            await a.request(unique, b"", 60)
        client._status = was
        await until(lambda: a._client is not client and a.is_connected)
    gc.collect()
    assert logged == []


@pytest.mark.slow
async def test_a_stopped_server_is_noticed_by_pings_and_ends_a_blocked_send(
    fresh_server: EmbeddedServer, unique: str
) -> None:
    closing = await connect(fresh_server.url, "closes meanwhile")
    async with await connect(fresh_server.url, "a") as a:
        await a.subscribe(unique, lambda _: None)
        transport: Any = a._client._transport
        socket_of_a = transport._bare_io_writer.get_extra_info("socket")
        await stop(fresh_server)
        try:
            closed = asyncio.create_task(closing.close())
            waiting = asyncio.create_task(a.request(unique, b"", 60))
            # Far more than the socket and the backlog take.
            sending = asyncio.create_task(a.send([(unique, bytes(500_000), "")] * 100))
            with pytest.raises(Disconnected):
                await waiting
            assert await sending < 100
            await closed
            await until(lambda: socket_of_a.fileno() < 0, what="the client's socket is closed")
        finally:
            os.kill(fresh_server.pid, signal.SIGCONT)
        await until(lambda: a.is_connected)


async def test_a_client_that_closed_itself_is_made_again(nats_url: str, unique: str) -> None:
    states: list[State] = []
    async with await connect(nats_url, "a", on_state=states.append) as a:
        heard: list[Delivery] = []
        await a.subscribe(unique, heard.append)
        await a._client.close()
        await until(lambda: State.RECONNECTING in states and a.is_connected)
        await a.send([(unique, b"still here", "")])
        await until(lambda: heard)
        with pytest.raises(RequestTimeout):
            await a.request(unique, b"", 0.05)


@pytest.mark.slow
async def test_credentials_that_are_refused_after_a_restart_are_told(
    fresh_data_dir: Path, fresh_server: EmbeddedServer
) -> None:
    told: list[BusError] = []
    async with await connect(fresh_server.ledger_url, "a", on_error=told.append) as a:
        await fresh_server.kill()
        password = fresh_data_dir / "ledger-password"
        good = password.read_text()
        password.write_text("other")
        again = await EmbeddedServer.start(fresh_data_dir, port=fresh_server.port)
        await until(lambda: told)
        assert [type(error) for error in told] == [NotAuthorized]
        assert good not in str(told[0])
        await again.kill()
        password.write_text(good)
        once_more = await EmbeddedServer.start(fresh_data_dir, port=fresh_server.port)
        await until(lambda: a.is_connected)
        await once_more.stop()


async def test_refused_permissions_reach_their_caller(tmp_path: Path, unique: str) -> None:
    server = await EmbeddedServer.start(tmp_path / "nats")
    config = tmp_path / "nats" / "nats.conf"
    user = '{ user: "limited", password: "p", permissions: { publish: "open.>", subscribe: ["open.>", "_INBOX.>"] } }'
    config.write_text(config.read_text().replace("users: [ { user: moorage", f"users: [ {user}, {{ user: moorage", 1))
    os.kill(server.pid, signal.SIGHUP)
    told: list[BusError] = []
    context = Context(url=server.url, user="limited", password="p")

    async def is_limited() -> bool:
        """Whether the server has read it: a user may be let in a moment before what it may do is known."""
        try:
            async with await connect(context, "probe", on_error=lambda _: None) as probe:
                await probe.request("closed.probe", b"", 5)
        except (NotAuthorized, NoResponders):
            return False
        except PermissionRefused:
            return True
        return False

    try:
        await until(is_limited)
        async with await connect(context, "limited", on_error=told.append) as limited:
            with pytest.raises(PermissionRefused) as publish:
                await limited.request("Closed.a", b"", 60)
            assert (publish.value.operation, publish.value.subject) == ("publish", "closed.a")
            with pytest.raises(PermissionRefused) as subscription:
                await limited.subscribe("closed.>", lambda _: None)
            assert subscription.value.operation == "subscription"
            heard: list[Delivery] = []
            ahead = [await limited.subscribe_ahead(subject, heard.append) for subject in ("Closed.b", "open.a")]
            await limited.send([("open.a", b"", "")])
            await until(lambda: heard)  # in the order in which they were sent, so that both are known by now
            assert [each.refused and each.refused.operation for each in ahead] == ["subscription", None]
            assert [type(error) for error in told] == [PermissionRefused] * 3
            assert limited.reconnects == 0
    finally:
        await server.stop()


async def test_a_header_that_is_none_is_the_callers_fault_and_costs_no_connection(nats_url: str, unique: str) -> None:
    """nats-py raises of it as of a dead socket."""
    async with await connect(nats_url, "sender") as sender:
        with pytest.raises(ValueError, match="invalid header"):
            await sender.publish(unique, b"", "", {"a/b": "x"})
        with pytest.raises(ValueError, match="invalid header"):
            await sender.request(unique, b"", 1, {"a/b": "x"})
        assert sender.is_connected
        assert len(sender._answers) == 0


async def test_a_flush_ends_behind_what_nats_py_has_buffered(fresh_server: EmbeddedServer, unique: str) -> None:
    """nats-py sends the PING of its flush ahead of a subscription that it still holds."""
    async with await connect(fresh_server.url, "b") as b:
        for number in range(100):
            came = asyncio.Event()

            async def on_message(msg: Msg, came: asyncio.Event = came) -> None:
                came.set()

            a = Client()
            await a.connect(fresh_server.url)
            await a.subscribe(f"{unique}.{number}", cb=on_message)
            await flush_all(a)
            await b.send([(f"{unique}.{number}", b"", "")])
            await asyncio.wait_for(came.wait(), 60)
            await a.close()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, pytest.param(uvloop.new_event_loop, id="uvloop")])
def test_many_kills_leave_one_socket_and_each_subscription_once(
    fresh_data_dir: Path, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """The scheduler runs on uvloop, whose dead transports raise other errors than asyncio's."""

    def sockets() -> int:
        links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
        return sum(os.path.exists(link) and os.readlink(link).startswith("socket:") for link in links)

    async def chatter(connection: Connection) -> None:
        """Requests in flight at the moment of the kill."""
        while True:
            with contextlib.suppress(BusError):
                await connection.request("$JS.API.INFO", b"", 2)

    async def main() -> None:
        server = await EmbeddedServer.start(fresh_data_dir, port=free_ports(1)[0])
        connections = [await connect(server.url, f"c{number}") for number in range(6)]
        heard: list[list[Delivery]] = [[] for _ in connections]
        for number, connection in enumerate(connections):
            await connection.subscribe(f"to.{number}", heard[number].append)
        before = sockets()
        talking = [asyncio.create_task(chatter(connection)) for connection in connections]
        try:
            for kills in range(1, 7):
                await server.kill()
                await until(lambda: not any(each.is_connected for each in connections))
                server = await EmbeddedServer.start(fresh_data_dir, port=server.port)
                await until(lambda: all(each.is_connected for each in connections))
                for number, connection in enumerate(connections):
                    await connection.send([(f"to.{number}", b"%d" % kills, "")])
                    await until(lambda n=number, k=kills: heard[n] and heard[n][-1].data == b"%d" % k)
                    assert [each.data for each in heard[number]] == [b"%d" % n for n in range(1, kills + 1)]
        finally:
            for task in talking:
                task.cancel()
            await asyncio.gather(*talking, return_exceptions=True)
        assert [each.reconnects for each in connections] == [6] * len(connections)
        await until(lambda: sockets() == before, what="the sockets of dead connections are gone")
        for connection in connections:
            await connection.close()
        await server.stop()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
