"""Processes that leave the cgroup of their attempt, or hide from a look for it: they end with it all the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from moorage.worker.supervisor.protocol import EndAttempt
from tests.system.worker.supervisor_rig import arguments_of, lives, poll, rig_at, sh

#: a process that hides its session and its environment from a look for the attempt
HIDDEN = "env -i setsid sh -c 'echo $$; exec sleep 600' & "
#: until a file has a line
WAITS = "until [ -s {0} ]; do sleep 0.05; done"


async def test_what_left_its_cgroup_is_ended_and_the_orphan_of_a_neighbour_is_not(tmp_path: Path) -> None:
    async with rig_at(tmp_path / "s", *arguments_of("cgroup")) as rig:
        assert rig.client.cgroup is not None
        outside = Path(rig.client.cgroup).parent / "cgroup.procs"
        path, go = tmp_path / "left", tmp_path / "go"
        leaves = f"(echo $$ > {outside}; {HIDDEN} :) > {path}; {WAITS.format(path)}; {WAITS.format(go)}; exit 3"
        await rig.client.start([sh("k", leaves)])
        await rig.started("k")
        # an orphan that is younger than the attempt that ends
        await rig.client.start([sh("neighbour", f"({HIDDEN}) ; sleep 600")])
        [spared] = map(int, await rig.line("neighbour"))
        go.write_text("now")
        ended = await rig.ended("k")
        left = int(path.read_text())
        assert (ended.exit_code, ended.proof) == (3, "cgroup")
        assert not lives(left), "it is over when its end is told"
        assert lives(spared), "what stayed in the cgroup of its attempt is that attempt's"
        await rig.client.end([EndAttempt(key="neighbour", grace_s=0.0)])
        assert (await rig.ended("neighbour")).proof == "cgroup"


@pytest.mark.slow
async def test_the_next_supervisor_ends_what_hides_below_a_marked_process(tmp_path: Path) -> None:
    async with rig_at(tmp_path / "s", *arguments_of("walk")) as rig:
        (tmp_path / "parent").write_text(f"{HIDDEN} wait")
        await rig.client.start([sh("k", f"setsid sh {tmp_path}/parent & wait")])
        [hidden] = map(int, await rig.line("k"))
        os.kill(rig.client.identity.pid, signal.SIGKILL)
        rig.client.close()
        await poll(lambda: not lives(rig.client.identity.pid))
        assert lives(hidden)
        await rig.connect()
        rig.events += (await rig.client.list()).ended
        ended = await rig.ended("k")
        assert (ended.reason, ended.proof) == ("supervisor-died", "scan")
        assert not lives(hidden)
