"""Decisions and laboratory notes: each has its form, and what cites one names one that is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

from tools import lab_notes

ROOT: Final = Path(__file__).resolve().parents[3]
DECISIONS: Final = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
NUMBERS: Final = {path.name[:4] for path in DECISIONS}


def test_no_two_decisions_have_one_number() -> None:
    assert len(NUMBERS) == len(DECISIONS)


def test_numbers_in_brackets_lead_to_a_page() -> None:
    for page in (*DECISIONS, *(note.path for note in lab_notes.notes())):
        text = page.read_text()
        leads = dict(re.findall(r"^\[(\d{4})\]: (\S+)$", text, re.MULTILINE))
        assert set(re.findall(r"\[(\d{4})\](?![:(])", text)) <= set(leads), page.name
        assert all((page.parent / target).exists() for target in leads.values()), page.name


def test_whatever_cites_a_decision_or_a_note_names_one_that_is_there() -> None:
    """Every tracked text file: `decision NNNN`, `docs/decisions/NNNN` and `bench/notes/...md`."""
    cited = subprocess.run(
        ["git", "grep", "-nIoE", "([Dd]ecision |docs/decisions/)[0-9]{4}|bench/notes/[0-9a-z-]+\\.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert cited
    for line in cited:
        file, number, what = line.split(":", 2)
        if what.startswith("bench/notes/"):
            assert (ROOT / what).exists(), f"{file}:{number}: {what}"
        elif not file.startswith("bench/notes/"):
            assert what[-4:] in NUMBERS, f"{file}:{number}: {what}"
