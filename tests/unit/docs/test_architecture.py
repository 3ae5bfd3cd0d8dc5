"""The map of the code is right: its paths exist, and its recipes name the files that such a change really touches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.unit.docs.markdown import DOCS

ROOT: Final = DOCS.parent
SCHEDULER: Final = ROOT / "scheduler" / "moorage" / "scheduler"
MAP: Final = (DOCS / "architecture.md").read_text()
WHERE: Final = (DOCS / "where-to-look.md").read_text()
ROOMS: Final = ("schemas/", "system/", "bus/", "ranking/", "worker/", "client/", "testing/", "scheduler/", "tests/")


def found_at(path: str) -> Path:
    return ROOT / path if path.startswith(ROOMS) else SCHEDULER / path


def test_every_path_exists() -> None:
    paths = [word for word in re.findall(r"`([\w./-]+)`", MAP + WHERE) if word.endswith(("/", ".py", ".md"))]
    drawn = MAP.partition("## The way of a request")[2].partition("```text")[2].partition("```")[0]
    paths += re.findall(r"[\w/]+\.py", drawn)
    assert len(paths) > 50
    missing = [path for path in paths if not found_at(path).exists() and path != "agent.py"]
    assert missing == []
