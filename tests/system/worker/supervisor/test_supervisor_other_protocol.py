"""A supervisor of another release: which version it speaks, how it is replaced, and what becomes of its attempts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from moorage.schemas.errors import UPGRADED
from moorage.system.framing import framed
from moorage.worker.drivers.supervisor_link import SupervisorLink, SupervisorMissing
from moorage.worker.supervisor import client
from moorage.worker.supervisor.client import OtherProtocol, Supervised, SupervisorUnavailable
from moorage.worker.supervisor.protocol import (
    FRAME_BYTES_MAX,
    PROTOCOL,
    SHUTS_DOWN,
    Hello,
    Shutdown,
    Started,
    decode_request,
    first_of,
)
from moorage.worker.supervisor.protocol import _encoder as encoder
from tests.system.worker.supervisor_rig import lives, poll, rig_at, run, sh, start_other

OTHER = PROTOCOL + 1
PAGE = Path(__file__).parents[4] / "docs" / "upgrade.md"
#: as the first release wrote it: these two must be understood by every other release
HELLO = {"type": "hello", "protocol": 1, "pid": 7, "boot_id": "b", "start_ticks": 3, "cgroup": None}
SHUTDOWN = {"type": "shutdown", "n": 1, "grace_s": 2.5, "why": "upgraded"}


@contextlib.asynccontextmanager
async def other_at(state: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Supervised]:
    """A supervisor of another release, and a connection of that release to it."""
    await start_other(state, OTHER)
    with monkeypatch.context() as release:
        release.setattr(client, "PROTOCOL", OTHER)
        theirs = await Supervised.connect(state, spawn_if_absent=False)
    theirs.protocol = PROTOCOL  # this connection goes on as that release would: it reads all frames
    try:
        yield theirs
    finally:
        theirs.close()
        with contextlib.suppress(SupervisorUnavailable), monkeypatch.context() as release:
            release.setattr(client, "PROTOCOL", OTHER)
            await (await Supervised.connect(state, spawn_if_absent=False)).shutdown(0.0)


def test_the_first_frame_and_the_end_are_read_as_the_first_release_wrote_them() -> None:
    frame = msgspec.msgpack.encode([HELLO | {"of_later": 1}, {"type": "of-later"}])
    hello = first_of(frame)
    assert isinstance(hello, Hello)
    assert (hello.protocol, hello.pid) == (1, 7)
    shutdown = Shutdown(n=1, grace_s=2.5, why="upgraded")
    assert msgspec.msgpack.decode(encoder.encode(shutdown)) == SHUTDOWN
    assert decode_request(msgspec.msgpack.encode(SHUTDOWN | {"of_later": 1})) == shutdown
    assert decode_request(msgspec.msgpack.encode({"type": "shutdown", "n": 1, "grace_s": 0.0})) == Shutdown(
        n=1, grace_s=0.0, why=SHUTS_DOWN
    )
    invalids: tuple[object, ...] = ([], {}, [[]], [{"type": "done", "n": 1}])
    for invalid in invalids:
        with pytest.raises((msgspec.MsgspecError, ValueError)):
            first_of(msgspec.msgpack.encode(invalid))


def test_each_number_has_its_line_in_the_page_about_upgrades() -> None:
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, PROTOCOL + 1))
    assert all("drain the host first" in before for _, before in rows[1:])


async def test_another_protocol_is_refused_with_both_numbers_and_its_attempts_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with other_at(tmp_path, monkeypatch) as theirs:
        await theirs.start([sh("a", "sleep 600")])
        (started,) = await theirs.next_events()
        assert isinstance(started, Started)
        for spawns in (False, True):
            with pytest.raises(OtherProtocol, match=rf"protocol {OTHER}, this agent {PROTOCOL}"):
                await Supervised.connect(tmp_path, spawns)
        assert (await theirs.list()).running == (started,)
        assert lives(started.pid)


@pytest.mark.slow
def test_who_replaces_another_protocol_has_its_attempts_ended_with_their_own_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = "trap 'touch saved; exit 0' TERM; touch ready; while :; do sleep 0.02; done"
    deaf = "trap '' TERM; touch deaf; while :; do sleep 0.02; done"

    async def main() -> None:
        async with other_at(tmp_path / "s", monkeypatch) as theirs:
            theirs_pid = theirs.identity.pid
            await theirs.start([sh("saves", saves, cwd=str(tmp_path), grace_s=30.0)])
            await theirs.start([sh("deaf", deaf, cwd=str(tmp_path), grace_s=0.2)])
            await poll(lambda: (tmp_path / "ready").exists() and (tmp_path / "deaf").exists())
            ours = await Supervised.connect(tmp_path / "s", replaces_other=True)
            assert ours.protocol == PROTOCOL
            assert not lives(theirs_pid)
            listed = await ours.list()
            ends = {each.key: (each.reason, each.why, each.exit_code, each.signal) for each in listed.ended}
            assert ends == {"saves": ("end", UPGRADED, 0, None), "deaf": ("end", UPGRADED, None, 9)}
            assert not listed.living
            assert (tmp_path / "saved").exists()
            await ours.shutdown(0.0)

    run(main())


async def test_a_start_replaces_another_protocol_and_a_link_that_reconnects_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with other_at(tmp_path, monkeypatch) as theirs:
        link = SupervisorLink(tmp_path)
        with pytest.raises(SupervisorMissing, match=f"speaks protocol {OTHER}"):
            await link._connect()
        assert lives(theirs.identity.pid)
        await link.end_others(lambda owner: True)
        assert not lives(theirs.identity.pid)
        async with rig_at(tmp_path) as rig:
            assert rig.client.protocol == PROTOCOL
    assert [each for each in caplog.messages if "its jobs end, each with its grace" in each]


def test_one_that_does_not_end_is_named_with_what_it_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that ends while the process lives: the agent does not wait for it for ever."""
    monkeypatch.setattr(client, "CONNECT_S", 0.2)

    async def main() -> None:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            hello = msgspec.msgpack.encode([HELLO | {"protocol": OTHER, "pid": os.getpid()}])
            writer.write(framed(hello, FRAME_BYTES_MAX))
            await reader.read(1)
            writer.close()

        server = await asyncio.start_unix_server(greet, tmp_path / "supervisor.sock")
        async with server:
            with pytest.raises(OtherProtocol, match=f"pid {os.getpid()}"):
                await Supervised.connect(tmp_path, replaces_other=True)

    run(main())
