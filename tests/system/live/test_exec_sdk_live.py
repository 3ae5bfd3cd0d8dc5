"""`job.exec` and `job.forward` of the SDK, with and without `await`, over the real server."""

from __future__ import annotations

import asyncio
import socket

import pytest

from moorage.client import AsyncClient, Client, NotFound, Rejected, TimedOut
from moorage.client.command import OUTPUT_BYTES_MAX
from tests.servers import Server
from tests.system.live.stack import is_alive
from tests.system.live.test_exec_live import running
from tests.waiting import until

#: answers each connection with what came, backwards
SERVER = """
import os, socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    peer, _ = listener.accept()
    data = b"".join(iter(lambda: peer.recv(65536), b""))
    peer.sendall(data[::-1])
    peer.close()
"""


async def test_a_command_is_run_to_its_end(nats_server: Server) -> None:
    async with running(nats_server) as (_, asking, client):
        await asking.submit("j", "sleep", "600", run={"env": {"COLOUR": "green"}})
        await asking.reaches("j", "RUNNING")
        job = client.job("j")
        done = await job.exec(["sh", "-c", "echo $COLOUR; echo bad >&2; cat; exit 7"], input="from hére", by="ana")
        assert (done.code, done.stdout, done.stderr) == (7, "green\nfrom hére", "bad\n")
        whole = bytes(range(256)) * 8192
        assert (await job.exec(["cat"], input=whole)).stdout_bytes == whole
        assert (await job.exec(["true"], input=whole)).code == 0, "what nobody reads is dropped"
        assert (await job.exec(["sh", "-c", "kill -9 $$"])).code == -9
        said = [each.said for each in (await job.show()).changes if each.state == "EXEC"]
        assert said[0].endswith("ana")


async def test_what_cannot_be_run_says_why_and_nothing_is_left(nats_server: Server) -> None:
    async with running(nats_server) as (_, asking, client):
        await asking.submit("j", "sleep", "600")
        await asking.reaches("j", "RUNNING")
        job = client.job("j")
        with pytest.raises(Rejected, match="a command is a list of words"):
            await job.exec("ls")
        with pytest.raises(Rejected, match="no-such-program"):
            await job.exec(["no-such-program"])
        with pytest.raises(NotFound):
            await job.exec(["true"], replica=1)
        pid = int((await job.exec(["sh", "-c", "sleep 600 & echo $!"])).stdout.split()[0])
        assert is_alive(pid), "what a command leaves behind is the attempt's"
        with pytest.raises(TimedOut, match="ran longer than 3 s, and is ended"):
            await job.exec(["sh", "-c", "echo $$ > pid; exec sleep 600"], wait=3)
        pid = int((await job.exec(["cat", "pid"])).stdout)
        await until(lambda: not is_alive(pid), 60.0, "the command is ended")
        with pytest.raises(Rejected, match="wrote too much"):
            await job.exec(["head", "-c", str(OUTPUT_BYTES_MAX + 1), "/dev/zero"])
        await job.cancel()
        await asking.reaches("j", "CANCELLED")
        with pytest.raises(Rejected, match="is not running: CANCELLED"):
            await job.exec(["true"])


async def _answer(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    writer.write_eof()
    got = await reader.read()
    writer.close()
    return got


async def test_a_port_leads_to_one_of_the_job_while_the_block_runs(nats_server: Server) -> None:
    async with running(nats_server) as (_, asking, client):
        await asking.submit("j", "python3", "-c", SERVER)
        job = client.job("j")
        port = await until(lambda: _printed(client, "j"), 60.0, "its port")
        async with job.forward(port) as forward:
            assert forward.address == f"127.0.0.1:{forward.port}"
            found = await asyncio.gather(*(_answer(forward.port, bytes([at]) + b"bc") for at in range(5)))
            assert found == [b"cb" + bytes([at]) for at in range(5)]
            with pytest.raises(Rejected, match=f"port {forward.port} of this machine"):
                async with job.forward(port, local=forward.port):
                    pass
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", forward.port)
        async with job.forward(port) as forward:
            pass  # closed before it had a turn
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", forward.port)
        for wrong in (0, 70000, "no port", "٣"):
            with pytest.raises(Rejected, match="that is no port of a job"):
                job.forward(wrong)
        async with job.forward("NO_SUCH") as forward:
            assert await forward.wait() == 1
            assert "no variable NO_SUCH" in forward.said
        async with job.forward(port) as forward:
            await job.cancel()
            assert await forward.wait() < 0, "it ends with the job"


async def _printed(client: AsyncClient, job: str) -> int:
    async for piece in client.job(job).logs(follow=False):
        return int(piece.text)
    return 0


async def test_both_are_there_without_await(nats_server: Server) -> None:
    async with running(nats_server) as (made, asking, client):
        await asking.submit("j", "python3", "-c", SERVER)
        port = await until(lambda: _printed(client, "j"), 60.0, "its port")

        def work() -> None:
            with Client(made.url, tenant="acme", prefix=made.subjects.prefix) as moorage:
                job = moorage.job("j")
                assert job.exec(["sh", "-c", "cat; exit 3"], input="x").code == 3
                with job.forward(port) as forward, socket.create_connection(("127.0.0.1", forward.port)) as peer:
                    peer.sendall(b"abc")
                    peer.shutdown(socket.SHUT_WR)
                    assert peer.recv(100) == b"cba"

        await asyncio.to_thread(work)
