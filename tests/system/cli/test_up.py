"""`moorage up`: one command that starts all of it, keeps it alive, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import stat
import sys
from pathlib import Path

import aiohttp
import msgspec
import nats
import pytest

from moorage.bus.target import Up, read_up
from moorage.cli.local.children import Child, ChildFailed
from moorage.cli.local.local_door import LocalDoor
from moorage.cli.local.local_tools import end_jobs, supervisors_of
from moorage.cli.local.up import _only_one
from moorage.client import AsyncClient
from moorage.worker.agent.run import SUPERVISOR_FOLDER
from tests.disk import TINY_MIB, fill, mount_small, unmount
from tests.system.cli.node import Lines, environment, moorage, node_on, processes_of, start, talk
from tests.waiting import until, until_state

#: how much is left is looked at while a test still fills the disk, or after
FULL = re.compile(rf"the disk of moorage up is full: \d+ of {TINY_MIB} MiB are free at ")


@pytest.mark.parametrize(("user", "mode"), [(0, 0o711), (1000, 0o700)])
def test_other_users_jobs_pass_the_folder_of_root_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, mode: int
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with _only_one(tmp_path / "home"):
        assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == mode


@pytest.mark.slow
@pytest.mark.parametrize(("is_there", "by_uv"), [(True, False), (False, False), (True, True)])
async def test_it_says_how_to_find_its_command_where_the_path_has_it_not(
    tmp_path: Path, is_there: bool, by_uv: bool
) -> None:
    """As after `make up`, which activates no environment, and with uvx, whose PATH the next terminal lacks."""
    beside = Path(sys.executable).parent
    env = {"PATH": f"{beside}:/usr/bin:/bin" if is_there else "/usr/bin:/bin"}
    async with node_on(tmp_path / "home", env=env | ({"UV": "/usr/bin/uv"} if by_uv else {})) as node:
        line = f"  export PATH={beside}:$PATH"
        assert (line not in talk(node.folder).splitlines()) == (is_there and not by_uv)


@pytest.mark.slow
async def test_it_starts_says_where_it_is_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    async with node_on(folder) as node:
        said = talk(folder)
        assert said.splitlines()[1] == "sim  moorage is up"
        assert node.url in said
        assert "2 hosts, 8 GPUs" in said
        for name in ("up.lock", "up.json", "ledger-url", "scheduler.log", "worker.log"):
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
        assert stat.S_IMODE((folder / "nats").stat().st_mode) == 0o700
        password = (folder / "nats" / "ledger-password").read_text()
        assert password not in (folder / "up.json").read_text() + said
        assert not [pid for pid in node.up.children.values() if password.encode() in _words_of(pid)]
        await node.run("submit", "--gpu", "1xH100", "--job", "left", "--", "sleep", "31415")
        async with AsyncClient(node.url) as client:
            await until_state(client.job("left"), "RUNNING")
        assert processes_of(str(folder))
        assert await node.stop() == 0
    assert _running("sleep\x0031415") == []
    await all_gone(folder)
    assert not (folder / "up.json").exists()
    assert read_up(folder) is None


@pytest.mark.slow
async def test_a_ledger_of_an_older_release_is_raised_to_the_newest_level(tmp_path: Path) -> None:
    """It has no standby that could be unable to follow."""
    folder, levels = tmp_path / "home", list[int | None]()
    for knows in (1, 2):
        release = tmp_path / f"knows-{knows}"
        release.mkdir()
        module = "from moorage.scheduler.core.ledger import records\n"
        (release / "sitecustomize.py").write_text(f"{module}records.FORMAT = {knows}\n")
        async with node_on(folder, env={"PYTHONPATH": str(release)}) as node:
            async with AsyncClient(node.url) as client:
                levels.append((await client.fleet.show()).feature_level)
            said = f"feature level 2: a release that knows 1 alone cannot continue from {folder}"
            assert talk(folder).count(said) == (len(levels) == 2)
    assert levels == [1, 2]


SITE = """
[scheduler]
nats = "scheduler.main"
replicas = 3
prefix = "gpu.eu"
name = "h1"
lease_s = 17

