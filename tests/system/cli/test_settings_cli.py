"""The settings file from the command line: what is read, what it costs who has none, what is shown."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from moorage.cli.fleet.ledger import configured_replicas
from moorage.cli.framework.settings import example_file
from tests.system.cli.node import Lines, environment, moorage, node_on, start

NOWHERE = ("--nats", "nats://127.0.0.1:1", "--timeout", "100ms")


def settings(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "moorage.toml"
    path.write_text(text)
    path.chmod(0o600)
    return {"MOORAGE_SETTINGS": str(path)}


async def imported(env: dict[str, str], *argv: str) -> set[str]:
    """Every module that a command imports."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "importtime", "-m", "moorage.cli", *argv),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=environment(**env),
    )
    _, err = await process.communicate()
    return {line.rpartition("|")[2].strip() for line in err.decode().splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("argv", [("--version",), ("ls", *NOWHERE), ("submit", *NOWHERE, "--", "true")])
async def test_without_a_file_a_one_shot_command_pays_nothing_for_settings(argv: tuple[str, ...]) -> None:
    modules = await imported({}, *argv)
    assert "moorage.cli.main" in modules
    assert not {"tomllib", "moorage.schemas.settings", "moorage.cli.framework.settings"} & modules


@pytest.mark.slow
async def test_a_file_says_what_no_flag_and_no_variable_does(tmp_path: Path) -> None:
    env = settings(tmp_path, '[client]\nnats = "nats://127.0.0.1:2"\ntimeout = "150ms"\n')
    assert "tomllib" in await imported(env, "ls")
    ran = await moorage("ls", env=env)
    assert ran.code == 5
    assert "127.0.0.1:2" in ran.err
    assert "127.0.0.1:1" in (await moorage("ls", *NOWHERE, env=env)).err
    assert "127.0.0.1:3" in (await moorage("ls", env=env | {"NATS_URL": "nats://127.0.0.1:3"})).err


def test_a_restore_goes_by_the_copies_that_the_schedulers_settings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "moorage.toml"
    file.write_text("[scheduler]\nreplicas = 1\n")
    file.chmod(0o600)
    assert configured_replicas(file) == 1
    monkeypatch.setenv("MOORAGE_SCHEDULER_REPLICAS", "3")
    assert configured_replicas(file) == 3
    monkeypatch.delenv("MOORAGE_SCHEDULER_REPLICAS")
    file.write_text("[worker]\n")
    assert configured_replicas(file) == 0, "then those of the backup"


@pytest.mark.slow
async def test_a_bad_file_is_one_clear_line_and_exit_code_2(tmp_path: Path) -> None:
    env = settings(tmp_path, '[client]\ntenat = "vision"\n')
    for argv in (("ls", *NOWHERE), ("doctor",), ("up",), ("worker",), ("scheduler",)):
        ran = await moorage(*argv, env=env)
        assert ran.code == 2, argv
        assert ran.err.startswith("error[bad-settings]: [client] has no key 'tenat'"), argv
        assert "fix: the nearest is tenant" in ran.err
    # a section of somebody else's stops no one-shot command; the doctor tells
    env = settings(tmp_path, "[worker]\noutput_keep = 5\noutput_bites = 6\n")
    assert (await moorage("ls", *NOWHERE, env=env)).code == 5
    told = {row[1]: row for row in (await moorage("doctor", *NOWHERE, env=env)).rows}
    assert told["settings"][0] == "fail"
    assert "output_bites" in told["settings"][2]


async def test_the_doctor_shows_what_holds_and_where_it_is_from(tmp_path: Path) -> None:
    env = settings(tmp_path, '[worker]\noutput_keep = "90m"\n') | {"MOORAGE_SCHEDULER_LEASE_S": "40"}
    shown = await moorage("doctor", "--settings", env=env)
    rows = {(row[0], row[1]): row[2:] for row in shown.rows[1:]}
    assert rows["worker", "output_keep"] == ["90m", env["MOORAGE_SETTINGS"]]
    assert rows["scheduler", "lease_s"] == ["40s", "MOORAGE_SCHEDULER_LEASE_S"]
    assert rows["scheduler", "grace_s"] == ["5s", "default"]
    assert env["MOORAGE_SETTINGS"] in shown.err
    frames = (await moorage("doctor", "--settings", "--json", env=env)).frames
    assert {"kind": "setting", "section": "up", "key": "port", "value": "none", "source": "default"} in frames
    assert (await moorage("doctor", "--example")).out == example_file()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is asked for more")
async def test_root_refuses_a_file_that_others_may_write(tmp_path: Path) -> None:
    env = settings(tmp_path, "[client]\n")
    Path(env["MOORAGE_SETTINGS"]).chmod(0o666)
    ran = await moorage("ls", *NOWHERE, env=env)
    assert ran.code == 2
    assert "others may write" in ran.err


@pytest.mark.slow
async def test_up_takes_its_services_settings_from_one_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[scheduler]\nname = "mine"\nfinished_keep = "2h"\n[worker]\noutput_keep = "3h"\nlabels = { zone = "a" }\n'
    )
    path.chmod(0o600)
    async with node_on(tmp_path / "home", "--settings", str(path), simulate="1xH100") as node:
        fleet = (await node.run("fleet", "--json")).frame["data"]
        assert fleet["leader"] == "mine"
        assert fleet["keeps"]["finished_keep"] == 7200
        (worker,) = fleet["workers"]
        assert worker["labels"]["zone"] == "a"
        assert worker["keeps"]["output_s"] == 10_800
        for log in ("scheduler.log", "worker.log"):
            assert f"({path})" in (node.folder / log).read_text()


