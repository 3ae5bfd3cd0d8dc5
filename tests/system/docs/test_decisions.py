"""Decisions and the page of trials: whatever cites one names a record or a section that exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
DECISIONS: Final = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
NUMBERS: Final = {path.name[:4] for path in DECISIONS}

#: a citation of a record by its number, or of a section of the page of trials
CITATION: Final = "([Dd]ecision |docs/decisions/)[0-9]{4}|bench/(notes/|TRIED\\.md)[0-9a-z#-]*"


def test_no_two_decisions_have_one_number() -> None:
    assert len(NUMBERS) == len(DECISIONS)


def test_index_and_navigation_name_each_decision() -> None:
    for page in (ROOT / "docs" / "decisions" / "index.md", ROOT / "mkdocs.yml"):
        assert set(re.findall(r"\b\d{4}-[a-z0-9-]+\.md", page.read_text())) == {path.name for path in DECISIONS}, page


def test_whatever_cites_a_decision_or_a_trial_names_one_that_is_there() -> None:
    """Every tracked text file: `decision NNNN`, `docs/decisions/NNNN` and a section of `bench/TRIED.md`."""
    headings = re.findall(r"^#+ (.+)$", (ROOT / "bench" / "TRIED.md").read_text(), re.MULTILINE)
    sections = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    cited = subprocess.run(
        ["git", "grep", "-nIoE", CITATION], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert cited
    for line in cited:
        file, number, what = line.split(":", 2)
        if file == "tests/system/docs/test_decisions.py":
            continue
        if what.startswith("bench/"):
            assert what == "bench/TRIED.md" or what.partition("#")[2] in sections, f"{file}:{number}: {what}"
        else:
            assert what[-4:] in NUMBERS, f"{file}:{number}: {what}"
