"""No file imports itself by way of others; imports for types alone and imports inside functions count as well.

A circle says that a thing stands in the wrong file: what both need goes into a file below both. Names in tables, as
those of verbs and of drivers, are no imports: they are looked up when they are used.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

from tests.system.tidy.test_tidy import ROOMS, ROOT

PRODUCT: Final = sorted({folder.partition("/")[0] for folder in ROOMS.values()})
BESIDE: Final = ("tests", "bench", "tools", "docs")


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the tree by its name."""
    for room in (*PRODUCT, *BESIDE):
        top = ROOT / room if room in PRODUCT else ROOT
        for file in sorted((ROOT / room).rglob("*.py")):
            name = ".".join(file.relative_to(top).with_suffix("").parts)
            yield name.removesuffix(".__init__"), file


def named(tree: ast.Module) -> Iterator[str]:
    """What a file imports, anywhere in it; of `from a import b` also `a.b`, which may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(name: str, file: Path, known: Mapping[str, object]) -> set[str]:
    """The modules that a module imports, with the packages that they are in, but for packages that it is in itself."""
    found = set()
    for each in named(ast.parse(file.read_text())):
        parts = each.split(".")
        found |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return {each for each in found if each in known and each != name and not name.startswith(f"{each}.")}


@pytest.mark.slow
def test_no_file_imports_itself_by_way_of_others() -> None:
    files = dict(modules())
    assert len(files) > 600
    TopologicalSorter({name: imports_of(name, file, files) for name, file in files.items()}).prepare()
