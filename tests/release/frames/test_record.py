"""The recorder works with the release of today: what it writes is what the one before is judged by."""

from __future__ import annotations

import pytest

from moorage.schemas.release import RELEASE
from tests.release.frames.recorded import KEPT, PRESENT, recorded


@pytest.mark.slow
def test_this_release_is_recorded_like_those_before() -> None:
    it = recorded(PRESENT)
    assert it.release == RELEASE
    assert {"ok", "fails", "gang", "adopted"} <= it.states.keys()
    for release in KEPT:
        before = recorded(release)
        assert it.states == before.states
        assert {_kind(m.words) for m in it.said()} >= {_kind(m.words) for m in before.said()}


def _kind(words: list[str]) -> tuple[str, str]:
    """What stands on a subject, whatever the job."""
    return (words[0], words[-1] if words[0] in ("api", "admin", "request", "worker", "fleet") else "")
