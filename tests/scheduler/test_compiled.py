"""A compiled installation and the sources decide, write and say the same, byte for byte (decision 0094)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = [str(ROOT / room) for room in ("schemas", "bus", "scheduler", "worker", "client")]


def _run(verb: str, folder: Path, *, sources: bool) -> Any:
    """What `compiled_and_not` prints, run on the sources, or on what is installed."""
    seed = "0" if verb == "write" else "1"  # the worlds draw lots from sets of words, but no decision may
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(ROOMS if sources else []), "PYTHONHASHSEED": seed}
    command = [sys.executable, "-m", "tests.scheduler.compiled_and_not", verb, str(folder)]
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    is_compiled, found = json.loads(done.stdout)
    assert is_compiled is not sources
    return found


@pytest.mark.compiled
@pytest.mark.timeout(300)
def test_the_same_records_messages_and_replays(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "compiled", tmp_path / "sources"
    ours.mkdir()
    theirs.mkdir()
    assert _run("write", ours, sources=False) == _run("write", theirs, sources=True)
    assert (ours / "leader.rec").read_bytes() == (theirs / "leader.rec").read_bytes()
    crossed = [_run("read", ours, sources=True), _run("read", theirs, sources=False)]
    assert all(map(all, crossed))
    assert min(map(len, crossed)) > 10
