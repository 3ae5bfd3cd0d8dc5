"""The process that waits for the next start: it serves one member, costs none when it dies, and outlives nobody."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from moorage.worker.proctree import children
from moorage.worker.supervisor import launcher
from moorage.worker.supervisor.spare import STRINGS_MAX
from tests.disk import fill, mount_small, unmount
from tests.worker.supervisor_rig import SHELL_PATH, Rig, arguments_of, lives, poll, rig_at, run, sh, with_rig

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def spares(rig: Rig) -> list[int]:
    """A spare shares the launcher's memory, and so its arguments, but has closed the channel to the supervisor."""
    found = []
    for pid in children(rig.client.identity.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends just now
            is_ours = b"/launcher" in Path(f"/proc/{pid}/cmdline").read_bytes()
            if is_ours and not os.path.lexists(f"/proc/{pid}/fd/{launcher.CHANNEL}") and lives(pid):
                found.append(pid)
    return found


async def spare_of(rig: Rig) -> int:
    await poll(lambda: len(spares(rig)) == 1)
    return spares(rig)[0]


def with_spare(tmp_path: Path, scenario: Callable[[Rig, int], Awaitable[None]]) -> None:
    async def main(rig: Rig) -> None:
        await scenario(rig, await spare_of(rig))

    with_rig(tmp_path, arguments_of("cgroup"), main)


def test_a_start_that_comes_alone_is_the_spares_and_the_next_one_gets_another(tmp_path: Path) -> None:
    async def scenario(rig: Rig, spare: int) -> None:
        await rig.client.start([sh("a", "echo $$; echo err >&2; ps -o sid= -p $$; exit 3")])
        assert (await rig.started("a")).pid == spare
        assert (await rig.ended("a")).exit_code == 3
        assert [int(line) for line in rig.text("a").split()] == [spare, spare], "a session of its own"
        other = await spare_of(rig)
        assert other != spare
        await rig.client.start([sh("b", "exec sleep 600"), sh("c", "true")])
        assert (await rig.started("b")).pid != other, "several at once are the launcher's: they cost less that way"
        assert (await rig.ended("c")).exit_code == 0
        await rig.client.start([sh("d", "true")])
        assert (await rig.started("d")).pid == other
        assert (await rig.ended("d")).proof == "cgroup"

    with_spare(tmp_path, scenario)


def test_no_spare_where_an_end_is_proven_by_when_a_process_began(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        assert (await rig.run(sh("a", "true"))).exit_code == 0
        await rig.client.ping()
        assert spares(rig) == []

    with_rig(tmp_path, arguments_of("walk"), scenario)


@needs_root
def test_another_users_child_and_a_large_one_are_the_launchers(tmp_path: Path) -> None:
    """A child of another user may not share memory with what starts the others."""

    async def scenario(rig: Rig, spare: int) -> None:
        await rig.client.start([sh("a", "true", user=65534)])
        await rig.ended("a")
        assert rig.starts()["a"].pid != spare
        env = {f"V{number}": "x" for number in range(STRINGS_MAX)}
        await rig.client.start([sh("b", "exit $V1000", env={"PATH": SHELL_PATH, **env, "V1000": "4"})])
        assert (await rig.ended("b")).exit_code == 4
        await rig.client.start([sh("c", "exit ${#LONG}", env={"PATH": SHELL_PATH, "LONG": "x" * 50_000, "X": "1"})])
        assert (await rig.ended("c")).exit_code == 50_000 % 256
        assert spare not in (rig.starts()["b"].pid, rig.starts()["c"].pid)
        assert spares(rig) == [spare]

    with_spare(tmp_path, scenario)


@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_spare_that_was_killed_costs_no_start(tmp_path: Path, asked: str) -> None:
    """Whether its death is heard of first, or found when it is sent the request."""

    async def scenario(rig: Rig, spare: int) -> None:
        supervisor = rig.client.identity.pid
        os.kill(supervisor, signal.SIGSTOP)
        if asked == "after":
            os.kill(spare, signal.SIGKILL)
        starting = rig.client.begin_start([sh("a", "echo ran")])
        if asked == "before":
            os.kill(spare, signal.SIGKILL)
        await poll(lambda: not lives(spare))
        os.kill(supervisor, signal.SIGCONT)
        await starting[0]
        assert (await rig.ended("a")).exit_code == 0
        assert rig.text("a") == "ran\n"
        assert rig.starts()["a"].pid != spare
        assert (await rig.run(sh("b", "true"))).exit_code == 0
        os.kill(await spare_of(rig), signal.SIGKILL)
        await poll(lambda: not spares(rig))
        assert (await rig.run(sh("c", "true"))).exit_code == 0

    with_spare(tmp_path, scenario)


def test_one_that_dies_with_a_request_unread_ends_that_member_and_nothing_starts_again(tmp_path: Path) -> None:
    async def scenario(rig: Rig, spare: int) -> None:
        os.kill(spare, signal.SIGSTOP)
        starting = rig.client.begin_start([sh("a", "echo ran")])
        await rig.client.ping()
        os.kill(spare, signal.SIGKILL)
        await starting[0]
        ended = await rig.ended("a")
        assert (ended.pid, ended.signal, ended.proof) == (spare, signal.SIGKILL, "cgroup")
        assert rig.text("a") == ""
        assert (await rig.run(sh("b", "true"))).exit_code == 0

    with_spare(tmp_path, scenario)


def test_it_ends_with_its_supervisor_and_not_with_the_launcher(tmp_path: Path) -> None:
    async def scenario(rig: Rig, spare: int) -> None:
        [of_launcher] = [pid for pid in children(rig.client.identity.pid) if pid != spare]
        os.kill(of_launcher, signal.SIGKILL)
        await poll(lambda: not lives(of_launcher))
        await rig.client.start([sh("a", "true")])
        assert (await rig.started("a")).pid == spare
        await rig.ended("a")
        assert (await rig.run(sh("b", "true"))).exit_code == 0, "by another launcher"
        last = await spare_of(rig)
        rig.client.kill()
        await poll(lambda: not lives(last))
        await rig.connect()

    with_spare(tmp_path, scenario)


def test_a_start_that_cannot_be_written_down_leaves_the_spare_for_the_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig_at(tmp_path / "disk" / "state", *arguments_of("cgroup")) as rig:
            spare = await spare_of(rig)
            filler = fill(tmp_path / "disk")
            long = {"PATH": SHELL_PATH, "MOORAGE_TENANT": "t" * 8000, "MOORAGE_JOB": "a", "MOORAGE_FENCE": "1"}
            refused = await rig.run(sh("a", "true", env=long))
            filler.unlink()
            assert (refused.stage, refused.errno, refused.proof) == ("journal", errno.ENOSPC, "never-ran")
            await rig.client.start([sh("b", "echo ran")])
            assert (await rig.started("b")).pid == spare
            assert (await rig.ended("b")).exit_code == 0
            assert rig.text("b") == "ran\n"

    if not mount_small(tmp_path / "disk", 4):
        pytest.skip("needs the right to mount")
    try:
        run(scenario())
    finally:
        unmount(tmp_path / "disk")
