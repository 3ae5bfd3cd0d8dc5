"""What `make dist` makes, a fleet that runs from its wheel alone, and one from a fresh clone: with an empty home."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Final

import pytest

from moorage.system.build import build
from tests.system.deploy.machines import ROOT, Machine, installed
from tests.unit.docs.markdown import page

PROGRAMS: Final = {
    "moorage/worker/supervisor/launcher.bin",
    "moorage/worker/drivers/container/entry.bin",
    "moorage/worker/sharing/limiter/limiter.bin",
}
BUILD_FILE: Final = "moorage/system/build.txt"

pytestmark = [pytest.mark.slow, pytest.mark.downloads]


def the(folder: Path, pattern: str) -> Path:
    [file] = folder.glob(pattern)
    return file


def test_there_are_three_files_of_this_release(published: Path) -> None:
    names = sorted(file.name for file in published.iterdir())
    assert [name.removeprefix(f"moorage-{build()}") for name in names] == [
        "-py3-none-any.whl",
        "-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        ".tar.gz",
    ]


def test_the_wheels_have_the_same_files_but_for_the_compiled_programs(published: Path) -> None:
    def files(wheel: Path) -> set[str]:
        return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name and name[-1] != "/"}

    pure, compiled = files(the(published, "*-any.whl")), files(the(published, "*-manylinux*.whl"))
    assert compiled - pure == PROGRAMS
    assert BUILD_FILE in pure
    assert pure < compiled
    with tarfile.open(the(published, "*.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    sources = {re.sub(r"^\w+/(?=(moorage|hydra_plugins)/)", "", name) for name in names if not name.endswith("/")}
    assert pure <= sources
    assert {name.partition("/")[0] for name in names} & {"tests", "bench", "docs", "deploy", "tools", ".venv"} == set()


def test_the_wheels_have_every_file_of_the_tree(published: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--", ":(glob)*/moorage/**"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tree = {line.partition("/")[2] for line in listed.stdout.splitlines()}
    assert len(tree) > 500
    for pattern in ("*-any.whl", "*-manylinux*.whl"):
        assert tree - set(zipfile.ZipFile(the(published, pattern)).namelist()) == set()


@pytest.mark.long
def test_from_the_wheel_alone_a_fleet_runs_and_jobs_start_by_the_compiled_launcher(
    published: Path, tmp_path: Path
) -> None:
    machine = installed(tmp_path, f"{the(published, '*-manylinux*.whl')}[server]")
    with machine.up("venv/bin/moorage", "up", "--simulate", "2x8xH100"):
        assert machine.run("moorage", "run", "--gpu", "2xH100", "--", "echo", "two GPUs").startswith("two GPUs")
        doctor = machine.run("moorage", "doctor")
    logs = "".join((tmp_path / ".moorage" / name).read_text() for name in ("scheduler.log", "worker.log"))
    assert not re.search(r" (WARNING|ERROR) ", logs), logs
    [launcher] = [line for line in doctor.splitlines() if " launcher " in f" {line} ".replace("\t", " ")]
    assert launcher.split()[0] == "ok", doctor


@pytest.mark.long
def test_the_sdist_installs_where_there_is_no_compiler(published: Path, tmp_path: Path) -> None:
    machine = installed(tmp_path, str(the(published, "*.tar.gz")), CC="/nowhere/cc")
    assert machine.run("moorage", "--version").split()[-1] == build()


def test_from_a_clone_to_a_fleet_on_the_screen_by_the_readmes_first_command(tmp_path: Path) -> None:
    """With an empty home. `pytest -s` prints how long it took: 40 s at most on a quiet machine of two cores."""
    up = next(block.body for block in page(ROOT / "README.md").blocks if block.kind == "sh")
    begins = time.monotonic()
    cloned = subprocess.run(
        ["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], capture_output=True, text=True, check=False
    )
    if cloned.returncode:
        pytest.skip(f"this is no clone: {cloned.stderr}")
    machine = Machine(tmp_path / "clone", tmp_path / "home", ".venv")
    machine.env["PYTHON"] = sys.executable
    with machine.up(*shlex.split(up)):
        shown = machine.run("moorage", "fleet").splitlines()
        took_s = time.monotonic() - begins
    assert [line.split()[:3] for line in shown[1:]] == [[f"sim-000{at}", "sim", "up"] for at in range(4)]
    print(f"from a clone to a fleet: {took_s:.1f} s")