async def test_up_reads_the_file_of_its_folder_and_says_so(tmp_path: Path) -> None:
    settings(tmp_path, "[worker]\noutput_bites = 6\n")
    process = await start("up", cwd=tmp_path)
    _, err = await process.communicate()
    lines = err.decode().splitlines()
    assert process.returncode == 2
    assert lines[0] == f"settings: {tmp_path / 'moorage.toml'}"
    assert lines[1].startswith("error[bad-settings]: [worker] has no key 'output_bites'")
    other = settings(tmp_path / "..", "[up]\nprot = 1\n")
    process = await start("up", cwd=tmp_path, env=other)  # a file that is named goes before it
    _, err = await process.communicate()
    assert err.decode().startswith("error[bad-settings]: [up] has no key 'prot'")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
async def test_up_reads_no_file_of_another_user(tmp_path: Path) -> None:
    settings(tmp_path, "[up]\nprot = 1\n")
    os.chown(tmp_path / "moorage.toml", 12345, -1)
    process = await start("up", "--port", "0", "--simulate", "1xH100", cwd=tmp_path)
    err = Lines(process.stderr)
    await err.until("moorage is up")
    process.terminate()
    await process.wait()
    assert "moorage.toml belongs to another user and is not read; to read it: --settings moorage.toml" in err.text


@pytest.mark.slow
@pytest.mark.parametrize("service", ["worker", "scheduler"])
async def test_a_service_says_that_it_does_not_read_the_file_of_its_folder(tmp_path: Path, service: str) -> None:
    settings(tmp_path, "[client]\n")
    process = await start(service, *NOWHERE[:2], cwd=tmp_path, env={"MOORAGE_LEDGER_URL": NOWHERE[1]})
    here = tmp_path / "moorage.toml"
    err = Lines(process.stderr)
    await err.until(f"{here} is not read; to read this file: --settings moorage.toml, or MOORAGE_SETTINGS={here}")
    process.kill()
    await process.wait()
    process = await start(service, *NOWHERE[:2], "--settings", "moorage.toml", cwd=tmp_path)
    err = Lines(process.stderr)
    await err.until("settings: ")
    process.kill()
    await process.wait()
    assert "is not read" not in err.text


async def test_the_doctor_says_that_the_file_of_its_folder_is_not_read(tmp_path: Path) -> None:
    settings(tmp_path, "[client]\n")
    process = await start("doctor", *NOWHERE, cwd=tmp_path)
    out, _ = await process.communicate()
    (line,) = [line for line in out.decode().splitlines() if "\tsettings\t" in line]
    assert line.startswith("warn")
    assert f"{tmp_path / 'moorage.toml'} is not read" in out.decode()
