"""Each finding says what it shows, on which versions, what was guessed, and when; none is run here."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FINDINGS = ROOT / "findings"
SCRIPTS = sorted(path for path in FINDINGS.glob("*.sh") if path.name != "common.sh")
HEAD = ("Behaviour", "Versions", "Guess", "Seen", "Date")
COUNT_MIN = 14


def test_there_are_enough() -> None:
    assert len(SCRIPTS) >= COUNT_MIN


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_finding_is_executable_and_its_head_says_what_it_shows(script: Path) -> None:
    assert os.access(script, os.X_OK)
    first, *head = script.read_text().splitlines()[: 1 + len(HEAD)]
    assert first == "#!/usr/bin/env bash"
    for name, line in zip(HEAD, head, strict=True):
        assert re.fullmatch(rf"# {name}: \S.*", line), f"{script.name} lacks {name}"
    assert re.fullmatch(r"# Date: \d{4}-\d\d-\d\d", head[-1])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_finding_pins_what_it_installs_bounds_its_time_and_needs_nothing_of_moorage(script: Path) -> None:
    text = script.read_text()
    (packages,) = re.findall(r"^packages(.*)$", text, re.MULTILINE)
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", package) for package in packages.split())
    (modules,) = re.findall(r"^modules(.*)$", text, re.MULTILINE) or [""]
    assert all(re.fullmatch(r"@?[a-z0-9/-]+@[0-9.-]+", module) for module in modules.split())
    for package in (packages + modules).split():
        version = re.split("==|@", package)[-1]
        assert version in text.splitlines()[2], f"{script.name}: the head has not the version of {package}"
    assert re.search(r"^bounded \d+ <<'EOF'$", text, re.MULTILINE)
    assert "moorage" not in text


def test_the_readme_lists_them_all_with_what_rests_on_each() -> None:
    rows = re.findall(r"^\| \[.*?\]\((.*?)\) \| (.*) \|$", (FINDINGS / "README.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _ in rows) == [script.name for script in SCRIPTS]
    for name, rests in rows:
        named = re.findall(r"`([^`]+)`", rests)
        assert named, f"nothing rests on {name}"
        for place in named:
            path, _, test = place.partition("::")
            assert (ROOT / path).is_file(), f"{name}: {path} is not there"
            assert not test or re.search(rf"def {test}\(", (ROOT / path).read_text()), f"{name}: no {test}"


def test_the_page_names_tests_and_files_that_are_there() -> None:
    page = (ROOT / "docs/explanation/what-nats-really-does.md").read_text()
    rows = [
        line for line in page.splitlines() if line.startswith("| ") and "---" not in line and "behaviour" not in line
    ]
    assert len(rows) == len(SCRIPTS)
    for place in re.findall(r"`((?:bus|client|scheduler|schemas|system|tests|worker)/[^`]+)`", page):
        path, _, test = place.partition("::")
        assert (ROOT / path).is_file(), path
        assert not test or re.search(rf"def {test}\(", (ROOT / path).read_text()), place
