"""docs/promises.md is true of the tree: every promise has tests, they exist, and no earlier promise is forgotten."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from typing import Final

from tests.mutant_files import read_mutants
from tests.named_tests import ROOT, left_out, missing

PAGE: Final = (ROOT / "docs" / "promises.md").read_text()
PROMISES_MAX: Final = 45
TESTS_MAX: Final = 4
#: the entries of the list that the page replaced, but for three that are no longer promised
EARLIER: Final = 206

LIST, _, TABLE = PAGE.partition("\n## Where the earlier promises went\n")
SECTIONS: Final = re.split(r"^### ", LIST, flags=re.MULTILINE)[1:]
ROWS: Final = re.findall(r"^\| ([a-z0-9-]+) \| \[([a-z0-9-]+)\]\(#([a-z0-9-]+)\) \| `([^`]+)` \|$", TABLE, re.MULTILINE)


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


def test_every_promise_keeps_a_test_in_make_test() -> None:
    assert [name for name, (_, tests) in promises().items() if all(left_out(test) for test in tests)] == []


def test_every_earlier_promise_stands_once_in_the_table() -> None:
    lines = [line for line in TABLE.splitlines() if line.startswith("| ")][2:]
    assert len(ROWS) == len(lines) == EARLIER
    assert [name for name, count in Counter(row[0] for row in ROWS).items() if count > 1] == []
    wrong = [f"{old}: {now} is not a promise" for old, now, link, _ in ROWS if now not in promises() or link != now]
    assert wrong + [f"{old}: {why}" for old, _, _, test in ROWS if (why := missing(test))] == []


def test_every_promise_is_broken_by_a_mutant() -> None:
    assert {mutant["promise"] for mutant in read_mutants() if "promise" in mutant} == set(promises())


def test_the_mutant_that_the_page_shows_is_one() -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert tomllib.loads(shown)["mutant"][0] in read_mutants()
