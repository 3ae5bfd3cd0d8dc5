"""What never stands in a file of the repository, and nothing generated is stale; `make lint` checks imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOMS = {
    "schemas": "schemas/moorage/schemas",
    "system": "system/moorage/system",
    "bus": "bus/moorage/bus",
    "scheduler": "scheduler/moorage/scheduler",
    "ranking": "ranking/moorage/ranking",
    "worker": "worker/moorage/worker",
    "client": "client/moorage/client",
    "testing": "testing/moorage/testing",
    "cli": "client/moorage/cli",
}
CORE = ROOT / "scheduler/moorage/scheduler/core"


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines()]


def test_nothing_in_the_core_waits() -> None:
    for file in sorted(CORE.rglob("*.py")):
        waits = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Await | ast.AsyncFunctionDef)]
        assert not waits, f"{file.relative_to(ROOT)} awaits"


def test_the_namespace_has_no_init() -> None:
    assert not list(ROOT.glob("*/moorage/__init__.py"))


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "cli"])
def test_who_installs_a_room_has_its_types(room: str) -> None:
    """PEP 561: without the mark a type checker takes all that is imported from there for Any."""
    assert (ROOT / ROOMS[room] / "py.typed").is_file()


def test_every_list_of_rooms_has_every_room() -> None:
    """A room that the list of the wheel lacks is in no installation; the test that builds the wheels is slow."""
    rooms = {folder.parent.name for folder in ROOT.glob("*/moorage")}
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    build = tool["hatch"]["build"]
    assert set(build["dev-mode-dirs"]) == rooms
    plugins = {"client/hydra_plugins"}  # Hydra looks for its plugins in packages of this name alone
    assert set(build["targets"]["wheel"]["packages"]) == {f"{room}/moorage" for room in rooms} | plugins
    assert set(tool["pytest"]["ini_options"]["pythonpath"]) == set(tool["mypy"]["mypy_path"]) == rooms
    assert rooms < set(tool["mypy"]["files"])
    assert rooms < set(tool["ruff"]["src"])


def test_no_host_path_or_secret_in_the_tree() -> None:
    hosts = re.compile(r"https?://(?!127\.0\.0\.1|localhost)[^\s)>\"'`]*/simple\b|--index-url|--find-links(?! /)")
    paths = re.compile(r"(?<![\w./~])/(?:work|farm|root)/")
    for file in tracked():
        if file.suffix in {".csv", ".png", ".svg"} or not file.exists() or file.name == "test_tidy.py":
            continue
        text = file.read_text(errors="replace")
        assert not hosts.search(text), f"{file.relative_to(ROOT)} names a package registry"
        assert not paths.search(text), f"{file.relative_to(ROOT)} holds a path of some machine"
        assert "-----BEGIN" not in text, f"{file.relative_to(ROOT)} holds a key"


def test_pins_are_names_and_versions_alone() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[a-z0-9-]+==(\d+!)?[\w.]+( ;.*)?", line), line


def test_the_pythons_that_are_named_are_those_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    others = re.search(r"^\ttests/other_pythons (.*?) debian13", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert others is not None
    least = project["requires-python"].removeprefix(">=")
    assert named == [least, *(name.removeprefix("python") for name in others[1].split())]
    said = f"Python {', '.join(named[:-1])} or {named[-1]}"
    for page in ("README.md", "docs/index.md", "docs/tutorial/ten-minutes.md"):
        assert said in (ROOT / page).read_text(), f"{page} does not say: {said}"
    assert "tests/other_pythons" in (ROOT / ".ci/run").read_text()


def test_generated_pages_are_fresh() -> None:
    done = subprocess.run([sys.executable, "-m", "tools.generate", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
