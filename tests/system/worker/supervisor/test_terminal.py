"""The terminal of an attempt: who holds it, what it shows, and the end of input once it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from moorage.worker.supervisor.child import StartRefused
from moorage.worker.supervisor.client import SupervisorRefused
from moorage.worker.supervisor.command_client import RunningCommand
from moorage.worker.supervisor.commands import Attach
from moorage.worker.supervisor.terminal import LOST_S, PENDING_BYTES_MAX, RECENT_BYTES, HeldTerminal
from tests.system.worker.supervisor_rig import arguments_of, poll, rig_at, sh
from tests.waiting import skip_time

PROOFS = ["cgroup", "walk", "forked"]


class Held:
    def __init__(self, command: RunningCommand, shown: int) -> None:
        self.command = command
        self.shown = shown

    async def until(self, wanted: bytes) -> bytes:
        return await asyncio.to_thread(self._until, wanted)

    def _until(self, wanted: bytes) -> bytes:
        found = b""
        while wanted not in found:
            data = os.read(self.shown, 65536)
            assert data, f"it ended after {found[-200:]!r}"
            found += data
        return found

    def close(self) -> None:
        self.command.close()
        os.close(self.command.terminal)
        os.close(self.shown)


async def held(state: Path, key: str) -> Held:
    shown, out = os.pipe()
    try:
        return Held(await RunningCommand.begin(state, Attach(key=key), (out,)), shown)
    except BaseException:
        os.close(shown)
        raise
    finally:
        os.close(out)


@pytest.mark.parametrize("proof", PROOFS)
async def test_the_holder_types_and_sees_and_the_file_has_it_too(proof: str, tmp_path: Path) -> None:
    async with rig_at(tmp_path, *arguments_of(proof)) as rig:
        await rig.client.start(
            [sh("m", "stty -echo; echo here; read x < /dev/tty; echo got $x; exit 7", terminal=True)]
        )
        await rig.started("m")
        it = await held(rig.state, "m")
        await it.until(b"here\r\n")
        with pytest.raises(SupervisorRefused, match="another caller holds"):
            await held(rig.state, "m")
        os.write(it.command.terminal, b"this\n")
        await it.until(b"got this\r\n")
        assert await it.command.wait() == 7
        it.close()
        assert (await rig.ended("m")).exit_code == 7
        assert rig.text("m").split() == ["here", "got", "this"]


async def test_a_holder_that_comes_back_sees_the_newest_and_a_slow_one_loses_nothing(tmp_path: Path) -> None:
    async with rig_at(tmp_path) as rig:
        script = "stty -echo -opost; echo first; read x; head -c 3000000 /dev/zero | tr '\\0' x; echo end; read y"
        await rig.client.start([sh("m", script, terminal=True)])
        await rig.started("m")
        it = await held(rig.state, "m")
        await it.until(b"first\n")
        os.write(it.command.terminal, b"\n")
        await poll(lambda: rig.text("m").count("x") > PENDING_BYTES_MAX)  # and then no more is read
        assert (await it.until(b"end\n")).count(b"x") == 3_000_000
        it.command.leave()
        it.close()
        again = await _again(rig.state)
        assert len(await again.until(b"end\n")) == RECENT_BYTES
        os.write(again.command.terminal, b"\n")
        assert await again.command.wait() == 0
        again.close()


async def _again(state: Path) -> Held:
    async with asyncio.timeout(60.0):
        while True:
            with contextlib.suppress(SupervisorRefused):
                return await held(state, "m")
            await asyncio.sleep(0.01)


async def test_an_attempt_without_a_terminal_is_refused(tmp_path: Path) -> None:
    async with rig_at(tmp_path) as rig:
        await rig.client.start([sh("m", "exec sleep 600")])
        await rig.started("m")
        with pytest.raises(SupervisorRefused, match="has no terminal"):
            await held(rig.state, "m")


@pytest.mark.parametrize("how", ["nobody came", "lost", "left"])
async def test_the_end_of_input_follows_a_lost_holder_and_not_one_that_left(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer, inner = os.openpty()
    os.set_blocking(outer, False)
    shown, out = os.pipe()
    reading = await asyncio.create_subprocess_exec("cat", stdin=inner, stdout=asyncio.subprocess.PIPE)
    assert reading.stdout is not None
    try:
        it = HeldTerminal(outer)
        it.begin(lambda _: None)
        if how != "nobody came":
            it.hold(out, lambda _: None)
            with pytest.raises(StartRefused):
                it.hold(out, lambda _: None)
            it.leave(lost=how == "lost")
        if how == "left":
            skip_time(monkeypatch, 2 * LOST_S)  # a timer of the terminal's own would be due now
            os.write(outer, b"still there\n")
            assert await reading.stdout.readline() == b"still there\n", "no end of input came before this line"
            it.hold(out, lambda _: None)
            it.leave(lost=True)
        skip_time(monkeypatch, 2 * LOST_S)
        assert await asyncio.wait_for(reading.wait(), 60.0) == 0
        it.end(0)
    finally:
        if reading.returncode is None:
            reading.kill()
            await reading.wait()
        for each in (outer, inner, shown, out):
            os.close(each)
