"""Whether a test that a page or a mutant names exists, and whether `make test` runs it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]


@cache
def named_in(file: Path) -> frozenset[str]:
    """Return `test_x` and `TestClass::test_x` of a file; what decorators make of them keeps their names."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {node.name, *(f"{node.name}::{each.name}" for each in inner)}
    return frozenset(name for name in names if name.rpartition("::")[2].startswith(("test", "Test")))


def missing(test: str) -> str:
    """Return why a node id names no test, "" where it names one. A file alone names all of its tests."""
    file, _, name = test.partition("::")
    path = ROOT / file
    if not path.is_file() or not path.name.startswith("test_"):
        return f"{test}: no such file of tests"
    if name and name.partition("[")[0] not in named_in(path):
        return f"{test}: no such test in {file}"
    return "" if named_in(path) else f"{test}: no test in {file}"


def left_out(test: str) -> bool:
    """Whether all tests of this node id are marked `slow`, by themselves or by their file."""
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    wanted = name.partition("[")[0]
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
        if not name or node.name == wanted.rpartition("::")[2]
    ]
    of_file = [node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
    if any("mark.slow" in ast.unparse(value) for value in of_file):
        return True
    return all(any("mark.slow" in ast.unparse(each) for each in node.decorator_list) for node in functions)