[worker]
nats = "worker.n01"
id = "n01"
prefix = "gpu.eu"
"""


@pytest.mark.slow
async def test_it_is_a_fleet_of_its_own_whatever_a_sites_file_says(tmp_path: Path) -> None:
    """With the three copies of a site, its scheduler ended six times, and moorage up with it."""
    (tmp_path / "site.toml").write_text(SITE)
    env = {"MOORAGE_SCHEDULER_REPLICAS": "3", "MOORAGE_WORKER_PREFIX": "gpu.eu", "NATS_CONTEXT": "none"}
    async with node_on(tmp_path / "home", "--settings", str(tmp_path / "site.toml"), env=env) as node:
        said = talk(tmp_path / "home")
        for left_out in ("[scheduler] nats", "[scheduler] replicas", "[scheduler] prefix", "[worker] id",
                         "[worker] nats", "[worker] prefix"):  # fmt: skip
            assert left_out in said.splitlines()[0], said
        assert said.splitlines()[0].endswith("of a site are left out: moorage up is a fleet of its own")
        assert (await node.run("run", "--", "true")).code == 0
        log = (tmp_path / "home/scheduler.log").read_text()
        assert ("lease_s = 17s" in log, "name = h1" in log) == (True, True), "what it may take is taken"


@pytest.mark.slow
async def test_without_the_password_of_its_user_nobody_runs_jobs(tmp_path: Path) -> None:
    """As another user of the machine, who may read none of its files."""
    folder, config = tmp_path / "home", tmp_path / "config"
    config.mkdir()
    async with node_on(folder, simulate="1xH100", is_open=False, env={"XDG_CONFIG_HOME": str(config)}) as node:
        said = talk(folder)
        password = (folder / "nats" / "local-password").read_text()
        [context] = (config / "nats/context").iterdir()
        assert (context.stem, stat.S_IMODE(context.stat().st_mode)) == (node.up.context, 0o600)
        assert f"by a password that moorage's commands find; for other clients: nats context {context.stem}" in said
        assert stat.S_IMODE((folder / "nats" / "local-password").stat().st_mode) == 0o600
        readable = [file for file in folder.rglob("*") if file.is_file() and file.stat().st_mode & 0o077]
        assert not [file for file in readable if password.encode() in file.read_bytes()]
        assert not [pid for pid in node.up.children.values() if password.encode() in _words_of(pid)]
        assert password not in said

        # not by nats-py, which leaves the socket of a refused connection open
        reader, writer = await asyncio.open_connection("127.0.0.1", int(node.url.rpartition(":")[2]))
        writer.write(b"CONNECT {}\r\n")
        assert b"-ERR 'Authorization Violation'" in await reader.read()
        writer.close()
        await writer.wait_closed()
        lost = await moorage("ls", "--nats", node.url, env={"XDG_CONFIG_HOME": str(config)}, cwd=tmp_path)
        assert (lost.code, "lets in its own user, in its folder or with MOORAGE_HOME" in lost.err) == (4, True), (
            lost.err
        )

        for where in (("--nats", node.url), ("--nats", node.up.context), ()):
            ran = await moorage("run", *where, "--", "true", env={**node.env(), "XDG_CONFIG_HOME": str(config)})
            assert ran.code == 0, ran.err
        async with node_on(tmp_path / "open", simulate="1xH100") as other:
            assert "everyone on this machine, without a password" in talk(tmp_path / "open")
            await (await nats.connect(other.url)).close()
    assert list((config / "nats/context").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("simulate", "gpu"), [("1xH100", "--gpu 1xH100 -"), ("1x8xL40S+2xH100,7xL4", "--gpu -"), ("2xcpu", "-")]
)
async def test_what_its_screen_says_to_try_fits_its_fleet(tmp_path: Path, simulate: str, gpu: str) -> None:
    async with node_on(tmp_path / "home", simulate=simulate):
        assert f"moorage submit {gpu}- sleep 60" in talk(tmp_path / "home")


@pytest.mark.slow
async def test_jobs_without_a_gpu_end_on_a_fleet_of_two_models(tmp_path: Path) -> None:
    """So many that the mix of requests is in use: none of them asks for a GPU."""
    async with node_on(tmp_path / "home", simulate="2x8xH100+2x4xL40S") as node:
        for name in ("first", "second"):
            ran = await node.run("submit", "--replicas", "32", "--job", name, "--driver", "noop", "--", "exit", "0")
            assert ran.code == 0, ran.err
        waited = await node.run("wait", "first,second")
        assert waited.code == 0, waited.err
        assert "died" not in talk(tmp_path / "home")


@pytest.mark.slow
async def test_a_job_that_ran_at_its_end_says_that_its_worker_was_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    async with node_on(folder) as node:
        await node.run("submit", "--gpu", "1xH100", "--job", "left", "--", "sleep", "31416")
        async with AsyncClient(node.url) as client:
            await until_state(client.job("left"), "RUNNING")
        assert await node.stop(signal.SIGINT) == 0
    async with node_on(folder) as node:
        async with AsyncClient(node.url) as client:
            await until_state(client.job("left"), "FAILED")
        shown = await node.run("show", "left", "--json")
        assert shown.frame["data"]["changes"][-1]["why"] == "its worker was stopped"


@pytest.mark.long
@pytest.mark.slow
async def test_a_full_disk_is_told_on_its_own_screen_and_room_brings_all_back(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    if not mount_small(folder, TINY_MIB):
        pytest.skip("no right to mount a file system of our own")
    try:
        async with node_on(folder, simulate="1xH100") as node:
            assert (await node.run("run", "--gpu", "--job", "before", "--", "true")).code == 0
            server = node.up.children["nats-server"]
            filler = fill(folder)
            await until(lambda: FULL.search(talk(folder)), what="told on the screen")
            long = "x" * 30_000  # what the server's last block holds may be taken still
            for number in range(100):
                told = await node.run("submit", "--job", f"m{number}", "--timeout", "8s", "--", "true", long)
                if told.code:
                    break
            assert (told.code, "error[not-leading]" in told.err) == (5, True), told.err
            assert "could not write its ledger for" in told.err, "the leader says what it waits for"
            assert FULL.search(told.err), "whoever asks hears why nobody answers"
            assert "free disk space there" in told.err
            doctor = await node.run("doctor", "--json", "--timeout", "10s")
            (leads,) = [frame for frame in doctor.frames if frame["name"] == "leader"]
            assert (leads["verdict"], "look at the disk" in leads["fix"]) == ("fail", True)
            assert "could not write its ledger for" in leads["found"]
            filler.unlink()
            await until(
                lambda: ("the disk of moorage up has space again") in talk(folder), what="told on the screen, too"
            )
            await until(lambda: node.up.children["nats-server"] != server, what="its server is another one")
            assert (await node.run("run", "--timeout", "90s", "--gpu", "--job", "after", "--", "true")).code == 0
            assert (await node.run("show", "before", "--format", "{state}")).out == "SUCCEEDED\n"
            assert "ended; starting it again" not in talk(folder), "what we end ourselves is no death"
    finally:
        unmount(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have another user own something")
@pytest.mark.parametrize("planted", ["folder", "link", "link-on-the-way", "file", "link-within"])
async def test_nothing_is_written_where_another_user_chooses(tmp_path: Path, planted: str) -> None:
    other = 65_534
    target, folder = tmp_path / "target", tmp_path / "home" / ".moorage"
    target.mkdir()
    folder.parent.mkdir()
    if planted == "link":
        folder.symlink_to(target)
        os.chown(folder, other, other, follow_symlinks=False)
    elif planted == "link-on-the-way":
        (tmp_path / "there").symlink_to(target)
        os.chown(tmp_path / "there", other, other, follow_symlinks=False)
        folder = tmp_path / "there" / ".moorage"
    else:
        folder.mkdir()
        if planted == "folder":
            os.chown(folder, other, other)
        elif planted == "file":
            (folder / "up.lock").touch()
            os.chown(folder / "up.lock", other, other)
        else:
            (folder / "nats").symlink_to(target)
            os.chown(folder / "nats", other, other, follow_symlinks=False)
    before = sorted(folder.iterdir()) if folder.exists() else []
    with socket.create_server(("127.0.0.1", 0)) as taken:  # so that it comes to nothing in any case
        port = str(taken.getsockname()[1])
        ran = await moorage("up", "--simulate", "1xH100", "--data", str(folder), "--port", port)
    assert (ran.code, "belongs to" in ran.err) == (1, True), ran.err
    assert "Traceback" not in ran.err
    assert list(target.iterdir()) == []
    assert (sorted(folder.iterdir()) if folder.exists() else []) == before


@pytest.mark.slow
async def test_ctrl_c_twice_ends_it_at_once(tmp_path: Path) -> None:
    """Its door, too, which here cannot end by itself."""
    async with node_on(tmp_path, simulate="1xH100") as node:
        async with aiohttp.ClientSession() as http, http.get(f"{node.up.door}/models") as answer:
            assert answer.status == 200
        [door] = [pid for pid in processes_of(str(tmp_path)) if b"\0door\0" in _words_of(pid)]
        os.kill(door, signal.SIGSTOP)
        await node.run("submit", "--job", "stubborn", "--", "sh", "-c", "trap '' TERM; sleep 27182")
        async with AsyncClient(node.url) as client:
            await until_state(client.job("stubborn"), "RUNNING")
        node.process.send_signal(signal.SIGINT)
        await until(lambda: "ending" in talk(tmp_path), what="it ends")
        node.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(120):
            assert await node.process.wait() == 130
    assert "did not end within" not in talk(tmp_path)
    assert _running("sleep\x0027182") == []
    await all_gone(tmp_path)


@pytest.mark.slow
async def test_a_killed_scheduler_is_started_again_and_the_job_ends_once(tmp_path: Path) -> None:
    async with node_on(tmp_path) as node:
        marks = tmp_path / "marks"
        process = await start(
            "run", "--job", "once", "--gpu", "1xH100", "--", "sh", "-c", f"echo ran >> {marks}; sleep 2", env=node.env()
        )
        err = Lines(process.stderr)
        await until(marks.exists, what="it runs")
        killed = node.up.children["scheduler"]
        os.kill(killed, signal.SIGKILL)
        await until(lambda: f"the scheduler (pid {killed}) ended with SIGKILL" in talk(tmp_path), what="told")
        async with asyncio.timeout(120):
            assert await process.wait() == 0
        await until(lambda: node.up.children["scheduler"] not in (0, killed), what="another scheduler")
        shown = (await node.run("show", "once", "--json")).frame["data"]
        states = [change["state"] for change in shown["changes"]]
        assert states == ["ACCEPTED", "PLACED", "CLAIMED", "RUNNING", "SUCCEEDED"]
        assert marks.read_text() == "ran\n"
        err.text += (await err._stream.read()).decode()
        assert err.text.count("SUCCEEDED") == 1


@pytest.mark.slow
async def test_a_killed_server_and_worker_are_started_again_with_all_that_was_accepted(tmp_path: Path) -> None:
    async with node_on(tmp_path, simulate="1x2xH100") as node:
        await node.run("submit", "--job", "kept", "--gpu", "1xZ9000", "--on-no-match", "wait", "--", "true")
        before = node.up.children
        os.kill(before["nats-server"], signal.SIGKILL)
        os.kill(before["worker"], signal.SIGKILL)
        await until(lambda: all(node.up.children[name] not in (0, before[name]) for name in ("nats-server", "worker")))
        ran = await node.run("run", "--timeout", "90s", "--gpu", "1xH100", "--", "true")
        assert ran.code == 0, ran.err + talk(tmp_path)
        assert (await node.run("show", "kept", "--json")).frame["data"]["state"] == "QUEUED"


@pytest.mark.slow
async def test_a_folder_whose_name_is_not_utf8_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    ran = await moorage("up", "--port", "0", "--simulate", "1xH100", cwd=folder)
    assert ran.code == 2, ran.err
    assert "that is not UTF-8" in ran.err


async def test_a_second_one_on_the_folder_says_who_runs_there(tmp_path: Path) -> None:
    async with node_on(tmp_path, simulate="1xH100") as node:
        ran = await node.run("up", "--simulate", "1xH100")
        assert ran.code == 1
        assert ran.err.startswith("error[already-running]: ")
        assert f"pid {node.process.pid}" in ran.err
        assert f"fix: end that one: kill {node.process.pid}" in ran.err
        assert (await node.run("fleet", "--json")).code == 0  # the first one's up.json is still there


@pytest.mark.slow
async def test_the_next_one_goes_on_from_the_state_that_was_left(tmp_path: Path) -> None:
    async with node_on(tmp_path, simulate="1xH100") as node:
        await node.run("submit", "--job", "waits", "--gpu", "1xZ9000", "--on-no-match", "wait", "--", "true")
        await node.run("run", "--job", "was", "--", "true")
    async with node_on(tmp_path, simulate="1xH100") as node:
        assert (await node.run("show", "waits", "--json")).frame["data"]["state"] == "QUEUED"
        assert (await node.run("show", "was", "--json")).frame["data"]["state"] == "SUCCEEDED"


@pytest.mark.slow
async def test_the_folder_of_the_working_directory_is_found_without_flags(tmp_path: Path) -> None:
    async with node_on(tmp_path / ".moorage", simulate="1xH100"):
        process = await start("fleet", "--json", cwd=tmp_path)
        out, err = await process.communicate()
        assert (process.returncode, b'"sim-0000"' in out) == (0, True), err


#: the command, where nothing answers at the default address: another test may have that port
ELSEWHERE = """
import sys
from moorage.bus import own_fleets
from moorage.cli.start import main
own_fleets.is_served = lambda url: False
sys.exit(main())
"""


#: of the commands that change something, one for each way to the scheduler
CHANGING = (
    ["submit", "--", "true"],
    ["cancel", "all"],
    ["change", "j", "--priority", "5"],
    ["exec", "j", "--", "true"],
    ["schedule", "remove", "nightly"],
    ["call", "embed", "x"],
    ["drain", "sim-0000"],
    ["admin", "limit", "--tenant", "default", "--gpus", "1"],
    ["dlq", "drop", "1"],
    ["api", "cancel", '{"job": "j"}'],
)


@pytest.mark.slow
async def test_the_only_one_of_this_user_is_found_from_another_folder_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with node_on(folder, simulate="1xH100") as node:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ELSEWHERE, "fleet", "--json", cwd=elsewhere, env=environment(),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert (process.returncode, b'"sim-0000"' in out) == (0, True), err
        assert err.decode() == f"using the moorage up of {folder}; to name it: --nats {node.url}\n"
        for words in CHANGING:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", ELSEWHERE, *words, cwd=elsewhere, env=environment(),
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, err = await process.communicate()
            assert (process.returncode, out) == (1, b""), words
            assert f"the one of yours that was found is that of {folder}" in err.decode(), words
            assert f"--nats {node.url}" in err.decode()
        lost = await moorage("fleet", "--nats", "nats://127.0.0.1:1", env={}, cwd=elsewhere)
        assert f"fix: for the moorage up of {folder}: --nats {node.url}" in lost.err
        assert "start one" not in lost.err
    assert list((tmp_path / "state" / "moorage" / "up").iterdir()) == []


@pytest.mark.slow
async def test_with_json_it_says_where_it_is_as_one_frame(tmp_path: Path) -> None:
    process = await start("up", "--simulate", "1xH100", "--data", str(tmp_path), "--port", "0", "--json")
    lines = Lines(process.stdout)
    await lines.until("\n")
    found = msgspec.json.decode(lines.text, type=Up)
    assert (found.pid, found.simulate) == (process.pid, "1xH100")
    assert sorted(found.children) == ["nats-server", "scheduler", "worker"]
    process.send_signal(signal.SIGTERM)
    await process.communicate()
    assert process.returncode == 0


@pytest.mark.slow
async def test_three_at_once_without_a_port_all_come_up(tmp_path: Path) -> None:
    starts = [start("up", "--simulate", "1xH100", "--data", str(tmp_path / name), "--json") for name in "abc"]
    processes = await asyncio.gather(*starts)
    try:
        lines = [Lines(process.stdout) for process in processes]
        await asyncio.gather(*(each.until("\n") for each in lines))
        assert len({msgspec.json.decode(each.text, type=Up).url for each in lines}) == len(processes)
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(process.communicate() for process in processes))
    assert [process.returncode for process in processes] == [0, 0, 0]


@pytest.mark.slow
async def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    async with node_on(tmp_path / "one", simulate="1xH100") as node:
        port = node.url.rpartition(":")[2]
        process = await start("up", "--simulate", "1xH100", "--data", str(tmp_path / "two"), "--port", port)
        _, err = await process.communicate()
        assert process.returncode == 1
        assert b"error[server-failed]: " in err
        assert f"another process listens on port {port} of 127.0.0.1".encode() in err
        assert b"fix: leave out --port to use a free port" in err
        assert len(err.splitlines()) == 6, "the server's log is no help here"
        assert port.encode() in err
    await all_gone(tmp_path)


@pytest.mark.slow
async def test_a_second_worker_of_the_same_name_takes_nothing_from_the_first(tmp_path: Path) -> None:
    """On one machine, with a state folder of its own: it knows nothing of what runs under the first one's."""
    async with node_on(tmp_path / "home", simulate="1xH100") as node:
        await node.run("submit", "--gpu", "1", "--job", "holds", "--", "sleep", "16180")
        async with AsyncClient(node.url) as client:
            await until_state(client.job("holds"), "RUNNING")
            where = ("--state", str(tmp_path / "other"), "--nats", node.url)
            process = await start("worker", "--simulate", "1xH100", *where)
            err = Lines(process.stderr)
            await err.until("a worker of the same machine, with another state folder, has the id")
            await err.until("--id")
            shown = (await client._wire.answer("show", {"job": "holds"})).data
            process.send_signal(signal.SIGTERM)
            await process.communicate()
        assert (shown["state"], shown["attempt"]) == ("RUNNING", 1)
        assert len(_running("sleep\x0016180")) == 1


