"""docs/promises.md is true of the tree: every promise has tests, and they exist."""

from __future__ import annotations

import importlib
import re
import tomllib
from typing import Final

from tests.named_tests import ROOT, left_out, missing
from tests.release.mutants.files import read_mutants

PAGE: Final = (ROOT / "docs" / "promises.md").read_text()
PROMISES_MAX: Final = 45
TESTS_MAX: Final = 4
SECTIONS: Final = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
NOT_KEPT_YET: Final = re.findall(r"^- [^`\n].*$", PAGE, re.MULTILINE)


def promises() -> dict[str, tuple[str, list[str]]]:
    """Return the sentence and the tests of each promise, by its id."""
    found: dict[str, tuple[str, list[str]]] = {}
    for section in SECTIONS:
        name, _, text = section.partition("\n")
        assert name not in found, f"{name} stands twice"
        sentence, *_ = text.strip().split("\n\n")
        found[name] = sentence, re.findall(r"^- `([^`]+)`$", text, re.MULTILINE)
    return found


def test_every_promise_is_one_sentence_with_tests_that_exist() -> None:
    assert 0 < len(promises()) <= PROMISES_MAX
    wrong: list[str] = []
    for name, (sentence, tests) in promises().items():
        if not re.fullmatch(r"[A-Z`][^\n]+[^.\n]\.", sentence) or ". " in sentence:
            wrong.append(f"{name}: needs one sentence on one line")
        if not 1 <= len(tests) <= TESTS_MAX:
            wrong.append(f"{name}: has {len(tests)} tests, not 1 to {TESTS_MAX}")
        wrong += [f"{name}: {why}" for test in tests if (why := missing(test))]
    assert wrong == []


def test_what_is_not_kept_yet_has_tests_that_are_expected_to_fail() -> None:
    """Once it is kept, its words are those of a promise."""
    for words in NOT_KEPT_YET:
        tests = re.findall(r"`(tests/[^`]+)`", words)
        assert tests, words
        for test in tests:
            file, _, name = test.partition("::")
            found = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)
            marks = [mark for mark in getattr(found, "pytestmark", []) if mark.name == "xfail"]
            assert [mark.kwargs["strict"] for mark in marks] == [True], f"{test} is not expected to fail"


def test_every_promise_keeps_a_test_in_ci() -> None:
    assert [name for name, (_, tests) in promises().items() if all(left_out(test) for test in tests)] == []


def test_every_promise_is_broken_by_a_mutant() -> None:
    assert {mutant["promise"] for mutant in read_mutants()} == set(promises())


def test_the_mutant_that_the_page_shows_is_one() -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert tomllib.loads(shown)["mutant"][0] | {"promise": "releases"} in read_mutants()
