"""What `deploy/compiled/modules.txt` names can be compiled: the reasons that leave a module out hold for none of it."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES: list[Path] = runpy.run_path(str(ROOT / "deploy" / "compiled" / "compile.py"))["modules"]()
#: mypyc would drop the keywords of a struct's definition; a compiled class that derives from these, and to which
#: something refers weakly, ends in a crash
BASES = ("msgspec.Struct", "Struct", "dict", "list", "set")
#: and what waits: mypy takes what it knew of an attribute before an `await` for true behind it, and compiled code then
#: refuses what it finds there


def _reasons(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
            yield from (f"line {node.lineno}: {node.name} derives from {base}" for base in bases if base in BASES)
            slots = [ast.unparse(stmt) for stmt in node.body if isinstance(stmt, ast.Assign)]
            yield from (f"line {node.lineno}: {node.name} is weakly referred to" for s in slots if "__weakref__" in s)
        elif isinstance(node, ast.AsyncFunctionDef):
            yield f"line {node.lineno}: {node.name} waits"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_what_is_named_can_be_compiled(path: Path) -> None:
    assert list(_reasons(ast.parse(path.read_text("utf-8")))) == []


def test_the_scheduling_core_is_compiled() -> None:
    core = ROOT / "scheduler" / "moorage" / "scheduler" / "core"
    for name in ("engine", "state", "draft", "fleet", "ledger/fold", "rank/fragments", "queueing/queue"):
        assert core / f"{name}.py" in MODULES
