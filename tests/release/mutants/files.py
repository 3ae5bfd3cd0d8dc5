"""The mutants: small defects put in on purpose, each with the tests that must then fail.

They stand in `tests/release/mutants/<promise>.toml`, by the id of the promise in `docs/promises.md` that they break:
one of each, one of each rule of the ledger (`docs/reliability-rules.md`), and one of each way in which a sharer of a
GPU is kept to its part (`docs/promises.md`). `library.py` makes many more. The keys of a mutant:

- `name`: says what is broken; no two mutants have the same name.
- `where`: the file, and for Python behind a colon the class or function, such as `bus/x.py:Inbox.close`. With nothing
  behind the colon it is the code of the module outside of its classes and functions.
- `find`: the code to replace. Every run of white space matches every other one. It matches exactly once there.
- `put`: the code that takes its place. Its further lines are indented as far as the line of the match, and more.
- `tests`: the tests, of which at least one must fail.
- `seeds` (optional): that many seeds of the simulation must also find it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[3]
FOLDER: Final = Path(__file__).resolve().parent
KEYS: Final = frozenset({"name", "where", "find", "put", "tests", "seeds"})

Mutant = dict[str, Any]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Span = tuple[int, int]


def read_mutants() -> list[Mutant]:
    """Return all mutants with their promise, in the order of their files. Raises TOMLDecodeError for a broken file."""
    found: list[Mutant] = []
    for file in sorted(FOLDER.glob("*.toml")):
        found += [each | {"promise": file.stem} for each in tomllib.loads(file.read_text())["mutant"]]
    return found


def file_of(mutant: Mutant) -> str:
    """Return the path of the file that a mutant changes, relative to the root."""
    return str(mutant["where"]).partition(":")[0]


def mutated(source: str, mutant: Mutant) -> str:
    """Return the text of the file with the mutant in it. Raises ValueError unless the code is there exactly once."""
    places = places_of(source, mutant)
    if len(places) != 1:
        raise ValueError(f"its code stands {len(places)} times in {mutant['where']}, not once")
    ((begin, end),) = places
    line = source[source.rfind("\n", 0, begin) + 1 : begin]
    indent = line[: len(line) - len(line.lstrip())]
    return source[:begin] + str(mutant["put"]).replace("\n", f"\n{indent}") + source[end:]


def places_of(source: str, mutant: Mutant) -> list[Span]:
    """Return each place where the code of a mutant stands, in the function that it names."""
    pattern = re.compile(r"\s+".join(re.escape(word) for word in mutant["find"].split()))
    found: list[Span] = []
    for (begin, end), left_out in scopes(source, mutant["where"]):
        for match in pattern.finditer(source, begin, end):
            if not any(start <= match.start() < stop for start, stop in left_out):
                found.append(match.span())
    return found


def scopes(source: str, where: str) -> list[tuple[Span, list[Span]]]:
    """Return where to look: each stretch of the text, and what to leave out of it."""
    file, _, path = where.partition(":")
    if not file.endswith(".py"):
        return [((0, len(source)), [])]
    nodes: list[ast.AST] = [parsed(source)]
    for name in path.split(".") if path else ():
        nodes = [inner for node in nodes for inner in defined_in(node) if inner.name == name]
    found = []
    for node in nodes:
        whole = lines_of(source, node) if isinstance(node, Definition) else (0, len(source))
        inside = [] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else list(defined_in(node))
        found.append((whole, [lines_of(source, each) for each in inside]))
    return found


@lru_cache(maxsize=400)
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@lru_cache(maxsize=400)
def starts_of_lines(source: str) -> list[int]:
    return [0, *(match.end() for match in re.finditer("\n", source)), len(source)]


def defined_in(node: ast.AST) -> Iterator[Definition]:
    """Yield the functions and classes of a module, class or function, but none that stands in another of them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield child
        else:
            yield from defined_in(child)


def lines_of(source: str, node: Definition) -> Span:
    """Return from where to where a definition goes, with its decorators."""
    starts = starts_of_lines(source)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return starts[first - 1], starts[min(node.end_lineno or first, len(starts) - 1)]
