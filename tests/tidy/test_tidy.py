"""What never stands in a file of the repository, and nothing generated is stale; `make lint` checks imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from moorage.schemas.reasons import REASONS

ROOT = Path(__file__).resolve().parents[2]
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


def sources(room: str) -> Iterator[Path]:
    yield from sorted((ROOT / ROOMS[room]).rglob("*.py"))


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(file)))


def imports(file: Path) -> Iterator[str]:
    """Absolute names that a file imports, anywhere in it."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or ""


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines()]


def test_nothing_in_the_core_waits() -> None:
    for file in sorted(CORE.rglob("*.py")):
        waits = [n for n in nodes(file) if isinstance(n, ast.Await | ast.AsyncFunctionDef)]
        assert not waits, f"{file.relative_to(ROOT)} awaits"


#: the parts of the engine that the shell and questions may use, beside its own methods
VIEWS = {"state", "fleet", "config", "subjects", "reader", "stale_ledger", "output_writer"}


def outside_the_engine() -> Iterator[tuple[Path, ast.AST]]:
    """The nodes of all files of the scheduler but those that the engine is made of; questions count as outside."""
    for file in sources("scheduler"):
        if (CORE not in file.parents or CORE / "queries" in file.parents) and file != CORE / "queries" / "view.py":
            yield from ((file, node) for node in nodes(file))


def of_engine(node: ast.AST) -> str:
    """The name that is read or set of an engine: `offer` of `self._engine.offer`; empty for anything else."""
    if not isinstance(node, ast.Attribute):
        return ""
    owner = node.value
    name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    return node.attr if name in ("engine", "_engine") else ""


def test_the_engine_has_one_door() -> None:
    """The shell and questions use its methods and its public parts, reach into no other, and set nothing in it."""
    used, reached = set(), []
    for file, node in outside_the_engine():
        name = of_engine(node)
        used.add(name)
        where = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute):
            if (part := of_engine(node.value)) and part not in VIEWS:
                reached.append(f"{where} reads {part}.{node.attr}")
            if isinstance(node.ctx, ast.Store) and (name or of_engine(node.value)):
                reached.append(f"{where} sets {node.attr}")
    assert reached == []
    assert used >= VIEWS | {"offer", "build", "commit", "complete"}


def test_the_namespace_has_no_init() -> None:
    assert not list(ROOT.glob("*/moorage/__init__.py"))


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "cli"])
def test_who_installs_a_room_has_its_types(room: str) -> None:
    """PEP 561: without the mark a type checker takes all that is imported from there for Any."""
    assert (ROOT / ROOMS[room] / "py.typed").is_file()


def texts(file: Path) -> Iterator[str]:
    """The string constants of a file that are no docstrings."""
    tree = parsed(file)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_subjects_are_spelled_in_one_module() -> None:
    spelled = re.compile(r"moorage\.(api|request|admin|events?|log|hello|load|fleet|worker\.\*|ledger|dlq)\.")
    for room in ("system", "bus", "scheduler", "worker", "client", "cli"):
        for file in sources(room):
            found = [text for text in texts(file) if spelled.match(text) and "<" not in text]
            assert not found, f"{file.relative_to(ROOT)} spells {found}"


#: what speaks of reasons for waiting, below the folders of the scheduler and the command
OF_REASONS = (
    "core/fleet/filters.py", "core/lifecycle/unmatched.py", "core/queries/explain.py",
    "core/queries/waiting.py", "questions/foresight.py", "framework/codes.py", "jobs/explain.py",
)  # fmt: skip
#: how a worker or a device is called as well
ALSO_OTHERWISE = {"not-heard", "foreign"}


def test_reasons_for_waiting_are_spelled_in_one_module() -> None:
    """Keys of answers may be the same words."""
    names = set(REASONS) - ALSO_OTHERWISE
    met = set()
    for room in ("scheduler", "cli"):
        for file in sources(room):
            of_reasons = str(file.relative_to(ROOT / ROOMS[room])) in OF_REASONS
            met.add(str(file.relative_to(ROOT / ROOMS[room])))
            keys = {
                key.value
                for node in nodes(file)
                if isinstance(node, ast.Dict)
                for key in node.keys
                if isinstance(key, ast.Constant)
            }
            ours = {name for name in names if of_reasons or "-" in name}
            spelled = set(texts(file)) & ours - keys
            assert not spelled, f"{file.relative_to(ROOT)} spells {spelled}"
    assert met >= set(OF_REASONS)


def test_no_host_path_or_secret_in_the_tree() -> None:
    hosts = re.compile(r"https?://(?!127\.0\.0\.1|localhost)[^\s)>\"'`]*/simple\b|--index-url|--find-links")
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
