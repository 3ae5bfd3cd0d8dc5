"""Commands in running jobs, over the real server: streams, exit codes, refusals, and nothing left of any end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial

import pytest

from moorage.bus.errors import NoResponders, RequestTimeout
from moorage.client import AsyncClient
from moorage.client.command import Command
from moorage.client.errors import ClientError
from moorage.schemas.frames import Mark, piece
from tests.servers import MortalServer, Server
from tests.system.live.stack import QUICK, Caller, Stack, caller, is_alive, stack, unique_prefix
from tests.waiting import until

WORKER = "w1"


@contextlib.asynccontextmanager
async def running(server: Server, **settings: object) -> AsyncIterator[tuple[Stack, Caller, AsyncClient]]:
    """A scheduler, an agent with one simulated GPU, and a client."""
    async with stack(server, unique_prefix()) as made, caller(made) as asking:
        await made.scheduler(config=QUICK)
        await made.agent("w", "1xH100", worker=WORKER, **settings)
        await asking.leader()
        await asking.workers_up(WORKER)
        async with AsyncClient(made.url, tenant="acme", prefix=made.subjects.prefix) as client:
            yield made, asking, client


async def test_a_caller_that_falls_silent_or_leaves_frees_process_and_subscriptions(nats_server: Server) -> None:
    async with running(nats_server) as (_, asking, client):
        await asking.submit("j", "sleep", "600")
        await asking.reaches("j", "RUNNING")
        for leaves in (True, False):
            async with Command.of(client._wire, "j", ["sh", "-c", "trap '' TERM HUP; echo $$; sleep 600"]) as command:
                pid = await _pid(command)
                assert command.given is not None
                assert command._beating is not None
                at = client._wire.subjects.tty, ("acme", WORKER, command.given.stream)
                assert await _is_heard(client, at[0](*at[1], "in"))
                if leaves:
                    await command.__aexit__()
                else:
                    command._beating.cancel()
                await until(lambda pid=pid: not is_alive(pid), 60.0, "the command is gone")
                await until(
                    partial(_is_unheard, client, at[0](*at[1], "in")), 60.0, "the worker's subscription is gone"
                )
            await until(partial(_is_unheard, client, at[0](*at[1], "out")), 60.0, "the caller's subscription is gone")


async def test_an_agent_that_is_killed_ends_the_stream_and_not_the_job(nats_server: Server) -> None:
    async with running(nats_server) as (made, asking, client):
        await asking.submit("j", "sh", "-c", "echo $$; exec sleep 600")
        await asking.reaches("j", "RUNNING")
        script = "trap '' TERM HUP; tty >&2; echo $$; sleep 600"
        async with Command.of(client._wire, "j", ["sh", "-c", script], tty=True) as command:
            found = await command.read()
            assert found is not None
            while found[1].count(b"\n") < 2:
                more = await command.read()
                assert more is not None
                found = (found[0], found[1] + more[1])
            pid = int(found[1].split()[1])
            assert is_alive(pid)
            await made.processes[1].kill()
            await until(lambda: not is_alive(pid), 60.0, "the command is gone")
            await made.agent("w", "1xH100", worker=WORKER)
            with pytest.raises(ClientError, match="its worker was silent"):
                await command.wait()
        await asking.workers_up(WORKER)
        assert await asking.state("j") == "RUNNING"
        async with Command.of(client._wire, "j", ["true"]) as command:
            assert await command.wait() == 0


async def test_a_server_that_stays_away_ends_the_stream_and_not_the_job(mortal_server: MortalServer) -> None:
    async with running(mortal_server) as (_, asking, client):
        await asking.submit("j", "sleep", "600")
        await asking.reaches("j", "RUNNING")
        script = "trap '' TERM HUP; echo $$; while :; do echo more; done"
        async with Command.of(client._wire, "j", ["sh", "-c", script]) as command:
            pid = await _pid(command)
            await mortal_server.kill()

            async def read_on() -> None:
                while await command.read() is not None:
                    pass

            await read_on()
            with pytest.raises(ClientError):
                await command.wait()
            await until(lambda: not is_alive(pid), 60.0, "the command is gone")
            await mortal_server.start()
        assert await asking.state("j") == "RUNNING"


async def _pid(command: Command) -> int:
    """The number on the first line of its output."""
    line = b""
    while b"\n" not in line:
        found = await command.read()
        assert found is not None
        line += found[1]
    return int(line.split()[0])


async def _is_heard(client: AsyncClient, subject: str) -> bool:
    """Whether anybody subscribes to a subject of a stream."""
    try:
        await client._wire.link.request(subject, piece(Mark.BEAT), 0.2)
    except RequestTimeout:
        return True
    except NoResponders:
        return False
    raise AssertionError("a stream answers no request")


async def _is_unheard(client: AsyncClient, subject: str) -> bool:
    return not await _is_heard(client, subject)
