"""Commands, terminals and ports of running jobs over the real server; `tests/system/cli/test_exec.py` types them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from functools import partial

import pytest

from moorage.bus.errors import NoResponders, RequestTimeout
from moorage.client import AsyncClient, Client, Rejected, TimedOut
from moorage.client.command import OUTPUT_BYTES_MAX, Command
from moorage.client.errors import ClientError
from moorage.schemas.frames import Mark, piece
from tests.servers import MortalServer, Server
from tests.system.live.stack import QUICK, Caller, Stack, caller, is_alive, stack, unique_prefix
from tests.waiting import until

WORKER = "w1"
#: answers each connection with what came, backwards
SERVER = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    peer, _ = listener.accept()
    data = b"".join(iter(lambda: peer.recv(65536), b""))
    peer.sendall(data[::-1])
    peer.close()
"""


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


async def test_an_agent_that_is_killed_ends_the_stream_and_not_the_job(
    nats_server: Server,
) -> None:
    async with running(nats_server) as (made, asking, client):
        await asking.submit("j", "sh", "-c", "echo begun; read x; exit $x", run={"stdin": "stream"})
        await asking.reaches("j", "RUNNING")
        async with Command.of(client._wire, "j", [], attach=True) as holds:
            await _shows(holds, b"begun")
            with pytest.raises(ClientError, match="another caller holds"):
                async with Command.of(client._wire, "j", [], attach=True):
                    pass
            await holds.detach()
        async with Command.of(client._wire, "j", ["sh", "-c", "trap '' TERM HUP; echo $$; sleep 600"]) as command:
            pid = await _pid(command)
            assert is_alive(pid)
            await made.processes[1].kill()
            await until(lambda: not is_alive(pid), 60.0, "the command is gone")
            await made.agent("w", "1xH100", worker=WORKER)
            with pytest.raises(ClientError, match="its worker was silent"):
                await command.wait()
        await asking.workers_up(WORKER)
        assert await asking.state("j") == "RUNNING"

        async def taken() -> bool:
            try:
                async with asyncio.timeout(60.0), Command.of(client._wire, "j", [], attach=True) as again:
                    await _shows(again, b"begun")  # the newest bytes come first
                    await again.write(b"7\n")
                    while await again.read() is not None:
                        pass
                    return await again.wait() == 7
            except ClientError as error:
                if error.code not in ("failed-precondition", "worker-lost"):  # the order went to the killed agent
                    raise
                return False

        await until(taken, 60.0, "the terminal is taken again")
        await asking.reaches("j", "FAILED")


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


async def test_the_sdk_runs_a_command_to_its_end_and_leads_a_port_here(nats_server: Server) -> None:
    async with running(nats_server) as (made, asking, client):
        await asking.submit("j", "python3", "-c", SERVER)
        await asking.reaches("j", "RUNNING")
        port = await until(lambda: _printed(client, "j"), 60.0, "its port")

        def work() -> None:
            with Client(made.url, tenant="acme", prefix=made.subjects.prefix) as moorage:
                job, whole = moorage.job("j"), bytes(range(256)) * 8192
                done = job.exec(["sh", "-c", "cat; echo bad >&2; exit 7"], input="from hére", by="ana")
                assert (done.code, done.stdout, done.stderr) == (7, "from hére", "bad\n")
                assert job.exec(["cat"], input=whole).stdout_bytes == whole
                assert job.exec(["true"], input=whole).code == 0, "what nobody reads is dropped"
                with pytest.raises(Rejected, match="no-such-program"):
                    job.exec(["no-such-program"])
                with pytest.raises(TimedOut, match="ran longer than 3 s, and is ended"):
                    job.exec(["sh", "-c", "echo $$ > pid; exec sleep 600"], wait=3)
                with pytest.raises(Rejected, match="wrote too much"):
                    job.exec(["head", "-c", str(OUTPUT_BYTES_MAX + 1), "/dev/zero"])
                assert not is_alive(int(job.exec(["cat", "pid"]).stdout))
                with job.forward(port) as forward, socket.create_connection(("127.0.0.1", forward.port)) as peer:
                    peer.sendall(b"abc")
                    peer.shutdown(socket.SHUT_WR)
                    assert peer.recv(100) == b"cba"
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", forward.port))
                with job.forward(port) as forward:
                    job.cancel()
                    assert forward.wait() < 0, "it ends with the job"

        await asyncio.to_thread(work)


async def _printed(client: AsyncClient, job: str) -> int:
    async for found in client.job(job).logs(follow=False):
        return int(found.text)
    return 0


async def _shows(command: Command, wanted: bytes) -> None:
    """Read until this is shown."""
    shown = b""
    async with asyncio.timeout(60.0):
        while wanted not in shown:
            found = await command.read()
            assert found is not None, shown
            shown += found[1]


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
