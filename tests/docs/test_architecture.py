"""The map of the code is right: its paths exist, and its recipes name the files that such a change really touches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.docs.markdown import DOCS

ROOT: Final = DOCS.parent
SCHEDULER: Final = ROOT / "scheduler" / "moorage" / "scheduler"
MAP: Final = (DOCS / "architecture.md").read_text()
WHERE: Final = (DOCS / "where-to-look.md").read_text()
ROOMS: Final = ("schemas/", "system/", "bus/", "ranking/", "worker/", "client/", "testing/", "scheduler/", "tests/")
RECIPES: Final = {
    title: (int(count), re.findall(r"^- `([^`]+)`", body, re.MULTILINE))
    for title, count, body in re.findall(
        r"^### ([^\n]+): (\d) files\n(.*?)(?=^### |\Z)", WHERE, re.MULTILINE | re.DOTALL
    )
}


def found_at(path: str) -> Path:
    return ROOT / path if path.startswith(ROOMS) else SCHEDULER / path


def files_with(pattern: str, *rooms: str) -> set[str]:
    """The product's files that match, named as on the page."""
    found = set()
    for room in rooms:
        for file in sorted((ROOT / room / "moorage").rglob("*.py")):
            if re.search(pattern, file.read_text()):
                inside = SCHEDULER in file.parents
                found.add(str(file.relative_to(SCHEDULER if inside else ROOT)))
    return found


def test_every_path_exists() -> None:
    paths = [word for word in re.findall(r"`([\w./-]+)`", MAP + WHERE) if word.endswith(("/", ".py", ".md"))]
    drawn = MAP.partition("## The way of a request")[2].partition("```text")[2].partition("```")[0]
    paths += re.findall(r"[\w/]+\.py", drawn)
    assert len(paths) > 50
    missing = [path for path in paths if not found_at(path).exists() and path != "agent.py"]
    assert missing == []


def test_recipes_count_their_files() -> None:
    assert len(RECIPES) == 9
    for title, (count, files) in RECIPES.items():
        assert len(files) == count, title


@pytest.mark.parametrize(
    ("title", "found"),
    [
        (
            "A field of the request that placement reads",
            files_with(r"\bmin_memory_mib\b", "schemas", "scheduler") | {"schemas/moorage/schemas/reasons.py"},
        ),
        (
            "An operator's verb",
            files_with(r"RequeueAct|\"requeue\"", "schemas", "scheduler", "client")
            | files_with(r"^(async )?def requeue\(", "client")
            | files_with(r"\ndef requeue\(", "client")
            | files_with(r"\"admin requeue\"", "client"),
        ),
        ("An act of the ledger", files_with(r"\bScaled?\b(?! )|\bScale,$", "scheduler")),
        ("A driver", files_with(r"\bclass Noop|:NoopDriver\"|^    \"noop\":|\"noop\": C", "schemas", "worker")),
        ("A setting of the scheduler", files_with(r"\n    reserve_after: |config\.reserve_after", "scheduler")),
        ("A field of the load frame", files_with(r"\btemperature_c\b", "schemas", "worker", "scheduler", "client")),
        ("A ranker", files_with(r"\b[Hh]eadroom\(|\"headroom\":|, headroom, or", "scheduler", "ranking")),
    ],
)
def test_a_recipe_names_what_its_precedent_touches(title: str, found: set[str]) -> None:
    assert set(RECIPES[title][1]) == found
