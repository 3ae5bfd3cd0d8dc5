"""What `make dist` makes, and a fleet that runs from its wheel alone: an empty home, an empty environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from moorage.schemas.release import RELEASE

ROOT: Final = Path(__file__).resolve().parents[2]
PROGRAMS: Final = {
    "moorage/worker/supervisor/launcher.bin",
    "moorage/worker/drivers/container/entry.bin",
    "moorage/worker/sharing/limiter/limiter.bin",
}
COMMAND_S_MAX: Final = 300.0

pytestmark = [pytest.mark.slow, pytest.mark.downloads]


def the(folder: Path, pattern: str) -> Path:
    [file] = folder.glob(pattern)
    return file


def test_there_are_three_files_of_this_release(published: Path) -> None:
    names = sorted(file.name for file in published.iterdir())
    assert all(name.startswith(f"moorage-{RELEASE}") for name in names)
    assert [re.sub(r"^moorage-[\d.]+\d", "", name) for name in names] == [
        "-py3-none-any.whl",
        "-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        ".tar.gz",
    ]


def test_the_wheels_have_the_same_files_but_for_the_compiled_programs(published: Path) -> None:
    def files(wheel: Path) -> set[str]:
        return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name and name[-1] != "/"}

    pure, compiled = files(the(published, "*-any.whl")), files(the(published, "*-manylinux*.whl"))
    assert compiled - pure == PROGRAMS
    assert pure < compiled
    with tarfile.open(the(published, "*.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    sources = {re.sub(r"^\w+/(?=moorage/)", "", name) for name in names if not name.endswith("/")}
    assert pure <= sources
    assert {name.partition("/")[0] for name in names} & {"tests", "bench", "docs", "deploy", ".venv"} == set()


class Machine:
    """An empty machine, as far as a folder can be one: its own home, environment of Python and working folder."""

    def __init__(self, folder: Path) -> None:
        self.home = folder
        self.env = {"HOME": str(folder), "PATH": f"{folder}/venv/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        self.run(sys.executable, "-m", "venv", str(folder / "venv"))

    def run(self, *command: str) -> str:
        """Run a command to its end; it must end well. Returns what it wrote to its output."""
        done = subprocess.run(
            command, env=self.env, cwd=self.home, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, *requirements: str) -> None:
        pip = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
        done = subprocess.run(
            [f"{self.home}/venv/bin/pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), *requirements],
            env={**self.env, **pip}, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    @contextmanager
    def up(self, *flags: str) -> Iterator[None]:
        """`moorage up` in the home, until the block ends."""
        process = subprocess.Popen(
            [f"{self.home}/venv/bin/moorage", "up", *flags],
            env=self.env, cwd=self.home, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with process:
            try:
                assert process.stderr is not None
                assert any(line.startswith("Ctrl-C ends") for line in process.stderr), "it is up"
                yield
            finally:
                process.terminate()
                process.communicate(timeout=60)


def test_from_the_wheel_alone_a_fleet_runs_and_jobs_start_by_the_compiled_launcher(
    published: Path, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    wheel = the(published, "*-manylinux*.whl")
    machine.install(f"{wheel}[server]")
    with machine.up("--simulate", "2x8xH100"):
        assert machine.run("moorage", "run", "--gpu", "2xH100", "--", "echo", "two GPUs").startswith("two GPUs")
        doctor = machine.run("moorage", "doctor")
    [launcher] = [line for line in doctor.splitlines() if " launcher " in f" {line} "]
    assert launcher.split()[0] == "ok", doctor


def test_the_sdist_installs_where_there_is_no_compiler(published: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.env["CC"] = "/nowhere/cc"
    machine.install(str(the(published, "*.tar.gz")))
    assert machine.run("moorage", "--version").split()[-1] == RELEASE
