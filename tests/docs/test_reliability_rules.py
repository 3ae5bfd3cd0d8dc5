"""docs/reliability-rules.md is whole and true of the tree: every rule, its code, and tests and mutants that exist."""

from __future__ import annotations

import re
from typing import Final

from tests.docs.test_promises import ROOT, missing, rows

PAGE: Final = ROOT / "docs" / "reliability-rules.md"
RULES: Final = [f"H{number}" for number in range(1, 45)]


def table() -> dict[str, list[str]]:
    """The cells behind each rule's number."""
    found = [line.strip("|").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| H")]
    assert [row[0].strip() for row in found] == RULES
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in found}


def test_every_rule_has_words_code_and_a_test() -> None:
    wrong: list[str] = []
    for rule, (words, code, shown) in table().items():
        if len(words) < 30:
            wrong.append(f"{rule}: says nothing")
        if not (ROOT / code.strip("`")).is_file():
            wrong.append(f"{rule}: no file {code}")
        if "::" not in shown and "mutant" not in shown:
            wrong.append(f"{rule}: names neither test nor mutant")
    assert wrong == []


def test_every_test_and_mutant_of_the_table_exists() -> None:
    mutants = {str(row["name"]) for row in rows("mutant")}
    wrong: list[str] = []
    for rule, (_, _, shown) in table().items():
        wrong += [f"{rule}: {why}" for test in re.findall(r"`([^`]+)`", shown) if (why := missing(test))]
        wrong += [f"{rule}: no mutant {name}" for name in re.findall(r"\*([^*]+)\*", shown) if name not in mutants]
    assert wrong == []
