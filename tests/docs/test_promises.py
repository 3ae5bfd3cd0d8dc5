"""docs/promises.toml is true of the tree: its tests exist, every promise has one, every mutant can be made."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
PROMISES: Final = ROOT / "docs" / "promises.toml"


@cache
def listed() -> dict[str, Any]:
    return tomllib.loads(PROMISES.read_text())


@cache
def named_in(file: Path) -> frozenset[str]:
    """`test_x` and `TestClass::test_x` of a file; what decorators make of them keeps their names."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {node.name, *(f"{node.name}::{each.name}" for each in inner)}
    return frozenset(name for name in names if name.rpartition("::")[2].startswith(("test", "Test")))


def missing(test: str) -> str:
    """Why a node id names no test; "" where it does. A file alone names all of its tests."""
    file, _, name = test.partition("::")
    path = ROOT / file
    if not path.is_file() or not path.name.startswith("test_"):
        return f"{test}: no such file of tests"
    if name and name.partition("[")[0] not in named_in(path):
        return f"{test}: no such test in {file}"
    return "" if named_in(path) else f"{test}: no test in {file}"


def rows(kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = listed()[kind]
    assert found, f"no {kind} in {PROMISES.name}"
    return found


def test_every_promise_has_a_name_a_text_and_tests_that_exist() -> None:
    wrong: list[str] = []
    for promise in rows("promise"):
        if not str(promise.get("text", "")).strip() or not promise.get("tests"):
            wrong.append(f"{promise['id']}: needs a text and at least one test")
        wrong += [found for test in promise.get("tests", ()) if (found := missing(test))]
    assert wrong == []


def test_no_name_stands_twice() -> None:
    for kind, key in (("promise", "id"), ("mutant", "name")):
        twice = [name for name, count in Counter(row[key] for row in rows(kind)).items() if count > 1]
        assert twice == [], kind


def test_every_mutant_breaks_a_promise_and_names_tests_that_exist() -> None:
    ids = {promise["id"] for promise in rows("promise")}
    wrong: list[str] = []
    for mutant in rows("mutant"):
        if mutant["promise"] not in ids:
            wrong.append(f"{mutant['name']}: no promise {mutant['promise']}")
        if not (mutant["tests"] or mutant.get("seeds", 0) > 0):
            wrong.append(f"{mutant['name']}: needs at least one test, or seeds of the simulation")
        wrong += [found for test in mutant["tests"] if (found := missing(test))]
    assert wrong == []


def test_every_mutants_text_stands_once_in_its_file() -> None:
    wrong: list[str] = []
    for mutant in rows("mutant"):
        file = ROOT / mutant["file"]
        count = file.read_text().count(mutant["old"]) if file.is_file() else 0
        if count != 1:
            wrong.append(f"{mutant['name']}: its text stands {count} times in {mutant['file']}, not once")
        elif mutant["old"] == mutant["new"]:
            wrong.append(f"{mutant['name']}: changes nothing")
    assert wrong == []
