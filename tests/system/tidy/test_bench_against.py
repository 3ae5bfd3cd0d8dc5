"""`python -m bench.against`: what it makes of two trees' figures, and that nothing it starts outlives it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from bench import against
from bench.against import THEN, TODAY, Tree
from tests.waiting import until

HERE = Tree(against.ROOT, Path(sys.executable))


STARTS_ANOTHER: Final = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


def _is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


async def test_an_interrupt_ends_a_measurement_and_what_it_started() -> None:
    words = [sys.executable, "-c", STARTS_ANOTHER]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:  # noqa: ASYNC220
        assert process.stdout is not None
        started = int(process.stdout.readline())
        with pytest.raises(KeyboardInterrupt), against._ended(process):
            raise KeyboardInterrupt
    assert process.returncode is not None
    await until(lambda: _is_gone(started), 60, "the end of what it started")


@pytest.mark.slow
def test_a_tree_beside_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(against, "other", lambda ref: (ref * 5, HERE))
    assert against.main(["f77363cc", "--only", "fold", "--quick", "--rounds", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    [(figure, row)] = told["figures"].items()
    assert figure == "fold of a million, s"
    assert row["ratio"]["median"] == row[TODAY][0] / row[THEN][0] > 0
    assert told["line"].startswith("Today / f77363cc (1 round, quick, ")
