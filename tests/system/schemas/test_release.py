"""Which releases work together, and where the version is told."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.schemas import release
from moorage.schemas.release import RELEASE, minor_of, minors_apart, release_problem
from moorage.system.build import build

minors = st.tuples(st.integers(0, 3), st.integers(0, 30))
lasts = st.dictionaries(st.integers(0, 3), st.integers(0, 30), max_size=4)


@pytest.mark.parametrize(
    ("found", "minor"),
    [
        ("0.2.0", (0, 2)), ("0.2", (0, 2)), ("0.10.3", (0, 10)), ("1.0.0rc1", (1, 0)), ("1.2.3.dev4+gabc", (1, 2)),
        ("12.34.56-alpha", (12, 34)), ("", None), ("2", None), ("v0.2.0", None), ("0.2.x", (0, 2)), (" 0.2.0", None),
        ("0.2.0\n", None), ("0..2", None), ("-1.2.0", None), ("٠.٢.٠", None),
        ("0.2.0" + "x" * 999, None), ("9" * 999 + ".1", None),
    ],
)  # fmt: skip
def test_what_is_a_release(found: str, minor: tuple[int, int] | None) -> None:
    assert minor_of(found) == minor


@pytest.mark.parametrize(
    ("one", "other", "last_minor", "apart"),
    [
        ((0, 2), (0, 2), {}, 0),
        ((0, 1), (0, 2), {}, 1),
        ((0, 1), (0, 3), {}, 2),
        ((0, 9), (0, 10), {}, 1),
        ((0, 9), (1, 0), {}, None),  # who does not know which 0.x was the last takes no chances
        ((0, 9), (1, 0), {0: 9}, 1),
        ((0, 8), (1, 0), {0: 9}, 2),
        ((0, 9), (1, 1), {0: 9}, 2),
        ((0, 9), (2, 0), {0: 9, 1: 0}, None),
    ],
)
def test_how_far_apart(
    one: tuple[int, int], other: tuple[int, int], last_minor: dict[int, int], apart: int | None
) -> None:
    assert minors_apart(one, other, last_minor) == minors_apart(other, one, last_minor) == apart


@given(minors, minors, lasts)
def test_it_is_a_distance(one: tuple[int, int], other: tuple[int, int], last_minor: dict[int, int]) -> None:
    apart = minors_apart(one, other, last_minor)
    assert (apart == 0) == (one == other)
    assert apart is None or apart >= 0
    assert apart is not None or one[0] != other[0]


@given(st.text(max_size=80), st.sampled_from(["0.2.0", "1.0.0"]))
def test_any_text_is_judged(found: str, ours: str) -> None:
    told = release_problem(found, ours)
    if found and minor_of(found) is None:
        assert told is not None
        assert (told.code, told.field) == ("invalid-argument", "$.hello.release")


@pytest.mark.parametrize(
    ("found", "ours", "allowed", "who"),
    [
        ("0.1.9", "0.3.0", "0.2 to 0.4", "upgrade this worker"),
        ("0.5.0", "0.3.0", "0.2 to 0.4", "upgrade the schedulers"),
        ("1.0.0", "0.3.0", "0.2 to 0.4", "upgrade the schedulers"),
        ("0.2.0", "0.0.7", "0.0 to 0.1", "upgrade the schedulers"),
        ("0.9.0", "1.0.0", "1.0 to 1.1", "upgrade this worker"),
    ],
)
def test_a_refusal_says_what_how_far_and_what_next(found: str, ours: str, allowed: str, who: str) -> None:
    told = release_problem(found, ours)
    assert told is not None
    assert (told.code, told.found, told.allowed, told.fault) == ("release-apart", found, allowed, "fleet")
    assert found in told.message
    assert ours in told.message
    assert who in told.message
    assert told.next == "upgrade one minor version at a time: first every scheduler, then the workers"


def test_over_a_change_of_the_major_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(release.LAST_MINOR, 0, 9)
    release_problem.cache_clear()
    assert release_problem("0.9.4", "1.0.0") is release_problem("1.0.0", "0.9.9") is None
    older, newer = release_problem("0.8.0", "1.0.0"), release_problem("1.1.0", "0.9.0")
    release_problem.cache_clear()
    assert older is not None
    assert newer is not None
    assert (older.allowed, newer.allowed) == ("0.9 to 1.1", "0.8 to 1.0")


@pytest.mark.parametrize("found", ["", "0.1.0", RELEASE, "0.3.0", "0.3.0rc1"])
def test_neighbours_and_who_names_none_work_with_this_release(found: str) -> None:
    assert release_problem(found, "0.2.0") is None


def test_the_version_stands_once_and_everywhere() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", RELEASE), "$SRV wants three numbers (NATS ADR-32)"
    assert minor_of(version("moorage")) == minor_of(RELEASE), "install the tree again: make"
    said = subprocess.run([sys.executable, "-m", "moorage.cli", "--version"], capture_output=True, text=True)
    assert said.stdout.strip() == build()
    changes = (Path(__file__).resolve().parents[3] / "CHANGELOG.md").read_text()
    assert f"## {RELEASE}" in changes or "## Unreleased" in changes