@pytest.mark.parametrize("listens", [True, False], ids=["starting", "ending"])
async def test_a_supervisor_that_does_not_listen_yet_or_no_more_is_waited_for(tmp_path: Path, listens: bool) -> None:
    """Its agent may have started it, or had it end, in its own last moment: `up` leaves neither behind."""
    folder = tmp_path / SUPERVISOR_FOLDER
    folder.mkdir(mode=0o700)
    program = ["-m", "moorage.worker.supervisor", "--linger", "60"] if listens else ["-c", "import time; time.sleep(1)"]
    named = ["moorage.worker.supervisor", "--state", str(folder)]
    argv = [*program[:2], *named[1:], *program[2:]] if listens else [*program, *named]
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stderr=asyncio.subprocess.DEVNULL)
    try:
        await until(lambda: supervisors_of(folder) == [process.pid], what="its own words, once it runs")
        await end_jobs(tmp_path, asyncio.Event())
        assert supervisors_of(folder) == []
        async with asyncio.timeout(120):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_child_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    said: list[str] = []
    log = tmp_path / "log"
    child = Child("thing", ["sh", "-c", "echo why; exit 9"], log, {}, said.append, again_s=0.001)
    with pytest.raises(ChildFailed) as failed:
        await child.keep(lambda: None)
    assert failed.value.code == "child-failed"
    assert "why" in failed.value.why
    assert "code 9" in failed.value.why
    assert child.starts == 6
    assert len(said) == 5


