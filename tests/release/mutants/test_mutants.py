"""Every mutant can be made: its code stands once in the function that it names, and its tests exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

from tests.named_tests import missing
from tests.release.mutants.__main__ import COPIED
from tests.release.mutants.files import KEYS, ROOT, Mutant, file_of, mutated, places_of, read_mutants, scopes


def tree_of(text: str) -> str:
    """Return what Python makes of a function, a class or a module, however deep it stands."""
    return ast.dump(ast.parse(f"if True:\n{text}" if text[:1].isspace() else text))


@cache
def source_of(file: Path) -> str:
    return file.read_text()


def trouble_of(mutant: Mutant) -> str:
    """Return why a mutant cannot be made, "" where it can."""
    file = ROOT / file_of(mutant)
    if not file.is_file():
        return f"there is no file {file_of(mutant)}"
    source = source_of(file)
    try:
        changed = mutated(source, mutant)
    except ValueError as error:
        return str(error)
    ((begin, _),) = places_of(source, mutant)
    spans = [span for span, _ in scopes(source, mutant["where"])]
    ((start, stop),) = [(start, stop) for start, stop in spans if start <= begin < stop]
    before, after = source[start:stop], changed[start : len(changed) - (len(source) - stop)]
    try:
        same = before == after or (file.suffix == ".py" and tree_of(before) == tree_of(after))
    except SyntaxError as error:
        return f"what it makes is no Python: {error}"
    return "changes nothing" if same else ""


def test_every_mutants_code_stands_once_where_it_says() -> None:
    wrong = [f"{each['name']}: {trouble}" for each in read_mutants() if (trouble := trouble_of(each))]
    assert wrong == []


def test_no_mutant_uses_a_name_that_nothing_defines(tmp_path: Path) -> None:
    """It would be caught as a NameError, whatever its test looks at."""
    for number, mutant in enumerate(read_mutants()):
        file = ROOT / file_of(mutant)
        if file.suffix == ".py":
            (tmp_path / f"mutant_{number}.py").write_text(f"# {mutant['name']}\n{mutated(source_of(file), mutant)}")
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F823", str(tmp_path)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_mutant_has_a_name_of_its_own_and_tests_that_exist() -> None:
    mutants = read_mutants()
    assert [name for name, count in Counter(each["name"] for each in mutants).items() if count > 1] == []
    wrong: list[str] = []
    for each in mutants:
        unknown = set(each) - KEYS - {"promise"}
        if unknown or not {"name", "where", "find", "put", "tests"} <= set(each):
            wrong.append(f"{each['name']}: a key is missing or unknown {sorted(unknown)}")
        if not (each["tests"] or each.get("seeds", 0) > 0):
            wrong.append(f"{each['name']}: needs at least one test, or seeds of the simulation")
        wrong += [f"{each['name']}: {why}" for test in each["tests"] if (why := missing(test))]
    assert wrong == []


def test_the_copy_that_is_broken_has_every_folder_that_tests_import() -> None:
    """`make mutants` runs the tests in a copy of the tree: without one folder none of them can be collected."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    texts = "\n".join(source_of(file) for file in (ROOT / "tests").rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", texts, re.MULTILINE))
    assert imported & folders - set(COPIED) == set()


def test_the_file_of_every_mutant_is_in_the_copy_that_is_broken() -> None:
    assert {file_of(mutant).partition("/")[0] for mutant in read_mutants()} <= set(COPIED)
