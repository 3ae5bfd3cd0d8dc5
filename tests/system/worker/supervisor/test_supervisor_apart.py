"""Supervisors beside each other, and when they end: two deployments of one host, idle ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from moorage.system.proctree import STATE_MARK, children, read_environ
from moorage.worker.drivers.supervisor_link import SupervisorLink
from moorage.worker.supervisor.client import Supervised, SupervisorUnavailable
from moorage.worker.supervisor.journal import read_journal
from moorage.worker.supervisor.protocol import JOURNAL_NAME, EndAttempt, StartAttempt
from moorage.worker.supervisor.state_folder import state_mark
from tests.system.worker.pushed_supervisor import pushed_rig, started
from tests.system.worker.supervisor_rig import Rig, lives, poll, rig_at, run, sh
from tests.waiting import until

WAIT_TURNS = 3000
ALIKE = {"MOORAGE_TENANT": f"alike-{os.getpid()}", "MOORAGE_JOB": "a", "MOORAGE_FENCE": "7", "PATH": "/usr/bin:/bin"}


class Deaf:
    """A listener of a link to whom nothing matters."""

    def on_event(self, key: str, event: object) -> None: ...
    def on_events_over(self) -> None: ...
    def on_replaced(self) -> None: ...
    def on_listed(self, listed: object) -> None: ...
    def on_start_refused(self, keys: object, why: str) -> None: ...


def sleeper(key: str = "a") -> StartAttempt:
    """An attempt whose marks are the same in every deployment, and what it starts leaves its session and its parent."""
    script = "setsid sleep 600 & echo $!; sleep 600"
    return StartAttempt(key=key, argv=("/bin/sh", "-c", script), env=dict(ALIKE))


async def settled(rig: Rig) -> tuple[int, ...]:
    """Wait until nothing of a former attempt is left to kill; the pids of which nobody can tell whose they are."""
    for _ in range(WAIT_TURNS):
        listed = await rig.client.list()
        if listed.ended:
            assert (listed.ended[0].reason, listed.ended[0].proof) == ("supervisor-died", "scan")
            return ()
        if any("cannot be read" in unproven.message for unproven in listed.unproven):
            return listed.unproven[0].pids  # of others on this machine: they carry no environment
        await asyncio.sleep(0.02)
    raise AssertionError((await rig.client.list()).unproven)


@pytest.mark.slow
async def test_another_deployments_attempts_of_the_same_name_are_let_be(tmp_path: Path) -> None:
    """Two supervisors without cgroups, attempts alike in tenant, job and fence: the next one of the first clears its
    own and nothing of the second's."""
    async with rig_at(tmp_path / "one", "--no-cgroup") as one, rig_at(tmp_path / "two", "--no-cgroup") as two:
        for rig in (one, two):
            await rig.client.start([sleeper()])
            await rig.started("a")
        ours, theirs = int((await one.line("a"))[0]), int((await two.line("a"))[0])
        their_main = two.starts()["a"].pid
        assert read_environ(ours) != read_environ(theirs), "the mark of the folder is in them"
        os.kill(one.client.identity.pid, signal.SIGKILL)
        await one.client.wait_gone()
        one.events.clear()
        await one.connect()
        unclear = await settled(one)
        assert not lives(ours)
        assert not {theirs, their_main, *children(two.client.identity.pid)} & set(unclear)
        assert lives(theirs)
        assert lives(their_main)


def test_the_mark_stays_with_the_folder_and_a_broken_one_is_replaced(tmp_path: Path) -> None:
    first = state_mark(tmp_path)
    assert len(first) == 32
    assert state_mark(tmp_path) == first
    (tmp_path / "mark").write_bytes(b"\xff not a mark")
    assert state_mark(tmp_path) not in (first, "")


async def test_an_attempt_cannot_choose_another_mark(tmp_path: Path) -> None:
    async with rig_at(tmp_path / "state") as rig:
        attempt = StartAttempt(key="a", argv=("/usr/bin/env",), env={**ALIKE, STATE_MARK: "mine"})
        await rig.run(attempt)
        assert f"{STATE_MARK}={state_mark(rig.state)}" in rig.text("a").splitlines()


# ------------------------------------------------------------------------------------------------ when one ends


async def gone(pid: int) -> None:
    await poll(lambda: not lives(pid))


async def is_met(keys: Callable[[], Awaitable[set[str]]], wanted: set[str]) -> bool:
    return await keys() == wanted


