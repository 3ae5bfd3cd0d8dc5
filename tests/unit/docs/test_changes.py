"""The changelog, and the files of changes that a release joins into it."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

from moorage.schemas.release import RELEASE
from tools.changelog import CHARS_MAX, ROOT, BadChange, Changes, joined, read, released

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
DAY = date(2026, 12, 1)


def test_each_change_of_this_tree_has_its_form() -> None:
    """Else the message names file and line; changes/README.md has the form."""
    joined()


def test_the_changelog_is_for_reading() -> None:
    lines = CHANGELOG.splitlines()
    assert [line for line in lines if len(line) > CHARS_MAX] == []
    newest, *_ = CHANGELOG.split("\n## ")[1:]
    assert re.match(rf"{re.escape(RELEASE)}, (unreleased|\d{{4}}-\d\d-\d\d)\n", newest)
    assert len(newest.splitlines()) <= 120


def test_the_lines_of_one_area_are_side_by_side_and_what_must_be_changed_is_apart(tmp_path: Path) -> None:
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "README.md").write_text("no change\n")
    (tmp_path / "changes" / "a.md").write_text(
        "- top: one.\n- `--json`: two.\n\n## What you must change\n\n- keys: new.\n"
    )
    (tmp_path / "changes" / "b.md").write_text("- fleet: three.\n- top: four: five.")
    assert joined(tmp_path) == Changes(
        ["- keys: new."], ["- `--json`: two.", "- fleet: three.", "- top: one.", "- top: four: five."]
    )


@pytest.mark.parametrize("line", ["top: one.", "- one.", "* top: a.", "- top:", f"- top: {'x' * CHARS_MAX}", "## New"])
def test_a_line_of_another_form_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "a.md"
    file.write_text(f"- top: one.\n{line}\n")
    with pytest.raises(BadChange, match=r"changes/a\.md:2: a line is `- area: sentence\.`"):
        read(file)


def test_a_release_gives_its_section_a_date_and_the_changes() -> None:
    before = (
        "# Changelog\n\nWords.\n\n## 1.2.0, unreleased\n\nLead.\n\n### What is new\n\n- a: b.\n\n"
        "## 1.1.0, 2026-01-01\n\n- c: d.\n"
    )
    after = released(before, Changes(["- keys: new."], ["- top: one."]), "1.2.0", DAY)
    assert after == (
        "# Changelog\n\nWords.\n\n## 1.2.0, 2026-12-01\n\nLead.\n\n### What you must change\n\n- keys: new.\n\n"
        "### What is new\n\n- a: b.\n\n### Changes\n\n- top: one.\n\n## 1.1.0, 2026-01-01\n\n- c: d.\n"
    )
    again = released(after, Changes([], ["- top: two."]), "1.2.1", DAY)
    assert again == after.replace("## 1.2.0", "## 1.2.1, 2026-12-01\n\n### Changes\n\n- top: two.\n\n## 1.2.0", 1)
    with pytest.raises(ValueError, match=r"has 1\.2\.0 as the next release, not 1\.3\.0"):
        released(before, Changes([], []), "1.3.0", DAY)


def test_this_changelog_can_be_released_and_loses_no_line() -> None:
    if f"## {RELEASE}, unreleased" not in CHANGELOG:
        return
    found = joined()
    after = released(CHANGELOG, found, RELEASE, DAY)
    assert set(after.splitlines()) >= {*CHANGELOG.splitlines(), *found.must, *found.more} - {
        f"## {RELEASE}, unreleased"
    }
    assert after.count("### What you must change") == CHANGELOG.count("### What you must change")
