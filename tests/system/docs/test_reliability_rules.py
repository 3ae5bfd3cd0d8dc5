"""docs/reliability-rules.md is whole and true of the tree: every rule, its code, and tests and mutants that exist."""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.named_tests import ROOT, missing
from tests.release.mutants.__main__ import chosen
from tests.release.mutants.files import read_mutants

PAGE: Final = ROOT / "docs" / "reliability-rules.md"
RULES: Final = [f"H{number}" for number in range(1, 46)]


def table() -> dict[str, list[str]]:
    """The words, the file and the tests with mutants of each rule, by its number."""
    parts = re.split(r"^## (H\d+)\n", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert parts[::2] == RULES
    found = {}
    for rule, text in zip(parts[::2], parts[1::2], strict=True):
        words, code, shown = re.fullmatch(r"(.*?)^Code: (\S+)$(.*)", text, re.MULTILINE | re.DOTALL).groups()  # type: ignore[union-attr]
        found[rule] = [words.strip(), code, shown]
    return found


def named(shown: str) -> set[str]:
    """The mutants of a section."""
    return set(re.findall(r"\*([^*\n]+)\*", shown))


def test_every_rule_has_words_code_and_a_mutant() -> None:
    wrong: list[str] = []
    for rule, (words, code, shown) in table().items():
        if len(words) < 30:
            wrong.append(f"{rule}: says nothing")
        if not (ROOT / code.strip("`")).is_file():
            wrong.append(f"{rule}: no file {code}")
        if not named(shown):
            wrong.append(f"{rule}: names no mutant that takes it out")
    assert wrong == []


def test_every_test_and_mutant_of_the_page_exists() -> None:
    mutants = {str(row["name"]) for row in read_mutants()}
    wrong: list[str] = []
    for rule, (_, _, shown) in table().items():
        wrong += [f"{rule}: {why}" for test in re.findall(r"`([^`]+)`", shown) if (why := missing(test))]
        wrong += [f"{rule}: no mutant {name}" for name in named(shown) if name not in mutants]
    assert wrong == []


def test_what_takes_a_rule_out_is_on_the_page_with_the_tests_that_see_it() -> None:
    cells = [shown for _, _, shown in table().values()]
    wrong: list[str] = []
    for row in read_mutants():
        if row["promise"] != "ledger-rules":
            continue
        places = [shown for shown in cells if row["name"] in named(shown)]
        if not places:
            wrong.append(f"{row['name']}: of no rule")
        wrong += [f"{row['name']}: {test} is not named" for test in row["tests"] if not any(test in x for x in places)]
    assert wrong == []


def test_mutants_are_found_by_rule_name_promise_and_file() -> None:
    every = read_mutants()
    assert {row["name"] for row in chosen(every, ["H3"])} == named(table()["H3"][2])
    assert {row["promise"] for row in chosen(every, ["ledger-rules"])} == {"ledger-rules"}
    assert [row["name"] for row in chosen(every, ["fence off"])] == ["fence off"]
    with pytest.raises(SystemExit, match="no mutant has 'H46'"):
        chosen(every, ["H46"])
