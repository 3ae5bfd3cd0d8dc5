"""docs/promises.md is true of the tree: every promise has tests, and they exist."""

from __future__ import annotations

import re
import tomllib
from typing import Final

from tests.named_tests import ROOT, left_out, missing
from tests.release.mutants.files import read_mutants

PAGE: Final = (ROOT / "docs" / "promises.md").read_text()
PROMISES_MAX: Final = 45
WORDS_MAX: Final = 25
ROWS: Final = [
    (name, " ".join(text.split()), test)
    for name, text, test in re.findall(r"^### `([a-z-]+)`\n\n([^#]+?)\n\nTest: `([^`]+)`$", PAGE, re.MULTILINE)
]


def test_every_promise_is_told_once_in_short_sentences_with_a_test_that_exists() -> None:
    names = [name for name, _, _ in ROWS]
    assert len(names) == len(set(names)) == PAGE.count("\n### `") <= PROMISES_MAX
    wrong = [why for _, _, test in ROWS if (why := missing(test))]
    for name, text, _ in ROWS:
        if not text.endswith("."):
            wrong.append(f"{name}: needs whole sentences")
        long = [part for part in re.split(r"(?<=[.:;]) ", text) if len(part.split()) > WORDS_MAX]
        wrong += [f"{name}: more than {WORDS_MAX} words: {part}" for part in long]
    assert wrong == []


def test_every_promise_keeps_a_test_in_ci() -> None:
    assert [name for name, _, test in ROWS if left_out(test)] == []


def test_every_promise_is_broken_by_a_mutant() -> None:
    assert {mutant["promise"] for mutant in read_mutants()} == {name for name, _, _ in ROWS}


def test_the_mutant_that_the_page_shows_is_one() -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert tomllib.loads(shown)["mutant"][0] | {"promise": "releases"} in read_mutants()
