"""The signal that tells a job to save itself: to whom, when, once, and never to the harm of anybody."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from moorage.worker.supervisor.checkpoint import AGAIN_S
from moorage.worker.supervisor.client import SupervisorRefused
from moorage.worker.supervisor.protocol import EndAttempt, StartAttempt
from tests.system.worker.pushed_supervisor import pushed_rig
from tests.system.worker.supervisor_rig import Rig, arguments_of, poll, rigged, sh, with_rig


@pytest.fixture(params=["cgroup", "walk"])
def arguments(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return arguments_of(request.param)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"checkpoint_signal": "SIGNONE", "checkpoint_before_s": 1.0}, "no such signal: SIGNONE"),
        ({"checkpoint_signal": "SIGKILL", "checkpoint_before_s": 1.0}, "no process can take SIGKILL"),
        ({"checkpoint_signal": "SIGUSR1"}, "needs checkpoint_before_s"),
        ({"timeout_s": float("nan")}, "timeout_s must be a duration"),
    ],
)
def test_a_container_whose_end_cannot_be_is_refused(tmp_path: Path, fields: dict[str, Any], why: str) -> None:
    async def scenario(rig: Rig) -> None:
        with pytest.raises(SupervisorRefused, match=why):
            await rig.client.contain(StartAttempt(key="k", argv=(), env={}, **fields), "0" * 64)
        assert (await rig.client.list()).living == []

    with_rig(tmp_path, (), scenario)


@pytest.mark.slow
async def test_a_checkpoint_signal_comes_before_the_timeout(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    async with pushed_rig(tmp_path / "state", *arguments) as (rig, clock):
        script = "trap 'echo saved' USR1; trap 'echo ending; exit 0' TERM; echo up; while :; do sleep 0.01; done"
        attempt = sh(
            "j", script, timeout_s=900.0, grace_s=600.0, checkpoint_signal="SIGUSR1", checkpoint_before_s=600.0
        )
        await rig.client.start([attempt])
        await rig.line("j")
        await clock.push(200)
        assert rig.text("j").split() == ["up"]
        await clock.push(200)
        await rig.line("j", 2)
        await clock.push(500)
        ended = await rig.ended("j")
        assert (ended.reason, ended.exit_code, ended.signal) == ("timeout", 0, None)
        assert rig.text("j").split() == ["up", "saved", "ending"]


@pytest.mark.slow
async def test_a_checkpoint_signal_waits_until_somebody_takes_it_and_comes_once(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Due at once, before the program has its handler: it must not be killed by it, nor be told twice."""
    script = (
        "echo up; while [ ! -e go ]; do sleep 0.01; done; trap 'echo saved' USR1; echo ready; "
        "while [ ! -e stop ]; do sleep 0.01; done; exit 3"
    )
    attempt = sh(
        "j", script, cwd=str(tmp_path), ends_in_s=600.0, checkpoint_signal="SIGUSR1", checkpoint_before_s=600.0
    )
    async with pushed_rig(tmp_path / "state", *arguments) as (rig, clock):
        await rig.client.start([attempt])
        await rig.line("j")
        await clock.push(AGAIN_S, 20)
        assert (await rig.client.list()).ended == (), "it looked twenty times, and nobody takes it"
        (tmp_path / "go").touch()
        await rig.line("j", 3)
        rig.client.close()
        await rig.connect()  # the agent restarts: the timers are the supervisor's
        await clock.push(AGAIN_S, 20)  # as many looks more, if it looked on
        (tmp_path / "stop").touch()
        await rig.client.start([attempt])  # reported again, not started again
        assert (await rig.ended("j")).exit_code == 3
        assert rig.text("j").split() == ["up", "ready", "saved"]


@pytest.mark.slow
@rigged
async def test_a_checkpoint_signal_goes_to_the_topmost_that_take_it_and_kills_nobody(rig: Rig, tmp_path: Path) -> None:
    """A shell that starts two ranks: both are told, their own helpers are not, the shell and `sleep` live on."""
    program = "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: print('helper', flush=True)); "
    program += "open('helper-up', 'w'); time.sleep(600)"
    helper = f"{sys.executable} -c {shlex.quote(program)} & "
    rank = "while [ ! -e helper-up ]; do sleep 0.01; done; trap 'echo saved $N' USR1; echo up; "
    rank += "while [ ! -e stop ]; do sleep 0.01; done"
    script = f"N=1 /bin/sh -c {shlex.quote(helper + rank)} & N=2 /bin/sh -c {shlex.quote(rank)} & wait; exit 5"
    attempt = sh("j", script, cwd=str(tmp_path), checkpoint_signal="SIGUSR1", checkpoint_before_s=600.0)
    await rig.client.start([attempt])
    await rig.line("j", 2)  # both take it
    await rig.client.end([EndAttempt(key="j", grace_s=600.0, notice_s=600.0)])
    await poll(lambda: rig.text("j").count("saved") == 2)
    (tmp_path / "stop").touch()
    ended = await rig.ended("j")
    assert (ended.reason, ended.exit_code) == ("end", 5)
    assert sorted(rig.text("j").split()) == ["1", "2", "saved", "saved", "up", "up"]
