"""A setup prepares a worker once for all attempts that need it, and its faults are the job's or the host's."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.schemas.frames import End
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.agent.run import SUPERVISOR_FOLDER
from moorage.worker.attempt import attempt_folders
from moorage.worker.drivers import setups
from moorage.worker.drivers.setups import SETUPS
from moorage.worker.supervisor.capped_output import output_path
from tests.system.worker.agent.test_agent_process import agent_process, is_alive, name_of, pid_of, state_folder, worker
from tests.system.worker.attempt.test_attempt_folders import OTHER_USER, placed
from tests.waiting import until

USER: dict[str, Any] = {"user": OTHER_USER} if os.geteuid() == 0 else {}
NO_FOLDER = "it removed its folder $MOORAGE_SETUP, or put a link in its place"
SETUP = "(echo $CUDA_VISIBLE_DEVICES.; id -u; date +%N) > $MOORAGE_SETUP/seen"
READ = "cat $MOORAGE_SETUP/seen; echo $CUDA_VISIBLE_DEVICES"


async def test_a_setup_runs_once_as_the_job_without_devices(nats_url: str, unique: str) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader):
        seen: list[str] = []
        for jobs in (["a", "b"], ["c"]):
            names = [name_of(job, fence=10 + len(seen) + at) for at, job in enumerate(jobs)]
            places = [placed(name, READ, setup=SETUP, **USER) for name in names]
            await leader.want("w1", *(msgspec.structs.replace(each, slots=[at]) for at, each in enumerate(places)))
            for at, name in enumerate(names):
                assert (await leader.await_report("w1", "exited", name)).code == 0
                said = await until(lambda name=name: leader.text(name), what="what it saw")
                devices, uid, when, own = said.splitlines()
                assert (devices, uid, own) == (".", OTHER_USER if USER else str(os.geteuid()), str(at))
                seen.append(when)
        assert len(set(seen)) == 1


async def test_other_variables_have_a_setup_of_their_own(nats_url: str, unique: str) -> None:
    setup, read = 'echo "$VERSION" > $MOORAGE_SETUP/seen', "cat $MOORAGE_SETUP/seen"
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader) as (_, agent):
        for at, version in enumerate(("2.3", "2.4", "2.3")):
            name = name_of(f"v{at}", fence=10 + at)
            await leader.want("w1", placed(name, read, setup=setup, env={"VERSION": version}))
            assert (await leader.await_report("w1", "exited", name)).code == 0
            await until(lambda name=name: leader.text(name), what="what it saw")
            assert leader.text(name) == f"{version}\n"
        assert len(list((agent.settings.state_dir / SETUPS / "w1").glob("*.done"))) == 2


@pytest.mark.parametrize(
    ("setup", "code", "detail"),
    [
        ("echo more; echo no such package >&2; exit 3", 3, "setup-failed: exit code 3: no such package"),
        ("exit 255", 255, "setup-failed: exit code 255"),
        ("echo not now; exit 75", 126, "not-here: setup: exit code 75: not now"),
        ("kill -9 $$", 126, "not-here: setup: signal 9"),
        ("sh -c 'kill -9 $$'; exit $?", 126, "not-here: setup: exit code 137: Killed"),
        ("sleep 60", 124, "setup-failed: it did not end within 0.3 s"),
        ("rm -rf $MOORAGE_SETUP", 1, f"setup-failed: {NO_FOLDER}"),
        ("rm -rf $MOORAGE_SETUP; touch $MOORAGE_SETUP", 1, f"setup-failed: {NO_FOLDER}"),
        ("rm -rf $MOORAGE_SETUP; ln -s /usr/share $MOORAGE_SETUP", 1, f"setup-failed: {NO_FOLDER}"),
    ],
)
async def test_whose_fault_it_is(nats_url: str, unique: str, setup: str, code: int, detail: str) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader) as (_, agent):
        name, state = name_of(), agent.settings.state_dir
        await leader.want("w1", placed(name, "echo ran", setup=setup, setup_s=0.3 if "sleep" in setup else 60.0))
        refused = await leader.await_report("w1", "refused", name)
        assert (refused.code, refused.detail) == (code, detail)
        await until(lambda: list((state / SETUPS / "w1").iterdir()) == [], what="nothing of it is left")


async def test_all_that_waited_have_what_a_failed_setup_wrote(nats_url: str, unique: str, tmp_path: Path) -> None:
    go, names = tmp_path / "go", [name_of(job, fence=fence) for job, fence in (("a", 10), ("b", 11))]
    setup = f"echo more; echo no such package >&2; while [ ! -e {go} ]; do sleep 0.05; done; exit 3"
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader) as (_, agent):
        for slot, name in enumerate(names):
            await leader.want("w1", msgspec.structs.replace(placed(name, "true", setup=setup), slots=[slot]))
            told = leader.subjects.log(*name[:3])
            await until(lambda told=told: any(at == told for at, _ in leader.output), what="the note that it waits")
        go.touch()
        for name in names:
            assert (await leader.await_report("w1", "refused", name)).code == 3
            key = f"w1|acme/{name[1]}/0/1/{name[4]}"
            kept = output_path(agent.settings.state_dir / SUPERVISOR_FOLDER, key, "stdout")
            assert kept.read_text() == "more\n"


async def test_a_setup_ends_with_the_last_attempt_that_waits_for_it(nats_url: str, unique: str, tmp_path: Path) -> None:
    pid, names = tmp_path / "pid", [name_of(job, fence=fence) for job, fence in (("a", 10), ("b", 11))]
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader):
        for slot, name in enumerate(names):
            place = placed(name, "true", setup=f"echo $$ > {pid}; exec sleep 60")
            await leader.want("w1", msgspec.structs.replace(place, slots=[slot]))
        process = await pid_of(pid)
        for name in names:
            assert is_alive(process)
            await leader.want("w1", End(*name, why="cancelling"))
            assert (await leader.await_report("w1", "exited", name)).detail == "end"
        await until(lambda: not is_alive(process), what="its end")


async def test_the_next_agent_begins_a_setup_again(nats_url: str, unique: str, tmp_path: Path) -> None:
    pid, go, runs = tmp_path / "pid", tmp_path / "go", tmp_path / "runs"
    setup = f"echo $$ > {pid}; echo x >> {runs}; while [ ! -e {go} ]; do sleep 0.05; done; touch $MOORAGE_SETUP/done"
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        async with agent_process(state, nats_url, unique) as agent:
            await leader.joined("w1")
            await leader.want("w1", placed(name_of(), "true", setup=setup))
            process = await pid_of(pid)
            agent.send_signal(signal.SIGKILL)
            await agent.wait()
        async with agent_process(state, nats_url, unique):
            await leader.joined("w1", 2)
            assert not is_alive(process)
            go.touch()
            again = name_of("b", fence=11)
            await leader.want("w1", placed(again, "ls $MOORAGE_SETUP", setup=setup))
            assert (await leader.await_report("w1", "exited", again)).code == 0
            assert runs.read_text() == "x\nx\n"


async def test_the_least_recently_used_goes_and_none_in_use(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setups, "PIN_S", 0.0)
    fill = "head -c 600000 /dev/zero > $MOORAGE_SETUP/{}"
    async with (
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader, setup_bytes=1 << 20) as (_, agent),
    ):

        def there() -> list[str]:
            root = agent.settings.state_dir / SETUPS / "w1"
            return sorted(path.name for folder in root.iterdir() if folder.is_dir() for path in folder.iterdir())

        living = name_of("living", fence=10)
        await leader.want("w1", placed(living, "sleep 60", setup=fill.format("a")))
        await leader.await_report("w1", "started", living)
        for number, left in ((1, ["a", "b1"]), (2, ["a", "b2"])):
            name = name_of(f"b{number}", fence=10 + number)
            place = placed(name, "true", setup=fill.format(f"b{number}"))
            await leader.want("w1", msgspec.structs.replace(place, slots=[1]))
            assert (await leader.await_report("w1", "exited", name)).code == 0
            await until(lambda left=left: there() == left, what="what is left")
        large = name_of("large", fence=20)
        await leader.want(
            "w1",
            msgspec.structs.replace(
                placed(large, "true", setup="head -c 2000000 /dev/zero > $MOORAGE_SETUP/c"), slots=[1]
            ),
        )
        assert "setup_bytes" in (await leader.await_report("w1", "refused", large)).detail


async def test_a_full_disk_gets_back_what_no_job_uses(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setups, "PIN_S", 0.0)
    monkeypatch.setattr(attempt_folders, "MEASURE_S", 0.05)
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader) as (_, agent):

        def there() -> list[str]:
            root = agent.settings.state_dir / SETUPS / "w1"
            return sorted(path.name for folder in root.iterdir() if folder.is_dir() for path in folder.iterdir())

        for at, (job, script) in enumerate((("a", "true"), ("b", "true"), ("c", "sleep 60"))):
            name = name_of(job, fence=10 + at)
            await leader.want("w1", placed(name, script, setup=f"touch $MOORAGE_SETUP/{job}"))
            await leader.await_report("w1", "started" if script == "sleep 60" else "exited", name)
        assert there() == ["a", "b", "c"]
        monkeypatch.setattr(setups, "spare_bytes", lambda root: 0 if "b" in there() else 1)
        await until(lambda: there() == ["c"], what="what is left")


async def test_a_setup_that_writes_too_much_is_ended(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_folders, "MEASURE_S", 0.05)
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader, folder_bytes=1 << 20):
        name = name_of()
        fill = "head -c 3000000 /dev/zero > $MOORAGE_SETUP/a; sleep 60"
        await leader.want("w1", placed(name, "true", setup=fill, grace_s=0.1))
        refused = await leader.await_report("w1", "refused", name)
        assert re.fullmatch(
            "not-here: setup: disk: its folder takes [12] MiB, folder_bytes is 1 MiB", refused.detail
        )  # of a look, which may come while it still writes


async def test_setups_of_workers_that_are_gone_go_too(nats_url: str, unique: str) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
        for owner in ("w1", "of-a-worker-that-is-gone"):
            (state / SETUPS / owner / "acme.1").mkdir(parents=True)
            (state / SETUPS / owner / "acme.1.done").write_text("0")
        async with agent_process(state, nats_url, unique):
            await leader.joined("w1")
            assert sorted(os.listdir(state / SETUPS)) == ["w1"]
            assert sorted(os.listdir(state / SETUPS / "w1")) == ["acme.1", "acme.1.done"]


async def test_a_setup_is_on_the_disk_before_it_counts_as_complete(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = list[str](), os.fsync

    def noted(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader):
        await leader.want("w1", placed(name_of(), "true", setup="true"))
        assert (await leader.await_report("w1", "exited", name_of())).code == 0
        assert [each for each in synced if f"/{SETUPS}/" in each]


async def test_a_job_reads_what_its_setup_made_and_cannot_change_it(nats_url: str, unique: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.touch(0o600)
    setup = (
        f"cd $MOORAGE_SETUP; umask 007; mkdir d; echo it > d/f; chmod 660 d/f; ln -s {theirs} link; umask 077; mkdir e"
    )
    script = """
        cd $MOORAGE_SETUP; cat d/f; ls e
        for try in ': >> d/f' ': > d/g' ': > g' 'rm -rf d' 'mv d h'; do sh -c "$try" 2>/dev/null && echo "$try"; done
        echo $(ls . d)
    """
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader):
        name = name_of()
        await leader.want("w1", placed(name, script, setup=setup, **USER))
        assert (await leader.await_report("w1", "exited", name)).code == 0
        await until(lambda: leader.text(name) == "it\n.: d e link d: f\n", what="what it saw and could")
        assert (theirs.stat().st_mode & 0o777, theirs.stat().st_uid) == (0o600, os.geteuid())
        own = name_of("own", fence=11)
        await leader.want("w1", placed(own, "stat -c %A $MOORAGE_SETUP $MOORAGE_SETUP/f", setup="> $MOORAGE_SETUP/f"))
        assert (await leader.await_report("w1", "exited", own)).code == 0
        await until(lambda: leader.text(own) == "dr-x------\n-r--r--r--\n", what="that nothing is writable")
