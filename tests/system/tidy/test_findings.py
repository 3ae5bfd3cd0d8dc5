"""The list of findings names each of them, and what rests on it is there; none is run here."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FINDINGS = ROOT / "findings"
SCRIPTS = sorted(path for path in FINDINGS.glob("*.sh") if path.name != "common.sh")


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
