"""The README is true: typed as it stands it does what it shows; its figures are the bench's, its links lead on."""

from __future__ import annotations

import re
import shlex
import statistics
from pathlib import Path
from typing import Final

import pytest

from bench.kept import read
from moorage.cli.verbs import VERBS
from tests.system.cli.node import processes_of
from tests.system.docs.driver import environment, run
from tests.unit.docs.markdown import page
from tools.readme_figures import FIGURES

ROOT: Final = Path(__file__).resolve().parents[3]
README: Final = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_typed_as_it_stands_it_does_what_it_shows(tmp_path: Path) -> None:
    # `make up` installs what the tests run on: here its last line alone; tests/system/deploy/test_dist.py has all of it
    makefile = (ROOT / "Makefile").read_text()
    fleet = re.search(r"^FLEET +\?= (\S+)$", makefile, re.MULTILINE)
    recipe = re.search(r"^up: .*\n\t@exec \$\(BIN\)/(moorage up .*) \$\(FLEET\)$", makefile, re.MULTILINE)
    assert fleet is not None
    assert recipe is not None
    (tmp_path / "Makefile").write_text(f"up:\n\t@exec {recipe[1]} {fleet[1]}\n")
    run(page(ROOT / "README.md"), tmp_path, environment(tmp_path))
    assert processes_of(str(tmp_path / ".moorage")) == []


def test_its_first_screen_shows_it_working() -> None:
    first = "\n".join(README.splitlines()[:45])
    assert [block.body for block in page(ROOT / "README.md").blocks if block.kind == "sh"][:2] == [
        "make up\n",
        "make test\n",
    ]
    assert "moorage run" in first
    assert "SUCCEEDED" in "\n".join(README.splitlines()[:55])
    assert len(README.splitlines()) <= 170


def number(text: str) -> float:
    found = re.match(r"[\d,.]+", text.strip())
    assert found is not None, text
    return float(found[0].replace(",", ""))


@pytest.mark.parametrize("row", FIGURES)
def test_a_figure_is_the_benchs_median(row: str) -> None:
    [shown] = re.findall(rf"^\| {re.escape(row)} \| ([^|]+) \|$", README, re.MULTILINE)
    bench = read("bench")
    assert bench is not None
    assert number(shown) == pytest.approx(statistics.median(bench.figures[FIGURES[row][0]]), rel=0.03)


def test_every_figure_is_held() -> None:
    assert re.findall(r"^\| (?!---)([^|]+?) \| [\d,.]+ ", README, re.MULTILINE) == list(FIGURES)


def test_every_promise_names_a_test_that_the_list_of_promises_names() -> None:
    listed = set(re.findall(r"^Test: `(tests/[^`:]+)", (ROOT / "docs" / "promises.md").read_text(), re.MULTILINE))
    section = README.partition("## What it promises")[2].partition("\n## ")[0]
    promises = re.split(r"^\d\. ", section, flags=re.MULTILINE)[1:]
    assert len(promises) >= 5
    for promise in promises:
        linked = re.findall(r"\[test\]\(([^)]+)\)", promise)
        assert linked, promise
        assert set(linked) <= listed


def test_the_commands_in_its_text_exist() -> None:
    verbs = {verb.name for group in VERBS.values() for verb in group}
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in re.findall(r"`((?:make|moorage) [^`]+)`", README):
        words = shlex.split(line)
        known = targets if words[0] == "make" else verbs
        assert words[1] in known or " ".join(words[1:3]) in known, line


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