@pytest.mark.slow
async def test_a_supervisor_without_agent_and_attempt_ends_after_a_while(tmp_path: Path) -> None:
    clock = await started(tmp_path, "--linger", "100")
    supervised = await Supervised.connect(tmp_path, spawn_if_absent=False)
    pid = supervised.identity.pid
    await supervised.start([sh("a", "exit 0"), sh("b", "sleep 600")])
    await poll(lambda: "b" in read_journal(tmp_path / JOURNAL_NAME))
    supervised.close()
    await clock.push(1000)
    assert lives(pid), "it has an attempt"
    again = await Supervised.connect(tmp_path, spawn_if_absent=False)
    listed = await again.list()
    assert "b" in {event.key for event in listed.running}

    async def ended() -> set[str]:
        return {event.key for event in (await again.list()).ended}

    await again.end([EndAttempt(key="b", grace_s=0.0)])
    await until(lambda: is_met(ended, {"a", "b"}), what="the ends of both")
    await clock.push(1000)
    assert lives(pid), "it has an agent"
    again.close()
    await clock.push(99)
    assert lives(pid), "its agent may be on its way back"
    back = await Supervised.connect(tmp_path, spawn_if_absent=False)
    await clock.push(1000)
    assert lives(pid), "its agent is back"
    back.close()
    await clock.push(100)
    await gone(pid)
    # what nobody took is told by the next one
    last = await Supervised.connect(tmp_path)
    assert {event.key for event in (await last.list()).ended} == {"a", "b"}
    await last.shutdown(0)


def test_who_goes_while_its_supervisor_starts_leaves_none_that_comes_up_alone(tmp_path: Path) -> None:
    def starting() -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.fsencode(tmp_path) in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    async def main() -> None:
        connecting = asyncio.create_task(Supervised.connect(tmp_path))
        await poll(lambda: bool(starting()))
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await poll(lambda: not starting())  # a copy that it had begun to fork ends behind it
        with pytest.raises(SupervisorUnavailable):
            await Supervised.connect(tmp_path, spawn_if_absent=False)

    run(main())


async def test_a_link_that_closes_takes_an_idle_supervisor_along_and_no_busy_one(tmp_path: Path) -> None:
    link = SupervisorLink(tmp_path)
    await link.open("w", Deaf())
    idle = await Supervised.connect(tmp_path, spawn_if_absent=False)
    pid = idle.identity.pid
    idle.close()
    await link.close("w")
    await gone(pid)

    link = SupervisorLink(tmp_path)
    await link.open("w", Deaf())
    link.start([sh("w|t/a/0/1/1", "sleep 600")])
    await poll(lambda: any(left.pid for left in read_journal(tmp_path / JOURNAL_NAME).values()))
    await link.close("w")
    busy = await Supervised.connect(tmp_path, spawn_if_absent=False)
    assert busy.identity.pid != pid
    await busy.shutdown(0)


# ------------------------------------------------------------------------------------------------------ notices

SAVES = "trap 'echo saved' USR1; trap 'echo told; exit 0' TERM; echo ready; while :; do sleep 0.02; done"


@pytest.mark.slow
async def test_a_notice_is_the_checkpoint_signal_then_the_ask_to_end(tmp_path: Path) -> None:
    async with pushed_rig(tmp_path / "state") as (rig, clock):
        await rig.client.start([sh("a", SAVES, checkpoint_signal="SIGUSR1", checkpoint_before_s=60.0)])
        await rig.line("a")
        await rig.client.end([EndAttempt(key="a", grace_s=600.0, why="drained", notice_s=600.0)])
        assert (await rig.line("a", 2))[1] == "saved"
        await clock.push(500)
        assert (await rig.client.list()).ended == (), "the notice is not over"
        await clock.push(100)
        ended = await rig.ended("a")
        assert (ended.reason, ended.why, ended.exit_code) == ("end", "drained", 0)
        assert rig.text("a").split() == ["ready", "saved", "told"]


async def test_a_second_word_ends_a_notice_sooner_and_never_later(tmp_path: Path) -> None:
    async with rig_at(tmp_path / "state") as rig:
        await rig.client.start([sh("a", SAVES, checkpoint_signal="SIGUSR1", checkpoint_before_s=60.0)])
        await rig.line("a")
        await rig.client.end([EndAttempt(key="a", grace_s=5.0, notice_s=600.0)])
        await rig.line("a", 2)
        await rig.client.end([EndAttempt(key="a", grace_s=5.0, notice_s=900.0)])
        await rig.client.end([EndAttempt(key="a", grace_s=5.0)])
        await rig.ended("a")
        assert rig.text("a").split() == ["ready", "saved", "told"], "told to save itself once"


async def test_without_a_checkpoint_signal_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    async with rig_at(tmp_path / "state") as rig:
        await rig.client.start([sh("a", SAVES)])
        await rig.line("a")
        await rig.client.end([EndAttempt(key="a", grace_s=5.0, notice_s=600.0)])
        await rig.ended("a")
        assert rig.text("a").split() == ["ready", "told"]
