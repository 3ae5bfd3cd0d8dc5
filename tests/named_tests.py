"""Whether a test that a page or a mutant names exists, and whether CI runs it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]


@cache
def _tests_of(file: Path) -> dict[str, bool]:
    """Return `test_x` and `TestClass::test_x` of a file, each with whether it is marked `slow`, itself or its file."""
    tree = ast.parse(file.read_text())
    marks = [
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    all_slow = any("mark.slow" in ast.unparse(mark) for mark in marks)
    found: dict[str, bool] = {}
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        before = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        for each in inner:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                slow = any("mark.slow" in ast.unparse(mark) for mark in each.decorator_list)
                found[before + each.name] = all_slow or slow
        if isinstance(node, ast.ClassDef):
            found[node.name] = all_slow
    return {name: slow for name, slow in found.items() if name.rpartition("::")[2].startswith(("test", "Test"))}


def missing(test: str) -> str:
    """Return why a node id names no test, "" where it names one. A file alone names all of its tests."""
    file, _, name = test.partition("::")
    path = ROOT / file
    if not path.is_file() or not path.name.startswith("test_"):
        return f"{test}: no such file of tests"
    if name and name.partition("[")[0] not in _tests_of(path):
        return f"{test}: no such test in {file}"
    return "" if _tests_of(path) else f"{test}: no test in {file}"


def left_out(test: str) -> bool:
    """Whether CI runs none of this node id: all are of the release layer and marked `slow`."""
    file, _, name = test.partition("::")
    if not file.startswith("tests/release/"):
        return False
    tests = _tests_of(ROOT / file)
    return tests[name.partition("[")[0]] if name else all(tests.values())
