"""A driver that an installed package offers: the command runs a worker with it, and jobs on that worker."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import msgspec
import pytest

from tests.system.cli.node import Lines, Node, moorage, start
from tests.system.worker import parrot
from tests.system.worker.drivers.test_one_file_driver import offer


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder on PYTHONPATH with the one file, and what pip would have written for the one line of pyproject.toml."""
    folder = tmp_path / "installed"
    folder.mkdir()
    shutil.copy(parrot.__file__, folder / "parrots.py")
    offer(folder, "parrots:Parrot")
    return folder


@pytest.mark.slow
async def test_the_command_runs_a_worker_with_it_and_jobs_on_it(
    node: Node, unique: str, package: Path, tmp_path: Path
) -> None:
    (tmp_path / "moorage.toml").write_text('[worker]\ndrivers = ["parrot"]\n\n[driver.parrot]\nbetween = "; "\n')
    words = ("worker", "--id", unique, "--simulate", "1xT4", "--state", str(tmp_path / "state"))
    settings = ("--settings", str(tmp_path / "moorage.toml"))
    env = {**node.env(), "PYTHONPATH": str(package), "MOORAGE_DRIVER_PARROT_TIMES_MAX": "3"}
    process = await start(*words, *settings, "--nats", node.url, env=env)
    try:
        said = await Lines(process.stderr).until(f"joined as {unique}")
        assert "settings of the driver parrot: between (" in said
        assert "times_max (MOORAGE_DRIVER_PARROT_TIMES_MAX)" in said
        ran = await node.run("run", "--driver", "parrot", "--", "hello", "there", tenant=unique)
        assert (ran.code, ran.out) == (0, "hello there\n"), ran.err
        twice = {"job": "twice", "run": {"driver": "parrot", "argv": ["hi"]}, "driver_config": {"parrot": {"times": 3}}}
        await node.run("submit", "-f", "-", tenant=unique, stdin=msgspec.json.encode(twice).decode())
        assert (await node.run("wait", "twice", tenant=unique)).code == 0
        assert (await node.run("logs", "twice", tenant=unique)).out == "hi; hi; hi\n"
        silent = await node.run("run", "--driver", "parrot", tenant=unique)
        assert silent.code != 0
        assert "the driver parrot needs argv" in silent.err
        rows = (await node.run("fleet", "--json")).frame["data"]["workers"]
        (row,) = [row for row in rows if row["worker"] == unique]
        assert row["drivers"] == ["parrot"]
        assert row["capabilities"]["parrot"]["config"] == ["times", "code"]
    finally:
        process.send_signal(signal.SIGTERM)
        await process.communicate()


async def test_a_setting_of_it_that_cannot_be_is_told_before_anything_starts(package: Path, tmp_path: Path) -> None:
    (tmp_path / "moorage.toml").write_text("[driver.parrot]\ntimes = 3\n")
    words = ("worker", "--simulate", "1xT4", "--drivers", "parrot", "--state", str(tmp_path / "state"))
    ran = await moorage(*words, "--settings", str(tmp_path / "moorage.toml"), env={"PYTHONPATH": str(package)})
    assert ran.code != 0
    assert "[driver.parrot] has no key 'times'" in ran.err
    assert "between, times_max" in ran.err
