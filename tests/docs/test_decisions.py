"""Decisions and laboratory notes: each has its form, and what cites one names one that is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tools import decision_pages

ROOT: Final = Path(__file__).resolve().parents[2]
RECORDS: Final = list(decision_pages.records())
NOTES: Final = list(decision_pages.lab_notes())
NUMBERS: Final = {record.number for record in RECORDS}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.number)
def test_a_decision_has_its_status_and_its_three_sections_in_order(record: decision_pages.Record) -> None:
    assert re.match(r"(accepted|superseded by \[?\d{4}|withdrawn)", record.status), record.status
    sections = re.findall(r"^## (.+)$", record.path.read_text(), re.MULTILINE)
    assert [name for name in sections if name in ("Context", "Decision", "Consequences")] == [
        "Context",
        "Decision",
        "Consequences",
    ]


def test_no_two_decisions_have_one_number() -> None:
    assert len(NUMBERS) == len(RECORDS)


def test_numbers_in_brackets_lead_to_a_page() -> None:
    for page in (*(record.path for record in RECORDS), *(note.path for note in NOTES)):
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
        elif not file.startswith("bench/notes/") and "was decision" not in _line(file, int(number)):
            assert what[-4:] in NUMBERS, f"{file}:{number}: {what}"


def _line(file: str, number: int) -> str:
    return (ROOT / file).read_text().splitlines()[number - 1]
