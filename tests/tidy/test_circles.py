"""No file imports itself by way of others; imports for types alone and imports inside functions count as well.

A circle says that a thing stands in the wrong file: what both need goes into a file below both. Names in tables, as
those of verbs and of drivers, are no imports: they are looked up when they are used.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.tidy.test_tidy import ROOMS, ROOT, parsed

PRODUCT: Final = sorted({folder.partition("/")[0] for folder in ROOMS.values()})
BESIDE: Final = ("tests", "bench", "tools", "docs")
#: circles that are left, each as its modules in order. Take away from it; add nothing to it
LEFT: Final[list[list[str]]] = []

Imports = Mapping[str, set[str]]


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the tree by its name."""
    for room in (*PRODUCT, *BESIDE):
        top = ROOT / room if room in PRODUCT else ROOT
        for file in sorted((ROOT / room).rglob("*.py")):
            name = ".".join(file.relative_to(top).with_suffix("").parts)
            yield name.removesuffix(".__init__"), file


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements of a file, however deep they stand."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr):
            yield node
            yield from statements(node)


def named(tree: ast.Module) -> Iterator[str]:
    """What a file imports, anywhere in it; of `from a import b` also `a.b`, which may be a module."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(name: str, tree: ast.Module, known: Mapping[str, object]) -> set[str]:
    """The modules that a module imports, with the packages that they are in, but for packages that it is in itself."""
    found = set()
    for each in named(tree):
        parts = each.split(".")
        found |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return {each for each in found if each in known and each != name and not name.startswith(f"{each}.")}


def circles(imports: Imports) -> list[list[str]]:
    """The sets of modules of which each imports all others, by way of others as well (Tarjan, SIAM J. Comp. 1972)."""
    number: dict[str, int] = {}
    least: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = least[name] = len(number)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in number:
                visit(other)
                least[name] = min(least[name], least[other])
            elif other in stack:
                least[name] = min(least[name], number[other])
        if least[name] == number[name]:
            at = stack.index(name)
            circle = sorted(stack[at:])
            del stack[at:]
            if len(circle) > 1:
                found.append(circle)

    for name in sorted(imports):
        if name not in number:
            visit(name)
    return sorted(found)


def circles_of(parse: Callable[[Path], ast.Module], files: Mapping[str, Path]) -> list[list[str]]:
    return circles({name: imports_of(name, parse(file), files) for name, file in files.items()})


@pytest.mark.slow
def test_no_file_of_the_product_imports_itself_by_way_of_others() -> None:
    files = {name: file for name, file in modules() if name.startswith("moorage.")}
    assert len(files) > 300
    assert [found for found in circles_of(parsed, files) if found not in LEFT] == []


@pytest.mark.slow
def test_nor_does_a_file_of_the_tests_or_the_tools() -> None:
    found = circles_of(parsed, dict(modules()))
    assert found == LEFT


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.py": "import b", "b.py": "import c", "c.py": ""}, []),
        ({"a.py": "import b", "b.py": "import c", "c.py": "import a"}, [["a", "b", "c"]]),
        ({"a.py": "def f():\n    import b", "b.py": "from a import f"}, [["a", "b"]]),
        ({"a.py": "if TYPE_CHECKING:\n    from b import B", "b.py": "from a import A"}, [["a", "b"]]),
        ({"p/__init__.py": "from p import a", "p/a.py": "from p import b", "p/b.py": ""}, []),
        ({"p/__init__.py": "import q", "p/a.py": "", "q.py": "from p.a import A"}, [["p", "q"]]),
        ({"p/__init__.py": "", "p/a.py": "from p import b", "p/b.py": "from p import a"}, [["p.a", "p.b"]]),
        ({"a.py": "import b", "b.py": "import a", "c.py": "import d", "d.py": "import c"}, [["a", "b"], ["c", "d"]]),
    ],
)
def test_a_circle_is_found(files: dict[str, str], expected: list[list[str]], tmp_path: Path) -> None:
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    known = {path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): tmp_path / path for path in files}
    assert circles_of(lambda file: ast.parse(file.read_text()), known) == expected
