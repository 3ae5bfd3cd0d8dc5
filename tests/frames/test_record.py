"""The recorder works with the release of today: what it writes is what the one before is judged by."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.state import State
from moorage.schemas.release import RELEASE
from tests.frames.recorded import RELEASES, Recorded, recorded


@pytest.mark.slow
def test_this_release_is_recorded_like_those_before(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.frames.record", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    it = Recorded(tmp_path / ".".join(RELEASE.split(".")[:2]))
    assert it.release == RELEASE
    state = State()
    for seq, _, data in it.ledger:
        fold(state, decode_record(data), seq)
    assert state.digest == it.digest
    for release in RELEASES:
        before = recorded(release)
        assert it.states == before.states
        assert {_kind(m.words) for m in it.said()} >= {_kind(m.words) for m in before.said()}


def _kind(words: list[str]) -> tuple[str, str]:
    """What stands on a subject, whatever the job."""
    return (words[0], words[-1] if words[0] in ("api", "admin", "request", "worker", "fleet") else "")
