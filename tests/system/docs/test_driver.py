"""The driver of the docs' tests finds every kind of lie that a page could tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.docs.driver import at_home_in, environment, run
from tests.unit.docs.markdown import DOCS, first_missing, page


def told(text: str, folder: Path) -> None:
    """Run a page that says `text`."""
    file = DOCS.parent / "docs" / "made-up.md"
    run(page(file, text), folder, environment(folder))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("```sh\nfalse\ntrue\n```", "false failed"),
        ("```sh\nexit 3\n```", "the shell ended"),
        ("```sh\necho one\n```\n\n```text\ntwo\n```", "not in the output: 'two'"),
        ("```sh\necho two; echo one\n```\n\n```text\none\ntwo\n```", "not in the output: 'two'"),
        ("```python\nraise SystemExit(1)\n```", "failed"),
        ('```json title="request"\n{"gpu": {"count": 0}}\n```', "count must be 1..64"),
        ('```json title="Event"\n{"kind": "event"}\n```', "missing required field"),
        ("```json\n{}\n```", "neither request nor a frame"),
        ("```yaml\na: 1\n```", "no rule for a block of 'yaml'"),
        ("```text\nan output of nothing\n```", "below no block"),
    ],
)
def test_a_lie_is_found_and_its_line_named(text: str, wrong: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"made-up\.md:1") as found:
        told(text, tmp_path)
    assert wrong in str(found.value)


@pytest.mark.parametrize(
    ("expected", "output", "missing"),
    [
        ("a  b", "a b\r\n", ""),
        ("accepted: 2xH100, ledger record 13", "accepted: 2xH100, ledger record 7", ""),
        (
            "accepted: 2xH100, ledger record 13",
            "accepted: 3xH100, ledger record 13",
            "accepted: 2xH100, ledger record 13",
        ),
        ("held … leased", "held by n: 8 of 8 leased", ""),
        ("one\n…\ntwo", "one\ntwo", ""),
        ("age 3s", "age 1h20m", ""),
        ("age 3s", "age old", "age 3s"),
        ("j1m7wabeqq61k8a  SUCCEEDED", "\x1b[Kj1m7wbhnys1bfef  SUCCEEDED\x1b[0m", ""),
    ],
)
def test_what_varies_may_and_nothing_else(expected: str, output: str, missing: str) -> None:
    assert first_missing(expected, output) == missing


@pytest.mark.slow
def test_nothing_of_a_page_runs_on(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="failed"):
        told("```sh\n(trap '' HUP; exec setsid sleep 31418) &\nfalse\n```", tmp_path)
    assert at_home_in(tmp_path) == []
