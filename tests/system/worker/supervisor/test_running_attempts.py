"""What is changed of an attempt while it runs: its time limit, and signals for its processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from moorage.worker.supervisor.client import SupervisorRefused
from tests.system.worker.pushed_supervisor import pushed_rig
from tests.system.worker.supervisor_rig import Rig, arguments_of, sh, with_rig

UP = "trap 'echo saved' USR1; trap 'echo ending; exit 0' TERM; echo up; while :; do sleep 0.01; done"


async def test_a_longer_limit_is_for_what_runs_and_the_checkpoint_signal_comes_before_it(tmp_path: Path) -> None:
    async with pushed_rig(tmp_path / "state", *arguments_of("walk")) as (rig, clock):
        attempt = sh("j", UP, timeout_s=900.0, grace_s=600.0, checkpoint_signal="SIGUSR1", checkpoint_before_s=100.0)
        await rig.client.start([attempt])
        await rig.line("j")
        await clock.push(300)
        await rig.client.relimit("j", 2_000.0)
        await rig.client.relimit("nosuch", 2_000.0)
        await clock.push(1_500)
        assert (await rig.client.list()).ended == ()
        assert rig.text("j").split() == ["up"], "it is not due to be told yet"
        await clock.push(120)
        await rig.line("j", 2)
        await clock.push(100)
        ended = await rig.ended("j")
        assert (ended.reason, ended.exit_code) == ("timeout", 0)
        assert rig.text("j").split() == ["up", "saved", "ending"]


def test_a_shorter_limit_that_is_over_ends_it_at_once(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.client.start([sh("j", UP, timeout_s=900.0)])
        await rig.line("j")
        await rig.client.relimit("j", 0.001)
        ended = await rig.ended("j")
        assert (ended.reason, ended.exit_code) == ("timeout", 0)
        await rig.client.relimit("j", 900.0)

    with_rig(tmp_path, (), scenario)


def test_a_signal_goes_to_those_that_handle_it_and_ends_none(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        child = "sh -c 'trap \"echo child\" USR1; echo up; while :; do sleep 0.01; done'"
        await rig.client.start([sh("none", "echo up; exec sleep 600"), sh("child", f"{child}; true")])
        await rig.line("none")
        await rig.line("child")
        for key in ("none", "child", "nosuch"):
            await rig.client.send_signal(key, "SIGUSR1")
        await rig.line("child", 2)
        assert rig.text("child").split() == ["up", "child"]
        assert (await rig.client.list()).ended == ()
        with pytest.raises(SupervisorRefused, match="no process can take SIGKILL"):
            await rig.client.send_signal("none", signal.SIGKILL.name)

    with_rig(tmp_path, (), scenario)
