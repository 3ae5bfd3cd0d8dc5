"""The embedded server: starts, is found, is walled, dies when told, and says clearly why it cannot start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from moorage.bus.connection import connect
from moorage.bus.embedded import BINARY_VARIABLE, EmbeddedServer, _prepare, _Running, find_binary
from moorage.bus.errors import NotAuthorized, ServerFailed, ServerMissing, ServerRunning
from moorage.bus.jetstream import Ack, JetStream
from tests.waiting import until

LEDGER = {"name": "LEDGER", "subjects": ["ledger.>"], "storage": "file", "discard": "new", "allow_direct": True}


async def test_ports_passwords_and_modes(fresh_server: EmbeddedServer) -> None:
    folder = fresh_server.data_dir
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for secret in ("ledger-password", "local-password", "nats.conf"):
        assert stat.S_IMODE((folder / secret).stat().st_mode) == 0o600
    password = (folder / "ledger-password").read_text()
    assert password in fresh_server.ledger_url
    assert password not in repr(fresh_server)
    assert "sync_interval: always" in (folder / "nats.conf").read_text()


async def test_a_second_server_on_the_folder_is_refused_and_the_first_can_be_attached(
    fresh_server: EmbeddedServer,
) -> None:
    with pytest.raises(ServerRunning) as raised:
        await EmbeddedServer.start(fresh_server.data_dir)
    assert raised.value.pid == fresh_server.pid
    said = fresh_server.data_dir / "server.json"
    good = said.read_bytes()
    said.write_bytes(b'{"url":"\xff"}')  # whatever stands there, the folder is in use
    with pytest.raises(ServerRunning):
        await EmbeddedServer.start(fresh_server.data_dir)
    assert EmbeddedServer.attach(fresh_server.data_dir) is None
    said.write_bytes(good)
    attached = EmbeddedServer.attach(fresh_server.data_dir)
    assert attached is not None
    assert (attached.pid, attached.url) == (fresh_server.pid, fresh_server.url)
    await attached.stop()
    assert EmbeddedServer.attach(fresh_server.data_dir) is None


async def test_a_server_that_starts_is_not_mistaken_for_the_one_before(fresh_server: EmbeddedServer) -> None:
    await fresh_server.kill()
    lock = _prepare(fresh_server.data_dir)
    assert EmbeddedServer.attach(fresh_server.data_dir) is None
    os.close(lock)


async def test_the_pid_of_a_server_that_is_gone_gets_no_signal(fresh_server: EmbeddedServer) -> None:
    with subprocess.Popen(["sleep", "600"]) as other:  # noqa: ASYNC220
        former = _Running(other.pid, fresh_server.port, anonymous=True)
        await EmbeddedServer(fresh_server.data_dir, former, None).stop()
        assert other.poll() is None
        other.kill()


async def test_restart_on_the_folder_keeps_streams_and_passwords(fresh_server: EmbeddedServer) -> None:
    ledger_password = fresh_server.ledger_url
    async with await connect(fresh_server.ledger_url, "test") as ledger:
        js = JetStream(ledger)
        await js.ensure_stream(LEDGER)
        assert await js.append("ledger.record", b"kept") == Ack("LEDGER", 1)
    await fresh_server.kill()
    again = await EmbeddedServer.start(fresh_server.data_dir, port=fresh_server.port)
    assert again.ledger_url == ledger_password
    async with await connect(again.ledger_url, "test") as ledger:
        message = await JetStream(ledger).get_message("LEDGER", 1)
        assert message is not None
        assert message.data == b"kept"
    await again.stop()
    await again.stop()


async def test_a_taken_port_is_named_from_the_servers_own_log(fresh_data_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServerFailed) as raised:
            await EmbeddedServer.start(fresh_data_dir, port=taken.getsockname()[1])
    assert "address already in use" in raised.value.reason
    assert raised.value.log_tail
    assert EmbeddedServer.attach(fresh_data_dir) is None


async def test_an_unusable_folder_is_one_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerFailed):
        await EmbeddedServer.start(tmp_path / "file" / "nats")
    folder = tmp_path / "nats"
    folder.mkdir()
    (folder / "jetstream").write_text("no folder")
    with pytest.raises(ServerFailed) as raised:
        await EmbeddedServer.start(folder)
    assert "jetstream" in raised.value.log_tail.lower()


async def test_without_anonymous_clients_a_password_is_needed(fresh_data_dir: Path) -> None:
    server = await EmbeddedServer.start(fresh_data_dir, anonymous=False)
    try:
        async with await connect(server.url, "with password") as connection:
            assert connection.is_connected
        with pytest.raises(NotAuthorized):
            await connect(f"nats://127.0.0.1:{server.port}", "without")
    finally:
        await server.stop()


def test_the_binary_is_found_by_variable_else_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    found = find_binary()
    monkeypatch.setenv(BINARY_VARIABLE, found)
    assert find_binary() == found
    monkeypatch.setenv(BINARY_VARIABLE, "/nowhere/nats-server")
    with pytest.raises(ServerMissing):
        find_binary()


_PARENT = """
import asyncio, sys
from moorage.bus.embedded import EmbeddedServer
async def main():
    await EmbeddedServer.start(sys.argv[1], die_with_parent=sys.argv[2] == "dies")
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("fate", ["dies", "lives"])
async def test_the_server_dies_with_its_parent_only_if_asked(fresh_data_dir: Path, fate: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", _PARENT, str(fresh_data_dir), fate], stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    if fate == "dies":
        await until(lambda: EmbeddedServer.attach(fresh_data_dir) is None, what="server gone")
        return
    server = EmbeddedServer.attach(fresh_data_dir)
    assert server is not None
    try:
        async with await connect(server.url, "test") as connection:
            assert connection.is_connected
    finally:
        await server.stop()
    assert EmbeddedServer.attach(fresh_data_dir) is None


@pytest.mark.parametrize(
    ("processors", "said", "expected"),
    [(1, None, "1"), (2, None, "1"), (3, None, None), (2, "2", "2"), (64, "4", "4")],
)
async def test_on_a_small_machine_the_server_runs_on_one_processor_at_a_time(
    fresh_data_dir: Path, monkeypatch: pytest.MonkeyPatch, processors: int, said: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    monkeypatch.delenv("GOMAXPROCS", raising=False)
    if said is not None:
        monkeypatch.setenv("GOMAXPROCS", said)
    server = await EmbeddedServer.start(fresh_data_dir)
    try:
        environment = Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
        found = {name: value for name, _, value in (each.decode().partition("=") for each in environment)}
        assert found.get("GOMAXPROCS") == expected
        assert found["PATH"] == os.environ["PATH"]
    finally:
        await server.stop()


async def test_the_users_account_cannot_reach_the_ledger_even_by_reflection(fresh_server: EmbeddedServer) -> None:
    async with (
        await connect(fresh_server.ledger_url, "scheduler") as ledger,
        await connect(fresh_server.url, "submitter") as users,
    ):
        inside, outside = JetStream(ledger), JetStream(users)
        await inside.ensure_stream(LEDGER)
        first = await inside.append("ledger.epoch", b"epoch 1")
        assert first == Ack("LEDGER", 1)
        heard: list[str] = []
        await ledger.subscribe("ledger.>", lambda delivery: heard.append(delivery.subject))
        # Directly: there is no such stream in this account.
        refused = await outside.append("ledger.epoch", b"junk")
        assert not isinstance(refused, Ack)
        # By reflection: a PubAck of a stream one may write to, sent to the ledger's subject as its reply.
        await outside.ensure_stream({"name": "REQUESTS", "subjects": ["request.>"], "storage": "file"})
        await users.send([("request.a", b"legal", "ledger.epoch") for _ in range(100)])
        await users.flush()
        await until(lambda: _messages(outside, "REQUESTS", 100), what="the requests stored")
        await ledger.flush()
        assert (await inside.stream_info("LEDGER")).last_seq == 1
        assert heard == []


async def _messages(js: JetStream, stream: str, count: int) -> bool:
    return (await js.stream_info(stream)).messages == count


def test_two_loops_can_use_one_server(nats_server: EmbeddedServer) -> None:
    async def touch() -> str:
        async with await connect(nats_server.url, "test") as connection:
            return connection.server_version

    assert asyncio.run(touch()) == asyncio.run(touch()) != ""