async def test_a_door_that_has_stopped_watches_no_descriptor(tmp_path: Path) -> None:
    """It once watched its closed listener: the next socket of that number, a supervisor's, was never heard."""
    loop = asyncio.get_running_loop()
    door = LocalDoor(tmp_path, {}, print)
    keeping = asyncio.create_task(door.keep("nats://127.0.0.1:1"))
    await asyncio.sleep(0)
    assert door._listener is not None
    number = door._listener.fileno()
    await door.stop()
    assert not loop.remove_reader(number)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert number in (ours.fileno(), theirs.fileno()), "the lowest that is free"
        loop.add_reader(number, print)
        keeping.cancel()
        await asyncio.wait({keeping})
        assert loop.remove_reader(number), "of the socket that has the number now"


async def all_gone(folder: Path) -> None:
    """Wait until no process of a node is left: a copy of the scheduler that forecasts ends a moment after it."""
    await until(lambda: not processes_of(str(folder)), what="the last of it has gone")


def _words_of(pid: int) -> bytes:
    return (Path("/proc") / str(pid) / "cmdline").read_bytes() + (Path("/proc") / str(pid) / "environ").read_bytes()


def _running(words: str) -> list[int]:
    """Pids whose command line holds these words."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if words.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.slow
async def test_up_begins_with_a_backup_where_one_is_named(tmp_path: Path) -> None:
    folder, backup = tmp_path / "home", tmp_path / "ledger.backup"
    async with node_on(folder, simulate="1xH100") as node:
        await node.run("submit", "--job", "before", "--gpu", "1xZ9000", "--on-no-match", "wait", "--", "true")
        assert (await node.run("admin", "backup", str(backup))).code == 0
        await node.run("cancel", "before")
        await node.run("submit", "--job", "behind", "--", "true")
        assert await node.stop() == 0
    async with node_on(folder, "--restore", str(backup), simulate="1xH100") as node:
        assert "restored with 1 job from" in talk(folder)
        assert (await node.run("show", "before", "--format", "{state}")).out == "QUEUED\n"
        assert (await node.run("show", "behind")).code == 3
    none = await moorage("up", "--restore", str(tmp_path / "none"), "--data", str(folder))
    assert none.code == 2
    assert f"{tmp_path / 'none'} cannot be read: No such file" in none.err
