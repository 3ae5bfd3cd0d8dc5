"""Jobs whose terminal a caller holds (`run.stdin` as `stream`), over the real server."""

from __future__ import annotations

import asyncio

import pytest

from moorage.client.command import Command
from moorage.client.errors import ClientError
from moorage.schemas.frames import Terminal
from tests.servers import Server
from tests.system.live.stack import is_alive
from tests.system.live.test_exec_live import WORKER, running
from tests.waiting import until


async def _shows(command: Command, wanted: bytes) -> bytes:
    """Read until this is shown; return all that was."""
    shown = b""
    async with asyncio.timeout(60.0):
        while wanted not in shown:
            found = await command.read()
            assert found is not None, shown
            shown += found[1]
    return shown


async def test_a_caller_holds_the_terminal_leaves_it_and_takes_it_again(nats_server: Server) -> None:
    async with running(nats_server) as (made, asking, client):
        script = "tty; echo begun; read x; echo got $x; stty size; read y; exit $y"
        await asking.submit("j", "sh", "-c", script, run={"stdin": "stream"})
        await asking.reaches("j", "RUNNING")
        async with Command.of(client._wire, "j", [], attach=True, size=Terminal(31, 97)) as command:
            assert b"/dev/pts/" in await _shows(command, b"begun")
            with pytest.raises(ClientError, match="another caller holds"):
                async with Command.of(client._wire, "j", [], attach=True):
                    pass
            await command.write(b"this\n")
            assert b"got this" in await _shows(command, b"31 97")
            await command.detach()
        await made.processes[1].kill()  # its agent: the terminal is the job's own
        await made.agent("w", "1xH100", worker=WORKER)
        await asking.workers_up(WORKER)

        async def taken() -> bool:
            try:
                async with asyncio.timeout(30.0), Command.of(client._wire, "j", [], attach=True) as again:
                    assert b"begun" in await _shows(again, b"31 97"), "the newest bytes come first"
                    await again.write(b"7\n")
                    while await again.read() is not None:
                        pass
                    assert await again.wait() == 7
                    return True
            except ClientError as error:
                if error.code not in ("failed-precondition", "worker-lost"):  # the order went to the killed agent
                    raise
                return False

        await until(taken, 60.0, "the terminal is taken again")
        await asking.reaches("j", "FAILED")
        shown = await asking.show("j")
        assert next(row["why"] for row in shown["changes"] if row["state"] == "EXEC") == "the terminal is held"


async def test_what_has_no_terminal_is_refused(nats_server: Server) -> None:
    async with running(nats_server) as (_, asking, client):
        await asking.submit("j", "sleep", "600")
        await asking.reaches("j", "RUNNING")
        with pytest.raises(ClientError, match="has no terminal to hold: its standard input is none"):
            async with Command.of(client._wire, "j", [], attach=True):
                pass


async def test_a_cancelled_job_ends_its_terminal(nats_server: Server) -> None:
    async with running(nats_server) as (_, asking, client):
        await asking.submit("j", "sh", "-c", "echo $$; exec cat", run={"stdin": "stream"})
        await asking.reaches("j", "RUNNING")
        async with Command.of(client._wire, "j", [], attach=True) as command:
            pid = int((await _shows(command, b"\n")).split()[0])
            await asking.api("cancel", {"job": "j"})
            while await command.read() is not None:
                pass
            assert await command.wait() == -15
            await asking.reaches("j", "CANCELLED")
            assert not is_alive(pid)
